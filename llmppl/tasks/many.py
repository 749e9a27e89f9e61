"""Many tasks: the same inference for each of many prompts, in shared batches, with results in a file.

Tasks run in *lanes*, a few at a time. When one ends, the next begins, so that the batches of the language model stay
full. Each task has its own random stream, that of its index. Up to rounding, its result does not depend on the tasks
in its batches, nor on earlier runs of a resumed file.
"""

import functools
import inspect
import math
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack

import numpy as np

from llmppl.inference.particles import Particles
from llmppl.inference.run import paced_collector
from llmppl.report.progress import Bar
from llmppl.support.arguments import (
    count,
    function,
    generator,
    name_of,
    optional_count,
    positive,
    shown,
)
from llmppl.support.files import is_own_error
from llmppl.support.identity import Identity, identity
from llmppl.support.options import check_options, list_options
from llmppl.support.runtime import Runtime, spent, watching
from llmppl.tasks.results import Result, ResultFile

T = TypeVar("T")
FEW = 3  # results after which the cost of all is estimated
TOGETHER = 16  # tasks that run at a time
Run = Callable[[Any, np.random.Generator], Any]
RunAll = Callable[[Iterable[tuple[int, Any]], Any], Iterator[Result]]


class Options(TypedDict, total=False):
    """Options of `run_many`, here and on Ray."""

    seed: int | None
    to: str | os.PathLike[str] | None
    resume: bool | Literal["force"]
    version: str
    key: Callable[[Any], str] | None
    progress: bool | None


DEFAULTS = {"resume": False, "version": ""}


@list_options(Options, DEFAULTS)
def run_many(
    run: Callable[[T, np.random.Generator], Any],
    tasks: Iterable[T],
    *,
    together: int = TOGETHER,
    timeout: float | None = None,
    budget: int | None = None,
    **options: Unpack[Options],
) -> Iterator[Result]:
    """Run the same inference for each task, and yield the results as tasks end.

    Tasks run only while the caller waits for the next result. An exception that ends a task, SystemExit included, is
    its result, and the other tasks go on. If it left a run, as a time limit in `on_step` does, the result has the
    particles of the last step, too. A KeyboardInterrupt and an error of a file of results or a checkpoint end all.

    Parameters
    ----------
    run : callable
        A function of a task and a random stream: `lambda prompt, rng: smc_steer(Story(lm, prompt), N=8, rng=rng)`. It
        returns Particles, a list of matches or beams, as `list(islice(search(lm, pattern), 10))`, or an answer of
        `generate(lm, prompt, constraint, rng=rng)`.
    tasks : iterable
        Prompts, or other arguments of `run`. A generator is read as tasks begin.
    seed : int, optional
        The stream of a task is `default_rng(SeedSequence(seed, spawn_key=(index,)))`.
    together : int
        Number of tasks that run at a time.
    timeout, budget : float and int, optional
        Seconds of a task, and tokens that language models run for it. Its algorithm then returns the particles of its
        last step, marked `cut`, whose `limit` is "timeout" or "budget". A step is not interrupted.
    to : path, optional
        An SQLite file that gets each result when its task ends; `load_results(path)` reads it.
    resume : bool or "force"
        Continue that file. Tasks that have a result without an error there are skipped, and failed ones run again. The
        name and the source text of `run`, the seed, `version`, and the version of this package must be those of the
        file. "force" keeps results of another run.
    version : str
        A text of yours that tells runs apart. Change it when critics, language models or data change, because the
        objects to which `run` refers are not compared.
    key : callable, optional
        A function that returns a text by which a task is known, as `lambda task: task.name`. By default it is the
        digest of the task's pickle. A TypeError asks for a key if a task has no pickle.
    progress : bool, optional
        Show a bar; by default if stderr is a terminal, else a line a minute after the first 15 seconds. It has the
        estimated cost of all tasks after three of them.

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
        If the file has results of another run or of other tasks, or has other contents.
    OSError
        If the file cannot be written, as on a full disk. The results before are complete, and `resume=True` continues.

    Examples
    --------
    >>> def run(prompt, rng):
    ...     return smc_steer(ConstrainedText(lm, prompt, [" happy", " sad"]), N=4, K=3, rng=rng)
    >>> results = run_many(run, ["The cat was", "The dog was"], seed=0)
    >>> [result.particles.best.s for result in results]
    [' happy', ' happy']
    """
    function("run", run, "lambda task, rng: smc_steer(model(task), N, K, rng=rng)", takes=2)
    count("together", together)
    program = identity(run, options.pop("version", ""))
    run_all = functools.partial(lanes, within(run, timeout, budget), together)
    return recorded(run_all, tasks, program, **options)


def within(
    run: Callable[..., Any], timeout: float | None, budget: int | None
) -> Callable[..., Any]:
    """Return a function like `run`, whose algorithms end after this number of seconds or tokens of a call."""
    seconds = math.inf if timeout is None else positive("timeout", timeout)
    limited = functools.partial(
        _limited, run, seconds, optional_count("budget", budget) or math.inf
    )
    return functools.update_wrapper(limited, run)


def _limited(run: Callable[..., Any], seconds: float, tokens: float, *args: Any) -> Any:
    end = time.perf_counter() + seconds

    def reached(texts: Callable[[], list[str]]) -> str:
        if time.perf_counter() >= end:
            return "timeout"
        return "budget" if spent()[1] >= tokens else ""

    watching.set(reached)
    return run(*args)


def recorded(
    run_all: RunAll,
    tasks: Iterable[Any],
    program: Identity | None = None,
    **options: Unpack[Options],
) -> Iterator[Result]:
    """Write and yield the results of `run_all(numbered tasks, seed)`, as `run_many` does.

    `program` is compared with that in a file of results.

    Examples
    --------
    >>> def run_all(numbered, seed):
    ...     for index, prompt in numbered:
    ...         yield Result(index, prompt, matches=search(lm, f"{prompt} (happy|sad)", prefix=prompt).take(1))
    >>> results = recorded(run_all, ["The cat was", "The dog was"], to="results.db")
    >>> [result.matches[0].text for result in results]
    ['The cat was happy', 'The dog was happy']
    """
    check_options("run_many", options, inspect.signature(run_many).parameters)
    seed = options.get("seed")
    to = options.get("to")
    resume = options.get("resume", False)
    key = options.get("key")
    progress = options.get("progress")
    if isinstance(tasks, str) or not isinstance(tasks, Iterable):
        raise TypeError(f"tasks must be a list or another iterable of tasks, not {shown(tasks)}")
    generator(seed)  # or an error
    if resume not in (True, False, "force"):
        raise ValueError(f'resume must be True, False or "force", not {shown(resume)}')
    if resume and to is None:
        raise ValueError(
            "resume=True goes on with a file of results: say with which, as to='results.db'"
        )
    if key is not None:
        function("key", key, "lambda task: task.name", takes=1)
    total = len(tasks) if isinstance(tasks, Sequence) else None
    if to is None:
        return _shown(
            run_all(enumerate(tasks), np.random.SeedSequence(seed).entropy), 0, total, progress
        )
    file = ResultFile(to, seed=seed, resume=resume, program=program, key=key)
    return _shown(
        file.written(run_all(file.missing(tasks), file.seed)), file.num_done, total, progress
    )


def _shown(
    results: Iterator[Result], num_done: int, total: int | None, progress: bool | None
) -> Iterator[Result]:
    """Yield results while a bar shows their number and, after the first few, the cost of all that are left."""
    failed = num = tokens = 0
    cpu_seconds = 0.0
    with Bar(progress, total, str, unit="task", lines=True) as show:
        for num, result in enumerate(results, 1):
            failed += result.error is not None
            tokens += result.tokens
            cpu_seconds += result.cpu_seconds
            state = f"{failed} failed"
            if total is not None and num >= FEW:
                of_all = (total - num_done) / num
                state += f"; about {_duration(cpu_seconds * of_all)} of CPU and {tokens * of_all:,.0f} tokens in all"
            show(num_done + num, state)
            yield result


def _duration(seconds: float) -> str:
    """Return a time in its unit."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def lanes(
    run: Run, together: int, numbered: Iterable[tuple[int, Any]], seed: int
) -> Iterator[Result]:
    """Run tasks, given as (index, task), `together` at a time, and yield their results as they end.

    Examples
    --------
    >>> def run(prompt, rng):
    ...     return smc_steer(ConstrainedText(lm, prompt, [" happy", " sad"]), N=4, K=3, rng=rng)
    >>> results = lanes(run, 2, enumerate(["The cat was", "The dog was"]), seed=0)
    >>> [result.particles.best.s for result in results]
    [' happy', ' happy']
    """
    calls = (
        (functools.partial(_attempt, run, index, task, seed), f"task {index}")
        for index, task in numbered
    )
    with paced_collector():
        yield from Runtime().each(calls, together)


def _attempt(run: Run, index: int, task: Any, seed: int) -> Result:
    start = time.perf_counter()
    particles = matches = error = made = None
    try:
        answer = run(task, np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(index,))))
        if hasattr(answer, "as_dict") and hasattr(answer, "value"):  # an answer, or a decision
            made = answer
        elif isinstance(answer, Particles):
            particles = answer
        elif isinstance(answer, list) and all(hasattr(each, "as_dict") for each in answer):
            matches = answer
        else:
            wanted = "Particles, as smc_steer does, or a list of matches or beams, or an answer of generate"
            raise TypeError(f"run must return {wanted}; {name_of(run)} returned {shown(answer)}")
    except (Exception, SystemExit) as reason:
        if is_own_error(reason):
            raise
        error = traceback.format_exc()
        left = getattr(reason, "particles", None)
        particles = left if isinstance(left, Particles) and left.steps else None
    if particles is not None:
        particles.stats = None
    cpu_seconds, tokens = spent()
    seconds = time.perf_counter() - start
    return Result(index, task, particles, matches, error, seconds, cpu_seconds, round(tokens), made)
