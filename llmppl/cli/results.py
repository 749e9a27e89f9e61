"""`llmppl results`: a summary of a file of results, and its export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmppl.cli.options import FILE, Given, command
from llmppl.report.tables import one_line

if TYPE_CHECKING:
    from llmppl.tasks import Result

MAX_ROWS = 20
HEADS = " index  weight  log Z-hat  likeliest text, or error"
Export = Annotated[Path | None, typer.Option(metavar="OUT", dir_okay=False, help="Write all results to this file.")]


@command()
def results(
    file: Annotated[Path, typer.Argument(help="A file of `llmppl many` or run_many.", **FILE)],
    given: Given,
    jsonl: Export = None,
    csv: Export = None,
) -> None:
    """Summarise a file of results, or export it. The file may still be written.

    --jsonl writes a line of JSON for each task, --csv a row for each particle. The likeliest text of a task has the
    largest total weight over the particles with this text.

    Examples: llmppl results results.db

    llmppl results results.db --jsonl results.jsonl
    """
    from llmppl.tasks import load_results

    loaded = load_results(file)
    if jsonl is not None:
        loaded.to_jsonl(jsonl)
    if csv is not None:
        loaded.to_pandas().to_csv(csv, index=False)
    rows, total, failed, cpu_seconds, tokens = list[str](), 0, 0, 0.0, 0
    for each in loaded:
        total, failed = total + 1, failed + (each.error is not None)
        cpu_seconds, tokens = cpu_seconds + each.cpu_seconds, tokens + each.tokens
        rows += [_row(each)] * (total <= MAX_ROWS)
    typer.echo(f"{file}: {total} results, {failed} failed")
    typer.echo(f"{tokens} tokens, {cpu_seconds:.1f} s of CPU", err=True)
    more = [f"... and {total - MAX_ROWS} more: --jsonl and --csv write all"] * (total > MAX_ROWS)
    typer.echo("\n".join(["", HEADS, *rows, *more] if rows else []))


def _row(result: Result) -> str:
    """Return the row of a task: its likeliest text, or else the cause of the failure."""
    if result.particles:
        text, weight = next(iter(result.particles.by_text().items()))
        return f"{result.index:6}  {weight:6.3f}  {result.particles.log_ml:z9.2f}  {one_line(text)}"
    if result.matches:
        return f"{result.index:6}  {'-':>6}  {'-':>9}  {one_line(result.matches[0]['text'])}"
    deaths = "; ".join(str(death) for death in result.particles.deaths[:1]) if result.particles is not None else ""
    cause = result.error.rstrip().rpartition("\n")[2] if result.error else f"no text is left; {deaths}"
    return f"{result.index:6}  {'-':>6}  {'-':>9}  {one_line(cause)}"
