"""Branch: a step that runs with its first choices given, up to its next choice.

A suspended branch runs again once for each value of its next choice, so all choices of a step can be listed.
Enumeration follows all branches, a beam the likeliest, and distinct expansion one choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from llmppl.models.choices import ListedChoice, Pick, StopAtChoice, Suspended
from llmppl.support.runtime import Runtime


class Branch:
    """One run of a step of a copy of `start`, with its first choices given by `picks`.

    log_q : float
        Log-probability of the picks.
    particle : Model
        The copy. After `run` it stands at the end of the step or where the step was suspended, with log_q in its
        weight.
    error : Exception or None
        The reason why nothing can be drawn at the listed choice, after `evaluate`.
    """

    def __init__(self, start: Any, asker: str = "", picks: tuple[Pick, ...] = (), log_q: float = 0.0) -> None:
        self.start, self.picks, self.log_q, self._asker = start, picks, log_q, asker
        self._errors = list[Exception]()
        self._begin()

    def _begin(self) -> None:
        self.chooser = StopAtChoice(self.picks, self._asker, self._errors)
        self.particle = self.start._spawn_(self.chooser)
        self.error: Exception | None = None
        self._exit: Suspended | None = None

    @property
    def suspended(self) -> bool:
        """True if the step stopped at a choice. The choice is the `listing` if its values can be listed."""
        return self.chooser.left

    @property
    def listing(self) -> ListedChoice | None:
        return self.chooser.listing

    def run(self) -> None:
        """Run the step to its end, or to its first choice after the picks."""
        try:
            self.particle.step()
        except Suspended as left:
            self._exit = left
        self.chooser.end_step()
        self.particle._log_weight_ += self.log_q

    def evaluate(self) -> None:
        """Evaluate the listed choice, and every other distribution that the step has made.

        The exception that suspended the step holds these in its frames, so one pass of a language model computes all.
        `error` is then an exception that belongs to the `sample` of the step: the distribution raised it, or has no
        value of positive probability.
        """
        assert self.listing is not None
        try:
            self.error = self.listing.impossible()
        except Exception as error:
            self.error = error
        self._exit = None

    def rerun_raising(self) -> None:
        """Run the step again, on another copy, in which `sample` raises the `error` after those that it handled."""
        assert self.error is not None
        self._errors.append(self.error)
        self._begin()
        self.run()

    def copy(self) -> Branch:
        """Return the same branch before its run, on another copy of the particle."""
        return Branch(self.start, self._asker, self.picks, self.log_q)

    def children(self, K: int | None = None) -> list[Branch]:
        """Return the branches of the next choice: one for each possible value, or for the K most probable ones."""
        assert self.listing is not None
        log_probs = self.listing.table.whole(self.listing.log_total)
        order = np.arange(log_probs.size) if K is None else np.argsort(-log_probs, kind="stable")[:K]
        picks = [Pick(self.listing, index) for index in order[log_probs[order] > -np.inf].tolist()]
        return [Branch(self.start, self._asker, (*self.picks, pick), self.log_q + pick.log_prob) for pick in picks]


Advance = Callable[[Sequence[Callable[[], Any]], Sequence[int]], None]      # runs functions of numbered branches


def follow(branches: Mapping[int, Branch], advance: Advance) -> None:
    """Run branches to the end of the step, or to a choice whose probabilities are then known.

    An exception of a distribution belongs to the `sample` that draws from it. The step runs again to raise it there,
    and the exception reaches the caller unless the step handles it.
    """
    advance([branch.run for branch in branches.values()], [*branches])
    todo = [*branches]
    while todo := [i for i in todo if branches[i].listing is not None]:
        raised = None
        try:
            for some in todo[:1], todo[1:]:             # the first one waits, and its round answers all others
                advance([branches[i].evaluate for i in some], some)
        except Exception as error:
            raised = error
            if all(branch.error is not error for branch in branches.values()):
                raise                                   # not of a distribution, but of a signal handler, say
        failed = [i for i in todo if branches[i].error is not None]
        advance([branches[i].rerun_raising for i in failed], failed)
        todo = failed if raised is None else todo       # the exception came before the others were evaluated


def run_together(runtime: Runtime, branches: Sequence[Branch], name: str) -> tuple[list[Branch], list[Branch]]:
    """Run branches. Return those whose step ended, and the suspended ones."""
    follow(dict(enumerate(branches)), lambda functions, numbers: runtime.run(functions, [name] * len(numbers)))
    ended = [branch for branch in branches if not branch.suspended]
    return ended, [branch for branch in branches if branch.suspended]
