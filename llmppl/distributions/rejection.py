"""Adaptive weighted rejection sampling: one accepted value, and an unbiased weight, from few tests.

Of values with weights p, some are *accepted*, the set A; whether one is can only be told by a test. Values are drawn
without replacement, each in proportion to p among those that are left, and tested, until one is accepted: x. What was
rejected on the way tells nothing of which accepted value came, so x has exactly the law p given A. With n the number of
rejected ones, m = n + 2 more are drawn in the same way and tested. Before the i-th of them, let F be the mass of those
accepted among them so far and R the mass that is left; then

    t_i = F + R 1[the i-th is accepted]             has the mean  p(A) - p(x)  given all that came before,

(Des Raj 1956) and so has the mean of t_1, ..., t_m, because m was known before the first. The weight

    w = p(x) + (t_1 + ... + t_m) / m                has  E[w | x] = p(A),  so that  E[w f(x)] = sum_A p f.

Where fewer than m are left, all are tested and w is p(A) itself. The weight is never below p(x), the number of tests
at most 2 n + 3. The t_i are uncorrelated given the first stage, each of a variance of at most (p(A) - p(x)) times the
rejected mass that is left, hence  Var w <= E[(p(A) - p(x)) r / (n + 2)],  r = p(not A) - p(those rejected before x).
Where every value is small, this is  Var w / p(A)^2 = -log(a) / (1 - a) - 1  for a = p(A). The mean number of tests
is at most 2 / a + 1.

Source: Lipkin et al. 2025, "Fast Controlled Generation from Language Models with Adaptive Weighted Rejection Sampling"
(arXiv:2504.05410), for rejection without replacement and a weight from further draws. The estimate itself is chosen
here: it takes a number of further draws that is known beforehand; those up to a second accepted value may be all.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_BLOCK = 256                                            # values summed together


def weighted_rejection(
    rng: np.random.Generator, weights: NDArray[np.float64], accepts: Callable[[int], bool]
) -> tuple[int, float] | None:
    """A place x with accepts(x), and w with E[w f(x)] = sum of weights[i] f(i) over the accepted places i.

    Parameters
    ----------
    weights : (V,) float64, not negative
        They need not sum to 1. What has weight 0 is never drawn.
    accepts : function of a place
        Is called at most once for each.

    Returns
    -------
    (x, w), w >= weights[x] > 0; or None where no place of positive weight is accepted, and all were tested.
    """
    left = _Left(weights)
    num_rejected = 0
    while True:
        if left.total == 0.0:
            return None
        x = left.draw(rng)
        if accepts(x):
            break
        num_rejected += 1
    num_more = num_rejected + 2
    found = estimates = 0.0
    for _ in range(num_more):
        rest = left.total
        if rest == 0.0:                                 # all tested: w = p(A); n and x decide whether it comes to this
            return x, float(weights[x]) + found
        place = left.draw(rng)
        accepted = accepts(place)
        estimates += found + rest * accepted
        found += float(weights[place]) * accepted
    return x, float(weights[x]) + estimates / num_more


class _Left:
    """Weights, drawn from without replacement in O(V / 256 + 256) for each draw.

    `total`, the mass that is left, is a sum of what is left, never a difference: it stays exact where it is small.
    """

    def __init__(self, weights: NDArray[np.float64]) -> None:
        self._weights = weights.copy()
        self._blocks = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK))
        self._cumulated = self._blocks.cumsum()

    @property
    def total(self) -> float:
        return float(self._cumulated[-1])

    def draw(self, rng: np.random.Generator) -> int:
        target = rng.random() * self._cumulated[-1]
        block = above(self._cumulated, target)
        before = self._cumulated[block - 1] if block else 0.0
        weights = self._weights[block * _BLOCK : (block + 1) * _BLOCK]
        place = above(weights.cumsum(), target - before)
        weights[place] = 0.0
        self._blocks[block] = weights.sum()
        self._cumulated = self._blocks.cumsum()
        return block * _BLOCK + place


def above(cumulated: NDArray[np.float64], target: float) -> int:
    """The first place whose cumulated weight exceeds `target`: one of positive weight, whatever the rounding."""
    place = int(cumulated.searchsorted(target, side="right"))
    return place if place < len(cumulated) else int(cumulated.searchsorted(cumulated[-1], side="left"))
