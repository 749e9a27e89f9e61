"""Killed runs of many kinds of programs and tasks continue in a new process, and damaged files are refused.

`helpers/survivors.py` has the kinds. The processes hash texts differently.
"""

import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys

import pytest
from helpers import survivors
from helpers.common import repetitions
from helpers.fire import in_child
from helpers.killable import coin

from llmppl import load_results, run_many, smc_steer

STRIDE = repetitions(full=1, quick=3)                   # of the kinds that are killed


def printed(folder, how, hash_seed, *more):
    """Run all kinds in a new process, and return the lines that it prints."""
    command = [sys.executable, "-m", "helpers.survivors", str(folder), how, str(STRIDE), *map(str, more)]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return [f"{name} {call(folder)}" for name, call in survivors.every(STRIDE)]


@pytest.mark.parametrize("seed", range(repetitions(full=4, quick=1)))
def test_killed_runs_of_all_kinds_end_the_same_in_a_new_process(seed, whole, tmp_path):
    """Each kind is killed `1 + seed` times, at a random step or result."""
    for kill in range(1 + seed):
        assert printed(tmp_path, "kill", 2 + kill, 10 * seed + kill) == []
    assert printed(tmp_path, "resume", 9) == whole
    assert len(whole) * STRIDE > 30


# ---- damage


def flipped(data, rng):
    torn = bytearray(data)
    torn[rng.randrange(len(torn))] ^= 1 << rng.randrange(8)
    return torn


def outcomes_of_flips(path, read, number):
    """Return the outcomes of reading a file with one other bit each: "equal", or the type of the error."""
    data, rng, found = path.read_bytes(), random.Random(0), dict[str, int]()
    whole = read(path)
    for _ in range(number):
        path.write_bytes(flipped(data, rng))
        try:
            kind = "equal" if read(path) == whole else "other"
        except (OSError, ValueError) as error:
            kind = "refused" if path.name in str(error) else repr(error)
        found[kind] = found.get(kind, 0) + 1
    return found


def test_a_flipped_bit_of_a_checkpoint_is_refused(tmp_path):
    def stop(step):
        if step.index == 6:
            raise KeyboardInterrupt

    path = tmp_path / "run.ckpt"
    with pytest.raises(KeyboardInterrupt):
        smc_steer(survivors.Plain(), 4, 2, seed=1, checkpoint=path, every=1, on_step=stop)
    data = path.read_bytes()

    def read(path):
        return survivors.outcome(smc_steer(survivors.Plain(), 4, 2, seed=1, checkpoint=path))

    read(path)                                          # the end of the run
    path.write_bytes(data)
    number = repetitions(full=1000, quick=100)
    assert outcomes_of_flips(path, read, number) == {"refused": number}


def told(path):
    return [(each.index, each.task, each.error, survivors.outcome(each.particles)) for each in load_results(path)]


def resumed(path):
    """Continue a file with two tasks that it has not, and return what it has then."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{path}-wal")
    options = {"seed": 1, "to": path, "resume": True, "progress": False}
    assert len([*run_many(coin, range(14), **options)]) == 2
    return told(path)


@pytest.mark.parametrize("read", [told, resumed])
def test_a_flipped_bit_of_results_is_refused(read, tmp_path):
    path, number = tmp_path / "results.db", repetitions(full=1000, quick=60)
    [*run_many(coin, range(12), seed=1, to=path, progress=False)]
    found = outcomes_of_flips(path, read, number)
    assert set(found) == {"equal", "refused"} and found["refused"] > number / 5       # the rest is unused


@pytest.mark.parametrize("change", [
    "delete from result where task_index = 3",
    "update result set task_index = 99 where task_index = 3",
    "update result set record = (select record from result where task_index = 2) where task_index = 3",
    "update result set failed = 1 where task_index = 3",
    "update result set digest = 'x' where task_index = 3",
    "update run set identity = replace(identity, 'coin', 'other')",
    "delete from total",
    "delete from run",
    "drop view particle; create view particle as select 1",
])  # fmt: skip
def test_a_row_that_is_missing_or_changed_is_refused(change, tmp_path):
    path = tmp_path / "results.db"
    [*run_many(coin, range(6), seed=1, to=path, progress=False)]
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(change)
    with pytest.raises(ValueError, match="results.db is no file of results of run_many, or damaged"):
        load_results(path)
    with pytest.raises(ValueError, match="results.db is no file of results of run_many, or damaged"):
        run_many(coin, range(6), seed=1, to=path, resume=True)


KILLED = """
import os, sys
from helpers.killable import coin
from llmppl import run_many
for number, _ in enumerate(run_many(coin, range(12), seed=1, to=sys.argv[1], progress=False), 1):
    if number == 8:
        os._exit(9)
"""


def test_the_log_of_a_killed_run_may_be_damaged_or_missing(tmp_path):
    path, wal = tmp_path / "results.db", tmp_path / "results.db-wal"
    subprocess.run([sys.executable, "-c", KILLED, path])
    data, log, whole, rng = path.read_bytes(), wal.read_bytes(), told(path), random.Random(0)
    assert len(whole) == 8
    for torn in (b"", None, *(flipped(log, rng) for _ in range(repetitions(full=200, quick=20)))):
        path.write_bytes(data)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}-shm")
        if torn is None:
            wal.unlink(missing_ok=True)
        else:
            wal.write_bytes(torn)
        assert told(path) == whole


JOURNAL = """
import os, sqlite3, sys
db = sqlite3.connect(sys.argv[1])
db.execute("pragma journal_mode = delete")
db.execute("pragma cache_size = 1")
db.execute("begin immediate")
db.execute("update result set record = record || ' '")
db.execute("create table more as select * from result, run")
os._exit(9)
"""


def test_results_are_read_after_a_kill_left_a_hot_journal(tmp_path):
    path = tmp_path / "results.db"
    [*run_many(coin, range(60), seed=1, to=path, progress=False)]
    whole = told(path)
    subprocess.run([sys.executable, "-c", JOURNAL, path])
    assert path.with_name("results.db-journal").stat().st_size > 0
    assert told(path) == whole


# ---- files that others change while they are written


def delete(path):
    path.unlink()


def replace(path):
    shutil.copy(path, f"{path}.copy")
    with open(f"{path}.copy", "ab") as file:
        file.write(b" ")
    os.replace(f"{path}.copy", path)


def write_over(path):
    path.unlink()
    path.write_bytes(b"other")


def unlock(path):
    path.with_name(f"{path.name}.lock").unlink()


@pytest.mark.parametrize("change", [delete, replace, write_over, unlock])
def test_results_that_are_deleted_or_replaced_end_the_run(change, tmp_path):
    path = tmp_path / "results.db"
    results = run_many(coin, range(40), seed=1, to=path, progress=False)
    next(results)
    change(path)
    with pytest.raises(OSError, match="deleted or replaced while the run was writing it.*results.db"):
        next(results)
    one = run_many(coin, range(1), seed=1, to=tmp_path / "one.db", progress=False)
    next(one)
    (tmp_path / "one.db").unlink()
    with pytest.raises(OSError, match=r"deleted or replaced .*one\.db"):
        list(one)


@pytest.mark.parametrize("change", [delete, write_over, unlock])
def test_a_checkpoint_that_is_deleted_or_replaced_ends_the_run(change, tmp_path):
    path = tmp_path / "run.ckpt"

    def on_step(step):
        if step.index == 3:
            change(path)

    with pytest.raises(OSError, match=r"deleted or replaced while the run was writing it.*run\.ckpt"):
        smc_steer(survivors.Plain(), 4, 2, seed=1, checkpoint=path, every=1, on_step=on_step)


def message_of(call):
    try:
        return call()
    except OSError as error:
        return str(error)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="wants fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_writes_nothing_into_the_files_of_its_parent(tmp_path):
    path, others = tmp_path / "results.db", []
    results = run_many(coin, range(8), seed=1, to=path, progress=False)
    next(results)
    assert "forked from the run" in in_child(lambda: message_of(lambda: next(results).index))
    assert len([*results]) == 7 and len(load_results(path)) == 8

    def on_step(step):
        if step.index == 3:
            others.append(os.fork())

    path = tmp_path / "run.ckpt"
    try:
        found = message_of(
            lambda: survivors.outcome(
                smc_steer(survivors.Plain(), 4, 2, seed=1, checkpoint=path, every=1, on_step=on_step)
            )
        )
    finally:
        if others == [0]:
            os._exit(0 if "forked from the run" in found and "run.ckpt" in found else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(others[0], 0)[1]) == 0
    assert found == survivors.outcome(smc_steer(survivors.Plain(), 4, 2, seed=1))
