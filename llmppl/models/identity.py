"""Identity: what a program is, as plain data, to tell whether what was kept of a run belongs to another.

A digest is of what can be told of a value: numbers, texts, tokens, arrays and containers by what is in them; contexts
by their tokens; constraints by their texts; functions by their code and what it refers to; other objects by their class
and public attributes. Of what functions and classes refer to, only what cannot change is told. A language model is
told by its vocabulary, and a sample of its weights or the name of its engine. Programs that differ in what cannot be
told have one identity.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import hashlib
import json
import re
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from llmppl.arguments import shown
from llmppl.distributions import Proposal
from llmppl.languages import DFA, JsonSchema, JsonSchemaIndex, JsonTexts, OpenTexts, Regex
from llmppl.lm import CachedTransformer, Context, Engine, NextToken
from llmppl.masks import TokenIndex
from llmppl.models.batching import Batched
from llmppl.models.choices import ParticleStream
from llmppl.models.copies import OWN, attributes_of
from llmppl.models.model import Model
from llmppl.tokens import EndOfText, Text, Token, Vocabulary
from llmppl.tokens.text import Spelled

Told = Any                                              # nested lists of atoms

_MOST = 20_000                                          # objects told of one program
_SAMPLE = 16                                            # values of each tensor of a model
_ATOMS = (type(None), bool, int, float, complex, str, bytes, np.generic)
_CODE = (type, types.FunctionType, Batched)
_CANNOT_CHANGE = (*_ATOMS, *_CODE, tuple, frozenset, CachedTransformer, Context, Vocabulary)


def identity(model: Model) -> tuple[dict[str, Any], list[Vocabulary]]:
    """What a program is, before its first step, and the vocabularies that it holds.

    The first is a dict of JSON: `program`, the name of its class; `models`, for each language model it holds the repr
    and digests of vocabulary and weights; `attributes`, for each the beginning of its repr and a digest; and `code`, a
    digest of the class.
    """
    teller = _Teller()
    own = {name: value for name, value in vars(model).items() if name not in OWN}
    attributes = {name: [_shown(value), digest(teller.tell(value))] for name, value in own.items()}
    classes = [cls for cls in type(model).__mro__ if issubclass(cls, Model) and cls is not Model]
    code = digest(list(map(teller.tell_class, classes)))
    models = [[repr(lm), lm.vocab.digest.hex()[:24], digest(teller.weights(lm.model))] for lm in teller.models]
    told = {"program": type(model).__qualname__, "models": models, "attributes": attributes, "code": code}
    return told, teller.vocabularies


def identity_of_option(name: str, value: Any) -> dict[str, Any]:
    """The same of an argument of inference: of its class, and of each of its fields."""
    teller, kind = _Teller(), type(value).__qualname__
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return {name: [_shown(value), digest(teller.tell(value))]}
    fields = {f"{name}.{each.name}": getattr(value, each.name) for each in dataclasses.fields(value)}
    return {name: [kind, kind], **{field: [_shown(part), digest(teller.tell(part))] for field, part in fields.items()}}


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
    for kind, name in ("attributes", "the attribute "), ("options", ""):
        for key in {**before[kind], **now[kind]}:
            if what := _other(before[kind].get(key), now[kind].get(key)):
                return f"{name}{key} {what}"
    if before["code"] != now["code"]:
        return f"the code of {now['program']} is other code"
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
    return f"was {before[0]}, and is {now[0]}" if before[0] != now[0] else f"is another {before[0]}"


def _shown(value: Any) -> str:
    return re.sub(" at 0x[0-9a-f]+", "", shown(value, 60))


def digest(told: Told) -> str:
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=12).hexdigest()


def first_difference(one: Model, other: Model, *, weights: bool = True) -> str:
    """The first attribute in which two particles differ that ran the same steps, in words; "" if nothing does.

    Their weights are compared by what the statements have added.
    """
    before, now = vars(one), vars(other)
    for name in {**before, **now}:
        if name in ("_chooser_", "_noted_", "_kept_", "_log_weight_") or (name == "_attribution_" and not weights):
            continue
        x, y = (attributes.get(name, getattr(type(one), name, None)) for attributes in (before, now))
        if not (x is y or _are_alike(x, y, one, other)):
            return f"{name.strip('_')} was {shown(x, 40)} and then {shown(y, 40)}"
    return ""


def _are_alike(x: Any, y: Any, one: Model, other: Model) -> bool:
    if type(x) is not type(y):
        return False
    if isinstance(x, float):
        return bool(abs(x - y) <= 1e-6 * max(1.0, abs(x)) or x == y or (x != x and y != y))
    if isinstance(x, (str, int, Context)):
        return bool(x == y)
    if type(x) is dict and all(isinstance(value, float) for value in x.values()):
        return x.keys() == y.keys() and all(_are_alike(x[key], y[key], one, other) for key in x)
    return bool(_Teller(one).tell(x) == _Teller(other).tell(y))


class _Teller:
    """Tells values as nested lists of atoms. What was told before is told by its number.

    models, vocabularies : what was met on the way
    """

    def __init__(self, itself: object = None) -> None:
        self.models = list[CachedTransformer]()
        self.vocabularies = list[Vocabulary]()
        self._seen: dict[int, tuple[int, Any]] = {id(itself): (0, itself)}

    def tell(self, value: Any) -> Told:
        if isinstance(value, _ATOMS) and not isinstance(value, Spelled):
            return [type(value).__name__, repr(value)]
        if id(value) in self._seen:
            return ["again", self._seen[id(value)][0]]
        if len(self._seen) == _MOST:
            return ["more"]
        self._seen[id(value)] = len(self._seen), value
        for kinds, tell in _KINDS:
            if isinstance(value, kinds):
                return [type(value).__name__, tell(self, value)]
        return [type(value).__qualname__, self._object(value)]

    def all_of(self, values: Any) -> Told:
        return [self.tell(value) for value in values]

    def sorted(self, values: Any) -> Told:
        return sorted(self.all_of(values), key=json.dumps)

    def vocabulary(self, vocab: Vocabulary) -> Told:
        if vocab not in self.vocabularies:
            self.vocabularies.append(vocab)
        return self.vocabularies.index(vocab)

    def model(self, lm: CachedTransformer) -> Told:
        if all(lm is not other for other in self.models):
            self.models.append(lm)
            self.vocabulary(lm.vocab)
        return [lm is other for other in self.models].index(True)

    def context(self, context: Context) -> Told:
        model = [self.model(context.lm)] if isinstance(context.lm, CachedTransformer) else []
        return [model, list(map(int, context.tokens))]

    def array(self, array: np.ndarray) -> Told:
        objects = array.dtype.hasobject
        data = self.all_of(array.ravel().tolist()) if objects else hashlib.blake2b(array.tobytes()).hexdigest()
        return [str(array.dtype), list(array.shape), data]

    def automaton(self, dfa: DFA) -> Told:
        if isinstance(dfa, Regex):
            return [dfa.pattern, dfa.flags]
        fixed = getattr(dfa, "_source", dfa) is None    # else its states are numbered as they are met
        return [dfa.start, self.array(dfa.table), self.array(dfa.accepting)] if fixed else []

    def function(self, function: types.FunctionType) -> Told:
        cells = [_content(cell) for cell in function.__closure__ or ()]
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        names = sorted(_names(function.__code__) & function.__globals__.keys())
        referred = [[name, self._referred(function.__globals__[name], function.__module__)] for name in names]
        inside = [self._referred(each, None) for each in cells]
        return [_code(function.__code__), self.all_of(defaults), inside, referred]

    def _referred(self, value: Any, module: str | None) -> Told:
        """What a function refers to: only its kind, if it may change, as what counts calls does."""
        other = isinstance(value, _CODE) and module is not None and value.__module__ != module
        if other or not isinstance(value, _CANNOT_CHANGE):
            return [type(value).__qualname__, getattr(value, "__qualname__", "")]
        return self.tell(value)

    def tell_class(self, cls: type) -> Told:
        """The class of a program: its functions, and other values that stand in it."""
        parts = {name: _bare(part) for name, part in vars(cls).items()}
        told = [
            [name, self._referred(part, cls.__module__)] for name, part in parts.items()
            if not name.startswith("__") or isinstance(part, types.FunctionType)
        ]  # fmt: skip
        return [cls.__qualname__, told]

    def weights(self, model: Any) -> Told:
        if isinstance(model, Engine) and model.name:
            return model.name
        return _sampled(model) if hasattr(model, "named_parameters") else self.tell(model)

    def _object(self, value: Any) -> Told:
        if hasattr(value, "named_parameters"):          # a network of torch
            return _sampled(value)
        made = copyreg.dispatch_table.get(type(value)) or (_reduced if _reduces(type(value)) else None)
        if made is not None:
            try:
                parts: Any = made(value)
            except Exception:                           # what cannot be pickled is told by its class
                return []
            return self.tell(parts if isinstance(parts, str) else parts[1])
        cached = {name for cls in type(value).__mro__ for name, part in vars(cls).items() if _is_cached(part)}
        own = {name: part for name, part in attributes_of(value) if name not in cached and not name.startswith("_")}
        return [[name, self.tell(part)] for name, part in own.items()]


_KINDS: tuple[tuple[Any, Callable[[_Teller, Any], Told]], ...] = (
    (Token, lambda self, token: [self.vocabulary(token.vocab), int(token)]),
    (EndOfText, lambda self, _: []),
    (Text, lambda self, text: text.bytes.hex()),
    (Vocabulary, _Teller.vocabulary),
    (CachedTransformer, _Teller.model),
    (Context, _Teller.context),
    (NextToken, lambda self, dist: self.tell(dist.context)),
    (TokenIndex, lambda self, index: self.tell(index.recognizer)),
    (JsonSchemaIndex, lambda self, index: self.tell(index.constraint)),
    (JsonSchema, lambda self, schema: [json.dumps(schema.schema), schema._given, repr(schema.type)]),
    (ParticleStream, lambda self, _: []),
    (Model, lambda self, model: self.sorted(item for item in vars(model).items() if item[0] not in OWN)),
    (Proposal, lambda self, dist: repr(dist).partition(" at 0x")[0]),
    ((JsonTexts, OpenTexts), lambda self, texts: self.tell(texts.constraint)),
    (DFA, _Teller.automaton),
    (np.ndarray, _Teller.array),
    (dict, lambda self, table: self.sorted(table.items())),
    ((set, frozenset), _Teller.sorted),
    ((list, tuple, deque), _Teller.all_of),
    (types.FunctionType, _Teller.function),
    (Batched, lambda self, batched: self.tell(batched.function)),
    (types.MethodType, lambda self, method: self.all_of([method.__func__, method.__self__])),
    (functools.partial, lambda self, part: self.all_of([part.func, part.args, part.keywords])),
    ((type, types.BuiltinFunctionType, types.ModuleType), lambda self, named: named.__name__),
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


def _names(code: types.CodeType) -> set[str]:
    """The names that a function and those inside it may find among the globals."""
    inner = [_names(value) for value in code.co_consts if isinstance(value, types.CodeType)]
    return set(code.co_names).union(*inner)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:                                  # a variable that has no value yet
        return None


def _bare(part: Any) -> Any:
    """What stands in a class, without what is around it there."""
    part = part.fget if isinstance(part, property) else getattr(part, "func", getattr(part, "__func__", part))
    return getattr(part, "__wrapped__", part)


def _reduces(cls: type) -> bool:
    return any("__reduce__" in vars(base) or "__reduce_ex__" in vars(base) for base in cls.__mro__[:-1])


def _reduced(value: Any) -> Any:
    return value.__reduce_ex__(4)


def _is_cached(part: Any) -> bool:
    return isinstance(part, functools.cached_property)
