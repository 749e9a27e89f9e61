"""A service: callers in threads and coroutines put runs into the lanes of one thread, where they share batches.

A *call* is a run that a caller has submitted. Calls with few particles begin first, and others in their order, at most
`together` of those that have used little time. Up to rounding, the result of a call does not depend on the calls that
run beside it. The *settled* text of a call is the beginning that the texts of all its particles share, without an end
that begins a stop string. Every later particle continues one of them, so it never changes.
"""

from __future__ import annotations

import asyncio
import atexit
import math
import os
import threading
import time
import weakref
from bisect import insort
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar, Unpack

from greenlet import GreenletExit, getcurrent

from llmppl.inference.run import paced_collector
from llmppl.lm import CachedTransformer
from llmppl.models.programs import StopStrings, language_model
from llmppl.support.alarm import Overdue, limited
from llmppl.support.arguments import count, function, generator, positive
from llmppl.support.runtime import Runtime, limit, pause, spent, watching
from llmppl.tasks.answers import Generation
from llmppl.tasks.generation import OF_LIST, GenerateOptions, Method, Plan
from llmppl.tasks.many import TOGETHER

T = TypeVar("T")

TURN = 0.1  # CPU seconds of a small call, and of a round with one
GRACE = 2.0  # seconds after its time limit in which a call may end by itself


class ServiceFull(RuntimeError):
    """As many calls wait as the service admits. The caller can try again later.

    Examples
    --------
    >>> import threading
    >>> event = threading.Event()
    >>> with Service(lm, together=1, max_waiting=1) as service:
    ...     try:
    ...         calls = [service.submit(lambda: event.wait(5)) for _ in range(3)]
    ...     except ServiceFull as error:
    ...         print(error)
    ...     event.set()
    the service is full (1 waiting): try again later
    """


@dataclass(frozen=True)
class ServiceStats:
    """Number of calls in each state, and the work for the calls that have ended.

    waiting, running : int, now
    done, failed, cancelled, refused : int, since the service began; a full service refuses
    tokens, cpu_seconds : int and float, tokens that language models ran, and CPU seconds of the process

    Examples
    --------
    >>> with Service(lm) as service:
    ...     text = service.generate("Once upon a time", max_tokens=4, seed=0).result().text
    >>> service.stats.done, service.stats.waiting, service.stats.tokens
    (1, 0, 7)
    """

    waiting: int
    running: int
    done: int
    failed: int
    cancelled: int
    refused: int
    tokens: int
    cpu_seconds: float


class Call(Future[T], Generic[T]):
    """A run that a service has taken: a `concurrent.futures.Future` that a coroutine can await.

    `result()` waits in a thread, and `await call` in a coroutine. If the coroutine is cancelled, so is the call.
    `texts()` and `async for piece in call` yield the text of a call of `generate` as it settles.

    run : callable, the function of the call
    settles : bool, True if the text that all particles share begins the text of the result
    seconds_waited : float, between `submit` and the beginning of the run

    Examples
    --------
    >>> with Service(lm) as service:
    ...     call = service.generate("Once upon a time", max_tokens=4, seed=0)
    ...     "".join(call.texts()), call.result().ended
    (', there was a', 'max_tokens')
    """

    def __init__(self, run: Callable[[], T], timeout: float | None) -> None:
        super().__init__()
        self.run, self.timeout, self.settles, self.seconds_waited = run, timeout, False, 0.0
        self.stops = StopStrings(())  # that remove text from the results
        self.size = 0, 1  # turns to prepare it, number of particles
        self.interruptible, self.patience, self.grace = (
            False,
            math.inf,
            GRACE,
        )  # set by `Service.generate`
        self._entered, self._settled = time.monotonic(), ""
        self._worker: Any = None  # that runs the call
        self._listeners, self._lock = list[Callable[[str | None], Any]](), threading.Lock()

    def cancel(self) -> bool:
        """End the call before it begins, or after its step or batch. Return False if it has ended."""
        if not super().cancel() and self._worker is not None:
            self._worker.cancelled = True
        return not self.done() or self.cancelled()

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()

    def texts(self) -> Iterator[str]:
        """Yield pieces of the text as it settles, and wait for them. Together they are the text of the result."""
        pieces = SimpleQueue[str | None]()
        self._listen(pieces.put)
        yield from iter(pieces.get, None)
        self.result()  # or its error

    async def __aiter__(self) -> AsyncIterator[str]:
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[str | None]()
        self._listen(lambda piece: loop.call_soon_threadsafe(pieces.put_nowait, piece))
        while (piece := await pieces.get()) is not None:
            yield piece
        self.result()

    def _listen(self, put: Callable[[str | None], Any]) -> None:
        """Pass the settled text so far and each later piece to `put`, and None at the end."""
        with self._lock:
            self._listeners.append(put)
            if self._settled:
                put(self._settled)
        self.add_done_callback(lambda call: put(None))

    # ---- the service

    @property
    def deadline(self) -> float:
        """Time, of `time.monotonic`, at which the limit of the call is reached."""
        return self._entered + (math.inf if self.timeout is None else self.timeout)

    def begin(self, worker: Any) -> None:
        """Keep the worker of the run. TimeoutError if the time is up."""
        self._worker, self.seconds_waited = worker, time.monotonic() - self._entered
        if time.monotonic() >= self.deadline:
            raise TimeoutError(f"the call has waited {self.seconds_waited:.1f} s and has not begun")
        if self.interruptible:
            limit(self.patience, self.deadline + self.grace)

    def end(self) -> None:
        """Forget the worker, which holds the result, and so all objects of the run."""
        self._worker = None

    def watch(self, texts: Callable[[], list[str]]) -> str:
        """Return the reason to end the run after a step, or "". Settle the text that the particles share."""
        written = texts() if self.settles else []
        if written:
            # U+FFFD stands for a character of which tokens are missing
            shared = os.path.commonprefix(written).rstrip("\ufffd")
            self.settle(self.stops.settled(shared, len(self._settled)))
        pause()
        if self._worker.cancelled:
            return "cancelled"
        return "timeout" if time.monotonic() >= self.deadline else ""

    def settle(self, text: str) -> None:
        """Pass the new piece of the settled text to the listeners."""
        with self._lock:
            piece, self._settled = text[len(self._settled) :], text
            for put in self._listeners if piece else ():
                put(piece)


class _Outcome(NamedTuple):
    """Result or error of a call that has ended, and its cost."""

    call: Call[Any]
    result: Any
    error: BaseException | None
    cpu_seconds: float
    tokens: float


class Service:
    """Runs of many callers with one language model, in shared batches. Any thread or coroutine may call its methods.

    Parameters
    ----------
    lm : CachedTransformer
    together : int
        Number of calls that run at a time.
    max_waiting : int
        Number of calls that may wait. A further one raises ServiceFull.
    timeout : float, optional
        Default of the calls, in seconds.
    patience : float
        Number of CPU seconds that a call of `generate` may take between two questions to the language model, while the
        others wait. It then fails by a TimeoutError.

    Examples
    --------
    >>> with Service(lm) as service:
    ...     calls = [service.generate(prompt, [" happy", " sad"]) for prompt in ("He was", "She was")]
    ...     [call.result().value for call in calls]     # in a coroutine: await call
    [' happy', ' happy']
    """

    def __init__(
        self,
        lm: CachedTransformer,
        *,
        together: int = TOGETHER,
        max_waiting: int = 1000,
        timeout: float | None = None,
        patience: float = math.inf,
    ) -> None:
        self.lm = language_model(lm)
        self.timeout = None if timeout is None else positive("timeout", timeout)
        self.patience = patience
        if patience != math.inf:
            self.patience = positive("patience", patience)
        self.together = count("together", together)
        self.max_waiting = count("max_waiting", max_waiting)
        self._waiting = list[Call[Any]]()
        self._running = dict[Call[Any], None]()
        self._counts = dict[str, Any](
            done=0, failed=0, cancelled=0, refused=0, tokens=0, cpu_seconds=0.0
        )
        self._closed = False
        self._changed = threading.Condition()
        self._process = os.getpid()
        _services.add(self)
        self._thread = threading.Thread(target=self._serve, name="llmppl service", daemon=True)
        self._thread.start()

    # ---- callers

    def submit(
        self, run: Callable[[], T], *, timeout: float | None = None, interruptible: bool = False
    ) -> Call[T]:
        """Return the call of a function without arguments: `lambda: smc_steer(Story(lm, prompt), N=8, seed=1)`.

        After `timeout` seconds from now, an algorithm of inference returns the particles of its last step, marked
        `cut`. Other functions are not interrupted. A call that begins no sooner fails with a TimeoutError.

        With interruptible=True, a function of Python code also fails with a TimeoutError after `timeout` seconds, or
        after the `patience` of the service.
        """
        function("run", run, "lambda: smc_steer(model, N, K, seed=1)", takes=0)
        call = Call(run, self._timeout(timeout))
        call.interruptible = interruptible
        call.patience = self.patience
        return self._enter(call)

    def generate(
        self,
        prompt: Any,
        constraint: Any = None,
        *,
        method: Method = "auto",
        max_tokens: int | None = None,
        budget: int | None = None,
        timeout: float | None = None,
        seed: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Call[Generation]:
        """Return the call of `generate` for one prompt, with its result at the same seed.

        The thread of the caller checks the arguments and compiles the constraint.
        """
        of_lists = options.keys() & OF_LIST
        if of_lists:
            raise TypeError(
                f"a service takes one prompt at a time, so {min(of_lists)} says nothing here"
            )
        timeout = self._timeout(timeout)
        limits = {"max_tokens": max_tokens, "budget": budget}
        begun = time.thread_time()
        with limited(timeout or math.inf):
            plan = Plan(self.lm, constraint, method, limits, seed, options)
            program = plan.program(prompt)
            program.first_masks()  # here, and not where the other calls wait for them
        call = Call(partial(plan.answer, prompt, generator(seed, options.get("rng"))), timeout)
        call.stops = program.stops
        call.patience = self.patience
        call.interruptible = True
        call.settles = plan.settles
        call.size = int((time.thread_time() - begun) / TURN), math.prod(plan.sizes)
        if plan.method == "exact":  # its sums have no parts to return
            call.grace = 0.0
        return self._enter(call)

    def _timeout(self, timeout: float | None) -> float | None:
        return self.timeout if timeout is None else positive("timeout", timeout)

    def _enter(self, call: Call[T]) -> Call[T]:
        if os.getpid() != self._process:
            raise RuntimeError(
                "the thread of the service is not in this forked process: make a Service here"
            )
        with self._changed:
            if self._closed:
                raise RuntimeError("the service is closed")
            if len(self._waiting) >= self.max_waiting:
                waiting = [each for each in self._waiting if not each.cancelled()]
                self._counts["cancelled"] += len(self._waiting) - len(waiting)
                self._waiting = waiting
            if len(self._waiting) >= self.max_waiting:
                self._counts["refused"] += 1
                raise ServiceFull(
                    f"the service is full ({self.max_waiting} waiting): try again later"
                )
            insort(self._waiting, call, key=lambda each: each.size)
            self._changed.notify_all()
        return call

    @property
    def stats(self) -> ServiceStats:
        with self._changed:
            return ServiceStats(len(self._waiting), len(self._running), **self._counts)

    def close(self, *, cancel: bool = False) -> None:
        """End the service when its calls have ended, or now with cancel=True. Further calls are a RuntimeError."""
        self._end_by(None, cancel)

    def _end_by(self, seconds: float | None, cancel: bool) -> None:
        if os.getpid() != self._process:  # the thread is in the parent
            return
        with self._changed:
            self._closed = True
            for call in [*self._waiting, *self._running] if cancel else ():
                call.cancel()
            self._changed.notify_all()
        self._thread.join(seconds)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(cancel=kind is not None)

    def __repr__(self) -> str:
        return f"<Service {self.stats}>"

    # ---- the thread that runs the calls

    def _serve(self) -> None:
        try:
            while self._wait():
                self._run_all()
        finally:  # none is left unless this thread has failed
            self._closed = True
            for call in [*self._running, *self._waiting]:
                call.set_exception(RuntimeError("the service has ended by an error of its own"))

    def _run_all(self) -> None:
        """Run calls until none waits."""
        with paced_collector():
            for outcome in Runtime().each(self, self.together, TURN):
                self._end(outcome)

    def _wait(self) -> bool:
        """Wait for a call. Return False if the service is closed and none waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return bool(self._waiting)

    def __iter__(self) -> Service:
        return self

    def __next__(self) -> tuple[Callable[[], _Outcome], str]:
        """Return the next call that waits. StopIteration if there is none now."""
        with self._changed:
            while self._waiting:
                call = self._waiting.pop(0)
                if call.set_running_or_notify_cancel():
                    self._running[call] = None
                    return partial(self._run, call), "a call of a service"
                self._counts["cancelled"] += 1
        raise StopIteration

    def _run(self, call: Call[Any]) -> _Outcome:
        """Run a call to its end. Its errors are its own."""
        try:
            return self._outcome(call)
        except Overdue as late:  # it came late
            return _Outcome(call, None, late, *spent())

    def _outcome(self, call: Call[Any]) -> _Outcome:
        watching.set(call.watch)
        try:
            call.begin(getcurrent())
            result = call.run()
            if getcurrent().cancelled:
                raise GreenletExit
            if call.settles or isinstance(result, Generation):
                call.settle(result.text)
            return _Outcome(call, result, None, *spent())
        except GreenletExit:
            return _Outcome(call, None, CancelledError(), *spent())
        except BaseException as error:
            return _Outcome(call, None, error, *spent())

    def _end(self, outcome: _Outcome) -> None:
        """Count a call that has ended, and give its result to those who wait for it."""
        call, result, error, cpu_seconds, tokens = outcome
        call.end()
        ended = "done"
        if error is not None:
            ended = "cancelled" if isinstance(error, CancelledError) else "failed"
        with self._changed:
            del self._running[call]
            self._counts[ended] += 1
            self._counts["tokens"] += round(tokens)
            self._counts["cpu_seconds"] += cpu_seconds
        if error is None:
            call.set_result(result)
        else:
            call.set_exception(error)


_services = weakref.WeakSet[Service]()


@atexit.register
def _end_all() -> None:
    """End all services, since a thread that computes while Python ends can abort the process."""
    for service in [*_services]:
        service._end_by(GRACE, cancel=True)
