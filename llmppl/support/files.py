"""Files that outlive a run: sealed lines of JSON, owners, and replacement as a whole.

A *sealed* line ends with a checksum of what stands before it, in a field of its own, so that other tools read it as
plain JSON. A file that is being written has one *owner*, a run that holds its lock. The lock belongs to the file, and
not to its name: an owner looks from time to time whether the name still leads to its file. A forked process inherits
no file. A log-weight of -inf is null in all files.
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
_TIMES = 3                                              # that a lock is tried: its owner may end
_DESCRIPTORS = set[int]()                               # of files that this process owns
_WRITER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_SEAL = re.compile(rb', "check": "([0-9a-f]{16})"\}\n')
_SEAL_SIZE = len(', "check": "0123456789abcdef"}\n')


def parsed(line: str | bytes) -> dict[str, Any]:
    """Return the JSON object that a line is; an empty one if it is none."""
    value = None
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(line)
    return value if isinstance(value, dict) else {}


def sealed(record: dict[str, Any]) -> bytes:
    """Return a record, which is not empty, as a line of JSON that ends with its checksum."""
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
    """Return a number as JSON has it."""
    return None if number == -math.inf else number


def no_folder(path: Path) -> FileNotFoundError | None:
    """Return the error for a file in a folder that is not there; None if it is."""
    missing = f"there is no folder {str(path.parent)!r}; make it first"
    return None if path.parent.is_dir() else FileNotFoundError(errno.ENOENT, missing, str(path))


class Owned:
    """File with one owner at a time, from here until `close`. It follows a symbolic link.

    Parameters
    ----------
    path : Path
    begin : callable, optional
        Returns the first bytes of a file that is not there. Without it such a file begins with `replacing`.

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
                if self.descriptor >= 0 and self.fate():        # another run had replaced it before it was locked
                    self.close()
            self._sweep()
        except BaseException:
            self.close()
            raise

    def _open(self, begin: Callable[[], bytes] | None) -> bool:
        """Open the file, or make it; return whether there is none, and none to be made."""
        try:
            self._own(os.open(self._real, _OPEN))
            _lock(self.descriptor, self.path)
        except BlockingIOError:
            if not self.fate():                         # else its owner has replaced it meanwhile
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
        """Describe a change that others made to the file; "" if there is none. The owner has written `size` bytes."""
        here = os.fstat(self.descriptor)
        try:
            if not os.path.samestat(here, os.stat(self._real)):
                return "was replaced by another file"
        except FileNotFoundError:
            return "was deleted"
        return f"was cut to {here.st_size:,} of {size:,} bytes" if here.st_size < (size or 0) else ""

    @contextlib.contextmanager
    def replacing(self) -> Iterator[BinaryIO]:
        """Open a file that takes the place of this one at the end: at every moment the old or the new one is whole."""
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
            if sys.platform == "win32":                 # where no open file gets another name
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
            if isinstance(error, OSError):              # some do not name the file, others name the temporary one
                raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(self.path)) from error
            raise

    def close(self) -> None:
        descriptor = self.descriptor
        if descriptor >= 0 and not self.is_fork:
            if sys.platform != "win32":
                with contextlib.suppress(OSError):      # of a file system without locks
                    fcntl.flock(descriptor, fcntl.LOCK_UN)      # a fork may not have closed it yet
            self.descriptor = -1                        # an interrupt from here on leaves it open and not locked
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
    """Name the process that holds the lock of a file; "" if it has ended meanwhile, or the system lists no locks."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, process, file, *_ = line.split()
            if kind == "FLOCK" and file.endswith(f":{inode}"):
                return f"{'another run in ' * (process == str(os.getpid()))}process {process}"
    return ""


def _name(beside: Path, path: Path, is_new: bool) -> None:
    """Give a file its name. No file may have the name of a new one."""
    if is_new:
        try:
            os.link(beside, path)                       # a rename would replace the file of another run
            return beside.unlink()
        except (FileExistsError, FileNotFoundError):    # another run came first, and has swept
            Owned(path).close()                         # or an error that names it
            raise FileExistsError(errno.EEXIST, "another run has made it meanwhile", str(path)) from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
    beside.replace(path)


def _sync_folder(path: Path) -> None:
    """Have the disk keep the name of a new file, where folders can be synchronised."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _close_inherited() -> None:
    """Close the files of the parent process, whose locks a fork would hold as long as it lives."""
    while _DESCRIPTORS:
        os.close(_DESCRIPTORS.pop())


at_fork(after_in_child=_close_inherited)
