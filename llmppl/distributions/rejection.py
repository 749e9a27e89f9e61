"""Adaptive weighted rejection sampling: one accepted value, and an unbiased weight, from few tests.

Values have weights p. Some are *accepted*, the set A, and only a test shows whether a value is. First stage: draw
values without replacement, each in proportion to p among the remaining ones, and test them until one is accepted: x.
The rejected values carry no information about x, so x is distributed exactly as p given A. Let n be their number.

Second stage: draw and test m = n + 2 more values in the same way. Before the i-th of them, let F be the mass of the
values accepted in this stage so far, and R the remaining mass. Then

    t_i = F + R 1[the i-th is accepted]             has the mean  p(A) - p(x)  given all earlier draws

(Des Raj 1956), and so has the mean of t_1, ..., t_m, because m was known before the first. The weight

    w = p(x) + (t_1 + ... + t_m) / m                has  E[w | x] = p(A),  so that  E[w f(x)] = sum_A p f.

If fewer than m values remain, all are tested and w is p(A) itself. The weight is never below p(x). The number of tests
is at most 2 n + 3, and its mean at most 2 / a + 1 for a = p(A). Given the first stage, the t_i are uncorrelated, and
the variance of each is at most (p(A) - p(x)) times the remaining rejected mass. Hence
Var w <= E[(p(A) - p(x)) r / (n + 2)],  r = p(not A) - p(values rejected before x).  If every value is small, this is
Var w / p(A)^2 = -log(a) / (1 - a) - 1.

Source: Lipkin et al. 2025, "Fast Controlled Generation from Language Models with Adaptive Weighted Rejection Sampling"
(arXiv:2504.05410), for rejection without replacement and a weight from further draws. The estimate itself is our
choice: its number of further draws is known beforehand, while draws up to a second accepted value may be all values.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from llmppl.distributions.blocks import BLOCK, Floats, Table, above


class RemainingWeights:
    """Remaining weights of a table, relative to its heaviest block, for draws without replacement.

    `total` is a sum of the remaining weights, never a difference, so it is exact even if it is small. A weight that
    underflows relative to the heaviest block is not drawn.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self.log_scale = float(table.log_sums.max(initial=-math.inf))
        self._sums = np.exp(
            table.log_sums - (0.0 if self.log_scale == -math.inf else self.log_scale)
        )
        self._inside: dict[int, Floats] = {}  # weights of the blocks that were read

    @property
    def total(self) -> float:
        return float(self._sums.sum())

    def take(self, rng: np.random.Generator) -> tuple[int, float] | None:
        """Draw an index in proportion to the weights, remove it, and return it and its weight; None if none remains."""
        while True:
            cumulated = self._sums.cumsum()
            if not cumulated.size or cumulated[-1] == 0.0:
                return None
            target = rng.random() * cumulated[-1]
            block = above(cumulated, target)
            if block not in self._inside:
                self._inside[block] = np.exp(
                    self._table.read(np.array([block]))[0] - self.log_scale
                )
            inside = self._inside[block]
            place = above(inside.cumsum(), target - (cumulated[block - 1] if block else 0.0))
            weight = float(inside[place])
            inside[place] = 0.0
            self._sums[block] = inside.sum()
            if weight > 0.0:
                return block * BLOCK + place, weight


def weighted_rejection(
    rng: np.random.Generator, table: Table, accepts: Callable[[int], bool]
) -> tuple[int, float] | None:
    """Draw an accepted index x, and log w with E[w f(x)] = sum of weight_i f(i) over the accepted i.

    Parameters
    ----------
    table : Table
        Log-weights, which need not be normalised. Indices of weight 0 are never drawn.
    accepts : function of an index to bool
        It is called at most once for each index.

    Returns
    -------
    (x, log w), w not below the weight of x. None if all indices of positive weight were tested and rejected.
    """
    remaining = RemainingWeights(table)
    num_rejected = 0
    while True:
        taken = remaining.take(rng)
        if taken is None:
            return None
        x, weight = taken
        if accepts(x):
            break
        num_rejected += 1
    num_more = num_rejected + 2
    found = estimates = 0.0
    for _ in range(num_more):
        rest = remaining.total
        taken = remaining.take(rng)
        if taken is None:  # all are tested: w = p(A). Only n and x decide if this happens
            return x, math.log(weight + found) + remaining.log_scale
        accepted = accepts(taken[0])
        estimates += found + rest * accepted
        found += taken[1] * accepted
    return x, math.log(weight + estimates / num_more) + remaining.log_scale
