"""Objects that all their copies share, objects of fixed attributes, and tables of living objects."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

C = TypeVar("C", bound=type)
T = TypeVar("T")


class Shared:
    """What is worked out once and read by all: a copy of it is the object itself, so that programs may hold it."""

    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


class Fixed(Shared):
    """Objects with the public attributes `_names` and no others; a subclass may add its own."""

    _names: ClassVar[tuple[str, ...]]
    _instead: ClassVar[str] = ""                        # what would work

    if not TYPE_CHECKING:                               # checkers know the attributes

        def __setattr__(self, name: str, value: Any) -> None:
            cls = type(self)
            if "_names" in vars(cls) and name not in cls._names and name[0] != "_" and not hasattr(cls, name):
                raise AttributeError(f"a {cls.__name__} has no attribute {name}, and would not heed it{cls._instead}")
            super().__setattr__(name, value)


class Living(Generic[T]):
    """A table of objects, each of which is there while somebody else holds it.

    A `WeakValueDictionary` calls a function where an object dies, and Python drops what a signal handler raises there.
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


def plain_signature(cls: C) -> C:
    """Write the types of a NamedTuple in its signature as in its class, 'int', instead of as ForwardRef('int')."""
    make: Any = cls.__new__
    make.__annotations__ = {name: getattr(hint, "__forward_arg__", hint) for name, hint in make.__annotations__.items()}
    return cls
