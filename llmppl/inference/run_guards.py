"""Checks of a program before a run and after each of its steps.

A program can begin, chooses by `sample` or `self.rng` alone, makes progress, fits the model's length, and changes
nothing that particles share. Inference runs a step more than once. If a repeated step chooses by other means,
`llmppl.models.choices.ListedChoice` raises the error. If it made no choice to compare, `GlobalRngGuard` does.
"""

from __future__ import annotations

import inspect
import random
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from llmppl.inference.partial_step import Advance, Branch
from llmppl.inference.resuming.fingerprint import is_own
from llmppl.models.alike import first_difference, grown, grown_inside, snapshot
from llmppl.models.choices import INSTEAD, Sampled, last_choices
from llmppl.models.copies import STREAMS, SharedParts, inspect_attributes, inspect_new_attributes
from llmppl.models.model import Model, untwist, wrap_step
from llmppl.support.arguments import shown
from llmppl.support.runtime import Runtime
from llmppl.support.shared import Shared

M = TypeVar("M", bound=Model)
T = TypeVar("T")

MAX_QUIET = 1_000                                       # steps in a row in which nothing happened
MAX_COMPARED = 100                                      # values of a distribution whose probabilities are compared
_MUTABLE = (list, dict, deque, np.ndarray)
_RERUNS = 5                                             # of a step, to be compared
_PACKAGE = __name__.partition(".")[0] + "."


def check_model(model: M) -> M:
    """Return `model`. Raise a TypeError if it is no Model."""
    if not isinstance(model, Model):
        raise TypeError(f"inference wants a Model, an instance of your subclass, not {shown(model)}")
    return model


def start_particles(model: M, choosers: Sequence[Sampled]) -> list[M]:
    """Return a particle for each chooser. Raise an error for a program that cannot run, or whose copies are wrong."""
    name = type(check_model(model)).__name__
    if "step" in vars(model):
        raise TypeError(f"step was assigned to an instance of {name}: write it in the class, or assign it to {name}")
    wrap_step(type(model))                              # it may have been assigned to the class
    if [*model._noted_][-1:] not in ([], [None]):       # its first record is not the beginning of a step
        raise ValueError(f"{name} sampled before its first step, which gives all particles one value: sample in step()")
    first = model._spawn_(choosers[0])
    if first._shared_parts_ is None:                             # its own copy() may share too much
        inspect_attributes(model)
    return [first, *map(first._spawn_, choosers[1:])]


def cut(particles: Iterable[Model]) -> None:
    """End the unfinished particles, and mark them as cut."""
    for particle in particles:
        untwist(particle)
        if not particle.finished:
            particle.finished = particle._cut_ = True


class _Watched(NamedTuple):
    """State that all particles share and no step may change.

    attribute : name under which a program finds it
    read : function of no argument that returns it
    may_grow : whether a step may add entries
    dist, log_probs : a distribution of the user, and its log-probabilities at the start if there are few
    """

    attribute: str
    read: Callable[[], Any]
    may_grow: bool = False
    dist: Any = None
    log_probs: Any = None

    def has_grown(self, before: Any, now: Any) -> bool:
        """Check whether the change from `before` to `now` only keeps computed results."""
        if self.dist is None:
            return self.may_grow and grown(before, now)
        known = self.log_probs is None or np.array_equal(self.log_probs, self.dist.log_measures())
        return grown_inside(before, now) and known


class Watch:
    """Checks after each step of one run.

    - A run without a bound on its steps ends if nothing happens for `MAX_QUIET` steps.
    - A particle that asks for more than the model reads is cut there. The run warns of the first one.
    - A step does not change state that all particles share: the data of the class, attributes in `shared` (which may
      grow, as a cache does) and the user's own distributions.
    - Attributes that a step has made pass the checks of the attributes that existed before the run.

    rng_guard : GlobalRngGuard
    """

    def __init__(self, runtime: Runtime, particle: Model, *, bounded: bool) -> None:
        self.rng_guard, self.bounded = GlobalRngGuard(), bounded
        self._kept = particle._shared_parts_ or inspect_attributes(particle)
        self._runtime = runtime
        self._watched = dict(_shared_state(particle, self._kept))
        self.look()
        self._quiet, self._warned = 0, False
        self._seen: Any = None

    def look(self) -> None:
        """Take a snapshot of the shared state, which the caller may have changed between two steps."""
        self._before = self._snapshots()

    def step(self, t: int, candidates: Sequence[Model], particles: Sequence[Model]) -> None:
        """Check step `t` by its candidates and the particles that were selected.

        Raises
        ------
        TypeError
            If a step made an attribute that would be wrong in a copy.
        ValueError
            If the first step asked for more than the model reads in every particle.
        RuntimeError
            If a step changed shared state, or if nothing happened in `MAX_QUIET` steps.
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
            inspect_new_attributes(particle, self._kept)
        if not self.bounded:
            self._count_quiet(particles)

    def _snapshots(self) -> dict[str, Any]:
        return {name: snapshot(watched.read()) for name, watched in self._watched.items()}

    def _check_shared(self, t: int) -> None:
        before, self._before = self._before, self._snapshots()
        for name, now in self._before.items() if before != self._before else ():
            watched = self._watched[name]
            if before[name] == now or watched.has_grown(before[name], now):
                continue
            attribute = watched.attribute
            raise RuntimeError(
                f"step {t} changed {name}, which all particles share, so that the steps of one particle change "
                f"another. Make it in __init__, self.{attribute} = ..., and each particle has its own (of a "
                "distribution, keep what it learns in the particle); or write "
                f'shared = ("{attribute}",) in the class, if it is a cache'
            )

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


def _shared_state(particle: Model, kept: SharedParts) -> Iterator[tuple[str, _Watched]]:
    """Yield the state that copies of `particle` share and that a step could change, with names for errors."""
    program = type(particle)
    for cls in program.__mro__[: program.__mro__.index(Model)]:
        for name, value in vars(cls).items():
            is_code = callable(value) or hasattr(type(value), "__get__") or name.startswith(("__", "_abc_"))
            if is_code or name in kept.names:
                continue
            if isinstance(value, (Iterator, *STREAMS)):
                raise TypeError(
                    f"{cls.__name__}.{name} is {shown(value)}, which all particles share and every use changes: make "
                    "it in __init__, or in step(), and draw from self.rng"
                )
            yield f"{cls.__name__}.{name}", _Watched(name, partial(vars(cls).get, name))
            if _has_state(value):                       # may_grow: it may compute a cached property
                yield f"{cls.__name__}.{name}'s attributes", _Watched(name, partial(vars, value), may_grow=True)
    for name, method in inspect.getmembers(program, inspect.isfunction):
        defaults = inspect.unwrap(method).__defaults__ or ()
        if any(isinstance(value, _MUTABLE) for value in defaults):
            of = f"the defaults of {name}"
            yield f"{program.__name__}.{of}", _Watched(of, partial(_itself, defaults))
    for name, value in vars(particle).items():
        if name in kept.names and isinstance(value, _MUTABLE):
            yield f"{program.__name__}.{name}", _Watched(name, partial(_itself, value), may_grow=True)
    for path, dist in kept.own_distributions.items():
        is_short = dist.support is not None and len(dist.support) <= MAX_COMPARED
        log_probs = dist.log_measures() if is_short else None
        yield f"{program.__name__}.{path}", _Watched(path, partial(vars, dist), dist=dist, log_probs=log_probs)


def _itself(value: T) -> T:
    return value


def _has_state(value: Any) -> bool:
    """Check whether an object in a class has attributes that a step may change: a class of the user made it."""
    own = isinstance(value, types.SimpleNamespace) or is_own(type(value))
    return own and hasattr(value, "__dict__") and not isinstance(value, (Shared, Model))


def _depth_of_caller() -> int:
    """Return the `stacklevel` of the line that called this package."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        depth, frame = depth + 1, frame.f_back
    return depth


class GlobalRngGuard:
    """Guard of the random streams of the process, from which no step may draw."""

    def __init__(self) -> None:
        self._states = _states()

    def check(self, branches: Mapping[int, Branch], advance: Advance) -> None:
        """Raise a RuntimeError if one of these branches, whose steps ended, drew from the streams.

        If the states have changed, for whatever reason, each branch runs again and must give the same particle.
        """
        names = self._moved()
        for i, branch in branches.items() if names else ():
            for _ in range(_RERUNS):
                rerun = branch.copy()
                advance([rerun.run], [i])
                if difference := first_difference(branch.particle, rerun.particle):
                    raise RuntimeError(
                        f"a step drew from {' and '.join(names)}, which belong to the whole process: run again, "
                        f"{difference}. Such choices are not weighed, nor fixed by seed=: {INSTEAD}"
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
