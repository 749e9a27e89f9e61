"""Choice of candidates: few values of many tables, without replacement, and without reading the tables whole.

`choose` is the optimal down-sampler of `llmppl.inference.resampling` for values that stand in blocks.
"""

from collections.abc import Callable, Sequence

import numpy as np

from llmppl.distributions import BLOCK, Floats, Ints, Table, read_blocks, values_at
from llmppl.inference.resampling import meet, threshold


def choose_from(
    rng: np.random.Generator, starts: Floats, tables: Sequence[Table], most: int
) -> tuple[Ints, Ints, Floats, Floats]:
    """Return the result of `choose` for tables, and the log-probability with which each value was kept.

    `starts`, (n,) float64, is added to the log-weights of each of the n tables.
    """

    def read(rows: Ints, blocks: Ints) -> Floats:
        return starts[rows, None] + read_blocks(tables, rows, blocks)

    log_sums = [start + table.log_sums for start, table in zip(starts, tables, strict=True)]
    rows, indices, log_weights = choose(rng, log_sums, read, most)
    log_kept = np.minimum(starts[rows] + values_at(tables, rows, indices) - log_weights, 0.0)
    return rows, indices, log_weights, log_kept


def choose(
    rng: np.random.Generator,
    log_sums: Sequence[Floats],
    read: Callable[[Ints, Ints], Floats],
    most: int,
) -> tuple[Ints, Ints, Floats]:
    """Return the rows, the indices in them, and the new log-weights of the kept values, in increasing order.

    This is the optimal down-sampler of `llmppl.inference.resampling` to `most` values: a value of weight w is kept with
    probability min(c w, 1), its *share*, and then has the larger of w and 1/c. Values stand in blocks of BLOCK, of
    which only the sums are known at first.

    - *Threshold.* A value with c w >= 1 is in a block whose sum is at least 1/c. Let d be the factor for which the
      sum over blocks of min(d sum, 1) is `most`. Then d >= c, since the share of a block is at most the sum of the
      shares of its values. So it suffices to open the blocks whose sum is at least 1/d, which are fewer than
      `most`. The values in them, with the sums of the other blocks, have the same threshold as all values.
    - *Choice.* Values are kept by the pivotal method, `meet`: first in each opened block, then in each row, then across
      rows. A block that was not opened has a share below 1 and meets others as one unit. If it is kept, one of its
      values is drawn in proportion to the weights.

    No cumulative sum is involved: an error of 1e-6 in the weights changes about one meeting in a million.

    Parameters
    ----------
    log_sums : sequence of (n_i,) float64
        For each row, the log of the sum of the weights of each of its blocks; -inf if no value in it is alive.
    read : callable
        `read(rows, blocks)`, for two (m,) arrays, returns the log-weights in these blocks: (m, BLOCK) float64, -inf
        after the end of a row. It is called at most twice.
    """
    width = max(map(len, log_sums), default=1)
    padded = np.full((len(log_sums), width), -np.inf)
    for row, each in zip(padded, log_sums, strict=True):
        row[: len(each)] = each
    sums = padded.ravel()  # a block is identified by its index here
    opened = np.flatnonzero(sums > -np.inf)
    if opened.size > most:
        opened = threshold(sums, most)[1]
    values = read(*np.divmod(opened, width)) if opened.size else np.empty((0, BLOCK))
    ids = opened[:, None] * BLOCK + np.arange(
        BLOCK
    )  # (m, BLOCK) of values: index of the block, and in the block
    sums[opened] = -np.inf
    units = np.concatenate([values.ravel(), sums])
    if np.count_nonzero(units > -np.inf) <= most:
        return (*np.divmod(ids[values > -np.inf], width * BLOCK), values[values > -np.inf])
    log_c, _ = threshold(units, most)
    block_shares, shares = (np.exp(np.minimum(each + log_c, 0.0)) for each in (padded, values))
    found, blocks = _meetings(rng, block_shares, shares, ids)
    log_weights = np.maximum(values[np.searchsorted(opened, found // BLOCK), found % BLOCK], -log_c)
    if blocks.size:
        drawn = blocks * BLOCK + _draw(rng, read(*np.divmod(blocks, width)))
        found = np.append(found, drawn)
        log_weights = np.append(log_weights, np.full(drawn.size, -log_c))
    order = np.argsort(found)
    return (*np.divmod(found[order], width * BLOCK), log_weights[order])


def _meetings(
    rng: np.random.Generator, blocks: Floats, values: Floats, ids: Ints
) -> tuple[Ints, Ints]:
    """Return the ids of the kept values, and the indices of the kept blocks that were not opened.

    Parameters
    ----------
    blocks : (rows, blocks) float64
        Shares; 0 for an opened block, whose values meet each other first.
    values : (m, BLOCK) float64
        Shares in the opened blocks.
    ids : (m, BLOCK) int64
    """
    units = np.arange(-blocks.size, 0).reshape(
        blocks.shape
    )  # negative ids stand for unopened blocks
    opened = ids[:, 0] // BLOCK
    in_blocks, blocks.ravel()[opened], units.ravel()[opened] = meet(rng, values, ids)
    in_rows, left, units = meet(rng, blocks, units)
    across_rows, left, units = meet(rng, left[None], units[None])
    found = np.concatenate(
        [in_blocks, in_rows, across_rows, units[left > 0.5]]
    )  # left is 0 or 1, to rounding
    return found[found >= 0], found[found < 0] + blocks.size


def _draw(rng: np.random.Generator, log_weights: Floats) -> Ints:
    """Draw the index of one value of each row in proportion to the weights, as the winner of an exponential race."""
    weights = np.exp(log_weights - log_weights.max(axis=1, keepdims=True))
    times = rng.standard_exponential(weights.shape) + 1e-300  # never 0 / 0
    places: Ints = np.argmax(weights / times, axis=1)
    return places
