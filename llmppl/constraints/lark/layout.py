"""What the rules of an indented grammar say about layout: whether an indenter may give every text of theirs.

A grammar is *disciplined* if the tokens of each text of its rules are laid out as lark's indenter lays them out:
brackets and blocks are nested, no line ends within brackets, a block opens right behind a line's end and closes behind
one, or behind another block's. Any tokens that complete a stack then are completed by a text: the columns of its lines
can be chosen.
"""

from __future__ import annotations

import itertools
from typing import Any

from llmppl.constraints.lark.lalr_tables import Tables, united
from llmppl.support.graphs import reached, turned


def is_disciplined(tables: Tables, indenter: Any) -> bool:
    """Whether every text of every rule is laid out as an indenter would."""
    bits, rules = tables.bits, tables.rules
    if not tables.shortest.keys() >= tables.rule_names:
        return False
    line_end, indent, dedent = names = indenter.NL_type, indenter.INDENT_type, indenter.DEDENT_type
    nesting = dict.fromkeys(indenter.OPEN_PAREN_types, 1) | dict.fromkeys(indenter.CLOSE_PAREN_types, -1)
    users = turned((rule.origin, rule.expansion) for rule in rules)
    of_lines = set(reached(names, lambda symbol: users.get(symbol, ())))
    before_blocks = bits.get(line_end, 0), bits.get(line_end, 0) | bits.get(dedent, 0)
    last = _last(tables)
    for rule in rules:
        brackets, blocks, before = 0, 0, -1              # before a rule, anything
        for symbol in rule.expansion:
            brackets += nesting.get(symbol, 0)
            blocks += (symbol == indent) - (symbol == dedent)
            behind_line = symbol not in (indent, dedent) or not before & ~before_blocks[symbol == dedent]
            if brackets < 0 or blocks < 0 or (brackets and symbol in of_lines) or not behind_line:
                return False
            before = last[symbol] | (0 if tables.shortest[symbol].length else before)
        if brackets or blocks:
            return False
    return True


def _last(tables: Tables) -> dict[str, int]:
    """By symbol, the bits of the terminals that its texts may end with."""
    ends: dict[str, set[str]] = {symbol: set() for symbol in (*tables.rule_names, *tables.bits)}
    for rule in tables.rules:
        for symbol in reversed(rule.expansion):
            ends[rule.origin].add(symbol)
            if tables.shortest[symbol].length:
                break
    number = dict(zip(ends, itertools.count()))
    edges = [[number[each] for each in some] for some in ends.values()]
    return dict(zip(ends, united([tables.bits.get(symbol, 0) for symbol in ends], edges), strict=True))
