"""Benefit of batches for a critic: the same steering with a classifier called once per round, and once per text.

    python benchmarks/critics.py [--lm smollm2] [--runs 4]

The classifier is that of examples/sentiment.py, a torch pass through the language model itself, called for every token
that is tried (`smc_steer`, N=8, K=4, up to 16 tokens). Neither way evaluates a text twice. The cache of the language
model is warm, so the CPU seconds of a run are those of the classifier and the loop. Run with OMP_NUM_THREADS=1.
"""

import argparse
import functools
import importlib.util
import time
from pathlib import Path

import numpy as np

from llmppl import EOS, CachedTransformer, Model, batched, smc_steer

EXAMPLE = Path(__file__).parent.parent / "examples" / "sentiment.py"


class Story(Model):
    def __init__(self, lm, sadness):
        super().__init__()
        self.context, self.sadness, self.left = lm.context("Lily went to the park."), sadness, 16

    def step(self):
        token = self.sample(self.transformer(self.context))
        self.context += token
        self.s += token
        self.left -= 1
        if token == EOS or not self.left:
            self.score(2 * self.sadness(self.s))
            return self.finish()
        self.twist(2 * self.sadness(self.s))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id, folder or file (default: the embedded model)")
    parser.add_argument("--runs", type=int, default=4)
    args = parser.parse_args()
    spec = importlib.util.spec_from_file_location("sentiment", EXAMPLE)
    sentiment = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sentiment)

    lm = CachedTransformer.from_pretrained(args.lm, engine="transformers")
    classify = sentiment.classifier(lm)[0].function
    ways = {
        "once a round": lambda: batched(classify),
        "for each text": lambda: functools.cache(lambda text: classify([text])[0]),
    }
    rows = {name: [] for name in ways}
    for seed in range(args.runs):
        for name, make in [("", ways["once a round"]), *ways.items()]:
            critic = make()
            start = time.process_time()
            found = smc_steer(Story(lm, critic), N=8, K=4, seed=seed)
            seconds = time.process_time() - start
            if name:                                    # the first run warms up the language model
                calls = critic.cache_info().misses if name == "for each text" else found.stats.calls
                rows[name].append((seconds, calls, found.log_ml))
    for name, runs in rows.items():
        seconds, calls, _ = np.median(runs, axis=0)
        print(f"{name:14} {seconds:6.2f} CPU s, {calls:4.0f} calls")
    (one, other) = (np.array(runs) for runs in rows.values())
    print(f"ratio {np.median(other[:, 0] / one[:, 0]):.1f}; log Z-hat differs by {abs(one - other)[:, 2].max():.1g}")


if __name__ == "__main__":
    main()
