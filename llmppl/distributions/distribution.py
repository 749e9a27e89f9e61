"""Distributions: what a program samples from and observes.

A `Proposal` is drawn from with a weight: it is *properly weighted* for a measure mu. A `Distribution` is one whose
weight is always 1 and whose measure is its law. It has `sample(rng)`, `log_prob(value)`, and a `support`; where the
support is finite, `log_probs()` gives all log-probabilities in the order of the support. Asking a distribution anything
changes nothing.

A `Finite` distribution is given by log-weights over its support that need not be normalised and are computed when first
asked for. Everything derived from it (`masked`, `tempered`, `top_k`, `top_p`, `product`, `mixture`) is Finite again,
except `where(predicate)`: a `Where`, which tests only the values that it draws.
"""

from __future__ import annotations

import itertools
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llmppl import arguments
from llmppl.distributions.rejection import above, weighted_rejection

Floats = NDArray[np.float64]
_BLOCK = 256                            # values summed together when a value is drawn
_MOST_VALUES = 100_000_000              # of a Uniform, which holds a number for each of them


class Impossible(ValueError):
    """A value was asked of a distribution that has none: every log-probability is -inf."""


class Proposal(ABC):
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

    support: Sequence[Any] | None = None
    recipe: tuple[Any, ...] | None = None

    @abstractmethod
    def propose(self, rng: np.random.Generator) -> tuple[Any, float]:
        """A value drawn with `rng`, and log w. Raises `Impossible` where mu is zero everywhere."""

    @abstractmethod
    def log_measure(self, value: Any) -> float:
        """log mu(value); -inf where mu is zero, which is never for a value that was proposed with a weight above 0."""

    def log_measures(self) -> Floats:
        """(n,) read-only float64: log mu of each value of the support. TypeError if that is infinite."""
        if self.support is None:
            raise TypeError(f"{self} has no finite support, so its log-measures cannot be listed")
        return _frozen(np.array([self.log_measure(value) for value in self.support]))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self                                     # immutable


class Distribution(Proposal):
    """The law of a random value.

    Attributes
    ----------
    support : Sequence or None
        The values it can take, in the order of `log_probs()`; None where they are infinitely many.
    """

    @abstractmethod
    def sample(self, rng: np.random.Generator) -> Any:
        """One value drawn with `rng`. Raises `Impossible` where no value has positive probability."""

    @abstractmethod
    def log_prob(self, value: Any) -> float:
        """Log-probability of `value`; -inf outside the support."""

    def log_probs(self) -> Floats:
        """(n,) read-only float64: the log-probability of each value of the support. TypeError if that is infinite."""
        if self.support is None:
            raise TypeError(f"{self} has no finite support, so its log-probabilities cannot be listed")
        return _frozen(np.array([self.log_prob(value) for value in self.support]))

    def propose(self, rng: np.random.Generator) -> tuple[Any, float]:
        return self.sample(rng), 0.0

    def log_measure(self, value: Any) -> float:
        return self.log_prob(value)

    def log_measures(self) -> Floats:
        return self.log_probs()


class Finite(Distribution):
    """A distribution with finite support.

    Parameters
    ----------
    support : Sequence
        The values.
    log_weights : (n,) array, or a callable that returns one
        Log-probabilities up to a constant; -inf marks what cannot happen. A callable is called once, when needed.
    parents : sequence of Finite
        The distributions that the callable asks.

    Raises
    ------
    ValueError
        If two values are equal, since the mass of one of them would be lost. Values that cannot be hashed are compared
        one by one, up to 200 of them.
    """

    support: Sequence[Any]

    def __init__(
        self, support: Sequence[Any], log_weights: ArrayLike | Callable[[], Floats], parents: Sequence[Finite] = ()
    ) -> None:
        if not parents and isinstance(support, (list, tuple, str)) and _repeats(support):
            name, values = type(self).__name__, arguments.shown(support)
            raise ValueError(f"{name} wants distinct values, not {values}: give equal ones one probability")
        self.support = support
        self._parents = tuple(parents)
        self._compute = log_weights if callable(log_weights) else None
        self._log_weights = None if callable(log_weights) else np.asarray(log_weights, dtype=np.float64)
        if self._log_weights is not None:
            self.recipe = (self._log_weights,)
        # (n,) exp(log_weights - max); (ceil(n / _BLOCK),) their sums, cumulated; log of the sum of all
        self._normalised: tuple[Floats, Floats, float] | None = None
        self._log_probs: Floats | None = None
        self._describe: Callable[[], str] | None = None
        self._masked: weakref.WeakValueDictionary[int, Finite] | None = None

    def log_weights(self) -> Floats:
        """(n,) float64, not normalised."""
        for parent in self._parents:                    # may wait for a language model, and others ask us meanwhile
            parent.log_weights()
        compute = self._compute                         # read once: another thread may have done with it
        if self._log_weights is None and compute is not None:
            self._log_weights = compute()
        self._compute, self._parents = None, ()
        assert self._log_weights is not None
        return self._log_weights

    def _normalise(self) -> tuple[Floats, Floats, float]:
        """The weights, their sums by blocks, cumulated, and the log of their total; zero where nothing is possible."""
        log_weights = self.log_weights()
        if self._normalised is None:
            top = float(log_weights.max())
            weights = log_weights - (0.0 if top == -math.inf else top)
            np.maximum(weights, -700.0, out=weights)    # np.exp is ten times as slow where it underflows
            np.exp(weights, out=weights)
            np.multiply(weights, weights > 1e-300, out=weights)
            blocks = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)).cumsum()
            self._normalised = weights, blocks, top if top == -math.inf else top + math.log(blocks[-1])
        return self._normalised

    def log_total(self) -> float:
        """Log of the sum of the weights; -inf where nothing is possible."""
        return self._normalise()[2]

    def log_probs(self) -> Floats:
        if self._log_probs is None:
            log_total = self.log_total()
            self._log_probs = _frozen(self.log_weights() - (0.0 if log_total == -math.inf else log_total))
        return self._log_probs

    def log_prob(self, value: Any) -> float:
        places = self.places(value)
        return self.log_prob_at(places[0]) if places else -math.inf

    def places(self, value: Any) -> list[int]:
        """Where in the support `value` stands; none where it cannot be."""
        try:
            return [self.support.index(value)]
        except ValueError:
            return []

    def log_prob_at(self, place: int) -> float:
        """Log-probability of the value at `place` of the support."""
        log_weight = float(self.log_weights()[place])
        return log_weight if log_weight == -math.inf else log_weight - self.log_total()

    def sample(self, rng: np.random.Generator) -> Any:
        weights, blocks, _ = self._normalise()
        if blocks[-1] == 0.0:
            raise Impossible(f"{self} has no value of positive probability")
        target = rng.random() * blocks[-1]              # searched in two stages: a sum over all is the slow part
        block = above(blocks, target)
        before = blocks[block - 1] if block else 0.0
        start = block * _BLOCK
        return self.support[start + above(np.cumsum(weights[start : start + _BLOCK]), target - before)]

    def derive(
        self,
        compute: Callable[[], Floats],
        describe: Callable[[], str],
        parents: Sequence[Finite] | None = None,
        *,
        by: tuple[Any, ...] | None = None,
    ) -> Finite:
        """A distribution over the same values, its log-weights computed from those of `parents` (this one); its repr.

        `by`, if given, is the name of the computation and everything else that it depends on.
        """
        parents = [self] if parents is None else parents
        law = self._like(compute, parents)
        law._describe = describe
        if by is not None and all(parent.recipe is not None for parent in parents):
            law.recipe = (*by, *(parent.recipe for parent in parents))
        return law

    def _like(self, compute: Callable[[], Floats], parents: Sequence[Finite]) -> Finite:
        return Finite(self.support, compute, parents)

    def masked(self, mask: ArrayLike) -> Finite:
        """This law given that the value is one that `mask` allows.

        Parameters
        ----------
        mask : (n,) bool
            True at the allowed values. Where the allowed values have no probability, sampling raises `Impossible` (in a
            program, the particle dies).
        """
        allowed = np.asarray(mask)
        if allowed.dtype != np.bool_:
            raise TypeError(f"a mask is an array of bool, not of {allowed.dtype}")
        if allowed.shape != (len(self.support),):
            raise ValueError(f"the mask has shape {allowed.shape}; {self} wants ({len(self.support)},)")
        if allowed.flags.writeable:                     # the law must not change with what the caller does to the mask
            allowed = allowed.copy()
        if self._masked is None:
            self._masked = weakref.WeakValueDictionary()
        law = self._masked.get(id(allowed))             # particles in one place share their laws; it holds `allowed`
        if law is not None:
            return law

        def compute() -> Floats:
            with np.errstate(divide="ignore"):          # adds 1 - 1/allowed, 0 or -inf: five times as fast as np.where
                log_weights: Floats = np.divide(1.0, allowed)
            np.subtract(1.0, log_weights, out=log_weights)
            log_weights += self.log_weights()
            return log_weights

        def describe() -> str:
            return f"{self!r}.masked({allowed.sum()} of {len(allowed)} values)"

        law = self.derive(compute, describe, by=("masked", allowed))
        self._masked[id(allowed)] = law
        return law

    def where(self, predicate: Callable[[Any], bool]) -> Where:
        """Values for which `predicate` is True, drawn by adaptive weighted rejection sampling; see `Where`."""
        return Where(self, predicate)

    def tempered(self, temperature: float) -> Finite:
        """This law with every probability raised to the power 1 / `temperature`, and normalised again."""
        temperature = arguments.temperature(temperature)

        def compute() -> Floats:
            log_weights = self.log_weights()
            top = log_weights.max()
            return (log_weights - top) / temperature if top > -np.inf else log_weights      # -inf - -inf would be NaN

        return self.derive(compute, lambda: f"{self!r}.tempered({temperature:g})", by=("tempered", temperature))

    def top_k(self, k: int) -> Finite:
        """This law given that the value is among the `k` most probable ones; of equals, the first in the support."""
        k = arguments.count("top_k: k", k)

        def compute() -> Floats:
            log_weights = self.log_weights()
            if k >= len(log_weights):
                return log_weights
            least = np.partition(log_weights, len(log_weights) - k)[len(log_weights) - k]
            keep = log_weights > least
            keep[np.flatnonzero(log_weights == least)[: k - int(keep.sum())]] = True
            return np.where(keep, log_weights, -np.inf)

        return self.derive(compute, lambda: f"{self!r}.top_k({k})", by=("top_k", k))

    def top_p(self, p: float) -> Finite:
        """This law given that the value is in the smallest set of most probable ones of probability at least `p`."""
        p = arguments.probability("top_p: p", p, above_0=True)

        def compute() -> Floats:
            log_probs = self.log_probs()
            order = np.argsort(-log_probs, kind="stable")
            before = np.cumsum(np.exp(log_probs[order])) - np.exp(log_probs[order])
            keep = np.zeros(len(order), dtype=np.bool_)
            keep[order[before < p]] = True
            return np.where(keep, log_probs, -np.inf)

        return self.derive(compute, lambda: f"{self!r}.top_p({p:g})", by=("top_p", p))

    def __repr__(self) -> str:
        return self._describe() if self._describe is not None else f"Finite({len(self.support)} values)"


class Where(Proposal):
    """The values of a law that satisfy a predicate, found by testing only those that are drawn.

    Its measure is mu(x) = p(x) where predicate(x) holds, else 0: not normalised, of the mass p(A) of what is accepted.
    Values have exactly the law p given A; the weight is an unbiased estimate of p(A), whatever the value. To draw one
    takes about 2 / p(A) + 1 calls of the predicate, where `masked` needs to know all of A: use it where a test is dear
    and A is not rare. `llmppl.distributions.rejection` tells how it works, and its variance (Lipkin et al. 2025).

    Parameters
    ----------
    law : Finite
        The law p.
    predicate : function of a value that returns a bool
        For laws of tokens the value is a Token, EOS included. It is called at most once for each value, and must
        answer the same for equal values. Where it holds for no value of positive probability, all were tested; drawing
        then raises `Impossible` (in a program, the particle dies).

    Attributes
    ----------
    calls : int
        How often the predicate was called so far.
    """

    support: Sequence[Any]

    def __init__(self, law: Finite, predicate: Callable[[Any], bool]) -> None:
        if not callable(predicate):
            raise TypeError(
                f"where() wants a predicate, a function from a value to True or False, not {predicate!r}; "
                "masked() takes a mask"
            )
        self.law, self.predicate, self.support = law, predicate, law.support
        self._accepted: dict[int, bool] = {}            # place -> what the predicate says of its value

    @property
    def calls(self) -> int:
        return len(self._accepted)

    def propose(self, rng: np.random.Generator) -> tuple[Any, float]:
        weights, blocks, _ = self.law._normalise()
        found = weighted_rejection(rng, weights, self._accepts)
        if found is None:
            return self._propose_rare(rng)
        place, weight = found
        return self.support[place], math.log(weight / blocks[-1])

    def _propose_rare(self, rng: np.random.Generator) -> tuple[Any, float]:
        """`propose` where every value whose weight is a float above 0 is rejected: the others, scaled up."""
        log_weights = self.law.log_weights()
        if log_weights.max() == -math.inf:
            raise Impossible(f"no value of {self.law!r} has positive probability ({self.calls} tested)")
        tested = np.zeros(len(log_weights), dtype=np.bool_)
        while True:
            tested[[place for place, accepted in list(self._accepted.items()) if not accepted]] = True
            rest = Finite(range(len(log_weights)), np.where(tested, -math.inf, log_weights))
            weights, blocks, _ = rest._normalise()
            if blocks[-1] == 0.0:
                raise Impossible(f"no value of {self.law!r} satisfies the predicate ({self.calls} tested)")
            found = weighted_rejection(rng, weights, self._accepts)
            if found is not None:
                place, weight = found
                log_w = math.log(weight / blocks[-1]) + rest.log_total() - self.law.log_total()
                return self.support[place], log_w

    def log_measure(self, value: Any) -> float:
        places = [place for place in self.law.places(value) if self._accepts(place)]
        return float(np.logaddexp.reduce([self.law.log_prob_at(place) for place in places], initial=-math.inf))

    def log_measures(self) -> Floats:
        """log mu of each value of the support, each possible one tested."""
        log_probs = self.law.log_probs()
        accepted = [log_prob > -math.inf and self._accepts(place) for place, log_prob in enumerate(log_probs.tolist())]
        return _frozen(np.where(accepted, log_probs, -math.inf))

    def _accepts(self, place: int) -> bool:
        accepted = self._accepted.get(place)
        if accepted is None:
            accepted = arguments.truth("where: predicate", self.predicate, self.support[place])
            self._accepted[place] = accepted
        return accepted

    def __repr__(self) -> str:
        return f"{self.law!r}.where({getattr(self.predicate, '__qualname__', repr(self.predicate))})"


class Categorical(Finite):
    """One of finitely many values, with the probabilities given.

    Parameters
    ----------
    probs : (n,) array of probabilities that sum to 1, or a dict from value to probability
    values : sequence of n values, optional
        0, 1, ..., n - 1 if left out.
    """

    def __init__(self, probs: ArrayLike | dict[Any, float], values: Sequence[Any] | None = None) -> None:
        if isinstance(probs, dict):
            if values is not None:
                raise ValueError("Categorical takes its values from the dict; leave `values` out")
            values, probs = tuple(probs), list(probs.values())
        array = _probabilities("Categorical: probs", probs)
        if values is not None and len(values) != len(array):
            raise ValueError(f"Categorical got {len(array)} probabilities for {len(values)} values")
        with np.errstate(divide="ignore"):
            super().__init__(range(len(array)) if values is None else tuple(values), np.log(array))

    def __repr__(self) -> str:
        pairs = zip(self.support, np.exp(self.log_probs()), strict=True)
        return f"Categorical({{{', '.join(f'{value!r}: {p:.4g}' for value, p in pairs)}}})"


class Bernoulli(Finite):
    """True with probability `p`, else False."""

    def __init__(self, p: float) -> None:
        self.p = arguments.probability("Bernoulli: p", p)
        with np.errstate(divide="ignore"):
            super().__init__((False, True), np.log([1.0 - self.p, self.p]))

    def __repr__(self) -> str:
        return f"Bernoulli({self.p:g})"


class Uniform(Finite):
    """An integer from `low` to `high`, both included, all equally likely."""

    def __init__(self, low: int, high: int) -> None:
        low, high = arguments.integer("Uniform: low", low), arguments.integer("Uniform: high", high)
        if not 1 <= high - low + 1 <= _MOST_VALUES:
            given = f"low={arguments.shown(low)} and high={arguments.shown(high)}"
            raise ValueError(f"Uniform wants integers low <= high, at most {_MOST_VALUES:,} of them, not {given}")
        super().__init__(range(low, high + 1), np.zeros(high - low + 1))

    def __repr__(self) -> str:
        return f"Uniform({self.support[0]}, {self.support[-1]})"


class Geometric(Distribution):
    """The number of failures before the first success: P(n) = p (1 - p)^n on n = 0, 1, 2, ...

    Parameters
    ----------
    p : float in (0, 1]
    most : int, optional
        The law given n <= most; its support is then finite.
    """

    def __init__(self, p: float, most: int | None = None) -> None:
        self.p = arguments.probability("Geometric: p", p, above_0=True)
        self.most = most = arguments.optional_count("Geometric: most", most, least=0)
        self.support = None if most is None else range(most + 1)
        self._log_fail = math.log1p(-self.p) if self.p < 1.0 else -math.inf
        self._mass = 1.0 if most is None else -math.expm1((most + 1) * self._log_fail)      # P(n <= most) untruncated

    def sample(self, rng: np.random.Generator) -> int:
        if self.p == 1.0:
            return 0
        n = int(math.log1p(-rng.random() * self._mass) / self._log_fail)
        return n if self.most is None else min(n, self.most)

    def log_prob(self, value: Any) -> float:
        try:
            n = int(value)
        except (TypeError, ValueError, OverflowError):  # what is no number, NaN, infinity
            return -math.inf
        if n != value or n < 0 or (self.most is not None and n > self.most):
            return -math.inf
        return math.log(self.p / self._mass) + (n * self._log_fail if n else 0.0)

    def __repr__(self) -> str:
        return f"Geometric({self.p:g})" if self.most is None else f"Geometric({self.p:g}, most={self.most})"


class Delta(Distribution):
    """Always `value`: `sample(dist, proposal=Delta(v))` is `observe(dist, v)`."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.support = (value,)

    def sample(self, rng: np.random.Generator) -> Any:
        return self.value

    def log_prob(self, value: Any) -> float:
        return 0.0 if value == self.value else -math.inf

    def __repr__(self) -> str:
        return f"Delta({self.value!r})"


def product(*dists: Finite) -> Finite:
    """The law proportional to the product of the probabilities (a product of experts; Hinton 2002).

    All must be Finite with the same support (for tokens: the same vocabulary), else a ValueError says which differ.
    Where no value is possible under all of them, sampling raises `Impossible`.
    """
    first = _same_support("product", dists)
    return first.derive(
        lambda: np.sum([dist.log_probs() for dist in dists], axis=0),
        lambda: f"product({', '.join(map(repr, dists))})",
        dists,
        by=("product",),
    )


def mixture(dists: Sequence[Finite], weights: ArrayLike) -> Finite:
    """The law sum_k weights[k] dists[k]; `weights` are probabilities, the supports are the same."""
    first = _same_support("mixture", dists)
    probs = _probabilities("mixture: weights", weights)
    if len(probs) != len(dists):
        raise ValueError(f"mixture got {len(probs)} weights for {len(dists)} distributions")
    parts = [(math.log(p), dist) for p, dist in zip(probs, dists, strict=True) if p > 0.0]
    return first.derive(
        lambda: np.logaddexp.reduce([log_p + dist.log_probs() for log_p, dist in parts]),
        lambda: f"mixture([{', '.join(map(repr, dists))}], {probs.round(4).tolist()})",
        [dist for _, dist in parts],
        by=("mixture", *(log_p for log_p, _ in parts)),
    )


def _same_support(name: str, dists: Sequence[Finite]) -> Finite:
    if not dists:
        raise ValueError(f"{name} of no distributions")
    for dist in dists:
        if isinstance(dist, (list, tuple)) and name == "product":
            raise TypeError(f"product takes each distribution by itself, product(*distributions), not {dist!r}")
        if not isinstance(dist, Finite):
            raise TypeError(f"{name} wants distributions with finite support, not {dist!r}")
        if dist.support is not dists[0].support and dist.support != dists[0].support:
            raise ValueError(f"{name} of distributions over different values: {dists[0].support} and {dist.support}")
    return dists[0]


def _probabilities(name: str, probs: ArrayLike) -> Floats:
    """`probs` as a (n,) array that sums to 1 exactly, or an error that says what is wrong with them."""
    given = np.asarray(probs)
    if given.ndim != 1 or len(given) == 0:
        raise ValueError(f"{name} must be a list of probabilities, not an array of shape {given.shape}")
    if given.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be numbers, not {given.tolist()}")
    array = given.astype(np.float64)
    if not np.all(np.isfinite(array)) or array.min() < 0.0:
        raise ValueError(f"{name} must be probabilities, not {array.tolist()}")
    if abs(array.sum() - 1.0) > 1e-6:
        raise ValueError(f"{name} must sum to 1; divide these by their sum, {array.sum():.6g}")
    normalised: Floats = array / array.sum()
    return normalised


def _repeats(values: Sequence[Any]) -> bool:
    """Whether some value occurs twice; those that cannot be hashed are compared one by one, if they are few."""
    try:
        return len(set(values)) < len(values)
    except TypeError:                                   # lists, dicts, arrays
        return len(values) <= 200 and any(_equal(a, b) for a, b in itertools.combinations(values, 2))


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (TypeError, ValueError):                     # arrays compare value by value
        return bool(np.array_equal(a, b))


def _frozen(array: Floats) -> Floats:
    array.setflags(write=False)
    return array
