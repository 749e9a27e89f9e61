"""Checkpoint: a file from which a run continues, and ends as it would have ended.

The file is JSON, and no code. It contains the identity of the run, and its state after a complete step: particles,
records of steps, deaths, streams, and the lines of a `Recorder`. A particle is its choices, from which it is rebuilt,
its weights, its stream, and its text, which the rebuilt particle must have. Particles share most of their past: the
choices of all are one tree of [place of the choice before, choice]. The file begins with its format and the digest of
all that follows.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from llmppl.constraints.vocabulary import EOS, Text, Token, Vocabulary, loaded_vocabulary
from llmppl.inference.genealogy import StepRecord
from llmppl.inference.particles import Death
from llmppl.models.choices import (
    NOTHING,
    Choice,
    Noted,
    Replayed,
    Sampled,
    State,
    state_of,
    stream_of,
)
from llmppl.support.arguments import optional_count, shown
from llmppl.support.arguments import path as path_of
from llmppl.support.files import Owned
from llmppl.support.identity import difference, identity
from llmppl.support.values import decode, encode

FORMAT = 9
WRITERS = {8: "llmppl 0.3", 7: "llmppl 0.2"}  # of earlier formats; those of llmppl 0.1 are below
SHARE = 50  # time between two writes, in durations of a write
_WEIGHTS = (
    "_log_weight_",
    "_log_twist_",
    "_power_",
    "_cut_",
    "_limit_",
    "_death_",
    "_attribution_",
    "finished",
)
_TUPLES: dict[str, Any] = {"$Choice": Choice, "$State": State}
_HEAD = re.compile(rb'\{"llmppl_checkpoint": ?(\d{1,9})(?:, "digest": "(\w+)", )?')


class Checkpoint:
    """Checkpoint of one run, and an observer of it. Enter it as a context manager before the run begins.

    Entering brings the run to the state in the file, or writes a first checkpoint if there is none.

    Parameters
    ----------
    path : path of the file
    run, model : SMC, and its program
    options : dict, those of `smc_steer`
        If `on_step` is a `Recorder`, it goes on from the lines in the file. If `seed` or `rng` is given, the file must
        agree with the random stream of the run.

    Raises
    ------
    ValueError
        If the file is damaged, no checkpoint, or of another run. It is left as it is.
    OSError
        If it cannot be read or written, or was deleted or replaced; BlockingIOError if another run is writing it.
    """

    def __init__(
        self, path: str | os.PathLike[str], run: Any, model: Any, options: Mapping[str, Any]
    ) -> None:
        self.path = path_of("checkpoint", path)
        self._run = run
        self._model = model
        self._every = optional_count("every", options.get("every"))
        self._max_steps = options.get("max_steps")
        resume = options.get("resume", True)
        if resume not in (True, "force"):
            raise ValueError(
                f'resume must be True or "force", not {shown(resume)}; another path begins anew'
            )
        self._is_forced = resume == "force"
        self._is_seeded = options.get("seed") is not None or options.get("rng") is not None
        on_step = options.get("on_step")
        self._recorder = on_step if hasattr(on_step, "go_on") else None
        parameters = {
            "expand": type(run.expand).__name__,
            "select": type(run.select).__name__,
            "power": run.power,
        }
        for name, value in {**vars(run.expand), **vars(run.select)}.items():
            parameters[name] = getattr(value, "__name__", value)
        self._identity = identity(model, options.get("version", ""), **parameters)
        self._numbers = dict[str, int]()  # of vocabularies, by digest
        self._digests = list[str]()  # of the vocabularies of the file
        self._first = encode(state_of(run.rng), self._encode)

    def __enter__(self) -> Self:
        self._file = Owned(self.path)
        try:
            if self.path.exists():
                self._resume(self._read())
            else:
                self._write()
        except BaseException:
            self._file.release()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._file.release()

    def __call__(self, run: Any, record: object, candidates: object) -> None:
        """Write a complete step if a write is due."""
        waited = time.perf_counter() - self._time
        due = (
            waited >= SHARE * self._seconds
            if self._every is None
            else run.t - self._written >= self._every
        )
        if due or not run.active or run.t == self._max_steps:
            self._write()

    # ---- writing

    def _write(self) -> None:
        start = time.perf_counter()
        run = self._run
        tree = list[Any]()
        places = dict[int, int]()
        particles = []
        for particle in run.particles:
            weights = {name: getattr(particle, name) for name in _WEIGHTS}
            at = _add(tree, places, particle._noted_)
            stream = state_of(particle.chooser.stream)
            particles.append({"at": at, "weights": weights, "stream": stream, "text": particle.s})
        contents = {
            "identity": self._identity,
            "t": run.t,
            "rng": state_of(run.rng),
            "family": run.family,
            "particles": particles,
            "choices": tree,
            "steps": list(map(vars, run.records)),
            "deaths": list(map(vars, run.deaths)),
            "recorded": None if self._recorder is None else self._recorder.lines,
        }
        try:
            encoded = encode(contents, self._encode)
        except TypeError as error:
            raise TypeError(
                f"{self.path} cannot hold what {type(self._model).__name__} sampled: {error}. Sample what stands for "
                "it, such as its name or its place in a list"
            ) from None
        rest = json.dumps({**encoded, "first": self._first, "vocabularies": [*self._numbers]})[
            1:
        ].encode()
        head = f'{{"llmppl_checkpoint": {FORMAT}, "digest": "{_digest(rest)}", '
        self._file.replace(head.encode() + rest)
        self._written = run.t
        self._time = time.perf_counter()
        self._seconds = self._time - start

    def _encode(self, value: Any) -> Any:
        if isinstance(value, Token):
            number = self._numbers.setdefault(value.vocab.digest.hex(), len(self._numbers))
            return {"$token": [int(value), number]}
        if isinstance(value, Text):
            return {"$text": value.bytes.hex()}
        if value is EOS:
            return {"$eos": True}
        name = f"${type(value).__name__}"
        if name not in _TUPLES:
            raise TypeError(f"{shown(value)}, a {name[1:]}")
        return {name: encode([*value], self._encode)}

    # ---- reading

    def _decode(self, name: str, data: Any) -> Any:
        if name == "$token":
            return self._vocabulary(data[1])[data[0]]
        if name == "$text":
            return Text(bytes.fromhex(data))
        return EOS if name == "$eos" else _TUPLES[name](*decode(data, self._decode))

    def _vocabulary(self, number: int) -> Vocabulary:
        try:
            return loaded_vocabulary(self._digests[number])
        except LookupError:
            raise self._mismatch("its tokens are not those of this language model") from None

    def _read(self) -> dict[str, Any]:
        found = _parsed(self.path, self._file.read())
        why = difference(found["identity"], self._identity)
        if not why and self._is_seeded and found["first"] != self._first:
            why = f"its random stream, of seed {found['first']['$State'][1]}, is another"
        if why and not self._is_forced:
            raise self._mismatch(why)
        if self._max_steps is not None and found["t"] > self._max_steps:
            raise self._mismatch(
                f"it has made {found['t']} steps, more than max_steps={self._max_steps}"
            )
        if self._recorder is not None and found["recorded"] is None:
            raise self._mismatch(
                "it was made without the Recorder, which could not record all of its steps"
            )
        self._digests = found["vocabularies"]
        choices = found.pop("choices")  # decoded when the program makes them
        first = found.pop("first")  # compared as it is
        return {**decode(found, self._decode), "choices": choices, "first": first}

    def _resume(self, found: dict[str, Any]) -> None:
        run = self._run
        rng = found["rng"]
        notes = [NOTHING]  # NOTHING stands at the place -1
        for before, item in found["choices"]:
            notes.insert(-1, Noted(notes[before], item))
        rebuilt = self._rebuild(
            [notes[each["at"]].steps() for each in found["particles"]], found["particles"]
        )
        for i, (particle, each) in enumerate(zip(rebuilt, found["particles"], strict=True)):
            if particle.s != each["text"] and not self._is_forced:
                raise self._mismatch(
                    f"at step {found['t']}, particle {i} is another one when it is rebuilt from its choices: "
                    f"{str(particle.s)!r}, and it was {str(each['text'])!r}. A step drew or read something beside "
                    "self.sample and self.rng, or the program is not the same"
                )
            vars(particle).update(each["weights"])
            particle._chooser_ = Sampled(each["stream"])
        if (
            self._is_seeded and found["first"] == self._first
        ):  # the caller may go on with this object
            seed = run.rng.bit_generator.seed_seq
            seed.spawn(max(rng.children - seed.n_children_spawned, 0))
            run.rng.bit_generator.state = rng.state
        else:
            run.rng = stream_of(rng)
            self._first = found["first"]
        run.t = found["t"]
        run.family = found["family"]
        run.particles = rebuilt
        run.records = [StepRecord(**each) for each in found["steps"]]
        run.deaths[:] = [Death(**each) for each in found["deaths"]]
        if self._recorder is not None:
            self._recorder.go_on(found["recorded"], rebuilt)
        self._written = run.t
        self._time = time.perf_counter()
        self._seconds = 0.0

    def _rebuild(self, steps: Sequence[Any], written: Sequence[Any]) -> list[Any]:
        """Return the particles that made these choices. Only a step that reached the model's limit is weighed again."""
        choosers = [
            Replayed(
                each,
                np.random.default_rng(0),
                weighs=False,
                read=lambda item: decode(item, self._decode),
            )
            for each in steps
        ]
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
        except Exception as error:  # the program may raise for choices that it never made
            raise self._mismatch(str(error)) from error
        return particles

    def _mismatch(self, why: str) -> ValueError:
        return ValueError(
            f"{self.path} is the checkpoint of another run: {why}. It is left as it is. Go on with the program, the "
            'options and the version= that it was made with, or give another path; resume="force" goes on with others'
        )


def _digest(rest: bytes) -> str:
    return hashlib.blake2b(rest, digest_size=16).hexdigest()


def _parsed(path: Any, data: bytes) -> dict[str, Any]:
    """Return the contents of a checkpoint. ValueError if it is none of this format, or damaged."""
    head = _HEAD.match(data)
    if head is None:
        raise ValueError(
            f"{path} is no checkpoint of llmppl, and is left as it is; give another path"
        )
    found = int(head[1])
    if found != FORMAT:
        writer = WRITERS.get(found, "llmppl 0.1")
        if found > FORMAT:
            writer = "a later llmppl"
        why = f"{writer} wrote it in the format {found}, and this is {FORMAT}"
        raise ValueError(
            f"{path} is no checkpoint of this llmppl ({why}), and is left as it is; give another path"
        )
    rest = data[head.end() :]
    if head[2] != _digest(rest).encode():
        raise ValueError(
            f"{path} is damaged: its contents are not those of its digest. Give another path"
        )
    contents: dict[str, Any] = json.loads(b"{" + rest)
    return contents


def _add(tree: list[Any], places: dict[int, int], noted: Noted) -> int:
    """Add the choices of a particle to the tree, and return the place of the last one; -1 if it has made none."""
    new = []
    while noted.before is not None and id(noted) not in places:
        new.append(noted)
        noted = noted.before
    place = places.get(id(noted), -1)
    for each in reversed(new):
        tree.append([place, each.item])
        place = places[id(each)] = len(tree) - 1
    return place
