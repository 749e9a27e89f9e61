"""Ray actors as workers: each is a process with one language model, on any machine of a cluster.

A call to `Worker.run` is a stream of results, so that the results before the death of a process are known. Ray only
restarts dead actors (`max_restarts`). It does not retry calls: Ray would repeat a stream from its beginning and skip as
many results as it had delivered, which are other results if tasks end in another order. `scheduling.py` sends
unanswered tasks again.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Literal, TypedDict, TypeVar, Unpack

import numpy as np
from greenlet import GreenletExit

from llmppl.inference.resuming.fingerprint import identity_of
from llmppl.lm.transformer import DEVICE_SHARE
from llmppl.support.arguments import count, function, name_of, optional_count
from llmppl.support.locks import let_through
from llmppl.support.options import list_options, unknown_option
from llmppl.tasks.many import TOGETHER, RunAll, lanes, recorded
from llmppl.tasks.results import Result
from llmppl.tasks.scheduling import Pair, schedule

L = TypeVar("L")
T = TypeVar("T")
Run = Callable[[Any, Any, np.random.Generator], Any]
MAX_STARTS = 3                                          # in a row, of a worker that dies in each
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
    if unknown := options.keys() - Options.__annotations__:
        raise unknown_option("llmppl.tasks.ray.run_many", unknown, Options.__annotations__)
    identity = partial(identity_of, name_of(run), {"run": run, "make_lm": make_lm})
    return recorded(on_workers(run, make_lm, workers, resources, together), tasks, identity, **options)


def on_workers(
    run: Run, make_lm: Callable[[], Any], workers: int | None, resources: Mapping[str, Any] | None, together: int
) -> RunAll:
    """Return a function that runs numbered tasks on workers."""
    ray, resources = _ray(), dict(resources or {})

    def on_actors(numbered: Iterable[Pair], seed: int) -> Iterator[Result]:
        rest, process = iter(numbered), os.getpid()
        for first in rest:                              # if no task is left, nothing starts
            if not ray.is_initialized():
                ray.init(include_dashboard=False)
            actors = Actors(ray, workers or _room(ray, resources), resources)
            try:
                actors.start(run, make_lm, seed, together)
                for result in schedule(actors, chain([first], rest), together):
                    yield result
                    if process != os.getpid():          # Ray would wait for ever
                        raise RuntimeError("this run goes on in the process that began it, and this is a fork of it")
            finally:
                if process == os.getpid():
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
        from ray import cloudpickle

        if self._run is None:
            lm = cloudpickle.loads(make_lm)()
            self._run = partial(_contained, cloudpickle.loads(run), lm)
            engines = [getattr(each, "engine", None) for each in (lm if isinstance(lm, tuple) else (lm,))]
            if DEVICE_SHARE in os.environ and "cpu" in [str(getattr(each, "device", None)) for each in engines]:
                said = "the worker has a GPU, and its language model is on the CPU: give from_pretrained device='cuda'"
                warnings.warn(said, stacklevel=2)

    def run(self, chunk: bytes, seed: int, together: int) -> Iterator[bytes]:
        """Yield the results of a chunk as they end, pickled one by one, so that a failure affects no other."""
        from ray import cloudpickle

        assert self._run is not None
        for result in lanes(self._run, cloudpickle.loads(chunk), seed=seed, together=together):
            try:
                yield cloudpickle.dumps(result)
            except Exception as error:
                said = f"the result of the task cannot be sent to the driver: {type(error).__name__}: {error}"
                yield cloudpickle.dumps(replace(result, particles=None, matches=None, error=said))


def _contained(run: Run, lm: Any, task: Any, rng: np.random.Generator) -> Any:
    """Call `run`. An exception that would end the process, such as SystemExit, becomes an error of the task."""
    try:
        return run(lm, task, rng)
    except (Exception, KeyboardInterrupt, GreenletExit):
        raise
    except BaseException as error:
        let_through(error)                              # Ray ends a worker by a signal
        raise RuntimeError(f"the task raised {type(error).__name__}, which ends no worker") from error


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
