"""Objects that all their copies share, and that take no attributes which would mean nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self


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
