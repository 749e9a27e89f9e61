"""All states that tokens reach: explored in batches (StateExplorer), or computed ahead as arrays (PrecomputedIndex)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llmppl.constraints.constraint import Bools, Ints, State
from llmppl.constraints.masks.mask_store import PackedMask
from llmppl.constraints.vocabulary.trie import Trie
from llmppl.constraints.vocabulary.trie_walk import CHUNK, Graph, TableGraph, Walk, walk
from llmppl.support.shared import Shared

__all__ = ["PrecomputedIndex", "StateExplorer", "build"]

OnRows = Callable[[Ints, Walk, Ints], None]


class StateExplorer:
    """States that token sequences reach, numbered as rows in the order in which they are found.

    `on_rows(states, walk, changes)` is called for each batch of states. `walk` holds the results of their walks, and
    `changes` the indices of its entries whose state or start differs from the entry before: neighbours mostly agree.

    Attributes
    ----------
    num : int
        Number of rows so far.
    states, row_of : int32 ndarrays
        The state of each row, and the row of each state, -1 if it was not found.
    """

    def __init__(self, graph: Graph, trie: Trie, limit: float, on_rows: OnRows) -> None:
        self.graph, self.trie, self.limit, self.on_rows = graph, trie, limit, on_rows
        self.states, self.row_of = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self.num, self._done, self._batch = 0, 0, 1

    def explore(self, number: int) -> None:
        """Add the state `number` and all states that can be reached from it."""
        self._add(np.array([number]))
        while self._done < self.num:
            if self.num > self.limit:
                raise ValueError(f"more than {self.limit} states are reached: the language may have infinitely many")
            self._read_rows(self._done, min(self._done + self._batch, self.num))

    def _add(self, numbers: Ints) -> None:
        """Assign rows to the states that have none, in their order."""
        more = len(self.graph.table) - self.states.size
        if more > 0:
            self.states = np.concatenate([self.states, np.zeros(more, np.int32)])
            self.row_of = np.concatenate([self.row_of, np.full(more, -1, np.int32)])
        unseen = numbers[self.row_of[numbers] < 0]
        if unseen.size:
            new, first = np.unique(unseen, return_index=True)
            new = new[np.argsort(first)]
            self.row_of[new] = np.arange(self.num, self.num + new.size)
            self.states[self.num : self.num + new.size] = new
            self.num += new.size

    def _read_rows(self, first: int, last: int) -> None:
        numbers = self.states[first:last]
        found = walk(self.graph, self.trie, numbers)
        size = found.states.size
        starts = np.ones(size + 1, bool)
        np.not_equal(found.states[1:], found.states[:-1], out=starts[1:size])
        starts[found.begin] = True
        changes = np.flatnonzero(starts[:size])
        self._add(found.states[changes])
        self._done = last
        self._batch = max(1, self._batch * 2 if size < CHUNK // 8 else self._batch // 2)
        self.on_rows(numbers, found, changes)


@dataclass(frozen=True, eq=False, repr=False)
class PrecomputedIndex(Shared):
    """All states that tokens reach from the start, as rows, with their masks and steps.

    Attributes
    ----------
    states : list of S states, the start first
    accepting : (S,) bool ndarray
    masks : list of S PackedMask
    begin : (S + 1,) int64 ndarray
    next : (begin[S],) integer ndarray
        The rows that tokens lead to; for row i from begin[i] on, in the order of the bytes of its tokens.
    """

    index: Any                                      # the TokenIndex
    states: list[State]
    accepting: Bools
    masks: list[PackedMask]
    begin: npt.NDArray[np.int64]
    next: Ints

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return f"PrecomputedIndex({len(self)} states, {self.next.size} steps, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Memory of all arrays in bytes; equal masks count once."""
        return self.next.nbytes + self.begin.nbytes + sum(len(found.key) for found in set(self.masks))

    def row(self, i: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the steps from states[i] without eos: (n,) ascending token ids, and (n,) rows that they lead to."""
        order = self.index.trie.order
        tokens = order[self.index.mask(self.states[i])[order]].astype(np.int64)
        move = np.argsort(tokens)
        return tokens[move], self.next[self.begin[i] : self.begin[i + 1]][move].astype(np.int64)


def build(index: Any, max_states: int) -> PrecomputedIndex:
    """Compute all rows of a TokenIndex (Algorithm 4); raise a ValueError if there are more than `max_states`."""
    graph, recognizer = index.graph, index.recognizer
    if isinstance(graph, TableGraph):
        recognizer.explore()
    small = np.uint16 if isinstance(graph, TableGraph) and len(graph.table) <= 1 << 16 else np.int32
    states: list[State] = []
    accepting: list[bool] = []
    masks: list[PackedMask] = []
    nexts: list[Ints] = []
    sizes = [np.zeros(1, np.int64)]

    def take(numbers: Ints, found: Walk, _: Ints) -> None:
        ids, ends, begin = index.trie.tokens_at(found.nodes, found.states, found.begin)
        last: dict[tuple[int, bool], tuple[Ints, PackedMask]] = {}      # by size: neighbours are often equal
        for number, a, b in zip(numbers.tolist(), begin.tolist(), begin[1:].tolist(), strict=False):
            states.append(graph.state(number))
            accepting.append(bool(recognizer.accepts(states[-1])))
            key, some = (b - a, accepting[-1]), ids[a:b]
            seen = last.get(key)
            if seen is None or not np.array_equal(seen[0], some):
                seen = last[key] = some, index.store.of_ids(some, accepting[-1])
            masks.append(seen[1])
        nexts.append(explorer.row_of[ends].astype(small))
        sizes.append(np.diff(begin))

    explorer = StateExplorer(graph, index.trie, max_states, take)
    explorer.explore(graph.number(index.start))
    return PrecomputedIndex(
        index, states, np.array(accepting), masks, np.cumsum(np.concatenate(sizes)), np.concatenate(nexts)
    )
