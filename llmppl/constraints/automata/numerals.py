"""Patterns of decimal numbers between two bounds, as Python regexes.

All patterns compare digit by digit, from the left: a first digit above that of the lower bound and below that of the
upper bound leaves the other digits free. `Magnitude` patterns have no sign; `signed` adds the sign to any of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from decimal import Decimal

__all__ = ["decimals_between", "digits_between", "either", "naturals", "plain", "signed"]

ZEROS, NINES = (str.maketrans("0123456789", 10 * digit) for digit in "09")
Magnitude = Callable[[float, float, bool, bool], str]               # low, high, and whether each is included


def either(patterns: Iterable[str]) -> str:
    """Return the pattern of the texts that match one of `patterns`; a single one has no | outside groups."""
    found = list(patterns)
    return f"(?:{'|'.join(found)})" if len(found) > 1 else found[0]


def plain(value: float) -> str:
    """Return a number as text without exponent and without trailing zeros after the point."""
    text = format(Decimal(repr(value)), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def signed(low: float, high: float, low_in: bool, high_in: bool, magnitude: Magnitude) -> str:
    """Return the pattern of the numbers from `low` to `high`, which may be infinite; for `Regex`, without a group."""
    choices = []
    if low < 0:
        choices.append("-" + magnitude(max(0, -high), -low, high < 0 and high_in, low_in))
    if high > 0 or (high == 0 and high_in):
        choices.append(magnitude(max(0, low), high, low < 0 or low_in, high_in))
    return "|".join(choices)


def digits_between(first: int, last: int, decimals: int = 0) -> list[str]:
    """Return a pattern for each length of the numbers from `first` to `last`.

    With `decimals`, the numbers are first / 10**decimals to last / 10**decimals, with as many digits after the point.
    """
    found, shortest = list[str](), decimals + 1
    for length in range(shortest, max(len(str(last)), shortest) + 1):
        least = 10 ** (length - 1) if length > shortest else 0
        low, high = max(first, least), min(last, 10**length - 1)
        if low <= high:
            found.append(_same_length(*(_pointed(number, length, decimals) for number in (low, high))))
    return found


def _pointed(number: int, length: int, decimals: int) -> str:
    digits = str(number).zfill(length)
    return f"{digits[:-decimals]}.{digits[-decimals:]}" if decimals else digits


def _same_length(low: str, high: str) -> str:
    """Return the pattern of the numerals from `low` to `high`, which have the same length and point."""
    zeros, nines = low.translate(ZEROS), low.translate(NINES)
    if low == zeros and high == nines:
        return r"\.".join(f"[0-9]{{{len(run)}}}" * bool(run) for run in low.split("."))
    if low[0] == high[0]:
        return re.escape(low[0]) + _same_length(low[1:], high[1:])
    choices = [low[0] + _same_length(low[1:], nines[1:]), high[0] + _same_length(zeros[1:], high[1:])]
    if int(low[0]) + 1 < int(high[0]):
        choices.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}]" + _same_length(zeros[1:], nines[1:]))
    return either(choices)


def naturals(low: int, high: float = math.inf) -> str:
    """Return the pattern of the whole numbers from `low` to `high`, 0 <= low <= high."""
    if high < math.inf:
        return either(digits_between(low, int(high)))
    digits = len(str(low))
    return either([*digits_between(low, 10**digits - 1), f"[1-9][0-9]{{{digits},}}"])


def decimals_between(low: float, high: float, low_in: bool, high_in: bool) -> str:
    """Return the pattern of numbers from `low` >= 0 to `high`, with any number of digits after the point.

    As in llguidance, a number that equals `high` has no trailing zeros, and digits after the point that are below
    those of `high` are as many as the lower bound has.
    """
    if high == math.inf:
        digits = len(str(int(low)))
        below = decimals_between(low, 10.0**digits, low_in, False)
        return either([below, rf"[1-9][0-9]{{{digits},}}(?:\.[0-9]+)?"])
    if low == high:
        return re.escape(plain(low))
    (first, _, after), (last, _, before) = plain(low).partition("."), plain(high).partition(".")
    least, most, found = int(first), int(last), list[str]()
    if least == most:
        fraction = rf"\.{_fraction(after, before, low_in, high_in)}"
        return f"{least}{fraction}" if after else f"{least}(?:{fraction})?"
    if after or not low_in:
        found.append(rf"{least}\.{_fraction(after, None, low_in, True)}")
        least += 1
    if most > least:
        found.append(rf"{naturals(least, most - 1)}(?:\.[0-9]+)?")
    if before:
        found.append(rf"{most}(?:\.{_fraction(None, before, True, high_in)})?")
    elif high_in:
        found.append(rf"{most}(?:\.0+)?")
    return either(found)


def _fraction(low: str | None, high: str | None, low_in: bool, high_in: bool) -> str:
    """Return the pattern of the digits after the point, from `low` to `high`; None stands for no bound.

    `low` may be "", which has zeros only, but `high` may not, unless `high_in`.
    """
    if low is high is None:
        return "[0-9]*"
    if high is None and not low:
        return "[0-9]*" if low_in else "[0-9]*[1-9]"
    if low is None and not high:
        return ""
    first, low_rest = (0, None) if low is None else (int(low[:1] or 0), low[1:])
    last, high_rest = (9, None) if high is None else (int(high[0]), high[1:])
    if low is not None and high is not None and first == last:
        return f"{first}{_fraction(low_rest, high_rest, low_in, high_in)}"
    choices = []
    if low is not None:
        choices.append(f"{first}{_fraction(low_rest, None, low_in, True)}")
        first += 1
    if high is not None and (high_rest or high_in):
        choices.append(f"{last}{_fraction(None, high_rest, True, high_in)}")
    last -= high is not None
    if first <= last:
        choices.append(f"[{first}-{last}][0-9]*")
    return either(choices)
