"""Arrays of JSON: items counted, and without repetition of listed values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from llmppl.constraints.json.frames import DONE, Expansion, Frame, Key, Move, Whitespace
from llmppl.constraints.json.shapes import Array, Constants, Lazy, values_of
from llmppl.support.locks import cached_property

__all__ = ["Items"]

COMMA, CLOSE = b",]"


class Progress(NamedTuple):
    """Items so far: those with a shape of their own, how many are needed and possible, and the values used."""

    place: int
    need: int
    room: float
    used: int


class Items(Frame):
    """Arrays of a shape. In a unique one, the items are listed values."""

    def __init__(self, shape: Array, blank: Whitespace, is_live: Callable[[Lazy], bool]) -> None:
        super().__init__()
        self._shape, self._blank, self._is_live = shape, blank, is_live
        values = (values_of(shape) or {}).values() if shape.unique else ()
        self._values = [Lazy.of(Constants((value,))) for value in values]
        self._most = len(self._values) if shape.unique else math.inf

    @property
    def is_possible(self) -> bool:
        """True if the shape has instances. Items that need not be there are not read."""
        shape = self._shape
        return shape.least <= min(shape.most, self._most) and all(
            map(self._is_live, (*shape.first, shape.rest)[: shape.least])
        )

    @cached_property
    def _begin(self) -> Progress:
        shape = self._shape
        live = next((i for i, item in enumerate((*shape.first, shape.rest)) if not self._is_live(item)), math.inf)
        return Progress(0, shape.least, min(live, shape.most, self._most), 0)

    def _items(self, at: Progress) -> list[tuple[Lazy, Progress]]:
        """Return the shapes that the next item may have, each with the progress after it."""
        if at.room <= 0:
            return []
        place, need = min(at.place + 1, len(self._shape.first)), max(0, at.need - 1)
        after = Progress(place, need, at.room - 1, at.used)
        if not self._shape.unique:
            return [(self._shape.item(at.place), after)]
        left = ((i, part) for i, part in enumerate(self._values) if not at.used >> i & 1)
        return [(part, after._replace(used=at.used | 1 << i)) for i, part in left]

    def expand(self, key: Key) -> Expansion:
        if key == "open":
            return Expansion([(91, 91, ("first", 0, self._begin))])
        if key == "end":
            return DONE
        kind, blank, at = key
        moves: list[Move] = [(lo, hi, (kind, to, at)) for lo, hi, to in self._blank.moves[blank]]
        if not self._blank.may_end(blank):
            return Expansion(moves)
        items = self._items(at)
        calls: list[tuple[Lazy, Any]] = []
        if kind != "after":
            calls = [(part, ("after", 0, after)) for part, after in items]
        elif items:
            moves.append((COMMA, COMMA, ("next", 0, at)))
        if not at.need and kind != "next":
            moves.append((CLOSE, CLOSE, "end"))
        return Expansion(moves, calls)

    def closing(self, key: Key) -> Expansion:
        found = self.expand(key)
        if key[0] in ("first", "after") and not key[2].need:
            return Expansion([move for move in found.moves if move[2][0] != "next"], [], found.done)
        return found
