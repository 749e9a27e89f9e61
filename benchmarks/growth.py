"""Growth of the cost of a step, with the number of particles N and with the number t of earlier steps.

The task is that of steering.py: text whose tokens all come from a random half of the vocabulary. The end of text is
excluded, so no run ends early. There are two models. `function`, a table of logits by the last token, costs almost
nothing, so it shows the library's own cost. `embedded` ships with the package. Times are CPU seconds of this process on
one thread. "outside" is a step without the model's forward passes, whose attention reads more with every token. An
exponent is the least-squares slope of log(cost). In N, it uses N from 10 to 300 and the medians over the steps;
in t, it uses the medians of tenths of the run. Linear in N is 1, flat in t is 0. N goes up to 5,000 for `function`, to
1,000 for `embedded`; runs of more than 1,000 particles have a quarter of the steps.

    python benchmarks/growth.py                         # about ten minutes on one core
    python benchmarks/growth.py --quick                 # seconds
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tables import machine, table

from llmppl import CachedTransformer, ConstrainedText, Vocabulary, smc_standard, smc_steer
from llmppl.lm import SlotEngine

NS = {"function": (10, 30, 100, 300, 1000, 5000), "embedded": (10, 30, 100, 300, 1000)}
FITTED = (10, 300)                                      # range of N for the exponent
V = 256                                                 # tokens of `function`
K = 3


@dataclass(frozen=True)
class Growth:
    """CPU seconds of each step of one run of N particles.

    total, outside : (steps,), the whole step, and its part outside the model's forward passes
    """

    N: int
    total: np.ndarray
    outside: np.ndarray


def function() -> CachedTransformer:
    """Build a model whose logits come from a fixed table, by the last token."""
    logits = 2.0 * np.random.default_rng(0).standard_normal((V, V))
    tokens = [b"", *(b"%02x" % i for i in range(1, V))]
    return CachedTransformer(lambda ids: logits[ids[-1]], Vocabulary(tokens, eos_ids=[0]))


@functools.cache
def _embedded() -> CachedTransformer:
    return CachedTransformer.from_pretrained(engine="transformers")


def embedded() -> CachedTransformer:
    """Return the model of the package with an empty cache."""
    loaded = _embedded()
    return CachedTransformer(loaded.model, loaded.tokenizer)


MODELS: dict[str, Callable[[], CachedTransformer]] = {"function": function, "embedded": embedded}


def run(lm: CachedTransformer, method: str, N: int, steps: int) -> Growth:
    """Measure a run: `method` is "standard" or "steer"."""
    half = np.random.default_rng(1).random(len(lm.vocab)) < 0.5
    half &= lm.vocab.lengths > 0
    half[list(lm.vocab.eos_ids)] = False
    program = ConstrainedText(lm, lm.at(np.flatnonzero(half)[:10].tolist()), mask=lambda text: half)
    inside, marks = 0.0, [(0.0, 0.0)]
    name = "run" if isinstance(lm.engine, SlotEngine) else "forward"
    call = getattr(lm.engine, name)

    def timed(*arguments: Any) -> Any:
        nonlocal inside
        before = time.process_time()
        answer = call(*arguments)
        inside += time.process_time() - before
        return answer

    setattr(lm.engine, name, timed)
    start = time.process_time()

    def mark(step: Any) -> None:
        now = time.process_time() - start
        marks.append((now, now - inside))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")              # a cache too small, or a model too short, is an error
            if method == "steer":
                smc_steer(program, N, K, seed=0, max_steps=steps, on_step=mark, progress=False)
            else:
                smc_standard(program, N, seed=0, max_steps=steps, on_step=mark, progress=False)
    finally:
        setattr(lm.engine, name, call)
    total, outside = np.diff(np.array(marks), axis=0).T
    return Growth(N, total, outside)


def exponent(x: Sequence[float], cost: Sequence[float]) -> float:
    """Return the slope of log(cost) over log(x)."""
    slope, _ = np.polyfit(np.log(x), np.log(cost), 1)
    return float(slope)


def in_N(runs: Sequence[Growth], part: str) -> float:
    """Return the exponent of the cost of a step in N, for N in the range `FITTED`."""
    fitted = [each for each in runs if FITTED[0] <= each.N <= FITTED[1]]
    return exponent([each.N for each in fitted], [float(np.median(getattr(each, part)[1:])) for each in fitted])


def in_t(each: Growth, part: str) -> float:
    """Return the exponent of the cost of a step in t; the first step, which reads the prompt, is excluded."""
    tenths = np.array_split(getattr(each, part)[1:], 10)
    middles = np.cumsum([len(tenth) for tenth in tenths]) - [len(tenth) / 2 for tenth in tenths]
    return exponent(1 + middles, [float(np.median(tenth)) for tenth in tenths])


def growth_in_N(model: str, method: str, Ns: Sequence[int], steps: int) -> None:
    """Print the cost of a step for each N, over runs of `steps` steps."""
    runs = [run(MODELS[model](), method, N, steps if N <= 1000 else steps // 4) for N in Ns]
    rows = [
        [each.N, *(f"{1e3 * np.median(getattr(each, part)[1:]):.2f}" for part in ("total", "outside")),
         f"{1e3 * np.median(each.outside[1:]) / each.N:.3f}"]
        for each in runs
    ]  # fmt: skip
    note = f"exponent in N, 10 to 300: total {in_N(runs, 'total'):.2f}, outside {in_N(runs, 'outside'):.2f}"
    columns = ["N", "ms a step", "outside", "outside / N"]
    table(f"growth in N: {model}, {method}, {steps} steps, V = {len(MODELS[model]().vocab)}", columns, rows, note)


def growth_in_t(model: str, method: str, N: int, steps: int) -> None:
    """Print the cost of a step along a run."""
    each = run(MODELS[model](), method, N, steps)
    tenths = [np.array_split(part[1:], 10) for part in (each.total, each.outside)]
    rows, last = [], 1
    for total, outside in zip(*tenths, strict=True):
        first, last = last + 1, last + len(total)
        rows.append([f"{first}-{last}", *(f"{1e3 * statistics.median(part):.2f}" for part in (total, outside))])
    note = f"exponent in t: total {in_t(each, 'total'):.2f}, outside {in_t(each, 'outside'):.2f}"
    table(f"growth in t: {model}, {method}, N = {N}", ["steps", "ms per step", "outside"], rows, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes: a test that it runs")
    parser.add_argument("--models", nargs="*", choices=[*MODELS], default=[*MODELS])
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    print(machine("numpy", "torch", "transformers", note="one thread, CPU ms, medians"))
    for model in options.models:
        for method in ("standard", "steer"):
            growth_in_N(model, method, NS[model][:2] if options.quick else NS[model], 6 if options.quick else 40)
            limit = 500 if model == "embedded" else 1000
            growth_in_t(model, method, 10 if options.quick else 30, 30 if options.quick else limit)


if __name__ == "__main__":
    main()
