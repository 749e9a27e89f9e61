"""Samples without replacement: a best-first search by perturbed log-probabilities.

The maximum of the perturbed log-probabilities below a node is drawn first, and then divided among its children. Matches
therefore come in the order of a Gumbel race.

Source: Kool et al. 2019, "Stochastic Beams and Where to Find Them".
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from llmppl.queries.best_first import Search
from llmppl.queries.frontier import MATCH, TOKEN, Item, Kind
from llmppl.queries.matches import Match
from llmppl.queries.searchspace import Floats, Ints, Node, Space, Start

ROUNDING = 1e-12                                        # smaller masses outside the language count as zero


class DistinctSearch(Search):
    """Matches of a query, drawn one by one without replacement."""

    lists_prefixes = True

    def __init__(self, space: Space, rng: np.random.Generator, **options: Any) -> None:
        super().__init__(space, **options)
        self.rng = rng

    def add(self, start: Start) -> None:
        noise = float(self.rng.gumbel(self.base(start)))
        self._push(TOKEN, self.space.root(start)._replace(noise=noise), None, 0.0, noise)

    def _push(self, kind: Kind, node: Node, token: int | None, log_prob: float, noise: float) -> None:
        heapq.heappush(self.heap, Item(-noise, kind, next(self._numbers), node, token, log_prob, self.width))

    def follow(self, item: Item, node: Node, ids: Ints, ending: float, log_probs: Floats) -> None:
        """Push the children; texts that leave the language compete for the maximum, and are dropped."""
        inside = log_probs[ids]
        noise = self._divide(node, np.append(inside, ending))
        if ending > -math.inf:
            self._push(MATCH, node, None, ending, noise[-2])
            self.count(node, ending)
        for token, log_prob, child_noise in zip(ids.tolist(), inside.tolist(), noise, strict=False):
            if log_prob > -math.inf:
                self._push(TOKEN, node, token, log_prob, child_noise)

    def _divide(self, node: Node, log_probs: Floats) -> list[float]:
        """Draw the perturbed log-probability of each child, and last of leaving; their maximum is `node.noise`."""
        left = -math.expm1(min(0.0, float(np.logaddexp.reduce(log_probs))))
        log_probs = np.append(log_probs, math.log(left) if left > ROUNDING else -math.inf)
        base = self.base(node.start) + node.log_prob
        with np.errstate(divide="ignore", invalid="ignore"):
            noisy = base + log_probs + self.rng.gumbel(size=log_probs.size)
            shifted = node.noise - noisy + np.log1p(-np.exp(noisy - noisy.max()))
            divided = node.noise - np.maximum(0.0, shifted) - np.log1p(np.exp(-np.abs(shifted)))
        return list(divided.tolist())

    def log_bound(self) -> float:
        return math.inf                                 # unknown: the order is random

    def strings(self, tolerance: float) -> Iterator[Match]:
        """Yield every string once; the first spelling has the maximum of all its spellings."""
        return self.sequences() if self.space.only_canonical else self.summed(self.matched(), tolerance)
