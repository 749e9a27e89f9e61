"""Witness spellings where the text before a terminal matters: guarded identifiers, and separators that read on."""

import functools
import itertools
import random

import pytest
from helpers.common import repetitions
from helpers.grammars import after
from lark import Lark
from lark.exceptions import LarkError

from llmppl import Grammar
from llmppl.constraints.lark import reductions
from llmppl.constraints.lark.reductions import ReductionTable

GUARDED = r"""
start: s+
s: "if" e s ["else" s] | "int" IDENT ";" | e ";"
e: e "+" a | a
a: IDENT | STRING | NUMBER | a "[" e "]" | a /\[\s*\]/ | "new" CLASS
IDENT: /\b(?!(if|else|int|new)\b)[a-z]{1,9}/
CLASS: /\b(?!int\b)[a-z]+/
STRING: /".*?(?<!\\)"/
NUMBER: /[0-9]+/
LINE: /\/\/.*/
BLOCK: /\/\*([^\*]|(\*+[^\/\*]))*\*+\//
%ignore LINE
%ignore BLOCK
%ignore /\s+/
"""


def test_identifiers_with_word_boundaries_have_spellings():
    spellings = Grammar(GUARDED)._completability.spellings
    assert spellings.usable and not spellings.missing


def test_guarded_identifiers_are_completed_without_search(monkeypatch):
    monkeypatch.setattr(ReductionTable, "possible", None)
    grammar = Grammar(GUARDED)
    assert grammar._completability.tokens.always_completable
    text = b'int ab; if a[ "\\" "] + 12 /* x */ b; else new x[ ]; // c'
    assert all(after(grammar, text[:n]) is not None for n in range(len(text) + 1))
    assert after(grammar, b"1a") is None and after(grammar, b"int if") is not None


def test_spellings_of_guarded_identifiers_agree_with_the_search():
    spelled, searching = Grammar(GUARDED), Grammar(GUARDED)
    searching._completability.tokens.always_completable = searching._completability.spellings.usable = False
    rng, letters = random.Random(4), b'ifelsnwt1;+[]/* \n"\\'
    words = [b"a", b"if ", b"if", b"else ", b"int ", b"new ", b"1", b";", b"+", b"[", b"]", b"//", b"/*", b"*/"]
    words += [b"\n", b'"']
    for _ in range(repetitions(200, 12)):
        one, other, text = spelled.start, searching.start, b""
        for _ in range(12):
            fits = [word for word in words if after_all(spelled, one, word)]
            assert fits == [word for word in words if after_all(searching, other, word)], text
            assert all((spelled.step(one, b) is None) == (searching.step(other, b) is None) for b in letters), text
            if not fits:
                break
            word = rng.choice(fits)
            one, other, text = after_all(spelled, one, word), after_all(searching, other, word), text + word


def after_all(grammar, state, text):
    return functools.reduce(lambda state, byte: state and grammar.step(state, byte), text, state)


BOUNDED = {
    "a blank may not follow": ('start: IDENT | NUMBER IDENT\nIDENT: /\\b[a-z]/\nNUMBER: /1(?! )/\n%ignore " "', "a1 "),
    "a blank may follow": ('start: IDENT+ | NUMBER IDENT\nIDENT: /\\b[a-z]/\nNUMBER: /1/\n%ignore " "', "a1 "),
    "nothing may stand between": (
        'start: IDENT+ | "(" IDENT | HASH X\nIDENT: /(?<![(])a/\nX: /(?<!#)c/\nHASH: "(#"\n%ignore "#"', "a(#c"
    ),
    "only after no word": ('start: (IDENT ";"?)+\nIDENT: /(?<![a;])[ab]/\n%ignore " "', "ab; "),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_prefixes_with_word_boundaries_are_completable_as_in_lark(name):
    """Against all texts of six characters or fewer, for beginnings of three."""
    rules, alphabet = BOUNDED[name]
    grammar, lark = Grammar(rules), Lark(rules, parser="lalr", lexer="contextual")
    begun = set()
    for text in map("".join, itertools.chain.from_iterable(itertools.product(alphabet, repeat=n) for n in range(7))):
        try:
            lark.parse(text)
        except LarkError:
            continue
        begun.update(text[:n] for n in range(len(text) + 1))
    for text in map("".join, itertools.chain.from_iterable(itertools.product(alphabet, repeat=n) for n in range(4))):
        assert (after(grammar, text.encode()) is not None) == (text in begun), text


def test_a_search_that_goes_too_far_is_refused_by_its_terminal(monkeypatch):
    """And the question is answered when it may be."""
    grammar = Grammar(GUARDED)
    grammar._completability.tokens.always_completable = grammar._completability.spellings.usable = False
    monkeypatch.setattr(reductions, "MAX_SEARCHED", 3)
    with pytest.raises(ValueError, match=r"after terminal \w+ '.*' is too large: more than 3 runs .*; ignored text"):
        after(grammar, b"if a[b] c; else d")
    monkeypatch.undo()
    assert after(grammar, b"if a[b] c; else d") is not None
