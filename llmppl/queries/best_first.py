"""Best-first search for the most probable strings of a language, in exact order.

A heap holds partial texts, the most probable first. A *node* is a context with its state of the language; expanding it
takes one row of the language model, and rows are computed in batches. The children of a node are pushed a few at a
time. One item stands for the remaining ones: it has the cost of the best of them and the mass of all, so memory does
not grow with the vocabulary. A match goes through the heap too, and is returned when no other item can be better. The
order therefore does not depend on the batch size.

Many token sequences spell one string. Strings are ordered by the sum over these sequences (`_total`). A string is
returned when neither a known nor an unknown string can have a larger sum (`frontier.StringBound`).

Sources: Kuchnik et al. 2023 (ReLM), section 3.3; Dijkstra's algorithm.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from llmppl.distributions import NO_RULE, logsumexp
from llmppl.queries.compile import MAX_LISTED_PREFIXES
from llmppl.queries.frontier import MATCH, REST, TOKEN, Item, Kind, StringBound
from llmppl.queries.matches import Match
from llmppl.queries.searchspace import Floats, Ints, Node, Space, Start

MAX_PUSHED = 16                                         # children pushed at once; later four times as many
MAX_BARREN_EXPANSIONS = 10_000                          # in a row without a match, before an error

NOTHING: Floats = np.zeros(0)                           # for a node that needs no row


class _Opened(NamedTuple):
    """Item to expand: its node, the allowed tokens, and True if it is a match and if it needs a row of the model."""

    item: Item
    node: Node
    ids: Ints
    accepts: bool
    needs_row: bool


class Search:
    """Matches of a query, the most probable first. The search can be stopped and continued at any time.

    Parameters
    ----------
    order : "joint" or "conditional"
        By the probability of prefix and match, or of the match given its prefix.
    batch : int
        Number of nodes to expand together.
    width : int
        Number of children of a node to push at once.
    max_expansions : int, optional
        Stop after so many; if None, MAX_BARREN_EXPANSIONS in a row without a match are an error.

    Attributes
    ----------
    expansions : int
        Number of nodes whose next-token distribution was computed.
    num_found : int
        Number of matches, each token sequence counted by itself.
    found_mass : float
        Sum of their probabilities.
    """

    lists_prefixes = False                              # True if all prefixes must be known at the start

    def __init__(
        self, space: Space, *, order: str = "joint", batch: int = 16, width: int = MAX_PUSHED,
        max_expansions: int | None = None,
    ) -> None:  # fmt: skip
        self.space, self.order, self.batch, self.width = space, order, batch, width
        self.max_expansions = max_expansions
        self.expansions = self.fruitful = 0             # fruitful: those before the last match
        self.heap: list[Item] = []
        self.bound: StringBound | None = None
        self.num_found, self.found_mass = 0, 0.0
        self._numbers = itertools.count()
        self._known = set[tuple[int, bytes]]()          # strings already summed: (id of start, text)

    # ---- the heap

    def add(self, start: Start) -> None:
        """Search after one more prefix."""
        self.push(TOKEN, self.space.root(start), None, 0.0, width=self.width)

    def add_all(self) -> None:
        """Search after every prefix; if there are many, the search finds the prefixes itself, most probable first."""
        starts = self.space.starts()
        if starts is not None:
            for start in starts:
                self.add(start)
        elif self.order == "conditional" or self.lists_prefixes:
            raise ValueError(
                f"the prefix has more than {MAX_LISTED_PREFIXES} strings, which can be searched in their joint order "
                f'only: leave order="joint" and do not ask for distinct samples, or give a prefix with fewer strings'
            )
        else:
            self.push(TOKEN, self.space.prefix_root(), None, 0.0, width=self.width)

    def base(self, start: Start | None) -> float:
        """Return the log-probability of a prefix that counts in the order of the search."""
        return 0.0 if start is None or self.order == "conditional" else start.log_prob

    def push(
        self, kind: Kind, node: Node, token: int | None, log_prob: float, *, width: int = 0, mass: float = 0.0,
        one: float = 0.0,
    ) -> None:  # fmt: skip
        cost = -(self.base(node.start) + node.log_prob + log_prob)
        item = Item(cost, kind, next(self._numbers), node, token, log_prob, width, mass, one)
        heapq.heappush(self.heap, item)
        if self.bound is not None:
            self.bound.add(item)

    def expand(self) -> None:
        """Expand the best nodes of the heap, up to `batch` of them, in one round."""
        space, opened = self.space, list(map(self._open, self._pop_batch()))
        asked = [each.node for each in opened if each.needs_row]
        found = iter(space.log_probs(asked))
        self.expansions += len(asked)
        for item, node, ids, accepts, needs_row in opened:
            log_probs = next(found) if needs_row else NOTHING
            if self.bound is not None:
                self.bound.remove(item)
            if node.start is None and accepts:          # a prefix is complete
                self.add(space.start(node.data.decode(), node.log_prob))
                accepts = False
            self.follow(item, node, ids, space.ending(node, log_probs) if accepts else -math.inf, log_probs)

    def _open(self, item: Item) -> _Opened:
        node = item.open(self.space)
        ids, accepts = self.space.allowed(node), item.kind is TOKEN and self.space.accepts(node)
        return _Opened(item, node, ids, accepts, ids.size > 0 or (accepts and self.space.end != "prefix"))

    def _pop_batch(self) -> list[Item]:
        """Pop the best items of the heap that can be expanded, up to `batch` of them."""
        matches, items = list[Item](), list[Item]()
        while self.heap and len(items) < self.batch:
            item = heapq.heappop(self.heap)
            (matches if item.kind is MATCH else items).append(item)
        for item in matches:
            heapq.heappush(self.heap, item)
        return items

    def follow(self, item: Item, node: Node, ids: Ints, ending: float, log_probs: Floats) -> None:
        """Push the match that ends at a node with log-probability `ending`, and the children of the node."""
        if ending > -math.inf:
            self.push(MATCH, node, None, ending)
            self.count(node, ending)
        ids = item.later(ids, log_probs)
        ids = ids[log_probs[ids] > -np.inf]
        if ids.size > item.width + 1:
            ids = self._push_rest(node, ids, log_probs, item.width)
        for token, log_prob in zip(ids.tolist(), log_probs[ids].tolist(), strict=True):
            self.push(TOKEN, node, token, log_prob, width=self.width)

    def _push_rest(self, node: Node, ids: Ints, log_probs: Floats, width: int) -> Ints:
        """Return the `width` most probable of some tokens, and push one item for all others."""
        own = log_probs[ids]
        best = np.argpartition(-own, width)[: width + 1]
        best = np.flatnonzero(own >= own[best].min())   # ties: lower ids first
        best = best[np.lexsort((ids[best], -own[best]))][: width + 1]
        chosen, following = best[:width], float(own[best[width]])
        rest = np.ones(ids.size, bool)
        rest[chosen] = False
        mass, one = float(np.logaddexp.reduce(own[rest])), 0.0
        if self.bound is not None:                      # tokens of one text begin each other: their lengths differ
            one = math.log(np.unique(self.space.lm.vocab.lengths[ids[rest]]).size) + following
        self.push(REST, node, int(ids[chosen[-1]]), following, width=4 * width, mass=mass, one=one)
        best_ids: Ints = ids[chosen]
        return best_ids

    def count(self, node: Node, ending: float) -> None:
        """Count a match and its mass."""
        self.num_found += 1
        self.found_mass += math.exp(self.base(node.start) + node.log_prob + ending)

    # ---- the rest of the search space

    def open_items(self) -> list[Item]:
        """Return the items that can still be expanded."""
        return [item for item in self.heap if item.kind is not MATCH]

    def log_mass(self, item: Item) -> float:
        """Return the log-probability of all texts that continue from an item."""
        return self.base(item.node.start) + item.log_mass()

    def open_mass(self) -> float:
        """Return the total probability of all texts that were not searched yet."""
        return float(np.exp(list(map(self.log_mass, self.open_items()))).sum())

    def given_up(self, log_bound: float = math.inf) -> bool:
        """Return True at `max_expansions`; without it, raise ValueError after too many. No match exceeds the bound."""
        if self.max_expansions is not None:
            return self.expansions >= self.max_expansions
        barren = self.expansions - self.fruitful
        if barren < MAX_BARREN_EXPANSIONS:
            return False
        more = "further match" if self.fruitful else "match"
        bound = f", and none of it above {math.exp(log_bound):.2g}" if log_bound < math.inf else ""
        raise ValueError(
            f"no {more} in {barren:,} expansions; further matches have probability "
            f"{self.open_mass():.2g} at most, all together{bound}. To search on, give a larger max_expansions, such as "
            f"{10 * MAX_BARREN_EXPANSIONS:,} (cached contexts are not run again). rule=Rule(top_k=...) or max_tokens= "
            f"leave less to search, best(beam_width=...) searches the best contexts only, and probability(..., runs=0) "
            f"bounds all matches together"
        )

    # ---- matches

    def sequences(self) -> Iterator[Match]:
        """Return an iterator over all token sequences, the most probable first."""
        return map(self.match, self.matched())

    def matched(self) -> Iterator[Item]:
        """Yield the matches as they reach the top of the heap."""
        while self.heap:
            if self.heap[0].kind is MATCH:
                self.fruitful = self.expansions
                yield heapq.heappop(self.heap)
            elif self.given_up(self.log_bound()):
                return
            else:
                self.expand()
        bounded = self.space.rule != NO_RULE or self.space.max_tokens is not None
        if self.space.only_canonical and not bounded and not self.num_found:
            raise ValueError(
                "no text of the language is the tokenizer's own encoding after that of the prefix; "
                'tokenization="all" takes any tokens that spell it'
            )

    def log_bound(self) -> float:
        """Return the largest log-probability of a token sequence on the heap."""
        return -self.heap[0].cost

    def strings(self, tolerance: float) -> Iterator[Match]:
        """Yield every string once, with the sum over its token sequences."""
        if self.space.only_canonical:                   # one token sequence each
            yield from self.sequences()
            return
        self.bound = StringBound(self.space, self.base, self.heap)
        ready: list[tuple[float, int, Match]] = []      # known, not yet returned
        while self.heap or ready:
            while self.heap and self.heap[0].kind is MATCH:
                item = heapq.heappop(self.heap)
                self.bound.remove(item)
                for match in self.summed([item], tolerance):
                    heapq.heappush(ready, (-(self.base(item.node.start) + match.log_prob_upper), item.number, match))
            best = self.bound.log_most(self.heap[0].cost) if self.heap else -math.inf
            if ready and best <= -ready[0][0]:
                self.fruitful = self.expansions
                yield heapq.heappop(ready)[2]
            elif self.given_up(best):
                return
            else:
                self.expand()

    def summed(self, items: Iterable[Item], tolerance: float) -> Iterator[Match]:
        """Yield the new strings among some matches, with the sums over all their token sequences."""
        for item in items:
            start, data = item.node.start, item.node.data
            if start is not None and (id(start), data) not in self._known:
                self._known.add((id(start), data))
                yield self.space.match(item.node, *_total(self.space, start, data, self.batch, tolerance))

    def match(self, item: Item) -> Match:
        """Return the match of an item, as one token sequence."""
        return self.space.match(item.node, item.node.log_prob + item.log_prob)


def beam(
    space: Space, order: str, width: int, max_expansions: int | None, results: str, tolerance: float
) -> Iterator[Match]:
    """Yield the best matches of a beam search, the most probable first."""
    search = Search(space, order=order, batch=width, width=width, max_expansions=max_expansions)
    search.add_all()
    matches: list[Item] = []
    while search.heap and not search.given_up():
        search.expand()
        matches = heapq.nsmallest(width, [*matches, *(item for item in search.heap if item.kind is MATCH)])
        least = matches[-1].cost if len(matches) == width else math.inf     # children are less probable
        tokens = heapq.nsmallest(width, (item for item in search.heap if item.kind is TOKEN))
        search.heap = [item for item in tokens if item.cost < least]
    if results == "tokens":
        yield from map(search.match, matches)
    else:
        yield from sorted(search.summed(matches, tolerance), key=lambda match: -match.log_joint)


def _total(space: Space, start: Start, data: bytes, batch: int, tolerance: float) -> tuple[float, float]:
    """Return a lower and an upper bound of the log of the summed probability of all token sequences for `data`.

    The mass that is left out is at most `tolerance` times the mass that is found.
    """
    log_tolerance = math.log(tolerance) if tolerance else -math.inf
    heap = [(0.0, 0, space.root(start))]
    numbers = itertools.count(1)
    found, left = list[float](), 0.0
    while heap and left > log_tolerance + logsumexp(found):
        nodes = [heapq.heappop(heap)[2] for _ in range(min(batch, len(heap)))]
        asked = [node for node in nodes if node.data != data or space.end != "prefix"]
        rows = dict(zip(map(id, asked), space.log_probs(asked), strict=True))
        for node in nodes:
            log_probs = rows.get(id(node), NOTHING)
            if node.data == data:
                found.append(node.log_prob + space.ending(node, log_probs))
            elif node.depth != space.max_tokens:
                for token in _spelling(space, data[len(node.data) :]):
                    if log_probs[token] > -math.inf:
                        child = space.child(node, token, float(log_probs[token]))
                        heapq.heappush(heap, (-child.log_prob, next(numbers), child))
        left = logsumexp([-cost for cost, _, _ in heap])
    return logsumexp(found), logsumexp([*found, left])


def _spelling(space: Space, data: bytes) -> Iterator[int]:
    """Yield the tokens that begin `data`, the shortest first."""
    ids = space.lm.vocab.ids_by_bytes
    for n in range(1, min(space.max_token_bytes, len(data)) + 1):
        yield from ids.get(data[:n], ())
