"""Texts of the pattern-matching benchmark of AWRS (Lipkin et al. 2025), beside genlm-control's AWRS.

    python benchmarks/patterns.py --patterns patterns.csv [--number 40] [--out FILE]

The file has a regular expression in each row of the column "regex", as in the repository genlm/genlm-eval. A seeded
shuffle selects `--number` of them. A prompt asks for a string that matches, with three examples, and a text has at most
24 tokens. The score of a method on a pattern is the share of its weight on texts that match the whole pattern. Methods
take turns on each pattern, with an empty cache. `Regex` is used where it takes the pattern, else `Pattern`.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peers
import torch
from tables import save, table

from llmppl import CachedTransformer, ConstrainedText, Regex, generate, smc_standard, smc_steer
from llmppl.constraints import Constraint, Pattern

MAX_TOKENS, N = 24, 5
SYSTEM = "You write one string that matches the given regular expression. Answer with the string alone."
SHOTS = (("(xy)+", "xy"), ("(red|blue)", "blue"), ("[0-9]{3}", "417"))
Found = tuple[float, float]                         # the share of matching texts, and log Z-hat or nan
Method = Callable[[CachedTransformer, str], Found]


def prompt_of(lm: CachedTransformer, pattern: str) -> Any:
    messages = [{"role": "system", "content": SYSTEM}]
    for question, answer in SHOTS:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": pattern})
    return lm.chat(messages)


def constraint_of(pattern: str) -> Constraint:
    try:
        return Regex(pattern)
    except ValueError:
        return Pattern(pattern)


def matching(pattern: str, texts: list[str], log_weights: list[float]) -> float:
    """Return the share of the weights on texts that match."""
    total = np.logaddexp.reduce([-math.inf, *log_weights])
    if total == -math.inf:
        return 0.0
    fits = Pattern(pattern).matches
    return sum(math.exp(w - total) for text, w in zip(texts, log_weights, strict=True) if fits(text))


def free(lm: CachedTransformer, pattern: str) -> Found:
    context = prompt_of(lm, pattern)
    answer = generate(lm, context, max_tokens=MAX_TOKENS, method="sample", seed=0)
    return float(Pattern(pattern).matches(answer.text)), math.nan


def one_call(lm: CachedTransformer, pattern: str) -> Found:
    answer = generate(lm, prompt_of(lm, pattern), constraint_of(pattern), max_tokens=MAX_TOKENS, method="greedy")
    return float(Pattern(pattern).matches(answer.text)), math.nan


def steered(lm: CachedTransformer, pattern: str) -> Found:
    constraint = constraint_of(pattern)
    program = ConstrainedText(lm, prompt_of(lm, pattern), constraint, max_tokens=MAX_TOKENS, end="eos")
    options: Any = {"seed": 0, "progress": False}
    if isinstance(constraint, Regex):
        particles = smc_steer(program, N, 3, **options)
    else:
        particles = smc_standard(program, N, **options)
    texts = [str(particle) for particle in particles]
    return matching(pattern, texts, [particle.log_weight for particle in particles]), particles.log_ml


def genlm(lm: CachedTransformer, pattern: str) -> Found:
    control = peers.genlm_control
    backend = peers.AsyncTransformer(lm.model, lm.tokenizer, batch_size=N)
    prompt = [int(token) for token in prompt_of(lm, pattern).tokens]
    llm = control.PromptedLLM(backend, prompt_ids=prompt)
    index = Pattern(pattern).index(lm.vocab)
    eos = lm.vocab.eos_ids[0]

    def data(context: list[Any]) -> bytes:
        return b"".join(lm.vocab.tokens[token.token_id] for token in context)

    class Fits(control.Potential):
        """Potential that is 0 while the text may still match, and -inf otherwise."""

        async def prefix(self, context: list[Any]) -> float:
            if not context:
                return 0.0
            return 0.0 if index.fits(data(context[:-1]), context[-1].token_id) else -math.inf

        async def complete(self, context: list[Any]) -> float:
            return 0.0 if index.fits(data(context), eos) else -math.inf

        async def logw_eos(self, context: list[Any]) -> float:
            return await self.complete(context)

    sampler = control.AWRS(llm, Fits(llm.vocab), seed=0)
    np.random.seed(0)                               # noqa: NPY002  its resampling draws from this stream
    backend.cache_kv(prompt)
    found = asyncio.run(control.SMC(sampler)(N, 0.5, MAX_TOKENS + 1))
    texts, log_weights = [], []
    for context, log_weight in zip(found.contexts, found.log_weights, strict=True):
        texts.append(data(context[:-1]).decode(errors="replace"))   # the last is the end of text, or its weight is 0
        log_weights.append(float(log_weight))
    return matching(pattern, texts, log_weights), float(found.log_ml)


METHODS: dict[str, Method] = {
    "one free text": free,
    "`generate`, greedy": one_call,
    f"`smc_steer` or `smc_standard`, N={N}": steered,
    f"genlm-control, AWRS, N={N}": genlm,
}


def once(method: Method, lm: CachedTransformer, pattern: str) -> tuple[float, float, float, str]:
    """Return the score, log Z-hat, CPU seconds, and the error of a run that fails."""
    lm.clear()
    start = time.process_time()
    error = ""
    try:
        score, log_ml = method(lm, pattern)
    except Exception as raised:                     # other libraries raise errors of any type
        score, log_ml = 0.0, -math.inf
        error = f"{type(raised).__name__}: {raised}"
    return score, log_ml, time.process_time() - start, error


def mean(values: list[float]) -> str:
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    return f"{np.mean(values):.2f} +- {error:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patterns", type=Path, required=True, metavar="FILE", help="CSV file with a column regex")
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table to this file as JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with options.patterns.open(newline="", encoding="utf-8") as file:
        patterns = [row["regex"] for row in csv.DictReader(file)]
    order = np.random.default_rng(options.seed).permutation(len(patterns))
    chosen = [patterns[i] for i in order[: options.number]]
    methods = dict(METHODS)
    if peers.genlm_control is None:
        print(peers.installed())
        methods.popitem()
    lm = CachedTransformer.from_pretrained("smollm2", engine="transformers")
    for method in methods.values():
        once(method, lm, "[a-c]{2}")                # the first pass of a process is slower
    found = {name: list[tuple[float, float, float, str]]() for name in methods}
    for pattern in chosen:
        for name, method in methods.items():
            found[name].append(once(method, lm, pattern))
            if error := found[name][-1][3]:
                print(f"{name}, {pattern[:50]}: {error[:100]}")
    masked = [isinstance(constraint_of(pattern), Regex) for pattern in chosen]
    rows = []
    for name, runs in found.items():
        scores = [score for score, _, _, _ in runs]
        seconds = [second for _, _, second, _ in runs]
        part = [score for score, of_regex in zip(scores, masked, strict=True) if of_regex]
        per_right = f"{sum(seconds) / sum(scores):.2f}" if sum(scores) else "-"
        rows.append([name, mean(scores), mean(part), mean(seconds), f"{np.median(seconds):.2f}", per_right])
    columns = ["method", "right", f"of the {sum(masked)} that Regex takes", "CPU s", "median", "CPU s a right text"]
    table(f"{len(chosen)} patterns, at most {MAX_TOKENS} tokens", columns, rows)
    if len(methods) < len(METHODS):
        save(options.out, "torch", "transformers")
        return
    logs = {name: np.array([log_ml for _, log_ml, _, _ in runs]) for name, runs in found.items()}
    ours, theirs = [*METHODS][-2:]
    alive = np.isfinite(logs[ours]) & np.isfinite(logs[theirs])
    gaps = [*(logs[ours] - logs[theirs])[alive]]
    rows = [[name, f"{np.isfinite(logs[name]).sum()}"] for name in (ours, theirs)]
    rows[0].append(mean(gaps))
    rows[1].append("")
    heads = ["method", "runs with a particle", f"log Z-hat over AWRS's, the {len(gaps)} patterns where both have one"]
    table("the same target: a matching text of at most so many tokens", heads, rows)
    save(options.out, "torch", "transformers", "genlm-control")


if __name__ == "__main__":
    main()
