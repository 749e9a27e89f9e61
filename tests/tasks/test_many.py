"""Tests of many tasks in shared batches: each has the same result as alone, and a failed one stops no other."""

import functools
import gc
import itertools

import numpy as np
import pytest
from helpers.common import repetitions
from helpers.exactness import ALGORITHMS, cells_of, check
from helpers.fire import in_threads
from helpers.killable import Coin, coin
from helpers.tasks import TASKS, by_index, outcomes, steer, told
from helpers.tiny import cold_lm, table_lm, tiny_lm

from llmppl import (
    ConstrainedText,
    Model,
    PromptIntersection,
    Query,
    beam_search,
    importance_sampling,
    repeat,
    run_many,
    smc_standard,
    smc_steer,
)


def stream(seed, index):
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(index,)))


def test_tasks_give_the_same_results_as_alone_in_fewer_rounds():
    apart, together = cold_lm(), cold_lm()
    alone = [steer(apart)(task, stream(5, i)) for i, task in enumerate(TASKS)]
    results = by_index(run_many(steer(together), TASKS, seed=5, together=4))
    assert [(r.index, r.task, r.error, r.matches) for r in results] == [(i, t, None, None) for i, t in enumerate(TASKS)]
    for one, result in zip(alone, results, strict=True):
        assert result.particles.texts == one.texts
        np.testing.assert_allclose(result.particles.log_weights, one.log_weights, atol=1e-12)
        assert result.particles.log_ml_se == pytest.approx(one.log_ml_se)
        assert result.particles.stats is None and result.seconds > 0
    assert together.stats.rounds < apart.stats.rounds / 2


class Waits(Model):
    """Program that asks its language model `n` times."""

    def __init__(self, lm, n):
        super().__init__()
        self.context, self.n = lm.context("a"), n

    def step(self):
        self.context += self.sample(self.transformer(self.context))
        self.n -= 1
        if self.n == 0:
            self.finish()


def test_a_new_task_starts_when_one_ends_so_rounds_stay_full():
    """Tasks of 1 and 9 steps, two at a time: after task 0 come 2, 3, ... beside task 1."""
    lm = table_lm(lambda ids: [0.0, 0.0, -np.inf])
    run = lambda n, rng: importance_sampling(Waits(lm, n), 1, rng=rng)      # noqa: E731
    order = [result.index for result in run_many(run, [1, 9, 1, 1, 1, 1], seed=0, together=2)]
    assert order == [0, 2, 3, 4, 5, 1]
    assert lm.stats.rounds == 9


def test_tasks_are_taken_lazily_up_to_the_limit():
    lm, taken, running = tiny_lm(), [], []

    def tasks():
        for task in itertools.cycle(TASKS):
            taken.append(task)
            yield task

    def run(task, rng):
        running.append(task)
        try:
            return steer(lm)(task, rng)
        finally:
            assert len(running) <= 3
            running.remove(task)

    results = run_many(run, tasks(), seed=0, together=3)
    assert not taken
    for n, result in enumerate(itertools.islice(results, 10), 1):
        assert result.error is None
        assert len(taken) <= n + 3
    results.close()
    assert not running


def test_a_failed_task_has_a_traceback_and_stops_no_other():
    lm = tiny_lm()

    def run(task, rng):
        if task == ["c", "c"]:
            raise KeyError("mine")
        return steer(lm)(task, rng)

    results = by_index(run_many(run, TASKS, seed=0))
    assert [result.error is None for result in results] == [task != ["c", "c"] for task in TASKS]
    failed = results[3]
    assert failed.particles is None and failed.matches is None
    assert "in run\n" in failed.error and failed.error.endswith("KeyError: 'mine'\n")
    assert "KeyError: 'mine'" in repr(failed)


def not_after_b(ids):
    if ids[0] == 1:
        raise FloatingPointError("not after b")
    return [0.0, 0.0, 0.0]


def after(lm):
    return lambda prompt, rng: smc_steer(ConstrainedText(lm, prompt, max_tokens=4), 3, 2, rng=rng)


def test_a_failing_context_fails_only_the_tasks_that_need_it():
    tasks = [*"aabababbaaab"]
    expected = outcomes(run_many(after(table_lm(lambda ids: [0.0, 0.0, 0.0])), tasks, seed=1))
    results = by_index(run_many(after(table_lm(not_after_b)), tasks, seed=1, together=5))
    errors = [result.error or "" for result in results]
    assert [("not after b" in error, "in step 1\n" in error) for error in errors] == [(t == "b",) * 2 for t in tasks]
    right = [result for result in results if result.error is None]
    assert outcomes(right) == {result.index: expected[result.index] for result in right}


def test_a_failing_context_of_an_inner_run_fails_only_its_task():
    lm, kept = table_lm(not_after_b), []

    def outer(tasks, rng):
        kept.append([result.error is None for result in by_index(run_many(after(lm), tasks, seed=0))])
        return importance_sampling(Coin(), 1, rng=rng)

    assert [r.error for r in run_many(outer, [[*"aba"], [*"aab"]], seed=0)] == [None, None]
    assert sorted(kept) == [[True, False, True], [True, True, False]]


@pytest.mark.parametrize("wrong", [None, 3, "text", [1, 2], iter([])])
def test_a_run_that_returns_another_type_is_an_error_with_a_remedy(wrong):
    (result,) = run_many(lambda task, rng: wrong, ["a"], seed=0)
    said = "run must return Particles, as smc_steer does, or a list of matches or beams, or an answer of generate;"
    assert f"TypeError: {said}" in result.error


def test_any_inference_can_be_a_task():
    lm = tiny_lm()
    program = PromptIntersection(lm, ["a", "b"], max_tokens=2)
    runs = [
        lambda rng: smc_steer(program, 3, 2, rng=rng),
        lambda rng: smc_standard(program, 3, rng=rng),
        lambda rng: importance_sampling(program, 3, rng=rng),
        lambda rng: beam_search(program, 2, 2),
        lambda rng: list(itertools.islice(Query(lm, "b(a|ab|abc)", prefix="b").best(), 2)),
    ]
    results = by_index(run_many(lambda run, rng: run(rng), runs, seed=0))
    assert not [result.error for result in results if result.error]
    assert [result.particles is None for result in results] == [False, False, False, True, True]
    assert [beam.log_joint for beam in results[3].matches] == pytest.approx(
        [beam.log_joint for beam in beam_search(program, 2, 2)]
    )
    alone = itertools.islice(Query(lm, "b(a|ab|abc)", prefix="b").best(), 2)
    assert [str(match) for match in results[4].matches] == [str(match) for match in alone]


def test_a_run_within_a_task_shares_the_rounds_of_the_others():
    lm, apart = cold_lm(), cold_lm()

    def run(tasks, rng):
        inner = by_index(run_many(steer(lm), tasks, seed=int(rng.integers(9)), together=2))
        return steer(lm)([result.particles.texts[0] or "a" for result in inner], rng)

    results = by_index(run_many(run, [TASKS, TASKS[:3]], seed=3))
    assert [result.error for result in results] == [None, None]
    within = lm.stats.rounds
    lm = apart
    alone = [run(tasks, stream(3, i)) for i, tasks in enumerate([TASKS, TASKS[:3]])]
    assert [told(r.particles) for r in results] == [told(particles) for particles in alone]
    assert within < lm.stats.rounds


@pytest.mark.parametrize(("limit", "least", "most"), [("timeout", 1e-6, 1e6), ("budget", 1, 10**6)])
def test_a_task_that_reaches_its_limit_keeps_its_particles(limit, least, most):
    def run(task, rng):
        return steer(cold_lm())(task, rng)              # which runs tokens of its own

    results = by_index(run_many(run, TASKS, seed=5, **{limit: least}))
    assert all(result.error is None for result in results)
    assert [(r.particles.limit, len(r.particles.steps)) for r in results] == [(limit, 1)] * len(TASKS)
    assert all(not r.particles.limit for r in run_many(run, TASKS, seed=5, **{limit: most}))


def test_an_abandoned_iterator_unwinds_its_tasks():
    lm, begun, left = cold_lm(), [], []

    def run(task, rng):
        begun.append(task)
        try:
            return steer(lm)(task, rng)
        finally:
            left.append(task)

    for result in run_many(run, TASKS * 3, seed=0, together=6):
        first = result
        break
    assert first.particles is not None
    assert len(begun) >= 6 and sorted(begun) == sorted(left)
    assert steer(lm)(TASKS[0], stream(0, 0)).texts == steer(cold_lm())(TASKS[0], stream(0, 0)).texts


def alternately(lm):
    one, two = (run_many(steer(lm), TASKS, seed=2, together=3) for _ in range(2))
    pairs = list(zip(one, two, strict=True))
    assert outcomes(a for a, _ in pairs) == outcomes(b for _, b in pairs)
    return [a for a, _ in pairs]


def beside_inference(lm):
    for result in run_many(steer(lm), TASKS, seed=2, together=3):
        smc_steer(PromptIntersection(lm, ["b", "b"], max_tokens=3), 3, 2, seed=result.index)
        np.random.random()                              # noqa: NPY002
        yield result


def within_tasks(lm):
    results = run_many(steer(lm), TASKS, seed=2, together=3)
    found = [next(results)]

    def run(task, rng):
        found.append(next(results))
        return steer(lm)(task, rng)

    assert [result.error for result in run_many(run, TASKS[:2], seed=0, together=1)] == [None, None]
    return [*found, *results]


@pytest.mark.parametrize("iterate", [alternately, beside_inference, within_tasks])
def test_what_runs_between_two_results_changes_nothing(iterate):
    assert outcomes(iterate(cold_lm())) == outcomes(run_many(steer(cold_lm()), TASKS, seed=2, together=3))


def test_threads_run_their_own_tasks():
    work = functools.partial(run_many, steer(tiny_lm()), TASKS, seed=2, together=3)
    expected = outcomes(work())
    assert in_threads([lambda: outcomes(work())] * 4) == [expected] * 4
    begun = work()
    next(begun)
    with pytest.raises(RuntimeError, match="what runs together goes on in the thread that began it, and this is anoth"):
        in_threads([lambda: list(begun)])


def test_an_interrupt_notes_the_task_and_keeps_the_lm_right():
    lm, fresh, unwound = cold_lm(), cold_lm(), []

    def run(task, rng):
        try:
            if task == ["a b", "c"]:
                raise KeyboardInterrupt
            return steer(lm)(task, rng)
        finally:
            unwound.append(task)

    with pytest.raises(KeyboardInterrupt) as caught:
        list(run_many(run, TASKS, seed=0, together=5))
    assert caught.value.__notes__ == ["in task 4"] and len(unwound) == 5
    assert outcomes(run_many(steer(lm), TASKS, seed=2)) == outcomes(run_many(steer(fresh), TASKS, seed=2))


def test_the_seed_fixes_the_results_and_None_draws_one():
    first, again, *others = (outcomes(run_many(coin, range(64), seed=seed)) for seed in (0, 0, 1, None, None))
    assert first == again
    assert all(a != b for a, b in itertools.combinations([first, *others], 2))


def test_repeat_gives_the_runs_of_run_many():
    results = outcomes(run_many(coin, range(40), seed=6))
    repeats = repeat(lambda rng: importance_sampling(Coin(), 2, rng=rng), 40, seed=6, progress=False)
    assert dict(enumerate(map(told, repeats.runs))) == results


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((3, TASKS), TypeError, "run must be a function, as lambda task, rng"),
        ((lambda task: None, TASKS), TypeError, r"run must take 2 arguments, .* <lambda> is wrong: too many"),
        ((coin, 3), TypeError, "tasks must be a list or another iterable of tasks, not 3"),
        ((coin, "abc"), TypeError, "tasks must be a list or another iterable of tasks, not 'abc'"),
        ((coin, TASKS, {"together": 0}), ValueError, "together must be at least 1"),
        ((coin, TASKS, {"seeds": 1}), TypeError, r"run_many takes no seeds: did you mean seed\?"),
        ((coin, TASKS, {"seed": -1}), ValueError, "seed must be at least 0"),
        ((coin, TASKS, {"resume": True}), ValueError, r"say with which, as to='results\.db'"),
    ],
)
def test_run_many_checks_its_arguments_before_it_begins(arguments, error, message):
    run, tasks, options = (*arguments, {})[:3]
    with pytest.raises(error, match=message):
        run_many(run, tasks, **options)


# ---- exactness


def runs_together(case, algorithm, runs, seed):
    """Return the cells of each task."""
    model = case.model()
    results = run_many(lambda _, rng: algorithm(model, rng=rng), range(runs), seed=seed, together=7)
    return [cells_of(case, result.particles) for result in results]


STEER, STANDARD = "steer N=4 K=2 distinct", "standard N=4, systematic always"


@pytest.mark.parametrize(
    "name, algorithm",
    [("soft", STANDARD), pytest.param("where, second choice", STEER, marks=pytest.mark.slow)],
)
def test_Z_hat_and_histogram_through_run_many_are_right_on_average(name, algorithm):
    """Within 4.5 standard errors of the sum by hand; see test_exactness."""
    check(name, ALGORITHMS[algorithm], seed=len(name), runs_of=runs_together)


# ---- many


@pytest.mark.parametrize("to", [None, "results.db"])
def test_memory_does_not_grow_with_the_number_of_tasks(tmp_path, to):
    lm = table_lm(lambda ids: [0.1 * (len(ids) % 3), 0.0, -1.0], cache_bytes=1 << 14)
    num_tasks, counts = repetitions(5000, 150), []

    def run(n, rng):
        prompt = "".join(rng.choice(["a", "b"], 8))
        return smc_steer(PromptIntersection(lm, [prompt], max_tokens=2), 2, 2, rng=rng)

    for result in run_many(run, iter(range(num_tasks)), seed=0, to=to and tmp_path / to, progress=False):
        assert result.error is None
        if result.index % (num_tasks // 6) == num_tasks // 6 - 1:
            gc.collect()
            counts.append(len(gc.get_objects()))
    middle = len(counts) // 2
    assert max(counts[middle:]) - max(counts[:middle]) < 3000            # a result holds hundreds
