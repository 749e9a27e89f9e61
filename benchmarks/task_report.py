"""Tables of `tasks.py`: the accuracy and cost of each method, computed from the sets of drawn texts.

Accuracy is the mean over instances of the mean over seeds, with its standard error over instances. "over steering" is
the paired difference between a method and steering with N=10, with the same standard error. Log Z-hat is compared on
the runs in which all methods of one target have particles left.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tables import table

Line = dict[str, Any]
Chooser = Callable[[Line, int], float]                  # (set, n) -> accuracy of its first n texts


def one(line: Line, n: int) -> float:
    """Return the accuracy of a single text: the mean over all texts of the set."""
    return float(np.mean(line["right"])) if line["right"] else 0.0


def vote(line: Line, n: int) -> float:
    """Judge the most frequent answer; among equals, the first."""
    counts = Counter(answer for answer in line["answers"][:n] if answer is not None)
    return is_right(line, max(counts, key=counts.__getitem__)) if counts else 0.0


def best(line: Line, n: int) -> float:
    """Judge the likeliest text that is an answer."""
    known = [i for i, answer in enumerate(line["answers"][:n]) if answer is not None]
    return float(line["right"][max(known, key=line["log_probs"].__getitem__)]) if known else 0.0


def heaviest(line: Line, n: int) -> float:
    """Judge the answer with the largest weight, summed over the texts that give it."""
    weights: dict[str, float] = defaultdict(float)
    most = max(line["log_weights"][:n], default=0.0)
    for answer, log_weight in zip(line["answers"][:n], line["log_weights"][:n], strict=True):
        if answer is not None:
            weights[answer] += math.exp(log_weight - most)
    return is_right(line, max(weights, key=weights.__getitem__)) if weights else 0.0


def is_right(line: Line, answer: str) -> float:
    return float(line["right"][line["answers"].index(answer)])


def log_ml(line: Line, n: int) -> float:
    """Return log Z-hat of the first n texts that are answers; -inf if there is none."""
    known = [w for w, answer in zip(line["log_weights"][:n], line["answers"][:n], strict=True) if answer is not None]
    if line["set"].startswith("masked"):
        return float(np.logaddexp.reduce(known)) + math.log(len(line["answers"]) / n) if known else -math.inf
    return float(line["log_ml"])


@dataclass(frozen=True)
class Method:
    name: str
    set: str
    choose: Chooser
    n: int | None = None                                # texts of a set to use; None for all
    target: str = ""                                    # the target whose Z it estimates


METHODS = [
    Method("free sampling, one text", "free", one, 1),
    Method("free sampling, vote of 10", "free", vote),
    Method("free sampling, best of 10", "free", best),
    Method("greedy, free", "greedy, free", one),
    Method("greedy, masked", "greedy, masked", one),
    Method("local masking, one text", "masked", one, 1),
    Method("vote of 10", "masked", vote, 10),
    Method("vote of 20", "masked", vote),
    Method("best of 20", "masked", best),
    Method("importance, N=10", "masked", heaviest, 10, "1"),
    Method("importance, N=20", "masked", heaviest, None, "1"),
    Method("steering, N=5", "steering, N=5", heaviest, None, "1"),
    Method("steering, N=10", "steering, N=10", heaviest, None, "1"),
    Method("steering, N=10, likeliest text", "steering, N=10", best),
    Method("AWRS in smc_standard, N=10", "AWRS", heaviest, None, "1"),
    Method("temperature 0.5: local masking, one text", "masked, colder", one, 1),
    Method("temperature 0.5: vote of 20", "masked, colder", vote),
    Method("temperature 0.5: best of 20", "masked, colder", best),
    Method("temperature 0.5: importance, N=20", "masked, colder", heaviest, None, "0.5"),
    Method("temperature 0.5: steering, N=10", "steering, N=10, colder", heaviest, None, "0.5"),
]
BASE = "steering, N=10"
CONTROL = "genlm-control's AWRS, N=10"


class Results:
    """Lines of one task by set, instance and seed, restricted to pairs that every set has."""

    def __init__(self, lines: list[Line]) -> None:
        self.lines = {(line["set"], line["instance"], line["seed"]): line for line in lines}
        sampled = {method.set for method in METHODS if not method.set.startswith("greedy")}
        pairs = Counter((i, seed) for name, i, seed in self.lines if name in sampled)
        self.pairs = sorted(pair for pair, count in pairs.items() if count == len(sampled))
        self.instances = sorted({i for i, _ in self.pairs})
        self.seeds = len({seed for _, seed in self.pairs})

    def __call__(self, method: Method, of: Callable[[Line, int], float]) -> dict[tuple[int, int], float]:
        """Return the value of `of` for each instance and seed; greedy texts are the same for every seed."""
        found = {}
        for i, seed in self.pairs:
            line = self.lines.get((method.set, i, 0 if method.set.startswith("greedy") else seed))
            if line is not None:
                found[i, seed] = of(line, method.n or len(line["answers"]))
        return found

    def by_instance(self, values: dict[tuple[int, int], float]) -> np.ndarray:
        """Return the means over seeds, (instances,)."""
        return np.array([np.mean([v for (i, _), v in values.items() if i == each]) for each in self.instances])


def cost(line: Line, n: int) -> float:
    """Return the share of a set's cost that its first n texts cause."""
    return line["distinct"][n - 1] / line["distinct"][-1] if n else 1.0


def estimate(values: np.ndarray, form: str = ".1f", factor: float = 100.0) -> str:
    """Return the mean and its standard error, as text."""
    return f"{factor * values.mean():{form}} ± {factor * values.std(ddof=1) / math.sqrt(len(values)):{form}}"


def rows(results: Results) -> tuple[list[list[str]], dict[str, np.ndarray]]:
    """Return a row for each method, and accuracy by instance."""
    accuracy = {m.name: results.by_instance(results(m, m.choose)) for m in METHODS}
    log_mls = {m.name: results(m, log_ml) for m in METHODS if m.target}
    alive: dict[str, set[tuple[int, int]]] = {}
    for m in METHODS:
        if m.target:
            here = {pair for pair, value in log_mls[m.name].items() if value > -math.inf}
            alive[m.target] = alive.get(m.target, here) & here
    found = []
    for m in METHODS:
        tokens = results(m, lambda line, n: line["tokens"] * cost(line, n))
        seconds = results(m, lambda line, n: line["seconds"] * cost(line, n))
        z = dead = ""
        if m.target:
            z = f"{np.mean([log_mls[m.name][pair] for pair in sorted(alive[m.target])]):.2f}"
            dead = f"{sum(value == -math.inf for value in log_mls[m.name].values())}"
        over = "" if m.name == BASE else estimate(accuracy[m.name] - accuracy[BASE], "+.1f").replace("± +", "± ")
        found.append([m.name, estimate(accuracy[m.name]), over, z, dead, f"{np.mean([*tokens.values()]):.0f}",
                      f"{np.mean([*seconds.values()]):.2f}"])  # fmt: skip
    return found, accuracy


def beside_control(results: Results) -> list[list[str]]:
    """Return rows for genlm-control, and for ours on the same instances."""
    theirs = [line for line in results.lines.values() if line["set"] == CONTROL]
    found = []
    for name in (CONTROL, "AWRS", BASE):
        here = [results.lines.get((name, line["instance"], line["seed"])) for line in theirs]
        if theirs and None not in here:
            found.append([
                name, f"{sum(heaviest(line, len(line['answers'])) for line in here):.0f} of {len(here)}",
                *(f"{np.mean([line[key] for line in here]):{form}}" for key, form in COSTS),
            ])  # fmt: skip
    return found


COSTS = (("tokens", ".0f"), ("seconds", ".2f"))


def report(lines: list[Line]) -> list[Line]:
    """Print a table for each task, and the mean over the tasks. Return a summary of each method's mean."""
    columns = ("method", "right, %", "over steering", "log Z-hat", "none left", "tokens", "cpu s")
    accuracies: list[dict[str, np.ndarray]] = []
    costs: list[dict[str, tuple[float, float]]] = []
    for task in dict.fromkeys(line["task"] for line in lines):
        results = Results([line for line in lines if line["task"] == task])
        if len(results.instances) < 2:
            continue
        found, accuracy = rows(results)
        runs = len(results.pairs)
        table(f"{task}: {len(results.instances)} instances, {results.seeds} seeds, {runs} runs of each", columns, found)
        if others := beside_control(results):
            table("the first instances, compared with genlm-control", ("method", "right", "tokens", "cpu s"), others)
        accuracies.append(accuracy)
        costs.append({row[0]: (float(row[5]), float(row[6])) for row in found})
    if not accuracies:
        return []
    over_all, summary = [], []
    for m in METHODS:
        means = [accuracy[m.name].mean() for accuracy in accuracies]
        errors = [accuracy[m.name].std(ddof=1) / math.sqrt(len(accuracy[m.name])) for accuracy in accuracies]
        differences = [accuracy[m.name] - accuracy[BASE] for accuracy in accuracies]
        between = math.sqrt(sum(d.var(ddof=1) / len(d) for d in differences)) / len(accuracies)
        mean = np.mean([d.mean() for d in differences])
        right, error = 100 * float(np.mean(means)), 100 * float(np.linalg.norm(errors)) / len(errors)
        tokens, seconds = np.mean([cost[m.name] for cost in costs], axis=0).tolist()
        over_all.append([
            m.name, f"{right:.1f} ± {error:.1f}", "" if m.name == BASE else f"{100 * mean:+.1f} ± {100 * between:.1f}",
            f"{tokens:.0f}", f"{seconds:.2f}",
        ])  # fmt: skip
        summary.append({"method": m.name, "right": round(right, 1), "error": round(error, 1), "tokens": round(tokens)})
    table("mean over the tasks", ("method", "right, %", "over steering", "tokens", "cpu s"), over_all)
    return summary
