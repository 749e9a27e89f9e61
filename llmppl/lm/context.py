"""Context: tokens that a language model has read, a node of its trie. TokenDistribution: distribution over tokens.

`context.next_token()` computes nothing until its probabilities are needed. One forward pass then computes all
distributions asked for so far. `masked`, `tempered`, `top_k`, `top_p`, `product` and `mixture` give distributions over
the same vocabulary, so they combine. `string()` scores several tokens at once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llmppl.constraints.vocabulary import EOS, EndOfText, Text, Token, Vocabulary, encode_fragment
from llmppl.distributions import Distribution, Finite, Floats, Mask, PutTable, Table
from llmppl.lm.cache import Node
from llmppl.support import arguments
from llmppl.support.runtime import ContextTooLong, request
from llmppl.support.shared import Shared

End = Literal["eos", "prefix", "boundary"]  # how a text ends
ENDS: tuple[str, ...] = get_args(End)
NOT_PICKLED = (
    "cannot be pickled, nor can programs and particles, which hold it: the language model stays in its process. The "
    "results of inference can: pickle the Particles, or save context.text, and load the model where it is needed"
)


class Context(Shared):
    """Tokens that the model has read: an immutable pointer to a node of the trie.

    `context + token` and `context + "text"` are longer contexts. `text` is the text without special tokens, so that
    `(context + text).text == context.text + text`. `tokens` are all tokens, and `len` is their number.

    Examples
    --------
    >>> context = lm.context("Once upon a") + " time"
    >>> str(context.text), len(context)
    ('Once upon a time', 4)
    """

    __slots__ = ("lm", "node", "_start", "_offset", "__weakref__")
    node: Node

    def __init__(self, lm: Any, node: Node, ids: Iterable[int], start: Text, offset: int) -> None:
        self.lm = lm
        self.node = lm.evaluator.place(self, node, ids)
        self._start = start
        self._offset = offset  # number of tokens whose text is `_start`

    def __add__(self, more: Token | int | str | EndOfText) -> Context:
        if isinstance(more, str):
            fragment = arguments.text("text", more)
            ids: Iterable[int] = encode_fragment(self.lm.tokenizer, self.lm.vocab, fragment)
        elif isinstance(more, EndOfText):
            if len(self.lm.vocab.eos_ids) != 1:
                raise ValueError(
                    f"context + EOS is ambiguous; add one of the eos ids {self.lm.vocab.eos_ids}"
                )
            ids = self.lm.vocab.eos_ids
        else:
            ids = (self.lm.vocab.token(more),)
        return Context(self.lm, self.node, ids, self._start, self._offset)

    def check_length(self, but: int = 0) -> None:
        """Raise ContextTooLong if the model cannot read this context without its last `but` tokens.

        Raise a ValueError if the context is empty and the model reads no empty context.
        """
        if not self.node.depth and not self.lm.engine.reads_empty:
            raise ValueError(
                "an empty prompt needs a BOS token, as this model reads no empty context: give some text"
            )
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
        return self._start + Text(
            b"".join(vocab.tokens[i] for i in self.node.tokens()[self._offset :])
        )

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
        return (
            f"Context({text!r})"
            if len(text) <= 60
            else f"Context({text[:20]!r} ... {text[-30:]!r})"
        )

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
        self.check_length(but=1)  # the last token is not read
        return sum(request(self.lm.evaluator, (start.node, *nodes))) if nodes else 0.0

    def next_token(self) -> NextToken:
        """Return the distribution of the next token: the same object for every caller while it lives."""
        ref = self.node.next_token
        dist = None if ref is None else ref()
        if dist is None:
            dist = NextToken(self)
            self.node.next_token = weakref.ref(dist)
        return dist

    def prefetch(self, asker: object) -> None:
        """Schedule the row for this thread's next round, if this context and `asker` live until then."""
        self.check_length()
        if self.node.row is None:
            self.lm.evaluator.prefetch(asker, self)


def eos_of(vocab: Vocabulary) -> int:
    """Return the first eos id; ValueError if there is none."""
    if not vocab.eos_ids:
        raise ValueError(f"an eos id ends a text, and {vocab!r} has none: give it eos_ids=[...]")
    return vocab.eos_ids[0]


def table_with_end(table: Table, kept: Table, stays: Mask, eos: int, end: End) -> Table:
    """Return the table of `TokenDistribution.with_end`: that of the tokens that are `kept`, and the end at `eos`.

    `kept` is `table` where `stays`, (V,) bool, is True.
    """
    if end == "prefix":
        return PutTable(kept, eos, table.log_total)
    stay = 0.0
    if kept.log_total > -math.inf:
        stay = math.exp(min(kept.log_total - table.log_total, 0.0))
    if stay < 0.5:
        return PutTable(kept, eos, table.log_total + math.log1p(-stay))
    return PutTable(kept, eos, table.masked(~stays).log_total)


def extended(pairs: Sequence[tuple[Context, int]]) -> list[Context]:
    """Return the contexts after (context, token) pairs of one language model."""
    found = []
    for context, _ in pairs:
        new: Context = object.__new__(Context)
        new.lm = context.lm
        new.node = context.node
        new._start = context._start
        new._offset = context._offset
        found.append(new)
    if found:
        found[0].lm.evaluator.place_all(found, [token for _, token in pairs])
    return found


class TokenDistribution(Finite[Token]):
    """Distribution over the tokens of a vocabulary; (V,) log-probabilities, V = len(vocab).

    Values are `Token`s (or ids). `log_prob(EOS)` is the log of the summed probability of all eos ids of the model.
    A token of another vocabulary raises a ValueError, a str a TypeError.

    Examples
    --------
    >>> dist = lm.context("Once upon a").next_token().top_k(2)
    >>> [str(lm.vocab[i]) for i in np.flatnonzero(dist.log_probs() > -np.inf)]
    [' time', ' while']
    """

    support: Vocabulary

    def with_end(self, inside: Mask, end: End) -> Finite[Token]:
        """Return the distribution of the token after a text of a language: a token `inside` the language, or EOS.

        Tokens inside keep their probability p. The weight of EOS is sum_v p(v) over all v not inside, every eos among
        them, if `end` is "boundary", and 1 if it is "prefix". The weights sum to 1, or to 1 + sum_v p(v) over v inside:
        `log_total`, minus that of this distribution, is the log of this sum. `inside`, (V,) bool, must not change
        later. Its values at eos ids do not matter.
        """
        eos = eos_of(self.support)

        def compute() -> Table:
            stays = inside & self.support.not_eos
            table = self.table()
            return table_with_end(table, table.masked(stays), stays, eos, end)

        return self.derive(
            compute, lambda: f"{self!r}.with_end(..., {end!r})", key=(id(inside), end)
        )

    if TYPE_CHECKING:  # the types that `_like` returns

        def masked(self, mask: ArrayLike) -> TokenDistribution: ...
        def tempered(self, temperature: float) -> TokenDistribution: ...
        def top_k(self, k: int) -> TokenDistribution: ...
        def top_p(self, p: float) -> TokenDistribution: ...
        def min_p(self, p: float) -> TokenDistribution: ...

    def _like(
        self, compute: Callable[[], Floats | Table], parents: Sequence[Finite[Any]]
    ) -> TokenDistribution:
        return TokenDistribution(self.support, compute, parents)

    def indices(self, value: Any) -> Sequence[int]:
        if isinstance(value, str):
            raise TypeError(
                f"a str is not a token: for the text {arguments.shown(value)}, use .string(), as in "
                "observe(self.transformer(context).string(), text)"
            )
        return self.support.eos_ids if value is EOS else [self.support.token(value)]


class NextToken(TokenDistribution):
    """Distribution of the token after `context`, at temperature 1.

    Its probabilities are computed when they are first needed, in one forward pass with all other NextTokens of that
    time. ValueError if `context` is longer than the model reads.

    Examples
    --------
    >>> dist = lm.context("Once upon a").next_token()
    >>> token = dist.sample(np.random.default_rng(0))
    >>> str(token), round(math.exp(dist.log_prob(token)), 3)
    (' time', 0.999)
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context.lm.vocab, context.row)
        self.context = context
        context.prefetch(self)

    def string(self) -> StringDistribution:
        """Return the distribution of strings after the context, which only scores, for `observe`."""
        return StringDistribution(self.context)

    def __repr__(self) -> str:
        return "NextToken"  # equal for all contexts, so that deaths are counted together


class StringDistribution(Distribution[str]):
    """Probability that the text after `context` begins with given tokens, computed in one forward pass.

    `log_prob(text)` is log p(v_1 ... v_n | context) = sum_i log p(v_i | context, v_1 ... v_{i-1}) for the tokens v that
    `context + text` appends. Tokens or ids are scored as they are. `sample` raises a TypeError: many strings are
    prefixes of one text, so there is no single distribution to draw from.

    Examples
    --------
    >>> string = lm.context("Once upon a").next_token().string()
    >>> round(string.log_prob(" time, there was"), 2)
    -0.32
    """

    def __init__(self, context: Context) -> None:
        self.context = context

    def log_prob(self, value: str | Sequence[int]) -> float:
        end = self.context
        for part in [value] if isinstance(value, str) else value:
            end = end + part
        return end.log_prob_since(self.context)

    def sample(self, rng: np.random.Generator) -> NoReturn:
        raise TypeError(
            "string() only scores, for observe(); to draw text, sample its tokens one by one"
        )

    def __repr__(self) -> str:
        return "NextToken.string()"
