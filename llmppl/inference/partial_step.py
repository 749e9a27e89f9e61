"""Branches: a step run with its first choices given, up to the next one.

Every choice of a step can be listed so: a branch that was left is run again once for each value that its next choice
can take. Enumeration follows all of them, a beam the likeliest, and distinct expansion one choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from llmppl.models.choices import ListedChoice, Pick, StopAtChoice, Suspended
from llmppl.support.runtime import Runtime


class Branch:
    """A run of a step of a copy of `start`, its first choices given by `picks`.

    log_q : float
        The log-probability of the picks.
    particle : Model
        The copy; once `run`, at the end of the step or where it was left, log_q in its weight.
    error : Exception or None
        Why nothing can be drawn at the listed choice, once that was asked.
    """

    def __init__(self, start: Any, asker: str = "", picks: tuple[Pick, ...] = (), log_q: float = 0.0) -> None:
        self.start, self.picks, self.log_q, self._asker = start, picks, log_q, asker
        self._errors = list[Exception]()
        self._begin()

    def _begin(self) -> None:
        self.chooser = StopAtChoice(self.picks, self._asker, self._errors)
        self.particle = self.start._spawn_(self.chooser)
        self.error: Exception | None = None
        self._left: Suspended | None = None

    @property
    def left(self) -> bool:
        """Whether the step was left at a choice, which is the `listing` if it can be listed."""
        return self.chooser.left

    @property
    def listing(self) -> ListedChoice | None:
        return self.chooser.listing

    def run(self) -> None:
        try:
            self.particle.step()
        except Suspended as left:
            self._left = left
        self.chooser.end_step()
        self.particle._log_weight_ += self.log_q

    def ask(self) -> None:
        """Ask for the probabilities of the listed choice, and of all other distributions that the step has made.

        The exception by which the step was left holds those in its frames, so that one pass of a language model
        computes all. `error` is then an exception that belongs to the `sample` of the step: what the distribution
        raised, or that it has no value of positive probability.
        """
        assert self.listing is not None
        try:
            self.error = self.listing.impossible()
        except Exception as error:
            self.error = error
        self._left = None

    def run_failing(self) -> None:
        """Run the step again, on another copy, in which `sample` raises the `error`, after those that it handled."""
        assert self.error is not None
        self._errors.append(self.error)
        self._begin()
        self.run()

    def again(self) -> Branch:
        """The same branch, to be run once more on another copy."""
        return Branch(self.start, self._asker, self.picks, self.log_q)

    def children(self, K: int | None = None) -> list[Branch]:
        """The branches that go on from here: all of positive probability, or the K most probable."""
        assert self.listing is not None
        log_probs = self.listing.table.whole(self.listing.log_total)
        order = np.arange(log_probs.size) if K is None else np.argsort(-log_probs, kind="stable")[:K]
        picks = [Pick(self.listing, index) for index in order[log_probs[order] > -np.inf].tolist()]
        return [Branch(self.start, self._asker, (*self.picks, pick), self.log_q + pick.log_prob) for pick in picks]


Advance = Callable[[Sequence[Callable[[], Any]], Sequence[int]], None]      # runs functions of numbered branches


def follow(branches: Mapping[int, Branch], advance: Advance) -> None:
    """Run them up to the end of the step, or to a choice whose probabilities are then known.

    What a distribution raises belongs to the `sample` that draws from it: that step is run again to raise it there, and
    the exception reaches the caller unless the step handles it.
    """
    advance([branch.run for branch in branches.values()], [*branches])
    todo = [*branches]
    while todo := [i for i in todo if branches[i].listing is not None]:
        raised = None
        try:
            for some in todo[:1], todo[1:]:             # the first waits, and is answered with what all others need
                advance([branches[i].ask for i in some], some)
        except Exception as error:
            raised = error
            if all(branch.error is not error for branch in branches.values()):
                raise                                   # of no distribution, as that of a signal handler is
        failed = [i for i in todo if branches[i].error is not None]
        advance([branches[i].run_failing for i in failed], failed)
        todo = failed if raised is None else todo       # others were not asked then


def run_together(runtime: Runtime, branches: Sequence[Branch], name: str) -> tuple[list[Branch], list[Branch]]:
    """Run them: those whose step ended, and those that were left."""
    follow(dict(enumerate(branches)), lambda functions, numbers: runtime.run(functions, [name] * len(numbers)))
    return [branch for branch in branches if not branch.left], [branch for branch in branches if branch.left]
