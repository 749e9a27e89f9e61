"""Pairs: two machines side by side, for the texts of both.

A pair of live states may have no common text. A search looks for a common end, with the states first that seem nearest
to one. It visits at most `MAX_SEARCHED` states. If it finds none among all states that follow, the pair is dead; if it
gives up, the pair counts as live. Answers do not depend on those before.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from llmppl.constraints.constraint import Bools, Ints
from llmppl.constraints.machine.machine import (
    DONE,
    Continuation,
    Exit,
    Hypothesis,
    Item,
    Machine,
    Resume,
    State,
)
from llmppl.constraints.machine.units import StateUnit, TokenUnit

MAX_SEARCHED = 400  # states that a search visits
MAX_KEPT = 1 << 16  # results that are kept
ALL_BYTES = np.ones(256, bool)
Place = tuple[State, State]


class Pair:
    """Recognizer of the texts of two machines. `start` is None if they have no common text."""

    def __init__(self, first: Machine, second: Machine, is_opaque: bool) -> None:
        self.first = first
        self.second = second
        self._is_opaque = is_opaque
        self._live = dict[Place, bool]()
        self._left = dict[tuple[Place, bytes], float]()
        self.start: Place | None = None
        if first.start is not None and second.start is not None:
            self.start = self._if_live((first.start, second.start))

    def step(self, state: Place, byte: int) -> Place | None:
        one = self.first.step(state[0], byte)
        other = self.second.step(state[1], byte) if one else None
        return self._if_live((one, other)) if one and other else None

    def step_by_table(self, state: Place, byte: int) -> Place | None:
        """Return the state after one more byte by the tables of the units, which may remember less than their steps."""
        after = self._after(state, byte)
        return None if after is None else self._if_live(after)

    def steps_by_specials(self, state: Place) -> dict[str | int, Place]:
        """Return the special tokens that both machines may read, with the live states after them."""
        found = dict[str | int, Place]()
        for special, after in self._after_specials(state):
            if self._if_live(after) is not None:
                found[special] = after
        return found

    def accepts(self, state: Place) -> bool:
        return state[0].accepts and state[1].accepts

    def bytes_left(self, state: Place, alone: Bools) -> float:
        """Return the bytes of one way to a common end; inf if none is known."""
        if self._is_opaque:
            return math.inf
        if len(self._left) > MAX_KEPT:
            self._left.clear()
        key = state, alone.tobytes()
        found = self._left.get(key)
        if found is None:
            way, is_dead = self._search(state, alone, self.accepts)
            found = len(way) - 1 if way and not is_dead else math.inf
            self._left[key] = found
        return found

    # ---- implementation

    def _after(self, state: Place, byte: int) -> Place | None:
        one = self.first.step_by_table(state[0], byte)
        other = self.second.step_by_table(state[1], byte) if one else None
        return (one, other) if one and other else None

    def _if_live(self, state: Place) -> Place | None:
        """Return the state, None if it is known to have no end."""
        if self._is_opaque:
            return state
        if len(self._live) > MAX_KEPT:
            self._live.clear()
        if state not in self._live:
            way, is_dead = self._search(state, ALL_BYTES, self._is_known)
            for place in way or [state]:
                self._live[place] = not is_dead
        return state if self._live[state] else None

    def _is_known(self, state: Place) -> bool:
        """Return True if a text may end in a state, or the state is known as live."""
        return self.accepts(state) or self._live.get(state, False)

    def _search(
        self, start: Place, alone: Bools, is_goal: Callable[[Place], bool]
    ) -> tuple[list[Place], bool]:
        """Return the states on a way to a goal, none if the search gives up; or all states and True if none is one."""
        order = itertools.count()
        todo = [(0.0, 0, next(order), start)]  # seeming length, -depth, order, state
        came_from: dict[Place, Place | None] = {start: None}
        num_visited = 0
        while todo:
            _, depth, _, state = heapq.heappop(todo)
            if is_goal(state):
                way = list[Place]()
                place: Place | None = state
                while place is not None:
                    way.append(place)
                    place = came_from[place]
                return way, False
            num_visited += 1
            if num_visited > MAX_SEARCHED:
                return [], False
            for after in self._all_after(state, alone):
                if after not in came_from:
                    came_from[after] = state
                    seems = max(each.bytes_left(alone) for each in after)
                    length = 1 - depth + min(seems, MAX_SEARCHED)
                    heapq.heappush(todo, (length, depth - 1, next(order), after))
        return list(came_from), True

    def _all_after(self, state: Place, alone: Bools) -> Iterator[Place]:
        """Yield the states after a byte of each class, and after special tokens."""
        for byte in self._bytes(state, alone):
            after = self._after(state, byte)
            if after is not None:
                yield after
        for _, after in self._after_specials(state):
            yield after

    def _after_specials(self, state: Place) -> Iterator[tuple[str | int, Place]]:
        ours = self.first.steps_by_specials(state[0])
        theirs = self.second.steps_by_specials(state[1]) if ours else {}
        for special, one in ours.items():
            other = theirs.get(special)
            if other is not None:
                yield special, (one, other)

    def _bytes(self, state: Place, alone: Bools) -> list[int]:
        """Return one byte of each class of bytes that neither machine tells apart, and both read."""
        rows = []
        reads = alone
        for each in state:
            of_machine = np.zeros((max(1, len(each.hypotheses)), 256), np.int32)
            for i, (unit, number, _) in enumerate(each.hypotheses):
                of_machine[i] = unit.row(number)
            reads = reads & of_machine.any(0)
            rows.append(of_machine)
        bytes = np.flatnonzero(reads)
        columns = np.concatenate(rows)[:, bytes]
        _, first = np.unique(columns, axis=1, return_index=True)
        found: list[int] = bytes[np.sort(first)].tolist()
        return found


class PairUnit(StateUnit):
    """Unit of a pair. Its table has the steps by the tables of both machines."""

    recognizer: Pair

    def new_row(self, state: Place) -> int:
        for each in state:
            for hypothesis in each.hypotheses:
                self.doubtful = self.doubtful or hypothesis.unit.doubtful
        return -1

    def fill(self, number: int, bytes: Ints, /) -> None:
        state = self.states[number]
        for byte in np.unique(bytes).tolist():
            after = self.recognizer.step_by_table(state, byte)
            target = 0 if after is None else self.number(after)
            self.table[number, byte] = target

    def exits_at(self, number: int) -> tuple[Exit, ...]:
        exits: list[Exit] = [*super().exits_at(number)]
        for special, after in self.recognizer.steps_by_specials(self.states[number]).items():
            exits.append((TokenUnit(special), self.number(after)))
        return tuple(exits)

    def follow(self, label: Exit, after: Continuation) -> list[Item]:
        if label is DONE:
            return [after]
        special: Any = label
        unit, number = special
        return [Hypothesis(unit, unit.begin, after.before(Resume, self, number))]

    def step(self, number: int, byte: int) -> int:
        after = self.recognizer.step(self.states[number], byte)
        return 0 if after is None else self.number(after)

    def bytes_left(self, number: int, after: Continuation, alone: Bools) -> float:
        left: float = self.recognizer.bytes_left(self.states[number], alone)
        return left + after.bytes_left(alone)
