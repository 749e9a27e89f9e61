"""Lark grammars, read byte by byte."""

from llmppl.constraints.lark.grammar import Grammar as Grammar
