"""Particles: the result of inference, a weighted sample of finished runs of a model.

The sum of the weights w_i is an unbiased estimate of Z, and  E[sum_i w_i f(x_i)]  is the unnormalised expectation of f.
Particles are drawn and averaged with the normalised weights W_i = w_i / sum_j w_j. Only particles of positive weight
are kept; `deaths` counts the others, with the step and the reason. If all have died, the estimate of Z is 0. A particle
is *cut* if `max_steps` ended it before its program did: it is a prefix of a run, weighted as such.

Source: Kong, Liu & Wong (1994), "Sequential imputations and Bayesian missing data problems", for the ess.
"""

from __future__ import annotations

import ast
import html
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from llmppl.inference.detached import SavedParticle, detach
from llmppl.inference.genealogy import StepRecord, StepRecords, probability_error, tail_shape
from llmppl.inference.resampling import systematic
from llmppl.models.choices import Choice, log_joints
from llmppl.models.model import Model
from llmppl.report import Recorder, html_page
from llmppl.report.probabilities import Probabilities, Share, key_of
from llmppl.report.tables import TableView, frame, html_table, one_line, text_table, without_middle
from llmppl.support.arguments import count, function, generator, name_of, plural, shown
from llmppl.support.locks import cached_property
from llmppl.support.options import no_attribute
from llmppl.support.runtime import Stats
from llmppl.support.shared import Shared

if TYPE_CHECKING:
    import pandas

MAX_REASONS = 5  # in an error
HEADS = "weight", "log weight", "text"
DEATH_HEADS = "count", "steps", "reason"
MAX_END = 100  # characters kept of a dead particle's text
MAX_REASON = 200  # and of the reason
MAX_ERRORS = 50  # probabilities of values that get a standard error
# particles, and an ess and a k-hat that are not to be trusted
MIN_DOUBTED = 5
FEW = 1.5
MAX_SHAPE = 0.7

P = TypeVar("P", bound=Model | SavedParticle, covariant=True)


def _unknown() -> tuple[None, str]:
    return (
        None,
        "only the results of smc_steer, smc_standard and importance_sampling have a standard error",
    )


class Particles(Shared, Sequence[P]):
    """A sequence of n particles of positive weight, the heaviest first. A pickle contains a `SavedParticle` for each.

    Parameters
    ----------
    particles : iterable of particles
        Those of log-weight -inf are left out. ValueError for NaN and +inf.
    stats, deaths, steps, recorder, limit : of the run, optional
    accuracy : callable, optional
        Computes `log_ml_se` and `log_ml_se_reason` when one of them is read.

    Attributes
    ----------
    log_weights, weights : (n,) float64 ndarray, read-only
        The weights have the sum 1.
    log_ml : float
        logsumexp(log_weights), the log of an unbiased estimate of Z; -inf if n is 0.
    ess : float
        The effective sample size, 1 / sum_i W_i^2, from 1 to n; 0 if n is 0.
    deaths : Deaths, a tuple of `Death`
    steps : StepRecords, a tuple of `StepRecord`
    limit : "timeout", "budget" or "cancelled" if that has ended the run, else ""
    log_ml_se : float or None
        Standard error of log_ml, estimated from this run alone; None if one step leaves nearly all weight to chance. If
        a rare event carries the mass and no particle has seen it, log_ml is several nats too low and its error too
        small (docs/inference.md, "The error of one run").
    log_ml_se_reason : str
        Reason why `log_ml_se` is None, else "".

    Examples
    --------
    >>> posterior = smc_steer(ConstrainedText(lm, "He was", [" happy", " sad"]), N=4, K=3, seed=0)
    >>> posterior.best.s
    ' happy'
    >>> round(posterior.expect(lambda particle: particle.s == " happy"), 3)
    0.608
    """

    if not TYPE_CHECKING:
        __getattr__ = no_attribute("take best.{0}, by('{0}') or expect(f); log_ml estimates log Z")

    def __init__(
        self,
        particles: Iterable[P],
        *,
        stats: Stats | None = None,
        deaths: Iterable[Death] = (),
        steps: Iterable[StepRecord] = (),
        accuracy: Callable[[], tuple[float | None, str]] = _unknown,
        recorder: object = None,
        limit: str = "",
    ) -> None:
        everyone = list(particles)
        alive = []
        for i, particle in enumerate(everyone):
            if not particle.log_weight < np.inf:  # or it is NaN
                raise ValueError(
                    f"particle {i} has log weight {particle.log_weight}; it is finite, or -inf if dead"
                )
            if particle.log_weight > -np.inf:
                alive.append(i)
        self._places = sorted(alive, key=lambda i: -everyone[i].log_weight)  # of each in the run
        self._particles = [everyone[i] for i in self._places]
        self.log_weights: NDArray[np.float64] = np.array(
            [p.log_weight for p in self._particles], dtype=np.float64
        )
        self.log_ml = float(np.logaddexp.reduce(self.log_weights, initial=-np.inf))
        weights = np.exp(self.log_weights - self.log_weights[:1])  # (n,) the first and largest is 1
        self.weights: NDArray[np.float64] = weights / np.sum(weights)
        self.ess = float(1 / np.sum(self.weights**2)) if self._particles else 0.0
        self.log_weights.flags.writeable = self.weights.flags.writeable = False
        self.stats: Stats | Any = stats  # | Any: None only if the caller has run many at once
        self.deaths = Deaths(deaths)
        self.steps = StepRecords(steps)
        self._accuracy = accuracy
        self._recorder = recorder
        self.limit = limit

    @cached_property
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
        """Return a particle for an index, and a list for a slice (part of the weights estimates nothing)."""
        if isinstance(index, str):
            raise TypeError(
                f"particles have indices: by({index!r}) is the posterior of an attribute"
            )
        return self._particles[index]

    @property
    def texts(self) -> list[str]:
        return [*map(str, self)]

    def by_text(self) -> dict[str, float]:
        """Return the different texts, each with the sum of the normalised weights of its particles, largest first."""
        texts = self.texts
        return {texts[group[0]]: weight for weight, group in self._grouped(texts)}

    def _grouped(self, values: Iterable[Any]) -> list[tuple[float, list[int]]]:
        """Return the weight and the indices of the particles of each value, the heaviest value first."""
        groups = defaultdict(list)
        for i, value in enumerate(values):
            groups[key_of(value)].append(i)
        found = []
        for group in groups.values():
            p = min(float(self.weights[group].sum()), 1.0)  # above 1 by rounding
            found.append((p, group))
        return sorted(found, key=lambda each: -each[0])

    def by(self, key: str | Callable[[Any], Any]) -> Probabilities:
        """Return the posterior probability of each value of a key, the most probable first.

        `key` is an attribute of the particles, as "mood", "parsed.pets[0].kind" or 'parsed["first pet"]', or a function
        of a particle. A particle without it counts as `NO_VALUE`, such as a text that was cut and has no parsed value.
        Values of two types are two values, as True, 1 and "1". The 50 most probable values have standard errors.
        AttributeError if no particle has the key; ValueError if none is left.
        """
        self._need_one()
        name, values = self._column(key)
        grouped = self._grouped(values)
        header = f"{name}: {len(grouped)} values of {len(self)} particles, ess {self.ess:.1f}"
        shares = [Share(values[group[0]], p) for p, group in grouped]
        if self.steps and self.log_ml_se is None:
            header += f"\n{self.log_ml_se_reason}"
            shares = [share._replace(lower=0.0, upper=1.0) for share in shares]
        elif self.steps:
            for i, (_, group) in enumerate(grouped[:MAX_ERRORS]):
                holds = np.zeros(self.steps[-1].log_survivors.size, bool)
                holds[[self._places[member] for member in group]] = True
                shares[i] = shares[i]._replace(se=probability_error(self.steps, holds))
        return Probabilities(shares, header)

    def _column(self, key: str | Callable[[Any], Any]) -> tuple[str, list[Any]]:
        """Return the name of a key and its value in each particle. AttributeError if no particle has it."""
        values = [value_of(particle, key) for particle in self]
        if values and all(value is NO_VALUE for value in values):
            parent = str(key)
            while value_of(self[0], parent) is NO_VALUE:
                parent = re.sub(r"(\A|[.\[])[^.\[]*\Z", "", parent)
            has = f"{parent} = {shown(value_of(self[0], parent))}"
            if not parent:
                names = sorted(name for name in vars(self[0]) if not name.startswith("_"))
                has = ", ".join(names)
            raise AttributeError(f"no particle has {key!r}: the first one has {has}")
        name = "answers"
        if key is not answer_of:
            name = key if isinstance(key, str) else name_of(key)
        return name, values

    def field(self, path: str) -> Probabilities:
        """Return the posterior probability of each value of a field of the parsed texts: `field("pets[0].kind")`."""
        if not path.startswith("["):
            path = "." + path
        return self.by("parsed" + path)

    def answers(self) -> Probabilities:
        """Return the posterior probability of each parsed value, or of each text if nothing is parsed.

        A text that was cut stands for itself, with the mark " [cut]".
        """
        return self.by(answer_of)

    def to_pandas(self, *keys: str | Callable[[Any], Any]) -> pandas.DataFrame:
        """Return a data frame with a row for each particle: text, weight, log_weight, cut, and a column for each key.

        The keys are those of `by`, such as "mood" or "parsed.age". A particle without the value has None there.
        """
        columns: dict[str, Any] = {
            "text": self.texts,
            "weight": self.weights,
            "log_weight": self.log_weights,
            "cut": [particle.cut for particle in self],
        }
        for name, column in map(self._column, keys):
            columns[name] = [None if value is NO_VALUE else value for value in column]
        return frame(columns)

    def to_arviz(
        self, *keys: str | Callable[[Any], Any], draws: int = 1000, seed: int | None = None
    ) -> Any:
        """Return the keys of `by` as ArviZ data of one chain, in which each particle occurs by its weight.

        ArviZ has no weights, so systematic resampling makes the draws. They are no Markov chain: ArviZ's own ess and
        r_hat say nothing about them. `sample_stats` has the index of each draw's particle.
        """
        self._need_one()
        try:
            import arviz
        except ImportError:
            raise ImportError("to_arviz needs ArviZ: pip install arviz") from None
        chosen, _ = systematic(generator(seed), self.log_weights, count("draws", draws))
        values = {}
        for name, column in map(self._column, keys or ["s"]):
            values[name] = np.array([column])[:, chosen]
        groups = {"posterior": values, "sample_stats": {"particle": chosen[None]}}
        if arviz.__version__.startswith("0."):
            return arviz.from_dict(**groups)
        return arviz.from_dict(groups)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "_particles": [*map(detach, self)],
            "_recorder": None,
        }

    def show(self) -> None:
        """Show the page of a recorded run, with all steps, below the cell of a notebook, otherwise in the browser."""
        if not isinstance(self._recorder, Recorder):
            raise RuntimeError(
                "this run was not recorded: smc_steer(model, N, K, on_step=Recorder()) records one"
            )
        recording = self._recorder.recording
        html_page.show(replace(recording, ended=recording.ended or ""))

    @property
    def found(self) -> float | None:
        """Estimated share of the posterior that lies on the different runs among the particles, at most 1.

        It is the sum of their probabilities over Z-hat: too large if Z-hat is too small. None if a particle was saved,
        or drew from `self.rng` without `sample`.
        """
        paths = []
        for particle in self:
            if isinstance(particle, SavedParticle):
                return None
            path = [*itertools.chain(*particle.choices)]
            if not all(isinstance(item, Choice) for item in path):
                return None
            paths.append(key_of([item[0] for item in path]))
        runs = {}
        for key, log_joint, particle in zip(paths, log_joints(self), self, strict=True):
            runs[key] = particle._power_ * log_joint
        if not runs:
            return 0.0
        share = np.exp(np.logaddexp.reduce([*runs.values()]) - self.log_ml)
        return min(1.0, float(share))

    @property
    def lineages(self) -> NDArray[np.int64]:
        """(T,) int: for each step, the number of its particles from which the final ones descend."""
        return self.steps.lineages

    @property
    def doubts(self) -> list[str]:
        """Reasons not to trust averages over the weights; empty if none is known. A printed result shows them."""
        if self._accuracy is _unknown:
            return []
        found = []
        where = 'docs/inference.md, "Weights that are not to be trusted"'
        if len(self) >= MIN_DOUBTED and self.ess < FEW:
            found.append(
                f"one of {len(self)} particles has {self.weights[0]:.0%} of the weight: {where}"
            )
        k = tail_shape(self.log_weights)
        if k > MAX_SHAPE:
            found.append(
                f"the largest weights have a heavy tail, k-hat {k:.2f} (above {MAX_SHAPE}): {where}"
            )
        return found

    @property
    def likeliest(self) -> P:
        """Particle of the highest `log_joint`, the first if several have it. ValueError if none is left."""
        self._need_one()
        return self._particles[int(np.argmax(log_joints(self)))]

    @property
    def best(self) -> P:
        """Particle of highest weight, the first if several have it. ValueError if none is left."""
        self._need_one()
        return self._particles[0]

    @overload
    def sample(
        self, n: None = None, *, seed: int | None = None, rng: np.random.Generator | None = None
    ) -> P: ...

    @overload
    def sample(
        self, n: int, *, seed: int | None = None, rng: np.random.Generator | None = None
    ) -> list[P]: ...

    def sample(
        self,
        n: int | None = None,
        *,
        seed: int | None = None,
        rng: np.random.Generator | None = None,
    ) -> P | list[P]:
        """Draw one particle by weight, or a list of `n` independent draws. ValueError if no particle is left."""
        if n is None:
            return self.sample(1, seed=seed, rng=rng)[0]
        n = count("n", n, least=0)
        self._need_one()
        drawn = generator(seed, rng).choice(len(self), size=n, p=self.weights)
        return [self._particles[i] for i in drawn]

    @overload
    def expect(self, f: Callable[[P], float]) -> float: ...

    @overload
    def expect(self, f: Callable[[P], NDArray[Any]]) -> NDArray[np.float64]: ...

    def expect(self, f: Callable[[P], float | NDArray[Any]]) -> float | NDArray[np.float64]:
        """Return sum_i W_i f(particle_i), the estimate of the posterior mean of f. ValueError if no particle is left.

        `f` returns a float, a bool, or an ndarray of one shape, which is also the shape of the mean.
        """
        self._need_one()
        if not callable(f):
            raise TypeError(
                f"f must be a function of a particle, as lambda p: p.s == 'yes' is, not {shown(f)}"
            )
        values = [*map(f, self)]
        try:
            array = np.asarray(values)
            array = np.asarray(array, dtype=np.result_type(array, np.float64))
            mean = np.tensordot(self.weights, array, axes=1)
        except (TypeError, ValueError):
            raise TypeError(
                f"expect averages numbers, or arrays of one shape, and f returned {shown(values[0])}: for texts there "
                f"is by_text(), and expect(lambda p: p.s == {str(self[0])[:20]!r}) is a probability"
            ) from None
        return float(mean) if mean.ndim == 0 else mean

    def mean_attribution(self) -> dict[str, float]:
        """Return the weighted mean over the particles of each statement's log-weight, the largest first.

        A particle that a statement did not weigh counts as 0. The sum over the statements is not `log_ml`: no statement
        owns the effects of twists, deaths, selection and the choice of candidates. ValueError if no particle is left.
        """
        self._need_one()
        means = dict[str, float]()
        for particle in self:
            means |= particle.attribution
        for name in means:
            means[name] = float(self.weights @ [p.attribution.get(name, 0.0) for p in self])
        return dict(sorted(means.items(), key=lambda item: -abs(item[1])))

    def __repr__(self) -> str:
        lines = [self._header()]
        if len(self):
            lines += [*self.doubts, "", *text_table(HEADS, self._rows())]
        else:
            lines.append(self._causes())
        if self.stats is not None:
            lines += ["", str(self.stats)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the same for a notebook, with charts of the steps."""
        table = f"<p>{html.escape(self._causes())}</p>"
        if len(self):
            totals = [[(weight,)] for weight, _ in self._folded()]
            table = html_table(HEADS, self._rows(), totals)
        stats = ""
        if self.stats is not None:
            stats = f"<pre>{html.escape(str(self.stats))}</pre>"
        header = "<br>".join(map(html.escape, [*self._header().split("\n"), *self.doubts]))
        return f"<p>{header}</p>{self.steps.charts()}{table}{stats}"

    def _header(self) -> str:
        error = "" if self.log_ml_se is None else f" +- {self.log_ml_se:.2g}"
        header = f"Particles({len(self)} of positive weight, log_ml={self.log_ml:z.2f}{error}, ess={self.ess:.1f})"
        texts = len(set(self.texts))
        if texts:
            header += f"\n{plural(texts, 'different text')}"
        if len(self.steps) > 1 and self.lineages[0]:
            header += f", {plural(self.lineages[0], 'ancestor')} at step 1"
        return header

    def _folded(self) -> list[tuple[float, list[int]]]:
        return self._grouped((str(particle), particle.cut) for particle in self)

    def _rows(self) -> list[tuple[str, str, str]]:
        """Return weight, log-weight and text of the particles of each text, the heaviest text first."""
        rows = []
        for weight, group in self._folded():
            first = self[group[0]]
            text = marked(one_line(first), first)
            if len(group) > 1:
                text += f" [x{len(group)}]"
            rows.append((f"{weight:.3f}", f"{self.log_ml + np.log(weight):z.2f}", text))
        return rows

    def _need_one(self) -> None:
        if not len(self):
            raise ValueError(f"no particle is left: {self._causes()}; log_ml is -inf")

    def _causes(self) -> str:
        if not self.deaths:
            return "none has a positive weight, and no death was recorded"
        rows = self.deaths.by_reason()
        last = self.deaths[-1].step
        causes = []
        for number, steps, reason in rows[:MAX_REASONS]:
            dead = f"{number} of {self.deaths.number}"
            if steps != str(last):
                dead += f" at step {steps}"
            causes.append(f"{dead}: {reason}")
        others = sum(number for number, _, _ in rows[MAX_REASONS:])
        if others:
            causes.append(f"{others} for other reasons")
        return f"all died by step {last}: {'; '.join(causes)}"


# ---- values of a particle


class _NoValue:
    def __repr__(self) -> str:
        return "(no value)"


NO_VALUE = _NoValue()  # of a text that has not ended, or a record without the field


PART = re.compile(r"""([^.\[\]]+)|\[(-?\d+|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')\]""", re.DOTALL)


def value_of(particle: object, key: str | Callable[[Any], Any]) -> Any:
    """Return the value of a path or of a function; `NO_VALUE` where there is none.

    A path is "mood", "parsed.pets[0].kind" or, for a name that is no identifier, 'parsed["first pet"].kind'. Its rest
    may be a name with dots: "parsed.b.c" is the field "b.c" if there is one, else the field "c" of the field "b".
    """
    if not isinstance(key, str):
        return function("key", key, "lambda p: p.s")(particle)
    value: Any = particle
    rest = key
    try:
        while rest:
            rest = rest.removeprefix(".")
            part = PART.match(rest)
            if part is None or (part.end() < len(rest) and _has(value, rest)):
                return _member(value, rest)
            name, index = part.groups()
            value = _member(value, name or ast.literal_eval(index))
            rest = rest[part.end() :]
    except (AttributeError, LookupError, TypeError, ValueError, SyntaxError):
        return NO_VALUE
    return value


def _has(value: Any, name: str) -> bool:
    return name in value if isinstance(value, Mapping) else hasattr(value, name)


def _member(value: Any, place: str | int) -> Any:
    if isinstance(place, str) and not isinstance(value, Mapping):
        return getattr(value, place)
    return value[place]


def answer_of(particle: Any) -> Any:
    """Return the parsed value of a particle, or its text."""
    if not particle.cut:
        value = value_of(particle, "parsed")
        if value is not NO_VALUE:
            return value
    return marked(str(particle), particle)


def marked(text: str, particle: Any) -> str:
    """Return a text of a particle, with the mark " [cut]" if the particle is cut."""
    return f"{text} [cut]" if particle.cut else text


# ---- deaths: the reasons why particles got weight zero, counted by step and reason


@dataclass(frozen=True)
class Death:
    """Death of `count` particles at `step`. `reason` names the statement, `text` is the end of the text of one.

    Examples
    --------
    >>> program = ConstrainedText(lm, "He was", [" happy", " sad"], rule=Rule(top_k=1))
    >>> death = smc_steer(program, N=4, seed=0).deaths[0]
    >>> death.step, death.reason.partition(", applied")[0]
    (1, "no token allowed by the list [' happy', ' sad'] has positive probability under Rule(top_k=1)")
    """

    step: int
    reason: str
    count: int = 1
    text: str = ""

    def __str__(self) -> str:
        return f"{self.count} at step {self.step}: {self.example}"

    @property
    def example(self) -> str:
        """The reason, and the text if there is one."""
        if not self.text:
            return self.reason
        return f"{self.reason}, one with the text {one_line(self.text)!r}"


class Deaths(TableView, tuple[Death, ...]):
    """The deaths of a run, one `Death` for each step and reason, by step, then the largest count first.

    Examples
    --------
    >>> class Die(Model):
    ...     def step(self):
    ...         self.condition(self.sample(Uniform(1, 6)) == 6)
    ...         self.finish()
    >>> posterior = importance_sampling(Die(), N=20, seed=0)
    >>> len(posterior), posterior.deaths.number
    (2, 18)
    """

    __slots__ = ()

    def _header(self) -> str:
        return f"Deaths({self.number} particles)"

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, str, str]]]:
        rows = [(str(number), steps, reason) for number, steps, reason in self.by_reason()]
        return DEATH_HEADS, rows

    @property
    def number(self) -> int:
        """Number of particles that died."""
        return sum(death.count for death in self)

    def by_reason(self) -> list[tuple[int, str, str]]:
        """Return for each reason the count, the steps, and the reason with the text of its last death.

        The commonest reason comes first, and of equally common ones that of the latest death.
        """
        by_reason = defaultdict(list)
        for death in self:
            by_reason[death.reason].append(death)
        rows = []
        for deaths in by_reason.values():
            steps = dict.fromkeys([str(deaths[0].step), str(deaths[-1].step)])
            rows.append((sum(death.count for death in deaths), "-".join(steps), deaths[-1]))
        rows.sort(key=lambda row: (-row[0], -row[2].step))
        return [(count, steps, last.example) for count, steps, last in rows]


def deaths_of(step: int, particles: Iterable[Any]) -> Deaths:
    """Return the deaths among particles, those of log-weight -inf. The parts of long texts are bounded, as a run is."""
    counts = Counter[str]()
    texts = dict[str, str]()
    for particle in particles:
        if particle.log_weight == -np.inf:
            reason = without_middle(particle.death or "weight zero", MAX_REASON)
            counts[reason] += 1
            texts.setdefault(reason, particle._drawn_text_[-MAX_END:])
    common = counts.most_common()
    return Deaths(Death(step, reason, count, texts[reason]) for reason, count in common)
