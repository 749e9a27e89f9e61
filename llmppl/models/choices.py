"""Choosers: objects that make the choices of a program. They are the only seam between programs and inference.

Every `sample` asks the particle's *chooser* for a value and notes the answer. There are three choosers:

    Sampled(rng, pick)      takes one value that was listed before, if given, then draws from a random stream
    StopAtChoice(picks)     takes values that were listed before, then leaves the step and lists the next choice
    Replayed(steps, rng)    repeats the choices that another particle noted

`Model._spawn_` gives a chooser to a particle between two steps. The noted choices are `particle.choices`, plain data
from which `replay` rebuilds the particle.

A *stream* is the random generator of one particle. It is a `State` until the first draw, and most streams stay one: a
candidate whose only choice was made for it draws nothing.
"""

import copy
import functools
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmppl.constraints.vocabulary import Text, Token
from llmppl.distributions import Distribution, Finite, Impossible, Proposal, RejectionProposal
from llmppl.distributions.blocks import ArrayTable, Table
from llmppl.report.progress import cell_of
from llmppl.support.locks import cached_property
from llmppl.support.runtime import Runtime
from llmppl.support.shared import Shared

M = TypeVar("M", bound=Any)
Floats = NDArray[np.float64]
CallSite = tuple[CodeType, int]  # a line of a program

MAX_ROUNDING = 1e-5  # of a log sum of probabilities: rounding in float32 is below
_OWN_FILES = {
    str(Path(__file__).with_name(name)) for name in ("model.py", "choices.py", "spans.py")
}
_OWN_FILES.add(str(Path(__file__).parent.with_name("checking.py")))


# ---- random streams


class State(NamedTuple):
    """State of a stream, which determines all that it will draw and spawn.

    `entropy` to `children` are those of its SeedSequence. `state` is the bit generator's; None before the first draw.
    """

    kind: str
    entropy: Any
    spawn_key: tuple[int, ...]
    pool_size: int
    children: int = 0
    state: Any = None


def state_of(stream: Any) -> State:
    """Return the state of a stream, which is a State already or a numpy stream that can spawn."""
    if isinstance(stream, State):
        return stream
    seed = stream.bit_generator.seed_seq
    state = stream.bit_generator.state
    return State(
        state["bit_generator"],
        seed.entropy,
        seed.spawn_key,
        seed.pool_size,
        seed.n_children_spawned,
        state,
    )


def stream_of(state: State) -> np.random.Generator:
    """Return a new numpy stream with this state."""
    kind, entropy, key, size, children, now = state
    seed = np.random.SeedSequence(
        entropy, spawn_key=key, pool_size=size, n_children_spawned=children
    )
    stream = np.random.Generator(getattr(np.random, kind)(seed))
    if now is not None:
        stream.bit_generator.state = now
    return stream


def spawned(rng: np.random.Generator) -> Iterator[State]:
    """Yield the streams of `rng.spawn(1)[0].spawn(n)`, without end. `rng` spawns when the first is requested."""
    (family,) = rng.spawn(1)
    seed: Any = family.bit_generator.seed_seq
    kind = type(family.bit_generator).__name__
    entropy = seed.entropy
    key = seed.spawn_key
    size = seed.pool_size
    for number in itertools.count():
        yield State(kind, entropy, (*key, number), size)


class ParticleStream(np.random.Generator):
    """Random stream of a particle, as its program uses it: `model.rng`.

    Each use goes through the chooser of the particle. A copy of the particle that has it in an attribute uses its own.
    """

    def __init__(self, particle: Any) -> None:
        super().__init__(_NO_BITS)
        self.particle = particle

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") or name == "particle":
            return object.__getattribute__(self, name)
        particle = self.particle
        return getattr(
            (particle.chooser or particle._own_chooser_()).hand_out_rng(particle, name), name
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParticleStream":
        return ParticleStream(memo.get(id(self.particle), self.particle))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "the random stream of a particle cannot be pickled: its state is rng.bit_generator.state"
        )

    def __repr__(self) -> str:
        return "<the random stream of a particle>"

    __str__ = __repr__


_NO_BITS = np.random.PCG64(0)  # a Generator requires one; nothing draws from it


# ---- noted choices


class Choice(NamedTuple):
    """A value that `sample` returned, and the log weight with which it was proposed; 0 for a Distribution.

    Examples
    --------
    >>> program = ConstrainedText(lm, "The girl had a", Regex(" (red|blue) (hat|ball)"))
    >>> particle = smc_steer(program, N=4, K=3, seed=0).best
    >>> [choice.value for [choice] in particle.choices]                 # one choice in each step
    [Token(1234, ' red'), Token(1320, ' ball')]
    """

    value: Any
    log_w: float


Item = Choice | State  # a State: the stream's, when a program took `self.rng`
Steps = tuple[tuple[Item, ...], ...]  # the choices of a particle, step by step


class Noted(Shared):
    """Noted choices of a particle, as a linked list. Copies share the older part. An item None begins a step."""

    __slots__ = ("before", "item")

    def __init__(self, before: "Noted | None" = None, item: Item | None = None) -> None:
        self.before = before
        self.item = item

    def __iter__(self) -> Iterator[Item | None]:
        """Yield the items, from the latest to the earliest."""
        node = self
        while node.before is not None:
            yield node.item
            node = node.before

    def steps(self) -> Steps:
        steps: list[list[Any]] = [[]]  # the first: sampled before the first step
        for item in [*self][::-1]:
            if item is None:
                steps.append([])
            else:
                steps[-1].append(item)
        return tuple(map(tuple, steps[1:]))


NOTHING = Noted()


def last_choices(particle: Any) -> list[Item]:
    """Return the choices of the last step of a particle."""
    return [*itertools.takewhile(lambda item: item is not None, particle._noted_)][::-1]


def drawn_text(particle: Any) -> str:
    """Return the text of a particle and the tokens of its last step that it has not added, as those of a span."""
    values = [item[0] for item in last_choices(particle) if isinstance(item, Choice)]
    drawn = Text(b"".join(value.bytes for value in values if isinstance(value, Token)))
    text = str(particle)
    added = particle.s[len(particle._before_) :]
    return text + drawn[next(n for n in range(len(drawn), -1, -1) if added.endswith(drawn[:n])) :]


# ---- choosers


class Sampled:
    """Chooser that takes the `pick`, if any, then draws from the random stream `rng`, a Generator or a `State`.

    weighs : False if `sample` and `observe` do not weigh the particle
    by_hand : True if the model may choose outside of a step; a particle of a run may not
    """

    weighs = True

    def __init__(self, rng: Any, pick: "Pick | None" = None, *, by_hand: bool = False) -> None:
        self.stream = rng
        self._pick = pick
        self.by_hand = by_hand

    @property
    def rng(self) -> Any:
        if isinstance(self.stream, State):
            self.stream = stream_of(self.stream)
        return self.stream

    def __deepcopy__(self, memo: dict[int, Any]) -> "Sampled | None":
        """Return None, or the chooser of a model that is copied together with the particle whose stream it uses."""
        if isinstance(self.stream, ParticleStream):
            return Sampled(copy.deepcopy(self.stream, memo), by_hand=True)
        return None

    def draw(self, particle: Any, proposal: Proposal) -> tuple[Any, float]:
        """Choose a value, note it, and return it with the log weight with which it is proposed."""
        value, log_w = choice = self.choose(proposal)
        before = particle._noted_
        particle._noted_ = Noted(before, Choice(value, log_w))
        if type(before.item) is State:  # a replay continues from the state after this draw
            self.note_stream(particle)
        return choice

    def choose(self, proposal: Proposal) -> tuple[Any, float]:
        pick = self._pick
        self._pick = None
        return proposal.propose(self.rng) if pick is None else pick.take(proposal)

    def hand_out_rng(self, particle: Any, name: str) -> Any:
        """Return the stream to a program that draws from it directly, by `rng.name`."""
        if particle._stepping_ and type(particle._noted_.item) is not State:
            self.note_stream(particle)
        return self.rng

    def note_stream(self, particle: Any) -> None:
        particle._noted_ = Noted(particle._noted_, state_of(self.rng))


class Suspended(BaseException):
    """Exception that leaves a step at a choice that is not made. No `except Exception` of a program catches it."""


class StopAtChoice(Sampled):
    """Chooser that takes the `picks` and leaves the step (`Suspended`) at the next choice, which is then its `listing`.

    `listing` is None if the choice cannot be listed: the support is infinite, the measure of a weighted proposal would
    have to be computed for every value, or the step draws from `self.rng` directly. With an `asker`, which needs every
    choice, a weighted proposal is listed, and the other cases are a TypeError in its name.

    The step waits for the probabilities of the choice. If they cannot be computed, its `sample` raises the error. With
    `most`, a rejection proposal lists so many values.
    """

    def __init__(
        self, picks: "Sequence[Pick]" = (), asker: str = "", most: int | None = None
    ) -> None:
        super().__init__(None)
        self.listing: ListedChoice | None = None
        self.left = False
        self._picks = iter(picks)
        self._asker = asker
        self._most = most

    def choose(self, proposal: Proposal) -> tuple[Any, float]:
        if self.left:  # the step has caught the first exception
            raise Suspended
        if (pick := next(self._picks, None)) is not None:
            return pick.take(proposal)
        if self._asker or (isinstance(proposal, Distribution) and proposal.support is not None):
            listing = ListedChoice(proposal, self._most)
            listing.check()
            self.listing = listing
        self.left = True
        raise Suspended

    def hand_out_rng(self, particle: Any, name: str) -> NoReturn:
        self.left = True
        if self._asker:
            raise TypeError(
                f"{self._asker} cannot enumerate self.rng.{name}(); draw with self.sample(dist)"
            )
        raise Suspended


class Replayed(Sampled):
    """Chooser that repeats the choices of `steps`.

    If the program makes other choices, a ValueError names the step and the choice. Unless the chooser `weighs`, no
    probability is computed. `read` returns the choice that an item of the steps stands for.
    """

    def __init__(
        self,
        steps: Steps,
        rng: Any,
        *,
        weighs: bool = True,
        read: Callable[[Any], Any] = lambda item: item,
    ) -> None:
        super().__init__(rng)
        self.steps = steps
        self._t = 0
        self.weighs = weighs
        self._read = read
        self._remaining: deque[Item] = deque(*steps[:1])

    def choose(self, proposal: Proposal) -> tuple[Any, float]:
        if not self._remaining and self.weighs:
            proposal.propose(self.rng)  # if there is nothing to draw, the particle dies again
        value, log_w = self._next(Choice, f"the program samples from {proposal!r}")
        if self.weighs and log_w > -np.inf and proposal.log_measure(value) == -np.inf:
            raise self._error(
                f"the program samples from {proposal!r}, which does not give {value!r}"
            )
        self._remaining.popleft()
        return value, log_w

    def note_stream(self, particle: Any) -> None:
        self.stream = self._next(State, "the program draws from self.rng")
        self._remaining.popleft()
        super().note_stream(particle)

    def end_step(self) -> None:
        """Check that the step has made all its choices, and go to the next one."""
        if self._remaining:
            raise self._error(f"the program goes on without {self._remaining[0]!r}")
        self._t += 1
        self._remaining = deque(*self.steps[self._t : self._t + 1])

    def _next(self, kind: type[Any], event: str) -> Any:
        """Return the next noted item. ValueError for this `event` if the item is not of this `kind`."""
        noted = self._read(self._remaining[0]) if self._remaining else "nothing"
        if not isinstance(noted, kind):
            raise self._error(f"{event}, where {noted!r} was noted")
        return noted

    def _error(self, event: str) -> ValueError:
        number = len(self.steps[self._t]) - len(self._remaining) + 1
        return ValueError(
            f"the program makes other choices: at step {self._t + 1}, choice {number}, {event}"
        )


def replay(model: M, choices: Steps, rng: np.random.Generator | None = None) -> M:
    """Rebuild the particle of `model` that made `choices`, as in `particle.choices`, without drawing anything.

    The result has the text, attributes, contexts and attribution of that particle, and the weight that the program gave
    it. Inference's own changes of weights (1/N, selection, cuts) are not repeated. Direct draws from `self.rng`, and
    the runs of inference that use it, are repeated: a step notes the state of the stream. Anything that a step takes
    from outside of its particle is not. The particle continues with `rng`, by default a new stream.

    Raises
    ------
    ValueError
        If the program no longer makes these choices. The error names the step and the choice.

    Examples
    --------
    >>> program = ConstrainedText(lm, "The girl had a", Regex(" (red|blue) (hat|ball)"))
    >>> particle = smc_steer(program, N=4, K=3, seed=0).best
    >>> replay(program, particle.choices).s
    ' red ball'
    """
    rng = np.random.default_rng() if rng is None else rng
    particle: M = _replayed([(model, Replayed(choices, rng))])[0]
    particle._chooser_ = Sampled(rng, by_hand=True)
    return particle


def _replayed(todo: Sequence[tuple[Any, Replayed]]) -> list[Any]:
    """Return the particles of programs that repeat the choices of a chooser, in shared batches."""
    particles = [model._spawn_(chooser) for model, chooser in todo]

    def run(particle: Any, chooser: Replayed) -> None:
        for t in range(len(chooser.steps)):
            if particle.finished:
                raise ValueError(
                    f"the program makes other choices: it ends at step {t} of {len(chooser.steps)}"
                )
            particle.step()
            chooser.end_step()

    runs = [
        functools.partial(run, particle, chooser)
        for particle, (_, chooser) in zip(particles, todo, strict=True)
    ]
    Runtime().run(runs, ["a replay"] * len(runs))
    return particles


class _Scored(Replayed):
    """Chooser that repeats choices, and adds up their log-probabilities under the proposals."""

    log_q = 0.0

    def choose(self, proposal: Proposal) -> tuple[Any, float]:
        value, log_w = super().choose(proposal)
        self.log_q += proposal.log_measure(value) - log_w
        return value, log_w


def log_joints(particles: Sequence[Any]) -> list[float]:
    """Return the log of the joint probability of each particle of a run; see `Model.log_joint`.

    The weight that the program gives is that probability over the one of the proposals. ValueError for a particle that
    is of no run, or whose program makes other choices now.
    """
    if any(particle._origin_ is None for particle in particles):
        raise ValueError(
            "log_joint is of the particles of a run: smc_steer, importance_sampling, enumerate_exact ..."
        )
    todo = [(each._origin_, _Scored(each.choices, np.random.default_rng(0))) for each in particles]
    replayed = _replayed(todo)
    return [
        each.log_weight - each.log_twist + chooser.log_q
        for each, (_, chooser) in zip(replayed, todo, strict=True)
    ]


# ---- a choice that is listed, and made when the step runs again


class Pick(NamedTuple):
    """The value at index `at` of a listed choice."""

    listing: "ListedChoice"
    at: int

    @property
    def log_prob(self) -> float:
        return self.listing.table.at(self.at) - self.listing.log_total

    def take(self, proposal: Proposal) -> tuple[Any, float]:
        assert proposal.support is not None
        return proposal.support[self.at], 0.0


class ListedChoice:
    """A choice of finite support as a step listed it. Its probabilities are computed when first needed."""

    def __init__(self, proposal: Proposal, most: int | None = None) -> None:
        self.proposal = proposal
        self._most = most

    @cached_property
    def table(self) -> Table:
        """Log-measures of the values, plus `log_total`. ValueError if a Distribution is not normalised."""
        dist = self.proposal
        if isinstance(dist, Finite):
            return dist.table()
        if self._most is not None and isinstance(dist, RejectionProposal):
            return ArrayTable(dist.log_measures(self._most))
        table = ArrayTable(dist.log_measures())
        if isinstance(dist, Distribution) and not abs(table.log_total) < MAX_ROUNDING:
            raise ValueError(
                f"{dist!r} is a Distribution, and its probabilities sum to {np.exp(table.log_total):.4g}: they must "
                "sum to 1, or a Finite of the log-weights normalises them"
            )
        return table

    @cached_property
    def log_total(self) -> float:
        """Log of the factor by which the measures of the table are too large for a Distribution."""
        if isinstance(self.proposal, Finite):
            return self.proposal.log_total()
        return self.table.log_total if isinstance(self.proposal, Distribution) else 0.0

    def check(self) -> None:
        """Compute the table. Raise `Impossible`, as a draw would, if no value has positive probability."""
        if self.table.log_total == -np.inf:
            raise Impossible(f"{self.proposal!r} has no value of positive probability")


# ---- the line of a statement


def call_site() -> CallSite:
    """Return the line of the program whose statement runs: the nearest caller outside of this file and Model."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in _OWN_FILES:
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


@functools.cache
def describe_site(site: CallSite) -> str:
    """Return a call site in words: "(story.py, line 41)", in a notebook "(In[3], line 4)"."""
    code, line = site
    return f"({cell_of(code.co_filename) or Path(code.co_filename).name}, line {line})"
