"""ECMA-262 regular expressions, as JSON Schema's `pattern` has them: automata of the texts in which one is found.

A pattern is read token by token (`_TOKEN`) and written in Python's syntax. `^` and `$` at the ends of a choice become
the absence of `.*` there; elsewhere they are `\\A` and `\\Z`. Source: ECMA-262, 22.2 and annex B.1.2 (unicode mode).
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import import_module
from typing import Any

from llmppl.constraints.automata.budget import TooLarge
from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.regex import Regex

regex: Any = import_module("regex")                 # it has no types
MAX_SECONDS = 2
_SPACES = r"\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_NO_SPACES = (
    r"\x00-\x08\x0e-\x1f!-\x9f\xa1-\u167f\u1681-\u1fff\u200b-\u2027\u202a-\u202e\u2030-\u205e\u2060-\u2fff\u3001-\ufefe"
    r"\uff00-\U0010ffff"
)
_HEX = "[0-9a-fA-F]"
_ESCAPE = (
    rf"\\(?P<code>x{_HEX}{{2}}|u{_HEX}{{4}}|u\{{{_HEX}{{1,6}}\}}|c[A-Za-z]|0(?![0-9]))|\\(?P<same>[nrtfv])"
    r"|\\(?P<kind>[dwsDWS]|[pP]\{[^{}]*\})|\\(?P<sign>[^\w]|_)"
)
_TOKEN = re.compile(
    rf"{_ESCAPE}|(?P<class>\[\^?(?:\\.|[^\\\]])*\])|(?P<edge>\\[bB])"
    r"|(?P<open>\((?:\?(?::|<?[=!]|<[A-Za-z_$][\w$]*>)|(?!\?)))|(?P<count>(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??(?!\+))"
    r"|(?P<plain>(?!\{,?[0-9]*\})[^\\(*+?\[])|(?P<wrong>\\.|.{1,3})", re.DOTALL
)  # fmt: skip
_MEMBER = re.compile(rf"{_ESCAPE}|\\(?P<back>b)|(?P<hyphen>-|\\-)|(?P<plain>[^\\])|(?P<wrong>\\.|.{{1,3}})", re.DOTALL)
_PAIR = re.compile(r"\\u([dD][89abAB]..)\\u([dD][c-fC-F]..)")


@lru_cache(1024)
def found(pattern: str) -> DFA:
    """Return the texts in which an ECMA-262 pattern is found; a leading `(?i)` ignores case.

    Raises ValueError if the pattern has an error, or a construct that no automaton or only another dialect has, and
    TooLarge if the automaton is.
    """
    try:
        return Regex(_translated(pattern))
    except TooLarge as error:
        raise TooLarge(f"the pattern {pattern!r} (ECMA-262, unicode mode)", error.count, error.remedy) from None
    except RecursionError:
        reason = "its groups are nested too deep"
    except ValueError as error:
        reason = re.sub(r" at position \d+$", "", str(error).partition("\n")[0])
    raise ValueError(f"the pattern {pattern!r} (ECMA-262, unicode mode): {reason}")


class Backtracking:
    """Texts in which a pattern is found, by the package regex: for a pattern whose automaton is too large."""

    def __init__(self, pattern: str) -> None:
        self._pattern = regex.compile(_translated(pattern))

    def __contains__(self, text: object) -> bool:
        try:
            return bool(self._pattern.fullmatch(text, timeout=MAX_SECONDS))
        except TimeoutError:
            raise ValueError(f"the pattern takes more than {MAX_SECONDS} s to read the finished text") from None


@lru_cache(1024)
def matcher(pattern: str) -> DFA | Backtracking:
    """Return the same texts for a test of whole ones."""
    try:
        return found(pattern)
    except TooLarge:
        return Backtracking(pattern)


def _translated(pattern: str) -> str:
    flag, bare = ("(?i)", pattern[4:]) if pattern.startswith("(?i)") else ("", pattern)
    choices = [list[str]()]
    depth = 0
    for token in _TOKEN.finditer(_PAIR.sub(_of_surrogates, bare)):
        kind = token.lastgroup
        text = token[0]
        depth += (kind == "open") - (text == ")")
        if depth < 0:
            raise ValueError("a ) without a (")
        if text == "|" and not depth:
            choices.append([])
        else:
            choices[-1].append(text if text in ("^", "$") and not depth else _written(token))
    whole: dict[tuple[str, str], list[str]] = {}        # choices by the text that may stand before and after them
    for items in choices:
        begins = items[:1] == ["^"]
        ends = items[-1:] == ["$"]
        inside = "".join({"^": r"\A", "$": r"\Z"}.get(item, item) for item in items[begins : len(items) - ends])
        whole.setdefault(("" if begins else "(?s:.*)", "" if ends else "(?s:.*)"), []).append(inside)
    return flag + "|".join(f"{before}(?:{'|'.join(some)}){after}" for (before, after), some in whole.items())


_PLAIN = {".": r"[^\n\r\u2028\u2029]", "^": r"\A", "$": r"\Z", "|": "|", ")": ")"}
_IN_CLASS = {r"\s": _SPACES, r"\S": _NO_SPACES, r"\d": "0-9", r"\w": "0-9A-Za-z_"}
_KINDS = {r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]"}


def _written(token: re.Match[str]) -> str:
    """Return one token outside of classes, as Python has it."""
    text = token[0]
    match token.lastgroup:
        case "class":
            return _class(text)
        case "kind":
            return _KINDS.get(text) or (text if text[1] in "pP" else f"(?a:{text})")
        case "edge":                                # Python's \B is not in an empty text before 3.14
            return r"(?a:\b)" if text == r"\b" else r"(?:(?a:\B)|\A\Z)"
        case "plain":
            return _PLAIN.get(text) or re.escape(text)
        case "open":
            return "(?:" if text.startswith("(?<") and text[3] not in "=!" else text
    return text if token.lastgroup == "count" else _character(token)


def _class(text: str) -> str:
    """Return a class; a hyphen beside `\\d` and the like stands for itself."""
    negated = text[1:2] == "^"
    members = [*_MEMBER.finditer(text[1:-1].removeprefix("^"))]
    if not members:
        return r"(?s:.)" if negated else r"[^\x00-\U0010ffff]"
    kinds = [False, *(member.lastgroup == "kind" for member in members), False]
    inside = ""
    for member, after_kind, before_kind in zip(members, kinds, kinds[2:], strict=False):
        if member.lastgroup == "kind":
            inside += _IN_CLASS.get(member[0], member[0])
        else:
            inside += "-" if member[0] == "-" and not (after_kind or before_kind) else _character(member)
    found = f"[{'^' * negated}{inside}]"
    return f"(?a:{found})" if re.search(r"\\[DW]", text) else found


def _character(token: re.Match[str]) -> str:
    """Return one character, escaped or plain, as Python has it."""
    kind = token.lastgroup
    code = token["code"] or ""
    text = token[0]
    if kind == "wrong":
        remedies = {"{": r"; {0,n} counts, and \{ is the character", "\\": "; letters and digits need no backslash"}
        raise ValueError(f"ECMA-262 has no {text}, or no automaton has it{remedies.get(text[0], '')}")
    if kind == "same":
        return text
    if not code:
        return r"\x08" if kind == "back" else re.escape(text[-1])
    value = ord(code[1]) % 32 if code[0] == "c" else int(code.lstrip("xu{").rstrip("}"), 16)
    if value > 0x10FFFF:
        raise ValueError(f"\\{code} is beyond Unicode")
    return f"\\U{value:08x}"


def _of_surrogates(pair: re.Match[str]) -> str:
    high, low = (int(half, 16) for half in pair.groups())
    return f"\\u{{{0x10000 + (high - 0xD800) * 0x400 + low - 0xDC00:x}}}"
