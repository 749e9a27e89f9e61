"""The cache changes no answer: after any questions and evictions, answers equal those of a plain forward pass."""

import gc
import re
import warnings

import numpy as np
import pytest
import torch
import transformers as T
from helpers.cache import BATCHES, BUDGETS, LIMIT, Session, limits, operations, slot_bytes
from helpers.common import ROOT, repetitions
from helpers.families import (
    ALIGNED,
    RECOMPUTED,
    TRIE,
    VOCAB,
    V,
    at,
    build,
    check_books,
    error_of,
    family_lm,
    model_of,
    together,
    truth,
)
from hypothesis import given, settings

from llmppl.constraints import Vocabulary
from llmppl.inference import smc_standard
from llmppl.lm.engines import hf
from llmppl.lm.transformer import CachedTransformer
from llmppl.models.model import Model


def error_after(ops, *lms):
    """Return the largest error of the answers to random operations."""
    session = Session(*lms)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "cache_bytes=")
        for op in ops:
            session.do(*op)
    return session.error


@pytest.mark.parametrize("name", [*TRIE, *RECOMPUTED])
def test_answers_agree_with_a_plain_forward_pass_after_any_history(name):
    size = slot_bytes(name)

    @settings(max_examples=repetitions(80, 3), derandomize=True)
    @given(operations(3, 6), BUDGETS, BATCHES)
    def check(ops, budget, batch):
        assert error_after(ops, family_lm(name, **limits(size, budget, batch))) <= LIMIT

    check()


@settings(max_examples=repetitions(100, 4), derandomize=True)
@given(operations(3, 6), BUDGETS, BUDGETS, BATCHES)
def test_two_models_at_once_do_not_disturb_each_other(ops, budget, other, batch):
    lms = [
        family_lm(name, **limits(slot_bytes(name), each, batch))
        for name, each in (("gpt2", budget), ("mistral-sliding", other))
    ]
    assert error_after(ops, *lms) <= LIMIT


@settings(max_examples=repetitions(30, 4), derandomize=True)
@given(operations(300, 305), BUDGETS, BATCHES)
def test_answers_of_the_embedded_model_agree_with_a_plain_forward_pass(embedded, ops, budget, batch):
    options = limits(embedded.engine.slot_bytes, budget, batch, len(embedded.vocab))
    assert error_after(ops, CachedTransformer(embedded.model, embedded.tokenizer, **options)) <= LIMIT


def test_a_long_text_is_right_in_pieces_and_as_a_whole(embedded):
    text = "It was late in the evening, and nobody had seen the cat since the morning. " * 3
    lm = CachedTransformer(embedded.model, embedded.tokenizer, max_batch_tokens=7)
    assert error_of(lm, lm.context(text)) <= LIMIT
    assert error_of(lm, lm.context(text[:100]) + text[100:]) <= LIMIT


# --- which models the trie serves -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRIE)
def test_models_with_reusable_keys_pass_the_self_check_and_use_the_trie(name, recwarn):
    lm = CachedTransformer(model_of(name), VOCAB)
    assert lm.engine.slot_bytes > 0
    assert error_of(lm, at(lm, range(3, 33))) <= LIMIT
    assert [str(w.message) for w in recwarn] == []
    assert np.ptp(truth(lm, range(3, 33))) > 1.0         # far from uniform: an error would show
    assert (lm.engine.masks == "own") == (name in ALIGNED)


def test_the_documented_families_are_the_tested_ones():
    docs = (ROOT / "docs/language-models.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([a-z, ]+) \| (.+) \|$", docs, re.MULTILINE))
    families = {"on the slab": set(TRIE) - set(ALIGNED), "on the slab, rows of equal lengths": set(ALIGNED),
                "recomputed": set(RECOMPUTED)}  # fmt: skip
    for kind, names in families.items():
        told = [re.sub("[^a-z0-9]", "", name.lower()) for name in rows[kind].split(",")]
        assert sorted(told) == sorted(name.replace("-", "") for name in names)


@pytest.mark.parametrize("name", RECOMPUTED)
def test_models_that_fail_the_self_check_recompute_with_one_warning(name, recwarn):
    lm = CachedTransformer(model_of(name), VOCAB)
    assert max(error_of(lm, at(lm, range(3, 3 + n))) for n in (3, 9, 30)) <= LIMIT
    assert type(lm.engine) is hf.Recomputed
    (warning,) = recwarn
    assert f"{type(lm.model).__name__} cannot be cached token by token" in str(warning.message)
    assert "recomputed from its start" in str(warning.message)


def test_length_dependent_rotations_are_cached_up_to_their_limit_with_a_warning():
    config = TRIE["phi3"]()
    config.original_max_position_embeddings, config.sliding_window = 16, None
    config.rope_parameters = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    with pytest.warns(UserWarning, match=r"more than 16 tokens \(longrope\).* reads 16 of \d+ tokens"):
        lm = CachedTransformer(build(config), VOCAB)
    context = at(lm, range(3, 18))
    assert lm.engine.slot_bytes > 0 and error_of(lm, context) <= LIMIT and error_of(lm, context + 5) <= LIMIT
    with pytest.raises(ValueError, match="a context of 17 tokens, and the model reads at most 16"):
        (context + 5 + 6).log_probs()


class Shifted(torch.nn.Module):
    """Model whose logits depend on the place in the input, so that a cache would make it silently wrong."""

    def __init__(self, inner, silent):
        super().__init__()
        self.inner, self.config, self.silent = inner, inner.config, silent

    def get_input_embeddings(self):
        return self.inner.get_input_embeddings()

    def forward(self, input_ids, **options):
        if {"cache", "past_key_values"} & options.keys() and not self.silent:
            raise TypeError("this model\nhas no cache")
        out = self.inner(input_ids, **options)
        out.logits = out.logits.clone()
        out.logits[..., 5] += 0.3 * torch.arange(input_ids.shape[1])
        return out


@pytest.mark.parametrize("silent", [True, False])
def test_an_unknown_model_that_the_cache_would_get_wrong_is_recomputed(silent):
    with pytest.warns(UserWarning, match="off by" if silent else "TypeError: this model") as warned:
        engine = hf.engine(Shifted(model_of("llama"), silent).eval(), VOCAB, 1 << 16)
    assert type(engine) is hf.Recomputed and len(warned) == 1


@pytest.mark.parametrize("V", [1, 2, 3])
@pytest.mark.parametrize("most", [1, 2, 3, 5, 64])
def test_the_self_check_works_with_few_tokens_and_short_contexts(V, most, recwarn):
    config = T.GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=most, bos_token_id=0)
    lm = CachedTransformer(build(config), Vocabulary([b"a", b"b", b"c"][:V]))
    assert lm.engine.slot_bytes > 0 and lm.engine.max_length == most and len(recwarn) == 0
    assert error_of(lm, at(lm, [i % V for i in range(min(most, 9))])) <= LIMIT


def test_the_self_check_needs_no_ordinary_token(recwarn):
    lm = CachedTransformer(model_of("llama"), Vocabulary([b""] * V, eos_ids=[2], special_ids=range(V)))
    assert lm.engine.slot_bytes > 0 and len(recwarn) == 0


# --- kinds of numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", [
    "gpt2", "llama", "gemma3", "mistral-sliding", "falcon", "mpt", "opt", "gpt-j", *ALIGNED,
])  # fmt: skip
def test_other_floats_are_cached_too(name, dtype, recwarn):
    lm = CachedTransformer(model_of(name, dtype), VOCAB)
    assert lm.engine.slot_bytes > 0 and len(recwarn) == 0
    contexts = [at(lm, list(range(3, 13)) + tail) for tail in ([], [5, 6], [9], [9, 9, 9, 9, 4, 4, 4])]
    errors = []
    together([lambda c=c: errors.append(error_of(lm, c)) for c in contexts])
    errors += [error_of(lm, context + 7) for context in contexts]
    assert max(errors) <= (1e-5 if dtype == torch.float64 else 0.15)     # GPT-J and MPT attend in float32
    check_books(lm, contexts)
    half = torch.finfo(dtype).bits // 8
    assert lm.engine.slot_bytes == half * slot_bytes(name) // 4
    assert contexts[0].node.row.array.dtype == (np.float64 if dtype == torch.float64 else np.float32)


# --- heads and vocabularies that do not fit ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab", "impossible"),
    [
        (Vocabulary(VOCAB.tokens[:40], eos_ids=[2]), []),
        (Vocabulary([*VOCAB.tokens, b"~", b"|"], eos_ids=[2]), [50, 51]),
        (Vocabulary(VOCAB.tokens, eos_ids=[2], special_ids=[0, 1], unknown_ids=[7, 11, 30]), [7, 11, 30]),
    ],
    ids=["a large head", "a small head", "holes"],
)
def test_ids_without_a_token_or_a_logit_are_impossible(vocab, impossible):
    found = at(CachedTransformer(model_of("llama"), vocab), [3, 4, 5]).log_probs()
    right = np.append(truth(family_lm("llama"), [3, 4, 5]), [-np.inf] * 2)[: len(vocab)]
    right[impossible] = -np.inf
    assert np.isneginf(found).nonzero()[0].tolist() == impossible
    np.testing.assert_allclose(np.exp(found), np.exp(right - np.logaddexp.reduce(right)), atol=LIMIT)


@pytest.mark.parametrize(
    ("owner", "ids", "further"),
    [("generation_config", [0, 400, 401], {400, 401}), ("config", 50256, set())],           # which is no id of a token
)
def test_every_eos_of_the_configs_that_is_a_token_is_an_eos(owner, ids, further, embedded, monkeypatch):
    monkeypatch.setattr(getattr(embedded.model, owner), "eos_token_id", ids)
    lm = CachedTransformer(embedded.model, embedded.tokenizer)
    assert {*lm.vocab.eos_ids} == {*embedded.vocab.eos_ids} | further


# --- models that break ------------------------------------------------------------------------------------------------


class Breaking:
    """Context in which the logits or the weights of a model are wrong."""

    def __init__(self, model, value, weights):
        self.model, self.value, self.weights = model, value, weights

    def __enter__(self):
        if self.weights:
            self.norm = self.model.model.layers[1].input_layernorm.weight
            self.before = self.norm.detach().clone()
            with torch.no_grad():
                self.norm.fill_(self.value)
        else:
            self.hook = self.model.register_forward_hook(self.spoil)

    def spoil(self, module, args, out):
        out.logits = torch.full_like(out.logits, self.value)
        return out

    def __exit__(self, *_):
        if self.weights:
            with torch.no_grad():
                self.norm.copy_(self.before)
        else:
            self.hook.remove()


@pytest.mark.parametrize("batch", [2, 1 << 16])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(
    ("value", "named"), [(float("nan"), "NaN"), (float("inf"), r"NaN|\+inf"), (float("-inf"), "NaN|-inf alone")]
)
def test_invalid_logits_are_an_error_naming_the_context(value, named, weights, batch):
    lm = CachedTransformer(build(TRIE["llama"]()), VOCAB, max_batch_tokens=batch)
    base = at(lm, [3, 4, 5, 6])
    assert error_of(lm, base) <= LIMIT
    further = [base + 9, base + "ABCDE", at(lm, [7, 7, 7])]
    held, size = [base, *further], len(lm.trie)
    with Breaking(lm.model, value, weights):
        for context in further:
            with pytest.raises(FloatingPointError, match=named) as caught:
                context.log_probs()
            assert repr(str(context.text)) in str(caught.value)
        with pytest.raises(FloatingPointError):
            further[1].log_prob_since(base)
    del caught
    gc.collect()
    assert len(lm.trie) == size
    assert all(error_of(lm, context) <= LIMIT for context in held)
    assert all(error_of(lm, context + 8) <= LIMIT for context in held)
    check_books(lm, held)


def test_a_failed_pass_does_not_affect_padded_contexts():
    lm = CachedTransformer(build(TRIE["llama"]()), VOCAB)
    with Breaking(lm.model, float("nan"), True), pytest.raises(FloatingPointError):
        at(lm, [3, 4, 5]).log_probs()                   # the first slots of the slab hold NaN now, and are free
    errors = []
    contexts = [at(lm, ids) for ids in ([5], [5, 6, 7, 8, 9], [6, 6], [9, 8, 7, 6, 5, 4])]
    together([lambda c=c: errors.append(error_of(lm, c)) for c in contexts])
    together([lambda c=c: errors.append(error_of(lm, c + 4)) for c in contexts])
    assert max(errors) <= LIMIT


def test_the_one_context_that_fails_is_named_and_others_are_answered():
    lm = CachedTransformer(build(TRIE["llama"]()), VOCAB)
    with torch.no_grad():
        lm.model.get_input_embeddings().weight[9] = float("nan")
    contexts = [at(lm, ids) for ids in ([3, 4, 5, 6], [9, 4], [6])]
    with pytest.raises(FloatingPointError, match=r"Context\('1,'\)"):
        together([context.log_probs for context in contexts])
    assert error_of(lm, contexts[0]) <= LIMIT and error_of(lm, contexts[2]) <= LIMIT


class Rambling(Model):
    """Program whose model breaks at step 3."""

    def __init__(self, lm):
        super().__init__()
        self.context = at(lm, [3, 4])

    def step(self):
        if len(self.context) == 4:
            Breaking(self.context.lm.model, float("nan"), weights=False).__enter__()
        self.context += self.sample(self.transformer(self.context))


def test_a_NaN_is_raised_in_the_step_with_particle_and_step_noted():
    lm = CachedTransformer(build(TRIE["llama"]()), VOCAB)
    with pytest.raises(FloatingPointError, match="hold NaN") as caught:
        smc_standard(Rambling(lm), N=3, seed=0)
    assert caught.value.__notes__ == ["in particle 0 at step 3"]
    assert "self.sample(self.transformer(self.context))" in "".join(map(str, caught.traceback))
    check_books(lm)


def test_a_model_that_raises_leaves_a_usable_cache():
    lm = CachedTransformer(build(TRIE["llama"]()), VOCAB, max_batch_tokens=4)
    context = at(lm, range(3, 20))
    calls = []

    def stop(*_):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    hook = lm.model.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        context.log_probs()
    hook.remove()
    assert error_of(lm, context) <= LIMIT
    check_books(lm, [context])


# --- budgets ----------------------------------------------------------------------------------------------------------


def test_a_budget_too_small_for_a_context_warns():
    lm = family_lm("llama", cache_bytes=0)
    with pytest.warns(UserWarning, match="cache_bytes=0 does not hold the contexts, at 256 bytes a token"):
        errors = [error_of(lm, at(lm, range(3, 3 + n))) for n in (9, 9, 12)]
    assert max(errors) <= LIMIT and lm.store.bytes == lm.store.peak_bytes == 0


def test_contexts_that_evict_each_other_are_all_answered():
    lm = family_lm("llama", cache_bytes=12 * 256, max_batch_tokens=3)
    contexts = [at(lm, [i, *range(4, 13)]) for i in (3, 4, 5)]
    errors = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        together([lambda c=c: errors.append(error_of(lm, c)) for c in contexts])
    assert len(errors) == 3 and max(errors) <= LIMIT
    assert lm.stats.tokens <= 60


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"cache_bytes": -1}, ValueError, "cache_bytes must be at least 0, not -1"),
        ({"max_batch_tokens": 0}, ValueError, "max_batch_tokens must be at least 1, not 0"),
        ({"cache_bytes": 2.5}, TypeError, "cache_bytes must be an integer"),
        ({"cache_bytes": "2GB"}, TypeError, "cache_bytes must be an integer"),
        ({"cache_bytes": True}, TypeError, "cache_bytes must be an integer"),
    ],
)
def test_invalid_limits_are_refused(options, error, sentence):
    with pytest.raises(error, match=sentence):
        family_lm("llama", **options)
