"""The string formats of JSON Schema, each as a language of valid texts only.

Some formats have conditions that no small automaton expresses. Their languages leave out valid texts, as listed:

- time, date-time: leap seconds with an offset that is no multiple of 30 minutes. A date-time has them only at the end
  of June and December in UTC, with offsets from -12:00 to +14:00.
- hostname: labels with `--` as third and fourth characters, such as `xn--`; more than 7 labels, where one of more than
  31 characters counts as two.
- email, idn-email: comments, line breaks, and domains that are not in `hostname` or `idn-hostname`. A quoted local part
  has at most 31 characters. In an idn-email, a local part that is not ASCII has at most 8 characters without dots.
- idn-hostname: capitals, `--`, letters other than `_LETTERS`, more than 4 labels, and labels of more than 31 letters
  and digits, or 11 if some are not ASCII (14 if these are European).
- iri, iri-reference: characters that control the direction of text.
- uri-template: the operators that RFC 6570 reserves.
- regex: named groups, backreferences, escapes of code points, ranges such as `[c-f]` that do not begin at 0, a or A,
  and groups within two others.

Sources: RFC 3339 (date, time, duration), RFC 1123 (hostname), RFC 5321 and 6531 (email), RFC 5890 to 5893 (idn),
RFC 4291 (ipv6), RFC 3986 (uri), RFC 3987 (iri), RFC 6570 (uri-template), RFC 6901 (json-pointer), ECMA-262 (regex).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from llmppl.constraints.automata.decimals import Node, table_of
from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.formats import DATE, DAY, IPV4, MINUTE, UUID
from llmppl.constraints.automata.operations import Arrays, Edge
from llmppl.constraints.automata.regex import Regex
from llmppl.support.graphs import Numbering

__all__ = ["format_language"]

# ---- dates and times

_FULL_DATE = f"(?:{DATE}|0000-(?:{DAY}|02-29))"
_FRACTION = r"(?:\.[0-9]+)?"
_TIME = rf"{MINUTE}:[0-5][0-9]{_FRACTION}(?:[zZ]|[+-]{MINUTE})"
_UTC_LEAP = rf"23:59:60{_FRACTION}(?:[zZ]|[+-]00:00)"


def _leaps(*offsets: int) -> str:
    """Return the pattern of the local times of 23:59:60 in UTC, by offsets in minutes."""
    found: dict[str, list[str]] = {}
    for offset in offsets:
        sign, clock = "-" if offset < 0 else r"\+", _clock(abs(offset))
        found.setdefault(_clock((offset - 1) % 1440), []).append(sign + clock)
    return "|".join(f"{local}:60{_FRACTION}(?:{'|'.join(some)})" for local, some in sorted(found.items()))


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02}:{minutes % 60:02}"


def _time() -> DFA:
    return Regex(f"{_TIME}|{_UTC_LEAP}|{_leaps(*range(-1410, 0, 30), *range(30, 1440, 30))}")


def _date_time() -> DFA:
    behind, ahead = _leaps(*range(-720, 0, 30)), _leaps(*range(30, 841, 30))
    leap = f"[0-9]{{4}}-(?:(?:06-30|12-31)[tT](?:{_UTC_LEAP}|{behind})|(?:07-01|01-01)[tT](?:{ahead}))"
    return Regex(f"{_FULL_DATE}[tT]{_TIME}|{leap}")


def _duration() -> DFA:
    number = "[0-9]+"
    time = f"T(?:{number}H(?:{number}M(?:{number}S)?)?|{number}M(?:{number}S)?|{number}S)"
    date = f"(?:{number}Y(?:{number}M(?:{number}D)?)?|{number}M(?:{number}D)?|{number}D)"
    return Regex(f"P(?:{number}W|{date}(?:{time})?|{time})")


# ---- hosts

LABEL, HALF, HALVES = 63, 32, 7                     # characters of a label; a label takes one or two halves
LOCAL = 64                                          # characters of the local part of an email


def _hostname() -> DFA:
    """Return host names, built from their end. A label of n characters takes n // 32 + 1 of the seven halves."""
    nodes: Numbering[Node] = Numbering([((), False)])
    starts = [0]                                    # by the halves that are left
    for left in range(1, HALVES + 1):
        hyphen = other = 0                          # nodes after a hyphen, and after another character
        for size in range(min(LABEL, HALF * left - 1), 0, -1):
            more, dot = _edges("09AZaz", other), _edges("..", starts[left - size // HALF - 1])
            after = _edges("--", hyphen) + more
            hyphen, other = nodes[more if size == 3 else after, False], nodes[after + dot, True]
        starts.append(nodes[_edges("09AZaz", other), False])
    return table_of(nodes, starts[-1])


def _edges(pairs: str, target: int) -> tuple[Edge, ...]:
    """Return the edges to a node from pairs of first and last characters; none to node 0."""
    return tuple((ord(pairs[i]), ord(pairs[i + 1]), target) for i in range(0, len(pairs), 2) if target)


_EUROPEAN = "ß-öø-ÿāăąćĉċčďđēĕėęěĝğġģĥħĩīĭįıĵķĺļłńņňŋōŏőœŕŗřśŝşšţťŧũūŭůűųŵŷźżžά-ώа-џ"
_LETTERS = f"{_EUROPEAN}ぁ-ゖァ-ヺ一-龥가-힣"
_SEPARATOR = "[.\u3002\uff0e\uff61]"


def _idn_hostname() -> DFA:
    """Return names of 4 labels at most, each of at most 61 characters in ASCII, where others take Punycode digits.

    Source: RFC 3492, by which n letters take at most 4n digits if n = 14 and all are European, or 5n + 2 if n = 11.
    """
    char = f"[a-z0-9{_LETTERS}]"
    wide = f"[a-z0-9{_EUROPEAN}]{{1,14}}|{char}{{1,11}}|{char}{{1,5}}-{char}{{1,5}}"
    label = f"(?:[a-z0-9](?:-?[a-z0-9]){{0,30}}|{wide})"
    return Regex(rf"{label}(?:{_SEPARATOR}{label}){{0,3}}")


_HEX = "[0-9A-Fa-f]"
_GROUP = f"{_HEX}{{1,4}}"


@lru_cache(1)
def _ipv6_pattern() -> str:
    before = [f"{_GROUP}(?::{_GROUP}){{{n}}}" for n in range(7)]        # n + 1 groups
    short = [f"{first}::(?:{_GROUP}(?::{_GROUP}){{0,{5 - n}}})?" for n, first in enumerate(before[:6])]
    mixed = [f"{first}::(?:{_GROUP}:){{0,{4 - n}}}" for n, first in enumerate(before[:5])]
    plain = [f"::(?:{_GROUP}(?::{_GROUP}){{0,6}})?", f"{before[6]}(?:::|:{_GROUP})", *short]
    return f"(?:{'|'.join(plain)}|(?:(?:{_GROUP}:){{6}}|::(?:{_GROUP}:){{0,5}}|{'|'.join(mixed)}){IPV4})"


# ---- emails

_ATEXT = r"A-Za-z0-9!#$%&'*+/=?^_`{|}~\-"
_ATEXT_PAIRS = "09AZaz!!#'**++--//==??^`{~"


def _ascii_local_part() -> Arrays:
    """Return the local parts with the @ after them."""
    nodes: Numbering[Node] = Numbering([((), False), ((), True)])
    dot = other = 0
    for _ in range(LOCAL):
        after = _edges(_ATEXT_PAIRS, other)
        dot, other = nodes[after, False], nodes[(*after, *_edges("..", dot), *_edges("@@", 1)), False]
    atoms = table_of(nodes, nodes[_edges(_ATEXT_PAIRS, other), False])
    return _either(_arrays(atoms), _arrays(Regex(rf'"(?:[ !#-\[\]-~]|\\[ -~]){{0,{LOCAL // 2 - 1}}}"@')))


def _email() -> DFA:
    literal = Regex(rf"\[(?:{IPV4}|IPv6:{_ipv6_pattern()})\]")
    domain = _either(_arrays(_known("hostname")), _arrays(literal.minimise()))
    return DFA.from_table(*_then(_ascii_local_part(), domain))


def _idn_email() -> DFA:
    char = rf"[{_ATEXT}\x80-\U0010ffff]"
    wide = Regex(rf'(?:{char}(?:\.?{char}){{0,7}}|"[ !#-\[\]-~\x80-\U0010ffff]{{0,14}}")@')
    local = DFA.from_table(*_ascii_local_part()) | wide
    return DFA.from_table(*_then(_arrays(local.minimise()), _arrays(_known("idn-hostname"))))


# The numbers of `right` are shifted by those of `left` in the functions below.


def _arrays(dfa: DFA) -> Arrays:
    dfa.explore()
    return dfa.table, dfa.accepting, dfa.start


def _either(left: Arrays, right: Arrays) -> Arrays:
    """Return the texts of both, whose first bytes differ."""
    table, accepting, entry = _stacked(left, right)
    table[left[2]] += table[entry]
    return table, accepting, left[2]


def _then(left: Arrays, right: Arrays) -> Arrays:
    """Return texts of `left` followed by texts of `right`; no text of `left` begins another one."""
    table, accepting, entry = _stacked(left, right)
    last = np.flatnonzero(left[1])
    table[last], accepting[last] = table[entry], accepting[entry]
    return table, accepting, left[2]


def _stacked(left: Arrays, right: Arrays) -> Arrays:
    """Return the states of both, and the start of the second."""
    shift, below = len(left[0]) - 1, right[0][1:]
    table = np.concatenate([left[0], np.where(below > 0, below + shift, 0)])
    return table, np.concatenate([left[1], right[1][1:]]), right[2] + shift


# ---- identifiers of resources

_UCS = (
    "\xa0-\u200d\u2010-\u2029\u202f-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
    + "".join(f"{chr(plane << 16)}-{chr((plane << 16) + 0xFFFD)}" for plane in range(1, 14))
    + "\U000e1000-\U000efffd"
)
_PRIVATE = "\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd"
_PERCENT = f"%{_HEX}{{2}}"
_SUB = "!$&'()*+,;="
_PORT = "(?::[0-9]*)?"


def _uri(ucs: str = "", private: str = "", reference: bool = False) -> DFA:
    """Return the URIs (IRIs, if `ucs` and `private` have the characters), or the references to them."""
    char = rf"A-Za-z0-9._~\-{ucs}{_SUB}"

    def some(more: str, count: str = "*") -> str:
        return f"(?:[{char}{more}]|{_PERCENT}){count}"

    literal = rf"\[(?:{_ipv6_pattern()}|[vV]{_HEX}+\.[A-Za-z0-9._~\-{_SUB}:]+)\]"
    authority = f"//(?:{some(':')}@)?(?:{literal}|{some('')}){_PORT}"
    rooted = f"{authority}(?:/{some(':@')})*|/(?:{some(':@', '+')}(?:/{some(':@')})*)?"
    after = rf"(?:\?{some(':@/?' + private)})?(?:#{some(':@/?')})?"
    hierarchy = f"(?:{rooted}|{some(':@', '+')}(?:/{some(':@')})*)?"
    absolute = rf"[A-Za-z][A-Za-z0-9+.\-]*:{hierarchy}{after}"
    relative = f"(?:{rooted}|{some('@', '+')}(?:/{some(':@')})*)?{after}"
    return Regex(f"{absolute}|{relative}" if reference else absolute)


def _uri_template() -> DFA:
    literal = rf"[!#$&'()*+,\-./0-9:;=?@A-Z\[\]_a-z~{_UCS}{_PRIVATE}]"
    char = rf"(?:[A-Za-z0-9_]|{_PERCENT})"
    variable = rf"{char}(?:\.?{char})*(?::[1-9][0-9]{{0,3}}|\*)?"
    return Regex(rf"(?:{literal}|{_PERCENT}|\{{[+#./;?&]?{variable}(?:,{variable})*\}})*")


_POINTER = "(?s:/(?:[^/~]|~[01])*)*"

# ---- regexes


def _regex() -> DFA:
    """Return regular expressions with groups that are within at most one other; lookarounds hold no group."""
    escape = r"\\(?:[dDwWsStnrfv^$\\.*+?()\[\]{}|/]|c[A-Za-z])"
    spans = "0-[1-9]|1-9|a-[b-z]|A-[B-Z]"
    atom = rf"(?:[^\\^$.*+?()\[\]{{}}|/]|\.|{escape}|\[\^?(?:[^\\\[\]^-]|\\-|{escape}|{spans})*\])"
    limits = "|".join(f"{low},(?:[{low}-9]|[1-9][0-9]{{1,2}})" for low in range(10))
    quantifier = rf"(?:(?:[*+?]|\{{(?:[0-9]{{1,3}},?|{limits})\}})\??)?"
    assertion = r"[$^]|\\[bB]"
    bare = found = rf"(?:{atom}{quantifier}|{assertion}|\|)*"
    for _ in range(2):
        group, look = rf"\((?:\?:)?{found}\)", rf"\(\?<?[=!]{bare}\)"
        found = rf"(?:(?:{atom}|{group}){quantifier}|{assertion}|{look}|\|)*"
    return Regex(found)


# ---- all of them

_LANGUAGES: dict[str, Callable[[], DFA]] = {
    "date": lambda: Regex(_FULL_DATE),
    "time": _time,
    "date-time": _date_time,
    "duration": _duration,
    "email": _email,
    "idn-email": _idn_email,
    "hostname": _hostname,
    "idn-hostname": _idn_hostname,
    "ipv4": lambda: Regex(IPV4),
    "ipv6": lambda: Regex(_ipv6_pattern()),
    "uri": _uri,
    "uri-reference": lambda: _uri(reference=True),
    "iri": lambda: _uri(_UCS, _PRIVATE),
    "iri-reference": lambda: _uri(_UCS, _PRIVATE, reference=True),
    "uri-template": _uri_template,
    "uuid": lambda: Regex(UUID),
    "json-pointer": lambda: Regex(_POINTER),
    "relative-json-pointer": lambda: Regex(f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})"),
    "regex": _regex,
}


@lru_cache(32)
def _known(name: str) -> DFA:
    found = _LANGUAGES[name]()
    return found.minimise() if isinstance(found, Regex) else found      # the others have parts that are minimal


def format_language(name: str) -> DFA | None:
    """Return the texts of a format of JSON Schema, or None if the name is no such format. Equal calls share a DFA."""
    return _known(name) if name in _LANGUAGES else None
