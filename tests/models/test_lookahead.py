"""Lookahead against sums over all texts and a simulation, rollouts against plain forward passes; their errors."""

import math
import re

import numpy as np
import pytest
from helpers.tiny import cold_lm, log_probs_by_hand, spelled, table_lm, texts_of, tiny_lm, tiny_vocab

from llmppl import EOS, Grammar, Regex, Vocabulary, mixture
from llmppl.lm import TokenDistribution
from llmppl.models.lookahead import Lookahead, mean_next_token, rollout

V = 6
A, B, C, SPACE, AB, END = range(6)
PATTERN = "(ab|b)*c?( a)?"
OTHER = Vocabulary([b"a", b""], eos_ids=[1])
PROBS = np.array([0.3, 0.2, 0.1, 0.05, 0.25, 0.1])      # of a, b, c, space, ab, EOS


def dist_of(probs, vocab=None):
    with np.errstate(divide="ignore"):
        return TokenDistribution(vocab or tiny_vocab(V), np.log(probs))


def index_of(pattern=PATTERN):
    return Regex(pattern).index(tiny_vocab(V))


def mass_by_hand(pattern, begins, before, left, end):
    """Return the sum over all sequences of at most `left` tokens after the text `before`, and their ends."""

    def ending(text):
        leaves = [i for i in range(V) if i == END or not re.fullmatch(begins, text + spelled([i]))]
        return {"eos": PROBS[END], "prefix": 1.0, "boundary": sum(PROBS[leaves])}[end]

    texts = (ids for ids in texts_of(V, left + 1) if ids[-1] == END)
    ended = [ids[:-1] for ids in texts if re.fullmatch(pattern, before + spelled(ids))]
    return sum(math.prod(PROBS[i] for i in ids) * ending(before + spelled(ids)) for ids in ended)


@pytest.mark.parametrize("end", ["eos", "prefix", "boundary"])
@pytest.mark.parametrize(
    "pattern, begins",
    [
        (PATTERN, "(ab|b)*c?( a?)?|(ab|b)*a"),
        ("a*b", "a*b?"),
        ("(a|b|c| )*d|abab", "(a|b|c| )*"),             # d is in no token
        ("ab", "(ab?)?"),
    ],
)
def test_log_mass_sums_over_all_texts_that_end_in_time(pattern, begins, end):
    ahead = Lookahead(index_of(pattern), dist_of(PROBS), 4, end)
    for before in ("", "a", "ab", "abb", "ababc"):
        try:
            state = ahead.index.after(before)
            found = [ahead.log_mass(state, left) for left in range(5)]
        except ValueError:                              # the text begins no string of the language
            continue
        expected = [mass_by_hand(pattern, begins, before, left, end) for left in range(5)]
        np.testing.assert_allclose(np.exp(found), expected, rtol=1e-12, atol=0)


def test_log_mass_grows_with_the_tokens_left():
    ahead = Lookahead(index_of("(ab|b)*c"), dist_of(PROBS), max_tokens=6)
    start, end = ahead.index.start, ahead.index.advance(ahead.index.after("c"), END)
    values = [ahead.log_mass(start, left) for left in range(7)]
    assert values[0] == -math.inf and all(x < y for x, y in zip(values[1:], values[2:], strict=False))
    assert ahead.log_mass(end, 0) == 0.0


def test_a_text_of_hundreds_of_rare_tokens_does_not_underflow():
    probs = np.array([1e-9, 0.2, 0.2, 0.2, 0.2, 0.2 - 1e-9])
    ahead = Lookahead(index_of("a{300}"), dist_of(probs), 300, "eos")
    expected = 300 * math.log(1e-9) + math.log(probs[END])
    assert ahead.log_mass(ahead.index.start, 300) == pytest.approx(expected, rel=1e-9)


def test_several_eos_ids_add_up():
    vocab = Vocabulary([b"a", b"", b""], eos_ids=[1, 2])
    ahead = Lookahead(Regex("a").index(vocab), dist_of([0.5, 0.2, 0.3], vocab), 1, "eos")
    assert math.exp(ahead.log_mass(ahead.index.start, 1)) == pytest.approx(0.5 * 0.5)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: Lookahead(Regex("a"), dist_of(PROBS), 3), TypeError, "wants an index, Regex"),
        (lambda: Lookahead(index_of(), PROBS, 3), TypeError, "and a distribution over tokens"),
        (lambda: Lookahead(index_of(), dist_of([0.5, 0.5], OTHER), 3), ValueError, "another vocabulary"),
        (lambda: Lookahead(index_of(), dist_of(PROBS), -1), ValueError, "at least 0, not -1"),
        (lambda: Lookahead(index_of("abab"), dist_of(PROBS), 1), ValueError, "every text of at most 1 tokens"),
        (lambda: Lookahead(index_of(), dist_of([0.2] * 5 + [0.0]), 3, "eos"), ValueError, "probability 0 to every"),
        (
            lambda: Lookahead(Grammar('start: "a" start "b" | "c"').index(tiny_vocab(V)), dist_of(PROBS), 3),
            TypeError,
            "finitely many states",
        ),
        (lambda: Lookahead(index_of(), dist_of(PROBS), 3).log_mass(1, 4), ValueError, "0 to 3 tokens"),
        (lambda: mean_next_token(tiny_lm(V).context("a"), 0), ValueError, "num_tokens must be at least 1, not 0"),
        (lambda: rollout(tiny_lm(V).context("a"), -1), ValueError, "at least 0, not -1"),
    ],
)
def test_a_wrong_argument_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_greedy_rollout_takes_the_likeliest_tokens_until_EOS():
    lm = cold_lm(V)
    for start in ([A], [B], [C, SPACE], [AB, B]):
        ids = [*start]
        while len(ids) < len(start) + 5 and (best := int(np.argmax(log_probs_by_hand(lm, ids)))) != END:
            ids.append(best)
        context = lm.context(spelled(start[:1]))
        for i in start[1:]:
            context += lm.vocab[i]
        assert [int(i) for i in rollout(context, 5).tokens] == ids


def test_a_drawn_rollout_has_the_distribution_of_the_model():
    lm, rng, runs = tiny_lm(V), np.random.default_rng(1), 4000
    context = lm.context("b")
    pairs = [tuple(int(i) for i in rollout(context, 2, rng).tokens[1:]) for _ in range(runs)]
    first = np.exp(log_probs_by_hand(lm, [B]))
    for i in range(V - 1):
        second = np.exp(log_probs_by_hand(lm, [B, i]))
        for j in range(V):
            p = first[i] * second[j]
            share = sum(pair == ((i,) if j == END else (i, j)) for pair in pairs) / runs
            assert abs(share - p) <= 4.5 * math.sqrt(p * (1 - p) / runs)


def test_a_greedy_rollout_runs_each_of_its_tokens_once():
    def tokens(ids):                                    # after n tokens, "a" is the likeliest, then "b", and so on
        return [1.0, 0.0, -9.0] if len(ids) % 2 else [0.0, 1.0, -9.0]

    lm = table_lm(tokens)
    context = lm.context("a")
    ahead = rollout(context, 4)
    assert lm.stats.rows == 4
    token = ahead.tokens[1]
    assert len(rollout(context + token, 4)) == 6
    assert lm.stats.rows == 5


def test_mean_next_token_is_the_mean_of_the_distributions_along_a_text():
    def logits(ids):
        return [math.log(x) for x in ([0.0001, 0.9998, 0.0001] if ids[-1] == 0 else [0.9998, 0.0001, 0.0001])]

    context = table_lm(logits).context("a")             # a b a b ... with hardly any exception
    dist = mean_next_token(context, 2)
    halves = mixture([context.next_token(), (context + context.lm.vocab[1]).next_token()], [0.5, 0.5])
    np.testing.assert_allclose(dist.log_probs(), halves.log_probs(), atol=1e-12)
    assert dist.log_prob(EOS) == pytest.approx(math.log(0.0001))


def test_mean_next_token_restarts_after_the_end_of_a_text():
    context = table_lm(lambda ids: [-50.0, -50.0, 0.0]).context("a")
    assert mean_next_token(context, 5).log_prob(EOS) == pytest.approx(0.0, abs=1e-12)


def test_mean_next_token_continues_at_the_length_of_the_model():
    context = tiny_lm(V).context("a")
    assert tiny_lm(V).engine.max_length == 32
    assert np.logaddexp.reduce(mean_next_token(context, 200).log_probs()) == pytest.approx(0.0)
