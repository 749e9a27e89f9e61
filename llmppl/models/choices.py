"""Choosers: objects that make the choices of a program. They are the only seam between programs and inference.

Every `sample` asks the particle's *chooser* for a value and notes the answer. There are four choosers:

    Sampled(rng)            draws every value from a random stream
    Fixed(rng, picks)       takes values that were listed before, then draws
    StopAtChoice(picks)     takes values that were listed before, then leaves the step and lists the next choice
    Replayed(steps, rng)    repeats the choices that another particle noted

`Model._spawn_` gives a chooser to a particle between two steps. The noted choices are `particle.choices`, plain data
from which `replay` rebuilds the particle. Checkpoints, conditional SMC and rejuvenation are built on these.

A step that runs again must do the same up to its first free choice. `ListedChoice.check` compares the listed choice
with the one that the repeated step requests.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmppl.distributions import Distribution, Finite, Impossible, Proposal
from llmppl.distributions.blocks import ArrayTable, Table
from llmppl.models.streams import ParticleStream, Stream
from llmppl.report.progress import cell_of
from llmppl.support.options import readable_tuple
from llmppl.support.runtime import Runtime
from llmppl.support.shared import Shared

M = TypeVar("M", bound=Any)
Floats = NDArray[np.float64]
CallSite = tuple[CodeType, int]                         # a line of a program

INSTEAD = "draw through self.sample(...) or self.rng, not from random, np.random, the time or the like"
MAX_LOG_DISTANCE = 1e-5                                 # of a sum of probabilities from 1: rounding in float32 is below
_OWN_FILES = frozenset(str(Path(__file__).with_name(name)) for name in ("model.py", "choices.py", "spans.py"))


# ---- noted choices


@readable_tuple
class Choice(NamedTuple):
    """A value that `sample` returned, and the log weight with which it was proposed; 0 for a Distribution."""

    value: Any
    log_w: float


class StreamState(NamedTuple):
    """State of the random stream when a program took `self.rng`, or sampled after that. None if it is not numpy's."""

    state: Any


Steps = tuple[tuple[Choice | StreamState, ...], ...]    # the choices of a particle, step by step


class Noted(Shared):
    """Noted choices of a particle, as a linked list. Copies share the older part. An item None begins a step."""

    __slots__ = ("before", "item")

    def __init__(self, before: Noted | None = None, item: Choice | StreamState | None = None) -> None:
        self.before, self.item = before, item

    def __iter__(self) -> Iterator[Choice | StreamState | None]:
        """Yield the items, from the latest to the earliest."""
        node = self
        while node.before is not None:
            yield node.item
            node = node.before

    def __reduce__(self) -> tuple[Any, ...]:            # a list as long as a run is nested too deep for pickle
        return _from_list, ([*self][::-1],)

    def steps(self) -> Steps:
        steps = list[list[Choice | StreamState]]()
        for item in [*self][::-1]:
            if item is None:
                steps.append([])
            elif steps:                                 # else it was sampled before the first step
                steps[-1].append(item)
        return tuple(map(tuple, steps))


NOTHING = Noted()


def _from_list(items: Iterable[Choice | StreamState | None]) -> Noted:
    return functools.reduce(Noted, items, NOTHING)


def last_choices(particle: Any) -> list[Choice | StreamState]:
    """Return the choices of the last step of a particle."""
    items, node = list[Choice | StreamState](), particle._noted_
    while node.item is not None:                        # None at the beginning of the step, and of the list
        items.append(node.item)
        node = node.before
    return items[::-1]


# ---- choosers


class Sampled:
    """Chooser that draws every value from the random stream `rng`, a Generator or a `Stream`.

    weighs : False if `sample` and `observe` do not weigh the particle
    by_hand : True if the model may choose outside of a step; a particle of a run may not
    rng_handed_out : True from where the step takes `self.rng`, until its end
    """

    weighs = True

    def __init__(self, rng: Any, *, by_hand: bool = False) -> None:
        self.stream, self.rng_handed_out, self.by_hand = rng, False, by_hand

    @property
    def rng(self) -> Any:
        if isinstance(self.stream, Stream):
            self.stream = self.stream.create()
        return self.stream

    def __deepcopy__(self, memo: dict[int, Any]) -> Sampled | None:
        """Return None, or the chooser of a model that is copied together with the particle whose stream it uses."""
        if isinstance(self.stream, ParticleStream):
            return Sampled(copy.deepcopy(self.stream, memo), by_hand=True)
        return None

    def begin_step(self) -> None:
        self.rng_handed_out = False

    def draw(self, particle: Any, proposal: Proposal) -> tuple[Any, float]:
        """Choose a value, note it, and return it with the log weight with which it is proposed."""
        value, log_w = choice = self.choose(particle, proposal)
        particle._noted_ = Noted(particle._noted_, Choice(value, log_w))
        if self.rng_handed_out:                         # a replay continues from the state after this draw
            self.note_stream(particle)
        return choice

    def choose(self, particle: Any, proposal: Proposal) -> tuple[Any, float]:
        return proposal.propose(self.rng)

    def hand_out_rng(self, particle: Any, name: str) -> Any:
        """Return the stream to a program that draws from it directly, by `rng.name`."""
        if particle._stepping_ and not self.rng_handed_out:
            self.rng_handed_out = True
            self.note_stream(particle)
        return self.rng

    def note_stream(self, particle: Any) -> None:
        state = self.rng.bit_generator.state if isinstance(self.rng, np.random.Generator) else None
        particle._noted_ = Noted(particle._noted_, StreamState(state))

    def end_step(self) -> None:
        """Raise an error if the step should have chosen more."""


class Fixed(Sampled):
    """Chooser that takes the `picks` first, then draws from `rng`.

    It raises a RuntimeError if a step does not list the picks again.
    """

    def __init__(self, rng: Any, picks: Sequence[Pick] = ()) -> None:
        super().__init__(rng)
        self._picks = list(picks)[::-1]                 # the last is the next

    def choose(self, particle: Any, proposal: Proposal) -> tuple[Any, float]:
        if not self._picks:
            return self.choose_freely(proposal)
        pick = self._picks[-1]
        if self.rng_handed_out and particle._noted_.item != StreamState(self.rng.bit_generator.state):
            raise pick.listing.error("it drew from self.rng before")
        choice = pick.take(proposal)                    # if that raises, the pick waits for the next sample
        self._picks.pop()
        return choice

    def choose_freely(self, proposal: Proposal) -> tuple[Any, float]:
        return proposal.propose(self.rng)

    def end_step(self) -> None:
        if self._picks:
            raise self._picks[-1].listing.error("it ended without a choice")


class Suspended(BaseException):
    """Exception that leaves a step at a choice that is not made. No `except Exception` of a program catches it."""


class StopAtChoice(Fixed):
    """Chooser that takes the `picks` and leaves the step (`Suspended`) at the next choice.

    `listing` is then that choice. It is None if the choice cannot be listed: the support is infinite, the measure of a
    weighted proposal would have to be computed for every value, the step draws from `self.rng` directly, or another
    thread makes the choice. With an `asker`, which needs every choice, a weighted proposal is listed, and the other
    cases are a TypeError in its name. A step that catches `Suspended` is left again at its next choice.

    The probabilities are not computed here, so that many steps can compute them together. If computing them raised
    errors before, the step's `sample` raises these `errors`, one at each choice.
    """

    def __init__(self, picks: Sequence[Pick] = (), asker: str = "", errors: Sequence[Exception] = ()) -> None:
        super().__init__(None, picks)
        self.listing: ListedChoice | None = None
        self.left = False
        self._asker, self._errors = asker, [*errors][::-1]
        self._refusal: TypeError | None = None
        self._thread = threading.get_ident()

    def choose(self, particle: Any, proposal: Proposal) -> tuple[Any, float]:
        if self.left:
            raise Suspended
        return super().choose(particle, proposal)

    def choose_freely(self, proposal: Proposal) -> tuple[Any, float]:
        if threading.get_ident() != self._thread:       # that thread cannot be left: it continues with any value
            self._refuse("a choice that another thread makes")
            return proposal.propose(np.random.default_rng(0))
        if self._errors:
            raise self._errors.pop()
        if self._asker or (isinstance(proposal, Distribution) and proposal.support is not None):
            self.listing = ListedChoice(proposal)
        self.left = True
        raise Suspended

    def hand_out_rng(self, particle: Any, name: str) -> NoReturn:
        self._refuse(f"self.rng.{name}()")
        raise self._refusal or Suspended

    def _refuse(self, choice: str) -> None:
        """Mark the step as left at a choice that cannot be listed."""
        self.left = True
        if self._asker:
            self._refusal = TypeError(f"{self._asker} cannot enumerate {choice}; draw with self.sample(dist)")

    def end_step(self) -> None:
        if self._refusal is not None:
            raise self._refusal
        if not self.left:
            super().end_step()


class Replayed(Sampled):
    """Chooser that repeats the choices of `steps`, the first of which is step `first`.

    If the program makes other choices, a ValueError names the step and the choice. Unless the chooser `weighs`, no
    probability is computed.
    """

    def __init__(self, steps: Steps, rng: Any, *, first: int = 1, weighs: bool = True) -> None:
        super().__init__(rng)
        self._steps, self._t, self._first, self.weighs = steps, 0, first, weighs
        self._remaining = deque[Choice | StreamState]()

    def begin_step(self) -> None:
        super().begin_step()
        self._remaining = deque(self._steps[self._t])
        self._t += 1

    def choose(self, particle: Any, proposal: Proposal) -> tuple[Any, float]:
        if not self._remaining and self.weighs:
            proposal.propose(self.rng)                  # if there is nothing to draw, the particle dies again
        value, log_w = self._next(Choice, f"the program samples from {proposal!r}")
        if self.weighs and log_w > -np.inf and proposal.log_measure(value) == -np.inf:
            raise self._error(f"the program samples from {proposal!r}, which does not give {value!r}")
        self._remaining.popleft()
        return value, log_w

    def note_stream(self, particle: Any) -> None:
        (state,) = self._next(StreamState, "the program draws from self.rng")
        self._remaining.popleft()
        if state is not None:
            if type(self.rng.bit_generator).__name__ != state["bit_generator"]:
                self.stream = np.random.Generator(getattr(np.random, state["bit_generator"])())
            self.rng.bit_generator.state = state
        super().note_stream(particle)

    def end_step(self) -> None:
        if self._remaining:
            raise self._error(f"the program goes on without {self._remaining[0]!r}")

    def _next(self, kind: type[Any], event: str) -> Any:
        """Return the next noted item. ValueError for this `event` if the item is not of this `kind`."""
        noted = self._remaining[0] if self._remaining else "nothing"
        if not isinstance(noted, kind):
            raise self._error(f"{event}, where {noted!r} was noted")
        return noted

    def _error(self, event: str) -> ValueError:
        number = len(self._steps[self._t - 1]) - len(self._remaining) + 1
        t = self._first + self._t - 1
        return ValueError(f"the program makes other choices: at step {t}, choice {number}, {event}")


def replay(model: M, choices: Steps, rng: np.random.Generator | None = None) -> M:
    """Rebuild the particle of `model` that made `choices`, without drawing anything.

    The result has the text, attributes, contexts and attribution of that particle, and the weight that the program gave
    it. Inference's own changes of weights (1/N, selection, cuts) are not repeated.

    Parameters
    ----------
    model : Model
    choices : tuple of tuple
        As in `particle.choices`.
    rng : np.random.Generator, optional
        The stream with which the particle continues; by default a new one.

    Raises
    ------
    ValueError
        If the program no longer makes these choices. The error names the step and the choice.

    Notes
    -----
    Direct draws from `self.rng` are repeated, because the state of the stream is noted when a step takes `self.rng`.
    Three things are not repeated: draws from a stream that was kept from an earlier step, the number of calls of a
    predicate of `where`, and anything that a step takes from outside of its particle.
    """
    rng = np.random.default_rng() if rng is None else rng
    chooser = Replayed(choices, rng)
    particle: M = model._spawn_(chooser)

    def run() -> None:
        for t, _ in enumerate(choices, 1):
            if particle.finished:
                raise ValueError(f"the program makes other choices: it ends at step {t - 1} of {len(choices)}")
            particle.step()
            chooser.end_step()

    Runtime().run([run], ["a replay"])
    particle._chooser_ = Sampled(rng, by_hand=True)
    return particle


# ---- a choice that is listed, and made when the step runs again


class Pick(NamedTuple):
    """The value at index `at` of a listed choice."""

    listing: ListedChoice
    at: int

    @property
    def log_prob(self) -> float:
        return self.listing.log_prob_at(self.at)

    def take(self, proposal: Proposal) -> tuple[Any, float]:
        self.listing.check(proposal, self.at)
        assert proposal.support is not None
        return proposal.support[self.at], 0.0


class ListedChoice:
    """A choice of finite support as a step listed it, to be compared with the choice of the repeated step.

    It holds its `proposal`, so that the repeated step finds the distribution already computed. Probabilities are
    computed when its table is first needed.
    """

    __slots__ = ("_call_site", "_proposal", "_table")

    def __init__(self, proposal: Proposal) -> None:
        self._proposal, self._call_site = proposal, call_site()
        self._table: Table | None = None

    @property
    def table(self) -> Table:
        """Log-measures of the values, plus `log_total`."""
        if self._table is None:
            dist = self._proposal
            self._table = dist.table() if isinstance(dist, Finite) else ArrayTable(dist.log_measures())
            if isinstance(dist, Distribution) and abs(self._table.log_total - self.log_total) > MAX_LOG_DISTANCE:
                raise ValueError(
                    f"{dist!r} is a Distribution, and its probabilities sum to {np.exp(self._table.log_total):.4g}: "
                    "they must sum to 1, or a Finite of the log-weights normalises them"
                )
        return self._table

    @property
    def log_total(self) -> float:
        return self._proposal.log_total() if isinstance(self._proposal, Finite) else 0.0

    def impossible(self) -> Impossible | None:
        """Return the error that a draw would raise; None if some value has positive probability."""
        if self.table.log_total > -np.inf:
            return None
        return Impossible(f"{self._proposal.brief} has no value of positive probability")

    def log_prob_at(self, index: int) -> float:
        return self.table.at(index) - self.log_total

    def check(self, proposal: Proposal, index: int) -> None:
        """Raise a RuntimeError unless `proposal` has as many values as the listed one."""
        if proposal is not self._proposal and len(proposal.support or ()) != len(self._proposal.support or ()):
            raise self.error("it chose from other values")

    def error(self, difference: str) -> RuntimeError:
        return RuntimeError(
            f"the step did something else when it was run again: at the sample {describe_site(self._call_site)}, "
            f"{difference}. Inference runs a step more than once, so what it does up to a choice must depend on its "
            f"particle alone: {INSTEAD}"
        )


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
