"""Keywords: one sentence that contains each of a few given words, as in CommonGen (Lin et al. 2020).

Three techniques work together. A *mask*: the automaton of "a sentence with a dog, a ball and a park" excludes tokens
after which the sentence could not contain them all in time. A *predicate*: no long word appears twice, which no
automaton of reasonable size can check. `where` tests only tokens that are drawn, and gives each its correct weight
(adaptive weighted rejection sampling). A *twist*: missing words count against a particle before it is too late.

What to look for: the target is the same for every twist, so a higher mean log Z-hat is a better sample of it. Without a
twist, nothing brings the words in until the mask forces them. Counting the missing words needs a number of nats for
each. `Lookahead` needs no such number, because it estimates how probable these words are in the remaining tokens. In
the first set, both twists are more than two standard errors above none. In the second set only the log mass is, and it
is as far above the counted words. Five runs are few.

    dog, ball, park (at most 24 tokens; N=20, K=3, 5 runs)
      no twist       mean log Z-hat  -25.5 +- 2.3   One day, Tim was playing in the garden when he saw a bumpy dog ...
      missing words  mean log Z-hat  -18.2 +- 1.6   One day, Tim went to the park with his mom and his dog, Lily ...
      log mass       mean log Z-hat  -18.7 +- 0.9   She had a red ball that she loved to play with in the park ...

    cat, tree, bird (at most 24 tokens; N=20, K=3, 5 runs)
      no twist       mean log Z-hat  -33.5 +- 1.3   The day was for a long time and it was so hot with her feet ...
      missing words  mean log Z-hat  -29.7 +- 2.0   One day, Tim saw a big dog with a small bird near his back ...
      log mass       mean log Z-hat  -21.8 +- 1.1   One day, Tim saw a big, mighty bird flying around and the tree ...
"""

import argparse
import functools
import operator
import re
from collections.abc import Callable

import numpy as np

from llmppl import CachedTransformer, Model, Regex, TokenIndex, smc_steer
from llmppl.constraints import DFA, Token
from llmppl.models.lookahead import Lookahead, mean_next_token

PROMPT = "Once upon a time, there was a little boy named Tim. He liked to play outside with his mom."
SENTENCE = r" [A-Z][a-z]*(,? [A-Za-z][a-z]*)*\."
CONCEPTS = [["dog", "ball", "park"], ["cat", "tree", "bird"]]
NATS = 4.0                                              # cost of a missing word, for the twist that counts them


Guide = Callable[["Keywords"], float]


class Keywords(Model):
    """Sentence of at most `num_tokens` tokens that contains every concept; `guide(particle)` is its twist."""

    def __init__(self, lm: CachedTransformer, index: TokenIndex, num_tokens: int, guide: Guide | None) -> None:
        super().__init__()
        self.context = lm.context(PROMPT)
        self.index, self.state, self.left = index, index.start, num_tokens
        self.guide = guide

    def step(self) -> None:
        p = self.transformer(self.context)
        fits = p.masked(self.index.mask_within(self.state, self.left))
        token = self.sample(p, proposal=fits.where(self.is_fresh))
        self.s += token
        self.context += token
        self.state = self.index.advance(self.state, token)
        self.left -= 1
        if not self.index.next_bytes(self.state):           # nothing can follow: it is complete
            self.finish()
        elif self.guide is not None:
            self.twist(self.guide(self))

    def is_fresh(self, token: Token) -> bool:
        """Check that no word of more than four letters appears twice, except a last word that may continue."""
        words = re.findall(r"[a-z]{5,}(?![a-z]|$)", (self.s + token).lower())
        return len(words) == len(set(words))


def sentence_with(concepts: list[str]) -> DFA:
    """Return the automaton of sentences that contain every concept as a word."""
    return functools.reduce(operator.and_, [Regex(rf".* {word}[ ,.].*") for word in concepts], Regex(SENTENCE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sets, num_tokens, num_runs, N, K = (CONCEPTS[:1], 14, 2, 4, 2) if args.quick else (CONCEPTS, 24, 5, 20, 3)

    lm = CachedTransformer.from_pretrained(args.lm)
    dist = mean_next_token(lm.context("Once upon a time"), 30 if args.quick else 500)
    for concepts in sets:
        index = sentence_with(concepts).index(lm.vocab)
        ahead = Lookahead(index, dist, num_tokens)
        found = [re.compile(rf" {word}[ ,.]") for word in concepts]
        guides = {
            "no twist": None,
            "missing words": lambda particle, found=found: -NATS * sum(not word.search(particle.s) for word in found),
            "log mass": lambda particle, ahead=ahead: ahead.log_mass(particle.state, particle.left),
        }
        print(f"\n{', '.join(concepts)} (at most {num_tokens} tokens; N={N}, K={K}, {num_runs} runs)")
        for name, guide in guides.items():
            model = Keywords(lm, index, num_tokens, guide)
            runs = [smc_steer(model, N, K, seed=seed) for seed in range(args.seed, args.seed + num_runs)]
            log_Z = np.array([run.log_ml for run in runs])
            mean, error = log_Z.mean(), log_Z.std(ddof=1) / np.sqrt(num_runs)
            best = max(runs, key=lambda run: run.log_ml).best
            print(f"  {name:14} mean log Z-hat {mean:6.1f} +- {error:.1f}  {best}")


if __name__ == "__main__":
    main()
