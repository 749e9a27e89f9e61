"""Ready-made languages: addresses, dates, identifiers and numbers, each the texts that its validator accepts.

`iso_date()`, `iso_time()`, `iso_datetime()`, `uuid()` and `ipv4()` hold the texts of that form that Python's own
classes read. `email()`, `url()` and `phone()` hold the plain core of RFC 5322, RFC 3986 and E.164 that all programs
accept.

Patterns of decimal numbers between two bounds compare digit by digit, from the left: a first digit above that of the
lower bound and below that of the upper bound leaves the other digits free. `Magnitude` patterns have no sign; `signed`
adds the sign to any of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import cache, lru_cache

from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.regex import Regex
from llmppl.support import arguments

DIGITS = "0123456789"
ZEROS, NINES = (str.maketrans(DIGITS, 10 * digit) for digit in "09")
Magnitude = Callable[[float, float, bool, bool], str]  # low, high, and whether each is included


def either(patterns: Iterable[str]) -> str:
    """Return the pattern of the texts that match one of `patterns`; a single one has no | outside groups."""
    found = list(patterns)
    if len(found) == 1:
        return found[0]
    return f"(?:{'|'.join(found)})"


def signed(low: float, high: float, low_in: bool, high_in: bool, magnitude: Magnitude) -> str:
    """Return the pattern of the numbers from `low` to `high`, which may be infinite; for `Regex`, without a group."""
    choices = []
    if low < 0:
        choices.append("-" + magnitude(max(0, -high), -low, high < 0 and high_in, low_in))
    if high > 0 or (high == 0 and high_in):
        choices.append(magnitude(max(0, low), high, low < 0 or low_in, high_in))
    return "|".join(choices)


def digits_between(first: int, last: int, decimals: int = 0) -> list[str]:
    """Return patterns whose union is the numbers from `first` to `last`, both at least 0; none if there are none.

    With `decimals`, the numbers are first / 10**decimals to last / 10**decimals, with as many digits after the point.
    """
    if first > last:
        return []
    low = str(first).zfill(decimals + 1)
    high = str(last).zfill(decimals + 1)
    if len(low) == len(high):
        return [_between(low, high, decimals)]
    found = [
        _between(low, "9" * len(low), decimals),
        _between("1".ljust(len(high), "0"), high, decimals),
    ]
    if len(high) - len(low) > 1:
        rest = rf"\.[0-9]{{{decimals}}}" if decimals else ""
        found.append(f"[1-9][0-9]{{{len(low) - decimals},{len(high) - decimals - 2}}}{rest}")
    return found


def _between(low: str, high: str, decimals: int) -> str:
    """Return the pattern of the numbers between two numerals of one length, with a point before the last digits."""
    if decimals:
        low = f"{low[:-decimals]}.{low[-decimals:]}"
        high = f"{high[:-decimals]}.{high[-decimals:]}"
    return same_length(low, high)


def same_length(low: str, high: str) -> str:
    """Return the pattern of the texts from `low` to `high`, with digits at the same places."""
    zeros = low.translate(ZEROS)
    nines = low.translate(NINES)
    if low == zeros and high == nines:
        return re.sub("[0-9]+", lambda run: f"[0-9]{{{len(run[0])}}}", re.escape(low))
    if low[0] == high[0]:
        return re.escape(low[0]) + same_length(low[1:], high[1:])
    choices = [
        low[0] + same_length(low[1:], nines[1:]),
        high[0] + same_length(zeros[1:], high[1:]),
    ]
    first = int(low[0]) + 1
    last = int(high[0]) - 1
    if first <= last:
        choices.append(f"[{first}-{last}]" + same_length(zeros[1:], nines[1:]))
    return either(choices)


Bound = float | Fraction
MAX_DIGITS = 18  # of the integer part of a number without a bound
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # not 0000
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"  # two digits, a multiple of 4 above 0
_DAY = (  # in a common year
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
DATE = f"(?:{_YEAR}-{_DAY}|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
TIME = rf"{_MINUTE}(?::[0-5][0-9](?:\.[0-9]{{1,6}})?)?"
DATETIME = f"{DATE}T{TIME}(?:Z|[+-]{_MINUTE})?"
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

# By JSON Schema's names, the texts that Python's classes read; `format_language` has those of RFC 3339 and others.
FORMATS = {"date": DATE, "time": TIME, "date-time": DATETIME, "uuid": UUID, "ipv4": IPV4}


@cache
def iso_date() -> DFA:
    """Return the dates such as 2024-02-29, in the years 0001 to 9999, with leap years.

    Examples
    --------
    >>> "2024-02-29" in iso_date(), "2023-02-29" in iso_date()
    (True, False)
    """
    return Regex(DATE)


@cache
def iso_time() -> DFA:
    """Return the times of day such as 23:59, 23:59:59 and 23:59:59.5, with at most six digits of a second.

    Examples
    --------
    >>> "23:59" in iso_time(), "24:00" in iso_time()
    (True, False)
    """
    return Regex(TIME)


@cache
def iso_datetime() -> DFA:
    """Return a date, T and a time, with Z, an offset such as +02:00, or neither.

    Examples
    --------
    >>> "2024-02-29T12:00Z" in iso_datetime(), "2024-02-29 12:00" in iso_datetime()
    (True, False)
    """
    return Regex(DATETIME)


@cache
def uuid() -> DFA:
    """Return UUIDs of any version, with hyphens, in capitals or small letters.

    Examples
    --------
    >>> "123e4567-e89b-12d3-a456-426614174000" in uuid(), "123e4567" in uuid()
    (True, False)
    """
    return Regex(UUID)


@cache
def ipv4() -> DFA:
    """Return addresses such as 192.168.0.1, without leading zeros.

    Examples
    --------
    >>> "192.168.0.1" in ipv4(), "192.168.0.256" in ipv4()
    (True, False)
    """
    return Regex(IPV4)


@cache
def email() -> DFA:
    """Return a local part of at most 64 characters without quotes, @, and a domain of two labels or more.

    Examples
    --------
    >>> "ada@example.org" in email(), "ada@example" in email()
    (True, False)
    """
    return Regex(rf"(?=[^@]{{1,64}}@){_LOCAL_PART}@{_DOMAIN}")


@cache
def url() -> DFA:
    """Return ASCII web addresses, http and https, with a domain, localhost or an IPv4 address.

    Examples
    --------
    >>> "https://example.org/a?b=1" in url(), "example.org/a?b=1" in url()
    (True, False)
    """
    host = rf"(?:(?!(?:[^/:?#]*\.)?[Xx][Nn]--){_DOMAIN}|localhost|{IPV4})"
    return Regex(rf"https?://{host}(?::{_PORT})?(?:/{_PATH}*)?(?:\?{_QUERY}*)?(?:#{_QUERY}*)?")


@cache
def phone() -> DFA:
    """Return international numbers of 7 to 15 digits: +, no leading zero, optional blanks or hyphens between digits.

    Examples
    --------
    >>> "+49 30 123456" in phone(), "030 123456" in phone()
    (True, False)
    """
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
        No such number lies between them, or a bound is infinite.

    Examples
    --------
    >>> list(number_range(-1, 2).enumerate())
    ['0', '1', '2', '-1']
    >>> "1.5" in number_range(0.5, 2, decimals=1), "2.1" in number_range(0.5, 2, decimals=1)
    (True, False)
    """
    scale = 10 ** arguments.count("decimals", decimals, least=0)
    least = -(10**MAX_DIGITS) * scale + 1
    most = 10**MAX_DIGITS * scale - 1
    if low is not None:
        least = math.ceil(_exact("low", low) * scale)
    if high is not None:
        most = math.floor(_exact("high", high) * scale)
    if least > most:
        raise ValueError(f"no number of {decimals} decimals is at least {low} and at most {high}")

    return numerals(least, most, decimals)


@lru_cache(64)
def numerals(least: int, most: int, decimals: int, zero: bool = False) -> DFA:
    """Return the numerals of k / 10**decimals for least <= k <= most, also without zeros at their end; perhaps none.

    With `zero`, -0 is a numeral of 0.
    """
    patterns = digits_between(max(least, 0), most, decimals)
    for pattern in digits_between(max(-most, int(not zero)), -least, decimals):
        patterns.append("-" + pattern)
    full = Regex("|".join(patterns) or "(?!)").explore()  # with all decimals
    accepting = ends = full.accepting
    for _ in range(decimals):  # one zero less each time
        accepting = accepting | ends
        ends = ends[full.table[:, ord("0")]]
    accepting = accepting | ends[full.table[:, ord(".")]]
    return DFA.from_table(full.table, accepting, full.start).minimise()


def _exact(name: str, bound: Bound) -> Fraction:
    """Return the bound as it is written: 0.1 is a tenth."""
    number = float(bound) if isinstance(bound, Fraction) else bound
    if math.isinf(arguments.number(name, number)):
        raise ValueError(f"{name} must be finite, or None for no bound, not {bound!r}")
    return Fraction(str(bound))


# ---- formats of JSON Schema

_FULL_DATE = f"(?:{DATE}|0000-(?:{_DAY}|02-29))"
_FRACTION = r"(?:\.[0-9]+)?"
_OFFSET = f"(?:[zZ]|[+-]{_MINUTE})"
_FULL_TIME = rf"(?:{_MINUTE}:[0-5][0-9]{_FRACTION}{_OFFSET}|23:59:60{_FRACTION}(?:[zZ]|[+-]00:00))"
_LEAP_DAY = "[0-9]{4}-(?:06-30|12-31)"
_CLOCK = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_LETTER = "[A-Za-z0-9]"
_HOST = r"(?:{0}(?:\.{0}){{0,2}}|{1}(?:\.{1}){{0,6}})".format(
    f"{_LETTER}(?:-?{_LETTER}){{0,30}}", f"{_LETTER}(?:-?{_LETTER}){{0,14}}"
)
_ATEXT = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_MAIL = rf"{_ATEXT}(?:\.?{_ATEXT}){{0,31}}@(?:{_HOST}|\[{IPV4}\])"
_HEX = "[0-9A-Fa-f]"
_GROUP = f"{_HEX}{{1,4}}"
_UCS = "\xa0-\u200d\u2010-\u2029\u202f-\ud7ff\uf900-\ufdcf\ufdf0-\uffef" + "".join(
    f"{chr(plane << 16)}-{chr((plane << 16) + 0xFFFD)}" for plane in range(1, 14)
)
_POINTER = "(?s:/(?:[^/~]|~[01])*)*"
_VARIABLE = (
    rf"(?:[A-Za-z0-9_]|%{_HEX}{{2}})(?:\.?(?:[A-Za-z0-9_]|%{_HEX}{{2}}))*(?::[1-9][0-9]{{0,3}}|\*)?"
)


def ipv6() -> str:
    before = [f"{_GROUP}(?::{_GROUP}){{{n}}}" for n in range(7)]  # n + 1 groups
    short = [
        f"{first}::(?:{_GROUP}(?::{_GROUP}){{0,{5 - n}}})?" for n, first in enumerate(before[:6])
    ]
    mixed = [f"{first}::(?:{_GROUP}:){{0,{4 - n}}}" for n, first in enumerate(before[:5])]
    plain = [f"::(?:{_GROUP}(?::{_GROUP}){{0,6}})?", f"{before[6]}(?:::|:{_GROUP})", *short]
    with_ipv4 = f"(?:(?:{_GROUP}:){{6}}|::(?:{_GROUP}:){{0,5}}|{'|'.join(mixed)}){IPV4}"
    return f"(?:{'|'.join(plain)}|{with_ipv4})"


def _uri(ucs: str = "", reference: bool = False) -> str:
    """Return the URIs (IRIs, with the characters `ucs`), or the references to them."""

    def some(more: str, count: str = "*") -> str:
        return f"(?:[A-Za-z0-9._~!$&'()*+,;=\\-{ucs}{more}]|%{_HEX}{{2}}){count}"

    authority = rf"//(?:{some(':')}@)?(?:\[{ipv6()}\]|{some('')})(?::[0-9]*)?"
    rooted = f"{authority}(?:/{some(':@')})*|/(?:{some(':@', '+')}(?:/{some(':@')})*)?"
    after = rf"(?:\?{some(':@/?')})?(?:#{some(':@/?')})?"
    absolute = rf"[A-Za-z][A-Za-z0-9+.\-]*:(?:{rooted}|{some(':@', '+')}(?:/{some(':@')})*)?{after}"
    if not reference:
        return absolute
    return f"{absolute}|(?:{rooted}|{some('@', '+')}(?:/{some(':@')})*)?{after}"


@lru_cache(32)
def format_language(name: str) -> DFA | None:
    """Return the texts of a format of JSON Schema, or None if the name is no such format. All its texts are valid.

    Some valid texts are left out: leap seconds with an offset, or within a date-time on other days than 30 June and 31
    December; host names with `--`, or with more than 7 labels or long ones; local parts of emails with quotes or of
    more than 63 characters; international names (`idn-`) that are not ASCII; operators that RFC 6570 reserves.

    Sources: RFC 3339 (date, time, duration), RFC 1123 (hostname), RFC 5321 (email), RFC 4291 (ipv6), RFC 3986 (uri),
    RFC 3987 (iri), RFC 6570 (uri-template), RFC 6901 (json-pointer).
    """
    moment = f"{_FULL_DATE}[tT]{_MINUTE}:[0-5][0-9]{_FRACTION}{_OFFSET}"
    found = {
        "date": _FULL_DATE,
        "time": _FULL_TIME,
        "date-time": rf"{moment}|{_LEAP_DAY}[tT]23:59:60{_FRACTION}(?:[zZ]|[+-]00:00)",
        "duration": f"P(?:[0-9]+W|{_DAYS}(?:{_CLOCK})?|{_CLOCK})",
        "email": _MAIL,
        "idn-email": _MAIL,
        "hostname": _HOST,
        "idn-hostname": _HOST.replace("A-Za-z", "a-z"),
        "ipv4": IPV4,
        "uuid": UUID,
        "json-pointer": _POINTER,
        "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
        "uri-template": rf"(?:[!#$&(-;=?-\[\]_a-z~{_UCS}]|%{_HEX}{{2}}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*",
    }
    if name == "ipv6":
        found[name] = ipv6()
    if name in ("uri", "uri-reference", "iri", "iri-reference"):
        ucs = _UCS if name.startswith("iri") else ""
        found[name] = _uri(ucs, name.endswith("reference"))
    if name not in found:
        return None
    return Regex(found[name]).minimise()
