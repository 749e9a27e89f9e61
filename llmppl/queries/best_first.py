"""Search for the strings of a language that a model likes: best first, in exact order, on the shared cache.

The one idea: a heap of places that a text may go on from, the most probable first. A *node* is a context with the state
of the language behind it; to expand it takes one row of the language model, and rows are asked for in batches. What
follows a node is pushed a few tokens at a time: the rest of them is one *lazy* item that stands for the next best of
them and knows the mass of them all, so that memory does not grow with the vocabulary. A match goes through the heap
too, and is out when nothing before it can be better; the order is therefore the same whatever the batch.

A string is spelled by many token sequences. As strings, matches are ordered by the sum over these (`_total`), and out
when neither another string that is known nor one that is yet to be met can have more. What one string can still get
from the heap is bounded along the trie of its texts (`_Bound`): only items whose texts begin each other can be parts of
one string.

Without replacement (`strategy="distinct"`) is the same search by perturbed log-probabilities (Kool et al. 2019,
"Stochastic Beams and Where to Find Them"): the maximum of Gumbel noise over all texts below a node is drawn first, and
handed down.

Sources: Kuchnik et al. 2023 (ReLM), section 3.3; Dijkstra's algorithm.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from llmppl.queries.language import FEW
from llmppl.queries.space import Floats, Ints, Match, Node, Space, Start, edits_of, log_sum
from llmppl.tokens import Text

WIDTH = 16                                              # tokens that are pushed at once, and four times as many later
PATIENCE = 10_000                                       # expansions in a row without a match after which it is an error


class Item(NamedTuple):
    """An entry of the heap. Kinds: 0 a match, 1 a token after a node, 2 the tokens that are yet to be pushed."""

    cost: float
    kind: int
    number: int
    node: Node
    token: int                                          # kind 2: the last token that was pushed
    log_prob: float                                     # of the token; kind 0: of the match; kind 2: of the next token
    mass: float                                         # kind 2: log of the probability of the tokens to come
    one: float                                          # kind 2: the same of those that can be parts of one text
    width: int


class Search:
    """The matches of a query, an iterator; it can be stopped at any time and keeps what it has done.

    Attributes
    ----------
    expansions : int
        Nodes whose next-token law was looked at.
    num_found : int
        Matches that were met, each token sequence for itself.
    closed : float
        Their probability together.
    """

    def __init__(
        self,
        space: Space,
        *,
        order: str = "joint",
        batch: int = 16,
        width: int = WIDTH,
        limit: int | None = None,
        noise: np.random.Generator | None = None,
    ) -> None:
        self.space, self.order, self.batch, self.width, self.limit, self.rng = space, order, batch, width, limit, noise
        self.expansions = 0
        self.fruitful = 0                               # expansions until the last match came out
        self.heap: list[Item] = []
        self.watch: _Bound | None = None
        self.num_found, self.closed = 0, 0.0            # matches met, and their mass
        self._numbers = itertools.count()

    # ---- the heap

    def add(self, start: Start) -> None:
        """Search after a prefix as well."""
        root = self.space.root(start)
        if self.rng is not None:
            root = root._replace(noise=float(self.rng.gumbel(self._base(start))))
        self._push(1, root, -1, 0.0)

    def add_all(self) -> None:
        """Search after every prefix: one by one if they are few, else as they are met, the most probable first."""
        starts = self.space.starts()
        if starts is not None:
            for start in starts:
                self.add(start)
        elif self.order == "conditional" or self.rng is not None:
            raise ValueError(
                f"the prefix has more than {FEW} strings, which can be searched in their joint order only: leave "
                f'order="joint" and a strategy other than "distinct", or give a prefix with fewer strings'
            )
        else:
            self._push(1, self.space.prefix_root(), -1, 0.0)

    def _base(self, start: Start | None) -> float:
        return 0.0 if start is None or self.order == "conditional" else start.log_prob

    def _push(
        self,
        kind: int,
        node: Node,
        token: int,
        log_prob: float,
        *,
        mass: float = 0.0,
        one: float = 0.0,
        width: int = 0,
        noise: float = 0.0,
    ) -> None:
        if self.rng is not None:
            cost = -noise if token >= 0 or kind != 1 else -node.noise
        else:
            cost = -(self._base(node.start) + node.log_prob + log_prob)
        item = Item(cost, kind, next(self._numbers), node, token, log_prob, mass, one, width)
        heapq.heappush(self.heap, item)
        if self.watch is not None:
            self.watch.add(item)

    def expand(self) -> None:
        """Expand the best nodes of the heap, a batch of them, in one round."""
        matches, items = list[Item](), list[Item]()
        while self.heap and len(items) < self.batch:
            item = heapq.heappop(self.heap)
            (items if item.kind else matches).append(item)
        for item in matches:
            heapq.heappush(self.heap, item)
        space = self.space
        nodes = [
            item.node
            if item.kind == 2 or item.token < 0
            else space.child(item.node, item.token, item.log_prob, -item.cost if self.rng is not None else 0.0)
            for item in items
        ]
        allowed = [space.allowed(node) for node in nodes]
        accepted = [item.kind == 1 and space.accepts(node) for item, node in zip(items, nodes, strict=True)]
        asked = [
            ids.size > 0 or (accepts and space.end != "prefix")
            for ids, accepts in zip(allowed, accepted, strict=True)
        ]
        laws = iter(space.laws([node for node, ask in zip(nodes, asked, strict=True) if ask]))
        self.expansions += sum(asked)
        for item, node, ids, accepts, ask in zip(items, nodes, allowed, accepted, asked, strict=True):
            law = next(laws) if ask else None
            if self.watch is not None:
                self.watch.remove(item)
            self._follow(item, node, ids, accepts, law)

    def _follow(self, item: Item, node: Node, ids: Ints, accepts: bool, law: Floats | None) -> None:
        """Push the match that ends at a node, and the tokens that may come next."""
        if node.start is None and accepts:
            text = node.data.decode()
            self.add(Start(text, self.space.lm.context(text), node.log_prob, self.space.part_of(text)))
            accepts = False
        ending = self.space.ending(node, law) if accepts else -math.inf
        if self.rng is not None:
            self._follow_perturbed(node, ids, ending, law)
            return
        if ending > -math.inf:
            self._match(node, ending)
        if law is None or not ids.size:
            return
        log_probs = law[ids]
        if item.kind == 2:
            ids = later(item, ids, law)
            log_probs = law[ids]
        possible = log_probs > -np.inf
        ids, log_probs = ids[possible], log_probs[possible]
        width = 4 * item.width if item.kind == 2 else self.width
        if ids.size > width + 1:
            best = np.argpartition(-log_probs, width)[: width + 1]
            least = log_probs[best].min()
            best = np.flatnonzero(log_probs >= least)   # ties: those of lower id come first
            best = best[np.lexsort((ids[best], -log_probs[best]))][: width + 1]
            chosen, following = best[:width], best[width]
            rest = np.ones(ids.size, bool)
            rest[chosen] = False
            mass = float(np.logaddexp.reduce(log_probs[rest]))
            one, last = 0.0, int(ids[chosen[-1]])
            if self.watch is not None:                  # tokens that begin each other have different lengths
                lengths = np.unique(self.space.lm.vocab.lengths[ids[rest]])
                one = math.log(lengths.size) + float(log_probs[following])
            self._push(2, node, last, float(log_probs[following]), mass=mass, one=one, width=width)
        else:
            chosen = np.arange(ids.size)
        for token, log_prob in zip(ids[chosen].tolist(), log_probs[chosen].tolist(), strict=True):
            self._push(1, node, token, log_prob)

    def _follow_perturbed(self, node: Node, ids: Ints, ending: float, law: Floats | None) -> None:
        """The same with noise: what leaves the language takes part in the maximum, and is forgotten."""
        base = self._base(node.start) + node.log_prob
        inside = law[ids] if law is not None and ids.size else np.zeros(0)
        log_probs = np.append(inside, ending)
        left = -math.expm1(min(0.0, float(np.logaddexp.reduce(log_probs))))
        log_probs = np.append(log_probs, math.log(left) if left > 1e-12 else -math.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            noisy = base + log_probs + self.rng.gumbel(size=log_probs.size)  # type: ignore[union-attr]
            top = noisy.max()
            shifted = node.noise - noisy + np.log1p(-np.exp(noisy - top))
            handed = node.noise - np.maximum(0.0, shifted) - np.log1p(np.exp(-np.abs(shifted)))
        if ending > -math.inf:
            self._match(node, ending, float(handed[-2]))
        for token, log_prob, noise in zip(ids.tolist(), inside.tolist(), handed.tolist(), strict=False):
            if log_prob > -math.inf:
                self._push(1, node, token, log_prob, noise=noise)

    def _match(self, node: Node, ending: float, noise: float = 0.0) -> None:
        self._push(0, node, 0, ending, noise=noise)
        self.num_found += 1
        self.closed += math.exp(self._base(node.start) + node.log_prob + ending)

    def open_mass(self) -> float:
        """Probability of everything that may still be found."""
        return float(np.exp([self.log_mass(item) for item in self.open_items()]).sum())

    def open_items(self) -> list[Item]:
        """What may still be gone on from."""
        return [item for item in self.heap if item.kind]

    def log_mass(self, item: Item) -> float:
        """Log-probability that a text goes on from an item."""
        return self._base(item.node.start) + item.node.log_prob + (item.mass if item.kind == 2 else item.log_prob)

    def given_up(self, log_bound: float = math.inf) -> bool:
        """Whether `limit` is reached; where there is none, an error after PATIENCE. No match exceeds `log_bound`."""
        if self.limit is not None:
            return self.expansions >= self.limit
        if self.expansions - self.fruitful < PATIENCE:
            return False
        more = "further match" if self.fruitful else "match"
        exact = self.rng is None and log_bound < math.inf
        bound = f", and none of it above {math.exp(log_bound):.2g}" if exact else ""
        raise ValueError(
            f"no {more} in {self.expansions - self.fruitful:,} expansions; what is still to be found has probability "
            f"{self.open_mass():.2g} at most, all together{bound}. To search on, give a larger max_expansions, such as "
            f"{10 * PATIENCE:,} (what is in the cache is not run again); top_k= or max_tokens= leave less to search, "
            f"strategy='beam' looks at the best only, and probability(..., runs=0) bounds all matches together"
        )

    # ---- matches

    def sequences(self) -> Iterator[Match]:
        """Every token sequence by itself, the most probable first."""
        yield from map(self.match, self._matches())

    def summed(self, items: Iterable[Item], tolerance: float) -> Iterator[Match]:
        """The strings among some matches, once each, with the sum over all token sequences."""
        known = set[tuple[int, bytes]]()
        for item in items:
            if (match := self._sum(item, known, tolerance)) is not None:
                yield match

    def _sum(self, item: Item, known: set[tuple[int, bytes]], tolerance: float) -> Match | None:
        """What a match found, summed; None if it is `known`."""
        start, data = item.node.start, item.node.data
        assert start is not None
        if (id(start), data) in known:
            return None
        known.add((id(start), data))
        return self.match(item, *_total(self.space, start, data, self.batch, tolerance))

    def _matches(self) -> Iterator[Item]:
        while self.heap:
            if self.heap[0].kind == 0:
                self.fruitful = self.expansions
                yield heapq.heappop(self.heap)
            elif self.given_up(-self.heap[0].cost):
                return
            else:
                self.expand()
        if self.space.canonical and self.space.rule is None and self.space.max_tokens is None and not self.num_found:
            raise ValueError(
                "no text of the language is the tokenizer's own encoding behind that of the prefix; "
                'tokenization="all" takes any tokens that spell it'
            )

    def strings(self, tolerance: float) -> Iterator[Match]:
        """Every string once, with the sum over its token sequences."""
        if self.space.canonical:                        # one token sequence each
            yield from self.sequences()
            return
        if self.rng is not None:                        # the first spelling that is met has the maximum of them all
            yield from self.summed(self._matches(), tolerance)
            return
        self.watch = _Bound(self)
        known = set[tuple[int, bytes]]()
        ready: list[tuple[float, int, Match]] = []      # known, and not yet out
        while self.heap or ready:
            while self.heap and self.heap[0].kind == 0:
                item = heapq.heappop(self.heap)
                self.watch.remove(item)
                if (match := self._sum(item, known, tolerance)) is not None:
                    cost = -(self._base(item.node.start) + match.log_prob_upper)
                    heapq.heappush(ready, (cost, item.number, match))
            best = self.watch.best() if self.heap else -math.inf
            if ready and best <= -ready[0][0]:
                self.fruitful = self.expansions
                yield heapq.heappop(ready)[2]
            elif self.given_up(best):
                return
            else:
                self.expand()

    def match(self, item: Item, lower: float | None = None, upper: float | None = None) -> Match:
        """What an item of kind 0 found."""
        node, start = item.node, item.node.start
        assert start is not None
        log_prob = node.log_prob + item.log_prob if lower is None else lower
        return Match(
            Text(start.prefix.encode() + node.data),
            start.prefix,
            tuple(node.context.tokens[len(start.context) :]),
            log_prob,
            log_prob if upper is None else upper,
            start.log_prob + log_prob,
            edits=edits_of(self.space, node),
        )


class _Place:
    """A text in the trie of texts: what the heap holds here, and the most that one text through here can still get."""

    __slots__ = ("own", "below", "children")

    def __init__(self) -> None:
        self.own: dict[int, float] = {}                 # log-probabilities, by item
        self.below = -math.inf                          # the most of all children
        self.children: dict[int, _Place] = {}

    @property
    def best(self) -> float:
        return log_sum([*self.own.values(), self.below])


class _Bound:
    """How probable a string that is not known yet can be: the largest sum of items whose texts begin each other."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.roots: dict[int, _Place] = {}
        self.under_way = 0                              # items of prefixes
        for item in search.heap:
            self.add(item)

    def best(self) -> float:
        """Log-probability that no unknown string exceeds."""
        most = max((place.best for place in self.roots.values()), default=-math.inf)
        if self.under_way and self.search.heap:         # a prefix has one path only
            most = max(most, -self.search.heap[0].cost)
        return most

    def add(self, item: Item) -> None:
        if item.node.start is None:
            self.under_way += 1
            return
        path = self._path(item, make=True)
        path[-1].own[item.number] = self._mass(item)
        for below, place in zip(path[:0:-1], path[-2::-1], strict=True):
            place.below = max(place.below, below.best)

    def remove(self, item: Item) -> None:
        if item.node.start is None:
            self.under_way -= 1
            return
        path, data = self._path(item), self._text(item)
        before = path[-1].best
        del path[-1].own[item.number]
        for i in range(len(path) - 2, -1, -1):
            place, below = path[i], path[i + 1]
            changed, was = before == place.below, place.best
            if not below.own and not below.children:
                del place.children[data[i]]
            if changed:
                place.below = max((child.best for child in place.children.values()), default=-math.inf)
            before = was
        if not path[0].own and not path[0].children:
            del self.roots[id(item.node.start)]

    def _text(self, item: Item) -> bytes:
        data = item.node.data
        pushed = item.kind == 1 and item.token >= 0
        return data + self.search.space.lm.vocab.tokens[item.token] if pushed else data

    def _path(self, item: Item, make: bool = False) -> list[_Place]:
        key = id(item.node.start)
        place = self.roots.setdefault(key, _Place()) if make else self.roots[key]
        path = [place]
        for byte in self._text(item):
            if make and byte not in place.children:
                place.children[byte] = _Place()
            place = place.children[byte]
            path.append(place)
        return path

    def _mass(self, item: Item) -> float:
        base = self.search._base(item.node.start) + item.node.log_prob
        return base + (min(item.mass, item.one) if item.kind == 2 else item.log_prob)


def later(item: Item, ids: Ints, law: Floats) -> Ints:
    """Of the tokens after a node, those of an item of kind 2: less probable than the last one that was pushed."""
    least = law[item.token]
    after: Ints = ids[(law[ids] < least) | ((law[ids] == least) & (ids > item.token))]
    return after


def _total(space: Space, start: Start, data: bytes, batch: int, tolerance: float) -> tuple[float, float]:
    """Log of the summed probability of all token sequences that spell `data` after a prefix, from below and above.

    What is left out is at most `tolerance` times what is found.
    """
    ids = space.lm.vocab.ids_by_bytes
    longest = max(map(len, ids))
    heap = [(0.0, 0, space.root(start))]
    numbers = itertools.count(1)
    found, left = list[float](), 0.0
    while heap and (tolerance == 0.0 or left > math.log(tolerance) + log_sum(found)):
        nodes = [heapq.heappop(heap)[2] for _ in range(min(batch, len(heap)))]
        asked = [node for node in nodes if node.data != data or space.end != "prefix"]
        laws = dict(zip(map(id, asked), space.laws(asked), strict=True))
        for node in nodes:
            law, at = laws.get(id(node)), len(node.data)
            if at == len(data):
                found.append(node.log_prob + space.ending(node, law))
            elif law is not None and node.depth != space.max_tokens:
                for n in range(1, min(longest, len(data) - at) + 1):
                    for token in ids.get(data[at : at + n], ()):
                        if law[token] > -math.inf:
                            child = space.child(node, token, float(law[token]))
                            heapq.heappush(heap, (-child.log_prob, next(numbers), child))
        left = log_sum([-cost for cost, _, _ in heap])
    return log_sum(found), log_sum([*found, left])
