"""Spans: a word, a line, a sentence, a value, drawn token by token within one step.

Every token is a choice of its own, drawn from the model's distribution p after those before it, and proposed from the
tokens that fit, if not all do. With A_i the tokens that fit at place i, a span v_1 ... v_n of log-probability
sum_i log p(v_i) is drawn with the weight prod_i p(A_i), so that under inference it has the probability prod_i p(v_i),
restricted to what fits. Nothing selects between its tokens: what fits hardly anywhere needs a step for each.
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
from llmppl.models.death_messages import name_of_constraint, no_token, refusal
from llmppl.support import arguments
from llmppl.support.options import readable_tuple
from llmppl.support.runtime import mask_timer
from llmppl.support.shared import Shared

NEAR = 64                               # tokens left of what a model reads when a text begins to look for its end
Until = Callable[[str], bool | np.bool_]


@readable_tuple
class Span(NamedTuple):
    """What `Model.extend` drew.

    text : str
        The text of its tokens.
    context : Context
        The context that it was drawn after, with these tokens; an EOS is not added.
    log_prob : float
        The log-probability of its tokens, and of the EOS, if any, after that context, under the rule: what fits is not
        asked.
    ended : "until", "eos" or "max_tokens"
        What ended it; "max_tokens" also where the particle died outside of a step, which a death would leave.
    parsed : object
        What the text stands for, by `parse` of the constraint, such as an int; the text itself if it has none. None of
        a span that was cut.
    """

    text: Text
    context: Context
    log_prob: float
    ended: str
    parsed: Any = None


class Extent:
    """How far a span goes, and what fits: the arguments of `Model.extend`, checked.

    Raises
    ------
    TypeError, ValueError
        If an argument is of another type or out of range, nothing ends the span, or nothing can end it in time.
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
        """What the token after `num_tokens` of them must meet."""
        left = self.must_end_by - num_tokens
        if self.index is not None:
            with mask_timer():
                yield self.index.mask(state) if left == math.inf else self.index.mask_within(state, left)
        if left == 0:
            yield self.vocab.only_eos

    def cause(self, state: Any, num_tokens: int, rule: DecisionRule) -> str:
        """Why no token fits after `num_tokens` of them."""
        return no_token(self.index, state, self.must_end_by - num_tokens, f"max_tokens={self.max_tokens}", rule)

    def advance(self, state: Any, token: Token) -> Any:
        """The state of the constraint after one more token."""
        if self.index is None:
            return None
        with mask_timer():
            return self.index.advance(state, token)

    def parse(self, text: Text) -> Any:
        """The object that the text of a span that has ended stands for."""
        return str(text) if self.index is None else self.index.parse(text)

    def is_over(self, state: Any, text: Text) -> bool:
        """Whether the span ends with `text`: `until` holds of it, and the constraint accepts it."""
        if self.index is not None and not self.index.accepts(state):
            return False
        if callable(self.until):
            over = arguments.truth("until", self.until, text)
        else:
            over = self.until in text if self.until is not None else self.index is not None
        return over and not refusal(self.index, text)


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
        why = functools.partial(extent.cause, state, num_tokens, rule)
        token = model._draw_("extend", dist, None if proposal is dist else proposal, why)
        if token is None:                               # it died, by hand and in no step
            break
        log_prob += dist.log_prob(token)
        if token == EOS and not (refused := refusal(extent.index, text)):
            return Span(text, context, log_prob, "eos", extent.parse(text))
        if token == EOS:
            model._die_("extend", f"extend: {refused}")
            break
        text, context, num_tokens = text + token, context + token, num_tokens + 1
        state = extent.advance(state, token)
        if extent.constraint is not None and not arguments.truth("constraint", extent.constraint, text):
            model._die_("extend", f"extend: {name_of_constraint(extent.constraint)} is false of the text")
        elif extent.is_over(state, text):
            return Span(text, context, log_prob, "until", extent.parse(text))
    return Span(text, context, log_prob, "max_tokens")


def must_end_by(
    what: str, complete: bool | None, max_tokens: int | None, index: Index | None, room: float = math.inf
) -> float:
    """After how many tokens a `what` must have ended: `max_tokens` if it must be complete, else infinity.

    At most `room`, what the model can read. If nobody says whether it must (None), one of a constraint must, if it is
    bounded by either.
    """
    most = room if max_tokens is None else min(max_tokens, room)
    if complete is None:
        complete = index is not None and most < math.inf
    if not arguments.flag("complete", complete):
        return math.inf
    if most == math.inf:
        raise ValueError(f"complete=True wants max_tokens, after which the {what} must have ended")
    if index is None or (max_tokens is None and room > NEAR):
        return most
    if isinstance(index, TokenIndex) and index.mask_within(index.start, most).any():
        return most                                     # without the shortest, which takes longer to find
    shortest = index.tokens_to_accept(index.start)
    if shortest > most:
        told = f", the shortest takes {shortest} tokens" * (shortest < math.inf)
        within = f"{index!r}: no {what} ends within {name_of_bound(max_tokens, room)}{told}"
        raise ValueError(f"{within}: give room, or complete=False to cut it there")
    return most


def name_of_bound(max_tokens: int | None, room: float) -> str:
    """By what a text must have ended, in words."""
    if max_tokens is not None and max_tokens <= room:
        return f"max_tokens={max_tokens}"
    return f"the {room:g} token{'s' * (room != 1)} that the model can read after the prompt"


def _index_of(constraint: Any, vocab: Vocabulary) -> Index | None:
    """The index of a constraint, which a step asks for again and again."""
    constraint = tuple(constraint) if isinstance(constraint, list) else constraint
    lasting = isinstance(constraint, Shared | tuple) or arguments.is_type(constraint)
    if lasting and not isinstance(constraint, Index) and arguments.is_hashable(constraint):
        return _kept_index(constraint, vocab)
    return index_of(constraint, vocab)


@functools.lru_cache(16)
def _kept_index(constraint: Any, vocab: Vocabulary) -> Index | None:
    return index_of(constraint, vocab)
