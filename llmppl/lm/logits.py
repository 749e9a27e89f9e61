"""Conversion of the logits of a forward pass into tables of log-weights, one for each context."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmppl.distributions import ArrayTable, Table

LARGE = 1e6                             # above it, the sum of a logit and a log-probability is too inexact


def tables_of_logits(
    logits: NDArray[Any], size: int, unknown: NDArray[np.int64], describe: Callable[[int], str]
) -> list[Table]:
    """Return A tables of `size` log-weights from (A, n) logits. Ids in `unknown`, or from n on, are impossible.

    Raises a FloatingPointError if a row of logits gives no distribution; `describe(row)` names its context.
    """
    tables = list[Table]()
    for i, given in enumerate(logits[:, :size]):
        row = np.empty(size, given.dtype)               # a copy: a view would keep all rows alive
        row[: len(given)], row[len(given) :] = given, -np.inf
        row[unknown] = -np.inf
        top = float(row.max())
        if not abs(top) <= LARGE:
            row -= np.asarray(check_top(top, describe(i)), row.dtype)
            top = 0.0
        row.setflags(write=False)
        tables.append(ArrayTable(row, top=top))
    return tables


def check_top(top: float, context: str) -> float:
    """Return `top`, the largest logit after `context`; FloatingPointError if it is not finite."""
    if math.isfinite(top):
        return top
    kind = {math.inf: "+inf", -math.inf: "-inf alone"}.get(top, "NaN")
    raise FloatingPointError(f"the model's logits after {context} hold {kind}: they give no distribution")
