"""Ready-made languages: addresses, dates, identifiers and numbers, each the texts that its validator takes.

`iso_date()`, `iso_time()`, `iso_datetime()`, `uuid()` and `ipv4()` hold what Python's own classes read in that form;
`email()`, `url()` and `phone()` the plain core of RFC 5322, RFC 3986 and E.164 that all programs take.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np

from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.regex import Regex
from llmppl.support import arguments

__all__ = [
    "digits_between", "email", "ipv4", "iso_date", "iso_datetime", "iso_time", "number_range", "phone", "url", "uuid",
]  # fmt: skip

Bound = float | Fraction
DIGITS = 18                                         # of the integer part of a number without a bound
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"       # not 0000
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"       # two digits, a multiple of 4 above 0
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
DATE = f"(?:{_YEAR}-{_DAY}|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9](?::[0-5][0-9](?:\.[0-9]{1,6})?)?"
DATETIME = f"{DATE}T{TIME}(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])?"
UUID = "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"

FORMATS = {"date": DATE, "time": TIME, "date-time": DATETIME, "uuid": UUID, "ipv4": IPV4}      # by JSON Schema's names
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_TOP = "[A-Za-z](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DOMAIN = rf"(?:{_LABEL}\.)+{_TOP}"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_PORT = "(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_PATH = "(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})"
_QUERY = "(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})"


@lru_cache(1)
def iso_date() -> DFA:
    """Days as 2024-02-29, in the years 0001 to 9999, leap years known."""
    return Regex(DATE)


@lru_cache(1)
def iso_time() -> DFA:
    """Times of day as 23:59, 23:59:59 and 23:59:59.5, with at most six digits of a second."""
    return Regex(TIME)


@lru_cache(1)
def iso_datetime() -> DFA:
    """A day, T and a time, with Z, an offset as +02:00, or neither."""
    return Regex(DATETIME)


@lru_cache(1)
def uuid() -> DFA:
    """UUIDs of any version, with hyphens, in capitals or small letters."""
    return Regex(UUID)


@lru_cache(1)
def ipv4() -> DFA:
    """Addresses as 192.168.0.1, without leading zeros."""
    return Regex(IPV4)


@lru_cache(1)
def email() -> DFA:
    """A local part of at most 64 characters without quotes, @, and a domain of two labels or more."""
    return Regex(rf"(?=[^@]{{1,64}}@){_ATOM}(?:\.{_ATOM})*@{_DOMAIN}")


@lru_cache(1)
def url() -> DFA:
    """Web addresses, http and https, by a domain, localhost or an IPv4 address; not with what is no ASCII."""
    host = rf"(?:(?!(?:[^/:?#]*\.)?[Xx][Nn]--){_DOMAIN}|localhost|{IPV4})"
    return Regex(rf"https?://{host}(?::{_PORT})?(?:/{_PATH}*)?(?:\?{_QUERY}*)?(?:#{_QUERY}*)?")


@lru_cache(1)
def phone() -> DFA:
    """International numbers of 7 to 15 digits: +, no zero, and a blank or a hyphen between digits where one likes."""
    return Regex("\\+[1-9](?:[ -]?[0-9]){6,14}")


def number_range(low: Bound | None = None, high: Bound | None = None, decimals: int = 0) -> DFA:
    """The numbers from `low` to `high`, both included, as people write them: 0, -7, 12.50; no sign +, no leading zeros.

    Parameters
    ----------
    low, high : int, float, Fraction, or None
        Without a bound, numbers have at most 18 digits before the point.
    decimals : int
        The most digits behind the point; with 0 there is none.

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
    patterns = [
        sign + pattern
        for sign, first, last in (("-", max(1, -most), -least), ("", max(0, least), most))
        if first <= last
        for pattern in digits_between(first, last, decimals)
    ]
    numbers = Regex("|".join(patterns)).explore()
    return (_shortened(numbers) if decimals else numbers).minimise()


def _exact(name: str, bound: Bound) -> Fraction:
    """The bound as it is written: 0.1 is a tenth."""
    if math.isinf(arguments.number(name, float(bound) if isinstance(bound, Fraction) else bound)):
        raise ValueError(f"{name} must be finite, or None for no bound, not {bound!r}")
    return Fraction(str(bound))


def digits_between(first: int, last: int, decimals: int = 0) -> list[str]:
    """Patterns of the numbers from `first` to `last`, one by number of digits; `decimals` are behind the point."""
    found, length = list[str](), decimals + 1
    while 10 ** (length - 1) <= last or length == decimals + 1:
        least = 10 ** (length - 1) if length > decimals + 1 else 0
        low, high = max(first, least), min(last, 10**length - 1)
        if low <= high:
            found.append(_between(str(low).zfill(length), str(high).zfill(length), decimals))
        length += 1
    return found


def _between(low: str, high: str, decimals: int) -> str:
    """The strings of digits from `low` to `high`, of the same length, a point before the last `decimals` digits."""
    if not low:
        return ""
    point = r"\." if len(low) == decimals else ""
    if low == "0" * len(low) and high == "9" * len(high):
        whole = max(len(low) - decimals, 0)
        digits, behind = f"[0-9]{{{whole}}}" * bool(whole), f"[0-9]{{{len(low) - whole}}}" * (len(low) > whole)
        return digits + r"\." * bool(decimals and len(low) >= decimals) + behind
    first, last = int(low[0]), int(high[0])
    if first == last:
        return point + low[0] + _between(low[1:], high[1:], decimals)
    zeros, nines = "0" * (len(low) - 1), "9" * (len(low) - 1)
    choices = [low[0] + _between(low[1:], nines, decimals), high[0] + _between(zeros, high[1:], decimals)]
    if first + 1 < last:
        choices.append(f"[{first + 1}-{last - 1}]" + _between(zeros, nines, decimals))
    return f"{point}(?:{'|'.join(choices)})"


def _shortened(numbers: DFA) -> DFA:
    """The numbers also without zeros at their end, and without a point that nothing is behind."""
    table, accepting = numbers.table, numbers.accepting.copy()
    while (more := accepting | accepting[table[:, ord("0")]]).sum() > accepting.sum():
        accepting = more
    after_point = np.unique(table[:, ord(".")])
    whole = accepting[table[:, ord(".")]]           # before a point and zeros
    accepting[after_point] = False
    digit = np.flatnonzero(table[:, ord(".")])
    accepting[digit] = whole[digit]
    return DFA.from_table(table, accepting, numbers.start)
