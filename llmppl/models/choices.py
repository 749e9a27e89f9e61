"""Choices: what a program chooses in its steps, and who chooses it. The one seam between a program and inference.

Every `sample` asks the particle's *chooser* for a value and notes the answer. There are four:

    Sampled(rng)            draws every value from a random stream
    Fixed(rng, picks)       takes values that were listed before, then draws
    Listed(picks)           takes values that were listed before, then leaves the step with the list of what can follow
    Replayed(steps, rng)    makes the choices that another particle noted

A chooser is given to a particle between two steps, by `Model._spawn_`. What the particle noted is `particle.choices`,
plain data from which `replay` makes the particle again. Checkpoints, conditional SMC and rejuvenation stand on these.

A step that is run again must do the same up to its first free choice. So a choice that was listed is compared with what
the step asks for then, by `Listing.check`.
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
from llmppl.models.alike import equal, same
from llmppl.models.streams import ParticleStream, Stream
from llmppl.report.notebook import cell_of
from llmppl.support.options import readable_tuple
from llmppl.support.runtime import Runtime
from llmppl.support.shared import Shared

M = TypeVar("M", bound=Any)
Floats = NDArray[np.float64]
CallSite = tuple[CodeType, int]                         # a line of a program

INSTEAD = "draw through self.sample(...) or self.rng, not from random, np.random, the time or the like"
MAX_DISTANCE = 0.01                                     # total variation: rounding in half precision stays below
MAX_LOG_DISTANCE = 0.05
_OWN_FILES = frozenset(str(Path(__file__).with_name(name)) for name in ("model.py", "choices.py", "spans.py"))


# ---- what was chosen


@readable_tuple
class Choice(NamedTuple):
    """A value that `sample` gave, and the log weight with which it was proposed; 0 for a Distribution."""

    value: Any
    log_w: float


class StreamState(NamedTuple):
    """The state of the random stream where a program took `self.rng`, or sampled after that; None if not numpy's."""

    state: Any


Steps = tuple[tuple[Choice | StreamState, ...], ...]    # the choices of a particle, step by step


class Noted(Shared):
    """What a particle noted: a linked list, whose older part it shares with its copies. None begins a step."""

    __slots__ = ("before", "item")

    def __init__(self, before: Noted | None = None, item: Choice | StreamState | None = None) -> None:
        self.before, self.item = before, item

    def __iter__(self) -> Iterator[Choice | StreamState | None]:
        """From the latest to the earliest."""
        node = self
        while node.before is not None:
            yield node.item
            node = node.before

    def __reduce__(self) -> tuple[Any, ...]:            # a list as long as a run is too deep for pickle
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


# ---- who chooses


class Sampled:
    """Draws every value from the random stream `rng`, which may be one that is yet to be made.

    weighs : whether `sample` and `observe` are to weigh the particle
    by_hand : whether the model may choose outside of a step, as one that is no particle of a run
    """

    weighs = True

    def __init__(self, rng: Any, *, by_hand: bool = False) -> None:
        self.stream, self.lent, self.by_hand = rng, False, by_hand

    @property
    def rng(self) -> Any:
        if isinstance(self.stream, Stream):
            self.stream = self.stream.made()
        return self.stream

    def __deepcopy__(self, memo: dict[int, Any]) -> Sampled | None:
        """The chooser of a model that is copied with the particle whose stream it draws from; else None."""
        if isinstance(self.stream, ParticleStream):
            return Sampled(copy.deepcopy(self.stream, memo), by_hand=True)
        return None

    def begin_step(self) -> None:
        self.lent = False

    def draw(self, particle: Any, proposal: Proposal) -> tuple[Any, float]:
        """A value and the log weight with which it is proposed, noted."""
        value, log_w = choice = self.choose(particle, proposal)
        particle._noted_ = Noted(particle._noted_, Choice(value, log_w))
        if self.lent:                                   # to go on as the stream does now
            self.note_stream(particle)
        return choice

    def choose(self, particle: Any, proposal: Proposal) -> tuple[Any, float]:
        return proposal.propose(self.rng)

    def lend(self, particle: Any, name: str) -> Any:
        """The stream, for a program that draws from it directly, by `rng.name`."""
        if particle._stepping_ and not self.lent:
            self.lent = True
            self.note_stream(particle)
        return self.rng

    def note_stream(self, particle: Any) -> None:
        state = self.rng.bit_generator.state if isinstance(self.rng, np.random.Generator) else None
        particle._noted_ = Noted(particle._noted_, StreamState(state))

    def end_step(self) -> None:
        """An error if the step should have chosen more."""


class Fixed(Sampled):
    """Takes the `picks` first, then draws from `rng`. A RuntimeError says where a step does not list them again."""

    def __init__(self, rng: Any, picks: Sequence[Pick] = ()) -> None:
        super().__init__(rng)
        self._picks = list(picks)[::-1]                 # the last is the next

    def choose(self, particle: Any, proposal: Proposal) -> tuple[Any, float]:
        if not self._picks:
            return self.choose_freely(proposal)
        if self.lent and particle._noted_.item != StreamState(self.rng.bit_generator.state):
            raise self._picks[-1].listing.error("it drew from self.rng before")
        choice = self._picks[-1].take(proposal)         # where that raises, the pick waits for the next sample
        self._picks.pop()
        return choice

    def choose_freely(self, proposal: Proposal) -> tuple[Any, float]:
        return proposal.propose(self.rng)

    def end_step(self) -> None:
        if self._picks:
            raise self._picks[-1].listing.error("it ended without a choice")


class Left(BaseException):
    """Leaves a step at a choice that is not made; no `except Exception` of a program holds it up."""


class Listed(Fixed):
    """Takes the `picks`, and leaves the step (`Left`) at the next choice.

    `listing` is then that choice, or None if it cannot be listed: it has no finite support, or is a weighted proposal,
    whose measure would have to be computed for every value, or is drawn from `self.rng` directly, or by another thread.
    With an `asker`, which needs every choice, a weighted proposal is listed, and the others are a TypeError in its
    name. A step that catches `Left` changes nothing of this: it is left again at its next choice.

    The probabilities are not asked for, so that this can be done for many at once. Where asking them has failed before,
    the step's `sample` raises these `errors`, one at each choice.
    """

    def __init__(self, picks: Sequence[Pick] = (), asker: str = "", errors: Sequence[Exception] = ()) -> None:
        super().__init__(None, picks)
        self.listing: Listing | None = None
        self.left = False
        self._asker, self._errors = asker, [*errors][::-1]
        self._refusal: TypeError | None = None
        self._thread = threading.get_ident()

    def choose(self, particle: Any, proposal: Proposal) -> tuple[Any, float]:
        if self.left:
            raise Left
        return super().choose(particle, proposal)

    def choose_freely(self, proposal: Proposal) -> tuple[Any, float]:
        if threading.get_ident() != self._thread:       # which cannot be left: it goes on with any value
            self._refuse("a choice that another thread makes")
            return proposal.propose(np.random.default_rng(0))
        if self._errors:
            raise self._errors.pop()
        if self._asker or (isinstance(proposal, Distribution) and proposal.support is not None):
            self.listing = Listing(proposal)
        self.left = True
        raise Left

    def lend(self, particle: Any, name: str) -> NoReturn:
        self._refuse(f"self.rng.{name}()")
        raise self._refusal or Left

    def _refuse(self, what: str) -> None:
        """Leave a choice that cannot be listed."""
        self.left = True
        if self._asker:
            self._refusal = TypeError(f"{self._asker} cannot enumerate {what}; draw with self.sample(dist)")

    def end_step(self) -> None:
        if self._refusal is not None:
            raise self._refusal
        if not self.left:
            super().end_step()


class Replayed(Sampled):
    """Makes the choices of `steps` again. A ValueError names the step and the choice where the program makes others.

    The first of them is step `first`. Unless it `weighs`, no distribution is asked.
    """

    def __init__(self, steps: Steps, rng: Any, *, first: int = 1, weighs: bool = True) -> None:
        super().__init__(rng)
        self._steps, self._t, self._first, self.weighs = steps, 0, first, weighs
        self._left = deque[Choice | StreamState]()

    def begin_step(self) -> None:
        super().begin_step()
        self._left = deque(self._steps[self._t])
        self._t += 1

    def choose(self, particle: Any, proposal: Proposal) -> tuple[Any, float]:
        if not self._left and self.weighs:
            proposal.propose(self.rng)                  # where there is nothing to draw, the particle dies again
        value, log_w = self._expect(Choice, f"the program samples from {proposal!r}")
        if self.weighs and log_w > -np.inf and proposal.log_measure(value) == -np.inf:
            raise self._error(f"the program samples from {proposal!r}, which does not give {value!r}")
        self._left.popleft()
        return value, log_w

    def note_stream(self, particle: Any) -> None:
        (state,) = self._expect(StreamState, "the program draws from self.rng")
        self._left.popleft()
        if state is not None:
            if type(self.rng.bit_generator).__name__ != state["bit_generator"]:
                self.stream = np.random.Generator(getattr(np.random, state["bit_generator"])())
            self.rng.bit_generator.state = state
        super().note_stream(particle)

    def end_step(self) -> None:
        if self._left:
            raise self._error(f"the program goes on without {self._left[0]!r}")

    def _expect(self, kind: type[Any], what: str) -> Any:
        if not self._left or not isinstance(self._left[0], kind):
            raise self._error(f"{what}, where {self._left[0] if self._left else 'nothing'!r} was noted")
        return self._left[0]

    def _error(self, what: str) -> ValueError:
        number, t = len(self._steps[self._t - 1]) - len(self._left) + 1, self._first + self._t - 1
        return ValueError(f"the program makes other choices: at step {t}, choice {number}, {what}")


def last_choices(particle: Any) -> list[Choice | StreamState]:
    """What the last step of a particle chose."""
    items, node = list[Choice | StreamState](), particle._noted_
    while node.item is not None:                        # where the step begins, or nothing was noted before
        items.append(node.item)
        node = node.before
    return items[::-1]


def replay(model: M, choices: Steps, rng: np.random.Generator | None = None) -> M:
    """The particle of `model` that made `choices`, as `particle.choices` gives them, without drawing anything.

    It has the text, the attributes, the contexts and the attribution of that particle, and the weight that the program
    gave it: what inference did to weights (1/N, selection, cuts) is inference's to put back. It goes on with `rng`, by
    default a new stream.

    What a step draws from `self.rng` directly comes out again, since the state of the stream is noted where a step
    takes `self.rng`. What cannot come out: draws from a stream that was kept from an earlier step, the number of calls
    of a predicate of `where`, and anything that a step takes from outside of its particle. Where the program no longer
    makes these choices, a ValueError names the step and the choice.
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


# ---- a choice that is listed, and made when the step is run again


class Pick(NamedTuple):
    """The value at the index `at` of what was listed."""

    listing: Listing
    at: int

    @property
    def log_prob(self) -> float:
        return self.listing.log_prob_at(self.at)

    def take(self, proposal: Proposal) -> tuple[Any, float]:
        self.listing.check(proposal, self.at)
        assert proposal.support is not None
        return proposal.support[self.at], 0.0


class Listing:
    """A choice as it was listed, to be compared with what the step asks for when it is run again.

    Parameters
    ----------
    proposal : Proposal
        What was drawn from, of finite support. It is asked when its table is needed, and held, so that a step which is
        run again finds the distribution that was computed.
    """

    __slots__ = ("_call_site", "_proposal", "_table")

    def __init__(self, proposal: Proposal) -> None:
        self._proposal, self._call_site = proposal, call_site()
        self._table: Table | None = None

    @property
    def table(self) -> Table:
        """The log-measure of its values, plus `log_total`."""
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
        """The error for drawing, if no value has positive probability."""
        if self.table.log_total > -np.inf:
            return None
        return Impossible(f"{self._proposal.brief} has no value of positive probability")

    def log_prob_at(self, index: int) -> float:
        return self.table.at(index) - self.log_total

    def check(self, proposal: Proposal, index: int) -> None:
        """A RuntimeError unless `proposal` is the same distribution, of which the value at `index` is drawn again."""
        before = self._proposal
        if proposal is before:
            return
        if before.recipe is not None and proposal.support is before.support and same(before.recipe, proposal.recipe):
            return
        self._check_support(proposal)
        support: Any = proposal.support
        if isinstance(proposal, Finite):
            self._check_measure(proposal.log_probs())
        elif not abs(proposal.log_measure(support[index]) - self.log_prob_at(index)) <= MAX_LOG_DISTANCE:
            raise self.error(f"the value {support[index]!r} had another probability")

    def _check_measure(self, log_probs: Floats) -> None:
        known = self._proposal.log_measures()
        if log_probs is known or np.array_equal(log_probs, known):
            return
        before, now = np.exp(known), np.exp(log_probs)
        if 0.5 * np.abs(before - now).sum() > MAX_DISTANCE * max(1e-300, min(1.0, before.sum())):
            i = int(np.abs(before - now).argmax())
            support: Any = self._proposal.support
            value = support[i]
            raise self.error(f"{value!r} had the probability {before[i]:.4g} and then {now[i]:.4g}")

    def _check_support(self, proposal: Proposal) -> None:
        before, now = self._proposal.support, proposal.support
        if now is before:
            return
        if now is None or before is None or len(now) != len(before):
            raise self.error(f"there were {len(before or ())} values, and then {'any' if now is None else len(now)}")
        if not equal(before, now):
            raise self.error("it chose from other values")

    def error(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"the step did something else when it was run again: at the sample {told(self._call_site)}, {what}. "
            "Inference runs a step more than once, so what it does up to a choice must depend on its particle alone: "
            f"{INSTEAD}"
        )


# ---- where a statement stands


def call_site() -> CallSite:
    """The line of the program whose statement is running: the nearest caller outside of this file and Model."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in _OWN_FILES:
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


@functools.cache
def told(site: CallSite) -> str:
    """A call site as it is told: "(story.py, line 41)", in a notebook "(In[3], line 4)"."""
    code, line = site
    return f"({cell_of(code.co_filename) or Path(code.co_filename).name}, line {line})"
