"""The index of whatever a constraint may be: one question, `index_of(constraint, vocab)`.

A constraint makes its own index (`constraint.index(vocab)`). What is none itself is turned into one here: recognizers
that know nothing of vocabularies, the automata of `interegular`, and indices that are there already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmppl.arguments import is_type
from llmppl.languages.dfa import DFA
from llmppl.masks import Index, TokenIndex, VocabularyLike

__all__ = ["index_of"]

FSM = ("alphabet", "finals", "initial", "map")      # the attributes of an interegular.FSM


def index_of(constraint: Any, vocab: VocabularyLike) -> Index | None:
    """The index of a constraint over `vocab`; None for one that is a function of the text.

    Parameters
    ----------
    constraint : Constraint, Recognizer, interegular.FSM, Index, callable or None
    vocab : VocabularyLike

    Raises
    ------
    TypeError
        If it is no constraint; a type is none, though it can be called.
    ValueError
        If it is an index over another vocabulary, or no token of this one begins a string of its language.
    """
    if is_type(constraint):
        raise TypeError(
            f"a constraint cannot be the type {constraint!r}: give JsonSchema(...) for values written as JSON, "
            "Regex(...), or a function of the text"
        )
    if isinstance(constraint, Index):
        if constraint.vocab is not vocab and constraint.vocab != vocab:
            raise ValueError(f"{constraint!r} is an index over another vocabulary than the model's, {vocab!r}")
        return constraint
    if _has(constraint, "index") and not isinstance(constraint, Sequence):      # strings and lists have one
        index = constraint.index(vocab)
        if not isinstance(index, Index):
            raise TypeError(f"{constraint!r}.index(vocab) must give an llmppl.masks.Index, not {index!r}")
        return index
    if _has(constraint, "start", "step", "accepts"):
        return TokenIndex(constraint, vocab)
    if _has(constraint, *FSM):
        return DFA.from_interegular(constraint).index(vocab)
    if constraint is None or callable(constraint):
        return None
    raise TypeError(
        "a constraint is a Regex, a Grammar, a JsonSchema, an index of one, or a function of the text, not "
        f"{constraint!r}"
    )


def _has(thing: object, *names: str) -> bool:
    return all(hasattr(thing, name) for name in names)
