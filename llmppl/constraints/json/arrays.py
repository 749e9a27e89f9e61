"""Arrays of JSON: items counted, and without repetition of listed values."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llmppl.constraints.json.frames import Between, Container, Expansion, Whitespace
from llmppl.constraints.json.shapes import Array, Lazy, both, only, values_of
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
        self._most = shape.most
        if shape.unique:
            values = values_of(shape.rest) or []
            self._values = [*map(only, values)]
            self._most = min(shape.most, len(values))
        self._some = both(shape.rest, shape.some)

    @property
    def is_possible(self) -> bool:
        """True if the shape has instances. Items that need not be there are not read."""
        shape = self._shape
        if max(shape.least, shape.wanted) > self._most:
            return False
        needed = [*shape.first, shape.rest][: shape.least]
        if shape.wanted:
            needed.append(self._some)
        return all(map(self._is_live, needed))

    @cached_property
    def _begin(self) -> Progress:
        shape = self._shape
        room = self._most
        for i, item in enumerate((*shape.first, shape.rest)):
            if not self._is_live(item):
                room = min(room, i)
        return Progress(0, shape.least, room, 0, shape.wanted)

    def parts(self, at: Progress) -> tuple[Expansion, bool]:
        shape = self._shape
        place = min(at.place + 1, len(shape.first))
        after = Progress(place, max(0, at.need - 1), at.room - 1, at.used, at.wanted)
        may_end = max(at.need, at.wanted) == 0
        calls = list[tuple[Lazy, Between]]()
        if shape.unique and max(after.need, after.wanted) <= after.room:
            for i, part in enumerate(self._values):
                bit = 1 << i
                if not at.used & bit:
                    then = Progress(place, after.need, after.room, at.used | bit, at.wanted)
                    calls.append((part, Between("after", 0, then)))
        if shape.unique:
            return Expansion([], calls), may_end
        items = [(shape.item(at.place), after)]
        if at.wanted:
            items.insert(0, (self._some, after._replace(wanted=at.wanted - 1)))
        for part, then in items:
            if max(then.need, then.wanted) <= then.room:
                calls.append((part, Between("after", 0, then)))
        return Expansion([], calls), may_end
