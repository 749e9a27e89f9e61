"""Checkpoint: a file from which an interrupted run goes on, and ends as it would have ended.

It holds what the run was asked to do, and its state after a whole step: the choices of the particles, from which they
are made again, their weights and random streams, the genealogy, the deaths, and what a `Recorder` has recorded. It is
lines of JSON, and no code. What is there of earlier steps never changes, so a long run writes out each step once. The
last line is a digest of all others, and the file is replaced as a whole: it is that of a whole step, or none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmppl.inference.deaths import DEATH, Death
from llmppl.inference.genealogy import StepRecord
from llmppl.inference.resuming.choice_tree import Histories
from llmppl.inference.resuming.codec import Plain
from llmppl.inference.resuming.fingerprint import SHAPE, difference, identity
from llmppl.models.choices import Sampled
from llmppl.models.streams import State, bring_to, state_of, stream_of
from llmppl.support.arguments import mismatch, optional_count
from llmppl.support.arguments import path as path_of
from llmppl.support.files import Owned, null, parsed
from llmppl.support.locks import let_through

VERSION = 2
SHARE = 50                                              # the time between two writes, in writes
_LEFT = "It is left as it is"

_FORGED = ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError
_INDICES = {each.name for each in dataclasses.fields(StepRecord) if each.type == "Indices"}
_GROWING = "steps", "choices", "deaths", "recorded"     # what is only added to, and written once

_COUNT, _NUMBER = range(1 << 24), float | None
_FIGURE = {"Indices": [_COUNT], "Floats": [_NUMBER], "int": _COUNT, "float": _NUMBER}
_STEPS = {
    "steps": [{each.name: _FIGURE[str(each.type)] for each in dataclasses.fields(StepRecord)}], "choices": [list],
    "deaths": [DEATH], "recorded": [str],
}  # fmt: skip
_PARTICLE = {
    "at": int, "text": str, "log_weight": _NUMBER, "log_twist": float, "finished": bool, "cut": bool, "limit": str,
    "death": str | None, "attribution": {...: _NUMBER}, "stream": list,
}  # fmt: skip
_NOW = {"t": _COUNT, "stream": list, "roots": [_COUNT], "is_recorded": bool, "particles": [_PARTICLE]}


class Whole(NamedTuple):
    """The state of a run after a whole step, which no later step changes.

    particles : each, with its attributes then
    streams : the states of their streams, and `stream` that of the run's
    lengths : of what was only added to, by then
    """

    t: int
    particles: list[tuple[Any, dict[str, Any]]]
    streams: list[State]
    stream: State
    roots: Any
    lengths: dict[str, int]


class Checkpoint:
    """The checkpoint of one run. Make it and let it `begin` before the run goes on.

    Parameters
    ----------
    path : path of the file
    every : int, optional
        Steps from one write to the next; by default as many as keep writing below a fiftieth of the time.
    run : SMC
    model : Model
        Its program.
    on_step : callable, optional
        A `Recorder` has `lines`, what it has recorded, and `go_on(lines, particles)`.
    """

    def __init__(self, path: str | os.PathLike[str], every: int | None, run: Any, model: Any, on_step: Any) -> None:
        self.path, self._every = path_of("checkpoint", path), optional_count("every", every)
        self._run, self._model = run, model
        self._recorder = on_step if hasattr(on_step, "go_on") else None
        told, vocabularies = identity(model, expand=run.expand, select=run.select)
        self._told = {"llmppl_checkpoint": VERSION, **told, "stream": _written_state(run.began)}
        self._plain, self._histories = Plain(vocabularies), Histories()
        text = _line(self._told)
        self._kept = text, _digest(text), dict.fromkeys(_GROWING, 0)    # earlier lines, and how much they hold
        self._last, self._seconds, self._time = -1, 0.0, -math.inf

    def begin(self, max_steps: int | None) -> None:
        """Bring the run to where its checkpoint is, if there is one, else write the first.

        Raises
        ------
        ValueError
            If there is a file that is no checkpoint, or damaged, or of another run. It is left as it is.
        BlockingIOError
            If another run is writing it.
        OSError
            If it cannot be read, or written.
        """
        self._owned = Owned(self.path)
        if self._owned.descriptor < 0:
            self.note()
            self._write()
        else:
            self._resume(*_read(self.path, self.path.read_bytes()), max_steps)
            self.note()
            self._last, self._time = self._run.t, time.perf_counter()

    def close(self) -> None:
        """Let another run have the file."""
        if hasattr(self, "_owned"):
            self._owned.close()

    def note(self) -> None:
        """Look at the run after a whole step."""
        run, (t, particles) = self._run, self._run.whole
        streams = [state_of(particle.chooser.stream) for particle, _ in particles]
        lengths = {"steps": t, "deaths": len(run.deaths), "recorded": len(self._recorded())}
        self._whole = Whole(t, particles, streams, state_of(run.rng), run.genealogy.roots, lengths)

    def step(self) -> None:
        """A step is whole: note it, and write where that is due."""
        self.note()
        if self._every is not None:
            due = self._whole.t - self._last >= self._every
        else:
            due = time.perf_counter() - self._time >= SHARE * self._seconds
        if due:
            self._write()

    def end(self) -> None:
        """Write what was noted last, unless it is written."""
        if self._whole.t != self._last:
            self._write()

    def left(self, error: BaseException) -> None:
        """The same where an exception has ended the run, which is told if it cannot be done."""
        try:
            self.end()
        except Exception as own:
            if own is not error:
                let_through(own)
                error.add_note(f"{self.path} is that of step {self._last}: a later one could not be written: {own}")

    # ---- writing

    def _write(self) -> None:
        start = time.perf_counter()
        run, whole, (text, digest, written) = self._run, self._whole, self._kept
        places = [self._histories.add(attributes["_noted_"]) if "_noted_" in attributes else -1
                  for _, attributes in whole.particles]  # fmt: skip
        lengths = {**whole.lengths, "choices": len(self._histories.steps)}
        new = {name: slice(written[name], lengths[name]) for name in _GROWING}
        line = _line({
            "steps": list(map(_written_record, run.genealogy.records[new["steps"]])),
            "choices": [[place, self._items(items)] for place, items in self._histories.steps[new["choices"]]],
            "deaths": list(map(dataclasses.asdict, run.deaths[new["deaths"]])),
            "recorded": self._recorded()[new["recorded"]],
        })  # fmt: skip
        particles = zip(whole.particles, places, whole.streams, strict=True)
        now = _line({
            "t": whole.t, "stream": _written_state(whole.stream), "roots": whole.roots.tolist(),
            "is_recorded": self._recorder is not None, "particles": [_written(*each) for each in particles],
        })  # fmt: skip
        with self._owned.replacing() as file:
            digest = _digest(line, digest)
            file.writelines([text, line, now, _ending(_digest(now, digest))])
        self._kept, self._last = (text + line, digest, lengths), whole.t        # else it is written again
        self._time = time.perf_counter()
        self._seconds = self._time - start

    def _recorded(self) -> list[str]:
        return [] if self._recorder is None else self._recorder.lines

    def _items(self, items: Iterable[Any]) -> list[Any]:
        try:
            return [self._plain.write_item(item) for item in items]
        except TypeError as error:
            raise TypeError(
                f"{self.path} cannot hold what {type(self._model).__name__} sampled: {error}. Sample what stands for "
                "it, such as its name or its place in a list; what can be held are None, bools, numbers, texts, bytes, "
                "tokens, arrays of numbers, and tuples, lists, sets and dicts of these"
            ) from None

    # ---- reading

    def _resume(self, text: bytes, lines: list[dict[str, Any]], max_steps: int | None) -> None:
        run, (told, *past, now) = self._run, lines
        self._compare(told)
        t = now["t"]
        if run.t:
            raise self._refused(f"it is at step {t}, and this run has made {run.t} steps: a run goes on from its first")
        if max_steps is not None and t > max_steps:
            raise self._refused(f"it has made {t} steps, more than max_steps={max_steps}")
        if self._recorder is not None and not now["is_recorded"]:
            raise self._refused("it was made without the Recorder, which could not record all of its steps")
        grown = {name: [each for line in past for each in line[name]] for name in _GROWING}
        try:
            records = list(map(_read_record, grown["steps"]))
            roots = np.array(now["roots"], np.int64)
            _check_lineage(records, len(run.particles), t, roots, len(now["particles"]))
            choices = [(before, tuple(map(self._plain.read_item, items))) for before, items in grown["choices"]]
            if not all(-1 <= before < place for place, (before, _) in enumerate(choices)):
                raise ValueError("the choices of a step come before those of the step before")
            streams = [stream_of(_read_state(each["stream"])) for each in now["particles"]]
            if not all(-1 <= each["at"] < len(choices) for each in now["particles"]):
                raise ValueError("a particle has choices that are not there")
            if self._recorder is not None and len(grown["recorded"]) != (t + 1) * (t > 0):
                raise ValueError("its Recorder has recorded other steps")
            stream = _read_state(now["stream"])
            if run.seeded:
                bring_to(run.rng, stream)
            else:
                run.rng = stream_of(stream)
        except _FORGED as error:
            raise _damaged(self.path, f"{type(error).__name__}: {error}") from error
        self._histories = Histories(choices)
        particles = self._particles(now["particles"], streams)
        run.t, run.particles = t, particles
        run.genealogy.records, run.genealogy.roots = records, roots
        run.deaths = [Death(**death) for death in grown["deaths"]]
        run.keep_whole()
        if self._recorder is not None:
            self._recorder.go_on(grown["recorded"], particles)
        self._kept = text, _digest(text), {name: len(all_of_it) for name, all_of_it in grown.items()}

    def _compare(self, before: dict[str, Any]) -> None:
        now = json.loads(json.dumps(self._told))
        if not self._run.seeded:
            now["stream"] = before["stream"]
        if what := difference(before, now):
            raise self._refused(what)

    def _particles(self, written: list[dict[str, Any]], streams: list[Any]) -> list[Any]:
        """The particles made again, each as it was."""
        weighed = {each["at"]: bool(each["limit"] or each["death"]) for each in written}
        try:
            found = self._histories.particles(self._run.particles[0], weighed, self._run.replay)
            seen, particles = set[int](), []
            for each, made in zip(written, streams, strict=True):
                at, stream = each["at"], Sampled(made)
                particle = found[at]._spawn_(stream) if at in seen or at == -1 else found[at]
                seen.add(at)
                if (particle.s, particle.finished) != (each["text"], each["finished"]):
                    raise ValueError(f"it makes {str(particle.s)!r} of the choices that made {each['text']!r}")
                self._histories.keep(particle._noted_, at)
                now = {f"_{name}_": each[name] for name in ("log_twist", "cut", "limit", "death", "attribution")}
                now |= {"finished": each["finished"], "_log_weight_": _float(each["log_weight"]), "_chooser_": stream}
                vars(particle).update((name, value) for name, value in now.items() if getattr(particle, name) != value)
                particles.append(particle)
        except Exception as error:                      # also what the program raises for choices that it never made
            let_through(error)
            raise self._refused(str(error)) from error
        return particles

    def _refused(self, why: str) -> ValueError:
        return ValueError(
            f"{self.path} is the checkpoint of another run: {why}. {_LEFT}; ask for what it was made with, or give "
            "another path"
        )


def _read(path: Path, data: bytes) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the lines of a checkpoint that stay as they are, and all lines, read."""
    lines = data.splitlines(keepends=True)
    first = parsed(lines[0]) if lines else {}
    if "llmppl_checkpoint" not in first:
        raise ValueError(f"{path} is no checkpoint of llmppl. {_LEFT}; give another path")
    if first["llmppl_checkpoint"] != VERSION:
        raise ValueError(
            f"{path} has the format {first['llmppl_checkpoint']!r}, and this llmppl reads the format {VERSION}. "
            f"{_LEFT}; go on with the version that wrote it"
        )
    if lines[-1] != _ending(_digest(b"".join(lines[:-1]))):
        raise _damaged(path, "it does not end with the digest of its contents")
    told, *past, now = map(parsed, lines[:-1]) if len(lines) > 2 else ({}, {})
    wrong = [mismatch(told, {**SHAPE, "stream": list}, "the first line"), mismatch(now, _NOW, "the last line")]
    if found := next(filter(None, (*wrong, *(mismatch(each, _STEPS, "a line") for each in past))), ""):
        raise _damaged(path, found)
    return b"".join(lines[:-2]), [told, *past, now]


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is torn or damaged: {why}. {_LEFT}; remove it to begin anew")


def _check_lineage(records: list[StepRecord], n: int, t: int, roots: Any, size: int) -> None:
    """Raise an error unless the steps are those of a run that began with `n` particles and has `size` now."""
    ends = np.arange(n)
    for index, step in enumerate(records, 1):
        both = {len(getattr(step, name)) for name in ("parents", "groups", "log_starts", "log_kept", "copies")}
        last = {len(values) for values in (step.ancestors, step.log_chosen, step.log_survivors)}
        if {*both, len(step.candidate_log_weights)} != both or len(both) + len(last) != 2 or step.index != index:
            raise ValueError(f"step {index} has arrays of different lengths, or another number")
        ends = ends[step.parents[step.ancestors]]
    if len(records) != t or len(ends) != size or not np.array_equal(ends, roots):
        raise ValueError("its steps lead to other particles")


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _digest(text: bytes, before: Any = None) -> Any:
    """Return the digest of `text`, or of what comes before it as well."""
    digest = hashlib.blake2b(digest_size=16) if before is None else before.copy()
    digest.update(text)
    return digest


def _ending(digest: Any) -> bytes:
    return _line({"digest": digest.hexdigest()})


# ---- parts of lines


def _written(particle: tuple[Any, dict[str, Any]], place: int, stream: State) -> dict[str, Any]:
    cls, attributes = type(particle[0]), particle[1]

    def get(name: str) -> Any:
        return attributes[name] if name in attributes else getattr(cls, name)

    return {
        "at": place, "text": str(get("s")), "log_weight": null(float(get("_log_weight_"))),
        "log_twist": float(get("_log_twist_")), "finished": bool(get("finished")), "cut": bool(get("_cut_")),
        "limit": get("_limit_"), "death": get("_death_"), "attribution": get("_attribution_"),
        "stream": _written_state(stream),
    }  # fmt: skip


def _written_record(record: StepRecord) -> dict[str, Any]:
    return {
        name: list(map(null, value.tolist())) if isinstance(value, np.ndarray) else null(value)
        for name, value in vars(record).items()
    }


def _read_record(written: dict[str, Any]) -> StepRecord:
    fields: dict[str, Any] = {
        name: np.array(list(map(_float, value)), np.int64 if name in _INDICES else np.float64)
        if isinstance(value, list) else _float(value)
        for name, value in written.items()
    }  # fmt: skip
    return StepRecord(**fields)


def _written_state(state: State) -> list[Any]:
    entropy = state.entropy if isinstance(state.entropy, int) else list(map(int, state.entropy))
    return [*state._replace(entropy=entropy, state=Plain().write(state.state))]


def _read_state(written: list[Any]) -> State:
    kind, entropy, key, size, children, state = written
    return State(kind, entropy, tuple(key), size, children, Plain().read(state))


def _float(number: Any) -> Any:
    return -math.inf if number is None else number
