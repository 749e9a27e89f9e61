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
from llmppl.lm.logits import LARGE, check_top
from llmppl.support.runtime import Evaluator, Stats, request

_TOGETHER = 1 << 21                     # weights in float64 at a time: 40 MiB with their rows and the weights before
Question = tuple["DeviceTable", Any]    # (table, None): its sums; (table, index): that log-weight; or (m,) blocks


class DeviceTable(Table):
    """V log-weights, a tensor of whole blocks, where `mask`, (V,) bool of numpy, holds; everywhere if that is None."""

    def __init__(
        self, device: Device, row: torch.Tensor, mask: Mask | None = None, log_sums: Floats | None = None
    ) -> None:
        self.owner, self.row, self.mask, self._log_sums = device, row, mask, log_sums
        self.nbytes = row.numel() * row.element_size() + 16 * (len(row) // BLOCK)
        self.known: dict[int, float] = {}               # single log-weights that were asked for

    def __len__(self) -> int:
        return int(self.owner.size)

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
    """Evaluator of questions about tables of `size` log-weights on a device, with -inf for the ids `unknown`.

    `stats()` are those of the calling thread. Masks take at most `mask_bytes`; the least recently used leave first.
    """

    patient = False

    def __init__(self, stats: Callable[[], Stats], size: int, unknown: NDArray[np.int64], mask_bytes: int) -> None:
        self.size, self._stats, self._max_masks = size, stats, mask_bytes // size
        self._masks: dict[int, tuple[weakref.ref[Any], torch.Tensor]] = {}      # by id, least recently used first
        self._unknown = torch.from_numpy(unknown)

    def rows(
        self, logits: torch.Tensor, told: Callable[[int], str], tokens: Sequence[list[int]], kept: Sequence[bool]
    ) -> list[DeviceTable]:
        """Return `llmppl.lm.logits.array_rows` as tables that know their `tokens`; those not `kept` share one memory."""
        rows = logits.new_full((len(logits), self.size + -self.size % BLOCK), -torch.inf)
        rows[:, : min(self.size, logits.shape[1])] = logits[:, : self.size]
        self._unknown = self._unknown.to(rows.device)   # moved once, and not in every round
        rows.index_fill_(1, self._unknown, -torch.inf)
        tops = rows.amax(1)
        strange = ~(tops.abs() <= LARGE)
        host = self.to_host(torch.stack([tops.double(), strange.double()]))
        for i in np.flatnonzero(host[1]).tolist():
            rows[i] -= check_top(float(host[0, i]), told(i))
        log_sums = self._log_sums(rows, [None] * len(rows))
        own = [row.clone() if keep else row for row, keep in zip(rows, kept, strict=True)]
        tables = [DeviceTable(self, row, log_sums=sums) for row, sums in zip(own, log_sums, strict=True)]
        places = [i * rows.shape[1] + token for i, each in enumerate(tokens) for token in each]
        if places:
            values = iter(self.to_host(rows.take(torch.tensor(places, device=rows.device))).tolist())
            for table, each in zip(tables, tokens, strict=True):
                table.known |= zip(each, values, strict=False)
        return tables

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
        self.look_up([*singles.values()])
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
            values = self.to_host(torch.stack([table.row[index] for table, index in unknown]))      # of views
            for (table, index), value in zip(unknown, values.tolist(), strict=True):
                table.known[index] = value

    def read(self, places: Sequence[tuple[DeviceTable, int]]) -> Floats:
        """(m, BLOCK) log-weights of blocks of tables, -inf past the end."""
        parts = [table.row[block * BLOCK : (block + 1) * BLOCK] for table, block in places]
        log_weights: Floats = self.to_host(torch.stack(parts)).astype(np.float64)
        for row, (table, block) in zip(log_weights, places, strict=True):
            if table.mask is not None:
                allowed = table.mask[block * BLOCK : (block + 1) * BLOCK]
                row[: len(allowed)][~allowed] = -np.inf
        return log_weights

    def _log_sums(self, rows: Sequence[torch.Tensor] | torch.Tensor, masks: Sequence[Mask | None]) -> Floats:
        """(R, number of blocks) logs of the sums over the blocks of the rows, where the masks hold."""
        together = max(1, _TOGETHER // len(rows[0]))
        parts = []
        for first in range(0, len(rows), together):
            weights = torch.stack([*rows[first : first + together]]).double()       # a copy, changed in place
            for i, mask in enumerate(masks[first : first + together]):
                if mask is not None:
                    weights[i, : self.size].masked_fill_(self._forbidden(mask, weights.device), -torch.inf)
            weights = weights.view(len(weights), -1, BLOCK)
            tops = weights.amax(2)
            tops.masked_fill_(tops == -torch.inf, 0.0)
            parts.append(weights.sub_(tops[..., None]).exp_().sum(2).log_().add_(tops))
        found: Floats = self.to_host(torch.cat(parts))
        return found

    def _forbidden(self, mask: Mask, device: torch.device) -> torch.Tensor:
        """Return where `mask` does not hold, on the device; keep it there while the mask lives and there is room."""
        key = id(mask)
        found = self._masks.pop(key, None)              # put back last
        if found is None:
            found = weakref.ref(mask, lambda _: self._masks.pop(key, None)), torch.from_numpy(~mask).to(device)
        self._masks[key] = found
        if len(self._masks) > self._max_masks:
            for old in [*self._masks][: -self._max_masks or None]:
                self._masks.pop(old, None)
        return found[1]
