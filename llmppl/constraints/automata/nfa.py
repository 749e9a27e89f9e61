"""Ordered automata over bytes, built from fragments and guards.

A *fragment* is a set of code points as a small graph over UTF-8 bytes. An `NFA` consists of fragments and of epsilon
edges in the order in which `re` would try them. *Guards* on its states are conditions on the text before (`Behind`) or
on the text to come (`Ahead`).

Source: Thompson (1968), "Regular expression search algorithm".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llmppl.constraints.automata.budget import MAX_PARTS, Budget
from llmppl.constraints.automata.operations import Edge, clipped, joined
from llmppl.constraints.constraint import TabledRecognizer
from llmppl.constraints.vocabulary.trie import Ids, ranges
from llmppl.support.graphs import Memo, Numbering

MAX_CODE_POINT = 0x10FFFF
DEAD = -1  # stands for a state from which nothing is accepted
ACCEPT = 0  # NFA state: the text is matched
FOUND = 1  # NFA state: a lookahead is satisfied

Ranges = tuple[tuple[int, int], ...]  # sorted, disjoint, inclusive
Body = Callable[[int], int]  # the state that follows -> the state that enters
Fragment = tuple[
    tuple[Edge, ...], ...
]  # node -> edges; target -1 leaves the fragment; node 0 is the entry
LEADS = (  # code points by the bytes after the first; no surrogates
    (0x0, 0x7F, 0),
    (0x80, 0x7FF, 1),
    (0x800, 0xD7FF, 2),
    (0xE000, 0xFFFF, 2),
    (0x10000, MAX_CODE_POINT, 3),
)
LEAD_BYTES = (
    (0x00, 0x7F),
    (0xC0, 0xDF),
    (0xE0, 0xEF),
    (0xF0, 0xF7),
)  # by the number of bytes after them


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the same code points as sorted, disjoint ranges that do not touch."""
    out: list[tuple[int, int]] = []
    for lo, hi in sorted(ranges):
        if out and lo <= out[-1][1] + 1:
            first, last = out[-1]
            out[-1] = (first, max(last, hi))
        else:
            out.append((lo, hi))
    return tuple(out)


@lru_cache(4096)
def utf8(ranges: Ranges) -> Fragment:
    """Return the UTF-8 encodings of a set of code points, as a minimal acyclic graph over bytes; () if it is empty.

    `ranges` are as `merged` returns them. Surrogates are ignored.
    """
    nodes: Numbering[tuple[Edge, ...]] = Numbering([()])

    def folded(edges: list[Edge]) -> list[Edge]:
        """Return edges over numbers // 64 that lead to nodes which read the byte of the remainder."""
        blocks: list[
            tuple[int, int, list[Edge]]
        ] = []  # first and last quotient, and their common edges
        for lo, hi, target in edges:
            first = lo >> 6
            last = hi >> 6
            tail = 0x80 | hi & 63
            head = 0x80 | lo & 63, 0xBF if first < last else tail, target
            if blocks and blocks[-1][1] == first:
                blocks[-1][2].append(head)
            else:
                blocks.append((first, first, [head]))
            if last > first + 1:
                blocks.append((first + 1, last - 1, [(0x80, 0xBF, target)]))
            if last > first:
                blocks.append((last, last, [(0x80, tail, target)]))
        return joined((first, last, nodes[tuple(row)]) for first, last, row in blocks)

    root = []
    whole = [(lo, hi, -1) for lo, hi in ranges]
    for low, high, pending in LEADS:
        edges = clipped(whole, low, high)
        for _ in range(pending):
            edges = folded(edges)
        least, _ = LEAD_BYTES[pending]
        for lo, hi, target in edges:
            root.append((least + lo, least + hi, target))
    if not root:
        return ()
    return (tuple(root), *nodes.keys_in_order[1:])


ANY = utf8(((0, MAX_CODE_POINT),))  # one character


class Behind(NamedTuple):
    """Guard: the text read so far is (is not, unless `positive`) in the language of `tracker`."""

    tracker: TabledRecognizer
    positive: bool


class Ahead(NamedTuple):
    """Guard: some prefix (no prefix, unless `positive`) of the text to come leads from `entry` to FOUND."""

    entry: int
    positive: bool


class EdgeArrays(NamedTuple):
    """Edges of an NFA: state q has the edges begin[q], ..., begin[q + 1] - 1."""

    begin: Ids
    low: npt.NDArray[np.uint8]
    high: npt.NDArray[np.uint8]
    to: Ids


def begins(rows: Collection[Sized]) -> Ids:
    """Return where each row begins if all stand in one array, and the end of the last one."""
    found = np.zeros(len(rows) + 1, np.int32)
    sizes = np.fromiter(map(len, rows), np.int32, len(rows))
    np.cumsum(sizes, out=found[1:])
    return found


class NFA:
    """An ordered automaton with epsilon edges, built from its end: every method takes the state that comes next.

    `epsilon[q]` are the states that q becomes without reading, first choice first. `edges(q)` are the bytes it reads.
    `guards[q]`, if present, must hold for q to become its epsilon target. ACCEPT ends a match, `start` begins one
    (DEAD if nothing matches). A state that would lead to DEAD only is never built, so every state can reach the end if
    its guards allow it. The `budget` limits it and the deterministic automaton made from it.
    """

    def __init__(self, budget: Budget | None = None) -> None:
        self.budget = budget or Budget("the automaton")
        self.start = DEAD
        self.epsilon: list[tuple[int, ...]] = [(), ()]
        self.guards: dict[int, Behind | Ahead] = {}
        self._rows: list[tuple[Edge, ...]] = [(), ()]
        self._base: list[int] = [0, 0]  # of the fragment a state belongs to
        self._follow: list[int] = [DEAD, DEAD]  # where its target -1 leads
        self._closures = Memo(self.unread)
        self._deferred: dict[int, tuple[list[tuple[Fragment, int]], tuple[int, ...]]] = {}
        self._made = Memo(self._read_once)  # states that several states defer are built once

    def __len__(self) -> int:
        return len(self.epsilon)

    def read(self, fragment: Fragment, follow: int) -> int:
        """Return a state that reads one path of `fragment` and becomes `follow`."""
        if not fragment or follow == DEAD:
            return DEAD
        base = len(self.epsilon)
        size = len(fragment)
        self.reserve(size)
        self._rows += fragment
        self._base += [base] * size
        self._follow += [follow] * size
        self.epsilon += [()] * size
        return base

    def split(self, choices: Iterable[int]) -> int:
        """Return a state that becomes each of `choices`, in order of preference."""
        alive = dict.fromkeys(choices)
        alive.pop(DEAD, None)
        if len(alive) > 1:
            return self.add(tuple(alive))
        return next(iter(alive), DEAD)

    def plus(self, body: Body, follow: int, greedy: bool = True) -> int:
        """Return a state that reads `body` once or more and becomes `follow`."""
        if follow == DEAD:
            return DEAD
        again = self.add(())
        entry = body(again)
        if entry == DEAD:
            return DEAD
        if not greedy:
            self.epsilon[again] = (follow, entry)
            return entry
        choices = self.unread(entry)
        if again in choices and self.guards.keys().isdisjoint(choices):
            # An iteration that reads nothing is the last: `re` continues after the loop before it tries other choices.
            order = [follow if state == again else state for state in choices]
            self.epsilon[again] = tuple(dict.fromkeys([*order, follow]))
        else:
            self.epsilon[again] = (entry, follow)
        return entry

    def star(self, body: Body, follow: int, greedy: bool = True) -> int:
        """Return a state that reads `body` any number of times and becomes `follow`.

        It is built as x+ or nothing, so that (|a)* prefers to stop at once, as in `re`.
        """
        entry = self.plus(body, follow, greedy)
        return self.optional(entry, follow, greedy)

    def optional(self, entry: int, follow: int, greedy: bool = True) -> int:
        """Return a state that becomes `entry` or `follow`, and prefers `follow` if not greedy."""
        return self.split((entry, follow) if greedy else (follow, entry))

    def anything(self, follow: int) -> int:
        """Return a state that reads any text and becomes `follow`."""
        return self.star(lambda again: self.read(ANY, again), follow)

    def guard(self, condition: Behind | Ahead, follow: int) -> int:
        """Return a state that becomes `follow` where `condition` holds."""
        never = isinstance(condition, Ahead) and condition.entry == DEAD
        if never and not condition.positive:
            return follow
        if never or follow == DEAD:
            return DEAD
        state = self.add((follow,))
        self.guards[state] = condition
        return state

    def graph(
        self, rows: Sequence[Sequence[Edge]], exits: Mapping[int, int]
    ) -> tuple[int, list[int]]:
        """Add an automaton: its state i >= 1 reads `rows[i]`, and may become `exits[i]` instead.

        Returns (first, entries): its state i without the exit is state `first + i`; with the exit, `entries[i]`.
        """
        first = len(self.epsilon) - 1
        size = len(rows)
        entries = [DEAD, *range(first + 1, first + size)]
        for rank, i in enumerate(exits):
            entries[i] = first + size + rank
        fragment = []
        for row in rows[1:]:
            fragment.append(
                tuple([(lo, hi, entries[target] - first - 1) for lo, hi, target in row])
            )
        self.read(tuple(fragment), ACCEPT)
        for i, follow in exits.items():
            self.add((first + i, follow) if rows[i] else (follow,))
        return first, entries

    def include(self, dfa: Any, follow: int) -> int:
        """Return a state that reads a string of `dfa` and becomes `follow`; reading on is preferred to stopping."""
        start: int = dfa.start
        if not start or follow == DEAD:
            return DEAD
        rows = dfa.edges()
        ends = np.flatnonzero(dfa.accepting).tolist()
        _, entries = self.graph(rows, dict.fromkeys(ends, follow))
        return entries[start]

    def add(self, choices: tuple[int, ...]) -> int:
        """Add a state that becomes exactly `choices`, which the caller may still change in `epsilon`."""
        self.reserve(1)
        self.epsilon.append(choices)
        self._rows.append(())
        self._base.append(0)
        self._follow.append(DEAD)
        return len(self.epsilon) - 1

    def defer(self, state: int, reads: list[tuple[Fragment, int]], others: tuple[int, ...]) -> None:
        """Let `state` read each fragment and become its partner, or become the `others`; built on demand by `closure`.

        A caller that reads `epsilon` directly must `settle` first.
        """
        self.epsilon[state] = (state,)  # until then
        self._deferred[state] = reads, others

    @property
    def has_deferred(self) -> bool:
        """True if a part is not built yet."""
        return bool(self._deferred)

    def settle(self) -> None:
        """Build everything that was deferred."""
        for state in list(self._deferred):
            self._choices(state)

    def _choices(self, state: int) -> tuple[int, ...]:
        if state in self._deferred:
            reads, others = self._deferred[state]
            built = [self._made[read] for read in reads]
            self.epsilon[state] = (*built, *others)
            del self._deferred[state]
        return self.epsilon[state]

    def _read_once(self, read: tuple[Fragment, int]) -> int:
        return self.read(*read)

    def reserve(self, size: int) -> None:
        """Check that there is room for `size` more states. Raises TooLarge."""
        if len(self.epsilon) + size > MAX_PARTS:
            raise self.budget.refusal(f"more than {MAX_PARTS:,} states")

    def edges(self, state: int) -> list[Edge]:
        """Return (lo, hi, target) for the bytes that `state` reads, ascending and disjoint."""
        base = self._base[state]
        follow = self._follow[state]
        return [
            (lo, hi, base + target if target >= 0 else follow)
            for lo, hi, target in self._rows[state]
        ]

    def edge_arrays(self) -> EdgeArrays:
        """Return all edges as arrays."""
        keys = list(map(id, self._rows))
        rows = dict(zip(keys, self._rows, strict=True))  # copies of a fragment share theirs
        place = {key: number for number, key in enumerate(rows)}
        which = np.fromiter(map(place.__getitem__, keys), np.int64, len(keys))
        flat = chain.from_iterable(chain.from_iterable(rows.values()))
        numbers = np.fromiter(flat, np.int32).reshape(-1, 3)
        first = begins(rows.values())
        size = np.diff(first)[which]
        low, high, target = numbers[ranges(first[which], size)].T
        base = np.array(self._base, np.int32).repeat(size)
        follow = np.array(self._follow, np.int32).repeat(size)
        to = np.where(target < 0, follow, base + target)
        low = low.astype(np.uint8)
        high = high.astype(np.uint8)
        return EdgeArrays(begins(self._rows), low, high, to)

    def closure(self, state: int) -> tuple[int, ...]:
        """Return the states that `state` becomes without reading, most preferred first.

        They read bytes, or are ACCEPT, or have a guard, which stops the search because it depends on the text.
        """
        if not self.epsilon[state] and state not in self.guards:
            return (state,)
        return self._closures[state]

    def unread(self, state: int) -> tuple[int, ...]:
        """Return the same states as `closure`, computed anew, also while an epsilon edge may still be added."""
        seen = set()
        stack = [state]
        order = []
        while stack:
            q = stack.pop()
            if q in seen:
                continue
            seen.add(q)
            if not self.epsilon[q] or q in self.guards:
                order.append(q)
            else:
                stack += reversed(self._choices(q))
        self.budget.spend(steps=2 * len(seen))
        return tuple(order)
