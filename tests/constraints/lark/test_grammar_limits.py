"""Grammars that are large, or made to be: their cost in states and rules, and that they agree with lark."""

import contextlib
import itertools
import random
import re
import time

import numpy as np
import pytest
from helpers.common import repetitions, slow
from helpers.fire import in_threads
from helpers.grammars import GRAMMARS, check_states, plain_lark
from helpers.machines import accepts, read
from lark import Lark
from lark.exceptions import GrammarError, LarkError
from lark.parsers.grammar_analysis import calculate_sets

from llmppl import Model, smc_steer
from llmppl.constraints import Grammar, Vocabulary
from llmppl.constraints.automata.budget import TooLarge
from llmppl.constraints.lark import lexer, loader, parser, terminals
from llmppl.constraints.lark.parser import Rule, derived
from llmppl.models.spans import Guide

BYTES = Vocabulary([*(bytes([byte]) for byte in range(256)), b""], eos_ids=[256])


def optionals(number, form):
    rules = "\n".join(f'a{i}: "x{i}."' for i in range(number))
    return "start: " + " ".join(form.format(f"a{i}") for i in range(number)) + "\n" + rules


def random_optionals(rng):
    """A small grammar whose rules are groups, optionals and repeats, nested."""

    def part(depth):
        if depth == 0 or rng.random() < 0.4:
            return rng.choice(['"a"', '"b"', '"c"', "A", "x", "y"])
        inner = " ".join(part(depth - 1) for _ in range(rng.choice([1, 1, 2])))
        form = rng.choice(["[{}]", "[{}]", "({})?", "({} | {})", "({})~0..2", "({})+", "({})*", "({})~2"])
        return form.format(inner, part(0))

    def rule(depth):
        return " ".join(part(depth) for _ in range(rng.choice([1, 2, 3])))

    return f'start: {rule(2)} | {rule(1)}\nx: {rule(1)}\ny: {rule(1)} | "c"\nA: /a+b?/\n'


def test_optionals_and_repeats_are_parsed_as_lark_parses_them():
    rng = random.Random(0)
    done = nonempty = 0
    while done < repetitions(300, 25):
        grammar = random_optionals(rng)
        try:
            plain_lark(grammar)
        except (LarkError, AssertionError):
            with pytest.raises(ValueError):
                Grammar(grammar)
            continue
        nonempty += check_states(grammar, "abc", 4) > 0
        done += 1
    assert nonempty > done / 4


def test_ambiguous_optionals_are_refused_as_in_lark():
    pair = "start: [A] [A]\nA: /x/"
    for make in (plain_lark, Grammar):
        with pytest.raises((GrammarError, ValueError), match="Rules defined twice"):
            make(pair)
    assert accepts(Grammar('start: ["x"] ["x"]'), "xx")         # the text of a word is not kept: lark sees no two


def test_thousands_of_words_are_one_terminal():
    grammar = Grammar("start: WORD+\nWORD: " + "|".join(f'"kw{i}"' for i in range(5000)))
    index = grammar.index(BYTES)
    assert index.allowed(index.after("kw49")).tolist() == [*b"0123456789k", 256]
    assert accepts(grammar, "kw3kw499kw12") and not accepts(grammar, "kw") and read(grammar, "kw50000") is None


def test_keywords_that_rules_distinguish_cost_only_their_number():
    number = 300
    grammar = Grammar("start: (" + "|".join(f'"kw{i}" "=" "v{i}"' for i in range(number)) + ")+")
    assert len(grammar._parser.shifts) < 7 * number
    assert accepts(grammar, "kw7=v7kw299=v299") and read(grammar, "kw7=v8") is None


def test_a_word_is_carved_out_without_backtracking():
    """`re` tries 2^60 ways to match the word."""
    grammar = Grammar(f'start: A | "{"a" * 60}c" "!"\nA: /(a+)+b/')
    assert accepts(grammar, "a" * 60 + "b") and accepts(grammar, "a" * 60 + "c!") and not accepts(grammar, "a" * 60)


LONG = {
    "twenty rules that double": ["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(20)), 'r20: "a"'],
    "thousands of literals": ["start: " + '"a" ' * 4000],
}


@pytest.mark.parametrize("name", LONG)
def test_the_error_of_a_long_text_asks_a_bounded_question(name):
    index, begun = Grammar("\n".join(LONG[name])).index(BYTES), time.process_time()
    with pytest.raises(ValueError, match="no text ends within max_tokens=8: give room"):
        Guide(index, index.vocab, None, 8)
    assert time.process_time() - begun < 2
    assert index.tokens_to_accept(index.start, 20) == np.inf


def test_a_search_for_an_end_is_bounded():
    tokens = ["".join(letters).encode() for n in (1, 2, 3) for letters in itertools.product("abcde", repeat=n)]
    palindromes = Grammar("start: " + "|".join(f'"{letter}" start "{letter}"' for letter in "abcde") + "|")
    index = palindromes.index(Vocabulary([*tokens, b""], eos_ids=[len(tokens)]))        # lark never reads an end
    assert index.tokens_to_accept(index.advance(index.start, 0)) == np.inf
    begun = time.process_time()
    assert not index.mask_within(index.advance(index.start, 0), 60).any()
    assert time.process_time() - begun < 20


@pytest.mark.parametrize("name, n", [pytest.param("sql", 40, marks=pytest.mark.slow), ("arithmetic", 20), ("json", 30)])
def test_random_texts_end_in_time_and_masks_ignore_history(name, n):
    index, other, rng = *(Grammar(GRAMMARS[name][0]).index(BYTES) for _ in range(2)), random.Random(n)
    for _ in range(repetitions(20, 1)):
        text, masks = b"", []
        while not index.accepts(index.after(text)):
            masks.append((text, index.mask_within(index.after(text), n - len(text))))
            text += bytes([rng.choice(np.flatnonzero(masks[-1][1][:256]).tolist())])      # or an IndexError
        assert len(text) <= n
        for text, mask in reversed(masks):
            assert np.array_equal(other.mask_within(other.after(text), n - len(text)), mask)


# ---- terminals


@pytest.mark.parametrize("limit, most", [("MAX_SCANS", 1000), ("MAX_THREADS", 10_000)])
def test_a_terminal_with_too_many_states_is_named(limit, most, monkeypatch):
    monkeypatch.setattr(lexer, limit, most)
    with pytest.raises(TooLarge, match=rf"terminal A '[(].*' is too large: .*{most // 1000},0[0-9]{{2}} .*smaller"):
        read(Grammar("start: A\nA: /(.*a.{30})/"), "".join(random.Random(0).choices("ab", k=1000)))


@pytest.mark.parametrize("terminal", ["/(.*a.{14})/", "/(.*a.{30})/", "/(a|b)*a(a|b){20}/"])
def test_a_terminal_is_determinised_only_as_far_as_needed(terminal):
    grammar = Grammar(f"start: A\nA: {terminal}")
    index = grammar.index(BYTES)
    text = "abba" + "ab" * 30
    for n in range(len(text)):
        mask = index.mask(index.after(text[:n]))
        assert mask[ord("a")] and mask[256] == bool(re.fullmatch(terminal[1:-1], text[:n]))
    assert len(grammar.partials.tokens) < 10_000


@pytest.mark.parametrize("number", [10, 60, 600])
def test_the_first_mask_does_not_wait_for_a_long_terminal(number):
    grammar = Grammar(f'start: "if" A | A\nA: /[a-z]([\\w]|[_]){{0,{number}}}/')
    index = grammar.index(BYTES)
    allowed = index.allowed(index.start)
    assert allowed.tolist() == list(range(ord("a"), ord("z") + 1)) and len(grammar.partials.tokens) < 3500
    assert index.accepts(index.after("iffy")) and not index.mask(index.after("i"))[ord("-")]


REFUSED = {
    "one terminal": ("start: A\nA: /\\w{100000}/", "terminal A: .*is too large: more than 1,000,000 states"),
    "terminals that double": (
        "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)) + '\nT40: "z"',
        "terminal T[0-9] has [0-9,]+ symbols when",
    ),
    "groups": ("start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deeply for lark"),
    "words": ("start: (" + "|".join(f'"w{i}"' for i in range(1001)) + ")+", "1,001 terminals, .*one for all, WORD:"),
    "repeats": ('start: ((("x"~0..40 "y")~0..40 "z")~0..40 "w")~0..40', "rule start has [0-9,]+ symbols when"),
    "optionals": ("start: " + '"a"? "b"? ' * 10, "rule start has 10,4[0-9,]+ symbols when"),
    "a set": ('start: ("a"|"b")~0..30 "a" ("a"|"b")~25', "rule start has [0-9,]+ symbols when"),
    "templates": ('start: t{"a"}\nt{x}: x | t{t{x}}', "templates call each other without an end"),
    "templates that double": (
        'start: t0{"a"}\n' + "\n".join(f't{i}{{x}}: t{i + 1}{{u{{x}}}} t{i + 1}{{v{{x}}}}' for i in range(20))
        + "\nt20{x}: x\nu{x}: x\nv{x}: x",
        "templates call each other without an end, or too often",
    ),
    "look-aheads": (
        "start: A\nA: /(?:" + "".join(f"(?={c})?" for c in "abcdefghijklmnopqrst") + ")x/", "terminal A .* is too large"
    ),
    "an atomic group": ("start: A\nA: /(?>(a|b)*a(a|b){16})c/", "terminal A: .*is too large"),
    "no text": ('start: start "a" | start "b"', "no text at all .*: its rules never end"),
    "ignored text that a rule wants": ('start: "a" " " "b"\n%ignore " "', "wants? __IGNORE_0, which %ignore drops"),
    "a terminal that takes the rest": ('start: "<t>" C "</t>"\nC: /.+/', "no text goes on after terminal C '.[+]'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_endless_construction_is_refused_by_name(case):
    grammar, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        Grammar(grammar)


def test_alternatives_of_alternatives_are_counted_in_the_parser(monkeypatch):
    rule = "start: " + " ".join("(" + "|".join(f'start "{a}{i}"' for i in range(8)) + ' | "c")' for a in "ab")
    Grammar(rule)
    monkeypatch.setattr(parser, "MAX_ITEMS", 1_000)
    with pytest.raises(ValueError, match="^grammar: lark's parser has more than 1,000 items; fewer"):
        Grammar(rule)


NAME = '\nNAME: /[a-z]+_/\n%ignore " "\n'
OPERATORS = "\n".join(f'?e{i}: e{i + 1} | e{i} "o{i}" e{i + 1} | "p{i}" e{i}' for i in range(250))
MODERATE = {
    "optional parts": 'start: "s0" ' + " ".join(f'("k{i}" NAME)?' for i in range(13)) + NAME,
    "statements": "start: expr\n" + "\n".join(f'x{i}: "k{i}" expr?' for i in range(200)) + "\nexpr: NAME | "
                  + " | ".join(f"x{i}" for i in range(200)) + NAME,
    "words": "start: (" + " | ".join(f'"k{i}" NAME' for i in range(900)) + ")*" + NAME,
    "operators": f'start: e0\n{OPERATORS}\n?e250: NAME | "(" e0 ")"{NAME}',
}  # fmt: skip


@pytest.mark.parametrize("case", ["statements", "operators", *slow("optional parts", "words")])
def test_a_grammar_of_moderate_size_is_read_or_refused_within_seconds(case):
    begun = time.process_time()
    with contextlib.suppress(ValueError):
        Grammar(MODERATE[case])
    assert time.process_time() - begun < 8              # 0.4 to 2.5 on two shared cores; before 6 to 14


def test_the_sets_of_symbols_are_those_of_lark():
    rules = ['start: a b? c* "x"', "start: a a b\na: b?\nb: start?", 'start: "(" start ")" |\nb: start b | b']
    for each in rules:
        names = [f'{name}: "{name}"?' for name in "abc" if f"{name}:" not in each]
        loaded = Lark("\n".join([each, *names])).rules       # by any parser
        found = derived([Rule(rule.origin, rule.expansion) for rule in loaded], {})
        assert found.keys() == calculate_sets(loaded)[2]


def test_bytes_of_one_class_are_read_once(monkeypatch):
    read = []
    step_all = lexer.PartialTokens.step_all

    def counted(self, numbers, byte):
        read.append(byte)
        return step_all(self, numbers, byte)

    monkeypatch.setattr(lexer.PartialTokens, "step_all", counted)
    grammar = Grammar('start: (A | "(" start ")")+\nA: /[a-z]+/')
    [(unit, number, _)] = grammar.start.hypotheses
    row = unit.row(number)
    assert read == [0, 40, 41, 97, 123][: len(read)] and len(read) <= 5
    assert np.flatnonzero(row).tolist() == [40, *range(97, 123)]


def test_terminals_in_terminals_are_counted_written_out(monkeypatch):
    doubling = "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(12)) + '\nT12: "z"'
    assert accepts(Grammar(doubling), "z" * 4096)
    monkeypatch.setattr(loader, "MAX_TERMINAL_SYMBOLS", 4096)
    with pytest.raises(ValueError, match="terminal T[0-9]+ has [0-9,]+ symbols when .*, and all together more than"):
        Grammar(doubling)


def test_terminals_that_are_too_large_together(monkeypatch):
    monkeypatch.setattr(terminals, "MAX_PARTS", 1000)
    with pytest.raises(TooLarge, match="terminal A, beside the others, is too large: 602 states"):
        Grammar("start: A|B\nA: /a{600}/\nB: /b{500}/")


ENDLESS = {
    "before the end": "start: x\nx: y x \"b\" | \ny.2: ",
    "before a token": 'start: x "c"\nx: y x "b" | "a"?\ny.2: ',
    "round and round": 'start: x "c"\nx.2: x | "a" | z\nz: "a" x',
    "a repeat": 'start: (x+)*\n!x.1: "a" |',
    "a repeat before a token": 'start: (x+)* "b"\n!x.1: "a" |',
    "a repeat of one": 'start: x+\n!x.1: "a" |',
    "65,536 empty texts": "\n".join(["start: x0", *(f"x{i}: x{i + 1} x{i + 1}" for i in range(16)), 'x16: "a" |']),
}


@pytest.mark.parametrize("case", ENDLESS)
def test_a_grammar_on_which_larks_parser_loops_is_refused(case):
    def use():
        index = Grammar(ENDLESS[case]).index(BYTES)
        for state in (index.start, index.after("a")):
            index.mask(state)

    with pytest.raises(ValueError, match="lark's parser never ends before .*, where rule [xy](16)? is found"):
        in_threads([use])                               # which bounds the time


NULLABLE = [
    'start: (a*)*\na: "a"', 'start: (a?)+\na: "a"', 'start: ((a|)+)*\na: "a"', 'start: x "b"\nx: y |\ny: x | "a"',
    'start: x* "b"\nx: a*\na: "a"', 'start: "b" a+ "b"\n!a.1: "a" |', 'start: (a?)~0..3\na: "a"',
    'start: x "b"\nx: y x "a" |\ny:', 'start: x\nx: x y "a" |\ny: ("b"?)', 'start: x\nx: y z |\ny: "a"?\nz: "b"?',
]  # fmt: skip


@pytest.mark.parametrize("grammar", NULLABLE)
def test_repeats_of_a_part_that_may_be_empty_agree_with_lark(grammar):
    try:
        parser = Lark(grammar, parser="lalr")
    except GrammarError:
        with pytest.raises(ValueError, match="collision"):
            in_threads([lambda: Grammar(grammar)])
        return
    index = Grammar(grammar).index(BYTES)
    for text in map("".join, itertools.chain.from_iterable(itertools.product("ab", repeat=n) for n in range(5))):
        accepted = True
        try:
            parser.parse(text)
        except LarkError:
            accepted = False
        try:
            state = index.after(text)
        except ValueError:
            assert not accepted
        else:
            assert index.accepts(state) == accepted, text


# ---- copies


def test_a_grammar_is_an_attribute_of_a_program():
    class Program(Model):
        def __init__(self, grammar):
            super().__init__()
            self.grammar, self.state = grammar, grammar.start

        def step(self):
            self.state = self.grammar.step(self.state, ord("a"))
            self.s += "a"
            self.condition(self.state is not None)
            if self.grammar.accepts(self.state):
                self.finish()

    grammar = Grammar('start: "a" "a"')
    posterior = smc_steer(Program(grammar), 2, 2, seed=0, progress=False)
    assert [str(particle) for particle in posterior] == ["aa"] * len(posterior) and posterior.log_ml == 0
