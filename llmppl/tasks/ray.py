"""Ray actors as workers: each is a process with one language model, on any machine of a cluster.

`schedule` gives each worker a *chunk* of tasks, which run together, and gets their results when all have ended. Chunks
get smaller towards the end, so that all workers end at about the same time. If a worker dies, another takes its place,
and its tasks run again. They draw from the same random streams, so nothing is lost and nothing changes.
"""

import math
import os
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar, Unpack

import numpy as np

from llmppl.lm.transformer import DEVICE_SHARE
from llmppl.support.arguments import count, function, optional_count
from llmppl.support.identity import identity
from llmppl.support.options import list_options
from llmppl.tasks.many import DEFAULTS, TOGETHER, Options, RunAll, lanes, recorded, within
from llmppl.tasks.results import Result

L = TypeVar("L")
T = TypeVar("T")
Run = Callable[[Any, Any, np.random.Generator], Any]
Pair = tuple[int, Any]  # an index and its task
MAX_STARTS = 3  # in a row, of a worker that dies in each
GRACE = 60.0  # seconds after its timeout, until a chunk is late
SILENCE = 3.0  # seconds until a wait says what it waits for
MAX_SHARED = 2  # deaths of workers that ran a task with others
MAX_ALONE = 3  # and of those that ran it alone


@list_options(Options, DEFAULTS)
def run_many(
    run: Callable[[L, T, np.random.Generator], Any],
    tasks: Iterable[T],
    *,
    make_lm: Callable[[], L],
    workers: int | None = None,
    resources: Mapping[str, Any] | None = None,
    together: int = TOGETHER,
    timeout: float | None = None,
    budget: int | None = None,
    **options: Unpack[Options],
) -> Iterator[Result]:
    """Run `llmppl.run_many` on the machines of a Ray cluster, with the same results and the same file.

    Ray starts on this machine if the program has not called `ray.init` and RAY_ADDRESS names no cluster. If the process
    of a worker dies, or with `timeout` is `GRACE` seconds late, it restarts, and the tasks that it had run again with
    the same random streams. Tasks are sent to workers only while the caller waits for the next result. For each worker,
    at most `together` tasks are out, and twice as many are read ahead.

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
    timeout, budget, seed, to, resume, version, key, progress
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
    program = identity(run, options.pop("version", ""))
    run = within(run, timeout, budget)
    patience = (timeout or math.inf) + GRACE
    return recorded(
        on_workers(run, make_lm, workers, resources, together, patience), tasks, program, **options
    )


def on_workers(
    run: Run,
    make_lm: Callable[[], Any],
    workers: int | None,
    resources: Mapping[str, Any] | None,
    together: int,
    patience: float = math.inf,
) -> RunAll:
    """Return a function that runs numbered tasks on workers."""
    ray = _ray()
    resources = dict(resources or {})

    def on_actors(numbered: Iterable[Pair], seed: int) -> Iterator[Result]:
        rest = iter(numbered)
        for first in rest:  # if no task is left, nothing starts
            if not ray.is_initialized():
                with _named("Ray starts its processes on this machine"):
                    ray.init(include_dashboard=False)
            size = workers or _room(ray, resources)
            actors = Actors(ray, size, resources, run, make_lm, seed, together, patience)
            try:
                yield from schedule(actors, chain([first], rest), together)
            finally:
                actors.close()

    return on_actors


@contextmanager
def _named(wait: str) -> Iterator[None]:
    """Print what a wait is for on stderr, if it takes longer than `SILENCE`."""
    timer = threading.Timer(SILENCE, lambda: print(f"llmppl: {wait}...", file=sys.stderr))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _ray() -> Any:
    """Return the package `ray`. Raise an ImportError with the command that installs it."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("llmppl.tasks.ray needs Ray: pip install 'llmppl-smc[ray]'") from error
    return ray


def _room(ray: Any, resources: Mapping[str, Any]) -> int:
    """Return the number of workers for which the cluster has room."""
    available = ray.cluster_resources()
    wanted = {"CPU": resources.get("num_cpus", 1), "GPU": resources.get("num_gpus", 0)}
    return max(
        1, int(min(available.get(name, 0) / amount for name, amount in wanted.items() if amount))
    )


class Worker:
    """A language model in an actor, and the tasks that run on it."""

    def start(self, make_lm: bytes, run: bytes) -> bytes:
        """Make the language model, and return no results."""
        cloudpickle = _ray().cloudpickle
        lm = cloudpickle.loads(make_lm)()
        self._run = partial(cloudpickle.loads(run), lm)
        if (
            DEVICE_SHARE in os.environ
            and str(getattr(getattr(lm, "engine", None), "device", None)) == "cpu"
        ):
            said = "the worker has a GPU, and its language model is on the CPU: give from_pretrained device='cuda'"
            warnings.warn(said, stacklevel=2)
        return bytes(cloudpickle.dumps([]))

    def run(self, chunk: bytes, seed: int, together: int) -> bytes:
        """Return the results of a chunk."""
        cloudpickle = _ray().cloudpickle
        return bytes(
            cloudpickle.dumps([*lanes(self._run, together, cloudpickle.loads(chunk), seed)])
        )


class Actors:
    """Cluster of actors for `schedule`, with the numbers 0 to `size` - 1, until `close`.

    Arguments and results are pickled here. Ray would give all processes of a machine one read-only copy of an array.
    """

    def __init__(
        self,
        ray: Any,
        size: int,
        resources: Mapping[str, Any],
        run: Run,
        make_lm: Callable[[], Any],
        seed: int,
        together: int,
        patience: float,
    ) -> None:
        dumps = ray.cloudpickle.dumps
        put = ray.put
        # sent once to a machine
        self._make_lm = put(dumps(make_lm))
        self._run = put(dumps(run))
        self.size = size
        self._ray = ray
        self._seed = seed
        self._together = together
        self._patience = patience
        # without OMP_NUM_THREADS, each takes all cores of its machine
        variables = {"OMP_NUM_THREADS": str(max(1, int(resources.get("num_cpus", 1))))}
        if gpus := resources.get("num_gpus"):
            variables[DEVICE_SHARE] = str(gpus)
        options = {"num_cpus": 1, "runtime_env": {"env_vars": variables}, **resources}
        self._class = ray.remote(Worker).options(**options)
        self._actors = dict[int, Any]()
        self._starts = Counter[int]()  # of each worker, since it was last ready
        self._calls = dict[Any, tuple[int, float]]()  # {reference: (worker, when it is late)}
        self._error: Exception | None = None  # that was the last death
        for worker in range(size):
            self._begin(worker)

    def _begin(self, worker: int) -> None:
        """Start a worker, unless it has died in `MAX_STARTS` starts in a row."""
        self._starts[worker] += 1
        if self._starts[worker] <= MAX_STARTS:
            self._actors[worker] = self._class.remote()
            self._calls[self._actors[worker].start.remote(self._make_lm, self._run)] = (
                worker,
                math.inf,
            )

    def send(self, worker: int, chunk: list[Pair]) -> None:
        """Let a worker that is ready run a chunk."""
        numbered = self._ray.cloudpickle.dumps(chunk)
        call = self._actors[worker].run.remote(numbered, self._seed, self._together)
        self._calls[call] = worker, time.monotonic() + self._patience

    def wait(self) -> tuple[int, list[Result] | None]:
        """Return the next worker that is ready, with its results (none at first), or a dead or late one, with None."""
        if not self._calls:
            died = f"{MAX_STARTS} times in a row each of them died in make_lm, which loads the language model"
            raise RuntimeError(f"no worker is left: {died} (out of memory?)") from self._error
        last = min(self._calls, key=lambda call: self._calls[call][1])
        seconds = self._calls[last][1] - time.monotonic()
        starting = all(self._starts.values())
        with _named("the workers start and load the language model") if starting else nullcontext():
            ready, _ = self._ray.wait([*self._calls], timeout=min(max(seconds, 0.0), 1e8))
        [call] = ready or [last]
        worker, _ = self._calls.pop(call)
        try:
            found = self._ray.cloudpickle.loads(self._ray.get(call, timeout=None if ready else 0.0))
        except self._ray.exceptions.RayTaskError as error:  # of make_lm, or of this module
            raise error.cause from error
        except self._ray.exceptions.RayError as error:
            self._error = error
            self._ray.kill(self._actors[worker])  # its answer may be lost without its death
            self._begin(worker)
            return worker, None
        self._starts[worker] = 0
        return worker, found

    def close(self) -> None:
        """End the processes."""
        for actor in self._actors.values():
            self._ray.kill(actor)


def schedule(cluster: Any, tasks: Iterable[Pair], together: int) -> Iterator[Result]:
    """Run all tasks on a cluster, and yield the results of each chunk when it has ended.

    A cluster has `size` workers and the methods `send` and `wait`, as `Actors` has. If two workers died while they had
    a task, it runs alone from then on. If three more die of it, its result is an error.
    """
    rest = iter(tasks)
    ended = list[Result]()
    waiting = deque[Pair]()
    alone = deque[Pair]()
    ready = deque[int]()
    out = dict[int, list[Pair]]()
    deaths = Counter[int]()  # of workers, by index of a task
    while True:
        waiting.extend(islice(rest, max(2 * together * cluster.size - len(waiting), 0)))
        while ready and (waiting or alone):
            worker = ready.popleft()
            size = min(together, -(-len(waiting) // cluster.size))
            out[worker] = [alone.popleft()] if alone else [waiting.popleft() for _ in range(size)]
            cluster.send(worker, out[worker])
        yield from ended
        if not (waiting or alone or out):
            return
        worker, results = cluster.wait()
        chunk = out.pop(worker, [])
        ended = results or []
        if results is not None:
            ready.append(worker)
            continue
        for index, task in reversed(chunk):
            deaths[index] += 1
            if deaths[index] < MAX_SHARED + MAX_ALONE:
                (alone if deaths[index] >= MAX_SHARED else waiting).appendleft((index, task))
            else:
                died = f"{deaths[index]} workers died of this task (out of memory, or no answer?)"
                ended.append(Result(index, task, error=f"{died}, the last {MAX_ALONE} of it alone"))
