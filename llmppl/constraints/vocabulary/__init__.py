"""Vocabularies: the bytes of tokens, the trie of these bytes, and canonical tokenisation."""

from llmppl.constraints.vocabulary.canonical import Canonical, CanonicalState
from llmppl.constraints.vocabulary.pretokens import UnsupportedTokenizer
from llmppl.constraints.vocabulary.text import EOS, EndOfText, Text
from llmppl.constraints.vocabulary.vocabulary import (
    Token,
    Vocabulary,
    encode,
    encode_fragment,
    loaded_vocabulary,
)

__all__ = [
    "EOS",
    "Canonical",
    "CanonicalState",
    "EndOfText",
    "Text",
    "Token",
    "UnsupportedTokenizer",
    "Vocabulary",
    "encode",
    "encode_fragment",
    "loaded_vocabulary",
]
