"""Progress of many tasks, on stderr: a live table on a terminal, else one line a minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

SECONDS = 60.0                                          # between two lines


class TaskProgress:
    """Progress of `total` tasks. `tokens()` returns the number of tokens that the model has run."""

    def __init__(self, total: int, done: int, failed: int, tokens: Callable[[], int] | None) -> None:
        self.total, self.done, self.failed, self.tokens = total, done, failed, tokens
        self._start, self._before = time.monotonic(), done
        self._tokens_before = tokens() if tokens else 0

    def cells(self) -> dict[str, str]:
        """Return the cells of the table by their heads."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        cells = {"done": f"{self.done} of {self.total}", "failed": str(self.failed)}
        if self.tokens is not None:
            cells["tokens per second"] = f"{(self.tokens() - self._tokens_before) / seconds:.0f}"
        cells["expected end"] = "-"
        if self.done > self._before:
            left = timedelta(seconds=round(seconds / (self.done - self._before) * (self.total - self.done)))
            end = datetime.now() + left
            today = end.date() == datetime.now().date()
            cells["expected end"] = f"{end:{'%H:%M' if today else '%Y-%m-%d %H:%M'}}, in {left}"
        return cells

    def __str__(self) -> str:
        done, *others = self.cells().items()
        return ", ".join([f"{done[1]} done", *(f"{name} {cell}" for name, cell in others)])

    def __rich__(self) -> Any:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        cells = self.cells()
        table = Table(*cells, box=SIMPLE_HEAD)
        table.add_row(*cells.values())
        return table


@contextmanager
def task_progress(
    total: int, done: int = 0, failed: int = 0, tokens: Callable[[], int] | None = None
) -> Iterator[Callable[[bool], None]]:
    """Show progress. Yield a function to be called with True or False, for failure, when a task ends."""
    progress, printed_at = TaskProgress(total, done, failed, tokens), time.monotonic()

    def count(is_failed: bool) -> None:
        progress.done += 1
        progress.failed += is_failed

    def count_and_print(is_failed: bool) -> None:
        nonlocal printed_at
        count(is_failed)
        if time.monotonic() - printed_at >= SECONDS:
            printed_at = time.monotonic()
            print(progress, file=sys.stderr, flush=True)

    if not sys.stderr.isatty():
        yield count_and_print
        return
    from rich.console import Console
    from rich.live import Live

    with Live(progress, console=Console(stderr=True), refresh_per_second=2, transient=True):
        yield count
