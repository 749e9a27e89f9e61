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
from llmppl.support.arguments import count, function, generator, name_of, optional_count, shown
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
        for i, particle in enumerate(everyone):
            if not particle.log_weight < np.inf:  # or it is NaN
                raise ValueError(
                    f"particle {i} has log weight {particle.log_weight}; it is finite, or -inf if dead"
                )
        alive = [i for i, particle in enumerate(everyone) if particle.log_weight > -np.inf]
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
        return [str(particle) for particle in self]

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
        if self.steps and self.log_ml_se is None:
            unknown = [Share(values[group[0]], p, 0.0, 1.0) for p, group in grouped]
            return Probabilities(unknown, f"{header}\n{self.log_ml_se_reason}")
        errors = [self._se(group) for _, group in grouped[:MAX_ERRORS]]
        errors += [None] * (len(grouped) - len(errors))
        shares = [
            Share(values[group[0]], p, se=se)
            for (p, group), se in zip(grouped, errors, strict=True)
        ]
        return Probabilities(shares, header)

    def _column(self, key: str | Callable[[Any], Any]) -> tuple[str, list[Any]]:
        """Return the name of a key and its value in each particle. AttributeError if no particle has it."""
        values = [value_of(particle, key) for particle in self]
        if values and all(value is NO_VALUE for value in values):
            parent = str(key)
            while value_of(self[0], parent) is NO_VALUE:
                parent = re.sub(r"(\A|[.\[])[^.\[]*\Z", "", parent)
            names = sorted(name for name in vars(self[0]) if not name.startswith("_"))
            has = f"{parent} = {shown(value_of(self[0], parent))}" if parent else ", ".join(names)
            raise AttributeError(f"no particle has {key!r}: the first one has {has}")
        return "answers" if key is answer_of else key if isinstance(key, str) else name_of(
            key
        ), values

    def _se(self, group: list[int]) -> float | None:
        """Return the standard error of the probability of some particles; None if these are no random sample."""
        if not self.steps:
            return None
        holds = np.zeros(self.steps[-1].log_survivors.size, bool)
        holds[[self._places[i] for i in group]] = True
        return probability_error(self.steps, holds)

    def field(self, path: str) -> Probabilities:
        """Return the posterior probability of each value of a field of the parsed texts: `field("pets[0].kind")`."""
        return self.by(f"parsed{'' if path.startswith('[') else '.'}{path}")

    def answers(self) -> Probabilities:
        """Return the posterior probability of each parsed value, or of each text if nothing is parsed.

        A text that was cut stands for itself, with the mark " [cut]".
        """
        return self.by(answer_of)

    def to_pandas(self, *keys: str | Callable[[Any], Any]) -> pandas.DataFrame:
        """Return a data frame with a row for each particle: text, weight, log_weight, cut, and a column for each key.

        The keys are those of `by`, such as "mood" or "parsed.age". A particle without the value has None there.
        """
        cut = [particle.cut for particle in self]
        columns = dict(map(self._column, keys))
        more = {
            name: [None if value is NO_VALUE else value for value in column]
            for name, column in columns.items()
        }
        return frame(
            {
                "text": self.texts,
                "weight": self.weights,
                "log_weight": self.log_weights,
                "cut": cut,
                **more,
            }
        )

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
        values = {
            name: np.array([column])[:, chosen] for name, column in map(self._column, keys or ["s"])
        }
        groups = {"posterior": values, "sample_stats": {"particle": chosen[None]}}
        return (
            arviz.from_dict(groups)
            if int(arviz.__version__.split(".")[0])
            else arviz.from_dict(**groups)
        )

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "_particles": [detach(particle) for particle in self],
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
        if any(isinstance(particle, SavedParticle) for particle in self):
            return None
        paths = [[item for step in particle.choices for item in step] for particle in self]
        if not all(isinstance(item, Choice) for path in paths for item in path):
            return None
        scored = zip(paths, log_joints(self), self, strict=True)
        runs = {
            key_of(tuple(item[0] for item in path)): p._power_ * log_joint
            for path, log_joint, p in scored
        }
        return (
            min(1.0, float(np.exp(np.logaddexp.reduce([*runs.values()]) - self.log_ml)))
            if runs
            else 0.0
        )

    @property
    def lineages(self) -> NDArray[np.int64]:
        """(T,) int: for each step, the number of its particles from which the final ones descend."""
        return self.steps.lineages

    @property
    def doubts(self) -> list[str]:
        """Reasons not to trust averages over the weights; empty if none is known. A printed result shows them."""
        found = []
        k = tail_shape(self.log_weights)
        if len(self) >= MIN_DOUBTED and self.ess < FEW and self._accuracy is not _unknown:
            found.append(f"one of {len(self)} particles has {self.weights[0]:.0%} of the weight")
        if k > MAX_SHAPE and self._accuracy is not _unknown:
            found.append(
                f"the largest weights have a heavy tail, k-hat {k:.2f} (above {MAX_SHAPE})"
            )
        return [
            f'{each}: docs/inference.md, "Weights that are not to be trusted"' for each in found
        ]

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
        n = optional_count("n", n, least=0)
        self._need_one()
        rng = generator(seed, rng)
        drawn = [
            self._particles[i]
            for i in rng.choice(len(self), size=1 if n is None else n, p=self.weights)
        ]
        return drawn[0] if n is None else drawn

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
        values = [f(particle) for particle in self]
        try:
            array = np.asarray(values)
            mean = np.tensordot(
                self.weights, np.asarray(array, dtype=np.result_type(array, np.float64)), axes=1
            )
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
        statements = dict.fromkeys(name for particle in self for name in particle.attribution)
        means = {
            name: float(self.weights @ [p.attribution.get(name, 0.0) for p in self])
            for name in statements
        }
        return dict(sorted(means.items(), key=lambda item: -abs(item[1])))

    def __repr__(self) -> str:
        table = (
            [*self.doubts, "", *text_table(HEADS, self._rows())] if len(self) else [self._causes()]
        )
        stats = [] if self.stats is None else ["", str(self.stats)]
        return "\n".join([self._header(), *table, *stats])

    def _repr_html_(self) -> str:
        """Return the same for a notebook, with charts of the steps."""
        totals = [[(weight,)] for weight, _ in self._folded()]
        causes = f"<p>{html.escape(self._causes())}</p>"
        table = html_table(HEADS, self._rows(), totals) if len(self) else causes
        stats = "" if self.stats is None else f"<pre>{html.escape(str(self.stats))}</pre>"
        header = "<br>".join(map(html.escape, [*self._header().split("\n"), *self.doubts]))
        return f"<p>{header}</p>{self.steps.charts()}{table}{stats}"

    def _header(self) -> str:
        error = "" if self.log_ml_se is None else f" +- {self.log_ml_se:.2g}"
        header = f"Particles({len(self)} of positive weight, log_ml={self.log_ml:z.2f}{error}, ess={self.ess:.1f})"
        texts = len(set(self.texts))
        first = int(self.lineages[0]) if len(self.steps) > 1 else 0
        counts = f"\n{texts} different text{'s' * (texts != 1)}" * bool(texts)
        return header + counts + f", {first} ancestor{'s' * (first != 1)} at step 1" * bool(first)

    def _folded(self) -> list[tuple[float, list[int]]]:
        return self._grouped((str(particle), particle.cut) for particle in self)

    def _rows(self) -> list[tuple[str, str, str]]:
        """Return weight, log-weight and text of the particles of each text, the heaviest text first."""
        return [
            (
                f"{weight:.3f}",
                f"{self.log_ml + np.log(weight):z.2f}",
                one_line(self[first])
                + " [cut]" * self[first].cut
                + f" [x{1 + len(others)}]" * bool(others),
            )
            for weight, (first, *others) in self._folded()
        ]

    def _need_one(self) -> None:
        if not len(self):
            raise ValueError(f"no particle is left: {self._causes()}; log_ml is -inf")

    def _causes(self) -> str:
        if not self.deaths:
            return "none has a positive weight, and no death was recorded"
        rows = self.deaths.by_reason()
        last = self.deaths[-1].step
        causes = [
            f"{count} of {self.deaths.number}{f' at step {steps}' * (steps != str(last))}: {reason}"
            for count, steps, reason in rows[:MAX_REASONS]
        ]
        others = sum(count for count, _, _ in rows[MAX_REASONS:])
        return f"all died by step {last}: {'; '.join(causes + [f'{others} for other reasons'] * bool(others))}"


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
            place = name or ast.literal_eval(index)
            value = _member(value, place) if isinstance(place, str) else value[place]
            rest = rest[part.end() :]
    except (AttributeError, LookupError, TypeError, ValueError, SyntaxError):
        return NO_VALUE
    return value


def _has(value: Any, name: str) -> bool:
    return name in value if isinstance(value, Mapping) else hasattr(value, name)


def _member(value: Any, name: str) -> Any:
    return value[name] if isinstance(value, Mapping) else getattr(value, name)


def answer_of(particle: Any) -> Any:
    """Return the parsed value of a particle, or its text."""
    value = NO_VALUE if particle.cut else value_of(particle, "parsed")
    if value is not NO_VALUE:
        return value
    text = str(particle)
    return text + " [cut]" if particle.cut else text


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
        return self.reason + (f", one with the text {one_line(self.text)!r}" if self.text else "")


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
        return DEATH_HEADS, [
            (str(count), steps, reason) for count, steps, reason in self.by_reason()
        ]

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
    dead = [particle for particle in particles if particle.log_weight == -np.inf]
    reasons = [without_middle(particle.death or "weight zero", MAX_REASON) for particle in dead]
    texts = {
        reason: particle._drawn_text_[-MAX_END:]
        for reason, particle in [*zip(reasons, dead, strict=True)][::-1]
    }
    return Deaths(
        Death(step, reason, count, texts[reason])
        for reason, count in Counter(reasons).most_common()
    )
