"""A vocabulary as a trie of bytes, and walks of it beside a recognizer.

One idea: tokens that begin alike are walked once for the bytes they share, and not at all below a byte that the
recognizer does not take. A *recognizer* reads bytes and goes from state to state; it is *tabled* if its states are
small integers and its steps are rows of a table. The walk stands here twice, in numpy (a level of the trie after the
other) and for numba (in preorder), and both find the same.

Source: Willard & Louf (2023), "Efficient Guided Generation for Large Language Models", Algorithm 3, made once for all
tokens in place of once for each.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from llmppl.masks.constraint import Bools, Ints, Recognizer, State, TabledRecognizer, VocabularyLike
from llmppl.shared import Shared

CHUNK = 1 << 18                                     # entries of the whole index worked on at once
WARM_UP = 1 << 22                                   # trie nodes that numpy visits before numba is worth its import


class Trie(Shared):
    """The tokens of a vocabulary as a trie of bytes; its nodes are numbered in preorder.

    Parameters
    ----------
    tokens : sequence of V bytes
    never : ids that are left out, as are tokens without bytes

    Attributes
    ----------
    tokens : list of V bytes, b"" where left out
    order : (R,) int32 ndarray
        The ids in the order of their bytes; equal tokens stand side by side.
    byte, depth : (n,) uint8 and uint16 ndarrays
        Of every node: the byte that leads to it, and how many come before that one.
    first : (n + 1,) uint32 ndarray
        The tokens that end in node i are `order[first[i] : first[i + 1]]`.
    levels : two int ndarrays
        The nodes by depth, those of one depth in preorder, and where each depth begins among them.
    children : three int ndarrays
        By place in `levels`: byte, first child, number of children.
    """

    def __init__(self, tokens: Sequence[bytes], never: Iterable[int] = ()) -> None:
        self.tokens = list(tokens)
        for id in never:
            self.tokens[id] = b""
        length = np.fromiter(map(len, self.tokens), np.int64, len(self.tokens))
        if length.max(initial=0) > 65535:
            raise ValueError(f"token {length.argmax()} has {length.max()} bytes; at most 65535 are possible")
        blob = np.frombuffer(b"".join(self.tokens) + bytes(8), np.uint8)
        begin = np.cumsum(length) - length
        order = _sorted_ids(blob, begin, length)
        begin, length = begin[order], length[order]
        shorter = np.minimum(length[1:], length[:-1])
        common = np.zeros(order.size, np.int64)     # bytes shared with the token before
        alike, shared = np.arange(1, order.size), 0
        while alike.size:
            alike = alike[shorter[alike - 1] > shared]
            alike = alike[blob[begin[alike] + shared] == blob[begin[alike - 1] + shared]]
            shared += 1
            common[alike] = shared
        fresh = length - common                     # nodes that a token adds
        last = np.cumsum(fresh)
        n = int(last[-1]) if last.size else 0
        where = np.arange(n) + np.repeat(begin + common - (last - fresh), fresh)
        self.order = order.astype(np.int32)
        self.byte = blob[where]
        self.depth = (where - np.repeat(begin, fresh)).astype(np.uint16)
        self.first = np.zeros(n + 1, np.uint32)
        np.cumsum(np.bincount(last - 1, minlength=n), out=self.first[1:])
        self.height = int(self.depth.max(initial=0)) + 1  # bytes of the longest token
        self.levels = self._by_level()
        self.children = self._below()
        self.visited = 0                            # nodes, by walks in numpy
        self._scratch: list[tuple[Ints, Ints]] = []

    def __len__(self) -> int:
        return len(self.byte)

    def __repr__(self) -> str:
        return f"Trie({self.order.size} of {len(self.tokens)} tokens, {len(self)} nodes)"

    @functools.cached_property
    def complete(self) -> bool:
        """Whether every byte that UTF-8 has is a token by itself, so that there are no dead ends in any text."""
        have = {token[0] for token in self.tokens if len(token) == 1}
        return have.issuperset([*range(0xC0), *range(0xC2, 0xF5)])

    def _by_level(self) -> tuple[Ints, Ints]:
        """The nodes by depth, those of one depth in preorder, and where each depth begins among them."""
        ends = np.cumsum(np.bincount(self.depth, minlength=1))
        return np.argsort(self.depth, kind="stable"), np.concatenate([[0], ends])

    @functools.cached_property
    def skip(self) -> npt.NDArray[np.uint32]:
        """(n,) the node after all that are below a node."""
        nodes, begin = self.levels
        skip = np.full(len(self), len(self), np.uint32)
        above = nodes[:0]
        for a, b in zip(begin[:-1], begin[1:], strict=True):
            level = nodes[a:b]
            skip[level[:-1]] = level[1:]
            if a:
                skip[level] = np.minimum(skip[level], skip[above[np.searchsorted(above, level) - 1]])
            above = level
        return skip

    def _below(self) -> tuple[Ints, Ints, Ints]:
        """By place in `levels`: byte, first child, number of children."""
        nodes, begin = self.levels
        number = np.zeros(len(self), np.int64)
        for d in range(1, begin.size - 1):
            above = nodes[begin[d - 1] : begin[d]]
            parent = np.searchsorted(above, nodes[begin[d] : begin[d + 1]]) - 1
            number[begin[d - 1] : begin[d]] = np.bincount(parent, minlength=above.size)
        roots = begin[1] if begin.size > 1 else 0
        return self.byte[nodes].astype(np.int64), roots + np.cumsum(number) - number, number

    @functools.cached_property
    def siblings(self) -> tuple[Ints, Ints, Ints]:
        """For each node its place in `levels`; by place: byte, and where the children of the same parent end."""
        byte, first_child, number = self.children
        nodes, begin = self.levels
        place = np.empty(len(self), np.int64)
        place[nodes] = np.arange(len(self))
        end = np.concatenate([np.full(begin[1], begin[1]), np.repeat(first_child + number, number)])
        return place, byte, end

    @functools.cached_property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """What the walk in numba reads."""
        return self.byte, self.depth, self.skip, self.first, self.order


def _sorted_ids(blob: npt.NDArray[np.uint8], begin: Ints, length: Ints) -> npt.NDArray[np.int64]:
    """The ids of the tokens that have bytes, in the order of their bytes, equal ones by id.

    Eight bytes are compared at a time, after them only where they left a tie; zeros stand past the end of a token.
    """
    order = np.flatnonzero(length)
    group = np.zeros(order.size, np.int64)
    tied = np.arange(order.size)
    at = 0
    while tied.size:
        ids = order[tied]
        key = np.zeros(ids.size, np.uint64)
        for j in range(at, at + 8):
            inside = length[ids] > j
            key = (key << np.uint64(8)) | np.where(inside, blob[np.where(inside, begin[ids] + j, 0)], 0)
        # past the end of all of them a longer token can differ from a shorter one by zero bytes only
        over = bool((length[ids] <= at).all())
        by = length[ids].astype(np.uint64) if over else key
        move = np.lexsort((ids, by, group[tied]))
        order[tied], by, old = ids[move], by[move], group[tied]
        if over:
            break
        new = np.concatenate([[True], (by[1:] != by[:-1]) | (old[1:] != old[:-1])])
        group[tied] = tied[np.flatnonzero(new)][np.cumsum(new) - 1]
        size = np.diff(np.append(np.flatnonzero(new), new.size))
        tied = tied[np.repeat(size > 1, size)]
        at += 8
    return order


_tries: weakref.WeakKeyDictionary[Any, Trie] = weakref.WeakKeyDictionary()


def trie_of(vocab: VocabularyLike) -> Trie:
    """The trie of a vocabulary, one for all that are equal."""
    try:
        found = _tries.get(vocab)
    except TypeError:                               # not hashable, or no weak references: it gets a trie of its own
        return Trie(vocab.tokens, {*vocab.eos_ids, *getattr(vocab, "special_ids", ())})
    if found is None:
        found = _tries.setdefault(vocab, Trie(vocab.tokens, {*vocab.eos_ids, *getattr(vocab, "special_ids", ())}))
    return found


def fingerprint(vocab: VocabularyLike) -> str:
    """Equal for vocabularies that allow the same."""
    tokens = trie_of(vocab).tokens
    length = np.fromiter(map(len, tokens), np.int64, len(tokens))
    digest = hashlib.blake2b(b"".join([length.tobytes(), *tokens]), digest_size=16)
    return f"{digest.hexdigest()} {sorted(vocab.eos_ids)}"


class Tabled:
    """A tabled recognizer, as the walks see it."""

    def __init__(self, recognizer: TabledRecognizer) -> None:
        self.recognizer = recognizer

    @property
    def table(self) -> npt.NDArray[np.int32]:
        return self.recognizer.table

    @property
    def ready(self) -> Bools:
        return self.recognizer.ready

    def number(self, state: State) -> int:
        if isinstance(state, (int, np.integer)) and 0 < state < len(self.ready):
            return int(state)
        raise ValueError(f"{state!r} is not a state of this index, whose states are integers from 1 up and END")

    def state(self, number: int) -> State:
        return number

    def settle(self, numbers: Ints, bytes: Ints) -> None:
        """Make known where `numbers` go with `bytes`."""
        for number in sorted(set(numbers.tolist())):
            self.recognizer.row(number)

    def settle_below(self, number: int, trie: Trie, node: int) -> None:
        """The same for the bytes of `node` and of the nodes after it under the same parent, and so on down from `node`.

        Where the walk goes down next, the rows are made ready now: it comes back here less often.
        """
        while number:
            number = self.recognizer.row(number).item(trie.byte.item(node))
            node += 1
            if node == len(trie) or trie.depth.item(node) <= trie.depth.item(node - 1):
                break


class Numbered:
    """Any other recognizer: its states are numbered as they are met, its steps remembered in a table (-1: not yet)."""

    def __init__(self, recognizer: Recognizer) -> None:
        self.recognizer = recognizer
        self.states: list[State] = [None]           # 0 is dead
        self.ids: dict[State, int] = {}
        self.table = np.full((64, 256), -1, np.int32)
        self.ready = np.ones(64, bool)

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

    def settle(self, numbers: Ints, bytes: Ints) -> None:
        for number, byte in sorted(set(zip(numbers.tolist(), bytes.tolist(), strict=True))):
            target = self.recognizer.step(self.states[number], byte)
            known = 0 if target is None else self.number(target)  # which may replace the table
            self.table[number, byte] = known

    def settle_below(self, number: int, trie: Trie, node: int) -> None:
        place, byte, end = trie.siblings
        at = place[node]
        bytes = byte[at : end[at]]
        bytes = bytes[self.table[number, bytes] < 0]
        state, step = self.states[number], self.recognizer.step
        targets = [step(state, each) for each in bytes.tolist()]
        known = [0 if target is None else self.number(target) for target in targets]
        self.table[number, bytes] = known


def _walk_levels(graph: Tabled | Numbered, trie: Trie, starts: Ints) -> tuple[Ints, Ints, Ints]:
    """The walk in numpy, from several states at once, a level of the trie after the other.

    Parameters
    ----------
    starts : (m,) int ndarray of state numbers

    Returns
    -------
    rows, nodes, ends : (k,) int ndarrays
        From starts[row] the bytes on the way to a node that ends a token lead to the state `end`; by row, then node.
    """
    by_level, begin = trie.levels
    byte, first_child, num_children = trie.children
    roots = int(begin[1]) if begin.size > 1 else 0
    place = np.tile(np.arange(roots), starts.size)
    rows = np.repeat(np.arange(starts.size), roots)
    states = np.repeat(starts.astype(np.int64), roots)
    found: list[tuple[Ints, Ints, Ints]] = []
    while place.size:
        trie.visited += place.size + 1000           # a level costs as much as some thousand nodes, however small
        bytes = byte[place]
        while True:
            states_next = graph.table[states, bytes]
            unknown = (states_next < 0) | ~graph.ready[states]
            if not unknown.any():
                break
            graph.settle(states[unknown], bytes[unknown])
        alive = np.flatnonzero(states_next)
        place, rows, states = place[alive], rows[alive], states_next[alive].astype(np.int64)
        found.append((rows, place, states))
        number = num_children[place]
        total = np.cumsum(number)
        place = np.arange(total[-1] if total.size else 0) + np.repeat(first_child[place] - (total - number), number)
        rows, states = np.repeat(rows, number), np.repeat(states, number)
    if not found:
        return rows, place, states
    rows, place, states = (np.concatenate(parts) for parts in zip(*found, strict=True))
    nodes = by_level[place]
    ends_token = np.flatnonzero(trie.first[nodes + 1] > trie.first[nodes])
    move = ends_token[np.argsort(rows[ends_token] * len(trie) + nodes[ends_token])]
    return rows[move], nodes[move], states[move]


def _walk(  # type: ignore[no-untyped-def]  # compiled by numba; as it stands it is what the compiled one must equal
    table, ready, byte, depth, skip, first, order, stack, node, ids, ends, found
):
    """One state's walk in preorder, from `node` on; `stack[d]` is the state before the byte at depth d.

    At every node that is reached the next token of `order` is written, and is counted if it ends there: processors
    guess badly whether one does. The last node ends one, so there always is a next.

    Returns the node where it stopped, n or one at which the table is not known yet, and how many tokens were found.
    """
    one = np.uint64(1)                              # numba looks for negative indices wherever they are signed
    at, count = np.uint64(node), np.uint64(found)
    while at < byte.size:
        d = depth[at]
        s = stack[d]
        t = table[s, byte[at]]
        if t <= 0:
            if t < 0 or not ready[s]:
                break
            at = np.uint64(skip[at])
            continue
        stack[d + one] = t
        k = np.uint64(first[at])
        at += one
        more = np.uint64(first[at]) - k
        ids[count] = order[k]
        ends[count] = t
        for i in range(one, more):
            ids[count + i] = order[k + i]
            ends[count + i] = t
        count += more
    return np.int64(at), np.int64(count)


def _walk_many(  # type: ignore[no-untyped-def]  # as above
    table, ready, byte, depth, skip, first, order, stack, row_of, states, num, row, ids, nexts, begin, mark, edges, edge
):
    """The walks of all rows from `row` on, as far as the arrays have room; new states become new rows.

    Returns the row where it stopped, the number of rows, and the node where the table is not known, or -1.
    """
    one = np.uint64(1)
    done, count, num_edges = 0, np.uint64(0), np.uint64(0)
    while row < num and done + 1 < begin.size and count + np.uint64(order.size) <= ids.size:
        stack[0] = states[row]
        at = np.uint64(0)
        while at < byte.size:
            d = depth[at]
            s = stack[d]
            t = table[s, byte[at]]
            if t <= 0:
                if t < 0 or not ready[s]:
                    return row, num, np.int64(at)
                at = np.uint64(skip[at])
                continue
            stack[d + one] = t
            k = np.uint64(first[at])
            at += one
            more = np.uint64(first[at]) - k
            r = row_of[np.uint32(t)]
            if (r < 0 or mark[np.uint32(r)] != row) and more:
                if r < 0:
                    r = row_of[np.uint32(t)] = num
                    states[num] = t
                    num += 1
                mark[np.uint32(r)] = row
                edges[num_edges] = r
                num_edges += one
            ids[count] = order[k]
            nexts[count] = r
            for i in range(one, more):
                ids[count + i] = order[k + i]
                nexts[count + i] = r
            count += more
        row += 1
        done += 1
        begin[done] = count
        edge[done] = num_edges
    return row, num, np.int64(-1)


@functools.cache
def _compiled() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The two walks compiled by numba, from its cache on disk if it may write one; None where numba is missing."""
    try:
        import numba as nb
    except (ImportError, OSError):                  # not installed, or its library does not load
        return None

    def read(dtype: Any, ndim: int = 1) -> Any:     # takes arrays that may be written, too
        return nb.types.Array(dtype, ndim, "C", readonly=True)

    int32, uint32, int64 = nb.int32, nb.uint32, nb.int64
    given = (read(int32, 2), read(nb.bool_), read(nb.uint8), read(nb.uint16), read(uint32), read(uint32), read(int32))
    pair: Any = nb.types.UniTuple(int64, 2)  # type: ignore[no-untyped-call]
    triple: Any = nb.types.UniTuple(int64, 3)  # type: ignore[no-untyped-call]
    one = pair(*given, uint32[::1], int64, int32[::1], int32[::1], int64)
    many = triple(
        *given, uint32[::1], *[int32[::1]] * 2, int64, int64, *[int32[::1]] * 2, int64[::1],
        *[int32[::1]] * 2, int64[::1],
    )
    try:
        return nb.njit(one, cache=True)(_walk), nb.njit(many, cache=True)(_walk_many)
    except (RuntimeError, OSError):                 # no folder for the cache: compile for this process only
        return nb.njit(one)(_walk), nb.njit(many)(_walk_many)


def use_numba(trie: Trie) -> bool:
    """Whether it is loaded, or numpy has worked so much over this trie that loading it pays."""
    return (trie.visited > WARM_UP or _compiled.cache_info().currsize > 0) and _compiled() is not None


def _tokens_at(trie: Trie, nodes: Ints) -> tuple[npt.NDArray[np.int32], Ints]:
    """The ids of the tokens that end in each of `nodes`, and how many these are."""
    begin = trie.first[nodes].astype(np.int64)
    number = trie.first[nodes + 1] - begin
    total = np.cumsum(number)
    inside = np.arange(total[-1] if total.size else 0) - np.repeat(total - number, number)
    return trie.order[np.repeat(begin, number) + inside], number


def walk_state(graph: Tabled | Numbered, trie: Trie, number: int) -> tuple[Ints, Ints]:
    """The ids of the tokens that fit a state, in the order of their bytes, and the states they lead to (numbers)."""
    if not use_numba(trie):
        _, nodes, states = _walk_levels(graph, trie, np.array([number]))
        ids, many = _tokens_at(trie, nodes)
        return ids, np.repeat(states, many)
    walk = _compiled()[0]  # type: ignore[index]
    try:
        some, ends = trie._scratch.pop()            # nobody else's until it is back
    except IndexError:
        some, ends = np.empty_like(trie.order), np.empty_like(trie.order)
    stack = np.full(trie.height + 1, number, np.uint32)
    at, count, n = 0, 0, len(trie)
    while True:
        at, count = walk(graph.table, graph.ready, *trie.arrays, stack, at, some, ends, count)
        if at == n:
            break
        graph.settle_below(int(stack[trie.depth[at]]), trie, at)
    found = some[:count].copy(), ends[:count].copy()
    trie._scratch.append((some, ends))
    return found


@dataclass
class Reached:
    """The states that token sequences reach, as rows in the order they are met, and to which rows each leads.

    `on_rows(first row, ids, nexts, begin)` sees the tokens of some rows and the rows they lead to.
    """

    graph: Tabled | Numbered
    trie: Trie
    limit: float
    on_rows: Callable[[int, Ints, Ints, Ints], None] | None = None
    states: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    row_of: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    num: int = 0
    row: int = 0
    batch: int = 1
    edges: list[Ints] = field(default_factory=list)
    degrees: list[Ints] = field(default_factory=list)
    room: list[npt.NDArray[np.int32]] = field(default_factory=list)

    def reach(self, number: int) -> None:
        """Go on to `number` and to all that can be reached from there."""
        self._make_room()
        if self.row_of[number] < 0:
            self.row_of[number], self.states[self.num] = self.num, number
            self.num += 1
        while self.row < self.num:
            if self.num > self.limit:
                raise ValueError(f"more than {self.limit} states are reached: the language may have infinitely many")
            self._make_room()
            self._numba_rows() if use_numba(self.trie) else self._numpy_rows()

    def _make_room(self) -> None:
        more = len(self.graph.table) - self.states.size
        if more > 0:
            self.states = np.concatenate([self.states, np.zeros(more, np.int32)])
            self.row_of = np.concatenate([self.row_of, np.full(more, -1, np.int32)])

    def _numba_rows(self) -> None:
        walk, trie, first = _compiled()[1], self.trie, self.row  # type: ignore[index]
        self.room = self.room or [np.empty(max(CHUNK, trie.order.size), np.int32) for _ in range(3)]
        ids, nexts, edges = self.room
        begin, edge = np.zeros(4097, np.int64), np.zeros(4097, np.int64)
        stack = np.zeros(trie.height + 1, np.uint32)
        mark = np.full(self.states.size, -1, np.int32)
        self.row, self.num, at = walk(
            self.graph.table, self.graph.ready, *trie.arrays, stack, self.row_of, self.states, self.num, self.row,
            ids, nexts, begin, mark, edges, edge,
        )  # fmt: skip
        done = self.row - first
        count, num_edges = begin[done], edge[done]
        degrees = np.diff(edge[: done + 1])
        self._take(first, ids[:count], nexts[:count], begin[: done + 1], edges[:num_edges].copy(), degrees)
        if at >= 0:
            self.graph.settle_below(int(stack[trie.depth[at]]), trie, at)

    def _numpy_rows(self) -> None:
        first, last = self.row, min(self.row + self.batch, self.num)
        rows, nodes, ends = _walk_levels(self.graph, self.trie, self.states[first:last])
        self._make_room()
        new, where = np.unique(ends[self.row_of[ends] < 0], return_index=True)
        new = new[np.argsort(where)]                # as they are met, which is how numba numbers them
        self.row_of[new] = np.arange(self.num, self.num + new.size)
        self.states[self.num : self.num + new.size] = new
        self.num += new.size
        ids, many = _tokens_at(self.trie, nodes)
        nexts = self.row_of[ends]
        begin = np.concatenate([[0], np.cumsum(np.bincount(np.repeat(rows, many), minlength=last - first))])
        pairs = np.unique(rows * self.num + nexts)
        self.row, self.batch = last, max(1, self.batch * 2 if ids.size < CHUNK // 8 else self.batch // 2)
        degrees = np.bincount(pairs // self.num, minlength=last - first)
        self._take(first, ids, np.repeat(nexts, many), begin, pairs % self.num, degrees)

    def _take(self, first: int, ids: Ints, nexts: Ints, begin: Ints, edges: Ints, degrees: Ints) -> None:
        self.edges.append(edges)
        self.degrees.append(degrees)
        if self.on_rows is not None:
            self.on_rows(first, ids, nexts, begin)

    def distances(self, accepting: Bools) -> npt.NDArray[np.float64]:
        """(num,) the least number of tokens from each row to an accepting one."""
        degrees = np.concatenate(self.degrees)
        inner = np.flatnonzero(degrees)             # rows that lead anywhere
        begin = (np.cumsum(degrees) - degrees)[inner]
        edges = np.concatenate(self.edges)
        distance = np.where(accepting, 0.0, np.inf)
        while inner.size:
            nearer = np.minimum(distance[inner], 1 + np.minimum.reduceat(distance[edges], begin))
            if np.array_equal(nearer, distance[inner]):
                break
            distance[inner] = nearer
        return distance
