"""Operations on tables of deterministic automata: lists of strings, products, trimming, minimisation.

A table is an (S, 256) int32 array of next states; 0 is the dead one. Neighbouring bytes mostly lead to the same state,
so the operations work on *runs* of bytes. They spend a budget on states and runs before they make them.

Source: Moore (1956), "Gedanken-experiments on sequential machines", for minimisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmppl.constraints.automata.budget import MAX_PARTS, Budget, TooLarge
from llmppl.constraints.constraint import Bools, Ints, TabledRecognizer
from llmppl.support.graphs import Numbering, reachable

T = TypeVar("T")
Table = NDArray[np.int32]
Arrays = tuple[Table, Bools, int]       # next states, accepting, start
Edge = tuple[int, int, int]                         # bytes lo..hi lead to a target
CHUNK = 1024                                        # states processed at once
_THESE = "the language of these strings"
_FEWER = "fewer or shorter strings would work"


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
        next_a = _rows(left, a)                         # (F, 256)
        next_b = _rows(right, b)                        # (F, 256)
        alive = ((next_b > 0) | alone[0]) & ((next_a > 0) | alone[1])
        both = ((next_a << 32 | next_b) * alive).ravel()
        begin = np.flatnonzero(np.append(True, both[1:] != both[:-1]))
        distinct, where = np.unique(both[begin], return_inverse=True)
        before = len(pairs)
        into = np.array([numbers[pair] for pair in distinct.tolist()], np.int32)[where]
        budget.spend(states=len(pairs) - before, steps=len(begin))
        rows.append(np.repeat(into, np.diff(begin, append=both.size)).reshape(-1, 256))
    a, b = _split(pairs)
    return np.concatenate(rows), accept(left.accepting[a], right.accepting[b]), int(len(pairs) > 1)


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
        if found and found[-1][1] == lo - 1 and found[-1][2] == target:
            found[-1] = (found[-1][0], hi, target)
        else:
            found.append((lo, hi, target))
    return found


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
    alive = set(reachable(ends, _arrows(target, source, len(table)))) - {0}
    kept = [0]
    if start in alive:
        kept += [state for state in reachable([start], _arrows(source, target, len(table))) if state in alive]
    if kept == list(range(len(table))):
        return table, accepting, start
    number = np.zeros(len(table), np.int32)
    number[kept] = np.arange(len(kept))
    return number[table[kept]], accepting[kept], int(number[start])


def _arrows(source: Ints, target: Ints, size: int) -> Callable[[int], list[int]]:
    """Return the function from a source to its targets."""
    targets = target[np.argsort(source, kind="stable")]
    begin = [0, *np.cumsum(np.bincount(source, minlength=size)).tolist()]
    return lambda state: targets[begin[state] : begin[state + 1]].tolist()


def merging(
    rows: list[list[Edge]], accepting: Bools, budget: Budget
) -> tuple[Table, list[int]]:
    """Return the numbers of the states after those that no text distinguishes are merged, and a state of each number.

    State i has the edges rows[i]; state 0 is dead, and keeps its number. Numbers follow the first states.

    Moore's refinement splits a class where the rows of its states lead to different classes. Only predecessors of
    states that changed class are examined again.
    """
    before: list[set[int]] = [set() for _ in rows]
    for state, row in enumerate(rows):
        for _, _, t in row:
            before[t].add(state)
    classes = accepting.astype(int).tolist()
    members = [{s for s in range(1, len(rows)) if classes[s] == c} for c in (0, 1)]
    signatures: list[Signature] = [()] * len(rows)
    unsettled = set(range(1, len(rows)))
    while unsettled:
        parts: dict[int, dict[Signature, set[int]]] = {classes[state]: {} for state in unsettled}
        for state in unsettled:
            budget.spend(steps=2 * len(rows[state]))
            signatures[state] = tuple(joined((lo, hi, classes[t]) for lo, hi, t in rows[state]))
            parts[classes[state]].setdefault(signatures[state], set()).add(state)
        changed: list[int] = []
        for c, split in parts.items():
            for part in _leaving(members[c], split, signatures, unsettled):
                members[c] -= part
                for state in part:
                    classes[state] = len(members)
                members.append(part)
                changed += part
        unsettled = set().union(*(before[state] for state in changed))
    kept = [0, *sorted(min(part) for part in members if part)]
    number = np.zeros(len(members), np.int32)
    number[[classes[state] for state in kept[1:]]] = np.arange(1, len(kept))
    return np.append(np.int32(0), number[classes[1:]]), kept


Signature = tuple[Edge, ...]


def _leaving(
    members: set[int], split: dict[Signature, set[int]], signatures: list[Signature], unsettled: set[int]
) -> list[set[int]]:
    """Return the parts of a class that get a new number: all but the settled one, or all but the largest.

    Settled states agree, since their successors have not changed class.
    """
    if len(members) > sum(map(len, split.values())):
        split.pop(next(signatures[state] for state in members if state not in unsettled), None)
    else:
        del split[max(split, key=lambda signature: len(split[signature]))]
    return list(split.values())


# ---- lists of strings


def automaton_of(words: Iterable[str]) -> Arrays:
    """Return the table of exactly these strings, with equal ends shared; every state leads to the end."""
    rows, ends = trie_of(map(str.encode, words))
    if not ends:
        return np.zeros((1, 256), np.int32), np.zeros(1, bool), 0
    final = set(ends)
    number = [0] * len(rows)
    distinct = Numbering[tuple[bool, tuple[tuple[int, int], ...]]]()
    for state in range(len(rows) - 1, 0, -1):       # a state has a lower number than its successors
        number[state] = 1 + distinct[state in final, tuple([(byte, number[t]) for byte, t in rows[state].items()])]
    Budget(_THESE, _FEWER).spend(states=len(distinct))
    table = np.zeros((len(distinct) + 1, 256), np.int32)
    accepting = np.zeros(len(distinct) + 1, bool)
    accepting[1:] = [accepts for accepts, _ in distinct.keys_in_order]
    moves = [(s, byte, t) for s, (_, row) in enumerate(distinct.keys_in_order, 1) for byte, t in row]
    state_of, byte_of, target_of = np.array(moves or [(0, 0, 0)]).T
    table[state_of, byte_of] = target_of
    return table, accepting, len(distinct)


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
