"""A data set on Ray: many prompts on several processes, with results that survive any of them.

Each worker is a process with its own language model, and works on a few prompts at a time. There are two workers here.
Each finished prompt adds a line to the file. You can kill the run at any time (`kill -9`, too), and a new start
continues it. Each prompt has its own random stream, which depends on its place in the list. The results therefore do
not depend on which worker has a prompt, when, or how often. The same file runs unchanged on a cluster: see
docs/scaling.md.

What to look for: nothing runs twice. The second run finds all results in the file, and starts no worker. One process
gives the same texts. (In float32 a few prompts may differ. Batches of another size round differently, and this can
change a choice.)

    100 prompts on 2 workers: 100 results, 0 failed
    again, with the same file: 0 results to wait for, 100 in the file
    one process: the same texts for 100 of 100 prompts

    Once upon a time, Lily saw a red ball.     -3.4  " She ran it out of her backyard and saw that the ball was drivi...
    Once upon a time, Tom saw a red ball.      -4.7  ' He said the ball, "This is my ball! It is fast!" Tom felt sad ...
    Once upon a time, Ben saw a red ball.      -4.0  ' It was red and had many blue balls. Ben said, "Hey, a red ball'
"""

import argparse
import functools
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import llmppl.tasks.ray
from llmppl import CachedTransformer, Model, Particles, Result, load_results, run_many, smc_steer

NAMES = ["Lily", "Tom", "Ben", "Sue", "Max", "Anna", "Sam", "Mia", "Tim", "Joe"]
THINGS = ["a red ball", "a big dog", "the old tree", "a small cat", "her mom", "the park", "a new toy", "the sun",
          "a blue car", "his friend"]  # fmt: skip


class ShortWords(Model):
    """Text of twenty tokens of fewer than six characters."""

    def __init__(self, lm: CachedTransformer, prompt: str) -> None:
        super().__init__()
        self.context, self.left = lm.context(prompt), 20

    def step(self) -> None:
        token = self.sample(self.transformer(self.context))
        self.condition(len(str(token)) < 6)
        self.s += token
        self.context += token
        self.left -= 1
        if not self.left:
            self.finish()


def steer(lm: CachedTransformer, prompt: str, rng: np.random.Generator) -> Particles[ShortWords]:
    """Run one prompt with the worker's language model."""
    return smc_steer(ShortWords(lm, prompt), N=8, K=3, rng=rng, progress=False)


def drawn(results: Iterable[Result]) -> dict[int, Particles[Any]]:
    """Return the particles of the tasks that did not fail, by index."""
    return {result.index: result.particles for result in results if result.particles is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="ten prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="the file of results (default: a temporary one)")
    args = parser.parse_args()
    prompts = [f"Once upon a time, {name} saw {thing}." for thing in THINGS for name in NAMES]
    prompts = prompts[:10] if args.quick else prompts
    make_lm = functools.partial(CachedTransformer.from_pretrained, args.lm)

    with tempfile.TemporaryDirectory() as folder:
        out = args.out or Path(folder) / "results.db"
        kept_in = {"seed": args.seed, "to": out, "resume": True}
        on_ray = functools.partial(
            llmppl.tasks.ray.run_many, steer, prompts, make_lm=make_lm, workers=args.workers, **kept_in
        )
        results = list(on_ray())
        failed = sum(result.error is not None for result in results)
        print(f"{len(prompts)} prompts on {args.workers} workers: {len(results)} results, {failed} failed")
        again, kept = list(on_ray()), load_results(out)
        print(f"again, with the same file: {len(again)} results to wait for, {len(kept)} in the file")

        found, alone = drawn(kept), drawn(run_many(functools.partial(steer, make_lm()), prompts, seed=args.seed))
        same = sum(particles.texts == alone[index].texts for index, particles in found.items())
        print(f"one process: the same texts for {same} of {len(prompts)} prompts\n")
        for index, particles in [*found.items()][:3]:
            print(f"{prompts[index]:40} {particles.log_ml:6.1f}  {str(particles.best)!r}")


if __name__ == "__main__":
    main()
