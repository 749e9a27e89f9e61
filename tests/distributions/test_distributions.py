"""Distributions against their formulas, samples against their probabilities, and the distributions of tokens."""

import copy
import functools
import gc
import math
import weakref

import numpy as np
import pytest
from helpers.common import repetitions
from helpers.tiny import cold_lm, log_prob_by_hand, log_probs_by_hand, table_lm, tiny_lm, tiny_vocab
from hypothesis import assume, given
from hypothesis import strategies as st

from llmppl import (
    EOS,
    Bernoulli,
    CachedTransformer,
    Categorical,
    ConstrainedText,
    Delta,
    Geometric,
    Model,
    Regex,
    Rule,
    Uniform,
    Vocabulary,
    enumerate_exact,
    mixture,
    product,
    smc_steer,
)
from llmppl.distributions import Distribution, Finite, Impossible
from llmppl.lm import NextToken, TokenDistribution

V = 6
END = V - 1

DISTS = {
    "bernoulli": (Bernoulli(0.3), {False: 0.7, True: 0.3}),
    "never": (Bernoulli(0.0), {False: 1.0, True: 0.0}),
    "categorical": (Categorical([0.1, 0.0, 0.6, 0.3]), {0: 0.1, 1: 0.0, 2: 0.6, 3: 0.3}),
    "values": (Categorical([0.25, 0.75], values=["x", "y"]), {"x": 0.25, "y": 0.75}),
    "dict": (Categorical({"x": 0.25, (1, 2): 0.75}), {"x": 0.25, (1, 2): 0.75}),
    "uniform": (Uniform(-1, 2), dict.fromkeys(range(-1, 3), 0.25)),
    "one": (Uniform(5, 5), {5: 1.0}),
    "of values": (Uniform(["cat", "dog", (1, 2)]), dict.fromkeys(["cat", "dog", (1, 2)], 1 / 3)),
    "delta": (Delta("x"), {"x": 1.0}),
    "geometric, at most 3": (Geometric(0.4, max_value=3), {n: 0.4 * 0.6**n / (1 - 0.6**4) for n in range(4)}),
    "geometric, at most 0": (Geometric(0.4, max_value=0), {0: 1.0}),
    "certain geometric": (Geometric(1.0, max_value=2), {0: 1.0, 1: 0.0, 2: 0.0}),
    "masked": (Uniform(0, 3).masked([True, False, True, False]), {0: 0.5, 1: 0.0, 2: 0.5, 3: 0.0}),
    "tempered": (Categorical([0.2, 0.8]).tempered(0.5), {0: 0.04 / 0.68, 1: 0.64 / 0.68}),
    "top_k": (Categorical([0.1, 0.2, 0.3, 0.4]).top_k(2), {0: 0.0, 1: 0.0, 2: 3 / 7, 3: 4 / 7}),
    "top_p": (Categorical([0.125, 0.25, 0.5, 0.125]).top_p(0.6), {0: 0.0, 1: 1 / 3, 2: 2 / 3, 3: 0.0}),
    "min_p": (Rule(min_p=0.4)(Categorical([0.1, 0.2, 0.3, 0.4])), {0: 0.0, 1: 2 / 9, 2: 3 / 9, 3: 4 / 9}),
    "product": (product(Bernoulli(0.2), Bernoulli(0.6)), {False: 0.32 / 0.44, True: 0.12 / 0.44}),
    "mixture": (mixture([Bernoulli(0.2), Bernoulli(0.6)], [0.75, 0.25]), {False: 0.7, True: 0.3}),
}
every_dist = pytest.mark.parametrize(("dist", "probs"), DISTS.values(), ids=DISTS)


def log(p: float) -> float:
    return math.log(p) if p > 0 else -math.inf


@every_dist
def test_log_prob_agrees_with_the_formula(dist, probs):
    found = [*map(dist.log_prob, probs)]
    assert found == pytest.approx([*map(log, probs.values())], abs=1e-12)
    assert {*map(type, found)} == {float}


@every_dist
def test_log_probs_are_read_only_and_follow_the_support(dist, probs):
    log_probs = dist.log_probs()
    assert list(dist.support) == list(probs)
    np.testing.assert_allclose(log_probs, [log(p) for p in probs.values()], atol=1e-12)
    assert log_probs.dtype == np.float64 and np.exp(log_probs).sum() == pytest.approx(1.0)
    with pytest.raises(ValueError, match="read-only"):
        log_probs[0] = 0.0


@every_dist
@pytest.mark.parametrize("value", ["no such value", None, -7, 99, 0.5, math.nan, math.inf])
def test_values_outside_the_support_have_log_prob_minus_infinity(dist, probs, value):
    assert dist.log_prob(value) == -math.inf


@every_dist
def test_samples_have_their_probabilities_within_the_standard_error(dist, probs):
    n, rng = repetitions(20000, 4000), np.random.default_rng(len(probs))
    drawn = [dist.sample(rng) for _ in range(n)]
    assert set(drawn) <= set(probs)
    p, shares = np.array([*probs.values()]), np.array([*map(drawn.count, probs)]) / n
    assert np.all(np.abs(shares - p) <= 4.5 * np.sqrt(p * (1 - p) / n) + 1e-9)


@every_dist
def test_queries_change_nothing_and_a_copy_is_the_distribution_itself(dist, probs):
    before, rng = dist.log_probs().copy(), np.random.default_rng(0)
    dist.log_prob(next(iter(probs)))
    dist.sample(rng)
    np.testing.assert_array_equal(dist.log_probs(), before)
    assert copy.deepcopy(dist) is dist and copy.deepcopy([dist])[0] is dist
    assert dist.sample(np.random.default_rng(3)) == dist.sample(np.random.default_rng(3))


# ---- Geometric without an end


@pytest.mark.parametrize("p", [0.02, 0.5, 0.97])
def test_geometric_counts_failures_before_the_first_success(p):
    dist, n, rng, k = Geometric(p), repetitions(40000, 5000), np.random.default_rng(0), np.array([0, 1, 5, 40])
    np.testing.assert_allclose([*map(dist.log_prob, k)], math.log(p) + k * math.log(1 - p))
    drawn = np.array([dist.sample(rng) for _ in range(n)])
    assert abs(drawn.mean() - (1 - p) / p) <= 4.5 * math.sqrt((1 - p) / p**2 / n)
    tails, found = (1 - p) ** (k + 1), (drawn[:, None] > k).mean(0)
    assert (np.abs(found - tails) <= 4.5 * np.sqrt(tails * (1 - tails) / n) + 1e-12).all()


def test_geometric_without_an_end_has_no_list_of_log_probabilities():
    with pytest.raises(TypeError, match=r"Geometric\(0.5\) has no finite support"):
        Geometric(0.5).log_probs()
    assert Geometric(1.0).sample(np.random.default_rng(0)) == 0
    assert Geometric(1.0).log_prob(0) == 0.0 and Geometric(1.0).log_prob(1) == -math.inf


# ---- derived distributions

weights = st.lists(st.integers(0, 12), min_size=2, max_size=7).filter(any)


def categorical(counts) -> Categorical:
    return Categorical(np.array(counts) / sum(counts))


def assert_dist(dist: Finite, expected) -> None:
    np.testing.assert_allclose(np.exp(dist.log_probs()), np.asarray(expected) / np.sum(expected), atol=1e-12)
    assert np.exp(dist.log_probs()).sum() == pytest.approx(1.0)


@given(weights, st.data())
def test_masked_is_the_distribution_given_the_allowed_values(counts, data):
    mask = data.draw(st.lists(st.booleans(), min_size=len(counts), max_size=len(counts)))
    assume(any(c and m for c, m in zip(counts, mask, strict=True)))
    assert_dist(categorical(counts).masked(mask), np.array(counts) * np.array(mask))


@given(weights, st.floats(0.1, 10.0))
def test_tempered_raises_the_probabilities_to_a_power(counts, temperature):
    assert_dist(categorical(counts).tempered(temperature), (np.array(counts) / max(counts)) ** (1 / temperature))


@given(weights, st.integers(1, 9))
def test_top_k_keeps_the_k_most_probable_and_of_equals_the_first(counts, k):
    best = sorted(range(len(counts)), key=lambda i: (-counts[i], i))[:k]
    assert_dist(categorical(counts).top_k(k), [c if i in best else 0 for i, c in enumerate(counts)])


@given(weights, st.integers(1, 64))
def test_top_p_keeps_the_fewest_that_reach_p(counts, numerator):
    p = numerator / 64
    order, kept, total = sorted(range(len(counts)), key=lambda i: (-counts[i], i)), [], 0
    for i in order:
        assume(abs(total / sum(counts) - p) > 1e-9)     # at the boundary itself see below
        if total / sum(counts) < p:
            kept.append(i)
        total += counts[i]
    assert_dist(categorical(counts).top_p(p), [c if i in kept else 0 for i, c in enumerate(counts)])


@pytest.mark.parametrize("V", [511, 513, 5000])         # fewer and more than are looked at first
@pytest.mark.parametrize("scale", [0.01, 3.0])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.95, 0.999, 1.0])
def test_top_p_of_many_values_agrees_with_sorting_all(V, scale, p):
    log_weights = np.round(np.random.default_rng(V).normal(size=V) * scale, 1)      # many are equal
    dist = Finite(range(V), log_weights)
    order = np.argsort(-log_weights, kind="stable")
    before = np.cumsum(np.exp(dist.log_probs()[order])) - np.exp(dist.log_probs()[order])
    kept = {*np.flatnonzero(np.isfinite(dist.top_p(p).log_probs())).tolist()}
    assert {*order[before < p - 1e-9].tolist()} <= kept <= {*order[before < p + 1e-9].tolist()}


@pytest.mark.parametrize("V", [601, 5001])              # more than are looked at first
@pytest.mark.parametrize("share", [0, 0.001, 0.25, 0.5])
def test_top_p_of_one_likely_value_among_equal_ones(V, share):
    probs = np.full(V, 0.5 / (V - 1))
    probs[V // 2] = 0.5
    num_kept = 1 + int(share * V)
    order = [V // 2, *np.delete(np.arange(V), V // 2).tolist()]
    p = 0.5 + (num_kept - 1.5) * probs[0]
    kept = np.flatnonzero(np.isfinite(Categorical(probs).top_p(p).log_probs()))
    assert kept.tolist() == sorted(order[:num_kept])


DERIVATIONS = [
    lambda dist: dist.tempered(0.5), lambda dist: dist.top_k(2), lambda dist: dist.top_p(0.5), Rule(min_p=0.7),
    Rule(temperature=2.0, top_k=2),
]  # fmt: skip


@pytest.mark.parametrize("derive", DERIVATIONS)
def test_the_same_derivation_returns_one_object_while_it_lives(derive):
    dist = categorical([1, 2, 3])
    first = derive(dist)
    assert derive(dist) is first
    first.log_probs()
    assert derive(dist) is first and dist.tempered(0.5) is not dist.tempered(0.25)
    kept = weakref.ref(dist.tempered(0.75))
    gc.collect()
    assert kept() is None


WITH_END = functools.partial(TokenDistribution.with_end, end="prefix")


@pytest.mark.parametrize("make", [TokenDistribution.masked, WITH_END])
def test_a_mask_lives_as_long_as_its_derived_distribution(make):
    """Check that a mask stays alive: it is known by its id, which another object could get later."""
    dist = TokenDistribution(tiny_vocab(V), lambda: np.zeros(V))
    mask = np.arange(V) < 2
    mask.flags.writeable = False
    made, kept = make(dist, mask), weakref.ref(mask)
    made.log_probs()
    assert make(dist, mask) is made
    del mask
    gc.collect()
    assert kept() is not None


def test_a_rule_is_applied_once_to_each_distribution(monkeypatch):
    read, log_weights = [], Finite.log_weights

    def counted(dist):
        read.extend([dist] * (isinstance(dist, TokenDistribution) and not dist._parents))
        return log_weights(dist)

    monkeypatch.setattr(Finite, "log_weights", counted)
    lm, rule = table_lm(lambda ids: [0.0, 1.0, -1.0]), Rule(temperature=0.5)
    program = ConstrainedText(lm, "a", Regex("[ab]{4}"), rule=rule)
    posterior = smc_steer(program, N=6, K=3, seed=0)
    assert 0 < len(read) <= posterior.stats.rows


def test_top_p_of_1_leaves_every_value():
    dist = Finite(["a", "b", "c", "d"], [0.0, -60.0, -500.0, -np.inf])
    assert dist.top_p(1.0).log_probs().tolist() == dist.log_probs().tolist()
    assert Rule(0.5, top_p=1)(dist).log_probs().tolist() == Rule(0.5)(dist).log_probs().tolist()


@pytest.mark.parametrize(("p", "kept"), [
    (1e-300, [0, 1, 0, 0]), (0.5, [0, 1, 0, 0]), (0.75, [0.25, 0.5, 0, 0]),
    (0.875, [0.25, 0.5, 0.125, 0]),                     # of the two equal ones, the first
    (1.0, [0.25, 0.5, 0.125, 0.125]),
])  # fmt: skip
def test_top_p_at_the_boundary_stops_when_p_is_reached(p, kept):
    assert_dist(Categorical([0.25, 0.5, 0.125, 0.125]).top_p(p), kept)


@given(st.lists(weights, min_size=1, max_size=3))
def test_product_multiplies_and_mixture_adds(several):
    n = min(map(len, several))
    several = [counts[:n] for counts in several]
    assume(all(any(counts) for counts in several))
    dists = [categorical(counts) for counts in several]
    probs = [np.array(counts) / sum(counts) for counts in several]
    together = np.prod(probs, axis=0)
    if together.sum() > 0:
        assert_dist(product(*dists), together)
    else:
        with pytest.raises(Impossible):
            product(*dists).sample(np.random.default_rng(0))
    shares = np.arange(1, len(dists) + 1) / sum(range(1, len(dists) + 1))
    assert_dist(mixture(dists, shares), np.sum([s * p for s, p in zip(shares, probs, strict=True)], axis=0))


@given(weights, st.data(), st.floats(0.1, 3), st.floats(-3, 3))
def test_powers_of_a_product_agree_with_powers_of_probabilities(counts, data, a, b):
    others = data.draw(st.lists(st.integers(1, 9), min_size=len(counts), max_size=len(counts)))
    p, q = np.array(counts) / sum(counts), np.array(others) / sum(others)
    dist = product(categorical(counts), categorical(others), powers=[a, b])
    assert_dist(dist, p**a * q**b / (p**a * q**b).sum())


def test_power_0_drops_a_distribution_and_a_negative_power_divides():
    first, second = Categorical([0.5, 0.5, 0.0]), Categorical([0.2, 0.8, 0.0])
    assert_dist(product(first, Categorical([0.0, 0.0, 1.0]), powers=[2, 0]), [1, 1, 0])
    assert_dist(product(first, second, powers=np.array([1, -1])), [0.8, 0.2, 0])    # 0 / 0 is 0
    assert repr(product(first.top_k(1), second, powers=(1, -0.5))).endswith("}), powers=[1, -0.5])")
    with pytest.raises(ValueError, match=r"Categorical\(.*\) gives 1 probability 0, and power -1 makes that inf"):
        product(first, Categorical([1.0, 0.0, 0.0]), powers=[1, -1]).log_probs()
    with pytest.raises(Impossible, match=r"product\(.*\) has no value of positive probability"):
        product(first, Categorical([0.0, 0.0, 1.0]), powers=[1, 0.5]).sample(np.random.default_rng(0))


def test_a_mixture_drops_a_component_of_weight_zero():
    assert_dist(mixture([Bernoulli(0.5), Bernoulli(1.0)], [0.0, 1.0]), [0, 1])


def test_derived_distributions_can_be_derived_again():
    dist = product(Uniform(0, 3), Categorical([0.1, 0.2, 0.3, 0.4])).masked([True, True, True, False]).top_k(2)
    assert_dist(dist.tempered(0.5), [0, 4, 9, 0])


def test_later_changes_to_an_array_do_not_change_the_distribution():
    probs = np.array([0.25, 0.75])
    dist = Categorical(probs)
    probs[0] = 0.5
    assert_dist(dist, [0.25, 0.75])


IMPOSSIBLE = Bernoulli(0.3).masked([False, False])


@pytest.mark.parametrize(
    "dist",
    [
        IMPOSSIBLE,
        IMPOSSIBLE.tempered(0.5),
        IMPOSSIBLE.top_k(1),
        IMPOSSIBLE.top_p(0.5),
        IMPOSSIBLE.masked([True, True]),
        product(Bernoulli(0.0), Bernoulli(1.0)),
        product(IMPOSSIBLE, Bernoulli(0.5)),
        mixture([IMPOSSIBLE, IMPOSSIBLE], [0.5, 0.5]),
    ],
)
def test_drawing_from_an_impossible_distribution_raises_and_every_value_has_probability_zero(dist):
    with pytest.raises(Impossible, match="has no value of positive probability"):
        dist.sample(np.random.default_rng(0))
    assert np.all(dist.log_probs() == -np.inf) and dist.log_prob(True) == -math.inf


class Ones:
    """Stream with the largest possible uniforms."""

    def random(self):
        return float(np.nextafter(1.0, 0.0))


class Zeros:
    def random(self):
        return 0.0


@given(weights)
def test_the_least_and_the_largest_uniform_draw_a_value_of_positive_probability(counts):
    dist = categorical(counts)
    positive = np.flatnonzero(counts)
    assert dist.sample(Zeros()) == positive[0] and dist.sample(Ones()) == positive[-1]


def test_far_apart_weights_neither_overflow_nor_vanish():
    dist = Finite(range(3), [-1e5, -1e5 + math.log(3), -3e5])
    np.testing.assert_allclose(np.exp(dist.log_probs()), [0.25, 0.75, 0])
    np.testing.assert_allclose(np.exp(dist.tempered(1e-3).log_probs()), [0, 1, 0], atol=1e-12)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Categorical([0.5, 0.6]), ValueError, "sum to 1"),
        (lambda: Categorical([-0.5, 1.5]), ValueError, "probs must be probabilities, not"),
        (lambda: Categorical([]), TypeError, "probs must be a list of probabilities"),
        (lambda: Categorical([0.5, 0.5], values=["x"]), ValueError, "2 probabilities for 1 values"),
        (lambda: Categorical([0.5, 0.5], values=["x", "x"]), ValueError, "distinct values"),
        (lambda: Categorical({"x": 1.0}, values=["x"]), ValueError, "leave `values` out"),
        (lambda: Uniform([]), ValueError, "one value or more"),
        (lambda: Uniform("abc"), TypeError, r"a list of values, .* not 'abc' alone"),
        (lambda: Uniform(["a", "b", "a"]), ValueError, "distinct values"),
        (lambda: Finite("aab", np.zeros(3)), ValueError, "Finite wants distinct values, not .* give equal ones one"),
        (lambda: Categorical([0.2, 0.3, 0.5], (1, 1.0, 2)), ValueError, "distinct values"),
        (lambda: Uniform(3, 2), ValueError, "integers low <= high, not low=3 and high=2"),
        (lambda: Uniform(0, 10**30), ValueError, r"Uniform lists its values: at most 10,000,000, not .*range\(0, 1000"),
        (lambda: Geometric(0.5, max_value=10**12), ValueError, "Geometric lists its values: at most 10,000,000, not"),
        (lambda: Uniform(3), TypeError, r"low and high, Uniform\(1, 6\), or a list of values, Uniform.*, not 3 alone"),
        (lambda: Bernoulli(0.5).masked([True]), ValueError, r"shape \(1,\); Bernoulli\(0.5\) wants \(2,\)"),
        (lambda: Bernoulli(0.5).masked([0, 1]), TypeError, "array of bool, not of int64"),
        (lambda: product(), ValueError, "product of no distributions"),
        (lambda: product([Bernoulli(0.5)]), TypeError, r"product\(\*distributions\), not \(\[Bernoulli"),
        (lambda: Categorical("ab"), TypeError, r"must be a list of .* not 'ab': .* as in Categorical\(\{'a': 0.5, 'b'"),
        (lambda: Categorical([0.5, 0.5], {1, 2}), TypeError, r"values must be a list, in the order of .* not \{1, 2\}"),
        (lambda: product(Bernoulli(0.5), Uniform(0, 3)), ValueError, "over different values"),
        (lambda: product(Geometric(0.5), Geometric(0.5)), TypeError, r"finite support, .* not \(Geometric"),
        (lambda: product(Bernoulli(0.5), powers=[1, 2]), ValueError, "a number for each of 1 distributions"),
        (lambda: product(Bernoulli(0.5), powers=[0]), ValueError, "of 1 distributions, and not all 0"),
        (lambda: mixture(Bernoulli(0.5), Bernoulli(0.5)), TypeError, r"mixture\(distributions, weights\), not Ber"),
        (lambda: mixture([Bernoulli(0.5)], [0.5, 0.5]), ValueError, "2 weights for 1 distributions"),
        (lambda: mixture([Bernoulli(0.5)], [0.5]), ValueError, "mixture: weights must sum to 1"),
        (lambda: mixture([Bernoulli(0.5), Uniform(0, 3)], [0.5, 0.5]), ValueError, "over different values"),
    ],
)
def test_an_invalid_distribution_is_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        make()


class Shared(Distribution):
    """Distribution of one's own over "abc", with given shares."""

    support = "abc"

    def __init__(self, shares) -> None:
        self.shares = shares

    def sample(self, rng):
        return str(rng.choice(list("abc"), p=np.array(self.shares) / sum(self.shares)))

    def log_prob(self, value):
        return math.log(self.shares["abc".index(value)])


class OneDraw(Model):
    def __init__(self, dist) -> None:
        super().__init__()
        self.dist = dist

    def step(self) -> None:
        self.s = self.sample(self.dist)
        self.finish()


@pytest.mark.parametrize("total", [0.5, 0.96, 0.9999, 1.0001, 1.04])
@pytest.mark.parametrize("run", [functools.partial(smc_steer, N=2, K=2, seed=0), enumerate_exact])
def test_a_distribution_that_is_not_normalised_is_refused_where_it_is_summed(run, total):
    with pytest.raises(ValueError, match="is a Distribution, and its probabilities sum to .* they must sum to 1, or a"):
        run(OneDraw(Shared([0.3 * total, 0.3 * total, 0.4 * total])))
    log_weights = np.float32([0.3, 1.1, 2.2])
    in_float32 = np.exp(log_weights - np.logaddexp.reduce(log_weights))
    assert run(OneDraw(Shared(in_float32))).log_ml == pytest.approx(0.0, abs=1e-5)


def test_distributions_have_reprs_that_show_their_parameters():
    assert repr(Bernoulli(0.25)) == "Bernoulli(0.25)"
    assert repr(Categorical({"x": 0.25, "y": 0.75})) == "Categorical({'x': 0.25, 'y': 0.75})"
    assert repr(Uniform(["a", "b"])) == "Uniform(['a', 'b'])"
    assert repr(Uniform(1, 6)) == "Uniform(1, 6)" and repr(Delta("x")) == "Delta('x')"
    assert repr(Geometric(0.5)) == "Geometric(0.5)"
    assert repr(Geometric(0.5, max_value=3)) == "Geometric(0.5, max_value=3)"
    assert repr(Uniform(1, 6).top_k(2)) == "Uniform(1, 6).top_k(2)"


# ---- distributions of tokens


def dist_after(text: str, lm: CachedTransformer | None = None) -> NextToken:
    lm = tiny_lm(V) if lm is None else lm
    return NextToken(lm.context(text))


def test_the_next_token_distribution_agrees_with_a_plain_forward_pass():
    dist = dist_after("ab")
    np.testing.assert_allclose(dist.log_probs(), log_probs_by_hand(tiny_lm(V), dist.context.tokens), atol=1e-9)
    assert dist.log_probs().dtype == np.float64 and not dist.log_probs().flags.writeable
    assert dist.log_probs().shape == (V,) and dist.support is tiny_lm(V).vocab
    token = dist.sample(np.random.default_rng(0))
    assert token is dist.support[int(token)]
    for value in (token, int(token), np.int64(token)):
        assert dist.log_prob(value) == dist.log_probs()[int(token)]


def test_the_log_prob_of_EOS_sums_over_all_eos_ids():
    vocab = Vocabulary([b"a", b"b", b"", b""], eos_ids=[2, 3])
    lm = CachedTransformer(lambda ids: [1.0, 0.0, 0.5, -0.5], vocab)
    dist = dist_after("a", lm)
    p = np.exp([1.0, 0.0, 0.5, -0.5])
    p /= p.sum()
    assert dist.log_prob(EOS) == pytest.approx(math.log(p[2] + p[3]))
    assert dist.log_prob(vocab[2]) == pytest.approx(math.log(p[2]))
    assert dist.masked([True, True, False, True]).log_prob(EOS) == pytest.approx(math.log(p[3] / (1 - p[2])))
    assert dist.masked([True, True, False, False]).log_prob(EOS) == -math.inf


def test_without_eos_ids_the_log_prob_of_EOS_is_minus_infinity():
    lm = CachedTransformer(lambda ids: [0.0, 0.0], Vocabulary([b"a", b"b"]))
    assert dist_after("a", lm).log_prob(EOS) == -math.inf


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (tiny_vocab(5)[0], ValueError, "belongs to another vocabulary"),
        (V, ValueError, "is not in this vocabulary"),
        ("a", TypeError, "is not a token"),
        (b"a", TypeError, "a token id is an int"),
    ],
)
def test_a_foreign_token_is_a_ValueError_and_a_str_a_TypeError(value, error, message):
    with pytest.raises(error, match=message):
        dist_after("a").masked(np.ones(V, bool)).log_prob(value)
    same = Vocabulary(tiny_vocab(V).tokens, eos_ids=[END])
    assert dist_after("a").log_prob(same[0]) == dist_after("a").log_prob(0)


P, Q = (np.exp(log_probs_by_hand(tiny_lm(V), [first])) for first in (0, 1))
DERIVED = {
    "tempered": (lambda first, second: first.tempered(0.5), P**2),
    "masked": (lambda first, second: first.masked(np.arange(V) < 3), P * (np.arange(V) < 3)),
    "top_k": (lambda first, second: first.top_k(1), P * (P == P.max())),
    "top_p": (lambda first, second: first.top_p(1e-9), P * (P == P.max())),
    "product": (product, P * Q),
    "mixture": (lambda first, second: mixture([first, second], [0.25, 0.75]), 0.25 * P + 0.75 * Q),
}


@pytest.mark.parametrize("name", DERIVED)
def test_derived_token_distributions_keep_their_vocabulary(name):
    make, expected = DERIVED[name]
    dist = make(dist_after("a"), dist_after("b"))
    assert isinstance(dist, TokenDistribution) and dist.support is tiny_lm(V).vocab
    assert_dist(dist, expected)
    assert dist.log_prob(EOS) == dist.log_prob(END)


def test_a_product_over_different_vocabularies_is_a_ValueError_that_shows_both():
    other = table_lm(lambda ids: [0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match=r"different values: Vocabulary\(6 tokens.*Vocabulary\(3 tokens"):
        product(dist_after("a"), dist_after("a", other))
    with pytest.raises(ValueError, match="different values"):
        mixture([dist_after("a"), Uniform(0, V - 1)], [0.5, 0.5])
    with pytest.raises(TypeError, match="finite support"):
        product(dist_after("a"), dist_after("a").string())


@pytest.mark.parametrize(
    ("text", "ids"), [("bc", [1, 2]), ("ab", [4]), ("", []), ("c ab b", [2, 3, 4, 3, 1]), (None, [0, 1])]
)
def test_the_log_prob_of_a_string_sums_those_of_its_tokens(text, ids):
    lm, string = tiny_lm(V), dist_after("a").string()
    truth = pytest.approx(log_prob_by_hand(lm, [0], ids), abs=1e-9)
    assert string.log_prob(ids) == string.log_prob(ids if text is None else text) == truth
    assert string.log_prob([lm.vocab[1], lm.vocab[END]]) == pytest.approx(log_prob_by_hand(lm, [0], [1, END]))


def test_a_string_can_be_scored_but_not_sampled():
    with pytest.raises(TypeError, match=r"string\(\) only scores"):
        dist_after("a").string().sample(np.random.default_rng(0))
    with pytest.raises(TypeError, match="no finite support"):
        dist_after("a").string().log_probs()
    with pytest.raises(ValueError, match="no tokens of this vocabulary spell"):
        dist_after("a").string().log_prob("z")


def test_several_prompts_of_a_step_cost_one_round():
    class Several(Model):
        def __init__(self, lm):
            super().__init__()
            self.contexts = [lm.context(prompt) for prompt in ("a", "ba", "cc", "b a")]

        def step(self):
            dists = [self.transformer(context) for context in self.contexts]
            token = self.sample(product(*dists))
            for dist in dists:
                self.observe(dist, token)

    lm = cold_lm(V)
    Several(lm).step()
    assert (lm.stats.rounds, lm.stats.rows) == (1, 4)


def test_a_distribution_runs_the_model_only_when_its_values_are_read():
    lm = cold_lm(V)
    dist = NextToken(lm.context("abc"))
    dist.tempered(0.5).masked(np.ones(V, bool))
    assert lm.stats.rounds == 0
    del dist
    NextToken(lm.context("b")).log_probs()
    assert (lm.stats.rounds, lm.stats.rows, lm.stats.tokens) == (1, 1, 1)
