"""Cost of many tasks: `run_many` compared with a loop, by the number of tasks that share batches.

Tasks are prompts of the embedded model. smc_steer with K=3 steers each for a number of steps through words of at most
five letters. Every run starts with an empty cache. All run in one process and take turns. A figure is the median over
the turns of CPU seconds of one thread, or of the ratio within a turn.

    python benchmarks/many.py                           # 100 tasks, N=8, 20 steps: five minutes
    python benchmarks/many.py --tasks 20 --turns 1      # a test that it runs
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from typing import Any

import numpy as np
from steering import prepare_process
from tables import table

from llmppl import CachedTransformer, Model, Result, run_many, smc_steer

NAMES = "Lily", "Tom", "Ben", "Sue", "Max", "Anna", "Sam", "Mia", "Tim", "Joe"
THINGS = ("a red ball", "a big dog", "the old tree", "a small cat", "her mom", "the park", "a new toy", "the sun",
          "a blue car", "his friend")  # fmt: skip
PROMPTS = [f"Once upon a time, {name} saw {thing}." for name, thing in itertools.product(NAMES, THINGS)]
GOAL = 0.5                                              # of the CPU time of a loop


class Story(Model):
    """Story of `steps` tokens of at most five characters after a prompt."""

    def __init__(self, lm: CachedTransformer, prompt: str, steps: int) -> None:
        super().__init__()
        self.context, self.left = lm.context(prompt), steps

    def step(self) -> None:
        token = self.sample(self.transformer(self.context))
        self.context += token
        self.s += token
        self.condition(len(str(token)) < 6)
        self.left -= 1
        if self.left == 0:
            self.finish()


class Way:
    """Way to run all tasks: one after another, or a number of them together."""

    def __init__(self, together: int | None) -> None:
        self.together = together
        self.seconds: list[float] = []
        self.texts: list[list[str]] = []
        self.stats: Any = None

    @property
    def name(self) -> str:
        return "a loop" if self.together is None else f"{self.together} together"

    def run(self, lm: CachedTransformer, prompts: list[str], N: int, steps: int) -> None:
        def steer(prompt: str, rng: np.random.Generator) -> Any:
            return smc_steer(Story(lm, prompt, steps), N, 3, rng=rng, progress=False)

        gc.collect()                                    # excludes the garbage of the previous way
        start = time.process_time()
        if self.together is None:
            streams = [np.random.default_rng(np.random.SeedSequence(0, spawn_key=(i,))) for i in range(len(prompts))]
            results = [Result(i, p, steer(p, rng)) for i, (p, rng) in enumerate(zip(prompts, streams, strict=True))]
        else:
            results = sorted(run_many(steer, prompts, seed=0, together=self.together), key=lambda each: each.index)
        self.seconds.append(time.process_time() - start)
        self.texts = [each.particles.texts for each in results]
        self.stats = lm.stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=len(PROMPTS), help=f"at most {len(PROMPTS)}")
    parser.add_argument("--particles", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--together", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    prepare_process(1)
    prompts, loaded = PROMPTS[: options.tasks], CachedTransformer.from_pretrained(engine="transformers")
    ways = [Way(together) for together in (None, *options.together)]
    Way(None).run(loaded, prompts[:2], options.particles, 3)
    for _ in range(options.turns):
        for way in ways:
            way.run(CachedTransformer(loaded.model, loaded.tokenizer), prompts, options.particles, options.steps)
    loop, rows = ways[0], []
    for way in ways:
        ratios = [own / alone for own, alone in zip(way.seconds, loop.seconds, strict=True)]
        same = sum(own == alone for own, alone in zip(way.texts, loop.texts, strict=True))
        rows.append([
            way.name, f"{statistics.median(way.seconds):.1f}", f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f} to {max(ratios):.2f}", way.stats.rounds, way.stats.rows, way.stats.tokens, same,
        ])  # fmt: skip
    title = f"{len(prompts)} tasks, N={options.particles}, K=3, {options.steps} steps, embedded model; goal {GOAL}"
    table(title, ["", "CPU s", "x loop", "from to", "rounds", "rows", "tokens", "same texts"], rows)


if __name__ == "__main__":
    main()
