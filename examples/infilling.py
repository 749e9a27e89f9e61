"""Infilling: the model fills the holes of a text; the holes have no fixed length.

A step of `Infilling` draws the length of a hole, then its tokens. It weighs the particle by the probability of the
fragment that follows. The text in a hole therefore also depends on the text after it. Left-to-right generation cannot
do this.

What to look for: fillings of different lengths make the rest of the sentence probable ("play with you"). The weights
are far from equal (ess is of 20 particles), because one step draws a whole hole. For this reason each particle is
extended K=10 times. Particles share their early choices.

    The dog was very[BLANK] because he had lost his[BLANK].
      log Z-hat -9.41, ess 6.5
      0.242  The dog was very sad because he had lost his name.
      0.223  The dog was very sad because he had lost his blood.
      0.170  The dog was very sad because he had lost his chest.
      ...
    "Please,[BLANK]," said the bear. "I want to[BLANK] with you."
      log Z-hat -15.66, ess 1.7
      0.755  "Please, little bunny," said the bear. "I want to play with you."
      0.060  "Please, please," said the bear. "I want to play with you."
      0.024  "Please, the rainbow," said the bear. "I want to play with you."
      ...
"""

import argparse

from llmppl import CachedTransformer, Infilling, smc_steer

TEMPLATES = [
    "To tell the truth, every[BLANK] he[BLANK] to[BLANK] another[BLANK].",      # Lew et al. 2023, Sec. 2.2
    "The dog was very[BLANK] because he had lost his[BLANK].",
    "Once upon a time, there was a little[BLANK] who lived in a[BLANK]. One day, she found a[BLANK] under the bed.",
    '"Please,[BLANK]," said the bear. "I want to[BLANK] with you."',
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    templates, N, K = (TEMPLATES[:2], 4, 5) if args.quick else (TEMPLATES, 20, 10)

    lm = CachedTransformer.from_pretrained(args.lm)
    for template in templates:
        posterior = smc_steer(Infilling(lm, template, max_tokens=30), N, K, seed=args.seed)
        print(f"\n{template}\n  log Z-hat {posterior.log_ml:.2f}, ess {posterior.ess:.1f}")
        for i in (-posterior.weights).argsort(kind="stable")[:5]:
            print(f"  {posterior.weights[i]:.3f}  {posterior[i]}")


if __name__ == "__main__":
    main()
