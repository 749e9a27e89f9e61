"""Types as constraints: texts compared with `str`, `json` and pydantic, which the languages do not use."""

import dataclasses
import datetime as dt
import enum
import itertools
import json
import math
import pickle
import string
import types
import typing
import uuid
from typing import Annotated, Any, Literal, NewType, TypedDict

import numpy as np
import pytest
from helpers.common import repetitions
from helpers.tiny import tiny_lm, tiny_vocab
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, Field, TypeAdapter

from llmppl import CachedTransformer, ConstrainedText, JsonSchema, Values, importance_sampling, search
from llmppl.constraints import DFA, Regex, Vocabulary, constraint_of, index_of
from llmppl.queries import probability

BYTES = Vocabulary([*(b"%c" % byte for byte in range(256)), b""], eos_ids=[256])
HYPOTHESIS = settings(deadline=None, derandomize=True, max_examples=repetitions(2000, 100), database=None)


class Color(enum.Enum):
    RED = "red"
    DARK_RED = "dark red"
    CRIMSON = "red"  # noqa: PIE796                 # another name of RED


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 10


# ---- plain text

floats = st.floats(1e-99, 1e99) | st.floats(-1e99, -1e-99) | st.just(0.0)
SCALARS = [
    (bool, st.booleans(), str),
    (int, st.integers(1 - 10**18, 10**18 - 1), str),
    (float, floats, str),
    (str, st.text(), str),
    (None, st.none(), str),
    (dt.date, st.dates(), str),
    (dt.time, st.times(), dt.time.isoformat),
    (dt.datetime, st.datetimes(timezones=st.none() | st.just(dt.UTC)), dt.datetime.isoformat),
    (uuid.UUID, st.uuids(), str),
    (Color, st.sampled_from(Color), lambda color: color.value),
    (Level, st.sampled_from(Level), lambda level: str(int(level))),
    (Literal["a", 7, Color.RED], st.sampled_from(["a", 7, Color.RED]), lambda each: str(getattr(each, "value", each))),
]


def named(each):
    """Return the name of a type for a test id, the same in every process; strategies and functions get numbers."""
    return None if callable(getattr(each, "example", None)) or isinstance(each, types.FunctionType) else str(each)[:30]


@pytest.mark.parametrize("type_, values, write", SCALARS, ids=named)
def test_a_written_value_is_read_back(type_, values, write):
    language = Values(type(None) if type_ is None else type_)

    @HYPOTHESIS
    @given(values)
    def check(value):
        assert write(value) in language
        again = language.parse(write(value))
        assert again == value and type(again) is type(value)

    check()


@pytest.mark.parametrize("type_, alphabet, most", [
    (int, "-+012 ", 4), (float, "-+.e05", repetitions(5, 3)), (bool, "TFtrue", 3),
])  # fmt: skip
def test_other_texts_are_refused(type_, alphabet, most):
    def is_text(text):
        if type_ is bool:
            return text in ("True", "False")
        try:
            return type(value := json.loads(text)) in (int, type_) and (type_ is float or str(value) == text) \
                and text == text.strip() and (type_ is float or text != "-0")  # fmt: skip
        except ValueError:
            return False

    for length in range(most + 1):
        for text in map("".join, itertools.product(alphabet, repeat=length)):
            if len(text.rpartition("e")[2].strip("+-")) <= 2 or "e" not in text:            # two digits of exponent
                assert (text in Values(type_)) == is_text(text), text


def test_a_union_parses_by_the_first_type_that_fits():
    assert Values(str | int | None).parse("12") == 12 and Values(int | None | str).parse("None") is None
    assert Values(str | int).parse("012") == "012"
    assert Values(Literal["1"] | int).parse("1") == "1" and Values(int | Literal["1"]).parse("1") == 1
    assert Values(dt.date | None).parse("None") is None
    assert set(Values(Color | None).enumerate()) == {"red", "dark red", "None"}


def test_literals_of_another_order_are_no_restriction():
    Values(Annotated[Literal["a", "b"], AfterValidator(str.strip)])
    assert Values(Annotated[Literal["b", "a"], AfterValidator(str.title)]).parse("b") == "B"


def test_texts_that_a_validator_refuses_are_not_in_the_values():
    def refuse(text):
        raise ValueError("no")

    assert "a" in Values(Literal["a"])
    assert "a" not in Values(Annotated[Literal["a"], AfterValidator(refuse)])


def test_new_types_and_plain_annotations_mean_their_base_type():
    assert Values(NewType("Id", int)).equivalent(Values(int))
    assert Values(Annotated[Color, "of the car"]).parse("dark red") is Color.DARK_RED


BOUNDED = [
    (Annotated[int, Field(ge=-3, lt=12)], "-0123", 3),
    (Annotated[int, Field(gt=9)], "019", 3),
    (Annotated[float, Field(gt=0.5, le=2)], "-.0125", 5),
    (Annotated[float, Field(ge=-1, lt=0.02)], "-.012", 5),
    (Annotated[str, Field(min_length=1, max_length=2)], "ab\n", 4),
    (Annotated[str, Field(pattern="^a+b?$")], "ab\n", 5),
    (Annotated[str, Field(pattern="a.b", max_length=4)], "ab\n", 5),
]


@pytest.mark.parametrize("type_, alphabet, most", BOUNDED, ids=str)
def test_bounds_agree_with_pydantic(type_, alphabet, most):
    language, adapter = Values(type_), TypeAdapter(type_)
    base = Values(typing.get_args(type_)[0])
    found = 0
    for length in range(most + 1):
        for text in map("".join, itertools.product(alphabet, repeat=length)):
            try:
                value = adapter.validate_python(base.parse(text))
            except ValueError:
                assert text not in language, text
                continue
            if not text.startswith("-") or value:   # -0 is written by no int, and -0.0 in no range
                assert text in language and language.parse(text) == value, text
                found += 1
    assert found > 2


def test_values_supports_the_operations_of_languages():
    sentence = Values(Literal["red", "blue"]) + Regex(" ") + Values(bool)
    assert set(sentence.enumerate()) == {"red True", "red False", "blue True", "blue False"}
    assert repr(Values(int)) == "Values(int)" and repr(Values(Literal["a"])) == "Values(Literal['a'])"


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: Values(list[int]), TypeError, r"Values takes a type of scalars.* not list\[int\]: use JsonSchema"),
        (lambda: Values(Literal["1", 1]), ValueError, "'1' and 1 are both written '1'"),
        (lambda: Values(Literal[b"a"]), TypeError, "b'a' is not written in one way; a str or a number would work"),
        (lambda: Values(Annotated[int, Field(multiple_of=3)]), TypeError, "multipleOf, which plain text cannot"),
        (lambda: Values(Annotated[int | str, Field(ge=3)]), TypeError, "give bounds to each type of a Union"),
        (lambda: Values(Annotated[int, Field(gt=3, lt=4)]), ValueError, "no number of 0 decimals"),
        (lambda: Values(int).parse("x"), ValueError, r"'x' is not in Values\(int\), where '0' is"),
    ],
)
def test_a_type_without_a_language_of_values_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


# ---- where a constraint is taken


def test_types_and_lists_of_strings_are_constraints():
    vocab = tiny_vocab(6)
    words, short = {b"ab", b"c"}, [ids for n in range(4) for ids in itertools.product(range(5), repeat=n)]
    for constraint in (["ab", "c"], ("ab", "c"), Literal["ab", "c"], enum.Enum("E", {"x": "ab", "y": "c"})):
        index = index_of(constraint, vocab)
        spelled = {b"".join(vocab.tokens[id] for id in ids) for ids in short if ends(index, ids)}
        assert spelled == words
    expected = [str(match) for match in search(tiny_lm(6), "aab|ac", prefix="a")]
    for pattern in (["aab", "ac"], Literal["aab", "ac"]):
        assert [str(match) for match in search(tiny_lm(6), pattern, prefix="a")] == expected and len(expected) == 2
    posterior = importance_sampling(ConstrainedText(tiny_lm(6), "a", Literal["ab", "c"]), 20, seed=0)
    assert {str(particle.s) for particle in posterior} == {"ab", "c"}


@dataclasses.dataclass
class Toss:
    coin: Literal["H", "T"]
    won: bool


def test_a_query_takes_types_and_schemas_that_are_written_as_json():
    letters = '"{}:, HTcoinwtrueflasd'
    tokens = [*(letter.encode() for letter in sorted({*letters})), b""]
    lm = CachedTransformer(lambda ids: np.cos(np.arange(len(tokens)) + len(ids)), Vocabulary(tokens, [len(tokens) - 1]))
    texts = [json.dumps({"coin": coin, "won": won}, separators=(",", ":")) for coin in "HT" for won in (True, False)]
    for end in ("eos", "boundary"):
        by_hand = {str(match): match.log_prob for match in search(lm, texts, prefix="{", end=end)}
        matches = search(lm, JsonSchema(Toss, whitespace=False), prefix="{", end=end)
        found = {str(match): match.log_prob for match in matches}
        assert found == pytest.approx(by_hand) and len(found) == 4
    blanks = probability(lm, Toss, prefix="{", end="boundary", runs=0)
    assert blanks.lower > math.fsum(map(math.exp, found.values()))                  # more texts write the same


@pytest.mark.parametrize(
    "pattern, message",
    [
        (list[Any], "an object may have names that it does not list"),
        (dict[str, int], '"additionalProperties": false would work'),
        (JsonSchema({"enum": [[1, 1], [1]], "uniqueItems": True}), "'uniqueItems' is checked on the finished text"),
        (JsonSchema({"type": "array", "items": {"$ref": "#"}}), "it nests without end"),
    ],
)
def test_a_query_refuses_a_schema_without_an_automaton(pattern, message):
    with pytest.raises(ValueError, match=message):
        search(tiny_lm(6), pattern)


def ends(index, ids):
    state = index.start
    for id in ids:
        if not index.mask(state)[id]:
            return False
        state = index.advance(state, id)
    return index.accepts(state)


# ---- JSON


@dataclasses.dataclass
class Pet:
    name: Annotated[str, Field(max_length=5)]
    kind: Literal["cat", "dog"]
    age: int = 1


class Visit(BaseModel):
    id: uuid.UUID
    when: dt.datetime
    day: dt.date | None = None
    pets: list[Pet] = Field(max_length=2)


class Owner(TypedDict):
    name: Color
    at: typing.NotRequired[dt.time]


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    tail: bool


Animal = Annotated[Cat | Dog, Field(discriminator="kind")]
names = st.text(string.ascii_letters, max_size=5)
small = st.integers(-(10**6), 10**6)
pets = st.builds(Pet, name=names, kind=st.sampled_from(["cat", "dog"]), age=small)
whens = st.datetimes(timezones=st.none() | st.just(dt.UTC))
owners = st.fixed_dictionaries({"name": st.sampled_from(Color)}, optional={"at": st.times()})
owners = owners.map(lambda owner: dict(sorted(owner.items(), reverse=True)))      # members in their order
TYPED = [
    (Pet, pets),
    (Visit, st.builds(Visit, id=st.uuids(), when=whens, day=st.none() | st.dates(), pets=st.lists(pets, max_size=2))),
    (Owner, owners),
    (list[Owner], st.lists(owners, max_size=2)),
    (list[int], st.lists(small, max_size=3)),
    (dict[str, bool], st.dictionaries(names, st.booleans(), max_size=2)),
    (Pet | None, st.none() | pets),
    (Pet | int, pets | small),
    (tuple[Literal["a"], Color], st.tuples(st.just("a"), st.sampled_from(Color))),
    (list[Animal], st.lists(st.builds(Cat, lives=small) | st.builds(Dog, tail=st.booleans()), max_size=2)),
]


@pytest.mark.parametrize("type_, values", TYPED, ids=named)
def test_the_json_of_a_value_is_in_the_language_and_read_back(type_, values):
    schema = constraint_of(type_)
    assert type(schema) is JsonSchema
    index = schema.index(BYTES)
    adapter = TypeAdapter(Annotated[object, "any"])

    @settings(HYPOTHESIS, max_examples=repetitions(300, 20))
    @given(values)
    def check(value):
        text = adapter.dump_json(value, exclude_unset=False).decode()
        assert index.accepts(index.after(text)), text
        assert schema.parse(text) == (value if not isinstance(value, tuple) else tuple(value))

    check()


@pytest.mark.parametrize("type_", [Visit, Owner, list[Animal]], ids=str)
def test_every_text_that_the_masks_allow_is_read(type_):
    schema, rng = JsonSchema(type_), np.random.default_rng(0)
    index, longest = schema.index(BYTES), 400
    for _ in range(repetitions(300, 8)):
        state, text = index.start, b""
        while not index.accepts(state):
            allowed = [byte for byte in index.allowed(state) if chr(byte) in string.printable and byte != ord("\\")]
            ending = [byte for byte in allowed if chr(byte) in '"}],']
            allowed = ending if ending and (len(text) > longest or rng.random() < 0.3) else allowed
            byte = int(rng.choice(allowed))
            state, text = index.advance(state, byte), text + bytes([byte])
        assert schema.parse(text.decode()) is not None


def test_objects_have_only_the_members_of_their_type():
    for schema, text in [(Pet, '{"name":"a","kind":"cat","age":1,"b":1}'), (Owner, '{"name":"red","b":1}')]:
        with pytest.raises(ValueError, match="leaves the language"):
            JsonSchema(schema).index(BYTES).after(text)


def test_an_invalid_date_is_rejected_in_json():
    index = JsonSchema(list[dt.date]).index(BYTES)
    assert index.accepts(index.after('["2024-02-29"]'))
    with pytest.raises(ValueError, match="leaves the language"):
        index.after('["2023-02-29"]')


def test_a_schema_parses_as_json_does_and_pickles_with_its_type():
    assert JsonSchema({"type": "array"}).parse("[1, null]") == [1, None]
    assert pickle.loads(pickle.dumps(JsonSchema(Pet))).parse('{"name":"a","kind":"cat"}') == Pet("a", "cat")
    with pytest.raises(ValueError, match="kind"):
        JsonSchema(Pet).parse('{"name":"a","kind":"cow"}')


def test_an_annotation_that_is_a_list_is_ignored():
    assert JsonSchema(Annotated[list[int], ["not hashable"]]).parse("[1]") == [1]
    assert isinstance(constraint_of(Literal["a"]), DFA)
