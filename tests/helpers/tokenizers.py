"""Small tokenizers of the usual families, and a language model with a chat template."""

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from llmppl import CachedTransformer

HEX = [f"<0x{byte:02X}>" for byte in range(256)]


def fast(tokenizer, **special):
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def byte_level(add_prefix_space=False, normalizer=None):
    """Return a tokenizer of GPT-2's kind: all bytes, some merges, an eos, and added tokens that are not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the theory of the naïve é 日本 日本 🙂🙂 the end"] * 3, trainer)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return fast(tokenizer, eos_token="<eos>")


def unigram():
    """Return a Unigram tokenizer with byte fallback and a Metaspace decoder, which puts a space before a text."""
    words = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -3.0), ("▁the", -1.0), ("the", -2.0), ("▁cat", -1.0), ("s", -3.0)]
    tokenizer = Tokenizer(models.Unigram([*words, *((byte, -9.0) for byte in HEX)], unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return fast(tokenizer, unk_token="<unk>", eos_token="</s>")


def llama():
    """Return a BPE tokenizer with byte fallback, and a sequence as its decoder."""
    words = ["<unk>", "<s>", "</s>", *HEX, "▁", "t", "h", "e", "a", "th", "the", "▁the", "▁▁"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁")]
    model = models.BPE({w: i for i, w in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast(tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


TURNS = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
TEMPLATE = TURNS + PROMPT


def chat_lm(template=TEMPLATE):
    tokenizer = byte_level()
    tokenizer.chat_template = template
    return CachedTransformer(lambda ids: np.zeros(len(tokenizer)), tokenizer)
