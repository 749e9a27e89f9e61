"""Counts of the texts of an automaton by length, and the enumeration and sampling that follow from them.

Lengths are counted in characters. The counts for one length determine the counts for the next, exactly, however large.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator

import numpy as np

from llmppl.constraints.automata.lazy_dfa import Machine
from llmppl.constraints.automata.nfa import LEAD_BYTES
from llmppl.constraints.automata.operations import Edge
from llmppl.support.locks import Lock, locked

__all__ = ["Counts"]

BYTES = (*LEAD_BYTES, (0x80, 0xBF))                 # lead bytes with 0..3 bytes after them, and those bytes
REST = 4


class Counts:
    """Number of texts of each length that lead from a state of an automaton to its end."""

    def __init__(self, machine: Machine) -> None:
        self.rows, self.start, self.accepting = machine.edges(), machine.start, machine.accepting
        self._lock = Lock()
        self._arcs = [[_within(row, a, b) for row in self.rows] for a, b in BYTES]
        self._ways = [{state: _ways(row) for state, row in enumerate(arcs) if row} for arcs in self._arcs]
        self._counts = [self._inside(self.accepting.astype(int).tolist())]

    def completions(self, length: int) -> list[list[int]]:
        """Return counts[p][state], p = 0..3: the texts that finish a character by p bytes, then have `length` more."""
        if length >= len(self._counts):
            self._count_to(length)
        return self._counts[length]

    @locked
    def _count_to(self, length: int) -> None:
        while len(self._counts) <= length:
            counts = [0] * len(self.rows)
            for lead, after in enumerate(self._counts[-1]):
                self._add(lead, after, counts)
            self._counts.append(self._inside(counts))

    def _inside(self, counts: list[int]) -> list[list[int]]:
        """Return `counts` for states between characters, then those for states 1 to 3 bytes before a character ends."""
        found = [counts]
        for _ in range(3):
            found.append(self._add(REST, found[-1], [0] * len(counts)))
        return found

    def _add(self, kind: int, after: list[int], counts: list[int]) -> list[int]:
        """Add the counts of the targets of bytes of one kind to `counts`, and return it."""
        for state, choices in self._ways[kind].items():
            counts[state] += sum([number * after[t] for t, number in choices])
        return counts

    def of_bytes(self, length: int) -> int:
        """Return the number of texts of `length` bytes."""
        weights = {self.start: 1}
        for _ in range(length):
            after: dict[int, int] = {}
            for state, weight in weights.items():
                for lo, hi, t in self.rows[state]:
                    after[t] = after.get(t, 0) + weight * (hi - lo + 1)
            weights = after
        return sum(weight for state, weight in weights.items() if self.accepting[state])

    def enumerate(self) -> Iterator[str]:
        """Yield the texts, shorter ones first, and those of one length by code points."""
        for length in itertools.count():
            counts = self.completions(length)[0]
            if not any(counts):                     # then no greater length has texts either
                return
            yield from self._of_length(length) if counts[self.start] else ()

    def _of_length(self, length: int) -> Iterator[str]:
        stack = [(self.start, length, 0, b"")]
        while stack:
            state, left, pending, text = stack.pop()
            if not left and not pending:
                yield text.decode()
                continue
            for lo, hi, t, left_then, pending_then in reversed(self._continuations(state, left, pending)):
                if self.completions(left_then)[pending_then][t]:
                    stack += [(t, left_then, pending_then, text + bytes((byte,))) for byte in range(hi, lo - 1, -1)]

    def _continuations(self, state: int, left: int, pending: int) -> list[tuple[int, int, int, int, int]]:
        """Return (lo, hi, target, characters left, bytes pending) for the bytes that may be read next."""
        if pending:
            return [(lo, hi, t, left, pending - 1) for lo, hi, t in self._arcs[REST][state]]
        return [(lo, hi, t, left - 1, p) for p in range(REST) for lo, hi, t in self._arcs[p][state]]

    def sample(self, rng: np.random.Generator, max_length: int) -> str | None:
        """Draw one of the texts of at most `max_length` characters, all equally likely. None if there are none."""
        sizes = [self.completions(length)[0][self.start] for length in range(max_length + 1)]
        if not sum(sizes):
            return None
        rank, shorter = _below(rng, sum(sizes)), [0, *itertools.accumulate(sizes)]
        left = bisect.bisect_right(shorter, rank) - 1
        rank -= shorter[left]
        state, pending, text = self.start, 0, bytearray()
        while left or pending:
            for lo, hi, t, left_then, pending_then in self._continuations(state, left, pending):
                each = self.completions(left_then)[pending_then][t]
                if rank < (hi - lo + 1) * each:
                    break
                rank -= (hi - lo + 1) * each
            text.append(lo + rank // each)
            state, left, pending, rank = t, left_then, pending_then, rank % each
        return text.decode()


def _within(row: list[Edge], low: int, high: int) -> list[Edge]:
    """Return the edges of `row` for the bytes low..high."""
    return [(max(lo, low), min(hi, high), t) for lo, hi, t in row if lo <= high and hi >= low]


def _ways(row: list[Edge]) -> list[tuple[int, int]]:
    """Return (target, number of bytes that lead to it) for each target of `row`."""
    ways: dict[int, int] = {}
    for lo, hi, t in row:
        ways[t] = ways.get(t, 0) + hi - lo + 1
    return list(ways.items())


def _below(rng: np.random.Generator, bound: int) -> int:
    """Draw a whole number in [0, bound) uniformly, however large `bound` is."""
    bits = (bound - 1).bit_length()
    while True:
        draw = int.from_bytes(rng.bytes((bits + 7) // 8), "little") & ((1 << bits) - 1)
        if draw < bound:
            return draw
