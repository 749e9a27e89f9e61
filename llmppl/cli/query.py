"""`llmppl query`: which texts of a pattern a model would write."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from llmppl.cli import options, show
from llmppl.cli.options import Seed, Shaping, Source, option
from llmppl.report.tables import printable

if TYPE_CHECKING:
    from llmppl.queries import Matches


@dataclass(frozen=True)
class Asked:
    """Options of `query`."""

    prefix: str = option("A regex of what is given; no rule applies to it.", default="", metavar="R")
    strategy: Literal["shortest_path", "beam", "sample", "local", "distinct"] = option(
        "Best first, by a beam, by weighted samples, by ReLM's samples, or all different.", default="shortest_path"
    )
    tokenization: Literal["all", "canonical", "canonical_prefix"] = option(
        "Any tokens that spell a text, or the tokenizer's own encoding.", default="all"
    )
    end: Literal["eos", "prefix", "boundary"] = option(
        "The text ends with a match, begins with one, or leaves the language behind it.", default="eos"
    )
    results: Literal["strings", "tokens"] = option(
        "Each string once, summed over its spellings, or each token sequence.", default="strings"
    )
    edits: int = option("Also texts within N edits behind the prefix.", default=0, min=0, metavar="N")
    ignore: str | None = option("Leave out matches that go on so.", metavar="R")
    max_matches: int = option("Stop after N matches.", "--matches", "-n", default=10, min=1, metavar="N")
    max_tokens: int | None = option("At most T tokens behind the prefix.", none="any", min=0, metavar="T")
    source: Source = Source()
    seed: Seed = None
    shaping: Shaping = Shaping()
    batch: int = option("Contexts, or samples, at a time.", default=32, min=1, metavar="B")
    as_json: bool = option("Print a JSON object for each match, one a line.", "--json", default=False)
    plan: bool = option("Say how large the query is, without a model.", "--plan", default=False)


def query(
    pattern: Annotated[str, typer.Argument(help="A regex of whole texts, the prefix included.")], asked: Asked
) -> None:
    """Find the texts of a pattern that a language model would write, and how probable they are.

    Matches are printed as they are found, the most probable first; Ctrl-C keeps what was found.

    Example: llmppl query "The ((cat)|(dog)) (was|ran)" --prefix "The" --end prefix
    """
    with show.plain_errors():
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


def _matches(pattern: str, asked: Asked) -> Matches:
    """Return the answer of the strategy that was asked for."""
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
    """Return the edits of a match in brackets, which stand after its text."""
    shown = "; ".join(f"{edit.kind} at {edit.place}: {edit.wanted!r} -> {edit.found!r}" for edit in edits)
    return f"  [{shown}]" if shown else ""
