"""Distances in a machine: the least number of tokens from a state to an end, eos not counted.

The bytes of one way to an end are an upper bound, if each of them is a token by itself. If the bound does not decide, a
search reads tokens. In a state that many bytes may follow, as inside a string, it reads *descents* alone: bytes that
make the bound smaller. So it misses detours there: a long token may lead to an end by more bytes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable

import numpy as np

from llmppl.constraints.constraint import Bools, Ints
from llmppl.constraints.machine.machine import Machine, State
from llmppl.constraints.vocabulary.trie import Trie
from llmppl.constraints.vocabulary.trie_walk import MemoGraph, walk_state
from llmppl.support.graphs import Memo

MAX_KEPT = 1 << 14  # states whose distances are kept
MAX_READ = 100  # hypotheses of all states that a search reads
MAX_NARROW = 16  # bytes that follow a state, all of which a search reads


class Nearer(MemoGraph):
    """Graph of the states of a machine, where the search reads them."""

    room = 1 << 14

    def __init__(self, machine: Machine, alone: Bools) -> None:
        super().__init__(machine)
        self._alone = alone

    def row(self, number: int) -> Ints:
        """Return the numbers of the next states: (256,)."""
        if self.table.item(number, 0) < 0:
            state: State = self.states[number]
            own = state.bytes_left(self._alone)
            row = np.zeros(256, np.int32)
            moves = self.recognizer.moves_by_table(state)
            is_wide = own < math.inf and sum(bytes.size for bytes, _ in moves) > MAX_NARROW
            for bytes, after in moves:
                if not is_wide or after.bytes_left(self._alone) < own:
                    row[bytes] = self.number(after)
            self.table[number] = row
        found: Ints = self.table[number]
        return found

    def fill(self, number: int, bytes: Ints, /) -> None:
        self.row(number)

    def renewed(self, room: float) -> Nearer:
        if len(self.states) <= room:
            return self
        return Nearer(self.recognizer, self._alone)


class Distances:
    """Distances in a machine over a vocabulary. `specials_after(state)` are the states after special tokens."""

    def __init__(self, machine: Machine, trie: Trie, specials_after: Callable[[State], Iterable[State]]) -> None:
        self._trie = trie
        self._specials_after = specials_after
        self.alone = np.zeros(256, bool)
        self.alone[trie.alone] = True
        self._graph = Nearer(machine, self.alone)
        self._next: Memo[State, tuple[State, ...]] = Memo(self._find_next, MAX_KEPT)
        self._least: dict[State, float] = {}  # lower bounds

    def near(self, states: set[State], most: float) -> set[State]:
        """Return those states from which at most so many tokens lead to an end, as far as searches tell."""
        return {state for state in states if self.is_within(state, most)}

    def is_within(self, state: State, most: float) -> bool:
        """Return True if at most so many tokens lead from a state to an end, as far as a search can tell.

        With `most` infinite, it is False only if no tokens lead there.
        """
        if most == math.inf:
            return self.has_end(state)
        return state.ends_within(self.alone, most) or self._search(state, most, True) <= most

    def of(self, state: State, most: float) -> float:
        """Return the distance of a state, inf if it is more than `most`. If a search gives up, it is the bound."""
        found = self._search(state, most, False)
        if found == math.inf:
            bound = state.bytes_left(self.alone)
            return bound if bound <= most else math.inf
        return found

    def has_end(self, state: State) -> bool:
        """Return True if tokens lead from a state to an end, or a search gives up."""
        is_bounded = state.bytes_left(self.alone) < math.inf
        if is_bounded or self._search(state, sys.maxsize, True) < math.inf:
            return True
        return self._least[state] < math.inf

    def _search(self, start: State, most: float, is_enough: bool) -> float:
        """Return the least number of tokens to an end; inf if it is more than `most`, or the search gives up.

        With `is_enough`, the result may be any number of tokens up to `most`.
        """
        if self._least.get(start, 0) > most:
            return math.inf
        level = [start]
        seen = {start}
        depth: float = 0
        num_read = 0
        while level:
            if any(state.accepts for state in level):
                return depth
            if is_enough and any(state.ends_within(self.alone, most - depth) for state in level):
                return most
            num_read += sum(len(state.hypotheses) for state in level)
            if depth >= most or num_read > MAX_READ:
                break
            level = self._after_level(level, seen)
            depth += 1
        if len(self._least) > MAX_KEPT:
            self._least.clear()
        if num_read > MAX_READ:
            depth = sys.maxsize
        self._least[start] = depth + 1 if level else math.inf
        return math.inf

    def _after_level(self, level: list[State], seen: set[State]) -> list[State]:
        """Return the unseen states one token after a level, and add them to `seen`, until these are too many."""
        found = list[State]()
        for state in level:
            for after in self._next[state]:
                if after not in seen:
                    seen.add(after)
                    found.append(after)
            if len(seen) > MAX_READ:
                break
        return found

    def _find_next(self, state: State) -> tuple[State, ...]:
        """Return the states after one token in the graph, and after special tokens."""
        self._graph = self._graph.renewed(self._graph.room)
        graph = self._graph
        ends = walk_state(graph, self._trie, graph.number(state))[1]
        found = [graph.states[end] for end in np.unique(ends).tolist()]
        return (*found, *self._specials_after(state))
