"""The slab: keys and values of all slots, behind the cache interface of transformers.

For each layer it is a pair of tensors (kv_heads, slots, head_dim). `update` writes the new tokens' keys and values to
their slots and returns those that the rows of the pass read: as tensors, or as a `Read` where rows share some.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from llmppl.lm.engines.hf_attention import Pass, Read


class Layer(CacheLayerMixin):                           # type: ignore[no-untyped-call]
    """The slab of one layer: keys and values are (kv_heads, slots, head_dim).

    `buffer` names the memory where what the rows read is gathered: that of all layers, or one's own.
    """

    is_sliding = False

    def __init__(self, store: Slab, buffer: int | None) -> None:
        super().__init__()                              # type: ignore[no-untyped-call]
        self.store, self.buffer = store, buffer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def reserve(self, slots: int) -> None:
        """Make room for so many. Of all the slab, one tensor at a time is there twice."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            if old is not None and old.shape[1] < slots:
                new = old.new_empty((len(old), slots, old.shape[2]))
                new[:, : old.shape[1]] = old
                setattr(self, name, new)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        run = self.store.run_on(key_states.device)
        return self._through("keys", key_states, run), self._through("values", value_states, run)

    def _through(self, name: str, new: torch.Tensor, run: Pass) -> Any:
        """Write (B, H, Q, D), and read (B, H, T, D)."""
        tensor: torch.Tensor | None = getattr(self, name)
        if tensor is None:
            tensor = new.new_empty((new.shape[1], self.store.capacity, new.shape[3]))
            setattr(self, name, tensor)
        flat = new.transpose(0, 1).flatten(1, 2)        # (H, B Q, D)
        tensor.index_copy_(1, run.write, flat if run.real is None else flat[:, run.real])
        buffer = name, self.buffer
        return Read(tensor, run, buffer) if run.parts else run.whole(tensor, buffer)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.store.length, 0

    def get_seq_length(self) -> int:
        return self.store.before

    def get_max_length(self) -> int:
        return -1


class Slab:
    """The keys and values of all layers, and the pass under way; those of `lent` layers are read by later ones, too."""

    def __init__(self, num_layers: int, lent: Collection[int] = ()) -> None:
        self.layers = [Layer(self, i if i in lent else None) for i in range(num_layers)]
        self.capacity = 0
        self.slots_read = 0                             # so far, in all layers, keys and values apart
        self.length = 0                                 # of the longest context of the pass
        self.before = 0                                 # how many of its tokens were read before the pass
        self._runs: dict[torch.device, Pass] = {}

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

    def begin(self, run: Pass, width: int) -> Cache:
        """What a model is given for one pass, of so many new tokens."""
        self.length = run.slots.shape[1]
        self.before = self.length - width
        self._runs = {run.slots.device: run}
        return Cache(layers=list(self.layers))

    def end(self) -> None:
        """Let the memory of a pass go."""
        self.slots_read += sum(run.slots_read for run in self._runs.values())
        self._runs = {}

    def run_on(self, device: torch.device) -> Pass:
        if device not in self._runs:
            self._runs[device] = next(iter(self._runs.values())).on(device)
        return self._runs[device]
