"""Beginning and end of a run: its program, its limits, its warnings, and the pace of the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from llmppl.models.choices import Sampled
from llmppl.models.model import Model, untwist, wrap_step
from llmppl.support.arguments import one_of, optional_count, positive, shown
from llmppl.support.locks import Lock
from llmppl.support.runtime import Runtime, spent, unwatched, warn, watching

M = TypeVar("M", bound=Model)


def check_model(model: M) -> M:
    """Return `model`. Raise a TypeError if it is no Model, and warn of a method `start` that none of its methods names.

    LLaMPPL calls such a method before the first step.
    """
    if not isinstance(model, Model):
        raise TypeError(
            f"inference wants a Model, an instance of your subclass, not {shown(model)}"
        )
    kinds = [kind for kind in type(model).__mro__ if not issubclass(Model, kind)]
    methods = [item for kind in kinds for item in vars(kind).items() if inspect.isfunction(item[1])]
    others = [inspect.unwrap(each).__code__.co_names for name, each in methods if name != "start"]
    if len(others) < len(methods) and "start" not in itertools.chain(*others):
        name = type(model).__name__
        warnings.warn(
            f"nothing calls {name}.start(): do its work in __init__, or in the first step()",
            stacklevel=3,
        )
    return model


def start_particles(model: M, choosers: Sequence[Sampled], power: float = 1.0) -> list[M]:
    """Return a particle for each chooser, whose target is a power of the joint probability."""
    wrap_step(type(check_model(model)))  # it may have been assigned to the class
    if model._noted_.before is not None and [*model._noted_][-1] is not None:
        raise ValueError(f"{type(model).__name__} sampled before its first step: sample in step()")
    particles = [model._spawn_(chooser) for chooser in choosers]
    power = positive("power", power)
    for particle in particles:
        particle._origin_ = model
        if power != 1.0:
            particle._power_ = power
    return particles


class Limit:
    """Limit of a run in seconds, and in tokens that its language models run. A run ends after the step that reaches it.

    The function of `watching` can end it, too. Inside of the block `with limit:` that function watches no run: those of
    a callback, or of a function under `batched`, are other runs. Within a task of `run_many`, the tokens are its share
    of the batches. With on_timeout="raise" the run ends by a TimeoutError.
    """

    def __init__(
        self,
        runtime: Runtime,
        timeout: float | None = None,
        budget: int | None = None,
        on_timeout: str = "return",
    ) -> None:
        self.runtime = runtime
        self.budget = optional_count("budget", budget)
        self.bounded = (timeout, budget) != (None, None)
        self.timeout = math.inf if timeout is None else positive("timeout", timeout)
        self.on_timeout = one_of("on_timeout", on_timeout, ("return", "raise"))
        self._start = time.perf_counter()
        self._tokens = spent()[1]
        self._watch = watching.get()

    def __enter__(self) -> None:
        self._watched = watching.set(unwatched)

    def __exit__(self, *error: object) -> None:
        watching.reset(self._watched)

    def reached(self, texts: Callable[[], list[str]]) -> str:
        """Return "timeout", "budget" or the reason of `watching` if that ends a run with these texts, else ""."""
        reason = self._watch(texts)
        if time.perf_counter() - self._start >= self.timeout:
            reason = "timeout"
        elif (
            self.budget is not None
            and (spent()[1] - self._tokens or self.runtime.stats.tokens) >= self.budget
        ):
            reason = "budget"
        if reason and self.on_timeout == "raise":
            raise TimeoutError(
                f"a run reached its {reason}; the `particles` of this error are those of its last step"
            )
        return reason


def cut(particles: Iterable[Model]) -> None:
    """End the unfinished particles, and mark them as cut."""
    for particle in particles:
        untwist(particle)
        if not particle.finished:
            particle._cut_ = True
        particle.finished = True


class Warnings:
    """Warns once of particles that the model's length cuts, and of a run in which no particle ends."""

    def __init__(self, *, bounded: bool) -> None:
        self.bounded = bounded
        self._warned = self._ended = False

    def step(self, t: int, candidates: Any, has_ended: bool) -> None:
        """Check a population of candidates of step t, of which one may have ended."""
        self._ended |= has_ended
        if not (self._ended or self.bounded):
            heaviest = candidates.heaviest()
            late, why = heaviest._late_
            if t == late:
                warn(f"no particle of {type(heaviest).__name__} has ended in {t} steps: {why}")
        limits = candidates.limits()
        if t == 1 and limits and len(limits) == candidates.finished.size:
            raise ValueError(limits[0])
        if limits and not self._warned:
            self._warned = True
            warnings.warn(
                f"step {t} reached the end of what the model reads: {limits[0]}", stacklevel=4
            )


# ---- pace of the garbage collector


PACE = 100_000  # new objects before the youngest generation is collected

_pacing = Lock()
_num_paced = 0
_threshold_before = gc.get_threshold()


@contextlib.contextmanager
def paced_collector() -> Iterator[None]:
    """Collect cyclic garbage less often inside the block, and restore the threshold after the outermost one.

    A step makes many objects that live until the next one. At Python's threshold of 700 new objects, the collector
    scans them several times a step and frees next to nothing.
    """
    global _num_paced, _threshold_before
    with _pacing.lock:
        _num_paced += 1
        if _num_paced == 1:
            _threshold_before = gc.get_threshold()
            first, *older = _threshold_before
            gc.set_threshold(
                max(first, PACE) if first else 0, *older
            )  # 0: the program has switched it off
    try:
        yield
    finally:
        with _pacing.lock:
            _num_paced -= 1
            if _num_paced == 0:
                gc.set_threshold(*_threshold_before)
