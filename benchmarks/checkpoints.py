"""Checkpoints: the cost of writing them, and the cost of resuming from one relative to the run that it replaces.

    python benchmarks/checkpoints.py

One run writes words of at most five letters on the embedded model, with N=10 and K=3. The other runs a program without
a language model, whose steps are the cheapest. `cpu %` and `wall %` are the time spent in the checkpoint over the time
of the rest of the run, the median of three runs; a write waits for the disk. `back` is the CPU time to restore the
particles of the whole run from its file, over the CPU time of the run. One thread.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmppl import Bernoulli, CachedTransformer, ConstrainedText, Model, Uniform, smc_steer
from llmppl.inference.resuming.checkpoint import Checkpoint
from llmppl.models.programs import short_words

RUNS = 3


class Spent:
    """Timer of the work in checkpoints."""

    def __init__(self) -> None:
        self.cpu = self.wall = 0.0
        for name in ("__enter__", "__call__"):
            setattr(Checkpoint, name, self.timed(getattr(Checkpoint, name)))

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*arguments: Any) -> Any:
            cpu, wall = time.process_time(), time.perf_counter()
            found = method(*arguments)
            self.cpu, self.wall = self.cpu + time.process_time() - cpu, self.wall + time.perf_counter() - wall
            return found

        return measured


class Digits(Model):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def step(self) -> None:
        digit = self.sample(Uniform(0, 9))
        self.s += str(digit)
        self.observe(Bernoulli(0.3 + 0.05 * (digit == 3)), True)
        if len(self.s) == self.steps:
            self.finish()


def run(model: Model, seed: int, path: Path, every: int | None, steps: int) -> tuple[float, float]:
    """Run with a checkpoint; return CPU and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    particles = smc_steer(model, 10, 3, seed=seed, checkpoint=path, every=every, progress=False)
    assert len(particles.steps) == steps
    return time.process_time() - cpu, time.perf_counter() - wall


def measure(name: str, program: Callable[[int], Model], steps: int, every: int | None, spent: Spent) -> None:
    shares = []
    for seed in range(RUNS):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "run.ckpt")
            spent.cpu = spent.wall = 0.0
            cpu, wall = run(program(steps), seed, path, every, steps)
            shares.append((100 * spent.cpu / (cpu - spent.cpu), 100 * spent.wall / (wall - spent.wall)))
            size, again = path.stat().st_size / 1e6, run(program(steps), seed, path, every, steps)[0]
    of_cpu, of_wall = map(statistics.median, zip(*shares, strict=True))
    print(
        f"{name:9} {steps:5} steps, every={every!s:4}: {1e3 * cpu / steps:5.1f} ms a step, {of_cpu:5.1f} cpu %, "
        f"{of_wall:5.1f} wall %, {size:5.2f} MB, back {again / cpu:.3f}",
        flush=True,
    )


def main() -> None:
    import torch

    torch.set_num_threads(1)
    lm = CachedTransformer.from_pretrained(engine="transformers")
    mask, spent = short_words(lm.vocab, 5), Spent()

    def story(steps: int) -> Model:                     # with a cold cache
        cold = CachedTransformer(lm.model, lm.tokenizer)
        prompt = "Once upon a time, there was a little girl"
        return ConstrainedText(cold, prompt, mask=mask, min_tokens=steps, max_tokens=steps)

    for steps, every in (60, None), (200, None), (200, 1):
        measure("embedded", story, steps, every, spent)
    for steps in (100, 1000):
        measure("no model", Digits, steps, None, spent)


if __name__ == "__main__":
    main()
