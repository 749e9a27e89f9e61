"""What a query searches: *nodes*, contexts of the model with states of the language, and what follows each of them."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from llmppl.constraints.automata import DFA, Edit
from llmppl.constraints.constraint import Index
from llmppl.constraints.vocabulary import Text
from llmppl.constraints.vocabulary.canonical import Canonical, CanonicalState
from llmppl.distributions import NO_RULE, DecisionRule
from llmppl.lm import CachedTransformer, Context, TokenDistribution
from llmppl.queries.compile import MAX_LISTED_PREFIXES, Compiled, Part
from llmppl.queries.matches import Match
from llmppl.support.locks import cached_property
from llmppl.support.runtime import Runtime

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_canonical: WeakKeyDictionary[Any, Canonical] = WeakKeyDictionary()     # by tokenizer


class Start(NamedTuple):
    """A prefix string: its context, what its tokens cost, and what may follow."""

    prefix: str
    context: Context
    log_prob: float
    part: Part


class Node(NamedTuple):
    """A place from which a text may go on; a prefix that is under way has no start.

    `log_prob` is of the tokens after the prefix.
    """

    start: Start | None
    context: Context
    state: Any
    log_prob: float
    canonical: CanonicalState | None = None             # where the tokens must be the tokenizer's own
    noise: float = 0.0                                  # of the perturbed maximum below, without replacement
    data: bytes = b""                                   # what is spelled after the prefix
    depth: int = 0


@dataclass
class Space:
    """What is searched: the language after each prefix, the distribution of the next token, and how a match ends.

    A node without a start is a prefix under way: its tokens must be the tokenizer's own, and no rule applies. `first`
    says that nothing follows a match: of matches that begin each other, only the first is one.
    """

    lm: CachedTransformer
    compiled: Compiled
    rule: DecisionRule = NO_RULE
    end: str = "eos"
    max_tokens: int | None = None
    only_canonical: bool = False
    first: bool = False
    alignments: dict[tuple[int, bytes], tuple[Edit, ...]] = field(default_factory=dict)    # of matches, by their part
    _indices: dict[int, Index] = field(default_factory=dict)

    @cached_property
    def prefixes(self) -> DFA:
        """All prefix strings."""
        return reduce(operator.or_, [part.prefixes for part in self.compiled.parts])

    @cached_property
    def counts_first(self) -> bool:
        """Whether the first token of a context counts: the empty context is a prefix, and the model reads it."""
        return any(part.prefixes.accepts_text("") for part in self.compiled.parts) and not len(self.lm.context())

    @cached_property
    def max_token_bytes(self) -> int:
        return max(map(len, self.lm.vocab.ids_by_bytes))

    @cached_property
    def canonical(self) -> Canonical | None:
        """What tells early that tokens are not the tokenizer's own; None where it has no rules to read."""
        tokenizer = self.lm.tokenizer
        if not hasattr(tokenizer, "backend_tokenizer"):
            return None
        if tokenizer not in _canonical:
            _canonical[tokenizer] = Canonical(tokenizer, self.lm.vocab)
        return _canonical[tokenizer]

    def index(self, node: Node) -> Index:
        """The tokens of the language after a prefix, or of the prefixes; one index for all who ask."""
        language = self.prefixes if node.start is None else node.start.part.follow
        found = self._indices.get(id(language))
        if found is None:
            found = self._indices[id(language)] = language.index(self.lm.vocab)
        return found

    # ---- beginnings

    def start(self, prefix: str, log_prob: float = 0.0) -> Start:
        part = next(part for part in self.compiled.parts if prefix in part.prefixes)
        return Start(prefix, self.lm.context(prefix), log_prob, part)

    def starts(self) -> list[Start] | None:
        """The prefix strings with what they cost, in one round; None if there are too many."""
        listed = self.compiled.prefixes()
        if listed is None:
            return None
        contexts = [self.lm.context(text) for text, _ in listed]
        costs = [0.0] * len(listed)

        def score(i: int) -> None:
            given = contexts[i].tokens[: 0 if self.counts_first else 1]
            costs[i] = contexts[i].log_prob_since(reduce(operator.add, given, self.lm.at(())))

        Runtime().run([partial(score, i) for i in range(len(listed))], [f"prefix {text!r}" for text, _ in listed])
        texts, parts = zip(*listed, strict=True)
        return list(map(Start, texts, contexts, costs, parts))

    def root(self, start: Start) -> Node:
        rules = self.canonical if self.only_canonical else None
        after = None if rules is None else rules.after(start.context.tokens)
        return Node(start, start.context, start.part.start, 0.0, after)

    def prefix_root(self) -> Node:
        """Where prefixes begin: behind the special tokens that the tokenizer puts before a text."""
        text = next(filter(None, self.prefixes.enumerate()))
        context = self.lm.context(text)
        if b"".join(token.bytes for token in context.tokens) != text.encode():
            raise ValueError(
                f"this tokenizer adds a space before a text, so more than {MAX_LISTED_PREFIXES} prefix strings cannot "
                f"be searched: give a prefix with fewer strings"
            )
        special = tuple(itertools.takewhile(lambda token: not token.bytes, context.tokens))
        if self.prefixes.accepts_text("") and tuple(self.lm.context().tokens) != special:
            raise ValueError(
                f"this tokenizer puts a BOS before the empty text alone, so the empty prefix cannot be searched among "
                f"more than {MAX_LISTED_PREFIXES} prefix strings: ask for it by itself, prefix=''"
            )
        begin = reduce(operator.add, special, self.lm.at(()))
        return Node(None, begin, self.prefixes.start, 0.0, None if self.canonical is None else self.canonical.start)

    # ---- what follows

    def next_token(self, node: Node) -> TokenDistribution:
        """The distribution of the next token after a node, under the rule."""
        dist: TokenDistribution = self.rule(node.context.next_token())
        return dist

    def log_probs(self, nodes: Iterable[Node]) -> list[Floats]:
        """(V,) log-probabilities of the next token after each node, in one round."""
        nodes = list(nodes)
        dists = [n.context.next_token() if len(n.context) or self.counts_first else None for n in nodes]   # together
        return list(map(self._log_probs, nodes, dists))

    def _log_probs(self, node: Node, dist: TokenDistribution | None) -> Floats:
        if dist is None:                                # nothing comes before the first token of a context
            return np.zeros(len(self.lm.vocab))
        shaped: TokenDistribution = dist if node.start is None else self.rule(dist)
        return shaped.log_probs()

    def inside(self, node: Node) -> Ints:
        """The tokens after a node with which a text stays in the language, no eos among them."""
        index = self.index(node)
        ids = index.allowed(node.state)
        return ids[~np.isin(ids, self.lm.vocab.eos_ids)] if index.accepts(node.state) else ids

    def allowed(self, node: Node) -> Ints:
        """Those of them that are looked at; none where the model can read no more."""
        full = node.context.room == 0
        if full or (node.start is not None and (node.depth == self.max_tokens or (self.first and self.accepts(node)))):
            return np.zeros(0, np.int64)
        ids = self.inside(node)
        if node.canonical is not None and self.canonical is not None and ids.size:
            ids = ids[self.canonical.mask(node.canonical)[ids]]
        return ids

    def child(self, node: Node, token: int, log_prob: float, noise: float = 0.0) -> Node:
        return Node(
            node.start,
            node.context + token,
            self.index(node).advance(node.state, token),
            node.log_prob + log_prob,
            None if node.canonical is None or self.canonical is None else self.canonical.advance(node.canonical, token),
            noise,
            node.data + self.lm.vocab.tokens[token],
            node.depth + 1,
        )

    def accepts(self, node: Node) -> bool:
        """Whether what was spelled is a match, whatever comes after it; of a prefix under way, whether it is one."""
        if not self.index(node).accepts(node.state):
            return False
        text, ignored, begun = node.data.decode(), self.compiled.ignored, node.start
        if begun is None:
            return self.lm.context(text) == node.context
        if ignored is not None and text in ignored:
            return False
        if not self.only_canonical:
            return True
        own = self.lm.context(begun.prefix + text)
        if begun.prefix or not text:
            return own == node.context
        return own.tokens in (node.context.tokens, node.context.tokens[len(begun.context) :])     # "" has a BOS

    def ending(self, node: Node, log_probs: Floats) -> float:
        """Log-probability of what must come after a match; `log_probs` are not looked at for end="prefix"."""
        if self.end == "prefix":
            return 0.0
        if self.end == "eos":
            return float(np.logaddexp.reduce(log_probs[list(self.lm.vocab.eos_ids)], initial=-math.inf))
        outside = np.exp(log_probs)
        outside[self.inside(node)] = 0.0
        total = float(outside.sum())
        return math.log(total) if total > 0.0 else -math.inf

    # ---- what was found

    def match(
        self, node: Node, log_prob: float, log_prob_upper: float | None = None, *, log_weight: float = 0.0
    ) -> Match:
        """The match that ends at a node; `log_prob` is of all that follows the prefix."""
        start = node.start
        assert start is not None
        return Match(
            Text(start.prefix.encode() + node.data),
            start.prefix,
            tuple(node.context.tokens[len(start.context) :]),
            log_prob,
            log_prob if log_prob_upper is None else log_prob_upper,
            start.log_prob + log_prob,
            log_weight,
            self._edits(start.part, node.data),
        )

    def _edits(self, part: Part, data: bytes) -> tuple[Edit, ...]:
        """What makes the part after the prefix from the nearest string of the pattern."""
        if self.compiled.edits is None:
            return ()
        key = id(part), data
        if key not in self.alignments:
            self.alignments[key] = tuple(self.compiled.edits.alignment(part.unedited, data.decode()))
        return self.alignments[key]


def log_sum(logs: Sequence[float]) -> float:
    """Log of the sum of the exponentials; -inf of none."""
    top = max(logs, default=-math.inf)
    return top if top == -math.inf else top + math.log(math.fsum(math.exp(each - top) for each in logs))
