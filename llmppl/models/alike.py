"""Alike: whether a step that is run again asks for what it asked for before, and whether an object has changed."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np


def same(a: Any, b: Any) -> bool:
    """Whether two recipes are equal. It runs once for every candidate of a step."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is tuple:
        if len(a) != len(b):
            return False
        for one, other in zip(a, b):                    # noqa: B905 strict= takes a third of the time
            if one is not other and not same(one, other):
                return False
        return True
    if type(a) is np.ndarray:
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return bool(a == b)


def equal(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Whether two supports of one length are equal, as far as their values can be compared."""
    try:
        if before == now:
            return True
    except Exception:
        return True
    return all(map(_alike, before, now))


def _alike(a: Any, b: Any) -> bool:
    """Whether two values are equal, as far as they can be compared: objects made anew may not know it."""
    if type(a) is not type(b):
        return False
    try:
        if type(a).__eq__ is object.__eq__:             # type: ignore[comparison-overlap]
            return True
        return not bool(a != b) or bool(a != a)         # NaN is not equal to itself
    except Exception:
        return True


# ---- snapshots: what was in an object


MAX_COMPARED = 1_000                                    # parts of an object, and numbers of an array
_ATOMS = (str, bytes, int, float, complex, type(None))


def snapshot(value: Any) -> Any:
    """Nested parts that are equal to those of a later snapshot of `value` if nothing has changed in it meanwhile.

    It looks into containers and arrays, and at the identity of other objects; at most at `MAX_COMPARED` parts.
    """
    left = itertools.count(MAX_COMPARED, -1)

    def taken(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, value.ravel()[:: value.size // MAX_COMPARED + 1].tobytes()
        if isinstance(value, dict):
            return _Parts([(taken(key), taken(each)) for key, each in _first(value.items(), left)], len(value))
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            return _Parts([taken(each) for each in _first(value, left)], len(value))
        return value if isinstance(value, _ATOMS) else _Same(value)

    return taken(value)


def _first(values: Iterable[Any], left: Iterator[int]) -> Iterator[Any]:
    return itertools.takewhile(lambda _: next(left) > 0, values)


class _Parts(NamedTuple):
    parts: list[Any]
    size: int


class _Same:
    """Equal if it is of the same object, which it holds."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def grown(before: Any, now: Any) -> bool:
    """Whether of two snapshots of a list or a dict the later one begins with all of the earlier."""
    if not type(before) is type(now) is _Parts:
        return False
    return now.size >= before.size and now.parts[: len(before.parts)] == before.parts


def grown_inside(before: Any, now: Any) -> bool:
    """Whether of two snapshots of the attributes of an object no more than additions tell the later one."""
    pairs = zip(before.parts, now.parts, strict=False)
    return now.size >= before.size and all(a == b or (a[0] == b[0] and grown(a[1], b[1])) for a, b in pairs)
