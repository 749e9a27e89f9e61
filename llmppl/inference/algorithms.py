"""Algorithms: SMC steering, the particle filter, importance sampling, and independent repetitions of any of them.

Each one constructs an `SMC`, attaches its observers (checkpoint, `on_step`, progress bar), and runs it.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict, TypeVar, Unpack

import numpy as np

from llmppl.distributions import Floats, logsumexp
from llmppl.inference.expansion import EXPANSIONS, Copies, ExpansionName
from llmppl.inference.particles import Particles
from llmppl.inference.population import describe
from llmppl.inference.resampling import DownSample, ResampleBelow, Scheme, systematic
from llmppl.inference.resuming.checkpoint import Checkpoint
from llmppl.inference.run import Limit, check_model, paced_collector
from llmppl.inference.smc import SMC, Expand, Select, Step
from llmppl.models.model import Model
from llmppl.report.probabilities import Probabilities, Share, key_of
from llmppl.report.progress import Bar
from llmppl.report.tables import TableView, frame
from llmppl.support.arguments import (
    count,
    function,
    generator,
    name_of,
    one_of,
    optional_count,
    plural,
    positive,
)
from llmppl.support.options import check_options, list_options
from llmppl.support.runtime import Runtime, Stats

if TYPE_CHECKING:
    import pandas

M = TypeVar("M", bound=Model)


class RunOptions(TypedDict, total=False):
    """Options of all algorithms; `smc_steer` describes them."""

    seed: int | None
    rng: np.random.Generator | None
    max_steps: int | None
    on_step: Callable[[Step], None] | None
    progress: bool | None
    checkpoint: str | os.PathLike[str] | None
    every: int | None
    version: str
    resume: bool | Literal["force"]
    timeout: float | None
    budget: int | None
    on_timeout: Literal["return", "raise"]
    power: float


_DEFAULTS = {"power": 1.0, "on_timeout": "return", "version": "", "resume": True}
_OF_CHECKPOINT = {"every": None, "version": "", "resume": True}  # options of no use without one


def _run(
    algorithm: Callable[..., Any], model: M, expand: Expand, select: Select, options: RunOptions
) -> Particles[M]:
    check_options(algorithm.__name__, options, inspect.signature(algorithm).parameters)
    on_step = options.get("on_step")
    path = options.get("checkpoint")
    max_steps = optional_count("max_steps", options.get("max_steps"))
    for option, default in _OF_CHECKPOINT.items():
        given = options.get(option, default)
        if path is None and given != default:
            raise ValueError(
                f'{option}={given!r} is of a checkpoint: give its path, as in checkpoint="run.ckpt"'
            )
    run = SMC(
        model,
        expand,
        select,
        seed=options.get("seed"),
        rng=options.get("rng"),
        power=options.get("power", 1.0),
    )
    limit = Limit(
        run.runtime,
        options.get("timeout"),
        options.get("budget"),
        options.get("on_timeout", "return"),
    )
    observers = []
    if on_step is not None:
        run.recorder = call = function("on_step", on_step, 'Recorder("run.jsonl")')
        observers.append(lambda run, record, candidates: call(run.as_step(record, candidates)))
    with ExitStack() as stack:
        if path is not None:
            observers.append(stack.enter_context(Checkpoint(path, run, model, options)))
        show = stack.enter_context(Bar(options.get("progress"), max_steps, describe))
        observers.append(lambda run, record, candidates: show(run.t, run.population))
        return run.run(max_steps=max_steps, observers=observers, limit=limit)


@list_options(RunOptions, _DEFAULTS)
def smc_steer(
    model: M,
    N: int,
    K: int = 3,
    *,
    expand: ExpansionName = "distinct",
    **options: Unpack[RunOptions],
) -> Particles[M]:
    """Run SMC steering: K extensions of every active particle, N survivors chosen without replacement.

    Source: Lew et al. 2023, Algorithm 1 (whose weights are N times ours), with its threshold of Fearnhead & Clifford
    (2003).

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
        completed run without running it. `max_steps` may grow. ValueError if the file is of another run, by the name
        and the source of the program's class, its attributes that are plain data, the options, or `version`.
    every : int, optional
        Number of steps between two checkpoints; by default as many as keep the time of writing below 2 %.
    version : str
        A text of yours that tells runs apart. Change it when critics, language models or data change.
    resume : True or "force"
        "force" continues the checkpoint of another run.
    timeout, budget : float and int, optional
        Seconds, and tokens that the language model runs. After the step that reaches one, unfinished particles are
        returned marked `cut`, and `limit` names it.
    on_timeout : str
        "raise": a run that reaches a limit raises a TimeoutError, whose `particles` are those of its last step.
    power : float
        The target is the joint probability raised to this power: of choices, `observe` and `score`. Above 1 it is
        sharper. Steps propose from the tempered distributions, with exact weights.

    Returns
    -------
    Particles
        At most N, all of positive weight; `log_ml` is the log of an unbiased estimate of Z. Length 0 if all died.

    Examples
    --------
    >>> posterior = smc_steer(ConstrainedText(lm, "He was", [" happy", " sad"]), N=4, K=3, seed=0)
    >>> round(posterior.log_ml, 2)
    -5.1
    >>> {text: round(share, 2) for text, share in posterior.by_text().items()}
    {' happy': 0.61, ' sad': 0.39}
    """
    one_of("expand", expand, EXPANSIONS)
    return _run(smc_steer, check_model(model), EXPANSIONS[expand](N, K), DownSample(N), options)


@list_options(RunOptions, _DEFAULTS)
def smc_standard(
    model: M,
    N: int,
    *,
    ess_threshold: float = 0.5,
    resample: Scheme = systematic,
    **options: Unpack[RunOptions],
) -> Particles[M]:
    """Run the particle filter: one extension of every particle, resampled when ess < `ess_threshold` N.

    Source: Doucet & Johansen 2009, Sec. 3.5. `resample` is a scheme of `llmppl.inference.resampling`; `optimal` is a
    ValueError, since it leaves N of N particles as they are. The other parameters are those of `smc_steer`.

    Examples
    --------
    >>> len(smc_standard(ConstrainedText(lm, "He was", [" happy", " sad"]), N=4, seed=0))
    4
    """
    return _run(
        smc_standard,
        check_model(model),
        Copies(N),
        ResampleBelow(N, ess_threshold, resample),
        options,
    )


@list_options(RunOptions, _DEFAULTS)
def importance_sampling(model: M, N: int, **options: Unpack[RunOptions]) -> Particles[M]:
    """Run the program N times independently, with weights. The parameters are those of `smc_steer`.

    Examples
    --------
    >>> len(importance_sampling(ConstrainedText(lm, "He was", [" happy", " sad"]), N=4, seed=0))
    4
    """
    return _run(importance_sampling, check_model(model), Copies(N), ResampleBelow(N, 0.0), options)


# ---- repetitions


MAX_TOGETHER = 16  # runs that share batches
TUNED = "N", "K", "log Z-hat", "spread", "ess", "tokens", "seconds"


@dataclass(frozen=True)
class Repeats(Generic[M]):
    """Independent runs of the same inference.

    runs : tuple of R Particles, whose `stats` are None, since the runs share their work
    log_mls : (R,) float, the log Z-hat of each run
    log_ml : float, log of the mean Z-hat, which is unbiased for Z
    log_ml_se : float or None, standard error of `log_ml` by the jackknife over the runs; for few runs it is wider, by
        Student's t and the errors of the runs; None if fewer than two runs are alive
    stats : Stats, of all runs together

    Examples
    --------
    >>> program = ConstrainedText(lm, "He was", [" happy", " sad"])
    >>> runs = repeat(lambda rng: smc_steer(program, N=2, K=2, rng=rng), R=5, seed=0)
    >>> len(runs.runs), round(runs.log_ml, 1), round(runs.spread, 1)
    (5, -5.3, 0.3)
    """

    runs: tuple[Particles[M], ...]
    log_mls: Floats
    log_ml: float
    log_ml_se: float | None
    stats: Stats

    @property
    def spread(self) -> float:
        """Standard deviation of `log_mls`; inf if all particles died in a run."""
        return float(np.std(self.log_mls, ddof=1)) if self.log_mls.min() > -math.inf else math.inf

    def by(self, key: str | Callable[[Any], Any]) -> Probabilities:
        """Return the posterior probability of each value of a key, as `Particles.by`, over all runs by their Z-hat.

        The standard error is that of the disagreement of the runs, as for `log_ml`.
        """
        alive = np.flatnonzero(self.log_mls > -np.inf)
        if not alive.size:
            raise ValueError(f"no particle is left in any of {len(self.runs)} runs")
        values = dict[Hashable, Any]()
        found = defaultdict[Hashable, Floats](lambda: np.zeros(len(self.runs)))
        own = defaultdict[Hashable, Floats](lambda: np.zeros(len(self.runs)))
        for run in alive:
            for share in self.runs[run].by(key).shares:
                place = key_of(share.value)
                values.setdefault(place, share.value)
                found[place][run] = share.probability
                own[place][run] = share.se or 0.0
        shares = []
        for place, value in values.items():
            mean, error = mean_over_runs(self.log_mls, found[place], own[place])
            if error is None:
                shares.append(Share(value, mean, 0.0, 1.0))
            else:
                shares.append(Share(value, mean, se=error))
        name = key if isinstance(key, str) else name_of(key)
        return Probabilities(
            shares, f"{name}: {plural(len(shares), 'value')} of {plural(len(self.runs), 'run')}"
        )

    def to_pandas(self) -> pandas.DataFrame:
        """Return a data frame with a row for each run."""
        rows = []
        for i, run in enumerate(self.runs):
            figures = {"log_ml": run.log_ml, "log_ml_se": run.log_ml_se, "ess": run.ess}
            rows.append({"run": i, **figures, "num_particles": len(run)})
        return frame(rows)

    def __repr__(self) -> str:
        error = "" if self.log_ml_se is None else f" +- {self.log_ml_se:.2g}"
        lines = [f"Repeats({plural(len(self.runs), 'run')}, log_ml={self.log_ml:z.2f}{error})"]
        alive = self.log_mls[self.log_mls > -np.inf]
        if alive.size > 1:
            spread = f"mean {np.mean(alive):.2f}, standard deviation {np.std(alive, ddof=1):.2g}"
            lines.append(
                f"log Z-hat of a run: {spread}, from {np.min(alive):.2f} to {np.max(alive):.2f}"
            )
        if alive.size < len(self.runs):
            lines.append(f"all particles died in {len(self.runs) - alive.size} runs")
        own = [run.log_ml_se for run in self.runs if run.log_ml_se is not None]
        if own:
            median = f"median {np.median(own):.2g} of {len(own)} runs"
            lines.append(f"standard error by a single run's own estimate: {median}")
        return "\n".join([*lines, str(self.stats)])


def repeat(
    run: Callable[[np.random.Generator], Particles[M]],
    R: int,
    *,
    seed: int | None = None,
    rng: np.random.Generator | None = None,
    progress: bool | None = None,
) -> Repeats[M]:
    """Return R independent runs, which share batches and cache. Their spread measures the accuracy of one run.

    Parameters
    ----------
    run : callable
        The inference, as a function of a random stream: `lambda rng: smc_steer(model, N=20, K=3, rng=rng)`. TypeError
        if it returns anything but Particles.
    R : int
        Number of runs. Up to 16 run at the same time.
    seed, rng
        Give at most one. The runs get `rng.spawn(R)`, and return the same as one after another.
    progress : bool, optional
        Show a bar; by default if stderr is a terminal.

    Examples
    --------
    >>> program = ConstrainedText(lm, "He was", [" happy", " sad"])
    >>> runs = repeat(lambda rng: smc_steer(program, N=2, K=2, rng=rng), R=5, seed=0)
    >>> round(runs.log_ml, 1)
    -5.3
    """
    count("R", R)
    function("run", run, "lambda rng: smc_steer(model, N, K, rng=rng)", takes=1)
    runtime = Runtime()
    streams = generator(seed, rng).spawn(R)
    done = {}

    def one(index: int) -> None:
        particles = run(streams[index])
        if not isinstance(particles, Particles):
            raise TypeError(
                f"repeat wants a function that returns Particles, as smc_steer does, not {particles!r}"
            )
        particles.stats = None
        done[index] = particles

    with (
        paced_collector(),
        Bar(progress, R, lambda runs: f"log Z-hat {_log_mean(runs)[1]:.2f}", unit="run") as show,
    ):
        for _ in runtime.each(
            ((functools.partial(one, i), f"run {i}") for i in range(R)), MAX_TOGETHER
        ):
            show(len(done), [*done.values()])
    runs = tuple(done[index] for index in range(R))
    log_mls, log_ml = _log_mean(runs)
    own = np.array([particles.log_ml_se or 0.0 for particles in runs])
    return Repeats(runs, log_mls, log_ml, error_of_mean(log_mls, own), runtime.stats)


def mean_over_runs(log_mls: Floats, values: Floats, own: Floats) -> tuple[float, float | None]:
    """Return the mean of the values of R runs, weighted by their Z-hat, and its error as in `error_of_mean`."""
    shares = np.exp(log_mls - logsumexp(log_mls))
    mean = min(float(shares @ values), 1.0)
    if np.count_nonzero(shares) < 2:
        return mean, None
    without = []
    for run in range(log_mls.size):
        others = np.delete(shares, run)
        without.append(others @ np.delete(values, run) / others.sum())
    return mean, _jackknife(without, shares * own)


def _jackknife(without: Sequence[float], own: Floats) -> float:
    """Return the standard error of an estimate from R runs, by (R,) estimates without each run.

    It is the jackknife, times half the 95 % quantile of Student's t. The own errors of the runs, (R,), as parts of the
    estimate, count for few runs, which may agree by chance.
    """
    R = len(without)
    widened = 1 + 0.9 / (R - 1) + 2.8 / (R - 1) ** 2
    variance = (R - 1) * widened**2 * np.var(without)
    variance += 2 / (R - 1) * np.sum(own**2)
    return float(math.sqrt(variance))


def error_of_mean(log_mls: Floats, own: Floats) -> float | None:
    """Return the standard error of the log of the mean of R >= 2 estimates with errors of their own, (R,) each."""
    if np.count_nonzero(log_mls > -np.inf) < 2:
        return None
    without = [logsumexp(np.delete(log_mls, run)) for run in range(log_mls.size)]
    shares = np.exp(log_mls - logsumexp(log_mls))
    return _jackknife(without, shares * own)


def _log_mean(runs: Sequence[Particles[Any]]) -> tuple[Floats, float]:
    """Return the log Z-hat of each run, and the log of their mean."""
    log_mls = np.array([particles.log_ml for particles in runs])
    return log_mls, logsumexp(log_mls) - math.log(len(runs))


class Tuning(TableView, dict[tuple[int, int], Repeats[Any]]):
    """Result of `tune`: the runs of each (N, K), displayed as a table of means over them.

    The spread is the standard deviation of log Z-hat, inf if all particles died in a run. In a notebook, the bars show
    log Z-hat and its spread to both sides.

    Examples
    --------
    >>> sizes = tune(ConstrainedText(lm, "He was", [" happy", " sad"]), N=(1, 4), K=2, R=5, seed=0)
    >>> {size: round(runs.spread, 1) for size, runs in sizes.items()}
    {(1, 2): 3.4, (4, 2): 0.0}
    """

    numbers = True

    def __init__(
        self, runs: Iterable[tuple[tuple[int, int], Repeats[Any]]], tolerance: float
    ) -> None:
        super().__init__(runs)
        self.tolerance = tolerance

    @property
    def cheapest(self) -> tuple[int, int] | None:
        """(N, K) of the fewest tokens, then the smallest N K, with a spread within the tolerance; None without one."""
        fitting = [size for size, runs in self.items() if runs.spread <= self.tolerance]
        return min(
            fitting, key=lambda size: (self[size].stats.tokens, math.prod(size)), default=None
        )

    def records(self) -> list[dict[str, Any]]:
        """Return a dict for each N and K."""
        return [dict(zip(TUNED, row, strict=True)) for row in self._rows()]

    def _rows(self) -> Iterator[tuple[float, ...]]:
        for size, repeats in self.items():
            R = len(repeats.runs)
            mean = float(np.mean(repeats.log_mls))
            ess = sum(run.ess for run in repeats.runs) / R
            tokens = repeats.stats.tokens / R
            yield *size, mean, repeats.spread, ess, tokens, repeats.stats.seconds / R

    def _header(self) -> str:
        best = "no size has"
        if self.cheapest is not None:
            best = "N={}, K={} is the cheapest size with".format(*self.cheapest)
        return f"Tuning: {best} a spread of at most {self.tolerance:g}"

    def _table(self) -> tuple[Sequence[str], list[list[str]]]:
        form = "{} {} {:.2f} {:.2g} {:.1f} {:.0f} {:.2g}"
        return TUNED, [form.format(*row).split() for row in self._rows()]

    def _bars(self) -> list[list[tuple[float, ...]]]:
        mean, spread = np.array([*self._rows()])[:, 2:4].T
        known = np.isfinite(mean)
        spread[~known] = 0.0
        ends = mean - np.min(mean - spread, where=known, initial=np.inf) + spread * [[0], [-1], [1]]
        return [[tuple(each)] for each in np.where(known, ends, 0.0).T.tolist()]


def tune(
    program: Model,
    N: int | Sequence[int] = (4, 12, 36),
    K: int | Sequence[int] = (1, 3),
    *,
    R: int = 10,
    tolerance: float = 0.5,
    seed: int | None = None,
    before: Callable[[], object] = lambda: None,
    **options: Any,
) -> Tuning:
    """Run `smc_steer(program, n, k)` R times for each n of `N` and k of `K`, and compare the spreads of log Z-hat.

    Parameters
    ----------
    program : Model
    N, K : int, or sequence of int
    R : int, at least 2
    tolerance : float, above 0
        Largest spread, in nats, that is good enough.
    before : callable, optional
        Called before each size. `lm.clear` empties the cache, which makes the tokens of the sizes comparable.
    seed, **options
        As in `smc_steer`. TypeError for an unknown option, ValueError for a size or number that is too small.

    Examples
    --------
    >>> program = ConstrainedText(lm, "He was", [" happy", " sad"])
    >>> tune(program, N=(1, 4), K=2, R=5, tolerance=0.5, seed=0).cheapest
    (4, 2)
    """
    stream = generator(seed)
    count("R", R, 2)
    positive("tolerance", tolerance)
    sizes = []
    for n in np.ravel(N).tolist():
        for k in np.ravel(K).tolist():
            sizes.append((count("N", n), count("K", k)))

    def measured(n: int, k: int) -> Repeats[Any]:
        before()
        return repeat(lambda rng: smc_steer(program, n, k, rng=rng, **options), R, rng=stream)

    return Tuning([(size, measured(*size)) for size in sizes], tolerance)
