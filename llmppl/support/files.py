"""Files that outlive a run: one process writes such a file, and replaces it as a whole or by transactions.

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

_HEAD = 100  # bytes of a file that tell it from others


class Owned:
    """A file that this process alone writes, until `release`.

    Parameters
    ----------
    path : Path
    open_files : names of files that the process holds open after `note`, by their ends: "" for the file itself

    Raises
    ------
    BlockingIOError
        If another run owns the file.
    FileNotFoundError
        If its folder does not exist.
    """

    def __init__(self, path: Path, *open_files: str) -> None:
        self.path = path
        self._real = os.path.realpath(path)
        self._process = os.getpid()
        self._head: bytes | None = None
        self._ends = ".lock", *open_files
        with own_errors(path):
            if not path.parent.is_dir():
                missing = f"there is no folder {str(path.parent)!r}; make it first"
                raise FileNotFoundError(errno.ENOENT, missing, str(path))
            self._lock = FileLock(f"{self._real}.lock", timeout=0)
            try:
                self._lock.acquire()
            except Timeout:
                why = "another run is writing it. Let that one end first, or write to another file"
                raise BlockingIOError(errno.EWOULDBLOCK, why, str(path)) from None
        self.note()

    @property
    def is_mine(self) -> bool:
        """False in a forked child of the process that owns the file."""
        return os.getpid() == self._process

    def note(self) -> None:
        """Note which files are open."""
        self._numbers = self._open_numbers()

    def _open_numbers(self) -> list[int | None]:
        return [_number(self._real + end) for end in self._ends]

    def check(self) -> None:
        """Raise an OSError in a forked child, and if an open file was deleted or replaced."""
        if not self.is_mine:
            self._refuse(
                "a process that was forked from the run cannot write it: give the child a file of its own"
            )
        if self._open_numbers() != self._numbers:
            self._refuse("it was deleted or replaced while the run was writing it, or its lock was")

    def _refuse(self, why: str) -> None:
        with own_errors(self.path):
            raise OSError(errno.ESTALE, why, str(self.path))

    def read(self) -> bytes:
        """Return the contents of the file."""
        with own_errors(self.path):
            data = self.path.read_bytes()
        self._head = data[:_HEAD]
        return data

    def replace(self, data: bytes) -> None:
        """Replace the contents of the file. A killed process leaves the old contents or the new ones."""
        self.check()
        beside = f"{self._real}.part"
        with own_errors(self.path):
            if self._head is not None and _head(self._real) != self._head:
                self._refuse("it was deleted or replaced while the run was writing it")
            try:
                with open(beside, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(beside, self._real)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(beside)
                raise
        self._head = data[:_HEAD]

    def release(self) -> None:
        if self.is_mine:
            self._lock.release()


def _number(path: str) -> int | None:
    """Return the number of a file in its file system; None if there is no such file."""
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None


def _head(path: str) -> bytes | None:
    """Return the first bytes of a file; None if there is no such file."""
    try:
        with open(path, "rb") as file:
            return file.read(_HEAD)
    except FileNotFoundError:
        return None


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
