"""Expansion: choice of the successors of the particles that a step of inference runs.

An expansion is `expand(run) -> list of Extension`, for a run of `SMC`, with `num_starts`, the number of particles with
which a run begins. `Copies` makes K copies of every active particle (Lew et al. 2023, Algorithm 1, to the letter).
`Distinct` chooses the first choices of all particles together, without replacement.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np

from llmppl.distributions import logsumexp
from llmppl.inference.choosing import choose_from
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
from llmppl.models.model import Model
from llmppl.support.arguments import count, is_hashable

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
    [' happy', ' sad', ' sad', ' happy', ' sad', ' happy']
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
