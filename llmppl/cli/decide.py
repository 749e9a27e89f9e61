"""`llmppl decide`: questions about a text, and the probabilities of their answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from llmppl.cli.options import FILE, Given, command, load, schema_text, usage_error


@command("json", "lm")
def decide(
    given: Given,
    question: Annotated[
        str | None,
        typer.Argument(help="A question to answer by yes or no, or by one of --options."),
    ] = None,
    options: Annotated[
        str | None,
        typer.Option(help="The answers, with commas between them.", metavar="A,B,..."),
    ] = None,
    schema: Annotated[
        str | None,
        typer.Option(
            help="Ask for each property of a JSON schema, or its file.",
            metavar="SCHEMA",
        ),
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="The text; by default standard input.", **FILE)
    ] = None,
    examples: Annotated[
        Path | None,
        typer.Option(help="Lines of JSON with a state and its label.", **FILE),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="A file of Calibration.save.", **FILE)
    ] = None,
) -> None:
    """Answer questions about a text, with probabilities. The text is a file, or comes by a pipe.

    A line of --examples is {"state": ..., "label": ...}, and {"state": ..., "labels": {...}} with --schema.

    Example: llmppl decide "Is this urgent?" --state mail.txt
    """
    usage_error((question is None) == (schema is None), "Give either a question or --schema.")
    usage_error(schema and options, "--options are the answers to a question: give no --schema.")
    from llmppl.constraints import JsonSchema
    from llmppl.decisions import Calibration, choice, predicate
    from llmppl.decisions import decide as answer
    from llmppl.decisions.questions import questions_of_schema

    text = state.read_text(encoding="utf-8") if state else sys.stdin.read()
    usage_error(not text.strip(), "The text is empty: give --state FILE, or pipe it in.")
    how = dict[str, Any]()
    if examples:
        how["examples"] = _examples(examples, question)
    if calibration:
        how["calibration"] = Calibration.load(calibration)
    try:
        if schema:
            JsonSchema(schema_text(schema))  # or an error
            questions = questions_of_schema(json.loads(schema_text(schema)))
        elif options:
            questions = {
                str(question): choice(str(question), [each.strip() for each in options.split(",")])
            }
        else:
            questions = {str(question): predicate(str(question))}
        decision = answer(load(given.lm), text.strip(), questions, **how)
    except TypeError as error:
        raise ValueError(str(error)) from None
    if not given.json:
        typer.echo(repr(decision))
        typer.echo(f"{decision.tokens} tokens, {decision.seconds:.1f} s", err=True)
        return
    for name, each in decision.items():
        row = {"question": name, "answer": each.best, "probability": each.probability}
        row |= {"confidence": each.confidence, "expected": each.expected}
        row |= {"probabilities": each.probabilities, "log_mass": each.log_mass}
        typer.echo(json.dumps(row, ensure_ascii=False))


def _examples(file: Path, question: str | None) -> list[tuple[Any, dict[str, Any]]]:
    """Return the states and labels of a file."""
    found = []
    key = "labels" if question is None else "label"
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            label = row[key]
            found.append((row["state"], label if question is None else {question: label}))
    except (LookupError, TypeError, ValueError) as error:
        wanted = f'{{"state": ..., "{key}": ...}} on each line'
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file}: write {wanted} ({reason})") from None
    return found
