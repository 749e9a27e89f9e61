"""Scaling of a run of many tasks: measured, predicted by a cost model, and on a simulated cluster.

In the cost model (docs/scaling.md), a round costs `a` seconds and `c` more for every task in it. So n tasks of R
rounds, b per batch, on w workers that take s seconds to start, last  s + n R (c + a / b) / w.

Measured: `a` and `c` are fitted to two runs, with one task at a time and with 16 together; all other times are
predicted. Times are from the start of the first task to the end of the last. CPU seconds are those of all workers.
Simulated: workers in virtual time have the costs of the model, die at random moments and start again. The code that
hands out tasks, sends the tasks of dead workers again, and writes and resumes the file is that of a real cluster.
The process that runs this code is also stopped a few times.

    python benchmarks/scaling.py                    # the embedded model: two minutes; without Ray, one process alone
    python benchmarks/scaling.py --simulate         # 64 workers: a minute
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")       # before the import of numpy and torch

import numpy as np
from tables import machine, table

import llmppl.tasks.ray
from llmppl import CachedTransformer, Model, Particles, Result, load_results, run_many, smc_steer
from llmppl.inference import SavedParticle
from llmppl.tasks import recorded
from llmppl.tasks.ray import schedule

NAMES = ["Lily", "Tom", "Ben", "Sue", "Max", "Anna", "Sam", "Mia", "Tim", "Joe"]
THINGS = ["a red ball", "a big dog", "the old tree", "a small cat", "her mom", "the park", "a new toy", "the sun",
          "a blue car", "his friend"]  # fmt: skip
PROMPTS = [f"Once upon a time, {name} saw {thing}." for name in NAMES for thing in THINGS]
ROUNDS = 20


@dataclass(frozen=True)
class Cost:
    """Cost model in seconds: per round, per task in a round, and per start of a worker."""

    a: float
    c: float
    start: float = 0.0

    def cpu(self, tasks: int, together: int, workers: int = 1, rounds: float = ROUNDS) -> float:
        """Return the CPU seconds of all workers."""
        return tasks * rounds * (self.c + self.a / min(together, tasks / workers))

    def seconds(self, tasks: int, together: int, workers: int, rounds: float = ROUNDS, life: float = math.inf) -> float:
        """Return the seconds from the start to the end; `life` is a worker's mean lifetime in seconds."""
        at_work = self.cpu(tasks, together, workers, rounds) / workers
        lost = self.start + rounds * (self.a + self.c * together) / 2       # at each death, half of the work under way
        return self.start + at_work * (1 + lost / life)


class Story(Model):
    """Story of twenty short tokens that records its start, end and process."""

    def __init__(self, lm: CachedTransformer, prompt: str) -> None:
        super().__init__()
        self.process, self.begin, self.cpu_begin = os.getpid(), time.time(), time.process_time()
        self.context, self.left = lm.context(prompt), ROUNDS

    def step(self) -> None:
        token = self.sample(self.transformer(self.context))
        self.condition(len(str(token)) < 6)
        self.context += token
        self.left -= 1
        if not self.left:
            self.end, self.cpu_end = time.time(), time.process_time()
            self.finish()


def run(lm: CachedTransformer, prompt: str, rng: np.random.Generator) -> Particles[Story]:
    """Run the task with N=8, K=3."""
    return smc_steer(Story(lm, prompt), 8, 3, rng=rng, progress=False)


def timed(results: Iterable[Result]) -> tuple[float, float]:
    """Return the CPU seconds of all processes, and the seconds from the first start to the last end."""
    each = [result.particles[0] for result in results]
    cpu = 0.0
    for process in {particle.process for particle in each}:
        own = [particle for particle in each if particle.process == process]
        cpu += max(particle.cpu_end for particle in own) - min(particle.cpu_begin for particle in own)
    return cpu, max(particle.end for particle in each) - min(particle.begin for particle in each)


def measure(sizes: list[tuple[int, int, int]], most: int) -> None:
    """Print measured and predicted costs of runs of (tasks, together, workers); 0 workers means this process."""

    def measured(tasks: int, together: int, workers: int) -> tuple[float, float]:
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(tasks)]
        if workers:
            make_lm = CachedTransformer.from_pretrained
            options = {"make_lm": make_lm, "workers": workers, "together": together, "seed": 0}
            return timed(llmppl.tasks.ray.run_many(run, prompts, **options))
        lm = CachedTransformer.from_pretrained(engine="transformers")
        run(lm, "Hello.", np.random.default_rng(0))      # excludes one-time work
        return timed(run_many(partial(run, lm), prompts, together=together, seed=0))

    alone, together = (measured(most, T, 0)[0] / (most * ROUNDS) for T in (1, 16))      # c + a, c + a / 16
    a = (alone - together) / (1 - 1 / 16)
    cost, rows = Cost(a, alone - a), []
    for tasks, T, workers in sizes:
        cpu, seconds = measured(tasks, T, workers)
        predicted = cost.cpu(tasks, T, max(workers, 1))
        rows.append([tasks, T, workers or "-", f"{tasks / cpu * max(workers, 1):.1f}", f"{cpu:.2f}", f"{predicted:.2f}",
                     f"{predicted / cpu - 1:+.0%}", f"{seconds:.2f}"])  # fmt: skip
        print(".", end="", flush=True)
    table(
        f"Throughput, a = {1e3 * cost.a:.2f} ms per round, c = {1e3 * cost.c:.2f} ms per task and round",
        ["tasks", "together", "workers", "tasks/s", "CPU s", "model", "off by", "s"],
        rows,
        note="tasks/s uses CPU seconds, as if each worker had its own core",
    )


@dataclass
class Simulated:
    """Workers for `schedule`, in virtual time.

    life : mean seconds until a worker dies
    """

    size: int
    together: int
    cost: Cost
    life: float = math.inf
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __post_init__(self) -> None:
        self.clock, self.deaths, self.sent = 0.0, 0, 0
        self._events: list[tuple[float, int, int, int, Any]] = []           # seconds, order, worker, its life, event
        self._order, self._lives = itertools.count(), [0] * self.size
        for worker in range(self.size):
            self._start(worker)

    @staticmethod
    def rounds(index: int) -> int:
        """Return the rounds of a task: from 5 to 35, 20 on average."""
        return 5 + index * 7919 % 31

    @staticmethod
    def result(index: int, task: Any) -> Result:
        """Return the result of a task, a function of its index."""
        return Result(index, task, Particles([SavedParticle(f"{task}, {index}", -index / 7)]))

    def _start(self, worker: int) -> None:
        self._at(self.cost.start, worker, [])
        self._at(self.cost.start + self.rng.exponential() * self.life, worker, None)

    def _at(self, seconds: float, worker: int, event: Any) -> None:
        if seconds < math.inf:
            heapq.heappush(self._events, (self.clock + seconds, next(self._order), worker, self._lives[worker], event))

    def send(self, worker: int, chunk: list[tuple[int, Any]]) -> None:
        self.sent += len(chunk)
        rest, now, done = iter(chunk), 0.0, 0
        under_way = [(self.rounds(index), index, task) for index, task in itertools.islice(rest, self.together)]
        heapq.heapify(under_way)                        # ordered by their last round
        while under_way:
            end, index, task = heapq.heappop(under_way)
            now += (end - done) * (self.cost.a + self.cost.c * (len(under_way) + 1))
            done = end
            for index, task in itertools.islice(rest, 1):
                heapq.heappush(under_way, (done + self.rounds(index), index, task))
        self._at(now, worker, [self.result(index, task) for index, task in chunk])

    def wait(self) -> tuple[int, Any]:
        while True:
            self.clock, _, worker, life, event = heapq.heappop(self._events)
            if life == self._lives[worker]:
                break
        if event is None:
            self.deaths += 1
            self._lives[worker] += 1
            self._start(worker)
        return worker, event


def simulate(path: Path, num_tasks: int, stops: list[int], **cluster: Any) -> list[Simulated]:
    """Run tasks with a result file, stopping and resuming at the counts in `stops`; return the clusters used."""
    clusters = list[Simulated]()

    def run_all(numbered: Iterable[tuple[int, Any]], seed: int) -> Iterator[Result]:
        clusters.append(Simulated(rng=np.random.default_rng(len(clusters)), **cluster))
        return schedule(clusters[-1], numbered, clusters[-1].together)

    before = 0
    for stop in [*stops, num_tasks]:
        results = recorded(run_all, (f"task {i}" for i in range(num_tasks)), to=path, resume=True, seed=0)
        for _ in itertools.islice(results, stop - before):
            pass
        results.close()
        before = stop
    return clusters


def nothing_is_lost(path: Path, num_tasks: int) -> bool:
    """Check that the file has each result exactly once, and that it is right."""
    results = load_results(path)
    right = (Simulated.result(i, f"task {i}") for i in range(num_tasks))
    return [result.index for result in results] == list(range(num_tasks)) and all(
        result.as_dict()["particles"] == other.as_dict()["particles"]
        for result, other in zip(results, right, strict=True)
    )


def simulations(num_tasks: int) -> None:
    cost, rows = Cost(0.002, 0.0033, start=30.0), []
    for life in (math.inf, 3600, 600, 120):
        with tempfile.TemporaryDirectory() as folder:
            path, stops = Path(folder) / "results.db", [num_tasks // 3, num_tasks // 2]
            clusters = simulate(path, num_tasks, stops, size=64, together=16, cost=cost, life=life)
            seconds = sum(each.clock for each in clusters)
            parts = np.diff([0, *stops, num_tasks]).tolist()
            predicted = sum(cost.seconds(part, 16, 64, life=life) for part in parts)
            again = sum(each.sent for each in clusters) - num_tasks
            rows.append([f"{life:g}", sum(each.deaths for each in clusters), len(stops), again,
                         "nothing" if nothing_is_lost(path, num_tasks) else "something", f"{seconds:.0f}",
                         f"{predicted:.0f}", f"{predicted / seconds - 1:+.0%}"])  # fmt: skip
    columns = ["life, s", "workers died", "driver stopped", "tasks sent again", "lost", "s", "model", "off by"]
    table(f"{num_tasks} tasks on 64 simulated workers, 16 together", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--simulate", action="store_true", help="64 simulated workers that die")
    parser.add_argument("--tasks", type=int, help="number of tasks (default: 96, simulated 100,000)")
    args = parser.parse_args()
    print(machine("llmppl", "torch", "ray", note="1 thread per process"))
    if args.simulate:
        simulations(args.tasks or 100_000)
        return
    most = args.tasks or 96
    ways = [(most, T, 0) for T in (1, 2, 4, 8, 16, 32)] + [(n, 16, 0) for n in (most // 6, most // 2, 2 * most)]
    if find_spec("ray") is not None:
        ways += [(most, 16, 1), (most, 16, 2), (2 * most, 16, 2), (most, 4, 2)]
    measure(ways, most)


if __name__ == "__main__":
    main()
