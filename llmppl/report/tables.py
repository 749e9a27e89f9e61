"""Views of results: tables as plain text, for a notebook and for pandas, and small drawings.

A table has heads and rows of str. The last column is a text, the others are numbers. A drawing is inline SVG without
scripts or colours, so it works in light and dark themes.
"""

from __future__ import annotations

import csv
import html
import io
import itertools
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas


MAX_ROWS = 20  # rows of a table that are shown
MAX_TEXT = 90  # characters of a text that are shown
WIDTH = 340  # px of a chart
HEIGHT = 64
BAR = 80  # px of the longest bar
LEFT = RIGHT = 56  # px of the margins around its curve
TOP = 8
BOTTOM = 17

Rows = Sequence[Sequence[str]]
Bars = Sequence[
    Sequence[tuple[float, ...]]
]  # of each row: (value,), or (value, low, high) with an interval


class TableView:
    """Mixin of a list or tuple of results that is displayed as a table, also in a notebook.

    A subclass defines `header` or `_header()`, and `_table()`, which returns heads and rows. `_bars()` returns the bars
    before the rows. If `numbers` is True, the last column has numbers, too. `records()` returns the rows as data for
    the exports, by default the cells of the table.
    """

    __slots__ = ()
    numbers = False

    def records(self: Any) -> list[dict[str, Any]]:
        """Return a dict for each row."""
        heads, rows = self._table()
        return [dict(zip(heads, row, strict=True)) for row in rows]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a data frame of the `records`. ImportError says how to install pandas."""
        return frame(self.records())

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the `records` as CSV, after writing it to a path if there is one."""
        records = self.records()
        text = io.StringIO()
        writer = csv.DictWriter(text, dict.fromkeys(itertools.chain(*records)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return _written(text.getvalue(), path)

    def to_html(self: Any, path: str | os.PathLike[str] | None = None) -> str:
        """Return the whole table as HTML, after writing it to a path if there is one."""
        return _written('<meta charset="utf-8">' + self._html(sys.maxsize), path)

    def _header(self: Any) -> str:
        return str(self.header)

    def _bars(self) -> Bars:
        return ()

    def __repr__(self: Any) -> str:
        heads, rows = self._table()
        lines = [self._header()]
        if rows:
            lines += ["", *text_table(heads, rows, numbers=self.numbers)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return self._html(MAX_ROWS)

    def _html(self: Any, most_rows: int) -> str:
        heads, rows = self._table()
        shown = f"<p>{html.escape(self._header(), quote=False)}</p>".replace("\n", "<br>")
        if rows:
            shown += html_table(
                heads, rows, self._bars(), numbers=self.numbers, most_rows=most_rows
            )
        return shown


def text_table(heads: Sequence[str], rows: Rows, *, numbers: bool = False) -> list[str]:
    """Return the lines of a table, at most `MAX_ROWS` rows. With `numbers`, the last column has numbers, too."""
    shown = [heads, *rows[:MAX_ROWS]]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    if not numbers:
        widths[-1] = 0
    lines = ["  ".join(map(str.rjust, row, widths)) for row in shown]
    if len(rows) > MAX_ROWS:
        lines.append(f"... and {len(rows) - MAX_ROWS} more")
    return lines


def html_table(
    heads: Sequence[str],
    rows: Rows,
    bars: Bars = (),
    *,
    numbers: bool = False,
    most_rows: int = MAX_ROWS,
) -> str:
    """Return the table as HTML, without colours. With `bars`, a row begins with one or several of them."""
    left = "" if numbers else ' style="text-align: left; white-space: pre-wrap"'
    most = max(map(max, itertools.chain(*bars)), default=0.0) or 1.0  # is as long as a bar can be
    head = _cells("th", heads, left)
    if bars:
        head = "<th></th>" + head
    body = ""
    for i, row in enumerate(rows[:most_rows]):
        body += "<tr>"
        if bars:
            body += f"<td>{'<br>'.join(bar(each, most) for each in bars[i])}</td>"
        body += _cells("td", row, left) + "</tr>"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    if len(rows) > most_rows:
        table += f"<p>... and {len(rows) - most_rows} more</p>"
    return table


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8", newline="")
    return text


def _cells(tag: str, row: Sequence[str], left: str) -> str:
    """Return the cells of a row. `left` is the style of the last one."""
    *numbers, text = map(html.escape, row)
    return "".join(f"<{tag}>{cell}</{tag}>" for cell in numbers) + f"<{tag}{left}>{text}</{tag}>"


def frame(data: Any) -> pandas.DataFrame:
    """Return the data frame of a dict of columns, or of a list of rows. ImportError says how to install pandas."""
    try:
        import pandas
    except ImportError:
        raise ImportError("to_pandas needs pandas: pip install pandas") from None
    return pandas.DataFrame(data)


def one_line(text: object) -> str:
    """Return a text on one line, escaped, without its middle if it is long."""
    return without_middle(printable(str(text)), MAX_TEXT)


def printable(text: str) -> str:
    """Return a text on one line: characters that cannot be printed are escaped."""
    shown = ""
    for char in text:
        shown += char if char.isprintable() else repr(char)[1:-1]
    return shown


def without_middle(text: str, most: int) -> str:
    """Return at most `most` characters of a text. The end is kept: texts often share their beginning."""
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end - 3]} … {text[-end:]}"


def chart(name: str, values: Sequence[float], *, low: float | None = None) -> str:
    """Return a chart of a value at each of T > 0 steps, with labels of its axes and of the last value.

    The axis begins at `low`, by default the smallest value. A value that is not finite leaves a gap.
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    if low is None:
        low = min(finite)
    high = max(finite)
    base = HEIGHT - BOTTOM
    right = WIDTH - RIGHT
    path = ""
    move = "M"
    for step, value in enumerate(values):
        x = LEFT + (right - LEFT) * step / max(len(values) - 1, 1)
        y = base - (base - TOP) * (value - low) / max(high - low, 1e-12)
        if math.isfinite(value):
            path += f"{move}{x:.1f} {y:.1f}"
            move = "L"
        else:
            move = "M"
    axis = (
        f'<path d="M{LEFT} {TOP}V{base}H{right}" fill="none" stroke="currentColor" opacity="0.35"/>'
    )
    marks = _text(LEFT - 5, base, low, "end")
    if high > low:
        marks += _text(LEFT - 5, TOP + 6, high, "end")
    for number, place in {1: LEFT, len(values): x}.items():
        marks += f'<text x="{place:.1f}" y="{HEIGHT - 4}" text-anchor="middle">{number}</text>'
    if math.isfinite(value):
        marks += _text(x + 6, y + 4, value)
    title = html.escape(f"{name} over {len(values)} steps, from {low:.2f} to {high:.2f}")
    return (
        f'<svg class="chart" role="img" aria-label="{title}" width="{WIDTH}" height="{HEIGHT}" font-size="10" '
        f'fill="currentColor"><title>{title}</title>{axis}<path d="{path}" fill="none" stroke="currentColor" '
        f'stroke-width="1.5" stroke-linejoin="round"/>{marks}</svg>'
    )


def bar(values: Sequence[float], most: float = 1.0) -> str:
    """Return a bar of length values[0], as a share of `most`, with a whisker between two further values."""
    length, *ends = (f"{1 + min(max(x / most, 0.0), 1.0) * (BAR - 2):.1f}" for x in values)
    whisker = ""
    if len({*ends}) > 1:
        whisker = '<path d="M{0} 5H{1}M{0} 2v6M{1} 2v6" stroke="currentColor"/>'.format(*ends)
    return (
        f'<svg class="bar" aria-hidden="true" width="{BAR}" height="10"><rect y="1" width="{length}" height="8" '
        f'rx="2" fill="currentColor" opacity="0.45"/>{whisker}</svg>'
    )


def _text(x: float, y: float, value: float, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{value:.2f}</text>'
