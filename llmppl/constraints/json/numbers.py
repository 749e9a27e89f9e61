"""JSON numbers between bounds and multiples of steps, as automata; all bounds are exact.

The digits of a number are limited, so that no text is endless. A number has at most `MAX_FRACTION` digits after the
point, or as many as its bounds and steps need. A side without a bound has at most `MAX_DIGITS` digits before the point,
or one more than the other bound or a step has. Exponents are those that Python, JavaScript and pydantic write: of 16
and more, and of -5 and less. A number with steps has none.

Readers take a number with a point for a double. So an excluded bound moves inwards to the next double.
"""

from __future__ import annotations

import math
import sys
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

import numpy as np

from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.formats import numerals
from llmppl.constraints.automata.regex import Regex

__all__ = ["numbers", "spellings"]

MAX_DIGITS = 20                                     # before the point, without a bound; twice as many of an integer
MAX_FRACTION = 21                                   # after the point, unless bounds or steps need more
MAX_STATES = 4_000                                  # remainders of a step
LARGEST = Fraction(sys.float_info.max)
_WHOLE = rf"-?(?:0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})"
_INTEGER = rf"-?(?:0|[1-9][0-9]{{0,{2 * MAX_DIGITS - 1}}})"
_ANY = rf"{_WHOLE}(?:\.[0-9]{{1,{MAX_FRACTION}}})?(?:[eE][+-]?(?:[0-9]{{1,2}}|1[0-9]{{2}}|2[0-5][0-9]))?"
_MANTISSA = rf"[1-9](?:\.[0-9]{{1,{MAX_FRACTION}}})?e"
_HUGE, _TINY = r"\+?(?:1[6-9]|[2-9][0-9]|[12][0-9]{2}|30[0-7])", "-(?:0?[5-9]|[1-9][0-9]|[12][0-9]{2}|3[01][0-9])"


@lru_cache(128)
def numbers(
    low: Fraction | None = None,
    low_in: bool = True,
    high: Fraction | None = None,
    high_in: bool = True,
    integer: bool = False,
    steps: tuple[Fraction, ...] = (),
) -> DFA:
    """Return the JSON texts of the numbers from `low` to `high` that are multiples of every step; perhaps none.

    `low_in` and `high_in` include the bounds. Integers have neither a point nor an exponent. Raises ValueError if the
    multiples need an automaton that is too large.
    """
    if low is high is None and not steps:
        return Regex(_INTEGER if integer else f"{_ANY}|-?{_MANTISSA}(?:{_HUGE}|{_TINY})")
    known = [abs(each) for each in (low, high, *steps) if each is not None]
    width = max(MAX_DIGITS * (1 + integer), 1 + max(len(str(math.ceil(each))) for each in known))
    is_huge = any(bound is not None and abs(bound) > 10 ** (2 * MAX_DIGITS) for bound in (low, high))
    digits = 0 if integer or is_huge else max(MAX_FRACTION, *map(_decimals, known))

    def between(digits: int) -> tuple[Fraction, Fraction]:
        """Return the least and the greatest number with at most so many digits after the point."""
        least = Fraction(1 - 10**width) if low is None else _inwards(low, low_in, digits)
        return least, Fraction(10**width - 1) if high is None else -_inwards(-high, high_in, digits)

    least, most = between(digits)
    found = numerals(math.ceil(least * 10**digits), math.floor(most * 10**digits), digits)
    if digits and any(bound is not None and abs(bound) > 2**53 for bound in (low, high)):
        first, last = between(0)                    # without a point, a number is exact
        found = found | numerals(math.ceil(first), math.floor(last), 0)
    if least <= 0 <= most:
        found = found | Regex(rf"-0(?:\.0{{1,{digits}}})?" if digits else "-0")
    for step in steps:
        found = (found & _multiples(step)).minimise()
    if steps or integer:
        return found
    small = Fraction(1, 10**4)
    ends = {
        _MANTISSA + _HUGE: high is None and least <= 10**16,
        _MANTISSA + _TINY: (low is None or low <= 0) and most >= small,
        "-" + _MANTISSA + _HUGE: low is None and most >= -(10**16),
        "-" + _MANTISSA + _TINY: (high is None or high >= 0) and least <= -small,
    }
    some = [pattern for pattern, is_in in ends.items() if is_in]
    return (found | Regex("|".join(some))).minimise() if some else found


def _inwards(bound: Fraction, is_in: bool, digits: int) -> Fraction:
    """Return the least number from a lower bound on, with so many digits: the bound itself or a double above it."""
    after, is_double = bound, digits and abs(bound) <= LARGEST
    if is_in:
        if is_double and abs(bound) > 2**53 and (after := Fraction(float(bound))) < bound:
            after = Fraction(math.nextafter(float(bound), math.inf))
        return max(bound, after)
    if is_double:
        after = Fraction(Decimal(repr(math.nextafter(float(bound), math.inf))))
    least = Fraction(math.floor(bound * 10**digits) + 1, 10**digits)
    return max(least, Fraction(math.ceil(after * 10**digits), 10**digits))


def _decimals(value: Fraction) -> int:
    """Return the number of digits after the point."""
    return next(n for n in range(value.denominator.bit_length() + 1) if 10**n % value.denominator == 0)


@lru_cache(16)
def _multiples(step: Fraction) -> DFA:
    """Return the decimal texts of the multiples of a step, with an optional sign and any number of zeros.

    With m = step * 10**digits, a state is (n, x * 10**n mod m): the digits x are read, and n more may follow that are
    not 0. Before the point, n is `digits`.
    """
    digits = _decimals(step)
    m = int(step * 10**digits)
    size = m * (digits + 1)
    if size > MAX_STATES:
        raise ValueError(f"the multiples of {step} have more than {MAX_STATES:,} remainders")
    rest = np.arange(m)
    table = np.zeros((2 + 2 * size, 256), np.int32)     # 1 the start; before the point; after it, by the digits left
    whole, after = 2, 2 + m
    for digit in range(10):
        char = ord("0") + digit
        scaled = digit * pow(10, digits, m) % m
        table[1, char] = whole + scaled
        table[whole : whole + m, char] = whole + (rest * 10 + scaled) % m
        for left in range(1, digits + 1):
            begin = after + left * m
            table[begin : begin + m, char] = after + (left - 1) * m + (rest + digit * pow(10, left - 1, m)) % m
    table[after : after + m, ord("0")] = after + rest
    table[whole : whole + m, ord(".")] = after + digits * m + rest
    table[1, ord("-")] = 1
    accepting = np.zeros(len(table), bool)
    accepting[[whole, *(after + left * m for left in range(digits + 1))]] = True
    return DFA.from_table(table, accepting, 1)


def spellings(given: int | Decimal) -> set[str]:
    """Return the texts of a constant: a plain decimal, and those that Python, JavaScript and pydantic write."""
    found = {str(given).lower()}
    value = Decimal(given)
    if value == value.to_integral_value() and value.adjusted() < 40:
        found.add(str(int(value)))
    elif -20 < value.adjusted() < 40:
        found.add(format(value.normalize(), "f"))
    near = float(value)
    if not isinstance(given, Decimal) or math.isinf(near) or Decimal(repr(near)) != value:
        return found
    mantissa, _, exponent = repr(near).partition("e")
    if not exponent:
        return found | {mantissa}
    sign, number = exponent[0].strip("+"), exponent[1:].lstrip("0")
    return found | {f"{mantissa}e{exponent}", f"{mantissa}e{sign}{number}", f"{mantissa}e{exponent[0]}{number}"}
