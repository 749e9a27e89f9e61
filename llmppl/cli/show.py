"""Output of commands: particles on stdout, errors and warnings on stderr."""

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

INTERRUPTED = 130                                       # exit code of shells after SIGINT


class Row(NamedTuple):
    """Row of a particle, or of all particles of a text. `cut` is true if --max-tokens ended the text."""

    text: str
    log_weight: float
    weight: float
    cut: bool


def show(title: str, particles: Particles[Any], as_json: bool, by_text: bool = False) -> None:
    """Print the particles, the heaviest first: a table on a terminal, else plain lines, or JSON with `as_json`.

    `by_text` merges particles of the same text and adds their weights.
    """
    weighed = zip(particles, particles.log_weights.tolist(), particles.weights.tolist(), strict=True)
    rows = [Row(str(particle), log_weight, weight, particle.cut) for particle, log_weight, weight in weighed]
    rows = sorted(together(rows) if by_text else rows, key=lambda row: -row.weight)
    total = f"log Z-hat {particles.log_ml:.2f}, ess {particles.ess:.1f} of {len(particles)} particles"
    if as_json:
        typer.echo("\n".join(json.dumps(row._asdict()) for row in rows))
    elif on_terminal():
        _print_table(title, rows, total)
    else:
        lines = [f"{row.weight:6.3f}  {row.log_weight:10.2f}  {line(row)}" for row in rows]
        typer.echo("\n".join([title, "", "weight  log weight  text", *lines, "", total]))


def together(rows: list[Row]) -> list[Row]:
    """Return one row for each text, with the sum of the weights of its rows."""
    import numpy as np

    merged = dict[str, Row]()
    for row in rows:
        same = merged.get(row.text, row._replace(log_weight=-math.inf, weight=0.0))
        log_weight = float(np.logaddexp(row.log_weight, same.log_weight))
        merged[row.text] = row._replace(log_weight=log_weight, weight=row.weight + same.weight)
    return list(merged.values())


def _print_table(title: str, rows: list[Row], total: str) -> None:
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
    Console(highlight=False).print(Text(title, "bold"), table, Text(total), sep="\n")


def line(row: Row) -> str:
    """Return the text on one line, with unprintable characters escaped, and a mark if it was cut."""
    return printable(row.text) + " [cut]" * row.cut


def on_terminal() -> bool:
    """Return whether stdout is a terminal."""
    return sys.stdout.isatty()


@contextmanager
def plain_errors() -> Iterator[None]:
    """Print the library's errors about bad input as one line, without a traceback, and its warnings likewise."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: typer.echo(f"llmppl: {message}", err=True)
            yield
    except KeyboardInterrupt:
        leave(INTERRUPTED, "interrupted")
    except (ValueError, FileNotFoundError, ImportError) as error:
        leave(2, str(error))


@contextmanager
def file_errors(doing: str, file: object) -> Iterator[None]:
    """Raise a ValueError in place of an OSError. Its message says that the program cannot `doing` the file."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot {doing} {file}: {error.strerror}") from None


def leave(code: int, message: str) -> NoReturn:
    """Print a message to stderr and exit. The message keeps its lines if a caret points at the line above it."""
    has_caret = re.search(r"\n *\^", message)
    typer.echo(f"llmppl: {message.rstrip() if has_caret else ' '.join(message.split())}", err=True)
    raise typer.Exit(code)
