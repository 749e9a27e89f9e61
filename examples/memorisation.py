"""Memorisation: strings that a model knows by heart, the most probable first.

Kuchnik et al. 2023, Sec. 4.1, look for URLs that a model has learnt, by a pattern, a prefix, and top-k of 40. --paper
searches for these, and also for phone numbers and e-mail addresses. It is meant for --lm NAME: the embedded model has
seen none, and the program prints the reason why it finds nothing. The embedded model has learnt stories. By default the
program therefore searches for names, for places, and for the way people lived.

What to look for: search goes down the list, and each string appears once. Random draws repeat the same few strings,
because each string is as frequent as it is probable. Most of the rare strings never appear. In the order of token
sequences, a string appears once for each tokenisation; with top-k this is seldom more than once. The plot shows the
different strings among the first n strings, token sequences, and samples. --corpus FILE ... counts the strings that the
texts contain verbatim, with their prefix. In the texts that the embedded model has read, these are 29, 1 and 10 of the
100 strings. Of the different strings in 100 samples, they are 15, 1 and 8. --known is for a model that has read the
internet, and takes licences, prayers and digits.

    Once upon a time, there was a little girl named [A-Z][a-z]+
        -0.37  Lily
        -2.86  Lucy
        -3.06  Jane
        -3.76  Daisy
        -3.99  Amy
       100 different strings in 100 strings
        99 different strings in 100 token sequences
        19 different strings in 100 samples

    Tim and his mom went to the( [a-z]+){1,2}
        -1.37  park
        -1.61  store
        -2.60  store to
        -3.39  park to
        -3.39  park with
       100 different strings in 100 strings
       100 different strings in 100 token sequences
        38 different strings in 100 samples

    They lived( [a-z]+){2,3}
        -1.41  happily ever after
        -1.97  in a big
        -2.05  in a small
        -3.39  in the forest
        -3.88  in the woods
       100 different strings in 100 strings
       100 different strings in 100 token sequences
        46 different strings in 100 samples

    The plot is in memorisation.png
"""

import argparse
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from llmppl import CachedTransformer
from llmppl.queries import Matches, Query, Rule, explain

STORIES = [                                             # prefix, pattern of the text after it
    ("Once upon a time, there was a little girl named", " [A-Z][a-z]+"),
    ("Tim and his mom went to the", "( [a-z]+){1,2}"),
    ("They lived", "( [a-z]+){2,3}"),
]
PAPER = [                                               # Sec. 4.1 with its dots escaped, Fig. 4, and one more
    ("https://www.", r"([a-zA-Z0-9]|_|-|#|%)+\.([a-zA-Z0-9]|_|-|#|%|/)+"),
    ("My phone number is", " ([0-9]{3}) ([0-9]{3}) ([0-9]{4})"),
    ("My e-mail address is", r" [a-z0-9]([a-z0-9]|\.|-|_)*@([a-z0-9-]+\.)+((com)|(org)|(net)|(edu))"),
]
KNOWN = [                                               # prefix, its known continuation, pattern of that
    ("Our Father, who art in heaven, hallowed be", " thy name", "( [a-z]+){2}"),
    ("Permission is hereby granted, free of charge, to any person obtaining a", " copy of this software",
     "( [a-z]+){4}"),
    ("Redistribution and use in source and binary forms, with or without modification, are", " permitted provided that",
     "( [a-z]+){3}"),
    ("Licensed under the Apache License, Version 2.0. You may obtain a copy of the License at http://www.",
     "apache.org/licenses/LICENSE-2.0", r"[a-zA-Z0-9.-]+\.[a-z]+(/[a-zA-Z0-9.-]+)*"),
    ("The standard is at https://www.w3.org/", "TR/", "[a-zA-Z0-9]+/"),
    ("The number pi is 3.", "14159265", "[0-9]{8}"),
    ("The number e is 2.", "71828182", "[0-9]{8}"),
    ("The Fibonacci numbers are 0, 1, 1, 2, 3, 5, 8, 13,", " 21, 34, 55", "( [0-9]+,){2} [0-9]+"),
    ("Lorem ipsum dolor sit amet,", " consectetur adipiscing elit", "( [a-z]+){3}"),
    ("We hold these truths to be self-evident, that all men are", " created equal", "( [a-z]+){2}"),
    ("In the beginning God created", " the heaven and the earth", "( [a-z]+){5}"),
    ("Four score and seven years ago our fathers brought forth", " on this continent", "( [a-z]+){3}"),
]  # fmt: skip
TYPICAL = "example.com/", " 555 123 4567", " someone@example.com"     # an example for each of PAPER, for `explain`
RULE = Rule(top_k=40)
WAYS: dict[str, Callable[[Query, int], Matches]] = {
    "strings": lambda query, seed: query.best(),
    "token sequences": lambda query, seed: query.best(results="tokens"),
    "samples": lambda query, seed: query.samples(local=True, seed=seed),
}


def known(lm: CachedTransformer, most: int, seed: int) -> None:
    """Print the place of widely known strings in a search, and their number among samples."""
    print(f"{'':34}log prob  place  expansions   of {most} samples")
    for prefix, truth, rest in KNOWN:
        query = Query(lm, re.escape(prefix) + rest, prefix=prefix, rule=RULE, end="prefix", max_tokens=24)
        matches = query.best(results="tokens", max_expansions=500)
        place = next((i for i, match in enumerate(islice(matches, most), 1) if str(match) == prefix + truth), None)
        drawn = sum(str(match) == prefix + truth for match in islice(query.samples(local=True, seed=seed), most))
        log_prob = explain(lm, truth, prefix=prefix).log_prob
        row = f"{truth.strip()[:30]:32}{log_prob:8.2f}  {place or '-':>5}  {matches.expansions:10}  {drawn:10}"
        print(f"  {row}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--paper", action="store_true", help="URLs, phone numbers, e-mail addresses")
    parser.add_argument("--known", action="store_true", help="what everybody knows: licences, prayers, digits")
    parser.add_argument("--corpus", type=Path, nargs="+", help="texts; how much of what is found stands in them")
    parser.add_argument("--out", default="memorisation.png", help="where to draw the plot")
    args = parser.parse_args()
    most = 20 if args.quick else 100

    lm = CachedTransformer.from_pretrained(args.lm)
    if args.known:
        return known(lm, most, args.seed)
    read = " ".join(" ".join(path.read_text(encoding="utf-8").split()) for path in args.corpus or [])
    curves: dict[str, dict[str, list[int]]] = {}
    for prefix, rest in PAPER if args.paper else STORIES:
        print(f"\n{prefix}{rest}")
        query = Query(lm, re.escape(prefix) + rest, prefix=prefix, rule=RULE, max_tokens=12)
        within = query.probability(max_expansions=500, tolerance=0.1, runs=0)
        if not within.lower:
            print(f"  nothing in {within.expansions} expansions; together at most {within.upper:.2g}, for")
            print(explain(lm, TYPICAL[PAPER.index((prefix, rest))], RULE, prefix=prefix))
            continue
        counts = curves[f"{prefix}…"] = {}
        for name, way in WAYS.items():
            found = list(islice(way(query, args.seed), most))
            if name == "strings":
                for match in found[:5]:
                    print(f"  {match.log_prob:7.2f}  {str(match)[len(prefix) :].strip()}")
            texts = [str(match) for match in found]
            counts[name] = [len(set(texts[:n])) for n in range(1, len(texts) + 1)]
            inside = sum(re.search(rf"{re.escape(text)}\b", read) is not None for text in set(texts))
            verbatim = f", {inside} of them in the corpus" if read else ""
            print(f"  {counts[name][-1]:4} different strings in {len(texts)} {name}{verbatim}", flush=True)
    if curves:
        plot(curves, args.out)


def plot(curves: dict[str, dict[str, list[int]]], path: str) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("\nNo plot: it needs matplotlib, pip install 'llmppl-smc[plots]'")
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
