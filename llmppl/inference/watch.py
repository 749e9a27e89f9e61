"""What a run demands of its program: that it can begin, chooses by `sample` or `self.rng` alone, goes on, and fits.

Inference runs a step more than once. Where that shows a choice by other means, `llmppl.models.choices.Listing` is the
one to tell; where a step made no choice that could be compared, `GlobalStreams` tells whether it drew elsewhere.
"""

from __future__ import annotations

import operator
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from llmppl.arguments import shown
from llmppl.models.choices import INSTEAD, Sampled, last_choices
from llmppl.models.copies import survey
from llmppl.models.model import Model, untwist, wrap_step
from llmppl.runtime import Runtime

M = TypeVar("M", bound=Model)

MAX_QUIET = 1_000                                       # steps in a row in which nothing happened
MAX_COMPARED = 1_000                                    # entries of a list of the class
_AGAIN = 3                                              # runs of a step in each of which a stream must have moved
_PACKAGE = __name__.partition(".")[0] + "."


def checked(model: M) -> M:
    """`model`; a TypeError if it is none."""
    if not isinstance(model, Model):
        raise TypeError(f"inference wants a Model, an instance of your subclass, not {shown(model)}")
    return model


def begin(model: M, choosers: Sequence[Sampled]) -> list[M]:
    """A particle for each chooser; an error for what no run can begin with, or would be wrong in copies."""
    name = type(checked(model)).__name__
    if "step" in vars(model):
        raise TypeError(f"step was assigned to an instance of {name}: write it in the class, or assign it to {name}")
    wrap_step(type(model))                              # it may have been assigned to the class
    first = model.spawn(choosers[0])
    if first._kept is None:                             # a copy() of its own, which may share what it must not
        survey(model)
    return [first, *map(first.spawn, choosers[1:])]


def cut(particles: Iterable[Model]) -> None:
    """End what has not finished, and mark it."""
    for particle in particles:
        if not particle.finished:
            untwist(particle)
            particle.finished = particle.cut = True


class Watch:
    """What is watched over the steps of one run.

    A run that is not `bounded` is not to go on for ever while nothing happens. A particle that asks for more than the
    model reads is cut there, and the run warns of the first; and of a list of the class that a step has changed.

    streams : GlobalStreams
    """

    def __init__(self, runtime: Runtime, program: type[Model], *, bounded: bool) -> None:
        self.streams, self.bounded = GlobalStreams(), bounded
        self._lists = {
            f"{cls.__name__}.{name}": (value, value.copy())
            for cls in program.__mro__
            for name, value in vars(cls).items()
            if isinstance(value, list) and len(value) <= MAX_COMPARED
        }
        self._runtime = runtime
        self._quiet, self._warned = 0, False
        self._seen: Any = None

    def step(self, t: int, candidates: Sequence[Model], particles: Sequence[Model]) -> None:
        """Look at step `t`: what it ended in, and what was selected.

        Raises
        ------
        ValueError
            If nothing but what is longer than the model reads came of the first step.
        RuntimeError
            If nothing happened in so many steps that nothing will.
        """
        limits = [particle.limit for particle in candidates if particle.limit]
        if t == 1 and limits and len(limits) == len(candidates):
            raise ValueError(limits[0])
        if limits and not self._warned:
            self._warned = True
            warnings.warn(
                f"step {t} reached the end of what the model reads; particles are cut there, and marked: {limits[0]}",
                stacklevel=_depth_of_caller(),
            )
        changed = next((name for name, lists in self._lists.items() if not _same(*lists)), None)
        if changed is not None:
            self._lists.clear()
            warnings.warn(
                f"step {t} changed {changed}, a list of the class, which all particles share: make it in __init__, "
                f"self.{changed.partition('.')[2]} = [...], and each particle has its own",
                stacklevel=_depth_of_caller(),
            )
        if not self.bounded:
            self._count_quiet(particles)

    def _count_quiet(self, particles: Sequence[Model]) -> None:
        stats, before = self._runtime.stats, self._seen
        self._seen = [(p.s, p.log_weight, p.finished) for p in particles], stats.rounds + stats.hits
        chose = any(last_choices(particle) for particle in particles if not particle.finished)
        self._quiet = 0 if chose or self._seen != before else self._quiet + 1
        if self._quiet == MAX_QUIET and particles:
            raise RuntimeError(
                f"{MAX_QUIET} steps of {type(particles[0]).__name__} in a row chose, weighed and wrote nothing, and "
                "asked no language model: end the program by self.finish(), or bound the run with max_steps="
            )


def _same(list_: list[Any], before: list[Any]) -> bool:
    return len(list_) == len(before) and all(map(operator.is_, list_, before))


def _depth_of_caller() -> int:
    """The `stacklevel` of the line that called this package."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        depth, frame = depth + 1, frame.f_back
    return depth


class GlobalStreams:
    """The states of the random streams that belong to the process, of which a step may use none."""

    def __init__(self) -> None:
        self._states = _states()

    def check(self, again: Iterable[Callable[[], None]]) -> None:
        """A RuntimeError if a step drew from them. `again` runs a suspect once more: another thread may have drawn, but
        hardly each time."""
        if not self._moved():
            return
        for run in again:
            names = ["some"]
            for _ in range(_AGAIN):
                if names:
                    run()
                    names = self._moved()
            if names:
                raise RuntimeError(
                    f"a step drew from {' and '.join(names)}, which belong to the whole process; what it chooses so is "
                    f"not weighed, nor fixed by seed=: {INSTEAD}"
                )

    def _moved(self) -> list[str]:
        before, self._states = self._states, _states()
        return [name for name, state in self._states.items() if before.get(name, state) != state]


def _states() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()           # noqa: NPY002
    states: dict[str, Any] = {"random": random.getstate(), "np.random": (name, np.asarray(keys).tobytes(), *rest)}
    torch = sys.modules.get("torch")
    if torch is not None:
        states["torch's random stream"] = bytes(torch.random.get_rng_state().numpy())
    return states
