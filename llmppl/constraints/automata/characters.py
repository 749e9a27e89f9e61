"""Intersections of automata, computed over characters instead of bytes.

An automaton over bytes has many states inside characters: they record which letters are still possible. An
intersection depends only on the states *between* characters and on the *classes* of characters that no automaton
distinguishes. Both are few, so the product is built from them. The result is an NFA over bytes in which every state can
reach the end, and whose rows are computed on demand.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmppl.constraints.automata.budget import Budget
from llmppl.constraints.automata.nfa import ACCEPT, DEAD, LEAD_BYTES, LEADS, NFA, Fragment, Ranges, merged, utf8
from llmppl.constraints.automata.operations import Automaton, joined, trimmed
from llmppl.support.graphs import Memo, Numbering, reachable

__all__ = ["include_intersection"]

Piece = tuple[int, int, bytes]                      # code point bits lo..hi, and the states (as bytes) they lead to


def include_intersection(nfa: NFA, factors: Sequence[tuple[Automaton, bool]], budget: Budget) -> int:
    """Add a state to `nfa` that reads the texts in all `factors`, up to the end of the text.

    Parameters
    ----------
    factors : sequence of (automaton, bool)
        False stands for the complement of the automaton.

    Returns
    -------
    int
        DEAD if the intersection is empty.

    Raises
    ------
    TooLarge
        The budget does not suffice. Nothing is then added to `nfa`.
    """
    dfas, signs = zip(*factors, strict=True)
    classes, steps = _over_characters(dfas, budget)
    numbers = Numbering([(), tuple(dfa.start for dfa in dfas)])         # 0 is dead
    rows = [[0] * len(classes)]                     # state -> class -> next state
    for state in itertools.islice(numbers.keys_in_order, 1, None):                # grows
        budget.spend(states=1, steps=10 * len(classes))
        targets = zip(*(step[q] for step, q in zip(steps, state, strict=True)), strict=True)
        rows.append([numbers[target] if all(itertools.compress(target, signs)) else 0 for target in targets])
    columns = np.array(numbers.keys_in_order[1:]).T           # (factors, states)
    ends = [dfa.accepting[column] == inside for column, (dfa, inside) in zip(columns, factors, strict=True)]
    accepting = np.append(False, np.logical_and.reduce(ends))
    table, accepting, start = trimmed(np.array(rows, np.int32), accepting, 1)
    return _include(nfa, classes, table[1:].tolist(), accepting[1:].tolist()) if start else DEAD


def _over_characters(dfas: Sequence[Automaton], budget: Budget) -> tuple[list[Ranges], list[dict[int, list[int]]]]:
    """Return the classes of characters, and for each automaton: state between characters -> class -> next state."""
    between = [_between(dfa, budget) for dfa in dfas]
    sizes = np.cumsum(list(map(len, between)))
    table = np.zeros((0, 256), np.int32)
    offsets: list[int] = []                         # of each automaton's rows in `table`
    for dfa in dfas:
        offsets.append(len(table))
        table = np.concatenate([table, np.where(dfa.table > 0, dfa.table + len(table), 0)])
    everywhere = np.concatenate([np.array(some, np.int64) + at for some, at in zip(between, offsets, strict=True)])
    ranges: dict[bytes, list[tuple[int, int]]] = {}
    known: dict[tuple[int, bytes], list[Piece]] = {}

    def pieces(vector: NDArray[np.int64], pending: int) -> list[Piece]:
        """Return the ranges that `pending` more bytes encode, each with the states after them, from states `vector`."""
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
    for states, at, columns in zip(between, offsets, np.split(ends, sizes[:-1], axis=1), strict=True):
        targets = np.where(columns > 0, columns - at, 0).T.tolist()
        steps.append({0: [0] * len(ends)} | dict(zip(states, targets, strict=True)))
    return list(map(merged, ranges.values())), steps


def _between(dfa: Automaton, budget: Budget) -> list[int]:
    """Return the states between characters, without the dead state."""

    def after(state: int) -> list[int]:
        budget.spend(steps=50)
        ends = np.zeros(0, np.int32)
        for lo, hi in reversed(LEAD_BYTES):
            ends = np.union1d(dfa.table[ends, 0x80:0xC0], dfa.table[state, lo : hi + 1])
        return ends.tolist()

    return [state for state in reachable([dfa.start], after) if state]


def _include(nfa: NFA, classes: list[Ranges], rows: list[list[int]], accepting: list[bool]) -> int:
    """Add `rows` over classes to `nfa` as states over bytes, and return the first. Targets count from 1; 0 is dead."""

    def fragment(some: tuple[int, ...]) -> Fragment:
        return utf8(merged(itertools.chain(*(classes[c] for c in some))))

    fragments = Memo(fragment)
    entries = [nfa.add(()) for _ in rows]
    for entry, row, accepts in zip(entries, rows, accepting, strict=True):
        classes_to: dict[int, list[int]] = {}
        for c, target in enumerate(row):
            classes_to.setdefault(target, []).append(c)
        classes_to.pop(0, None)
        reads = [(fragments[tuple(some)], entries[target - 1]) for target, some in classes_to.items()]
        nfa.defer(entry, reads, (ACCEPT,) * accepts)
    return entries[0]
