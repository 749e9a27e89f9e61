"""Enumeration and beam search: algorithms that follow every choice of a step, or the likeliest ones, without chance.

A step runs up to its first choice, and again once for each value of this choice, until it ends. Beam search is an
optimiser to compare samplers with. Its runs are not a sample, and the sum of their log joints estimates nothing. Every
choice costs probability, so among runs of different lengths the short ones look good early (Lew et al. 2023).
"""

import heapq
import math
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from llmppl.inference.detached import detach
from llmppl.inference.expansion import Branch
from llmppl.inference.particles import Death, Particles, deaths_of, marked
from llmppl.inference.population import Models
from llmppl.inference.run import Limit, Warnings, check_model, cut, start_particles
from llmppl.models.choices import StopAtChoice
from llmppl.models.model import Model
from llmppl.report.progress import Bar, finished
from llmppl.report.tables import TableView, one_line
from llmppl.support.arguments import count, optional_count, plural
from llmppl.support.runtime import Runtime

M = TypeVar("M", bound=Model)

MAX_TOGETHER = 512  # branches that share a forward pass
MAX_OUTCOMES = 300_000  # of an enumeration; each vocabulary is smaller


def enumerate_exact(model: M, max_steps: int | None = None, *, power: float = 1.0) -> Particles[M]:
    """Return every outcome of positive weight with its exact log-weight. `log_ml` is log Z itself.

    Parameters
    ----------
    model : Model
        A program all of whose choices have finite support, else TypeError. The number of outcomes grows exponentially
        with the number of choices, and a ValueError is raised above 300,000. Choices of a weighted proposal are summed
        over its measure.
    max_steps : int, optional
        As in `smc_steer`. Unfinished outcomes are returned marked `cut`, and Z is that of the cut program.
    power : float
        As in `smc_steer`. Every outcome then has its joint probability raised to this power.

    Returns
    -------
    Particles
        One for each path of choices; two paths may lead to the same text.

    Examples
    --------
    >>> class Dice(Model):
    ...     def step(self):
    ...         self.total = self.sample(Uniform(1, 6)) + self.sample(Uniform(1, 6))
    ...         self.condition(self.total >= 11)
    ...         self.finish()
    >>> posterior = enumerate_exact(Dice())
    >>> round(math.exp(posterior.log_ml) * 36, 6)
    3.0
    """
    optional_count("max_steps", max_steps)
    runtime = Runtime()
    done = []
    deaths = list[Death]()
    t = 0
    states = start_particles(model, [StopAtChoice(asker="enumerate_exact")], power)
    watch = Warnings(bounded=max_steps is not None)
    while states and t != max_steps:
        t += 1
        done += [state for state in states if state.finished]
        outcomes = _step(runtime, states, "enumerate_exact", f"an outcome at step {t}")
        deaths += deaths_of(t, outcomes)
        states = []
        for particle in outcomes:
            if particle.log_weight > -math.inf:
                if particle.finished:
                    done.append(particle)
                else:
                    states.append(particle)
        watch.step(t, Models(outcomes), any(particle.finished for particle in outcomes))
    cut(states)
    return Particles(done + states, stats=runtime.stats, deaths=deaths)


def _step(
    runtime: Runtime,
    runs: list[Any],
    asker: str,
    name: str,
    N: int | None = None,
    K: int | None = None,
) -> list[Any]:
    """Return the particles after one step of the unfinished runs, which is searched choice by choice.

    After each choice the N best branches stay, and each is extended by its K most probable choices; all if N and K are
    None.
    """
    todo = [Branch(run, asker, most=K) for run in runs if not run.finished]
    ended = []
    while todo:
        first = 0 if N else max(len(todo) - MAX_TOGETHER, 0)
        batch = todo[first:]
        todo = todo[:first]
        runtime.run([branch.run for branch in batch], [name] * len(batch))
        suspended = []
        for branch in batch:
            if branch.suspended:
                suspended.append(branch)
            else:
                ended.append(branch.particle)
        if N:
            suspended = heapq.nlargest(N, suspended, lambda branch: branch.particle.log_weight)
        for branch in suspended:
            todo += branch.children()
            if N is None and len(ended) + len(todo) > MAX_OUTCOMES:
                raise ValueError(
                    f"{name}: {asker} meets more than {MAX_OUTCOMES:,} of them; a constraint, fewer choices or "
                    "max_steps leave fewer, and smc_steer draws some"
                )
    return ended


# ---- beam search


@dataclass(frozen=True)
class Beam(Generic[M]):
    """A run that `beam_search` found, with its log joint. It has no weight, since nothing was drawn.

    Examples
    --------
    >>> program = ConstrainedText(lm, "He was", [" happy", " sad"])
    >>> beam = beam_search(program, N=2, K=3)[0]
    >>> str(beam), round(beam.log_joint, 2)
    (' happy', -5.6)
    """

    log_joint: float
    particle: M

    def __reduce__(self) -> tuple[Any, ...]:  # without the language model, as a pickle of Particles
        return Beam, (self.log_joint, detach(self.particle))

    def __str__(self) -> str:
        return str(self.particle)

    def as_dict(self) -> dict[str, Any]:
        """Return text, log joint and the mark as cut, for JSON."""
        return {"text": str(self), "log_joint": self.log_joint, "cut": self.particle.cut}

    def __repr__(self) -> str:
        return f"Beam({self.log_joint:.2f}, {str(self)!r}{', cut' if self.particle.cut else ''})"


class NoBeam(ValueError):
    """Every run that a beam search followed has died, for this reason."""

    def __init__(self, reason: str, N: int, K: int) -> None:
        self.reason = reason
        died = f"every run that was followed {reason}"
        super().__init__(f"beam_search with N={N}, K={K}: {died}; a larger N or K follows more")


class Beams(TableView, list[Beam[M]]):
    """The beams of a search, the best first. The repr is a table, also in a notebook.

    limit : "timeout" or "budget" if one has ended the search, else ""

    Examples
    --------
    >>> beams = beam_search(ConstrainedText(lm, "He was", [" happy", " sad"]), N=2, K=3)
    >>> beams.best.s, [round(beam.log_joint, 2) for beam in beams]
    (' happy', [-5.6, -6.04])
    """

    limit = ""

    @property
    def best(self) -> M:
        """The particle of the highest log joint."""
        return self[0].particle

    def records(self) -> list[dict[str, Any]]:
        """Return a dict for each beam."""
        return [beam.as_dict() for beam in self]

    def _header(self) -> str:
        return plural(len(self), "beam")

    def _table(self) -> tuple[list[str], list[list[str]]]:
        rows = [[f"{beam.log_joint:.2f}", marked(one_line(beam), beam.particle)] for beam in self]
        return ["log joint", "text"], rows


def beam_search(
    model: M,
    N: int,
    K: int,
    *,
    max_steps: int | None = None,
    progress: bool | None = None,
    timeout: float | None = None,
    budget: int | None = None,
) -> Beams[M]:
    """Return runs of high log joint. The search keeps the N best runs and extends each by its K most probable choices.

    The proposal of a choice, or its distribution if it has none, selects the K choices. The target alone counts for the
    log joint. A step of several choices is searched choice by choice: after each, the N best unfinished branches stay,
    and at the end of the step the N best runs. Finished runs stay until better ones replace them. A twist influences
    which runs stay, as in `smc_steer`. Nothing is random, and of equal runs the first stays. With N = K = 1 this is
    greedy decoding.

    Parameters
    ----------
    model : Model
        A program all of whose choices have finite support, else TypeError. The search copies it and never changes it.
    N, K : int
        Number of runs kept, and of choices tried for each.
    max_steps, progress, timeout, budget
        As in `smc_steer`.

    Returns
    -------
    Beams, a list of Beam
        From 1 to N different runs, the best first; two of them may have the same text. ValueError if all runs that were
        followed reached weight zero. Others may have positive weight.

    Examples
    --------
    >>> program = ConstrainedText(lm, "He was", Regex(" (very )?(happy|sad)"))
    >>> beam_search(program, N=1, K=1).best.s
    ' very happy'
    """
    check_model(model)
    count("N", N)
    count("K", K)
    optional_count("max_steps", max_steps)
    runtime = Runtime()
    t = 0
    runs = start_particles(model, [StopAtChoice(asker="beam_search")])
    watch = Warnings(bounded=max_steps is not None)
    limit = Limit(runtime, timeout, budget)
    reached = ""
    bar = Bar(
        progress,
        max_steps,
        lambda runs: f"{finished(runs)}, best log joint {runs[0].log_weight:.2f}",
    )
    with bar as show, limit:
        while any(not run.finished for run in runs) and t != max_steps:
            if t:
                reached = limit.reached(Models(runs).texts)
            if reached:
                break
            t += 1
            stepped = _step(runtime, runs, "beam_search", f"a beam at step {t}", N, K)
            ended = [run for run in runs if run.finished] + stepped
            watch.step(t, Models(ended), any(run.finished for run in ended))
            alive = [run for run in ended if run.log_weight > -math.inf]
            runs = heapq.nlargest(N, alive, lambda run: run.log_weight)
            if not runs:
                last = ended[-1].death or "weight zero"
                raise NoBeam(f"has died by step {t}, the last of {last}", N, K)
            show(t, runs)
    cut(runs)
    best = heapq.nlargest(N, runs, lambda run: run.log_weight)
    beams = Beams(Beam(run.log_weight, run) for run in best)
    beams.limit = reached
    return beams
