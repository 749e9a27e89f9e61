"""Programs of the examples, on a tiny model: `enumerate_exact` of them is what sums by hand give."""

import importlib.util
import math
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.common import ROOT, repetitions
from helpers.tiny import add_up, log_prob_by_hand, log_probs_by_hand, spelled, texts_of, tiny_lm

from llmppl import Regex, Rule, enumerate_exact, importance_sampling, smc_steer

EXAMPLES = ROOT / "examples"
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


def test_an_answer_sums_its_spellings_and_local_masking_differs(classifier):
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


@pytest.fixture
def reasoning(monkeypatch):
    """The chain of thought: calculations "b" and "ab" go on with "c" and "ca", answers are "ac" and "abc"."""
    module = example("chain_of_thought")
    monkeypatch.setattr(module, "asked", lambda lm, question, reasoning: lm.context("c" if reasoning else question))
    monkeypatch.setattr(module, "rest", lambda left: {"b": "c", "ab": "ca"}.get(left))
    monkeypatch.setattr(module, "LEFT", Regex("a?(b|c)"))
    monkeypatch.setattr(module, "NUMBER", Regex("(a|ab)c"))
    monkeypatch.setattr(module, "THEN", "b")
    monkeypatch.setattr(module, "MOST", 2)
    monkeypatch.setattr(module, "RULE", Rule())
    return module


NUMBERS = {(A, C): "ac", (A, B, C): "abc", (AB, C): "abc"}
TIMES = repetitions(2000, 200)


def assert_exact(model, weights):
    """Enumeration gives the `weights` of the texts; importance sampling and steering their sum on average, and the
    weights of those that are common."""
    exact, Z = enumerate_exact(model), sum(weights.values())
    assert exact.log_ml == pytest.approx(math.log(Z), abs=1e-9)
    for text, weight in weights.items():
        share = exact.expect(lambda particle, text=text: str(particle) == text)
        assert share == pytest.approx(weight / Z, abs=1e-9)
    common = [text for text, weight in weights.items() if weight > 0.1 * Z]
    for run in (lambda seed: importance_sampling(model, 5, seed=seed), lambda seed: smc_steer(model, 4, 2, seed=seed)):
        found = np.zeros((TIMES, 1 + len(common)))
        for seed in range(TIMES):
            for particle in run(seed):
                found[seed] += math.exp(particle.log_weight) * np.array([True, *(str(particle) == x for x in common)])
        errors = found.std(axis=0, ddof=1) / math.sqrt(TIMES)
        assert (np.abs(found.mean(axis=0) - [Z, *(weights[text] for text in common)]) <= 4.5 * errors + 1e-9).all()


def test_reasoning_in_the_target_is_summed_out(reasoning):
    weights = dict.fromkeys(NUMBERS.values(), 0.0)
    for left, more in {(B,): (C,), (A, B): (C, A), (AB,): (C, A)}.items():
        for ids, text in NUMBERS.items():
            weights[text] += math.exp(log_prob_by_hand(tiny_lm(), [C], [*left, *more, *ids]))
    assert_exact(reasoning.Reasoned(tiny_lm(), "a"), weights)


@pytest.mark.parametrize("kind", ["Direct", "Proposed"])
def test_reasoning_in_the_proposal_keeps_the_target_of_direct_answers(reasoning, kind):
    weights = dict.fromkeys(NUMBERS.values(), 0.0)
    for ids, text in NUMBERS.items():
        weights[text] += math.exp(log_prob_by_hand(tiny_lm(), [A], ids))
    assert_exact(getattr(reasoning, kind)(tiny_lm(), "a"), weights)


def test_a_critic_weighs_the_end_of_a_text_and_guides_before_it(monkeypatch):
    module = example("critic")
    for name, value in {"CRITIC": "c", "WORDS": ("a", "b"), "READERS": 2}.items():
        monkeypatch.setattr(module, name, value)
    pairs = []
    for ids in texts_of(6, 2):
        rows = log_probs_by_hand(tiny_lm(), [A, *(i for i in ids if i != END), C])
        log_says = rows[A] - np.logaddexp(rows[A], rows[B])
        pairs.append((spelled(ids), log_prob_by_hand(tiny_lm(), [A], ids) + 2 * log_says))
    model = module.Told(tiny_lm(), "a", num_spans=2, length=1)
    assert_exact(model, add_up(pairs))
    posterior = importance_sampling(model, 30, seed=0)
    assert posterior.stats.rounds <= 2 * 3              # a step asks for a token, and all critics together


@pytest.mark.parametrize("name, program", [("extraction_records", "Record"), ("text_to_sql", "Query")])
@pytest.mark.parametrize("local", [True, False])
def test_a_record_or_a_query_is_weighed_by_its_probability(monkeypatch, name, program, local):
    lm, module = tiny_lm(), example(name)
    monkeypatch.setattr(module, "MAX_TOKENS", 2)                                # "c c" takes three
    index, options = Regex("a?b|c|c c").index(lm.vocab), {}
    if name == "text_to_sql":
        options["runs"] = lambda query: query != "b"
    spellings = {(B,): "b", (A, B): "ab", (AB,): "ab", (C,): "c"}
    weights = dict.fromkeys(spellings.values(), 0.0)
    for ids, text in spellings.items():
        weights[text] += math.exp(log_prob_by_hand(lm, [A], [*ids, END]))
    model = getattr(module, program)(lm.context("a"), index, local=local, **options)
    if not local:
        weights["b"] *= name != "text_to_sql"
        return assert_exact(model, weights)
    exact, first = enumerate_exact(model), np.exp(log_probs_by_hand(lm, [A]))
    assert exact.log_ml == pytest.approx(0.0, abs=1e-9)                         # as if masks cost nothing
    share = exact.expect(lambda particle: str(particle) == "c")
    assert share == pytest.approx(first[C] / (first[A] + first[B] + first[C] + first[AB]), abs=1e-9)


def test_the_heaviest_answer_sums_its_texts():
    module = example("text_to_sql")
    base = module.database()

    class Texts(list):
        weights = (0.4, 0.3, 0.3)

    job = "SELECT job FROM people WHERE "
    texts = ["SELECT year FROM people", f"{job}age = 34", f"{job}age < 25"]
    named = [SimpleNamespace(s=text) for text in texts]
    assert module.most_weight(base, Texts(named))[1:] == (0.3, texts[1])        # the first does not run
    named[2].s = f"{job}name = 'Ann Moore'"
    assert module.most_weight(base, Texts(named)) == ((("nurse",),), 0.6, texts[1])
