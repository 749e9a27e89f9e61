"""Results of many tasks, and the file that keeps them: a header, and a line of JSON for each task that has ended.

The file gets a line when its task has ended, before the result is handed on, in one piece with a line break at its end.
So a run that is killed loses the tasks that were under way, and leaves one torn line at most, the last, which the next
run cuts. (A machine that loses its power loses a second of lines more: waiting for the disk at every line would take
longer than a small task.) A line holds

    index : of the task, from 0
    digest : of the contents of the task, to compare it with those of another run
    task : the task itself, if JSON can write it (a tuple is a list there); else this is left out
    run : of the header that the line belongs to
    seconds : from the begin of the task to its end, with what was done for others in between
    log_ml, log_ml_se, texts, log_weights, cut : as `Particles.to_dict` gives them, deaths where no particle is left; or
    matches : a list of objects, as `Match.as_dict` gives them; or
    error : the traceback of the exception that ended the task
    check : a checksum of all that stands before it in the line

The header, the first line, describes the run: `run`, at random; `seed`; `version` of this package; and `identity` of
the program and its language models. If `resume="force"` goes on with another program, another header follows, which
names the one `after` which it comes. A line that is damaged, of another file, or the second of its task is an error.

Lines of Parquet could not be torn: a file of that name is made of the lines when the run has ended, and until then they
stand in a file beside it, results.parquet.jsonl. Its metadata hold the headers.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import math
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from llmppl.inference.deaths import Death
from llmppl.inference.detached import SavedParticle
from llmppl.inference.particles import Particles
from llmppl.inference.resuming.fingerprint import difference, digest_of_data
from llmppl.support.arguments import path as path_of
from llmppl.support.arguments import shown
from llmppl.support.files import Owned, checksum, no_folder, sealed
from llmppl.tasks import parquet
from llmppl.tasks.lines import FORMAT, entries, lines_of, scan

__all__ = ["Result", "ResultFile", "load_results", "read_results", "repair"]

Resume = bool | Literal["force"]
_VERSION = importlib.import_module(__name__.partition(".")[0]).__version__
_WRITER = json.JSONEncoder(allow_nan=False, sort_keys=True)
_SECOND = 1.0                                           # from one look at the disk to the next
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
    resume : bool or "force"
        Go on with a file that is there. Its torn last line is cut. "force" keeps results of another program, seed,
        language model or version.
    tasks : sequence, optional
        Those of the run, to be compared with the results that are there.
    identity : dict, optional
        Of the program, from `llmppl.inference.resuming.fingerprint`. Left out, it is not compared.

    Attributes
    ----------
    seed : int
    whole : dict of int to str
        The digests of the tasks whose results were there when it was opened, by index.

    Raises
    ------
    FileExistsError
        If there are results already, and `resume` is False.
    BlockingIOError
        If another run is writing the file.
    ValueError
        If the file holds anything else, or results of another run or of other tasks. It is left as it is.
    OSError
        If it cannot be written, or if something else deletes, replaces or changes it.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, seed: int | None = None, resume: Resume = False,
        tasks: Sequence[Any] | None = None, identity: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.path = path_of("to", path)
        self.whole: dict[int, str] = {}
        self._headers = list[dict[str, Any]]()
        self._size, self._num, self._looked = 0, 0, time.monotonic()
        self._lines = lines_of(self.path)
        if self._lines != self.path:
            parquet.pyarrow()                           # or an error, before anything runs
        for place in {self.path, self._lines}:
            _check_place(place, resume)
        if not resume and _has_results(self.path):
            why = "the file is there; resume=True goes on with its results"
            raise FileExistsError(errno.EEXIST, why, str(self.path))
        is_new = not self._lines.exists()
        if is_new and self.path.exists():
            self._read()                                # of a Parquet file
        if is_new:
            self._head(seed, resume, identity)
        try:
            self._owned = Owned(self._lines, lambda: sealed(self._headers[-1]))
            self._read()
            os.ftruncate(self._owned.descriptor, self._size)    # a torn line would break the next one
            if self._head(seed, resume, identity):
                self._append(sealed(self._headers[-1]), "the header")
            self.seed: int = self._headers[-1]["seed"]
            if tasks is not None:
                self.check_number(len(tasks))
                for index in sorted(self.whole):
                    self.holds(index, tasks[index])
        except BaseException:
            if hasattr(self, "_owned"):
                self.close()
                if is_new:
                    self._lines.unlink()
            raise

    def _read(self) -> None:
        self.whole, self._headers, self._size = {}, [], 0
        for end, record in entries(self.path):
            self._size = end
            if "index" in record:
                self.whole[record["index"]] = record["digest"]
            elif record["run"] not in [header["run"] for header in self._headers]:
                self._headers.append(record)
        self._num = len(self.whole)

    def _head(self, seed: int | None, resume: Resume, identity: dict[str, Any] | None) -> bool:
        """Return whether the run needs a header, and add it. Raise a ValueError if the results are of another run."""
        last = self._headers[-1] if self._headers else None
        why = "" if last is None else _difference(last, seed, identity)
        if last is not None and not why:
            return False
        if last is not None and self.whole and resume != "force":
            raise ValueError(
                f"{self.path} holds results of another run: {why}. Go on with what they were made with, write to "
                'another file, or keep them as they are with resume="force"'
            )
        old = last["seed"] if last is not None and self.whole else None
        new = int(np.random.SeedSequence().generate_state(1)[0]) if old is None else old
        self._headers.append({
            "llmppl_results": FORMAT, "run": secrets.token_hex(4), "after": None if last is None else last["run"],
            "seed": new if seed is None else seed, "version": _VERSION, "identity": identity,
        })  # fmt: skip
        return True

    def check_number(self, num_tasks: int) -> None:
        """A ValueError if there are fewer tasks than there are results of."""
        last = max(self.whole, default=-1)
        if last >= num_tasks:
            raise ValueError(
                f"{self.path} holds the result of a task {last}, from 0, and tasks are now {num_tasks}: go on with the "
                "same tasks in the same order, or write to another file"
            )

    def holds(self, index: int, task: Any) -> bool:
        """Return whether the result of `task` was there. Raise a ValueError if it was that of another task."""
        before = self.whole.get(index)
        if before is not None and before != digest(task):
            raise ValueError(
                f"{self.path} holds the result of another task {index} than {shown(task)}: go on with the same tasks "
                "in the same order (more may follow), or write to another file"
            )
        return before is not None

    def check_process(self) -> None:
        """Raise a RuntimeError in a process that was forked from that of the run."""
        self._owned.check_process()

    def write(self, result: Result) -> None:
        """Write a line."""
        self.check_process()
        record = {
            "index": result.index,
            **_told(result.task),
            "run": self._headers[-1]["run"],
            "seconds": round(result.seconds, 3),
            **_outcome(result),
        }
        self._append(sealed(record), f"that of task {result.index}")
        self._num += 1

    def _append(self, line: bytes, what: str) -> None:
        if time.monotonic() - self._looked > _SECOND:
            self._look()
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._owned.descriptor, rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._owned.descriptor, self._size)
            why = f"{error.strerror}: the results before {what} are whole; resume=True goes on"
            raise OSError(error.errno, why, str(self.path)) from error
        self._size += len(line)

    def _look(self) -> None:
        """Have the disk keep what was written. Raise an OSError if the file is another one by now."""
        if fate := self._owned.fate(self._size):
            why = f"the file {fate} while this run wrote it, so that results may be lost; resume=True runs them again"
            raise OSError(errno.ESTALE, why, str(self._lines))
        os.fsync(self._owned.descriptor)
        self._looked = time.monotonic()

    def close(self) -> None:
        self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if not self._owned.is_fork and (kind is None or not issubclass(kind, OSError)):
                self._look()
                if kind is None and self._lines != self.path:
                    records = (record for _, record in entries(self.path) if "index" in record)
                    parquet.write_rows(self.path, self._headers, records, self._num)
                    self._lines.unlink()
        finally:
            self.close()


def load_results(path: str | os.PathLike[str]) -> list[Result]:
    """Return the results in a file that `run_many` has written, or is writing, by index.

    Their particles have text, log weight and mark as cut. A `task` is what JSON makes of it, so that a tuple is a list
    and a key of a dict a text; it is None where JSON does not write it.

    Raises
    ------
    ValueError
        If the file is damaged, or holds anything else. A torn last line is left out, with a warning.
    """
    return sorted(read_results(path), key=lambda result: result.index)


def read_results(path: str | os.PathLike[str]) -> Iterator[Result]:
    """Return the same results one at a time, in the order of the file, which may be larger than memory."""
    return (_result(record) for _, record in entries(path_of("path", path)) if "index" in record)


def repair(path: str | os.PathLike[str]) -> list[str]:
    """Rewrite a damaged file of results with its right lines, and return a sentence about each other line.

    The damaged file is kept, with ".damaged" after its name. Results without their header are kept as well; to go on
    with them takes `resume="force"`.

    Raises
    ------
    FileExistsError
        If there is a file of that name.
    ValueError
        If no line is right, or the file is a Parquet file.
    """
    given = path_of("path", path)
    if lines_of(given) != given:
        raise ValueError(f"{given} is a Parquet file, which has no lines that could be repaired")
    given.stat()                                        # or a FileNotFoundError
    with Owned(given) as owned:
        lines = list(scan(given))
        wrong = [f"line {line.number} {line.wrong}, and is left out" for line in lines if line.wrong]
        right = [line for line in lines if not line.wrong]
        if not right:
            raise ValueError(f"{given} has no line of results: {wrong[0] if wrong else 'it is empty'}")
        if is_bare := "index" in right[0].record:
            wrong.append(f"line {right[0].number} is a result, where the header should be: the new header is empty")
        if not wrong:
            return []
        with given.with_name(f"{given.name}.damaged").open("xb") as kept:
            kept.writelines(line.raw for line in lines)
        with owned.replacing() as file:
            if is_bare:
                lost = {"llmppl_results": FORMAT, "run": right[0].record["run"], "version": "", "identity": None}
                file.write(sealed({**lost, "after": None, "seed": None}))
            file.writelines(line.raw for line in right)
        return wrong


def digest(task: Any) -> str:
    """Return 16 hexadecimal digits of the contents of a task, the same in every process."""
    return str(_told(task)["digest"])


def _told(task: Any) -> dict[str, Any]:
    """Return the part of a line that tells a task: its digest, and itself if JSON writes it."""
    text = None
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        text = _WRITER.encode(task)
        if type(task) is str or json.loads(text) == task:       # so that no task of other types has this text
            return {"digest": checksum(text.encode()), "task": task}
    try:
        found = digest_of_data(task, "the task")
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"the task {shown(task)} cannot be told from others when a run is resumed: with to=, a task is data, such "
            f"as texts, numbers, lists, dicts and arrays ({error})"
        ) from error
    return {"digest": found} if text is None else {"digest": found, "task": task}


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


def _difference(before: dict[str, Any], seed: int | None, identity: dict[str, Any] | None) -> str:
    """Name what differs between the run of a header and this one; "" if nothing does."""
    if before["version"] != _VERSION:
        return f"llmppl was {before['version'] or 'of an unknown version'}, and is {_VERSION}"
    if seed not in (None, before["seed"]):
        return f"its seed is {before['seed']}, and this is {seed}"
    if identity is None:
        return ""
    return "its program is unknown" if before["identity"] is None else difference(before["identity"], identity) or ""


def _check_place(path: Path, resume: Resume) -> None:
    if missing := no_folder(path):
        raise missing
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "results are written to a file of their own, and this is none", str(path))
    if resume and path.exists() and not path.stat().st_size:
        raise ValueError(f"{path} is empty: the results that were in it are lost. Remove it to begin anew")


def _has_results(path: Path) -> bool:
    """Check whether there is a file that has more than headers."""
    try:
        return any("index" in record for _, record in entries(path))
    except FileNotFoundError:
        return False
    except ValueError:
        return True
