"""Tests of the runtime, with evaluators that record their questions."""

import contextlib
import contextvars
import signal
import time
import traceback
from dataclasses import replace
from functools import partial

import pytest
from greenlet import getcurrent

from llmppl.support.runtime import Runtime, Stats, mask_timer, request


class Doubling:
    """Evaluator that answers x with 2 x, and caches the answers if it `remembers`."""

    patient = False

    def __init__(self, remembers=False):
        self.stats = Stats()
        self.batches = []
        self.memory = {} if remembers else None

    def begin(self):
        pass

    def done(self):
        return replace(self.stats)

    def cached(self, question):
        return None if self.memory is None else self.memory.get(question)

    def evaluate(self, questions):
        self.batches.append(list(questions))
        self.stats.rounds += 1
        self.stats.rows += len(questions)
        if self.memory is not None:
            self.memory.update((question, 2 * question) for question in questions)
        return [2 * question for question in questions]


NAMES = [f"function {i}" for i in range(9)]


def run(function, inputs):
    """Run `function(i)` for each input, all together."""
    Runtime().run([partial(function, i) for i in inputs], NAMES)


def test_waiting_functions_share_one_batch_in_order():
    lm, done = Doubling(), []

    def function(i):
        found = [i]
        for _ in range(i):
            found.append(request(lm, found[-1]))
        done.append(found)

    run(function, (2, 0, 1, 3))
    assert lm.batches == [[2, 1, 3], [4, 6], [12]]
    assert done == [[0], [1, 2], [2, 4, 8], [3, 6, 12, 24]]


def test_every_evaluator_gets_only_its_own_questions():
    one, two, got = Doubling(), Doubling(), {}

    def function(i):
        got[i] = request(one if i % 2 else two, i)

    run(function, range(5))
    assert one.batches == [[1, 3]] and two.batches == [[0, 2, 4]]
    assert got == {i: 2 * i for i in range(5)}


class Patient(Doubling):
    patient = True


def test_a_patient_evaluator_runs_when_no_other_is_needed():
    lm, critic, got = Doubling(), Patient(), {}

    def function(i):
        for k in range(i):
            request(lm, 10 * i + k)
        got[i] = request(critic, i), request(lm, 100 + i), request(critic, 100 + i)

    run(function, (0, 2, 1, 3))
    assert lm.batches == [[20, 10, 30], [21, 31], [32], [100, 101, 102, 103]]
    assert critic.batches == [[0, 1, 2, 3], [100, 101, 102, 103]]
    assert got == {i: (2 * i, 200 + 2 * i, 200 + 2 * i) for i in range(4)}


def test_two_patient_evaluators_do_not_wait_for_each_other():
    one, two = Patient(), Patient()
    Runtime().run([lambda: request(one, request(two, 1)), lambda: request(two, request(one, 2))], NAMES)
    assert one.batches == [[2], [2]] and two.batches == [[1], [4]]


def test_each_function_waits_only_for_its_own_evaluator():
    lm, critic = Doubling(), Patient()

    def function(i):
        if i == 0:
            return request(critic, 0)
        for k in range(3):
            request(lm, k)

    list(Runtime().each([(lambda i=i: function(i), "") for i in range(2)], together=2))
    assert (len(lm.batches), len(critic.batches)) == (3, 1)
    alone = []
    each = Runtime().each([(lambda i=i: alone.append(i) or function(i), "") for i in range(2)], together=2)
    assert next(each) == 0 and len(lm.batches) == 4      # it ended first


def test_known_answers_return_at_once():
    lm, order = Doubling(remembers=True), []

    def function(i):
        request(lm, 7)
        order.append(i)
        request(lm, 7)
        order.append(i)

    request(lm, 7)
    run(function, range(2))
    assert lm.batches == [[7]] and order == [0, 0, 1, 1]


def test_only_waiting_functions_use_a_greenlet():
    lm, greenlets = Doubling(), []

    def function(i):
        greenlets.append(getcurrent())
        if i in (2, 5):
            request(lm, i)
            greenlets.append(getcurrent())

    run(function, range(8))
    first, second, third = dict.fromkeys(greenlets[:8])
    assert greenlets == [first] * 3 + [second] * 3 + [third] * 2 + [first, second]
    assert getcurrent() not in greenlets and all(each.dead for each in greenlets)


def test_a_function_that_delays_the_end_starts_no_others():
    begun = []

    def function(i):
        begun.append(i)
        if i == 1:
            raise KeyError("mine")
        with contextlib.suppress(BaseException):
            request(Doubling(), i)

    with pytest.raises(KeyError, match="mine"):
        run(function, range(4))
    assert begun == [0, 1]


def test_runs_inside_functions_share_their_batches():
    lm, got = Doubling(), []

    def inner(i):
        got.append(request(lm, i))

    def outer(i):
        run(inner, [10 * i, 10 * i + 1])
        got.append(request(lm, 100 + i))

    run(outer, [1, 2])
    assert lm.batches == [[10, 11, 20, 21], [101, 102]]
    assert got == [20, 22, 40, 42, 202, 204]


@pytest.mark.parametrize("answer", [partial(request, Doubling()), lambda i: 2 * i], ids=["asks", "asks nothing"])
def test_an_exception_in_a_function_carries_its_name(answer):
    def function(i):
        if answer(i) == 4:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        run(function, range(4))
    assert caught.value.__notes__ == ["in function 2"]
    assert caught.traceback[-1].name == "function"


class Broken(Doubling):
    def evaluate(self, questions):
        raise FloatingPointError("the model gave NaN")


def test_an_exception_in_an_evaluator_shows_line_and_name():
    def function(i):
        if i:
            request(Broken(), i)

    with pytest.raises(FloatingPointError, match="gave NaN") as caught:
        run(function, range(2))
    assert caught.value.__notes__ == ["in function 1"]
    shown = "".join(traceback.format_exception(caught.value))
    assert "request(Broken(), i)" in shown and "in evaluate" in shown


def test_a_swallowed_exception_of_an_evaluator_is_raised_again():
    def function():
        try:
            request(Broken(), 1)
        except FloatingPointError:
            pass

    with pytest.raises(FloatingPointError, match="gave NaN"):
        Runtime().run([function], NAMES)


def each(functions):
    return list(Runtime().each(zip(functions, NAMES, strict=False), together=4))


@pytest.mark.parametrize("run", [lambda functions: Runtime().run(functions, NAMES), each], ids=["run", "each"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_an_exception_waiting_functions_are_unwound(run, error):
    lm, unwound = Doubling(), []

    def waits(i):
        try:
            request(lm, i)
            request(lm, i)
        finally:
            unwound.append(i)

    def raises():
        request(lm, 0)
        raise error

    with pytest.raises(error) as caught:
        run([partial(waits, 1), partial(waits, 2), raises, partial(waits, 3)])
    assert caught.value.__notes__ == ["in function 2"]
    assert sorted(unwound) == [1, 2, 3] and len(lm.batches) == 1


class Evaluates(Doubling):
    def __init__(self, evaluate):
        super().__init__()
        self.evaluate = evaluate


def test_an_interrupt_while_answering_unwinds_everything():
    lm, unwound = Evaluates(lambda questions: signal.raise_signal(signal.SIGINT)), []

    def function(i):
        try:
            request(lm, i)
        finally:
            unwound.append(i)

    with pytest.raises(KeyboardInterrupt):
        run(function, range(3))
    assert sorted(unwound) == [0, 1, 2]


def test_a_wrong_number_of_answers_is_an_error():
    with pytest.raises(ValueError):
        run(partial(request, Evaluates(lambda questions: [0])), range(2))


def test_an_answer_may_be_any_object_but_None_means_unknown():
    class Zero(Doubling):
        def cached(self, question):
            return 0

    lm = Zero()
    got = []
    Runtime().run([lambda: got.append(request(lm, 1))], NAMES)
    assert got == [0] and lm.batches == []


@pytest.mark.parametrize("run", [lambda functions: Runtime().run(functions, NAMES), each], ids=["run", "each"])
def test_functions_inherit_context_variables_and_set_only_their_own(run):
    variable = contextvars.ContextVar("variable", default="default")
    variable.set("caller")
    lm, seen = Doubling(), []

    def function(i):
        before = variable.get()
        variable.set(i)
        request(lm, i)
        seen.append((before, variable.get()))

    run([partial(function, i) for i in range(3)])
    assert seen == [("caller", i) for i in range(3)] and variable.get() == "caller"


# ---- functions that have nothing to do with one another


def asking(lm, n, times):
    """Return a function that asks `times` times, and returns the last answer."""

    def function():
        answer = n
        for _ in range(times):
            answer = request(lm, answer)
        return answer

    return function, f"function {n}"


def test_each_yields_results_as_functions_end_and_starts_the_next():
    lm = Doubling()
    times = {1: 1, 3: 4, 5: 2, 7: 0, 9: 2}
    found = list(Runtime().each((asking(lm, n, k) for n, k in times.items()), together=2))
    assert found == [2, 20, 7, 48, 36]
    assert lm.batches == [[1, 3], [6, 5], [12, 10], [24, 9], [18]]


class Choosy(Doubling):
    """Evaluator that fails for odd questions, and for more than `most` at a time."""

    def __init__(self, most=99):
        super().__init__()
        self.most = most

    def evaluate(self, questions):
        if len(questions) > self.most:
            raise MemoryError("too many")
        if any(question % 2 for question in questions):
            raise FloatingPointError("an odd one")
        return super().evaluate(questions)


def caught(lm, n):
    def function():
        try:
            return request(lm, n)
        except FloatingPointError as error:
            return f"{error}: {n}"

    return function, f"function {n}"


def test_in_each_only_functions_with_failed_questions_fail():
    numbers = [0, 2, 4, 5, 6, 8, 9, 10]
    found = list(Runtime().each([caught(Choosy(), n) for n in numbers], together=8))
    assert found == ["an odd one: 5" if n == 5 else "an odd one: 9" if n == 9 else 2 * n for n in numbers]
    lm = Choosy(most=2)
    assert list(Runtime().each([caught(lm, n) for n in [0, 2, 4, 6, 8]], together=5)) == [0, 4, 8, 12, 16]
    assert lm.batches == [[0, 2], [4], [6, 8]]


def test_a_failure_in_an_inner_run_shows_the_calling_line():
    def function():
        Runtime().run([lambda: request(Choosy(), 1)], ["inner"])

    with pytest.raises(FloatingPointError) as error:
        list(Runtime().each([(function, "outer"), asking(Choosy(), 2, 3)], together=2))
    assert error.value.__notes__ == ["in inner", "in outer"]
    assert "lambda: request(Choosy(), 1)" in "".join(traceback.format_exception(error.value))


# ---- statistics


def test_stats_add_subtract_and_show_themselves():
    a, b = Stats(1, 2, 3, 4, 5.0, 6.0, 7.0), Stats(10, 20, 30, 40, 50.0, 60.0, 70.0)
    assert a + b == Stats(11, 22, 33, 44, 55.0, 66.0, 77.0)
    assert b - a == Stats(9, 18, 27, 36, 45.0, 54.0, 63.0)
    assert a + Stats() == a and a - a == Stats()
    assert replace(a, calls=8, arguments=9) - a == Stats(calls=8, arguments=9)
    assert str(a) == (
        "1 rounds, 2 rows, 3 tokens run, 4 cache hits; 5.00 s in the lm, 6.00 s in masks, 7.00 s elsewhere"
    )


def test_a_runtime_counts_the_work_since_it_met_an_evaluator():
    lm, other = Doubling(), Doubling()
    request(lm, 1)
    runtime = Runtime()
    assert runtime.stats.rounds == 0
    runtime.run([lambda: request(lm, 1), lambda: request(other, 2), lambda: request(lm, 3)], NAMES)
    assert (runtime.stats.rounds, runtime.stats.rows) == (2, 3)
    runtime.run([lambda: request(lm, 4)], NAMES)
    assert (runtime.stats.rounds, runtime.stats.rows) == (3, 4)
    assert lm.stats.rounds == 3                         # its own count goes on


def test_the_work_of_inner_runs_counts_for_the_outer_run():
    lm, inner = Doubling(), []

    def masked(question):
        request(lm, question)
        with mask_timer():
            time.perf_counter()

    def outer(i):
        runtime = Runtime()
        runtime.run([lambda k=k: masked(10 * i + k) for k in range(2)], NAMES)
        inner.append(runtime.seconds_masks)

    runtime = Runtime()
    runtime.run([lambda: outer(1), lambda: outer(2)], NAMES)
    assert (runtime.stats.rounds, runtime.stats.rows) == (1, 4)
    assert runtime.stats.seconds_masks == pytest.approx(sum(inner)) and min(inner) > 0.0


def test_time_in_masks_is_counted_only_inside_a_run():
    def function():
        with mask_timer():
            time.perf_counter()

    runtime = Runtime()
    runtime.run([function], NAMES)
    stats = runtime.stats
    assert stats.seconds_masks > 0.0 and stats.seconds_lm == 0.0 and stats.seconds_other > 0.0
    before = runtime.seconds_masks
    function()
    assert runtime.seconds_masks == before
    with pytest.raises(ZeroDivisionError), mask_timer():
        raise ZeroDivisionError
