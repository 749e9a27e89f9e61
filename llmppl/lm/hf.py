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
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache, CacheLayerMixin

from llmppl.lm.backend import Backend, Batch
from llmppl.lm.loading import first_line
from llmppl.tokens import Vocabulary


def backend(model: Any, vocab: Vocabulary) -> Backend:
    """The backend that gives the model's own probabilities: the slab where that meets plain forwards, else none."""
    model.eval()
    plain = Recomputed(model)
    rows = _sample_rows(model, vocab)
    truth = [plain.forward(_whole(row)) for row in rows]
    tolerance = 2e-3 if plain.dtype in (torch.float32, torch.float64) else 0.1
    problems = []
    for by_type in ((True,) if len(_layer_types(model.config)) > 1 else (False, True)):
        try:
            slab = Slab(model, by_type)
            found = _by_slab(slab, rows)
        except Exception as error:                      # whatever a model that was not made for this may raise
            problems.append(f"{type(error).__name__}: {first_line(error)}")
            continue
        errors = [_distance(a, b) for a, b in zip(found, truth, strict=True)]
        if max(errors) <= tolerance:
            slab.clear()
            if slab.max_length != plain.max_length:
                warnings.warn(
                    f"{type(model).__name__} turns every key otherwise once a text has more than {slab.max_length} "
                    f"tokens (longrope), which a cache cannot follow: it reads {slab.max_length} of "
                    f"{plain.max_length} tokens here",
                    stacklevel=4,
                )
            return slab
        problems.append(f"its logits are off by {max(errors):.2g} of their spread")
    attention = getattr(model.config, "_attn_implementation", None)
    usual = attention in (None, "eager", "sdpa")
    advice = "" if usual else f"; attn_implementation='sdpa' may work where {attention!r} does not"
    warnings.warn(
        f"{type(model).__name__} cannot be cached token by token ({problems[0]}); every context is recomputed from its "
        f"start: the probabilities are right, and long texts slow{advice}",
        stacklevel=4,
    )
    return plain


def _sample_rows(model: Any, vocab: Vocabulary) -> list[list[int]]:
    """Two token sequences that share their first half; longer than what a layer looks back, where that is cheap."""
    config = _text_config(model.config)
    spans = [n for key, n in vars(config).items() if ("window" in key or "chunk" in key) and type(n) is int]
    size, most = max([8, *(n + 4 for n in spans)]), _max_length(config)
    if size * sum(p.numel() for p in model.parameters()) > 1e11:
        size = 8
    size = size if most is None else min(size, most)
    top = min(len(vocab), model.get_input_embeddings().weight.shape[0])
    ids = [i for i in range(top) if vocab.known[i] and i not in vocab.special_ids]
    rng = np.random.default_rng(0)                      # no regular pattern: of equal tokens all orders look alike
    main, other = rng.choice(ids if len(ids) > 1 else top, (2, size)).tolist()
    fork = main[: size // 2] + other[size // 2 : size - 1]
    return [main, fork] if fork else [main]


def _by_slab(slab: Slab, rows: list[list[int]]) -> list[NDArray[Any]]:
    """The logits of sequences that share their first half: a prefix, then batches of unequal starts and lengths."""
    size, half = len(rows[0]), len(rows[0]) // 2
    places = np.random.default_rng(1).permutation(2 * size + 8)                     # slots in no order
    paths = [np.append(places[:half], places[half + i * size :][: len(row) - half]) for i, row in enumerate(rows)]
    slab.reserve(len(places))
    stops = [(half, half), (size - 1, half + 1), (size, size)]                      # of each row after each pass
    logits: list[list[NDArray[Any]]] = [[] for _ in rows]
    done = [0] * len(rows)
    for k, ends in enumerate(stops):
        upto = [min(end, len(row)) for end, row in zip(ends, rows, strict=False)]
        run = [i for i in range(len(rows)) if upto[i] > done[i] and (k > 0 or i == 0)]
        if run:
            starts = np.array([done[i] for i in run])
            lengths = np.array([upto[i] for i in run]) - starts
            tokens = np.zeros((len(run), lengths.max()), dtype=np.int64)
            slots = np.repeat([paths[i][:1] for i in run], (starts + lengths).max(), axis=1)
            for j, i in enumerate(run):
                tokens[j, : lengths[j]] = rows[i][done[i] : upto[i]]
                slots[j, : upto[i]] = paths[i][: upto[i]]
            asked = [(j, q) for j in range(len(run)) for q in range(lengths[j])]
            for (j, _), values in zip(asked, slab.forward(Batch(tokens, starts, lengths, slots, asked)), strict=True):
                logits[run[j]].append(values)
        if k == 0:
            logits = [list(logits[0]) for _ in rows]
        done = upto
    return [np.stack(row) for row in logits]


def _whole(row: list[int]) -> Batch:
    asked = [(0, j) for j in range(len(row))]
    return Batch(np.array([row]), np.zeros(1, dtype=np.int64), np.array([len(row)]), None, asked)


def _distance(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Largest difference of two laws, as a share of the spread of the second; inf where either is not finite."""
    if a.shape != b.shape:
        return float("inf")
    heads = np.isfinite(b).all(0)                       # a model may rule ids out by -inf
    if not heads.any() or not (np.isfinite(a) == np.isfinite(b)).all():
        return float("inf")
    a, b = (x[:, heads] - x[:, heads].mean(-1, keepdims=True) for x in (a, b))
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


class _Model:
    """What both backends share: how the model is called."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.max_length = _max_length(model.config)
        weights = next(model.parameters())
        hook = getattr(model, "_hf_hook", None)         # accelerate's, where some weights are not in memory
        self.dtype = weights.dtype
        self.device = torch.device(getattr(hook, "execution_device", None) or weights.device)
        accepted = inspect.signature(model.forward).parameters
        self._any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        self._accepted = set(accepted)

    def _logits(self, batch: Batch, **arguments: Any) -> NDArray[Any]:
        """(len(asked), V) float32 or float64."""
        columns = sorted({column for _, column in batch.asked})
        if "logits_to_keep" in self._accepted:
            arguments["logits_to_keep"] = torch.tensor(columns, dtype=torch.long, device=self.device)
        else:
            columns = list(range(batch.tokens.shape[1]))
        arguments = {k: v for k, v in arguments.items() if self._any or k in self._accepted}
        with torch.inference_mode():
            logits = self.model(input_ids=torch.from_numpy(batch.tokens).to(self.device), **arguments).logits
            place = {column: k for k, column in enumerate(columns)}
            asked = np.array([(row, place[column]) for row, column in batch.asked], dtype=np.int64).reshape(-1, 2)
            chosen = logits[tuple(torch.from_numpy(asked.T).to(logits.device))]
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
        write, real, read = (None if t is None else t.to(device) for t in (self.write, self.real, self.read))
        return _Plan(self.capacity, write, real, read, self.shape)


class _SlabLayer(CacheLayerMixin):                       # type: ignore[no-untyped-call]
    """The slab of one layer: keys and values are (slots, kv_heads, head_dim)."""

    is_sliding = False

    def __init__(self, slab: Slab) -> None:
        super().__init__()                              # type: ignore[no-untyped-call]
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

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        plan = self.slab.plan_on(key_states.device)
        if self.keys is None:
            states = key_states, value_states
            self.keys, self.values = (x.new_empty((plan.capacity, x.shape[1], x.shape[3])) for x in states)
        assert self.keys is not None and self.values is not None
        keys = self._through("keys", self.keys, key_states, plan)
        return keys, self._through("values", self.values, value_states, plan)

    def _through(self, name: str, slab: torch.Tensor, new: torch.Tensor, plan: _Plan) -> torch.Tensor:
        """Write (B, H, Q, D), and read (B, H, T, D)."""
        flat = new.transpose(1, 2).flatten(0, 1)        # (B Q, H, D)
        slab[plan.write] = flat if plan.real is None else flat[plan.real]
        assert plan.read is not None
        read = self.slab.buffer(name, slab, len(plan.read))
        torch.index_select(slab, 0, plan.read, out=read)
        return read.reshape(*plan.shape, *slab.shape[1:]).transpose(1, 2)

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
        ropes = getattr(config, "rope_parameters", None) or {}
        if ropes.get("rope_type") == "longrope":        # longer texts turn the keys of their first tokens otherwise
            first = getattr(config, "original_max_position_embeddings", None)
            first = first or ropes.get("original_max_position_embeddings")
            self.max_length = min(self.max_length or first, first) if first else self.max_length
        strange = self.types - {"full_attention", "sliding_attention"}
        if strange:
            raise NotImplementedError(f"layers of type {', '.join(sorted(strange))}")
        if by_type and not self.types:
            raise NotImplementedError("no layer types")
        self.slot_bytes = 0                             # known when `clear` is called after a pass
        self.plan = _Plan(0)
        self._plans: dict[torch.device, _Plan] = {}
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}
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

    def buffer(self, name: str, slab: torch.Tensor, size: int) -> torch.Tensor:
        """(size, kv_heads, head_dim), uninitialised: one for all layers of a pass, since fresh memory costs more to
        touch than the keys do to copy. (A model whose layers share keys would see them overwritten: the check at load
        finds that.)"""
        key = name, slab.device, slab.dtype, slab.shape[1:]
        if key not in self._buffers:
            self._buffers[key] = slab.new_empty((size, *slab.shape[1:]))
        return self._buffers[key]

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
        self._plans, self._buffers = {}, {}
        return self._logits(
            batch,
            position_ids=torch.from_numpy(positions).to(self.device),
            attention_mask=self._masks(positions, batch.slots.shape[1]),
            past_key_values=Cache(layers=list(self.layers)),
            use_cache=True,
        )

    def _masks(self, positions: NDArray[np.int64], length: int) -> Any:
        """(B, 1, Q, T) additive: 0 where a query may look, the least float elsewhere; a dict by type if wanted."""
        places = torch.from_numpy(positions.astype(np.int32)).to(self.device)
        back = places[:, None, :, None] - torch.arange(length, dtype=torch.int32, device=self.device)
        least = torch.finfo(self.dtype).min             # not -inf: half-precision kernels may make NaN of it
        full = torch.zeros(back.shape, dtype=self.dtype, device=self.device).masked_fill_(back < 0, least)
        if self.window is None:
            return dict.fromkeys(self.types, full) if self.by_type else full
        sliding = full.masked_fill(back >= self.window, least)
        if not self.by_type:
            return sliding
        return {kind: sliding if kind == "sliding_attention" else full for kind in self.types}
