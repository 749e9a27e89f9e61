"""Tests of `llmppl.tasks.ray.run_many`: it returns the same as `llmppl.run_many`, whichever process is killed."""

import functools
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.common import HANG, repetitions, slow, wants_ray
from helpers.tasks import by_index, records

import llmppl.tasks.ray
from llmppl import CachedTransformer, Model, Vocabulary, beam_search, load_results, run_many, search, smc_steer

TASKS = ["".join(letters) for letters in itertools.product("abc ", repeat=3)]
TOGETHER = 4
steps_left = [0]                                        # of this process, if it is to be killed in the last of them


class Text(Model):
    """Program of six tokens after a prompt, no two of them equal in a row."""

    def __init__(self, lm, prompt):
        super().__init__()
        self.context, self.last, self.left = lm.context(prompt), None, 6

    def step(self):
        steps_left[0] -= 1
        if not steps_left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        token = self.sample(self.transformer(self.context))
        self.condition(token != self.last)
        self.context, self.last, self.left = self.context + token, token, self.left - 1
        self.s += str(token)
        if not self.left:
            self.finish()


def steer(lm, prompt, rng):
    return smc_steer(Text(lm, prompt), 5, 3, rng=rng, progress=False)


def make_lm(folder=None, killed_after=0):
    """Return the tiny model. The process writes its number to a folder, and the first is killed after some steps."""
    if folder is not None:
        if killed_after and not list(Path(folder).iterdir()):
            steps_left[0] = killed_after
        (Path(folder) / str(os.getpid())).touch()
    return tiny_lm()


def tiny_lm():
    """Return a model that computes in float64, so that a worker starts in a second and batches round equally."""
    vocab = Vocabulary([b"a", b"b", b"c", b" ", b"ab", b""], eos_ids=[5])
    return CachedTransformer(lambda ids: np.random.default_rng([len(ids), *ids]).normal(size=6), vocab)


def drive(folder, path):
    """Run the driver that will be killed, in its own process."""
    start_ray()
    make = functools.partial(make_lm, folder)
    results = llmppl.tasks.ray.run_many(
        steer, TASKS, make_lm=make, workers=2, together=TOGETHER, seed=7, to=path, resume=True, progress=False
    )
    return sum(1 for _ in results)


def start_ray():
    import ray

    environment = {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}    # where the workers find this file
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.shutdown()                                      # of what ran earlier in this process, such as an example
    ray.init(num_cpus=2, object_store_memory=80 * 2**20, runtime_env=environment, **quiet)


@pytest.fixture(scope="module")
def cluster():
    """Start Ray on this machine, for two workers."""
    wants_ray()
    start_ray()
    yield sys.modules["ray"]
    sys.modules["ray"].shutdown()


def data(particles):
    return particles.texts, particles.log_weights.tolist(), particles.log_ml_se, particles.deaths


@functools.cache
def truth():
    """Return the results of one process, in the order of the tasks."""
    results = run_many(functools.partial(steer, tiny_lm()), TASKS, together=TOGETHER, seed=7, progress=False)
    return [data(result.particles) for result in by_index(results)]


def assert_nothing_is_lost(path):
    """Check that each task has one result, bit for bit that of one process."""
    results = load_results(path)
    assert [result.index for result in results] == list(range(len(TASKS)))
    assert [data(result.particles) for result in results] == truth()


def test_without_ray_an_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"llmppl\.tasks\.ray needs Ray: pip install 'llmppl-smc\[ray\]'$"):
        llmppl.tasks.ray.run_many(steer, ["a"], make_lm=make_lm)


def test_a_long_start_says_what_it_waits_for(monkeypatch):
    lines, said = [], threading.Event()
    monkeypatch.setattr(llmppl.tasks.ray, "SILENCE", 0.0)
    monkeypatch.setattr("builtins.print", lambda text, **options: (lines.append(text), said.set()))
    with llmppl.tasks.ray._named("Ray starts"):
        assert said.wait(HANG)
    assert lines == ["llmppl: Ray starts..."]


def test_a_short_start_says_nothing(capsys):
    with llmppl.tasks.ray._named("Ray starts"):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"run": 3}, "run must be a function"),
        ({"run": lambda task, rng: None}, "run must take 3 arguments"),
        ({"make_lm": "smollm2"}, "make_lm must be a function"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"together": 0}, "together must be at least 1"),
        ({"tasks": "abc"}, "tasks must be a list"),
        ({"resume": True}, "resume=True goes on with a file"),
        ({"sed": 1}, "run_many takes no sed: did you mean seed"),
    ],
)
def test_wrong_arguments_are_named_before_ray_is_started(wrong, message):
    wants_ray()
    arguments = {"run": steer, "tasks": ["a"], "make_lm": make_lm, **wrong}
    with pytest.raises((TypeError, ValueError), match=message):
        llmppl.tasks.ray.run_many(arguments.pop("run"), arguments.pop("tasks"), **arguments)


def shown(result):
    particles = result.particles and (data(result.particles), repr(result.particles))
    return result.index, result.task, result.error is None, particles


def test_two_workers_agree_with_one_process(cluster, tmp_path):
    path, tasks = tmp_path / "results.db", ["ab", "", "d", "no such text", "bca", "a"]
    options = {"together": 2, "seed": 3}
    results = list(llmppl.tasks.ray.run_many(steer, iter(tasks), make_lm=make_lm, workers=2, to=path, **options))
    other = tmp_path / "other.db"
    alone = list(run_many(functools.partial(steer, tiny_lm()), tasks, together=2, seed=3, to=other, progress=False))
    results, alone = by_index(results), by_index(alone)
    assert [shown(each) for each in results] == [shown(each) for each in alone]
    assert {each.left for result in results for each in result.particles or ()} == {0}
    varies = {"error": None}
    assert [{**each, **varies} for each in records(path)] == [{**each, **varies} for each in records(other)]


class Steer:
    """`steer` as an object that writes a file to a folder each time that it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __setstate__(self, state):
        vars(self).update(state)
        (self.folder / str(len(list(self.folder.iterdir())))).touch()

    def __call__(self, lm, prompt, rng):
        return steer(lm, prompt, rng)


@pytest.mark.slow
def test_run_is_unpickled_once_in_each_worker(cluster, tmp_path):
    results = llmppl.tasks.ray.run_many(Steer(tmp_path), TASKS[:12], make_lm=make_lm, workers=1, together=1)
    assert sum(result.error is None for result in results) == 12
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_matches_and_beams_are_returned(cluster):
    runs = [
        lambda lm, text, rng: list(itertools.islice(search(lm, "c(a|b){2}", prefix=text), 2)),
        lambda lm, text, rng: list(beam_search(Text(lm, text), 2, 2, progress=False)),
    ]
    for run in runs:
        (result,) = llmppl.tasks.ray.run_many(run, ["c"], make_lm=make_lm, workers=1)
        (alone,) = run_many(functools.partial(run, tiny_lm()), ["c"], progress=False)
        assert result.error is None and [each.as_dict() for each in result.matches] == [
            each.as_dict() for each in alone.matches
        ]


@pytest.mark.parametrize("in_step", [False, True])
def test_a_task_that_exits_is_an_error_at_once(cluster, tmp_path, in_step):
    class Ends(Text):
        def step(self):
            raise SystemExit("that is all")

    def run(lm, task, rng):
        if task == "cab" and not in_step:
            raise SystemExit("that is all")
        return smc_steer((Ends if task == "cab" else Text)(lm, task), 5, 3, rng=rng, progress=False)

    tasks, make = ["a", "cab", "b", "", "c"], functools.partial(make_lm, tmp_path)
    results = by_index(llmppl.tasks.ray.run_many(run, tasks, make_lm=make, workers=1, together=3))
    assert [result.error is None for result in results] == [True, False, True, True, True]
    assert "SystemExit: that is all" in results[1].error
    assert len(list(tmp_path.iterdir())) == 1           # process


def sleep(lm, prompt, rng):
    """Hang for the task "ab"; end by the limits of the call for the others."""
    if prompt == "ab":
        time.sleep(HANG)
    return steer(lm, prompt, rng)


@slow
def test_a_task_that_hangs_is_an_error_and_costs_no_other(cluster, monkeypatch):
    for name in ("GRACE", "MAX_SHARED", "MAX_ALONE"):
        monkeypatch.setattr(llmppl.tasks.ray, name, 1)
    run = functools.partial(llmppl.tasks.ray.run_many, sleep, ["a", "ab", "b"], make_lm=tiny_lm, progress=False)
    first, hung, last = by_index(run(timeout=5, budget=1))
    assert hung.error == "2 workers died of this task (out of memory, or no answer?), the last 1 of it alone"
    assert [(len(each.particles.steps), each.particles.limit) for each in (first, last)] == [(1, "budget")] * 2


def test_a_checkpoint_that_cannot_be_written_ends_the_run(cluster, tmp_path):
    def run(lm, task, rng):
        return smc_steer(Text(lm, task), 5, 3, rng=rng, progress=False, checkpoint=tmp_path / "none" / "run.ckpt")

    path = tmp_path / "results.db"
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        list(llmppl.tasks.ray.run_many(run, ["a"], make_lm=make_lm, workers=1, to=path))
    assert len(load_results(path)) == 0


@pytest.mark.slow
def test_an_error_while_making_the_language_model_ends_the_run(cluster):
    def missing():
        raise FileNotFoundError("no such weights")

    with pytest.raises(FileNotFoundError, match="^no such weights$"):
        next(llmppl.tasks.ray.run_many(steer, ["a"], make_lm=missing, workers=2))


@pytest.mark.slow
def test_workers_that_die_of_the_language_model_end_the_run(cluster):
    def deadly():
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError, match="no worker is left: 3 times in a row each of them died in make_lm"):
        next(llmppl.tasks.ray.run_many(steer, ["a"], make_lm=deadly, workers=1))


@pytest.mark.slow
def test_a_worker_runs_one_thread_unless_it_has_more_cpus(cluster, monkeypatch):
    def run(lm, task, rng):
        import torch

        raise RuntimeError(f"{torch.get_num_threads()} threads")

    for resources, expected in [(None, "1 threads"), ({"num_cpus": 2}, "2 threads")]:
        (result,) = llmppl.tasks.ray.run_many(run, ["a"], make_lm=make_lm, workers=1, resources=resources)
        assert result.error.rstrip().endswith(expected)


def alive(process):
    """Check whether the process runs."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, what):
    for _ in range(1000 * HANG):
        if condition():
            return
        time.sleep(0.001)
    raise AssertionError(f"there was no {what}")


@pytest.mark.slow
def test_the_default_number_of_workers_fills_the_cluster(cluster, tmp_path):
    def make():                                         # waits for the other, which might come when all is done
        lm = make_lm(tmp_path)
        wait_until(lambda: len(list(tmp_path.iterdir())) >= 2, "second worker")
        return lm

    assert len(list(llmppl.tasks.ray.run_many(steer, TASKS[:8], make_lm=make, together=1))) == 8
    assert len(list(tmp_path.iterdir())) == 2


def test_an_aborted_run_leaves_no_worker(cluster, tmp_path):
    make = functools.partial(make_lm, tmp_path)
    results = llmppl.tasks.ray.run_many(steer, TASKS, make_lm=make, workers=2, together=1)
    next(results)
    results.close()
    wait_until(lambda: not any(alive(path.name) for path in tmp_path.iterdir()), "end of the workers")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(repetitions(full=8, quick=1)))
def test_a_worker_that_is_killed_costs_nothing(cluster, tmp_path, seed):
    path, pids = tmp_path / "results.db", tmp_path / "pids"
    pids.mkdir()
    make = functools.partial(make_lm, pids, killed_after=random.Random(seed).randrange(1, 2500))
    results = llmppl.tasks.ray.run_many(steer, TASKS, make_lm=make, workers=2, together=TOGETHER, seed=7, to=path)
    assert len(list(results)) == len(TASKS)             # of 6848 steps, by two workers
    assert not all(alive(pid.name) for pid in pids.iterdir())
    assert_nothing_is_lost(path)


def num_written(path):
    """The number of results in a file; 0 before its run has written it."""
    try:
        return len(load_results(path))
    except (FileNotFoundError, ValueError):
        return 0


@pytest.mark.parametrize("seed", slow(*range(6)))
def test_a_killed_driver_resumes(tmp_path, seed):
    wants_ray()
    path, pids, moment = tmp_path / "results.db", tmp_path / "pids", random.Random(seed).randrange(1, len(TASKS))
    pids.mkdir()
    code = f"import test_ray; print('ran:', test_ray.drive({str(pids)!r}, {str(path)!r}))"
    command = functools.partial(subprocess.Popen, [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with command() as driver:
        wait_until(lambda: num_written(path) > moment, "result")
        driver.kill()
    wait_until(lambda: not any(alive(pid.name) for pid in pids.iterdir()), "end of the workers")
    before = len(load_results(path))
    assert before >= moment
    with command() as driver:
        assert f"ran: {len(TASKS) - before}\n" in driver.communicate()[0]       # where Ray writes, too
    assert_nothing_is_lost(path)
