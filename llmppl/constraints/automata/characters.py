"""Intersections worked out over characters, not bytes.

A language over bytes has many states inside characters: which letters of all alphabets are still possible. What decides
an intersection are the states *between* characters and the *classes* of characters that no automaton tells apart, and
both are few. So the product is made of those, and bytes come back only at the end, in an NFA whose every state can
reach the end: its rows are worked out when they are met.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmppl.constraints.automata.budget import Budget
from llmppl.constraints.automata.nfa import ACCEPT, DEAD, LEAD_BYTES, LEADS, NFA, Fragment, Ranges, merged, utf8
from llmppl.constraints.automata.operations import Automaton, joined, trimmed
from llmppl.support.graphs import Memo, Numbering, reached

__all__ = ["include_intersection"]

Piece = tuple[int, int, bytes]                      # numbers lo..hi of a character, and where they lead


def include_intersection(nfa: NFA, factors: Sequence[tuple[Automaton, bool]], budget: Budget) -> int:
    """A state of `nfa` that reads the texts that are in every factor (not in it, where its flag is False), to the end.

    DEAD if there are none. TooLarge if the budget does not suffice; nothing is then added to `nfa`.
    """
    dfas, signs = zip(*factors, strict=True)
    classes, steps = _over_characters(dfas, budget)
    numbers = Numbering([(), tuple(dfa.start for dfa in dfas)])         # 0 is dead
    rows = [[0] * len(classes)]                     # state -> class -> next state
    for state in itertools.islice(numbers.met, 1, None):                # grows
        budget.spend(states=1, steps=10 * len(classes))
        afters = zip(*(step[q] for step, q in zip(steps, state, strict=True)), strict=True)
        rows.append([numbers[after] if all(itertools.compress(after, signs)) else 0 for after in afters])
    columns = np.array(numbers.met[1:]).T           # (factors, states)
    ends = [dfa.accepting[column] == inside for column, (dfa, inside) in zip(columns, factors, strict=True)]
    accepting = np.append(False, np.logical_and.reduce(ends))
    table, accepting, start = trimmed(np.array(rows, np.int32), accepting, 1)
    return _include(nfa, classes, table[1:].tolist(), accepting[1:].tolist()) if start else DEAD


def _over_characters(dfas: Sequence[Automaton], budget: Budget) -> tuple[list[Ranges], list[dict[int, list[int]]]]:
    """The classes of characters, and for each automaton: state between characters -> class -> next state."""
    between = [_between(dfa, budget) for dfa in dfas]
    sizes = np.cumsum(list(map(len, between)))
    table = np.zeros((0, 256), np.int32)
    first: list[int] = []                           # where each table begins in that of all
    for dfa in dfas:
        first.append(len(table))
        table = np.concatenate([table, np.where(dfa.table > 0, dfa.table + len(table), 0)])
    everywhere = np.concatenate([np.array(some, np.int64) + at for some, at in zip(between, first, strict=True)])
    ranges: dict[bytes, list[tuple[int, int]]] = {}
    known: dict[tuple[int, bytes], list[Piece]] = {}

    def pieces(vector: NDArray[np.int64], pending: int) -> list[Piece]:
        """Which numbers of `pending` bytes more lead where; a vector is where each state has come to."""
        if not pending:
            return [(0, 0, vector.tobytes())]
        key = pending, vector.tobytes()
        if key not in known:
            budget.spend(steps=16 * len(vector))
            shift = 6 * (pending - 1)
            known[key] = joined(
                ((byte << shift) + lo, (byte << shift) + hi, end)
                for byte in range(64)
                for lo, hi, end in pieces(table[vector, 0x80 + byte], pending - 1)
            )
        return known[key]

    for low, high, pending in LEADS:
        shift = 6 * pending
        for number in range(low >> shift, (high >> shift) + 1):
            for lo, hi, key in pieces(table[everywhere, LEAD_BYTES[pending][0] + number], pending):
                lo, hi = max(low, (number << shift) + lo), min(high, (number << shift) + hi)
                if lo <= hi:
                    ranges.setdefault(key, []).append((lo, hi))
    ends = np.array([np.frombuffer(key, np.int32) for key in ranges])           # (C, states of all)
    steps: list[dict[int, list[int]]] = []
    for some, at, columns in zip(between, first, np.split(ends, sizes[:-1], axis=1), strict=True):
        after = np.where(columns > 0, columns - at, 0).T.tolist()
        steps.append({0: [0] * len(ends)} | dict(zip(some, after, strict=True)))
    return list(map(merged, ranges.values())), steps


def _between(dfa: Automaton, budget: Budget) -> list[int]:
    """The states between characters, the dead one left out."""


    def after(state: int) -> list[int]:
        budget.spend(steps=50)
        ends = np.zeros(0, np.int32)
        for lo, hi in reversed(LEAD_BYTES):
            ends = np.union1d(dfa.table[ends, 0x80:0xC0], dfa.table[state, lo : hi + 1])
        return ends.tolist()

    return [state for state in reached([dfa.start], after) if state]


def _include(nfa: NFA, classes: list[Ranges], rows: list[list[int]], accepting: list[bool]) -> int:
    """The state that begins these rows, as bytes; their targets count from 1, and 0 is dead."""

    def fragment(some: tuple[int, ...]) -> Fragment:
        return utf8(merged(itertools.chain(*(classes[c] for c in some))))

    fragments = Memo(fragment)
    entries = [nfa.add(()) for _ in rows]
    for entry, row, accepts in zip(entries, rows, accepting, strict=True):
        by: dict[int, list[int]] = {0: []}
        for c, after in enumerate(row):
            by.setdefault(after, []).append(c)
        reads = [(fragments[tuple(some)], entries[after - 1]) for after, some in by.items() if after]
        nfa.defer(entry, reads, (ACCEPT,) * accepts)
    return entries[0]
