"""Alike: whether a step that is run again asks for the distribution that it asked for before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from llmppl.exclusive import let_through


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
