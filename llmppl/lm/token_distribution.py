"""Distributions over the tokens of a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llmppl.arguments import shown
from llmppl.distributions import Finite, Floats, Table
from llmppl.tokens import EOS, Vocabulary


class TokenDistribution(Finite):
    """A distribution over the tokens of a vocabulary; (V,) log-probabilities, V = len(vocab).

    Values are `Token`s (or ids). `log_prob(EOS)` is the log of the summed probability of all of the model's eos ids. A
    token of another vocabulary is a ValueError, a str a TypeError.
    """

    support: Vocabulary

    def _like(self, compute: Callable[[], Floats | Table], parents: Sequence[Finite]) -> TokenDistribution:
        return TokenDistribution(self.support, compute, parents)

    def indices(self, value: Any) -> Sequence[int]:
        if isinstance(value, str):
            raise TypeError(
                f"a str is not a token: for the text {shown(value)}, use .string(), as in "
                "observe(self.transformer(context).string(), text)"
            )
        return self.support.eos_ids if value is EOS else [self.support.token(value)]
