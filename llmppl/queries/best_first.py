"""Best-first search for the most probable strings of a language, in exact order, and its search space.

A *node* is a context of the model with a state of the language. A heap holds partial texts, the most probable first.
Expanding a node takes one row of the language model; rows are computed in batches. The children of a node are pushed a
few at a time. One item stands for the others, with the cost of the best of them and the mass of all, so memory does not
grow with the vocabulary. A match goes through the heap too. It is returned when no other item can be better, so the
order does not depend on the batch size.

Many token sequences spell one string. Strings are ordered by the sum over these sequences (`_total`). A string is
returned when neither a known nor an unknown string can have a larger sum (`StringBound`).

Sources: Kuchnik et al. 2023 (ReLM), section 3.3; Dijkstra's algorithm; Kool et al. 2019, "Stochastic Beams and Where to
Find Them", for `DistinctSearch`.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial, reduce
from typing import Any, NamedTuple

import numpy as np

from llmppl.constraints import DFA
from llmppl.constraints.constraint import Index
from llmppl.constraints.vocabulary import Canonical, CanonicalState, Text
from llmppl.distributions import NO_RULE, DecisionRule, Floats, Ints, logsumexp
from llmppl.lm import CachedTransformer, Context
from llmppl.queries.compile import Branch, Compiled
from llmppl.queries.matches import Match
from llmppl.support.graphs import Memo
from llmppl.support.locks import cached_property
from llmppl.support.runtime import Runtime

MAX_PUSHED = 16  # children pushed at once; later four times as many
MAX_BARREN_EXPANSIONS = 10_000  # in a row without a match, before an error
ROUNDING = 1e-12  # smaller masses outside the language count as zero


# ---- the search space


class Start(NamedTuple):
    """Prefix string: its context, the log-probability of its tokens, and the language after it."""

    prefix: str
    context: Context
    log_prob: float
    part: Branch
    base: float = 0.0  # the part of `log_prob` that counts in the order of a search


class Node(NamedTuple):
    """Partial text from which a search continues.

    `masks` is the index of the language, and `log_prob` is the log-probability of the tokens after the prefix.
    """

    start: Start
    context: Context
    masks: Index
    state: Any
    canonical: CanonicalState | None = None  # None if tokens need not be canonical
    log_prob: float = 0.0
    noise: float = 0.0  # maximum of the perturbed log-probabilities below
    data: bytes = b""  # the text after the prefix
    depth: int = 0


@dataclass
class Space:
    """Search space: the language after each prefix, the distribution of the next token, and the end of a match.

    With `first`, nothing follows a match: if one match begins another, only the shorter one counts.
    """

    lm: CachedTransformer
    compiled: Compiled
    rule: DecisionRule = NO_RULE
    end: str = "eos"
    max_tokens: int | None = None
    only_canonical: bool = False
    special: bool = True
    first: bool = False

    @cached_property
    def counts_first(self) -> bool:
        """True if the first token of a context counts, because the model reads the empty context, which is a prefix."""
        return "" in self.compiled.prefixes and not len(self.lm.context())

    @cached_property
    def canonical(self) -> Any:
        """Masks that exclude tokens which are not canonical; None if the tokenizer has no rules to read."""
        return _canonical(self.lm.tokenizer, self.lm.vocab)

    @cached_property
    def indices(self) -> Memo[DFA, Index]:
        """Indices of the languages; roots share them."""
        vocab = self.lm.vocab  # not `self`, so that no cycle keeps the language model
        return Memo(lambda language: language.index(vocab))

    # ---- prefixes

    def start(self, prefix: str) -> Start:
        context = self.lm.context(prefix, special=self.special)
        return Start(prefix, context, 0.0, self.compiled.prefixes[prefix])

    def starts(self) -> list[Start]:
        """Return the prefix strings with their log-probabilities, in one round."""
        starts = [*map(self.start, self.compiled.prefixes)]
        num_given = int(not self.counts_first)

        def score(i: int) -> None:
            context = starts[i].context
            given = self.lm.at(context.tokens[:num_given])
            starts[i] = starts[i]._replace(log_prob=context.log_prob_since(given))

        names = [f"prefix {start.prefix!r}" for start in starts]
        Runtime().run([partial(score, i) for i in range(len(starts))], names)
        return starts

    def root(self, start: Start) -> Node:
        """Return the node after a prefix."""
        after = None
        if self.only_canonical and self.canonical:
            after = self.canonical.after(start.context.tokens)
        return Node(start, start.context, self.indices[start.part.follow], start.part.start, after)

    # ---- children

    def log_probs(self, nodes: list[Node], needed: list[bool]) -> list[Floats]:
        """Return the log-probabilities of the next token after each node, (V,) each, in one round.

        They are zeros where they are not needed, and for the first token of a context, unless it counts.
        """
        dists = {}
        for i, (node, need) in enumerate(zip(nodes, needed, strict=True)):
            if need and (node.depth or len(node.context) or self.counts_first):
                dists[i] = node.context.next_token()
        rows: list[Floats] = [np.zeros(len(self.lm.vocab))] * len(nodes)
        for i, dist in dists.items():
            rows[i] = self.rule(dist).log_probs()
        return rows

    def inside(self, node: Node) -> Ints:
        """Return the tokens after a node that stay in the language, without eos."""
        ids = node.masks.allowed(node.state)
        if node.masks.accepts(node.state):
            ids = ids[~np.isin(ids, self.lm.vocab.eos_ids)]
        return ids

    def allowed(self, node: Node) -> Ints:
        """Return the tokens after a node that are searched; none if the model's context is full."""
        if (
            node.depth == self.max_tokens
            or node.context.room == 0
            or (self.first and self.accepts(node))
        ):
            return np.zeros(0, np.int64)
        ids = self.inside(node)
        if node.canonical is not None:
            ids = ids[self.canonical.mask(node.canonical)[ids]]
        return ids

    def child(self, node: Node, token: int, log_prob: float, noise: float = 0.0) -> Node:
        canonical = node.canonical
        if canonical is not None:
            canonical = self.canonical.advance(canonical, token)
        return Node(
            node.start,
            node.context + token,
            node.masks,
            node.masks.advance(node.state, token),
            canonical,
            node.log_prob + log_prob,
            noise,
            node.data + self.lm.vocab.tokens[token],
            node.depth + 1,
        )

    def accepts(self, node: Node) -> bool:
        """Return True if the text of a node is a match."""
        if not node.masks.accepts(node.state):
            return False
        text = node.data.decode()
        ignored = self.compiled.ignored
        start = node.start
        if ignored is not None and text in ignored:
            return False
        if not self.only_canonical:
            return True
        own = self.lm.context(start.prefix + text, special=self.special)
        if start.prefix or not text:
            return own == node.context
        return own.tokens in (
            node.context.tokens,
            node.context.tokens[len(start.context) :],
        )  # "" has a BOS

    def ending(self, node: Node, log_probs: Floats) -> float:
        """Return the log-probability that a match ends at a node; end="prefix" ignores `log_probs`."""
        if self.end == "prefix":
            return 0.0
        if self.end == "eos":
            return float(logsumexp(log_probs[list(self.lm.vocab.eos_ids)]))
        return float(logsumexp(np.delete(log_probs, self.inside(node))))

    def match(
        self, node: Node, log_prob: float, upper: float | None = None, *, log_weight: float = 0.0
    ) -> Match:
        """Return the match that ends at a node; `log_prob` is that of the whole part after the prefix."""
        start = node.start
        text = Text(start.prefix.encode() + node.data)
        tokens = tuple(node.context.tokens[len(start.context) :])
        log_joint = start.log_prob + log_prob
        if upper is None:
            upper = log_prob
        edits = (
            self.compiled.alignments[start.part, node.data] if self.compiled.edits.max_cost else ()
        )
        return Match(text, start.prefix, tokens, log_prob, upper, log_joint, log_weight, edits)


@lru_cache(2)
def _canonical(tokenizer: Any, vocab: Any) -> Canonical | None:
    return Canonical(tokenizer, vocab) if hasattr(tokenizer, "backend_tokenizer") else None


# ---- the heap

MATCH, TOKEN, REST = range(3)  # kinds of items; at equal costs, matches come first


class Item(NamedTuple):
    """Entry of the heap, ordered by its first three fields.

    A MATCH ends at its node. A TOKEN is the node's child by `token`, or the node itself if that is None. A REST is all
    children after `token`, the last one that was pushed. `cost` is minus a log-probability, or minus a perturbed one.
    """

    cost: float
    kind: int
    number: int
    node: Node
    token: int | None
    log_prob: float  # of the end, of the token, or of the best token of a REST
    width: int  # number of children to push when it is expanded
    mass: float  # log-probability, after the node, of all texts from here
    most: float  # upper bound of the part of `mass` that one text can get
    data: bytes  # every text continues with it after the prefix

    def open(self, space: Space) -> Node:
        """Return the node to expand."""
        if self.kind is not TOKEN or self.token is None:
            return self.node
        return space.child(self.node, self.token, self.log_prob, -self.cost)

    def later(self, ids: Ints, log_probs: Floats) -> Ints:
        """Return the tokens of `ids` that the item stands for; those of a REST come after the last pushed token."""
        if self.kind is not REST or self.token is None:
            return ids
        own = log_probs[ids]
        least = log_probs[self.token]
        after: Ints = ids[(own < least) | ((own == least) & (ids > self.token))]
        return after


@dataclass(slots=True)
class _TextNode:
    """Node of the trie of texts: the items with this text, and the most that one text through here can still get."""

    own: dict[int, float] = field(default_factory=dict)  # log-probabilities of the items here
    children: dict[int, _TextNode] = field(default_factory=dict)
    best: float = -math.inf


class StringBound:
    """Upper bound for unknown strings: the largest sum of items whose texts begin each other.

    Two items can contribute to one string only if one of their texts begins the other. So the mass that a string can
    still get is at most the largest sum along a path of the trie of their texts.
    """

    def __init__(self) -> None:
        self.root = _TextNode()  # its children are the starts, by their id

    def put(self, item: Item, *, remove: bool = False) -> None:
        """Add an item, or remove it."""
        keys = (id(item.node.start), *item.data)
        path = [self.root]
        for key in keys:
            path.append(path[-1].children.setdefault(key, _TextNode()))
        path[-1].own[item.number] = item.node.start.base + (item.node.log_prob + item.most)
        if remove:
            del path[-1].own[item.number]
        for i, node in reversed([*enumerate(path)]):
            before = node.best
            below = max([child.best for child in node.children.values()], default=-math.inf)
            node.best = float(reduce(np.logaddexp, node.own.values(), below))
            if node.best == before:
                return
            if i and node.best == -math.inf:  # nothing is left below
                del path[i - 1].children[keys[i - 1]]


# ---- the search


class Search:
    """Matches of a query, the most probable first. The search can be stopped and continued at any time.

    `order`, `batch` and `max_expansions` are those of `Query.best`.
    """

    def __init__(self, space: Space, order: str, batch: int, max_expansions: int | None) -> None:
        self.space = space
        self.order = order
        self.batch = batch
        self.max_expansions = max_expansions
        self.expansions = 0  # next-token distributions
        self.fruitful = 0  # those before the last match
        self.heap: list[Item] = []
        self.bound: StringBound | None = None
        self.found_mass = 0.0  # of all matches, each token sequence counted by itself
        self._numbers = itertools.count()
        self._known = set[tuple[int, bytes]]()  # strings already summed: (id of start, text)

    def add(self, start: Start) -> None:
        """Search after one more prefix."""
        if self.order == "joint":
            start = start._replace(base=start.log_prob)
        self._push([self._root(self.space.root(start))])

    def add_all(self) -> None:
        """Search after every prefix."""
        for start in self.space.starts():
            self.add(start)

    def _root(self, node: Node) -> Item:
        return self._item(TOKEN, node, None, 0.0)

    def _item(
        self, kind: int, node: Node, token: int | None, log_prob: float, cost: float | None = None
    ) -> Item:
        data = node.data
        if token is not None:
            data += self.space.lm.vocab.tokens[token]
        if cost is None:
            cost = -(node.start.base + node.log_prob + log_prob)
        return Item(
            cost,
            kind,
            next(self._numbers),
            node,
            token,
            log_prob,
            MAX_PUSHED,
            log_prob,
            log_prob,
            data,
        )

    def _push(self, items: list[Item]) -> None:
        for item in items:
            heapq.heappush(self.heap, item)
            if self.bound is not None:
                self.bound.put(item)

    def expand(self) -> None:
        """Expand the best nodes of the heap, up to `batch` of them, in one round."""
        space = self.space
        opened = []
        nodes = []
        needed = []
        for item in self._pop_batch():
            node = item.open(space)
            ids = space.allowed(node)
            ends = item.kind is TOKEN and space.accepts(node)
            opened.append((item, ids, ends))
            nodes.append(node)
            needed.append(ids.size > 0 or (ends and space.end != "prefix"))
        self.expansions += sum(needed)
        rows = space.log_probs(nodes, needed)
        for (item, ids, ends), node, log_probs in zip(opened, nodes, rows, strict=True):
            if self.bound is not None:
                self.bound.put(item, remove=True)
            ending = space.ending(node, log_probs) if ends else -math.inf
            self._follow(item, node, ids, ending, log_probs)

    def _pop_batch(self) -> list[Item]:
        """Pop the best items of the heap that can be expanded, up to `batch` of them."""
        matches = []
        items = list[Item]()
        while self.heap and len(items) < self.batch:
            item = heapq.heappop(self.heap)
            if item.kind is MATCH:
                matches.append(item)
            else:
                items.append(item)
        for match in matches:
            heapq.heappush(self.heap, match)
        return items

    def _follow(self, item: Item, node: Node, ids: Ints, ending: float, log_probs: Floats) -> None:
        """Push the match that ends at a node with log-probability `ending`, and the children of the node."""
        new = self._ended(node, ending)
        ids = item.later(ids, log_probs)
        ids = ids[log_probs[ids] > -np.inf]
        if ids.size > item.width + 1:
            ids, rest = self._split(node, ids, log_probs, item.width)
            new.append(rest)
        children = zip(ids.tolist(), log_probs[ids].tolist(), strict=True)
        self._push(new + [self._item(TOKEN, node, *child) for child in children])

    def _ended(self, node: Node, ending: float, cost: float | None = None) -> list[Item]:
        """Return the item of the match that ends at a node, and count its mass; none if it has no probability."""
        if ending == -math.inf:
            return []
        self.found_mass += math.exp(node.start.base + node.log_prob + ending)
        return [self._item(MATCH, node, None, ending, cost)]

    def _split(self, node: Node, ids: Ints, log_probs: Floats, width: int) -> tuple[Ints, Item]:
        """Return the `width` most probable of some tokens, and one item for all others."""
        own = log_probs[ids]
        best = np.argpartition(-own, width)[: width + 1]
        best = np.flatnonzero(own >= own[best].min())  # ties: lower ids first
        best = best[np.lexsort((ids[best], -own[best]))][: width + 1]
        chosen = best[:width]
        following = float(own[best[width]])
        others = np.delete(ids, chosen)
        mass = one = float(logsumexp(log_probs[others]))
        if self.bound is not None:  # tokens of one text begin each other: their lengths differ
            one = math.log(np.unique(self.space.lm.vocab.lengths[others]).size) + following
        item = self._item(REST, node, int(ids[chosen[-1]]), following)
        return ids[chosen], item._replace(
            width=4 * width, mass=mass, most=min(mass, one), data=node.data
        )

    # ---- the rest of the search space

    def open_items(self) -> tuple[list[Item], list[float]]:
        """Return the items that can still be expanded, and the log-probability of all texts that continue from each."""
        items = [item for item in self.heap if item.kind is not MATCH]
        return items, [item.node.start.base + (item.node.log_prob + item.mass) for item in items]

    def open_mass(self) -> float:
        """Return the total probability of all texts that were not searched yet."""
        return float(np.exp(self.open_items()[1]).sum())

    def given_up(self) -> bool:
        """Return True at `max_expansions`; without it, raise a ValueError after too many without a match."""
        if self.max_expansions is not None:
            return self.expansions >= self.max_expansions
        barren = self.expansions - self.fruitful
        if barren < MAX_BARREN_EXPANSIONS:
            return False
        kind = "further match" if self.fruitful else "match"
        raise ValueError(
            f"no {kind} in {barren:,} expansions; further matches have probability {self.open_mass():.2g} at most, "
            "all together. To search on, give a larger max_expansions. A rule or max_tokens leave less to search"
        )

    # ---- matches

    def sequences(self) -> Iterator[Match]:
        """Yield all token sequences, the most probable first."""
        for item in self.matched():
            yield self.space.match(item.node, item.node.log_prob + item.log_prob)

    def matched(self) -> Iterator[Item]:
        """Yield the matches as they reach the top of the heap."""
        found = False
        while self.heap:
            if self.heap[0].kind is MATCH:
                found = True
                self.fruitful = self.expansions
                yield heapq.heappop(self.heap)
            elif self.given_up():
                return
            else:
                self.expand()
        if (
            self.space.only_canonical
            and not found
            and self.space.rule == NO_RULE
            and self.space.max_tokens is None
        ):
            raise ValueError(
                "no text of the language is the tokenizer's own encoding after that of the prefix; "
                'tokenization="all" takes any tokens that spell it'
            )

    def strings(self, tolerance: float) -> Iterator[Match]:
        """Yield every string once, with the sum over its token sequences."""
        self.bound = StringBound()
        for item in self.heap:
            self.bound.put(item)
        ready: list[tuple[float, int, Match]] = []  # known, not yet returned
        while self.heap or ready:
            while self.heap and self.heap[0].kind is MATCH:
                item = heapq.heappop(self.heap)
                self.bound.put(item, remove=True)
                for match in self.summed([item], tolerance):
                    heapq.heappush(
                        ready, (-(item.node.start.base + match.log_prob_upper), item.number, match)
                    )
            if ready and self.bound.root.best <= -ready[0][0]:
                self.fruitful = self.expansions
                yield heapq.heappop(ready)[2]
            elif self.given_up():
                return
            else:
                self.expand()

    def summed(self, items: Iterable[Item], tolerance: float) -> Iterator[Match]:
        """Yield the new strings among some matches, with the sums over all their token sequences."""
        for item in items:
            start = item.node.start
            data = item.node.data
            if (id(start), data) not in self._known:
                self._known.add((id(start), data))
                yield self.space.match(
                    item.node, *_total(self.space, start, data, self.batch, tolerance)
                )


def _total(
    space: Space, start: Start, data: bytes, batch: int, tolerance: float
) -> tuple[float, float]:
    """Return a lower and an upper bound of the log of the summed probability of all token sequences for `data`.

    The mass that is left out is at most `tolerance` times the mass that is found.
    """
    vocab = space.lm.vocab
    longest = int(vocab.lengths.max())
    log_tolerance = math.log(tolerance) if tolerance else -math.inf
    found = [-math.inf]
    left = [space.root(start)]
    log_left = 0.0
    while left and log_left > log_tolerance + logsumexp(found):
        left.sort(key=operator.attrgetter("log_prob"))
        nodes = left[-batch:]
        del left[-batch:]
        rows = space.log_probs(
            nodes, [node.data != data or space.end != "prefix" for node in nodes]
        )
        for node, log_probs in zip(nodes, rows, strict=True):
            if node.data == data:
                found.append(node.log_prob + space.ending(node, log_probs))
            elif node.depth != space.max_tokens:
                rest = data[len(node.data) :][:longest]
                for n in range(1, len(rest) + 1):
                    for token in vocab.ids_by_bytes.get(rest[:n], ()):
                        if log_probs[token] > -math.inf:
                            left.append(space.child(node, token, float(log_probs[token])))
        log_left = logsumexp([node.log_prob for node in left])
    return logsumexp(found), logsumexp([*found, log_left])


class DistinctSearch(Search):
    """Matches of a query, drawn one by one without replacement: a best-first search by perturbed log-probabilities.

    The maximum of the perturbed log-probabilities below a node is drawn first, and then divided among its children.
    Matches therefore come in the order of a Gumbel race.
    """

    def __init__(self, *options: Any, rng: np.random.Generator) -> None:
        super().__init__(*options)
        self.rng = rng

    def _root(self, node: Node) -> Item:
        noise = float(self.rng.gumbel(node.start.base))
        return self._item(TOKEN, node._replace(noise=noise), None, 0.0, -noise)

    def _follow(self, item: Item, node: Node, ids: Ints, ending: float, log_probs: Floats) -> None:
        """Push the children; texts that leave the language compete for the maximum, and are dropped."""
        costs = -self._divide(node, np.append(log_probs[ids], ending))
        ended = self._ended(node, ending, float(costs[-1]))
        children = zip(ids.tolist(), log_probs[ids].tolist(), costs.tolist(), strict=False)
        self._push(
            ended + [self._item(TOKEN, node, *child) for child in children if child[1] > -math.inf]
        )

    def _divide(self, node: Node, log_probs: Floats) -> Floats:
        """Draw the perturbed log-probability of each child; the maximum of these and of leaving is `node.noise`."""
        left = -math.expm1(min(0.0, logsumexp(log_probs)))
        log_probs = np.append(log_probs, math.log(left) if left > ROUNDING else -math.inf)
        base = node.start.base + node.log_prob
        with np.errstate(divide="ignore", invalid="ignore"):
            noisy = base + log_probs + self.rng.gumbel(size=log_probs.size)
            shifted = node.noise - noisy + np.log1p(-np.exp(noisy - noisy.max()))
            divided: Floats = (
                node.noise - np.maximum(0.0, shifted) - np.log1p(np.exp(-np.abs(shifted)))
            )
        return divided[:-1]

    def strings(self, tolerance: float) -> Iterator[Match]:
        """Yield every string once; the first spelling has the maximum of all its spellings."""
        return self.summed(self.matched(), tolerance)
