"""Comparison of two runs of a step, and of an object before and after a step.

A *recipe* is a nested tuple that says how a distribution was computed. A *snapshot* is a nested value that is equal to
a later one of the same object if the object has not changed. Values that cannot be compared count as equal.
"""

from __future__ import annotations

import math
import types
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llmppl.support.arguments import shown
from llmppl.support.locks import let_through
from llmppl.support.shared import Shared

_IGNORED = frozenset(("_chooser_", "_noted_", "_shared_parts_", "_log_weight_"))    # in a comparison of two particles


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


def is_tensor(value: Any) -> bool:
    """Return True if `value` is a tensor of torch, which is not imported."""
    return hasattr(type(value), "untyped_storage")


