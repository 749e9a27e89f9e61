"""Tests of the three expansions: number and kind of candidates, and the cases that fall back to copies.

tests/promises/test_exactness.py shows on all its programs that they are unbiased.
"""

import math

import numpy as np
import pytest
from helpers.common import repetitions

from llmppl import Bernoulli, Categorical, Geometric, Model, enumerate_exact, smc_steer
from llmppl.distributions import Uniform
from llmppl.inference import SMC, Copies, DownSample


class Letters(Model):
    """Program of two weighed draws of one of eight values."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def step(self):
        value = self.sample(Uniform(0, 7))
        self.drawn.append(value)
        self.score(-0.3 * value)
        if len(self.drawn) == 2:
            self.finish()


def candidates(model, N, K, expand, **options):
    """Return the steps of a run, with the candidates before selection."""
    steps = []
    smc_steer(model, N, K, expand=expand, seed=0, on_step=steps.append, progress=False, **options)
    return steps


def test_distinct_tries_different_first_choices_and_at_most_N_times_K():
    seen = []

    class Watched(Letters):
        def step(self):
            super().step()
            seen.append(tuple(self.drawn))

    first, second = candidates(Watched(), 3, 2, "distinct")
    assert len(first.candidate_log_weights) == 6 and len(second.candidate_log_weights) == 6
    one, two = seen[:6], seen[6:]
    assert len(set(one)) == 6 and len(set(two)) == 6 and all(len(path) == 2 for path in two)


def test_merged_joins_copies_with_equal_choices_and_adds_their_weights():
    class Coin(Model):
        def step(self):
            self.s += "ab"[self.sample(Bernoulli(0.5))]
            self.finish()

    (step,) = candidates(Coin(), 1, 16, "merged")
    assert len(step.candidate_log_weights) == 2
    weights = np.exp(step.candidate_log_weights)
    assert weights.sum() == pytest.approx(1.0)
    assert sorted(weights * 16) == pytest.approx(np.round(sorted(weights * 16)))
    (letter,) = candidates(Coin(), 1, 16, "copies")
    assert len(letter.candidate_log_weights) == 16


@pytest.mark.parametrize("when", ["before", "after"])
def test_draws_outside_sample_keep_copies_apart(when):
    class Own(Model):
        def step(self):
            if when == "before":
                self.s += str(self.rng.integers(2))
            self.sample(Bernoulli(1.0))
            if when == "after":
                self.s += str(self.rng.integers(2))
            self.finish()

    for expand in ("merged", "distinct"):
        (step,) = candidates(Own(), 1, 8, expand)
        assert len(step.candidate_log_weights) == 8


def test_a_first_choice_without_finite_support_is_copied():
    class Endless(Model):
        def step(self):
            self.sample(Geometric(0.5))
            if self.sample(Bernoulli(0.5)):
                self.finish()

    seen = []

    class Watched(Endless):
        def step(self):
            super().step()
            seen.append(self)

    first, *_ = candidates(Watched(), 4, 3, "distinct", max_steps=1)
    assert len(seen) == 12 and np.exp(first.candidate_log_weights).sum() == pytest.approx(1.0)


def test_few_first_choices_are_run_again_if_the_step_chooses_on():
    steps = []

    class Pair(Model):
        again = 1

        def step(self):
            choices = [self.sample(Bernoulli(0.25)), *(self.sample(Uniform(0, 10**6)) for _ in range(self.again))]
            steps.append(choices)
            self.finish()

    (step,) = candidates(Pair(), 4, 3, "distinct")
    assert len(step.candidate_log_weights) == len(steps) == 11      # 1 + floor(10 x 0.75), 1 + floor(10 x 0.25)
    weights = {first: np.exp(step.candidate_log_weights)[[c[0] == first for c in steps]] for first in (False, True)}
    assert {first: len(w) for first, w in weights.items()} == {False: 8, True: 3}
    assert weights[False] == pytest.approx(0.75 / 8) and weights[True] == pytest.approx(0.25 / 3)

    Pair.again = 0
    (step,) = candidates(Pair(), 4, 3, "distinct")
    assert len(step.candidate_log_weights) == 2 and len(steps) == 13              # one choice tells all there is


def test_a_step_without_a_choice_runs_once():
    class Idle(Model):
        steps = 0

        def step(self):
            self.score(-1.0)
            self.steps += 1
            if self.steps == 2:
                self.finish()

    first, second = candidates(Idle(), 4, 3, "distinct")
    assert len(first.candidate_log_weights) == len(second.candidate_log_weights) == 1
    assert second.candidate_log_weights[0] == pytest.approx(-2.0)

    class Dies(Model):
        def step(self):
            self.condition(False)

    assert len(smc_steer(Dies(), 4, 2, expand="distinct")) == 0

    class Empty(Model):
        def step(self):
            self.sample(Categorical([0.5, 0.5]).masked(np.array([False, False])))

    dead = smc_steer(Empty(), 4, 2, expand="distinct")
    assert len(dead) == 0 and "no value of positive probability" in dead.deaths[0].reason


def test_a_twist_is_taken_back_before_candidates_are_chosen():
    class Twisted(Letters):
        def step(self):
            super().step()
            if not self.finished:
                self.twist(0.5 * self.drawn[0])

    exact = enumerate_exact(Letters()).log_ml
    runs = repetitions(4000, 120)
    for expand in ("merged", "distinct"):
        Z = [math.exp(smc_steer(Twisted(), 3, 2, expand=expand, seed=i).log_ml - exact) for i in range(runs)]
        assert abs(np.mean(Z) - 1.0) <= 4.5 * np.std(Z) / math.sqrt(runs)


def test_distinct_varies_less_than_copies_do():
    runs, spread = repetitions(1500, 200), {}
    for expand in ("copies", "distinct"):          # standard deviations of 0.27 and 0.17, known to 1/sqrt(2 runs)
        spread[expand] = np.std([smc_steer(Letters(), 4, 3, expand=expand, seed=i).log_ml for i in range(runs)])
    assert spread["distinct"] < 0.8 * spread["copies"]


def test_children_of_equal_weight_are_chosen_for_each_parent_apart():
    class Heads(Model):
        def step(self):
            self.s += "TH"[self.sample(Bernoulli(0.5))]
            if len(self.s) == 8:
                self.condition(self.s.count("H") >= 6)
                self.finish()

    runs, truth = repetitions(2000, 60), (28 + 8 + 1) / 2**8
    Z = [math.exp(smc_steer(Heads(), 8, 2, seed=i).log_ml) / truth for i in range(runs)]
    assert abs(np.mean(Z) - 1.0) <= 4.5 * np.std(Z) / math.sqrt(runs)
    assert np.std(Z) < 0.8                          # 0.55, or 1.1 if the same child of all parents is kept


def test_an_unknown_expansion_is_named():
    with pytest.raises(ValueError, match="expand must be one of 'distinct', 'merged', 'copies'"):
        smc_steer(Letters(), 2, 2, expand="both")


@pytest.mark.parametrize("first", ["finite", "endless", "rng"])
@pytest.mark.parametrize("expand", ["copies", "merged", "distinct"])
def test_every_candidate_draws_from_its_own_stream(expand, first):
    class Draws(Model):
        def __init__(self):
            super().__init__()
            self.drawn = []

        def step(self):
            if first == "rng":
                self.rng.random()
            self.sample(Geometric(0.5) if first == "endless" else Bernoulli(0.5))
            self.drawn.append(self.sample(Uniform(0, 10**6)))
            if len(self.drawn) == 3:
                self.finish()

    for step in candidates(Draws(), 4, 3, expand):
        assert len({id(candidate.rng) for candidate in step.candidates}) == len(step.candidates) > 4
        assert len({candidate.drawn[-1] for candidate in step.candidates}) == len(step.candidates)


def test_a_particle_keeps_its_stream_over_a_step_without_a_choice():
    class Pauses(Model):
        def step(self):
            if self.s:
                self.s += "HT"[self.sample(Bernoulli(0.5))]
                self.finish()
            else:
                self.s += "-"

    posterior = smc_steer(Pauses(), 4, 3, seed=0, progress=False)
    assert sorted(map(str, posterior)) == ["-H", "-T"] and posterior.log_ml == pytest.approx(0.0)
    (paused,) = smc_steer(Pauses(), 4, 3, seed=0, max_steps=1, progress=False)
    assert isinstance(paused.rng, np.random.Generator)


def test_candidates_are_grouped_by_parent_and_first_by_root():
    first, second = SMC(Letters(), Copies(2, 3), DownSample(2), seed=0)
    assert first.groups.tolist() == [0] * 6 and first.parents.tolist() == [0, 0, 0, 1, 1, 1]
    assert second.groups.tolist() == second.parents.tolist() == [0, 0, 0, 1, 1, 1]


def test_merged_candidates_start_with_the_weight_of_all_copies():
    class Coin(Model):
        def step(self):
            self.score(-3.0 if self.sample(Bernoulli(0.5)) else -1.0)
            self.finish()

    (step,) = SMC(Coin(), Copies(1, 16, merge=True), DownSample(16), seed=0)
    assert len(step.candidates) == 2 and step.copies.sum() == 16
    assert np.exp(step.log_starts) == pytest.approx(step.copies / 16)
