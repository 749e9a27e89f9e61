"""Alike: whether a step that is run again asks for and makes what it did before, and whether an object has changed."""

from __future__ import annotations

import itertools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from llmppl.support.arguments import shown
from llmppl.support.locks import let_through
from llmppl.support.shared import Shared


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
    except (TypeError, ValueError, RuntimeError) as error:                  # of arrays and tensors
        let_through(error)
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
    except (TypeError, ValueError, RuntimeError) as error:
        let_through(error)
        return True


# ---- two runs of a step


def first_difference(one: Any, other: Any, *, weights: bool = True) -> str:
    """The first attribute in which two particles differ that ran the same steps, in words; "" if nothing does.

    Their weights are compared by what the statements have added. What cannot be compared is taken for equal.
    """
    before, now = vars(one), vars(other)
    for name in {**before, **now}:
        if name in ("_chooser_", "_noted_", "_kept_", "_log_weight_") or (name == "_attribution_" and not weights):
            continue
        x, y = (attributes.get(name, getattr(type(one), name, None)) for attributes in (before, now))
        if not _same_state(x, y, {(id(one), id(other))}):
            return f"{name.strip('_')} was {shown(x, 40)} and then {shown(y, 40)}"
    return ""


def _same_state(x: Any, y: Any, seen: set[tuple[int, int]]) -> bool:
    """Whether two objects that two runs of a step have made hold the same; numbers to rounding."""
    if x is y or (id(x), id(y)) in seen:
        return True
    if type(x) is not type(y):
        return False
    seen.add((id(x), id(y)))

    def all_same(xs: Iterable[Any], ys: Iterable[Any]) -> bool:
        return all(_same_state(a, b, seen) for a, b in zip(xs, ys, strict=True))

    if isinstance(x, float):
        return bool(abs(x - y) <= 1e-6 * max(1.0, abs(x)) or x == y or (x != x and y != y))
    if isinstance(x, np.ndarray) or hasattr(type(x), "untyped_storage"):
        return x.shape == y.shape and (bool((x == y).all()) or not bool((x == x).all()))
    if isinstance(x, dict):
        return x.keys() == y.keys() and all_same(x.values(), map(y.__getitem__, x))
    if isinstance(x, (list, tuple, deque)):
        return len(x) == len(y) and all_same(x, y)
    if isinstance(x, types.FunctionType):
        return x.__code__ is y.__code__ and all_same(_cells(x), _cells(y))
    if isinstance(x, types.MethodType):
        return x.__func__ is y.__func__ and _same_state(x.__self__, y.__self__, seen)
    if isinstance(x, Shared) or not hasattr(x, "__dict__") or type(x).__eq__ is not object.__eq__:     # type: ignore[comparison-overlap]
        return _alike(x, y)
    return _same_state(vars(x), vars(y), seen)


def _cells(function: types.FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]


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
        if hasattr(type(value), "untyped_storage"):     # a tensor
            return id(value), value, None if value.is_inference() else value._version
        if isinstance(value, dict):
            return _Parts([(taken(key), taken(each)) for key, each in _first(value.items(), left)], len(value))
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            return _Parts([taken(each) for each in _first(value, left)], len(value))
        if isinstance(value, bytearray):
            return bytes(value)
        return value if isinstance(value, _ATOMS) else (id(value), value)       # equal if it is of the same object

    return taken(value)


def _first(values: Iterable[Any], left: Iterator[int]) -> Iterator[Any]:
    return itertools.takewhile(lambda _: next(left) > 0, values)


class _Parts(NamedTuple):
    parts: list[Any]
    size: int


def grown(before: Any, now: Any) -> bool:
    """Whether of two snapshots of a list or a dict the later one begins with all of the earlier."""
    if not type(before) is type(now) is _Parts:
        return False
    return now.size >= before.size and now.parts[: len(before.parts)] == before.parts


def grown_inside(before: Any, now: Any) -> bool:
    """Whether of two snapshots of the attributes of an object no more than additions tell the later one."""
    pairs = zip(before.parts, now.parts, strict=False)
    return now.size >= before.size and all(a == b or (a[0] == b[0] and grown(a[1], b[1])) for a, b in pairs)
