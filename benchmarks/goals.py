"""Cost of steering compared with its goals.

Figures are ratios of CPU time, or CPU time per step, of one thread. Contestants take turns in one process, and a figure
is the median over the turns, with the lowest and the highest. Models and task are in `subjects.py`, methods in
`steering.py`. K=3 with the default expansion, and every run starts with an empty cache.

    python benchmarks/goals.py                          # all tables: about an hour of one core
    python benchmarks/goals.py --only outside tasks     # selected tables
    python benchmarks/goals.py --quick                  # a test that everything runs, with sizes too small: two minutes

`--summary benchmarks/results/cost.json` writes the ratios of "cost" that `tools/pictures.py` draws.

cost     whole runs, over `generate` of the same length, which runs the prompt once per sequence, and over the same
         with the prompt run once; a round, over its matrix products alone (all linear layers at N rows, same turn)
outside  time per step outside the model's forward pass, for vocabularies of real sizes: with a model that has little
         more than its last layer, flat (random weights) and as peaked as a trained model
tasks    tasks of N=4, each with its own prompt: one after another, over all in the same batches
others   llamppl and genlm-control, over ours, on the embedded model; others-gpt2: on GPT-2's shape, one turn
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peers
import torch
from steering import K, Method, Run, generate, inference, once, ours, prepare_process, take_turns, theirs
from subjects import SUBJECTS, Subject, Task, context_of, head
from tables import save, table
from transformers.pytorch_utils import Conv1D

from llmppl import CachedTransformer, ConstrainedText, repeat

CACHE = 2 << 30
SPREAD = (statistics.median, min, max)
NAMES = {None: "standard", K: f"steer K={K}"}
COST = (                                                # model, prompt, N, steps; x generate of standard, of steer
    ("embedded", 40, 10, 50, 0.9, 1.1),
    ("gpt2", 40, 10, 50, 0.80, 0.85),
    ("gpt2", 200, 30, 50, 0.38, 0.42),
    ("gpt2", 900, 30, 50, 0.11, 0.13),
)
ROOFLINE = {("gpt2", 200): (1.4, 1.8)}                  # a round over its products: standard, steer
OUTSIDE = ((50_257, 10, 6), (128_256, 32, 25), (262_144, 32, 60))       # V, N, ms per step
TASKS, TOGETHER = 8, 2.0                                # number of tasks; least throughput
OTHERS = {None: 8.0, K: 20.0}                           # least time over ours


def spread(values: Sequence[float], form: str) -> str:
    """Return the median, the lowest and the highest value, as text."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def told(values: Sequence[float], goal: float | None, form: str = ".2f", most: bool = True) -> tuple[str, str, str]:
    """Return the figure, its goal, and "yes" or "no" for a goal that is met or missed."""
    if goal is None:
        return spread(values, form), "", ""
    found = statistics.median(values)
    return spread(values, form), f"{'<=' if most else '>='} {goal:g}", "yes" if (found <= goal) == most else "no"


def quotients(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x / y for x, y in zip(a, b, strict=True)]


def warm_up(subject: Subject, methods: Sequence[Method], N: int) -> None:
    for method in methods:
        once(method, Task(subject, N, 3, 8))


# ---- cost, roofline


def products(model: Any, rows: int) -> Callable[[], None]:
    """Return a function that multiplies all matrices of a model with `rows` vectors."""
    matrices = []
    for module in model.modules():
        if isinstance(module, Conv1D):
            matrices.append(module.weight)              # (in, out)
        elif isinstance(module, torch.nn.Linear):
            matrices.append(module.weight.T)
    inputs = {n: torch.randn(rows, n) for n in {len(matrix) for matrix in matrices}}

    def call() -> None:
        with torch.inference_mode():
            for matrix in matrices:
                inputs[len(matrix)] @ matrix

    return call


def cpu(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def cost(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Print the table of each setting. Return (median, lowest, highest) of "x generate" and "x prompt once"."""
    summary: list[dict[str, Any]] = []
    for name, prompt, N, steps, *goals in COST:
        if quick:
            prompt, N, steps = min(prompt, 60), 4, 4
        subject = SUBJECTS[name](prompt)
        task = Task(subject, N, steps, prompt)
        own = [Method(NAMES[k], ours(k, CACHE)) for k in NAMES]
        sampling, prompt_once = (Method(how, generate(how)) for how in ("sampling", "prompt once"))
        warm_up(subject, [*own, sampling, prompt_once], N)
        multiply = products(subject.model, N)
        alone = []
        for _ in range(repeats):
            take_turns(task, [*own, sampling, prompt_once], 1)
            alone.append(statistics.median(cpu(multiply) for _ in range(9)))
        bounds = ROOFLINE.get((name, prompt), (None, None))
        rows = []
        for method, goal, bound in zip(own, goals, bounds, strict=True):
            ratios = {base.name: quotients(cpus(method), cpus(base)) for base in (sampling, prompt_once)}
            setting = {"model": name, "prompt": prompt, "N": N, "steps": steps, "method": method.name}
            summary.append(setting | {how: [round(f(of), 3) for f in SPREAD] for how, of in ratios.items()})
            rows.append((
                method.name,
                f"{statistics.median(run.cpu for run in method.runs):.2f}",
                *told(ratios["sampling"], goal),
                spread(ratios["prompt once"], ".2f"),
                f"{1e3 * statistics.median(run.round(task) for run in method.runs):.1f}",
                f"{1e3 * statistics.median(run.outside(task) for run in method.runs):.1f}",
                *told(quotients([run.round(task) for run in method.runs], alone), bound),
            ))
        columns = ("method", "cpu s", "x generate", "goal", "met", "x prompt once", "round ms", "outside ms",
                   "round / products", "goal", "met")
        medians = [statistics.median(found) for found in (cpus(sampling), cpus(prompt_once), alone)]
        note = "generate {:.2f} s, with the prompt run once {:.2f} s; products {:.4f} s a round".format(*medians)
        table(f"cost: {task}", columns, rows, note)
    return summary


def cpus(method: Method) -> list[float]:
    return [run.cpu for run in method.runs]


# ---- outside the model


def outside(repeats: int, quick: bool) -> None:
    steps = 3 if quick else 20
    rows = []
    for V, N, goal in OUTSIDE:
        for kind, sd in (("flat", 0.1), ("peaked", 4.0)):
            subject = head(V, sd)
            task = Task(subject, N, steps, 8)
            methods = [Method(NAMES[k], ours(k, CACHE)) for k in NAMES]
            warm_up(subject, methods, N)
            take_turns(task, methods, repeats)
            for method in methods:
                found = [1e3 * run.outside(task) for run in method.runs]
                rows.append((f"V={V:,}, N={N}, {kind}", method.name, *told(found, goal, ".1f")))
    table(f"outside: CPU ms a step outside the model, {steps} steps", ("setting", "method", "ms", "goal", "met"), rows)


# ---- many tasks


def tasks(repeats: int, quick: bool) -> None:
    prompt, steps = (10, 3) if quick else (40, 50)
    subject = SUBJECTS["gpt2"](prompt)
    every = [Task(subject, 4, steps, prompt, turn) for turn in range(TASKS)]
    rows = []
    for k, name in NAMES.items():
        found: dict[str, list[float]] = {how: [] for how in WAYS}
        once(Method(name, ours(k, CACHE)), Task(subject, 4, 3, 8))
        for _ in range(repeats):
            for how, times in found.items():
                lm = CachedTransformer(subject.model, subject.vocab, cache_bytes=CACHE)
                runs = [run_of(lm, task, k) for task in every]
                times.append(cpu(lambda how=how, runs=runs: WAYS[how](runs)))
        rows.append((
            name,
            *(f"{statistics.median(times):.2f}" for times in found.values()),
            *told(quotients(*found.values()), TOGETHER, most=False),
        ))
    title = f"tasks: {TASKS} tasks of {every[0]}, CPU s"
    table(title, ("method", *found, "throughput", "goal", "met"), rows)


RunOf = Callable[[np.random.Generator], Any]


def run_of(lm: CachedTransformer, task: Task, k: int | None) -> RunOf:
    program = ConstrainedText(lm, context_of(lm, task.ids), mask=lambda text: task.mask, max_tokens=task.steps)
    return lambda rng: inference(program, task.N, k, rng=rng, progress=False)


def one_after_another(runs: Sequence[RunOf]) -> None:
    for run, rng in zip(runs, np.random.default_rng(0).spawn(len(runs)), strict=True):
        run(rng)


def together(runs: Sequence[RunOf]) -> None:
    waiting = iter(runs)
    repeat(lambda rng: next(waiting)(rng), len(runs), seed=0, progress=False)


WAYS = {"one after another": one_after_another, "together": together}


# ---- other libraries


def others(repeats: int, quick: bool, name: str = "embedded") -> None:
    print(f"\n{peers.installed()}")
    subject = SUBJECTS[name](40)
    task = Task(subject, 10, 5 if quick else 100, 40)
    own = {k: Method(f"llmppl, {NAMES[k]}", ours(k, CACHE)) for k in NAMES}
    their = [Method(other, theirs(prepare)) for other, prepare in peers.others(K).items()]
    warm_up(subject, [*own.values(), *their], task.N)
    take_turns(task, [*own.values(), *their], repeats)
    rows = [(method.name, *counts(method), "", "", "") for method in own.values()]
    for method in their:
        k = K if "steer" in method.name else None
        ratios = quotients(cpus(method), cpus(own[k]))
        rows.append((method.name, *counts(method), *told(ratios, OTHERS[k], ".1f", most=False)))
    columns = ("method", "tokens", "cpu s", "over ours, steer or standard", "goal", "met")
    table(f"others: {task}", columns, rows)


def others_gpt2(repeats: int, quick: bool) -> None:
    """Run one turn, since the other libraries take minutes."""
    others(1, quick, "gpt2")


def counts(method: Method) -> Iterator[str]:
    last: Run = method.runs[-1]
    yield f"{last.tokens or last.passed:,}"
    yield f"{statistics.median(cpus(method)):.2f}"


TABLES: dict[str, Callable[[int, bool], Any]] = {
    "cost": cost, "outside": outside, "tasks": tasks, "others": others, "others-gpt2": others_gpt2,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*TABLES], nargs="+", default=[*TABLES])
    parser.add_argument("--repeats", type=int, default=3, help="turns")
    parser.add_argument("--quick", action="store_true", help="one turn of a few steps: a test that it runs")
    parser.add_argument("--summary", type=Path, help="JSON file for the ratios of the table cost")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the tables to this file as JSON")
    options = parser.parse_args()
    prepare_process(1)
    for name in options.only:
        began = time.perf_counter()
        summary = TABLES[name](1 if options.quick else options.repeats, options.quick)
        if summary and options.summary:
            options.summary.write_text("[\n" + ",\n".join(map(json.dumps, summary)) + "\n]\n", encoding="utf-8")
        print(f"({name}: {time.perf_counter() - began:.0f} s)", flush=True)
    save(options.out, "torch", "transformers", "llamppl", "genlm-control")


if __name__ == "__main__":
    main()
