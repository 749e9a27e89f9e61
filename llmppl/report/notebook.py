"""Notebooks: detection of IPython kernels, and output below a cell."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["cell_of", "display_html", "in_notebook", "line"]


def in_notebook() -> bool:
    """Return True in a notebook: in IPython, with a kernel that displays output."""
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


def cell_of(filename: str) -> str | None:
    """Return IPython's name of the cell whose code has this file name, "In[3]"; None for another file."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    name = None if name_of is None else name_of(filename)
    return name[1] if name else None


def display_html(html: str) -> None:
    """Show HTML below the cell."""
    from IPython.display import HTML, display

    display(HTML(html))


def line() -> Callable[[str], None]:
    """Show a line of text below the cell. Return a function that replaces the text."""
    from IPython.display import Pretty, display

    handle = display(Pretty(""), display_id=True)
    return lambda text: handle.update(Pretty(text))
