"""check_program: test the contract of a program by rebuilding its particles from their choices.

If a program keeps the contract, the choices of a particle determine its whole state. So each particle of a run is
rebuilt from its choices: alone, beside all others, and beside them in the reverse order. Each time, the *outside* (all
objects that the functions, classes and shared attributes of the program lead to) has its contents from before the runs,
random streams in attributes have moved on, batched functions have forgotten their answers, and the clocks are ahead.
Attributes, weights and distributions must be equal. Further particles reach rare states: they are drawn from nearly
uniform distributions, and one runs for many steps.

Besides, a copy of the model must have its shape, a distribution of the user's own must draw what its log-probabilities
say, and the contexts that steps read must grow by the tokens that were drawn after them.
"""

import collections
import contextlib
import datetime
import dis
import functools
import itertools
import math
import os
import queue
import random
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    MutableMapping,
    MutableSequence,
    MutableSet,
)
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from operator import delitem, setitem
from typing import Any
from unittest import mock

import numpy as np

from llmppl.constraints.vocabulary import Text, Token
from llmppl.distributions import Distribution, Proposal
from llmppl.inference import SMC, Copies, Distinct, DownSample, ResampleBelow, beam_search
from llmppl.models import Batched, Model
from llmppl.models.choices import ParticleStream, Replayed, Steps, call_site, describe_site
from llmppl.support.arguments import is_hashable, shown
from llmppl.support.runtime import Runtime
from llmppl.support.shared import Shared

MAX_PARTICLES = 40  # of each algorithm, rebuilt
NUM_SPREAD = 40  # particles whose choices are drawn nearly uniformly
SPREAD = 0.01  # power of their distributions
MANY_STEPS = 200  # of the longest particle
MAX_OBJECTS = 20_000  # of a program or a particle, compared
NUM_DRAWS = 2000  # from a distribution of the user's own
NEIGHBOURS = 10  # of a draw, for the density there
MANY_ALIKE = 20  # draws with a coordinate that is discrete
FEWEST = 100  # draws of a group whose density is compared

_CONTRACT = (
    "a step may depend on its choices and its particle alone, and change nothing but its particle"
)
Ways = list[tuple[str, Any]]  # objects, each with the way to it, such as "self.words[0]"
Contents = dict[str, Any]  # plain data by the way to it
Made = tuple[Steps, Contents]  # the choices of a particle, and its attributes after them


@dataclass
class ProgramReport:
    """Result of `check_program`.

    steps : number of steps that were run and rebuilt, under all algorithms
    ended : False if no particle called `finish`; runs of such a program need `max_steps`
    notes : remarks on statements that may be right, such as a positive score that looks like a probability
    not_run : dict from the name of an algorithm to the reason why it cannot run the program
    """

    steps: int = 0
    ended: bool = False
    notes: list[str] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)


def check_program(
    model: Model | Callable[[], Model],
    *,
    N: int = 3,
    K: int = 2,
    max_steps: int = 12,
    seed: int = 0,
) -> ProgramReport:
    """Run a program under every algorithm, rebuild its particles from their choices, and compare.

    Check every new program: a run itself does not look for breaches of the contract of programs.

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
        If a particle differs, a copy leads to the first particle, a distribution is not what it says, or a context does
        not grow by the tokens that were drawn after it. The message names the attribute, statement or distribution.
        Errors of the program itself are raised unchanged.
    """
    first = model if isinstance(model, Model) else model()
    if not isinstance(first, Model):
        raise TypeError(
            f"check_program wants a Model or a function that makes one, not {shown(model)}"
        )
    _check_copy(first)
    check = _Check(first, [first.copy] if isinstance(model, Model) else [first.copy, model])
    algorithms: list[tuple[Any, Any]] = [
        (Distinct(N, K), DownSample(N)),
        (Copies(N, K), DownSample(N)),
        (Copies(N, K, merge=True), DownSample(N)),
        (Copies(N), ResampleBelow(N, 0.5)),
        (Copies(N), ResampleBelow(N, 0.0)),
    ]
    with check.watching():
        for expand, select in algorithms:
            made = []
            for step in itertools.islice(SMC(first, expand, select, seed=seed), max_steps):
                made += [check.made(each) for each in step.candidates if not each._limit_]
            check.rebuild_alone_and_together(made, f"{expand}, {select}")
        try:
            beams = beam_search(first, N, K, max_steps=max_steps, progress=False)
        except (TypeError, ValueError) as error:  # a choice cannot be listed, or all beams died
            check.report.not_run["beam_search"] = str(error)
        else:
            made = [check.made(beam.particle) for beam in beams if not beam.particle.cut]
            check.rebuild_alone_and_together(made, "beams")
        check.reach_rare_states(max_steps, seed)
        check.finish()
    for note in check.report.notes:
        warnings.warn(note, stacklevel=2)
    return check.report


@dataclass
class _Read:
    """A token that was drawn or observed in step `t` after a context, which is a tuple of tokens."""

    t: int
    context: tuple[int, ...]
    token: Token
    observed: bool


@dataclass
class _Watched:
    """Notes about a particle that is being rebuilt.

    tables : step, context and tables of each distribution, by its number in words
    reads : tokens drawn or observed after contexts
    texts : bytes of `s` before each step, and after the last
    """

    tables: Contents = field(default_factory=dict)
    reads: list[_Read] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)


class _Check:
    """State of one check: the outside of the program, and the distributions and scores that it used."""

    def __init__(self, first: Model, makers: list[Callable[[], Model]]) -> None:
        self.first = first
        self.makers = makers
        self.report = ProgramReport()
        self.outside = _Outside(first)
        self.number = 0  # of groups that were rebuilt
        self.t = 0
        self.used: dict[str, Proposal] = {}  # the user's own distributions, by contents
        self.scores: dict[str, list[Any]] = collections.defaultdict(list)
        self.watched: dict[int, _Watched] = {}  # by particle that is being rebuilt
        self.threads = {threading.get_ident()}
        self.elsewhere: dict[
            tuple[int, ...], bool
        ] = {}  # by context: True if others grew by all that it read

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note distributions, scores and batched functions of all steps in the block; restore the outside after it."""
        draw = Model._draw_
        observe = Model.observe
        score = Model.score
        call = Batched.__call__

        def watched_draw(model: Model, verb: str, dist: Any, proposal: Any, *more: Any) -> Any:
            self._note(model, [dist, proposal])
            value = draw(model, verb, dist, proposal, *more)
            self._note_read(model, dist, value, observed=False)
            return value

        def watched_observe(model: Model, dist: Any, value: Any) -> None:
            self._note(model, [dist])
            self._note_read(model, dist, value, observed=True)
            observe(model, dist, value)

        def watched_score(model: Model, log_w: Any) -> None:
            self.scores[describe_site(call_site())].append(log_w)
            score(model, log_w)

        def watched_call(function: Batched[Any, Any], argument: Any) -> Any:
            self.outside.batched[id(function)] = function
            return call(function, argument)

        with contextlib.ExitStack() as stack:
            stack.callback(self.outside.restore)
            stack.enter_context(mock.patch.object(Model, "_draw_", watched_draw))
            stack.enter_context(mock.patch.object(Model, "observe", watched_observe))
            stack.enter_context(mock.patch.object(Model, "score", watched_score))
            stack.enter_context(mock.patch.object(Batched, "__call__", watched_call))
            yield

    def _note(self, model: Model, dists: list[Any]) -> None:
        self.threads.add(threading.get_ident())
        given = [each for each in dists if isinstance(each, Proposal)]
        for each in given:
            if _is_own(each):
                self.used[f"{type(each)} {_contents(_parts(each))}"] = each
        if given and id(model) in self.watched:
            tables = self.watched[id(model)].tables
            context = _context_of(given[0])  # before its table is computed
            name = f"the distribution of choice or observation {len(tables) + 1}"
            tables[name] = [self.t, context, *map(_table, given)]

    def _note_read(self, model: Model, dist: Any, value: Any, *, observed: bool) -> None:
        context = _context_of(dist)
        if context is not None and isinstance(value, Token) and id(model) in self.watched:
            self.watched[id(model)].reads.append(_Read(self.t, context, value, observed))

    def made(self, particle: Model) -> Made:
        """Return the choices of a particle, and its attributes now."""
        self.report.ended |= particle.finished
        return particle.choices, _state(particle)

    def rebuild_alone_and_together(self, made: list[Made], name: str) -> None:
        """Raise a RuntimeError unless every way to rebuild the particles gives what the run made."""
        some = made if len(made) <= MAX_PARTICLES else random.Random(0).sample(made, MAX_PARTICLES)
        right: dict[int, Contents] = {}
        for make in self.makers:
            for each in some:
                self._rebuild([each], right, make, f"under {name}, a particle, rebuilt alone,")
        self._rebuild_together(some, right, name)

    def _rebuild_together(self, made: list[Made], right: dict[int, Contents], name: str) -> None:
        make = self.makers[0]
        together = f"under {name}, a particle, rebuilt beside others,"
        self._rebuild(made, right, make, together)
        self._rebuild(made[::-1], right, make, f"{together} reversed,")
        self.report.steps += sum(len(choices) for choices, _ in made)

    def _rebuild(
        self, group: list[Made], right: dict[int, Contents], make: Callable[[], Model], which: str
    ) -> None:
        """Rebuild particles together, and compare them with `right`, which has the first result of each by its id."""
        failed = f"{which} is not what its choices make"
        self.outside.restore(batched=len(group) > 1)  # else a drift of many calls would not show
        self.number += 1
        with self.outside.later(self.number):
            particles = self._rebuilt([choices for choices, _ in group], make, failed)
        for each, particle in zip(group, particles, strict=True):
            choices, state = each
            watched = self.watched[id(particle)]
            now = _state(particle) | watched.tables
            expected = right.setdefault(id(each), state | watched.tables if state else now)
            _refuse(f"{failed}: after step {len(choices)}, ", _difference(expected, now))
            self._check_contexts(watched)
        self.watched = {}

    def _check_contexts(self, watched: _Watched) -> None:
        """Raise a RuntimeError if a context did not grow by the tokens that were read after it, or grew by them twice.

        A program may read after one context again and again: for votes, for drafts, for an observation of its own. So a
        context must grow only if the text grew by exactly these tokens, or if another context grew by them, where one
        of the two observes what the other draws, in each step of each particle.
        """
        paths = _paths(watched.reads)
        grown = {context for context in paths if any(_continues(other, context) for other in paths)}
        for context in paths.keys() - grown:
            *before, last = sorted(paths[context].items())
            alone = [last]
            for t, path in before:
                others = [paths[other].get(t) for other in grown]
                same = [
                    other.observed != path.observed
                    for other in others
                    if other and other.tokens == path.tokens
                ]
                if not same:
                    alone.insert(-1, (t, path))
                self.elsewhere[context] = self.elsewhere.get(context, True) and any(same)
            if _are_in_text(watched, alone):
                _refuse_standing(context)
        for context in grown:
            for tokens, after in _grown_twice(context, paths):
                for more, _ in _grown_twice(after, paths):
                    if more != tokens:  # else a text may repeat itself
                        once = f"grew twice by {str(tokens[-1])!r}: add each token once"
                        raise RuntimeError(f"a context of {len(context)} tokens {once}")

    def _rebuilt(self, choices: list[Steps], make: Callable[[], Model], failed: str) -> list[Any]:
        """Make particles with these choices together, step by step, and note the distributions that each asks for."""
        particles = [make() for _ in choices]
        self.watched = {id(particle): _Watched() for particle in particles}
        for particle, steps in zip(particles, choices, strict=True):
            particle._chooser_ = Replayed(steps, np.random.default_rng(self.number))
            self.watched[id(particle)].texts.append(_bytes_of(particle))

        def advance(particle: Any) -> None:
            for _, value in _walk([("self", particle)]):
                _draw_from(value)
            try:
                particle.step()
                particle._chooser_.end_step()
            except Exception as error:  # the run made this step without one
                raise RuntimeError(
                    f"{failed}: at step {self.t + 1}, {error}; {_CONTRACT}"
                ) from error
            self.watched[id(particle)].texts.append(_bytes_of(particle))

        for self.t in range(max(map(len, choices), default=0)):
            moving = [
                each for each, steps in zip(particles, choices, strict=True) if self.t < len(steps)
            ]
            Runtime().run(
                [functools.partial(advance, each) for each in moving], ["rebuilt"] * len(moving)
            )
        return particles

    def reach_rare_states(self, max_steps: int, seed: int) -> None:
        """Rebuild particles whose choices are drawn nearly uniformly, and a few of many steps."""
        spread = SMC(
            self.first, Copies(NUM_SPREAD), ResampleBelow(NUM_SPREAD, 0.0), power=SPREAD, seed=seed
        )
        long = SMC(self.first, Copies(2), ResampleBelow(2, 0.0), seed=seed)
        for run, steps, name in (
            (spread, max_steps, "nearly uniform draws"),
            (long, MANY_STEPS, "many steps"),
        ):
            last: dict[int, Made] = {}  # by the place of a particle
            for step in itertools.islice(run, steps):
                for i, each in enumerate(step.candidates):
                    self.report.ended |= each.finished
                    if not each._limit_:
                        last[i] = each.choices, {}  # its weights may be those of another power
            self._rebuild_together([*last.values()], {}, name)

    def finish(self) -> None:
        """Check what needs all runs: shared data, threads, distributions and scores."""
        _refuse("steps change what all particles share: ", self.outside.changed())
        for context, elsewhere in self.elsewhere.items():
            if elsewhere:
                _refuse_standing(context)
        if len(self.threads) > 1:
            raise RuntimeError(
                "a step samples or observes in another thread: call it in the thread of the step"
            )
        for dist in self.used.values():
            wrong = _wrong_with(dist)
            if wrong:
                raise RuntimeError(f"{shown(dist)}: {wrong}")
        for place, scores in self.scores.items():
            if 0.0 < min(scores) < 1.0 and max(scores) <= 1.0:
                wants = "it wants a log weight, math.log(p) of a probability"
                self.report.notes.append(f"score {place} is always between 0 and 1: {wants}")


def _refuse(start: str, difference: str) -> None:
    if difference:
        raise RuntimeError(f"{start}{difference}; {_CONTRACT}")


# ---- contexts


@dataclass(frozen=True)
class _Path:
    """Tokens that a step read one after another, from a context on. `observed` is said of the first."""

    tokens: tuple[Token, ...]
    observed: bool


_Paths = dict[tuple[int, ...], dict[int, _Path]]  # by context and step


def _bytes_of(particle: Any) -> bytes:
    text = particle.s
    return text.bytes if isinstance(text, Text) else str(text).encode()


def _paths(reads: list[_Read]) -> _Paths:
    """Return the contexts with which steps began to read, and the tokens that each step read from there on."""
    paths: _Paths = {}
    for t, read_in_step in itertools.groupby(reads, lambda read: read.t):
        after: dict[tuple[int, ...], _Read] = {}
        for read in read_in_step:
            after.setdefault(read.context, read)
        continued = {(*context, read.token) for context, read in after.items()}
        for context in after.keys() - continued:
            tokens: list[Token] = []
            while (*context, *tokens) in after:
                tokens.append(after[(*context, *tokens)].token)
            paths.setdefault(context, {})[t] = _Path(tuple(tokens), after[context].observed)
    return paths


def _refuse_standing(context: tuple[int, ...]) -> None:
    add = "add the token that was drawn, as in self.context += token"
    raise RuntimeError(f"two steps draw after the same context of {len(context)} tokens: {add}")


def _continues(longer: tuple[int, ...], context: tuple[int, ...]) -> bool:
    return len(longer) > len(context) and longer[: len(context)] == context


def _are_in_text(watched: _Watched, reads: Iterable[tuple[int, _Path]]) -> bool:
    """Return True if two steps added exactly what they read to the text, and the first addition stayed there."""
    added = []
    for t, path in reads:
        written = watched.texts[t] + b"".join(token.bytes for token in path.tokens)
        if watched.texts[t + 1] == written != watched.texts[t]:
            added.append((t, written))
    for (t, written), (u, _) in itertools.pairwise(added):
        if all(text.startswith(written) for text in watched.texts[t + 1 : u + 1]):
            return True
    return False


def _grown_twice(
    context: tuple[int, ...], paths: _Paths
) -> Iterator[tuple[tuple[Token, ...], tuple[int, ...]]]:
    """Yield the tokens by which a context grew twice, and the context that this made."""
    for path in paths.get(context, {}).values():
        once = (*context, *path.tokens)
        twice = (*once, *path.tokens)
        if once not in paths and twice in paths:
            yield path.tokens, twice


# ---- the parts of an object

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), np.generic)
_ARRAYS = (float, np.floating, np.ndarray)
_SHARED = (Shared, type, types.FunctionType, types.ModuleType)
_SETS = (*_SHARED, AbstractSet)
_STREAMS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
_BATCHED = " -> function"  # of the way through a batched function
_IGNORED = {"_chooser_", "_noted_", "_stepping_", "_log_weight_", "_origin_"}
_HIDDEN = (
    "__wrapped__",
    "__self__",
    "__func__",
    "func",
    "args",
    "keywords",
    "fget",
    "cell_contents",
)
_NAMED = (types.FunctionType, types.CellType, types.SimpleNamespace, threading.local, queue.Queue)
_OPEN = (
    *_NAMED,
    MutableMapping,
    AbstractSet,
    MutableSequence,
    tuple,
    weakref.ref,
    Proposal,
    Batched,
)


def _is_own(value: Any) -> bool:
    """Return True for a module of the user's, a class that has a base in one, and an object of such a class."""
    if isinstance(value, types.ModuleType):
        return _is_users(value.__name__)
    return any(
        _is_users(cls.__module__)
        for cls in (value if isinstance(value, type) else type(value)).__mro__
    )


def _used_globals(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals that a function uses, also in functions inside of it."""
    names = sorted(_global_names(function.__code__) & function.__globals__.keys())
    return {name: function.__globals__[name] for name in names}


def _global_names(code: types.CodeType) -> set[str]:
    inner = [_global_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return {
        each.argval for each in dis.get_instructions(code) if each.opname.endswith("_GLOBAL")
    }.union(*inner)


@functools.cache
def _is_users(module: str | None) -> bool:
    """Return True if a module is neither of this library, nor of Python, nor of an installed package."""
    root = str(module).partition(".")[0]
    file = getattr(sys.modules.get(str(module)), "__file__", None) or ""
    return (
        root not in (*sys.stdlib_module_names, __name__.partition(".")[0])
        and "-packages" not in file
    )


def _shared_names(model: Model) -> set[str]:
    return {name for cls in type(model).__mro__ for name in vars(cls).get("shared", ())}


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object or a class, those in slots included, and the parts of a method or partial."""
    slots = [
        name
        for cls in type(value).__mro__
        for name in vars(cls).get("__slots__", ())
        if hasattr(value, name)
    ]
    names = [*slots, *(name for name in _HIDDEN if hasattr(type(value), name))]
    held = {name: getattr(value, name) for name in names} | {**getattr(value, "__dict__", {})}
    return {name: each for name, each in held.items() if name[:2] != "__" or name in _HIDDEN}


def _memory(value: Any) -> np.ndarray | None:
    """Return the memory of an array, tensor or other buffer as an array; None for another object."""
    if hasattr(type(value), "untyped_storage"):  # a tensor of torch
        value = value.detach().cpu()
        try:
            value = value.numpy()
        except TypeError:  # numpy has no such numbers
            value = value.contiguous().view(sys.modules["torch"].uint8).numpy()
    with contextlib.suppress(TypeError, ValueError, BufferError):
        array = np.asarray(memoryview(value))
        return None if array.dtype.hasobject else array
    return None


def _parts(value: Any) -> Ways:
    """Return the objects that `value` leads to, each with the end of its way."""
    if isinstance(value, _STREAMS) or _memory(value) is not None:
        return []
    if isinstance(value, MutableMapping):
        return [(f"{[*_contents([('', key)]).values()]}", each) for key, each in value.items()]
    if isinstance(value, AbstractSet):  # an order that does not depend on addresses
        value = sorted(
            value, key=lambda each: repr([_content(part) for _, part in _walk([("", each)], _SETS)])
        )
    if isinstance(value, list | tuple | MutableSequence):
        return [(f"[{i}]", each) for i, each in enumerate(value)]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        held = [
            *vars(value).items(),
            ("a default", value.__defaults__),
            ("a default", value.__kwdefaults__),
        ]
        held += [(name, cell) for name, cell in cells if cell != types.CellType()]
        named = [(f" -> {name}", each) for name, each in _used_globals(value).items()]
        return [(f".{name}", each) for name, each in held] + [
            *named,
            (" -> globals", value.__globals__),
        ]
    if isinstance(value, weakref.ref) or type(value) in weakref.ProxyTypes:
        return [(".()", value() if isinstance(value, weakref.ref) else value.__init__.__self__)]
    if isinstance(value, Batched):
        return [(_BATCHED, value.function)]
    attributes = _attributes(value)
    if isinstance(value, Model):
        left_out = _shared_names(value) | _IGNORED
        attributes = {name: each for name, each in attributes.items() if name not in left_out}
        attributes.setdefault("_attribution_", {})
    if isinstance(value, type):
        attributes |= {"__bases__": value.__bases__, "__class__": type(value)}
    if not attributes:  # an iterator, a date, a decimal number
        with contextlib.suppress(Exception):  # of foreign objects
            return [("", value.__reduce_ex__(2)[1:])]
    return [(f".{name}", each) for name, each in attributes.items()]


def _walk(
    roots: Ways, closed: tuple[type, ...] = _SHARED, parts: Callable[[Any], Ways] = _parts
) -> Iterator[tuple[str, Any]]:
    """Yield all that the roots lead to, each with the first way to it; a later way to it leads to a text.

    Objects of the `closed` types are yielded without their parts.
    """
    todo = collections.deque(roots)
    seen = dict[int, tuple[str, Any]]()
    while todo and len(seen) < MAX_OBJECTS:
        path, value = todo.popleft()
        if id(value) in seen:
            yield path, f"the same as {seen[id(value)][0]}"
            continue
        yield path, value
        if not isinstance(value, _ATOMS):
            seen[id(value)] = path, value  # kept, so that no other object gets its id
            if not (_is_library(value) or isinstance(value, closed)):
                todo.extend((path + end, part) for end, part in parts(value))


def _is_library(value: Any) -> bool:
    """Return True for a language model, a context, a vocabulary or an index, and for the globals of a module."""
    is_globals = isinstance(value, dict) and "__builtins__" in value
    return is_globals or (isinstance(value, Shared) and not isinstance(value, Proposal | Batched))


# ---- contents, and their comparison


def _contents(roots: Ways) -> Contents:
    """Return all that the roots lead to as plain data that no later step changes."""
    return {path: _content(value) for path, value in _walk(roots)}


def _state(particle: Model) -> Contents:
    return _contents([("self", particle)])


def _content(value: Any) -> Any:
    if isinstance(value, _ATOMS):
        return value
    array = _memory(value)
    if array is not None:
        return array.copy()
    if isinstance(value, Shared) and hasattr(type(value), "next_token"):
        return f"a context of the tokens {[*map(int, getattr(value, 'tokens'))]}"  # noqa: B009
    name = getattr(value, "__qualname__", type(value).__name__)
    return (
        f"a {name} of {len(value)}"
        if isinstance(value, list | tuple | dict | AbstractSet)
        else f"a {name}"
    )


def _difference(x: Contents, y: Contents) -> str:
    """Return the first difference in words; "" if there is none. Numbers are equal to rounding."""
    paths = (path for path in {**x, **y} if not _same(x.get(path), y.get(path)))
    return next(
        (
            f"{path} was {shown(x.get(path), 60)} and then {shown(y.get(path), 60)}"
            for path in paths
        ),
        "",
    )


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, list) and isinstance(y, list):
        return len(x) == len(y) and all(map(_same, x, y))
    if isinstance(x, _ARRAYS) and isinstance(y, _ARRAYS):
        if not {np.asarray(x).dtype.kind, np.asarray(y).dtype.kind} <= {*"biufc"}:
            return np.array_equal(x, y)
        return np.shape(x) == np.shape(y) and np.allclose(x, y, 1e-5, 1e-6, True)
    return type(x) is type(y) and bool(x == y)


def _check_copy(model: Model) -> None:
    """Raise a RuntimeError if a copy leads to the model, shares memory differently, or has another shape."""
    new = model.copy()
    pairs = []
    _check_ways(
        path for path, value in _walk([("self", new)], (type, types.ModuleType)) if value is model
    )
    for of in (model, new):
        arrays = [
            (path, array)
            for path, value in _walk([("self", of)])
            if (array := _memory(value)) is not None
        ]
        both = itertools.combinations(arrays, 2)
        pairs.append({(path, other) for (path, a), (other, b) in both if np.may_share_memory(a, b)})
    for path, other in pairs[0] ^ pairs[1]:
        how = "keep one of them, and make the other from it where it is used"
        raise RuntimeError(f"{path} and {other} share memory, and their copies do not: {how}")
    if difference := _difference(_state(model), _state(new)):
        raise RuntimeError(f"a copy of the model is not as the model: {difference}")


def _check_ways(paths: Iterable[str]) -> None:
    """Raise a RuntimeError that names the first of these ways to the model."""
    for path in paths:
        leads = f"{path.replace('.cell_contents', '')} leads from a copy back to the first particle"
        raise RuntimeError(f"{leads}: write a method, or compute it in the step")


# ---- the outside of a program


class _Outside:
    """Objects that all particles of a program share, with their contents before the first run."""

    def __init__(self, model: Model) -> None:
        def parts(value: Any) -> Ways:
            is_open = (
                isinstance(value, _OPEN)
                or _is_own(value)
                or any(hasattr(type(value), name) for name in _HIDDEN)
            )
            return (
                _parts(value)
                if is_open and (value is model or not isinstance(value, Model))
                else []
            )

        roots = [(f"shared -> {name}", vars(model).get(name)) for name in _shared_names(model)]
        roots += [("self", model), (type(model).__name__, type(model)), ("os.environ", os.environ)]
        walked = [*_walk(roots, (), parts)]
        _check_ways(
            path
            for path, value in walked
            if path[:4] != "self" and _same(value, "the same as self")
        )
        self.saved = [
            (path, value, old) for path, value in walked if (old := _changeable(value)) is not None
        ]
        self.globals = [
            value for _, value in walked if isinstance(value, dict) and _is_library(value)
        ]
        self.caches = [value for _, value in walked if hasattr(type(value), "cache_clear")]
        self.batched: dict[int, Batched[Any, Any]] = {}  # that were called since, by id

    def changed(self) -> str:
        """Return the first list, set or array that changed, other than a global or a shared one, in words."""
        own = [
            each
            for each in self.saved
            if isinstance(each[2], list | set | np.ndarray) and "->" not in each[0]
        ]
        before = [(path, old) for path, _, old in own]
        now = [(path, _changeable(value)) for path, value, _ in own]
        return _difference(_contents(before), _contents(now))

    def restore(self, *, batched: bool = True) -> None:
        """Bring all objects to their contents before the first run; with `batched`, also those of batched functions."""
        for cache in self.caches:
            cache.cache_clear()
        for function in self.batched.values():
            function.forget()
        for path, value, old in self.saved:
            if batched or _BATCHED not in path:
                _restore(value, old)

    @contextlib.contextmanager
    def later(self, number: int) -> Iterator[None]:
        """Set the clocks forward, for modules that import them by name, too."""
        ahead = _clocks_ahead(98_765.4321 * number)
        places = [vars(time), vars(datetime), *self.globals]
        found = [
            (names, name, each)
            for names in places
            for name, each in names.items()
            if id(each) in ahead
        ]
        try:
            for names, name, clock in found:
                names[name] = ahead[id(clock)]
            yield
        finally:
            for names, name, clock in found:
                names[name] = clock


class _Dates(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.__mro__[1])


def _clocks_ahead(seconds: float) -> dict[int, Any]:
    """Return clocks that are `seconds` ahead, by the ids of the functions and classes whose place they take."""
    now = time.time
    ahead = {}
    moved = datetime.timedelta(seconds=seconds)
    for name in ("time", "perf_counter", "monotonic", "process_time"):
        for read, by in (
            (getattr(time, name), seconds),
            (getattr(time, f"{name}_ns"), int(1e9 * seconds)),
        ):
            ahead[id(read)] = lambda read=read, by=by: read() + by
    for read in (time.localtime, time.gmtime, time.ctime):
        ahead[id(read)] = lambda *at, read=read: read(*(at or [now() + seconds]))
    ahead[id(time.strftime)] = lambda form, *at, read=time.strftime: read(
        form, *(at or [time.localtime()])
    )
    for cls, names in (
        (datetime.datetime, ("now", "today", "utcnow")),
        (datetime.date, ("today",)),
    ):
        reads = {name: getattr(cls, name) for name in names}
        later = {
            name: classmethod(lambda _, *zone, read=read: read(*zone) + moved)
            for name, read in reads.items()
        }
        ahead[id(cls)] = _Dates(cls.__name__, (cls,), later)
    return ahead


def _changeable(value: Any) -> Any:
    """Return a shallow copy of what a mutable object contains; None if it has no contents of its own."""
    for kind, make in ((MutableMapping, dict), (MutableSet, set), (MutableSequence, list)):
        if isinstance(value, kind):
            return make(value)
    array = _memory(value)
    if array is not None:
        return array.copy() if array.flags.writeable else None
    if isinstance(value, queue.SimpleQueue):
        return _taken(value)
    is_own = _is_own(value) and not isinstance(value, Model | types.ModuleType)
    return _attributes(value) if is_own or isinstance(value, _NAMED) else None


def _taken(waiting: queue.SimpleQueue[Any]) -> list[Any]:
    """Return what waits in a queue, which keeps it."""
    held = [waiting.get() for _ in range(waiting.qsize())]
    for each in held:
        waiting.put(each)
    return held


def _restore(value: Any, old: Any) -> None:
    if isinstance(value, queue.SimpleQueue):
        for _ in range(value.qsize()):
            value.get()
        for each in old:
            value.put(each)
    elif isinstance(old, dict):
        is_mapping = isinstance(value, MutableMapping)
        now, put, drop = (
            (value, setitem, delitem) if is_mapping else (_attributes(value), setattr, delattr)
        )
        for name in [name for name in now if name not in old]:
            drop(value, name)
        for name, each in old.items():
            if now.get(name, now) is not each:
                put(value, name, each)
    elif isinstance(old, set):
        value &= old
        value |= old
    elif isinstance(old, np.ndarray):
        np.asarray(_memory(value))[...] = old
    elif [*map(id, value)] != [*map(id, old)]:
        while value:
            value.pop()
        value.extend(old)


def _draw_from(value: Any) -> None:
    """Advance a random stream, and nothing else."""
    if hasattr(type(value), "manual_seed"):  # a stream of torch
        value.manual_seed(value.initial_seed() + 1)
    elif isinstance(value, _STREAMS) and not isinstance(value, ParticleStream):
        draw: Any = getattr(value, "random", getattr(value, "random_raw", None))
        draw()


# ---- distributions


def _table(dist: Any) -> Any:
    """Return the log-measures of a distribution with a list of values; None without one."""
    with contextlib.suppress(TypeError, ValueError):
        return None if dist.support is None else np.maximum(np.array(dist.log_measures()), -60.0)
    return None


def _context_of(dist: Any) -> tuple[int, ...] | None:
    """Return the tokens after which a distribution of the next token, or one made from it, is drawn; None otherwise."""
    while dist is not None and not hasattr(dist, "context"):
        dist = next(iter(getattr(dist, "_parents", ())), None)
    return None if dist is None else tuple(map(int, dist.context.tokens))


def _wrong_with(dist: Proposal) -> str:
    """Return how the draws of a user's distribution disagree with its log-probabilities; "" if they do not."""
    draws, again = (
        [*map(dist.propose, [rng] * NUM_DRAWS)] for rng in map(np.random.default_rng, (0, 0))
    )
    if repr(draws) != repr(again):
        return "it draws other values from an equal random stream: draw with the given rng alone, and keep no state"
    weights: dict[str, list[float]] = {}  # of the draws of each value
    for value, log_w in draws:
        weights.setdefault(repr(value), []).append(math.exp(log_w))
    support = [*(dist.support or ())]
    drawn = {repr(value): value for value, _ in draws}
    values = support + [drawn[key] for key in drawn.keys() - set(map(repr, support))]
    measures = [math.exp(dist.log_measure(value)) for value in values]
    if support and not np.allclose(
        np.exp(dist.log_measures()), measures[: len(support)], atol=1e-6
    ):
        return "its log_measures() are not the log_measure of each value of its support"
    n = NUM_DRAWS
    alike = [*map(len, weights.values())]
    once = alike.count(1)
    few = sum(number for number in alike if number < MANY_ALIKE)
    if once > few / 2 and few > n / 20:
        return (
            _wrong_with_density(dist, [value for value, _ in draws])
            if isinstance(dist, Distribution)
            else ""
        )
    missing = 1e-5 if support else 0.01 + 3 * once / n  # of the values that were not drawn
    if isinstance(dist, Distribution) and not 1.0 - missing <= sum(measures) <= 1.0 + 1e-5:
        whose = (
            "of its support and its draws"
            if support
            else f"of the {len(values)} values that it drew"
        )
        return f"the probabilities {whose} sum to {sum(measures):.6g}: they must sum to 1"
    for value, measure in zip(values, measures, strict=True):
        found = weights.get(repr(value), [0.0])
        mean = sum(found) / n
        spread = max(mean, measure) * max(
            sum(found) / len(found), 1.0
        )  # of a draw's weight at the value
        if not abs(mean - measure) <= 5.0 * math.sqrt(
            max(spread, 1e-6) / n
        ):  # by chance once in two million
            return f"its draws give {value!r} the measure {mean:.4g}, and its log_measure {measure:.4g}"
    return ""


def _wrong_with_density(dist: Distribution[Any], values: list[Any]) -> str:
    """Compare a density with that of its draws, by their nearest neighbours, where coordinates are numbers.

    A coordinate that many draws share is discrete, such as a label or an inflated zero. Draws with the same discrete
    coordinates are a group. On a lattice, such as prices in cents, the density may be that of the points. The mean of
    the differences of the logs is near the log of 1 / mass: 0.01 from it in one dimension, up to 0.07 in two, and 0.6
    in five, over bells, boxes, heavy tails and modes of different widths. Source: Kozachenko & Leonenko (1987).
    """
    rows = [_coordinates(value) for value in values]
    counts = collections.Counter(itertools.chain.from_iterable(map(enumerate, rows)))
    groups = collections.defaultdict[Any, list[int]](list)
    for place, row in enumerate(rows):
        key = list(row)
        for i, x in enumerate(row):
            if counts[i, x] < MANY_ALIKE:
                key[i] = ...
        groups[tuple(key)].append(place)
    differences = [0.0]  # stays so if no group is large enough
    log_spacing = tolerance = 0.0
    for key, places in groups.items():
        if len(places) < FEWEST:
            continue
        free = [i for i, x in enumerate(key) if x is ...]
        try:
            points = np.array([[rows[place][i] for i in free] for place in places], dtype=float)
            with np.errstate(all="ignore"):
                log_densities, thinness = _log_densities(points)
        except (TypeError, ValueError):  # no numbers, or on a surface
            return ""
        share = len(places) / len(rows)
        for place, log_density in zip(places, log_densities, strict=True):
            differences.append(log_density + math.log(share) - dist.log_measure(values[place]))
        for column in points.T:
            log_spacing += share * math.log(_spacing(column))
        tolerance = max(tolerance, 0.02 * len(free) ** 2 + 2 * thinness)
    log_mass = -float(np.mean(differences))
    tolerance += 5 * float(np.std(differences)) / math.sqrt(len(values))
    if abs(log_mass) <= tolerance or abs(log_mass - log_spacing) <= tolerance:
        return ""
    return f"its density has a mass of about {math.exp(log_mass):.3g} where its draws are: it must be 1"


def _coordinates(value: Any) -> tuple[Any, ...]:
    """Return the coordinates of a number, an array, or a nested list, tuple or mapping."""
    array = _memory(value)
    if array is not None:
        value = array.ravel().tolist()
    if isinstance(value, MutableMapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        parts = map(_coordinates, value)
        return tuple(itertools.chain.from_iterable(parts))
    return (value if is_hashable(value) else repr(value),)


def _log_densities(points: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the log of the density of (n, d) points at each, and the part of d by which they are nearly on a surface.

    ValueError if they are on one, or if points are equal.
    """
    n, d = points.shape
    if d == 0:
        return np.zeros(n), 0.0
    places = [NEIGHBOURS // 2, NEIGHBOURS]
    spread = np.subtract(*np.quantile(points, [0.75, 0.25], axis=0))
    squares = np.zeros((n, n))
    for column, scale in zip(points.T, spread, strict=True):
        squares += (np.subtract.outer(column, column) / scale) ** 2
    near, far = np.partition(squares, places, axis=1)[:, places].T
    harmonic = [1 / i for i in range(1, NEIGHBOURS)]
    dimension = (
        2 * sum(harmonic[NEIGHBOURS // 2 - 1 :]) / np.log(far / near).mean()
    )  # Levina & Bickel (2004)
    thinness = 1 - dimension / d
    if not thinness < 0.2:
        raise ValueError("the points are on a surface")
    log_ball = d / 2 * math.log(math.pi) - math.lgamma(d / 2 + 1) + np.log(spread).sum()
    log_densities = (
        sum(harmonic) - np.euler_gamma - math.log(n - 1) - log_ball - d / 2 * np.log(far)
    )
    return log_densities, max(thinness - 0.03, 0.0)  # by chance up to 0.03


def _spacing(column: np.ndarray) -> float:
    """Return the distance of numbers on a lattice of thousandths; 1 for other numbers."""
    scaled = np.rint(1000 * column)
    if np.abs(scaled).max() > 1e15 or not np.allclose(1000 * column, scaled, 1e-12, 0.0):
        return 1.0
    return float(np.gcd.reduce((scaled - scaled[0]).astype(np.int64))) / 1000
