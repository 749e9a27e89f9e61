"""Checks of a run: it can begin, makes progress, and fits what the model reads."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import TypeVar

from llmppl.models.choices import Sampled
from llmppl.models.model import Model, untwist, wrap_step
from llmppl.support.arguments import shown

M = TypeVar("M", bound=Model)

MAX_WITHOUT_END = 200                                   # steps until a run warns that no particle has ended


def check_model(model: M) -> M:
    """Return `model`. Raise a TypeError if it is no Model."""
    if not isinstance(model, Model):
        raise TypeError(f"inference wants a Model, an instance of your subclass, not {shown(model)}")
    return model


def start_particles(model: M, choosers: Sequence[Sampled]) -> list[M]:
    """Return a particle for each chooser."""
    wrap_step(type(check_model(model)))                 # it may have been assigned to the class
    if [*model._noted_][-1:] not in ([], [None]):
        raise ValueError(f"{type(model).__name__} sampled before its first step: sample in step()")
    return [model._spawn_(chooser) for chooser in choosers]


def cut(particles: Iterable[Model]) -> None:
    """End the unfinished particles, and mark them as cut."""
    for particle in particles:
        untwist(particle)
        if not particle.finished:
            particle.finished = particle._cut_ = True


class Watch:
    """Warns once of particles that the model's length cuts, and of a run in which no particle ends."""

    def __init__(self, *, bounded: bool) -> None:
        self.bounded = bounded
        self._warned = self._ended = False

    def step(self, t: int, candidates: Sequence[Model], particles: Sequence[Model]) -> None:
        self._ended = self._ended or any(candidate.finished for candidate in candidates)
        if t == MAX_WITHOUT_END and not (self._ended or self.bounded):
            name = type(candidates[0]).__name__
            warnings.warn(
                f"no particle of {name} has ended in {t} steps: call self.finish(), or bound the run by max_steps=",
                stacklevel=4,
            )
        limits = [particle._limit_ for particle in candidates if particle._limit_]
        if t == 1 and limits and len(limits) == len(candidates):
            raise ValueError(limits[0])
        if limits and not self._warned:
            self._warned = True
            warnings.warn(f"step {t} reached the end of what the model reads: {limits[0]}", stacklevel=4)
