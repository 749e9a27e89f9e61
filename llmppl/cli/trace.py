"""`llmppl trace`: a recorded run as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmppl.cli import options, show


def trace(
    recording: Annotated[Path, typer.Argument(help="What --trace, or a Recorder, wrote.", **options.FILE)],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", show_default="beside it, as .html", metavar="PAGE", help="Write it here."),
    ] = None,
) -> None:
    """Show a recorded run as a page: its particles as a tree of text, their weights, and what killed them.

    A run that is still going on, or was killed, is shown up to its last step.

    Example: llmppl generate "Once upon a time" --trace run.jsonl; llmppl trace run.jsonl -o run.html
    """
    from llmppl.report import load
    from llmppl.report.html_page import page

    with show.plain_errors():
        output = recording.with_suffix(".html") if output is None else output
        if output.resolve() == recording.resolve():
            raise ValueError(f"the page would replace the recording {recording}: give another file with -o")
        loaded = load(recording)
        try:
            output.write_text(page(loaded), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot write {output}: {error.strerror}") from None
        typer.echo(f"{output}: {loaded.status()}")
