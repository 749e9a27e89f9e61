"""Adapters: each name is its own language model over the same weights, independent of other uses of the weights."""

import copy
import functools
import itertools
import threading
import warnings

import numpy as np
import pytest
import torch
from helpers.common import repetitions
from helpers.families import TRIE, VOCAB, V, build
from helpers.fire import in_threads

from llmppl.lm.transformer import CachedTransformer

peft = pytest.importorskip("peft", reason="adapters need peft: make extras")

LORA = {
    "a": peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    "b": peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["o_proj", "up_proj"], init_lora_weights=False),
}
NAMES = ["a", "b", None]
LIMIT = 1e-4


def configs(**more):
    return {name: copy.deepcopy(config) for name, config in (LORA | more).items()}


def wrapped(base=None, **more):
    """Return a model made by `get_peft_model`; its first adapter is active."""
    torch.manual_seed(0)
    first, *others = configs(**more).items()
    model = peft.get_peft_model(base or build(TRIE["llama"]()), first[1], adapter_name=first[0])
    for name, config in others:
        model.add_adapter(name, config)
    model.set_adapter(first[0])
    return model.eval()


def integrated(base=None, **more):
    """Return the same model, with adapters added by transformers' own methods."""
    torch.manual_seed(0)
    model = base or build(TRIE["llama"]())
    for name, config in configs(**more).items():
        model.add_adapter(config, name)
    model.set_adapter("a")
    return model.eval()


MADE = pytest.mark.parametrize("make", [wrapped, integrated])


def activate(model, name):
    """Activate one adapter, or none, as a user does."""
    if isinstance(model, peft.PeftModel):
        off, on = model.base_model.disable_adapter_layers, model.base_model.enable_adapter_layers
    else:
        off, on = model.disable_adapters, model.enable_adapters
    if name is None:
        off()
    else:
        on()
        model.set_adapter(name)


def truths(model, names=NAMES):
    """Return, by name, a function from ids to (V,) log-probabilities: plain forward passes of an adapted copy."""

    def by(name):
        alone = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            activate(alone, name)

        def log_probs(ids):
            with torch.no_grad():
                logits = alone(input_ids=torch.tensor([[int(i) for i in ids]]), use_cache=False).logits[0, -1]
            return torch.log_softmax(logits.double(), -1).numpy()

        return log_probs

    return {name: by(name) for name in names}


def error_of(context, truth):
    return np.abs(context.log_probs() - truth(context.tokens)).max()


def state(model):
    """Return the state of the adapters that other users of a model see."""
    return [
        (name, module.disable_adapters, list(module.active_adapters))
        for name, module in model.named_modules() if hasattr(module, "merged_adapters")
    ] + [(name, p.requires_grad) for name, p in model.named_parameters()]  # fmt: skip


def distances(rows):
    return [np.abs(x - y).max() for x, y in itertools.combinations(rows, 2)]


@MADE
def test_each_adapter_answers_as_the_adapted_model_and_changes_nothing(make, recwarn):
    model = make().requires_grad_(False)                # as one is that is loaded to be used
    truth, before = truths(model), state(model)
    recwarn.clear()                                     # peft warns when adapters are made
    lm = CachedTransformer(model, VOCAB)
    lms = {name: lm.adapter(name) for name in NAMES}
    ids = list(range(3, 20))
    assert min(distances(truth[name](ids) for name in NAMES)) > 1           # an error would show
    for name in (*NAMES, *NAMES):
        context = lms[name].at(ids)
        assert max(error_of(each, truth[name]) for each in (context, context + 5, context + 5 + 7)) <= LIMIT
        assert state(model) == before
    assert all(each.engine.slot_bytes > 0 for each in lms.values()) and len(recwarn) == 0
    assert "logits_to_keep" in lm.engine._accepted      # else a prompt would have a row for each of its tokens
    assert [each.stats.tokens for each in lms.values()] == [19, 19, 19]


@MADE
@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_used_with_its_active_adapter(make, name):
    model = make()
    truth = truths(model)
    activate(model, name)
    lm = CachedTransformer(model, VOCAB)
    assert error_of(lm.at(range(3, 12)), truth[name]) <= LIMIT
    assert lm.adapter(name) is lm and lm.adapter("a").adapter(name) is lm


def test_the_same_name_gives_the_same_object():
    lm = CachedTransformer(wrapped(), VOCAB, cache_bytes=1_000_000, max_batch_tokens=64)
    other = lm.adapter("b")
    assert lm.adapter("b") is other and other.adapter("a") is lm and other.adapter(None) is lm.adapter(None) is not lm
    assert other.store.budget == 1_000_000
    assert "with 'a'" in repr(lm) and "with 'b'" in repr(other) and "with" not in repr(lm.adapter(None))
    assert other.model is lm.model and other.vocab is lm.vocab and other.trie is not lm.trie
    assert other.at([3, 4]) != lm.at([3, 4])


@MADE
def test_outside_changes_of_the_active_adapter_change_no_answer(make):
    model = make()
    truth = truths(model)
    lm = CachedTransformer(model, VOCAB)
    context = lm.at(range(3, 12))
    for step, name in enumerate(["b", None, "a", None, "b"]):
        activate(model, name)
        before = state(model)
        context = context + (5 + step)
        assert error_of(context, truth["a"]) <= LIMIT and state(model) == before
        other = lm.adapter("b").at(context.tokens)
        assert error_of(other, truth["b"]) <= LIMIT and state(model) == before


@MADE
def test_adapters_added_later_do_not_change_the_existing_lm(make):
    model = build(TRIE["llama"]())
    lm = CachedTransformer(model, VOCAB)
    context = lm.at(range(3, 12))
    before = context.log_probs()
    adapted = make(model)
    truth = truths(adapted)
    assert error_of(context + 5, truth[None]) <= LIMIT and error_of(context, truth[None]) <= LIMIT
    assert (context.log_probs() == before).all()
    assert error_of(lm.adapter("b").at(range(3, 12)), truth["b"]) <= LIMIT


@pytest.mark.parametrize("more", [
    peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False),
    peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False),
    peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[5, 6], init_lora_weights=False),
    peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False),
], ids=["head", "embedding", "tokens", "IA3"])  # fmt: skip
def test_other_kinds_of_adapters(more):
    if isinstance(more, peft.IA3Config):                # one model has adapters of one kind
        model = peft.get_peft_model(build(TRIE["llama"]()), more, adapter_name="a").eval()
        names = ["a", None]
    else:
        model, names = wrapped(c=more), [*NAMES, "c"]
        for name, p in model.named_parameters():
            if "lm_head.modules_to_save" in name or "trainable_tokens_delta" in name:
                p.data += torch.randn_like(p)
    truth = truths(model, names)
    lm, before = CachedTransformer(model, VOCAB), state(model)
    ids = [3, 5, 6, 9, 5, 12]
    assert min(distances(truth[name](ids) for name in names)) > 0.01
    for name in (*names, *names):
        assert error_of(lm.adapter(name).at(ids), truth[name]) <= LIMIT and state(model) == before


def test_a_folder_with_an_adapter_and_a_tokenizer_is_loaded(tmp_path, embedded):
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(embedded.model), config).eval()
    model.save_pretrained(tmp_path)
    embedded.tokenizer.save_pretrained(tmp_path)
    lm = CachedTransformer.from_pretrained(tmp_path)
    plain = CachedTransformer(embedded.model, embedded.tokenizer)
    text = "Once upon a time"
    with_it = CachedTransformer(model, embedded.tokenizer).context(text).log_probs()
    without = plain.context(text).log_probs()
    assert np.abs(with_it - without).max() > 0.1
    assert np.allclose(lm.context(text).log_probs(), with_it, atol=1e-5)
    assert np.allclose(lm.adapter(None).context(text).log_probs(), without, atol=1e-5)


def test_threads_that_use_different_adapters_do_not_disturb_each_other():
    model = wrapped()
    truth, before = truths(model), state(model)
    lm = CachedTransformer(model, VOCAB)
    lms = {name: lm.adapter(name) for name in NAMES}
    start = threading.Barrier(6)

    def work(name, seed):
        texts = np.random.default_rng(seed).integers(3, V, (repetitions(100, 6), 9)).tolist()
        start.wait()
        return {(name, *ids[:n]): lms[name].at(ids[:n]).log_probs() for ids in texts for n in range(5, 10)}

    found = in_threads([functools.partial(work, name, seed) for name in NAMES for seed in range(2)])
    rows = {key: row for each in found for key, row in each.items()}
    assert max(np.abs(row - truth[name](ids)).max() for (name, *ids), row in rows.items()) <= LIMIT
    assert state(model) == before


def test_an_exception_in_a_pass_restores_the_model(monkeypatch):
    model = wrapped()
    truth, before = truths(model), state(model)
    lm = CachedTransformer(model, VOCAB).adapter("b")
    layer = model.get_base_model().model.layers[1]
    for error in (ValueError, KeyboardInterrupt):
        with monkeypatch.context() as patch:
            patch.setattr(layer, "forward", lambda *_, error=error, **__: (_ for _ in ()).throw(error("here")))
            with pytest.raises(error):
                lm.at(range(3, 12)).log_probs()
        assert state(model) == before
    assert error_of(lm.at(range(3, 12)), truth["b"]) <= LIMIT


def test_an_unknown_adapter_is_refused_by_name():
    lm = CachedTransformer(wrapped(), VOCAB)
    with pytest.raises(ValueError, match="the model has no adapter 'c'; there are 'a', 'b'"):
        lm.adapter("c")
    with pytest.raises(ValueError, match="no adapter 'c'; there are none: load one by peft, or by load_adapter"):
        CachedTransformer(build(TRIE["llama"]()), VOCAB).adapter("c")
    with pytest.raises(ValueError, match="adapter 'c': only transformers models have adapters"):
        CachedTransformer(lambda ids: np.zeros(V), VOCAB).adapter("c")
