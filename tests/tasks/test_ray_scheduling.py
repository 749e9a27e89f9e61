"""Tests of scheduling: tasks are sent again when workers die, and each is answered exactly once.

The workers are those of benchmarks/scaling.py: simulated, in virtual time.
"""

import importlib
import itertools
import math
import sqlite3
import sys
import warnings
from types import SimpleNamespace

import pytest
from helpers.common import ROOT, repetitions

from llmppl import Result
from llmppl.tasks.ray import Actors, Worker, schedule

sys.path.append(str(ROOT / "benchmarks"))
scaling = importlib.import_module("scaling")
COST = scaling.Cost(a=0.002, c=0.003, start=10.0)


def answered(chunk):
    return [Result(i, task) for i, task in chunk]


class Scripted:
    """Workers that answer a chunk by results, or die of it (None), and keep the chunks that they get."""

    def __init__(self, size, answer=answered):
        self.size, self.answer, self.chunks = size, answer, []
        self.events = [(worker, []) for worker in range(size)]

    def send(self, worker, chunk):
        self.chunks.append([index for index, _ in chunk])
        found = self.answer(chunk)
        self.events += [(worker, found), *[(worker, [])] * (found is None)]

    def wait(self):
        return self.events.pop(0)


def numbered(n):
    return ((i, f"task {i}") for i in range(n))


def test_chunks_are_equal_among_workers_and_shrink_towards_the_end():
    cluster = Scripted(2)
    assert sorted(r.index for r in schedule(cluster, numbered(100), together=16)) == list(range(100))
    assert [len(chunk) for chunk in cluster.chunks] == [16, 16, 16, 16, 16, 10, 5, 3, 1, 1]
    assert list(itertools.chain(*cluster.chunks)) == list(range(100))


def test_few_tasks_are_shared_out_among_all():
    cluster = Scripted(8)
    assert len(list(schedule(cluster, numbered(17), together=16))) == 17
    assert [len(chunk) for chunk in cluster.chunks] == [3, 2, 2, 2, *[1] * 8]


def test_without_tasks_no_worker_is_waited_for():
    assert list(schedule(Scripted(2), [], together=4)) == []


def test_a_task_that_kills_workers_is_an_error_and_costs_no_other():
    cluster = Scripted(3, lambda chunk: None if 13 in dict(chunk) else answered(chunk))
    results = {result.index: result for result in schedule(cluster, numbered(50), together=8)}
    assert sorted(results) == list(range(50))
    assert [i for i, result in results.items() if result.error] == [13]
    assert results[13].error == "5 workers died of this task (out of memory, or no answer?), the last 3 of it alone"
    assert [len(chunk) for chunk in cluster.chunks if 13 in chunk] == [8, 8, 1, 1, 1]


def test_a_task_whose_workers_died_of_something_else_has_its_result():
    deaths = iter([True, True, False, False, False])
    cluster = Scripted(1, lambda chunk: None if next(deaths) else answered(chunk))
    results = list(schedule(cluster, numbered(2), together=4))
    assert [(result.index, result.error) for result in results] == [(0, None), (1, None)]
    assert cluster.chunks == [[0, 1], [0, 1], [0], [1]]


def test_tasks_are_taken_and_sent_only_when_results_are_wanted():
    taken, together, size = itertools.count(), 4, 3

    def endless():
        for i in itertools.count():
            next(taken)
            yield i, i

    cluster = scaling.Simulated(size, together, COST)
    results = schedule(cluster, endless(), together)
    assert next(taken) == 0 and cluster.sent == 0
    for answered in range(1, 200):
        next(results)
        sent = cluster.sent
        assert sent - answered < 2 * together * size    # a chunk ended, and all others are out
        assert taken.__reduce__()[1][0] - 1 - answered < 4 * together * size
    results.close()
    assert cluster.sent == sent


@pytest.mark.parametrize("seed", range(repetitions(full=20, quick=1)))
def test_64_workers_that_die_and_a_driver_that_is_stopped_lose_nothing(tmp_path, seed):
    n, path = repetitions(full=2000, quick=1000), tmp_path / "results.db"
    stops = sorted(scaling.np.random.default_rng(seed).integers(1, n, size=3).tolist())
    clusters = scaling.simulate(path, n, stops, size=64, together=4, cost=COST, life=5.0)
    assert sum(cluster.deaths for cluster in clusters) > 10
    assert sum(cluster.sent for cluster in clusters) > n
    assert scaling.nothing_is_lost(path, n)
    with sqlite3.connect(path) as db:
        db.execute("delete from result where task_index = 7")
    with pytest.raises(ValueError, match="its contents are not those of its digest"):
        scaling.nothing_is_lost(path, n)


@pytest.mark.parametrize("life", [math.inf, 200.0])
def test_the_model_of_the_cost_predicts_a_simulated_run_within_a_fifth(life):
    cluster = scaling.Simulated(64, 16, COST, life=life)
    assert len(list(schedule(cluster, numbered(20_000), 16))) == 20_000
    assert abs(COST.seconds(20_000, 16, 64, life=life) / cluster.clock - 1) < 0.2


# ---- workers, without Ray


@pytest.mark.parametrize("resources, share", [(None, None), ({"num_gpus": 0.5}, "0.5"), ({"num_gpus": 2}, "2")])
def test_a_worker_knows_its_share_of_a_device(resources, share):
    options = []
    actor = SimpleNamespace(options=lambda **given: options.append(given) or SimpleNamespace(remote=lambda: None))
    pickled = SimpleNamespace(dumps=lambda it: it)
    ray = SimpleNamespace(remote=lambda _: actor, cloudpickle=pickled, put=lambda it: it)
    Actors(ray, 0, resources or {}, print, print, 0, 1, 1.0)
    variables = [each["runtime_env"]["env_vars"] for each in options]
    assert [(each.get("LLMPPL_DEVICE_SHARE"), each["OMP_NUM_THREADS"]) for each in variables] == [(share, "1")]


class Placed:
    """A language model on a device."""

    def __init__(self, device):
        self.engine = SimpleNamespace(device=device)


@pytest.mark.parametrize("device, share, warned", [("cpu", "1", True), ("cuda:0", "1", False), ("cpu", None, False)])
def test_a_worker_with_a_gpu_warns_of_a_model_on_the_cpu(device, share, warned, monkeypatch):
    pickled = SimpleNamespace(loads=lambda it: it, dumps=bytes)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(cloudpickle=pickled))
    monkeypatch.delenv("LLMPPL_DEVICE_SHARE", raising=False)
    if share is not None:
        monkeypatch.setenv("LLMPPL_DEVICE_SHARE", share)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Worker().start(lambda: Placed(device), print)
    assert ["a GPU, and its language model is on the CPU" in str(each.message) for each in caught] == [True] * warned
