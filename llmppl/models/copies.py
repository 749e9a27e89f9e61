"""What the copies of a model share, and what may not be kept in one.

Every particle is a deep copy. Deep copying gives a copy its own of everything, and rebinds what refers to the model
(objects, methods, partial functions), but for functions and distributions, which are shared. A function kept in an
attribute that refers to the model would go on asking the model that the run began with, and a random stream would
give all copies the same numbers: both are refused. What is large and never changed by a step is shared instead.

`survey` looks through the attributes once a run, and at most at `_MOST` objects of each.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import itertools
import operator
import random
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from llmppl.distributions import Proposal
from llmppl.models.batching import Batched
from llmppl.models.choices import Sampled
from llmppl.shared import Shared

_MOST = 5_000                                           # objects looked at for one attribute
_LARGE = 1 << 20                                        # bytes that a copy may take without a warning
OWN = frozenset(("chooser", "_noted", "_kept", "_stepping", "attribution"))         # what Model.copy takes care of
_ATOMS = (str, bytes, int, float, complex, bool, type(None))
_PLAIN = (*_ATOMS, type, np.generic, range)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_STREAMS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, Sampled)
_CACHED = type(functools.cache(len))
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


class Kept(NamedTuple):
    """What copies share: the attributes called `names`, and `objects` (by id): modules, networks, read-only arrays."""

    names: frozenset[str]
    objects: dict[int, Any]

    def memo(self, model: Any) -> dict[int, Any]:
        """The memo of a deep copy of `model` that shares them, and has no chooser and no random stream."""
        chooser, attribution = model.chooser, model.attribution
        named = map(vars(model).get, self.names)        # None, which all copies share, for one that is not set
        return {
            id(chooser): None, id(getattr(chooser, "stream", None)): None, id(attribution): attribution,
            **self.objects, id(self): self, **{id(value): value for value in named},
        }  # fmt: skip


def survey(model: Any) -> Kept:
    """What copies of `model` share.

    A TypeError if an attribute holds a random stream, or shares with copies something that refers to the model.
    """
    kept = Kept(shared_names(type(model)), {})
    for name, value in vars(model).items():
        if name not in OWN:
            walk = _Walk(model, name, kept.objects)
            walk.run(value, name in kept.names)
            if walk.size > _LARGE:
                warnings.warn(
                    f"the attribute {name} of {type(model).__name__} takes {walk.size / (1 << 20):.0f} MB in every "
                    f'copy, and every step copies particles: if no step changes it, write shared = ("{name}",) in the '
                    "class",
                    stacklevel=2,
                )
    return kept


def deep_copy(model: Any, kept: Kept) -> Any:
    """`copy.deepcopy(model, kept.memo(model))`; what is its own copy, as mostly all is, costs a look at its type."""
    cls: Any = type(model)
    if not _plainly_copied(cls):
        return copy.deepcopy(model, kept.memo(model))
    new = cls.__new__(cls)
    attributes, memo = vars(new), dict[int, Any]()
    attributes.update(vars(model))
    for name, value in vars(model).items():
        if _IS_ITS_OWN_COPY[type(value)] or name in kept.names or name in OWN:
            continue
        if not memo:                                    # holds `kept`, at least
            memo = {**kept.memo(model), id(model): new}
        if id(value) not in memo:
            copied = _flat_copy(value)
            if copied is None:
                copied = copy.deepcopy(value, memo)
            memo[id(value)] = copied
        attributes[name] = memo[id(value)]
    if "chooser" in attributes:
        attributes["chooser"] = None
    return new


def _flat_copy(value: Any) -> Any:
    """The deep copy of a list, tuple, set or dict of nothing but what is its own copy; else None."""
    kind = type(value)
    if kind is list or kind is tuple or kind is set or (kind is dict and _all_are_their_own(value.values())):
        if _all_are_their_own(value):
            return value if kind is tuple else value.copy()
    return None


def _all_are_their_own(values: Iterable[Any]) -> bool:
    return all(map(_IS_ITS_OWN_COPY.__getitem__, map(type, values)))


class _IsItsOwnCopy(dict[type, bool]):
    """Whether the deep copy of an instance of a class is the instance, worked out once for each class."""

    def __missing__(self, cls: type) -> bool:
        own = cls in (*_ATOMS, types.FunctionType, types.BuiltinFunctionType) or issubclass(cls, type)
        self[cls] = found = own or getattr(cls, "__deepcopy__", None) is Shared.__deepcopy__
        return found


_IS_ITS_OWN_COPY = _IsItsOwnCopy()


@functools.cache
def _plainly_copied(cls: type) -> bool:
    """Whether the state of an instance is its attributes, and copying it is left to Python."""
    own = {"__deepcopy__", "__setstate__", "__getnewargs__", "__getnewargs_ex__"}.intersection(dir(cls))
    slots = any(vars(base).get("__slots__") for base in cls.__mro__)
    usual = operator.attrgetter("__reduce_ex__", "__reduce__", "__getstate__")
    return not own and not slots and usual(cls) == usual(object)


def culprit(model: Any, kept: Kept, error: Exception) -> TypeError:
    """The error of a deep copy, with the attribute that cannot be copied named."""
    for name, value in vars(model).items():
        try:
            copy.deepcopy(value, {id(model): model, **kept.memo(model)})
        except Exception as own:
            return TypeError(
                f"the attribute {name} of {type(model).__name__} cannot be copied ({own}): override copy(), or list "
                f'it in shared = ("{name}",)'
            )
    return TypeError(f"{type(model).__name__} cannot be copied ({error}): override copy()")


class _Walk:
    """Looks through one attribute.

    size : int
        Bytes that a deep copy of what was seen takes, roughly.
    """

    def __init__(self, model: Any, name: str, kept: dict[int, Any]) -> None:
        self.model, self.name, self.kept = model, name, kept
        self.size = 0

    def run(self, value: Any, shared: bool) -> None:
        todo, seen, left = deque([(value, shared, self.name)]), set[tuple[int, bool]](), _MOST
        while todo:                                     # the nearest first
            value, shared, path = todo.popleft()
            if isinstance(value, _PLAIN) or (id(value), shared) in seen:
                continue
            seen.add((id(value), shared))
            self._check(value, shared, path)
            for part, also, step in itertools.islice(self._parts(value, shared), left):
                left -= 1
                todo.append((part, also, path + step))

    def _check(self, value: Any, shared: bool, path: str) -> None:
        owner = type(self.model).__name__
        if value is self.model and shared:
            raise TypeError(
                f"the attribute {self.name} of {owner} refers to the model itself ({path}), and copies share it: all "
                "particles would go on asking the model that the run began with. Make it in step(), or pass it what it "
                "needs as an argument"
            )
        own = getattr(self.model.chooser, "stream", None)                       # it is replaced in a copy
        if isinstance(value, _STREAMS) and value is not own:
            raise TypeError(
                f"the attribute {self.name} of {owner} holds a random stream ({path}), of which copies would draw the "
                "same numbers: draw from self.rng instead, which is each particle's own, or by self.sample(...)"
            )

    def _parts(self, value: Any, shared: bool) -> Iterable[Part]:
        """What `value` holds, whether copies share that, and how it is reached."""
        if _is_kept(value):
            if not shared:
                self.kept[id(value)] = value
            return ()
        if not shared:
            self.size += _bytes(value)
        parts = next((parts for kinds, parts in _PARTS if isinstance(value, kinds)), _parts_of_object)
        return parts(value, shared, self.model)


def _parts_of_function(function: types.FunctionType, shared: bool, model: Any) -> Iterator[Part]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):           # a variable that has no value yet
            yield cell.cell_contents, True, f" uses {name}"
    for part in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield part, True, " has a default"
    yield from ((part, True, f".{name}") for name, part in vars(function).items())
    yield from ((model, True, f" uses {name}") for name in _globals_of(function.__code__, function, model))


def _parts_of_dict(table: dict[Any, Any], shared: bool, model: Any) -> Iterator[Part]:
    yield getattr(table, "default_factory", None), shared, ".default_factory"
    yield from ((part, shared, f"[{key!r}]") for key, part in table.items())


def _parts_of_object(value: Any, shared: bool, model: Any) -> Iterator[Part]:
    if value is not model and not hasattr(type(value), "__deepcopy__"):
        for name, part in attributes_of(value):
            if not (shared and isinstance(part, _STREAMS)):         # an object of many may have its own
                yield part, shared, f".{name}"


_PARTS: tuple[tuple[Any, Callable[[Any, bool, Any], Iterable[Part]]], ...] = (
    (types.FunctionType, _parts_of_function),
    (types.MethodType, lambda m, shared, _: [(m.__func__, True, ".__func__"), (m.__self__, shared, ".__self__")]),
    (types.BuiltinMethodType, lambda method, *_: [(method.__self__, True, ".__self__")]),
    (
        functools.partial,
        lambda p, shared, _: [(p.func, shared, ".func"), (p.args, shared, ".args"), (p.keywords, shared, ".keywords")],
    ),
    (Proposal, lambda proposal, *_: [(vars(proposal), True, "")]),
    (_CACHED, lambda function, *_: [(function.__wrapped__, True, ".__wrapped__")]),
    (Batched, lambda batched, *_: [(batched.function, True, ".function")]),
    (dict, _parts_of_dict),
    (_CONTAINERS, lambda parts, shared, _: ((part, shared, "[...]") for part in parts)),
)


def _globals_of(code: types.CodeType, function: types.FunctionType, value: Any) -> Iterator[str]:
    """The global names by which `code`, in `function`, refers to `value`."""
    for name in code.co_names:
        if function.__globals__.get(name) is value and name in _global_names(code):
            yield name
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _globals_of(inner, function, value)


def _global_names(code: types.CodeType) -> set[Any]:
    return {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}


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
        return isinstance(value, types.ModuleType) or _is_frozen(value)
    return any(f"{base.__module__}.{base.__qualname__}" in _SHARED for base in type(value).__mro__)


def _is_frozen(array: np.ndarray) -> bool:
    """Whether nobody can write to an array, nor to the one it is a view of."""
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable or base.dtype.hasobject:
            return False
        base = base.base
    return isinstance(base, (bytes, type(None)))


def _bytes(value: Any) -> int:
    if isinstance(value, (*_CONTAINERS, dict, bytearray)):
        return sys.getsizeof(value)
    size = 0
    with contextlib.suppress(Exception):                # of a tensor that has none
        size = value.nbytes if hasattr(type(value), "nbytes") else 0        # arrays and tensors
    return size if isinstance(size, int) else 0
