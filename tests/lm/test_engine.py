"""Engines: their calls and counts. `check_engine` finds engines that are wrong."""

import threading

import numpy as np
import pytest
import torch
from helpers.cache import Remembering
from helpers.common import slow
from helpers.families import RECOMPUTED, TRIE, VOCAB, V, at, build, error_of, family_lm, model_of, quietly, together

from llmppl import CachedTransformer, ConstrainedText, Regex, Vocabulary, smc_steer
from llmppl.lm import Engine, evaluator
from llmppl.lm.engine import FunctionEngine
from llmppl.lm.engines import hf
from llmppl.lm.engines.hf import Adapted
from llmppl.testing import check_engine

SIZE = 11
LETTERS = Vocabulary([bytes([97 + i]) for i in range(SIZE - 1)] + [b""], eos_ids=[SIZE - 1])


def logits_of(ids):
    """Return (SIZE,) logits: normal numbers that depend on all of the tokens."""
    return np.random.default_rng([len(ids), *ids]).normal(size=SIZE)


def log_probs_of(ids):
    return logits_of(ids) - np.logaddexp.reduce(logits_of(ids))


class Keeping(Engine):
    """Engine that remembers the prefixes it has read, and counts only new tokens."""

    name, max_length = "keeping", 60

    def __init__(self, size=1000):
        self.kept, self.size = {()}, size
        self.calls, self.released, self.cleared = [], [], 0

    def forward(self, contexts, asked):
        self.calls.append(([list(each) for each in contexts], list(asked)))
        for ids in contexts:
            new = [tuple(ids[: n + 1]) for n in range(len(ids)) if tuple(ids[: n + 1]) not in self.kept]
            self.tokens += max(1, len(new))             # the last is run again for its logits
            self.kept.update(new)
        if len(self.kept) > self.size:
            self.kept = {()}
        return np.stack([self.logits(contexts[i][:n]) for i, n in asked])

    def logits(self, ids):
        return logits_of(ids)

    def release(self, contexts):
        self.released += contexts

    def clear(self):
        self.cleared += 1
        self.kept = {()}


def check(engine, reference=logits_of, **options):
    return check_engine(engine, reference, ids=range(1, 9), size=SIZE, **{"contexts": 40, **options})


# --- the conformance suite --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [FunctionEngine(logits_of, SIZE), Keeping(60), Keeping()], ids=["no", "some", "all"])
def test_correct_engines_pass(engine):
    report = check(engine)
    assert report.distance < 1e-12 and report.total_variation < 1e-12
    assert report.rows > 150 and report.tokens <= report.whole
    assert (report.tokens < report.whole) == (type(engine) is Keeping)
    assert check(engine, None).distance < 1e-12         # beside its own, with nothing kept


USUAL = ["gpt2", "llama", "gemma2", "mistral-sliding", "gpt-neox", "mamba"]


@pytest.mark.parametrize("name", [*USUAL, *slow(*sorted({*TRIE, *RECOMPUTED} - {*USUAL}))])
def test_every_family_of_transformers_passes(name):
    """Each is checked by whole contexts and, through the cache, by the slab."""
    engine = quietly(hf.engine, model_of(name), VOCAB, 1 << 16)
    engine.max_length = 40
    plain = hf.Recomputed(Adapted(model_of(name)), 1 << 16)
    report = check_engine(
        engine, lambda ids: plain.forward([ids], [(0, len(ids))])[0], ids=range(3, 12), size=V, contexts=40
    )
    assert report.rows > 150 and isinstance(engine, hf.Cached) == (name in TRIE)


class OffByALittle(Keeping):
    def logits(self, ids):
        return logits_of(ids) + 1e-3 * (len(ids) == 9) * np.arange(SIZE)


class ForgetsTheStart(Keeping):
    def logits(self, ids):
        return logits_of(ids[-8:])


class Changes(Keeping):
    def forward(self, contexts, asked):
        found = super().forward(contexts, asked)
        contexts[0].append(1)
        return found


class SortsWhatIsAsked(Keeping):
    def forward(self, contexts, asked):
        return super().forward(contexts, sorted(asked))


class CountsNothing(Keeping):
    tokens = property(lambda self: 0, lambda self, _: None)


class CountsTwice(Keeping):
    def forward(self, contexts, asked):
        self.tokens += 1 + sum(n for _, n in asked)
        return super().forward(contexts, asked)


class KeepsWhatWasReleased(Keeping):
    """Engine that answers wrongly for a released context."""

    def logits(self, ids):
        released = [each for each in self.released if each == ids[: len(each)]]
        return logits_of(released[0] if released else ids)


class HalfDone(Keeping):
    """Engine that, after an interrupt, counts tokens as read that were not."""

    def __init__(self):
        super().__init__()
        self.half = False

    def forward(self, contexts, asked):
        broken, self.half = self.half, True
        found = super().forward(contexts, asked)
        for _ in range(200_000):
            pass
        self.half = False
        return found + np.arange(SIZE) * broken


class RefusesTheLongest(Keeping):
    def forward(self, contexts, asked):
        if any(len(each) == self.max_length for each in contexts):
            raise IndexError("one too many")
        return super().forward(contexts, asked)


class OfOneThread(Keeping):
    def forward(self, contexts, asked):
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("no loop here")
        return super().forward(contexts, asked)


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        (OffByALittle, r"unequal lengths|a log-probability is off by 0\.00\d+, more than 0.0001"),
        (ForgetsTheStart, r"unequal lengths: after the tokens \[.*\] a log-probability is off"),
        (Changes, "forward has changed the contexts"),
        (SortsWhatIsAsked, "earlier places: after the tokens"),
        (CountsNothing, "0 tokens run by its own count for 1 contexts"),
        (CountsTwice, "none more than once"),
        (KeepsWhatWasReleased, "released: after the tokens"),
        (HalfDone, "interrupts: after the tokens"),
        (RefusesTheLongest, None),
        (OfOneThread, r"threads: RuntimeError\('no loop here'\)"),
    ],
)
def test_wrong_engines_are_found(engine, sentence):
    with pytest.raises(AssertionError if sentence else IndexError, match=sentence):
        check(engine())


# --- what an engine is asked and told ---------------------------------------------------------------------------------


def test_a_round_of_unequal_lengths_is_one_call():
    engine = Keeping()
    lm = CachedTransformer(engine, LETTERS)
    contexts = [at(lm, ids) for ids in ([1, 2, 3, 4], [5], [1, 2], [6, 7])]
    together([context.log_probs for context in contexts])
    ((asked, places),) = engine.calls
    assert asked == [[1, 2, 3, 4], [6, 7], [5]]         # a prefix of another context is asked with it
    assert sorted(places) == [(0, 2), (0, 4), (1, 2), (2, 1)]
    right = [log_probs_of([int(i) for i in context.tokens]) for context in contexts]
    np.testing.assert_allclose([context.log_probs() for context in contexts], right)
    together([(context + 8).log_probs for context in contexts])
    assert len(engine.calls) == 2 and lm.stats.rounds == 2


def test_stats_count_the_tokens_that_the_engine_ran():
    runs = []
    for engine in (Keeping(), FunctionEngine(logits_of, SIZE)):
        lm = CachedTransformer(engine, LETTERS)
        runs.append(smc_steer(ConstrainedText(lm, lm.at([1, 2, 3]), Regex("[a-f]{4,9}"), max_tokens=12), 5, 3, seed=0))
        assert runs[-1].stats.tokens == engine.tokens
    kept, recomputed = runs
    assert (kept.texts, kept.log_ml) == (recomputed.texts, recomputed.log_ml)
    assert kept.stats.tokens < recomputed.stats.tokens / 3


def test_the_engine_learns_which_contexts_were_released():
    engine = Keeping()
    lm = CachedTransformer(engine, LETTERS)
    start = at(lm, [1, 2, 3])
    gone = [start + lm.vocab[i] for i in (4, 5)]
    gone.append(gone[0] + lm.vocab[6])
    together([each.log_probs for each in gone])
    assert engine.released == []
    del gone
    start.log_probs()
    assert sorted(engine.released) == [[1, 2, 3, 4], [1, 2, 3, 5]]
    del start
    at(lm, [7]).log_probs()
    assert [1] in engine.released


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=repr)
def test_after_an_exception_or_interrupt_the_engine_is_cleared(error, monkeypatch):
    engine = Keeping()
    lm, cleared = CachedTransformer(engine, LETTERS), engine.cleared
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(engine, "forward", lambda *_: (_ for _ in ()).throw(error))
        at(lm, [1, 2, 3]).log_probs()
    assert np.allclose(at(lm, [1, 2, 3]).log_probs(), log_probs_of([1, 2, 3])) and engine.cleared > cleared


def test_rows_are_requested_in_portions_that_fit_into_memory(monkeypatch):
    monkeypatch.setattr(evaluator, "_MAX_ANSWER", 4 * SIZE * 3)
    engine = Keeping()
    lm = CachedTransformer(engine, LETTERS)
    found = at(lm, [1, 2, 3, 4, 5, 6, 7, 8]).log_prob_since(at(lm, [1]))
    assert np.isclose(found, sum(log_probs_of([*range(1, n)])[n] for n in range(2, 9)))
    assert [(contexts, len(asked)) for contexts, asked in engine.calls] == [
        ([[*range(1, n)]], size) for n, size in ((4, 3), (7, 3), (8, 1))
    ]
    assert engine.tokens == 7


@pytest.mark.parametrize("make", [Keeping, Remembering])
def test_an_engine_has_one_lm_and_the_previous_one_reports_it(make):
    engine = make()
    vocab = Vocabulary([bytes([97 + i]) for i in range(8)] + [b""], eos_ids=[8]) if make is Remembering else LETTERS
    first = CachedTransformer(engine, vocab)
    context = at(first, [1, 2])
    row = context.log_probs()
    second = CachedTransformer(engine, vocab)
    assert np.array_equal(at(second, [1, 2]).log_probs(), row)
    assert np.array_equal(context.log_probs(), row)     # it was kept
    with pytest.raises(RuntimeError, match="given to another CachedTransformer.*share the CachedTransformer"):
        at(first, [1, 2, 3]).log_probs()


def test_an_engine_has_a_name():
    assert repr(CachedTransformer(Keeping(), LETTERS)).startswith("CachedTransformer(keeping, ")
    with pytest.raises(TypeError, match="a transformers model, a function from ids to logits, or an Engine"):
        CachedTransformer(3, LETTERS)


def test_without_slots_the_engine_receives_whole_contexts():
    lm = family_lm("llama", cache_bytes=0)
    with pytest.warns(UserWarning, match="cache_bytes=0 does not hold the contexts"):
        together([at(lm, range(3, 3 + n)).log_probs for n in (5, 3)] + [at(lm, [9, 9]).log_probs])
    assert lm.stats.rounds == 1 and lm.stats.tokens == 7


# --- changes of the weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["model", "function"])
def test_after_a_clear_every_answer_is_of_the_changed_weights(how):
    scale = [1.0]
    model = build(TRIE["llama"]()) if how == "model" else lambda ids: scale[0] * logits_of(ids)
    lm = CachedTransformer(model, VOCAB if how == "model" else LETTERS)
    start, end = at(lm, [3, 4, 5]), at(lm, [3, 4, 5, 6, 7])
    before, scored = start.log_probs().copy(), end.log_prob_since(start)
    if how == "model":
        with torch.no_grad():
            lm.model.lm_head.weight.mul_(0.5)
    scale[0] = 0.5
    assert start.log_probs() is not before and np.array_equal(start.log_probs(), before)    # it is cached
    lm.clear()
    fresh = CachedTransformer(model, lm.vocab)
    right = [at(fresh, ids).log_probs() for ids in ([3, 4, 5], [3, 4, 5, 6])]
    np.testing.assert_allclose(start.log_probs(), right[0], atol=1e-6)
    np.testing.assert_allclose(start.next_token().log_probs(), right[0], atol=1e-6)
    assert end.log_prob_since(start) == pytest.approx(right[0][6] + right[1][7], abs=1e-5)
    assert abs(end.log_prob_since(start) - scored) > 1e-3


def test_a_step_may_clear_and_the_run_continues():
    lm = family_lm("llama")
    program = ConstrainedText(lm, "ABC", Regex("(A|BC|D)*"), end="eos", complete=False, max_tokens=6)
    whole = smc_steer(program, 4, 3, seed=2)
    again = smc_steer(program, 4, 3, seed=2, on_step=lambda step: lm.clear())
    assert again.texts == whole.texts and again.stats.tokens >= whole.stats.tokens
    np.testing.assert_allclose(again.log_weights, whole.log_weights, rtol=1e-4)


def test_a_model_in_train_mode_answers_as_in_eval_mode():
    config = TRIE["gpt2"]()
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.5
    lm = CachedTransformer(build(config).train(), VOCAB)
    lm.model.train()
    assert error_of(lm, at(lm, range(3, 20))) <= 1e-4 and not lm.model.training
