"""Walks of a vocabulary's trie in parallel with an automaton: the nodes that fit, and the state at each of them.

A walk reads the common prefix of several tokens once, and skips the subtree of a byte that the automaton rejects. All
walks go down together, one level of the trie after the other, and follow only live nodes. A walk that may visit much
of the trie is *wide*: it computes whole levels at once, dead nodes included, at a tenth of the cost per node. A walk
from one state reads nodes one by one until they are many.

An automaton is a *graph*: rows of next states by number, computed when a walk first needs them.

Source: Willard & Louf (2023), "Efficient Guided Generation for Large Language Models", Algorithm 3, run once for all
tokens instead of once for each.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from llmppl.constraints.constraint import Bools, Ints, State, TabledRecognizer
from llmppl.constraints.vocabulary.native_walk import ROOT, Found, beside_of, native_trie
from llmppl.constraints.vocabulary.trie import Ids, Trie, ranges

CHUNK = 1 << 18                                     # entries of the whole index worked on at once
WIDE = (3 / 4, 1 / 10)                              # shares of the trie below one and two bytes; " " has 0.7
MANY = 1 << 20                                      # nodes of all wide walks together, computed at once
FEW = 200                                           # up to so many nodes are read one by one
LARGE = 1000, 16                                    # of a subtree, bytes of a state: a walk may be wide


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
    room = math.inf                                     # states to keep
    has_zero = False                                    # 0 is never a live state

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
    """Graph of any other recognizer: numbers states as they occur, and remembers steps."""

    has_exits: npt.NDArray[np.uint8] | None = None      # by state: 1 if it has some, 2 if not known
    room = 1 << 16
    has_zero = True

    def __init__(self, recognizer: Any) -> None:
        self.recognizer = recognizer
        self.states: list[State] = [None]           # 0 is the dead state
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
            self.table[found] = self.new_row(state)     # before the state is known: an interrupt leaves no half of it
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
        known = list(map(self.number, targets))     # this may replace the table
        self.table[number, bytes] = known

    def renewed(self, room: float) -> MemoGraph:
        """Return the graph itself, or an empty one if it has more than `room` states."""
        return self if len(self.states) <= room else type(self)(self.recognizer)


class Walk(NamedTuple):
    """Results of walks from several states, one walk after the other, each in preorder.

    `nodes` end a token, `states` are the states there, and the results of walk i start at `begin[i]`.
    """

    begin: Ints                    # (m + 1,)
    nodes: Ids                    # (k,)
    states: Ids                   # (k,)


class Loop:
    """Tokens and nodes of a trie by their last bytes in a *loop*, a set of bytes that lead from a state back to it.

    An *exit* is a node whose byte is not in the loop. Below its *top*, a depth, all bytes on the way to a node are.
    """

    def __init__(self, trie: Trie, loop: bytes) -> None:
        inside = np.frombuffer(loop, bool)[trie.bytes]
        top = np.zeros(len(trie) + 1, np.int32)     # by place; last the root's
        for depth, (a, b) in enumerate(trie.levels, 1):
            top[a:b] = np.where(inside[a:b], top[trie.parent[a:b]], depth)
        is_exit = ~inside[trie.place[:-1]]          # by node
        self._trie = trie
        self._exits = trie.place[:-1][is_exit]
        self._begin = np.append(0, np.cumsum(is_exit))      # the number of exits before each node
        self._top = top[trie.place[:-1]].repeat(np.diff(trie.first)), top[trie.parent[self._exits]]

    def below(self, places: Ints) -> tuple[Ints, Ints]:
        """Return the ids of the tokens at or below places that stay in the loop, and the places of the exits."""
        trie = self._trie
        nodes = self._trie.nodes[places]
        after = trie.skip[nodes]
        depth = trie.depth[nodes].astype(np.int32) + 1

        def some(tops: Ints, begin: Ints, end: Ints) -> Ints:
            found = ranges(begin, end - begin)
            return found[tops[found] <= depth.repeat(end - begin)]

        first = trie.first.view(np.int32)
        begin = self._begin
        ids = trie.order[some(self._top[0], first[nodes], first[after])]
        return ids, self._exits[some(self._top[1], begin[nodes + 1], begin[after])]


def walk(graph: Graph, trie: Trie, starts: Ints, above: Ints | None = None) -> Walk:
    """Read the tokens of a trie from several states, from its root or below some of its nodes.

    Parameters
    ----------
    starts : (m,) int ndarray of state numbers
    above : (m,) int ndarray of nodes, optional
        Each walk begins below its node, in its state; at the root (-1) if None.
    """
    above = np.full(starts.size, -1) if above is None else above
    front = _Front(np.arange(starts.size), trie.place[above], starts)
    found = []
    wide: dict[int, tuple[Ints, Ints]] = {}
    for level in itertools.count():
        size = trie.num_children.take(front.place)
        place = ranges(trie.first_child.take(front.place), size)
        if not place.size:
            break
        rows = front.rows.repeat(size)
        states = front.states.repeat(size)
        after = steps(graph, states, trie.bytes.take(place))
        alive = after.nonzero()[0]
        front = _Front(rows.take(alive), place.take(alive), after.take(alive))
        found.append(front)
        if level < len(WIDE):
            below = np.bincount(front.rows, trie.below.take(front.place), starts.size)
            is_wide = below > WIDE[level] * len(trie)
            if is_wide.any():
                most = max(1, MANY // len(trie))    # at once
                for top in np.unique(above[is_wide]).tolist():
                    of_top = np.flatnonzero(is_wide & (above == top))
                    level_below = 0
                    if top >= 0:
                        level_below = int(trie.depth[top]) + 1
                    for begin in range(0, of_top.size, most):
                        some = of_top[begin : begin + most]
                        wide |= _whole_levels(graph, trie, found, level_below, some)
                found = [each.select(~is_wide[each.rows]) for each in found]
                front = found[-1]
    nothing = front.select(slice(0))
    all_found = _Front(*map(np.concatenate, zip(nothing, *found, strict=True)))
    nodes = trie.nodes[all_found.place]
    ends = np.flatnonzero(trie.first[nodes + 1] > trie.first[nodes])
    rows = all_found.rows[ends]
    nodes = nodes[ends]
    states = all_found.states[ends]
    order = np.argsort(rows * len(trie) + nodes)
    number = np.bincount(rows, minlength=starts.size)
    parts: list[tuple[Ints, Ints]] = [(nodes[order], states[order])]
    if wide:
        parts = list(zip(*(np.split(each, np.cumsum(number)[:-1]) for each in parts[0]), strict=True))
        for row, part in wide.items():
            parts[row] = part
            number[row] = part[0].size
    joined = map(np.concatenate, zip(*parts, strict=True))
    return Walk(np.append(0, np.cumsum(number)), *(each.astype(np.int32) for each in joined))


def read_tokens(graph: Any, trie: Trie, start: int, roots: Ids = ROOT, *, with_exits: bool = False) -> Found:
    """Read the tokens below some nodes from a state. With exits, `graph.exits` has the labels of a state."""
    in_c = native_trie(trie)
    beside = beside_of(graph)
    if in_c is not None and beside is not None:
        return in_c.tokens(beside, start, roots, with_exits=with_exits)
    above = trie.place[roots]
    size = trie.num_children[above]
    places = ranges(trie.first_child[above], size)
    states: Ints = np.full(places.size, start)
    parts = [Found(*np.zeros((4, 0), np.int32))]
    while places.size:
        after = steps(graph, states, trie.bytes[places])
        alive = after.nonzero()[0]
        places = places[alive]
        states = after[alive]
        size = trie.num_children[places]
        is_exit = np.zeros(places.size, bool)
        if with_exits:
            some = [state for state in np.unique(states).tolist() if graph.exits[state]]
            is_exit = np.isin(states, some) & (size > 0)
        tokens = trie.tokens_ending(places, states)
        parts.append(Found(*tokens, trie.nodes[places[is_exit]].astype(np.int32), states[is_exit]))
        places = ranges(trie.first_child[places], size)
        states = states.repeat(size)
    return Found(*map(np.concatenate, zip(*parts, strict=True)))


def walk_state(graph: Graph, trie: Trie, number: int) -> tuple[Ids, Ids]:
    """Return the ids of the tokens that fit a state, and the numbers of the states they lead to."""
    if native_trie(trie) is not None and beside_of(graph) is not None:
        read = read_tokens(graph, trie, number)
        return read.ids, read.ends
    found = walk_from(graph, trie, [(len(trie), number)]) if hasattr(graph, "row") else None
    if found is None:
        walked = walk(graph, trie, np.array([number]))
        found = trie.tokens_at(walked.nodes, walked.states, walked.begin)[:2]
    return found


def walk_from(graph: Any, trie: Trie, places: list[tuple[int, int]]) -> tuple[Ids, Ids] | None:
    """Return the result of `walk_state` for the tokens at or below `places`, pairs of a place and its state.

    Nodes are read one by one until they are many. Return None if a walk may be wide.
    """
    rows = graph.row
    bytes, first, sizes, below = trie.views
    takes = {}                # state -> the bytes that it accepts
    reached = places.copy()
    later = places[:0]
    for done, (place, state) in enumerate(reached, 1):          # `reached` grows in the loop
        size = sizes[place]
        if not size:
            continue
        begin = first[place]
        row = rows(state)
        if size >= 8 and state not in takes:
            takes[state] = row.nonzero()[0].tolist()
        if below[place] > LARGE[0] and len(takes.get(state, ())) > LARGE[1]:
            return None
        if size < 8 or len(takes[state]) > size:
            reached += [(at, target) for at in range(begin, begin + size) if (target := row.item(bytes[at]))]
        else:
            found = [bytes.find(byte, begin, begin + size) for byte in takes[state]]
            reached += [(at, row.item(bytes[at])) for at in found if at >= 0]
        if len(reached) > FEW:
            later = reached[done:]
            break
    at, states = np.array(reached, np.int64).reshape(-1, 2).T
    ids, ends = trie.tokens_ending(at, states)
    if later:
        at, states = np.array(later).T
        walked = walk(graph, trie, states, trie.nodes[at])
        more = trie.tokens_at(walked.nodes, walked.states, walked.begin)
        ids = np.concatenate([ids, more[0]])
        ends = np.concatenate([ends, more[1]])
    return ids, ends


class _Front(NamedTuple):
    """Nodes that walks have reached: for each the index of its walk, its place, and its state."""

    rows: Ints
    place: Ints
    states: Ints

    def select(self, which: Bools | slice) -> _Front:
        return _Front(*(each[which] for each in self))


def _whole_levels(
    graph: Graph, trie: Trie, found: list[_Front], level: int, rows: Ints
) -> dict[int, tuple[Ints, Ints]]:
    """Continue some walks from `found` to the leaves; return for each its nodes that end a token, and their states.

    `rows` are the indices of walks below one node, whose children are on `level`.
    """
    states_at = np.zeros((rows.size, len(trie) + 1), np.int32)     # state at each place, 0 where dead
    for front in found:
        number = np.searchsorted(rows, front.rows).clip(max=rows.size - 1)
        here = np.flatnonzero(rows[number] == front.rows)
        states_at[number[here], front.place[here]] = front.states[here]
    front = found[-1].select(np.isin(found[-1].rows, rows))
    next_level = level + len(found)
    last = max(next_level, trie.num_broad) if rows.size < 4 else len(trie.levels)
    # only these places can be live
    a = front.place.min()
    b = front.place.max() + 1
    for level in range(next_level, len(trie.levels)):
        a = trie.first_child[a]
        b = trie.first_child[b] if b < len(trie) else len(trie)
        if level == last:
            for row in states_at:
                _narrow_levels(graph, trie, row, level)
            break
        states = states_at.take(trie.parent[a:b], axis=1)
        after = steps(graph, states, trie.bytes[a:b])
        if not after.any():
            break
        states_at[:, a:b] = after
    alive = states_at.take(trie.place_of_ends, axis=1)
    return {
        number: (trie.ends[some := np.flatnonzero(states)], states[some])
        for number, states in zip(rows.tolist(), alive, strict=True)
    }


def _narrow_levels(graph: Graph, trie: Trie, states_at: Ints, level: int) -> None:
    """Fill in the state at each place from a level on, node by node."""
    above, begin = trie.levels[level - 1]
    table = graph.table
    ready = graph.ready
    states = states_at[above:-1].tolist()
    for place, (parent, byte) in enumerate(trie.narrow[begin - len(trie) :], begin):
        state = states[parent - above]
        if not state:
            continue
        if not ready.item(state) or table.item(state, byte) < 0:
            graph.fill(state, np.array([byte]))
            table = graph.table
            ready = graph.ready
        states[place - above] = table.item(state, byte)
    states_at[begin:-1] = states[begin - above :]


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
