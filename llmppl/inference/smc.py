"""Sequential Monte Carlo: many copies of a program, advanced together, the promising ones kept.

One loop serves three algorithms: *expand* each active particle into copies, *step* them all, *select* survivors. With K
copies and selection without replacement it is SMC steering (Lew et al. 2023, Algorithm 1); with one copy and
resampling when the effective sample size falls it is the standard particle filter (Doucet & Johansen 2009, Sec. 3.5);
with one copy and no resampling it is importance sampling.

The invariant, after every step t and for every f:  E[ sum_i w_i f(x_i) ] = Z_t E_t[ f ]  where w = exp(log_weight -
log_twist). It holds because a particle starts at weight 1/N, K copies share the weight of their parent, a step
multiplies it by its potential, and every selection keeps weighted sums in expectation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmppl.arguments import count, function, generator, one_of, optional_count, probability
from llmppl.display.progress import bar
from llmppl.inference.expansion import EXPANSIONS, step_copies, step_distinct
from llmppl.inference.genealogy import Genealogy, StepRecord
from llmppl.inference.particles import Death, Particles, died
from llmppl.inference.resampling import logsumexp, optimal, systematic
from llmppl.inference.watch import Standing, Watch, begin, cut
from llmppl.models.model import Model
from llmppl.runtime import Runtime, running

M = TypeVar("M", bound=Model)
Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Scheme = Callable[[np.random.Generator, Floats, int], tuple[Indices, Floats]]


@dataclass(frozen=True)
class Step(StepRecord):
    """What `on_step` is given after each step: the figures of `StepRecord`, and who descends from whom.

    The models in it are the very ones of the run, which go on changing: what you want to keep, read at once.

    candidates : (M,) tuple of Model, after the step and before selection; dead ones have log_weight -inf and a `death`
    parents : (M,) int, for each candidate the place of its parent among the particles of the step before (at step 1,
        among the initial particles: N, or one with expand="distinct")
    candidate_log_weights : (M,) float, the candidates' log-weights after the step and before selection, twists included
    ancestors : (n,) int, for each survivor its place among the candidates
    particles : Particles, the survivors with their new log-weights, twists included
    roots : (n,) int, for each survivor the initial particle it descends from
    """

    candidates: tuple[Any, ...]
    parents: Indices
    candidate_log_weights: Floats
    ancestors: Indices
    particles: Particles[Any]
    roots: Indices


def smc_steer(
    model: M,
    N: int,
    K: int = 3,
    *,
    expand: str = "distinct",
    seed: int | None = None,
    rng: np.random.Generator | None = None,
    max_steps: int | None = None,
    on_step: Callable[[Step], None] | None = None,
    progress: bool | None = None,
) -> Particles[M]:
    """SMC steering: K extensions of every active particle, N survivors chosen without replacement.

    Source: Lew et al. 2023, Algorithm 1 (whose weights are N times ours), with the threshold of Fearnhead & Clifford
    (2003) as it is there; `expand="copies"` is that algorithm to the letter.

    Parameters
    ----------
    model : Model
        The program; it is copied, never changed.
    N, K : int
        Particles kept, and extensions tried for each.
    expand : str
        Which extensions are tried. "distinct": N K different first choices of all particles together, drawn without
        replacement. "copies": K independent copies of each particle, as in Algorithm 1. "merged": the same, but
        copies that chose the same in the step become one, with the weight of both. All are unbiased; the first has
        the smallest errors, and runs more tokens, since no two of its extensions are the same.
    seed, rng
        Give at most one. The same seed gives the same particles, whatever is cached and however calls are batched, but
        for rounding: in float32 a law differs in its last digits with the batch it came from, and may tip a choice.
    max_steps : int, optional
        After so many steps, particles that have not finished are returned as they are, marked `cut`.
    on_step : callable, optional
        Called with a `Step` after every step.
    progress : bool, optional
        Show a bar; by default where stderr is a terminal.

    Returns
    -------
    Particles
        At most N, all of positive weight; `log_ml` is the log of an unbiased estimate of Z. Length 0 if all died.
    """
    count("N", N)
    count("K", K)
    one_of("expand", expand, EXPANSIONS)

    def select(rng: np.random.Generator, log_weights: Floats, active: bool) -> tuple[Indices, Floats]:
        return optimal(rng, log_weights, N)

    return _smc(model, N, K, expand, select, seed, rng, max_steps, on_step, progress)


def smc_standard(
    model: M,
    N: int,
    *,
    ess_threshold: float = 0.5,
    resample: Scheme = systematic,
    seed: int | None = None,
    rng: np.random.Generator | None = None,
    max_steps: int | None = None,
    on_step: Callable[[Step], None] | None = None,
    progress: bool | None = None,
) -> Particles[M]:
    """The particle filter: one extension of every particle, resampled when ess < `ess_threshold` N.

    Source: Doucet & Johansen 2009, Sec. 3.5. `resample` is a scheme of `llmppl.inference.resampling`; `optimal` is
    refused, since it leaves N of N particles as they are. The other parameters are those of `smc_steer`.
    """
    count("N", N)
    if resample is optimal:
        raise ValueError("optimal keeps N of N particles as they are, so it cannot resample here; use systematic")
    ess_threshold = probability("ess_threshold", ess_threshold)

    def select(rng: np.random.Generator, log_weights: Floats, active: bool) -> tuple[Indices, Floats]:
        log_total = logsumexp(log_weights)
        if active and log_total > -math.inf:
            ess = math.exp(2.0 * log_total - logsumexp(2.0 * log_weights))
            if ess < ess_threshold * N:
                return resample(rng, log_weights, N)
        alive = np.flatnonzero(log_weights > -np.inf)
        return alive, log_weights[alive]

    return _smc(model, N, 1, "copies", select, seed, rng, max_steps, on_step, progress)


def importance_sampling(
    model: M,
    N: int,
    *,
    seed: int | None = None,
    rng: np.random.Generator | None = None,
    max_steps: int | None = None,
    on_step: Callable[[Step], None] | None = None,
    progress: bool | None = None,
) -> Particles[M]:
    """N independent weighted runs of the program. The parameters are those of `smc_steer`."""
    return smc_standard(
        model, N, ess_threshold=0.0, seed=seed, rng=rng, max_steps=max_steps, on_step=on_step, progress=progress
    )


def _smc(
    model: M,
    N: int,
    K: int,
    expand: str,
    select: Callable[[np.random.Generator, Floats, bool], tuple[Indices, Floats]],
    seed: int | None,
    rng: np.random.Generator | None,
    max_steps: int | None,
    on_step: Callable[[Step], None] | None,
    progress: bool | None,
) -> Particles[M]:
    optional_count("max_steps", max_steps)
    if on_step is not None:
        function("on_step", on_step, 'Recorder("run.jsonl")')
    rng = generator(seed, rng)
    if progress is None and running():                  # one of several runs; their bars would mix
        progress = False
    runtime, deaths = Runtime(), list[Death]()
    particles = begin(model, rng.spawn(1 if expand == "distinct" else N))
    for particle in particles:                          # equal ones would make equal candidates
        particle.log_weight -= math.log(len(particles))
    history, t = Genealogy(len(particles)), 0
    watch = Watch(runtime, max_steps)
    standing = Standing(runtime, deaths, history, in_place=expand != "distinct")
    with standing, bar(progress, max_steps, _state) as show:
        standing.note(t, particles)
        while any(not p.finished for p in particles) and t != max_steps:
            t += 1
            if expand == "distinct":
                expansion = step_distinct(runtime, particles, N, K, t, rng, watch)
            else:
                expansion = step_copies(runtime, particles, K, t, merge=expand == "merged")
            candidates = expansion.candidates
            log_weights = np.array([p.log_weight for p in candidates], dtype=np.float64)
            deaths += died(t, candidates)
            ancestors, chosen = select(rng, log_weights, any(not p.finished for p in candidates))
            particles = _take(candidates, ancestors, chosen)
            standing.note(t, particles)
            watch.step(t, candidates, particles)
            summary = history.add(expansion, log_weights, ancestors, chosen, particles)
            if on_step is not None:
                survivors = Particles(particles, stats=runtime.stats, deaths=deaths, steps=history.steps)
                on_step(
                    Step(
                        **vars(summary),
                        candidates=tuple(candidates),
                        parents=expansion.parents,
                        candidate_log_weights=log_weights,
                        ancestors=ancestors,
                        particles=survivors,
                        roots=history.roots,
                    )
                )
            show(t, particles)
    cut(particles)
    return Particles(particles, stats=runtime.stats, deaths=deaths, steps=history.steps, accuracy=history.accuracy)


def _take(candidates: list[M], ancestors: Indices, log_weights: Floats) -> list[M]:
    """The chosen candidates with their new log-weights; one that was chosen again is copied."""
    taken: list[M] = []
    seen: set[int] = set()
    for ancestor, log_weight in zip(ancestors.tolist(), log_weights.tolist(), strict=True):
        particle = candidates[ancestor]
        if ancestor in seen:
            particle = particle.spawn(particle.rng.spawn(1)[0])
        seen.add(ancestor)
        particle.log_weight = log_weight
        taken.append(particle)
    return taken


def _state(particles: list[Any]) -> str:
    return f"log Z-hat {logsumexp(np.array([p.log_weight - p.log_twist for p in particles])):.2f}"
