"""Conformity: the cost of a constraint for a model, compared between models.

The program draws a text by local masking. For every token it reports the probability that the model itself gives to the
allowed tokens (*mass*). It also reports the divergence KL(masked, model) = -log mass, and whether the model's most
probable token is allowed (Willard & Louf 2023, Sec. 5). A model that would obey anyway loses nothing. --lm and --other
take two models of your own. With the embedded model alone, the prompt makes the difference.

What to look for: the first prompt leads up to the constraint, and the first token after it almost conforms. After the
second prompt it does not. The rest of the text costs much after both prompts, and somewhat more after the second.

     "(Yes|No|Hello|Thank you|I am sorry|I am [a-z]+)[.!,]", 100 texts each

                                                first token            the others
    model                prompt                 mass   kl  agrees      mass   kl  agrees     kl of a text
    embedded             The girl smiled and sa 0.997   0.0  100%      0.343   4.0   49%          20.2
    embedded             The big house stood at 0.033   3.4    0%      0.283   4.3   28%          25.6
"""

import argparse

import numpy as np

from llmppl import EOS, CachedTransformer, Regex
from llmppl.constraints import TokenIndex

PATTERN = r' "(Yes|No|Hello|Thank you|I am sorry|I am [a-z]+)[.!,]"'
PROMPTS = ["The girl smiled and said,", "The big house stood at the sea."]


def conformity(lm: CachedTransformer, prompt: str, index: TokenIndex, seed: int) -> list[tuple[float, float, bool]]:
    """Draw a text by local masking, and return (mass, kl, agrees) for each of its tokens."""
    context, state, rng = lm.context(prompt), index.start, np.random.default_rng(seed)
    found = []
    while True:
        dist, mask = context.next_token(), index.mask(state)
        log_mass = np.logaddexp.reduce(dist.log_probs()[mask])
        found.append((np.exp(log_mass), -log_mass, mask[np.argmax(dist.log_probs())]))
        token = dist.masked(mask).sample(rng)
        if token == EOS:
            return found
        context, state = context + token, index.advance(state, token)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--other", help="hub id or folder of a second model (default: none)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    num_texts = 5 if args.quick else 100

    names = [args.lm] if args.other is None else [args.lm, args.other]
    print(f"{PATTERN}, {num_texts} texts each\n")
    print("                                            first token            the others")
    print("model                prompt                 mass   kl  agrees      mass   kl  agrees     kl of a text")
    for name in names:
        lm = CachedTransformer.from_pretrained(name)
        index = Regex(PATTERN).index(lm.vocab)
        for prompt in PROMPTS:
            texts = [conformity(lm, prompt, index, args.seed + i) for i in range(num_texts)]
            parts = [text[0] for text in texts], [found for text in texts for found in text[1:]]
            means = [np.mean(part, axis=0) for part in parts]
            cells = [f"{mass:.3f} {kl:5.1f} {agrees:5.0%}" for mass, kl, agrees in means]
            whole = np.mean([sum(kl for _, kl, _ in text) for text in texts])
            print(f"{(name or 'embedded')[-20:]:20} {prompt[:22]:22} {cells[0]:22} {cells[1]:22} {whole:8.1f}")


if __name__ == "__main__":
    main()
