"""Spans: a word, a line, a sentence or a value, drawn token by token within one step.

Every token is a choice of its own, from the model's distribution p after the tokens before it. If not all tokens are
allowed, it is proposed from the allowed ones. With A_i the tokens allowed at place i, a span v_1 ... v_n of
log-probability  sum_i log p(v_i)  is drawn with the weight  prod_i p(A_i).  Under inference it then has the probability
prod_i p(v_i), restricted to the allowed spans. There is no selection between the tokens of a span. If a constraint is
rarely satisfied, use one step for each token instead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmppl.constraints.constraint import Index
from llmppl.constraints.masks import TokenIndex
from llmppl.constraints.values import index_of
from llmppl.constraints.vocabulary import EOS, Text, Token, Vocabulary
from llmppl.distributions import Finite
from llmppl.distributions.rules import NO_RULE, DecisionRule
from llmppl.lm import Context, TokenDistribution
from llmppl.support import arguments
from llmppl.support.options import readable_tuple
from llmppl.support.runtime import mask_timer
from llmppl.support.shared import Shared

MAX_NAME = 48                           # characters of a constraint's repr that is used as its name
NEAR = 64                               # tokens left in the model's length from which on a text plans its end
Until = Callable[[str], bool | np.bool_]


@readable_tuple
class Span(NamedTuple):
    """Result of `Model.extend`.

    text : str
        The text of the tokens.
    context : Context
        The given context plus these tokens; an EOS is not added.
    log_prob : float
        The log-probability of the tokens, and of the EOS if there is one, after the given context and under the rule.
        Constraints do not change it.
    ended : "until", "eos" or "max_tokens"
        The end of the span. It is also "max_tokens" if the particle died outside of a step.
    parsed : object
        The value of the text by `parse` of the constraint, such as an int; the text itself if the constraint has no
        `parse`; None for a span that was cut.
    """

    text: Text
    context: Context
    log_prob: float
    ended: str
    parsed: Any = None


class Extent:
    """Arguments of `Model.extend`, checked: the allowed tokens and the end of a span.

    Raises
    ------
    TypeError, ValueError
        If an argument is of another type or out of range, no argument ends the span, or none can end it in time.
    """

    def __init__(
        self, context: Context, until: str | Until | None, max_tokens: int | None, constraint: Any,
        complete: bool | None,
    ) -> None:  # fmt: skip
        if not isinstance(context, Context):
            raise TypeError(f"extend wants a Context, lm.context(text), not {arguments.shown(context)}")
        if isinstance(until, str) and not arguments.text("until", until):
            raise ValueError('until must be a text of at least one character, not ""')
        if until is not None and not isinstance(until, str):
            arguments.function("until", until, "ends_sentence")
        self.vocab, self.until = context.lm.vocab, until
        self.max_tokens = arguments.optional_count("max_tokens", max_tokens)
        self.index = _index_of(constraint, self.vocab)
        self.constraint = constraint if self.index is None else None
        if until is None and max_tokens is None and self.index is None:
            raise ValueError(
                "extend wants to know where the span ends: give until='.', a constraint such as Regex(...), or "
                "max_tokens=20"
            )
        self.start = None if self.index is None else self.index.start
        self.must_end_by = must_end_by("span", complete, self.max_tokens, self.index)
        self.cut_after = self.max_tokens if self.must_end_by == math.inf else None

    def masks(self, state: Any, num_tokens: int) -> Iterator[NDArray[np.bool_]]:
        """Yield masks that the token after the first `num_tokens` must satisfy."""
        left = self.must_end_by - num_tokens
        if self.index is not None:
            with mask_timer():
                yield self.index.mask(state) if left == math.inf else self.index.mask_within(state, left)
        if left == 0:
            yield self.vocab.only_eos

    def explain_no_token(self, state: Any, num_tokens: int, rule: DecisionRule) -> str:
        bound = f"max_tokens={self.max_tokens}"
        return explain_no_token(self.index, state, self.must_end_by - num_tokens, bound, rule)

    def advance(self, state: Any, token: Token) -> Any:
        """Return the state of the constraint after one more token."""
        if self.index is None:
            return None
        with mask_timer():
            return self.index.advance(state, token)

    def parse(self, text: Text) -> Any:
        """Return the value of the text of a span that has ended."""
        return str(text) if self.index is None else self.index.parse(text)

    def is_over(self, state: Any, text: Text) -> bool:
        """Return True if the span ends with `text`: `until` holds, and the constraint accepts it."""
        if self.index is not None and not self.index.accepts(state):
            return False
        if callable(self.until):
            over = arguments.truth("until", self.until, text)
        else:
            over = self.index is not None if self.until is None else self.until in text
        return over and not explain_refusal(self.index, text)


def extend(model: Any, context: Context, extent: Extent, rule: DecisionRule) -> Span:
    """Draw a span after `context` as choices of the particle `model`; see `Model.extend`."""
    arguments.function("rule", rule, "Rule(top_k=40)")
    text, log_prob, state, num_tokens = Text(), 0.0, extent.start, 0
    while num_tokens != extent.cut_after and not model.finished:
        dist: TokenDistribution = model.transformer(context)
        if rule is not NO_RULE:
            dist = rule(dist)
        proposal: Finite = dist
        for mask in extent.masks(state, num_tokens):
            proposal = proposal.masked(mask)
        explain = functools.partial(extent.explain_no_token, state, num_tokens, rule)
        token = model._draw_("extend", dist, None if proposal is dist else proposal, explain)
        if token is None:                               # the particle died by hand, outside of a step
            break
        log_prob += dist.log_prob(token)
        if token == EOS:
            refusal = explain_refusal(extent.index, text)
            if not refusal:
                return Span(text, context, log_prob, "eos", extent.parse(text))
            model._die_("extend", f"extend: {refusal}")
            break
        text, context, num_tokens = text + token, context + token, num_tokens + 1
        state = extent.advance(state, token)
        if extent.constraint is not None and not arguments.truth("constraint", extent.constraint, text):
            model._die_("extend", f"extend: {name_of_constraint(extent.constraint)} is false of the text")
        elif extent.is_over(state, text):
            return Span(text, context, log_prob, "until", extent.parse(text))
    return Span(text, context, log_prob, "max_tokens")


# ---- reasons of deaths: one sentence that names the constraint or bound, and nothing that differs between particles


def name_of_constraint(constraint: Any) -> str:
    """Return a short name for an index, or for a function of the text."""
    if not isinstance(constraint, Index):
        return arguments.name_of(constraint)
    made_from = getattr(constraint, "constraint", None) or getattr(constraint, "recognizer", constraint)
    made_from = getattr(made_from, "constraint", made_from)
    strings = getattr(made_from, "strings", None)
    if strings is not None:
        name = f"the list {[*strings]}"
        return name if len(name) <= MAX_NAME else f"the list of {len(strings)} strings"
    name = repr(made_from)
    return type(made_from).__name__ if len(name) > MAX_NAME or name.startswith("<") else name


def explain_refusal(index: Index | None, text: str) -> str:
    """Return why `parse` of the constraint rejects a finished text that the masks allowed; "" if it does not."""
    try:
        _ = None if index is None else index.parse(text)
    except ValueError as error:
        return f"{name_of_constraint(index)} refuses the finished text, larger N would try more of them: {error}"
    return ""


def explain_no_token(
    index: Index | None, state: Any, left: float, bound: str, rule: DecisionRule, *, masked: bool = False
) -> str:
    """Return why no token could be drawn after `state`: the text cannot end in time or go on, or has probability 0.

    `left` is the number of tokens within which the text must end, and `bound` names the bound on all tokens, as
    "max_tokens=20". `masked` is True if the user's mask also restricts the tokens.
    """
    name = "the text" if index is None else name_of_constraint(index)
    under = "" if rule == NO_RULE else f" under {rule!r}"
    if left == 0 or (index is not None and left < math.inf and not index.mask_within(state, left).any()):
        return f"{name} cannot end within {bound}: give room{under}"
    if index is not None and not index.mask(state).any():
        return f"{name} cannot go on: no token of the vocabulary continues it"
    if index is None:
        return f"no token{' that the mask allows' * masked} has positive probability{under}"
    allow = f"{name} and the mask allow" if masked else f"{name} allows"
    return f"no token that {allow} has positive probability{under}"


def must_end_by(
    kind: str, complete: bool | None, max_tokens: int | None, index: Index | None, room: float = math.inf
) -> float:
    """Return the number of tokens after which a text must have ended; infinity if it may be cut.

    Parameters
    ----------
    kind : "text" or "span", for errors
    complete : bool, optional
        True if the text must end. By default it must if it has a constraint and a bound.
    max_tokens : int, optional
    index : Index of the constraint, optional
    room : float
        Number of tokens that the model can still read.

    Raises
    ------
    ValueError
        If the text must end and has no bound, or if no text of the constraint ends within it.
    """
    bound = room if max_tokens is None else min(max_tokens, room)
    if complete is None:
        complete = index is not None and bound < math.inf
    if not complete:
        return math.inf
    if bound == math.inf:
        raise ValueError(f"complete=True wants max_tokens, after which the {kind} must have ended")
    if index is None or (max_tokens is None and room > NEAR):
        return bound
    if isinstance(index, TokenIndex):
        if index.mask_within(index.start, bound).any():
            return bound                                # the shortest text takes longer to find
        shortest = index.tokens_to_accept(index.start, 4 * bound)       # the question of an error is bounded
    else:
        shortest = index.tokens_to_accept(index.start)
    if shortest > bound:
        takes = f", the shortest takes {shortest} tokens" * (shortest < math.inf)
        within = f"{index!r}: no {kind} ends within {name_of_bound(max_tokens, room)}{takes}"
        raise ValueError(f"{within}: give room, or complete=False to cut it there")
    return bound


def name_of_bound(max_tokens: int | None, room: float) -> str:
    """Return the bound of a text in words."""
    if max_tokens is not None and max_tokens <= room:
        return f"max_tokens={max_tokens}"
    return f"the {room:g} token{'s' * (room != 1)} that the model can read after the prompt"


def _index_of(constraint: Any, vocab: Vocabulary) -> Index | None:
    """Return the index of a constraint. It is cached, because a step needs it again and again."""
    constraint = tuple(constraint) if isinstance(constraint, list) else constraint
    is_constant = isinstance(constraint, Shared | tuple) or arguments.is_type(constraint)
    if is_constant and not isinstance(constraint, Index) and arguments.is_hashable(constraint):
        return _cached_index_of(constraint, vocab)
    return index_of(constraint, vocab)


_cached_index_of = functools.lru_cache(16)(index_of)
