"""Streams of a service: the pieces of a call are the text of its result, also where a run holds other runs."""

import random
import time

import numpy as np
import pytest
from helpers.common import HANG, repetitions
from helpers.tiny import table_lm, tiny_lm

from llmppl import (
    Categorical,
    Model,
    Regex,
    Rule,
    batched,
    beam_search,
    enumerate_exact,
    generate,
    repeat,
    smc_steer,
)
from llmppl.inference import SMC, Distinct, DownSample
from llmppl.models.programs import StopStrings
from llmppl.serving import Service
from llmppl.tasks import run_many

LM = tiny_lm(8)                                         # a, b, c, " ", ab, d, bc, EOS
HALVES = [b"a", b"\xc3", b"\xa9", b"\xe6\x97", b"\xa5", "\ufffd".encode(), b"\xa9a"]      # tokens of "é" and "日"
PARTS = {
    "letters": ["a", "b", "c", " ", "d"],
    "bytes": ["a", "é", "日", "\ufffd"],
    "embedded": [" ", "a", "e", "the", " was", " a", " little", " girl", " named", ".", ","],
}
METHODS = ["sample", "greedy", "beam", "best_of", "importance", "steer", "auto"]
SIZES = {"beam": ("N", "K"), "best_of": ("N",), "importance": ("N",), "steer": ("N", "K")}


class Inner(Model):
    """A program of two letters, which a step of another program runs."""

    coin = Categorical({"b": 0.5, "dd": 0.5})

    def step(self):
        self.s += self.sample(self.coin)
        if len(self.s) > 1:
            self.finish()


def infers(text):
    """Return True, after runs of other programs."""
    assert len(smc_steer(Inner(), 2, 1, seed=len(text)).texts[0]) > 1
    assert generate(LM, "b", Regex("[ab]{2}"), method="steer", N=1, K=1, seed=1).ended == "complete"
    return True


def random_call(rng, letters):
    """Return the arguments of a random call of `generate`."""
    method = rng.choice(METHODS)
    options = {name: rng.randint(1, 5) for name in SIZES.get(method, ())}
    if rng.random() < 0.7:
        stops = ["".join(rng.choices(letters, k=rng.choice([1, 1, 2, 2, 3, 4, 6]))) for _ in range(rng.randint(1, 4))]
        options["stop"] = rng.choice([stops[0], stops])
        constraint = rng.choice([None, None, infers])
    else:
        constraint = rng.choice([None, Regex("[abc ]{1,9}"), Regex("(ab|é|d)*c"), ["ab", "abc", "b"], infers])
    if constraint is infers:
        options["max_tokens"] = rng.randint(1, 4)
    elif not isinstance(constraint, list):
        options["max_tokens"] = rng.randint(4, 24)
    if rng.random() < 0.2 and constraint is None:
        options["rule"] = Rule(temperature=rng.choice([0.5, 2.0]))
    return constraint, {"method": method, "seed": rng.randrange(1000), **options}


def random_model():
    """Return a language model whose tokens are parts of characters."""
    return table_lm(lambda ids: np.random.default_rng([*ids, 7]).normal(size=len(HALVES) + 1), HALVES)


@pytest.mark.parametrize("kind", PARTS)
def test_random_streams_are_the_text_of_their_results(kind, embedded):
    lm = {"letters": LM, "bytes": random_model(), "embedded": embedded}[kind]
    rng, num_stopped = random.Random(kind), 0
    with Service(lm, together=4) as service:
        for _ in range(repetitions(350, 15)):
            constraint, options = random_call(rng, PARTS[kind])
            try:
                call = service.generate("a", constraint, **options)
                pieces = [*call.texts()]
            except ValueError:                          # no text of this model satisfies the constraint
                continue
            assert "".join(pieces) == call.result(HANG).text, (constraint, options)
            num_stopped += call.result().ended.startswith("stop")
    assert num_stopped


def test_the_first_stop_string_among_many_ends_a_text():
    rng = random.Random(0)
    for _ in range(repetitions(3000, 150)):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 9))]
        data, num_new = "".join(rng.choices("ab", k=rng.randint(1, 12))).encode(), rng.randint(1, 4)
        ends = [(end, start) for end in range(max(len(data) - num_new, 0) + 1, len(data) + 1) for start in range(end)]
        truth = min([each for each in ends if data[each[1] : each[0]].decode() in stops], default=None)
        found = StopStrings(stops).first(data, min(num_new, len(data)))
        assert found == (truth and truth[::-1]), (stops, data, num_new)
        text, num_settled = data.decode(), rng.randrange(len(data))
        held = [n for n in range(num_settled, len(text)) if any(stop.startswith(text[n:]) for stop in stops)]
        assert StopStrings(stops).settled(text, num_settled) == text[: min(held, default=len(text))]


def test_80_000_stop_strings_cost_no_more_than_a_few():
    stops = [f"{i:05d}zz" for i in range(80_000)] + ["bc"]
    start = time.process_time()
    found = generate(LM, "a", stop=stops, method="importance", N=32, max_tokens=30, seed=1)
    seconds = time.process_time() - start
    few = generate(LM, "a", stop="bc", method="importance", N=32, max_tokens=30, seed=1)
    assert [*map(str, found.posterior)] == [*map(str, few.posterior)]
    assert seconds < 5                                  # 0.9 on two cores; a search for each string takes 40


# ---- runs inside of runs


class Outer(Model):
    """A program of five letters, whose steps run programs of other letters."""

    def step(self):
        self.s += "x"
        self.inner = sorted(smc_steer(Inner(), 4, 2, seed=len(self.s)).texts)
        if len(self.s) == 5:
            self.finish()


def inner_texts(n):
    return sorted(smc_steer(Inner(), 4, 2, seed=n).texts)


ALGORITHMS = {
    "steer": lambda: smc_steer(Outer(), 2, 2, seed=0),
    "beam": lambda: [beam.particle for beam in beam_search(Outer(), 2, 2)],
    "exact": lambda: enumerate_exact(Outer(), max_steps=2),
    "by hand": lambda: next(iter(SMC(Outer(), Distinct(2, 2), DownSample(2), seed=0))).particles,
    "repeat": lambda: repeat(lambda rng: smc_steer(Outer(), 2, 2, rng=rng), 2, seed=0).runs[1],
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_limits_of_a_task_do_not_reach_runs_in_its_steps(algorithm):
    found = []

    def run(task, rng):
        found[:] = ALGORITHMS[algorithm]()
        return smc_steer(Outer(), 1, 1, rng=rng)

    for limit in ({"timeout": 1e-6}, {"budget": 1}):
        [result] = run_many(run, ["a"], seed=0, **limit)
        assert result.error is None
        for particle in [*found, *result.particles]:
            assert particle.inner == inner_texts(len(particle.s)) and all(len(text) > 1 for text in particle.inner)
    if algorithm in ("steer", "beam", "repeat"):        # whose own limit is that of the task
        [result] = run_many(run, ["a"], seed=0, timeout=1e-6)
        assert {len(particle.s) for particle in [*found, *result.particles]} == {1}


def test_callbacks_and_batched_functions_of_a_task_infer_without_its_limits():
    longest = batched(lambda texts: [max(map(len, inner_texts(1))) for _ in texts])
    seen = []

    class Scored(Outer):
        def step(self):
            super().step()
            self.score(longest(self.s))

    def run(task, rng):
        return smc_steer(Scored(), 2, 2, rng=rng, on_step=lambda step: seen.append(inner_texts(step.index)))

    [result] = run_many(run, ["a"], seed=0, timeout=1e-6)
    longest_alone = max(map(len, inner_texts(1)))
    assert result.error is None and seen == [inner_texts(1)]
    assert [particle.attribution for particle in result.particles] and result.particles[0].log_joint == longest_alone
