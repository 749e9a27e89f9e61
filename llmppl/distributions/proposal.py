"""Proposal and Distribution: what a program samples from and observes.

A `Proposal` is drawn from with a weight: it is *properly weighted* for a measure mu. A `Distribution` is one whose
weight is always 1 and whose measure is its probability. Asking either anything changes nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from llmppl.distributions.weights import Floats
from llmppl.support.arguments import shown
from llmppl.support.shared import Shared

if TYPE_CHECKING:                                       # a bare Proposal is one of Any, for checkers of any strictness
    from typing_extensions import TypeVar

    T_co = TypeVar("T_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)


class Impossible(ValueError):
    """A value was asked of a distribution that has none: every log-probability is -inf.

    `brief` is the message with the `Proposal.brief` of the distribution for its repr.
    """

    def __init__(self, message: str, brief: str = "") -> None:
        super().__init__(message)
        self.brief = brief or message


class Proposal(Shared, ABC, Generic[T_co]):
    """What `Model.sample` draws from: properly weighted for a measure mu on its values,

        E[w f(x)] = sum_x mu(x) f(x)  for every f,   where (x, log w) = propose(rng),

    whose total mass need not be 1. Subclass it with `propose` and `log_measure`, and with a `support` for
    `enumerate_exact`.

    Attributes
    ----------
    support : Sequence or None
        The values it can propose, in the order of `log_measures()`; None where they are infinitely many.
    recipe : tuple or None
        What it was made of, nested: proposals over one support with equal recipes are equal. None if unknown.
    """

    support: Sequence[T_co] | None = None
    recipe: tuple[Any, ...] | None = None

    @property
    def brief(self) -> str:
        """Its repr without what differs from one particle to the next, by which those that died alike are counted."""
        return repr(self)

    @abstractmethod
    def propose(self, rng: np.random.Generator) -> tuple[T_co, float]:
        """A value drawn with `rng`, and log w. Raises `Impossible` where mu is zero everywhere."""

    @abstractmethod
    def log_measure(self, value: Any) -> float:
        """log mu(value); -inf where mu is zero, which is never for a value that was proposed with a weight above 0."""

    def log_measures(self) -> Floats:
        """(n,) read-only float64: log mu of each value of the support. TypeError if that is infinite."""
        return _listed(self, "log-measures", self.log_measure)


class Distribution(Proposal[T_co]):
    """A normalised proposal: what is drawn always has weight 1. `log_probs()` are in the order of the `support`."""

    @abstractmethod
    def sample(self, rng: np.random.Generator) -> T_co:
        """One value drawn with `rng`. Raises `Impossible` where no value has positive probability."""

    @abstractmethod
    def log_prob(self, value: Any) -> float:
        """Log-probability of `value`; -inf outside the support."""

    def log_probs(self) -> Floats:
        """(n,) read-only float64: the log-probability of each value of the support. TypeError if that is infinite."""
        return _listed(self, "log-probabilities", self.log_prob)

    def propose(self, rng: np.random.Generator) -> tuple[T_co, float]:
        return self.sample(rng), 0.0

    def log_measure(self, value: Any) -> float:
        return self.log_prob(value)

    def log_measures(self) -> Floats:
        return self.log_probs()


def _listed(proposal: Proposal, what: str, log_of: Callable[[Any], float]) -> Floats:
    """(n,) read-only: `log_of` each value of the support."""
    if proposal.support is None:
        raise TypeError(f"{proposal} has no finite support, so its {what} cannot be listed")
    return frozen(weighable(proposal, np.array([log_of(value) for value in proposal.support], dtype=np.float64)))


def weighable(proposal: Proposal, logs: Floats) -> Floats:
    """The `logs` of its support; a ValueError that names the place if one of them is NaN or +inf."""
    if logs.size and not logs.max() < np.inf:           # so is NaN
        at = int(np.flatnonzero(~(logs < np.inf))[0])
        support: Any = proposal.support
        raise ValueError(
            f"{type(proposal).__name__} gives the value {shown(support[at])}, at index {at} of its support, the "
            f"log-weight {logs[at]}: it is finite, or -inf for what cannot happen"
        )
    return logs


def is_frozen(array: np.ndarray) -> bool:
    """Whether nobody can write to an array, nor to the one it is a view of."""
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable or base.dtype.hasobject:
            return False
        base = base.base
    return isinstance(base, (bytes, type(None)))


def frozen(array: Floats) -> Floats:
    """`array`, made read-only."""
    array.setflags(write=False)
    return array
