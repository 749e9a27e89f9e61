"""How probable a language is under a model: bounds that close, and an estimate with its standard error.

The one idea: a search adds up the matches that it finds, and knows the mass of what it has not looked into. Only that
is estimated, by particles that go on from where the search has stopped: unbiased, and never outside the bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from llmppl.distributions import Categorical
from llmppl.inference import smc_standard
from llmppl.queries.best_first import Search
from llmppl.queries.frontier import REST, Item
from llmppl.queries.sampling import Sampled
from llmppl.queries.searchspace import Node

MAX_STEPS = 256                                         # of a particle


@dataclass(frozen=True)
class Probability:
    """The probability that a text of the model is in a language.

    Attributes
    ----------
    lower, upper : float
        It is between them, for certain: mass found, and mass found plus mass that was not looked into.
    estimate, estimate_se : float
        Mean and standard error of independent unbiased estimates: mass found, plus what a particle filter finds of the
        rest. So it is between the bounds, too.
    expansions : int
        Next-token distributions that the bounds took.
    shortest : bool
        Whether some matches begin with another one and were left out, since they are no other event: end="prefix" of a
        language in which one string begins another.
    """

    lower: float
    upper: float
    estimate: float
    estimate_se: float
    expansions: int
    shortest: bool

    def __repr__(self) -> str:
        of = ", of the shortest matches" * self.shortest
        if math.isnan(self.estimate):
            estimate = "not estimated"
        elif self.estimate == self.lower < self.upper:
            estimate = "no particle met a further match"
        else:
            estimate = f"estimate {self.estimate:.6g} +- {self.estimate_se:.2g}"
        return f"Probability(between {self.lower:.6g} and {self.upper:.6g}{of}; {estimate})"


def close_bounds(search: Search, tolerance: float, max_expansions: int) -> float:
    """Expand until the bounds differ by `tolerance` of the upper one; the mass that is left open."""
    left = search.open_mass()
    while left > tolerance * (search.found_mass + left) and search.expansions < max_expansions:
        search.expand()
        left = search.open_mass()
    return left


def share_of_open(search: Search, particles: int, rng: np.random.Generator) -> float:
    """An unbiased estimate of how much of what a search has left open is in the language; at most 1."""
    drawn = smc_standard(Remainder(search), particles, rng=rng, max_steps=MAX_STEPS, progress=False)
    return sum(math.exp(particle.log_weight) for particle in drawn if not particle.cut)


class Remainder(Sampled):
    """A string of the language among those that a search has left open; Z is their share of what is open.

    It draws an item of the heap by its probability, and goes on from there.
    """

    def __init__(self, search: Search) -> None:
        super().__init__(search.space, [])
        self.items = search.open_items()
        log_masses = np.array([search.log_mass(item) for item in self.items])
        masses = np.exp(log_masses - log_masses.max())
        self.choice = Categorical(masses / masses.sum())

    def begin(self) -> Node:
        item: Item = self.items[self.sample(self.choice)]
        space, node = self.space, item.node
        if item.kind is not REST:
            return item.open(space)
        dist, mask = space.next_token(node), np.zeros(len(space.lm.vocab), bool)
        mask[item.later(space.allowed(node), dist.log_probs())] = True
        token = int(self.sample(dist.masked(mask)))     # of those that the item stands for
        return space.child(node, token, dist.log_prob(token))
