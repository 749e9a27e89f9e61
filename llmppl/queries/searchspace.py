"""Search space of a query: *nodes*, pairs of a context of the model and a state of the language, and their children."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable
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
    """Prefix string: its context, the log-probability of its tokens, and the language after it."""

    prefix: str
    context: Context
    log_prob: float
    part: Part


class Node(NamedTuple):
    """Partial text from which a search continues; `start` is None in a prefix that is not complete.

    `log_prob` is the log-probability of the tokens after the prefix.
    """

    start: Start | None
    context: Context
    state: Any
    log_prob: float
    canonical: CanonicalState | None = None             # None if tokens need not be canonical
    noise: float = 0.0                                  # maximum of the perturbed log-probabilities below
    data: bytes = b""                                   # the text after the prefix
    depth: int = 0


@dataclass
class Space:
    """Search space: the language after each prefix, the distribution of the next token, and the end of a match.

    A node without a start is an incomplete prefix: its tokens must be canonical, and no rule applies. With `first`,
    nothing follows a match: if one match begins another, only the shorter one counts.
    """

    lm: CachedTransformer
    compiled: Compiled
    rule: DecisionRule = NO_RULE
    end: str = "eos"
    max_tokens: int | None = None
    only_canonical: bool = False
    first: bool = False
    alignments: dict[tuple[int, bytes], tuple[Edit, ...]] = field(default_factory=dict)    # memo: (id of part, text)
    _indices: dict[int, Index] = field(default_factory=dict)

    @cached_property
    def prefixes(self) -> DFA:
        """Language of all prefix strings."""
        return reduce(operator.or_, [part.prefixes for part in self.compiled.parts])

    @cached_property
    def counts_first(self) -> bool:
        """True if the first token of a context counts, because the model reads the empty context, which is a prefix."""
        return any(part.prefixes.accepts_text("") for part in self.compiled.parts) and not len(self.lm.context())

    @cached_property
    def max_token_bytes(self) -> int:
        return max(map(len, self.lm.vocab.ids_by_bytes))

    @cached_property
    def canonical(self) -> Canonical | None:
        """Masks that exclude tokens which are not canonical; None if the tokenizer has no rules to read."""
        tokenizer = self.lm.tokenizer
        if not hasattr(tokenizer, "backend_tokenizer"):
            return None
        if tokenizer not in _canonical:
            _canonical[tokenizer] = Canonical(tokenizer, self.lm.vocab)
        return _canonical[tokenizer]

    def index(self, node: Node) -> Index:
        """Return the index of the language after the node's prefix, or of the prefixes; indices are shared."""
        language = self.prefixes if node.start is None else node.start.part.follow
        found = self._indices.get(id(language))
        if found is None:
            found = self._indices[id(language)] = language.index(self.lm.vocab)
        return found

    # ---- prefixes

    def start(self, prefix: str, log_prob: float = 0.0) -> Start:
        part = next(part for part in self.compiled.parts if prefix in part.prefixes)
        return Start(prefix, self.lm.context(prefix), log_prob, part)

    def starts(self) -> list[Start] | None:
        """Return the prefix strings with their log-probabilities, in one round; None if there are too many."""
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
        """Return the node before all prefixes: after the special tokens that the tokenizer puts before a text."""
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

    # ---- children

    def next_token(self, node: Node) -> TokenDistribution:
        """Return the distribution of the next token after a node, under the rule."""
        dist: TokenDistribution = self.rule(node.context.next_token())
        return dist

    def log_probs(self, nodes: Iterable[Node]) -> list[Floats]:
        """Return the log-probabilities of the next token after each node, (V,) each, in one round."""
        nodes = list(nodes)
        dists = [n.context.next_token() if len(n.context) or self.counts_first else None for n in nodes]   # one round
        return list(map(self._log_probs, nodes, dists))

    def _log_probs(self, node: Node, dist: TokenDistribution | None) -> Floats:
        if dist is None:                                # the first token of a context has no probability
            return np.zeros(len(self.lm.vocab))
        shaped: TokenDistribution = dist if node.start is None else self.rule(dist)
        return shaped.log_probs()

    def inside(self, node: Node) -> Ints:
        """Return the tokens after a node that stay in the language, without eos."""
        index = self.index(node)
        ids = index.allowed(node.state)
        return ids[~np.isin(ids, self.lm.vocab.eos_ids)] if index.accepts(node.state) else ids

    def allowed(self, node: Node) -> Ints:
        """Return the tokens after a node that are searched; none if the model's context is full."""
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
        """Return True if the text of a node is a match, or a complete prefix if the node has no start."""
        if not self.index(node).accepts(node.state):
            return False
        text, ignored, start = node.data.decode(), self.compiled.ignored, node.start
        if start is None:
            return self.lm.context(text) == node.context
        if ignored is not None and text in ignored:
            return False
        if not self.only_canonical:
            return True
        own = self.lm.context(start.prefix + text)
        if start.prefix or not text:
            return own == node.context
        return own.tokens in (node.context.tokens, node.context.tokens[len(start.context) :])     # "" has a BOS

    def ending(self, node: Node, log_probs: Floats) -> float:
        """Return the log-probability that a match ends at a node; end="prefix" ignores `log_probs`."""
        if self.end == "prefix":
            return 0.0
        if self.end == "eos":
            return float(np.logaddexp.reduce(log_probs[list(self.lm.vocab.eos_ids)], initial=-math.inf))
        outside = np.exp(log_probs)
        outside[self.inside(node)] = 0.0
        total = float(outside.sum())
        return math.log(total) if total > 0.0 else -math.inf

    # ---- results

    def match(
        self, node: Node, log_prob: float, log_prob_upper: float | None = None, *, log_weight: float = 0.0
    ) -> Match:
        """Return the match that ends at a node; `log_prob` is that of the whole part after the prefix."""
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
        """Return the edits that make the part after the prefix from the nearest string of the pattern."""
        if self.compiled.edits is None:
            return ()
        key = id(part), data
        if key not in self.alignments:
            self.alignments[key] = tuple(self.compiled.edits.alignment(part.unedited, data.decode()))
        return self.alignments[key]
