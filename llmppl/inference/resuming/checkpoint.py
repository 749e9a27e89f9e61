"""Checkpoint: a file from which an interrupted run continues, and ends as it would have ended.

The file is JSON, and no code. It contains the identity of the program, and the state of the run after a complete step:
particles, genealogy, deaths, streams, and the lines of a `Recorder`. A particle is its choices, from which it is
rebuilt, its weights, its stream, and a digest of its attributes, which the rebuilt particle must have. Particles share
most of their past: the choices of all are one tree of [place of the choice before, choice].
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from llmppl.constraints.vocabulary import EOS, Text, Token, Vocabulary
from llmppl.inference.genealogy import StepRecord
from llmppl.inference.particles import Death
from llmppl.models.choices import NOTHING, Choice, Noted, Replayed, Sampled, State, StreamState, state_of, stream_of
from llmppl.models.model import Model
from llmppl.support.arguments import optional_count
from llmppl.support.arguments import path as path_of
from llmppl.support.files import own, replace
from llmppl.support.shared import Shared
from llmppl.support.values import decode, describe, difference, encode, identity, parts_of

FORMAT = 3
SHARE = 50                                              # time between two writes, in durations of a write
_WEIGHTS = "_log_weight_", "_log_twist_", "_cut_", "_limit_", "_death_", "_attribution_", "finished"


class Checkpoint:
    """Checkpoint of one run, and an observer of it. Enter it as a context manager before the run begins.

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
        True if the caller has given the run its random stream, which the file must agree with.

    Raises
    ------
    ValueError
        If the file is no checkpoint, or is of another run. It is left as it is.
    BlockingIOError
        If another run is writing it.
    OSError
        If it cannot be read or written.
    """

    def __init__(
        self, path: str | os.PathLike[str], every: int | None, run: Any, model: Any, on_step: Any,
        max_steps: int | None, *, seeded: bool,
    ) -> None:  # fmt: skip
        self.path, self._every, self._max_steps = path_of("checkpoint", path), optional_count("every", every), max_steps
        self._run, self._model, self._seeded = run, model, seeded
        self._recorder = on_step if hasattr(on_step, "go_on") else None
        kind = type(model)
        attributes = {f"the attribute {name}": value for name, value in vars(model).items() if name[:1] != "_"}
        self._program = identity(kind.__qualname__, kind, **attributes, **_fields(expand=run.expand, select=run.select))
        self._first = encode(state_of(run.rng), self._encode)
        reached = [value for _, value in parts_of("", kind)]
        self._vocabularies = list(dict.fromkeys(_vocabularies([vars(model), reached])))
        self._written, self._seconds, self._time = -1, 0.0, -math.inf

    def __enter__(self) -> Self:
        self._lock = own(self.path)
        try:
            if self.path.exists() and self.path.stat().st_size:
                self._resume(self._read())
            self._capture()
            if self._written < 0:
                self._write()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def after(self, run: Any, record: object, candidates: object) -> None:
        """Capture a complete step, and write it if a write is due."""
        self._capture()
        waited = run.t - self._written, time.perf_counter() - self._time
        if (waited[1] >= SHARE * self._seconds) if self._every is None else (waited[0] >= self._every):
            self._write()

    def close(self, run: Any, error: BaseException | None) -> None:
        """Write the last complete step unless it is written. If `error` has ended the run, a failure is its note."""
        if run.t != self._state.t:                      # an observer raised after the step
            if self._recorder is not None and len(self._recorder.lines) != run.t + 1:       # it was the recorder
                return
            self._capture()
        if self._written == run.t:
            return
        try:
            self._write()
        except Exception as own_error:
            if error is None:
                raise
            error.add_note(f"{self.path} is that of step {self._written}: a later one was not written: {own_error}")

    # ---- writing

    def _capture(self) -> None:
        """Keep the parts of the state that the next step changes in place."""
        run = self._run
        lines = [] if self._recorder is None else self._recorder.lines
        streams = [state_of(particle.chooser.stream) for particle in run.particles]
        digests = [digest_of(particle) for particle in run.particles]
        self._state = _State(run.t, streams, digests, state_of(run.rng), run.genealogy.roots, len(lines))

    def _write(self) -> None:
        start, run, state = time.perf_counter(), self._run, self._state
        tree, places = list[Any](), dict[int, int]()
        particles = []
        for particle, stream, digest in zip(run.particles, state.streams, state.digests, strict=True):
            weights = {name: getattr(particle, name) for name in _WEIGHTS}
            place = _add(tree, places, particle._noted_)
            particles.append({"at": place, "weights": weights, "stream": stream, "digest": digest, "text": particle.s})
        contents = {
            "llmppl_checkpoint": FORMAT, "program": self._program, "t": state.t, "rng": state.rng,
            "roots": state.roots, "particles": particles, "choices": tree,
            "steps": [vars(record) for record in run.genealogy.records[: state.t]],
            "deaths": [vars(death) for death in run.deaths if death.step <= state.t],
            "recorded": None if self._recorder is None else self._recorder.lines[: state.num_lines],
        }  # fmt: skip
        try:
            data = json.dumps({**encode(contents, self._encode), "first": self._first}).encode()
        except TypeError as error:
            raise TypeError(
                f"{self.path} cannot hold what {type(self._model).__name__} sampled: {error}. Sample what stands for "
                "it, such as its name or its place in a list"
            ) from None
        replace(self.path, data)
        self._written, self._time = state.t, time.perf_counter()
        self._seconds = self._time - start

    def _encode(self, value: Any) -> Any:
        if isinstance(value, Token):
            if value.vocab not in self._vocabularies:
                raise TypeError(f"{value!r} is of a vocabulary that the program does not hold when it begins")
            return {"$token": [int(value), self._vocabularies.index(value.vocab)]}
        if isinstance(value, Text):
            return {"$text": value.bytes.hex()}
        if value is EOS:
            return {"$eos": True}
        if type(value) in _TUPLES:
            return {_TUPLES[type(value)]: encode([*value], self._encode)}
        raise TypeError(f"{value!r}, a {type(value).__qualname__}")

    # ---- reading

    def _decode(self, name: str, data: Any) -> Any:
        if name == "$token":
            return self._vocabularies[data[1]][data[0]]
        if name == "$text":
            return Text(bytes.fromhex(data))
        return EOS if name == "$eos" else _MAKE[name](*decode(data, self._decode))

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_bytes())
            if found["llmppl_checkpoint"] != FORMAT:
                raise ValueError(f"of the format {found['llmppl_checkpoint']}, and this is {FORMAT}")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            why = f"({error}), and is left as it is; give another path"
            raise ValueError(f"{self.path} is no checkpoint of this llmppl {why}") from None
        if why := difference(found["program"], self._program):
            raise self._mismatch(why)
        if self._seeded and found["first"] != self._first:
            raise self._mismatch(f"its random stream, of seed {found['first']['$state'][1]}, is another")
        if self._max_steps is not None and found["t"] > self._max_steps:
            raise self._mismatch(f"it has made {found['t']} steps, more than max_steps={self._max_steps}")
        if self._recorder is not None and found["recorded"] is None:
            raise self._mismatch("it was made without the Recorder, which could not record all of its steps")
        return {**decode(found, self._decode), "first": found["first"]}

    def _resume(self, found: dict[str, Any]) -> None:
        run, rng = self._run, found["rng"]
        notes = list[Noted]()
        for before, item in found["choices"]:
            notes.append(Noted(NOTHING if before < 0 else notes[before], item))
        written = found["particles"]
        steps = [(NOTHING if each["at"] < 0 else notes[each["at"]]).steps() for each in written]
        rebuilt = self._rebuild(steps, [each["weights"] for each in written])
        for i, (particle, each) in enumerate(zip(rebuilt, written, strict=True)):
            vars(particle).update(each["weights"])
            particle._chooser_ = Sampled(stream_of(each["stream"]))
            if not digest_of(particle).like(each["digest"]):
                raise self._mismatch(
                    f"at step {found['t']}, particle {i} is another one when it is rebuilt from its choices: "
                    f"{str(particle.s)!r}, and it was {str(each['text'])!r}. A step drew or read something beside "
                    "self.sample and self.rng, or the program is not the same"
                )
        if self._seeded:                                # the caller may go on with this object
            seed: Any = run.rng.bit_generator.seed_seq
            seed.spawn(max(rng.children - seed.n_children_spawned, 0))
            run.rng.bit_generator.state = rng.state
        else:
            run.rng, self._first = stream_of(rng), found["first"]
        run.t, run.particles, run.genealogy.roots = found["t"], rebuilt, found["roots"]
        run.genealogy.records = [StepRecord(**each) for each in found["steps"]]
        run.deaths[:] = [Death(**each) for each in found["deaths"]]
        if self._recorder is not None:
            self._recorder.go_on(found["recorded"], rebuilt)
        self._written, self._time = run.t, time.perf_counter()

    def _rebuild(self, steps: Sequence[Any], weights: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the particles that made these choices. Only the step in which a particle died is weighed again."""
        choosers = [Replayed(each, np.random.default_rng(0), weighs=False) for each in steps]
        particles = [self._model._spawn_(chooser) for chooser in choosers]

        def repeat(i: int) -> None:
            died = weights[i]["_death_"] is not None or bool(weights[i]["_limit_"])
            for t in range(len(steps[i])):
                choosers[i].weighs = died and t + 1 == len(steps[i])
                particles[i].step()
                choosers[i].end_step()

        names = [f"particle {i}, rebuilt from {self.path}" for i in range(len(steps))]
        try:
            self._run.runtime.run([lambda i=i: repeat(i) for i in range(len(steps))], names)
        except Exception as error:                      # the program may raise for choices that it never made
            raise self._mismatch(str(error)) from error
        return particles

    def _mismatch(self, why: str) -> ValueError:
        return ValueError(
            f"{self.path} is the checkpoint of another run: {why}. It is left as it is; ask for what it was made with, "
            "or give another path"
        )


class _State(NamedTuple):
    """Parts of the state of a run after a complete step that the next step changes in place."""

    t: int
    streams: list[State]
    digests: list[Digest]
    rng: State
    roots: Any
    num_lines: int


def _fields(**options: Any) -> dict[str, Any]:
    """Return options by name, and the fields of a dataclass each by its own name."""
    found = dict[str, Any]()
    for name, value in options.items():
        inner = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        found |= {f"{name}.{each.name}": getattr(value, each.name) for each in inner} or {name: value}
        found[name] = type(value).__qualname__ if inner else found[name]
    return found


def _add(tree: list[Any], places: dict[int, int], noted: Noted) -> int:
    """Add the choices of a particle to the tree, and return the place of the last one; -1 if it has made none."""
    new = list[Noted]()
    while noted.before is not None and id(noted) not in places:
        new.append(noted)
        noted = noted.before
    place = places.get(id(noted), -1)
    for each in reversed(new):
        tree.append([place, each.item])
        place = places[id(each)] = len(tree) - 1
    return place


def _vocabularies(value: Any, depth: int = 6) -> Iterator[Vocabulary]:
    """Yield the vocabularies inside a value: those of language models, contexts, and tokens."""
    if isinstance(value, Vocabulary):
        yield value
    elif isinstance(value, Mapping | list | tuple | set | frozenset) and depth:
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _vocabularies(each, depth - 1)
    elif hasattr(value, "vocab") or hasattr(value, "lm"):
        yield from _vocabularies(getattr(value, "vocab", None) or getattr(value.lm, "vocab", None), depth)
    elif depth and not isinstance(value, Shared | type) and hasattr(value, "__dict__"):
        yield from _vocabularies(vars(value), depth - 1)


# ---- the digest of a particle


class Digest(NamedTuple):
    """Contents of the attributes of a particle: a digest of all but their floats, a sum of these, and of their sizes.

    Another batch rounds floats in another way. So the sums of equal particles differ by up to a hundredth.
    """

    text: str
    total: float
    size: float

    def like(self, other: Digest) -> bool:
        return self.text == other.text and abs(self.total - other.total) <= 0.01 * (1.0 + self.size)


_TUPLES: dict[type, str] = {Choice: "$choice", StreamState: "$stream", State: "$state", Digest: "$digest"}
_MAKE = {name: make for make, name in _TUPLES.items()}


def digest_of(particle: Any) -> Digest:
    """Return the digest of the attributes of a particle, except those that its copies share and those of inference."""
    words, floats = list[str](), list[float]()
    _walk(particle, words, floats, [])
    numbers = np.array(floats)
    text = hashlib.blake2b("\0".join(words).encode("utf-8", "surrogatepass"), digest_size=10).hexdigest()
    weights = 1.0 + 1.0 / (2 + np.arange(numbers.size))             # so that the order of floats matters
    return Digest(text, float(numbers @ weights), float(np.abs(numbers) @ weights))


def _walk(value: Any, words: list[str], floats: list[float], inside: list[int]) -> None:
    """Append the contents of a value: its finite floats to `floats`, all else in words."""
    words.append(type(value).__qualname__)
    if isinstance(value, float) and math.isfinite(value):
        floats.append(float(value))
    elif isinstance(value, str | bytes | bool | int | float | complex | None):
        words.append(repr(int(value)) if isinstance(value, int) else getattr(value, "bytes", b"").hex() or repr(value))
    elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        array = np.asarray(value)
        finite = np.isfinite(array) if array.dtype.kind == "f" else np.zeros(array.shape, bool)
        floats += array[finite].astype(np.float64).tolist()
        words += [array.dtype.str, repr(array.shape), finite.tobytes().hex(), array[~finite].tobytes().hex()]
    elif id(value) in inside:
        words.append(f"{len(inside) - inside.index(id(value))} up")
    elif isinstance(value, Mapping):
        for each in value.items():
            _walk_all(each, words, floats, [*inside, id(value)])
    elif isinstance(value, list | tuple):
        _walk_all(value, words, floats, [*inside, id(value)])
    elif hasattr(type(value), "detach") and hasattr(type(value), "cpu"):        # a tensor
        _walk(value.detach().cpu().double().numpy(), words, floats, inside)
    elif hasattr(value, "next_token") and hasattr(value, "tokens"):             # a context
        words.append(repr([int(token) for token in value.tokens]))
    elif not isinstance(value, Shared | type):
        _walk_all(_reduced(value), words, floats, [*inside, id(value)])


def _walk_all(values: Any, words: list[str], floats: list[float], inside: list[int]) -> None:
    for each in values:
        _walk(each, words, floats, inside)


def _reduced(value: Any) -> list[Any]:
    """Return the parts of the pickle of an object; none if it has no pickle, as a function or a lock."""
    if isinstance(value, set | frozenset):
        return sorted(map(describe, value))
    if isinstance(value, Model):
        left_out = {"finished"}.union(*(vars(base).get("shared", ()) for base in type(value).__mro__))
        return [part for part in sorted(vars(value).items()) if part[0] not in left_out and part[0][-1:] != "_"]
    if isinstance(value, np.random.Generator):
        return [] if hasattr(value, "particle") else [value.bit_generator.state]
    try:
        made = value.__reduce_ex__(4)
    except Exception:
        return []
    parts = [made] if isinstance(made, str) else made[1:]
    return [list(each) if isinstance(each, Iterator) else each for each in parts]
