"""A prompted proposal: tell the model in words what will come, and draw from its answer.

The target is the model's continuation of a prompt, given the sentence after it. That sentence names a thing that
nothing before it suggests. The model's own draws therefore seldom mention it, and the few draws that do have much of
the weight. A second context begins with a hint that names the thing. Tokens are drawn from the equal mixture of the two
contexts, and weighed by p / q, which is at most 2 for each token. The target does not change, and does not contain the
hint. One step draws all tokens. A selection between them would judge by p / q alone, which counts against the hint.

What to look for: both programs estimate the same Z. With the hint, more draws mention the thing. The mean of log Z-hat,
which on average cannot exceed log Z, is higher, and its variance over runs is smaller. The ess hardly shows this. A
hint helps less if the model uses it less. "This is the story of a frog. The frog was under the bed." gave mean -25.92
and variance 5.48. The same hint with a kitten gave -28.12 and 2.30, hardly better than no hint.

    The little girl looked under the bed. She saw a (two tokens). "What a nice kitten!" she said.
      plain     log Z-hat -28.13, variance  2.07, ess  3.5 of 50
                serious man, little bug, puddle, pet dog, king smiling, smiling face
      prompted  log Z-hat -26.83, variance  0.59, ess  4.1 of 50
                man crying, kitten, kitten, kitten, kitten, kitten

    The little girl looked under the bed. She saw a (two tokens). "What a nice frog!" she said.
      plain     log Z-hat -27.20, variance  4.23, ess  3.2 of 50
                serious man, little bug, puddle, big mud, king smiling, small pond
      prompted  log Z-hat -24.97, variance  1.93, ess  2.3 of 50
                man smiling, funny frog, beautiful frog, closer frog, nice frog, pale frog
"""

import argparse

import numpy as np

from llmppl import CachedTransformer, Model, importance_sampling, mixture

PROMPT = "The little girl looked under the bed. She saw a"
LATER = '. "What a nice {}!" she said.'
HINT = "A {0} was under the bed. She saw a {0}. "
THINGS = ["kitten", "frog"]


class Told(Model):
    """Continuation of a prompt by `num_tokens` tokens, given that `later` follows."""

    def __init__(self, lm: CachedTransformer, prompt: str, later: str, num_tokens: int, hint: str="") -> None:
        super().__init__()
        self.context, self.hinted = lm.context(prompt), lm.context(hint + prompt)
        self.later, self.num_tokens = later, num_tokens

    def step(self) -> None:
        for _ in range(self.num_tokens):
            dist, hinted = self.transformer(self.context), self.transformer(self.hinted)
            token = self.sample(dist, proposal=mixture([dist, hinted], [0.5, 0.5]))
            self.s += token
            self.context += token
            self.hinted += token
        self.observe(self.transformer(self.context).string(), self.later)
        self.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    things, num_runs, N = (THINGS[:1], 3, 5) if args.quick else (THINGS, 20, 50)

    lm = CachedTransformer.from_pretrained(args.lm)
    for thing in things:
        later = LATER.format(thing)
        print(f"\n{PROMPT} (two tokens){later}")
        for name, hint in {"plain": "", "prompted": HINT.format(thing)}.items():
            model = Told(lm, PROMPT, later, 2, hint)
            runs = [importance_sampling(model, N, seed=args.seed + i) for i in range(num_runs)]
            log_Z = np.array([run.log_ml for run in runs])
            ess = np.mean([run.ess for run in runs])
            print(f"  {name:9} log Z-hat {log_Z.mean():6.2f}, variance {log_Z.var(ddof=1):5.2f}, ess {ess:4.1f} of {N}")
            print(f"            {', '.join(run.sample(seed=args.seed).s.strip() for run in runs[:6])}")


if __name__ == "__main__":
    main()
