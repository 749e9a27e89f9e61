"""Alarms end Python code in time, and never code after their block."""

import contextlib
import math
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
from helpers.common import HANG, repetitions

from llmppl.support.alarm import Alarm, Overdue, excuse, limited
from llmppl.support.runtime import Runtime, Stats, limit, request, spent


def spin(seconds=HANG, clock=time.monotonic):
    end = clock() + seconds
    while clock() < end:
        pass


def test_code_that_takes_too_long_ends_and_other_code_does_not():
    start = time.monotonic()
    with pytest.raises(Overdue, match="too long"), limited(0.05):
        spin()
    assert time.monotonic() - start >= 0.05
    with limited(HANG):
        spin(0.01)


def test_an_alarm_that_code_swallows_rings_again():
    met = []
    with pytest.raises(Overdue), limited(0.02):
        for _ in range(2):
            try:
                spin()
            except TimeoutError as error:
                met.append(error)
        raise met[-1]
    assert len(met) == 2


def test_an_alarm_never_rings_after_its_block():
    outside = 0
    for i in range(repetitions(2000, 60)):
        seconds = 0.02 + (i % 20) / 1000
        with contextlib.suppress(Overdue), limited(0.02):
            spin(seconds)
        try:
            sum(range(2000))
        except Overdue:
            outside += 1
    assert outside == 0


TRACED = """
import sys, time
from llmppl.support.alarm import limited
for seconds in (0.01, 0.05, 100):
    try:
        with limited(seconds):
            end = time.monotonic() + 0.1
            while time.monotonic() < end:
                pass
    except TimeoutError:
        print("late")
def begins():
    print("traced")
sys.settrace(lambda *event: None)
begins()
"""


def test_after_an_alarm_functions_that_are_traced_begin():
    """As under a debugger, or while coverage is measured."""
    for _ in range(repetitions(5, 1)):
        command = [sys.executable, "-c", TRACED]
        found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert found.stdout.split() == ["late", "late", "traced"]


def test_excused_seconds_do_not_count():
    with limited(math.inf, 0.1):
        excuse(HANG)
        spin(0.2, time.thread_time)
    with pytest.raises(Overdue), limited(math.inf, 0.1):
        excuse(0.1)
        spin()


def test_each_thread_has_its_own_alarm():
    ended = []

    def run(seconds):
        try:
            with limited(seconds):
                spin(0.3)
            ended.append("whole")
        except Overdue:
            ended.append("late")

    threads = [threading.Thread(target=run, args=(seconds,)) for seconds in (0.05, HANG)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ended) == ["late", "whole"]
    Alarm().stop()                                      # that was never set


class Numbers:
    """An evaluator that answers a number with it."""

    patient = False

    def __init__(self):
        self.sizes = []

    def done(self):
        return Stats()

    def cached(self, question):
        return None

    def evaluate(self, questions):
        self.sizes.append(len(questions))
        return questions


def test_a_function_of_a_run_that_takes_too_long_ends_alone():
    numbers, ended = Numbers(), []

    def quick(name):
        for i in range(5):
            request(numbers, i + 1)
        ended.append(name)

    def lazy(name, patience, ends):
        try:
            limit(patience, time.monotonic() + ends)
            request(numbers, 1)
            spin()
        except Overdue:
            ended.append(name)

    calls = [(lambda: quick("a"), "a"), (lambda: lazy("b", 0.05, HANG), "b"), (lambda: lazy("c", HANG, 0.1), "c")]
    list(Runtime().each([*calls, (lambda: quick("d"), "d")], 4))
    assert sorted(ended) == ["a", "b", "c", "d"]


def test_functions_that_have_used_little_come_first():
    numbers, ended = Numbers(), []

    def run(name, seconds, steps):
        for i in range(steps):
            request(numbers, i + 1)
            spin(seconds, time.process_time)
        ended.append(name)

    long = [(lambda i=i: run(f"long {i}", 0.06, 4), "long") for i in range(3)]
    short = [(lambda i=i: run(f"short {i}", 0.0, 3), "short") for i in range(5)]
    list(Runtime().each(iter([*long, *short]), 2, turn=0.05))
    assert sorted(ended[:5]) == [f"short {i}" for i in range(5)]
    assert sorted(ended[5:]) == ["long 0", "long 1", "long 2"]


def test_a_cheap_function_waits_for_one_step_of_others():
    numbers, before = Numbers(), []

    def run(name, seconds):
        for i in range(4):
            request(numbers, i + 1)
            spin(seconds, time.thread_time)
            before.append(name)

    functions = [(lambda i=i: run(f"long {i}", 0.1), "long") for i in range(4)]
    list(Runtime().each(iter([*functions, (lambda: run("short", 0.01), "short")]), 5, turn=0.02))
    last = max(at for at, name in enumerate(before) if name == "short")
    assert last - 3 <= 4                                # of 16 long steps
    assert numbers.sizes.count(4) + numbers.sizes.count(5) == 4


@pytest.mark.parametrize("turn", [0.05, math.inf])
def test_functions_begin_after_all_that_wait_have_ended_late(turn):
    numbers, ended = Numbers(), []

    def late():
        limit(HANG, time.monotonic())
        try:
            request(numbers, 1)
        except Overdue:
            ended.append("late")

    list(Runtime().each([(late, "late"), (lambda: ended.append("next"), "next")], 1, turn))
    assert ended == ["late", "next"]


class Stream:
    """Functions of which the short ones come one at a time, as long as a long one has not ended."""

    def __init__(self, long):
        self.waiting, self.start, self.short = [*long], time.monotonic(), True
        self.ended = []

    def __iter__(self):
        return self

    def __next__(self):
        if self.waiting:
            return self.waiting.pop(), "long"
        self.short = not self.short
        if self.short or len(self.ended) == 2 or time.monotonic() > self.start + 5:
            raise StopIteration
        return partial(request, numbers_of_short, 1), "short"


numbers_of_short = Numbers()


def test_an_answered_function_ends_in_time_though_cheap_ones_pass_it():
    def long():
        limit(HANG, time.monotonic() + 0.5)
        try:
            for i in range(100):
                request(numbers_of_short, i + 1)
                spin(0.1, time.thread_time)
        except Overdue:
            stream.ended.append(time.monotonic())

    stream = Stream([long, long])
    list(Runtime().each(stream, 3, turn=0.05))
    assert len(stream.ended) == 2 and max(stream.ended) < stream.start + 2


def test_a_round_comes_before_all_functions_have_begun():
    numbers, seen = Numbers(), []

    def run(i):
        seen.append(f"begin {i}")
        spin(0.06, time.thread_time)
        request(numbers, i + 1)
        seen.append(f"end {i}")

    list(Runtime().each(iter([(lambda i=i: run(i), "run") for i in range(4)]), 4, turn=0.05))
    assert seen[:2] == ["begin 0", "end 0"] and len(seen) == 8


def test_the_work_of_other_threads_counts_for_no_function():
    used = []

    def run():
        start = spent()[0]
        before = time.process_time()
        while time.process_time() - before < 0.3:       # of the other thread
            time.sleep(0.01)
        used.append(spent()[0] - start)

    other = threading.Thread(target=spin, args=(HANG, lambda: HANG if used else 0.0))
    other.start()
    list(Runtime().each(iter([(run, "run")]), 1))
    other.join(HANG)
    assert used[0] < 0.15
