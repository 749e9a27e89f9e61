"""Scheduling: assignment of tasks to workers of any kind.

A task waits, is out with a worker, or is answered. If a worker dies, its tasks wait again, so that none is lost. An
answer for a task that is no longer out is dropped, so that none is answered twice. Workers take a *chunk* of tasks at a
time, which they run together. Chunks get smaller towards the end, so that all workers end at about the same time.
Tasks are read from their iterable as they are needed, and sent only while the caller waits for the next result.
`together` and the number of workers bound the tasks that wait or are out.

Source: Hummel, Schonberg & Flynn (1992), "Factoring: a method for scheduling parallel loops", for the sizes of chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Literal, Protocol

from llmppl.tasks.results import Result

MAX_CHUNK = 2                                           # chunks hold at most this many times `together` tasks
MAX_SHARED, MAX_ALONE = 2, 3                            # deaths of workers that ran a task with others, and alone
Pair = tuple[int, Any]                                  # an index and its task


class Cluster(Protocol):
    """Workers with the numbers 0 to `size` - 1."""

    @property
    def size(self) -> int: ...

    def send(self, worker: int, chunk: list[Pair]) -> None:
        """Let a worker that is ready run a chunk."""

    def wait(self) -> tuple[int, Result | Literal["ready", "dead"]]:
        """Return the next event of a worker: a result, "ready" for a chunk, or "dead" (it may be ready again later)."""


class Waiting:
    """Queue of the tasks that wait, cut into chunks."""

    def __init__(self, tasks: Iterable[Pair], together: int, workers: int) -> None:
        self._source, self._together, self._workers = iter(tasks), together, workers
        self._ahead = 2 * MAX_CHUNK * together * workers
        self._tasks, self._alone = deque[Pair](), deque[Pair]()
        self._size = self._left = 0                     # size of the next chunks, and their number

    def take(self) -> bool:
        """Read tasks from the iterable while there is room, and return whether any task waits."""
        self._tasks.extend(islice(self._source, max(self._ahead - len(self._tasks), 0)))
        return bool(self._tasks or self._alone)

    def chunk(self) -> list[Pair]:
        """Return the next chunk. A task must wait."""
        if self._alone:
            return [self._alone.popleft()]
        if not self._left:
            share = -(-len(self._tasks) // self._workers)
            self._size, self._left = max(min(self._together, share), -(-share // 2)), self._workers
        self._left -= 1
        return [self._tasks.popleft() for _ in range(min(self._size, len(self._tasks)))]

    def put_back(self, pair: Pair, alone: bool) -> None:
        """Put a task before all others that wait."""
        (self._alone if alone else self._tasks).appendleft(pair)


def schedule(cluster: Cluster, tasks: Iterable[Pair], together: int) -> Iterator[Result]:
    """Run all tasks on a cluster, and yield their results as they end.

    If two workers died while they had a task, it runs alone from then on. If three more die of it, its result is an
    error.
    """
    waiting = Waiting(tasks, together, cluster.size)
    ready, out = deque[int](), dict[int, dict[int, Any]]()              # out: {worker: {index: task}}
    deaths = dict[int, int]()                                           # {index: number of workers that died with it}
    while waiting.take() or out:
        while ready and waiting.take():
            chunk, worker = waiting.chunk(), ready.popleft()
            out[worker] = dict(chunk)
            cluster.send(worker, chunk)
        worker, event = cluster.wait()
        if isinstance(event, Result):
            if event.index in out.get(worker, {}):
                del out[worker][event.index]
                deaths.pop(event.index, None)
                yield event
            continue
        if event == "ready":
            ready.append(worker)
        for index, task in reversed(out.pop(worker, {}).items()):       # the worker died, or its answers were lost
            deaths[index] = deaths.get(index, 0) + 1
            if deaths[index] < MAX_SHARED + MAX_ALONE:
                waiting.put_back((index, task), alone=deaths[index] >= MAX_SHARED)
            else:
                total = f"{deaths.pop(index)} workers died of this task (out of memory?)"
                yield Result(index, task, error=f"{total}, the last {MAX_ALONE} of it alone")
