"""Values as data: their JSON form, and the identity of a program.

`encode` writes plain data as JSON, and `decode` returns exactly the same values. JSON has no tuples, sets, bytes or
arrays. Each of these is an object with one field, whose name begins with "$": {"$tuple": [1, 2]}.

The *identity* of a program tells whether a file was made by it: its name, the code of the user's functions and classes
that it reaches, and the reprs of the values and options that these refer to. A value that changes without its repr is
not noticed.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
import math
import os
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from llmppl.support.arguments import shown

_KINDS = "biufcSUmM"                                    # of numpy dtypes that are written
_SEQUENCES: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
_MAKE: dict[str, Callable[[Any], Any]] = {name: make for make, name in _SEQUENCES.items()}


def encode(value: Any, more: Callable[[Any], Any] | None = None) -> Any:
    """Return the JSON form of a value. `more` encodes other types, or raises the TypeError for them."""
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is list:
        return [encode(each, more) for each in value]
    if kind in _SEQUENCES:
        inside = [encode(each, more) for each in value]
        return {_SEQUENCES[kind]: inside if kind is tuple else sorted(inside, key=json.dumps)}
    if kind is dict and all(type(key) is str and key[:1] != "$" for key in value):
        return {key: encode(each, more) for key, each in value.items()}
    if kind is dict:
        return {"$dict": [[encode(key, more), encode(each, more)] for key, each in value.items()]}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind in (float, complex):
        return {f"${kind.__name__}": repr(value)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _KINDS:
        array = np.asarray(value)
        data = [array.dtype.str, [*array.shape], base64.b64encode(array.tobytes()).decode()]
        return {"$array" if isinstance(value, np.ndarray) else "$scalar": data}
    if more is None:
        raise TypeError(f"{shown(value)}, a {kind.__qualname__}, is no plain data")
    return more(value)


def decode(data: Any, more: Callable[[str, Any], Any] | None = None) -> Any:
    """Return the value that `encode` has written. `more` decodes the objects of its `more`."""
    if isinstance(data, list):
        return [decode(each, more) for each in data]
    if not isinstance(data, dict):
        return data
    name: str = next(iter(data), "")
    inside: Any = data.get(name)
    if name[:1] != "$":
        return {key: decode(each, more) for key, each in data.items()}
    if name in _MAKE:
        return _MAKE[name](decode(each, more) for each in inside)
    if name == "$dict":
        return {decode(key, more): decode(each, more) for key, each in inside}
    if name == "$bytes":
        return base64.b64decode(inside)
    if name in ("$float", "$complex"):
        return {"$float": float, "$complex": complex}[name](inside)
    if name in ("$array", "$scalar"):
        dtype, shape, encoded = inside
        array = np.frombuffer(base64.b64decode(encoded), dtype).reshape(shape).copy()
        return array if name == "$array" else array[()]
    if more is None:
        raise ValueError(f"{name} is no kind of value")
    return more(name, inside)


# ---- the identity of a program

Identity = dict[str, list[str]]                         # {part: [beginning of its repr, digest]}

_SOURCES = "recognizer", "constraint", "pattern", "flags", "schema", "grammar"      # of which constraints are made
_HOMES = tuple(path + os.sep for path in (
    os.path.dirname(os.path.dirname(__file__)), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"),
))  # fmt: skip


def digest(*parts: Any) -> str:
    """Return 20 hexadecimal digits of values, the same in every process. Others than data count by their repr."""
    text = json.dumps(encode(parts, describe), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=10).hexdigest()


def describe(value: Any) -> str:
    """Return the repr of a value without addresses, with the sources of a constraint and the digest of a vocabulary."""
    text = re.sub(r" at 0x[0-9a-f]+|, \d+ masks", "", repr(value))
    sources = [getattr(value, name, None) for name in _SOURCES]
    vocab = getattr(getattr(value, "vocab", None), "digest", None)
    return " ".join([text, *(describe(each) for each in (*sources, vocab) if each is not None)])


def identity(name: str, program: Any = None, **options: Any) -> Identity:
    """Return the identity of a program: a function or a class, and its options."""
    values = [("", program), *options.items()]
    parts = [(label, each) for part, value in values for label, each in parts_of(part, value) if label]
    return {"its program": [name, name], **{label: [shown(each, 60), digest(each)] for label, each in parts}}


def difference(before: Identity, now: Identity) -> str:
    """Describe the first difference between two identities in a sentence; "" if there is none."""
    for part in dict.fromkeys([*now, *before]):
        if part not in before or part not in now:
            return f"{part} {'is not there' if part in before else 'was not there'}"
        (was, before_digest), (found, now_digest) = before[part], now[part]
        if before_digest != now_digest and part.startswith("the code of "):
            return f"{part} is another"
        if before_digest != now_digest:
            return f"{part} was {was}, and is {found}" if was != found else f"{part} is another"
    return ""


def parts_of(label: str, value: Any, seen: set[Any] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value: the code of the user's functions and classes, and the values that they refer to."""
    seen = set() if seen is None else seen
    value = getattr(value, "__func__", getattr(value, "fget", None) or value)       # of a method, of a property
    if isinstance(value, types.FunctionType | type) and _is_own(value):
        if value not in seen:
            seen.add(value)
            yield from _members(value, seen) if isinstance(value, type) else _function_parts(value, seen)
    elif not isinstance(value, types.ModuleType):
        yield label, value
        if _is_own(type(value)):
            yield from parts_of("", type(value), seen)


def _members(cls: type, seen: set[Any]) -> Iterator[tuple[str, Any]]:
    for base in cls.__bases__:
        yield from parts_of(f"a base of {cls.__name__}", base, seen)
    for name, value in vars(cls).items():
        if not name.startswith("__") or isinstance(value, types.FunctionType):
            yield from parts_of(f"{cls.__name__}.{name}", value, seen)


def _function_parts(function: types.FunctionType, seen: set[Any]) -> Iterator[tuple[str, Any]]:
    function = inspect.unwrap(function)
    name, held = function.__name__, inspect.getclosurevars(function)
    yield f"the code of {function.__qualname__}", Code(function.__code__)
    for kind, values in (("variable", held.nonlocals), ("global", held.globals)):
        for each, value in values.items():
            yield from parts_of(f"the {kind} {each}" + f" of {name}" * (kind == "variable"), value, seen)
    yield from parts_of(f"the defaults of {name}", (function.__defaults__, function.__kwdefaults__), seen)


class Code:
    """Code of a function without its place in a file, as its repr."""

    def __init__(self, code: types.CodeType) -> None:
        constants = [Code(each) if isinstance(each, types.CodeType) else each for each in code.co_consts]
        self._repr = digest(code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants)

    def __repr__(self) -> str:
        return self._repr


def _is_own(part: Any) -> bool:
    """Return True for a function or a class of the user, and False for those of Python and of installed packages."""
    module = sys.modules.get(part.__module__)
    file = getattr(module, "__file__", None) or ("" if part.__module__ == "__main__" or module is None else _HOMES[0])
    return not file.startswith(_HOMES) and "site-packages" not in file and "dist-packages" not in file
