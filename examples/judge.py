"""A judge: which of two answers is better, and how sure the judge is.

A judge that reads one order of the answers prefers a place. `orders=2` asks in both orders and averages, and `spread`
is the change between the two: where it is large, the judge has no opinion. `think=` sums over drafts of reasons.

What to look for (`--lm smollm2`): the spread. The judge knows little, and says so.

                                             better     P  spread   with drafts        helpful
    How many legs has a spider?          first    0.55   0.49   0.535 +- 0.061      0.98 of 2
    Name the capital of Italy.           first    0.52   0.46   0.727 +- 0.066      0.93 of 2
    Why is the sky blue?                 first    0.85   0.22    0.751 +- 0.04      0.94 of 2
"""

import argparse

from llmppl import CachedTransformer
from llmppl.decisions import choice, decide, score

PAIRS = [
    ("How many legs has a spider?", "A spider has eight legs.", "Spiders live in webs."),
    ("Name the capital of Italy.", "I like pizza very much.", "The capital of Italy is Rome."),
    ("Why is the sky blue?", "Air scatters blue light more than red light.", "Because it is."),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id, folder or file (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lm = CachedTransformer.from_pretrained(args.lm)
    drafts = 3 if args.quick else 8

    print("                                     better     P  spread   with drafts        helpful")
    for question, first, second in PAIRS:
        questions = {
            "better": choice("Which answer is better?", {"first": first, "second": second}),
            "helpful": score("How helpful is the first answer?", ["useless", "fair", "perfect"]),
        }
        decision = decide(lm, {"question": question}, questions, orders=2)
        thought = decide(lm, {"question": question}, questions, think=drafts, seed=args.seed)
        better, after, helpful = decision["better"], thought["better"], decision["helpful"]
        share = after.share(better.best)
        print(
            f"{question:36} {better.best:6} {better.probability:6.2f} {better.spread:6.2f}   "
            f"{str(share):>14} {helpful.expected:9.2f} of 2"
        )


if __name__ == "__main__":
    main()
