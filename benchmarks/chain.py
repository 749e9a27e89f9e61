"""Success against the number of constraints: six SQL queries in a row, of which each must find something new.

A text is six lines. A grammar (here a regular expression) contains their form, and the mask enforces it. A line is
*right* if SQLite runs its query, and the query finds rows that no earlier line has found. No mask can know this, so the
program tests each line at its end, and a wrong line ends the text. A run *reaches* m if one of its texts has m right
lines in a row. The sizes were chosen on the topics `PILOT`, so that all methods but the first run about as many tokens
as steering. The results are of the other topics.

    python benchmarks/chain.py                          # twenty minutes of one core
    python benchmarks/chain.py --seeds 1 --topics 1     # a test that it works
    python benchmarks/chain.py --pilot                  # the topics that the sizes were chosen on

`--summary benchmarks/results/chain.json` writes the shares that `tools/pictures.py` draws.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tables import machine, table
from task_instances import sql

from llmppl import CachedTransformer, Model, Regex, beam_search, importance_sampling, smc_standard, smc_steer
from llmppl.constraints import Index
from llmppl.lm import Context

BASE = sql.database()
LINES = 6
COLUMN = rf"({sql.COLUMN})"
LINE = rf"SELECT {COLUMN}(, {COLUMN})? FROM ({'|'.join(sql.TABLES)}) WHERE {sql.TEST}( AND {sql.TEST})?"
PILOT = ("people in Bonn", "books of the last century")
TOPICS = (
    "nurses", "people in Oslo", "people who earn much", "the books of Fay Dunn", "young people", "long books",
    "teachers and lawyers", "people in Rome", "books since 2000", "the book Green Hills", "pilots", "authors",
)  # fmt: skip
ASKED = "the baker Gus Hall and other bakers"
SHOT = """SELECT age FROM people WHERE name = 'Gus Hall'
SELECT city, salary FROM people WHERE name = 'Gus Hall'
SELECT name FROM people WHERE job = 'baker'
SELECT name, age FROM people WHERE job = 'baker' AND city = 'Rome'
SELECT salary FROM people WHERE job = 'baker' AND age > 30
SELECT title FROM books WHERE author = 'Ben Stone'
"""


class Chain(Model):
    """Six lines of the grammar; `reached` is called with the number of right lines after each of them.

    With `tested`, the end of a line is tested when it is drawn (AWRS), so a wrong line does not end the text.
    """

    def __init__(self, context: Context, index: Index, reached: Callable[[int], None], tested: bool = False) -> None:
        super().__init__()
        self.context, self.index, self.reached, self.tested = context, index, reached, tested
        self.state = index.start
        self.found: tuple[Any, ...] = ()

    def new(self, text: str) -> tuple[Any, ...] | None:
        """Return the results of the lines that `text` ends, with those before; None if a line is wrong."""
        found = self.found
        for line in text.split("\n")[len(found) : -1]:
            rows = sql.result(BASE, line)
            if rows is None or rows in found:
                return None
            found += (rows,)
        return found

    def step(self) -> None:
        p = self.transformer(self.context)
        allowed = p.masked(self.index.mask(self.state))
        if self.tested:
            allowed = allowed.where(lambda token: self.new(str(self.s) + str(token)) is not None)
        token = self.sample(p, proposal=allowed)
        self.state = self.index.advance(self.state, token)
        self.context += token
        self.s += token
        found = self.new(str(self.s))
        self.condition(found is not None)
        if found != self.found:
            self.found = found
            self.reached(len(found))
        if len(self.found) == LINES:
            self.finish()


METHODS: dict[str, tuple[Callable[..., Any], dict[str, int], bool]] = {
    "one masked text": (importance_sampling, {"N": 1}, False),
    "masked texts, until a wrong line": (importance_sampling, {"N": 40}, False),
    "beam search": (beam_search, {"N": 10, "K": 3}, False),
    "particle filter": (smc_standard, {"N": 23}, False),
    "particle filter, AWRS": (smc_standard, {"N": 17}, True),
    "steering": (smc_steer, {"N": 10, "K": 3}, False),
}


def run(lm: CachedTransformer, index: Index, topic: str, name: str, seed: int) -> dict[str, Any]:
    """Return the largest number of right lines of a run, and its cost."""
    method, sizes, tested = METHODS[name]
    lm.clear()
    context, reached = lm.chat(messages(topic)), [0]
    context.log_probs()
    tokens, began = lm.stats.tokens, time.process_time()
    beams = method is beam_search
    options = {} if beams else {"seed": seed}
    with contextlib.suppress(*[ValueError] * beams):    # of beams that have all died
        method(Chain(context, index, reached.append, tested), **sizes, **options, progress=False)
    return {"reached": max(reached), "tokens": lm.stats.tokens - tokens, "seconds": time.process_time() - began}


def messages(topic: str) -> list[dict[str, str]]:
    schema = "\n".join(f"{name}({', '.join(columns)})" for name, columns in sql.TABLES.items())
    return [
        {"role": "user", "content": f"Write six SQL queries for these tables:\n{schema}\n\nThey are about {ASKED}."},
        {"role": "assistant", "content": SHOT},
        {"role": "user", "content": f"Write six SQL queries about {topic}."},
    ]


def summary(name: str, topics: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the shares of the runs that reach 1 to 6, with standard errors over the topics."""
    shares = [[statistics.mean(each["reached"] > m for each in runs) for runs in topics] for m in range(LINES)]
    errors = [statistics.stdev(share) / math.sqrt(len(share)) if len(share) > 1 else 0.0 for share in shares]
    runs = [each for runs in topics for each in runs]
    return {
        "method": name, **METHODS[name][1], "reach": [round(statistics.mean(share), 3) for share in shares],
        "error": [round(error, 3) for error in errors],
        "tokens": round(statistics.mean(each["tokens"] for each in runs)),
        "seconds": round(statistics.mean(each["seconds"] for each in runs), 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", default="smollm2", help="a model with a chat template (SmolLM2, 135M)")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each topic")
    parser.add_argument("--topics", type=int, default=len(TOPICS), help="number of topics")
    parser.add_argument("--pilot", action="store_true", help="the topics that the sizes were chosen on")
    parser.add_argument("--summary", type=Path, help="JSON file for the shares")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(machine("llmppl", "torch", "transformers", "numpy", note="bfloat16, CPU time, one thread"), flush=True)
    lm = CachedTransformer.from_pretrained(options.lm, dtype="bfloat16")
    index = Regex(rf"({LINE}\n)+").index(lm.vocab)
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in METHODS}
    for topic in PILOT if options.pilot else TOPICS[: options.topics]:
        for name, topics in found.items():
            seeds = 1 if METHODS[name][0] is beam_search else options.seeds         # beams draw nothing
            topics.append([run(lm, index, topic, name, seed) for seed in range(seeds)])
        print(topic, flush=True)
    lines = [summary(name, topics) for name, topics in found.items()]
    rows = [
        (
            line["method"],
            *map("{:.2f} ± {:.2f}".format, line["reach"], line["error"]),
            f"{line['tokens']:,}",
            f"{line['seconds']:.1f}",
        )
        for line in lines
    ]
    table("share of runs that reach m right lines", ("method", *map(str, range(1, LINES + 1)), "tokens", "cpu s"), rows)
    if options.summary:
        options.summary.write_text("[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
