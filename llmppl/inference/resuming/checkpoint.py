"""Checkpoint: a file from which an interrupted run continues, and ends as it would have ended.

The file contains the arguments of the run and its state after a complete step: particles, genealogy, deaths, and the
lines of a `Recorder`. A particle is rebuilt from its choices, weight and random stream. The file is lines of JSON, and
no code. The record of an earlier step never changes, so a long run encodes each step once. The last
line is a digest of all others. The file is replaced as a whole, so it always belongs to a complete step.
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
from typing import Any, NamedTuple, Self

import numpy as np

from llmppl.inference.deaths import DEATH, Death
from llmppl.inference.genealogy import StepRecord
from llmppl.inference.resuming.choice_tree import ChoiceTree
from llmppl.inference.resuming.codec import (
    ValueCodec,
    decode_number,
    decode_record,
    decode_stream,
    encode_record,
    encode_stream,
)
from llmppl.inference.resuming.files import Owned, null, parsed
from llmppl.inference.resuming.fingerprint import SHAPE, difference, identity
from llmppl.models.choices import Sampled, State, state_of, stream_of
from llmppl.support.arguments import mismatch, optional_count
from llmppl.support.arguments import path as path_of
from llmppl.support.locks import let_through

VERSION = 2
SHARE = 50                                              # time between two writes, in durations of a write
_LEFT = "It is left as it is"

_FORGED = ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError
_GROWING = "steps", "choices", "deaths", "recorded"     # lists that only grow; each entry is encoded once

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


class Snapshot(NamedTuple):
    """State of a run after a complete step, which no later step changes.

    particles : the particles, each with its attributes at that time
    streams : states of the streams of the particles; `stream` is that of the run
    lengths : lengths of the growing lists at that time
    """

    t: int
    particles: list[tuple[Any, dict[str, Any]]]
    streams: list[State]
    stream: State
    roots: Any
    lengths: dict[str, int]


class _Written(NamedTuple):
    """Lines that stay as they are, their digest, and the lengths of the growing lists in them."""

    text: bytes
    digest: Any
    lengths: dict[str, int]


class Checkpoint:
    """Checkpoint of one run. Enter it as a context manager before the run continues.

    Entering brings the run to the state in the file, or writes a first checkpoint if there is none.

    Parameters
    ----------
    path : path of the file
    every : int, optional
        Number of steps between two writes; by default as many as keep the time of writing below a fiftieth.
    run : SMC
    model : Model
        Its program.
    on_step : callable, optional
        A `Recorder` has `lines`, its recording so far, and `go_on(lines, particles)`.
    max_steps : int, optional
        Bound of the run.
    seeded : bool
        True if the run was given a seed or a stream.

    Raises
    ------
    ValueError
        If the file is no checkpoint, is damaged, or is of another run. It is left as it is.
    BlockingIOError
        If another run is writing it.
    OSError
        If it cannot be read or written.
    """

    def __init__(
        self, path: str | os.PathLike[str], every: int | None, run: Any, model: Any, on_step: Any,
        max_steps: int | None, *, seeded: bool,
    ) -> None:  # fmt: skip
        self._seeded = seeded
        self.path, self._every, self._max_steps = path_of("checkpoint", path), optional_count("every", every), max_steps
        self._run, self._model = run, model
        self._recorder = on_step if hasattr(on_step, "go_on") else None
        program, vocabularies = identity(model, expand=run.expand, select=run.select)
        self._header = {"llmppl_checkpoint": VERSION, **program, "stream": encode_stream(state_of(run.rng))}
        self._codec, self._tree = ValueCodec(vocabularies), ChoiceTree()
        text = _line(self._header)
        self._written = _Written(text, _digest(text), dict.fromkeys(_GROWING, 0))
        self._last, self._seconds, self._time = -1, 0.0, -math.inf

    def __enter__(self) -> Self:
        self._owned = Owned(self.path)
        try:
            if self._owned.descriptor < 0:
                self.capture()
                self._write()
            else:
                self._resume(*_read(self.path, self.path.read_bytes()))
                self.capture()
                self._last, self._time = self._run.t, time.perf_counter()
        except BaseException:
            self._owned.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._owned.close()

    def capture(self) -> None:
        """Take the state of the run after a complete step."""
        run, (t, particles) = self._run, self._run._snapshot
        streams = [state_of(particle.chooser.stream) for particle, _ in particles]
        lengths = {"steps": t, "deaths": len(run.deaths), "recorded": len(self._recorded())}
        self._snapshot = Snapshot(t, particles, streams, state_of(run.rng), run.genealogy.roots, lengths)

    def after(self, run: Any, record: Any, candidates: Any) -> None:
        """Capture a complete step, and write it if a write is due."""
        self.capture()
        if self._every is not None:
            due = self._snapshot.t - self._last >= self._every
        else:
            due = time.perf_counter() - self._time >= SHARE * self._seconds
        if due:
            self._write()

    def close(self, run: Any, error: BaseException | None) -> None:
        """Write the last complete step unless it is written."""
        if error is not None:
            self.on_error(error)
        elif self._snapshot.t != self._last:
            self._write()

    def on_error(self, error: BaseException) -> None:
        """Write the captured step after an exception that ended the run. Add a note to it if that fails."""
        try:
            self.close(self._run, None)
        except Exception as own:
            if own is not error:
                let_through(own)
                error.add_note(f"{self.path} is that of step {self._last}: a later one could not be written: {own}")

    # ---- writing

    def _write(self) -> None:
        start = time.perf_counter()
        run, snapshot, (text, digest, written) = self._run, self._snapshot, self._written
        places = [
            self._tree.add(attributes["_noted_"]) if "_noted_" in attributes else -1
            for _, attributes in snapshot.particles
        ]
        lengths = {**snapshot.lengths, "choices": len(self._tree.steps)}
        new = {name: slice(written[name], lengths[name]) for name in _GROWING}
        line = _line({
            "steps": list(map(encode_record, run.genealogy.records[new["steps"]])),
            "choices": [[place, self._encode_items(items)] for place, items in self._tree.steps[new["choices"]]],
            "deaths": list(map(dataclasses.asdict, run.deaths[new["deaths"]])),
            "recorded": self._recorded()[new["recorded"]],
        })  # fmt: skip
        particles = map(_encode_particle, snapshot.particles, places, snapshot.streams)
        now = _line({
            "t": snapshot.t, "stream": encode_stream(snapshot.stream), "roots": snapshot.roots.tolist(),
            "is_recorded": self._recorder is not None, "particles": list(particles),
        })  # fmt: skip
        with self._owned.replacing() as file:
            digest = _digest(line, digest)
            file.writelines([text, line, now, _ending(_digest(now, digest))])
        self._written, self._last = _Written(text + line, digest, lengths), snapshot.t
        self._time = time.perf_counter()
        self._seconds = self._time - start

    def _recorded(self) -> list[str]:
        return [] if self._recorder is None else self._recorder.lines

    def _encode_items(self, items: Iterable[Any]) -> list[Any]:
        try:
            return list(map(self._codec.encode_item, items))
        except TypeError as error:
            raise TypeError(
                f"{self.path} cannot hold what {type(self._model).__name__} sampled: {error}. Sample what stands for "
                "it, such as its name or its place in a list; what can be held are None, bools, numbers, texts, bytes, "
                "tokens, arrays of numbers, and tuples, lists, sets and dicts of these"
            ) from None

    # ---- reading

    def _resume(self, text: bytes, lines: list[dict[str, Any]]) -> None:
        run, (header, *past, now) = self._run, lines
        self._check_same_run(header, now)
        lists = {name: [each for line in past for each in line[name]] for name in _GROWING}
        particles = now["particles"]
        try:
            records = list(map(decode_record, lists["steps"]))
            roots = np.array(now["roots"], np.int64)
            _check_lineage(records, len(run.particles), now["t"], roots, len(particles))
            choices = [(before, tuple(map(self._codec.decode_item, items))) for before, items in lists["choices"]]
            if not all(-1 <= before < place for place, (before, _) in enumerate(choices)):
                raise ValueError("the choices of a step come before those of the step before")
            streams = [stream_of(decode_stream(each["stream"])) for each in particles]
            if not all(-1 <= each["at"] < len(choices) for each in particles):
                raise ValueError("a particle has choices that are not there")
            if self._recorder is not None and len(lists["recorded"]) != (now["t"] + 1) * (now["t"] > 0):
                raise ValueError("its Recorder has recorded other steps")
            stream = decode_stream(now["stream"])
            if self._seeded:
                bring_to(run.rng, stream)
            else:
                run.rng = stream_of(stream)
        except _FORGED as error:
            raise _damaged(self.path, f"{type(error).__name__}: {error}") from error
        self._tree = ChoiceTree(choices)
        run.t, run.particles = now["t"], self._rebuild(particles, streams)
        run.genealogy.records, run.genealogy.roots = records, roots
        run.deaths = [Death(**death) for death in lists["deaths"]]
        run._take_snapshot()
        if self._recorder is not None:
            self._recorder.go_on(lists["recorded"], run.particles)
        self._written = _Written(text, _digest(text), {name: len(values) for name, values in lists.items()})

    def _check_same_run(self, before: dict[str, Any], state: dict[str, Any]) -> None:
        """Raise a ValueError unless the file is of this run, which can continue from it."""
        now, t = json.loads(json.dumps(self._header)), state["t"]
        if not self._seeded:
            now["stream"] = before["stream"]
        if found := difference(before, now):
            raise self._mismatch(found)
        made = self._run.t
        if made:
            raise self._mismatch(f"it is at step {t}, and this run has made {made} steps: a run goes on from its first")
        if self._max_steps is not None and t > self._max_steps:
            raise self._mismatch(f"it has made {t} steps, more than max_steps={self._max_steps}")
        if self._recorder is not None and not state["is_recorded"]:
            raise self._mismatch("it was made without the Recorder, which could not record all of its steps")

    def _rebuild(self, written: list[dict[str, Any]], streams: list[Any]) -> list[Any]:
        """Return the particles in the state in which they were written."""
        weighed = {each["at"]: bool(each["limit"] or each["death"]) for each in written}
        seen, particles = set[int](), []
        try:
            found = self._tree.particles(self._run.particles[0], weighed, self._run.runtime.run)
            for each, stream in zip(written, streams, strict=True):
                at, chooser = each["at"], Sampled(stream)
                particle = found[at]._spawn_(chooser) if at in seen or at == -1 else found[at]
                seen.add(at)
                if (particle.s, particle.finished) != (each["text"], each["finished"]):
                    raise ValueError(f"it makes {str(particle.s)!r} of the choices that made {each['text']!r}")
                self._tree.set_place(particle._noted_, at)
                now = {f"_{name}_": each[name] for name in ("log_twist", "cut", "limit", "death", "attribution")}
                now |= {"finished": each["finished"], "_log_weight_": decode_number(each["log_weight"])}
                now["_chooser_"] = chooser
                vars(particle).update((name, value) for name, value in now.items() if getattr(particle, name) != value)
                particles.append(particle)
        except Exception as error:                      # the program may raise for choices that it never made
            let_through(error)
            raise self._mismatch(str(error)) from error
        return particles

    def _mismatch(self, why: str) -> ValueError:
        return ValueError(
            f"{self.path} is the checkpoint of another run: {why}. {_LEFT}; ask for what it was made with, or give "
            "another path"
        )


def _read(path: Path, data: bytes) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the lines of a checkpoint that stay as they are, and the contents of all lines."""
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
    header, *past, now = map(parsed, lines[:-1]) if len(lines) > 2 else ({}, {})
    wrong = [mismatch(header, {**SHAPE, "stream": list}, "the first line"), mismatch(now, _NOW, "the last line")]
    if found := next(filter(None, (*wrong, *(mismatch(each, _STEPS, "a line") for each in past))), ""):
        raise _damaged(path, found)
    return b"".join(lines[:-2]), [header, *past, now]


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is torn or damaged: {why}. {_LEFT}; remove it to begin anew")


def _check_lineage(records: list[StepRecord], n: int, t: int, roots: Any, size: int) -> None:
    """Raise an error unless the steps are those of a run that began with `n` particles and has `size` now."""
    ends = np.arange(n)
    for index, step in enumerate(records, 1):
        of_candidates = {len(getattr(step, name)) for name in ("parents", "groups", "log_starts", "log_kept", "copies")}
        of_survivors = {len(values) for values in (step.ancestors, step.log_chosen, step.log_survivors)}
        of_candidates.add(len(step.candidate_log_weights))
        if len(of_candidates) + len(of_survivors) != 2 or step.index != index:
            raise ValueError(f"step {index} has arrays of different lengths, or another number")
        ends = ends[step.parents[step.ancestors]]
    if len(records) != t or len(ends) != size or not np.array_equal(ends, roots):
        raise ValueError("its steps lead to other particles")


def _encode_particle(particle: tuple[Any, dict[str, Any]], place: int, stream: State) -> dict[str, Any]:
    cls, attributes = type(particle[0]), particle[1]

    def get(name: str) -> Any:
        return attributes[name] if name in attributes else getattr(cls, name)

    return {
        "at": place, "text": str(get("s")), "log_weight": null(float(get("_log_weight_"))),
        "log_twist": float(get("_log_twist_")), "finished": bool(get("finished")), "cut": bool(get("_cut_")),
        "limit": get("_limit_"), "death": get("_death_"), "attribution": get("_attribution_"),
        "stream": encode_stream(stream),
    }  # fmt: skip


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _digest(text: bytes, before: Any = None) -> Any:
    """Return the digest of `text`, or of it after the text of the digest `before`."""
    digest = hashlib.blake2b(digest_size=16) if before is None else before.copy()
    digest.update(text)
    return digest


def _ending(digest: Any) -> bytes:
    return _line({"digest": digest.hexdigest()})


def bring_to(stream: np.random.Generator, state: State) -> None:
    """Advance `stream` to a later state of its own."""
    seed: Any = stream.bit_generator.seed_seq
    seed.spawn(max(0, state.children - seed.n_children_spawned))
    stream.bit_generator.state = state.state
