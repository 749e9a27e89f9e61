"""GGUF files: what is loaded from one is what transformers loads, converted once, whole or not at all.

The files are of a Llama with two layers and random weights, and a byte-level vocabulary with two merges.
"""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from support import wants_model

from llmppl.lm import gguf
from llmppl.lm.transformer import CachedTransformer

ggml = pytest.importorskip("gguf", reason="pip install 'llmppl[gguf]'")
ROOT = Path(__file__).parent.parent
WORDS = ["he", "Ġhe"]
SPECIAL = ["<|endoftext|>", "<|end|>", "<|turn|>"]
TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|turn|>' }}{% endfor %}ai:"
END, TURN = 259, 260


def llama():
    """The model that the files hold, and its tokens."""
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


def write(path, kind="F32", *, architecture="llama", tokenizer=True, without=(), spoiled=None):
    """A GGUF file of `llama()`; its matrices as `kind`, but for the tensors `without`."""
    model, tokens = llama()
    config = model.config
    writer = ggml.GGUFWriter(path, architecture)
    writer.add_name("A tiny llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(tokens))
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([1] * (len(tokens) - len(SPECIAL)) + [3] * len(SPECIAL))
        writer.add_token_merges(["h e", "Ġ he"])
        writer.add_bos_token_id(258)
        writer.add_eos_token_id(END)
        writer.add_eot_token_id(TURN)
        writer.add_chat_template(TEMPLATE)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers.": "blk.",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weights in model.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        array = weights.numpy().copy()
        if (n := heads.get(name.split(".")[-2])) is not None:      # llama.cpp turns neighbours, transformers halves
            array = array.reshape(n, 2, len(array) // n // 2, -1).swapaxes(1, 2).reshape(array.shape)
        if name == spoiled:
            array[..., 0] = np.nan
        if name in without:
            continue
        if array.ndim == 1 or kind == "F32":
            writer.add_tensor(name, array)
        else:
            quantisation = ggml.GGMLQuantizationType[kind]
            writer.add_tensor(name, ggml.quants.quantize(array, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "llmppl" / "gguf"


def contents(cache):
    return sorted(path.name for path in cache.iterdir()) if cache.exists() else []


# --- what is loaded ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
def test_log_probs_are_those_of_transformers_own_loading(kind, tmp_path):
    from transformers import AutoModelForCausalLM

    file = write(tmp_path / "tiny.gguf", kind)
    lm = CachedTransformer.from_pretrained(file)
    own = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    context = lm.context("he said hehe")
    with torch.no_grad():
        expected = own(torch.tensor([[int(token) for token in context.tokens]])).logits[0, -1].log_softmax(-1)
    assert np.abs(context.log_probs() - expected.numpy()).max() < 1e-4
    assert np.ptp(expected.numpy()) > 3                 # far from uniform, so that it could be told


def test_weights_in_float32_are_those_that_were_written(original):
    model, _ = llama()
    lm = CachedTransformer.from_pretrained(original)
    context = lm.context("the")
    with torch.no_grad():
        expected = model(torch.tensor([[int(token) for token in context.tokens]])).logits[0, -1].log_softmax(-1)
    assert np.abs(context.log_probs() - expected.numpy()).max() < 1e-5


def test_tokenizer_chat_template_ends_and_name_are_those_of_the_file(original):
    lm = CachedTransformer.from_pretrained(str(original))
    assert [str(token) for token in lm.context("the hehe").tokens] == ["t", "he", " he", "he"]
    assert lm.vocab.eos_ids == (END, TURN)              # the end of a turn beside that of the text
    said = lm.chat([{"role": "me", "content": "he"}])
    assert [int(token) for token in said.tokens][-4:] == [TURN, *(int(token) for token in lm.context("ai:").tokens)]
    assert repr(lm).startswith(f"CachedTransformer(tiny, {original}, Vocabulary(261 tokens")


def test_a_tokenizer_that_lies_beside_the_file_is_not_taken_for_its_own(original, tmp_path, embedded):
    embedded.tokenizer.save_pretrained(tmp_path)
    embedded.model.config.save_pretrained(tmp_path)
    beside = tmp_path / "tiny.gguf"
    beside.write_bytes(original.read_bytes())
    assert len(CachedTransformer.from_pretrained(beside).vocab) == 261


def test_the_real_model_is_what_transformers_loads(monkeypatch):
    wants_model("smollm2")
    from transformers import AutoModelForCausalLM

    monkeypatch.delenv("XDG_CACHE_HOME")                # 540 MB, once, in the user's own
    lm = CachedTransformer.from_pretrained("smollm2")
    file = gguf.packaged("smollm2")
    own = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    for context in (lm.context("The Fed says"), lm.chat([{"role": "user", "content": "Who are you?"}])):
        with torch.no_grad():
            expected = own(torch.tensor([[int(token) for token in context.tokens]])).logits[0, -1].log_softmax(-1)
        assert np.abs(context.log_probs() - expected.numpy()).max() < 1e-4
    assert [lm.tokenizer.decode(lm.vocab.eos_ids), "smollm2, " in repr(lm)] == ["<|im_end|>", True]


# --- converted once ---------------------------------------------------------------------------------------------------


def test_a_file_is_converted_once_and_one_line_says_where(original, cache, capfd, monkeypatch):
    CachedTransformer.from_pretrained(original)
    (name,) = {name for name in contents(cache) if not name.startswith(".")}
    digest = hashlib.sha256(original.read_bytes()).hexdigest()
    assert name == f"tiny-{digest[:16]}"
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("llmppl:")]
    assert said == [f"llmppl: converting {original} once, into {cache / name}"]
    monkeypatch.setattr(gguf, "_can_read", lambda: False)       # nothing reads it again
    CachedTransformer.from_pretrained(original)
    assert "llmppl:" not in capfd.readouterr().err


def test_the_same_bytes_under_another_path_are_not_converted_again(original, cache, tmp_path, monkeypatch):
    CachedTransformer.from_pretrained(original)
    copy = tmp_path / "elsewhere" / "tiny.gguf"
    copy.parent.mkdir()
    copy.write_bytes(original.read_bytes())
    monkeypatch.setattr(gguf, "_convert", lambda *_: pytest.fail("converted again"))
    assert str(copy) in repr(CachedTransformer.from_pretrained(copy))


@pytest.mark.parametrize("harm", ["flip", "cut", "lose", "unseal"])
def test_a_converted_folder_that_does_not_meet_its_seal_is_made_anew(harm, original, cache):
    before = CachedTransformer.from_pretrained(original).context("the").log_probs()
    (folder,) = cache.glob("tiny-*")
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    if harm == "flip":
        data[-1] ^= 64
        weights.write_bytes(data)
    elif harm == "cut":
        weights.write_bytes(data[:-64])
    else:
        (weights if harm == "lose" else folder / gguf.SEAL).unlink()
    assert not gguf._is_whole(folder)
    after = CachedTransformer.from_pretrained(original).context("the").log_probs()
    assert (after == before).all() and gguf._is_whole(folder) and contents(cache) == [".lock", folder.name]
