"""Tests of beam_search against sorted outcomes of enumerate_exact, and against searches written by hand."""

import math

import numpy as np
import pytest
from helpers.tiny import tiny_lm
from hypothesis import given, settings
from hypothesis import strategies as st

from llmppl import EOS, Bernoulli, Categorical, Geometric, Infilling, Model, beam_search, enumerate_exact, product
from llmppl.distributions import Uniform

V = 5


class Text(Model):
    """Program of at most three tokens after "a", without "b", weighed by `other`, with or without a proposal."""

    def __init__(self, lm, proposal=False):
        super().__init__()
        self.contexts, self.proposal = [lm.context("a"), lm.context("c")], proposal

    def step(self):
        dist, other = [self.transformer(context) for context in self.contexts]
        token = self.sample(dist, proposal=product(dist, other) if self.proposal else None)
        self.observe(other, token)
        self.s += token
        self.condition("b" not in self.s)
        self.contexts = [context + token for context in self.contexts]
        if token == EOS or len(self.contexts[0]) == 4:
            self.finish()


class Table(Model):
    """Program of a step of two choices and a step of one, with weights in between, all given by tables."""

    def __init__(self, tables):
        super().__init__()
        self.tables, self.path = tables, ()

    def choose(self):
        self.path += (self.sample(Categorical(self.tables[len(self.path)])),)
        self.score(math.sin(sum((i + 1) * value for i, value in enumerate(self.path))))

    def step(self):
        self.choose()
        if len(self.path) == 1:
            self.choose()
        else:
            self.finish()


def shown(runs):
    return [(str(run), run.log_weight) for run in runs]


def exact(model, **options):
    """Return the true outcomes, the best first."""
    return sorted(enumerate_exact(model, **options), key=lambda particle: -particle.log_weight)


@pytest.mark.parametrize("proposal", [False, True])
def test_a_wide_beam_finds_every_outcome_in_order_of_weight(proposal):
    model = Text(tiny_lm(V), proposal)
    truth, beams = exact(model), beam_search(model, 200, V)
    assert [str(beam) for beam in beams] == [str(particle) for particle in truth]
    assert [beam.log_joint for beam in beams] == pytest.approx([particle.log_weight for particle in truth])


def probabilities(number):
    """Return tables whose entries are all different."""
    return st.permutations(range(1, number + 1)).map(lambda order: (np.array(order) / sum(order)).tolist())


@settings(max_examples=15, deadline=None)
@given(st.lists(probabilities(4), min_size=3, max_size=3), st.integers(1, 6), st.integers(1, 4))
def test_a_beam_keeps_the_K_likeliest_choices_of_the_N_best(tables, N, K):
    runs = [((), 0.0)]
    for table in tables:
        runs = [
            (path + (i,), log_w + math.log(table[i]) + math.sin(sum((n + 1) * v for n, v in enumerate(path + (i,)))))
            for path, log_w in runs
            for i in np.argsort(-np.array(table))[:K].tolist()
        ]
        runs = sorted(runs, key=lambda run: -run[1])[:N]
    beams = beam_search(Table(tables), N, K)
    assert [beam.particle.path for beam in beams] == [path for path, _ in runs]
    assert [beam.log_joint for beam in beams] == pytest.approx([log_w for _, log_w in runs])


def test_one_run_and_one_choice_is_greedy_decoding():
    lm = tiny_lm(V)

    class Plain(Model):
        def __init__(self):
            super().__init__()
            self.context = lm.context("a")

        def step(self):
            token = self.sample(self.transformer(self.context))
            self.context += token
            self.s += token
            if token == EOS:
                self.finish()

    (beam,) = beam_search(Plain(), 1, 1, max_steps=5)
    context, log_joint = lm.context("a"), 0.0
    for _ in range(len(beam.particle.context) - 1):
        log_probs = context.log_probs()
        log_joint += log_probs.max()
        context += int(log_probs.argmax())
    assert beam.particle.context.tokens == context.tokens
    assert beam.log_joint == pytest.approx(log_joint)


def test_a_finished_run_keeps_its_place_until_better_ones_take_it():
    class Short(Model):
        """Program that ends at once with probability 0.4, else after three sure steps; the last scores `gain`."""

        def __init__(self, gain):
            super().__init__()
            self.gain = gain

        def step(self):
            if not self.s and self.sample(Bernoulli(0.4)):
                self.s = "short"
                return self.finish()
            self.s += "-"
            if len(self.s) == 3:
                self.score(self.gain)
                self.finish()

    assert [str(beam) for beam in beam_search(Short(-1.0), 2, 2)] == ["short", "---"]
    assert [str(beam) for beam in beam_search(Short(1.0), 2, 2)] == ["---", "short"]
    assert [str(beam) for beam in beam_search(Short(-1.0), 1, 2)] == ["---"]        # 0.6 was better when it was chosen


class Trap(Model):
    """Program whose likelier first choice dies."""

    def step(self):
        value = self.sample(Bernoulli(0.9))
        self.s += "AB"[value]
        self.condition(self.s != "BA" and self.s != "BB")
        if len(self.s) == 2:
            self.finish()


def test_a_dead_end_is_dropped_and_dead_beams_raise_an_error():
    assert [str(beam) for beam in beam_search(Trap(), 2, 2)] == ["AB", "AA"]
    with pytest.raises(ValueError, match=r"N=1, K=2: every run .* died by step 2, .*condition is false.*larger N or K"):
        beam_search(Trap(), 1, 2)


def test_a_distribution_without_positive_probability_is_a_dead_end():
    class Nothing(Model):
        def step(self):
            self.sample(Bernoulli(0.5).masked([False, False]))

    with pytest.raises(ValueError, match="no value of positive probability"):
        beam_search(Nothing(), 3, 3)


def test_impossible_choices_are_not_followed_however_large_K_is():
    tried = []

    class One(Model):
        def step(self):
            self.s = str(self.sample(Categorical([0.5, 0.0, 0.5])))
            tried.append(self.s)
            self.finish()

    assert [str(beam) for beam in beam_search(One(), 9, 9)] == ["0", "2"] == tried


def test_of_equal_choices_the_first_are_followed():
    class Equal(Model):
        def step(self):
            self.s = str(self.sample(Categorical([0.1 / 50] * 50 + [0.9 / 50] * 50)))
            self.finish()

    assert [str(beam) for beam in beam_search(Equal(), 3, 3)] == ["50", "51", "52"]


class Guided(Model):
    """Program of two fair coins with a twist for tails after the first."""

    def step(self):
        tails = self.sample(Bernoulli(0.5))
        self.s += "HT"[tails]
        self.score(-0.1 * tails)
        self.twist(5.0 * tails)
        if len(self.s) == 2:
            self.finish()


def test_a_twist_guides_the_selection_but_not_the_log_joint():
    (beam,) = beam_search(Guided(), 1, 2)
    assert str(beam) == "TH" and beam.log_joint == pytest.approx(2 * math.log(0.5) - 0.1)
    cut = beam_search(Guided(), 2, 2, max_steps=1)
    assert shown([beam.particle for beam in cut]) == [("H", pytest.approx(math.log(0.5))),
                                                      ("T", pytest.approx(math.log(0.5) - 0.1))]  # fmt: skip
    assert all(beam.particle.cut and beam.particle.finished for beam in cut)


def test_max_steps_gives_the_best_runs_of_the_cut_program():
    model = Text(tiny_lm(V))
    truth, beams = exact(model, max_steps=2), beam_search(model, 100, V, max_steps=2)
    assert [(str(beam), beam.particle.cut) for beam in beams] == [(str(one), one.cut) for one in truth]


def test_two_searches_agree_and_leave_the_model_unchanged():
    model = Text(tiny_lm(V))
    first, second = beam_search(model, 4, 3), beam_search(model, 4, 3)
    assert [(str(a), a.log_joint) for a in first] == [(str(b), b.log_joint) for b in second]
    assert model.s == "" and model.log_weight == 0.0 and "draw" not in vars(model)
    assert all("draw" not in vars(beam.particle.copy()) for beam in first)


def test_a_step_runs_at_most_N_times_K_choices_at_once():
    runs = []

    class Long(Model):
        def step(self):
            runs.append(0)
            for _ in range(20):
                self.s += str(self.sample(Uniform(0, 9)))
            self.finish()

    assert len(beam_search(Long(), 3, 4)) == 3
    assert len(runs) <= 1 + 4 + 19 * 3 * 4


def test_a_choice_of_infinite_support_is_a_TypeError_naming_it():
    with pytest.raises(TypeError, match=r"Geometric\(0.5\) has no finite support"):
        beam_search(Infilling(tiny_lm(V), "a[BLANK]a"), 2, 2)
    assert beam_search(Infilling(tiny_lm(V), "a[BLANK]a", lengths=Geometric(0.5, max_value=2)), 2, 2)


def test_a_beam_shows_its_log_joint_and_text():
    assert repr(beam_search(Guided(), 1, 2)[0]) == "Beam(-1.49, 'TH')"
    assert repr(beam_search(Guided(), 1, 2, max_steps=1)[0]) == "Beam(-0.79, 'T', cut)"
