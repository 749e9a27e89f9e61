"""Identity of a program as plain data, which tells whether a saved run belongs to another program.

A fingerprint is a digest of the contents of a value:

- numbers, texts, tokens, arrays and containers: their contents; contexts: their tokens; constraints: their texts,
- functions: code, defaults, closures and the globals that they read; functions of installed packages: their name,
- other objects: the code of their class and all attributes,
- classes of installed packages: their name; objects of them: the contents of a pickle, or the public attributes,
- language models: the vocabulary, and a sample of the weights or the name of the engine.

Caches are left out. Values that no other process can compare, such as an open connection, are a TypeError. Differences
in other places, such as the further weights of a model, are not detected.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import hashlib
import io
import json
import os
import pickle
import re
import sys
import sysconfig
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from operator import methodcaller
from typing import Any

import numpy as np

from llmppl.constraints.automata import Regex
from llmppl.constraints.automata.lazy_dfa import Machine
from llmppl.constraints.automata.nfa import ACCEPT, FOUND, Ahead
from llmppl.constraints.json import JsonSchema
from llmppl.constraints.json.index import JsonIndex
from llmppl.constraints.masks import TokenIndex
from llmppl.constraints.vocabulary import Token, Vocabulary
from llmppl.constraints.vocabulary.text import Spelled
from llmppl.distributions import Finite, Proposal
from llmppl.lm import CachedTransformer, Context, Engine
from llmppl.models.batched import Batched
from llmppl.models.copies import OWN, attributes_of, held_by, names_in, says_its_state
from llmppl.models.model import Model
from llmppl.models.streams import ParticleStream
from llmppl.support.arguments import name_of, shown
from llmppl.support.graphs import Numbering

Contents = Any                                          # nested lists of atoms, for a digest
SHAPE = {"program": str, "models": [[str]], "whole": {...: str}, "parts": {...: [str]}, "options": {...: [str]}}

_MOST = 1_000_000                                       # objects of one program
_NAMED = 1_000                                          # parts that an error can name, besides attributes
_SAMPLE = 16                                            # values of each tensor of a model
_ATOMS = (type(None), bool, int, float, complex, str, bytes, np.generic, range)
_CONTAINERS = (dict, set, frozenset, list, tuple, deque, np.ndarray)
_FILLED = frozenset(vars(Finite((0,), [0.0])))          # caches of distributions
_EMPTY = (                                              # objects without contents
    type(threading.Lock()), type(threading.RLock()), threading.local, ContextVar, weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary, weakref.WeakSet, types.MemberDescriptorType,
    types.GetSetDescriptorType, ParticleStream,
)  # fmt: skip
_CACHED = functools.cached_property
_HOMES = tuple(path + os.sep for path in (
    os.path.dirname(os.path.dirname(os.path.dirname(__file__))), sysconfig.get_path("stdlib"),
    sysconfig.get_path("platstdlib"),
))  # fmt: skip


def identity(model: Model, **options: Any) -> tuple[dict[str, Any], list[Vocabulary]]:
    """Return the identity of a program before its first step, and its vocabularies, as `identity_of` does."""
    kind = type(model).__qualname__
    own = {f"the attribute {name}": value for name, value in vars(model).items() if name not in OWN}
    return identity_of(kind, own | {f"the class {kind}": type(model)}, **options)


def identity_of(program: str, own: Mapping[str, Any], **options: Any) -> tuple[dict[str, Any], list[Vocabulary]]:
    """Return the identity of a program, and the vocabularies that it holds.

    Parameters
    ----------
    program : str
        Name of the program.
    own : dict
        Parts of the program, by names for errors.
    options : arguments of inference

    Returns
    -------
    identity : dict of JSON
        `program`, the name; `models`, repr and digests of vocabulary and weights of each language model; `whole`, a
        digest of each of the `own` parts; `parts`, for these and the values that they refer to, the beginning of the
        repr and a digest; `options`, the same for the arguments of inference and their fields.
    vocabularies : list of Vocabulary

    Raises
    ------
    TypeError
        If a part has no identity. The error names it.
    """
    fingerprint = Fingerprint()
    whole = {name: fingerprint.of_part(name, value) for name, value in own.items()}
    models = [
        [repr(lm), lm.vocab.digest.hex()[:24], digest(fingerprint.weights(lm.model))] for lm in fingerprint.models
    ]
    given = dict[str, list[str]]()
    for name, value in options.items():
        fields = {name: value}
        if dataclasses.is_dataclass(value):
            fields = {f"{name}.{field.name}": getattr(value, field.name) for field in dataclasses.fields(value)}
            given[name] = [type(value).__qualname__] * 2
        given |= {field: [_short_repr(part), fingerprint.of(part, field)] for field, part in fields.items()}
    whole_identity = {
        "program": program, "models": models, "whole": whole, "parts": fingerprint.parts, "options": given,
    }  # fmt: skip
    return whole_identity, fingerprint.vocabularies


def digest_of_data(value: Any, name: str) -> str:
    """Return 16 hexadecimal digits of the contents of a value, the same in every process."""
    fingerprint = Fingerprint(is_data=True)
    found = fingerprint.of(value, name)
    if fingerprint.vocabularies:
        of_vocab = [vocab.digest.hex() for vocab in fingerprint.vocabularies]
        found = digest([found, of_vocab, [fingerprint.weights(lm.model) for lm in fingerprint.models]])
    return hashlib.blake2b(found.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Describe the first difference between the identities of two runs in a sentence; None if there is none."""
    if before["program"] != now["program"]:
        return f"its program is {before['program']}, and this is {now['program']}"
    if len(before["models"]) != len(now["models"]):
        return f"its program holds {len(before['models'])} language models, and this one {len(now['models'])}"
    for (lm, *digests), (other, *others) in zip(before["models"], now["models"], strict=True):
        for what, one, another in zip(("another vocabulary", "other weights"), digests, others, strict=False):
            if one != another:
                return f"its language model is {lm}, and this is {other}, of {what}"
    for kind in ("parts",) * (before["whole"] != now["whole"]) + ("options",):
        common = [key for key in now[kind] if key in before[kind]]      # inner parts come before outer ones
        for key in dict.fromkeys((*common, *before[kind], *now[kind])):
            if change := _change(before[kind].get(key), now[kind].get(key)):
                return f"{key} {change}"
    if before.get("stream") != now.get("stream"):
        (kind, entropy, key, *_), (_, other, *_) = before["stream"], now["stream"]
        if before["stream"][2:5] == now["stream"][2:5] and key == [] and entropy != other:
            return f"its seed is {entropy}, and this is {other}"
        return "the random stream that it began with is another"
    return None


def _change(before: list[str] | None, now: list[str] | None) -> str:
    if before is None or now is None:
        return "is not there" if now is None else "was not there"
    if before[-1] == now[-1]:
        return ""
    return f"was {before[0]}, and is {now[0]}" if before[0] != now[0] else f"is another {before[0] or 'one'}"


def _short_repr(value: Any) -> str:
    return re.sub(" at 0x[0-9a-f]+", "", shown(value, 60))


def digest(contents: Contents) -> str:
    """Return 24 hexadecimal digits of nested lists of atoms."""
    return hashlib.blake2b(json.dumps(contents).encode(), digest_size=12).hexdigest()


class Fingerprint:
    """Fingerprints of values, digests of their contents. `path` names a value for errors.

    models, vocabularies : language models and vocabularies in the values so far
    parts : for each named part, the beginning of its repr and its digest; inner parts come before outer ones
    """

    def __init__(self, *, is_data: bool = False) -> None:
        self._is_data = is_data                         # refuses object(), of which all look equal
        self.models, self.vocabularies = list[CachedTransformer](), list[Vocabulary]()
        self.parts: dict[str, list[str]] = {}
        self._known: dict[int, tuple[str, Any]] = {}    # holds the value, so that no other object gets its id
        self._within: dict[int, int] = {}               # depth of the values that are under way, by id
        self._inside = 0                                # depth in objects of packages, which may hold anything

    def of(self, value: Any, path: str = "") -> str:
        """Return the fingerprint of a value. Raise a TypeError if it has none."""
        if isinstance(value, _ATOMS) and not isinstance(value, Spelled):
            return f"{type(value).__name__} {value!r}"
        if id(value) in self._known:
            return self._known[id(value)][0]
        if id(value) in self._within:
            return f"{len(self._within) - self._within[id(value)]} up"
        if len(self._known) == _MOST:
            raise TypeError(f"{path} holds more than {_MOST:,} objects, too many to compare")
        self._within[id(value)] = len(self._within)
        found = digest([type(value).__qualname__, self._contents(value, path)])
        del self._within[id(value)]
        self._known[id(value)] = found, value
        return found

    def of_part(self, name: str, value: Any) -> str:
        """Return the fingerprint of a part with a name, and list it in `parts`."""
        found = self.of(value, name)
        if not self._within or len(self.parts) < _NAMED:
            self.parts.setdefault(name, [_short_repr(value), found])
        return found

    def all_of(self, values: Any, path: str = "") -> Contents:
        return [self.of(value, path) for value in values]

    def _contents(self, value: Any, path: str) -> Contents:
        found = next((contents(self, value, path) for kinds, contents in _KINDS if isinstance(value, kinds)), None)
        own = is_own(type(value))
        if found is None or (own and isinstance(value, (*_CONTAINERS, Proposal))):
            return [found, self._object(value, path, own)]
        return found

    def vocabulary(self, vocab: Vocabulary, _: str = "") -> Contents:
        return _place(vocab, self.vocabularies)

    def model(self, lm: CachedTransformer, _: str) -> Contents:
        self.vocabulary(lm.vocab)
        return _place(lm, self.models)

    def array(self, array: np.ndarray, path: str = "") -> Contents:
        objects = array.dtype.hasobject
        data = self.all_of(array.ravel().tolist(), path) if objects else hashlib.blake2b(array.tobytes()).hexdigest()
        return [str(array.dtype), list(array.shape), data]

    def automaton(self, dfa: Machine, path: str) -> Contents:
        """Return the table, or the NFA of a lazy automaton with its states numbered as they are reached."""
        if dfa._source is None:
            return [dfa.start, self.array(dfa.table), self.array(dfa.accepting)]
        nfa, rows = dfa._source.nfa, list[Contents]()
        nfa.settle()
        numbers = Numbering([nfa.start])
        for state in numbers.keys_in_order:                       # grows
            guard = nfa.guards.get(state, ())
            guards = [numbers[each] if isinstance(guard, Ahead) else self.of(each, path) for each in guard[:1]]
            edges = [(lo, hi, numbers[target]) for lo, hi, target in nfa.edges(state)]
            ends = [state == ACCEPT, state == FOUND]
            rows.append([ends, [numbers[each] for each in nfa.epsilon[state]], edges, guards, guard[1:]])
        return rows

    def finite(self, dist: Finite[Any], path: str) -> Contents:
        return self.all_of([dist.support, dist.recipe or dist._describe or dist.log_weights()], path)

    def code(self, code: types.CodeType, path: str) -> Contents:
        """Return the code of a function without its place in a file."""
        names = [*code.co_names, *code.co_varnames, *code.co_freevars]
        return [code.co_code.hex(), names, self.all_of(code.co_consts, path)]

    def function(self, function: types.FunctionType, path: str) -> Contents:
        code, name, own = function.__code__, name_of(function), is_own(function)
        found, named = f"{function.__module__}.{name}", dict[str, Any]()
        if own:
            found = self.of(code)
            self.parts.setdefault(f"the code of {name}", ["", found])
        for kind, each, value in held_by(function):
            if kind != "global":
                named[f"the {kind} {each} of {name}"] = value
            elif own:
                named[f"the global {each}"] = value
                if isinstance(value, types.ModuleType) and is_own(value):
                    read = sorted(names_in(code) & vars(value).keys())
                    named |= {f"the global {each}.{it}": vars(value)[it] for it in read}
        return [found, self.of(vars(function), path), [self.of_part(each, value) for each, value in named.items()]]

    def class_(self, cls: type, _: str) -> Contents:
        """Return the functions and other values in a class, and only the name of a class of a package."""
        if not is_own(cls) and (cls is Model or not issubclass(cls, Model)):
            return [cls.__module__, cls.__qualname__]
        members = list[Contents]()
        for name, part in sorted(vars(cls).items()):
            bare = getattr(part, "__func__", part)
            code = bare.__code__ if isinstance(bare, types.FunctionType) else None
            if code or not (name.startswith("__") or name == "_abc_impl"):
                members.append([name, self.of(code), self.of_part(f"{cls.__qualname__}.{name}", part)])
        return [members, self.all_of(cls.__bases__)]

    def weights(self, model: Any) -> Contents:
        if isinstance(model, Engine):
            public = {name: value for name, value in attributes_of(model) if name[0] != "_" and name != "tokens"}
            return model.name or [self.of(type(model)), self.of(public)]
        return _weights(model) if hasattr(model, "named_parameters") else self.of(model)

    def _object(self, value: Any, path: str, own: bool) -> Contents:
        """Return the contents of the pickle of an object whose class defines one, and else the attributes."""
        cls, kept = type(value), dict(attributes_of(value))
        found, left_out = list[Contents]([self.of(cls)]), frozenset[str]()
        if hasattr(cls, "convert_ids_to_tokens"):       # a tokenizer of transformers
            return [*found, digest(sorted(value.get_vocab().items()))]
        if hasattr(cls, "detach") and hasattr(cls, "cpu"):                      # a tensor
            return [*found, _tensor(value)]
        if cls.__module__.partition(".")[0] == "pandas" and hasattr(cls, "to_numpy"):
            return [*found, self._values(value, path)]
        if self._is_data and cls is object:
            raise TypeError(f"{path} holds {_short_repr(value)}, which has no contents")
        if hasattr(value, "named_parameters"):          # a network of torch
            found.append(_weights(value))
            left_out = frozenset(vars(sys.modules["torch"].nn.Module()))
        elif isinstance(value, (Model, Proposal)):
            left_out = OWN if isinstance(value, Model) else _FILLED
        elif cls in copyreg.dispatch_table or says_its_state(cls) or not (kept or isinstance(value, _CONTAINERS)):
            try:
                made = (copyreg.dispatch_table.get(cls) or methodcaller("__reduce_ex__", 4))(value)
            except (TypeError, pickle.PicklingError) as error:
                if not kept and not self._inside:
                    raise TypeError(
                        f"{path} holds {_short_repr(value)}, which no other process can compare with its own: have the "
                        "class of the object that holds it leave it out, by __reduce__ or __getstate__"
                    ) from error
            else:
                if isinstance(made, str):
                    return [*found, getattr(value, "__module__", None), made]
                return [*found, self.all_of([*made[:3], *map(list, filter(None, made[3:5]))], path)]
        cached = {name for base in cls.__mro__ for name, part in vars(base).items() if isinstance(part, _CACHED)}
        names = [name for name in sorted(kept.keys() - left_out - cached) if own or not name.startswith("_")]
        self._inside += not own
        found.append([[name, self.of_part(f"{path}.{name}", kept[name])] for name in names])
        self._inside -= not own
        return found

    def _values(self, value: Any, path: str) -> Contents:
        """Return the values of a table, a column or an index of pandas."""
        if value.ndim > 1:
            return self.all_of([value.index, value.columns, *(column for _, column in value.items())], path)
        rest = [getattr(value, name) for name in ("name", "names", "index") if hasattr(type(value), name)]
        return [str(value.dtype), self.array(value.to_numpy(), path), self.all_of(rest, path)]


def _by(*names: str) -> Callable[[Fingerprint, Any, str], Contents]:
    """Return a function that describes an object by these attributes."""
    return lambda fingerprint, value, path: fingerprint.all_of([getattr(value, name, None) for name in names], path)


_KINDS: tuple[tuple[Any, Callable[[Fingerprint, Any, str], Contents]], ...] = (
    (Token, lambda self, token, _: [self.vocabulary(token.vocab), int(token)]),
    (Vocabulary, Fingerprint.vocabulary),
    (CachedTransformer, Fingerprint.model),
    (Context, _by("lm", "tokens")),
    (Finite, Fingerprint.finite),
    (JsonIndex, _by("constraint")),
    (TokenIndex, _by("recognizer")),
    (JsonSchema, lambda self, of, path: [json.dumps(of.schema), of._given, self.of(of.type, path)]),
    (Regex, _by("pattern", "flags")),
    (Machine, Fingerprint.automaton),
    (np.ndarray, Fingerprint.array),
    (
        (dict, types.MappingProxyType),
        lambda self, table, path: sorted([self.of(key, path), self.of(it, path)] for key, it in table.items()),
    ),
    ((set, frozenset), lambda self, values, path: sorted(self.all_of(values, path))),
    ((list, tuple, deque), Fingerprint.all_of),
    (types.FunctionType, Fingerprint.function),
    (types.CodeType, Fingerprint.code),
    (type, Fingerprint.class_),
    (Batched, _by("function", "max_batch")),
    (types.MethodType, _by("__func__", "__self__")),
    ((staticmethod, classmethod), _by("__func__")),
    (property, _by("fget", "fset", "fdel")),
    (_CACHED, _by("func")),
    (type(functools.cache(len)), _by("__wrapped__")),
    (types.ModuleType, _by("__name__")),
    (io.IOBase, _by("name")),
    (weakref.ref, lambda self, ref, path: self.of(ref(), path)),
    (_EMPTY, _by()),
)


def _place(value: Any, values: list[Any]) -> int:
    """Return the place of `value` in a list, after adding it if it is missing."""
    if value not in values:
        values.append(value)
    return values.index(value)


def _tensor(tensor: Any, most: int | None = None) -> Contents:
    """Return type, shape and a digest of the values of a tensor, or of its first `most` values."""
    values = tensor.detach().reshape(-1)[:most]
    if values.device.type == "meta":                    # accelerate keeps its values elsewhere
        return [str(tensor.dtype), list(tensor.shape)]
    data = values.cpu().view(sys.modules["torch"].uint8).numpy().tobytes()      # numpy has no bfloat16
    return [str(tensor.dtype), list(tensor.shape), hashlib.blake2b(data).hexdigest()]


def _weights(network: Any) -> Contents:
    return [[name, _tensor(tensor, _SAMPLE)] for name, tensor in network.named_parameters()]


def is_own(part: Any) -> bool:
    """Check whether a class, a function or a module is the user's, not Python's nor of an installed package."""
    if isinstance(part, types.FunctionType):
        file = part.__code__.co_filename
    else:
        name = part.__name__ if isinstance(part, types.ModuleType) else part.__module__
        file = _HOMES[0] if name in sys.builtin_module_names else getattr(sys.modules.get(name), "__file__", None) or ""
    return not (file.startswith(_HOMES) or "site-packages" in file or "dist-packages" in file)
