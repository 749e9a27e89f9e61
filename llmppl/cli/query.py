"""`llmppl query`: which texts of a pattern a model would write."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from llmppl.cli import options, show
from llmppl.cli.options import option

if TYPE_CHECKING:
    from llmppl.queries import Matches


def query(
    pattern: Annotated[str, typer.Argument(help="A regex of whole texts, the prefix included.")],
    prefix: Annotated[str, option(metavar="R", help="A regex of what is given; no rule applies to it.")] = "",
    strategy: Annotated[
        Literal["shortest_path", "beam", "sample", "local", "distinct"],
        option(help="Best first, by a beam, by weighted samples, by ReLM's samples, or all different."),
    ] = "shortest_path",
    tokenization: Annotated[
        Literal["all", "canonical", "canonical_prefix"],
        option(help="Any tokens that spell a text, or the tokenizer's own encoding."),
    ] = "all",
    end: Annotated[
        Literal["eos", "prefix", "boundary"],
        option(help="The text ends with a match, begins with one, or leaves the language behind it."),
    ] = "eos",
    results: Annotated[
        Literal["strings", "tokens"],
        option(help="Each string once, summed over its spellings, or each token sequence."),
    ] = "strings",
    edits: Annotated[int, option(min=0, metavar="N", help="Also texts within N edits behind the prefix.")] = 0,
    ignore: Annotated[str | None, option(none="none", metavar="R", help="Leave out matches that go on so.")] = None,
    max_matches: Annotated[int, option("--matches", "-n", min=1, metavar="N", help="Stop after N matches.")] = 10,
    max_tokens: Annotated[
        int | None, option(none="any", min=0, metavar="T", help="At most T tokens behind the prefix.")
    ] = None,
    lm: options.Lm = None,
    engine: options.Engine = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    seed: options.Seed = None,
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    batch: Annotated[int, option(min=1, metavar="B", help="Contexts, or samples, at a time.")] = 32,
    as_json: Annotated[bool, option("--json", help="Print a JSON object for each match, one a line.")] = False,
    plan: Annotated[bool, option("--plan", help="Say how large the query is, without a model.")] = False,
) -> None:
    """Find the texts of a pattern that a language model would write, and how probable they are.

    Matches are printed as they are found, the most probable first; Ctrl-C keeps what was found.

    Example: llmppl query "The ((cat)|(dog)) (was|ran)" --prefix "The" --end prefix
    """
    with show.plain_errors():
        if plan:
            from llmppl.queries.compile import DEFERRED, compile_query

            compiled = compile_query(pattern, prefix, edits=edits, ignore=ignore)
            typer.echo("\n".join([part.size() for part in compiled.parts] + [DEFERRED] * bool(compiled.ignored)))
            return
        from llmppl.queries import Query, Rule

        asked = Query(
            options.load(options.Source(lm, engine, device, dtype)),
            pattern,
            prefix=prefix,
            end=end,
            rule=Rule(temperature, top_k, top_p, min_p),
            edits=edits,
            ignore=ignore,
            tokenization=tokenization,
            max_tokens=max_tokens,
        )
        answers: dict[str, tuple[Callable[..., Matches], dict[str, Any]]] = {
            "shortest_path": (asked.best, {"results": results, "batch": batch}),
            "beam": (asked.best, {"results": results, "beam_width": batch}),
            "sample": (asked.samples, {"particles": batch, "seed": seed}),
            "local": (asked.samples, {"particles": batch, "seed": seed, "local": True}),
            "distinct": (asked.distinct, {"results": results, "batch": batch, "seed": seed}),
        }
        answer, given = answers[strategy]
        matches = answer(**given)
        weight = "{0.log_weight:10.3f}  " if strategy == "sample" else ""
        if not as_json:
            typer.echo(f"log prob  {'log weight  ' if weight else ''}text")
        stopped = False
        try:
            for match in islice(matches, max_matches):
                text = show.printable(str(match)) + _edited(match.edits)
                line = f"{match.log_prob:8.3f}  {weight.format(match)}{text}"
                typer.echo(json.dumps(match.as_dict()) if as_json else line)
        except KeyboardInterrupt:
            stopped = True
        typer.echo(f"{matches.expansions} expansions: {matches.stats}", err=True)
        if stopped:
            show.leave(show.INTERRUPTED, f"interrupted after {matches.num_matches} matches")
        if not matches.num_matches:
            cutting = top_k or top_p or min_p
            show.leave(1, "no match" + ": --top-k, --top-p or --min-p leaves none" * bool(cutting))


def _edited(edits: Any) -> str:
    """The edits of a match, in brackets behind it."""
    shown = "; ".join(f"{edit.kind} at {edit.place}: {edit.wanted!r} -> {edit.found!r}" for edit in edits)
    return f"  [{shown}]" if shown else ""
