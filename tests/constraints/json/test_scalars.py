"""Numbers between bounds and multiples of steps, against exact arithmetic and against readers of doubles."""

import itertools
import math
import re
from decimal import Decimal
from fractions import Fraction
from math import inf

import pytest
from helpers.common import BYTES, repetitions
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import to_json

from llmppl import JsonSchema
from llmppl.constraints.json.scalars import MAX_DIGITS, MAX_FRACTION
from llmppl.constraints.json.scalars import numbers as of_shape
from llmppl.constraints.json.shapes import Number

SHAPE = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")
EVERY = ["".join(chars) for size in range(6) for chars in itertools.product("-0159.eE+", repeat=size)]
SHORT = EVERY[:: repetitions(1, 7)]
VALUES = {text: Fraction(text) for text in SHORT if SHAPE.fullmatch(text)}

hundredths = st.integers(-1200, 1200).map(lambda n: Fraction(n, 100))
bounds = st.none() | hundredths | st.integers(-2000, 2000).map(Fraction)
STEPS = ["1", "7", "10", "12", "100", "0.5", "0.25", "0.3", "2.5", "0.01", "1e-9"]
steps = st.lists(st.tuples(st.sampled_from(STEPS).map(Fraction), st.booleans()), max_size=2).map(tuple)


def numbers(low=None, low_in=True, high=None, high_in=True, integer=False, several=()):
    ends = (-inf if low is None else low, not low_in), (inf if high is None else high, high_in)
    return of_shape(Number(*ends, integer, several))


def fits(value, low, low_in, high, high_in, multiples=()):
    above = low is None or low < value or (low_in and low == value)
    below = high is None or value < high or (high_in and high == value)
    return above and below and all(((value / step).denominator == 1) == is_in for step, is_in in multiples)


@settings(max_examples=repetitions(400, 30), deadline=None)
@given(bounds, st.booleans(), bounds, st.booleans(), st.booleans(), steps)
def test_short_texts_are_in_iff_their_value_fits(low, low_in, high, high_in, integer, several):
    found = numbers(low, low_in, high, high_in, integer, several)
    for text in SHORT:
        value = VALUES.get(text)
        if value is None:
            is_free = not integer and not several
            assert text not in found or (is_free and fits(Fraction(text), low, low_in, high, high_in))
        else:
            expected = fits(value, low, low_in, high, high_in, several) and not (integer and "." in text)
            assert (text in found) == expected, text


@pytest.mark.parametrize(
    "schema, inside, outside",
    [
        ({"low": 0, "high": "99.99"}, "99.9 99.90 99.99 99.990 0 -0 -0.0 0.00001", "99.991 100 -1 01 1. .5 1e1"),
        ({"low": "1e-9", "high": "2e-9"}, "0.000000001 0.0000000015 0.0000000020", "0.000000003 0"),
        ({"low": "1e20", "integer": True}, "100000000000000000000 900000000000000000000", "99999999999999999999 1.0"),
        ({"low": -(2**63), "high": 2**63 - 1},
         "9223372036854775807 -9223372036854775808 0.5 9223372036854774784.0",
         "9223372036854775808 9223372036854775807.0 9223372036854775806.5"),
        ({"low": "-1e-300"}, "0 1e-7 1e300 " + "-0." + "0" * 299 + "1", "-1e-299 -0." + "0" * 298 + "1"),
        ({"low": "-1.7976931348623157e308", "high": "-1e-17"}, "-0.5 -9 -1e-17 -1" + "0" * 300, "0 1 -1e-18"),
        ({"steps": "0.333"}, "0.333 0.9990 333 -3.330", "0.3 1 0.334"),
    ],
)
def test_usual_spellings_of_a_value_are_all_in(schema, inside, outside):
    low, high = (None if (bound := schema.get(key)) is None else Fraction(bound) for key in ("low", "high"))
    several = ((Fraction(schema["steps"]), True),) if "steps" in schema else ()
    found = numbers(low, True, high, True, schema.get("integer", False), several)
    assert [text for text in inside.split() if text not in found] == []
    assert [text for text in outside.split() if text in found] == []


@pytest.mark.parametrize("keyword", ["const", "enum"])
@pytest.mark.parametrize("zero", ["-0.0", "0.0", "0e0", "-0.00"])
def test_a_zero_with_a_fraction_is_every_zero(keyword, zero):
    index = JsonSchema(f'{{"{keyword}": {zero if keyword == "const" else f"[{zero}]"}}}').index(BYTES)
    assert all(index.accepts(index.after(text)) for text in ("0", "0.0", "-0.0"))
    with pytest.raises(ValueError, match="leaves the language"):
        index.after("0.1")


numerals = st.from_regex(r"-?(0|[1-9][0-9]{0,21})(\.[0-9]{1,18})?", fullmatch=True)
doubles = st.floats(-1e25, 1e25).filter(lambda value: not 0 < abs(value) < 1e-25).map(lambda x: Fraction(str(x)))
long_bounds = doubles | st.integers(-(2**70), 2**70).map(Fraction) | numerals.map(Fraction)


@settings(max_examples=repetitions(800, 30), deadline=None)
@given(long_bounds, st.booleans(), st.booleans(), st.integers(-3, 3), st.integers(0, 18), st.data())
def test_a_reader_of_doubles_finds_every_number_within_its_bounds(bound, included, is_low, near, digits, data):
    args = (bound, included, None, True) if is_low else (None, True, bound, included)
    found = numbers(*args)
    is_double = bound.denominator > 1 or Fraction(repr(float(bound))) == bound      # as it is written
    read = float(bound) if is_double else bound.numerator
    value = Fraction(data.draw(numerals)) if near == 3 else bound + Fraction(near, 10**digits)
    near_value = Decimal(value.numerator) / value.denominator
    shown = data.draw(st.sampled_from([f"{near_value:.{MAX_FRACTION}f}", f"{near_value:.17e}", str(round(value))]))
    if shown in found:
        assert fits(Fraction(shown), *args)
        assert "." not in shown or fits(float(shown), *(read if end is bound else end for end in args))


@pytest.mark.parametrize("sign", ["", "-"])
def test_a_bound_with_a_point_is_read_as_the_nearest_double(sign):
    bound = Fraction(f"{sign}100000000000001215.5")     # the nearest is ...1216, and the next one ...1232
    found = numbers(None, True, bound, False) if sign else numbers(bound, False)
    assert f"{sign}1.00000000000001216e+17" not in found
    assert f"{sign}1.00000000000001232e+17" in found


def written(value):
    """Return a double as Python, JavaScript (ECMA-262, Number::toString) and pydantic write it."""
    shown = Decimal(repr(value)).normalize()
    javascript = f"{shown:f}" if -7 < shown.adjusted() < 21 else f"{shown:e}"
    return {repr(value), javascript, to_json(value).decode()}


short = st.builds(lambda digits, power: float(f"{digits}e{power}"), st.integers(1, 99), st.integers(-30, 30))
positive = short | st.floats(5e-324, allow_infinity=False)
ends = st.none() | positive | positive.map(lambda value: -value)


@settings(max_examples=repetitions(400, 10), deadline=None)
@given(ends, st.booleans(), ends, st.booleans(), st.data())
def test_doubles_are_in_iff_they_are_between_the_bounds(low, low_in, high, high_in, data):
    bounds = [None if end is None else Fraction(repr(end)) for end in (low, high)]
    found = numbers(bounds[0], low_in, bounds[1], high_in)
    several = [value for value in (low, high, data.draw(ends), -data.draw(short)) if value is not None]
    for value in {math.nextafter(near, end) for near in several for end in (near, inf, -inf)} - {0, inf, -inf}:
        expected = fits(Fraction(repr(value)), bounds[0], low_in, bounds[1], high_in)
        assert {text: text in found for text in written(value)} == dict.fromkeys(written(value), expected)


def test_every_text_is_finite():
    free = numbers(None, True, None, True, False, ())
    for text in ("9" * MAX_DIGITS, "0." + "1" * MAX_FRACTION, "-1e99", "1.5E-07", "1e+3", "1.5e+307", "5e-324"):
        assert text in free
        assert float(text) not in (float("inf"), float("-inf"))
    for text in ("9" * (MAX_DIGITS + 1), "0." + "1" * (MAX_FRACTION + 1), "12e280", "2e308", "1e-324", "01", "+1"):
        assert text not in free
    assert free.is_finite()
    assert numbers(Fraction(0), True, None, True, False, ((Fraction(7), True),)).is_finite()


@pytest.mark.parametrize("step, message", [(9999999967, "remainders"), (10**6, "remainders"), (12345, "remainders")])
def test_steps_without_an_automaton_are_refused(step, message):
    with pytest.raises(ValueError, match=message):
        numbers(None, True, None, True, True, ((Fraction(step), True),))
