"""Masks of indented grammars: the part that all layouts share, and the part of one layout only."""

import itertools
from pathlib import Path

import lark as lark_package
import numpy as np
import pytest
from helpers.grammars import masks_agree
from helpers.machines import read
from helpers.masks import Blocks
from lark.indenter import PythonIndenter

from llmppl import Grammar, Vocabulary

HEAD = "start: {}\n" + r"""
NAME: /[a-z]/
LPAR: "("
RPAR: ")"
_NL: /(\n *)+/
%ignore /[ \t]+/
%declare _INDENT _DEDENT
"""
BLOCKS = """(line | block)+
line: NAME [LPAR NAME RPAR] _NL
block: NAME ":" _NL _INDENT (line | block)+ _DEDENT"""
PARTS = [
    b"a", b":", b"\n", b" ", b"(", b")", b"  ", b"   ", b"a:", b":\n", b"a\n", b"\na", b"\n ", b"\n  ", b":\n a",
    b"\n  a", b" a", b"  a", b"   a", b"    a", b")\na", b")\n a", b")\n  a", b"(a)", b"a:\n  a\n a", b"a\n\n a",
    b"\n\t", b"\n \t", b"",
]  # fmt: skip
VOCAB = Vocabulary(PARTS, eos_ids=[len(PARTS) - 1])


def indented(rules):
    return Grammar(HEAD.format(rules), postlex=Blocks())


def test_a_line_may_begin_in_the_columns_of_its_layout():
    """One index: the stacks of these texts are equal, their layouts are not."""
    grammar = indented(BLOCKS)
    index = grammar.index(VOCAB)
    for width in (1, 2, 3):
        opened = b"a:\n" + b" " * width
        lines = [index.mask(read(grammar, opened + b"a\n"))[PARTS.index(b" " * n + b"a")] for n in (1, 2, 3, 4)]
        assert lines == [n == width for n in (1, 2, 3, 4)]
        inside, outside = index.mask(read(grammar, opened + b"a(a")), index.mask(read(grammar, b"a(a"))
        closing = [PARTS.index(b")\n" + b" " * n + b"a") for n in (0, 1, 2)]
        assert inside[closing].tolist() == [True, width == 1, width == 2]
        assert outside[closing].tolist() == [True, False, False]


@pytest.mark.parametrize("seed", range(2))
def test_masks_of_blocks_agree_with_a_search_byte_by_byte(seed):
    assert masks_agree(indented(BLOCKS), VOCAB, np.random.default_rng(seed), 12, 12) > 60


UNDISCIPLINED = {                                   # alternatives of a line, and how texts of it begin, which never end
    "a line end within brackets": ("LPAR NAME _NL RPAR _NL", b"("),
    "a bracket that is left open": ("LPAR NAME _NL", b"("),
    "a bracket that a rule leaves open": ("opened NAME _NL\nopened: LPAR", b"("),
    "a bracket that nothing has opened": ('":" RPAR _NL', b":"),
    "a bracket that is closed first": ('":" RPAR NAME LPAR _NL', b":"),
    "a block that opens within a line": ('":" _INDENT NAME _NL _DEDENT', b":"),
    "a block that is left open": ('":" _NL _INDENT NAME _NL', b":"),
    "a block that closes within a line": ('NAME ":" _NL _INDENT NAME _DEDENT _NL', b"a:"),
    "a block that nothing has opened": ('":" _NL _DEDENT NAME _NL', b":"),
    "a block that is closed first": ('":" _NL _DEDENT NAME _NL _INDENT NAME _NL', b":"),
    "a block within brackets": ('":" LPAR block RPAR _NL\nblock: _NL _INDENT NAME _NL _DEDENT', b":("),
}


@pytest.mark.parametrize("name", UNDISCIPLINED)
def test_rules_that_no_layout_fits_accept_no_text(name):
    rule, begun = UNDISCIPLINED[name]
    other, *more = rule.split("\n")
    grammar = indented("\n".join(["line+", f"line: NAME _NL | {other}", *more]))
    assert grammar.accepts(read(grammar, b"a\na\n"))
    texts = [begun + b"".join(rest) for rest in itertools.product([b"a", b"(", b")", b"\n", b"\n ", b":"], repeat=3)]
    assert not any(state and grammar.accepts(state) for state in (read(grammar, text) for text in texts))
    assert masks_agree(grammar, VOCAB, np.random.default_rng(3), 6, 8) > 6


def test_a_number_that_only_a_rarer_terminal_makes_is_not_refused():
    """python.lark's 01.5 and 01j are numbers, 01 is none."""
    path = Path(lark_package.__file__).parent / "grammars" / "python.lark"
    grammar = Grammar.from_file(path, "file_input", postlex=PythonIndenter())
    assert [read(grammar, text) is None for text in (b"01\n", b"01.5\n", b"x = 01j\n")] == [True, False, False]
    parse = grammar.lark.parse
    assert parse("01.5\n") and parse("x = 01j\n")
