"""Automata whose states are computed on demand: a growing table of next states.

States are small integers; 0 is the dead state. The row of a state, its 256 next states, is computed when it is first
needed. The automaton never returns a state from which nothing is accepted, so a text that avoids 0 can always be
completed. The states stand for keys that `Subsets` or `Threads` (`automata/determinise.py`) make of an `NFA`.
"""

from __future__ import annotations

import itertools
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from llmppl.constraints.automata.budget import MAX_EDGES, TooLarge
from llmppl.constraints.automata.determinise import Threads
from llmppl.constraints.automata.nfa import ACCEPT, DEAD, NFA
from llmppl.constraints.automata.operations import Edge, runs
from llmppl.support.arguments import shown
from llmppl.support.locks import Lock, locked
from llmppl.support.shared import Shared

__all__ = ["Leftmost", "Machine"]


class Machine(Shared):
    """Deterministic automaton that numbers its states in the order of their discovery; 0 is the dead state.

    Each new state spends the budget of the NFA (TooLarge).
    """

    def __init__(self, source: Any) -> None:
        self._source, self._budget, self._lock = source, source.nfa.budget, Lock()
        self._keys: list[Any] = [None]
        self._numbers: dict[Any, int] = {}
        self._table = np.zeros((16, 256), np.int32)
        self._ready = np.zeros(16, bool)
        self._ready[0] = True
        self._accepting = np.zeros(16, bool)
        self.start = self._add(source.start)

    def _fix(self, table: NDArray[np.int32], accepting: NDArray[np.bool_], start: int) -> None:
        """Set the complete arrays of an automaton, so that nothing remains to be computed."""
        self._source, self._keys, self._numbers = None, [None] * len(table), {}
        self._table, self._accepting, self._ready = table, accepting, np.ones(len(table), bool)
        self.start, self._lock = start, Lock()

    @property
    def table(self) -> NDArray[np.int32]:
        """(S, 256) int32 ndarray, for the S known states: `table[state, byte]` is the next state if `ready[state]`."""
        return self._table[: len(self._keys)]

    @property
    def ready(self) -> NDArray[np.bool_]:
        """(S,) bool ndarray: True where the row of `table` is computed."""
        return self._ready[: len(self._keys)]

    @property
    def accepting(self) -> NDArray[np.bool_]:
        """(S,) bool ndarray: True for accepting states."""
        return self._accepting[: len(self._keys)]

    def accepts(self, state: int) -> bool:
        """Return whether a text that leads to `state` is in the language."""
        return bool(self._accepting[state])

    def _add(self, key: Any) -> int:
        """Number a new key, and return its number."""
        self._budget.spend(states=1)
        number = len(self._keys)
        if number == len(self._ready):
            self._accepting, self._table = _doubled(self._accepting), _doubled(self._table)
            self._ready = _doubled(self._ready)
        self._accepting[number] = self._source.accepts(key)
        self._keys.append(key)
        self._numbers[key] = number
        return number

    @property
    def num_states(self) -> int:
        """Number of known states, without the dead one; after `explore`, of all states."""
        return len(self._keys) - 1

    def explore(self, limit: int | None = None) -> Self:
        """Compute every row, and return the automaton. Raises TooLarge (a ValueError) above `limit` states."""
        state = 0
        while state < len(self._keys):
            if not self._ready[state]:
                self.row(state)
            if limit is not None and self.num_states > limit:
                raise TooLarge(shown(self), f"more than {limit:,} states")
            state += 1
        return self

    def edges(self) -> list[list[Edge]]:
        """Return for every state the edges (lo, hi, target) that do not lead to 0, ascending and disjoint."""
        table = self.explore()._table[: len(self._keys)]
        state, lo = runs(table)
        if len(lo) > MAX_EDGES:
            raise TooLarge(shown(self), f"more than {MAX_EDGES:,} edges", "fewer states (minimise()) would work")
        hi = np.append(lo[1:] - 1, 255)
        hi[hi < 0] = 255
        rows: list[list[Edge]] = [[] for _ in table]
        target = table[state, lo]
        for s, a, b, t in np.stack([state, lo, hi, target], axis=1)[target > 0].tolist():
            rows[s].append((a, b, t))
        return rows

    def row(self, state: int) -> NDArray[np.int32]:
        """Return the next state for every byte.

        Returns
        -------
        (256,) int32 ndarray, read-only
            0 where the text can no longer be completed.
        """
        if not self._ready[state]:
            self._work_out(state)
        view: NDArray[np.int32] = self._table[state]
        view.flags.writeable = False
        return view

    @locked
    def _work_out(self, state: int) -> None:
        if self._ready[state]:                      # by another thread
            return
        moves = self.moves(state)
        into = self._table[state]                   # after numbering, which may replace the table
        for lo, hi, number in moves:
            into[lo : hi + 1] = number
        self._ready[state] = True
        self._keys[state] = None                    # not needed again: `_numbers` has it

    @locked
    def moves(self, state: int) -> list[Edge]:
        """Return the edges (lo, hi, target) that do not lead to 0, ascending and disjoint, without storing the row."""
        if self._ready[state]:
            row = self._table[state]
            cuts = [0, *((row[1:] != row[:-1]).nonzero()[0] + 1).tolist(), 256]
            return [(lo, end - 1, target) for lo, end in itertools.pairwise(cuts) if (target := row.item(lo))]
        known = self._numbers
        return [(lo, hi, known.get(key) or self._add(key)) for lo, hi, key in self._source.moves(self._keys[state])]

    def step(self, state: int, byte: int) -> int | None:
        """Return the state after one more byte, or None if no accepted string continues so."""
        if not self._ready[state]:
            self._work_out(state)
        return self._table.item(state, byte) or None

    def after(self, state: int, data: bytes) -> int:
        """Return the state after more bytes, or 0 if no accepted string continues so."""
        for byte in data:
            state = self.step(state, byte) or 0
            if not state:
                break
        return state


class Leftmost(Machine):
    """Machine over bytes that finds the match of `re.match(pattern, text)` while it reads to the right.

    Follow `start` and `step(state, byte)` until None. After each byte, `matched(state)` tells whether a match is now
    known, which replaces every earlier one. `re` reports the last known match when the machine is dead, or
    `at_end(state)` where the text ends. Look-behind sees the text from where the machine started.
    """

    def __init__(self, nfa: NFA) -> None:
        self._matched: list[int | None] = [None]
        self._at_end: list[int | None] = [None]
        self._threads = Threads(nfa, ordered=True)
        super().__init__(self._threads)
        if nfa.start == DEAD:
            self.start = 0

    def _add(self, key: Any) -> int:
        """Number a new key, and return its number. Stores its answers for `matched` and `at_end`."""
        accepted = [thread for thread in key[0] if thread.state == ACCEPT]
        sure = (thread.since for thread in accepted if not thread.pending_lookaheads)
        held = (thread.since for thread in accepted if self._threads.holds(thread.pending_lookaheads))
        number = len(self._keys)
        self._matched[number:] = [next(sure, None)]             # overwrites the leftovers of an interrupt
        self._at_end[number:] = [next(held, None)]
        return super()._add(key)

    def __repr__(self) -> str:
        return f"Leftmost({self.num_states} states)"

    def matched(self, state: int) -> int | None:
        """Return how many bytes before `state` a newly known match ended, or None."""
        return self._matched[state]

    def at_end(self, state: int) -> int | None:
        """Return how many bytes before its end a text that ends at `state` has its match; None keeps the last match."""
        return self._at_end[state]


def _doubled(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array with as many zeros appended, which take no memory until they are written."""
    longer = np.zeros((2 * len(array), *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
