"""The frontier of a search: what its heap holds, and how probable a string that is not known yet can still be.

The one idea of the bound: only items whose texts begin each other can be parts of one string. So what one string can
still get from the heap is the largest sum along a path of the trie of their texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

from llmppl.queries.searchspace import Floats, Ints, Node, Space, Start, log_sum


class Kind(IntEnum):
    """What an item stands for; of equal costs, matches come out first."""

    MATCH = 0                                           # a node whose text is one, with what must come after it
    TOKEN = 1                                           # a token after a node, or a root
    REST = 2                                            # the tokens after a node that are yet to be pushed


MATCH, TOKEN, REST = Kind                               # looked up in Kind, they would take longer than the rest


class Item(NamedTuple):
    """An entry of the heap, in the order of its first three fields.

    `cost` is what the search goes by: minus a log-probability, or minus a perturbed one. `log_prob` is of the token
    (TOKEN), of what must come after the text (MATCH), or of the next token to be pushed (REST).
    """

    cost: float
    kind: Kind
    number: int
    node: Node
    token: int | None                                   # None: the node itself; REST: the last token that was pushed
    log_prob: float
    width: int                                          # tokens to push at once when it is opened
    mass: float = 0.0                                   # REST: log of the probability of the tokens to come
    one: float = 0.0                                    # REST: the same of those that can be parts of one text

    @property
    def next_token(self) -> int | None:
        """The token behind which a text goes on; None where that is the node itself."""
        return self.token if self.kind is TOKEN else None

    def open(self, space: Space) -> Node:
        """The node that is looked at next."""
        token = self.next_token
        return self.node if token is None else space.child(self.node, token, self.log_prob, -self.cost)

    def log_mass(self) -> float:
        """Log-probability, after the prefix, that a text goes on from here."""
        return self.node.log_prob + (self.mass if self.kind is REST else self.log_prob)

    def log_most(self) -> float:
        """The same of what can be parts of one text."""
        return self.node.log_prob + (min(self.mass, self.one) if self.kind is REST else self.log_prob)

    def text(self, space: Space) -> bytes:
        """What is spelled after the prefix, in every text that goes on from here."""
        token = self.next_token
        return self.node.data if token is None else self.node.data + space.lm.vocab.tokens[token]

    def later(self, ids: Ints, log_probs: Floats) -> Ints:
        """Of the tokens after a node, those of a REST: less probable than the last one that was pushed."""
        if self.kind is not REST or self.token is None:
            return ids
        least = log_probs[self.token]
        after: Ints = ids[(log_probs[ids] < least) | ((log_probs[ids] == least) & (ids > self.token))]
        return after


class _TextNode:
    """A text in the trie of texts: what the heap holds here, and the most that one text through here can still get."""

    __slots__ = ("own", "below", "children")

    def __init__(self) -> None:
        self.own: dict[int, float] = {}                 # log-probabilities, by item
        self.below = -math.inf                          # the most of all children
        self.children: dict[int, _TextNode] = {}

    @property
    def best(self) -> float:
        return log_sum([*self.own.values(), self.below])

    @property
    def empty(self) -> bool:
        return not self.own and not self.children


class StringBound:
    """How probable a string that is not known yet can be: the largest sum of items whose texts begin each other.

    `base(start)` is the log-probability that a prefix has in the order of the search.
    """

    def __init__(self, space: Space, base: Callable[[Start | None], float], items: Iterable[Item]) -> None:
        self.space, self.base = space, base
        self.roots: dict[int, _TextNode] = {}           # by the id of the start
        self.num_under_way = 0                          # items of prefixes
        for item in items:
            self.add(item)

    def log_most(self, next_cost: float) -> float:
        """Log-probability that no unknown string exceeds; a prefix has one path only, and none is before the next."""
        most = max((node.best for node in self.roots.values()), default=-math.inf)
        return max(most, -next_cost) if self.num_under_way else most

    def add(self, item: Item) -> None:
        if item.node.start is None:
            self.num_under_way += 1
            return
        path = self._path(item)
        path[-1].own[item.number] = self.base(item.node.start) + item.log_most()
        for below, node in pairwise(reversed(path)):
            node.below = max(node.below, below.best)

    def remove(self, item: Item) -> None:
        if item.node.start is None:
            self.num_under_way -= 1
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
        """The nodes from the root to the text of an item, made where they are missing."""
        path = [self.roots.setdefault(id(item.node.start), _TextNode())]
        for byte in item.text(self.space):
            children = path[-1].children
            if byte not in children:
                children[byte] = _TextNode()
            path.append(children[byte])
        return path
