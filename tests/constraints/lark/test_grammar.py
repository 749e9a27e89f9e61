"""Grammars: every answer of the recognizer against lark itself.

Two oracles. `parses(lark, text)` runs lark. `check_states` walks all short texts over an alphabet. The recognizer
accepts exactly the texts that lark parses. Where it denies a continuation, lark parses no text that begins so. Where it
admits one, a search finds a short one, which lark parses.
"""

import copy
import functools
import itertools
import random
from pathlib import Path
from types import SimpleNamespace

import lark as lark_package
import numpy as np
import pytest
from helpers.common import ROOT, repetitions, slow
from helpers.grammars import GRAMMARS, JSON, check_states, masks_agree, parses, plain_lark, random_grammar
from helpers.machines import accepts, read
from lark.exceptions import GrammarError, LarkError
from lark.indenter import PythonIndenter

from llmppl.constraints import Grammar, Vocabulary
from llmppl.lm.embedded import PATH

SHARED = ROOT.parent / "shared"


def test_random_small_grammars_agree_with_lark_on_all_short_texts():
    rng = random.Random(1)
    done = nonempty = 0
    while done < repetitions(300, 20):
        grammar = random_grammar(rng)
        try:
            plain_lark(grammar)
        except (GrammarError, LarkError, AttributeError):   # the last by interegular, which lark asks about overlaps
            continue
        nonempty += check_states(grammar, "ab " if " " in grammar[grammar.find("%") :] else "abc", 6) > 0
        done += 1
    assert nonempty > done / 4


LEXING = {
    "the first terminal that matches wins, not the longest": (
        "start: A B?\nA: /[a-z]+/\nB: /[a-z]{2}!/",
        ["ab", "abc"],
        ["ab!", "!", ""],
    ),
    "an alternative that comes after a shorter match is lost": ("start: X\nX: /a|ab/", ["a"], ["ab", "b"]),
    "a lazy quantifier stops at once": ("start: X Y\nX: /a+?/\nY: /a?x/", ["ax", "aax"], ["aaax", "aa"]),
    "bytes read past a match are given back": (
        'start: NUMBER (("+" | NAME) | NUMBER)*\nNUMBER: /[0-9]+(e[-+]?[0-9]+)?/\nNAME: /[a-z]+/',
        ["1e+x", "1e+2", "1e", "1e+", "1e+2e+x"],
        ["1e-", "e", "1e+2-"],
    ),
    "a keyword is not a name": (
        'start: stmt\nstmt: NAME "=" NAME | "print" NAME\nNAME: /[a-z]+/\n%ignore " "',
        ["x=y", "print x", "printx=y", "x=print", "print print"],
        ["print=x", "print", "print x=y"],
    ),
    "a terminal that goes on and one that ends": (
        'start: INT "." NAME | FLOAT\nINT: /[0-9]+/\nFLOAT: /[0-9]+\\.[0-9]*/\nNAME: /[a-z]+/',
        ["1.", "1.5", "12.50"],
        ["1.x", "1", "1.5x"],
    ),
    "terminals that overlap": (
        "start: (A | B)*\nA: /ab*/\nB: /bc?/",
        ["", "a", "abbb", "b", "bc", "bca", "bbcb"],
        ["abc"],
    ),
    "priority": ('start: A | B\nA: /[a-z]+/\nB.2: "ab"\n', ["ab", "ac"], ["abc"]),
    "ignored text at both ends": ('start: "a" "b"\n%ignore / +/', ["ab", " a  b  "], ["a", " ", "a b c"]),
    "an ignored keyword": ('start: A ("," A)*\nA: /[^,]+/\n%ignore " "', ["a", "a b,  c", " a"], ["a,", " ", "a, "]),
    "only ignored text": ('start: "a"?\n%ignore / +/', ["", " ", "  a ", "a"], ["aa"]),
    "case": (
        'start: "select"i NAME\nNAME: /[a-zß]+/i\n%ignore " "',
        ["SELECT x", "Select X", "select ẞ", "selectx"],
        ["select", "x select"],
    ),
    "templates": ('start: _list{NUMBER}\n_list{x}: x ("," x)*\nNUMBER: /[0-9]+/', ["1", "1,22,3"], ["1,", ",", ""]),
    "imports": (
        'start: (NAME | ESCAPED_STRING | SIGNED_NUMBER)+\n%import common.CNAME -> NAME\n%import common.ESCAPED_STRING\n'
        "%import common.SIGNED_NUMBER\n%import common.WS\n%ignore WS",
        ['a "b" -1.5e3', '"\\\\" "\\""', '"a\\"b"', "_x1 2", "1e5x"],
        ['"', '"\\"', "-", '"\n"', '"\\\\\\"'],
    ),
    "look-ahead": (
        "start: (A | B)+\nA: /a(?!b)/\nB: /ab(?=c|$)|c/",
        ["aa", "abc", "aab", "abca"],
        ["aba", "b", "abb"],
    ),
    "word boundaries": ("start: (W | S)+\nW: /\\b[a-z]+\\b/\nS: /[ .1]/", ["ab cd.", "a", " 1 "], ["a1", "1a", "!"]),
    "characters of several bytes": ("start: E+\nE: /[é-ü]|😀/", ["é", "öü", "😀é"], ["e", "ý"]),
    "reduce before the end": ('start: x "b"? | y\nx: "a"\ny: "a" "c"', ["a", "ab", "ac"], ["abc", "b"]),
}


@pytest.mark.parametrize("case", LEXING)
def test_lexing_follows_lark(case):
    grammar, good, bad = LEXING[case]
    recognizer, lark = Grammar(grammar), plain_lark(grammar)
    for text in good + bad:
        assert accepts(recognizer, text) == parses(lark, text), text
    assert all(accepts(recognizer, text) for text in good)
    assert not any(accepts(recognizer, text) for text in bad)


def test_a_terminal_is_not_confused_with_one_of_the_same_prefix():
    grammar = 'start: "b" | "c" ABC* A\nABC.1: /a/\nA: /a/\n%ignore " "'
    assert check_states(grammar, "abc ", 4) == 10   # "b" between blanks; "c" leads nowhere: A is always read as ABC


@pytest.fixture(scope="module", params=GRAMMARS)
def known(request):
    grammar, words, letters = GRAMMARS[request.param]
    return Grammar(grammar), plain_lark(grammar), words, letters


def random_text(lark, words, rng, depth=6):
    """A text made of random expansions of the rules; words have a space between them, or not."""
    rules = {}
    for rule in lark.rules:
        rules.setdefault(rule.origin.name, []).append(rule.expansion)
    strings = {t.name: [t.pattern.value] for t in lark.terminals if t.pattern.type == "str"}
    cost = dict.fromkeys(rules, 99)
    for _ in range(30):
        for name, expansions in rules.items():
            cost[name] = min(max([0, *(cost.get(s.name, 0) for s in e if not s.is_term)]) for e in expansions) + 1

    def expand(name, depth):
        fits = [e for e in rules[name] if all(s.is_term or cost[s.name] < depth for s in e)]
        if not fits:
            fits = [min(rules[name], key=lambda e: max([0, *(cost[s.name] for s in e if not s.is_term)]))]
        for symbol in rng.choice(fits):
            if symbol.is_term:
                yield rng.choice(words.get(symbol.name) or strings[symbol.name])
            else:
                yield from expand(symbol.name, depth - 1)

    parts = list(expand("start", rng.randrange(depth, 3 * depth)))
    text = rng.choice(["", " "])
    for part in parts:
        separator = rng.choice(["", " ", " ", "  "])
        if text[-1:].isalnum() and part[:1].isalnum():
            separator = " "
        text += separator + part
    return text


def mutated(text, rng, letters):
    """A text with a few characters deleted, doubled, exchanged or put in."""
    text = list(text)
    for _ in range(rng.choice([1, 1, 2, 3])):
        i = rng.randrange(len(text) + 1)
        text[i : i + rng.choice([0, 0, 1, 1, 2])] = rng.choice(["", rng.choice(letters), *text[i : i + 1] * 2])
    return "".join(text)


def test_a_grammar_accepts_exactly_the_texts_that_lark_parses(known):
    recognizer, lark, words, letters = known
    rng = random.Random(2)
    good = 0
    while good < repetitions(600, 20):
        text = random_text(lark, words, rng)
        if len(text) > 400:
            continue
        expected = parses(lark, text)
        assert accepts(recognizer, text) == expected, text
        good += expected
        text = mutated(text, rng, letters)
        assert accepts(recognizer, text) == parses(lark, text), text


def test_texts_sampled_byte_by_byte_parse_where_they_may_end(known):
    recognizer, lark, words, letters = known
    rng = random.Random(3)
    alphabet = sorted({*(letters + "xyz019é😀\n\\").encode()})
    for _ in range(repetitions(600, 20)):
        state, text = recognizer.start, b""
        for _ in range(rng.randrange(40)):
            assert not recognizer.accepts(state) or parses(lark, text.decode()), text
            steps = [(byte, after) for byte in alphabet if (after := recognizer.step(state, byte)) is not None]
            byte, state = rng.choice(steps or [(0, state)])
            text += bytes([byte])[: len(steps)]


DEAD_ENDS = {                                       # a grammar, a text that cannot end, and where that is noticed
    "a terminal that takes what should follow": ('start: "(" (LINE ")" | "x" ")")\nLINE: /[^x]+/', b"(a", b"(a)"),
    "a terminal that another one always is": ('start: "b" | "c" A* B\nA.1: /a/\nB: /a/', b"c", b"caa"),
    "a comment where no line may end": ('start: "(" "a" ")" NL\nNL: /\\n/\n%ignore /#[^\\n]*/', b"(#", b"(# a)"),
}


@pytest.mark.parametrize("name", DEAD_ENDS)
def test_a_dead_end_is_never_accepted(name):
    text, begun, longer = DEAD_ENDS[name]
    grammar = Grammar(text)
    assert read(grammar, begun) is not None and not accepts(grammar, longer)
    assert not parses(plain_lark(text), longer.decode())


PAPER = r"""
start: "def" NAME "(" ")" ":" body
body: "pass" | NAME
NAME: /[^\W\d]\w*/
%ignore / +/
"""


def test_the_mask_after_def_f():
    tokens = [b"d", b"ef", b" f", b"oo(", b"):", b" ", b"pass"]
    index = Grammar(PAPER).index(SimpleNamespace(tokens=[*tokens, b""], eos_ids=[7]))
    assert index.masks(range(7))[range(7), range(7)].all() and index.accepts(index.after(b"".join(tokens)))
    allowed = {tokens[i] for i in index.allowed(index.after("def f"))}
    assert allowed == {b"d", b"ef", b"pass", b" ", b"oo("}
    assert {tokens[i] for i in index.allowed(index.after("def f("))} == {b"):", b" "}


@pytest.mark.parametrize("text, good", [("de", True), ("def", False), ("default", True), ("def f", True), ("def ", 0)])
def test_de_def_default(text, good):
    recognizer = Grammar('start: "def" NAME | NAME ("=" NAME)?\nNAME: /[a-z]+/\n%ignore " "')
    assert read(recognizer, text) is not None
    assert accepts(recognizer, text) == parses(plain_lark(recognizer.text), text) == good


def test_tokens_may_span_terminals():
    """outlines#684."""
    tokens = [b'{"', b'":', b'":"', b'"}', b'"},{"', b"a", b"[{", b"}]", b'"', b""]
    index = Grammar(JSON).index(SimpleNamespace(tokens=tokens, eos_ids=[9]))
    state = index.start
    for token in [b"[{", b'"', b"a", b'":"', b"a", b'"},{"', b'":', b'"', b'"}']:
        assert index.mask(state)[tokens.index(token)], token
        state = index.advance(state, tokens.index(token))
    assert not index.mask(state)[9] and not index.accepts(state)
    assert not index.mask(index.after('[{"a"'))[tokens.index(b'"}')]


def test_plain_json():
    recognizer = Grammar(JSON)
    for text in ["0", " null ", '{"a": [1, -2.5e+3, "\\u00e9\\n", {}], "": true}', '"é"', "[]", "\t[ ]\r\n", '"\x7f"']:
        assert accepts(recognizer, text), text
        for i in range(len(text.encode())):
            assert read(recognizer, text.encode()[:i]) is not None
    for text in ["", "01", "[1,]", "{a:1}", "'a'", '"\n"', '"\\x"', "1.", "+1", "nul", "1 2", '{"a" 1}', '"\\u12"']:
        assert not accepts(recognizer, text), text


def test_states_are_shared_and_copies_return_themselves():
    recognizer = Grammar(JSON)
    state = read(recognizer, '{"a": [1, 2')
    assert state is read(recognizer, '{"bc":[4,33') and hash(state) == hash(read(recognizer, '{"bc":[4,33'))
    assert copy.copy(state) is state and copy.deepcopy([state])[0] is state


BLOCKS = ["x = 1", "pass", "f(a,\n  b)", "return 'é\\''", "y = [\n1,\n2]", '"""a\n  "b\n"""', "if x: pass", "del x #"]


def python_text(rng, depth=3, indent=""):
    text = ""
    for _ in range(rng.choice([1, 1, 2, 3])):
        text += rng.choice(["", "", indent + "# note\n", "\n"])
        if depth and rng.random() < 0.5:
            head = rng.choice(["if x", "while f(x)", "def g(a, *b, c=1)", "class A(B)", "with a", "for i in [\n1]"])
            deeper = indent + rng.choice([" ", "  ", "    ", "\t"])
            text += indent + head + ":" + rng.choice([" # why", ""]) + "\n" + python_text(rng, depth - 1, deeper)
            if head == "if x" and rng.random() < 0.5:
                text += indent + "else:\n" + python_text(rng, depth - 1, deeper)
        else:
            text += indent + rng.choice(BLOCKS) + "\n"
    return text


@pytest.fixture(scope="module")
def python():
    path = Path(lark_package.__file__).parent / "grammars" / "python.lark"
    recognizer = Grammar.from_file(path, "file_input", postlex=PythonIndenter())
    return recognizer, plain_lark(path.read_text(), "file_input", postlex=PythonIndenter())


@pytest.mark.slow
def test_indented_python_by_the_grammar_that_comes_with_lark(python):
    recognizer, lark = python
    rng = random.Random(6)
    good = 0
    for _ in range(repetitions(500, 60)):
        text = python_text(rng)
        assert parses(lark, text) == accepts(recognizer, text), text
        good += parses(lark, text)
        text = mutated(text, rng, " \n\t:()#x\"'=")
        assert parses(lark, text) == accepts(recognizer, text), text
    assert good > repetitions(200, 20)


def test_indentation_is_followed_before_a_line_is_over(python):
    recognizer, lark = python
    state = read(recognizer, "if x:\n  if y:\n      z\n")
    assert [byte for byte in b" \nx" if recognizer.step(state, byte) is not None] == [*b" \nx"]
    assert read(recognizer, "if x:\n  if y:\n      z\n   w") is None         # between two blocks
    assert read(recognizer, "if x:\nw") is None
    assert read(recognizer, "if x:\n\n # w\n") is not None
    assert read(recognizer, "f(\n") is not None and read(recognizer, "f)") is None


ERRORS = {
    'start: "a" (b\nb: "c"\n': r"line 1, column 14(.|\n)*start: \"a\" \(b\n {13}\^",
    'start: x | y\nx: "a"\ny: "a"\n': r"Reduce/Reduce collision in Terminal\('\$END'\)(.|\n)*<x : A>",
    'begin: "a"': "no rule is named 'start'",
    "start: b": "'b' used but not defined",
    "start: B\nB: /(a)\\1/": r"terminal B: (.|\n)*backreference",
    "start: B\nB: /a(/": r"terminal B: .*missing \)",
    "start: B\nB: /a*/": "terminal B: 'a[*]' matches the empty text",
    'start: NAME "x"\nNAME: /[a-z]+/': "no text at all",
    'start: "a" start': "no text at all",
    "start: A\n%import nowhere.A": "nothing to import from 'nowhere.lark'",
}


@pytest.mark.parametrize("grammar", ERRORS)
def test_an_error_names_the_fault_of_a_grammar(grammar):
    with pytest.raises(ValueError, match=ERRORS[grammar]):
        Grammar(grammar)


def test_a_postlex_that_is_not_a_plain_indenter_is_refused():
    class Odd(PythonIndenter):
        def process(self, stream):
            return stream

    with pytest.raises(ValueError, match="postlex: a lark.indenter.Indenter"):
        Grammar('start: "a" _NEWLINE\n_NEWLINE: /\\n/\n%declare _INDENT _DEDENT', postlex=Odd())


def test_grammars_in_files_import_files_of_the_same_folder(tmp_path):
    (tmp_path / "words.lark").write_text("WORD: /[a-z]+/\n")
    (tmp_path / "main.lark").write_text("start: WORD+\n%import .words.WORD\n%ignore / /\n")
    assert accepts(Grammar.from_file(tmp_path / "main.lark"), "ab cd")
    assert accepts(Grammar("start: WORD\n%import words.WORD", import_paths=[tmp_path]), "ab")


def test_resolved_conflicts_are_followed():
    """A shift is preferred to a reduction, which here leaves no text at all, or a smaller language."""
    assert check_states('start: "a" x "b"\nx: "b" x |', "ab", 6) == 0
    assert check_states('start: "c" x ["a" "c"]\nx: ("a" "b")*', "abc", 7) > 0
    assert check_states('start: s\ns: "a" s ["b" s] | "c"', "abc", 7) > 5


def test_masks_agree_with_reading_the_tokens(known):
    """With stacks cut for the walk, too: tokens that close many brackets at once, at any depth."""
    recognizer, lark, words, letters = known
    rng = random.Random(8)
    texts = [random_text(lark, words, rng) for _ in range(60)]
    tokens = {text.encode()[i : i + rng.randrange(1, 7)] for text in texts for i in range(0, len(text.encode()), 3)}
    tokens |= {bracket * n for bracket in (b"(", b")", b"[", b"]", b"{", b"}", b")]") for n in range(1, 6)}
    tokens = [*sorted(tokens - {b""}), b""]
    index = recognizer.index(SimpleNamespace(tokens=tokens, eos_ids=[len(tokens) - 1]))
    for _ in range(repetitions(12, 2)):
        state, text = index.start, b""
        for _ in range(rng.randrange(60)):
            mask = index.mask(state)
            here = read(recognizer, text)
            for i, token in enumerate(tokens[:-1]):
                after = read(recognizer, token, here)
                assert mask[i] == (after is not None), (text, token)
                assert not mask[i] or index.advance(state, i) is after, (text, token)
            assert mask[-1] == recognizer.accepts(state)
            opening = [i for i in index.allowed(state) if tokens[i][:1] in b"([{" and tokens[i]]
            token = int(rng.choice(opening if opening and rng.random() < 0.4 else index.allowed(state)))
            if token == len(tokens) - 1:
                break
            state, text = index.advance(state, token), text + tokens[token]


def test_masks_of_random_grammars_agree_with_reading_the_tokens():
    """With look-aheads, keywords and ignored text."""
    rng, shuffled = random.Random(10), np.random.default_rng(10)
    tokens = [bytes(text) for n in range(1, 5) for text in itertools.product(b"abc ", repeat=n)]
    vocab = Vocabulary([*tokens, b""], eos_ids=[len(tokens)])
    done = seen = 0
    while done < repetitions(300, 30):
        try:
            grammar = Grammar(random_grammar(rng))
        except (ValueError, AttributeError):
            continue
        seen += masks_agree(grammar, vocab, shuffled, 2, 8)
        done += 1
    assert seen > 2 * done


@pytest.mark.parametrize("name", ["gpt2", "mistral_v3", "embedded", *slow("cl100k_base", "o200k_base")])
def test_masks_of_whole_vocabularies_agree_with_reading_the_tokens(known, name):
    grammar, lark, words, letters = known
    rng = np.random.default_rng(11)
    assert masks_agree(grammar, vocabulary(name), rng, repetitions(10, 1), repetitions(20, 5)) > 2


@functools.cache
def vocabulary(name):
    from transformers import AutoTokenizer

    place = Path(PATH) if name == "embedded" else SHARED / "vocab" / name
    if not place.is_dir():
        pytest.skip(f"needs the tokenizer in shared/vocab/{name}, which is not here")
    return Vocabulary.from_tokenizer(AutoTokenizer.from_pretrained(place))
