"""ECMA-262 regular expressions, as JSON Schema's `pattern` has them: automata of the texts in which one is found.

The dialect is that of unicode mode, with the usual additions of browsers where they have one meaning: `{` and `]` as
literals, and escaped punctuation. A pattern is translated to Python's syntax, in which each class is a list of code
points. `^` and `$` at the ends of a choice become the absence of `.*` there; elsewhere they are `\\A` and `\\Z`.

Source: ECMA-262, 22.2 and annex B.1.2.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import import_module
from typing import Any

from llmppl.constraints.automata.budget import TooLarge
from llmppl.constraints.automata.characters import general_category, negated, points, properties
from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.nfa import MAX_CODE_POINT, Ranges, merged
from llmppl.constraints.automata.regex import Regex

__all__ = ["found"]

MAX_GROUPS = 100                                    # inside each other
SPACES = (*points("\t\n\v\f\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"), (0x2000, 0x200A))
WORD = ((48, 57), (65, 90), (95, 95), (97, 122))
FOLDED = points("\u017f\u212a")                     # a long s and the sign of Kelvin, which (?i) takes for s and k
CLASSES = {"d": ((48, 57),), "w": WORD, "s": merged(SPACES)}
LINE_ENDS = points("\n\r\u2028\u2029")
EVERY = ((0, MAX_CODE_POINT),)
SIGNS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
ALIASES = {"digit": "Nd", "punct": "P", "cntrl": "Cc", "Combining_Mark": "M"}

_FLAGS = re.compile(r"\(\?([ims]+)\)")
_COUNT = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??")
_GROUP = re.compile(r"\((?:\?(?::|<?[=!]|<(?P<name>[A-Za-z_$][\w$]*)>|(?P<flags>[ims]*-?[ims]*:))|(?!\?))")
_HEX = "[0-9a-fA-F]"
_CODE = re.compile(rf"x({_HEX}{{2}})|u({_HEX}{{4}})|u\{{0*({_HEX}{{1,6}})\}}|c([A-Za-z])|(0(?![0-9])|[tnvfr])")
_PAIR = re.compile(rf"u([dD][89abAB]{_HEX}{{2}})\\u([dD][c-fC-F]{_HEX}{{2}})")
_PROPERTY = re.compile(r"([pP])\{([^{}]*)\}")


@lru_cache(1024)
def found(pattern: str) -> DFA:
    """Return the texts in which an ECMA-262 pattern is found. Leading flags such as `(?i)` mean those of Python.

    Raises
    ------
    ValueError
        The pattern has an error, or a construct that no automaton or only another dialect has.
    """
    try:
        return Regex(_Translation(pattern).text())
    except TooLarge as error:
        raise ValueError(f"the pattern {pattern!r} is too large: {error.count}; {error.remedy}") from None
    except ValueError as error:
        reason = re.sub(r" at position \d+$", "", str(error).partition("\n")[0])
        raise ValueError(f"the pattern {pattern!r} (ECMA-262, unicode mode): {reason}") from None


class _Translation:
    """Translation of one pattern, from left to right."""

    def __init__(self, pattern: str) -> None:
        flags = _FLAGS.match(pattern)
        self.pattern, self.at = pattern, flags.end() if flags else 0
        self.flags = set(flags[1]) if flags else set[str]()

    def text(self) -> str:
        choices: list[list[str]] = [[]]             # of the pattern itself, outside of groups
        groups: list[tuple[list[str], set[str], str]] = []     # what is before a group, its flags, and its opening
        items = choices[0]
        is_counted = False                          # True if the last item may have a quantifier
        while self.at < len(self.pattern):
            if group := self.match(_GROUP):
                if len(groups) >= MAX_GROUPS:
                    raise ValueError(f"groups are nested more than {MAX_GROUPS} deep")
                added, _, removed = (group["flags"] or "").rstrip(":").partition("-")
                is_plain = group["name"] or group["flags"] or group[0] == "("
                case = "(?i:" if "i" in added else "(?-i:" if "i" in removed else "(?:"
                groups.append((items, self.flags, case if is_plain else group[0]))
                self.flags = self.flags - set(removed) | set(added)
                items, is_counted = [], False
            elif count := self.match(_COUNT):
                if not is_counted:
                    raise ValueError(f"nothing to repeat before {count[0]}")
                items[-1] += count[0]
                is_counted = False
            elif self.take("|"):
                if groups:
                    items.append("|")
                else:
                    items = []
                    choices.append(items)
                is_counted = False
            elif self.take(")"):
                if not groups:
                    raise ValueError("a ) without a (")
                inside, (items, self.flags, opening) = "".join(map(_anchored, items)), groups.pop()
                items.append(f"{opening}{inside})")
                is_counted = not opening.startswith("(?<")
            else:
                item, is_counted = self.item()
                items.append(item)
        if groups:
            raise ValueError(f"the group {groups[-1][2]} has no )")
        body = "|".join(map(_open, choices))
        return f"(?i:{body})" if "i" in self.flags else body

    def match(self, regex: re.Pattern[str]) -> re.Match[str] | None:
        """Read what a regex matches here."""
        match = regex.match(self.pattern, self.at)
        self.at = match.end() if match else self.at
        return match

    def take(self, text: str) -> bool:
        """Read `text` if it follows."""
        is_next = self.pattern.startswith(text, self.at)
        self.at += len(text) * is_next
        return is_next

    def item(self) -> tuple[str, bool]:
        """Return one item outside of classes, and whether it may have a quantifier."""
        if self.take("\\b"):
            return r"(?a:\b)", False
        if self.take("\\B"):                        # in an empty text, too, unlike Python before 3.14
            return r"(?:(?a:\B)|\A\Z)", False
        if self.take("["):
            return self.read_class(), True
        if self.take("."):
            return _class(EVERY if "s" in self.flags else negated(LINE_ENDS)), True
        if self.match(re.compile(r"\((?=\?)")):
            raise ValueError("a group that ECMA-262 does not have: (?")
        if self.match(re.compile(r"\{[0-9]*,?[0-9]*\}")):
            raise ValueError(r"{ begins no repeat: {0,n} counts, and \{ is the character")
        char = self.pattern[self.at]
        if char in "^$":
            self.at += 1
            return (f"(?m:{char})" if "m" in self.flags else char), False
        return _class(self.member()), True

    def member(self) -> Ranges:
        """Return the characters of an escape, or the next one."""
        if not self.take("\\"):
            self.at += 1
            return points(self.pattern[self.at - 1])
        if kind := self.match(re.compile("[dwsDWS]")):
            inside = merged([*WORD, *FOLDED]) if "i" in self.flags and kind[0] in "wW" else CLASSES[kind[0].lower()]
            return negated(inside, kind[0].isupper())
        if escape := self.match(_PROPERTY):
            return negated(_property(escape[2]), escape[1] == "P")
        if pair := self.match(_PAIR):
            code = 0x10000 + (int(pair[1], 16) - 0xD800) * 0x400 + int(pair[2], 16) - 0xDC00
            return ((code, code),)
        if escape := self.match(_CODE):
            digits, control, sign = escape[1] or escape[2] or escape[3], escape[4], escape[5]
            code = int(digits, 16) if digits else ord(control) % 32 if control else SIGNS[sign]
            if code > MAX_CODE_POINT:
                raise ValueError(f"\\{escape[0]} is beyond Unicode")
            return ((code, code),)
        kind = self.pattern[self.at : self.at + 1]
        if kind and kind in "123456789k":
            raise ValueError(f"a backreference (\\{kind}), which no automaton has")
        if not kind or kind.isalnum():
            raise ValueError(f"\\{kind} is no escape" if kind else "nothing follows a backslash")
        self.at += 1
        return points(kind)

    def read_class(self) -> str:
        """Return a class whose bracket has been read."""
        negate, inside = self.take("^"), list[tuple[int, int]]()
        while not self.take("]"):
            low = self.class_member()
            if self.match(re.compile(r"-(?!\])")):
                high = self.class_member()
                if len(low) == len(high) == 1 and low[0][0] == low[0][1] and high[0][0] == high[0][1]:
                    if low > high:
                        raise ValueError("a range of a class is out of order")
                    low = ((low[0][0], high[0][0]),)
                else:                               # of [\w-.], in which no range can be meant
                    low = (*low, *high, (45, 45))
            inside += low
        return _class(merged(inside), negate)

    def class_member(self) -> Ranges:
        if self.at >= len(self.pattern):
            raise ValueError("a [ without a ]")
        return ((8, 8),) if self.take("\\b") else ((45, 45),) if self.take("\\-") else self.member()


def _open(items: list[str]) -> str:
    """Return a choice of the pattern with any text around it, except at an anchor."""
    begins, ends = items[:1] == ["^"], items[-1:] == ["$"] and len(items) > 0
    inside = "".join(map(_anchored, items[begins : len(items) - ends]))
    if "|" in inside:
        inside = f"(?:{inside})"
    anything = "(?s:.*)"
    return anything * (not begins) + inside + anything * (not ends)


def _anchored(item: str) -> str:
    return {"^": r"\A", "$": r"\Z"}.get(item, item)


def _class(inside: Ranges, negate: bool = False) -> str:
    """Return Python's class of some characters; lone surrogates are in no text."""
    if not inside:
        return "(?s:.)" if negate else f"[^{_range(0, MAX_CODE_POINT)}]"
    if not negate and len(inside) == 1 and inside[0][0] == inside[0][1] and not 0xD800 <= inside[0][0] < 0xE000:
        return re.escape(chr(inside[0][0]))
    return f"[{'^' * negate}{''.join(_range(lo, hi) for lo, hi in inside)}]"


def _range(lo: int, hi: int) -> str:
    return f"\\U{lo:08x}-\\U{hi:08x}" if lo < hi else f"\\U{lo:08x}"


@lru_cache(128)
def _property(name: str) -> Ranges:
    """Return the characters with a property of Unicode. Raises ValueError if it is unknown."""
    kind, _, value = name.rpartition("=")
    if name in ("Any", "ASCII"):
        return EVERY if name == "Any" else ((0, 127),)
    short = general_category(ALIASES.get(value, value)) if kind in ("", "gc", "General_Category") else None
    if short is not None:
        return properties((short, False), False)
    regex: Any = import_module("regex")             # which has no types; transformers needs it
    try:
        matches = regex.finditer(f"\\p{{{name}}}+", "".join(map(chr, range(MAX_CODE_POINT + 1))))
    except regex.error:
        raise ValueError(f"\\p{{{name}}} is no property of Unicode, such as L, Lu or Script=Greek") from None
    return tuple((match.start(), match.end() - 1) for match in matches)
