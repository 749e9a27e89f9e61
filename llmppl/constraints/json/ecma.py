"""ECMA-262 regular expressions, as JSON Schema's `pattern` has them: automata of the texts in which one is found.

The dialect is that of unicode mode, with the usual additions of browsers where they have one meaning: `{` and `]` as
literals, and escaped punctuation. `_Reader` translates a pattern to Python's syntax, in which each class is a list of
code points. `^` and `$` at an end of the pattern become the absence of `.*` there, so that no guard is needed.

Source: ECMA-262, 22.2 and annex B.1.2.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import import_module
from typing import Any

from llmppl.constraints.automata.budget import TooLarge
from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.nfa import MAX_CODE_POINT, Ranges, merged
from llmppl.constraints.automata.regex import Regex
from llmppl.constraints.automata.unicode_classes import general_category, negated, points, properties

__all__ = ["found"]

MAX_GROUPS = 100                                    # inside each other
ANYTHING = "(?s:.*)"
LINE_ENDS = points("\n\r\u2028\u2029")
DIGITS = ((48, 57),)
WORD = ((48, 57), (65, 90), (95, 95), (97, 122))
FOLDED = points("\u017f\u212a")                     # a long s and the sign of Kelvin, which (?i) takes for s and k
SPACES = points("\t\n\v\f\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff") + ((0x2000, 0x200A),)
PROPERTIES = {"Any": ((0, MAX_CODE_POINT),), "ASCII": ((0, 127),)}
ALIASES = {"digit": "Nd", "punct": "P", "cntrl": "Cc", "Combining_Mark": "M"}
SIGNS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}

_FLAGS = re.compile(r"\(\?([ismx]+)\)")
_COUNT = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??")
_GROUP = re.compile(r"\((?:\?(?::|<?[=!]|<(?P<name>[^>=!][^>]*)>|(?P<flags>[ims]*-?[ims]*:))|(?!\?))")
_HEX = "[0-9a-fA-F]"
_CODE = re.compile(rf"x({_HEX}{{2}})|u({_HEX}{{4}})|u\{{0*({_HEX}{{1,6}})\}}|c([A-Za-z])|0(?![0-9])|([tnvfr])")
_LOW = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_PROPERTY = re.compile(r"([pP])\{([^{}]*)\}")
_COMMENT = re.compile(r"\s+|#[^\n]*")

Item = str | list[list[Any]]                        # Python's syntax, or the choices of a group; BEGIN or END
BEGIN, END = "^", "$"                               # alone; elsewhere, the anchors are \A and \Z


@lru_cache(1024)
def found(pattern: str) -> DFA:
    """Return the texts in which an ECMA-262 pattern is found. Leading flags such as `(?i)` mean those of Python.

    Raises
    ------
    ValueError
        The pattern has an error, or a construct that no automaton or only another dialect has.
    """
    try:
        return Regex(_Reader(pattern).translated())
    except TooLarge as error:
        raise ValueError(f"the pattern {pattern!r} is too large: {error.count}; {error.remedy}") from None
    except ValueError as error:
        reason = re.sub(r" at position \d+$", "", str(error).partition("\n")[0])
        raise ValueError(f"the pattern {pattern!r} (ECMA-262, unicode mode): {reason}") from None


class _Reader:
    """Translation of one pattern, from left to right, with a stack of open groups."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.at = pattern, 0
        flags = _FLAGS.match(pattern)
        self.flags = set(flags[1]) if flags else set[str]()
        self.at = flags.end() if flags else 0

    def translated(self) -> str:
        choices: list[list[Item]] = [[]]
        stack: list[tuple[str, list[list[Item]], set[str]]] = []        # opening, choices around it, flags
        while self.at < len(self.pattern):
            if "x" in self.flags and (comment := self.match(_COMMENT)):
                self.at = comment.end()
            elif group := self.match(_GROUP):
                stack.append((group[0], choices, self.flags))
                self.open(group, len(stack))
                choices = [[]]
            elif self.take("|"):
                choices.append([])
            elif self.take(")"):
                if not stack:
                    raise ValueError("a ) without a (")
                opening, outer, self.flags = stack.pop()
                item = self.counted(*_closed(opening, choices))
                choices = outer
                choices[-1].append(item)
            else:
                choices[-1].append(self.counted(*self.item()))
        if stack:
            raise ValueError(f"the group {stack[-1][0]} has no )")
        body = _open(choices, True, True)
        return f"(?i:{body})" if "i" in self.flags else body

    def match(self, regex: re.Pattern[str]) -> re.Match[str] | None:
        return regex.match(self.pattern, self.at)

    def take(self, text: str) -> bool:
        """Read `text` if it follows."""
        is_next = self.pattern.startswith(text, self.at)
        self.at += len(text) * is_next
        return is_next

    def open(self, group: re.Match[str], depth: int) -> None:
        self.at = group.end()
        if depth > MAX_GROUPS:
            raise ValueError(f"groups are nested more than {MAX_GROUPS} deep")
        if (name := group["name"]) and not name.replace("$", "_").isidentifier():
            raise ValueError(f"{name!r} is no name of a group")
        added, _, removed = (group["flags"] or "").rstrip(":").partition("-")
        self.flags = self.flags - set(removed) | set(added)

    def counted(self, item: Item, may_count: bool = True) -> Item:
        """Return the item with the quantifier that follows, if any."""
        count = self.match(_COUNT)
        if count is None:
            return item
        if not may_count:
            raise ValueError(f"nothing to repeat before {count[0]}")
        self.at = count.end()
        return f"(?:{_plain(item)}){count[0]}" if isinstance(item, list) else item + count[0]

    def item(self) -> tuple[Item, bool]:
        """Return one item outside of classes, and whether it may have a quantifier."""
        char = self.pattern[self.at]
        self.at += 1
        if char == "\\":
            return self.escape()
        if char in "^$":
            return (f"(?m:{char})" if "m" in self.flags else char), False
        if char == "." and "s" not in self.flags:
            return _class(negated(LINE_ENDS)), True
        if char in ".[":
            return (_class(PROPERTIES["Any"]) if char == "." else self.read_class()), True
        if char in "*+?" or (char == "(" and self.pattern.startswith("?", self.at)):
            raise ValueError("nothing to repeat" if char != "(" else "a group that ECMA-262 does not have: (?")
        if char == "{" and re.compile(r"[0-9]*,?[0-9]*\}").match(self.pattern, self.at):
            raise ValueError(r"{ begins no repeat: {0,n} counts, and \{ is the character")
        return _class(points(char)), True

    def escape(self) -> tuple[str, bool]:
        if self.take("b"):
            return r"(?a:\b)", False
        if self.take("B"):                          # in an empty text, too, unlike Python before 3.14
            return r"(?:(?a:\B)|\A\Z)", False
        if (follows := self.pattern[self.at : self.at + 1]) in [*"123456789k"]:
            raise ValueError(f"a backreference (\\{follows}), which no automaton has")
        return _class(self.escaped()), True

    def escaped(self) -> Ranges:
        """Return the characters of an escape, in a class or not."""
        kind = self.pattern[self.at : self.at + 1]
        if kind and kind in "dwsDWS":
            self.at += 1
            word = merged([*WORD, *FOLDED]) if "i" in self.flags else WORD
            return negated({"d": DIGITS, "w": word, "s": merged(SPACES)}[kind.lower()], kind.isupper())
        if escape := self.match(_PROPERTY):
            self.at = escape.end()
            return negated(_property(escape[2]), escape[1] == "P")
        if escape := self.match(_CODE):
            self.at = escape.end()
            code = _code(escape)
            if 0xD800 <= code < 0xDC00 and (low := self.match(_LOW)) and escape[2]:
                self.at = low.end()
                code = 0x10000 + (code - 0xD800) * 0x400 + int(low[1], 16) - 0xDC00
            if code > MAX_CODE_POINT:
                raise ValueError(f"\\{escape[0]} is beyond Unicode")
            return ((code, code),)
        if not kind or kind.isalnum():
            raise ValueError(f"\\{kind} is no escape" if kind else "nothing follows a backslash")
        self.at += 1
        return points(kind)

    def read_class(self) -> str:
        """Return a class whose bracket has been read."""
        negate, inside = self.take("^"), list[tuple[int, int]]()
        while not self.take("]"):
            low = self.member()
            if self.pattern[self.at : self.at + 1] == "-" and self.pattern[self.at + 1 : self.at + 2] not in ("]", ""):
                before, self.at = self.at, self.at + 1
                high = self.member()
                if len(low) == len(high) == 1 and low[0][0] == low[0][1] and high[0][0] == high[0][1]:
                    if low > high:
                        raise ValueError(f"the range {self.pattern[before - 1 : self.at]} is out of order")
                    low = ((low[0][0], high[0][0]),)
                else:                               # of [\w-.], in which no range can be meant
                    low = (*low, *high, (45, 45))
            inside += low
        return _class(merged(inside), negate)

    def member(self) -> Ranges:
        if self.at >= len(self.pattern):
            raise ValueError("a [ without a ]")
        if self.take("\\"):
            return ((8, 8),) if self.take("b") else ((45, 45),) if self.take("-") else self.escaped()
        self.at += 1
        return points(self.pattern[self.at - 1])


def _code(escape: re.Match[str]) -> int:
    """Return the code point of an escape with one."""
    digits, control, sign = escape[1] or escape[2] or escape[3], escape[4], escape[5]
    if digits:
        return int(digits, 16)
    return ord(control) % 32 if control else SIGNS[sign] if sign else 0


def _class(inside: Ranges, negate: bool = False) -> str:
    """Return Python's class of some characters; lone surrogates are in no text."""
    if not inside:
        return "(?s:.)" if negate else f"[^{_range(0, MAX_CODE_POINT)}]"
    if not negate and len(inside) == 1 and inside[0][0] == inside[0][1] and not 0xD800 <= inside[0][0] < 0xE000:
        return re.escape(chr(inside[0][0]))
    return f"[{'^' * negate}{''.join(_range(lo, hi) for lo, hi in inside)}]"


def _range(lo: int, hi: int) -> str:
    ends = [f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
            for code in (lo, hi)]                   # fmt: skip
    return "-".join(ends) if lo < hi else ends[0]


def _closed(opening: str, choices: list[list[Item]]) -> tuple[Item, bool]:
    """Return a group, and whether it may have a quantifier. Look-behinds are split, for Python's have one width."""
    if opening in ("(?=", "(?!"):
        return f"{opening}{_plain(choices)})", True
    if opening in ("(?<=", "(?<!"):
        parts = [f"{opening}{_plain([choice])})" for choice in choices]
        return (f"(?:{'|'.join(parts)})" if opening == "(?<=" else "".join(parts)), False
    if opening.startswith("(?") and not opening.startswith(("(?:", "(?<")):
        flags = opening[2:-1]
        if "i" in flags:
            return f"(?{'-' * (flags.find('i') > flags.find('-') >= 0)}i:{_plain(choices)})", True
    return choices, True


def _plain(choices: list[list[Item]]) -> str:
    """Return choices in the middle of a pattern."""
    return "|".join("".join(map(_part, choice)) for choice in choices)


def _part(item: Item) -> str:
    anchors = {BEGIN: r"\A", END: r"\Z"}
    return f"(?:{_plain(item)})" if isinstance(item, list) else anchors.get(item, item)


def _open(choices: list[list[Item]], left: bool, right: bool) -> str:
    """Return choices with any text before (`left`) and after (`right`), but for those that begin or end anchored."""
    sides: dict[tuple[bool, bool], list[str]] = {}
    for choice in choices:
        before, after, text = _sides(choice, left, right)
        sides.setdefault((before, after), []).append(text)
    return "|".join(
        f"{ANYTHING * before}(?:{'|'.join(texts)}){ANYTHING * after}" for (before, after), texts in sides.items()
    )


def _sides(choice: list[Item], left: bool, right: bool) -> tuple[bool, bool, str]:
    """Return whether any text may come before and after one choice, and the choice without anchors at its ends."""
    items = list(choice)
    if left and items[:1] == [BEGIN]:
        left, items = False, items[1:]
    if right and items[-1:] == [END]:
        right, items = False, items[:-1]
    if len(items) == 1 and isinstance(items[0], list):
        return False, False, _open(items[0], left, right)
    first, last = "", ""
    if left and items and isinstance(items[0], list):
        first, left, items = f"(?:{_open(items[0], True, False)})", False, items[1:]
    if right and items and isinstance(items[-1], list):
        last, right, items = f"(?:{_open(items[-1], False, True)})", False, items[:-1]
    return left, right, first + _plain([items]) + last


@lru_cache(128)
def _property(name: str) -> Ranges:
    """Return the characters with a property of Unicode. Raises ValueError if it is unknown."""
    kind, _, value = name.rpartition("=")
    if name in PROPERTIES:
        return PROPERTIES[name]
    short = general_category(ALIASES.get(value, value)) if kind in ("", "gc", "General_Category") else None
    if short is not None:
        return properties((short, False), False)
    if kind in ("sc", "Script", "scx", "Script_Extensions") or (not kind and value[:1].isupper()):
        return _named(name)
    raise ValueError(f"\\p{{{name}}} is no property of Unicode, such as L, Lu, Letter or Script=Greek")


def _named(name: str) -> Ranges:
    """Return the characters of a script or another property, by the package regex, which transformers needs."""
    regex: Any = import_module("regex")             # which has no types
    try:
        matches = regex.finditer(f"\\p{{{name}}}+", "".join(map(chr, range(MAX_CODE_POINT + 1))))
    except regex.error:
        raise ValueError(f"\\p{{{name}}} is no property of Unicode that the package regex knows") from None
    return tuple((match.start(), match.end() - 1) for match in matches)
