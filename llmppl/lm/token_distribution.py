"""Distributions over the tokens of a vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llmppl.arguments import shown
from llmppl.distributions.distribution import Finite, Floats
from llmppl.tokens import EOS, Vocabulary


class TokenDistribution(Finite):
    """A distribution over the tokens of a vocabulary; (V,) log-probabilities, V = len(vocab).

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
