"""Models to steer, and the task: text whose tokens all come from a fixed random half of the vocabulary.

All models except the one that ships with the package have random weights and made-up tokens, so nothing is downloaded.
They are the shape of GPT-2 small, small Llamas with the vocabularies of today, and heads. A head has almost no layers
before its whole last layer. It shows the cost of a vocabulary outside the model.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from llmppl import CachedTransformer, Vocabulary
from llmppl.lm import Context

PARAGRAPH = (
    "The old house stood at the end of the road, and nobody had lived in it for many years. In the evening the wind "
    "came up from the sea and went through the empty rooms, and the people of the village said that they could hear a "
    "voice. One day a young woman came with a box of books and a dog, and she opened all the windows. "
)


@dataclass
class Subject:
    """Model to run, with its vocabulary, a function that builds a tokenizer, and the ids of a prompt."""

    name: str
    model: Any
    vocab: Vocabulary
    tokenizer: Any
    ids: list[int]                                      # as long as the longest prompt


def made_up(name: str, model: Any, longest: int) -> Subject:
    """Return a subject whose tokens are every byte, then a space and letters."""
    V = model.config.vocab_size
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ("".join(word) for n in itertools.count(1) for word in itertools.product(letters, repeat=n))
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [b" " + word.encode() for word in itertools.islice(words, V - 257)]
    vocab = Vocabulary([*tokens, b""], eos_ids=[V - 1])
    ids = np.random.default_rng(1).integers(256, V - 1, longest).tolist()
    return Subject(name, model, vocab, lambda: _word_tokenizer(tokens), ids)


def _word_tokenizer(tokens: list[bytes]) -> Any:
    """Build a byte-level tokenizer with these tokens and no merges: a word is one token or spelled in bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(rest)}
    vocab = {"".join(alphabet[byte] for byte in data): i for i, data in enumerate(tokens)}
    vocab["<|endoftext|>"] = len(tokens)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=end, bos_token=end, clean_up_tokenization_spaces=False
    )


def gpt2(longest: int) -> Subject:
    """Return GPT-2 small."""
    torch.manual_seed(0)
    return made_up("gpt2", GPT2LMHeadModel(GPT2Config()).eval(), longest)


def llama(V: int, longest: int) -> Subject:
    """Return a Llama of three layers of width 512."""
    return made_up(f"llama-{V}", _llama(V, 512, 3, 0.02), longest)


def head(V: int, spread: float) -> Subject:
    """Return a model with one layer of width 16; `spread` is the standard deviation of the logits.

    With V = 128,256 and a spread of 4, it is as peaked as a trained model's distribution (an entropy of 4 nats). Random
    weights of the usual size give a flat distribution.
    """
    return made_up(f"head-{V}", _llama(V, 16, 1, spread / 4.0), 8)      # the vectors that enter the head have norm 4


def _llama(V: int, width: int, layers: int, sd: float) -> Any:
    heads = max(1, width // 64)
    config = LlamaConfig(
        vocab_size=V, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, initializer_range=sd, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=V - 1, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def embedded(longest: int) -> Subject:
    """Return the model of the package, with an English prompt."""
    lm = CachedTransformer.from_pretrained(engine="transformers")
    ids = lm.tokenizer.encode(PARAGRAPH * (1 + longest // 50))[:longest]
    return Subject("embedded", lm.model, lm.vocab, lambda: lm.tokenizer, ids)


SUBJECTS: dict[str, Callable[[int], Subject]] = {
    "gpt2": gpt2,
    "embedded": embedded,
    "llama-128k": functools.partial(llama, 128_256),
    "llama-262k": functools.partial(llama, 262_144),
}


@dataclass
class Task:
    """One setting. Tasks with different `turn` have entirely different prompts."""

    subject: Subject
    N: int
    steps: int
    prompt: int
    turn: int = 0

    def __post_init__(self) -> None:
        vocab, ids = self.subject.vocab, self.subject.ids[: self.prompt]
        self.ids = ids[self.turn :] + ids[: self.turn]
        self.mask: NDArray[np.bool_] = np.random.default_rng(2).random(len(vocab)) < 0.5
        self.mask[list(vocab.special_ids)] = False      # these include the ends of text

    def __str__(self) -> str:
        return f"{self.subject.name}, N={self.N}, {self.steps} steps, a prompt of {self.prompt} tokens"


def context_of(lm: CachedTransformer, ids: list[int]) -> Context:
    """Return the context of these tokens."""
    context = lm.context(lm.vocab.tokens[ids[0]].decode("latin-1"))
    assert [int(i) for i in context.tokens] == ids[:1]
    for i in ids[1:]:
        context = context + lm.vocab[i]
    return context
