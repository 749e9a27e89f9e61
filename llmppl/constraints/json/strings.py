"""Strings of JSON: a language of texts between quotes.

A string without a language may have any escapes. With a language, each text has one spelling, that of RFC 8785, which
pydantic, JavaScript and Python's `json.dumps(..., ensure_ascii=False)` write; so have names of properties.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import lru_cache, reduce
from operator import and_, or_
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from llmppl.constraints.automata.budget import TooLarge
from llmppl.constraints.automata.dfa import DFA, anything
from llmppl.constraints.automata.regex import Regex
from llmppl.constraints.json.frames import DONE, Expansion, Frame, Key, Move
from llmppl.constraints.json.shapes import ANY, Choice, Constants, Shape, String, language
from llmppl.constraints.masks.distances import bytes_to_accept
from llmppl.support.locks import cached_property

__all__ = ["Quoted", "cut", "escapes", "quoted", "spelled", "texts_of"]

T = TypeVar("T")

MAX_STATES = 20_000                                 # of a language that is explored
MAX_BOUND = 1_000                                   # of the length of a string with a language
_PAIR = r"[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"      # of surrogates
ESCAPE = rf'["\\/bfnrt]|u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{{3}}|[dD][0-7][0-9a-fA-F]{{2}}|{_PAIR})'
SPELLED = {byte: json.dumps(chr(byte))[2:-1] for byte in (*range(32), 34, 92)}      # after a backslash
ESCAPED = tuple(SPELLED)


def spelled(name: str) -> bytes:
    """Return the bytes of a text between its quotes."""
    return json.dumps(name, ensure_ascii=False)[1:-1].encode()


def escapes(read: str, after: Callable[[int], T | None]) -> Iterator[tuple[int, str | T]]:
    """Yield the bytes that may follow a backslash and `read`, each with a longer `read`, or with `after(byte)`."""
    longer: dict[str, T] = {}
    for byte, code in SPELLED.items():
        if code.startswith(read) and (target := after(byte)) is not None:
            if len(code) == len(read) + 1:
                yield ord(code[-1]), target
            else:
                longer[code[: len(read) + 1]] = target
    yield from ((ord(code[-1]), code) for code in longer)


def cut(lo: int, hi: int, at: tuple[int, ...] = ESCAPED) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range of bytes without some bytes (ascending)."""
    for byte in at:
        if lo <= byte <= hi:
            if lo < byte:
                yield lo, byte - 1
            lo = byte + 1
    if lo <= hi:
        yield lo, hi


@lru_cache(1_000)
def _content(shape: String) -> DFA | None:
    """Return the texts of all languages of a string; None if it has none. Raises ValueError if it is too large."""
    dfas = [language(*each[:2]) if each[2] else anything() - language(*each[:2]) for each in shape.languages]
    if dfas and (shape.least or shape.most < math.inf):
        last = "" if shape.most == math.inf else str(int(shape.most))
        if max(shape.least, int(last or 0)) > MAX_BOUND:
            raise TooLarge("a string with a pattern or format", f"a bound of its length above {MAX_BOUND:,}")
        dfas.append(Regex(f"(?s:.{{{shape.least},{last}}})"))
    if len(dfas) > 1:
        for dfa in dfas:
            dfa.explore(MAX_STATES)
    return reduce(and_, dfas) if dfas else None


def texts_of(shape: Shape) -> DFA:
    """Return the texts of the strings of a shape, with their bounds."""
    match shape:
        case Choice():
            return reduce(or_, map(texts_of, shape.options), DFA.from_strings([]))
        case Constants():
            return DFA.from_strings([value for value in shape.values if isinstance(value, str)])
        case String():
            is_bounded = shape.least or shape.most < math.inf
            return _content(String(shape.least, shape.most, (*shape.languages, ("pattern", "", True)))
                            if is_bounded else shape) or anything()
    return anything() if shape is ANY else DFA.from_strings([])


@lru_cache(1_000)
def quoted(shape: String) -> Quoted | None:
    """Return the frame of a string; None if there is no text. Raises ValueError if its automaton is too large."""
    dfa = _content(shape)
    if (dfa is not None and not dfa.start) or shape.least > shape.most:
        return None
    return Quoted(dfa, shape.least, shape.most)


class Quoted(Frame):
    """Strings of a language, or all strings of `least` to `most` characters.

    A key (state, need, room) has the state of the language, the characters that are still needed, and those that are
    still possible; a language counts its characters itself.
    """

    def __init__(self, dfa: DFA | None, least: int, most: float) -> None:
        super().__init__()
        self._is_free, self._dfa = dfa is None, anything() if dfa is None else dfa
        self._begin = (self._dfa.start, least, most) if dfa is None else (self._dfa.start, 0, math.inf)

    def _after(self, state: int, need: int, room: float) -> Key | None:
        """Return the key after one more character that leads to `state`; None if there is no room for it."""
        return (state, max(0, need - 1), room - 1) if state and room > 0 else None

    def expand(self, key: Key) -> Expansion:
        match key:
            case "open":
                return Expansion([(34, 34, self._begin)])
            case "end":
                return DONE
            case "free", at, of:                    # in any escape
                escape = _any_escape()
                return Expansion([
                    (lo, hi, of if escape.accepts(to) else ("free", to, of)) for lo, hi, to in escape.moves(at)
                ])  # fmt: skip
            case "escape", read, (state, need, room):
                found = escapes(read, lambda byte: self._after(self._dfa.after(state, bytes([byte])), need, room))
                return Expansion([
                    (byte, byte, ("escape", to, key[2]) if isinstance(to, str) else to) for byte, to in found
                ])  # fmt: skip
        return Expansion(self._inside(*key))

    def _inside(self, state: int, need: int, room: float) -> list[Move]:
        moves: list[Move] = []
        can_escape = False
        for lo, hi, to in self._dfa.moves(state):
            if lo < 0xC0 and hi >= 0x80:            # inside a character
                moves.append((max(lo, 0x80), min(hi, 0xBF), (to, need, room)))
            after = self._after(to, need, room)
            for first, last in ((lo, min(hi, 0x7F)), (max(lo, 0xC0), hi)) if after else ():
                moves += [(a, b, after) for a, b in cut(first, last)]
                can_escape |= any(first <= byte <= last for byte in ESCAPED)
        if can_escape:
            free = ("free", _any_escape().start, self._after(state, need, room))
            moves.append((92, 92, free if self._is_free else ("escape", "", (state, need, room))))
        if not need and self._dfa.accepts(state):
            moves.append((34, 34, "end"))
        return moves

    def closing(self, key: Key) -> Expansion:
        found = self.expand(key)
        if not isinstance(key[0], int):
            return DONE if found.done else found
        ends = [move for move in found.moves if move[2] == "end"]
        moves = [move for move in found.moves if isinstance(move[2][0], int)]
        if ends or self._is_free:
            return Expansion(ends or moves)
        left = self._bytes_left
        nearer = [move for move in moves if left[move[2][0]] < left[key[0]]]
        return Expansion(nearer) if nearer else found

    @cached_property
    def _bytes_left(self) -> npt.NDArray[np.float64]:
        return bytes_to_accept(self._dfa.explore(MAX_STATES).table, self._dfa.accepting)

    def plain(self, key: Key, reach: int) -> Key:
        if not isinstance(key[0], int):
            return key
        state, need, room = key
        return state, min(need, reach), min(room, reach) if room < math.inf else room


@lru_cache(1)
def _any_escape() -> DFA:
    """Return the texts after a backslash in a string without a language."""
    return Regex(ESCAPE).explore()
