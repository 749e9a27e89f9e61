"""Programs of the examples, on a tiny model: `enumerate_exact` of them is what sums by hand give."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
from tiny import log_prob_by_hand, log_probs_by_hand, tiny_lm

from llmppl import Regex, enumerate_exact, smc_steer

EXAMPLES = Path(__file__).parent.parent / "examples"
A, B, C, SPACE, AB, END = range(6)


def example(name):
    """The module `examples/NAME.py`."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def classifier(monkeypatch):
    """The classifier with the labels "ab" and "c", asked by the prompt "a"."""
    module = example("classifier")
    monkeypatch.setattr(module, "LABELS", ["ab", "c"])
    monkeypatch.setattr(module, "LANGUAGE", Regex("ab|c"))
    monkeypatch.setattr(module, "asked", lambda lm, message: lm.context(message))
    monkeypatch.setattr(module, "context_of", lambda lm, label: lm.context(label))
    return module


def test_an_answer_is_summed_over_its_spellings_and_local_masking_is_not_the_posterior(classifier):
    lm = tiny_lm()
    spellings = {(A, B): "ab", (AB,): "ab", (C,): "c"}
    weights = {"ab": 0.0, "c": 0.0}
    for ids, label in spellings.items():
        weights[label] += math.exp(log_prob_by_hand(lm, [A], [*ids, END]))
    exact = enumerate_exact(classifier.Answered(lm, "a", local=False))
    assert exact.log_ml == pytest.approx(math.log(sum(weights.values())), abs=1e-9)
    posterior = np.array([weights["ab"], weights["c"]]) / sum(weights.values())
    assert classifier.over_labels(exact) == pytest.approx(posterior, abs=1e-9)

    first = np.exp(log_probs_by_hand(lm, [A]))
    local = classifier.over_labels(enumerate_exact(classifier.Answered(lm, "a", local=True)))
    assert local[1] == pytest.approx(first[C] / (first[A] + first[AB] + first[C]), abs=1e-9)
    assert abs(local[1] - posterior[1]) > 0.01


def test_an_explanation_is_bayes_rule(classifier):
    lm = tiny_lm()
    likelihoods = np.exp([log_prob_by_hand(lm, before, [C, SPACE]) for before in ([AB], [C])])
    for particles in (enumerate_exact(classifier.Explained(lm, "c ")), smc_steer(classifier.Explained(lm, "c "), 2, 1)):
        assert particles.log_ml == pytest.approx(math.log(likelihoods.mean()), abs=1e-9)
        assert classifier.over_labels(particles) == pytest.approx(likelihoods / likelihoods.sum(), abs=1e-9)
