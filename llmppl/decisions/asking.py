"""Questions to a language model: their prompts, and the answers about one state.

All answers of all questions go through the language model in the tokenizer's own tokens, in shared batches. The
probability of an answer is that of its text and the end after it, given that the model writes one of the answers.
The options of a choice are sorted before the prompt is built, so that their order changes nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from llmppl.decisions.answers import Answer, Decision, marginals
from llmppl.decisions.calibration import Calibration, model_name, sketch
from llmppl.decisions.joint import Joint
from llmppl.decisions.prompts import (
    LAYOUT,
    as_context,
    conversation,
    has_chat,
    text_of_state,
    thinking,
    with_answers,
)
from llmppl.decisions.questions import Question, Questions, with_labels
from llmppl.distributions import NO_RULE
from llmppl.inference.algorithms import importance_sampling
from llmppl.inference.run import Limit
from llmppl.lm import CachedTransformer, Context, End
from llmppl.models.programs import ConstrainedText, language_model
from llmppl.queries.choice import Sums, Texts, sum_up
from llmppl.report.probabilities import Share
from llmppl.support.arguments import count, probability
from llmppl.support.identity import Identity, digest, identity
from llmppl.support.runtime import Runtime, spent, watching

# of the sums: the share that may be left out, and further next-token distributions for each answer, at most
QUICK = 0.02, 1
EXACT = 1e-10, 10_000
MAX_COMBINATIONS = 1000  # of earlier answers that are followed


class Asked(NamedTuple):
    """Question with its prompts, one for each order of the options, and the key of its answer."""

    key: Any
    name: str
    contexts: list[Context]


class Asking:
    """Questions to a language model, and everything about them that does not depend on the state.

    orders : {name: list of orders of the options}
    """

    def __init__(
        self, lm: CachedTransformer, questions: Questions, given: Mapping[str, Any]
    ) -> None:
        self.lm, self.questions, self.given = language_model(lm), questions, given
        self.abstain = probability("abstain", given["abstain"])
        self.calibration: Calibration | None = given.get("calibration")
        self.wants_features = self.calibration is not None
        self.end: End = "eos" if has_chat(lm) else "boundary"
        self.tolerance, self.most = EXACT if given["exact"] else QUICK
        rotations = count("orders", given["orders"])
        if given["think"]:
            count("think", given["think"])
        self.orders, self.texts, self.examples = {}, {}, {}
        for name, question in questions.asked.items():
            self.orders[name] = _orders(question, rotations)
            self.texts[name] = Texts(lm, self._written(question), self.end, self._limit())
            self.examples[name] = list[tuple[str, str]]()
        for example, labels in with_labels("examples", given["examples"]):
            text = text_of_state(example)
            for name, label in labels.items():
                question = self._question(name)
                self.examples[name].append((text, question.names[question.index(label)]))
        if self.calibration is not None:
            if not isinstance(self.calibration, Calibration):
                raise TypeError("calibration must be a Calibration, as Calibration.load(path)")
            if given["joint"] or given["think"]:
                raise TypeError(
                    "a calibration is of single answers: decide without joint= and think="
                )
            self.calibration.check(self.setting())

    def _question(self, name: str) -> Question:
        if name not in self.questions.asked:
            raise ValueError(f"there is no question {name!r}: {', '.join(self.questions.asked)}")
        return self.questions.asked[name]

    def _written(self, question: Question) -> list[str]:
        """Return the texts that the model writes for the answers."""
        blank = "" if has_chat(self.lm) else " "
        return [blank + name for name in question.names]

    def _limit(self) -> Limit:
        runtime = Runtime()
        runtime.watch(self.lm.evaluator)
        return Limit(runtime, self.given.get("timeout"), self.given.get("budget"))

    def setting(self) -> dict[str, Any]:
        """Return what a calibration depends on, as data for JSON."""
        asked = {}
        for name, each in self.questions.asked.items():
            asked[name] = digest(
                (each.kind, each.text, each.names, each.descriptions, self.examples[name])
            )
        setting = {
            "model": model_name(self.lm),
            "layout": LAYOUT,
            "orders": self.given["orders"],
            "questions": asked,
        }
        return setting

    def identity(self, version: str) -> Identity:
        """Return the identity of a run over many states."""
        options = {
            name: self.given[name] for name in ("exact", "abstain", "joint", "think", "max_think")
        }
        if self.calibration is not None:
            options["calibration"] = self.calibration.receipt
        return identity(Asking.decision, version, **self.setting(), **options)

    def decision(self, state: Any, rng: np.random.Generator) -> Decision:
        """Return the answers about one state. TimeoutError at a limit."""
        start, before = time.perf_counter(), spent()[1]
        text, joint, limit = text_of_state(state), None, self._limit()
        if self.given["joint"]:
            joint = self._joint(text, limit)
            answers = marginals(self.questions.asked, joint)
        elif self.given["think"]:
            answers = {}
            for name in self.questions.asked:
                answers[name] = self._thought(name, text, rng, limit)
        else:
            answers = self.read(self.prompts(text), limit)
        return Decision(
            state,
            answers,
            self.questions,
            joint=joint,
            abstain=self.abstain,
            tokens=round(spent()[1] - before),
            seconds=time.perf_counter() - start,
        )

    def prompts(self, state: str) -> list[Asked]:
        """Return the prompts of all questions about the text of a state, by the names of the questions."""
        return [Asked(name, name, self._contexts(name, state)) for name in self.questions.asked]

    def _contexts(self, name: str, state: str, draft: str | None = None) -> list[Context]:
        """Return the contexts of a question about a state, one for each order of its options."""
        question, examples = self.questions.asked[name], self.examples[name]
        contexts = list[Context]()
        for order in self.orders[name]:
            turns = conversation(state, question, order, examples)
            if draft is not None:
                turns = thinking(turns, question, order, draft)
            contexts.append(as_context(self.lm, turns))
        return contexts

    def read(self, asked: Sequence[Asked], limit: Limit | None = None) -> dict[Any, Answer]:
        """Return the answers to questions by their keys, in shared batches. The limit begins now if none is given."""
        sums = list[list[Sums]]()
        for each in asked:
            texts = self.texts[each.name]
            sums.append(
                [Sums(texts, context, NO_RULE, canonical=False) for context in each.contexts]
            )
        sum_up([*chain(*sums)], self.tolerance, self.most, limit or self._limit())
        answers = dict[Any, Answer]()
        for each, of in zip(asked, sums, strict=True):
            answers[each.key] = self._answer(each.name, of)
        return answers

    def _joint(self, text: str, limit: Limit) -> Joint:
        """Return the probabilities of all combinations of answers, each question given the earlier answers.

        Of more than `MAX_COMBINATIONS` the most probable ones are followed, and `rest` has the others.
        """
        joint = Joint([()], [1.0], [], 0.0)
        before = list[Question]()
        for name, question in self.questions.asked.items():
            joint = joint.most_probable(MAX_COMBINATIONS)
            asked = []
            for places in joint.places:
                state = with_answers(text, before, places)
                asked.append(Asked(places, name, self._contexts(name, state)))
            answers = self.read(asked, limit).values()
            rows = [answer.vector for answer in answers]
            joint = joint.followed(rows, min(answer.log_mass for answer in answers))
            before.append(question)
        return joint

    def _thought(self, name: str, text: str, rng: np.random.Generator, limit: Limit) -> Answer:
        """Return the mean of the probabilities after drafts that the model writes first, with its standard error."""
        question, num = self.questions.asked[name], self.given["think"]
        order = self.orders[name][0]
        turns = conversation(text, question, order, self.examples[name])
        turns = thinking(turns, question, order)
        program = ConstrainedText(
            self.lm, as_context(self.lm, turns), max_tokens=self.given["max_think"], end="eos"
        )
        before = watching.set(limit.reached)
        try:
            drafts = [str(each) for each in importance_sampling(program, num, rng=rng)]
        finally:
            watching.reset(before)
        asked = [
            Asked(i, name, self._contexts(name, text, draft)) for i, draft in enumerate(drafts)
        ]
        answers = self.read(asked, limit).values()
        rows = np.array([answer.vector for answer in answers])
        means = rows.mean(0).tolist()
        errors: list[Any] = [None] * len(means)  # of one draft
        if num > 1:
            errors = (rows.std(0, ddof=1) / math.sqrt(num)).tolist()
        shares = []
        for value, mean, error in zip(question.values, means, errors, strict=True):
            shares.append(Share(value, mean, se=error))
        return Answer(question, shares, min(answer.log_mass for answer in answers))

    def _answer(self, name: str, sums: Sequence[Sums]) -> Answer:
        """Return the mean of the probabilities over the orders of the options."""
        question = self.questions.asked[name]
        choices = [each.choice(question.values, question.names) for each in sums]
        rows = list[Any]()
        for each in choices:
            rows.append([each.share(value)[1:4] for value in question.values])
        means = np.mean(rows, axis=0)
        spread = float(np.ptp(rows, axis=0)[:, 0].max())
        log_mass = min(each.log_mass for each in choices)
        answer = Answer(question, question.shares(means.tolist()), log_mass, spread)
        if self.wants_features:
            answer.features = sketch(sums[0].start.log_probs())  # of a row that is cached
        if self.calibration is None or name not in self.calibration.maps:
            return answer
        calibrated = self.calibration.apply(name, means[:, 0].tolist(), answer.features)
        shares = question.shares(zip(calibrated, strict=True))
        return Answer(question, shares, log_mass, spread, raw=answer)


def _orders(question: Question, rotations: int) -> list[list[int]]:
    """Return the orders of the options: rotations of the sorted ones; of levels, their own."""
    order = [*range(len(question.names))]
    if question.kind == "score":
        return [order]
    if question.kind == "choice":
        order.sort(key=lambda i: question.names[i])
    num = min(rotations, len(order))
    starts = [len(order) * i // num for i in range(num)]
    return [order[start:] + order[:start] for start in starts]
