"""Objects that all their copies share."""

from __future__ import annotations

from typing import Self


class Shared:
    """What is worked out once and read by all: a copy of it is the object itself, so that programs may hold it."""

    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self
