"""Automata: operations against sets of strings, counts against enumeration, and the promises of a recognizer."""

import copy
import itertools
import operator
import pickle
import re
import time

import numpy as np
import pytest
from helpers.common import repetitions, slow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmppl.constraints.automata.budget import Budget, TooLarge
from llmppl.constraints.automata.determinise import Leftmost
from llmppl.constraints.automata.dfa import DFA, anything
from llmppl.constraints.automata.nfa import ACCEPT, ANY, DEAD, NFA, merged, utf8
from llmppl.constraints.automata.regex import Regex, parse

LETTERS = "abé"
SHORT = ["".join(some) for n in range(5) for some in itertools.product(LETTERS, repeat=n)]     # 121 texts

many = settings(max_examples=repetitions(300, 30), suppress_health_check=list(HealthCheck))
PATTERNS = st.recursive(
    st.sampled_from(["a", "b", "é", "", "[ab]", "."]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("(?:{0[0]}|{0[1]})".format),
        st.tuples(inner, st.sampled_from(["(?:{})*", "(?:{}){{,2}}", "(?:{})+", "(?={}).*", "(?!{}).*"])).map(
            lambda pair: pair[1].format(pair[0])
        ),
    ),
    max_leaves=6,
)


def texts(dfa: DFA, among=SHORT) -> set[str]:
    return {text for text in among if text in dfa}


def follow(dfa: DFA, data: bytes) -> int | None:
    state: int | None = dfa.start
    for byte in data:
        state = dfa.step(state, byte) if state else None
    return state


# ---- operations


@many
@given(PATTERNS, PATTERNS)
def test_operations_agree_with_those_of_sets(first, second):
    a, b = Regex(first), Regex(second)
    A, B = texts(a), texts(b)
    assert texts(a | b) == A | B
    assert texts(a & b) == A & B
    assert texts(a - b) == A - B
    assert texts(a ^ b) == A ^ B
    assert texts(~a) == set(SHORT) - A
    assert texts(a.times(0, 1)) == A | {""}
    assert texts(a + b) == {text for text in SHORT if any(text[:i] in A and text[i:] in B for i in range(5))}
    assert a.equivalent(b) == ((a - b).is_empty() and (b - a).is_empty())


@many
@given(PATTERNS)
def test_star_is_the_smallest_language_that_goes_on(pattern):
    dfa = Regex(pattern)
    inside, stars = texts(dfa), {""}
    for text in SHORT:                              # shorter ones come first
        if any(text[:i] in stars and text[i:] in inside for i in range(len(text))):
            stars.add(text)
    assert texts(dfa.star()) == stars
    assert dfa.star().equivalent(dfa.star().star())


@many
@given(PATTERNS, PATTERNS)
def test_the_minimal_automaton_is_the_same_for_equal_languages(first, second):
    a, b = Regex(first), Regex(second)
    least = a.minimise()
    assert least.equivalent(a) and least.num_states <= a.explore().num_states
    assert least.minimise().num_states == least.num_states
    assert ((a | b) - (b - a)).minimise().num_states == least.num_states
    if least.start:                                 # every pair of states is told apart by some text
        states = range(1, least.num_states + 1)
        found = [DFA.from_table(least.table, least.accepting, state).minimise() for state in states]
        languages = {(each.table.tobytes(), each.accepting.tobytes()) for each in found}
        assert len(languages) == least.num_states   # states are numbered in the order of their bytes


@pytest.mark.parametrize("pattern, states", [
    ("(a|b)*abb", 4), ("a|b|c|d", 2), ("(?:ab|cb|db)e", 4), (r"[^\s\S]", 0), ("(?s).*", 8)
])  # fmt: skip
def test_minimise_merges_all_states_of_equal_language(pattern, states):
    assert Regex(pattern).minimise().num_states == states
    assert Regex(".{0,20}").minimise().num_states == Regex(".{0,20}").explore().num_states


def test_the_universe_is_all_text():
    everything = anything()
    assert everything.count(1) == 0x110000 - 2048
    assert (~everything).is_empty() and (~(~everything)).equivalent(everything)
    assert Regex("(?s).*").equivalent(everything)
    assert "\ud800" not in everything and "\ud800" not in ~Regex("a")
    assert (Regex("(?s).") - Regex(r"\w")).equivalent(Regex(r"\W"))


# ---- counting, enumerating, sampling


@many
@given(PATTERNS)
def test_counts_agree_with_the_enumeration(pattern):
    dfa = Regex(f"(?=[abé]*$)(?:{pattern})")
    found = texts(dfa)
    by_length = [sum(len(text) == n for text in found) for n in range(5)]
    assert [dfa.count(n) for n in range(5)] == by_length
    listed = list(itertools.takewhile(lambda text: len(text) < 5, itertools.islice(dfa.enumerate(), 200)))
    assert listed == sorted(found, key=lambda text: (len(text), text))
    assert dfa.shortest() == (listed[0] if listed else None if dfa.is_empty() else dfa.shortest())


def test_counts_are_exact_however_large():
    assert Regex(".{0,50}").count(50) == (0x110000 - 2048 - 1) ** 50
    assert Regex("(?:ab?){100}").count(150) == 100891344545564193334812497256           # 100 choose 50
    assert Regex("[ab]*").count(1000) == 2**1000


def test_enumeration_is_by_length_then_code_point():
    assert list(itertools.islice(Regex("(a|é|😀)*").enumerate(), 7)) == ["", "a", "é", "😀", "aa", "aé", "a😀"]
    assert list(Regex("b|a|bb|bbb").enumerate()) == ["a", "b", "bb", "bbb"]
    assert list(Regex("[^\\s\\S]").enumerate()) == []
    assert Regex("aab|ba|bb").shortest() == "ba" and Regex("[^\\s\\S]").shortest() is None
    words = sorted(["the", "cat", "é", "", "thé", "then"], key=lambda word: (len(word), word))
    assert list(DFA.from_strings(words).enumerate()) == words


@pytest.mark.parametrize("pattern, finite", [
    ("a{0,9}", True), ("", True), (r"[^\s\S]", True), ("a(?:b*)(?!)|c", True), (r"\w", True), ("a*", False),
    ("ab+c", False), (".{2,}", False), ("(?!a$).*", False),
])  # fmt: skip
def test_finite_languages_are_recognised(pattern, finite):
    assert Regex(pattern).is_finite() is finite


# ---- what a recognizer promises


@many
@given(PATTERNS)
def test_every_state_can_reach_acceptance(pattern):
    dfa = Regex(pattern)
    if not dfa.start:
        assert not texts(dfa)
        return
    dfa.explore()
    for state in range(1, dfa.num_states + 1):
        assert DFA.from_table(dfa.table, dfa.accepting, state).start, state
    assert not dfa.table[0].any() and not dfa.accepting[0]


def test_states_are_small_integers_and_rows_are_made_on_demand():
    dfa = Regex("ab|cd")
    assert dfa.start == 1 and dfa.num_states == 1 and not dfa.ready[1]
    assert dfa.step(1, ord("b")) is None and dfa.ready[1]
    row = dfa.row(1)
    assert row.dtype == np.int32 and row.shape == (256,) and set(np.flatnonzero(row)) == {ord("a"), ord("c")}
    with pytest.raises(ValueError, match="read-only"):
        row[0] = 1
    assert dfa.table.shape == (dfa.num_states + 1, 256) and len(dfa.accepting) == len(dfa.ready) == dfa.num_states + 1
    assert "so far" in repr(DFA.__repr__(dfa)) and dfa.explore().ready.all()
    last = follow(dfa, b"ab")
    assert last and dfa.accepts(last) and not dfa.row(last).any()


def test_rows_stay_right_while_the_table_grows():
    dfa = Regex("[a-z]{1,100}")
    state, rows = dfa.start, []
    for _ in range(100):
        rows.append((state, dfa.row(state).copy()))
        state = dfa.step(state, ord("q"))
    assert dfa.accepts(state) and dfa.step(state, ord("q")) is None
    assert all((dfa.row(state) == row).all() for state, row in rows)


def test_a_copy_is_the_automaton_itself():
    dfa = Regex("a|b")
    assert copy.copy(dfa) is dfa and copy.deepcopy([dfa])[0] is dfa
    again = pickle.loads(pickle.dumps(dfa))
    assert again.equivalent(dfa) and again.pattern == "a|b"


def test_exploring_stops_at_a_limit():
    assert Regex("a{50}").explore(100).num_states == 51
    with pytest.raises(ValueError, match="is too large: more than 20 states"):
        Regex("a{50}").explore(20)


# ---- making and showing


def test_arrays_make_an_automaton_without_their_useless_states():
    table = np.zeros((6, 256), np.int32)
    table[3, ord("a")], table[3, ord("b")], table[5, ord("c")], table[3, ord("c")] = 2, 4, 2, 3
    accepting = np.array([False, False, True, False, False, False])
    dfa = DFA.from_table(table, accepting, 3)
    assert dfa.num_states == 2 and dfa.start == 1 and dfa.equivalent(Regex("c*a"))
    assert DFA.from_table(table, np.zeros(6, bool), 3).is_empty()


HOSTILE = [
    "(a{0,60}){0,60}", "((a?){0,40}b?){0,40}", "((a{1000}){1000}){1000}", r"\w{100000}",
    *slow("((?!é)|a){99999}", "(.{0,99}){0,99}", "(.*a.{20}){3}", "(?>(a|b)*a(a|b){16})c", "(?:a?){9999}b"),
]  # fmt: skip


@pytest.mark.parametrize("pattern", HOSTILE)
def test_a_hostile_pattern_is_refused_within_seconds(pattern):
    begun = time.process_time()
    with pytest.raises(TooLarge, match="is too large: more than"):
        Regex(pattern).explore()
    assert time.process_time() - begun < 10             # 1 to 4 on two shared cores


# ---- below: bytes of code points, ordered threads


def test_the_bytes_of_a_set_of_code_points_are_its_encodings():
    for ranges in [((0x41, 0x41),), ((0x70, 0x900),), ((0xD000, 0xE010),), ((0xFFF0, 0x1000F), (0x10FF00, 0x10FFFF))]:
        nodes = utf8(ranges)
        paths, todo = [], [(b"", 0)]
        while todo:
            text, node = todo.pop()
            for lo, hi, target in nodes[node]:
                reached = [text + bytes((byte,)) for byte in range(lo, hi + 1)]
                if target < 0:
                    paths += reached
                else:
                    todo += [(some, target) for some in reached]
        truth = [chr(c).encode() for lo, hi in ranges for c in range(lo, hi + 1) if not 0xD800 <= c < 0xE000]
        assert sorted(paths) == sorted(truth)
    assert utf8(()) == () and utf8(((0xD800, 0xDFFF),)) == () and len(ANY) == 8
    assert merged([(5, 6), (1, 2), (3, 3), (6, 9)]) == ((1, 3), (5, 9))


def test_an_NFA_does_not_build_dead_ends():
    nfa = NFA()
    assert nfa.read((), 0) == nfa.split([]) == nfa.split([DEAD]) == nfa.plus(lambda again: DEAD, 0) == DEAD
    assert nfa.split([DEAD, 0]) == 0 and nfa.star(lambda again: DEAD, 0) == 0
    assert DFA(nfa).is_empty() and Leftmost(nfa).start == 0


@pytest.mark.parametrize("pattern, order", [
    ("a|b|", "ab$"), ("a??b", "ba"), ("(?:|a)b", "ba"), ("a*b", "ab"), ("a*?b", "ba"), ("(|a)*", "$a")
])  # fmt: skip
def test_choices_are_ordered_as_re_tries_them(pattern, order):
    nfa = parse(pattern)
    assert "".join("$" if q == ACCEPT else chr(nfa.edges(q)[0][0]) for q in nfa.closure(nfa.start)) == order


@pytest.mark.parametrize("pattern", ["(?!).*", "(?!)", "a(?!)|(?!)b", r"(?=a)(?!a).*"])
def test_an_unsatisfiable_guard_makes_the_language_empty(pattern):
    assert Regex(pattern).is_empty() and Regex(pattern).minimise().num_states == 0
    assert re.fullmatch(pattern, "") is None and re.fullmatch(pattern, "a") is None


# ---- limits: states are counted as they are made; the most that there may be are set low here

SEVENS, ELEVENS, THIRTEENS = Regex("(.{7})*"), Regex("(.{11})*"), Regex("(.{13})*")


@pytest.mark.parametrize(
    ("make", "culprit"),
    [
        (lambda: Regex(".*a.{9}").explore(), r"regex '\.\*a\.\{9\}'"),
        (lambda: (SEVENS & ELEVENS).intersected_with(THIRTEENS), r"DFA\(\d+ states\) & Regex\('\(\.\{13"),
        (lambda: (SEVENS | ELEVENS).united_with(THIRTEENS), r"DFA\(\d+ states\) \| Regex"),
        (lambda: (SEVENS - ELEVENS).without(THIRTEENS), r"DFA\(\d+ states\) - Regex"),
        (lambda: ~Regex("(.*a.{9}){3}"), r"regex '\(\.\*a"),
        (lambda: Regex(".*a.{6}").repeated(0, np.inf).explore(), r"Regex\('\.\*a\.\{6\}'\)\.times\(0, inf\)"),
        (lambda: Regex(".*a.{4}").followed_by(Regex(".*b.{4}")).explore(), r"Regex\(.*\) \+ Regex"),
        (lambda: Leftmost(parse(".*a.{9}")).explore(), r"regex '\.\*a\.\{9\}'"),
        (lambda: Regex(r"(?>(.*a|b).{9})b"), r"regex '\(\?>"),
        (lambda: Regex(r"(?!.*a.{9}c).*"), r"regex '\(\?!"),
        (lambda: Regex(r".*(?<=a.{9})b.*"), r"regex '\.\*\(\?<="),
    ],
)
def test_states_are_counted_as_they_are_made_and_the_culprit_is_named(monkeypatch, make, culprit):
    monkeypatch.setattr("llmppl.constraints.automata.budget.MAX_STATES", 1000)
    with pytest.raises(TooLarge, match=rf"^{culprit}.* is too large: more than 1,000 states; .* would work"):
        make()


def test_work_hidden_in_few_states_is_counted_too(monkeypatch):
    long = Regex("ab" * 6000).explore()
    monkeypatch.setattr("llmppl.constraints.automata.budget.MAX_STEPS", 10_000)
    for pattern in ["(a|){1000}", "((?!é)|a){9999}", r"(([é-ÿ]|\Z){20}){999}", "((?<!.)|a){9999}", "(a(b){99999}c){3}"]:
        with pytest.raises(TooLarge, match="^regex .* is too large: more than 10,000 steps"):
            parse(pattern)                          # the copies are counted as they are made
    with pytest.raises(ValueError, match=r"^Regex\('a.*'\).minimise\(\) is too large: more than 10,000 steps"):
        long.minimise()


def test_the_steps_of_intersections_count_for_the_pattern(monkeypatch):
    pattern = "(?:(?!cat)[a-z]+ ?){1,9}x"
    monkeypatch.setattr("llmppl.constraints.automata.budget.MAX_STEPS", 300_000)
    whole = Budget("the pattern")
    part = Budget("the part", whole=whole)
    part.spend(steps=140_000)
    with pytest.raises(TooLarge, match="^the part is too large"):
        part.spend(steps=20_000)
    assert whole.steps == 140_000
    assert 50_000 < parse(pattern, to_end=True).budget.steps < 170_000      # intersections stop at half of it


def test_a_product_explores_only_pairs_that_both_reach():
    huge = Regex(".*a.{60}")                        # 2 ** 61 states
    assert list((huge & Regex("b?a{61}")).enumerate()) == ["a" * 61, "b" + "a" * 61]
    assert (huge & Regex(r"[^\s\S]")).is_empty() and huge.num_states < 1000


@pytest.mark.parametrize("combine", [operator.and_, operator.or_, operator.sub, operator.add])
def test_an_operand_that_is_no_constraint_is_a_TypeError(combine):
    with pytest.raises(TypeError, match="a part of a constraint is a str, a Regex.*, not 5"):
        combine(Regex("a"), 5)
    with pytest.raises(TypeError, match="a part of a constraint is .*, not 5"):
        combine(5, Regex("a"))


def test_a_symmetric_difference_wants_two_automata():
    with pytest.raises(TypeError, match="both must be automata"):
        Regex("a") ^ "b"


def test_operands_may_be_texts_and_lists():
    assert set(("a" + Regex("b?") + ["c", "d"]).enumerate()) == {"ac", "ad", "abc", "abd"}
    assert set(("a" | Regex("b")).enumerate()) == {"a", "b"} and set((["a", "b"] - Regex("b")).enumerate()) == {"a"}
    assert set((Regex("a|b|c") & ["b", "z"]).enumerate()) == {"b"}


def test_a_single_string_is_not_a_list_of_strings():
    with pytest.raises(TypeError, match=r"'abc' is one string, not a list of them, such as \['a', 'b'\]"):
        DFA.from_strings("abc")


def test_many_strings_share_their_ends(monkeypatch):
    words = ["".join(some) for n in range(4) for some in itertools.product("abc", repeat=n)] + ["é", "éa"]
    small = DFA.from_strings(words)
    assert sorted(small.enumerate()) == sorted(words) and small.num_states == small.minimise().num_states == 6
    monkeypatch.setattr("llmppl.constraints.automata.budget.MAX_STATES", 10)
    with pytest.raises(ValueError, match="the language of these strings is too large: more than 10 states; fewer"):
        DFA.from_strings(["a" * 20])
    monkeypatch.setattr("llmppl.constraints.automata.operations.MAX_PARTS", 10)
    with pytest.raises(ValueError, match="the language of these strings is too large: more than 10 prefixes; fewer"):
        DFA.from_strings(["a" * 20])


def test_a_list_of_strings_names_an_element_of_another_type():
    with pytest.raises(TypeError, match="each of the strings must be a str, not 3"):
        DFA.from_strings(["a", 3])
