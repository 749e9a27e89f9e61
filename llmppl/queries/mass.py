"""How probable a language is under a model: bounds that close, and an estimate with its standard error.

The one idea: a search adds up the matches that it finds, and knows the mass of what it has not looked into. Only that
is estimated, by particles that go on from where the search has stopped: unbiased, and never outside the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from llmppl.arguments import count, generator, share
from llmppl.distributions import Categorical
from llmppl.inference import smc_standard
from llmppl.lm import CachedTransformer
from llmppl.queries.best_first import Search, later
from llmppl.queries.language import Edits, Language, Rewrite
from llmppl.queries.matches import space_of
from llmppl.queries.sampling import Sampled
from llmppl.queries.space import Node

LONGEST = 256                                           # steps of a particle


@dataclass(frozen=True)
class Probability:
    """The probability that a text of the model is in a language.

    Attributes
    ----------
    lower, upper : float
        It is between them, for certain: mass found, and mass found plus mass that was not looked into.
    estimate, standard_error : float
        Mean and standard error of independent unbiased estimates: mass found, plus what a particle filter finds of the
        rest. So it is between the bounds, too.
    expansions : int
        Next-token laws that the bounds took.
    shortest : bool
        Whether some matches begin with another one and were left out, since they are no other event: end="prefix" of a
        language in which one string begins another.
    """

    lower: float
    upper: float
    estimate: float
    standard_error: float
    expansions: int
    shortest: bool

    def __repr__(self) -> str:
        of = ", of the shortest matches" if self.shortest else ""
        if math.isnan(self.estimate):
            estimate = "not estimated"
        elif self.estimate == self.lower < self.upper:
            estimate = "no particle met a further match"
        else:
            estimate = f"estimate {self.estimate:.6g} +- {self.standard_error:.2g}"
        return f"Probability(between {self.lower:.6g} and {self.upper:.6g}{of}; {estimate})"


def probability(
    lm: CachedTransformer,
    pattern: Language,
    *,
    prefix: Language = "",
    end: str = "eos",
    max_tokens: int | None = None,
    max_chars: int | None = None,
    tokenization: str = "all",
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float = 1.0,
    edits: int | Edits | Mapping[str, int | Edits] = 0,
    rewrite: Iterable[Rewrite] = (),
    ignore: Language | None = None,
    tolerance: float = 1e-3,
    max_expansions: int = 2000,
    particles: int = 32,
    runs: int = 32,
    batch: int = 32,
    seed: int | None = None,
) -> Probability:
    """The probability that what follows the prefix is in the language, as `end` says it ends.

    Where the prefix has several strings, one is drawn by its own probability among them. With end="prefix" the event is
    that the text begins with a match, at a border of tokens. A text may begin with several; the first counts, and the
    result says so.

    Parameters
    ----------
    tolerance : float
        The bounds are closed until they differ by so much of the upper one.
    max_expansions : int
        Or until so many next-token laws were looked at; 0 leaves the bounds at what the start says.
    particles, runs : int
        Size and number of the particle filters behind `estimate`; 0 runs leave it and its error NaN. Matches that end
        256 tokens or more behind what the search has looked into are not met. The error is not to be trusted where
        few particles meet a match; the bounds always are.

    The other parameters, and the errors, are those of `search`.
    """
    share("tolerance", tolerance)
    count("max_expansions", max_expansions, least=0)
    count("particles", particles)
    count("runs", runs, least=0)
    rng = generator(seed)
    space = space_of(
        lm, pattern, prefix, end, max_tokens, max_chars, tokenization, top_k, top_p, temperature, None, edits, rewrite,
        ignore,
    )  # fmt: skip
    shortest = end == "prefix" and any(part.continues() for part in space.query.parts)
    space = replace(space, first=shortest)
    starts = space.starts()
    if starts is None:
        raise ValueError(f"the prefix {prefix!r} has too many strings to weigh each: give a prefix with fewer")
    log_total = float(np.logaddexp.reduce([start.log_prob for start in starts]))
    starts = [start._replace(log_prob=start.log_prob - log_total) for start in starts]

    search = Search(space, batch=batch)
    for start in starts:
        search.add(start)
    left = search.open_mass()
    while left > tolerance * (search.closed + left) and search.expansions < max_expansions:
        search.expand()
        left = search.open_mass()

    lower, upper = min(1.0, search.closed), min(1.0, search.closed + left)      # rounding may bring them out
    shares = np.full(max(runs, 1), math.nan)
    for i, stream in enumerate(rng.spawn(runs)):
        shares[i] = _share(search, particles, stream) if left > 0.0 else 0.0
    estimate = float(np.clip(lower + left * shares.mean(), lower, upper))
    error = float(left * shares.std(ddof=1) / math.sqrt(runs)) if runs > 1 else math.nan
    return Probability(lower, upper, estimate, error, search.expansions, shortest)


def _share(search: Search, particles: int, rng: np.random.Generator) -> float:
    """An unbiased estimate of how much of what a search has left open is in the language; at most 1."""
    drawn = smc_standard(Rest(search), particles, rng=rng, max_steps=LONGEST, progress=False)
    return sum(math.exp(particle.log_weight) for particle in drawn if not particle.cut)


class Rest(Sampled):
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
        item = self.items[self.sample(self.choice)]
        space, node = self.space, item.node
        if item.kind == 1:
            return node if item.token < 0 else space.child(node, item.token, item.log_prob)
        law, mask = self.law(node), np.zeros(len(space.lm.vocab), bool)
        mask[later(item, space.allowed(node), law.log_probs())] = True
        token = int(self.sample(law.masked(mask)))      # of those that the item stands for
        return space.child(node, token, law.log_prob_at(token))
