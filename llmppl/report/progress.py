"""The progress bar of inference, on stderr; in a notebook a line below the cell, which needs no widgets."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llmppl.report import notebook

SECONDS = 0.2                                           # from one line in a notebook to the next


@contextmanager
def bar(
    progress: bool | None, total: int | None, describe: Callable[[Any], str], unit: str = "step"
) -> Iterator[Callable[[int, Any], None]]:
    """What to call with the step and the particles after each step; `describe` says how they stand.

    Nothing is shown where `progress` is false, or None and stderr is no terminal.
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
    write, said, last = notebook.line(), 0.0, ""

    def show(t: int, state: Any) -> None:
        nonlocal said, last
        last = f"{unit} {t}{f' of {total}' * (total is not None)}: {describe(state)}"
        if time.monotonic() - said >= SECONDS:
            said = time.monotonic()
            write(last)

    try:
        yield show
    finally:
        write(last)


def finished(particles: list[Any]) -> str:
    """How many have finished."""
    return f"{sum(p.finished for p in particles)}/{len(particles)} finished"
