"""Distances in a machine: the least number of tokens from a state to an end, eos not counted.

The bytes of one way to an end are an upper bound, if each of them is a token by itself. Where
bounds do not decide, one search goes on from all undecided states, level by level. It gives up when
it has met many hypotheses, so that results depend on the states alone. Then a search by *descents*
alone follows: by tokens that make the bound smaller.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from llmppl.constraints.constraint import Bools
from llmppl.constraints.machine.machine import State
from llmppl.support.graphs import Memo

MAX_KEPT = 1 << 14  # states whose next states are kept
MAX_MET = 4_000  # hypotheses that a search meets
Origins = dict[State, set[State]]  # states, and where they come from


class Found(NamedTuple):
    """Result of a search: the number of tokens from states to an end, and where it gave up."""

    depths: dict[State, float]
    open: set[State]


class Distances:
    """Distances in a machine over a vocabulary.

    `reached(state, is_over)` yields states after one token on the way to every end; with `is_over`,
    only those that may be ends. `alone` are the bytes that are tokens by themselves.
    """

    def __init__(self, reached: Callable[[State, bool], Iterable[State]], alone: Bools) -> None:
        self._alone = alone
        self._next: Memo[State, tuple[State, ...]] = Memo(
            lambda state: tuple(dict.fromkeys(reached(state, False))), MAX_KEPT
        )
        self._ends_next: Memo[State, bool] = Memo(
            lambda state: any(each.accepts for each in reached(state, True)), MAX_KEPT
        )

    def near(self, states: set[State], most: float) -> set[State]:
        """Return those states from which searches find an end after at most so many tokens.

        If `most` is infinite, the states where a search gives up count as near.
        """
        found = self._search(states, most, self._next.__getitem__, has_bounds=True)
        if most == math.inf:
            return found.open.union(found.depths)
        more = self._search(found.open, most, self._descents, has_bounds=True)
        return {*found.depths, *more.depths}

    def of(self, start: State, most: float) -> float:
        """Return the least number of tokens to an end; inf above `most`.

        If a search gives up, the result is the least number by descents, or else the bytes of one
        way.
        """
        found = self._search({start}, most, self._next.__getitem__, has_bounds=False)
        if found.open:
            found = self._search({start}, most, self._descents, has_bounds=False)
        if start in found.depths:
            return found.depths[start]
        bound = start.bytes_left(self._alone)
        return bound if bound <= most else math.inf

    def _descents(self, state: State) -> Iterable[State]:
        """Return the states after one token that are nearer to an end in bytes."""
        left = state.bytes_left(self._alone)
        if left == math.inf:
            return ()
        return [each for each in self._next[state] if each.ends_within(self._alone, left - 1)]

    def _search(
        self,
        states: set[State],
        most: float,
        after: Callable[[State], Iterable[State]],
        *,
        has_bounds: bool,
    ) -> Found:
        """Search for ends after at most so many tokens. With `has_bounds`, bounds decide first."""
        depths = dict[State, float]()
        level: Origins = {state: {state} for state in states}
        seen = defaultdict[State, set[State]](set)
        depth = 0
        num_met = 0
        while level and depth <= most:
            for state, origins in level.items():
                seen[state] |= origins
                if state.accepts or (has_bounds and state.ends_within(self._alone, most - depth)):
                    depths.update(dict.fromkeys(origins - depths.keys(), depth))
            depth += 1
            if depth > most:
                break
            for state, origins in undecided(level, depths).items():
                if not origins <= depths.keys() and self._ends_next[state]:
                    depths.update(dict.fromkeys(origins - depths.keys(), depth))
            if depth == most:
                break
            level = undecided(level, depths)
            below = defaultdict[State, set[State]](set)
            for state, origins in level.items():
                for each in after(state):
                    if each not in below:
                        num_met += len(each.hypotheses)
                    below[each] |= origins
                if num_met > MAX_MET:
                    return Found(depths, set().union(*level.values()))
            level = undecided(
                {state: origins - seen[state] for state, origins in below.items()}, depths
            )
        return Found(depths, set())


def undecided(level: Origins, found: dict[State, float]) -> Origins:
    """Return the states that come from one that is not found yet."""
    return {state: origins for state, origins in level.items() if not origins <= found.keys()}
