"""Numbers and strings of JSON, as llguidance writes them, as fragments and automata over bytes.

A string without a pattern may have any escapes. A string with a pattern, a format or a constant has one spelling,
except that control characters may be short (`\\n`) or long (`\\u000a`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from functools import lru_cache, partial, reduce
from operator import and_

import numpy as np

from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.formats import JSON_FORMATS, decimals_between, naturals, plain, signed
from llmppl.constraints.automata.nfa import Fragment
from llmppl.constraints.automata.operations import Edge, joined
from llmppl.constraints.automata.regex import Regex
from llmppl.constraints.json.shapes import NotCompilable, Number, String

__all__ = ["character", "fragment", "number", "other_names", "quoted", "spellings", "string"]

MAX_STEP = 1_000                                    # of multiples, whose automaton has as many states
MAX_PATTERN = 2_000                                 # states of a pattern, with bounds of its length
MAX_WHOLE = 10**40                                  # of a bound

_RAW = r'[^"\\\x00-\x1f\x7f]'
_PAIR = r"[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"     # of surrogates
_SCALAR = rf"\\u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{{3}}|[dD][0-7][0-9a-fA-F]{{2}}|{_PAIR})"
_CHARACTER = rf'(?:{_RAW}|\\["\\bfnrt]|{_SCALAR})'
_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_SPECIAL = (*range(32), 34, 92, 127)                # bytes that are written as escapes

_INTEGER = "-?(?:0|[1-9][0-9]*)"
_NUMBER = rf"{_INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"

# ---- numbers


@lru_cache(256)
def number(shape: Number) -> DFA:
    """Return the numbers of a shape; perhaps none."""
    low, low_in = _tighter(max, shape.low, shape.above, -math.inf)
    high, high_in = _tighter(min, shape.high, shape.below, math.inf)
    if any(MAX_WHOLE <= abs(bound) < math.inf for bound in (low, high)):
        raise NotCompilable("a number of more than 40 digits")
    if shape.integer and low > -math.inf:
        low, low_in = math.ceil(low) if low_in else math.floor(low) + 1, True
    if shape.integer and high < math.inf:
        high, high_in = math.floor(high) if high_in else math.ceil(high) - 1, True
    if low > high or (low == high and not (low_in and high_in)):
        return DFA.from_strings([])
    if low == high and shape.step is None:
        return DFA.from_strings(spellings(low, shape.integer))
    if (low, high) == (-math.inf, math.inf):
        pattern = _INTEGER if shape.integer else _NUMBER
    else:                                           # as in llguidance, -0 is an integer between two bounds
        integers = partial(_integers, high - low < math.inf)
        pattern = signed(low, high, low_in, high_in, integers if shape.integer else decimals_between)
    numbers: DFA = Regex(pattern)
    if shape.step is None:
        return numbers
    if not shape.integer or shape.step != int(shape.step) or not 0 < shape.step <= MAX_STEP:
        raise NotCompilable(f"multiples of {shape.step}")
    return numbers & _multiples(int(shape.step))


def spellings(value: float, is_integer: bool) -> list[str]:
    """Return the texts of one number: without an exponent, and as Python, JavaScript and pydantic write a float."""
    found = [plain(value)]
    if isinstance(value, float) and not is_integer:
        mantissa, e, exponent = repr(value).partition("e")
        sign, digits = exponent[:1], exponent[1:].lstrip("0")
        found += [repr(value), *([f"{mantissa}e{sign}{digits}", f"{mantissa}e{sign.strip('+')}{digits}"] if e else [])]
    return list(dict.fromkeys(found))


def _tighter(
    choose: Callable[..., float], closed: float | None, open_: float | None, free: float
) -> tuple[float, bool]:
    """Return the tighter of two bounds, or `free` if there is none, and whether it is included."""
    bound: float = choose(each for each in (closed, open_, free) if each is not None)
    return bound, bound != open_


def _integers(has_minus_zero: bool, low: float, high: float, low_in: bool, high_in: bool) -> str:
    return naturals(int(low) + (not low_in and not has_minus_zero), high)


@lru_cache(64)
def _multiples(step: int) -> DFA:
    """Return the multiples of `step`, with an optional sign: a state for every remainder, and one after the sign."""
    table = np.zeros((step + 3, 256), np.int32)     # 1 the start, 2 after the sign, 3 + the remainder
    for digit in range(10):
        table[[1, 2], 48 + digit] = 3 + digit % step
        table[3:, 48 + digit] = 3 + (np.arange(step) * 10 + digit) % step
    table[1, ord("-")] = 2
    accepting = np.zeros(step + 3, bool)
    accepting[3] = True
    return DFA.from_table(table, accepting, 1)


# ---- strings


@lru_cache(1)
def character() -> Fragment:
    """Return one character of a string, escaped or not."""
    return fragment(Regex(_CHARACTER).minimise())


@lru_cache(1)
def string() -> Fragment:
    """Return a string of any characters, with its quotes."""
    return fragment(Regex(f'"{_CHARACTER}*"').minimise())


def fragment(dfa: DFA) -> Fragment:
    """Return an automaton as a fragment; its accepting states must have no edges. () if it has no texts."""
    if not dfa.start:
        return ()
    ends, rows = set(np.flatnonzero(dfa.accepting).tolist()), dfa.edges()
    order = [dfa.start, *(state for state in range(1, len(rows)) if state != dfa.start and state not in ends)]
    place = {state: i for i, state in enumerate(order)} | dict.fromkeys(ends, -1)
    return tuple(tuple(joined((lo, hi, place[to]) for lo, hi, to in rows[state])) for state in order)


def other_names(names: Iterable[str]) -> Fragment:
    """Return the strings that are not spelled like one of the names."""
    rows, copies = [list(row) for row in string()], dict[bytes, int]()  # of the states that begin a name
    for name in names:
        word, state = json.dumps(name, ensure_ascii=False).encode(), 0
        for at, byte in enumerate(word, 1):
            to = next((to for lo, hi, to in rows[state] if lo <= byte <= hi), None)
            if to is None:                          # no string is spelled so, or the name is a duplicate
                break
            if at < len(word) and word[:at] not in copies:
                copies[word[:at]] = len(rows)
                rows.append(list(rows[to]))
            rows[state] = _redirected(rows[state], byte, copies[word[:at]] if at < len(word) else None)
            state = copies.get(word[:at], 0)
    return tuple(map(tuple, rows))


def _redirected(row: list[Edge], byte: int, target: int | None) -> list[Edge]:
    """Return the edges with one byte leading to `target`, or nowhere if it is None."""
    found: list[Edge] = []
    for lo, hi, to in row:
        if lo <= byte <= hi:
            found += [(lo, byte - 1, to)] * (lo < byte)
            found += [] if target is None else [(byte, byte, target)]
            found += [(byte + 1, hi, to)] * (byte < hi)
        else:
            found.append((lo, hi, to))
    return found


@lru_cache(256)
def quoted(shape: String) -> Fragment:
    """Return the strings of a shape that has languages, with quotes and escapes; () if there are none."""
    parts = [_language(kind, value) for kind, value in shape.languages]
    if shape.least or shape.most is not None:
        parts.append(Regex(f"(?s:.{{{shape.least},{'' if shape.most is None else shape.most}}})"))
    if len(parts) > 1:
        for part in parts:
            part.explore(MAX_PATTERN)
    dfa = reduce(and_, parts).explore(MAX_PATTERN)
    if not dfa.start:
        return ()
    rows: list[list[Edge]] = []
    for state, row in enumerate(dfa.edges()):
        rows.append([edge for lo, hi, to in row for edge in _cut(lo, hi, to)])
        rows[-1] += [(34, 34, -1)] * bool(dfa.accepting[state])
    rows[0] = [(34, 34, dfa.start)]
    made: dict[tuple[tuple[int, int], ...], int] = {}
    for state, row in enumerate(dfa.edges()):
        escaped = tuple((byte, to) for lo, hi, to in row for byte in _SPECIAL if lo <= byte <= hi)
        if escaped:
            if escaped not in made:
                made[escaped] = _escapes(dict(escaped), rows)
            rows[state].append((92, 92, made[escaped]))
    return tuple(tuple(joined(sorted(row))) for row in rows)


def _cut(lo: int, hi: int, to: int) -> Iterable[Edge]:
    """Yield the parts of an edge without the special bytes."""
    begin = lo
    for byte in (*(byte for byte in _SPECIAL if lo <= byte <= hi), hi + 1):
        if begin < byte:
            yield begin, byte - 1, to
        begin = byte + 1


def _escapes(targets: dict[int, int], rows: list[list[Edge]]) -> int:
    """Append the rows after a backslash, and return the first: the escaped bytes and their targets."""
    escaped = [(ord(_SHORT[byte]),) * 2 + (to,) for byte, to in targets.items() if byte in _SHORT]
    long: dict[int, list[Edge]] = {}                # by the third of the four digits
    for byte, to in targets.items():
        if byte not in (34, 92):
            digits = {f"{byte % 16:x}", f"{byte % 16:X}"}
            long.setdefault(byte // 16, []).extend((ord(digit), ord(digit), to) for digit in digits)
    if long:
        thirds = []
        for third, edges in sorted(long.items()):
            rows.append(sorted(edges))
            thirds.append((48 + third, 48 + third, len(rows) - 1))
        rows.append(thirds)
        for byte in b"00":
            rows.append([(byte, byte, len(rows) - 1)])
        escaped.append((ord("u"), ord("u"), len(rows) - 1))
    rows.append(sorted(escaped))
    return len(rows) - 1


def _language(kind: str, value: str) -> DFA:
    if kind == "const":
        return DFA.from_strings([value])
    if kind == "pattern":
        return _pattern(value)
    if value not in JSON_FORMATS:
        raise NotCompilable(f"the format {value}")
    return Regex(JSON_FORMATS[value])


_SPACES = r"\t\n\x0b\f\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_INSIDE = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACES}
_OUTSIDE = {key: f"[{ranges}]" for key, ranges in _INSIDE.items()}
_OUTSIDE |= {key.upper(): f"[^{ranges}]" for key, ranges in _INSIDE.items()}
_PART = re.compile(
    r"\\(?P<hex>x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})|\\(?P<kind>[dwsDWS])|\\(?P<same>[nrtf])|\\(?P<sign>[^0-9A-Za-z<>\s])"
    r"|(?P<open>\((?:\?:)?(?!\?))|(?P<count>(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??(?![*+?{]))|(?P<other>[^\\()\[\]{}*+?])|(?P<close>\))"
    r"|\[(?P<not>\^?)(?P<class>(?:\\[^0-9]|[^\\\[\]&~])+)\]"
)


@lru_cache(256)
def _pattern(pattern: str) -> DFA:
    """Return the texts in which a pattern is found. Raises NotCompilable if Python might read it differently."""
    text, at = "", 0
    while at < len(pattern):
        part = _PART.match(pattern, at)
        if part is None:
            raise NotCompilable(f"the pattern {pattern!r}")
        at = part.end()
        text += _rewritten(part, pattern)
    has_choice = "|" in text
    begins = text.startswith("^") and not has_choice
    ends = text.endswith(r"\Z") and not has_choice
    bare = text[begins : len(text) - 2 * ends]
    before, after = "" if begins else "(?s:.*)", "" if ends or not bare else "(?s:.*)"
    try:
        return Regex(f"{before}(?:{bare}){after}")
    except ValueError as error:
        raise NotCompilable(f"the pattern {pattern!r}: {error}") from None


def _rewritten(part: re.Match[str], pattern: str) -> str:
    kind, inside = part["kind"], part["class"]
    if kind:
        return _OUTSIDE[kind]
    if part["other"] == "$":
        return r"\Z"
    if inside is None:
        return part[0]
    if "--" in inside or re.search(r"\\[^dwsnrtfxu\W]|\\[xu](?![0-9a-fA-F])|\\[<>]", inside):
        raise NotCompilable(f"the pattern {pattern!r}")
    plain_class = re.sub(r"\\(.)", lambda each: _INSIDE.get(each[1], each[0]), inside)
    return f"[{part['not']}{plain_class}]"
