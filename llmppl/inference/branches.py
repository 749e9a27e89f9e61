"""Branches: a step run with its first choices given, up to the next one.

Every choice of a step can be listed so: a branch that was left is run again once for each value that its next choice
can take. Enumeration follows all of them, a beam the likeliest, and distinct expansion one choice.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """

    def __init__(self, start: Any, asker: str = "", picks: tuple[Pick, ...] = (), log_q: float = 0.0) -> None:
        self.start, self.picks, self.log_q, self._asker = start, picks, log_q, asker
        self.chooser = Listed(picks, asker)
        self.particle = start.spawn(self.chooser)

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
        except Left:
            pass
        else:
            self.chooser.end_step()
        self.particle.log_weight += self.log_q

    def again(self) -> None:
        """Run it once more, on another copy."""
        Branch(self.start, self._asker, self.picks).run()

    def children(self, K: int | None = None) -> list[Branch]:
        """The branches that go on from here: all of positive probability, or the K most probable."""
        assert self.listing is not None
        log_probs = self.listing.log_probs
        order = np.arange(log_probs.size) if K is None else np.argsort(-log_probs, kind="stable")[:K]
        picks = [Pick(self.listing, index) for index in order[log_probs[order] > -np.inf].tolist()]
        return [Branch(self.start, self._asker, (*self.picks, pick), self.log_q + pick.log_prob) for pick in picks]


def run_together(runtime: Runtime, branches: Sequence[Branch], name: str) -> tuple[list[Branch], list[Branch]]:
    """Run them: those whose step ended, and those that were left."""
    runtime.run([branch.run for branch in branches], [name] * len(branches))
    return [branch for branch in branches if not branch.left], [branch for branch in branches if branch.left]
