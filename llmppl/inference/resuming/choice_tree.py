"""Histories: what many particles chose, as a tree, and the particles made again from it.

Each step of a history is kept once, however many particles have it in their past: as (place of the step before, what
was chosen in it), where the place before the first step is -1. Particles of one run have most of their past in common,
so a long run is little more than one line, and what they did is done once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from llmppl.models.choices import Choice, Noted, Replayed, StreamState

M = TypeVar("M", bound=Any)
Items = tuple[Choice | StreamState, ...]
Advance = Callable[[Sequence[Callable[[], Any]], Sequence[str]], None]


class Histories:
    """The steps of histories; `steps` only grows.

    steps : list of (place of the step before, what was chosen)
    """

    def __init__(self, steps: Iterable[tuple[int, Items]] = ()) -> None:
        self.steps = list(steps)
        self._places: dict[int, tuple[int, Noted]] = {}

    def add(self, noted: Noted) -> int:
        """The place of the last step of what a particle noted; -1 if it has made none."""
        new = list[tuple[Noted, Items]]()
        tip = node = noted
        items = list[Choice | StreamState]()
        while node.before is not None and id(tip) not in self._places:
            if node.item is None:                       # where the step begins
                new.append((tip, tuple(items[::-1])))
                items, tip = [], node.before
            else:
                items.append(node.item)
            node = node.before
        place = self._places[id(tip)][0] if id(tip) in self._places else -1
        for tip, chosen in reversed(new):
            self.steps.append((place, chosen))
            place = len(self.steps) - 1
            self._places[id(tip)] = place, tip          # held, so that its id is not another's
        return place

    def keep(self, noted: Noted, place: int) -> None:
        """What a particle noted that was made again ends at `place`."""
        self._places[id(noted)] = place, noted

    def particles(self, model: M, weighed: Mapping[int, bool], advance: Advance) -> dict[int, M]:
        """The particle at the end of each history that `weighed` names by its last place.

        Distributions are asked in a last step only, where that is to be weighed. ValueError where the program makes
        other choices.
        """
        depths = dict[int, int]()
        for end in weighed:
            path = []
            while end >= 0 and end not in depths:
                path.append(end)
                end = self.steps[end][0]
            for depth, place in enumerate(reversed(path), depths.get(end, 0) + 1):
                depths[place] = depth
        levels: list[list[int]] = [[] for _ in range(max(depths.values(), default=0))]
        for place, depth in sorted(depths.items()):
            levels[depth - 1].append(place)
        made, found = {-1: model}, {-1: model}
        for t, level in enumerate(levels, 1):
            now = dict[int, M]()
            for place in level:
                before, chosen = self.steps[place]
                if made[before].finished:
                    raise ValueError(f"the program makes other choices: it ends at step {t - 1}")
                chooser = Replayed((chosen,), np.random.default_rng(0), first=t, weighs=weighed.get(place, False))
                now[place] = made[before]._spawn_(chooser)
            advance([particle.step for particle in now.values()], [f"a replay of step {t}"] * len(now))
            for particle in now.values():
                particle.chooser.end_step()
            made = now
            found |= {place: particle for place, particle in now.items() if place in weighed}
        return found
