"""Sampling or optimising: the texts of beam search, and typical texts of the same program.

One program writes two sentences in words of at most five letters. It runs in three ways. *Beam search* looks for the
texts of highest probability. *Steering* draws from the posterior. *Rejection* lets the model write and keeps the texts
that obey. The share that it keeps is Z, which steering estimates from a few particles.

What to look for: the best beam is far more probable than typical texts of the program. Beams are alike: for any number
of beams, nearly the same few words begin them. After the second prompt the best beam is much shorter than drawn texts
are on average. The 14 beams after the first two all begin with "came to visit the old man" and continue about him.

Rejection discards most of its draws. Steering has 16 texts, all different; its means and its Z are the estimates of one
run of few particles. After the first prompt its means are near the means of rejection, and its Z is near the share of
more draws (35 of 1000). After the second prompt the comparison has only 2 draws that obey (19 of 1000 had means of 18.4
tokens and -41.4). Seven other seeds of steering had means of 15 to 22 tokens and a Z of 0.013 to 0.029.

    Once upon a time, there was ...
                          tokens  log prob  texts  different  beginnings
      beam search, N=1      17.0     -17.0      1          1           1
      beam search, N=4      16.2     -10.7      4          4           3
      beam search, N=16     16.7     -11.7     16         16           4
        the best of them    14.0      -8.5      1          1           1
      steering, N=16        15.3     -28.3     16         16           8
      rejection             15.8     -25.8     11         11           9
      11 of 200 plain draws obey; steering's estimate of Z is 0.038
        beam   ...a boy named Timmy. Timmy loved to play with his toy cars.
        beam   ...a boy named Timmy. Timmy loved to play with his toys.
        drawn  ...a car named Bob. Bob loved to ride at the park and watch the micap.
        drawn  ...a boy named Timmy. Timmy loved to play with his blue ball with his ball.

    One day, the old king ...
                          tokens  log prob  texts  different  beginnings
      beam search, N=1      12.0      -9.4      1          1           1
      beam search, N=4      21.8     -18.6      4          4           1
      beam search, N=16     20.7     -17.5     16         16           3
        the best of them    12.0      -9.4      1          1           1
      steering, N=16        18.2     -42.5     16         16           5
      rejection             21.5     -36.1      2          2           2
      2 of 200 plain draws obey; steering's estimate of Z is 0.024
        beam   ...was very sad. He didn't know what to do.
        beam   ...was very upset. He didn't know what to do.
        drawn  ...asked his nail to take care of the flag. He said, "No!
        drawn  ...saw how big the mess was. He was not happy.
"""

import argparse
from collections.abc import Callable, Sequence

import numpy as np

from llmppl import CachedTransformer, Model, beam_search, importance_sampling, smc_steer
from llmppl.distributions import Floats, Mask
from llmppl.models.programs import short_words

PROMPTS = ["Once upon a time, there was", "One day, the old king"]
NUM_SENTENCES, MAX_TOKENS = 2, 60


class Sentences(Model):
    """Two sentences after a prompt, where `mask(prompt and text so far)` gives the allowed tokens."""

    def __init__(self, lm: CachedTransformer, prompt: str, mask: Callable[[str], Mask], propose: bool) -> None:
        super().__init__()
        self.context, self.prompt, self.mask, self.propose = lm.context(prompt), prompt, mask, propose
        self.num_tokens = self.num_ends = 0
        self.log_prob = 0.0                             # of the text, under the free language model

    def step(self) -> None:
        dist, mask = self.transformer(self.context), self.mask(self.prompt + self.s)
        token = self.sample(dist, proposal=dist.masked(mask) if self.propose else None)
        self.condition(mask[token])
        self.log_prob += dist.log_prob(token)
        self.s += token
        self.context += token
        self.num_tokens += 1
        self.num_ends += any(mark in str(token) for mark in ".!?")
        if self.num_ends == NUM_SENTENCES:
            self.finish()


def show(name: str, texts: Sequence[Sentences], weights: Floats | None = None) -> None:
    """Print a row: means over the texts, the number of different texts, and the number of beginnings."""
    tokens, log_prob = np.average([(text.num_tokens, text.log_prob) for text in texts], axis=0, weights=weights)
    different = len({str(text) for text in texts})
    beginnings = len({" ".join(str(text).split()[:3]) for text in texts})
    print(f"  {name:20}{tokens:6.1f}{log_prob:10.1f}{len(texts):7}{different:11}{beginnings:12}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prompts, widths, K, draws = (PROMPTS[:1], [1, 4], 2, 20) if args.quick else (PROMPTS, [1, 4, 16], 4, 200)

    lm = CachedTransformer.from_pretrained(args.lm)
    fits, go_on = short_words(lm.vocab, 5), lm.vocab.not_eos
    for prompt in prompts:
        print(f"\n{prompt} ...\n{'':22}tokens  log prob  texts  different  beginnings")
        model, plain = (Sentences(lm, prompt, lambda text: fits(text) & go_on, propose) for propose in (True, False))
        N, beams = widths[-1], list[Sentences]()
        for width in widths:
            beams = [beam.particle for beam in beam_search(model, width, K, max_steps=MAX_TOKENS)]
            show(f"beam search, N={width}", beams)
        show("  the best of them", beams[:1])
        posterior = smc_steer(model, N, K, seed=args.seed, max_steps=MAX_TOKENS)
        show(f"steering, N={N}", posterior, posterior.weights)
        kept = importance_sampling(plain, draws, seed=args.seed, max_steps=MAX_TOKENS)
        if len(kept):
            show("rejection", kept)
        print(f"  {len(kept)} of {draws} plain draws obey; steering's estimate of Z is {np.exp(posterior.log_ml):.3f}")
        drawn = posterior.sample(2, seed=args.seed)
        for name, text in [("beam", text) for text in beams[:2]] + [("drawn", text) for text in drawn]:
            print(f"    {name:6} ...{' '.join(str(text).split())}")


if __name__ == "__main__":
    main()
