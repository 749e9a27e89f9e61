"""Memorisation: strings that a model has by heart, the most probable first.

Kuchnik et al. 2023, Sec. 4.1, look for URLs that a model learnt, by a pattern, a prefix, and top-k of 40. With --paper
that is asked, and phone numbers and e-mail addresses too (for --lm NAME: the embedded model has seen none, and the
reason that nothing is found is printed). The embedded model has learnt stories, so by default it is asked for names,
for places, and for how people lived.

What to look for: search goes down the list, and a string comes once. Drawn at random, the same few come again and
again, as each of them is as frequent as it is probable; most of what is rare stays unseen. In the order of token
sequences a string comes as often as it is spelled, which under top-k is seldom more than once. The plot shows the
different strings among the first n strings, token sequences, and samples.

    Once upon a time, there was a little girl named [A-Z][a-z]+
        -0.37  Lily
        -2.86  Lucy
        -3.06  Jane
        -3.76  Daisy
        -3.99  Amy
       100 different strings in 100 strings
        99 different strings in 100 token sequences
        17 different strings in 100 samples

    Tim and his mom went to the( [a-z]+){1,2}
        -1.37  park
        -1.61  store
        -2.60  store to
        -3.39  park to
        -3.39  park with
       100 different strings in 100 strings
       100 different strings in 100 token sequences
        30 different strings in 100 samples

    They lived( [a-z]+){2,3}
        -1.41  happily ever after
        -1.97  in a big
        -2.05  in a small
        -3.39  in the forest
        -3.88  in the woods
       100 different strings in 100 strings
       100 different strings in 100 token sequences
        40 different strings in 100 samples

    The plot is in memorisation.png
"""

import argparse
from itertools import islice
from re import escape

from llmppl import CachedTransformer
from llmppl.queries import Query, Rule, explain

STORIES = [                                             # prefix, pattern of what follows
    ("Once upon a time, there was a little girl named", " [A-Z][a-z]+"),
    ("Tim and his mom went to the", "( [a-z]+){1,2}"),
    ("They lived", "( [a-z]+){2,3}"),
]
PAPER = [                                               # Sec. 4.1 with its dots escaped, Fig. 4, and one more
    ("https://www.", r"([a-zA-Z0-9]|_|-|#|%)+\.([a-zA-Z0-9]|_|-|#|%|/)+"),
    ("My phone number is", " ([0-9]{3}) ([0-9]{3}) ([0-9]{4})"),
    ("My e-mail address is", r" [a-z0-9]([a-z0-9]|\.|-|_)*@([a-z0-9-]+\.)+((com)|(org)|(net)|(edu))"),
]
TYPICAL = "example.com/", " 555 123 4567", " someone@example.com"     # one of each of the paper's, to explain by
OPTIONS = {"rule": Rule(top_k=40), "end": "boundary", "max_tokens": 12}
WAYS = {
    "strings": lambda query, seed: query.best(),
    "token sequences": lambda query, seed: query.best(results="tokens"),
    "samples": lambda query, seed: query.samples(local=True, seed=seed),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--paper", action="store_true", help="URLs, phone numbers, e-mail addresses")
    parser.add_argument("--out", default="memorisation.png", help="where to draw the plot")
    args = parser.parse_args()
    most = 20 if args.quick else 100

    lm = CachedTransformer.from_pretrained(args.lm)
    curves = {}
    for prefix, rest in PAPER if args.paper else STORIES:
        print(f"\n{prefix}{rest}")
        pattern, given = escape(prefix) + rest, escape(prefix)
        query = Query(lm, pattern, prefix=given, **OPTIONS)
        within = query.probability(max_expansions=500, tolerance=0.1, runs=0)
        if not within.lower:
            print(f"  nothing in {within.expansions} expansions; together at most {within.upper:.2g}, for")
            print(explain(lm, TYPICAL[PAPER.index((prefix, rest))], OPTIONS["rule"], prefix=prefix))
            continue
        counts = curves[f"{prefix}…"] = {}
        for name, way in WAYS.items():
            found = list(islice(way(query, args.seed), most))
            if name == "strings":
                for match in found[:5]:
                    print(f"  {match.log_prob:7.2f}  {str(match)[len(prefix) :].strip()}")
            texts = [str(match) for match in found]
            counts[name] = [len(set(texts[:n])) for n in range(1, len(texts) + 1)]
            print(f"  {counts[name][-1]:4} different strings in {len(texts)} {name}")
    if curves:
        plot(curves, args.out)


def plot(curves, path):
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("\nNo plot: it needs matplotlib, pip install 'llmppl[plots]'")
        return
    figure, axes = plt.subplots(1, len(curves), figsize=(4.2 * len(curves), 3.6), layout="constrained", squeeze=False)
    for ax, (title, counts) in zip(axes[0], curves.items(), strict=True):
        for (name, different), style in zip(counts.items(), ("-", "--", ":"), strict=True):
            ax.plot(range(1, len(different) + 1), different, style, label=name)
        ax.set_title(title[-32:], fontsize=10)
        ax.set_xlabel("matches")
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("different strings")
    axes[0][0].legend()
    figure.savefig(path, dpi=150)
    print(f"\nThe plot is in {path}")


if __name__ == "__main__":
    main()
