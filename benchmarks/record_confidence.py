"""Confidence in records: how well several rules say whether a field, and a whole record, is right.

    python benchmarks/record_confidence.py SET.jsonl ... --lm smollm2 --out reads.json     # half an hour of one core
    python benchmarks/record_confidence.py --out reads.json                                # the tables alone

A record of a set has a free text and then the label of a line, as in benchmarks/decisions.py. A trip has a city, a
number of nights and a season, as in benchmarks/one_call.py. Rules for the closed field, the label or the season:

    votes            share of 20 samples under the mask, those that a check refuses included
    weights          their weights: the posterior of `generate(method="best_of")`
    both             mean of votes and weights
    joint            joint probabilities of the different texts, normalised
    rest             `conditionals()` of the answer of "best_of"
    rest of greedy   `conditionals()` of the greedy answer, without a sample
    rest, averaged   conditionals of each sample, averaged by the weights
    rest, voted      the same, each sample counted once

A score is the Brier score of the distribution over the values. For a whole record, it is that of the probability of the
answer of "best_of". The rule is chosen on the even lines of a set, and the table shows the odd ones. ± is the standard
error over the lines, and differences are paired by line.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from one_call import records
from tables import machine, table

from llmppl import CachedTransformer, JsonSchema, generate
from llmppl.cli import options
from llmppl.models.choices import log_joints
from llmppl.tasks.answers import Generation, fields_of

RULES = "votes", "weights", "both", "joint", "rest", "rest of greedy", "rest, averaged", "rest, voted"
WHOLE = "votes", "weights", "both", "joint"
LINES = 20                                              # of a set
WORDS = 40                                              # of a state, at most
SHOTS = 2


class Case(NamedTuple):
    """Prompt with its right record, and the name of its closed field."""

    set: str
    prompt: Any
    constraint: Any
    right: dict[str, Any]
    closed: str
    values: list[Any]


def cases_of(path: Path, lines: int = LINES, split: str = "test") -> Iterator[Case]:
    """Yield the first short lines of a split, each after two lines of the fit split as examples."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    short = [row for row in rows if len(row["state"].split()) <= WORDS]
    shots = [row for row in short if row["split"] == "fit"][:SHOTS]
    chosen = [row for row in short if row["split"] == split and row not in shots]
    for row in chosen[:lines]:
        schema = {
            "type": "object",
            "properties": {"gist": {"type": "string", "maxLength": 60}, "label": {"enum": row["options"]}},
            "required": ["gist", "label"],
            "additionalProperties": False,
        }
        turns = []
        for each in shots:
            record = {"gist": " ".join(each["state"].split()[:6]), "label": each["label"]}
            turns.append({"role": "user", "content": f"Text: {each['state']}"})
            turns.append({"role": "assistant", "content": json.dumps(record, ensure_ascii=False)})
        turns.append({"role": "user", "content": f"Text: {row['state']}"})
        task = f"{row['question']} Answer by a record of the text's gist and a label of {', '.join(row['options'])}."
        turns[0]["content"] = f"{task}\n\n{turns[0]['content']}"
        yield Case(path.stem, turns, JsonSchema(schema), {"label": row["label"]}, "label", row["options"])


def trips(lm: CachedTransformer) -> Iterator[Case]:
    """Yield the trips of one_call.py."""
    prompts, trips, kind = records(lm)
    for prompt, right in zip(prompts, trips, strict=True):
        yield Case("trips", prompt, kind, right.model_dump(), "season", ["spring", "summer", "autumn", "winter"])


def beliefs(case: Case, particles: list[Any], weights: Any) -> list[float]:
    """Return the probability of each value of the closed field, by weights of the particles."""
    told = [None if each._refused_ else fields_of(each.parsed).get(case.closed) for each in particles]
    return [float(sum(weight for weight, value in zip(weights, told, strict=True) if value == wanted))
            for wanted in case.values]  # fmt: skip


def rest(case: Case, answer: Generation, text: str) -> list[float]:
    """Return the conditional of the closed field, with the rest as in a text."""
    like: Any = SimpleNamespace(
        text=text, prompt=answer.prompt, cut=False, value=answer.value, _value=answer._value
    )
    found = answer._plan.conditionals(like)[case.closed]
    return [found[value] for value in case.values]


def read(lm: CachedTransformer, case: Case, seed: int) -> dict[str, Any]:
    """Return the beliefs by each rule, and the values of the answers."""
    start = time.process_time()
    greedy = generate(lm, case.prompt, case.constraint)
    times = {"greedy": time.process_time() - start}
    found = {"rest of greedy": rest(case, greedy, greedy.text)}
    times["rest of greedy"] = time.process_time() - start
    answer = generate(lm, case.prompt, case.constraint, method="best_of", N=20, seed=seed)
    particles = [*answer.posterior]
    equal = np.full(len(particles), 1 / len(particles))
    weights = answer.posterior.weights
    places = {str(each): i for i, each in enumerate(particles)}
    joints = np.zeros(len(particles))
    logs = np.array(log_joints([particles[i] for i in places.values()]))
    joints[[*places.values()]] = np.exp(logs - logs.max())
    joints /= joints.sum()
    rests = {text: rest(case, answer, text) for text, i in places.items() if not particles[i]._refused_}
    found["rest"] = rest(case, answer, answer.text)
    by_weight = {"votes": equal, "weights": weights, "both": (equal + weights) / 2, "joint": joints}
    whole = dict[str, float]()
    for rule, each in by_weight.items():
        found[rule] = beliefs(case, particles, each)
        whole[rule] = float(sum(each[i] for i, one in enumerate(particles)
                                if not one._refused_ and one.parsed == answer.value))  # fmt: skip
    for rule, each in (("rest, averaged", weights), ("rest, voted", equal)):
        texts = [(weight, rests[str(one)]) for weight, one in zip(each, particles, strict=True) if str(one) in rests]
        found[rule] = (np.array([weight for weight, _ in texts]) @ np.array([row for _, row in texts])).tolist()
    told, said = fields_of(answer.value), fields_of(greedy.value)
    return {
        "set": case.set,
        "right": case.values.index(case.right[case.closed]),
        "found": found,
        "whole": whole,
        "is_right": all(told[name] == value for name, value in case.right.items()),
        "answers": [case.values.index(each[case.closed]) for each in (told, said)],
        "seconds": times,
    }


def brier(row: dict[str, Any], rule: str) -> float:
    p = np.array(row["found"][rule])
    return float(((p - np.eye(len(p))[row["right"]]) ** 2).sum())


def show(rows: list[dict[str, Any]]) -> None:
    """Print the tables of the rows."""

    def scores_of(some: list[dict[str, Any]]) -> dict[str, np.ndarray]:
        return {rule: np.array([brier(row, rule) for row in some]) for rule in RULES}

    def wholes_of(some: list[dict[str, Any]]) -> dict[str, np.ndarray]:
        return {rule: np.array([(row["whole"][rule] - row["is_right"]) ** 2 for row in some]) for rule in WHOLE}

    def said(values: np.ndarray, sign: str = "") -> str:
        return f"{values.mean():{sign}.3f} ± {values.std(ddof=1) / len(values) ** 0.5:.3f}"

    by_set = defaultdict[str, list[Any]](list)
    for row in rows:
        by_set[row["set"]].append(row)
    choosing = [row for some in by_set.values() for row in some[::2]]
    held_out = [row for some in by_set.values() for row in some[1::2]]
    for title, of, rules in (("closed field", scores_of, RULES), ("whole record", wholes_of, WHOLE)):
        first, last = of(choosing), of(held_out)
        best = min(rules, key=lambda rule: first[rule].mean())
        lines = []
        for rule in rules:
            lines.append([rule, said(first[rule]), said(last[rule]), said(last[rule] - last["weights"], "+")])
            if title == "closed field":
                hits = np.array([int(np.argmax(row["found"][rule])) == row["right"] for row in held_out])
                lines[-1].append(said(hits))
        note = f"chosen on the first half: {best}. {machine('torch', 'transformers')}"
        heads = ["rule", f"Brier, {len(choosing)} lines to choose", f"{len(held_out)} held out", "less weights"]
        if title == "closed field":
            heads.append("right")
        table(title, heads, lines, note)
    for name, some in by_set.items():
        scores = scores_of(some)
        print(name, len(some), {rule: round(float(score.mean()), 3) for rule, score in scores.items()})
    right = np.array([[place == row["right"] for place in row["answers"]] for row in rows])
    print(f"the field of the answer is right: best_of {said(right[:, 0])}, greedy {said(right[:, 1])}")
    seconds = np.array([[row["seconds"]["greedy"], row["seconds"]["rest of greedy"]] for row in rows]).sum(0)
    print(f"conditionals of a greedy answer cost {seconds[1] / seconds[0] - 1:.0%} of its CPU time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", type=Path)
    parser.add_argument("--lm", default="smollm2")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = json.loads(given.out.read_text()) if given.out.exists() else []
    if given.sets:
        lm = options.load(given.lm)
        cases = [*trips(lm), *(case for path in given.sets for case in cases_of(path))]
        for seed, case in enumerate(cases[len(rows) :], len(rows)):
            rows.append(read(lm, case, seed))
            given.out.write_text(json.dumps(rows))
            print(f"\r{len(rows)} of {len(cases)}", end="", flush=True)
    show(rows)


if __name__ == "__main__":
    main()
