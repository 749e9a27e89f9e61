"""Tests of gc_freeze: while many tasks run, exactly the objects that a full collection left are frozen."""

import gc
import threading
import weakref

import pytest
from helpers.killable import coin

from llmppl import repeat, run_many


@pytest.fixture(autouse=True)
def thawed():
    """Unfreeze all objects, and prevent automatic full collections."""
    assert gc.get_freeze_count() == 0
    gc.disable()
    callbacks = [*gc.callbacks]
    yield
    assert gc.callbacks == callbacks
    gc.enable()
    gc.unfreeze()


class Ring:
    """Garbage in a cycle, which only the collector finds."""

    def __init__(self):
        self.itself = self


def garbage():
    return weakref.ref(Ring())


def frozen_after(generation):
    """Return a task that runs the collector, and then the number of objects frozen after the next step."""
    counts = []

    def run(task, rng):
        gc.collect(generation)
        found = coin(task, rng)
        counts.append(gc.get_freeze_count())
        return found

    return run, counts


def is_looked_at(thing):
    return any(each is thing for each in gc.get_objects())


def test_survivors_of_the_first_full_collection_stay_frozen_until_all_tasks_end():
    before, looked_at, made = Ring(), [], []

    def run(task, rng):
        gc.collect()
        found = coin(task, rng)
        made.append(Ring())
        looked_at.append([is_looked_at(before), *map(is_looked_at, made)])
        return found

    assert all(result.error is None for result in run_many(run, ["a", "b"]))
    assert looked_at == [[False, True], [False, True, True]]
    assert is_looked_at(before) and gc.get_freeze_count() == 0


def test_a_young_collection_freezes_nothing():
    run, counts = frozen_after(1)
    assert len(list(run_many(run, [*"abc"]))) == 3 and counts == [0, 0, 0]


def test_repeat_freezes_as_well():
    counts = []

    def run(rng):
        gc.collect()
        found = coin("", rng)
        counts.append(gc.get_freeze_count())
        return found

    repeat(run, 3)
    assert min(counts) > 0 and gc.get_freeze_count() == 0


def test_garbage_of_before_and_of_later_is_collected():
    before, rings, alive = garbage(), [], []

    def run(task, rng):
        rings.append(garbage())
        gc.collect()
        alive.append([ring() for ring in (before, *rings)])
        return coin(task, rng)

    assert before() is not None
    assert all(result.error is None for result in run_many(run, [*"abc"]))
    assert alive == [[None] * n for n in (2, 3, 4)]


def test_freezing_lasts_until_the_last_of_interleaved_or_nested_runs_ends():
    run, counts = frozen_after(2)

    def nested(task, rng):
        inner = list(run_many(run, ["a", "b"]))
        assert gc.get_freeze_count()
        return inner[0].particles

    one, other = run_many(nested, [*"abcd"]), run_many(run, [*"abcd"])
    next(one), next(other)
    assert len(list(other)) == 3 and gc.get_freeze_count()
    assert [result.error for result in one] == [None] * 3
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("way", ["closed", "dropped", "interrupted"])
def test_an_unfinished_run_ends_freezing_too(way):
    run, _ = frozen_after(2)

    def interrupted(task, rng):
        run(task, rng)
        raise KeyboardInterrupt

    if way == "interrupted":
        with pytest.raises(KeyboardInterrupt):
            list(run_many(interrupted, ["a", "b"]))
    else:
        results = run_many(run, ["a", "b"], together=1)
        next(results)
        assert gc.get_freeze_count()
        if way == "closed":
            results.close()
        del results
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert gc.get_freeze_count() == 0


def test_objects_frozen_by_the_program_stay_frozen():
    gc.freeze()
    before = gc.get_freeze_count()
    run, counts = frozen_after(2)
    assert len(list(run_many(run, [*"abc"]))) == 3
    assert before - 1000 < min(counts) and max(counts) <= before and gc.get_freeze_count() > before - 1000


def test_runs_in_several_threads_end_freezing_together():
    run, counts = frozen_after(2)
    half = [run_many(run, [*"ab"]) for _ in range(4)]

    def whole(results):
        assert len(list(results)) == 2

    threads = [threading.Thread(target=whole, args=(results,)) for results in half]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == 8 and gc.get_freeze_count() == 0
