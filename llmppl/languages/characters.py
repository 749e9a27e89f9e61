"""Intersections worked out over characters, not bytes.

A language over bytes has many states inside characters: which letters of all alphabets are still possible. What decides
an intersection are the states *between* characters and the *classes* of characters that no automaton tells apart, and
both are few. So the product is made of those, and bytes come back only at the end, in an NFA whose every state can
reach the end: its rows are worked out when they are met.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmppl.languages.limits import MAX_NFA_STATES, Budget
from llmppl.languages.nfa import ACCEPT, DEAD, LEAD_BYTE, LEADS, NFA, Ranges, merged, utf8
from llmppl.languages.operations import trimmed

__all__ = ["Explored", "include_intersection"]

Ints = NDArray[np.int32]
Piece = tuple[int, int, bytes]                      # numbers lo..hi of a character, and where they lead


class Explored(Protocol):
    """A deterministic automaton whose rows are all worked out."""

    @property
    def start(self) -> int: ...
    @property
    def table(self) -> Ints: ...
    @property
    def accepting(self) -> NDArray[np.bool_]: ...


def include_intersection(nfa: NFA, factors: Sequence[tuple[Explored, bool]], budget: Budget) -> int:
    """A state of `nfa` that reads the texts that are in every factor (not in it, where its flag is False), to the end.

    DEAD if there are none. TooLarge if the budget does not suffice; nothing is then added to `nfa`.
    """
    classes, steps = _over_characters([dfa for dfa, _ in factors], budget)
    signs = [inside for _, inside in factors]
    states = [tuple(dfa.start for dfa, _ in factors)]
    numbers = {states[0]: 1}
    rows = [[0] * len(classes)]                     # state -> class -> next state; 0 is dead
    for state in states:                            # grows
        budget.spend(states=1, steps=10 * len(classes))
        rows.append([])
        for after in zip(*(step[q] for step, q in zip(steps, state, strict=True)), strict=True):
            alive = all(q or not inside for q, inside in zip(after, signs, strict=True))
            number = numbers.setdefault(after, len(states) + 1) if alive else 0
            if number > len(states):
                states.append(after)
            rows[-1].append(number)
    columns = np.array(states).T                    # (factors, states)
    ends = [dfa.accepting[column] == inside for column, (dfa, inside) in zip(columns, factors, strict=True)]
    accepting = np.append(False, np.logical_and.reduce(ends))
    table, accepting, start = trimmed(np.array(rows, np.int32), accepting, 1)
    return _include(nfa, classes, table[1:].tolist(), accepting[1:].tolist(), budget) if start else DEAD


def _over_characters(dfas: Sequence[Explored], budget: Budget) -> tuple[list[Ranges], list[dict[int, list[int]]]]:
    """The classes of characters, and for each automaton: state between characters -> class -> next state."""
    between = [_between(dfa, budget) for dfa in dfas]
    sizes = np.cumsum([0, *map(len, between)])
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
            known[key] = _joined(
                (byte << 6 * (pending - 1), piece)
                for byte in range(64)
                for piece in pieces(table[vector, 0x80 + byte], pending - 1)
            )
        return known[key]

    for low, high, pending in LEADS:
        shift = 6 * pending
        for number in range(low >> shift, (high >> shift) + 1):
            for lo, hi, key in pieces(table[everywhere, LEAD_BYTE[pending] + number], pending):
                lo, hi = max(low, (number << shift) + lo), min(high, (number << shift) + hi)
                if lo <= hi:
                    ranges.setdefault(key, []).append((lo, hi))
    ends = [np.frombuffer(key, np.int32) for key in ranges]
    steps: list[dict[int, list[int]]] = []
    for i, some in enumerate(between):
        columns = np.array([end[sizes[i] : sizes[i + 1]] for end in ends])      # (C, states)
        after = np.where(columns > 0, columns - first[i], 0).T.tolist()
        steps.append({0: [0] * len(ends)} | dict(zip(some, after, strict=True)))
    return [merged(some) for some in ranges.values()], steps


def _joined(found: Iterable[tuple[int, Piece]]) -> list[Piece]:
    """The pieces of all bytes, neighbours of one class as one."""
    out: list[Piece] = []
    for offset, (lo, hi, key) in found:
        if out and out[-1][2] == key and out[-1][1] == offset + lo - 1:
            out[-1] = (out[-1][0], offset + hi, key)
        else:
            out.append((offset + lo, offset + hi, key))
    return out


def _between(dfa: Explored, budget: Budget) -> list[int]:
    """The states between characters, the dead one left out."""
    seen, todo = {dfa.start}, [dfa.start]
    for state in todo:                              # grows
        budget.spend(steps=50)
        found = set()
        at = np.array([state])
        for lo, hi, pending in ((0x00, 0x7F, 0), (0xC0, 0xDF, 1), (0xE0, 0xEF, 2), (0xF0, 0xF7, 3)):
            after = np.unique(dfa.table[at, lo : hi + 1])
            for _ in range(pending):
                after = np.unique(dfa.table[after, 0x80:0xC0])
            found.update(after.tolist())
        new = found - seen - {0}
        seen |= new
        todo += sorted(new)
    return todo if dfa.start else []


def _include(nfa: NFA, classes: list[Ranges], rows: list[list[int]], accepting: list[bool], budget: Budget) -> int:
    """The state that begins these rows, as bytes; their targets count from 1, and 0 is dead."""
    moves = []
    for row in rows:
        by: dict[int, list[int]] = {}
        for c, after in enumerate(row):
            by.setdefault(after, []).append(c)
        by.pop(0, None)
        moves.append([(tuple(some), after) for after, some in by.items()])
    distinct = {some for move in moves for some, _ in move}
    fragment = {some: utf8(merged(pair for c in some for pair in classes[c])) for some in distinct}
    size = sum(1 + sum(len(fragment[some]) for some, _ in move) for move in moves)
    if len(nfa) + size > MAX_NFA_STATES:
        raise budget.refusal(f"more than {MAX_NFA_STATES:,} states")
    entries = [nfa.add(()) for _ in rows]
    for entry, move, accepts in zip(entries, moves, accepting, strict=True):
        reads = [nfa.read(fragment[some], entries[after - 1]) for some, after in move]
        nfa.epsilon[entry] = (*reads, *[ACCEPT] * accepts)
    return entries[0]
