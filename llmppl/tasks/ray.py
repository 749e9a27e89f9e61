"""Ray actors as workers: each is a process with one language model, on any machine of a cluster.

A call to `Worker.run` is a stream of results, so that the results before the death of a process are known. Ray only
restarts dead actors (`max_restarts`). It does not retry calls: Ray would repeat a stream from its beginning and skip as
many results as it had delivered, which are other results if tasks end in another order.

`schedule` sends unanswered tasks again. A task waits, is out with a worker, or is answered. If a worker dies, its tasks
wait again, so that none is lost. An answer for a task that is no longer out is dropped, so that none is answered twice.
Workers take a *chunk* of tasks at a time, which they run together. Chunks get smaller towards the end, so that all
workers end at about the same time. `together` and the number of workers bound the tasks that wait or are out.

Source: Hummel, Schonberg & Flynn (1992), "Factoring: a method for scheduling parallel loops", for the sizes of chunks.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any, Literal, Protocol, TypedDict, TypeVar, Unpack

import numpy as np

from llmppl.lm.transformer import DEVICE_SHARE
from llmppl.support.arguments import count, function, name_of, optional_count
from llmppl.support.options import list_options
from llmppl.support.values import identity
from llmppl.tasks.many import TOGETHER, RunAll, lanes, recorded
from llmppl.tasks.results import Result

L = TypeVar("L")
T = TypeVar("T")
Run = Callable[[Any, Any, np.random.Generator], Any]
Pair = tuple[int, Any]                                  # an index and its task
MAX_STARTS = 3                                          # in a row, of a worker that dies in each
MAX_CHUNK = 2                                           # chunks hold at most this many times `together` tasks
MAX_SHARED, MAX_ALONE = 2, 3                            # deaths of workers that ran a task with others, and alone
FOUND = "found"


class Options(TypedDict, total=False):
    """Options that mean the same as in `llmppl.run_many`."""

    seed: int | None
    to: str | os.PathLike[str] | None
    resume: bool | Literal["force"]
    progress: bool | None


@list_options(Options, {"resume": False})
def run_many(
    run: Callable[[L, T, np.random.Generator], Any],
    tasks: Iterable[T],
    *,
    make_lm: Callable[[], L],
    workers: int | None = None,
    resources: Mapping[str, Any] | None = None,
    together: int = TOGETHER,
    **options: Unpack[Options],
) -> Iterator[Result]:
    """Run `llmppl.run_many` on the machines of a Ray cluster, with the same results and the same file.

    Ray starts on this machine if the program has not called `ray.init` and RAY_ADDRESS names no cluster. If the process
    of a worker dies, it restarts, and its unfinished tasks run again with the same random streams. Tasks are sent to
    workers only while the caller waits for the next result. At most 2 `together` tasks are out for each worker, and
    twice as many are read ahead.

    Parameters
    ----------
    run : callable
        A function of a language model, a task and a random stream:
        `lambda lm, prompt, rng: smc_steer(Story(lm, prompt), N=8, rng=rng)`.
    tasks : iterable
        Prompts, or other values that pickle.
    make_lm : callable
        Makes the language model for `run`, once in each worker: `lambda: CachedTransformer.from_pretrained()`. It may
        also return a tuple of models, or a model and a grammar.
    workers : int, optional
        Number of processes; by default as many as the cluster has room for now.
    resources : dict, optional
        Resources of a worker in Ray's terms, such as `{"num_gpus": 1}`; by default one CPU. A worker runs as many
        threads as it has CPUs.
    together : int
        Number of tasks of a worker that share batches.
    seed, to, resume, progress
        As in `llmppl.run_many`. The file is written by the calling process.

    Returns
    -------
    iterator of Result
        The particles are those of a pickle: `SavedParticle`.

    Raises
    ------
    ImportError
        If Ray is not installed.
    RuntimeError
        If the processes of all workers died in `make_lm`. An exception that it raises reaches the caller.
    """
    function("run", run, "lambda lm, task, rng: smc_steer(model(lm, task), N, K, rng=rng)", takes=3)
    function("make_lm", make_lm, "lambda: CachedTransformer.from_pretrained()")
    optional_count("workers", workers)
    count("together", together)
    program = identity(name_of(run), run, make_lm=make_lm)
    return recorded(on_workers(run, make_lm, workers, resources, together), tasks, program, **options)


def on_workers(
    run: Run, make_lm: Callable[[], Any], workers: int | None, resources: Mapping[str, Any] | None, together: int
) -> RunAll:
    """Return a function that runs numbered tasks on workers."""
    ray, resources = _ray(), dict(resources or {})

    def on_actors(numbered: Iterable[Pair], seed: int) -> Iterator[Result]:
        rest = iter(numbered)
        for first in rest:                              # if no task is left, nothing starts
            if not ray.is_initialized():
                ray.init(include_dashboard=False)
            actors = Actors(ray, workers or _room(ray, resources), resources)
            try:
                actors.start(run, make_lm, seed, together)
                yield from schedule(actors, chain([first], rest), together)
            finally:
                actors.close()

    return on_actors


def _ray() -> Any:
    """Return the package `ray`. Raise an ImportError with the command that installs it."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("llmppl.tasks.ray needs Ray: pip install 'llmppl[ray]'") from error
    return ray


def _room(ray: Any, resources: Mapping[str, Any]) -> int:
    """Return the number of workers for which the cluster has room."""
    available = ray.cluster_resources()
    wanted = {"CPU": resources.get("num_cpus", 1), "GPU": resources.get("num_gpus", 0)}
    return max(1, int(min(available.get(name, 0) / amount for name, amount in wanted.items() if amount)))


class Worker:
    """A language model in an actor, and the tasks that run on it."""

    def __init__(self) -> None:
        self._run: Callable[..., Any] | None = None     # with the language model

    def found(self) -> str:
        """Answer that there is a process."""
        return FOUND

    def start(self, make_lm: bytes, run: bytes) -> None:
        """Make the language model unless it exists."""
        if self._run is None:
            loads = _ray().cloudpickle.loads
            lm = loads(make_lm)()
            self._run = partial(loads(run), lm)
            engines = [getattr(each, "engine", None) for each in (lm if isinstance(lm, tuple) else (lm,))]
            if DEVICE_SHARE in os.environ and "cpu" in [str(getattr(each, "device", None)) for each in engines]:
                said = "the worker has a GPU, and its language model is on the CPU: give from_pretrained device='cuda'"
                warnings.warn(said, stacklevel=2)

    def run(self, chunk: bytes, seed: int, together: int) -> Iterator[bytes]:
        """Yield the results of a chunk as they end, pickled one by one, so that a failure affects no other."""
        assert self._run is not None
        cloudpickle = _ray().cloudpickle
        for result in lanes(self._run, cloudpickle.loads(chunk), seed=seed, together=together):
            try:
                yield cloudpickle.dumps(result)
            except Exception as error:
                said = f"the result of the task cannot be sent to the driver: {type(error).__name__}: {error}"
                yield cloudpickle.dumps(replace(result, particles=None, matches=None, error=said))


class Actors:
    """Cluster of actors for `schedule`, between `start` and `close`.

    Arguments are pickled here. Ray would give all processes of a machine one read-only copy of an array.
    """

    def __init__(self, ray: Any, size: int, resources: Mapping[str, Any]) -> None:
        self.size, self._ray = size, ray
        threads = str(max(1, int(resources.get("num_cpus", 1))))
        variables = {"OMP_NUM_THREADS": threads}        # without it, each takes all cores of its machine
        if gpus := resources.get("num_gpus"):
            variables[DEVICE_SHARE] = str(gpus)
        options = {"num_cpus": 1, "max_restarts": -1, "runtime_env": {"env_vars": variables}, **resources}
        self._actors = [ray.remote(Worker).options(**options).remote() for _ in range(size)]
        self._calls: dict[Any, int] = {}                # {reference or stream: worker}, longest without news first

    def start(self, run: Run, make_lm: Callable[[], Any], seed: int, together: int) -> None:
        """Make the language models. `run`, `seed` and `together` hold for all chunks."""
        dumps, put = self._ray.cloudpickle.dumps, self._ray.put
        self._make_lm, self._run = put(dumps(make_lm)), put(dumps(run))         # sent once to a machine
        self._seed, self._together = seed, together
        self._starts = [0] * self.size                  # failed starts in a row
        for worker in range(self.size):
            self._find(worker)

    def _find(self, worker: int) -> None:
        """Ask for the process of a worker, which then starts. Give it up after `MAX_STARTS` failed starts."""
        self._starts[worker] += 1
        if self._starts[worker] <= MAX_STARTS:
            self._calls[self._actors[worker].found.options(max_task_retries=-1).remote()] = worker

    def send(self, worker: int, chunk: list[Pair]) -> None:
        run = self._actors[worker].run.options(num_returns="streaming")
        numbered = self._ray.cloudpickle.dumps(chunk)
        self._calls[run.remote(numbered, self._seed, self._together)] = worker

    def wait(self) -> tuple[int, Result | Literal["ready", "dead"]]:
        last = None
        while self._calls:
            (call, *_), _ = self._ray.wait([*self._calls])
            worker = self._calls.pop(call)
            try:
                if not isinstance(call, self._ray.ObjectRef):
                    result = self._ray.cloudpickle.loads(self._ray.get(next(call)))
                    self._calls[call] = worker
                    return worker, result
                if self._ray.get(call) == FOUND:
                    self._calls[self._actors[worker].start.remote(self._make_lm, self._run)] = worker
                else:
                    self._starts[worker] = 0
                    return worker, "ready"
            except StopIteration:
                return worker, "ready"
            except self._ray.exceptions.RayTaskError as error:          # of make_lm, or of this module
                raise error.cause from error
            except self._ray.exceptions.RayError as error:
                last = error
                self._find(worker)
                if not isinstance(call, self._ray.ObjectRef):
                    return worker, "dead"
        died = f"{MAX_STARTS} times in a row each of them died in make_lm, which loads the language model"
        raise RuntimeError(f"no worker is left: {died} (out of memory?)") from last

    def close(self) -> None:
        """End the processes."""
        for actor in self._actors:
            self._ray.kill(actor)


# ---- the assignment of tasks to workers of any kind


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
