"""Measures of probabilities against labels: accuracy, Brier score, log loss, expected calibration error.

The *Brier score* is the sum of the squared differences between the probabilities and the truth, from 0 to 2. The
*expected calibration error* (ECE) is the mean distance, over ten bins of the largest probability, between the mean
probability and the accuracy. It is not 0 for perfect probabilities of few items: its *floor* is the mean ECE of labels
that are drawn from the probabilities, and `ece_band` the 95 % quantile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmppl.decisions.answers import Decision
from llmppl.distributions import Floats
from llmppl.report.tables import TableView
from llmppl.support.arguments import shown

BINS = 10
DRAWS = 400  # of labels, for the floor
THRESHOLDS = 0.5, 0.7, 0.8, 0.9, 0.95


class Measures(NamedTuple):
    """Measures of n probabilities. `accuracy_se` and `brier_se` are standard errors."""

    n: int
    accuracy: float
    accuracy_se: float
    brier: float
    brier_se: float
    log_loss: float
    ece: float
    ece_floor: float
    ece_band: float


class Outcome(NamedTuple):
    """Probabilities of the answers to one question about one state, and the place of the label."""

    probabilities: Sequence[float]
    label: int

    @property
    def confidence(self) -> float:
        return max(self.probabilities)

    @property
    def is_right(self) -> bool:
        return self.probabilities.index(self.confidence) == self.label

    @property
    def brier(self) -> float:
        return math.fsum((p - (i == self.label)) ** 2 for i, p in enumerate(self.probabilities))

    @property
    def log_loss(self) -> float:
        return -math.log(max(self.probabilities[self.label], 1e-12))


def measures(outcomes: Sequence[Outcome], seed: int = 0) -> Measures:
    """Return the measures of some outcomes, at least one."""
    right = _column(outcomes, "is_right")
    confidences = _column(outcomes, "confidence")
    briers = _column(outcomes, "brier")
    rng = np.random.default_rng(seed)
    drawn = [ece(confidences, rng.random(len(right)) < confidences) for _ in range(DRAWS)]
    root = math.sqrt(len(outcomes))
    return Measures(
        len(outcomes),
        float(right.mean()),
        float(right.std() / root),
        float(briers.mean()),
        float(briers.std() / root),
        float(_column(outcomes, "log_loss").mean()),
        ece(confidences, right),
        float(np.mean(drawn)),
        float(np.quantile(drawn, 0.95)),
    )


def ece(confidences: Floats, right: NDArray[np.bool_]) -> float:
    """Return the expected calibration error of (n,) largest probabilities."""
    total = 0.0
    for chosen in _bins(confidences):
        total += abs(confidences[chosen].sum() - right[chosen].sum())
    return float(total / len(right))


def _bins(confidences: Floats) -> list[NDArray[np.bool_]]:
    """Return the items in each bin that has any."""
    places = np.minimum((confidences * BINS).astype(int), BINS - 1)
    return [places == i for i in np.unique(places)]


def _column(outcomes: Sequence[Outcome], name: str) -> Any:
    return np.array([getattr(each, name) for each in outcomes])


class CalibrationReport(TableView):
    """Measures of decisions against labels: a table, in a notebook with a reliability diagram.

    measures : dict of Measures by question; "all" has those of all questions together

    Examples
    --------
    >>> decisions = decide(lm, ["It was good.", "It was bad."], {"good": "Was it good?"})
    >>> report = calibration_report(decisions, [{"good": True}, {"good": False}])
    >>> report.measures["good"].n, report.measures["good"].accuracy
    (2, 0.5)
    """

    numbers = True

    def __init__(self, outcomes: Mapping[str, Sequence[Outcome]]) -> None:
        self.outcomes = dict(outcomes)
        if len(outcomes) > 1:
            self.outcomes["all"] = [*chain(*outcomes.values())]
        self.measures = {name: measures(of) for name, of in self.outcomes.items()}

    def records(self) -> list[dict[str, Any]]:
        """Return a dict for each question."""
        return [{"question": name, **of._asdict()} for name, of in self.measures.items()]

    def thresholds(self) -> list[dict[str, Any]]:
        """Return a dict for each question and threshold: the share of items above it, and their accuracy."""
        rows = []
        for name, of in self.outcomes.items():
            for threshold in THRESHOLDS:
                above = [each.is_right for each in of if each.confidence >= threshold]
                row: dict[str, Any] = {
                    "question": name,
                    "threshold": threshold,
                    "coverage": len(above) / len(of),
                }
                row["accuracy"] = sum(above) / len(above) if above else None
                rows.append(row)
        return rows

    def to_svg(self, name: str | None = None) -> str:
        """Return the reliability diagram of a question, by default of all: accuracy by probability, a dot a bin."""
        of = self.outcomes[name or [*self.outcomes][-1]]
        confidences = _column(of, "confidence")
        right = _column(of, "is_right")
        dots = list[str]()
        for chosen in _bins(confidences):
            x, y = 30 + 160 * confidences[chosen].mean(), 170 - 160 * right[chosen].mean()
            radius = 2 + 10 * math.sqrt(chosen.mean())
            dots.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="currentColor" opacity="0.5"/>'
            )
        return (
            '<svg class="reliability" xmlns="http://www.w3.org/2000/svg" role="img" width="210" height="200" '
            'font-size="10" fill="currentColor"><title>Reliability: accuracy by probability</title>'
            '<path d="M30 10V170H190M30 170L190 10" fill="none" stroke="currentColor" opacity="0.4"/>'
            f'{"".join(dots)}<text x="30" y="184">0</text><text x="184" y="184">1</text>'
            '<text x="80" y="196">probability</text><text x="16" y="172">0</text><text x="16" y="16">1</text></svg>'
        )

    def _header(self) -> str:
        return "Calibration of the largest probability (ECE beside that of perfect probabilities, mean and 95 %)"

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        heads = "question", "items", "accuracy", "Brier", "log loss", "ECE", "floor", "95 %"
        rows = list[tuple[str, ...]]()
        for name, of in self.measures.items():
            accuracy = f"{of.accuracy:.3f} +- {of.accuracy_se:.3f}"
            brier = f"{of.brier:.3f} +- {of.brier_se:.3f}"
            errors = (f"{x:.3f}" for x in (of.log_loss, of.ece, of.ece_floor, of.ece_band))
            rows.append((name, str(of.n), accuracy, brier, *errors))
        return heads, rows

    def _html(self, most_rows: int) -> str:
        return super()._html(most_rows) + self.to_svg()


def calibration_report(decisions: Iterable[Decision], labels: Iterable[Any]) -> CalibrationReport:
    """Compare decisions with labels.

    Parameters
    ----------
    decisions : list of Decision, as `decide` returns for a list of states
    labels : list of dict, or of (state, dict)
        The right answers by question, for each decision; questions without a label do not count.

    Raises
    ------
    ValueError
        If the lists have different lengths, a label is no answer to its question, or there is no label.

    Examples
    --------
    >>> decisions = decide(lm, ["It was good.", "It was bad."], {"good": "Was it good?"})
    >>> calibration_report(decisions, [{"good": True}, {"good": False}]).records()[0]["n"]
    2
    """
    found = dict[str, list[Outcome]]()
    decided, given = [*decisions], [*labels]
    if len(decided) != len(given):
        raise ValueError(
            f"there are {len(decided)} decisions and {len(given)} labels: give one dict for each decision"
        )
    for decision, each in zip(decided, given, strict=True):
        right = each
        if isinstance(each, tuple | list):
            state, right = each
            if state != decision.state:
                raise ValueError(
                    f"a label of {shown(state)} is beside the decision about {shown(decision.state)}"
                )
        for name, label in right.items():
            answer = decision[name]
            place = answer.question.index(label)
            found.setdefault(name, []).append(Outcome(answer.vector, place))
    if not found:
        raise ValueError("there is no label: give a dict of the right answers for each decision")
    return CalibrationReport(found)
