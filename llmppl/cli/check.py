"""`llmppl check`: whether a text matches, and where it stops to."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from llmppl.cli import options, show
from llmppl.report.tables import printable

if TYPE_CHECKING:
    from llmppl.constraints.json import JsonSchema


def check(
    pattern: Annotated[str, typer.Argument(help="A regex, or the file that an option says it is.")],
    text: Annotated[str, typer.Argument(help="The text to look at; - is standard input.")],
    grammar: Annotated[bool, typer.Option("--grammar", help="PATTERN is a file: a grammar in lark's syntax.")] = False,
    json_schema: Annotated[bool, typer.Option("--json-schema", help="PATTERN is a file: a JSON schema.")] = False,
) -> None:
    """Say whether a text matches a pattern, and if not, where it leaves the language and what could stand there.

    The exit code is 0 if it matches and 1 if it does not, also where it is the beginning of a match.

    Example: llmppl check "[0-9]{4}-[0-9]{2}" "2023/07"
    """
    from llmppl.constraints.masks.explain import match_prefix

    if grammar and json_schema:
        raise typer.BadParameter("--grammar and --json-schema exclude each other: give one of them.")
    with show.plain_errors():
        text = options.given_text(text)
        kind = "grammar" if grammar else "json-schema" if json_schema else "regex"
        constraint = options.constraint(kind, pattern)
        reading = match_prefix(constraint, text)
        line, caret = show.pointed(text, reading.length)
        if reading.length == len(text) and reading.complete:
            try:
                if json_schema:                         # masks do not hold all of it
                    constraint.parse(text)
            except ValueError as error:
                typer.echo(f"{line}\nno match: its form is right, but {error}")
                raise typer.Exit(1) from None
            typer.echo(f"{line}\ncomplete: it matches; {reading.expected}")
            return
        if reading.length < len(text):
            typer.echo(f"{line}\n{caret}\nno match: {reading.expected}, not {text[reading.length]!r}")
        else:
            typer.echo(f"{line}\n{caret}\nonly the beginning of a match: {reading.expected}")
        if json_schema:
            _say_what_differs(constraint, text)
        raise typer.Exit(1)


def _say_what_differs(schema: JsonSchema, text: str) -> None:
    """Print the text with its properties in the order of the schema and plain blanks, if that text matches."""
    from llmppl.constraints.json.checks import in_order
    from llmppl.constraints.masks.explain import match_prefix

    try:
        value = json.loads(text)
    except ValueError:
        return
    ordered = json.dumps(in_order(value, schema.schema, schema.schema), ensure_ascii=False)
    reading = match_prefix(schema, ordered)
    if reading.length == len(ordered) and reading.complete:
        typer.echo(
            f"it is an instance of the schema, but the keys of a match are in its order, with at most a blank between "
            f"tokens:\n{printable(ordered)}"
        )
