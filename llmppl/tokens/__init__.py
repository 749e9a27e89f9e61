"""Tokens: their bytes, and what a tokenizer would write."""

from llmppl.tokens.canonical import Canonical as Canonical
from llmppl.tokens.canonical import CanonicalState as CanonicalState
from llmppl.tokens.patterns import UnsupportedTokenizer as UnsupportedTokenizer
from llmppl.tokens.text import EOS as EOS
from llmppl.tokens.text import EndOfText as EndOfText
from llmppl.tokens.text import Text as Text
from llmppl.tokens.vocabulary import Token as Token
from llmppl.tokens.vocabulary import Vocabulary as Vocabulary
from llmppl.tokens.vocabulary import encode_fragment as encode_fragment
