"""Answers to questions with their probabilities, and decisions: the answers about one state.

The *mass* of a question is the probability that the model writes one of its answers at all. The probabilities of the
answers are given that it does. `confidence` of an answer is that of the System One interface: for K options with the
largest probability t it is (K t - 1) / (K - 1), so 0 for a guess and 1 for certainty. For a score it is 1 - d / u, not
below 0: d is the mean distance from the likeliest level, and u that of the uniform distribution from the middle.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from llmppl.decisions.joint import Joint
from llmppl.decisions.questions import Question, Questions
from llmppl.report.probabilities import Probabilities, Share
from llmppl.report.tables import TableView, one_line
from llmppl.support.options import no_attribute
from llmppl.support.values import decode, encode

SELDOM = 0.01  # a smaller mass is said in the table
KEPT = "abstain", "tokens", "seconds", "error"  # of a decision, as data


class Answer(Probabilities):
    """Probabilities of the answers to a question: a mapping from answers to probabilities, the most probable first.

    question : Question
    best, probability : the most probable answer, and its probability
    probabilities : dict, in the order of the question
    confidence : float from 0 (no better than a guess) to 1
        (K t - 1) / (K - 1) for K answers and the largest probability t; 1 - d / u for a score, as the module defines.
    expected : float or None
        Of a score, the mean place of the level from 0, or the mean of the number. Of a predicate, the probability that
        it holds.
    bounds : dict of (low, high)
        Certain bounds over all tokenisations, or one standard error to each side. Empty after a calibration.
    log_mass : float
        Log-probability that the model writes one of the answers, at least; the least one of several orders.
    probability_se : float or None
        Standard error of `probability`, where drafts were drawn.
    spread : float
        Largest change of a probability between two orders of the options; 0 for one order.
    raw : Answer
        The answer before a calibration; this answer without one.

    Examples
    --------
    >>> answer = decide(lm, "The cat was happy.", {"mood": choice("How was it?", ["happy", "sad"])})["mood"]
    >>> answer.best, f"{answer.probability:.2f}", sorted(answer.probabilities) == ["happy", "sad"]
    ('happy', '0.57', True)
    """

    if "__getattr__" in vars(Probabilities):
        __getattr__ = no_attribute(
            "it has best, probability, probabilities, confidence, expected, bounds, log_mass"
        )

    def __init__(
        self,
        question: Question,
        shares: Sequence[Share],
        log_mass: float,
        spread: float = 0.0,
        raw: Answer | None = None,
    ) -> None:
        header = one_line(question.text)
        if math.exp(log_mass) < SELDOM:
            header += f" (the model writes one of the answers with probability {math.exp(log_mass):.2g} only)"
        super().__init__(shares, header)
        self.question, self.log_mass, self.spread = question, log_mass, spread
        self.in_order = tuple(shares)
        self.raw = self if raw is None else raw
        self.features: Any = None  # of the state, for a calibration

    @property
    def vector(self) -> list[float]:
        """Probabilities in the order of the question."""
        return [share.probability for share in self.in_order]

    @property
    def probabilities(self) -> dict[Any, float]:
        return dict(zip(self.question.values, self.vector, strict=True))

    @property
    def bounds(self) -> dict[Any, tuple[float, ...]]:
        return {share.value: share.interval for share in self.in_order if share.interval}

    @property
    def probability(self) -> float:
        return self.shares[0].probability

    @property
    def probability_se(self) -> float | None:
        return self.shares[0].se

    @property
    def confidence(self) -> float:
        probabilities = self.vector
        num = len(probabilities)
        if num == 1:
            return 1.0
        if self.question.kind != "score":
            return max(0.0, (num * max(probabilities) - 1) / (num - 1))
        likeliest, middle = probabilities.index(max(probabilities)), (num - 1) / 2
        distance = math.fsum(p * abs(i - likeliest) for i, p in enumerate(probabilities))
        uniform = math.fsum(abs(i - middle) for i in range(num)) / num
        return max(0.0, 1 - distance / uniform)

    @property
    def expected(self) -> float | None:
        if self.question.kind == "choice":
            return None
        if self.question.kind == "predicate":
            return self[True]
        places = [
            value if type(value) is int else i for i, value in enumerate(self.question.values)
        ]
        return math.fsum(map(operator.mul, places, self.vector))


def marginals(asked: Mapping[str, Question], joint: Joint) -> dict[str, Answer]:
    """Return the marginal answers of a joint distribution."""
    answers = {}
    for i, (name, question) in enumerate(asked.items()):
        shares = joint.shares(question.values, [combination[i] for combination in joint.places])
        answers[name] = Answer(question, shares, joint.log_masses[i])
    return answers


class Decision(TableView, Mapping[str, Answer]):
    """Answers to the questions about one state, by name. It is displayed as a table, in a notebook with bars.

    value : object of the type that asked, or a dict of the most probable answers; of the most probable combination
        where the decision is joint
        None stands for an answer whose confidence is below `abstain`. A record with such an answer is a dict.
    state : as it was given
    joint : Probabilities or None
        Of the tuples of answers, in the order of the questions, where `joint=True` asked for them.
    tokens, seconds : int and float, number of tokens that the model ran, and time
    error : str
        Reason why there are no answers, in a list of decisions; else "".

    Examples
    --------
    >>> decision = decide(lm, "The cat was happy.", {"mood": choice("How was it?", ["happy", "sad"])})
    >>> decision.value
    {'mood': 'happy'}
    """

    __getattr__: Any = no_attribute(
        "it maps the names of the questions to answers, as in decision[{0!r}]"
    )

    def __init__(
        self,
        state: Any,
        answers: Mapping[str, Answer],
        questions: Questions | None = None,
        *,
        joint: Joint | None = None,
        abstain: float = 0.0,
        tokens: int = 0,
        seconds: float = 0.0,
        error: str = "",
    ) -> None:
        self.state, self.abstain, self.error = state, abstain, error
        self.tokens, self.seconds = tokens, seconds
        self._joint = joint
        self._answers = dict(answers)
        self._questions = questions or Questions({})

    def __getitem__(self, name: str) -> Answer:
        if name not in self._answers:
            raise KeyError(f"there is no question {name!r}: {', '.join(self._answers)}")
        return self._answers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._answers)

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def abstains(self) -> list[str]:
        """Names of the questions whose answers have a confidence below `abstain`."""
        return [name for name, answer in self.items() if answer.confidence < self.abstain]

    @property
    def value(self) -> Any:
        if self.error:
            raise ValueError(self.error)
        unsure = self.abstains
        best = {name: answer.best for name, answer in self.items()}
        if self.joint is not None:
            best = dict(zip(best, self.joint.best, strict=True))
        values = {name: None if name in unsure else each for name, each in best.items()}
        return values if unsure else self._questions.make(values)

    @property
    def joint(self) -> Probabilities | None:
        if self._joint is None:
            return None
        return self._joint.table(self._asked())

    def _asked(self) -> dict[str, Question]:
        return {name: answer.question for name, answer in self.items()}

    def given(self, known: Mapping[str, Any] | None = None, **more: Any) -> Decision:
        """Return the decision given some answers: `decision.given(queue="billing")`, or a dict for other names.

        ValueError without `joint=True`, and for answers that have no probability together.
        """
        if self._joint is None:
            raise ValueError(
                "answers depend on each other in a joint decision only: decide(..., joint=True)"
            )
        names, places = [*self], dict[int, int]()
        for name, value in {**(known or {}), **more}.items():
            places[names.index(name)] = self[name].question.index(value)
        joint = self._joint.given(places)
        answers = marginals(self._asked(), joint)
        return Decision(self.state, answers, self._questions, joint=joint, abstain=self.abstain)

    @property
    def fields(self) -> dict[str, Answer]:
        return dict(self._answers)

    @property
    def probability(self) -> None:
        """None: the answers have probabilities, and `joint` those of all together."""
        return None

    # ---- as data

    def records(self) -> list[dict[str, Any]]:
        """Return a dict for each question and answer."""
        rows = []
        for name, answer in self.items():
            for share in answer.in_order:
                rows.append({"question": name, **share._asdict(), "log_mass": answer.log_mass})
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Return the decision as data for JSON, without the state."""
        data: dict[str, Any] = {"kind": "decision"}
        data["answers"] = {name: _data(answer) for name, answer in self.items()}
        for name in KEPT:
            data[name] = getattr(self, name)
        if self._joint is not None:
            data["joint"] = asdict(self._joint)
        return data

    # ---- as a table

    def _header(self) -> str:
        header = f"Decision({one_line(self.state)})"
        if self.error:
            header += f": no answer: {one_line(self.error)}"
        return header

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        rows = list[tuple[str, ...]]()
        for name, answer in self.items():
            said = one_line(repr(answer.best))
            if name in self.abstains:
                said = f"None (below {self.abstain:g}: {said})"
            if math.exp(answer.log_mass) < SELDOM:
                said += f"; the model seldom writes an answer, with probability {math.exp(answer.log_mass):.2g}"
            rows.append((str(answer.shares[0]), f"{answer.confidence:.2f}", one_line(name), said))
        return ("probability", "confidence", "question", "answer"), rows

    def _bars(self) -> list[list[tuple[float, ...]]]:
        return [[(answer.probability, *answer.shares[0].interval)] for answer in self.values()]


class Decisions(TableView, list[Decision]):
    """Decisions about several states, as a table with a row for each state and a column for each question.

    Examples
    --------
    >>> questions = {"mood": choice("How was it?", ["happy", "sad"])}
    >>> decisions = decide(lm, ["The cat was happy.", "It was sad."], questions)
    >>> [decision["mood"].best for decision in decisions]
    ['happy', 'happy']
    """

    def records(self) -> list[dict[str, Any]]:
        """Return a dict for each state, question and answer."""
        rows = []
        for each in self:
            rows += [{"state": each.state, **row} for row in each.records()]
        return rows

    def _header(self) -> str:
        return f"{len(self)} decisions"

    def _table(self) -> tuple[list[str], list[list[str]]]:
        names = [*dict.fromkeys(chain(*self))]
        rows = []
        for each in self:
            row = [f"{one_line(answer.best)} {answer.probability:.3f}" for answer in each.values()]
            if each.error:
                row = ["no answer"] * len(names)
            rows.append([*row, one_line(each.state)])
        return [*names, "state"], rows


# ---- data


def _data(answer: Answer) -> dict[str, Any]:
    question = answer.question
    data: dict[str, Any] = {
        "type": question.kind,
        "question": question.text,
        "names": [*question.names],
        "values": encode([*question.values], str),
        "shares": [[*share[1:]] for share in answer.in_order],
        "log_mass": answer.log_mass,
        "spread": answer.spread,
    }
    if answer.raw is not answer:
        data["raw"] = [[*share[1:]] for share in answer.raw.in_order]
    return data


def loaded(data: Mapping[str, Any], state: Any, questions: Questions | None = None) -> Decision:
    """Return the decision of `as_dict`. Without `questions`, values that are no plain data are texts."""
    answers = dict[str, Answer]()
    for name, each in data["answers"].items():
        values, names = (*decode(each["values"]),), (*each["names"],)
        question = Question(each["type"], each["question"], values, names, ("",) * len(names))
        if questions is not None:
            question = questions.asked[name]

        measured = each["log_mass"], each["spread"]
        raw = None
        if "raw" in each:
            raw = Answer(question, question.shares(each["raw"]), *measured)
        answers[name] = Answer(question, question.shares(each["shares"]), *measured, raw)
    rest = {name: data[name] for name in KEPT}
    joint = Joint(**data["joint"]) if "joint" in data else None
    return Decision(state, answers, questions, joint=joint, **rest)
