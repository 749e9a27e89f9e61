"""Runtime: run plain functions together, and answer the questions of all of them with one call.

Functions run in greenlets; functions that never wait share one greenlet. For an expensive answer, a function calls
`request`, which switches out of it. When every function has either returned or asked, each *evaluator* gets all of its
questions in one list (a *round*), and the functions continue with the answers. Outside of a run, `request` simply
evaluates. A run inside a function of another run passes its batches up, so that runs share rounds, too.

`Runtime.run` takes functions that belong together: an exception of one ends all. `Runtime.each` takes independent ones.
"""

from __future__ import annotations

import contextvars
import math
import operator
import sys
import threading
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from greenlet import GreenletExit, getcurrent, greenlet

from llmppl.support.alarm import Alarm, Overdue

T = TypeVar("T")
WHILE = 0.05  # CPU seconds
_PACKAGE = __name__.partition(".")[0] + "."


def warn(message: str) -> None:
    """Warn at the line outside of this package that led here, also from within a run."""
    here = getcurrent()
    frame = sys._getframe()
    while frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        while frame.f_back is None and here.parent is not None:  # the first frame of a greenlet
            here = here.parent
            frame = here.gr_frame
        frame = frame.f_back or frame
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        message, UserWarning, frame.f_code.co_filename, frame.f_lineno, registry=registry
    )


def unwatched(texts: Callable[[], list[str]]) -> str:
    """Return "", which ends no run."""
    return ""


# of the caller: gets a function for the texts after each step of its runs; returns the reason to end the run, or ""
Watch = Callable[[Callable[[], list[str]]], str]
watching: contextvars.ContextVar[Watch] = contextvars.ContextVar("watching", default=unwatched)


class ContextTooLong(ValueError):
    """A context is longer than the model reads."""


@dataclass
class Stats:
    """Counts and times of a run.

    rounds : int, batches of forward passes
    rows : int, contexts evaluated
    tokens : int, tokens run through language models
    hits : int, questions answered from a cache
    seconds_lm, seconds_masks : float, seconds in language models and in masks
    seconds_other : float, seconds in everything else: the steps of the programs and the inference loop
    bytes_to_host : int, bytes copied to numpy from rows that stay on an accelerator
    calls, arguments, seconds_batched : calls of batched functions, number of their arguments, and seconds in them
    """

    rounds: int = 0
    rows: int = 0
    tokens: int = 0
    hits: int = 0
    seconds_lm: float = 0.0
    seconds_masks: float = 0.0
    seconds_other: float = 0.0
    bytes_to_host: int = 0
    calls: int = 0
    arguments: int = 0
    seconds_batched: float = 0.0

    @property
    def seconds(self) -> float:
        """All seconds together."""
        return self.seconds_lm + self.seconds_masks + self.seconds_other + self.seconds_batched

    def __add__(self, other: Stats) -> Stats:
        return Stats(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: Stats) -> Stats:
        return Stats(*map(operator.sub, vars(self).values(), vars(other).values()))

    def __str__(self) -> str:
        batched = f"; {self.calls} calls for {self.arguments} arguments" if self.calls else ""
        in_batched = f"{self.seconds_batched:.2f} s in batched functions, " if self.calls else ""
        return (
            f"{self.rounds} rounds, {self.rows} rows, {self.tokens} tokens run, {self.hits} cache hits{batched}; "
            f"{self.seconds_lm:.2f} s in the lm, {self.seconds_masks:.2f} s in masks, {in_batched}"
            f"{self.seconds_other:.2f} s elsewhere"
        )


class Evaluator(Protocol):
    """Evaluator of questions in batches, such as a language model.

    A run calls a `patient` evaluator only when no function waits for an evaluator that is not patient.
    """

    patient: bool

    def done(self) -> Stats:
        """Return a copy of the counts of the calling thread so far, which only grow."""

    def cached(self, question: Any) -> Any | None:
        """Return the cached answer, or None."""

    def evaluate(self, questions: list[Any]) -> Sequence[Any]:
        """Return the answers in the order of the questions."""


class _Worker(greenlet):  # type: ignore[misc]
    """Greenlet that runs one function after another until one waits. Its parent is the loop that gets the answers."""

    def __init__(
        self,
        runtime: Runtime,
        todo: deque[tuple[Callable[[], Any], str]],
        context: contextvars.Context,
    ) -> None:
        super().__init__(self._work)
        self.runtime = runtime
        self.name = ""
        self.result: Any = None  # of its last function
        self.cancelled = False  # another thread may set it: `Runtime.each` then unwinds it
        self.cpu_seconds = self.tokens = self.resumed = 0.0  # counted by `Runtime.each`
        self.used = 0.0  # CPU seconds of its thread alone, for the order
        self.patience = self.ends = math.inf  # set by `limit`
        self._todo = todo
        self._caller = context

    def set_alarm(self) -> None:
        """Limit its code from now on. A worker that is late has a second for its end."""
        left = self.ends - time.monotonic()
        self.runtime.alarm.set(left if left > 0 else 1.0, self.patience)

    def _work(self) -> None:
        while self._todo:  # while it waited, other workers have taken the rest
            function, self.name = self._todo.popleft()
            self.gr_context = self._caller.copy()
            self.result = function()


class _Request(NamedTuple):
    """Questions for which a function waits."""

    worker: _Worker
    evaluator: Evaluator
    questions: Sequence[Any]


def _worker() -> _Worker | None:
    """Return the worker that runs the caller; None outside of a run."""
    current = getcurrent()
    return current if isinstance(current, _Worker) else None


def running() -> bool:
    """Check whether the caller is a function of a run."""
    return _worker() is not None


def spent() -> tuple[float, float]:
    """Return CPU seconds and tokens of the caller, a function of `Runtime.each`, with its share of the rounds so far.

    Outside of it, CPU seconds are those of the process, and tokens are not counted.
    """
    worker = _worker()
    if worker is None:
        return time.process_time(), 0.0
    return worker.cpu_seconds + time.thread_time() - worker.resumed, worker.tokens


def limit(patience: float, ends: float) -> None:
    """Limit the caller, a function of `Runtime.each`: CPU seconds between two of its questions, and its last moment.

    Beyond either, Overdue is raised in its code. The moment is one of `time.monotonic`.
    """
    worker = getcurrent()
    worker.patience = patience
    worker.ends = ends
    worker.set_alarm()


class _Pause:
    """Evaluator of no question, for which a function waits to let others go on."""

    patient = False

    def done(self) -> Stats:
        return Stats()

    def evaluate(self, questions: list[Any]) -> list[Any]:
        return questions


def pause() -> None:
    """Let other functions of `Runtime.each` go on, if the caller, one of them, has run for a while."""
    if time.thread_time() - getcurrent().resumed > WHILE:
        _evaluated(cast(Evaluator, _Pause()), [None])


def request(evaluator: Evaluator, question: Any) -> Any:
    """Return the answer to `question`, from the cache or from a round with the other functions of the run."""
    worker = _worker()
    if worker is not None:
        worker.runtime.watch(evaluator)
    answer = evaluator.cached(question)
    return _evaluated(evaluator, [question])[0] if answer is None else answer


def request_all(evaluator: Evaluator, questions: Sequence[Any]) -> list[Any]:
    """Return the answers to `questions`, from the cache or from one round."""
    worker = _worker()
    if worker is not None:
        worker.runtime.watch(evaluator)
    answers = [evaluator.cached(question) for question in questions]
    missing = [i for i, answer in enumerate(answers) if answer is None]
    if missing:
        found = _evaluated(evaluator, [questions[i] for i in missing])
        for i, answer in zip(missing, found, strict=True):
            answers[i] = answer
    return answers


def _evaluated(evaluator: Evaluator, questions: list[Any]) -> Sequence[Any]:
    """Return the answers to `questions`, in a run from a round with its other functions."""
    worker = _worker()
    if worker is None:
        return evaluator.evaluate(questions)
    assert worker.parent is not None
    answers: Sequence[Any] = worker.parent.switch(evaluator, questions)
    return answers


class mask_timer:
    """Timer of a `with` block that computes masks. The block must not request anything."""

    __slots__ = ("start",)  # a class, since a generator would cost more than a mask

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        seconds = time.perf_counter() - self.start
        worker = _worker()
        if worker is not None:
            worker.runtime.add_mask_seconds(seconds)


class Runtime:
    """Runner of functions, in their order, each until it requests something or returns. It counts their cost."""

    def __init__(self) -> None:
        worker = _worker()
        outer = () if worker is None else (worker.runtime, *worker.runtime._outer)
        self._outer: tuple[Runtime, ...] = outer  # runs that contain this one, innermost first
        self.seconds_masks = 0.0
        self.alarm = Alarm()  # of `each`
        self._start = time.perf_counter()
        self._watched: dict[int, tuple[Evaluator, Stats]] = {}

    def watch(self, evaluator: Evaluator) -> None:
        """Count the work of `evaluator` from now on."""
        if id(evaluator) not in self._watched:
            for runtime in (self, *self._outer):
                runtime._watched.setdefault(id(evaluator), (evaluator, evaluator.done()))

    def add_mask_seconds(self, seconds: float) -> None:
        """Count time spent in masks."""
        for runtime in (self, *self._outer):
            runtime.seconds_masks += seconds

    @property
    def stats(self) -> Stats:
        """Work of the watched evaluators, and the time since this runtime was made."""
        total = Stats(seconds_masks=self.seconds_masks)
        for evaluator, before in self._watched.values():
            total += evaluator.done() - before
        known = total.seconds_lm + total.seconds_masks + total.seconds_batched
        total.seconds_other = time.perf_counter() - self._start - known
        return total

    def run(self, functions: Sequence[Callable[[], Any]], names: Sequence[str]) -> None:
        """Run every function to its end. An exception of one carries its name as a note."""
        todo = deque(zip(functions, names, strict=False))
        context = contextvars.copy_context()
        context.run(watching.set, unwatched)  # runs inside of these functions are others
        workers = list[_Worker]()
        waiting = list[_Request]()
        try:
            while todo:
                workers.append(_Worker(self, todo, context))
                _resume(workers[-1], waiting, workers[-1].switch)
            while waiting:
                batch = [each for each in waiting if not each.evaluator.patient] or waiting
                waiting = (
                    [] if batch is waiting else [each for each in waiting if each.evaluator.patient]
                )
                answers: dict[_Worker, list[Any]] = {}
                for requests in _by_evaluator(batch):
                    try:
                        answers |= _answers(requests)
                    except (
                        Exception
                    ) as error:  # raised in a step that asked, so its line is in the traceback
                        worker = requests[0].worker
                        _resume(
                            worker, waiting, worker.throw, type(error), error, error.__traceback__
                        )
                        raise
                for each in batch:
                    _resume(each.worker, waiting, each.worker.switch, answers[each.worker])
        finally:
            todo.clear()
            _unwind(workers)

    def each(
        self,
        functions: Iterable[tuple[Callable[[], T], str]],
        together: int,
        turn: float = math.inf,
    ) -> Iterator[T]:
        """Yield the result of each named function as they end.

        At most `together` run at a time; when one ends, the next begins. An exception of an evaluator reaches only the
        functions whose questions it cannot answer. An exception of a function ends all. The iterator must stay in its
        thread. A closed iterator unwinds the functions that it has begun.

        With `turn`, a function that has used so many CPU seconds no longer counts for `together`, and one that has
        used less than half of others does not wait until all of them have gone on: see `_next_batch`. Functions that
        begin take at most as long before others go on.
        """
        thread = threading.get_ident()
        todo = iter(functions)
        workers = dict[_Worker, None]()
        waiting = list[_Request]()
        answered = dict[_Worker, Callable[[], Any]]()  # those that go on next

        def resume(worker: _Worker, go_on: Callable[[], Any] | None) -> list[T]:
            """Return the result of the worker in a list, empty if it waits."""
            if threading.get_ident() != thread:
                raise RuntimeError(
                    "what runs together goes on in the thread that began it, and this is another"
                )
            workers[worker] = None
            worker.parent = getcurrent()  # another greenlet may ask for the next result
            worker.resumed = time.thread_time()
            while go_on is not None:
                again = None
                try:
                    worker.set_alarm()
                    try:
                        _resume(worker, waiting, go_on)
                    finally:
                        self.alarm.stop()
                except Overdue as late:  # it came after the code of the worker
                    if not worker.dead:
                        waiting[:] = [each for each in waiting if each.worker is not worker]
                        again = partial(worker.throw, late)
                go_on = again
            used = time.thread_time() - worker.resumed
            worker.cpu_seconds += used
            worker.used += used
            if not worker.dead:
                return []
            del workers[worker]
            return [worker.result]

        def is_young(worker: _Worker) -> bool:
            return worker.used < turn

        try:
            while True:
                begun = time.thread_time()
                while not (waiting or answered) or (
                    time.thread_time() - begun < turn and sum(map(is_young, workers)) < together
                ):
                    following = next(todo, None)
                    if following is None:
                        break
                    worker = _Worker(self, deque([following]), contextvars.copy_context())
                    yield from resume(worker, worker.switch)
                if not (waiting or answered):
                    return
                now = time.monotonic()
                for worker in [*(each.worker for each in waiting), *answered]:
                    if worker.cancelled or now > worker.ends:
                        waiting[:] = [each for each in waiting if each.worker is not worker]
                        answered.pop(worker, None)
                        error = GreenletExit if worker.cancelled else Overdue
                        yield from resume(worker, partial(worker.throw, error))
                batch = _next_batch(waiting, [*answered], together, turn)
                go_on = dict[_Worker, Callable[[], Any]]()
                for requests in _by_evaluator(batch):
                    go_on |= _counted(requests)
                waiting[:] = [each for each in waiting if each.worker not in go_on]
                answered = {each.worker: go_on[each.worker] for each in batch} | answered
                while answered:
                    worker = next(iter(answered))
                    yield from resume(worker, answered.pop(worker))
                    if turn < math.inf:  # cheap functions may go between
                        break
        finally:
            if threading.get_ident() == thread:  # greenlet unwinds others in their thread
                _unwind(workers)


def _next_batch(
    waiting: list[_Request], answered: list[_Worker], together: int, turn: float
) -> list[_Request]:
    """Return the requests to answer now: at most `together` in the order of their use, once all have gone on.

    While some have an answer and have not gone on, only requests of functions that have used less than half of the
    next one. So a cheap function waits for one step of an expensive one, and expensive ones still share batches.
    """
    if turn == math.inf:
        return [] if answered else waiting[:]
    ordered = sorted(waiting, key=lambda each: each.worker.used)
    if answered:
        ordered = [each for each in ordered if max(turn, 2 * each.worker.used) < answered[0].used]
    return ordered[:together]


def _resume(
    worker: _Worker, waiting: list[_Request], switch: Callable[..., Any], *value: Any
) -> None:
    """Continue a worker, and add its request to `waiting` if it has one."""
    try:
        found = switch(*value)
    except BaseException as error:
        error.add_note(f"in {worker.name}")
        raise
    if not worker.dead:
        waiting.append(_Request(worker, *found))


def _unwind(workers: Iterable[_Worker]) -> None:
    """End the workers that wait, by GreenletExit."""
    for worker in workers:
        if not worker.dead:
            worker.parent = getcurrent()
            worker.throw()


def _by_evaluator(batch: list[_Request]) -> Iterable[list[_Request]]:
    by_evaluator = defaultdict(list)
    for each in batch:
        by_evaluator[id(each.evaluator)].append(each)
    return by_evaluator.values()


def _answers(requests: list[_Request]) -> dict[_Worker, list[Any]]:
    """Evaluate the requests to one evaluator together, and return the answers of each worker."""
    asked = [(each.worker, question) for each in requests for question in each.questions]
    replies = _evaluated(requests[0].evaluator, [question for _, question in asked])
    answers = defaultdict(list)
    for (worker, _), reply in zip(asked, replies, strict=True):
        answers[worker].append(reply)
    return answers


def _counted(requests: list[_Request]) -> dict[_Worker, Callable[[], Any]]:
    """Answer as `_answered_apart` does, and count the cost for each worker in proportion to its questions."""
    evaluator = requests[0].evaluator
    cpu, tokens = spent()
    begun = time.thread_time()
    work = evaluator.done().tokens
    answered = _answered_apart(requests)
    cpu_after, tokens_after = spent()
    work_after = evaluator.done().tokens
    used = tokens_after - tokens if running() else work_after - work
    total = sum(len(each.questions) for each in requests)
    for each in requests:
        share = len(each.questions) / total
        each.worker.cpu_seconds += (cpu_after - cpu) * share
        each.worker.used += (time.thread_time() - begun) * share
        each.worker.tokens += used * share
    return answered


def _answered_apart(requests: list[_Request]) -> dict[_Worker, Callable[[], Any]]:
    """Return a function for each worker that continues it. After an exception, each half is evaluated separately."""
    try:
        return {
            worker: partial(worker.switch, answers)
            for worker, answers in _answers(requests).items()
        }
    except Exception as error:
        if len(requests) == 1:
            worker = requests[0].worker  # the exception is raised in the step that asked
            return {worker: partial(worker.throw, type(error), error, error.__traceback__)}
        half = len(requests) // 2
        return _answered_apart(requests[:half]) | _answered_apart(requests[half:])
