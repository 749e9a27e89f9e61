"""Tables of log-weights, with sums over blocks of values: a choice among many values need not read all of them.

Log-weights keep their type and place: a row of a language model's logits is float32, and may stay on its device. A mask
makes a new table. Sums are computed in float64 when first needed, without underflow: a block has its exact sum even if
its weights are e^-2000 of another block's.
"""

from __future__ import annotations

import functools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

BLOCK = 256  # values summed together
_LEAST = -700.0  # np.exp is ten times slower if it underflows
_FAINT = 1e-250  # a smaller sum is computed again, relative to its top
_MAX_SCRATCH = 1 << 16  # weights summed in one call

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


def logsumexp(log_weights: ArrayLike) -> Any:
    """Return (...,) logs of the sums of (..., n) weights, a float for (n,); -inf if all are 0, or n is 0.

    Examples
    --------
    >>> round(logsumexp([-1000.0, -1000.0]), 4)
    -999.3069
    """
    log_weights = np.asarray(log_weights, dtype=np.float64)
    if log_weights.ndim == 1 and log_weights.size:
        top = float(log_weights.max())
        if math.isfinite(top):
            return top + math.log(np.exp(log_weights - top).sum())
    tops = log_weights.max(-1, initial=-np.inf)
    finite = np.where(np.isfinite(tops), tops, 0.0)  # -inf - -inf would be NaN
    with np.errstate(divide="ignore"):
        logs = finite + np.log(np.exp(log_weights - finite[..., None]).sum(-1))
    return logs if logs.ndim else float(logs)


class Table(ABC):
    """Constant log-weights of n values, in blocks of `BLOCK`; the last block may be shorter.

    nbytes : bytes of the log-weights, on any device, and of the sums
    owner : object that reads blocks of several tables together, or None

    Examples
    --------
    >>> table = Finite(["red", "blue"], [0.0, math.log(3)]).table()
    >>> isinstance(table, Table), len(table)
    (True, 2)
    >>> round(math.exp(table.log_total), 4)
    4.0
    """

    nbytes: int
    owner: Any = None
    _log_sums: Floats | None = None
    _log_total: float | None = None
    _cumulated: Floats | None = None  # cumulated sums of the blocks, relative to the largest sum

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def log_sums(self) -> Floats:
        """(number of blocks,) log of the sum of the weights in each block; -inf if all are 0."""

    @abstractmethod
    def read(self, blocks: Ints) -> Floats:
        """Return (m, BLOCK) log-weights of (m,) blocks; -inf past the end."""

    @abstractmethod
    def at(self, index: int) -> float:
        """Return the log-weight of one value."""

    @abstractmethod
    def whole(self, log_scale: float = 0.0) -> Floats:
        """Return (n,) float64, read-only: all log-weights minus `log_scale`."""

    @abstractmethod
    def masked(self, mask: Mask) -> Table:
        """Return a table with -inf where `mask`, (n,) bool, is False."""

    @property
    def log_total(self) -> float:
        """Log of the sum of all weights."""
        if self._log_total is None:
            top = float(self.log_sums.max(initial=-np.inf))
            if top > -math.inf:
                top += math.log(np.exp(self.log_sums - top).cumsum()[-1])
            self._log_total = top
        return self._log_total

    def draw(self, rng: np.random.Generator) -> int:
        """Draw an index in proportion to the weights: first a block, then inside it. ValueError if all weights are 0.

        Each draw uses its own uniform. So rounding of the sums is not magnified in a block of small weight.
        """
        if self.log_total == -math.inf:
            raise ValueError("no weight of the table is positive")
        if self._cumulated is None:
            self._cumulated = np.exp(self.log_sums - self.log_sums.max()).cumsum()
        block = above(self._cumulated, rng.random() * self._cumulated[-1])
        inside = self.read(np.array([block]))[0]
        inside -= inside.max()
        cumulated = np.exp(inside, out=inside).cumsum()
        return block * BLOCK + above(cumulated, rng.random() * cumulated[-1])


class ArrayTable(Table):
    """Table of an (n,) float32 or float64 array, restricted by `mask`, (n,) bool, if there is one.

    `base` is the table without the mask. `top` is its largest log-weight, if known.

    Examples
    --------
    >>> table = ArrayTable(np.log([0.5, 0.25, 0.25]), mask=np.array([True, True, False]))
    >>> round(math.exp(table.log_total), 4), table.at(2)
    (0.75, -inf)
    """

    def __init__(
        self,
        array: NDArray[Any],
        mask: Mask | None = None,
        base: ArrayTable | None = None,
        top: float | None = None,
    ) -> None:
        self.array = array
        self.mask = mask
        # plus two sums for each further block
        self.nbytes = array.nbytes + 16 * ((len(array) - 1) // BLOCK)
        self._base = base
        self._top = top

    def __len__(self) -> int:
        return len(self.array)

    @property
    def top(self) -> float:
        """Largest log-weight, ignoring the mask; 0 if all are -inf."""
        if self._top is None:
            top = float(self.array.max(initial=-np.inf))
            self._top = 0.0 if top == -math.inf else top
        return self._top

    @property
    def log_sums(self) -> Floats:
        if self._log_sums is None:
            self._log_sums = self._sums()
        return self._log_sums

    def _sums(self) -> Floats:
        base = self._base or self
        size = len(self.array)
        weights = _scratch_of(size)
        starts = _starts(size)
        np.subtract(self.array, base.top, out=weights, dtype=np.float64)
        if weights.min(initial=0.0) < _LEAST:  # rare; np.maximum takes as long as np.exp
            np.maximum(weights, _LEAST, out=weights)
        np.exp(weights, out=weights)
        if base._log_sums is None:  # one pass computes both sums
            base._log_sums = base._logs_of(np.add.reduceat(weights, starts))
        if self.mask is None:
            return base._log_sums
        np.multiply(weights, self.mask, out=weights)
        return self._logs_of(np.add.reduceat(weights, starts))

    def _logs_of(self, sums: Floats) -> Floats:
        """Return the logs of sums that are relative to `top`. Sums far below it are computed again."""
        top = (self._base or self).top
        log_sums: Floats
        if sums.min(initial=1.0) >= _FAINT:
            log_sums = np.log(sums)
            log_sums += top
            return log_sums
        faint = sums < _FAINT
        log_sums = np.log(np.where(faint, 1.0, sums)) + top
        log_sums[faint] = -np.inf
        if self.mask is not None:
            faint &= np.logical_or.reduceat(self.mask, _starts(len(self.mask)))
        log_sums[faint] = logsumexp(self.read(np.flatnonzero(faint)))
        return log_sums

    def read(self, blocks: Ints) -> Floats:
        log_weights = np.empty((len(blocks), BLOCK))
        for row, block in zip(log_weights, blocks.tolist(), strict=True):
            self.read_block(block, row)
        return log_weights

    def read_block(self, block: int, row: Floats) -> None:
        """Write the log-weights of a block to `row`, (BLOCK,)."""
        inside = slice(block * BLOCK, (block + 1) * BLOCK)
        values = self.array[inside]
        if self.mask is None and len(values) == BLOCK:
            row[:] = values
            return
        row.fill(-np.inf)
        if self.mask is None:
            row[: len(values)] = values
        else:
            np.copyto(row[: len(values)], values, where=self.mask[inside])

    def at(self, index: int) -> float:
        if self.mask is None or self.mask[index]:
            return float(self.array[index])
        return -math.inf

    def whole(self, log_scale: float = 0.0) -> Floats:
        log_weights: Floats = np.subtract(self.array, log_scale, dtype=np.float64)
        if self.mask is not None:
            log_weights[~self.mask] = -np.inf
        log_weights.setflags(write=False)
        return log_weights

    def masked(self, mask: Mask) -> ArrayTable:
        if self.mask is not None:
            mask = self.mask & mask
        return ArrayTable(self.array, mask, self._base or self)


class PutTable(Table):
    """Table of `base`, which may be on a device, with another log-weight at `index`, where `base` has -inf.

    Examples
    --------
    >>> table = PutTable(ArrayTable(np.array([0.0, -np.inf])), 1, math.log(3))
    >>> np.exp(table.whole()).round(4)
    array([1., 3.])
    """

    def __init__(self, base: Table, index: int, log_weight: float) -> None:
        self.base = base
        self.index = index
        self.log_weight = log_weight
        self.nbytes = base.nbytes

    def __len__(self) -> int:
        return len(self.base)

    @property
    def log_sums(self) -> Floats:
        if self._log_sums is None:
            log_sums = self.base.log_sums.copy()
            block = self.index // BLOCK
            log_sums[block] = np.logaddexp(log_sums[block], self.log_weight)
            self._log_sums = log_sums
        return self._log_sums

    def read(self, blocks: Ints) -> Floats:
        log_weights = self.base.read(blocks)
        for row, block in zip(log_weights, blocks.tolist(), strict=True):
            self.patch(row, block)
        return log_weights

    def patch(self, log_weights: Floats, block: int) -> None:
        """Put the log-weight into a block that was read from `base`."""
        if block == self.index // BLOCK:
            log_weights[self.index % BLOCK] = self.log_weight

    def at(self, index: int) -> float:
        return self.log_weight if index == self.index else self.base.at(index)

    def whole(self, log_scale: float = 0.0) -> Floats:
        log_weights = self.base.whole(log_scale).copy()
        log_weights[self.index] = self.log_weight - log_scale
        log_weights.setflags(write=False)
        return log_weights

    def masked(self, mask: Mask) -> Table:
        base = self.base.masked(mask)
        if not mask[self.index]:
            return base
        return PutTable(base, self.index, self.log_weight)


@functools.lru_cache(maxsize=64)
def _starts(size: int) -> Ints:
    """Return the first index of each block of `size` values."""
    return np.arange(0, size, BLOCK)


_scratch = threading.local()  # a buffer: touching fresh memory costs more than an exponential


def _scratch_of(size: int) -> Floats:
    if len(getattr(_scratch, "array", ())) < size:
        _scratch.array = np.empty(size)
    buffer: Floats = _scratch.array[:size]
    return buffer


# ---- several tables together


def fill_sums(tables: Sequence[Table]) -> None:
    """Compute the sums of all tables that lack them, in few calls."""
    by_owner = dict[Any, list[Any]]()
    for table in _bases(tables):
        if table._log_sums is None:
            by_owner.setdefault(table.owner, []).append(table)
    for owner, missing in by_owner.items():
        if owner is not None:
            owner.fill_sums(missing)
            continue
        by_size = dict[int, list[ArrayTable]]()
        for table in missing:
            by_size.setdefault(len(table), []).append(table)
        for size, group in by_size.items():
            step = max(1, _MAX_SCRATCH // max(size, 1))
            for first in range(0, len(group), step):
                _fill_array_sums(group[first : first + step], size)


def _fill_array_sums(tables: Sequence[ArrayTable], size: int) -> None:
    """Compute the sums of tables of `size` values, as `ArrayTable.log_sums` does for one."""
    bases = [table._base or table for table in tables]
    tops = [base.top for base in bases]
    weights = _scratch_of(len(tables) * size).reshape(len(tables), size)
    for row, base, top in zip(weights, bases, tops, strict=True):
        np.subtract(base.array, top, out=row, dtype=np.float64)
    if weights.min(initial=0.0) < _LEAST:
        np.maximum(weights, _LEAST, out=weights)
    np.exp(weights, out=weights)
    _set_log_sums(bases, weights, tops)
    if any(table.mask is not None for table in tables):
        for row, table in zip(weights, tables, strict=True):
            if table.mask is not None:
                np.multiply(row, table.mask, out=row)
        _set_log_sums(tables, weights, tops)


def _set_log_sums(tables: Sequence[ArrayTable], weights: Floats, tops: Sequence[float]) -> None:
    """Set the sums and the total of tables whose weights, relative to their tops, are the rows of `weights`."""
    sums = np.add.reduceat(weights, _starts(weights.shape[1]), axis=1)
    if sums.min(initial=1.0) < _FAINT:
        for table, row in zip(tables, sums, strict=True):
            if table._log_sums is None:
                table._log_sums = table._logs_of(row)
        return
    log_sums = np.log(sums)
    log_sums += np.array(tops)[:, None]
    largest = log_sums.max(axis=1)
    totals = np.exp(log_sums - largest[:, None]).cumsum(axis=1)[:, -1]
    columns = zip(tables, log_sums, largest.tolist(), totals.tolist(), strict=True)
    for table, row, top, total in columns:
        if table._log_sums is None:
            table._log_sums = row
            table._log_total = top + math.log(total)  # as `log_total`, to the last digit


def draw_many(uniforms: Floats, tables: Sequence[Table], rows: Ints) -> Ints:
    """Return (m,) indices, one drawn from `tables[i]` for each i of (m,) `rows`, as `Table.draw` does.

    `uniforms`, (m, 2) in [0, 1), chooses the block of each and the place in it.
    """
    fill_sums(tables)
    width = max(len(table.log_sums) for table in tables)
    log_sums = np.full((len(tables), width), -np.inf)
    for row, table in zip(log_sums, tables, strict=True):
        row[: len(table.log_sums)] = table.log_sums
    blocks = _draw_places(uniforms[:, 0], log_sums, rows)
    log_weights = read_blocks(tables, rows, blocks)
    return blocks * BLOCK + _draw_places(uniforms[:, 1], log_weights, np.arange(len(rows)))


def _draw_places(uniforms: Floats, log_weights: Floats, rows: Ints) -> Ints:
    """Return (m,) places, one drawn from each of these rows in proportion to the weights."""
    tops = log_weights.max(axis=1, keepdims=True)
    cumulated = np.exp(log_weights - tops).cumsum(axis=1)
    totals = cumulated[:, -1]
    # the last place of positive weight, whatever the rounding
    last = (cumulated < totals[:, None]).sum(axis=1)
    targets = uniforms * totals[rows]
    places: Ints = np.minimum((cumulated[rows] <= targets[:, None]).sum(axis=1), last[rows])
    return places


def read_blocks(tables: Sequence[Table], rows: Ints, blocks: Ints) -> Floats:
    """Return (m, BLOCK) log-weights: block `blocks[i]` of `tables[rows[i]]`, for (m,) int `rows` and `blocks`.

    Examples
    --------
    >>> tables = [ArrayTable(np.zeros(300)), ArrayTable(np.zeros(500))]
    >>> log_weights = read_blocks(tables, rows=np.array([0, 1]), blocks=np.array([1, 1]))
    >>> np.count_nonzero(log_weights > -np.inf, axis=1)     # values after the first BLOCK of 256
    array([ 44, 244])
    """
    log_weights = np.empty((len(rows), BLOCK))
    bases = _bases(tables)
    for owner, places in _by_owner(bases, rows):
        if owner is None:
            for place, row, block in zip(
                places.tolist(), rows[places].tolist(), blocks[places].tolist(), strict=True
            ):
                bases[row].read_block(block, log_weights[place])
        else:
            pairs = zip(rows[places].tolist(), blocks[places].tolist(), strict=True)
            log_weights[places] = owner.read([(bases[row], block) for row, block in pairs])
    put = {i: table for i, table in enumerate(tables) if isinstance(table, PutTable)}
    for place in np.flatnonzero(np.isin(rows, [*put])).tolist():
        put[rows[place]].patch(log_weights[place], blocks[place])
    return log_weights


def values_at(tables: Sequence[Table], rows: Ints, indices: Ints) -> Floats:
    """Return (m,) log-weights: value `indices[i]` of `tables[rows[i]]`, for (m,) int `rows` and `indices`.

    Examples
    --------
    >>> tables = [ArrayTable(np.array([0.0, 1.0])), ArrayTable(np.array([2.0, 3.0]))]
    >>> values_at(tables, rows=np.array([1, 0]), indices=np.array([0, 1]))
    array([2., 1.])
    """
    bases = _bases(tables)
    for owner, places in _by_owner(bases, rows):
        if owner is not None:  # the owner fetches them in one transfer
            owner.look_up([(bases[rows[i]], int(indices[i])) for i in places.tolist()])
    return np.array(
        [tables[row].at(index) for row, index in zip(rows.tolist(), indices.tolist(), strict=True)]
    )


def _bases(tables: Sequence[Table]) -> list[Table]:
    return [table.base if isinstance(table, PutTable) else table for table in tables]


def _by_owner(tables: Sequence[Table], rows: Ints) -> list[tuple[Any, Ints]]:
    """Return the places in `rows` that belong to each owner of tables."""
    places_of: dict[Any, list[int]] = {}
    for i, row in enumerate(rows.tolist()):
        places_of.setdefault(tables[row].owner, []).append(i)
    return [(owner, np.array(places)) for owner, places in places_of.items()]


def above(cumulated: Floats, target: float) -> int:
    """Return the first index whose cumulated weight exceeds `target`. Its weight is positive, whatever the rounding."""
    index = int(cumulated.searchsorted(target, side="right"))
    if index < len(cumulated):
        return index
    return int(cumulated.searchsorted(cumulated[-1]))
