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
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmppl.inference.expansion import EXPANSIONS, step_copies, step_distinct
from llmppl.inference.particles import Death, Particles
from llmppl.inference.resampling import count, logsumexp, optimal, systematic
from llmppl.models.model import Model
from llmppl.runtime import Runtime

M = TypeVar("M", bound=Model)
Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Scheme = Callable[[np.random.Generator, Floats, int], tuple[Indices, Floats]]


@dataclass(frozen=True)
class Step:
    """What `on_step` is given after each step.

    index : int, from 1
    parents : (M,) int, for each candidate the place of its parent among the particles of the step before
    log_weights : (M,) float, the candidates' log-weights after the step, twists included
    ancestors : (n,) int, for each survivor its place among the candidates
    particles : Particles, the survivors with their new log-weights, twists included
    """

    index: int
    parents: Indices
    log_weights: Floats
    ancestors: Indices
    particles: Particles[Any]


def smc_steer(
    model: M,
    N: int,
    K: int,
    *,
    expand: str = "independent",
    seed: int | None = None,
    rng: np.random.Generator | None = None,
    max_steps: int | None = None,
    on_step: Callable[[Step], None] | None = None,
    progress: bool | None = None,
) -> Particles[M]:
    """SMC steering: K extensions of every active particle, N survivors chosen without replacement.

    Source: Lew et al. 2023, Algorithm 1 (whose weights are N times ours), with the threshold of Fearnhead & Clifford
    (2003) as it is there.

    Parameters
    ----------
    model : Model
        The program; it is copied, never changed.
    N, K : int
        Particles kept, and copies made of each particle before a step.
    expand : str
        Which extensions are tried. "independent": K copies of each particle, as in Algorithm 1. "merged": the same, and
        copies that chose the same in the step become one, with the weight of both. "distinct": at most N K different
        first choices of all particles together, drawn without replacement. All are unbiased and run the same tokens.
    seed, rng
        Give at most one. The same seed gives the same particles, whatever is cached and however calls are batched.
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
    if expand not in EXPANSIONS:
        raise ValueError(f"expand is one of {', '.join(map(repr, EXPANSIONS))}, not {expand!r}")

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
    if not 0.0 <= ess_threshold <= 1.0:
        raise ValueError(f"ess_threshold is a share of N in [0, 1], not {ess_threshold!r}")

    def select(rng: np.random.Generator, log_weights: Floats, active: bool) -> tuple[Indices, Floats]:
        log_total = logsumexp(log_weights)
        if active and log_total > -math.inf:
            ess = math.exp(2.0 * log_total - logsumexp(2.0 * log_weights))
            if ess < ess_threshold * N:
                return resample(rng, log_weights, N)
        alive = np.flatnonzero(log_weights > -np.inf)
        return alive, log_weights[alive]

    return _smc(model, N, 1, "independent", select, seed, rng, max_steps, on_step, progress)


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
    if not isinstance(model, Model):
        raise TypeError(f"inference wants a Model, an instance of your subclass, not {model!r}")
    if max_steps is not None:
        count("max_steps", max_steps)
    rng = _generator(seed, rng)
    runtime, deaths = Runtime(), list[Death]()
    particles = [model.spawn(stream) for stream in rng.spawn(1 if expand == "distinct" else N)]
    for particle in particles:                          # equal ones would make equal candidates
        particle.log_weight -= math.log(len(particles))
    t = 0
    with _bar(progress, max_steps) as show:
        while any(not p.finished for p in particles) and t != max_steps:
            t += 1
            if expand == "distinct":
                candidates, parents = step_distinct(runtime, particles, N, K, t, rng)
            else:
                candidates, parents = step_copies(runtime, particles, K, t, merge=expand == "merged")
            log_weights = np.array([p.log_weight for p in candidates], dtype=np.float64)
            deaths += [Death(t, p.death or "weight zero") for p in candidates if p.log_weight == -math.inf]
            ancestors, chosen = select(rng, log_weights, any(not p.finished for p in candidates))
            particles = _take(candidates, ancestors, chosen)
            if on_step is not None:
                survivors = Particles(particles, stats=runtime.stats, deaths=deaths)
                on_step(Step(t, parents, log_weights, ancestors, survivors))
            show(t, particles)
    for particle in particles:
        if not particle.finished:
            particle.untwist()
            particle.finished = particle.cut = True
    return Particles(particles, stats=runtime.stats, deaths=deaths)


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


def _generator(seed: int | None, rng: np.random.Generator | None) -> np.random.Generator:
    if seed is not None and rng is not None:
        raise ValueError("give seed= or rng=, not both")
    if rng is not None and not isinstance(rng, np.random.Generator):
        raise TypeError(f"rng must be a np.random.Generator (np.random.default_rng(seed)), not {rng!r}")
    return np.random.default_rng(seed) if rng is None else rng


@contextmanager
def _bar(progress: bool | None, max_steps: int | None) -> Iterator[Callable[[int, list[Any]], None]]:
    """A progress bar on stderr, or nothing."""
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda t, particles: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("step {task.completed}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[state]}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=max_steps, state="")

        def show(t: int, particles: list[Any]) -> None:
            finished = sum(p.finished for p in particles)
            log_ml = logsumexp(np.array([p.log_weight - p.log_twist for p in particles]))
            bar.update(task, completed=t, state=f"{finished}/{len(particles)} finished, log Z-hat {log_ml:.2f}")

        yield show
