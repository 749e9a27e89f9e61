"""Units of a machine: tables, recognizers, special tokens."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from llmppl.constraints.constraint import Bools, Ints, Recognizer
from llmppl.constraints.machine.machine import DONE, Continuation, Exit, Item
from llmppl.constraints.masks.distances import bytes_to_accept
from llmppl.constraints.vocabulary.trie_walk import MemoGraph, TableGraph
from llmppl.support.graphs import Memo

ONLY_DONE: tuple[Exit, ...] = (DONE,)
NOTHING: tuple[Exit, ...] = ()


class TableUnit(TableGraph):
    """Unit of a tabled recognizer, such as a DFA. It ends where the recognizer accepts."""

    is_always_viable = True
    doubtful: re.Pattern[bytes] | None = None
    special: str | int | None = None

    def __init__(self, recognizer: Any) -> None:
        super().__init__(recognizer)
        self.exits: Memo[int, tuple[Exit, ...]] = Memo(
            lambda number: ONLY_DONE if recognizer.accepts(number) else NOTHING
        )
        self._left: Memo[bytes, npt.NDArray[np.float64]] = Memo(self._find_left)

    @property
    def has_exits(self) -> Bools:  # type: ignore[override]
        accepting: Bools = self.recognizer.accepting
        return accepting

    def step(self, number: int, byte: int) -> int:
        return self.recognizer.row(number).item(byte)

    def num_plain(self, number: int) -> float | None:
        return None

    def follow(self, label: Exit, after: Continuation) -> list[Item]:
        return [after]

    def settled(self, number: int, after: Continuation) -> int:
        return number

    def is_viable(self, number: int, after: Continuation) -> bool:
        return True

    def is_far(self, number: int, after: Continuation, most: float) -> bool:
        return False

    def bytes_left(self, number: int, after: Continuation, alone: Bools) -> float:
        return self.least_bytes(number, alone) + after.bytes_left(alone)

    def least_bytes(self, number: int, alone: Bools) -> float:
        """Return the least number of bytes from a state to the end of the unit's text."""
        return float(self._left[alone.tobytes()][number])

    def _find_left(self, alone: bytes) -> npt.NDArray[np.float64]:
        self.recognizer.explore()
        table = self.recognizer.table.copy()
        table[:, ~np.frombuffer(alone, bool)] = 0
        return bytes_to_accept(table, self.recognizer.accepting)


class StateUnit(MemoGraph):
    """Unit whose states are numbered as they are met: that of a recognizer without a table."""

    is_always_viable = True
    doubtful: re.Pattern[bytes] | None = None
    special: str | int | None = None

    def __init__(self, recognizer: Recognizer) -> None:
        super().__init__(recognizer)
        self.exits: Memo[int, tuple[Exit, ...]] = Memo(self.exits_at)
        self._has_exits = np.zeros(0, np.uint8)

    def exits_at(self, number: int) -> tuple[Exit, ...]:
        return ONLY_DONE if self.recognizer.accepts(self.states[number]) else NOTHING

    @property
    def has_exits(self) -> npt.NDArray[np.uint8]:  # type: ignore[override]
        new = len(self.table) - len(self._has_exits)
        if new > 0:
            self._has_exits = np.append(self._has_exits, np.full(new, 2, np.uint8))
        return self._has_exits

    def find_exits(self, number: int) -> None:
        """Enter in `has_exits` if a state has exits."""
        self.has_exits[number] = bool(self.exits[number])

    def step(self, number: int, byte: int) -> int:
        if self.table.item(number, byte) < 0:
            self.fill(number, np.array([byte]))
        return self.table.item(number, byte)

    def num_plain(self, number: int) -> float | None:
        return None

    def row(self, number: int) -> Ints:
        row: Ints = self.table[number]
        if row.min() < 0:
            self.fill(number, np.flatnonzero(row < 0))
            row = self.table[number]
        return row

    def follow(self, label: Exit, after: Continuation) -> list[Item]:
        return [after]

    def settled(self, number: int, after: Continuation) -> int:
        return number

    def is_viable(self, number: int, after: Continuation) -> bool:
        return True

    def is_far(self, number: int, after: Continuation, most: float) -> bool:
        return False

    def bytes_left(self, number: int, after: Continuation, alone: Bools) -> float:
        return math.inf


class TokenUnit(StateUnit):
    """Unit of one special token, a symbol without bytes: no byte leaves its state."""

    def __init__(self, token: str | int) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.special = token
        self.begin = self.number("before")

    def exits_at(self, number: int) -> tuple[Exit, ...]:
        return NOTHING

    def new_row(self, state: Any) -> int:
        return 0

    def bytes_left(self, number: int, after: Continuation, alone: Bools) -> float:
        return 1 + after.bytes_left(alone)
