"""Products and mixtures of finite distributions over the same values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from llmppl.distributions.finite import Finite
from llmppl.distributions.standard import probabilities


def product(*dists: Finite) -> Finite:
    """The distribution proportional to the product of the probabilities (a product of experts; Hinton 2002).

    All must be Finite with the same support (for tokens: the same vocabulary), else a ValueError says which differ.
    Where no value is possible under all of them, sampling raises `Impossible`.
    """
    first = _same_support("product", dists)
    return first.derive(
        lambda: np.sum([dist.log_probs() for dist in dists], axis=0),
        lambda name: f"product({', '.join(map(name, dists))})",
        dists,
        by=("product",),
    )


def mixture(dists: Sequence[Finite], weights: ArrayLike) -> Finite:
    """The distribution sum_k weights[k] dists[k]; `weights` are probabilities, the supports are the same."""
    first = _same_support("mixture", dists)
    probs = probabilities("mixture: weights", weights)
    if len(probs) != len(dists):
        raise ValueError(f"mixture got {len(probs)} weights for {len(dists)} distributions")
    parts = [(math.log(p), dist) for p, dist in zip(probs, dists, strict=True) if p > 0.0]
    return first.derive(
        lambda: np.logaddexp.reduce([log_p + dist.log_probs() for log_p, dist in parts]),
        lambda name: f"mixture([{', '.join(map(name, dists))}], {probs.round(4).tolist()})",
        [dist for _, dist in parts],
        by=("mixture", *(log_p for log_p, _ in parts)),
    )


def _same_support(name: str, dists: Sequence[Finite]) -> Finite:
    if not dists:
        raise ValueError(f"{name} of no distributions")
    for dist in dists:
        if isinstance(dist, (list, tuple)) and name == "product":
            raise TypeError(f"product takes each distribution by itself, product(*distributions), not {dist!r}")
        if not isinstance(dist, Finite):
            raise TypeError(f"{name} wants distributions with finite support, not {dist!r}")
        if dist.support is not dists[0].support and dist.support != dists[0].support:
            raise ValueError(f"{name} of distributions over different values: {dists[0].support} and {dist.support}")
    return dists[0]
