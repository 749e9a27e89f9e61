"""Results of many tasks, and the SQLite file that keeps them.

A task is one transaction, made when it has ended and before the caller gets its result. A killed run therefore loses
only the tasks under way. A loss of power can also lose the results of the last moments. The tables:

    run       seed, version of this package, and identity of the program; one row, and another for each resume="force"
    result    task_index, digest and JSON of the task; error; log_ml, log_ml_se, deaths; matches; tokens, seconds,
              cpu_seconds
    particle  task_index, place, text, log_weight, cut; parsed, attribution and attributes as JSON

JSON is that of `llmppl.support.values`, and nothing in the file is code. While a run writes, the newest results lie in
`results.db-wal`; a run that ends leaves one file.
"""

from __future__ import annotations

import errno
import importlib
import itertools
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import numpy as np

from llmppl.inference.detached import SavedParticle, detach
from llmppl.inference.particles import Death, Particles
from llmppl.report.tables import frame
from llmppl.support.arguments import path as path_of
from llmppl.support.arguments import shown
from llmppl.support.files import own, own_errors
from llmppl.support.values import Identity, decode, describe, difference, digest, encode

if TYPE_CHECKING:
    import pandas

Resume = bool | Literal["force"]
_VERSION = importlib.import_module(__name__.partition(".")[0]).__version__
_APPLICATION = 0x6C6C6D70                               # in the header of the file: "llmp"
_TABLES = """
create table if not exists run(number integer primary key, seed text, version text, identity text);
create table if not exists result(
    task_index integer primary key, digest text, task text, error text, log_ml real, log_ml_se real, deaths text,
    matches text, tokens integer, seconds real, cpu_seconds real);
create table if not exists particle(
    task_index integer, place integer, text text, log_weight real, cut integer, parsed text, attribution text,
    attributes text, primary key(task_index, place)) without rowid;
"""
_EXPORTS = ".jsonl", ".json", ".csv", ".parquet"


@dataclass(frozen=True)
class Result:
    """Result of a task: `particles`, `matches` or `error`; an error may come with the particles that it left.

    index : int, place of the task among the tasks
    task : the task itself; in a loaded result as plain data, a text if it has no such form
    particles : Particles, whose `stats` are None, since the work was shared by all tasks
    matches : list of Match or Beam, if the task was a query or a beam search; list of dict in a loaded result
    error : str, the traceback of the exception that ended the task
    seconds : float, from the beginning of the task to its end, including work done for other tasks in between
    cpu_seconds : float, of this task: its own code, and its share of the batches
    tokens : int, run through language models for this task: its share of the batches
    """

    index: int
    task: Any
    particles: Particles[Any] | Any = None              # | Any: checkers cannot know that one of the three is there
    matches: list[Any] | Any = None
    error: str | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    tokens: int = 0

    def __repr__(self) -> str:
        outcomes = []
        if self.error is not None:
            outcomes.append(self.error.rstrip().rpartition("\n")[2])
        if self.particles is not None:
            outcomes.append(f"{len(self.particles)} particles, log_ml={self.particles.log_ml:.2f}")
        if self.matches is not None:
            outcomes.append(f"{len(self.matches)} matches")
        return f"Result({self.index}, {shown(self.task, 60)}, {', '.join(outcomes)}, {self.seconds:.2f} s)"

    def as_dict(self) -> dict[str, Any]:
        """Return the result as data for JSON: `Particles.to_dict`, `matches`, `error`, and the costs."""
        found = {each.name: getattr(self, each.name) for each in fields(self)} | {"task": encode(self.task, _written)}
        particles = found.pop("particles")
        found = {name: value for name, value in found.items() if value is not None}
        if particles is None:
            return found
        saved = [detach(each) for each in particles]
        attributes = [encode(each.attributes, _written) for each in saved]
        return {**found, **particles.to_dict(), "attributes": attributes}


# ---- writing


class ResultFile:
    """A file of results that is being written. `run_many` describes `resume` and the errors.

    Parameters
    ----------
    path : path of the file
    seed : int, optional
        Seed of the run; by default that of the file, or a new one.
    resume : bool or "force"
    tasks : sequence, optional
        The tasks of the run, which are compared with those in the file.
    identity : dict, optional
        Identity of the program; by default it is not compared.

    Attributes
    ----------
    seed : int
    done : dict of int to str
        Digests, by index, of the tasks that had a result without an error when the file was opened.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, seed: int | None = None, resume: Resume = False,
        tasks: Sequence[Any] | None = None, identity: Identity | None = None,
    ) -> None:  # fmt: skip
        self.path = path_of("to", path)
        if self.path.suffix in _EXPORTS:
            raise ValueError(
                f"{self.path}: results are an SQLite file, as to='results.db'; then load_results('results.db')"
                ".to_jsonl(path) or .to_pandas() exports them"
            )
        self._lock = own(self.path)
        try:
            self._db = _connect(self.path, "rwc")
            with self._errors():
                self._begin(seed, resume, identity)
            if tasks is not None:
                for index in sorted(self._digests)[: len(tasks)]:
                    self.is_done(index, tasks[index])
                self.check_number(len(tasks))
        except BaseException:
            self.close()
            raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn an error of SQLite, as on a full disk, into an OSError that ends the run."""
        with own_errors(self.path):
            try:
                yield
            except sqlite3.Error as error:
                why = f"{error}. The results before are whole; resume=True goes on"
                raise OSError(errno.EIO, why, str(self.path)) from error

    def _begin(self, seed: int | None, resume: Resume, identity: Identity | None) -> None:
        """Read the tasks that are done and the last run. Add a row if this run is another."""
        for pragma in (f"application_id={_APPLICATION}", "journal_mode=wal", "synchronous=normal"):
            self._db.execute(f"pragma {pragma}")
        self._db.executescript(_TABLES)
        rows = self._db.execute("select task_index, digest, error is not null from result").fetchall()
        self._digests = {index: digest for index, digest, _ in rows}
        self.done = {index: digest for index, digest, failed in rows if not failed}
        if rows and not resume:
            why = "the file is there; resume=True goes on with its results"
            raise FileExistsError(errno.EEXIST, why, str(self.path))
        last = self._db.execute("select seed, version, identity from run order by number desc").fetchone()
        why = "" if last is None else _difference(last, seed, identity)
        if why and rows and resume != "force":
            raise ValueError(
                f"{self.path} holds results of another run: {why}. Go on with what they were made with, write to "
                'another file, or keep them as they are with resume="force"'
            )
        if seed is None:
            seed = int(last[0]) if last and rows else int(np.random.SeedSequence().generate_state(1)[0])
        self.seed = seed
        if why or last is None:
            self._insert("run", (None, str(seed), _VERSION, json.dumps(identity)))

    def check_number(self, num_tasks: int) -> None:
        """Raise a ValueError if the file has the result of a task beyond `num_tasks`."""
        last = max(self._digests, default=-1)
        if last >= num_tasks:
            raise ValueError(
                f"{self.path} holds the result of a task {last}, from 0, and tasks are now {num_tasks}: go on with the "
                "same tasks in the same order, or write to another file"
            )

    def is_done(self, index: int, task: Any) -> bool:
        """Return whether the file had a result of `task` without an error. ValueError if it had another task."""
        before = self._digests.get(index)
        if before is not None and before != digest(task):
            raise ValueError(
                f"{self.path} holds the result of another task {index} than {shown(task)}: go on with the same tasks "
                "in the same order (more may follow), or write to another file"
            )
        return index in self.done

    def write(self, result: Result) -> None:
        """Write a result, in place of an earlier one that failed."""
        particles, rows = result.particles, list[tuple[Any, ...]]()
        log_ml = log_ml_se = deaths = matches = None
        if particles is not None:
            log_ml, log_ml_se = float(particles.log_ml), particles.log_ml_se
            deaths = json.dumps([vars(death) for death in particles.deaths])
            rows = [_particle_row(result.index, place, detach(each)) for place, each in enumerate(particles)]
        if result.matches is not None:
            matches = _json([match.as_dict() for match in result.matches])
        task = _json(result.task)
        outcome = (result.error, log_ml, log_ml_se, deaths, matches)
        costs = (result.tokens, result.seconds, result.cpu_seconds)
        with self._errors(), self._db:
            self._db.execute("delete from particle where task_index = ?", (result.index,))
            self._insert("result", (result.index, digest(result.task), task, *outcome, *costs))
            for row in rows:
                self._insert("particle", row)

    def _insert(self, table: str, row: tuple[Any, ...]) -> None:
        values = [each.encode("utf-8", "surrogatepass") if isinstance(each, str) else each for each in row]
        places = ", ".join("cast(? as text)" if isinstance(each, str) else "?" for each in row)
        self._db.execute(f"insert or replace into {table} values ({places})", values)

    def close(self) -> None:
        """Release the file. If nobody reads it, the write-ahead log becomes part of it."""
        if hasattr(self, "_db"):
            with suppress(sqlite3.Error):
                self._db.execute("pragma journal_mode=delete")
            self._db.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    """Open a file of results. Raise a ValueError if it has other contents."""
    if mode == "ro":
        path.stat()                                     # or a FileNotFoundError
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    wrong, db = "", None
    try:
        db = sqlite3.connect(uri, uri=True, check_same_thread=False)    # the collector may close it elsewhere
        (application,) = db.execute("pragma application_id").fetchone()
        (tables,) = db.execute("select count(*) from sqlite_master").fetchone()
        wrong = "it has other tables" if tables and application != _APPLICATION else ""
    except sqlite3.DatabaseError as error:
        wrong = str(error)
    if wrong or db is None:
        raise ValueError(f"{path} is no file of results of run_many ({wrong}), and is left as it is")
    db.text_factory = lambda data: data.decode("utf-8", "surrogatepass")        # half of a UTF-16 pair
    return db


def _particle_row(index: int, place: int, particle: SavedParticle) -> tuple[Any, ...]:
    attributes = dict(particle.attributes)
    data = attributes.pop("parsed", None), particle.attribution, attributes
    return (index, place, particle.text, float(particle.log_weight), int(particle.cut), *map(_json, data))


def _json(value: Any) -> str:
    return json.dumps(encode(value, _written), ensure_ascii=False)


def _written(value: Any) -> str:
    """Return a value that is no plain data as a text: a `Text` without its bytes, others as their repr."""
    return str(value) if isinstance(value, str) else describe(value)


def _difference(last: tuple[str, str, str], seed: int | None, identity: Identity | None) -> str:
    """Describe the first difference between the run of a file and this one; "" if there is none."""
    before_seed, version, before = last
    if version != _VERSION:
        return f"llmppl was {version}, and is {_VERSION}"
    if seed not in (None, int(before_seed)):
        return f"its seed is {before_seed}, and this is {seed}"
    known = json.loads(before)
    return difference(known, identity) if known and identity else ""


# ---- reading


class Results(Sequence[Result]):
    """The results in a file, by index. They are read when they are used, so the file may be larger than memory.

    Particles have text, weight, `parsed`, attribution, and the attributes that are plain data. A task comes back as
    plain data.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path_of("path", path)
        len(self)                                       # or an error

    def _rows(self, query: str) -> Iterator[tuple[Any, ...]]:
        with closing(_connect(self.path, "ro")) as db:
            yield from db.execute(query)

    def __len__(self) -> int:
        ((count,),) = self._rows("select count(*) from result")
        return int(count)

    def __iter__(self) -> Iterator[Result]:
        return self._results("", "")

    @overload
    def __getitem__(self, index: int) -> Result: ...

    @overload
    def __getitem__(self, index: slice) -> list[Result]: ...

    def __getitem__(self, index: int | slice) -> Result | list[Result]:
        """Return the result at a place in the file, or a list for a slice."""
        places = range(len(self))[index]
        return [self[i] for i in places] if isinstance(places, range) else next(self._at(places))

    def _at(self, place: int) -> Iterator[Result]:
        ((index,),) = self._rows(f"select task_index from result order by task_index limit 1 offset {place}")
        return self._results(f"where task_index = {index}", f"where task_index = {index}")

    def _results(self, of_results: str, of_particles: str) -> Iterator[Result]:
        particles = self._rows(f"select * from particle {of_particles} order by task_index, place")
        groups = itertools.groupby(particles, key=lambda row: row[0])
        group = next(groups, None)
        for row in self._rows(f"select * from result {of_results} order by task_index"):
            saved = list[SavedParticle]()
            while group is not None and group[0] <= row[0]:         # a particle without a result is not yet one
                if group[0] == row[0]:
                    saved = [_saved_particle(*each) for each in group[1]]
                group = next(groups, None)
            yield _result(row, saved)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a data frame with a row for each particle or match, and one for each task without any.

        Columns: index, task, error, log_ml, seconds, cpu_seconds, tokens, text, log_weight, weight, cut; the others are
        the attributes of the particles, or the fields of the matches. ImportError without pandas.
        """
        rows = [row for result in self for row in _rows_of(result)]
        names = dict.fromkeys(name for row in rows for name in row)
        return frame({name: [row.get(name) for row in rows] for name in names})

    def to_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Write a line of JSON for each task to another file."""
        with path_of("path", path).open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(result.as_dict()) + "\n" for result in self)

    def __repr__(self) -> str:
        ((failed,),) = self._rows("select count(*) from result where error is not null")
        return f"Results({str(self.path)!r}: {len(self)} tasks, {failed} failed)"


def load_results(path: str | os.PathLike[str]) -> Results:
    """Return the results in a file of `run_many`, by index. The file may still be written.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If the file has other contents.
    """
    return Results(path)


def _saved_particle(
    _: int, place: int, text: str, log_weight: float, cut: int, parsed: str, attribution: str, attributes: str
) -> SavedParticle:
    found = decode(json.loads(attributes))
    value = decode(json.loads(parsed))
    found |= {} if value is None else {"parsed": value}
    return SavedParticle(text, log_weight, bool(cut), decode(json.loads(attribution)), found)


def _result(row: tuple[Any, ...], saved: list[SavedParticle]) -> Result:
    index, _, task, error, log_ml, log_ml_se, deaths, matches, tokens, seconds, cpu_seconds = row
    particles = None
    if log_ml is not None:
        reason = "" if log_ml_se is not None else "the run had none, and a file does not say why"
        dead = [Death(**death) for death in json.loads(deaths)]
        particles = Particles(saved, deaths=dead, accuracy=lambda: (log_ml_se, reason))
    found = None if matches is None else decode(json.loads(matches))
    return Result(index, decode(json.loads(task)), particles, found, error, seconds, cpu_seconds, tokens)


def _rows_of(result: Result) -> list[dict[str, Any]]:
    names = "index", "task", "error", "seconds", "cpu_seconds", "tokens"
    common = {name: getattr(result, name) for name in names}
    if result.matches is not None:
        return [{**common, **match} for match in result.matches] or [common]
    if result.particles is None:
        return [common]
    common["log_ml"] = result.particles.log_ml
    weights = result.particles.weights.tolist()
    return [
        {**common, "text": p.text, "weight": weight, "log_weight": p.log_weight, "cut": p.cut, **p.attributes}
        for p, weight in zip(result.particles, weights, strict=True)
    ] or [common]
