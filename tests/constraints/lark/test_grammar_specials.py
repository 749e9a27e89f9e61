"""Grammars with special tokens, against enumeration and lark.

Lark lexes each piece of text between special tokens as one of its own. One parser reads all of it.
"""

import itertools
import pickle
import random

import numpy as np
import pytest
from helpers.common import repetitions
from helpers.grammars import plain_lark, random_grammar
from lark import Token
from lark.exceptions import GrammarError, LarkError
from lark.indenter import Indenter
from lark.lexer import LexerThread

from llmppl import ConstrainedText, Query, Regex, enumerate_exact
from llmppl.constraints import Grammar, JsonSchema, Special, Vocabulary
from llmppl.constraints.machine import machine

EOS_ID, TOOL, STOP = 0, 1, 2
TOKENS = [b"", b"", b"", b"a", b"b", b" ", b"c", b"ab", b"bb", b"a ", b"<", b"X", b">", b"<X>"]
VOCAB = Vocabulary(TOKENS, [EOS_ID], special_texts={TOOL: "<X>", STOP: "<Y>", EOS_ID: "<end>"})
NAMES = {TOOL: "X", STOP: "Y"}
SPECIALS = {"X": "<X>", "Y": STOP}
PARTS = {TOOL: Special("<X>"), STOP: Special(STOP)}


def pieces_of(symbols):
    """Join the neighbouring characters of a text of symbols."""
    pieces = []
    for symbol in symbols:
        if isinstance(symbol, str) and pieces and isinstance(pieces[-1], str):
            pieces[-1] += symbol
        else:
            pieces.append(symbol)
    return pieces


def lark_parses(lark, symbols):
    """Check whether lark parses a text of symbols."""
    parser = lark.parse_interactive("")
    try:
        for piece in pieces_of(symbols):
            if isinstance(piece, str):
                parser.lexer_thread = LexerThread.from_text(lark.parser.lexer, piece)
                parser.exhaust_lexer()
            else:
                parser.feed_token(Token(NAMES[piece], ""))
        parser.feed_eof()
    except (LarkError, IndexError, AssertionError):
        return False
    return True


def texts_over(letters, most):
    for length in range(most + 1):
        yield from itertools.product([*letters, TOOL, STOP], repeat=length)


def after_symbol(recognizer, state, symbol):
    if isinstance(symbol, str):
        return recognizer.step(state, ord(symbol))
    return recognizer.steps_by_specials(state).get(PARTS[symbol].token)


def check_language(text, letters, most):
    """Compare a grammar with lark on all texts of at most `most` symbols; count those in it."""
    lark = plain_lark(text)
    language = {symbols for symbols in texts_over(letters, most) if lark_parses(lark, symbols)}
    begun = {symbols[:n] for symbols in language for n in range(len(symbols) + 1)}
    try:
        recognizer = Grammar(text, specials=SPECIALS).machine
    except ValueError as error:
        assert "no text" in str(error) and not language, (text, error)
        return 0
    states = {(): recognizer.start}
    for symbols in texts_over(letters, most):
        state = states.get(symbols)
        accepted = state is not None and state.accepts
        assert accepted == (symbols in language), (text, symbols)
        assert state is not None or symbols not in begun, (text, symbols, "goes on")
        if state is not None:
            for symbol in (*letters, TOOL, STOP):
                after = after_symbol(recognizer, state, symbol)
                if after is not None:
                    states[*symbols, symbol] = after
    return len(language)


def with_specials(text, rng):
    """Return a random grammar in which special tokens take the place of some symbols of rules."""
    lines = []
    for line in text.split("\n"):
        if line[:1] in "sxy |":
            words = line.split(" ")
            for i, word in enumerate(words[1:], 1):
                if word[:1] in ("T", "x", "y") and rng.random() < 0.3:
                    words[i] = rng.choice("XXY")
            line = " ".join(words)
        lines.append(line)
    return "\n".join([*lines, "%declare X Y"])


def test_random_grammars_agree_with_lark_on_all_short_texts():
    rng = random.Random(5)
    done = nonempty = 0
    while done < repetitions(200, 25):
        text = with_specials(random_grammar(rng), rng)
        try:
            plain_lark(text)
        except (GrammarError, LarkError, AttributeError):
            continue
        letters = "ab " if "%ignore" in text and " " in text[text.find("%ignore") + 8 :] else "ab"
        nonempty += check_language(text, letters, 5) > 1
        done += 1
    assert nonempty > done / 4


LEXING = {
    "ignored text around special tokens": ('start: "a" X "b" Y\n%ignore " "', 6),
    "special tokens alone": ("start: X (Y X)*", 3),
    "a token that ends before one": ("start: A (X A)*\nA: /a+/", 12),
    "look-ahead sees the end of a text": ("start: A X B\nA: /a(?!b)/\nB: /b/", 1),
    "look-ahead does not see beyond": ("start: A (X | B)\nA: /a(?=b)/\nB: /b/", 1),
    "end of text": ("start: A X B?\nA: /a$/\nB: /b/", 2),
    "look-behind sees the beginning": ("start: A X B\nA: /a/\nB: /(?<!a)b/", 1),
    "look-behind does not see beyond": ("start: (A | X) B\nA: /a/\nB: /(?<=a)b/", 1),
    "keywords": ('start: (N X | "ab" Y)+\nN: /[ab]+/', 50),
    "any character but no special token": ("start: A X?\nA: /.+/", 483),
    "priorities": ("start: A X | B Y\nA: /a/\nB.2: /a|b/", 2),
    "rules that may be empty": ("start: x X x\nx: A* y\ny: Y?\nA: /a/", 41),
    "recursion": ('start: X start Y | "a"', 3),
}


@pytest.mark.parametrize("case", LEXING)
def test_texts_with_special_tokens_are_those_of_lark(case):
    text, number = LEXING[case]
    assert check_language(f"{text}\n%declare X Y", "ab ", 5) == number


# ---- masks


def symbols_of(token):
    return tuple(TOKENS[token].decode()) or (token,)


def least(rest):
    """Return the fewest tokens that spell a row of symbols."""
    if not rest:
        return 0
    sizes = [len(symbols_of(token)) for token in range(1, len(TOKENS)) if begins(rest, token)]
    return 1 + min(least(rest[size:]) for size in sizes)


def begins(rest, token):
    symbols = symbols_of(token)
    return rest[: len(symbols)] == symbols


FINITE = [
    'start: "a" X "b" | "ab" Y | "a" "b"? X X',
    'start: x~1..2 Y?\nx: "a" X | Y "bb"',
    "start: (A X)~1..2\nA: /ab?|b/",
    'start: X | "<X>" | X "<X>"',
    "start: A X B | A\nA: /a(?!b)/\nB: /bb?/",
]


@pytest.mark.parametrize("text", FINITE)
@pytest.mark.parametrize("around", [lambda part: part, lambda part: "b" + part + Special("<Y>")])
def test_masks_are_those_of_enumerated_texts(text, around):
    letters = "ab" if "<" not in text else "a<X>"
    lark = plain_lark(f"{text}\n%declare X Y")
    texts = {
        symbols
        for symbols in texts_over(letters, 7 if letters == "ab" else 5)
        if lark_parses(lark, symbols)
    }
    part = around(Grammar(f"{text}\n%declare X Y", specials=SPECIALS | {"Y": "<Y>"}))
    if not isinstance(part, Grammar):
        texts = {("b", *symbols, STOP) for symbols in texts}
    index = part.index(VOCAB)
    todo = [((), index.start)]
    ended = set()
    for prefix, state in todo:
        rests = {symbols[len(prefix) :] for symbols in texts if symbols[: len(prefix)] == prefix}
        assert index.accepts(state) == (() in rests)
        if () in rests:
            ended.add(prefix)
        fits = {
            token for token in range(1, len(TOKENS)) if any(begins(rest, token) for rest in rests)
        }
        ends = {EOS_ID} if () in rests else set()
        assert set(index.allowed(state).tolist()) == fits | ends, prefix
        lefts = {}
        for token in fits:
            size = len(symbols_of(token))
            lefts[token] = 1 + min(least(rest[size:]) for rest in rests if begins(rest, token))
        for n in range(1, 7):
            near = {token for token in fits if lefts[token] <= n}
            assert set(np.flatnonzero(index.mask_within(state, n)).tolist()) == near | ends, (
                prefix,
                n,
            )
        shortest = 0 if () in rests else min(lefts.values())
        assert index.tokens_to_accept(state) == shortest, prefix
        for token in fits:
            todo.append((prefix + symbols_of(token), index.advance(state, token)))
    assert ended == texts


def test_masks_along_random_walks_agree_with_reading_symbols():
    grammar = Grammar(
        'start: (X pair Y | NAME)+\npair: "{" [NAME ("," NAME)*] "}"\nNAME: /[a-c]+/\n'
        '%ignore " "\n%declare X Y',
        specials=SPECIALS,
    )
    words = ["a", "ab", "c ", "{", "}", ",", "{a", "},", " {", "a}", "a,b", "{}", "X", "<X>"]
    vocab = Vocabulary(
        [b"", b"", b"", *(word.encode() for word in words)],
        [EOS_ID],
        special_texts=VOCAB.special_texts,
    )
    index = grammar.index(vocab)
    rng = np.random.default_rng(0)
    for _ in range(20):
        state = index.start
        for _ in range(30):
            mask = index.mask(state)
            for token in range(1, len(vocab)):
                symbols = tuple(vocab.tokens[token].decode()) or (token,)
                after = state
                for symbol in symbols:
                    after = after and after_symbol(grammar.machine, after, symbol)
                assert mask[token] == (after is not None)
            state = index.advance(state, int(rng.choice(np.flatnonzero(mask[1:]) + 1)))
        left = index.tokens_to_accept(state)
        while left:
            near = np.flatnonzero(index.mask_within(state, left))
            state = index.advance(state, int(rng.choice(near)))
            left -= 1
            assert index.tokens_to_accept(state) <= left


def test_the_posterior_is_that_of_enumerated_token_strings(embedded):
    """A special token counts as each other token does."""
    vocab = embedded.vocab
    eos = vocab.eos_ids[0]
    grammar = Grammar('start: " cat" X " big" | " dog" X\n%declare X', specials={"X": eos})
    found = enumerate_exact(ConstrainedText(embedded, "The", grammar, end="prefix"))
    total = {}
    for row in ([" cat", eos, " big"], [" dog", eos]):
        text = "".join(piece for piece in row if isinstance(piece, str))
        total[text] = 0.0
        todo = [
            (
                embedded.context("The"),
                [piece.encode() if isinstance(piece, str) else piece for piece in row],
                0.0,
            )
        ]
        while todo:
            context, rest, log_prob = todo.pop()
            if not rest:
                total[text] += np.exp(log_prob)
                continue
            dist = context.next_token()
            for token, data in enumerate(vocab.tokens):
                if rest[0] == token:
                    after = rest[1:]
                elif data and isinstance(rest[0], bytes) and rest[0].startswith(data):
                    after = [rest[0][len(data) :], *rest[1:]]
                    after = after if after[0] else after[1:]
                else:
                    continue
                todo.append((context + token, after, log_prob + dist.log_prob(token)))
    mass = sum(total.values())
    assert found.log_ml == pytest.approx(np.log(mass), abs=1e-6)
    assert found.by_text() == pytest.approx(
        {text: each / mass for text, each in total.items()}, abs=1e-6
    )


# ---- values


CALL = Grammar('start: X "a"+ Y? | "b"\n%declare X Y', specials=SPECIALS)


def test_parse_reads_ids_and_pieces():
    index = CALL.index(VOCAB)
    assert index.parse([TOOL, 3, 3, STOP]) == "aa" and index.parse([4]) == "b"
    assert CALL.parse([Special("<X>"), "aa"]) == "aa" and CALL.parse("aa") == "aa"
    for wrong in ([10, 11, 3], [3, 3], [TOOL, TOOL, 3], [TOOL, 13]):
        with pytest.raises(ValueError, match=r"is not in Grammar\("):
            index.parse(wrong)
    both = CALL.named("call") + JsonSchema({"const": 1}).named("n")
    assert both.parse([Special("<X>"), "a", Special(STOP), "1"]) == {"call": "a", "n": 1}
    assert [Special("<X>"), "a"] in CALL and ["a", Special("<X>")] not in CALL


def test_intersections_unions_and_repetitions_read_special_tokens():
    regular = Special("<X>") + Regex("a{2,3}")
    texts = [[Special("<X>"), "a" * n] for n in range(5)]
    assert [text in CALL & regular for text in texts] == [False, False, True, True, False]
    index = (CALL & regular).index(VOCAB)
    assert index.allowed(index.start).tolist() == [TOOL]
    twice = CALL.times(2) | Special(STOP) + "c"
    index = twice.index(VOCAB)
    assert index.allowed(index.start).tolist() == [TOOL, STOP, 4, 8]
    assert index.parse([8]) == ["b", "b"] and index.parse([TOOL, 3, TOOL, 3]) == ["a", "a"]


def test_the_name_in_ordinary_tokens_is_another_text():
    index = Grammar("start: X A\nA: /./\n%declare X", specials={"X": "<X>"}).index(VOCAB)
    assert index.allowed(index.start).tolist() == [TOOL]
    for token in (10, 13):
        with pytest.raises(ValueError, match="the special token '<X>' must follow"):
            index.advance(index.start, token)


def test_an_eos_may_stand_inside_a_text():
    index = Grammar('start: "a" (X "b")?\n%declare X', specials={"X": "<end>"}).index(VOCAB)
    other = Grammar('start: "a" X "b"\n%declare X', specials={"X": EOS_ID}).index(VOCAB)
    assert index.accepts(index.advance(index.advance(index.start, 3), EOS_ID))  # ends where it may
    assert other.allowed(other.advance(other.advance(other.start, 3), EOS_ID)).tolist() == [4]


def test_indented_text_goes_on_after_special_tokens():
    class Lines(Indenter):
        NL_type = "_NL"
        OPEN_PAREN_types = ["L"]
        CLOSE_PAREN_types = ["R"]
        INDENT_type = "_INDENT"
        DEDENT_type = "_DEDENT"
        tab_len = 8

    rules = "start: (X? A tree? _NL | L X R)+\ntree: _NL _INDENT (X _NL)+ _DEDENT\n"
    terms = 'A: "a"\nL: "("\nR: ")"\n_NL: /\\n */\n%declare _INDENT _DEDENT X'
    grammar = Grammar(rules + terms, specials={"X": "<X>"}, postlex=Lines())
    tool = Special("<X>")
    assert [tool, "a\n ", tool, "\n ", tool, "\n\n"] in grammar
    assert [tool, "a\n ", tool, "\n", tool, "\n\n"] not in grammar
    assert ["(", tool, ")a\n"] in grammar and ["(", tool, "a)\n"] not in grammar
    index = grammar.index(
        Vocabulary([b"", b"", b"a", b"\n", b"\n ", b"(", b")"], [0], special_texts={1: "<X>"})
    )
    state = index.start
    for token, then in [(1, [2]), (2, [3, 4]), (4, [1]), (1, [3, 4])]:
        state = index.advance(state, token)
        assert sorted(set(index.allowed(state).tolist()) - {0}) == then


# ---- copies and errors


def test_pickles_and_files_keep_special_tokens(tmp_path):
    (tmp_path / "call.lark").write_text(CALL.text)
    named = Grammar.from_file(tmp_path / "call.lark", specials={"X": Special("<X>"), "Y": STOP})
    for each in (pickle.loads(pickle.dumps(CALL)), named):
        assert each.special_tokens == ["<X>", STOP] and repr(each) == repr(CALL)
        assert each.index(VOCAB).parse([TOOL, 3]) == "a"
    assert repr(CALL).endswith("specials={'X': '<X>', 'Y': 2})")


DECLARED = "%declare X"
MISTAKES = [
    (f"start: X\n{DECLARED}", {"X": ""}, TypeError, "the text of a special token, or its id"),
    (f"start: X\n{DECLARED}", {}, ValueError, r"X is declared, and stands for .*specials=\{.X"),
    (f'start: "a" | X\n{DECLARED}', {}, ValueError, "X is declared, and stands for nothing"),
    ('start: "a"', {"X": "<X>"}, ValueError, "specials has 'X': `%declare X` and no definition"),
    ('start: X\nX: "a"', {"X": "<X>"}, ValueError, "`%declare X` and no definition of it would"),
    (f'start: X\nX: "a"\n{DECLARED}', {"X": "<X>"}, ValueError, "'X' defined more than once"),
    (f'start: A\nA: "a" X\n{DECLARED}', {"X": "<X>"}, ValueError, "not in other terminals"),
    (f'start: "a" X\n{DECLARED}\n%ignore X', {"X": "<X>"}, ValueError, "Ignore terminals are not"),
    ("start: x\n%declare x", {"x": "<X>"}, ValueError, "a rule; a name in capitals, X, is"),
]


@pytest.mark.parametrize("text, specials, error, message", MISTAKES)
def test_errors_say_what_would_have_worked(text, specials, error, message):
    with pytest.raises(error, match=message):
        Grammar(text, specials=specials)


def test_a_vocabulary_without_the_token_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"Special\('<ends>'\) is no special token of .*: did you mean '<end>'\?"
    ):
        Grammar("start: X\n%declare X", specials={"X": "<ends>"}).index(VOCAB)


def test_queries_are_about_texts(embedded):
    with pytest.raises(
        ValueError, match="a query is about texts, and it has the special token '<X>'"
    ):
        Query(embedded, CALL)


def test_a_str_that_passes_over_special_tokens_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(machine, "MAX_HYPOTHESES", 500)
    grammar = Grammar('start: X start "b" | "a"\n%declare X', specials={"X": "<X>"})
    tool = Special("<X>")
    assert grammar.parse([tool, tool, "abb"]) == "abb"
    with pytest.raises(ValueError, match="can be read in more than 500 ways"):
        grammar.parse("ab")
