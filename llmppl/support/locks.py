"""What several threads share: used by one call at a time, and right after a call that did not end.

An interrupt can end a call between any two lines, and what it was changing is then right nowhere in particular. There
are two ways to live with that. `Exclusive` repairs nothing where it broke: a call that does not end leaves a mark, and
the next one that finds the mark makes everything anew before it begins. What only grows, and is found by a number or a
key that others hold, is *published last*: entered whole where it is looked up, in one assignment, after all that it
refers to is in place. It can be looked up without a lock, and only what is not found yet is worked out `in_turn`.
A fork interrupts all threads but its own, of which the child has none: the locks that they held are free there, and
the next call finds their marks.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
_NAMES = "SIGINT", "SIGTERM", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGUSR1", "SIGUSR2"
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


class Turn:
    """Lock that a thread may take again while it holds it. Pickles and forks get a new one."""

    __slots__ = ("__weakref__", "lock")

    def __init__(self) -> None:
        self.lock: Any = threading.RLock()
        _turns.add(weakref.ref(self, _turns.discard))   # C code, in which no signal handler runs

    def __reduce__(self) -> tuple[type[Turn], tuple[()]]:
        return Turn, ()


def in_turn(method: F) -> F:
    """The method, run by one thread at a time among all objects that have the same Turn as their `_turn`."""

    @functools.wraps(method)
    def waits(self: Any, *arguments: Any) -> Any:
        with self._turn.lock: return method(self, *arguments)           # noqa: E701  # as in Exclusive

    return cast(F, waits)


_turns = set[weakref.ref[Turn]]()
at_fork: Callable[..., None] = getattr(os, "register_at_fork", lambda **_: None)        # Windows has none


def _free() -> None:
    """Replace all locks, except those of the forking thread, whose call goes on in the child."""
    for turn in [ref() for ref in [*_turns]]:
        if turn is not None and not turn.lock._is_owned():              # as threading.Condition asks
            turn.lock = threading.RLock()


at_fork(after_in_child=_free)


class cached_property(functools.cached_property[T]):    # noqa: N801
    """That of functools, without the lock that Python 3.11 has around it, which no fork would free."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        super().__init__(function)
        self.lock = nullcontext()


class Exclusive:
    """`exclusive(function, *arguments)` is `function(*arguments)`, in one thread at a time.

    Parameters
    ----------
    renew : callable
        Brings what is shared into a state that is right whatever an unfinished call has left. It runs before the next
        call, and again if it was itself not finished.
    name : str
        What is shared, for the error.

    Raises
    ------
    RuntimeError
        If the function itself calls it again in the same thread, where waiting would never end.
    """

    def __init__(self, renew: Callable[[], None], name: str) -> None:
        self._renew, self._name = renew, name
        self._turn = Turn()
        self._ended = True

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._turn.lock._is_owned():
            raise RuntimeError(f"{self._name} was used from inside a call of its own, by {function.__qualname__}")
        # on one line: nothing that raises between two lines leaves it locked
        with self._turn.lock: return self._to_its_end(function, arguments)      # noqa: E701

    def _to_its_end(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if not self._ended:
            self._renew()
        self._ended = False
        result = function(*arguments)
        self._ended = True
        return result

    def in_order(self) -> None:
        """Say, inside a call, that all is right as it is, though the call is about to raise."""
        self._ended = True


def let_through(error: BaseException) -> None:
    """Raise `error` again if a signal handler raised it; what catches the exceptions of other code asks this first."""
    handlers: list[Any] = [signal.getsignal(number) for number in signal.valid_signals()]
    called = [each if hasattr(each, "__code__") else each.__call__ for each in handlers if callable(each)]
    codes = [getattr(each, "__code__", None) for each in called]
    if any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__)):
        raise error


class _Noting:
    """A signal handler that notes what another one raises."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self.handler, self.raised = handler, list[BaseException]()

    def __call__(self, *arguments: Any) -> None:
        try:
            self.handler(*arguments)
        except BaseException as error:
            self.raised.append(error)
            raise


def heard(run: Callable[[], T]) -> T:
    """The result of `run()`; what a signal handler raised in it, and was swallowed there, is raised."""
    if threading.current_thread() is not threading.main_thread():               # where no handler runs
        return run()
    noting = {number: _Noting(handler) for number in _SIGNALS if callable(handler := signal.getsignal(number))}

    def restore() -> None:
        for number, each in noting.items():
            if signal.getsignal(number) in [each]:
                signal.signal(number, each.handler)

    try:
        for number, each in noting.items():
            signal.signal(number, each)
        result = run()
    finally:
        try:
            restore()
        finally:                                        # a handler that raised may have ended the first
            restore()
    for each in noting.values():
        if each.raised:
            raise each.raised[-1]
    return result
