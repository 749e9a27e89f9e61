"""Sequential Monte Carlo: many copies of a program advance together, and selection keeps the promising ones.

One loop serves three algorithms: *expand* each active particle into copies, *step* them all, *weigh* them, *resample*.
With K copies and selection without replacement it is SMC steering (Lew et al. 2023, Algorithm 1). With one copy, and
resampling when the effective sample size falls, it is the standard particle filter (Doucet & Johansen 2009, Sec. 3.5).
With one copy and no resampling it is importance sampling.

The invariant, after every step t and for every f:  E[ sum_i w_i f(x_i) ] = Z_t E_t[ f ]  where w = exp(log_weight -
log_twist). A particle starts at weight 1/N, K copies share the weight of their parent, a step multiplies it by its
potential, and every selection keeps weighted sums in expectation.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypedDict, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from llmppl.distributions import logsumexp
from llmppl.inference.deaths import Death, deaths_of
from llmppl.inference.expansion import EXPANSIONS, Copies, ExpansionName, Extension, Run
from llmppl.inference.gc_freeze import freeze
from llmppl.inference.genealogy import Genealogy, StepRecord, log_ml_error
from llmppl.inference.particles import Particles
from llmppl.inference.resampling import DownSample, ResampleBelow, Scheme, systematic
from llmppl.inference.resuming.checkpoint import Checkpoint
from llmppl.inference.run_guards import Watch, check_model, cut, start_particles
from llmppl.models.choices import Sampled
from llmppl.models.model import Model, untwist
from llmppl.models.streams import Stream, spawned, state_of
from llmppl.report.progress import Bar, finished
from llmppl.support.arguments import function, generator, one_of, optional_count
from llmppl.support.options import list_options, unknown_option
from llmppl.support.runtime import Runtime, running

M = TypeVar("M", bound=Model)
Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


class Expand(Protocol):
    """Choice of the successors that a step runs: `Distinct`, `Copies`, or your own."""

    @property
    def num_starts(self) -> int: ...

    def __call__(self, run: Run, /) -> list[Extension]: ...


Select = Callable[[np.random.Generator, Floats, bool], tuple[Indices, Floats]]


@dataclass(frozen=True, kw_only=True)
class Step(StepRecord):
    """Step of a run: its record and the particles themselves.

    The models are those of the run, and the next step changes them. Read at once the parts that you want to keep.

    candidates : (M,) tuple of Model, after the step and before selection; dead ones have log_weight -inf and a `death`
    particles : Particles, the n survivors with their new log-weights, twists included
    roots : (n,) int, the initial particle from which each survivor descends
    """

    candidates: tuple[Any, ...]
    particles: Particles[Any]
    roots: Indices


class SMC(Generic[M]):
    """Sequential Monte Carlo, step by step: `for step in SMC(model, expand, select, seed=0)`.

    Each step expands the particles, steps them, weighs them and resamples, and yields a `Step`. The loop ends when
    every particle has finished or died. An exception that leaves a step, KeyboardInterrupt included, ends the run. It
    carries `.particles`, the particles after the last complete step, marked cut.

    Parameters
    ----------
    model : Model
        The program. The run copies it and never changes it.
    expand : callable
        `Distinct(N, K)`, `Copies(N, K)`, or your own `expand(run) -> list of Extension` with `num_starts`.
    select : callable
        `DownSample(N)`, `ResampleBelow(N, ess_threshold, scheme)`, or your own `select(rng, log_weights, active)` that
        returns ancestors and log-weights as the schemes of `llmppl.inference.resampling` do.
    seed, rng
        Give at most one.

    Attributes
    ----------
    Between two steps these are the whole state of the run:

    particles : list of Model, with their log-weights, twists, choices and random streams
    t : int, the number of steps made
    rng : np.random.Generator, the stream of the run
    genealogy : Genealogy, the records of the steps, and the root of each particle
    deaths : list of Death

    A `Checkpoint` also reads `seeded`, `initial_rng`, `snapshot` and `runtime`.
    """

    def __init__(
        self, model: M, expand: Expand, select: Select, *, seed: int | None = None,
        rng: np.random.Generator | None = None,
    ) -> None:  # fmt: skip
        if not hasattr(expand, "num_starts"):
            raise TypeError(f"expand must be an expansion, as Distinct(N, K) is, not {expand!r}")
        self.expand, self.select = expand, function("select", select, "DownSample(N)")
        self.rng, self.t, self.deaths = generator(seed, rng), 0, list[Death]()
        self.seeded, self.initial_rng = seed is not None or rng is not None, state_of(self.rng)
        self._model, self.runtime = model, Runtime()
        self.particles = start_particles(model, [Sampled(stream) for stream in self.rng.spawn(expand.num_starts)])
        for particle in self.particles:
            particle._log_weight_ -= math.log(len(self.particles))
        self.genealogy = Genealogy(len(self.particles))
        self._watch = Watch(bounded=True)
        self.take_snapshot()
        self._on_step: Callable[[Step], None] | None = None

    @property
    def active(self) -> bool:
        """True if a particle has not finished."""
        return any(not particle.finished for particle in self.particles)

    def advance(self, functions: Sequence[Callable[[], Any]], numbers: Iterable[int] | None = None) -> None:
        """Run functions of particles together. Errors name the particles by these numbers, by default 0, 1, ..."""
        names = [f"particle {i} at step {self.t}" for i in (range(len(functions)) if numbers is None else numbers)]
        self.runtime.run(functions, names)

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if not self.active:
            raise StopIteration
        try:
            with self._attach_partial_result():
                return self._as_step(*self._next())
        except StopIteration as error:                  # must not end the caller's loop
            raise RuntimeError("a step raised StopIteration") from error

    def _next(self) -> tuple[StepRecord, list[M]]:
        self.t += 1
        for particle in self.particles:                 # the caller may have finished it between two steps
            if particle.finished:
                untwist(particle)
        extensions = self.expand(self)                                          # expand, and step
        candidates = [each.particle for each in extensions]
        log_weights = np.array([p.log_weight for p in candidates], dtype=np.float64)        # weigh
        self.deaths += deaths_of(self.t, candidates)
        ancestors, chosen = self.select(self.rng, log_weights, any(not p.finished for p in candidates))
        self.particles = _take(candidates, ancestors, chosen, spawned(self.rng))            # resample
        self.take_snapshot()
        freeze()
        self._watch.step(self.t, candidates, self.particles)
        return self.genealogy.add(extensions, log_weights, ancestors, chosen, self.particles), candidates

    def _as_step(self, record: StepRecord, candidates: list[M]) -> Step:
        particles = Particles(
            self.particles, stats=self.runtime.stats, deaths=self.deaths, steps=self.genealogy.records
        )
        return Step(**vars(record), candidates=tuple(candidates), particles=particles, roots=self.genealogy.roots)

    def run(
        self,
        *,
        max_steps: int | None = None,
        on_step: Callable[[Step], None] | None = None,
        progress: bool | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int | None = None,
    ) -> Particles[M]:
        """Run to the end, or up to step `max_steps`, where unfinished particles are marked `cut`.

        The options are those of `smc_steer`. Without `max_steps`, RuntimeError if nothing happens for a thousand steps.
        """
        optional_count("max_steps", max_steps)
        if on_step is not None:
            function("on_step", on_step, 'Recorder("run.jsonl")')
        if checkpoint is None and every is not None:
            raise ValueError(f'every={every} is of a checkpoint: give its path, as in checkpoint="run.ckpt"')
        if progress is None and running():              # the bars of several runs would mix
            progress = False
        self._watch.bounded, self._on_step = max_steps is not None, on_step
        saving: Any = nullcontext()
        if checkpoint is not None:
            saving = Checkpoint(checkpoint, every, self, self._model, on_step, max_steps)
        with saving as saved, self._attach_partial_result(saved), Bar(progress, max_steps, _progress) as show:
            while self.active and self.t < (max_steps or math.inf):
                record, candidates = self._next()
                if on_step is not None:
                    on_step(self._as_step(record, candidates))
                if saved is not None:
                    saved.step()
                show(self.t, self.particles)
                del record, candidates                  # frees them before the next step waits for the language model
            if saved is not None:
                saved.end()
        cut(self.particles)
        return self._result(self.particles)

    def posterior(self) -> Particles[M]:
        """Return the result of a run that ends here. Copies of the unfinished particles are marked `cut`."""
        particles = [p if p.finished or p.chooser is None else p._spawn_(p.chooser) for p in self.particles]
        cut(particles)
        return self._result(particles)

    def _result(self, particles: list[M]) -> Particles[M]:
        records = tuple(self.genealogy.records)
        accuracy = functools.partial(log_ml_error, records)
        deaths = [*self.deaths, *deaths_of(self.t, particles)]     # some may have died between two steps
        return self._particles(particles, deaths=deaths, steps=records, accuracy=accuracy)

    def _particles(self, particles: list[M], **diagnostics: Any) -> Particles[M]:
        return Particles(particles, stats=self.runtime.stats, recorder=self._on_step, **diagnostics)

    def take_snapshot(self) -> None:
        """Keep the step number and the attributes of the particles, some of which the next step changes."""
        self.snapshot = self.t, [(particle, vars(particle).copy()) for particle in self.particles]

    @contextlib.contextmanager
    def _attach_partial_result(self, checkpoint: Checkpoint | None = None) -> Iterator[None]:
        """Set `.particles` of an exception that leaves a run to those of the last complete step, and write these.

        A step that was interrupted may have changed objects inside attributes, such as lists. They keep the changes.
        """
        try:
            yield
        except BaseException as error:                  # another of several runs may have been interrupted
            self.t, snapshot = self.snapshot
            for particle, attributes in snapshot:
                vars(particle).clear()
                vars(particle).update(attributes)
            self.particles = [particle for particle, _ in snapshot]
            if checkpoint is not None:
                checkpoint.on_error(error)
            cut(self.particles)
            deaths = [death for death in self.deaths if death.step <= self.t]
            steps = self.genealogy.records[: self.t]
            setattr(error, "particles", self._particles(self.particles, deaths=deaths, steps=steps))      # noqa: B010
            raise

    def __repr__(self) -> str:
        finished = sum(particle.finished for particle in self.particles)
        state = f"step {self.t}, {len(self.particles)} particles, {finished} finished, {_state(self.particles)}"
        return f"<SMC {self.expand}, {self.select}: {state}>"


def _take(candidates: list[M], ancestors: Indices, log_weights: Floats, streams: Iterator[Stream]) -> list[M]:
    """Return the selected candidates with their new log-weights. Further selections of one candidate are copies."""
    taken: list[M] = []
    seen: set[int] = set()
    for ancestor, log_weight in zip(ancestors.tolist(), log_weights.tolist(), strict=True):
        particle = candidates[ancestor]
        if ancestor in seen:
            particle = particle._spawn_(Sampled(next(streams)))
        seen.add(ancestor)
        particle._log_weight_ = log_weight
        taken.append(particle)
    return taken


def _progress(particles: list[Any]) -> str:
    return f"{finished(particles)}, {_state(particles)}"


def _state(particles: list[Any]) -> str:
    return f"log Z-hat {logsumexp(np.array([p.log_weight - p.log_twist for p in particles])):.2f}"


# ---- algorithms


class RunOptions(TypedDict, total=False):
    """Options of all algorithms; `smc_steer` describes them."""

    seed: int | None
    rng: np.random.Generator | None
    max_steps: int | None
    on_step: Callable[[Step], None] | None
    progress: bool | None
    checkpoint: str | os.PathLike[str] | None
    every: int | None


def _run(name: str, model: M, expand: Expand, select: Select, options: RunOptions) -> Particles[M]:
    known = RunOptions.__annotations__
    if unknown := {option: value for option, value in options.items() if option not in known}:
        raise unknown_option(name, unknown, [*known, "N", "K"])
    seed, rng = options.pop("seed", None), options.pop("rng", None)
    return SMC(model, expand, select, seed=seed, rng=rng).run(**options)        # type: ignore[misc]


@list_options(RunOptions, {})
def smc_steer(
    model: M, N: int, K: int = 3, *, expand: ExpansionName = "distinct", **options: Unpack[RunOptions]
) -> Particles[M]:
    """Run SMC steering: K extensions of every active particle, N survivors chosen without replacement.

    Source: Lew et al. 2023, Algorithm 1 (whose weights are N times ours), with its threshold of Fearnhead & Clifford
    (2003). `expand="copies"` is that algorithm to the letter.

    .. note:: With expand="distinct", the default, the code of a step before its first `sample` runs twice: once to list
       the possible choices, and once with the choice made.

    Parameters
    ----------
    model : Model
        The program. The run copies it and never changes it.
    N, K : int
        Number of particles kept, and of extensions tried for each.
    expand : str
        Extensions that are tried. "distinct": N K different first choices of all particles together, drawn without
        replacement. "copies": K independent copies of each particle, as in Algorithm 1. "merged": the same, but copies
        that made equal choices are merged. All are unbiased. "distinct" has the smallest errors, and runs more tokens,
        since no two of its extensions are equal.
    seed, rng
        Give at most one. The same seed gives the same particles, up to rounding, whatever is cached and however calls
        are batched. In float32, a distribution differs in its last digits with its batch, which may tip a choice.
    max_steps : int, optional
        Number of steps after which unfinished particles are returned as they are, marked `cut`.
    on_step : callable, optional
        Called with a `Step` after every step.
    progress : bool, optional
        Show a bar; by default if stderr is a terminal.
    checkpoint : path, optional
        File from which an interrupted run continues. The same call then ends with the same particles, and returns a
        completed run without running it. `max_steps` may grow. If the file is of another run, a ValueError names the
        difference, and the file is left as it is.
    every : int, optional
        Number of steps between two checkpoints; by default as many as keep the time of writing below 2 %. The last
        checkpoint is written when the run ends, fails or is interrupted.

    Returns
    -------
    Particles
        At most N, all of positive weight; `log_ml` is the log of an unbiased estimate of Z. Length 0 if all died.
    """
    one_of("expand", expand, EXPANSIONS)
    return _run("smc_steer", check_model(model), EXPANSIONS[expand](N, K), DownSample(N), options)


@list_options(RunOptions, {})
def smc_standard(
    model: M, N: int, *, ess_threshold: float = 0.5, resample: Scheme = systematic, **options: Unpack[RunOptions]
) -> Particles[M]:
    """Run the particle filter: one extension of every particle, resampled when ess < `ess_threshold` N.

    Source: Doucet & Johansen 2009, Sec. 3.5. `resample` is a scheme of `llmppl.inference.resampling`; `optimal` is a
    ValueError, since it leaves N of N particles as they are. The other parameters are those of `smc_steer`.
    """
    return _run("smc_standard", check_model(model), Copies(N), ResampleBelow(N, ess_threshold, resample), options)


@list_options(RunOptions, {})
def importance_sampling(model: M, N: int, **options: Unpack[RunOptions]) -> Particles[M]:
    """Run the program N times independently, with weights. The parameters are those of `smc_steer`."""
    return _run("importance_sampling", check_model(model), Copies(N), ResampleBelow(N, 0.0), options)
