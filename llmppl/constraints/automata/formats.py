"""Ready-made languages: addresses, dates, identifiers and numbers, each the texts that its validator accepts.

`iso_date()`, `iso_time()`, `iso_datetime()`, `uuid()` and `ipv4()` hold the texts of that form that Python's own
classes read. `email()`, `url()` and `phone()` hold the plain core of RFC 5322, RFC 3986 and E.164 that all programs
accept.
"""

from __future__ import annotations

import math
from datetime import date, datetime
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from llmppl.constraints.automata.decimals import decimals_within
from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.regex import Regex
from llmppl.support import arguments
from llmppl.support.graphs import Numbering

__all__ = [
    "FORMATS", "date_range", "datetime_range", "email", "ipv4", "iso_date", "iso_datetime", "iso_time",
    "number_range", "phone", "url", "uuid",
]  # fmt: skip

Bound = float | Fraction
Rest = str | None
DIGITS = 18                                         # of the integer part of a number without a bound
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"       # not 0000
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"       # two digits, a multiple of 4 above 0
DAY = (                                            # in a common year
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
DATE = f"(?:{_YEAR}-{DAY}|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
TIME = rf"{MINUTE}(?::[0-5][0-9](?:\.[0-9]{{1,6}})?)?"
DATETIME = f"{DATE}T{TIME}(?:Z|[+-]{MINUTE})?"
UUID = "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"


def _label(first: str = "A-Za-z0-9", inner: str = "{0,61}") -> str:
    """Return the pattern of a label of a host name: `inner` counts the characters between the first and the last."""
    return f"[{first}](?:[A-Za-z0-9-]{inner}[A-Za-z0-9])?"


_DOMAIN = rf"(?:{_label()}\.)+{_label('A-Za-z')}"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LOCAL_PART = rf"{_ATOM}(?:\.{_ATOM})*"
_PORT = "(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_PATH = "(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})"
_QUERY = "(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})"

# By JSON Schema's names, the texts that Python's classes read; `json_formats` has those of RFC 3339 and others.
FORMATS = {"date": DATE, "time": TIME, "date-time": DATETIME, "uuid": UUID, "ipv4": IPV4}


@lru_cache(1)
def iso_date() -> DFA:
    """Return the dates such as 2024-02-29, in the years 0001 to 9999, with leap years."""
    return Regex(DATE)


@lru_cache(1)
def iso_time() -> DFA:
    """Return the times of day such as 23:59, 23:59:59 and 23:59:59.5, with at most six digits of a second."""
    return Regex(TIME)


@lru_cache(1)
def iso_datetime() -> DFA:
    """Return a date, T and a time, with Z, an offset such as +02:00, or neither."""
    return Regex(DATETIME)


@lru_cache(64)
def date_range(
    low: date | None = None, high: date | None = None, low_in: bool = True, high_in: bool = True
) -> DFA:
    """Return the dates of `iso_date` from `low` to `high`; None stands for no bound, False excludes the bound."""
    first, last = (None if bound is None else bound.isoformat() for bound in (low, high))
    return _in_order(iso_date(), first, last, low_in, high_in)


@lru_cache(64)
def datetime_range(
    low: datetime | None = None, high: datetime | None = None, low_in: bool = True, high_in: bool = True
) -> DFA:
    """Return the date-times without a zone from `low` to `high`, as `date_range` does.

    Raises ValueError if a bound has a zone.
    """
    if any(bound and bound.tzinfo for bound in (low, high)):
        raise ValueError("bounds of date-times have no zone here; bound.replace(tzinfo=None) has none")
    first = None if low is None else _spelled(low, longest=not low_in)
    last = None if high is None else _spelled(high, longest=high_in)
    return _in_order(Regex(f"{DATE}T{TIME}"), first, last, low_in, high_in)


def _spelled(moment: datetime, longest: bool) -> str:
    """Return the longest or the shortest spelling; all others lie between the two in the order of text."""
    text = moment.isoformat(timespec="microseconds")
    return text if longest else text.rstrip("0").rstrip(".").removesuffix(":00")


def _in_order(language: DFA, low: str | None, high: str | None, low_in: bool, high_in: bool) -> DFA:
    """Return the texts of an ASCII language that are between two texts in the order of text.

    A state has the rest of each bound, or None once the bytes that are read decide the comparison.
    """
    rows, states = language.edges(), Numbering[tuple[int, Rest, Rest]]([(0, None, None), (language.start, low, high)])
    edges, accepting = [(0, 0, 0)], list[bool]()
    for number, (state, above, below) in enumerate(states.keys_in_order):                   # grows
        inside = (above is None or (low_in and not above)) and (below is None or high_in or bool(below))
        accepting.append(inside and language.accepts(state))
        for byte, to in ((chr(byte), to) for lo, hi, to in rows[state] for byte in range(lo, hi + 1)):
            rests = _advance(above, byte, is_low=True), _advance(below, byte, is_low=False)
            if False not in rests:
                edges.append((number, ord(byte), states[to, *rests]))
    table = np.zeros((len(states), 256), np.int32)
    source, column, target = np.array(edges).T
    table[source, column] = target
    return DFA.from_table(table, np.array(accepting), 1).minimise()


def _advance(rest: Rest, byte: str, is_low: bool) -> Any:
    """Return the rest of a bound after one more byte, None if all longer texts are within, or False if none are."""
    if rest is None or byte == rest[:1]:
        return rest and rest[1:]
    return None if (byte > rest[:1]) == is_low else False


@lru_cache(1)
def uuid() -> DFA:
    """Return UUIDs of any version, with hyphens, in capitals or small letters."""
    return Regex(UUID)


@lru_cache(1)
def ipv4() -> DFA:
    """Return addresses such as 192.168.0.1, without leading zeros."""
    return Regex(IPV4)


@lru_cache(1)
def email() -> DFA:
    """Return a local part of at most 64 characters without quotes, @, and a domain of two labels or more."""
    return Regex(rf"(?=[^@]{{1,64}}@){_LOCAL_PART}@{_DOMAIN}")


@lru_cache(1)
def url() -> DFA:
    """Return ASCII web addresses, http and https, with a domain, localhost or an IPv4 address."""
    host = rf"(?:(?!(?:[^/:?#]*\.)?[Xx][Nn]--){_DOMAIN}|localhost|{IPV4})"
    return Regex(rf"https?://{host}(?::{_PORT})?(?:/{_PATH}*)?(?:\?{_QUERY}*)?(?:#{_QUERY}*)?")


@lru_cache(1)
def phone() -> DFA:
    """Return international numbers of 7 to 15 digits: +, no leading zero, optional blanks or hyphens between digits."""
    return Regex("\\+[1-9](?:[ -]?[0-9]){6,14}")


def number_range(low: Bound | None = None, high: Bound | None = None, decimals: int = 0) -> DFA:
    """Return the numbers from `low` to `high`, both included, as people write them: 0, -7, 12.50.

    They have no sign + and no leading zeros.

    Parameters
    ----------
    low, high : int, float, Fraction, or None
        Without a bound, numbers have at most 18 digits before the point.
    decimals : int
        The most digits after the point; 0 allows no point.

    Raises
    ------
    ValueError
        No such number lies between them.
    """
    scale = 10 ** arguments.count("decimals", decimals, least=0)
    least, most = -(10**DIGITS) * scale + 1, 10**DIGITS * scale - 1
    if low is not None:
        least = math.ceil(_exact("low", low) * scale)
    if high is not None:
        most = math.floor(_exact("high", high) * scale)
    if least > most:
        raise ValueError(f"no number of {decimals} decimals is at least {low} and at most {high}")

    return decimals_within(least, most, decimals)


def _exact(name: str, bound: Bound) -> Fraction:
    """Return the bound as it is written: 0.1 is a tenth."""
    if math.isinf(arguments.number(name, float(bound) if isinstance(bound, Fraction) else bound)):
        raise ValueError(f"{name} must be finite, or None for no bound, not {bound!r}")
    return Fraction(str(bound))
