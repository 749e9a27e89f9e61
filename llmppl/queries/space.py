"""What a query searches: *nodes*, contexts of the model with states of the language, and what follows each of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from operator import or_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from llmppl.distributions import DecisionRule
from llmppl.languages import DFA, Edit
from llmppl.lm import CachedTransformer, Context
from llmppl.masks import Index
from llmppl.queries.language import FEW, Part, Query
from llmppl.runtime import Runtime
from llmppl.tokens import Text, Token
from llmppl.tokens.canonical import Canonical, CanonicalState

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Match:
    """A string of the language, and what the model says of it.

    Attributes
    ----------
    text : Text
        The whole of it, prefix included.
    prefix : str
    tokens : tuple of Token
        That spell what follows the prefix; the most probable of the spellings where `log_prob` sums over several.
    log_prob : float
        Of what follows the prefix given it, end of text included where the query asks for it, under the decision rule.
    log_prob_upper : float
        No less than the truth; above `log_prob` only where spellings of hardly any probability were not summed.
    log_joint : float
        `log_prob` and the log-probability of the prefix's own tokens without any rule. The first token of a context is
        not counted, since nothing comes before it.
    log_weight : float
        Of samples: the importance weight. 0 otherwise.
    edits : tuple of Edit
        That make the part after the prefix from the nearest string of the pattern; places count from its beginning.
    """

    text: Text
    prefix: str
    tokens: tuple[Token, ...]
    log_prob: float
    log_prob_upper: float
    log_joint: float
    log_weight: float = 0.0
    edits: tuple[Edit, ...] = ()

    def __str__(self) -> str:
        return str(self.text)

    def __repr__(self) -> str:
        weight = f", log_weight={self.log_weight:.3f}" if self.log_weight else ""
        edits = f", {len(self.edits)} edits" if self.edits else ""
        return f"Match({str(self.text)!r}, log_prob={self.log_prob:.3f}, {len(self.tokens)} tokens{weight}{edits})"

    def as_dict(self) -> dict[str, Any]:
        """What JSON can hold of it; tokens by their ids."""
        return {
            "text": str(self.text),
            "prefix": self.prefix,
            "tokens": [int(token) for token in self.tokens],
            "log_prob": self.log_prob,
            "log_prob_upper": self.log_prob_upper,
            "log_joint": self.log_joint,
            "log_weight": self.log_weight,
            "edits": [edit._asdict() for edit in self.edits],
        }


_tails: WeakKeyDictionary[Any, Canonical] = WeakKeyDictionary()        # by tokenizer


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
    tail: CanonicalState | None = None                  # where the tokens must be the tokenizer's own
    noise: float = 0.0                                  # of the perturbed maximum below, in strategy "distinct"
    data: bytes = b""                                   # what is spelled after the prefix
    depth: int = 0


@dataclass
class Space:
    """What is searched: the language after each prefix, the law of the next token, and how a match ends.

    A node without a start is a prefix under way: its tokens must be the tokenizer's own, and no rule applies. `first`
    says that nothing follows a match: of matches that begin each other, only the first is one.
    """

    lm: CachedTransformer
    query: Query
    rule: DecisionRule | None = None
    end: str = "eos"
    max_tokens: int | None = None
    canonical: bool = False
    first: bool = False
    alignments: dict[tuple[int, bytes], tuple[Edit, ...]] = field(default_factory=dict)    # of matches, by their part
    _indices: dict[int, Index] = field(default_factory=dict)

    @cached_property
    def prefixes(self) -> DFA:
        """All prefix strings."""
        return reduce(or_, [part.prefixes for part in self.query.parts])

    @cached_property
    def tails(self) -> Canonical | None:
        """What tells early that tokens are not the tokenizer's own; None where it has no rules to read."""
        tokenizer = self.lm.tokenizer
        if not hasattr(tokenizer, "backend_tokenizer"):
            return None
        if tokenizer not in _tails:
            _tails[tokenizer] = Canonical(tokenizer, self.lm.vocab)
        return _tails[tokenizer]

    def index(self, node: Node) -> Index:
        """The tokens of the language after a prefix, or of the prefixes; one index for all who ask."""
        language = self.prefixes if node.start is None else node.start.part.follow
        found = self._indices.get(id(language))
        if found is None:
            found = self._indices[id(language)] = language.index(self.lm.vocab)
        return found

    def starts(self) -> list[Start] | None:
        """The prefix strings with what they cost, in one round; None if there are too many."""
        few = self.query.prefixes()
        if few is None:
            return None
        contexts = [self.lm.context(text) for text, _ in few]
        costs = [0.0] * len(few)

        def score(i: int) -> None:
            costs[i] = contexts[i].log_prob_since(self._begin() + contexts[i].tokens[0])

        Runtime().run([partial(score, i) for i in range(len(few))], [f"prefix {text!r}" for text, _ in few])
        return [
            Start(text, context, cost, part)
            for (text, part), context, cost in zip(few, contexts, costs, strict=True)
        ]

    def laws(self, nodes: Sequence[Node]) -> list[Floats]:
        """(V,) log-probabilities of the next token after each node, in one round."""
        asked = [node.context.next_token() if len(node.context) else None for node in nodes]
        laws = []
        for law, node in zip(asked, nodes, strict=True):
            if law is None:                             # nothing comes before the first token of a context
                laws.append(np.zeros(len(self.lm.vocab)))
            else:
                laws.append((law if self.rule is None or node.start is None else self.rule(law)).log_probs())
        return laws

    def root(self, start: Start) -> Node:
        tail = self.tails.after(start.context.tokens) if self.canonical and self.tails is not None else None
        return Node(start, start.context, start.part.start, 0.0, tail)

    def prefix_root(self) -> Node:
        """Where prefixes begin: behind the special tokens that the tokenizer puts before a text."""
        text = self.prefixes.shortest() or ""
        context = self.lm.context(text)
        if b"".join(token.bytes for token in context.tokens) != text.encode():
            raise ValueError(
                f"this tokenizer adds a space before a text, so more than {FEW} prefix strings cannot be searched: "
                f"give a prefix with fewer strings"
            )
        begin = self._begin()
        for token in itertools.takewhile(lambda token: not token.bytes, context.tokens):
            begin += token
        return Node(None, begin, self.prefixes.start, 0.0, None if self.tails is None else self.tails.start)

    def inside(self, node: Node) -> Ints:
        """The tokens after a node with which a text stays in the language, no eos among them."""
        index = self.index(node)
        ids = index.allowed(node.state)
        return ids[~np.isin(ids, self.lm.vocab.eos_ids)] if index.accepts(node.state) else ids

    def allowed(self, node: Node) -> Ints:
        """Those of them that are looked at; none where the model can read no more."""
        full = len(node.context) == self.lm.backend.max_length
        if full or (node.start is not None and (node.depth == self.max_tokens or (self.first and self.accepts(node)))):
            return np.zeros(0, np.int64)
        ids = self.inside(node)
        if node.tail is not None and self.tails is not None and ids.size:
            ids = ids[self.tails.mask(node.tail)[ids]]
        return ids

    def child(self, node: Node, token: int, log_prob: float, noise: float = 0.0) -> Node:
        return Node(
            node.start,
            node.context + token,
            self.index(node).advance(node.state, token),
            node.log_prob + log_prob,
            None if node.tail is None or self.tails is None else self.tails.advance(node.tail, token),
            noise,
            node.data + self.lm.vocab.tokens[token],
            node.depth + 1,
        )

    def accepts(self, node: Node) -> bool:
        """Whether what was spelled is a match, whatever comes after it; of a prefix under way, whether it is one."""
        if not self.index(node).accepts(node.state):
            return False
        if node.start is None:
            return self.lm.context(node.data.decode()) == node.context
        if self.query.ignored is not None and node.data.decode() in self.query.ignored:
            return False
        return not self.canonical or self.lm.context(node.start.prefix + node.data.decode()) == node.context

    def ending(self, node: Node, law: Floats | None) -> float:
        """Log-probability of what must come after a match; `law` is not looked at for end="prefix"."""
        if self.end == "prefix":
            return 0.0
        assert law is not None
        if self.end == "eos":
            return float(np.logaddexp.reduce(law[list(self.lm.vocab.eos_ids)], initial=-math.inf))
        outside = np.exp(law)
        outside[self.inside(node)] = 0.0
        total = float(outside.sum())
        return math.log(total) if total > 0.0 else -math.inf

    def _begin(self) -> Context:
        return self.lm.at(())

    def part_of(self, prefix: str) -> Part:
        return next(part for part in self.query.parts if prefix in part.prefixes)


def edits_of(space: Space, node: Node) -> tuple[Edit, ...]:
    """What makes the part after the prefix from the nearest string of the pattern."""
    if space.query.edits is None or node.start is None:
        return ()
    key = id(node.start.part), node.data
    if key not in space.alignments:
        found = space.query.edits.alignment(node.start.part.unedited, node.data.decode())
        space.alignments[key] = tuple(found)
    return space.alignments[key]


def log_sum(logs: Sequence[float]) -> float:
    """Log of the sum of the exponentials; -inf of none."""
    top = max(logs, default=-math.inf)
    return top if top == -math.inf else top + math.log(math.fsum(math.exp(each - top) for each in logs))
