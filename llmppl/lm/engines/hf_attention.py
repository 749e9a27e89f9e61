"""Attention over slots: what rows of a pass have in common is read once.

The rows of a pass are contexts, and the keys of a layer are one tensor (kv_heads, slots, head_dim). A model asks its
cache for the keys of all contexts, (B, heads, T, head_dim). What it gets is a `Read`, which stands for that tensor and
is none: the two products that attention consists of, queries with keys and weights with values, are made part by part.
A *part* is a rectangle of the table (B, T) of slots. In a shared part all rows have the same slots, whose keys are read
where they are and multiplied with the queries of all rows at once; the keys of any other part are gathered first. Each
part gives its own columns of the scores, so that masks, biases, soft caps, sinks and the softmax are the model's own.
Whatever else a model does with a `Read` makes the tensor.

Source: Juravsky et al. (2024), "Hydragen", for one shared beginning; here it is a tree of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

LEAST = 3 << 19                                         # bytes of a layer that a shared part has to save, measured
_REPEATED = (slice(None), slice(None), None, slice(None), slice(None))      # how `repeat_kv` begins
_WIDENS = ["cuda"] if torch.version.cuda and hasattr(torch.ops.aten.bmm, "dtype") else []    # bmm has out_dtype= there
_MATMUL = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


@dataclass
class Part:
    """Rows x columns of the table of slots; `slots` are those of the columns if it is shared, else row by row."""

    rows: slice
    columns: slice
    shared: bool
    slots: slice | torch.Tensor

    @property
    def size(self) -> int:
        """How many slots are read."""
        return self.slots.stop - self.slots.start if isinstance(self.slots, slice) else len(self.slots)

    def on(self, device: torch.device) -> Part:
        return self if isinstance(self.slots, slice) else replace(self, slots=self.slots.to(device))


def share(
    slots: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64], least: float
) -> tuple[list[int], list[Part]]:
    """An order of the rows of `slots` (B, T), and the parts of the table in this order; ([], []) if none is shared.

    Row i has its new tokens in the columns from starts[i] to ends[i]; what is shared lies before. A part is shared if
    this saves `least` reads of a slot.
    """
    order: list[int] = []
    parts: list[Part] = []

    def common(rows: NDArray[np.int64], start: int) -> int:
        """The column up to which the slots of `rows` are equal, from `start` on."""
        stop = int(starts[rows].min())
        same = (slots[rows, start:stop] == slots[rows[0], start:stop]).all(0)
        return stop if same.all() else start + int(same.argmin())

    def visit(rows: NDArray[np.int64], start: int, stop: int) -> None:
        """Put down `rows`, which share the columns from `start` to `stop`, and what lies behind them."""
        first, apart = len(order), []
        for slot in dict.fromkeys(slots[rows, stop].tolist()):
            branch = rows[slots[rows, stop] == slot]
            saved = len(branch) - 1
            if saved * (int(starts[branch].min()) - stop) >= least:
                further = common(branch, stop)
                if saved * (further - stop) >= least:
                    visit(branch, stop, further)
                    continue
            apart.extend(branch.tolist())
        if apart:
            apart.sort()
            columns = slice(stop, int(ends[apart].max()))
            own = torch.from_numpy(slots[apart, columns].reshape(-1))
            parts.append(Part(slice(len(order), len(order) + len(apart)), columns, False, own))
            order.extend(apart)
        if stop > start:
            path = slots[rows[0], start:stop]
            adjacent = bool((np.diff(path) == 1).all())
            here = slice(int(path[0]), int(path[-1]) + 1) if adjacent else torch.from_numpy(path)
            parts.append(Part(slice(first, len(order)), slice(start, stop), True, here))

    if (len(slots) - 1) * slots.shape[1] < least:
        return [], []
    everyone = np.arange(len(slots))
    stop = common(everyone, 0)
    if (len(slots) - 1) * stop < least:
        stop = 0
    visit(everyone, 0, stop)
    return (order, parts) if any(part.shared for part in parts) else ([], [])


@dataclass
class Pass:
    """Where the keys and values of a forward pass go, and where those come from that its rows read."""

    write: torch.Tensor                                 # (n,) slots of the new tokens
    real: torch.Tensor | None                           # (n,) their places among the B x Q; None: all, in order
    slots: torch.Tensor                                 # (B, T) of each row's whole context
    parts: list[Part]                                   # none: all is gathered
    buffers: dict[Any, torch.Tensor] = field(default_factory=dict)
    slots_read: int = 0                                 # in all layers, keys and values apart

    def on(self, device: torch.device) -> Pass:
        write, slots = self.write.to(device), self.slots.to(device)
        real = None if self.real is None else self.real.to(device)
        return Pass(write, real, slots, [part.on(device) for part in self.parts])

    def gather(self, tensor: torch.Tensor, slots: torch.Tensor, buffer: Any) -> torch.Tensor:
        """(kv_heads, n, head_dim) of n slots, in a buffer that the layers of a pass share: fresh memory costs more to
        touch than the keys do to copy. (A layer whose keys later ones read has its own; where the slab knows of none,
        they see them overwritten, and the check at load finds that.)"""
        shape = (len(tensor), len(slots), tensor.shape[2])
        key = buffer, shape, tensor.dtype
        if key not in self.buffers:
            self.buffers[key] = tensor.new_empty(shape)
        self.slots_read += len(slots)
        return torch.index_select(tensor, 1, slots, out=self.buffers[key])

    def whole(self, tensor: torch.Tensor, buffer: Any) -> torch.Tensor:
        """(B, kv_heads, T, head_dim) of the whole contexts."""
        keys = self.gather(tensor, self.slots.view(-1), buffer)
        return keys.view(len(keys), *self.slots.shape, -1).transpose(0, 1)


def _split(tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """A view with dimension `dim` as several."""
    view: torch.Tensor = tensor.unflatten(dim, sizes)   # type: ignore[no-untyped-call]
    return view


class Read:
    """Stands for the keys or values (B, kv_heads x repeats, T, head_dim) of a pass; transposed if `turned`."""

    def __init__(self, tensor: torch.Tensor, run: Pass, buffer: Any, *, repeats: int = 1, turned: bool = False) -> None:
        self.tensor, self.run, self.buffer = tensor, run, buffer
        self.repeats, self.turned = repeats, turned
        self.dtype, self.device, self.ndim = tensor.dtype, tensor.device, 4

    @property
    def shape(self) -> torch.Size:
        heads, _, size = self.tensor.shape
        rows, length = self.run.slots.shape
        return torch.Size([rows, heads * self.repeats, *((size, length) if self.turned else (length, size))])

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def made(self) -> torch.Tensor:
        """The tensor itself."""
        made = self.run.whole(self.tensor, self.buffer)
        made = made if self.repeats == 1 else made.repeat_interleave(self.repeats, 1)
        return made.transpose(2, 3) if self.turned else made

    def part(self, part: Part) -> torch.Tensor:
        """(kv_heads, n, head_dim) of a shared part, (kv_heads, rows, columns, head_dim) of another."""
        if isinstance(part.slots, slice):
            self.run.slots_read += part.size
            return self.tensor[:, part.slots]
        found = self.run.gather(self.tensor, part.slots, self.buffer)
        return found if part.shared else _split(found, 1, (part.rows.stop - part.rows.start, -1))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.made(), name)

    def to(self, *args: Any, **options: Any) -> Any:
        return self if args == (self.dtype,) and not options else self.made().to(*args, **options)

    def transpose(self, one: int, other: int) -> Any:
        if {one % 4, other % 4} != {2, 3}:
            return self.made().transpose(one, other)
        return Read(self.tensor, self.run, self.buffer, repeats=self.repeats, turned=not self.turned)

    def __getitem__(self, index: Any) -> Any:
        return _Repeating(self, 1) if index == _REPEATED and not self.turned else self.made()[index]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention:
            found = _attention(*args, **kwargs)
        else:
            found = _product(*args) if function in _MATMUL and len(args) == 2 and not kwargs else None
        if found is not None:
            return found
        return function(*_made(args), **{key: _made(value) for key, value in kwargs.items()})


def _made(value: Any) -> Any:
    """An argument with the tensors for which its `Read`s stand."""
    if isinstance(value, list | tuple):
        return type(value)(map(_made, value))
    return value.made() if isinstance(value, Read) else value


class _Repeating:
    """What `repeat_kv` makes of a `Read` on its way: keys[:, :, None].expand(...).reshape(...)."""

    def __init__(self, read: Read, times: int) -> None:
        self.read, self.times = read, times

    def expand(self, *sizes: int) -> _Repeating:
        return _Repeating(self.read, sizes[2])

    def reshape(self, *sizes: int) -> Read:
        read = self.read
        return Read(read.tensor, read.run, read.buffer, repeats=read.repeats * self.times)


def _attention(
    query: torch.Tensor, key: Any, value: Any, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor | None:  # fmt: skip
    """What scaled_dot_product_attention gives, or None if the tensors of key and value have to be made."""
    if dropout_p or is_causal or not (isinstance(key, Read) and isinstance(value, Read)) or key.turned or value.turned:
        return None
    if query.shape[1] * query.shape[2] > 2 * key.tensor.shape[0] * query.shape[3]:
        return None                                     # the scores would be larger than what would be gathered
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    half = query.dtype in (torch.float16, torch.bfloat16)       # in which scores have three to nine times the error
    scores = _scores(query, key, torch.float32).mul_(scale) if half else _scores(query * scale, key, query.dtype)
    if attn_mask is not None:
        each = _by_query(scores, query)
        mask = attn_mask.unsqueeze(2) if attn_mask.shape[1] == 1 else _split(attn_mask, 1, each.shape[1:3])
        if mask.dtype == torch.bool:
            each.masked_fill_(~mask, torch.finfo(each.dtype).min)
        else:
            each += mask
    weights = torch.softmax(scores, -1).to(query.dtype)
    return _by_query(_mean(weights, value), query).flatten(1, 2)


def _product(left: Any, right: Any) -> torch.Tensor | None:
    """left @ right of queries and turned keys, or of weights and values; None if the tensor has to be made."""
    if not isinstance(right, Read) or left.dtype != right.dtype or left.dim() != 4:
        return None
    product = _scores(left, right, left.dtype) if right.turned else _mean(_by_head(left, right), right)
    return _by_query(product, left).flatten(1, 2)


def _by_head(queries: torch.Tensor, read: Read) -> torch.Tensor:
    """(B, H G, Q, n) as (H, B, G Q, n), for the H heads of the keys."""
    heads = read.tensor.shape[0]
    return _split(queries, 1, (heads, -1)).transpose(0, 1).flatten(2, 3)


def _by_query(product: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """(H, B, G Q, n) as (B, H, G, Q, n), a view."""
    return _split(product, 2, (-1, query.shape[2])).transpose(0, 1)


def _scores(query: torch.Tensor, key: Read, dtype: torch.dtype) -> torch.Tensor:
    """(H, B, G Q, T) products in `dtype` of (B, H G, Q, D) queries with keys; 0 beyond a row's context."""
    queries = _by_head(query, key)
    widens = queries.dtype != dtype and queries.device.type in _WIDENS      # without a copy of the keys
    scores = queries.new_zeros((*queries.shape[:3], key.run.slots.shape[1]), dtype=dtype)
    for part in key.run.parts:
        own, keys, into = queries[:, part.rows], key.part(part), scores[:, part.rows, :, part.columns]
        merged = 1 if part.shared else 0                # rows share the keys of a head, or have their own
        left, right = own.flatten(merged, merged + 1), (keys if part.shared else keys.flatten(0, 1)).mT
        if part.shared and not widens:
            torch.bmm(left.to(dtype), right.to(dtype), out=into.flatten(1, 2))
        else:
            product = torch.bmm(left, right, out_dtype=dtype) if widens else left.to(dtype) @ right.to(dtype)
            into.copy_(_split(product, merged, own.shape[merged : merged + 2]))
    return scores


def _mean(weights: torch.Tensor, value: Read) -> torch.Tensor:
    """(H, B, G Q, D) sums of values with (H, B, G Q, T) weights."""
    means = weights.new_zeros((*weights.shape[:3], value.tensor.shape[2]))
    for part in value.run.parts:
        values, own = value.part(part), weights[:, part.rows, :, part.columns]
        if part.shared:
            product = _split(own.flatten(1, 2) @ values, 1, own.shape[1:3])
        else:
            product = _split(own.flatten(0, 1) @ values.flatten(0, 1), 0, own.shape[:2])
        means[:, part.rows] += product
    return means
