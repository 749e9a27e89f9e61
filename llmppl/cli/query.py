"""`llmppl query` and `llmppl check`: the probable texts of a pattern, and the match of one text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from llmppl.cli import options, show
from llmppl.cli.options import Seed, Shaping, Source, option, usage_error
from llmppl.report.tables import printable

if TYPE_CHECKING:
    from llmppl.constraints.json import JsonSchema
    from llmppl.queries import Matches


@dataclass(frozen=True)
class QueryOptions:
    """Options of `query`."""

    prefix: str = option("", "A regex of the given text. No rule applies to its tokens.", metavar="R")
    strategy: Literal["shortest_path", "beam", "sample", "local", "distinct"] = option(
        "shortest_path", "Best first, a beam, weighted samples, the samples of ReLM, or distinct samples."
    )
    tokenization: Literal["all", "canonical", "canonical_prefix"] = option(
        "all", "Any tokens that spell a text, or the encoding of the tokenizer."
    )
    end: Literal["eos", "prefix", "boundary"] = option(
        "eos", "The text ends with a match, begins with one, or leaves the language after it."
    )
    results: Literal["strings", "tokens"] = option(
        "strings", "Each string once, with the sum over its spellings, or each token sequence."
    )
    edits: int = option(0, "Also texts within N edits after the prefix.", min=0, metavar="N")
    ignore: str | None = option(None, "Leave out matches that continue with this regex.", metavar="R")
    max_matches: int = option(10, "Stop after N matches.", "--matches", "-n", min=1, metavar="N")
    max_tokens: int | None = option(None, "At most T tokens after the prefix.", none="any", min=0, metavar="T")
    source: Source = Source()
    seed: Seed = None
    shaping: Shaping = Shaping()
    batch: int = option(32, "Number of contexts or samples per batch.", min=1, metavar="B")
    as_json: bool = option(False, "Print a JSON object for each match, one per line.", "--json")
    plan: bool = option(False, "Print the size of the query, without a model.", "--plan")


def query(
    pattern: Annotated[str, typer.Argument(help="A regex of whole texts, including the prefix.")], asked: QueryOptions
) -> None:
    """Find the texts of a pattern that a language model would write, and their probabilities.

    Matches are printed as they are found, the most probable first. Ctrl-C keeps the matches found so far.

    Example: llmppl query "The ((cat)|(dog)) (was|ran)" --prefix "The" --end prefix
    """
    if asked.plan:
        from llmppl.queries.compile import DEFERRED, compile_query

        compiled = compile_query(pattern, asked.prefix, edits=asked.edits, ignore=asked.ignore)
        typer.echo("\n".join([part.size() for part in compiled.parts] + [DEFERRED] * bool(compiled.ignored)))
        return
    matches = _matches(pattern, asked)
    weight = "{0.log_weight:10.3f}  " if asked.strategy == "sample" else ""
    if not asked.as_json:
        typer.echo(f"log prob  {'log weight  ' if weight else ''}text")
    stopped = False
    try:
        for match in islice(matches, asked.max_matches):
            text = printable(str(match)) + _edited(match.edits)
            line = f"{match.log_prob:8.3f}  {weight.format(match)}{text}"
            typer.echo(json.dumps(match.as_dict()) if asked.as_json else line)
    except KeyboardInterrupt:
        stopped = True
    typer.echo(f"{matches.expansions} expansions: {matches.stats}", err=True)
    if stopped:
        show.leave(show.INTERRUPTED, f"interrupted after {matches.num_matches} matches")
    if not matches.num_matches:
        cutting = asked.shaping.top_k or asked.shaping.top_p or asked.shaping.min_p
        show.leave(1, "no match" + ": --top-k, --top-p or --min-p leaves none" * bool(cutting))


def _matches(pattern: str, asked: QueryOptions) -> Matches:
    """Return the matches, found by the strategy of the options."""
    from llmppl.queries import Query

    query = Query(
        options.load(asked.source),
        pattern,
        prefix=asked.prefix,
        end=asked.end,
        rule=asked.shaping.rule(),
        edits=asked.edits,
        ignore=asked.ignore,
        tokenization=asked.tokenization,
        max_tokens=asked.max_tokens,
    )
    if asked.strategy == "shortest_path":
        return query.best(results=asked.results, batch=asked.batch)
    if asked.strategy == "beam":
        return query.best(results=asked.results, beam_width=asked.batch)
    if asked.strategy == "distinct":
        return query.distinct(results=asked.results, batch=asked.batch, seed=asked.seed)
    return query.samples(particles=asked.batch, seed=asked.seed, local=asked.strategy == "local")


def _edited(edits: Any) -> str:
    """Return the edits of a match in brackets, for the end of its line."""
    shown = "; ".join(f"{edit.kind} at {edit.place}: {edit.wanted!r} -> {edit.found!r}" for edit in edits)
    return f"  [{shown}]" if shown else ""


def check(
    pattern: Annotated[str, typer.Argument(help="A regex, or a file with --grammar or --json-schema.")],
    text: Annotated[str, typer.Argument(help="The text to check; - is standard input.")],
    grammar: Annotated[bool, typer.Option("--grammar", help="PATTERN is a file: a grammar in lark's syntax.")] = False,
    json_schema: Annotated[bool, typer.Option("--json-schema", help="PATTERN is a file: a JSON schema.")] = False,
) -> None:
    """Check whether a text matches a pattern. If not, show where it leaves the language and what could follow there.

    The exit code is 0 if the text matches. It is 1 if not, also for the beginning of a match.

    Example: llmppl check "[0-9]{4}-[0-9]{2}" "2023/07"
    """
    from llmppl.constraints.masks.explain import match_prefix

    usage_error(grammar and json_schema, "--grammar and --json-schema exclude each other: give one of them.")
    text = options.given_text(text)
    kind = "grammar" if grammar else "json-schema" if json_schema else "regex"
    constraint = options.constraint(kind, pattern)
    reading = match_prefix(constraint, text)
    line, caret = _pointed(text, reading.length)
    if reading.length == len(text) and reading.complete:
        try:
            if json_schema:                             # masks enforce only a part of the schema
                constraint.parse(text)
        except ValueError as error:
            typer.echo(f"{line}\nno match: its form is right, but {error}")
            raise typer.Exit(1) from None
        typer.echo(f"{line}\ncomplete: it matches; {reading.expected}")
        return
    found = f"only the beginning of a match: {reading.expected}"
    if reading.length < len(text):
        found = f"no match: {reading.expected}, not {text[reading.length]!r}"
    typer.echo(f"{line}\n{caret}\n{found}")
    if json_schema:
        _print_in_order(constraint, text)
    raise typer.Exit(1)


def _pointed(text: str, at: int, before: int = 60, after: int = 20) -> tuple[str, str]:
    """Return the line of a text around the character `at`, and a line with a caret below that character."""
    from rich.cells import cell_len

    left, right = printable(text[max(at - before, 0) : at]), printable(text[at : at + after])
    left, right = "..." * (at > before) + left, right + "..." * (at + after < len(text))
    return left + right, " " * cell_len(left) + "^"


def _print_in_order(schema: JsonSchema, text: str) -> None:
    """Print the text with its keys in the order of the schema and with plain blanks, if that text matches."""
    from llmppl.constraints.json.reader import in_order
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
