"""Tests of the inference loop: bad input, dead and finished particles, `on_step`, and equal seeds."""

import inspect
import io
import math
import sys

import numpy as np
import pytest
from helpers.common import repetitions
from helpers.tiny import cold_lm, tiny_lm

from llmppl import (
    SMC,
    Bernoulli,
    ConstrainedText,
    Infilling,
    Model,
    PromptIntersection,
    Uniform,
    beam_search,
    enumerate_exact,
    importance_sampling,
    smc_standard,
    smc_steer,
)
from llmppl.inference import Copies, Distinct, DownSample, ResampleBelow
from llmppl.inference.resampling import optimal, systematic

V = 6
ALGORITHMS = {
    "steer": lambda model, **options: smc_steer(model, 4, 3, expand="copies", **options),
    "standard": lambda model, **options: smc_standard(model, 4, **options),
    "importance": lambda model, **options: importance_sampling(model, 4, **options),
}
every_algorithm = pytest.mark.parametrize("run", ALGORITHMS.values(), ids=ALGORITHMS)


class Walk(Model):
    """Program of a digit from 1 to 9 a step, weighed by it, until a nine or the fourth. It counts its steps."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def step(self):
        digit = self.sample(Uniform(1, 9))
        self.steps += 1
        self.s += str(digit)
        self.score(math.log(digit))
        if digit == 9 or len(self.s) == 4:
            self.finish()


class Dies(Model):
    """Program in which all particles die at step `last`."""

    def __init__(self, last):
        super().__init__()
        self.last = last

    def step(self):
        self.s += "x"
        self.condition(len(self.s) < self.last)


class Idle(Model):
    """Program that neither samples nor finishes."""

    def step(self):
        pass


# ---- bad input


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: smc_steer(Walk, 2, 2), TypeError, "wants a Model, an instance of your subclass, not <class"),
        (lambda: smc_steer(2, 2, Walk()), TypeError, "wants a Model, an instance of your subclass, not 2"),
        (lambda: smc_standard(2, Walk()), TypeError, "wants a Model, an instance of your subclass, not 2"),
        (lambda: importance_sampling(2, Walk()), TypeError, "wants a Model, an instance of your subclass, not 2"),
        (lambda: beam_search(2, 2, Walk()), TypeError, "wants a Model, an instance of your subclass, not 2"),
        (lambda: smc_steer("text", 2, 2), TypeError, "wants a Model, an instance of your subclass, not 'text'"),
        (lambda: smc_steer(Walk(), 2, 2, seed=0, rng=np.random.default_rng(0)), ValueError, "seed= or rng=, not both"),
        (lambda: smc_steer(Walk(), 2, 2, rng=0), TypeError, "rng must be a np.random.Generator"),
        (lambda: smc_standard(Walk(), 2, resample=optimal), ValueError, "optimal keeps N of N .* use systematic"),
    ],
)
def test_bad_input_is_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ---- the dead


@pytest.mark.parametrize("last", [1, 3])
@every_algorithm
def test_a_dead_run_is_empty_and_drawing_reports_step_and_reason(run, last):
    posterior = run(Dies(last), seed=0)
    assert len(posterior) == 0 and posterior.log_ml == -math.inf
    (death,) = posterior.deaths
    assert death.step == last and death.reason.startswith("condition is false (test_smc.py, line ")
    for draw in (posterior.sample, lambda: posterior.best, lambda: posterior.expect(len)):
        with pytest.raises(ValueError, match=rf"all died by step {last}: (\d+) of \1: condition is false"):
            draw()


@every_algorithm
def test_an_impossible_constraint_kills_all_particles_in_the_first_step(run):
    nothing = ConstrainedText(tiny_lm(V), "a", mask=lambda text: np.zeros(V, bool))
    posterior = run(nothing, seed=0)
    assert len(posterior) == 0 and posterior.deaths[0].step == 1
    assert posterior.deaths[0].reason == "no token allowed by the mask has positive probability"
    posterior = run(ConstrainedText(tiny_lm(V), "a", lambda text: False, min_tokens=1, max_tokens=2), seed=0)
    assert len(posterior) == 0 and posterior.deaths[0].reason.endswith("<lambda> is false of the text")


@every_algorithm
def test_the_death_of_some_does_not_touch_the_others(run):
    class Some(Model):
        def step(self):
            heads = self.sample(Bernoulli(0.5))
            self.s += "H" if heads else "T"
            self.condition(heads or len(self.s) != 2)
            if len(self.s) == 3:
                self.finish()

    posterior = run(Some(), seed=1)
    assert posterior.deaths and all(death.step == 2 for death in posterior.deaths)
    assert len(posterior) > 0 and all(str(particle)[1] == "H" for particle in posterior)


def test_a_weight_that_underflows_to_zero_is_a_death():
    class Underflow(Model):
        def step(self):
            self.score(-1e308)

    posterior = smc_steer(Underflow(), 2, 2, seed=0)
    assert len(posterior) == 0 and posterior.deaths[0].reason == "weight zero"


# ---- the end of a run


@every_algorithm
def test_max_steps_bounds_a_program_that_neither_samples_nor_finishes(run):
    posterior = run(Idle(), max_steps=5)
    assert len(posterior) == 4 and posterior.log_ml == pytest.approx(0.0)
    assert all(particle.cut and particle.finished for particle in posterior)


@every_algorithm
def test_max_steps_marks_only_cut_particles(run):
    posterior = run(Walk(), seed=0, max_steps=2)
    for particle in posterior:
        assert particle.cut == (len(particle.s) == 2 and particle.s[-1] != "9")
    assert not any(particle.cut for particle in run(Walk(), seed=0, max_steps=4))


def test_a_model_that_has_finished_already_is_returned_as_it_is():
    model = Walk()
    model.score(-2.0)
    model.finish()
    for expand, number in (("copies", 3), ("distinct", 1)):
        posterior = smc_steer(model, 3, 2, expand=expand, seed=0)
        assert len(posterior) == number and posterior.log_ml == pytest.approx(-2.0)


# ---- the loop


def test_weights_start_at_minus_log_N_and_copies_split_their_parents_weight():
    seen = []

    class Look(Model):
        def step(self):
            seen.append(self.log_weight)
            self.finish()

    smc_standard(Look(), 4)
    np.testing.assert_allclose(seen, [-math.log(4)] * 4)
    seen.clear()
    smc_steer(Look(), 4, 3, expand="copies")
    np.testing.assert_allclose(seen, [-math.log(12)] * 12)


@every_algorithm
def test_on_step_gets_steps_that_fit_together(run):
    steps, texts = [], [[""] * 4]

    def on_step(step):
        survivors = step.particles
        candidates = len(step.candidate_log_weights)
        assert step.index == len(steps) + 1
        assert len(step.parents) == candidates and len(step.ancestors) == len(survivors) <= 4
        assert np.all(np.diff(step.parents) >= 0) and np.all(np.diff(step.ancestors) >= 0)
        assert set(step.parents) == set(range(len(texts[-1])))
        np.testing.assert_array_equal(survivors.log_weights, [particle.log_weight for particle in survivors])
        # what the candidates weigh together, the survivors do
        assert np.logaddexp.reduce(step.candidate_log_weights) == pytest.approx(survivors.log_ml)
        order = np.argsort(-step.log_chosen, kind="stable")
        for particle, ancestor in zip(survivors, step.ancestors[order], strict=True):
            assert particle.s.startswith(texts[-1][step.parents[ancestor]])
        steps.append(step)
        texts.append([str(step.candidates[ancestor]) for ancestor in step.ancestors])

    posterior = run(Walk(), seed=3, on_step=on_step)
    assert 1 <= len(steps) <= 4
    assert sorted(posterior.texts) == sorted(texts[-1])
    np.testing.assert_array_equal(posterior.log_weights, steps[-1].particles.log_weights)


def test_finished_particles_are_neither_expanded_nor_stepped_again():
    for seed in range(10):
        finished = [0]

        def on_step(step, finished=finished):
            assert len(step.candidate_log_weights) == 3 * (4 - finished[0]) + finished[0]
            counts = np.bincount(step.parents)
            assert sorted(set(counts.tolist())) in ([1], [3], [1, 3])
            assert (counts == 1).sum() == finished[0]
            finished[0] = sum(particle.finished for particle in step.particles)

        for particle in smc_steer(Walk(), 4, 3, expand="copies", seed=seed, on_step=on_step):
            assert particle.steps == len(particle.s)


def test_resampling_runs_only_if_the_ESS_is_below_the_threshold():
    calls = []

    def counting(rng, log_weights, N):
        weights = np.exp(log_weights - np.max(log_weights))
        calls.append(weights.sum() ** 2 / np.sum(weights**2))
        return systematic(rng, log_weights, N)

    for seed in range(20):
        smc_standard(Walk(), 8, ess_threshold=0.7, resample=counting, seed=seed)
    assert len(calls) > 5 and max(calls) < 0.7 * 8
    calls.clear()
    smc_standard(Walk(), 8, ess_threshold=0.0, resample=counting, seed=0)
    assert calls == []


@every_algorithm
def test_stats_count_the_calls_of_the_run_to_the_lm(run):
    lm = cold_lm(V)
    model = ConstrainedText(lm, "abc", max_tokens=4)
    posterior = run(model, seed=0)
    assert posterior.stats.rounds == lm.stats.rounds and posterior.stats.tokens == lm.stats.tokens > 3
    assert "tokens run" in repr(posterior)
    again = run(model, seed=0)
    assert again.stats.tokens == 0 and again.stats.hits > 0


# ---- seeds


def programs(lm):
    return {
        "constrained": lambda: ConstrainedText(lm, "a", lambda text: "aa" not in text, max_tokens=6),
        "infilling": lambda: Infilling(lm, ["a", "b", "c"]),
        "intersection": lambda: PromptIntersection(lm, ["a", "cb", "b"], max_tokens=5),
    }


def outcome(posterior):
    return [(str(particle), particle.log_weight) for particle in posterior]


@pytest.mark.parametrize("name", programs(None))
@every_algorithm
def test_particles_depend_only_on_the_seed_not_on_caches_or_batches(run, name):
    lm = cold_lm(V)
    cold = outcome(run(programs(lm)[name](), seed=5))
    run(programs(lm)[name](), seed=6)
    warm = outcome(run(programs(lm)[name](), rng=np.random.default_rng(5)))
    batched = outcome(run(programs(cold_lm(V, max_batch_tokens=3))[name](), seed=5))
    forgetful = outcome(run(programs(cold_lm(V, cache_bytes=20_000))[name](), seed=5))
    assert len(cold) > 0
    for other in (warm, batched, forgetful):
        assert [text for text, _ in other] == [text for text, _ in cold]
        np.testing.assert_allclose([w for _, w in other], [w for _, w in cold], atol=1e-5)


@every_algorithm
def test_different_seeds_give_different_particles(run):
    assert len({tuple(outcome(run(Walk(), seed=seed))) for seed in range(5)}) == 5
    assert len({tuple(outcome(run(Walk()))) for _ in range(5)}) > 1


def test_a_given_rng_continues_from_run_to_run():
    rng = np.random.default_rng(0)
    assert outcome(smc_steer(Walk(), 4, 2, rng=rng)) != outcome(smc_steer(Walk(), 4, 2, rng=rng))


# ---- the bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_draws_a_bar_on_stderr(monkeypatch):
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    smc_steer(Walk(), 4, 2, seed=0, progress=True)
    drawn = terminal.getvalue()
    assert "step " in drawn and "finished, log Z-hat" in drawn


def test_the_bar_changes_no_particle_and_survives_the_death_of_all(monkeypatch):
    quiet = outcome(smc_steer(Walk(), 4, 2, seed=0))
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert outcome(smc_steer(Walk(), 4, 2, seed=0)) == quiet
    assert len(smc_steer(Dies(2), 4, 2, seed=0)) == 0


def test_each_copy_of_a_particle_draws_from_its_own_stream():
    class Skewed(Model):
        """Program in which one value in a hundred carries the weight, so that resampling repeats it."""

        def __init__(self):
            super().__init__()
            self.drawn = []

        def step(self):
            self.drawn.append(float(self.rng.random()))
            self.score(20.0 * self.drawn[-1])
            if len(self.drawn) == 4:
                self.finish()

    steps = []

    def look(step):
        particles = list(step.particles)
        assert len({id(particle.rng) for particle in particles}) == len(particles) == 8
        states = [repr(particle.rng.bit_generator.state) for particle in particles]
        assert len(set(states)) == 8                    # nor a copy of one
        before, _ = states[1], particles[0].rng.bit_generator.advance(1)
        assert repr(particles[1].rng.bit_generator.state) == before
        steps.append(len(set(step.ancestors.tolist())))

    smc_standard(Skewed(), 8, seed=0, on_step=look, progress=False)
    assert min(steps) < 8                               # some were chosen again


# ---- the loop as an object


LOOPS = {
    "distinct": (lambda **o: smc_steer(Walk(), 4, 3, **o), lambda **o: SMC(Walk(), Distinct(4, 3), DownSample(4), **o)),
    "copies": (
        lambda **o: smc_steer(Walk(), 4, 3, expand="copies", **o),
        lambda **o: SMC(Walk(), Copies(4, 3), DownSample(4), **o),
    ),
    "standard": (lambda **o: smc_standard(Walk(), 6, **o), lambda **o: SMC(Walk(), Copies(6), ResampleBelow(6), **o)),
}
every_loop = pytest.mark.parametrize(("whole", "loop"), LOOPS.values(), ids=LOOPS)


def told(particles):
    return [(str(p), p.log_weight, p.cut) for p in particles], particles.log_ml, particles.log_ml_se, particles.deaths


@every_loop
def test_stepping_by_hand_is_the_run(whole, loop):
    for seed in range(4):
        run = loop(seed=seed)
        steps = list(run)
        assert told(run.posterior()) == told(whole(seed=seed)) == told(run.run())
        assert [step.index for step in steps] == list(range(1, run.t + 1)) and list(run) == []
        assert run.posterior().steps == tuple(run.records)


@every_loop
def test_the_posterior_between_steps_equals_a_run_cut_there(whole, loop):
    run = loop(seed=3)
    for step in run:
        assert told(run.posterior()) == told(whole(seed=3, max_steps=step.index))
        assert not any(particle.cut for particle in run.particles)
    assert told(run.posterior()) == told(whole(seed=3))
    run = loop(seed=3)
    next(run)
    assert told(run.run()) == told(whole(seed=3))       # it goes on from where it is
    run = loop(seed=3)
    next(run), next(run)
    assert told(run.run(max_steps=2)) == told(whole(seed=3, max_steps=2))


def test_a_failing_step_by_hand_carries_particles_and_ends_the_run():
    class Fails(Walk):
        def step(self):
            super().step()
            if len(self.s) == 2:
                raise error

    for error in (KeyError("no such thing"), KeyboardInterrupt()):
        run = SMC(Fails(), Copies(3), ResampleBelow(3), seed=0)
        first = next(run)
        with pytest.raises(type(error)) as caught:
            next(run)
        assert [str(p) for p in caught.value.particles] == [str(p) for p in first.particles]
        assert run.t == 1 and all(p.finished for p in run.particles) and list(run) == []


def test_a_step_that_raises_StopIteration_does_not_end_the_loop_in_silence():
    class Stops(Model):
        def step(self):
            next(iter(()))

    with pytest.raises(RuntimeError, match="a step raised StopIteration"):
        list(SMC(Stops(), Copies(2), DownSample(2), seed=0))


def test_an_unknown_option_is_named_with_a_similar_one():
    for run in (lambda **o: smc_steer(Walk(), 2, 2, **o), lambda **o: importance_sampling(Walk(), 2, **o)):
        with pytest.raises(TypeError, match=r"takes no max_step: did you mean max_steps\?"):
            run(max_step=3)


def test_all_options_stand_in_the_signatures_of_the_algorithms():
    for algorithm in (smc_steer, smc_standard, importance_sampling):
        names = list(inspect.signature(algorithm).parameters)
        assert names[:2] == ["model", "N"] and names[-13:] == [
            "seed", "rng", "max_steps", "on_step", "progress", "checkpoint", "every", "version", "resume", "timeout",
            "budget", "on_timeout", "power",
        ]  # fmt: skip


def test_a_custom_selection_is_one_function_and_stays_unbiased():
    def killed(rng, log_weights, active):
        """Keep each particle with probability 1/2, at twice its weight."""
        kept = np.flatnonzero((rng.random(len(log_weights)) < 0.5) & (log_weights > -np.inf))
        return kept, log_weights[kept] + math.log(2)

    Z = np.exp([SMC(Walk(), Copies(8, 2), killed, seed=seed).run().log_ml for seed in range(repetitions(4000, 120))])
    exact = math.exp(enumerate_exact(Walk()).log_ml)
    assert abs(Z.mean() - exact) <= 4.5 * Z.std() / math.sqrt(len(Z))


def test_the_repr_of_a_run_shows_its_scheme_and_progress():
    run = SMC(Walk(), Distinct(4, 3), DownSample(4), seed=0)
    assert repr(run) == "<SMC Distinct(N=4, K=3), DownSample(N=4): step 0, 0/1 finished, log Z-hat 0.00>"


def test_an_invalid_expansion_or_selection_is_refused_with_an_example():
    with pytest.raises(TypeError, match=r"expand must be an expansion, as Distinct\(N, K\) is, not 3"):
        SMC(Model(), 3, DownSample(2))
    with pytest.raises(TypeError, match=r"select must be a function, as DownSample\(N\) is, not 2"):
        SMC(Model(), Copies(2), 2)
