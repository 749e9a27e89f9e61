"""Tests of enumerate_exact against sums by hand: loops over all sequences, plain forward passes of a torch model."""

import math
from itertools import product as cartesian
from time import process_time

import numpy as np
import pytest
from helpers.programs import ThreeCoins
from helpers.tiny import add_up, log_prob_by_hand, log_probs_by_hand, spelled, texts_of, tiny_lm

from llmppl import EOS, Bernoulli, Categorical, Delta, Geometric, Model, Uniform, enumerate_exact

V = 6
END, B = V - 1, 1


def posterior(particles, key=str) -> dict:
    """Return the summed, unnormalised weights of the particles of each key."""
    return add_up((key(particle), particle.log_weight) for particle in particles)


def assert_same(found: dict, truth: dict) -> None:
    assert found.keys() == truth.keys()
    for key, weight in truth.items():
        assert found[key] == pytest.approx(weight, rel=1e-9), key


def test_three_coins_that_must_all_show_heads_have_probability_p_cubed():
    particles = enumerate_exact(ThreeCoins())
    assert particles.texts == ["HHH"]
    assert particles.log_ml == pytest.approx(3 * math.log(0.3))
    assert [(death.step, death.count) for death in particles.deaths] == [(1, 1), (2, 1), (3, 1)]


def test_more_outcomes_than_are_run_together_all_come_out():
    class Number(Model):
        def step(self):
            self.s = str(self.sample(Uniform(0, 1_499)))
            self.finish()

    particles = enumerate_exact(Number())
    assert sorted(int(str(particle)) for particle in particles) == list(range(1_500))
    assert particles.log_ml == pytest.approx(0.0, abs=1e-9)


def test_an_enumeration_without_an_end_is_refused_within_seconds():
    class Digits(Model):
        def step(self):
            self.s += str(self.sample(Uniform(0, 999)))

    start = process_time()
    with pytest.raises(ValueError, match="an outcome at step 2: enumerate_exact meets more than 300,000 of them"):
        enumerate_exact(Digits())
    assert process_time() - start < 20
    assert len(enumerate_exact(Digits(), max_steps=1)) == 1000


class NoB(Model):
    """Program of at most three tokens after "a", without "b"."""

    def __init__(self, lm, masked):
        super().__init__()
        self.context, self.masked = lm.context("a"), masked

    def step(self):
        dist = self.transformer(self.context)
        mask = np.array(["b" not in str(token) for token in dist.support])
        token = self.sample(dist, proposal=dist.masked(mask) if self.masked else None)
        self.s += token
        self.condition("b" not in self.s)
        self.context += token
        if token == EOS or len(self.context) == 4:
            self.finish()


@pytest.mark.parametrize("masked", [False, True])
def test_a_constraint_gives_the_sum_over_its_texts_with_any_proposal(masked):
    lm = tiny_lm(V)
    truth = add_up((spelled(ids), log_prob_by_hand(lm, [0], ids)) for ids in texts_of(V, 3) if "b" not in spelled(ids))
    particles = enumerate_exact(NoB(lm, masked))
    assert particles.log_ml == pytest.approx(math.log(sum(truth.values())), abs=1e-9)
    assert_same(posterior(particles), truth)


class LocallyMasked(NoB):
    """Program of the same texts that draws every token from the masked distribution, which is another target."""

    def step(self):
        dist = self.transformer(self.context)
        token = self.sample(dist.masked(["b" not in str(token) for token in dist.support]))
        self.s += token
        self.context += token
        if token == EOS or len(self.context) == 4:
            self.finish()


def test_local_masking_multiplies_masked_distributions_and_has_Z_one():
    lm = tiny_lm(V)
    truth = {}
    for ids in texts_of(V, 3):
        if "b" not in spelled(ids):
            prob = 1.0
            for i, token in enumerate(ids):
                dist = np.exp(log_probs_by_hand(lm, [0, *ids[:i]]))
                prob *= dist[token] / sum(dist[j] for j in range(V) if "b" not in spelled([j]))
            truth[spelled(ids)] = truth.get(spelled(ids), 0.0) + prob
    particles = enumerate_exact(LocallyMasked(lm, True))
    assert particles.log_ml == pytest.approx(0.0, abs=1e-12)
    assert_same(posterior(particles), truth)


class Branches(Model):
    """Program in which a die leads to a coin, to nothing, or to another die, with different weights."""

    def step(self):
        self.die = self.sample(Uniform(1, 3), proposal=Categorical({1: 0.5, 2: 0.25, 3: 0.25}))
        if self.die == 1:
            self.more = self.sample(Bernoulli(0.2))
            self.score(-1.0 if self.more else 0.5)
        elif self.die == 2:
            self.more = None
        else:
            self.more = self.sample(Uniform(0, 2))
            self.observe(Bernoulli(0.1), self.more == 2)
        self.finish()


def test_branches_on_a_latent_variable_have_their_own_weights():
    third = 1 / 3
    truth = {
        (1, True): third * 0.2 * math.exp(-1.0),
        (1, False): third * 0.8 * math.exp(0.5),
        (2, None): third,
        (3, 0): third * third * 0.9,
        (3, 1): third * third * 0.9,
        (3, 2): third * third * 0.1,
    }
    particles = enumerate_exact(Branches())
    assert_same(posterior(particles, lambda particle: (particle.die, particle.more)), truth)
    assert len(particles) == 6


class Guided(Model):
    """Program of two coins with a twist after each, and a score. The second step takes the first twist back."""

    def step(self):
        heads = self.sample(Bernoulli(0.3))
        self.s += "H" if heads else "T"
        self.twist(2.0 if heads else -1.0)
        self.twist(0.5)
        self.score(-0.25)
        if len(self.s) == 3:
            self.finish()


def test_a_twist_changes_neither_Z_nor_the_posterior():
    truth = add_up(
        ("".join(coins), sum(math.log(0.3 if coin == "H" else 0.7) - 0.25 for coin in coins))
        for coins in cartesian("HT", repeat=3)
    )
    particles = enumerate_exact(Guided())
    assert_same(posterior(particles), truth)
    assert all(particle.log_twist == 0.0 for particle in particles)


@pytest.mark.parametrize("steps", [1, 2])
def test_max_steps_gives_the_Z_of_the_cut_program_without_its_twist(steps):
    particles = enumerate_exact(Guided(), max_steps=steps)
    assert len(particles) == 2**steps
    assert all(particle.cut and particle.finished for particle in particles)
    truth = add_up(
        ("".join(coins), sum(math.log(0.3 if coin == "H" else 0.7) - 0.25 for coin in coins))
        for coins in cartesian("HT", repeat=steps)
    )
    assert_same(posterior(particles), truth)


def test_max_steps_cuts_only_unfinished_particles():
    particles = enumerate_exact(NoB(tiny_lm(V), False), max_steps=2)
    pairs = []
    for ids in [(i,) for i in range(V)] + [ids for ids in cartesian(range(V), repeat=2) if ids[0] != END]:
        cut = END not in ids
        if (len(ids) == 2 or not cut) and "b" not in spelled(ids):
            pairs.append(((spelled(ids), cut), log_prob_by_hand(tiny_lm(V), [0], ids)))
    assert_same(posterior(particles, lambda particle: (str(particle), particle.cut)), add_up(pairs))


def test_two_derivations_of_one_text_are_two_particles():
    particles = enumerate_exact(NoB(tiny_lm(V), False))
    assert len(particles) == len({tuple(particle.context.tokens) for particle in particles})


class OneStep(Model):
    def __init__(self, do):
        super().__init__()
        self.do = do

    def step(self):
        self.value = self.do(self)
        self.finish()


def test_a_choice_without_finite_support_is_a_TypeError_that_names_it():
    with pytest.raises(TypeError, match=r"Geometric\(0.5\) has no finite support") as caught:
        enumerate_exact(OneStep(lambda self: self.sample(Geometric(0.5))))
    assert "in an outcome at step 1" in caught.value.__notes__


def test_a_distribution_without_finite_support_may_be_observed_and_proposed_for():
    observed = enumerate_exact(OneStep(lambda self: self.observe(Geometric(0.5), 2)))
    assert observed.log_ml == pytest.approx(math.log(0.125))
    proposed = enumerate_exact(OneStep(lambda self: self.sample(Geometric(0.5), proposal=Geometric(0.9, max_value=3))))
    assert_same(posterior(proposed, lambda particle: particle.value), {n: 0.5 ** (n + 1) for n in range(4)})


def test_drawing_from_the_stream_is_a_TypeError_with_a_remedy():
    with pytest.raises(TypeError, match=r"cannot enumerate self\.rng\.random\(\); draw with self\.sample\(dist\)"):
        enumerate_exact(OneStep(lambda self: self.rng.random()))


def test_impossible_values_are_not_tried_and_an_impossible_distribution_kills():
    particles = enumerate_exact(OneStep(lambda self: self.sample(Categorical([0.5, 0.0, 0.5]))))
    assert [particle.value for particle in particles] == [0, 2] and not particles.deaths
    particles = enumerate_exact(OneStep(lambda self: self.sample(Delta(1), proposal=Delta(2))))
    assert len(particles) == 0 and particles.log_ml == -math.inf
    particles = enumerate_exact(OneStep(lambda self: self.sample(Bernoulli(0.5).masked([False, False]))))
    assert len(particles) == 0 and "no value of positive probability" in particles.deaths[0].reason
