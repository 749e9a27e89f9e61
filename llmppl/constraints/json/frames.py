"""Frames: the parts of a JSON text as small automata that are numbered while they are read.

A *frame* reads one value: a string, a number, an array without its items. Its states are `Local`s, one for each `key`.
A local state has *moves* to other local states by bytes, *calls* of frames for an inner value, each with the local
state that follows it, and it may be *done*: the value is complete. In a machine, a
frame is a unit (`llmppl.constraints.json.unit`).

A frame never moves to a local state from which its value cannot be completed. Its *closing* moves and calls are those
that complete the value and add what the schema still needs, and nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.regex import Regex
from llmppl.constraints.json.shapes import Lazy
from llmppl.support.graphs import Memo
from llmppl.support.locks import cached_property

COMMA = ord(",")
BLANK = " ?"  # whitespace of a record in one line
MAX_LOCALS = 1 << 16  # local states that are kept, of one frame
Key = Any
Move = tuple[int, int, Key]  # first and last byte, and the key after them
Moves = tuple[list[tuple[int, int, "Local"]], list[tuple[Lazy, "Local"]], bool]


class Expansion(NamedTuple):
    """Moves by bytes (disjoint), calls of the frames of a shape, and whether the value is complete."""

    moves: list[Move] = []
    calls: list[tuple[Lazy, Key]] = []
    done: bool = False


DONE = Expansion([], [], True)


class Local:
    """State of a frame. `expanded` and `closing` are its moves, calls and whether it is done."""

    def __init__(self, frame: Frame, key: Key) -> None:
        self.frame = frame
        self.key = key

    @cached_property
    def expanded(self) -> Moves:
        return self._with_locals(self.frame.expand(self.key))

    @cached_property
    def closing(self) -> Moves:
        return self._with_locals(self.frame.closing(self.key))

    def _with_locals(self, found: Expansion) -> Moves:
        local = self.frame.local
        moves, calls, done = found
        moves = sorted(moves, key=lambda move: move[0])
        return (
            [(lo, hi, local(key)) for lo, hi, key in moves],
            [(of, local(key)) for of, key in calls],
            done,
        )


class Frame:
    """Automaton of a value, from the key `first`."""

    first: Key = "open"
    remembers = False  # True if the states are endless, since they remember names
    unit: Any = None  # of machines

    def __init__(self) -> None:
        self._locals: Memo[Key, Local] = Memo(lambda key: Local(self, key), MAX_LOCALS)

    def forget(self) -> None:
        """Drop the unit and all local states."""
        self._locals.clear()
        self.unit = None

    def local(self, key: Key) -> Local:
        """Return the state of a key."""
        return self._locals[key]

    @property
    def start(self) -> Local:
        return self.local(self.first)

    def expand(self, key: Key) -> Expansion:
        raise NotImplementedError

    def has_exits(self, key: Key) -> bool:
        """Return False if a key has moves only, which may be many."""
        return True

    def num_plain(self, key: Key) -> float | None:
        """Return how many plain bytes, whichever, may follow a key; None if only its moves tell."""
        return 0

    def closing(self, key: Key) -> Expansion:
        """Return the expansion without moves and calls that only make the value longer."""
        found = self.expand(key)
        return DONE if found.done else found

    def step(self, local: Local, byte: int) -> Local | None:
        """Return the state after a byte, None if there is none."""
        return next((target for lo, hi, target in local.expanded[0] if lo <= byte <= hi), None)


class Between(NamedTuple):
    """Key between two tokens of JSON: whitespace so far, the progress, and the shape of a value that must follow.

    The next token is the `first` part or the end, the `next` part after a comma, or the comma or end `after` a part.
    Objects have a `colon` and a `value`, too.
    """

    kind: str
    blank: int
    at: Any
    part: Lazy | None = None


class Container(Frame):
    """Arrays and objects: parts with commas between them, in brackets. Keys are `Between`, "open" and "end"."""

    brackets: tuple[int, int]
    _begin: Any  # the progress before the first part

    def __init__(self, blank: Whitespace) -> None:
        super().__init__()
        self._blank = blank

    def parts(self, at: Any) -> tuple[Expansion, bool]:
        """Return the moves and calls by which one more part begins, and whether none must come."""
        raise NotImplementedError

    def expand(self, key: Key) -> Expansion:
        if key == "open":
            first = Between("first", 0, self._begin)
            return Expansion([(self.brackets[0], self.brackets[0], first)])
        if key == "end":
            return DONE
        moves = [(lo, hi, key._replace(blank=to)) for lo, hi, to in self._blank.moves[key.blank]]
        if self._blank.may_end(key.blank):
            return self.after_blank(moves, key)
        return Expansion(moves)

    def after_blank(self, moves: list[Move], key: Between) -> Expansion:
        begun, may_end = self.parts(key.at)
        if may_end and key.kind != "next":
            moves.append((self.brackets[1], self.brackets[1], "end"))
        if key.kind != "after":
            return Expansion(moves + begun.moves, begun.calls)
        if begun.moves or begun.calls:
            moves.append((COMMA, COMMA, Between("next", 0, key.at)))
        return Expansion(moves)

    def closing(self, key: Key) -> Expansion:
        found = self.expand(key)
        ends = [move for move in found.moves if move[2] == "end"]
        if not ends:
            return found._replace(calls=found.calls[:1])
        blanks = [move for move in found.moves if move[2][0] == key.kind]
        return Expansion(ends + blanks)


class Automaton(Frame):
    """Numbers of an automaton over bytes; a key is its state."""

    def __init__(self, dfa: DFA) -> None:
        super().__init__()
        self.dfa = dfa
        self.first = dfa.start

    def expand(self, key: int) -> Expansion:
        return Expansion(self.dfa.moves(key), [], self.dfa.accepts(key))


class Words(Frame):
    """Listed texts. In a key, the sorted texts that begin like the bytes that are read, and their number."""

    def __init__(self, texts: Iterable[str]) -> None:
        super().__init__()
        self._words = sorted({text.encode() for text in texts})
        self.first = 0, len(self._words), 0

    def expand(self, key: Key) -> Expansion:
        low, high, depth = key
        moves = []
        is_done = low < high and len(self._words[low]) == depth
        low += is_done
        while low < high:
            begin = self._words[low][: depth + 1]
            above = bisect_left(self._words, begin + b"\xff", low, high)
            moves.append((begin[-1], begin[-1], (low, above, depth + 1)))
            low = above
        return Expansion(moves, [], is_done)


class Whitespace:
    """Whitespace between tokens, which may be left out; states are those of a DFA, or 0. ValueError if it is none."""

    def __init__(self, pattern: str) -> None:
        self._dfa = Regex(pattern).explore()
        others = np.delete(self._dfa.table, [*b" \t\n\r"], axis=1)
        if others.any():
            raise ValueError(
                f"whitespace={pattern!r} matches other characters than JSON's; {BLANK!r} would work"
            )
        self.moves = Memo[int, list[tuple[int, int, int]]](
            lambda state: self._dfa.moves(state or self._dfa.start)
        )

    def may_end(self, state: int) -> bool:
        return not state or self._dfa.accepts(state)


spaces = lru_cache(16)(Whitespace)
