"""Tasks for `run_many`, and their results in a comparable form."""

from helpers.killable import Coin, coin
from llmppl import Model, PromptIntersection, beam_search, importance_sampling, load_results, run_many, smc_steer

COSTS = "seconds", "cpu_seconds", "tokens"
TASKS = [["a", "b"], ["b", "c"], ["ab", "a"], ["c", "c"], ["a b", "c"], ["a", "a"]]


def steer(lm):
    return lambda prompts, rng: smc_steer(PromptIntersection(lm, prompts, max_tokens=3), 3, 2, rng=rng)


def told(particles):
    return particles.texts, particles.log_weights.tolist(), [(each.cut, each.attribution) for each in particles]


def by_index(results):
    return sorted(results, key=lambda result: result.index)


def outcomes(results):
    """Return the outcome of each result by its index; the order of results depends on the cache."""
    return {result.index: told(result.particles) for result in results}


def run_all(path, tasks, run=coin, **options):
    return list(run_many(run, tasks, **{"seed": 3, "to": path, **options}))


def records(path):
    """Return the results of a file as data, without their costs."""
    found = [result.as_dict() for result in load_results(path)]
    return [{name: value for name, value in each.items() if name not in COSTS} for each in found]


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
