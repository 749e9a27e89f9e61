"""Tests of the pace of the garbage collector: less often during a run, and as before after it, however it ends."""

import gc
import threading

import pytest
from helpers.killable import coin

from llmppl import Bernoulli, Model, importance_sampling, repeat, run_many, smc_standard, smc_steer
from llmppl.inference.run import PACE, paced_collector

BEFORE = (711, 9, 8)


@pytest.fixture(autouse=True)
def threshold():
    """Set a threshold that nothing else would set, and check that every test leaves it."""
    before = gc.get_threshold()
    gc.set_threshold(*BEFORE)
    yield
    after = gc.get_threshold()
    gc.set_threshold(*before)
    assert after == BEFORE


class Watches(Model):
    """Program of three coins that notes the threshold in each step, and raises `error` in the second."""

    shared = ("seen",)

    def __init__(self, error=None):
        super().__init__()
        self.seen, self.error = [], error

    def step(self):
        self.seen.append(gc.get_threshold())
        if self.error is not None and self.s:
            raise self.error
        self.s += str(int(self.sample(Bernoulli(0.5))))
        if len(self.s) == 3:
            self.finish()


ALGORITHMS = {
    "steer": lambda model: smc_steer(model, 3, 2, seed=0),
    "standard": lambda model: smc_standard(model, 3, seed=0),
    "importance": lambda model: importance_sampling(model, 3, seed=0),
    "repeat": lambda model: repeat(lambda rng: smc_steer(model, 3, 2, rng=rng), 2, seed=0),
    "many": lambda model: list(run_many(lambda task, rng: smc_steer(model, 3, 2, rng=rng), [0, 1], seed=0)),
}


@pytest.mark.parametrize("run", ALGORITHMS.values(), ids=ALGORITHMS)
def test_steps_run_at_the_larger_threshold(run):
    model = Watches()
    run(model)
    assert set(model.seen) == {(PACE, *BEFORE[1:])}


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt(), SystemExit(1)], ids=repr)
@pytest.mark.parametrize("name", ["steer", "standard", "importance", "repeat"])
def test_the_threshold_is_restored_after_an_exception(name, error):
    with pytest.raises(type(error)):
        ALGORITHMS[name](Watches(error))


def test_the_threshold_is_restored_when_tasks_are_abandoned():
    results = run_many(coin, range(9), seed=0, together=2)
    next(results)
    assert gc.get_threshold()[0] == PACE
    results.close()


def test_nested_runs_restore_it_after_the_outermost():
    with paced_collector():
        smc_steer(Watches(), 3, 2, seed=0)
        assert gc.get_threshold()[0] == PACE


def test_runs_of_two_threads_restore_it_after_the_last():
    """The first to begin is the first to end: the other still runs at the larger threshold."""
    both_begun, first_ended = threading.Barrier(2), threading.Event()
    seen = []

    def first():
        with paced_collector():
            both_begun.wait(10)
        first_ended.set()

    thread = threading.Thread(target=first)
    thread.start()
    with paced_collector():
        both_begun.wait(10)
        assert first_ended.wait(10)
        seen.append(gc.get_threshold())
    thread.join()
    assert seen == [(PACE, *BEFORE[1:])]


@pytest.mark.parametrize("chosen", [(0, 10, 10), (10 * PACE, 10, 10)])
def test_a_program_that_collects_even_less_often_keeps_its_threshold(chosen):
    gc.set_threshold(*chosen)
    model = Watches()
    smc_steer(model, 3, 2, seed=0)
    assert {*model.seen, gc.get_threshold()} == {chosen}
    gc.set_threshold(*BEFORE)
