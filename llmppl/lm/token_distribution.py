"""TokenDistribution: distribution over the tokens of a vocabulary, with or without the end of a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from numpy.typing import ArrayLike

from llmppl.constraints.vocabulary import EOS, Token, Vocabulary
from llmppl.distributions import Finite, Floats, Mask, Table
from llmppl.support.arguments import shown

End = Literal["eos", "prefix", "boundary"]              # how a text ends
ENDS: tuple[str, ...] = get_args(End)


class TokenDistribution(Finite[Token]):
    """Distribution over the tokens of a vocabulary; (V,) log-probabilities, V = len(vocab).

    Values are `Token`s (or ids). `log_prob(EOS)` is the log of the summed probability of all eos ids of the model.
    A token of another vocabulary raises a ValueError, a str a TypeError.
    """

    support: Vocabulary

    def with_end(self, inside: Mask, end: End) -> Finite[Token]:
        """Return the distribution of the token after a text of a language: a token `inside` the language, or EOS.

        Tokens inside keep their probability p. The weight of EOS is sum_v p(v) over all v not inside, every eos among
        them, if `end` is "boundary", and 1 if it is "prefix". The weights sum to 1, or to 1 + sum_v p(v) over v inside:
        `log_total`, minus that of this distribution, is the log of this sum. `inside`, (V,) bool, must not change
        later. Its values at eos ids do not matter.
        """
        if not self.support.eos_ids:
            raise ValueError(f"an eos id ends a text, and {self.support!r} has none: give it eos_ids=[...]")

        def compute() -> Table:
            table, stays = self.table(), inside & self.support.not_eos
            kept = table.masked(stays)
            if end == "prefix":
                return kept.put(self.support.eos_ids[0], table.log_total)
            stay = math.exp(min(kept.log_total - table.log_total, 0.0)) if kept.log_total > -math.inf else 0.0
            leave = table.log_total + math.log1p(-stay) if stay < 0.5 else table.masked(~stays).log_total
            return kept.put(self.support.eos_ids[0], leave)
        return self.derive(compute, lambda: f"{self!r}.with_end(..., {end!r})", key=(id(inside), end))

    if TYPE_CHECKING:                                   # the types that `_like` returns

        def masked(self, mask: ArrayLike) -> TokenDistribution: ...
        def tempered(self, temperature: float) -> TokenDistribution: ...
        def top_k(self, k: int) -> TokenDistribution: ...
        def top_p(self, p: float) -> TokenDistribution: ...

    def _like(self, compute: Callable[[], Floats | Table], parents: Sequence[Finite[Any]]) -> TokenDistribution:
        return TokenDistribution(self.support, compute, parents)

    def indices(self, value: Any) -> Sequence[int]:
        if isinstance(value, str):
            raise TypeError(
                f"a str is not a token: for the text {shown(value)}, use .string(), as in "
                "observe(self.transformer(context).string(), text)"
            )
        return self.support.eos_ids if value is EOS else [self.support.token(value)]
