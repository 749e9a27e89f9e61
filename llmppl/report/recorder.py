"""Recorder: writes a run down as it goes.

`Recorder(path)`, given to a run as `on_step`, writes one line of JSON for every step and holds nothing open, so that a
run that is killed leaves all of its steps but perhaps the last. `llmppl.report.load(path)` reads them back, and
`llmppl trace run.jsonl -o run.html` draws them. `Recorder()` keeps them in memory, for `posterior.show()`.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from llmppl.report.recording import VERSION, Recording, parse
from llmppl.report.showing import show
from llmppl.support.arguments import path as path_of
from llmppl.support.arguments import text as text_of
from llmppl.support.files import no_folder, null, sealed

__all__ = ["Recorder"]

FIGURES = "ess", "num_unique_ancestors", "num_finished", "num_dead"


class Recorder:
    """Writes down every step of a run: `smc_steer(model, N, K, on_step=Recorder("run.jsonl"))`.

    Parameters
    ----------
    path : path of the file, optional
        Without one the steps are kept in memory, for `posterior.show()`. The file is begun anew; OSError if it cannot
        be written. If it cannot be written later, as on a full disk, a warning says where the recording stops, and the
        run goes on.
    title : str, optional
        What the run is, to be shown above it.

    A step is an object with `step` (from 1), `candidates`, `ancestors` (for each survivor its place among the
    candidates), `log_weights` (of the survivors, after selection), `log_ml`, `ess`, `num_unique_ancestors`,
    `num_finished` and `num_dead`. A log weight of -inf is null. A candidate has

        parent : the place of its parent among the survivors of the step before
        text : what the step added to the parent's text
        keep : the characters of the parent's text that it kept, where it did not keep all
        log_weight : before selection, the twist included
        twist : the twist, where there is one
        finished : true where it has
        death : the statement that killed it
        attribution : what each statement added to the log weight in this step

    Used as a context manager it also writes how the run ended. A recorder records one run; a second is a ValueError.
    `lines` is what it has recorded.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, title: str = "") -> None:
        self.path = None if path is None else path_of("path", path)
        self.title = text_of("title", title)
        self.lines = list[str]()
        self._index = 0
        self._stopped = False
        self._before: list[tuple[str, dict[str, float]]] = []       # text and attribution of each particle
        if self.path is not None:
            if missing := no_folder(self.path):
                raise missing
            self.path.write_text("", encoding="utf-8")

    def __call__(self, step: Any) -> None:
        if step.index != self._index + 1:
            raise ValueError(
                f"{self!r} has recorded up to step {self._index} and is given step {step.index}: "
                "it records one run, from its first step on; make a Recorder for each run"
            )
        if step.index == 1:
            what = {"program": type(step.candidates[0]).__name__, "title": self.title}
            self._write({"llmppl_trace": VERSION, **what, "prompts": _prompts(step.candidates)})
        now = [(str(candidate), candidate.attribution) for candidate in step.candidates]
        lines = zip(step.candidates, now, step.parents.tolist(), step.candidate_log_weights.tolist(), strict=True)
        self._write(
            {
                "step": step.index,
                "candidates": [self._candidate(*line) for line in lines],
                "ancestors": step.ancestors.tolist(),
                "log_weights": step.particles.log_weights.tolist(),
                "log_ml": null(step.log_ml),
                **{name: getattr(step, name) for name in FIGURES},
            }
        )
        self._index = step.index
        self._before = [now[i] for i in step.ancestors.tolist()]

    def go_on(self, lines: Sequence[str], particles: Sequence[Any]) -> None:
        """Record a run that goes on from a checkpoint: what was recorded of it by then, and its particles."""
        if self._index:
            raise ValueError(f"{self!r} has recorded a run; make a Recorder for each")
        for line in lines:
            self._write_line(line)
        self._index, self._before = max(len(lines) - 1, 0), [(str(each), each.attribution) for each in particles]

    @property
    def recording(self) -> Recording:
        """What it has recorded. A ValueError before the first step."""
        if not self._index:
            raise ValueError(f"{self!r} has recorded no step: run smc_steer(model, N, K, on_step=recorder) first")
        return parse(self.lines, repr(self))

    def show(self, *, ended: bool = False) -> None:
        """The page of the run, below the cell of a notebook, elsewhere in the browser: `llmppl.report.show`.

        ended : whether nothing more is to come, as the posterior knows
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
        if self._index:
            self._write({"end": None if kind is None else kind.__name__})

    def _candidate(
        self, candidate: Any, now: tuple[str, dict[str, float]], parent: int, log_weight: float
    ) -> dict[str, Any]:
        text, attribution = now
        old_text, old_attribution = self._before[parent] if self._before else ("", {})
        keep = len(os.path.commonprefix([old_text, text]))
        added = {name: total - old_attribution.get(name, 0.0) for name, total in attribution.items()}
        record: dict[str, Any] = {"parent": parent, "text": text[keep:], "log_weight": null(log_weight)}
        if keep < len(old_text):
            record["keep"] = keep
        if candidate.log_twist:
            record["twist"] = candidate.log_twist
        if log_weight == -math.inf:
            record["death"] = candidate.death or "weight zero"
        elif candidate.finished:
            record["finished"] = True
        if any(added.values()):
            record["attribution"] = {name: log_w for name, log_w in added.items() if log_w}
        return record

    def _write(self, line: dict[str, Any]) -> None:
        self._write_line(sealed(line).decode()[:-1])

    def _write_line(self, line: str) -> None:
        self.lines.append(line)
        if self.path is None or self._stopped:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:                        # a recording is not worth a run
            self._stopped = True                        # for good: what follows a torn line could not be read
            why = f"the recording stops after step {self._index}, and the run goes on: {error.strerror or error}"
            warnings.warn(f"{self.path}: {why}", stacklevel=4)


def _prompts(particles: Sequence[Any]) -> list[str]:
    """What stands in the contexts of a particle before its own text; none where they do not end with its text."""
    for particle in particles:
        text = str(particle)
        whole = [str(context.text) for context in _contexts(particle)] if text else []
        if whole and all(each.endswith(text) for each in whole):
            return [each.removesuffix(text) for each in whole if each != text]
    return []


def _contexts(particle: Any) -> Iterator[Any]:
    for value in vars(particle).values():
        for each in value if isinstance(value, list | tuple) else [value]:
            if hasattr(each, "next_token") and hasattr(each, "text"):
                yield each
