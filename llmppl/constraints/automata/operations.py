"""Operations on tables of deterministic automata: lists of strings, products, trimming, minimisation.

A table is an (S, 256) int32 array of next states; 0 is the dead one. Neighbouring bytes mostly lead to the same state,
so the operations work on *runs* of bytes. They spend a budget on states and runs before they make them.

Source: Moore (1956), "Gedanken-experiments on sequential machines", for minimisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmppl.constraints.automata.budget import MAX_PARTS, Budget, TooLarge
from llmppl.constraints.constraint import Bools, Ints, TabledRecognizer
from llmppl.support.graphs import Numbering, reachable

T = TypeVar("T")
Table = NDArray[np.int32]
Edge = tuple[int, int, int]  # bytes lo..hi lead to a target
Signature = tuple[Edge, ...]  # edges of a state that lead to classes
CHUNK = 1024  # states processed at once
_THESE = "the language of these strings"
_FEWER = "fewer or shorter strings would work"


class Arrays(NamedTuple):
    """A complete automaton: the next states, the accepting states and the start."""

    table: Table
    accepting: Bools
    start: int


def product(
    left: TabledRecognizer,
    right: TabledRecognizer,
    accept: Callable[[Any, Any], Any],
    alone: tuple[bool, bool],
    budget: Budget,
) -> Arrays:
    """Run both automata in parallel: return the table of the pairs of states that the start reaches, untrimmed.

    `alone[i]`: whether a text can be in the result when only the i-th automaton is not dead. `accept` combines the
    accepting states. Rows of other states are not computed.
    """
    numbers = Numbering([0, left.start << 32 | right.start])
    pairs = numbers.keys_in_order
    rows = [np.zeros((1, 256), np.int32)]
    done = 1
    while done < len(pairs):
        a, b = _split(pairs[done : done + CHUNK])
        done += len(a)
        next_a = _rows(left, a)  # (F, 256)
        next_b = _rows(right, b)  # (F, 256)
        both = next_a << 32 | next_b
        both[(next_b == 0) & (not alone[0])] = 0
        both[(next_a == 0) & (not alone[1])] = 0
        both = both.ravel()
        is_new = both[1:] != both[:-1]
        begin = np.flatnonzero(np.append(True, is_new))
        distinct, where = np.unique(both[begin], return_inverse=True)
        before = len(pairs)
        found = [numbers[pair] for pair in distinct.tolist()]
        budget.spend(states=len(pairs) - before, steps=len(begin))
        lengths = np.diff(begin, append=both.size)
        targets = np.array(found, np.int32)[where]
        rows.append(targets.repeat(lengths).reshape(-1, 256))
    a, b = _split(pairs)
    accepting = accept(left.accepting[a], right.accepting[b])
    return Arrays(np.concatenate(rows), accepting, int(len(pairs) > 1))


def _split(pairs: list[int]) -> tuple[Ints, Ints]:
    both = np.array(pairs)
    return both >> 32, both & 0xFFFFFFFF


def _rows(machine: TabledRecognizer, states: Ints) -> Ints:
    for state in states[~machine.ready[states]].tolist():
        machine.row(state)
    return machine.table[states].astype(np.int64)


def joined(edges: Iterable[tuple[int, int, T]]) -> list[tuple[int, int, T]]:
    """Join neighbouring edges that lead to one target; `edges` ascend."""
    found: list[tuple[int, int, T]] = []
    for lo, hi, target in edges:
        if found:
            first, last, before = found[-1]
            if last == lo - 1 and before == target:
                found[-1] = (first, hi, target)
                continue
        found.append((lo, hi, target))
    return found


def clipped(edges: Iterable[Edge], low: int, high: int) -> list[Edge]:
    """Return the edges for the bytes low..high."""
    found = []
    for lo, hi, target in edges:
        if lo <= high and hi >= low:
            found.append((max(lo, low), min(hi, high), target))
    return found


def first_bytes(row: Table) -> list[int]:
    """Return the first byte of each run of bytes with one target."""
    is_new = row[1:] != row[:-1]
    changes = np.flatnonzero(is_new) + 1
    return [0, *changes.tolist()]


def runs(table: Table) -> tuple[Ints, Ints]:
    """Return the states and first bytes of all runs of bytes with one target, in order."""
    begins = np.ones(table.shape, bool)
    np.not_equal(table[:, 1:], table[:, :-1], out=begins[:, 1:])
    state, byte = np.nonzero(begins)
    return state, byte


def trimmed(table: Table, accepting: Bools, start: int) -> Arrays:
    """Return the arrays without states that the start does not reach or that reach no accepting state, start first."""
    source, byte = runs(table)
    target = table[source, byte]
    ends = np.flatnonzero(accepting).tolist()
    alive = set(reachable(ends, _arrows(target, source, len(table))))
    alive.discard(0)
    kept = [0]
    for state in reachable([start], _arrows(source, target, len(table))):
        if state in alive:
            kept.append(state)
    number = np.zeros(len(table), np.int32)
    number[kept] = np.arange(len(kept))
    table = number[table[kept]]
    return Arrays(table, accepting[kept], int(number[start]))


def _arrows(source: Ints, target: Ints, size: int) -> Callable[[int], list[int]]:
    """Return the function from a source to its targets."""
    targets = target[np.argsort(source, kind="stable")]
    sizes = np.bincount(source, minlength=size)
    begin = [0, *np.cumsum(sizes).tolist()]
    return lambda state: targets[begin[state] : begin[state + 1]].tolist()


def merging(rows: list[list[Edge]], accepting: Bools, budget: Budget) -> tuple[Table, list[int]]:
    """Return the numbers of the states after those that no text distinguishes are merged, and a state of each number.

    State i has the edges rows[i]; state 0 is dead, and keeps its number. Numbers follow the first states.

    Moore's refinement splits a class where the rows of its states lead to different classes. Only predecessors of
    states that changed class are examined again. The others of a class keep its number, or else the largest part.
    """
    before: list[set[int]] = [set() for _ in rows]
    for state, row in enumerate(rows):
        for _, _, target in row:
            before[target].add(state)
    classes = accepting.astype(int).tolist()
    members: list[set[int]] = [set(), set()]
    for state in range(1, len(rows)):
        members[classes[state]].add(state)
    found: list[Signature] = [(), ()]  # of the states that have kept the number of a class
    unsettled = set(range(1, len(rows)))
    while unsettled:
        parts: dict[int, dict[Signature, set[int]]] = {}
        for state in unsettled:
            budget.spend(steps=2 * len(rows[state]))
            edges = [(lo, hi, classes[target]) for lo, hi, target in rows[state]]
            signature = tuple(joined(edges))
            split = parts.setdefault(classes[state], {})
            split.setdefault(signature, set()).add(state)
        unsettled = set()
        for number, split in parts.items():
            num_examined = sum(map(len, split.values()))
            if len(members[number]) == num_examined:
                found[number] = max(split, key=lambda signature: len(split[signature]))
            split.pop(found[number], None)
            for signature, part in split.items():
                members[number] -= part
                for state in part:
                    classes[state] = len(members)
                    unsettled |= before[state]
                members.append(part)
                found.append(signature)
    firsts = [min(part) for part in members if part]
    kept = [0, *sorted(firsts)]
    numbers = np.zeros(len(members), np.int32)
    for number, state in enumerate(kept[1:], 1):
        numbers[classes[state]] = number
    return np.append(np.int32(0), numbers[classes[1:]]), kept


# ---- lists of strings


def automaton_of(words: Iterable[str]) -> Arrays:
    """Return the table of exactly these strings, with equal ends shared; every state leads to the end."""
    rows, ends = trie_of(map(str.encode, words))
    if not ends:
        return Arrays(np.zeros((1, 256), np.int32), np.zeros(1, bool), 0)
    final = set(ends)
    number = [0] * len(rows)
    distinct = Numbering[tuple[bool, tuple[tuple[int, int], ...]]]([(False, ())])
    for state in range(len(rows) - 1, 0, -1):  # a state has a lower number than its successors
        edges = [(byte, number[target]) for byte, target in rows[state].items()]
        number[state] = distinct[state in final, tuple(edges)]
    size = len(distinct)
    Budget(_THESE, _FEWER).spend(states=size - 1)
    table = np.zeros((size, 256), np.int32)
    accepting = np.zeros(size, bool)
    for state, (accepts, row) in enumerate(distinct.keys_in_order):
        accepting[state] = accepts
        for byte, target in row:
            table[state, byte] = target
    return Arrays(table, accepting, size - 1)


def trie_of(words: Iterable[bytes]) -> tuple[list[dict[int, int]], list[int]]:
    """Return the rows of a trie, byte -> state, and the state to which each word leads. 0 is dead, 1 the root."""
    rows: list[dict[int, int]] = [{}, {}]
    ends = []
    for word in words:
        state = 1
        for byte in word:
            row = rows[state]
            if byte in row:
                state = row[byte]
            else:
                state = row[byte] = len(rows)
                rows.append({})
        ends.append(state)
        if len(rows) > MAX_PARTS:
            raise TooLarge(_THESE, f"more than {MAX_PARTS:,} prefixes", _FEWER)
    return rows, ends
