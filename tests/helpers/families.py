"""Small transformers of every family, with random weights, and the truth about them: a plain, uncached pass.

`family_lm(name)` is a fresh `CachedTransformer` around a model of 50 tokens, each one byte of its own (0 and 1 are
special, 2 is EOS). `truth(lm, ids)` asks the torch model directly. `check_books(lm)` compares what the cache says of
itself with the tensors, rows and nodes that are there.
"""

import functools
import warnings

import numpy as np
import torch
import transformers as T

from llmppl.constraints import Vocabulary
from llmppl.lm.cache import NODE_OVERHEAD, ROW_OVERHEAD
from llmppl.lm.transformer import CachedTransformer
from llmppl.support.runtime import Runtime

V = 50
VOCAB = Vocabulary([bytes([40 + i]) for i in range(V)], eos_ids=[2], special_ids=[0, 1])

_LLAMA = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GPT = {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_GEMMA = {**_LLAMA, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}

TRIE = {                                                # these keep keys and values
    "gpt2": lambda: T.GPT2Config(**_GPT),
    "llama": lambda: T.LlamaConfig(**_LLAMA),
    "qwen2": lambda: T.Qwen2Config(**_LLAMA),
    "qwen3": lambda: T.Qwen3Config(**_LLAMA, head_dim=8),
    "qwen3-moe": lambda: T.Qwen3MoeConfig(
        **_LLAMA, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "gemma": lambda: T.GemmaConfig(**_LLAMA, head_dim=8),
    "gemma2": lambda: T.Gemma2Config(**_GEMMA),
    "gemma3": lambda: T.Gemma3TextConfig(**_GEMMA, layer_types=["sliding_attention", "full_attention"]),
    "mixtral": lambda: T.MixtralConfig(**_LLAMA, num_local_experts=2),
    "deepseek-v3": lambda: T.DeepseekV3Config(          # keeps what keys and values are made of
        **{**_LLAMA, "num_key_value_heads": 4}, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8,
        v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1,
        first_k_dense_replace=1,
    ),
    "mistral": lambda: T.MistralConfig(**_LLAMA, sliding_window=None),
    "mistral-sliding": lambda: T.MistralConfig(**_LLAMA, sliding_window=4),
    "phi": lambda: T.PhiConfig(**_LLAMA),
    "phi3": lambda: T.Phi3Config(**_LLAMA, sliding_window=6),
    "gpt-neox": lambda: T.GPTNeoXConfig(
        vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    ),
    "opt": lambda: T.OPTConfig(
        vocab_size=V, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=32, do_layer_norm_before=True,
    ),
    "falcon": lambda: T.FalconConfig(
        vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, new_decoder_architecture=False,
        max_position_embeddings=64,
    ),
    "gpt-j": lambda: T.GPTJConfig(**_GPT, rotary_dim=4),
    "stablelm": lambda: T.StableLmConfig(**_LLAMA),
    "olmo2": lambda: T.Olmo2Config(**_LLAMA),
    "smollm3": lambda: T.SmolLM3Config(**_LLAMA),
    "granite": lambda: T.GraniteConfig(**_LLAMA),
    "cohere": lambda: T.CohereConfig(**_LLAMA, logit_scale=1.0),
    "gpt-oss": lambda: T.GptOssConfig(                  # attention sinks
        **_LLAMA, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "mpt": lambda: T.MptConfig(vocab_size=V, d_model=32, n_heads=4, n_layers=2, max_seq_len=64),
    "gemma3n": lambda: T.Gemma3nTextConfig(             # the last two layers read the keys of the first two
        **{**_LLAMA, "num_hidden_layers": 4}, head_dim=8, vocab_size_per_layer_input=V, hidden_size_per_layer_input=8,
        sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
        laurel_rank=4, activation_sparsity_pattern=[0.0] * 4,
    ),
}  # fmt: skip
ALIGNED = {                                             # so do these, which make masks of their own
    "bloom": lambda: T.BloomConfig(vocab_size=V, hidden_size=32, n_layer=2, n_head=4),
    "falcon-alibi": lambda: T.FalconConfig(
        vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, new_decoder_architecture=False,
        max_position_embeddings=64, alibi=True,
    ),
    "gpt-neo": lambda: T.GPTNeoConfig(
        vocab_size=V, hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=64, window_size=8,
        attention_types=[[["global", "local"], 1]], bos_token_id=1, eos_token_id=2,
    ),
    "llama4": lambda: T.Llama4TextConfig(               # scales that depend on the position, from the 8th on
        **_LLAMA, head_dim=8, intermediate_size_mlp=64, attention_chunk_size=8, floor_scale=8, no_rope_layers=[1, 0],
        num_local_experts=2, num_experts_per_tok=1, interleave_moe_layer_step=1,
    ),
}  # fmt: skip
TRIE |= ALIGNED
RECOMPUTED = {                                          # a recurrent state
    "mamba": lambda: T.MambaConfig(
        vocab_size=V, hidden_size=16, state_size=4, num_hidden_layers=2, expand=2, conv_kernel=4
    ),
    "qwen3-next": lambda: T.Qwen3NextConfig(
        **_LLAMA, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"],
    ),
    "recurrent-gemma": lambda: T.RecurrentGemmaConfig(
        **{key: n for key, n in _LLAMA.items() if key != "max_position_embeddings"}, lru_width=32,
        attention_window_size=8, block_types=["recurrent", "attention"],
    ),
}  # fmt: skip


def build(config, dtype=torch.float32, seed=0):
    """A model with random weights so large that its rows are far from uniform, in train mode as it was made."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = T.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for p in model.parameters():
                spread = float(p.std()) if p.numel() > 1 else 0.0
                if p.dim() > 1 and spread > 0:
                    p.mul_(0.35 / spread)
                else:
                    p.add_(0.2 * torch.randn_like(p))
    finally:
        torch.random.set_rng_state(state)
    return model.to(dtype)


@functools.cache
def model_of(name, dtype=torch.float32):
    return build({**TRIE, **RECOMPUTED}[name](), dtype)


def quietly(make, *args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*args, **options)


def family_lm(name, dtype=torch.float32, **limits):
    """A cold lm of a family; what it warns of when it is loaded is a test of its own."""
    return quietly(CachedTransformer, model_of(name, dtype), VOCAB, **limits)


def together(functions):
    """Run functions as the particles of one step: what they ask is answered in common rounds."""
    Runtime().run(functions, [f"function {i}" for i in range(len(functions))])


_truths: dict = {}


def truth(lm, ids):
    """(V,) log-probabilities after `ids`: one forward pass of the torch model over all of them, and a softmax."""
    key = lm.model, lm.vocab, tuple(int(i) for i in ids)
    if key not in _truths:
        with torch.no_grad():
            device = next(lm.model.parameters()).device
            logits = lm.model(input_ids=torch.tensor([key[2]], device=device), use_cache=False).logits[0, -1]
        logits = logits.double().cpu().numpy()
        full = np.full(len(lm.vocab), -np.inf)
        full[: len(logits)] = logits[: len(full)]
        full[~lm.vocab.known] = -np.inf
        _truths[key] = full - np.logaddexp.reduce(full)
    return _truths[key]


def error_of(lm, context):
    """The largest difference of a context's log-probabilities from the truth; where the truth is -inf they must be."""
    found, right = context.log_probs(), truth(lm, context.tokens)
    assert (np.isneginf(found) == np.isneginf(right)).all()
    return np.abs(found - right)[np.isfinite(right)].max()


def nodes_of(lm):
    return lm.trie.root.subtree()[1:]


def at(lm, ids):
    """The context of token ids, whatever a tokenizer would make of their text."""
    return lm.at(ids)


def check_books(lm, contexts=None):
    """What must hold of trie, store and slab between any two operations."""
    store, nodes = lm.store, nodes_of(lm)
    slotted = [node for node in nodes if node.slot >= 0]
    owned = [node for node in store.owners if node is not None]
    assert len({node.slot for node in slotted}) == len(slotted), "a slot is shared by two nodes"
    assert {id(node) for node in owned} == {id(node) for node in slotted}, "the store owns what the trie has not"
    assert all(store.owners[node.slot] is node for node in slotted)
    free = set(store._free)
    assert len(free) == len(store._free) and free | {node.slot for node in slotted} == set(range(len(store.owners)))
    for node in nodes:
        assert node.depth == (node.parent.depth if node.parent else 0) + 1
        assert node.kept == sum(child.slot >= 0 for child in node.children)
        assert node.slot < 0 or node.parent is lm.trie.root or node.parent.slot >= 0, "a slot above a gap"
    rows = {node: node.row.nbytes + ROW_OVERHEAD for node in nodes if node.row is not None}
    leading = {each for node in rows for each in node.path() if each.slot < 0}
    assert rows.keys() == store._rows.keys()
    assert sum(rows.values()) + NODE_OVERHEAD * len(leading) == store.row_bytes
    slab = sum(t.numel() * t.element_size() for layer in getattr(getattr(lm.engine, "slab", None), "layers", ())
               for t in (layer.keys, layer.values) if t is not None)  # fmt: skip
    assert slab in (0, len(store.owners) * getattr(lm.engine, "slot_bytes", 0))
    assert store.slab_bytes == len(store.owners) * store.slot_cost
    assert store.bytes == store.slab_bytes + store.row_bytes <= store.peak_bytes <= store.budget
    assert store.slots_used == len(slotted) and store.rows_used == len(rows)
    held = {each for context in contexts or () for each in context.node.path()}
    assert held <= set(nodes), "the node of a context has left the trie"
    kept = [node for node in nodes if node.slot >= 0 or node.row is not None]
    kept = {each for node in kept for each in node.path()}
    assert contexts is None or set(nodes) == held | kept, "a node that nothing holds"
