"""Identity: what a program is, as plain data, to tell whether what was kept of a run belongs to another.

A digest is of the contents of a value: numbers, texts, tokens, arrays and containers by what is in them; contexts by
their tokens; constraints by their texts; functions by their code, defaults, closures and the globals that they read;
other objects by the code of their class and all their attributes. Functions and classes of installed packages go by
name, and objects of these classes by what a pickle holds, or by their public attributes. A language model is told by
its vocabulary, and a sample of its weights or the name of its engine. What is kept to save time is left out, and what
is the same in no other process is refused.
"""

from __future__ import annotations

import copyreg
import dataclasses
import dis
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
from collections.abc import Callable, Collection
from contextvars import ContextVar
from operator import methodcaller
from typing import Any

import numpy as np

from llmppl.arguments import name_of, shown
from llmppl.distributions import Finite, Proposal
from llmppl.languages import DFA, JsonSchema, JsonSchemaIndex, JsonTexts, OpenTexts, Regex
from llmppl.lm import CachedTransformer, Context, Engine, NextToken
from llmppl.masks import TokenIndex
from llmppl.models.batching import Batched
from llmppl.models.copies import OWN, attributes_of
from llmppl.models.model import Model
from llmppl.models.streams import ParticleStream
from llmppl.tokens import EndOfText, Text, Token, Vocabulary
from llmppl.tokens.text import Spelled

Told = Any                                              # nested lists of atoms

_MOST = 1_000_000                                       # objects told of one program
_NAMED = 1_000                                          # parts that a refusal can name, besides attributes
_SAMPLE = 16                                            # values of each tensor of a model
_ATOMS = (type(None), bool, int, float, complex, str, bytes, np.generic, range)
_CONTAINERS = (dict, set, frozenset, list, tuple, deque, np.ndarray)
_FILLED = frozenset(vars(Finite((0,), [0.0])))          # what distributions keep of themselves
_EMPTY = (                                              # of which a class is all that lasts
    type(threading.Lock()), type(threading.RLock()), threading.local, ContextVar, weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary, weakref.WeakSet, EndOfText, ParticleStream,
)  # fmt: skip
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_GLOBAL = {dis.opmap["LOAD_GLOBAL"], dis.opmap["LOAD_NAME"]}
_HOMES = tuple(path + os.sep for path in (
    os.path.dirname(os.path.dirname(__file__)), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")
))  # fmt: skip


def identity(model: Model) -> tuple[dict[str, Any], list[Vocabulary]]:
    """What a program is, before its first step, and the vocabularies that it holds.

    The first is a dict of JSON: `program`, the name of its class; `models`, for each language model it holds the repr
    and digests of vocabulary and weights; `whole`, for each attribute and the class a digest; and `parts`, for these
    and what they refer to, the beginning of the repr and a digest. A TypeError names what cannot be told.
    """
    teller = _Teller()
    own = {f"the attribute {name}": value for name, value in vars(model).items() if name not in OWN}
    own[f"the class {type(model).__qualname__}"] = type(model)
    whole = {name: teller.part(name, value) for name, value in own.items()}
    models = [[repr(lm), lm.vocab.digest.hex()[:24], digest(teller.weights(lm.model))] for lm in teller.models]
    told = {"program": type(model).__qualname__, "models": models, "whole": whole, "parts": teller.parts}
    return told, teller.vocabularies


def identity_of_option(name: str, value: Any) -> dict[str, Any]:
    """The same of an argument of inference: of its class, and of each of its fields."""
    teller, kind = _Teller(), type(value).__qualname__
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return {name: [_shown(value), teller.tell(value)]}
    fields = {f"{name}.{each.name}": getattr(value, each.name) for each in dataclasses.fields(value)}
    return {name: [kind, kind], **{field: [_shown(part), teller.tell(part)] for field, part in fields.items()}}


def difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """What differs first between the identities of two runs, in a sentence; None if nothing does."""
    if before["program"] != now["program"]:
        return f"its program is {before['program']}, and this is {now['program']}"
    if len(before["models"]) != len(now["models"]):
        return f"its program holds {len(before['models'])} language models, and this one {len(now['models'])}"
    for (lm, vocabulary, weights), (other, *digests) in zip(before["models"], now["models"], strict=True):
        what = "vocabulary" if vocabulary != digests[0] else "weights" if weights != digests[1] else ""
        if what:
            return f"its language model is {lm}, and this is {other}, of another {what}".replace("another w", "other w")
    for kind in ("parts",) * (before["whole"] != now["whole"]) + ("options",):
        there = [key for key in now[kind] if key in before[kind]]       # what is inside a part comes before it
        for key in dict.fromkeys((*there, *before[kind], *now[kind])):
            if what := _other(before[kind].get(key), now[kind].get(key)):
                return f"{key} {what}"
    if before["stream"] != now["stream"]:
        (kind, entropy, key, *_), (_, other, *_) = before["stream"], now["stream"]
        if before["stream"][2:5] == now["stream"][2:5] and key == [] and entropy != other:
            return f"its seed is {entropy}, and this is {other}"
        return "the random stream that it began with is another"
    return None


def _other(before: list[str] | None, now: list[str] | None) -> str:
    if before is None or now is None:
        return "is not there" if now is None else "was not there"
    if before[-1] == now[-1]:
        return ""
    return f"was {before[0]}, and is {now[0]}" if before[0] != now[0] else f"is another {before[0] or 'one'}"


def _shown(value: Any) -> str:
    return re.sub(" at 0x[0-9a-f]+", "", shown(value, 60))


def digest(told: Told) -> str:
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=12).hexdigest()


class _Teller:
    """Tells values as digests of their contents; `path` is how a value is reached.

    models, vocabularies : what was met on the way
    parts : for what has a name, the beginning of its repr and its digest; what is inside it comes before it
    """

    def __init__(self) -> None:
        self.models, self.vocabularies = list[CachedTransformer](), list[Vocabulary]()
        self.parts: dict[str, list[str]] = {}
        self._known: dict[int, tuple[str, Any]] = {}    # held, lest its id be another's
        self._within: dict[int, int] = {}               # what is being told
        self._inside = 0                                # how deep in objects of packages, which may hold anything

    def tell(self, value: Any, path: str = "") -> str:
        if isinstance(value, _ATOMS) and not isinstance(value, Spelled):
            return f"{type(value).__name__} {value!r}"
        if id(value) in self._known:
            return self._known[id(value)][0]
        if id(value) in self._within:
            return f"{len(self._within) - self._within[id(value)]} up"
        if len(self._known) == _MOST:
            raise TypeError(f"{path} holds more than {_MOST:,} objects, too many for a checkpoint to compare")
        self._within[id(value)] = len(self._within)
        found = digest([type(value).__qualname__, self._contents(value, path)])
        del self._within[id(value)]
        self._known[id(value)] = found, value
        return found

    def part(self, name: str, value: Any, path: str = "") -> str:
        """The digest of what has a name."""
        found = self.tell(value, path or name)
        if not self._within or len(self.parts) < _NAMED:
            self.parts.setdefault(name, [_shown(value), found])
        return found

    def _contents(self, value: Any, path: str) -> Told:
        told = next((tell(self, value, path) for kinds, tell in _KINDS if isinstance(value, kinds)), None)
        own = _is_own(type(value))
        if told is None or (own and isinstance(value, (*_CONTAINERS, Proposal))):
            return [told, self._object(value, path, own)]
        return told

    def all_of(self, values: Any, path: str = "") -> Told:
        return [self.tell(value, path) for value in values]

    def vocabulary(self, vocab: Vocabulary, _: str = "") -> Told:
        if vocab not in self.vocabularies:
            self.vocabularies.append(vocab)
        return self.vocabularies.index(vocab)

    def model(self, lm: CachedTransformer, _: str = "") -> Told:
        if all(lm is not other for other in self.models):
            self.models.append(lm)
            self.vocabulary(lm.vocab)
        return [lm is other for other in self.models].index(True)

    def context(self, context: Context, _: str) -> Told:
        model = [self.model(context.lm)] if isinstance(context.lm, CachedTransformer) else []
        return [model, list(map(int, context.tokens))]

    def array(self, array: np.ndarray, path: str = "") -> Told:
        objects = array.dtype.hasobject
        data = self.all_of(array.ravel().tolist(), path) if objects else hashlib.blake2b(array.tobytes()).hexdigest()
        return [str(array.dtype), list(array.shape), data]

    def automaton(self, dfa: DFA, _: str) -> Told:
        if isinstance(dfa, Regex):
            return [dfa.pattern, dfa.flags]
        fixed = getattr(dfa, "_source", dfa) is None    # else its states are numbered as they are met
        return [dfa.start, self.array(dfa.table), self.array(dfa.accepting)] if fixed else []

    def finite(self, dist: Finite[Any], path: str) -> Told:
        made = dist.recipe if dist.recipe is not None else dist._describe
        return self.all_of([dist.support, dist.log_weights() if made is None else made], path)

    def function(self, function: types.FunctionType, path: str) -> Told:
        code, name, own = function.__code__, name_of(function), _is_own(function)
        told = [f"{function.__module__}.{name}", self.tell(vars(function), path)]
        if own:
            told = [digest(_code(code)), *told[1:]]
            self.parts.setdefault(f"the code of {name}", ["", told[0]])
        cells = zip(code.co_freevars, map(_content, function.__closure__ or ()), strict=True)
        named = {f"the variable {each} of {name}": value for each, value in cells}
        defaults = function.__defaults__ or ()
        last = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        given = {**dict(zip(last, defaults, strict=True)), **(function.__kwdefaults__ or {})}
        named |= {f"the default {each} of {name}": value for each, value in given.items()}
        if own:
            read = _names(code, dis.hasname)
            for each in sorted(_names(code, _GLOBAL) & function.__globals__.keys()):
                value = function.__globals__[each]
                named[f"the global {each}"] = value
                if isinstance(value, types.ModuleType) and _is_own(value):
                    named |= {f"the global {each}.{it}": vars(value)[it] for it in sorted(read & vars(value).keys())}
        return [told, [self.part(each, value) for each, value in named.items()]]

    def named(self, cls: type, _: str) -> Told:
        """A class: its functions, and other values that stand in it; one of a package by its name."""
        if not _is_own(cls) and (cls is Model or not issubclass(cls, Model)):
            return [cls.__module__, cls.__qualname__]
        told = list[Told]()
        for name, part in sorted(vars(cls).items()):
            bare = getattr(part, "__func__", part)
            is_function = isinstance(bare, types.FunctionType)
            if is_function or not (name.startswith("__") or name == "_abc_impl" or isinstance(part, _DESCRIPTORS)):
                code = digest(_code(bare.__code__)) if is_function else ""
                told.append([name, code, self.part(f"{cls.__qualname__}.{name}", part)])
        return [told, self.all_of(cls.__bases__)]

    def weights(self, model: Any) -> Told:
        if isinstance(model, Engine):
            public = {name: value for name, value in attributes_of(model) if name[0] != "_" and name != "tokens"}
            return model.name or [self.tell(type(model)), self.tell(public)]
        return _sampled(model) if hasattr(model, "named_parameters") else self.tell(model)

    def _object(self, value: Any, path: str, own: bool) -> Told:
        cls, left_out = type(value), {*OWN} if isinstance(value, Model) else set[str]()
        told: list[Told] = [self.tell(cls)]
        if isinstance(value, Proposal):
            left_out |= _FILLED
        elif hasattr(value, "named_parameters"):        # a network of torch
            told.append(_sampled(value))
            left_out |= vars(sys.modules["torch"].nn.Module()).keys()
        elif hasattr(cls, "convert_ids_to_tokens"):     # a tokenizer of transformers
            return [*told, digest(sorted(value.get_vocab().items()))]
        elif hasattr(cls, "detach") and hasattr(cls, "cpu"):                    # a tensor
            values = value.detach().cpu()               # numpy has no bfloat16
            return [*told, str(value.dtype), self.array((values.float() if values.itemsize == 2 else values).numpy())]
        elif cls in copyreg.dispatch_table or _pickles(cls):
            try:
                made = (copyreg.dispatch_table.get(cls) or methodcaller("__reduce_ex__", 4))(value)
            except (TypeError, pickle.PicklingError):   # it cannot be pickled
                pass
            else:
                parts = [made] if isinstance(made, str) else [*made[:3], *map(list, filter(None, made[3:5]))]
                return [*told, self.all_of(parts, path)]
        left_out |= {name for base in cls.__mro__ for name, part in vars(base).items() if _is_cached(part)}
        left = [(name, part) for name, part in attributes_of(value) if name not in left_out]
        kept = [(name, part) for name, part in left if own or not name.startswith("_")]
        if not left and not isinstance(value, _CONTAINERS) and not self._inside:
            try:
                object.__reduce_ex__(value, 4)
            except TypeError as error:
                raise TypeError(
                    f"{path} holds {_shown(value)}, of which a checkpoint cannot tell whether another process has the "
                    "same: have the class of the object that holds it leave it out, by __reduce__ or __getstate__"
                ) from error
        self._inside += not own
        told.append([[name, self.part(f"{path}.{name}", part)] for name, part in sorted(kept, key=lambda it: it[0])])
        self._inside -= not own
        return told


_KINDS: tuple[tuple[Any, Callable[[_Teller, Any, str], Told]], ...] = (
    (Token, lambda self, token, _: [self.vocabulary(token.vocab), int(token)]),
    (Text, lambda self, text, _: text.bytes.hex()),
    (Vocabulary, _Teller.vocabulary),
    (CachedTransformer, _Teller.model),
    (Context, _Teller.context),
    (NextToken, lambda self, dist, path: self.tell(dist.context, path)),
    (Finite, _Teller.finite),
    (TokenIndex, lambda self, index, path: self.tell(index.recognizer, path)),
    (JsonSchemaIndex, lambda self, index, path: self.tell(index.constraint, path)),
    (
        JsonSchema,
        lambda self, of, path: [json.dumps(of.schema), of._given, repr(of.type)]
        + [self.tell(it, path) for it in (of.type,) if isinstance(it, type)],
    ),
    ((JsonTexts, OpenTexts), lambda self, texts, path: self.tell(texts.constraint, path)),
    (DFA, _Teller.automaton),
    (np.ndarray, _Teller.array),
    (
        (dict, types.MappingProxyType),
        lambda self, table, path: sorted([self.tell(key, path), self.tell(it, path)] for key, it in table.items()),
    ),
    ((set, frozenset), lambda self, values, path: sorted(self.all_of(values, path))),
    ((list, tuple, deque), _Teller.all_of),
    (types.FunctionType, _Teller.function),
    (Batched, lambda self, batched, path: self.all_of([batched.function, batched.max_batch], path)),
    (types.MethodType, lambda self, method, path: self.all_of([method.__func__, method.__self__], path)),
    (functools.partial, lambda self, part, path: self.all_of([part.func, part.args, part.keywords], path)),
    ((staticmethod, classmethod), lambda self, part, path: self.tell(part.__func__, path)),
    (property, lambda self, part, path: self.all_of([part.fget, part.fset, part.fdel], path)),
    (functools.cached_property, lambda self, part, path: self.tell(part.func, path)),
    (type(functools.cache(len)), lambda self, cached, path: self.tell(cached.__wrapped__, path)),
    (type, _Teller.named),
    (
        (types.BuiltinFunctionType, types.MethodWrapperType),
        lambda self, it, path: [it.__qualname__, self.tell(it.__self__, path)],
    ),
    (types.ModuleType, lambda self, module, _: module.__name__),
    (types.CodeType, lambda self, code, _: _code(code)),
    (weakref.ref, lambda self, ref, path: self.tell(ref(), path)),
    (io.IOBase, lambda self, file, _: str(getattr(file, "name", ""))),
    (_EMPTY, lambda *_: []),
)


def _sampled(network: Any) -> Told:
    """The first values of each tensor of a network."""
    told = list[Told]()
    for name, tensor in network.named_parameters():
        values = tensor.detach().reshape(-1)[:_SAMPLE]
        there = values.device.type != "meta"            # elsewhere, as accelerate puts it
        told.append([name, list(tensor.shape), str(tensor.dtype), values.float().cpu().numpy().tobytes().hex() * there])
    return told


def _code(code: types.CodeType) -> Told:
    """What a function does, wherever it stands."""
    names = [*code.co_names, *code.co_varnames, *code.co_freevars]
    return [code.co_code.hex(), names, list(map(_constant, code.co_consts))]


def _constant(value: Any) -> Told:
    if isinstance(value, types.CodeType):
        return _code(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def _names(code: types.CodeType, operations: Collection[int]) -> set[str]:
    """The names on which a function and those inside it do one of these operations."""
    inner = [_names(value, operations) for value in code.co_consts if isinstance(value, types.CodeType)]
    return {each.argval for each in dis.get_instructions(code) if each.opcode in operations}.union(*inner)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:                                  # a variable that has no value yet
        return None


def _is_own(part: Any) -> bool:
    """Whether a class, a function or a module is the user's, not Python's nor of an installed package."""
    if isinstance(part, types.FunctionType):
        file = part.__code__.co_filename
    else:
        name = part.__name__ if isinstance(part, types.ModuleType) else part.__module__
        file = _HOMES[0] if name in sys.builtin_module_names else getattr(sys.modules.get(name), "__file__", None) or ""
    return not (file.startswith(_HOMES) or "site-packages" in file or "dist-packages" in file)


def _pickles(cls: type) -> bool:
    """Whether a class says itself what a pickle holds."""
    own = "__reduce__", "__reduce_ex__", "__getstate__"
    return any(name in vars(base) for base in cls.__mro__[:-1] for name in own)


def _is_cached(part: Any) -> bool:
    return isinstance(part, functools.cached_property)
