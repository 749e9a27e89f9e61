"""Arguments that many functions take, checked in one place: counts, shares, and where random numbers come from."""

import numpy as np

__all__ = ["count", "generator", "share"]


def count(name: str, value: int, least: int = 1) -> int:
    """`value`, if it is an integer of at least `least`; a TypeError or ValueError that calls it `name` otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    return int(value)


def generator(seed: int | None, rng: np.random.Generator | None = None) -> np.random.Generator:
    """`rng`, or a new one from `seed`, or from the system's entropy; an error for both, and for what is neither."""
    if rng is None:
        return np.random.default_rng(None if seed is None else count("seed", seed, least=0))
    if seed is not None:
        raise ValueError("give seed= or rng=, not both")
    if not isinstance(rng, np.random.Generator):
        raise TypeError(f"rng must be a np.random.Generator (np.random.default_rng(seed)), not {rng!r}")
    return rng


def share(name: str, value: float) -> None:
    """A ValueError that calls it `name`, unless `value` is at least 0 and below 1."""
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} is a share in [0, 1), not {value!r}")
