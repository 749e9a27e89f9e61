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

from collections.abc import Callable

import numpy as np

from llmppl.distributions.weights import Floats, Weights


def weighted_rejection(
    rng: np.random.Generator, weights: Floats, accepts: Callable[[int], bool]
) -> tuple[int, float] | None:
    """An index x with accepts(x), and w with E[w f(x)] = sum of weights[i] f(i) over the accepted i.

    Parameters
    ----------
    weights : (V,) float64, not negative
        They need not sum to 1. What has weight 0 is never drawn.
    accepts : function of an index
        Is called at most once for each.

    Returns
    -------
    (x, w), w >= weights[x] > 0; or None where no index of positive weight is accepted, and all were tested.
    """
    left = Weights(weights.copy())
    num_rejected = 0
    while True:
        if left.total == 0.0:
            return None
        x = left.draw(rng)
        left.remove(x)
        if accepts(x):
            break
        num_rejected += 1
    num_more = num_rejected + 2
    found = estimates = 0.0
    for _ in range(num_more):
        rest = left.total
        if rest == 0.0:                                 # all tested: w = p(A); n and x decide whether it comes to this
            return x, float(weights[x]) + found
        index = left.draw(rng)
        left.remove(index)
        accepted = accepts(index)
        estimates += found + rest * accepted
        found += float(weights[index]) * accepted
    return x, float(weights[x]) + estimates / num_more
