"""Base class of immutable objects that programs may hold."""

from __future__ import annotations

from typing import Self


class Shared:
    """Immutable object whose copy is the object itself."""

    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self
