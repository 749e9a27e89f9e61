"""Random streams of particles. A stream is created at the first draw, and most streams are never created.

A candidate whose only choice was made for it draws nothing. Creating its stream would cost as much as its step, and
more with every generation of streams: numpy mixes all ancestors into each seed. A *family* is the seed sequence from
which the streams of one generation are spawned.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np


class Stream:
    """Random stream that has not been created yet: the one of this number in a family."""

    __slots__ = ("_family", "_kind", "_number")

    def __init__(self, kind: type[Any], family: np.random.SeedSequence, number: int) -> None:
        self._kind, self._family, self._number = kind, family, number

    def create(self) -> np.random.Generator:
        key = (*self._family.spawn_key, self._number)
        seed = np.random.SeedSequence(self._family.entropy, spawn_key=key, pool_size=self._family.pool_size)
        return np.random.Generator(self._kind(seed))


def spawned(rng: np.random.Generator) -> Iterator[Stream]:
    """Yield the streams of `rng.spawn(1)[0].spawn(n)`, without end. `rng` spawns when the first is requested."""
    (family,) = rng.spawn(1)
    seed: Any = family.bit_generator.seed_seq
    for number in itertools.count():
        yield Stream(type(family.bit_generator), seed, number)


class ParticleStream(np.random.Generator):
    """Random stream of a particle, as its program uses it: `model.rng`.

    Each use goes through the chooser of the particle. So a program may keep it in an attribute: a copy of the particle
    uses its own stream.
    """

    def __init__(self, particle: Any) -> None:
        super().__init__(_NO_BITS)
        self.particle = particle

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") or name == "particle":
            return object.__getattribute__(self, name)
        particle = self.particle
        return getattr((particle.chooser or particle._own_chooser_()).hand_out_rng(particle, name), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParticleStream:
        return ParticleStream(memo.get(id(self.particle), self.particle))

    def __reduce__(self) -> NoReturn:
        raise TypeError("the random stream of a particle cannot be pickled: its state is rng.bit_generator.state")

    def __repr__(self) -> str:
        return "<the random stream of a particle>"

    __str__ = __repr__


_NO_BITS = np.random.PCG64(0)                           # a Generator requires one; nothing draws from it


# ---- states, from which a stream is restored


_MAX_SPAWNED = 1 << 20                                  # streams that a stream may spawn between two states
_KINDS = {name: getattr(np.random, name) for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")}


class State(NamedTuple):
    """State of a stream: it determines everything that the stream will draw and spawn.

    kind : name of the bit generator
    entropy, spawn_key, pool_size : those of its SeedSequence
    children : number of streams spawned so far; for a Stream, its number in the family
    state : state of the bit generator; None for a Stream
    """

    kind: str
    entropy: Any
    spawn_key: tuple[int, ...]
    pool_size: int
    children: int
    state: Any


def state_of(stream: Any) -> State:
    """Return the state of a Stream, or of a numpy stream that can spawn."""
    if isinstance(stream, Stream):
        family = stream._family
        return State(stream._kind.__name__, family.entropy, family.spawn_key, family.pool_size, stream._number, None)
    bits = stream.bit_generator
    seed, state = bits.seed_seq, bits.state
    return State(state["bit_generator"], seed.entropy, seed.spawn_key, seed.pool_size, seed.n_children_spawned, state)


def stream_of(state: State) -> Any:
    """Return a new stream with this state."""
    kind = _KINDS[state.kind]
    seed = np.random.SeedSequence(
        state.entropy, spawn_key=state.spawn_key, pool_size=state.pool_size, n_children_spawned=state.children
    )
    if state.state is None:
        return Stream(kind, seed, state.children)
    stream = np.random.Generator(kind(seed))
    stream.bit_generator.state = state.state
    return stream


def bring_to(stream: np.random.Generator, state: State) -> None:
    """Advance `stream` to a later state of its own. ValueError if it cannot have reached that state."""
    seed: Any = stream.bit_generator.seed_seq
    if not 0 <= state.children - seed.n_children_spawned < _MAX_SPAWNED:
        raise ValueError(f"a stream that has spawned {seed.n_children_spawned} others goes on with {state.children}")
    seed.spawn(state.children - seed.n_children_spawned)
    stream.bit_generator.state = state.state
