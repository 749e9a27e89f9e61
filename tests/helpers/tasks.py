"""Tasks for `run_many`, and their results in a comparable form."""

import json
from pathlib import Path

from helpers.killable import Coin, coin
from llmppl import Model, PromptIntersection, beam_search, importance_sampling, run_many, smc_steer

TASKS = [["a", "b"], ["b", "c"], ["ab", "a"], ["c", "c"], ["a b", "c"], ["a", "a"]]


def steer(lm):
    return lambda prompts, rng: smc_steer(PromptIntersection(lm, prompts, max_tokens=3), 3, 2, rng=rng)


def told(particles):
    return particles.texts, particles.log_weights.tolist()


def by_index(results):
    return sorted(results, key=lambda result: result.index)


def outcomes(results):
    """Return the outcome of each result by its index; the order of results depends on the cache."""
    return {result.index: told(result.particles) for result in results}


def run_all(path, tasks, run=coin, **options):
    return list(run_many(run, tasks, **{"seed": 3, "to": path, **options}))


def lines(path):
    """Return the records of a file, sorted by index and without their seconds."""
    header, *records = [json.loads(line) for line in Path(path).read_bytes().splitlines()]
    assert all(record.pop("seconds") >= 0 and record.pop("check") for record in records)
    assert {record.pop("run") for record in records} <= {header["run"]}
    return sorted(records, key=lambda record: record["index"])


class Dies(Model):
    def step(self):
        self.s += "x"
        self.condition(False)


def everything(task, rng):
    if task % 5 == 0:
        raise KeyError("mine")
    if task % 5 == 1:
        return beam_search(Coin(), 2, 2)
    if task % 5 == 2:
        return importance_sampling(Dies(), 2, rng=rng)
    return smc_steer(Coin(), 2, 2, rng=rng)
