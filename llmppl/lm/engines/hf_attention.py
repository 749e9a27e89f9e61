"""Attention over slots that reads the common prefixes of the rows of a pass once.

The rows of a pass are contexts, and the keys of a layer are one tensor (kv_heads, slots, head_dim). A model asks its
cache for the keys of all contexts, (B, heads, T, head_dim), and gets a `LazyKV` instead. A `LazyKV` computes the two
products of attention, of queries with keys and of weights with values, part by part. A *part* is a rectangle of the
table (B, T) of slots. In a shared part all rows have the same slots: their keys are multiplied in place with the
queries of all rows. The keys of other parts are gathered first. Each part gives its columns of the scores; masks,
biases, soft caps, sinks and the softmax are the model's own. Any other use of a `LazyKV` materialises the tensor.

Source: Juravsky et al. (2024), "Hydragen", for one shared prefix; this module shares a tree of prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

LEAST = 3 << 19  # bytes of a layer that a shared part must save, measured
_REPEATED = (
    slice(None),
    slice(None),
    None,
    slice(None),
    slice(None),
)  # index in `repeat_kv` of transformers
_WIDENS = (
    ["cuda"] if torch.version.cuda and hasattr(torch.ops.aten.bmm, "dtype") else []
)  # bmm has out_dtype=
_MATMUL = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


@dataclass
class Part:
    """Rectangle of the table of slots. `slots` are those of its columns if it is shared, else those of each row."""

    rows: slice
    columns: slice
    shared: bool
    slots: slice | torch.Tensor

    def on(self, device: torch.device) -> Part:
        return self if isinstance(self.slots, slice) else replace(self, slots=self.slots.to(device))


def share(
    slots: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64], least: float
) -> tuple[list[int], list[Part]]:
    """Return an order of the rows of `slots` (B, T), and the parts of the reordered table; ([], []) if none is shared.

    Row i has its new tokens in columns starts[i] .. ends[i] - 1; shared columns come before. A part is shared if this
    saves at least `least` reads of a slot.
    """
    order: list[int] = []
    parts = []

    def common(rows: NDArray[np.int64], start: int) -> int:
        """Return the end of the columns, from `start` on, in which all `rows` have equal slots."""
        stop = int(starts[rows].min())
        equal = (slots[rows, start:stop] == slots[rows[0], start:stop]).all(0)
        return stop if equal.all() else start + int(equal.argmin())

    def visit(rows: NDArray[np.int64], start: int, stop: int) -> None:
        """Add the parts of `rows` from column `start` on. The rows share columns `start` .. `stop` - 1."""
        first = len(order)
        alone = []
        for slot in dict.fromkeys(slots[rows, stop].tolist()):
            branch = rows[slots[rows, stop] == slot]
            saved = len(branch) - 1
            if saved * (int(starts[branch].min()) - stop) >= least:
                further = common(branch, stop)
                if saved * (further - stop) >= least:
                    visit(branch, stop, further)
                    continue
            alone.extend(branch.tolist())
        if alone:
            alone.sort()
            columns = slice(stop, int(ends[alone].max()))
            own = torch.from_numpy(slots[alone, columns].reshape(-1))
            parts.append(Part(slice(len(order), len(order) + len(alone)), columns, False, own))
            order.extend(alone)
        if stop > start:
            path = slots[rows[0], start:stop]
            adjacent = bool((np.diff(path) == 1).all())
            shared = slice(int(path[0]), int(path[-1]) + 1) if adjacent else torch.from_numpy(path)
            parts.append(Part(slice(first, len(order)), slice(start, stop), True, shared))

    if (len(slots) - 1) * slots.shape[1] < least:
        return [], []
    everyone = np.arange(len(slots))
    stop = common(everyone, 0)
    if (len(slots) - 1) * stop < least:
        stop = 0
    visit(everyone, 0, stop)
    return (order, parts) if any(part.shared for part in parts) else ([], [])


@dataclass
class ForwardPass:
    """Slots that a forward pass writes and reads.

    write : (n,) slots of the new tokens
    real : (n,) indices of the new tokens among the B x Q of the batch; None for all of them, in order
    slots : (B, T) slots of each row's whole context
    parts : parts of `slots`; none if all slots are gathered
    """

    write: torch.Tensor
    real: torch.Tensor | None
    slots: torch.Tensor
    parts: list[Part]
    buffers: dict[Any, torch.Tensor] = field(default_factory=dict)

    def on(self, device: torch.device) -> ForwardPass:
        write = self.write.to(device)
        slots = self.slots.to(device)
        real = None if self.real is None else self.real.to(device)
        return ForwardPass(write, real, slots, [part.on(device) for part in self.parts])

    def gather(self, tensor: torch.Tensor, slots: torch.Tensor, buffer: Any) -> torch.Tensor:
        """Return (kv_heads, n, head_dim): the keys or values of n slots, in a buffer that the layers of a pass share.

        New memory costs more to touch than the keys cost to copy. A layer whose keys later layers read has its own
        buffer. If the slab does not know of such a layer, its keys are overwritten, and the check at load fails.
        """
        shape = (len(tensor), len(slots), tensor.shape[2])
        key = buffer, shape, tensor.dtype
        if key not in self.buffers:
            self.buffers[key] = tensor.new_empty(shape)
        return torch.index_select(tensor, 1, slots, out=self.buffers[key])

    def whole(self, tensor: torch.Tensor, buffer: Any) -> torch.Tensor:
        """Return (B, kv_heads, T, head_dim): the keys or values of the whole contexts."""
        keys = self.gather(tensor, self.slots.view(-1), buffer)
        return keys.view(len(keys), *self.slots.shape, -1).transpose(0, 1)


def _split(tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """Return a view in which dimension `dim` is split into `sizes`."""
    view: torch.Tensor = tensor.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return view


class LazyKV:
    """Placeholder of the keys or values (B, kv_heads x repeats, T, head_dim) of a pass; `transposed` or not."""

    def __init__(
        self,
        tensor: torch.Tensor,
        forward: ForwardPass,
        buffer: Any,
        *,
        repeats: int = 1,
        transposed: bool = False,
    ) -> None:
        self.tensor = tensor
        self.forward = forward
        self.buffer = buffer
        self.repeats = repeats
        self.transposed = transposed
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.ndim = 4

    @property
    def shape(self) -> torch.Size:
        heads, _, size = self.tensor.shape
        rows, length = self.forward.slots.shape
        return torch.Size(
            [rows, heads * self.repeats, *((size, length) if self.transposed else (length, size))]
        )

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def materialise(self) -> torch.Tensor:
        """Return the tensor."""
        whole = self.forward.whole(self.tensor, self.buffer)
        whole = whole if self.repeats == 1 else whole.repeat_interleave(self.repeats, 1)
        return whole.transpose(2, 3) if self.transposed else whole

    def part(self, part: Part) -> torch.Tensor:
        """Return (kv_heads, n, head_dim) of a shared part, or (kv_heads, rows, columns, head_dim) of another."""
        if isinstance(part.slots, slice):
            return self.tensor[:, part.slots]
        gathered = self.forward.gather(self.tensor, part.slots, self.buffer)
        return (
            gathered if part.shared else _split(gathered, 1, (part.rows.stop - part.rows.start, -1))
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.materialise(), name)

    def to(self, *args: Any, **options: Any) -> Any:
        return (
            self
            if args == (self.dtype,) and not options
            else self.materialise().to(*args, **options)
        )

    def transpose(self, one: int, other: int) -> Any:
        if {one % 4, other % 4} != {2, 3}:
            return self.materialise().transpose(one, other)
        return LazyKV(
            self.tensor,
            self.forward,
            self.buffer,
            repeats=self.repeats,
            transposed=not self.transposed,
        )

    def __getitem__(self, index: Any) -> Any:
        return (
            KVView(self, 1)
            if index == _REPEATED and not self.transposed
            else self.materialise()[index]
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = None
        if function is torch.nn.functional.scaled_dot_product_attention:
            result = _attention(*args, **kwargs)
        elif function in _MATMUL and len(args) == 2 and not kwargs:
            result = _product(*args)
        if result is not None:
            return result
        return function(
            *_materialised(args), **{key: _materialised(value) for key, value in kwargs.items()}
        )


def _materialised(value: Any) -> Any:
    """Return an argument with tensors in place of each `LazyKV`."""
    if isinstance(value, list | tuple):
        return type(value)(map(_materialised, value))
    return value.materialise() if isinstance(value, LazyKV) else value


class KVView:
    """Intermediate view of a `LazyKV` in `repeat_kv`: keys[:, :, None].expand(...), before .reshape(...)."""

    def __init__(self, lazy: LazyKV, times: int) -> None:
        self.lazy = lazy
        self.times = times

    def expand(self, *sizes: int) -> KVView:
        return KVView(self.lazy, sizes[2])

    def reshape(self, *sizes: int) -> LazyKV:
        lazy = self.lazy
        return LazyKV(lazy.tensor, lazy.forward, lazy.buffer, repeats=lazy.repeats * self.times)


def _attention(
    query: torch.Tensor,
    key: Any,
    value: Any,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """Return scaled_dot_product_attention, or None if it needs the tensors of key and value."""
    lazy = (
        isinstance(key, LazyKV)
        and isinstance(value, LazyKV)
        and not (key.transposed or value.transposed)
    )
    if not lazy or dropout_p or is_causal:
        return None
    if query.shape[1] * query.shape[2] > 2 * key.tensor.shape[0] * query.shape[3]:
        return None  # the scores would be larger than the gathered tensors
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    half = query.dtype in (
        torch.float16,
        torch.bfloat16,
    )  # their scores have 3 to 9 times the error
    scores = (
        _scores(query, key, torch.float32).mul_(scale)
        if half
        else _scores(query * scale, key, query.dtype)
    )
    if attn_mask is not None:
        view = _by_query(scores, query)
        mask = (
            attn_mask.unsqueeze(2)
            if attn_mask.shape[1] == 1
            else _split(attn_mask, 1, view.shape[1:3])
        )
        if mask.dtype == torch.bool:
            view.masked_fill_(~mask, torch.finfo(view.dtype).min)
        else:
            view += mask
    weights = torch.softmax(scores, -1).to(query.dtype)
    return _by_query(_mean(weights, value), query).flatten(1, 2)


def _product(left: Any, right: Any) -> torch.Tensor | None:
    """Return left @ right, of queries and transposed keys or of weights and values; None if it needs the tensor."""
    if not isinstance(right, LazyKV) or left.dtype != right.dtype or left.dim() != 4:
        return None
    product = (
        _scores(left, right, left.dtype)
        if right.transposed
        else _mean(_by_head(left, right), right)
    )
    return _by_query(product, left).flatten(1, 2)


def _by_head(queries: torch.Tensor, keys: LazyKV) -> torch.Tensor:
    """Return (B, H G, Q, n) as (H, B, G Q, n), for the H heads of the keys."""
    heads = keys.tensor.shape[0]
    return _split(queries, 1, (heads, -1)).transpose(0, 1).flatten(2, 3)


def _by_query(product: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return (H, B, G Q, n) as (B, H, G, Q, n), a view."""
    return _split(product, 2, (-1, query.shape[2])).transpose(0, 1)


def _scores(query: torch.Tensor, key: LazyKV, dtype: torch.dtype) -> torch.Tensor:
    """Return (H, B, G Q, T): products in `dtype` of (B, H G, Q, D) queries with keys; 0 beyond a row's context."""
    queries = _by_head(query, key)
    widens = queries.dtype != dtype and queries.device.type in _WIDENS  # needs no copy of the keys
    scores = queries.new_zeros((*queries.shape[:3], key.forward.slots.shape[1]), dtype=dtype)
    for part in key.forward.parts:
        own = queries[:, part.rows]
        keys = key.part(part)
        into = scores[:, part.rows, :, part.columns]
        merged = (
            1 if part.shared else 0
        )  # dimension: rows share the keys of a head, or have their own
        left = own.flatten(merged, merged + 1)
        right = (keys if part.shared else keys.flatten(0, 1)).mT
        if part.shared and not widens:
            torch.bmm(left.to(dtype), right.to(dtype), out=into.flatten(1, 2))
        else:
            product = (
                torch.bmm(left, right, out_dtype=dtype)
                if widens
                else left.to(dtype) @ right.to(dtype)
            )
            into.copy_(_split(product, merged, own.shape[merged : merged + 2]))
    return scores


def _mean(weights: torch.Tensor, value: LazyKV) -> torch.Tensor:
    """Return (H, B, G Q, D): sums of values with (H, B, G Q, T) weights."""
    means = weights.new_zeros((*weights.shape[:3], value.tensor.shape[2]))
    for part in value.forward.parts:
        values = value.part(part)
        own = weights[:, part.rows, :, part.columns]
        if part.shared:
            product = _split(own.flatten(1, 2) @ values, 1, own.shape[1:3])
        else:
            product = _split(own.flatten(0, 1) @ values.flatten(0, 1), 0, own.shape[:2])
        means[:, part.rows] += product
    return means
