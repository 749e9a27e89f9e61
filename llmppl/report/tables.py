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
    shown = rows[:MAX_ROWS]
    widths = [max(len(row[i]) for row in [heads, *shown]) for i in range(len(heads))]
    widths[-1] *= numbers
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [heads, *shown]
    ]
    return lines + [f"... and {len(rows) - MAX_ROWS} more"] * (len(rows) > MAX_ROWS)


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
    lines = [_cells("td", row, left) for row in rows[:most_rows]]
    head = _cells("th", heads, left)
    if bars:
        head = "<th></th>" + head
    for i, row in enumerate(bars[:most_rows]):
        lines[i] = f"<td>{'<br>'.join(bar(each, most) for each in row)}</td>{lines[i]}"
    body = "".join(f"<tr>{line}</tr>" for line in lines)
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
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def without_middle(text: str, most: int) -> str:
    """Return at most `most` characters of a text. The end is kept: texts often share their beginning."""
    end = most // 3
    return text if len(text) <= most else f"{text[: most - end - 3]} … {text[-end:]}"


def chart(name: str, values: Sequence[float], *, low: float | None = None) -> str:
    """Return a chart of a value at each of T > 0 steps, with labels of its axes and of the last value.

    The axis begins at `low`, by default the smallest value. A value that is not finite leaves a gap.
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low = min(finite) if low is None else low
    high = max(finite)
    base = HEIGHT - BOTTOM
    right = WIDTH - RIGHT
    xs = [LEFT + (right - LEFT) * step / max(len(values) - 1, 1) for step in range(len(values))]
    ys = [base - (base - TOP) * (value - low) / max(high - low, 1e-12) for value in values]
    moves = ["L" if math.isfinite(before) else "M" for before in (math.nan, *values)]
    path = "".join(
        f"{move}{x:.1f} {y:.1f}"
        for move, x, y in zip(moves, xs, ys, strict=False)
        if math.isfinite(y)
    )
    ends = {1: xs[0], len(values): xs[-1]}.items()
    steps = "".join(
        f'<text x="{x:.1f}" y="{HEIGHT - 4}" text-anchor="middle">{step}</text>' for step, x in ends
    )
    axis = (
        f'<path d="M{LEFT} {TOP}V{base}H{right}" fill="none" stroke="currentColor" opacity="0.35"/>'
    )
    marks = _text(LEFT - 5, base, low, "end") + _text(LEFT - 5, TOP + 6, high, "end") * (high > low)
    last = _text(xs[-1] + 6, ys[-1] + 4, values[-1]) * math.isfinite(ys[-1])
    title = html.escape(f"{name} over {len(values)} steps, from {low:.2f} to {high:.2f}")
    return (
        f'<svg class="chart" role="img" aria-label="{title}" width="{WIDTH}" height="{HEIGHT}" font-size="10" '
        f'fill="currentColor"><title>{title}</title>{axis}<path d="{path}" fill="none" stroke="currentColor" '
        f'stroke-width="1.5" stroke-linejoin="round"/>{marks}{steps}{last}</svg>'
    )


def bar(values: Sequence[float], most: float = 1.0) -> str:
    """Return a bar of length values[0], as a share of `most`, with a whisker between two further values."""
    length, *ends = (f"{1 + min(max(x / most, 0.0), 1.0) * (BAR - 2):.1f}" for x in values)
    whisker = (
        '<path d="M{0} 5H{1}M{0} 2v6M{1} 2v6" stroke="currentColor"/>'.format(*ends)
        if len({*ends}) > 1
        else ""
    )
    return (
        f'<svg class="bar" aria-hidden="true" width="{BAR}" height="10"><rect y="1" width="{length}" height="8" '
        f'rx="2" fill="currentColor" opacity="0.45"/>{whisker}</svg>'
    )


def _text(x: float, y: float, value: float, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{value:.2f}</text>'
