"""Values of texts of compositions: what each part reads, names, cuts of ambiguous texts, checks."""

import math
import pickle
from typing import Annotated, Literal

import pytest
from helpers.common import BYTES
from pydantic import AfterValidator, BaseModel

from llmppl import CachedTransformer, Grammar, JsonSchema, Regex, Values, generate
from llmppl.constraints import DFA, Part, Pattern, Special, part_of

PETS = JsonSchema({"type": "array", "items": {"enum": ["cat", "dog"]}})


class Pet(BaseModel):
    name: str
    age: int


def even(number):
    if number % 2:
        raise ValueError("an odd number")
    return number


def has_no_b(text):
    return "b" not in text


EVEN = Values(Annotated[int, AfterValidator(even)])


@pytest.mark.parametrize("part, text, value", [
    ("Pets: " + PETS, 'Pets: ["cat"]', (["cat"],)),
    (Regex("[a-z]+: ") + PETS, 'pets: ["cat"]', ("pets: ", ["cat"])),
    ("The " + Regex("[a-z]+") + " is " + PETS, 'The x is ["dog"]', ("x", ["dog"])),
    ("a" + Regex("b*") + ["c", "d"], "abbd", ("bb", "d")),
    (Regex("[a-z]+") + ", " + Regex("[0-9]+"), "ab, 12", ("ab", "12")),
    (Regex("[a-z]+") + Regex("[a-z]*"), "abc", ("abc", "")),
    ((Regex("[a-z]") + ",").star(), "a,b,", [("a",), ("b",)]),
    (Regex("[a-z]").times(2), "ab", ["a", "b"]),
    (part_of("a") + "b", "ab", "ab"),
    ((part_of("a") + "b").optional(), "", ""),
    ((Regex("a") + "b").optional(), "", None),
    (Regex("a") | "b", "b", "b"),
    (Regex("a") + "b" - Regex("c"), "ab", ("a",)),
    ((Regex("a") + Regex("b?")) - Regex("ab"), "a", ("a", "")),
    ((Regex("a") + "b").named("x") + Regex("c"), "abc", {"x": ("a",)}),
    (Values(int) + " years", "12 years", (12,)),
    (int | Regex("[a-z]+"), "12", 12),
    (int | Regex("[a-z]+"), "ab", "ab"),
    (["x"] | PETS, "x", "x"),
    ("x" | PETS, "[]", []),
    (Regex("[a-z]+").named("word"), "ab", {"word": "ab"}),
    (Regex("[a-z]+").named("word") + "!", "ab!", {"word": "ab"}),
    ("<" + (Values(int).named("a") + "," + Values(int).named("b")).named("pair") + ">", "<1,2>",
     {"pair": {"a": 1, "b": 2}}),
    ("x" + (PETS.named("pets") | Regex("none").named("no")), "xnone", {"no": "none"}),
    ("x" + (" is " + PETS.named("pets")).optional(), "x", (None,)),
    ("x" + (" is " + PETS.named("pets")).optional(), "x is []", {"pets": []}),
    (Regex("[a-z]").optional() + PETS, "[]", ("", [])),
    ((PETS + ";").times(2), '[];["cat"];', [([],), (["cat"],)]),
    ((Values(int).named("n") + ",").star(), "1,22,", [{"n": 1}, {"n": 22}]),
    ((Values(int) + ",").star().named("all") + PETS.named("pets"), "1,2,[]",
     {"all": [(1,), (2,)], "pets": []}),
    ((Values(int) + ",").times(0, 2), "", []),
    (PETS & Regex(".{2}"), "[]", []),
    (Regex(".{2}") & PETS, "[]", []),
    (Regex(".{1,3}").named("text") & PETS.named("pets"), "[]", {"text": "[]", "pets": []}),
    (PETS - Regex(".*cat.*"), '["dog"]', ["dog"]),
    (Grammar('start: "a" | "(" start ")"') + PETS, "(a)[]", ("(a)", [])),
    (Pattern(r"(a|b)\1") + PETS, "aa[]", ("aa", [])),
    (JsonSchema(Pet).named("pet") + ".", '{"name": "Tom", "age": 3}.',
     {"pet": Pet(name="Tom", age=3)}),
    (Special("<end>") + Values(int) + Special(7), "12", (12,)),
    (has_no_b + PETS, "ac[]", ("ac", [])),
])  # fmt: skip
def test_a_composition_reads_the_values_of_its_parts(part, text, value):
    part = part_of(part)
    assert part.parse(text) == value and text in part
    part.machine.step(part.machine.start, 97)
    assert pickle.loads(pickle.dumps(part)).parse(text) == value


def test_a_text_that_can_be_cut_twice_is_cut_late():
    part = Regex("[a-z ]+").named("first") + " " + Regex("[a-z ]+").named("last")
    assert part.parse("a b c") == {"first": "a b", "last": "c"}


def test_a_check_of_one_part_chooses_the_cut():
    part = EVEN.named("n") + Regex("[0-9]*").named("rest")
    assert part.parse("123") == {"n": 12, "rest": "3"}  # 123 is odd
    assert "1" not in EVEN + Regex("[0-9]?") and "21" in Regex("2") + Values(int)
    with pytest.raises(ValueError, match="'1' is not in .*: .*an odd number"):
        (EVEN + Regex("[0-9]?")).parse("1")


def test_a_refused_piece_hides_no_other_cut_of_a_repetition():
    def refuse_c(text):
        if text == "c":
            raise ValueError("c is refused")
        return text

    part = Values(Annotated[Literal["a", "ab", "c", "bc"], AfterValidator(refuse_c)])
    assert (part + part).parse("abc") == ("a", "bc")
    assert part.times(2).parse("abc") == ["a", "bc"]


def test_alternatives_may_begin_with_the_same_part():
    nested = Grammar('start: "(" start ")" | "x"')
    part = (nested + Values(int).named("number")) | (nested + Regex("[a-z]").named("letter"))
    assert part.parse("(x)1") == {"number": 1}
    assert part.parse("(x)b") == {"letter": "b"}


def test_six_hundred_parts_in_a_row_have_a_value():
    part = PETS.named("pets")
    for _ in range(600):
        part = part + "a"
    assert part.parse('["cat"]' + 600 * "a") == {"pets": ["cat"]}
    index = part.index(BYTES)
    assert index.tokens_to_accept(index.start) == 602


@pytest.mark.parametrize("nest", [
    lambda part: part.star(),
    lambda part: part.named("x"),
    lambda part: ("(" + part + ")").optional(),
    lambda part: part & part,
    lambda part: (part | "a") + "b",
])  # fmt: skip
def test_compositions_may_be_nested_to_some_depth(nest):
    made = PETS
    for _ in range(6):
        made = nest(made)
    made.index(BYTES)
    with pytest.raises(ValueError, match="nested more than 60 deep|made of more than 10,000 parts"):
        for _ in range(100_000):
            made = nest(made)


def test_names_of_compositions_have_brackets():
    part = (Regex("a").named("x") + "b").times(2, math.inf)
    assert repr(part | PETS).startswith("(Regex('a').named('x') + 'b').times(2, inf) | ")
    assert repr(PETS.times(1234567)).endswith(".times(1234567, 1234567)")


def test_membership_tests_masks_and_checks():
    assert "1" in JsonSchema({"type": "integer"}) and '"a"' not in JsonSchema({"type": "integer"})
    odd = JsonSchema({"type": "integer", "not": {"multipleOf": 2}})
    assert "3" in odd and "4" not in odd
    grammar = Grammar('start: "a"+')
    assert "aa" in grammar and "ab" not in grammar and grammar.parse("aa") == "aa"
    with pytest.raises(ValueError, match=r"'b' is not in Grammar\('start: \"a\"\+'\)"):
        grammar.parse("b")
    with pytest.raises(ValueError, match="'b' is not in Regex"):
        Regex("a").parse("b")


def test_of_equal_texts_the_first_alternative_reads():
    assert (Regex("[0-9]+") | PETS | int).parse("1") == "1" and (int | Regex("[0-9]+")).parse(
        "1"
    ) == 1


@pytest.mark.parametrize("make", [
    lambda: Regex("[a-z]{0,9}").times(100_000).machine,
    lambda: part_of(has_no_b).times(10**9).machine,
    lambda: part_of(has_no_b).times(0, 10**9).machine,
])
def test_huge_repetitions_of_what_may_be_empty_are_refused(make):
    with pytest.raises(ValueError, match="too large|can be read in more than"):
        make()


@pytest.mark.parametrize("make, error, message", [
    (lambda: PETS.named("a") + Regex("x").named("a"), ValueError, "two parts are named 'a'"),
    (lambda: PETS.named(""), ValueError, "at least one character"),
    (lambda: PETS.named(3), TypeError, "name must be a str"),
    (lambda: PETS + 3, TypeError, "a part of a constraint is"),
    (lambda: PETS + None, TypeError, "not None"),
    (lambda: PETS.times(3, 2), ValueError, "at least 3"),
    (lambda: ~Grammar('start: "a"'), TypeError, "complement of .*Grammar.*has no automaton; that"),
    (lambda: Regex("a") - Grammar('start: "a"'), TypeError, "has no automaton"),
    (lambda: ~EVEN, TypeError, "has no automaton"),
    (lambda: PETS - (lambda text: True), TypeError, "has no automaton"),
    (lambda: Special(""), TypeError, "the text of a special token, or its id"),
    (lambda: Special(True), TypeError, "the text of a special token, or its id"),
    (lambda: Special(-2), TypeError, "the text of a special token, or its id"),
])  # fmt: skip
def test_mistakes_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_regular_compositions_are_automata():
    small = JsonSchema({"enum": [1, 2]})
    for part in (
        Regex("a") + "b", ["a"] | Regex("b"), Values(int) + " years", Regex("a").times(2, math.inf),
        ~Regex("a"),
        Regex("a*") & Values(Literal["aa"]), Values(int).optional(), Regex("a").named("x") + "b",
    ):  # fmt: skip
        assert isinstance(part, DFA) and isinstance(part, Part) and part.shortest() is not None
    for part in (small + "a", small | "a", small.named("x"), small & Regex("1"), small.times(2)):
        assert not isinstance(part, DFA) and part.automaton.shortest() is not None
    assert set((~small & Regex("[0-3]")).enumerate()) == {"0", "3"}
    assert (small & Grammar('start: "1"')).automaton is None


INTEGER = part_of(int)


@pytest.mark.parametrize("part, texts, value", [
    (INTEGER.star(), ["", "12", "0-1"], []),
    (INTEGER.times(2), ["12", "-90"], [1, 2]),
    (INTEGER + int, ["12", "-90"], (1, 2)),
    (part_of(float) + float + "!", ["12!", "1.5-0!"], (1.0, 2.0)),
    (Regex(".{0,300}") + Regex("[a-z]{0,300}"), ["12", "é1ab"], ("12", "")),
    (Regex(".{0,300}").times(3), ["12", "éa"], ["12", "", ""]),
    ((INTEGER + int) & Regex("1.*"), ["12", "1-9"], (1, 2)),
    ((INTEGER + int) - Regex("2.*"), ["12", "-90"], (1, 2)),
    ((INTEGER.star().named("all") + "!").optional(), ["12!", ""], {"all": [12]}),
    (Regex("(a.{0,900})*") | Regex("(b.{0,900})*"), ["bab", "ab"], "bab"),
    (Regex("(?s:.*)a.{0,12}") & Regex("(?s:.*)b.{0,9}"), ["bab", "ab"], "bab"),
])  # fmt: skip
def test_compositions_too_large_for_an_automaton_stay_lazy(part, texts, value):
    assert not isinstance(part, DFA)
    part = pickle.loads(pickle.dumps(part))
    index = part.index(BYTES)
    for text in texts:
        state = index.start
        for byte in text.encode():
            assert index.mask(state)[byte] and index.tokens_to_accept(state) < 9
            state = index.advance(state, byte)
        assert index.accepts(state) and text in part
    assert part.parse(texts[0]) == value
    with pytest.raises(ValueError, match="is not in"):
        part.parse("\n")


def test_distances_of_lazy_compositions_are_those_of_texts():
    part = INTEGER.times(3)
    index = part.index(BYTES)
    state = index.after("-12")
    assert index.tokens_to_accept(index.start) == 3 and index.tokens_to_accept(state) == 1
    assert not index.mask_within(state, 0).any()
    assert set(index.mask_within(state, 1).nonzero()[0].tolist()) == set(b"0123456789")
    assert set(index.mask_within(state, 2).nonzero()[0].tolist()) == set(b"-0123456789")


def test_warnings_are_those_of_the_parts():
    late = JsonSchema({"type": "string", "not": {"pattern": "a"}, "dependentRequired": {}})
    nested = Grammar('start: "[" start? "]"')
    assert ("x" + late).warnings == late.warnings
    [line] = (nested & PETS).warnings
    assert line.startswith("Grammar('start: \"[\" start? \"]\"') & JsonSchema")
    assert "may turn out to have none, and die" in line


def test_generate_returns_the_value_of_a_composition():
    lm = CachedTransformer.from_pretrained()
    record = " Name: " + Regex("[A-Z][a-z]{1,5}").named("name") + ", pets: " + PETS.named("pets")
    answer = generate(lm, "Once upon a time", record, seed=0)
    assert answer.value == record.parse(answer.text) and [*answer.value] == ["name", "pets"]
