"""The command line: the ready-made programs and queries from a shell.

What goes to stdout depends on the arguments alone; what a run cost goes to stderr. Bad input is one line on stderr
(more where a caret shows the place in a pattern) and exit code 2; a run that no particle survives is one line on stderr
and exit code 1. Where Ctrl-C stops a command it prints what it has found, and its exit code is 130.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

from llmppl.cli.check import check
from llmppl.cli.generate import Choosing, demo, generate, infill, intersect
from llmppl.cli.options import flat
from llmppl.cli.query import query
from llmppl.cli.results import results
from llmppl.cli.trace import trace

app = typer.Typer(
    name="llmppl",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, generate, check, query, infill, intersect, results, trace):
    app.command(cls=Choosing if command is generate else None)(flat(command))


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"llmppl {import_module('llmppl').__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Draw texts from a language model under conditions, by SMC steering.

    Texts come as weighted particles. Their weights are exact: the sum, Z-hat, is an unbiased estimate of the
    probability that what the model writes meets the condition.

    Exit codes: 0, done; 1, nothing came of it (no particle is left, no match, a task failed); 2, what was asked cannot
    be done; 130, stopped by Ctrl-C, with what was found until then.
    """
