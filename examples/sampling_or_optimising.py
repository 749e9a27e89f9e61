"""Sampling or optimising: what beam search finds, and what the texts are like that the same program stands for.

One program, two sentences in words of at most five letters, run in three ways. *Beam search* looks for the texts of
highest probability. *Steering* draws from the posterior. *Rejection* lets the model write and keeps what obeys; the
share it keeps is Z, which steering estimates from a few particles.

What to look for: beams are far more probable than the texts that the program stands for, and all alike: nearly the same
few words begin them, however many beams there are. Their lengths follow the width of the beam and not the posterior,
on whose mean length and mean log-probability steering and rejection agree. `docs/inference.md` has a program whose most
probable texts are much too short. Rejection throws most of its draws away; steering has 16 texts, all different, and
its Z is the estimate of one run: near the share that obeys after the first prompt, a quarter of it after the second.

    Once upon a time, there was ...
                          tokens  log prob  texts  different  beginnings
      beam search, N=1      15.0     -16.1      1          1           1
      beam search, N=4      15.8     -11.3      4          4           1
      beam search, N=16     17.4     -13.3     16         16           2
        the best of them    13.0      -9.3      1          1           1
      steering, N=16        17.1     -30.9     16         16           8
      rejection             17.6     -30.7     12         12          11
      12 of 200 plain draws obey; steering's estimate of Z is 0.042
        beam   ...a boy named Timmy. Timmy loved to play with his toys.
        beam   ...a boy named Timmy. Timmy loved to play with his toys all day long.
        drawn  ...a big hook. The hook was very small and seen the ocean.
        drawn  ...a young boy named Tim. One day, Tim saw a big truck in the park.

    One day, the old king ...
                          tokens  log prob  texts  different  beginnings
      beam search, N=1      35.0     -31.5      1          1           1
      beam search, N=4      19.0     -18.7      4          4           1
      beam search, N=16     21.9     -19.1     16         16           1
        the best of them    18.0     -16.9      1          1           1
      steering, N=16        22.4     -54.2     16         16           3
      rejection             21.0     -54.3      6          6           6
      6 of 200 plain draws obey; steering's estimate of Z is 0.007
        beam   ...went for a walk. He saw a big pile of pile of pile.
        beam   ...went for a walk in the park. He saw a big pile of grass.
        drawn  ...asked the big king, "What do you want?" The king said, "I want to joke up!"
        drawn  ...had a knot very well in the woods. It was very small and all right.
"""

import argparse

import numpy as np

from llmppl import CachedTransformer, Model, beam_search, importance_sampling, smc_steer
from llmppl.models.programs import short_words

PROMPTS = ["Once upon a time, there was", "One day, the old king"]
NUM_SENTENCES, MAX_TOKENS = 2, 60


class Sentences(Model):
    """A prompt goes on to the end of its second sentence, and `mask(text so far)` allows each token."""

    def __init__(self, lm, prompt, mask, propose=True):
        super().__init__()
        self.context, self.mask, self.propose = lm.context(prompt), mask, propose
        self.num_tokens = self.num_ends = 0
        self.log_prob = 0.0                             # of the text, under the language model alone

    def step(self):
        law, mask = self.transformer(self.context), self.mask(self.s)
        token = self.sample(law, proposal=law.masked(mask) if self.propose else None)
        self.condition(mask[token])
        self.log_prob += law.log_prob(token)
        self.s += token
        self.context += token
        self.num_tokens += 1
        self.num_ends += any(mark in str(token) for mark in ".!?")
        if self.num_ends == NUM_SENTENCES:
            self.finish()


def show(name, texts, weights=None):
    """A row: means over the texts, how many of them differ, and in how many ways they begin."""
    tokens, log_prob = np.average([(text.num_tokens, text.log_prob) for text in texts], axis=0, weights=weights)
    different = len({str(text) for text in texts})
    beginnings = len({" ".join(str(text).split()[:3]) for text in texts})
    print(f"  {name:20}{tokens:6.1f}{log_prob:10.1f}{len(texts):7}{different:11}{beginnings:12}")


def main():
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
        model, plain = (
            Sentences(lm, prompt, lambda text, start=prompt: fits(start + text) & go_on, propose)
            for propose in (True, False)
        )
        for N in widths:
            beams = [beam.particle for beam in beam_search(model, N, K, max_steps=MAX_TOKENS)]
            show(f"beam search, N={N}", beams)
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
