"""Languages: sets of texts, as automata over bytes."""

from llmppl.languages.dfa import DFA as DFA
from llmppl.languages.edits import Edit as Edit
from llmppl.languages.edits import alignment as alignment
from llmppl.languages.edits import distance as distance
from llmppl.languages.edits import within as within
from llmppl.languages.formats import email as email
from llmppl.languages.formats import ipv4 as ipv4
from llmppl.languages.formats import iso_date as iso_date
from llmppl.languages.formats import iso_datetime as iso_datetime
from llmppl.languages.formats import iso_time as iso_time
from llmppl.languages.formats import number_range as number_range
from llmppl.languages.formats import phone as phone
from llmppl.languages.formats import url as url
from llmppl.languages.formats import uuid as uuid
from llmppl.languages.indexing import index_of as index_of
from llmppl.languages.limits import TooLarge as TooLarge
from llmppl.languages.regex import Regex as Regex
from llmppl.languages.rewrites import any_case as any_case
from llmppl.languages.rewrites import any_whitespace as any_whitespace
from llmppl.languages.rewrites import homoglyphs as homoglyphs
from llmppl.languages.rewrites import optional_punctuation as optional_punctuation
from llmppl.languages.rewrites import rewrite as rewrite
from llmppl.languages.rewrites import synonyms as synonyms
from llmppl.languages.values import Values as Values
from llmppl.languages.values import constraint_of as constraint_of
