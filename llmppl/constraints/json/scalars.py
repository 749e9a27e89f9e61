"""Numbers and strings of JSON as automata.

Bounds and steps of numbers are exact. The digits of a number are limited, so that no text is endless. It has at most
`MAX_FRACTION` digits after the point, or as many as its bounds and steps need. A side without a bound has at most
`MAX_DIGITS` digits before the point, or one more than the other bound or a step has. Exponents are those that Python,
JavaScript and pydantic write: of 16 and more, and of -5 and less. A number with steps has none.

Readers take a number with a point or exponent for a double. So an excluded bound moves inwards to the next double, and
an integer bound that no double writes to the nearest.

A string without a language may have any escapes. With a language, each text has one spelling, that of RFC 8785, which
pydantic, JavaScript and Python's `json.dumps(..., ensure_ascii=False)` write; so have names of properties.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache, reduce
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from llmppl.constraints.automata.budget import TooLarge
from llmppl.constraints.automata.dfa import DFA, anything
from llmppl.constraints.automata.formats import numerals
from llmppl.constraints.automata.nfa import ACCEPT, NFA
from llmppl.constraints.automata.regex import Regex
from llmppl.constraints.json.frames import DONE, Expansion, Frame, Key, Move
from llmppl.constraints.json.shapes import Choice, Constants, Number, Shape, String, language
from llmppl.constraints.masks.distances import bytes_to_accept

MAX_DIGITS = 21  # before the point, without a bound; twice as many of an integer
MAX_FRACTION = 22  # after the point, unless bounds or steps need more
MAX_REMAINDERS = 4_000  # remainders of a step
_WHOLE, _INTEGER = (
    rf"-?(?:0|[1-9][0-9]{{0,{digits - 1}}})" for digits in (MAX_DIGITS, 2 * MAX_DIGITS)
)
_ANY = rf"{_WHOLE}(?:\.[0-9]{{1,{MAX_FRACTION}}})?(?:[eE][+-]?(?:[0-9]{{1,2}}|1[0-9]{{2}}|2[0-5][0-9]))?"
TOP = Fraction(repr(sys.float_info.max))
# spans of numbers with an exponent: without bounds those that _ANY lacks, and with bounds
SPANS = [
    ((Fraction("5e-324"), Fraction(f"9.{'9' * MAX_FRACTION}e-{low}")), (Fraction(10**high), TOP))
    for low, high in ((260, 260), (5, 16))
]


@lru_cache(128)
def numbers(shape: Number) -> DFA:
    """Return the JSON texts of the numbers of a shape; perhaps none. Integers have neither a point nor an exponent.

    Raises ValueError if the multiples need an automaton that is too large.
    """
    low, low_out = shape.low
    high, high_in = shape.high
    known = [
        abs(Fraction(each))
        for each in (low, high, *map(itemgetter(0), shape.steps))
        if abs(each) != math.inf
    ]

    def between(digits: int, most: Fraction) -> tuple[Fraction, Fraction]:
        """Return the least and the greatest number with at most so many digits after the point."""
        return (
            -most if low == -math.inf else max(-most, _inwards(Fraction(low), not low_out, digits)),
            most if high == math.inf else min(most, -_inwards(-Fraction(high), high_in, digits)),
        )

    found: DFA
    if known:
        largest = Fraction(
            10 ** max(MAX_DIGITS * (1 + shape.integer), 1 + len(str(math.ceil(max(known))))) - 1
        )
        digits = 0 if shape.integer else max(MAX_FRACTION, *map(num_decimals, known))
        least, most = between(digits, min(largest, TOP) if digits else largest)
        found = numerals(
            math.ceil(least * 10**digits), math.floor(most * 10**digits), digits, zero=True
        )
        first, last = between(0, largest)  # without a point, a number is exact
        if (whole := (math.ceil(first), math.floor(last))) != (math.ceil(least), math.floor(most)):
            found = found.united_with(numerals(*whole, 0))
    else:
        found = Regex(_INTEGER if shape.integer else _ANY)
    for step, is_in in shape.steps:
        keep = DFA.intersected_with if is_in else DFA.without
        found = keep(found, _multiples(step)).minimise()
    if shape.steps or shape.integer:
        return found
    least, most = between(MAX_FRACTION + 324, TOP)
    return found.united_with(
        _powers(
            tuple(
                (sign, max(low, first), min(high, last))
                for first, last in SPANS[known != []]
                for sign, low, high in ((1, least, most), (-1, -most, -least))
                if low <= last and first <= high
            )
        )
    )


@lru_cache(64)
def _powers(parts: tuple[tuple[int, Fraction, Fraction], ...]) -> DFA:
    """Return the numbers sign * m * 10**e, 1 <= m < 10, with an absolute value between two bounds, for each part.

    The digits of m are cut at those of both bounds. Between two cuts, all m have the same exponents.
    """
    nfa = NFA()
    ways = []
    unit = 10**MAX_FRACTION
    for (low, high), some in itertools.groupby(parts, itemgetter(1, 2)):
        signs = DFA.from_strings(["-" if sign < 0 else "" for sign, _, _ in some])
        first, last = (len(str(math.floor(end * 10**324))) - 325 for end in (low, high))
        least = math.ceil(low * Fraction(10) ** (MAX_FRACTION - first))
        most = math.floor(high * Fraction(10) ** (MAX_FRACTION - last))
        for m, after in itertools.pairwise(sorted({unit, least, most + 1, 10 * unit})):
            powers = range(first + (m < least), last + (m <= most))
            texts = DFA.from_strings([*map("e{}".format, powers), *map("e{:+03d}".format, powers)])
            digits = nfa.include(numerals(m, after - 1, MAX_FRACTION), nfa.include(texts, ACCEPT))
            ways.append(nfa.include(signs, digits))
    nfa.start = nfa.split(ways)
    return DFA(nfa).minimise()


def _inwards(bound: Fraction, is_in: bool, digits: int) -> Fraction:
    """Return the least number from a lower bound on, with so many digits: the bound itself or a double above it."""
    if digits and -TOP <= bound < TOP:
        near = float(bound)
        after = math.nextafter(near, math.inf)
        if bound.denominator == 1 and Fraction(repr(near)) != bound:
            return Fraction(near if near > bound or (is_in and near == bound) else after)
        if not is_in:
            return Fraction(repr(after))
    return bound if is_in else Fraction(math.floor(bound * 10**digits) + 1, 10**digits)


def num_decimals(value: Fraction) -> int:
    """Return the number of digits after the point."""
    return next(
        n for n in range(value.denominator.bit_length() + 1) if 10**n % value.denominator == 0
    )


@lru_cache(16)
def _multiples(step: Fraction) -> DFA:
    """Return the decimal texts of the multiples of a step, with an optional sign and any number of zeros.

    With m = step * 10**digits, a state is (n, x * 10**n mod m): the digits x are read, and n more may follow that are
    not 0. Before the point, n is `digits`.
    """
    digits = num_decimals(step)
    m = int(step * 10**digits)
    size = m * (digits + 1)
    if size > MAX_REMAINDERS:
        raise ValueError(f"the multiples of {step} have more than {MAX_REMAINDERS:,} remainders")
    rest = np.arange(m)
    table = np.zeros(
        (2 + 2 * size, 256), np.int32
    )  # 1 the start; before the point; after it, by the digits left
    whole = 2
    after = 2 + m
    for digit in range(10):
        char = ord("0") + digit
        scaled = digit * pow(10, digits, m) % m
        table[1, char] = whole + scaled
        table[whole : whole + m, char] = whole + (rest * 10 + scaled) % m
        for left in range(1, digits + 1):
            begin = after + left * m
            table[begin : begin + m, char] = (
                after + (left - 1) * m + (rest + digit * pow(10, left - 1, m)) % m
            )
    table[after : after + m, ord("0")] = after + rest
    table[whole : whole + m, ord(".")] = after + digits * m + rest
    table[1, ord("-")] = 1
    accepting = np.zeros(len(table), bool)
    accepting[[whole, *(after + left * m for left in range(digits + 1))]] = True
    return DFA.from_table(table, accepting, 1)


def spellings(given: Any) -> set[str]:
    """Return the texts of a constant; of a number, a plain decimal, and those that common writers choose."""
    if given is None or isinstance(given, bool | str):
        return {json.dumps(given, ensure_ascii=False)}
    found = {str(given).lower()}
    value = Decimal(given)
    if isinstance(given, Decimal) and not given:  # of both signs
        return found | {"0", "0.0", "-0.0"}
    if value == value.to_integral_value() and value.adjusted() < 40:
        found.add(str(int(value)))
    elif -20 < value.adjusted() < 40:
        found.add(format(value.normalize(), "f"))
    near = float(value)
    if not isinstance(given, Decimal) or math.isinf(near) or Decimal(repr(near)) != value:
        return found
    mantissa, _, power = repr(near).partition("e")
    return found | (
        {f"{mantissa}e{int(power):{form}}" for form in ("d", "+d", "+03d")} if power else {mantissa}
    )


# ---- strings

T = TypeVar("T")
MAX_STATES = 20_000  # of a language that is explored
MAX_BOUND = 1_000  # of the length of a string with a language
_PAIR = r"[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # of surrogates
ESCAPE = rf'["\\/bfnrt]|u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{{3}}|[dD][0-7][0-9a-fA-F]{{2}}|{_PAIR})'
_ESCAPES = Regex(ESCAPE).explore()
SPELLED = {byte: json.dumps(chr(byte))[2:-1] for byte in (*range(32), 34, 92)}  # after a backslash
ESCAPED = tuple(SPELLED)


def escapes(read: str, after: Callable[[int], T | None]) -> Iterator[tuple[int, str | T]]:
    """Yield the bytes that may follow a backslash and `read`, each with a longer `read`, or with `after(byte)`."""
    found = {}
    for byte, code in SPELLED.items():
        if code.startswith(read) and (target := after(byte)) is not None:
            longer = code[: len(read) + 1]
            found[longer] = target if longer == code else longer
    yield from ((ord(longer[-1]), to) for longer, to in found.items())


@lru_cache(1_000)
def bytes_left(dfa: DFA) -> npt.NDArray[np.float64]:
    """Return bounds of the bytes from each state of a text to its end; some texts need an escape of 12 bytes."""
    escaped = dfa.explore(MAX_STATES).table
    plain = escaped.copy()
    plain[:, ESCAPED] = 0
    return np.minimum(
        bytes_to_accept(plain, dfa.accepting), 12 * bytes_to_accept(escaped, dfa.accepting)
    )


def cut(lo: int, hi: int, at: tuple[int, ...] = ESCAPED) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range of bytes without some bytes (ascending)."""
    for byte in at:
        if lo <= byte <= hi:
            if lo < byte:
                yield lo, byte - 1
            lo = byte + 1
    if lo <= hi:
        yield lo, hi


@lru_cache(1_000)
def _content(shape: String) -> DFA:
    """Return the texts of the strings of a shape. Raises ValueError if the automaton is too large."""
    dfas = [
        language(*each[:2]) if each[2] else language(*each[:2]).complement()
        for each in shape.languages
    ]
    if shape.least or shape.most < math.inf:
        last = "" if shape.most == math.inf else str(int(shape.most))
        if max(shape.least, int(last or 0)) > MAX_BOUND:
            raise TooLarge(
                "a string with a pattern or format", f"a bound of its length above {MAX_BOUND:,}"
            )
        dfas.append(Regex(f"(?s:.{{{shape.least},{last}}})"))
    if len(dfas) > 1:
        for dfa in dfas:
            dfa.explore(MAX_STATES)
    return reduce(DFA.intersected_with, dfas) if dfas else anything()


def texts_of(shape: Shape) -> DFA:
    """Return the texts of the strings of a shape, with their bounds."""
    match shape:
        case Choice():
            return reduce(DFA.united_with, map(texts_of, shape.options), DFA.from_strings([]))
        case Constants():
            return DFA.from_strings([value for value in shape.values if isinstance(value, str)])
        case String():
            return _content(shape)
    return DFA.from_strings([])


@lru_cache(1_000)
def quoted(shape: String) -> Quoted | None:
    """Return the frame of a string; None if there is no text. Raises ValueError if its automaton is too large."""
    dfa = _content(shape).explore(MAX_STATES) if shape.languages else None
    if (dfa is not None and not dfa.start) or shape.least > shape.most:
        return None
    return Quoted(dfa, shape.least, shape.most)


class Quoted(Frame):
    """Strings of a language, or all strings of `least` to `most` characters.

    A key (state, need, room) has the state of the language, the characters that are still needed, and those that are
    still possible; a language counts its characters itself.
    """

    def __init__(self, dfa: DFA | None, least: int, most: float) -> None:
        super().__init__()
        self._is_free = dfa is None
        self._dfa = dfa or anything()
        self._begin = self._dfa.start, least, most
        if dfa is not None:
            self._begin = self._dfa.start, 0, math.inf

    def _after_character(self, key: Key, state: int) -> Key | None:
        """Return the key after one character that leads to a state; None if it does not fit."""
        _, need, room = key
        if not state or room < 1:
            return None
        return state, max(0, need - 1), room - 1

    def expand(self, key: Key) -> Expansion:
        if key == "open":
            return Expansion([(34, 34, self._begin)])
        if key == "end":
            return DONE
        if key[0] == "free":
            return Expansion(self._in_any_escape(*key[1:]))
        if key[0] == "escape":
            return Expansion(self._in_an_escape(*key[1:]))
        return Expansion(self._inside(key))

    def _in_any_escape(self, at: int, after: Key) -> list[Move]:
        moves = list[Move]()
        for lo, hi, to in _ESCAPES.moves(at):
            if _ESCAPES.accepts(to):
                moves.append((lo, hi, after))
            else:
                moves.append((lo, hi, ("free", to, after)))
        return moves

    def _in_an_escape(self, read: str, key: Key) -> list[Move]:
        """Return the moves after a backslash and `read`, a part of the one spelling of a character."""

        def after(byte: int) -> Key | None:
            return self._after_character(key, self._dfa.after(key[0], bytes([byte])))

        moves = list[Move]()
        for byte, to in escapes(read, after):
            if isinstance(to, str):
                to = "escape", to, key
            moves.append((byte, byte, to))
        return moves

    def num_plain(self, key: Key) -> float | None:
        if not self._is_free:
            return None
        state, *_, room = key
        return room if state == self._dfa.start else 0

    def _inside(self, key: Key) -> list[Move]:
        state, need, room = key
        moves = []
        can_escape = False
        for lo, hi, to in self._dfa.moves(state):
            after: Key | None = (to, need, room)
            is_first = not 0x80 <= lo < 0xC0  # byte of a character
            if is_first:
                after = self._after_character(key, to)
            if after:
                moves += [(first, last, after) for first, last in cut(lo, hi)]
                can_escape |= any(lo <= byte <= hi for byte in ESCAPED)
        if can_escape and self._is_free:
            moves.append((92, 92, ("free", _ESCAPES.start, self._after_character(key, state))))
        elif can_escape:
            moves.append((92, 92, ("escape", "", key)))
        if not need and self._dfa.accepts(state):
            moves.append((34, 34, "end"))
        return moves

    def closing(self, key: Key) -> Expansion:
        if not isinstance(key[0], int):
            return super().closing(key)
        found = self.expand(key)
        ends = [move for move in found.moves if move[2] == "end"]
        moves = [move for move in found.moves if isinstance(move[2][0], int)]
        if ends or self._is_free:
            return Expansion(ends or moves)
        left = bytes_left(self._dfa)
        nearer = [move for move in moves if left[move[2][0]] < left[key[0]]]
        if nearer:
            return Expansion(nearer)
        return found
