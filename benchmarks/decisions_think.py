"""Reasoning before a decision: the Brier score with drafts in front of the answer, and without.

    python benchmarks/decisions_think.py SET.jsonl ... --lm smollm2 --out think.json
    python benchmarks/decisions_think.py --out think.json       # the table alone

Sets are those of benchmarks/decisions.py; the items are the first of the test split. Both readings see no example and
no calibration. Differences are paired by item, and ± is the standard error over the items.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from decisions import place_of, question_of
from tables import machine, table

from llmppl import CachedTransformer
from llmppl.cli import options
from llmppl.decisions import decide

ITEMS = 40                                              # of a set
WORDS = 80                                              # of a state, at most
DRAFTS = {"think": 4, "max_think": 48}


def read(lm: CachedTransformer, path: Path) -> list[dict[str, Any]]:
    """Return probabilities and seconds of each reading, for each item of a set."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row for row in rows if row["split"] == "test" and len(row["state"].split()) <= WORDS][:ITEMS]
    found = []
    for seed, row in enumerate(rows):
        question = question_of(row)
        item: dict[str, Any] = {"set": path.stem, "right": place_of(row)}
        for name, how in (("plain", {}), ("think", {**DRAFTS, "seed": seed})):
            start = time.process_time()
            answer = decide(lm, row["state"], {"q": question}, **how)["q"]
            item[name] = [share.probability for share in answer.in_order]
            item[f"{name} s"] = time.process_time() - start
        found.append(item)
        print(f"\r{path.stem} {len(found)} of {len(rows)}", end="", flush=True)
    return found


def show(items: list[dict[str, Any]]) -> None:
    rows = list[list[str]]()
    for name in [*dict.fromkeys(item["set"] for item in items), "all"]:
        some = [item for item in items if name in (item["set"], "all")]
        scores = np.array([[brier(item, how) for how in ("plain", "think")] for item in some])
        hits = np.array([[int(np.argmax(item[how])) == item["right"] for how in ("plain", "think")] for item in some])
        seconds = np.array([[item["plain s"], item["think s"]] for item in some]).sum(0)
        apart = scores[:, 1] - scores[:, 0]
        rows.append([
            name, str(len(some)), *(f"{score:.3f}" for score in scores.mean(0)),
            f"{apart.mean():+.3f} ± {apart.std(ddof=1) / len(some) ** 0.5:.3f}",
            *(f"{share:.2f}" for share in hits.mean(0)), f"{seconds[1] / seconds[0]:.0f}",
        ])  # fmt: skip
    heads = ["set", "items", "Brier, plain", "with drafts", "difference", "right, plain", "with drafts", "CPU times"]
    table(f"{DRAFTS['think']} drafts of {DRAFTS['max_think']} tokens", heads, rows, machine("torch", "transformers"))


def brier(item: dict[str, Any], how: str) -> float:
    """Return the Brier score over the options, 0 to 2."""
    p = np.array(item[how])
    return float(((p - np.eye(len(p))[item["right"]]) ** 2).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", type=Path)
    parser.add_argument("--lm", default="smollm2")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    items = json.loads(given.out.read_text()) if given.out.exists() else []
    done = {item["set"] for item in items}
    if missing := [path for path in given.sets if path.stem not in done]:
        lm = options.load(given.lm)
        for path in missing:
            items += read(lm, path)
            given.out.write_text(json.dumps(items))
    show(items)


if __name__ == "__main__":
    main()
