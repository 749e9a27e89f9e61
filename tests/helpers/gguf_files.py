"""GGUF files of Llamas that transformers has loaded, as llama.cpp reads them."""

import json
from pathlib import Path

import numpy as np

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers.": "blk.",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write(path, model, add_tokenizer, kind="F32", *, architecture="llama", without=(), spoiled=None):
    """A GGUF file of a Llama; its matrices as `kind`, but for the tensors `without`, and NaN in the one `spoiled`."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("A tiny llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weights in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        array = weights.float().numpy().copy()
        if (n := heads.get(name.split(".")[-2])) is not None:      # llama.cpp turns neighbours, transformers halves
            array = array.reshape(n, 2, len(array) // n // 2, -1).swapaxes(1, 2).reshape(array.shape)
        if name == spoiled:
            array[..., 0] = np.nan
        if name in without:
            continue
        if array.ndim == 1 or kind == "F32":
            writer.add_tensor(name, array)
        else:
            quantisation = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(array, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level(folder, size):
    """What adds the byte-level tokenizer of a folder to a file, with `size` tokens."""
    about = json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))
    special = {each["id"]: each["content"] for each in about["added_tokens"]}
    names = {i: token for token, i in about["model"]["vocab"].items()} | special
    merges = [each if isinstance(each, str) else " ".join(each) for each in about["model"]["merges"]]
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))

    def add(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([names.get(i, f"[PAD{i}]") for i in range(size)])
        writer.add_token_types([3 if i in special else 1 if i in names else 5 for i in range(size)])
        writer.add_token_merges(merges)
        writer.add_bos_token_id(config["bos_token_id"])
        writer.add_eos_token_id(config["eos_token_id"])

    return add


def nameless(size):
    """What adds tokens without names, for tests that bring a tokenizer."""

    def add(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list([f"<{i}>" for i in range(size)])
        writer.add_token_scores([0.0] * size)
        writer.add_token_types([1] * size)

    return add


def gemma3(path, model):
    """A GGUF file of a Gemma 3, without names of tokens."""
    config = model.config
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "model.layers.": "blk.",
        "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    about = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "attention.sliding_window": config.sliding_window, "vocab_size": config.vocab_size,
    }  # fmt: skip
    tensors = {}
    for name, weights in model.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        if name != "lm_head.weight":
            tensors[name] = weights.numpy() + ("norm" in name)          # transformers adds the 1 itself
    floats = {"attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": 1e6}
    return raw(path, "gemma3", about, floats, tensors, config.vocab_size)


def mamba(path):
    """A GGUF file of a Mamba with one layer of nothing but zeros."""
    about = {
        "context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 0,
        "attention.head_count": 0, "ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 16,
        "ssm.time_step_rank": 2, "vocab_size": 40,
    }  # fmt: skip
    shapes = {
        "token_embd.weight": (40, 32), "output_norm.weight": (32,), "blk.0.attn_norm.weight": (32,),
        "blk.0.ssm_in.weight": (128, 32), "blk.0.ssm_conv1d.weight": (64, 4), "blk.0.ssm_conv1d.bias": (64,),
        "blk.0.ssm_x.weight": (34, 64), "blk.0.ssm_dt.weight": (64, 2), "blk.0.ssm_dt.bias": (64,),
        "blk.0.ssm_a": (64, 16), "blk.0.ssm_d": (64,), "blk.0.ssm_out.weight": (32, 64),
    }  # fmt: skip
    tensors = {name: np.zeros(shape) for name, shape in shapes.items()}
    return raw(path, "mamba", about, {"attention.layer_norm_rms_epsilon": 1e-5}, tensors, 40)


def raw(path, architecture, about, floats, tensors, size):
    """A GGUF file of what it says of itself and of tensors, as they are."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for name, number in about.items():
        writer.add_uint32(f"{architecture}.{name}", number)
    for name, number in floats.items():
        writer.add_float32(f"{architecture}.{name}", number)
    nameless(size)(writer)
    for name, array in tensors.items():
        writer.add_tensor(name, array.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
