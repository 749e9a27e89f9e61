"""Programs of the examples, on a tiny model: `enumerate_exact` of them is what sums by hand give."""

import importlib.util
import math
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.common import ROOT, slow
from helpers.samplers import SAMPLERS, is_posterior, weighed
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
    weights = add_up((label, log_prob_by_hand(lm, [A], [*ids, END])) for ids, label in spellings.items())
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
def assert_exact(model, weights):
    """Check the weights by enumeration, and those of the common texts by importance sampling and steering."""
    assert weighed(enumerate_exact(model)) == pytest.approx(weights, rel=1e-8)
    for name in ("importance", "distinct"):
        is_posterior(SAMPLERS[name], lambda: model, weights, full=2000, least=0.1)


def test_reasoning_in_the_target_is_summed_out(reasoning):
    steps = [(B, C), (A, B, C, A), (AB, C, A)]
    pairs = [(text, log_prob_by_hand(tiny_lm(), [C], [*each, *ids])) for each in steps for ids, text in NUMBERS.items()]
    assert_exact(reasoning.Reasoned(tiny_lm(), "a"), add_up(pairs))


@pytest.mark.parametrize("kind", ["Direct", *slow("Proposed")])
def test_reasoning_in_the_proposal_keeps_the_target_of_direct_answers(reasoning, kind):
    weights = add_up((text, log_prob_by_hand(tiny_lm(), [A], ids)) for ids, text in NUMBERS.items())
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


@pytest.mark.parametrize("name, program, without", [
    ("extraction_records", "Record", ""), ("text_to_sql", "Query", "b"),
])  # fmt: skip
def test_a_record_or_a_query_is_weighed_by_its_probability(monkeypatch, name, program, without):
    lm, module = tiny_lm(), example(name)
    monkeypatch.setattr(module, "MAX_TOKENS", 2)                                # "c c" takes three
    index, options = Regex("a?b|c|c c").index(lm.vocab), {"runs": lambda query: query != without} if without else {}
    spellings = {(B,): "b", (A, B): "ab", (AB,): "ab", (C,): "c"}
    weights = add_up((text, log_prob_by_hand(lm, [A], [*ids, END])) for ids, text in spellings.items())
    weights.pop(without, None)
    make = getattr(module, program)
    assert_exact(make(lm.context("a"), index, local=False, **options), weights)
    local, first = enumerate_exact(make(lm.context("a"), index, local=True, **options)), log_probs_by_hand(lm, [A])
    share = math.exp(first[C] - np.logaddexp.reduce(first[[A, B, C, AB]]))
    assert local.log_ml == pytest.approx(0.0, abs=1e-9)                         # as if masks cost nothing
    assert weighed(local)["c"] == pytest.approx(share)


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
