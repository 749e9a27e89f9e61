"""Probability of a language under a model: bounds that tighten, and an estimate with its standard error.

A search sums the matches that it finds, and knows the mass that it has not searched. Only the share of that mass in the
language is estimated, by particles that continue from the end of the search. The estimate is unbiased and stays within
the bounds.
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

MAX_STEPS = 256                                         # steps of a particle at most


@dataclass(frozen=True)
class Probability:
    """Probability that a text of the model is in a language.

    Attributes
    ----------
    lower, upper : float
        Certain bounds: the mass found, and the mass found plus the mass that was not searched.
    estimate, estimate_se : float
        Mean and standard error of independent unbiased estimates: the mass found, plus the part of the rest that a
        particle filter finds. The estimate is clipped to the bounds.
    expansions : int
        Number of next-token distributions that were computed for the bounds.
    shortest : bool
        True if matches that begin with another match were left out, as parts of the same event: end="prefix", and a
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
    """Expand until the bounds differ by at most `tolerance` of the upper one; return the mass that was not searched."""
    left = search.open_mass()
    while left > tolerance * (search.found_mass + left) and search.expansions < max_expansions:
        search.expand()
        left = search.open_mass()
    return left


def share_of_open(search: Search, particles: int, rng: np.random.Generator) -> float:
    """Return an unbiased estimate of the share of the unsearched mass that is in the language."""
    drawn = smc_standard(Remainder(search), particles, rng=rng, max_steps=MAX_STEPS, progress=False)
    return sum(math.exp(particle.log_weight) for particle in drawn if not particle.cut)


class Remainder(Sampled):
    """Program for a string of the language that a search did not reach; Z is the share of these in the unsearched mass.

    It draws an item of the heap by its probability, and continues from there.
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
        token = int(self.sample(dist.masked(mask)))     # one of the tokens that the item stands for
        return space.child(node, token, dist.log_prob(token))
