"""JSON Schemas: the number of particles that end in time, and the cost of masks by llmppl and by llguidance.

Of 8 particles, the number that end within 40 tokens, with a closed record and with an open one:

    python benchmarks/json_schemas.py                   # the embedded model
    python benchmarks/json_schemas.py --lm smollm2

With real schemas, such as those of JSONSchemaBench, it counts the schemas that each library takes. It also measures the
CPU time to compile, including the constructor, and to make masks along their texts. The libraries take turns:

    python benchmarks/json_schemas.py --schemas FOLDER --vocab FOLDER [--every 4]

A folder of schemas has files with one schema each (`*.json`), or with one JSON object per line (`*.jsonl`). An object
has a "schema" and, if there are texts to read, "tests": objects with "valid", and with "data" if they are valid.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")       # before the import of numpy and torch

import llguidance
import numpy as np
from tables import machine, table

from llmppl import CachedTransformer, ConstrainedText, JsonSchema, Vocabulary, smc_standard
from llmppl.constraints import encode_fragment

KINDS = ("taken by both", "by llmppl alone", "by llguidance alone", "by neither")
TEXTS = 3                                           # per schema, at most

PROPERTIES = {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["dog", "cat", "bird"]}}
OPEN = {"type": "object", "required": [*PROPERTIES], "properties": PROPERTIES}
RECORDS = {"closed": OPEN | {"additionalProperties": False}, "open": OPEN}


def count_alive(name: str | None, runs: int) -> None:
    lm = CachedTransformer.from_pretrained(*[name] * (name is not None))
    ask = "Describe a pet as JSON with its name, its age and its kind (dog, cat or bird)."
    prompt = "Once upon a time there was a little dog. The dog as JSON: " if name is None else lm.chat(ask)
    for what, schema in RECORDS.items():
        alive, texts = [], Counter[str]()
        for seed in range(runs):
            program = ConstrainedText(lm, prompt, JsonSchema(schema), max_tokens=40)
            particles = smc_standard(program, 8, seed=seed, progress=False)
            ended = [str(each) for each in particles if each.log_weight > float("-inf")]
            alive.append(len(ended))
            texts.update(ended)
        print(f"{what}: of 8 particles alive {alive}")
        for text, _ in texts.most_common(3):
            print(f"    {text}")


def read_schemas(folder: Path) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the schemas of a folder, each with the valid instances among its tests."""
    for path in sorted(folder.glob("*.json")):
        yield json.loads(path.read_text()), []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            found = json.loads(line)
            yield found["schema"], [test["data"] for test in found.get("tests", []) if test["valid"]]


class Theirs:
    """Index of llguidance over a vocabulary, whose states are matchers; `read` makes one state after the other."""

    def __init__(self, vocab: Vocabulary) -> None:
        special = sorted({*vocab.eos_ids, *vocab.special_ids})
        tokens = [b"\xff<%d>" % id if id in special else token for id, token in enumerate(vocab.tokens)]
        facts = SimpleNamespace(
            eos_token_id=vocab.eos_ids[0], bos_token_id=None, tokens=tokens, special_token_ids=special
        )
        self.tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(facts))
        self.bits = np.zeros((len(vocab) + 31) // 32, np.int32)

    def index(self, schema: Any) -> Any:
        text = f'%llguidance {{"no_forcing": true}}\nstart: %json {json.dumps(schema)}'
        matcher = llguidance.LLMatcher(self.tokenizer, text, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return SimpleNamespace(start=matcher.deep_copy, mask=self.mask, advance=self.advance)

    def mask(self, matcher: Any) -> None:
        matcher.unsafe_compute_mask_ptr(self.bits.ctypes.data, self.bits.nbytes)

    def advance(self, matcher: Any, token: int) -> Any:
        if not matcher.consume_token(token):
            raise ValueError("the token does not fit")
        return matcher


def read(index: Any, text: list[int]) -> tuple[int, int]:
    """Return the nanoseconds of mask and step over the tokens up to one that does not fit, and their number."""
    state, spent = index.start() if callable(index.start) else index.start, 0
    for count, token in enumerate(text):
        begin = time.thread_time_ns()
        try:
            index.mask(state)
            state = index.advance(state, token)
        except ValueError:
            return spent, count
        spent += time.thread_time_ns() - begin
    return spent, len(text)


def count_costs(folder: Path, every: int, vocab: Vocabulary, tokenizer: Any) -> None:
    """Compile each schema by both libraries, and read its texts twice."""
    kinds, reasons, theirs = Counter[str](), Counter[str](), Theirs(vocab)
    makers = lambda schema: JsonSchema(schema).index(vocab), theirs.index       # noqa: E731
    names = "compile + first mask", "a token, at first", "a token, again"
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    num_tokens = 0
    for make in makers:                             # one-time work per vocabulary
        read(make(True), encode_fragment(tokenizer, vocab, '{"a": "b", "c": 10}'))
    for schema, values in list(read_schemas(folder))[::every]:
        indices, compiling = [], []
        for make in makers:
            begin = time.thread_time_ns()
            try:
                index = make(schema)
                index.mask(index.start() if callable(index.start) else index.start)
                indices.append(index)
            except ValueError as error:
                if make is makers[0]:
                    reasons[str(error)] += 1
            compiling.append((time.thread_time_ns() - begin) / 1e6)
        is_ours = len(indices) and not isinstance(indices[0], SimpleNamespace)
        kinds[KINDS[0] if len(indices) == 2 else KINDS[1] if is_ours else KINDS[2] if indices else KINDS[3]] += 1
        if len(indices) < 2:
            continue
        found[names[0]].append((compiling[0], compiling[1]))
        shown = [json.dumps(value, ensure_ascii=False) for value in values[:TEXTS]]
        texts = [encode_fragment(tokenizer, vocab, text) for text in shown]
        for name in names[1:]:
            spent = np.array([[read(index, text) for index in indices] for text in texts]).reshape(-1, 2, 2).sum(0)
            if spent[:, 1].all():
                found[name].append(tuple(spent[:, 0] / spent[:, 1] / 1e6))
                num_tokens += int(spent[0, 1])
    total = kinds.total()
    shares = [f"{kind} {kinds[kind]} ({kinds[kind] / total:.0%})" for kind in KINDS]
    print(f"\n{total} schemas, {len(vocab):,} tokens: {', '.join(shares)}")
    for reason, number in reasons.most_common(8):
        print(f"    {number:4}  {reason[:100]}")
    rows = []
    for name, pairs in found.items():
        if pairs:
            ours, others = np.array(pairs).T
            quantiles = [f"{np.quantile(some, q):.3f}" for some in (ours, others) for q in (0.5, 0.9, 1)]
            ratios = np.median(ours / others), sum(ours) / sum(others)
            rows.append([name, len(pairs), *quantiles, *(f"{ratio:.2f}" for ratio in ratios)])
    columns = ["CPU ms", "schemas", "llmppl", "p90", "worst", "llguidance", "p90", "worst", "ratio", "of sums"]
    note = f"{num_tokens // 2:,} tokens of at most {TEXTS} texts per schema"
    table("llmppl compared with llguidance; a token is its mask and step", columns, rows, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", help="the language model; default: the embedded model")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--schemas", type=Path, metavar="FOLDER", help="real schemas: the cost of their masks")
    parser.add_argument("--vocab", metavar="FOLDER", help="of a tokenizer, for --schemas (default: the model's)")
    parser.add_argument("--every", type=int, default=1, help="take every n-th schema of the folder")
    args = parser.parse_args()
    if args.schemas is None:
        count_alive(args.lm, args.runs)
        print("not timed: masks of real schemas (--schemas FOLDER)")
        return
    if not any(True for _ in args.schemas.glob("*.json*")):
        raise SystemExit(f"--schemas {args.schemas}: no *.json or *.jsonl there; JSONSchemaBench's would work")
    print(machine("llmppl", "numpy", "llguidance"))
    if args.vocab is None:
        lm = CachedTransformer.from_pretrained(*[args.lm] * (args.lm is not None))
        count_costs(args.schemas, args.every, lm.vocab, lm.tokenizer)
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.vocab)
        count_costs(args.schemas, args.every, Vocabulary.from_tokenizer(tokenizer), tokenizer)


if __name__ == "__main__":
    main()
