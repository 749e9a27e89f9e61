"""A GGUF file of a small Llama with a byte-level tokenizer."""

import torch

from helpers import gguf_files

WORDS = ["he", "Ġhe"]
SPECIAL = ["<|endoftext|>", "<|end|>", "<|turn|>"]
TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|turn|>' }}{% endfor %}ai:"
END, TURN = 259, 260


def llama():
    """Return the model that the files hold, and its tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = [*bytes_to_unicode().values(), *WORDS, *SPECIAL]
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=False,
        bos_token_id=258, eos_token_id=END, rms_norm_eps=1e-5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval(), tokens


def write(path, kind="F32", *, tokenizer=True, **options):
    """Write a GGUF file of `llama()`; the options are those of `gguf_files.write`."""
    model, tokens = llama()

    def add_tokenizer(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([1] * (len(tokens) - len(SPECIAL)) + [3] * len(SPECIAL))
        writer.add_token_merges(["h e", "Ġ he"])
        writer.add_bos_token_id(258)
        writer.add_eos_token_id(END)
        writer.add_eot_token_id(TURN)
        writer.add_chat_template(TEMPLATE)

    return gguf_files.write(path, model, add_tokenizer if tokenizer else lambda writer: None, kind, **options)
