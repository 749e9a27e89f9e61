"""Choice of candidates: keep at most `most` of all (row, value) without bias, and read only a few blocks of values.

A candidate of weight w is kept with probability min(c w, 1), its *share*, where c makes the shares sum to `most`. A
candidate with c w >= 1 keeps its weight, another gets the weight 1/c. This is the optimal down-sampler of
`llmppl.inference.resampling`. Values stand in blocks of BLOCK, of which only the sums are known at first.

- *Threshold.* A value with c w >= 1 is in a block whose sum is at least 1/c. Let d be the factor for which the sum over
  blocks of min(d sum, 1) is `most`. Then d >= c, since the share of a block is at most the sum of the shares of its
  values. So it suffices to open the blocks whose sum is at least 1/d, which are fewer than `most`. The values in them,
  with the sums of the other blocks, have the same threshold as all values.
- *The others* are kept by the pivotal method (Deville & Tillé 1998), in which two shares a and b meet. If a + b < 1,
  one gets a + b and the other 0. Otherwise one is kept and the other continues with a + b - 1. Chance decides which, so
  that each keeps its expectation. A block that was not opened has a share below 1 and meets others as one unit. If it
  is kept, one of its values is drawn in proportion to the weights.

No cumulative sum is involved: an error of 1e-6 in the weights changes about one meeting in a million.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from llmppl.distributions import BLOCK, Floats, Ints, log_sum
from llmppl.inference.resampling import threshold

Read = Callable[[Ints, Ints], Floats]


def choose(rng: np.random.Generator, log_sums: Sequence[Floats], read: Read, most: int) -> list[tuple[Ints, Floats]]:
    """Return the increasing indices of the kept values of each row, and their new log-weights.

    `most` values are kept in all, and the sum of all weights stays the same. If at most `most` are alive, all are kept
    as they are.

    Parameters
    ----------
    rng : np.random.Generator
    log_sums : sequence of (n_i,) float64
        For each row, the log of the sum of the weights of each of its blocks; -inf if no value in it is alive.
    read : callable
        `read(rows, blocks)`, for two (m,) arrays, returns the log-weights in these blocks: (m, BLOCK) float64, -inf
        after the end of a row. It is called at most twice.
    most : int, at least 1
    """
    shape = len(log_sums), max(map(len, log_sums), default=0)
    padded = np.full(shape, -np.inf)
    for row, each in zip(padded, log_sums, strict=True):
        row[: len(each)] = each
    sums = padded.ravel()                               # a block is identified by its index here
    opened = np.flatnonzero(sums > -np.inf)
    if opened.size > most:
        opened = np.flatnonzero(threshold(sums, most)[1])
    values = read(*np.divmod(opened, shape[1])) if opened.size else np.empty((0, BLOCK))
    ids = opened[:, None] * BLOCK + np.arange(BLOCK)    # (m, BLOCK) of values: index of the block, and in the block
    sums[opened] = -np.inf
    units = np.concatenate([values.ravel(), sums])
    if np.count_nonzero(units > -np.inf) <= most:
        return _by_row(ids[values > -np.inf], values[values > -np.inf], shape)
    log_c, reached = threshold(units, most)
    certain = reached[: values.size].reshape(values.shape)
    kept, log_weights = ids[certain], values[certain]
    values = np.where(certain, -np.inf, values)
    sums[opened] = log_sum(values)

    found, blocks = _meetings(rng, padded + log_c, values + log_c, ids)
    inside = np.empty((blocks.size, BLOCK))
    known = np.full(sums.size, -1)
    known[opened] = np.arange(opened.size)
    known = known[blocks]
    inside[known >= 0] = values[known[known >= 0]]
    if (known < 0).any():
        inside[known < 0] = read(*np.divmod(blocks[known < 0], shape[1]))
    kept = np.concatenate([kept, found, blocks * BLOCK + _draw(rng, inside)])
    log_weights = np.concatenate([log_weights, np.full(kept.size - log_weights.size, -log_c)])
    order = np.argsort(kept)
    return _by_row(kept[order], log_weights[order], shape)


def _meetings(rng: np.random.Generator, log_shares: Floats, values: Floats, ids: Ints) -> tuple[Ints, Ints]:
    """Return the ids of the kept values, and the indices of the kept unopened blocks.

    Parameters
    ----------
    log_shares : (rows, blocks) float64
    values : (m, BLOCK) float64
        Log-shares in the opened blocks. Blocks whose shares sum to more than one first meet within themselves.
    ids : (m, BLOCK) int64
    """
    shares = np.exp(np.minimum(log_shares, 0.0))
    units = np.arange(-shares.size, 0).reshape(shares.shape)        # negative ids stand for unopened blocks
    places = ids[:, 0] // BLOCK
    many = log_shares.ravel()[places] > 0.0
    in_blocks, shares.ravel()[places[many]], units.ravel()[places[many]] = _meet(
        rng, np.exp(np.minimum(values[many], 0.0)), ids[many]
    )
    in_rows, left, units = _meet(rng, shares, units)
    across_rows, left, units = _meet(rng, left[None], units[None])
    found = np.concatenate([in_blocks, in_rows, across_rows, units[left > 0.5]])    # left is 0 or 1, to rounding
    return found[found >= 0], found[found < 0] + shares.size


def _meet(rng: np.random.Generator, shares: Floats, ids: Ints) -> tuple[Ints, Floats, Ints]:
    """Let pairs of units in each row meet until one is left. Return the kept ids, and (m,) shares and ids of the last.

    Parameters
    ----------
    shares : (m, n) float64, each at most 1; a unit of share 0 is never kept
    ids : (m, n) int64
    """
    kept = [np.empty(0, dtype=np.int64)]
    while shares.shape[1] > 1 and len(shares):
        half = shares.shape[1] // 2
        a, b, odd = shares[:, :half], shares[:, half : 2 * half], shares[:, 2 * half :]
        one, other, odd_ids = ids[:, :half], ids[:, half : 2 * half], ids[:, 2 * half :]
        both = a + b
        full = both >= 1.0
        # The last two sum to 1, to rounding: at a + b = 1 both cases must keep the same unit for the same uniform.
        first = rng.random(both.shape) * np.where(full, 2.0 - both, both) < np.where(full, 1.0 - b, a)
        kept.append(np.where(first, one, other)[full])
        shares, ids = both - full, np.where(first ^ full, one, other)
        if odd.size:
            shares, ids = np.concatenate([shares, odd], axis=1), np.concatenate([ids, odd_ids], axis=1)
    return np.concatenate(kept), shares[:, 0], ids[:, 0]


def _draw(rng: np.random.Generator, log_weights: Floats) -> Ints:
    """Draw the index of one value of each row in proportion to the weights, as the winner of an exponential race."""
    weights = np.exp(log_weights - log_weights.max(axis=1, keepdims=True))
    times = rng.standard_exponential(weights.shape) + 1e-300        # never 0 / 0
    places: Ints = np.argmax(weights / times, axis=1)
    return places


def _by_row(ids: Ints, log_weights: Floats, shape: tuple[int, int]) -> list[tuple[Ints, Floats]]:
    """Split increasing ids of values in `shape` blocks into indices within each row, with their log-weights."""
    starts = np.arange(shape[0] + 1) * shape[1] * BLOCK
    cuts = itertools.pairwise(np.searchsorted(ids, starts).tolist())
    return [(ids[a:b] - start, log_weights[a:b]) for start, (a, b) in zip(starts.tolist(), cuts, strict=False)]
