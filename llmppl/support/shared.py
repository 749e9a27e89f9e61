"""Base classes of immutable objects, and weak tables: `Shared` for copies, `Fixed` for attributes, `Living`."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

T = TypeVar("T")


class Shared:
    """Immutable object whose copy is the object itself, so that programs may hold it."""

    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


class Fixed(Shared):
    """Object that refuses public attributes other than `_names`. A subclass may add attributes."""

    _names: ClassVar[tuple[str, ...]]
    _instead: ClassVar[str] = ""                        # end of the error: what to write instead

    if not TYPE_CHECKING:                               # checkers know the attributes

        def __setattr__(self, name: str, value: Any) -> None:
            cls = type(self)
            if "_names" in vars(cls) and name not in cls._names and name[0] != "_" and not hasattr(cls, name):
                raise AttributeError(f"a {cls.__name__} has no attribute {name}, and would not heed it{cls._instead}")
            super().__setattr__(name, value)


class Living(Generic[T]):
    """Table of objects that it does not keep alive.

    A `WeakValueDictionary` calls a function when an object dies, and Python drops exceptions of signal handlers there.
    """

    def __init__(self) -> None:
        self._refs: dict[Hashable, weakref.ref[Any]] = {}
        self._sweep_at = 64

    def get(self, key: Hashable) -> T | None:
        ref = self._refs.get(key)
        return None if ref is None else ref()

    def put(self, key: Hashable, value: T) -> T:
        self._refs[key] = weakref.ref(value)
        if len(self._refs) > self._sweep_at:
            self._refs = {key: ref for key, ref in [*self._refs.items()] if ref() is not None}
            self._sweep_at = 64 + 2 * len(self._refs)
        return value

    def values(self) -> list[T]:
        return [value for ref in [*self._refs.values()] if (value := ref()) is not None]
