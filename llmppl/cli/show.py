"""What goes out: particles, a place in a text, errors."""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import typer

from llmppl.report.tables import printable

if TYPE_CHECKING:
    from llmppl.inference import Particles


INTERRUPTED = 130                                       # as a shell calls what SIGINT has ended


class Row(NamedTuple):
    """What is shown of a particle."""

    text: str
    log_weight: float
    weight: float
    cut: bool                                           # whether --max-tokens ended it


def show(title: str, particles: Particles[Any], as_json: bool, by_text: bool = False) -> None:
    """Print the particles, the heaviest first: a table on a terminal, else plain lines, or JSON with `as_json`.

    `by_text` merges particles of the same text and adds their weights.
    """
    weighed = zip(particles, particles.log_weights.tolist(), particles.weights.tolist(), strict=True)
    rows = [Row(str(particle), log_weight, weight, particle.cut) for particle, log_weight, weight in weighed]
    if by_text:
        rows = together(rows)
    rows.sort(key=lambda row: -row.weight)
    total = f"log Z-hat {particles.log_ml:.2f}, ess {particles.ess:.1f} of {len(particles)} particles"
    if as_json:
        typer.echo("\n".join(json.dumps(row._asdict()) for row in rows))
    elif on_terminal():
        _table(title, rows, total)
    else:
        lines = [f"{row.weight:6.3f}  {row.log_weight:10.2f}  {line(row)}" for row in rows]
        typer.echo("\n".join([title, "", "weight  log weight  text", *lines, "", total]))


def together(rows: list[Row]) -> list[Row]:
    """Return one row for each text, with the sum of the weights of its rows."""
    by_text = dict[str, Row]()
    for row in rows:
        one = by_text.get(row.text, row._replace(weight=0.0, log_weight=-math.inf))
        high, low = max(row.log_weight, one.log_weight), min(row.log_weight, one.log_weight)
        log_weight = high + math.log1p(math.exp(low - high))
        by_text[row.text] = row._replace(weight=row.weight + one.weight, log_weight=log_weight)
    return [*by_text.values()]


def _table(title: str, rows: list[Row], total: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD)
    table.add_column("weight", justify="right")
    table.add_column("log weight", justify="right")
    table.add_column("text", overflow="fold")
    for row in rows:
        table.add_row(f"{row.weight:.3f}", f"{row.log_weight:.2f}", Text(line(row)))
    console = Console(highlight=False)
    console.print(Text(title, "bold"), table, Text(total), sep="\n")


def line(row: Row) -> str:
    """The text on one line, what cannot be printed escaped, and whether it was cut off."""
    return printable(row.text) + " [cut]" * row.cut


def pointed(text: str, at: int, before: int = 60, after: int = 20) -> tuple[str, str]:
    """The line to show of a text, and a line with a caret below the character `at`."""
    from rich.cells import cell_len

    left, right = printable(text[max(at - before, 0) : at]), printable(text[at : at + after])
    left, right = "..." * (at > before) + left, right + "..." * (at + after < len(text))
    return left + right, " " * cell_len(left) + "^"


def on_terminal() -> bool:
    return sys.stdout.isatty()


@contextmanager
def plain_errors() -> Iterator[None]:
    """What the library says of bad input, without the traceback, which is for programmers; and its warnings."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: typer.echo(f"llmppl: {message}", err=True)
            yield
    except KeyboardInterrupt:
        leave(INTERRUPTED, "interrupted")
    except (ValueError, FileNotFoundError, ImportError) as error:
        leave(2, str(error))


def leave(code: int, message: str) -> NoReturn:
    has_caret = re.search(r"\n *\^", message)            # it needs the line above it
    typer.echo(f"llmppl: {message.rstrip() if has_caret else ' '.join(message.split())}", err=True)
    raise typer.Exit(code)
