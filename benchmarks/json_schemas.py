"""JSON Schemas: the number of particles that end in time, and the cost of masks compared with other libraries.

Of 8 particles, the number that end within 40 tokens, with a closed record and with an open one:

    python benchmarks/json_schemas.py                   # the embedded model
    python benchmarks/json_schemas.py --lm smollm2

With real schemas, such as those of JSONSchemaBench, it counts the schemas that each library compiles. It measures the
CPU time to compile them, to make the first mask, and to make masks along their texts, read twice:

    python benchmarks/json_schemas.py --schemas FOLDER --vocab FOLDER [--every 1] [--largest 20] [--without xgrammar]

By default it takes about 200 schemas, at equal distances in the folder. A folder of schemas has files with one schema
each (`*.json`), or with one JSON object per line (`*.jsonl`). An object has a "schema" and, if there are texts to read,
"tests": objects with "valid", and with "data" if they are valid.

llmppl is compared with llguidance, xgrammar and outlines-core where they are installed (`pip install 'llmppl[bench]'`).
All allow one blank between tokens of JSON, or none. Constructors are inside the clock, and vocabularies outside.
llmppl and llguidance run in this process. The others run in a fork for each schema, which `--limit` stops.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import re
import resource
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")       # before the import of numpy and torch

import constraints as C
import numpy as np
from tables import machine, table

from llmppl import CachedTransformer, ConstrainedText, JsonSchema, Vocabulary, smc_standard

SCHEMAS = 200                                       # of a folder, about
TEXTS = 3                                           # per schema, at most
SHOWN = 100                                         # characters of an error
FORKS = multiprocessing.get_context("fork")
MEASURES = {
    "compile": "compile",
    "first": "compile + first mask",
    "met": "a token's mask and step, at first",
    "again": "the same, again",
}

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


def read_schemas(folder: Path) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield name and schema of each schema of a folder, and the valid instances among its tests."""
    for path in sorted(folder.glob("*.json")):
        yield path.stem, json.loads(path.read_text()), []
    for path in sorted(folder.glob("*.jsonl")):
        for at, line in enumerate(path.read_text().splitlines()):
            found = json.loads(line)
            values = [test["data"] for test in found.get("tests", []) if test["valid"]]
            yield f"{path.stem}:{at}", found["schema"], values


# ---- the libraries: `schema(schema)` compiles, and returns a reader


class Llmppl(C.Llmppl):
    forks = False

    def schema(self, schema: Any) -> C.Reader:
        return C.Ours(JsonSchema(schema), self.subject)


class LLGuidance(C.LLGuidance):
    forks = False

    def schema(self, schema: Any) -> C.Reader:
        options = {"whitespace_flexible": True, "whitespace_pattern": " ?"}
        with_options = schema | {"x-guidance": options} if isinstance(schema, dict) else schema
        return self._reader("start: %json " + json.dumps(with_options))


class XGrammar(C.XGrammar):
    forks = True

    def schema(self, schema: Any) -> C.Reader:
        compile_schema = self.compiler.compile_json_schema
        return self._reader(compile_schema(json.dumps(schema), strict_mode=False, max_whitespace_cnt=1))


class OutlinesCore(C.OutlinesCore):
    forks = True

    def schema(self, schema: Any) -> C.Reader:
        from outlines_core.json_schema import build_regex_from_schema

        return self.regex(build_regex_from_schema(json.dumps(schema), "[ ]?"))


LIBRARIES: list[Any] = [Llmppl, LLGuidance, XGrammar, OutlinesCore]


# ---- measuring


@dataclass
class Cost:
    """CPU nanoseconds of one library with one schema, or its error."""

    error: str = ""
    compile: int = 0
    first: int = 0                                  # with the compilation
    met: int = 0                                    # of all tokens of the texts
    again: int = 0
    num_tokens: int = 0
    peak: int = 0                                   # kilobytes, only in a fork


def measure(library: Any, schema: Any, texts: list[list[int]]) -> Cost:
    """Compile a schema, make its first mask, and read its texts twice."""
    cost = Cost()
    gc.disable()
    begin = C.clock()
    try:
        reader = library.schema(schema)
        cost.compile = C.clock() - begin
        reader.begin()
        reader.mask()
        cost.first = C.clock() - begin
        cost.met, cost.num_tokens = read(reader, texts)
        cost.again, _ = read(reader, texts)
    except Exception as error:
        cost.error = f"{type(error).__name__}: {error}".partition("\n")[0][:SHOWN]
    finally:
        gc.enable()
    return cost


def read(reader: C.Reader, texts: list[list[int]]) -> tuple[int, int]:
    """Return the nanoseconds of mask and step over the tokens of texts that fit, and their number."""
    spent = count = 0
    for text in texts:
        reader.begin()
        for token in text:
            begin = C.clock()
            reader.mask()
            try:
                fits = reader.read(token)
            except ValueError:
                fits = False
            spent += C.clock() - begin - C.TICK
            if fits is False:
                break
            count += 1
    return spent, count


def measure_in_fork(library: Any, schema: Any, texts: list[list[int]], limit: float) -> Cost:
    """Measure in a process of its own, which is killed after `limit` seconds; add the peak of its memory."""
    ours, theirs = FORKS.Pipe(duplex=False)

    def run() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        cost = measure(library, schema, texts)
        cost.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        theirs.send(cost)

    child = FORKS.Process(target=run)
    child.start()
    theirs.close()
    try:
        found: Cost = ours.recv() if ours.poll(limit) else Cost(f"over {limit:g} seconds")
    except EOFError:
        found = Cost("the process died")
    if child.is_alive() and found.error.startswith("over"):
        child.kill()
    child.join()
    return found


def count_left(schemas: list[Any]) -> Counter[str]:
    """Return how many schemas leave a keyword to the finished text, by keyword."""
    found = Counter[str]()
    for schema in schemas:
        try:
            warnings = JsonSchema(schema).warnings
        except ValueError:
            continue
        left = {each.partition(", '")[2].partition("'")[0] for each in warnings if each.endswith("the finished text")}
        found.update([*left, "any"] if left else [])
    return found


def measure_all(folder: Path, every: int | None, subject: C.Subject, libraries: list[Any], limit: float) -> None:
    rows = list(read_schemas(folder))
    every = every or max(1, len(rows) // SCHEMAS)
    rows = rows[::every]
    found: dict[str, list[Cost]] = {library.name: [] for library in libraries}
    warm_up = measure(libraries[0], {"type": "object"}, [subject.encode('{"a": "b", "c": [10, 1.5, true]}')] * 2)
    assert not warm_up.error, warm_up
    for library in libraries[1:]:
        measure(library, {"type": "object"}, [])
    gc.collect()
    gc.freeze()
    for _, schema, values in rows:
        texts = [subject.encode(json.dumps(value, ensure_ascii=False)) for value in values[:TEXTS]]
        for library in libraries:
            run = measure_in_fork if library.forks else measure
            found[library.name].append(run(library, schema, texts, *[limit] * library.forks))
    print(f"\n{len(rows)} schemas, every {every}., {len(subject.vocab):,} tokens")
    for name, costs in found.items():
        errors = Counter(re.sub(r" at #[^ ,:]*", "", cost.error) for cost in costs if cost.error)
        compiled = len(rows) - errors.total()
        print(f"{name}: {compiled} compile ({compiled / len(rows):.1%})")
        for error, number in errors.most_common(8):
            print(f"    {number:4}  {error}")
    left = count_left([schema for _, schema, _ in rows])
    print(f"{libraries[0].name}: {left.pop('any', 0)} leave keywords to the finished text: {dict(left.most_common())}")
    for measure_name, title in MEASURES.items():
        compare(measure_name, title, found)


def compare(name: str, title: str, found: dict[str, list[Cost]]) -> None:
    """Print the times of each library, and ours for the same schemas."""
    ours, *_ = found.values()
    rows = []
    for library, costs in found.items():
        pairs = [(mine, cost) for mine, cost in zip(ours, costs, strict=True) if not mine.error and not cost.error]
        if name in ("met", "again"):
            pairs = [(mine, cost) for mine, cost in pairs if 0 < mine.num_tokens == cost.num_tokens]
            sizes = np.array([cost.num_tokens for _, cost in pairs])
        else:
            sizes = np.ones(len(pairs))
        if pairs:
            mine, their = (np.array([getattr(cost, name) for cost in some]) / 1e6 for some in zip(*pairs, strict=True))
            each = their / sizes
            quantiles = [f"{np.quantile(each, q):.3g}" for q in (0.5, 0.9, 1)]
            ratios = [f"{np.median(mine / their):.2f}", f"{mine.sum() / their.sum():.2f}"]
            rows.append([library, len(pairs), *quantiles, f"{their.sum():.4g}", f"{mine.sum():.4g}", *ratios])
    columns = ["CPU ms", "schemas", "median", "p90", "worst", "sum", "our sum", "ours/its, median", "sum"]
    table(title, columns, rows)


def measure_largest(folder: Path, number: int, libraries: list[Any], limit: float) -> None:
    """Print CPU time and peak memory of compilation and first mask for the largest schemas."""
    sized = sorted(((len(json.dumps(schema)), name, schema) for name, schema, _ in read_schemas(folder)),
                   key=lambda row: -row[0])  # fmt: skip
    rows = []
    for size, name, schema in sized[:number]:
        costs = [measure_in_fork(library, schema, [], limit) for library in libraries]
        cells = [cost.error[:30] or f"{cost.first / 1e6:.0f} / {cost.peak / 1024:.0f}" for cost in costs]
        rows.append([name, f"{size / 1024:.0f}", *cells])
    columns = ["schema", "KB", *(library.name for library in libraries)]
    table(f"the {number} largest schemas: compile + first mask, CPU ms / MB of peak memory", columns, rows)


def count_costs(args: argparse.Namespace, vocab: Vocabulary, tokenizer: Any) -> None:
    C.set_clock()
    subject = C.Subject("vocabulary", tokenizer, vocab)
    kept = [kind for kind in LIBRARIES if getattr(kind, "module", C) is not None and kind.name not in args.without]
    libraries = [kind(subject) for kind in kept]
    measure_all(args.schemas, args.every, subject, libraries, args.limit)
    if args.largest:
        measure_largest(args.schemas, args.largest, libraries, args.limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", help="the language model; default: the embedded model")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--schemas", type=Path, metavar="FOLDER", help="real schemas: the cost of their masks")
    parser.add_argument("--vocab", metavar="FOLDER", help="of a tokenizer, for --schemas (default: the model's)")
    parser.add_argument("--every", type=int, help=f"take every n-th schema of the folder (default: about {SCHEMAS})")
    parser.add_argument("--largest", type=int, default=0, help="measure memory, too, for the n largest schemas")
    parser.add_argument("--without", nargs="*", default=[], metavar="LIBRARY")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds for a schema in a fork")
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
        count_costs(args, lm.vocab, lm.tokenizer)
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.vocab)
        count_costs(args, Vocabulary.from_tokenizer(tokenizer), tokenizer)


if __name__ == "__main__":
    main()
