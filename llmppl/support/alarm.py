"""Alarms: a TimeoutError in a thread whose Python code takes too long.

The error comes between two instructions of Python, as KeyboardInterrupt does after Ctrl-C. A call of C code, an import
and the code of locks end first. A thread of its own looks at the alarms that are set.
"""

import ctypes
import functools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from llmppl.support.locks import Lock, at_fork

LOOK = 0.02  # seconds between two looks at the alarms
UNSAFE = {"asyncio", "concurrent", "logging", "queue", "threading", "weakref", "_weakrefset"}
AGAIN = 0.5  # seconds after which an alarm rings again


class Overdue(TimeoutError):
    """Error of code that takes longer than its alarm allows."""

    def __init__(
        self,
        message: str = "a part of the request takes too long: make it smaller, or raise its timeout",
    ):
        super().__init__(message)


class Alarm:
    """Alarm of the thread that makes it."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.at = math.inf
        self.cpu_at = math.inf
        self.cpu_time: Callable[[], float] = (
            time.process_time
        )  # of the thread, where the system tells it
        if hasattr(time, "pthread_getcpuclockid"):
            self.cpu_time = functools.partial(
                time.clock_gettime, time.pthread_getcpuclockid(self.thread)
            )

    def set(self, seconds: float, cpu_seconds: float = math.inf) -> None:
        """Raise Overdue in the thread after so many seconds, or so many of its CPU seconds, unless it is stopped."""
        if seconds == cpu_seconds == math.inf:
            return
        with _lock.lock:
            self.at = time.monotonic() + seconds
            self.cpu_at = self.cpu_time() + cpu_seconds
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
            _alarms.discard(self)
        for _ in range(2):  # an error that is due comes at the jump
            pass


def excuse(cpu_seconds: float) -> None:
    """Leave so many CPU seconds of the calling thread out of its alarms."""
    with _lock.lock:
        for alarm in _alarms:
            if alarm.thread == threading.get_ident():
                alarm.cpu_at += cpu_seconds


@contextmanager
def limited(seconds: float, cpu_seconds: float = math.inf) -> Iterator[None]:
    """Raise Overdue in a block that takes longer than so many seconds, or CPU seconds of its thread."""
    alarm = Alarm()
    alarm.set(seconds, cpu_seconds)
    try:
        yield
    finally:
        alarm.stop()


_lock = Lock()
_alarms = set[Alarm]()
_watchers = list[threading.Thread]()
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
                due = now >= alarm.at or alarm.cpu_time() >= alarm.cpu_at
                if due and _may_end(sys._current_frames().get(alarm.thread)):
                    alarm.at = now + AGAIN
                    alarm.cpu_at = math.inf
                    _raise_in(alarm.thread, Overdue)
            if now - last > 1:
                _watchers.clear()
                return


def _may_end(frame: FrameType | None) -> bool:
    """Return True unless the code of a frame holds locks that an error would leave locked."""
    names = []
    while frame is not None:
        names.append(frame.f_globals.get("__name__", "").partition(".")[0])
        frame = frame.f_back
    return "importlib" not in names and not UNSAFE.intersection(names[:1])


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Raise an error in a thread soon.

    Nothing takes it back: after `SetAsyncExc(thread, None)`, CPython 3.11 looks for the error for ever, and a function
    that is traced never begins.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
