"""Rows: the logits of a forward pass as tables of log-probabilities, one for each context."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmppl.distributions import ArrayTable, Table, log_block_sums, log_sum

LARGE = 1e6                             # the log of a sum of probabilities is added to logits only below this
_TOGETHER = 1 << 15                     # logits; a row is copied once more where there are several


def array_rows(
    logits: NDArray[Any], size: int, unknown: NDArray[np.int64], told: Callable[[int], str]
) -> list[Table]:
    """(A, n) logits as A tables of `size` log-probabilities. Ids that are `unknown`, or beyond n, are impossible.

    A FloatingPointError says after which context, as `told(place)` names it, the logits give no distribution.
    """
    rows = list[Table]()
    together = max(1, _TOGETHER // size)
    for first in range(0, len(logits), together):
        given = logits[first : first + together, :size]
        chunk = np.full((len(given), size), -np.inf, given.dtype) if given.shape[1] < size else np.empty_like(given)
        chunk[:, : given.shape[1]] = given
        chunk[:, unknown] = -np.inf
        with np.errstate(invalid="ignore"):             # inf - inf
            log_sums = log_block_sums(chunk)
            log_zs = log_sum(log_sums)
            for i in np.flatnonzero(~(np.abs(log_zs) <= LARGE)).tolist():
                chunk[i] -= check_top(chunk[i].max(), told(first + i))
                log_sums[i] = log_block_sums(chunk[i : i + 1])[0]
                log_zs[i] = log_sum(log_sums[i])
        for row, log_z, sums in zip(chunk, log_zs.tolist(), log_sums, strict=True):
            row = row if len(chunk) == 1 else row.copy()        # which holds no others
            row.setflags(write=False)
            rows.append(ArrayTable(row, log_z, log_sums=sums - log_z))
    return rows


def check_top(top: float, told: str) -> float:
    """The largest of a row's logits; a FloatingPointError if they give no distribution."""
    if math.isfinite(top):
        return top
    kind = {math.inf: "+inf", -math.inf: "-inf alone"}.get(top, "NaN")
    raise FloatingPointError(f"the model's logits after {told} hold {kind}: they give no distribution")
