"""ECMA-262 regular expressions, as JSON Schema's `pattern` has them: automata of the texts in which one is found.

A pattern is read token by token (`_TOKEN`) and written in Python's syntax. `^` and `$` at the ends of a choice become
the absence of `.*` there; elsewhere they are `\\A` and `\\Z`. Source: ECMA-262, 22.2 and annex B.1.2 (unicode mode).
"""

from __future__ import annotations

import re
from functools import lru_cache

from llmppl.constraints.automata.budget import TooLarge
from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.regex import Regex

__all__ = ["found"]

MAX_GROUPS = 100                                    # inside each other
_SPACES = r"\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_INSIDE = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACES}
_HEX = "[0-9a-fA-F]"
_ESCAPE = (
    rf"\\(?P<code>x{_HEX}{{2}}|u{_HEX}{{4}}|u\{{{_HEX}{{1,6}}\}}|c[A-Za-z]|0(?![0-9]))|\\(?P<same>[nrtfv])"
    r"|\\(?P<kind>[dwsDWS])|\\(?P<property>[pP]\{[^{}]*\})|\\(?P<sign>[^\w]|_)"
)
_TOKEN = re.compile(
    rf"{_ESCAPE}|(?P<class>\[\^?(?:\\.|[^\\\]])*\])|(?P<edge>\\[bB])|(?P<name>\(\?<[A-Za-z_$][\w$]*>)"
    r"|(?P<open>\((?:\?(?::|<?[=!])|(?!\?)))|(?P<count>(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??)|(?P<brace>\{[0-9]*,?[0-9]*\})"
    r"|(?P<plain>[^\\(*+?\[])", re.DOTALL
)  # fmt: skip
_MEMBER = re.compile(rf"{_ESCAPE}|\\(?P<back>[b-])|(?P<plain>[^\\])", re.DOTALL)
_PAIR = re.compile(r"\\u([dD][89abAB]..)\\u([dD][c-fC-F]..)")


@lru_cache(1024)
def found(pattern: str) -> DFA:
    """Return the texts in which an ECMA-262 pattern is found; a leading `(?i)` ignores case.

    Raises ValueError if the pattern has an error, or a construct that no automaton or only another dialect has.
    """
    try:
        return Regex(_translated(pattern))
    except TooLarge as error:
        raise ValueError(f"the pattern {pattern!r} is too large: {error.count}; {error.remedy}") from None
    except (ValueError, RecursionError) as error:
        reason = re.sub(r" at position \d+$", "", str(error).partition("\n")[0])
        raise ValueError(f"the pattern {pattern!r} (ECMA-262, unicode mode): {reason}") from None


def _translated(pattern: str) -> str:
    flag, bare = ("(?i)", pattern[4:]) if pattern.startswith("(?i)") else ("", pattern)
    bare = _PAIR.sub(lambda pair: re.escape(_character(*pair.groups())), bare)
    choices, depth, at, may_count = [list[str]()], 0, 0, False
    while at < len(bare):
        token = _TOKEN.match(bare, at)
        if token is None:
            raise ValueError(f"ECMA-262 has no {bare[at : at + 3]}, or no automaton has it")
        at, kind, text = token.end(), token.lastgroup, token[0]
        depth += (kind in ("open", "name")) - (text == ")")
        if not 0 <= depth <= MAX_GROUPS:
            raise ValueError("a ) without a (" if depth < 0 else f"groups are nested more than {MAX_GROUPS} deep")
        if kind == "count" and not may_count:
            raise ValueError(f"nothing to repeat before {text}")
        if kind == "brace":
            raise ValueError(r"{ begins no repeat: {0,n} counts, and \{ is the character")
        may_count = not (kind in ("count", "open", "name", "edge") or (kind == "plain" and text in "^$|"))
        if text == "|" and not depth:
            choices.append([])
        elif depth or text not in ("^", "$"):
            choices[-1].append(_outside(token, kind, text))
        else:
            choices[-1].append(text)
    if depth:
        raise ValueError("a ( without a )")
    return flag + "|".join(map(_anywhere, choices))


def _anywhere(items: list[str]) -> str:
    """Return a choice with any text around it, except at its anchors."""
    begins, ends = items[:1] == ["^"], items[-1:] == ["$"]
    inside = "".join({"^": r"\A", "$": r"\Z"}.get(item, item) for item in items[begins : len(items) - ends])
    return f"{'' if begins else '(?s:.*)'}(?:{inside}){'' if ends else '(?s:.*)'}"


def _outside(token: re.Match[str], kind: str | None, text: str) -> str:
    """Return one token outside of classes."""
    if kind == "class":
        return _class(text)
    if kind == "kind":
        return f"[{'^' * token['kind'].isupper()}{_INSIDE[token['kind'].lower()]}]"
    if kind == "edge":                              # Python's \B is not in an empty text before 3.14
        return r"(?a:\b)" if text == r"\b" else r"(?:(?a:\B)|\A\Z)"
    if kind == "plain":
        return {".": r"[^\n\r\u2028\u2029]", "^": r"\A", "$": r"\Z", "|": "|", ")": ")"}.get(text) or re.escape(text)
    return "(?:" if kind == "name" else _escaped(token) if kind in ("code", "same", "sign") else text


def _class(text: str) -> str:
    """Return a class; a hyphen beside `\\d` and the like stands for itself."""
    negated, inside, made, after_kind = text[1:2] == "^", text[1:-1].removeprefix("^"), "", False
    for token in _MEMBER.finditer(inside):
        kind, is_kind = token.lastgroup, token["kind"] or token["property"]
        if kind == "kind" and token["kind"].isupper():
            complement = {"D": r"\x00-/:-\U0010ffff", "W": r"\x00-/:-@\[-^`{-\U0010ffff", "S": _OTHERS}
            made += complement[token["kind"]]
        elif kind == "kind":
            made += _INSIDE[token["kind"]]
        elif token[0] == "-" and not (after_kind or re.match(r"\\[dwsDWSpP]", inside[token.end() :])):
            made += "-"
        else:
            made += token[0] if is_kind else r"\x08" if token[0] == r"\b" else _escaped(token)
        after_kind = bool(is_kind)
    if len("".join(token[0] for token in _MEMBER.finditer(inside))) != len(inside):
        raise ValueError(f"{text} has an escape that ECMA-262 has not")
    if not made:
        return r"(?s:.)" if negated else r"[^\x00-\U0010ffff]"
    return f"[{'^' * negated}{made}]"


_OTHERS = (
    r"\x00-\x08\x0e-\x1f!-\x9f\xa1-\u167f\u1681-\u1fff\u200b-\u2027\u202a-\u202e\u2030-\u205e\u2060-\u2fff\u3001-\ufefe"
    r"\uff00-\U0010ffff"
)


def _escaped(token: re.Match[str]) -> str:
    """Return one character, escaped or plain, as Python has it."""
    code = token["code"]
    if token["same"]:
        return token[0]
    if code:
        char = chr(ord(code[1]) % 32) if code[0] == "c" else "\0" if code == "0" else _character(code[1:].strip("{}"))
        return f"\\U{ord(char):08x}"
    return re.escape(token[0][-1])


def _character(code: str, low: str = "") -> str:
    value = int(code, 16)
    if low:
        value = 0x10000 + (value - 0xD800) * 0x400 + int(low, 16) - 0xDC00
    if value > 0x10FFFF:
        raise ValueError(f"\\u{{{code}}} is beyond Unicode")
    return chr(value)
