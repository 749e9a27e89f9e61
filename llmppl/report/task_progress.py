"""How many tasks have come how far, on stderr: a live table on a terminal, a line a minute elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

SECONDS = 60.0                                          # from one line to the next


class Standing:
    """What is done of `total` tasks, by now and when this run began; `tokens()` is what the model has run."""

    def __init__(self, total: int, done: int, failed: int, tokens: Callable[[], int] | None) -> None:
        self.total, self.done, self.failed, self.tokens = total, done, failed, tokens
        self._start, self._before = time.monotonic(), done
        self._tokens_before = tokens() if tokens else 0

    def cells(self) -> dict[str, str]:
        """The heads of the table, and what is below them."""
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
def standing(
    total: int, done: int = 0, failed: int = 0, tokens: Callable[[], int] | None = None
) -> Iterator[Callable[[bool], None]]:
    """What to call when a task has ended, with whether it failed; `done` and `failed` are those of before."""
    state, said = Standing(total, done, failed, tokens), time.monotonic()

    def count(is_failed: bool) -> None:
        state.done, state.failed = state.done + 1, state.failed + is_failed

    def count_and_say(is_failed: bool) -> None:
        nonlocal said
        count(is_failed)
        if time.monotonic() - said >= SECONDS:
            said = time.monotonic()
            print(state, file=sys.stderr, flush=True)

    if not sys.stderr.isatty():
        yield count_and_say
        return
    from rich.console import Console
    from rich.live import Live

    with Live(state, console=Console(stderr=True), refresh_per_second=2, transient=True):
        yield count
