"""Rows: the logits of a forward pass as tables of log-weights, one for each context."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmppl.distributions import ArrayTable, Table

LARGE = 1e6                             # the log of a sum of probabilities is added to logits only below this


def array_rows(
    logits: NDArray[Any], size: int, unknown: NDArray[np.int64], told: Callable[[int], str]
) -> list[Table]:
    """(A, n) logits as A tables of `size` log-weights. Ids that are `unknown`, or beyond n, are impossible.

    A FloatingPointError says after which context, as `told(place)` names it, the logits give no distribution.
    """
    rows = list[Table]()
    for place, given in enumerate(logits[:, :size]):
        row = np.empty(size, given.dtype)               # its own: a view would keep all others
        row[: len(given)], row[len(given) :] = given, -np.inf
        row[unknown] = -np.inf
        top = float(row.max())
        if not abs(top) <= LARGE:
            row -= np.asarray(check_top(top, told(place)), row.dtype)
            top = 0.0
        row.setflags(write=False)
        rows.append(ArrayTable(row, top=top))
    return rows


def check_top(top: float, told: str) -> float:
    """The largest of a row's logits; a FloatingPointError if they give no distribution."""
    if math.isfinite(top):
        return top
    kind = {math.inf: "+inf", -math.inf: "-inf alone"}.get(top, "NaN")
    raise FloatingPointError(f"the model's logits after {told} hold {kind}: they give no distribution")
