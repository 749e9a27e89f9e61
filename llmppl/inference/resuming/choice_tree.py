"""ChoiceTree: the choices of many particles as a tree, from which the particles are rebuilt.

A node is one step of a particle: (index of the step before, its choices), where the index before the first step is -1.
Particles of one run share most of their past, and each shared step is one node. A long run therefore takes little more
than one line, and rebuilding runs each shared step once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from llmppl.models.choices import Choice, Noted, Replayed, StreamState

M = TypeVar("M", bound=Any)
Items = tuple[Choice | StreamState, ...]
Advance = Callable[[Sequence[Callable[[], Any]], Sequence[str]], None]


class ChoiceTree:
    """Tree of choices; `steps` only grows.

    steps : list of (index of the step before, choices of the step)
    """

    def __init__(self, steps: Iterable[tuple[int, Items]] = ()) -> None:
        self.steps = list(steps)
        self._places: dict[int, tuple[int, Noted]] = {}

    def add(self, noted: Noted) -> int:
        """Add the steps of a particle, and return the index of the last one; -1 if it has made none."""
        new = list[tuple[Noted, Items]]()
        tip = node = noted
        items = list[Choice | StreamState]()
        while node.before is not None and id(tip) not in self._places:
            if node.item is None:                       # the beginning of the step
                new.append((tip, tuple(items[::-1])))
                items, tip = [], node.before
            else:
                items.append(node.item)
            node = node.before
        place = self._places[id(tip)][0] if id(tip) in self._places else -1
        for tip, chosen in reversed(new):
            self.steps.append((place, chosen))
            place = len(self.steps) - 1
            self._places[id(tip)] = place, tip          # holds tip, so that no other object gets its id
        return place

    def set_place(self, noted: Noted, place: int) -> None:
        """Record that the steps of a rebuilt particle end at the index `place`."""
        self._places[id(noted)] = place, noted

    def particles(self, model: M, weighed: Mapping[int, bool], advance: Advance) -> dict[int, M]:
        """Return the particle at each index that is a key of `weighed`, rebuilt from `model`.

        A last step evaluates its distributions if its value in `weighed` is true; other steps never do.

        Raises
        ------
        ValueError
            If the program makes other choices.
        """
        made, found = {-1: model}, {-1: model}
        for t, level in enumerate(self._levels(weighed), 1):
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

    def _levels(self, ends: Iterable[int]) -> list[list[int]]:
        """Return, for each depth, the increasing indices of the steps on the paths to `ends`."""
        depths = dict[int, int]()
        for end in ends:
            path = []
            while end >= 0 and end not in depths:
                path.append(end)
                end = self.steps[end][0]
            for depth, place in enumerate(reversed(path), depths.get(end, 0) + 1):
                depths[place] = depth
        levels: list[list[int]] = [[] for _ in range(max(depths.values(), default=0))]
        for place, depth in sorted(depths.items()):
            levels[depth - 1].append(place)
        return levels
