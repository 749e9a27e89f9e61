"""JSON numbers between bounds and multiples of steps, as automata.

The digits of a number are limited, so that no text is endless. A number has at most `MAX_FRACTION` digits after the
point, or one more than its bounds and steps need. A side without a bound has at most `MAX_DIGITS` digits before the
point, or one more than the other bound or a step has; a step with many remainders allows fewer. Only numbers without
bounds and steps have an exponent, of at most 279.

Readers may read a number with a point as a double. So an excluded bound, and a whole bound that is not a double, moves
inwards by less than the distance of two doubles. Integers have exact bounds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache, reduce

import numpy as np

from llmppl.constraints.automata.decimals import decimals_within
from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.regex import Regex
from llmppl.support.graphs import Numbering

__all__ = ["MAX_DIGITS", "MAX_FRACTION", "MAX_STATES", "numbers"]

MAX_DIGITS = 20                                     # before the point, without a bound
MAX_FRACTION = 18                                   # after the point, unless bounds or steps need more
MAX_STATES = 20_000                                 # remainders of a step, times the digits before the point
MAX_LISTED = 1_000                                  # multiples that are listed one by one
MAX_MINIMISED = 1_000                               # states of multiples
LARGEST = Fraction(sys.float_info.max)
_WHOLE = rf"-?(?:0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})"
_ANY = rf"{_WHOLE}(?:\.[0-9]{{1,{MAX_FRACTION}}})?(?:[eE][+-]?(?:[0-9]{{1,2}}|1[0-9]{{2}}|2[0-7][0-9]))?"
_ZEROS = rf"(?:\.0{{1,{MAX_FRACTION}}})?"
Bound = tuple[Fraction | None, bool]                # None for no bound; True if the bound itself is admitted


@lru_cache(256)
def numbers(
    low: Fraction | None = None,
    low_in: bool = True,
    high: Fraction | None = None,
    high_in: bool = True,
    integer: bool = False,
    steps: tuple[Fraction, ...] = (),
) -> DFA:
    """Return the JSON texts of the numbers from `low` to `high` that are multiples of every step.

    Every spelling without an exponent is a text, within the limits of digits. An integer has no point either.

    Parameters
    ----------
    low, high : Fraction, or None for no bound
    low_in, high_in : bool
        False excludes the bound itself.
    steps : tuple of Fractions above 0

    Returns
    -------
    DFA
        Its `start` is 0 if there are no such numbers.

    Raises
    ------
    ValueError
        A step is not above 0, or the multiples need an automaton that is too large.
    """
    if low is high is None and not steps:
        return Regex(_WHOLE if integer else _ANY)
    step = _common_multiple(steps, integer) if steps else None
    known = [each for each in (low, high, step) if each is not None]
    width = 1 + max(len(str(math.ceil(abs(each)))) for each in known)
    digits = 0 if integer else max(MAX_FRACTION, *(1 + _decimals(each) for each in known))
    bounds: list[Bound] = [(low, low_in), (None if high is None else -high, high_in)]       # both are lower ones
    safe = bounds if integer else [_inwards(*bound) for bound in bounds]
    if step is not None:
        least, most = _between(safe, digits, width)
        first, last = -(-least // (step * 10**digits)), most // (step * 10**digits)
        if step.denominator == 1 and None not in (low, high) and last - first < MAX_LISTED:
            return _listed([int(step) * n for n in range(first, last + 1)], integer).minimise()
    multiples = None if step is None else _multiples(step)
    limit = max(MAX_DIGITS, width)
    if multiples is not None:
        limit = min(limit, MAX_STATES // multiples.num_states)
        if limit < width:
            raise ValueError(f"the multiples of {step} are too many for an automaton of {MAX_STATES:,} states")
    found = decimals_within(*_between(safe, digits, limit), digits, minus_zero=True)
    if not integer and any(map(_is_long, bounds)):              # without a point, a number is read exactly
        exact = [bound if _is_long(bound) else inner for bound, inner in zip(bounds, safe, strict=True)]
        found |= decimals_within(*_between(exact, 0, limit), 0, minus_zero=True)
    if multiples is not None:
        found &= multiples
        return found.minimise() if found.num_states <= MAX_MINIMISED else found
    return found


def _between(bounds: list[Bound], digits: int, limit: int) -> tuple[int, int]:
    """Return the least and the greatest k such that k / 10**digits is between the bounds."""
    least, most = (
        1 - 10 ** (limit + digits) if bound is None
        else math.ceil(bound * 10**digits) if included else math.floor(bound * 10**digits) + 1
        for bound, included in bounds
    )  # fmt: skip
    return least, -most


def _double(bound: Fraction) -> float:
    return float(max(-LARGEST, min(bound, LARGEST)))


def _is_long(bound: Bound) -> bool:
    """Return whether the bound is a whole number that is not a double, but between two of them."""
    value = bound[0]
    return value is not None and value.denominator == 1 and abs(value) < LARGEST and _double(value) != value


def _inwards(bound: Fraction | None, included: bool) -> Bound:
    """Return a lower bound such that every number above it is a double within the bound after it is rounded."""
    if bound is None or abs(bound) > LARGEST:
        return (bound, included) if bound is None else (max(bound, -LARGEST), True)
    near = _double(bound)
    if near > bound if _is_long((bound, included)) else included or near >= LARGEST:
        return bound, included                      # the nearest double is within
    return (Fraction(near) + Fraction(math.nextafter(near, math.inf))) / 2, False


def _listed(multiples: list[int], integer: bool) -> DFA:
    words = DFA.from_strings([*map(str, multiples), *["-0"] * (0 in multiples)])
    return words if integer or not words.start else words + Regex(_ZEROS)


def _decimals(value: Fraction) -> int:
    """Return the number of digits after the point; an endless fraction has as many as its denominator has bits."""
    bits = value.denominator.bit_length()
    return next((n for n in range(bits) if 10**n % value.denominator == 0), bits)


def _common_multiple(steps: tuple[Fraction, ...], integer: bool) -> Fraction:
    """Return the step whose decimal multiples (whole ones, of integers) are those of all steps."""
    if min(steps) <= 0:
        raise ValueError(f"a number is a multiple of steps above 0, not of {min(steps)}")
    whole = math.lcm(*(step.numerator for step in steps))
    parts = reduce(math.gcd, [step.denominator for step in steps])
    return Fraction(whole, 1 if integer else math.gcd(parts, 10 ** parts.bit_length()))


@lru_cache(64)
def _multiples(step: Fraction) -> DFA:
    """Return the decimal texts of the multiples of a step, with an optional sign and any leading and trailing zeros.

    With m = step * 10**digits, digits x may be followed by n digits y if x * 10**n + y is a multiple of m. A state is
    (n, -x * 10**n mod m) after the point. Before it, a state is the first x with the same remainders for all n.
    """
    digits = _decimals(step)
    m = int(step * 10**digits)
    odd = m // math.gcd(m, 10 ** m.bit_length())    # without the factors 2 and 5
    powers = [10**n for n in range(digits, digits + m.bit_length()) if 10**n * odd % m]
    same: dict[tuple[int, ...], int] = {}

    def canonical(x: int) -> int:
        rests = [-x * power % m for power in powers]
        key = x % odd, *(rest if rest < power else -1 for rest, power in zip(rests, powers, strict=True))
        return same.setdefault(key, x % m)

    def after(state: tuple[int, int, bool]) -> Iterator[tuple[str, tuple[int, int, bool]]]:
        left, x, _ = state
        if left < 0:
            for digit in range(10):
                yield str(digit), (-1, canonical(10 * x + digit), True)
            if (rest := -x * 10**digits % m) < 10**digits:
                yield ".", (digits, rest, False)
        elif left == 0:
            yield "0", (0, 0, True)
        else:
            power = 10 ** (left - 1)
            yield from ((str(d), (left - 1, rest, True)) for d in range(10) if (rest := (x - d * power) % m) < power)

    states = Numbering[tuple[int, int, bool]]([(0, -1, False), (-1, 0, False)])         # 0 is dead
    edges = [(0, 0, 0)]
    for number, state in enumerate(states.keys_in_order):                   # grows
        if number:
            edges += [(number, ord(char), states[target]) for char, target in after(state)]
        if len(states) > MAX_STATES:
            raise ValueError(f"the multiples of {step} have more than {MAX_STATES:,} remainders")
    table, accepting = np.zeros((len(states), 256), np.int32), np.zeros(len(states), bool)
    source, byte, target = np.array(edges).T
    table[source, byte] = target
    table[1, ord("-")] = 1
    for number, (left, x, begun) in enumerate(states.keys_in_order):
        accepting[number] = begun and not (x if left >= 0 else x * 10**digits % m)
    return DFA.from_table(table, accepting, 1)
