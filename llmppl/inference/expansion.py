"""How a step is tried several times: which extensions of the particles are run.

*Copies* are K of every active particle, each with 1/K of its weight (Lew et al. 2023, Algorithm 1, to the letter).
*Merged* ones are the same, but those that made the same choices become one, with the weights of them all: to have
one of them twice tells nothing new. *Distinct* chooses the first choices of all particles together, without
replacement: a step is run up to its first `sample` of a finite support; the candidates (particle, value), each with the
weight of the particle times the probability of the value, go through the optimal down-sampler, and each that is kept is
run from the beginning of the step with that choice fixed; several times, with shares of its weight, if there are few of
them and the step chooses on. The down-sampler keeps the expected sum of any function over the candidates, and the
selection after the step does so again; so Z-hat stays unbiased.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable
from copy import deepcopy
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmppl.distributions import Distribution, Impossible, Proposal
from llmppl.inference.genealogy import Expansion
from llmppl.inference.resampling import logsumexp, optimal
from llmppl.inference.watch import Listed, Watch
from llmppl.models.model import Model
from llmppl.runtime import Runtime

M = TypeVar("M", bound=Model)
Indices = NDArray[np.int64]

EXPANSIONS = "distinct", "merged", "copies"


def step_copies(runtime: Runtime, particles: list[M], K: int, t: int, *, merge: bool) -> Expansion[M]:
    """K copies of every active particle, stepped, each with 1/K of its weight, and finished ones whole."""
    tries = list[_Try]()
    for i, particle in enumerate(particles):
        copies = [particle]
        if not particle.finished:
            particle.log_weight -= math.log(K)
            copies += [particle.spawn(stream) for stream in particle.rng.spawn(K - 1)]
        group = i if t > 1 else 0                       # all start at one state
        tries += [_Try(copy, i, group, moving=not particle.finished) for copy in copies]
    _run(runtime, tries, t, watch=merge)
    return _expansion(_merged(tries) if merge else tries)


def step_distinct(
    runtime: Runtime, particles: list[M], N: int, K: int, t: int, rng: np.random.Generator, watch: Watch
) -> Expansion[M]:
    """Extensions with distinct first choices, at most N K of them, stepped; finished particles whole.

    Where there are fewer, those that chose on after the first are run again, N K times in all, the heavier ones more
    often; equal ones are merged. A particle that draws before its first choice outside `sample`, or whose first choice
    has no finite support or is a weighted proposal (whose measure would have to be computed for every value), is copied
    K times (N K times if it is the only one). One that ends without a choice goes on once.

    Raises
    ------
    RuntimeError
        If a step chose by other means: run again, it did something else, or it drew from a stream of the process.
    """
    active = [i for i, particle in enumerate(particles) if not particle.finished]
    probes = {i: _Probe(particles[i]) for i in active}
    runtime.run([probe.run for probe in probes.values()], [f"particle {i} at step {t}" for i in active])
    quiet = [i for i, probe in probes.items() if probe.listed is None and not probe.free]
    if quiet:
        def run_again(i: int) -> None:
            runtime.run([_Probe(particles[i]).run], [f"particle {i} at step {t}"])

        watch.streams.check(functools.partial(run_again, i) for i in quiet)
    log_weights = {
        i: particles[i].log_weight - particles[i].log_twist + probe.log_probs
        for i, probe in probes.items()
        if probe.log_probs is not None
    }
    watch.chose = bool(log_weights)
    chosen = _choose(rng, log_weights, N * K)
    tries, groups = list[_Try](), itertools.count()
    for i, particle in enumerate(particles):
        if i in chosen:
            for stream, (place, log_weight) in zip(particle.rng.spawn(len(chosen[i])), chosen[i], strict=True):
                copy = particle.spawn(stream)
                copy.log_weight, copy.log_twist = log_weight, 0.0
                log_kept = min(log_weights[i][place] - log_weight, 0.0)
                tries.append(_Try(copy, i, next(groups), first=place, listed=probes[i].listed, log_kept=log_kept))
        elif i in probes and probes[i].free:
            number, group = N * K if len(particles) == 1 else K, next(groups)
            for stream in particle.rng.spawn(number):
                copy = particle.spawn(stream)
                copy.log_weight -= math.log(number)
                tries.append(_Try(copy, i, group))
        elif i not in log_weights:                      # else none of its candidates was kept
            going = _Try(particle, i, next(groups), moving=False)
            if i in probes:
                going.particle = probes[i].ended()
            tries.append(going)
    _run(runtime, tries, t)
    fixed = [each for each in tries if each.first is not None]
    tries = _merged(tries + _run_again(runtime, particles, fixed, N * K, t))
    return _expansion(sorted(tries, key=lambda each: each.parent))


def _run_again(runtime: Runtime, particles: list[M], tries: list[_Try], most: int, t: int) -> list[_Try]:
    """Further runs of those of `tries` that chose on after their first choice, until there are about `most` in all."""
    again = [each for each in tries if each.chose_on]
    log_starts = np.array([each.log_start for each in again])
    shares = np.exp(log_starts - logsumexp(log_starts))
    number = 1 + np.floor(max(most - len(tries), 0) * shares).astype(int)
    for each in tries:
        each.runs = 0
    more = list[_Try]()
    for each, n in zip(again, number.tolist(), strict=True):
        each.share(n)
        each.runs = 1 if n > 1 else -1
        particle = particles[each.parent]
        for stream in particle.rng.spawn(n - 1):
            copy: Any = particle.spawn(stream)
            copy.log_weight, copy.log_twist = each.log_start, 0.0
            once_more = _Try(
                copy, each.parent, each.group, first=each.first, listed=each.listed, log_kept=each.log_kept
            )
            more.append(once_more)
    _run(runtime, more, t)
    return more


def _choose(
    rng: np.random.Generator, log_weights: dict[int, NDArray[np.float64]], most: int
) -> dict[int, list[tuple[int, float]]]:
    """For each particle, the places of the values that are kept, with their new log-weights."""
    kept: dict[int, list[tuple[int, float]]] = {}
    if log_weights:
        owners = list(log_weights)
        ends = np.cumsum([len(each) for each in log_weights.values()])
        shuffled = rng.permutation(ends[-1])            # particles that are alike would be in step with even spacing
        chosen, weights = optimal(rng, np.concatenate(list(log_weights.values()))[shuffled], most)
        chosen = shuffled[chosen]
        order = np.argsort(chosen)
        chosen, weights = chosen[order], weights[order]
        which = np.searchsorted(ends, chosen, side="right")
        places = chosen - np.concatenate([[0], ends])[which]
        for owner, place, log_weight in zip(which.tolist(), places.tolist(), weights.tolist(), strict=True):
            kept.setdefault(owners[owner], []).append((place, log_weight))
    return kept


def _run(runtime: Runtime, tries: list[_Try], t: int, *, watch: bool = True) -> None:
    moving = [each for each in tries if each.moving]
    for each in moving if watch else ():
        each.watch()
    runtime.run([each.particle.step for each in moving], [f"particle {i} at step {t}" for i in range(len(moving))])
    for each in moving if watch else ():
        each.close()


def _merged(tries: list[_Try]) -> list[_Try]:
    """One of those of a parent that made the same choices, with the weights of all.

    At the first step all particles are alike; to merge across them would leave few to be extended at the next.
    """
    first: dict[Hashable, _Try] = {}
    left = list[_Try]()
    for each in tries:
        same = each if each.key is None else first.setdefault((each.parent, each.key), each)
        if same is each:
            left.append(each)
        else:
            same.join(each)
    return left


def _expansion(tries: list[_Try]) -> Expansion[Any]:
    return Expansion(
        [each.particle for each in tries],
        np.array([each.parent for each in tries], dtype=np.int64),
        np.array([each.group for each in tries], dtype=np.int64),
        np.array([each.log_start for each in tries], dtype=np.float64),
        np.array([each.log_kept for each in tries], dtype=np.float64),
        np.array([each.runs for each in tries], dtype=np.int64),
    )


class _Try:
    """A particle whose step is run, or that only goes along; if it is watched, what it chose in the step.

    parent, group : int
        Whose copy it is; tries of one group run the same independently.
    first : int, optional
        The place of its first choice in the support, if that is fixed; it was kept with probability exp(log_kept).
    listed : Listed, optional
        That choice.
    moving : bool
        Whether a step is to be run.
    log_start : float
        The log-weight before the step, without a twist.
    runs : int
        See `Expansion.copies`.
    key : hashable or None
        What it chose, if all of that is known.
    """

    def __init__(
        self, particle: Any, parent: int, group: int, *, first: int | None = None, listed: Listed | None = None,
        log_kept: float = 0.0, moving: bool = True,
    ) -> None:  # fmt: skip
        self.particle, self.parent, self.group = particle, parent, group
        self.first, self.listed, self.log_kept, self.moving = first, listed, log_kept, moving
        self.log_start: float = particle.log_weight - particle.log_twist
        self.runs = 1 if moving else 0
        self.key: Hashable | None = None
        self._rng = particle.rng
        self._outside = False
        self._choices: list[Any] = []

    @property
    def chose_on(self) -> bool:
        """Whether it drew more than its first choice."""
        return self._outside or len(self._choices) > 1

    def watch(self) -> None:
        if type(self.particle).draw is Model.draw:
            self.particle.draw, self.particle._rng = self._draw, _Watched(self._rng, self._drawn_outside)
        else:                                           # a draw of its own may choose by other means
            self._outside = True

    def close(self) -> None:
        """Give the particle its own methods back."""
        if self.listed is not None and not self._choices:
            raise self.listed.error("it ended without a choice")
        if type(self.particle).draw is Model.draw:
            del self.particle.draw
            self.particle._rng = self._rng
        choices = tuple(self._choices)
        try:
            hash(choices)
        except TypeError:                               # EOS and arrays, of which equal ones cannot be found
            return
        if not self._outside and self.particle.log_weight > -math.inf:
            self.key = choices

    def share(self, number: int) -> None:
        """Be one of `number` that share the weight."""
        self.log_start -= math.log(number)
        self.particle.log_weight -= math.log(number)

    def join(self, other: _Try) -> None:
        """Stand for another one, which chose the same, as well."""
        self.log_start = float(np.logaddexp(self.log_start, other.log_start))
        self.particle.log_weight = float(np.logaddexp(self.particle.log_weight, other.particle.log_weight))
        self.runs += other.runs

    def _draw(self, proposal: Proposal) -> tuple[Any, float]:
        if self.first is not None and self.listed is not None and not self._choices:
            self.listed.check(proposal, self.first)
            assert proposal.support is not None
            value, log_w = proposal.support[self.first], 0.0
        else:
            value, log_w = proposal.propose(self._rng)
        self._choices.append(value)
        return value, log_w

    def _drawn_outside(self) -> None:
        if self.listed is not None and not self._choices:
            raise self.listed.error("it drew from self.rng before")
        self._outside = True


class _Watched:
    """A random stream that tells when it is used other than by `sample`."""

    def __init__(self, rng: Any, tell: Callable[[], None]) -> None:
        self._rng, self._tell = rng, tell

    def __getattr__(self, name: str) -> Any:
        self._tell()
        return getattr(self._rng, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self._rng, memo)                # a program may keep it; it is replaced as the stream is


class _Left(BaseException):
    """Leaves a step at its first choice; no `except Exception` of a program holds it up."""


class _Stream:
    """Stands for a particle's random stream: whoever draws from it directly makes a choice that cannot be listed."""

    def __init__(self, probe: _Probe) -> None:
        self._probe = probe

    def __getattr__(self, name: str) -> Any:
        self._probe.free = True
        raise _Left

    def __deepcopy__(self, memo: dict[int, Any]) -> _Stream:
        return self


class _Probe:
    """A step run up to its first choice: what can be chosen, or that it ended without one, or that none can tell."""

    def __init__(self, particle: Model) -> None:
        self.original = particle
        self.log_probs: NDArray[np.float64] | None = None
        self.listed: Listed | None = None
        self.free = False
        spawned: Any = particle.spawn(_Stream(self))
        spawned.draw = self._draw
        self.particle = spawned

    def run(self) -> None:
        if type(self.particle).draw is not Model.draw:  # it may choose by other means
            self.free = True
            return
        try:
            self.particle.step()
        except _Left:
            del self.particle                           # it refers back here, and would keep its contexts until a gc

    def _draw(self, proposal: Proposal) -> tuple[Any, float]:
        if not isinstance(proposal, Distribution) or proposal.support is None:
            self.free = True
            raise _Left
        log_probs = proposal.log_probs()
        if logsumexp(log_probs) == -math.inf:
            raise Impossible(f"{proposal!r} has no value of positive probability")
        self.log_probs, self.listed = log_probs, Listed(proposal, log_probs)
        raise _Left

    def ended(self) -> Any:
        """The particle after its step, in which nothing was chosen."""
        del self.particle.draw
        self.particle._rng = self.original.rng
        return self.particle
