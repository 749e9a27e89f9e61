"""Hard constraints: texts in which no word has more than five letters.

Two programs differ in one line. *Local masking* draws each token from those that fit, and ignores how improbable they
were. It reaches places where every token that fits is improbable. *Steering* draws in the same way, and weighs a text
by the probability that its tokens fit. Texts that can continue in short words therefore win.

What to look for: both obey the constraint and have the same number of tokens. But by the language model's own
log-probability the steered texts are more probable: by 8 to 16 after the three prompts, and by 14 to 26 with --seed
100, since ten runs are few. Fewer of their words are the beginning of a longer one. The mean is over the weighted
particles; +- is its standard error over independent runs.

    The Fed says ... (30 tokens, no word of more than five letters)

      local masking: mean log-probability -74.0 +- 1.0 (10 runs, N=10)
        ..., "See, I am we loads. But I don't want to be loads. I guess you need to walk."
        ..., "We found it. We must worry. We will find it." They pack each other. They get out of the box. They stick
        ...: "Yes, you must stay until you have a very good resta whole day. Come come to your house and resta the

      steering: mean log-probability -66.3 +- 1.5 (10 runs, N=10)
        ..., "No, Max, it's not so fast.". He says, "No, it's mine. We are tired. We can
        ...: "Can I help you?" The fox says: "I will use an arm to small." The fox says: "I can use
        ..., "I'm glad you got to live by us." Tim says, "Thank you, Tim. You're the best hero ever. You're

    Once upon a time ... (30 tokens, no word of more than five letters)

      local masking: mean log-probability -59.5 +- 2.4 (10 runs, N=10)
      steering: mean log-probability -43.4 +- 1.0 (10 runs, N=10)

    The little girl ... (30 tokens, no word of more than five letters)

      local masking: mean log-probability -78.2 +- 1.4 (10 runs, N=10)
      steering: mean log-probability -66.3 +- 1.7 (10 runs, N=10)
"""

import argparse
from collections.abc import Callable

import numpy as np

from llmppl import CachedTransformer, Model, importance_sampling, smc_steer
from llmppl.distributions import Mask
from llmppl.models.programs import short_words

PROMPTS = ["The Fed says", "Once upon a time", "The little girl"]      # the first is from Lew et al. 2023, Sec. 2


class ShortWords(Model):
    """Continuation of a prompt by `num_tokens` tokens, each allowed by `mask(prompt and text so far)`."""

    def __init__(
        self, lm: CachedTransformer, prompt: str, mask: Callable[[str], Mask], num_tokens: int, local: bool
    ) -> None:
        super().__init__()
        self.context = lm.context(prompt)
        self.prompt, self.mask, self.num_tokens, self.local = prompt, mask, num_tokens, local
        self.log_prob = 0.0                             # of the text, under the free language model

    def step(self) -> None:
        p = self.transformer(self.context)
        allowed = p.masked(self.mask(self.prompt + self.s))
        if self.local:
            token = self.sample(allowed)                # no weight: rare fits cost nothing
        else:
            token = self.sample(p, proposal=allowed)    # weight: the probability that a token of p fits
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
