"""A service: its results are those of runs alone, its calls fail, end and are cancelled one by one."""

import asyncio
import gc
import itertools
import os
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from functools import partial

import numpy as np
import pytest
from helpers.common import HANG, repetitions
from helpers.tiny import cold_lm, tiny_lm

from llmppl import ConstrainedText, Model, Regex, generate, smc_steer
from llmppl.constraints.masks.index import TokenIndex
from llmppl.serving import Service, ServiceFull
from llmppl.tasks import run_many

LM = tiny_lm(6)
WORDS = Regex("[abc]{1,6}")
METHODS = ["sample", "greedy", "beam", "best_of", "importance", "steer"]


class Held:
    """A call that keeps the thread of a service busy until `free`."""

    def __init__(self, service):
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.call = service.submit(self.wait)
        assert self.begun.wait(HANG)

    def wait(self):
        self.begun.set()
        assert self.go_on.wait(HANG)

    def free(self):
        self.go_on.set()
        self.call.result(HANG)


def endless(before=int):
    """Return a run of a program without an end that calls `before` in each step."""
    class Endless(Model):
        def step(self):
            before()
            self.sample(LM.context("a").next_token())

    return lambda: smc_steer(Endless(), 4, 2, seed=1)


def when(event, call):
    """Wait for an event that a call sets."""
    while not event.wait(0.05):
        assert not call.done(), call.result()


@pytest.fixture
def service():
    with Service(LM, together=3) as made:
        yield made


def texts(generation):
    found = generation.posterior
    return [(str(each), each.log_weight) for each in found] if generation.method == "steer" else str(generation)


def test_results_are_those_of_calls_alone_at_the_same_seed(service):
    jobs = [(METHODS[seed % 6], seed) for seed in range(repetitions(500, 18))]
    with ThreadPoolExecutor(8) as threads:
        calls = threads.map(lambda job: service.generate("a", WORDS, method=job[0], seed=job[1]), jobs)
        found = [texts(call.result(HANG)) for call in calls]
    assert found == [texts(generate(LM, "a", WORDS, method=method, seed=seed)) for method, seed in jobs]
    assert service.stats.done == len(jobs) and service.stats.tokens > 0


def test_calls_share_batches_as_run_many_does():
    streams = [np.random.default_rng(np.random.SeedSequence(1, spawn_key=(i,))) for i in range(3)]
    alone, shared = cold_lm(6), cold_lm(6)

    def run(lm, prompt, rng):
        return smc_steer(ConstrainedText(lm, prompt, WORDS), 4, 2, rng=rng)

    assert all(list(run_many(lambda prompt, rng: run(alone, prompt, rng), ["a", "b", "c"], seed=1)))
    with Service(shared) as service:
        held = Held(service)                            # the others then begin together
        calls = [service.submit(partial(run, shared, *each)) for each in zip(["a", "b", "c"], streams, strict=True)]
        held.free()
        wait(calls, HANG)
        work = service.submit(shared.evaluator.done).result(HANG)       # counts of the thread of the service
    assert (work.rounds, work.tokens) == (alone.evaluator.done().rounds, alone.evaluator.done().tokens)


def test_calls_begin_in_the_order_in_which_they_came():
    begun = []
    with Service(LM, together=1) as service:
        held = Held(service)
        calls = [*map(service.submit, [partial(begun.append, i) for i in range(20)])]
        assert service.stats.waiting == 20 and service.stats.running == 1
        held.free()
        wait(calls, HANG)
    assert begun == [*range(20)]


@pytest.mark.parametrize("error", [ZeroDivisionError("no"), SystemExit(3), KeyboardInterrupt()])
def test_a_call_that_fails_fails_alone(service, error):
    def fail():
        raise error

    calls = [service.generate("a", WORDS, seed=1), service.submit(fail), service.generate("b", WORDS, seed=2)]
    assert calls[1].exception(HANG) is error
    assert str(calls[0].result(HANG)) == str(generate(LM, "a", WORDS, seed=1))
    assert str(calls[2].result(HANG)) == str(generate(LM, "b", WORDS, seed=2))
    assert (service.stats.failed, service.stats.done) == (1, 2)


def test_wrong_arguments_are_errors_of_the_caller(service):
    with pytest.raises(TypeError, match="constraint"):
        service.generate("a", 3.5)
    with pytest.raises(TypeError, match="together"):
        service.generate("a", together=3)
    with pytest.raises(TypeError, match="one prompt at a time, so to says nothing"):
        service.generate("a", to="answers.db")
    with pytest.raises(TypeError, match="takes no"):
        service.generate("a", WORDS, method="sample", K=3)
    with pytest.raises(TypeError, match="run"):
        service.submit(3)
    with pytest.raises(ValueError, match="timeout must be positive"):
        service.generate("a", timeout=0)


def test_a_timeout_returns_the_particles_of_the_last_step(service):
    stepped = threading.Event()
    call = service.submit(endless(stepped.set), timeout=HANG)
    when(stepped, call)
    call.timeout = 1e-9
    particles = call.result(HANG)
    assert particles.limit == "timeout" and all(particle.cut for particle in particles) and len(particles.steps) >= 1
    held = Held(service)
    late = service.generate("a", WORDS, timeout=0.01)
    time.sleep(0.02)
    held.free()
    with pytest.raises(TimeoutError, match="has not begun"):
        late.result(HANG)


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_a_cancelled_call_ends_alone(service, state):
    stepped = threading.Event()
    held = Held(service) if state == "waiting" else None
    call = service.submit(endless(stepped.set))
    if held is None:
        when(stepped, call)
    other = service.generate("b", WORDS, seed=2)
    assert call.cancel()
    if held is not None:
        held.free()
    with pytest.raises(CancelledError):
        call.result(HANG)
    assert str(other.result(HANG)) == str(generate(LM, "b", WORDS, seed=2))
    assert not other.cancel() and service.stats.cancelled == 1


def test_a_full_service_refuses_calls():
    with Service(LM, max_waiting=2) as service:
        held = Held(service)
        calls = [service.generate("a", WORDS), service.generate("b", WORDS)]
        with pytest.raises(ServiceFull, match=r"is full \(2 waiting\)"):
            service.generate("a", WORDS)
        calls[0].cancel()
        calls.append(service.generate("a", WORDS))
        held.free()
        wait(calls[1:], HANG)
        assert (service.stats.refused, service.stats.cancelled) == (1, 1)


def spin(*_):
    """Return True after far too long."""
    end = time.monotonic() + HANG
    while time.monotonic() < end:
        pass
    return True


def test_code_of_a_call_ends_by_its_timeout_and_its_patience(service, embedded):
    for method in ("auto", "greedy"):
        with pytest.raises(TimeoutError, match="takes too long"):
            service.generate("a", spin, method=method, timeout=0.2).result(HANG)
    start = time.process_time()
    with Service(embedded) as other, pytest.raises(TimeoutError):
        other.generate("x", [f"o{i}" for i in range(4000)], timeout=0.2).result(HANG)
    assert time.process_time() - start < 2              # 0.3 on an idle machine; 4 s without a limit
    with Service(LM, patience=1) as impatient:
        calls = [impatient.generate("a", spin), impatient.generate("a", WORDS, seed=1)]
        with pytest.raises(TimeoutError, match="takes too long"):
            calls[0].result(HANG)
        assert str(calls[1].result(HANG)) == str(generate(LM, "a", WORDS, seed=1))


def test_a_call_that_has_ended_leaves_no_garbage_in_cycles(service):
    found = []

    class Part(Model):
        def step(self):
            found.append(weakref.ref(self))
            self.finish()

    gc.disable()
    try:
        call = service.submit(lambda: smc_steer(Part(), 1, 1, seed=1))
        call.result(HANG)
        del call
        end = time.monotonic() + 20
        while any(part() for part in found) and time.monotonic() < end:     # its thread ends the call
            time.sleep(0.01)
        assert found and not any(part() for part in found)
    finally:
        gc.enable()


def test_the_first_masks_are_computed_by_the_caller(embedded, monkeypatch):
    threads, find = [], TokenIndex._find

    def found(index, state):
        threads.append(threading.current_thread())
        return find(index, state)

    monkeypatch.setattr(TokenIndex, "_find", found)
    with Service(embedded) as service:
        held = Held(service)
        try:
            call = service.generate("a", Regex(" [a-z]{2,}ca"), method="sample", seed=1)
            assert set(threads) == {threading.current_thread()}
        finally:
            held.free()
        assert str(call.result(HANG)).endswith("ca")


def test_small_calls_pass_large_ones():
    with Service(LM, together=2) as service:
        large = [service.submit(endless(), timeout=20) for _ in range(4)]
        small = [service.generate("a", WORDS, seed=seed) for seed in range(4)]
        assert [str(each.result(HANG)) for each in small] == [str(generate(LM, "a", WORDS, seed=n)) for n in range(4)]
        assert not any(each.done() for each in large)
        for each in large:
            each.cancel()


def test_a_closed_service_ends_its_calls_and_takes_no_more():
    with Service(LM) as service:
        held = Held(service)
        call = service.generate("a", WORDS, seed=1)
        threading.Timer(0.01, held.go_on.set).start()
    assert str(call.result(0)) == str(generate(LM, "a", WORDS, seed=1))
    with pytest.raises(RuntimeError, match="closed"):
        service.generate("a", WORDS)
    with pytest.raises(KeyError), Service(LM) as service:
        call = service.submit(endless())
        raise KeyError
    with pytest.raises(CancelledError):
        call.result(0)


OPEN = """
import atexit, threading
atexit.register(lambda: print([each.name for each in threading.enumerate()]))           # after all others
from helpers.killable import VOCAB, hashed
from llmppl import CachedTransformer
from llmppl.serving import Service
service = Service(CachedTransformer(hashed, VOCAB))
service.generate("a", max_tokens=1_000_000)
"""


def test_a_program_that_ends_ends_the_threads_of_its_services():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", OPEN], env=environment, capture_output=True, text=True, timeout=HANG)
    assert (done.returncode, done.stdout) == (0, "['MainThread']\n"), done.stderr


@pytest.mark.parametrize("method", METHODS)
def test_settled_pieces_are_the_text_of_the_result(service, method):
    for seed, pattern in itertools.product(range(repetitions(60, 3)), [WORDS, Regex("(a|é|ab){2,5}")]):
        call = service.generate("a", pattern, method=method, seed=seed)
        assert "".join(call.texts()) == call.result(HANG).text


def test_text_settles_before_the_end(service):
    call = service.generate("a", max_tokens=200, method="sample", seed=2)
    assert len([*call.texts()]) > 3


def test_coroutines_await_calls_and_cancel_them(service):
    async def main():
        found = await asyncio.gather(*(service.generate("a", WORDS, seed=seed) for seed in range(5)))
        pieces = [piece async for piece in service.generate("a", WORDS, method="sample", seed=1)]
        stepped = threading.Event()
        call = service.submit(endless(stepped.set))
        waiting = asyncio.ensure_future(asyncio.wait_for(call, HANG))
        await asyncio.to_thread(when, stepped, call)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return found, pieces, call

    found, pieces, call = asyncio.run(main())
    assert [*map(str, found)] == [str(generate(LM, "a", WORDS, seed=seed)) for seed in range(5)]
    assert "".join(pieces) == generate(LM, "a", WORDS, method="sample", seed=1).text
    assert isinstance(call.exception(HANG), CancelledError)
