"""Recorder: records a run, a line of JSON for every step.

Give `Recorder(path)` to a run as `on_step`. It writes a line of JSON for every step (`llmppl.report.recording`).
`llmppl.report.load(path)` reads the file, and `llmppl trace run.jsonl` draws it. `Recorder()` keeps the steps in
memory, for `posterior.show()`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from llmppl.report.html_page import show
from llmppl.report.recording import FIGURES, VERSION, Recording, parse
from llmppl.support.arguments import text as text_of

__all__ = ["Recorder"]


class Recorder:
    """Recorder of every step of a run: `smc_steer(model, N, K, on_step=Recorder("run.jsonl"))`.

    Parameters
    ----------
    path : path of the file, optional
        By default the steps are kept in memory, for `posterior.show()`. An existing file is overwritten; OSError if it
        cannot be written. If writing fails later, as on a full disk, a warning says where the recording stops, and the
        run continues.
    title : str, optional
        Title of the page.

    Notes
    -----
    Each line is written when its step ends, so a killed run loses at most its last step. `llmppl.report.recording`
    describes the lines, which are also in `lines`. As a context manager, a recorder also writes how the run ended. It
    records one run; a second is a ValueError.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, title: str = "") -> None:
        self.path = self._file = None if path is None else Path(path)
        self.title = text_of("title", title)
        self.lines = list[str]()
        self._index = 0
        self._before: list[tuple[str, dict[str, float]]] = []       # text and attribution of each particle
        if self.path is not None:
            self.path.write_text("", encoding="utf-8")

    def __call__(self, step: Any) -> None:
        if step.index != self._index + 1:
            raise ValueError(
                f"{self!r} has recorded up to step {self._index} and is given step {step.index}: "
                "it records one run, from its first step on; make a Recorder for each run"
            )
        if step.index == 1:
            header = {"program": type(step.candidates[0]).__name__, "title": self.title}
            self._write({"llmppl_trace": VERSION, **header, "prompts": _prompts(step.candidates)})
        now = [(str(candidate), candidate.attribution) for candidate in step.candidates]
        lines = zip(step.candidates, now, step.parents.tolist(), step.candidate_log_weights.tolist(), strict=True)
        self._write(
            {
                "step": step.index,
                "candidates": [self._candidate(*line) for line in lines],
                "ancestors": step.ancestors.tolist(),
                "log_weights": step.particles.log_weights.tolist(),
                "log_ml": _null(step.log_ml),
                **{name: getattr(step, name) for name in FIGURES},
            }
        )
        self._index = step.index
        self._before = [now[i] for i in step.ancestors.tolist()]

    def go_on(self, lines: Sequence[str], particles: Sequence[Any]) -> None:
        """Continue the recording of a resumed run from its recorded lines and its particles."""
        for line in lines:
            self._write_line(line)
        self._index, self._before = max(len(lines) - 1, 0), [(str(each), each.attribution) for each in particles]

    @property
    def recording(self) -> Recording:
        """The recording so far. ValueError before the first step."""
        if not self._index:
            raise ValueError(f"{self!r} has recorded no step: run smc_steer(model, N, K, on_step=recorder) first")
        return parse(self.lines, repr(self))

    def show(self, *, ended: bool = False) -> None:
        """Show the page of the run, in a notebook or in the browser; see `llmppl.report.show`.

        ended : True if the run has ended, as the posterior knows
        """
        recording = self.recording
        if ended and recording.ended is None:
            recording.ended = ""
        show(recording)

    def __repr__(self) -> str:
        return f"Recorder({'' if self.path is None else repr(str(self.path))})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._write({"end": None if kind is None else kind.__name__})

    def _candidate(
        self, candidate: Any, now: tuple[str, dict[str, float]], parent: int, log_weight: float
    ) -> dict[str, Any]:
        text, attribution = now
        old_text, old_attribution = self._before[parent] if self._before else ("", {})
        keep = len(os.path.commonprefix([old_text, text]))
        added = {name: total - old_attribution.get(name, 0.0) for name, total in attribution.items()}
        died = log_weight == -math.inf
        return {
            "parent": parent,
            "keep": keep,
            "text": text[keep:],
            "log_weight": _null(log_weight),
            "twist": candidate.log_twist,
            "finished": candidate.finished and not died,
            "death": (candidate.death or "weight zero") if died else None,
            "attribution": {name: log_w for name, log_w in added.items() if log_w},
        }

    def _write(self, line: dict[str, Any]) -> None:
        self._write_line(json.dumps(line))

    def _write_line(self, line: str) -> None:
        self.lines.append(line)
        if self._file is None:
            return
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:                        # a failed recording must not end the run
            self._file = None                           # for good: no reader could read past a torn line
            message = f"the recording stops after step {self._index}, and the run goes on: {error.strerror or error}"
            warnings.warn(f"{self.path}: {message}", stacklevel=4)


def _null(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _prompts(particles: Sequence[Any]) -> list[str]:
    """Return the text in the contexts of a particle before its own text; none if they do not end with its text."""
    for particle in filter(str, particles):
        text, parts = str(particle), itertools.chain.from_iterable(map(_listed, vars(particle).values()))
        whole = [str(each.text) for each in parts if hasattr(each, "next_token")]
        if all(each.endswith(text) for each in whole):
            return list(filter(None, (each.removesuffix(text) for each in whole)))
    return []


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]
