"""Frames of the shapes of a schema, and bounds of the bytes to the end of a value.

Frames are made when a text first needs them. So a schema costs what its texts use of it.
"""

from __future__ import annotations

import math
from functools import lru_cache

from llmppl.constraints.constraint import Bools
from llmppl.constraints.json.arrays import Items
from llmppl.constraints.json.frames import Automaton, Frame, Local, Whitespace, Words
from llmppl.constraints.json.objects import Members
from llmppl.constraints.json.scalars import numbers, quoted, spellings
from llmppl.constraints.json.shapes import (
    Array,
    Choice,
    Constants,
    Lazy,
    Loop,
    Number,
    Object,
    Shape,
    String,
    unfolded,
)
from llmppl.support.graphs import Memo

PLAIN = [String(), Number(), Number(integer=True)]  # without bounds
MAX_PATH = 2_000  # bytes and values of a way to an end
UNASSIGNED = b"\xf1\xf2\xf4"  # first bytes of planes without characters
# bytes of JSON texts, but for planes of Unicode without characters, which tokenizers leave out
WRITTEN = sorted({*b"\t\n\r", *range(32, 192), *range(194, 245)} - {*UNASSIGNED})


class Frames:
    """Frames of the shapes of a schema. `starts[part]` are the local states in which a value of a part begins."""

    def __init__(self, blank: Whitespace, in_order: bool) -> None:
        self._blank = blank
        self._in_order = in_order
        self._frames: dict[int, tuple[Shape, Frame | None]] = {}
        self._open: set[int] = set()
        self._left: dict[Local, float] = {}
        self._least: dict[Lazy, float] = {}
        self._are_written: Memo[bytes, bool] = Memo(
            lambda alone: all(alone[byte] for byte in WRITTEN)
        )
        self.starts = Memo(self._find_starts)

    def forget(self) -> None:
        """Drop the units and local states of all frames. Those that a caller holds stay valid."""
        self._left.clear()
        self.starts.clear()
        for _, frame in self._frames.values():
            if frame is not None:
                frame.forget()

    def is_live(self, part: Lazy) -> bool:
        """Return whether some finite value has a shape (or cannot be refuted while the shape is read)."""
        try:
            shape = part.shape
        except Loop:
            return True
        return self._is_live(shape)

    def _is_live(self, shape: Shape) -> bool:
        if isinstance(shape, Choice):
            return any(map(self._is_live, shape.options))
        is_surely_live = isinstance(shape, Constants) or shape in PLAIN
        return is_surely_live or self._frame(shape) is not None

    def _frame(self, shape: Shape) -> Frame | None:
        """Return the frame of a shape; None if it has no instances."""
        key = id(shape)
        is_outermost = not self._open
        if (
            key not in self._frames and key not in self._open
        ):  # only an infinite value would need itself
            self._open.add(key)
            try:
                frame = self._new_frame(shape)
            finally:
                self._open.discard(key)
            if frame is not None or is_outermost or not isinstance(shape, Array | Object):
                self._frames[key] = shape, frame
        return self._frames.get(key, (shape, None))[1]

    # ---- bounds

    def _least_of(self, part: Lazy) -> float:
        found = self._least.get(part)
        if found is None:
            self._least[part] = math.inf  # meanwhile: only an infinite value would need itself
            lefts = (self.bytes_left(start) for start in self.starts[part])
            found = self._least[part] = next((left for left in lefts if left < math.inf), math.inf)
        return found

    def bytes_left(self, local: Local) -> float:
        """Return the bytes of one way to complete a value, inf if none is found: a bound of the tokens."""
        path = list[tuple[Local, float]]()
        while local not in self._left and len(path) < MAX_PATH:
            moves, calls, is_done = local.closing
            if is_done:
                self._left[local] = 0
                break
            if calls:
                path.append((local, self._least_of(calls[0][0])))
                local = calls[0][1]
            else:  # by the first byte that is no whitespace
                path.append((local, 1))
                local = next(
                    (after for lo, hi, after in moves if hi > 32 and lo not in UNASSIGNED), local
                )
        left = self._left.get(local, math.inf)
        for each, bytes in reversed(path):
            left += bytes
            if left < math.inf:
                self._left[each] = left
        return left

    def least_bytes(self, local: Local, alone: Bools) -> float:
        """Return the same bound; inf if some bytes of JSON texts are no tokens by themselves."""
        if not self._are_written[alone.tobytes()]:
            return math.inf
        return self.bytes_left(local)

    # ---- frames of shapes

    def _new_frame(self, shape: Shape) -> Frame | None:
        match shape:
            case Constants():  # strings, numbers and words
                return Words(text for value in shape.values for text in spellings(value))
            case Number():
                dfa = numbers(shape)
                return _automaton(dfa) if dfa.start else None
            case String():
                return quoted(shape)
            case Array():
                items = Items(shape, self._blank, self.is_live)
                return items if items.is_possible else None
        assert isinstance(shape, Object)
        members = Members(shape, self._blank, self.is_live, self._in_order)
        return members if members.is_possible else None

    def _find_starts(self, part: Lazy) -> tuple[Local, ...]:
        """Return the local states in which a value of a shape begins."""
        return tuple(frame.start for frame in map(self._frame, unfolded(part.shape)) if frame)


_automaton = lru_cache(1_000)(Automaton)
