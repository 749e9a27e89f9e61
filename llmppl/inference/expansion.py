"""Expansion: choice of the successors of the particles that a step of inference runs.

An expansion is `expand(run) -> list of Extension`, for a run of `SMC`, with `num_starts`, the number of particles with
which a run begins. `Copies` makes K copies of every active particle (Lew et al. 2023, Algorithm 1, to the letter).
`Distinct` chooses the first choices of all particles together, without replacement.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np

from llmppl.distributions import BLOCK, Floats, Ints, Table, logsumexp, read_blocks, values_at
from llmppl.inference.resampling import meet, threshold
from llmppl.models.choices import (
    Choice,
    ListedChoice,
    Pick,
    Sampled,
    State,
    StopAtChoice,
    Suspended,
    last_choices,
    spawned,
)
from llmppl.models.model import Model, untwist, wrap_step
from llmppl.support.arguments import count, is_hashable, one_of, optional_count, positive, shown
from llmppl.support.runtime import Runtime, spent, unwatched, warn, watching

M = TypeVar("M", bound=Model)


@dataclass(eq=False)
class Extension:
    """A candidate of a step: a particle that runs the step, or one that is only carried along.

    parent : int, index of its parent among the particles
    group : int, equal for extensions that run the step independently from the same start
    pick : Pick, its first choice, or None; it was kept with probability exp(log_kept)
    moving : bool, True if its step is to run
    log_start : float, its log-weight before the step, without a twist
    copies : int, number of independent runs that it represents; 0 if nothing was drawn after a selected first choice

    Examples
    --------
    >>> class OneCopy:                                      # as Copies(4)
    ...     num_starts = 4
    ...     def __call__(self, run):
    ...         extensions = [Extension(each, i, i, moving=not each.finished) for i, each in enumerate(run.particles)]
    ...         run.advance([each.particle.step for each in extensions if each.moving])
    ...         return extensions
    >>> program = ConstrainedText(lm, "He was", [" happy", " sad"])
    >>> len(SMC(program, OneCopy(), ResampleBelow(4), seed=0).run())
    4
    """

    particle: Any
    parent: int
    group: int
    _: KW_ONLY
    pick: Pick | None = None
    log_kept: float = 0.0
    moving: bool = True

    def __post_init__(self) -> None:
        self.log_start: float = self.particle.log_weight - self.particle.log_twist
        self.copies = int(self.moving)

    @property
    def key(self) -> Hashable | None:
        """Key for merging: the parent and all choices of the step. None if some of them cannot be compared."""
        if not self.moving or self.particle.log_weight == -math.inf:
            return None
        choices = last_choices(self.particle)
        key = self.parent, *(choice.value for choice in choices if isinstance(choice, Choice))
        drew_itself = len(key) <= len(choices)  # from its stream, without `sample`
        return None if drew_itself or not is_hashable(key) else key

    def split_weight(self, number: int) -> None:
        """Divide the weight by `number`."""
        self.log_start -= math.log(number)
        self.particle._log_weight_ -= math.log(number)


# ---- partial steps


@dataclass(eq=False)
class Branch:
    """One run of a step of a copy of `start`, with its first choices given by `picks`.

    Enumeration follows the branches of all values of the next choice, a beam the likeliest, and `Distinct` one choice.

    log_q : float, log-probability of the picks
    most : int or None, number of values of a choice that are followed
    particle : Model, the copy, with log_q in its weight
    listing : ListedChoice or None, the choice at which the step stopped, if its values can be listed
    suspended : bool, True if the step stopped at a choice
    """

    start: Any
    asker: str = ""
    picks: tuple[Pick, ...] = ()
    log_q: float = 0.0
    most: int | None = None

    def run(self) -> None:
        """Run the step to its end, or to its first choice after the picks."""
        chooser = StopAtChoice(self.picks, self.asker, self.most)
        self.particle = self.start._spawn_(chooser)
        with contextlib.suppress(Suspended):
            self.particle.step()
        self.listing = chooser.listing
        self.suspended = chooser.left
        self.particle._log_weight_ += self.log_q

    def children(self) -> list[Branch]:
        """Return the branches of the next choice: one for each possible value, or for the `most` probable ones."""
        assert self.listing is not None
        log_probs = self.listing.table.whole(self.listing.log_total)
        order = (
            np.arange(log_probs.size)
            if self.most is None
            else np.argsort(-log_probs, kind="stable")[: self.most]
        )
        picks = [Pick(self.listing, index) for index in order[log_probs[order] > -np.inf].tolist()]
        return [
            replace(self, picks=(*self.picks, pick), log_q=self.log_q + pick.log_prob)
            for pick in picks
        ]


# ---- expansions


@dataclass(frozen=True)
class Copies:
    """Expansion into K copies of every active particle, each with 1/K of its weight. A run begins with N particles.

    Finished particles are carried along. With `merge`, copies that made the same choices become one, with the sum of
    their weights: a second equal copy carries no information.

    Examples
    --------
    >>> program = ConstrainedText(lm, "He was", [" happy", " sad"])
    >>> step = next(SMC(program, Copies(2, K=3), DownSample(2), seed=8))
    >>> [str(each) for each in step.candidates]
    [' happy', ' sad', ' happy', ' sad', ' sad', ' happy']
    """

    N: int
    K: int = 1
    merge: bool = False

    def __post_init__(self) -> None:
        count("N", self.N)
        count("K", self.K)

    @property
    def num_starts(self) -> int:
        return self.N

    def __call__(self, run: Any) -> list[Extension]:
        extensions = []
        streams = spawned(run.rng)
        for i, particle in enumerate(run.particles):
            group = i if run.t > 1 else 0  # all particles start in one state
            copies = [particle]
            if not particle.finished:
                particle._log_weight_ -= math.log(self.K)
                copies += [particle._spawn_(Sampled(next(streams))) for _ in range(self.K - 1)]
            extensions += [Extension(copy, i, group, moving=not copy.finished) for copy in copies]
        run.advance([each.particle.step for each in extensions if each.moving])
        return _merged(extensions) if self.merge else extensions


@dataclass(frozen=True)
class Distinct:
    """Expansion into at most N K extensions with distinct first choices. A run begins with one particle.

    A step runs up to its first `sample` of a finite support. A candidate is a pair (particle, value), whose weight is
    that of the particle times the probability of the value. The optimal down-sampler, which keeps the expected sum of
    any function, selects among all candidates. Each selected one runs from the beginning of the step with its choice
    fixed. If there are fewer than N K, extensions that made further choices run again, N K times in all, the heavier
    ones more often, with shares of the weight. Equal results are merged.

    Some first choices cannot be listed: they have no finite support, are a weighted proposal, or follow a draw outside
    `sample`. Such a particle is copied K times, or N K times if it is the only one. A particle whose step ends without
    a choice steps once, and finished particles are carried along.

    Examples
    --------
    >>> program = ConstrainedText(lm, "He was", [" happy", " sad"])
    >>> step = next(SMC(program, Distinct(1, K=2), DownSample(1), seed=0))
    >>> [str(each) for each in step.candidates]
    [' happy', ' sad']
    """

    N: int
    K: int

    def __post_init__(self) -> None:
        count("N", self.N)
        count("K", self.K)

    num_starts = 1

    def __call__(self, run: Any) -> list[Extension]:
        probes = {
            i: Branch(particle) for i, particle in enumerate(run.particles) if not particle.finished
        }
        run.advance([probe.run for probe in probes.values()], [*probes])
        kept = self._kept(
            run, {i: probe.listing for i, probe in probes.items() if probe.listing is not None}
        )
        groups = itertools.count()
        streams = spawned(run.rng)
        extensions = []
        for i, particle in enumerate(run.particles):
            if i in kept:
                for pick, log_weight, log_kept in kept[i]:
                    extensions.append(
                        _picked(
                            particle, next(streams), pick, log_weight, log_kept, i, next(groups)
                        )
                    )
            elif i in probes and probes[i].suspended:
                number = self.N * self.K if len(run.particles) == 1 else self.K
                group = next(groups)
                copies = [
                    Extension(particle._spawn_(Sampled(next(streams))), i, group)
                    for _ in range(number)
                ]
                for each in copies:
                    each.split_weight(number)
                extensions += copies
            else:  # it has finished, or its step has ended without a choice
                if i in probes:
                    probes[i].particle._chooser_ = particle.chooser
                    particle = probes[i].particle
                extensions.append(Extension(particle, i, next(groups), moving=False))
        run.advance([each.particle.step for each in extensions if each.moving])
        fixed = [each for each in extensions if each.pick is not None]
        return sorted(
            _merged(extensions + self._reruns(run, fixed, streams)), key=lambda each: each.parent
        )

    def _kept(
        self, run: Any, listed: dict[int, ListedChoice]
    ) -> dict[int, list[tuple[Pick, float, float]]]:
        """Return the kept first choices of each particle, with new log-weight and log-probability of being kept."""
        numbers = [*listed]
        listings = [*listed.values()]
        particles = [run.particles[i] for i in numbers]
        starts = np.array([p.log_weight - p.log_twist for p in particles]) - [
            each.log_total for each in listings
        ]
        columns = choose_from(
            run.rng, starts, [listing.table for listing in listings], self.N * self.K
        )
        kept: dict[int, list[tuple[Pick, float, float]]] = {i: [] for i in numbers}
        for row, index, *weights in zip(*map(np.ndarray.tolist, columns), strict=True):
            kept[numbers[row]].append((Pick(listings[row], index), *weights))
        return kept

    def _reruns(
        self, run: Any, fixed: list[Extension], streams: Iterator[State]
    ) -> list[Extension]:
        """Run extensions that made further choices again, until there are about N K in all, and return these runs."""
        notes = [each.particle._noted_ for each in fixed]
        unfinished = [
            each for each, last in zip(fixed, notes, strict=True) if last.item and last.before.item
        ]
        log_starts = np.array([each.log_start for each in unfinished])
        shares = np.exp(log_starts - logsumexp(log_starts))
        numbers = 1 + np.floor(max(self.N * self.K - len(fixed), 0) * shares).astype(int)
        for each in fixed:
            each.copies = 0  # without a further choice, it drew nothing
        more = []
        for each, number in zip(unfinished, numbers.tolist(), strict=True):
            each.split_weight(number)
            each.copies = 1
            start = run.particles[each.parent]
            how = (each.log_start, each.log_kept, each.parent, each.group)
            more += [_picked(start, next(streams), each.pick, *how) for _ in range(number - 1)]
        run.advance([each.particle.step for each in more])
        return more


ExpansionName = Literal["distinct", "merged", "copies"]
EXPANSIONS: dict[ExpansionName, Callable[[int, int], Copies | Distinct]] = {
    "distinct": Distinct,
    "merged": functools.partial(Copies, merge=True),
    "copies": Copies,
}


def _picked(
    start: Model,
    stream: State,
    pick: Pick | None,
    log_weight: float,
    log_kept: float,
    parent: int,
    group: int,
) -> Extension:
    """Return the extension of a particle that begins its step with this first choice and this log-weight."""
    copy = start._spawn_(Sampled(stream, pick))
    copy._log_weight_ = log_weight
    copy._log_twist_ = 0.0
    return Extension(copy, parent, group, pick=pick, log_kept=log_kept)


def _merged(extensions: list[Extension]) -> list[Extension]:
    """Merge the extensions of one parent that made the same choices, and whose texts and weights agree.

    If these differ, a step drew from another source. The extensions stay apart, which is unbiased whatever the source.
    At the first step all particles are equal, and merging across them would leave few for the next step.
    """
    if len({each.group for each in extensions}) == len(extensions):
        return extensions
    first: dict[Hashable, Extension] = {}
    merged = []
    for each in extensions:
        key = each.key
        earlier = each if key is None else first.setdefault(key, each)
        old = earlier.particle
        new = each.particle
        gains = old.log_weight - earlier.log_start, new.log_weight - each.log_start
        if earlier is each or str(old.s) != str(new.s) or not math.isclose(*gains, abs_tol=1e-6):
            merged.append(each)
        else:
            earlier.log_start = float(np.logaddexp(earlier.log_start, each.log_start))
            old._log_weight_ = float(np.logaddexp(old.log_weight, new.log_weight))
            earlier.copies += each.copies
    return merged


# ---- choice of candidates


def choose_from(
    rng: np.random.Generator, starts: Floats, tables: Sequence[Table], most: int
) -> tuple[Ints, Ints, Floats, Floats]:
    """Return the result of `choose` for tables, and the log-probability with which each value was kept.

    `starts`, (n,) float64, is added to the log-weights of each of the n tables.
    """

    def read(rows: Ints, blocks: Ints) -> Floats:
        return starts[rows, None] + read_blocks(tables, rows, blocks)

    log_sums = [start + table.log_sums for start, table in zip(starts, tables, strict=True)]
    rows, indices, log_weights = choose(rng, log_sums, read, most)
    log_kept = np.minimum(starts[rows] + values_at(tables, rows, indices) - log_weights, 0.0)
    return rows, indices, log_weights, log_kept


def choose(
    rng: np.random.Generator,
    log_sums: Sequence[Floats],
    read: Callable[[Ints, Ints], Floats],
    most: int,
) -> tuple[Ints, Ints, Floats]:
    """Return the rows, the indices in them, and the new log-weights of the kept values, in increasing order.

    This is the optimal down-sampler of `llmppl.inference.resampling` to `most` values: a value of weight w is kept with
    probability min(c w, 1), its *share*, and then has the larger of w and 1/c. Values stand in blocks of BLOCK, of
    which only the sums are known at first.

    - *Threshold.* A value with c w >= 1 is in a block whose sum is at least 1/c. Let d be the factor for which the
      sum over blocks of min(d sum, 1) is `most`. Then d >= c, since the share of a block is at most the sum of the
      shares of its values. So it suffices to open the blocks whose sum is at least 1/d, which are fewer than
      `most`. The values in them, with the sums of the other blocks, have the same threshold as all values.
    - *Choice.* Values are kept by the pivotal method, `meet`: first in each opened block, then in each row, then across
      rows. A block that was not opened has a share below 1 and meets others as one unit. If it is kept, one of its
      values is drawn in proportion to the weights.

    No cumulative sum is involved: an error of 1e-6 in the weights changes about one meeting in a million.

    Parameters
    ----------
    log_sums : sequence of (n_i,) float64
        For each row, the log of the sum of the weights of each of its blocks; -inf if no value in it is alive.
    read : callable
        `read(rows, blocks)`, for two (m,) arrays, returns the log-weights in these blocks: (m, BLOCK) float64, -inf
        after the end of a row. It is called at most twice.
    """
    width = max(map(len, log_sums), default=1)
    padded = np.full((len(log_sums), width), -np.inf)
    for row, each in zip(padded, log_sums, strict=True):
        row[: len(each)] = each
    sums = padded.ravel()  # a block is identified by its index here
    opened = np.flatnonzero(sums > -np.inf)
    if opened.size > most:
        opened = threshold(sums, most)[1]
    values = read(*np.divmod(opened, width)) if opened.size else np.empty((0, BLOCK))
    ids = opened[:, None] * BLOCK + np.arange(
        BLOCK
    )  # (m, BLOCK) of values: index of the block, and in the block
    sums[opened] = -np.inf
    units = np.concatenate([values.ravel(), sums])
    if np.count_nonzero(units > -np.inf) <= most:
        return (*np.divmod(ids[values > -np.inf], width * BLOCK), values[values > -np.inf])
    log_c, _ = threshold(units, most)
    block_shares, shares = (np.exp(np.minimum(each + log_c, 0.0)) for each in (padded, values))
    found, blocks = _meetings(rng, block_shares, shares, ids)
    log_weights = np.maximum(values[np.searchsorted(opened, found // BLOCK), found % BLOCK], -log_c)
    if blocks.size:
        drawn = blocks * BLOCK + _draw(rng, read(*np.divmod(blocks, width)))
        found = np.append(found, drawn)
        log_weights = np.append(log_weights, np.full(drawn.size, -log_c))
    order = np.argsort(found)
    return (*np.divmod(found[order], width * BLOCK), log_weights[order])


def _meetings(
    rng: np.random.Generator, blocks: Floats, values: Floats, ids: Ints
) -> tuple[Ints, Ints]:
    """Return the ids of the kept values, and the indices of the kept blocks that were not opened.

    Parameters
    ----------
    blocks : (rows, blocks) float64
        Shares; 0 for an opened block, whose values meet each other first.
    values : (m, BLOCK) float64
        Shares in the opened blocks.
    ids : (m, BLOCK) int64
    """
    units = np.arange(-blocks.size, 0).reshape(
        blocks.shape
    )  # negative ids stand for unopened blocks
    opened = ids[:, 0] // BLOCK
    in_blocks, blocks.ravel()[opened], units.ravel()[opened] = meet(rng, values, ids)
    in_rows, left, units = meet(rng, blocks, units)
    across_rows, left, units = meet(rng, left[None], units[None])
    found = np.concatenate(
        [in_blocks, in_rows, across_rows, units[left > 0.5]]
    )  # left is 0 or 1, to rounding
    return found[found >= 0], found[found < 0] + blocks.size


def _draw(rng: np.random.Generator, log_weights: Floats) -> Ints:
    """Draw the index of one value of each row in proportion to the weights, as the winner of an exponential race."""
    weights = np.exp(log_weights - log_weights.max(axis=1, keepdims=True))
    times = rng.standard_exponential(weights.shape) + 1e-300  # never 0 / 0
    places: Ints = np.argmax(weights / times, axis=1)
    return places


# ---- beginning and end of a run


def check_model(model: M) -> M:
    """Return `model`. Raise a TypeError if it is no Model, and warn of a method `start` that none of its methods names.

    LLaMPPL calls such a method before the first step.
    """
    if not isinstance(model, Model):
        raise TypeError(
            f"inference wants a Model, an instance of your subclass, not {shown(model)}"
        )
    kinds = [kind for kind in type(model).__mro__ if not issubclass(Model, kind)]
    methods = [item for kind in kinds for item in vars(kind).items() if inspect.isfunction(item[1])]
    others = [inspect.unwrap(each).__code__.co_names for name, each in methods if name != "start"]
    if len(others) < len(methods) and "start" not in itertools.chain(*others):
        name = type(model).__name__
        warnings.warn(
            f"nothing calls {name}.start(): do its work in __init__, or in the first step()",
            stacklevel=3,
        )
    return model


def start_particles(model: M, choosers: Sequence[Sampled], power: float = 1.0) -> list[M]:
    """Return a particle for each chooser, whose target is a power of the joint probability."""
    wrap_step(type(check_model(model)))  # it may have been assigned to the class
    if model._noted_.before is not None and [*model._noted_][-1] is not None:
        raise ValueError(f"{type(model).__name__} sampled before its first step: sample in step()")
    particles = [model._spawn_(chooser) for chooser in choosers]
    power = positive("power", power)
    for particle in particles:
        particle._origin_ = model
        if power != 1.0:
            particle._power_ = power
    return particles


class Limit:
    """Limit of a run in seconds, and in tokens that its language models run. A run ends after the step that reaches it.

    The function of `watching` can end it, too. Inside of the block `with limit:` that function watches no run: those of
    a callback, or of a function under `batched`, are other runs. Within a task of `run_many`, the tokens are its share
    of the batches. With on_timeout="raise" the run ends by a TimeoutError.
    """

    def __init__(
        self,
        runtime: Runtime,
        timeout: float | None = None,
        budget: int | None = None,
        on_timeout: str = "return",
    ) -> None:
        self.runtime = runtime
        self.budget = optional_count("budget", budget)
        self.bounded = (timeout, budget) != (None, None)
        self.timeout = math.inf if timeout is None else positive("timeout", timeout)
        self.on_timeout = one_of("on_timeout", on_timeout, ("return", "raise"))
        self._start = time.perf_counter()
        self._tokens = spent()[1]
        self._watch = watching.get()

    def __enter__(self) -> None:
        self._watched = watching.set(unwatched)

    def __exit__(self, *error: object) -> None:
        watching.reset(self._watched)

    def reached(self, texts: Callable[[], list[str]]) -> str:
        """Return "timeout", "budget" or the reason of `watching` if that ends a run with these texts, else ""."""
        reason = self._watch(texts)
        if time.perf_counter() - self._start >= self.timeout:
            reason = "timeout"
        elif (
            self.budget is not None
            and (spent()[1] - self._tokens or self.runtime.stats.tokens) >= self.budget
        ):
            reason = "budget"
        if reason and self.on_timeout == "raise":
            raise TimeoutError(
                f"a run reached its {reason}; the `particles` of this error are those of its last step"
            )
        return reason


def cut(particles: Iterable[Model]) -> None:
    """End the unfinished particles, and mark them as cut."""
    for particle in particles:
        untwist(particle)
        if not particle.finished:
            particle._cut_ = True
        particle.finished = True


class Warnings:
    """Warns once of particles that the model's length cuts, and of a run in which no particle ends."""

    def __init__(self, *, bounded: bool) -> None:
        self.bounded = bounded
        self._warned = self._ended = False

    def step(self, t: int, candidates: Any, has_ended: bool) -> None:
        """Check a population of candidates of step t, of which one may have ended."""
        self._ended |= has_ended
        if not (self._ended or self.bounded):
            heaviest = candidates.heaviest()
            late, why = heaviest._late_
            if t == late:
                warn(f"no particle of {type(heaviest).__name__} has ended in {t} steps: {why}")
        limits = candidates.limits()
        if t == 1 and limits and len(limits) == candidates.finished.size:
            raise ValueError(limits[0])
        if limits and not self._warned:
            self._warned = True
            warnings.warn(
                f"step {t} reached the end of what the model reads: {limits[0]}", stacklevel=4
            )
