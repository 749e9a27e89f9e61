"""Looking ahead: twists that know something of the tokens to come, where they pay off and where they do not.

A story of 16 tokens is worth more the better it meets a wish, and that is settled only by its end. A twist guesses it
earlier. *Critic*: what the text is worth as it stands. *Rollout*: what it would be worth after its likeliest
continuation, for which the language model runs more tokens. *Log mass*: for a wish that an automaton can tell, the
probability that it still comes true (`Lookahead`), read from a table.

What to look for: the target is the same whatever the twist, and every method is given as many particles as it can
afford for about the same number of tokens run through the model; so the higher mean log Z-hat, the better.
"""

import argparse
import re

import numpy as np

from llmppl import CachedTransformer, ConstrainedText, Model, Regex, TokenIndex, smc_steer
from llmppl.models.lookahead import Lookahead, mean_law, rollout

PROMPT = "Once upon a time, there was a little girl named Lily. One day,"
FAMILY = re.compile(r" (mom|dad|brother|sister|friend)")


class Story(Model):
    """`num_tokens` tokens after the prompt; the text is worth exp(wish(text)). `guide(particle)` is the twist."""

    def __init__(self, lm, num_tokens, wish, guide=None):
        super().__init__()
        self.context = lm.context(PROMPT)
        self.left, self.wish, self.guide = num_tokens, wish, guide

    def step(self):
        p = self.transformer(self.context)
        token = self.sample(p, proposal=p.masked(p.support.not_eos))
        self.s += token
        self.context += token
        self.left -= 1
        if not self.left:
            self.score(self.wish(self.s))
            self.finish()
        elif self.guide is not None:
            self.twist(self.guide(self))


class Constrained(ConstrainedText):
    """Text in the language of an automaton, at its end by EOS in time."""

    def __init__(self, lm, index, num_tokens, ahead=None):
        super().__init__(lm, PROMPT, index, max_tokens=num_tokens, at_max="end")
        self.ahead = ahead

    def step(self):
        super().step()
        if self.ahead is not None and not self.finished:
            self.twist(self.ahead.log_mass(self.state, self.must_end_by - self.num_tokens))


def critic(particle):
    """What the text is worth as it stands."""
    return particle.wish(particle.s)


def pilot(particle):
    """What it will be worth if the rest is what the model finds likeliest."""
    return particle.wish(rollout(particle.context, particle.left).text[len(PROMPT) :])


def people(text):
    """Each of the family and friends who is named is worth 3 nats."""
    return 3.0 * len(set(FAMILY.findall(text)))


def ends_here(text):
    """A sentence that ends with the last token is worth 6 nats."""
    return 6.0 * text.endswith((".", "!", "?"))


def tokens_run(lm, make, N, K, seed):
    """How many tokens a run takes with an empty cache."""
    cold = CachedTransformer(lm.model, lm.tokenizer)
    return smc_steer(make(cold), N, K, seed=seed).stats.tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    num_tokens, num_runs, N, K = (6, 2, 4, 2) if args.quick else (16, 20, 20, 3)

    lm = CachedTransformer.from_pretrained(args.lm)
    law = mean_law(lm.context("Once upon a time"), 30 if args.quick else 500)
    words, short = (
        TokenIndex(Regex(pattern), lm.vocab)
        for pattern in (r"[a-zA-Z ,']* (dog|cat)[a-zA-Z ,']*\.", r"( [a-zA-Z]{1,5},?)*\.")
    )
    words_ahead, short_ahead = (Lookahead(index, law, num_tokens) for index in (words, short))
    tasks = {
        "names many people": {
            "no twist": lambda lm: Story(lm, num_tokens, people),
            "critic": lambda lm: Story(lm, num_tokens, people, critic),
            "rollout": lambda lm: Story(lm, num_tokens, people, pilot),
        },
        "ends a sentence with its last token": {
            "no twist": lambda lm: Story(lm, num_tokens, ends_here),
            "critic": lambda lm: Story(lm, num_tokens, ends_here, critic),
            "rollout": lambda lm: Story(lm, num_tokens, ends_here, pilot),
        },
        "a sentence with a dog or a cat": {
            "no twist": lambda lm: Constrained(lm, words, num_tokens),
            "log mass": lambda lm: Constrained(lm, words, num_tokens, words_ahead),
        },
        "a sentence of words of at most 5 letters": {
            "no twist": lambda lm: Constrained(lm, short, num_tokens),
            "log mass": lambda lm: Constrained(lm, short, num_tokens, short_ahead),
        },
    }
    for task, methods in tasks.items():
        print(f"\n{task} ({num_tokens} tokens, K={K}, {num_runs} runs)")
        budget = tokens_run(lm, methods["no twist"], N, K, args.seed)
        for name, make in methods.items():
            affordable = max(1, round(N * budget / tokens_run(lm, make, N, K, args.seed)))
            tokens = tokens_run(lm, make, affordable, K, args.seed)
            seeds = range(args.seed, args.seed + num_runs)
            log_Z = np.array([smc_steer(make(lm), affordable, K, seed=seed).log_ml for seed in seeds])
            mean, error = log_Z.mean(), log_Z.std(ddof=1) / np.sqrt(num_runs)
            print(f"  {name:8}  N={affordable:<3} {tokens:5} tokens  mean log Z-hat {mean:6.2f} +- {error:.2f}")


if __name__ == "__main__":
    main()
