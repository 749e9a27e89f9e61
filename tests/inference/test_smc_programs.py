"""Tests of programs that would be silently wrong: choices outside `sample`, foreign steps, programs that never end.

Each program here once gave a wrong posterior, or none, without an error. Now it is right, or an error names a remedy.
"""

import functools
import math
import warnings

import numpy as np
import pytest
from helpers.common import repetitions
from helpers.samplers import SAMPLERS
from helpers.tiny import table_lm

from llmppl import (
    Bernoulli,
    Categorical,
    ConstrainedText,
    JsonSchema,
    Model,
    PromptIntersection,
    Regex,
    beam_search,
    enumerate_exact,
    importance_sampling,
    smc_standard,
    smc_steer,
)
from llmppl.inference import repeat
from llmppl.lm import NextToken

RUNS = {name: functools.partial(run, seed=0) for name, run in SAMPLERS.items()} | {
    "exact": enumerate_exact, "beam": functools.partial(beam_search, N=4, K=3)
}  # fmt: skip


@functools.cache
def two_contexts():
    """Return a language model that mostly writes a after a, and b after b."""
    return table_lm(lambda ids: [2.0, 0.0, -9.0] if ids[-1] == 0 else [0.0, 2.0, -9.0])


# ---- choices outside sample


def test_a_distribution_is_recognised_without_running_the_language_model():
    lm = table_lm(lambda ids: [0.5, 0.25, 0.0], [b"a", b"b"])

    class Local(Model):
        def __init__(self):
            super().__init__()
            self.context = lm.context("a")

        def step(self):
            token = self.sample(self.transformer(self.context).masked(np.array([True, True, False])).tempered(0.7))
            self.context += token
            self.s += token
            if len(self.s) == 4:
                self.finish()

    stats = smc_steer(Local(), 3, 2, seed=0).stats      # of 1, 2, 3 and 3 particles: each asks once in its round;
    assert (stats.rounds, stats.rows, stats.hits) == (4, 9, 0)      # a step that is run again needs no row


# ---- steps of other libraries


async def coroutine(self):
    self.finish()


def generator(self):
    yield self.finish()


@pytest.mark.parametrize("assigned", [False, True])
@pytest.mark.parametrize("step", [coroutine, generator])
def test_a_foreign_kind_of_step_is_refused_with_a_remedy(step, assigned):
    foreign = type("Foreign", (Model,), {} if assigned else {"step": step})
    foreign.step = step if assigned else foreign.step
    with pytest.raises(TypeError, match=r"Foreign.step returned .* drop async, await and yield"):
        smc_steer(foreign(), 2, 2)


def test_a_step_may_be_assigned_to_a_class():
    class Later(Model):
        pass

    def step(self):
        self.score(-1.0)
        self.twist(2.0)
        self.finish()

    Later.step = step
    assert RUNS["distinct"](Later()).log_ml == pytest.approx(-1.0)


def test_a_program_without_super_init_still_runs():
    class Bare(Model):
        def __init__(self, letter):
            self.letter = letter

        def step(self):
            self.s += self.letter
            self.finish()

    for run in RUNS.values():
        assert {str(particle) for particle in run(Bare("x"))} == {"x"}


# ---- what stands when a run is left


class Growing(Model):
    """Program of a weighed letter a step, which fails in the step that begins with `at` letters."""

    def __init__(self, at, error):
        super().__init__()
        self.at, self.error = at, error

    def step(self):
        letter = self.sample(Categorical({"a": 0.5, "b": 0.5}))
        self.score(-1.0 if letter == "a" else -2.0)
        self.s += letter
        if len(self.s) > self.at and letter == "b":
            raise self.error
        if len(self.s) == 6:
            self.finish()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), KeyError("no such thing"), MemoryError()], ids=repr)
@pytest.mark.parametrize("expand", ["distinct", "merged", "copies", "standard"])
def test_an_exception_carries_the_particles_of_the_last_whole_step(expand, error):
    def run(model, **options):
        if expand == "standard":
            return smc_standard(model, 8, seed=1, progress=False, **options)
        return smc_steer(model, 4, 3, seed=1, expand=expand, progress=False, **options)

    whole = run(Growing(9, error), max_steps=3)
    with pytest.raises(type(error)) as caught:
        run(Growing(3, error))
    left = caught.value.particles
    assert left.texts == whole.texts and all(p.cut and p.finished for p in left)
    assert left.log_weights == pytest.approx(whole.log_weights) and left.log_ml == pytest.approx(whole.log_ml)
    assert len(left.steps) == 3 and left.stats is not None


def test_an_exception_in_on_step_carries_the_particles_of_that_step():
    def stop(step):
        if step.index == 2:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full") as caught:
        smc_steer(Growing(9, None), 4, 3, seed=1, progress=False, on_step=stop)
    assert {len(str(p)) for p in caught.value.particles} == {2}


def test_an_exception_in_the_first_step_carries_the_initial_particle():
    with pytest.raises(KeyError) as caught:
        smc_steer(Growing(0, KeyError()), 4, 3, seed=1, progress=False)
    (begun,) = caught.value.particles
    assert str(begun) == "" and begun.cut and caught.value.particles.log_ml == 0.0


# ---- small mistakes


def test_an_invalid_on_step_is_refused_before_the_first_step():
    class Never(Model):
        def step(self):
            raise AssertionError

    for run in (
        lambda on_step: smc_steer(Never(), 2, 2, on_step=on_step),
        lambda on_step: smc_standard(Never(), 2, on_step=on_step),
        lambda on_step: importance_sampling(Never(), 2, on_step=on_step),
    ):
        with pytest.raises(TypeError, match=r"on_step must be a function, as Recorder\(.run.jsonl.\) is, not 'file'"):
            run("file")


@pytest.mark.parametrize("run", RUNS)
def test_a_class_in_place_of_a_model_is_named(run):
    with pytest.raises(TypeError, match="an instance of your subclass, not .*Growing"):
        RUNS[run](Growing)


def test_repeat_passes_the_exception_of_a_run_on():
    with pytest.raises(KeyError) as caught:
        repeat(lambda rng: smc_steer(Growing(2, KeyError()), 2, 2, rng=rng), 3, seed=0, progress=False)
    assert {len(str(p)) for p in caught.value.particles} == {2}


@pytest.mark.parametrize("holds", [None, "", "x", 2, -1, 0.0, 1.0, [], np.array([True]), np.zeros(2, bool), 10**30])
def test_condition_refuses_other_values_than_booleans(holds):
    with pytest.raises(TypeError, match=r"condition wants True or False, not .*: compare, as in condition\(n > 0\)"):
        Model().condition(holds)


def test_condition_takes_bools_of_python_and_numpy_and_0_and_1():
    for holds in (True, np.True_, 1, np.int64(1)):
        model = Model()
        model.condition(holds)
        assert not model.finished
    for holds in (False, np.False_, 0, np.uint8(0)):
        model = Model()
        model.condition(holds)
        assert model.log_weight == -math.inf


@pytest.mark.parametrize("verb", ["score", "twist"])
@pytest.mark.parametrize("log_w", ["3", b"3", None, True, np.True_, [1.0], np.zeros(2), Bernoulli(0.5), 1j])
def test_score_and_twist_refuse_other_values_than_numbers(verb, log_w):
    with pytest.raises(TypeError, match=f"{verb} wants a log weight, (a|one) number, not"):
        getattr(Model(), verb)(log_w)


def test_score_takes_the_numbers_of_numpy_and_torch():
    torch = pytest.importorskip("torch")
    model = Model()
    for log_w in (1, 1.0, np.float32(1), np.int64(1), np.array(1.0), torch.tensor(1.0)):
        model.score(log_w)
    assert model.log_weight == 6.0


def test_observe_of_a_text_under_a_token_distribution_names_string():
    dist = NextToken(two_contexts().context("a"))
    for one in (dist, dist.masked(np.array([True, True, False]))):
        with pytest.raises(TypeError, match=r"a str is not a token: for the text 'ab', use .string\(\), as in observe"):
            Model().observe(one, "ab")


def test_K_may_be_left_out():
    whole = smc_steer(Growing(9, None), 4, seed=0, progress=False)
    assert whole.log_weights == pytest.approx(smc_steer(Growing(9, None), 4, 3, seed=0, progress=False).log_weights)


# ---- the length that the model reads


def short_lm(most=4):
    lm = table_lm(lambda ids: [0.5, 0.0, -1.0])
    lm.engine.max_length = most
    return lm


class Forever(Model):
    """Program of endless tokens, each weighed by its letter."""

    def __init__(self, lm, prompt="a", per_step=1):
        super().__init__()
        self.context, self.per_step = lm.context(prompt), per_step

    def step(self):
        for _ in range(self.per_step):
            p = self.transformer(self.context)
            token = self.sample(p, proposal=p.masked(np.array([True, True, False])))
            self.context += token
            self.s += token


@pytest.mark.parametrize("per_step", [1, 3])
@pytest.mark.parametrize("run", ["distinct", "merged", "copies", "standard", "exact"])
def test_a_particle_at_the_length_limit_is_cut_with_one_warning(run, per_step):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = RUNS[run](Forever(short_lm(), per_step=per_step))
    (told,) = [str(warning.message) for warning in caught if "reads at most 4" in str(warning.message)]
    assert told.startswith(f"step {5 if per_step == 1 else 2} reached the end of what the model reads")
    assert {len(str(particle)) for particle in posterior} == {4}         # the last of five tokens is not read
    assert all(particle.cut and particle.finished for particle in posterior)
    p = (math.exp(0.5) + 1) / (math.exp(0.5) + 1 + math.exp(-1))
    assert posterior.log_ml == pytest.approx(4 * math.log(p))            # every token costs the mask's share


def test_a_beam_that_reaches_the_length_of_the_model_is_cut():
    with pytest.warns(UserWarning, match="reads at most 4"):
        found = beam_search(Forever(short_lm()), 2, 2)
    assert {len(str(each)) for each in found} == {4} and all(each.particle.cut for each in found)


def test_particles_of_several_lengths_are_cut_where_each_reaches_it():
    class Hops(Model):
        """Program of one or two tokens a step, with rare ends."""

        def __init__(self, lm):
            super().__init__()
            self.context = lm.context("a")

        def step(self):
            for _ in range(1 + self.sample(Bernoulli(0.5))):
                token = self.sample(self.transformer(self.context))
                if token.is_eos:
                    return self.finish()
                self.context += token
                self.s += token

    with pytest.warns(UserWarning, match="reads at most 6"):
        truth = enumerate_exact(Hops(short_lm(6)))
    assert truth.log_ml == pytest.approx(0.0)                            # nothing is lost
    whole = sum(math.exp(p.log_weight) for p in truth if not p.cut)
    runs = repetitions(400, 40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [smc_steer(Hops(short_lm(6)), 6, 2, seed=i, progress=False) for i in range(runs)]
    shares = [sum(math.exp(p.log_weight) for p in posterior if not p.cut) for posterior in found]
    assert abs(np.mean(shares) - whole) <= 4.5 * np.std(shares) / math.sqrt(runs)


def test_a_step_that_requests_too_long_a_context_is_an_error():
    class Long(Model):
        def step(self):
            self.sample(self.transformer(short_lm().context("ababab")))

    for run in RUNS.values():
        with pytest.raises(ValueError, match="a context of 6 tokens, and the model reads at most 4"):
            run(Long())
    model = Forever(short_lm(1))
    model.step()
    with pytest.raises(ValueError, match="a context of 2 tokens, and the model reads at most 1"):
        model.step()                                    # by hand


@pytest.mark.parametrize("run", ["distinct", "copies", "standard"])
def test_a_run_in_which_no_particle_ends_warns_once(run, monkeypatch):
    monkeypatch.setattr(Model, "_late_", (5, Model._late_[1]))

    class Long(Model):
        def step(self):
            self.s += self.sample(Categorical({"a": 0.5, "b": 0.5}))
            if len(self.s) == 9:
                self.finish()

    with pytest.warns(UserWarning, match=r"no particle of Long has ended in 5 steps: .*max_steps=") as told:
        RUNS[run](Long())
    assert len(told) == 1


def test_a_text_that_runs_on_is_named_by_its_field():
    lm = table_lm(lambda ids: [30.0] + [0.0] * 9, [b"a", *(bytes([byte]) for byte in b'b{":},[]')])
    item = {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}
    items = {"type": "array", "prefixItems": [{"const": "b"}, item], "minItems": 2}
    schema = {"type": "object", "properties": {"a": items}, "required": ["a"]}
    for constraint, t, part in [(Regex("a*b"), 121, "the text"), (JsonSchema(schema), 140, r"parsed\.a\[1\]\.b")]:
        with pytest.warns(UserWarning, match=f"ended in {t} steps: {part} runs on, 'a{{20}}': bound"):
            smc_steer(ConstrainedText(lm, "b", constraint), 1, 2, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")                  # max_tokens bounds it
        assert smc_steer(PromptIntersection(lm, ["b"], max_tokens=201), 1, 1, seed=0).best.cut
