"""Walks of a vocabulary's trie beside an automaton: which nodes can be reached, and in which state.

The one idea: tokens that begin alike are walked once for the bytes they share, and not at all below a byte that the
automaton does not take. The walk stands here twice, in numpy (a level of the trie after the other) and for numba (in
preorder), and both find the same. numba, the extra `fast`, is loaded when it is installed and numpy has worked so much
that loading it pays.

An automaton is a *graph*: rows of next states by number, worked out when a walk comes to them.

Source: Willard & Louf (2023), "Efficient Guided Generation for Large Language Models", Algorithm 3, made once for all
tokens in place of once for each.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from llmppl.masks.constraint import Bools, Ints, Recognizer, State, TabledRecognizer
from llmppl.masks.trie import Trie, ranges

__all__ = ["FLAG", "Graph", "MemoGraph", "TableGraph", "Walk", "use_numba", "walk", "walk_state"]

CHUNK = 1 << 18                                     # entries of the whole index worked on at once
WARM_UP = 1 << 22                                   # trie nodes that numpy visits before numba is worth its import
FLAG = 1 << 30                                      # in an entry of a table, beside the next state


class Graph(Protocol):
    """An automaton as a walk sees it.

    `table[number, byte]` is the next state where `ready[number]`: its number, 0 if there is none, negative if it is not
    known yet. An entry that has FLAG as well asks the walk to report the node above and the state there.
    """

    @property
    def table(self) -> npt.NDArray[np.int32]: ...  # (S, 256)
    @property
    def ready(self) -> Bools: ...  # (S,)
    def fill(self, number: int, bytes: Ints, /) -> None:
        """Make known where a state goes with some bytes. The arrays may be replaced by longer ones."""


class TableGraph:
    """A tabled recognizer, as the walks see it: its states are their own numbers."""

    room, has_zero = math.inf, False                # states that are kept; whether 0 can be one

    def __init__(self, recognizer: TabledRecognizer) -> None:
        self.recognizer = recognizer

    @property
    def table(self) -> npt.NDArray[np.int32]:
        return self.recognizer.table

    @property
    def ready(self) -> Bools:
        return self.recognizer.ready

    def checked(self, state: State) -> State:
        """`state`; a ValueError if it can be none of the recognizer's."""
        if isinstance(state, (int, np.integer)) and 0 < state < len(self.ready):
            return int(state)
        raise ValueError(f"{state!r} is not a state of this index, whose states are integers from 1 up and END")

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
    """Any other recognizer: its states are numbered as they are met, its steps remembered."""

    room, has_zero = 1 << 16, True

    def __init__(self, recognizer: Recognizer) -> None:
        self.recognizer = recognizer
        self.states: list[State] = [None]           # 0 is dead
        self.ids: dict[State, int] = {}
        self.table = np.full((64, 256), -1, np.int32)
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
            self.states.append(state)
            self.ids[state] = found
        return found

    def state(self, number: int) -> State:
        return self.states[number]

    def next_bytes(self, state: State) -> bytes:
        return bytes(byte for byte in range(256) if self.recognizer.step(state, byte) is not None)

    def fill(self, number: int, bytes: Ints, /) -> None:
        bytes = np.unique(bytes[self.table[number, bytes] < 0])
        state, step = self.states[number], self.recognizer.step
        targets = [step(state, byte) for byte in bytes.tolist()]
        known = [0 if target is None else self.number(target) for target in targets]     # which may replace the table
        self.table[number, bytes] = known

    def renewed(self, room: float) -> MemoGraph:
        """Itself, or an empty one where it has more states than there is room for."""
        return self if len(self.states) <= room else MemoGraph(self.recognizer)


class Walk(NamedTuple):
    """What walks from several states found, one after the other, each in preorder.

    `nodes` of the trie that end a token, `states` that the bytes on the way to them lead to, and where those of each
    walk `begin`. `flagged` are nodes above an entry with FLAG, and `flagged_states` the states there.
    """

    begin: npt.NDArray[np.int64]                    # (m + 1,)
    nodes: npt.NDArray[np.int32]                    # (k,)
    states: npt.NDArray[np.int32]                   # (k,)
    flagged: npt.NDArray[np.int32]                  # (j,)
    flagged_states: npt.NDArray[np.int32]           # (j,)


def walk(graph: Graph, trie: Trie, starts: Ints, above: Ints | None = None) -> Walk:
    """Read the tokens of a trie from several states, or what is below some of its nodes.

    Parameters
    ----------
    starts : (m,) int ndarray of state numbers
    above : (m,) int ndarray of nodes, optional
        Each walk begins below its node, in its state; the root (-1) if None.
    """
    above = np.full(starts.size, -1) if above is None else above
    return (_in_preorder if use_numba(trie) else _by_levels)(graph, trie, starts, above)


def walk_state(graph: Graph, trie: Trie, number: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The ids of the tokens that fit a state, in the order of their bytes, and the states they lead to (numbers)."""
    found = walk(graph, trie, np.array([number]))
    return trie.tokens_at(found.nodes, found.states, found.begin)[:2]


# ---- in numpy


def _by_levels(graph: Graph, trie: Trie, starts: Ints, above: Ints) -> Walk:
    """All walks together, a level of the trie after the other."""
    size, n = trie.num_children[trie.place[above]], len(trie)
    place = ranges(trie.first_child[trie.place[above]], size)
    rows, states = np.repeat(np.arange(starts.size), size), np.repeat(starts.astype(np.int64), size)
    found, flagged = [(rows[:0], place[:0], states[:0])], [(place[:0], states[:0])]
    for level in itertools.count():
        if not place.size:
            break
        trie.visited += place.size + 1000           # a level costs as much as some thousand nodes, however small
        after = _steps(graph, states, trie.bytes[place])
        if after.max(initial=0) >= FLAG:
            marked = np.flatnonzero(after >= FLAG)
            after &= FLAG - 1
            if level:
                key = rows[marked] * n + trie.parent[place[marked]]
                marked, key = (each[np.diff(key, prepend=-1) != 0] for each in (marked, key))
                flagged.append((trie.nodes[key % n], states[marked]))
        alive = np.flatnonzero(after)
        place, rows, states = place[alive], rows[alive], after[alive].astype(np.int64)
        found.append((rows, place, states))
        size = trie.num_children[place]
        place, rows, states = ranges(trie.first_child[place], size), np.repeat(rows, size), np.repeat(states, size)
    rows, place, states = map(np.concatenate, zip(*found, strict=True))
    marked, marked_states = map(np.concatenate, zip(*flagged, strict=True))
    nodes = trie.nodes[place]
    ends = np.flatnonzero(trie.first[nodes + 1] > trie.first[nodes])
    order = ends[np.argsort(rows[ends] * n + nodes[ends])]
    begin = np.concatenate([[0], np.cumsum(np.bincount(rows[ends], minlength=starts.size))])
    return Walk(begin, *(each.astype(np.int32) for each in (nodes[order], states[order], marked, marked_states)))


def _steps(graph: Graph, states: Ints, bytes: Ints) -> npt.NDArray[np.int32]:
    """The entries of a graph for some states and bytes."""
    while True:
        after = graph.table[states, bytes]
        unknown = np.flatnonzero((after < 0) | ~graph.ready[states])
        if not unknown.size:
            return after
        for number in np.unique(states[unknown]).tolist():
            graph.fill(number, bytes[unknown[states[unknown] == number]])


# ---- by numba


def use_numba(trie: Trie) -> bool:
    """Whether it is loaded, or numpy has worked so much over this trie that loading it pays."""
    return (trie.visited > WARM_UP or _compiled.cache_info().currsize > 0) and _compiled() is not None


def _in_preorder(graph: Graph, trie: Trie, starts: Ints, above: Ints) -> Walk:
    """One walk after the other, by the compiled `_preorder`; it comes back where a step is not known or room is out."""
    run: Any = _compiled()
    tasks = np.stack([above + 1, trie.skip[above], starts], axis=1).astype(np.int64)
    begin = np.zeros(starts.size + 1, np.int64)
    stack = np.full((2, trie.height + 2), -1, np.int64)
    at = np.array([0, -1, 0, 0, 0])                 # task, node, nodes and flagged in `out`, nodes taken out of it
    try:
        out = trie.scratch.pop()                    # nobody else's until it is back
    except IndexError:
        out = np.empty((4, CHUNK + len(trie)), np.int32)
    parts = []
    while at[0] < starts.size:
        run(trie.packed, graph.table, graph.ready, tasks, begin, stack, out, at)
        if at[1] >= 0:
            graph.fill(int(stack[0, trie.depth[at[1]]]), trie.siblings(int(at[1])))
        else:
            parts.append((*out[:2, : at[2]].copy(), *out[2:, : at[3]].copy()))
            at[2:] = 0, 0, at[4] + at[2]
    trie.scratch.append(out)
    return Walk(begin, *(parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))))


def _preorder(nodes, table, ready, tasks, begin, stack, out, at):  # type: ignore[no-untyped-def]
    """Go on with the tasks (first node, end, state) from `at` on, and leave there how far it came.

    `stack[0, d]` is the state before the byte at depth d, `stack[1, d]` the node above, -1 once it is reported. At
    every node that is reached an entry of `out` is written, and is counted if a token ends there: processors guess
    badly whether one does. This is what numba compiles, which looks for negative indices wherever they are signed.
    """
    task, node, count, marks, taken = at[0], at[1], at[2], at[3], at[4]
    found, states, flagged, flagged_states = out[0], out[1], out[2], out[3]
    before, above = stack[0], stack[1]
    one, byte, half = np.uint64(1), np.uint64(0xFF), np.uint64(0xFFFF)
    while task < len(tasks):
        here, end = np.uint64(max(node, tasks[task, 0])), np.uint64(tasks[task, 1])
        if node < 0 and here < end:
            if count + tasks[task, 1] - tasks[task, 0] > out.shape[1]:
                break
            depth = nodes[here] >> np.uint64(16) & half
            before[depth], above[depth] = tasks[task, 2], -1
        next = np.uint64(count)
        while here < end:
            packed = nodes[here]
            depth = packed >> np.uint64(16) & half
            state = np.uint64(before[depth])
            after = table[state, packed & byte]
            if after <= 0 and (after < 0 or not ready[state]):
                at[:] = task, np.int64(here), np.int64(next), marks, taken
                return
            if after >= FLAG:
                after -= FLAG
                if above[depth] >= 0:
                    flagged[marks], flagged_states[marks] = above[depth], np.int64(state)
                    marks += 1
                    above[depth] = -1
            if after == 0:
                here = packed >> np.uint64(32)
                continue
            found[next], states[next] = np.int64(here), after
            next += packed >> np.uint64(8) & one
            before[depth + one], above[depth + one] = after, np.int64(here)
            here += one
        count, node = np.int64(next), -1
        task += 1
        begin[task] = count + taken
    at[:] = task, -1, count, marks, taken


@functools.cache
def _compiled() -> Callable[..., None] | None:
    """The walk compiled by numba, from its cache on disk if it may write one; None where numba is missing."""
    try:
        import numba as nb
    except (ImportError, OSError):                  # not installed, or its library does not load
        return None

    def read(dtype: Any, ndim: int = 1) -> Any:     # takes arrays that may be written, too
        return nb.types.Array(dtype, ndim, "C", readonly=True)

    int32, int64 = nb.int32, nb.int64
    given = read(nb.uint64), read(int32, 2), read(nb.bool_), int64[:, ::1], int64[::1], int64[:, ::1]
    signature = nb.void(*given, int32[:, ::1], int64[::1])
    try:
        return nb.njit(signature, cache=True)(_preorder)
    except (RuntimeError, OSError):                 # no folder for the cache: compile for this process only
        return nb.njit(signature)(_preorder)
