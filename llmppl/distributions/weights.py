"""Logs of sums of weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def log_sum(log_weights: Floats) -> Any:
    """Return (...,) logs of the sums of (..., n) weights; -inf if all weights of a sum are 0, or n is 0."""
    tops = log_weights.max(-1, initial=-np.inf)
    finite = np.where(tops == -np.inf, 0.0, tops)       # -inf - -inf would be NaN
    with np.errstate(divide="ignore"):
        return finite + np.log(np.exp(log_weights - finite[..., None]).sum(-1))


def logsumexp(log_weights: ArrayLike) -> float:
    """Return log sum_j exp(log_weights[j]); -inf if there is nothing to sum. Faster than `log_sum` of a vector."""
    log_weights = np.asarray(log_weights, dtype=np.float64)
    peak = np.max(log_weights, initial=-np.inf)
    if not np.isfinite(peak):                           # -inf - -inf would be NaN
        return float(peak)
    return float(peak + np.log(np.sum(np.exp(log_weights - peak))))
