"""Locks that survive forks, and a `cached_property` without one.

A table that only grows is *published last*: one assignment enters a complete value, after all values that it refers to.
Lookups then need no lock. A fork ends all other threads in the child, whose locks are free there.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Lock:
    """Reentrant lock. Pickles and forks get a new one."""

    __slots__ = ("__weakref__", "lock")

    def __init__(self) -> None:
        self.lock: Any = threading.RLock()
        _locks.add(
            weakref.ref(self, _locks.discard)
        )  # discard is C code, in which no signal handler runs

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()


def locked(method: F) -> F:
    """Return a method that one thread at a time runs, among all objects with the same Lock as their `_lock`."""

    @functools.wraps(method)
    def waits(self: Any, *arguments: Any) -> Any:
        # on one line: an interrupt between two lines could leave it locked
        with self._lock.lock:
            return method(self, *arguments)  # noqa: E701

    return cast(F, waits)


_locks = set[weakref.ref[Lock]]()
at_fork: Callable[..., None] = getattr(os, "register_at_fork", lambda **_: None)  # Windows has none


def _free() -> None:
    """Replace all locks except those of the forking thread, whose call continues in the child."""
    for turn in [ref() for ref in [*_locks]]:
        if (
            turn is not None and not turn.lock._is_owned()
        ):  # threading.Condition uses the same method
            turn.lock = threading.RLock()


at_fork(after_in_child=_free)


class cached_property(functools.cached_property[T]):  # noqa: N801
    """`functools.cached_property` without its lock in Python 3.11, which a fork would not free."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        super().__init__(function)
        self.lock = nullcontext()
