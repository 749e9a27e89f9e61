"""The model in the package as an engine in numpy, which needs no import of torch or transformers.

The engine reads the files that `save_pretrained` writes of a Llama. It computes in float32, equal to transformers up to
rounding. Keys and values are one array (layers, 2, slots, kv_heads, head_dim).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from llmppl.lm.embedded import PATH, verify
from llmppl.lm.engine import Batch, SlotEngine

Floats = NDArray[np.float32]


class NumpyLlama(SlotEngine):
    """Llama in numpy, with keys and values in an array of slots."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = {
            name.removeprefix("model."): weight.astype(np.float32)
            for name, weight in load_file(folder / "model.safetensors").items()
        }
        self.name = str(folder)
        self.max_length = config["max_position_embeddings"]
        self.embedding = weights["embed_tokens.weight"]
        self.norm = weights["norm.weight"]
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self.epsilon = np.float32(config["rms_norm_eps"])
        self.scale = np.float32(self.head_dim**-0.5)
        self.layers = [_layer(weights, f"layers.{i}.") for i in range(config["num_hidden_layers"])]
        theta = config["rope_parameters"]["rope_theta"] ** (
            -np.arange(0, self.head_dim, 2) / self.head_dim
        )
        angles = np.outer(np.arange(self.max_length), theta)  # (positions, head_dim / 2)
        self.rotations: NDArray[np.complex64] = np.exp(1j * angles).astype(np.complex64)
        self.slab = self._slab(0)
        self.slot_bytes = self._slab(1).nbytes

    def _slab(self, slots: int) -> Floats:
        return np.empty((len(self.layers), 2, slots, self.kv_heads, self.head_dim), np.float32)

    def renewed(self) -> NumpyLlama:
        engine = copy.copy(self)  # the weights are shared
        engine.slab = self._slab(0)
        return engine

    def reserve(self, slots: int) -> None:
        slab = self._slab(slots)
        slab[:, :, : self.slab.shape[2]] = self.slab
        self.slab = slab

    def run(self, batch: Batch) -> Floats:
        return self._run(batch, self.slab)

    def forward(self, contexts: list[list[int]], asked: list[tuple[int, int]]) -> Floats:
        logits = np.empty((len(asked), len(self.embedding)), np.float32)
        for i, ids in enumerate(contexts):
            here = [place for place, (context, _) in enumerate(asked) if context == i]
            places = np.arange(len(ids))[None]
            columns = [(0, asked[place][1] - 1) for place in here]
            alone = Batch(np.array([ids]), np.array([0]), np.array([len(ids)]), places, columns)
            logits[here] = self._run(alone, self._slab(len(ids)))
        return logits

    def _run(self, batch: Batch, slab: Floats) -> Floats:
        """Run one forward pass; the n new tokens of all rows are one array."""
        self.tokens += int(batch.lengths.sum())
        width = batch.tokens.shape[1]
        columns = np.arange(width)
        row, column = np.nonzero(columns < batch.lengths[:, None])  # (n,) each
        positions = batch.starts[row] + column
        rotations = self.rotations[positions, None]
        write = batch.slots[row, positions]
        ahead = (
            np.arange(batch.slots.shape[1]) > (batch.starts[:, None] + columns)[..., None]
        )  # (B, Q, T)
        hidden = ahead[:, None, None] if ahead.any() else None
        queries = np.zeros((*batch.tokens.shape, self.heads, self.head_dim), np.float32)
        x = self.embedding[batch.tokens[row, column]]
        for layer, (keys, values) in zip(self.layers, slab, strict=True):
            heads = self._normal(x, layer["before"]) @ layer["qkv"]
            heads = heads.reshape(len(x), -1, self.head_dim)  # (n, heads + 2 kv_heads, head_dim)
            rotated = _rotate(heads[:, : -self.kv_heads], rotations)
            queries[row, column] = rotated[:, : self.heads]
            keys[write] = rotated[:, self.heads :]
            values[write] = heads[:, -self.kv_heads :]
            attended = self._attention(queries, keys[batch.slots], values[batch.slots], hidden)
            x = x + attended[row, column] @ layer["out"]
            gate, up = np.split(self._normal(x, layer["between"]) @ layer["gate_up"], 2, axis=-1)
            x = x + (gate * (np.tanh(gate / 2) + 1) / 2 * up) @ layer["down"]  # silu
        index = np.zeros(batch.tokens.shape, np.int64)
        index[row, column] = np.arange(len(row))
        asked = index[tuple(np.array(batch.asked, np.int64).reshape(-1, 2).T)]
        logits = self._normal(x[asked], self.norm) @ self.embedding.T
        return logits

    def _normal(self, x: Floats, weight: Floats) -> Floats:
        scaled: Floats = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + self.epsilon) * weight
        return scaled

    def _attention(
        self, queries: Floats, keys: Floats, values: Floats, hidden: NDArray[np.bool_] | None
    ) -> Floats:
        """Return (B, Q, heads x head_dim): attention of each query over the keys of its row.

        queries : (B, Q, heads, head_dim)
        keys, values : (B, T, kv_heads, head_dim)
        hidden : (B, 1, 1, Q, T) bool, True where a query may not look; None if it may look everywhere
        """
        rows, width = queries.shape[:2]
        shape = rows, width, self.kv_heads, -1, self.head_dim
        queries = (
            queries.reshape(shape)
            .transpose(0, 2, 3, 1, 4)
            .reshape(rows, self.kv_heads, -1, self.head_dim)
        )
        scores: Floats = queries @ keys.transpose(0, 2, 3, 1) * self.scale  # (B, H, G Q, T)
        if hidden is not None:
            by_query = scores.reshape(rows, self.kv_heads, -1, width, scores.shape[-1])
            np.copyto(by_query, -np.inf, where=hidden)
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        means = scores @ values.transpose(0, 2, 1, 3)  # (B, H, G Q, head_dim)
        means = means.reshape(rows, self.kv_heads, -1, width, self.head_dim)
        joined = means.transpose(0, 3, 1, 2, 4).reshape(rows, width, -1)
        return joined


def _layer(weights: dict[str, Floats], prefix: str) -> dict[str, Floats]:
    """Return the matrices of one layer. Matrices that read the same vectors are concatenated."""

    def joined(*names: str) -> Floats:
        return np.ascontiguousarray(
            np.concatenate([weights[f"{prefix}{name}.weight"] for name in names]).T
        )

    return {
        "before": weights[prefix + "input_layernorm.weight"],
        "qkv": joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "out": joined("self_attn.o_proj"),
        "between": weights[prefix + "post_attention_layernorm.weight"],
        "gate_up": joined("mlp.gate_proj", "mlp.up_proj"),
        "down": joined("mlp.down_proj"),
    }


def _rotate(x: Floats, rotations: NDArray[np.complex64]) -> Floats:
    """Rotate each pair of coordinates (i, i + head_dim / 2) of (n, heads, head_dim) vectors by the position's angle."""
    real, imaginary = np.split(x, 2, axis=-1)
    pairs = (real + 1j * imaginary) * rotations
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


class FastTokenizer:
    """Tokenizer of the package tokenizers, with the part of the interface of transformers' that llmppl reads."""

    chat_template = None

    def __init__(self, folder: Path) -> None:
        file = str(folder / "tokenizer.json")
        backend = Tokenizer.from_file(file)
        self._splitting = Tokenizer.from_file(file)
        self._splitting.encode_special_tokens = True  # a name of a special token is text
        self.backend_tokenizer = backend
        self.added_tokens_decoder = backend.get_added_tokens_decoder()
        self.all_special_ids = [
            i for i, token in self.added_tokens_decoder.items() if token.special
        ]
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        self.bos_token_id, self.eos_token_id = map(
            backend.token_to_id, (config["bos_token"], config["eos_token"])
        )
        self.get_vocab = backend.get_vocab
        self.convert_ids_to_tokens = backend.id_to_token

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        split_special_tokens: bool = False,
        verbose: bool = True,
    ) -> list[int]:
        """Return the ids of a text. There is nothing to be `verbose` about."""
        backend = self._splitting if split_special_tokens else self.backend_tokenizer
        return backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def load(name: str | Path | None = None, **options: Any) -> tuple[NumpyLlama, Any]:
    """Load (engine, tokenizer) of the model in the package.

    Raises a ValueError for another model, for any option, and if the weights are damaged.
    """
    if name is not None or options:
        given = [] if name is None else [repr(name)]
        given += [f"{option}={value!r}" for option, value in options.items()]
        raise ValueError(
            f"engine='numpy' runs the model in the package alone, in float32, and takes no {', '.join(given)}: "
            "engine='transformers' does"
        )
    verify()
    return NumpyLlama(PATH), FastTokenizer(PATH)
