"""ECMA-262 regular expressions, as JSON Schema's `pattern` has them: automata of the texts in which one is found.

A pattern is read token by token (`_TOKEN`) and written in Python's syntax. `^` and `$` at the ends of a choice become
the absence of `.*` there; elsewhere they are `\\A` and `\\Z`. Source: ECMA-262, 22.2 and annex B.1.2 (unicode mode).
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import lru_cache
from importlib import import_module
from typing import Any

from llmppl.constraints.automata.budget import TooLarge
from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.regex import Regex

regex: Any = import_module("regex")  # it has no types
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
    r"|(?P<plain>(?!\{,?[0-9]*\})[^\\(*+?\[])|(?P<wrong>\\.|.{1,3})",
    re.DOTALL,
)
_MEMBER = re.compile(
    rf"{_ESCAPE}|\\(?P<back>b)|(?P<hyphen>-|\\-)|(?P<plain>[^\\])|(?P<wrong>\\.|.{{1,3}})",
    re.DOTALL,
)
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
        raise TooLarge(
            f"the pattern {pattern!r} (ECMA-262, unicode mode)", error.count, error.remedy
        ) from None
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
            raise ValueError(
                f"the pattern takes more than {MAX_SECONDS} s to read the finished text"
            ) from None


@lru_cache(1024)
def matcher(pattern: str) -> DFA | Backtracking:
    """Return the same texts for a test of whole ones."""
    try:
        return found(pattern)
    except TooLarge:
        return Backtracking(pattern)


def _translated(pattern: str) -> str:
    bare = pattern.removeprefix("(?i)")
    flag = pattern[: len(pattern) - len(bare)]
    whole = defaultdict[tuple[str, str], list[str]](
        list
    )  # choices by the texts before and after them
    for items in _choices(bare):
        before = after = "(?s:.*)"
        if items[:1] == ["^"]:
            before = ""
            items = items[1:]
        if items[-1:] == ["$"]:
            after = ""
            items = items[:-1]
        inside = "".join(_PLAIN.get(item, item) for item in items)
        whole[before, after].append(inside)
    return flag + "|".join(
        f"{before}(?:{'|'.join(some)}){after}" for (before, after), some in whole.items()
    )


def _choices(pattern: str) -> list[list[str]]:
    """Return the outermost choices of a pattern: tokens as Python has them, but `^` and `$` outside of groups."""
    choices = [list[str]()]
    depth = 0
    for token in _TOKEN.finditer(_PAIR.sub(_of_surrogates, pattern)):
        text = token[0]
        if token.lastgroup == "open":
            depth += 1
        elif text == ")":
            depth -= 1
        if depth < 0:
            raise ValueError("a ) without a (")
        if text == "|" and not depth:
            choices.append([])
        elif text in ("^", "$") and not depth:
            choices[-1].append(text)
        else:
            choices[-1].append(_written(token))
    return choices


_PLAIN = {".": r"[^\n\r\u2028\u2029]", "^": r"\A", "$": r"\Z", "|": "|", ")": ")"}
_IN_CLASS = {r"\s": _SPACES, r"\S": _NO_SPACES, r"\d": "0-9", r"\w": "0-9A-Za-z_"}
_KINDS = {r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]"}
_KINDS |= {kind: f"(?a:{kind})" for kind in (r"\d", r"\D", r"\w", r"\W")}
_EDGES = {
    r"\b": r"(?a:\b)",
    r"\B": r"(?:(?a:\B)|\A\Z)",
}  # Python's \B is not in an empty text before 3.14


def _written(token: re.Match[str]) -> str:
    """Return one token outside of classes, as Python has it."""
    text = token[0]
    match token.lastgroup:
        case "class":
            return _class(text)
        case "kind":
            return _KINDS.get(text, text)
        case "edge":
            return _EDGES[text]
        case "plain":
            return _PLAIN.get(text) or re.escape(text)
        case "count":
            return text
        case "open":
            is_named = text.startswith("(?<") and text[3] not in "=!"
            return "(?:" if is_named else text
    return _character(token)


def _class(text: str) -> str:
    """Return a class; a hyphen beside `\\d` and the like stands for itself."""
    bare = text[1:-1]
    members = [*_MEMBER.finditer(bare.removeprefix("^"))]
    if not members:
        return r"(?s:.)" if bare else r"[^\x00-\U0010ffff]"
    kinds = [False, *(member.lastgroup == "kind" for member in members), False]
    inside = "^" if bare[0] == "^" else ""
    for member, after_kind, before_kind in zip(members, kinds, kinds[2:], strict=False):
        if member.lastgroup == "kind":
            inside += _IN_CLASS.get(member[0], member[0])
        elif member[0] == "-" and not after_kind and not before_kind:
            inside += "-"
        else:
            inside += _character(member)
    if re.search(r"\\[DW]", text):
        return f"(?a:[{inside}])"
    return f"[{inside}]"


def _character(token: re.Match[str]) -> str:
    """Return one character, escaped or plain, as Python has it."""
    text = token[0]
    match token.lastgroup:
        case "wrong":
            remedies = {
                "{": r"; {0,n} counts, and \{ is the character",
                "\\": "; letters and digits need no backslash",
            }
            raise ValueError(
                f"ECMA-262 has no {text}, or no automaton has it{remedies.get(text[0], '')}"
            )
        case "same":
            return text
        case "back":
            return r"\x08"
        case "code":
            return _coded(token["code"])
    return re.escape(text[-1])


def _coded(code: str) -> str:
    if code[0] == "c":
        value = ord(code[1]) % 32
    else:
        value = int(code.strip("xu{}"), 16)
    if value > 0x10FFFF:
        raise ValueError(f"\\{code} is beyond Unicode")
    return f"\\U{value:08x}"


def _of_surrogates(pair: re.Match[str]) -> str:
    high = int(pair[1], 16) - 0xD800
    low = int(pair[2], 16) - 0xDC00
    return f"\\u{{{0x10000 + high * 0x400 + low:x}}}"
