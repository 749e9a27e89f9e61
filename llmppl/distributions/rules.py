"""Decision rules: changes that a decoder makes to the distribution of the next token before it draws.

A rule is any function from a distribution over tokens to one over the same tokens: `lambda dist: dist.top_k(40)`.
`Rule` has the usual parts of text generators. It can also name the part that excludes a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np

from llmppl.distributions.finite import Finite
from llmppl.support import arguments
from llmppl.support.shared import Shared

T = TypeVar("T")
DecisionRule = Callable[[Any], Any]                     # from a Finite to one of the same kind


@dataclass(frozen=True)
class Rule(Shared):
    """Temperature, then top-k, then top-p, then min-p. Each part renormalises the result of the one before.

    Parameters
    ----------
    temperature : float > 0
        Probabilities are raised to 1 / temperature.
    top_k : int >= 1, optional
        Keep the k most probable tokens; among equals, those of lower id.
    top_p : float in (0, 1], optional
        Keep the smallest set of most probable tokens whose probability is at least p (Holtzman et al. 2020).
    min_p : float in (0, 1], optional
        Keep tokens of at least `min_p` times the probability of the most probable one (Nguyen et al. 2025).

    Raises
    ------
    TypeError, ValueError
        For an argument that is no number, and for one outside its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        arguments.positive("temperature", self.temperature, " (greedy is top_k=1)")
        arguments.optional_count("top_k", self.top_k)
        for name in ("top_p", "min_p"):
            if getattr(self, name) is not None:
                arguments.probability(name, getattr(self, name), above_0=True)

    def __repr__(self) -> str:
        values = vars(self)
        changed = [f"{each.name}={values[each.name]!r}" for each in fields(self) if values[each.name] != each.default]
        return f"Rule({', '.join(changed)})"

    def __call__(self, dist: Finite[T]) -> Finite[T]:
        return [dist, *(result for _, result in self.stages(dist))][-1]

    def stages(self, dist: Finite[T]) -> Iterator[tuple[str, Finite[T]]]:
        """Yield the active parts in order: the name of each and the distribution after it."""
        if self.temperature != 1.0:
            dist = dist.tempered(self.temperature)
            yield f"temperature={self.temperature:g}", dist
        if self.top_k is not None:
            dist = dist.top_k(self.top_k)
            yield f"top_k={self.top_k}", dist
        if self.top_p is not None:
            dist = dist.top_p(self.top_p)
            yield f"top_p={self.top_p:g}", dist
        if self.min_p is not None:
            dist = _min_p(dist, self.min_p)
            yield f"min_p={self.min_p:g}", dist

    def excluded_by(self, dist: Finite, value: Any) -> str | None:
        """Return the first part that gives `value` probability 0, as "top_k=40"; None if no part does."""
        return next((name for name, result in self.stages(dist) if result.log_prob(value) == -math.inf), None)


NO_RULE = Rule()


def _min_p(dist: Finite[T], p: float) -> Finite[T]:
    def compute() -> np.ndarray:
        log_weights = dist.log_weights()
        return np.where(log_weights >= log_weights.max() + math.log(p), log_weights, -np.inf)

    return dist.derive(compute, lambda name: f"{name(dist)}.min_p({p:g})", key=("min_p", p))
