"""Decisions on labelled sets: the Brier score and calibration of several readings of the same question.

    python benchmarks/decisions.py SET.jsonl ... --lm smollm2 --out reads/        # reads, and prints the tables
    python benchmarks/decisions.py SET.jsonl ... --out reads/ --json results.json # the tables alone, of the files there

A line of a set has `state`, `question`, `type`, `options`, `label`, and `split`, "fit" or "test". Readings:

    letters       one token, A, B, ..., of a list of the options: what servers of typed questions do
    first         the first token of each option, in the prompt of `decide`
    decide        `decide`, raw
    orders        `decide(orders=3)`
    ... 8         the same after eight labelled examples of the fit split, which no calibration sees

Each calibration is fitted on n labels of the fit split: `decide` by `fit_calibration`'s choice of a map, and letters by
the best of a temperature and biases. Scores are those of the test split; an se is over its items.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from tables import machine, table

from llmppl import CachedTransformer, choose
from llmppl.decisions import choice, predicate, score
from llmppl.decisions.asking import Asking
from llmppl.decisions.calibration import SKETCH, fitted, log_of, normalised
from llmppl.decisions.deciding import DEFAULTS, _decisions
from llmppl.decisions.measures import Outcome, measures
from llmppl.decisions.prompts import as_context
from llmppl.decisions.questions import Question, Questions

SIZES = 20, 40, 60, 92
EXAMPLES = 8
SHORT = 25                                              # words of an example, at most
Reads = dict[str, np.ndarray]


def question_of(row: dict[str, Any]) -> Question:
    """Return the question of a line of a set."""
    if row["type"] == "predicate":
        return predicate(row["question"])
    return {"choice": choice, "score": score}[row["type"]](row["question"], row["options"])


def place_of(row: dict[str, Any]) -> int:
    return row["options"].index(row["label"])


def examples_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return short items of the end of the fit split, with each label about equally often."""
    found = list[dict[str, Any]]()
    for row in reversed([row for row in rows if row["split"] == "fit"]):
        same = sum(each["label"] == row["label"] for each in found)
        most = max(1, EXAMPLES // len(row["options"]))
        if len(found) < EXAMPLES and len(row["state"].split()) < SHORT and same < most:
            found.append(row)
    random.Random(3).shuffle(found)
    return found


def letter_turns(row: dict[str, Any], examples: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the prompt of a server that reads one letter."""
    listed = "\n".join(f"{chr(65 + i)}: {name}" for i, name in enumerate(row["options"]))
    asked = f"{row['question']}\n{listed}\nAnswer with the letter of one option only."
    if not examples:
        return [{"role": "user", "content": f"{row['state']}\n\nQuestion: {asked}"}]
    turns = []
    for each in examples:
        turns.append({"role": "user", "content": f"Text: {each['state']}"})
        turns.append({"role": "assistant", "content": chr(65 + place_of(each))})
    turns.append({"role": "user", "content": f"Text: {row['state']}"})
    turns[0]["content"] = f"{asked}\n\n{turns[0]['content']}"
    return turns


def read_letters(lm: CachedTransformer, rows: list[dict[str, Any]], examples: list[dict[str, Any]]) -> Reads:
    options = [chr(65 + i) for i in range(len(rows[0]["options"]))]
    contexts = [as_context(lm, letter_turns(row, examples)) for row in rows]
    found = choose(lm, contexts, options, end="prefix", tokenization="canonical")
    return {"p": np.array([[each[option] for option in options] for each in found])}


def read_decisions(
    lm: CachedTransformer, rows: list[dict[str, Any]], examples: list[dict[str, Any]], orders: int
) -> Reads:
    """Return probabilities, log masses and features by `decide`, and the probabilities of first tokens."""
    reads = defaultdict[str, list[Any]](list)
    by_question = defaultdict[str, list[int]](list)
    for i, row in enumerate(rows):
        by_question[row["question"]].append(i)
    order = list[int]()
    for places in by_question.values():
        question = question_of(rows[places[0]])
        labelled = [(each["state"], {"q": question.values[place_of(each)]}) for each in examples]
        given = {**DEFAULTS, "examples": labelled, "orders": orders, "progress": False}
        asking = Asking(lm, Questions({"q": question}), given)
        asking.wants_features = True
        texts = asking.texts["q"]
        firsts = [texts.own[i][0] for i in np.argsort(texts.order)]
        for place, decision in zip(places, _decisions(asking, [rows[i]["state"] for i in places]), strict=True):
            answer = decision["q"]
            reads["p"].append([share.probability for share in answer.in_order])
            reads["log_mass"].append(answer.log_mass)
            reads["features"].append(answer.features.astype(np.float32))
            reads["spread"].append(answer.spread)
            [context, *_] = asking._contexts("q", rows[place]["state"])
            first = context.log_probs()[firsts]
            reads["first"].append(np.exp(normalised(first)))
            order.append(place)
    back = np.argsort(order)
    return {name: np.array(of)[back] for name, of in reads.items()}


def read_set(lm: CachedTransformer, path: Path, out: Path, num_test: int) -> None:
    """Read a set in every way, and write a file for each. Files that are there stay."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    examples = examples_of(rows)
    chosen = {each["id"] for each in examples}
    fit = [row for row in rows if row["split"] == "fit" and row["id"] not in chosen]
    used = fit + [row for row in rows if row["split"] == "test"][:num_test]
    labels = np.array([place_of(row) for row in used])
    ways = {
        "letters": lambda: read_letters(lm, used, []),
        "letters 8": lambda: read_letters(lm, used, examples),
        "decide": lambda: read_decisions(lm, used, [], 1),
        "decide 8": lambda: read_decisions(lm, used, examples, 1),
        "orders": lambda: read_decisions(lm, used, [], 3),
    }
    for name, read in ways.items():
        file = out / f"{path.stem}.{name}.npz"
        if file.exists():
            continue
        lm.clear()
        before, start = lm.stats.tokens, time.process_time()
        reads = read()
        cost = {"tokens": (lm.stats.tokens - before) / len(used), "cpu": (time.process_time() - start) / len(used)}
        np.savez_compressed(file, labels=labels, num_fit=len(fit), **cost, **reads)
        print(f"{path.stem} {name}: {cost['tokens']:.0f} tokens and {cost['cpu']:.2f} CPU s an item", flush=True)


# ---- the tables


def outcomes(p: np.ndarray, labels: np.ndarray) -> list[Outcome]:
    return [Outcome(row, int(label)) for row, label in zip(p.tolist(), labels, strict=True)]


def readings(out: Path, stem: str) -> dict[str, tuple[list[Outcome], dict[str, Any]]]:
    """Return the outcomes of the test split by every reading and calibration, with the cost of a read."""
    found = {}
    for name in ("letters", "letters 8", "decide", "decide 8", "orders"):
        with np.load(out / f"{stem}.{name}.npz") as data:
            reads = dict(data)
        num_fit, labels, p = int(reads["num_fit"]), reads["labels"], reads["p"]
        cost = {"tokens": float(reads["tokens"]), "cpu": float(reads["cpu"])}
        test = slice(num_fit, None)
        found[name] = outcomes(p[test], labels[test]), cost
        if "first" in reads and name != "orders":
            found[name.replace("decide", "first")] = outcomes(reads["first"][test], labels[test]), cost
        features = reads.get("features", np.zeros((len(p), SKETCH))).astype(np.float64)
        kinds = ["temperature", "biases"] if "letters" in name else ["temperature", "biases", "head"]
        for size in SIZES:
            size = min(size, num_fit)
            fit = slice(0, size)
            chosen, _ = fitted(log_of(p[fit]), features[fit], labels[fit], kinds)
            calibrated = np.exp(chosen(log_of(p[test]), features[test]))
            found[f"{name}, {size} labels"] = outcomes(calibrated, labels[test]), {**cost, "map": chosen.kind}
    return found


def row_of(name: str, found: list[Outcome], reference: list[Outcome], cost: dict[str, Any]) -> list[str]:
    of = measures(found)
    differences = np.array([a.brier - b.brier for a, b in zip(found, reference, strict=True)])
    se = differences.std() / np.sqrt(len(differences))
    return [
        name, str(of.n), f"{of.accuracy:.3f}", f"{of.brier:.3f}", f"{differences.mean():+.3f} +- {se:.3f}",
        f"{of.log_loss:.3f}", f"{of.ece:.3f}", f"{of.ece_floor:.3f}", f"{of.ece_band:.3f}", f"{cost['tokens']:.0f}",
        f"{cost['cpu']:.2f}", cost.get("map", ""),
    ]  # fmt: skip


HEADS = ["reading", "n", "acc.", "Brier", "- letters", "log loss", "ECE", "floor", "95 %", "tokens", "CPU s", "map"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", type=Path)
    parser.add_argument("--lm", help="model to read with; without it, only the files in --out are used")
    parser.add_argument("--out", type=Path, required=True, help="folder of the files that are read")
    parser.add_argument("--test", type=int, default=200, help="items of the test split")
    parser.add_argument("--json", type=Path, help="file that gets the tables")
    parser.add_argument("--dtype", help="precision of the model, as bfloat16")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print(machine("llmppl-smc", "torch", note=f"{options.lm or 'files'}, {options.dtype or 'float32'}"))
    if options.lm:
        how = {"dtype": options.dtype} if options.dtype else {}
        lm = CachedTransformer.from_pretrained(options.lm, **how)
        for path in options.sets:
            read_set(lm, path, options.out, options.test)
    pooled, costs = defaultdict[str, list[Outcome]](list), defaultdict[str, list[dict[str, Any]]](list)
    data = dict[str, Any]()
    for path in options.sets:
        found = readings(options.out, path.stem)
        reference = found["letters"][0]
        table(path.stem, HEADS, [row_of(name, of, reference, cost) for name, (of, cost) in found.items()])
        data[path.stem] = {name: {**measures(of)._asdict(), **cost} for name, (of, cost) in found.items()}
        for name, (of, cost) in found.items():
            pooled[name] += of
            costs[name].append(cost)
    rows = []
    for name, of in pooled.items():
        if len(of) == len(pooled["letters"]):
            mean = {key: float(np.mean([cost[key] for cost in costs[name]])) for key in ("tokens", "cpu")}
            rows.append(row_of(name, of, pooled["letters"], mean))
            data.setdefault("pooled", {})[name] = {**measures(of)._asdict(), **mean}
    table("pooled", HEADS, rows)
    if options.json:
        options.json.write_text(json.dumps(data, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
