"""The progress bar of inference, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    first, last = TextColumn(unit + " {task.completed}"), TextColumn("{task.fields[state]}")
    columns = first, BarColumn(), TimeElapsedColumn(), last
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=total, state="")

        def show(t: int, state: Any) -> None:
            shown.update(task, completed=t, state=describe(state))

        yield show


def finished(particles: list[Any]) -> str:
    """How many have finished."""
    return f"{sum(p.finished for p in particles)}/{len(particles)} finished"
