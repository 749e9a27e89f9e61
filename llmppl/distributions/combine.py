"""Products, powers and mixtures of finite distributions over the same values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from llmppl.distributions.finite import Finite
from llmppl.distributions.standard import probabilities
from llmppl.distributions.weights import Floats
from llmppl.support import arguments

T = TypeVar("T")


def product(*dists: Finite[T], powers: Sequence[float] | None = None) -> Finite[T]:
    """Return the distribution proportional to  prod_k dists[k](x) ** powers[k]: a product of experts (Hinton 2002).

    If no value is possible under all of them, sampling raises `Impossible`.

    Parameters
    ----------
    *dists : Finite
        Distributions over one support (for tokens: one vocabulary).
    powers : sequence of float, optional
        A number for each distribution; by default 1. A negative power divides: `product(p, q, powers=[1, -0.5])`
        favours values that are likely under p and unlikely under q. A power of 0 removes a distribution.

    Raises
    ------
    TypeError
        For an argument that is not Finite.
    ValueError
        If supports differ, or a distribution with a negative power is 0 where the others are not.
    """
    first = _same_support("product", dists)
    if powers is None:
        parts, by, suffix = [(1.0, dist) for dist in dists], tuple[float, ...](), ""
    else:
        if not isinstance(powers, Iterable):
            raise TypeError(f"product: powers must be a list, a number for each distribution, not {powers!r}")
        numbers = [arguments.number("product: each of the powers", power) for power in powers]
        if len(numbers) != len(dists):
            raise ValueError(f"product got {len(numbers)} powers for {len(dists)} distributions")
        parts = [(power, dist) for power, dist in zip(numbers, dists, strict=True) if power != 0.0]
        by, suffix = tuple(numbers), f", powers=[{', '.join(f'{power:g}' for power in numbers)}]"
    if not parts:
        raise ValueError("product of no distributions: give a power that is not 0")
    return first.derive(
        lambda: _powered(parts),
        lambda name: f"product({', '.join(map(name, dists))}{suffix})",
        [dist for _, dist in parts],
        by=("product", *by),
    )


def _powered(parts: Sequence[tuple[float, Finite[Any]]]) -> Floats:
    """Return (n,) sum_k power_k log p_k. A 0 with a positive power gives 0, whatever the divisors are."""
    total = np.zeros(len(parts[0][1].support))
    for power, dist in parts:
        if power > 0.0:
            total += power * dist.log_probs()
    possible = total > -np.inf
    for power, dist in parts:
        if power < 0.0:
            log_probs = dist.log_probs()
            infinite = np.flatnonzero(possible & (log_probs == -np.inf))
            if len(infinite):
                value = dist.support[int(infinite[0])]
                raise ValueError(
                    f"product: {dist.brief} gives {value!r} probability 0, and power {power:g} makes that infinite; "
                    "mask in the others what it does not give"
                )
            total[possible] += power * log_probs[possible]
    return total


def mixture(dists: Sequence[Finite[T]], weights: ArrayLike) -> Finite[T]:
    """Return the distribution sum_k weights[k] dists[k]. `weights` are probabilities; supports must be equal."""
    if not isinstance(dists, Sequence):
        raise TypeError(f"mixture takes a list of distributions, then their weights, not {dists!r}")
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


def _same_support(name: str, dists: Sequence[Finite[T]]) -> Finite[T]:
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
