"""Ends: which states of a machine have an end within a number of tokens, by one search for all of them.

The bounds in bytes decide first. The search goes on from undecided states, level by level. Its work is counted, so that
results depend on the states alone. It suits machines with good bounds and many states, those with a grammar.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable

from llmppl.constraints.constraint import Bools
from llmppl.constraints.machine.machine import State
from llmppl.support.graphs import Memo

MAX_KEPT = 1 << 14  # states of which it is known whether a token leads to an end
MAX_VISITED = 2_000  # states that a search for the least number of tokens visits
MAX_WORK = 20_000  # of a search for ends within a number of tokens
READ = 10  # work of a state from which such a search goes on; that of another state is 1
MAX_GAP_SEARCH = 200  # states among which there must be an end, or a way to more states
Origins = dict[State, set[State]]  # states, and where they come from


class Ends:
    """Distances in a machine, as `llmppl.constraints.machine.distances.Distances`, by searches from many states.

    `reached(state, is_over)` yields states after one token on the way to every end; with `is_over`, only those that
    may be ends. `alone` are the bytes that are tokens by themselves.
    """

    def __init__(self, reached: Callable[[State, bool], Iterable[State]], alone: Bools) -> None:
        self._reached = reached
        self._alone = alone
        self._ends_next: Memo[State, bool] = Memo(
            lambda state: any(each.accepts for each in reached(state, True)), MAX_KEPT
        )

    def near(self, states: set[State], most: float) -> set[State]:
        """Return those states from which at most so many tokens lead to an end, as far as a search tells.

        If `most` is infinite, and the search gives up, all states count as near.
        """
        found = set[State]()
        level: Origins = {state: {state} for state in states}
        seen = defaultdict[State, set[State]](set)
        work = 0
        while work <= MAX_WORK:
            for state, origins in level.items():
                seen[state] |= origins
                if state.ends_within(self._alone, most):
                    found |= origins
            level = undecided(level, found)
            most -= 1
            if not level or most < 0:
                return found
            work += READ * len(level)
            if work > MAX_WORK:
                break
            for state, origins in level.items():
                if not origins <= found and self._ends_next[state]:
                    found |= origins
            if most < 1:
                return found
            after = defaultdict[State, set[State]](set)
            for state, origins in undecided(level, found).items():
                for each in self._reached(state, False):
                    after[each] |= origins
                if work + len(after) > MAX_WORK:
                    break
            work += len(after)
            level = {state: origins - seen[state] for state, origins in after.items()}
        if most == math.inf:
            return states
        return found

    def of(self, start: State, most: float) -> float:
        """Return the least number of tokens to an end; the bytes of one way if a search gives up; inf above `most`."""
        level = {start}
        seen = {start}
        depth = 0
        while level and len(seen) <= MAX_VISITED:
            if any(state.accepts for state in level):
                return depth
            depth += 1
            if depth > most:
                break
            if any(self._ends_next[state] for state in level):
                return depth
            level = self._after(level) - seen
            seen |= level
        bound = start.bytes_left(self._alone)
        if level and depth <= bound <= most:
            return bound
        return math.inf

    def has_end(self, start: State) -> bool:
        """Return True if tokens lead from a state to an end, or to many states."""
        level = {start}
        seen = {start}
        while level and len(seen) <= MAX_GAP_SEARCH:
            if any(state.ends_within(self._alone, math.inf) for state in level):
                return True
            level = self._after(level) - seen
            seen |= level
        return bool(level)

    def _after(self, level: Iterable[State]) -> set[State]:
        """Return states one token after some states, on the way to every end."""
        found = set[State]()
        for state in level:
            found.update(self._reached(state, False))
        return found


def undecided(level: Origins, found: set[State]) -> Origins:
    """Return the states that come from one that is not found yet."""
    return {state: origins for state, origins in level.items() if not origins <= found}
