"""What is tested under fire shares: functions in threads that change often, children, an interrupt at a given line."""

import faulthandler
import os
import pickle
import signal
import sys
import threading
import traceback
from contextlib import contextmanager

from helpers.common import HANG

PATIENCE = 300                                          # seconds until a child hangs, however busy the machine


@contextmanager
def impatience():
    """The interpreter gives way to other threads five thousand times as often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def in_threads(functions):
    """What the functions return, run at the same time; the first error is raised."""
    results, errors = [None] * len(functions), []

    def call(i, function):
        try:
            results[i] = function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=pair, daemon=True) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    if errors:
        raise errors[0]
    return results


def watch():
    """End this process, a child, with the stacks of its threads if it hangs (by a signal: forks copy no threads)."""
    faulthandler.register(signal.SIGALRM, file=sys.__stderr__, chain=True)
    signal.alarm(PATIENCE)


def in_child(work):
    """What `work()` returns in a fork of this process."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            watch()
            os.close(read)
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(work(), pipe)
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        found = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "the child hangs, or has raised: see stderr"
    return pickle.loads(found)


class Interrupt:
    """Raises once, at the nth time that a line of `files` is reached; or writes down how often each is.

    Parameters
    ----------
    files : set of str
    line : (file, number of the line), optional
    nth : int
    error : exception class

    Attributes
    ----------
    left : int, 0 once it has raised
    seen : dict of (file, line) to int
    """

    def __init__(self, files, line=None, nth=1, error=KeyboardInterrupt):
        self.files, self.line, self.left, self.error, self.seen = files, line, nth, error, {}

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, kind, *_):
        sys.settrace(None)
        return kind is self.error and self.left == 0

    def trace(self, frame, event, arg):
        if frame.f_code.co_filename not in self.files:
            return None
        if event == "line":
            place = frame.f_code.co_filename, frame.f_lineno
            self.seen[place] = self.seen.get(place, 0) + 1
            if place == self.line:
                self.left -= 1
                if self.left == 0:
                    sys.settrace(None)
                    raise self.error
        return self.trace
