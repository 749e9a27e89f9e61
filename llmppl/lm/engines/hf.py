"""Transformers models as engines. Attention reads keys and values from a slab.

The *slab* has the keys and values of all slots; it implements the cache interface of transformers. Attention reads the
common prefixes of the rows of a batch once (`hf_attention`). The engine gives the model positions and a 4-D additive
float mask (B, 1, Q, T), one for each type of layer if there are several, so that sliding windows work. Models that make
their own masks (ALiBi, chunks, local attention) run without these, on rows of equal start and length. Models whose
state is not keys and values (recurrent layers) run without a cache, which is slow. `engine` tries these ways when the
model is loaded, and compares each with plain forward passes.

*Adapters* are sets of weights with a name that LoRA and similar methods add to the layers of a model. Anybody may
change the active ones at any time, so `Adapted` activates a fixed choice for each pass, and restores the former one.
"""

from __future__ import annotations

import inspect
import itertools
import math
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from packaging.version import Version
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, CacheLayerMixin

from llmppl.constraints.vocabulary import Vocabulary
from llmppl.lm.embedded import PATH as EMBEDDED
from llmppl.lm.embedded import verify
from llmppl.lm.engine import Batch, Engine, SlotEngine
from llmppl.lm.engines.hf_attention import LEAST, ForwardPass, LazyKV, share
from llmppl.lm.engines.loading import converted, gguf_file, gguf_name, progress_bars
from llmppl.support.locks import Lock, at_fork

Places = list[tuple[int, int]]
CACHE = (
    "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"
)  # its argument
_LOADING = Lock()  # transformers changes settings of the process while it loads
_TURNS: WeakKeyDictionary[Any, Lock] = (
    WeakKeyDictionary()
)  # of passes over the same weights, by the inner model

at_fork(
    after_in_child=lambda: torch.set_num_threads(1)
)  # OpenMP waits for threads that a fork lacks


def engine(
    model: Any, vocab: Vocabulary, max_batch_tokens: int, adapters: Sequence[str] | None = None
) -> Engine:
    """Return an engine with the model's own probabilities: `Cached` if it equals plain forward passes on sample texts.

    Otherwise warn and return `Recomputed`. `adapters` are the names of the active ones; None for those active now.
    """
    model.eval()
    adapted = Adapted(model, adapters)
    plain = Recomputed(adapted, max_batch_tokens)
    rows = _sample_rows(model, vocab)
    prefixes = [(0, n) for n in range(1, rows.shape[1] + 1)]
    truth = np.stack(
        [_numpy(plain.forward([row.tolist()], prefixes)) for row in rows]
    )  # (2, n, V) logits
    plain.tokens = 0
    tolerance = 2e-3 if plain.dtype in (torch.float32, torch.float64) else 0.1
    problems = []
    shares = False
    for masks in ("by type" if len(_layer_types(_text_config(model))) > 1 else "one", "own"):
        try:
            slab = Cached(adapted, max_batch_tokens, masks)
            error = _error_of(slab, rows, truth)
        except Exception as reason:  # models raise errors of any type
            problems.append(f"{type(reason).__name__}: {str(reason).partition(chr(10))[0][:200]}")
            continue
        if error <= tolerance:
            slab.least = 1
            with suppress(Exception):  # models may do anything with a `LazyKV`
                shares = _error_of(slab, rows, truth) <= tolerance
            slab.start(shares)
            if slab.max_length != plain.max_length:
                warnings.warn(
                    f"{type(model).__name__} rotates every key otherwise once a text has more than {slab.max_length} "
                    f"tokens (longrope), so it reads {slab.max_length} of {plain.max_length} tokens here",
                    stacklevel=4,
                )
            return slab
        problems.append(f"its logits are off by {error:.2g} of their spread")
    varies = _varies(plain, rows, truth)
    plain.tokens = 0
    plain.apart = varies > tolerance
    if plain.apart:
        message = (
            f"gives other probabilities when other tokens are in the pass, by {varies:.2g} of the spread of its "
            "logits, as activations do that are quantised by the batch. Every context is run alone and from its "
            "start, which is slow. int8 weights alone, or activations quantised token by token, are cached"
        )
    else:
        message = (
            f"cannot be cached token by token ({problems[0]}); every context is recomputed from its start: the "
            "probabilities are right, and long texts slow"
        )
    warnings.warn(f"{type(model).__name__} {message}", stacklevel=4)
    return plain


def _sample_rows(model: Any, vocab: Vocabulary) -> NDArray[np.int64]:
    """Return (2, n) token ids; the rows share their first half. n exceeds the model's windows if that is cheap."""
    config = _text_config(model)
    spans = [
        n
        for key, n in vars(config).items()
        if ("window" in key or "chunk" in key) and type(n) is int
    ]
    size = max([8, *(n + 4 for n in spans)])
    if size * sum(p.numel() for p in model.parameters()) > 1e11:
        size = 8
    size = min(size, _max_length(config) or size)
    top = min(len(vocab), model.get_input_embeddings().weight.shape[0])
    ids = [i for i in range(top) if vocab.known[i] and i not in vocab.special_ids]
    rng = np.random.default_rng(0)  # among equal tokens a wrong order would go unnoticed
    rows = rng.choice(ids if len(ids) > 1 else top, (2, size))
    rows[1, : size // 2] = rows[0, : size // 2]
    return rows


def _error_of(slab: Cached, rows: NDArray[np.int64], truth: NDArray[Any]) -> float:
    """Return the error of the slab: on the shared half, then on batches of unequal starts and lengths."""
    size = rows.shape[1]
    half = size // 2
    slots = np.random.default_rng(1).permutation(2 * size).reshape(rows.shape)
    slots[1, :half] = slots[0, :half]
    slab.reserve(slots.size)
    stops = np.array(
        [[0, half], [half, half], [size - 2, half + 1], [size - 1, size - 1], [size, size]]
    )  # by pass
    stops = np.maximum.accumulate(stops)  # for texts of three tokens or fewer
    errors = []
    for before, after in itertools.pairwise(stops):
        (run,) = (after > before).nonzero()
        if len(run):  # half of one token is empty
            starts = before[run]
            lengths = (after - before)[run]
            longest = after.max()
            i, j = (
                np.arange(lengths.max()) < lengths[:, None]
            ).nonzero()  # where the batch has new tokens
            tokens = np.zeros((len(run), lengths.max()), dtype=np.int64)
            tokens[i, j] = rows[run[i], starts[i] + j]
            inside = np.arange(longest) < after[run, None]
            read = np.where(inside, slots[run, :longest], slots[run, :1])
            asked = list(zip(i.tolist(), j.tolist(), strict=True))
            logits = _numpy(slab.run(Batch(tokens, starts, lengths, read, asked)))
            errors.append(_distance(logits, truth[run[i], starts[i] + j]))
    return max(errors)


def _varies(plain: Recomputed, rows: NDArray[np.int64], truth: NDArray[Any]) -> float:
    """Return the difference between batchings of the same tokens: each row alone, both at once, and half of one."""
    size = rows.shape[1]
    half = max(1, size // 2)
    both = _numpy(plain.logits(rows, [(i, j) for i in range(2) for j in range(size)])).reshape(
        truth.shape
    )
    part = _numpy(plain.logits(rows[:1, :half], [(0, j) for j in range(half)]))
    return max(_distance(part, truth[0, :half]), *map(_distance, both, truth))


def _numpy(logits: Any) -> NDArray[Any]:
    return np.asarray(torch.as_tensor(logits).cpu())


def _distance(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Return the largest difference of two (n, V) logits, relative to the spread of `b`.

    It is inf if an entry is finite in one of them alone.
    """
    heads = np.isfinite(b).all(0)  # a model may rule ids out by -inf
    if not heads.any() or not (np.isfinite(a) == np.isfinite(b)).all():
        return float("inf")
    a, b = (x[:, heads] - x[:, heads].mean(-1, keepdims=True) for x in (a, b))
    return float(np.abs(a - b).max() / max(float(b.std()), 1e-12))


def _text_config(model: Any) -> Any:
    return getattr(model.config, "get_text_config", lambda: model.config)()


def _layer_types(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or ())


def _window(config: Any) -> int | None:
    """Return the size of the sliding window, the token itself included; None if no layer slides."""
    types = _layer_types(config)
    return (
        None
        if types and "sliding_attention" not in types
        else getattr(config, "sliding_window", None)
    )


def _max_length(config: Any) -> int | None:
    longest = getattr(config, "max_position_embeddings", getattr(config, "max_seq_len", None))
    return longest


def _dtype(model: Any) -> torch.dtype:
    """Return the dtype of most weights, without quantised ones."""
    sizes = Counter({torch.get_default_dtype(): 0})
    for p in model.parameters():
        if p.is_floating_point() and p.element_size() > 1:
            sizes[p.dtype] += p.numel()
    return sizes.most_common(1)[0][0]


def _device(model: Any) -> torch.device:
    """Return a device for the input. accelerate moves it on, and may leave weights on "meta"."""
    return next(
        (p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu")
    )


# ---- engines


class Recomputed(Engine):
    """Engine without a cache. It runs whole contexts of equal lengths together.

    max_batch_tokens : most tokens, rows times longest context, of one forward pass
    apart : True if each pass has one context alone
    """

    apart = False

    def __init__(self, adapted: Adapted, max_batch_tokens: int) -> None:
        self.adapted = adapted
        self.max_batch_tokens = max_batch_tokens
        model = adapted.model
        self.max_length = _max_length(_text_config(model))
        self.dtype = _dtype(model)
        self.device = _device(model)
        if adapted.names:
            name = getattr(_text_config(model), "name_or_path", "") or type(model).__name__
            self.name = f"{name} with {', '.join(map(repr, adapted.names))}"
        self.keeps_rows = (
            self.device.type == "cuda"
        )  # as tensors on the device, which computes in float64
        accepted = inspect.signature(adapted.inner.forward).parameters
        self._any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        self._accepted = set(accepted)
        self._cache = next(
            (name for name in ("past_key_values", "cache") if name in accepted), CACHE
        )

    def forward(self, contexts: list[list[int]], asked: list[tuple[int, int]]) -> Any:
        if self.apart:
            contexts = [contexts[i][:n] for i, n in asked]
            asked = [(i, n) for i, (_, n) in enumerate(asked)]
        by_length: dict[int, list[int]] = {}
        for i, ids in enumerate(contexts):
            by_length.setdefault(len(ids), []).append(i)
        groups = []
        for length, rows in by_length.items():
            size = 1 if self.apart else max(1, self.max_batch_tokens // length)
            groups += [rows[first : first + size] for first in range(0, len(rows), size)]

        def run(rows: list[int], places: Places) -> Any:
            tokens = np.array([contexts[i] for i in rows])
            self.tokens += tokens.size
            return self.logits(tokens, [(row, n - 1) for row, n in places])

        return self._by_group(groups, asked, run)

    def _by_group(
        self, groups: Iterable[list[int]], asked: Places, run: Callable[[list[int], Places], Any]
    ) -> Any:
        """Return the logits at the (row, place) of `asked`, of one pass `run(rows, asked of them)` for each group."""
        order = []
        parts = []
        for rows in groups:
            index = {row: i for i, row in enumerate(rows)}
            here = [k for k, (row, _) in enumerate(asked) if row in index]
            parts.append(run(rows, [(index[asked[k][0]], asked[k][1]) for k in here]))
            order += here
        logits = (
            parts[0]
            if len(parts) == 1
            else (torch.cat if self.keeps_rows else np.concatenate)(parts)
        )
        return logits if order == sorted(order) else logits[np.argsort(order)]

    def logits(
        self, tokens: NDArray[np.int64], asked: list[tuple[int, int]], **arguments: Any
    ) -> Any:
        """Return (len(asked), V) float32 or float64 logits of one pass, at (row, column)."""
        if self.adapted.model.training:  # dropout would make probabilities random
            self.adapted.model.eval()
        rows, columns = np.array(asked, dtype=np.int64).reshape(-1, 2).T
        if "logits_to_keep" in self._accepted and tokens.shape[1] > 1 and not self.apart:
            kept, columns = np.unique(columns, return_inverse=True)
            arguments["logits_to_keep"] = torch.from_numpy(kept).to(self.device)
        arguments.setdefault("use_cache", False)
        arguments = {k: v for k, v in arguments.items() if self._any or k in self._accepted}

        with torch.inference_mode():
            logits = self.adapted(
                input_ids=torch.from_numpy(tokens).to(self.device), **arguments
            ).logits
            if logits.shape[:2] == (len(rows), 1) and (rows == np.arange(len(rows))).all():
                chosen = logits[:, 0]  # a view: a copy may take a hundred megabytes
            else:
                chosen = logits[
                    tuple(torch.from_numpy(x).to(logits.device) for x in (rows, columns))
                ]
            wide = torch.promote_types(chosen.dtype, torch.float32)
            return chosen.to(wide) if self.keeps_rows else chosen.to(wide).cpu().numpy()


class Cached(Recomputed, SlotEngine):
    """Engine with keys and values in a slab.

    masks : "one" for all layers, a dict "by type" of layer, or the model's "own"
        A model makes its own masks if it is given none. They are right for rows of equal start and length, so a batch
        is split into passes with such rows.
    least : number of slot reads that a shared part must save (`hf_attention.share`); inf if no part is shared
    """

    def __init__(self, adapted: Adapted, max_batch_tokens: int, masks: str) -> None:
        super().__init__(adapted, max_batch_tokens)
        config = _text_config(adapted.model)
        self.window = _window(config)
        self.masks = masks
        ropes = getattr(config, "rope_parameters", None) or {}
        if (
            ropes.get("rope_type") == "longrope"
        ):  # longer texts rotate the keys of all their tokens differently
            name = "original_max_position_embeddings"
            lengths = self.max_length, getattr(config, name, None), ropes.get(name)
            self.max_length = min(filter(None, lengths), default=None)
        known = {"full_attention", "sliding_attention"} | (
            {"chunked_attention"} if masks == "own" else set()
        )
        unknown = _layer_types(config) - known
        if unknown:
            raise NotImplementedError(f"layers of type {', '.join(sorted(unknown))}")
        modes = getattr(config, "kv_sharing_modes", None) or ()
        self.slab = Slab(
            config.num_hidden_layers, [i for i, mode in enumerate(modes) if mode == "store"]
        )
        self.slot_bytes = 0  # set by `start`
        self.least = math.inf

    def start(self, shares: bool) -> None:
        """Drop the keys and values of the trial passes, and set the size of a slot; share parts if `shares`."""
        self.slot_bytes = self.slab.slot_bytes
        self.least = LEAST * len(self.slab.layers) / self.slot_bytes if shares else math.inf
        self.devices = {
            self.device,
            *(layer.keys.device for layer in self.slab.layers if layer.keys is not None),
        }
        self.slab.clear()
        self.tokens = 0

    def reserve(self, slots: int) -> None:
        self.slab.reserve(slots)

    def run(self, batch: Batch) -> Any:
        if self.masks != "own":
            return self._run(batch)
        kinds: dict[tuple[int, int], list[int]] = {}  # by start and length
        for row, kind in enumerate(zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True)):
            kinds.setdefault(kind, []).append(row)

        def run(rows: list[int], asked: Places) -> Any:
            starts = batch.starts[rows]
            lengths = batch.lengths[rows]
            tokens = batch.tokens[rows, : lengths[0]]
            slots = batch.slots[rows, : starts[0] + lengths[0]]
            return self._run(Batch(tokens, starts, lengths, slots, asked))

        return self._by_group(kinds.values(), batch.asked, run)

    def _run(self, batch: Batch) -> Any:
        """Run one forward pass."""
        order, parts = share(batch.slots, batch.starts, batch.starts + batch.lengths, self.least)
        if order:
            place = np.argsort(order).tolist()
            asked = [(place[row], column) for row, column in batch.asked]
            batch = Batch(
                batch.tokens[order],
                batch.starts[order],
                batch.lengths[order],
                batch.slots[order],
                asked,
            )
        self.tokens += int(batch.lengths.sum())
        rows, width = batch.tokens.shape
        positions = batch.starts[:, None] + np.arange(width)  # (B, Q)
        real = None
        if batch.lengths.min() < width:
            inside = np.arange(width) < batch.lengths[:, None]  # (B, Q)
            positions = np.where(inside, positions, batch.starts[:, None])
            real = torch.from_numpy(np.flatnonzero(inside))
        write = batch.slots[np.arange(rows)[:, None], positions].reshape(-1)
        write = write if real is None else write[real]
        forward = ForwardPass(torch.from_numpy(write), real, torch.from_numpy(batch.slots), parts)
        cache = self.slab.begin(forward, width)
        try:
            return self.logits(
                batch.tokens,
                batch.asked,
                position_ids=torch.from_numpy(positions).to(self.device),
                attention_mask=self._masks(positions, batch.slots.shape[1]),
                use_cache=True,
                **{self._cache: cache},
            )
        finally:
            self.slab.end()

    def _masks(self, positions: NDArray[np.int64], length: int) -> Any:
        """Return (B, 1, Q, T) additive masks: 0 where a query may look, else the least float. A dict if "by type"."""
        if self.masks == "own":
            return None
        rows, width = positions.shape
        full = sliding = torch.zeros((rows, 1, width, length), dtype=self.dtype, device=self.device)
        ahead = int(positions.min()) < length - 1  # some query must not see all of its row
        beyond = int(positions.max()) >= (math.inf if self.window is None else self.window)
        if ahead or beyond:
            places = torch.from_numpy(positions.astype(np.int32)).to(self.device)
            back = places[:, None, :, None] - torch.arange(
                length, dtype=torch.int32, device=self.device
            )
            least = torch.finfo(self.dtype).min  # half-precision kernels may turn -inf into NaN
            full.masked_fill_(back < 0, least)
            sliding = full if self.window is None else full.masked_fill(back >= self.window, least)
        return (
            {"full_attention": full, "sliding_attention": sliding}
            if self.masks == "by type"
            else sliding
        )


# ---- the slab


class Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Slab of one layer: keys and values are (kv_heads, slots, head_dim).

    buffer : name of the memory for gathered keys and values: None for that of all layers, or an own one
    """

    is_sliding = False

    def __init__(self, store: Slab, buffer: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.store = store
        self.buffer = buffer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[Any, Any]:
        forward = self.store.pass_on(key_states.device)
        return self._write_and_read("keys", key_states, forward), self._write_and_read(
            "values", value_states, forward
        )

    def _write_and_read(self, name: str, new: torch.Tensor, forward: ForwardPass) -> Any:
        """Write (B, H, Q, D) of new tokens, and return (B, H, T, D) of whole contexts."""
        tensor = getattr(self, name)
        if tensor is None:
            tensor = new.new_empty((new.shape[1], self.store.capacity, new.shape[3]))
            setattr(self, name, tensor)
        flat = new.transpose(0, 1).flatten(1, 2)  # (H, B Q, D)
        tensor.index_copy_(
            1, forward.write, flat if forward.real is None else flat[:, forward.real]
        )
        buffer = name, self.buffer
        return LazyKV(tensor, forward, buffer) if forward.parts else forward.whole(tensor, buffer)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.store.length, 0

    def get_seq_length(self) -> int:
        return self.store.before

    def get_max_length(self) -> int:
        return -1


class Slab:
    """Keys and values of all layers, and the pass under way. Later layers read those of the `lent` layers, too."""

    def __init__(self, num_layers: int, lent: Collection[int] = ()) -> None:
        self.layers = [Layer(self, i if i in lent else None) for i in range(num_layers)]
        self.capacity = 0
        self.length = 0  # of the longest context of the pass
        self.before = 0  # number of its tokens that were read before the pass
        self._passes: dict[torch.device, ForwardPass] = {}  # copies of the pass on each device

    @property
    def slot_bytes(self) -> int:
        """Bytes of keys and values per token; 0 before the first pass."""
        tensors = [t for layer in self.layers for t in (layer.keys, layer.values) if t is not None]
        return sum(t[:, 0].numel() * t.element_size() for t in tensors)

    def clear(self) -> None:
        self.capacity = 0
        for layer in self.layers:
            layer.keys = layer.values = None

    def reserve(self, slots: int) -> None:
        """Enlarge keys and values to `slots`. One tensor of the whole slab at a time exists twice."""
        self.capacity = slots
        for layer, name in itertools.product(self.layers, ("keys", "values")):
            old = getattr(layer, name)
            if old is not None and old.shape[1] < slots:
                new = old.new_empty((len(old), slots, old.shape[2]))
                new[:, : old.shape[1]] = old
                setattr(layer, name, new)

    def begin(self, forward: ForwardPass, width: int) -> Cache:
        """Return the cache for one pass, in which each row has `width` new tokens."""
        self.length = forward.slots.shape[1]
        self.before = self.length - width
        self._passes = {forward.slots.device: forward}
        return Cache(layers=list(self.layers))

    def end(self) -> None:
        """Free the memory of the pass."""
        self._passes = {}

    def pass_on(self, device: torch.device) -> ForwardPass:
        """Return the pass under way, with its tensors on `device`."""
        if device not in self._passes:
            self._passes[device] = next(iter(self._passes.values())).on(device)
        return self._passes[device]


# ---- adapters


class Adapted:
    """Model that runs with exactly the adapters `names` active; None for the currently active ones.

    Among all that share the weights, one pass runs at a time.
    """

    def __init__(self, model: Any, names: Sequence[str] | None = None) -> None:
        self.model = model
        self.inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.turn = _TURNS.setdefault(self.inner, Lock())
        enabled = [layer for layer in self._layers() if not layer.disable_adapters]
        active = dict.fromkeys(
            name for each in enabled for name in each.active_adapters if name in _held(each)
        )
        self.names = tuple(active if names is None else names)
        if missing := set(self.names).difference(self.loaded):
            known = (
                ", ".join(map(repr, self.loaded))
                or "none: load one by peft, or by load_adapter of the model"
            )
            raise ValueError(f"the model has no adapter {min(missing)!r}; there are {known}")

    @property
    def loaded(self) -> dict[str, Any]:
        """Configurations of all adapters that the model has now, by name."""
        return (
            getattr(self.inner, "peft_config", None)
            or getattr(self.model, "peft_config", None)
            or {}
        )

    def __call__(self, **arguments: Any) -> Any:
        if not self.loaded:
            return self.model(**arguments)
        with self.turn.lock, self._chosen():
            return self.model(**arguments)

    def _layers(self) -> list[Any]:
        """Return the modules that hold adapters."""
        if not self.loaded:
            return []
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        return [
            each
            for each in self.inner.modules()
            if isinstance(each, BaseTunerLayer | AuxiliaryTrainingWrapper)
        ]

    @contextmanager
    def _chosen(self) -> Iterator[None]:
        """Activate the chosen adapters, and restore the former ones. Methods of peft would change `requires_grad`."""
        before = [
            (layer, layer._active_adapter, layer._disable_adapters) for layer in self._layers()
        ]
        try:
            for layer, *_ in before:
                layer._active_adapter = [name for name in self.names if name in _held(layer)]
                layer._disable_adapters = not layer._active_adapter
            yield
        finally:
            for layer, active, disabled in before:
                layer._active_adapter = active
                layer._disable_adapters = disabled


def _held(layer: Any) -> set[str]:
    """Return the names of the adapters that a layer holds."""
    dicts = (attrgetter(path)(layer) for path in layer.adapter_layer_names)
    return {name for each in dicts if hasattr(each, "keys") for name in each.keys()}


# ---- loading


def load(
    name: str | Path | None,
    *,
    dtype: Any = None,
    device: Any = None,
    device_map: Any = None,
    local_files_only: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """Load (model, tokenizer) of a hub id, a folder or a GGUF file; None is the model in the package, verified.

    Files on this machine are used without asking the hub.
    """
    if None not in (device, device_map):
        raise ValueError(
            "give device= (one for the whole model) or device_map= (accelerate spreads it), not both"
        )
    if device_map is not None and find_spec("accelerate") is None:
        raise ImportError("device_map= needs accelerate: pip install 'llmppl-smc[device-map]'")
    device = None if device is None else torch.empty(0, device=device).device  # it exists
    placement = device if device_map is None else device_map
    on_cpu = getattr(placement, "type", placement) in (None, "cpu", {"": "cpu"})
    if dtype is None:
        dtype = torch.float32 if on_cpu or not torch.accelerator.is_available() else "auto"
    if name is None:
        verify()
    file = gguf_file(name)
    source = str(EMBEDDED if name is None else name if file is None else converted(file))
    shared = {
        key: options[key]
        for key in ("revision", "token", "trust_remote_code", "cache_dir")
        if key in options
    }

    def attempt(local: bool) -> tuple[Any, Any]:
        with _LOADING.lock, progress_bars(shown=not local and sys.stderr.isatty()):
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local, **shared)
            model = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, device_map=device_map, local_files_only=local, **options
            )
        if file is not None:
            model.config.name_or_path = gguf_name(name, file)
        return (model if device is None else model.to(device)).eval(), tokenizer

    if local_files_only or os.path.isdir(source):
        return attempt(local=True)
    try:
        return attempt(local=True)
    except (OSError, ValueError):  # not all of it is here
        print(f"llmppl: loading {source} from the hub", file=sys.stderr, flush=True)
        return attempt(local=False)
