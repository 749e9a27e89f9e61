"""Sums of weights over blocks of values: what a choice among many values needs, without touching all of them.

Log-weights are held as they were given: a row of a language model's logits is float32, and may stay where the model put
it. A mask makes others of them. Sums are taken in float64, when they are first asked for, and without underflow: a
block whose weights are e^-2000 of another's has its sum all the same.
"""

from __future__ import annotations

import functools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmppl.distributions.weights import Floats

BLOCK = 256                                             # values summed together
_FEW = 8                                                # one value in 8 allowed, or fewer, are looked up one by one
_LEAST = -700.0                                         # np.exp is ten times as slow where it underflows
_FAINT = 1e-250                                         # a sum below this is taken again, relative to its own largest

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Table(ABC):
    """Log-weights of n values, in blocks of `BLOCK`; the last may be shorter. They do not change.

    nbytes : bytes of the log-weights, wherever they are, and of the sums
    """

    nbytes: int
    owner: Any = None                                   # what reads blocks of several tables together, if anything
    _log_sums: Floats | None = None
    _log_total: float | None = None
    _cumulated: Floats | None = None                    # sums of the blocks up to each, as parts of the heaviest

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def log_sums(self) -> Floats:
        """(number of blocks,) the log of the sum of the weights in each; -inf where there is none."""

    @abstractmethod
    def read(self, blocks: Ints) -> Floats:
        """(m, BLOCK) log-weights of (m,) blocks; -inf past the end."""

    @abstractmethod
    def at(self, index: int) -> float:
        """The log-weight of one value."""

    @abstractmethod
    def whole(self, log_scale: float = 0.0) -> Floats:
        """(n,) read-only float64: all log-weights, less `log_scale`."""

    @abstractmethod
    def masked(self, mask: Mask) -> Table:
        """The log-weights where `mask`, (n,) bool, holds, and -inf elsewhere."""

    def put(self, index: int, log_weight: float) -> Table:
        """The log-weights with another one in place of a -inf."""
        return PutTable(self, index, log_weight)

    @property
    def log_total(self) -> float:
        """The log of the sum of all weights."""
        if self._log_total is None:
            top = float(self.log_sums.max(initial=-np.inf))
            if top > -math.inf:
                self._cumulated = np.exp(self.log_sums - top).cumsum()
                top += math.log(self._cumulated[-1])
            self._log_total = top
        return self._log_total

    def draw(self, rng: np.random.Generator) -> int:
        """An index, drawn in proportion to the weights, of which one must be positive: first a block, then inside it.

        With a uniform for each, an error of the sums is not magnified where a block is a small part of the whole.
        """
        if self.log_total == -math.inf:
            raise ValueError("no weight of the table is positive")
        assert self._cumulated is not None
        block = above(self._cumulated, rng.random() * self._cumulated[-1])
        inside = self.read(np.array([block]))[0]
        inside -= inside.max()
        cumulated = np.exp(inside, out=inside).cumsum()
        return block * BLOCK + above(cumulated, rng.random() * cumulated[-1])


class ArrayTable(Table):
    """(n,) float32 or float64 log-weights, where `mask`, (n,) bool, holds; everywhere if that is None.

    `base` is the table without the mask, and `top` its largest log-weight, if that is known.
    """

    def __init__(
        self, array: NDArray[Any], mask: Mask | None = None, base: ArrayTable | None = None, top: float | None = None
    ) -> None:
        self.array, self.mask = array, mask
        self.nbytes = array.nbytes + 16 * ((len(array) - 1) // BLOCK)       # with two sums a block, past the first
        self._base, self._top = base, top

    def __len__(self) -> int:
        return len(self.array)

    @property
    def top(self) -> float:
        """The largest log-weight, whatever the mask; 0 if there is none."""
        if self._top is None:
            top = float(self.array.max(initial=-np.inf))
            self._top = 0.0 if top == -math.inf else top
        return self._top

    @property
    def log_sums(self) -> Floats:
        log_sums = self._log_sums
        if log_sums is None:
            few = self.mask is not None and np.count_nonzero(self.mask) * _FEW <= len(self.mask)
            log_sums = self._log_sums = self._sums_of_few() if few else self._sums()
        return log_sums

    def _sums(self) -> Floats:
        base = self._base or self
        size = len(self.array)
        weights, starts = _scratch_of(size), _starts(size)
        np.subtract(self.array, base.top, out=weights, dtype=np.float64)
        if weights.min(initial=0.0) < _LEAST:           # seldom, and the maximum takes as long as the exponential
            np.maximum(weights, _LEAST, out=weights)
        np.exp(weights, out=weights)
        if base._log_sums is None:                      # one pass for both
            base._log_sums = base._logs_of(np.add.reduceat(weights, starts))
        if self.mask is None:
            return base._log_sums
        np.multiply(weights, self.mask, out=weights)
        return self._logs_of(np.add.reduceat(weights, starts))

    def _logs_of(self, sums: Floats) -> Floats:
        """The logs of sums that are relative to the top; what is far below it is summed again by itself."""
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
        log_sums[faint] = log_sum(self.read(np.flatnonzero(faint)))
        return log_sums

    def _sums_of_few(self) -> Floats:
        assert self.mask is not None
        places = np.flatnonzero(self.mask)
        log_weights = self.array[places].astype(np.float64)
        blocks, starts = np.unique(places // BLOCK, return_index=True)
        log_sums = np.full(-(-len(self.array) // BLOCK), -np.inf)
        if places.size:
            tops = np.maximum.reduceat(log_weights, starts)
            tops[tops == -np.inf] = 0.0
            weights = np.exp(log_weights - np.repeat(tops, np.diff(starts, append=len(places))))
            with np.errstate(divide="ignore"):
                log_sums[blocks] = tops + np.log(np.add.reduceat(weights, starts))
        return log_sums

    def read(self, blocks: Ints) -> Floats:
        log_weights: Floats = np.full((len(blocks), BLOCK), -np.inf)
        for row, block in zip(log_weights, blocks.tolist(), strict=True):
            inside = slice(block * BLOCK, (block + 1) * BLOCK)
            values = self.array[inside]
            np.copyto(row[: len(values)], values, where=True if self.mask is None else self.mask[inside])
        return log_weights

    def at(self, index: int) -> float:
        return float(self.array[index]) if self.mask is None or self.mask[index] else -math.inf

    def whole(self, log_scale: float = 0.0) -> Floats:
        log_weights: Floats = np.subtract(self.array, log_scale, dtype=np.float64)
        if self.mask is not None:
            log_weights[~self.mask] = -np.inf
        log_weights.setflags(write=False)
        return log_weights

    def masked(self, mask: Mask) -> ArrayTable:
        return ArrayTable(self.array, mask if self.mask is None else self.mask & mask, self._base or self)


class PutTable(Table):
    """The log-weights of `base`, which may be on a device, but for the one at `index`, where `base` has -inf."""

    def __init__(self, base: Table, index: int, log_weight: float) -> None:
        self.base, self.index, self.log_weight = base, index, log_weight
        self.nbytes = base.nbytes

    def __len__(self) -> int:
        return len(self.base)

    @property
    def log_sums(self) -> Floats:
        log_sums = self._log_sums
        if log_sums is None:
            log_sums = self.base.log_sums.copy()
            block = self.index // BLOCK
            log_sums[block] = np.logaddexp(log_sums[block], self.log_weight)
            self._log_sums = log_sums
        return log_sums

    def read(self, blocks: Ints) -> Floats:
        log_weights = self.base.read(blocks)
        for row, block in zip(log_weights, blocks.tolist(), strict=True):
            self.patch(row, block)
        return log_weights

    def patch(self, log_weights: Floats, block: int) -> None:
        """Put it into what was read of a block of `base`."""
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
        return PutTable(base, self.index, self.log_weight) if mask[self.index] else base


@functools.lru_cache(maxsize=64)
def _starts(size: int) -> Ints:
    """Where the blocks of `size` values begin."""
    return np.arange(0, size, BLOCK)


class _Scratch(threading.local):
    """Memory to compute in, for each thread: fresh memory costs more to touch than an exponential."""

    array = np.empty(0)


_scratch = _Scratch()


def _scratch_of(size: int) -> Floats:
    if len(_scratch.array) < size:
        _scratch.array = np.empty(size)
    return _scratch.array[:size]


def read_blocks(tables: Sequence[Table], rows: Ints, blocks: Ints) -> Floats:
    """(m, BLOCK) log-weights: of each of (m,) tables, by its place in `tables`, one block."""
    log_weights = np.empty((len(rows), BLOCK))
    bases = _bases(tables)
    for owner, places in _by_owner(bases, rows):
        if owner is None:
            for place in places.tolist():
                log_weights[place] = bases[rows[place]].read(blocks[place : place + 1])
        else:
            pairs = zip(rows[places].tolist(), blocks[places].tolist(), strict=True)
            log_weights[places] = owner.read([(bases[row], block) for row, block in pairs])
    put = {i: table for i, table in enumerate(tables) if isinstance(table, PutTable)}
    for place in np.flatnonzero(np.isin(rows, [*put])).tolist():
        put[rows[place]].patch(log_weights[place], blocks[place])
    return log_weights


def values_at(tables: Sequence[Table], rows: Ints, indices: Ints) -> Floats:
    """(m,) log-weights: of each of (m,) tables, by its place in `tables`, one value."""
    bases = _bases(tables)
    for owner, places in _by_owner(bases, rows):
        if owner is not None:                           # which then knows them
            owner.look_up([(bases[rows[i]], int(indices[i])) for i in places.tolist()])
    return np.array([tables[row].at(index) for row, index in zip(rows.tolist(), indices.tolist(), strict=True)])


def _bases(tables: Sequence[Table]) -> list[Table]:
    return [table.base if isinstance(table, PutTable) else table for table in tables]


def _by_owner(tables: Sequence[Table], rows: Ints) -> list[tuple[Any, Ints]]:
    """Which of the places in `rows` belong to each owner of tables."""
    together: dict[Any, list[int]] = {}
    for i, row in enumerate(rows.tolist()):
        together.setdefault(tables[row].owner, []).append(i)
    return [(owner, np.array(places)) for owner, places in together.items()]


def log_sum(log_weights: Floats) -> Any:
    """(...,) the log of the sum of (..., n) weights; -inf where there is none."""
    tops = log_weights.max(-1, initial=-np.inf)
    finite = np.where(tops == -np.inf, 0.0, tops)
    with np.errstate(divide="ignore"):
        return finite + np.log(np.exp(log_weights - finite[..., None]).sum(-1))


def above(cumulated: Floats, target: float) -> int:
    """The first index whose cumulated weight exceeds `target`: one of positive weight, whatever the rounding."""
    index = int(cumulated.searchsorted(target, side="right"))
    return index if index < len(cumulated) else int(cumulated.searchsorted(cumulated[-1], side="left"))
