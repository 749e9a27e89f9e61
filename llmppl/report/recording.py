"""Recordings of runs: the particles that lived, those that died, and the reasons. A `Recorder` writes them.

A recording is a tree of *candidates*: those of step t descend from selected candidates of step t-1. A candidate is
*dead* if its weight is zero. It is *culled* if its weight is positive and it was not selected. Else it is kept,
perhaps more than once.

A file has a line of JSON for the run, `{"llmppl_trace": 2, "program": ..., "title": ..., "prompts": [...]}`, then a
line for each step. If the recorder was used in a `with` block, the last line is `{"end": null}`, or has the exception
that ended the run. A step is an object with `step` (from 1), `candidates`, `ancestors` (the place of each survivor
among the candidates), `log_weights` (of the survivors, after selection), `log_ml`, and the figures `ess`,
`num_unique_ancestors`, `num_finished` and `num_dead`. A log weight of -inf is null. A candidate has

    parent : place of its parent among the survivors of the previous step
    keep, text : number of characters of the parent's text that it kept, and the text that the step added
    log_weight, twist : before selection, including the twist
    finished, death : true if it has finished; the statement that gave it weight zero, or null
    attribution : log-weight that each statement added in this step
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Candidate", "FIGURES", "RecordedStep", "Recording", "VERSION", "load", "normalised", "parse"]

VERSION = 2
LARGEST = 1e300                                         # sums and differences of such numbers are still finite
FIGURES = "ess", "num_unique_ancestors", "num_finished", "num_dead"


@dataclass
class Candidate:
    """Candidate of a recorded step.

    parent : place of its parent among the candidates of the previous step; None at step 1
    text, keep : the whole text; the step added text[keep:]
    log_weight, twist, finished, death, attribution : as in the file
    copies : number of times it was selected; 0 if it is dead or culled
    log_weight_after : log of the total weight of these copies; -inf if there are none
    carried : True if it had finished before this step
    keeps_all : True if `keep` is the length of its parent's text
    """

    parent: int | None
    text: str
    keep: int
    log_weight: float
    twist: float
    finished: bool
    death: str | None
    attribution: dict[str, float]
    copies: int = 0
    log_weight_after: float = -math.inf
    carried: bool = False
    keeps_all: bool = True


@dataclass
class RecordedStep:
    """Step of a recording: its candidates, and the figures of `llmppl.inference.StepRecord`."""

    index: int
    candidates: list[Candidate]
    log_ml: float
    ess: float
    num_unique_ancestors: int
    num_finished: int
    num_dead: int

    @property
    def num_particles(self) -> int:
        return sum(candidate.copies for candidate in self.candidates)


@dataclass
class Recording:
    """Recording of a run, as `load` returns it, with at least one step.

    prompts : the text before the particles' own, one for each context that the program keeps; empty if none was found
    ended : "" if the run came to its end, or the exception that ended it; None if the file has no end
    """

    program: str
    title: str
    prompts: list[str] = field(default_factory=list)
    steps: list[RecordedStep] = field(default_factory=list)
    ended: str | None = None

    def particles(self) -> list[tuple[int, float]]:
        """Return (place among the candidates, normalised weight) of the last particles, the heaviest first."""
        alive = {i: c.log_weight_after - c.twist for i, c in enumerate(self.steps[-1].candidates) if c.copies}
        weights = zip(alive, normalised(list(alive.values())), strict=True)
        return sorted(weights, key=lambda each: -each[1])

    def mean_attribution(self) -> dict[str, float]:
        """Return the log-weight that each statement added: the weighted mean over `particles`."""
        means = defaultdict[str, float](float)
        for place, weight in self.particles():
            at: int | None = place
            for step in reversed(self.steps):
                assert at is not None
                candidate = step.candidates[at]
                for name, log_w in candidate.attribution.items():
                    means[name] += weight * log_w
                at = candidate.parent
        return dict(means)

    def graves(self) -> dict[str, list[tuple[int, int]]]:
        """Return the candidates that each statement killed, as pairs of a step's index and a place in the step."""
        graves = defaultdict[str, list[tuple[int, int]]](list)
        for step in self.steps:
            for i, candidate in enumerate(step.candidates):
                if candidate.death is not None:
                    graves[candidate.death].append((step.index, i))
        return dict(graves)

    def deaths(self) -> dict[str, int]:
        """Return the number of candidates that each statement killed."""
        return {statement: len(killed) for statement, killed in self.graves().items()}

    def status(self) -> str:
        """Return the last step and the end of the run, in a sentence."""
        last = self.steps[-1]
        unfinished = sum(candidate.copies for candidate in last.candidates if not candidate.finished)
        steps = f"{last.index} step{'s' * (last.index != 1)}"
        if not last.num_particles:
            return f"All particles had died after {steps}."
        if not unfinished:
            return f"All particles finished, after {steps}."
        count = f"{unfinished} of {last.num_particles} particles not finished"
        if self.ended == "":
            return f"Cut after {steps}, {count}."
        reason = f"{self.ended} ended the run" if self.ended else "cut by max_steps, still running, or interrupted"
        return f"The recording stops after step {last.index}, {count}: {reason}."


def load(path: str | os.PathLike[str]) -> Recording:
    """Read the file of a `Recorder`, up to its last whole line.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is not a recording, or has no whole step. The error names the wrong line.
    """
    lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    return parse(lines[:-1], str(path))                 # the part after the last line end is empty, or torn


def parse(lines: Sequence[str], name: str) -> Recording:
    """Return the recording of these lines. A ValueError begins with `name`.

    Every value is converted to its type, because the page contains it and the file may come from somebody else.
    """
    recording, before, number = Recording("", ""), None, 0
    try:
        for number, line in enumerate(lines, 1):
            record = json.loads(line)
            if number == 1:
                if record["llmppl_trace"] != VERSION:
                    raise ValueError(f"this version of llmppl reads format {VERSION}: record the run again")
                prompts = [_text(each) for each in record["prompts"]]
                recording = Recording(_text(record["program"]), _text(record["title"]), prompts)
            elif "end" in record:
                recording.ended = _text(record["end"] or "")
                break
            else:
                step, before = _step(record, len(recording.steps) + 1, before)
                recording.steps.append(step)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{name}, line {number}, is not as a Recorder writes it ({reason:.150})") from None
    if not recording.steps:
        raise ValueError(f"{name} has no whole step: the run stopped, or has not come, to the end of its first step")
    return recording


Survivors = list[tuple[int, Candidate]]                 # place and candidate of each particle after a step


def _step(record: dict[str, Any], index: int, before: Survivors | None) -> tuple[RecordedStep, Survivors]:
    """Return a step and its survivors. `before` has the survivors of the previous step; None at step 1."""
    if record["step"] != index:
        raise ValueError(f"step must be {index}")
    candidates = [_candidate(each, before) for each in record["candidates"]]
    survivors = [(place, candidates[place]) for place in (_place(i, candidates) for i in record["ancestors"])]
    for (_, kept), log_weight in zip(survivors, record["log_weights"], strict=True):
        kept.copies += 1
        kept.log_weight_after = float(np.logaddexp(kept.log_weight_after, _number(log_weight)))
    ess, *counts = (_number(record[name]) for name in FIGURES)
    return RecordedStep(index, candidates, _log(record["log_ml"]), ess, *map(int, counts)), survivors


def _candidate(record: dict[str, Any], before: Survivors | None) -> Candidate:
    place, parent = (None, _ROOT) if before is None else before[_place(record["parent"], before)]
    keep = _place(record["keep"], parent.text + ".")
    return Candidate(
        place,
        parent.text[:keep] + _text(record["text"]),
        keep,
        _log(record["log_weight"]),
        _number(record["twist"]),
        bool(record["finished"]),
        _text(record["death"] or "") or None,
        {_text(name): _number(log_w) for name, log_w in record["attribution"].items()},
        carried=parent.finished,
        keeps_all=keep == len(parent.text),
    )


_ROOT = Candidate(None, "", 0, 0.0, 0.0, False, None, {})


def _place(value: Any, among: Sequence[Any]) -> int:
    if not 0 <= (place := int(value)) < len(among):
        raise ValueError(f"{place} is not below {len(among)}")
    return place


def _number(value: Any) -> float:
    if not abs(number := float(value)) <= LARGEST:
        raise ValueError(f"{number} is not finite")
    return number


def _log(value: Any) -> float:
    return -math.inf if value is None else _number(value)


def _text(value: Any) -> str:
    """Return a str that a file can contain, without lone surrogates."""
    return str(value).encode("utf-8", "replace").decode()


def normalised(log_weights: Sequence[float]) -> list[float]:
    """Return the weights divided by their sum; zeros if all are 0."""
    total = max(np.logaddexp.reduce(log_weights, initial=-np.inf), -sys.float_info.max)
    return [float(np.exp(log_weight - total)) for log_weight in log_weights]
