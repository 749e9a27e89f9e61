"""Variance of a run for its cost, compared with the adaptive weighted rejection sampling (AWRS) of genlm-control.

Two programs of `accuracy.py` run on the embedded model: words of at most five letters, and a sentence on an age. All
methods use the same masks, which also exclude tokens after which the text cannot end in time. Our methods propose from
the mask; AWRS draws tokens until one is in it. The target of all methods is a text that ends by itself within a number
of tokens. (`max_tokens` of genlm-control counts the end of text and weighs it in at the limit, like `complete=True`.)
Log Z-hat of N particles has a variance proportional to 1/N. So methods are compared by the variance times the number
of contexts that went through the model (rows), or times the CPU time of a run. Caches are empty.

    python benchmarks/awrs.py                           # 100 runs of each: about ten minutes of one core
    python benchmarks/awrs.py --runs 4                  # a test that it works
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import peers
import torch
from accuracy import AGE, START, WORDS
from numpy.typing import NDArray
from steering import K, Run, forwards, inference, prepare_process
from subjects import context_of
from tables import save, table

from llmppl import CachedTransformer, ConstrainedText, Regex, TokenIndex

PROGRAMS = {"words": (WORDS, 10), "age": (AGE, 14)}     # the pattern, and max_tokens


@dataclass
class Program:
    """Constraint with the masks that all methods share."""

    lm: CachedTransformer
    index: TokenIndex
    prompt: list[int]
    max_tokens: int
    masks: dict[tuple[int, ...], NDArray[np.bool_]] = field(default_factory=dict)
    states: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def mask(self, ids: tuple[int, ...]) -> NDArray[np.bool_]:
        """Return the tokens that may follow `ids`, (V,) bool; each token of `ids` must have been allowed."""
        if ids not in self.masks:
            state = self.index.advance(self.states[ids[:-1]], ids[-1]) if ids else self.index.start
            self.states[ids] = state
            self.masks[ids] = self.index.mask_within(state, self.max_tokens - len(ids))
        return self.masks[ids]


Prepared = Callable[[int], Callable[[], float]]         # maps a seed to a run that starts with empty caches


def ours(program: Program, N: int, k: int | None) -> Prepared:
    def prepare(seed: int) -> Callable[[], float]:
        lm = CachedTransformer(program.lm.model, program.lm.vocab)
        context = context_of(lm, program.prompt)
        model = ConstrainedText(lm, context, program.index, max_tokens=program.max_tokens, end="eos")
        return lambda: float(inference(model, N, k, seed=seed, progress=False).log_ml)

    return prepare


def awrs(program: Program, N: int) -> Prepared:
    control = peers.genlm_control
    backend = peers.AsyncTransformer(program.lm.model, program.lm.tokenizer, batch_size=N)
    llm = control.PromptedLLM(backend, prompt_ids=program.prompt)
    eos = program.lm.vocab.eos_ids[0]

    class Fits(control.Potential):
        """Potential that is 0 if the tokens can still become a text that fits, and -inf otherwise."""

        async def prefix(self, context: list[Any]) -> float:
            *ids, last = [token.token_id for token in context] or [None]
            return 0.0 if last is None or program.mask(tuple(ids))[last] else -np.inf

        async def complete(self, context: list[Any]) -> float:
            return 0.0 if program.mask(tuple(token.token_id for token in context))[eos] else -np.inf

        async def logw_eos(self, context: list[Any]) -> float:
            return await self.complete(context)

    fits = Fits(llm.vocab)

    def prepare(seed: int) -> Callable[[], float]:
        sampler = control.AWRS(llm, fits, seed=seed)
        np.random.seed(seed)                            # noqa: NPY002  its resampling draws from this stream
        backend.clear_cache()

        def call() -> float:
            backend.cache_kv(program.prompt)
            return float(asyncio.run(control.SMC(sampler)(N, 0.5, program.max_tokens + 1)).log_ml)

        return call

    return prepare


METHODS: dict[str, Callable[[Program, int], Prepared]] = {
    f"steer K={K}": lambda program, N: ours(program, N, K),
    "standard": lambda program, N: ours(program, N, None),
    "genlm-control, AWRS": awrs,
}


def once(program: Program, prepare: Prepared, seed: int) -> tuple[float, int, float]:
    """Run once; return log Z-hat, rows and CPU seconds."""
    call, run = prepare(seed), Run()
    with forwards(program.lm.model, run):
        start = time.process_time()
        log_ml = call()
        return log_ml, run.rows, time.process_time() - start


def variance(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the variance, and its standard error by the fourth moment."""
    if not np.isfinite(values).all():
        return math.inf, math.nan
    n, s2 = len(values), float(values.var(ddof=1))
    fourth = float(np.mean((values - values.mean()) ** 4))
    return s2, math.sqrt(max(0.0, fourth - s2**2 * (n - 3) / (n - 1)) / n)


def compare(title: str, program: Program, N: int, runs: int) -> None:
    methods = {name: method(program, N) for name, method in METHODS.items()}
    for prepare in methods.values():
        once(program, prepare, runs)                    # makes masks
    found: dict[str, list[tuple[float, int, float]]] = {name: [] for name in methods}
    for seed in range(runs):
        for name, prepare in methods.items():
            found[name].append(once(program, prepare, seed))
    lines: list[tuple[str, ...]] = []
    of_base: tuple[float, ...] = ()
    for name, results in found.items():
        log_mls, rows, cpu = (np.array(column, dtype=np.float64) for column in zip(*results, strict=True))
        s2, error = variance(log_mls)
        cost = np.array([rows.mean(), np.median(cpu)])
        of_base = of_base or tuple(s2 * cost)
        lines.append((
            name,
            f"{log_mls.mean():.3f} +- {log_mls.std(ddof=1) / math.sqrt(runs):.2g}",
            f"{s2:.4f} +- {error:.1g}",
            f"{cost[0]:.0f}", f"{cost[1]:.3f}",
            *(f"{s2 * each:.3g} +- {error * each:.1g}" for each in cost),
            *(f"{s2 * each / mine:.2f}" for each, mine in zip(cost, of_base, strict=True)),
        ))  # fmt: skip
    columns = ("method", "mean log Z-hat", "variance", "rows", "cpu s", "variance x rows", "variance x cpu",
               "rows: over steer's", "cpu: over steer's")
    table(f"{title}, at most {program.max_tokens} tokens, embedded model, N={N}, {runs} runs of each", columns, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--particles", type=int, nargs="+", default=[10, 40], metavar="N")
    parser.add_argument("--only", choices=[*PROGRAMS], nargs="+", default=[*PROGRAMS])
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the tables to this file as JSON")
    options = parser.parse_args()
    began = time.perf_counter()
    prepare_process(1)
    print(peers.installed())
    if peers.genlm_control is None:
        del METHODS["genlm-control, AWRS"]
    torch.manual_seed(0)
    lm = CachedTransformer.from_pretrained(engine="transformers")
    prompt = [int(i) for i in lm.context(START).tokens]
    for name in options.only:
        pattern, max_tokens = PROGRAMS[name]
        program = Program(lm, Regex(pattern).index(lm.vocab), prompt, max_tokens)
        for N in options.particles:
            compare(f"{name}: {pattern}", program, N, options.runs)
    print(f"\n{time.perf_counter() - began:.0f} s in all")
    save(options.out, "torch", "genlm-control")


if __name__ == "__main__":
    main()
