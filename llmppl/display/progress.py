"""The progress bar of inference, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def bar(
    progress: bool | None, max_steps: int | None, describe: Callable[[list[Any]], str], unit: str = "step"
) -> Iterator[Callable[[int, list[Any]], None]]:
    """What to call with the step and the particles after each step; `describe` says how they stand.

    Nothing is shown where `progress` is false, or None and stderr is no terminal.
    """
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda t, particles: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    first, last = TextColumn(unit + " {task.completed}"), TextColumn("{task.fields[state]}")
    columns = first, BarColumn(), TimeElapsedColumn(), last
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=max_steps, state="")

        def show(t: int, particles: list[Any]) -> None:
            finished = sum(p.finished for p in particles)
            state = f"{finished}/{len(particles)} finished, {describe(particles)}"
            shown.update(task, completed=t, state=state)

        yield show
