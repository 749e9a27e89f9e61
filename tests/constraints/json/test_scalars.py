"""Numbers of JSON schemas: exact beyond 2**53, in the spellings that readers write."""

import json
from fractions import Fraction

import pytest

from llmppl import JsonSchema
from llmppl.constraints.masks.explain import BYTES

INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}


def admits(constraint, text):
    index = constraint.index(BYTES)
    try:
        if not index.accepts(index.after(text)):
            return False
        constraint.parse(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    "schema, inside, outside",
    [
        ({"enum": [9007199254740993]}, "9007199254740993", "9007199254740992 9007199254740994"),
        ({"const": 123456789012345678}, "123456789012345678", "123456789012345680"),
        ({"type": "integer", "minimum": 9007199254740993}, "9007199254740993 9007199254740994", "9007199254740992"),
        ({"const": -(2**63)}, "-9223372036854775808", "-9223372036854775807"),
        (INT64, "-9223372036854775808 0 9223372036854775807", "-9223372036854775809 9223372036854775808"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0.5 0.1 0.01", "0 0.0 0.00 0.51"),
        ({"type": "number", "exclusiveMinimum": 3, "exclusiveMaximum": 3.5}, "3.1 3.4", "3 3.0 3.5"),
        ({"enum": [1e-7, 1e22]}, "1e-07 1e-7 0.0000001 1e+22 1e22", "1 0.000001"),
        ({"const": 1.0}, "1 1.0", "1.5"),
        ({"const": 1}, "1", "2"),
        ({"type": "array", "items": {"enum": [-(2**63), 1]}, "uniqueItems": True}, "[-9223372036854775808,1]", "[1,1]"),
        (                                               # without an automaton
            {"type": "object", "patternProperties": {"^a": {"enum": [9007199254740993]}}},
            '{"a":9007199254740993}', '{"a":9007199254740992}',
        ),
    ],
)  # fmt: skip
def test_numbers_are_compared_as_they_are_written(schema, inside, outside):
    constraint = JsonSchema(schema)
    assert [text for text in inside.split() if not admits(constraint, text)] == []
    assert [text for text in outside.split() if admits(constraint, text)] == []


@pytest.mark.parametrize("low, high", [(0, 0.5), (-1, 0), (2, 2.25), (0.25, 0.75), (-0.5, 3), (10, 10.05)])
@pytest.mark.parametrize("low_in", [True, False])
@pytest.mark.parametrize("high_in", [True, False])
def test_no_number_out_of_bounds_is_admitted(low, high, low_in, high_in):
    least, most = "minimum" if low_in else "exclusiveMinimum", "maximum" if high_in else "exclusiveMaximum"
    index = JsonSchema({"type": "number", least: low, most: high}).index(BYTES)

    def admits(text):
        state = index.start
        for byte in text.encode():
            if byte not in index.next_bytes(state):
                return False
            state = index.advance(state, byte)
        return index.accepts(state)

    for n in range(-2000, 2000):
        text = f"{n / 100:.2f}"
        value = Fraction(text)
        inside = (low < value or (low_in and low == value)) and (value < high or (high_in and value == high))
        assert inside or not (admits(text) or admits(text.rstrip("0").rstrip("."))), text


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"name": "f", "parameters": {"type": "object"}}, "# has no keyword.*are 'name', 'parameters' properties"),
        ({"$defs": {"A": {"type": "object"}}}, "# has no keyword"),
        ({"type": "object", "properties": {"p": {"name": {"type": "string"}}}}, "#/properties/p has no keyword"),
        ({"type": "integer", "min": 1}, "'min' is no keyword: did you mean 'minimum'"),
        ({"properties": {"x": {"type": "integer", "required": True}}}, "#/properties/x, 'required': true should be a list"),
    ],
)
def test_a_schema_that_would_admit_any_json_is_refused(schema, message):
    with pytest.raises(ValueError, match=message):
        JsonSchema(schema)
    assert json.loads(repr(JsonSchema(schema, lenient=True)).split("(", 1)[1].split(", lenient")[0]) == schema
