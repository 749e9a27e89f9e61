"""Independent runs of the same inference in shared batches, to measure the accuracy of a single run."""

from __future__ import annotations

import functools
import html
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmppl.distributions import logsumexp
from llmppl.inference.gc_freeze import frozen_gc
from llmppl.inference.particles import Particles
from llmppl.models.model import Model
from llmppl.report.progress import Bar
from llmppl.report.tables import frame, html_table, one_line
from llmppl.support.arguments import count, function, generator
from llmppl.support.runtime import Runtime, Stats

if TYPE_CHECKING:
    import pandas

M = TypeVar("M", bound=Model)

MAX_TOGETHER = 16                                       # runs that share batches


@dataclass(frozen=True)
class Repeats(Generic[M]):
    """Independent runs of the same inference.

    runs : tuple of R Particles, whose `stats` are None, since the runs share their work
    log_mls : (R,) float, the log Z-hat of each run; -inf where all particles died
    log_ml : float, log of the mean Z-hat, which is unbiased for Z
    log_ml_se : float or None, standard error of `log_ml` to first order; None for one run, or if all runs died
    stats : Stats, of all runs together
    """

    runs: tuple[Particles[M], ...]
    log_mls: NDArray[np.float64]
    log_ml: float
    log_ml_se: float | None
    stats: Stats

    def __repr__(self) -> str:
        return "\n".join([*self._summary(), str(self.stats)])

    def _repr_html_(self) -> str:
        """Return the same for a notebook, with a table of the runs, the largest Z-hat first. Bars show Z-hat."""
        heads = "run", "log Z-hat", "+-", "ess", "best text"
        order = sorted(range(len(self.runs)), key=lambda i: -self.log_mls[i])
        rows = [(str(i), *_table_row(self.runs[i])) for i in order]
        shares = np.exp(self.log_mls[order] - max(self.log_mls[order[0]], -1e300)).tolist()
        summary = "".join(f"<p>{html.escape(line)}</p>" for line in self._summary())
        return f"{summary}{html_table(heads, rows, shares)}<pre>{html.escape(str(self.stats))}</pre>"

    def to_pandas(self) -> pandas.DataFrame:
        """Return a data frame with a row for each run. ImportError, with the command to install it, without pandas."""
        columns = {name: [getattr(run, name) for run in self.runs] for name in ("log_ml", "log_ml_se", "ess")}
        return frame({"run": range(len(self.runs)), **columns, "num_particles": [len(run) for run in self.runs]})

    def _summary(self) -> list[str]:
        error = "" if self.log_ml_se is None else f" +- {self.log_ml_se:.2g}"
        lines = [f"Repeats({len(self.runs)} runs, log_ml={self.log_ml:.2f}{error})"]
        alive = self.log_mls[self.log_mls > -np.inf]
        if alive.size > 1:
            spread = f"mean {np.mean(alive):.2f}, standard deviation {np.std(alive, ddof=1):.2g}"
            lines += [f"log Z-hat of a run: {spread}, from {np.min(alive):.2f} to {np.max(alive):.2f}"]
        if alive.size < len(self.runs):
            lines += [f"all particles died in {len(self.runs) - alive.size} runs"]
        own = [particles.log_ml_se for particles in self.runs if particles.log_ml_se is not None]
        if own:
            lines += [f"standard error by a single run's own estimate: median {np.median(own):.2g} of {len(own)} runs"]
        return lines


def _table_row(run: Particles[Any]) -> tuple[str, str, str, str]:
    error = "" if run.log_ml_se is None else f"{run.log_ml_se:.2f}"
    return f"{run.log_ml:.2f}", error, f"{run.ess:.1f}", one_line(run.best) if len(run) else "all died"


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
    """
    count("R", R)
    function("run", run, "lambda rng: smc_steer(model, N, K, rng=rng)", takes=1)
    runtime, streams, done = Runtime(), generator(seed, rng).spawn(R), dict[int, Particles[M]]()

    def one(index: int) -> None:
        particles = run(streams[index])
        if not isinstance(particles, Particles):
            raise TypeError(f"repeat wants a function that returns Particles, as smc_steer does, not {particles!r}")
        particles.stats = None
        done[index] = particles

    with frozen_gc(), Bar(progress, R, _state, unit="run") as show:
        for _ in runtime.each(((functools.partial(one, i), f"run {i}") for i in range(R)), MAX_TOGETHER):
            show(len(done), done)
    runs = tuple(done[index] for index in range(R))
    log_mls = np.array([particles.log_ml for particles in runs])
    log_ml = logsumexp(log_mls) - math.log(R)
    log_ml_se = None
    if R > 1 and log_ml > -math.inf:
        log_ml_se = float(np.std(np.exp(log_mls - log_ml), ddof=1) / math.sqrt(R))
    return Repeats(runs, log_mls, log_ml, log_ml_se, runtime.stats)


def _state(done: dict[int, Particles[Any]]) -> str:
    log_mls = [particles.log_ml for particles in done.values()]
    return f"log Z-hat {logsumexp(log_mls) - math.log(len(log_mls)):.2f}"
