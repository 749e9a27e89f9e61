"""Joint decisions: the probabilities of combinations of answers, their marginals and conditionals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmppl.decisions.questions import Question
from llmppl.report.probabilities import Probabilities, Share

Places = tuple[int, ...]  # of the answers in their questions


@dataclass(frozen=True)
class Joint:
    """Distribution over combinations of answers.

    places, weights : lists of the combinations and their probabilities
    log_masses : list of the log-mass of each question; the least one over the earlier answers
    rest : probability of all combinations that are not listed
    """

    places: Sequence[Places]
    weights: Sequence[float]
    log_masses: Sequence[float]
    rest: float

    def most_probable(self, most: int) -> Joint:
        """Return the distribution with at most so many combinations, the most probable ones."""
        if len(self.places) <= most:
            return self
        order = sorted(range(len(self.places)), key=lambda i: -self.weights[i])
        rest = self.rest + math.fsum(self.weights[i] for i in order[most:])
        places = [self.places[i] for i in order[:most]]
        weights = [self.weights[i] for i in order[:most]]
        return replace(self, places=places, weights=weights, rest=rest)

    def followed(self, answers: Sequence[Sequence[float]], log_mass: float) -> Joint:
        """Return the distribution with one more question: the probabilities of its answers after each combination."""
        places, weights = list[Places](), list[float]()
        for before, weight, probabilities in zip(self.places, self.weights, answers, strict=True):
            for i, probability in enumerate(probabilities):
                places.append((*before, i))
                weights.append(weight * probability)
        return replace(
            self, places=places, weights=weights, log_masses=[*self.log_masses, log_mass]
        )

    def given(self, known: Mapping[int, int]) -> Joint:
        """Return the distribution given the places of some answers. ValueError if these have no probability."""
        places, weights = list[Places](), list[float]()
        for combination, weight in zip(self.places, self.weights, strict=True):
            if all(combination[i] == place for i, place in known.items()):
                places.append(combination)
                weights.append(weight)
        total = math.fsum(weights)
        if not total:
            raise ValueError("these answers together have no probability")
        # others of the rest may agree with the known answers
        scale = total + self.rest
        return replace(
            self, places=places, weights=[each / scale for each in weights], rest=self.rest / scale
        )

    def shares(self, of: Sequence[Any], keys: Sequence[Any]) -> list[Share]:
        """Return the probabilities of values: `keys[i]` is the value of combination i, and `of` lists all values."""
        sums = dict.fromkeys(range(len(of)), 0.0)
        for key, weight in zip(keys, self.weights, strict=True):
            sums[key] += weight
        listed = math.fsum(self.weights)
        return [Share(of[i], low / listed, low, low + self.rest) for i, low in sums.items()]

    def table(self, asked: Mapping[str, Question]) -> Probabilities:
        """Return the probabilities of the tuples of answers."""
        questions = [*asked.values()]
        tuples = []
        for combination in self.places:
            tuples.append(
                tuple(each.values[i] for each, i in zip(questions, combination, strict=True))
            )
        header = f"Joint probabilities of {', '.join(asked)}"
        return Probabilities(self.shares(tuples, range(len(tuples))), header)
