"""Files that outlive a run: one owner at a time, and replacement as a whole.

The lock of a file lies beside it, `results.db.lock`. An OSError of such a file ends a run: `is_own_error` tells it from
an error of a program, which is the result of a task.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


def own(path: Path) -> FileLock:
    """Return the acquired lock of a file.

    Raises
    ------
    BlockingIOError
        If another run owns the file.
    FileNotFoundError
        If its folder does not exist.
    """
    with own_errors(path):
        if not path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, f"there is no folder {str(path.parent)!r}; make it first", str(path))
        lock = FileLock(f"{os.path.realpath(path)}.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            why = "another run is writing it. Let that one end first, or write to another file"
            raise BlockingIOError(errno.EWOULDBLOCK, why, str(path)) from None
    return lock


def replace(path: Path, data: bytes) -> None:
    """Replace the contents of an owned file. A killed process leaves the old contents or the new ones."""
    real = os.path.realpath(path)
    beside = f"{real}.part"
    with own_errors(path):
        try:
            with open(beside, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, real)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise


@contextlib.contextmanager
def own_errors(path: Path) -> Iterator[None]:
    """Mark an OSError as one of a file of this package, and name the file in it."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        error.__dict__["_of_own_file"] = True
        raise


def is_own_error(error: BaseException) -> bool:
    """Return True for an OSError of a file of results or of a checkpoint."""
    return "_of_own_file" in getattr(error, "__dict__", {})
