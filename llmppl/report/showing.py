"""show: the page of a recording, where the user is."""

from __future__ import annotations

import html
import tempfile
import webbrowser
from pathlib import Path

from llmppl.report.html_page import page
from llmppl.report.notebook import display_html, in_notebook
from llmppl.report.recording import Recording

__all__ = ["show"]

HEIGHT = 640                # px of the frame in a notebook; its corner makes it larger


def show(recording: Recording) -> None:
    """Show the page of a recording: below the cell of a notebook; elsewhere in the browser, by a file that is named."""
    if in_notebook():
        display_html(_frame(page(recording)))
        return
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="llmppl-", suffix=".html", delete=False) as file:
        file.write(page(recording))
    print(f"the page of the run is {file.name}")
    webbrowser.open(Path(file.name).as_uri())


def _frame(document: str) -> str:
    """A document within another, apart from it."""
    fill = 'width="100%" height="100%" style="border: 0"'
    inner = f'<iframe srcdoc="{html.escape(document)}" title="a recorded run" {fill}></iframe>'
    return f'<div style="height: {HEIGHT}px; resize: vertical; overflow: hidden">{inner}</div>'
