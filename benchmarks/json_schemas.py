"""JSON Schemas: the number of particles that end in time, and the cost of masks, compared with other libraries.

Of 8 particles, the number that end within 40 tokens, with a closed record and with an open one:

    python benchmarks/json_schemas.py                   # the embedded model
    python benchmarks/json_schemas.py --lm smollm2

With real schemas, such as those of JSONSchemaBench, it counts the schemas that each library takes. It also measures the
CPU time to compile, including the constructor, and to make masks along their texts. llguidance, xgrammar and
outlines-core take turns with llmppl if they are installed; a token is its mask and step, and a text that a library
refuses is timed up to there. A schema counts as taken by outlines-core if it is compiled in 10 CPU seconds and 2 GB:

    python benchmarks/json_schemas.py --schemas FOLDER --vocab FOLDER [--every 4]

A folder of schemas has files with one schema each (`*.json`), or with one JSON object per line (`*.jsonl`). An object
has a "schema" and, if there are texts to read, "tests": objects with "valid", and with "data" if they are valid.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")       # before the import of numpy and torch

import numpy as np
from constraints import LLGuidance, Llmppl, OutlinesCore, Reader, Subject, XGrammar
from tables import machine, save, table

from llmppl import CachedTransformer, ConstrainedText, JsonSchema, Vocabulary, smc_standard

FIGURES = ("compile and first mask", "a token, at first", "a token, again")
TEXTS = 3                                           # per schema, at most

PROPERTIES = {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["dog", "cat", "bird"]}}
OPEN = {"type": "object", "required": [*PROPERTIES], "properties": PROPERTIES}
CLOSED = OPEN | {"additionalProperties": False}
RECORDS = {"closed": CLOSED, "open": OPEN}


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


def read(reader: Reader, text: list[int]) -> tuple[int, int]:
    """Return the nanoseconds of mask and step over the tokens up to one that does not fit, and their number."""
    reader.begin()
    spent = 0
    for count, token in enumerate(text):
        begin = time.thread_time_ns()
        try:
            reader.mask()
            fits = reader.read(token)
        except ValueError:
            fits = False
        if fits is False:
            return spent, count
        spent += time.thread_time_ns() - begin
    return spent, len(text)


def ends_in_time(make: Callable[[], object]) -> bool:
    """Return whether a copy of this process does it in 10 CPU seconds and 2 GB more: native code hears no signal."""
    child = os.fork()
    if child == 0:
        bytes_now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
        resource.setrlimit(resource.RLIMIT_AS, (bytes_now + (2 << 30),) * 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            make()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def compile_schema(library: Any, schema: Any) -> Reader:
    reader: Reader = library.schema(schema)
    reader.begin()
    reader.mask()
    return reader


def count_costs(folder: Path, every: int, subject: Subject) -> None:
    """Compile each schema by every library, and read its texts twice."""
    libraries = [Llmppl(subject)]
    libraries += [each(subject) for each in (LLGuidance, XGrammar, OutlinesCore) if each.module is not None]
    spent = defaultdict[tuple[str, str], dict[int, float]](dict)
    reasons, num_schemas, num_tokens = Counter[str](), 0, 0
    for library in libraries:                       # one-time work per vocabulary
        read(library.schema(CLOSED), subject.encode('{"name": "b", "age": 10, "kind": "dog"}'))
    for number, (schema, values) in enumerate(list(read_schemas(folder))[::every]):
        num_schemas += 1
        texts = [subject.encode(json.dumps(value, ensure_ascii=False)) for value in values[:TEXTS]]
        for library in libraries:
            make = functools.partial(compile_schema, library, schema)
            if library.name == "outlines-core" and not ends_in_time(make):
                continue
            begin = time.thread_time_ns()
            try:
                reader = make()
            except (ValueError, RuntimeError) as error:
                if library is libraries[0]:
                    reasons[str(error)] += 1
                continue
            spent[FIGURES[0], library.name][number] = (time.thread_time_ns() - begin) / 1e6
            for figure in FIGURES[1:]:
                times, counts = np.array([read(reader, text) for text in texts]).reshape(-1, 2).sum(0)
                if counts:
                    spent[figure, library.name][number] = times / counts / 1e6
                    num_tokens += int(counts) * (library is libraries[0])
    taken = [[each.name, len(spent[FIGURES[0], each.name])] for each in libraries]
    table(f"{num_schemas} schemas, {len(subject.vocab):,} tokens", ["library", "taken"], taken)
    for reason, count in reasons.most_common(8):
        print(f"    {count:4}  {reason[:100]}")
    columns = ["CPU ms", "schemas", "median", "p90", "worst", "llmppl", "p90", "worst", "ratio", "of sums"]
    for figure in FIGURES:
        rows = []
        for library in libraries[1:]:
            ours, theirs = spent[figure, "llmppl"], spent[figure, library.name]
            pairs = np.array([(ours[each], theirs[each]) for each in ours.keys() & theirs.keys()]).reshape(-1, 2)
            if len(pairs):
                quantiles = [f"{q:.4f}" for i in (1, 0) for q in np.quantile(pairs[:, i], [0.5, 0.9, 1])]
                ratios = np.median(pairs[:, 0] / pairs[:, 1]), pairs[:, 0].sum() / pairs[:, 1].sum()
                rows.append([library.name, len(pairs), *quantiles, *(f"{ratio:.2f}" for ratio in ratios)])
        table(f"{figure}, of the schemas that both take", columns, rows)
    print(f"{num_tokens // 2:,} tokens of at most {TEXTS} texts per schema")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", help="the language model; default: the embedded model")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--schemas", type=Path, metavar="FOLDER", help="real schemas: the cost of their masks")
    parser.add_argument("--vocab", metavar="FOLDER", help="of a tokenizer, for --schemas (default: the model's)")
    parser.add_argument("--every", type=int, default=1, help="take every n-th schema of the folder")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the tables to this file as JSON")
    args = parser.parse_args()
    if args.schemas is None:
        count_alive(args.lm, args.runs)
        print("not timed: masks of real schemas (--schemas FOLDER)")
        return
    if not any(True for _ in args.schemas.glob("*.json*")):
        raise SystemExit(f"--schemas {args.schemas}: no *.json or *.jsonl there; JSONSchemaBench's would work")
    print(machine("llmppl", "numpy", "llguidance", "xgrammar", "outlines-core"))
    if args.vocab is None:
        lm = CachedTransformer.from_pretrained(*[args.lm] * (args.lm is not None))
        count_costs(args.schemas, args.every, Subject("the model's", lm.tokenizer, lm.vocab))
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.vocab)
        subject = Subject(args.vocab, tokenizer, Vocabulary.from_tokenizer(tokenizer))
        count_costs(args.schemas, args.every, subject)
    save(args.out, "numpy", "llguidance", "xgrammar", "outlines-core")


if __name__ == "__main__":
    main()
