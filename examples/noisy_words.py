"""Noisy words: the text that somebody meant to type, from a text with typing errors.

The prior is the language model. The likelihood is a noisy keyboard. Each small letter comes out right with probability
0.9, as one of its neighbours on the keyboard with 0.08, and as another letter with 0.02. All other characters come out
unchanged. A step draws a token of the intended text from the normalised product of two factors: the model's
probability, and how well the token explains the letters typed at its place. The weight includes the keyboard's
likelihood. The model continues the prompt, so it reads the same letters in the context of the words before them.
Through the weights, it also uses the words after them.

What to look for: all errors are corrected, also "huh" and "bef", which could be words. The other readings have the rest
of the weight, and show the model's certainty. An ess near 1 means that one reading has nearly all of the weight. At the
last text it is 1.4, because the best reading comes in two tokenisations. The posterior is no better than its prior: try
a word of your own that the small model does not know (--typed).

    After 'Once upon a time, there was a little girl.'

      typed She wanted to plsy with her dpg in the garden.
      log Z-hat -30.2, ess 1.0
      0.988 She wanted to play with her dog in the garden.
      0.008 She wanted to play with her toy in the garden.
      0.004 She wanted to play with her dig in the garden.

      typed She saw a big bitd in the trre.
      log Z-hat -30.1, ess 1.1
      0.972 She saw a big bird in the tree.
      0.028 She saw a big bird on the tree.
      0.000 She saw a big bite in the tree.

      typed She was so hapoy that she gave her mom a big huh.
      log Z-hat -30.3, ess 1.0
      1.000 She was so happy that she gave her mom a big hug.
      0.000 She was so happy that she gave her mum a big hug.
      0.000 She was so happy that she gave her mom a bit hug.

      typed She had a cat. The cst sat on the bef.
      log Z-hat -44.5, ess 1.4
      0.972 She had a cat. The cat sat on the bed.
      0.028 She had a cat. The cat sat on the bef.
      0.000 She had a cat. The cat sat on the vet.
"""

import argparse

import numpy as np

from llmppl import CachedTransformer, Model, Vocabulary, product, smc_steer
from llmppl.distributions import Floats
from llmppl.lm import TokenDistribution

PROMPT = "Once upon a time, there was a little girl."
TYPED = [
    " She wanted to plsy with her dpg in the garden.",
    " She saw a big bitd in the trre.",
    " She was so hapoy that she gave her mom a big huh.",
    " She had a cat. The cst sat on the bef.",
]
KEYS = ["qwertyuiop", "asdfghjkl", "zxcvbnm"]           # each row is half a key right of the row above
RIGHT, BESIDE, OTHER = 0.9, 0.08, 0.02


def channel() -> Floats:
    """Return the (128, 128) array log P(typed | meant), characters by their ASCII codes."""
    places = {key: (2 * x + y, 2 * y) for y, row in enumerate(KEYS) for x, key in enumerate(row)}
    probs = np.eye(128)
    for meant, (x, y) in places.items():
        others = [key for key in places if key != meant]
        near = [key for key in others if abs(places[key][0] - x) + abs(places[key][1] - y) <= 3]
        far = [key for key in others if key not in near]
        probs[ord(meant), ord(meant)] = RIGHT
        probs[ord(meant), [ord(key) for key in near]] = BESIDE / len(near)
        probs[ord(meant), [ord(key) for key in far]] = OTHER / len(far)
    with np.errstate(divide="ignore"):
        return np.log(probs)


def explained(vocab: Vocabulary, typed: str) -> Floats:
    """Return the (n, V) log-probability that a token at a place is typed as the text there; -inf past the end."""
    log_p, n = channel(), len(typed)
    lengths = np.array([len(token) if token.isascii() else 0 for token in vocab.tokens])
    letters = np.zeros((len(vocab), n), dtype=np.uint8)                 # (V, n), zeros after the token
    for i, token in enumerate(vocab.tokens):
        if 0 < lengths[i] <= n:
            letters[i, : lengths[i]] = list(token)
    log_probs = np.full((n, len(vocab)), -np.inf)
    for place in range(n):
        fits = (0 < lengths) & (lengths <= n - place)
        log_probs[place, fits] = 0.0
        for j in range(n - place):
            longer = fits & (lengths > j)
            log_probs[place, longer] += log_p[letters[longer, j], ord(typed[place + j])]
    return log_probs


class Meant(Model):
    """Intended text, as long as the typed text."""

    def __init__(self, lm: CachedTransformer, prompt: str, typed: str) -> None:
        super().__init__()
        self.context = lm.context(prompt)
        self.channel = tuple(TokenDistribution(lm.vocab, log_probs) for log_probs in explained(lm.vocab, typed))

    def step(self) -> None:
        dist, letters = self.transformer(self.context), self.channel[len(self.s)]
        token = self.sample(dist, proposal=product(dist, letters))
        self.score(letters.log_weights()[token])
        self.s += token
        self.context += token
        if len(self.s) == len(self.channel):
            self.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt", default=PROMPT, help="what stands before the text")
    parser.add_argument("--typed", help="a text of your own, with the space it begins with")
    args = parser.parse_args()
    typed, N, K = (TYPED[1:3], 4, 2) if args.quick else (TYPED, 30, 4)

    lm = CachedTransformer.from_pretrained(args.lm)
    print(f"After {args.prompt!r}")
    for text in [args.typed] if args.typed else typed:
        posterior = smc_steer(Meant(lm, args.prompt, text), N, K, seed=args.seed)
        print(f"\n  typed {text.strip()}\n  log Z-hat {posterior.log_ml:.1f}, ess {posterior.ess:.1f}")
        for meant, weight in [*posterior.by_text().items()][:3]:    # equal texts are merged
            print(f"  {weight:5.3f} {meant.strip()}")


if __name__ == "__main__":
    main()
