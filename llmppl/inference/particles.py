"""Particles: what inference returns, a weighted sample of finished runs of a model.

The weights are not normalised: their sum is an unbiased estimate of Z, and  E[sum_i w_i f(x_i)]  is the unnormalised
expectation of f. `weights` are the normalised ones, W_i = w_i / sum_j w_j, by which particles are drawn and averaged.
Only particles of positive weight are kept; the others are counted in `deaths`, with the step and the reason. Where
all have died there is nothing to draw, the estimate of Z is 0, and asking for a particle tells what they died of.

A particle is *cut* if `max_steps` ended it before its program did: it is a prefix of a run, weighted as such.

A pickle of Particles is without the language model: for particles it has `SavedParticle`s.

Source: Kong, Liu & Wong (1994), "Sequential imputations and Bayesian missing data problems", for the ess.
"""

import functools
import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from llmppl.arguments import generator, optional_count, shown
from llmppl.display.svg import bar, curve
from llmppl.inference.genealogy import StepRecord
from llmppl.inference.saved import saved
from llmppl.shared import Shared

__all__ = ["Death", "Deaths", "Particle", "Particles", "died"]

MAX_ROWS = 20               # particles shown
MAX_TEXT = 90               # characters shown of each
MAX_REASONS = 5             # deaths told
MAX_END = 100               # characters kept of a dead particle's text,
MAX_REASON = 200            # and of what it died of
CURVE_WIDTH = 240           # px


class Particle(Protocol):
    """What `Particles` needs to know of a particle; `str(particle)` is its text."""

    @property
    def log_weight(self) -> float: ...

    @property
    def cut(self) -> bool: ...

    @property
    def attribution(self) -> dict[str, float]: ...


P = TypeVar("P", bound=Particle, covariant=True)


def _unknown() -> tuple[None, str]:
    return None, "only what smc_steer, smc_standard or importance_sampling returns knows its standard error"


@dataclass(frozen=True)
class Death:
    """`count` particles died at `step`, by `reason`, which names the statement; `text` is the text of one of them.

    Of a long text the last hundred characters are kept, after "…"; of a long reason the beginning and the end.
    """

    step: int
    reason: str
    count: int = 1
    text: str = ""

    def __post_init__(self) -> None:
        if len(self.text) > MAX_END:                    # else a run would keep all texts of all its dead
            object.__setattr__(self, "text", "…" + self.text[1 - MAX_END :])
        object.__setattr__(self, "reason", _without_middle(self.reason, MAX_REASON))

    def __str__(self) -> str:
        return f"{self.count} at step {self.step}: {self.reason}{self.example}"

    @property
    def example(self) -> str:
        """What is told of the text."""
        return f", one with the text {_line(self.text)!r}" if self.text else ""


class Deaths(tuple[Death, ...]):
    """What the particles died of that are not there: one `Death` for each step and reason.

    In order of step, then of count, the largest first. The repr adds up the steps.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        rows = self.by_reason()
        lines = [f"Deaths({self.number} particles)"]
        if rows:
            lines += ["", " count      steps  reason"]
        lines += [f"{count:6}  {steps:>9}  {reason}" for count, steps, reason in rows[:MAX_ROWS]]
        if rows[MAX_ROWS:]:
            lines += [f"{sum(row[0] for row in rows[MAX_ROWS:]):6}  {'':>9}  for {len(rows) - MAX_ROWS} other reasons"]
        return "\n".join(lines)

    @property
    def number(self) -> int:
        """How many particles died."""
        return sum(death.count for death in self)

    def by_reason(self) -> list[tuple[int, str, str]]:
        """Of each reason how many, at which steps, and the reason with the text of the last; the commonest first."""
        by_reason: dict[str, list[Death]] = {}
        for death in self:
            by_reason.setdefault(death.reason, []).append(death)
        rows = []
        for reason, deaths in sorted(by_reason.items(), key=lambda each: -each[1][-1].step):
            steps = list(dict.fromkeys([str(deaths[0].step), str(deaths[-1].step)]))
            rows.append((sum(death.count for death in deaths), "-".join(steps), reason + deaths[-1].example))
        return sorted(rows, key=lambda row: -row[0])


def died(step: int, particles: Iterable[Any]) -> list[Death]:
    """The deaths of those of log weight -inf, one for each reason."""
    deaths: dict[str, Death] = {}
    for particle in particles:
        if particle.log_weight == -np.inf:
            reason = particle.death or "weight zero"
            known = deaths.get(reason)
            deaths[reason] = replace(known, count=known.count + 1) if known else Death(step, reason, 1, str(particle))
    return list(deaths.values())


class Particles(Shared, Sequence[P]):
    """A sequence of n weighted particles, all of positive weight.

    Parameters
    ----------
    particles : iterable of particles
        Those of log weight -inf are left out; ValueError for NaN and +inf. They are read once, never changed.
    stats : object, optional
        What the run cost; shown by `str`.
    deaths : iterable of Death, optional
        What became of the others.
    steps : iterable of StepRecord, optional
        The steps that led to them.
    accuracy : callable, optional
        Gives `log_ml_se` and `log_ml_se_reason` when one of them is asked for.

    Attributes
    ----------
    log_weights : (n,) float64 ndarray, read-only
    weights : (n,) float64 ndarray, read-only
        The normalised weights, sum 1.
    log_ml : float
        logsumexp(log_weights), the log of an unbiased estimate of Z; -inf if n is 0.
    ess : float
        The effective sample size, 1 / sum_i W_i^2, from 1 to n; 0 if n is 0.
    deaths : Deaths
        A tuple of `Death`, one for each step and reason; its repr is a table.
    steps : tuple of StepRecord
        The steps of the run in figures; empty where there were none.
    log_ml_se : float or None
        Standard error of log_ml, estimated from this run alone; None where one run cannot tell. It knows of what the
        particles have met: where a rare event carries the mass and none has met it, log_ml is nats too low and its
        error small. An integer that must end in time: log_ml -23.3 +- 0.4, and log Z above -12.1 (docs/inference.md,
        "What a run tells of itself").
    log_ml_se_reason : str
        Why `log_ml_se` is None, else "".
    """

    def __init__(
        self,
        particles: Iterable[P],
        *,
        stats: object = None,
        deaths: Iterable[Death] = (),
        steps: Iterable[StepRecord] = (),
        accuracy: Callable[[], tuple[float | None, str]] = _unknown,
    ) -> None:
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
        self.steps = tuple(steps)
        self._accuracy = accuracy

    @functools.cached_property
    def _error(self) -> tuple[float | None, str]:
        return self._accuracy()

    @property
    def log_ml_se(self) -> float | None:
        return self._error[0]

    @property
    def log_ml_se_reason(self) -> str:
        return self._error[1]

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
    def texts(self) -> list[str]:
        return [str(particle) for particle in self]

    def by_text(self) -> dict[str, float]:
        """The different texts, each with the normalised weights of its particles added up, the largest first."""
        total: dict[str, float] = {}
        for text, weight in zip(self.texts, self.weights.tolist(), strict=True):
            total[text] = total.get(text, 0.0) + weight
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold of it: `log_ml`, `log_ml_se`, and of each particle its text, log weight and mark as cut.

        Where no particle is left, `log_ml` is None, and "deaths" lists what they died of.
        """
        told: dict[str, Any] = {
            "log_ml": self.log_ml if len(self) else None,
            "log_ml_se": self.log_ml_se,
            "texts": self.texts,
            "log_weights": self.log_weights.tolist(),
            "cut": [bool(particle.cut) for particle in self],
        }
        return told if len(self) else {**told, "deaths": [vars(death) for death in self.deaths]}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_particles": [saved(particle) for particle in self]}

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
        n = optional_count("n", n, least=0)
        self._need_one()
        rng = generator(seed, rng)
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
        values = [f(particle) for particle in self]
        try:
            array = np.asarray(values)
            mean = np.tensordot(self.weights, np.asarray(array, dtype=np.result_type(array, np.float64)), axes=1)
        except (TypeError, ValueError):
            raise TypeError(
                f"expect averages numbers, or arrays of one shape, and of the first particle f returned "
                f"{shown(values[0])}: for texts there is by_text(), and expect(lambda p: p.s == {str(self[0])[:20]!r}) "
                "is a probability"
            ) from None
        return float(mean) if mean.ndim == 0 else mean

    def mean_attribution(self) -> dict[str, float]:
        """What each statement has added to the log-weight: its weighted mean over the particles, the largest first.

        A particle that a statement did not weigh counts as 0. The sum over the statements is not `log_ml`: twists, the
        particles that died or were not selected, and what selection and the choice of candidates did to weights belong
        to no statement. ValueError if no particle is left.
        """
        self._need_one()
        total: dict[str, float] = {}
        for weight, particle in zip(self.weights.tolist(), self, strict=True):
            for statement, log_w in particle.attribution.items():
                total[statement] = total.get(statement, 0.0) + weight * log_w
        return dict(sorted(total.items(), key=lambda item: -abs(item[1])))

    def __repr__(self) -> str:
        rows = [f"{weight:6.3f}  {log_weight:10.2f}  {text}" for weight, log_weight, text in self._rows()]
        table = ["", "weight  log weight  text", *rows] if rows else [self._causes()]
        stats = [] if self.stats is None else ["", str(self.stats)]
        return "\n".join([self._header(), *table, *self._rest(), *stats])

    def _repr_html_(self) -> str:
        """The same for a notebook; it sets no colours, so that it reads in light and dark themes."""
        largest = max(self.weights, default=1.0)
        rows = "".join(
            f"<tr><td>{bar(weight / largest)}</td><td>{weight:.3f}</td><td>{log_weight:.2f}</td>"
            f'<td style="text-align: left; white-space: pre-wrap">{html.escape(text)}</td></tr>'
            for weight, log_weight, text in self._rows()
        )
        head = '<tr><th></th><th>weight</th><th>log weight</th><th style="text-align: left">text</th></tr>'
        table = f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"
        parts = [f"<p>{html.escape(self._header())}</p>"]
        parts += [f"<p>{self._curves()}</p>"] * (len(self.steps) > 1)
        parts += [table if rows else f"<p>{html.escape(self._causes())}</p>"]
        parts += [f"<p>{line}</p>" for line in self._rest()]
        parts += [f"<pre>{html.escape(str(self.stats))}</pre>"] * (self.stats is not None)
        return "".join(parts)

    def _rest(self) -> list[str]:
        """How many particles are not shown."""
        return [f"... and {len(self) - MAX_ROWS} more"] * (len(self) > MAX_ROWS)

    def _curves(self) -> str:
        """The ess and log Z-hat of every step, drawn."""
        drawn = []
        for name, values in {
            "ess": [step.ess for step in self.steps],
            "log Z-hat": [step.log_ml for step in self.steps],
        }.items():
            finite = [value for value in values if value > -np.inf] or [0.0]
            low, high = 0.0 if name == "ess" else min(finite), max(finite)
            title = f"{name} over {len(self.steps)} steps, from {low:.2f} to {high:.2f}"
            xs = np.linspace(4, CURVE_WIDTH - 4, len(self.steps)).tolist()
            drawn += [f"{curve(xs, values, width=CURVE_WIDTH, height=48, low=low, high=high, title=title)}{title}"]
        return "<br>".join(drawn)

    def _header(self) -> str:
        error = "" if self.log_ml_se is None else f" +- {self.log_ml_se:.2g}"
        return f"Particles({len(self)} of positive weight, log_ml={self.log_ml:.2f}{error}, ess={self.ess:.1f})"

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
        rows, last = self.deaths.by_reason(), self.deaths[-1].step
        causes = [
            f"{count} of {self.deaths.number}{f' at step {steps}' * (steps != str(last))}: {reason}"
            for count, steps, reason in rows[:MAX_REASONS]
        ]
        if rows[MAX_REASONS:]:
            causes.append(f"{sum(count for count, _, _ in rows[MAX_REASONS:])} for other reasons")
        return f"all died by step {last}: {'; '.join(causes)}"


def _together(deaths: Iterable[Death]) -> Deaths:
    """One death for each step and reason, with their counts added."""
    together: dict[tuple[int, str], Death] = {}
    for death in deaths:
        key = death.step, death.reason
        together[key] = replace(together[key], count=together[key].count + death.count) if key in together else death
    return Deaths(sorted(together.values(), key=lambda death: (death.step, -death.count)))


def _line(particle: object) -> str:
    """The text on one line, what cannot be printed escaped, the middle left out where it is long."""
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(particle))
    return _without_middle(text, MAX_TEXT)


def _without_middle(text: str, most: int) -> str:
    """At most `most` characters of a text: texts often share their beginning, and differ at the end."""
    end = most // 3
    return text if len(text) <= most else f"{text[: most - end - 3]} … {text[-end:]}"
