"""Rows: the same texts, weights and records as the programs that they stand for.

The other computation is `ConstrainedText.step`, particle by particle: `by_programs` switches rows off. Steering draws
from the stream of the run alone, so it must agree for a seed. Copies draw from another stream there, so weights and
records of `Copies` are compared with those of the texts, and their distribution with enumeration.
"""

import contextlib
import dataclasses
import math
from typing import Annotated, Literal

import numpy as np
import pytest
from helpers.common import repetitions
from helpers.tiny import cold_lm, tiny_lm
from pydantic import AfterValidator

import llmppl.inference.rows as rows
import llmppl.inference.smc as smc
from llmppl import (
    CachedTransformer,
    ConstrainedText,
    JsonSchema,
    Regex,
    Rule,
    Vocabulary,
    enumerate_exact,
    importance_sampling,
    smc_standard,
    smc_steer,
)
from llmppl.constraints.machine import Special
from llmppl.inference import SMC, Copies, Distinct, DownSample, Extension, ResampleBelow
from llmppl.inference.rows import Rows
from llmppl.models.choices import replay

V = 6
ATTRIBUTES = (
    "s", "context", "state", "num_tokens", "ended", "finished", "cut", "death", "choices", "_before_", "_limit_",
    "_refused_", "_power_", "max_tokens",
)  # fmt: skip


def text(*arguments, **options):
    return ConstrainedText(tiny_lm(V), "a", *arguments, **options)


PROGRAMS = {
    "free": lambda: text(max_tokens=4),
    "free, eos": lambda: text(max_tokens=4, end="eos"),
    "free, prefix": lambda: text(max_tokens=4, end="prefix"),
    "min_tokens": lambda: text(min_tokens=2, max_tokens=4),
    "stop": lambda: text(max_tokens=5, stop=["b", "ca"]),
    "early stop": lambda: text(min_tokens=2, max_tokens=5, stop=["b"]),
    "regex": lambda: text(Regex("(ab|c)( (a|b)+)?"), max_tokens=5),
    "regex, prefix": lambda: text(Regex("(ab|c)( (a|b)+)?"), max_tokens=5, end="prefix"),
    "regex, eos": lambda: text(Regex("(ab|c)( (a|b)+)?"), max_tokens=5, end="eos"),
    "regex, cut": lambda: text(Regex("[abc]{3,}"), max_tokens=4, complete=False),
    "regex, min_tokens": lambda: text(Regex("[abc]{1,4}"), min_tokens=2, max_tokens=4),
    "regex, stop": lambda: text(Regex("[abc ]{1,4}"), max_tokens=5, stop="c"),
    "list": lambda: text(["ab", "a", "c b"]),
    "machine": lambda: text("a" + (Regex("b|c") | "ab").times(1, 2), max_tokens=5),
    "rule": lambda: text(Regex("[abc]{1,4}"), max_tokens=4, rule=Rule(1.5, 4, 0.9)),
    "dead end": lambda: text(["ab", "b"], rule=Rule(top_k=1)),
    "greedy": lambda: text(Regex("[abc]{1,4}"), max_tokens=4, rule=Rule(temperature=0)),
    "too long": lambda: ConstrainedText(tiny_lm(V), "a" * 28, Regex("[abc]*"), complete=False, end="eos"),
    "one text": lambda: text(["ab c"]),
}


@pytest.fixture
def by_programs(monkeypatch):
    """Return a function that runs an algorithm without rows."""

    def run(algorithm):
        with monkeypatch.context() as patch:
            patch.setattr(rows, "is_row", lambda program: False)
            return algorithm()

    return run


step = smc.SMC._next


def agree(found, programs):
    assert found.texts == programs.texts
    np.testing.assert_allclose(found.log_weights, programs.log_weights, atol=1e-9)
    for ours, theirs in zip(found, programs, strict=True):
        for name in ATTRIBUTES:
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.attribution == pytest.approx(theirs.attribution, abs=1e-9)
    for ours, theirs in zip(found.steps, programs.steps, strict=True):
        for each in dataclasses.fields(ours):
            column = np.asarray(getattr(ours, each.name), float)
            np.testing.assert_allclose(column, getattr(theirs, each.name), atol=1e-9, err_msg=each.name)
    assert found.deaths == programs.deaths
    assert found.limit == programs.limit


@pytest.mark.filterwarnings("ignore:step")
@pytest.mark.parametrize("power", [1.0, 0.5])
@pytest.mark.parametrize("name", PROGRAMS)
def test_steering_rows_is_steering_their_programs(name, power, by_programs):
    program = PROGRAMS[name]()
    for seed in range(repetitions(20, 4)):
        for N, K in ((1, 3), (4, 2)):

            def steer(N=N, K=K, seed=seed):
                return smc_steer(program, N, K, seed=seed, power=power)

            agree(steer(), by_programs(steer))


@pytest.mark.filterwarnings("ignore:step")
@pytest.mark.parametrize("expand", [Copies(6), Copies(3, 2), Copies(3, 2, merge=True)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_copies_of_rows_have_the_weights_of_their_programs(name, expand):
    """The weight of a text that was never resampled is 1 / N over that of its choices, replayed by its program."""
    program = PROGRAMS[name]()
    for seed in range(repetitions(20, 3)):
        run = SMC(program, expand, ResampleBelow(10**6, 0.0), seed=seed)
        found = run.run()
        for particle in found:
            again = replay(program, particle.choices)
            same = [each for each in found if each.choices == particle.choices]
            total = np.logaddexp.reduce([each.log_weight for each in same])
            copies = expand.N * expand.K ** len(run.records)
            assert total <= again.log_weight + 1e-9
            assert total - again.log_weight >= -math.log(copies) - 1e-9
            for attribute in set(ATTRIBUTES) - {"_power_"}:
                assert getattr(particle, attribute) == getattr(again, attribute), attribute
            assert particle.attribution == pytest.approx(again.attribution, abs=1e-9)


@pytest.mark.parametrize("name", ["regex", "stop", "regex, prefix", "rule", "machine", "regex, min_tokens"])
@pytest.mark.parametrize("expand", [Copies(3), Copies(2, 2), Copies(2, 2, merge=True)])
def test_mean_weights_of_copied_rows_are_those_of_enumeration(name, expand):
    """Mean total weight of each text within 4.5 of its standard errors, over independent runs."""
    program = PROGRAMS[name]()
    truth = {}
    for particle in enumerate_exact(program):
        key = particle.s, particle.cut
        truth[key] = truth.get(key, 0.0) + math.exp(particle.log_weight)
    num = repetitions(3000, 300)
    sums = {key: np.zeros(num) for key in truth}
    for seed in range(num):
        for particle in SMC(program, expand, DownSample(4), seed=seed).run():
            sums[particle.s, particle.cut][seed] += math.exp(particle.log_weight)
    for key, column in sums.items():
        error = column.std(ddof=1) / math.sqrt(num)
        if np.count_nonzero(column) >= 20:
            assert abs(column.mean() - truth[key]) < 4.5 * error, key
    total = sum(sums.values())
    assert abs(total.mean() - sum(truth.values())) < 4.5 * max(total.std(ddof=1) / math.sqrt(num), 1e-9)


@pytest.mark.parametrize("expand", [Distinct(4, 3), Copies(4)])
def test_looking_at_particles_between_steps_changes_nothing(expand):
    program = PROGRAMS["regex, prefix"]()
    unseen = SMC(program, expand, ResampleBelow(4, 0.5), seed=1).run()
    run = SMC(program, expand, ResampleBelow(4, 0.5), seed=1)
    for step in run:
        assert [each.s for each in run.particles] == run.population.texts()
        assert sorted(map(str, step.particles)) == sorted(run.population.texts())
    found = run.posterior()
    assert found.texts == unseen.texts
    np.testing.assert_allclose(found.log_weights, unseen.log_weights, atol=1e-12)


def test_changes_of_particles_between_steps_take_effect():
    run = SMC(PROGRAMS["free"](), Copies(4), ResampleBelow(4, 0.0), seed=0)
    next(run)
    first, second, third, _ = run.particles
    first.finish()
    second.score(-1.5)
    third.mark = "mine"
    before = second.log_weight, first.s
    step = next(run)
    assert step.candidates[0] is not first
    assert (step.candidates[0].s, step.candidates[0].finished) == (before[1], True)
    assert step.candidates[1].log_weight == pytest.approx(before[0])
    assert any("score (test_rows.py" in name for name in step.candidates[1].attribution)
    assert getattr(step.candidates[2], "mark", "") == "mine"
    assert isinstance(run.population, Rows)
    run.particles[1].rule = Rule(top_k=2)                   # rows have one rule
    next(run)
    assert not isinstance(run.population, Rows)


def test_survivors_of_a_step_are_its_candidates():
    for step in SMC(PROGRAMS["regex"](), Distinct(4, 3), DownSample(4), seed=0):
        for place, particle in zip(step.ancestors, sorted(step.particles, key=id), strict=True):
            assert any(particle is each for each in step.candidates), place


def test_an_interrupted_step_leaves_the_rows_before_it():
    lm = cold_lm(V)
    program = ConstrainedText(lm, "a", Regex("[abc]{2,6}"), max_tokens=6)
    run = SMC(program, Distinct(3, 2), DownSample(3), seed=0)
    next(run)
    before = run.population.texts()
    forward = lm.engine.run

    def interrupted(batch):
        raise KeyboardInterrupt

    lm.engine.run = interrupted
    with pytest.raises(KeyboardInterrupt) as caught:
        next(run)
    lm.engine.run = forward
    assert sorted(caught.value.particles.texts) == sorted(before)
    assert (run.t, len(run.records)) == (1, 1)


def test_rows_share_rounds_and_run_no_token_twice():
    lm = cold_lm(V)
    program = ConstrainedText(lm, "a", Regex("[abc]{4}"), max_tokens=4)
    steps = len(smc_standard(program, 50, seed=0).steps)
    assert lm.stats.rounds <= steps + 1
    assert lm.stats.tokens <= 1 + len(lm.trie)


def test_special_tokens_are_symbols_of_rows(by_programs):
    lm = CachedTransformer(lambda ids: np.zeros(4), Vocabulary([b"x", b"y", b"", b""], eos_ids=[3], special_ids=[2]))
    program = ConstrainedText(lm, "x", Regex("x|y") + Special(2) + Regex("y"), max_tokens=5)

    def steer():
        return smc_steer(program, 4, 3, seed=0)

    agree(steer(), by_programs(steer))


def not_one(value):
    if value == 1:
        raise ValueError("one is refused")
    return value


SCHEMAS = [
    JsonSchema({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}),
    list[Literal["yes", "no"]],
    Annotated[Literal[1, 2], AfterValidator(not_one)],
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=["object", "list", "refused"])
def test_records_of_schemas_are_those_of_their_programs(schema, by_programs):
    program = ConstrainedText(CachedTransformer.from_pretrained(), "A record: ", schema, max_tokens=30)

    def steer():
        return smc_steer(program, 4, 3, seed=0)

    agree(steer(), by_programs(steer))


def test_runs_with_one_stream_are_independent_and_short_runs_begin_long_ones():
    program = PROGRAMS["free"]()
    rng = np.random.default_rng(0)
    first, second = (importance_sampling(program, 30, rng=rng) for _ in range(2))
    assert sorted(each.choices for each in first) != sorted(each.choices for each in second)
    short, long = (importance_sampling(program, N, seed=1) for N in (5, 30))
    assert {each.choices for each in short} <= {each.choices for each in long}
    assert len({each.choices for each in long}) > 5


def test_particles_of_different_rules_run_as_programs():
    run = SMC(PROGRAMS["regex"](), Copies(2), ResampleBelow(2), seed=0)
    assert isinstance(run.population, Rows)
    other = run.particles
    other[1] = PROGRAMS["stop"]()
    run.particles = other
    assert not isinstance(run.population, Rows)


def test_an_expansion_of_the_user_gets_programs():
    class OneCopy:
        num_starts = 4

        def __call__(self, run):
            found = [Extension(each, i, i, moving=not each.finished) for i, each in enumerate(run.particles)]
            run.advance([each.particle.step for each in found if each.moving])
            return found

    run = SMC(PROGRAMS["regex"](), Copies(4), ResampleBelow(4), seed=0)
    next(run)
    run.expand = OneCopy()
    next(run)
    assert not isinstance(run.population, Rows)
    assert {each.num_tokens for each in run.particles if not each.finished} <= {2}


def test_resumed_texts_run_as_rows(tmp_path):
    path = tmp_path / "run.ckpt"
    kinds = []

    def interrupt(step):
        if step.index == 2:
            raise KeyboardInterrupt

    for on_step in (interrupt, None):
        with contextlib.suppress(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
            patch.setattr(smc.SMC, "_next", lambda run: kinds.append(type(run.population)) or step(run))
            smc_steer(PROGRAMS["regex"](), 4, 3, seed=0, checkpoint=path, every=1, on_step=on_step, power=0.5)
    assert set(kinds) == {Rows}
