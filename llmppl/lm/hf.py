"""A transformers model as a backend: its attention reads keys and values from a slab.

The slab sits behind the `transformers` cache interface. For each layer it is a pair of tensors (slots, kv_heads,
head_dim); `update` writes the new tokens' keys and values to their slots and returns, for every row of the batch, those
of its whole context, gathered. Positions and masks are given explicitly: a 4-D additive float mask (B, 1, Q, T), one
for each type of layer where a model has several, so that sliding windows keep working.

Models that do not work this way (a recurrent state, a mask of their own) are run without a cache, which is right but
slow. Which of the two a model needs is found when it is loaded, by comparing both with plain forward passes.
"""

from __future__ import annotations

import inspect
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, CacheLayerMixin

from llmppl.lm.cache import Backend, Batch
from llmppl.lm.embedded import PATH as EMBEDDED
from llmppl.lm.vocab import Vocabulary


def load(name: str | Path | None, *, dtype: Any, device: Any, device_map: Any, **options: Any) -> tuple[Any, Any]:
    """(model, tokenizer) of a hub id or folder; None is the model of the package. FileNotFoundError if there is none."""
    if device is not None and device_map is not None:
        raise ValueError("give device= (one device for the whole model) or device_map= (accelerate spreads it), not both")
    source = str(EMBEDDED if name is None else name)
    on_cpu = device_map is None and torch.device(device or "cpu").type == "cpu"
    shared = {k: options[k] for k in ("revision", "token", "trust_remote_code", "cache_dir", "local_files_only") if k in options}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **shared)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype or (torch.float32 if on_cpu else "auto"), device_map=device_map, **options
        )
    except OSError as error:
        what = "the folder holds no model that transformers can load" if os.path.isdir(source) else "no such folder is here"
        raise FileNotFoundError(
            f"no language model {source!r}: {what}, and it could not be had from the hub either ({_first_line(error)}). "
            "Give a hub id such as 'gpt2' (with a network), a folder written by save_pretrained, or nothing for the "
            "small model that ships with the package"
        ) from error
    return (model if device is None else model.to(device)).eval(), tokenizer


def eos_ids(model: Any, tokenizer: Any) -> list[int]:
    """The ids that end a text: the tokenizer's, the model's and its generation config's."""
    found: set[int] = set()
    owners = tokenizer, getattr(model, "config", None), getattr(model, "generation_config", None)
    for ids in (getattr(owner, "eos_token_id", None) for owner in owners):
        found.update([] if ids is None else [ids] if isinstance(ids, int) else ids)
    return sorted(found)


def is_transformer(model: Any) -> bool:
    return isinstance(model, torch.nn.Module) and hasattr(model, "config")


def backend(model: Any, vocab: Vocabulary) -> Backend:
    """The backend that gives the model's own probabilities: by the slab where that meets plain forwards, else without."""
    model.eval()
    window = _window(model.config)
    size = 8 if window is None or window > 64 else window + 4
    most = _max_length(model.config)
    size = size if most is None else min(size, most)
    ids = [i for i in range(len(vocab)) if vocab.known[i] and i not in vocab.special_ids][: 4 * size] or [0]
    main = [ids[(3 * i) % len(ids)] for i in range(size)]
    fork = main[: size // 2] + [ids[(5 * i + 1) % len(ids)] for i in range(size // 2, size - 1)]
    plain = Recomputed(model)
    truth = [plain.forward(Batch(np.array([row]), np.zeros(1, int), np.array([len(row)]), None, _all(row))) for row in (main, fork)]
    tolerance = 2e-3 if plain.dtype in (torch.float32, torch.float64) else 0.1
    problems = []
    for by_type in ((True,) if len(_layer_types(model.config)) > 1 else (False, True)):
        try:
            slab = Slab(model, by_type)
            found = _by_slab(slab, main, fork)
        except Exception as error:                      # whatever a model that was not made for this may raise
            problems.append(f"{type(error).__name__}: {_first_line(error)}")
            continue
        errors = [_distance(a, b) for a, b in zip(found, truth, strict=True)]
        if max(errors) <= tolerance:
            slab.clear()
            return slab
        problems.append(f"its logits are off by {max(errors):.2g} of their spread")
    warnings.warn(
        f"{type(model).__name__} cannot be cached token by token ({problems[0]}); every context is recomputed from its start: "
        "the probabilities are right, and long texts slow",
        stacklevel=4,
    )
    return plain


def _by_slab(slab: Slab, main: list[int], fork: list[int]) -> list[NDArray[Any]]:
    """The logits of two sequences that share their first half: run as a prefix, then a ragged batch, then single tokens."""
    size, half = len(main), len(main) // 2
    order = np.concatenate([np.arange(half, size) + 5, np.arange(half)[::-1]])     # slots in no order
    paths = [np.concatenate([order[-half:], order[: size - half]])] if half else [order]
    paths.append(np.concatenate([order[-half:] if half else order[:0], np.arange(size - 1 - half) + size + 10]))
    slab.reserve(2 * size + 16)
    logits: list[list[NDArray[Any]]] = [[], []]
    if half:
        prefix = slab.forward(Batch(np.array([main[:half]]), np.zeros(1, int), np.array([half]), paths[0][None, :half], _all(main[:half])))
        logits = [list(prefix), list(prefix)]
    done = [half, half]
    for step in (2, 1, size):
        rows = [i for i, row in enumerate((main, fork)) if done[i] < len(row)]
        if not rows:
            break
        parts = [(main, fork)[i][done[i] : done[i] + step] for i in rows]
        lengths, starts = np.array([len(part) for part in parts]), np.array([done[i] for i in rows])
        tokens = np.zeros((len(rows), lengths.max()), dtype=np.int64)
        slots = np.zeros((len(rows), int((starts + lengths).max())), dtype=np.int64)
        for k, i in enumerate(rows):
            tokens[k, : lengths[k]] = parts[k]
            slots[k, : starts[k] + lengths[k]] = paths[i][: starts[k] + lengths[k]]
        asked = [(k, j) for k in range(len(rows)) for j in range(lengths[k])]
        for (k, _), values in zip(asked, slab.forward(Batch(tokens, starts, lengths, slots, asked)), strict=True):
            logits[rows[k]].append(values)
        for k, i in enumerate(rows):
            done[i] += int(lengths[k])
    return [np.stack(rows) for rows in logits]


def _all(row: list[int]) -> list[tuple[int, int]]:
    return [(0, j) for j in range(len(row))]


def _distance(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Largest difference of two laws, as a share of the spread of the second; inf where either is not finite."""
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
    return float(np.abs(a - b).max() / max(float(b.std()), 1e-12))


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _layer_types(config: Any) -> set[str]:
    return set(getattr(_text_config(config), "layer_types", None) or ())


def _window(config: Any) -> int | None:
    """How many tokens back, itself included, a sliding layer looks; None if no layer slides."""
    types = _layer_types(config)
    if types and "sliding_attention" not in types:
        return None
    return getattr(_text_config(config), "sliding_window", None)


def _max_length(config: Any) -> int | None:
    config = _text_config(config)
    found = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
    return next((int(n) for n in found if n is not None), None)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


class _Model:
    """What both backends share: how the model is called."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.max_length = _max_length(model.config)
        weights = next(model.parameters())
        self.device, self.dtype = weights.device, weights.dtype
        accepted = inspect.signature(model.forward).parameters
        self._any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        self._accepted = set(accepted)

    def _logits(self, batch: Batch, **arguments: Any) -> NDArray[Any]:
        """(len(asked), V) float32 or float64."""
        columns = sorted({column for _, column in batch.asked})
        if "logits_to_keep" in self._accepted:
            arguments["logits_to_keep"] = torch.tensor(columns, device=self.device)
        else:
            columns = list(range(batch.tokens.shape[1]))
        arguments = {k: v for k, v in arguments.items() if self._any or k in self._accepted}
        with torch.inference_mode():
            logits = self.model(input_ids=torch.from_numpy(batch.tokens).to(self.device), **arguments).logits
            place = {column: k for k, column in enumerate(columns)}
            chosen = logits[[row for row, _ in batch.asked], [place[column] for _, column in batch.asked]]
            if chosen.dtype not in (torch.float32, torch.float64):
                chosen = chosen.float()
            return np.asarray(chosen.cpu().numpy())


class Recomputed(_Model):
    """Runs whole contexts, all of one length at a time, with no cache."""

    slot_bytes = 0

    def reserve(self, slots: int) -> None:
        raise NotImplementedError

    def forward(self, batch: Batch) -> NDArray[Any]:
        return self._logits(batch, use_cache=False)


@dataclass
class _Plan:
    """Where the keys and values of the pass under way go and come from."""

    capacity: int
    write: torch.Tensor | None = None                   # (n,) slots of the new tokens
    real: torch.Tensor | None = None                    # (n,) their places among the B x Q; None: all, in order
    read: torch.Tensor | None = None                    # (B x T,) slots
    shape: tuple[int, int] = (0, 0)                     # B, T

    def on(self, device: torch.device) -> _Plan:
        tensors = [None if t is None else t.to(device) for t in (self.write, self.real, self.read)]
        return _Plan(self.capacity, *tensors, self.shape)


class _SlabLayer(CacheLayerMixin):
    """The slab of one layer: keys and values are (slots, kv_heads, head_dim)."""

    is_sliding = False

    def __init__(self, slab: Slab) -> None:
        super().__init__()
        self.slab = slab

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def reserve(self, slots: int) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            if old is not None and len(old) < slots:
                new = old.new_empty((slots, *old.shape[1:]))
                new[: len(old)] = old
                setattr(self, name, new)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        plan = self.slab.plan_on(key_states.device)
        if self.keys is None:
            self.keys, self.values = (x.new_empty((plan.capacity, x.shape[1], x.shape[3])) for x in (key_states, value_states))
        return self._through(self.keys, key_states, plan), self._through(self.values, value_states, plan)

    @staticmethod
    def _through(slab: torch.Tensor, new: torch.Tensor, plan: _Plan) -> torch.Tensor:
        """Write (B, H, Q, D), and read (B, H, T, D)."""
        flat = new.transpose(1, 2).flatten(0, 1)        # (B Q, H, D)
        slab[plan.write] = flat if plan.real is None else flat[plan.real]
        assert plan.read is not None
        return slab.index_select(0, plan.read).unflatten(0, plan.shape).transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slab.plan.shape[1], 0

    def get_seq_length(self) -> int:
        return self.slab.plan.shape[1] - 1

    def get_max_length(self) -> int:
        return -1


class Slab(_Model):
    """Keys and values in a slab.

    Parameters
    ----------
    by_type : bool
        Whether the model takes a dict of masks by layer type.
    """

    def __init__(self, model: Any, by_type: bool) -> None:
        super().__init__(model)
        config = _text_config(model.config)
        self.types, self.window, self.by_type = _layer_types(config), _window(config), by_type
        strange = self.types - {"full_attention", "sliding_attention"}
        if strange:
            raise NotImplementedError(f"layers of type {', '.join(sorted(strange))}")
        if by_type and not self.types:
            raise NotImplementedError("no layer types")
        self.slot_bytes = 0                             # known when `clear` is called after a pass
        self.plan = _Plan(0)
        self._plans: dict[torch.device, _Plan] = {}
        self.layers = [_SlabLayer(self) for _ in range(config.num_hidden_layers)]

    def clear(self) -> None:
        """Forget all keys and values, but not how large they are."""
        tensors = [t for layer in self.layers for t in (layer.keys, layer.values) if t is not None]
        self.slot_bytes = sum(t[0].numel() * t.element_size() for t in tensors)
        self.plan = _Plan(0)
        for layer in self.layers:
            layer.keys = layer.values = None

    def reserve(self, slots: int) -> None:
        self.plan.capacity = slots
        for layer in self.layers:
            layer.reserve(slots)

    def plan_on(self, device: torch.device) -> _Plan:
        if device not in self._plans:
            self._plans[device] = self.plan.on(device)
        return self._plans[device]

    def forward(self, batch: Batch) -> NDArray[Any]:
        if batch.slots is None:
            return Recomputed.forward(self, batch)      # type: ignore[arg-type]
        rows, width = batch.tokens.shape
        columns = np.arange(width)
        positions = batch.starts[:, None] + columns                         # (B, Q)
        real = columns < batch.lengths[:, None]                             # (B, Q)
        positions = np.where(real, positions, batch.starts[:, None])
        write = batch.slots[np.arange(rows)[:, None], positions][real]
        self.plan = _Plan(
            self.plan.capacity,
            torch.from_numpy(write),
            None if real.all() else torch.from_numpy(np.flatnonzero(real)),
            torch.from_numpy(batch.slots.reshape(-1)),
            (rows, batch.slots.shape[1]),
        )
        self._plans = {}
        return self._logits(
            batch,
            position_ids=torch.from_numpy(positions).to(self.device),
            attention_mask=self._masks(positions, batch.slots.shape[1]),
            past_key_values=Cache(layers=list(self.layers)),
            use_cache=True,
        )

    def _masks(self, positions: NDArray[np.int64], length: int) -> Any:
        """(B, 1, Q, T) additive: 0 where the query may look, the least float elsewhere; a dict by layer type if wanted."""
        places = torch.from_numpy(positions.astype(np.int32)).to(self.device)
        back = places[:, None, :, None] - torch.arange(length, dtype=torch.int32, device=self.device)
        full = torch.zeros(back.shape, dtype=self.dtype, device=self.device).masked_fill_(back < 0, torch.finfo(self.dtype).min)
        if self.window is None:
            return {kind: full for kind in self.types} if self.by_type else full
        sliding = full.masked_fill(back >= self.window, torch.finfo(self.dtype).min)
        if not self.by_type:
            return sliding
        return {kind: sliding if kind == "sliding_attention" else full for kind in self.types}
