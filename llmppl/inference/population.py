"""Populations: the particles of a run, as one object that expands, steps, and is selected from.

The loop of `llmppl.inference.smc` sees a population alone. `Models` has a list of programs, whose own `step` runs.
`Rows` of `llmppl.inference.rows` runs texts under a constraint, all particles together. An expansion gives
*candidates*: the particles after the step, with the columns that selections and records read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmppl.distributions import Floats, Ints, logsumexp
from llmppl.inference.expansion import Extension
from llmppl.inference.particles import Death, deaths_of
from llmppl.models.choices import Sampled, State
from llmppl.models.model import untwist


@dataclass(frozen=True)
class Columns:
    """Columns of M candidates, each (M,); the attributes of `Extension` describe them.

    log_weights : after the step, twists included; -inf for a dead candidate
    """

    parents: Ints
    groups: Ints
    log_starts: Floats
    log_kept: Floats
    copies: Ints
    log_weights: Floats


class Candidates(Protocol):
    """M particles after a step, before selection."""

    columns: Columns

    @property
    def active(self) -> bool:
        """True if one of them has not finished."""

    def models(self) -> list[Any]:
        """Return them as programs."""

    def heaviest(self) -> Any:
        """Return the program of highest weight."""

    def limits(self) -> list[str]:
        """Return the errors of those whose context is too long for the model."""

    def deaths(self, step: int) -> Sequence[Death]:
        """Return the deaths among them."""

    def take(self, ancestors: Ints, log_weights: Floats, streams: Iterator[State]) -> Population:
        """Return the selected ones, with these log-weights."""


class Population(Protocol):
    """The n particles of a run.

    finished : (n,) bool
    log_weights : (n,) float, without twists
    """

    @property
    def finished(self) -> NDArray[np.bool_]: ...

    @property
    def log_weights(self) -> Floats: ...

    def models(self) -> list[Any]:
        """Return the particles as programs. The next step takes over what the caller has changed in them."""

    def texts(self) -> list[str]:
        """Return their texts."""

    def begin(self, expand: Any) -> Population:
        """Return the population that the next step expands by `expand`. It can be restored."""

    def restore(self) -> None:
        """Bring the particles back to the beginning of the step, which an exception has left."""

    def expand(self, run: Any) -> Candidates:
        """Return the candidates of a step of an `SMC`."""


class Models:
    """Population of programs."""

    def __init__(self, particles: list[Any]) -> None:
        self._particles = particles
        self._before: list[dict[str, Any]] = []

    @property
    def finished(self) -> NDArray[np.bool_]:
        return np.array([particle.finished for particle in self._particles], bool)

    @property
    def log_weights(self) -> Floats:
        return np.array([each.log_weight - each.log_twist for each in self._particles], np.float64)

    def models(self) -> list[Any]:
        return self._particles

    def texts(self) -> list[str]:
        return [str(particle) for particle in self._particles]

    def heaviest(self) -> Any:
        return max(self._particles, key=lambda particle: particle.log_weight)

    def limits(self) -> list[str]:
        return [particle._limit_ for particle in self._particles if particle._limit_]

    def begin(self, expand: Any) -> Models:
        for particle in self._particles:  # the caller may have finished it between two steps
            if particle.finished:
                untwist(particle)
        self._before = [vars(particle).copy() for particle in self._particles]
        return self

    def restore(self) -> None:
        """Bring back the attributes. Objects inside of them, such as lists, keep the changes of the step."""
        for particle, attributes in zip(self._particles, self._before, strict=True):
            vars(particle).clear()
            vars(particle).update(attributes)

    def expand(self, run: Any) -> ModelCandidates:
        return ModelCandidates(run.expand(run))


class ModelCandidates(Models):
    """Candidates that are programs."""

    def __init__(self, extensions: Sequence[Extension]) -> None:
        super().__init__([each.particle for each in extensions])
        self.columns = Columns(
            np.array([each.parent for each in extensions], np.int64),
            np.array([each.group for each in extensions], np.int64),
            np.array([each.log_start for each in extensions], np.float64),
            np.array([each.log_kept for each in extensions], np.float64),
            np.array([each.copies for each in extensions], np.int64),
            np.array([each.log_weight for each in self._particles], np.float64),
        )

    @property
    def active(self) -> bool:
        return not self.finished.all()

    def deaths(self, step: int) -> Sequence[Death]:
        return deaths_of(step, self._particles)

    def take(self, ancestors: Ints, log_weights: Floats, streams: Iterator[State]) -> Models:
        """Return the selected ones, with these log-weights. Further selections of one candidate are copies."""
        taken = []
        seen = set[int]()
        for ancestor, log_weight in zip(ancestors.tolist(), log_weights.tolist(), strict=True):
            particle = self._particles[ancestor]
            if ancestor in seen:
                particle = particle._spawn_(Sampled(next(streams)))
            seen.add(ancestor)
            particle._log_weight_ = log_weight
            taken.append(particle)
        return Models(taken)


def describe(population: Population) -> str:
    """Return the number of finished particles and the estimate of log Z after the last step in words."""
    finished = population.finished
    return f"{finished.sum()}/{finished.size} finished, log Z-hat {logsumexp(population.log_weights):z.2f}"
