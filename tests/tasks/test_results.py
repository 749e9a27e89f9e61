"""Tests of files of results: each ended task is there whole, after kills, failures and full disks."""

import contextlib
import dataclasses
import datetime
import enum
import functools
import itertools
import json
import operator
import os
import pickle
import re
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import uuid

import numpy as np
import pydantic
import pytest
from helpers.common import repetitions
from helpers.killable import PROMPTS, Coin, coin, fresh
from helpers.tasks import COSTS, TASKS, Dies, by_index, everything, outcomes, records, run_all, steer
from helpers.tiny import cold_lm, table_lm

from llmppl import (
    Bernoulli,
    Categorical,
    ConstrainedText,
    JsonSchema,
    Model,
    Result,
    generate,
    importance_sampling,
    load_results,
    run_many,
    smc_steer,
)
from llmppl.tasks import ResultFile


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.db"


class Mood(Model):
    """Program with attributes of many types, and one that is no data."""

    def __init__(self):
        super().__init__()
        self.mood, self.pair, self.codes, self.mask = None, (1, (2.5, None)), {3: b"x"}, np.arange(3)
        self.born, self.at = datetime.date(2020, 2, 29), datetime.datetime(2020, 2, 29, 1, tzinfo=datetime.UTC)
        self.other = self.step

    def step(self):
        self.mood = self.sample(Categorical({"good": 0.5, "bad": 0.5}))
        self.s += self.mood[0]
        self.finish()


# ---- contents


def test_loaded_results_equal_the_returned_ones(path):
    lm = cold_lm()
    results = by_index(run_all(path, TASKS, steer(lm), together=3))
    loaded = load_results(path)
    assert len(loaded) == len(TASKS)
    assert [(one.index, one.task) for one in loaded] == [*enumerate(TASKS)]
    assert outcomes(loaded) == outcomes(results)
    costs = operator.attrgetter(*COSTS, "particles.log_ml_se")
    assert [*map(costs, loaded)] == [*map(costs, results)]
    printed = [re.sub(r", \d+ ancestors? at step 1", "", repr(each.particles)) for each in results]
    assert [repr(each.particles) for each in loaded] == printed         # a file has no ancestors


def test_attributes_that_are_data_return_with_their_types(path):
    (result,) = run_all(path, ["a"], lambda task, rng: smc_steer(Mood(), 2, 2, rng=rng))
    (loaded,) = load_results(path)
    assert [p.mood for p in loaded.particles] == [p.mood for p in result.particles]
    particle = loaded.particles[0]
    assert (particle.pair, particle.codes, particle.mask.tolist()) == ((1, (2.5, None)), {3: b"x"}, [0, 1, 2])
    assert (particle.born, particle.at) == (Mood().born, Mood().at)
    assert particle.s == particle.text == str(particle) == particle.mood[0]
    with pytest.raises(AttributeError, match="no 'other', it has s, text, mood, .*: only plain data is saved"):
        particle.other  # noqa: B018


@dataclasses.dataclass
class Point:
    x: int


class Color(str, enum.Enum):                            # noqa: UP042    its str is "Color.RED"
    RED = "red"


class Pet(pydantic.BaseModel):
    color: Color
    born: datetime.date


class Parsed(Coin):
    def __init__(self, value):
        super().__init__()
        self.value = value

    parsed = property(lambda self: self.value)


@pytest.mark.parametrize(("parsed", "data"), [
    (Point(3), {"x": 3}), (Color.RED, "red"), (datetime.date(2020, 2, 29), datetime.date(2020, 2, 29)),
    (uuid.UUID(int=1), uuid.UUID(int=1)),
    ((Pet(color="red", born="2020-02-29"),), [{"color": "red", "born": "2020-02-29"}]),
])  # fmt: skip
def test_parsed_values_return_as_data(path, parsed, data):
    run_all(path, ["a", "b"], lambda task, rng: importance_sampling(Parsed(parsed), 2, rng=rng))
    assert [[p.parsed for p in result.particles] for result in load_results(path)] == [[data, data]] * 2
    detached = pickle.loads(pickle.dumps(importance_sampling(Parsed(parsed), 2, seed=0)))
    assert [p.parsed for p in detached] == [data, data]


def test_a_parsed_value_that_is_no_data_is_left_out(path):
    run_all(path, ["a"], lambda task, rng: importance_sampling(Parsed(object()), 2, rng=rng))
    ((particle, _),) = [result.particles for result in load_results(path)]
    with pytest.raises(AttributeError, match="no 'parsed', it has s, text, finished: only plain data is saved"):
        particle.parsed  # noqa: B018


def test_a_loaded_posterior_without_particles_keeps_its_deaths(path):
    run_all(path, ["a"], lambda task, rng: importance_sampling(Dies(), 2, rng=rng))
    (one,) = load_results(path)
    assert len(one.particles) == 0 and one.particles.log_ml == -np.inf
    assert one.particles.deaths == importance_sampling(Dies(), 2, seed=0).deaths


@pytest.mark.parametrize("text", ["\n\r\x00\x85\u2028", "\ud800", 'é"\\', "😀", ""])
def test_texts_of_any_characters_come_back(path, text):
    class Says(Coin):
        def __str__(self):
            return text

    run_all(path, [text], lambda task, rng: importance_sampling(Says(), 1, rng=rng))
    (result,) = load_results(path)
    assert (result.task, result.particles.texts) == (text, [text])


def test_results_are_a_sequence_and_export_to_tables_and_lines(path, tmp_path):
    pandas = pytest.importorskip("pandas")
    results = by_index(run_all(path, range(10), everything))
    loaded = load_results(path)
    assert [loaded[i].index for i in (0, 3, -1)] == [0, 3, 9]
    assert repr(loaded).endswith("10 tasks, 2 failed)")
    frame = loaded.to_pandas()
    ended = [r for r in results if r.particles]
    assert frame["log_weight"].dropna().tolist() == [w for r in ended for w in r.particles.log_weights.tolist()]
    assert frame["log_joint"].dropna().tolist() == [m.log_joint for r in results for m in r.matches or ()]
    assert set(frame["index"]) == set(range(10)) and frame["error"].notna().sum() == 2
    loaded.to_jsonl(tmp_path / "lines.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    texts = [[p["text"] for p in line["particles"]] for line in lines if line.get("particles")]
    assert texts == [r.particles.texts for r in ended]
    assert len(pandas.read_json(tmp_path / "lines.jsonl", lines=True)) == 10


def test_the_tables_can_be_asked_in_SQL(path):
    run_all(path, range(4), lambda task, rng: smc_steer(Mood(), 2, 2, rng=rng))
    with sqlite3.connect(path) as db:
        query = "select task, text, json_extract(attributes, '$.mood') from particle"
        assert {(mood[0], text) for _, text, mood in db.execute(query)} == {("g", "g"), ("b", "b")}
    assert [each.name for each in path.parent.iterdir() if each.suffix != ".lock"] == ["results.db"]


def test_costs_of_tasks_add_up_to_those_of_the_model(path):
    """A task of n tokens costs n contexts; busy loops are the CPU time of their own task."""
    lm = table_lm(lambda ids: [0.1 * (len(ids) % 3), 0.0, -1.0])

    def run(task, rng):
        end = time.process_time() + 0.05 * (task == "b")
        while time.process_time() < end:
            pass
        return smc_steer(ConstrainedText(lm, task, max_tokens=4), 2, 2, rng=rng)

    a, b, c = by_index(run_all(path, ["a", "b", "ab"], run))
    assert abs(a.tokens + b.tokens + c.tokens - lm.stats.tokens) <= 2 and a.tokens > 0
    assert b.cpu_seconds > 0.05 > a.cpu_seconds and b.cpu_seconds > 0.05 > c.cpu_seconds
    inner = list(run_many(lambda _, rng: next(run_many(run, ["ba"], seed=1)).particles, [0, 1], seed=0))
    assert sum(each.tokens for each in inner) <= lm.stats.tokens - a.tokens - b.tokens - c.tokens + 2


# ---- failures


def test_a_time_limit_keeps_the_posterior_of_its_task(path):
    class Long(Model):
        def step(self):
            self.s += "x" * self.sample(Bernoulli(0.5)) + "."

    def run(limit, rng):
        def stop(step):
            if step.index == limit:
                raise TimeoutError("the time is over")

        return smc_steer(Long(), 3, 2, rng=rng, max_steps=5, on_step=stop, progress=False)

    late, whole = by_index(run_all(path, [3, 9], run))
    assert late.error.endswith("TimeoutError: the time is over\n") and len(late.particles) == 3
    assert {p.cut for p in late.particles} == {True} and {p.s.count(".") for p in late.particles} == {3}
    assert whole.error is None
    first = load_results(path)[0]
    assert first.error == late.error and first.particles.texts == late.particles.texts


def test_failed_tasks_run_again_and_others_do_not(path):
    fails = {1, 3}

    def run(task, rng):
        if task in fails:
            raise SystemExit(3) if task == 1 else KeyError("mine")
        return coin(task, rng)

    results = by_index(run_all(path, range(5), run))
    assert [result.error is None for result in results] == [True, False, True, False, True]
    assert results[1].error.endswith("SystemExit: 3\n")
    assert len(load_results(path)) == 5
    fails.remove(3)
    again = by_index(run_all(path, range(6), run, resume="force"))
    assert [(result.index, result.error is None) for result in again] == [(1, False), (3, True), (5, True)]
    assert load_results(path)[3].particles.texts == again[1].particles.texts and len(load_results(path)) == 6


FULL = """
import resource, signal, sys
from helpers.killable import coin
from llmppl import run_many
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
seen = []
try:
    for result in run_many(coin, range(1000), seed=3, to=sys.argv[1]):
        seen.append(result.index)
except OSError as error:
    print(error)
print(len(seen))
"""


def test_a_full_disk_ends_the_run_and_loses_no_result(path, tmp_path):
    told = subprocess.run([sys.executable, "-c", FULL, path], capture_output=True, check=True, text=True)
    error, number = told.stdout.splitlines()
    assert "The results before are whole; resume=True goes on" in error and str(path) in error
    assert len(load_results(path)) == int(number) > 10
    run_all(path, range(200), resume=True)
    run_all(tmp_path / "whole.db", range(200))
    assert records(path) == records(tmp_path / "whole.db")


class Long(Model):
    def step(self):
        self.s += self.sample(Categorical({"x": 0.5, "y": 0.5}))
        if len(self.s) == 200:
            self.finish()


@pytest.mark.slow
def test_a_full_disk_under_a_checkpoint_is_no_result(path, tmp_path):
    def run(task, rng):
        kept = {"checkpoint": tmp_path / f"{task}.ckpt", "every": 1}
        return smc_steer(Long(), 4, 2, rng=rng, progress=False, **kept)

    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, before[1][1]))
    try:
        with pytest.raises(OSError, match=r"a\.ckpt"):
            run_all(path, ["a"], run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[1])
        signal.signal(signal.SIGXFSZ, before[0])
    assert len(load_results(path)) == 0
    (result,) = run_all(path, ["a"], run, resume=True)
    assert result.particles.log_ml == pytest.approx(0.0)


def test_an_interrupted_run_has_written_all_ended_tasks(path):
    lm, ended = cold_lm(), []

    def run(task, rng):
        if len(ended) >= 4:
            raise KeyboardInterrupt
        particles = steer(lm)(task, rng)
        ended.append(task)
        return particles

    with pytest.raises(KeyboardInterrupt):
        run_all(path, TASKS * 2, run, together=3)
    assert len(load_results(path)) == len(ended) >= 4
    run_all(path, TASKS * 2, steer(lm), together=3, resume="force")
    assert outcomes(load_results(path)) == outcomes(run_many(steer(lm), TASKS * 2, seed=3, together=3))


# ---- resuming


def test_a_complete_file_can_be_extended_by_more_tasks(path, tmp_path):
    run_all(path, range(4), resume=True)
    assert run_all(path, range(4), resume=True) == []
    assert sorted(result.index for result in run_all(path, iter(range(6)), resume=True)) == [4, 5]
    run_all(tmp_path / "whole.db", range(6))
    assert records(path) == records(tmp_path / "whole.db")


def test_without_a_seed_one_is_drawn_and_the_resumed_run_takes_it(path, tmp_path):
    list(itertools.islice(run_many(coin, range(8), to=path), 3))
    run_all(path, range(8), seed=None, resume=True)
    with contextlib.closing(ResultFile(path, resume="force")) as file:
        seed = file.seed
    run_all(tmp_path / "two.db", range(8), seed=seed)
    assert records(path) == records(tmp_path / "two.db")


def contents(path):
    """Return the bytes of a file, or the contents of its tables."""
    if not path.is_file() or not path.read_bytes().startswith(b"SQLite format 3\0\x10"):
        return path.exists() and path.read_bytes()
    with sqlite3.connect(path) as db:
        return [*db.iterdump()]


def refused(path, error, message, tasks=range(4), run=coin, **options):
    """Check that a run raises an error before any task begins, and leaves the file as it is."""
    before = contents(path)
    with pytest.raises(error, match=message):
        run_many(run, tasks, **{"seed": 3, "to": path, **options})
    assert contents(path) == before


def test_unsuitable_files_are_refused(path, tmp_path):
    run_all(path, range(4))
    refused(path, FileExistsError, "the file is there; resume=True goes on with its results")
    refused(path, ValueError, "another run: its seed was 3, and is 4. Go on with", seed=4, resume=True)
    refused(tmp_path / "no" / "results.db", FileNotFoundError, "there is no folder .*; make it first")
    refused(tmp_path / "results.jsonl", ValueError, "results are an SQLite file, as to='results.db'; then load_results")
    assert run_all(path, range(5), resume=True)[0].index == 4           # a refused run has released the file


@pytest.mark.parametrize("tasks", [[0, 7, 2, 3, 4], iter([0, 7, 2, 3])])
def test_other_tasks_are_refused(path, tasks):
    run_all(path, range(4))
    before = contents(path)
    with pytest.raises(ValueError, match="the result of another task 1 than 7: go on with"):
        run_all(path, tasks, resume=True)
    assert contents(path) == before


@pytest.mark.parametrize("content", [b"hello", b'{"index": 0}\n', b"SQLite format 3\0", b"\0" * 200])
def test_a_foreign_file_is_left_unchanged(path, content):
    path.write_bytes(content)
    refused(path, ValueError, "no file of results", resume=True)
    with pytest.raises(ValueError, match="no file of results of run_many"):
        load_results(path)


def test_a_file_of_an_earlier_version_names_it(path):
    path.write_text('{"run": "x", "seed": 3, "version": "0.1.0"}\n{"index": 0}\n')
    refused(path, ValueError, r"no file of results .*llmppl 0\.1 wrote lines of JSON", resume=True)
    path.unlink()
    run_all(path, range(2))
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript("drop table total; pragma user_version = 0; update run set identity = "
                         "json_set(identity, '$.the version of llmppl', '0.2.0')")  # fmt: skip
    assert len(load_results(path)) == 2
    refused(path, ValueError, r"was written by llmppl 0\.2\.0: load_results reads it", resume="force")


def test_a_file_that_a_run_has_only_opened_has_no_results_yet(path):
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("pragma journal_mode=wal")
    with pytest.raises(ValueError, match="its run has written nothing yet"):
        load_results(path)
    assert len(run_all(path, range(3))) == 3


def test_another_database_is_left_unchanged(path):
    with sqlite3.connect(path) as db:
        db.execute("create table result(a)")
    refused(path, ValueError, "no file of results", resume=True)


def other(task, rng):
    return importance_sampling(Coin(), 2, rng=rng)


def version_of(number):
    """Return two functions of one name and different sources."""
    if number == 1:
        def run(task, rng):
            return importance_sampling(Coin(), 2, rng=rng)
    else:
        def run(task, rng):
            return importance_sampling(Coin(), 3, rng=rng)
    return run


def without_source(number):
    """Return a function as a shell makes it."""
    names = {"importance_sampling": importance_sampling, "Coin": Coin}
    exec(f"def run(task, rng): return importance_sampling(Coin(), {number}, rng=rng)", names)
    return names["run"]


def steered(number, task, rng):
    return importance_sampling(Coin(), number, rng=rng)


class Runs:
    """Function with an option, as an object and as a method."""

    def __init__(self, number):
        self.number, self.lock = number, threading.Lock()

    def __call__(self, task, rng):
        return importance_sampling(Coin(), self.number, rng=rng)

    def run(self, task, rng):
        return self(task, rng)


@pytest.mark.parametrize(
    "before, now, difference",
    [
        (coin, other, "its program was coin, and is other"),
        (version_of(1), version_of(2), "the source of run has changed"),
        (without_source(1), without_source(2), "the source of run has changed"),
        (lambda task, rng: coin(0, rng), lambda task, rng: coin(1, rng), "the source of <lambda> has changed"),
        (functools.partial(steered, 2), functools.partial(steered, 3), "argument 0 was 2, and is 3"),
        (Runs(2), Runs(3), "the attribute number was 2, and is 3"),
        (Runs(2).run, Runs(3).run, "the attribute number was 2, and is 3"),
    ],
)
def test_a_difference_of_the_program_is_named_and_can_be_forced(path, before, now, difference):
    run_all(path, range(4), before)
    refused(path, ValueError, f"another run: {difference}. Go on .* the version= .*resume=.force", run=now, resume=True)
    assert run_all(path, range(4), before, resume=True) == []
    assert len(run_all(path, range(5), now, resume="force")) == 1
    assert run_all(path, range(5), now, resume=True) == []


def test_another_version_is_refused(path):
    run_all(path, range(4), version="first critic")
    refused(path, ValueError, "its version was 'first critic', and is 'second'", version="second", resume=True)
    refused(path, ValueError, "its version was 'first critic', and is ''", resume=True)
    assert run_all(path, range(4), version="first critic", resume=True) == []


N = 2


def by_global(task, rng):
    return importance_sampling(Coin(), N, rng=rng)


def test_objects_to_which_a_function_refers_are_not_compared(path, monkeypatch):
    run_all(path, range(4), by_global)
    monkeypatch.setitem(globals(), "N", 3)
    assert run_all(path, range(4), by_global, resume=True) == []


AGAIN = """
import sys
from helpers.killable import PROMPTS, fresh
from llmppl import run_many
print(len([*run_many(fresh(), PROMPTS[:3], seed=3, to=sys.argv[1], resume=True)]))
"""


def test_a_program_is_the_same_in_another_process(path):
    told = [
        subprocess.run([sys.executable, "-c", AGAIN, path], stdout=-1, env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in "12"
    ]
    assert [each.stdout for each in told] == [b"3\n", b"0\n"]


@pytest.mark.parametrize(
    "task, expected",
    [
        (("a", 1), ("a", 1)), ({1: {2}}, {1: {2}}), ([np.inf, None], [np.inf, None]), (b"x", b"x"),
        (Point(3), "Point(x=3)"), (datetime.date(2020, 2, 29), datetime.date(2020, 2, 29)),
    ],
)  # fmt: skip
def test_tasks_return_as_data_and_are_compared(path, task, expected):
    run_all(path, [task])
    assert load_results(path)[0].task == expected
    assert run_all(path, [task], resume=True) == []
    with pytest.raises(ValueError, match="another task 0 than 'other'"):
        run_all(path, ["other"], resume=True)


# ---- owners and kills


def test_two_runs_cannot_write_one_file(path):
    results = run_many(coin, range(4), seed=3, to=path)
    next(results)
    with pytest.raises(BlockingIOError, match="another run is writing it. Let that one end first, or write to another"):
        run_many(coin, range(4), seed=3, to=path, resume=True)
    assert len(load_results(path)) == 1                 # while it is written
    results.close()
    assert len(run_all(path, range(4), resume=True)) == 3


KILLED = """
import sys
from helpers.killable import PROMPTS, fresh
from llmppl import run_many
for result in run_many(fresh(), PROMPTS, seed=3, to=sys.argv[1], resume=True, together=7):
    print(result.index, flush=True)
"""


def killed(path, number):
    """Kill a run soon after its result of this number, and return the indices of the results."""
    with subprocess.Popen([sys.executable, "-c", KILLED, path], stdout=-1) as process:
        told = [int(process.stdout.readline()) for _ in range(number)]
        process.kill()
    return told


@pytest.mark.parametrize("first, second", [(9, 1), *[(1, 5), *[(7, 7)] * 10] * repetitions(1, 0)])
def test_a_killed_run_resumes_and_ends_the_same(path, tmp_path, first, second):
    told = [*killed(path, first), *killed(path, second)]
    assert {result.index for result in load_results(path)} >= set(told) and len(set(told)) == len(told)
    run_all(path, PROMPTS, fresh(), together=7, resume=True)
    run_all(tmp_path / "whole.db", PROMPTS, fresh(), together=7)
    assert records(path) == records(tmp_path / "whole.db")


def test_a_table_has_the_columns_of_the_answers(tmp_path):
    pytest.importorskip("pandas")
    record = JsonSchema({"type": "object", "properties": {"k": {"enum": ["a", "b"]}}, "required": ["k"],
                         "additionalProperties": False}, whitespace=False)  # fmt: skip
    tokens = [bytes([each]) for each in b'{}":abk']
    lm = table_lm(lambda ids: [0.0] * len(tokens) + [-3.0], tokens)
    common = {"index", "task", "error", "seconds", "cpu_seconds", "tokens", "text", "value.k"}
    run_all(tmp_path / "s.db", ["a"], lambda task, rng: smc_steer(ConstrainedText(lm, task, record), 2, 2, rng=rng))
    found = load_results(tmp_path / "s.db").to_pandas()
    assert {*found.columns} == common | {"log_ml", "weight", "log_weight", "cut"}
    run_all(tmp_path / "g.db", ["a"], lambda task, rng: generate(lm, task, record, method="best_of", N=2, rng=rng))
    found = load_results(tmp_path / "g.db").to_pandas()
    assert {*found.columns} == common | {"probability", "probability_se", "ended", "method"}
    assert found["value.k"][0] in "ab"
    run_all(tmp_path / "m.db", range(2), lambda task, rng: smc_steer(Mood(), 2, 2, rng=rng))
    assert "mood" in load_results(tmp_path / "m.db").to_pandas().columns


def test_the_cost_of_all_tasks_is_estimated_after_the_first_few():
    from llmppl.report import progress
    from llmppl.tasks import many

    shown = []

    class Bar(progress.Bar):
        def __call__(self, t, state):
            shown.append((t, state))

    results = [Result(index, None, cpu_seconds=30.0, tokens=1000) for index in range(10)]
    before, many.Bar = many.Bar, Bar
    try:
        list(many._shown(iter(results), 2, 12, None))
    finally:
        many.Bar = before
    assert shown[1] == (4, "0 failed")
    assert shown[2] == (5, "0 failed; about 5 min of CPU and 10,000 tokens in all") and shown[-1][0] == 12


def test_a_long_run_without_a_terminal_prints_lines(monkeypatch, capsys):
    from llmppl.report import progress

    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.Bar(None, 9, str, unit="task", lines=True) as show:
        for t in range(9):
            now[0] += 10.0
            show(t, "0 failed")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["llmppl: task 1 of 9: 0 failed", "llmppl: task 7 of 9: 0 failed"]
