"""Models too large for one device, or for their floats: spread by accelerate, of mixed types, quantised."""

import copy

import accelerate
import numpy as np
import pytest
import torch
from families import TRIE, VOCAB, build, error_of, together

from llmppl.lm.transformer import CachedTransformer

# --- spread over devices, memory and disk -----------------------------------------------------------------------------

PARTS = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", *(f"model.layers.{i}" for i in range(6))]


ENDS = ["model.embed_tokens", "lm_head"]
MAPS = {
    "all": {"": "disk"},
    "every part": dict.fromkeys(PARTS, "disk"),
    "embedding and head": {part: "disk" if part in ENDS else "cpu" for part in PARTS},
    "all but these": {part: "cpu" if part in ENDS else "disk" for part in PARTS},
    "half of the layers": {part: "disk" if part[-1] in "345" else "cpu" for part in PARTS},
}
SPREAD = {                                              # what accelerate makes of a model that is in memory
    "kept in memory": lambda model, folder: accelerate.cpu_offload(model, torch.device("cpu")),
    "kept on disk": lambda model, folder: accelerate.disk_offload(model, folder, torch.device("cpu")),
    "kept in memory until run": lambda model, folder: accelerate.cpu_offload_with_hook(model, torch.device("cpu"))[0],
    "dispatched": lambda model, folder: accelerate.dispatch_model(
        model, MAPS["embedding and head"], offload_dir=folder, force_hooks=True
    ),
}


def spread_inside(model, folder):
    model.model = accelerate.disk_offload(model.model, folder, torch.device("cpu"))
    return model


def same_as_plain(lm, embedded):
    """Asked the same questions, both give the same answers and run the same tokens."""
    plain, asked = CachedTransformer(embedded.model, embedded.tokenizer), []
    for each in (lm, plain):
        start = each.context("Once upon a time")
        more = start + ", there was a"
        together([start.log_probs, more.log_probs])
        asked.append((start.log_probs(), more.log_probs(), more.log_prob_since(start)))
    assert all(np.abs(a - b).max() <= 1e-6 for a, b in zip(*asked, strict=True))
    assert lm.engine.slot_bytes == plain.engine.slot_bytes > 0
    for count in ("rounds", "rows", "tokens"):
        assert getattr(lm.stats, count) == getattr(plain.stats, count) > 0


@pytest.mark.parametrize("places", MAPS.values(), ids=MAPS)
def test_a_model_whose_weights_stay_on_disk_says_the_same(places, tmp_path, embedded, recwarn):
    lm = CachedTransformer.from_pretrained(device_map=places, offload_folder=tmp_path)
    assert any(p.device.type == "meta" for p in lm.model.parameters())
    same_as_plain(lm, embedded)
    assert [str(w.message) for w in recwarn] == []


@pytest.mark.parametrize("spread", [*SPREAD.values(), spread_inside], ids=[*SPREAD, "kept on disk but for the head"])
def test_a_model_that_accelerate_has_spread_says_the_same(spread, tmp_path, embedded):
    same_as_plain(CachedTransformer(spread(copy.deepcopy(embedded.model), tmp_path), embedded.tokenizer), embedded)


@pytest.mark.parametrize("places, kind", [
    ({"model": "disk", "lm_head": "cpu"}, ValueError), ({"model": "cpu", "lm_head": "disk"}, RuntimeError),
])  # fmt: skip
def test_weights_that_are_shared_cannot_be_in_two_places(places, kind, tmp_path):
    with pytest.raises(kind, match="share weights, as embedding and head often do, have to be in the same place"):
        CachedTransformer.from_pretrained(device_map=places, offload_folder=tmp_path)


@pytest.mark.parametrize("inside, outside", [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_type_is_that_of_the_layers_though_the_embedding_has_another(inside, outside, attention, recwarn):
    inside, outside = getattr(torch, inside), getattr(torch, outside)
    model = build(TRIE["llama"](), inside)
    model.set_attn_implementation(attention)
    model.model.embed_tokens.to(outside).register_forward_hook(lambda module, given, found: found.to(inside))
    lm = CachedTransformer(model, VOCAB)
    assert lm.engine.dtype == inside and lm.engine.slot_bytes > 0 and len(recwarn) == 0
    assert error_of(lm, lm.at(range(3, 30))) <= (1e-4 if inside == torch.float32 else 0.2)
