"""Proposal and Distribution: the objects that a program samples from and observes.

A draw from a `Proposal` has a weight: it is *properly weighted* for a measure mu. A `Distribution` is a Proposal whose
weight is always 1 and whose measure is its probability. No method changes either of them.
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
    """Error for a draw from a distribution without a possible value: every log-probability is -inf.

    `brief` is the message with the `Proposal.brief` of the distribution instead of its repr.
    """

    def __init__(self, message: str, brief: str = "") -> None:
        super().__init__(message)
        self.brief = brief or message


class Proposal(Shared, ABC, Generic[T_co]):
    """Base class of the objects that `Model.sample` draws from.

    A proposal is properly weighted for a measure mu on its values, whose total mass need not be 1:

        E[w f(x)] = sum_x mu(x) f(x)  for every f,   where (x, log w) = propose(rng).

    A subclass defines `propose` and `log_measure`, and `support` for `enumerate_exact`.

    Attributes
    ----------
    support : Sequence or None
        The possible values, in the order of `log_measures()`; None if there are infinitely many.
    recipe : tuple or None
        The parts from which it was made, nested. Proposals over one support with equal recipes are equal. None if
        unknown.
    """

    support: Sequence[T_co] | None = None
    recipe: tuple[Any, ...] | None = None

    @property
    def brief(self) -> str:
        """The repr without parts that differ between particles. Deaths with equal texts are counted together."""
        return repr(self)

    @abstractmethod
    def propose(self, rng: np.random.Generator) -> tuple[T_co, float]:
        """Draw a value with `rng`; return it and log w. Raise `Impossible` if mu is zero everywhere."""

    @abstractmethod
    def log_measure(self, value: Any) -> float:
        """Return log mu(value); -inf if mu is zero, as it never is for a value proposed with a weight above 0."""

    def log_measures(self) -> Floats:
        """Return (n,) float64, read-only: log mu of each value of the support. TypeError if the support is infinite."""
        return _listed(self, "log-measures", self.log_measure)


class Distribution(Proposal[T_co]):
    """Normalised proposal: every draw has weight 1. `log_probs()` are in the order of the `support`."""

    @abstractmethod
    def sample(self, rng: np.random.Generator) -> T_co:
        """Draw a value with `rng`. Raise `Impossible` if no value has positive probability."""

    @abstractmethod
    def log_prob(self, value: Any) -> float:
        """Return the log-probability of `value`; -inf outside the support."""

    def log_probs(self) -> Floats:
        """Return (n,) float64, read-only: the log-probability of each value. TypeError if the support is infinite."""
        return _listed(self, "log-probabilities", self.log_prob)

    def propose(self, rng: np.random.Generator) -> tuple[T_co, float]:
        return self.sample(rng), 0.0

    def log_measure(self, value: Any) -> float:
        return self.log_prob(value)

    def log_measures(self) -> Floats:
        return self.log_probs()


def _listed(proposal: Proposal, kind: str, log_of: Callable[[Any], float]) -> Floats:
    """Return (n,) read-only: `log_of` each value of the support."""
    if proposal.support is None:
        raise TypeError(f"{proposal} has no finite support, so its {kind} cannot be listed")
    return frozen(weighable(proposal, np.array([log_of(value) for value in proposal.support], dtype=np.float64)))


def weighable(proposal: Proposal, logs: Floats) -> Floats:
    """Return `logs`, the log-weights of the support. A ValueError names the first one that is NaN or +inf."""
    if logs.size and not logs.max() < np.inf:           # also for NaN
        at = int(np.flatnonzero(~(logs < np.inf))[0])
        support: Any = proposal.support
        raise ValueError(
            f"{type(proposal).__name__} gives the value {shown(support[at])}, at index {at} of its support, the "
            f"log-weight {logs[at]}: it is finite, or -inf for what cannot happen"
        )
    return logs


def is_frozen(array: np.ndarray) -> bool:
    """Return True if nobody can write to an array, nor to the arrays of which it is a view."""
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable or base.dtype.hasobject:
            return False
        base = base.base
    return isinstance(base, (bytes, type(None)))


def frozen(array: Floats) -> Floats:
    """Make `array` read-only and return it."""
    array.setflags(write=False)
    return array
