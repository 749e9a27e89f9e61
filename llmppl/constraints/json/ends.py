"""Distances: the least number of tokens from a configuration to the end of a text.

Only *closing* moves count: they complete the value that is read and add what its schema still needs, and nothing else.
The sum of the distances of single frames is an upper bound, which is quickly computed and mostly sufficient.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from llmppl.constraints.constraint import Bools, Ints, State
from llmppl.constraints.json.frames import Local
from llmppl.constraints.json.texts import END, Config, Texts
from llmppl.constraints.masks.self_loops import Key, key_of
from llmppl.constraints.vocabulary.trie_walk import MemoGraph, walk_state
from llmppl.support.locks import Lock, locked

__all__ = ["ConfigGraph", "Distances"]

MAX_KEPT = 1 << 17                                  # distances that are kept


class ConfigGraph(MemoGraph):
    """Graph of configurations; a row is computed at once."""

    room, has_zero = 1 << 15, True

    def __init__(self, texts: Texts, is_closing: bool = False) -> None:
        super().__init__(texts)
        self._is_closing = is_closing
        self._keys: dict[Any, Key | None] = {}      # loops, by local state

    def row(self, number: int) -> npt.NDArray[np.int32]:
        """Return the numbers of the next states, (256,) int32."""
        if self.table.item(number, 0) < 0:
            moves = [(lo, hi, self.number(state)) for lo, hi, state in self.recognizer.moves(self.states[number], self._is_closing)]
            row = np.zeros(256, np.int32)           # after numbering, which may replace the table
            for lo, hi, after in moves:
                row[lo : hi + 1] = after
            self.table[number] = row
        found: npt.NDArray[np.int32] = self.table[number]
        return found

    def fill(self, number: int, bytes: Ints, /) -> None:
        self.row(number)

    def next_bytes(self, state: State) -> bytes:
        return bytes(np.flatnonzero(self.row(self.number(state))).tolist())

    def loop(self, number: int) -> Key | None:
        """Return the self-loop key (`masks.self_loops.key_of`) of a state with one local state."""
        items = self.states[number].items
        if len(items) != 1:
            return None
        local = items[0][0]
        if local not in self._keys:
            self._keys[local] = key_of(self.row, number)
        return self._keys[local]

    def renewed(self, room: float) -> ConfigGraph:
        return self if len(self.states) <= room else ConfigGraph(self.recognizer)


class Distances:
    """Distances of configurations, for one index."""

    def __init__(self, turn: Lock) -> None:
        self._lock = turn
        self._known: dict[Config, float] = {}
        self._sums: dict[Config, float] = {END: 0}
        self._graph: ConfigGraph | None = None

    @locked
    def of(self, index: Any, state: State) -> float:
        return self._find(index, index.recognizer.plain(state, index.reach))

    def after(self, index: Any, state: State, ends: Ints) -> npt.NDArray[np.float64]:
        targets, where = np.unique(ends, return_inverse=True)
        states = [index.graph.state(target) for target in targets.tolist()]
        return np.array([self.of(index, target) for target in states], float)[where]

    @locked
    def within(self, index: Any, state: State, ends: Ints, n: float) -> Bools:
        targets, where = np.unique(ends, return_inverse=True)
        states = [index.recognizer.plain(index.graph.state(target), index.reach) for target in targets.tolist()]
        fits = [self._sum(index, target) <= n or self._find(index, target) <= n for target in states]
        return np.array(fits, bool)[where]

    def _sum(self, index: Any, config: Config) -> float:
        """Return the sum of the distances of frames by themselves."""
        way = [config]                              # down the stack, to a known sum
        while way[-1] not in self._sums and not way[-1].accepts:
            way.append(way[-1].items[0][1])
        total = 0.0 if way[-1].accepts else self._sums[way[-1]]
        for each in reversed(way[:-1]):
            local: Local = each.items[0][0]
            total += self._find(index, Config(((local, END),), False))
            self._sums[each] = total
        if len(self._sums) > MAX_KEPT:
            self._sums = {END: 0}
        return total

    def _find(self, index: Any, config: Config) -> float:
        """Return the least number of tokens from a configuration to an end."""
        known = self._known.get(config)
        if known is None:
            if len(self._known) > MAX_KEPT:
                self._known.clear()
            self._solve(index, config)
            known = self._known[config]
        return known

    def _solve(self, index: Any, config: Config) -> None:
        """Find the distances of all configurations that closing moves lead to."""
        texts: Texts = index.recognizer
        if self._graph is None or len(self._graph.states) > self._graph.room:
            self._graph = ConfigGraph(texts, is_closing=True)
        graph = self._graph
        before: dict[Config, list[Config]] = {}     # the configurations one token before
        order, level = [config], list[Config]()
        distance: dict[Config, float] = {config: math.inf}
        for each in order:                          # grows
            if each.accepts:
                distance[each] = 0
                level.append(each)
                continue
            _, ends = walk_state(graph, index.trie, graph.number(each))
            for number in np.unique(ends).tolist():
                after = graph.states[number]
                before.setdefault(after, []).append(each)
                if after not in distance:
                    distance[after] = self._known.get(after, math.inf)
                    if math.isinf(distance[after]):
                        order.append(after)
                    else:
                        level.append(after)
        by_distance: dict[float, list[Config]] = {}
        for each in level:
            by_distance.setdefault(distance[each], []).append(each)
        while by_distance:
            n = min(by_distance)
            for each in by_distance.pop(n):
                if distance[each] == n:
                    for source in before.get(each, ()):
                        if n + 1 < distance[source]:
                            distance[source] = n + 1
                            by_distance.setdefault(n + 1, []).append(source)
        self._known |= distance
