"""Hard constraints: texts in which no word has more than five letters.

Two programs that differ in one line. *Local masking* draws each token from those that fit and forgets how improbable
they were; it walks into places where all that fits is improbable. *Steering* draws the same way and weighs a text by
the probability that its tokens fit, so that texts which can go on in short words take over.

What to look for: both obey the constraint and have the same number of tokens, but by the language model's own
log-probability the steered texts are likelier (by 8 to 13 after the three prompts, nearly three standard errors of the
difference or more), and fewer of their words are the stump of a longer one. The mean is over the weighted particles;
+- is its standard error over independent runs.

    The Fed says ... (30 tokens, no word of more than five letters)

      local masking: mean log-probability -81.6 +- 1.8 (10 runs, N=10)
        ..., "You will join your team." The two of them all scoop-legs and begin to play on their team
        ..., "Yes, you can help me get into a huge tree. Be easy if you will help me." The cat can make the tree feel
        ..., "This is the best place to play with the weap men I ever see." The man never misss at all, but he is also

      steering: mean log-probability -69.7 +- 3.3 (10 runs, N=10)
        ..., "Yes, it's; not ugly. It would not be well done, it rrays along." So the Fed went away
        ...: "You are the best - the best troll ever! Can you tell me the best steal. Polas, you can use all
        ..., "Then we will catch our bug [...] We will both catch it." The bug likes their stick

    Once upon a time ... (30 tokens, no word of more than five letters)

      local masking: mean log-probability -57.3 +- 1.7 (10 runs, N=10)
      steering: mean log-probability -44.2 +- 1.6 (10 runs, N=10)

    The little girl ... (30 tokens, no word of more than five letters)

      local masking: mean log-probability -75.8 +- 1.1 (10 runs, N=10)
      steering: mean log-probability -67.8 +- 2.5 (10 runs, N=10)
"""

import argparse
from collections.abc import Callable

import numpy as np

from llmppl import CachedTransformer, Model, importance_sampling, smc_steer
from llmppl.distributions import Mask
from llmppl.models.programs import short_words

PROMPTS = ["The Fed says", "Once upon a time", "The little girl"]      # the first is that of Lew et al. 2023, Sec. 2


class ShortWords(Model):
    """A prompt goes on for `num_tokens` tokens, each of which `mask(prompt and text so far)` allows."""

    def __init__(
        self, lm: CachedTransformer, prompt: str, mask: Callable[[str], Mask], num_tokens: int, local: bool
    ) -> None:
        super().__init__()
        self.context = lm.context(prompt)
        self.prompt, self.mask, self.num_tokens, self.local = prompt, mask, num_tokens, local
        self.log_prob = 0.0                             # of the text, under the language model alone

    def step(self) -> None:
        p = self.transformer(self.context)
        allowed = p.masked(self.mask(self.prompt + self.s))
        if self.local:
            token = self.sample(allowed)                # no weight: where hardly anything fits costs nothing
        else:
            token = self.sample(p, proposal=allowed)    # weight: the probability that what p draws fits
        self.log_prob += p.log_prob(token)
        self.s += token
        self.context += token
        self.num_tokens -= 1
        if self.num_tokens == 0:
            self.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prompts, num_tokens, num_runs, N, K = (PROMPTS[:2], 12, 3, 4, 2) if args.quick else (PROMPTS, 30, 10, 10, 3)

    lm = CachedTransformer.from_pretrained(args.lm)
    fits, go_on = short_words(lm.vocab, 5), lm.vocab.not_eos
    for prompt in prompts:
        print(f"\n{prompt} ... ({num_tokens} tokens, no word of more than five letters)")
        for local in (True, False):
            model = ShortWords(lm, prompt, lambda text: fits(text) & go_on, num_tokens, local)
            log_probs, texts = [], []
            for seed in range(args.seed, args.seed + num_runs):
                posterior = importance_sampling(model, N, seed=seed) if local else smc_steer(model, N, K, seed=seed)
                log_probs.append(posterior.expect(lambda particle: particle.log_prob))
                texts.append(posterior.sample(seed=seed).s)
            mean, error = np.mean(log_probs), np.std(log_probs, ddof=1) / np.sqrt(num_runs)
            name = "local masking" if local else "steering"
            print(f"\n  {name}: mean log-probability {mean:.1f} +- {error:.1f} ({num_runs} runs, N={N})")
            for text in texts[:3]:
                print(f"    ...{' '.join(text.split())}")


if __name__ == "__main__":
    main()
