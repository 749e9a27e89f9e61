"""Tables of results: as plain text, for a notebook, and for pandas.

A table has heads and rows; all cells are str. The last column is a text, the others are numbers.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from llmppl.report.svg import bar

if TYPE_CHECKING:
    import pandas

__all__ = ["MAX_ROWS", "TableList", "frame", "html_table", "one_line", "printable", "text_table", "without_middle"]

MAX_ROWS = 20               # rows of a table that are shown
MAX_TEXT = 90               # characters of a text that are shown

T = TypeVar("T")
Rows = Sequence[Sequence[str]]


class TableList(list[T]):
    """List of results that is displayed as a table, also in a notebook. A subclass defines its header and table."""

    def __repr__(self) -> str:
        return "\n".join([self._header(), *(["", *text_table(*self._table())] if self else [])])

    def _repr_html_(self) -> str:
        return f"<p>{self._header()}</p>{html_table(*self._table()) if self else ''}"

    def _header(self) -> str:
        raise NotImplementedError

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """Return heads and rows."""
        raise NotImplementedError


def text_table(heads: Sequence[str], rows: Rows, *, numbers: bool = False) -> list[str]:
    """Return the lines of a table, at most `MAX_ROWS` rows. With `numbers`, the last column has numbers, too."""
    shown = rows[:MAX_ROWS]
    widths = [max(len(row[i]) for row in [heads, *shown]) for i in range(len(heads))]
    widths[-1] *= numbers
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [heads, *shown]
    ]
    return lines + [f"... and {len(rows) - MAX_ROWS} more"] * (len(rows) > MAX_ROWS)


def html_table(heads: Sequence[str], rows: Rows, shares: Sequence[float] = (), *, numbers: bool = False) -> str:
    """Return the table as HTML. With `shares`, numbers from 0 to 1, each row begins with a bar.

    It sets no colours, so it works in light and dark themes.
    """
    left = "" if numbers else ' style="text-align: left; white-space: pre-wrap"'
    bars = [f"<td>{bar(share)}</td>" for share in shares] or [""] * len(rows)
    head = "<th></th>" * bool(shares) + "".join(f"<th>{html.escape(name)}</th>" for name in heads[:-1])
    body = "".join(
        f"<tr>{drawn}{''.join(f'<td>{html.escape(cell)}</td>' for cell in row[:-1])}"
        f"<td{left}>{html.escape(row[-1])}</td></tr>"
        for drawn, row in zip(bars, rows[:MAX_ROWS], strict=False)
    )
    table = f"<table><thead><tr>{head}<th{left}>{html.escape(heads[-1])}</th></tr></thead><tbody>{body}</tbody></table>"
    return table + f"<p>... and {len(rows) - MAX_ROWS} more</p>" * (len(rows) > MAX_ROWS)


def frame(columns: Mapping[str, Any]) -> pandas.DataFrame:
    """Return a pandas.DataFrame of columns of equal length. An ImportError says how to install pandas."""
    try:
        import pandas
    except ImportError:
        raise ImportError("to_pandas needs pandas: pip install pandas") from None
    return pandas.DataFrame(dict(columns))


def one_line(text: object) -> str:
    """Return a text on one line, escaped, without its middle if it is long."""
    return without_middle(printable(str(text)), MAX_TEXT)


def printable(text: str) -> str:
    """Return a text on one line: characters that cannot be printed are escaped."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def without_middle(text: str, most: int) -> str:
    """Return at most `most` characters of a text. The end is kept: texts often share their beginning."""
    end = most // 3
    return text if len(text) <= most else f"{text[: most - end - 3]} … {text[-end:]}"
