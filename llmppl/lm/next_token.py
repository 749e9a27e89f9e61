"""The law of the next token after a context, and what can be made of it.

`NextToken(context)` asks the language model when its probabilities are first needed, and by then every other law that a
program has asked for is answered in the same forward pass. `masked`, `tempered`, `top_k`, `top_p`, `product` and
`mixture` give laws over the same vocabulary, so that they combine. `string()` scores several tokens at once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llmppl.arguments import shown
from llmppl.distributions.distribution import Distribution, Finite, Floats
from llmppl.lm.transformer import Context
from llmppl.tokens import EOS, Token, Vocabulary


class TokenDistribution(Finite):
    """A law over the tokens of a vocabulary; (V,) log-probabilities, V = len(vocab).

    Values are `Token`s (or ids). `log_prob(EOS)` is the log of the summed probability of all of the model's eos ids. A
    token of another vocabulary is a ValueError, a str a TypeError.
    """

    support: Vocabulary

    def _like(self, compute: Callable[[], Floats], parents: Sequence[Finite]) -> TokenDistribution:
        return TokenDistribution(self.support, compute, parents)

    def places(self, value: Any) -> list[int]:
        if isinstance(value, str):
            raise TypeError(
                f"a str is not a token: for the text {shown(value)}, use .string(), as in "
                "observe(self.transformer(context).string(), text)"
            )
        return list(self.support.eos_ids) if value is EOS else [self.support.token(value)]

    def log_prob(self, value: Any) -> float:
        places = self.places(value)
        if len(places) == 1:
            return self.log_prob_at(places[0])
        return float(np.logaddexp.reduce([self.log_prob_at(i) for i in places], initial=-math.inf))


class NextToken(TokenDistribution):
    """The language model's own law of the token after `context`, temperature 1."""

    def __init__(self, context: Context) -> None:
        if not isinstance(context, Context):
            raise TypeError(f"the law of the next token wants a Context, lm.context(text), not {context!r}")
        super().__init__(context.lm.vocab, context.log_probs)
        self.context = context
        self.recipe = ("next token", context)
        context.announce(self)

    def log_weights(self) -> Floats:
        if self._log_weights is None:
            row = self.context.row()                    # may wait; of all who wait here, the first to go on computes
            if self._log_weights is None:
                self._log_weights = row.log_probs()
        return self._log_weights

    def log_total(self) -> float:
        return 0.0                                      # the model's law is normalised already

    def log_probs(self) -> Floats:
        return self.log_weights()

    def string(self) -> StringDistribution:
        """The probability of several tokens in a row after the context, for `observe`."""
        return StringDistribution(self.context)

    def __repr__(self) -> str:
        return f"NextToken(after {self.context!r})"


def next_token(context: Context) -> NextToken:
    """The law of the next token after `context`: one object for all who ask while it lives."""
    known = context.node.law if isinstance(context, Context) else None
    law: NextToken | None = None if known is None else known()
    if law is None:
        law = NextToken(context)
        context.node.law = weakref.ref(law)
    return law


class StringDistribution(Distribution):
    """The probability that the text after `context` begins with given tokens, scored in one forward pass.

    `log_prob(text)` is log p(v_1 ... v_n | context) = sum_i log p(v_i | context, v_1 ... v_{i-1}) for the tokens v that
    `context + text` appends; a sequence of tokens (or ids) is scored as it is. It only scores: many strings can be
    prefixes of one text, so there is no one law to draw from.
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

    def sample(self, rng: np.random.Generator) -> Any:
        raise TypeError("string() only scores, for observe(); to draw text, sample its tokens one by one")

    def __repr__(self) -> str:
        return f"NextToken(after {self.context!r}).string()"


__all__ = ["EOS", "NextToken", "StringDistribution", "Token", "TokenDistribution", "next_token"]
