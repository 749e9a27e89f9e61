"""Checks of a run: it can begin, makes progress, and fits what the model reads."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from llmppl.models.choices import Sampled, last_choices
from llmppl.models.model import Model, untwist, wrap_step
from llmppl.support.arguments import shown
from llmppl.support.runtime import Runtime

M = TypeVar("M", bound=Model)

MAX_QUIET = 1_000                                       # steps in a row in which nothing happened


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
    """Ends a run in which nothing happens, and warns once of particles that the model's length cuts."""

    def __init__(self, runtime: Runtime, *, bounded: bool) -> None:
        self.bounded, self._runtime = bounded, runtime
        self._quiet, self._warned, self._seen = 0, False, None

    def step(self, t: int, candidates: Sequence[Model], particles: Sequence[Model]) -> None:
        limits = [particle._limit_ for particle in candidates if particle._limit_]
        if t == 1 and limits and len(limits) == len(candidates):
            raise ValueError(limits[0])
        if limits and not self._warned:
            self._warned = True
            warnings.warn(f"step {t} reached the end of what the model reads: {limits[0]}", stacklevel=4)
        if not self.bounded:
            self._count_quiet(particles)

    def _count_quiet(self, particles: Sequence[Model]) -> None:
        stats, before = self._runtime.stats, self._seen
        self._seen: Any = [(p.s, p.log_weight, p.finished) for p in particles], stats.rounds + stats.hits
        chose = any(last_choices(particle) for particle in particles if not particle.finished)
        self._quiet = 0 if chose or self._seen != before else self._quiet + 1
        if self._quiet == MAX_QUIET and particles:
            raise RuntimeError(f"{MAX_QUIET} steps in a row chose, weighed and wrote nothing: call self.finish()")
