"""Particles: what inference returns, a weighted sample of finished runs of a model.

The weights are not normalised: their sum is an unbiased estimate of Z, and  E[sum_i w_i f(x_i)]  is the unnormalised
expectation of f. `weights` are the normalised ones, W_i = w_i / sum_j w_j, by which particles are drawn and averaged.
Only particles of positive weight are kept; the others are counted in `deaths`, with the step and the reason. Where
all have died there is nothing to draw, the estimate of Z is 0, and asking for a particle tells what they died of.

A particle is *cut* if `max_steps` ended it before its program did: it is a prefix of a run, weighted as such.

Source: Kong, Liu & Wong (1994), "Sequential imputations and Bayesian missing data problems", for the ess.
"""

import html
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["Death", "Particle", "Particles"]

MAX_ROWS = 20               # particles shown
MAX_TEXT = 90               # characters shown of each
MAX_REASONS = 5             # deaths told


class Particle(Protocol):
    """What `Particles` needs to know of a particle; `str(particle)` is its text."""

    @property
    def log_weight(self) -> float: ...

    @property
    def cut(self) -> bool: ...


P = TypeVar("P", bound=Particle, covariant=True)


@dataclass(frozen=True)
class Death:
    """`count` particles died at `step`, by `reason`."""

    step: int
    reason: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.count} at step {self.step} by {self.reason}"


class Particles(Sequence[P]):
    """A sequence of n weighted particles, all of positive weight.

    Parameters
    ----------
    particles : iterable of particles
        Those of log weight -inf are left out; ValueError for NaN and +inf. They are read once, never changed.
    stats : object, optional
        What the run cost; shown by `str`.
    deaths : iterable of Death, optional
        What became of the others.

    Attributes
    ----------
    log_weights : (n,) float64 ndarray, read-only
    weights : (n,) float64 ndarray, read-only
        The normalised weights, sum 1.
    log_ml : float
        logsumexp(log_weights), the log of an unbiased estimate of Z; -inf if n is 0.
    ess : float
        The effective sample size, 1 / sum_i W_i^2, from 1 to n; 0 if n is 0.
    deaths : tuple of Death
        In order of step, then of count, the largest first; one for each step and reason.
    """

    def __init__(self, particles: Iterable[P], *, stats: object = None, deaths: Iterable[Death] = ()) -> None:
        everyone = list(particles)
        for i, particle in enumerate(everyone):
            if not particle.log_weight < np.inf:    # so is NaN
                raise ValueError(f"particle {i} has log weight {particle.log_weight}; it is finite, or -inf if dead")
        self._particles = [particle for particle in everyone if particle.log_weight > -np.inf]
        self.log_weights: NDArray[np.float64] = np.array([p.log_weight for p in self._particles], dtype=np.float64)
        self.log_ml = float(np.logaddexp.reduce(self.log_weights, initial=-np.inf))
        weights = np.exp(self.log_weights - np.max(self.log_weights, initial=-np.inf))      # (n,) the largest is 1
        self.weights: NDArray[np.float64] = weights / np.sum(weights)
        self.ess = float(1 / np.sum(self.weights**2)) if self._particles else 0.0
        self.log_weights.flags.writeable = self.weights.flags.writeable = False
        self.stats = stats
        self.deaths = _together(deaths)

    def __len__(self) -> int:
        return len(self._particles)

    def __iter__(self) -> Iterator[P]:
        return iter(self._particles)

    @overload
    def __getitem__(self, index: int) -> P: ...

    @overload
    def __getitem__(self, index: slice) -> list[P]: ...

    def __getitem__(self, index: int | slice) -> P | list[P]:
        """A particle for an index, a list for a slice (part of the weights estimates nothing)."""
        return self._particles[index]

    @property
    def best(self) -> P:
        """The particle of highest weight, the first if several have it. ValueError if none is left."""
        self._need_one()
        return self._particles[int(np.argmax(self.log_weights))]

    @overload
    def sample(self, n: None = None, *, seed: int | None = None, rng: np.random.Generator | None = None) -> P: ...

    @overload
    def sample(self, n: int, *, seed: int | None = None, rng: np.random.Generator | None = None) -> list[P]: ...

    def sample(
        self, n: int | None = None, *, seed: int | None = None, rng: np.random.Generator | None = None
    ) -> P | list[P]:
        """One particle drawn by weight, or a list of `n` independent draws.

        Raises
        ------
        ValueError
            If no particle is left; if `n` is negative; if both `seed` and `rng` are given.
        """
        if seed is not None and rng is not None:
            raise ValueError("sample takes a seed or an rng, not both")
        if n is not None and operator.index(n) < 0:
            raise ValueError(f"cannot draw n={n} particles; n is at least 0, or None for one that is not in a list")
        self._need_one()
        rng = np.random.default_rng(seed) if rng is None else rng
        drawn = [self._particles[i] for i in rng.choice(len(self), size=1 if n is None else n, p=self.weights)]
        return drawn[0] if n is None else drawn

    @overload
    def expect(self, f: Callable[[P], float]) -> float: ...

    @overload
    def expect(self, f: Callable[[P], NDArray[Any]]) -> NDArray[np.float64]: ...

    def expect(self, f: Callable[[P], float | NDArray[Any]]) -> float | NDArray[np.float64]:
        """sum_i W_i f(particle_i): the estimate of the posterior mean of f.

        Parameters
        ----------
        f : function from a particle to a float, a bool or an ndarray
            Arrays must all have one shape.

        Returns
        -------
        float, or ndarray of the shape that f returns
            ValueError if no particle is left.
        """
        self._need_one()
        mean = np.tensordot(self.weights, np.asarray([f(particle) for particle in self]), axes=1)
        return float(mean) if mean.ndim == 0 else mean

    def __repr__(self) -> str:
        lines = [self._header()]
        if len(self):
            lines += ["", "weight  log weight  text"]
        else:
            lines += [self._causes()]
        lines += [f"{weight:6.3f}  {log_weight:10.2f}  {text}" for weight, log_weight, text in self._rows()]
        if len(self) > MAX_ROWS:
            lines += [f"... and {len(self) - MAX_ROWS} more"]
        if self.stats is not None:
            lines += ["", str(self.stats)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The same for a notebook; it sets no colours, so that it reads in light and dark themes."""
        parts = [f"<p>{html.escape(self._header())}</p>"]
        if len(self):
            rows = "".join(
                f"<tr><td>{weight:.3f}</td><td>{log_weight:.2f}</td>"
                f'<td style="text-align: left; white-space: pre-wrap">{html.escape(text)}</td></tr>'
                for weight, log_weight, text in self._rows()
            )
            head = '<tr><th>weight</th><th>log weight</th><th style="text-align: left">text</th></tr>'
            parts += [f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"]
        else:
            parts += [f"<p>{html.escape(self._causes())}</p>"]
        if len(self) > MAX_ROWS:
            parts += [f"<p>... and {len(self) - MAX_ROWS} more</p>"]
        if self.stats is not None:
            parts += [f"<pre>{html.escape(str(self.stats))}</pre>"]
        return "".join(parts)

    def _header(self) -> str:
        return f"Particles({len(self)} of positive weight, log_ml={self.log_ml:.2f}, ess={self.ess:.1f})"

    def _rows(self) -> list[tuple[float, float, str]]:
        """Weight, log weight and text of the heaviest, one line each."""
        heaviest = np.argsort(-self.log_weights, kind="stable")[:MAX_ROWS]
        return [
            (self.weights[i], self.log_weights[i], _line(self[i]) + " [cut]" * bool(self[i].cut))
            for i in heaviest
        ]

    def _need_one(self) -> None:
        if not len(self):
            raise ValueError(f"no particle is left: {self._causes()}; log_ml is -inf")

    def _causes(self) -> str:
        if not self.deaths:
            return "none was given a positive weight, and no death was recorded"
        told = sorted(self.deaths, key=lambda death: (-death.count, -death.step))
        causes = [str(death) for death in told[:MAX_REASONS]]
        if told[MAX_REASONS:]:
            causes.append(f"{sum(death.count for death in told[MAX_REASONS:])} for other reasons")
        return f"all died by step {max(death.step for death in told)}: {'; '.join(causes)}"


def _together(deaths: Iterable[Death]) -> tuple[Death, ...]:
    """One death for each step and reason, with their counts added."""
    counts: dict[tuple[int, str], int] = {}
    for death in deaths:
        counts[death.step, death.reason] = counts.get((death.step, death.reason), 0) + death.count
    together = (Death(step, reason, count) for (step, reason), count in counts.items())
    return tuple(sorted(together, key=lambda death: (death.step, -death.count)))


def _line(particle: object) -> str:
    """The text on one line, what cannot be printed escaped, the middle left out where it is long."""
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(particle))
    if len(text) <= MAX_TEXT:
        return text
    end = MAX_TEXT // 3                             # particles often share their beginning
    return f"{text[: MAX_TEXT - end - 3]} … {text[-end:]}"
