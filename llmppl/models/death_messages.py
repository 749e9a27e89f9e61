"""Causes: what a particle died of, in words of its constraint, where no token could be drawn."""

from __future__ import annotations

import math
from typing import Any

from llmppl.constraints.constraint import Index
from llmppl.constraints.json import JsonSchemaIndex
from llmppl.distributions.rules import NO_RULE, DecisionRule
from llmppl.support.arguments import name_of

MAX_NAME = 48                                           # characters of a constraint that is called by its repr


def name_of_constraint(constraint: Any) -> str:
    """How an index, or a function of the text, is called where many deaths are told."""
    if not isinstance(constraint, Index):
        return name_of(constraint)
    made_from = getattr(constraint, "constraint", None) or getattr(constraint, "recognizer", constraint)
    made_from = getattr(made_from, "constraint", made_from)
    strings = getattr(made_from, "strings", None)
    whole = repr(made_from) if strings is None else f"the list {[*strings]}"
    if strings is not None and len(whole) > MAX_NAME:
        return f"the list of {len(strings)} strings"
    return type(made_from).__name__ if len(whole) > MAX_NAME or whole.startswith("<") else whole


def refusal(index: Index | None, text: str) -> str:
    """Why a finished text, which its masks have let through, is not to be taken; "" if it is."""
    try:
        _ = None if index is None else index.parse(text)
    except ValueError as error:
        return f"{name_of_constraint(index)} refuses the finished text, larger N would try more of them: {error}"
    return ""


def under(rule: DecisionRule) -> str:
    """What is told of the rule, behind a probability."""
    return "" if rule == NO_RULE else f" under {rule!r}"


def no_token(
    index: Index | None, state: Any, left: float, bound: str, rule: DecisionRule, end: str = "eos", *,
    masked: bool = False,
) -> str:  # fmt: skip
    """Why none fits after a text in `state` that must have ended in `left` tokens, of which a mask allows some.

    `bound` is what all its tokens are bounded by.

    That the text cannot end in time comes first, then that nothing goes on; else it is the probabilities.
    """
    name = "the text" if index is None else name_of_constraint(index)
    late = f"{name} cannot end within {bound}"
    if left == 0 and (index is None or index.accepts(state)):
        ends = "EOS" if end == "eos" or index is None else "what leaves it"
        return f"{late}: {ends} has probability 0{' or is not in the mask' * masked}{under(rule)}"
    if index is not None and left < math.inf and not (left and index.mask_within(state, left).any()):
        if not isinstance(index, JsonSchemaIndex):
            return f"{late}: give room"
        reason = index.constraint.fallback_reason
        return f"{late}: give room; llguidance makes its masks and looks for no end ({reason})"
    if index is not None and not index.mask(state).any():
        return f"{name} cannot go on: what must follow is in no token of the vocabulary"
    allows = [name] * (index is not None) + ["the mask"] * masked
    that = f" that {' and '.join(allows)} allow{'s' * (len(allows) == 1)}" * bool(allows)
    in_time = ""
    if index is not None and left < math.inf and (index.mask(state) != index.mask_within(state, left)).any():
        in_time = " to end in time"
    return f"no token{that}{in_time} has positive probability{under(rule)}"
