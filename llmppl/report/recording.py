"""Recordings of runs: the particles that lived, those that died, and the reasons. A `Recorder` writes them.

A recording is a tree of *candidates*: those of step t descend from selected candidates of step t-1. A candidate is
*dead* if its weight is zero. It is *culled* if its weight is positive and it was not selected. Else it is kept,
perhaps more than once.

The file has a line `{"llmppl_trace": 1, "program": ..., "title": ..., "prompts": [...]}`, then a line for each step as
`Recorder` describes. If the recorder was used in a `with` block, the last line is `{"end": null}`, or has the exception
that ended the run. Each line is sealed (`llmppl.support.files`). A line without a checksum, as other tools write it, is
read without a check.
"""

from __future__ import annotations

import math
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmppl.report.schema import FIELDS, check, check_references
from llmppl.support.arguments import shown
from llmppl.support.files import parsed, unsealed

__all__ = ["VERSION", "Candidate", "RecordedStep", "Recording", "load", "parse"]

VERSION = 1
MAX_CHARACTERS = 1 << 29                                # of the texts of all candidates


@dataclass
class Candidate:
    """Candidate of a recorded step.

    parent : place of its parent among the candidates of the previous step; None at step 1
    text, keep : the whole text; the step added text[keep:]
    log_weight, twist, finished, death, attribution : as in the file; log_weight is -inf if it died
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
    def kept(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate.copies]

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
        unfinished = sum(candidate.copies for candidate in last.kept if not candidate.finished)
        steps = f"{last.index} step{'s' * (last.index != 1)}"
        if not last.kept:
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
        If it is not a recording, or has no whole step. The error names the wrong line and field.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a recording: it is no text. {_HOW}") from None
    if not any(lines):
        raise ValueError(f"{path} is empty: the run has not made its first step, or wrote elsewhere. {_HOW}")
    return parse(lines[:-1], str(path))                 # the part after the last line end is empty, or torn


def parse(whole: Sequence[str], path: str) -> Recording:
    """Return the recording of these lines. A ValueError begins with `path`."""
    header = parsed(next(iter(whole), ""))
    if "llmppl_trace" not in header:
        raise ValueError(f"{path} is not a recording: its first line is not that of a Recorder. {_HOW}")
    version = header["llmppl_trace"]
    if isinstance(version, bool) or version != VERSION:
        raise ValueError(
            f"{path} has the format {shown(version, 60)}, and this version of llmppl reads {VERSION}; "
            "record the run again, or show it with the llmppl that recorded it"
        )
    reader = _Reader()
    for number, line in enumerate(whole, 1):
        record = parsed(line)
        if "check" in record and not (record := unsealed(line.encode("utf-8", "surrogatepass") + b"\n")):
            raise ValueError(f"{path}, line {number} is damaged: its check is another; take it out of a line you edit")
        if not record:
            raise ValueError(f"{path}, line {number} is not a step as a Recorder writes it: {line[:60]!r}")
        kind = "header" if number == 1 else "end" if "end" in record else "step"
        try:
            getattr(reader, kind)(check(FIELDS[kind], record))
        except (TypeError, ValueError, RecursionError) as error:        # RecursionError: the repr of nested lists
            raise ValueError(f"{path}, line {number}: {error}") from None
        if kind == "end":
            break
    if not reader.recording.steps:
        raise ValueError(f"{path} holds no whole step: the run stopped, or has not come, to the end of its first step")
    return reader.recording


_HOW = 'A recording is what `on_step=Recorder("run.jsonl")` writes.'
_ROOT = Candidate(None, "", 0, 0.0, 0.0, False, None, {})


class _Reader:
    """Builder of a recording from checked lines, with a method for each kind of line."""

    def header(self, record: dict[str, Any]) -> None:
        self.recording = Recording(**record)
        self._particles: list[tuple[int | None, Candidate]] = []        # after the last step: place, candidate
        self._characters = 0

    def step(self, record: dict[str, Any]) -> None:
        check_references(record, len(self.recording.steps) + 1, [len(c.text) for _, c in self._particles])
        candidates = []
        for each in record.pop("candidates"):
            number = each.pop("parent")
            place, parent = self._particles[number] if self._particles else (None, _ROOT)
            self._characters += each["keep"] + len(each["text"])
            if self._characters > MAX_CHARACTERS:       # a short line may repeat a long text
                raise ValueError(f"the texts have more than {MAX_CHARACTERS:,} characters")
            each["text"] = parent.text[: each["keep"]] + each["text"]
            keeps_all = each["keep"] == len(parent.text)
            candidates.append(Candidate(place, **each, carried=parent.finished, keeps_all=keeps_all))
        ancestors = record.pop("ancestors")
        for place, log_weight in zip(ancestors, record.pop("log_weights"), strict=True):
            kept = candidates[place]
            kept.copies += 1
            kept.log_weight_after = float(np.logaddexp(kept.log_weight_after, log_weight))
        self.recording.steps.append(RecordedStep(record.pop("step"), candidates, **record))
        self._particles = [(i, candidates[i]) for i in ancestors]

    def end(self, record: dict[str, Any]) -> None:
        self.recording.ended = record["end"] or ""


def normalised(log_weights: Sequence[float]) -> list[float]:
    """Return the weights divided by their sum; zeros if all are 0."""
    total = max(np.logaddexp.reduce(log_weights, initial=-np.inf), -sys.float_info.max)
    return [float(np.exp(log_weight - total)) for log_weight in log_weights]
