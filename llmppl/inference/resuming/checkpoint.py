"""Checkpoint: a file from which a run continues, and ends as it would have ended.

The file is JSON, and no code. It contains the identity of the program, and the state of the run after a complete step:
particles, records of steps, deaths, streams, and the lines of a `Recorder`. A particle is its choices, from which it is
rebuilt, its weights, its stream, and a digest of its attributes, which the rebuilt particle must have. Particles share
most of their past: the choices of all are one tree of [place of the choice before, choice].
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from llmppl.constraints.vocabulary import EOS, Text, Token, Vocabulary
from llmppl.inference.detached import Digest, digest_of
from llmppl.inference.genealogy import StepRecord
from llmppl.inference.particles import Death
from llmppl.models.choices import NOTHING, Choice, Noted, Replayed, Sampled, State, state_of, stream_of
from llmppl.support.arguments import optional_count
from llmppl.support.arguments import path as path_of
from llmppl.support.files import own, replace
from llmppl.support.shared import Shared
from llmppl.support.values import decode, describe, difference, encode, identity, parts_of

FORMAT = 7
SHARE = 50                                              # time between two writes, in durations of a write
_WEIGHTS = (
    "_log_weight_", "_log_twist_", "_power_", "_cut_", "_limit_", "_death_", "_attribution_", "finished"
)  # fmt: skip
_TUPLES: dict[str, Any] = {"$Choice": Choice, "$State": State}


class Checkpoint:
    """Checkpoint of one run, and an observer of it. Enter it as a context manager before the run begins.

    Entering brings the run to the state in the file, or writes a first checkpoint if there is none.

    Parameters
    ----------
    path, every, on_step, max_steps : as in `smc_steer`
        If `on_step` is a `Recorder`, it goes on from the lines in the file.
    run, model : SMC, and its program
    seeded : bool
        True if the caller has given the run its random stream, which the file must agree with.

    Raises
    ------
    ValueError
        If the file is no checkpoint, or is of another run. It is left as it is.
    OSError
        If it cannot be read or written; BlockingIOError if another run is writing it.
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
        options = {"expand": describe(run.expand), "select": describe(run.select), "power": run.power}
        self._program = identity(kind.__qualname__, kind, **attributes, **options)
        self._first = encode(state_of(run.rng), self._encode)
        self._vocabularies = [*dict.fromkeys(_vocabularies([vars(model), [each for _, each in parts_of("", kind)]]))]

    def __enter__(self) -> Self:
        self._lock = own(self.path)
        try:
            if self.path.exists():
                self._resume(self._read())
            else:
                self._write()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __call__(self, run: Any, record: object, candidates: object) -> None:
        """Write a complete step if a write is due."""
        waited = time.perf_counter() - self._time
        due = waited >= SHARE * self._seconds if self._every is None else run.t - self._written >= self._every
        if due or not run.active or run.t == self._max_steps:
            self._write()

    # ---- writing

    def _write(self) -> None:
        start, run = time.perf_counter(), self._run
        tree, places, particles = list[Any](), dict[int, int](), list[Any]()
        for particle in run.particles:
            weights = {name: getattr(particle, name) for name in _WEIGHTS}
            at, stream = _add(tree, places, particle._noted_), state_of(particle.chooser.stream)
            digest = [*digest_of(particle)]
            particles.append({"at": at, "weights": weights, "stream": stream, "digest": digest, "text": particle.s})
        contents = {
            "llmppl_checkpoint": FORMAT, "program": self._program, "t": run.t, "rng": state_of(run.rng),
            "particles": particles, "choices": tree, "steps": [vars(record) for record in run.records],
            "deaths": [vars(each) for each in run.deaths],
            "recorded": None if self._recorder is None else self._recorder.lines,
        }  # fmt: skip
        try:
            data = json.dumps({**encode(contents, self._encode), "first": self._first}).encode()
        except TypeError as error:
            raise TypeError(
                f"{self.path} cannot hold what {type(self._model).__name__} sampled: {error}. Sample what stands for "
                "it, such as its name or its place in a list"
            ) from None
        replace(self.path, data)
        self._written, self._time = run.t, time.perf_counter()
        self._seconds = self._time - start

    def _encode(self, value: Any) -> Any:
        if isinstance(value, Token) and value.vocab in self._vocabularies:
            return {"$token": [int(value), self._vocabularies.index(value.vocab)]}
        if isinstance(value, Text):
            return {"$text": value.bytes.hex()}
        if value is EOS:
            return {"$eos": True}
        name = f"${type(value).__name__}"
        if name not in _TUPLES:
            raise TypeError(f"{value!r}, a {name[1:]}{' of another vocabulary' * isinstance(value, Token)}")
        return {name: encode([*value], self._encode)}

    # ---- reading

    def _decode(self, name: str, data: Any) -> Any:
        if name == "$token":
            return self._vocabularies[data[1]][data[0]]
        if name == "$text":
            return Text(bytes.fromhex(data))
        return EOS if name == "$eos" else _TUPLES[name](*decode(data, self._decode))

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
            raise self._mismatch(f"its random stream, of seed {found['first']['$State'][1]}, is another")
        if self._max_steps is not None and found["t"] > self._max_steps:
            raise self._mismatch(f"it has made {found['t']} steps, more than max_steps={self._max_steps}")
        if self._recorder is not None and found["recorded"] is None:
            raise self._mismatch("it was made without the Recorder, which could not record all of its steps")
        return {**decode(found, self._decode), "first": found["first"]}

    def _resume(self, found: dict[str, Any]) -> None:
        run, rng, notes = self._run, found["rng"], [NOTHING]        # NOTHING stands at the place -1
        for before, item in found["choices"]:
            notes.insert(-1, Noted(notes[before], item))
        rebuilt = self._rebuild([notes[each["at"]].steps() for each in found["particles"]], found["particles"])
        for i, (particle, each) in enumerate(zip(rebuilt, found["particles"], strict=True)):
            vars(particle).update(each["weights"])
            particle._chooser_ = Sampled(each["stream"])
            if not digest_of(particle).like(Digest(*each["digest"])):
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
        run.t, run.particles, run.records = found["t"], rebuilt, [StepRecord(**each) for each in found["steps"]]
        run.deaths[:] = [Death(**each) for each in found["deaths"]]
        if self._recorder is not None:
            self._recorder.go_on(found["recorded"], rebuilt)
        self._written, self._time, self._seconds = run.t, time.perf_counter(), 0.0

    def _rebuild(self, steps: Sequence[Any], written: Sequence[Any]) -> list[Any]:
        """Return the particles that made these choices. Only a step that reached the model's limit is weighed again."""
        choosers = [Replayed(each, np.random.default_rng(0), weighs=False) for each in steps]
        particles = [self._model._spawn_(chooser) for chooser in choosers]
        for particle in particles:
            particle._origin_ = self._model

        def repeat(i: int) -> None:
            for t in range(1, len(steps[i]) + 1):
                choosers[i].weighs = bool(written[i]["weights"]["_limit_"]) and t == len(steps[i])
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
    found = getattr(getattr(value, "lm", value), "vocab", value)
    if isinstance(found, Vocabulary):
        yield found
    elif depth and not isinstance(value, Shared | type):
        held = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        for each in value if isinstance(value, list | tuple | set | frozenset) else held.values():
            yield from _vocabularies(each, depth - 1)
