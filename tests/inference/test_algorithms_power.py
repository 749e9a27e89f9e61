"""`power` and `log_joint`, compared with the weights of an enumeration without them; limits in time and tokens."""

import functools
import math

import pytest
from helpers.common import slow
from helpers.exactness import ALGORITHMS, CASES, check
from helpers.tiny import add_up, tiny_lm

from llmppl import SMC, ConstrainedText, Model, Regex, beam_search, enumerate_exact, smc_standard, smc_steer
from llmppl.inference import Distinct, DownSample
from llmppl.models.choices import Choice

FEW = ["infilling with a prior and EOS", "where, second choice", "twist by log mass"]
NAMES = [*FEW, *slow(*(name for name in CASES if name not in FEW))]
STEER, STANDARD, IMPORTANCE = list(ALGORITHMS)[2], list(ALGORITHMS)[4], list(ALGORITHMS)[3]


def choices_of(particle):
    return tuple(choice.value for step in particle.choices for choice in step if isinstance(choice, Choice))


@functools.cache
def joints_of(name):
    """The log joint of each path of choices: the weights of an enumeration."""
    return {choices_of(particle): particle.log_weight for particle in enumerate_exact(CASES[name].model())}


@pytest.mark.parametrize("power", [0.5, *slow(2.0)])
@pytest.mark.parametrize("name", CASES)
def test_enumeration_raises_the_joint_probability_of_each_path_to_the_power(name, power):
    found = enumerate_exact(CASES[name].model(), power=power)
    expected = {path: power * log_joint for path, log_joint in joints_of(name).items()}
    assert {choices_of(particle): particle.log_weight for particle in found} == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("algorithm", [STEER, *slow(STANDARD, IMPORTANCE, list(ALGORITHMS)[0])])
@pytest.mark.parametrize("name", NAMES)
def test_weights_under_a_power_are_right_on_average(name, algorithm):
    key = CASES[name].key
    truth = add_up((key(each), 0.6 * each.log_weight) for each in enumerate_exact(CASES[name].model()))
    check(name, functools.partial(ALGORITHMS[algorithm], power=0.6), seed=3 * len(name) + len(algorithm), truth=truth)


@pytest.mark.parametrize("algorithm", [STEER, STANDARD])
@pytest.mark.parametrize("name", CASES)
def test_the_log_joint_of_a_particle_is_that_of_the_enumeration(name, algorithm):
    found = ALGORITHMS[algorithm](CASES[name].model(), seed=1, power=1.5)
    assert len(found) > 0
    for particle in found:
        assert particle.log_joint == pytest.approx(joints_of(name)[choices_of(particle)], abs=1e-9)
    assert found.likeliest.log_joint == max(particle.log_joint for particle in found)


def test_beams_have_the_log_joint_of_their_particles():
    for beam in beam_search(CASES["soft"].model(), 4, 4):
        assert beam.particle.log_joint == pytest.approx(beam.log_joint, abs=1e-9)


def test_a_resumed_run_keeps_its_power_and_log_joints(tmp_path):
    def run(**options):
        return smc_steer(CASES["predicate"].model(), 4, 2, seed=3, power=2.0, **options)

    whole, path = run(), tmp_path / "run.ckpt"
    run(max_steps=2, checkpoint=path, every=1)
    again = run(checkpoint=path)
    assert again.log_weights == pytest.approx(whole.log_weights)
    assert [p.log_joint for p in again] == pytest.approx([p.log_joint for p in whole])
    with pytest.raises(ValueError, match="power"):
        smc_steer(CASES["predicate"].model(), 4, 2, seed=3, checkpoint=path)


@pytest.mark.parametrize("power", [0, -1, math.inf, math.nan])
def test_a_power_is_a_positive_number(power):
    with pytest.raises(ValueError, match="power must be"):
        smc_standard(CASES["soft"].model(), 2, power=power)


# ---- limits


class Endless(Model):
    def __init__(self):
        super().__init__()
        self.context = tiny_lm(6).context("a")

    def step(self):
        token = self.sample(self.context.next_token())
        self.s += token
        self.context = tiny_lm(6).context("a") + int(token)


@pytest.mark.parametrize("search", [lambda **o: smc_standard(Endless(), 3, seed=0, **o),
                                    lambda **o: smc_steer(Endless(), 3, 2, seed=0, **o),
                                    lambda **o: beam_search(Endless(), 2, 2, **o)])  # fmt: skip
def test_a_run_ends_after_the_step_that_reaches_its_time(search):
    found = search(timeout=1e-6)
    assert found.limit == "timeout" and found.best.cut and len(found.best.choices) == 1


def test_a_limit_can_raise_with_the_particles_of_the_last_step():
    with pytest.raises(TimeoutError, match="reached its timeout") as raised:
        smc_steer(Endless(), 3, 2, seed=0, timeout=1e-6, on_timeout="raise")
    returned = smc_steer(Endless(), 3, 2, seed=0, timeout=1e-6)
    assert [*map(str, raised.value.particles)] == [*map(str, returned)] and raised.value.particles[0].cut
    with pytest.raises(ValueError, match="on_timeout"):
        smc_steer(Endless(), 3, 2, timeout=1.0, on_timeout="stop")


def test_a_cancelled_run_ends_after_its_step():
    run = SMC(Endless(), Distinct(3, 2), DownSample(3), seed=0)
    next(run)
    next(run)
    run.cancel()
    assert [*run] == []
    same = smc_steer(Endless(), 3, 2, seed=0, max_steps=2)
    assert run.limit == "cancelled" and [*map(str, run.posterior())] == [*map(str, same)]
    run = SMC(Endless(), Distinct(3, 2), DownSample(3), seed=0)
    found = run.run(observers=[lambda run, record, candidates: run.t == 2 and run.cancel()])
    assert found.limit == "cancelled" and [*map(str, found)] == [*map(str, same)]


def test_a_run_ends_after_the_step_that_reaches_its_tokens():
    def program():
        return ConstrainedText(tiny_lm.__wrapped__(6), "a", Regex("[abc ]{20}"), max_tokens=20)

    whole = smc_steer(program(), 3, 2, seed=0)
    some = smc_steer(program(), 3, 2, seed=0, budget=whole.stats.tokens // 2)
    assert (whole.limit, some.limit) == ("", "budget") and all(particle.cut for particle in some)
    assert whole.stats.tokens / 2 - 1 <= some.stats.tokens <= whole.stats.tokens / 2 + 7
    assert [str(p) for p in some] == [str(p) for p in smc_steer(program(), 3, 2, seed=0, max_steps=len(some.steps))]
    assert smc_steer(program(), 3, 2, seed=0, budget=10**6).limit == ""
