"""Birth date: a fact that a model knows, asked for in three ways.

These are the three panels of Fig. 1 of Kuchnik et al. 2023. The model continues freely, chooses from a few given dates,
or writes any date of the usual form. By default the fact is in the prompt, and the embedded model has to repeat it.
--paper asks for George Washington's birthday (February 22, 1732), which --lm NAME may know.

What to look for: free text answers something else, or in a form that a reader must interpret. A choice always has an
answer, whatever the alternatives to the right one are. The form alone asks for nothing but a date, and the rank of the
right date among all dates of the form shows how well the model knows it. If the right date is not among the first, its
rank is estimated from dates drawn uniformly from the form. It is the share of them that the model finds more probable,
times the number of all dates. Dates use the tokenizer's spelling.

    Lily's birthday was on Monday. Everyone was happy. Lily's birthday was on ...

      goes on    Monday and John had a car.
                 Monday.
                 the table and Ben could hear her mom told him what she had done.
      a choice    0.99  Monday *
                  0.01  Tuesday
                  0.00  Saturday
      a date       -2.1  Monday *
                   -7.1  Tuesday
                   -8.9  Sunday
                  -10.0  Saturday
                  -11.3  Wednesday
                 rank of the right one: 1 of 7

    George Washington was born on ... (--paper)

      goes on    all of his huge admiral and marvellous color.
                 de soft shaltico.
                 his return.
      a choice    0.81  July 4, 1732
                  0.19  March 4, 1789
                  0.00  February 22, 1732 *
                  0.00  February 22, 1733
      a date      -25.2  August 3, 2000
                  -25.8  August 3, 1000
                  -26.3  August 3, 3000
                  -27.0  August 3, 1500
                  -27.0  August 3, 2500
                 rank of the right one: about 7,200,000 of 13,200,000
"""

import argparse
import math
from itertools import islice
from re import escape

import numpy as np

from llmppl import CachedTransformer, Regex
from llmppl.queries import Match, Query, search

LONGEST = 20                                            # characters in a date
DAYS = "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"
MONTHS = ("January|February|March|April|May|June|July|August|September|October|November|December").split("|")
STORY = (
    "Lily's birthday was on Monday. Everyone was happy. Lily's birthday was on",
    ["Monday", "Tuesday", "Saturday"],                  # the right one first
    "|".join(f"({day})" for day in DAYS),
)
PAPER = (
    "George Washington was born on",
    ["February 22, 1732", "July 4, 1732", "February 22, 1733", "March 4, 1789"],
    f"({'|'.join(f'({month})' for month in MONTHS)}) [0-9]{{1,2}}, [0-9]{{4}}",
)


def rank(
    lm: CachedTransformer, prompt: str, form: Regex, right: str, found: list[Match], rng: np.random.Generator
) -> str:
    """Return the rank of the right date: exact if it is in `found`, else estimated from as many uniform draws."""
    texts = [str(match) for match in found]
    if f"{prompt} {right}" in texts:
        return f"{1 + texts.index(f'{prompt} {right}')}"
    start, days = lm.context(prompt), [f"{n}" for n in range(10)] + [f"{n:02}" for n in range(100)]
    dates = [f" {rng.choice(MONTHS)} {rng.choice(days)}, {rng.integers(10_000):04}" for _ in found]     # of PAPER
    drawn = [start + date for date in dates]
    log_probs = [context.log_prob_since(start) for context in [start + f" {right}", *drawn]]
    better = np.mean(np.array(log_probs[1:]) > log_probs[0])
    return f"about {float(f'{max(len(found) + 1, better * size(form)):.2g}'):,.0f}"


def size(form: Regex) -> int:
    return sum(form.count(length) for length in range(LONGEST + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--paper", action="store_true", help="George Washington's birthday")
    args = parser.parse_args()
    most = 50 if args.quick else 200

    lm = CachedTransformer.from_pretrained(args.lm)
    prompt, choices, form = PAPER if args.paper else STORY
    given, right = escape(prompt), choices[0]           # escaped in patterns
    print(f"{prompt} ...\n")

    def shown(match: Match) -> str:
        text = str(match)[len(prompt) + 1 :]
        return text + " *" * (text == right)

    sentence = Query(lm, rf"{given}[^.!?\n]+[.!?]", prefix=prompt, end="prefix", max_tokens=20)
    for heading, match in zip(["goes on", "", ""], sentence.samples(seed=args.seed), strict=False):
        print(f"  {heading:10} {shown(match)}")

    options = list(search(lm, f"{given} ({'|'.join(map(escape, choices))})", prefix=prompt, end="prefix"))
    total = sum(math.exp(match.log_prob) for match in options)
    for heading, match in zip(["a choice", "", "", ""], options, strict=False):
        print(f"  {heading:10} {math.exp(match.log_prob) / total:5.2f}  {shown(match)}")

    dates = search(lm, f"{given} ({form})", prefix=prompt, tokenization="canonical", end="prefix")
    found = list(islice(dates, most))
    for heading, match in zip(["a date", "", "", "", ""], found, strict=False):
        print(f"  {heading:10} {match.log_prob:6.1f}  {shown(match)}")
    rng, regex = np.random.default_rng(args.seed), Regex(form)
    print(f"  {'':10} rank of the right one: {rank(lm, prompt, regex, right, found, rng)} of {size(regex):,}")


if __name__ == "__main__":
    main()
