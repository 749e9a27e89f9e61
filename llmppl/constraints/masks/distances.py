"""All states that tokens reach: explored in batches, computed ahead as arrays, and their distances to an end.

A *distance* is the least number of tokens from a state to one that accepts, eos not counted; inf if there is no path.
For a tabled recognizer, the distance in bytes bounds the distance in tokens and is mostly sufficient. Otherwise the
distances of all states are computed together, once. States of other recognizers are searched one at a time, which is
slow if a state has many successors.

Both classes of distances have three methods. `of` returns the distance of a state, and `after` the distances of its
successors, given by number (`ends`). `within` returns which of these are at most a finite number `n`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llmppl.constraints.constraint import Bools, Ints, State
from llmppl.constraints.masks.mask_store import PackedMask
from llmppl.constraints.vocabulary.trie import Trie, ranges
from llmppl.constraints.vocabulary.trie_walk import CHUNK, Graph, TableGraph, Walk, walk
from llmppl.support.locks import Lock, locked
from llmppl.support.shared import Shared

__all__ = ["PrecomputedIndex", "SearchDistances", "StateExplorer", "TableDistances", "build", "bytes_to_accept"]

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
        return f"PrecomputedIndex({len(self)} states, {self.next.size} steps)"

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


MAX_MEMO = 1 << 16                                  # distances that are kept for states without a table
MAX_READ = 2_000_000                                # tokens that one search for an end reads at most: some seconds
MAX_WALKED = 50_000_000                             # the same for the states of a table, where a token costs less

Floats = npt.NDArray[np.float64]


class TableDistances:
    """Distances of all states that tokens reach, computed together."""

    def __init__(self, turn: Lock) -> None:
        self._lock = turn
        self._edges: _Edges | None = None
        self._by_state: Floats = np.zeros(0)
        self._bounds: tuple[Floats, Floats] | None = None

    def of(self, index: Any, state: State, most: float = math.inf) -> float:
        least, bytes = (bound.item(state) for bound in self._bounded(index))
        if least > most:
            return math.inf
        return float(bytes if least == bytes else self.after(index, state, np.array([state]))[0])

    def within(self, index: Any, state: State, ends: Ints, n: float) -> Bools:
        least, most = (bound[ends] for bound in self._bounded(index))
        if ((least > n) | (most <= n)).all():
            return most <= n
        fits: Bools = self.after(index, state, ends) <= n
        return fits

    @locked
    def _bounded(self, index: Any) -> tuple[Floats, Floats]:
        """Return the lower and the upper bound of the distance of each state."""
        if self._bounds is None:
            self._bounds = _bounds(index)
        return self._bounds

    @locked
    def after(self, index: Any, state: State, ends: Ints) -> Floats:
        edges, self._edges = self._edges, None      # absent while it changes: an interrupt loses it
        if edges is None:
            index.recognizer.explore()
            edges = _Edges(index)
        explorer = edges.explorer
        if state >= explorer.row_of.size or explorer.row_of[state] < 0:
            explorer.explore(state)
            self._by_state = edges.distances(index.recognizer.accepting)
        self._edges = edges
        return self._by_state[ends]


def _bounds(index: Any) -> tuple[Floats, Floats]:
    """Return bounds of the distances, (S,) and (S,).

    If every byte of the language is a token by itself, the number of bytes to an end is an upper bound. Divided by the
    length of the longest token, it is a lower bound. Otherwise the bounds are 0 and inf.
    """
    recognizer, tokens = index.recognizer, index.trie.tokens
    recognizer.explore()
    table = recognizer.table
    alone = {token[0] for token in tokens if len(token) == 1}
    if not alone.issuperset(np.flatnonzero(table.any(0)).tolist()):
        return np.zeros(len(table)), np.full(len(table), np.inf)
    num_bytes = bytes_to_accept(table, recognizer.accepting)
    return np.ceil(num_bytes / max(1, max(map(len, tokens)))), num_bytes


def bytes_to_accept(table: Ints, accepting: Bools) -> Floats:
    """Return the least number of bytes from each state to one that accepts: (S,), inf if there is no path."""
    runs = np.ones(table.shape, bool)                   # neighbouring bytes mostly lead to the same state
    np.not_equal(table[:, 1:], table[:, :-1], out=runs[:, 1:])
    source, byte = np.nonzero(runs & (table > 0))
    return _least_steps(source, table[source, byte], accepting[: len(table)])


def _least_steps(source: Ints, target: Ints, accepting: Bools) -> Floats:
    """Return the least number of edges from each state to one that accepts: (S,), inf if there is no path."""
    order = np.argsort(target, kind="stable")
    source, degrees = source[order], np.bincount(target, minlength=accepting.size)
    begin = np.cumsum(degrees) - degrees
    distance = np.full(accepting.size, np.inf)
    level, depth = np.flatnonzero(accepting), 0.0
    while level.size:
        distance[level] = depth
        before = source[ranges(begin[level], degrees[level])]
        level, depth = np.unique(before[np.isinf(distance[before])]), depth + 1
    return distance


class _Edges:
    """Edges between the states that tokens reach."""

    def __init__(self, index: Any) -> None:
        self.explorer = StateExplorer(index.graph, index.trie, math.inf, self._add)
        self._pairs: list[Ints] = []                # 2^32 source + target
        self._name, self._num_walked = index.name, 0

    def _add(self, numbers: Ints, found: Walk, changes: Ints) -> None:
        self._num_walked += found.states.size
        if self._num_walked > MAX_WALKED:
            raise ValueError(
                f"{self._name}: no end found in {self.explorer.num} states; shorter counted repeats would work, or "
                "complete=False, which lets max_tokens cut such a text"
            )
        source = numbers[np.searchsorted(found.begin, changes, "right") - 1].astype(np.int64)
        self._pairs.append(np.unique((source << 32) + found.states[changes]))

    def distances(self, accepting: Bools) -> Floats:
        """Return the least number of tokens from each state to one that accepts: (S,)."""
        pairs = np.concatenate(self._pairs)
        return _least_steps(pairs >> 32, pairs & (1 << 32) - 1, accepting)


class SearchDistances:
    """Distances by breadth-first search from one state; a ValueError after MAX_READ tokens."""

    def cost(self, state: State) -> int:
        """Return the work of a state, in tokens."""
        return 600

    def __init__(self, turn: Lock) -> None:
        self._lock = turn
        self._memo: dict[State, tuple[float, bool]] = {}        # a distance, and whether it is no lower bound only
        self._next: dict[State, tuple[State, ...]] = {}         # states after one token, shared by all searches

    def within(self, index: Any, state: State, ends: Ints, n: float) -> Bools:
        targets, where = np.unique(ends, return_inverse=True)
        states = [index.graph.state(target) for target in targets.tolist()]    # before a search renews the graph
        return np.array([self.of(index, target, n) <= n for target in states], bool)[where]

    @locked
    def of(self, index: Any, state: State, most: float = math.inf) -> float:
        """Return the distance of a state; inf if it is more than `most`, as far as a search to there tells."""
        found, exact = self._memo.get(state, (0.0, False))
        if not exact and found <= most:
            found, exact = self._search(index, state, most)
            for memo in (self._memo, self._next):
                if len(memo) > MAX_MEMO:
                    memo.clear()
            self._memo[state] = found, exact
        return found if exact else math.inf

    def _search(self, index: Any, state: State, most: float) -> tuple[float, bool]:
        level, seen, depth, num_read = [state], {state}, 0, 0
        while level and not any(map(index.recognizer.accepts, level)):
            if depth >= most:
                return depth + 1, False
            below: dict[State, None] = {}
            for each in level:
                if each not in self._next:
                    ends = index.walk(each)[1]
                    self._next[each] = tuple(index.graph.state(end) for end in np.unique(ends).tolist())
                    num_read += ends.size + self.cost(each)
                below.update(dict.fromkeys(self._next[each]))
                if num_read + len(seen) + len(below) > MAX_READ:
                    raise ValueError(
                        f"{index.name}: no end found within {depth} tokens and {len(seen)} states; complete=False lets "
                        "max_tokens cut such a text"
                    )
            level = [each for each in below if each not in seen]
            seen.update(level)
            depth += 1
        return (depth, True) if level else (math.inf, True)
