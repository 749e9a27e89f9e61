"""Comparison of Willard and Louf (2023, Sec. 3.2): masks from an index, and masks by trying every token, with a model.

A language model writes a variable name at a temperature of 0.1, once with each kind of mask. At every step,
`rescanning` tests for every token whether the text with it can still match (`regex`, partial=True), as guidance did
then. `llmppl` compiles an index and looks masks up. Times are CPU seconds of one thread. They include compilation and
the model's forward passes, so the first line is a lower bound for any mask. The rescanning of 256 tokens is timed at
some lengths, and interpolated between them.

    python benchmarks/rescanning.py                                     # the embedded model, 4,096 tokens
    python benchmarks/rescanning.py --lm smollm2 --plots docs           # 49,152: a minute
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")       # before the import of numpy and torch

import numpy as np
import torch
from tables import machine, plot, table

from llmppl import CachedTransformer, Regex
from llmppl.queries import Rule

PROMPT, PATTERN, TEMPERATURE = "What is a good Python variable name? ", r"[^\W\d]\w*", 0.1
LENGTHS = [2**n for n in range(9)]


def written(lm: CachedTransformer, most: int) -> tuple[list[int], list[float], list[float]]:
    """Draw tokens of the pattern without an end; return them, and the CPU seconds of model and mask for each."""
    context, rule, rng = lm.context(PROMPT), Rule(temperature=TEMPERATURE), np.random.default_rng(0)
    ids, forward, masks = list[int](), list[float](), list[float]()
    begin = time.process_time()
    index = Regex(PATTERN).index(lm.vocab)
    state, compiling = index.start, time.process_time() - begin
    while len(ids) < most:
        begin = time.process_time()
        dist = context.next_token()
        dist.log_prob(0)
        middle = time.process_time()
        mask = index.mask(state)
        end = time.process_time()
        forward.append(middle - begin)
        masks.append(end - middle + compiling * (not ids))
        inside = mask.copy()
        inside[list(lm.vocab.eos_ids)] = False
        ids.append(int(rule(dist.masked(inside)).sample(rng)))
        begin = time.process_time()
        state = index.advance(state, ids[-1])
        masks[-1] += time.process_time() - begin
        context = context + ids[-1]
    return ids, forward, masks


def rescanned(lm: CachedTransformer, ids: list[int], lengths: list[int]) -> list[float]:
    """Return the CPU seconds of a mask by trying every token, after `length` - 1 tokens, for each of `lengths`."""
    import regex

    pattern = regex.compile(PATTERN)
    spelled = [token.decode("utf-8", "replace") for token in lm.vocab.tokens if token]
    seconds = []
    for n in lengths:
        before = b"".join(lm.vocab.tokens[id] for id in ids[: n - 1]).decode()
        begin = time.process_time()
        allowed = [bool(pattern.fullmatch(before + token, partial=True)) for token in spelled]
        seconds.append(time.process_time() - begin)
        assert any(allowed)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", metavar="NAME", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw rescanning.png there")
    parser.add_argument("--quick", action="store_true", help="16 tokens")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lengths = LENGTHS[:5] if options.quick else LENGTHS
    lm = CachedTransformer.from_pretrained(options.lm)
    lm.context("x").next_token().log_prob(0)            # excludes the cost of a first pass
    name = Path(options.lm).name if options.lm else "embedded"
    ids, forward, masks = written(lm, lengths[-1])
    steps = np.arange(1, lengths[-1] + 1)
    scans = np.interp(steps, lengths, rescanned(lm, ids, lengths))
    totals: dict[str, Any] = {
        "the model alone": np.cumsum(forward),
        "with llmppl's index": np.cumsum(np.add(forward, masks)),
        "with rescanning": np.cumsum(forward + scans),
    }
    print(machine("llmppl", "torch", "numpy", "regex", note="1 thread"))
    print(f"{PROMPT!r} {PATTERN}, T={TEMPERATURE}: {b''.join(lm.vocab.tokens[id] for id in ids[:12])!r} ...")
    rows = [[name, *(f"{total[n - 1]:.3g}" for n in lengths)] for name, total in totals.items()]
    rows.append(["masks of the index, ms", *(f"{1e3 * sum(masks[:n]):.3g}" for n in lengths)])
    table(f"CPU s to write a number of tokens ({name}, {len(lm.vocab):,} tokens)", ["", *map(str, lengths)], rows)

    def draw(axes: Any) -> None:
        for (label, total), style in zip(totals.items(), (":", "-", "--"), strict=True):
            axes.plot(steps, total, style, label=label)
        axes.set(xscale="log", yscale="log", xlabel="max_tokens", ylabel="CPU seconds")
        axes.set_title(f"{PATTERN}, {name}, {len(lm.vocab):,} tokens", fontsize=9)
        axes.legend(frameon=False, fontsize=8)

    plot(options, "rescanning", draw, (5, 3.2))


if __name__ == "__main__":
    main()
