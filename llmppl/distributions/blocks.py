"""Sums of weights over blocks of values: what a choice among many values needs, without touching all of them.

Log-weights are held as they were given (a row of a language model's logits is float32, and may stay where the model put
it); an offset and a mask make others of them. Sums are taken in float64, and without underflow: a block whose weights
are e^-2000 of another's has its sum all the same.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmppl.distributions.weights import Floats

BLOCK = 256                                             # values summed together
_SCRATCH = 1 << 16                                      # weights computed at a time: they stay in the processor's cache
_FEW = 8                                                # one value in 8 allowed, or fewer, are looked up one by one
_LEAST = -700.0                                         # np.exp is ten times as slow where it underflows
_FAINT = 1e-250                                         # a sum below this is taken again, relative to its own largest

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Table(ABC):
    """Log-weights of n values, in blocks of `BLOCK`; the last may be shorter. They do not change.

    nbytes : bytes of the log-weights, wherever they are
    """

    nbytes: int
    owner: Any = None                                   # what reads blocks of several tables together, if anything
    _log_sums: Floats | None = None
    _log_total: float | None = None

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
    def whole(self) -> Floats:
        """(n,) read-only float64: all log-weights."""

    @abstractmethod
    def masked(self, mask: Mask) -> Table:
        """The log-weights where `mask`, (n,) bool, holds, and -inf elsewhere."""

    @property
    def log_total(self) -> float:
        """The log of the sum of all weights."""
        if self._log_total is None:
            self._log_total = float(log_sum(self.log_sums))
        return self._log_total

    def draw(self, rng: np.random.Generator) -> int:
        """An index, drawn in proportion to the weights, of which one must be positive: first a block, then inside it.

        With a uniform for each, an error of the sums is not magnified where a block is a small part of the whole.
        """
        block = drawn(rng, self.log_sums)
        return block * BLOCK + drawn(rng, self.read(np.array([block]))[0])


class ArrayTable(Table):
    """`array - offset` where `mask` holds: (n,) float32 or float64, a float, and (n,) bool or None for everywhere."""

    def __init__(
        self, array: NDArray[Any], offset: float = 0.0, mask: Mask | None = None, log_sums: Floats | None = None
    ) -> None:
        self.array, self.offset, self.mask, self._log_sums = array, offset, mask, log_sums
        self.nbytes = array.nbytes

    def __len__(self) -> int:
        return len(self.array)

    @property
    def log_sums(self) -> Floats:
        if self._log_sums is None:
            few = self.mask is not None and np.count_nonzero(self.mask) * _FEW <= len(self.mask)
            self._log_sums = self._sums_of_few() if few else self._sums()
        return self._log_sums

    def _sums(self) -> Floats:
        log_sums: Floats = log_block_sums(self.array[None], self.mask)[0] - self.offset
        if self.mask is not None:                       # beside values that are far heavier and not allowed
            allowed = np.logical_or.reduceat(self.mask, np.arange(0, len(self.mask), BLOCK))
            (faint,) = np.nonzero(allowed & (log_sums == -np.inf))
            if faint.size:
                log_sums[faint] = log_sum(self.read(faint))
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
                log_sums[blocks] = tops + np.log(np.add.reduceat(weights, starts)) - self.offset
        return log_sums

    def read(self, blocks: Ints) -> Floats:
        log_weights: Floats = np.full((len(blocks), BLOCK), -np.inf)
        for row, block in zip(log_weights, blocks.tolist(), strict=True):
            inside = slice(block * BLOCK, (block + 1) * BLOCK)
            values = self.array[inside]
            np.subtract(values, self.offset, out=row[: len(values)], dtype=np.float64)
            if self.mask is not None:
                row[: len(values)][~self.mask[inside]] = -np.inf
        return log_weights

    def at(self, index: int) -> float:
        allowed = self.mask is None or self.mask[index]
        return float(self.array[index]) - self.offset if allowed else -math.inf

    def whole(self) -> Floats:
        log_weights: Floats = np.subtract(self.array, self.offset, dtype=np.float64)
        if self.mask is not None:
            log_weights[~self.mask] = -np.inf
        log_weights.setflags(write=False)
        return log_weights

    def masked(self, mask: Mask) -> ArrayTable:
        return ArrayTable(self.array, self.offset, mask if self.mask is None else self.mask & mask)


class _Scratch(threading.local):
    """Memory to compute in, for each thread: fresh memory costs more to touch than an exponential."""

    array = np.empty(0)


_scratch = _Scratch()


def _scratch_of(size: int) -> Floats:
    if len(_scratch.array) < size:
        _scratch.array = np.empty(size)
    return _scratch.array


def read_blocks(tables: Sequence[Table], rows: Ints, blocks: Ints) -> Floats:
    """(m, BLOCK) log-weights: of each of (m,) tables, by its place in `tables`, one block."""
    log_weights = np.empty((len(rows), BLOCK))
    for owner, places in _by_owner(tables, rows):
        if owner is None:
            for row in np.unique(rows[places]).tolist():
                own = places[rows[places] == row]
                log_weights[own] = tables[row].read(blocks[own])
        else:
            pairs = zip(rows[places].tolist(), blocks[places].tolist(), strict=True)
            log_weights[places] = owner.read([(tables[row], block) for row, block in pairs])
    return log_weights


def values_at(tables: Sequence[Table], rows: Ints, indices: Ints) -> Floats:
    """(m,) log-weights: of each of (m,) tables, by its place in `tables`, one value."""
    for owner, places in _by_owner(tables, rows):
        if owner is not None:                           # which then knows them
            owner.look_up([(tables[rows[i]], int(indices[i])) for i in places.tolist()])
    return np.array([tables[row].at(index) for row, index in zip(rows.tolist(), indices.tolist(), strict=True)])


def _by_owner(tables: Sequence[Table], rows: Ints) -> list[tuple[Any, Ints]]:
    """Which of the places in `rows` belong to each owner of tables."""
    together: dict[Any, list[int]] = {}
    for i, row in enumerate(rows.tolist()):
        together.setdefault(tables[row].owner, []).append(i)
    return [(owner, np.array(places)) for owner, places in together.items()]


def log_block_sums(log_weights: NDArray[Any], mask: Mask | None = None) -> Floats:
    """(R, number of blocks) logs of the sums over the blocks of (R, n) log-weights where `mask`, (n,), holds.

    A sum is -inf where the weights that are allowed are e^-575 of the heaviest one of the row or less; without a mask,
    only where there are none.
    """
    num_rows, n = log_weights.shape
    tops = log_weights.max(1, initial=-np.inf).astype(np.float64)
    tops[tops == -np.inf] = 0.0
    starts = np.arange(0, n, BLOCK)
    sums = np.empty((num_rows, len(starts)))
    together = max(1, _SCRATCH // max(1, n))
    scratch = _scratch_of(min(together, num_rows) * n)
    for first in range(0, num_rows, together):
        rows = slice(first, first + together)
        weights = scratch[: len(log_weights[rows]) * n].reshape(-1, n)
        np.subtract(log_weights[rows], tops[rows, None], out=weights, dtype=np.float64)
        np.maximum(weights, _LEAST, out=weights)
        np.exp(weights, out=weights)
        if mask is not None:
            np.multiply(weights, mask, out=weights)
        np.add.reduceat(weights, starts, axis=1, out=sums[rows])
    faint = sums < _FAINT
    sums[faint] = 0.0
    with np.errstate(divide="ignore"):
        log_sums: Floats = np.log(sums) + tops[:, None]
    if mask is None:
        for i, block in zip(*np.nonzero(faint), strict=True):
            log_sums[i, block] = log_sum(log_weights[i, block * BLOCK : (block + 1) * BLOCK].astype(np.float64))
    return log_sums


def log_sum(log_weights: Floats) -> Any:
    """(...,) the log of the sum of (..., n) weights; -inf where there is none."""
    tops = log_weights.max(-1, initial=-np.inf)
    finite = np.where(tops == -np.inf, 0.0, tops)
    with np.errstate(divide="ignore"):
        return finite + np.log(np.exp(log_weights - finite[..., None]).sum(-1))


def drawn(rng: np.random.Generator, log_weights: Floats) -> int:
    """A place of (n,) log-weights, one of them above -inf, drawn in proportion to the weights."""
    cumulated = np.exp(log_weights - log_weights.max()).cumsum()
    return above(cumulated, rng.random() * cumulated[-1])


def above(cumulated: Floats, target: float) -> int:
    """The first index whose cumulated weight exceeds `target`: one of positive weight, whatever the rounding."""
    index = int(cumulated.searchsorted(target, side="right"))
    return index if index < len(cumulated) else int(cumulated.searchsorted(cumulated[-1], side="left"))
