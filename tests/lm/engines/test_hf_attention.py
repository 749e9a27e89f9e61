"""Shared attention: common prefixes of the rows are read once, and the answers equal those of plain forward passes."""

import functools
import warnings

import numpy as np
import pytest
import torch
from helpers.cache import BATCHES, BUDGETS, LIMIT, Session, limits, operations
from helpers.common import repetitions
from helpers.families import ALIGNED, TRIE, VOCAB, at, build, check_books, error_of, family_lm, model_of, together
from helpers.fire import in_threads
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from llmppl.lm.engines import hf_attention as attention
from llmppl.lm.engines.hf_attention import ForwardPass, LazyKV, _mean, share
from llmppl.lm.transformer import CachedTransformer

PROMPT = list(range(3, 23))


def sharing_lm(name, dtype=torch.float32, **options):
    """Return a fresh lm of a family that shares every possible part."""
    lm = family_lm(name, dtype, **options)
    assert np.isfinite(lm.engine.least)                # the check at load found it right
    lm.engine.least = 1
    return lm


def size(slots):
    return slots.stop - slots.start if isinstance(slots, slice) else len(slots)


def slots_read(lm, contexts):
    """Return (slots of keys that each layer reads in the one pass over `contexts`, largest error of the answers)."""
    read, gather, part, rounds = [], ForwardPass.gather, LazyKV.part, lm.stats.rounds

    def gathered(self, tensor, slots, buffer):
        read.append(len(slots))
        return gather(self, tensor, slots, buffer)

    def in_place(self, each):
        read.append(size(each.slots) if isinstance(each.slots, slice) else 0)
        return part(self, each)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForwardPass, "gather", gathered)
        patch.setattr(LazyKV, "part", in_place)
        together([context.log_probs for context in contexts])
    assert lm.stats.rounds == rounds + 1
    return sum(read) / (2 * len(lm.engine.slab.layers)), max(error_of(lm, context) for context in contexts)


@pytest.mark.parametrize("name", [name for name in TRIE if name not in ("bloom", "deepseek-v3")])     # see the docs
def test_a_prompt_is_read_once_for_all_its_rows_in_every_family(name):
    lm = sharing_lm(name)
    prompt = at(lm, PROMPT)
    prompt.log_probs()
    rows = [prompt + lm.vocab[i] for i in range(3, 10)]
    assert slots_read(lm, rows)[0] == 20 + 7 * 1        # and not 7 * 21
    further = [row + lm.vocab[5] for row in rows] + [prompt + "ABCDE", prompt + "FG"]
    read, error = slots_read(lm, further)               # of unequal starts and lengths; a long one by itself
    if name in ALIGNED:                                 # three passes
        assert read == (20 + 7 * 2) + 25 + (20 + 2)
    else:                                               # half of Gemma3n's layers read gathered keys of others
        assert read == 20 + 8 * 2 + (12.5 if name == "gemma3n" else 25)
    assert error <= LIMIT and max(error_of(lm, row) for row in rows) <= LIMIT


@pytest.mark.parametrize("other", [[4], [4, 5]])        # as long as the first row, or longer by one
@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "phi3", "gemma2"])
def test_texts_are_right_on_both_sides_of_a_sliding_window(name, other):
    lm = family_lm(name)
    rows = [at(lm, [3]), at(lm, other)]
    for i in range(5, 17):
        assert slots_read(lm, rows)[1] <= LIMIT
        rows = [row + lm.vocab[i] for row in rows]


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mistral-sliding", "mpt"])
def test_each_group_of_rows_reads_its_shared_prefix_once(name):
    lm = sharing_lm(name)
    prompts = [at(lm, [i, *range(10, 30 + i)]) for i in (3, 4, 5)] + [at(lm, [6, 7])]
    together([prompt.log_probs for prompt in prompts])
    rows = [prompt + lm.vocab[i] for i in (3, 4, 5, 6) for prompt in prompts]            # in turns
    read, error = slots_read(lm, rows)
    lengths = [len(prompt) for prompt in prompts]
    assert read == sum(lengths) + len(rows) and error <= LIMIT
    nested = [row + lm.vocab[i] for row in rows for i in (7, 8)]
    read, error = slots_read(lm, nested)
    assert read == sum(lengths) + len(rows) + len(nested) and error <= LIMIT


@pytest.mark.parametrize("seed", range(10))
def test_the_parts_cover_every_slot_of_every_row_once(seed):
    """Each prefix of random bits has a slot, and so has each new token."""
    rng = np.random.default_rng(seed)
    rows, length = int(rng.integers(1, 9)), int(rng.integers(2, 12))
    bits, starts, columns = rng.integers(0, 2, (rows, length)), rng.integers(0, length, rows), np.arange(length)
    prefixes = (np.cumsum(bits << (length - columns), 1) >> (length - columns)) + (2 << columns)
    new = (1 << 14) + np.arange(rows * length).reshape(rows, length)
    slots = np.where(columns < starts[:, None], rng.permutation(1 << 14)[prefixes], new)
    inside = columns <= starts[:, None]
    slots = np.where(inside, slots, slots[:, :1])
    _, counts = np.unique(slots[inside & (columns < starts[:, None])], return_counts=True)
    order, parts = share(slots, starts, starts + 1, least=1)
    assert bool(parts) == bool((counts > 1).any())
    if not parts:
        return
    found = np.full_like(slots, -1)
    for part in parts:
        read = np.arange(part.slots.start, part.slots.stop) if isinstance(part.slots, slice) else part.slots.numpy()
        assert (found[part.rows, part.columns] == -1).all()
        found[part.rows, part.columns] = read if part.shared else read.reshape(part.rows.stop - part.rows.start, -1)
    np.testing.assert_array_equal(found[inside[order]], slots[order][inside[order]])
    assert sorted(order) == list(range(rows))
    assert sum(size(part.slots) for part in parts if part.shared) <= (counts > 1).sum()


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mistral-sliding", "falcon"])
def test_answers_are_right_after_any_history_with_shared_prefixes(name):
    slot_bytes = family_lm(name).engine.slot_bytes

    @settings(max_examples=repetitions(100, 3), derandomize=True)
    @given(operations(3, 4), BUDGETS, BATCHES)
    def check(ops, budget, batch):
        session = Session(sharing_lm(name, **limits(slot_bytes, budget, batch)))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "cache_bytes=")
            for op in ops:
                session.do(*op)
        assert session.error <= LIMIT

    check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mistral-sliding", "gpt-j"])
def test_other_floats_are_shared_too(name, dtype):
    lm = sharing_lm(name, dtype)
    prompt = at(lm, PROMPT)
    prompt.log_probs()
    read, error = slots_read(lm, [prompt + lm.vocab[i] for i in range(3, 10)])
    assert error <= (1e-5 if dtype == torch.float64 else 0.15)
    if name != "gpt-j":                                 # which attends in float32
        assert read == 20 + 7


class Widening(TorchDispatchMode):
    """Mode in which bmm multiplies half precision into float32, as on CUDA."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is getattr(torch.ops.aten.bmm, "dtype", None):
            return torch.bmm(args[0].float(), args[1].float())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widens", [["cpu"], []])
def test_shared_attention_in_half_precision_is_as_accurate_as_torchs(dtype, widens, monkeypatch):
    """With scores in half precision, as in eager attention, the error would be 3 to 9 times that of torch."""
    if widens and not hasattr(torch.ops.aten.bmm, "dtype"):
        pytest.skip("torch has no bmm with out_dtype=")
    monkeypatch.setattr(attention, "_WIDENS", widens)
    B, H, G, D, T = 6, 2, 3, 64, 300
    rng = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=rng)            # noqa: E731
    query, keys, values = 2 * draw(B, H * G, 1, D).to(dtype), 2 * draw(H, 2000, D).to(dtype), draw(H, 2000, D).to(dtype)
    slots = np.concatenate([np.tile(np.arange(T - 40), (B, 1)), 300 + np.arange(B * 40).reshape(B, 40)], 1)
    starts, ends = np.full(B, T - 1), np.full(B, T)
    order, parts = share(slots, starts, ends, least=1)
    assert order == list(range(B)) and {part.shared for part in parts} == {True, False}
    run = ForwardPass(torch.from_numpy(slots[:, -1]), None, torch.from_numpy(slots), parts)
    key, value = (LazyKV(tensor, run, name, repeats=G) for name, tensor in (("keys", keys), ("values", values)))
    mask = torch.zeros(B, 1, 1, T, dtype=dtype)
    mask[1, :, :, :50] = torch.finfo(dtype).min
    with Widening():
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    made = query, key.materialise(), value.materialise()
    own = torch.nn.functional.scaled_dot_product_attention(*made, attn_mask=mask)
    wide = [tensor.double() for tensor in made]
    truth = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=mask.double())
    errors = [float((tensor.double() - truth).abs().mean()) for tensor in (found, own)]
    assert found.dtype == dtype and errors[0] <= 2 * errors[1] and errors[1] < torch.finfo(dtype).eps


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-sliding", "gpt2"])
def test_both_kinds_of_attention_share(name, kind):
    config = TRIE[name]()
    config._attn_implementation = kind
    lm = CachedTransformer(build(config), VOCAB)
    lm.engine.least = 1
    prompt = at(lm, PROMPT)
    prompt.log_probs()
    read, error = slots_read(lm, [prompt + "ABC"[:n] for n in (1, 2, 3)] + [prompt + "BB"])        # in two rows
    assert read == 20 + 2 * 3 and error <= LIMIT
    assert lm.model.config._attn_implementation == kind


@pytest.mark.parametrize("wrong", [lambda *_: torch.zeros(1), lambda *both: 2 * _mean(*both)])
def test_rows_read_their_own_prefix_where_sharing_would_be_wrong(wrong, monkeypatch):
    monkeypatch.setattr("llmppl.lm.engines.hf_attention._mean", wrong)
    lm = family_lm("gpt2")
    assert lm.engine.slot_bytes > 0 and lm.engine.least == np.inf
    prompt = at(lm, PROMPT)
    prompt.log_probs()
    read, error = slots_read(lm, [prompt + lm.vocab[i] for i in range(3, 10)])
    assert read == 7 * 21 and error <= LIMIT


def test_short_prefixes_are_not_shared():
    lm = family_lm("gpt2")
    prompt = at(lm, PROMPT)
    prompt.log_probs()
    read, error = slots_read(lm, [prompt + lm.vocab[i] for i in range(3, 10)])
    assert read == 7 * 21 and error <= LIMIT


def test_two_lms_and_plain_calls_may_share_a_model_across_threads():
    model, ids = model_of("llama"), torch.tensor([PROMPT])
    lms = [sharing_lm("llama") for _ in range(2)]
    with torch.no_grad():
        right = model(ids).logits

    def plain():
        with torch.no_grad():
            return max(float((model(ids).logits - right).abs().max()) for _ in range(30))

    def cached(lm, seed):
        rows = [at(lm, prompt) + lm.vocab[i] for prompt in np.random.default_rng(seed).integers(3, 40, (3, 20))
                for i in range(3, 8)]  # fmt: skip
        together([row.log_probs for row in rows])
        return max(error_of(lm, row) for row in rows)

    of_model, *of_lms = in_threads([plain, *(functools.partial(cached, lm, seed) for seed, lm in enumerate(lms))])
    assert of_model <= 1e-5 and max(of_lms) <= LIMIT
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert out.shape[1] > ids.shape[1] and model.config._attn_implementation == "sdpa"


class Allocations(TorchDispatchMode):
    """Mode that records the largest sum of the bytes of a new tensor and of a slab."""

    def __init__(self, slab):
        super().__init__()
        self.slab, self.peak = slab, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        held = {id(t): t for layer in self.slab.layers for t in (layer.keys, layer.values)}
        if isinstance(made, torch.Tensor) and function.__name__.startswith("new_empty"):
            held[id(made)] = made
        self.peak = max(self.peak, sum(t.numel() * t.element_size() for t in held.values()))
        return made


def test_a_growing_slab_duplicates_one_tensor_at_a_time():
    lm = family_lm("llama")
    contexts = [at(lm, PROMPT)]
    assert error_of(lm, contexts[0]) <= LIMIT
    slab, size = lm.engine.slab, lm.engine.slot_bytes
    before = slab.capacity
    with Allocations(slab) as allocations:
        slab.reserve(10 * before)
    tensors = 2 * len(slab.layers)
    assert slab.capacity == 10 * before
    assert 10 * before * size <= allocations.peak <= (10 + 1 / tensors) * before * size
    slab.capacity = before                              # the store knows nothing of this
    assert error_of(lm, contexts[0] + 5) <= LIMIT


def test_a_pass_frees_its_memory():
    lm = sharing_lm("llama")
    together([(at(lm, PROMPT) + lm.vocab[i]).log_probs for i in range(3, 9)])
    assert lm.engine.slab._passes == {}
    check_books(lm)
