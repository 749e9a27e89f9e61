"""Intake of requests: time limits on connections and bodies, lanes in which requests are prepared, short collections.

A request with a small body passes those with large ones, and one that is prepared quickly passes those that take long.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import PriorityQueue
from typing import Any, TypeVar

from starlette.exceptions import HTTPException

from llmppl.models.spans import cached_index_of, cached_shortest
from llmppl.support.alarm import Overdue, excuse, limited

T = TypeVar("T")

READING = 10.0  # seconds in which a header, and in which a body, must arrive
LARGE = 50_000  # bytes of a body that is parsed alone
QUICK, SLOW = 0.05, 5.0  # CPU seconds to prepare a request, first beside others
LONG = 0.3  # CPU seconds of a collection of garbage, for which all wait
HAS_BODY = {b"content-length", b"transfer-encoding"}


class BodyTimer:
    """ASGI application that refuses bodies which do not arrive in time, and passes on one large body at a time."""

    def __init__(self, app: Any) -> None:
        self.app, self.turn = app, asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        more, size = not HAS_BODY.isdisjoint(name for name, _ in scope["headers"]), 0
        end = asyncio.get_running_loop().time() + READING

        async def receive_in_time() -> Any:
            nonlocal more, size
            if not more:
                return await receive()
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body has not arrived within {READING:g} s") from None
            more = message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > LARGE and not more:
                async with self.turn:
                    await asyncio.sleep(0)
            return message

        async def send_in_time(message: Any) -> None:
            if (
                more and message["type"] == "http.response.start"
            ):  # the rest of the body is not read
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self.app(scope, receive_in_time, send_in_time)


class Lane:
    """Threads that run the first functions in an order, whenever these came."""

    def __init__(self, threads: int) -> None:
        self.threads = ThreadPoolExecutor(threads, "llmppl lane")
        self.waiting = PriorityQueue[Any]()
        self.numbers = itertools.count()  # of equal ones, the first

    async def run(self, order: Any, make: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._submit(order, make))

    def _submit(self, order: Any, make: Callable[[], T]) -> Future[T]:
        future = Future[T]()
        self.waiting.put((order, next(self.numbers), future, make))
        self.threads.submit(self._run_first)
        return future

    def _run_first(self) -> None:
        _, _, future, make = self.waiting.get()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(make())
            except BaseException as error:
                future.set_exception(error)
            del future  # the error holds this frame
        if _collected_long.is_set():
            _collected_long.clear()
            cached_shortest.cache_clear()
            cached_index_of.cache_clear()


class Lanes:
    """A quick lane, and a slow one for what takes longer. The smallest requests go first."""

    def __init__(self) -> None:
        quick, slow = Lane(2), Lane(1)
        self.lanes = [(quick, QUICK), (quick, QUICK), (slow, SLOW)]

    async def run(self, make: Callable[[], T], size: int = 0) -> T:
        """Return `make()`. If it takes too long for the quick lane, twice, it begins again in the other one."""
        for lane, seconds in self.lanes:
            with suppress(Overdue):
                return await lane.run(size, partial(_within, seconds, make))
        raise TimeoutError(
            "the request takes too long to prepare: make it smaller, or raise its timeout"
        )


def _within(seconds: float, make: Callable[[], T]) -> T:
    """Return `make()`. After too many CPU seconds, raise an Overdue that holds none of its objects."""
    with suppress(Overdue), limited(math.inf, seconds):
        return make()
    raise Overdue


_collected_long = threading.Event()


def keep_collections_short() -> None:
    """Leave today's objects out of collections of garbage. After a long one, a lane empties the caches of constraints.

    All threads wait for a collection, and one over the objects of large constraints takes seconds. Its CPU time does
    not count for the request in whose thread it happens.
    """
    begun = 0.0

    def look(phase: str, info: dict[str, int]) -> None:
        nonlocal begun
        if phase == "start":
            begun = time.thread_time()
            return
        seconds = time.thread_time() - begun
        excuse(seconds)
        if seconds > LONG:
            _collected_long.set()

    def ignore_overdue(error: Any) -> None:
        if error.exc_type is not Overdue:  # in a callback, where nothing raises it; it comes again
            sys.__unraisablehook__(error)

    gc.collect()
    gc.freeze()
    gc.set_threshold(gc.get_threshold()[0], 2, 50)  # all objects seldom, young ones often
    gc.callbacks.append(look)
    sys.unraisablehook = ignore_overdue


def timed_protocol() -> type[asyncio.Protocol]:
    """Return the protocol of uvicorn, which closes connections that bring no whole header in time."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class TimedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.look()

        def look(self, *before: Any) -> None:
            """Close the connection if it waits for the same header as at the last look."""
            if self.transport.is_closing():
                return
            waits = self.cycle is None or self.cycle.response_complete
            if waits and before == (self.cycle,):
                self.transport.close()
            else:
                later = partial(self.look, self.cycle if waits else self)
                self.loop.call_later(READING, later)

    return TimedProtocol
