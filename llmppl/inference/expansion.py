"""How a step is tried several times: which extensions of the particles are run.

*Independent* runs K copies of every active particle, each with 1/K of its weight (Lew et al. 2023, Algorithm 1).
*Merged* takes copies that made the same choices for one, with the weights of them all: to have one of them twice tells
nothing new. *Distinct* chooses the first choices of all particles together, without replacement: a step is run up to
its first `sample` of a finite support; the candidates (particle, value), each with the weight of the particle times the
probability of the value, go through the optimal down-sampler, and each that is kept is run from the beginning of the
step with that choice fixed. The down-sampler keeps the expected sum of any function over the candidates, and the
selection after the step does so again; so Z-hat stays unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmppl.inference.resampling import logsumexp, optimal
from llmppl.models.distributions import Distribution, Impossible
from llmppl.models.model import Model
from llmppl.runtime import Runtime

M = TypeVar("M", bound=Model)
Indices = NDArray[np.int64]

EXPANSIONS = "independent", "merged", "distinct"


def step_copies(runtime: Runtime, particles: list[M], K: int, t: int, *, merge: bool) -> tuple[list[M], Indices]:
    """K copies of every active particle, stepped, each with 1/K of its weight, and finished ones whole.

    Returns
    -------
    candidates : list of M
    parents : (len(candidates),) int, whose copy each is
    """
    candidates, parents = [], []
    for i, particle in enumerate(particles):
        copies = [particle]
        if not particle.finished:
            particle.log_weight -= math.log(K)
            copies += [particle.spawn(stream) for stream in particle.rng.spawn(K - 1)]
        candidates += copies
        parents += [i] * len(copies)
    moving = [i for i, candidate in enumerate(candidates) if not candidate.finished]
    records = [_Record(candidates[i]) for i in moving] if merge and K > 1 else []
    _run(runtime, [candidates[i] for i in moving], t)
    first: dict[Hashable, int] = {}                     # parent and choices -> place of the first copy that made them
    merged = set[int]()
    for i, record in zip(moving, records, strict=False):
        choices = record.close()
        if choices is not None:
            place = first.setdefault((parents[i], choices), i)
            if place != i:
                merged.add(i)
                kept = candidates[place]
                kept.log_weight = float(np.logaddexp(kept.log_weight, candidates[i].log_weight))
    left = [i for i in range(len(candidates)) if i not in merged]
    return [candidates[i] for i in left], np.array(parents)[left]


def step_distinct(
    runtime: Runtime, particles: list[M], N: int, K: int, t: int, rng: np.random.Generator
) -> tuple[list[M], Indices]:
    """Extensions with distinct first choices, at most N K of them, stepped; finished particles whole.

    A particle that draws before its first choice outside `sample`, or whose first choice has no finite support, is
    copied K times (N K times if it is the only one). One that ends without a choice goes on once.
    Returns are those of `step_copies`.
    """
    active = [i for i, particle in enumerate(particles) if not particle.finished]
    probes = {i: _Probe(particles[i]) for i in active}
    runtime.run([probe.run for probe in probes.values()], [f"particle {i} at step {t}" for i in active])
    log_weights = {
        i: particles[i].log_weight - particles[i].log_twist + probe.log_probs
        for i, probe in probes.items()
        if probe.log_probs is not None
    }
    chosen = _choose(rng, log_weights, N * K)
    candidates, parents, moving = list[M](), list[int](), list[M]()
    for i, particle in enumerate(particles):
        if i in chosen:
            streams = particle.rng.spawn(len(chosen[i]))
            copies = [particle.spawn(stream) for stream in streams]
            for candidate, (place, log_weight) in zip(copies, chosen[i], strict=True):
                candidate.log_weight, candidate.log_twist = log_weight, 0.0
                _fix_first(candidate, place)
            moving += copies
        elif i in probes and probes[i].free:
            number = N * K if len(particles) == 1 else K
            copies = [particle.spawn(stream) for stream in particle.rng.spawn(number)]
            for candidate in copies:
                candidate.log_weight -= math.log(number)
            moving += copies
        elif i in log_weights:                          # none of its candidates was kept
            continue
        else:
            copies = [probes[i].ended() if i in probes else particle]
        candidates += copies
        parents += [i] * len(copies)
    _run(runtime, moving, t)
    return candidates, np.array(parents, dtype=np.int64)


def _choose(
    rng: np.random.Generator, log_weights: dict[int, NDArray[np.float64]], most: int
) -> dict[int, list[tuple[int, float]]]:
    """For each particle, the places of the values that are kept, with their new log-weights."""
    kept: dict[int, list[tuple[int, float]]] = {}
    if log_weights:
        owners = list(log_weights)
        ends = np.cumsum([len(each) for each in log_weights.values()])
        chosen, weights = optimal(rng, np.concatenate(list(log_weights.values())), most)
        which = np.searchsorted(ends, chosen, side="right")
        places = chosen - np.concatenate([[0], ends])[which]
        for owner, place, log_weight in zip(which.tolist(), places.tolist(), weights.tolist(), strict=True):
            kept.setdefault(owners[owner], []).append((place, log_weight))
    return kept


def _run(runtime: Runtime, candidates: list[Any], t: int) -> None:
    names = [f"particle {i} at step {t}" for i in range(len(candidates))]
    runtime.run([candidate.step for candidate in candidates], names)


def _fix_first(particle: Any, place: int) -> None:
    """The next choice of a particle is the value at `place` of the support; those after it are its own."""

    def draw(dist: Distribution) -> Any:
        del particle.draw
        assert dist.support is not None
        return dist.support[place]

    particle.draw = draw


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
            return

    def _draw(self, dist: Distribution) -> Any:
        if dist.support is None:
            self.free = True
            raise _Left
        log_probs = dist.log_probs()
        if logsumexp(log_probs) == -math.inf:
            raise Impossible(f"{dist!r} has no value of positive probability")
        self.log_probs = log_probs
        raise _Left

    def ended(self) -> Any:
        """The particle after its step, in which nothing was chosen."""
        del self.particle.draw
        self.particle._rng = self.original.rng
        return self.particle


class _Record:
    """Writes down what a particle chooses in a step."""

    def __init__(self, particle: Any) -> None:
        self.particle, self.rng, self.outside = particle, particle.rng, False
        self.choices: list[Any] = []
        if type(particle).draw is Model.draw:
            particle.draw, particle._rng = self._draw, _Watched(self)
        else:                                           # a draw of its own may choose by other means
            self.outside = True

    def _draw(self, dist: Distribution) -> Any:
        value = dist.sample(self.rng)
        self.choices.append(value)
        return value

    def close(self) -> Hashable | None:
        """Give the particle its own methods back; its choices, or None if it drew otherwise."""
        if type(self.particle).draw is Model.draw:
            del self.particle.draw
            self.particle._rng = self.rng
        choices = tuple(self.choices)
        try:
            hash(choices)
        except TypeError:                               # EOS and arrays, of which equal ones cannot be found
            return None
        return None if self.outside or self.particle.log_weight == -math.inf else choices


class _Watched:
    """A random stream that tells when it is used other than by `sample`."""

    def __init__(self, record: _Record) -> None:
        self._record = record

    def __getattr__(self, name: str) -> Any:
        self._record.outside = True
        return getattr(self._record.rng, name)
