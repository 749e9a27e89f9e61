"""The index of whatever a constraint may be: one question, `index_of(constraint, vocab)`.

A constraint makes its own index (`constraint.index(vocab)`). What is none itself is turned into one here: recognizers
that know nothing of vocabularies, the automata of `interegular`, Python types, lists of strings, and indices that are
there already.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from llmppl.arguments import is_type, shown
from llmppl.languages.dfa import DFA
from llmppl.languages.values import constraint_of
from llmppl.masks import Index, TokenIndex, VocabularyLike

__all__ = ["index_of"]

FSM = ("alphabet", "finals", "initial", "map")      # the attributes of an interegular.FSM


def index_of(constraint: Any, vocab: VocabularyLike) -> Index | None:
    """The index of a constraint over `vocab`; None for one that is a function of the text.

    Parameters
    ----------
    constraint : Constraint, Recognizer, interegular.FSM, Index, type, list of str, callable or None
    vocab : VocabularyLike

    Raises
    ------
    TypeError
        If it is no constraint, or a type whose values are written neither in plain text nor as JSON.
    ValueError
        If it is an index over another vocabulary, or no token of this one begins a string of its language.
    """
    if is_type(constraint):
        return constraint_of(constraint).index(vocab)
    if isinstance(constraint, Index):
        if constraint.vocab is not vocab and constraint.vocab != vocab:
            raise ValueError(f"{constraint!r} is an index over another vocabulary than the model's, {vocab!r}")
        return constraint
    if _has(constraint, "index") and not isinstance(constraint, Sequence):      # strings and lists have one
        index = constraint.index(vocab)
        if not isinstance(index, Index):
            raise TypeError(f"{constraint!r}.index(vocab) must give an llmppl.masks.Index, not {index!r}")
        return index
    if isinstance(constraint, list | tuple):
        return DFA.from_strings(constraint).index(vocab)
    if _has(constraint, "start", "step", "accepts"):
        return TokenIndex(constraint, vocab)
    if _has(constraint, *FSM):
        return DFA.from_interegular(constraint).index(vocab)
    if constraint is None or callable(constraint):
        return None
    raise TypeError(
        "a constraint is a Regex, a Grammar, a JsonSchema, a type, a list of strings, an index of one of them, or a "
        f"function of the text, not {shown(constraint)}{_meant(constraint)}"
    )


def _meant(given: Any) -> str:
    """What would have worked for what is no constraint."""
    if isinstance(given, re.Pattern):
        return f": give Regex({shown(given.pattern)})"
    if isinstance(given, Mapping) or (isinstance(given, str) and given.lstrip().startswith("{")):
        return f": give JsonSchema({shown(given)})"
    if isinstance(given, str):
        return f": give Regex({shown(given)}), or a list for the text as it stands, [{shown(given)}]"
    if isinstance(given, Set):
        return ": give its texts in a list"
    is_value = dataclasses.is_dataclass(given) or hasattr(given, "model_fields")
    return f": give its type, {type(given).__name__}" if is_value else ""


def _has(thing: object, *names: str) -> bool:
    return all(hasattr(thing, name) for name in names)
