"""Adaptive weighted rejection sampling: one accepted value, and an unbiased weight, from few tests.

Of values with weights p, some are *accepted*, the set A; whether one is can only be told by a test. Values are drawn
without replacement, each in proportion to p among those that are left, and tested, until one is accepted: x. What was
rejected on the way tells nothing of which accepted value came, so x is distributed exactly as p given A. With n the
number of rejected ones, m = n + 2 more are drawn in the same way and tested. Before the i-th of them, let F be the mass
of those accepted among them so far and R the mass that is left; then

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

import math
from collections.abc import Callable

import numpy as np

from llmppl.distributions.blocks import BLOCK, Table, above
from llmppl.distributions.weights import Floats


class Left:
    """The weights of a table that are left, as parts of its heaviest block, to draw from without replacement.

    `total` is a sum of what is there, never a difference: it stays exact where it is small. A weight that is no float
    above 0 beside the heaviest block is not drawn.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self.log_scale = float(table.log_sums.max(initial=-math.inf))
        self._sums = np.exp(table.log_sums - (0.0 if self.log_scale == -math.inf else self.log_scale))
        self._inside: dict[int, Floats] = {}            # of the blocks that were looked into

    @property
    def total(self) -> float:
        return float(self._sums.sum())

    def take(self, rng: np.random.Generator) -> tuple[int, float] | None:
        """An index drawn in proportion to the weights, taken away, and its weight; None where none is left."""
        while True:
            cumulated = self._sums.cumsum()
            if not cumulated.size or cumulated[-1] == 0.0:
                return None
            target = rng.random() * cumulated[-1]
            block = above(cumulated, target)
            if block not in self._inside:
                self._inside[block] = np.exp(self._table.read(np.array([block]))[0] - self.log_scale)
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
    """An index x with accepts(x), and log w with E[w f(x)] = sum of the weights times f(i) over the accepted i.

    Parameters
    ----------
    table : Table
        Log-weights, which need not be normalised. What has weight 0 is never drawn.
    accepts : function of an index
        Is called at most once for each.

    Returns
    -------
    (x, log w), w not below the weight of x; or None where no index that can be drawn is accepted, and all were tested.
    """
    left = Left(table)
    num_rejected = 0
    while True:
        taken = left.take(rng)
        if taken is None:
            return None
        x, weight = taken
        if accepts(x):
            break
        num_rejected += 1
    num_more = num_rejected + 2
    found = estimates = 0.0
    for _ in range(num_more):
        rest = left.total
        taken = left.take(rng)
        if taken is None:                               # all tested: w = p(A); n and x decide whether it comes to this
            return x, math.log(weight + found) + left.log_scale
        accepted = accepts(taken[0])
        estimates += found + rest * accepted
        found += taken[1] * accepted
    return x, math.log(weight + estimates / num_more) + left.log_scale

