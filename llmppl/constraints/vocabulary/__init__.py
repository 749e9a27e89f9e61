"""Vocabularies: the bytes of tokens, the trie of these bytes, and canonical tokenisation."""

from llmppl.constraints.vocabulary.canonical import Canonical as Canonical
from llmppl.constraints.vocabulary.canonical import CanonicalState as CanonicalState
from llmppl.constraints.vocabulary.pretokens import UnsupportedTokenizer as UnsupportedTokenizer
from llmppl.constraints.vocabulary.text import EOS as EOS
from llmppl.constraints.vocabulary.text import EndOfText as EndOfText
from llmppl.constraints.vocabulary.text import Text as Text
from llmppl.constraints.vocabulary.vocabulary import Token as Token
from llmppl.constraints.vocabulary.vocabulary import Vocabulary as Vocabulary
from llmppl.constraints.vocabulary.vocabulary import encode as encode
from llmppl.constraints.vocabulary.vocabulary import encode_fragment as encode_fragment
from llmppl.constraints.vocabulary.vocabulary import loaded_vocabulary as loaded_vocabulary
