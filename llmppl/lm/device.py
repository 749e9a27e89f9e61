"""Rows that stay on the device where the model computed them, as tensors.

A program that draws a token, or weighs one, makes no more leave the device than sums over blocks of the vocabulary, the
blocks in which something is chosen, and single log-probabilities. What many particles need at the same time is asked
together: a `Device` is an evaluator of the runtime. Everything is summed in float64, as numpy's tables are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmppl.distributions import BLOCK, Floats, Ints, Mask, Table
from llmppl.lm.rows import LARGE, check_top
from llmppl.runtime import Evaluator, Stats, request

_TOGETHER = 1 << 24                     # weights in float64 at a time
Question = tuple["DeviceTable", Any]    # (table, None): its sums; (table, index): that log-weight; or (m,) blocks


class DeviceTable(Table):
    """A (V,) tensor of log-weights, where `mask`, (V,) bool of numpy, holds; everywhere if that is None."""

    def __init__(
        self, device: Device, row: torch.Tensor, mask: Mask | None = None, log_sums: Floats | None = None
    ) -> None:
        self.owner, self.row, self.mask, self._log_sums = device, row, mask, log_sums
        self.nbytes = row.numel() * row.element_size() + 16 * ((len(row) - 1) // BLOCK)
        self.known: dict[int, float] = {}               # single log-weights that were asked for

    def __len__(self) -> int:
        return len(self.row)

    @property
    def log_sums(self) -> Floats:
        log_sums = self._log_sums
        if log_sums is None:
            log_sums = self._log_sums = request(self.owner, (self, None))
        return log_sums

    def read(self, blocks: Ints) -> Floats:
        read: Floats = request(self.owner, (self, blocks))
        return read

    def at(self, index: int) -> float:
        if self.mask is not None and not self.mask[index]:
            return -np.inf
        return float(request(self.owner, (self, index)))

    def whole(self, log_scale: float = 0.0) -> Floats:
        log_weights: Floats = self.owner.to_host(self.row) - np.float64(log_scale)
        if self.mask is not None:
            log_weights[~self.mask] = -np.inf
        log_weights.setflags(write=False)
        return log_weights

    def masked(self, mask: Mask) -> DeviceTable:
        table = DeviceTable(self.owner, self.row, mask if self.mask is None else self.mask & mask)
        table.known = self.known
        return table


class Device(Evaluator):
    """Answers what tables on a device are asked, all at once. `stats()` are those of the calling thread."""

    patient = False

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats
        self._masks: dict[int, tuple[weakref.ref[Any], torch.Tensor]] = {}

    def rows(
        self, logits: torch.Tensor, size: int, unknown: NDArray[np.int64], told: Callable[[int], str]
    ) -> list[Table]:
        """What `llmppl.lm.rows.array_rows` gives, of a tensor, as tables there."""
        rows = logits.new_full((len(logits), size), -torch.inf)
        rows[:, : logits.shape[1]] = logits[:, :size]
        rows[:, torch.from_numpy(unknown).to(rows.device)] = -torch.inf
        tops = rows.amax(1)
        strange = ~(tops.abs() <= LARGE)
        host = self.to_host(torch.stack([tops.double(), strange.double()]))
        for i in np.flatnonzero(host[1]).tolist():
            rows[i] -= check_top(float(host[0, i]), told(i))
        log_sums = self._log_sums(rows, [None] * len(rows))
        return [DeviceTable(self, row.clone(), log_sums=sums) for row, sums in zip(rows, log_sums, strict=True)]

    def to_host(self, tensor: torch.Tensor) -> Any:
        """It as numpy, counted."""
        self._stats().bytes_to_host += tensor.numel() * tensor.element_size()
        return tensor.cpu().numpy()

    # ---- as an evaluator

    def done(self) -> Stats:
        return Stats()                                  # they are the language model's

    def cached(self, question: Question) -> float | None:
        table, what = question
        return table.known.get(what) if isinstance(what, int) else None

    def evaluate(self, questions: list[Question]) -> Sequence[Any]:
        sums = {i: table for i, (table, what) in enumerate(questions) if what is None}
        singles = {i: (table, what) for i, (table, what) in enumerate(questions) if isinstance(what, int)}
        answers = dict[int, Any]()
        if sums:
            found = self._log_sums([table.row for table in sums.values()], [table.mask for table in sums.values()])
            answers |= dict(zip(sums, found, strict=True))
        if singles:
            self.look_up(list(singles.values()))
            answers |= {i: table.known[index] for i, (table, index) in singles.items()}
        blocks = [(i, *question) for i, question in enumerate(questions) if i not in answers]
        if blocks:
            read = self.read([(table, block) for _, table, asked in blocks for block in asked.tolist()])
            ends = np.cumsum([len(asked) for *_, asked in blocks])
            answers |= {i: part for (i, *_), part in zip(blocks, np.split(read, ends[:-1]), strict=True)}
        return [answers[i] for i in range(len(questions))]

    def look_up(self, places: Sequence[tuple[DeviceTable, int]]) -> None:
        """Make single values known to their tables."""
        unknown = [(table, index) for table, index in places if index not in table.known]
        if unknown:
            values = self.to_host(torch.stack([table.row[index] for table, index in unknown]))
            for (table, index), value in zip(unknown, values.astype(np.float64).tolist(), strict=True):
                table.known[index] = value

    def read(self, places: Sequence[tuple[DeviceTable, int]]) -> Floats:
        """(m, BLOCK) log-weights of blocks of tables, -inf past the end."""
        parts = [table.row[block * BLOCK : (block + 1) * BLOCK] for table, block in places]
        read = self.to_host(torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=-torch.inf))
        log_weights: Floats = np.full((len(places), BLOCK), -np.inf)
        for row, values, (table, block) in zip(log_weights, read, places, strict=True):
            inside = slice(block * BLOCK, min((block + 1) * BLOCK, len(table)))
            size = inside.stop - inside.start
            row[:size] = values[:size]
            if table.mask is not None:
                row[:size][~table.mask[inside]] = -np.inf
        return log_weights

    def _log_sums(self, rows: Sequence[torch.Tensor] | torch.Tensor, masks: Sequence[Mask | None]) -> Floats:
        """(R, number of blocks) logs of the sums over the blocks of the rows, where the masks hold."""
        size = len(rows[0])
        together = max(1, _TOGETHER // size)
        parts = []
        for first in range(0, len(rows), together):
            part = rows[first : first + together]
            weights = (part if isinstance(part, torch.Tensor) else torch.stack(list(part))).double()
            for i, mask in enumerate(masks[first : first + together]):
                if mask is not None:
                    weights[i].masked_fill_(self._forbidden(mask, weights.device), -torch.inf)
            weights = torch.nn.functional.pad(weights, (0, -size % BLOCK), value=-torch.inf).view(len(part), -1, BLOCK)
            tops = weights.amax(2)
            tops.masked_fill_(tops == -torch.inf, 0.0)
            parts.append(weights.sub_(tops[..., None]).exp_().sum(2).log_().add_(tops))
        found: Floats = self.to_host(torch.cat(parts))
        return found

    def _forbidden(self, mask: Mask, device: torch.device) -> torch.Tensor:
        """Where `mask` does not hold, kept on the device for as long as the mask lives."""
        key = id(mask)
        if key not in self._masks:
            gone = weakref.ref(mask, lambda _: self._masks.pop(key, None))
            self._masks[key] = gone, torch.from_numpy(~mask).to(device)
        return self._masks[key][1]
