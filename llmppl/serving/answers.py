"""Answers of the endpoints: the choices of a generation, their tokens, and the log-probabilities of these tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmppl.inference.exact import Beams
from llmppl.inference.particles import answer_of
from llmppl.lm import Context
from llmppl.queries.choice import Choice
from llmppl.report.probabilities import key_of
from llmppl.serving.tools import WORDS
from llmppl.tasks.answers import Generation

CUT = "max_tokens", "context", "timeout", "budget"  # ends that are none of the text itself
LEAST = -9999.0  # log-probability in JSON, which has no infinity


@dataclass
class Answer:
    """Text of a choice, its posterior probability, and the reason why it ended. A listed text has no particle."""

    text: str
    weight: float | None
    ended: str
    particle: Any = None

    @property
    def value(self) -> Hashable:
        """Key of the value of the text."""
        return self.text if self.particle is None else key_of(answer_of(self.particle))

    @property
    def finish_reason(self) -> str:
        """Return "length" if a limit has ended the text, else "stop"."""
        is_words = getattr(self.particle, "state", None) is WORDS
        cut = is_words and self.particle.num_tokens >= self.particle.must_end_by
        return "length" if cut or self.ended in CUT else "stop"

    def context(self, prompt: Context) -> Context:
        """Return the context after the text: with the tokens that the model wrote, or those of the tokenizer."""
        return prompt + self.text if self.particle is None else self.particle.context

    def num_tokens(self, prompt: Context) -> int:
        """Return the number of tokens of the text, and of the EOS that the model wrote."""
        return len(self.context(prompt)) - len(prompt) + (self.ended == "eos")


def answers(first: Generation, more: list[Generation], n: int) -> list[Answer]:
    """Return the answer, and then the most probable other values, at most `n` in all.

    The others come from the last run of `more`, if there is one, else from the run of the answer.
    """
    answer = Answer(first.text, first.probability, first.ended, first.particle)
    by_value = dict[Hashable, Answer]()
    for each in _all_answers([first, *more][-1].posterior):
        known = by_value.setdefault(each.value, each)
        if known is not each and known.weight is not None:
            known.weight += each.weight or 0.0
    by_value.pop(answer.value, None)
    others = sorted(by_value.values(), key=lambda each: -(each.weight or 0.0))
    return [answer, *others][:n]


def _all_answers(found: Any) -> Iterator[Answer]:
    """Yield the texts of a run with their weights. Beams have none."""
    if isinstance(found, Choice):
        for value, p in found.items():
            yield Answer(found.text_of(value), p, "complete")
    elif isinstance(found, Beams):
        for beam in found:
            yield Answer(str(beam), None, str(beam.particle.ended), beam.particle)
    else:
        for particle, weight in zip(found, found.weights.tolist(), strict=True):
            yield Answer(
                str(particle), weight, str(particle.ended or found.limit or "context"), particle
            )


# ---- log-probabilities


def logprobs(
    generation: Generation, prompt: Context, answer: Answer, num_top: int
) -> list[dict[str, Any]]:
    """Return an entry for each token of an answer, with the `num_top` most probable tokens at its place.

    These are probabilities of the model, without a constraint and a rule. A listed text is one token, among the others.
    """
    if generation.method == "exact":
        listed = []
        for each in _all_answers(generation.posterior):
            log_prob = math.log(each.weight) if each.weight else LEAST
            listed.append({"token": each.text, "logprob": log_prob, "bytes": [*each.text.encode()]})
        [chosen] = [each for each in listed if each["token"] == answer.text]
        return [{**chosen, "top_logprobs": listed[: max(num_top, 1)]}]
    end = answer.context(prompt)
    tokens = end.tokens[len(prompt) :]
    end.log_prob_since(prompt)  # one pass computes the distributions
    left = len(answer.text.encode())  # without a stop string
    entries = []
    context = prompt
    for token in tokens:
        if left > 0:
            log_probs = context.log_probs()
            top = np.argsort(-log_probs, kind="stable")[:num_top].tolist()
            others = [_entry(context, each, log_probs) for each in top]
            entries.append({**_entry(context, int(token), log_probs), "top_logprobs": others})
        left -= len(token.bytes)
        context += token
    return entries


def _entry(context: Context, token: int, log_probs: Any) -> dict[str, Any]:
    data = context.lm.vocab.tokens[token]
    name = data.decode(errors="replace")
    if not data and context.lm.tokenizer is not None:  # a special token
        name = context.lm.tokenizer.convert_ids_to_tokens(token)
    return {"token": name, "logprob": max(float(log_probs[token]), LEAST), "bytes": [*data]}


def legacy_logprobs(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return entries in the form of /v1/completions."""
    tokens = [entry["token"] for entry in entries]
    tops = []
    for entry in entries:
        tops.append({each["token"]: each["logprob"] for each in entry["top_logprobs"]})
    return {
        "tokens": tokens,
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": tops,
        "text_offset": [*itertools.accumulate(map(len, tokens[:-1]), initial=0)],
    }
