"""Tests of the store of results and checkpoints: the identity of a file, its owner, and the errors for damage."""

import dataclasses
import json
import os
import stat
import subprocess
import sys
import threading

import numpy as np
import pytest
from helpers.common import HANG, repetitions
from helpers.killable import Coin, coin
from helpers.programs import Steps
from helpers.tasks import by_index, lines, run_all
from typer.testing import CliRunner

from llmppl import Model, importance_sampling, load_results, run_many, smc_steer
from llmppl.cli import app
from llmppl.support.arguments import mismatch
from llmppl.support.files import Owned, sealed, unsealed
from llmppl.tasks import results as module
from llmppl.tasks.results import ResultFile, digest, repair

LIMIT = 3


def limited(task, rng):
    return importance_sampling(Coin(), LIMIT, rng=rng)


def shown(results):
    return [repr((each.index, each.task, each.particles, each.error)) for each in by_index(results)]


# ---- what made a file


@dataclasses.dataclass(frozen=True)
class Task:
    name: str
    values: np.ndarray


def series(values):
    pandas = pytest.importorskip("pandas")
    return pandas.Series(values)


def frame(values):
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({"a": values, "b": "text"})


def tensor(values):
    return pytest.importorskip("torch").tensor(values)


class Silent:
    def __init__(self, values):
        self.values = values

    def __repr__(self):
        return "Silent"


@pytest.mark.parametrize(
    "make", [np.array, lambda values: Task("q", values), tensor, series, frame, Silent, lambda values: {"a": [values]}]
)
def test_a_task_is_identified_by_its_contents_of_any_length(make, tmp_path):
    values = np.zeros(5000)
    other = values.copy()
    other[2500] = 1e-10
    assert digest(make(values)) == digest(make(values.copy())) != digest(make(other))
    run_all(tmp_path / "r.jsonl", [make(values)])
    assert run_all(tmp_path / "r.jsonl", [make(values.copy())], resume=True) == []
    with pytest.raises(ValueError, match="the result of another task 0 than"):
        run_all(tmp_path / "r.jsonl", [make(other)], resume=True)


def test_tasks_of_another_type_or_label_are_different():
    pandas = pytest.importorskip("pandas")
    tasks = [
        {1: "a"}, {"1": "a"}, {1.0: "a"}, 1, 1.0, True, "1", [1], (1,), {1}, frozenset({1}), np.int64(1), np.float32(1),
        np.zeros(2), np.zeros(2, np.float32), np.zeros((1, 2)), b"a", "a", pandas.Series([1, 2]),
        pandas.Series([1, 2], index=["a", "b"]), pandas.Series([1, 2], name="n"), pandas.DataFrame({0: [1, 2]}),
        pandas.DataFrame({"0": [1, 2]}), pandas.Series([1.0, 2.0]), pandas.Index([1, 2]),
        pandas.Index([1, 2], name="n"),
    ]  # fmt: skip
    assert len(set(map(digest, tasks))) == len(tasks)
    assert digest(pandas.DataFrame({"a": [1], "b": [2]})[["a", "b"]]) == digest(pandas.concat(
        [pandas.Series([1], name="a"), pandas.Series([2], name="b")], axis=1
    ))  # fmt: skip                                     # of columns that were put together later


def test_results_of_another_run_are_refused_unless_forced(tmp_path, monkeypatch):
    path = tmp_path / (name := "r.jsonl")
    first = run_all(path, range(4), limited)
    before = path.read_bytes()

    def refused(message, run=limited, **options):
        with pytest.raises(ValueError, match=f"{name} holds results of another run: {message}"):
            run_all(path, range(8), run, resume=True, **options)
        assert path.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == [name]

    refused("its program is limited, and this is coin", coin)
    refused("its seed is 3, and this is 4", seed=4)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_VERSION", "9.9")
        refused("llmppl was .*, and is 9.9")
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], "LIMIT", 5)
        refused("the global LIMIT was 3, and is 5")
        more = run_all(path, range(8), limited, resume="force", seed=4)
        assert shown(load_results(path)) == shown([*first, *more])
        assert [len(each.particles) for each in load_results(path)] == [3] * 4 + [5] * 4
        before = path.read_bytes()
        assert run_all(path, range(8), limited, resume=True, seed=4) == []
    refused("the global LIMIT was 5, and is 3", seed=None)


def test_results_of_another_language_model_are_refused(tmp_path):
    from helpers.tiny import cold_lm, table_lm

    def steering(lm):
        class Story(Model):
            def step(self):
                self.s += str(self.sample(lm.context("a").next_token()))
                self.finish()

        return lambda task, rng: smc_steer(Story(), 2, 2, rng=rng)

    path = tmp_path / "r.jsonl"
    run_all(path, range(2), steering(cold_lm()))
    assert run_all(path, range(2), steering(cold_lm()), resume=True) == []
    with pytest.raises(ValueError, match="its language model is .*, and this is .*, of another vocabulary"):
        run_all(path, range(3), steering(table_lm(lambda ids: [0.0] * 3)), resume=True)


def test_a_run_without_identity_is_refused_before_anything_runs(tmp_path):
    numbers = (number for number in range(3))
    with pytest.raises(TypeError, match="the variable numbers of <lambda> holds <generator .*>, which no other"):
        run_all(tmp_path / "r.jsonl", range(2), lambda task, rng: coin(next(numbers), rng))
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_only_a_header_starts_anew(tmp_path):
    path = tmp_path / "r.jsonl"
    run_many(coin, range(3), to=path).close()
    assert len(lines(path)) == 0
    assert len(run_all(path, range(3), limited)) == 3 and len(load_results(path)) == 3


# ---- who writes it


def test_a_second_run_on_one_file_is_refused_with_its_owner(tmp_path):
    """Threads and a process on one path, of results and of checkpoints: one writes, the others get its name."""
    entered, leave = threading.Event(), threading.Event()

    def waits(step):
        entered.set()
        assert leave.wait(HANG)

    def steered(path, **options):
        return smc_steer(Steps(), 2, 2, seed=1, checkpoint=path, max_steps=4, **options)

    found = []
    path, done = tmp_path / "run.ckpt", tmp_path / "done.ckpt"
    steered(done)
    owner = threading.Thread(target=lambda: found.append(steered(path, on_step=waits)))
    owner.start()
    assert entered.wait(HANG)
    for _ in range(3):
        with pytest.raises(BlockingIOError, match=f"another run in process {os.getpid()} is writing it. Let that one"):
            steered(path)
    code = "import sys, test_files as t; t.smc_steer(t.Steps(), 2, 2, seed=1, checkpoint=sys.argv[1], max_steps=4)"
    other = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, timeout=HANG
    )
    assert f"BlockingIOError: [Errno 11] process {os.getpid()} is writing it" in other.stderr
    leave.set()
    owner.join()
    assert found[0].texts == steered(path).texts == steered(done).texts
    assert sorted(each.name for each in tmp_path.iterdir()) == ["done.ckpt", "run.ckpt"]


def test_threads_that_begin_one_checkpoint_at_once_have_one_owner(tmp_path):
    for trial in range(repetitions(15, 5)):
        ended, refused, ready = [], [], threading.Barrier(4)

        def begin(path=tmp_path / f"{trial}.ckpt", ended=ended, refused=refused, ready=ready):
            ready.wait()
            try:
                ended.append(smc_steer(Steps(), 2, 2, seed=1, checkpoint=path, max_steps=5, every=1).texts)
            except (BlockingIOError, FileExistsError) as error:
                refused.append(str(error))

        threads = [threading.Thread(target=begin) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG)
        assert len(ended) + len(refused) == 4 and ended and all(texts == ended[0] for texts in ended)
        assert [each for each in refused if not (f"process {os.getpid()} is" in each or "has made it" in each)] == []


def forked(function):
    """Return the text that a forked child writes to a pipe, and check that it ends."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, function().encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return told


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_of_a_run_refuses_to_write(tmp_path):
    path = tmp_path / "r.jsonl"
    results = run_many(coin, range(8), seed=3, to=path, together=2)
    given = [next(results)]

    def child():
        try:
            return repr(list(results))
        except RuntimeError as error:
            return str(error)

    told = forked(child)
    assert f"process {os.getpid()} writes {path}, and process" in told and "begin another run here" in told
    given += results
    assert shown(load_results(path)) == shown(given) and len(given) == 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_that_outlives_the_run_holds_no_file(tmp_path):
    path, (read, write) = tmp_path / "r.jsonl", os.pipe()
    results = run_many(coin, range(8), seed=3, to=path, together=2)
    next(results)
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)                                # until the parent closes the pipe
        os._exit(0)
    results.close()
    assert len(run_all(path, range(8), resume=True)) == 7
    os.close(write)
    os.close(read)
    os.waitpid(child, 0)


# ---- what others do to it


def changed(path, change, monkeypatch):
    """Run tasks, change the file after the third result, and return the error and the number of results."""
    monkeypatch.setattr(module, "_SECOND", 0.0)
    given = []
    with pytest.raises(OSError) as error:
        for result in run_many(coin, range(8), seed=3, to=path, together=1):
            given.append(result)
            if len(given) == 3:
                change()
    return str(error.value), given


@pytest.mark.parametrize("kind", ["deleted", "replaced", "cut"])
def test_a_deleted_replaced_or_emptied_file_ends_the_run_at_once(kind, tmp_path, monkeypatch):
    path, other = tmp_path / "r.jsonl", tmp_path / "other"
    run_all(other, range(8))
    change = {"deleted": path.unlink, "replaced": lambda: other.replace(path), "cut": lambda: path.write_bytes(b"")}
    told, given = changed(path, change[kind], monkeypatch)
    assert f"the file was {kind}" in told and "while this run wrote it, so that results may be lost" in told
    assert str(path) in told and len(given) == 3
    if kind == "replaced":
        assert len(load_results(path)) == 8             # as it was put there
    if kind == "cut":
        with pytest.raises(ValueError, match=r"r\.jsonl is empty: the results that were in it are lost"):
            run_all(path, range(8), resume=True)


def test_a_file_deleted_in_the_last_second_is_detected_at_the_end(tmp_path):
    path = tmp_path / "r.jsonl"
    results = run_many(coin, range(4), seed=3, to=path)
    next(results)
    path.unlink()
    with pytest.raises(OSError, match="the file was deleted while this run wrote it"):
        list(results)


def test_a_replaced_checkpoint_stays_and_a_deleted_one_is_rewritten(tmp_path):
    path, other = tmp_path / "run.ckpt", tmp_path / "other"
    whole = smc_steer(Steps(), 2, 2, seed=1, max_steps=6)
    other.write_text("mine")

    def run(change):
        def third(step):
            if step.index == 3:
                change()

        return smc_steer(Steps(), 2, 2, seed=1, max_steps=6, checkpoint=path, every=1, on_step=third)

    with pytest.raises(OSError, match=r"the file was replaced by another file while this run wrote it; it is left as"):
        run(lambda: other.replace(path))
    assert path.read_text() == "mine"
    path.unlink()
    assert run(path.unlink).texts == whole.texts
    assert smc_steer(Steps(), 2, 2, seed=1, max_steps=6, checkpoint=path).texts == whole.texts


def test_planted_links_are_not_followed_but_the_users_link_is(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "disk"
    victim.write_text("mine")
    folder.mkdir()
    path, target = tmp_path / "run.ckpt", folder / "there.ckpt"
    path.symlink_to(target)
    for name in (f"run.ckpt.{os.getpid()}.part", f"there.ckpt.{os.getpid()}.part", "run.ckpt.new"):
        (tmp_path / name).symlink_to(victim)
        (folder / name).symlink_to(victim)
    for steps in (2, 4):
        smc_steer(Steps(), 2, 2, seed=1, checkpoint=path, max_steps=steps, every=1)
        assert path.is_symlink() and target.is_file() and victim.read_text() == "mine"
        assert stat.S_IMODE(target.stat().st_mode) == (0o666 & ~umask() if steps == 2 else 0o600)
        target.chmod(0o600)


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_only_temporary_files_of_a_killed_run_are_removed(tmp_path):
    left = tmp_path / ".run.ckpt.0123abcd.part"
    others = [tmp_path / ".run.ckpt.part", tmp_path / ".r.ckpt.0123abcd.part"]
    for each in (left, *others):
        each.touch()
    smc_steer(Steps(), 2, 2, seed=1, checkpoint=tmp_path / "run.ckpt", max_steps=2)
    assert not left.exists() and all(each.exists() for each in others)


# ---- damage


def test_a_sealed_line_is_json_and_detects_every_bit_flip():
    record = {"index": 3, "text": 'é", "check": "0123456789abcdef"}', "half": "\ud800", "x": [0.1, None]}
    line = sealed(record)
    assert unsealed(line) == record and json.loads(line) == {**record, "check": json.loads(line)["check"]}
    for place in range(len(line)):
        for bit in range(8):
            other = bytearray(line)
            other[place] ^= 1 << bit
            assert unsealed(bytes(other)) == {}
        assert unsealed(line[:place]) == {}


@pytest.mark.parametrize(
    "value, shape, said",
    [
        (True, int, "it is True"), (float("nan"), float, "it is nan"), (1e400, float, "it is inf"),
        (10**400, float, "it is 1000"), ({"a": 1}, {"a": str}, "it.a is 1"), ({}, {"a": str}, "it has no 'a'"),
        ([1, "a"], [int], "it[1] is 'a'"), (5, range(5), "it is 5"),
        ("5", range(1 << 63), "it is '5'"), ({"x": "y"}, {...: int}, "it.x is 'y'"),
        ([], {}, "it is of another kind"), ("a", int | None, "it is 'a'"),
    ],
)  # fmt: skip
def test_a_mismatch_names_its_place(value, shape, said):
    assert mismatch(value, shape).startswith(said)


def test_a_value_of_the_right_shape_is_no_mismatch():
    for value, shape in [(1, float), (None, str | None), ({"x": 1, "y": 2}, {"x": int}), ({"x": 1}, {...: int})]:
        assert mismatch(value, shape) == ""


def damaged(path, change):
    """Write a file of four results with changed lines."""
    run_all(path, range(4))
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(change(whole)))


def edited(number, edit):
    """Return a change of one line. The next line is appended to it if `edit` removes its end."""
    return lambda whole: [edit(line) if i == number else line for i, line in enumerate(whole)]


DAMAGE = {
    "twice": (lambda whole: [*whole, whole[2]], "line 6, is a second result of task"),
    "cat of two": (lambda whole: [*whole, *whole], "line 6, is the header of another file"),
    "foreign": (
        lambda whole: [*whole, sealed({**unsealed(whole[1]), "index": 9, "run": "other"})],
        "line 6, is of another run, 'other'",
    ),
    "flipped": (edited(1, lambda line: line.replace(b"0.0", b"0.1")), "line 2, is no result of run_many, or is"),
    "NULs inside": (edited(1, lambda line: b"\0" * 9 + b"\n" + line), "line 2, is no result of run_many, or is"),
    "torn inside": (edited(2, lambda line: line[:40]), "line 3, is no result of run_many, or is"),
    "no header": (lambda whole: whole[1:], "line 1, is a result, where the header should be"),
    "header flipped": (edited(0, lambda line: line.replace(b"seed", b"sead")), "line 1, is no result of run_many,"),
    "of the future": (
        edited(0, lambda line: sealed({**unsealed(line), "llmppl_results": 3})), "line 1, is of the format 3"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_by_its_line_and_repaired_without_loss(kind, tmp_path):
    path = tmp_path / "r.jsonl"
    change, message = DAMAGE[kind]
    damaged(path, change)
    before = path.read_bytes()
    for attempt in (lambda: load_results(path), lambda: run_all(path, range(4), resume=True)):
        with pytest.raises(ValueError, match=f"{message}.*; the file is left as it is, and llmppl results --repair"):
            attempt()
    result = CliRunner().invoke(app, ["results", str(path), "--repair"])
    assert result.exit_code == 0, result.stderr
    assert message.replace(", is", " is") in result.stderr.replace(f"{path}, ", "")
    assert (tmp_path / "r.jsonl.damaged").read_bytes() == before
    kept = load_results(path)
    assert len(kept) == 4 - {"flipped": 1, "torn inside": 2}.get(kind, 0) and repair(path) == []
    known = kind not in ("no header", "header flipped", "of the future")
    run_all(path, range(4), resume=True if known else "force", seed=3)
    run_all(tmp_path / "whole", range(4))
    assert shown(load_results(path)) == shown(load_results(tmp_path / "whole"))


@pytest.mark.parametrize("tail", [b"\0" * 4096, b"\0\0\n", b"\n", b'{"index": 9, "dig\0\0\0', b'{"llmppl_res'])
def test_a_torn_last_line_is_cut_with_a_warning(tail, tmp_path):
    path = tmp_path / "r.jsonl"
    damaged(path, lambda whole: [*whole, tail])
    with pytest.warns(UserWarning, match="line 6, is torn and left out"):
        assert len(load_results(path)) == 4
    with pytest.warns(UserWarning, match="line 6, is torn and left out"):
        assert len(run_all(path, range(5), resume=True)) == 1
    assert len(load_results(path)) == 5


def test_a_file_that_cannot_be_repaired_is_left_unchanged(tmp_path):
    (tmp_path / "notes").write_text("hello\n")
    with pytest.raises(ValueError, match="notes has no line of results: line 1 is no result"):
        repair(tmp_path / "notes")
    with pytest.raises(ValueError, match=r"path must name a file of JSON lines such as 'r\.jsonl'"):
        repair(tmp_path / "r.parquet")
    damaged(tmp_path / "r.jsonl", lambda whole: [*whole, whole[1]])
    (tmp_path / "r.jsonl.damaged").write_text("of before")
    with pytest.raises(FileExistsError):
        repair(tmp_path / "r.jsonl")
    assert (tmp_path / "r.jsonl.damaged").read_text() == "of before" and (tmp_path / "notes").read_text() == "hello\n"


def test_a_record_costs_about_as_much_as_its_json(tmp_path):
    """Counted, not timed: one write, and no synchronisation, for each record within a second."""
    calls, write = [], os.write
    with ResultFile(tmp_path / "r.jsonl", seed=1) as file:
        (result,) = run_many(coin, ["a"], seed=1)
        module.os.write = lambda *given: (calls.append(given), write(*given))[1]
        try:
            for index in range(20):
                file.write(dataclasses.replace(result, index=index))
        finally:
            module.os.write = write
    assert len(calls) == 20


def test_an_ended_owner_lets_the_next_one_begin(tmp_path):
    path = tmp_path / "file"
    with Owned(path, lambda: b"begin\n"), pytest.raises(BlockingIOError):
        Owned(path)
    with Owned(path) as owned, owned.replacing() as file:
        file.write(b"whole\n")
    assert path.read_bytes() == b"whole\n"
    for _ in range(3):
        Owned(path)                                     # one that is dropped owns nothing either
    assert not [*tmp_path.glob(".*")]
