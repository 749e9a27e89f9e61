"""The log of a sum of weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def logsumexp(log_weights: ArrayLike) -> float:
    """log sum_j exp(log_weights[j]), or -inf if there is nothing to sum."""
    log_weights = np.asarray(log_weights, dtype=np.float64)
    peak = np.max(log_weights, initial=-np.inf)
    if not np.isfinite(peak):                           # -inf - -inf would be NaN
        return float(peak)
    return float(peak + np.log(np.sum(np.exp(log_weights - peak))))
