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

import contextlib
import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypedDict, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from llmppl.distributions import logsumexp
from llmppl.inference.deaths import Death, died
from llmppl.inference.expansion import EXPANSIONS, Copies, ExpansionName, Extension, Run
from llmppl.inference.gc_freeze import freeze
from llmppl.inference.genealogy import Genealogy, StepRecord, log_ml_error
from llmppl.inference.particles import Particles
from llmppl.inference.resampling import DownSample, ResampleBelow, Scheme, systematic
from llmppl.inference.resuming.checkpoint import Checkpoint
from llmppl.inference.run_guards import GlobalStreams, Watch, begin, checked, cut
from llmppl.models.choices import Sampled
from llmppl.models.model import Model, untwist
from llmppl.models.streams import Stream, spawned, state_of
from llmppl.report.progress import bar, finished
from llmppl.support.arguments import function, generator, one_of, optional_count, unknown_option
from llmppl.support.runtime import Runtime, running

M = TypeVar("M", bound=Model)
Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


class Expand(Protocol):
    """Which successors of the particles a step runs: `Distinct`, `Copies`, or another."""

    @property
    def num_starts(self) -> int: ...

    def __call__(self, run: Run, /) -> list[Extension]: ...


Select = Callable[[np.random.Generator, Floats, bool], tuple[Indices, Floats]]


@dataclass(frozen=True, kw_only=True)
class Step(StepRecord):
    """A step as a run gives it: what is kept of it, and the particles themselves.

    The models in it are the very ones of the run, which go on changing: what you want to keep, read at once.

    candidates : (M,) tuple of Model, after the step and before selection; dead ones have log_weight -inf and a `death`
    particles : Particles, the n survivors with their new log-weights, twists included
    roots : (n,) int, for each survivor the initial particle it descends from
    """

    candidates: tuple[Any, ...]
    particles: Particles[Any]
    roots: Indices


class SMC(Generic[M]):
    """Sequential Monte Carlo, step by step: `for step in SMC(model, expand, select, seed=0)`.

    Each step expands the particles, steps them, weighs them and resamples; it gives a `Step`. The loop ends when every
    particle has finished or died. An exception that leaves a step carries `.particles`, those after the last whole
    step, marked cut; so does a KeyboardInterrupt; the run is then over.

    Parameters
    ----------
    model : Model
        The program; it is copied, never changed.
    expand : callable
        `Distinct(N, K)`, `Copies(N, K)`, or another `expand(run) -> list of Extension` with `num_starts`.
    select : callable
        `DownSample(N)`, `ResampleBelow(N, ess_threshold, scheme)`, or another `select(rng, log_weights, active)` that
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

    `seeded`, `began`, `whole`, `keep_whole` and `replay` are what a `Checkpoint` asks of it.
    """

    def __init__(
        self, model: M, expand: Expand, select: Select, *, seed: int | None = None,
        rng: np.random.Generator | None = None,
    ) -> None:  # fmt: skip
        if not hasattr(expand, "num_starts"):
            raise TypeError(f"expand must be an expansion, as Distinct(N, K) is, not {expand!r}")
        self.expand, self.select = expand, function("select", select, "DownSample(N)")
        self.rng, self.t, self.deaths = generator(seed, rng), 0, list[Death]()
        self.seeded, self.began, self._model = seed is not None or rng is not None, state_of(self.rng), model
        self._runtime = Runtime()
        self.particles = begin(model, [Sampled(stream) for stream in self.rng.spawn(expand.num_starts)])
        for particle in self.particles:                 # equal ones would make equal candidates
            particle._log_weight_ -= math.log(len(self.particles))
        self.genealogy = Genealogy(len(self.particles))
        self._watch = Watch(self._runtime, self.particles[0], bounded=True)
        self.keep_whole()
        self._checkpoint: Checkpoint | None = None
        self._on_step: Callable[[Step], None] | None = None

    @property
    def active(self) -> bool:
        """Whether there is a particle that has not finished."""
        return any(not particle.finished for particle in self.particles)

    @property
    def streams(self) -> GlobalStreams:
        return self._watch.streams

    def advance(self, functions: Sequence[Callable[[], Any]], numbers: Iterable[int] | None = None) -> None:
        """Run functions of particles together, in the name of the particles of these numbers."""
        names = [f"particle {i} at step {self.t}" for i in (range(len(functions)) if numbers is None else numbers)]
        self._runtime.run(functions, names)

    def replay(self, functions: Sequence[Callable[[], Any]], names: Sequence[str]) -> None:
        self._runtime.run(functions, names)

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if not self.active:
            raise StopIteration
        try:
            with self._standing():
                return self._told(*self._next())
        except StopIteration as error:                  # of a step, which must not end the loop
            raise RuntimeError("a step raised StopIteration") from error

    def _next(self) -> tuple[StepRecord, list[M]]:
        self.t += 1
        for particle in self.particles:                 # who was ended between two steps
            if particle.finished:
                untwist(particle)
        self._watch.look()
        extensions = self.expand(self)                                          # expand, and step
        candidates = [each.particle for each in extensions]
        log_weights = np.array([p.log_weight for p in candidates], dtype=np.float64)        # weigh
        self.deaths += died(self.t, candidates)
        ancestors, chosen = self.select(self.rng, log_weights, any(not p.finished for p in candidates))
        self.particles = _take(candidates, ancestors, chosen, spawned(self.rng))            # resample
        self.keep_whole()
        freeze()
        self._watch.step(self.t, candidates, self.particles)
        return self.genealogy.add(extensions, log_weights, ancestors, chosen, self.particles), candidates

    def _told(self, record: StepRecord, candidates: list[M]) -> Step:
        particles = Particles(
            self.particles, stats=self._runtime.stats, deaths=self.deaths, steps=self.genealogy.records
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
        """Go on to the end, or up to step `max_steps`, where particles that have not finished are marked `cut`.

        The options are those of `smc_steer`. Without `max_steps`, a run in which nothing happens any more
        is a RuntimeError.
        """
        optional_count("max_steps", max_steps)
        if on_step is not None:
            function("on_step", on_step, 'Recorder("run.jsonl")')
        if progress is None and running():              # one of several runs; their bars would mix
            progress = False
        self._watch.bounded, self._on_step = max_steps is not None, on_step
        if checkpoint is None and every is not None:
            raise ValueError(f'every={every} is of a checkpoint: give its path, as in checkpoint="run.ckpt"')
        with self._kept(checkpoint, every, max_steps), self._standing(), bar(progress, max_steps, _progress) as show:
            while self.active and self.t < (max_steps or math.inf):
                made = self._next()
                if on_step is not None:
                    on_step(self._told(*made))
                if self._checkpoint is not None:
                    self._checkpoint.step()
                show(self.t, self.particles)
                del made                                # what was not selected goes before the next step waits
            if self._checkpoint is not None:
                self._checkpoint.end()
        cut(self.particles)
        return self._ended(self.particles)

    @contextlib.contextmanager
    def _kept(self, path: str | os.PathLike[str] | None, every: int | None, max_steps: int | None) -> Iterator[None]:
        """Go on from a checkpoint, if there is one, and own its file."""
        if path is None:
            yield
            return
        keeper = Checkpoint(path, every, self, self._model, self._on_step)
        try:
            keeper.begin(max_steps)
            self._checkpoint = keeper
            yield
        finally:
            keeper.close()
            self._checkpoint = None

    def posterior(self) -> Particles[M]:
        """What a run returns that ends here: copies of the particles that have not finished are marked `cut`."""
        ended = [p if p.finished or p.chooser is None else p._spawn_(p.chooser) for p in self.particles]
        cut(ended)
        return self._ended(ended)

    def _ended(self, particles: list[M]) -> Particles[M]:
        records = tuple(self.genealogy.records)
        accuracy = functools.partial(log_ml_error, records)
        deaths = [*self.deaths, *died(self.t, particles)]          # those who died between two steps
        return self._made(particles, deaths=deaths, steps=records, accuracy=accuracy)

    def _made(self, particles: list[M], **told: Any) -> Particles[M]:
        return Particles(particles, stats=self._runtime.stats, recorder=self._on_step, **told)

    def keep_whole(self) -> None:
        """A step is whole: keep the attributes of its particles, some of which the next step changes."""
        self.whole = self.t, [(particle, vars(particle).copy()) for particle in self.particles]

    @contextlib.contextmanager
    def _standing(self) -> Iterator[None]:
        """Give an exception that leaves a run `.particles`. What a step changed in place, such as a list, stays."""
        try:
            yield
        except BaseException as error:                  # of one of several runs, also that another was interrupted
            self.t, whole = self.whole
            for particle, attributes in whole:
                vars(particle).clear()
                vars(particle).update(attributes)
            self.particles = [particle for particle, _ in whole]
            if self._checkpoint is not None:
                self._checkpoint.left(error)
            cut(self.particles)
            deaths = [death for death in self.deaths if death.step <= self.t]
            steps = self.genealogy.records[: self.t]
            setattr(error, "particles", self._made(self.particles, deaths=deaths, steps=steps))      # noqa: B010
            raise

    def __repr__(self) -> str:
        finished = sum(particle.finished for particle in self.particles)
        state = f"step {self.t}, {len(self.particles)} particles, {finished} finished, {_state(self.particles)}"
        return f"<SMC {self.expand}, {self.select}: {state}>"


def _take(candidates: list[M], ancestors: Indices, log_weights: Floats, streams: Iterator[Stream]) -> list[M]:
    """The chosen candidates with their new log-weights; one that was chosen again is copied."""
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


# ---- three makers of runs


class RunOptions(TypedDict, total=False):
    """The options that all algorithms take; `smc_steer` describes them."""

    seed: int | None
    rng: np.random.Generator | None
    max_steps: int | None
    on_step: Callable[[Step], None] | None
    progress: bool | None
    checkpoint: str | os.PathLike[str] | None
    every: int | None


_CALLED = {                                             # what others call an argument
    "num_particles": "N", "n_particles": "N", "particles": "N", "beam_factor": "K", "n_beam": "K",
}  # fmt: skip
A = TypeVar("A", bound=Callable[..., Any])


def _with_run_options(algorithm: A) -> A:
    """Show the options of `RunOptions` in the signature, one by one."""
    signature = inspect.signature(algorithm)
    keyword = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY, default=None)
    kinds = inspect.get_annotations(RunOptions).items()  # ForwardRefs, of which the text is shown
    options = [keyword(name, annotation=getattr(kind, "__forward_arg__", kind)) for name, kind in kinds]
    shown = signature.replace(parameters=[*signature.parameters.values()][:-1] + options)
    setattr(algorithm, "__signature__", shown)           # noqa: B010
    return algorithm


def _run(name: str, model: M, expand: Expand, select: Select, options: RunOptions) -> Particles[M]:
    known = inspect.get_annotations(RunOptions)
    if unknown := [option for option in options if option not in known]:
        of_programs = dict.fromkeys(("max_tokens", "min_tokens", "max_new_tokens", "rule", "prompt"), "max_tokens=20")
        of_programs |= {option: f"rule=Rule({option}=...)" for option in ("temperature", "top_k", "top_p", "min_p")}
        if unknown[0] in of_programs:
            said = f"give it to the program, as in ConstrainedText(lm, prompt, {of_programs[unknown[0]]})"
            raise TypeError(f"{name} takes no {unknown[0]}: {said}")
        if unknown[0] in _CALLED:
            raise TypeError(f"{name} takes no {unknown[0]}: did you mean {_CALLED[unknown[0]]}?")
        raise unknown_option(name, unknown, known)
    run = SMC(model, expand, select, seed=options.get("seed"), rng=options.get("rng"))
    how = {option: value for option, value in options.items() if option not in ("seed", "rng")}
    return run.run(**how)                               # type: ignore[arg-type]


@_with_run_options
def smc_steer(
    model: M, N: int, K: int = 3, *, expand: ExpansionName = "distinct", **options: Unpack[RunOptions]
) -> Particles[M]:
    """SMC steering: K extensions of every active particle, N survivors chosen without replacement.

    Source: Lew et al. 2023, Algorithm 1 (whose weights are N times ours), with the threshold of Fearnhead & Clifford
    (2003) as it is there; `expand="copies"` is that algorithm to the letter.

    .. note:: With expand="distinct", the default, the code of a step before its first `sample` runs twice: once to list
       what can be chosen, and once with the choice made.

    Parameters
    ----------
    model : Model
        The program; it is copied, never changed.
    N, K : int
        Particles kept, and extensions tried for each.
    expand : str
        Which extensions are tried. "distinct": N K different first choices of all particles together, drawn without
        replacement. "copies": K independent copies of each particle, as in Algorithm 1. "merged": the same, but copies
        that made equal choices are merged. All are unbiased; the first has the smallest errors, and runs more tokens,
        since no two of its extensions are the same.
    seed, rng
        Give at most one. The same seed gives the same particles, whatever is cached and however calls are batched, but
        for rounding: in float32 a distribution differs in its last digits with the batch it came from, and may tip a
        choice.
    max_steps : int, optional
        After so many steps, particles that have not finished are returned as they are, marked `cut`.
    on_step : callable, optional
        Called with a `Step` after every step.
    progress : bool, optional
        Show a bar; by default where stderr is a terminal.
    checkpoint : path, optional
        A file from which an interrupted run goes on: called again with the same arguments, it ends with the same
        particles. A run that had ended comes back without being run. `max_steps` may grow. A ValueError says what
        differs where the file is that of another run, which is left as it is.
    every : int, optional
        How many steps to make from one checkpoint to the next; by default as many as keep writing them below 2 % of the
        time. The last is written where the run ends, fails or is interrupted.

    Returns
    -------
    Particles
        At most N, all of positive weight; `log_ml` is the log of an unbiased estimate of Z. Length 0 if all died.
    """
    one_of("expand", expand, EXPANSIONS)
    return _run("smc_steer", checked(model), EXPANSIONS[expand](N, K), DownSample(N), options)


@_with_run_options
def smc_standard(
    model: M, N: int, *, ess_threshold: float = 0.5, resample: Scheme = systematic, **options: Unpack[RunOptions]
) -> Particles[M]:
    """The particle filter: one extension of every particle, resampled when ess < `ess_threshold` N.

    Source: Doucet & Johansen 2009, Sec. 3.5. `resample` is a scheme of `llmppl.inference.resampling`; `optimal` is
    refused, since it leaves N of N particles as they are. The other parameters are those of `smc_steer`.
    """
    return _run("smc_standard", checked(model), Copies(N), ResampleBelow(N, ess_threshold, resample), options)


@_with_run_options
def importance_sampling(model: M, N: int, **options: Unpack[RunOptions]) -> Particles[M]:
    """N independent weighted runs of the program. The parameters are those of `smc_steer`."""
    return _run("importance_sampling", checked(model), Copies(N), ResampleBelow(N, 0.0), options)
