"""GGUF files of models that transformers has loaded, and of a small Llama with a byte-level tokenizer of its own."""

import json
from pathlib import Path

import numpy as np
import torch

LLAMA = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers.": "blk.",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
GEMMA = LLAMA | {
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
TOKENS = ["he", "Ġhe", "<|endoftext|>", "<|end|>", "<|turn|>"]          # after those of the bytes
TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|turn|>' }}{% endfor %}ai:"
BOS, END, TURN = 258, 259, 260


def tensors_of(model, names):
    """Return the weights of a model under the names of llama.cpp."""
    found = {}
    for name, weights in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        found[name] = weights.float().numpy().copy()
    return found


def write_file(path, architecture, about, tensors, add_tokenizer, kind="F32"):
    """Write a GGUF file with these facts about the model. Its matrices are quantised as `kind`."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    add_tokenizer(writer)
    for name, number in about.items():
        add = writer.add_float32 if isinstance(number, float) else writer.add_uint32
        add(f"{architecture}.{name}", number)
    for name, array in tensors.items():
        if array.ndim == 1 or kind == "F32":
            writer.add_tensor(name, array.astype(np.float32))
        else:
            dtype = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(array, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def about_of(config):
    """Return what the files of Llamas and Gemmas say of the model."""
    return {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps), "vocab_size": config.vocab_size,
    }  # fmt: skip


def write(path, model, add_tokenizer, kind="F32", *, architecture="llama", without=(), spoiled=None):
    """Write a GGUF file of a Llama, but for the tensors `without`, and with NaN in the one `spoiled`."""
    config, tensors = model.config, tensors_of(model, LLAMA)
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
    about = about_of(config) | {
        "rope.dimension_count": config.hidden_size // config.num_attention_heads, "rope.freq_base": float(theta),
    }  # fmt: skip
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, array in tensors.items():
        if (n := heads.get(name.split(".")[-2])) is not None:      # llama.cpp turns neighbours, transformers halves
            tensors[name] = array.reshape(n, 2, len(array) // n // 2, -1).swapaxes(1, 2).reshape(array.shape)
    for name in without:
        del tensors[name]
    if spoiled is not None:
        tensors[spoiled][..., 0] = np.nan
    return write_file(path, architecture, about, tensors, add_tokenizer, kind)


def gemma3(path, model):
    """Write a GGUF file of a Gemma 3, without names of tokens."""
    config = model.config
    about = about_of(config) | {
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "attention.sliding_window": config.sliding_window, "rope.freq_base": 1e6,
    }  # fmt: skip
    tensors = tensors_of(model, GEMMA)
    tensors.pop("output.weight", None)                              # transformers adds 1 to the norms itself
    tensors = {name: array + ("norm" in name) for name, array in tensors.items()}
    return write_file(path, "gemma3", about, tensors, nameless(config.vocab_size))


def mamba(path):
    """Write a GGUF file of a Mamba with one layer of nothing but zeros."""
    about = {
        "context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 0,
        "attention.head_count": 0, "ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 16,
        "ssm.time_step_rank": 2, "vocab_size": 40, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    shapes = {
        "token_embd.weight": (40, 32), "output_norm.weight": (32,), "blk.0.attn_norm.weight": (32,),
        "blk.0.ssm_in.weight": (128, 32), "blk.0.ssm_conv1d.weight": (64, 4), "blk.0.ssm_conv1d.bias": (64,),
        "blk.0.ssm_x.weight": (34, 64), "blk.0.ssm_dt.weight": (64, 2), "blk.0.ssm_dt.bias": (64,),
        "blk.0.ssm_a": (64, 16), "blk.0.ssm_d": (64,), "blk.0.ssm_out.weight": (32, 64),
    }  # fmt: skip
    tensors = {name: np.zeros(shape) for name, shape in shapes.items()}
    return write_file(path, "mamba", about, tensors, nameless(40))


# ---- tokenizers


def byte_level(folder, size):
    """Return what adds the byte-level tokenizer of a folder to a file, with `size` tokens."""
    about = json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))
    special = {each["id"]: each["content"] for each in about["added_tokens"]}
    names = {i: token for token, i in about["model"]["vocab"].items()} | special
    merges = [each if isinstance(each, str) else " ".join(each) for each in about["model"]["merges"]]
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    tokens = [names.get(i, f"[PAD{i}]") for i in range(size)]
    types = [3 if i in special else 1 if i in names else 5 for i in range(size)]
    return lambda writer: add_gpt2(writer, tokens, types, merges, config["bos_token_id"], config["eos_token_id"])


def add_gpt2(writer, tokens, types, merges, bos, eos):
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(eos)


def nameless(size):
    """Return what adds tokens without names, for tests that bring a tokenizer."""

    def add(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list([f"<{i}>" for i in range(size)])
        writer.add_token_scores([0.0] * size)
        writer.add_token_types([1] * size)

    return add


# ---- a small Llama


def small_llama():
    """Return a Llama of two layers with random weights, for the bytes and TOKENS."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256 + len(TOKENS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=False,
        bos_token_id=BOS, eos_token_id=END, rms_norm_eps=1e-5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def write_small(path, kind="F32", *, tokenizer=True, **options):
    """Write a GGUF file of `small_llama()`; the options are those of `write`."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    def add_tokenizer(writer):
        tokens = [*bytes_to_unicode().values(), *TOKENS]
        add_gpt2(writer, tokens, [1] * BOS + [3] * 3, ["h e", "Ġ he"], BOS, END)
        writer.add_eot_token_id(TURN)
        writer.add_chat_template(TEMPLATE)

    return write(path, small_llama(), add_tokenizer if tokenizer else lambda writer: None, kind, **options)
