"""Calibrated records: the effect of `fit_record_calibration` on the closed field of a record.

    python benchmarks/record_calibration.py SET.jsonl ... --out FILE        # SmolLM2, a quarter of an hour

Records and prompts are those of record_confidence.py: a gist of the text, and then its label. The calibration is fitted
on lines of the fit split, and the table shows lines of the test split. "Answer" is the label of the greedy record, and
"best" the most probable value of `conditionals()`. ± is the standard error over the lines; differences are paired.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from record_confidence import Case, cases_of
from tables import save, table

from llmppl import CachedTransformer, generate
from llmppl.decisions import fit_record_calibration

Scores = NDArray[np.float64]


def brier(case: Case, found: dict[str, float]) -> float:
    right = case.right[case.closed]
    return sum((p - (value == right)) ** 2 for value, p in found.items())


def mean(values: Scores, sign: str = "") -> str:
    return f"{values.mean():{sign}.3f} +- {values.std(ddof=1) / len(values) ** 0.5:.3f}"


def scores_of(lm: CachedTransformer, path: Path, labels: int, lines: int) -> Scores:
    """Return a row for each line: Brier scores before and after, and whether the answer and both bests are right."""
    fit = [*cases_of(path, labels, "fit")]
    labelled = [(case.prompt, case.right) for case in fit]
    calibration = fit_record_calibration(lm, labelled, fit[0].constraint, progress=False)
    print(f"{path.stem}: {calibration}", flush=True)
    rows = []
    for case in cases_of(path, lines):
        answer = generate(lm, case.prompt, case.constraint, calibration=calibration)
        plain = generate(lm, case.prompt, case.constraint)
        right = case.right[case.closed]
        before, after = plain.conditionals()[case.closed], answer.conditionals()[case.closed]
        hits = [plain.value[case.closed] == right, before.best == right, after.best == right]
        rows.append([brier(case, before), brier(case, after), *hits])
    return np.array(rows, dtype=np.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", type=Path)
    parser.add_argument("--lm", default="smollm2")
    parser.add_argument("--labels", type=int, default=60)
    parser.add_argument("--lines", type=int, default=40)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table to this file as JSON")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lm = CachedTransformer.from_pretrained(*([] if given.lm == "embedded" else [given.lm]))
    start = time.process_time()
    found = {path.stem: scores_of(lm, path, given.labels, given.lines) for path in given.sets}
    found["all"] = np.concatenate([*found.values()])
    rows = []
    for name, scores in found.items():
        before, after, *hits = scores.T
        shares = [f"{each.mean():.2f}" for each in hits]
        rows.append([name, mean(before), mean(after), mean(after - before, "+"), *shares])
    columns = ["set", "Brier", "calibrated", "difference", "answer right", "best right", "calibrated best right"]
    table(f"{given.labels} labels, {given.lines} lines of a set, {given.lm}", columns, rows)
    print(f"{time.process_time() - start:.0f} CPU s")
    save(given.out, "torch", "transformers")


if __name__ == "__main__":
    main()
