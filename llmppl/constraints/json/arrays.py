"""Arrays of JSON: items counted, and without repetition of listed values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from llmppl.constraints.json.frames import Container, Expansion, Whitespace
from llmppl.constraints.json.shapes import Array, Constants, Lazy, values_of
from llmppl.support.locks import cached_property


class Progress(NamedTuple):
    """Items so far: those with a shape of their own, how many are needed and possible, and the values used."""

    place: int
    need: int
    room: float
    used: int


class Items(Container):
    """Arrays of a shape. In a unique one, the items are listed values."""

    brackets = ord("["), ord("]")

    def __init__(self, shape: Array, blank: Whitespace, is_live: Callable[[Lazy], bool]) -> None:
        super().__init__(blank)
        self._shape, self._is_live = shape, is_live
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

    def parts(self, at: Progress) -> tuple[Expansion, bool]:
        after = Progress(min(at.place + 1, len(self._shape.first)), max(0, at.need - 1), at.room - 1, at.used)
        items = [(self._shape.item(at.place), after)]
        if self._shape.unique:
            left = ((i, part) for i, part in enumerate(self._values) if not at.used >> i & 1)
            items = [(part, after._replace(used=at.used | 1 << i)) for i, part in left]
        return Expansion([], [(part, ("after", 0, then)) for part, then in items if at.room > 0]), not at.need
