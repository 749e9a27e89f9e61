"""Choosers: the notes of a particle, its chooser, and replays, which give equal particles."""

import copy
import pickle

import numpy as np
import pytest
from helpers.programs import PROGRAMS, Coins, Pauses, Rejects, Streams, constrained, what_the_program_made
from hypothesis import given
from hypothesis import strategies as st

from llmppl import (
    Bernoulli,
    Categorical,
    Geometric,
    Model,
    Uniform,
    beam_search,
    enumerate_exact,
    importance_sampling,
    smc_standard,
    smc_steer,
)
from llmppl.distributions import Proposal
from llmppl.inference import SMC, Copies, Distinct, DownSample
from llmppl.models import choices
from llmppl.models.choices import Choice, Sampled, State, replay, spawned, stream_of

ALGORITHMS = {
    "distinct": lambda model, seed: smc_steer(model, 5, 3, seed=seed, max_steps=9),
    "merged": lambda model, seed: smc_steer(model, 5, 3, expand="merged", seed=seed, max_steps=9),
    "copies": lambda model, seed: smc_steer(model, 5, 3, expand="copies", seed=seed, max_steps=4),
    "standard": lambda model, seed: smc_standard(model, 8, seed=seed, ess_threshold=1.0, max_steps=9),
    "importance": lambda model, seed: importance_sampling(model, 8, seed=seed, max_steps=9),
    "exact": lambda model, seed: enumerate_exact(model, max_steps=3),
    "beam": lambda model, seed: [beam.particle for beam in beam_search(model, 4, 3, max_steps=9)],
}
DIRECT = {"Streams", "Lends"}                           # these cannot be enumerated


def same(replayed, particle):
    assert what_the_program_made(replayed) == what_the_program_made(particle)
    assert replayed.choices == particle.choices
    assert replayed.finished == particle.finished or particle.cut
    assert replayed.log_weight - replayed.log_twist == pytest.approx(sum(particle.attribution.values()), abs=1e-9)
    assert replayed.log_twist == particle.log_twist or particle.cut


@pytest.mark.parametrize("run", ALGORITHMS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_replay_reproduces_the_particle(name, run):
    if run in ("exact", "beam") and name in DIRECT:
        pytest.skip("it cannot be enumerated")
    model = PROGRAMS[name]()
    for seed in range(1 if run in ("exact", "beam") else 4):
        for particle in ALGORITHMS[run](model, seed):
            same(replay(model, particle.choices), particle)


@pytest.mark.parametrize("expand", [Distinct(4, 3), Copies(4, 3), Copies(4, 3, merge=True)], ids=repr)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_candidate_can_be_replayed_including_the_dead(name, expand):
    model = PROGRAMS[name]()
    for step in SMC(model, expand, DownSample(4), seed=1):
        for candidate in step.candidates:
            again = replay(model, candidate.choices)
            assert again.s == candidate.s and again.attribution == pytest.approx(candidate.attribution)
            assert again.death == candidate.death and again.choices == candidate.choices
        if step.index == 6:
            break


class Written(Model):
    """Program given as data: a list of statements for each step."""

    def __init__(self, steps):
        super().__init__()
        self.steps, self.t = steps, 0

    def step(self):
        for kind, number in self.steps[self.t]:
            if kind == "finite":
                self.s += str(self.sample(Uniform(0, number)))
            elif kind == "weighted":
                self.s += str(self.sample(Uniform(0, number).where(lambda value: value % 2 == 0)))
            elif kind == "endless":
                self.s += str(self.sample(Geometric(1 / (1 + number))))
            elif kind == "stream":
                self.s += str(self.rng.integers(number + 1))
            else:
                self.score(-number / 4)
        self.t += 1
        if self.t == len(self.steps):
            self.finish()


KINDS = st.sampled_from(["finite", "weighted", "endless", "stream", "score"])


@given(st.lists(st.lists(st.tuples(KINDS, st.integers(1, 5)), max_size=5), min_size=1, max_size=4), st.integers(0, 99))
def test_a_replay_of_any_program_reproduces_the_particle(steps, seed):
    model = Written(steps)
    for run in ("distinct", "merged", "copies", "importance"):
        for particle in ALGORITHMS[run](model, seed):
            same(replay(model, particle.choices), particle)


def test_choices_are_grouped_by_step_with_the_weight_of_a_weighted_draw():
    model = Rejects()
    model.rng = np.random.default_rng(0)
    while not model.finished:
        model.step()
    assert [len(step) for step in model.choices] == [1] * 5
    assert "".join(choice.value for (choice,) in model.choices) == model.s
    total = sum(choice.log_w for (choice,) in model.choices[::2])       # of those without a target of their own
    assert total in [pytest.approx(log_w) for log_w in model.attribution.values()]
    paused = replay(Pauses(), ((), (Choice(3, 0.0),), ()))
    assert paused.s == "3" and paused.choices == ((), (Choice(3, 0.0),), ())


def test_copies_share_their_past_choices_and_continue_independently():
    model = Coins()
    model.rng = np.random.default_rng(3)
    model.step()
    twin = model.copy()
    assert twin._noted_ is model._noted_ and copy.deepcopy(model._noted_) is model._noted_
    before = model.choices
    twin.rng = np.random.default_rng(4)
    twin.step()
    assert model.choices == before and twin.choices[: len(before)] == before and len(twin.choices) == 2


class Nothing(Proposal):
    """Proposal of a value with weight 0: its measure is 0 everywhere."""

    def propose(self, rng):
        return "x", -np.inf

    def log_measure(self, value):
        return -np.inf

    def __repr__(self):
        return "Nothing()"


def test_a_particle_that_died_of_a_weight_of_zero_is_replayed():
    class Dies(Model):
        def step(self):
            self.s += self.sample(Uniform(["a", "b"]))
            self.score(-0.5)
            self.sample(Nothing())

    (step,) = SMC(Dies(), Copies(4, 1), DownSample(4), seed=1)
    for candidate in step.candidates:
        assert candidate.choices[0][1:] == (Choice("x", -np.inf),)
        again = replay(Dies(), candidate.choices)
        assert (again.s, again.choices, again.death) == (candidate.s, candidate.choices, candidate.death)
        assert again.finished and again.log_weight == -np.inf and again.attribution == candidate.attribution


def test_a_replay_continues_with_the_given_stream():
    model = Streams()
    particle = Streams()
    particle.rng = np.random.default_rng(0)
    particle.step()
    state = particle.rng.bit_generator.state
    rng = np.random.default_rng(0)
    again = replay(model, particle.choices, rng)
    rng.bit_generator.state = state
    particle.step()
    again.step()
    assert again.s == particle.s


def test_a_stream_of_another_bit_generator_is_restored():
    particle = Streams()
    particle.rng = np.random.Generator(np.random.MT19937(1))
    particle.step()
    assert isinstance(particle.choices[0][0], State)
    assert replay(Streams(), particle.choices).s == particle.s


class Changed(Model):
    how = ""

    def step(self):
        if self.how == "draws" and self.s:
            self.rng.random()
        if self.how != "skips" or not self.s:
            self.s += self.sample(Categorical([0.5, 0.5], "xy" if self.how == "renamed" and self.s else "ab"))
        if self.how == "more":
            self.sample(Bernoulli(0.5))
        if self.how == "early" and len(self.s) == 2:
            return self.finish()
        self.sample(Uniform(0, 9))
        if len(self.s) == 3:
            self.finish()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("renamed", r"at step 2, choice 1, the program samples from Categorical\(.*, which does not give '[ab]'"),
        ("more", r"at step 1, choice 2, the program samples from Bernoulli\(0.5\), which does not give \d"),
        ("skips", r"at step 2, choice 1, the program samples from Uniform\(0, 9\), which does not give '[ab]'"),
        ("draws", r"at step 2, choice 1, the program draws from self.rng, where Choice\(value='[ab]'"),
        ("early", "it ends at step 2 of 3|at step 2, choice 2, the program goes on without Choice"),
    ],
)
def test_a_changed_program_is_refused_with_the_step_and_the_choice(how, message):
    particle = Changed()
    particle.rng = np.random.default_rng(3)
    while not particle.finished:
        particle.step()
    changed = Changed()
    changed.how = how
    assert replay(Changed(), particle.choices).s == particle.s
    with pytest.raises(ValueError, match=f"the program makes other choices: ({message})"):
        replay(changed, particle.choices)


def test_a_program_that_makes_fewer_choices_is_refused():
    class Less(Model):
        def step(self):
            self.finish()

    with pytest.raises(ValueError, match=r"at step 1, choice 1, the program goes on without Choice\(value=1"):
        replay(Less(), ((Choice(1, 0.0),),))
    with pytest.raises(ValueError, match="at step 1, choice 1, the program goes on without State"):
        replay(Less(), ((State("PCG64", 1, (), 4),),))
    with pytest.raises(ValueError, match="it ends at step 1 of 2"):
        replay(Less(), ((), ()))


def test_a_replay_batches_its_tokens_and_leaves_the_model_unchanged():
    model = constrained()
    (particle, *_) = smc_steer(model, 4, 3, seed=0)
    again = replay(model, particle.choices)
    assert again.s == particle.s and model.s == "" and model.choices == () and model.chooser is None
    assert isinstance(again.chooser, Sampled)


def test_streams_are_recorded_only_if_a_program_draws_from_them():
    for particle in smc_steer(constrained(), 4, 3, seed=0):
        assert not any(isinstance(each, State) for step in particle.choices for each in step)


# ---- streams


def test_streams_equal_those_that_numpy_spawns():
    for kind in (np.random.PCG64, np.random.Philox, np.random.MT19937):
        streams, family = spawned(np.random.Generator(kind(7))), np.random.Generator(kind(7)).spawn(1)[0]
        for mine, numpys in zip([next(streams) for _ in range(4)], family.spawn(4), strict=True):
            made = stream_of(pickle.loads(pickle.dumps(mine)))
            assert type(made.bit_generator) is kind and made.random() == numpys.random() == stream_of(mine).random()


def test_a_stream_is_made_at_its_first_draw_and_has_bounded_ancestry(monkeypatch):
    made, make = [], stream_of
    monkeypatch.setattr(choices, "stream_of", lambda state: made.append(make(state)) or made[-1])

    class Draws(Model):
        def step(self):
            self.s += "ab"[self.sample(Bernoulli(0.5))]
            if self.further:
                self.s += "ab"[self.sample(Bernoulli(0.5))]

    Draws.further = False
    for K in (2, 3):
        smc_steer(Draws(), 5, K, seed=0, max_steps=8)
    assert not made
    Draws.further = True
    smc_steer(Draws(), 2, 2, seed=0, max_steps=20)
    depths = [len(rng.bit_generator.seed_seq.spawn_key) for rng in made]
    assert 20 <= len(made) <= 20 * 4 and max(depths) == 2


