"""Frames: the parts of a JSON text as small automata that are numbered while they are read.

A *frame* reads one value: a string, a number, an array without its items. Its states are `Local`s, one for each `key`.
A local state has *moves* to other local states by bytes, *calls* of frames for an inner value, each with the local state
that follows it, and it may be *done*: the value is complete. `texts.JsonTexts` puts frames on a stack.

A frame never moves to a local state from which its value cannot be completed.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.regex import Regex
from llmppl.constraints.json.shapes import Constants, Lazy

__all__ = ["BLANK", "Constant", "Expansion", "Frame", "Local", "Numeral", "Whitespace", "whitespace"]

BLANK = " ?"                                        # whitespace of a record in one line

Key = Any
Move = tuple[int, int, Key]                         # first and last byte, and the key after them


Moves = tuple[list[tuple[int, int, "Local"]], list[tuple[Lazy, "Local"]], bool]


class Expansion(NamedTuple):
    """Moves by bytes (ascending, disjoint), calls of the frames of a shape, and whether the value is complete."""

    moves: list[Move] = []
    calls: list[tuple[Lazy, Key]] = []
    done: bool = False


class Local:
    """State of a frame. `moves` and `calls` lead to local states; they are computed on first use."""

    __slots__ = ("_closing", "_expanded", "frame", "key")

    def __init__(self, frame: Frame, key: Key) -> None:
        self.frame, self.key = frame, key
        self._expanded: Moves | None = None
        self._closing: Moves | None = None

    @property
    def expanded(self) -> Moves:
        """Moves, calls, and whether the value is complete."""
        if self._expanded is None:
            self._expanded = self._with_locals(self.frame.expand(self.key))
        return self._expanded

    @property
    def closing(self) -> Moves:
        """The same, without moves and calls that only make the value longer."""
        if self._closing is None:
            self._closing = self._with_locals(self.frame.closing(self.key))
        return self._closing

    def _with_locals(self, found: Expansion) -> Moves:
        local, (moves, calls, done) = self.frame.local, found
        return [(lo, hi, local(key)) for lo, hi, key in moves], [(of, local(key)) for of, key in calls], done

    def __repr__(self) -> str:
        return f"{type(self.frame).__name__}{self.key}"


class Frame:
    """Automaton of a value; `first` is the key at its start."""

    first: ClassVar[Hashable] = ()

    def __init__(self) -> None:
        self._locals: dict[Key, Local] = {}

    def local(self, key: Key) -> Local:
        """Return the state of a key."""
        found = self._locals.get(key)
        return self._locals.setdefault(key, Local(self, key)) if found is None else found

    @property
    def start(self) -> Local:
        return self.local(self.first)

    def expand(self, key: Key) -> Expansion:
        raise NotImplementedError

    def closing(self, key: Key) -> Expansion:
        """Return the expansion without moves and calls that only make the value longer."""
        found = self.expand(key)
        return Expansion([], [], True) if found.done else found

    def step(self, local: Local, byte: int) -> Local | None:
        """Return the state after a byte, None if there is none."""
        return next((target for lo, hi, target in local.expanded[0] if lo <= byte <= hi), None)

    def plain(self, key: Key, reach: int) -> Key:
        """Return a key that differs from `key` only in ways that no token of `reach` bytes can tell."""
        return key

    def forget(self) -> None:
        """Drop the states that are kept."""
        self._locals.clear()


class Whitespace:
    """Whitespace between the tokens of JSON, which may always be left out; its states are those of a DFA, or 0."""

    def __init__(self, pattern: str | None) -> None:
        self._dfa = Regex(pattern) if pattern else DFA.from_strings([""])
        self._moves: dict[int, list[tuple[int, int, int]]] = {}

    def moves(self, state: int) -> list[tuple[int, int, int]]:
        found = self._moves.get(state)
        if found is None:
            found = self._moves[state] = self._dfa.moves(state or self._dfa.start)
        return found

    def may_end(self, state: int) -> bool:
        return not state or self._dfa.accepts(state)


@lru_cache(16)
def whitespace(pattern: str | None) -> Whitespace:
    """Return the whitespace that matches a pattern. Raises ValueError if it matches other characters."""
    if pattern and not (Regex(pattern) - Regex(r"[ \t\n\r]*")).is_empty():
        raise ValueError(f"whitespace={pattern!r} matches characters that are no whitespace in JSON; {BLANK!r} would work")
    return Whitespace(pattern)


class Numeral(Frame):
    """Numbers of an automaton; a key is its state."""

    def __init__(self, dfa: DFA) -> None:
        super().__init__()
        self._dfa = dfa

    @property
    def start(self) -> Local:
        return self.local(self._dfa.start)

    def expand(self, key: int) -> Expansion:
        return Expansion(self._dfa.moves(key), [], self._dfa.accepts(key))


class Constant(Frame):
    """Listed values, as a trie of their texts; a key is a node of the trie and a state of the whitespace before it."""

    first = 0, 0

    def __init__(self, shape: Constants, blank: Whitespace) -> None:
        super().__init__()
        self._blank = blank
        self._children: list[dict[int, int]] = [{}]     # by byte, or SPACE
        self._ends = set[int]()
        for value in shape.values:
            node = 0
            for byte in _with_spaces(value):
                after = self._children[node].get(byte)
                if after is None:
                    after = self._children[node][byte] = len(self._children)
                    self._children.append({})
                node = after
            self._ends.add(node)

    def expand(self, key: tuple[int, int]) -> Expansion:
        node, state = key
        moves: list[Move] = []
        if state:
            moves += [(lo, hi, (node, after)) for lo, hi, after in self._blank.moves(state)]
            if not self._blank.may_end(state):
                return Expansion(moves)
        children = self._children[node]
        if (spaced := children.get(SPACE)) is not None:
            moves += [(lo, hi, (spaced, after)) for lo, hi, after in self._blank.moves(0)]
            children = children | self._children[spaced]
        moves += [(byte, byte, (after, 0)) for byte, after in children.items() if byte != SPACE]
        return Expansion(sorted(moves), [], node in self._ends)


SPACE = 256                                         # stands for whitespace in the trie of constants


def _with_spaces(value: Any) -> Iterator[int]:
    """Yield the bytes of a value, and SPACE where whitespace may stand."""
    if not isinstance(value, list | dict):
        yield from json.dumps(value, ensure_ascii=False).encode()
        return
    open_, close = b"[]" if isinstance(value, list) else b"{}"
    yield from (open_, SPACE)
    for i, each in enumerate(value):
        if i:
            yield from (ord(","), SPACE)
        yield from _with_spaces(each)
        if isinstance(value, dict):
            yield from (SPACE, ord(":"), SPACE)
            yield from _with_spaces(value[each])
        yield SPACE
    yield close

