"""Resampling: choose N of M weighted particles without biasing sums over them.

Every scheme is `scheme(rng, log_weights, N) -> (ancestors, log_weights)`: `ancestors` indexes the M old particles, in
increasing order, and the new weights satisfy  E[sum_i w'_i f(x_i)] = sum_j w_j f(x_j)  for every f. Weights need not
be normalised, and their sum is kept exactly, not only on average.

A particle is *dead* if its log-weight is -inf. No scheme returns a dead particle. If all are dead, it returns two empty
arrays.

`multinomial`, `stratified` and `systematic` return N particles of equal weight, with repeats. The number of copies
varies most under multinomial; systematic uses one uniform in all. `optimal` returns N distinct particles of
unequal weight. It never copies, as a down-sampler of M > N different particles needs.

A *selection* chooses the surviving candidates of a step, or keeps all: `select(rng, log_weights, active)` returns the
same as a scheme, and `active` is True if any candidate continues. `DownSample` and `ResampleBelow` are selections.

Sources: Fearnhead & Clifford (2003), "On-line inference for hidden Markov models via particle filters", for `optimal`;
Deville & Tillé (1998), "Unequal probability sampling without replacement through a splitting method", for `meet`;
Carpenter, Clifford & Fearnhead (1999), "Improved particle filter for nonlinear problems", for `systematic`; Douc,
Cappe & Moulines (2005), "Comparison of resampling schemes for particle filtering", for the others.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llmppl.distributions import logsumexp
from llmppl.support.arguments import count, probability

Resampled = tuple[NDArray[np.int64], NDArray[np.float64]]
Scheme = Callable[[np.random.Generator, ArrayLike, int], Resampled]


def multinomial(rng: np.random.Generator, log_weights: ArrayLike, N: int) -> Resampled:
    """Draw N times independently by weight.

    Parameters
    ----------
    log_weights : (M,) array_like of float
        -inf for a dead particle; ValueError for NaN and +inf.

    Returns
    -------
    ancestors : (N,) int64 ndarray, increasing
    log_weights : (N,) float64 ndarray
        logsumexp of the old ones - log N, for each. Both arrays are empty if every particle is dead.

    Examples
    --------
    >>> ancestors, log_weights = multinomial(np.random.default_rng(0), np.log([0.1, 0.2, 0.7]), N=4)
    >>> ancestors.tolist(), np.exp(log_weights).round(4).tolist()
    ([0, 0, 1, 2], [0.25, 0.25, 0.25, 0.25])
    """
    return _at_points(log_weights, N, lambda: np.sort(rng.random(N)))


def stratified(rng: np.random.Generator, log_weights: ArrayLike, N: int) -> Resampled:
    """Draw once from each of N equal strata of the cumulated weight, each with its own uniform; see `multinomial`.

    Examples
    --------
    >>> ancestors, log_weights = stratified(np.random.default_rng(0), np.log([0.1, 0.2, 0.7]), N=4)
    >>> ancestors.tolist()
    [1, 2, 2, 2]
    """
    return _at_points(log_weights, N, lambda: (np.arange(N) + rng.random(N)) / N)


def systematic(rng: np.random.Generator, log_weights: ArrayLike, N: int) -> Resampled:
    """Draw once from each of N equal strata of the cumulated weight, at the same place in each; see `multinomial`.

    Particle j has floor(N W_j) or ceil(N W_j) copies (W_j normalised).

    Examples
    --------
    >>> ancestors, log_weights = systematic(np.random.default_rng(0), np.log([0.1, 0.2, 0.7]), N=4)
    >>> ancestors.tolist()
    [1, 2, 2, 2]
    """
    return _at_points(log_weights, N, lambda: (np.arange(N) + rng.random()) / N)


def _at_points(
    log_weights: ArrayLike, N: int, points: Callable[[], NDArray[np.float64]]
) -> Resampled:
    """Return the particles at N points of the cumulated weight, which are drawn if any particle is alive."""
    alive, log_weights, N = _checked(log_weights, N)
    if not alive.size:
        return alive, log_weights
    return alive[_owners(log_weights, points())], np.full(N, logsumexp(log_weights) - np.log(N))


def optimal(rng: np.random.Generator, log_weights: ArrayLike, N: int) -> Resampled:
    """Return N distinct particles: those with c w >= 1, the others with probability c w; sum_j min(c w_j, 1) = N.

    A particle with c w >= 1 keeps its weight. Another one gets the weight 1/c if the pivotal method keeps it. Of all
    unbiased schemes that leave at most N positive weights, this one has the least expected squared change of the
    weights (Fearnhead & Clifford 2003). If at most N are alive, all of them are returned as they are. The parameters
    are those of `multinomial`.

    Returns
    -------
    ancestors : (n,) int64 ndarray, strictly increasing
        n is N, or the number of live particles if that is less.
    log_weights : (n,) float64 ndarray

    Examples
    --------
    >>> ancestors, log_weights = optimal(np.random.default_rng(0), np.log([0.7, 0.1, 0.1, 0.1]), N=2)
    >>> ancestors.tolist(), np.exp(log_weights).round(4).tolist()
    ([0, 1], [0.7, 0.3])
    """
    alive, log_weights, N = _checked(log_weights, N)
    if alive.size <= N:
        return alive, log_weights
    log_c, _ = threshold(log_weights, N)
    shares = np.exp(np.minimum(log_weights + log_c, 0.0))  # 1 to rounding does the same as 1
    kept, left, last = meet(rng, shares[None], np.arange(alive.size)[None])
    kept = np.sort(np.concatenate([kept, last[left > 0.5]]))  # left is 0 or 1, to rounding
    return alive[kept], np.maximum(log_weights[kept], -log_c)


def meet(
    rng: np.random.Generator, shares: NDArray[np.float64], ids: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """Let neighbours in each row meet until one is left. Return the kept ids, and (m,) shares and ids of the last.

    This is the pivotal method. Two shares a and b meet: if a + b < 1, one gets a + b and the other 0. Otherwise one is
    kept, and the other continues with a + b - 1. Chance decides which, so that each keeps its expectation. Neighbours,
    such as two extensions of one particle, are rarely kept or removed together, and no pattern of the order matters.

    Parameters
    ----------
    shares : (m, n) float64, each at most 1; a unit of share 0 is never kept
    ids : (m, n) int64
    """
    kept = [np.empty(0, dtype=np.int64)]
    while shares.shape[1] > 1 and len(shares):
        half = shares.shape[1] // 2
        a = shares[:, : 2 * half : 2]
        b = shares[:, 1::2]
        odd = shares[:, 2 * half :]
        one = ids[:, : 2 * half : 2]
        other = ids[:, 1::2]
        odd_ids = ids[:, 2 * half :]
        both = a + b
        full = both >= 1.0
        # The last two sum to 1, to rounding: at a + b = 1 both cases must keep the same unit for the same uniform.
        first = rng.random(both.shape) * np.where(full, (1.0 - a) + (1.0 - b), both) < np.where(
            full, 1.0 - b, a
        )
        kept.append(np.where(first[full], one[full], other[full]))
        shares = both - full
        ids = np.where(first ^ full, one, other)
        if odd.size:
            shares = np.concatenate([shares, odd], axis=1)
            ids = np.concatenate([ids, odd_ids], axis=1)
    return np.concatenate(kept), shares[:, 0], ids[:, 0]


@dataclass(frozen=True)
class DownSample:
    """Selection of N survivors by `optimal` after every step, as in SMC steering.

    Examples
    --------
    >>> program = ConstrainedText(lm, "He was", [" happy", " sad"])
    >>> step = next(SMC(program, Copies(2, K=3), DownSample(2), seed=0))
    >>> len(step.candidates), len(step.particles)
    (6, 2)
    """

    N: int

    def __post_init__(self) -> None:
        count("N", self.N)

    def __call__(
        self, rng: np.random.Generator, log_weights: NDArray[np.float64], active: bool
    ) -> Resampled:
        return optimal(rng, log_weights, self.N)


@dataclass(frozen=True)
class ResampleBelow:
    """Selection: N survivors by `scheme` if ess < `ess_threshold` N, else all live ones. ValueError for `optimal`.

    Examples
    --------
    >>> select, rng = ResampleBelow(4, ess_threshold=0.5), np.random.default_rng(0)
    >>> select(rng, np.log([0.4, 0.2, 0.2, 0.2]), active=True)[0].tolist()          # ess 3.6
    [0, 1, 2, 3]
    >>> select(rng, np.log([0.97, 0.01, 0.01, 0.01]), active=True)[0].tolist()      # ess 1.1
    [0, 0, 0, 0]
    """

    N: int
    ess_threshold: float = 0.5
    scheme: Scheme = systematic

    def __post_init__(self) -> None:
        count("N", self.N)
        if self.scheme is optimal:
            raise ValueError(
                "optimal keeps N of N particles as they are, so it cannot resample here; use systematic"
            )
        probability("ess_threshold", self.ess_threshold)

    def __call__(
        self, rng: np.random.Generator, log_weights: NDArray[np.float64], active: bool
    ) -> Resampled:
        log_total = logsumexp(log_weights)
        if active and log_total > -math.inf:
            if (
                math.exp(2.0 * log_total - logsumexp(2.0 * log_weights))
                < self.ess_threshold * self.N
            ):
                return self.scheme(rng, log_weights, self.N)
        alive = np.flatnonzero(log_weights > -np.inf)
        return alive, log_weights[alive]


def threshold(log_weights: NDArray[np.float64], N: int) -> tuple[float, NDArray[np.int64]]:
    """Return log c with sum_j min(c w_j, 1) = N, and the increasing indices of fewer than N particles with c w >= 1.

    With the k largest kept for certain, k + c (sum of the others) = N. The right k is the least one for which the next
    weight w has c w <= 1. It is below N, so only the N largest are sorted: O(M + N log N). A weight with c w = 1 to
    rounding may be on either side, which changes neither its probability nor its weight.

    Parameters
    ----------
    log_weights : (M,) float64, more than N of them above -inf
    N : int, at least 1
    """
    alive = np.flatnonzero(log_weights > -np.inf)
    log_weights = log_weights[alive]
    order = np.argpartition(log_weights, log_weights.size - N - 1)[log_weights.size - N - 1 :]
    order = order[np.argsort(-log_weights[order], kind="stable")]
    top = order[:N]
    next_one = order[N]
    rest = log_weights - log_weights[next_one]
    rest[top] = -np.inf
    log_rest = log_weights[next_one] + np.log(np.sum(np.exp(rest, out=rest)))
    rising = np.append(log_rest, log_weights[top[::-1]])
    log_tails = np.logaddexp.accumulate(rising)[:0:-1]  # (N,) log of the sum without the k largest
    reached = np.log(np.arange(N, 0, -1)) + log_weights[top] <= log_tails
    k = int(np.argmax(reached))  # true at N - 1, if nowhere before
    return float(np.log(N - k) - log_tails[k]), alive[np.sort(top[:k])]


def _checked(log_weights: ArrayLike, N: int) -> tuple[NDArray[np.int64], NDArray[np.float64], int]:
    """Return the indices of the live particles, their log-weights, and N. Raise an error for invalid arguments."""
    N = count("N", N)
    log_weights = np.asarray(log_weights, dtype=np.float64)
    if log_weights.ndim != 1:
        raise ValueError(f"log_weights must have one dimension; got shape {log_weights.shape}")
    if not np.max(log_weights, initial=-np.inf) < np.inf:  # True for NaN, too
        wrong = np.flatnonzero(~(log_weights < np.inf))
        raise ValueError(
            f"log_weights[{wrong[0]}] is {log_weights[wrong[0]]}; a log weight is finite, or -inf if dead"
        )
    alive = np.flatnonzero(log_weights > -np.inf).astype(np.int64, copy=False)
    return alive, log_weights[alive], N


def _owners(log_weights: NDArray[np.float64], points: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return, for each of (n,) points, the particle in whose part of [0, 1) it lies. Parts are as long as weights."""
    cum = log_weights - np.max(log_weights)
    np.cumsum(np.exp(cum, out=cum), out=cum)
    points = (
        np.minimum(points, np.nextafter(1.0, 0.0)) * cum[-1]
    )  # (i + u) / n may round to 1, past the last part
    return np.searchsorted(cum, points, side="right").astype(
        np.int64, copy=False
    )  # skips parts of length 0
