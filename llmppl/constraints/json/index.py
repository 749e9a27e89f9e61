"""Masks of the texts of a JSON schema, and distances to their end.

Configurations that no token can tell apart have one mask: `Texts.plain` maps them to one. It forgets the names that an
object has used, so a token that holds a whole name, at its start or after a comma, is read once more from the
configuration itself.

A distance is the least number of tokens to the end along *closing* moves: they complete the value that is read and add
what its schema still needs. The sum of the distances of single frames is an upper bound and mostly sufficient.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from llmppl.constraints.constraint import Bools, Ints, State, VocabularyLike
from llmppl.constraints.json.frames import Local
from llmppl.constraints.json.texts import END, Config, Texts
from llmppl.constraints.masks.index import TokenIndex
from llmppl.constraints.masks.mask_store import PackedMask
from llmppl.constraints.masks.self_loops import Key, Loops, key_of
from llmppl.constraints.vocabulary.trie import Trie
from llmppl.constraints.vocabulary.trie_walk import MemoGraph, walk_state
from llmppl.support.locks import Lock, locked

__all__ = ["JsonIndex"]

MAX_KEPT = 1 << 17                                  # distances that are kept
NAME = re.compile(rb'(?:^|,)[ \t\n\r]*"(?:[^"\\]|\\.)*"', re.DOTALL)


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
            found = self.recognizer.moves(self.states[number], self._is_closing)
            moves = [(lo, hi, self.number(state)) for lo, hi, state in found]
            row = np.zeros(256, np.int32)           # after numbering, which may replace the table
            for lo, hi, after in moves:
                row[lo : hi + 1] = after
            self.table[number] = row
        row = self.table[number]
        return row

    def fill(self, number: int, bytes: Ints, /) -> None:
        self.row(number)

    def next_bytes(self, state: State) -> bytes:
        return bytes(np.flatnonzero(self.row(self.number(state))).tolist())

    def loop(self, number: int) -> Key | None:
        """Return the self-loop key (`masks.self_loops.key_of`) of a state with one local state."""
        items = self.states[number].items
        if len(items) != 1:
            return None
        if items[0][0] not in self._keys:
            self._keys[items[0][0]] = key_of(self.row, number)
        return self._keys[items[0][0]]

    def renewed(self, room: float) -> ConfigGraph:
        return self if len(self.states) <= room else ConfigGraph(self.recognizer, self._is_closing)


class JsonIndex(TokenIndex):
    """Index of a JSON schema over a vocabulary."""

    def __init__(self, constraint: Any, texts: Texts, vocab: VocabularyLike) -> None:
        self.constraint = constraint
        super().__init__(texts, vocab)

    def __reduce__(self) -> Any:
        return _index_of, (self.constraint, self.vocab)

    @property
    def name(self) -> str:
        return repr(self.constraint)

    def _begin(self) -> None:
        self.reach = max(map(len, self.trie.tokens), default=1) + 1
        self._with_names = _with_names(self.trie)
        self._distances = Distances(self._lock)
        self.graph = ConfigGraph(self.recognizer)
        self._loops = Loops(self.graph, self.trie)

    def _renew(self) -> None:
        if len(self.graph.states) > self.graph.room:
            self.graph = ConfigGraph(self.recognizer)
            self._loops = Loops(self.graph, self.trie)

    def _work_out(self, state: Config, accepts: bool) -> PackedMask:
        plain = self.recognizer.plain(state, self.reach)
        found = self._masks.get(plain)
        if found is None:
            self._renew()
            graph, number = self.graph, self.graph.number(plain)
            mask = self._loops.mask(number, lambda other: self.mask(graph.state(other)))
            found = self.store.of_ids(walk_state(graph, self.trie, number)[0], accepts) if mask is None \
                else self.store.of_mask(mask, accepts)
            self._masks[plain] = found
        return self._without_repeats(state, found) if self._with_names else found

    def _without_repeats(self, state: Config, found: PackedMask) -> PackedMask:
        """Return the mask without tokens that hold a whole name which the object already has."""
        mask = self.store.unpack(found)
        wrong = [token for token in self._with_names if mask[token] and self._read_token(state, self.trie.tokens[token]) is None]
        if not wrong:
            return found
        mask = mask.copy()
        mask[wrong] = False
        return self.store.of_mask(mask, bool(mask[self._eos].any()))

    def walk(self, state: Config) -> tuple[npt.NDArray[np.int32], Ints]:
        """Return the tokens that fit a state, and the numbers of the states they lead to, as far as counts matter."""
        self._renew()
        ids, ends = walk_state(self.graph, self.trie, self.graph.number(self.recognizer.plain(state, self.reach)))
        if self._with_names:
            mask = self.mask(state)
            ids, ends = ids[mask[ids]], ends[mask[ids]]
        return ids, ends


def _index_of(constraint: Any, vocab: VocabularyLike) -> JsonIndex:
    return constraint.index(vocab)  # type: ignore[no-any-return]


def _with_names(trie: Trie) -> list[int]:
    """Return the tokens that hold a whole name, at their start or after a comma."""
    found = trie.loops.get("names")
    if found is None:
        found = trie.loops["names"] = [i for i, token in enumerate(trie.tokens) if NAME.search(token)]
    return found  # type: ignore[no-any-return]


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
        if config not in self._known:
            if len(self._known) > MAX_KEPT:
                self._known.clear()
            self._solve(index, config)
        return self._known[config]

    def _solve(self, index: Any, config: Config) -> None:
        """Find the distances of all configurations that closing moves lead to."""
        if self._graph is None or len(self._graph.states) > self._graph.room:
            self._graph = ConfigGraph(index.recognizer, is_closing=True)
        graph, count = self._graph, itertools.count()
        before: dict[Config, list[Config]] = {config: []}           # the configurations one token before
        distance: dict[Config, float] = {}
        heap: list[tuple[float, int, Config]] = []
        order = [config]
        for each in order:                          # grows
            known = 0 if each.accepts else self._known.get(each, math.inf)
            if known < math.inf:
                heapq.heappush(heap, (known, next(count), each))
                continue
            _, ends = walk_state(graph, index.trie, graph.number(each))
            for number in np.unique(ends).tolist():
                after = graph.states[number]
                if after not in before:
                    before[after] = []
                    order.append(after)
                before[after].append(each)
        while heap:
            n, _, each = heapq.heappop(heap)
            if each not in distance:
                distance[each] = n
                for source in before[each]:
                    heapq.heappush(heap, (n + 1, next(count), source))
        self._known |= dict.fromkeys(order, math.inf) | distance
