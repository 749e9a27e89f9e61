"""Which worker runs which tasks, whoever the workers are.

The one idea: a task waits, is out with a worker, or is answered. What a worker had out when it died waits again, so
that nothing is lost, and what is no longer out is not answered twice. Workers take a *chunk* of tasks at a time, which
they run together; towards the end chunks get smaller, so that all workers end at about the same time. Tasks are taken
from their iterable as they are needed, and nothing is sent before the caller wants the next result: what waits and what
is out is bounded by `together` and the number of workers, however many tasks there are.

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
    """Workers, called by their numbers, 0 to `size` - 1."""

    @property
    def size(self) -> int: ...

    def send(self, worker: int, chunk: list[Pair]) -> None:
        """Have a worker that is ready run a chunk."""

    def wait(self) -> tuple[int, Result | Literal["ready", "dead"]]:
        """What a worker says next: a result; that it is ready for a chunk; that it is dead, to be ready again later."""


class Waiting:
    """The tasks that wait, cut into chunks."""

    def __init__(self, tasks: Iterable[Pair], together: int, workers: int) -> None:
        self._source, self._together, self._workers = iter(tasks), together, workers
        self._ahead = 2 * MAX_CHUNK * together * workers
        self._tasks, self._alone = deque[Pair](), deque[Pair]()
        self._size = self._left = 0                     # of the next chunks, and how many are of this size

    def take(self) -> bool:
        """Take tasks from the iterable while there is room; whether any task waits."""
        self._tasks.extend(islice(self._source, max(self._ahead - len(self._tasks), 0)))
        return bool(self._tasks or self._alone)

    def chunk(self) -> list[Pair]:
        """The next one; there must be some task."""
        if self._alone:
            return [self._alone.popleft()]
        if not self._left:
            share = -(-len(self._tasks) // self._workers)
            self._size, self._left = max(min(self._together, share), -(-share // 2)), self._workers
        self._left -= 1
        return [self._tasks.popleft() for _ in range(min(self._size, len(self._tasks)))]

    def put_back(self, pair: Pair, alone: bool) -> None:
        """Have a task wait again, before all others."""
        (self._alone if alone else self._tasks).appendleft(pair)


def schedule(cluster: Cluster, tasks: Iterable[Pair], together: int) -> Iterator[Result]:
    """The results of all tasks, as they end.

    A task that two workers had out when they died runs alone from then on; if three more die, it is what they die of,
    and its result is an error.
    """
    waiting = Waiting(tasks, together, cluster.size)
    ready, out = deque[int](), dict[int, dict[int, Any]]()              # out: {worker: {index: task}}
    deaths = dict[int, int]()                                           # {index: of workers that had the task out}
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
        for index, task in reversed(out.pop(worker, {}).items()):       # it is dead, or what it answered is lost
            deaths[index] = deaths.get(index, 0) + 1
            if deaths[index] < MAX_SHARED + MAX_ALONE:
                waiting.put_back((index, task), alone=deaths[index] >= MAX_SHARED)
            else:
                total = f"{deaths.pop(index)} workers died of this task (out of memory?)"
                yield Result(index, task, error=f"{total}, the last {MAX_ALONE} of it alone")
