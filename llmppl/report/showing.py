"""Display of the page of a recording, in a notebook or in the browser."""

from __future__ import annotations

import html
import tempfile
import webbrowser
from pathlib import Path

from llmppl.report.html_page import page
from llmppl.report.notebook import display_html, in_notebook
from llmppl.report.recording import Recording

__all__ = ["show"]

HEIGHT = 640                # px of the frame in a notebook, which the user can resize


def show(recording: Recording) -> None:
    """Show the page of a recording below the cell of a notebook, or else in the browser, and print the file's name."""
    if in_notebook():
        display_html(_frame(page(recording)))
        return
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="llmppl-", suffix=".html", delete=False) as file:
        file.write(page(recording))
    print(f"the page of the run is {file.name}")
    webbrowser.open(Path(file.name).as_uri())


def _frame(document: str) -> str:
    """Return a frame that isolates a document within another."""
    fill = 'width="100%" height="100%" style="border: 0"'
    inner = f'<iframe srcdoc="{html.escape(document)}" title="a recorded run" {fill}></iframe>'
    return f'<div style="height: {HEIGHT}px; resize: vertical; overflow: hidden">{inner}</div>'
