"""Calibration: maps that are fitted on labels, compared with scipy and with held-out labels."""

import json

import numpy as np
import pytest
import scipy.optimize
from helpers.common import repetitions

from llmppl import CachedTransformer
from llmppl.decisions import Calibration, calibration_report, decide, fit_calibration
from llmppl.decisions.calibration import SKETCH, Map, fitted, normalised, sketch

QUESTIONS = {"good": "Was it good?", "level": ["low", "middle", "high"]}


def drawn(n, num_options=3, scale=1.0, seed=0):
    """Log-probabilities, features without information, and labels drawn from `scale` times these log-probabilities."""
    rng = np.random.default_rng(seed)
    log_probs = normalised(rng.normal(scale=2.0, size=(n, num_options)))
    p = np.exp(normalised(scale * log_probs))
    labels = (rng.random((n, 1)) > p.cumsum(1)).sum(1)
    return log_probs, rng.normal(size=(n, SKETCH)), labels


def test_a_temperature_is_that_of_an_optimiser():
    log_probs, features, labels = drawn(200, scale=0.4)

    def loss(log_scale):
        scores = normalised(np.exp(log_scale) * log_probs)
        return -scores[np.arange(200), labels].sum() + log_scale**2 / 2

    expected = np.exp(scipy.optimize.minimize_scalar(loss).x)
    found, receipt = fitted(log_probs, features, labels)
    assert found.kind in ("temperature", "biases") and found.scale == pytest.approx(expected, rel=0.1)
    assert receipt["after"]["log_loss"] < receipt["before"]["log_loss"]


def test_a_head_finds_what_the_probabilities_do_not_say():
    log_probs, features, labels = drawn(120, scale=0.0)
    features[:, :60] += np.repeat(np.eye(3)[labels], 20, axis=1)        # 20 features for each answer
    found, receipt = fitted(log_probs, features, labels)
    assert found.kind == "head" and receipt["after"]["accuracy"] > 0.8
    assert np.exp(found(log_probs, features)).argmax(1).tolist() == labels.tolist()


def test_probabilities_that_are_right_are_left_alone_or_nearly():
    """The log loss on 4,000 fresh items is at most that of the true probabilities and 3 standard errors."""
    fresh_log_probs, fresh_features, fresh = drawn(4000, seed=9)
    true_losses = -fresh_log_probs[np.arange(4000), fresh]
    for seed in range(repetitions(20, 1)):
        found, _ = fitted(*drawn(100, seed=seed))
        losses = -found(fresh_log_probs, fresh_features)[np.arange(4000), fresh]
        assert (losses - true_losses).mean() < 0.05, found.kind


def test_few_labels_give_no_map():
    found, receipt = fitted(*drawn(12))
    assert found.kind == "none" and receipt["labels"] == 12
    np.testing.assert_allclose(found(drawn(5)[0], np.zeros((5, SKETCH))), drawn(5)[0])


def test_a_prior_is_compared_only_for_balanced_answers():
    log_probs, features, labels = drawn(60)
    shifted = normalised(log_probs + [3.0, 0.0, 0.0])
    assert "prior" not in fitted(shifted, features, labels)[1]["log_losses"]
    losses = fitted(shifted, features, labels, ["prior"])[1]["log_losses"]
    assert losses["prior"] < losses["none"]


def test_a_sketch_is_a_linear_image_that_keeps_differences():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 5000))
    assert sketch(a + 7.0) == pytest.approx(sketch(a))
    assert sketch(2 * a) == pytest.approx(2 * sketch(a))
    distance = np.linalg.norm((a - a.mean()) - (b - b.mean()))
    assert np.linalg.norm(sketch(a) - sketch(b)) == pytest.approx(distance, rel=0.2)


@pytest.fixture(scope="module")
def lm():
    return CachedTransformer.from_pretrained()


@pytest.fixture(scope="module")
def labelled():
    words = {"good": "high", "fine": "middle", "bad": "low"}
    return [(f"It was {word} {i}.", {"good": word != "bad", "level": level})
            for i in range(14) for word, level in words.items()]  # fmt: skip


@pytest.fixture(scope="module")
def calibration(lm, labelled):
    return fit_calibration(lm, labelled, QUESTIONS, progress=False)


def test_a_calibration_is_applied_at_no_further_pass(lm, labelled, calibration):
    states = [state for state, _ in labelled]
    lm.clear()
    plain = decide(lm, states, QUESTIONS, progress=False)
    lm.clear()
    found = decide(lm, states, QUESTIONS, calibration=calibration, progress=False)
    assert sum(each.tokens for each in found) == sum(each.tokens for each in plain)
    for before, after in zip(plain, found, strict=True):
        raw, answer = after["level"].raw, after["level"]
        np.testing.assert_allclose([*raw.probabilities.values()], [*before["level"].probabilities.values()], atol=1e-5)
        assert sum(answer.probabilities.values()) == pytest.approx(1) and not answer.bounds
    report = calibration_report(found, labelled)
    assert report.measures["level"].brier < calibration_report(plain, labelled).measures["level"].brier


def test_a_file_has_the_maps_and_the_receipt(lm, calibration, tmp_path):
    path = tmp_path / "calibration.json"
    calibration.save(path)
    loaded = Calibration.load(path)
    assert loaded.receipt == json.loads(json.dumps(calibration.receipt))
    before = decide(lm, "It was fine.", QUESTIONS, calibration=calibration)["level"].probabilities
    after = decide(lm, "It was fine.", QUESTIONS, calibration=loaded)["level"].probabilities
    assert before == pytest.approx(after, abs=1e-4)
    assert loaded.receipt["questions"]["level"]["labels"] == 42 and "42 labels are few" in repr(loaded)
    path.write_text(path.read_text()[:-9])
    with pytest.raises(ValueError, match="is no calibration that this version reads"):
        Calibration.load(path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"orders": 2}, "the calibration is of orders 1, not 2"),
        ({"examples": [("It was bad.", {"level": "low"})]}, "the calibration is of another question 'level'"),
    ],
)
def test_another_setting_is_refused(lm, calibration, change, message):
    with pytest.raises(ValueError, match=message):
        decide(lm, "It was fine.", QUESTIONS, calibration=calibration, **change)


def test_another_model_or_question_is_refused(lm, calibration):
    other = CachedTransformer(lambda ids: np.zeros(len(lm.vocab)), lm.vocab)
    with pytest.raises(ValueError, match="the calibration is of model"):
        decide(other, "It was fine.", QUESTIONS, calibration=calibration)
    with pytest.raises(ValueError, match="another question 'good'"):
        decide(lm, "It was fine.", {"good": "Was it bad?"}, calibration=calibration)
    other_questions = {"further": "Is it new?"}         # for which there is no map
    decision = decide(lm, "It was fine.", other_questions, calibration=calibration)
    assert decision["further"].raw is decision["further"]


def test_labels_that_fit_no_question_are_refused(lm):
    with pytest.raises(ValueError, match="no state has a label"):
        fit_calibration(lm, [("x", {})], QUESTIONS, progress=False)
    with pytest.raises(ValueError, match="'awful' is no answer"):
        fit_calibration(lm, [("x", {"level": "awful"})], QUESTIONS, progress=False)


def test_labelled_states_are_not_among_the_examples(lm):
    examples = [("It was bad.", {"good": False})]
    with pytest.raises(ValueError, match="state of an example, such as 'It was bad.'"):
        fit_calibration(lm, [("x", {"good": True}), *examples], QUESTIONS, examples=examples)


def test_labels_of_one_answer_choose_no_map(lm):
    labelled = [(f"It was good {i} times.", {"good": True}) for i in range(24)]
    calibration = fit_calibration(lm, labelled, {"good": "Was it good?"}, progress=False)
    assert calibration.maps["good"].kind == "none"
    assert "all labels are one answer" in repr(calibration)


def test_a_report_refuses_labels_of_other_states(lm):
    decisions = decide(lm, ["a", "b"], {"good": "Was it good?"}, progress=False)
    labelled = [("a", {"good": True}), ("b", {"good": False})]
    assert calibration_report(decisions, labelled).records()[0]["n"] == 2
    with pytest.raises(ValueError, match="label of 'b' is beside the decision about 'a'"):
        calibration_report(decisions, labelled[::-1])


def test_a_fit_takes_no_file_and_names_a_state_without_an_answer(lm):
    with pytest.raises(TypeError, match="fit_calibration takes no think"):
        fit_calibration(lm, [("x", {"good": True})], QUESTIONS, think=3)
    with pytest.raises(ValueError, match="there is no answer about \\{1\\}: .*must be a text, messages or JSON"):
        fit_calibration(lm, [({1}, {"good": True})], QUESTIONS, progress=False)


def test_a_map_without_a_head_ignores_features():
    scaled = Map("temperature", 0.5, np.zeros(2))
    found = np.exp(scaled(np.log([[0.9, 0.1]]), np.ones((1, SKETCH))))
    assert found[0] == pytest.approx([0.75, 0.25])
