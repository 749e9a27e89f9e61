"""Strings of JSON: a language of texts between quotes, with escapes and bounds of length.

A string without a language may have any escapes. A string with a language escapes only the characters that must be
escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache, reduce
from operator import and_

import numpy as np
import numpy.typing as npt

from llmppl.constraints.automata.budget import TooLarge
from llmppl.constraints.automata.dfa import DFA, anything
from llmppl.constraints.automata.regex import Regex
from llmppl.constraints.constraint import Bools
from llmppl.constraints.json.frames import Expansion, Frame, Key, Move
from llmppl.constraints.json.shapes import String, language
from llmppl.constraints.masks.distances import bytes_to_accept
from llmppl.support.locks import cached_property

__all__ = ["SHORT", "Quoted", "content", "cut", "is_start", "quoted"]

MAX_STATES = 20_000                                 # of a language that is explored
_PAIR = r"[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"      # of surrogates
ESCAPE = rf'["\\/bfnrt]|u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{{3}}|[dD][0-7][0-9a-fA-F]{{2}}|{_PAIR})'
SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
ESCAPED = (*range(32), 34, 92)                      # bytes that stand in no string unescaped


@lru_cache(1_000)
def content(shape: String) -> DFA | None:
    """Return the texts of all languages of a string, without its bounds; None if it has none. Raises ValueError."""
    dfas = []
    for kind, value, positive in shape.languages:
        dfa = language(kind, value)
        dfas.append(dfa if positive else anything() - dfa)
    if len(dfas) > 1:
        for dfa in dfas:
            dfa.explore(MAX_STATES)
    return reduce(and_, dfas) if dfas else None


@lru_cache(1_000)
def quoted(shape: String) -> Quoted | None:
    """Return the frame of a string; None if there is no text. Raises ValueError if its automaton is too large."""
    dfa = content(shape)
    if dfa is not None and not dfa.start:
        return None
    frame = Quoted(dfa, shape.least, shape.most)
    return frame if frame.is_live((dfa or anything()).start, shape.least, shape.most) else None


def is_start(byte: int) -> bool:
    """Return whether a byte begins a character of UTF-8."""
    return not 0x80 <= byte < 0xC0


def cut(lo: int, hi: int, at: tuple[int, ...] = ESCAPED) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range of bytes without some bytes (ascending)."""
    for byte in at:
        if lo <= byte <= hi:
            if lo < byte:
                yield lo, byte - 1
            lo = byte + 1
    if lo <= hi:
        yield lo, hi


class Quoted(Frame):
    """Strings of a language.

    A key (state, need, room) has the state of the language, the characters that are still needed, and those that are
    still possible.
    """

    first = ("quote",)

    def __init__(self, dfa: DFA | None, least: int, most: float) -> None:
        super().__init__()
        self.is_free, self._dfa = dfa is None, dfa or anything()
        self._begin = self._dfa.start, least, most
        self._lengths = None if dfa is None or (not least and most == math.inf) else _Lengths(dfa, least, most)

    def is_live(self, state: int, need: int, room: float) -> bool:
        """Return whether a text of `need` to `room` characters can follow a state of the language."""
        return need <= room and (self._lengths is None or self._lengths.is_possible(state, need, room))

    def _after(self, state: int, need: int, room: float) -> Key | None:
        """Return the key after one more character that leads to `state`; None if the text cannot be completed."""
        key = state, max(0, need - 1), room - 1
        return key if self.is_live(*key) else None

    def expand(self, key: Key) -> Expansion:
        match key:
            case ("quote",):
                return Expansion([(34, 34, self._begin)])
            case ("end",):
                return Expansion([], [], True)
            case ("escape", *of):
                return Expansion(self._escaped(*of))
            case ("free", state, of):
                return Expansion([
                    (lo, hi, of if _escapes().accepts(to) else ("free", to, of)) for lo, hi, to in _escapes().moves(state)
                ])  # fmt: skip
            case ("code", digits, of):
                return Expansion(self._code(digits, of))
        return Expansion(self._inside(*key))

    def _inside(self, state: int, need: int, room: float) -> list[Move]:
        moves: list[Move] = []
        can_escape = False
        for lo, hi, to in self._dfa.moves(state):
            goes_on, begins = (max(lo, 0x80), min(hi, 0xBF)), ((lo, min(hi, 0x7F)), (max(lo, 0xC0), hi))
            if goes_on[0] <= goes_on[1]:
                moves.append((*goes_on, (to, need, room)))
            after = self._after(to, need, room)
            if after is not None:
                can_escape |= any(lo <= byte <= hi for byte in ESCAPED)
                moves += [(a, b, after) for begin in begins if begin[0] <= begin[1] for a, b in cut(*begin)]
        if can_escape:
            moves.append((92, 92, ("escape", state, need, room)))
        if not need and self._dfa.accepts(state):
            moves.append((34, 34, ("end",)))
        return sorted(moves, key=lambda move: move[0])

    def closing(self, key: Key) -> Expansion:
        if isinstance(key[0], int):
            moves = [move for move in self._inside(*key) if move[2] != ("escape", *key)]
            ends = [move for move in moves if move[2] == ("end",)]
            if ends or self._dfa is anything():
                return Expansion(ends or moves)
            left = self._bytes_left
            nearer = [move for move in moves if left[move[2][0]] < left[key[0]]]
            return Expansion(nearer if nearer and not key[1] else self._inside(*key))
        return self.expand(key)

    @cached_property
    def _bytes_left(self) -> npt.NDArray[np.float64]:
        return bytes_to_accept(self._dfa.explore(MAX_STATES).table, self._dfa.accepting)

    def _escaped(self, state: int, need: int, room: float) -> list[Move]:
        """Return the moves after a backslash."""
        if self.is_free:
            after = self._after(state, need, room)
            start = _escapes().start
            return [(lo, hi, after if _escapes().accepts(to) else ("free", to, after))
                    for lo, hi, to in _escapes().moves(start)]  # fmt: skip
        after_byte = {byte: self._after(to, need, room) for byte in ESCAPED if (to := self._dfa.step(state, byte))}
        moves: list[Move] = [
            (ord(SHORT[byte]), ord(SHORT[byte]), after) for byte, after in after_byte.items() if byte in SHORT and after
        ]
        if any(after for byte, after in after_byte.items() if byte < 32):
            moves.append((117, 117, ("code", "", (state, need, room))))
        return sorted(moves, key=lambda move: move[0])

    def _code(self, digits: str, of: tuple[int, int, float]) -> list[Move]:
        """Return the moves after \\u and some digits of the code of a control character."""
        if len(digits) < 2:
            return [(48, 48, ("code", digits + "0", of))]
        state, need, room = of
        moves: dict[int, Key] = {}
        for byte in range(32):
            to, code = self._dfa.step(state, byte), f"{byte:04x}"
            after = to and self._after(to, need, room)
            if after and code.startswith(digits):
                for digit in {code[len(digits)], code[len(digits)].upper()}:
                    moves[ord(digit)] = after if len(digits) == 3 else ("code", digits + digit, of)
        return [(byte, byte, key) for byte, key in sorted(moves.items())]

    def plain(self, key: Key, reach: int) -> Key:
        if not isinstance(key[0], int) or self._lengths is not None:
            return key
        state, need, room = key
        return state, min(need, reach), min(room, reach) if room < math.inf else room


@lru_cache(1)
def _escapes() -> DFA:
    """Return the texts after a backslash in a string without a language."""
    return Regex(ESCAPE).explore()


class _Lengths:
    """Numbers of characters that lead from each state of a language to its end.

    The set of states with a text of n characters determines the set for n + 1. So the sets repeat from some n on, and
    the first few tell about all lengths.
    """

    def __init__(self, dfa: DFA, least: int, most: float) -> None:
        table = dfa.explore(MAX_STATES).table
        starts = np.array([is_start(byte) for byte in range(256)])
        self._begins, self._goes_on = table * starts, table * ~starts
        self._inside = (self._goes_on > 0).any(1)
        self._sets: list[Bools] = []
        self._known: dict[bytes, int] = {}
        self._period = 0
        some = self._closed(dfa.accepting.copy())
        bound = most if most < math.inf else math.inf
        while len(self._sets) <= bound:
            key = some.tobytes()
            if key in self._known:
                self._period = len(self._sets) - self._known[key]
                break
            if len(self._sets) * len(table) > 100 * MAX_STATES:
                raise TooLarge("a pattern with a bound of its length", f"more than {len(self._sets):,} lengths")
            self._known[key] = len(self._sets)
            self._sets.append(some)
            some = self._closed(some[self._begins].any(1) & (self._begins > 0).any(1))

    def _closed(self, some: Bools) -> Bools:
        """Return the states with those inside a character that lead to them."""
        some[0] = False
        for _ in range(3):
            some = some | (some[self._goes_on].any(1) & self._inside)
            some[0] = False
        return some

    def is_possible(self, state: int, need: int, room: float) -> bool:
        last = len(self._sets) - 1
        for n in range(need, int(min(room, max(need, last) + self._period)) + 1):
            if n > last:
                if not self._period:
                    return False
                n = last + 1 - self._period + (n - last - 1) % self._period
            if self._sets[n][state]:
                return True
        return False
