"""TokenIndex: which tokens of a vocabulary may follow, in every state of a recognizer.

The one idea: the tokens, as bytes, form a trie, and one walk of it beside the recognizer, pruned where the recognizer
has nowhere to go, finds every token that may follow a state. The walk is made once for each state that is met.

Words. A *recognizer* reads bytes and goes from state to state; it is *tabled* if its states are small integers and its
steps are rows of a table. A *mask* holds a bool for every token of the vocabulary, a *set* is what a mask says: states
with equal sets share one mask. The *end* is the state after an eos token. A *dead end* is a state in which the text is
not finished and no token fits, though bytes would: it can be there only if the vocabulary lacks single bytes.

Sources: Willard & Louf (2023), "Efficient Guided Generation for Large Language Models": Algorithm 3 is the walk for one
token, which the trie makes for all of them at once; Algorithm 4 is `TokenIndex.build_all`.
"""

from __future__ import annotations

import functools
import hashlib
import math
import weakref
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

__all__ = ["END", "Recognizer", "TabledRecognizer", "TokenIndex", "Trie", "VocabularyLike", "WholeIndex"]

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.integer[Any]]
State = Any                                         # hashable, and never changed

FORMAT = 1                                          # of saved files
MASK_BYTES = 1 << 26                                # of masks kept as bools; the others are kept as bits or ids
CHUNK = 1 << 18                                     # entries of the whole index worked on at once
NUMBERED = 1 << 16                                  # states without a table that are kept with their steps
WARM_UP = 1 << 22                                   # trie nodes that numpy visits before numba is worth its import


class Recognizer(Protocol):
    """A language, read byte by byte. Every state that it gives out leads on to some accepted string.

    It may have a method `token_mask(state, trie) -> (V,) bool ndarray` as well, where it knows a faster way than
    steps to find the tokens that may follow; eos is added by the index.
    """

    @property
    def start(self) -> State: ...
    def step(self, state: State, byte: int, /) -> State | None: ...
    def accepts(self, state: State, /) -> bool: ...


@runtime_checkable
class TabledRecognizer(Protocol):
    """A recognizer whose states are integers: 0 is dead, `table[state, byte]` the next one where `ready[state]`.

    `row(state)` makes a state ready; `explore()` all that can be reached. The arrays may be replaced by longer ones;
    rows that are not ready hold zeros.
    """

    @property
    def start(self) -> int: ...
    @property
    def table(self) -> npt.NDArray[np.int32]: ...  # (S, 256)
    @property
    def ready(self) -> Bools: ...  # (S,)
    @property
    def accepting(self) -> Bools: ...  # (S,)
    def step(self, state: int, byte: int, /) -> int | None: ...
    def accepts(self, state: int, /) -> bool: ...
    def row(self, state: int, /) -> npt.NDArray[np.int32]: ...  # (256,)
    def explore(self) -> object: ...


class VocabularyLike(Protocol):
    """Token id -> bytes, and the ids that end a text. Tokens without bytes, and `special_ids` if any, never fit."""

    @property
    def tokens(self) -> Sequence[bytes]: ...
    @property
    def eos_ids(self) -> Sequence[int]: ...


class _End:
    """The state after an eos token: the text is over, and nothing may follow."""

    def __repr__(self) -> str:
        return "END"

    def __reduce__(self) -> str:                    # copies and pickles are the same object
        return "END"


END = _End()


class Trie:
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

    @functools.cached_property
    def levels(self) -> tuple[Ints, Ints]:
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

    @functools.cached_property
    def children(self) -> tuple[Ints, Ints, Ints]:
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


def _trie_of(vocab: VocabularyLike) -> Trie:
    """The trie of a vocabulary, one for all that are equal."""
    try:
        found = _tries.get(vocab)
    except TypeError:                               # not hashable, or no weak references: it gets a trie of its own
        return Trie(vocab.tokens, {*vocab.eos_ids, *getattr(vocab, "special_ids", ())})
    if found is None:
        found = _tries[vocab] = Trie(vocab.tokens, {*vocab.eos_ids, *getattr(vocab, "special_ids", ())})
    return found


def _fingerprint(vocab: VocabularyLike) -> str:
    """Equal for vocabularies that allow the same."""
    tokens = _trie_of(vocab).tokens
    length = np.fromiter(map(len, tokens), np.int64, len(tokens))
    digest = hashlib.blake2b(b"".join([length.tobytes(), *tokens]), digest_size=16)
    return f"{digest.hexdigest()} {sorted(vocab.eos_ids)}"


class _Tabled:
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
        for number in np.unique(numbers).tolist():
            self.recognizer.row(number)

    def settle_below(self, number: int, trie: Trie, node: int) -> None:
        """The same for the bytes of `node` and of the nodes after it under the same parent."""
        self.recognizer.row(number)


class _Numbered:
    """Any other recognizer: its states are numbered as they are met, its steps remembered in a table (-1: not yet)."""

    def __init__(self, recognizer: Recognizer) -> None:
        self.recognizer = recognizer
        self.clear()

    def clear(self) -> None:
        self.states: list[State] = [None]           # 0 is dead
        self.ids: dict[State, int] = {}
        self.table = np.full((64, 256), -1, np.int32)
        self.ready = np.ones(64, bool)

    def number(self, state: State) -> int:
        found = self.ids.get(state)
        if found is None:
            found = self.ids[state] = len(self.states)
            self.states.append(state)
            if found == len(self.table):
                self.table = np.concatenate([self.table, np.full_like(self.table, -1)])
                self.ready = np.ones(len(self.table), bool)
        return found

    def state(self, number: int) -> State:
        return self.states[number]

    def settle(self, numbers: Ints, bytes: Ints) -> None:
        pairs = np.unique(numbers.astype(np.int64) * 256 + bytes)
        for number, byte in zip((pairs >> 8).tolist(), (pairs & 255).tolist(), strict=True):
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


def _walk_levels(graph: _Tabled | _Numbered, trie: Trie, starts: Ints) -> tuple[Ints, Ints, Ints]:
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
        while k < first[at]:
            ids[count] = order[k]
            ends[count] = t
            count += one
            k += one
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
            if k < first[at]:
                r = row_of[np.uint32(t)]
                if r < 0:
                    r = row_of[np.uint32(t)] = num
                    states[num] = t
                    num += 1
                if mark[np.uint32(r)] != row:
                    mark[np.uint32(r)] = row
                    edges[num_edges] = r
                    num_edges += one
                while k < first[at]:
                    ids[count] = order[k]
                    nexts[count] = r
                    count += one
                    k += one
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


def _use_numba(trie: Trie) -> bool:
    """Whether it is loaded, or numpy has worked so much over this trie that loading it pays."""
    return (trie.visited > WARM_UP or _compiled.cache_info().currsize > 0) and _compiled() is not None


def _tokens_at(trie: Trie, nodes: Ints) -> tuple[npt.NDArray[np.int32], Ints]:
    """The ids of the tokens that end in each of `nodes`, and how many these are."""
    begin = trie.first[nodes].astype(np.int64)
    number = trie.first[nodes + 1] - begin
    total = np.cumsum(number)
    inside = np.arange(total[-1] if total.size else 0) - np.repeat(total - number, number)
    return trie.order[np.repeat(begin, number) + inside], number


def _walk_state(graph: _Tabled | _Numbered, trie: Trie, number: int) -> tuple[Ints, Ints]:
    """The ids of the tokens that fit a state, in the order of their bytes, and the states they lead to (numbers)."""
    if not _use_numba(trie):
        _, nodes, states = _walk_levels(graph, trie, np.array([number]))
        ids, many = _tokens_at(trie, nodes)
        return ids, np.repeat(states, many)
    walk = _compiled()[0]  # type: ignore[index]
    some, ends = trie._scratch.pop() if trie._scratch else (np.empty_like(trie.order), np.empty_like(trie.order))
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
class _Reached:
    """The states that token sequences reach, as rows in the order they are met, and to which rows each leads.

    `on_rows(first row, ids, nexts, begin)` sees the tokens of some rows and the rows they lead to.
    """

    graph: _Tabled | _Numbered
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
            self._numba_rows() if _use_numba(self.trie) else self._numpy_rows()

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


class _Set:
    """What a mask says: sorted int32 ids, or where those take more room, a bit for every token."""

    __slots__ = ("key", "mask")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.mask: Bools | None = None


class TokenIndex:
    """For every state of a recognizer, which tokens of a vocabulary may follow, and where they lead.

    A token may follow if some accepted string goes on with its bytes, so a mask always holds all tokens that fit and
    never forces a canonical one. States are the recognizer's own, and END after an eos token. Copies are the index
    itself; masks are computed when first asked for.

    Parameters
    ----------
    recognizer : Recognizer
        A Regex, a DFA, a Grammar, or anything with `start`, `step` and `accepts`.
    vocab : VocabularyLike

    Raises
    ------
    ValueError
        If the recognizer accepts nothing, or no sequence of tokens spells anything that it accepts. (The second is
        looked for in some hundred states only, and only if the vocabulary lacks single bytes.)
    """

    def __init__(self, recognizer: Recognizer | TabledRecognizer, vocab: VocabularyLike) -> None:
        self.recognizer = recognizer
        self.vocab = vocab
        self.trie = _trie_of(vocab)
        self.start: State = recognizer.start
        self.end = END
        tabled = isinstance(recognizer, TabledRecognizer)
        self._graph: _Tabled | _Numbered = _Tabled(recognizer) if tabled else _Numbered(recognizer)  # type: ignore[arg-type]
        self._tabled = tabled
        self._token_mask = None if tabled else getattr(recognizer, "token_mask", None)
        self._eos = np.array(sorted(vocab.eos_ids), np.int32)
        self._sets: dict[State, _Set] = {}          # by state
        self._distinct: dict[bytes, _Set] = {}
        self._unpacked: deque[_Set] = deque()
        self._within: dict[tuple[State, float], _Set] = {}
        self._steps: dict[tuple[State, int], State] = {}
        self._reached: _Reached | None = None
        self._distances = np.zeros(0)
        self._accept_memo: dict[State, float] = {}
        self._whole: WholeIndex | None = None
        if self.start is None or (tabled and self.start == 0):
            raise ValueError(f"{self._name} accepts no string at all")
        self._refuse_gaps()

    @property
    def _name(self) -> str:
        name = repr(self.recognizer)
        return type(self.recognizer).__name__ if name.startswith("<") else name

    def __repr__(self) -> str:
        return f"TokenIndex({self._name}, {len(self.trie.tokens)} tokens, {len(self._sets)} masks)"

    def __copy__(self) -> TokenIndex:
        return self

    def __deepcopy__(self, memo: object) -> TokenIndex:
        return self

    def mask(self, state: State) -> Bools:
        """Tokens that may follow `state`.

        Parameters
        ----------
        state : hashable, from `start`, `advance` or `after`

        Returns
        -------
        (V,) bool ndarray, read-only
            True at v if some accepted string continues `state` with the bytes of token v; at an eos iff `state`
            accepts; nowhere at END, at a dead end, and at tokens without bytes. States with equal sets share one.

        Raises
        ------
        ValueError
            If `state` is not one of this index, as far as that can be told.
        """
        found = self._sets.get(state)
        if found is None:
            found = self._find(state)
        return found.mask if found.mask is not None else self._unpack(found)

    def allowed(self, state: State) -> npt.NDArray[np.int64]:
        """Tokens that may follow `state`: (n,) int64 ndarray of ids, ascending, read-only."""
        found = self._sets.get(state) or self._find(state)
        if self._narrow(found):
            ids = np.frombuffer(found.key, np.int32).astype(np.int64)
        else:
            ids = np.flatnonzero(self.mask(state))
        ids.flags.writeable = False
        return ids

    def accepts(self, state: State) -> bool:
        """Whether the text may end in `state`; at END it has."""
        return state is END or bool(self.recognizer.accepts(self._checked(state)))

    def advance(self, state: State, token: int) -> State:
        """The state after `token`; END after an eos.

        Raises
        ------
        ValueError
            If `token` may not follow `state`, or is not in the vocabulary.
        """
        data = self.trie.tokens[token] if 0 <= token < len(self.trie.tokens) else b""
        if data and self._tabled and state in self._sets:  # the walk that found the set has made all rows ready
            step = self._graph.table.item
            at = state
            for byte in data:
                at = step(at, byte)
                if not at:
                    raise self._refused(state, token)
            return at
        key = (state, token)
        found = self._steps.get(key)
        if found is None:
            found = self._advance(state, token, data)
            if len(self._steps) > NUMBERED:
                self._steps.clear()
            self._steps[key] = found
        return found

    def after(self, text: str | bytes) -> State:
        """The state after a text that is already there, of which no token need be known.

        Raises
        ------
        ValueError
            If no accepted string begins with `text`; names the place and the byte.
        """
        data = text if isinstance(text, bytes) else getattr(text, "bytes", None) or text.encode()
        state, at = self._read(self.start, data)
        if at < len(data):
            raise ValueError(
                f"{self._name}: byte {at} of the text, {data[at : at + 1]!r} {_after(data[:at])}, leaves the language: "
                f"{self._wishes(state)}"
            )
        return state

    def masks(self, tokens: Sequence[int]) -> Bools:
        """The mask before each token of a text, (T, V) bool ndarray.

        Raises
        ------
        ValueError
            If a token may not follow those before it; names its place.
        """
        out = np.empty((len(tokens), len(self.trie.tokens)), bool)
        state = self.start
        for t, token in enumerate(tokens):
            out[t] = self.mask(state)
            try:
                state = self.advance(state, token)
            except ValueError as error:
                raise ValueError(f"tokens[{t}]: {error}") from None
        return out

    def wanted(self, state: State) -> bytes:
        """The bytes that may follow `state`, ascending; b"" if none may."""
        if state is END:
            return b""
        state = self._checked(state)
        return bytes(byte for byte in range(256) if self._step(state, byte) is not None)

    def tokens_to_accept(self, state: State) -> float:
        """The least number of tokens from `state` to one that accepts, an eos not counted; inf if there is no way.

        For a tabled recognizer all states are looked at together, once. For others the states are searched in turn,
        which is slow where a state has many successors.

        Raises
        ------
        ValueError
            If the recognizer has no table, and the search has met a hundred thousand states.
        """
        if state is END:
            return 0
        state = self._checked(state)
        if not self._tabled:
            return self._search_acceptance(state)
        distances, row_of = self._graph_distances(int(state))
        found = float(distances[row_of[state]])
        return int(found) if math.isfinite(found) else found

    def mask_within(self, state: State, n: float) -> Bools:
        """Tokens after which the text can still be finished with n - 1 tokens more, an eos not counted.

        With `n` infinite only the tokens are missing that lead to where no sequence of tokens can finish. The mask at
        an eos is that of `mask`.

        Returns
        -------
        (V,) bool ndarray, read-only
        """
        if state is END:
            return self.mask(END)
        found = self._within.get((state, n))
        if found is None:
            state = self._checked(state)
            ids, ends = _walk_state(self._graph, self.trie, self._graph.number(state))
            if self._tabled:
                distances, row_of = self._graph_distances(int(state))
                fits = distances[row_of[ends]] <= n - 1
            else:
                targets, where = np.unique(ends, return_inverse=True)
                states = [self._graph.state(target) for target in targets.tolist()]
                fits = np.array([self._search_acceptance(target) <= n - 1 for target in states], bool)[where]
            if len(self._within) > 4096:
                self._within.clear()
            found = self._within[state, n] = self._share(ids[fits], self.accepts(state))
        return found.mask if found.mask is not None else self._unpack(found)

    def build_all(self, max_states: int = 1_000_000) -> WholeIndex:
        """The sets and steps of all states that tokens reach from the start (Algorithm 4), as compact arrays.

        Raises
        ------
        ValueError
            If there are more than `max_states` of them; a grammar has infinitely many where it nests.
        """
        if self._whole is not None:
            return self._whole
        if self._tabled:
            self.recognizer.explore()  # type: ignore[union-attr]
        small = np.uint16 if self._tabled and len(self._graph.table) <= 1 << 16 else np.int32
        states: list[State] = []
        accepting: list[bool] = []
        sets: list[_Set] = []
        nexts: list[Ints] = []
        sizes: list[Ints] = []
        reached = _Reached(self._graph, self.trie, max_states)

        def take(first: int, ids: Ints, rows: Ints, begin: Ints) -> None:
            last: dict[int, tuple[Ints, bool, _Set]] = {}  # by size: neighbours are often equal
            numbers = reached.states[first : first + begin.size - 1].tolist()
            for number, a, b in zip(numbers, begin[:-1].tolist(), begin[1:].tolist(), strict=True):
                state = self._graph.state(number)
                accepts = bool(self.recognizer.accepts(state))
                seen = last.get(b - a)
                if seen is None or seen[1] != accepts or not np.array_equal(seen[0], ids[a:b]):
                    seen = last[b - a] = ids[a:b], accepts, self._share(ids[a:b], accepts)
                self._sets[state] = seen[2]
                states.append(state)
                accepting.append(accepts)
                sets.append(seen[2])
            nexts.append(rows.astype(small))
            sizes.append(np.diff(begin))

        reached.on_rows = take
        reached.reach(self._graph.number(self.start))
        begin = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
        self._whole = WholeIndex(self, states, np.array(accepting), sets, begin, np.concatenate(nexts))
        return self._whole

    def save(self, path: str | Path) -> None:
        """Write the whole index to a file, from which `load` makes it again without the recognizer.

        Raises
        ------
        TypeError
            If the recognizer is not tabled: its states cannot be written.
        """
        if not self._tabled:
            raise TypeError(f"only the index of a recognizer with a table can be saved (a Regex, a DFA), not {self!r}")
        whole = self.build_all()
        recognizer: Any = self.recognizer
        seen = np.zeros(len(recognizer.table), bool)
        new = np.array([self.start])
        while new.size:
            seen[new] = True
            targets = np.unique(recognizer.table[new])
            new = targets[~seen[targets] & (targets > 0)]
        size = int(np.flatnonzero(seen)[-1]) + 1
        distinct = {found.key: i for i, found in enumerate(dict.fromkeys(whole._sets))}
        with open(path, "wb") as file:
            np.savez_compressed(
                file,
                format=FORMAT,
                name=self._name,
                vocabulary=_fingerprint(self.vocab),
                start=self.start,
                table=np.where(seen[:size, None], recognizer.table[:size], 0),
                accepting=recognizer.accepting[:size] & seen[:size],
                states=np.array(whole.states, np.int32),
                which=np.array([distinct[found.key] for found in whole._sets], np.int32),
                sets=np.frombuffer(b"".join(distinct), np.uint8),
                set_sizes=np.array([len(key) for key in distinct], np.int64),
                begin=whole._begin,
                next=whole._next,
            )

    @classmethod
    def load(cls, path: str | Path, vocab: VocabularyLike, recognizer: TabledRecognizer | None = None) -> TokenIndex:
        """The index that was saved; nothing is computed again.

        Raises
        ------
        ValueError
            If the file holds no index, or one of another vocabulary, or, where `recognizer` is given, of another
            recognizer.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                data = {key: file[key] for key in file.files}
            name, start, written = str(data["name"]), int(data["start"]), int(data["format"])
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} holds no saved TokenIndex ({error})") from None
        if written != FORMAT:
            raise ValueError(f"{path} is of format {written}, and this version reads {FORMAT}: save the index again")
        stored = _Stored(name, start, data["table"], data["accepting"])
        if recognizer is not None and not _same_language(stored, recognizer):
            raise ValueError(f"{path} is the index of {name}, which is not the language of {recognizer!r}")
        if _fingerprint(vocab) != str(data["vocabulary"]):
            raise ValueError(
                f"{path} is the index of {name} over another vocabulary than this one of {len(vocab.tokens)} tokens"
            )
        index = cls(stored, vocab)
        ends = np.cumsum(data["set_sizes"]).tolist()
        keys = data["sets"].tobytes()
        distinct = [_Set(keys[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
        index._distinct.update((found.key, found) for found in distinct)
        sets = [distinct[i] for i in data["which"].tolist()]
        states = data["states"].tolist()
        index._sets.update(zip(states, sets, strict=True))
        accepting = data["accepting"][data["states"]]
        index._whole = WholeIndex(index, states, accepting, sets, data["begin"], data["next"])
        return index

    # ---- what the above is made of

    def _checked(self, state: State) -> State:
        """`state`, if it can be one of this index."""
        if self._tabled:
            self._graph.number(state)
        return state

    def _find(self, state: State) -> _Set:
        if state is END:
            return self._share(np.zeros(0, np.int32), False)
        state = self._checked(state)
        try:
            accepts = bool(self.recognizer.accepts(state))
            if self._token_mask is None:
                ids, _ = _walk_state(self._graph, self.trie, self._number(state))
            else:
                ids = np.flatnonzero(self._token_mask(state, self.trie)).astype(np.int32)
        except Exception as error:
            error.add_note(f"in TokenIndex.mask of the state {state!r}; is it one of {self!r}?")
            raise
        if not self._tabled and len(self._sets) > NUMBERED:
            self._sets.clear()
        found = self._sets[state] = self._share(ids, accepts)
        return found

    def _number(self, state: State) -> int:
        if isinstance(self._graph, _Numbered) and len(self._graph.states) > NUMBERED:
            self._graph.clear()
        return self._graph.number(state)

    def _share(self, ids: Ints, accepts: bool) -> _Set:
        """The set of `ids`, and eos if `accepts`; there is one of each content."""
        V = len(self.trie.tokens)
        if accepts:
            ids = np.concatenate([ids, self._eos])
        mask = None
        if ids.size * 32 < V:
            key = np.sort(ids).tobytes()
        else:
            mask = np.zeros(V, bool)
            mask[ids] = True
            key = np.packbits(mask).tobytes()
        found = self._distinct.get(key)
        if found is None:
            found = self._distinct[key] = _Set(key)
            if mask is not None:
                self._hold(found, mask)
        return found

    def _narrow(self, found: _Set) -> bool:
        return len(found.key) * 8 < len(self.trie.tokens)

    def _unpack(self, found: _Set) -> Bools:
        V = len(self.trie.tokens)
        if self._narrow(found):
            mask = np.zeros(V, bool)
            mask[np.frombuffer(found.key, np.int32)] = True
        else:
            mask = np.unpackbits(np.frombuffer(found.key, np.uint8), count=V).view(bool)
        return self._hold(found, mask)

    def _hold(self, found: _Set, mask: Bools) -> Bools:
        """Keep a set's mask unpacked, while there is room."""
        mask.flags.writeable = False
        found.mask = mask
        self._unpacked.append(found)
        while len(self._unpacked) * mask.size > MASK_BYTES and len(self._unpacked) > 1:
            self._unpacked.popleft().mask = None
        return mask

    def _step(self, state: State, byte: int) -> State | None:
        found = self.recognizer.step(state, byte)
        return None if self._tabled and found == 0 else found

    def _read(self, state: State, data: bytes) -> tuple[State, int]:
        """The state after as much of `data` as fits, and how much that is."""
        for at, byte in enumerate(data):
            found = self._step(state, byte)
            if found is None:
                return state, at
            state = found
        return state, len(data)

    def _advance(self, state: State, token: int, data: bytes) -> State:
        if state is END:
            raise self._refused(state, token)
        state = self._checked(state)
        if not data:
            if token in self._eos and self.accepts(state):
                return END
            raise self._refused(state, token)
        found, at = self._read(state, data)
        if at < len(data):
            raise self._refused(state, token)
        return found

    def _refused(self, state: State, token: int) -> ValueError:
        V = len(self.trie.tokens)
        if not 0 <= token < V:
            return ValueError(f"token {token} is not in this vocabulary, whose ids are 0 to {V - 1}")
        data = self.trie.tokens[token]
        what = f"token {int(token)} ({'eos' if token in self._eos else repr(data) if data else 'special'})"
        if state is END:
            return ValueError(f"{what} cannot follow: an eos has ended the text")
        head = f"{self._name}: {what} cannot follow state {_short(state)}"
        if data:
            last, at = self._read(state, data)
            where = f"{f'after {data[:at]!r} ' if at else ''}{self._wishes(last)}, not {data[at : at + 1]!r}"
        else:
            where = self._wishes(state)
        ids = self.allowed(state).tolist()
        some = [f"{i} ({self.trie.tokens[i]!r})" if self.trie.tokens[i] else f"{i} (eos)" for i in ids[:4]]
        return ValueError(f"{head}: {where}. Tokens that can: {', '.join(some) or 'none'}{', ...' * (len(ids) > 4)}")

    def _wishes(self, state: State) -> str:
        wanted = self.wanted(state)
        ends = ", or the text must end" if self.accepts(state) else ""
        return f"the next byte must be one of {_ranges(wanted)}{ends}" if wanted else "the text must end"

    def _refuse_gaps(self) -> None:
        """Raise a ValueError if no tokens spell an accepted string: the start must lead to a state that accepts."""
        if self.trie.complete or self.accepts(self.start):
            return
        stack: list[tuple[State, bytes]] = [(self.start, b"")]
        seen = {self.start}
        gap: tuple[State, bytes] | None = None
        while stack:
            state, text = stack.pop()
            ids, ends = _walk_state(self._graph, self.trie, self._number(state))
            _, where = np.unique(ends, return_index=True)
            if not where.size and gap is None:
                gap = state, text
            for i in where.tolist():
                target, data = self._graph.state(int(ends[i])), text + self.trie.tokens[ids[i]]
                if self.recognizer.accepts(target):
                    return
                if target not in seen:
                    seen.add(target)
                    stack.append((target, data))
            if len(seen) > 200:
                return
        if gap is None:
            raise ValueError(f"{self._name}: no sequence of tokens of this vocabulary spells a string that it accepts")
        state, text = gap
        wanted, tokens = self.wanted(state), [token for token in self.trie.tokens if token]
        begin = sum(token[0] in wanted for token in tokens)
        raise ValueError(
            f"{self._name} {_after(text)}: the next byte must be one of {_ranges(wanted)}, and none of the "
            f"{len(tokens)} tokens of this vocabulary "
            + (f"fits, though {begin} begin{'s' * (begin == 1)} with one." if begin else "begins with one.")
        )

    def _graph_distances(self, state: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int32]]:
        """Tokens to acceptance by row, and the row of every state's number."""
        reached = self._reached
        if reached is None:
            self.recognizer.explore()  # type: ignore[union-attr]
            reached = self._reached = _Reached(self._graph, self.trie, math.inf)
        if state >= reached.row_of.size or reached.row_of[state] < 0:
            reached.reach(state)
            accepting = self.recognizer.accepting[reached.states[: reached.num]]  # type: ignore[union-attr]
            self._distances = reached.distances(accepting)
        return self._distances, reached.row_of

    def _search_acceptance(self, state: State) -> float:
        """`tokens_to_accept` for a recognizer without a table, level by level from `state`."""
        if state in self._accept_memo:
            return self._accept_memo[state]
        level, seen, depth = [state], {state}, 0
        while level and not any(self.recognizer.accepts(each) for each in level):
            below: dict[State, None] = {}
            for each in level:
                _, ends = _walk_state(self._graph, self.trie, self._number(each))
                below.update((self._graph.state(end), None) for end in np.unique(ends).tolist())
            level = [each for each in below if each not in seen]
            seen.update(level)
            depth += 1
            if len(seen) > 100_000:
                raise ValueError(f"{self._name}: no end found within {depth} tokens and {len(seen)} states")
        if len(self._accept_memo) > NUMBERED:
            self._accept_memo.clear()
        found = self._accept_memo[state] = depth if level else math.inf
        return found


@dataclass(frozen=True, eq=False, repr=False)
class WholeIndex:
    """All states that tokens reach from the start, as rows: the tokens that fit each, and the rows these lead to.

    Attributes
    ----------
    states : list of S states, the start first
    accepting : (S,) bool ndarray
    """

    _index: TokenIndex
    states: list[State]
    accepting: Bools
    _sets: list[_Set]
    _begin: Ints                                    # (S + 1,)
    _next: Ints                                     # (begin[S],) the tokens of a row in the order of their bytes

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return f"WholeIndex({len(self)} states, {self._next.size} steps, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Of all its arrays; sets that are equal are there once."""
        return self._next.nbytes + self._begin.nbytes + sum(len(found.key) for found in set(self._sets))

    def row(self, i: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The steps from states[i], without eos: (n,) ascending token ids and (n,) rows that they lead to."""
        order = self._index.trie.order
        tokens = order[self._index.mask(self.states[i])[order]].astype(np.int64)
        move = np.argsort(tokens)
        return tokens[move], self._next[self._begin[i] : self._begin[i + 1]][move].astype(np.int64)


class _Stored:
    """A tabled recognizer that was read from a file."""

    def __init__(self, name: str, start: int, table: npt.NDArray[np.int32], accepting: Bools) -> None:
        self.name, self.start, self.table, self.accepting = name, start, table, accepting
        self.ready = np.ones(len(table), bool)

    def __repr__(self) -> str:
        return self.name

    def step(self, state: int, byte: int) -> int | None:
        return self.table.item(state, byte) or None

    def accepts(self, state: int) -> bool:
        return self.accepting.item(state)

    def row(self, state: int) -> npt.NDArray[np.int32]:
        return self.table[state, :]

    def explore(self) -> None:
        pass


def _same_language(a: TabledRecognizer, b: TabledRecognizer) -> bool:
    """Whether no text tells two recognizers apart (Hopcroft & Karp 1971, without their merging)."""
    pairs = [(a.start, b.start)]
    seen = set(pairs)
    while pairs:
        i, j = pairs.pop()
        if (i == 0) != (j == 0) or (i and a.accepts(i) != b.accepts(j)):
            return False
        if i:
            both = np.unique(a.row(i).astype(np.int64) << 32 | b.row(j)).tolist()
            new = {(pair >> 32, pair & 0xFFFFFFFF) for pair in both} - seen
            seen |= new
            pairs += new
    return True


def _ranges(bytes: bytes) -> str:
    """b'0'..b'9', b'a'"""
    runs: list[list[int]] = []
    for byte in bytes:
        if runs and runs[-1][1] == byte - 1:
            runs[-1][1] = byte
        else:
            runs.append([byte, byte])
    shown = [repr(b"%c" % a) + (f"..{b'%c' % b!r}" if b > a else "") for a, b in runs[:8]]
    return ", ".join(shown) + (", ..." if len(runs) > 8 else "")


def _after(text: bytes) -> str:
    """Where in a text an error is; its last bytes if it is long."""
    if not text:
        return "at the start"
    shown = text[-24:]
    try:
        return f"after {'...' if len(text) > 24 else ''}{shown.decode()!r}"
    except UnicodeDecodeError:
        return f"after {'...' if len(text) > 24 else ''}{shown!r}"


def _short(state: State) -> str:
    shown = repr(state)
    return shown if len(shown) <= 60 else f"{shown[:60]}..."
