"""check_program: test the contract of a program by rebuilding its particles from their choices.

A program draws only by `sample`, `extend` and `self.rng`, keeps its state in attributes that a deep copy separates or
that `shared` names, changes nothing shared, and finishes. If it does, the choices of a particle determine its whole
state. So each particle that a run makes is rebuilt three times from its choices:

- alone, from the *outside* as it was before the runs: contents of shared attributes, classes, modules and defaults;
- beside all others, in their order, and in the reverse order.

Before each time all random streams outside of the program get other states, and the clocks are set forward. Then the
particles must have equal attributes, weights and distributions. Two further comparisons do not need a run. A copy must
lead to no object that belongs to the model, and share memory among its parts as the model does. A distribution of the
user's own must draw what its log-probabilities say.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
import math
import os
import random
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

from llmppl.distributions import Distribution, Proposal
from llmppl.inference import SMC, Copies, Distinct, DownSample, ResampleBelow, beam_search
from llmppl.models import Model
from llmppl.models.choices import ParticleStream, Replayed, Steps
from llmppl.support.arguments import shown
from llmppl.support.runtime import Runtime
from llmppl.support.shared import Shared

MAX_PARTICLES = 40                      # of each algorithm, rebuilt
MAX_UNENDED = 200                       # steps after which a program in which no particle ended is refused
MAX_OBJECTS = 20_000                    # outside objects whose contents are restored
NUM_DRAWS = 2000                        # from a distribution of the user's own

_IGNORED = ("_chooser_", "_noted_", "_stepping_", "_log_weight_")
_ATOMS = (type(None), bool, int, float, complex, str, bytes, types.ModuleType, type(Ellipsis))
_NOT_COPIED = (type, types.FunctionType, types.MethodType, Shared)
_CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time")
_CONTRACT = "a step may depend on its choices and its particle alone, and change nothing but its particle"


@dataclass
class ProgramReport:
    """Result of `check_program`.

    steps : number of steps that were run and rebuilt, under all algorithms
    notes : remarks on statements that are right for some programs, such as a positive score that looks like a
        probability
    not_run : dict from the name of an algorithm to the reason why it cannot run the program
    """

    steps: int = 0
    notes: list[str] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)


def check_program(
    model: Model | Callable[[], Model], *, N: int = 3, K: int = 2, max_steps: int = 6, seed: int = 0
) -> ProgramReport:
    """Run a program under every algorithm, rebuild its particles from their choices, and compare.

    Run this check first on every new program. A run itself does not look for breaches of the contract of programs.

    Parameters
    ----------
    model : Model, or a function without arguments that makes one
        The program; it is not changed. With a function, particles are also rebuilt from new models without any copy.
    N, K, max_steps : int
        Number of particles, of extensions of each, and of steps. Candidates that were not selected are compared too.
    seed : int

    Raises
    ------
    RuntimeError
        If a particle differs, a copy leads to the first particle, a distribution is not what it says, two steps
        sample after the same context, or no particle ends. The message names the attribute, statement or distribution.
        Errors of the program itself are raised unchanged.
    """
    first = model if isinstance(model, Model) else model()
    if not isinstance(first, Model):
        raise TypeError(f"check_program wants a Model or a function that makes one, not {shown(model)}")
    _check_copy(first)
    makers = [first.copy] if isinstance(model, Model) else [first.copy, model]
    check = _Check(first, makers, ProgramReport())
    with check.watching():
        for expand, select in (
            (Distinct(N, K), DownSample(N)), (Copies(N, K), DownSample(N)), (Copies(N, K, merge=True), DownSample(N)),
            (Copies(N), ResampleBelow(N, 0.5)), (Copies(N), ResampleBelow(N, 0.0)),
        ):  # fmt: skip
            run = SMC(first, expand, select, seed=seed)
            made = [candidate for _, step in zip(range(max_steps), run, strict=False) for candidate in check.made(step)]
            check.rebuild(made, f"{expand}, {select}")
        try:
            beams = beam_search(first, N, K, max_steps=max_steps, progress=False)
        except (TypeError, ValueError) as error:        # a choice cannot be listed, or all beams died
            check.report.not_run["beam_search"] = str(error)
        else:
            check.rebuild([(b.particle.choices, _contents(b.particle)) for b in beams if not b.particle.cut], "beams")
        if change := check.outside.changed():
            raise RuntimeError(f"steps change what all particles share: {change}; {_CONTRACT}")
        check.end(seed)
    check.distributions()
    for note in check.report.notes:
        warnings.warn(note, stacklevel=2)
    return check.report


Made = tuple[Steps, Any]                # the choices of a particle, and the contents of its attributes


class _Check:
    """State of one check: the outside of the program, and the distributions and scores that it used."""

    def __init__(self, first: Model, makers: Sequence[Callable[[], Model]], report: ProgramReport) -> None:
        self.first, self.makers, self.report = first, makers, report
        self.outside = _Outside(first)
        self.ended, self.seed, self.t = False, 0, 0
        self.used: dict[Any, Proposal] = {}            # those of the user's own, by contents
        self.scores: dict[str, list[float]] = collections.defaultdict(list)
        self.asked: dict[int, list[Any]] = {}           # by particle that is being rebuilt
        self.threads = set[int]()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note the distributions and scores of all steps inside the block, and restore the outside after it."""
        draw, observe, score = Model._draw_, Model.observe, Model.score

        def watched_draw(model: Any, verb: str, dist: Any, proposal: Any = None, *more: Any) -> Any:
            self._note(model, [dist] if proposal is None else [dist, proposal])
            return draw(model, verb, dist, proposal, *more)

        def watched_observe(model: Any, dist: Any, value: Any) -> None:
            self._note(model, [dist])
            observe(model, dist, value)

        def watched_score(model: Any, log_w: Any) -> None:
            frame = sys._getframe(1)
            self.scores[f"{frame.f_code.co_filename.rpartition('/')[2]}, line {frame.f_lineno}"].append(float(log_w))
            score(model, log_w)

        streams = random.getstate(), np.random.get_state()      # noqa: NPY002
        try:
            with (
                mock.patch.object(Model, "_draw_", watched_draw), mock.patch.object(Model, "observe", watched_observe),
                mock.patch.object(Model, "score", watched_score),
            ):  # fmt: skip
                yield
        finally:
            random.setstate(streams[0])
            np.random.set_state(streams[1])             # noqa: NPY002
            self.outside.restore()

    def _note(self, model: Any, dists: list[Any]) -> None:
        self.threads.add(threading.get_ident())
        own = [dist for dist in dists if isinstance(dist, Proposal) and _is_own(type(dist))]
        self.used |= {(type(dist), repr(_plain(_attributes(dist), {}))): dist for dist in own}
        if id(model) in self.asked:
            context = _context_of(dists[0])             # before its table is computed
            tables = [_table(dist) for dist in dists if isinstance(dist, Proposal)]
            self.asked[id(model)].append(((self.t, context), tables))

    def made(self, step: Any) -> list[Made]:
        """Return the candidates of a step: their choices, and the contents of their attributes now."""
        self.ended = self.ended or any(candidate.finished for candidate in step.candidates)
        return [(candidate.choices, _contents(candidate)) for candidate in step.candidates if not candidate._limit_]

    def rebuild(self, made: list[Made], name: str) -> None:
        """Raise a RuntimeError unless every way to rebuild the particles gives what the run made."""
        some = made if len(made) <= MAX_PARTICLES else random.Random(0).sample(made, MAX_PARTICLES)
        alone = []
        for each in some:
            for make in self.makers:
                self.outside.restore()
                alone.append(self._compared([each], name, "alone", make)[0])
        alone = alone[:: len(self.makers)]
        together = self._compared(some, name, "beside others", self.makers[0])
        reverse = self._compared(some[::-1], name, "beside others, in the reverse order", self.makers[0])[::-1]
        for (choices, _), *asked in zip(some, alone, together, reverse, strict=True):
            for t, (one, *others) in enumerate(zip(*asked, strict=True), 1):
                if any(difference := _difference(one, other, "the distribution of a choice") for other in others):
                    raise RuntimeError(
                        f"under {name}, choice or observation {t} of the particle with {len(choices)} steps asked for "
                        f"another distribution when it was rebuilt: {difference}; {_CONTRACT}"
                    )
            self._check_contexts(asked[0])
            self.report.steps += len(choices)

    def _compared(self, made: list[Made], name: str, how: str, make: Callable[[], Model]) -> list[list[Any]]:
        """Rebuild particles together, step by step; compare them, and return the distributions that each asked for."""
        self.seed += 1
        particles = [make() for _ in made]
        choosers = [Replayed(choices, np.random.default_rng(self.seed)) for choices, _ in made]
        self.asked = {id(particle): [] for particle in particles}
        difference = ""
        with _clocks_ahead(self.seed):
            for particle, chooser in zip(particles, choosers, strict=True):
                particle._chooser_ = chooser
            for self.t in range(max((len(choices) for choices, _ in made), default=0)):
                t = self.t
                _reseed(1009 * self.seed + t, [("", each) for each in (*particles, *self.outside.streams)])
                moving = [i for i, (choices, _) in enumerate(made) if t < len(choices)]
                for i in moving:
                    if particles[i].finished:
                        difference = f"it ends at step {t} of {len(made[i][0])}"
                        raise _breach(name, how, made[i][0], particles[i], difference)
                try:
                    Runtime().run([particles[i].step for i in moving], [how] * len(moving))
                    for i in moving:
                        choosers[i].end_step()
                except ValueError as error:
                    if "makes other choices" not in str(error):
                        raise
                    raise _breach(name, how, made[moving[0]][0], particles[moving[0]], str(error)) from None
        for (choices, contents), particle in zip(made, particles, strict=True):
            if difference := _difference(contents, _contents(particle), ""):
                raise _breach(name, how, choices, particle, difference)
        asked, self.asked = [self.asked[id(particle)] for particle in particles], {}
        return asked

    def _check_contexts(self, asked: list[Any]) -> None:
        contexts = [(t, context) for (t, context), _ in asked if context is not None]
        for (before, one), (after, other) in itertools.pairwise(contexts):
            if before != after and one == other:
                raise RuntimeError(
                    f"two steps in a row draw after the same context of {len(other)} tokens: add the token "
                    "that was drawn, as in self.context += token"
                )

    def end(self, seed: int) -> None:
        """Raise a RuntimeError if no particle ends within MAX_UNENDED steps."""
        run = SMC(self.first, Copies(2), ResampleBelow(2, 0.0), seed=seed)
        for _, step in zip(range(0 if self.ended else MAX_UNENDED), run, strict=False):
            if any(candidate.finished for candidate in step.candidates):
                return
        if not self.ended:
            raise RuntimeError(f"no particle has ended in {MAX_UNENDED} steps: call self.finish() when a text is whole")

    def distributions(self) -> None:
        """Check each distribution of the user's own, and note scores that look like probabilities."""
        if len(self.threads) > 1:
            raise RuntimeError("a step samples or observes in another thread: call it in the thread of the step")
        for dist in self.used.values():
            if wrong := _wrong_with(dist):
                raise RuntimeError(f"{shown(dist)}: {wrong}")
        for place, scores in self.scores.items():
            if all(0.0 < score < 1.0 for score in scores):
                self.report.notes.append(
                    f"score ({place}) is always between 0 and 1: it wants a log weight, math.log(p) of a probability"
                )


def _breach(name: str, how: str, choices: Steps, particle: Any, difference: str) -> RuntimeError:
    return RuntimeError(
        f"under {name}, at step {len(choices)}, the particle {str(particle.s)!r}, rebuilt {how}, is not what its "
        f"choices make: {difference}; {_CONTRACT}"
    )


# ---- the parts of an object


def _is_own(cls: type) -> bool:
    """Return True if a class, or one of its bases, is the user's and not of this library or of another package."""
    modules = [sys.modules.get(base.__module__) for base in cls.__mro__]
    files = [str(getattr(each, "__file__", None) or "") for each in modules if each is not None]
    packaged = os.path.dirname(__file__), os.path.dirname(os.__file__), "site-packages"
    return any(file and not any(folder in file for folder in packaged) for file in files) or "__main__" in [
        base.__module__ for base in cls.__mro__
    ]


def _shared_names(model: Model) -> set[str]:
    return {name for cls in type(model).__mro__ for name in vars(cls).get("shared", ())}


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots included."""
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if name[:2] != "__"]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return found | getattr(value, "__dict__", {})


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Return the objects that `value` leads to, with the names of the ways."""
    if isinstance(value, _ATOMS) or isinstance(value, np.ndarray | np.generic | ParticleStream):
        return []
    if isinstance(value, dict):
        return [("key", key) for key in value] + [(f"[{shown(key, 20)}]", each) for key, each in value.items()]
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return [(f"[{i}]", each) for i, each in enumerate(value)]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        named = list(zip(value.__code__.co_freevars, cells, strict=False))
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return named + [("a default", each) for each in defaults]
    if isinstance(value, types.MethodType):
        return [("__self__", value.__self__), ("__func__", value.__func__)]
    if isinstance(value, types.BuiltinMethodType):
        return [] if isinstance(value.__self__, types.ModuleType) else [("__self__", value.__self__)]
    if isinstance(value, functools.partial):
        return [("func", value.func), *_parts([*value.args, *value.keywords.values()])]
    if isinstance(value, weakref.ref):
        return [("()", value())]
    if type(value) in weakref.ProxyTypes:
        return [("()", value.__init__.__self__)]
    if isinstance(value, type):
        return list(vars(value).items()) if _is_own(value) else []
    if isinstance(value, property):
        return [("fget", value.fget)]
    if hasattr(value, "__wrapped__"):
        return [("__wrapped__", value.__wrapped__)]
    if isinstance(value, Shared) and not isinstance(value, Proposal):
        return []                                       # a language model, a context, a vocabulary, an index
    return list(_attributes(value).items())


def _walk(roots: Sequence[tuple[str, Any]], skip: Callable[[Any], bool] = lambda _: False) -> Iterator[tuple[str, Any]]:
    """Yield each object that the roots lead to, with the first way to it."""
    todo, seen = collections.deque(roots), set[int]()
    while todo and len(seen) < MAX_OBJECTS:
        path, value = todo.popleft()
        if id(value) in seen or isinstance(value, _ATOMS) or skip(value):
            continue
        seen.add(id(value))
        yield path, value
        todo.extend((f"{path}{name if name[:1] == '[' else '.' + name}", part) for name, part in _parts(value))


# ---- copies


def _check_copy(model: Model) -> None:
    """Raise a RuntimeError if a copy leads to the model, contains its lists or arrays, or shares memory differently."""
    new, left_out = model.copy(), _shared_names(model).union(_IGNORED)
    roots = [[(f"self.{name}", each) for name, each in vars(of).items() if name not in left_out] for of in (model, new)]
    for path, value in _walk(roots[1], lambda value: isinstance(value, type)):
        if value is model:
            raise RuntimeError(
                f"{path} leads from a copy back to the first particle: write a method, or compute it in the step"
            )
    held, copied = (list(_walk(each, lambda value: isinstance(value, _NOT_COPIED))) for each in roots)
    places, new_places = dict(_buffers(held)), dict(_buffers(copied))
    for a, b in itertools.combinations(places.keys() & new_places.keys(), 2):
        if _meet(places[a], places[b]) != _meet(new_places[a], new_places[b]):
            raise RuntimeError(
                f"{min(a, b)} and {max(a, b)} share memory, and their copies do not: keep one of them, and make the "
                "other from it where it is used"
            )
    checked = held if type(model).copy is Model.copy else []        # else rebuilding decides
    own = {id(value) for _, value in checked}
    for path, value in copied:
        if id(value) in own and isinstance(value, list | dict | set | bytearray | collections.deque | np.ndarray):
            raise RuntimeError(f"{path} is shared by copies: a deep copy must separate it, or `shared` name it")


def _buffers(walked: list[tuple[str, Any]]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the addresses of the memory of arrays, tensors and other buffers."""
    for path, value in walked:
        if hasattr(value, "data_ptr") and hasattr(value, "untyped_storage"):
            yield path, (value.data_ptr(), value.data_ptr() + value.numel() * value.element_size())
        elif isinstance(value, np.ndarray):
            yield path, np.lib.array_utils.byte_bounds(value)
        elif not isinstance(value, bytes | str):
            with contextlib.suppress(TypeError, ValueError, BufferError):
                array = np.frombuffer(value, dtype=np.uint8)
                yield path, (array.ctypes.data, array.ctypes.data + array.size)


def _meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])


# ---- the outside of a program


class _Outside:
    """Objects that all particles of a program share, with their contents before the first run."""

    def __init__(self, model: Model) -> None:
        classes = [cls for cls in type(model).__mro__ if _is_own(cls)]
        roots = [(cls.__name__, each) for cls in classes for each in vars(cls).values()]
        for name in {cls.__module__ for cls in classes}:
            own = [value for name, value in vars(sys.modules[name]).items() if name[:2] != "__"]
            roots += [(name, value) for value in own if not isinstance(value, type)]
        roots += [(name, vars(model).get(name)) for name in _shared_names(model)]
        held = (value for _, value in _walk(list(vars(model).items())))
        roots += [("", value) for value in held if isinstance(value, Proposal | types.FunctionType)]
        self.objects = [value for _, value in _walk(roots, lambda value: value is model)]
        self.streams = [value for value in self.objects if isinstance(value, _STREAMS) or hasattr(value, "manual_seed")]
        kinds = (list, set, bytearray, collections.deque, collections.Counter, np.ndarray)
        of_class = _walk([(cls.__name__, cls) for cls in classes])
        self._of_class = [(path, value, _plain(value, {})) for path, value in of_class if isinstance(value, kinds)]
        self._caches = [value for value in self.objects if hasattr(value, "cache_clear")]
        self._classes = [(cls, {n: v for n, v in vars(cls).items() if n[:2] != "__"}) for cls in classes]
        self._saved = [(value, _content(value)) for value in self.objects if _content(value) is not None]

    def changed(self) -> str:
        """Return the first change of data of the class in words; "" if there is none."""
        return next((d for path, value, old in self._of_class if (d := _difference(old, _plain(value, {}), path))), "")

    def restore(self) -> None:
        """Bring all objects to their contents before the first run."""
        for cache in self._caches:
            cache.cache_clear()
        for cls, names in self._classes:
            for name in [name for name in vars(cls) if name[:2] != "__" and name not in names]:
                delattr(cls, name)
            for name, value in names.items():
                if vars(cls).get(name) is not value:
                    setattr(cls, name, value)
        for value, content in self._saved:
            _put(value, content)


def _content(value: Any) -> Any:
    """Return a shallow copy of what a mutable object contains; None if it has no contents of its own."""
    if isinstance(value, list | dict | set | bytearray | collections.deque):
        return copy.copy(value)
    if isinstance(value, np.ndarray):
        return value.copy() if value.flags.writeable else None
    if hasattr(value, "untyped_storage"):
        return value.detach().clone()
    if hasattr(value, "__dict__") and not isinstance(value, type | types.FunctionType | types.ModuleType | Model):
        return dict(vars(value)) if _is_own(type(value)) else None
    return None


def _put(value: Any, content: Any) -> None:
    if isinstance(value, np.ndarray):
        value[...] = content
    elif hasattr(value, "untyped_storage"):
        value.detach().copy_(content)
    elif isinstance(value, list | bytearray):
        value[:] = content
    elif isinstance(value, collections.deque):
        value.clear()
        value.extend(content)
    else:
        target: Any = value if isinstance(value, dict | set) else vars(value)
        for each in [each for each in target if each not in content]:
            target.discard(each) if isinstance(target, set) else target.pop(each)
        target.update(content)


_STREAMS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)


def _reseed(seed: int, roots: Sequence[tuple[str, Any]]) -> None:
    """Give other states to the random streams of the process, and to those that the roots lead to."""
    random.seed(seed)
    np.random.seed(seed)                                # noqa: NPY002
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
    for _, value in _walk(roots):
        if isinstance(value, random.Random) or (torch is not None and isinstance(value, torch.Generator)):
            getattr(value, "manual_seed", value.seed)(seed)
        elif isinstance(value, _STREAMS) and not isinstance(value, ParticleStream):
            bits: Any = getattr(value, "bit_generator", getattr(value, "_bit_generator", value))
            bits.state = type(bits)(seed).state


@contextlib.contextmanager
def _clocks_ahead(seed: int) -> Iterator[None]:
    """Set the clocks of the module time forward."""
    with contextlib.ExitStack() as stack:
        for name in _CLOCKS:
            clock = getattr(time, name)
            ahead = 1237 * seed * (10**9 if name.endswith("_ns") else 1) + seed % 7
            stack.enter_context(mock.patch.object(time, name, lambda clock=clock, ahead=ahead: clock() + ahead))
        yield


# ---- contents of attributes, and their comparison


def _contents(particle: Model) -> Any:
    """Return the attributes of a particle as plain data that no later step changes."""
    ignored = _shared_names(particle).union(_IGNORED)
    names = [name for name in dict.fromkeys((*_attributes(particle), "_attribution_")) if name not in ignored]
    return {name: _plain(getattr(particle, name, None), {id(particle): 0}) for name in names}


def _plain(value: Any, seen: dict[int, int]) -> Any:
    if isinstance(value, _ATOMS) or isinstance(value, np.generic):
        return value
    if id(value) in seen:
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    if isinstance(value, np.ndarray):
        return value.shape, [_plain(each, seen) for each in value.ravel()] if value.dtype.hasobject else value.copy()
    if hasattr(value, "untyped_storage"):
        return tuple(value.shape), value.detach().cpu().float().numpy().copy()
    if isinstance(value, dict):
        return [(_plain(key, seen), _plain(each, seen)) for key, each in value.items()]
    if isinstance(value, set | frozenset):
        return sorted((_plain(each, {}) for each in value), key=repr)
    if isinstance(value, list | tuple | collections.deque):
        return [_plain(each, seen) for each in value]
    if isinstance(value, np.random.Generator | random.Random | ParticleStream):
        return type(value).__name__                     # its draws show elsewhere
    if isinstance(value, Iterator) and not isinstance(value, types.GeneratorType):
        with contextlib.suppress(TypeError):
            return [_plain(each, seen) for each in value.__reduce__()[1:]]
    if hasattr(value, "next_token") and hasattr(value, "tokens"):
        return [int(token) for token in value.tokens]
    if isinstance(value, Shared | types.FunctionType | type):
        return type(value).__name__
    with contextlib.suppress(TypeError, ValueError, BufferError):
        return bytes(memoryview(value))
    attributes = _attributes(value)
    if not attributes:                                  # a date, a decimal number
        with contextlib.suppress(TypeError):
            return type(value).__name__, _plain(value.__reduce_ex__(2)[1:], seen)
    return type(value).__name__, {name: _plain(each, seen) for name, each in sorted(attributes.items())}


def _difference(x: Any, y: Any, path: str) -> str:
    """Return the first difference of two plain values in words; "" if there is none. Numbers are equal to rounding."""
    if isinstance(x, dict) and isinstance(y, dict):
        pairs = [(x.get(name), y.get(name), f"{path}.{name}") for name in {**x, **y}]
        return next(filter(None, itertools.starmap(_difference, pairs)), "")
    if isinstance(x, list | tuple) and isinstance(y, list | tuple) and len(x) == len(y):
        pairs = [(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(x, y, strict=True))]
        return next(filter(None, itertools.starmap(_difference, pairs)), "")
    if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
        is_number = x.dtype.kind in "biufc" and y.dtype.kind in "biufc"
        same = x.shape == y.shape and (np.allclose(x, y, 1e-5, 1e-6, equal_nan=True) if is_number else (x == y).all())
    elif isinstance(x, float | np.floating) and isinstance(y, float | np.floating):
        same = math.isclose(x, y, rel_tol=1e-5, abs_tol=1e-6) or (x != x and y != y)
    else:
        same = type(x) is type(y) and bool(x == y)
    return "" if same else f"{path.strip('.').strip('_')} was {shown(x, 40)} and then {shown(y, 40)}"


# ---- distributions


def _table(dist: Any) -> Any:
    """Return the log-measures of a distribution with a list of values; None without one."""
    with contextlib.suppress(TypeError, ValueError):
        return None if dist.support is None else np.maximum(np.array(dist.log_measures()), -60.0)
    return None


def _context_of(dist: Any) -> Any:
    """Return the tokens after which a distribution of the next token, or one made from it, is drawn; None otherwise."""
    while dist is not None and not hasattr(dist, "context"):
        dist = next(iter(getattr(dist, "_parents", ())), None)
    return None if dist is None else tuple(map(int, dist.context.tokens))


def _wrong_with(dist: Proposal) -> str:
    """Return how the draws of a user's distribution disagree with its log-probabilities; "" if they do not."""
    draws = []
    for _ in range(2):
        rng = np.random.default_rng(0)
        draws.append([dist.propose(rng) for _ in range(NUM_DRAWS)])
    if repr(draws[0]) != repr(draws[1]):
        return "it draws other values from an equal random stream: draw with the given rng alone, and keep no state"
    values, support = [value for value, _ in draws[0]], dist.support
    logs = [dist.log_measure(value) for value in values]
    if any(map(math.isnan, logs)) or -math.inf in logs:
        return f"it draws {values[logs.index(min(logs))]!r}, whose log_measure is {min(logs)}"
    if support is not None:
        listed = [dist.log_measure(value) for value in support]
        total = sum(map(math.exp, listed))
        if isinstance(dist, Distribution) and abs(total - 1.0) > 1e-5:
            return f"the probabilities of its support sum to {total:.6g}: they must sum to 1"
        if len({repr(value) for value in support}) < len(support):
            return "its support lists a value twice"
        if strange := {repr(value) for value in values} - {repr(value) for value in support}:
            return f"it draws {min(strange)}, which is not in its support"
        if not np.allclose(np.array(dist.log_measures()), listed, atol=1e-6):
            return "its log_measures() are not the log_measure of each value of its support"
    counts, n = collections.Counter(map(repr, values)), len(values)
    if len(counts) > n / 2:
        return ""                                       # continuous, or of many values
    measure = {repr(value): math.exp(log) for value, log in zip(values, logs, strict=True)}
    missing = 0.01 if min(counts.values()) > 1 else 1.0             # if all values came twice, the others are rare
    seen = sum(measure.values())
    if isinstance(dist, Distribution) and not 1.0 - missing < seen <= 1.0 + 1e-6:
        return f"the probabilities of {len(counts)} values that it drew sum to {seen:.6g}, not to 1"
    for value, mu in measure.items():
        weights = np.array([math.exp(w) if repr(v) == value else 0.0 for v, w in draws[0]])
        mean, spread = weights.mean(), max(np.mean(weights**2) - mu**2, mu * max(1.0 - mu, 0.0), 1e-6)
        if abs(mean - mu) > 5.0 * math.sqrt(spread / n):            # by chance once in two million
            return f"its draws give {value} the measure {mean:.4g}, and its log_measure {mu:.4g}"
    return ""
