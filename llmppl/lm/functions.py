"""A function from token ids to logits as a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmppl.lm.backend import Batch


class FunctionBackend:
    """Calls `function(ids)` for (size,) logits of the token after `ids`, and keeps nothing."""

    slot_bytes: int = 0
    max_length: int | None = None

    def __init__(self, function: Callable[[list[int]], Any], size: int) -> None:
        self.function, self.size = function, size

    def reserve(self, slots: int) -> None:
        raise NotImplementedError

    def forward(self, batch: Batch) -> NDArray[Any]:
        return np.stack([self._logits(batch.tokens[i, : j + 1].tolist()) for i, j in batch.asked])

    def _logits(self, ids: list[int]) -> NDArray[np.float64]:
        logits = np.asarray(self.function(ids), dtype=np.float64)
        if logits.shape != (self.size,):
            raise ValueError(
                f"the model's function gave an array of shape {logits.shape} after the tokens {ids}; it must give one "
                f"logit for each of the {self.size} tokens of the vocabulary, shape ({self.size},)"
            )
        return logits
