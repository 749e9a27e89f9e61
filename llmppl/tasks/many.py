"""Many tasks: the same inference for each of many prompts, in shared batches, with results in a file.

Tasks run in *lanes*, a few at a time. When one ends, the next begins, so that the batches of the language model stay
full. Each task has its own random stream, that of its index. Up to rounding, its result does not depend on the tasks
in its batches, nor on earlier runs of a resumed file.
"""

from __future__ import annotations

import functools
import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeVar

import numpy as np

from llmppl.inference.gc_freeze import freeze, frozen_gc
from llmppl.inference.particles import Particles
from llmppl.inference.resuming.fingerprint import identity_of
from llmppl.report.progress import Bar
from llmppl.support.arguments import count, function, generator, name_of, shown
from llmppl.support.locks import heard, let_through
from llmppl.support.runtime import Runtime
from llmppl.tasks.results import Result, ResultFile

T = TypeVar("T")
TOGETHER = 16                                           # tasks that run at a time
Run = Callable[[Any, np.random.Generator], Any]
RunAll = Callable[[Iterable[tuple[int, Any]], int], Iterator[Result]]


def run_many(
    run: Callable[[T, np.random.Generator], Any],
    tasks: Iterable[T],
    *,
    seed: int | None = None,
    together: int = TOGETHER,
    to: str | os.PathLike[str] | None = None,
    resume: bool | Literal["force"] = False,
    progress: bool | None = None,
) -> Iterator[Result]:
    """Run the same inference for each task, and yield the results as tasks end.

    Tasks run only while the caller waits for the next result. An exception that ends a task is its result. A
    KeyboardInterrupt ends all tasks; the results written before stay.

    Parameters
    ----------
    run : callable
        A function of a task and a random stream: `lambda prompt, rng: smc_steer(Story(lm, prompt), N=8, rng=rng)`. It
        returns Particles, or a list of matches or beams, as `list(islice(search(lm, pattern), 10))`.
    tasks : iterable
        Prompts, or other arguments of `run`. A generator is read as tasks begin.
    seed : int, optional
        The stream of a task is `default_rng(SeedSequence(seed, spawn_key=(index,)))`.
    together : int
        Number of tasks that run at a time.
    to : path, optional
        A file that gets a line of JSON for each task when it ends; `load_results(path)` reads it. Tasks must then be
        data, which is compared by contents: texts, numbers, lists, dicts, arrays, data frames, dataclasses.
    resume : bool or "force"
        Continue that file, and skip the tasks whose results it has. `run` with all that it refers to, the seed, the
        version of this package and the tasks must be those of the file. A list of tasks is compared before anything
        runs. "force" keeps results of another `run`, seed or version.
    progress : bool, optional
        Show a bar; by default if stderr is a terminal.

    Returns
    -------
    iterator of Result

    Raises
    ------
    FileExistsError
        If the file has results, and `resume` is False.
    BlockingIOError
        If another run is writing the file.
    ValueError
        If the file has results of another run or of other tasks, is damaged, or has other contents. If it is named as a
        Parquet file.
    OSError
        If the file cannot be written, as on a full disk. The results before are complete, and `resume=True` continues.
        If something else deletes, replaces or empties the file.
    """
    function("run", run, "lambda task, rng: smc_steer(model(task), N, K, rng=rng)", takes=2)
    count("together", together)
    identity = functools.partial(identity_of, name_of(run), {"run": run})
    return recorded(in_lanes(run, together), tasks, identity, seed=seed, to=to, resume=resume, progress=progress)


def recorded(
    run_all: RunAll,
    tasks: Iterable[Any],
    identity: Callable[[], tuple[dict[str, Any], Any]] | None = None,
    *,
    seed: int | None = None,
    to: str | os.PathLike[str] | None = None,
    resume: bool | Literal["force"] = False,
    progress: bool | None = None,
) -> Iterator[Result]:
    """Write and yield the results of `run_all(numbered tasks, seed)`, as `run_many` does.

    `identity()` returns the identity of the program, to compare with that in a file of results. Without it, programs
    are not compared.
    """
    if isinstance(tasks, str) or not isinstance(tasks, Iterable):
        raise TypeError(f"tasks must be a list or another iterable of tasks, not {shown(tasks)}")
    generator(seed)                                     # or an error
    if resume not in (True, False, "force"):
        raise TypeError(f'resume must be True, False or "force", not {shown(resume)}')
    if resume and to is None:
        raise ValueError("resume=True goes on with a file of results: say with which, as to='results.jsonl'")
    listed = tasks if isinstance(tasks, Sequence) else None
    file = None
    if to is not None:
        program = None if identity is None else json.loads(json.dumps(identity()[0]))   # as a file has it
        file = ResultFile(to, seed=seed, resume=resume, tasks=listed, identity=program)
    return _results(run_all, tasks, np.random.SeedSequence(seed).entropy if file is None else file.seed, file, progress)


def _results(
    run_all: RunAll, tasks: Iterable[Any], seed: Any, file: ResultFile | None, progress: bool | None
) -> Iterator[Result]:
    num_tasks, done, failed = 0, 0, 0

    def todo() -> Iterator[tuple[int, Any]]:
        nonlocal num_tasks, done
        for index, task in enumerate(tasks):
            num_tasks += 1
            if file is None or not file.is_done(index, task):
                yield index, task
            else:
                done += 1

    total = len(tasks) if isinstance(tasks, Sequence) else None
    with file or nullcontext(), Bar(progress, total, str, unit="task") as show:
        for result in run_all(todo(), seed):
            if file is not None:
                file.write(result)
            done, failed = done + 1, failed + (result.error is not None)
            show(done, f"{failed} failed")
            yield result
            if file is not None:
                file.check_process()                    # the iterator may go on in a fork
        if file is not None:
            file.check_number(num_tasks)


def in_lanes(run: Run, together: int) -> RunAll:
    """Return a function that runs numbered tasks in lanes."""
    return lambda numbered, seed: lanes(run, numbered, seed=seed, together=together)


def lanes(run: Run, numbered: Iterable[tuple[int, Any]], *, seed: int, together: int) -> Iterator[Result]:
    """Run tasks with these indices, `together` at a time, and yield their results as they end."""
    calls = ((functools.partial(_attempt, run, index, task, seed), f"task {index}") for index, task in numbered)
    with frozen_gc():
        yield from Runtime().each(calls, together)


def _attempt(run: Run, index: int, task: Any, seed: int) -> Result:
    start = time.perf_counter()
    particles = matches = error = None
    freeze()
    try:
        answer = run(task, np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(index,))))
        if isinstance(answer, Particles):
            particles, answer.stats = answer, None
        elif isinstance(answer, list) and all(hasattr(each, "as_dict") for each in answer):
            matches = answer
        else:
            raise TypeError(
                f"run must return Particles, as smc_steer does, or a list of matches or beams; {name_of(run)} returned "
                f"{shown(answer)}"
            )
    except Exception as reason:
        let_through(reason)
        error = heard(traceback.format_exc)             # format_exc drops exceptions of signal handlers
    return Result(index, task, particles, matches, error, time.perf_counter() - start)
