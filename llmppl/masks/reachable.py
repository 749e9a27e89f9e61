"""The states that sequences of tokens reach."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmppl.masks import walks
from llmppl.masks.constraint import Ints
from llmppl.masks.trie import Trie

__all__ = ["OnRows", "Reachable"]

OnRows = Callable[[Ints, walks.Walk, Ints], None]


class Reachable:
    """The states that token sequences reach, as rows in the order they are met.

    `on_rows(states, walk, changes)` sees some states, what was found from them, and at which of its entries another
    state begins than before, or the walk from another row: neighbours mostly lead to one state.

    Attributes
    ----------
    num : int
        Rows so far.
    states, row_of : int32 ndarrays
        The state of a row, and the row of a state, -1 where it was not met.
    """

    def __init__(self, graph: walks.Graph, trie: Trie, limit: float, on_rows: OnRows) -> None:
        self.graph, self.trie, self.limit, self.on_rows = graph, trie, limit, on_rows
        self.states, self.row_of = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self.num, self._done, self._batch = 0, 0, 1

    def reach(self, number: int) -> None:
        """Go on to `number` and to all that can be reached from there."""
        self._meet(np.array([number]))
        while self._done < self.num:
            if self.num > self.limit:
                raise ValueError(f"more than {self.limit} states are reached: the language may have infinitely many")
            self._read_rows(self._done, min(self._done + self._batch, self.num))

    def _meet(self, numbers: Ints) -> None:
        """Give rows to the states that have none, in their order."""
        more = len(self.graph.table) - self.states.size
        if more > 0:
            self.states = np.concatenate([self.states, np.zeros(more, np.int32)])
            self.row_of = np.concatenate([self.row_of, np.full(more, -1, np.int32)])
        unmet = numbers[self.row_of[numbers] < 0]
        if unmet.size:
            new, first = np.unique(unmet, return_index=True)
            new = new[np.argsort(first)]
            self.row_of[new] = np.arange(self.num, self.num + new.size)
            self.states[self.num : self.num + new.size] = new
            self.num += new.size

    def _read_rows(self, first: int, last: int) -> None:
        numbers = self.states[first:last]
        found = walks.walk(self.graph, self.trie, numbers)
        size = found.states.size
        starts = np.ones(size + 1, bool)
        np.not_equal(found.states[1:], found.states[:-1], out=starts[1:size])
        starts[found.begin] = True
        changes = np.flatnonzero(starts[:size])
        self._meet(found.states[changes])
        self._done = last
        self._batch = max(1, self._batch * 2 if size < walks.CHUNK // 8 else self._batch // 2)
        self.on_rows(numbers, found, changes)
