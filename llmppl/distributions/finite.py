"""Proposals, distributions, and those over finitely many values: the objects that a program samples from and observes.

A draw from a `Proposal` has a weight: it is *properly weighted* for a measure mu. A `Distribution` is a Proposal whose
weight is always 1 and whose measure is its probability. No method changes either of them.

The log-weights of a `Finite` need not be normalised, and are computed when first needed. Its `masked`, `tempered`,
`top_k`, `top_p` and `min_p` are Finite as well. Its `where(predicate)` is a `RejectionProposal`. A `Rule` is the change
that a decoder makes to the distribution of the next token before it draws.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import ArrayLike

from llmppl.distributions.blocks import ArrayTable, Floats, Table
from llmppl.distributions.rejection import weighted_rejection
from llmppl.support import arguments
from llmppl.support.shared import Shared

if TYPE_CHECKING:  # a bare Proposal is one of Any, for checkers of any strictness
    from typing_extensions import TypeVar

    T_co = TypeVar("T_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)

DecisionRule = Callable[[Any], Any]  # from a Finite to one over the same values


class Impossible(ValueError):
    """Error for a draw from a distribution whose log-probabilities are all -inf. In a program, the particle dies.

    Examples
    --------
    >>> try:
    ...     Uniform(1, 6).masked(np.zeros(6, bool)).sample(np.random.default_rng(0))
    ... except Impossible as error:
    ...     print(error)
    Uniform(1, 6).masked(no value) has no value of positive probability
    """


class Proposal(Shared, ABC, Generic[T_co]):
    """Base class of the objects that `Model.sample` draws from.

    A proposal is properly weighted for a measure mu on its values, whose total mass need not be 1:

        E[w f(x)] = sum_x mu(x) f(x)  for every f,   where (x, log w) = propose(rng).

    A subclass defines `propose` and `log_measure`, and `support` for `enumerate_exact`. Its repr should be equal for
    particles that differ in their texts alone, because deaths with equal reasons are counted together.

    Attributes
    ----------
    support : Sequence or None
        The possible values, in the order of `log_measures()`; None if there are infinitely many.

    Examples
    --------
    >>> class LoadedCoin(Proposal[bool]):
    ...     def propose(self, rng):
    ...         value = bool(rng.integers(2))                   # drawn from a fair coin
    ...         return value, self.log_measure(value) - math.log(0.5)
    ...     def log_measure(self, value):
    ...         return math.log(0.9 if value else 0.1)
    >>> value, log_w = LoadedCoin().propose(np.random.default_rng(0))
    >>> value, round(math.exp(log_w), 4)
    (True, 1.8)
    """

    support: Sequence[T_co] | None = None

    @abstractmethod
    def propose(self, rng: np.random.Generator) -> tuple[T_co, float]:
        """Draw a value with `rng`; return it and log w. Raise `Impossible` if mu is zero everywhere."""

    @abstractmethod
    def log_measure(self, value: Any) -> float:
        """Return log mu(value); -inf if mu is zero, as it never is for a value proposed with a weight above 0."""

    def log_measures(self) -> Floats:
        """Return (n,) float64, read-only: log mu of each value of the support. TypeError if the support is infinite."""
        if self.support is None:
            raise TypeError(f"{self} has no finite support, so its log-measures cannot be listed")
        return frozen(
            weighable(self, np.array([*map(self.log_measure, self.support)], dtype=np.float64))
        )


class Distribution(Proposal[T_co]):
    """Normalised proposal: every draw has weight 1. `log_probs()` are in the order of the `support`.

    Examples
    --------
    >>> class Coin(Distribution[str]):
    ...     support = ("heads", "tails")
    ...     def sample(self, rng):
    ...         return self.support[rng.integers(2)]
    ...     def log_prob(self, value):
    ...         return math.log(0.5) if value in self.support else -math.inf
    >>> np.exp(Coin().log_probs()).round(4)
    array([0.5, 0.5])
    """

    @abstractmethod
    def sample(self, rng: np.random.Generator) -> T_co:
        """Draw a value with `rng`. Raise `Impossible` if no value has positive probability."""

    @abstractmethod
    def log_prob(self, value: Any) -> float:
        """Return the log-probability of `value`; -inf outside the support."""

    def log_probs(self) -> Floats:
        """Return (n,) float64, read-only: the log-probability of each value. TypeError if the support is infinite."""
        return Proposal.log_measures(self)

    def propose(self, rng: np.random.Generator) -> tuple[T_co, float]:
        return self.sample(rng), 0.0

    def log_measure(self, value: Any) -> float:
        return self.log_prob(value)

    def log_measures(self) -> Floats:
        return self.log_probs()


class Finite(Distribution[T_co]):
    """Distribution over the values of a `support`. ValueError if hashable values are equal, or a weight is NaN or inf.

    Parameters
    ----------
    support : Sequence
    log_weights : (n,) array, or a callable that returns one
        Log-probabilities up to a constant; -inf for an impossible value. A callable is called when needed.
    parents : sequence of Finite
        The distributions that the callable uses.

    Examples
    --------
    >>> dist = Finite(["red", "green", "blue"], [0.0, 0.0, math.log(2)])
    >>> np.exp(dist.log_probs()).round(4)
    array([0.25, 0.25, 0.5 ])
    >>> dist.masked([True, True, False]).log_prob("blue")
    -inf
    """

    support: Sequence[T_co]

    def __init__(
        self,
        support: Sequence[T_co],
        log_weights: ArrayLike | Callable[[], Floats | Table],
        parents: Sequence[Finite[Any]] = (),
    ) -> None:
        with contextlib.suppress(TypeError):  # values that cannot be hashed are not compared
            if (
                not parents
                and isinstance(support, (list, tuple, str))
                and len(set(support)) < len(support)
            ):
                name = type(self).__name__
                values = arguments.shown(support)
                raise ValueError(
                    f"{name} wants distinct values, not {values}: give equal ones one probability"
                )
        self.support = support
        self._parents = tuple(parents)
        self._compute: Any = log_weights
        self._table: Table | None = None
        if not callable(log_weights):
            self._table = self._table_of(np.asarray(log_weights, dtype=np.float64))
        self._log_weights: Floats | None = None
        self._log_probs: Floats | None = None
        self._describe: Callable[[], str] | None = None
        self._derived: WeakValueDictionary[Hashable, Finite[T_co]] | None = None

    def table(self) -> Table:
        """Return the table of log-weights, not normalised and on their device. Draws and scores use it."""
        if self._table is None:
            for parent in self._parents:  # this may wait for a language model, while others call us
                parent.table()
            self._table = self._table or self._table_of(self._compute())
        return self._table

    def _table_of(self, found: Floats | Table) -> Table:
        if isinstance(found, Table):
            return found
        return ArrayTable(weighable(self, found))

    def log_weights(self) -> Floats:
        """Return (n,) float64 log-weights, not normalised."""
        if self._log_weights is None:
            self._log_weights = self.table().whole()
        return self._log_weights

    def log_total(self) -> float:
        """Return the log of the sum of the weights; -inf if no value is possible."""
        return self.table().log_total

    def log_probs(self) -> Floats:
        if self._log_probs is None:
            log_total = self.log_total()
            self._log_probs = self.table().whole(0.0 if log_total == -math.inf else log_total)
        return self._log_probs

    def log_prob(self, value: Any) -> float:
        return self.log_prob_of(self.indices(value))

    def log_prob_of(self, indices: Sequence[int]) -> float:
        """Return the log of the total probability of the values at some places of the support."""
        if len(indices) == 1:
            return self.log_prob_at(indices[0])
        logs = [*map(self.log_prob_at, indices)]
        return float(np.logaddexp.reduce(logs, initial=-math.inf))

    def indices(self, value: Any) -> Sequence[int]:
        """Return the places of `value` in the support; none if it is not there."""
        try:
            return [self.support.index(value)]
        except ValueError:
            return []

    def log_prob_at(self, index: int) -> float:
        """Return the log-probability of the value at `index` of the support."""
        log_weight = self.table().at(index)
        if log_weight > -math.inf:
            log_weight -= self.log_total()
        return log_weight

    def sample(self, rng: np.random.Generator) -> T_co:
        if self.log_total() == -math.inf:
            raise Impossible(f"{self!r} has no value of positive probability")
        return self.support[self.table().draw(rng)]

    def derive(
        self,
        compute: Callable[[], Floats | Table],
        describe: Callable[[], str],
        parents: Sequence[Finite[Any]] = (),
        *,
        key: Hashable = None,
    ) -> Finite[T_co]:
        """Return a distribution over the same values, with log-weights computed from `parents` (by default this one).

        `compute()` returns the log-weights, and `describe()` the repr. All calls with an equal `key` return one object,
        while that object lives.
        """
        if self._derived is None:
            self._derived = WeakValueDictionary()
        found = self._derived.get(key)
        if found is None:
            found = self._like(compute, parents or [self])
            found._describe = describe
            if key is not None:
                self._derived[key] = found
        return found

    def _like(
        self, compute: Callable[[], Floats | Table], parents: Sequence[Finite[Any]]
    ) -> Finite[T_co]:
        return Finite(self.support, compute, parents)

    def masked(self, mask: ArrayLike) -> Finite[T_co]:
        """Return this distribution conditioned on the values that `mask`, (n,) bool, allows.

        If these values have probability 0, sampling raises `Impossible` (in a program, the particle dies).
        """
        allowed = np.asarray(mask)
        if allowed.dtype != np.bool_:
            raise TypeError(f"a mask is an array of bool, not of {allowed.dtype}")
        if allowed.shape != (len(self.support),):
            raise ValueError(
                f"the mask has shape {allowed.shape}; {self} wants ({len(self.support)},)"
            )
        key: Hashable = id(allowed)  # particles in one state share it; the result keeps it alive
        if not is_frozen(allowed):  # later changes of the mask must have no effect
            key = allowed.tobytes()
            allowed = allowed.copy()
        return self.derive(
            lambda: self.table().masked(allowed),
            lambda: f"{self!r}.masked({'...' if allowed.any() else 'no value'})",
            key=key,
        )

    def where(self, predicate: Callable[[T_co], bool | np.bool_]) -> RejectionProposal[T_co]:
        """Return a proposal of values for which `predicate` is True, by adaptive weighted rejection sampling."""
        return RejectionProposal(self, predicate)

    def tempered(self, temperature: float) -> Finite[T_co]:
        """Return this distribution with probabilities raised to the power 1 / `temperature` and normalised.

        At temperature 0, the limit, the most probable value has probability 1; among equals, the first one.
        """
        if temperature == 0:
            return self.top_k(1)
        temperature = arguments.positive("temperature", temperature, ", or 0 for greedy decoding")

        def compute() -> Floats:
            log_weights = self.log_weights()
            top = log_weights.max()
            if top > -np.inf:  # -inf - -inf would be NaN
                log_weights = (log_weights - top) / temperature
            return log_weights

        return self.derive(
            compute, lambda: f"{self!r}.tempered({temperature:g})", key=("t", temperature)
        )

    def top_k(self, k: int) -> Finite[T_co]:
        """Return this distribution conditioned on the `k` most probable values; among equals, the first ones."""
        k = arguments.count("top_k: k", k)

        return self.derive(
            lambda: _most_probable(self.log_weights(), k),
            lambda: f"{self!r}.top_k({k})",
            key=("k", k),
        )

    def top_p(self, p: float) -> Finite[T_co]:
        """Return this distribution conditioned on the smallest set of most probable values with probability >= `p`."""
        p = arguments.probability("top_p: p", p, above_0=True)
        if p == 1:  # rounded sums would leave out some
            return self

        def compute() -> Floats:
            log_probs = self.log_probs()
            cumulated = np.cumsum(np.exp(np.sort(log_probs)[::-1]))
            return _most_probable(log_probs, int(cumulated.searchsorted(p)) + 1)

        return self.derive(compute, lambda: f"{self!r}.top_p({p:g})", key=("p", p))

    def min_p(self, p: float) -> Finite[T_co]:
        """Return this distribution conditioned on the values of at least `p` times the largest probability."""
        p = arguments.probability("min_p: p", p, above_0=True)

        def compute() -> Floats:
            log_weights = self.log_weights()
            return np.where(log_weights >= log_weights.max() + math.log(p), log_weights, -np.inf)

        return self.derive(compute, lambda: f"{self!r}.min_p({p:g})", key=("min_p", p))

    def __repr__(self) -> str:
        if self._describe is None:
            return f"Finite({len(self.support)} values)"
        return self._describe()


class RejectionProposal(Proposal[T_co]):
    """Proposal of the values of a distribution that satisfy a predicate. It tests only the values that it draws.

    Let A be the set of accepted values. The measure is mu(x) = p(x) on A, else 0; its total mass is p(A). Values are
    distributed exactly as p given A, and the weight is an unbiased estimate of p(A), whatever the value. A draw takes
    about 2 / p(A) + 1 calls of the predicate, while `masked` needs all of A. So use it if a test is expensive and A is
    not rare. `llmppl.distributions.rejection` has the method and its variance (Lipkin et al. 2025).

    The predicate takes a value (over tokens, a Token, EOS included) and returns a bool. It is called at most once for
    each value (`calls` times so far), and must be consistent for equal values. If no value of positive probability is
    accepted, a draw tests all of them and raises `Impossible` (in a program, the particle dies).

    Examples
    --------
    >>> even = Uniform(1, 1000).where(lambda n: n % 2 == 0)
    >>> value, log_w = even.propose(np.random.default_rng(0))
    >>> value, even.calls                                   # `masked` would need 1,000 calls
    (270, 5)
    """

    support: Sequence[T_co]

    def __init__(self, dist: Finite[T_co], predicate: Callable[[T_co], bool | np.bool_]) -> None:
        if not callable(predicate):
            raise TypeError(
                f"where() wants a predicate, a function to bool, not {predicate!r}; masked() takes a mask"
            )
        self.dist = dist
        self.predicate = predicate
        self.support = dist.support
        self._accepted: dict[int, bool] = {}  # results of the predicate, by index

    @property
    def calls(self) -> int:
        return len(self._accepted)

    def propose(self, rng: np.random.Generator) -> tuple[T_co, float]:
        rest = table = self.dist.table()
        while True:
            found = weighted_rejection(rng, rest, self._accepts)
            if found is not None:
                index, log_weight = found
                return self.support[index], log_weight - self.dist.log_total()
            # all weights that did not underflow were rejected: draw from the others, relative to their largest
            untested = np.ones(len(table), dtype=np.bool_)
            for index, accepted in list(self._accepted.items()):
                untested[index] = accepted
            rest = table.masked(untested)
            if rest.log_total == -math.inf:
                lacks = "satisfies the predicate" if self.calls else "has positive probability"
                raise Impossible(f"no value of {self.dist!r} {lacks}")

    def log_measure(self, value: Any) -> float:
        return self.dist.log_prob_of([*filter(self._accepts, self.dist.indices(value))])

    def log_measures(self, most: float = math.inf) -> Floats:
        """Return (n,) float64, read-only: log mu of each value, or of the `most` probable accepted ones and -inf.

        The values of positive probability are tested, the most probable first, until `most` are accepted.
        """
        log_probs = self.dist.log_probs()
        accepted = np.full(len(log_probs), -math.inf)
        for index in np.argsort(-log_probs, kind="stable").tolist():
            if not most or log_probs[index] == -math.inf:
                break
            if self._accepts(index):
                accepted[index] = log_probs[index]
                most -= 1
        return frozen(accepted)

    def _accepts(self, index: int) -> bool:
        if index not in self._accepted:
            self._accepted[index] = arguments.truth(
                "where: predicate", self.predicate, self.support[index]
            )
        return self._accepted[index]

    def __repr__(self) -> str:
        return f"{self.dist!r}.where({arguments.name_of(self.predicate)})"


def weighable(proposal: Proposal, logs: Floats) -> Floats:
    """Return `logs`, the log-weights of the support. A ValueError names the first one that is NaN or +inf."""
    if logs.size and not logs.max() < np.inf:  # also for NaN
        at = int(np.flatnonzero(~(logs < np.inf))[0])
        support: Any = proposal.support
        raise ValueError(
            f"{type(proposal).__name__} gives the value {arguments.shown(support[at])}, at index {at} of its support, "
            f"the log-weight {logs[at]}: it is finite, or -inf for what cannot happen"
        )
    return logs


def _most_probable(log_weights: Floats, k: int) -> Floats:
    """Return `log_weights` with -inf for all but the `k` largest; among equals, the first ones stay."""
    if k >= len(log_weights):
        return log_weights
    least = np.partition(log_weights, -k)[-k]
    keep = log_weights > least
    keep[np.flatnonzero(log_weights == least)[: k - int(keep.sum())]] = True
    return np.where(keep, log_weights, -np.inf)


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


@dataclass(frozen=True)
class Rule(Shared):
    """Temperature, then top-k, then top-p, then min-p. Each part renormalises the result of the one before.

    A rule may also be any other function from a distribution to one over the same values: `lambda dist: dist.top_k(4)`.

    Parameters
    ----------
    temperature : float >= 0
        Probabilities are raised to 1 / temperature. 0 is greedy decoding: texts under a constraint and spans then take
        the most probable token that the masks allow, and each has probability 1.
    top_k : int >= 1, optional
        Keep the k most probable values; among equals, the first ones.
    top_p : float in (0, 1], optional
        Keep the smallest set of most probable values whose probability is at least p (Holtzman et al. 2020).
    min_p : float in (0, 1], optional
        Keep values of at least `min_p` times the probability of the most probable one (Nguyen et al. 2025).

    Examples
    --------
    >>> round(Rule(top_k=2)(Categorical([0.5, 0.3, 0.2])).log_prob(1), 4)
    -0.9808
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        self(Finite([0], [0.0]).tempered(self.temperature))  # raises the errors of each part

    def __repr__(self) -> str:
        return f"Rule({', '.join(f'{name}={value!r}' for name, value in self._parts())})"

    def __call__(self, dist: Finite[T_co]) -> Finite[T_co]:
        for _, result in self.stages(dist):
            dist = result
        return dist

    def _parts(self) -> list[tuple[str, Any]]:
        """Return the names and values of the active parts, in order."""
        return [
            (name, value)
            for name, value in vars(self).items()
            if value not in (None, getattr(Rule, name))
        ]

    def stages(self, dist: Finite[T_co]) -> Iterator[tuple[str, Finite[T_co]]]:
        """Yield the active parts in order: the name of each and the distribution after it."""
        for name, value in self._parts():
            dist = getattr(dist, "tempered" if name == "temperature" else name)(value)
            yield f"{name}={value:g}", dist

    def excluded_by(self, dist: Finite, value: Any) -> str | None:
        """Return the first part that gives `value` probability 0, as "top_k=40"; None if no part does."""
        for name, result in self.stages(dist):
            if result.log_prob(value) == -math.inf:
                return name
        return None


NO_RULE = Rule()


def is_greedy(rule: DecisionRule) -> bool:
    """Return True for a Rule of temperature 0.

    Examples
    --------
    >>> is_greedy(Rule(temperature=0)), is_greedy(NO_RULE)
    (True, False)
    """
    return rule is not NO_RULE and isinstance(rule, Rule) and rule.temperature == 0
