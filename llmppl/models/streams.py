"""Streams: random streams of particles, made when they are first drawn from; most never are.

A candidate whose only choice was made for it draws nothing. To make its stream would cost as much as its step, and more
with every generation of streams: numpy mixes the whole line of ancestors into each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np


class Stream:
    """The random stream of that number in a family, yet to be made."""

    __slots__ = ("_family", "_kind", "_number")

    def __init__(self, kind: type[Any], family: np.random.SeedSequence, number: int) -> None:
        self._kind, self._family, self._number = kind, family, number

    def made(self) -> np.random.Generator:
        key = (*self._family.spawn_key, self._number)
        seed = np.random.SeedSequence(self._family.entropy, spawn_key=key, pool_size=self._family.pool_size)
        return np.random.Generator(self._kind(seed))


def spawned(rng: np.random.Generator) -> Iterator[Stream]:
    """The streams of `rng.spawn(1)[0].spawn(n)`, without end; `rng` spawns when the first is asked for."""
    (family,) = rng.spawn(1)
    seed: Any = family.bit_generator.seed_seq
    for number in itertools.count():
        yield Stream(type(family.bit_generator), seed, number)
