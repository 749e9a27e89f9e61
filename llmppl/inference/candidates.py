"""Candidates: choose at most `most` of all (row, value) without bias, looking only into a few blocks of values.

A candidate of weight w is kept with probability min(c w, 1), its *share*, where c makes the shares sum to `most`. One
kept for certain keeps its weight, another has the weight 1/c: the optimal down-sampler, as in
`llmppl.inference.resampling`. Values stand in blocks of BLOCK, of which only the sums are known at first.

- *Threshold.* One with c w >= 1 is in a block whose sum reaches 1/c. If the sum over blocks of min(d sum, 1) is `most`,
  d >= c, since the share of a block is at most the sum of those of its values. So the blocks that reach 1/d, fewer than
  `most`, are opened; the values in them and the sums of the others have the threshold that all values have.
- *The others* are kept by the pivotal method (Deville & Tillé 1998): two shares a and b meet. Where a + b < 1, one has
  all of it and the other nothing; else one is kept and the other goes on with a + b - 1; at random, so that each keeps
  its expectation. A block that was not opened has a share below 1 and meets others as one; if it is kept, one of its
  values is drawn in proportion to their weights.

No cumulative sum decides: an error of 1e-6 in the weights changes about one meeting in a million.
"""

from collections.abc import Callable, Sequence

import numpy as np

from llmppl.distributions import Floats
from llmppl.distributions.blocks import BLOCK, Ints
from llmppl.inference.resampling import threshold

Read = Callable[[Ints, Ints], Floats]


def choose(rng: np.random.Generator, log_sums: Sequence[Floats], read: Read, most: int) -> list[tuple[Ints, Floats]]:
    """The indices of the values of each row that are kept, increasing, and their new log-weights.

    They are `most` in all, and the sum of all weights is kept. If at most `most` are alive, they are kept as they are.

    Parameters
    ----------
    rng : np.random.Generator
    log_sums : sequence of (n_i,) float64
        For each row, the log of the sum of the weights of each of its blocks; -inf if nothing in it is alive.
    read : callable
        `read(rows, blocks)`, for two (m,) arrays, returns the log-weights in these blocks: (m, BLOCK) float64, -inf
        beyond the end of a row. It is called at most twice.
    most : int, at least 1
    """
    width = max(map(len, log_sums), default=0)
    sums = np.full((len(log_sums), width), -np.inf)
    for row, each in zip(sums, log_sums, strict=True):
        row[: len(each)] = each
    open_ = sums > -np.inf
    if np.count_nonzero(open_) > most:
        open_ = threshold(sums.ravel(), most)[1].reshape(sums.shape)
    opened = np.flatnonzero(open_)                      # (m,) a block is known by its place in `sums`
    values = read(*np.divmod(opened, width)) if opened.size else np.empty((0, BLOCK))
    ids = opened[:, None] * BLOCK + np.arange(BLOCK)    # (m, BLOCK) and a value by that of its block and its own in it
    sums[open_] = -np.inf
    units = np.concatenate([values.ravel(), sums.ravel()])
    alive = values > -np.inf
    if np.count_nonzero(units > -np.inf) <= most:
        return _by_row(ids[alive], values[alive], sums.shape)
    log_c, reached = threshold(units, most)
    certain = reached[: values.size].reshape(values.shape)
    shares = np.exp(np.minimum(values + log_c, 0.0))
    shares[certain] = 0.0
    found, left, left_ids = _meet(rng, shares, ids)
    shares = np.exp(np.minimum(sums + log_c, 0.0))
    blocks = np.arange(-sums.size, 0).reshape(sums.shape)       # below 0, what is still a whole block
    shares[open_], blocks[open_] = left, left_ids
    found_too, left, left_ids = _meet(rng, shares, blocks)
    found_last, left, left_ids = _meet(rng, left[None], left_ids[None])
    found = np.concatenate([found, found_too, found_last, left_ids[left > 0.5]])     # left is 0 or 1, to rounding
    whole = found[found < 0] + sums.size
    if whole.size:
        found[found < 0] = whole * BLOCK + _draw(rng, read(*np.divmod(whole, width)))
    kept = np.concatenate([ids[certain], found])
    log_weights = np.concatenate([values[certain], np.full(len(found), -log_c)])
    order = np.argsort(kept)
    return _by_row(kept[order], log_weights[order], sums.shape)


def _meet(rng: np.random.Generator, shares: Floats, ids: Ints) -> tuple[Ints, Floats, Ints]:
    """Pairs of each row meet until one unit of it is left: the ids of those kept, and the (m,) shares and ids left.

    Parameters
    ----------
    shares : (m, n) float64, each at most 1; one of 0 is never kept
    ids : (m, n) int64
    """
    kept = [np.empty(0, dtype=np.int64)]
    while shares.shape[1] > 1:
        half = shares.shape[1] // 2
        a, b, odd = shares[:, :half], shares[:, half : 2 * half], shares[:, 2 * half :]
        one, other, odd_ids = ids[:, :half], ids[:, half : 2 * half], ids[:, 2 * half :]
        both = a + b
        full = both >= 1.0
        first = rng.random(both.shape) * np.where(full, 2.0 - both, both) < np.where(full, 1.0 - b, a)
        kept.append(np.where(first, one, other)[full])
        shares = np.concatenate([both - full, odd], axis=1)
        ids = np.concatenate([np.where(first ^ full, one, other), odd_ids], axis=1)
    return np.concatenate(kept), shares[:, 0], ids[:, 0]


def _draw(rng: np.random.Generator, log_weights: Floats) -> Ints:
    """The place of one value of each row, drawn in proportion to the weights: the first to arrive of a race."""
    weights = np.exp(log_weights - log_weights.max(axis=1, keepdims=True))
    times = rng.standard_exponential(weights.shape) + 1e-300        # never 0 / 0
    places: Ints = np.argmax(weights / times, axis=1)
    return places


def _by_row(ids: Ints, log_weights: Floats, shape: tuple[int, int]) -> list[tuple[Ints, Floats]]:
    """The ids, increasing, of values in `shape` blocks as indices within each row."""
    length = shape[1] * BLOCK
    cuts = np.searchsorted(ids, np.arange(1, shape[0]) * length)
    rows = zip(np.split(ids, cuts), np.split(log_weights, cuts), strict=True) if shape[0] else ()
    return [(each - i * length, weights) for i, (each, weights) in enumerate(rows)]
