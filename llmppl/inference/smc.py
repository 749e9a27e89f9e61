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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmppl.inference.expansion import Extension
from llmppl.inference.genealogy import StepRecord, log_ml_error, record_step
from llmppl.inference.particles import Death, Particles, deaths_of
from llmppl.inference.population import Candidates, Population, describe
from llmppl.inference.rows import population_of
from llmppl.inference.run import Limit, Warnings, cut, paced_collector, start_particles
from llmppl.models.choices import Sampled, spawned, state_of
from llmppl.models.model import Model
from llmppl.support.arguments import function, generator, optional_count
from llmppl.support.runtime import Runtime

M = TypeVar("M", bound=Model)
Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


class Expand(Protocol):
    """Choice of the successors that a step runs: `Distinct`, `Copies`, or your own."""

    @property
    def num_starts(self) -> int: ...

    def __call__(self, run: SMC[Any], /) -> list[Extension]: ...


Select = Callable[[np.random.Generator, Floats, bool], tuple[Indices, Floats]]
Observer = Callable[
    ["SMC[Any]", StepRecord, Candidates], None
]  # acts after a complete step with its candidates


@dataclass(frozen=True, kw_only=True)
class Step(StepRecord):
    """Step of a run: its record and the particles themselves.

    The models are those of the run, and the next step changes them. Read at once the parts that you want to keep.

    candidates : (M,) tuple of Model, after the step and before selection; dead ones have log_weight -inf and a `death`
    particles : Particles, the n survivors with their new log-weights, twists included

    Examples
    --------
    >>> def show(step):
    ...     print(step.index, len(step.candidates), step.particles.texts)
    >>> program = ConstrainedText(lm, "He was", [" happy", " sad"])
    >>> posterior = smc_steer(program, N=2, K=1, seed=0, on_step=show)
    1 2 [' happy', ' sad']
    """

    candidates: tuple[Any, ...]
    particles: Particles[Any]


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
        `DownSample(N)`, `ResampleBelow(N, ess_threshold, scheme)`, or your own `select(rng, log_weights, active)`; see
        `llmppl.inference.resampling`.
    seed, rng
        Give at most one.
    power : float
        The target is the joint probability of the program raised to this power.

    Attributes
    ----------
    Between two steps these are the whole state of the run:

    particles : list of Model, with their log-weights, twists, choices and random streams
    t : int, the number of steps made
    rng : np.random.Generator, the stream of the run
    records : list of StepRecord
    deaths : list of Death
    limit : "timeout", "budget" or "cancelled" if that has ended the run, else ""

    Examples
    --------
    >>> from llmppl.inference import Distinct, DownSample
    >>> program = ConstrainedText(lm, "The girl had a", Regex(" (red|blue) (hat|ball)"))
    >>> run = SMC(program, Distinct(4, 3), DownSample(4), seed=0)
    >>> [len(step.particles) for step in run]
    [4, 4, 4, 4]
    """

    def __init__(
        self,
        model: M,
        expand: Expand,
        select: Select,
        *,
        seed: int | None = None,
        rng: np.random.Generator | None = None,
        power: float = 1.0,
    ) -> None:
        if not hasattr(expand, "num_starts"):
            raise TypeError(f"expand must be an expansion, as Distinct(N, K) is, not {expand!r}")
        self.expand = expand
        self.select = function("select", select, "DownSample(N)")
        self.rng = generator(seed, rng)
        self.t = 0
        self.runtime = Runtime()
        self.records = list[StepRecord]()
        self.deaths = list[Death]()
        choosers = [Sampled(stream) for stream in self.rng.spawn(expand.num_starts)]
        # the children of this stream are the streams of rows
        self.family = state_of(choosers[0].stream)._replace(state=None)
        particles = start_particles(model, choosers, power)
        for particle in particles:
            particle._log_weight_ -= math.log(len(particles))
        self.particles = particles
        self.power = power
        self.limit = ""
        self.recorder: Any = None  # the Recorder of the run, for the repr of its Particles
        self._warnings = Warnings(bounded=True)

    @property
    def particles(self) -> list[M]:
        return self.population.models()

    @particles.setter
    def particles(self, particles: list[M]) -> None:
        self.population: Population = population_of(particles, self.expand, self.family, self.t)

    @property
    def active(self) -> bool:
        """True if a particle has not finished."""
        return not self.population.finished.all()

    def advance(
        self, functions: Sequence[Callable[[], Any]], numbers: Iterable[int] | None = None
    ) -> None:
        """Run functions of particles together. Errors name the particles by these numbers, by default 0, 1, ..."""
        names = [
            f"particle {i} at step {self.t}"
            for i in (range(len(functions)) if numbers is None else numbers)
        ]
        self.runtime.run(functions, names)

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if not self.active or self.limit:
            raise StopIteration
        try:
            with self._partial_result(), paced_collector():
                return self.as_step(*self._next())
        except StopIteration as error:  # must not end the caller's loop
            raise RuntimeError("a step raised StopIteration") from error

    def _next(self) -> tuple[StepRecord, Candidates]:
        self._begun = self.population.begin(self.expand)
        self.t += 1
        candidates = self._begun.expand(self)  # expand, and step
        log_weights = candidates.columns.log_weights  # weigh
        ancestors, chosen = self.select(self.rng, log_weights, candidates.active)
        survivors = candidates.take(ancestors, chosen, spawned(self.rng))  # resample
        record = record_step(self.t, candidates.columns, ancestors, chosen, survivors)
        deaths = candidates.deaths(self.t)
        self.population = survivors
        self.records.append(record)
        self.deaths += deaths
        self._warnings.step(self.t, candidates, bool(survivors.finished.any()))
        return record, candidates

    def as_step(self, record: StepRecord, candidates: Candidates) -> Step:
        """Return the `Step` of the last record."""
        particles = self._result(self.particles)
        return Step(**vars(record), candidates=tuple(candidates.models()), particles=particles)

    def run(
        self,
        *,
        max_steps: int | None = None,
        observers: Sequence[Observer] = (),
        limit: Limit | None = None,
    ) -> Particles[M]:
        """Run to the end, or up to step `max_steps` or a limit, where unfinished particles are marked `cut`.

        Observers, such as a progress bar, act after each step.
        """
        optional_count("max_steps", max_steps)
        limit = limit or Limit(self.runtime)
        self._warnings.bounded = max_steps is not None or limit.bounded
        with self._partial_result(), paced_collector(), limit:
            while self.active and self.t < (max_steps or math.inf) and not self.limit:
                record, candidates = self._next()
                for observer in observers:
                    observer(self, record, candidates)
                del (
                    record,
                    candidates,
                )  # frees them before the next step waits for the language model
                if self.active and not self.limit:
                    self.limit = limit.reached(self.population.texts)
        cut(self.particles)
        return self._result(self.particles)

    def cancel(self) -> None:
        """End the run after the step under way, as a limit does. Another thread may call it."""
        self.limit = "cancelled"

    def posterior(self) -> Particles[M]:
        """Return the result of a run that ends here. Copies of the unfinished particles are marked `cut`."""
        particles = [
            p if p.finished or p.chooser is None else p._spawn_(p.chooser) for p in self.particles
        ]
        cut(particles)
        return self._result(particles)

    def _result(self, particles: list[M]) -> Particles[M]:
        records = tuple(self.records)
        deaths = [
            *self.deaths,
            *deaths_of(self.t, particles),
        ]  # some may have died between two steps
        accuracy = functools.partial(log_ml_error, records)
        return Particles(
            particles,
            stats=self.runtime.stats,
            deaths=deaths,
            steps=records,
            accuracy=accuracy,
            recorder=self.recorder,
            limit=self.limit,
        )

    @contextlib.contextmanager
    def _partial_result(self) -> Iterator[None]:
        """Bring the run back to its last complete step if an exception leaves it, which then carries `.particles`.

        A step that was interrupted may have changed objects inside attributes, such as lists. They keep the changes.
        """
        try:
            yield
        except BaseException as error:  # another of several runs may have been interrupted
            if self.t > len(self.records):  # the step is not complete
                self.t = len(self.records)
                self.population = self._begun
                self.population.restore()
            self.deaths = [death for death in self.deaths if death.step <= self.t]
            cut(self.particles)
            setattr(error, "particles", self._result(self.particles))  # noqa: B010
            raise

    def __repr__(self) -> str:
        return f"<SMC {self.expand}, {self.select}: step {self.t}, {describe(self.population)}>"
