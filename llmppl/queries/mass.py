"""How probable a language is under a model: bounds that close, and an estimate with its standard error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from llmppl.arguments import count, generator, share
from llmppl.automata.dfa import DFA
from llmppl.inference.smc import smc_standard
from llmppl.lm.transformer import CachedTransformer
from llmppl.queries.best_first import Search
from llmppl.queries.language import Edits, Language, Part, Query, Rewrite
from llmppl.queries.matches import space_of
from llmppl.queries.sampling import Sampled

LONGEST = 256                                           # steps of a particle


@dataclass(frozen=True)
class Probability:
    """The probability that a text of the model is in a language.

    Attributes
    ----------
    lower, upper : float
        It is between them, for certain: mass found, and mass found plus mass that was not looked into.
    estimate, standard_error : float
        Mean and standard error of independent unbiased estimates by a particle filter.
    expansions : int
        Next-token laws that the bounds took.
    shortest : bool
        Whether matches that begin with another match were left out, since they are no other event: end="prefix" of a
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
        outside = max(self.lower - self.estimate, self.estimate - self.upper) > 3.0 * self.standard_error
        but = ", which the bounds exclude: too few particles meet a match" if outside else ""
        return (
            f"Probability(between {self.lower:.6g} and {self.upper:.6g}{of}; "
            f"estimate {self.estimate:.6g} +- {self.standard_error:.2g}{but})"
        )


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
    that the text begins with a match, at a border of tokens; of two matches of which one begins the other only the
    shorter counts, and the result says so.

    Parameters
    ----------
    tolerance : float
        The bounds are closed until they differ by so much of the upper one.
    max_expansions : int
        Or until so many next-token laws were looked at; 0 leaves the bounds at what the start says.
    particles, runs : int
        Size and number of the particle filters behind `estimate`; 0 runs leave it and its error NaN. It is of matches
        of fewer than 256 tokens. Its error is not to be trusted where few particles meet a match; the bounds always
        are.

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
    shortest = False
    if end == "prefix":
        parts = [_shortest(part) for part in space.query.parts]
        shortest = any(cut for _, cut in parts)
        space = replace(space, query=Query(tuple(part for part, _ in parts), space.query.ignored, space.query.edits))
    starts = space.starts()
    if starts is None:
        raise ValueError(f"the prefix {prefix!r} has too many strings to weigh each: give a prefix with fewer")
    log_total = float(np.logaddexp.reduce([start.log_prob for start in starts]))
    starts = [start._replace(log_prob=start.log_prob - log_total) for start in starts]

    search = Search(space, batch=batch)
    for start in starts:
        search.add(start)
    left = 1.0
    while search.open_items() and search.expansions < max_expansions:
        search.expand()
        left = search.open_mass()
        if left <= tolerance * (search.closed + left):
            break
    else:
        left = search.open_mass()

    estimates = np.full(max(runs, 1), math.nan)
    for i, stream in enumerate(rng.spawn(runs)):
        drawn = smc_standard(Sampled(space, starts), particles, rng=stream, max_steps=LONGEST, progress=False)
        estimates[i] = sum(math.exp(particle.log_weight) for particle in drawn if not particle.cut)
    error = float(estimates.std(ddof=1) / math.sqrt(runs)) if runs > 1 else math.nan
    upper = min(1.0, search.closed + left)
    return Probability(search.closed, upper, float(estimates.mean()), error, search.expansions, shortest)


def _shortest(part: Part) -> tuple[Part, bool]:
    """A part without the strings that begin with another of its strings, and whether there were any."""
    whole = part.follow.explore()
    table, accepting = whole.table.copy(), whole.accepting
    if not table[accepting].any():
        return part, False
    table[accepting] = 0
    follow = DFA.from_table(table, accepting, part.start)
    return replace(part, follow=follow, start=follow.start), True
