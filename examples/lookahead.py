"""Lookahead: twists that estimate the tokens to come; some of them pay off and some do not.

A short story is worth more if it fulfils a wish, and only its end decides this. A twist guesses the value earlier.
*Critic*: the value of the text so far. *Rollout*: the value after the most probable continuation, for which the
language model runs more tokens. *Log mass*: the probability that the wish still comes true (`Lookahead`), read from a
table; an automaton must be able to express the wish.

What to look for: the target is the same for every twist. Every method gets as many particles as it can afford for about
the same number of tokens run through the model. A higher mean log Z-hat is therefore better. The results are:
- The table pays off where there are many dead ends (short words). It costs 200 tokens once.
- A table or a critic helps if the text needs words that the model would delay (dog, ball: two standard errors).
- If the named people are only a bonus, the survivors at the end are as good without a critic.
- A rollout costs particles. It pays off where one early and rare choice decides the rest, which the model then writes
  almost surely (pot, a word chosen for that: five standard errors). It did not pay off where its guess is one of many
  continuations (full stop).

    a sentence with a dog and a ball, 16 tokens (K=3, 10 runs)
      no twist  N=10    176 tokens  mean log Z-hat -30.70 +- 1.11
      critic    N=10    176 tokens  mean log Z-hat -26.65 +- 1.39
      log mass  N=10    176 tokens  mean log Z-hat -26.27 +- 1.68

    a sentence in words of at most 5 letters, 16 tokens (K=3, 10 runs)
      no twist  N=10    172 tokens  mean log Z-hat -14.97 +- 0.17
      log mass  N=10    165 tokens  mean log Z-hat -10.78 +- 0.28

    names many people, 16 tokens (K=3, 10 runs)
      no twist  N=10    166 tokens  mean log Z-hat   2.72 +- 0.17
      critic    N=10    166 tokens  mean log Z-hat   2.33 +- 0.22

    a place, and a pot in its story of 11 tokens (K=10, 10 runs)
      no twist  N=4     427 tokens  mean log Z-hat   0.59 +- 0.59
      rollout   N=2     423 tokens  mean log Z-hat   4.00 +- 0.00

    ends in a full stop, 6 tokens (K=3, 10 runs)
      no twist  N=10     73 tokens  mean log Z-hat   6.00 +- 1.64
      rollout   N=2      93 tokens  mean log Z-hat   4.75 +- 1.59
"""

import argparse
import re
from collections.abc import Callable

import numpy as np

from llmppl import CachedTransformer, ConstrainedText, Model, Regex, smc_steer
from llmppl.constraints import Index
from llmppl.models.lookahead import Lookahead, mean_next_token, rollout

STORY = "Once upon a time, there was a little girl named Lily. One day,"
WALK = f"{STORY} Lily and her mom went to the"
FAMILY = re.compile(r" (mom|dad|brother|sister|friend)")
WORDS = re.compile(r" (dog|ball)(?![a-z])")
NATS = 4.0                                              # cost of a missing word, for the critic
Wish = Callable[[str], float]
Make = Callable[[CachedTransformer], Model]


class Story(Model):
    """Text of `num_tokens` tokens after the prompt, worth exp(wish(text)). `guide(particle)` is the twist."""

    def __init__(
        self, lm: CachedTransformer, prompt: str, num_tokens: int, wish: Wish,
        guide: "Callable[[Story], float] | None" = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.start = self.context = lm.context(prompt)
        self.left, self.wish, self.guide = num_tokens, wish, guide

    def step(self) -> None:
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


class Planned(Model):
    """Place from the model's own distribution; one step then writes `left` more tokens at temperature 0.1."""

    def __init__(
        self, lm: CachedTransformer, left: int, wish: Wish, guide: "Callable[[Planned], float] | None" = None
    ) -> None:
        super().__init__()
        self.start = self.context = lm.context(WALK)
        self.left, self.wish, self.guide = left, wish, guide

    def step(self) -> None:
        if not self.s:
            self.write(1.0)
            if self.guide is not None:
                self.twist(self.guide(self))
            return
        for _ in range(self.left):
            self.write(0.1)
        self.score(self.wish(self.s))
        self.finish()

    def write(self, temperature: float) -> None:
        p = self.transformer(self.context)
        token = self.sample(p.masked(p.support.not_eos).tempered(temperature))
        self.s += token
        self.context += token


class Constrained(ConstrainedText):
    """Text in the language of an automaton that ends in EOS in time; `guide(particle)` is the twist."""

    def __init__(
        self, lm: CachedTransformer, index: Index, num_tokens: int,
        guide: "Callable[[Constrained], float] | None" = None,
    ) -> None:  # fmt: skip
        super().__init__(lm, STORY, index, end="eos", max_tokens=num_tokens)
        self.guide = guide

    def step(self) -> None:
        super().step()
        if self.guide is not None and not self.finished:
            self.twist(self.guide(self))


def critic(particle: Story) -> float:
    """Return the value of the text so far."""
    return particle.wish(particle.s)


def pilot(particle: Story | Planned) -> float:
    """Return the value of the text with its most probable continuation."""
    return particle.wish(rollout(particle.context, particle.left).text[len(particle.start.text) :])


def missing(particle: Constrained) -> float:
    """Return the critic's value of constrained text: minus NATS for each missing word."""
    return -NATS * (2 - len(set(WORDS.findall(particle.s))))


def log_mass(ahead: Lookahead) -> Callable[[Constrained], float]:
    """Return the twist of a table: the log-probability that the text will be complete in time."""
    return lambda particle: ahead.log_mass(particle.state, particle.must_end_by - particle.num_tokens)


def people(text: str) -> float:
    """Return 3 nats for each different member of family and friends in the text."""
    return 3.0 * len(set(FAMILY.findall(text)))


def pot(text: str) -> float:
    """Return 8 nats if the text names a pot."""
    return 8.0 * bool(re.search(r" pot(?![a-z])", text))


def full_stop(text: str) -> float:
    """Return 12 nats if the text ends in a full stop."""
    return 12.0 * text.endswith(".")


def tokens_run(lm: CachedTransformer, make: Make, N: int, K: int, seed: int) -> int:
    """Return the number of tokens that a run takes with an empty cache."""
    cold = CachedTransformer(lm.model, lm.tokenizer)
    smc_steer(make(cold), N, K, seed=seed)
    return cold.stats.tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    num_tokens, num_runs, wide, deep = (8, 2, (4, 2), (2, 3)) if args.quick else (16, 10, (10, 3), (4, 10))     # N, K

    lm = CachedTransformer.from_pretrained(args.lm)
    dist = mean_next_token(lm.context("Once upon a time"), 30 if args.quick else 200)
    both, short = (
        language.index(lm.vocab)
        for language in (
            Regex(r".* dog[ ,.].*") & Regex(r".* ball[ ,.].*") & Regex(r"( [a-zA-Z]+,?)*\."),
            Regex(r"( [a-zA-Z]{1,5},?)*\."),
        )
    )
    both_ahead, short_ahead = (Lookahead(index, dist, num_tokens, end="eos") for index in (both, short))
    tasks: dict[str, dict[str, Make]] = {
        f"a sentence with a dog and a ball, {num_tokens} tokens": {
            "no twist": lambda lm: Constrained(lm, both, num_tokens),
            "critic": lambda lm: Constrained(lm, both, num_tokens, missing),
            "log mass": lambda lm: Constrained(lm, both, num_tokens, log_mass(both_ahead)),
        },
        f"a sentence in words of at most 5 letters, {num_tokens} tokens": {
            "no twist": lambda lm: Constrained(lm, short, num_tokens),
            "log mass": lambda lm: Constrained(lm, short, num_tokens, log_mass(short_ahead)),
        },
        f"names many people, {num_tokens} tokens": {
            "no twist": lambda lm: Story(lm, STORY, num_tokens, people),
            "critic": lambda lm: Story(lm, STORY, num_tokens, people, critic),
        },
        "a place, and a pot in its story of 11 tokens": {
            "no twist": lambda lm: Planned(lm, 11, pot),
            "rollout": lambda lm: Planned(lm, 11, pot, pilot),
        },
        "ends in a full stop, 6 tokens": {
            "no twist": lambda lm: Story(lm, WALK, 6, full_stop),
            "rollout": lambda lm: Story(lm, WALK, 6, full_stop, pilot),
        },
    }
    for task, methods in tasks.items():
        N, K = deep if "place" in task else wide
        print(f"\n{task} (K={K}, {num_runs} runs)")
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
