"""Cost of the masks of grammars: compiling, the first mask, and the masks along a text.

The grammars are lark's own, with texts of their languages, and any others: a file, a text of its language, and
optionally the start rule. Figures are CPU time in one thread. A text is read once, so a mask is computed if its state
is new. `--indented` is for grammars that need lark's PythonIndenter.

    python benchmarks/grammars.py --vocab ../shared/vocab/gpt2
    python benchmarks/grammars.py --vocab ../shared/vocab/gpt2 --grammar mine.lark text.txt --grammar b.lark b.txt main
"""

from __future__ import annotations

import argparse
import gc
import inspect
import os
import resource
import statistics
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")       # before the import of numpy

import lark
from lark import indenter
from tables import machine, table

from llmppl import Grammar, Vocabulary
from llmppl.constraints.vocabulary.trie import trie_of

LARK = Path(lark.__file__).parent / "grammars"
INDENTER = textwrap.dedent(inspect.getsource(indenter.Indenter.handle_NL))    # a Python text that lark installs
OWN = [
    ("lark.lark", LARK / "lark.lark", (LARK / "lark.lark").read_text(), "start", None),
    ("python.lark", LARK / "python.lark", INDENTER, "file_input", indenter.PythonIndenter()),
]


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """Call `run` without garbage collection; return its result and its CPU milliseconds."""
    gc.disable()
    begun = time.process_time()
    found = run()
    cost = (time.process_time() - begun) * 1e3
    gc.enable()
    return found, cost


def measure(vocab: Any, tokens: list[int], name: str, path: Path, start: str, post: Any) -> tuple[Any, ...]:
    """Return a row of the table."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grammar, load = timed(lambda: Grammar.from_file(path, start, postlex=post))
    index, state = grammar.index(vocab), grammar.start
    first, costs = timed(lambda: index.mask(state))[1], []
    for token in tokens:
        state = index.advance(state, token)
        costs.append(timed(lambda state=state: index.mask(state))[1])
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    figures = load, first, statistics.median(costs), max(costs), sum(costs)
    return name, len(tokens), *(f"{each:.3g}" for each in figures), f"{peak:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", required=True, metavar="FOLDER", help="of a tokenizer")
    parser.add_argument("--grammar", nargs="+", action="append", default=[], metavar="FILE TEXT [START]")
    parser.add_argument("--indented", action="store_true", help="the given grammars need lark's PythonIndenter")
    parser.add_argument("--without-own", action="store_true", help="skip lark's own grammars")
    options = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.vocab)
    vocab = Vocabulary.from_tokenizer(tokenizer)
    trie_of(vocab)
    subjects: list[Any] = [] if options.without_own else list(OWN)
    for path, text, *start in options.grammar:
        post = indenter.PythonIndenter() if options.indented else None
        subjects.append((Path(path).name, Path(path), Path(text).read_text(), *(start or ["start"]), post))
    print(machine("llmppl", "lark", "numpy"))
    rows = [
        measure(vocab, tokenizer.encode(text, add_special_tokens=False), name, path, start, post)
        for name, path, text, start, post in subjects
    ]
    costs = "compile", "first mask", "median", "max", "all masks"
    columns = "grammar", "tokens", *costs, "peak MB"
    table(f"CPU ms over {len(vocab.tokens):,} tokens; masks along a text, read once", columns, rows)


if __name__ == "__main__":
    main()
