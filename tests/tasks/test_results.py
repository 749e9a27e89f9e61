"""Tests of files of results: a complete line for each ended task, after kills, torn lines and full disks."""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.common import repetitions
from helpers.fire import Interrupt
from helpers.killable import PROMPTS, Coin, coin, fresh
from helpers.tasks import TASKS, Dies, by_index, everything, lines, outcomes, run_all, steer
from helpers.tiny import cold_lm

from llmppl import Bernoulli, Model, beam_search, importance_sampling, load_results, run_many, smc_steer
from llmppl.support import files, runtime
from llmppl.tasks import ResultFile, many, results
from llmppl.tasks.results import digest


def test_each_task_is_a_line_with_its_result(tmp_path):
    path = tmp_path / "results.jsonl"

    def run(task, rng):
        if task == "dies":
            return importance_sampling(Dies(), 2, rng=rng)
        if task == "beam":
            return beam_search(Coin(), 2, 2)
        if task == "raises":
            raise KeyError("mine")
        return smc_steer(Coin(), 2, 2, rng=rng)

    results = by_index(run_all(path, ["a", "dies", "beam", "raises"], run))
    a, dies, beam, raises = lines(path)
    assert [a["index"], a["digest"]] == [0, digest("a")]
    posterior = results[0].particles
    assert (a["texts"], a["log_weights"]) == (posterior.texts, posterior.log_weights.tolist())
    assert (a["log_ml"], a["log_ml_se"], a["cut"]) == (posterior.log_ml, posterior.log_ml_se, [False, False])
    assert dies["texts"] == [] and dies["log_ml"] is None and "condition is false" in dies["deaths"][0]["reason"]
    assert beam["matches"] == [
        {"text": text, "log_joint": pytest.approx(np.log(0.5)), "cut": False} for text in ["", "x"]
    ]
    assert raises["error"] == results[3].error and "texts" not in raises
    header, *rest = path.read_bytes().splitlines(keepends=True)
    told = json.loads(header)
    assert (told["seed"], told["after"], told["identity"]["program"]) == (3, None, "run") and told["version"]
    assert rest[0].startswith(b'{"index": 0, ') and len(rest) == 4


def test_loaded_results_equal_the_returned_ones(tmp_path):
    path, lm = tmp_path / "results.jsonl", cold_lm()
    results = by_index(run_all(path, TASKS, steer(lm), together=3))
    loaded = load_results(path)
    assert [(one.index, one.task) for one in loaded] == [*enumerate(TASKS)]
    for one, other in zip(loaded, results, strict=True):
        assert repr(one.particles) == repr(other.particles)
        assert one.particles.log_weights.tolist() == other.particles.log_weights.tolist()
        assert one.particles.log_ml_se == other.particles.log_ml_se
        assert one.particles.by_text() == other.particles.by_text()
        assert [p.cut for p in one.particles] == [p.cut for p in other.particles]


def test_a_loaded_posterior_without_particles_keeps_its_deaths(tmp_path):
    path = tmp_path / "results.jsonl"
    run_all(path, ["a"], lambda task, rng: importance_sampling(Dies(), 2, rng=rng))
    (one,) = load_results(path)
    assert len(one.particles) == 0 and one.particles.log_ml == -np.inf
    assert one.particles.deaths == importance_sampling(Dies(), 2, seed=0).deaths


@pytest.mark.parametrize("cut", [0, 1, 9, 40, 200])
def test_a_torn_file_is_cut_and_resumed(tmp_path, cut):
    path, whole = tmp_path / "results.jsonl", tmp_path / "whole.jsonl"
    run_all(whole, range(12))
    data = whole.read_bytes()
    path.write_bytes(data[: len(data) // 2 + cut])
    before = data[: len(data) // 2 + cut].count(b"\n") - 1
    torn = f"results.jsonl, line {before + 2}, is torn and left out; resume=True runs its task again"
    with pytest.warns(UserWarning, match=torn):
        assert len(load_results(path)) == before
    with pytest.warns(UserWarning, match="is torn"):
        assert len(run_all(path, range(12), resume=True)) == 12 - before
    assert lines(path) == lines(whole)


def test_a_complete_file_can_be_extended_by_more_tasks(tmp_path):
    path, whole = tmp_path / "results.jsonl", tmp_path / "whole.jsonl"
    run_all(path, range(4))
    data = path.read_bytes()
    assert run_all(path, range(4), resume=True) == [] and path.read_bytes() == data
    assert sorted(result.index for result in run_all(path, iter(range(6)), resume=True)) == [4, 5]
    run_all(whole, range(6))
    assert lines(path) == lines(whole)


def test_resume_without_a_file_starts_one(tmp_path):
    assert len(run_all(tmp_path / "results.jsonl", range(4), resume=True)) == 4


def test_without_a_seed_one_is_drawn_and_the_resumed_run_takes_it(tmp_path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    list(itertools.islice(run_many(coin, range(8), to=one), 3))
    run_all(one, range(8), seed=None, resume=True)
    run_all(two, range(8), seed=json.loads(one.read_bytes().splitlines()[0])["seed"])
    assert lines(one) == lines(two)


def refused(path, error, message, tasks=range(4), **options):
    """Check that a run raises an error before any task begins, and leaves the file as it is."""
    before = path.read_bytes() if path.is_file() else None

    def run(task, rng):
        raise AssertionError("a task began")

    with pytest.raises(error, match=message):
        run_many(run, tasks, **{"seed": 3, "to": path, **options})
    assert (path.read_bytes() if path.is_file() else None) == before


def test_unsuitable_files_are_refused(tmp_path):
    path = tmp_path / "results.jsonl"
    run_all(path, range(4))
    refused(path, FileExistsError, "the file is there; resume=True goes on with its results")
    with pytest.raises(ValueError, match="another run: its seed is 3, and this is 4. Go on with what they were made"):
        run_all(path, range(4), seed=4, resume=True)
    refused(path, ValueError, "another run: its program is coin, and this is run. Go on with what", resume=True)
    with pytest.raises(ValueError, match="the result of another task 1 than 7: go on with"):
        run_all(path, [0, 7, 2, 3], resume=True)
    with pytest.raises(ValueError, match="the result of a task 3, from 0, and tasks are now 3: go on"):
        run_all(path, range(3), resume=True)
    with pytest.raises(TypeError, match='resume must be True, False or "force", not'):
        run_all(path, range(4), resume="forced")
    refused(tmp_path / "no" / "results.jsonl", FileNotFoundError, "there is no folder .*; make it first")
    refused(tmp_path, OSError, "to a file of their own, and this is none", resume=True)
    refused(Path("/dev/full"), OSError, "to a file of their own, and this is none", resume=True)


def test_a_generator_of_other_tasks_is_refused_while_it_runs(tmp_path):
    path = tmp_path / "results.jsonl"
    run_all(path, range(4))
    with pytest.raises(ValueError, match="the result of another task 1 than 7"):
        run_all(path, iter([0, 7, 2, 3]), resume=True)
    with pytest.raises(ValueError, match="a task 3, from 0, and tasks are now 2"):
        run_all(path, iter([0, 1]), resume=True)


@pytest.mark.parametrize(
    "content",
    [b"hello", b"hello\n", b'{"a": 1}\n', b"[]\n", b"1\n", b"\x00\x01\n", b'{"index": 0, "seed": 1}\n', b"{}", b"\n"],
)
def test_a_foreign_file_is_left_unchanged(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    refused(path, ValueError, "line 1, is no result of run_many, or is damaged; the file is left as", resume=True)
    with pytest.raises(ValueError, match="line 1, is no result of run_many"):
        load_results(path)


def test_a_file_damaged_in_the_middle_names_the_place(tmp_path):
    path = tmp_path / "results.jsonl"
    run_all(path, range(4))
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([whole[0], whole[1][:50] + whole[2], whole[3]]))
    refused(path, ValueError, "results.jsonl, line 2, is no result of run_many", resume=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_file_without_write_permission_is_refused(tmp_path):
    path = tmp_path / "results.jsonl"
    path.touch(mode=0o400)
    refused(path, PermissionError, "results.jsonl")


FULL = """
import resource, sys
from helpers.killable import coin
from llmppl import run_many
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
seen = []
try:
    for result in run_many(coin, range(100), seed=3, to=sys.argv[1]):
        seen.append(result.index)
except OSError as error:
    print(error)
print(len(seen))
"""


def test_a_full_disk_ends_the_run_and_loses_no_line(tmp_path):
    """The limit on the size of files breaks a write in the middle of a line, as a full disk does."""
    path, whole = tmp_path / "results.jsonl", tmp_path / "whole.jsonl"
    told = subprocess.run(
        [sys.executable, "-c", FULL, path], capture_output=True, check=True, text=True
    ).stdout.splitlines()
    assert told[0].startswith("[Errno 27] File too large: the results before that of task")
    assert "are whole; resume=True goes on" in told[0] and str(path) in told[0]
    data = path.read_bytes()
    assert data.endswith(b"\n") and data.count(b"\n") - 1 == int(told[1]) > 1
    run_all(path, range(100), resume=True)
    run_all(whole, range(100))
    assert lines(path) == lines(whole)


def test_an_interrupted_run_has_written_all_ended_tasks(tmp_path):
    path, lm = tmp_path / "results.jsonl", cold_lm()
    ended = []

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


def test_texts_of_any_characters_come_back(tmp_path):
    path = tmp_path / "results.jsonl"
    texts = ["\n\r\x00\x85\u2028", "\ud800", 'é"\\', "😀", ""]

    class Says(Model):
        def __init__(self, text):
            super().__init__()
            self.says = text

        def step(self):
            self.sample(Bernoulli(0.5))
            self.finish()

        def __str__(self):
            return self.says

    run_all(path, texts, lambda text, rng: importance_sampling(Says(text), 1, rng=rng))
    assert [result.particles.texts for result in load_results(path)] == [[text] for text in texts]
    assert path.read_bytes().count(b"\n") == 1 + len(texts)


def test_two_runs_cannot_write_one_file(tmp_path):
    path = tmp_path / "results.jsonl"
    results = run_many(coin, range(4), seed=3, to=path)
    next(results)
    owner = f"another run in process {os.getpid()} is writing it. Let that one end first, or write to another file"
    refused(path, BlockingIOError, owner, resume=True)
    results.close()
    assert len(run_all(path, range(4), resume=True)) == 3


def test_a_run_that_refuses_other_tasks_releases_the_file(tmp_path):
    run_all(path := tmp_path / "results.jsonl", range(4))
    with pytest.raises(ValueError, match="another task 0 than 'x'") as kept:     # with its frames, and what they hold
        run_all(path, ["x"] * 4, resume=True)
    assert run_all(path, range(5), resume=True)[0].index == 4 and kept


# ---- killed and interrupted


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


def test_a_killed_run_resumes_and_ends_the_same(tmp_path):
    """At random moments, twice each; every index once, and every float the same."""
    whole, rng = tmp_path / "whole.jsonl", np.random.default_rng()
    run_all(whole, PROMPTS, fresh(), together=7)
    for trial in range(repetitions(10, 1)):
        path = tmp_path / f"{trial}.jsonl"
        told = killed(path, rng.integers(1, 14))
        told += killed(path, rng.integers(1, 7))
        assert {result.index for result in load_results(path)} >= set(told) and len(set(told)) == len(told)
        run_all(path, PROMPTS, fresh(), together=7, resume=True)
        assert lines(path) == lines(whole)


INTERRUPTED = {module.__file__ for module in (files, many, results, runtime)}


def test_an_interrupt_at_any_line_loses_no_returned_result(tmp_path):
    whole, path = tmp_path / "whole.jsonl", tmp_path / "results.jsonl"
    tasks = PROMPTS[:4]
    with Interrupt(INTERRUPTED) as watch:
        run_all(whole, tasks, fresh(), together=2)
    rng = np.random.default_rng(0)
    places = sorted(watch.seen.items())
    assert len(places) > 80
    for place, number in places[:: repetitions(1, 5)]:
        given = []
        with Interrupt(INTERRUPTED, place, int(rng.integers(1, number + 1))) as fire:
            for result in run_many(fresh(), tasks, seed=3, to=path, together=2):
                given.append(result.index)
        assert fire.left == 0, place
        assert {result.index for result in (load_results(path) if path.exists() else ())} >= set(given), place
        run_all(path, tasks, fresh(), together=2, resume=True)
        assert lines(path) == lines(whole), place
        path.unlink()


# ---- Parquet


def rows(path):
    return [repr((r.index, r.task, r.particles, r.matches, r.error)) for r in load_results(path)]


def test_a_parquet_path_is_refused_with_the_line_of_pandas_that_works(tmp_path, monkeypatch):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=r"to must name a file of JSON lines such as 'results\.jsonl'") as refusal:
        run_many(everything, range(5), seed=3, to=tmp_path / "results.parquet")
    with pytest.raises(ValueError, match="path must name a file of JSON lines"):
        load_results("results.parquet")
    run_all(tmp_path / "results.jsonl", range(10), everything)
    monkeypatch.chdir(tmp_path)
    eval(str(refusal.value).partition("of one: ")[2], {"pandas": pandas})
    frame = pandas.read_parquet("results.parquet").sort_values("index")
    for row, result in zip(frame.itertuples(index=False), load_results("results.jsonl"), strict=True):
        assert row.index == result.index
        if result.particles is not None:
            assert row.log_weights.tolist() == result.particles.log_weights.tolist()
            assert row.texts.tolist() == result.particles.texts


# ---- digests


def test_the_digest_of_a_task_depends_only_on_its_value():
    written = '["a", ["a", 1.5, None], {"b": 1, "a": {"x", "y", "z"}}, np.arange(3), Path("a"), b"bytes", ("a", True)]'
    tasks = eval(written)
    assert len(set(map(digest, tasks))) == len(tasks)
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1}) != digest({"b": (2,), "a": 1})
    imports = "import numpy as np; from pathlib import Path; from llmppl.tasks.results import digest"
    code = f"{imports}\nprint(*map(digest, {written}))"
    for seed in "12":                                   # hashes of texts differ, and with them the order of sets
        told = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        )
        assert told.stdout.decode().split() == [digest(task) for task in tasks]


TASKS_OF_JSON = ["a\ud800\n", 1.5, None, True, [], ["a", [1, None]], {"a": {"b": [2]}}]
TASKS_OF_MORE = [math.nan, [math.inf], {1, 2}, np.arange(3), b"bytes", [Path("a")], {"a": np.int64(1)}]


def test_a_task_returns_from_JSON_and_is_always_identified(tmp_path):
    path, tasks = tmp_path / "results.jsonl", [*TASKS_OF_JSON, *TASKS_OF_MORE, ("a", 1), {1: "a"}]
    run_all(path, tasks)
    expected = [*TASKS_OF_JSON, *[None] * len(TASKS_OF_MORE), ["a", 1], {"1": "a"}]
    assert [result.task for result in load_results(path)] == expected
    assert run_all(path, tasks, resume=True) == []
    with pytest.raises(ValueError, match="another task 9 than {1, 3}"):
        run_all(path, [*tasks[:9], {1, 3}, *tasks[10:]], resume=True)


@pytest.mark.parametrize("task", [object(), [1, object()], (letter for letter in "ab"), {1: object()}])
def test_a_task_that_is_no_data_cannot_be_resumed(tmp_path, task):
    path = tmp_path / "results.jsonl"
    with pytest.raises(TypeError, match="has no stable identity, which resuming needs: with to=, a task must be data"):
        run_all(path, [task])
    assert [result.error for result in run_many(coin, [task], seed=0)] == [None]


def test_a_result_file_keeps_its_seed_and_tasks(tmp_path):
    path = tmp_path / "results.jsonl"
    results = run_all(path, ["a", "b"])
    with ResultFile(path, resume=True) as file:
        assert file.seed == 3 and file.is_done(1, "b") and not file.is_done(2, "c")
        file.write(results[0].__class__(2, "c", error="none"))
    assert [result.index for result in load_results(path)] == [0, 1, 2]
