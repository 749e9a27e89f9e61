"""Comparison of two runs of a step, and of an object before and after a step.

A *recipe* is a nested tuple that says how a distribution was computed. A *snapshot* is a nested value that is equal to
a later one of the same object if the object has not changed. Values that cannot be compared count as equal.
"""

from __future__ import annotations

import itertools
import math
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from llmppl.support.arguments import shown
from llmppl.support.locks import let_through
from llmppl.support.shared import Shared

_IGNORED = frozenset(("_chooser_", "_noted_", "_shared_parts_", "_log_weight_"))    # in a comparison of two particles


def same_recipe(a: Any, b: Any) -> bool:
    """Return True if two recipes are equal. It runs once for every candidate of a step."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is tuple:
        if len(a) != len(b):
            return False
        for x, y in zip(a, b):                          # noqa: B905 strict= takes a third of the time
            if x is not y and not same_recipe(x, y):
                return False
        return True
    if type(a) is np.ndarray:
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return bool(a == b)


def same_support(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Return True if two supports of equal length are equal, as far as their values can be compared."""
    try:
        if before == now:
            return True
    except (TypeError, ValueError, RuntimeError) as error:                  # arrays and tensors
        let_through(error)
        return True
    return all(map(_alike, before, now))


def _alike(a: Any, b: Any) -> bool:
    """Return True unless two values differ. Objects without `__eq__` count as equal."""
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
    """Return the first attribute in which two particles that ran the same steps differ, in words; "" if none does.

    With `weights`, it also compares the log-weights that the statements added.
    """
    before, now = vars(one), vars(other)
    ignored = _IGNORED if weights else _IGNORED | {"_attribution_"}
    for name in dict.fromkeys((*before, *now)):
        x, y = (attributes.get(name, getattr(type(one), name, None)) for attributes in (before, now))
        if name not in ignored and not _same_state(x, y, {(id(one), id(other))}):
            return f"{name.strip('_')} was {shown(x, 40)} and then {shown(y, 40)}"
    return ""


def _same_state(x: Any, y: Any, seen: set[tuple[int, int]]) -> bool:
    """Return True if two objects, made by two runs of a step, have equal contents. Numbers are compared to rounding."""
    if x is y or (id(x), id(y)) in seen:
        return True
    if type(x) is not type(y):
        return False
    seen.add((id(x), id(y)))
    if isinstance(x, float):
        return math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-6) or (x != x and y != y)
    if isinstance(x, np.ndarray) or is_tensor(x):
        return x.shape == y.shape and (bool((x == y).all()) or not bool((x == x).all()))
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(_same_state(x[key], y[key], seen) for key in x)
    split = next((split for kinds, split in _SPLITS if isinstance(x, kinds)), None)
    if split is None:
        is_plain = hasattr(x, "__dict__") and not isinstance(x, Shared) and type(x).__eq__ is object.__eq__     # type: ignore[comparison-overlap]
        return _same_state(vars(x), vars(y), seen) if is_plain else _alike(x, y)
    (key, parts), (other_key, other_parts) = split(x), split(y)
    return key == other_key and all(_same_state(a, b, seen) for a, b in zip(parts, other_parts, strict=True))


def _split_function(function: types.FunctionType) -> tuple[int, Sequence[Any]]:
    cells = (cell for cell in function.__closure__ or () if cell != types.CellType())
    return id(function.__code__), [cell.cell_contents for cell in cells]


# kinds of objects, and a function that returns a key, which must be equal, and parts to be compared
_SPLITS: tuple[tuple[Any, Callable[[Any], tuple[int, Sequence[Any]]]], ...] = (
    ((list, tuple, deque), lambda values: (len(values), values)),
    (types.FunctionType, _split_function),
    (types.MethodType, lambda method: (id(method.__func__), [method.__self__])),
)


# ---- snapshots


MAX_COMPARED = 1_000                                    # parts of an object, and numbers of an array
_ATOMS = (str, bytes, int, float, complex, type(None))


def snapshot(value: Any) -> Any:
    """Return nested parts that are equal to those of a later snapshot of `value` if it has not changed meanwhile.

    Containers and arrays are compared by their contents, other objects by identity. At most `MAX_COMPARED` parts count.
    """
    return _snapshot(value, itertools.count(MAX_COMPARED, -1))


def _snapshot(value: Any, remaining: Iterator[int]) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.ravel()[:: value.size // MAX_COMPARED + 1].tobytes()
    if is_tensor(value):
        return id(value), value, None if value.is_inference() else value._version
    if isinstance(value, dict):
        items = _up_to(remaining, value.items())
        return _Parts([(_snapshot(key, remaining), _snapshot(each, remaining)) for key, each in items], len(value))
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return _Parts([_snapshot(each, remaining) for each in _up_to(remaining, value)], len(value))
    if isinstance(value, bytearray):
        return bytes(value)
    return value if isinstance(value, _ATOMS) else (id(value), value)           # equal if it is the same object


def _up_to(remaining: Iterator[int], values: Iterable[Any]) -> Iterator[Any]:
    """Yield values until `remaining` has counted down to 0."""
    return itertools.takewhile(lambda _: next(remaining) > 0, values)


def is_tensor(value: Any) -> bool:
    """Return True if `value` is a tensor of torch, which is not imported."""
    return hasattr(type(value), "untyped_storage")


class _Parts(NamedTuple):
    """Snapshots of the first parts of a container, and its size."""

    parts: list[Any]
    size: int


def grown(before: Any, now: Any) -> bool:
    """Return True if, of two snapshots of a list or a dict, the later one begins with all parts of the earlier one."""
    if not type(before) is type(now) is _Parts:
        return False
    return now.size >= before.size and now.parts[: len(before.parts)] == before.parts


def grown_inside(before: Any, now: Any) -> bool:
    """Return True if two snapshots of the attributes of an object differ by additions alone."""
    pairs = zip(before.parts, now.parts, strict=False)
    return now.size >= before.size and all(a == b or (a[0] == b[0] and grown(a[1], b[1])) for a, b in pairs)
