"""The page that shows a recorded run: its particles as a tree of text over the steps, and what weighed them.

`page(recording)` is one HTML file that asks nothing of the network. Columns are steps; in each, candidates stand below
one another in the order of their parents, so that no two branches cross. The panel and the curves are written here, the
branches are drawn when the page opens (`page.html`).
"""

from __future__ import annotations

import html
import itertools
import json
import math
import re
import unicodedata
from collections.abc import Sequence
from importlib.resources import files

import numpy as np

from llmppl.display.svg import bar, curve
from llmppl.trace.recording import Candidate, RecordedStep, Recording, normalised

__all__ = ["page"]

MAX_LABEL = 26              # characters shown of what a step added
MAX_REASONS = 12            # of deaths, told in the panel,
MAX_LINKS = 6               # and for each the deaths that can be jumped to
ROOMY = 40                  # candidates in a step up to which also the text of those not kept is shown
GUTTER, LINK = 96, 36       # px before the first column, and from one column to the next
CURVE_HEIGHT = 46           # px
LINE_ENDS = str.maketrans("\n", "↵")


def page(recording: Recording) -> str:
    """The recording as one HTML file."""
    steps = recording.steps
    roomy = max(len(step.candidates) for step in steps) <= ROOMY
    most = max(len(step.kept) for step in steps)
    row, char = (24, 7.23) if roomy else (18, 7.23) if most <= ROOMY else (13, 6.03)      # 12 px or 10 px monospace
    widths = [LINK + char * _widest(step, roomy) + 8 for step in steps]
    ends = GUTTER + np.cumsum(widths)                   # (T,) the right end of each column
    middles = ends - (np.array(widths) - LINK) / 2
    statements = dict.fromkeys(name for step in steps for c in step.candidates for name in c.attribution)
    statement_ids = dict(zip(statements, itertools.count()))
    death_ids: dict[str | None, int] = dict(zip(recording.deaths(), itertools.count()))
    data = {
        "roomy": roomy, "row": row, "link": LINK, "start": GUTTER, "ends": [round(float(x), 1) for x in ends],
        "maxLabel": MAX_LABEL, "statements": list(statement_ids), "deaths": list(death_ids),
        "steps": [_step(step, statement_ids, death_ids) for step in steps],
    }  # fmt: skip
    parts = {
        "title": html.escape(recording.program),
        "subtitle": html.escape(recording.title),
        "status": html.escape(recording.status()),
        "summary": _summary(recording),
        "curves": _curves(steps, middles.tolist(), float(ends[-1]) + 40),
        "overview": _weighed(recording) + _killed(recording) + _left(recording),    # where no particle is chosen
        # no "</script>" nor "<!--" in a text can end the script
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    text = (files("llmppl.trace") / "page.html").read_text(encoding="utf-8")
    return re.sub(r"{{(\w+)}}", lambda name: parts[name[1]], text)


def _widest(step: RecordedStep, roomy: bool) -> int:
    """The width of the widest label of a step, in characters."""
    shown = [candidate for candidate in step.candidates if roomy or candidate.copies]
    return max([3, *(min(_width(candidate.text[candidate.keep :]), MAX_LABEL) for candidate in shown)])


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def _step(step: RecordedStep, statements: dict[str, int], deaths: dict[str | None, int]) -> dict[str, object]:
    """A step as the script reads it; numbers are rounded, since nothing is computed from them."""
    before = _shares([c.log_weight for c in step.candidates])
    after = _shares([c.log_weight_after for c in step.candidates])
    return {
        "ess": round(step.ess, 2),
        "logMl": _number(step.log_ml),
        "unique": step.num_unique_ancestors,
        "finished": step.num_finished,
        "dead": step.num_dead,
        "candidates": [
            [
                -1 if c.parent is None else c.parent,
                c.text[c.keep :],
                -1 if c.keeps_all else len(c.text[: c.keep].encode("utf-16-le", "surrogatepass")) // 2,
                _number(c.log_weight),
                share,
                c.copies,
                _number(c.log_weight_after),
                share_after,
                c.finished + 2 * c.carried,
                deaths.get(c.death, -1),
                round(c.twist, 3),
                [[statements[name], round(log_w, 3)] for name, log_w in c.attribution.items()],
            ]
            for c, share, share_after in zip(step.candidates, before, after, strict=True)
        ],
    }


def _shares(log_weights: Sequence[float]) -> list[float]:
    """The normalised weights, to four significant digits."""
    return [float(f"{weight:.4g}") for weight in normalised(log_weights)]


def _number(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None


def _summary(recording: Recording) -> str:
    """The figures below the title."""
    last = recording.steps[-1]
    particles = recording.particles()
    ess = 1 / sum(weight**2 for _, weight in particles) if particles else 0.0
    figures = {
        "steps": str(last.index),
        "particles": str(last.num_particles),
        "finished": str(last.num_finished),
        "deaths": str(sum(recording.deaths().values())),
        "log Ẑ": _signed(last.log_ml),
        "ESS": f"{ess:.1f}",
    }
    return "".join(f"<div><dt>{name}</dt><dd>{html.escape(value)}</dd></div>" for name, value in figures.items())


def _curves(steps: list[RecordedStep], xs: list[float], width: float) -> str:
    """The effective sample size and log Z-hat over the steps, and the axis of the steps, above the columns."""
    most = max(max(step.ess for step in steps), 1.0)
    log_mls = [step.log_ml for step in steps if math.isfinite(step.log_ml)] or [0.0]
    low, high = min(log_mls), max(log_mls)
    rows = [
        ("ess", "ESS", f"0 to {most:.0f}", [step.ess for step in steps], 0.0, most),
        ("log-ml", "log Ẑ", f"{_signed(low)} to {_signed(high)}", [step.log_ml for step in steps], low, high),
    ]
    drawn = "".join(
        f'<div class="row"><div class="label"><b>{name}</b><span id="{key}">{extent}</span></div>'
        + curve(xs, ys, width=width, height=CURVE_HEIGHT, low=bottom, high=top, title=f"{name} over the steps")
        + "</div>"
        for key, name, extent, ys, bottom, top in rows
    )
    ticks = "".join(f'<text x="{x:.1f}" y="13">{step.index}</text>' for x, step in zip(xs, steps, strict=True))
    axis = f'<div class="label"><b>step</b></div><svg width="{width:.0f}" height="18">{ticks}</svg>'
    return f'{drawn}<div class="row axis">{axis}</div>'


def _weighed(recording: Recording) -> str:
    means = recording.mean_attribution()
    largest = max(map(abs, means.values()), default=0.0) or 1.0
    rows = [
        f'<td>{bar(abs(mean) / largest, 56)}</td><td class="n">{_signed(mean)}</td>'
        f'<td class="code">{html.escape(name)}</td>'
        for name, mean in sorted(means.items(), key=lambda each: -abs(each[1]))
    ]
    note = "<p>What each statement added to the log weight, the mean over the particles by weight.</p>"
    return _section("What weighed them", rows, note)


def _killed(recording: Recording) -> str:
    told = sorted(recording.graves().items(), key=lambda each: -len(each[1]))
    rows = []
    for name, where in told[:MAX_REASONS]:
        links = ", ".join(f'<a href="#step={step}&amp;candidate={i}">{step}</a>' for step, i in where[:MAX_LINKS])
        more = ", …" * bool(where[MAX_LINKS:])
        count = f'<td class="n dead">× {len(where)}</td>'
        rows.append(f'{count}<td class="code">{html.escape(name)}<div>step {links}{more}</div></td>')
    others = f"<p>and {len(told) - MAX_REASONS} other reasons</p>" * bool(told[MAX_REASONS:])
    return _section("What killed others", rows, after=others)


def _left(recording: Recording) -> str:
    last, particles = recording.steps[-1], recording.particles()
    rows = [
        f'<td>{bar(weight / particles[0][1], 56)}</td><td class="n">{weight:.3f}</td>'
        f'<td class="text"><a href="#step={last.index}&amp;candidate={place}">'
        f"{html.escape(last.candidates[place].text).translate(LINE_ENDS)}</a>{_state(last.candidates[place])}</td>"
        for place, weight in particles
    ]
    return _section(f"Particles after step {last.index}", rows)


def _section(title: str, rows: list[str], note: str = "", after: str = "") -> str:
    """A table below its title; nothing without rows."""
    table = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<h2>{title}</h2>{note}<table>{table}</table>{after}" * bool(rows)


def _state(candidate: Candidate) -> str:
    copies = f" ×{candidate.copies}" * (candidate.copies > 1)
    return f'<span class="state">{copies}{" ■" if candidate.finished else " …"}</span>'


def _signed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−") if math.isfinite(value) else "−∞"
