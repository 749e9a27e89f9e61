"""Each verb before the first step, between two steps, in a step, and after the end; and the names of Model.

If a verb has a meaning there, the posterior equals one computed by hand, under every algorithm. Else the verb is
refused by name.
"""

import contextlib
import copy
import math
import random
import warnings

import numpy as np
import pytest
from helpers.samplers import SAMPLERS, every_sampler, is_posterior

from llmppl import Bernoulli, Model, Uniform, beam_search, enumerate_exact, smc_steer
from llmppl.inference import SMC, Distinct, DownSample


class Letters(Model):
    """Program of two fair letters, with a wrong twist."""

    def step(self):
        self.s += self.sample(Uniform(["a", "b"]))
        self.twist(3.0 if self.s == "a" else 0.0)
        if len(self.s) == 2:
            self.finish()


HALF = {"a": 0.5, "b": 0.5}


@every_sampler
def test_a_twist_outside_of_a_step_is_refused(run):
    class Begins(Letters):
        def __init__(self):
            super().__init__()
            self.twist(2.0)

    said = r"twist\(\) outside of a step: it guides the selection after a step"
    with pytest.raises(RuntimeError, match=said):
        Begins()
    with pytest.raises(RuntimeError, match=said):
        run(Letters(), seed=0, on_step=lambda step: step.particles[0].twist(1.0))
    for step in SMC(Letters(), Distinct(4, 2), DownSample(4), seed=0):
        with pytest.raises(RuntimeError, match=said):
            step.particles[0].twist(1.0)


@every_sampler
@pytest.mark.parametrize("how", ["finish()", "finished = True"])
def test_a_particle_ended_between_steps_has_its_weight_without_the_twist(run, how):
    def enough(step):
        for particle in step.particles:
            if how == "finish()":
                particle.finish()
                assert particle.log_twist == 0.0
            else:
                particle.finished = True

    is_posterior(run, Letters, HALF, on_step=enough)


@every_sampler
def test_score_observe_and_condition_work_between_and_before_steps(run):
    def weigh(step):
        for particle in step.particles:
            if step.index == 1:
                particle.score(math.log(3.0) if particle.s == "a" else 0.0)
                particle.observe(Bernoulli(0.5), True)
                particle.condition(True)

    def made():
        model = Letters()
        model.score(-1.0)
        return model

    scale = math.exp(-1.0) / 8
    truth = {"aa": 3 * scale, "ab": 3 * scale, "ba": scale, "bb": scale}
    is_posterior(run, made, truth, on_step=weigh)


@every_sampler
def test_deaths_between_two_steps_are_counted(run):
    found = run(Letters(), seed=0, on_step=lambda step: [each.condition(False) for each in step.particles])
    assert not len(found) and found.log_ml == -math.inf
    assert "condition is false" in repr(found)


def test_a_particle_of_a_run_may_choose_only_in_a_step():
    for step in SMC(Letters(), Distinct(4, 2), DownSample(4), seed=0):
        for particle in step.particles:
            said = "sample.. after the particle has finished" if particle.finished else "chooses in step.. alone"
            with pytest.raises(RuntimeError, match=said):
                particle.sample(Bernoulli(0.5))


@every_sampler
def test_a_twist_after_finish_in_a_step_does_nothing(run):
    class Always(Model):
        def step(self):
            self.s = self.sample(Uniform(["a", "b"]))
            self.finish()
            self.twist(5.0)

    is_posterior(run, Always, HALF, quick=50)


# ---- a step that catches what leaves it


class Catches(Model):
    def step(self):
        b = 7
        with contextlib.suppress(BaseException):
            b = int(self.sample(Bernoulli(0.5)))
        self.s = f"{b}{int(self.sample(Bernoulli(0.25)))}"
        self.finish()


class CatchesAll(Model):
    def step(self):
        self.s = "77"
        with contextlib.suppress(BaseException):
            b = int(self.sample(Bernoulli(0.5)))
            self.s = f"{b}{int(self.sample(Bernoulli(0.25)))}"
        self.finish()


CAUGHT = {"00": 0.375, "01": 0.125, "10": 0.375, "11": 0.125}


@every_sampler
@pytest.mark.parametrize("program", [Catches, CatchesAll])
def test_a_step_that_catches_everything_is_right(run, program):
    is_posterior(run, program, CAUGHT)
    found = enumerate_exact(program())
    assert dict(zip(found.texts, np.exp(found.log_weights), strict=True)) == pytest.approx(CAUGHT)
    assert {str(beam) for beam in beam_search(program(), 4, 2)} == set(CAUGHT)


@every_sampler
def test_a_death_that_a_step_catches_remains_a_death(run):
    class Lives(Model):
        def step(self):
            self.s = self.sample(Uniform(["a", "b"]))
            with contextlib.suppress(BaseException):
                self.condition(self.s == "a")
            self.s += str(int(self.sample(Bernoulli(0.5))))
            self.finish()

    is_posterior(run, Lives, {"a0": 0.25, "a1": 0.25})


# ---- names


class Dies(Model):
    def step(self):
        self.s += self.sample(Uniform(["a", "b"]))
        self.condition(self.s != "bb")
        self.score(math.log(0.5) if self.s == "ab" else 0.0)
        if len(self.s) == 2:
            self.finish()


@every_sampler
def test_other_names_belong_to_the_program(run):
    methods = "_draw", "_weigh", "_die", "_cause", "_statement", "_own_chooser", "spawn", "_copy"
    attributes = "limit", "_kept", "_noted", "_stepping", "_limit", "particle", "t", "left", "picks"

    class Named(Dies):
        def step(self):
            vars(self).update({name: [*getattr(self, name, []), self.s] for name in attributes})
            super().step()

    program = type("Named", (Named,), dict.fromkeys(methods, lambda self, *given, **more: "b"))
    is_posterior(run, program, {"aa": 0.25, "ab": 0.125, "ba": 0.25}, quick=60)
    assert all(getattr(each, name) == ["", each.s[0]] for each in run(program(), seed=0) for name in attributes)


def test_assigning_a_stream_in_a_step_is_refused():
    class Seeds(Letters):
        def step(self):
            self.rng = np.random.default_rng(0)

    for run in SAMPLERS.values():
        with pytest.raises(RuntimeError, match="Seeds.rng was assigned in its step"):
            run(Seeds(), seed=0)


# ---- the stream of a particle


class Keeps(Model):
    """Program that keeps its stream from the first step on, and draws from it in each step."""

    stream = None

    def step(self):
        self.stream = self.stream or self.rng
        self.s += "01"[int(self.stream.random() < 0.25)]
        self.score(math.log(2.0) if self.s[-1] == "1" else 0.0)
        if len(self.s) == 2:
            self.finish()


DRAWN = {"00": 9 / 16, "01": 6 / 16, "10": 6 / 16, "11": 4 / 16}


@every_sampler
def test_a_kept_reference_to_the_stream_is_each_particles_own(run):
    is_posterior(run, Keeps, DRAWN)


class Inner(Model):
    def step(self):
        self.s = "01"[int(self.sample(Bernoulli(0.25)))]


class Outer(Model):
    """Program of two steps of another model, which it holds."""

    once = True

    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.inner.rng = self.rng

    def step(self):
        if not self.once:
            self.inner.rng = self.rng
        self.inner.step()
        self.s += self.inner.s
        self.score(math.log(2.0) if self.inner.s == "1" else 0.0)
        if len(self.s) == 2:
            self.finish()


@every_sampler
@pytest.mark.parametrize("once", [True, False], ids=["given before the run", "given in each step"])
def test_an_inner_model_draws_from_the_stream_of_its_particle(run, once):
    is_posterior(run, type("Holds", (Outer,), {"once": once}), DRAWN)


class Nests(Model):
    """Program with inference before its first `sample`: the weight is its estimate of Z, the text a particle's."""

    def step(self):
        class Coin(Model):
            def step(self):
                self.s = "01"[int(self.sample(Bernoulli(0.25)))]
                self.score(math.log(2.0) if self.s == "1" else 0.0)
                self.finish()

        found = smc_steer(Coin(), 1, 1, rng=self.rng, progress=False)
        self.score(found.log_ml)
        self.s += found.sample(rng=self.rng).s
        if len(self.s) == 2:
            self.finish()


@every_sampler
def test_inference_within_a_step_draws_from_the_particles_stream(run):
    is_posterior(run, Nests, DRAWN, quick=60)


def test_a_step_that_simulates_a_copy_of_itself_is_right():
    class Looks(Model):
        ahead = False
        how = staticmethod(copy.deepcopy)

        def step(self):
            self.s += self.sample(Uniform(["a", "b"]))
            if self.ahead:
                self.condition(self.s[0] == "b")
                return
            twin = self.how(self)
            twin.ahead, twin.rng = True, self.rng
            twin.step()
            self.s += str(int(self.sample(Bernoulli(0.5))))
            self.finish()

    truth = {"a0": 0.25, "a1": 0.25, "b0": 0.25, "b1": 0.25}
    for how in (copy.deepcopy, copy.copy, Model.copy):
        for name in ("distinct", "copies"):
            is_posterior(SAMPLERS[name], type("Ahead", (Looks,), {"how": staticmethod(how)}), truth, quick=60)


# ---- randomness of the process, told by the particle


@every_sampler
def test_foreign_draws_after_a_choice_are_unbiased(run):
    class Foreign(Model):
        def step(self):
            self.sample(Bernoulli(0.5))
            self.sample(Bernoulli(0.5))
            self.s = random.choice("TF")
            self.score(math.log(3.0) if self.s == "T" else -2.0)
            self.finish()

    random.seed(0)
    is_posterior(run, Foreign, {"T": 1.5, "F": math.exp(-2.0) / 2}, quick=200)


@every_sampler
def test_a_method_start_that_nothing_calls_is_named(run):
    class Hook(Letters):
        def start(self):
            self.s = "b"

    with pytest.warns(UserWarning, match=r"nothing calls Hook.start\(\): do its work in __init__"):
        run(Hook(), seed=0)

    class Called(Hook):
        def step(self):
            self.start()
            super().step()

    with warnings.catch_warnings(action="error"):
        run(Called(), seed=0)
