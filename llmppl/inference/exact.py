"""The posterior by enumeration: every path of choices through a program, with its exact weight.

Only `Model.draw` is replaced. A step is replayed with a list of choices; where it makes one more, it is left there and
replayed once for each value the choice can take. So the truth against which samplers are tested shares their program,
and nothing of their loop.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from llmppl.arguments import optional_count
from llmppl.distributions.distribution import Floats, Impossible, Proposal
from llmppl.inference.particles import Death, Particles
from llmppl.inference.watch import Listed, Watch, begin, cut
from llmppl.models.model import Model
from llmppl.runtime import Runtime

M = TypeVar("M", bound=Model)

_TOGETHER = 512                                         # replays that share a forward pass


class _Branch(BaseException):
    """Leaves a replay at the first choice that its path does not hold."""


class NoStream:
    """Stands for a particle's random stream: what is drawn from it directly cannot be enumerated."""

    def __init__(self, asker: str) -> None:
        self._asker = asker

    def __getattr__(self, name: str) -> Any:
        raise TypeError(f"{self._asker} cannot enumerate self.rng.{name}(); draw with self.sample(dist)")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoStream:
        return self


class Replay:
    """One run of a step with its first choices fixed: `path` are the places of their values, `listed` the choices."""

    def __init__(self, state: Model, path: tuple[int, ...] = (), listed: tuple[Listed, ...] = ()) -> None:
        self.state, self.path, self.listed = state, path, listed
        self.particle = state.spawn(state.rng)
        self.particle.draw = self._draw                 # type: ignore[method-assign]
        self.made = 0                                   # choices so far
        self.log_q = 0.0
        self.ahead: list[int] | None = None             # where the step was left: what can be chosen there,
        self.log_probs: Floats = np.empty(0)            # and the law of that choice

    def run(self) -> None:
        try:
            self.particle.step()
            del self.particle.draw
            if self.made < len(self.path):
                raise self.listed[self.made].error("it ended without a choice")
        except _Branch:
            pass
        self.particle.log_weight += self.log_q          # of what was chosen before, if the step was left

    def again(self) -> None:
        """Run it once more, on another copy."""
        Replay(self.state, self.path, self.listed).run()

    def extended(self, place: int) -> Replay:
        """The same with the choice fixed where this one was left."""
        return Replay(self.state, (*self.path, place), self.listed)

    def likeliest(self, K: int) -> list[int]:
        """The K most probable choices where the step was left, the first of equal ones first."""
        order = np.argsort(-self.log_probs, kind="stable")[:K]
        return [place for place in order.tolist() if self.log_probs[place] > -np.inf]

    def _draw(self, proposal: Proposal) -> tuple[Any, float]:
        log_probs = proposal.log_measures()
        assert proposal.support is not None
        if self.made == len(self.path):
            self.ahead, self.log_probs = np.flatnonzero(log_probs > -np.inf).tolist(), log_probs
            if not self.ahead:
                self.ahead = None
                raise Impossible(f"{proposal!r} has no value of positive probability")
            self.listed = (*self.listed, Listed(proposal, log_probs))
            raise _Branch
        self.listed[self.made].check_all(proposal, log_probs)
        place = self.path[self.made]
        self.made += 1
        self.log_q += float(log_probs[place])
        return proposal.support[place], 0.0


def enumerate_exact(model: M, max_steps: int | None = None) -> Particles[M]:
    """Every outcome of positive weight, with its exact log weight; `log_ml` is log Z itself.

    Parameters
    ----------
    model : Model
        A program all of whose choices have finite support, else TypeError. The number of outcomes grows exponentially
        with the number of choices. Choices of a weighted proposal are summed over its measure.
    max_steps : int, optional
        As in `smc_steer`: what has not finished by then is returned marked `cut`, and Z is that of the cut program.

    Returns
    -------
    Particles
        One for each path of choices; two paths may lead to the same text.
    """
    optional_count("max_steps", max_steps)
    runtime, done, deaths, t = Runtime(), list[M](), list[Death](), 0
    states = begin(model, [NoStream("enumerate_exact")])
    watch = Watch(runtime, max_steps)
    while states and t != max_steps:
        t += 1
        todo = [Replay(state) for state in states if not state.finished]
        done += [state for state in states if state.finished]
        states, ended = [], list[Replay]()
        while todo:
            batch, todo = todo[-_TOGETHER:], todo[:-_TOGETHER]
            runtime.run([replay.run for replay in batch], [f"an outcome at step {t}"] * len(batch))
            for replay in batch:
                particle: Any = replay.particle
                if replay.ahead is not None:
                    todo += [replay.extended(place) for place in replay.ahead]
                    continue
                ended.append(replay)
                if particle.log_weight == -math.inf:
                    deaths.append(Death(t, particle.death or "weight zero", text=str(particle)))
                else:
                    (done if particle.finished else states).append(particle)
        settle(watch, runtime, ended, states, t)
    cut(states)
    return Particles(done + states, stats=runtime.stats, deaths=deaths)


def settle(watch: Watch, runtime: Runtime, ended: Sequence[Replay], active: Sequence[Model], t: int) -> None:
    """Watch step `t`, in which the replays `ended` came to their end, and `active` particles are left."""
    watch.streams.check(functools.partial(runtime.run, [replay.again], [f"a replay at step {t}"]) for replay in ended)
    watch.chose = any(replay.path for replay in ended)
    watch.step(t, [replay.particle for replay in ended], active)
