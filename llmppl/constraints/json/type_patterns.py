"""Patterns of the texts that pydantic reads: dates, times, durations, decimals, addresses, and its own patterns.

All are ECMA patterns, found anywhere in a text unless they have `^` and `$`. Bounds are patterns of their own: a text
must match the pattern of its kind and that of each bound. Two texts of one layout compare digit by digit, from the
left.
"""

from __future__ import annotations

import re
from datetime import date, datetime, time
from decimal import Decimal

from llmppl.constraints.automata.formats import FORMATS
from llmppl.constraints.automata.numerals import digits_between, either

__all__ = [
    "ADDRESSES", "COMPLEX", "TRIMMED", "above", "at_least", "at_most", "below", "decimal", "duration", "ecma", "moment",
    "uuid", "web",
]  # fmt: skip

_OFFSET = "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_KINDS = {date: FORMATS["date"], time: FORMATS["time"], datetime: f"{FORMATS['date']}T{FORMATS['time']}"}
_ZEROS, _END = "[:.0]*", "(?:[Z+-].*)?$"            # of a text that equals a bound, and of its offset
_NUMBER = r"(?:0|[1-9][0-9]*)(?:\.[0-9]+)?"
_DIGITS = r"(?:\.[0-9]+)?"

# of Rust's White_Space; a string that `strip_whitespace` does not change
_SPACES = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
TRIMMED = rf"^(?:[^{_SPACES}](?:[\s\S]*[^{_SPACES}])?)?$"

COMPLEX = rf"^-?{_NUMBER}(?:e[+-]?[0-9]{{1,2}})?(?:j|[+-]{_NUMBER}(?:e[+-]?[0-9]{{1,2}})?j)?$"
ADDRESSES = {                                       # by pydantic's names of formats
    "ipv4": f"^{FORMATS['ipv4']}$",
    "ipv4interface": f"^{FORMATS['ipv4']}(?:/(?:3[0-2]|[12]?[0-9]))?$",
    "ipv4network": f"^{FORMATS['ipv4']}(?:/(?:3[0-2]|[12]?[0-9]))?$",
}


def uuid(version: int | None) -> str:
    """Return the pattern of UUIDs, or of those of one version, whose variant is that of RFC 9562."""
    if version is None:
        return f"^{FORMATS['uuid']}$"
    return f"^[0-9A-Fa-f]{{8}}-[0-9A-Fa-f]{{4}}-{version}[0-9A-Fa-f]{{3}}-[89ABab][0-9A-Fa-f]{{3}}-[0-9A-Fa-f]{{12}}$"


def web(schemes: list[str]) -> str:
    """Return the pattern of ASCII addresses with a scheme, a host, and perhaps a port, a path, a query, a fragment."""
    label = "[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"
    host = rf"(?:(?:{label}\.)*[A-Za-z][A-Za-z0-9]*(?:-[A-Za-z0-9]+)*|{FORMATS['ipv4']})"
    port = "(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
    char = "(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})"
    more = "(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})"
    scheme = "|".join(map(re.escape, schemes))
    return rf"^(?:{scheme})://{host}(?::{port})?(?:/{char}*)?(?:\?{more}*)?(?:#{more}*)?$"


# ---- dates and times


def moment(kind: type[date | time], offset: bool | None = None) -> str:
    """Return the pattern of dates, times or datetimes, with an offset, without one, or with either (None)."""
    zone = "" if kind is date or offset is False else _OFFSET if offset else f"{_OFFSET}?"
    return f"^{_KINDS[kind]}{zone}$"


def at_least(low: date | time, closed: bool) -> str:
    """Return a pattern of the dates or times from `low` on, among the texts of `moment`. Offsets do not count."""
    text = _written(low)
    choices = [f"{text[:i]}{_digit(int(d) + 1, 9)}" for i, d in enumerate(text) if d.isdigit() and d < "9"]
    return f"^(?:{'|'.join([*choices, text])})" if closed else f"^(?:{'|'.join(choices)}|{text}{_ZEROS}[1-9])"


def at_most(high: date | time, closed: bool) -> str:
    """Return a pattern of the dates or times up to `high`, among the texts of `moment`. Offsets do not count."""
    text, shortest = _written(high), {date: 10, time: 5, datetime: 16}[type(high)]
    choices = [f"{text[:i]}{_digit(0, int(d) - 1)}" for i, d in enumerate(text) if d.isdigit() and d > "0"]
    ends = [text[:i] for i in range(shortest, len(text)) if text[i - 1].isdigit()] + [text + _ZEROS] * closed
    return f"^(?:{'|'.join([*choices, *(end + _END for end in ends)]) or '[^0-9]'})"


def _digit(low: int, high: int) -> str:
    return f"[{low}-{high}]" if low < high else str(low)


def _written(bound: date | time) -> str:
    """Return the pattern of the shortest text of a bound, without its offset, and without seconds that are zero."""
    if not isinstance(bound, datetime | time):
        return bound.isoformat()
    unit = "microseconds" if bound.microsecond else "seconds" if bound.second else "minutes"
    text = bound.replace(tzinfo=None).isoformat(timespec=unit)
    return text.rstrip("0").replace(".", "[.]") if bound.microsecond else text


def duration(signed: bool) -> str:
    """Return the pattern of ISO 8601 durations of at most 999,999,999 days, the largest of a timedelta."""
    free, within = (_clock(*sizes) for sizes in (("[0-9]{1,6}",) * 2, ("(?:1?[0-9]|2[0-3])", "[1-5]?[0-9]")))
    days = "|".join(_parts_from(["Y", "M", "W", "D"], "[0-9]{1,6}"))
    year = f"(?:{either(digits_between(10**6, 2739725))}Y(?:{either(digits_between(0, 364))}D)?|2739726Y(?:[0-8]D)?)"
    found = f"P(?:(?:{days})(?:{free})?|{free}|[0-9]{{7,8}}D(?:{within})?|{year}(?:{within})?"
    positive, negative = f"{found}|2739726Y9D(?:{within})?)", f"-{found}|2739726Y9D)"
    return f"^(?:{positive}|{negative})$" if signed else f"^{positive}$"


def _clock(hours: str, others: str) -> str:
    """Return the pattern of the time of a duration, of numbers of hours and of minutes and seconds."""
    seconds = rf"{others}(?:\.[0-9]{{1,6}})?S"
    return f"T(?:{hours}H(?:{others}M)?(?:{seconds})?|{others}M(?:{seconds})?|{seconds})"


def _parts_from(units: list[str], number: str) -> list[str]:
    """Return for each unit the pattern of a number of it and perhaps numbers of later ones."""
    return [number + units[i] + "".join(f"(?:{number}{later})?" for later in units[i + 1 :]) for i in range(len(units))]


# ---- decimals


def decimal(digits: int | None, places: int | None, infinite: bool) -> str:
    """Return the pattern of a Decimal of at most so many digits and decimal places; only a free one has exponents."""
    if digits is None and places is None:
        names = "|-?Infinity|-?s?NaN" if infinite else ""
        return f"^(?:-?{_NUMBER}(?:E[+-]?[0-9]{{1,17}})?{names})$"
    if digits is None:
        found = f"(?:0|[1-9][0-9]*){_fraction(places or 0)}"
    elif places is None:
        longer = (f"[1-9][0-9]{{{i}}}{_fraction(digits - i - 1)}" for i in range(digits))
        found = "|".join([f"0{_fraction(digits)}", *longer])
    elif digits > places:
        found = f"(?:0|[1-9][0-9]{{0,{digits - places - 1}}}){_fraction(places)}"
    else:
        found = f"0{_fraction(places)[:-1]}"        # pydantic counts the digit of a lone 0
    return f"^-?(?:{found})$"


def _fraction(places: int) -> str:
    """Return the pattern of a point and at most so many digits, and zeros, or of nothing."""
    return rf"(?:\.[0-9]{{1,{places}}}0*)?" if places else r"(?:\.0+)?"


def above(low: Decimal, closed: bool) -> str:
    """Return a pattern of the plain decimals from `low` on."""
    return f"^(?:{_NUMBER}|-{_up_to(-low, closed)})$" if low <= 0 and (low or closed) else f"^{_from(low, closed)}$"


def below(high: Decimal, closed: bool) -> str:
    """Return a pattern of the plain decimals up to `high`."""
    if high < 0:
        return f"^-{_from(-high, closed)}$"
    return f"^(?:-{_NUMBER}|{_up_to(high, closed)})$" if high or closed else f"^-{_from(high, closed)}$"


def _parts(value: Decimal) -> tuple[str, str]:
    """Return the digits before and after the point of a magnitude."""
    whole, _, fraction = format(abs(value), "f").partition(".")
    return whole.lstrip("0") or "0", fraction.rstrip("0")


def _from(value: Decimal, closed: bool) -> str:
    whole, fraction = _parts(value)
    size = len(whole)
    choices = [rf"[1-9][0-9]{{{size},}}{_DIGITS}"]
    for i, d in enumerate(whole):
        if d < "9":
            choices.append(rf"{whole[:i]}{_digit(int(d) + 1, 9)}[0-9]{{{size - i - 1}}}{_DIGITS}")
    choices += [rf"{whole}\.{fraction[:i]}{_digit(int(d) + 1, 9)}[0-9]*" for i, d in enumerate(fraction) if d < "9"]
    same = rf"{whole}\.{fraction}"
    choices.append(rf"{same}0*[1-9][0-9]*" if not closed else f"{same}[0-9]*" if fraction else whole + _DIGITS)
    return f"(?:{'|'.join(choices)})"


def _up_to(value: Decimal, closed: bool) -> str:
    whole, fraction = _parts(value)
    size = len(whole)
    choices = [rf"(?:0|[1-9][0-9]{{0,{size - 2}}}){_DIGITS}"] * (size > 1)
    for i, d in enumerate(whole):
        least = int(i == 0 and size > 1)
        if int(d) > least:
            choices.append(rf"{whole[:i]}{_digit(least, int(d) - 1)}[0-9]{{{size - i - 1}}}{_DIGITS}")
    choices += [rf"{whole}\.{fraction[:i]}{_digit(0, int(d) - 1)}[0-9]*" for i, d in enumerate(fraction) if d > "0"]
    choices += [whole + rf"\.{fraction[:i]}" * (i > 0) for i in range(len(fraction))]
    choices += [rf"{whole}\.{fraction}0*" if fraction else rf"{whole}(?:\.0+)?"] * closed
    return f"(?:{'|'.join(choices)})"


# ---- patterns of other engines

_LETTERS = "\U0001f130-\U0001f149\U0001f150-\U0001f169\U0001f170-\U0001f189"
_WORD = r"\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc}\u200c\u200d\u24b6-\u24e9" + _LETTERS
_CLASSES = {                                        # of Rust's regex and of Python's re, for texts
    "rust": {"d": r"\p{Nd}", "w": _WORD, "s": _SPACES},
    "python": {"d": r"\p{Nd}", "w": r"\p{L}\p{N}_", "s": r"\x1c-\x1f" + _SPACES},
}
_SAFE = (
    r"\\(?P<same>x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[nrtfv])"
    r"|\\p(?P<category>\{[A-Z][a-z]?\}|[A-Z])|\\(?P<sign>[^\w\s<>]| )"
)
_TOKEN = re.compile(
    rf"{_SAFE}|\\(?P<kind>[dwsDWS])|\\(?P<edge>[AzZ])|\[(?P<not>\^?)(?P<inside>(?:\\.|[^\\\[\]])+)\]"
    r"|(?P<name>\(\?P?<[A-Za-z_]\w*>)|(?P<ahead>\(\?[=!])|(?P<open>\((?:\?:|(?!\?)))"
    r"|(?P<count>(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??(?![*+?{]))|(?P<plain>[^\\\[({*+?])", re.S
)
_MEMBER = re.compile(rf"{_SAFE}|\\(?P<kind>[dws])|(?P<plain>[^\\])", re.S)


def ecma(pattern: str, engine: str) -> str | None:
    """Return an ECMA pattern with the meaning of one of "rust" or "python"; None if this function knows none."""
    found, at = "", 0
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        part = token and _outside(token, engine)
        if token is None or part is None:
            return None
        found, at = found + part, token.end()
    return found


def _outside(token: re.Match[str], engine: str) -> str | None:
    """Return one token outside a class; None if ECMA lacks it."""
    kind, inside = token["kind"], token["inside"]
    if inside is not None:
        members = _members(inside, engine)
        return None if members is None else f"[{token['not']}{members}]"
    if kind:
        return f"[{'^' * kind.isupper()}{_CLASSES[engine][kind.lower()]}]"
    if token["edge"]:
        return {"A": "^", "z" if engine == "rust" else "Z": "$"}.get(token["edge"])
    if token["ahead"]:
        return None if engine == "rust" else token[0]
    if token["name"]:
        return "(?:"
    if token["plain"]:
        return {".": r"[^\n]", "$": "$" if engine == "rust" else r"\n?$"}.get(token[0]) or _literal(token[0])
    return _escape(token) or token[0]


def _members(inside: str, engine: str) -> str | None:
    """Return the members of a class; None for set operations and for complements inside."""
    if re.search(r"&&|--|~~|\|\|", inside):
        return None
    found, at, after_class = "", 0, False
    while at < len(inside):
        token = _MEMBER.match(inside, at)
        if token is None:
            return None
        at, kind = token.end(), token["kind"]
        is_dash = token[0] == "-" and (after_class or inside[at : at + 2] in (r"\d", r"\w", r"\s"))
        found += _CLASSES[engine][kind] if kind else r"\-" if is_dash else _escape(token) or token[0]
        after_class = bool(kind)
    return found


def _escape(token: re.Match[str]) -> str:
    """Return an escape in ECMA's form; "" for another token."""
    if token["category"]:
        return rf"\p{{{token['category'].strip('{}')}}}"
    return _literal(token["sign"], "-") if token["sign"] else ""


def _literal(char: str, more: str = "") -> str:
    return f"\\{char}" if char in "\\.*+?[]{}/" + more or (more and char in "^$()|") else char
