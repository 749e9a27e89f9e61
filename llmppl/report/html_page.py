"""HTML page of a recorded run: its particles as a tree of text over the steps, and the statements that weighed them.

`page(recording)` returns one HTML file that needs no network. The panel is written here. `page.js` draws curves and
branches when the page opens; `page.html` is the frame and `page.css` the style.
"""

from __future__ import annotations

import html
import itertools
import json
import math
import re
import tempfile
import webbrowser
from collections import Counter
from importlib.resources import files
from pathlib import Path

from llmppl.report.progress import in_notebook
from llmppl.report.recording import RecordedStep, Recording, normalised
from llmppl.report.tables import bar

MAX_LINKS = 8               # links to steps for each reason of deaths
LINE_ENDS = str.maketrans("\n", "↵")
HEIGHT = 640                # px of the frame in a notebook, which the user can resize


def page(recording: Recording) -> str:
    """Return the recording as one HTML file."""
    steps = recording.steps
    statements = dict.fromkeys(name for step in steps for c in step.candidates for name in c.attribution)
    statement_ids = dict(zip(statements, itertools.count()))
    death_ids: dict[str | None, int] = dict(zip(recording.deaths(), itertools.count()))
    data = {
        "prompts": recording.prompts, "statements": list(statement_ids), "deaths": list(death_ids),
        "steps": [_step(step, statement_ids, death_ids) for step in steps],
    }  # fmt: skip
    quotes = " and ".join(f"<q>{html.escape(prompt)}</q>" for prompt in recording.prompts)
    folder = files("llmppl.report")
    parts = {
        "title": html.escape(recording.program),
        "subtitle": html.escape(recording.title),
        "status": html.escape(recording.status()),
        "summary": _summary(recording),
        "prompt": f'<div class="prompt">after {quotes}</div>' if quotes else "",
        "overview": _weighed(recording) + _killed(recording) + _alive(recording),   # shown while no particle is chosen
        # a "</script>" or "<!--" in a text must not end the script
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "css": (folder / "page.css").read_text(encoding="utf-8"),
        "script": (folder / "page.js").read_text(encoding="utf-8"),
    }
    text = (folder / "page.html").read_text(encoding="utf-8")
    return re.sub(r"{{(\w+)}}", lambda name: parts[name[1]], text)


def show(recording: Recording) -> None:
    """Show the page of a recording below the cell of a notebook, or else in the browser, and print the file's name."""
    if in_notebook():
        from IPython.display import HTML, display

        fill = 'width="100%" height="100%" style="border: 0"'
        inner = f'<iframe srcdoc="{html.escape(page(recording))}" title="a recorded run" {fill}></iframe>'
        display(HTML(f'<div style="height: {HEIGHT}px; resize: vertical; overflow: hidden">{inner}</div>'))
        return
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="llmppl-", suffix=".html", delete=False) as file:
        file.write(page(recording))
    print(f"the page of the run is {file.name}")
    webbrowser.open(Path(file.name).as_uri())


def _step(step: RecordedStep, statements: dict[str, int], deaths: dict[str | None, int]) -> dict[str, object]:
    """Return a step for the script. Numbers are rounded, since nothing is computed from them."""
    before = normalised([c.log_weight for c in step.candidates])
    after = normalised([c.log_weight_after for c in step.candidates])
    return {
        "ess": round(step.ess, 2),
        "logMl": _number(step.log_ml),
        "unique": step.num_unique_ancestors,
        "finished": step.num_finished,
        "dead": step.num_dead,
        "candidates": [
            [
                -1 if c.parent is None else c.parent, c.text[c.keep :],
                len(c.text[: c.keep].encode("utf-16-le", "surrogatepass")) // 2,            # in units of JavaScript
                _number(c.log_weight), float(f"{share:.4g}"), c.copies,
                _number(c.log_weight_after), float(f"{share_after:.4g}"),
                c.finished + 2 * c.carried, deaths.get(c.death, -1), round(c.twist, 3),
                [[statements[name], round(log_w, 3)] for name, log_w in c.attribution.items()],
            ]
            for c, share, share_after in zip(step.candidates, before, after, strict=True)
        ],
    }  # fmt: skip


def _number(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None


def _summary(recording: Recording) -> str:
    """Return the figures below the title."""
    last = recording.steps[-1]
    particles = recording.particles()
    ess = 1 / sum(weight**2 for _, weight in particles) if particles else 0.0
    figures = {
        "steps": str(last.index),
        "particles": str(len(last.ancestors)),
        "finished": str(last.num_finished),
        "deaths": str(sum(recording.deaths().values())),
        "log Ẑ": _signed(last.log_ml),
        "ESS": f"{ess:.1f}",
    }
    return "".join(f"<div><dt>{name}</dt><dd>{html.escape(value)}</dd></div>" for name, value in figures.items())


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
    deaths = sorted(recording.graves().items(), key=lambda each: -len(each[1]))
    rows = []
    for name, where in deaths:
        first, number = dict(reversed(where)), Counter(step for step, _ in where)
        links = ", ".join(
            f'<a href="#step={step}&amp;candidate={first[step]}">{step}</a>{f" (×{many})" * (many > 1)}'
            for step, many in itertools.islice(number.items(), MAX_LINKS)
        )
        more = ", …" * (len(number) > MAX_LINKS)
        count = f'<td class="n dead">× {len(where)}</td>'
        rows.append(f'{count}<td class="code">{html.escape(name)}<div>step {links}{more}</div></td>')
    return _section("What killed others", rows)


def _alive(recording: Recording) -> str:
    last, particles, rows = recording.steps[-1], recording.particles(), list[str]()
    for place, weight in particles:
        candidate = last.candidates[place]
        state = f" ×{candidate.copies}" * (candidate.copies > 1) + (" …", " ■")[candidate.finished]
        rows.append(
            f'<td>{bar(weight / particles[0][1], 56)}</td><td class="n">{weight:.3f}</td>'
            f'<td class="text"><a href="#step={last.index}&amp;candidate={place}">'
            f'{html.escape(candidate.text).translate(LINE_ENDS)}</a><span class="state">{state}</span></td>'
        )
    return _section(f"Particles after step {last.index}", rows)


def _section(title: str, rows: list[str], note: str = "") -> str:
    """Return a table below its title; "" without rows."""
    table = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<h2>{title}</h2>{note}<table>{table}</table>" * bool(rows)


def _signed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−") if math.isfinite(value) else "−∞"
