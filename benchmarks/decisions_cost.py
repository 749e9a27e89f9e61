"""Cost of decisions: tokens and CPU seconds of one call of `decide`, of as many calls, and of the tokens by hand.

    python benchmarks/decisions_cost.py                 # the embedded model, a minute
    python benchmarks/decisions_cost.py --lm smollm2 --alone 10

Rows: 5 and 20 questions on one state, and 100 states with one question, without examples and with eight. "Wanted" is
the number of distinct prefixes of the prompts, each followed by the tokenizer's own tokens of each answer. "Alone" asks
each question about each state in a call with an empty cache; with `--alone N` only N of them run, and their cost is
scaled. "By hand" is a plain forward pass of transformers for each unbranched run of tokens, with the keys and values of
the tokens before it. It gives the same probabilities as `decide`; the last column has the largest difference.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tables import machine, save, table

from llmppl import CachedTransformer
from llmppl.constraints.vocabulary import encode_fragment
from llmppl.decisions import choice, decide, score
from llmppl.decisions.prompts import as_context, conversation, has_chat, text_of_state
from llmppl.decisions.questions import Question, questions_of

THINGS = "card parcel password invoice refund account phone order".split()
FEELINGS = "I am very angry!", "No hurry.", "Please answer today.", "Thank you for your help."
QUEUES = {"billing": "charges and refunds", "delivery": "parcels and orders", "technical support": "", "other": ""}
State = tuple[str, ...]


def states(num: int) -> list[str]:
    rng = random.Random(5)
    texts = []
    for i in range(num):
        thing, feeling = rng.choice(THINGS), rng.choice(FEELINGS)
        texts.append(f"Message {i}: there is a problem with my {thing} since {rng.randint(2, 9)} days. {feeling}")
    return texts


def questions(num: int) -> dict[str, Any]:
    """Return predicates, choices and scores in turn."""
    asked = dict[str, Any]()
    for i in range(num):
        thing = THINGS[i % len(THINGS)]
        kinds = (
            f"Does the writer have {1 + i} problems with the {thing}?",
            choice(f"Which queue should take a problem with the {thing} of level {i}?", QUEUES),
            score(f"How cross is the writer about the {thing} after {i} days?", ["calm", "annoyed", "furious"]),
        )
        asked[f"q{i}"] = kinds[i % 3]
    return asked


def examples(asked: dict[str, Question]) -> list[tuple[str, dict[str, Any]]]:
    """Return eight states with a label for each question."""
    texts = states(108)[100:]
    return [(text, {name: each.values[i % len(each.values)] for name, each in asked.items()})
            for i, text in enumerate(texts)]  # fmt: skip


def sequences(lm: CachedTransformer, state: str, asked: dict[str, Question], labelled: Any) -> Iterator[list[State]]:
    """Yield for each question the token ids of its prompt followed by each answer, by the prompts and the tokenizer."""
    for name, question in asked.items():
        order = [*range(len(question.names))]
        if question.kind == "choice":
            order.sort(key=lambda i: question.names[i])
        shown = [(text_of_state(text), question.names[question.index(of[name])]) for text, of in labelled]
        prompt = as_context(lm, conversation(state, question, order, shown)).tokens
        blank = "" if has_chat(lm) else " "
        answers = [encode_fragment(lm.tokenizer, lm.vocab, blank + each) for each in question.names]
        yield [(*map(int, prompt), *answer) for answer in answers]


def read(lm: CachedTransformer, found: list[list[State]]) -> set[State]:
    """Return the prefixes that must be read. Without eos at the end, the last token of an answer needs no reading."""
    distinct = set[State]()
    for sequence in (each for of in found for each in of):
        last = len(sequence) if has_chat(lm) else len(sequence) - 1
        distinct |= {sequence[: i + 1] for i in range(last)}
    return distinct


def by_hand(lm: CachedTransformer, distinct: set[State], found: list[list[State]]) -> list[np.ndarray]:
    """Return the probabilities of the answers to each question, given one of them."""
    model: Any = lm.model
    children = dict[State, list[State]]()
    for each in sorted(distinct, key=len):
        children.setdefault(each[:-1], []).append(each)
    logs = dict[State, float]()
    wanted = {each[: i + 1] for of in found for each in of for i in range(len(each))}
    eos = [*lm.vocab.eos_ids]
    waiting = [(first, None) for first in children[()]]
    while waiting:
        start, before = waiting.pop()
        run = [start]
        while len(children.get(run[-1], ())) == 1:
            run += children[run[-1]]
        with torch.no_grad():
            past = copy.deepcopy(before)
            out = model(torch.tensor([[each[-1] for each in run]]), past_key_values=past, use_cache=True)
            rows = torch.log_softmax(out.logits[0].double(), -1).numpy()
        for prefix, row in zip(run, rows, strict=True):
            logs[(*prefix, -1)] = float(np.logaddexp.reduce(row[eos]))
            logs |= {(*prefix, token): float(row[token]) for token in range(len(row)) if (*prefix, token) in wanted}
        waiting += [(child, out.past_key_values) for child in children.get(run[-1], ())]
    probabilities = []
    for of in found:
        common = min(i for i in range(len(of[0])) if len({each[: i + 1] for each in of}) > 1)
        totals = [sum(logs[each[: i + 1]] for i in range(common, len(each))) + logs[(*each, -1)] for each in of]
        probabilities.append(np.exp(totals - np.logaddexp.reduce(totals)))
    return probabilities


def measured(lm: CachedTransformer, run: Any) -> tuple[Any, int, float]:
    """Return what a run with an empty cache returns, its tokens and its CPU seconds."""
    lm.clear()
    before, start = lm.stats.tokens, time.process_time()
    result = run()
    return result, lm.stats.tokens - before, time.process_time() - start


def row(lm: CachedTransformer, num_states: int, num_questions: int, shots: bool, alone: int) -> list[str]:
    texts, asked = states(num_states), questions(num_questions)
    plain = questions_of(asked).asked
    labelled = examples(plain) if shots else []
    given = texts if num_states > 1 else texts[0]
    decisions, tokens, seconds = measured(lm, lambda: decide(lm, given, asked, examples=labelled, progress=False))
    decisions = decisions if num_states > 1 else [decisions]
    start = time.process_time()
    found = [each for text in texts for each in sequences(lm, text, plain, labelled)]
    distinct = read(lm, found)
    hand = ["", ""]
    if has_chat(lm):
        start = time.process_time()
        truth = by_hand(lm, distinct, found)
        answers = [answer for decision in decisions for answer in decision.values()]
        errors = [np.abs([share.probability for share in answer.in_order] - p).max()
                  for answer, p in zip(answers, truth, strict=True)]  # fmt: skip
        hand = [f"{time.process_time() - start:.1f}", f"{max(errors):.1e}"]
    pairs = [(text, name) for text in texts for name in asked]
    some = random.Random(1).sample(pairs, min(alone, len(pairs)))
    tokens_alone, seconds_alone = 0, 0.0
    for text, name in some:
        few = [(example, {name: of[name]}) for example, of in labelled]
        _, more, longer = measured(lm, lambda few=few, text=text, name=name: decide(
            lm, text, {name: asked[name]}, examples=few))  # fmt: skip
        tokens_alone += more
        seconds_alone += longer
    scale = len(pairs) / len(some)
    return [f"{num_states} x {num_questions}" + (", 8 examples" if shots else ""), f"{len(distinct):,}", f"{tokens:,}",
            f"{tokens / len(distinct):.3f}", f"{scale * tokens_alone:,.0f}", f"{seconds:.1f}",
            f"{scale * seconds_alone:.1f}", *hand]  # fmt: skip


HEADS = ["states x questions", "wanted", "decide", "ratio", "alone", "CPU s", "CPU s alone", "by hand", "difference"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", default="embedded")
    parser.add_argument("--alone", type=int, default=100, help="number of single calls of a row, at most")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the tables to this file as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine("llmppl-smc", "torch", "transformers", note=f"{options.lm}, float32"))
    lm = CachedTransformer.from_pretrained(*([] if options.lm == "embedded" else [options.lm]))
    decide(lm, "x", questions(3))                       # the first pass of a process is slower
    rows = [row(lm, *sizes, shots, options.alone) for sizes in ((1, 5), (1, 20), (100, 1)) for shots in (False, True)]
    table("tokens and CPU seconds", HEADS, rows)
    save(options.out, "torch", "transformers")


if __name__ == "__main__":
    main()
