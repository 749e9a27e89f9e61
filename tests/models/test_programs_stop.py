"""Stop strings: the end of a text, and its weight, which is that of all tokens up to the end."""

import math

import pytest
from helpers.tiny import log_prob_by_hand, spelled, texts_of, tiny_lm
from helpers.tokenizers import byte_level

from llmppl import (
    CachedTransformer,
    ConstrainedText,
    Infilling,
    PromptIntersection,
    Regex,
    Rule,
    enumerate_exact,
    smc_steer,
)
from llmppl.models.programs import Program

V = 8                                                   # a, b, c, " ", ab, d, bc, EOS


def cut_at(text, stops):
    """Return `text` up to the first stop string, character by character; None if it has none."""
    for n in range(len(text) + 1):
        ending = [stop for stop in stops if text[:n].endswith(stop)]
        if ending:
            return text[: n - max(map(len, ending))]
    return None


def by_hand(stops, most, keep=lambda text, ended, num_tokens: True):
    """Return exp(weight) of each (text, cut) after "a", over sequences of at most `most` tokens."""
    lm, found, seen = tiny_lm(V), {}, set()
    for ids in texts_of(V, most):
        ended, n = "eos" if ids[-1:] == (V - 1,) else "cut", len(ids)
        text = spelled(ids, V)
        for m in range(1, len(ids) + 1):
            stopped = cut_at(spelled(ids[:m], V), stops)
            if stopped is not None:
                ended, n, text = "stop", m, stopped
                break
        if ids[:n] in seen:
            continue                                    # the same tokens, up to where they stop
        seen.add(ids[:n])
        num_tokens = n - (ended == "eos")
        if keep(text, ended, num_tokens):
            key = text, ended == "cut"
            found[key] = found.get(key, 0.0) + math.exp(log_prob_by_hand(lm, [0], ids[:n]))
    return found


def weighed(posterior):
    found = {}
    for particle, log_weight in zip(posterior, posterior.log_weights, strict=True):
        key = particle.s, particle.cut
        found[key] = found.get(key, 0.0) + math.exp(log_weight)
    return found


@pytest.mark.parametrize(
    "stops", [["b"], ["bc"], ["cab"], ["abc", "b"], ["c", " ", "bd"], ["bca", "dd"]], ids="|".join
)
def test_a_text_has_the_probability_of_reaching_its_first_stop_string(stops):
    posterior = enumerate_exact(ConstrainedText(tiny_lm(V), "a", stop=stops, max_tokens=3))
    truth = by_hand(stops, 3)
    assert weighed(posterior) == pytest.approx(truth, rel=1e-6)
    assert sum(truth.values()) == pytest.approx(1.0)
    assert not any(stop in text for text, _ in truth for stop in stops)
    assert any(not cut for _, cut in truth)


def test_the_first_complete_stop_string_ends_the_text_even_inside_a_token():
    """Check "abc" and "b" after "a": the token "bc" completes "b" first. "ab" and "b" are completed together."""
    assert cut_at("abc", ["abc", "b"]) == "a" and cut_at("abc", ["b", "ab"]) == ""
    for stops in (["abc", "b"], ["ab", "b"]):
        found = weighed(enumerate_exact(ConstrainedText(tiny_lm(V), "a", stop=stops, max_tokens=2)))
        assert found == pytest.approx(by_hand(stops, 2), rel=1e-6)


def test_a_stop_string_ends_a_text_that_must_be_complete():
    program = ConstrainedText(tiny_lm(V), "a", stop="b", max_tokens=2, complete=True)
    truth = by_hand(["b"], 2, keep=lambda text, ended, num_tokens: ended == "stop")
    for (text, _), weight in by_hand(["b"], 3, keep=lambda _, ended, num: ended == "eos" and num <= 2).items():
        truth[text, False] = truth.get((text, False), 0.0) + weight
    assert weighed(enumerate_exact(program)) == pytest.approx(truth, rel=1e-6)


def test_a_stop_string_before_min_tokens_has_weight_zero():
    posterior = enumerate_exact(ConstrainedText(tiny_lm(V), "a", stop="b", min_tokens=2, max_tokens=3))
    truth = by_hand(["b"], 3, keep=lambda text, ended, num_tokens: num_tokens >= 2)
    assert weighed(posterior) == pytest.approx(truth, rel=1e-6)
    dead = smc_steer(ConstrainedText(tiny_lm(V), "a", stop=["a", "b", "c", " ", "d"], min_tokens=2), 3, 2, seed=0)
    with pytest.raises(ValueError, match="a stop string is written before min_tokens=2"):
        dead.best                                       # noqa: B018


def test_a_function_of_the_text_sees_the_text_before_the_stop():
    def no_b(text):
        return "b" not in text

    posterior = enumerate_exact(ConstrainedText(tiny_lm(V), "a", no_b, stop="bc", max_tokens=1))
    truth = {key: weight for key, weight in by_hand(["bc"], 1).items() if no_b(key[0])}
    assert weighed(posterior) == pytest.approx(truth, rel=1e-6)
    assert truth["", False] > math.exp(log_prob_by_hand(tiny_lm(V), [0], [V - 1]))          # the token "bc", too


def test_prompts_with_the_same_continuation_stop_alike():
    lm = tiny_lm(V)
    program = PromptIntersection(lm, ["a", "a"], stop="b", max_tokens=3)
    doubled = {}
    for ids in texts_of(V, 3):
        n = next((m for m in range(1, len(ids) + 1) if "b" in spelled(ids[:m], V)), len(ids))
        doubled[ids[:n]] = 2 * log_prob_by_hand(lm, [0], ids[:n])
    truth = sum(map(math.exp, doubled.values()))
    assert math.exp(enumerate_exact(program).log_ml) == pytest.approx(truth, rel=1e-6)


def test_stop_strings_match_characters_split_over_tokens():
    """Check "é" and the stop string "日" with a token for each byte. The prompt's "日" is no part of the text."""
    vocab = CachedTransformer(lambda ids: [0.0], byte_level()).vocab
    wanted = [vocab.ids_by_bytes[bytes([byte])][0] for byte in "éa日b".encode()]
    start = []

    def logits(ids):
        row = [-math.inf] * len(vocab)
        row[wanted[len(ids) - len(start)]] = 0.0
        return row

    lm = CachedTransformer(logits, byte_level())
    context = lm.context("日")
    start += context.tokens
    (particle,) = smc_steer(ConstrainedText(lm, context, stop=["日"], max_tokens=9), 1, 1, seed=0)
    assert particle.s == "éa" and not particle.cut and particle.log_weight == 0.0
    assert particle.num_tokens == len(wanted) - 1


def test_a_custom_program_that_writes_can_stop_too():
    class Own(Program):
        def __init__(self, lm, **options):
            super().__init__(**options)
            self.context = lm.context("a")

        def step(self):
            token = self.sample(self.next_token(self.context))
            if self.append(token):
                self.context += token

    found = weighed(enumerate_exact(Own(tiny_lm(V), stop="bc", max_tokens=3, rule=Rule(temperature=2.0))))
    same = weighed(enumerate_exact(ConstrainedText(tiny_lm(V), "a", stop="bc", max_tokens=3, rule=Rule(2.0))))
    assert found == pytest.approx(same)


def test_a_stop_string_cuts_a_text_under_a_constraint():
    """The texts of (ab)+c are those that the model writes before the first "ba", or all of them; the former are cut."""
    found = enumerate_exact(ConstrainedText(tiny_lm(V), "a", Regex("(ab){1,2}c"), stop="ba"))
    assert {(str(particle), particle.cut, particle.ended) for particle in found} == {
        ("abc", False, "complete"), ("a", True, "stop 'ba'")}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"stop": ""}, ValueError, 'stop must be a text of at least one character, not ""'),
        ({"stop": ["a", ""]}, ValueError, "at least one character"),
        ({"stop": 3}, TypeError, "each of stop must be a str, not 3"),
        ({"stop": None}, TypeError, "each of stop must be a str, not None"),
        ({"stop": b"a"}, TypeError, "each of stop must be a str, not b'a'"),
        ({"stop": ["a", 3]}, TypeError, "each of stop must be a str, not 3"),
        ({"max_new_tokens": 3}, TypeError, "ConstrainedText takes no max_new_tokens: did you mean max_tokens?"),
    ],
)
def test_an_invalid_stop_is_refused_with_a_suggestion(options, error, said):
    with pytest.raises(error, match=said):
        ConstrainedText(tiny_lm(V), "a", **options)


def test_a_hole_ends_where_its_fragment_begins():
    with pytest.raises(ValueError, match="Infilling takes no stop"):
        Infilling(tiny_lm(V), "a[BLANK]c", stop="b")
