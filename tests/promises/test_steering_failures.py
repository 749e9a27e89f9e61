"""Ways in which steering goes wrong, each with a case whose exact answer is known.

Every test here is a mistake that is easy to make and hard to see: the run still ends, with text and weights.
"""

import math
from itertools import product as cartesian

import numpy as np
import pytest
from helpers.common import repetitions
from helpers.programs import ThreeCoins
from helpers.tiny import cold_lm, cold_lm_with_bos, log_probs_by_hand, tiny_lm

from llmppl import EOS, Bernoulli, Model, enumerate_exact, importance_sampling, smc_standard, smc_steer
from llmppl.inference.resampling import multinomial, optimal, residual, stratified, systematic, threshold
from llmppl.lm import NextToken

V = 6
ALGORITHMS = {
    "steer": lambda model, **options: smc_steer(model, 4, 2, expand="copies", **options),
    "standard": lambda model, **options: smc_standard(model, 4, **options),
    "importance": lambda model, **options: importance_sampling(model, 4, **options),
}
every_algorithm = pytest.mark.parametrize("run", ALGORITHMS.values(), ids=ALGORITHMS)


class SoftCoins(Model):
    """The same with weight 1 for heads and 0.1 for tails, so that Z = (0.3 + 0.7 * 0.1)^3 = 0.050653."""

    def step(self):
        heads = self.sample(Bernoulli(0.3))
        self.s += "H" if heads else "T"
        self.score(0.0 if heads else math.log(0.1))
        if len(self.s) == 3:
            self.finish()


class Dead(Model):
    """Nobody survives the second step."""

    def step(self):
        self.sample(Bernoulli(0.5))
        self.s += "x"
        self.condition(len(self.s) < 2)


def assert_mean(values, right: float) -> None:
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    assert abs(np.mean(values) - right) <= 4.5 * error, f"{np.mean(values):.5g} +- {error:.2g}, not {right:.5g}"
    assert error < 0.06 * right                         # else it would prove nothing


# ---- the threshold of the down-sampler


def test_the_threshold_of_weights_6_2_1_1_is_5_halves():
    log_c, certain = threshold(np.log([0.6, 0.2, 0.1, 0.1]), 2)
    c = math.exp(log_c)
    assert c == pytest.approx(2.5)                      # 2.0, if the weight at it is counted on the wrong side
    assert sum(min(c * w, 1.0) for w in (0.6, 0.2, 0.1, 0.1)) == pytest.approx(2.0)
    assert certain.tolist() == [True, False, False, False]


@every_algorithm
def test_Z_hat_of_soft_weights_is_not_biased(run):
    Z = 0.37**3
    assert Z == pytest.approx(0.050653) == math.exp(enumerate_exact(SoftCoins()).log_ml)
    Zs = [math.exp(run(SoftCoins(), seed=seed).log_ml) for seed in range(repetitions(10000, 800))]
    assert_mean(Zs, Z)                                  # 0.0681, with a threshold of 2.0


def test_every_text_of_the_soft_weights_has_its_share_of_Z():
    found = {"".join(coins): [] for coins in cartesian("HT", repeat=3)}
    for seed in range(repetitions(10000, 1000)):
        weights = dict.fromkeys(found, 0.0)
        for particle in smc_steer(SoftCoins(), 4, 2, expand="copies", seed=seed):
            weights[str(particle)] += math.exp(particle.log_weight)
        for text, weight in weights.items():
            found[text].append(weight)
    for text, values in found.items():
        right = 0.3 ** text.count("H") * 0.07 ** text.count("T")
        assert abs(np.mean(values) - right) <= 4.5 * np.std(values, ddof=1) / math.sqrt(len(values)), text


# ---- the dead


@every_algorithm
def test_no_dead_particle_ever_has_weight_and_there_are_at_most_N(run):
    seen = []

    def on_step(step):
        assert len(step.particles) <= 4
        assert len(step.candidate_log_weights) <= 8
        assert all(step.candidate_log_weights[i] > -math.inf for i in step.ancestors)
        seen.extend(str(particle) for particle in step.particles)

    for seed in range(300):
        posterior = run(ThreeCoins(), seed=seed, on_step=on_step)
        assert len(posterior) <= 4
        assert all(str(particle) == "HHH" for particle in posterior)
    assert set(seen) == {"H", "HH", "HHH"}


@every_algorithm
def test_Z_hat_of_three_coins_that_must_show_heads_is_p_cubed(run):
    Zs = [math.exp(run(ThreeCoins(), seed=seed).log_ml) for seed in range(repetitions(20000, 3000))]
    error = np.std(Zs, ddof=1) / math.sqrt(len(Zs))
    assert abs(np.mean(Zs) - 0.027) <= 4.5 * error      # 0.271, if the dead come back
    assert error < 0.006


@pytest.mark.parametrize("scheme", [multinomial, residual, stratified, systematic, optimal])
def test_no_scheme_revives_a_zero_weight(scheme):
    log_weights = np.array([-math.inf, 0.0, -math.inf, -1.0, -math.inf, -2.0, -math.inf])
    for seed in range(50):
        ancestors, new = scheme(np.random.default_rng(seed), log_weights, 2)
        assert set(ancestors) <= {1, 3, 5} and np.all(np.isfinite(new)) and len(ancestors) <= 2


def test_fewer_alive_than_N_are_kept_as_they_are():
    sizes = set()
    for seed in range(100):
        on_step = lambda step: sizes.add(len(step.particles))       # noqa: E731
        smc_steer(ThreeCoins(), 4, 2, expand="copies", seed=seed, on_step=on_step)
    assert sizes == {0, 1, 2, 3, 4}                     # neither 8, nor a population that comes back empty


@every_algorithm
def test_a_dead_run_has_Z_zero_and_not_NaN(run):
    posterior = run(Dead(), seed=0)
    assert posterior.log_ml == -math.inf and len(posterior) == 0 and posterior.ess == 0.0
    with pytest.raises(ValueError, match=r"all died by step 2: (\d) of \1: condition is false \(test_steering"):
        posterior.sample()


class Crossroads(Model):
    """On tails, the mask lets nothing through."""

    def __init__(self):
        super().__init__()
        self.context = tiny_lm(V).context("a")

    def step(self):
        heads = self.sample(Bernoulli(0.5))
        dist = self.transformer(self.context)
        self.s += self.sample(dist, proposal=dist.masked(np.full(V, heads)))
        self.finish()


@every_algorithm
def test_an_empty_mask_kills_only_its_own_particle(run):
    posteriors = [run(Crossroads(), seed=seed) for seed in range(20)]
    deaths = [death for posterior in posteriors for death in posterior.deaths]
    assert sum(map(len, posteriors)) > 20 and len(deaths) > 5
    for death in deaths:
        assert death.step == 1
        assert "has no value of positive probability (test_steering_failures.py, line" in death.reason
    assert math.exp(enumerate_exact(Crossroads()).log_ml) == pytest.approx(0.5)


# ---- distributions


@pytest.mark.parametrize("temperature", [0.5, 2.0, 0.1])
def test_a_tempered_distribution_is_a_distribution(temperature):
    lm = tiny_lm(V)
    p = np.exp(log_probs_by_hand(lm, [0, 1]))
    found = np.exp(NextToken(lm.context("a") + 1).tempered(temperature).log_probs())
    assert found.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(found, p ** (1 / temperature) / np.sum(p ** (1 / temperature)), rtol=1e-9)


def test_queries_change_nothing():
    lm = cold_lm(V)
    context = lm.context("ab c")
    dist = NextToken(context)
    dist.log_probs()
    before = len(context), context.tokens, context.text, len(lm.trie), dist.log_probs().copy()
    cost = lm.stats.rows, lm.stats.tokens, lm.stats.rounds
    for _ in range(3):
        for value in [*lm.vocab, EOS]:
            dist.log_prob(value)
            dist.masked(np.ones(V, bool)).log_prob(value)
            dist.tempered(0.5).log_prob(value)
        dist.string().log_prob([])
        dist.sample(np.random.default_rng(0))
    after = len(context), context.tokens, context.text, len(lm.trie), dist.log_probs().copy()
    assert before[:4] == after[:4]
    np.testing.assert_array_equal(before[4], after[4])
    assert cost == (lm.stats.rows, lm.stats.tokens, lm.stats.rounds)


def test_the_probability_of_a_string_does_not_move_the_context():
    lm = cold_lm(V)
    context = lm.context("a")
    first = NextToken(context).string().log_prob("bc")
    assert context.text == "a" and len(context) == 1
    assert NextToken(context).string().log_prob("bc") == first
    np.testing.assert_allclose(NextToken(context).log_probs(), log_probs_by_hand(lm, [0]), atol=1e-6)


def test_queries_inside_a_program_move_neither_text_nor_context():
    class Asks(Model):
        def __init__(self):
            super().__init__()
            self.context = tiny_lm(V).context("a")

        def step(self):
            dist = self.transformer(self.context)
            for token in dist.support:
                dist.log_prob(token)
            assert self.s == "" and self.context.text == "a" and self.log_weight == 0.0
            self.finish()

    model = Asks()
    model.step()
    assert model.finished and model.log_weight == 0.0


# ---- the cache


def test_two_prompts_with_the_same_continuation_keep_their_own_distributions():
    lm = cold_lm(V)
    prompts = {"ca": [2, 0], "ba": [1, 0], "a": [0]}
    contexts = {text: lm.context(text) for text in prompts}
    for more in ([], [1], [1, 2], [1, 2, 3]):
        dists = {}
        for text, ids in prompts.items():
            context = contexts[text]
            for token in more:
                context = context + token
            dists[text] = NextToken(context).log_probs()
            np.testing.assert_allclose(dists[text], log_probs_by_hand(lm, [*ids, *more]), atol=1e-6)
        assert np.abs(dists["ca"] - dists["ba"]).max() > 1e-3 and np.abs(dists["ca"] - dists["a"]).max() > 1e-3


def test_a_second_prompt_that_shares_BOS_keeps_the_first():
    lm = cold_lm_with_bos(V)
    first, second = lm.context("abc"), lm.context("cb")
    assert first.tokens[0] == second.tokens[0] == V     # BOS
    start = lm.stats.tokens
    dist = NextToken(first).log_probs()
    assert lm.stats.tokens - start == len(first)
    NextToken(second).log_probs()
    assert lm.stats.tokens - start == len(first) + len(second) - 1          # BOS is not run again
    np.testing.assert_array_equal(NextToken(lm.context("abc")).log_probs(), dist)
    assert lm.stats.tokens - start == len(first) + len(second) - 1          # nor is anything of the first
    NextToken(first + 2).log_probs()
    assert lm.stats.tokens - start == len(first) + len(second)              # and it can be continued by one token
    np.testing.assert_allclose(dist, log_probs_by_hand(lm, first.tokens), atol=1e-6)
