"""Progress bar of inference, on stderr; in a notebook, a line below the cell, which needs no widgets."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llmppl.report import notebook

SECONDS = 0.2                                           # between two updates in a notebook


@contextmanager
def bar(
    progress: bool | None, total: int | None, describe: Callable[[Any], str], unit: str = "step"
) -> Iterator[Callable[[int, Any], None]]:
    """Show a progress bar. Yield a function to be called with the step and the particles after each step.

    `describe(particles)` returns the text beside the bar. Nothing is shown if `progress` is False, or if it is None and
    stderr is no terminal.
    """
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda t, state: None
        return
    if notebook.in_notebook():
        yield from _line(total, describe, unit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    first, last = TextColumn(unit + " {task.completed}"), TextColumn("{task.fields[state]}")
    columns = first, BarColumn(), TimeElapsedColumn(), last
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=total, state="")

        def show(t: int, state: Any) -> None:
            shown.update(task, completed=t, state=describe(state))

        yield show


def _line(total: int | None, describe: Callable[[Any], str], unit: str) -> Iterator[Callable[[int, Any], None]]:
    write, written_at, last = notebook.line(), 0.0, ""

    def show(t: int, state: Any) -> None:
        nonlocal written_at, last
        last = f"{unit} {t}{f' of {total}' * (total is not None)}: {describe(state)}"
        if time.monotonic() - written_at >= SECONDS:
            written_at = time.monotonic()
            write(last)

    try:
        yield show
    finally:
        write(last)


def finished(particles: list[Any]) -> str:
    """Return the number of finished particles in words."""
    return f"{sum(p.finished for p in particles)}/{len(particles)} finished"
