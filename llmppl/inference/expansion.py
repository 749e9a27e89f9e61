"""Expansion: which successors of the particles a step of inference runs.

An expansion is `expand(run) -> list of Extension`, with `num_starts`, the number of particles a run begins with.

`Copies` are K of every active particle, each with 1/K of its weight (Lew et al. 2023, Algorithm 1, to the letter). With
`merge`, those that made the same choices become one, with the weights of them all: to have one of them twice tells
nothing new.

`Distinct` chooses the first choices of all particles together, without replacement: a step is run up to its first
`sample` of a finite support; the candidates (particle, value), each with the weight of the particle times the
probability of the value, go through an optimal down-sampler, and each that is kept is run from the beginning of the
step with that choice fixed; several times, with shares of its weight, if there are few of them and the step chooses on.
The down-sampler keeps the expected sum of any function over the candidates, and the selection after the step does so
again; so Z-hat stays unbiased.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from llmppl.distributions import Floats, Ints, logsumexp, read_blocks, values_at
from llmppl.inference.choose_candidates import choose
from llmppl.inference.partial_step import Branch, follow
from llmppl.inference.run_guards import GlobalStreams
from llmppl.models.alike import first_difference
from llmppl.models.choices import Choice, Fixed, ListedChoice, Pick, Sampled, last_choices
from llmppl.models.model import Model
from llmppl.models.streams import Stream, spawned
from llmppl.support.arguments import count


class Extension:
    """A candidate: a particle whose step is run, or that only goes along.

    particle : Model
    parent : int
        The place of its parent among the particles.
    group : int
        The same for those that run the step independently from the same start.
    pick : Pick, optional
        Its first choice, if that is fixed; it was kept with probability exp(log_kept).
    moving : bool
        Whether its step is to be run.
    log_start : float
        Its log-weight before the step, without a twist.
    copies : int
        How many independent runs of the step it stands for; 0 if the step is not run, or drew nothing more than a first
        choice that was selected.
    """

    def __init__(
        self, particle: Any, parent: int, group: int, *, pick: Pick | None = None, log_kept: float = 0.0,
        moving: bool = True,
    ) -> None:  # fmt: skip
        self.particle, self.parent, self.group = particle, parent, group
        self.pick, self.log_kept, self.moving = pick, log_kept, moving
        self.log_start: float = particle.log_weight - particle.log_twist
        self.copies = int(moving)

    @property
    def chose_on(self) -> bool:
        """Whether its step drew more than its first choice."""
        return len(last_choices(self.particle)) > 1

    @property
    def key(self) -> Hashable | None:
        """What it is merged by: its parent and all that it chose in the step. None if not all of that is known."""
        if not self.moving or self.particle.log_weight == -math.inf:
            return None
        choices = last_choices(self.particle)
        key = self.parent, *(choice.value for choice in choices if isinstance(choice, Choice))
        try:
            hash(key)
        except TypeError:                               # EOS and arrays, of which equal ones cannot be found
            return None
        return key if len(key) == len(choices) + 1 else None        # else it drew from its stream directly

    def share(self, number: int) -> None:
        """Be one of `number` that share the weight."""
        self.log_start -= math.log(number)
        self.particle._log_weight_ -= math.log(number)

    def join(self, other: Extension) -> None:
        """Stand for another one, which chose the same, as well."""
        self.log_start = float(np.logaddexp(self.log_start, other.log_start))
        self.particle._log_weight_ = float(np.logaddexp(self.particle.log_weight, other.particle.log_weight))
        self.copies += other.copies


class Run(Protocol):
    """What an expansion asks of a run, which is `llmppl.inference.SMC`."""

    particles: list[Any]
    t: int
    rng: np.random.Generator                            # spawns all streams: the seed of a child's child grows with t

    @property
    def streams(self) -> GlobalStreams: ...

    def advance(self, functions: Sequence[Callable[[], Any]], numbers: Iterable[int] | None = None) -> None: ...


@dataclass(frozen=True)
class Copies:
    """K copies of every active particle, each with 1/K of its weight; finished ones go along. N particles begin."""

    N: int
    K: int = 1
    merge: bool = False

    def __post_init__(self) -> None:
        count("N", self.N)
        count("K", self.K)

    @property
    def num_starts(self) -> int:
        return self.N

    def __call__(self, run: Run) -> list[Extension]:
        extensions, streams = list[Extension](), spawned(run.rng)
        for i, particle in enumerate(run.particles):
            group = i if run.t > 1 else 0               # all start at one state
            copies = [particle]
            if not particle.finished:
                particle._log_weight_ -= math.log(self.K)
                copies += [particle._spawn_(Sampled(next(streams))) for _ in range(self.K - 1)]
            extensions += [Extension(copy, i, group, moving=not copy.finished) for copy in copies]
        _step(run, extensions)
        return _merged(extensions) if self.merge else extensions


@dataclass(frozen=True)
class Distinct:
    """Extensions with distinct first choices, at most N K of them; finished particles go along. One particle begins.

    Where there are fewer, those that chose on after the first are run again, N K times in all, the heavier ones more
    often; equal ones are merged. A particle that draws before its first choice outside `sample`, or whose first choice
    has no finite support or is a weighted proposal, is copied K times (N K times if it is the only one). One that ends
    without a choice goes on once. The code of a step before its first `sample` runs twice.

    Raises
    ------
    RuntimeError
        If a step chose by other means: run again, it did something else, or it drew from a stream of the process.
    """

    N: int
    K: int

    def __post_init__(self) -> None:
        count("N", self.N)
        count("K", self.K)

    num_starts = 1

    def __call__(self, run: Run) -> list[Extension]:
        probes = {i: Branch(particle) for i, particle in enumerate(run.particles) if not particle.finished}
        follow(probes, run.advance)
        quiet = [i for i, probe in probes.items() if not probe.left]
        if quiet:
            run.streams.check({i: probes[i] for i in quiet}, run.advance)
        listed = {i: probe.listing for i, probe in probes.items() if probe.listing is not None}
        kept = self._chosen(run, listed)
        groups, streams, extensions = itertools.count(), spawned(run.rng), list[Extension]()
        for i, particle in enumerate(run.particles):
            if i in kept:
                extensions += self._fixed(probes[i], i, kept[i], groups, streams)
            elif i in probes and probes[i].left:
                number = self.N * self.K if len(run.particles) == 1 else self.K
                extensions += self._copied(particle, i, number, next(groups), streams)
            else:
                extensions.append(self._going(particle, i, probes.get(i), next(groups)))
        _step(run, extensions)
        fixed = [each for each in extensions if each.pick is not None]
        return sorted(_merged(extensions + self._again(run, fixed, streams)), key=lambda each: each.parent)

    def _chosen(self, run: Run, listed: dict[int, ListedChoice]) -> dict[int, list[tuple[int, float, float]]]:
        """The first choices of each particle that are kept: index, new log-weight, log of how probable that was."""
        particles = [run.particles[i] for i in listed]
        totals = [listing.log_total for listing in listed.values()]
        starts = np.array([p.log_weight - p.log_twist - total for p, total in zip(particles, totals, strict=True)])
        tables = [listing.table for listing in listed.values()]
        log_sums = [start + table.log_sums for start, table in zip(starts, tables, strict=True)]

        def read(rows: Ints, blocks: Ints) -> Floats:
            return starts[rows, None] + read_blocks(tables, rows, blocks)

        kept: dict[int, list[tuple[int, float, float]]] = {i: [] for i in listed}
        chosen = choose(run.rng, log_sums, read, self.N * self.K)
        rows = np.repeat(np.arange(len(chosen)), [len(indices) for indices, _ in chosen])
        indices, log_weights = map(np.concatenate, zip(*chosen, strict=True)) if chosen else (rows, starts)
        log_kept = np.minimum(starts[rows] + values_at(tables, rows, indices) - log_weights, 0.0)
        numbers = [*listed]
        for row, *each in zip(*map(np.ndarray.tolist, (rows, indices, log_weights, log_kept)), strict=True):
            kept[numbers[row]].append(tuple(each))
        return kept

    def _fixed(
        self, probe: Branch, i: int, kept: list[tuple[int, float, float]], groups: Iterator[int],
        streams: Iterator[Stream],
    ) -> list[Extension]:  # fmt: skip
        """An extension for each first choice that was kept."""
        assert probe.listing is not None
        extensions = []
        for index, log_weight, log_kept in kept:
            pick = Pick(probe.listing, index)
            copy = _started(probe.start, Fixed(next(streams), [pick]), log_weight)
            extensions.append(Extension(copy, i, next(groups), pick=pick, log_kept=log_kept))
        return extensions

    def _copied(
        self, particle: Model, i: int, number: int, group: int, streams: Iterator[Stream]
    ) -> list[Extension]:
        copies = [particle._spawn_(Sampled(next(streams))) for _ in range(number)]
        for copy in copies:
            copy._log_weight_ -= math.log(number)
        return [Extension(copy, i, group) for copy in copies]

    def _going(self, particle: Model, i: int, probe: Branch | None, group: int) -> Extension:
        """A particle that has finished, or chose nothing in its step, which is then done."""
        going = Extension(particle, i, group, moving=False)
        if probe is not None:
            going.particle = probe.particle
            going.particle._chooser_ = particle.chooser
        return going

    def _again(self, run: Run, fixed: list[Extension], streams: Iterator[Stream]) -> list[Extension]:
        """Further runs of those that chose on after their first choice, until there are about N K in all."""
        again = [each for each in fixed if each.chose_on]
        log_starts = np.array([each.log_start for each in again])
        shares = np.exp(log_starts - logsumexp(log_starts))
        numbers = 1 + np.floor(max(self.N * self.K - len(fixed), 0) * shares).astype(int)
        for each in fixed:
            each.copies = 0
        more = list[Extension]()
        for each, number in zip(again, numbers.tolist(), strict=True):
            each.share(number)
            each.copies = 1
            particle = run.particles[each.parent]
            for _ in range(number - 1):
                assert each.pick is not None
                copy = _started(particle, Fixed(next(streams), [each.pick]), each.log_start)
                more.append(Extension(copy, each.parent, each.group, pick=each.pick, log_kept=each.log_kept))
        _step(run, more)
        return more


ExpansionName = Literal["distinct", "merged", "copies"]
EXPANSIONS: dict[ExpansionName, Callable[[int, int], Copies | Distinct]] = {
    "distinct": Distinct, "merged": functools.partial(Copies, merge=True), "copies": Copies
}  # fmt: skip


def _started(particle: Model, chooser: Sampled, log_weight: float) -> Model:
    """A copy that begins its step with this log-weight."""
    copy = particle._spawn_(chooser)
    copy._log_weight_, copy._log_twist_ = log_weight, 0.0
    return copy


def _step(run: Run, extensions: list[Extension]) -> None:
    """Run the steps of those that move."""
    moving = [each.particle for each in extensions if each.moving]
    run.advance([particle.step for particle in moving])
    for particle in moving:
        particle.chooser.end_step()


def _merged(extensions: list[Extension]) -> list[Extension]:
    """One of those of a parent that made the same choices and are alike, with the weights of all.

    Those that differ drew from elsewhere, and go on apart, which is unbiased whatever they drew from.
    At the first step all particles are alike; to merge across them would leave few to be extended at the next.
    """
    first: dict[Hashable, Extension] = {}
    left = list[Extension]()
    for each in extensions:
        key = each.key
        same = each if key is None else first.setdefault(key, each)
        if same is each or first_difference(same.particle, each.particle, weights=False):
            left.append(each)
        else:
            same.join(each)
    return left
