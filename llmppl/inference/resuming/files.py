"""Files that outlive a run: sealed lines of JSON, owners, and atomic replacement.

A *sealed* line ends with a field for the checksum of the text before it. Other tools read it as plain JSON. A file that
is being written has one *owner*, a run that holds its lock. The lock belongs to the file and not to its name, so an
owner checks from time to time that the name still leads to its file. A forked process inherits no file. A log-weight of
-inf is null in all files.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import glob
import hashlib
import json
import math
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self

from llmppl.support.locks import at_fork

if sys.platform != "win32":
    import fcntl

_OPEN = os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0)
_NEW = _OPEN | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
_NO_LOCKS = errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP        # of file systems without locks
_NO_LINKS = errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP
_TIMES = 3                                              # attempts to lock, since the owner may end
_DESCRIPTORS = set[int]()                               # of files that this process owns
_WRITER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_SEAL = re.compile(rb', "check": "([0-9a-f]{16})"\}\n')
_SEAL_SIZE = len(', "check": "0123456789abcdef"}\n')


def parsed(line: str | bytes) -> dict[str, Any]:
    """Return the JSON object in a line; an empty one if the line is no object."""
    value = None
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(line)
    return value if isinstance(value, dict) else {}


def sealed(record: dict[str, Any]) -> bytes:
    """Return a record with at least one field as a line of JSON that ends with its checksum."""
    body = _WRITER.encode(record)[:-1].encode("utf-8", "backslashreplace")      # half of a UTF-16 pair, as JSON has it
    return b'%s, "check": "%s"}\n' % (body, checksum(body).encode())


def unsealed(line: bytes) -> dict[str, Any]:
    """Return the record of a sealed line; an empty one if the line is damaged."""
    body, seal = line[:-_SEAL_SIZE], _SEAL.fullmatch(line[-_SEAL_SIZE:])
    return parsed(body + b"}") if seal and seal[1] == checksum(body).encode() else {}


def checksum(body: bytes) -> str:
    """Return 16 hexadecimal digits of bytes."""
    return hashlib.blake2b(body, digest_size=8).hexdigest()


def null(number: Any) -> Any:
    """Return a number for JSON, where -inf is null."""
    return None if number == -math.inf else number


def no_folder(path: Path) -> FileNotFoundError | None:
    """Return the error for a file whose folder does not exist; None if it does."""
    missing = f"there is no folder {str(path.parent)!r}; make it first"
    return None if path.parent.is_dir() else FileNotFoundError(errno.ENOENT, missing, str(path))


class Owned:
    """File with one owner at a time, until `close`. A symbolic link leads to its target.

    Parameters
    ----------
    path : Path
    begin : callable, optional
        Returns the first bytes of a missing file. Without it, `replacing` creates the file.

    Attributes
    ----------
    descriptor : int, -1 if there is no file yet

    Raises
    ------
    BlockingIOError
        If another run owns the file. It names the process.
    """

    descriptor = -1

    def __init__(self, path: Path, begin: Callable[[], bytes] | None = None) -> None:
        self.path, self._real, self._pid = path, Path(os.path.realpath(path)), os.getpid()
        try:
            while self.descriptor < 0:
                if self._open(begin):
                    return
                if self.descriptor >= 0 and self.fate():        # another run replaced the file before the lock
                    self.close()
            self._sweep()
        except BaseException:
            self.close()
            raise

    def _open(self, begin: Callable[[], bytes] | None) -> bool:
        """Open or create the file. Return True if it is missing and there is no `begin`."""
        try:
            self._own(os.open(self._real, _OPEN))
            _lock(self.descriptor, self.path)
        except BlockingIOError:
            if not self.fate():                         # otherwise its owner has replaced it
                raise
            self.close()
        except FileNotFoundError:
            if missing := no_folder(self._real):
                raise missing from None
            if begin is None:
                return True
            with contextlib.suppress(FileExistsError), self.replacing() as file:
                file.write(begin())
        return False

    def _sweep(self) -> None:
        """Remove the temporary files of killed runs."""
        for left in self._real.parent.glob(f".{glob.escape(self._real.name)}.{'[0-9a-f]' * 8}.part"):
            left.unlink(missing_ok=True)

    def _own(self, descriptor: int) -> None:
        self.close()
        self.descriptor = descriptor
        _DESCRIPTORS.add(descriptor)

    @property
    def is_fork(self) -> bool:
        """True in a process that was forked from the owner's."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise a RuntimeError in a process that was forked from the owner's."""
        if self.is_fork:
            raise RuntimeError(
                f"process {self._pid} writes {self.path}, and process {os.getpid()} is a fork of it. A run goes on in "
                "the process that began it: begin another run here, with a file of its own"
            )

    def fate(self, size: int | None = None) -> str:
        """Describe a change that others made to a file of `size` written bytes; "" if there is none."""
        here = os.fstat(self.descriptor)
        try:
            if not os.path.samestat(here, os.stat(self._real)):
                return "was replaced by another file"
        except FileNotFoundError:
            return "was deleted"
        return f"was cut to {here.st_size:,} of {size:,} bytes" if here.st_size < (size or 0) else ""

    @contextlib.contextmanager
    def replacing(self) -> Iterator[BinaryIO]:
        """Open a temporary file that replaces this one at the end. The path always leads to a complete file."""
        self.check_process()
        beside = self._real.with_name(f".{self._real.name}.{secrets.token_hex(4)}.part")
        descriptor = -1
        try:
            descriptor = os.open(beside, _NEW, 0o666)
            _lock(descriptor, self.path)
            is_new = self.descriptor < 0 or self.fate() == "was deleted"
            if not is_new and hasattr(os, "fchmod"):
                os.fchmod(descriptor, stat.S_IMODE(os.fstat(self.descriptor).st_mode))
            with os.fdopen(os.dup(descriptor), "wb") as file:
                yield file
            os.fsync(descriptor)
            if not is_new and (fate := self.fate()):
                raise OSError(errno.ESTALE, f"the file {fate} while this run wrote it; it is left as it is")
            if sys.platform == "win32":                 # an open file cannot be renamed there
                os.close(descriptor)
                self.close()
            _name(beside, self._real, is_new)
            if sys.platform == "win32":
                descriptor = os.open(self._real, _OPEN)
            self._own(descriptor)
            if is_new:
                _sync_folder(self._real)
                self._sweep()
        except BaseException as error:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            if descriptor not in (-1, self.descriptor):
                os.close(descriptor)
            if isinstance(error, OSError):              # it may name no file, or the temporary one
                raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(self.path)) from error
            raise

    def close(self) -> None:
        descriptor = self.descriptor
        if descriptor >= 0 and not self.is_fork:
            if sys.platform != "win32":
                with contextlib.suppress(OSError):      # the file system may have no locks
                    fcntl.flock(descriptor, fcntl.LOCK_UN)      # a fork may not have closed it yet
            self.descriptor = -1                        # an interrupt after this leaves it open but not locked
            _DESCRIPTORS.discard(descriptor)
            os.close(descriptor)
        self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    __del__ = close


def _lock(descriptor: int, path: Path) -> None:
    """Lock a file until it is closed. Raise a BlockingIOError that names the process of its owner."""
    for time in range(_TIMES):
        try:
            if sys.platform != "win32":
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return
            owner = _owner(os.fstat(descriptor).st_ino)
        if time == 0:
            gc.collect()                                # an interrupt may have left an owner in a cycle
    why = f"{owner or 'another process'} is writing it. Let that one end first, or write to another file"
    raise BlockingIOError(errno.EWOULDBLOCK, why, str(path))


def _owner(inode: int) -> str:
    """Name the process that holds the lock of a file; "" if it has ended, or if the system lists no locks."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, process, file, *_ = line.split()
            if kind == "FLOCK" and file.endswith(f":{inode}"):
                return f"{'another run in ' * (process == str(os.getpid()))}process {process}"
    return ""


def _name(beside: Path, path: Path, is_new: bool) -> None:
    """Rename a temporary file. A new file never replaces an existing one."""
    if is_new:
        try:
            os.link(beside, path)                       # a rename would replace the file of another run
            return beside.unlink()
        except (FileExistsError, FileNotFoundError):    # another run came first, and may have swept
            Owned(path).close()                         # or an error that names its owner
            raise FileExistsError(errno.EEXIST, "another run has made it meanwhile", str(path)) from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
    beside.replace(path)


def _sync_folder(path: Path) -> None:
    """Write the name of a new file to the disk, if folders can be synchronised."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _close_inherited() -> None:
    """Close the files of the parent process. Otherwise a fork would hold their locks as long as it lives."""
    while _DESCRIPTORS:
        os.close(_DESCRIPTORS.pop())


at_fork(after_in_child=_close_inherited)
