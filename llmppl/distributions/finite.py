"""Finite: a distribution over finitely many values, and the distributions derived from it.

Its log-weights need not be normalised, and are computed when first needed. The results of `masked`, `tempered`,
`top_k`, `top_p`, `product` and `mixture` are Finite as well. The result of `where(predicate)` is a `RejectionProposal`,
which tests only the values that it draws.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import ArrayLike

from llmppl.distributions.blocks import ArrayTable, Table
from llmppl.distributions.proposal import Distribution, Impossible, Proposal, T_co, frozen, is_frozen, weighable
from llmppl.distributions.rejection import weighted_rejection
from llmppl.distributions.weights import Floats
from llmppl.support import arguments
from llmppl.support.locks import let_through

_NUCLEUS = 512, 4096, sys.maxsize                       # numbers of the most probable values that top_p sorts
Name = Callable[[Any], str]                             # of a distribution: its repr, or its `brief`


class Finite(Distribution[T_co]):
    """Distribution with finite support.

    Parameters
    ----------
    support : Sequence
        The values.
    log_weights : (n,) array, or a callable that returns one
        Log-probabilities up to a constant; -inf for an impossible value. A callable is called once, when needed.
    parents : sequence of Finite
        The distributions that the callable uses.

    Raises
    ------
    ValueError
        If two values are equal, since the mass of one would be lost. Unhashable values are compared one by one, if
        there are at most 200.
    """

    support: Sequence[T_co]

    def __init__(
        self,
        support: Sequence[T_co],
        log_weights: ArrayLike | Callable[[], Floats | Table],
        parents: Sequence[Finite[Any]] = (),
    ) -> None:
        if not parents and isinstance(support, (list, tuple, str)) and _repeats(support):
            name, values = type(self).__name__, arguments.shown(support)
            raise ValueError(f"{name} wants distinct values, not {values}: give equal ones one probability")
        self.support = support
        self._parents = tuple(parents)
        self._compute: Callable[[], Floats | Table] | None = None
        self._table: Table | None = None
        if callable(log_weights):
            self._compute = log_weights
        else:
            array = weighable(self, np.asarray(log_weights, dtype=np.float64))
            self._table, self.recipe = ArrayTable(array), (array,)
        self._log_weights: Floats | None = None
        self._log_probs: Floats | None = None
        self._describe: Callable[[Name], str] | None = None
        self._masked: WeakValueDictionary[int, Finite[T_co]] | None = None
        self._derived: WeakValueDictionary[Any, Finite[T_co]] | None = None
        self._mask: Any = None                          # (n,) bool, the mask that made it

    def table(self) -> Table:
        """Return the table of log-weights, not normalised and on their device. Draws and scores use it."""
        if self._table is not None:
            return self._table
        for parent in self._parents:                    # this may wait for a language model, while others call us
            parent.table()
        compute = self._compute                         # read once: another thread may set it to None
        if self._table is None and compute is not None:
            found = compute()
            self._table = found if isinstance(found, Table) else ArrayTable(weighable(self, found))
        self._compute, self._parents = None, ()
        assert self._table is not None
        return self._table

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
        logs = [self.log_prob_at(index) for index in self.indices(value)]
        return logs[0] if len(logs) == 1 else float(np.logaddexp.reduce(logs, initial=-math.inf))

    def indices(self, value: Any) -> Sequence[int]:
        """Return the places of `value` in the support; none if it is not there."""
        try:
            return [self.support.index(value)]
        except ValueError:
            return []

    def log_prob_at(self, index: int) -> float:
        """Return the log-probability of the value at `index` of the support."""
        log_weight = self.table().at(index)
        return log_weight if log_weight == -math.inf else log_weight - self.log_total()

    def sample(self, rng: np.random.Generator) -> T_co:
        if self.log_total() == -math.inf:
            raise self.impossible()
        return self.support[self.table().draw(rng)]

    def impossible(self) -> Impossible:
        """Return the error for a draw if no value is possible."""
        reason = "has no value of positive probability"
        return Impossible(f"{self!r} {reason}", f"{self.brief} {reason}")

    def derive(
        self,
        compute: Callable[[], Floats | Table],
        describe: Callable[[Name], str],
        parents: Sequence[Finite] | None = None,
        *,
        by: tuple[Any, ...] | None = None,
    ) -> Finite[T_co]:
        """Return a distribution over the same values, with log-weights computed from `parents` (by default this one).

        Parameters
        ----------
        compute : callable
            Returns the log-weights.
        describe : callable
            `describe(name)` returns the repr or the `brief`. It uses `name` for other distributions.
        parents : sequence of Finite, optional
        by : tuple, optional
            Name of the computation and everything else on which it depends. Without `parents`, it is hashable, and
            all calls with equal `by` return one object while that object lives.
        """
        shared: WeakValueDictionary[Any, Finite[T_co]] | None = None
        if parents is None and by is not None:
            shared = self._derived = self._derived or WeakValueDictionary()
            if (known := shared.get(by)) is not None:
                return known
        parents = [self] if parents is None else parents
        dist = self._like(compute, parents)
        dist._describe = describe
        if by is not None and all(parent.recipe is not None for parent in parents):
            dist.recipe = (*by, *(parent.recipe for parent in parents))
        if shared is not None and by is not None:
            shared[by] = dist
        return dist

    def _like(self, compute: Callable[[], Floats | Table], parents: Sequence[Finite[Any]]) -> Finite[T_co]:
        return Finite(self.support, compute, parents)

    def masked(self, mask: ArrayLike) -> Finite[T_co]:
        """Return this distribution conditioned on the values that `mask`, (n,) bool, allows.

        If these values have probability 0, sampling raises `Impossible` (in a program, the particle dies).
        """
        allowed = np.asarray(mask)
        if allowed.dtype != np.bool_:
            raise TypeError(f"a mask is an array of bool, not of {allowed.dtype}")
        if allowed.shape != (len(self.support),):
            raise ValueError(f"the mask has shape {allowed.shape}; {self} wants ({len(self.support)},)")
        self._masked = self._masked or WeakValueDictionary()
        dist = self._masked.get(id(allowed))            # particles in one state share it. It keeps its mask alive
        if not is_frozen(allowed):                      # later changes of the mask must have no effect
            dist = next((each for each in self._masked.values() if np.array_equal(each._mask, allowed)), None)
            allowed = allowed.copy() if dist is None else allowed
        if dist is not None:
            return dist

        def describe(name: Name) -> str:
            if name is repr:
                return f"{self!r}.masked({allowed.sum()} of {len(allowed)} values)"
            return f"{name(self)}.masked({'...' if allowed.any() else 'no value'})"

        dist = self.derive(lambda: self.table().masked(allowed), describe, [self], by=("masked", allowed))
        dist._mask = allowed
        self._masked[id(allowed)] = dist
        return dist

    def where(self, predicate: Callable[[T_co], bool | np.bool_]) -> RejectionProposal[T_co]:
        """Return a proposal of values for which `predicate` is True, by adaptive weighted rejection sampling."""
        return RejectionProposal(self, predicate)

    def tempered(self, temperature: float) -> Finite[T_co]:
        """Return this distribution with probabilities raised to the power 1 / `temperature` and normalised."""
        temperature = arguments.positive("temperature", temperature, " (greedy is top_k=1)")

        def compute() -> Floats:
            log_weights = self.log_weights()
            top = log_weights.max()
            return (log_weights - top) / temperature if top > -np.inf else log_weights      # -inf - -inf would be NaN

        by = "tempered", temperature
        return self.derive(compute, lambda name: f"{name(self)}.tempered({temperature:g})", by=by)

    def top_k(self, k: int) -> Finite[T_co]:
        """Return this distribution conditioned on the `k` most probable values; among equals, the first ones."""
        k = arguments.count("top_k: k", k)

        def compute() -> Floats:
            log_weights = self.log_weights()
            if k >= len(log_weights):
                return log_weights
            least = np.partition(log_weights, len(log_weights) - k)[len(log_weights) - k]
            keep = log_weights > least
            keep[np.flatnonzero(log_weights == least)[: k - int(keep.sum())]] = True
            return np.where(keep, log_weights, -np.inf)

        return self.derive(compute, lambda name: f"{name(self)}.top_k({k})", by=("top_k", k))

    def top_p(self, p: float) -> Finite[T_co]:
        """Return this distribution conditioned on the smallest set of most probable values with probability >= `p`."""
        p = arguments.probability("top_p: p", p, above_0=True)

        def compute() -> Floats:
            log_probs = self.log_probs()
            for most in _NUCLEUS:                       # sorting all values takes ten times longer
                if most < len(log_probs):
                    least = np.partition(log_probs, len(log_probs) - most)[len(log_probs) - most]
                    values = np.flatnonzero(log_probs > least)
                else:
                    values = np.arange(len(log_probs))
                values = values[np.argsort(-log_probs[values], kind="stable")]
                probs = np.exp(log_probs[values])
                cumulated = np.cumsum(probs)
                if most >= len(log_probs) or (len(values) and cumulated[-1] >= p):
                    break
            kept = values[cumulated - probs < p]
            log_weights: Floats = np.full(len(log_probs), -np.inf)
            log_weights[kept] = log_probs[kept]
            return log_weights

        return self.derive(compute, lambda name: f"{name(self)}.top_p({p:g})", by=("top_p", p))

    def __repr__(self) -> str:
        return self._describe(repr) if self._describe is not None else f"Finite({len(self.support)} values)"

    @property
    def brief(self) -> str:
        return self._describe(attrgetter("brief")) if self._describe is not None else repr(self)


class RejectionProposal(Proposal[T_co]):
    """Proposal of the values of a distribution that satisfy a predicate. It tests only the values that it draws.

    Let A be the set of accepted values. The measure is mu(x) = p(x) on A, else 0; its total mass is p(A). Values are
    distributed exactly as p given A, and the weight is an unbiased estimate of p(A), whatever the value. A draw takes
    about 2 / p(A) + 1 calls of the predicate, while `masked` needs all of A. So use it if a test is expensive and A is
    not rare. `llmppl.distributions.rejection` has the method and its variance (Lipkin et al. 2025).

    The predicate takes a value (over tokens, a Token, EOS included) and returns a bool. It is called at most once for
    each value (`calls` times so far), and must be consistent for equal values. If no value of positive probability is
    accepted, a draw tests all of them and raises `Impossible` (in a program, the particle dies).
    """

    support: Sequence[T_co]

    def __init__(self, dist: Finite[T_co], predicate: Callable[[T_co], bool | np.bool_]) -> None:
        if not callable(predicate):
            raise TypeError(
                f"where() wants a predicate, a function from a value to True or False, not {predicate!r}; "
                "masked() takes a mask"
            )
        self.dist, self.predicate, self.support = dist, predicate, dist.support
        self._accepted: dict[int, bool] = {}            # results of the predicate, by index

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
            untested[[index for index, accepted in list(self._accepted.items()) if not accepted]] = False
            rest = table.masked(untested)
            if rest.log_total == -math.inf:
                lacks = "satisfies the predicate" if self.calls else "has positive probability"
                why = f"{lacks} ({self.calls} tested)"
                raise Impossible(f"no value of {self.dist!r} {why}", f"no value of {self.dist.brief} {lacks}")

    def log_measure(self, value: Any) -> float:
        indices = [index for index in self.dist.indices(value) if self._accepts(index)]
        return float(np.logaddexp.reduce([self.dist.log_prob_at(index) for index in indices], initial=-math.inf))

    def log_measures(self) -> Floats:
        """Return (n,) float64, read-only: log mu of each value. It tests every possible value."""
        log_probs = self.dist.log_probs()
        accepted = [log_prob > -math.inf and self._accepts(index) for index, log_prob in enumerate(log_probs.tolist())]
        return frozen(np.where(accepted, log_probs, -math.inf))

    def _accepts(self, index: int) -> bool:
        accepted = self._accepted.get(index)
        if accepted is None:
            accepted = arguments.truth("where: predicate", self.predicate, self.support[index])
            self._accepted[index] = accepted
        return accepted

    def __repr__(self) -> str:
        return f"{self.dist!r}.where({arguments.name_of(self.predicate)})"

    @property
    def brief(self) -> str:
        return f"{self.dist.brief}.where({arguments.name_of(self.predicate)})"


def _repeats(values: Sequence[Any]) -> bool:
    """Return True if a value occurs twice. Unhashable values are compared one by one, if there are few."""
    try:
        return len(set(values)) < len(values)
    except TypeError:                                   # lists, dicts, arrays
        return len(values) <= 200 and any(_equal(a, b) for a, b in itertools.combinations(values, 2))


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (TypeError, ValueError) as error:            # arrays compare value by value
        let_through(error)
        return bool(np.array_equal(a, b))
