"""Ends of texts: the effect of `end` of ConstrainedText on labels, short patterns and records, on two models.

    python benchmarks/ends.py                               # the embedded model and SmolLM2; three minutes of one core

*Labels*: each of sixteen sentences has the label that a reader gives it. The table counts the sentences for which the
model finds that label the likelier of two, summed over all spellings (`enumerate_exact`). *Patterns* and *records*:
eight particles, K=3, at most 20 and 40 tokens. The table has the particles left and the spread of log Z-hat over seeds.
It also has the share of the weight in texts that use all tokens, which grows if nothing but EOS lets a text end.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import transformers
from tables import machine, table

from llmppl import CachedTransformer, ConstrainedText, JsonSchema, Regex, enumerate_exact, smc_steer
from llmppl.lm import ENDS, End

LABELS = {
    "happy": ["Tim got a new bike", "Lily found her lost cat", "Sam ate a big cake", "The sun came out and we played",
              "Anna won the race", "Ben's friend gave him a gift", "They danced and sang", "Her mom hugged her"],
    "sad": ["Tim broke his bike", "Lily lost her cat", "Sam dropped his ice cream", "Nobody wanted to play with Anna",
            "Ben fell down and hurt his knee", "His dog was very sick", "They had to say goodbye", "Her toy was gone"],
}  # fmt: skip
PATTERNS = [
    ("Her name was", r" [A-Z][a-z]+"),
    ("Lily went to the", r"( [a-z]+){1,3}"),
    ("The cat was", r" [0-9]{1,2} years old"),
    ("Tom said:", r' "[A-Za-z ,]+[.!?]"'),
    ("The best number is", r" [0-9]+"),
    ("They had", r" (a|an|the|two) [a-z]+( [a-z]+)?"),
]
RECORD = JsonSchema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99},
                       "likes": {"enum": ["cats", "dogs", "cake"]}},
        "required": ["name", "age", "likes"],
        "additionalProperties": False,
    }
)  # fmt: skip
RECORDS = ["Tom is 7 years old and likes dogs. As JSON: ", "Lily, a girl of 5, loves cake. As JSON: "]
N, K = 8, 3


def labels(lm: CachedTransformer, end: End) -> tuple[int, float]:
    """Return how many labels are right, and the mean probability of the right label."""
    right = []
    for label, sentences in LABELS.items():
        for sentence in sentences:
            prompt = f"{sentence}. It made the child very"
            model = ConstrainedText(lm, prompt, [" happy", " sad"], end=end, max_tokens=4)
            right.append(enumerate_exact(model).by_text().get(f" {label}", 0.0))
    return sum(share > 0.5 for share in right), float(np.mean(right))


def steered(lm: CachedTransformer, tasks: Sequence[tuple[str, Any]], end: End, most: int, seeds: int) -> list[float]:
    """Return means: particles left, weight of texts that use all tokens, and spread of log Z-hat over seeds."""
    left, full, spread = [], [], []
    for prompt, constraint in tasks:
        index = constraint.index(lm.vocab)
        log_Zs = []
        for seed in range(seeds):
            model = ConstrainedText(lm, prompt, index, end=end, max_tokens=most)
            found = smc_steer(model, N, K, seed=seed, progress=False)
            left.append(len(found))
            log_Zs.append(found.log_ml)
            if found:
                full.append(sum(w for w, each in zip(found.weights, found, strict=True) if each.num_tokens == most))
        log_Zs = [each for each in log_Zs if each > -math.inf]
        spread.append(np.std(log_Zs, ddof=1) if len(log_Zs) > 1 else math.nan)
    return [float(np.mean(left)), float(np.mean(full)), float(np.nanmean(spread))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    print(machine("llmppl", "torch", "transformers", "numpy"), flush=True)
    patterns = [(prompt, Regex(pattern)) for prompt, pattern in PATTERNS]
    records = [(prompt, RECORD) for prompt in RECORDS]
    rows = []
    for name in (None, "smollm2"):
        lm = CachedTransformer.from_pretrained(name)
        for end in ENDS:
            count, share = labels(lm, end)
            left, full, spread = steered(lm, patterns, end, 20, options.seeds)
            kept, _, far = steered(lm, records, end, 40, options.seeds)
            rows.append([name or "embedded", end, f"{count} of 16 ({share:.2f})", f"{left:.1f} of {N}", f"{full:.2f}",
                         f"{spread:.1f}", f"{kept:.1f} of {N}", f"{far:.1f}"])  # fmt: skip
    columns = ["model", "end", "labels right", "patterns: left", "at the limit", "sd log Z-hat", "records: left", "sd"]
    table(f"Ends of texts, N={N}, K={K}, {options.seeds} seeds", columns, rows)


if __name__ == "__main__":
    main()
