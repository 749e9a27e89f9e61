"""Command line of the ready-made programs and queries.

The arguments alone determine stdout. The cost of a run goes to stderr. Bad input gives one line on stderr (more if a
caret shows the place in a pattern) and exit code 2. A run without surviving particles gives one line on stderr and exit
code 1. After Ctrl-C a command prints the results so far and exits with code 130.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

from llmppl.cli import decide, generate, query, serve  # noqa: F401  (their commands join the app)
from llmppl.cli.options import app as app
from llmppl.native import kind


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"llmppl {import_module('llmppl').__version__} {kind()}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_version,
            help="Show the version, and native or numpy.",
        ),
    ] = False,
) -> None:
    """Draw texts from a language model under conditions, by SMC steering.

    Texts come as weighted particles. Their weights are exact: the sum, Z-hat, is an unbiased estimate of the
    probability that a text of the model meets the condition.

    Exit codes: 0, done; 1, no result (no particle is left, no match, a task failed); 2, bad input; 130, stopped by
    Ctrl-C, after the results so far.
    """
