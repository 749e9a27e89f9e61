"""Records: the effect of whitespace, bounds on strings and lookahead on JSON from a model, on sixteen sentences or one.

    python benchmarks/records.py [--lm smollm2] [--sentences 16] [--runs 20] [--only whitespace ahead]

The record has a name, an age and a city, free strings and a number, within 40 tokens. The first table compares the
whitespace between JSON tokens, with N=5, K=3 and one run per sentence. "right" is the posterior weight of the record
that the sentence contains. The second table has N=8, K=3, and runs on one sentence that differ only in their seed:
without and with a twist by `Lookahead`, and with strings of one word.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import numpy as np
from tables import table
from task_instances import PEOPLE

from llmppl import CachedTransformer, ConstrainedText, JsonSchema, Particles, smc_steer
from llmppl.lm import Context, TokenDistribution
from llmppl.models import Lookahead
from llmppl.models.lookahead import mean_next_token

MAX_TOKENS = 40
WHITESPACE = {
    "none": False,
    "a blank": " ?",
    "a blank, or a line break and 4 blanks": r"(\n {0,4}| )?",
    "a line break and 4 blanks": r"\n? {0,4}",
    "any": True,
}
QUESTIONS = (
    'Write the record {"name": ..., "age": ..., "city": ...} of the person in this sentence: ',
    "Give name, age and city of the person in this sentence as JSON. ",
)
NUMBER = {"type": "integer", "minimum": 0, "maximum": 120}


def schema(text: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a record whose strings have the schema `text`."""
    fields = {"name": text, "age": NUMBER, "city": text}
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


def prompt(lm: CachedTransformer, question: str, sentence: str) -> Context:
    return lm.chat(question + sentence) if lm.tokenizer.chat_template else lm.context(f"{question}{sentence}\n")


def right(particles: Particles[Any], truth: list[str]) -> float:
    """Return the weight of the true record."""
    told = [[str(value).lower() for value in json.loads(text).values()] for text in particles.texts]
    return float(particles.weights[[each == [field.lower() for field in truth] for each in told]].sum())


def by_whitespace(lm: CachedTransformer, num: int) -> None:
    people = [[field.strip() for field in line.split("|")] for line in PEOPLE.strip().splitlines()][:num]
    rows, options = [], {"max_tokens": MAX_TOKENS}
    for question in QUESTIONS:
        for name, whitespace in WHITESPACE.items():
            index = JsonSchema(schema({"type": "string"}), whitespace=whitespace).index(lm.vocab)
            prompts = [prompt(lm, question, sentence) for sentence, *_ in people]
            programs = [ConstrainedText(lm, each, index, **options) for each in prompts]
            runs = [smc_steer(program, N=5, K=3, seed=i) for i, program in enumerate(programs)]
            log_mls = [run.log_ml for run in runs]
            truths = [right(run, [who, age, city]) for run, (_, who, age, _, city) in zip(runs, people, strict=True)]
            error = np.std(log_mls, ddof=1) / math.sqrt(num)
            rows.append([name, question.partition(" ")[0], f"{np.mean([len(run) for run in runs]):.1f} of 5",
                         f"{np.mean(log_mls):.1f} +- {error:.1f}", f"{np.mean(truths):.2f}"])  # fmt: skip
    table("by whitespace", ["whitespace", "question", "alive", "log Z-hat", "right"], rows)


class Ahead(ConstrainedText):
    """Constrained text with a twist: the probability that it ends within the tokens left."""

    shared = ("ahead",)

    def __init__(self, ahead: Lookahead | None, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.ahead = ahead

    def step(self) -> None:
        super().step()
        if not self.finished and self.ahead is not None:
            self.twist(self.ahead.log_mass(self.state, int(self.must_end_by) - self.num_tokens))


def by_look_ahead(lm: CachedTransformer, num: int) -> None:
    context, rows = prompt(lm, QUESTIONS[0], "Maria, 34, lives in Porto with her two cats."), []
    mixed = 0.99 * np.exp(mean_next_token(context, 200).log_probs()) + 0.01 / len(lm.vocab)     # all possible
    even = np.full(len(lm.vocab), 1 / len(lm.vocab))
    word = {"type": "string", "pattern": "^[A-Z][a-z]{1,11}$"}
    for name, text, probs in (
        ("free strings", {"type": "string"}, None),
        ("the same, twist with the model's token probabilities", {"type": "string"}, mixed),
        ("the same, twist with equal token probabilities", {"type": "string"}, even),
        ("strings of one word", word, None),
    ):
        index = JsonSchema(schema(text)).index(lm.vocab)
        dist = None if probs is None else TokenDistribution(lm.vocab, np.log(probs))
        ahead = None if dist is None else Lookahead(index, dist, MAX_TOKENS)
        program = Ahead(ahead, lm, context, index, max_tokens=MAX_TOKENS)
        runs = [smc_steer(program, N=8, K=3, seed=seed) for seed in range(num)]
        log_mls = np.array([run.log_ml for run in runs])
        rows.append([name, f"{np.mean([len(run) for run in runs]):.1f} of 8", f"{log_mls.mean():.1f}",
                     f"{log_mls.std(ddof=1):.1f}", f"{np.logaddexp.reduce(log_mls) - math.log(num):.1f}"])  # fmt: skip
    table("by knowledge of the end", ["record", "alive", "mean log Z-hat", "deviation", "log mean Z-hat"], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lm", help="a name that from_pretrained takes; default: the embedded model")
    parser.add_argument("--sentences", type=int, default=16)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=["whitespace", "ahead"], default=["whitespace", "ahead"])
    args = parser.parse_args()
    model = CachedTransformer.from_pretrained(args.lm)
    if "whitespace" in args.only:
        by_whitespace(model, args.sentences)
    if "ahead" in args.only:
        by_look_ahead(model, args.runs)
