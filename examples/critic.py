"""A language model as a critic: cheerful beginnings, and readers who should feel sad at the end.

The critic is the language model itself. After the text so far and " They were very", how probable is " sad", compared
with " sad" and " happy" together? This question is a context like any other. One forward pass answers it for all
particles. It costs only the tokens of the question, because the text is in the cache. The target is the model's own
text given that three such readers say "sad": p(text) p(sad | text)^3. This factor enters once, at the end (`score`).
Before that, the same opinion of the unfinished text only guides (`twist`). A mask cannot help here, because no token is
wrong.

What to look for (`--lm smollm2`): a sample makes readers sad with probability 0.11. Three methods increase this three-
to fourfold, equally within the errors: steering, the best of 16 samples by the critic, and weighted samples. Steering
needs 0.7 of the tokens and has the highest log Z-hat. Its draws also have the wanted distribution, whereas the best of
N is only the text that the critic prefers. A judge takes no part in the steering (the embedded model, with another
question). It gives all of them a lower probability than the critic does. A yes-or-no question did not work in a trial.
A model of 135M parameters gave the same answers for sad and for happy stories, but distinguished them by the next word.

    12 runs        critic's p(sad)   judge's p(sad)   log p(text)      log Z-hat       tokens run
      a sample (mean of 16)             0.11 ± 0.01     0.11 ± 0.01     -72.83 ± 1.44   -5.07 ± 0.37    606
      the best of N=16 by the critic    0.42 ± 0.06     0.36 ± 0.09     -72.41 ± 3.51   -5.07 ± 0.37    606
      importance sampling, N=16         0.36 ± 0.06     0.29 ± 0.07     -72.91 ± 1.88   -5.07 ± 0.37    606
      smc_steer, N=8, K=2, copies       0.44 ± 0.04     0.35 ± 0.07     -75.22 ± 2.29   -4.60 ± 0.32    434

      sampled:
        It was a sunny day. The  ...Children always play Early Weather enjoyed the air and played under the stars. ...
        It was her birthday. Lil ...kissed her. The cake wasn't too big, but she didn't say. She liked cake more.
      steered:
        It was a sunny day. The  ...As I navigated the building and viewed the landscape of the park, I reflect on ...
        It was her birthday. Lil ...feisty. Sadly, the cake crowed to death. She started to tell a long and ...
      ...
"""

import argparse
from collections.abc import Callable

import numpy as np

from llmppl import CachedTransformer, Model, Particles, importance_sampling, smc_steer
from llmppl.distributions import Floats
from llmppl.lm import Context

PROMPTS = [
    "It was a sunny day. The children laughed and danced with their dog.",
    "It was her birthday. Lily got a new toy and a big cake. She was happy and",
    "The little dog wagged his tail. He loved the park, his friends and his ball. Today",
]
CRITIC, JUDGE = " They were very", " Everyone felt very"
WORDS, READERS = (" sad", " happy"), 3


Weigh = Callable[["Particles[Told]"], Floats]


class Told(Model):
    """Story of `num_spans` spans of `length` tokens, weighed at its end by the readers' opinion."""

    def __init__(self, lm: CachedTransformer, prompt: str, num_spans: int, length: int) -> None:
        super().__init__()
        self.context, self.left, self.length = lm.context(prompt), num_spans, length
        self.log_prob = self.log_sad = 0.0

    def step(self) -> None:
        span = self.extend(self.context, max_tokens=self.length)
        self.s += span.text
        self.context, self.left = span.context, self.left - 1
        self.log_prob += span.log_prob
        self.log_sad = opinion(self.context + CRITIC)
        if span.ended == "eos" or self.left == 0:
            self.score(READERS * self.log_sad)
            self.finish()
        else:
            self.twist(READERS * self.log_sad)


def opinion(context: Context) -> float:
    """Return log p(sad | sad or happy) of a reader at the end of `context`."""
    strings = context.next_token().string()
    sad, happy = (strings.log_prob(word) for word in WORDS)
    return float(sad - np.logaddexp(sad, happy))


def best(particles: Particles[Told]) -> Floats:
    """Return weights with all the weight on the particle that the readers prefer."""
    return np.array([each.log_sad == max(other.log_sad for other in particles) for each in particles], dtype=float)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id, folder or file (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    num_spans, length, num_runs, N = (2, 4, 2, 4) if args.quick else (4, 6, 4, 16)
    lm, judge = CachedTransformer.from_pretrained(args.lm), CachedTransformer.from_pretrained()

    drawn, steered = [], []
    for prompt in PROMPTS[: 1 if args.quick else None]:
        model = Told(lm, prompt, num_spans, length)
        for seed in range(args.seed, args.seed + num_runs):
            drawn.append((prompt, importance_sampling(model, N, seed=seed)))
            steered.append((prompt, smc_steer(model, N // 2, 2, expand="copies", seed=seed)))
    methods: dict[str, tuple[list[tuple[str, Particles[Told]]], Weigh]] = {
        f"a sample (mean of {N})": (drawn, lambda particles: np.ones(len(particles))),
        f"the best of N={N} by the critic": (drawn, best),
        f"importance sampling, N={N}": (drawn, lambda particles: particles.weights),
        f"smc_steer, N={N // 2}, K=2, copies": (steered, lambda particles: particles.weights),
    }
    print(f"{len(drawn)} runs        critic's p(sad)   judge's p(sad)   log p(text)      log Z-hat       tokens run")
    for name, (runs, weigh) in methods.items():
        rows = []
        for prompt, particles in runs:
            cells = [
                [np.exp(each.log_sad), np.exp(opinion(judge.context(prompt + each.s + JUDGE))), each.log_prob]
                for each in particles
            ]
            weights = weigh(particles)
            rows.append([*(weights / weights.sum() @ cells), particles.log_ml, particles.stats.tokens])
        errors = np.std(rows, axis=0, ddof=1) / np.sqrt(len(rows))
        told = [f"{mean:.2f} ± {error:.2f}" for mean, error in zip(np.mean(rows, axis=0)[:-1], errors, strict=False)]
        print(f"  {name:34}" + "".join(f"{each:16}" for each in told) + f"{np.mean(rows, axis=0)[-1]:.0f}")
    for name, runs in {"sampled": drawn, "steered": steered}.items():
        print(f"\n  {name}:")
        for prompt, particles in runs[::num_runs]:
            print(f"    {prompt[:24]} ...{' '.join((particles[0] if runs is drawn else particles.best).s.split())}")


if __name__ == "__main__":
    main()
