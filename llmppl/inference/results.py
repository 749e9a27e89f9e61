"""Results of many tasks, and the file that they are kept in: a line of JSON for each task that has ended.

A line is whole or torn: it is written when its task has ended and before the result is handed on, all at once, with a
line break at its end. So a run that is killed loses the tasks that were under way, and leaves one torn line at most,
the last, which is cut before the file is written again. (A machine that loses its power loses a second of lines more:
to wait for the disk at every line would take longer than a small task.) A line holds

    index : of the task, from 0
    digest : of the task, by which another one is told from it
    task : the task itself, where it is what JSON writes (a tuple is a list there); else this is left out
    seed, version : of the run, and of this package
    seconds : from the begin of the task to its end, with what was done for others in between
    log_ml, log_ml_se, texts, log_weights, cut : as `Particles.to_dict` gives them, deaths where no particle is left; or
    matches : a list of objects, as `Match.as_dict` gives them; or
    error : the traceback of the exception that ended the task

Parquet has no lines that could be torn: a file of that name is made of the lines when the run has ended, and until then
they stand in a file beside it, results.parquet.jsonl.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from llmppl.arguments import path as path_of
from llmppl.arguments import shown
from llmppl.inference import parquet
from llmppl.inference.deaths import Death
from llmppl.inference.files import no_folder, parsed
from llmppl.inference.particles import Particles
from llmppl.inference.saved import SavedParticle

__all__ = ["Result", "ResultFile", "load_results", "read_results"]

if sys.platform != "win32":
    import fcntl

_VERSION = importlib.import_module(__name__.partition(".")[0]).__version__
_SYNCED = 1.0                                           # seconds of lines that may not be on the disk yet
_BEGIN = b'{"index": '                                  # of every line, which has at least
_KINDS: dict[str, Any] = {"index": int, "digest": str, "seed": int, "version": str, "seconds": (int, float)}


@dataclass(frozen=True)
class Result:
    """What became of a task: exactly one of `particles`, `matches` and `error` is not None.

    index : int, the place of the task among the tasks
    task : the task itself; in a result that was loaded as the file has it, None where it was more than JSON writes
    particles : Particles, whose `stats` are None, since what was computed for all tasks belongs to none
    matches : list of Match or Beam, where the task was a query or a beam search; of dicts in a result that was loaded
    error : str, the traceback of the exception that ended the task
    seconds : float, from its begin to its end, with what was done for others in between
    """

    index: int
    task: Any
    particles: Particles[Any] | Any = None              # | Any: not None where `error` is, as checkers cannot know
    matches: list[Any] | Any = None
    error: str | None = None
    seconds: float = 0.0

    def __repr__(self) -> str:
        if self.error is not None:
            found = self.error.rstrip().rpartition("\n")[2]
        elif self.particles is not None:
            found = f"{len(self.particles)} particles, log_ml={self.particles.log_ml:.2f}"
        else:
            found = f"{len(self.matches or ())} matches"
        return f"Result({self.index}, {shown(self.task, 60)}, {found}, {self.seconds:.2f} s)"


class ResultFile:
    """A file of results that is being written.

    Parameters
    ----------
    path : path of the file
        A name that ends with .parquet makes it a Parquet file, when it is left at the end of a `with` block.
    seed : int, optional
        Of the run. Left out, it is that of the file, or a new one.
    resume : bool
        Go on with a file that is there. Its torn last line is cut.
    tasks : sequence, optional
        Those of the run, to be compared with the results that are there.

    Attributes
    ----------
    seed : int
    whole : dict of int to str
        The digests of the tasks whose results were there when it was opened, by index.

    Raises
    ------
    FileExistsError
        If there are results already, and `resume` is False.
    ValueError
        If the file holds anything else, or results of another seed or of other tasks; it is left as it is.
    OSError
        If it cannot be written. What was written before stays whole.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, seed: int | None = None, resume: bool = False,
        tasks: Sequence[Any] | None = None,
    ) -> None:  # fmt: skip
        self.path = path_of("to", path)
        self.whole: dict[int, str] = {}
        self._size, self._synced = 0, time.monotonic()
        self._lines = lines_of(self.path)
        if self._lines != self.path:
            parquet.pyarrow()                           # or an error, before anything runs
        for place in {self.path, self._lines}:
            _check_place(place, resume)
        new = not self._lines.exists()
        self._file: BinaryIO = self._lines.open("xb" if new else "r+b", buffering=0)
        try:
            self._lock()
            self._read(seed)
            if tasks is not None:
                self.check_number(len(tasks))
                for index in sorted(self.whole):
                    self.holds(index, tasks[index])
        except BaseException:
            self._file.close()
            if new:
                self._lines.unlink()
            raise

    def _lock(self) -> None:
        if sys.platform != "win32":                     # until the file is closed, or the process ends
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                why = "another run is writing it; let that one end first"
                raise BlockingIOError(error.errno, why, str(self.path)) from None

    def _read(self, seed: int | None) -> None:
        for size, record in _records(self.path, ["index", "digest", "seed"]):
            self.whole[record["index"]] = record["digest"]
            self._size += size
            if seed is None:
                seed = record["seed"]
            elif seed != record["seed"]:
                raise ValueError(
                    f"{self.path} holds results of seed={record['seed']}, not of seed={seed}: go on with the same "
                    "seed (or leave it out), or write to another file"
                )
        self._file.truncate(self._size)                 # a torn line would break the next one
        self._file.seek(self._size)
        self.seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed

    def check_number(self, num_tasks: int) -> None:
        """A ValueError if there are fewer tasks than there are results of."""
        last = max(self.whole, default=-1)
        if last >= num_tasks:
            raise ValueError(
                f"{self.path} holds the result of a task {last}, from 0, and tasks are now {num_tasks}: go on with the "
                "same tasks in the same order, or write to another file"
            )

    def holds(self, index: int, task: Any) -> bool:
        """Whether the result of `task` was there; a ValueError if it was that of another task."""
        before = self.whole.get(index)
        if before is not None and before != digest(task):
            raise ValueError(
                f"{self.path} holds the result of another task {index} than {shown(task)}: go on with the same tasks "
                "in the same order (more may follow), or write to another file"
            )
        return before is not None

    def write(self, result: Result) -> None:
        """Write a line."""
        record = {
            "index": result.index,
            "digest": digest(result.task),
            **_written(result.task),
            "seed": self.seed,
            "version": _VERSION,
            "seconds": round(result.seconds, 3),
            **_outcome(result),
        }
        text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        line = memoryview(text.encode("utf-8", "backslashreplace"))     # half of a UTF-16 pair, as JSON escapes it
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
            if time.monotonic() - self._synced > _SYNCED:
                self._sync()
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            why = f"{error.strerror}: the results before that of task {result.index} are whole; resume=True goes on"
            raise OSError(error.errno, why, str(self.path)) from error
        self._size += len(line)

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        try:
            self._sync()
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            if kind is None and self._lines != self.path:
                parquet.write_rows(self.path, (record for _, record in _records(self.path)))
                self._lines.unlink()
        finally:
            self.close()


def load_results(path: str | os.PathLike[str]) -> list[Result]:
    """The results in a file that `run_many` has written, or is writing, by index.

    Their particles have text, log weight and mark as cut. A `task` is what JSON makes of it, so that a tuple is a list
    and a key of a dict a text; it is None where JSON does not write it.
    """
    return sorted(read_results(path), key=lambda result: result.index)


def read_results(path: str | os.PathLike[str]) -> Iterator[Result]:
    """The same results one at a time, in the order of the file, which may be larger than memory."""
    return (_result(record) for _, record in _records(path_of("path", path)))


def digest(task: Any) -> str:
    """16 hexadecimal digits that tell a task from others. It is the same in every process.

    A TypeError for a task that is nothing but data: what JSON writes, or has a repr that does not name its address.
    """
    try:
        text = _text(task)
    except ValueError as error:
        raise TypeError(f"the task {shown(task)} {NO_DATA} ({error})") from error
    return hashlib.sha256(text.encode()).hexdigest()[:16]


NO_DATA = "cannot be told from others when a run is resumed: with to=, a task is data (texts, numbers, lists, dicts)"


def _told(part: Any) -> Any:
    if isinstance(part, (np.ndarray, np.generic)):
        return part.tolist()
    if isinstance(part, (set, frozenset)):
        return sorted(map(_text, part))
    text = repr(part)
    if f"{id(part):x}" in text:
        raise TypeError(f"{shown(part)} in a task {NO_DATA}")
    return text


def _text(part: Any) -> str:
    return json.dumps(part, sort_keys=True, default=_told)


def _written(task: Any) -> dict[str, Any]:
    """The part of a line that is the task itself, if JSON writes it."""
    try:
        json.dumps(task, allow_nan=False)
    except (TypeError, ValueError):
        return {}
    return {"task": task}


def _outcome(result: Result) -> dict[str, Any]:
    if result.error is not None:
        return {"error": result.error}
    if result.particles is not None:
        return result.particles.to_dict()
    return {"matches": [{name: _finite(value) for name, value in m.as_dict().items()} for m in result.matches or ()]}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _result(record: dict[str, Any]) -> Result:
    particles = None
    if "texts" in record:
        rows = zip(record["texts"], record["log_weights"], record["cut"], strict=True)
        error = record["log_ml_se"]
        reason = "" if error is not None else "the run could not tell; a file does not say why"
        deaths = [Death(**death) for death in record.get("deaths", ())]
        particles = Particles([SavedParticle(*row) for row in rows], deaths=deaths, accuracy=lambda: (error, reason))
    return Result(
        record["index"], record.get("task"), particles, record.get("matches"), record.get("error"), record["seconds"]
    )


def lines_of(path: Path) -> Path:
    """The file of lines behind a file of results: the same, but beside a Parquet file."""
    return path.with_name(f"{path.name}.jsonl") if path.suffix == ".parquet" else path


def _records(path: Path, columns: list[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """The records of results, each once, with the size of their lines; at least `columns` of them."""
    lines, rows = lines_of(path), set[int]()
    if lines != path and path.exists():
        for record in parquet.read_rows(path, columns):
            rows.add(record["index"])
            yield 0, record
    if lines == path or lines.exists():
        for line, record in _lines(lines):
            if record["index"] not in rows:             # else they had become a row, and the run was killed then
                yield len(line), record


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The whole lines of a file of results, and what they say; a ValueError for a file of anything else."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            record, is_whole = parsed(line), line.endswith(b"\n")
            if is_whole:
                is_result = all(isinstance(record.get(name), kind) for name, kind in _KINDS.items())
            else:
                is_result = line.startswith(_BEGIN) or _BEGIN.startswith(line)
            if not is_result:
                told = shown(line.rstrip(b"\n").decode("utf-8", "replace"))
                raise ValueError(
                    f"{path}, line {number}, is no result of run_many, and the file is left as it is: {told}"
                )
            if is_whole:
                yield line, record


def _check_place(path: Path, resume: bool) -> None:
    if missing := no_folder(path):
        raise missing
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "results are written to a file of their own, and this is none", str(path))
    if not resume and path.exists() and path.stat().st_size:
        raise FileExistsError(errno.EEXIST, "the file is there; resume=True goes on with its results", str(path))
