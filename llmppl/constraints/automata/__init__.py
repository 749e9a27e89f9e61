"""Automata over bytes: regular expressions, edits, rewrites and set operations."""

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
