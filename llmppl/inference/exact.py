"""Enumeration of the posterior: every path of choices through a program, with its exact weight.

A step runs up to its first choice, and again once for each value of this choice, until it ends. So the truth against
which samplers are tested shares their program, and nothing of their loop.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import TypeVar

from llmppl.inference.deaths import Death, deaths_of
from llmppl.inference.partial_step import Branch, run_together
from llmppl.inference.particles import Particles
from llmppl.inference.run_guards import Watch, cut, start_particles
from llmppl.models.choices import StopAtChoice
from llmppl.models.model import Model
from llmppl.support.arguments import optional_count
from llmppl.support.runtime import Runtime

M = TypeVar("M", bound=Model)

_finished = operator.attrgetter("finished")
MAX_TOGETHER = 512                                      # branches that share a forward pass


def enumerate_exact(model: M, max_steps: int | None = None) -> Particles[M]:
    """Return every outcome of positive weight with its exact log-weight. `log_ml` is log Z itself.

    Parameters
    ----------
    model : Model
        A program all of whose choices have finite support, else TypeError. The number of outcomes grows exponentially
        with the number of choices. Choices of a weighted proposal are summed over its measure.
    max_steps : int, optional
        As in `smc_steer`. Unfinished outcomes are returned marked `cut`, and Z is that of the cut program.

    Returns
    -------
    Particles
        One for each path of choices; two paths may lead to the same text.
    """
    optional_count("max_steps", max_steps)
    runtime, done, deaths, t = Runtime(), list[M](), list[Death](), 0
    states = start_particles(model, [StopAtChoice(asker="enumerate_exact")])
    watch = Watch(bounded=max_steps is not None)
    while states and t != max_steps:
        t += 1
        done += filter(_finished, states)
        todo = [Branch(state, "enumerate_exact") for state in itertools.filterfalse(_finished, states)]
        ended = list[Branch]()
        while todo:
            batch, todo = todo[-MAX_TOGETHER:], todo[:-MAX_TOGETHER]
            complete, suspended = run_together(runtime, batch, f"an outcome at step {t}")
            ended += complete
            todo += itertools.chain.from_iterable(branch.children() for branch in suspended)
        outcomes = [branch.particle for branch in ended]
        deaths += deaths_of(t, outcomes)
        alive = [particle for particle in outcomes if particle.log_weight > -math.inf]
        done += filter(_finished, alive)
        states = list(itertools.filterfalse(_finished, alive))
        settle(watch, runtime, ended, states, t)
    cut(states)
    return Particles(done + states, stats=runtime.stats, deaths=deaths)


def settle(watch: Watch, runtime: Runtime, ended: Sequence[Branch], active: Sequence[Model], t: int) -> None:
    """Check step `t`, in which the branches `ended` came to their end, and `active` particles are left."""
    watch.step(t, [branch.particle for branch in ended], active)
