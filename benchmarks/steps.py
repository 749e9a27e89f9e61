"""Length of a step: a token, a word, a sentence or the whole text, at equal cost.

    python benchmarks/steps.py [--lm NAME] [--runs 12] [--steps token "whole text"]

Two programs have 24 tokens. *Short words* masks all words of more than five letters, with the exact weight. *Two
prompts* draws after one prompt and observes after another. The step does not change the target, only how often
inference may select. `smc_standard` runs N texts at every length. `smc_steer` opens the first token of a step, and
runs N K candidates to the end of a longer step, with half the N.

The table has the mean of log Z-hat, which is on average at most log Z, so higher is better. It also has the standard
deviation over runs, both with standard errors, and the tokens that a run put through the model.
"""

import argparse
import functools

import numpy as np

from llmppl import CachedTransformer, Model, smc_standard, smc_steer
from llmppl.models.programs import ends_sentence, short_words

NUM_TOKENS = 24
fits = functools.cache(short_words)
PROMPTS = ["The little girl went to the park and", "The old king went to the sea and"]


class Text(Model):
    """Text of 24 tokens, in steps that end where `ends(text of the step)` is true."""

    def __init__(self, lm, ends):
        super().__init__()
        self.context, self.ends, self.left = lm.context(PROMPTS[0]), ends, NUM_TOKENS

    def step(self):
        begun = len(self.s)
        while True:
            self.token()
            self.left -= 1
            if self.left == 0:
                return self.finish()
            if self.ends(self.s[begun:]):
                return None


class ShortWords(Text):
    def __init__(self, lm, ends):
        super().__init__(lm, ends)
        self.fits, self.go_on = fits(lm.vocab, 5), lm.vocab.not_eos

    def token(self):
        p = self.transformer(self.context)
        token = self.sample(p, proposal=p.masked(self.fits(PROMPTS[0] + self.s) & self.go_on))
        self.s += token
        self.context += token


class TwoPrompts(Text):
    def __init__(self, lm, ends):
        super().__init__(lm, ends)
        self.other = lm.context(PROMPTS[1])

    def token(self):
        p, q = self.transformer(self.context), self.transformer(self.other)
        token = self.sample(p, proposal=p.masked(p.support.not_eos))
        self.observe(q, token)
        self.s += token
        self.context, self.other = self.context + token, self.other + token


STEPS = {
    "token": lambda text: True,
    "word": lambda text: " " in text[1:],               # the token that starts the next word ends the step
    "sentence": ends_sentence,
    "whole text": lambda text: False,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id, folder or file (default: the embedded model)")
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=[*STEPS], help="by name (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lm = CachedTransformer.from_pretrained(args.lm)
    methods = {
        "smc_standard, N=16": dict.fromkeys(STEPS, lambda model, seed: smc_standard(model, 16, seed=seed)),
        "smc_steer, K=2": {
            name: lambda model, seed, N=N: smc_steer(model, N, 2, seed=seed)
            for name, N in zip(STEPS, (16, 8, 8, 8), strict=True)
        },
    }
    number = 0
    for program in (TwoPrompts, ShortWords):
        print(f"\n{program.__name__}: {args.runs} runs")
        print("                              mean of log Z-hat   standard deviation     tokens run")
        for method, runs in methods.items():
            for name in args.steps:
                model, number = program(lm, STEPS[name]), number + 1    # other seeds, so the cache helps nobody
                found = [runs[name](model, args.seed + 1000 * number + i) for i in range(args.runs)]
                log_Z, tokens = [each.log_ml for each in found], np.mean([each.stats.tokens for each in found])
                sd = np.std(log_Z, ddof=1)
                error, of_sd = sd / np.sqrt(args.runs), sd / np.sqrt(2 * (args.runs - 1))
                cells = f"{np.mean(log_Z):9.2f} ± {error:.2f}{sd:14.2f} ± {of_sd:.2f}{tokens:14.0f}"
                print(f"{method:20}{name:12}{cells}", flush=True)


if __name__ == "__main__":
    main()
