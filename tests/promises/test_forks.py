"""Forks: a child never hangs, whatever the other threads of its parent were at, and its answers are right.

Each child has a watchdog, which ends it with the stacks of its threads: a child that hangs is a test that fails.
"""

import contextlib
import gc
import importlib
import os
import pickle
import random
import subprocess
import sys
import threading
import time
import traceback
import types
from multiprocessing import util

import numpy as np
import pytest
from helpers import masks
from helpers.common import HANG, repetitions
from helpers.fire import impatience, in_child, watch
from helpers.killable import hashed

import llmppl
from llmppl import CachedTransformer, ConstrainedText, Grammar, Regex, TokenIndex, Vocabulary, batched, smc_steer
from llmppl.constraints.constraint import without_bytes
from llmppl.constraints.vocabulary.trie import Trie
from llmppl.lm.engines import llamacpp_api

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="wants fork"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),          # which Python 3.12 warns of
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

        def work():
            try:
                found.append(function())
            finally:
                self.here.set()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        assert self.here.wait(HANG) and thread.is_alive()
        try:
            yield found
        finally:
            self.go.set()
            thread.join(HANG)
        assert len(found) == 1, "the parent's thread has not ended"


VOCAB = Vocabulary([b"a", b"b", b"c", b""], eos_ids=[3])


def rows(lm, texts=("", "a", "ab", "abca", "c")):
    return [lm.context(text).log_probs().tolist() for text in texts]


# --- a thread stands at a known place ---------------------------------------------------------------------------------


def stopping_lm(stop):
    def logits(ids):
        if ids == [0, 1, 2]:
            stop.pass_by()
        return hashed(ids)

    return CachedTransformer(logits, VOCAB)


def test_a_thread_inside_an_lm_does_not_block_the_child():
    stop, right = Stop(), rows(CachedTransformer(hashed, VOCAB))
    lm = stopping_lm(stop)
    held = lm.context("ab")
    rows(lm, ["", "ab", "ca"])
    with stop.at(lambda: lm.context("abc").log_probs().tolist()) as found:
        assert in_child(lambda: [rows(lm), (held + 2).log_probs().tolist(), repr(lm.trie)])[:2] == [
            right, rows(CachedTransformer(hashed, VOCAB), ["abc"])[0]
        ]  # fmt: skip
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


def test_a_thread_that_computes_an_attribute_does_not_block_the_child(monkeypatch):
    stop, attribute = Stop(), next(name for name, value in vars(Trie).items() if hasattr(value, "attrname"))
    work_out = vars(Trie)[attribute].func
    monkeypatch.setattr(vars(Trie)[attribute], "func", lambda trie: [stop.pass_by(), work_out(trie)][1])

    def told():
        return pickle.dumps(getattr(Trie(VOCAB.tokens, without_bytes(VOCAB)), attribute))

    with stop.at(told) as found:
        assert in_child(told) == told()
    assert found == [told()]


def test_a_thread_that_loads_a_library_does_not_block_the_child(monkeypatch):
    stop = Stop()
    monkeypatch.setattr(llamacpp_api, "_library", None)
    monkeypatch.setattr(llamacpp_api, "_path", stop.pass_by)
    monkeypatch.setattr(llamacpp_api, "Library", lambda path: "it")
    with stop.at(llamacpp_api.library) as found:
        assert in_child(llamacpp_api.library) == "it"
    assert found == ["it"]


def test_a_thread_that_loads_a_model_does_not_block_the_child(monkeypatch, embedded):
    from llmppl.lm.engines import loading

    stop, load = Stop(), loading.AutoModelForCausalLM.from_pretrained
    stub = types.SimpleNamespace(from_pretrained=lambda *a, **k: [stop.pass_by(), load(*a, **k)][1])
    monkeypatch.setattr(loading, "AutoModelForCausalLM", stub)
    right = embedded.context("Once upon").log_probs()
    with stop.at(CachedTransformer.from_pretrained):
        assert np.allclose(in_child(lambda: rows(CachedTransformer.from_pretrained(), ["Once upon"])), right, atol=1e-4)


def test_a_thread_inside_an_adapter_does_not_block_the_child(embedded):
    from llmppl.lm.engines.hf_adapters import Adapted

    stop, adapted = Stop(), Adapted(embedded.model)
    adapted._chosen = lambda: contextlib.nullcontext(stop.pass_by())
    type(adapted).loaded, loaded = {"a": None}, type(adapted).loaded        # as if it had any
    try:
        adapted.model = lambda: "called"
        with stop.at(adapted) as found:
            assert in_child(adapted) == "called"
        assert found == ["called"]
    finally:
        type(adapted).loaded = loaded


# --- a fork from inside a call ----------------------------------------------------------------------------------------


def test_a_fork_inside_a_call_continues_in_both_processes():
    children = []

    def logits(ids):
        if ids == [0, 1, 2] and not children:
            children.append(os.fork())
            if not children[0]:
                watch()
        return hashed(ids)

    lm, right = CachedTransformer(logits, VOCAB), rows(CachedTransformer(hashed, VOCAB), ["abc", "a", "abcb"])
    try:
        found = rows(lm, ["abc", "a", "abcb"])
    finally:
        if children == [0]:
            os._exit(found != right)
    assert os.waitpid(children[0], 0)[1] == 0 and found == right


def test_a_fork_inside_a_call_may_not_call_again():
    def logits(ids):
        if len(ids) == 3:
            said.append(in_child(ask_again))
        return hashed(ids)

    def ask_again():
        try:
            return lm.context("b").log_probs().tolist()
        except RuntimeError as error:
            return str(error)

    said, lm = [], CachedTransformer(logits, VOCAB)
    lm.context("abc").log_probs()
    assert said[0].startswith("a language model was used from inside a call of its own")
    assert rows(lm) == rows(CachedTransformer(hashed, VOCAB))


def test_a_batched_function_may_fork_and_the_child_may_call_it():
    @batched
    def squares(numbers):
        return [in_child(lambda: squares(2)) if number == 3 else number**2 for number in numbers]

    assert [squares(3), squares(4)] == [4, 16]


# --- runs under way ---------------------------------------------------------------------------------------------------


def begun():
    """Results of which the first is there, with two tasks under way."""
    lm = CachedTransformer(hashed, VOCAB)

    def run(task, rng):
        return smc_steer(ConstrainedText(lm, task, max_tokens=4 + len(task)), 3, 2, rng=rng, progress=False)

    results = llmppl.run_many(run, ["a", "ab", "abc", "abca", "c"], together=3, seed=1, progress=False)
    return results, next(results)


def as_data(results):
    return sorted((result.index, result.error, result.particles.to_dict()) for result in results)


def without_seconds(records):
    return [(index, error, {**data, "stats": None}) for index, error, data in records]


def test_the_child_may_continue_with_results_or_drop_them():
    results, _ = begun()

    def let_go():
        nonlocal results
        del results
        return gc.collect() >= 0

    assert in_child(let_go)
    assert in_child(lambda: [*map(results.close, [])] == [] and results.close() is None)
    theirs = in_child(lambda: as_data(results))
    assert without_seconds(theirs) == without_seconds(as_data(results)) and len(theirs) == 4


def test_the_child_of_another_thread_drops_results():
    kept, ready, done = [], threading.Event(), threading.Event()

    def begin():
        kept.append(begun()[0])
        ready.set()
        done.wait(HANG)
        kept[1:] = [len(list(kept[0]))]

    def ask():
        with pytest.raises(RuntimeError, match="goes on in the thread that began it"):
            next(kept[0])
        kept.clear()
        return gc.collect() >= 0

    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    assert ready.wait(HANG)
    assert in_child(ask) and in_child(lambda: kept.clear() is None and gc.collect() >= 0)
    done.set()
    thread.join(HANG)
    assert kept[1:] == [4]


# --- native threads ---------------------------------------------------------------------------------------------------


def with_two_threads(work):
    """What a process prints that calls a function of this file, where torch and llama.cpp have two threads."""
    code = f"import test_forks; print('found', test_forks.{work})"
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if line.startswith("found")], done.stderr


def torch_in_parallel():
    import torch

    torch.set_num_threads(2)
    lm, large = CachedTransformer.from_pretrained(), torch.ones(500, 500)

    def work():
        return [float((large @ large).exp().sum()), lm.context("Once upon a").log_probs().argmax()]

    return [torch.get_num_threads(), in_child(lambda: in_child(work) == work()), in_child(work) == work()]


def test_torch_threads_do_not_block_the_child():
    found, said = with_two_threads("torch_in_parallel()")
    assert found == ["found [2, True, True]"], said


@pytest.fixture(scope="module")
def gguf_file(embedded, tmp_path_factory):
    pytest.importorskip("xllamacpp", reason="pip install 'llmppl[llama-cpp]'")
    pytest.importorskip("gguf", reason="pip install 'llmppl[llama-cpp]'")
    from helpers.gguf_files import byte_level, write

    from llmppl.lm.embedded import PATH

    return write(tmp_path_factory.mktemp("forks") / "F32.gguf", embedded.model, byte_level(PATH, 4096), "F32")


def llama(path):
    """An engine in two threads: idle, in the middle of a pass, and the end of a child that ends as programs do."""
    from llmppl.lm.engines.llamacpp import LlamaCpp

    engine, stop = LlamaCpp(path, threads=2), threading.Event()
    ids, others = list(range(3, 60)), np.random.default_rng(0).integers(3, 4000, (400, 90)).tolist()

    def work():
        engine.clear()
        return engine.forward([ids, [*ids[:30], 7]], [(0, 50), (0, 57), (1, 31)])

    right = work()

    def is_right():
        return bool(np.abs(work() - right).max() < 1e-3)

    found = [is_right(), in_child(is_right), in_child(lambda: in_child(is_right) and is_right())]

    def busy():
        for each in others:
            engine.forward([each], [(0, 90)])
            if stop.is_set():
                return

    thread = threading.Thread(target=busy, daemon=True)
    thread.start()
    for _ in range(5):
        time.sleep(0.01)
        found.append(in_child(is_right))
    stop.set()
    thread.join(HANG)
    for ask in (is_right, bool):
        child = os.fork()
        if not child:
            watch()
            ask()
            sys.exit(0)
        found.append(os.waitpid(child, 0)[1] == 0)
    engine.close()
    return {*found, is_right_after_close(engine)}


def is_right_after_close(engine):
    """Whether a child says that the engine was closed."""

    def ask():
        with pytest.raises(ValueError, match="was closed"):
            engine.forward([[3]], [(0, 1)])
        return True

    return in_child(ask)


def test_llama_cpp_threads_do_not_block_the_child(gguf_file):
    found, said = with_two_threads(f"llama({str(gguf_file)!r})")
    assert found[-1:] == ["found {True}"], said


class Anything(types.ModuleType):
    """A module that has everything."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *_, **__: None, "is_cpu": staticmethod(lambda: True)})


VLLM = ["", ".distributed", ".inputs.engine", ".platforms", ".v1.executor", ".v1.sample.logits_processor",
        ".v1.worker.gpu.sample.logits_processor"]  # fmt: skip


def test_vllm_refuses_to_run_in_the_child(monkeypatch):
    for name in VLLM:
        monkeypatch.setitem(sys.modules, f"vllm{name}", Anything(f"vllm{name}"))
    monkeypatch.delitem(sys.modules, "llmppl.lm.engines.vllm", raising=False)
    vllm = importlib.import_module("llmppl.lm.engines.vllm")
    del sys.modules["llmppl.lm.engines.vllm"]
    shut, llm = [], Anything("llm")
    llm.engine_core = types.SimpleNamespace(shutdown=lambda: shut.append(os.getpid()))
    llm.model_config = types.SimpleNamespace(
        model="stub", dtype="torch.float32", max_model_len=64, hf_text_config=None, get_vocab_size=lambda: 4,
        try_get_generation_config=dict,
    )  # fmt: skip
    llm.reset_prefix_cache = lambda: True
    llm.vllm_config = types.SimpleNamespace(
        cache_config=types.SimpleNamespace(block_size=16),
        parallel_config=types.SimpleNamespace(distributed_executor_backend="uni"),
    )
    monkeypatch.setattr(vllm, "_start", lambda options: llm)
    engine = vllm.VllmEngine(model="stub")
    engine.clear()

    def ask():
        said = []
        for call in (engine.clear, lambda: engine.forward([[1]], [(0, 1)])):
            with pytest.raises(RuntimeError, match="vLLM's engine belongs to the parent process of this fork"):
                said.append(call())
        vllm._living.clear()
        util._exit_function()
        return [said, shut]

    assert in_child(ask) == [[], []]
    engine.close()
    assert shut == [os.getpid()]


# --- at any moment ----------------------------------------------------------------------------------------------------

SEEDS = range(2)


def steered(lm, seed=3):
    program = ConstrainedText(lm, "Once upon a time", Regex(" [a-z ]+[.!]"), max_tokens=10)
    found = smc_steer(program, 4, 2, seed=seed, progress=False)
    return [str(particle) for particle in found], round(found.log_ml, 2)


def jobs(embedded, gguf_file):
    """{name: (make what is shared, ask it)}"""
    from transformers import AutoTokenizer

    from llmppl.lm.embedded import PATH
    from llmppl.lm.engines.llamacpp import LlamaCpp

    tokenizer = AutoTokenizer.from_pretrained(PATH)
    found = {
        "embedded": (lambda: CachedTransformer(embedded.model, embedded.tokenizer), steered),
        "llama.cpp": (lambda: CachedTransformer(LlamaCpp(gguf_file, threads=1), tokenizer), steered),
        "function": (lambda: CachedTransformer(hashed, VOCAB), rows),
    }
    for name in ("regex", "guards", "whole", "json", "bare", "indented", "schema", "canonical", "counts", "leftmost"):
        case = masks.CASES[name]
        found[name] = case.make, lambda shared, case=case: masks.walks(case, shared, SEEDS)
    return found


def test_children_of_busy_threads_are_right_at_any_moment(embedded, gguf_file):
    todo = jobs(embedded, gguf_file)
    right = {name: ask(make()) for name, (make, ask) in todo.items()}
    shared = {name: make() for name, (make, _) in todo.items()}
    stop, wrong, rng = threading.Event(), [], random.Random(0)

    def keep_busy(names, seed):
        order = random.Random(seed)
        try:
            while not stop.is_set():
                name = order.choice(names)
                make, ask = todo[name]
                if ask(shared[name]) != right[name]:
                    wrong.append(name)
                if name == "llama.cpp":                 # which is slow to make
                    shared[name].clear()
                elif order.random() < 0.5:
                    shared[name] = make()
        except BaseException:
            wrong.append(traceback.format_exc())

    def asked():
        return {name: ask(shared[name]) for name, (_, ask) in todo.items()} | {
            "fresh regex": steered(shared["embedded"], seed=4), "fresh grammar": bool(Grammar(masks.JSON).start)
        }  # fmt: skip

    expected = right | {"fresh regex": steered(todo["embedded"][0](), seed=4), "fresh grammar": True}
    lms, others = ["embedded", "llama.cpp", "function"], [name for name in todo if name not in masks.CASES]
    kinds = [lms, lms, [*masks.CASES.keys() & todo.keys()], [*todo], others]
    threads = [threading.Thread(target=keep_busy, args=each, daemon=True) for each in zip(kinds, range(5), strict=True)]
    with impatience():
        for thread in threads:
            thread.start()
        try:
            for _ in range(repetitions(200, 3)):
                time.sleep(rng.random() / 10)
                assert in_child(asked) == expected
        finally:
            stop.set()
            for thread in threads:
                thread.join(HANG)
    assert wrong == [] and not any(thread.is_alive() for thread in threads)
