"""The runtime: run plain functions together, and answer what they all wait for with one call.

The idea: every function runs in a greenlet of its own. Where it needs something expensive it calls `ask`, which
switches out of it; when every function has either returned or asked, each *answerer* gets all of its questions in one
list (a *round*), and the functions go on with their answers. The functions stay ordinary synchronous Python; there is
no event loop and no timeout. Outside `Runtime.run`, `ask` simply asks, so the same code runs by hand in a debugger. A
run inside a function of another run passes its batches up, so that runs share their rounds, too.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from greenlet import getcurrent, greenlet


class ContextTooLong(ValueError):
    """A context is longer than the model reads."""


@dataclass
class Stats:
    """What was run, and how long it took.

    `rounds` batched calls of a language model's answers; `rows` contexts whose next-token law was computed; `tokens`
    run through language models; `hits` questions answered without running anything; seconds spent in language models,
    in masks, and in everything else (the steps of the programs and the inference loop around them).
    """

    rounds: int = 0
    rows: int = 0
    tokens: int = 0
    hits: int = 0
    seconds_lm: float = 0.0
    seconds_masks: float = 0.0
    seconds_user: float = 0.0

    def __add__(self, other: Stats) -> Stats:
        return Stats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Stats)))

    def __sub__(self, other: Stats) -> Stats:
        return Stats(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(Stats)))

    def __str__(self) -> str:
        return (
            f"{self.rounds} rounds, {self.rows} rows, {self.tokens} tokens run, {self.hits} cache hits; "
            f"{self.seconds_lm:.2f} s in the lm, {self.seconds_masks:.2f} s in masks, "
            f"{self.seconds_user:.2f} s elsewhere"
        )


class Answerer(Protocol):
    """Whoever answers questions in batches."""

    def done(self) -> Stats:
        """A copy of what it has done for the calling thread so far; it only ever grows."""

    def known(self, question: Any) -> Any | None:
        """The answer, if it is at hand; None otherwise."""

    def answer(self, questions: list[Any]) -> list[Any]:
        """The answers, in the order of the questions."""


class _Worker(greenlet):  # type: ignore[misc]
    """A function of a run in its own greenlet; its parent is the hub that answers."""

    runtime: Runtime


def ask(answerer: Answerer, question: Any) -> Any:
    """The answer to `question`: at once if it is known, else together with what the other functions of the run ask."""
    worker = getcurrent()
    if isinstance(worker, _Worker):
        worker.runtime.meet(answerer)
    answer = answerer.known(question)
    if answer is not None:
        return answer
    return _answers(answerer, [question])[0]


def running() -> bool:
    """Whether the caller is a function of a run."""
    return isinstance(getcurrent(), _Worker)


def _answers(answerer: Answerer, questions: list[Any]) -> Sequence[Any]:
    """The answers to `questions`: together with what the other functions of the run ask, if the caller is one."""
    worker = getcurrent()
    if isinstance(worker, _Worker):
        assert worker.parent is not None
        replies: Sequence[Any] = worker.parent.switch(answerer, questions)
        return replies
    return answerer.answer(questions)


class masking:
    """Counts the time of a `with` block as spent in masks; the block must not ask."""

    __slots__ = ("start",)                              # a class, since a generator would cost more than a mask

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        seconds = time.perf_counter() - self.start
        worker = getcurrent()
        if isinstance(worker, _Worker):
            worker.runtime.mask(seconds)


class Runtime:
    """Runs functions together, and knows what that cost.

    Functions are run in their order, each until it asks or returns, so a run is deterministic where they are.
    """

    def __init__(self) -> None:
        worker = getcurrent()
        self._outer: Runtime | None = worker.runtime if isinstance(worker, _Worker) else None
        self.seconds_masks = 0.0
        self._start = time.perf_counter()
        self._met: dict[int, tuple[Answerer, Stats]] = {}

    def meet(self, answerer: Answerer) -> None:
        """Count from now on what `answerer` does."""
        if id(answerer) not in self._met:
            self._met[id(answerer)] = answerer, answerer.done()
            if self._outer is not None:
                self._outer.meet(answerer)

    def mask(self, seconds: float) -> None:
        """Count time spent in masks."""
        self.seconds_masks += seconds
        if self._outer is not None:
            self._outer.mask(seconds)

    @property
    def stats(self) -> Stats:
        """What the answerers met have done since, and the time since this runtime was made."""
        total = Stats(seconds_masks=self.seconds_masks)
        for answerer, before in self._met.values():
            total += answerer.done() - before
        total.seconds_user = time.perf_counter() - self._start - total.seconds_lm - total.seconds_masks
        return total

    def run(self, functions: Sequence[Callable[[], Any]], names: Sequence[str]) -> None:
        """Run every function to its end.

        Parameters
        ----------
        functions : sequence of callables without arguments
        names : sequence of str
            Who each function is; an exception that leaves one carries that as a note.
        """
        workers = [_Worker(function) for function in functions]
        waiting: list[tuple[int, Answerer, list[Any]]] = []

        def resume(i: int, switch: Callable[..., Any], *value: Any) -> None:
            try:
                asked = switch(*value)
            except BaseException as error:
                error.add_note(f"in {names[i]}")
                raise
            if not workers[i].dead:
                waiting.append((i, *asked))

        try:
            for i, worker in enumerate(workers):
                worker.runtime = self
                worker.gr_context = contextvars.copy_context()
                resume(i, worker.switch)
            while waiting:
                batch, waiting = waiting, []
                asked: dict[int, list[tuple[int, Answerer, list[Any]]]] = {}
                for entry in batch:
                    asked.setdefault(id(entry[1]), []).append(entry)
                answers: dict[int, list[Any]] = {}
                for entries in asked.values():
                    everything = [question for _, _, questions in entries for question in questions]
                    try:
                        replies = _answers(entries[0][1], everything)
                    except Exception as error:          # into a step that asked, so that the traceback shows its line
                        i = entries[0][0]
                        resume(i, workers[i].throw, type(error), error, error.__traceback__)
                        raise
                    owners = [i for i, _, questions in entries for _ in questions]
                    for i, reply in zip(owners, replies, strict=True):
                        answers.setdefault(i, []).append(reply)
                for i, _, _ in batch:
                    resume(i, workers[i].switch, answers[i])
        finally:
            for worker in workers:
                if not worker.dead:
                    worker.throw()                      # GreenletExit: unwind what an exception left hanging
