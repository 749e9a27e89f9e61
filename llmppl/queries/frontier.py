"""Frontier of a search: the items of its heap, and an upper bound for strings that were not found yet.

Two items can contribute to one string only if one of their texts begins the other. The mass that a string can still
get from the heap is therefore at most the largest sum along a path of the trie of their texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from enum import IntEnum
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from llmppl.queries.searchspace import Floats, Ints, Node, Space, Start


class Kind(IntEnum):
    """Kind of an item; at equal costs, matches come first."""

    MATCH = 0                                           # a match that ends at a node
    TOKEN = 1                                           # a token after a node, or a root
    REST = 2                                            # all children of a node that were not pushed yet


MATCH, TOKEN, REST = Kind                               # local names: attributes of Kind are slow


class Item(NamedTuple):
    """Entry of the heap, ordered by its first three fields.

    `cost` is minus a log-probability, or minus a perturbed one. `log_prob` is that of the token (TOKEN), of the end of
    the match (MATCH), or of the next token to be pushed (REST).
    """

    cost: float
    kind: Kind
    number: int
    node: Node
    token: int | None                                   # None: the node itself; REST: the last pushed token
    log_prob: float
    width: int                                          # number of children to push when it is expanded
    mass: float = 0.0                                   # REST: log of the probability of its tokens
    one: float = 0.0                                    # REST: the same for tokens that can belong to one text

    @property
    def next_token(self) -> int | None:
        """Token to append to the node before it is expanded; None if there is none."""
        return self.token if self.kind is TOKEN else None

    def open(self, space: Space) -> Node:
        """Return the node to expand."""
        token = self.next_token
        return self.node if token is None else space.child(self.node, token, self.log_prob, -self.cost)

    def log_mass(self) -> float:
        """Return the log-probability, after the prefix, of all texts that continue from here."""
        return self.node.log_prob + (self.mass if self.kind is REST else self.log_prob)

    def log_most(self) -> float:
        """Return an upper bound of the part of `log_mass` that one text can get."""
        return self.node.log_prob + (min(self.mass, self.one) if self.kind is REST else self.log_prob)

    def text(self, space: Space) -> bytes:
        """Return the bytes after the prefix with which every text continues from here."""
        token = self.next_token
        return self.node.data if token is None else self.node.data + space.lm.vocab.tokens[token]

    def later(self, ids: Ints, log_probs: Floats) -> Ints:
        """Return the tokens of `ids` that the item stands for; those of a REST come after the last pushed token."""
        if self.kind is not REST or self.token is None:
            return ids
        least = log_probs[self.token]
        after: Ints = ids[(log_probs[ids] < least) | ((log_probs[ids] == least) & (ids > self.token))]
        return after


class _TextNode:
    """Node of the trie of texts: the items with this text, and the most that one text through here can still get."""

    __slots__ = ("own", "below", "children")

    def __init__(self) -> None:
        self.own: dict[int, float] = {}                 # log-probabilities of the items here
        self.below = -math.inf                          # the largest `best` of the children
        self.children: dict[int, _TextNode] = {}

    @property
    def best(self) -> float:
        return float(reduce(np.logaddexp, self.own.values(), self.below))

    @property
    def empty(self) -> bool:
        return not self.own and not self.children


class StringBound:
    """Upper bound for unknown strings: the largest sum of items whose texts begin each other.

    `base(start)` is the log-probability of a prefix that counts in the order of the search.
    """

    def __init__(self, space: Space, base: Callable[[Start | None], float], items: Iterable[Item]) -> None:
        self.space, self.base = space, base
        self.roots: dict[int, _TextNode] = {}           # id of the start -> trie
        self.num_incomplete = 0                          # items of incomplete prefixes
        for item in items:
            self.add(item)

    def log_most(self, next_cost: float) -> float:
        """Return the bound as a log-probability. Texts of an incomplete prefix have at most -`next_cost`."""
        most = max((node.best for node in self.roots.values()), default=-math.inf)
        return max(most, -next_cost) if self.num_incomplete else most

    def add(self, item: Item) -> None:
        if item.node.start is None:
            self.num_incomplete += 1
            return
        path = self._path(item)
        path[-1].own[item.number] = self.base(item.node.start) + item.log_most()
        for below, node in pairwise(reversed(path)):
            node.below = max(node.below, below.best)

    def remove(self, item: Item) -> None:
        if item.node.start is None:
            self.num_incomplete -= 1
            return
        path, data = self._path(item), item.text(self.space)
        before = path[-1].best
        del path[-1].own[item.number]
        for byte, (below, node) in zip(reversed(data), pairwise(reversed(path)), strict=True):
            changed, was = before == node.below, node.best
            if below.empty:
                del node.children[byte]
            if changed:
                node.below = max((child.best for child in node.children.values()), default=-math.inf)
            before = was
        if path[0].empty:
            del self.roots[id(item.node.start)]

    def _path(self, item: Item) -> list[_TextNode]:
        """Return the nodes from the root to the text of an item; missing nodes are created."""
        path = [self.roots.setdefault(id(item.node.start), _TextNode())]
        for byte in item.text(self.space):
            children = path[-1].children
            if byte not in children:
                children[byte] = _TextNode()
            path.append(children[byte])
        return path
