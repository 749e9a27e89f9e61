"""Joint decisions and drafts, compared with sums over every combination and every draft."""

import itertools
import math
import random

import numpy as np
import pytest
from helpers.common import repetitions

from llmppl import CachedTransformer, Vocabulary
from llmppl.decisions import asking, choice, decide

WORDS = [b" yes", b" no", b" a", b" b", b" ab", b"", *(bytes([i]) for i in range(256))]
EOS = WORDS.index(b"")
QUESTIONS = {"first": "Is it?", "second": choice("Which?", ["a", "ab", "b"]), "third": choice("And?", ["b", "a"])}


def text_of(ids):
    return b"".join(WORDS[i] for i in ids).decode()


def log_probs(ids):
    """Logits of the next token that depend on the whole text; drafts are texts of " a" and " b"."""
    text = text_of(ids)
    logits = np.random.default_rng(random.Random(text).randrange(2**32)).normal(scale=1.5, size=len(WORDS))
    before, thinks, after = text.rpartition("Think first")
    if thinks and "Answer" not in after.partition("\n\nAnswer:")[2]:
        possible = [WORDS.index(b" a"), WORDS.index(b" b"), EOS]
        logits[[i for i in range(len(WORDS)) if i not in possible]] = -np.inf
    return logits - np.logaddexp.reduce(logits)


@pytest.fixture(scope="module")
def lm():
    return CachedTransformer(log_probs, Vocabulary(WORDS, eos_ids=[EOS]))


def totals(text, options):
    """Return the probability of each option after a text, over all tokenisations, and left after its end."""
    options = [f" {option}" for option in options]
    found = dict.fromkeys(options, 0.0)

    def follow(ids, said, p):
        row = np.exp(log_probs(ids))
        going = []
        for i, piece in enumerate(WORDS):
            if piece and piece.isascii() and any(each.startswith(said + piece.decode()) for each in options):
                going.append(i)
                follow([*ids, i], said + piece.decode(), p * row[i])
        if said in found:
            found[said] += p * (1 - row[going].sum())

    follow([WORDS.index(bytes([byte])) for byte in text.encode()], "", 1.0)
    p = np.array([*found.values()])
    return p / p.sum()


def prompt(state, question, *options):
    lines = [question, *(["Options:", *options] if options else [])]
    last = "Answer with one of these options only." if options else "Answer yes or no."
    return f"{state}\n\nQuestion: " + "\n".join([*lines, last]) + "\n\nAnswer:"


def joint_by_hand(state):
    found = {}
    for (i, first), p in zip(enumerate(("yes", "no")), totals(prompt(state, "Is it?"), ["yes", "no"]), strict=True):
        after = f"{state}\n\nIs it? {first}"
        rows = totals(prompt(after, "Which?", "a", "ab", "b"), ["a", "ab", "b"])
        for second, q in zip(("a", "ab", "b"), rows, strict=True):
            last = totals(prompt(f"{after}\nWhich? {second}", "And?", "a", "b"), ["a", "b"])
            for third, r in zip(("a", "b"), last, strict=True):
                found[(not i, second, third)] = p * q * r
    return found


@pytest.mark.parametrize("state", [f"state {i}" for i in range(repetitions(20, 2))])
def test_a_joint_decision_is_the_product_of_the_answers_in_sequence(lm, state):
    decision = decide(lm, state, QUESTIONS, joint=True, exact=True)
    expected = joint_by_hand(state)
    assert dict(decision.joint) == pytest.approx(expected, abs=1e-9)
    assert decision.value == dict(zip(QUESTIONS, max(expected, key=expected.get), strict=True))
    for i, (name, answer) in enumerate(decision.items()):
        for value, p in answer.probabilities.items():
            assert p == pytest.approx(sum(q for key, q in expected.items() if key[i] == value), abs=1e-9), name
    known = sum(q for key, q in expected.items() if key[1] == "ab" and key[0] is True)
    given = decision.given(second="ab", first=True)
    for value, p in given["third"].probabilities.items():
        assert p == pytest.approx(expected[True, "ab", value] / known, abs=1e-9)
    assert given["second"].probabilities == {"a": 0.0, "ab": 1.0, "b": 0.0}


def test_combinations_that_are_not_followed_are_in_the_bounds(lm, monkeypatch):
    monkeypatch.setattr(asking, "MAX_COMBINATIONS", 2)
    decision = decide(lm, "state 0", QUESTIONS, joint=True, exact=True)
    expected = joint_by_hand("state 0")
    assert len(decision.joint) == 4
    for key in decision.joint:
        low, high = decision.joint.share(key).interval
        assert low - 1e-9 <= expected[key] <= high + 1e-9 and high - low > 0.01
    for i, answer in enumerate(decision.values()):
        for value, (low, high) in answer.bounds.items():
            p = sum(q for key, q in expected.items() if key[i] == value)
            assert low - 1e-9 <= p <= high + 1e-9


def test_only_a_joint_decision_has_conditionals(lm):
    decision = decide(lm, "state", QUESTIONS)
    assert decision.joint is None
    with pytest.raises(ValueError, match="decide\\(..., joint=True\\)"):
        decision.given(first=True)
    joint = decide(lm, "state", QUESTIONS, joint=True)
    with pytest.raises(ValueError, match="'c' is no answer to 'Which\\?'"):
        joint.given(second="c")


def mean_over_drafts(state):
    """Return the probability of yes, summed over all drafts of at most two tokens."""
    start = prompt(state, "Is it?").removesuffix("\n\nAnswer:") + "\nThink first, in a sentence or two.\n\nAnswer:"
    total = 0.0
    for length in range(3):
        for draft in itertools.product((" a", " b"), repeat=length):
            said, p = start, 1.0
            for token in draft:
                p *= math.exp(log_probs(ids_of(said))[WORDS.index(token.encode())])
                said += token
            if length < 2:
                p *= math.exp(log_probs(ids_of(said))[EOS])
            asked = f"{start} {''.join(draft).strip()}\n\nAnswer yes or no.\n\nAnswer:"
            total += p * totals(asked, ["yes", "no"])[0]
    return total


def ids_of(text):
    return [WORDS.index(bytes([byte])) for byte in text.encode()]


def test_the_mean_over_drafts_is_unbiased(lm):
    """The mean of `runs` runs of 4 drafts lies within 4.5 standard errors of the sum over all drafts."""
    runs = repetitions(2000, 60)
    found, errors = [], []
    for seed in range(runs):
        answer = decide(lm, "state", {"q": "Is it?"}, think=4, max_think=2, seed=seed, exact=True)["q"]
        found.append(answer[True])
        errors.append(answer.probability_se)
    expected = mean_over_drafts("state")
    spread = np.std(found, ddof=1)
    assert abs(np.mean(found) - expected) < 4.5 * spread / math.sqrt(runs)
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(spread, rel=0.35)
