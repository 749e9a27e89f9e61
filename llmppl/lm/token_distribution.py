"""Distributions over the tokens of a vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from numpy.typing import ArrayLike

from llmppl.constraints.vocabulary import EOS, Token, Vocabulary
from llmppl.distributions import Finite, Floats, Mask, Table
from llmppl.support.arguments import shown
from llmppl.support.shared import Living

End = Literal["eos", "prefix", "boundary"]              # what may come after a text
ENDS: tuple[str, ...] = get_args(End)


class TokenDistribution(Finite[Token]):
    """A distribution over the tokens of a vocabulary; (V,) log-probabilities, V = len(vocab).

    Values are `Token`s (or ids). `log_prob(EOS)` is the log of the summed probability of all of the model's eos ids. A
    token of another vocabulary is a ValueError, a str a TypeError.
    """

    support: Vocabulary
    _with_end: Living[Finite[Token]] | None = None

    def with_end(self, inside: Mask, end: End) -> Finite[Token]:
        """What follows a text of a language: one of the tokens `inside` it, as probable as here, or EOS, its end.

        With p these probabilities, EOS has the weight sum_v p(v) over all v not inside if `end` is "boundary", every
        eos among them, and 1 if it is "prefix", so that the weights sum to 1 + sum_v p(v) over those inside:
        `log_total`, less that of this distribution, is the log of their sum. `inside`, (V,) bool, is not changed
        later; what it says of eos is not looked at.
        """
        if not self.support.eos_ids:
            raise ValueError(f"the end of a text is written as an eos, and {self.support!r} has none")
        self._with_end = self._with_end or Living()
        dist = self._with_end.get((id(inside), end))    # it holds its mask
        if dist is None:

            def compute() -> Table:
                table, stays = self.table(), inside & self.support.not_eos
                among = table.masked(stays)
                if end == "prefix":
                    return among.put(self.support.eos_ids[0], table.log_total)
                stay = math.exp(min(among.log_total - table.log_total, 0.0)) if among.log_total > -math.inf else 0.0
                leaves = table.log_total + math.log1p(-stay) if stay < 0.5 else table.masked(~stays).log_total
                return among.put(self.support.eos_ids[0], leaves)

            by = "with end", inside, end
            dist = self.derive(compute, lambda name: f"{name(self)}.with_end(..., {end!r})", [self], by=by)
            dist._mask = inside
            self._with_end.put((id(inside), end), dist)
        return dist

    if TYPE_CHECKING:                                   # as `_like` makes them

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
