"""How many tokens a state is from one that accepts, an eos not counted: inf if there is no way.

For a tabled recognizer all states are looked at together, once. For others the states are searched in turn, which is
slow where a state has many successors. `of` a state, or `after` it: of those that tokens lead to, by number (`ends`).
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llmppl.exclusive import Turn, in_turn
from llmppl.masks.constraint import Bools, Ints, State
from llmppl.masks.trie import Trie
from llmppl.masks.walks import MemoGraph, TableGraph, Walk
from llmppl.masks.whole import Reachable

__all__ = ["SearchDistances", "TableDistances"]

MAX_MEMO = 1 << 16                                  # states without a table whose distances are kept
MAX_SEARCHED = 100_000                              # states without a table that an end is looked for in

Floats = npt.NDArray[np.float64]


class Searchable(Protocol):
    """What is asked of an index."""

    @property
    def name(self) -> str: ...
    recognizer: Any
    trie: Trie
    graph: TableGraph | MemoGraph

    def walk(self, state: State, /) -> tuple[Ints, Ints]: ...


class TableDistances:
    """Of all states that tokens reach, at once."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._edges: _Edges | None = None
        self._by_row: Floats = np.zeros(0)

    def of(self, index: Searchable, state: State) -> float:
        return float(self.after(index, state, np.array([state]))[0])

    @in_turn
    def after(self, index: Searchable, state: State, ends: Ints) -> Floats:
        edges, self._edges = self._edges, None      # taken away while it changes
        if edges is None:
            index.recognizer.explore()
            edges = _Edges(index)
        reachable = edges.reachable
        if state >= reachable.row_of.size or reachable.row_of[state] < 0:
            reachable.reach(state)
            self._by_row = edges.distances(index.recognizer.accepting[reachable.states[: reachable.num]])
        self._edges = edges
        return self._by_row[reachable.row_of[ends]]


class _Edges:
    """The rows that the rows of an index lead to, and how many each leads to."""

    def __init__(self, index: Searchable) -> None:
        self.reachable = Reachable(index.graph, index.trie, math.inf, self._take)
        self._targets: list[Ints] = []
        self._degrees: list[Ints] = []

    def _take(self, numbers: Ints, found: Walk, changes: Ints) -> None:
        source, num = np.searchsorted(found.begin, changes, "right") - 1, self.reachable.num
        pairs = np.unique(source * num + self.reachable.row_of[found.states[changes]])
        self._targets.append(pairs % num)
        self._degrees.append(np.bincount(pairs // num, minlength=numbers.size))

    def distances(self, accepting: Bools) -> Floats:
        """(num,) the least number of tokens from each row to an accepting one."""
        degrees, targets = np.concatenate(self._degrees), np.concatenate(self._targets)
        inner = np.flatnonzero(degrees)             # rows that lead anywhere
        begin = (np.cumsum(degrees) - degrees)[inner]
        distance = np.where(accepting, 0.0, np.inf)
        while inner.size:
            nearer = np.minimum(distance[inner], 1 + np.minimum.reduceat(distance[targets], begin))
            if np.array_equal(nearer, distance[inner]):
                break
            distance[inner] = nearer
        return distance


class SearchDistances:
    """Of one state at a time, level by level. ValueError if a search has met MAX_SEARCHED states."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._memo: dict[State, float] = {}

    def after(self, index: Searchable, state: State, ends: Ints) -> Floats:
        targets, where = np.unique(ends, return_inverse=True)
        states = [index.graph.state(target) for target in targets.tolist()]    # before searches renew the graph
        return np.array([self.of(index, target) for target in states], float)[where]

    @in_turn
    def of(self, index: Searchable, state: State) -> float:
        if state in self._memo:
            return self._memo[state]
        level, seen, depth = [state], {state}, 0
        while level and not any(map(index.recognizer.accepts, level)):
            below: dict[State, None] = {}
            for each in level:
                ends = np.unique(index.walk(each)[1])
                below.update((index.graph.state(end), None) for end in ends.tolist())
            level = [each for each in below if each not in seen]
            seen.update(level)
            depth += 1
            if len(seen) > MAX_SEARCHED:
                raise ValueError(f"{index.name}: no end found within {depth} tokens and {len(seen)} states")
        if len(self._memo) > MAX_MEMO:
            self._memo.clear()
        found = self._memo[state] = depth if level else math.inf
        return found
