"""Results of many tasks, and the file that keeps them: a header, then one line of JSON for each task that has ended.

The file gets the line of a task in one piece when the task has ended, before the caller gets the result. A killed run
therefore loses only the tasks under way, and leaves at most one torn line at the end, which the next run cuts. A loss
of power can also lose the lines of the last second: waiting for the disk at each line would take longer than a small
task. A line has these fields:

    index : int, place of the task, from 0
    digest : str, digest of the contents of the task, which a resumed run compares
    task : the task itself if JSON can write it (a tuple becomes a list)
    run : str, identifier of the header that the line belongs to
    seconds : float, from the beginning of the task to its end, including work done for other tasks in between
    log_ml, log_ml_se, texts, log_weights, cut : as in `Particles.to_dict`; with deaths if no particle is left; or
    matches : list of objects, as in `Match.as_dict`; or
    error : str, the traceback of the exception that ended the task
    check : str, checksum of the line up to here

The header, the first line, describes the run: `run`, a random identifier; `seed`; `version` of this package; and
`identity` of the program and its language models. If `resume="force"` continues with another program, another header
follows, whose `after` names the run before it. A damaged line, a line of another file and a second line of one task
are errors.
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
from llmppl.support.arguments import shown
from llmppl.support.files import Owned, checksum, no_folder, sealed
from llmppl.tasks.lines import FORMAT, entries, results_path, scan

__all__ = ["Result", "ResultFile", "load_results", "read_results", "repair"]

Resume = bool | Literal["force"]
_VERSION = importlib.import_module(__name__.partition(".")[0]).__version__
_WRITER = json.JSONEncoder(allow_nan=False, sort_keys=True)
_SECOND = 1.0                                           # between two synchronisations with the disk


@dataclass(frozen=True)
class Result:
    """Result of a task. Exactly one of `particles`, `matches` and `error` is not None.

    index : int, place of the task among the tasks
    task : the task itself; in a loaded result as the file has it, None if JSON cannot write it
    particles : Particles, whose `stats` are None, since the work was shared by all tasks
    matches : list of Match or Beam, if the task was a query or a beam search; list of dict in a loaded result
    error : str, the traceback of the exception that ended the task
    seconds : float, from the beginning of the task to its end, including work done for other tasks in between
    """

    index: int
    task: Any
    particles: Particles[Any] | Any = None              # | Any: checkers cannot know that one of the three is there
    matches: list[Any] | Any = None
    error: str | None = None
    seconds: float = 0.0

    def __repr__(self) -> str:
        if self.error is not None:
            outcome = self.error.rstrip().rpartition("\n")[2]
        elif self.particles is not None:
            outcome = f"{len(self.particles)} particles, log_ml={self.particles.log_ml:.2f}"
        else:
            outcome = f"{len(self.matches or ())} matches"
        return f"Result({self.index}, {shown(self.task, 60)}, {outcome}, {self.seconds:.2f} s)"


class ResultFile:
    """A file of results that is being written.

    Parameters
    ----------
    path : path of the file of JSON lines
    seed : int, optional
        Seed of the run; by default that of the file, or a new one.
    resume : bool or "force"
        Continue an existing file. Its torn last line is cut. "force" keeps results of another program, seed, language
        model or version.
    tasks : sequence, optional
        The tasks of the run, which are compared with those in the file.
    identity : dict, optional
        Identity of the program, from `llmppl.inference.resuming.fingerprint`; by default it is not compared.

    Attributes
    ----------
    seed : int
    done : dict of int to str
        Digests, by index, of the tasks whose results were in the file when it was opened.

    Raises
    ------
    FileExistsError
        If the file has results and `resume` is False.
    BlockingIOError
        If another run is writing the file.
    ValueError
        If the file has other contents, or results of another run or of other tasks; the file is left as it is. If the
        path names a Parquet file.
    OSError
        If the file cannot be written, or if something else deletes, replaces or changes it.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, seed: int | None = None, resume: Resume = False,
        tasks: Sequence[Any] | None = None, identity: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.path = results_path("to", path)
        _check_place(self.path, resume)
        self._synced = time.monotonic()
        is_new = not self.path.exists()
        try:
            self._owned = Owned(self.path, lambda: sealed(_new_header(None, seed, identity)))
            self._read()
            os.ftruncate(self._owned.descriptor, self._size)    # a torn line would break the next one
            self._continue(seed, resume, identity)
            self.seed: int = self._header["seed"]
            if tasks is not None:
                self.check_number(len(tasks))
                for index in sorted(self.done):
                    self.is_done(index, tasks[index])
        except BaseException:
            if hasattr(self, "_owned"):
                self.close()
                if is_new:
                    self.path.unlink()
            raise

    def _read(self) -> None:
        self._header, self._size = dict[str, Any](), 0
        self.done: dict[int, str] = {}
        for end, record in entries(self.path):
            self._size = end
            if "index" in record:
                self.done[record["index"]] = record["digest"]
            else:
                self._header = record

    def _continue(self, seed: int | None, resume: Resume, identity: dict[str, Any] | None) -> None:
        """Add a header if the last one is of another run. Raise a ValueError if the results are, without "force"."""
        why = _difference(self._header, seed, identity) if self._header else "it has no header"
        if why and self.done and resume != "force":
            raise ValueError(
                f"{self.path} holds results of another run: {why}. Go on with what they were made with, write to "
                'another file, or keep them as they are with resume="force"'
            )
        if why:
            seed = self._header["seed"] if seed is None and self.done else seed
            self._header = _new_header(self._header.get("run"), seed, identity)
            self._append(sealed(self._header), "the header")

    def check_number(self, num_tasks: int) -> None:
        """Raise a ValueError if the file has the result of a task beyond `num_tasks`."""
        last = max(self.done, default=-1)
        if last >= num_tasks:
            raise ValueError(
                f"{self.path} holds the result of a task {last}, from 0, and tasks are now {num_tasks}: go on with the "
                "same tasks in the same order, or write to another file"
            )

    def is_done(self, index: int, task: Any) -> bool:
        """Return whether the file had the result of `task`. Raise a ValueError if it had that of another task."""
        before = self.done.get(index)
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
        """Write the line of a result."""
        self.check_process()
        record = {
            "index": result.index,
            **_task_fields(result.task),
            "run": self._header["run"],
            "seconds": round(result.seconds, 3),
            **_outcome_fields(result),
        }
        self._append(sealed(record), f"that of task {result.index}")

    def _append(self, line: bytes, what: str) -> None:
        if time.monotonic() - self._synced > _SECOND:
            self._sync()
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

    def _sync(self) -> None:
        """Synchronise the file with the disk. Raise an OSError if something else changed it."""
        if fate := self._owned.fate(self._size):
            why = f"the file {fate} while this run wrote it, so that results may be lost; resume=True runs them again"
            raise OSError(errno.ESTALE, why, str(self.path))
        os.fsync(self._owned.descriptor)
        self._synced = time.monotonic()

    def close(self) -> None:
        self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if not self._owned.is_fork and (kind is None or not issubclass(kind, OSError)):
                self._sync()
        finally:
            self.close()


def load_results(path: str | os.PathLike[str]) -> list[Result]:
    """Return the results in a file of `run_many`, by index. The file may still be written.

    Their particles have text, log-weight and the mark as cut. A `task` comes back as JSON writes it: a tuple is a list,
    a key of a dict is a text, and a task that JSON cannot write is None.

    Raises
    ------
    ValueError
        If the file is damaged or has other contents. A torn last line is left out, with a warning.
    """
    return sorted(read_results(path), key=lambda result: result.index)


def read_results(path: str | os.PathLike[str]) -> Iterator[Result]:
    """Return the same results one at a time, in the order of the file, which may be larger than memory."""
    return (_result(record) for _, record in entries(results_path("path", path)) if "index" in record)


def repair(path: str | os.PathLike[str]) -> list[str]:
    """Rewrite a damaged file of results with its right lines, and return a sentence about each other line.

    The damaged file is kept, with ".damaged" after its name. Results without their header are kept as well, and only
    `resume="force"` continues them.

    Raises
    ------
    FileExistsError
        If a file of that name exists.
    ValueError
        If no line is right, or the path names a Parquet file.
    """
    given = results_path("path", path)
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
    return str(_task_fields(task)["digest"])


def _task_fields(task: Any) -> dict[str, Any]:
    """Return the fields of a line that describe a task: its digest, and itself if JSON can write it."""
    fields = dict[str, Any]()
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        text = _WRITER.encode(task)
        fields = {"task": task}
        if type(task) is str or json.loads(text) == task:       # no task of other types has this text
            return {"digest": checksum(text.encode()), **fields}
    try:
        return {"digest": digest_of_data(task, "the task"), **fields}
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"the task {shown(task)} has no stable identity, which resuming needs: with to=, a task must be data, such "
            f"as texts, numbers, lists, dicts and arrays ({error})"
        ) from error


def _outcome_fields(result: Result) -> dict[str, Any]:
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
        reason = "" if error is not None else "the run had none, and a file does not say why"
        deaths = [Death(**death) for death in record.get("deaths", ())]
        particles = Particles([SavedParticle(*row) for row in rows], deaths=deaths, accuracy=lambda: (error, reason))
    return Result(
        record["index"], record.get("task"), particles, record.get("matches"), record.get("error"), record["seconds"]
    )


def _new_header(after: str | None, seed: int | None, identity: dict[str, Any] | None) -> dict[str, Any]:
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0])
    return {
        "llmppl_results": FORMAT, "run": secrets.token_hex(4), "after": after, "seed": seed, "version": _VERSION,
        "identity": identity,
    }  # fmt: skip


def _difference(before: dict[str, Any], seed: int | None, identity: dict[str, Any] | None) -> str:
    """Describe the first difference between the run of a header and this one; "" if there is none."""
    if before["version"] != _VERSION:
        return f"llmppl was {before['version'] or 'of an unknown version'}, and is {_VERSION}"
    if seed not in (None, before["seed"]):
        return f"its seed is {before['seed']}, and this is {seed}"
    if identity is None:
        return ""
    return "its program is unknown" if before["identity"] is None else difference(before["identity"], identity) or ""


def _check_place(path: Path, resume: Resume) -> None:
    """Raise an error if results cannot be written to `path`."""
    if missing := no_folder(path):
        raise missing
    if not path.exists():
        return
    if not path.is_file():
        raise OSError(errno.EINVAL, "results are written to a file of their own, and this is none", str(path))
    if resume and not path.stat().st_size:
        raise ValueError(f"{path} is empty: the results that were in it are lost. Remove it to begin anew")
    if not resume and _has_results(path):
        raise FileExistsError(errno.EEXIST, "the file is there; resume=True goes on with its results", str(path))


def _has_results(path: Path) -> bool:
    """Check whether a file has more than headers."""
    try:
        return any("index" in record for _, record in entries(path))
    except ValueError:
        return True
