"""Branches: a step run with its first choices given, up to the next one.

Every choice of a step can be listed so: a branch that was left is run again once for each value that its next choice
can take. Enumeration follows all of them, a beam the likeliest, and distinct expansion one choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from llmppl.models.choices import Left, Listed, Listing, Pick
from llmppl.runtime import Runtime


class Branch:
    """A run of a step of a copy of `start`, its first choices given by `picks`.

    log_q : float
        The log-probability of the picks.
    particle : Model
        The copy; once `run`, at the end of the step or where it was left, log_q in its weight.
    void : bool
        Whether the listed choice has no value of positive probability, once that was asked.
    """

    void = False

    def __init__(self, start: Any, asker: str = "", picks: tuple[Pick, ...] = (), log_q: float = 0.0) -> None:
        self.start, self.picks, self.log_q, self._asker = start, picks, log_q, asker
        self._begin()

    def _begin(self, *, at_once: bool = False) -> None:
        self.chooser = Listed(self.picks, self._asker, at_once=at_once)
        self.particle = self.start.spawn(self.chooser)
        self._left: Left | None = None

    @property
    def left(self) -> bool:
        """Whether the step was left at a choice, which is the `listing` if it can be listed."""
        return self.chooser.left

    @property
    def listing(self) -> Listing | None:
        return self.chooser.listing

    def run(self) -> None:
        try:
            self.particle.step()
        except Left as left:
            self._left = left
        else:
            self.chooser.end_step()
        self.particle.log_weight += self.log_q

    def ask(self) -> None:
        """Have the probabilities of the listed choice, and those of all other distributions that the step has made.

        The exception by which it was left holds those in its frames: one pass of a language model computes all.
        """
        assert self.listing is not None
        self.void = self.listing.is_void()
        self._left = None

    def run_asking(self) -> None:
        """Run it anew on another copy, to ask where it asks: an error and a death are then those of its `sample`."""
        self._begin(at_once=True)
        self.run()
        self._left = None

    def again(self) -> None:
        """Run it once more, on another copy."""
        Branch(self.start, self._asker, self.picks).run()

    def children(self, K: int | None = None) -> list[Branch]:
        """The branches that go on from here: all of positive probability, or the K most probable."""
        assert self.listing is not None
        log_probs = self.listing.table.whole(self.listing.log_total)
        order = np.arange(log_probs.size) if K is None else np.argsort(-log_probs, kind="stable")[:K]
        picks = [Pick(self.listing, index) for index in order[log_probs[order] > -np.inf].tolist()]
        return [Branch(self.start, self._asker, (*self.picks, pick), self.log_q + pick.log_prob) for pick in picks]


Advance = Callable[[Sequence[Callable[[], Any]], Sequence[int]], None]      # runs functions of numbered branches


def follow(branches: Mapping[int, Branch], advance: Advance) -> None:
    """Run them up to the end of the step, or to a choice whose probabilities are then known."""
    advance([branch.run for branch in branches.values()], [*branches])
    listed = {i: branch for i, branch in branches.items() if branch.listing is not None}
    try:
        numbers = [*listed]
        for some in numbers[:1], numbers[1:]:           # the first waits, and is answered with what all others need
            advance([listed[i].ask for i in some], some)
        again = [i for i, branch in listed.items() if branch.void]
    except Exception:                                   # of one of them, in its step if it is to go on
        again = [*listed]
    if again:
        advance([listed[i].run_asking for i in again], again)


def run_together(runtime: Runtime, branches: Sequence[Branch], name: str) -> tuple[list[Branch], list[Branch]]:
    """Run them: those whose step ended, and those that were left."""
    follow(dict(enumerate(branches)), lambda functions, numbers: runtime.run(functions, [name] * len(numbers)))
    return [branch for branch in branches if not branch.left], [branch for branch in branches if branch.left]
