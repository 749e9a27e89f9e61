"""Measures of probabilities against labels, computed by hand."""

import math

import numpy as np
import pytest

from llmppl.decisions import calibration_report, choice
from llmppl.decisions.answers import Answer, Decision
from llmppl.decisions.measures import Outcome, ece, measures
from llmppl.report.probabilities import Share

QUESTION = choice("Which?", ["a", "b"])


def decision(p):
    return Decision("x", {"q": Answer(QUESTION, [Share("a", p), Share("b", 1 - p)], log_mass=0.0)})


def test_scores_are_those_of_the_definitions():
    found = measures([Outcome([0.8, 0.2], 0), Outcome([0.4, 0.6], 0)])
    assert found.n == 2 and found.accuracy == 0.5
    assert found.brier == pytest.approx((0.04 + 0.04 + 0.36 + 0.36) / 2)
    assert found.log_loss == pytest.approx(-(math.log(0.8) + math.log(0.4)) / 2)
    assert found.ece == pytest.approx((0.2 + 0.6) / 2)
    assert found.brier_se == pytest.approx(np.std([0.08, 0.72]) / math.sqrt(2))


def test_the_calibration_error_of_right_probabilities_is_its_floor():
    """Labels drawn from the probabilities lie below the 95 % band in 95 % of 400 draws, within 4 standard errors."""
    rng = np.random.default_rng(0)
    confidences = rng.uniform(0.5, 1.0, 300)
    band = measures([Outcome([p, 1 - p], 0) for p in confidences.tolist()]).ece_band
    below = [ece(confidences, rng.random(300) < confidences) <= band for _ in range(400)]
    assert abs(np.mean(below) - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 400) + 0.02


def test_a_report_has_thresholds_and_a_diagram():
    decisions = [decision(0.95), decision(0.6), decision(0.3)]
    report = calibration_report(decisions, [{"q": "a"}, {"q": "b"}, {"q": "b"}])
    rows = {row["threshold"]: row for row in report.thresholds()}
    assert rows[0.9]["coverage"] == pytest.approx(1 / 3) and rows[0.9]["accuracy"] == 1
    assert rows[0.5]["coverage"] == 1 and rows[0.5]["accuracy"] == pytest.approx(2 / 3)
    assert report.to_svg().count("<circle") == 3 and "reliability" in report._repr_html_()
    assert "0.667" in repr(report) and report.to_csv().startswith("question,n,accuracy")


def test_labels_must_fit_the_decisions():
    with pytest.raises(ValueError, match="there are 1 decisions and 2 labels"):
        calibration_report([decision(0.5)], [{"q": "a"}, {"q": "b"}])
    with pytest.raises(ValueError, match="'c' is no answer to 'Which\\?'"):
        calibration_report([decision(0.5)], [{"q": "c"}])
    with pytest.raises(ValueError, match="there is no label"):
        calibration_report([decision(0.5)], [{}])
