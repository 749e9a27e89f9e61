"""Results of many tasks, and the SQLite file that keeps them.

A task is one transaction, made when it has ended and before the caller gets its result. A killed run therefore loses
only the tasks under way. A loss of power can also lose the results of the last moments. The tables:

    run       identity: of the run, with its seed; a row more for each "force"
    result    task_index, digest or key of the task, failed (1 after an exception), and record: `Result.as_dict` as JSON
    total     digest of all rows and of the tables: the exclusive or of the digests of each
    particle  a view: task_index, place, task, text, log_weight, cut, attribution, and attributes with `parsed`

JSON is that of `llmppl.support.values`, and nothing in the file is code. A transaction is written to the log
`results.db-wal`, then to the file, which has all results if the log is damaged or missing. A run that ends leaves one
file, and the empty `results.db.lock`.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from llmppl.inference.detached import SavedParticle, detach
from llmppl.inference.particles import Death, Particles
from llmppl.report.probabilities import Probabilities
from llmppl.report.tables import frame
from llmppl.support.arguments import path as path_of
from llmppl.support.arguments import shown
from llmppl.support.files import Owned, own_errors
from llmppl.support.identity import VERSION, Identity, difference, digest, task_digest
from llmppl.support.values import decode, encode
from llmppl.tasks.answers import (
    Generation,
    Parse,
    as_data,
    fields_of,
    loaded,
    parser_of,
)

if TYPE_CHECKING:
    import pandas

Resume = bool | Literal["force"]
FORMAT = 3  # "user_version" of the file; 0 before llmppl 0.3
_TABLES = f"""
begin;
pragma user_version = {FORMAT};
create table run(identity text);
create table result(task_index integer primary key, digest text, failed integer, record text);
create table total(digest text);
create view particle as select task_index, key as place, json_extract(record, '$.task') as task,
    json_extract(value, '$.text') as text, json_extract(value, '$.log_weight') as log_weight,
    json_extract(value, '$.cut') as cut, json_extract(value, '$.attribution') as attribution,
    json_extract(value, '$.attributes') as attributes from result, json_each(record, '$.particles');
"""
_RESULTS = "select task_index, digest, failed, record from result"
_CONTENTS = (
    "select name, sql from sqlite_master where name in ('run', 'result', 'total', 'particle')",
    "select rowid, identity from run",
    _RESULTS,
)
_OF_PROGRAM = {  # attributes of ready-made programs
    "constraint",
    "context",
    "contexts",
    "end",
    "ended",
    "finished",
    "fragments",
    "labels",
    "mask",
    "max_tokens",
    "min_tokens",
    "must_end_by",
    "num_tokens",
    "prior",
    "proposal",
    "s",
    "state",
    "stop",
    "until",
}
_SHOWN_TASK = 1000  # characters of a task that is no plain data


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
    answer : Generation, if the task was a call of `generate`
    value : object, of the answer, else the most probable one of the particles or the text of the first match, or None
    fields : dict of str to Probabilities, of the answer or the particles
    probability : float or None, of the value

    Examples
    --------
    >>> program = ConstrainedText(lm, "The cat was", [" happy", " sad"])
    >>> [result] = run_many(lambda n, rng: smc_steer(program, n, 2, rng=rng), [4], seed=0)
    >>> result.index, result.task, len(result.particles), result.error
    (0, 4, 4, None)
    """

    index: int
    task: Any
    particles: Particles[Any] | Any = (
        None  # | Any: checkers cannot know that one of the three is there
    )
    matches: list[Any] | Any = None
    error: str | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    tokens: int = 0
    answer: Generation | Any = None

    @property
    def value(self) -> Any:
        if self.answer is not None:
            return self.answer.value
        if self.matches:
            first = self.matches[0]
            return first["text"] if isinstance(first, dict) else str(first)
        if self.particles:
            return self.particles.answers().best
        return None

    @property
    def fields(self) -> dict[str, Probabilities]:
        if self.answer is not None:
            found = self.answer.fields
            return found
        if not self.particles:
            return {}
        return {name: self.particles.field(f"[{name!r}]") for name in fields_of(self.value)}

    @property
    def probability(self) -> float | None:
        if self.answer is not None:
            known = self.answer.probability
            return known
        if self.particles:
            return self.particles.answers().shares[0].probability
        return None

    def __repr__(self) -> str:
        lists = {"particles": self.particles, "matches": self.matches}
        found = [f"{len(each)} {name}, " for name, each in lists.items() if each is not None]
        if self.answer is not None:
            found.append(f"{shown(self.value, 60)}, ")
        error = "" if self.error is None else self.error.rstrip().rpartition("\n")[2] + ", "
        return f"Result({self.index}, {shown(self.task, 60)}, {error}{''.join(found)}{self.seconds:.2f} s)"

    def as_dict(self) -> dict[str, Any]:
        """Return the result as data for JSON: its fields, without those that are None.

        Particles are a list of dicts, with `log_ml`, `log_ml_se` and `deaths` beside it. `log_ml` is None if no
        particle is left.
        """
        found = {
            name: value
            for name, value in vars(self).items()
            if value is not None and name != "answer"
        }
        if self.matches is not None:
            found["matches"] = [
                each if isinstance(each, dict) else each.as_dict() for each in self.matches
            ]
        if self.particles is not None:
            found["log_ml"] = self.particles.log_ml if self.particles else None
            found["log_ml_se"] = self.particles.log_ml_se
            found["deaths"] = [vars(death) for death in self.particles.deaths]
            found["particles"] = [vars(detach(each)) for each in self.particles]
        data: dict[str, Any] = encode(found, _as_text)
        if self.answer is not None:
            data["answer"] = self.answer.as_dict()
        return data


def _as_text(value: Any) -> str:
    """Return the text of a value that is no plain data: a Text without its bytes, or a repr."""
    return str(value) if isinstance(value, str) else shown(value, _SHOWN_TASK)


def _loaded(record: str, parse: Parse | None = None) -> Result:
    """Return the result of a record. `parse` makes the values of texts that are complete."""
    data = json.loads(record)
    answer = data.pop("answer", None)
    found = decode(data)
    if answer is not None:
        if answer.pop("kind", "") == "decision":
            load = importlib.import_module("llmppl.decisions.answers").loaded
            found["answer"] = load(answer, found["task"])
        else:
            found["answer"] = loaded(answer, found["task"], parse)
    log_ml_se = found.pop("log_ml_se", None)
    deaths = [Death(**each) for each in found.pop("deaths", ())]
    if found.pop("log_ml", ...) is not ...:
        saved = [SavedParticle(**each) for each in found["particles"]]
        for particle in saved:
            if parse is not None and not particle.cut:
                particle.attributes["parsed"] = parse(particle.text)
        reason = "" if log_ml_se is not None else "the run had none, and a file does not say why"
        found["particles"] = Particles(saved, deaths=deaths, accuracy=lambda: (log_ml_se, reason))
    return Result(**found)


# ---- writing


class ResultFile:
    """A file of results that is being written, until `close`. `run_many` describes the parameters and the errors.

    seed : int, of the run; by default that of the file, or a new one
    key : callable, the text by which a task is known; by default the digest of its pickle
    num_done : int, the tasks that had a result without an error when the file was opened

    Examples
    --------
    >>> file = ResultFile("results.db", seed=0)
    >>> [result.task for result in file.written(Result(index, task) for index, task in file.missing(["a", "b"]))]
    ['a', 'b']
    >>> load_results("results.db")
    Results('results.db': 2 tasks, 0 failed)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        seed: int | None = None,
        resume: Resume = False,
        program: Identity | None = None,
        key: Callable[[Any], str] | None = None,
    ) -> None:
        self.path = path_of("to", path)
        if self.path.suffix in (".jsonl", ".json", ".csv", ".parquet"):
            how = "load_results('results.db').to_jsonl(path) or .to_pandas() exports them"
            raise ValueError(
                f"{self.path}: results are an SQLite file, as to='results.db'; then {how}"
            )
        self._key = key
        self._digests = dict[int, str]()  # of tasks that run
        self._owned = Owned(self.path, "", "-wal")
        try:
            self._db = _connect(self.path, "rwc")
            _check(self.path, self._db)
            with self._errors():
                self._begin(seed, resume, program or {})
            self._owned.note()
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

    def _begin(self, seed: int | None, resume: Resume, program: Identity) -> None:
        """Read the tasks that are done and the last run. Make the tables, and add a row if this run is another."""
        rows = []
        before = Identity()
        tables = _tables(self._db)
        if tables:
            rows = self._db.execute("select task_index, digest, failed from result").fetchall()
            last = self._db.execute("select identity from run order by rowid desc").fetchone()
            before = json.loads(last[0])
        if tables and _format(self._db) != FORMAT:
            writer = before.get("the version of llmppl", "0.2")
            how = "load_results reads it, and this version goes on with its own files alone: write to another file"
            raise ValueError(f"{self.path} was written by llmppl {writer}: {how}")
        self._before = {index: (digest, failed) for index, digest, failed in rows}
        self.num_done = sum(not failed for _, failed in self._before.values())
        if rows and not resume:
            there = "the file is there; resume=True goes on with its results"
            raise FileExistsError(errno.EEXIST, there, str(self.path))
        if seed is None:
            drawn = int(np.random.SeedSequence().generate_state(1)[0])
            seed = int(before["its seed"]) if rows else drawn
        self.seed = seed
        now = {**program, "its seed": str(seed), "the version of llmppl": VERSION}
        why = difference(before, now)
        if rows and why and resume != "force":
            raise ValueError(
                f"{self.path} holds results of another run: {why}. Go on with the function, the options and the "
                'version= that they were made with, or write to another file; resume="force" keeps them as they are'
            )
        self._db.execute("pragma journal_mode=wal")
        self._db.execute("pragma synchronous=normal")
        with self._db:
            if not tables:
                self._db.executescript(_TABLES)
            if why:
                self._db.execute("insert into run values (?)", (json.dumps(now),))
            self._total = _total(self._db)
            self._put_total()

    def missing(self, tasks: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """Yield the tasks without a result, or with an error, by index. ValueError if the file has another task."""
        for index, task in enumerate(tasks):
            found = task_digest(index, task, self._key)
            before, failed = self._before.get(index, (found, True))
            if before != found:
                raise ValueError(
                    f"{self.path} holds the result of another task {index} than {shown(task)}: go on with the same "
                    "tasks in the same order (more may follow), or write to another file"
                )
            if failed:
                self._digests[index] = found  # before the task can change
                yield index, task

    def written(self, results: Iterable[Result]) -> Iterator[Result]:
        """Write and yield results, in place of earlier ones that failed, and close the file."""
        with closing(self):
            for result in results:
                self._owned.check()
                with self._errors(), self._db:
                    self._put(result)
                with suppress(sqlite3.Error):  # on a full disk, the log keeps it
                    self._db.execute("pragma wal_checkpoint")
                yield result
            self._owned.check()

    def _put(self, result: Result) -> None:
        failed = int(result.error is not None)
        row = (
            result.index,
            self._digests.pop(result.index),
            failed,
            json.dumps(result.as_dict()),
        )
        old = self._db.execute(f"{_RESULTS} where task_index = ?", (result.index,)).fetchone()
        if old is not None:
            self._total ^= _number(old)
        self._total ^= _number(row)
        self._db.execute("insert or replace into result values (?, ?, ?, ?)", row)
        self._put_total()

    def _put_total(self) -> None:
        self._db.execute(
            "insert or replace into total(rowid, digest) values (1, ?)",
            (f"{self._total:032x}",),
        )

    def close(self) -> None:
        """Release the file. If nobody reads it, the write-ahead log becomes part of it."""
        if hasattr(self, "_db") and self._owned.is_mine:
            with suppress(sqlite3.Error):
                self._db.execute("pragma journal_mode=delete")
            self._db.close()
        self._owned.release()


# ---- the database


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    """Open a file of results. Raise a ValueError if it has other contents."""
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    with _reading(path):
        db = sqlite3.connect(
            uri, uri=True, check_same_thread=False
        )  # the collector may close it elsewhere
        tables = _tables(db)
        if tables and not tables >= {"run", "result", "particle"}:
            raise sqlite3.DatabaseError("it has other tables")
        if not tables and mode != "rwc":
            raise sqlite3.DatabaseError("its run has written nothing yet")
    return db


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn an error of SQLite into an OSError if the file cannot be read, and into a ValueError if it is damaged."""
    try:
        yield
    except (
        sqlite3.DatabaseError,
        UnicodeDecodeError,
    ) as error:  # the second from a damaged name of a table
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
            raise OSError(errno.EIO, str(error), str(path)) from error
        why = str(error)
        if code == sqlite3.SQLITE_NOTADB:
            why += "; llmppl 0.1 wrote lines of JSON"
        raise ValueError(
            f"{path} is no file of results of run_many, or damaged ({why}), and is left as it is"
        ) from None


def _tables(db: sqlite3.Connection) -> set[str]:
    return {name for (name,) in db.execute("select name from sqlite_master")}


def _format(db: sqlite3.Connection) -> int:
    return int(db.execute("pragma user_version").fetchone()[0])


def _check(path: Path, db: sqlite3.Connection) -> None:
    """Raise a ValueError if the contents are not those that were written. Files of llmppl 0.2 have no digest."""
    with _reading(path), closing(db.execute("begin")):
        intact = db.execute("pragma quick_check(1)").fetchone()[0]
        if intact != "ok":
            raise sqlite3.DatabaseError(intact)
        found = _format(db)
        if found not in (0, FORMAT):
            raise sqlite3.DatabaseError(
                f"a later llmppl wrote it in the format {found}, and this is {FORMAT}"
            )
        if found == FORMAT and db.execute("select digest from total").fetchall() != [
            (f"{_total(db):032x}",)
        ]:
            raise sqlite3.DatabaseError("its contents are not those of its digest")
        db.rollback()


def _total(db: sqlite3.Connection) -> int:
    """Return the digest of all rows and of the tables."""
    total = 0
    for query in _CONTENTS:
        for row in db.execute(query):
            total ^= _number(row)
    return total


def _number(row: tuple[Any, ...]) -> int:
    return int(digest(row), 16)


# ---- reading


class Results:
    """The results in a file, in the order of their indices. They are read when they are used.

    Particles have text, weight, `parsed`, attribution, and the attributes that are plain data. A task is plain data.

    Examples
    --------
    >>> def run(prompt, rng):
    ...     return smc_steer(ConstrainedText(lm, prompt, [" happy", " sad"]), N=4, K=3, rng=rng)
    >>> done = [*run_many(run, ["The cat was", "The dog was"], seed=0, to="results.db")]
    >>> [(result.task, result.particles.best.text) for result in Results("results.db")]
    [('The cat was', ' happy'), ('The dog was', ' happy')]
    """

    def __init__(self, path: str | os.PathLike[str], constraint: Any = None) -> None:
        self.path = path_of("path", path)
        self._parse = parser_of(constraint)
        self.path.stat()  # or a FileNotFoundError
        with closing(_connect(self.path, "rw")) as db:
            _check(self.path, db)

    def _rows(self, query: str) -> Iterator[Any]:
        """Yield the first column of a query."""
        with closing(_connect(self.path, "rw")) as db, _reading(self.path):
            for row in db.execute(query):
                yield row[0]

    def __len__(self) -> int:
        return int(next(self._rows("select count(*) from result")))

    def __iter__(self) -> Iterator[Result]:
        for record in self._rows("select record from result order by task_index"):
            yield _loaded(record, self._parse)

    def __getitem__(self, place: int) -> Result:
        """Return the result at a place in the file."""
        place = range(len(self))[place]
        record = next(
            self._rows(f"select record from result order by task_index limit 1 offset {place}")
        )
        return _loaded(record, self._parse)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a data frame with a row for each particle or match, and one for each task without any.

        Columns: index, task, error, seconds, cpu_seconds, tokens, text, and the value, of which each field is a column,
        as "value.pet.kind". Answers of `generate` add probability, probability_se, ended and method. Particles add
        weight, log_weight, cut, log_ml and their attributes, except those of ready-made programs. Matches add their
        fields. ImportError without pandas.
        """
        return frame([row for result in self for row in _rows_of(result)])

    def to_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Write a line of JSON for each task, `Result.as_dict`, to another file."""
        with path_of("path", path).open("w", encoding="utf-8") as file:
            file.writelines(
                f"{record}\n"
                for record in self._rows("select record from result order by task_index")
            )

    def __repr__(self) -> str:
        failed = next(self._rows("select sum(failed) from result"))
        return f"Results({str(self.path)!r}: {len(self)} tasks, {failed or 0} failed)"


def load_results(path: str | os.PathLike[str], constraint: Any = None) -> Results:
    """Return the results in a file of `run_many` or `generate`, by index. The file may still be written.

    With the type or other constraint of the texts, values are those of its `parse`, as objects of the type. By default
    a record is a dict.

    FileNotFoundError if there is no such file; ValueError if it has other contents, or is damaged.

    Examples
    --------
    >>> program = ConstrainedText(lm, "The cat was", [" happy", " sad"])
    >>> results = run_many(lambda n, rng: smc_steer(program, n, 2, rng=rng), [2, 4], seed=0, to="results.db")
    >>> len(list(results))
    2
    >>> [result.task for result in load_results("results.db")]
    [2, 4]
    """
    return Results(path, constraint)


def _rows_of(result: Result) -> list[dict[str, Any]]:
    """Return a row for each particle or match, or one for the answer, or for the error."""
    names = "index", "task", "error", "seconds", "cpu_seconds", "tokens"
    common = {name: getattr(result, name) for name in names}
    rows = []
    if result.answer is not None:
        answer = result.answer
        known = {
            name: getattr(answer, name)
            for name in ("text", "probability", "probability_se", "ended", "method")
        }
        rows.append({**known, **_columns("value", as_data(answer.value))})
    for each in result.matches or ():
        rows.append(each if isinstance(each, dict) else each.as_dict())
    if result.particles is not None:
        common["log_ml"] = result.particles.log_ml
        for p, weight in zip(result.particles, result.particles.weights.tolist(), strict=True):
            row = {
                "text": p.text,
                "weight": weight,
                "log_weight": p.log_weight,
                "cut": p.cut,
            }
            values = {name: each for name, each in p.attributes.items() if name not in _OF_PROGRAM}
            row |= _columns("value", values.pop("parsed", p.text))
            rows.append({**values, **row})
    return [{**common, **row} for row in rows] or [common]


def _columns(name: str, value: Any) -> dict[str, Any]:
    """Return a column for each field of a record, and of records in it: "value.pet.kind"; else one column."""
    if not isinstance(value, dict):
        return {name: value}
    columns = dict[str, Any]()
    for field, each in value.items():
        columns |= _columns(f"{name}.{field}", each)
    return columns
