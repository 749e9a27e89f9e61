"""Large models: spread by accelerate, of mixed dtypes, quantised."""

import copy
import operator

import accelerate
import numpy as np
import pytest
import torch
from helpers.families import TRIE, VOCAB, build, error_of, together

from llmppl.lm.engines import hf
from llmppl.lm.transformer import CachedTransformer

# --- spread over devices, memory and disk -----------------------------------------------------------------------------

PARTS = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", *(f"model.layers.{i}" for i in range(6))]
MAPS = {
    "all": {"": "disk"},
    "the ends": {part: "disk" if part in ("model.embed_tokens", "lm_head") else "cpu" for part in PARTS},
    "half of the layers": {part: "disk" if part[-1] in "345" else "cpu" for part in PARTS},
}
SPREAD = {                                              # how accelerate spreads a model in memory
    "kept on disk": lambda model, folder: accelerate.disk_offload(model, folder, torch.device("cpu")),
    "kept in memory until run": lambda model, folder: accelerate.cpu_offload_with_hook(model, torch.device("cpu"))[0],
    "dispatched": lambda model, folder: accelerate.dispatch_model(
        model, MAPS["the ends"], offload_dir=folder, force_hooks=True
    ),
}


def spread_inside(model, folder):
    model.model = accelerate.disk_offload(model.model, folder, torch.device("cpu"))
    return model


def same_as_plain(lm, embedded):
    """Check that two lms give the same answers to the same questions, and run the same tokens."""
    plain, asked = CachedTransformer(embedded.model, embedded.tokenizer), []
    for each in (lm, plain):
        start = each.context("Once upon a time")
        more = start + ", there was a"
        together([start.log_probs, more.log_probs])
        asked.append((start.log_probs(), more.log_probs(), more.log_prob_since(start)))
    bound = 1e-3 if torch.cuda.is_available() else 1e-6         # accelerate runs the parts on the GPU, if there is one
    assert all(np.abs(a - b).max() <= bound for a, b in zip(*asked, strict=True))
    assert lm.engine.slot_bytes == plain.engine.slot_bytes > 0
    counts = operator.attrgetter("rounds", "rows", "tokens")
    assert counts(lm.stats) == counts(plain.stats)


@pytest.mark.parametrize("places", MAPS.values(), ids=MAPS)
def test_a_model_with_weights_on_disk_gives_the_same_answers(places, tmp_path, embedded, recwarn):
    lm = CachedTransformer.from_pretrained(device_map=places, offload_folder=tmp_path)
    assert any(p.device.type == "meta" for p in lm.model.parameters())
    same_as_plain(lm, embedded)
    assert [str(w.message) for w in recwarn] == []


@pytest.mark.parametrize("spread", [*SPREAD.values(), spread_inside], ids=[*SPREAD, "kept on disk but for the head"])
def test_a_model_dispatched_by_accelerate_gives_the_same_answers(spread, tmp_path, embedded):
    same_as_plain(CachedTransformer(spread(copy.deepcopy(embedded.model), tmp_path), embedded.tokenizer), embedded)


@pytest.mark.parametrize("inside, outside", [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_dtype_is_that_of_the_layers_not_the_embedding(inside, outside, attention, recwarn):
    inside, outside = getattr(torch, inside), getattr(torch, outside)
    model = build(TRIE["llama"](), inside)
    model.set_attn_implementation(attention)
    model.model.embed_tokens.to(outside).register_forward_hook(lambda module, given, found: found.to(inside))
    lm = CachedTransformer(model, VOCAB)
    assert lm.engine.dtype == inside and lm.engine.slot_bytes > 0 and len(recwarn) == 0
    assert error_of(lm, lm.at(range(3, 30))) <= (1e-4 if inside == torch.float32 else 0.2)


# --- quantised --------------------------------------------------------------------------------------------------------


class Int8(torch.nn.Module):
    """Linear layer with int8 weights. Its input is quantised by the largest value of the `batch` or of each `token`,
    or not at all."""

    def __init__(self, linear, by):
        super().__init__()
        self.scale = linear.weight.abs().amax() / 127
        self.weight = torch.nn.Parameter((linear.weight / self.scale).round().to(torch.int8), requires_grad=False)
        self.by = by

    def forward(self, x):
        if self.by is not None:
            unit = (x.abs().amax() if self.by == "batch" else x.abs().amax(-1, keepdim=True)) / 127
            x = (x / unit).round() * unit
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


def quantised(by, dtype=torch.float32):
    model = build(TRIE["llama"](), dtype)
    linears = [(name, each) for name, each in model.model.layers.named_modules() if isinstance(each, torch.nn.Linear)]
    for name, linear in linears:
        model.model.layers.set_submodule(name, Int8(linear, by))
    return model


def ask_in_many_ways(lm):
    """Return the largest error of contexts that are asked alone, together, and as prefixes of longer ones."""
    contexts = [lm.at([*range(3, 13), *tail]) for tail in ([], [5, 6], [9], [9, 9, 4], [7], [5, 6, 8])]
    contexts[0].log_probs()
    together([context.log_probs for context in contexts])
    lm.at([*range(3, 13), 20, 21]).log_prob_since(lm.at(range(3, 7)))
    return max(error_of(lm, context) for context in [*contexts, *(lm.at(range(3, n)) for n in range(7, 13))])


@pytest.mark.parametrize("by", [None, "token"])
def test_int8_weights_and_per_token_activations_are_cached(by, recwarn):
    lm = CachedTransformer(quantised(by), VOCAB)
    assert lm.engine.dtype == torch.float32 and lm.engine.slot_bytes > 0 and len(recwarn) == 0
    assert ask_in_many_ways(lm) <= 1e-4


def test_activations_quantised_by_the_batch_warn_and_disable_batching():
    with pytest.warns(UserWarning) as warned:
        lm = CachedTransformer(quantised("batch"), VOCAB)
    (warning,) = warned
    said = str(warning.message)
    assert "gives other probabilities when other tokens are in the pass" in said
    assert isinstance(lm.engine, hf.Recomputed) and lm.engine.apart
    assert ask_in_many_ways(lm) <= 1e-5               # of logits of about 10, in float32
    before = lm.stats.tokens
    together([lm.at([*range(23, 33)][:n]).log_probs for n in (3, 5, 9)])
    assert lm.stats.tokens - before == 3 + 5 + 9        # one on the way to another is run for itself
