"""Everything at once: two prompts, a hard constraint and a soft preference in one program.

The program has twenty lines. It draws a token from the product of two distributions, masked to short words. It observes
the token under the second distribution. Every letter o in the text adds to the weight. You get another target by
changing a line.

What to look for: with a higher score for each o, the texts contain more of them, at some cost in likelihood. Every word
stays short, and every text continues both prompts. The number before a text is its weight.

    The little girl went to the park and ...
    The old king went to the sea and ...

    each o scores 0: 0.4 o's on average, log Z-hat -12.32
      0.187 ... saw it.
      0.153 ... got there.
      0.141 ... felt happy.
      ...
    each o scores 1: 1.7 o's on average, log Z-hat -11.55
      0.199 ... got lost.
      0.100 ... asked for help.
      0.086 ... saw it.
      ...
    each o scores 2: 4.0 o's on average, log Z-hat -8.88
      0.222 ... saw lots of yummy food.
      0.206 ... found some food.
      0.161 ... got some food.
      ...
"""

import argparse

from llmppl import EOS, CachedTransformer, Model, product, smc_steer
from llmppl.models.programs import ends_sentence, short_words


class Combined(Model):
    """Sentence that continues two prompts in words of at most five letters, if possible with many o's."""

    def __init__(self, lm: CachedTransformer, prompts: list[str], liking: float) -> None:
        super().__init__()
        self.contexts = [lm.context(prompt) for prompt in prompts]
        self.fits = short_words(lm.vocab, 5)
        self.liking = liking

    def step(self) -> None:
        p, q = [self.transformer(context) for context in self.contexts]
        token = self.sample(p, proposal=product(p, q).masked(self.fits(self.s)))        # hard: every word is short
        self.observe(q, token)                                                          # and likely after both
        if token == EOS:
            return self.finish()
        self.score(self.liking * str(token).count("o"))                                 # soft: each o adds weight
        self.s += token
        self.contexts = [context + token for context in self.contexts]
        if ends_sentence(self.s):
            self.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    likings, N, K, max_steps = ([0.0, 2.0], 5, 3, 12) if args.quick else ([0.0, 1.0, 2.0], 100, 3, 25)

    lm = CachedTransformer.from_pretrained(args.lm)
    prompts = ["The little girl went to the park and", "The old king went to the sea and"]
    print(*(f"{prompt} ..." for prompt in prompts), sep="\n")
    for liking in likings:
        posterior = smc_steer(Combined(lm, prompts, liking), N, K, seed=args.seed, max_steps=max_steps)
        num_os = posterior.expect(lambda particle: particle.s.count("o"))
        print(f"\neach o scores {liking:g}: {num_os:.1f} o's on average, log Z-hat {posterior.log_ml:.2f}")
        for text, weight in [*posterior.by_text().items()][:4]:                 # equal texts are merged
            print(f"  {weight:.3f} ...{text}")


if __name__ == "__main__":
    main()
