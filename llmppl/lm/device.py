"""Rows as tensors that stay on the device where the model computed them.

To draw or weigh a token, a program copies little from the device: sums over blocks of the vocabulary, the blocks with a
chosen token, and single log-probabilities. `Device` is an evaluator of the runtime, so one copy serves many particles.
Sums are in float64, as in numpy's tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmppl.distributions import BLOCK, Floats, Ints, Mask, Table
from llmppl.lm.engine import LARGE, check_top
from llmppl.support.runtime import Evaluator, Stats, request, request_all

_MAX_WEIGHTS = 1 << 23  # weights in float64 at a time: 64 MiB, and temporaries
Question = tuple[
    "DeviceTable", Any
]  # (table, None): block sums; (table, int): a log-weight; (table, (m,) blocks)


class DeviceTable(Table):
    """Table of V log-weights: row `place` of a tensor of rows of whole blocks, -inf where `mask` is False.

    mask : (V,) bool ndarray; None for True everywhere
    known : single log-weights that were read so far
    """

    def __init__(
        self,
        device: Device,
        rows: torch.Tensor,
        place: int,
        mask: Mask | None = None,
        log_sums: Floats | None = None,
    ) -> None:
        self.owner = device
        self.rows = rows
        self.place = place
        self.mask = mask
        self._log_sums = log_sums
        size = rows.shape[1]
        self.nbytes = size * rows.element_size() + 16 * (size // BLOCK)
        self.known: dict[int, float] = {}

    def __len__(self) -> int:
        return int(self.owner.size)

    @property
    def log_sums(self) -> Floats:
        log_sums = self._log_sums
        if log_sums is None:
            log_sums = self._log_sums = request(self.owner, (self, None))
        return log_sums

    def read(self, blocks: Ints) -> Floats:
        log_weights: Floats = request(self.owner, (self, blocks))
        return log_weights

    def at(self, index: int) -> float:
        if self.mask is not None and not self.mask[index]:
            return -np.inf
        return float(request(self.owner, (self, index)))

    def whole(self, log_scale: float = 0.0) -> Floats:
        row = self.rows[self.place, : len(self)]
        log_weights: Floats = self.owner.to_host(row) - np.float64(log_scale)
        if self.mask is not None:
            log_weights[~self.mask] = -np.inf
        log_weights.setflags(write=False)
        return log_weights

    def masked(self, mask: Mask) -> DeviceTable:
        if self.mask is not None:
            mask = self.mask & mask
        table = DeviceTable(self.owner, self.rows, self.place, mask)
        table.known = self.known
        return table


class Device(Evaluator):
    """Evaluator of questions about tables of `size` log-weights on a device.

    The rows of one round share a tensor, so that a few operations answer the questions about all of them.

    stats : function that returns the stats of the calling thread
    unknown : ids with log-weight -inf
    """

    patient = False

    def __init__(self, stats: Callable[[], Stats], size: int, unknown: NDArray[np.int64]) -> None:
        self.size = size
        self._stats = stats
        self._unknown = torch.from_numpy(unknown)

    def tables_of_logits(
        self, logits: torch.Tensor, describe: Callable[[int], str], kept: Sequence[bool]
    ) -> list[DeviceTable]:
        """Return tables as `llmppl.lm.engine.tables_of_logits` does. Those that are `kept` share another tensor."""
        rows = logits.new_full((len(logits), self.size + -self.size % BLOCK), -torch.inf)
        rows[:, : min(self.size, logits.shape[1])] = logits[:, : self.size]
        self._unknown = self._unknown.to(rows.device)  # moves once
        rows.index_fill_(1, self._unknown, -torch.inf)
        tops = rows.amax(1)
        suspect = ~(tops.abs() <= LARGE)
        host = self.to_host(torch.stack([tops.double(), suspect.double()]))
        for i in np.flatnonzero(host[1]).tolist():
            rows[i] -= check_top(float(host[0, i]), describe(i))
        tables = [DeviceTable(self, rows, i) for i in range(len(rows))]
        for table, log_sums in zip(tables, self._log_sums(tables), strict=True):
            table._log_sums = log_sums
        own = np.flatnonzero(kept)
        if 0 < len(own) < len(rows):
            mine = rows[torch.from_numpy(own).to(rows.device)]
            for place, i in enumerate(own.tolist()):
                tables[i].rows = mine
                tables[i].place = place
        return tables

    def to_host(self, tensor: torch.Tensor) -> Any:
        """Return the tensor as an ndarray, and count its bytes."""
        self._stats().bytes_to_host += tensor.numel() * tensor.element_size()
        return tensor.cpu().numpy()

    def done(self) -> Stats:
        return Stats()  # the language model counts

    def cached(self, question: Question) -> float | None:
        table, part = question
        return table.known.get(part) if isinstance(part, int) else None

    def evaluate(self, questions: list[Question]) -> Sequence[Any]:
        answers = dict[int, Any]()
        tables = {i: table for i, (table, part) in enumerate(questions) if part is None}
        if tables:
            answers |= dict(zip(tables, self._log_sums([*tables.values()]), strict=True))
        singles = {
            i: (table, part) for i, (table, part) in enumerate(questions) if isinstance(part, int)
        }
        self.look_up([*singles.values()])
        answers |= {i: table.known[index] for i, (table, index) in singles.items()}
        parts = {i: question for i, question in enumerate(questions) if i not in answers}
        if parts:
            log_weights = self.read(
                [(table, block) for table, blocks in parts.values() for block in blocks.tolist()]
            )
            ends = np.cumsum([len(blocks) for _, blocks in parts.values()])
            answers |= dict(zip(parts, np.split(log_weights, ends[:-1]), strict=True))
        return [answers[i] for i in range(len(questions))]

    def fill_sums(self, tables: Sequence[DeviceTable]) -> None:
        """Compute the block sums of tables."""
        for table, log_sums in zip(
            tables, request_all(self, [(table, None) for table in tables]), strict=True
        ):
            table._log_sums = log_sums

    def look_up(self, places: Sequence[tuple[DeviceTable, int]]) -> None:
        """Read single log-weights into `known` of their tables."""
        unknown = [(table, index) for table, index in places if index not in table.known]
        values = self._gathered([(table, index) for table, index in unknown], 1)
        for (table, index), value in zip(unknown, values[:, 0].tolist(), strict=True):
            table.known[index] = value

    def read(self, places: Sequence[tuple[DeviceTable, int]]) -> Floats:
        """Return (m, BLOCK) log-weights of blocks of tables, -inf past the end."""
        log_weights = self._gathered(places, BLOCK).astype(np.float64)
        for row, (table, block) in zip(log_weights, places, strict=True):
            if table.mask is not None:
                allowed = table.mask[block * BLOCK : (block + 1) * BLOCK]
                row[: len(allowed)][~allowed] = -np.inf
        return log_weights

    def _gathered(self, places: Sequence[tuple[DeviceTable, int]], width: int) -> NDArray[Any]:
        """Return (m, width) values of tables: the i-th part of `width` values for each (table, i)."""
        found = np.empty((len(places), width))
        tables = [table for table, _ in places]
        parts = np.array([part for _, part in places], np.int64)
        for rows, at in by_rows(tables):
            own = np.array([tables[i].place for i in at])
            index = torch.from_numpy(np.stack([own, parts[at]])).to(rows.device)
            found[at] = self.to_host(rows.view(len(rows), -1, width)[index[0], index[1]])
        return found

    def _log_sums(self, tables: Sequence[DeviceTable]) -> Floats:
        """Return (R, number of blocks): logs of the sums over each block of each table."""
        width = tables[0].rows.shape[1]
        log_sums = np.empty((len(tables), width // BLOCK))
        step = max(1, _MAX_WEIGHTS // width)
        for rows, at in by_rows(tables):
            for first in range(0, len(at), step):
                some = at[first : first + step]
                log_sums[some] = self._sums_of(rows, [tables[i] for i in some])
        return log_sums

    def _sums_of(self, rows: torch.Tensor, tables: Sequence[DeviceTable]) -> Floats:
        """Return the same for tables of one tensor."""
        places = torch.from_numpy(np.array([table.place for table in tables])).to(rows.device)
        weights = rows[places].double()
        masks = {id(table.mask): table.mask for table in tables if table.mask is not None}
        if masks:
            numbers = {key: i for i, key in enumerate(masks, 1)}
            forbidden = np.zeros((len(masks) + 1, weights.shape[1]), bool)
            for row, mask in zip(forbidden[1:], masks.values(), strict=True):
                np.logical_not(mask, out=row[: self.size])
            own = torch.from_numpy(
                np.array([numbers.get(id(table.mask), 0) for table in tables])
            ).to(rows.device)
            weights.masked_fill_(torch.from_numpy(forbidden).to(rows.device)[own], -torch.inf)
        weights = weights.view(len(weights), -1, BLOCK)
        tops = weights.amax(2)
        tops.masked_fill_(tops == -torch.inf, 0.0)
        found: Floats = self.to_host(weights.sub_(tops[..., None]).exp_().sum(2).log_().add_(tops))
        return found


def by_rows(tables: Sequence[DeviceTable]) -> list[tuple[torch.Tensor, list[int]]]:
    """Return each tensor of rows, and the indices of its tables."""
    found = dict[int, tuple[torch.Tensor, list[int]]]()
    for i, table in enumerate(tables):
        found.setdefault(id(table.rows), (table.rows, []))[1].append(i)
    return [*found.values()]
