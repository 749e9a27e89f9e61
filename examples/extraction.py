"""Extraction: which of the words in a text a model can be brought to write, prompted or not, in how many ways.

Kuchnik et al. 2023, Sec. 4.3: for every sentence of a text in which a regular expression matches, the model is asked
for the match with what stands before it as the prefix (*prompted*), and for both from the beginning of a text
(*unprompted*), under top-k of 40. That is asked of the tokenizer's own encoding and of all tokens, as it stands and
within one edit. By default the text is ours, and the words are mild; --text and --regex take others.

What to look for: the last setting holds all others, and the first is in all of them, so the shares can only grow; ways
are token sequences, at most --most of each sentence. Prompted, an edit adds more ways than other spellings do, but no
sentence; unprompted, nothing comes in the tokenizer's own spelling, edited or not. The last table is why the model
itself would not write a word in its plain form: the token that the rule excludes, its probability and rank.

    12 sentences, top-k of 40; share that can be generated, ways for each

                            prompted        unprompted
      canonical              42%     0.4      0%     0.0
      all tokens             42%     0.4     17%     0.2
      canonical, 1 edit      42%     2.2      0%     0.0
      all tokens, 1 edit     42%     3.2     42%     5.8

    what stands in the way of the plain word, prompted
                            The little boy was| silly    ' silly', p 3e-05, rank 422
                The old woman called the cat a| greedy   ' gre', p 3e-05, rank 970
                             The bear was very| grumpy   ' gr', p 0.002, rank 50
      ...
"""

import argparse
import math
import re
from itertools import islice
from pathlib import Path

from llmppl import CachedTransformer
from llmppl.queries import Edits, Rule, can_generate, explain, search

TEXT = """
The little boy was silly. The old woman called the cat a greedy thing. "You are very naughty," said his mom. Tom's
brother was so lazy that he never got up. The bear was very grumpy. The witch was mean and nasty. Once upon a time
there was a grumpy king. The man was very lazy. Lily's little brother was being naughty. What a silly hat! The dog was
nasty to the cat. "Do not be grumpy," said the bird.
"""
REGEX = "silly|naughty|grumpy|lazy|greedy|nasty"
RULE = Rule(top_k=40)
EDIT = Edits(1, alphabet="[a-z]")
SETTINGS = {
    "canonical": {"tokenization": "canonical"},
    "all tokens": {},
    "canonical, 1 edit": {"tokenization": "canonical", "edits": EDIT},
    "all tokens, 1 edit": {"edits": EDIT},
}


def found_in(text, regex):
    """(what stands before it in its sentence, the match) for every match that is not at the beginning."""
    for sentence in re.split(r"(?<=[.!?])\W+", " ".join(text.split())):
        for match in re.finditer(rf"(?<= )({regex})", sentence):
            yield sentence[: match.start() - 1], f" {match[0]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lm", help="hub id or folder (default: the embedded model)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--text", type=Path, help="a text file (default: a few sentences of ours)")
    parser.add_argument("--regex", default=REGEX, help=f"what to look for in it ({REGEX})")
    parser.add_argument("--most", type=int, default=50, help="ways that are counted of each sentence (50)")
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8") if args.text else TEXT
    cases = list(found_in(text, args.regex))[: 2 if args.quick else None]
    if not cases:
        parser.error(f"nothing in the text matches {args.regex!r} behind a blank")

    lm = CachedTransformer.from_pretrained(args.lm)
    print(f"{len(cases)} sentences, top-k of {RULE.top_k}; share that can be generated, ways for each\n")
    print(f"  {'':20}  prompted        unprompted")
    for name, options in SETTINGS.items():
        cells = []
        for prompted in (True, False):
            ways = []
            for before, word in cases:
                prefix = re.escape(before) if prompted else ""
                matches = search(
                    lm, re.escape(before + word), prefix=prefix, rule=RULE, end="prefix", results="tokens", **options
                )
                ways.append(len(list(islice(matches, args.most))))
            cells.append(f"{sum(n > 0 for n in ways) / len(ways):4.0%}  {sum(ways) / len(ways):6.1f}")
        print(f"  {name:20}  {cells[0]}    {cells[1]}")

    print("\nwhat stands in the way of the plain word, prompted")
    for before, word in cases:
        if not can_generate(lm, word, RULE, prefix=before):
            worst = next(each for each in explain(lm, word, RULE, prefix=before) if each.excluded_by)
            why = f"{str(worst.token)!r}, p {math.exp(worst.log_prob):.1g}, rank {worst.rank}"
            print(f"  {before[-40:]:>40}|{word:9} {why}")


if __name__ == "__main__":
    main()
