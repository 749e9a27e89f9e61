"""Model: the effect of each verb on the weight and life of a particle, and the parts that copies share."""

import copy
import math
import re

import numpy as np
import pytest
from helpers.tiny import log_probs_by_hand, tiny_lm

from llmppl import (
    EOS,
    Bernoulli,
    Categorical,
    Delta,
    Geometric,
    Model,
    enumerate_exact,
    importance_sampling,
    smc_standard,
    smc_steer,
)
from llmppl.constraints import Text
from llmppl.lm import NextToken

V = 6
END = V - 1


class Do(Model):
    """Program of one step, which is the given function."""

    def __init__(self, do):
        super().__init__()
        self.do = do
        self.trace = []

    def step(self):
        self.do(self)


def stepped(do, seed=0) -> Do:
    """Return a model after one step by hand."""
    model = Do(do)
    model.rng = np.random.default_rng(seed)
    model.step()
    return model


def after_a() -> NextToken:
    return NextToken(tiny_lm(V).context("a"))


# ---- s and finish


def test_s_keeps_its_initial_value_from_init():
    class Begun(Model):
        def __init__(self):
            super().__init__()
            self.s = "Once"

        def step(self):
            self.s += tiny_lm(V).vocab[0]
            self.finish()

    assert Model().s == "" and isinstance(Model().s, Text)
    model = Begun()
    assert model.s == "Once"
    assert [str(particle) for particle in smc_standard(model, 2, seed=0)] == ["Oncea", "Oncea"]
    assert model.s == "Once"


def test_finish_adds_no_weight_and_ends_the_particle():
    model = stepped(lambda self: (self.score(-1.5), self.finish()))
    assert model.finished and not model.cut and model.log_weight == -1.5 and model.death is None
    with pytest.raises(RuntimeError, match="has finished"):
        model.step()


@pytest.mark.parametrize("verb", ["sample", "observe"])
def test_sample_and_observe_after_finish_raise(verb):
    def do(self):
        self.finish()
        self.sample(Bernoulli(0.5)) if verb == "sample" else self.observe(Bernoulli(0.5), True)

    with pytest.raises(RuntimeError, match=rf"{verb}\(\) after the particle has finished: return from step\(\)"):
        stepped(do)


def test_a_model_without_a_step_is_an_error():
    class Empty(Model):
        pass

    with pytest.raises(NotImplementedError, match=r"Empty has no step\(\)"):
        Empty().step()
    with pytest.raises(NotImplementedError, match=r"Empty has no step\(\)"):
        smc_steer(Empty(), 2, 2)


# ---- sample, observe, condition, score


def test_sample_with_a_proposal_weighs_by_p_over_q():
    p, q = Categorical([0.1, 0.2, 0.7]), Categorical([0.6, 0.3, 0.1])
    values = set()
    for seed in range(30):
        model = stepped(lambda self: self.trace.append(self.sample(p, proposal=q)), seed)
        (value,) = model.trace
        values.add(value)
        assert model.log_weight == pytest.approx(math.log([0.1, 0.2, 0.7][value] / [0.6, 0.3, 0.1][value]))
    assert values == {0, 1, 2}
    assert stepped(lambda self: self.sample(p)).log_weight == 0.0


@pytest.mark.parametrize(
    ("dist", "value"),
    [
        (lambda: Bernoulli(0.3), True),
        (lambda: Bernoulli(0.0), True),
        (lambda: Categorical({"x": 0.25, "y": 0.75}), "y"),
        (lambda: Categorical({"x": 0.25, "y": 0.75}), "z"),
        (lambda: Geometric(0.3), 4),
        (lambda: Geometric(0.3, max_value=3), 4),
        (after_a, tiny_lm(V).vocab[2]),
        (after_a, 2),
        (after_a, tiny_lm(V).vocab[END]),
        (after_a, EOS),
        (lambda: after_a().masked(np.arange(V) != 2), 2),
        (lambda: after_a().masked(np.arange(V) != END), EOS),
        (lambda: after_a().string(), "bc"),
        (lambda: after_a().string(), [1, 2, END]),
    ],
)
def test_observe_is_sample_with_a_Delta_as_proposal(dist, value):
    observed = stepped(lambda self: (self.observe(dist(), value), self.finish()))
    sampled = stepped(lambda self: (self.sample(dist(), proposal=Delta(value)), self.finish()))
    assert observed.log_weight == pytest.approx(sampled.log_weight) == pytest.approx(dist().log_prob(value))
    assert (observed.death is None) == (sampled.death is None) == (observed.log_weight > -math.inf)
    assert observed.finished and sampled.finished


def test_observed_tokens_weigh_by_a_plain_forward_pass():
    dist = log_probs_by_hand(tiny_lm(V), [0])
    assert stepped(lambda self: self.observe(after_a(), 2)).log_weight == pytest.approx(dist[2], abs=1e-9)
    assert stepped(lambda self: self.observe(after_a(), EOS)).log_weight == pytest.approx(dist[END], abs=1e-9)


DEADLY = {
    "condition is false": lambda self: self.condition(False),
    "observe: Bernoulli(0) gives True probability 0": lambda self: self.observe(Bernoulli(0.0), True),
    "score(-inf)": lambda self: self.score(-math.inf),
    "sample: Bernoulli(0.5).masked(no value) has no value of positive probability": lambda self: self.sample(
        Bernoulli(0.5).masked([False, False])
    ),
    "sample: Bernoulli(0) gives True, which the proposal drew, probability 0": lambda self: self.sample(
        Bernoulli(0.0), proposal=Delta(True)
    ),
}


@pytest.mark.parametrize("reason", DEADLY)
def test_a_zero_weight_leaves_the_step_and_by_hand_returns(reason):
    def do(self):
        self.trace.append("before")
        DEADLY[reason](self)
        self.trace.append("after")

    model = stepped(do)
    assert model.trace == ["before"]
    assert model.finished and model.log_weight == -math.inf and model.log_twist == 0.0
    assert model.death.startswith(f"{reason} (test_model.py, line ")


def test_the_reason_of_a_death_names_the_line_of_the_program():
    def helper(self):
        self.condition(False)

    model = stepped(helper)
    assert model.death.endswith(f"(test_model.py, line {helper.__code__.co_firstlineno + 1})")


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32(math.inf)])
def test_a_score_of_NaN_or_infinity_is_a_ValueError(value):
    with pytest.raises(ValueError, match=r"score\((nan|inf)\): a log weight is finite, or -inf"):
        stepped(lambda self: self.score(value))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_twist_that_is_not_finite_is_a_ValueError(value):
    with pytest.raises(ValueError, match=r"twist\((nan|inf|-inf)\): a twist is finite"):
        stepped(lambda self: self.twist(value))


def test_except_Exception_does_not_revive_a_dead_particle():
    def do(self):
        try:
            self.condition(False)
        except Exception:
            self.trace.append("caught")
        self.trace.append("after")

    assert stepped(do).trace == []
    posterior = smc_steer(Do(do), 3, 2, seed=0)
    assert len(posterior) == 0 and posterior.log_ml == -math.inf


def test_finally_blocks_of_a_program_run_when_its_particle_dies():
    def do(self):
        try:
            self.condition(False)
        finally:
            self.trace.append("finally")

    assert stepped(do).trace == ["finally"]


def test_verbs_outside_a_step_work_by_hand():
    model = Do(None)
    model.score(-1.0)
    assert model.sample(Delta("x")) == "x"
    model.observe(Bernoulli(0.5), True)
    assert model.log_weight == pytest.approx(-1.0 - math.log(2))
    model.condition(False)
    assert model.finished and model.log_weight == -math.inf


# ---- twist


class Twisting(Model):
    """Program with score -1 in every step, and twists 2 + 0.5, then 4, then 8 in the step that finishes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def step(self):
        self.seen.append((self.log_weight, self.log_twist))
        self.score(-1.0)
        for twist in [(2.0, 0.5), (4.0,), (8.0,)][len(self.s)]:
            self.twist(twist)
        self.s += "x"
        if len(self.s) == 3:
            self.finish()


def test_twists_add_up_and_are_removed_before_the_next_step():
    model = Twisting()
    model.step()
    assert (model.log_weight, model.log_twist) == (-1.0 + 2.5, 2.5)
    model.step()
    assert (model.log_weight, model.log_twist) == (-2.0 + 4.0, 4.0)
    model.step()
    assert (model.log_weight, model.log_twist) == (-3.0, 0.0)
    assert model.seen == [(0.0, 0.0), (-1.0, 0.0), (-2.0, 0.0)]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_max_steps_removes_the_twist(steps):
    for posterior in (
        smc_steer(Twisting(), 2, 2, seed=0, max_steps=steps),
        smc_standard(Twisting(), 2, seed=0, max_steps=steps),
        enumerate_exact(Twisting(), max_steps=steps),
    ):
        assert posterior.log_ml == pytest.approx(-steps)
        for particle in posterior:
            assert particle.log_twist == 0.0 and particle.finished and particle.cut == (steps < 3)


def test_on_step_sees_weights_with_the_twist():
    seen = []

    def on_step(step):
        seen.append(sum(math.exp(p.log_weight - p.log_twist) for p in step.particles))
        np.testing.assert_allclose(step.particles.log_weights, [p.log_weight for p in step.particles])

    smc_steer(Twisting(), 2, 2, seed=0, on_step=on_step)
    np.testing.assert_allclose(seen, np.exp([-1.0, -2.0, -3.0]))


def test_a_twist_decides_which_particles_survive():
    class Half(Model):
        def step(self):
            self.s += "H" if self.sample(Bernoulli(0.5)) else "T"
            self.twist(10.0 if self.s == "H" else -10.0)
            if len(self.s) == 2:
                self.finish()

    survivors = [str(p)[0] for seed in range(200) for p in smc_steer(Half(), 2, 4, expand="copies", seed=seed)]
    assert survivors.count("H") > 0.9 * len(survivors)


# ---- inheritance


class Base(Model):
    def step(self):
        self.score(-1.0)
        self.twist(0.5)
        self.condition(self.s != "die")
        self.s += "base"


class Derived(Base):
    def step(self):
        super().step()
        self.s += "derived"
        self.score(-2.0)
        self.finish()


def test_super_step_belongs_to_the_step_that_calls_it():
    model = Derived()
    model.step()
    assert model.s == "basederived" and model.log_weight == -3.0 and model.finished
    model = Derived()
    model.s = "die"
    model.step()
    assert model.s == "die" and model.log_weight == -math.inf and model.death.startswith("condition is false")


def test_a_step_from_a_mixin_works_as_any_other():
    class Mixin:
        def step(self):
            self.twist(0.5)
            self.condition(self.s != "die")
            self.s += "x"

    class Mixed(Mixin, Model):
        pass

    model = Mixed()
    model.step()
    assert model.s == "x" and model.log_weight == 0.5
    model.s = "die"
    model.step()
    assert model.s == "die" and model.log_weight == -math.inf


# ---- copies


class Thing:
    def __init__(self):
        self.inner = {"deep": [1]}


class Holder(Model):
    """Program with an attribute of every kind. A step changes each differently for each particle."""

    def __init__(self):
        super().__init__()
        lm = tiny_lm(V)
        self.lm, self.context, self.token, self.vocab = lm, lm.context("a"), lm.vocab[1], lm.vocab
        self.dists = [Bernoulli(0.5), Geometric(0.5), after_a(), after_a().masked(np.ones(V, bool)), after_a().string()]
        self.list, self.dict, self.set = [0], {"k": [0]}, {0}
        self.thing, self.array = Thing(), np.zeros(2)
        self.alias = self.list

    def step(self):
        mark = int(self.rng.integers(1 << 30))
        self.list.append(mark)
        self.dict["k"].append(mark)
        self.dict[mark] = mark
        self.set.add(mark)
        self.thing.inner["deep"].append(mark)
        self.array[0] = mark
        assert self.alias is self.list                  # what was one thing in the model is one in its copy
        if len(self.list) == 4:
            self.finish()


def test_copies_share_no_mutable_value():
    model = Holder()
    posterior = smc_steer(model, 4, 3, seed=0)
    assert model.list == [0] and model.dict == {"k": [0]} and model.set == {0}
    assert model.thing.inner == {"deep": [1]} and model.array.tolist() == [0, 0]
    assert len(posterior) == 4
    for particle in posterior:
        marks = particle.list[1:]
        assert len(marks) == 3
        assert particle.dict == {"k": [0, *marks]} | {mark: mark for mark in marks}
        assert particle.set == {0, *marks} and particle.thing.inner == {"deep": [1, *marks]}
        assert particle.array.tolist() == [marks[-1], 0]
        for name in ("list", "dict", "set", "thing", "array"):
            others = [getattr(other, name) for other in [*posterior, model] if other is not particle]
            assert all(getattr(particle, name) is not other for other in others)
    assert len({particle.list[-1] for particle in posterior}) == 4      # each drew for itself


def test_immutable_or_shared_attributes_copy_as_themselves():
    model = Holder()
    for other in (model.copy(), *smc_standard(model, 2, seed=0), copy.deepcopy(model)):
        for name in ("lm", "context", "token", "vocab"):
            assert getattr(other, name) is getattr(model, name), name
        assert all(a is b for a, b in zip(other.dists, model.dists, strict=True))
        assert other.dists is not model.dists


def test_a_copy_has_its_own_random_stream():
    model = Do(lambda self: self.trace.append(self.rng.random()))
    model.rng = np.random.default_rng(0)
    other = model.copy()
    assert other.rng is not model.rng
    before = model.rng.bit_generator.state
    other.step()
    assert model.rng.bit_generator.state == before
    model.step()
    assert model.trace != other.trace


def test_inference_never_changes_the_given_model():
    model = Twisting()
    for run in (
        lambda: smc_steer(model, 3, 2, seed=0),
        lambda: smc_standard(model, 3, seed=0),
        lambda: importance_sampling(model, 3, seed=0),
        lambda: enumerate_exact(model),
    ):
        run()
        assert model.s == "" and model.seen == [] and model.log_weight == 0.0 and model.log_twist == 0.0
        assert not model.finished and model.death is None and model.chooser is None and model.choices == ()


# ---- by hand, and errors


def test_a_model_can_be_stepped_by_hand():
    class Story(Model):
        def __init__(self):
            super().__init__()
            self.context = tiny_lm(V).context("a")

        def step(self):
            token = self.sample(self.transformer(self.context))
            if token == EOS or len(self.context) == 6:
                self.finish()
                return
            self.s += token
            self.context += token

    model = Story()
    while not model.finished:
        model.step()
    assert "a" + model.s == model.context.text and model.log_weight == 0.0


def test_repr_shows_text_weight_and_state():
    model = Twisting()
    assert repr(model) == "<Twisting '' log_weight=0 active>"
    for _ in range(3):
        model.step()
    assert repr(model) == "<Twisting 'xxx' log_weight=-3 finished>"
    assert repr(stepped(lambda self: self.condition(False))) == "<Do '' log_weight=-inf dead>"
    (cut,) = enumerate_exact(Twisting(), max_steps=1)
    assert repr(cut) == "<Twisting 'x' log_weight=-1 cut>"


class Raises(Model):
    """Program that raises in the second step, on heads."""

    def step(self):
        self.s += "x"
        if self.sample(Bernoulli(0.5)) and len(self.s) == 2:
            raise KeyError("no such thing")
        self.condition(len(self.s) < 4)


@pytest.mark.parametrize(
    ("run", "note"),
    [
        (lambda: smc_steer(Raises(), 8, 2, seed=0), r"in particle \d+ at step 2"),
        (lambda: smc_standard(Raises(), 8, seed=0), r"in particle \d+ at step 2"),
        (lambda: importance_sampling(Raises(), 8, seed=0), r"in particle \d+ at step 2"),
        (lambda: enumerate_exact(Raises()), r"in an outcome at step 2"),
    ],
    ids=["steer", "standard", "importance", "exact"],
)
def test_an_exception_of_a_step_notes_particle_and_step(run, note):
    with pytest.raises(KeyError, match="no such thing") as caught:
        run()
    assert len(caught.value.__notes__) == 1 and re.fullmatch(note, caught.value.__notes__[0])
    assert any(entry.name == "step" and entry.path.name == "test_model.py" for entry in caught.traceback)


def test_transformer_requires_a_context():
    with pytest.raises(TypeError, match="wants a Context, lm.context"):
        Model().transformer("a")


def test_a_death_removes_the_twist_outside_a_step_too():
    model = stepped(lambda self: self.twist(1.0))
    assert model.log_twist == model.log_weight == 1.0
    model.condition(False)
    assert model.log_twist == 0.0 and model.log_weight == -math.inf


def test_a_proposal_without_effect_appears_in_the_attribution():
    model = stepped(lambda self: self.sample(Bernoulli(0.5), proposal=Bernoulli(0.5)))
    (told,) = model.attribution.items()
    assert told[0].startswith("sample (test_model.py, line") and told[1] == 0.0
    assert model.copy().attribution is model.attribution
