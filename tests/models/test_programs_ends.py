"""Ends of texts: end="eos", "prefix" and "boundary" against sums by hand, against queries, and in counts of work."""

import functools
import json
import math
import re
import warnings

import numpy as np
import pytest
from helpers.common import repetitions, slow
from helpers.programs import EvenLength, nested
from helpers.samplers import weighed
from helpers.tiny import (
    TOKENS,
    cold_lm,
    log_prob_by_hand,
    log_probs_by_hand,
    spelled,
    table_lm,
    texts_of,
    tiny_lm,
    tiny_vocab,
)

from llmppl import (
    CachedTransformer,
    ConstrainedText,
    Grammar,
    JsonSchema,
    Regex,
    Rule,
    Vocabulary,
    enumerate_exact,
    importance_sampling,
    smc_standard,
    smc_steer,
)
from llmppl.constraints import DFA
from llmppl.distributions import ArrayTable, read_blocks, values_at
from llmppl.lm import TokenDistribution
from llmppl.models import spans
from llmppl.queries import Query

V = 6
A, B, C, SPACE, AB, END = range(6)
ENDS = "eos", "prefix", "boundary"
RUNS = repetitions(800, 100)
each_end = pytest.mark.parametrize("end", ENDS)


def begins_nested(text):
    found = re.fullmatch("(a*)(c?)(b*)", text)
    return found is not None and len(found[3]) <= len(found[1]) and (not found[3] or bool(found[2]))


CONSTRAINTS = {                                         # what makes it, whether a text is one, whether one begins so
    "regex": (
        lambda: Regex(r"(ab|c)+| a?"),
        lambda text: re.fullmatch(r"(ab|c)+| a?", text) is not None,
        lambda text: re.fullmatch(r"(ab|c)*a?| a?", text) is not None,
    ),
    "words": (
        lambda: DFA.from_strings(["a", "abc", "cab"]),
        {"a", "abc", "cab"}.__contains__,
        {"", "a", "ab", "abc", "c", "ca", "cab"}.__contains__,
    ),
    "grammar": (lambda: Grammar('start: "a" start "b" | "c"'), nested, begins_nested),
    "recognizer": (EvenLength, lambda text: len(text) % 2 == 0 and "b" not in text, lambda text: "b" not in text),
}
each_constraint = pytest.mark.parametrize("name", CONSTRAINTS)


def row_by_hand(ids, rule=None):
    """Return (V,) probabilities after "a" and `ids`."""
    probs = np.exp(log_probs_by_hand(tiny_lm(V), [A, *ids]))
    if rule is not None:
        probs = probs ** (1 / rule)
    return probs / probs.sum()


@functools.cache
def by_hand(name, end, most=4, least=0, temperature=1.0, without=""):
    """Return the probability of every allowed text of `least` to `most` tokens, its end included.

    `without` are characters that a mask takes away."""
    _, fits, begins = CONSTRAINTS[name]
    sums = {}
    for ids in texts_of(V, most + 1):
        text = spelled(ids)
        if ids[-1] != END or not least < len(ids) <= most + 1 or not fits(text) or {*text} & {*without}:
            continue
        ids, prob = ids[:-1], 1.0
        for i, token in enumerate(ids):
            prob *= row_by_hand(ids[:i], temperature)[token]
        leaves = [v == END or not begins(text + TOKENS[v].decode()) for v in range(V)]
        row = row_by_hand(ids, temperature)
        prob *= {"eos": row[END], "prefix": 1.0, "boundary": row[leaves].sum()}[end]
        sums[text] = sums.get(text, 0.0) + prob
    return {text: prob for text, prob in sums.items() if prob > 0.0}


def program(name, end, **options):
    return ConstrainedText(tiny_lm(V), "a", CONSTRAINTS[name][0](), **({"max_tokens": 4, "end": end} | options))


@each_end
@each_constraint
def test_a_text_has_the_probability_of_its_tokens_and_its_end(name, end):
    posterior = enumerate_exact(program(name, end))
    assert weighed(posterior) == pytest.approx(by_hand(name, end), rel=1e-9)
    assert posterior.log_ml == pytest.approx(math.log(sum(by_hand(name, end).values())), abs=1e-9)
    assert not any(particle.cut for particle in posterior)


@each_end
@pytest.mark.parametrize("name", slow(*CONSTRAINTS))
def test_three_algorithms_estimate_this_probability_without_bias(name, end):
    model, truth = program(name, end), by_hand(name, end)
    for run in (
        lambda seed: smc_steer(model, 4, 2, seed=seed),
        lambda seed: smc_steer(model, 3, 2, seed=seed, expand="copies"),
        lambda seed: smc_standard(model, 4, seed=seed),
        lambda seed: importance_sampling(model, 5, seed=seed),
    ):
        likeliest = max(truth, key=truth.get)
        found = np.zeros((RUNS, 2))
        for seed in range(RUNS):
            weights = weighed(run(seed))
            found[seed] = sum(weights.values()), weights.get(likeliest, 0.0)
        errors = found.std(axis=0, ddof=1) / math.sqrt(RUNS)
        assert (np.abs(found.mean(axis=0) - [sum(truth.values()), truth[likeliest]]) < 4.5 * errors + 1e-9).all()


@each_end
@pytest.mark.parametrize("pattern", ["(ab|c)+", "a*b?", "(a|ab|b)*c?", "c|ca|cab"])
def test_a_query_with_the_same_language_and_end_finds_the_same_texts(pattern, end):
    model = ConstrainedText(tiny_lm(V), "a", Regex(pattern), end=end, max_tokens=4)
    query = Query(tiny_lm(V), f"a({pattern})", prefix="a", end=end, max_tokens=4)
    found = {str(match)[1:]: 0.0 for match in query.best(results="tokens")}
    for match in query.best(results="tokens"):
        found[str(match)[1:]] += math.exp(match.log_prob)
    posterior = enumerate_exact(model)
    assert weighed(posterior) == pytest.approx(found, rel=1e-9)
    if end != "prefix":                                 # of which probability() counts the shortest matches alone
        asked = query.probability(tolerance=1e-9, max_expansions=100_000, seed=0)
        assert asked.lower == pytest.approx(math.exp(posterior.log_ml), rel=1e-6)


@each_end
def test_bounds_a_rule_and_a_mask_work_with_every_end(end):
    found = weighed(enumerate_exact(program("regex", end, min_tokens=2, max_tokens=3)))
    assert found == pytest.approx(by_hand("regex", end, 3, 2), rel=1e-9)
    found = weighed(enumerate_exact(program("regex", end, rule=Rule(temperature=1.7))))
    assert found == pytest.approx(by_hand("regex", end, temperature=1.7), rel=1e-9)
    mask = np.array([b"c" not in token for token in tiny_vocab(V).tokens])
    found = weighed(enumerate_exact(program("regex", end, mask=lambda text: mask)))
    assert found == pytest.approx(by_hand("regex", end, without="c"), rel=1e-9)


def test_an_end_that_a_mask_forbids_does_not_occur():
    mask = np.ones(V, bool)
    mask[END] = False
    for end in ENDS:
        open_ended = program("regex", end, mask=lambda text: mask if len(text) < 3 else np.ones(V, bool))
        assert {len(particle.s) >= 3 for particle in enumerate_exact(open_ended)} == {True}


def test_without_a_constraint_only_eos_ends_a_text():
    free = lambda end: weighed(enumerate_exact(ConstrainedText(tiny_lm(V), "a", end=end, max_tokens=2)))  # noqa: E731
    assert free("boundary") == free("eos")
    fits = lambda text: "b" not in text  # noqa: E731
    held = [weighed(enumerate_exact(ConstrainedText(tiny_lm(V), "a", fits, end=end, max_tokens=2))) for end in ENDS]
    assert held[0] == held[2] and held[0] != held[1]
    every = enumerate_exact(ConstrainedText(tiny_lm(V), "a", end="prefix", complete=True, max_tokens=2))
    truth = {}
    for ids in (ids[:-1] for ids in texts_of(V, 3) if ids[-1] == END):
        truth[spelled(ids)] = truth.get(spelled(ids), 0.0) + math.exp(log_prob_by_hand(tiny_lm(V), [A], ids))
    assert weighed(every) == pytest.approx(truth, rel=1e-9)


def test_boundary_is_the_default_end_with_a_constraint():
    assert weighed(enumerate_exact(ConstrainedText(tiny_lm(V), "a", Regex("a*b?"), max_tokens=3))) == weighed(
        enumerate_exact(ConstrainedText(tiny_lm(V), "a", Regex("a*b?"), max_tokens=3, end="boundary"))
    )


def test_an_unknown_end_is_refused_with_the_valid_ones():
    with pytest.raises(ValueError, match="end must be one of 'eos', 'prefix', 'boundary', not 'bound'"):
        ConstrainedText(tiny_lm(V), "a", Regex("a"), end="bound")


# ---- a promise


@pytest.mark.parametrize("near", [0, 64])               # tokens from the end from which on the masks plan it
@each_end
@each_constraint
def test_a_text_that_can_go_on_ends_within_a_default(name, end, near, monkeypatch):
    monkeypatch.setattr(spans, "NEAR", near)
    monkeypatch.setattr(spans, "MORE_TOKENS", {"regex": 3, "words": 0, "grammar": 3, "recognizer": 4}[name])
    text = ConstrainedText(tiny_lm(V), "a", CONSTRAINTS[name][0](), end=end)
    assert text.must_end_by == (31 if name == "words" else 4)       # the model reads 32 tokens
    assert weighed(enumerate_exact(text)) == pytest.approx(by_hand(name, end), rel=1e-9)


def test_the_default_limit_leaves_room_and_is_not_for_finite_languages():
    def bound(constraint, complete=None, room=math.inf, least=0):
        return spans.Guide(constraint, tiny_vocab(V), complete, None, room, least).must_end_by

    assert bound(Regex("c{7}a*")) == 167 and bound(Regex("a*"), least=30) == 190 and bound(Regex("a*"), room=9) == 9
    assert bound(Regex("a{0,900}")) == bound(Regex("a*"), complete=False) == bound(lambda text: True) == math.inf
    assert bound(Regex("(a|b|c)*a(a|b|c){14}")) == math.inf         # too many states to read


def test_a_constraint_implies_complete_unless_complete_is_False():
    for constraint in (Regex("(ab|c)+"), ["ab", "cab", "ccc"], Grammar('start: "a" start "b" | "c"')):
        posterior = enumerate_exact(ConstrainedText(tiny_lm(V), "a", constraint, max_tokens=3))
        assert len(posterior) and not any(particle.cut for particle in posterior)
        assert max(particle.num_tokens for particle in posterior) == 3
    cut = enumerate_exact(ConstrainedText(tiny_lm(V), "a", Regex("(ab|c)+"), complete=False, max_tokens=2))
    assert {particle.s for particle in cut if particle.cut} == {"aba", "abab", "abc", "ab", "cc", "ca", "cab"}


def test_max_tokens_cuts_a_text_without_a_constraint():
    for constraint in (None, lambda text: True):
        posterior = enumerate_exact(ConstrainedText(tiny_lm(V), "a", constraint, max_tokens=2))
        assert {particle.cut for particle in posterior} == {True, False} and posterior.log_ml == pytest.approx(0.0)


def test_a_text_that_cannot_grow_is_not_cut_at_max_tokens():
    posterior = enumerate_exact(ConstrainedText(tiny_lm(V), "a", Regex("cc|cab?"), complete=False, max_tokens=2))
    assert {particle.s: particle.cut for particle in posterior} == {"cc": False, "ca": True, "cab": False}


# ---- the end of what the model can read


def window_lm(room):
    """Return the tiny model with room for `room` tokens after the prompt "a"."""
    lm = cold_lm(V)
    lm.engine.max_length = 1 + room
    return lm


@each_end
@each_constraint
@pytest.mark.parametrize("max_tokens", [None, 5, 300])
def test_a_constrained_text_is_complete_within_the_length_of_the_model(name, end, max_tokens):
    model = ConstrainedText(window_lm(4), "a", CONSTRAINTS[name][0](), end=end, max_tokens=max_tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior = enumerate_exact(model)
    assert weighed(posterior) == pytest.approx(by_hand(name, end), rel=1e-9)
    assert not any(particle.cut for particle in posterior)


@each_end
def test_far_from_the_length_limit_any_token_is_proposed_with_exact_weights(end, monkeypatch):
    monkeypatch.setattr(spans, "NEAR", 1)
    model = ConstrainedText(window_lm(4), "a", Regex("b?(accc|c)+"), end=end)
    truth = weighed(enumerate_exact(ConstrainedText(tiny_lm(V), "a", Regex("b?(accc|c)+"), end=end, max_tokens=4)))
    posterior = enumerate_exact(model)
    assert weighed(posterior) == pytest.approx(truth, rel=1e-9) and posterior.deaths
    found = [sum(weighed(smc_steer(model, 3, 2, seed=seed)).values()) for seed in range(RUNS)]
    assert abs(np.mean(found) - sum(truth.values())) < 4.5 * np.std(found, ddof=1) / math.sqrt(RUNS) + 1e-9


def test_without_complete_a_text_is_cut_at_the_length_of_the_model():
    for constraint, complete in ((None, None), (lambda text: True, None), (Regex("(ab|c)+"), False)):
        with pytest.warns(UserWarning, match="the model reads at most 3"):
            posterior = enumerate_exact(ConstrainedText(window_lm(2), "a", constraint, complete=complete))
        assert {particle.cut for particle in posterior} == {True, False}
    whole = enumerate_exact(ConstrainedText(window_lm(2), "a", complete=True))
    bounded = enumerate_exact(ConstrainedText(tiny_lm(V), "a", complete=True, max_tokens=2))
    assert weighed(whole) == pytest.approx(weighed(bounded), rel=1e-12)


def never_c(room):
    """Return a model with the tiny model's vocabulary that gives "c" no probability."""
    lm = table_lm(lambda ids: [-math.inf if i == C else 0.0 for i in range(V)], TOKENS[: V - 1])
    lm.engine.max_length = 1 + room
    return lm


def test_a_prompt_that_leaves_too_few_tokens_is_refused_with_their_number():
    for options in ({}, {"max_tokens": 9}):
        with pytest.raises(ValueError, match="no text ends within the 2 tokens that .* the shortest takes 3 tokens: "):
            ConstrainedText(window_lm(2), "a", Regex("ccc"), **options)
    with pytest.raises(ValueError, match="min_tokens=3, and the text must end within the 2 tokens that the model can"):
        ConstrainedText(window_lm(2), "a", Regex("a*"), min_tokens=3)
    with pytest.raises(ValueError, match="a context of 4 tokens, and the model reads at most 3: shorten the prompt"):
        ConstrainedText(lm := window_lm(2), lm.context("a") + "bcb", Regex("a*"))
    dead = importance_sampling(ConstrainedText(never_c(2), "a", Regex("a*c"), end="prefix"), 5, seed=0).deaths
    assert "no token allowed by Regex('a*c') has positive probability" in dead[0].reason


# ---- what it costs


@pytest.mark.parametrize("end, tokens", [("eos", 4), ("prefix", 1), ("boundary", 1)])
def test_the_model_does_not_run_after_a_text_that_cannot_grow(end, tokens):
    lm = cold_lm(V)
    posterior = enumerate_exact(ConstrainedText(lm, "a", ["b", "c", " "], end=end))
    assert posterior.stats.tokens == tokens and len(posterior) == 3
    truth = {text: math.exp(log_prob_by_hand(lm, [A], [token])) for text, token in (("b", B), ("c", C), (" ", SPACE))}
    if end != "eos":
        assert weighed(posterior) == pytest.approx(truth, rel=1e-9)


def test_at_the_limit_a_prefix_ends_and_a_boundary_is_still_checked():
    for end, tokens in (("prefix", 1), ("boundary", 2)):
        posterior = enumerate_exact(ConstrainedText(cold_lm(V), "a", Regex("c*"), end=end, max_tokens=1))
        assert posterior.stats.tokens == tokens and {particle.s for particle in posterior} == {"", "c"}


# ---- the distribution of what follows, and its table


def test_all_eos_ids_end_a_text_together():
    vocab = Vocabulary([b"a", b"", b"b", b""], eos_ids=[1, 3])
    lm = CachedTransformer(lambda ids: np.log([0.4, 0.1, 0.3, 0.2]), vocab)
    truth = {"eos": 0.4 * 0.3, "boundary": 0.4 * 0.6, "prefix": 0.4}
    for end, prob in truth.items():
        posterior = enumerate_exact(ConstrainedText(lm, lm.at([0]), Regex("a|aa"), end=end, max_tokens=2))
        assert weighed(posterior)["a"] == pytest.approx(prob, rel=1e-9)


def test_a_vocabulary_without_an_eos_cannot_end_a_text_by_eos():
    lm = CachedTransformer(lambda ids: np.zeros(2), Vocabulary([b"a", b"b"]))
    with pytest.raises(ValueError, match="an eos id ends a text, and .* has none"):
        smc_steer(ConstrainedText(lm, lm.at([0]), Regex("a*"), max_tokens=3), 2, 2, seed=0)


@pytest.mark.parametrize("size", [5, 600])
@pytest.mark.parametrize("part", [1e-14, 0.3, 1.0 - 1e-9])
@pytest.mark.parametrize("end", ["prefix", "boundary"])
def test_the_probability_of_an_end_is_summed_exactly(size, part, end):
    rng = np.random.default_rng(size)
    vocab = Vocabulary([*(b"%d;" % i for i in range(size)), b""], eos_ids=[size])
    inside = rng.random(size + 1) < 0.4
    inside[:2], inside[size] = (True, False), True      # what is said of eos does not matter
    among = inside & vocab.not_eos
    probs = rng.random(size + 1)
    probs[among] *= part / probs[among].sum()
    probs[~among] *= (1.0 - part) / probs[~among].sum()
    dist = TokenDistribution(vocab, np.log(probs) + 3.0).with_end(inside, end)
    truth = np.where(among, probs, 0.0)
    truth[size] = 1.0 if end == "prefix" else math.fsum(probs[~among])
    np.testing.assert_allclose(np.exp(dist.log_weights() - 3.0), truth, rtol=1e-9)
    assert math.exp(dist.log_total() - 3.0) == pytest.approx(truth.sum(), rel=1e-12)
    table = dist.table()
    assert [table.at(i) for i in (0, size)] == pytest.approx(np.log(truth[[0, size]]) + 3.0, rel=1e-9)
    plain = ArrayTable(np.log(rng.random(size + 1)))
    rows, blocks = np.array([0, 1, 0]), np.array([size // 256, 0, 0])
    for place, values in enumerate(read_blocks([table, plain], rows, blocks)):
        whole = [table, plain][rows[place]].whole()[blocks[place] * 256 :][:256]
        np.testing.assert_allclose(values[: len(whole)], whole, rtol=1e-9)
    assert values_at([plain, table], np.array([1, 0]), np.array([size, 1])) == pytest.approx(
        [table.at(size), plain.at(1)]
    )
    early = dist.masked(vocab.not_eos)
    assert early.log_prob(size) == -math.inf and early.log_total() == pytest.approx(math.log(part) + 3.0, rel=1e-9)
    assert dist.masked(vocab.only_eos).log_prob(size) == 0.0
    drawn = [int(dist.sample(rng)) for _ in range(300)]
    share = truth[size] / truth.sum()
    assert abs(np.mean(np.array(drawn) == size) - share) < 4.5 * math.sqrt(share * (1 - share) / 300) + 1e-6


# ---- a language of JSON


def test_a_json_text_ends_with_its_last_bracket_without_eos():
    pytest.importorskip("jsonschema")
    vocab = Vocabulary([b"[", b"]", b"1", b"2", b",", b""], eos_ids=[5])
    lm = table_lm(lambda ids: [0.0] * 5 + [-50.0], vocab.tokens[:5])
    posterior = enumerate_exact(ConstrainedText(lm, "[", JsonSchema({"enum": [[1], [2, 1]]}, whitespace=False)))
    assert {json.dumps(json.loads(text)): weight for text, weight in weighed(posterior).items()} == pytest.approx(
        {"[1]": 0.2**3, "[2, 1]": 0.2**5}, rel=1e-6
    )
