"""Samples of a language under a model, weighted or locally normalised, and the probability of the language.

The program `Sampled` draws each token from the model's distribution restricted to the language, and multiplies the
weight by the probability of the allowed tokens. A particle filter resamples by these weights. The weights of a block of
samples sum to an unbiased estimate of the probability of the language, and weighted averages follow the model given the
language. Without the weights, ReLM's random search, the samples follow another distribution: each token is probable
given those before it, although the text may have to continue improbably.

For bounds of the probability, a search sums the matches that it finds, and knows the mass that it has not searched.
Only the share of that mass in the language is estimated, by particles that continue from the end of the search. The
estimate is unbiased and stays within the bounds.
"""

from __future__ import annotations

import html
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from llmppl.constraints.vocabulary import EOS
from llmppl.distributions import Bernoulli, Finite, Ints
from llmppl.inference import Step, importance_sampling, smc_standard
from llmppl.inference.run import Limit
from llmppl.lm import TokenDistribution
from llmppl.models.model import Model
from llmppl.queries.best_first import REST, Node, Search, Space, Start
from llmppl.queries.matches import Match
from llmppl.report.progress import Bar
from llmppl.report.tables import bar
from llmppl.support import arguments
from llmppl.support.runtime import Runtime

MAX_BARREN_SAMPLES = 2048  # without a match, before an error
MAX_BARREN_STEPS = 100_000  # without a finished sample, before an error
MAX_STEPS = 256  # steps of a particle in the unsearched mass, at most
TOGETHER = 512  # particles of runs that share batches


class Sampled(Model):
    """Program that draws a string of the language from left to right; Z is the probability of the language.

    Parameters
    ----------
    space : Space
    starts : list of Start
        Prefix strings; one is drawn by its own probability among them.
    """

    def __init__(self, space: Space, starts: list[Start]) -> None:
        super().__init__()
        self.space = space
        self.starts = starts
        self.node: Node | None = space.root(starts[0]) if len(starts) == 1 else None
        self.log_prob = 0.0  # log-probability of the text under the rule

    def copy(self) -> Sampled:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)  # everything is immutable or shared
        return other

    def begin(self) -> Node:
        """Draw the node at which the text begins."""
        return self.space.root(
            self.sample(Finite(self.starts, [start.log_prob for start in self.starts]))
        )

    def step(self) -> None:
        if self.node is None:
            self.node = self.begin()
        space = self.space
        node = self.node
        ids = space.allowed(node)
        accepts = space.accepts(node)
        self.condition(accepts or ids.size > 0)
        if accepts and space.end == "prefix" and not ids.size:
            return self.finish()
        dist = space.rule(node.context.next_token())
        mask = np.zeros(len(space.lm.vocab), bool)
        mask[ids] = True
        if accepts and space.end != "eos":
            if self.ends(dist, ids):
                return self.finish()
            token = self.sample(dist.masked(mask))  # the score has the weight of going on already
        else:
            mask[list(space.lm.vocab.eos_ids)] = accepts
            token = self.sample(dist, proposal=dist.masked(mask))
        log_prob = dist.log_prob(token)
        self.log_prob += log_prob
        if token == EOS:
            return self.finish()
        self.node = space.child(node, int(token), log_prob)

    def ends(self, dist: TokenDistribution, ids: Ints) -> bool:
        """Draw if the text ends at a match or continues with `ids`, and score the sum of both probabilities."""
        assert self.node is not None
        ending = self.space.ending(self.node, dist.log_probs())
        log_measure = float(np.logaddexp.reduce(dist.log_probs()[ids], initial=ending))
        self.score(log_measure)
        drawn = bool(self.sample(Bernoulli(math.exp(ending - log_measure))))
        if drawn:
            self.log_prob += ending
        return drawn

    def match(self, log_weight: float) -> Match:
        """Return the match of a finished particle."""
        assert self.node is not None
        return self.space.match(self.node, self.log_prob, log_weight=log_weight)


def samples(
    space: Space,
    blocks: Iterator[list[Start]],
    N: int,
    rng: np.random.Generator,
    *,
    local: bool,
    normalise: bool,
) -> Iterator[Match]:
    """Yield matches without end, in blocks of at most N; `local` ones have no weights and are not resampled."""
    run = importance_sampling if local else smc_standard
    barren = steps = 0

    def count(step: Step) -> None:
        nonlocal steps
        steps += len(step.candidates)
        if step.num_finished:
            steps = 0
        if steps >= MAX_BARREN_STEPS:
            raise ValueError(
                f"no sample finished in {steps:,} steps of samples; the last ones have {step.index:,} tokens. "
                f"max_tokens bounds them, and Query.best would tell how probable a match is"
            )

    for starts in blocks:
        particles = run(
            Sampled(space, starts), N, rng=rng.spawn(1)[0], on_step=count, progress=False
        )
        barren = 0 if len(particles) else barren + N
        if barren >= MAX_BARREN_SAMPLES:
            raise ValueError(
                f"none of {barren} samples finished: {particles.deaths[0].reason}. The language may have no "
                f"token path of this length: a larger max_tokens, or Query.best, would tell"
            )
        log_Z = particles.log_ml if normalise else 0.0
        for particle in particles:
            yield particle.match(0.0 if local else particle.log_weight - log_Z)


# ---- the probability of the language


@dataclass(frozen=True)
class Probability:
    """Probability that a text of the model is in a language.

    `lower` and `upper` are certain bounds: the mass found, and this plus the mass that was not searched. `estimate` is
    the mean of unbiased estimates, clipped to the bounds, and `estimate_se` its standard error: the mass found, plus
    the part of the rest that a particle filter finds. `expansions` counts the next-token distributions for the bounds.
    `shortest` is True if matches that begin with another match were left out, as parts of the same event:
    end="prefix", and a language in which one string begins another. `limit` is "timeout" or "budget" if one of them
    ended the search or the runs, else ""; runs that did not end give no estimate (NaN).

    Examples
    --------
    >>> query = Query(lm, "He was (very )*(happy|sad)", prefix="He was", end="prefix")
    >>> found = query.probability(max_expansions=5, seed=0)
    >>> [round(p, 3) for p in (found.lower, found.estimate, found.upper)]
    [0.006, 0.023, 0.024]
    >>> found.tries(0.5)                                # texts, for a chance of 50 % that one is in the language
    (29, 114)
    """

    lower: float
    upper: float
    estimate: float
    estimate_se: float
    expansions: int
    shortest: bool
    limit: str = ""

    def __repr__(self) -> str:
        of = ", of the shortest matches" if self.shortest else ""
        if math.isnan(self.estimate):
            estimate = "not estimated"
            if self.limit:
                estimate += f" ({self.limit})"
        elif self.estimate == self.lower < self.upper:
            estimate = "no particle met a further match"
        else:
            estimate = f"estimate {self.estimate:.6g} +- {self.estimate_se:.2g}"
        return f"Probability(between {self.lower:.6g} and {self.upper:.6g}{of}; {estimate})"

    def _repr_html_(self) -> str:
        middle = self.lower if math.isnan(self.estimate) else self.estimate
        return f"<p>{html.escape(repr(self))}</p>{bar((middle, self.lower, self.upper), self.upper or 1.0)}"

    def tries(self, chance: float) -> tuple[float, float]:
        """Return the least and the largest number of texts one of which is in the language with this `chance`."""
        if not 0 < arguments.number("chance", chance) < 1:
            raise ValueError(f"chance is {chance!r}; it is between 0 and 1, as 0.5 is")
        return _tries(self.upper, chance), _tries(self.lower, chance)


def _tries(p: float, chance: float) -> float:
    """Return the number of texts one of which is in a language of probability `p` with this `chance`."""
    if p == 0.0:
        return math.inf
    if p == 1.0:
        return 1
    return math.ceil(max(1.0, math.log1p(-chance) / math.log1p(-p)))


def bounded(
    search: Search,
    tolerance: float,
    particles: int,
    runs: int,
    rng: np.random.Generator,
    *,
    timeout: float | None = None,
    budget: int | None = None,
    progress: bool | None = False,
) -> Probability:
    """Return the probability of the matches of a search that holds the prefixes. The arguments are those of `Query`."""
    limit = Limit(Runtime(), timeout, budget)
    limit.runtime.watch(search.space.lm.evaluator)
    if runs:  # half of each limit is for them
        limit.timeout /= 2
        limit.budget = limit.budget and max(1, limit.budget // 2)
    reached = ""
    left = search.open_mass()
    with Bar(progress, None, str, unit="expansion") as show:
        while (
            left > tolerance * (search.found_mass + left) and not search.given_up() and not reached
        ):
            search.expand()
            left = search.open_mass()
            show(
                search.expansions,
                f"between {search.found_mass:.3g} and {search.found_mass + left:.3g}",
            )
            reached = limit.reached(list)
        lower = min(1.0, search.found_mass)  # rounding may bring both above 1
        upper = min(1.0, search.found_mass + left)
        shares = [0.0] * runs
        if left > 0.0 and runs:
            shares.clear()
            end = time.perf_counter() + limit.timeout
            budget = limit.budget and max(1, limit.budget // runs)
            run = partial(_share, Remainder(search), particles, end, budget)
            calls = [(partial(run, stream), f"run {i}") for i, stream in enumerate(rng.spawn(runs))]
            for share, cut in Runtime().each(calls, max(1, TOGETHER // particles)):
                shares.append(share)
                reached = reached or cut
                show(search.expansions, f"run {len(shares)} of {runs}")
    estimate = float(np.clip(lower + left * np.mean(shares), lower, upper)) if runs else math.nan
    error = float(left * np.std(shares, ddof=1) / math.sqrt(runs)) if runs > 1 else math.nan
    return Probability(
        lower, upper, estimate, error, search.expansions, search.space.first, reached
    )


def _share(
    program: Remainder,
    particles: int,
    end: float,
    budget: int | None,
    rng: np.random.Generator,
) -> tuple[float, str]:
    """Return an unbiased estimate of the share of the unsearched mass that is in the language.

    NaN if a limit came first, and that limit.
    """
    seconds = max(end - time.perf_counter(), 1e-9) if end < math.inf else None
    drawn = smc_standard(
        program,
        particles,
        rng=rng,
        max_steps=MAX_STEPS,
        progress=False,
        timeout=seconds,
        budget=budget,
    )
    if drawn.limit:
        return math.nan, drawn.limit
    return sum(math.exp(particle.log_weight) for particle in drawn if not particle.cut), ""


class Remainder(Sampled):
    """Program for a string of the language that a search did not reach; Z is the share of these in the unsearched mass.

    It draws an item of the heap by its probability, and continues from there.
    """

    def __init__(self, search: Search) -> None:
        super().__init__(search.space, [])
        self.items, log_masses = search.open_items()
        self.choice = Finite(range(len(self.items)), log_masses)

    def begin(self) -> Node:
        item = self.items[self.sample(self.choice)]
        space = self.space
        node = item.node
        if item.kind is not REST:
            return item.open(space)
        dist = space.rule(node.context.next_token())
        mask = np.zeros(len(space.lm.vocab), bool)
        mask[item.later(space.allowed(node), dist.log_probs())] = True
        token = int(self.sample(dist.masked(mask)))  # one of the tokens that the item stands for
        return space.child(node, token, dist.log_prob(token))
