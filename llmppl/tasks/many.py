"""Many tasks: the same inference for each of many prompts, in shared batches, with results that last.

Tasks run in *lanes*, a few at a time; where one ends the next begins, so that the batches of the language model stay
full. A task has a random stream of its own, that of its index, so that its result does not depend on who shares its
batches (but for rounding), nor on what was done before the run was resumed.
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

from llmppl.inference.gc_freeze import frozen_gc, freeze
from llmppl.inference.particles import Particles
from llmppl.inference.resuming.fingerprint import identity_of
from llmppl.report.progress import bar
from llmppl.support.arguments import count, function, generator, name_of, shown
from llmppl.support.locks import heard, let_through
from llmppl.support.runtime import Runtime
from llmppl.tasks.results import Result, ResultFile

T = TypeVar("T")
TOGETHER = 16                                           # tasks under way at a time
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
    """Run the same inference for each task; the results come out as tasks end.

    A task runs while results are asked for, and not before. An exception that ends a task is its result; a
    KeyboardInterrupt ends all, and what was written before stays.

    Parameters
    ----------
    run : callable
        What to do with a task and a random stream: `lambda prompt, rng: smc_steer(Story(lm, prompt), N=8, rng=rng)`. It
        returns Particles, or a list of matches or beams, as `list(islice(search(lm, pattern), 10))`.
    tasks : iterable
        Prompts, or whatever else `run` takes. A generator is read as tasks are begun.
    seed : int, optional
        The stream of a task is `default_rng(SeedSequence(seed, spawn_key=(index,)))`.
    together : int
        How many tasks are under way at a time.
    to : path, optional
        A file that gets a line of JSON for each task when it ends; `load_results(path)` reads it. Tasks must then be
        data, which is compared by contents: texts, numbers, lists, dicts, arrays, data frames, dataclasses.
    resume : bool or "force"
        Go on with that file, and skip the tasks that it has results of. `run`, with all that it refers to, the seed and
        the version of this package must be those of the file, and the tasks, too: a list of them is compared before
        anything runs. "force" keeps results that another `run`, seed or version has made.
    progress : bool, optional
        Show a bar; by default where stderr is a terminal.

    Returns
    -------
    iterator of Result

    Raises
    ------
    FileExistsError
        If the file is there, and `resume` is False.
    BlockingIOError
        If another run is writing the file.
    ValueError
        If it holds results of another run or of other tasks, is damaged, or holds anything else.
    OSError
        If it cannot be written, as on a full disk; the results before are whole, and `resume=True` goes on. If
        something else deletes, replaces or empties the file.
    """
    function("run", run, "lambda task, rng: smc_steer(model(task), N, K, rng=rng)", takes=2)
    count("together", together)
    told = functools.partial(identity_of, name_of(run), {"run": run})
    return recorded(in_lanes(run, together), tasks, told, seed=seed, to=to, resume=resume, progress=progress)


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
    """Keep and show the results that `run_all(numbered tasks, seed)` yields, as `run_many` does.

    `identity` returns that of the program, which is compared with that of a file of results. Without it none is.
    """
    if isinstance(tasks, str) or not isinstance(tasks, Iterable):
        raise TypeError(f"tasks must be a list or another iterable of tasks, not {shown(tasks)}")
    generator(seed)                                     # checks it
    if resume not in (True, False, "force"):
        raise TypeError(f'resume must be True, False or "force", not {shown(resume)}')
    if resume and to is None:
        raise ValueError("resume=True goes on with a file of results: say with which, as to='results.jsonl'")
    listed = tasks if isinstance(tasks, Sequence) else None
    file = None
    if to is not None:
        told = None if identity is None else json.loads(json.dumps(identity()[0]))      # as it is read again
        file = ResultFile(to, seed=seed, resume=resume, tasks=listed, identity=told)
    return _results(run_all, tasks, np.random.SeedSequence(seed).entropy if file is None else file.seed, file, progress)


def _results(
    run_all: RunAll, tasks: Iterable[Any], seed: Any, file: ResultFile | None, progress: bool | None
) -> Iterator[Result]:
    taken, done, failed = 0, 0, 0

    def todo() -> Iterator[tuple[int, Any]]:
        nonlocal taken, done
        for index, task in enumerate(tasks):
            taken += 1
            if file is None or not file.is_done(index, task):
                yield index, task
            else:
                done += 1

    total = len(tasks) if isinstance(tasks, Sequence) else None
    with file or nullcontext(), bar(progress, total, str, unit="task") as show:
        for result in run_all(todo(), seed):
            if file is not None:
                file.write(result)
            done, failed = done + 1, failed + (result.error is not None)
            show(done, f"{failed} failed")
            yield result
            if file is not None:
                file.check_process()                    # the iterator may go on in a fork
        if file is not None:
            file.check_number(taken)


def in_lanes(run: Run, together: int) -> RunAll:
    """Return a function that runs numbered tasks in lanes."""
    return lambda numbered, seed: lanes(run, numbered, seed=seed, together=together)


def lanes(run: Run, numbered: Iterable[tuple[int, Any]], *, seed: int, together: int) -> Iterator[Result]:
    """The results of tasks with these indices, `together` at a time, as they end."""
    calls = ((functools.partial(_attempt, run, index, task, seed), f"task {index}") for index, task in numbered)
    with frozen_gc():
        yield from Runtime().each(calls, together)


def _attempt(run: Run, index: int, task: Any, seed: int) -> Result:
    start = time.perf_counter()
    particles = matches = error = None
    freeze()
    try:
        found = run(task, np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(index,))))
        if isinstance(found, Particles):
            particles, found.stats = found, None
        elif isinstance(found, list) and all(hasattr(each, "as_dict") for each in found):
            matches = found
        else:
            raise TypeError(
                f"run must return Particles, as smc_steer does, or a list of matches or beams; {name_of(run)} returned "
                f"{shown(found)}"
            )
    except Exception as reason:
        let_through(reason)
        error = heard(traceback.format_exc)             # which drops what a signal handler raises in its parser
    return Result(index, task, particles, matches, error, time.perf_counter() - start)
