"""Trie of a vocabulary's bytes: tokens with a common prefix share the nodes of that prefix.

Nodes are numbered in preorder, which is the order of the bytes that lead to them. A *place* numbers them by depth
instead, so that the children of a node are adjacent. The root has no byte; its number is -1, and its place is the last.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llmppl.constraints.constraint import Ints, VocabularyLike, without_bytes
from llmppl.support.arguments import shown
from llmppl.support.locks import cached_property
from llmppl.support.shared import Shared

Ids = npt.NDArray[np.int32]


class Trie(Shared):
    """Trie of the bytes of a vocabulary's tokens.

    Parameters
    ----------
    tokens : sequence of V bytes
    never : ids to leave out; tokens without bytes are also left out

    Attributes
    ----------
    tokens : list of V bytes, b"" where left out
    order : (R,) int32 ndarray
        The ids in the order of their bytes; equal tokens are adjacent.
    byte, depth : (n,) uint8 and uint16 ndarrays
        By node: the byte that leads to it, and the number of bytes before that one.
    first : (n + 1,) uint32 ndarray
        The tokens that end in node i are `order[first[i] : first[i + 1]]`.
    nodes, bytes, first_child, num_children : (n,), (n,), (n + 1,), (n + 1,) int64 ndarrays
        By place: the node, its byte, the place of its first child, and its number of children.
    levels : list of (begin, end)
        The range of places of each depth.
    """

    def __init__(self, tokens: Sequence[bytes], never: Iterable[int] = ()) -> None:
        self.tokens = list(tokens)
        for id in never:
            self.tokens[id] = b""
        V = len(self.tokens)
        length = np.fromiter(map(len, self.tokens), np.int64, V)
        if length.max(initial=0) > 65535:
            raise ValueError(
                f"token {length.argmax()} has {length.max()} bytes; at most 65535 are possible"
            )
        blob = np.frombuffer(b"".join(self.tokens), np.uint8)
        with_bytes = np.flatnonzero(length).tolist()
        order = np.array(sorted(with_bytes, key=self.tokens.__getitem__), np.int64)
        begin = np.cumsum(length) - length
        begin = begin[order]
        length = length[order]
        common = _shared_bytes(blob, begin, length)
        fresh = length - common  # nodes that a token adds
        last = np.cumsum(fresh)
        where = ranges(begin + common, fresh)
        self.order = order.astype(np.int32)
        self.byte = blob[where]
        depth = where - np.repeat(begin, fresh)
        self.depth = depth.astype(np.uint16)
        num_ends = np.bincount(last - 1, minlength=where.size)
        self.first = np.zeros(where.size + 1, np.uint32)
        np.cumsum(num_ends, out=self.first[1:])
        sizes = np.bincount(self.depth, minlength=1)
        cuts = [0, *np.cumsum(sizes).tolist()]
        self.levels = list(itertools.pairwise(cuts))
        self.nodes = np.argsort(self.depth, kind="stable")
        self.bytes = self.byte[self.nodes].astype(np.int64)
        self.num_children = np.zeros(where.size + 1, np.int64)
        self.num_children[-1] = cuts[1]
        for (a, b), (_, c) in itertools.pairwise(self.levels):
            above = self.nodes[a:b]
            parent = np.searchsorted(above, self.nodes[b:c]) - 1
            self.num_children[a:b] = np.bincount(parent, minlength=b - a)
        self.first_child = cuts[1] + np.cumsum(self.num_children) - self.num_children
        self.first_child[-1] = 0
        self.loops: dict[Any, Any] = {}  # memos of those who read the trie

    def __getstate__(self) -> dict[str, Any]:  # loops are found again
        return {**self.__dict__, "loops": {}}

    def __len__(self) -> int:
        return len(self.byte)

    @cached_property
    def alone(self) -> Ints:
        """Bytes that are tokens by themselves, ascending."""
        a, b = self.levels[0]
        nodes = self.nodes[a:b]
        is_end = self.first[nodes + 1] > self.first[nodes]
        return self.bytes[a:b][is_end]

    @cached_property
    def complete(self) -> bool:
        """True if every byte of UTF-8 is a token by itself, so that no text has a dead end."""
        alone = set(self.alone.tolist())
        return alone.issuperset([*range(0xC0), *range(0xC2, 0xF5)])

    @cached_property
    def place(self) -> Ints:
        """Place of every node, and of the root at the end: (n + 1,)."""
        place = np.empty(len(self) + 1, np.int64)
        place[self.nodes] = np.arange(len(self))
        place[-1] = len(self)
        return place

    @cached_property
    def parent(self) -> Ints:
        """Place of the parent, by place: (n,)."""
        places = np.arange(len(self))
        above = np.repeat(places, self.num_children[:-1])
        root = np.full(self.levels[0][1], len(self))
        return np.concatenate([root, above])

    @cached_property
    def skip(self) -> Ints:
        """First node after the subtree of each node: (n + 1,); n for the root."""
        skip = np.full(len(self) + 1, len(self))  # by place
        for a, b in self.levels:
            following = np.append(self.nodes[a + 1 : b], len(self))
            after_parent = skip[self.parent[a:b]]
            skip[a:b] = np.minimum(following, after_parent)
        return skip[self.place]

    def tokens_at(self, nodes: Ints, states: Ids, begin: Ints) -> tuple[Ids, Ids, Ints]:
        """Return the ids of the tokens that end in `nodes`, the states of their nodes, and the new `begin`."""
        first = self.first[nodes].astype(np.int64)
        number = self.first[nodes + 1] - first
        ids = self.order[ranges(first, number)]
        ends = np.append(0, np.cumsum(number))
        return ids, np.repeat(states, number), ends[begin]


def ranges(begin: Ints, size: Ints) -> Ints:
    """Return the concatenation of the ranges begin[i], begin[i] + 1, ..., begin[i] + size[i] - 1."""
    end = size.cumsum()
    shift = (begin - end + size).astype(np.int64, copy=False)
    found: Ints = shift.repeat(size)
    found += np.arange(found.size)
    return found


def _shared_bytes(blob: npt.NDArray[np.uint8], begin: Ints, length: Ints) -> Ints:
    """Return the length of the common prefix of each token with the one before it, in the order of their bytes."""
    shorter = np.minimum(length[1:], length[:-1])
    common = np.zeros(length.size, np.int64)
    alike = np.arange(1, length.size)
    shared = 0
    while alike.size:
        alike = alike[shorter[alike - 1] > shared]
        here = blob[begin[alike] + shared]
        before = blob[begin[alike - 1] + shared]
        alike = alike[here == before]
        shared += 1
        common[alike] = shared
    return common


_tries: weakref.WeakKeyDictionary[Any, Trie] = weakref.WeakKeyDictionary()


def trie_of(vocab: VocabularyLike) -> Trie:
    """Return the trie of a vocabulary; equal vocabularies share one, which lives as long as one of them."""
    if not hasattr(vocab, "tokens"):
        raise TypeError(f"masks are over a Vocabulary, such as lm.vocab, not {shown(vocab, 60)}")
    try:
        found = _tries.get(vocab)
    except TypeError:  # not hashable, or no weak references
        return Trie(vocab.tokens, without_bytes(vocab))
    return found or _tries.setdefault(vocab, Trie(vocab.tokens, without_bytes(vocab)))
