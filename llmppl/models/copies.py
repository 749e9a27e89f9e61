"""Copies of models: the parts that copies share, and the parts that a model must not have.

Every particle is a deep copy. Deep copying gives a copy its own objects and rebinds references to the model (objects,
methods, partial functions, views of arrays). Functions and distributions are exceptions: copies share them.

Two kinds of attributes are refused. A shared function or weak reference that refers to the model would always ask the
model with which the run began. A random stream would give the same numbers to all copies. Large parts that no step
changes are shared instead of copied.

`inspect_attributes` examines all attributes before a run begins. After each step, which may have made a function,
`inspect_new_attributes` examines the attributes that may hold one. Each examines at most `_MOST` objects per attribute.
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
from llmppl.models.alike import is_tensor
from llmppl.models.batched import Batched
from llmppl.models.choices import Sampled
from llmppl.models.streams import ParticleStream
from llmppl.support.shared import Shared

_MOST = 5_000                                           # objects examined for one attribute
_LARGE = 1 << 20                                        # bytes that a copy may take without a warning
OWN = frozenset(("_chooser_", "_noted_", "_shared_parts_", "_stepping_", "_attribution_"))     # Model.copy sets these
_ATOMS = (str, bytes, int, float, complex, bool, type(None))
_PLAIN = (*_ATOMS, type, np.generic, range)
_CONTAINERS = (list, tuple, set, frozenset, deque)
STREAMS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_PACKAGE = __name__.partition(".")[0] + "."
_CACHED = type(functools.cache(len))
_FUNCTIONS = types.FunctionType, types.BuiltinFunctionType
_SUSPECT = (Proposal, Batched, *_FUNCTIONS, *weakref.ProxyTypes)    # may refer to a model, though copies share them
_WEAK_REFERENCES: tuple[type, ...] = (weakref.ReferenceType, *weakref.ProxyTypes)
_WEAK_CONTAINERS = (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
Part = tuple[Any, bool, str]                            # an object, True if copies share it, and the path to it
_SHARED = frozenset((                                   # by name, since these modules are not to be imported
    "torch.nn.modules.module.Module", "transformers.tokenization_utils_base.PreTrainedTokenizerBase",
    "tokenizers.Tokenizer",
))  # fmt: skip


def shared_names(cls: type) -> frozenset[str]:
    """Return the attributes that `cls` and its bases list in `shared`. TypeError if that is no tuple of names."""
    names = set[str]()
    for base in cls.__mro__:
        listed = vars(base).get("shared", ())
        if not isinstance(listed, (tuple, list)) or not all(isinstance(name, str) for name in listed):
            raise TypeError(f'{base.__name__}.shared lists attributes by name: shared = ("table",), not {listed!r}')
        names.update(listed)
    return frozenset(names)


class SharedParts(Shared):
    """Parts that all copies of a model share, and the results of inspecting its attributes.

    names : attributes that the class lists in `shared`
    objects : modules, networks and read-only arrays, by id
    known : inspected functions, distributions and tuples, by id
    own_distributions : distributions of classes outside of this package, by path
    has_links : True if some arrays share memory, or the model holds a method of a list and the like
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.names, self.objects, self.known = names, dict[int, Any](), dict[int, Any]()
        self.own_distributions, self.has_links = dict[str, Proposal](), False

    def memo(self, model: Any) -> dict[int, Any]:
        """Return the memo of a deep copy of `model` that shares these parts, and has no chooser and no stream."""
        chooser, attribution = model._chooser_, model._attribution_
        named = map(vars(model).get, self.names)        # None, which all copies share, for a missing attribute
        return {
            id(chooser): None, id(attribution): attribution, **self.objects, **{id(value): value for value in named},
        }  # fmt: skip

    def fill(self, memo: dict[int, Any], model: Any, new: Any) -> None:
        """Add to `memo` the shared parts of `model`, its copy `new`, and copies of linked objects."""
        memo.update({**self.memo(model), **memo, id(model): new})
        if self.has_links:
            _copy_links(model, self, memo)


# ---- inspection


def inspect_attributes(model: Any) -> SharedParts:
    """Return the parts that copies of `model` share.

    Raises
    ------
    TypeError
        If an attribute holds a random stream, or an object that copies share and that refers to the model.
    """
    parts = SharedParts(shared_names(type(model)))
    for name, size in _inspect(model, parts, _names_to_copy(model), first=True).items():
        if size > _LARGE:
            warnings.warn(
                f"the attribute {name} of {type(model).__name__} takes {size / (1 << 20):.0f} MB in every "
                f'copy, and every step copies particles: if no step changes it, write shared = ("{name}",) in '
                "the class",
                stacklevel=2,
            )
    return parts


def inspect_new_attributes(model: Any, parts: SharedParts) -> None:
    """Inspect the attributes that a step may have made. It runs for every candidate of every step."""
    known = parts.known
    names = [
        name for name, value in vars(model).items()
        if not (_HARMLESS[type(value)] or id(value) in known or name in OWN or _is_flat(value, _HARMLESS))
    ]  # fmt: skip
    if names:
        _inspect(model, parts, names, first=False)


def _names_to_copy(model: Any) -> list[str]:
    return [name for name, _ in attributes_of(model) if name not in OWN]


def _inspect(model: Any, parts: SharedParts, names: Iterable[str], *, first: bool) -> dict[str, int]:
    """Check attributes and record their shared parts. Return the bytes that a deep copy of each takes, roughly."""
    values, links, sizes = dict(attributes_of(model)), _Links(), dict[str, int]()
    for name in names:
        sizes[name] = 0
        for value, shared, path in _reachable(model, parts, name, values[name]):
            _check(model, name, value, shared, path, first=first)
            is_link = not shared and links.add(value)
            if first and not is_link and isinstance(value, (*_SUSPECT, tuple)):
                parts.known[id(value)] = value
            if isinstance(value, Proposal) and not type(value).__module__.startswith(_PACKAGE):
                parts.own_distributions[path] = value
            if not shared and not _is_shareable(value):
                sizes[name] += _bytes(value)
            elif not shared and first:
                parts.objects[id(value)] = value
    parts.has_links = parts.has_links or links.exist()
    return sizes


def _reachable(model: Any, parts: SharedParts, name: str, value: Any, *, copying: bool = False) -> Iterator[Part]:
    """Yield the objects that the attribute `name` holds, the nearest first; known ones and atoms are left out.

    With `copying`, the objects that copies share are left out instead of the known ones.
    """
    todo, seen, num_left = deque([(value, name in parts.names, name)]), set[tuple[int, bool]](), _MOST
    while todo:
        value, shared, path = todo.popleft()
        is_known = shared if copying else id(value) in parts.known
        if is_known or isinstance(value, _PLAIN) or (id(value), shared) in seen:
            continue
        seen.add((id(value), shared))
        yield value, shared, path
        if _is_shareable(value):
            continue
        parts_of = next((parts_of for kinds, parts_of in _PARTS if isinstance(value, kinds)), _parts_of_object)
        for part, part_shared, step in itertools.islice(parts_of(value, shared, model), num_left):
            num_left -= 1
            todo.append((part, part_shared, path + step))


def _check(model: Any, name: str, value: Any, shared: bool, path: str, *, first: bool) -> None:
    """Raise a TypeError for a wrong reference to a model, and for a random stream."""
    wrong = _wrong_reference(model, value, shared, first)
    if wrong:
        raise TypeError(
            f"the attribute {name} of {type(model).__name__} {wrong} ({path}), and copies share it: all particles "
            "would go on asking the same one. Write a method, make it anew in every step(), or pass it what it "
            "needs as an argument"
        )
    if isinstance(value, Sampled):
        value = value.stream
    if isinstance(value, STREAMS) and not isinstance(value, ParticleStream):
        raise TypeError(
            f"the attribute {name} of {type(model).__name__} holds a random stream ({path}), of which copies would "
            "draw the same numbers: draw from self.rng instead, which is each particle's own, or by self.sample(...)"
        )


def _wrong_reference(model: Any, value: Any, shared: bool, first: bool) -> str:
    """Return how `value` refers to a model that its copies would keep; "" if it does not."""
    if isinstance(value, _WEAK_REFERENCES):
        referent = value() if isinstance(value, weakref.ReferenceType) else value
        return "holds a weak reference to the model itself" if isinstance(referent, type(model)) else ""
    if not shared:
        return ""
    if first:
        return "refers to the model itself" if value is model else ""
    is_other = type(value) is type(model) and value is not model
    return "refers to another particle, which has made it" if is_other else ""


# ---- deep copies


def deep_copy(model: Any, parts: SharedParts, memo: dict[int, Any]) -> Any:
    """Return a deep copy of `model` by this `memo`. An attribute that is its own copy costs one look-up."""
    cls: Any = type(model)
    if not _has_default_copy(cls):
        return _copy_by_reduce(model, parts, memo)
    new = cls.__new__(cls)
    attributes = vars(new)
    attributes.update(vars(model))
    for name, value in vars(model).items():
        if _IS_ITS_OWN_COPY[type(value)] or name in parts.names or name in OWN:
            continue
        if id(model) not in memo:                       # filled only if an attribute needs it
            parts.fill(memo, model, new)
        if id(value) not in memo:
            memo[id(value)] = _flat_copy(value) if _is_flat(value, _IS_ITS_OWN_COPY) else copy.deepcopy(value, memo)
        attributes[name] = memo[id(value)]
    if (chooser := model._chooser_) is not None:
        attributes["_chooser_"] = chooser.__deepcopy__(memo)
    return new


def _copy_by_reduce(model: Any, parts: SharedParts, memo: dict[int, Any]) -> Any:
    """Return a deep copy of a model whose class defines its own state or has slots."""
    memo.update({**parts.memo(model), **memo})
    make, arguments, *state = model.__reduce_ex__(4)
    new = make(*copy.deepcopy(arguments, memo))
    parts.fill(memo, model, new)
    return copy._reconstruct(model, memo, lambda: new, (), *state)              # type: ignore[attr-defined]


def raise_copy_error(model: Any, parts: SharedParts, error: Exception) -> None:
    """Raise a TypeError that names the attribute whose copy raises `error` again; return if there is none."""
    for name, value in vars(model).items():
        bound = isinstance(value, types.BuiltinMethodType) and not _is_fixed(value.__self__)
        try:
            copy.deepcopy(value.__self__ if bound else value, {id(model): model, **parts.memo(model)})
        except type(error) as again:
            if again.args == error.args:                # else it is an error of a signal handler, say
                raise TypeError(
                    f"the attribute {name} of {type(model).__name__} cannot be copied ({error}): override copy(), or "
                    f'list it in shared = ("{name}",)'
                ) from error


class _Links:
    """Objects of a model that `copy.deepcopy` would separate: arrays over one memory, and a list and its methods."""

    def __init__(self) -> None:
        self.buffers = list[Any]()                      # arrays, tensors and bytearrays
        self.methods = list[types.BuiltinMethodType]()

    def add(self, value: Any) -> bool:
        """Record a copied object that may be linked to others. Return True if it is a method."""
        if isinstance(value, types.BuiltinMethodType) and not _is_fixed(value.__self__):
            self.methods.append(value)
            return True
        if (isinstance(value, np.ndarray | bytearray) or is_tensor(value)) and not _is_shareable(value):
            self.buffers.append(value)
        return False

    def exist(self) -> bool:
        return bool(self.methods) or any(self.groups())

    def groups(self) -> Iterator[tuple[Any, list[Any]]]:
        """Yield each memory that several different buffers share: its owner and the buffers.

        Tensors that share their storage only with one another are left to torch, whose copies share it as well.
        """
        groups: dict[int, tuple[Any, dict[int, Any]]] = {}
        for buffer in self.buffers:
            owner = _owner_of_memory(buffer)
            key = owner.untyped_storage().data_ptr() if is_tensor(owner) else id(owner)
            groups.setdefault(key, (owner, {}))[1][id(buffer)] = buffer
        for owner, group in groups.values():
            if len(group) > 1 and not all(map(is_tensor, group.values())):
                yield owner, [*group.values()]


def _owner_of_memory(buffer: Any) -> Any:
    owner = buffer
    while (base := getattr(owner, "obj" if isinstance(owner, memoryview) else "base", None)) is not None:
        owner = base
    return owner


def _copy_links(model: Any, parts: SharedParts, memo: dict[int, Any]) -> None:
    """Add to `memo` the copies of linked objects, linked in the same way."""
    links, values = _Links(), dict(attributes_of(model))
    for name in _names_to_copy(model):
        for value, _, _ in _reachable(model, parts, name, values[name], copying=True):
            links.add(value)
    for owner, arrays in links.groups():
        if {np.ndarray} != set(map(type, (owner, *arrays))) or owner.dtype.hasobject:
            raise TypeError(
                f"attributes of {type(model).__name__} are views of one {type(owner).__name__}, which copies would "
                "part: keep that alone, and make views of it where they are used"
            )
        new_owner = memo[id(owner)] = owner.copy(order="K")
        memo.update({id(array): _same_view(array, owner, new_owner) for array in arrays if array is not owner})
    for method in links.methods:
        memo[id(method)] = getattr(copy.deepcopy(method.__self__, memo), method.__name__)


def _same_view(array: np.ndarray, owner: np.ndarray, new_owner: np.ndarray) -> np.ndarray:
    """Return the view of `new_owner` that `array` is of `owner`."""
    offset = array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
    view = np.ndarray(array.shape, array.dtype, new_owner.ravel(order="K").data, offset, array.strides)
    view.flags.writeable = array.flags.writeable
    return view


# ---- classes


class _ByClass(dict[type, bool]):
    """A predicate of classes as a table; it is computed once for each class."""

    def __init__(self, predicate: Callable[[type], bool]) -> None:
        super().__init__()
        self._predicate = predicate

    def __missing__(self, cls: type) -> bool:
        self[cls] = found = self._predicate(cls)
        return found


def _is_its_own_copy(cls: type) -> bool:
    """Return True if the deep copy of an instance is the instance."""
    is_atom = cls in (*_ATOMS, types.FunctionType, *weakref.ProxyTypes) or issubclass(cls, type)
    return is_atom or getattr(cls, "__deepcopy__", None) is Shared.__deepcopy__


def _is_harmless(cls: type) -> bool:
    """Return True if an instance is its own copy and cannot refer to a model."""
    return _is_its_own_copy(cls) and not issubclass(cls, _SUSPECT)


_IS_ITS_OWN_COPY, _HARMLESS = _ByClass(_is_its_own_copy), _ByClass(_is_harmless)


def _is_flat(value: Any, kinds: _ByClass) -> bool:
    """Return True if `value` is a list, tuple, set or dict whose parts all are of these kinds."""
    kind = type(value)
    if kind is dict and not all(map(kinds.__getitem__, map(type, value.values()))):
        return False
    return kind in (list, tuple, set, dict) and all(map(kinds.__getitem__, map(type, value)))


def _flat_copy(value: Any) -> Any:
    return value if type(value) is tuple else value.copy()


@functools.cache
def _has_default_copy(cls: type) -> bool:
    """Return True if the state of an instance is its attributes, and Python's default copies them."""
    own = {"__setstate__", "__getnewargs__", "__getnewargs_ex__"}.intersection(dir(cls))
    slots = any(vars(base).get("__slots__") for base in cls.__mro__)
    return not own and not slots and not says_its_state(cls)


def says_its_state(cls: type) -> bool:
    """Return True if a class itself defines the contents of a pickle or a copy."""
    own = operator.attrgetter("__reduce_ex__", "__reduce__", "__getstate__")
    return bool(own(cls) != own(object))


def _is_shareable(value: Any) -> bool:
    """Return True if copies share `value` itself: no step can change it, or it is far too large to be copied."""
    if isinstance(value, np.ndarray):
        return is_frozen(value)
    return isinstance(value, types.ModuleType) or _is_large(type(value))             # type: ignore[arg-type]


@functools.cache
def _is_large(cls: type) -> bool:
    return any(f"{base.__module__}.{base.__qualname__}" in _SHARED for base in cls.__mro__)


def _is_fixed(value: Any) -> bool:
    """Return True if the methods of a built-in object do not change it."""
    return isinstance(value, (*_PLAIN, types.ModuleType, re.Pattern))


def _bytes(value: Any) -> int:
    if isinstance(value, (*_CONTAINERS, dict, bytearray)):
        return sys.getsizeof(value)
    size = value.numel() * value.element_size() if is_tensor(value) else getattr(value, "nbytes", 0)
    return size if isinstance(size, int) else 0


# ---- the parts of an object


def held_by(function: types.FunctionType) -> Iterator[tuple[str, str, Any]]:
    """Yield the objects to which a function refers: "variable", "default" or "global", its name, and the object."""
    code, defaults = function.__code__, function.__defaults__ or ()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):           # a variable without a value
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
            if not (shared and isinstance(part, STREAMS)):          # an object that copies share may have its own
                yield part, shared, f".{name}"


def _attributes(*names: str, shared: bool | None = None) -> Callable[[Any, bool, Any], list[Part]]:
    """Return a function that lists these attributes of an object, shared by copies as the object is, or as given."""
    return lambda value, outer, _: [
        (getattr(value, name), outer if shared is None else shared, f".{name}") for name in names
    ]


_PARTS: tuple[tuple[Any, Callable[[Any, bool, Any], Iterable[Part]]], ...] = (
    (types.FunctionType, _parts_of_function),
    (types.MethodType, lambda m, shared, _: [(m.__func__, True, ".__func__"), (m.__self__, shared, ".__self__")]),
    (types.BuiltinMethodType, _attributes("__self__")),
    (functools.partial, _attributes("func", "args", "keywords")),
    (Proposal, lambda proposal, *_: [(vars(proposal), True, "")]),
    (_CACHED, _attributes("__wrapped__", shared=True)),
    (Batched, _attributes("function", shared=True)),
    (ParticleStream, lambda stream, shared, _: [(stream.particle, shared, "'s particle")]),
    (_WEAK_CONTAINERS, lambda weak, shared, _: [(weak.data, shared, "")]),
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
    """Yield the attributes of an object and their values, including those in slots."""
    yield from getattr(value, "__dict__", {}).items()
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and not name.startswith("__"):
                yield name, getattr(value, name)
