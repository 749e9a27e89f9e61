"""Context: tokens that a language model has read, a node of its trie. NextToken: distribution of the token after it.

`context.next_token()` computes nothing until its probabilities are needed. One forward pass then computes all
distributions asked for so far. `masked`, `tempered`, `top_k`, `top_p`, `product` and `mixture` give distributions over
the same vocabulary, so they combine. `string()` scores several tokens at once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from llmppl.constraints.vocabulary import EndOfText, Text, Token, Vocabulary, encode_fragment
from llmppl.distributions import Distribution, Table
from llmppl.lm.cache import Node
from llmppl.lm.engine import Engine
from llmppl.lm.evaluator import CachedEvaluator
from llmppl.lm.token_distribution import TokenDistribution
from llmppl.support import arguments
from llmppl.support.runtime import ContextTooLong, request
from llmppl.support.shared import Shared

NOT_PICKLED = (
    "cannot be pickled, nor can programs and particles, which hold it: the language model stays in its process. The "
    "results of inference can: pickle the Particles, or save context.text, and load the model where it is needed"
)


class LanguageModel(Protocol):
    """Interface of a language model that contexts use."""

    vocab: Vocabulary
    tokenizer: Any
    engine: Engine
    evaluator: CachedEvaluator


class Context(Shared):
    """Tokens that the model has read: an immutable pointer to a node of the trie.

    `context + token` and `context + "text"` are longer contexts. `text` is the text without special tokens, so that
    `(context + text).text == context.text + text`. `tokens` are all tokens, and `len` is their number.
    """

    __slots__ = ("lm", "node", "_start", "_offset", "__weakref__")

    def __init__(self, lm: LanguageModel, node: Node, ids: Iterable[int], start: Text, offset: int) -> None:
        self.lm, self.node = lm, lm.evaluator.place(self, node, ids)
        self._start, self._offset = start, offset       # the text of the first `offset` tokens

    def __add__(self, more: Token | int | str | EndOfText) -> Context:
        if isinstance(more, str):
            fragment = arguments.text("text", more)
            ids: Iterable[int] = encode_fragment(self.lm.tokenizer, self.lm.vocab, fragment)
        elif isinstance(more, EndOfText):
            if len(self.lm.vocab.eos_ids) != 1:
                raise ValueError(f"context + EOS is ambiguous; add one of the eos ids {self.lm.vocab.eos_ids}")
            ids = self.lm.vocab.eos_ids
        else:
            ids = (self.lm.vocab.token(more),)
        return Context(self.lm, self.node, ids, self._start, self._offset)

    def check_length(self, but: int = 0) -> None:
        """Raise ContextTooLong if the model cannot read this context without its last `but` tokens.

        Raise a ValueError if the context is empty and the model reads no empty context.
        """
        if not self.node.depth and not self.lm.engine.reads_empty:
            raise ValueError("an empty prompt needs a BOS token, as this model reads no empty context: give some text")
        longest = self.lm.engine.max_length
        if longest is not None and self.node.depth - but > longest:
            raise ContextTooLong(
                f"a context of {len(self) - but} tokens, and the model reads at most {longest}: shorten the prompt, or "
                f"bound the program with max_tokens or max_steps ({self!r})"
            )

    @property
    def room(self) -> float:
        """Number of further tokens that the model can read; inf if it has no known limit."""
        longest = self.lm.engine.max_length
        return math.inf if longest is None else longest - len(self)

    @property
    def tokens(self) -> list[Token]:
        return [self.lm.vocab[i] for i in self.node.tokens()]

    @property
    def text(self) -> Text:
        vocab = self.lm.vocab
        return self._start + Text(b"".join(vocab.tokens[i] for i in self.node.tokens()[self._offset :]))

    def __len__(self) -> int:
        return self.node.depth

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Context) and self.node is other.node

    def __hash__(self) -> int:
        return hash(id(self.node))

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a Context {NOT_PICKLED}")

    def __repr__(self) -> str:
        text = str(self.text)
        return f"Context({text!r})" if len(text) <= 60 else f"Context({text[:20]!r} ... {text[-30:]!r})"

    def row(self) -> Table:
        """Return the next-token row, in the form and on the device where the cache keeps it."""
        self.check_length()
        row: Table = request(self.lm.evaluator, (self.node,))
        return row

    def log_probs(self) -> NDArray[np.float64]:
        """Return (V,) float64, read-only: the model's log-probability of every token after this context."""
        row = self.row()
        return row.whole(row.log_total)

    def log_prob_since(self, start: Context) -> float:
        """Return the log-probability, given `start`, of the tokens of this context after `start`.

        Raises a ValueError if this context does not continue `start`.
        """
        nodes = list(islice(self.node.path(), max(0, len(self) - len(start))))[::-1]
        if (nodes[0].parent if nodes else self.node) is not start.node:
            raise ValueError(f"{self!r} does not continue {start!r}")
        self.check_length(but=1)                        # the last token is not read
        return sum(request(self.lm.evaluator, (start.node, *nodes))) if nodes else 0.0

    def next_token(self) -> NextToken:
        """Return the distribution of the next token: the same object for every caller while it lives."""
        ref = self.node.next_token
        dist: NextToken | None = None if ref is None else ref()
        if dist is None:
            dist = NextToken(self)
            self.node.next_token = weakref.ref(dist)
        return dist

    def prefetch(self, asker: object) -> None:
        """Schedule the row for this thread's next round, if this context and `asker` live until then."""
        self.check_length()
        if self.node.row is None:
            self.lm.evaluator.prefetch(asker, self)


class NextToken(TokenDistribution):
    """Distribution of the token after `context`, at temperature 1.

    Its probabilities are computed when they are first needed, in one forward pass with all other NextTokens of that
    time.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context.lm.vocab, context.row)
        self.context = context
        context.prefetch(self)

    def string(self) -> StringDistribution:
        """Return the distribution of strings after the context, which only scores, for `observe`."""
        return StringDistribution(self.context)

    def __repr__(self) -> str:
        return "NextToken"                              # equal for all contexts, so that deaths are counted together


class StringDistribution(Distribution[str]):
    """Probability that the text after `context` begins with given tokens, computed in one forward pass.

    `log_prob(text)` is log p(v_1 ... v_n | context) = sum_i log p(v_i | context, v_1 ... v_{i-1}) for the tokens v that
    `context + text` appends. Tokens or ids are scored as they are. It does not sample: many strings are prefixes of one
    text, so there is no single distribution to draw from.
    """

    def __init__(self, context: Context) -> None:
        self.context = context

    def log_prob(self, value: str | Sequence[int]) -> float:
        end = self.context
        if isinstance(value, str):
            end = end + value
        else:
            for token in value:
                end = end + token
        return end.log_prob_since(self.context)

    def sample(self, rng: np.random.Generator) -> NoReturn:
        raise TypeError("string() only scores, for observe(); to draw text, sample its tokens one by one")

    def __repr__(self) -> str:
        return "NextToken.string()"
