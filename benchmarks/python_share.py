"""Python's share: CPU microseconds for each particle and step outside of the model, with a model that costs nothing.

The model is a table of logits by the last token (growth.py), with 256 tokens. The program is a text of `[0-9a-e]`.
`programs` runs the step of a program for each particle, `rows` steps all particles of a run together; both are the
library's own. They take turns in one process, and a figure is the median over the turns. One step of one particle that
is kept counts as one particle-step, whatever K is.

    python benchmarks/python_share.py                   # about five minutes of one core
    python benchmarks/python_share.py --quick           # seconds
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from growth import function
from tables import machine, save, table

import llmppl.inference.rows as rows_of_runs
from llmppl import CachedTransformer, ConstrainedText, Regex, run_many, smc_standard, smc_steer

K = 3
ONE_RUN = ((10, 40), (32, 40), (100, 20), (256, 20), (1000, 10), (5000, 5))     # N, steps
TASKS = ((10, 8, 15), (100, 8, 10), (400, 8, 5))        # tasks, N, steps
GOALS = {"standard": "100, 15", "steer": "150, 25"}     # programs, rows from 256 rows on


class Outside:
    """CPU seconds outside of the model, from the beginning of a `with` block to its end."""

    def __init__(self, lm: CachedTransformer) -> None:
        self.seconds = 0.0
        self._engine = lm.engine

    def __enter__(self) -> Outside:
        self._forward: Callable[..., Any] = self._engine.forward
        self._engine.forward = self._timed              # type: ignore[method-assign]
        gc.collect()
        self._start = time.process_time()
        return self

    def _timed(self, *arguments: Any) -> Any:
        start = time.process_time()
        answer = self._forward(*arguments)
        self._start += time.process_time() - start
        return answer

    def __exit__(self, *error: object) -> None:
        self.seconds = time.process_time() - self._start
        self._engine.forward = self._forward            # type: ignore[method-assign]


def run(program: ConstrainedText, method: str, N: int, steps: int, rng: np.random.Generator) -> Any:
    if method == "steer":
        return smc_steer(program, N, K, rng=rng, max_steps=steps, progress=False)
    return smc_standard(program, N, rng=rng, max_steps=steps, progress=False)


def measure(method: str, tasks: int, N: int, steps: int) -> float:
    """Return microseconds for each particle and step outside of the model."""
    lm = function()
    constraint = Regex(f"[0-9a-e]{{{4 * steps},}}")
    half = np.flatnonzero(lm.vocab.lengths > 0)
    programs = []
    for task in range(tasks):
        start = lm.at([int(half[task % len(half)]), int(half[7 * task % len(half)])])
        programs.append(ConstrainedText(lm, start, constraint, complete=False))
    made = 0
    with Outside(lm) as outside:
        if tasks == 1:
            made = len(run(programs[0], method, N, steps, np.random.default_rng(0)).steps)
        else:
            results = run_many(
                lambda task, rng: run(programs[task], method, N, steps, rng), range(tasks), together=tasks,
                progress=False,
            )  # fmt: skip
            made = sum(len(result.particles.steps) for result in results)
    return 1e6 * outside.seconds / (N * made)


def both(method: str, tasks: int, N: int, steps: int, turns: int) -> tuple[float, float]:
    """Return the medians by programs and by rows, in turns."""
    by_rows = rows_of_runs.is_row
    programs = []
    rows = []
    for _ in range(turns):
        rows_of_runs.is_row = lambda program: False
        try:
            programs.append(measure(method, tasks, N, steps))
        finally:
            rows_of_runs.is_row = by_rows
        rows.append(measure(method, tasks, N, steps))
    return statistics.median(programs), statistics.median(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a test that everything runs, with sizes too small")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the tables to this file as JSON")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    turns = 1 if arguments.quick else 3
    sizes = [(1, N, steps) for N, steps in ONE_RUN] + [*TASKS]
    if arguments.quick:
        sizes = [(1, 10, 3), (4, 4, 3)]
    print(machine())
    for method, goal in GOALS.items():
        lines = []
        for tasks, N, steps in sizes:
            programs, rows = both(method, tasks, N, steps, turns)
            lines.append((f"{tasks}", f"{N}", f"{programs:.0f}", f"{rows:.0f}", f"{programs / rows:.1f}"))
        title = f"{method}, CPU microseconds a particle-step outside of the model (goals: {goal})"
        table(title, ("tasks", "N", "programs", "rows", "times less"), lines)
    save(arguments.out, "numpy")


if __name__ == "__main__":
    main()
