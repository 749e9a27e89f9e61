"""The usual distributions: Categorical, Bernoulli, Uniform, Geometric and Delta."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike

from llmppl.distributions.finite import Finite
from llmppl.distributions.proposal import Distribution, T_co
from llmppl.distributions.weights import Floats
from llmppl.support import arguments

_MAX_VALUES = 100_000_000               # of a Uniform, which stores a number for each value
_IN_DICT = "values go with their probabilities in a dict, as in Categorical({'a': 0.5, 'b': 0.5})"


class Categorical(Finite[T_co]):
    """Distribution over finitely many values, with given probabilities.

    Parameters
    ----------
    probs : (n,) array of probabilities that sum to 1, or a dict from value to probability
    values : sequence of n values, optional
        By default 0, 1, ..., n - 1.
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
            values, probs = tuple(probs), list(probs.values())
        array = probabilities("Categorical: probs", probs)
        if values is not None and (isinstance(values, set | frozenset) or not isinstance(values, Collection)):
            raise TypeError(f"Categorical: values must be a list, in the order of probs, not {arguments.shown(values)}")
        if values is not None and len(values) != len(array):
            raise ValueError(f"Categorical got {len(array)} probabilities for {len(values)} values")
        with np.errstate(divide="ignore"):
            support: Sequence[Any] = range(len(array)) if values is None else tuple(values)
            super().__init__(support, np.log(array))

    def __repr__(self) -> str:
        pairs = zip(self.support, np.exp(self.log_probs()), strict=True)
        return f"Categorical({{{', '.join(f'{value!r}: {p:.4g}' for value, p in pairs)}}})"


class Bernoulli(Finite[bool]):
    """Distribution of a bool that is True with probability `p`."""

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
    """

    @overload
    def __init__(self: Uniform[int], low: int, high: int) -> None: ...

    @overload
    def __init__(self, low: Sequence[T_co]) -> None: ...

    def __init__(self, low: Any, high: Any = None) -> None:
        if high is None and isinstance(low, Sequence) and not isinstance(low, (str, bytes)):
            if not low:
                raise ValueError("Uniform wants one value or more, not an empty sequence")
            super().__init__(tuple(low), np.zeros(len(low)))
            return
        if high is None:
            wanted = "low and high, Uniform(1, 6), or a list of values, Uniform(['a', 'b'])"
            raise TypeError(f"Uniform wants {wanted}, not {arguments.shown(low)} alone")
        low, high = arguments.integer("Uniform: low", low), arguments.integer("Uniform: high", high)
        if not 1 <= high - low + 1 <= _MAX_VALUES:
            given = f"low={arguments.shown(low)} and high={arguments.shown(high)}"
            raise ValueError(f"Uniform wants integers low <= high, at most {_MAX_VALUES:,} of them, not {given}")
        support: Sequence[Any] = range(low, high + 1)
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
    """

    def __init__(self, p: float, max_value: int | None = None) -> None:
        self.p = arguments.probability("Geometric: p", p, above_0=True)
        self.max_value = arguments.optional_count("Geometric: max_value", max_value, least=0)
        self.support = None if max_value is None else range(max_value + 1)
        self._last = math.inf if max_value is None else max_value
        self._log_fail = math.log1p(-self.p) if self.p < 1.0 else -math.inf
        self._mass = -math.expm1((self._last + 1) * self._log_fail)             # P(n <= max_value) without the bound

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
        return f"Geometric({self.p:g}{'' if self.max_value is None else f', max_value={self.max_value}'})"


class Delta(Distribution[T_co]):
    """Distribution of a constant: `sample(dist, proposal=Delta(v))` is `observe(dist, v)`."""

    def __init__(self, value: T_co) -> None:
        self.value = value
        self.support = (value,)

    def sample(self, rng: np.random.Generator) -> T_co:
        return self.value

    def log_prob(self, value: Any) -> float:
        return 0.0 if value == self.value else -math.inf

    def __repr__(self) -> str:
        return f"Delta({self.value!r})"


def probabilities(name: str, probs: ArrayLike) -> Floats:
    """Return `probs` as an (n,) array divided by its sum. TypeError or ValueError unless they are probabilities."""
    given = np.asarray(probs)
    if given.ndim == 0:
        raise TypeError(f"{name} must be a list of probabilities, not {arguments.shown(probs)}: {_IN_DICT}")
    if given.ndim != 1 or len(given) == 0:
        raise ValueError(f"{name} must be a list of probabilities, not an array of shape {given.shape}")
    if given.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be numbers, not {arguments.shown(given.tolist())}: {_IN_DICT}")
    array = given.astype(np.float64)
    if not np.all(np.isfinite(array)) or array.min() < 0.0:
        raise ValueError(f"{name} must be probabilities, not {array.tolist()}")
    if abs(array.sum() - 1.0) > 1e-6:
        raise ValueError(f"{name} must sum to 1; divide these by their sum, {array.sum():.6g}")
    normalised: Floats = array / array.sum()
    return normalised
