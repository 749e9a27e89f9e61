"""Constraints: sets of texts as automata, and the masks of tokens that may follow. No language model is needed."""

# isort: off
from llmppl.constraints.automata.budget import TooLarge
from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.formats import (
    email, ipv4, iso_date, iso_datetime, iso_time, number_range, phone, url, uuid,
)  # fmt: skip
from llmppl.constraints.automata.regex import Regex
from llmppl.constraints.automata.rewrites import (
    Edit, alignment, any_case, any_whitespace, optional_punctuation, rewrite, synonyms,
    within,
)  # fmt: skip
from llmppl.constraints.constraint import (
    Constraint,
    Index,
    Recognizer,
    TabledRecognizer,
    VocabularyLike,
)
from llmppl.constraints.json import JsonSchema
from llmppl.constraints.lark import Grammar
from llmppl.constraints.machine import Part, Special, part_of
from llmppl.constraints.masks import END, PrecomputedIndex, TokenIndex
from llmppl.constraints.pattern import Pattern
from llmppl.constraints.values import Values, constraint_of, index_of
from llmppl.constraints.vocabulary import (
    EOS, Canonical, CanonicalState, EndOfText, Text, Token, UnsupportedTokenizer, Vocabulary, encode_fragment,
)  # fmt: skip
from llmppl.support import lazy

__all__ = [
    "alignment", "any_case", "any_whitespace", "Canonical", "CanonicalState", "Constraint", "constraint_of",
    "DFA", "Edit", "email", "encode_fragment", "END", "EndOfText", "EOS", "Grammar", "Index", "index_of",
    "ipv4", "iso_date", "iso_datetime", "iso_time", "JsonSchema", "number_range",
    "optional_punctuation", "Part", "part_of", "Pattern", "phone", "PrecomputedIndex", "Recognizer", "Regex",
    "rewrite", "Special", "synonyms", "TabledRecognizer", "Text", "Token", "TokenIndex", "TooLarge",
    "UnsupportedTokenizer", "url", "uuid", "Values", "Vocabulary", "VocabularyLike", "within",
]  # fmt: skip
__dir__ = lazy.public_names(__name__)
