"""What the copies of a model share, and what may not be kept in one.

Every particle is a deep copy. Deep copying gives a copy its own of everything, and rebinds what refers to the model
(objects, methods, partial functions, arrays that are views of one another), but for functions and distributions, which
are shared. A function kept in an attribute that refers to the model would go on asking the model that the run began
with, as would a weak reference, and a random stream would give all copies the same numbers: these are refused. What is
large and never changed by a step is shared instead.

`survey` looks through all attributes before a run begins, and after each step, which may have made a function, through
those that may hold one; at most at `_MOST` objects of each.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import itertools
import operator
import random
import re
import sys
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from llmppl.distributions import Proposal
from llmppl.distributions.proposal import is_frozen
from llmppl.models.batched import Batched
from llmppl.models.choices import Sampled
from llmppl.models.streams import ParticleStream
from llmppl.support.shared import Shared

_MOST = 5_000                                           # objects looked at for one attribute
_LARGE = 1 << 20                                        # bytes that a copy may take without a warning
OWN = frozenset(("_chooser_", "_noted_", "_kept_", "_stepping_", "_attribution_"))     # what Model.copy takes care of
_ATOMS = (str, bytes, int, float, complex, bool, type(None))
_PLAIN = (*_ATOMS, type, np.generic, range)
_CONTAINERS = (list, tuple, set, frozenset, deque)
STREAMS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_PACKAGE = __name__.partition(".")[0] + "."
_CACHED = type(functools.cache(len))
_WEAK = (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
Part = tuple[Any, bool, str]                            # an object, whether copies share it, and how it is reached
_SHARED = frozenset((                                   # by name, since they are not to be imported
    "torch.nn.modules.module.Module", "transformers.tokenization_utils_base.PreTrainedTokenizerBase",
    "tokenizers.Tokenizer",
))  # fmt: skip


def shared_names(cls: type) -> frozenset[str]:
    """The attributes that `cls` and its bases list in `shared`; a TypeError for what is no tuple of names."""
    names = set[str]()
    for base in cls.__mro__:
        listed = vars(base).get("shared", ())
        if not isinstance(listed, (tuple, list)) or not all(isinstance(name, str) for name in listed):
            raise TypeError(f'{base.__name__}.shared lists attributes by name: shared = ("table",), not {listed!r}')
        names.update(listed)
    return frozenset(names)


class Kept(Shared):
    """What the copies of a model share, and what is known of it.

    names : the attributes that the class lists in `shared`
    objects : modules, networks and read-only arrays, by id
    known : functions, distributions and tuples that were looked through, by id
    own : distributions of classes outside of this package, by where they are
    by_hand : whether some of its arrays share memory, or it holds a method of a list and the like
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.names, self.objects, self.known = names, dict[int, Any](), dict[int, Any]()
        self.own, self.by_hand = dict[str, Proposal](), False

    def memo(self, model: Any) -> dict[int, Any]:
        """The memo of a deep copy of `model` that shares them, and has no chooser and no random stream."""
        chooser, attribution = model._chooser_, model._attribution_
        named = map(vars(model).get, self.names)        # None, which all copies share, for one that is not set
        return {
            id(chooser): None, id(attribution): attribution, **self.objects, **{id(value): value for value in named},
        }  # fmt: skip

    def walks(self, model: Any, names: Iterable[str], **options: bool) -> list[_Walk]:
        """Walk through these attributes of `model`."""
        found, held = [_Walk(model, name, self, **options) for name in names], dict(attributes_of(model))
        for walk in found:
            walk.run(held[walk.name], walk.name in self.names)
        return found


def survey(model: Any, before: Kept | None = None) -> Kept:
    """What copies of `model` share; after a step, what was found `before` it is known.

    A TypeError if an attribute holds a random stream, or shares with copies something that refers to the model.
    """
    kept = Kept(shared_names(type(model))) if before is None else before
    names = _to_survey(model, kept, before is not None)
    if not names:
        return kept
    walks = kept.walks(model, names, first=before is None)
    for walk in walks:
        if walk.size > _LARGE and before is None:
            warnings.warn(
                f"the attribute {walk.name} of {type(model).__name__} takes {walk.size / (1 << 20):.0f} MB in every "
                f'copy, and every step copies particles: if no step changes it, write shared = ("{walk.name}",) in '
                "the class",
                stacklevel=2,
            )
    kept.by_hand = kept.by_hand or any(_groups(walks)) or any(walk.methods for walk in walks)
    return kept


def _to_survey(model: Any, kept: Kept, again: bool) -> list[str]:
    """The attributes to look through; `again`, those that may hold what was not there before."""
    if not again:
        return [name for name, _ in attributes_of(model) if name not in OWN]
    known = kept.known                                  # this runs for every candidate of every step
    return [
        name for name, value in vars(model).items()
        if not (_HARMLESS[type(value)] or id(value) in known or name in OWN or _is_flat(value, _HARMLESS))
    ]  # fmt: skip


def _groups(walks: Iterable[_Walk]) -> Iterator[tuple[Any, list[Any]]]:
    """The different arrays that share the memory of one owner, with that; among them, tensors and bytearrays.

    Tensors that share their storage with one another alone are left to torch, whose copies share it, too.
    """
    groups: dict[int, tuple[Any, dict[int, Any]]] = {}
    for buffer in (buffer for walk in walks for buffer in walk.buffers):
        owner = buffer
        while (base := getattr(owner, "obj" if isinstance(owner, memoryview) else "base", None)) is not None:
            owner = base
        key = owner.untyped_storage().data_ptr() if _is_tensor(owner) else id(owner)
        groups.setdefault(key, (owner, {}))[1][id(buffer)] = buffer
    for owner, group in groups.values():
        if len(group) > 1 and not all(map(_is_tensor, group.values())):
            yield owner, [*group.values()]


def _is_tensor(value: Any) -> bool:
    return hasattr(type(value), "untyped_storage")


def _copied_by_hand(model: Any, kept: Kept, copies: dict[int, Any]) -> None:
    """Add to the memo `copies` what `copy.deepcopy` would part: arrays that share memory, a list and its methods."""
    walks = kept.walks(model, _to_survey(model, kept, False), copying=True)
    for owner, arrays in _groups(walks):
        if {np.ndarray} != set(map(type, (owner, *arrays))) or owner.dtype.hasobject:
            raise TypeError(
                f"attributes of {type(model).__name__} are views of one {type(owner).__name__}, which copies would "
                "part: keep that alone, and make views of it where they are used"
            )
        whole = copies[id(owner)] = owner.copy(order="K")
        for array in arrays:
            if array is not owner:
                at = array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
                view = np.ndarray(array.shape, array.dtype, whole.ravel(order="K").data, at, array.strides)
                view.flags.writeable = array.flags.writeable
                copies[id(array)] = view
    for method in (method for walk in walks for method in walk.methods):
        copies[id(method)] = getattr(copy.deepcopy(method.__self__, copies), method.__name__)


def deep_copy(model: Any, kept: Kept, memo: dict[int, Any]) -> Any:
    """A deep copy of `model` by this `memo`; what is its own copy, as mostly all is, costs a look at its type."""
    cls: Any = type(model)
    if not _plainly_copied(cls):
        memo.update({**kept.memo(model), **memo})
        make, arguments, *state = model.__reduce_ex__(4)
        memo[id(model)] = made = make(*copy.deepcopy(arguments, memo))
        if kept.by_hand:
            _copied_by_hand(model, kept, memo)
        return copy._reconstruct(model, memo, lambda: made, (), *state)         # type: ignore[attr-defined]
    new = cls.__new__(cls)
    attributes = vars(new)
    attributes.update(vars(model))
    for name, value in vars(model).items():
        if _IS_ITS_OWN_COPY[type(value)] or name in kept.names or name in OWN:
            continue
        if id(model) not in memo:                       # it is not filled where nothing asks for it
            memo.update({**kept.memo(model), **memo, id(model): new})
            if kept.by_hand:
                _copied_by_hand(model, kept, memo)
        if id(value) not in memo:
            memo[id(value)] = _flat_copy(value) if _is_flat(value, _IS_ITS_OWN_COPY) else copy.deepcopy(value, memo)
        attributes[name] = memo[id(value)]
    if (chooser := model._chooser_) is not None:
        attributes["_chooser_"] = chooser.__deepcopy__(memo)
    return new


def _is_flat(value: Any, kinds: dict[type, bool]) -> bool:
    """Whether it is a list, tuple, set or dict of nothing but objects of these kinds."""
    kind = type(value)
    if kind is dict and not all(map(kinds.__getitem__, map(type, value.values()))):
        return False
    return kind in (list, tuple, set, dict) and all(map(kinds.__getitem__, map(type, value)))


def _flat_copy(value: Any) -> Any:
    return value if type(value) is tuple else value.copy()


class _IsItsOwnCopy(dict[type, bool]):
    """Whether the deep copy of an instance of a class is the instance, worked out once for each class."""

    def __missing__(self, cls: type) -> bool:
        own = cls in (*_ATOMS, types.FunctionType, *weakref.ProxyTypes) or issubclass(cls, type)
        self[cls] = found = own or getattr(cls, "__deepcopy__", None) is Shared.__deepcopy__
        return found


class _IsHarmless(dict[type, bool]):
    """The same, if besides no instance of the class can refer to a model."""

    def __missing__(self, cls: type) -> bool:
        self[cls] = found = _IS_ITS_OWN_COPY[cls] and not issubclass(cls, _SUSPECT)
        return found


_FUNCTIONS = types.FunctionType, types.BuiltinFunctionType
_SUSPECT = (Proposal, Batched, *_FUNCTIONS, *weakref.ProxyTypes)
_IS_ITS_OWN_COPY, _HARMLESS = _IsItsOwnCopy(), _IsHarmless()


@functools.cache
def _plainly_copied(cls: type) -> bool:
    """Whether the state of an instance is its attributes, and copying it is left to Python."""
    own = {"__setstate__", "__getnewargs__", "__getnewargs_ex__"}.intersection(dir(cls))
    slots = any(vars(base).get("__slots__") for base in cls.__mro__)
    return not own and not slots and not says_its_state(cls)


def says_its_state(cls: type) -> bool:
    """Check whether a class says itself what a pickle or a copy of an instance holds."""
    own = operator.attrgetter("__reduce_ex__", "__reduce__", "__getstate__")
    return bool(own(cls) != own(object))


def blame(model: Any, kept: Kept, error: Exception) -> None:
    """A TypeError that names the attribute by which copying `model` ended with this error, if it does so again."""
    for name, value in vars(model).items():
        bound = isinstance(value, types.BuiltinMethodType) and not _is_fixed(value.__self__)
        try:
            copy.deepcopy(value.__self__ if bound else value, {id(model): model, **kept.memo(model)})
        except type(error) as again:
            if again.args == error.args:                # else it is of a signal handler, say
                raise TypeError(
                    f"the attribute {name} of {type(model).__name__} cannot be copied ({error}): override copy(), or "
                    f'list it in shared = ("{name}",)'
                ) from error


class _Walk:
    """Looks through one attribute.

    size : int
        Bytes that a deep copy of what was seen takes, roughly.
    """

    def __init__(self, model: Any, name: str, kept: Kept, *, first: bool = False, copying: bool = False) -> None:
        self.model, self.name, self.kept, self._first, self._copying = model, name, kept, first, copying
        self.size, self.buffers = 0, list[Any]()        # arrays, tensors and bytearrays that are copied
        self.methods = list[types.BuiltinMethodType]()  # and of copied objects

    def run(self, value: Any, shared: bool) -> None:
        todo, seen, left = deque([(value, shared, self.name)]), set[tuple[int, bool]](), _MOST
        while todo:                                     # the nearest first
            value, shared, path = todo.popleft()
            known = shared if self._copying else id(value) in self.kept.known
            if known or isinstance(value, _PLAIN) or (id(value), shared) in seen:
                continue
            seen.add((id(value), shared))
            if not self._copying:
                self._check(value, shared, path)
            for part, also, step in itertools.islice(self._parts(value, shared), left):
                left -= 1
                todo.append((part, also, path + step))
            if isinstance(value, types.BuiltinMethodType) and not (shared or _is_fixed(value.__self__)):
                self.methods.append(value)
            elif self._first and isinstance(value, (*_SUSPECT, tuple)):
                self.kept.known[id(value)] = value
            if isinstance(value, Proposal) and not type(value).__module__.startswith(_PACKAGE):
                self.kept.own[path] = value

    def _check(self, value: Any, shared: bool, path: str) -> None:
        owner = type(self.model).__name__
        weak = isinstance(value, (weakref.ReferenceType, *weakref.ProxyTypes))
        if (shared or weak) and self._is_wrong(value, weak):
            held = "holds a weak reference to" if weak else "refers to"
            whom = "the model itself" if self._first or weak else "another particle, which has made it"
            raise TypeError(
                f"the attribute {self.name} of {owner} {held} {whom} ({path}), and copies share it: all particles "
                "would go on asking the same one. Write a method, make it anew in every step(), or pass it what it "
                "needs as an argument"
            )
        if isinstance(value, Sampled):
            value = value.stream
        if isinstance(value, STREAMS) and not isinstance(value, ParticleStream):
            raise TypeError(
                f"the attribute {self.name} of {owner} holds a random stream ({path}), of which copies would draw the "
                "same numbers: draw from self.rng instead, which is each particle's own, or by self.sample(...)"
            )

    def _is_wrong(self, value: Any, weak: bool) -> bool:
        """Whether copies go on asking the model that is surveyed first, or already ask another than their own."""
        model = self.model
        asked = value() if isinstance(value, weakref.ReferenceType) else value
        if weak:
            return isinstance(asked, type(model))
        return value is model if self._first else type(value) is type(model) and value is not model

    def _parts(self, value: Any, shared: bool) -> Iterable[Part]:
        """What `value` holds, whether copies share that, and how it is reached."""
        if _is_kept(value):
            if not shared and self._first:
                self.kept.objects[id(value)] = value
            return ()
        if not shared:
            self.size += _bytes(value)
            if isinstance(value, np.ndarray | bytearray) or _is_tensor(value):
                self.buffers.append(value)
        parts = next((parts for kinds, parts in _PARTS if isinstance(value, kinds)), _parts_of_object)
        return parts(value, shared, self.model)


def held_by(function: types.FunctionType) -> Iterator[tuple[str, str, Any]]:
    """Yield what a function refers to: "variable", "default" or "global", and its name and value."""
    code, defaults = function.__code__, function.__defaults__ or ()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):           # a variable that has no value yet
            yield "variable", name, cell.cell_contents
    last = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    for name, value in (*zip(last, defaults, strict=True), *(function.__kwdefaults__ or {}).items()):
        yield "default", name, value
    for name in sorted(names_in(code, ("LOAD_GLOBAL", "LOAD_NAME")) & function.__globals__.keys()):
        yield "global", name, function.__globals__[name]


def _parts_of_function(function: types.FunctionType, shared: bool, model: Any) -> Iterator[Part]:
    for kind, name, part in held_by(function):
        if kind != "global" or part is model:
            yield part, True, " has a default" if kind == "default" else f" uses {name}"
    yield from ((part, True, f".{name}") for name, part in vars(function).items())


def _parts_of_dict(table: dict[Any, Any], shared: bool, model: Any) -> Iterator[Part]:
    yield getattr(table, "default_factory", None), shared, ".default_factory"
    yield from ((key, shared, " has a key") for key in table)
    yield from ((part, shared, f"[{key!r}]") for key, part in table.items())


def _parts_of_object(value: Any, shared: bool, model: Any) -> Iterator[Part]:
    if value is not model and (hasattr(value, "_noted_") or not hasattr(type(value), "__deepcopy__")):
        for name, part in attributes_of(value):
            if not (shared and isinstance(part, STREAMS)):         # an object of many may have its own
                yield part, shared, f".{name}"


_PARTS: tuple[tuple[Any, Callable[[Any, bool, Any], Iterable[Part]]], ...] = (
    (types.FunctionType, _parts_of_function),
    (types.MethodType, lambda m, shared, _: [(m.__func__, True, ".__func__"), (m.__self__, shared, ".__self__")]),
    (types.BuiltinMethodType, lambda method, shared, _: [(method.__self__, shared, ".__self__")]),
    (
        functools.partial,
        lambda p, shared, _: [(p.func, shared, ".func"), (p.args, shared, ".args"), (p.keywords, shared, ".keywords")],
    ),
    (Proposal, lambda proposal, *_: [(vars(proposal), True, "")]),
    (_CACHED, lambda function, *_: [(function.__wrapped__, True, ".__wrapped__")]),
    (Batched, lambda batched, *_: [(batched.function, True, ".function")]),
    (ParticleStream, lambda stream, shared, _: [(stream.particle, shared, "'s particle")]),
    (_WEAK, lambda weak, shared, _: [(weak.data, shared, "")]),
    (dict, _parts_of_dict),
    (_CONTAINERS, lambda parts, shared, _: ((part, shared, "[...]") for part in parts)),
)


@functools.lru_cache(1 << 10)
def names_in(code: types.CodeType, operations: tuple[str, ...] = ()) -> frozenset[str]:
    """Return the names that a function and those inside it use, by these operations if some are given."""
    used = (each.argval for each in dis.get_instructions(code) if each.opname in operations)
    inner = [names_in(value, operations) for value in code.co_consts if isinstance(value, types.CodeType)]
    return frozenset(used if operations else code.co_names).union(*inner)


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object, those in slots included."""
    yield from getattr(value, "__dict__", {}).items()
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and not name.startswith("__"):
                yield name, getattr(value, name)


def _is_kept(value: Any) -> bool:
    """Whether copies share `value` itself: it never changes in a step, or is far too large to be copied."""
    if isinstance(value, (np.ndarray, types.ModuleType)):
        return isinstance(value, types.ModuleType) or is_frozen(value)
    return any(f"{base.__module__}.{base.__qualname__}" in _SHARED for base in type(value).__mro__)


def _is_fixed(value: Any) -> bool:
    """Whether the methods of a builtin object change nothing of it."""
    return isinstance(value, (*_PLAIN, types.ModuleType, re.Pattern))


def _bytes(value: Any) -> int:
    if isinstance(value, (*_CONTAINERS, dict, bytearray)):
        return sys.getsizeof(value)
    size = value.numel() * value.element_size() if _is_tensor(value) else getattr(value, "nbytes", 0)
    return size if isinstance(size, int) else 0
