"""Characters: classes of code points, and intersections of automata computed over characters instead of bytes.

Classes are ranges of code points, computed from Python's own `re` and `str`. Properties of Unicode are those of the
package regex.

An automaton over bytes has many states inside characters: they record which letters are still possible. An
intersection depends only on the states *between* characters and on the *classes* of characters that no automaton
distinguishes. Both are few, so the product is built from them. The result is an NFA over bytes in which every state can
reach the end, and whose rows are computed on demand.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from llmppl.constraints.automata.budget import Budget
from llmppl.constraints.automata.nfa import (
    ACCEPT,
    DEAD,
    LEAD_BYTES,
    LEADS,
    MAX_CODE_POINT,
    NFA,
    Fragment,
    Ranges,
    merged,
    utf8,
)
from llmppl.constraints.automata.operations import Edge, Table, joined, merging, trimmed
from llmppl.constraints.constraint import Bools, Ints, TabledRecognizer
from llmppl.support.graphs import Memo, Numbering, reachable

op: Any = import_module("re._constants")  # of Python's own pattern parser, which has no types
regex: Any = import_module("regex")  # it has no types either


def negated(ranges: Ranges, negate: bool = True) -> Ranges:
    """Return all other code points, or `ranges` itself unless `negate`."""
    if not negate:
        return ranges
    found = []
    after = 0
    for first, last in ranges:
        if first > after:
            found.append((after, first - 1))
        after = last + 1
    if after <= MAX_CODE_POINT:
        found.append((after, MAX_CODE_POINT))
    return tuple(found)


def points(chars: Iterable[str]) -> Ranges:
    """Return the code points of some characters."""
    return merged([(ord(char), ord(char)) for char in chars])


def _characters_of(num_planes: int) -> str:
    """Return the code points of the first planes (65,536 each), with NUL for surrogates, which have no class."""
    codes = np.arange(num_planes << 16, dtype="<u4")
    codes[(codes >= 0xD800) & (codes < 0xE000)] = 0
    return codes.tobytes().decode("utf-32-le")


PLANES = {"s": 1, "d": 2, "w": 4}  # whose characters may be in a class


@cache
def category(letter: str, ascii_only: bool) -> Ranges:
    """Return the code points of `\\w`, `\\d` or `\\s`."""
    flags = re.ASCII if ascii_only else 0
    return _found(re.compile(rf"\{letter}+", flags), PLANES[letter])


def _found(pattern: Any, num_planes: int) -> Ranges:
    """Return the runs of characters that a pattern finds in the first planes."""
    text = _characters_of(num_planes)
    found = []
    for run in pattern.finditer(text):
        found.append((run.start(), run.end() - 1))
    return tuple(found)


@cache
def cased() -> str:
    """Return the characters that differ from another one by case only, which re.IGNORECASE may treat specially."""
    text = _characters_of(2)  # the others have no letters with case
    found = []
    for char in text:
        if not char == char.lower() == char.upper():
            found.append(char)
    return "".join(found)


_CATEGORY = {
    op.CATEGORY_DIGIT: "d",
    op.CATEGORY_NOT_DIGIT: "D",
    op.CATEGORY_WORD: "w",
    op.CATEGORY_NOT_WORD: "W",
    op.CATEGORY_SPACE: "s",
    op.CATEGORY_NOT_SPACE: "S",
}


@lru_cache(4096)
def characters(items: tuple[Any, ...], flags: int) -> Ranges:
    """Return the code points of a class without its negation; `flags` may hold re.IGNORECASE and re.ASCII."""
    inside: list[tuple[int, int]] = []
    text = ""
    for kind, value in items:
        if kind is op.CATEGORY:
            letter = _CATEGORY[value]
            positive = category(letter.lower(), bool(flags & op.SRE_FLAG_ASCII))
            inside += negated(positive, letter.isupper())
            text += "\\" + letter
        else:
            lo, hi = value if kind is op.RANGE else (value, value)
            inside.append((lo, hi))
            text += f"\\U{lo:08x}-\\U{hi:08x}"
    if text and flags & op.SRE_FLAG_IGNORECASE:  # `re` decides about cased characters only
        known = cased()
        matched = re.findall(f"[{text}]", known, flags)
        outside = negated(merged(inside))
        others = negated(merged([*outside, *points(known)]))
        inside = [*others, *points(matched)]
    return merged(inside)


@lru_cache(128)
def property_ranges(name: str, negate: bool, ignore_case: bool) -> Ranges:
    """Return the code points with a property of Unicode, such as "Lu", as the package regex finds them.

    Raises regex.error if the name is unknown.
    """
    flags = regex.IGNORECASE if ignore_case else 0
    return negated(_found(regex.compile(rf"\p{{{name}}}+", flags), 17), negate)


Piece = tuple[int, int, bytes]  # code point bits lo..hi, and the states (as bytes) they lead to


def include_intersection(
    nfa: NFA, factors: Sequence[tuple[TabledRecognizer, bool]], budget: Budget
) -> int:
    """Add a state to `nfa` that reads the texts in all `factors`, up to the end of the text; DEAD if there are none.

    A factor is an automaton and a bool; False stands for its complement. If the budget does not suffice (TooLarge),
    nothing is added to `nfa`.
    """
    signs = [sign for _, sign in factors]
    table, ends, starts = _stacked([dfa for dfa, _ in factors])
    between = _between(table, starts, budget)
    classes, targets = _classes(table, np.array(between, np.int64), budget)
    step = dict(zip(between, targets.T.tolist(), strict=True))
    step[0] = [0] * len(classes)
    numbers = Numbering([(), tuple(starts)])  # 0 is dead
    rows = [step[0]]  # state -> class -> next state
    for state in itertools.islice(numbers.keys_in_order, 1, None):  # grows
        budget.spend(states=1, steps=10 * len(classes))
        row = []
        for target in zip(*[step[q] for q in state], strict=True):
            is_alive = all(itertools.compress(target, signs))
            row.append(numbers[target] if is_alive else 0)
        rows.append(row)
    states = np.array(numbers.keys_in_order[1:])  # (S, factors)
    agree = ends[states] == signs
    accepting = np.append(False, agree.all(axis=1))
    table, accepting, start = trimmed(np.array(rows, np.int32), accepting, 1)
    if not start:
        return DEAD
    edges: list[list[Edge]] = []
    for row in table.tolist():
        arcs = [(c, c, target) for c, target in enumerate(row) if target]
        edges.append(arcs)
    number, kept = merging(edges, accepting, budget)
    alive = kept[1:]
    rows = number[table[alive]].tolist()
    return _include(nfa, classes, rows, accepting[alive].tolist())


def _stacked(dfas: Sequence[TabledRecognizer]) -> tuple[Table, Bools, list[int]]:
    """Return one table of all automata, with one dead state, its accepting states and the starts."""
    table = np.zeros((1, 256), np.int32)
    accepting = np.zeros(1, bool)
    starts = []
    for dfa in dfas:
        before = len(table) - 1
        rows = dfa.table[1:]
        starts.append(dfa.start and before + dfa.start)
        shifted = np.where(rows > 0, before + rows, 0)
        table = np.concatenate([table, shifted])
        accepting = np.append(accepting, dfa.accepting[1:])
    return table, accepting, starts


def _classes(table: Table, states: Ints, budget: Budget) -> tuple[list[Ranges], Table]:
    """Return the C classes of characters, and the states that each leads to: (C, len(states)) array."""
    ranges: dict[bytes, list[tuple[int, int]]] = {}
    known: dict[tuple[int, bytes], list[Piece]] = {}

    def pieces(vector: Ints, pending: int) -> list[Piece]:
        """Return the ranges that `pending` more bytes encode, each with the states after them, from states `vector`."""
        if not pending:
            return [(0, 0, vector.tobytes())]
        key = pending, vector.tobytes()
        if key not in known:
            budget.spend(steps=16 * len(vector))
            found = []
            for byte in range(64):
                first = byte << 6 * (pending - 1)
                after = table[vector, 0x80 + byte]
                for lo, hi, end in pieces(after, pending - 1):
                    found.append((first + lo, first + hi, end))
            known[key] = joined(found)
        return known[key]

    for low, high, pending in LEADS:
        shift = 6 * pending
        lead, _ = LEAD_BYTES[pending]
        for number in range(low >> shift, (high >> shift) + 1):
            first = number << shift
            after = table[states, lead + number]
            for lo, hi, key in pieces(after, pending):
                lo = max(low, first + lo)
                hi = min(high, first + hi)
                if lo <= hi:
                    ranges.setdefault(key, []).append((lo, hi))
    targets = [np.frombuffer(key, np.int32) for key in ranges]
    return list(map(merged, ranges.values())), np.array(targets)


def _between(table: Table, starts: list[int], budget: Budget) -> list[int]:
    """Return the states between characters, without the dead state."""

    def after(state: int) -> list[int]:
        budget.spend(steps=50)
        ends = np.zeros(0, np.int32)
        for lo, hi in reversed(LEAD_BYTES):
            inside = table[ends, 0x80:0xC0]
            ends = np.union1d(inside, table[state, lo : hi + 1])
        return ends.tolist()

    return [state for state in reachable(starts, after) if state]


def _include(nfa: NFA, classes: list[Ranges], rows: list[list[int]], accepting: list[bool]) -> int:
    """Add `rows` over classes to `nfa` as states over bytes, and return the first. Targets count from 1; 0 is dead."""

    def halves(some: tuple[int, ...]) -> list[Fragment]:
        """Return the characters of one byte, and the others, which more states have in common."""
        inside: list[tuple[int, int]] = []
        for number in some:
            inside += classes[number]
        others = negated(merged(inside))
        found = []
        for other_half in ((0x80, MAX_CODE_POINT), (0, 0x7F)):
            half = utf8(negated(merged([*others, other_half])))
            if half:
                found.append(half)
        return found

    fragments = Memo(halves)
    entries = [nfa.add(()) for _ in rows]
    for entry, row, accepts in zip(entries, rows, accepting, strict=True):
        classes_to: dict[int, list[int]] = {}
        for number, target in enumerate(row):
            if target:
                classes_to.setdefault(target, []).append(number)
        reads = []
        for target, some in classes_to.items():
            for half in fragments[tuple(some)]:
                reads.append((half, entries[target - 1]))
        nfa.defer(entry, reads, (ACCEPT,) if accepts else ())
    return entries[0]
