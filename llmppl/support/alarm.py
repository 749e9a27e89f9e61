"""Alarms: a TimeoutError in a thread whose Python code takes too long.

The error comes between two instructions of Python, wherever the thread is, as KeyboardInterrupt does after Ctrl-C. A
call of C code ends first. A thread of its own looks at the alarms that are set.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from llmppl.support.locks import Lock, at_fork

LOOK = 0.02                                             # seconds between two looks at the alarms
AGAIN = 0.5                                             # seconds after which an alarm rings again


class Overdue(TimeoutError):
    """Error of code that takes longer than its alarm allows."""

    def __init__(self, message: str = "a part of the request takes too long: make it smaller, or raise its timeout"):
        super().__init__(message)


class Alarm:
    """Alarm of the thread that makes it."""

    def __init__(self) -> None:
        self.thread, self.at = threading.get_ident(), math.inf

    def set(self, seconds: float) -> None:
        """Raise Overdue in the thread after so many seconds, unless `stop` comes first."""
        if seconds == math.inf:
            return
        with _lock.lock:
            self.at = time.monotonic() + seconds
            _alarms.add(self)
            _start()

    def stop(self) -> None:
        """Stop the alarm. It may still raise Overdue here, and not afterwards."""
        try:
            self._stop()
        except Overdue:
            self._stop()
            raise

    def _stop(self) -> None:
        with _lock.lock:
            if self in _alarms:
                _raise_in(self.thread, None)
                _alarms.discard(self)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise Overdue in a block that takes longer than so many seconds."""
    alarm = Alarm()
    alarm.set(seconds)
    try:
        yield
    finally:
        alarm.stop()


_lock, _alarms, _watchers = Lock(), set[Alarm](), list[threading.Thread]()
at_fork(after_in_child=_alarms.clear)


def _start() -> None:
    if not (_watchers and _watchers[0].is_alive()):
        _watchers[:] = [threading.Thread(target=_watch, name="llmppl alarms", daemon=True)]
        _watchers[0].start()


def _watch() -> None:
    """Ring the alarms that are due, until none has been set for a while."""
    last = time.monotonic()
    while True:
        time.sleep(LOOK)
        now = time.monotonic()
        with _lock.lock:
            for alarm in _alarms:
                last = now
                if now >= alarm.at:
                    alarm.at = now + AGAIN
                    _raise_in(alarm.thread, Overdue)
            if now - last > 1:
                _watchers.clear()
                return


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an error in a thread soon, or take back one that it has not met."""
    target = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), target)
