"""Lark grammars, read byte by byte."""

from llmppl.constraints.lark.grammar import Grammar as Grammar
from llmppl.constraints.lark.grammar import json_grammar as json_grammar
