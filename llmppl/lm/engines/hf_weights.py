"""Weights: detects changes of the parameters of a torch model without reading them.

Torch counts in-place changes of a tensor (`_version`). New memory for a tensor, or another tensor in its place, has
another address. Changes through `tensor.data` or a numpy view, and of inference tensors, are not detected.
"""

from __future__ import annotations

import weakref
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

_VERSION, _ADDRESS = attrgetter("_version"), torch.Tensor.data_ptr


class Weights:
    """Parameters of a model and all its modules. Their memory is not kept alive."""

    def __init__(self, model: Any) -> None:
        self._model, self._version = model, 0
        self._record()

    def version(self) -> int:
        """Return a number that grows with each detected change. Takes 41 microseconds for GPT-2."""
        if self._state()[0] != self._before or None in [storage() for storage in self._storages]:
            self._version += 1
            self._record()
        return self._version

    def _record(self) -> None:
        self._modules = [*self._model.modules()]        # held, so that no other object gets the id of one
        self._parts = [each._modules for each in self._modules if each._modules]
        self._tables = [each._parameters for each in self._modules if each._parameters]
        self._before, plain = self._state()
        self._storages = [weakref.ref(each.untyped_storage()) for each in plain if each.data_ptr()]

    def _state(self) -> tuple[list[int], list[Any]]:
        """Return (ids of modules, versions and addresses of parameters) and the parameters with an address."""
        parts, tensors = ([*chain.from_iterable(map(dict.values, each))] for each in (self._parts, self._tables))
        plain = [each for each in tensors if each is not None]
        try:
            return [*map(id, parts), *map(_VERSION, plain), *map(_ADDRESS, plain)], plain
        except RuntimeError:                            # inference tensors, and tensors composed of others
            addressed = [each for each in plain if not hasattr(each, "__tensor_flatten__")]
            counted = [each for each in addressed if not each.is_inference()]
            if len(counted) == len(plain):
                raise
            return [*map(id, parts), *map(_VERSION, counted), *map(_ADDRESS, addressed)], addressed
