"""A latent question: the prompt is latent, and the answer is observed.

The program draws a question from a list, with equal probabilities. It then observes the answer, one word per step. The
posterior over questions is the model's belief about the question that was asked. Only the question is drawn, so
`enumerate_exact` sums over the questions. `max_steps` gives the posterior after the first words.

What to look for: the beginning of an answer fits several questions, and more words move the posterior to one of them.
"I" fits four of them, "I want" is most probably about food, and "I want to go" about a place (that answer is left out
below). Steering with as many particles as there are questions misses some of them if it draws blindly
(`expand="copies"`, Algorithm 1). By default it has each of them once, and is exact.

      0  What is your name?
      1  Where are you going?
      2  Why are you sad?
      3  What do you want to eat?
      4  Can I play with you?
      5  Will you help me?

    after the words                         0      1      2      3      4      5
      I                                 0.128  0.272  0.269  0.253  0.017  0.062
      ... am                            0.157  0.369  0.366  0.086  0.004  0.017
      ... going                         0.012  0.960  0.002  0.024  0.001  0.002
      ... to                            0.012  0.958  0.002  0.025  0.001  0.002
      ... the                           0.006  0.983  0.000  0.009  0.000  0.001
      ... park.                         0.007  0.988  0.000  0.003  0.000  0.001
      smc_steer, N=6, K=2, copies: Z-hat / Z 1.08, total variation 0.210 on average
      smc_steer, N=6, K=2, distinct: Z-hat / Z 1.00, total variation 0.000 on average

    after the words                         0      1      2      3      4      5
      I                                 0.128  0.272  0.269  0.253  0.017  0.062
      ... want                          0.036  0.072  0.032  0.814  0.030  0.015
      ... some                          0.016  0.019  0.020  0.932  0.006  0.007
      ... cake.                         0.003  0.006  0.005  0.975  0.007  0.004
      smc_steer, N=6, K=2, copies: Z-hat / Z 0.85, total variation 0.238 on average
      smc_steer, N=6, K=2, distinct: Z-hat / Z 1.00, total variation 0.000 on average
      ...
"""

import argparse

import numpy as np

from llmppl import CachedTransformer, Model, Particles, Uniform, enumerate_exact, smc_steer
from llmppl.distributions import Floats

QUESTIONS = [
    "What is your name?",
    "Where are you going?",
    "Why are you sad?",
    "What do you want to eat?",
    "Can I play with you?",
    "Will you help me?",
]
ANSWERS = [
    "I am going to the park.",
    "I want some cake.",
    "I want to go home.",
    "Yes, you can.",
    "Yes, we can play together.",
]
SCENE = '"{}" asked the girl. The boy said, "'


class Asked(Model):
    """A question from a list, and its observed answer."""

    def __init__(self, lm: CachedTransformer, questions: list[str], answer: str) -> None:
        super().__init__()
        self.contexts = tuple(lm.context(SCENE.format(question)) for question in questions)
        self.words = answer.replace(" ", "\n ").split("\n")             # each with the space before it
        self.question: int | None = None

    def step(self) -> None:
        if self.question is None:
            self.question = self.sample(Uniform(0, len(self.contexts) - 1))
            self.context = self.contexts[self.question]
        word, *self.words = self.words
        self.observe(self.transformer(self.context).string(), word)
        self.context += word
        self.s += word
        if not self.words:
            self.finish()


def posterior(particles: Particles[Asked], number: int) -> Floats:
    """Return the (number,) posterior probability of each question."""
    return particles.expect(lambda particle: np.eye(number)[particle.question])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    answers, num_runs, N, K = (ANSWERS[:2], 5, 6, 2) if args.quick else (ANSWERS, 50, 6, 2)

    lm, number = CachedTransformer.from_pretrained(args.lm), len(QUESTIONS)
    print("\n".join(f"  {i}  {question}" for i, question in enumerate(QUESTIONS)))
    header = "".join(f"{i:7}" for i in range(number))
    for answer in answers:
        model = Asked(lm, QUESTIONS, answer)
        print(f"\n{'after the words':34}{header}")
        for t, word in enumerate(model.words, start=1):
            row = posterior(enumerate_exact(model, max_steps=t), number)
            print(f"  {'... ' * (t > 1) + word.strip():32}" + "".join(f"{p:7.3f}" for p in row))
        exact = enumerate_exact(model)
        for expand in ("copies", "distinct"):
            runs = [smc_steer(model, N, K, expand=expand, seed=args.seed + i) for i in range(num_runs)]
            error = np.mean([np.abs(posterior(run, number) - posterior(exact, number)).sum() / 2 for run in runs])
            Z = np.mean([np.exp(run.log_ml - exact.log_ml) for run in runs])
            print(f"  smc_steer, N={N}, K={K}, {expand}: Z-hat / Z {Z:.2f}, total variation {error:.3f} on average")


if __name__ == "__main__":
    main()
