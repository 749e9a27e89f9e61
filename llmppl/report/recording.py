"""Recordings of runs: the particles that lived, those that died, and the reasons.

A `Recorder` writes a recording, and `load` reads it.

A recording is a tree of *candidates*: those of step t descend from selected candidates of step t-1. A candidate is
*dead* if its weight is zero. It is *culled* if its weight is positive and it was not selected. Else it is kept,
perhaps more than once.

A file has a line of JSON for the run, with `llmppl_trace` (the format, 3), `program`, `title`, `prompts` and, for each
prompt, its last message in `messages` ("" if it is no conversation). Then it has a line for each step. If the recorder
was used in a `with` block, the last line is `{"end": null}`, or has the exception that ended the run. A step is an
object with `step` (from 1), `candidates`, `ancestors` (the place of each survivor among the candidates), `log_weights`
(of the survivors, after selection), `log_ml`, and the figures `ess`, `num_unique_ancestors`, `num_finished` and
`num_dead`. A log weight of -inf is null. A candidate has

    parent : place of its parent among the survivors of the previous step
    keep, text : number of characters of the parent's text that it kept, and the text that the step added; of a dead
        candidate also the tokens that it had drawn for its text
    log_weight, twist : before selection, including the twist
    finished, death : true if it has finished; the statement that gave it weight zero, or null
    attribution : log-weight that each statement added in this step
    values : attributes of the program that the step changed, as texts: short strings, int, bool and Enum
    cut : true if the model's length or `max_tokens` ended it
"""

import json
import math
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from llmppl.support.arguments import plural
from llmppl.support.arguments import text as text_of

VERSION = 3
MAX_VALUE = 40  # characters of a value
LARGEST = 1e300  # sums of such numbers are still finite
FIGURES = "ess", "num_unique_ancestors", "num_finished", "num_dead"


@dataclass
class Candidate:
    """Candidate of a recorded step.

    parent : place of its parent among the candidates of the previous step; None at step 1
    text, keep : the whole text; the step added text[keep:]
    log_weight, twist, finished, death, attribution : as in the file, `help(llmppl.report.recording)`
    values, cut : as in the file; `values` has all that is known of the candidate
    copies : number of times it was selected; 0 if it is dead or culled
    log_weight_after : log of the total weight of these copies; -inf if there are none
    carried : True if it had finished before this step

    Examples
    --------
    >>> recorder, program = Recorder(), ConstrainedText(lm, "He was", [" happy", " sad"])
    >>> particles = smc_steer(program, N=2, K=2, seed=0, on_step=recorder)
    >>> [(candidate.text, candidate.copies) for candidate in recorder.recording.steps[0].candidates]
    [(' h', 0), (' sa', 0), (' happy', 1), (' sad', 1)]
    """

    parent: int | None
    text: str
    keep: int
    log_weight: float
    twist: float
    finished: bool
    death: str | None
    attribution: dict[str, float]
    values: dict[str, str]
    cut: bool
    copies: int = 0
    log_weight_after: float = -math.inf
    carried: bool = False


_ROOT = Candidate(None, "", 0, 0.0, 0.0, False, None, {}, {}, False)


@dataclass
class RecordedStep:
    """Step of a recording: its candidates, the place of each survivor among them, and the figures of `StepRecord`.

    Examples
    --------
    >>> recorder, program = Recorder(), ConstrainedText(lm, "He was", [" happy", " sad"])
    >>> particles = smc_steer(program, N=2, K=2, seed=0, on_step=recorder)
    >>> [step] = recorder.recording.steps
    >>> len(step.candidates), step.ancestors, step.num_finished
    (4, [2, 3], 2)
    """

    index: int
    candidates: list[Candidate]
    ancestors: list[int]
    log_ml: float
    ess: float
    num_unique_ancestors: int
    num_finished: int
    num_dead: int


@dataclass
class Recording:
    """Recording of a run, as `load` returns it, with at least one step.

    prompts : the text before the particles' own, one for each context that the program keeps; empty if none was found.
        Where the particles differ it ends with "…".
    messages : the last message of each prompt; "" if it is no conversation
    ended : "" if the run came to its end, or the exception that ended it; None if the file has no end

    Examples
    --------
    >>> recorder, program = Recorder(), ConstrainedText(lm, "He was", [" happy", " sad"])
    >>> particles = smc_steer(program, N=4, K=2, seed=0, on_step=recorder)
    >>> recorder.recording.status()
    'All particles finished, after 2 steps.'
    >>> place, weight = recorder.recording.particles()[0]
    >>> recorder.recording.steps[-1].candidates[place].text, round(weight, 2)
    (' happy', 0.61)
    """

    program: str
    title: str
    prompts: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    steps: list[RecordedStep] = field(default_factory=list)
    ended: str | None = None

    def __repr__(self) -> str:
        return f"Recording({self.title!r}: {self.status()})"

    def particles(self) -> list[tuple[int, float]]:
        """Return (place among the candidates, normalised weight) of the last particles, the heaviest first."""
        alive = {
            i: c.log_weight_after - c.twist
            for i, c in enumerate(self.steps[-1].candidates)
            if c.copies
        }
        weights = zip(alive, normalised(list(alive.values())), strict=True)
        return sorted(weights, key=lambda each: -each[1])

    def mean_attribution(self) -> dict[str, float]:
        """Return the log-weight that each statement added: the weighted mean over `particles`."""
        means = defaultdict[str, float](float)
        for place, weight in self.particles():
            at: Any = place
            for step in reversed(self.steps):
                for name, log_w in step.candidates[at].attribution.items():
                    means[name] += weight * log_w
                at = step.candidates[at].parent
        return dict(means)

    def deaths(self) -> dict[str, int]:
        """Return the number of candidates that each statement killed."""
        deaths = defaultdict[str, int](int)
        for step in self.steps:
            for candidate in step.candidates:
                if candidate.death is not None:
                    deaths[candidate.death] += 1
        return dict(deaths)

    def status(self) -> str:
        """Return the last step and the end of the run, in a sentence."""
        last = self.steps[-1]
        after = f"after {plural(last.index, 'step')}"
        if not last.ancestors:
            return f"All particles had died {after}."
        unfinished = sum(not last.candidates[place].finished for place in last.ancestors)
        if not unfinished:
            return f"All particles finished, {after}."
        count = f"{unfinished} of {len(last.ancestors)} particles not finished"
        if self.ended == "":
            return f"Cut {after}, {count}."
        reason = "cut by max_steps, still running, or interrupted"
        if self.ended:
            reason = f"{self.ended} ended the run"
        return f"The recording stops after step {last.index}, {count}: {reason}."


def load(path: str | os.PathLike[str]) -> Recording:
    """Read the file of a `Recorder`, up to its last whole line.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is not a recording, or has no whole step. The error names the wrong line.

    Examples
    --------
    >>> with Recorder("run.jsonl") as recorder:
    ...     particles = smc_steer(ConstrainedText(lm, "He was", [" happy", " sad"]), N=4, K=2, seed=0, on_step=recorder)
    >>> recording = load("run.jsonl")
    >>> recording.program, recording.prompts, len(recording.steps)
    ('ConstrainedText', ['He was'], 2)
    """
    lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    return parse(lines[:-1], str(path))  # the part after the last line end is empty, or torn


def parse(lines: Sequence[str], name: str) -> Recording:
    """Return the recording of these lines. A ValueError begins with `name`.

    Every value is converted to its type, because the page contains it and the file may come from somebody else.
    """
    recording = Recording("", "")
    number = 0
    try:
        for number, line in enumerate(lines, 1):
            record = json.loads(line)
            if number == 1:
                if record["llmppl_trace"] != VERSION:
                    raise ValueError(
                        f"this version of llmppl reads format {VERSION}: record the run again"
                    )
                recording.prompts = [*map(_text, record["prompts"])]
                recording.messages = [*map(_text, record["messages"])]
                recording.program = _text(record["program"])
                recording.title = _text(record["title"])
            elif "end" in record:
                recording.ended = _text(record["end"] or "")
                break
            else:
                recording.steps.append(_step(record, recording.steps))
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{name}, line {number}, is not as a Recorder writes it ({reason:.150})"
        ) from None
    if not recording.steps:
        raise ValueError(
            f"{name} has no whole step: the run stopped, or has not come, to the end of its first step"
        )
    return recording


def _step(record: dict[str, Any], before: list[RecordedStep]) -> RecordedStep:
    if record["step"] != len(before) + 1:
        raise ValueError(f"step must be {len(before) + 1}")
    candidates = [_candidate(each, before) for each in record["candidates"]]
    ancestors = [_place(each, candidates) for each in record["ancestors"]]
    for place, log_weight in zip(ancestors, record["log_weights"], strict=True):
        kept = candidates[place]
        kept.copies += 1
        kept.log_weight_after = float(np.logaddexp(kept.log_weight_after, _number(log_weight)))
    ess, *counts = (_number(record[name]) for name in FIGURES)
    return RecordedStep(
        len(before) + 1, candidates, ancestors, _log(record["log_ml"]), ess, *map(int, counts)
    )


def _candidate(record: dict[str, Any], before: list[RecordedStep]) -> Candidate:
    place = None
    parent = _ROOT
    if before:
        place = before[-1].ancestors[_place(record["parent"], before[-1].ancestors)]
        parent = before[-1].candidates[place]
    keep = _place(record["keep"], parent.text + ".")
    values = dict(parent.values)
    for name, value in record["values"].items():
        values[_text(name)] = _text(value)[:MAX_VALUE]
    return Candidate(
        place,
        parent.text[:keep] + _text(record["text"]),
        keep,
        _log(record["log_weight"]),
        _number(record["twist"]),
        bool(record["finished"]),
        _text(record["death"] or "") or None,
        {_text(name): _number(log_w) for name, log_w in record["attribution"].items()},
        values,
        bool(record["cut"]),
        carried=parent.finished,
    )


def _place(value: Any, among: Sequence[Any]) -> int:
    place = int(value)
    if not 0 <= place < len(among):
        raise ValueError(f"{place} is not below {len(among)}")
    return place


def _number(value: Any) -> float:
    number = float(value)
    if not abs(number) <= LARGEST:
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
    weights: list[float] = np.exp(np.asarray(log_weights) - total).tolist()
    return weights


class Recorder:
    """Recorder of every step of a run: `smc_steer(model, N, K, on_step=Recorder("run.jsonl"))`.

    Each line is written when its step ends. `llmppl.report.recording` describes the lines, which are also in `lines`.
    As a context manager, a recorder also writes how the run ended. A second run is a ValueError.

    Parameters
    ----------
    path : path of the file, optional
        By default the steps are kept in memory, for `posterior.show()`. An existing file is overwritten; OSError if it
        cannot be written. If writing fails later, as on a full disk, a warning says so, and the run continues.
    title : str, optional
        Title of the page.

    Examples
    --------
    >>> recorder, program = Recorder(title="Happy or sad"), ConstrainedText(lm, "He was", [" happy", " sad"])
    >>> particles = smc_steer(program, N=4, K=2, seed=0, on_step=recorder)
    >>> recorder.recording.title, len(recorder.recording.steps)
    ('Happy or sad', 2)
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, title: str = "") -> None:
        self.path = self._file = None if path is None else Path(path)
        self.title = text_of("title", title)
        self.lines = list[str]()
        self._index = 0
        self._before: list[_State] = []
        if self.path is not None:
            self.path.write_text("", encoding="utf-8")

    def __call__(self, step: Any) -> None:
        if step.index != self._index + 1:
            raise ValueError(
                f"{self!r} has recorded up to step {self._index} and is given step {step.index}: "
                "it records one run, from its first step on; make a Recorder for each run"
            )
        if step.index == 1:
            header = {
                "llmppl_trace": VERSION,
                "program": type(step.candidates[0]).__name__,
                "title": self.title,
            }
            prompts, messages = _prompts(step.candidates)
            self._write(json.dumps({**header, "prompts": prompts, "messages": messages}))
        now = [*map(_state, step.candidates)]
        candidates = []
        log_weights = step.candidate_log_weights.tolist()
        lines = zip(step.candidates, step.parents.tolist(), log_weights, now, strict=True)
        for candidate, parent, log_weight, state in lines:
            before = self._before[parent] if self._before else _State("", {}, {})
            candidates.append(_candidate_record(candidate, parent, log_weight, state, before))
        record = {
            "step": step.index,
            "candidates": candidates,
            "ancestors": step.ancestors.tolist(),
            "log_weights": step.log_chosen.tolist(),
            "log_ml": _null(step.log_ml),
        }
        for name in FIGURES:
            record[name] = getattr(step, name)
        self._write(json.dumps(record))
        self._index = step.index
        self._before = [now[i] for i in step.ancestors.tolist()]

    def go_on(self, lines: Sequence[str], particles: Sequence[Any]) -> None:
        """Continue the recording of a resumed run from its recorded lines and its particles."""
        for line in lines:
            self._write(line)
        self._index = max(len(lines) - 1, 0)
        self._before = [*map(_state, particles)]

    @property
    def recording(self) -> Recording:
        """The recording so far. ValueError before the first step."""
        if not self._index:
            raise ValueError(
                f"{self!r} has recorded no step: run smc_steer(model, N, K, on_step=recorder) first"
            )
        return parse(self.lines, repr(self))

    def __repr__(self) -> str:
        return f"Recorder({'' if self.path is None else repr(str(self.path))})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._write(json.dumps({"end": None if kind is None else kind.__name__}))

    def _write(self, line: str) -> None:
        self.lines.append(line)
        if self._file is None:
            return
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:  # a failed recording must not end the run
            self._file = None  # for good: no reader could read past a torn line
            message = f"the recording stops after step {self._index}, and the run goes on: {error.strerror or error}"
            warnings.warn(f"{self.path}: {message}", stacklevel=3)


class _State(NamedTuple):
    """Parts of a particle of which a recording has the changes."""

    text: str
    attribution: dict[str, float]
    values: dict[str, str]


def _state(particle: Any) -> _State:
    values = {}
    for name, value in vars(particle).items():
        if name[0] != "_" and isinstance(value, str | int | Enum):
            shown = str(getattr(value, "name", value))
            if len(shown) <= MAX_VALUE:
                values[name] = shown
    text = particle._drawn_text_ if particle.log_weight == -math.inf else str(particle)
    return _State(text, particle.attribution, values)


def _candidate_record(
    candidate: Any, parent: int, log_weight: float, now: _State, before: _State
) -> dict[str, Any]:
    keep = len(os.path.commonprefix([before.text, now.text]))
    death = None
    if log_weight == -math.inf:
        death = candidate.death or "weight zero"
    attribution = {}
    for name, total in now.attribution.items():
        added = total - before.attribution.get(name, 0.0)
        if added:
            attribution[name] = added
    return {
        "parent": parent,
        "keep": keep,
        "text": now.text[keep:],
        "log_weight": _null(log_weight),
        "twist": candidate.log_twist,
        "finished": candidate.finished and not death,
        "death": death,
        "attribution": attribution,
        "values": dict(sorted(now.values.items() - before.values.items())),
        "cut": candidate.cut,
    }


def _null(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _prompts(particles: Sequence[Any]) -> tuple[list[str], list[str]]:
    """Return the text in the contexts of the particles before their own text, and the last message of each.

    Both are empty if a context does not end with the particle's text.
    """
    found = []
    messages = list[str]()
    for particle in particles:
        text = str(particle)
        contexts = []
        for value in vars(particle).values():
            for each in value if isinstance(value, list | tuple) else [value]:
                if hasattr(each, "next_token") and hasattr(each, "tokens"):
                    contexts.append(each)
        if all(str(each.text).endswith(text) for each in contexts):
            found.append([str(each.text).removesuffix(text) for each in contexts])
            messages = messages or [_last_message(each.tokens, text) for each in contexts]
    prompts = []
    last = []
    for texts, message in zip(zip(*found, strict=False), messages, strict=False):
        common = os.path.commonprefix(texts)
        if common:
            if len({*texts}) > 1:
                common += "…"
            prompts.append(common)
            last.append(message)
    return prompts, last


def _last_message(tokens: Sequence[Any], text: str) -> str:
    """Return the last message of a conversation before the answer `text`; "" if the tokens are no conversation.

    Special tokens enclose messages. Most chat templates write a role between the last message and the answer.
    """
    parts = [b""]
    for token in tokens:
        if not token.bytes:
            parts.append(b"")
        parts[-1] += token.bytes
    *messages, role = (part.decode("utf-8", "replace") for part in parts)
    written = [*filter(str.strip, messages)]
    place = -2 if role.removesuffix(text).isspace() else -1  # the role may have a part of its own
    return "".join(written[place:][:1]).strip()
