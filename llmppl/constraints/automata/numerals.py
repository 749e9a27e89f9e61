"""Patterns of decimal numbers between two bounds, as Python regexes.

All patterns compare digit by digit, from the left: a first digit above that of the lower bound and below that of the
upper bound leaves the other digits free. `Magnitude` patterns have no sign; `signed` adds the sign to any of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

__all__ = ["digits_between", "either", "naturals", "signed"]

ZEROS, NINES = (str.maketrans("0123456789", 10 * digit) for digit in "09")
Magnitude = Callable[[float, float, bool, bool], str]               # low, high, and whether each is included


def either(patterns: Iterable[str]) -> str:
    """Return the pattern of the texts that match one of `patterns`; a single one has no | outside groups."""
    found = list(patterns)
    return f"(?:{'|'.join(found)})" if len(found) > 1 else found[0]


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
