"""Wording of deaths: the texts of `death` for the verbs of Model and for the ready-made programs.

A text names the statement, then the value, constraint or bound that excluded the particle. `Model` adds the line of the
program; a ready-made program uses its own words instead. Particles with equal texts are counted together, so a text
contains nothing that differs between particles, except for short values.
"""

from __future__ import annotations

import math
from typing import Any

from llmppl.constraints.constraint import Index
from llmppl.constraints.json import JsonSchemaIndex
from llmppl.distributions.rules import NO_RULE, DecisionRule
from llmppl.support.arguments import name_of

MAX_NAME = 48                                           # characters of a constraint's repr that is used as its name

def name_of_constraint(constraint: Any) -> str:
    """Return a short name for an index, or for a function of the text."""
    if not isinstance(constraint, Index):
        return name_of(constraint)
    made_from = getattr(constraint, "constraint", None) or getattr(constraint, "recognizer", constraint)
    made_from = getattr(made_from, "constraint", made_from)
    strings = getattr(made_from, "strings", None)
    if strings is not None:
        name = f"the list {[*strings]}"
        return name if len(name) <= MAX_NAME else f"the list of {len(strings)} strings"
    name = repr(made_from)
    return type(made_from).__name__ if len(name) > MAX_NAME or name.startswith("<") else name


def is_false(constraint: Any) -> str:
    return f"{name_of_constraint(constraint)} is false of the text"


def explain_refusal(index: Index | None, text: str) -> str:
    """Return why `parse` of the constraint rejects a finished text that the masks allowed; "" if it does not."""
    try:
        _ = None if index is None else index.parse(text)
    except ValueError as error:
        return f"{name_of_constraint(index)} refuses the finished text, larger N would try more of them: {error}"
    return ""


def rule_suffix(rule: DecisionRule) -> str:
    """Return the words that follow a probability to name the decision rule; "" for none."""
    return "" if rule == NO_RULE else f" under {rule!r}"


def explain_no_token(
    index: Index | None, state: Any, left: float, bound: str, rule: DecisionRule, end: str = "eos", *,
    masked: bool = False,
) -> str:  # fmt: skip
    """Return why no token could be drawn.

    The causes are checked in this order: the text cannot end in time, it cannot continue, the probabilities are zero.

    Parameters
    ----------
    index, state
        The constraint, if there is one, and its state after the text.
    left : float
        Number of tokens within which the text must end.
    bound : str
        The bound on all tokens of the text, as "max_tokens=20".
    end : "eos", "boundary" or "prefix"
        As in ConstrainedText.
    masked : bool
        True if the user's mask also restricts the tokens.
    """
    name = "the text" if index is None else name_of_constraint(index)
    late = f"{name} cannot end within {bound}"
    if left == 0 and (index is None or index.accepts(state)):
        end_name = "EOS" if end == "eos" or index is None else "what leaves it"
        return f"{late}: {end_name} has probability 0{' or is not in the mask' * masked}{rule_suffix(rule)}"
    if index is None:
        return f"no token{' that the mask allows' * masked} has positive probability{rule_suffix(rule)}"
    allowed = index.mask(state)
    in_time = allowed if left == math.inf else index.mask_within(state, left)
    if left == 0 or (left < math.inf and not in_time.any()):
        if not isinstance(index, JsonSchemaIndex):
            return f"{late}: give room"
        reason = index.constraint.fallback_reason
        return f"{late}: give room; llguidance makes its masks and looks for no end ({reason})"
    if not allowed.any():
        return f"{name} cannot go on: what must follow is in no token of the vocabulary"
    allow = f"{name} and the mask allow" if masked else f"{name} allows"
    to_end = "" if (allowed == in_time).all() else " to end in time"
    return f"no token that {allow}{to_end} has positive probability{rule_suffix(rule)}"


# ---- ready-made programs


def early_stop(min_tokens: int) -> str:
    return f"a stop string is written before min_tokens={min_tokens}"


def only_ends_early(index: Index, min_tokens: int) -> str:
    return f"{name_of_constraint(index)} can only end before min_tokens={min_tokens}"


def impossible_fragment(rule: DecisionRule) -> str:
    return f"what comes after a hole has probability 0{rule_suffix(rule)}"


def wrong_hole_length(num_tokens: int, min_tokens: int, max_tokens: int | None) -> str:
    if num_tokens < min_tokens:
        return f"the holes have fewer tokens than min_tokens={min_tokens}"
    return f"the holes have more tokens than max_tokens={max_tokens}"


def impossible_after_another(rule: DecisionRule) -> str:
    return f"the token that was drawn after the first prompt has probability 0 after another{rule_suffix(rule)}"


def impossible_after_all(rule: DecisionRule) -> str:
    return f"no token has positive probability after all prompts{rule_suffix(rule)}"
