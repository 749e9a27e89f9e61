"""Walks of a vocabulary's trie in parallel with an automaton: the nodes that fit, and the state at each of them.

A walk reads the common prefix of several tokens once, and skips the subtree of a byte that the automaton rejects. C
reads node by node (`llmppl.constraints.vocabulary.native_walk`). In numpy, all walks go down together, one level of the
trie after the other, and follow only the nodes that fit.

An automaton is a *graph*: rows of next states by number, computed when a walk first needs them.

Source: Willard & Louf (2023), "Efficient Guided Generation for Large Language Models", Algorithm 3, run once for all
tokens instead of once for each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from llmppl.constraints.constraint import Bools, Ints, State, TabledRecognizer
from llmppl.constraints.vocabulary.native_walk import ROOT, Found, beside_of, native_trie
from llmppl.constraints.vocabulary.slices import Slice, slices_of
from llmppl.constraints.vocabulary.trie import Ids, Trie, ranges

CHUNK = 1 << 18  # entries of the whole index worked on at once
FEW = 64  # nodes that are read one by one
Triple = tuple[int, int, int]  # walk, place and state of a node


class Graph(Protocol):
    """Automaton as a walk reads it.

    Where `ready[number]`, `table[number, byte]` is the number of the next state: 0 if there is none, negative if it is
    unknown. Row 0 is zeros.
    """

    @property
    def table(self) -> Ids: ...  # (S, 256)
    @property
    def ready(self) -> Bools: ...  # (S,)
    def fill(self, number: int, bytes: Ints, /) -> None:
        """Compute the next states for some bytes. This may replace the arrays by longer ones."""


class TableGraph:
    """Graph of a tabled recognizer; its states are their own numbers."""

    has_exits: Bools | None = None
    room = math.inf  # states to keep
    has_zero = False  # 0 is never a live state

    def __init__(self, recognizer: TabledRecognizer) -> None:
        self.recognizer = recognizer
        self.row = recognizer.row

    @property
    def table(self) -> Ids:
        return self.recognizer.table

    @property
    def ready(self) -> Bools:
        return self.recognizer.ready

    def checked(self, state: State) -> State:
        """Return `state`; raise a ValueError if it cannot be a state of the recognizer."""
        if isinstance(state, (int, np.integer)) and 0 < state < len(self.ready):
            return int(state)
        raise ValueError(
            f"{state!r} is not a state of this index, whose states are integers from 1 up and END"
        )

    number = checked

    def state(self, number: int) -> State:
        return number

    def next_bytes(self, state: State) -> bytes:
        return bytes(np.flatnonzero(self.recognizer.row(state)).tolist())

    def fill(self, number: int, bytes: Ints, /) -> None:
        self.recognizer.row(number)

    def renewed(self, room: float) -> TableGraph:
        return self


class MemoGraph:
    """Graph of any other recognizer: numbers states as they occur, and remembers steps."""

    has_exits: npt.NDArray[np.uint8] | None = None  # by state: 1 if it has some, 2 if not known
    room = 1 << 16
    has_zero = True

    def __init__(self, recognizer: Any) -> None:
        self.recognizer = recognizer
        self.states: list[State] = [None]  # 0 is the dead state
        self.ids: dict[State, int] = {None: 0}
        self.table = np.full((64, 256), -1, np.int32)
        self.table[0] = 0
        self.ready = np.ones(64, bool)

    def checked(self, state: State) -> State:
        return state

    def number(self, state: State) -> int:
        found = self.ids.get(state)
        if found is None:
            found = len(self.states)
            if found == len(self.table):
                self.ready = np.ones(2 * found, bool)
                self.table = np.concatenate([self.table, np.full_like(self.table, -1)])
            self.table[found] = self.new_row(
                state
            )  # before the state is known: an interrupt leaves no half of it
            self.states.append(state)
            self.ids[state] = found
        return found

    def new_row(self, state: State) -> Ints | int:
        """Return the entries of a new state, (256,) or one for all; -1 is not known yet."""
        return -1

    def state(self, number: int) -> State:
        return self.states[number]

    def next_bytes(self, state: State) -> bytes:
        return bytes(byte for byte in range(256) if self.recognizer.step(state, byte) is not None)

    def fill(self, number: int, bytes: Ints, /) -> None:
        bytes = np.unique(bytes[self.table[number, bytes] < 0])
        state = self.states[number]
        step = self.recognizer.step
        targets = [step(state, byte) for byte in bytes.tolist()]
        known = list(map(self.number, targets))  # this may replace the table
        self.table[number, bytes] = known

    def renewed(self, room: float) -> MemoGraph:
        """Return the graph itself, or an empty one if it has more than `room` states."""
        return self if len(self.states) <= room else type(self)(self.recognizer)


class Walk(NamedTuple):
    """Tokens that fit several states, and the states they lead to. Those of start i begin at `begin[i]`.

    Those of one start are in the order of their bytes.
    """

    begin: Ints  # (m + 1,)
    ids: Ids  # (k,)
    states: Ids  # (k,)


def walk(graph: Graph, trie: Trie, starts: Ints) -> Walk:
    """Read the tokens of a trie from several states."""
    in_c = native_trie(trie)
    beside = beside_of(graph)
    if in_c is not None and beside is not None:
        parts = [in_c.tokens(beside, start)[:2] for start in starts.tolist()]
        number = [ids.size for ids, _ in parts]
        ids, states = map(np.concatenate, zip(*parts, strict=True))
        return Walk(np.append(0, np.cumsum(number)), ids, states)
    rows, places, now = map(
        np.concatenate, zip(*_levels(graph, trie, np.full(starts.size, -1), starts), strict=True)
    )
    nodes = trie.nodes[places]
    order = np.argsort(rows * len(trie) + nodes)
    begin = np.append(0, np.cumsum(np.bincount(rows, minlength=starts.size)))
    ids, states, begin = trie.tokens_at(nodes[order], now[order], begin)
    return Walk(begin, ids, states)


def _levels(
    graph: Graph,
    trie: Trie,
    roots: Ints,
    starts: Ints,
    known: Slice | None = None,
) -> Iterator[tuple[Ints, Ints, Ids]]:
    """Yield the nodes of each level below some nodes that fit: the walk, the place and the state of each.

    If a slice is known, nodes with tokens of the slice alone are passed over.
    """
    is_other = None if known is None else known.is_other
    places = trie.place[roots]
    states = starts.astype(np.int32)
    rows: Ints = np.arange(starts.size)
    while True:
        if trie.num_children[places].sum() <= FEW:
            found, num_read = _read_few(graph, trie, rows, places, states, is_other)
            yield _columns(found[places.size :])
            if num_read == len(found):
                return
            rows, places, states = _columns(found[num_read:])
        size = trie.num_children[places]
        places = ranges(trie.first_child[places], size)
        states = states.repeat(size)
        rows = rows.repeat(size)
        if is_other is not None:
            others = is_other[places].nonzero()[0]
            rows, places, states = rows[others], places[others], states[others]
        after = steps(graph, states, trie.bytes[places])
        alive = after.nonzero()[0]
        rows, places, states = rows[alive], places[alive], after[alive]
        yield rows, places, states


def _read_few(
    graph: Graph,
    trie: Trie,
    rows: Ints,
    places: Ints,
    states: Ints,
    is_other: Bools | None,
) -> tuple[list[Triple], int]:
    """Return some nodes and those below them that fit, and the number of nodes whose children were read.

    A loop reads a few nodes faster than numpy. It stops where they are many.
    """
    bytes = trie.bytes.data
    first = trie.first_child.data
    num_children = trie.num_children.data
    found = list(zip(rows.tolist(), places.tolist(), states.tolist(), strict=True))
    num_read = 0
    for row, place, state in found:  # grows
        size = num_children[place]
        if size + len(found) - num_read > FEW:
            break
        num_read += 1
        for child in range(first[place], first[place] + size):
            if is_other is None or is_other[child]:
                byte = bytes[child]
                after = graph.table.item(state, byte)
                if after < 0 or not graph.ready[state]:
                    graph.fill(state, np.array([byte]))
                    after = graph.table.item(state, byte)
                if after:
                    found.append((row, child, after))
    return found, num_read


def _columns(triples: list[Triple]) -> tuple[Ints, Ints, Ids]:
    rows, places, states = np.array(triples, np.int64).reshape(-1, 3).T
    return rows, places, states.astype(np.int32)


def read_tokens(
    graph: Any, trie: Trie, start: int, roots: Ids = ROOT, *, with_exits: bool = False
) -> Found:
    """Read the tokens below some nodes from a state. With exits, `graph.exits` has the labels of a state."""
    in_c = native_trie(trie)
    beside = beside_of(graph)
    if in_c is not None and beside is not None:
        return in_c.tokens(beside, start, roots, with_exits=with_exits)
    return _read_levels(graph, trie, start, roots, None, with_exits)


def read_mask(
    graph: Any,
    trie: Trie,
    start: int,
    plain: float | None = None,
    *,
    with_exits: bool = False,
) -> tuple[Bools, Ids | None, Found]:
    """Return the mask of the tokens that fit a state, (V,) bool, their ids if they are few, and the exits.

    `plain` is the number of plain bytes, whichever, that may follow, None if it is not known.
    """
    in_c = native_trie(trie)
    beside = beside_of(graph)
    if in_c is not None and beside is not None:
        return in_c.mask(beside, start, plain, with_exits=with_exits)
    known = slices_of(trie).plain(plain or 0)
    found = _read_levels(graph, trie, start, ROOT, known, with_exits)
    if known is None:
        mask = np.zeros(len(trie.tokens), bool)
        mask[found.ids] = True
        return mask, found.ids, found
    mask = known.mask.copy()
    mask[found.ids] = True
    return mask, None, found


def _read_levels(
    graph: Any, trie: Trie, start: int, roots: Ids, known: Slice | None, with_exits: bool
) -> Found:
    levels = _levels(graph, trie, roots, np.full(len(roots), start), known)
    _, places, states = map(np.concatenate, zip(*levels, strict=True))
    ids, ends, _ = trie.tokens_at(trie.nodes[places], states, places[:0])
    if not with_exits:
        return Found(ids, ends, ids[:0], ids[:0])
    inner = (trie.num_children[places] > 0).nonzero()[0]
    some = [state for state in np.unique(states[inner]).tolist() if graph.exits[state]]
    exits = inner[np.isin(states[inner], some)]
    nodes = trie.nodes[places[exits]].astype(np.int32)
    return Found(ids, ends, nodes, states[exits])


def walk_state(graph: Graph, trie: Trie, number: int) -> tuple[Ids, Ids]:
    """Return the ids of the tokens that fit a state, and the numbers of the states they lead to."""
    return read_tokens(graph, trie, number)[:2]


def steps(graph: Graph, states: Ints, bytes: Ints) -> Ids:
    """Return the entries of a graph for some states and bytes."""
    keys = states << 8
    keys += bytes
    while True:
        table = graph.table
        ready = graph.ready
        after = table.ravel().take(keys)
        if ready.take(states).all() and after.min(initial=0) >= 0:
            return after
        unknown = keys[(after < 0) | ~ready.take(states)]
        unknown.sort()
        numbers = unknown >> 8
        cuts = (numbers[1:] != numbers[:-1]).nonzero()[0] + 1
        for a, b in itertools.pairwise([0, *cuts.tolist(), unknown.size]):
            graph.fill(int(numbers[a]), unknown[a:b] & 0xFF)
