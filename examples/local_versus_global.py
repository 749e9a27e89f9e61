"""Local and global: one constraint at three levels, compared with the exact posterior.

The text is one of a few choices, given by a regular expression. *Local masking* draws each token from those that fit,
without a weight. The *masked proposal* draws in the same way, and weighs the draw by the probability that the model's
token fits. *Plain conditioning* draws from the model itself and rejects texts that do not fit. The truth is the sum
over all tokenisations of the choices (`enumerate_exact`).

What to look for: local masking is wrong for any number of particles. Its mean is far from the truth, and so is each
run. The masked proposal is nearer, and comes as near as you like with more particles (--particles). Steering tries
different tokens and never the same twice. Three choices have so few tokenisations that 20 particles contain all that
matter, so steering is exact to three places. Plain conditioning is also right if any draw survives. But with Z =
0.0013, none of 800 draws fits. Each column is the mean posterior over the runs that are alive. The distance is the mean
total variation to the truth.

    Lily saw ... (40 runs of 20 particles; Z = 0.0013)

                                  truth            local           masked  masked, steered            plain
      ... a big dog.              0.454            0.788            0.535            0.454              nan
      ... a big cake.             0.010            0.139            0.016            0.010              nan
      ... it.                     0.536            0.074            0.449            0.536              nan
      distance                                     0.463            0.202            0.000              nan
      runs alive                                      40               40               40                0

    Tom went to the ... (40 runs of 20 particles; Z = 0.16)

                                  truth            local           masked  masked, steered            plain
      ... park with Lily.         0.000            0.244            0.000            0.000            0.000
      ... park to play.           0.044            0.100            0.049            0.044            0.050
      ... store.                  0.956            0.656            0.951            0.956            0.950
      distance                                     0.304            0.031            0.000            0.078
      runs alive                                      40               40               40               38
"""

import argparse
from collections.abc import Callable
from typing import Literal

import numpy as np

from llmppl import EOS, CachedTransformer, Model, Particles, Regex, enumerate_exact, importance_sampling, smc_steer
from llmppl.constraints import TokenIndex
from llmppl.distributions import Floats

CASES = [
    ("Lily saw", [" a big dog.", " a big cake.", " it."]),
    ("Tom went to the", [" park with Lily.", " park to play.", " store."]),
]
Level = Literal["local", "masked", "plain"]


class Choice(Model):
    """Text in the language of `index`, at one of three levels."""

    def __init__(self, lm: CachedTransformer, prompt: str, index: TokenIndex, level: Level) -> None:
        super().__init__()
        self.context, self.index, self.state, self.level = lm.context(prompt), index, index.start, level

    def step(self) -> None:
        p, mask = self.transformer(self.context), self.index.mask(self.state)
        if self.level == "local":
            token = self.sample(p.masked(mask))
        elif self.level == "masked":
            token = self.sample(p, proposal=p.masked(mask))
        else:
            token = self.sample(p)
            self.condition(mask[token])
        if token == EOS:
            return self.finish()
        self.s += token
        self.context += token
        self.state = self.index.advance(self.state, token)
        if not self.index.next_bytes(self.state):           # complete, and nothing can follow: no EOS needed
            self.finish()


Run = Callable[[Choice, int, int], Particles[Choice]]   # runs a model with N and a seed
METHODS: dict[str, tuple[Level, Run]] = {               # heading: level, how it is run
    "local": ("local", lambda model, N, seed: importance_sampling(model, N, seed=seed)),
    "masked": ("masked", lambda model, N, seed: importance_sampling(model, N, seed=seed)),
    "masked, steered": ("masked", lambda model, N, seed: smc_steer(model, N, 3, seed=seed)),
    "plain": ("plain", lambda model, N, seed: importance_sampling(model, N, seed=seed)),
}


def probabilities(posterior: Particles[Choice], texts: list[str]) -> Floats:
    """Return the posterior probabilities as an array of shape (number of texts,)."""
    found = posterior.by_text()
    return np.array([found.get(text, 0.0) for text in texts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--particles", type=int, default=20)
    args = parser.parse_args()
    cases, num_runs, N = (CASES[:1], 5, 5) if args.quick else (CASES, 40, args.particles)

    lm = CachedTransformer.from_pretrained(args.lm)
    for prompt, texts in cases:
        index = Regex("|".join(text.replace(".", "[.]") for text in texts)).index(lm.vocab)
        exact = enumerate_exact(Choice(lm, prompt, index, "masked"))
        truth = probabilities(exact, texts)
        print(f"\n{prompt} ... ({num_runs} runs of {N} particles; Z = {np.exp(exact.log_ml):.2g})\n")
        print(f"  {'':26}{'truth':>7}" + "".join(f"{name:>17}" for name in METHODS))
        means, distances, alive = [], [], []
        for level, run in METHODS.values():
            model = Choice(lm, prompt, index, level)
            runs = [run(model, N, seed) for seed in range(args.seed, args.seed + num_runs)]
            found = np.array([probabilities(posterior, texts) for posterior in runs if len(posterior)])
            alive.append(len(found))
            means.append(found.mean(axis=0) if len(found) else np.full(len(texts), np.nan))
            distances.append(0.5 * np.abs(found - truth).sum(axis=1).mean() if len(found) else np.nan)
        for i, text in enumerate(texts):
            print(f"  ...{text:23}{truth[i]:7.3f}" + "".join(f"{mean[i]:17.3f}" for mean in means))
        print(f"  {'distance':33}" + "".join(f"{distance:17.3f}" for distance in distances))
        print(f"  {'runs alive':33}" + "".join(f"{number:17}" for number in alive))


if __name__ == "__main__":
    main()
