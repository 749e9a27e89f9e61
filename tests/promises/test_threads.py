"""Threads and interrupts: whatever happened to a language model before, its answers are those of a fresh one."""

import functools
import gc
import inspect
import operator
import sys
import threading
import traceback
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.cache import Remembering, logits_of
from helpers.common import FULL, HANG, repetitions, slow
from helpers.families import TRIE, VOCAB, V, at, build, check_books, error_of, truth
from helpers.fire import Interrupt, impatience, in_threads
from helpers.tiny import table_lm

from llmppl import CachedTransformer, ConstrainedText, Vocabulary, smc_steer
from llmppl import lm as room
from llmppl.lm import cache, evaluator
from llmppl.lm.cache import ROW_OVERHEAD, SLOT_OVERHEAD
from llmppl.models.programs import short_words

LIMIT = 1e-4


@pytest.fixture
def impatient():
    with impatience():
        yield


def contexts_at_random(rng, n, longest=30):
    return [[3, *rng.integers(3, V, rng.integers(1, longest)).tolist()] for _ in range(n)]


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [200, 100_000])
def test_answers_to_threads_that_share_an_lm_are_right(impatient, slots):
    cache_bytes = slots * (256 + SLOT_OVERHEAD + 4 * V + ROW_OVERHEAD)
    lm = CachedTransformer(build(TRIE["llama"]()), VOCAB, cache_bytes=cache_bytes)
    jobs = contexts_at_random(np.random.default_rng(0), repetitions(400, 100))
    for ids in jobs:
        truth(lm, ids)                                  # not while others use the model

    def work(k):
        return max(error_of(lm, functools.reduce(operator.add, ids[1:], at(lm, ids[:1]))) for ids in jobs[k::4])

    assert max(in_threads([functools.partial(work, k) for k in range(4)])) <= LIMIT
    assert max(error_of(lm, at(lm, ids)) for ids in jobs) <= LIMIT
    gc.collect()
    check_books(lm, [])


def test_runs_in_threads_equal_runs_in_one_thread(impatient, embedded):
    prompts = ["Once upon a time", "The little girl", "Tim was", "The sky was"]

    def run(lm, prompt):
        program = ConstrainedText(lm, prompt, max_tokens=12, mask=short_words(lm.vocab, 5))
        found = [smc_steer(program, 5, 3, seed=seed, progress=False) for seed in range(repetitions(8, 1))]
        return [each.texts for each in found], [each.log_ml for each in found]

    def fresh():
        return CachedTransformer(embedded.model, embedded.tokenizer)

    alone = [run(fresh(), prompt) for prompt in prompts]
    shared = fresh()
    together = in_threads([functools.partial(run, shared, prompt) for prompt in prompts])
    assert [texts for texts, _ in together] == [texts for texts, _ in alone]
    np.testing.assert_allclose([logs for _, logs in together], [logs for _, logs in alone], atol=LIMIT)


def test_several_threads_may_make_contexts_from_texts(impatient, embedded):
    lm = CachedTransformer(embedded.model, embedded.tokenizer)
    texts = [f"Once there were {n} cats and {n + 1} dogs." for n in range(60)]
    right = [[int(i) for i in embedded.context(text).tokens] for text in texts]

    def work():
        return [[int(i) for i in lm.context(text).tokens] for text in texts]

    assert in_threads([work] * 4) == [right] * 4


@pytest.mark.filterwarnings("ignore:cache_bytes=")
def test_special_tokens_are_those_of_the_own_call_in_every_thread(impatient, embedded):
    [name] = embedded.tokenizer.all_special_tokens
    text = f"a{name}b"

    def tokens(special):
        return embedded.context(text, special=special).tokens

    wanted = {special: tokens(special) for special in (True, False)}
    assert wanted[True] != wanted[False]
    calls = [True, False] * 2000
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(tokens, calls)]
    assert all(each == wanted[special] for each, special in zip(found, calls, strict=True))


def test_contexts_may_be_freed_in_any_thread_and_inside_a_call():
    lm = CachedTransformer(build(TRIE["llama"]()), VOCAB, cache_bytes=30 * (256 + SLOT_OVERHEAD + 4 * V + ROW_OVERHEAD))
    rng, stop = np.random.default_rng(1), threading.Event()
    heap = [[at(lm, ids)] for ids in contexts_at_random(rng, 100)]
    jobs = contexts_at_random(rng, 60)
    for ids in jobs:
        truth(lm, ids)                                  # not while others use the model

    def make_cycles():
        while not stop.is_set():
            for ids in contexts_at_random(np.random.default_rng(2), 20):
                cycle = [at(lm, ids)]
                cycle.append(cycle)                     # only the collector ends it

    def ask():
        try:
            return [(heap.pop(), error_of(lm, at(lm, ids)))[1] for ids in jobs]
        finally:
            stop.set()

    thresholds = gc.get_threshold()
    gc.set_threshold(50)                                # the collector comes often, to whichever thread allocates
    try:
        assert max(in_threads([ask, make_cycles])[0]) <= LIMIT
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    check_books(lm, [context for (context,) in heap])


def test_threads_wait_only_for_the_lm_that_they_share():
    together, inside, most = threading.Barrier(2), threading.Semaphore(1), []

    def meets(ids):                                     # returns only if the other lm is in its function as well
        together.wait(HANG)
        return [0.0, 0.0, 0.0]

    in_threads([table_lm(meets).context("a").log_probs for _ in range(2)])

    def alone(ids):
        most.append(inside.acquire(blocking=False))
        threading.Event().wait(0.001)
        inside.release()
        return [0.0, 0.0, 0.0]

    lm = table_lm(alone)
    in_threads([lambda n=n: lm.context("a" * n).log_probs() for n in range(1, 9)])
    assert most == [True] * 8


def test_a_thread_computes_and_counts_its_own_prefetches():
    asked = []
    lm = table_lm(lambda ids: asked.append((threading.current_thread(), tuple(ids))) or [0.0, 0.0, 0.0])
    mine, other = lm.context("a"), lm.context("b")
    asker = threading.Event()                           # any object
    mine.prefetch(asker)
    in_threads([other.log_probs])
    assert [ids for _, ids in asked] == [(1,)]
    assert lm.evaluator.done().rows == 0 and lm.stats.rows == 1
    lm.context("ab").log_probs()
    assert sorted(ids for thread, ids in asked if thread is threading.current_thread()) == [(0,), (0, 1)]
    assert lm.evaluator.done().rows == 2 and lm.stats.rows == 3


def test_a_prefetch_of_an_ended_thread_is_dropped():
    asked = []
    lm = table_lm(lambda ids: asked.append(tuple(ids)) or [0.0, 0.0, 0.0])
    held, asker, dropped = lm.context("aa"), threading.Event(), lm.context("bb")
    held.prefetch(threading.Event())                    # who asked is gone at once, and the context is not
    dropped.prefetch(asker)
    del dropped                                         # the other way round
    lm.context("a").log_probs()
    assert asked == [(0,)] and len(held) == 2


def test_an_lm_called_by_its_own_function_is_an_error():
    lm = table_lm(lambda ids: lm.context("a").log_probs())
    with pytest.raises(RuntimeError, match="a language model was used from inside a call of its own"):
        lm.context("b").log_probs()


# --- interrupts -------------------------------------------------------------------------------------------------------

FILES = {each.__file__ for each in (cache, room.context, evaluator, room.transformer)}
A = Vocabulary([bytes([97 + i]) for i in range(8)] + [b""], eos_ids=[8])


def wrong(lm, ids):
    logits = logits_of(ids)
    return np.abs(at(lm, ids).log_probs() - (logits - np.logaddexp.reduce(logits))).max() > LIMIT


def small_contexts(rng, n):
    return [[0, *rng.integers(0, 8, rng.integers(1, 9)).tolist()] for _ in range(n)]


JOBS = small_contexts(np.random.default_rng(5), 24)


def a_day(lm):
    """Rounds of several contexts, strings, contexts that come and go, drawings: most of what an lm does."""
    kept = []
    for k in range(0, len(JOBS), 3):
        contexts = [at(lm, ids[:2]) + "".join(chr(97 + i) for i in ids[2:]) for ids in JOBS[k : k + 3]]
        for context in contexts:
            context.prefetch(lm)
        contexts[0].log_probs()
        contexts[1].log_prob_since(at(lm, JOBS[k + 1][:1]))
        kept = [*kept[-4:], contexts[2]]
        del contexts, context
    try:
        lm.context("abba").log_probs()
        repr(kept[0]), str(lm.trie), len(lm.trie), kept[0].text, lm.context("a") == kept[0], hash(kept[0]), repr(lm)
    finally:
        kept.clear()


SLOT, ROW = 64 + SLOT_OVERHEAD, 72 + ROW_OVERHEAD
BUDGETS = [0, 6 * SLOT_OVERHEAD, 20 * SLOT + 3 * ROW, 60 * SLOT + 3 * ROW]


def new_lm(budget):
    return CachedTransformer(Remembering(), A, cache_bytes=budget)


@pytest.fixture(scope="module")
def lines():
    """For each line that a day reaches, under each budget, how often it does."""
    seen = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for budget in BUDGETS:
            with Interrupt(FILES) as watch:
                a_day(new_lm(budget))
            for place, times in watch.seen.items():
                seen.setdefault(place, {})[budget] = times
    return seen


@pytest.mark.filterwarnings("ignore:cache_bytes=")
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt, *slow(MemoryError)])
def test_after_an_interrupt_at_any_line_every_answer_is_right(lines, error, monkeypatch):
    swallowed = []
    monkeypatch.setattr(sys, "unraisablehook", swallowed.append)
    rng, reached, faults = np.random.default_rng(0), set(), []
    cases = [(place, budget, budgets[budget]) for place, budgets in lines.items()
             for budget in list(budgets)[-repetitions(2, 1) :]]  # fmt: skip
    for place, budget, times in cases[:: repetitions(1, 2)]:
        for nth in sorted({times // 2 + 1, *([1, times] if FULL else [])}):
            lm = new_lm(budget)
            held = [at(lm, ids) for ids in JOBS[:3]]
            with Interrupt(FILES, place, nth, error) as interrupt:
                a_day(lm)
            reached |= {place} if interrupt.left == 0 else set()
            try:
                faults += [(place, nth, budget, ids) for ids in [*JOBS, *small_contexts(rng, 10)] if wrong(lm, ids)]
                assert in_threads([functools.partial(wrong, lm, [0, 1])]) == [False]       # no lock is left
                check_books(lm, held)
            except Exception:
                faults.append((place, nth, budget, traceback.format_exc()))
    assert len(reached) >= repetitions(150, 75) and faults == [] and swallowed == []


def test_an_interrupted_clear_is_finished_by_the_next_call():
    lm = new_lm(BUDGETS[-1])
    held = [at(lm, ids) for ids in JOBS[:3]]
    source, first = inspect.getsourcelines(evaluator.CachedEvaluator._clear)
    for line in range(first + 1, first + len(source)):
        a_day(lm)
        with Interrupt(FILES, (evaluator.__file__, line)) as interrupt:
            lm.clear()
        assert interrupt.left == 0 and not any(wrong(lm, ids) for ids in JOBS)
        check_books(lm, held)


def test_freeing_a_context_runs_no_code_of_ours():
    lm = CachedTransformer(build(TRIE["llama"]()), VOCAB)
    context = at(lm, [3, 4, 5])
    died, ran = weakref.ref(context), []
    sys.setprofile(lambda frame, event, arg: ran.append(frame.f_code.co_name) if event == "call" else None)
    try:
        del context
    finally:
        sys.setprofile(None)
    assert died() is None and ran == []
    assert len(lm.trie) == 0


# --- what stays within the budget -------------------------------------------------------------------------------------


@pytest.mark.parametrize("megabytes", [8, 32, 2048])
def test_a_full_cache_still_answers_a_repeated_question_without_a_run(embedded, megabytes):
    lm = CachedTransformer(embedded.model, embedded.tokenizer, cache_bytes=megabytes << 20)
    rng = np.random.default_rng(0)
    for _ in range(40 if megabytes == 8 else 3):
        (at(lm, [300, *rng.integers(300, 3000, 120)])).log_probs()
    context = lm.context("Once upon a time there was")
    context.log_probs()
    before = lm.evaluator.done()
    for _ in range(10):
        context.log_probs()
    assert (lm.evaluator.done() - before).tokens == 0
    program = ConstrainedText(lm, "Tim", mask=short_words(lm.vocab, 5), max_tokens=12)
    found = smc_steer(program, 5, 3, seed=1, progress=False)
    assert found.stats.rounds == 12
