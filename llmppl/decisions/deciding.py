"""Decisions: typed questions about a state in, a probability for each answer out.

All answers of all questions go through the language model in the tokenizer's own tokens, in shared batches. The
probability of an answer is that of its text and the end after it, given that the model writes one of the answers.
The options of a choice are sorted before the prompt is built, so that their order changes nothing.
"""

from __future__ import annotations

import datetime
import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np

from llmppl.decisions.answers import Answer, Decision, Decisions, loaded
from llmppl.decisions.calibration import Calibration, Map, fitted, log_of, sketch
from llmppl.decisions.prompts import (
    LAYOUT,
    as_context,
    conversation,
    has_chat,
    is_messages,
    text_of_state,
)
from llmppl.decisions.questions import Question, Questions, questions_of
from llmppl.distributions import NO_RULE
from llmppl.inference.expansion import Limit
from llmppl.lm import CachedTransformer, Context, End
from llmppl.models.programs import language_model
from llmppl.queries.choice import Sums, Texts, sum_up
from llmppl.report.probabilities import Share
from llmppl.support.arguments import count, probability
from llmppl.support.identity import VERSION, Identity, digest, identity
from llmppl.support.options import list_options, unknown_option
from llmppl.support.runtime import Runtime, spent
from llmppl.tasks.many import TOGETHER, lanes, recorded
from llmppl.tasks.results import load_results

TOLERANCE = 1e-10  # of the sums with exact=True
MOST = 10_000  # expansions for each option with exact=True


class HowToDecide(TypedDict, total=False):
    """Options of `decide`."""

    examples: Iterable[tuple[Any, Mapping[str, Any]]]
    orders: int
    exact: bool
    abstain: float
    calibration: Calibration | None
    timeout: float | None
    budget: int | None
    together: int
    progress: bool | None
    to: str | os.PathLike[str] | None
    resume: bool | Literal["force"]
    version: str
    key: Callable[[Any], str] | None


_DEFAULTS = {
    "examples": (),
    "orders": 1,
    "exact": False,
    "abstain": 0.0,
    "together": TOGETHER,
    "resume": False,
    "version": "",
}
_OF_FILE = "to", "resume", "key", "progress"


@overload
def decide(
    lm: CachedTransformer,
    state: list[str] | list[dict[str, Any]],
    questions: Any,
    **how: Unpack[HowToDecide],
) -> Decisions: ...
@overload
def decide(
    lm: CachedTransformer, state: str | dict[str, Any], questions: Any, **how: Unpack[HowToDecide]
) -> Decision: ...
@list_options(HowToDecide, _DEFAULTS)
def decide(lm: CachedTransformer, state: Any, questions: Any, **how: Unpack[HowToDecide]) -> Any:
    """Answer typed questions about a state, with a probability for each answer.

    Parameters
    ----------
    lm : CachedTransformer
    state : str, JSON, list of messages, or a list of states
        JSON is written on one line, and messages with their roles before them. A list of dicts with roles is one state;
        another list is many states, so a JSON array as one state is [array].
    questions : dict, or type
        By name, a sentence (a predicate), `choice(...)`, `score(...)`, a list or dict of options, a bool, an Enum or a
        Literal. Or a pydantic model, a dataclass or a TypedDict of such fields and small ranges of integers, which asks
        one question for each, by its description or its name.
    examples : list of (state, {name: right answer})
        Turns of the conversation before the state. They help a small model most, and all states share their tokens.
    orders : int
        Number of rotations of the options over which probabilities are averaged. A score has one order.
    exact : bool
        Sum over all tokenisations of each answer. By default the tokenizer's own tokens count, and `bounds` say what
        others can change.
    abstain : float
        An answer whose confidence is below this is None in the value.
    calibration : Calibration, optional
        As `fit_calibration` made it, in the same setting.
    timeout, budget : float and int, optional
        Seconds, and tokens that the model runs, for each state.
    together, progress, to, resume, version, key : of a list of states, as in `run_many`

    Returns
    -------
    Decision, or Decisions for a list of states
        In a list, the `error` of a decision says why it has no answers.

    Raises
    ------
    TypeError, ValueError
        If something is no question, no option or no state, or if the calibration has another setting.
    TimeoutError
        If a limit comes before all answers are read.

    Examples
    --------
    >>> decide(lm, "The cat was happy.", {"mood": choice("How was it?", ["happy", "sad"])})["mood"].best
    'happy'
    """
    if unknown := how.keys() - HowToDecide.__annotations__.keys():
        raise unknown_option("decide", unknown, HowToDecide.__annotations__)
    given: dict[str, Any] = {**_DEFAULTS, **how}
    asking = Asking(lm, questions_of(questions), given)
    if not is_many(state):
        decision = functools.partial(asking.decision, state)
        return next(Runtime().each([(decision, "decide")], 1))
    return Decisions(_decisions(asking, state))


def _decisions(asking: Asking, states: Sequence[Any]) -> list[Decision]:
    """Return the decisions about several states, in shared batches, and write them to a file if there is one."""
    given = asking.given
    run_all = functools.partial(lanes, asking.task, count("together", given["together"]))
    kept: Any = {name: given[name] for name in _OF_FILE if name in given}
    made = dict[int, Decision]()
    for result in recorded(run_all, states, asking.identity(given["version"]), **kept):
        answer: Any = result.answer
        if answer is None:
            answer = Decision(result.task, {}, error=_last_line(result.error))
        made[result.index] = answer
    if len(made) < len(states):  # the file has the others
        for result in load_results(kept["to"]):
            if result.index < len(states) and result.index not in made:
                made[result.index] = loaded(
                    result.answer.as_dict(), states[result.index], asking.questions
                )
    return [made[index] for index in range(len(states))]


def fit_calibration(
    lm: CachedTransformer, labelled: Iterable[tuple[Any, Mapping[str, Any]]], questions: Any, *,
    balanced: bool = False, **how: Unpack[HowToDecide],
) -> Calibration:  # fmt: skip
    """Fit a map for each question from labelled states, and choose its kind by cross-validation.

    Parameters
    ----------
    lm, questions, **how : as in `decide`, which must have the same `examples` and `orders` later
    labelled : list of (state, {name of the question: right answer})
        50 or more for each question are wanted, and 20 are needed. They must not be among the examples.
    balanced : bool
        True if the answers are about equally frequent where the calibration is used. Then it also compares division by
        the mean probability of each answer.

    Returns
    -------
    Calibration

    Examples
    --------
    >>> labelled = [("It was good.", {"good": True}), ("It was bad.", {"good": False})] * 10
    >>> fit_calibration(lm, labelled, {"good": "Was it good?"}, progress=False).maps["good"].kind
    'head'
    """
    asking = Asking(lm, questions_of(questions), {**_DEFAULTS, **how})
    asking.wants_features = True
    items = [*labelled]
    decisions = _decisions(asking, [state for state, _ in items])
    maps, receipts = dict[str, Map](), dict[str, Any]()
    for name, question in asking.questions.asked.items():
        rows, features, places = [], [], []
        for decision, (_, labels) in zip(decisions, items, strict=True):
            if name in labels:
                rows.append([share.probability for share in decision[name].in_order])
                features.append(decision[name].features)
                places.append(question.index(labels[name]))
        if rows:
            found = fitted(log_of(rows), np.array(features), np.array(places), balanced=balanced)
            maps[name], receipts[name] = found
    if not maps:
        raise ValueError(f"no state has a label of a question: {', '.join(asking.questions.asked)}")
    date = datetime.date.today().isoformat()
    return Calibration(
        maps,
        {"setting": asking.setting(), "questions": receipts, "created": date, "version": VERSION},
    )


def model_name(lm: CachedTransformer) -> str:
    """Return the name of a language model, with its number of tokens and its precision."""
    configured = getattr(getattr(lm.model, "config", None), "name_or_path", "")
    name = Path(lm.engine.name or configured or type(lm.model).__name__).name
    return f"{name}, {len(lm.vocab)} tokens, {getattr(lm.engine, 'dtype', 'float32')}"


def is_many(state: Any) -> bool:
    """Check whether this is a list of states. A list of messages is one state."""
    return isinstance(state, list | tuple) and not is_messages(state)


def _last_line(error: str | None) -> str:
    return (error or "").rstrip().rpartition("\n")[2]


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
        self.tolerance, self.most = (TOLERANCE, MOST) if given["exact"] else (math.inf, 0)
        rotations = count("orders", given["orders"])
        self.orders, self.texts, self.examples = {}, {}, {}
        for name, question in questions.asked.items():
            self.orders[name] = _orders(question, rotations)
            self.texts[name] = Texts(lm, self._written(question), self.end, self._limit())
            self.examples[name] = list[tuple[str, str]]()
        for example, labels in given["examples"]:
            text = text_of_state(example)
            for name, label in labels.items():
                question = self._question(name)
                self.examples[name].append((text, question.names[question.index(label)]))
        if self.calibration is not None:
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
        options = {name: self.given[name] for name in ("exact", "abstain")}
        if self.calibration is not None:
            options["calibration"] = self.calibration.receipt
        return identity(decide, version, **self.setting(), **options)

    def task(self, state: Any, rng: np.random.Generator) -> Decision:
        return self.decision(state)

    def contexts(self, name: str, state: str) -> list[Context]:
        """Return the contexts of a question about a state, one for each order of its options."""
        question, examples = self.questions.asked[name], self.examples[name]
        turns = [conversation(state, question, order, examples) for order in self.orders[name]]
        return [as_context(self.lm, each) for each in turns]

    def decision(self, state: Any) -> Decision:
        """Return the answers about one state. TimeoutError at a limit."""
        start, before = time.perf_counter(), spent()[1]
        text, limit = text_of_state(state), self._limit()
        sums = dict[str, list[Sums]]()
        for name in self.questions.asked:
            contexts = self.contexts(name, text)
            sums[name] = [
                Sums(self.texts[name], context, NO_RULE, canonical=False) for context in contexts
            ]
        sum_up([each for of in sums.values() for each in of], self.tolerance, self.most, limit)
        answers = {name: self.answer(name, of) for name, of in sums.items()}
        return Decision(
            state,
            answers,
            self.questions,
            abstain=self.abstain,
            tokens=round(spent()[1] - before),
            seconds=time.perf_counter() - start,
        )

    def answer(self, name: str, sums: Sequence[Sums]) -> Answer:
        """Return the mean of the probabilities over the orders of the options."""
        question = self.questions.asked[name]
        choices = [each.choice(question.values, question.names) for each in sums]
        rows = np.array([[each.share(value)[1:4] for value in question.values] for each in choices])
        means, spread = rows.mean(0), float(np.ptp(rows[:, :, 0], axis=0).max())
        shares = [
            Share(value, *row) for value, row in zip(question.values, means.tolist(), strict=True)
        ]
        answer = Answer(question, shares, min(each.log_mass for each in choices), spread)
        if self.wants_features:
            answer.features = sketch(sums[0].start.log_probs())  # of a row that is cached
        if self.calibration is None or name not in self.calibration.maps:
            return answer
        calibrated = self.calibration.apply(name, means[:, 0].tolist(), answer.features)
        shares = [Share(value, p) for value, p in zip(question.values, calibrated, strict=True)]
        return Answer(question, shares, answer.log_mass, spread, raw=answer)


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
