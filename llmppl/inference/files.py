"""Files: lines of JSON, and files that are written as a whole. A log-weight of -inf is null in all of them."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


def parsed(line: str | bytes) -> dict[str, Any]:
    """Return the JSON object that a line is; an empty one if it is none."""
    value = None
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(line)
    return value if isinstance(value, dict) else {}


def null(number: Any) -> Any:
    """Return a number as JSON has it."""
    return None if number == -math.inf else number


def no_folder(path: Path) -> FileNotFoundError | None:
    """Return the error for a file in a folder that is not there; None if it is."""
    missing = f"there is no folder {str(path.parent)!r}; make it first"
    return None if path.parent.is_dir() else FileNotFoundError(errno.ENOENT, missing, str(path))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` at the end: at every moment that is as it was, or as it is to be."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")      # of its own, lest two runs write one
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        if isinstance(error, OSError):                  # of which some do not name the file, others this one
            error.filename, error.filename2 = str(path), None
        raise
