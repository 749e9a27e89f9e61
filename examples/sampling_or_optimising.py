"""Sampling or optimising: what beam search finds, and what the texts are like that the same program stands for.

One program, two sentences in words of at most five letters, run in three ways. *Beam search* looks for the texts of
highest probability. *Steering* draws from the posterior. *Rejection* lets the model write and keeps what obeys; the
share it keeps is Z, which steering estimates from a few particles.

What to look for: the best beam is far more probable than the texts that the program stands for, and beams are alike:
nearly the same few words begin them, however many beams there are. After the second prompt their lengths follow the
width of the beam and not the posterior: the wide beam fills with long texts that repeat themselves, on average hardly
more probable than drawn ones. `docs/inference.md` has a program whose most probable texts are much too short.
Rejection throws most of its draws away; steering has 16 texts, all different, and its means and its Z are the estimates
of one run of few particles. After the first prompt they are near those of rejection. After the second its texts are
shorter, as three that begin with "." have most of the weight (seven other seeds had means of 17 to 32 tokens), and its
Z is two thirds of the share that obeys.

    Once upon a time, there was ...
                          tokens  log prob  texts  different  beginnings
      beam search, N=1      17.0     -16.5      1          1           1
      beam search, N=4      17.2     -11.4      4          4           2
      beam search, N=16     16.8     -10.9     16         16           3
        the best of them    13.0      -8.3      1          1           1
      steering, N=16        18.4     -28.7     16         16           6
      rejection             17.4     -30.5      8          8           8
      8 of 200 plain draws obey; steering's estimate of Z is 0.037
        beam   ...a boy named Timmy. Timmy loved to play with his toys.
        beam   ...a boy named Tim. Tim loved to play with his toys.
        drawn  ...a brave bald man named Bunny. They lived in a big house.
        drawn  ...a small girl named Lily. She loved to play with her toys, but one day she went to the park.

    One day, the old king ...
                          tokens  log prob  texts  different  beginnings
      beam search, N=1      18.0     -18.1      1          1           1
      beam search, N=4      32.2     -30.8      4          4           1
      beam search, N=16     38.8     -36.7     16         16           2
        the best of them    16.0     -15.8      1          1           1
      steering, N=16        14.6     -40.3     16         16           6
      rejection             20.0     -37.4      7          7           7
      7 of 200 plain draws obey; steering's estimate of Z is 0.022
        beam   ...came to visit him. He saw the old man and said hello.
        beam   ...came to the king and asked him what he was doing. The king asked him what he was doing.
        drawn  .... He had a blue flute more than his own.
        drawn  .... He had a blue flute in his mouth.
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
