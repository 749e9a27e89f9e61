"""Language models small enough to sum over every text, and what they say computed without any of our code.

`tiny_lm()` is a real transformer (Llama, two layers, random weights scaled up until its rows are far from uniform) with
V tokens; `table_lm(function)` is any function from token ids to logits. `log_probs_by_hand` asks the same transformer
by a plain forward pass without a cache; `texts_of` lists every sequence of tokens. Sums over these are the truth of
tests.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from llmppl.constraints import Vocabulary
from llmppl.lm.transformer import CachedTransformer

TOKENS = [b"a", b"b", b"c", b" ", b"ab", b"d", b"bc"]


def tiny_vocab(V: int = 6) -> Vocabulary:
    """V - 1 short tokens, and EOS as the last id. From V = 6 on, "ab" is one token or two."""
    return Vocabulary([*TOKENS[: V - 1], b""], eos_ids=[V - 1])


@functools.cache
def tiny_model(V: int = 6, seed: int = 0, dtype: str = "float64", eos: int | None = None):
    """The transformer; after "a", the probabilities are .63 .01 .23 .04 .03 .06, after "b", .05 .29 .47 .04 .12 .04."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        initializer_range=0.35,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=V - 1 if eos is None else eos,
        pad_token_id=None,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = LlamaForCausalLM(config)
    finally:
        torch.random.set_rng_state(state)
    return model.to(getattr(torch, dtype)).eval()


def cold_lm(V: int = 6, seed: int = 0, dtype: str = "float64", **limits) -> CachedTransformer:
    """A `CachedTransformer` around `tiny_model` that has computed nothing yet."""
    return CachedTransformer(tiny_model(V, seed, dtype), tiny_vocab(V), **limits)


tiny_lm = functools.cache(cold_lm)                      # one a process for the same arguments, so that it stays warm


@functools.cache
def tiny_tokenizer(V: int = 6):
    """A real tokenizer with the tokens of `tiny_vocab(V)` and a BOS, id V, that it puts before every text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = [*(token.decode() for token in TOKENS[: V - 1]), "</s>", "<s>"]
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="c"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("ab|."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", V)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def cold_lm_with_bos(V: int = 6, seed: int = 0) -> CachedTransformer:
    """The same with `tiny_tokenizer`: every context begins with BOS, id V."""
    return CachedTransformer(tiny_model(V + 1, seed, eos=V - 1), tiny_tokenizer(V))


def table_lm(
    logits: Callable[[list[int]], Sequence[float]], tokens: Sequence[bytes] = (b"a", b"b"), **limits
) -> CachedTransformer:
    """The language model whose logits after `ids` are `logits(ids)`: `tokens`, then EOS."""
    return CachedTransformer(logits, Vocabulary([*tokens, b""], eos_ids=[len(tokens)]), **limits)


_dists: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}


def log_probs_by_hand(lm: CachedTransformer, ids: Sequence[int]) -> np.ndarray:
    """(V,) log-probabilities of the token after `ids`: one forward pass of the torch model over all of them."""
    key = id(lm.model), tuple(int(i) for i in ids)
    if key not in _dists:
        with torch.inference_mode():
            logits = lm.model(input_ids=torch.tensor([key[1]]), use_cache=False).logits[0, -1]
        _dists[key] = torch.log_softmax(logits.double(), dim=-1).numpy()
    return _dists[key]


def log_prob_by_hand(lm: CachedTransformer, before: Sequence[int], ids: Sequence[int]) -> float:
    """Log-probability of the tokens `ids` in a row after the tokens `before`."""
    read, total = [*before], 0.0
    for i in ids:
        total += float(log_probs_by_hand(lm, read)[i])
        read.append(i)
    return total


def texts_of(V: int, most: int) -> Iterator[tuple[int, ...]]:
    """Every sequence that ends with EOS, id V - 1, after fewer than `most` tokens, or has `most` tokens and no EOS."""
    for n in range(most + 1):
        for ids in itertools.product(range(V - 1), repeat=n):
            yield ids if n == most else (*ids, V - 1)


def spelled(ids: Sequence[int], V: int = 6) -> str:
    """The text of token ids."""
    return b"".join(TOKENS[i] for i in ids if i != V - 1).decode()


def add_up(pairs) -> dict:
    """A dict with, for each key, exp of its log-weights summed; the posterior is this divided by its sum, Z."""
    sums: dict = {}
    for key, log_weight in pairs:
        sums[key] = sums.get(key, 0.0) + math.exp(log_weight)
    return {key: value for key, value in sums.items() if value > 0.0}
