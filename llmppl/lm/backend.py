"""Backend: the seam to what computes, from tokens to logits. FunctionBackend: the simplest one.

A backend may keep keys and values in numbered *slots*, one for each token of each context. Which token has which slot
is the cache's business (`llmppl.lm.cache`); a backend writes and reads the slots it is told to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


@dataclass
class Batch:
    """Tokens to run, as the rows of one forward pass.

    tokens : (B, Q) int64, right-padded with 0
    starts : (B,) int64, how many tokens of the row's context come before
    lengths : (B,) int64, how many of the Q tokens are real
    slots : (B, T) int64, the slots of the row's whole context, its new tokens included; T is the longest context.
        Right-padded with the row's first: another context's may hold NaN, which spreads even where it is masked.
        None: starts are 0, and nothing is read or written.
    asked : list of (row, column) whose logits are wanted
    """

    tokens: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    slots: NDArray[np.int64] | None
    asked: list[tuple[int, int]]


@runtime_checkable
class Backend(Protocol):
    """A language model as the cache sees it.

    slot_bytes : bytes of keys and values per token; 0 for a backend that keeps none (its contexts are recomputed)
    max_length : the longest context it can read, or None
    """

    slot_bytes: int
    max_length: int | None

    def reserve(self, slots: int) -> None:
        """Make room for slots 0 .. slots - 1, keeping what is in them."""

    def forward(self, batch: Batch) -> Any:
        """(len(batch.asked), >= V) float32 or float64 logits of the token after each asked place.

        An array of numpy; or a tensor of torch, which stays where it is (`llmppl.lm.device`).
        """


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
