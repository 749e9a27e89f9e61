"""Coherence of decisions by JevBench: the order of options, other questions in the request, and sub-menus.

    pip install --no-deps jevbench                      # Apache-2.0; the suites are in the package
    python benchmarks/decisions_coherence.py --lm smollm2 --tests 5
    python benchmarks/decisions_coherence.py --lm embedded --settings decide

JevBench changes a question and compares the probabilities before and after. A test holds if their total variation is
at most 0.05. The tests are those of its mini suite, `--tests` or more for each relation. Settings:

    letters       one token, A, B, ..., of a list of the options: what servers of typed questions do
    decide        `decide`, raw
    orders        `decide(orders=3)`
    exact         `decide(exact=True)`

The cache of the model is empty before each request of the relations that change other questions. No answer is thus
equal for being cached.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import jevbench
import numpy as np
from jevbench.suites import load_suite
from tables import machine, table

from llmppl import CachedTransformer, choose
from llmppl.decisions import Question, choice, decide, predicate, score
from llmppl.decisions.prompts import as_context, text_of_state

OPTIONS = "option_permutation", "clone_symmetry", "irrelevant_option", "remove_option_iia", "pairwise_iia"
OTHERS = "batch_solo", "batch_order", "batch_content", "duplicate_question", "batch_size_sweep"
SETTINGS = {"letters": None, "decide": {}, "orders": {"orders": 3}, "exact": {"exact": True}}
Answers = dict[str, Any]


def letters(lm: CachedTransformer, state: str, question: Question) -> list[float]:
    """Return the probabilities of the options by their letters, in the order of the request."""
    lines = [question.text]
    for i, (name, description) in enumerate(zip(question.names, question.descriptions, strict=True)):
        lines.append(f"{chr(65 + i)}: {name} - {description}" if description else f"{chr(65 + i)}: {name}")
    lines.append("Answer with the letter of one option only.")
    prompt = f"{state}\n\nQuestion: " + "\n".join(lines)
    options = [chr(65 + i) for i in range(len(question.names))]
    found = choose(lm, as_context(lm, [{"role": "user", "content": prompt}]), options, end="prefix",
                   tokenization="canonical")  # fmt: skip
    return [found[option] for option in options]


def question_of(asked: dict[str, Any]) -> Question:
    """Return the question of System One."""
    if asked["type"] == "noul":
        return predicate(asked["instructions"])
    return {"choice": choice, "score": score}[asked["type"]](asked["instructions"], asked["criteria"])


def answering(lm: CachedTransformer, how: dict[str, Any] | None, clears: bool) -> Callable[[Any, Any], Answers]:
    """Return the function from a state and the questions of a request to the answers in the form of System One."""

    def answers(state: Any, asked: dict[str, Any]) -> Answers:
        if clears:
            lm.clear()
        questions, text = {name: question_of(each) for name, each in asked.items()}, text_of_state(state)
        if how is None:
            found = {name: letters(lm, text, question) for name, question in questions.items()}
        else:
            decision = decide(lm, text, questions, **how)
            found = {name: [*answer.probabilities.values()] for name, answer in decision.items()}
        forms = {}
        for name, p in found.items():
            kind = asked[name]["type"]
            keys = asked[name]["criteria"] if kind == "choice" else [*map(str, range(len(p)))]
            forms[name] = {"type": kind, "noul": p[0], "probabilities": dict(zip(keys, p, strict=True))}
        return forms

    return answers


def part_of_suite(tests: int) -> Any:
    """Return the mini suite with few cases, such that each relation has some tests."""
    suite = load_suite("jevbench-mini")
    wanted = Counter(dict.fromkeys([*OPTIONS, *OTHERS], tests))
    by_case = defaultdict[str, list[str]](list)
    for case, relation in suite.plan.by:
        by_case[case].append(relation)
    kept = list[str]()
    while max(wanted.values()) > 0:
        gains = {case: sum(wanted[each] > 0 for each in found) for case, found in by_case.items()}
        best = max(gains, key=lambda case: gains[case])
        kept.append(best)
        wanted.subtract(by_case.pop(best))
    cases = [case for case in suite.cases if case.id in kept]
    return dataclasses.replace(suite, cases=cases, _plan=suite.plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", default="smollm2")
    parser.add_argument("--settings", nargs="+", choices=[*SETTINGS], default=["letters", "decide", "orders"])
    parser.add_argument("--tests", type=int, default=5, help="for each relation, at least")
    parser.add_argument("--cache", help="folder of answers, with which a stopped run goes on")
    options = parser.parse_args()
    print(machine("llmppl-smc", "torch", "jevbench", note=f"{options.lm}, float32"))
    lm = CachedTransformer.from_pretrained(*([] if options.lm == "embedded" else [options.lm]))
    suite = part_of_suite(options.tests)
    questions = {case.id: case.questions for case in suite.cases}
    for setting in options.settings:
        before, start, rows = lm.stats.tokens, time.process_time(), []
        for relations in (OPTIONS, OTHERS):
            answers = answering(lm, SETTINGS[setting], clears=relations is OTHERS)
            model = jevbench.from_callable(answers, name=f"{options.lm} {setting}")
            report = jevbench.evaluate(model, suite, relations=relations, cache=options.cache or ":memory:")
            found = defaultdict[str, list[dict[str, Any]]](list)
            for outcome in report.result["outcomes"]:
                name = outcome["relation"]
                if name == "option_permutation":
                    asked = questions[outcome["case_id"]][outcome["targets"][0]]
                    name = f"{name}, {asked['type']}"
                found[name].append(outcome)
            for name, outcomes in sorted(found.items(), key=lambda item: relations.index(item[0].partition(",")[0])):
                held = np.mean([not each["violated"] for each in outcomes])
                changes = [each["deviation"] for each in outcomes]
                rows.append([name, len(outcomes), f"{held:.2f}", f"{np.mean(changes):.4f}", f"{max(changes):.4f}"])
        cost = f"{lm.stats.tokens - before:,} tokens, {time.process_time() - start:.0f} CPU s, {len(suite.cases)} cases"
        table(setting, ["relation", "comparisons", "hold", "mean change", "largest"], rows, note=cost)


if __name__ == "__main__":
    main()
