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
from llmppl.support.runtime import Evaluator, Stats, request

_MAX_WEIGHTS = 1 << 21                  # weights in float64 at a time: 40 MiB with their rows and temporaries
Question = tuple["DeviceTable", Any]    # (table, None): block sums; (table, int): a log-weight; (table, (m,) blocks)


class DeviceTable(Table):
    """Table of V log-weights in a tensor of whole blocks, -inf where `mask` is False.

    mask : (V,) bool ndarray; None for True everywhere
    known : single log-weights that were read so far
    """

    def __init__(
        self, device: Device, row: torch.Tensor, mask: Mask | None = None, log_sums: Floats | None = None
    ) -> None:
        self.owner = device
        self.row = row
        self.mask = mask
        self._log_sums = log_sums
        self.nbytes = row.numel() * row.element_size() + 16 * (len(row) // BLOCK)
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
        log_weights: Floats = self.owner.to_host(self.row[: len(self)]) - np.float64(log_scale)
        if self.mask is not None:
            log_weights[~self.mask] = -np.inf
        log_weights.setflags(write=False)
        return log_weights

    def masked(self, mask: Mask) -> DeviceTable:
        table = DeviceTable(self.owner, self.row, mask if self.mask is None else self.mask & mask)
        table.known = self.known
        return table


class Device(Evaluator):
    """Evaluator of questions about tables of `size` log-weights on a device.

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
        """Return tables as `llmppl.lm.engine.tables_of_logits` does. Those that are not `kept` share one tensor."""
        rows = logits.new_full((len(logits), self.size + -self.size % BLOCK), -torch.inf)
        rows[:, : min(self.size, logits.shape[1])] = logits[:, : self.size]
        self._unknown = self._unknown.to(rows.device)   # moves once
        rows.index_fill_(1, self._unknown, -torch.inf)
        tops = rows.amax(1)
        suspect = ~(tops.abs() <= LARGE)
        host = self.to_host(torch.stack([tops.double(), suspect.double()]))
        for i in np.flatnonzero(host[1]).tolist():
            rows[i] -= check_top(float(host[0, i]), describe(i))
        log_sums = self._log_sums(rows, [None] * len(rows))
        own = [row.clone() if keep else row for row, keep in zip(rows, kept, strict=True)]
        return [DeviceTable(self, row, log_sums=sums) for row, sums in zip(own, log_sums, strict=True)]

    def to_host(self, tensor: torch.Tensor) -> Any:
        """Return the tensor as an ndarray, and count its bytes."""
        self._stats().bytes_to_host += tensor.numel() * tensor.element_size()
        return tensor.cpu().numpy()

    def done(self) -> Stats:
        return Stats()                                  # the language model counts

    def cached(self, question: Question) -> float | None:
        table, part = question
        return table.known.get(part) if isinstance(part, int) else None

    def evaluate(self, questions: list[Question]) -> Sequence[Any]:
        answers = dict[int, Any]()
        tables = {i: table for i, (table, part) in enumerate(questions) if part is None}
        if tables:
            log_sums = self._log_sums([each.row for each in tables.values()], [each.mask for each in tables.values()])
            answers |= dict(zip(tables, log_sums, strict=True))
        singles = {i: (table, part) for i, (table, part) in enumerate(questions) if isinstance(part, int)}
        self.look_up([*singles.values()])
        answers |= {i: table.known[index] for i, (table, index) in singles.items()}
        parts = {i: question for i, question in enumerate(questions) if i not in answers}
        if parts:
            log_weights = self.read([(table, block) for table, blocks in parts.values() for block in blocks.tolist()])
            ends = np.cumsum([len(blocks) for _, blocks in parts.values()])
            answers |= dict(zip(parts, np.split(log_weights, ends[:-1]), strict=True))
        return [answers[i] for i in range(len(questions))]

    def look_up(self, places: Sequence[tuple[DeviceTable, int]]) -> None:
        """Read single log-weights into `known` of their tables."""
        unknown = [(table, index) for table, index in places if index not in table.known]
        if unknown:
            values = self.to_host(torch.stack([table.row[index] for table, index in unknown]))      # of views
            for (table, index), value in zip(unknown, values.tolist(), strict=True):
                table.known[index] = value

    def read(self, places: Sequence[tuple[DeviceTable, int]]) -> Floats:
        """Return (m, BLOCK) log-weights of blocks of tables, -inf past the end."""
        parts = [table.row[block * BLOCK : (block + 1) * BLOCK] for table, block in places]
        log_weights: Floats = self.to_host(torch.stack(parts)).astype(np.float64)
        for row, (table, block) in zip(log_weights, places, strict=True):
            if table.mask is not None:
                allowed = table.mask[block * BLOCK : (block + 1) * BLOCK]
                row[: len(allowed)][~allowed] = -np.inf
        return log_weights

    def _log_sums(self, rows: Sequence[torch.Tensor] | torch.Tensor, masks: Sequence[Mask | None]) -> Floats:
        """Return (R, number of blocks): logs of the sums over each block of each row, where its mask is True."""
        step = max(1, _MAX_WEIGHTS // len(rows[0]))
        parts = []
        for first in range(0, len(rows), step):
            weights = torch.stack([*rows[first : first + step]]).double()           # a copy, changed in place
            forbidden = {}                              # by mask, which several rows may share
            for row, mask in zip(weights, masks[first : first + step], strict=True):
                if mask is not None:
                    if id(mask) not in forbidden:
                        forbidden[id(mask)] = torch.from_numpy(~mask).to(row.device)
                    row[: self.size].masked_fill_(forbidden[id(mask)], -torch.inf)
            weights = weights.view(len(weights), -1, BLOCK)
            tops = weights.amax(2)
            tops.masked_fill_(tops == -torch.inf, 0.0)
            parts.append(weights.sub_(tops[..., None]).exp_().sum(2).log_().add_(tops))
        log_sums: Floats = self.to_host(torch.cat(parts))
        return log_sums
