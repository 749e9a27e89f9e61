"""Every exception that is raised in a run reaches the caller, and the language model is right afterwards.

A language model fails at its k-th call, for every k; a distribution fails where its probabilities are asked for. No
algorithm may run the step again as if nothing had been.
"""

import contextlib
import math

import numpy as np
import pytest
from helpers.samplers import SAMPLERS, is_posterior
from helpers.tiny import table_lm

from llmppl import Categorical, Model, beam_search, enumerate_exact
from llmppl.distributions import Distribution, Finite

RUNS = SAMPLERS | {
    "exact": lambda model, seed=0: enumerate_exact(model),
    "beam": lambda model, seed=0: beam_search(model, 3, 2, progress=False),
}
every_algorithm = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


class Failed(RuntimeError):
    pass


class Word(Model):
    """Three letters of a language model, two of them drawn in one step."""

    def __init__(self, lm):
        super().__init__()
        self.context = lm.context("a")

    def step(self):
        for _ in range(2 - len(self.s) // 2):
            token = self.sample(self.transformer(self.context).masked(self.context.lm.vocab.not_eos))
            self.context += token
            self.s += token
        if len(self.context) > 3:
            self.finish()


def failing(at: int):
    """A language model of six tokens whose call number `at` raises, and the list of its calls."""
    calls = []

    def logits(ids):
        calls.append(list(ids))
        if len(calls) == at:
            raise Failed("out of memory, once")
        return np.cos(np.arange(6.0) * (1 + sum(ids)))

    return table_lm(logits, [b"a", b"b", b"c", b" ", b"d"]), calls


def failure(run, at):
    """Return the exception of a run in which the call `at` of the language model fails."""
    with pytest.raises(Failed) as caught:
        run(Word(failing(at)[0]), seed=0)
    return caught


@every_algorithm
def test_an_exception_of_a_model_propagates_from_every_call(run):
    lm, calls = failing(at=0)
    run(Word(lm), seed=0)
    caught = [failure(run, at) for at in range(1, len(calls) + 1)]
    assert len(calls) > 5 and [len(each.value.__notes__) for each in caught] == [1] * len(calls)
    places = [{(entry.name, entry.path.name) for entry in each.traceback} for each in caught]
    assert set.intersection(*places) >= {("step", "test_exceptions.py")}


@every_algorithm
def test_a_model_is_right_after_a_failure(run):
    truth = run(Word(failing(at=0)[0]), seed=0)
    lm, _ = failing(at=3)
    with pytest.raises(Failed):
        run(Word(lm), seed=0)
    assert [str(each) for each in run(Word(lm), seed=0)] == [str(each) for each in truth]


# ---- an exception of a distribution belongs to the `sample` that draws from it


class Handles(Model):
    """Draws from the first of two distributions that does not fail."""

    def step(self):
        for dist in (Finite(range(2), lambda: 1 / 0), Finite(range(2), lambda: [][1]), Categorical([0.25, 0.75])):
            try:
                self.s += "ab"[self.sample(dist)]
                break
            except (ZeroDivisionError, IndexError):
                continue
        if len(self.s) == 2:
            self.finish()


@pytest.mark.parametrize("run", [SAMPLERS["distinct"], SAMPLERS["merged"], RUNS["exact"]])
def test_a_step_may_handle_an_exception_of_a_distribution(run):
    is_posterior(run, Handles, {"aa": 1 / 16, "ab": 3 / 16, "ba": 3 / 16, "bb": 9 / 16}, full=4000, quick=120)


class Suppresses(Model):
    """Three distributions fail, each with an exception of its own, before one that does not."""

    def step(self):
        with contextlib.suppress(ZeroDivisionError):
            self.sample(Finite(range(2), lambda: 1 / 0))
        with contextlib.suppress(IndexError):
            self.sample(Finite(range(2), lambda: [][1]))
        with contextlib.suppress(KeyError):
            self.sample(Finite(range(2), lambda: {}["a"]))
        self.s = "ab"[self.sample(Categorical([0.25, 0.75]))]
        self.finish()


@every_algorithm
def test_each_sample_raises_the_exception_of_its_own_distribution(run):
    assert {*map(str, run(Suppresses(), seed=0))} - {"a", "b"} == set()


@every_algorithm
@pytest.mark.parametrize(("logs", "said"), [([0.0, np.nan, -1.0], "nan"), ([0.0, np.inf, -np.inf], "inf")])
def test_non_numeric_weights_are_named_with_their_place(run, logs, said):
    class Counts(Model):
        def step(self):
            first = self.sample(Categorical({"x": 0.5, "y": 0.5}))
            self.s = first + self.sample(Finite(list("abc"), np.array([0.0] * 3 if first == "x" else logs)))
            self.finish()

    told = rf"Finite gives the value 'b', at index 1 of its support, the log-weight {said}"
    with pytest.raises(ValueError, match=told):
        [run(Counts(), seed=seed) for seed in range(5)]


class Die(Distribution):
    support = range(6)

    def __init__(self, logs):
        self.logs = logs

    def sample(self, rng):
        return int(rng.integers(6))

    def log_prob(self, value):
        return self.logs[value]


class Throws(Model):
    def __init__(self, logs):
        super().__init__()
        self.die = Die(logs)

    def step(self):
        self.s = str(self.sample(self.die))
        self.finish()


@pytest.mark.parametrize("name", ["distinct", "exact", "beam"])
def test_a_custom_distribution_is_checked_when_its_values_are_listed(name):
    RUNS[name](Throws([-math.log(6)] * 6))
    with pytest.raises(ValueError, match=r"Die gives the value 3, at index 3 of its support, the log-weight nan"):
        RUNS[name](Throws([0.0, -np.inf, -np.inf, np.nan, -1.0, -1.0]))
    with pytest.raises(ValueError, match=r"is a Distribution, and its probabilities sum to 6: they must sum to 1"):
        RUNS[name](Throws([0.0] * 6))


def test_a_lazy_finite_is_checked_when_it_is_computed():
    dist = Finite("ab", lambda: np.array([np.nan, 0.0]))
    with pytest.raises(ValueError, match=r"Finite gives the value 'a', at index 0"):
        dist.sample(np.random.default_rng(0))
