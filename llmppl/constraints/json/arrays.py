"""Arrays of JSON: items counted, with conditions on how many have a shape, and without repetition of listed values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from llmppl.constraints.json.frames import DONE, Expansion, Frame, Key, Move, Whitespace
from llmppl.constraints.json.shapes import Array, Constants, Lazy, both, fits, values_of
from llmppl.support.graphs import Memo
from llmppl.support.locks import cached_property

__all__ = ["Items"]

COMMA, CLOSE = b",]"


class Progress(NamedTuple):
    """Items so far: those with a shape of their own, how many are needed and possible, the values used, the counts."""

    place: int
    need: int
    room: float
    used: int
    counts: tuple[int, ...]


class Items(Frame):
    """Arrays of a shape. In a unique one, the items are listed values."""

    def __init__(self, shape: Array, blank: Whitespace, is_live: Callable[[Lazy], bool]) -> None:
        super().__init__()
        self._shape, self._blank, self._is_live = shape, blank, is_live
        values = (values_of(shape) or {}).values() if shape.unique else ()
        self._values = [(value, Lazy.of(Constants((value,)))) for value in values]
        self._choices, self._can_end = Memo(self._find_choices), Memo(self._find_can_end)

    @property
    def is_possible(self) -> bool:
        """True if the shape has instances. Items that need not be there are not read."""
        shape = self._shape
        if shape.least > shape.most or not all(map(self._is_live, (*shape.first, shape.rest)[: shape.least])):
            return False
        return not shape.unique and not shape.contains or self._can_end[self._begin]

    @cached_property
    def _begin(self) -> Progress:
        shape = self._shape
        most = next((i for i, item in enumerate((*shape.first, shape.rest)) if not self._is_live(item)), math.inf)
        most = min(most, shape.most, len(self._values) if shape.unique else math.inf)
        return Progress(0, shape.least, most, 0, (0,) * len(shape.contains))

    def parts(self) -> Iterator[Lazy]:
        yield from self._shape.first
        yield from [self._shape.rest] if self._shape.most > len(self._shape.first) else []

    def forget(self) -> None:
        super().forget()
        self._choices.clear()
        self._can_end.clear()

    def _needs(self, at: Progress) -> list[int]:
        return [least - count for (_, least), count in zip(self._shape.contains, at.counts, strict=True)]

    def _find_can_end(self, at: Progress) -> bool:
        """Return whether the array can be completed."""
        needs = self._needs(at)
        if max((at.need, *needs)) > at.room:
            return False
        if not at.need and not any(needs):
            return True
        if not self._shape.contains and not (self._shape.unique and self._shape.first):
            return True
        if at.place == len(self._shape.first) and not self._shape.unique:
            for need, (item, _) in zip(needs, self._shape.contains, strict=True):
                if need and not self._is_live(both(self._shape.rest, item)):
                    return False
        return any(self._can_end[after] for _, after in self._items(at) if after != at)

    def _items(self, at: Progress) -> Iterator[tuple[Lazy, Progress]]:
        """Yield the shapes that the next item may have, each with the progress after it."""
        item, contains = self._shape.item(at.place), self._shape.contains
        after = at._replace(
            place=min(at.place + 1, len(self._shape.first)), need=max(0, at.need - 1), room=at.room - 1,
        )  # fmt: skip
        if self._shape.unique:
            for i, (value, part) in enumerate(self._values):
                if not at.used >> i & 1 and fits(value, item.shape):
                    counts = (fits(value, some.shape) for some, _ in contains)
                    yield part, self._counted(after._replace(used=at.used | 1 << i), counts)
            return
        options: list[tuple[Lazy, tuple[bool, ...]]] = [(item, ())]
        for (some, _), need in zip(contains, self._needs(at), strict=True):         # an item may count or not
            counted = [(both(part, some), (*counts, True)) for part, counts in options] if need else []
            options = counted + [(part, (*counts, False)) for part, counts in options]
        yield from ((part, self._counted(after, counts)) for part, counts in options if self._is_live(part))

    def _counted(self, at: Progress, counted: Iterable[bool]) -> Progress:
        counts = zip(at.counts, counted, self._shape.contains, strict=True)
        return at._replace(counts=tuple(min(count + is_in, least) for count, is_in, (_, least) in counts))

    def _find_choices(self, at: Progress) -> tuple[list[tuple[Lazy, Progress]], bool]:
        """Return the possible next items, and whether the array may end."""
        items = [(part, after) for part, after in self._items(at) if self._can_end[after]] if at.room > 0 else []
        return items, not at.need and not any(self._needs(at))

    def expand(self, key: Key) -> Expansion:
        if key == "open":
            return Expansion([(91, 91, ("first", 0, self._begin))])
        if key == "end":
            return DONE
        kind, blank, at = key
        moves: list[Move] = [(lo, hi, (kind, to, at)) for lo, hi, to in self._blank.moves[blank]]
        if not self._blank.may_end(blank):
            return Expansion(moves)
        items, may_end = self._choices[at]
        calls: list[tuple[Lazy, Any]] = []
        if kind != "after":
            calls = [(part, ("after", 0, after)) for part, after in items]
        elif items:
            moves.append((COMMA, COMMA, ("next", 0, at)))
        if may_end and kind != "next":
            moves.append((CLOSE, CLOSE, "end"))
        return Expansion(moves, calls)

    def closing(self, key: Key) -> Expansion:
        found = self.expand(key)
        if key[0] in ("first", "after") and self._choices[key[2]][1]:
            return Expansion([move for move in found.moves if move[2][0] != "next"], [], found.done)
        return found

    def plain(self, key: Key, reach: int) -> Key:
        if key in ("open", "end") or self._shape.unique or self._shape.contains:
            return key
        kind, blank, at = key
        most = len(self._shape.first) - at.place + reach
        room = min(at.room, most) if at.room < math.inf else at.room
        return kind, blank, at._replace(need=min(at.need, most), room=room)
