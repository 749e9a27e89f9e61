"""Forks: a child never hangs, whatever the other threads of its parent do, and its answers are right.

A watchdog ends a child that hangs, with the stacks of its threads, so that the test fails.
"""

import contextlib
import itertools
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from helpers import masks
from helpers.common import HANG, repetitions
from helpers.fire import in_child
from helpers.killable import VOCAB, fresh, hashed

from llmppl import CachedTransformer, PromptIntersection, TokenIndex, batched, search, smc_steer
from llmppl.serving import Service

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="wants fork"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),          # Python 3.12 warns of it
]


class Stop:
    """A place where other threads than the first stop: `with stop.at(function):` runs it until it is there."""

    def __init__(self):
        self.here, self.go = threading.Event(), threading.Event()

    def pass_by(self):
        if threading.current_thread() is not threading.main_thread() and not self.go.is_set():
            self.here.set()
            assert self.go.wait(HANG)

    @contextlib.contextmanager
    def at(self, function):
        found = []
        thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
        thread.start()
        assert self.here.wait(HANG) and thread.is_alive()
        yield found
        self.go.set()
        thread.join(HANG)
        assert len(found) == 1, "the parent's thread has not ended"


def rows(lm, texts=("", "a", "ab", "abca", "c")):
    return [lm.context(text).log_probs().tolist() for text in texts]


def test_a_thread_inside_an_lm_does_not_block_the_child():
    stop, right = Stop(), rows(CachedTransformer(hashed, VOCAB))
    lm = CachedTransformer(lambda ids: [ids == [0, 1, 2] and stop.pass_by(), hashed(ids)][1], VOCAB)
    held = lm.context("ab")
    rows(lm, ["", "ab", "ca"])
    with stop.at(lambda: lm.context("abc").log_probs().tolist()) as found:
        theirs = in_child(lambda: [rows(lm), (held + 2).log_probs().tolist(), repr(lm.trie)])
        assert theirs[:2] == [right, rows(CachedTransformer(hashed, VOCAB), ["abc"])[0]]
        assert in_child(lambda: in_child(lambda: rows(lm))) == right
    assert [found[0], rows(lm)] == [rows(lm, ["abc"])[0], right]


def test_a_thread_inside_a_batched_function_does_not_block_the_child():
    stop = Stop()

    @batched
    def double(numbers):
        stop.pass_by()
        return [2 * number for number in numbers]

    with stop.at(lambda: double(1)) as found:
        assert in_child(lambda: [double(1), double(2)]) == [2, 4]
    assert found == [2]


def test_a_thread_inside_a_mask_does_not_block_the_child():
    stop = Stop()

    class Brackets(masks.Brackets):
        def step(self, state, byte):
            if state[0] == "((":
                stop.pass_by()
            return super().step(state, byte)

    def told(index):
        states = [index.start, index.after("("), index.after("(("), index.after("(([")]
        return [index.mask(state).tobytes() for state in states] + [index.tokens_to_accept(states[2])]

    right, index = told(TokenIndex(masks.Brackets(), masks.VOCAB)), TokenIndex(Brackets(), masks.VOCAB)
    with stop.at(lambda: index.mask(("((", 0)).tobytes()) as found:
        assert in_child(lambda: told(index)) == right
    assert found == right[2:3] and told(index) == right


RUNS = {
    "steer": lambda lm: smc_steer(PromptIntersection(lm, ["a", "bc"], max_tokens=3), 3, 2, seed=0).log_ml,
    "query": lambda lm: [(match.text, match.log_prob) for match in search(lm, "[abc]{2}", prefix="a")],
}


@pytest.mark.parametrize("run", RUNS)
def test_a_thread_inside_a_run_does_not_block_the_child(run):
    stop, right = Stop(), RUNS[run](CachedTransformer(hashed, VOCAB))
    lm = CachedTransformer(lambda ids: [len(ids) == 2 and stop.pass_by(), hashed(ids)][1], VOCAB)
    with stop.at(lambda: RUNS[run](lm)) as found:
        assert in_child(lambda: RUNS[run](lm)) == right
    assert found == [right]


def test_a_service_of_the_parent_is_an_error_in_the_child():
    lm = CachedTransformer(hashed, VOCAB)

    def call(service):
        return service.generate("a", max_tokens=3, seed=1).result(HANG).text

    def work():
        with pytest.raises(RuntimeError, match="forked process: make a Service here"):
            call(service)
        service.close()
        with Service(lm) as own:
            return call(own)

    with Service(lm) as service:
        assert in_child(work) == call(service)


def test_forks_beside_a_busy_thread_never_hang():
    work, over = fresh(), threading.Event()
    right = work("b", np.random.default_rng(0)).log_ml

    def busy():
        for seed in itertools.count():
            if over.is_set():
                return
            fresh()("b", np.random.default_rng(seed))

    thread = threading.Thread(target=busy, daemon=True)
    thread.start()
    found = [in_child(lambda: work("b", np.random.default_rng(0)).log_ml) for _ in range(repetitions(full=25, quick=4))]
    over.set()
    thread.join(HANG)
    assert {*found} == {right}


# --- native threads, in a process where torch and llama.cpp have two --------------------------------------------------


def torch_in_parallel():
    import torch

    torch.set_num_threads(2)
    lm, large = CachedTransformer.from_pretrained(engine="transformers"), torch.ones(500, 500)

    def work():
        return [float((large @ large).exp().sum()), lm.context("Once upon a").log_probs().argmax()]

    return [torch.get_num_threads() == 2, in_child(lambda: in_child(work) == work()), in_child(work) == work()]


def llama_in_parallel(path):
    from llmppl.lm.engines.llamacpp import LlamaCpp

    engine, ids = LlamaCpp(path, threads=2), list(range(3, 60))

    def work():
        engine.clear()
        return engine.forward([ids, [*ids[:30], 7]], [(0, 50), (0, 57), (1, 31)])

    right = work()
    thread = threading.Thread(target=lambda: [engine.forward([[*ids, k]], [(0, 58)]) for k in range(200)], daemon=True)
    thread.start()
    found = [in_child(lambda: bool(np.abs(work() - right).max() < 1e-3)) for _ in range(5)]
    thread.join(HANG)
    return found


@pytest.fixture(scope="module")
def gguf_file(embedded, tmp_path_factory):
    pytest.importorskip("xllamacpp", reason="pip install 'llmppl-smc[llama-cpp]'")
    pytest.importorskip("gguf", reason="pip install 'llmppl-smc[llama-cpp]'")
    from helpers.gguf_files import byte_level, write

    from llmppl.lm.embedded import PATH

    return str(write(tmp_path_factory.mktemp("forks") / "F32.gguf", embedded.model, byte_level(PATH, 4096), "F32"))


def found_with_two_threads(work):
    code = f"import test_forks; print('found', all(test_forks.{work}))"
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "found True" in done.stdout, done.stderr


@pytest.mark.slow
def test_torch_threads_do_not_block_the_child():
    found_with_two_threads("torch_in_parallel()")


@pytest.mark.slow
def test_llama_cpp_threads_do_not_block_the_child(gguf_file):
    found_with_two_threads(f"llama_in_parallel({gguf_file!r})")
