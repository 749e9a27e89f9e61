"""Weights of finitely many values: their sum, and drawing an index by them."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
_BLOCK = 256                                            # weights summed together


def logsumexp(log_weights: ArrayLike) -> float:
    """log sum_j exp(log_weights[j]), or -inf if there is nothing to sum."""
    log_weights = np.asarray(log_weights, dtype=np.float64)
    peak = np.max(log_weights, initial=-np.inf)
    if not np.isfinite(peak):                           # -inf - -inf would be NaN
        return float(peak)
    return float(peak + np.log(np.sum(np.exp(log_weights - peak))))


class Weights:
    """Non-negative numbers, an index drawn in proportion to them in O(n / 256 + 256).

    `total` is a sum of what is there, also after some were removed, never a difference: it stays exact where it is
    small.
    """

    def __init__(self, weights: Floats) -> None:
        self.weights = weights
        self._blocks = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK))
        self._cumulated = self._blocks.cumsum()

    @property
    def total(self) -> float:
        return float(self._cumulated[-1])

    def draw(self, rng: np.random.Generator) -> int:
        """An index of positive weight; `total` must not be 0."""
        target = rng.random() * self._cumulated[-1]     # searched in two stages: a sum over all is the slow part
        block = _above(self._cumulated, target)
        before = self._cumulated[block - 1] if block else 0.0
        start = block * _BLOCK
        return start + _above(self.weights[start : start + _BLOCK].cumsum(), target - before)

    def remove(self, index: int) -> None:
        """Set a weight to 0."""
        self.weights[index] = 0.0
        block = index // _BLOCK
        self._blocks[block] = self.weights[block * _BLOCK : (block + 1) * _BLOCK].sum()
        self._cumulated = self._blocks.cumsum()


def scaled(log_weights: Floats) -> tuple[Weights, float]:
    """The weights divided by the largest, and the log of the sum of all; zeros and -inf where nothing is possible."""
    top = float(log_weights.max())
    weights = log_weights - (0.0 if top == -math.inf else top)
    np.maximum(weights, -700.0, out=weights)            # np.exp is ten times as slow where it underflows
    np.exp(weights, out=weights)
    np.multiply(weights, weights > 1e-300, out=weights)
    found = Weights(weights)
    return found, top if top == -math.inf else top + math.log(found.total)


def _above(cumulated: Floats, target: float) -> int:
    """The first index whose cumulated weight exceeds `target`: one of positive weight, whatever the rounding."""
    index = int(cumulated.searchsorted(target, side="right"))
    return index if index < len(cumulated) else int(cumulated.searchsorted(cumulated[-1], side="left"))
