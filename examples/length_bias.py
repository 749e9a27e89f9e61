"""Length bias: more beams find shorter texts; the length of drawn texts does not change.

Lew et al. 2023, Sec. 2, compare sampling with optimising. Every token costs probability, so the most probable text of
all is a very short one. A better search for this text finds shorter texts. Here the embedded model continues a prompt
until it ends its text (no constraint, no cut). One method is beam search of N beams, each extended by its N most
probable tokens (at most --most). The other is plain sampling, whose mean length is the model's own.

What to look for: after both prompts the best text gets shorter and more probable. All texts of a search are far from
the mean length of the model's texts. After the first prompt, 256 beams find no better text than 64.

    The moral of the story is ...
                    tokens  log prob
      N=1               18     -18.8  ...that it is important to be careful and not to touch things t
      N=4               11      -8.4  ...that it is important to be kind and help others.
      N=16              11      -8.4  ...that it is important to be kind and help others.
      N=64               7      -7.6  ...to always listen to your parents.
      200 samples     37.8 +- 3.7, median 20

    The Fed says ...
                    tokens  log prob
      N=1               51     -42.7  ..., "I will help you. I will help you." The little girl and th
      N=4               42     -25.3  ..., "Thank you, Ben. You are a good friend. You are a good fri
      N=16              30     -19.4  ..., "Thank you, Tim. You are a good friend." Tim and Sam are h
      N=64              30     -19.4  ..., "Thank you, Tim. You are a good friend." Tim and Sam are h
      ...
"""

import argparse

import numpy as np

from llmppl import EOS, CachedTransformer, Model, beam_search, importance_sampling

PROMPTS = ["The moral of the story is", "The Fed says"]
MAX_TOKENS = 400


class Text(Model):
    """Continuation of a prompt, to the end of the text."""

    def __init__(self, lm: CachedTransformer, prompt: str) -> None:
        super().__init__()
        self.context, self.num_tokens = lm.context(prompt), 0

    def step(self) -> None:
        token = self.sample(self.transformer(self.context))
        if token == EOS:
            return self.finish()
        self.s += token
        self.context += token
        self.num_tokens += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4, 16, 64], help="numbers of beams (1 4 16 64)")
    parser.add_argument("--most", type=int, default=64, help="extensions of a beam (64)")
    args = parser.parse_args()
    prompts, beams, draws = (PROMPTS[:1], [1, 4], 10) if args.quick else (PROMPTS, args.beams, 200)

    lm = CachedTransformer.from_pretrained(args.lm)
    for prompt in prompts:
        print(f"\n{prompt} ...\n{'':16}tokens  log prob")
        for N in beams:
            best = beam_search(Text(lm, prompt), N, min(N, args.most), max_steps=MAX_TOKENS)[0]
            text = " ".join(str(best).split())
            print(f"  N={N:<12}{best.particle.num_tokens:6}{best.log_joint:10.1f}  ...{text[:60]}", flush=True)
        drawn = importance_sampling(Text(lm, prompt), draws, seed=args.seed, max_steps=MAX_TOKENS)
        lengths = np.array([text.num_tokens for text in drawn])
        error, median = lengths.std() / np.sqrt(draws), np.median(lengths)
        print(f"  {f'{draws} samples':14}{lengths.mean():6.1f} +- {error:.1f}, median {median:g}")


if __name__ == "__main__":
    main()
