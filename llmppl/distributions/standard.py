"""The usual distributions, and products, powers and mixtures of finite ones over the same values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike

from llmppl.distributions.blocks import Floats
from llmppl.distributions.finite import Distribution, Finite, Proposal, T_co
from llmppl.support import arguments

MAX_LISTED = 10_000_000  # values of a distribution that lists them

T = TypeVar("T")


class Categorical(Finite[T_co]):
    """Distribution over finitely many values, with given probabilities.

    Parameters
    ----------
    probs : (n,) array of probabilities that sum to 1, or a dict from value to probability
    values : sequence of n values, optional
        By default 0, 1, ..., n - 1.

    Examples
    --------
    >>> coin = Categorical({"heads": 0.75, "tails": 0.25})
    >>> round(coin.log_prob("tails"), 4)
    -1.3863
    """

    @overload
    def __init__(self, probs: dict[T_co, float], values: None = None) -> None: ...

    @overload
    def __init__(self: Categorical[int], probs: ArrayLike, values: None = None) -> None: ...

    @overload
    def __init__(self, probs: ArrayLike, values: Sequence[T_co]) -> None: ...

    def __init__(self, probs: Any, values: Sequence[Any] | None = None) -> None:
        if isinstance(probs, dict):
            if values is not None:
                raise ValueError("Categorical takes its values from the dict; leave `values` out")
            values = tuple(probs)
            probs = list(probs.values())
        array = probabilities("Categorical: probs", probs)
        if isinstance(values, set | frozenset):
            raise TypeError(
                f"Categorical: values must be a list, in the order of probs, not {arguments.shown(values)}"
            )
        support: Sequence[Any] = range(len(array))
        if values is not None:
            support = tuple(values)
        if len(support) != len(array):
            raise ValueError(
                f"Categorical got {len(array)} probabilities for {len(support)} values"
            )
        with np.errstate(divide="ignore"):
            super().__init__(support, np.log(array))

    def __repr__(self) -> str:
        pairs = zip(self.support, np.exp(self.log_probs()), strict=True)
        return f"Categorical({{{', '.join(f'{value!r}: {p:.4g}' for value, p in pairs)}}})"


class Bernoulli(Finite[bool]):
    """Distribution of a bool that is True with probability `p`.

    Examples
    --------
    >>> round(Bernoulli(0.25).log_prob(True), 4)
    -1.3863
    """

    def __init__(self, p: float) -> None:
        self.p = arguments.probability("Bernoulli: p", p)
        with np.errstate(divide="ignore"):
            super().__init__((False, True), np.log([1.0 - self.p, self.p]))

    def __repr__(self) -> str:
        return f"Bernoulli({self.p:g})"


class Uniform(Finite[T_co]):
    """Distribution over equally likely values: `Uniform(["cat", "dog"])`, or the integers of `Uniform(low, high)`.

    Parameters
    ----------
    low : int, or a sequence of values
    high : int, optional
        The last integer; not given with a sequence.

    Examples
    --------
    >>> round(Uniform(["cat", "dog"]).log_prob("cat"), 4)
    -0.6931
    """

    @overload
    def __init__(self: Uniform[int], low: int, high: int) -> None: ...

    @overload
    def __init__(self, low: Sequence[T_co]) -> None: ...

    def __init__(self, low: Any, high: Any = None) -> None:
        if high is not None:
            first = arguments.integer("Uniform: low", low)
            last = arguments.integer("Uniform: high", high)
            if first > last:
                raise ValueError(
                    f"Uniform wants integers low <= high, not low={first} and high={last}"
                )
            low = range(first, last + 1)
        if not isinstance(low, Sequence) or isinstance(low, (str, bytes)):
            wanted = "low and high, Uniform(1, 6), or a list of values, Uniform(['a', 'b'])"
            raise TypeError(f"Uniform wants {wanted}, not {arguments.shown(low)} alone")
        if not low:
            raise ValueError("Uniform wants one value or more, not an empty sequence")
        support = listed("Uniform", low)
        if high is None:
            support = tuple(support)
        super().__init__(support, np.zeros(len(support)))

    def __repr__(self) -> str:
        if isinstance(self.support, range):
            return f"Uniform({self.support[0]}, {self.support[-1]})"
        return f"Uniform({arguments.shown([*self.support])})"


class Geometric(Distribution[int]):
    """Distribution of the number of failures before the first success: P(n) = p (1 - p)^n on n = 0, 1, 2, ...

    Parameters
    ----------
    p : float in (0, 1]
    max_value : int, optional
        If given, the distribution is conditioned on n <= max_value, and its support is finite.

    Examples
    --------
    >>> round(Geometric(0.5).log_prob(2), 4)
    -2.0794
    """

    def __init__(self, p: float, max_value: int | None = None) -> None:
        self.p = arguments.probability("Geometric: p", p, above_0=True)
        self.max_value = arguments.optional_count("Geometric: max_value", max_value, least=0)
        self._last = math.inf
        if self.max_value is not None:
            self._last = self.max_value
            self.support = listed("Geometric", range(self.max_value + 1))
        self._log_fail = math.log1p(-self.p) if self.p < 1.0 else -math.inf
        # P(n <= max_value) without the bound
        self._mass = -math.expm1((self._last + 1) * self._log_fail)

    def sample(self, rng: np.random.Generator) -> int:
        if self.p == 1.0:
            return 0
        return int(min(self._last, int(math.log1p(-rng.random() * self._mass) / self._log_fail)))

    def log_prob(self, value: Any) -> float:
        try:
            n = int(value)
        except (TypeError, ValueError, OverflowError):  # no number, NaN, infinity
            return -math.inf
        if n != value or not 0 <= n <= self._last:
            return -math.inf
        return math.log(self.p / self._mass) + (n * self._log_fail if n else 0.0)

    def __repr__(self) -> str:
        if self.max_value is None:
            return f"Geometric({self.p:g})"
        return f"Geometric({self.p:g}, max_value={self.max_value})"


class Delta(Distribution[T_co]):
    """Distribution of a constant: `sample(dist, proposal=Delta(v))` is `observe(dist, v)`.

    Examples
    --------
    >>> Delta("cat").log_prob("cat"), Delta("cat").log_prob("dog")
    (0.0, -inf)
    """

    def __init__(self, value: T_co) -> None:
        self.value = value
        self.support = (value,)

    def sample(self, rng: np.random.Generator) -> T_co:
        return self.value

    def log_prob(self, value: Any) -> float:
        return 0.0 if value == self.value else -math.inf

    def __repr__(self) -> str:
        return f"Delta({self.value!r})"


def listed(name: str, values: Sequence[T]) -> Sequence[T]:
    """Return `values`. Raise a ValueError if they are too many to list."""
    if len(values[: MAX_LISTED + 1]) > MAX_LISTED:  # len of a long range fails
        raise ValueError(
            f"{name} lists its values: at most {MAX_LISTED:,}, not those of {arguments.shown(values)}"
        )
    return values


def probabilities(name: str, probs: ArrayLike) -> Floats:
    """Return `probs` as an (n,) array divided by its sum. TypeError or ValueError unless they are probabilities."""
    given = np.asarray(probs)
    if given.ndim != 1 or len(given) == 0 or given.dtype.kind not in "iuf":
        raise TypeError(
            f"{name} must be a list of probabilities, not {arguments.shown(probs)}: values go with their probabilities "
            "in a dict, as in Categorical({'a': 0.5, 'b': 0.5})"
        )
    array = given.astype(np.float64)
    total = float(array.sum())
    if not (np.all(np.isfinite(array)) and array.min() >= 0.0):
        raise ValueError(f"{name} must be probabilities, not {array.tolist()}")
    if abs(total - 1.0) > 1e-6:
        raise ValueError(f"{name} must sum to 1; divide these by their sum, {total:.6g}")
    return array / total


# ---- combinations


def product(*dists: Finite[T], powers: Sequence[float] | None = None) -> Finite[T]:
    """Return the distribution proportional to `prod_k dists[k](x) ** powers[k]`: a product of experts (Hinton 2002).

    If no value is possible under all of them, sampling raises `Impossible`.

    Parameters
    ----------
    *dists : Finite
        Distributions over one support (for tokens: one vocabulary).
    powers : sequence of float, optional
        A number for each distribution; by default 1. A negative power divides: `product(p, q, powers=[1, -0.5])`
        favours values that are likely under p and unlikely under q. A power of 0 removes a distribution.

    Raises
    ------
    TypeError
        For an argument that is not Finite.
    ValueError
        If supports differ, or a distribution with a negative power is 0 where the others are not.

    Examples
    --------
    >>> both = product(Categorical([0.5, 0.5]), Categorical([0.8, 0.2]))
    >>> round(both.log_prob(1), 4)
    -1.6094
    """
    first = _same_support("product", dists)
    numbers = [1.0] * len(dists)
    suffix = ""
    if powers is not None:
        numbers = [arguments.number("product: each of the powers", power) for power in powers]
        suffix = f", powers=[{', '.join(f'{power:g}' for power in numbers)}]"
    if len(numbers) != len(dists) or not any(numbers):
        raise ValueError(
            f"product: powers has a number for each of {len(dists)} distributions, and not all 0"
        )
    parts = [(power, dist) for power, dist in zip(numbers, dists, strict=True) if power]
    return first.derive(
        lambda: _powered(parts),
        lambda: f"product({', '.join(map(repr, dists))}{suffix})",
        [dist for _, dist in parts],
    )


def _powered(parts: Sequence[tuple[float, Finite[Any]]]) -> Floats:
    """Return (n,) sum_k power_k log p_k. A 0 with a positive power gives 0, whatever the divisors are."""
    total = np.zeros(len(parts[0][1].support))
    for power, dist in sorted(parts, key=lambda part: part[0] < 0.0):
        log_probs = dist.log_probs()
        possible = total > -np.inf
        if power < 0.0 and (log_probs[possible] == -np.inf).any():
            value = dist.support[int(np.flatnonzero(possible & (log_probs == -np.inf))[0])]
            raise ValueError(
                f"product: {dist!r} gives {value!r} probability 0, and power {power:g} makes that infinite; "
                "mask in the others what it does not give"
            )
        total[possible] += power * log_probs[possible]
    return total


def mixture(dists: Sequence[Finite[T]], weights: ArrayLike) -> Finite[T]:
    """Return the distribution sum_k weights[k] dists[k]. `weights` are probabilities; supports must be equal.

    Examples
    --------
    >>> either = mixture([Categorical([0.5, 0.5]), Categorical([0.9, 0.1])], [0.5, 0.5])
    >>> round(either.log_prob(1), 4)
    -1.204
    """
    first = _same_support("mixture", dists)
    probs = probabilities("mixture: weights", weights)
    if len(probs) != len(dists):
        raise ValueError(f"mixture got {len(probs)} weights for {len(dists)} distributions")
    parts = [(math.log(p), dist) for p, dist in zip(probs, dists, strict=True) if p > 0.0]
    return first.derive(
        lambda: np.logaddexp.reduce([log_p + dist.log_probs() for log_p, dist in parts]),
        lambda: f"mixture([{', '.join(map(repr, dists))}], {probs.round(4).tolist()})",
        [dist for _, dist in parts],
    )


def _same_support(name: str, dists: Sequence[Finite[T]]) -> Finite[T]:
    """Return the first distribution. TypeError or ValueError unless all are Finite and over the same values."""
    if isinstance(dists, Proposal) or not all(isinstance(dist, Finite) for dist in dists):
        each = "mixture(distributions, weights)"
        if name == "product":
            each = "product(*distributions)"
        raise TypeError(
            f"{name} wants distributions with finite support, {each}, not {arguments.shown(dists)}"
        )
    if not dists:
        raise ValueError(f"{name} of no distributions")
    for dist in dists:
        if dist.support is not dists[0].support and dist.support != dists[0].support:
            raise ValueError(
                f"{name} of distributions over different values: {dists[0].support} and {dist.support}"
            )
    return dists[0]
