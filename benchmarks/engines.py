"""Cost of steering by engine: transformers, llama.cpp on one or several GGUF files, and vLLM.

All engines run the same program: every token comes from a random half of the vocabulary, by smc_steer with K=3, from an
empty cache and with one seed. Engines take turns in one process. Seconds are CPU time of all threads, medians over the
turns, and a ratio compares with transformers in the same turn. "ours" is the time outside the engine's calls. With
equal weights, all engines run the same tokens and draw the same texts.

    python benchmarks/engines.py                                            # the embedded model by transformers
    python benchmarks/engines.py --lm smollm2 --gguf smol-Q8_0.gguf smol-Q4_0.gguf
    python benchmarks/engines.py --lm FOLDER --vllm                         # if vLLM is installed
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")           # before torch, llama.cpp and vLLM are loaded

import numpy as np
from tables import machine, table

from llmppl import CachedTransformer, ConstrainedText, smc_steer
from llmppl.lm import SlotEngine

K = 3
TEXT = (
    "Once upon a time there was a small town by the sea. The people of the town fished, baked bread and told stories "
    "in the evening. One of them, an old sailor, had seen more of the world than all the others together, and yet he "
    "said that nothing he had seen was as fine as the harbour on a morning in June. "
)


class Way:
    """Engine with the measurements of its runs."""

    def __init__(self, name: str, lm: CachedTransformer) -> None:
        self.name, self.lm = name, lm
        self.runs: dict[tuple[int, int], list[tuple[float, float, int, Any, Any]]] = {}

    def run(self, prompt: int, N: int, steps: int) -> None:
        lm = CachedTransformer(self.lm.model, self.lm.tokenizer)        # with an empty cache
        lm.engine.clear()                               # and with an empty cache of the engine
        ids = [int(i) for i in lm.context(TEXT * 10).tokens[:prompt]]
        half = np.random.default_rng(1).random(len(lm.vocab)) < 0.5
        half &= lm.vocab.lengths > 0
        half[list(lm.vocab.eos_ids)] = False
        program = ConstrainedText(lm, lm.at(ids), mask=lambda text: half)
        inside, name = 0.0, "run" if isinstance(lm.engine, SlotEngine) else "forward"
        call = getattr(lm.engine, name)

        def timed(*arguments: Any) -> Any:
            nonlocal inside
            before = time.process_time()
            answer = call(*arguments)
            inside += time.process_time() - before
            return answer

        setattr(lm.engine, name, timed)
        gc.collect()
        start = time.process_time()
        try:
            posterior = smc_steer(program, N, K, seed=0, max_steps=steps, progress=False)
        finally:
            setattr(lm.engine, name, call)
        took = time.process_time() - start
        self.runs.setdefault((prompt, N), []).append((took, inside, lm.stats.tokens, posterior.texts, posterior.log_ml))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", help="a name or a folder; by default the embedded model")
    parser.add_argument("--gguf", nargs="*", default=[], type=Path, help="files for llama.cpp")
    parser.add_argument("--vllm", action="store_true", help="vLLM, on the model of --lm")
    parser.add_argument("--particles", type=int, nargs="+", default=[10, 30])
    parser.add_argument("--prompts", type=int, nargs="+", default=[40, 200], help="tokens")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    name: Any = options.lm
    ways = []
    if options.vllm:                                    # first: vLLM binds its threads when it starts
        limits = {"enforce_eager": True, "max_model_len": 1024}
        ways.append(Way("vLLM", CachedTransformer.from_pretrained(name, engine="vllm", **limits)))
    ways.insert(0, Way("transformers, float32", CachedTransformer.from_pretrained(name, engine="transformers")))
    for file in options.gguf:
        ways.append(Way(f"llama.cpp, {file.stem}", CachedTransformer.from_pretrained(file, engine="llama.cpp")))
    for way in ways:                                    # an untimed run excludes one-time work
        way.run(options.prompts[0], 2, 2)
        way.runs.clear()
    packages = ["llmppl", "torch", "transformers", *["xllamacpp"] * bool(options.gguf), *["vllm"] * options.vllm]
    print(machine(*packages, note=f"CPU time, threads: {os.environ['OMP_NUM_THREADS']}"))
    for prompt, N in itertools.product(options.prompts, options.particles):
        for _ in range(options.turns):
            for way in ways:
                way.run(prompt, N, options.steps)
        first, rows = ways[0].runs[prompt, N], []
        for way in ways:
            runs = way.runs[prompt, N]
            ratios = [own[0] / base[0] for own, base in zip(runs, first, strict=True)]
            outside = [1 - inside / total for total, inside, *_ in runs]
            _, _, tokens, texts, log_ml = runs[0]
            same = sum(map(str.__eq__, texts, first[0][3]))
            rows.append([
                way.name, f"{statistics.median(run[0] for run in runs):.2f}", f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}", f"{statistics.median(outside):.0%}", tokens,
                f"{same} of {len(texts)}", f"{log_ml:.5f}",
            ])  # fmt: skip
        title = f"{name or 'embedded model'}, prompt of {prompt} tokens, N={N}, K={K}, {options.steps} steps"
        table(title, ["", "CPU s", "x", "from to", "ours", "tokens", "same texts", "log Z"], rows)


if __name__ == "__main__":
    main()
