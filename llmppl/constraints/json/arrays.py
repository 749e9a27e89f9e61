"""Arrays of JSON: items counted, and without repetition of listed values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from llmppl.constraints.json.frames import Container, Expansion, Whitespace
from llmppl.constraints.json.shapes import Array, Constants, Lazy, both, values_of
from llmppl.support.locks import cached_property


class Progress(NamedTuple):
    """Items so far: place, how many are needed and possible, values used, and how many `contains` still needs."""

    place: int
    need: int
    room: float
    used: int
    wanted: int


class Items(Container):
    """Arrays of a shape. In a unique one, the items are listed values."""

    brackets = ord("["), ord("]")

    def __init__(self, shape: Array, blank: Whitespace, is_live: Callable[[Lazy], bool]) -> None:
        super().__init__(blank)
        self._shape = shape
        self._is_live = is_live
        self._values = [Lazy.of(Constants((value,))) for value in shape.unique and values_of(shape.rest) or ()]
        self._most = min(shape.most, len(self._values) if shape.unique else math.inf)
        self._some = both(shape.rest, shape.some)

    @property
    def is_possible(self) -> bool:
        """True if the shape has instances. Items that need not be there are not read."""
        shape = self._shape
        needed = (*shape.first, shape.rest)[: shape.least] + (self._some,) * (shape.wanted > 0)
        return max(shape.least, shape.wanted) <= self._most and all(map(self._is_live, needed))

    @cached_property
    def _begin(self) -> Progress:
        shape = self._shape
        live = next((i for i, item in enumerate((*shape.first, shape.rest)) if not self._is_live(item)), math.inf)
        return Progress(0, shape.least, min(live, self._most), 0, shape.wanted)

    def parts(self, at: Progress) -> tuple[Expansion, bool]:
        after = at._replace(place=min(at.place + 1, len(self._shape.first)), need=max(0, at.need - 1), room=at.room - 1)
        items = [(self._shape.item(at.place), after)]
        if at.wanted:
            items.insert(0, (self._some, after._replace(wanted=at.wanted - 1)))
        if self._shape.unique:
            left = ((i, part) for i, part in enumerate(self._values) if not at.used >> i & 1)
            items = [(part, after._replace(used=at.used | 1 << i)) for i, part in left]
        calls = [(part, ("after", 0, then)) for part, then in items if max(then.need, then.wanted) <= then.room]
        return Expansion([], calls), max(at.need, at.wanted) == 0
