"""Copies of models: a particle is a deep copy, except for what its class lists in `shared`, and what is immutable."""

from __future__ import annotations

import copy
import types
import weakref
from typing import Any

from llmppl.support.shared import Shared

OWN = frozenset(("_chooser_", "_noted_", "_stepping_", "_attribution_"))    # Model sets these in a copy
_ATOMS = (str, bytes, int, float, complex, bool, type(None), types.FunctionType, *weakref.ProxyTypes)


class _OwnCopies(dict[type, bool]):
    """Types whose instances are their own copies."""

    def __missing__(self, cls: type) -> bool:
        is_atom = cls in _ATOMS or issubclass(cls, type)
        self[cls] = found = is_atom or getattr(cls, "__deepcopy__", None) is Shared.__deepcopy__
        return found


_IS_OWN_COPY = _OwnCopies()


def shared_names(cls: type) -> frozenset[str]:
    """Return the attributes that `cls` and its bases list in `shared`."""
    return frozenset(name for base in cls.__mro__ for name in vars(base).get("shared", ()))


def deep_copy(model: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of `model` without its chooser."""
    new = memo[id(model)] = object.__new__(type(model))
    shared = shared_names(type(model))
    for name, value in vars(model).items():
        if not (name in OWN or name in shared or _IS_OWN_COPY[type(value)]):
            value = _copied(value, memo)
        vars(new)[name] = value
    new._chooser_ = None
    return new


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in (list, set) and all(map(_IS_OWN_COPY.__getitem__, map(type, value))):
        return memo.setdefault(id(value), value.copy())
    return copy.deepcopy(value, memo)
