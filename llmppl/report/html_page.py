"""HTML page of a recorded run: its particles as a tree of text over the steps, and the statements that weighed them.

`page(recording)` returns one HTML file that needs no network. It has the recording as data, which `page.js` draws when
the page opens; `page.html` is the frame and `page.css` the style.
"""

from __future__ import annotations

import functools
import html
import itertools
import json
import math
import re
import tempfile
import webbrowser
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from llmppl.report.progress import in_notebook
from llmppl.report.recording import RecordedStep, Recording, normalised

MAX_COLOURS = 8  # values of an attribute that colours can show
HEIGHT = 640  # px of the frame in a notebook, which the user can resize


def page(recording: Recording) -> str:
    """Return the recording as one HTML file.

    Examples
    --------
    >>> recorder, program = Recorder(), ConstrainedText(lm, "He was", [" happy", " sad"])
    >>> particles = smc_steer(program, N=4, K=2, seed=0, on_step=recorder)
    >>> page(recorder.recording)[:15]
    '<!DOCTYPE html>'
    """
    steps = recording.steps
    statements = dict[str, float]()
    for step in steps:
        for candidate in step.candidates:
            statements |= candidate.attribution
    statement_ids = dict(zip(statements, itertools.count()))
    death_ids: dict[str | None, int] = dict(zip(recording.deaths(), itertools.count()))
    attributes = [*filter(functools.partial(_differs, steps), steps[-1].candidates[0].values)]
    data = {
        "title": recording.title,
        "status": recording.status(),
        "wasCut": recording.ended == "",
        "prompts": recording.prompts,
        "messages": recording.messages,
        "statements": list(statement_ids),
        "deaths": list(death_ids),
        "attributes": attributes,
        "weighed": [[name, _number(mean)] for name, mean in recording.mean_attribution().items()],
        "particles": [[place, float(f"{weight:.4g}")] for place, weight in recording.particles()],
        "steps": [_step(step, statement_ids, death_ids, attributes) for step in steps],
    }
    folder = files("llmppl.report")
    parts = {
        "program": html.escape(recording.program),
        # a "</script>" or "<!--" in a text must not end the script
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "css": (folder / "page.css").read_text(encoding="utf-8"),
        "script": (folder / "page.js").read_text(encoding="utf-8"),
    }
    text = (folder / "page.html").read_text(encoding="utf-8")
    return re.sub(r"{{(\w+)}}", lambda name: parts[name[1]], text)


def show(recording: Recording) -> None:
    """Show the page of a recording below the cell of a notebook, or else in the browser, and print the file's name.

    Examples
    --------
    >>> recorder, program = Recorder(), ConstrainedText(lm, "He was", [" happy", " sad"])
    >>> particles = smc_steer(program, N=4, K=2, seed=0, on_step=recorder)
    >>> show(recorder.recording)                            # doctest: +SKIP
    the page of the run is /tmp/llmppl-gg3udrs4.html
    """
    if in_notebook():
        from IPython.display import HTML, display

        fill = 'width="100%" height="100%" style="border: 0"'
        inner = f'<iframe srcdoc="{html.escape(page(recording))}" title="a recorded run" {fill}></iframe>'
        display(
            HTML(
                f'<div style="height: {HEIGHT}px; resize: vertical; overflow: hidden">{inner}</div>'
            )
        )
        return
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", prefix="llmppl-", suffix=".html", delete=False
    ) as file:
        file.write(page(recording))
    print(f"the page of the run is {file.name}")
    webbrowser.open(Path(file.name).as_uri())


def _differs(steps: Sequence[RecordedStep], name: str) -> bool:
    """Return True if the particles that a step keeps, and that go on, may have different values of an attribute."""
    everywhere = set[str | None]()
    differs = False
    for step in steps:
        values = {c.values.get(name) for c in step.candidates if c.copies and not c.finished}
        differs |= len(values) > 1
        everywhere |= values
    return differs and len(everywhere) <= MAX_COLOURS


def _step(
    step: RecordedStep,
    statements: dict[str, int],
    deaths: dict[str | None, int],
    attributes: Sequence[str],
) -> dict[str, object]:
    """Return a step for the script. Numbers are rounded, since nothing is computed from them."""
    before = normalised([c.log_weight for c in step.candidates])
    after = normalised([c.log_weight_after for c in step.candidates])
    candidates = []
    for c, share, share_after in zip(step.candidates, before, after, strict=True):
        kept = c.text[: c.keep].encode("utf-16-le", "surrogatepass")
        candidates.append(
            [
                -1 if c.parent is None else c.parent,
                c.text[c.keep :],
                len(kept) // 2,  # in units of JavaScript
                _number(c.log_weight),
                float(f"{share:.4g}"),
                c.copies,
                _number(c.log_weight_after),
                float(f"{share_after:.4g}"),
                c.finished + 2 * c.carried + 4 * c.cut,
                deaths.get(c.death, -1),
                round(c.twist, 3),
                [[statements[name], round(log_w, 3)] for name, log_w in c.attribution.items()],
                [c.values.get(name, "") for name in attributes],
            ]
        )
    return {
        "ess": round(step.ess, 2),
        "logMl": _number(step.log_ml),
        "candidates": candidates,
    }


def _number(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None
