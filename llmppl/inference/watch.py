"""What a run demands of its program: that it can begin, does the same when it is run again, goes on, and fits.

Inference runs a step more than once: up to its first choice, to list what can be chosen, and again with that choice
fixed. That is right only where a step depends on its particle alone and chooses by `sample` or `self.rng` alone. A
choice that was `Listed` is compared with what the step asks for when it is run again; where a step made no choice that
could be compared, `GlobalStreams` tells whether it drew elsewhere.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmppl.distributions import Finite, Proposal
from llmppl.inference.genealogy import Genealogy
from llmppl.inference.particles import Death, Particles
from llmppl.models.copies import survey
from llmppl.models.model import Model, make_whole, place, told
from llmppl.runtime import Runtime

M = TypeVar("M", bound=Model)
Floats = NDArray[np.float64]

QUIET = 1_000                                           # steps in a row in which nothing happened
_CLOSE = 0.01                                           # total variation: rounding in half precision stays below
_CLOSE_LOG = 0.05
_AGAIN = 3                                              # runs of a step in each of which a stream must have moved
_BY = "draw through self.sample(...) or self.rng, not from random, np.random, the time or the like"


def begin(model: M, streams: Sequence[Any]) -> list[M]:
    """A particle for each random stream; an error for what no run can begin with, or would be wrong in copies."""
    if not isinstance(model, Model):
        raise TypeError(f"inference wants a Model, an instance of your subclass, not {model!r}")
    name = type(model).__name__
    if "step" in vars(model):
        raise TypeError(f"step was assigned to an instance of {name}: write it in the class, or assign it to {name}")
    make_whole(type(model))                             # it may have been assigned to the class
    first = model.spawn(streams[0])
    if first._kept is None:                             # a copy() of its own, which may share what it must not
        survey(model)
    return [first, *(first.spawn(stream) for stream in streams[1:])]


def cut(particles: Iterable[Model]) -> None:
    """End what has not finished, and mark it."""
    for particle in particles:
        if not particle.finished:
            particle.untwist()
            particle.finished = particle.cut = True


class Watch:
    """What is watched over the steps of one run.

    A run without `max_steps` is not to go on for ever while nothing happens. A particle that asks for more than the
    model reads is cut there, and the run warns of the first.

    streams : GlobalStreams
    chose : bool
        To be set in a step that made choices which random streams do not show.
    """

    def __init__(self, runtime: Runtime, max_steps: int | None) -> None:
        self.streams, self.chose = GlobalStreams(), False
        self._runtime, self._bounded = runtime, max_steps is not None
        self._quiet, self._warned = 0, False
        self._seen: list[Any] = []
        self._asked = 0
        self._streams = set[str]()                      # states at the last quiet step

    def step(self, t: int, candidates: Sequence[Model], particles: Sequence[Model]) -> None:
        """Look at step `t`: what it ended in, and what was selected.

        Raises
        ------
        ValueError
            If nothing but what is longer than the model reads came of the first step.
        RuntimeError
            If nothing happened in so many steps that nothing will.
        """
        if any(particle.limit for particle in candidates):
            self._tell_limit(t, candidates)
        if not self._bounded:
            self._count_quiet(particles)

    def _tell_limit(self, t: int, candidates: Sequence[Model]) -> None:
        limits = [particle.limit for particle in candidates if particle.limit]
        if t == 1 and len(limits) == len(candidates):
            raise ValueError(limits[0])
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"step {t} reached the end of what the model reads; particles are cut there, and marked: {limits[0]}",
                stacklevel=5,
            )

    def _count_quiet(self, particles: Sequence[Model]) -> None:
        chose, self.chose = self.chose, False
        seen = [(particle.s, particle.log_weight, particle.finished) for particle in particles]
        if chose or seen != self._seen:
            self._quiet, self._seen = 0, seen
            return
        asked = self._runtime.stats.rounds + self._runtime.stats.hits
        before, self._streams = self._streams, set()
        drew = asked != self._asked
        streams: list[Any] = [particle.rng for particle in particles]
        bit_generators: list[Any] = [rng.bit_generator for rng in streams if isinstance(rng, np.random.Generator)]
        for bits in bit_generators:
            state = repr(bits.state)
            drew |= state not in before and state != repr(type(bits)(bits.seed_seq).state)      # nor a new one
            self._streams.add(state)
        self._asked = asked
        self._quiet = 0 if drew else self._quiet + 1
        if self._quiet == QUIET and particles:
            raise RuntimeError(
                f"{QUIET} steps of {type(particles[0]).__name__} in a row chose, weighed and wrote nothing, and asked "
                "no language model: end the program by self.finish(), or bound the run with max_steps="
            )


class Standing:
    """Around a run: gives an exception that leaves it `.particles`, those after the last whole step, marked cut.

    Where steps are run `in_place`, and not on copies, one that is left in the middle has changed particles: they get
    the attributes back that they had. What it changed in place, such as a list, stays as far as it came.
    """

    def __init__(self, runtime: Runtime, deaths: list[Death], history: Genealogy, *, in_place: bool) -> None:
        self._runtime, self._deaths, self._history, self._in_place = runtime, deaths, history, in_place
        self._kept: tuple[int, list[tuple[Model, float, dict[str, Any]]]] = 0, []

    def note(self, t: int, particles: Sequence[Model]) -> None:
        """Step `t` is whole, and left `particles`."""
        self._kept = t, [(p, p.log_weight, vars(p).copy() if self._in_place else {}) for p in particles]

    def __enter__(self) -> Standing:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if isinstance(error, (Exception, KeyboardInterrupt)):
            t, kept = self._kept
            for particle, log_weight, attributes in kept:
                if attributes:
                    vars(particle).clear()
                    vars(particle).update(attributes)
                particle.log_weight = log_weight
            particles = [particle for particle, *_ in kept]
            cut(particles)
            deaths = [death for death in self._deaths if death.step <= t]
            left = Particles(particles, stats=self._runtime.stats, deaths=deaths, steps=self._history.steps[:t])
            setattr(error, "particles", left)           # noqa: B010


class Listed:
    """A choice as it was listed, to be compared with what the step asks for when it is run again.

    Parameters
    ----------
    proposal : Proposal
        What was drawn from, of finite support.
    log_probs : (n,) float64
        The log-measure of its values.
    """

    __slots__ = ("_log_probs", "_place", "_proposal", "_recipe", "_support")

    def __init__(self, proposal: Proposal, log_probs: Floats) -> None:
        self._support, self._log_probs = proposal.support, log_probs
        self._recipe = proposal.recipe
        self._proposal = None if isinstance(proposal, Finite) else proposal       # which would hold (n,) arrays
        self._place = place(3)                          # __init__, the draw of a runner, and above it the verb

    def check(self, proposal: Proposal, at: int) -> None:
        """A RuntimeError unless `proposal` is the same distribution, of which the value at `at` is drawn again."""
        recipe = self._recipe
        if recipe is not None and proposal.support is self._support and _same(recipe, proposal.recipe):
            return
        if proposal is self._proposal:
            return
        self._check_support(proposal)
        if isinstance(proposal, Finite):
            self.check_measure(proposal.log_probs())
            return
        assert proposal.support is not None
        log_prob = proposal.log_measure(proposal.support[at])
        if not abs(log_prob - self._log_probs[at]) <= _CLOSE_LOG:
            raise self.error(f"the value {proposal.support[at]!r} had another probability")

    def check_all(self, proposal: Proposal, log_probs: Floats) -> None:
        """The same for one whose log-measure is known."""
        self._check_support(proposal)
        self.check_measure(log_probs)

    def check_measure(self, log_probs: Floats) -> None:
        if log_probs is self._log_probs or np.array_equal(log_probs, self._log_probs):
            return
        before, now = np.exp(self._log_probs), np.exp(log_probs)
        if 0.5 * np.abs(before - now).sum() > _CLOSE * max(1e-300, min(1.0, before.sum())):
            i = int(np.abs(before - now).argmax())
            value = None if self._support is None else self._support[i]
            raise self.error(f"{value!r} had the probability {before[i]:.4g} and then {now[i]:.4g}")

    def error(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"the step did something else when it was run again: at the sample {told(self._place)}, {what}. Inference "
            f"runs a step more than once, so what it does up to a choice must depend on its particle alone: {_BY}"
        )

    def _check_support(self, proposal: Proposal) -> None:
        before, now = self._support, proposal.support
        if now is before:
            return
        if now is None or before is None or len(now) != len(before):
            raise self.error(f"there were {len(before or ())} values, and then {'any' if now is None else len(now)}")
        if not _equal(before, now):
            raise self.error("it chose from other values")


def _same(a: Any, b: Any) -> bool:
    """Whether two recipes are equal. It runs once for every candidate of a step."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is tuple:
        if len(a) != len(b):
            return False
        for one, other in zip(a, b):                    # noqa: B905 strict= takes a third of the time
            if one is not other and not _same(one, other):
                return False
        return True
    if type(a) is np.ndarray:
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return bool(a == b)


def _equal(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Whether two supports are equal, as far as their values can be compared: objects made anew may not know it."""
    try:
        if before == now:
            return True
    except Exception:
        return True
    for a, b in zip(before, now, strict=True):
        if type(a) is not type(b):
            return False
        try:
            knows = any("__eq__" in vars(base) for base in type(a).__mro__[:-1])
            if knows and bool(a != b) and not bool(a != a):         # NaN is not equal to itself
                return False
        except Exception:
            continue
    return True


class GlobalStreams:
    """The states of the random streams that belong to the process, of which a step may use none."""

    def __init__(self) -> None:
        self._states = _states()

    def check(self, again: Iterable[Callable[[], None]]) -> None:
        """A RuntimeError if a step drew from them. `again` runs a suspect once more: another thread may have drawn, but
        hardly each time."""
        if self._moved():
            for run in again:
                for _ in range(_AGAIN):
                    run()
                    names = self._moved()
                    if not names:
                        break
                else:
                    raise RuntimeError(
                        f"a step drew from {' and '.join(names)}, which belong to the whole process; what it chooses "
                        f"so is not weighed, nor fixed by seed=: {_BY}"
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
