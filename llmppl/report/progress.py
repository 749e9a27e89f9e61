"""Progress bars on stderr, and output below the cells of a notebook."""

import math
import sys
import time
from collections.abc import Callable
from typing import Any, Self

from llmppl.support.runtime import running

SECONDS = 0.2  # between two updates in a notebook
FIRST_LINE = 15.0  # seconds before the first line without a terminal
NEXT_LINE = 60.0  # and before each further one


class Bar:
    """Progress bar of a run: `with Bar(progress, total, describe) as show: show(t, state)`.

    `describe(state)` returns the text beside the bar: a str, or an object whose str is read again and again. If
    `progress` is None, the bar shows if stderr is a terminal. In a notebook it is a line, which needs no widgets. With
    `lines`, a long run without a terminal prints a line on stderr from time to time.
    """

    def __init__(
        self,
        progress: bool | None,
        total: int | None,
        describe: Callable[[Any], object],
        unit: str = "step",
        lines: bool = False,
    ) -> None:
        self._describe = describe
        self._unit = unit
        self._of = "" if total is None else f" of {total}"
        self._bar: Any = None
        self._line: Any = None
        self._text = ""
        self._written_at = 0.0
        self._next_line = math.inf
        if progress is None and not running():  # bars of tasks would mix
            progress = sys.stderr.isatty()
            if lines:
                self._next_line = time.monotonic() + FIRST_LINE
        if not progress:
            return
        if in_notebook():
            from IPython.display import Pretty, display

            self._pretty = Pretty
            self._line = display(Pretty(""), display_id=True)
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        count = TextColumn(f"{unit} {{task.completed}}{self._of}")
        columns = count, BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[state]}")
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._bar.add_task("", total=total, state="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __call__(self, t: int, state: Any) -> None:
        """Show that `t` units are done."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=t, state=self._describe(state))
        elif self._line is not None:
            self._text = f"{self._unit} {t}{self._of}: {self._describe(state)}"
            if time.monotonic() - self._written_at >= SECONDS:
                self._written_at = time.monotonic()
                self._line.update(self._pretty(self._text))
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + NEXT_LINE
            print(
                f"llmppl: {self._unit} {t}{self._of}: {self._describe(state)}",
                file=sys.stderr,
                flush=True,
            )

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._line is not None:
            self._line.update(self._pretty(self._text))


def finished(particles: list[Any]) -> str:
    """Return the number of finished particles in words."""
    return f"{sum(p.finished for p in particles)}/{len(particles)} finished"


def in_notebook() -> bool:
    """Return True in a notebook: in IPython, with a kernel that displays output."""
    return getattr(_shell(), "kernel", None) is not None


def cell_of(filename: str) -> str | None:
    """Return IPython's name of the cell whose code has this file name, "In[3]"; None for another file."""
    name_of = getattr(getattr(_shell(), "compile", None), "format_code_name", None)
    name = name_of and name_of(filename)
    return name and name[1]


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython and ipython.get_ipython()
