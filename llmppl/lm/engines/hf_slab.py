"""The slab: keys and values of all slots, as a cache of transformers.

Each layer has a pair of tensors (kv_heads, slots, head_dim). `update` writes the keys and values of the new tokens to
their slots. It returns the keys and values that the rows of the pass read, as tensors, or as a `LazyKV` if rows share
some of them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from llmppl.lm.engines.hf_attention import ForwardPass, LazyKV


class Layer(CacheLayerMixin):                           # type: ignore[no-untyped-call]
    """Slab of one layer: keys and values are (kv_heads, slots, head_dim).

    buffer : name of the memory for gathered keys and values: None for that of all layers, or an own one
    """

    is_sliding = False

    def __init__(self, store: Slab, buffer: int | None) -> None:
        super().__init__()                              # type: ignore[no-untyped-call]
        self.store, self.buffer = store, buffer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def reserve(self, slots: int) -> None:
        """Enlarge keys and values to `slots`. One tensor of the whole slab at a time exists twice."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            if old is not None and old.shape[1] < slots:
                new = old.new_empty((len(old), slots, old.shape[2]))
                new[:, : old.shape[1]] = old
                setattr(self, name, new)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        forward = self.store.pass_on(key_states.device)
        return self._write_and_read("keys", key_states, forward), self._write_and_read("values", value_states, forward)

    def _write_and_read(self, name: str, new: torch.Tensor, forward: ForwardPass) -> Any:
        """Write (B, H, Q, D) of new tokens, and return (B, H, T, D) of whole contexts."""
        tensor: torch.Tensor | None = getattr(self, name)
        if tensor is None:
            tensor = new.new_empty((new.shape[1], self.store.capacity, new.shape[3]))
            setattr(self, name, tensor)
        flat = new.transpose(0, 1).flatten(1, 2)        # (H, B Q, D)
        tensor.index_copy_(1, forward.write, flat if forward.real is None else flat[:, forward.real])
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
        self.slots_read = 0                             # so far, in all layers; keys and values count separately
        self.length = 0                                 # of the longest context of the pass
        self.before = 0                                 # number of its tokens that were read before the pass
        self._passes: dict[torch.device, ForwardPass] = {}              # copies of the pass on each device

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
        self.capacity = slots
        for layer in self.layers:
            layer.reserve(slots)

    def begin(self, forward: ForwardPass, width: int) -> Cache:
        """Return the cache for one pass, in which each row has `width` new tokens."""
        self.length = forward.slots.shape[1]
        self.before = self.length - width
        self._passes = {forward.slots.device: forward}
        return Cache(layers=list(self.layers))

    def end(self) -> None:
        """Free the memory of the pass."""
        self.slots_read += sum(each.slots_read for each in self._passes.values())
        self._passes = {}

    def pass_on(self, device: torch.device) -> ForwardPass:
        """Return the pass under way, with its tensors on `device`."""
        if device not in self._passes:
            self._passes[device] = next(iter(self._passes.values())).on(device)
        return self._passes[device]
