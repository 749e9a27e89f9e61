"""Grammars: a Lark grammar, read byte by byte."""

from llmppl.grammar.grammar import Grammar as Grammar
from llmppl.grammar.grammar import json_grammar as json_grammar
