"""`llmppl query`, `check` and `trace`: the probable texts of a pattern, the match of one text, the page of a run."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmppl.cli import options
from llmppl.cli.options import FILE, INTERRUPTED, Given, command, leave
from llmppl.report.tables import printable

if TYPE_CHECKING:
    from llmppl.queries import Matches


@command(
    "prefix",
    "end",
    "strategy",
    "edits",
    "matches",
    "max_tokens",
    "top_k",
    "temperature",
    "lm",
    "seed",
    "json",
    "plan",
    "special",
    max_tokens=None,
)
def query(
    pattern: Annotated[str, typer.Argument(help="A regex of whole texts, including the prefix.")],
    given: Given,
) -> None:
    """Find the texts of a pattern that a language model would write, and their probabilities.

    Matches are printed as they are found, the most probable first. Ctrl-C keeps the matches found so far.

    Example: llmppl query "The ((cat)|(dog)) (was|ran)" --prefix "The" --end prefix
    """
    if given.plan:
        from llmppl.queries.compile import compile_query

        compiled = compile_query(pattern, given.prefix, edits=given.edits)
        typer.echo("\n".join(part.size() for part in compiled.parts))
        return
    matches = _matches(pattern, given)
    weight = "{0.log_weight:10.3f}  " if given.strategy == "sample" else ""
    if not given.json:
        typer.echo(f"log prob  {'log weight  ' if weight else ''}text")
    try:
        for match in islice(matches, given.matches):
            line = f"{match.log_prob:8.3f}  {weight.format(match)}{printable(str(match))}{_edited(match.edits)}"
            typer.echo(json.dumps(match.as_dict()) if given.json else line)
    except KeyboardInterrupt:
        leave(INTERRUPTED, f"interrupted after {matches.num_matches} matches")
    typer.echo(f"{matches.expansions} expansions: {matches.stats}", err=True)
    if not matches.num_matches:
        if given.top_k:
            leave(1, "no match: --top-k leaves none")
        leave(1, "no match")


def _matches(pattern: str, given: Given) -> Matches:
    from llmppl.queries import Query

    names = "prefix", "end", "edits", "max_tokens", "special"
    asked = {name: getattr(given, name) for name in names}
    query = Query(options.load(given.lm), pattern, rule=options.rule(given), **asked)
    if given.strategy in ("sample", "local"):
        return query.samples(seed=given.seed, local=given.strategy == "local")
    if given.strategy == "distinct":
        return query.distinct(seed=given.seed)
    return query.best()


def _edited(edits: Any) -> str:
    """Return the edits of a match in brackets, for the end of its line."""
    if not edits:
        return ""
    shown = [f"{edit.kind} at {edit.place}: {edit.wanted!r} -> {edit.found!r}" for edit in edits]
    return f"  [{'; '.join(shown)}]"


@command("regex", "grammar", "json_schema", "special")
def check(
    text: Annotated[str, typer.Argument(help="The text to check; - is standard input.")],
    given: Given,
) -> None:
    """Check whether a text is one of --regex, --grammar or --json-schema. If not, show where it leaves the language.

    The exit code is 0 if the text matches. It is 1 if not, also for the beginning of a match.

    Example: llmppl check "2023/07" --regex "[0-9]{4}-[0-9]{2}"
    """
    from llmppl.constraints.machine.values import match_prefix, value_of, with_symbols

    constraint = options.constraint(given)
    text = options.given_text(text)
    options.usage_error(
        constraint is None, "Give --regex R, --grammar FILE or --json-schema SCHEMA."
    )
    pieces = with_symbols(text, constraint.special_tokens if given.special else ())
    reading = match_prefix(constraint, pieces)
    code = 1
    at = reading.length
    if at < len(text):
        found = f"no match: {reading.expected}, not {text[at]!r}"
    elif not reading.complete:
        found = f"only the beginning of a match: {reading.expected}"
    else:
        try:
            # masks enforce only a part of a schema
            if len(pieces) == 1:
                constraint.parse(text)
            else:
                value_of(constraint, pieces)
            code = 0
            found = f"complete: it matches; {reading.expected}"
        except ValueError as error:
            found = f"no match: its form is right, but {error}"
    typer.echo(f"{_pointed(text, at)}\n{found}")
    raise typer.Exit(code)


def _pointed(text: str, at: int, before: int = 60, after: int = 20) -> str:
    """Return the line of a text around the character `at`, and below it a line with a caret, if `at` is not its end."""
    left = printable(text[max(at - before, 0) : at])
    right = printable(text[at : at + after])
    if at > before:
        left = "..." + left
    if at + after < len(text):
        right += "..."
    if at == len(text):
        return left + right
    return f"{left}{right}\n{' ' * len(left)}^"


@command("output")
def trace(
    recording: Annotated[Path, typer.Argument(help="A file of --trace or of a Recorder.", **FILE)],
    given: Given,
) -> None:
    """Show a recorded run as a page: its particles as a tree of text, their weights, and their causes of death.

    Example: llmppl generate "Once upon a time" --trace run.jsonl; llmppl trace run.jsonl
    """
    from llmppl.report import load, page

    output = given.output or recording.with_suffix(".html")
    options.usage_error(
        output.resolve() == recording.resolve(),
        "The page would replace the recording: give -o PAGE.",
    )
    loaded = load(recording)
    output.write_text(page(loaded), encoding="utf-8")
    typer.echo(f"{output}: {loaded.status()}")
