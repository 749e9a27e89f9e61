"""Decision rules: how a decoder changes the law of the next token before it draws; what they would have excluded.

A rule is any function from a law over tokens to a law over the same tokens, such as `lambda law: law.top_k(40)`.
`Rule` is the one that text generators have; it can also say which of its parts excludes a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llmppl import arguments
from llmppl.distributions import Finite
from llmppl.lm import CachedTransformer, Context
from llmppl.tokens import EOS, Token

DecisionRule = Callable[[Finite], Finite]


@dataclass(frozen=True)
class Rule:
    """Temperature, then top-k, then top-p, then min-p: each renormalises what the one before it leaves.

    Parameters
    ----------
    temperature : float > 0
        Probabilities are raised to 1 / temperature.
    top_k : int >= 1, optional
        The k most probable tokens stay; of equals, those of lower id.
    top_p : float in (0, 1], optional
        The smallest set of most probable tokens whose probability is at least p stays (Holtzman et al. 2020).
    min_p : float in (0, 1], optional
        Tokens of at least `min_p` times the probability of the most probable one stay (Nguyen et al. 2025).

    Raises
    ------
    TypeError, ValueError
        For what is no number, and for one outside its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        arguments.temperature(self.temperature)
        arguments.optional_count("top_k", self.top_k)
        for name, p in (("top_p", self.top_p), ("min_p", self.min_p)):
            if p is not None:
                arguments.probability(name, p, above_0=True)

    def __call__(self, law: Finite) -> Finite:
        return [law, *(left for _, left in self.stages(law))][-1]

    def stages(self, law: Finite) -> Iterator[tuple[str, Finite]]:
        """The parts that are in force, by name, each with the law that it leaves."""
        if self.temperature != 1.0:
            law = law.tempered(self.temperature)
            yield f"temperature={self.temperature:g}", law
        if self.top_k is not None:
            law = law.top_k(self.top_k)
            yield f"top_k={self.top_k}", law
        if self.top_p is not None:
            law = law.top_p(self.top_p)
            yield f"top_p={self.top_p:g}", law
        if self.min_p is not None:
            law = _min_p(law, self.min_p)
            yield f"min_p={self.min_p:g}", law

    def excluded_by(self, law: Finite, token: Token | int) -> str | None:
        """The first part that leaves `token` no probability, as "top_k=40"; None if it can be drawn."""
        for name, left in self.stages(law):
            if left.log_prob(token) == -math.inf:
                return name
        return None


def _min_p(law: Finite, p: float) -> Finite:
    def compute() -> np.ndarray:
        log_weights = law.log_weights()
        return np.where(log_weights >= log_weights.max() + math.log(p), log_weights, -np.inf)

    return law.derive(compute, lambda: f"{law!r}.min_p({p:g})", by=("min_p", p))


@dataclass(frozen=True)
class Certificate:
    """What a model says of one token: `rank` 1 is the most probable one; `excluded_by` names a rule's part, or None."""

    token: Token
    log_prob: float
    rank: int
    excluded_by: str | None

    def __str__(self) -> str:
        text = "end of text" if self.token == EOS else repr(str(self.token))
        why = f"  excluded by {self.excluded_by}" if self.excluded_by else ""
        return f"{text:>20}  p {math.exp(self.log_prob):.3g}  rank {self.rank}{why}"


class Explanation(Sequence[Certificate]):
    """The certificates of the tokens of a text; true iff no rule excludes any of them.

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
    lm: CachedTransformer, text: str, rule: Rule | None = None, *, prefix: str | Context = "", end: bool = False
) -> Explanation:
    """Each token of `text` after `prefix`: its probability and rank, and which part of a rule would have excluded it.

    Parameters
    ----------
    text : str
        What follows the prefix; its tokens are those that `lm.context(prefix) + text` appends.
    rule : Rule, optional
        None of its parts is in force if left out.
    prefix : str or Context
        What is given; rules do not apply to it.
    end : bool
        Whether the text must end there; the last certificate is then that of an eos token.
    """
    if not isinstance(lm, CachedTransformer):
        raise TypeError(f"explain wants a CachedTransformer first, not {arguments.shown(lm)}")
    if rule is not None and not isinstance(rule, Rule):
        raise TypeError(f"explain names the part of a Rule that excludes a token; {rule!r} is none")
    if not isinstance(prefix, (str, Context)):
        raise TypeError(f"prefix must be a str or a Context, not {arguments.shown(prefix)}")
    arguments.text("text", text)
    if arguments.flag("end", end) and not lm.vocab.eos_ids:
        raise ValueError("end=True asks for the end of the text, and this vocabulary has no eos token")
    context = lm.context(prefix) if isinstance(prefix, str) else prefix
    whole = context + text if text else context
    ids = [int(token) for token in whole.tokens[len(context) :]]
    contexts = [context]
    for id in ids:
        contexts.append(contexts[-1] + id)
    laws = [each.next_token() for each in contexts[: len(ids) + end]]
    if end:                                             # of several eos tokens, the most probable one stands for all
        ids.append(max(lm.vocab.eos_ids, key=lambda eos: laws[-1].log_prob(eos)))
    certificates = []
    for law, id in zip(laws, ids, strict=True):
        log_probs = law.log_probs()
        rank = 1 + int((log_probs > log_probs[id]).sum() + (log_probs[:id] == log_probs[id]).sum())
        excluded = "the model gives it probability 0" if log_probs[id] == -math.inf else None
        if rule is not None and excluded is None:
            excluded = rule.excluded_by(law, id)
        certificates.append(Certificate(lm.vocab[id], float(log_probs[id]), rank, excluded))
    return Explanation(certificates)


def can_generate(
    lm: CachedTransformer, text: str, rule: Rule | None = None, *, prefix: str | Context = "", end: bool = False
) -> bool:
    """Whether a decoder with this rule can write `text` after `prefix`: `bool(explain(...))`."""
    return bool(explain(lm, text, rule, prefix=prefix, end=end))
