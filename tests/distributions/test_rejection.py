"""Adaptive weighted rejection sampling: its mean weights over all orders of draws, its tests of values, its errors."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from helpers.common import repetitions
from helpers.tiny import table_lm, tiny_lm
from hypothesis import example, given
from hypothesis import strategies as st

from llmppl import EOS, Bernoulli, Categorical, Model, Uniform, enumerate_exact, importance_sampling, smc_steer
from llmppl.distributions import ArrayTable, Finite, Impossible, Proposal
from llmppl.distributions.rejection import weighted_rejection
from llmppl.lm import NextToken


class Scripted:
    """Stream whose uniforms make draws without replacement come in a given order."""

    def __init__(self, weights, order) -> None:
        self.left, self.order = [float(w) for w in weights], list(order)
        self.drawn: list[int] = []

    def random(self) -> float:
        place = self.order[len(self.drawn)]
        u = (sum(self.left[:place]) + self.left[place] / 2) / sum(self.left)
        self.left[place] = 0.0
        self.drawn.append(place)
        return u


def rejection(rng, weights, accepts):
    """Call `weighted_rejection` with (n,) weights, and return a weight instead of its log."""
    with np.errstate(divide="ignore"):
        found = weighted_rejection(rng, ArrayTable(np.log(weights)), accepts)
    return found and (found[0], math.exp(found[1]))


def outcomes(weights, accepted):
    """Yield (probability, place or None, w, drawn indices) of every run. The probabilities are exact and sum to 1."""
    possible = [place for place, weight in enumerate(weights) if weight]
    seen = set()
    for order in itertools.permutations(possible):
        rng = Scripted(weights, order)
        found = rejection(rng, np.array(weights, dtype=float), lambda place: accepted[place])
        drawn = tuple(rng.drawn)
        if drawn not in seen:
            seen.add(drawn)
            probability, left = Fraction(1), Fraction(sum(weights))
            for place in drawn:
                probability *= weights[place] / left
                left -= weights[place]
            yield probability, *(found or (None, 0.0)), drawn


def moments(weights, accepted):
    """Return E[w 1(x = i)] and E[1(x = i)] for each place i, E[w^2], and the probability that nothing is found."""
    mean, dist, square, none = np.zeros(len(weights)), np.zeros(len(weights)), 0.0, 0.0
    total = Fraction(0)
    for probability, place, w, _ in outcomes(weights, accepted):
        total += probability
        square += float(probability) * w**2
        if place is None:
            none += float(probability)
        else:
            mean[place] += float(probability) * w
            dist[place] += float(probability)
    assert total == 1
    return mean, dist, square, none


dists = st.lists(st.tuples(st.sampled_from([0, 1, 2, 5, 40, 1000, 10**9]), st.booleans()), min_size=1, max_size=5)


@given(dists)
@example([(3, True)])
@example([(1, True)] * 6)
@example([(2, False)] * 4)
@example([(0, True), (1, False)])
@example([(1, True), (10**9, False), (10**9, False), (1, True), (5, False), (5, True)])
def test_the_mean_weight_of_each_accepted_value_is_its_own(pairs):
    """Check ties, zeros, and an accepted set that is rare, empty or everything. The means are exact."""
    weights, accepted = [Fraction(w) for w, _ in pairs], [a for _, a in pairs]
    mu = np.array([float(w) * a for w, a in pairs])
    if not any(weights):
        assert rejection(np.random.default_rng(0), np.zeros(len(weights)), accepted.__getitem__) is None
        return
    mean, dist, square, none = moments(weights, accepted)
    np.testing.assert_allclose(mean, mu, rtol=1e-10)
    if mu.any():
        np.testing.assert_allclose(dist, mu / mu.sum(), rtol=1e-10)              # x is exactly p given A
        assert none == 0.0
    else:
        assert none == pytest.approx(1.0)


@given(dists)
def test_the_variance_is_bounded_as_documented(pairs):
    weights, accepted = [Fraction(w) for w, _ in pairs], [a for _, a in pairs]
    mass = float(sum(w for w, a in pairs if a))
    if not mass:
        return
    _, _, square, _ = moments(weights, accepted)
    bound = 0.0
    for probability, place, _, drawn in outcomes(weights, accepted):
        n = drawn.index(place)
        rejected = float(sum(w for i, (w, a) in enumerate(pairs) if not a and i not in drawn[:n]))
        bound += float(probability) * (mass - pairs[place][0]) * rejected / (n + 2)
    assert square - mass**2 <= bound + 1e-9 * mass**2


@given(dists, st.integers(0, 2**32))
def test_it_tests_each_value_once_and_at_most_2n_plus_3_values(pairs, seed):
    tested = []

    def accepts(place):
        tested.append(place)
        return pairs[place][1]

    weights = np.array([w for w, _ in pairs], dtype=float)
    found = rejection(np.random.default_rng(seed), weights, accepts)
    assert len(set(tested)) == len(tested) and all(weights[tested] > 0)
    if found is None:
        assert len(tested) == np.count_nonzero(weights)
    else:
        place, w = found
        assert pairs[place][1] and weights[place] * (1 - 1e-12) <= w <= weights.sum() * (1 + 1e-12)
        assert len(tested) <= 2 * tested.index(place) + 3


def test_with_small_values_the_variance_agrees_with_the_formula():
    a, V, runs = 0.4, 20_000, repetitions(4000, 800)
    weights, rng = np.full(V, 1 / V), np.random.default_rng(1)
    ws, num_tests = [], []
    for _ in range(runs):
        tested = []
        _, w = rejection(rng, weights, lambda place, tested=tested: tested.append(place) or place < a * V)
        ws.append(w / a)
        num_tests.append(len(tested))
    squares = (np.array(ws) - 1.0) ** 2
    assert abs(np.mean(ws) - 1.0) < 4.5 * np.std(ws) / math.sqrt(runs)
    assert abs(squares.mean() - (-math.log(a) / (1 - a) - 1)) < 4.5 * squares.std() / math.sqrt(runs)
    assert abs(np.mean(num_tests) - (2 / a + 1)) < 4.5 * np.std(num_tests) / math.sqrt(runs)


def test_it_draws_from_all_blocks_of_a_large_support_in_proportion():
    V, runs = 2000, repetitions(6000, 1500)
    weights, thirds = np.random.default_rng(0).gamma(0.3, size=V), np.arange(V) // 667
    accepted, rng = np.random.default_rng(1).random(V) < 0.5, np.random.default_rng(2)
    places, w = np.array([rejection(rng, weights, lambda place: bool(accepted[place])) for _ in range(runs)]).T
    found = w[:, None] * (thirds[places.astype(int)][:, None] == np.arange(3))
    truth = np.bincount(thirds, weights * accepted)
    assert (np.abs(found.mean(axis=0) - truth) < 4.5 * found.std(axis=0) / math.sqrt(runs)).all()


def test_a_tiny_accepted_mass_keeps_its_precision():
    weights = np.array([1.0, 1e-30, 2e-30, 3e-200])
    place, w = rejection(np.random.default_rng(0), weights, lambda place: place > 0)
    assert place > 0 and w == pytest.approx(3e-30, rel=1e-12)


# ---- where


def even(value) -> bool:
    return value % 2 == 0


def test_where_keeps_the_unnormalised_measure_of_accepted_values():
    proposal = Categorical([0.5, 0.2, 0.3, 0.0]).where(even)
    np.testing.assert_allclose(np.exp(proposal.log_measures()), [0.5, 0.0, 0.3, 0.0])
    assert [math.exp(proposal.log_measure(value)) for value in (0, 1, 2)] == pytest.approx([0.5, 0.0, 0.3])
    assert proposal.log_measure(3) == proposal.log_measure("no such value") == -math.inf
    assert repr(proposal).endswith(".where(even)")


def test_where_draws_with_unbiased_weights():
    proposal, rng, runs = Uniform(0, 9).where(lambda value: value in (2, 3, 5, 7)), np.random.default_rng(0), 3000
    values, log_w = np.array([proposal.propose(rng) for _ in range(runs)]).T
    found = np.exp(log_w)[:, None] * (values[:, None] == np.arange(10))
    truth = 0.1 * np.isin(np.arange(10), (2, 3, 5, 7))
    assert (np.abs(found.mean(axis=0) - truth) <= 4.5 * found.std(axis=0) / math.sqrt(runs)).all()


def test_the_predicate_runs_once_per_value_of_positive_probability():
    asked, dist = [], Categorical([0.25, 0.0, 0.25, 0.5])
    proposal = dist.where(lambda value: asked.append(value) or value == 3)
    assert proposal.calls == 0
    drawn = [proposal.propose(np.random.default_rng(seed))[0] for seed in range(20)]
    proposal.log_measures()
    assert sorted(asked) == [0, 2, 3] and proposal.calls == 3 and drawn == [3] * 20


def test_the_predicate_of_a_token_distribution_receives_tokens():
    dist = NextToken(tiny_lm().context("a"))
    proposal = dist.where(lambda token: token == EOS or token.bytes == b"c")
    assert proposal.log_measure(EOS) == pytest.approx(dist.log_prob(EOS))
    assert proposal.log_measure(2) == dist.log_prob(2) and proposal.log_measure(0) == -math.inf
    assert all(proposal.propose(np.random.default_rng(seed))[0] in (2, 5) for seed in range(10))


def test_where_reports_that_no_value_satisfies_the_predicate():
    with pytest.raises(Impossible, match=r"no value of Uniform\(0, 4\) satisfies the predicate"):
        Uniform(0, 4).where(lambda value: False).propose(np.random.default_rng(0))
    with pytest.raises(Impossible, match=r"has positive probability"):
        Bernoulli(0.5).masked([False, False]).where(bool).propose(np.random.default_rng(0))


@pytest.mark.parametrize("answer", [np.array([True]), 1, None, "yes", np.ones(2, dtype=bool)])
def test_a_predicate_must_return_a_bool(answer):
    with pytest.raises(TypeError, match=r"where: predicate <lambda> returned .* for [01]; it must return True or"):
        Uniform(0, 1).where(lambda value: answer).propose(np.random.default_rng(0))


def test_a_mask_in_place_of_a_predicate_is_a_TypeError_naming_masked():
    assert Uniform(0, 1).where(lambda value: np.bool_(value == 1)).propose(np.random.default_rng(0))[0] == 1
    with pytest.raises(TypeError, match=r"where\(\) wants a predicate.*masked\(\) takes a mask"):
        Uniform(0, 1).where(np.array([True, False]))


# ---- in a program


class Once(Model):
    """Program of one draw, by the given function."""

    def __init__(self, do) -> None:
        super().__init__()
        self.do = do

    def step(self) -> None:
        self.value = self.do(self)
        self.finish()


DIST = Categorical([0.4, 0.3, 0.2, 0.1])
OTHER = Categorical([0.1, 0.2, 0.3, 0.4])
PROGRAMS = {
    "alone": (lambda self: self.sample(DIST.where(even)), {0: 0.4, 2: 0.2}),
    "its own distribution": (lambda self: self.sample(DIST, proposal=DIST.where(even)), {0: 0.4, 2: 0.2}),
    "another distribution": (lambda self: self.sample(DIST, proposal=OTHER.where(even)), {0: 0.4, 2: 0.2}),
    "a mask": (lambda self: self.sample(DIST, DIST.masked([True, True, True, False]).where(lambda i: i > 0)),
               {1: 0.3, 2: 0.2}),
    "a target that is a measure": (lambda self: self.sample(DIST.where(even), proposal=OTHER), {0: 0.4, 2: 0.2}),
}  # fmt: skip


def test_observe_weighs_like_a_proposal_of_that_value():
    model = Once(lambda self: self.observe(DIST.where(even), 2))
    model.step()
    assert model.log_weight == pytest.approx(math.log(0.2))
    model = Once(lambda self: self.observe(DIST.where(even), 1))
    model.step()
    assert model.log_weight == -math.inf


@pytest.mark.parametrize("name", PROGRAMS)
def test_enumerate_exact_sums_over_the_measure(name):
    do, truth = PROGRAMS[name]
    particles = enumerate_exact(Once(do))
    found = {particle.value: math.exp(particle.log_weight) for particle in particles}
    assert found == pytest.approx(truth) and particles.log_ml == pytest.approx(math.log(sum(truth.values())))


def weight_of(do, rng):
    """Return the (4,) weights of one step: that of the drawn value at its place."""
    model = Once(do)
    model.rng = rng
    model.step()
    return np.exp(model.log_weight) * (np.arange(4) == getattr(model, "value", None))


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_mean_weights_of_a_step_agree_with_the_target(name):
    (do, truth), runs = PROGRAMS[name], repetitions(8000, 1500)
    found = np.array([weight_of(do, rng) for rng in np.random.default_rng(7).spawn(runs)])
    right = np.array([*map(truth.get, range(4), [0.0] * 4)])
    assert (np.abs(found.mean(axis=0) - right) <= 4.5 * found.std(axis=0) / math.sqrt(runs) + 1e-12).all()


@pytest.mark.parametrize("expand", ["copies", "merged", "distinct"])
def test_a_particle_without_an_accepted_value_dies_with_a_clear_reason(expand):
    model = Once(lambda self: self.sample(DIST, proposal=DIST.where(lambda value: False)))
    posterior = smc_steer(model, N=2, K=2, seed=0, expand=expand)
    assert len(posterior) == len(enumerate_exact(model)) == 0
    assert "satisfies the predicate (test_rejection.py, line" in posterior.deaths[0].reason


class Own(Proposal):
    """Proposal with a given result."""

    support = (0, 1)

    def __init__(self, log_w, log_mu=0.0) -> None:
        self.log_w, self.log_mu = log_w, log_mu

    def propose(self, rng):
        return int(rng.integers(2)), self.log_w

    def log_measure(self, value):
        return self.log_mu


def test_a_custom_proposal_takes_two_methods():
    model = Once(lambda self: self.sample(Bernoulli(0.5), proposal=Own(math.log(3.0), math.log(1.5))))
    assert [p.log_weight for p in importance_sampling(model, 4, seed=0)] == pytest.approx([0.0 - math.log(4)] * 4)
    assert enumerate_exact(model).log_ml == pytest.approx(0.0)
    assert enumerate_exact(Once(lambda self: self.sample(Own(math.log(6.0), math.log(3.0))))).log_ml == math.log(6.0)


@pytest.mark.parametrize(
    "do, error, message",
    [
        (lambda self: self.sample(DIST, proposal=0.5), TypeError, "sample wants a Distribution or another Proposal"),
        (lambda self: self.sample([0.5, 0.5]), TypeError, r"Distribution or another Proposal, not \[0.5, 0.5\]"),
        (lambda self: self.sample(Bernoulli(0.5), Own(math.nan)), ValueError, "with the log weight nan"),
        (lambda self: self.sample(Bernoulli(0.5), Own(math.inf)), ValueError, "with the log weight inf"),
        (lambda self: self.sample(Bernoulli(0.5), Own(0.0, -math.inf)), ValueError, "where its log_measure is -inf"),
    ],
)
def test_a_proposal_that_breaks_the_contract_is_an_error_with_a_remedy(do, error, message):
    with pytest.raises(error, match=message):
        Once(do).step()


def test_a_proposal_without_the_methods_cannot_be_made():
    class Half(Proposal):
        def propose(self, rng):
            return 0, 0.0

    with pytest.raises(TypeError, match="log_measure"):
        Half()


def test_a_weight_of_zero_kills_the_particle():
    model = Once(lambda self: self.sample(Bernoulli(0.5), Own(-math.inf)))
    model.step()
    assert model.log_weight == -math.inf and "with weight 0 (test_rejection.py" in model.death


def test_a_predicate_may_query_the_language_model():
    lm = table_lm(lambda ids: [0.0, 1.0, -1.0 + len(ids)])

    class Ahead(Model):
        """Program of a token after which EOS is likely enough."""

        def step(self):
            context = lm.context("a")
            dist = self.transformer(context)

            def fits(token):
                return token != EOS and self.transformer(context + token).log_prob(EOS) > -1

            self.sample(dist, dist.where(fits))
            self.finish()

    posterior = importance_sampling(Ahead(), 3, seed=0)
    dist = NextToken(lm.context("a"))
    assert len(posterior) == 3
    assert enumerate_exact(Ahead()).log_ml == pytest.approx(np.logaddexp(dist.log_prob(0), dist.log_prob(1)))


def test_where_of_a_single_value_returns_it_with_its_probability():
    value, log_w = Finite(("only",), [0.0]).where(lambda value: True).propose(np.random.default_rng(0))
    assert value == "only" and log_w == 0.0


@pytest.mark.parametrize("gap", [-600.0, -691.0, -2000.0])
def test_accepted_values_far_below_the_rejected_ones_keep_their_weight(gap):
    dist = Finite("abcd", [0.0, -1.0, gap, gap - math.log(3)])  # b and what is e^gap times as likely

    class Rare(Model):
        def step(self):
            self.s = self.sample(dist.where(lambda value: value in "cd"))
            self.finish()

    log_z = gap + math.log(4 / 3) - np.logaddexp(0.0, -1.0)  # by hand
    assert enumerate_exact(Rare()).log_ml == pytest.approx(log_z)
    runs = [smc_steer(Rare(), 1, 1, seed=seed, progress=False) for seed in range(400)]
    weights = np.array([math.exp(run.log_ml - log_z) for run in runs])
    assert abs(weights.mean() - 1.0) <= 4.5 * max(weights.std(), 1e-9) / 20
    share = np.mean([str(run.best) == "c" for run in runs])  # 3/4
    assert abs(share - 0.75) <= 4.5 * math.sqrt(0.75 * 0.25 / 400)
    with pytest.raises(Impossible, match=r"satisfies the predicate"):
        dist.where(lambda value: False).propose(np.random.default_rng(0))


def test_a_rare_value_with_a_known_measure_can_still_be_drawn():
    where = Finite("ab", [0.0, -900.0]).where(lambda value: value == "b")
    assert where.log_measure("b") == pytest.approx(-900.0)
    assert where.propose(np.random.default_rng(0)) == ("b", pytest.approx(-900.0))
