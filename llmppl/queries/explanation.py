"""Diagnosis of a text token by token, under a decision rule (`explain`) or a constraint (`conformity`)."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from llmppl.constraints.values import index_of
from llmppl.constraints.vocabulary import EOS, Token
from llmppl.distributions import NO_RULE, Rule
from llmppl.lm import CachedTransformer, Context, TokenDistribution
from llmppl.models.programs import as_context
from llmppl.support import arguments
from llmppl.support.options import readable_tuple

End = Literal["prefix", "eos"]


@dataclass(frozen=True)
class Certificate:
    """Result for one token: `rank` 1 is the most probable token; `excluded_by` names a part of the rule, or is None."""

    token: Token
    log_prob: float
    rank: int
    excluded_by: str | None

    def __str__(self) -> str:
        text = "end of text" if self.token == EOS else repr(str(self.token))
        reason = f"  excluded by {self.excluded_by}" if self.excluded_by else ""
        return f"{text:>20}  p {math.exp(self.log_prob):.3g}  rank {self.rank}{reason}"


class Explanation(Sequence[Certificate]):
    """Certificates of the tokens of a text; true iff the rule excludes none of them.

    Attributes
    ----------
    log_prob : float
        Log-probability of the tokens under the model itself, without the rule.
    """

    def __init__(self, certificates: Sequence[Certificate]) -> None:
        self._certificates = tuple(certificates)
        self.log_prob = sum(certificate.log_prob for certificate in certificates)

    def __getitem__(self, i):  # type: ignore[no-untyped-def]
        return self._certificates[i]

    def __len__(self) -> int:
        return len(self._certificates)

    def __bool__(self) -> bool:
        return all(certificate.excluded_by is None for certificate in self)

    def __repr__(self) -> str:
        return "\n".join(map(str, self)) or "no tokens: nothing to exclude"


def explain(
    lm: CachedTransformer, text: str, rule: Rule = NO_RULE, *, prefix: str | Context = "", end: End = "prefix"
) -> Explanation:
    """Return probability and rank of each token of `text` after `prefix`, and the part of a rule that excludes it.

    Parameters
    ----------
    text : str
        Text after the prefix; its tokens are those that `lm.context(prefix) + text` appends.
    prefix : str or Context
        Given text; rules do not apply to it.
    end : "prefix" or "eos"
        "prefix": any text may follow. "eos": the text ends, and the last certificate is that of an eos token.
    """
    if not isinstance(rule, Rule):
        raise TypeError(f"explain names the part of a Rule that excludes a token; {rule!r} is none")
    arguments.text("text", text)
    ends = arguments.one_of("end", end, get_args(End)) == "eos"
    context = as_context(lm, prefix)
    ids = list(map(int, (context + text).tokens[len(context) :]))
    contexts = list(itertools.accumulate(ids, operator.add, initial=context))
    dists = [each.next_token() for each in contexts[: len(ids) + ends]]
    if ends:                                            # the most probable eos token stands for all
        ids.append(max(lm.vocab.eos_ids, key=dists[-1].log_prob))
    return Explanation([_certificate(dist, id, rule) for dist, id in zip(dists, ids, strict=True)])


def can_generate(
    lm: CachedTransformer, text: str, rule: Rule = NO_RULE, *, prefix: str | Context = "", end: End = "prefix"
) -> bool:
    """Return True if a decoder with this rule can write `text` after `prefix`: `bool(explain(...))`."""
    return bool(explain(lm, text, rule, prefix=prefix, end=end))


def _certificate(dist: TokenDistribution, id: int, rule: Rule) -> Certificate:
    log_probs = dist.log_probs()
    rank = 1 + int((log_probs > log_probs[id]).sum() + (log_probs[:id] == log_probs[id]).sum())
    impossible = log_probs[id] == -math.inf
    excluded = "the model gives it probability 0" if impossible else rule.excluded_by(dist, id)
    return Certificate(dist.support[id], float(log_probs[id]), rank, excluded)


@readable_tuple
class Conformity(NamedTuple):
    """Agreement of a constraint with the model at one token.

    `mass` is the probability p(A) of the allowed tokens, and `kl` the divergence KL(p( . | A) || p) = -log p(A), in
    nats. `agrees` is True if the most probable token is allowed.
    """

    token: Token
    mass: float
    kl: float
    agrees: bool


def conformity(
    lm: CachedTransformer, prompt: str | Context, constraint: Any, *, max_tokens: int = 100, seed: int | None = None
) -> list[Conformity]:
    """Draw a text by local masking, and return for each token how well the model conforms to the constraint.

    The text ends at EOS, where no token fits, or after `max_tokens`. Source: Willard & Louf 2023, Sec. 5.
    """
    index, rng = index_of(constraint, lm.vocab), arguments.generator(seed)
    if index is None:
        raise TypeError(f"conformity wants a constraint that has masks, not {constraint!r}")
    context, state = as_context(lm, prompt), index.start
    found: list[Conformity] = []
    while len(found) < max_tokens:
        dist, mask = context.next_token(), index.mask(state)
        log_mass = float(np.logaddexp.reduce(dist.log_probs()[mask], initial=-np.inf))
        if log_mass == -np.inf:
            break
        token, best = dist.masked(mask).sample(rng), np.argmax(dist.log_probs())
        found.append(Conformity(token, math.exp(log_mass), -log_mass, bool(mask[best])))
        if token == EOS:
            break
        context, state = context + token, index.advance(state, token)
    return found
