"""Constraints: sets of texts as automata, and the masks of tokens that may follow. No language model is needed.

The folder does not import a model or inference: `from llmppl.constraints import Regex, TokenIndex, Vocabulary`.
"""

from llmppl.constraints.automata.budget import TooLarge as TooLarge
from llmppl.constraints.automata.dfa import DFA as DFA
from llmppl.constraints.automata.formats import email as email
from llmppl.constraints.automata.formats import ipv4 as ipv4
from llmppl.constraints.automata.formats import iso_date as iso_date
from llmppl.constraints.automata.formats import iso_datetime as iso_datetime
from llmppl.constraints.automata.formats import iso_time as iso_time
from llmppl.constraints.automata.formats import number_range as number_range
from llmppl.constraints.automata.formats import phone as phone
from llmppl.constraints.automata.formats import url as url
from llmppl.constraints.automata.formats import uuid as uuid
from llmppl.constraints.automata.regex import Regex as Regex
from llmppl.constraints.automata.rewrites import Edit as Edit
from llmppl.constraints.automata.rewrites import alignment as alignment
from llmppl.constraints.automata.rewrites import any_case as any_case
from llmppl.constraints.automata.rewrites import any_whitespace as any_whitespace
from llmppl.constraints.automata.rewrites import distance as distance
from llmppl.constraints.automata.rewrites import homoglyphs as homoglyphs
from llmppl.constraints.automata.rewrites import optional_punctuation as optional_punctuation
from llmppl.constraints.automata.rewrites import rewrite as rewrite
from llmppl.constraints.automata.rewrites import synonyms as synonyms
from llmppl.constraints.automata.rewrites import within as within
from llmppl.constraints.constraint import Constraint as Constraint
from llmppl.constraints.constraint import Index as Index
from llmppl.constraints.constraint import Recognizer as Recognizer
from llmppl.constraints.constraint import TabledRecognizer as TabledRecognizer
from llmppl.constraints.constraint import VocabularyLike as VocabularyLike
from llmppl.constraints.json import JsonSchema as JsonSchema
from llmppl.constraints.lark import Grammar as Grammar
from llmppl.constraints.lark import json_grammar as json_grammar
from llmppl.constraints.masks import END as END
from llmppl.constraints.masks import PrecomputedIndex as PrecomputedIndex
from llmppl.constraints.masks import TokenIndex as TokenIndex
from llmppl.constraints.values import Values as Values
from llmppl.constraints.values import constraint_of as constraint_of
from llmppl.constraints.values import index_of as index_of
from llmppl.constraints.vocabulary import EOS as EOS
from llmppl.constraints.vocabulary import Canonical as Canonical
from llmppl.constraints.vocabulary import CanonicalState as CanonicalState
from llmppl.constraints.vocabulary import EndOfText as EndOfText
from llmppl.constraints.vocabulary import Text as Text
from llmppl.constraints.vocabulary import Token as Token
from llmppl.constraints.vocabulary import UnsupportedTokenizer as UnsupportedTokenizer
from llmppl.constraints.vocabulary import Vocabulary as Vocabulary
from llmppl.constraints.vocabulary import encode_fragment as encode_fragment
from llmppl.support import lazy

__dir__ = lazy.public_names(__name__)
