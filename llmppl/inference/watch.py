"""What a run demands of its program: that it can begin, chooses by `sample` or `self.rng` alone, goes on, and fits.

Inference runs a step more than once. Where that shows a choice by other means, `llmppl.models.choices.Listing` is the
one to tell; where a step made no choice that could be compared, `GlobalStreams` tells whether it drew elsewhere.
"""

from __future__ import annotations

import inspect
import random
import sys
import types
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from llmppl.arguments import shown
from llmppl.inference.branches import Advance, Branch
from llmppl.models.alike import first_difference, grown, grown_inside, snapshot
from llmppl.models.choices import INSTEAD, Sampled, last_choices
from llmppl.models.copies import STREAMS, survey
from llmppl.models.identity import is_own
from llmppl.models.model import Model, untwist, wrap_step
from llmppl.runtime import Runtime
from llmppl.shared import Shared

M = TypeVar("M", bound=Model)

MAX_QUIET = 1_000                                       # steps in a row in which nothing happened
MAX_LAW = 100                                           # values of a distribution whose probabilities are compared
_MUTABLE = (list, dict, deque, np.ndarray)
_AGAIN = 5                                              # runs of a step to be compared
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
    if [*model._noted_][-1:] not in ([], [None]):       # the first thing that it noted is no beginning of a step
        raise ValueError(f"{name} sampled before its first step, which gives all particles one value: sample in step()")
    first = model._spawn_(choosers[0])
    if first._kept_ is None:                             # a copy() of its own, which may share what it must not
        survey(model)
    return [first, *map(first._spawn_, choosers[1:])]


def cut(particles: Iterable[Model]) -> None:
    """End what has not finished, and mark it."""
    for particle in particles:
        untwist(particle)
        if not particle.finished:
            particle.finished = particle._cut_ = True


class Watch:
    """What is watched over the steps of one run.

    A run that is not `bounded` is not to go on for ever while nothing happens. A particle that asks for more than the
    model reads is cut there, and the run warns of the first. What all particles share is not to change: the data of the
    class, attributes in `shared` (which may grow, as a cache does), and distributions of one's own. And an attribute
    that a step has made is surveyed as those that were there before.

    streams : GlobalStreams
    """

    def __init__(self, runtime: Runtime, particle: Model, *, bounded: bool) -> None:
        self.streams, self.bounded = GlobalStreams(), bounded
        self._kept = particle._kept_ or survey(particle)
        self._laws = {path: dist.log_measures() for path, dist in self._kept.own.items() if _is_short(dist.support)}
        self._shared = {
            name: value for name, value in vars(particle).items()
            if name in self._kept.names and isinstance(value, _MUTABLE)
        }  # fmt: skip
        self._runtime = runtime
        name, kept = type(particle).__name__, self._kept
        self._data = {f"{cls.__name__}.{last}": (cls, last) for cls, last in _data_of(type(particle), kept.names)}
        self._held = {f"{name}.{last}": value for last, value in self._shared.items()}
        self._held |= {f"{name}.{path}": vars(dist) for path, dist in kept.own.items()}
        self._held |= _defaults_of(type(particle))
        values = {name: vars(cls)[last] for name, (cls, last) in self._data.items()}
        self._objects = {name: vars(value) for name, value in values.items() if _has_state(value)}
        self.look()
        self._quiet, self._warned = 0, False
        self._seen: Any = None

    def look(self) -> None:
        """Look at what all particles share, which the caller may have changed between two steps."""
        self._before = self._snapshots()

    def step(self, t: int, candidates: Sequence[Model], particles: Sequence[Model]) -> None:
        """Look at step `t`: what it ended in, and what was selected.

        Raises
        ------
        TypeError
            If a step made an attribute that would be wrong in a copy.
        ValueError
            If nothing but what is longer than the model reads came of the first step.
        RuntimeError
            If a step changed what all particles share, or nothing happened in so many steps that nothing will.
        """
        limits = [particle._limit_ for particle in candidates if particle._limit_]
        if t == 1 and limits and len(limits) == len(candidates):
            raise ValueError(limits[0])
        if limits and not self._warned:
            self._warned = True
            warnings.warn(
                f"step {t} reached the end of what the model reads; particles are cut there, and marked: {limits[0]}",
                stacklevel=_depth_of_caller(),
            )
        self._check_shared(t)
        for particle in candidates:
            survey(particle, self._kept)
        if not self.bounded:
            self._count_quiet(particles)

    def _snapshots(self) -> dict[str, Any]:
        found = {name: snapshot(vars(cls).get(last, self)) for name, (cls, last) in self._data.items()}
        found |= {f"{name}'s attributes": snapshot(state) for name, state in self._objects.items()}
        return found | {name: snapshot(value) for name, value in self._held.items()}

    def _check_shared(self, t: int) -> None:
        before, self._before = self._before, self._snapshots()
        if before == self._before:
            return
        for name, now in self._before.items():
            last, of_object, _ = name.partition(".")[2].partition("'s")
            may_grow = of_object or last in self._shared            # an object may work out a cached property
            if before.get(name) == now or (may_grow and grown(before.get(name), now)):
                continue
            dist = self._kept.own.get(last)             # which may keep what it has computed
            if dist is not None and grown_inside(before[name], now) and self._has_law(last, dist):
                continue
            raise RuntimeError(
                f"step {t} changed {name}, which all particles share: what one of them does there, others would "
                f"find. Make it in __init__, self.{last} = ..., and each particle has its own (of a distribution, keep "
                f'what it learns in the particle); or write shared = ("{last}",) in the class, if it is a cache'
            )

    def _has_law(self, path: str, dist: Any) -> bool:
        """Whether a distribution has the probabilities that it had when the run began, as far as that is known."""
        return path not in self._laws or np.array_equal(self._laws[path], dist.log_measures())

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


def _data_of(program: type[Model], but: Collection[str]) -> Iterator[tuple[type, str]]:
    """The data in a class and its bases below Model: no methods and the like."""
    for cls in program.__mro__[: program.__mro__.index(Model)]:
        for name, value in vars(cls).items():
            is_code = callable(value) or hasattr(type(value), "__get__") or name.startswith(("__", "_abc_"))
            if is_code or name in but:
                continue
            if isinstance(value, (Iterator, *STREAMS)):
                raise TypeError(
                    f"{cls.__name__}.{name} is {shown(value)}, which all particles share and every use changes: make "
                    "it in __init__, or in step(), and draw from self.rng"
                )
            yield cls, name


def _has_state(value: Any) -> bool:
    """Whether an object in a class is one of the user's own, which steps may change."""
    own = isinstance(value, types.SimpleNamespace) or is_own(type(value))
    return own and hasattr(value, "__dict__") and not isinstance(value, (Shared, Model))


def _defaults_of(program: type[Model]) -> dict[str, Any]:
    """The defaults of the methods of a class that are lists and the like."""
    found = dict[str, Any]()
    for name, method in inspect.getmembers(program, inspect.isfunction):
        values = inspect.unwrap(method).__defaults__ or ()
        if any(isinstance(value, _MUTABLE) for value in values):
            found[f"{program.__name__}.the defaults of {name}"] = values
    return found


def _is_short(support: Sequence[Any] | None) -> bool:
    return support is not None and len(support) <= MAX_LAW


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

    def check(self, branches: Mapping[int, Branch], advance: Advance) -> None:
        """A RuntimeError if one of these, which ended their step, drew from them.

        Where the states have moved, by whomever, a suspect is run again, and must come out as it was.
        """
        names = self._moved()
        for i, branch in branches.items() if names else ():
            for _ in range(_AGAIN):
                again = branch.again()
                advance([again.run], [i])
                if what := first_difference(branch.particle, again.particle):
                    raise RuntimeError(
                        f"a step drew from {' and '.join(names)}, which belong to the whole process: run again, "
                        f"{what}. What it chooses so is not weighed, nor fixed by seed=: {INSTEAD}"
                    )
                if not self._moved():
                    break

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
