"""Values as data: their JSON form, and the identity of a program.

`encode` writes plain data as JSON, and `decode` returns exactly the same values. JSON has no tuples, sets, bytes or
arrays. Each of these is an object with one field, whose name begins with "$": {"$tuple": [1, 2]}.

The *identity* of a program tells whether a file was made by it: its name, the code of the user's functions and classes
that it reaches, and the values and options that these refer to, by their reprs and digests. A value that changes
without its repr is not noticed.
"""

from __future__ import annotations

import base64
import dis
import functools
import hashlib
import inspect
import json
import math
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from llmppl.support.arguments import shown


def _array(data: tuple[str, list[int], bytes]) -> np.ndarray[Any, Any]:
    dtype, shape, contents = data
    return np.frombuffer(contents, dtype).reshape(shape).copy()


_FORMS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {      # name, to simpler data, and back
    tuple: ("$tuple", list, tuple),
    set: ("$set", list, set),
    frozenset: ("$frozenset", list, frozenset),
    dict: ("$dict", lambda value: [[*item] for item in value.items()], dict),
    bytes: ("$bytes", lambda value: base64.b64encode(value).decode(), base64.b64decode),
    float: ("$float", repr, float),
    complex: ("$complex", repr, complex),
    np.ndarray: ("$array", lambda value: [value.dtype.str, [*value.shape], value.tobytes()], _array),
    np.generic: ("$scalar", np.asarray, lambda array: array[()]),
}
_READ = {name: back for name, _, back in _FORMS.values()}
_KINDS = "biufcSUmM"                                    # of numpy dtypes that are written


def encode(value: Any, more: Callable[[Any], Any] | None = None) -> Any:
    """Return the JSON form of a value. `more` encodes other types, or raises the TypeError for them."""
    kind: Any = np.generic if isinstance(value, np.generic) else type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is list:
        return [encode(each, more) for each in value]
    if kind is dict and all(type(key) is str and key[:1] != "$" for key in value):
        return {key: encode(each, more) for key, each in value.items()}
    if kind in _FORMS and getattr(value, "dtype", np.dtype(bool)).kind in _KINDS:
        name, simpler, _ = _FORMS[kind]
        inside = encode(simpler(value), more)
        return {name: sorted(inside, key=json.dumps) if kind in (set, frozenset) else inside}
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
    if name[:1] != "$":
        return {key: decode(each, more) for key, each in data.items()}
    if name in _READ:
        return _READ[name](decode(data[name], more))
    if more is None:
        raise ValueError(f"{name} is no kind of value")
    return more(name, data[name])


# ---- the identity of a program

Identity = dict[str, str]                               # {part: its repr, and its digest unless the repr says all}

_SOURCES = "recognizer", "constraint", "pattern", "flags", "schema", "text", "vocab", "digest"      # of constraints
_TOLD = type(None), bool, int, float, str               # whose repr says all


def digest(*parts: Any) -> str:
    """Return 20 hexadecimal digits of values, the same in every process. Others than data count by their repr."""
    text = json.dumps(encode(parts, describe), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=10).hexdigest()


def describe(value: Any) -> str:
    """Return the repr of a value without addresses, with the sources of a constraint and the digest of a vocabulary."""
    text = re.sub(r" at 0x[0-9a-f]+|, \d+ masks", "", repr(value))
    sources = [getattr(value, name, None) for name in _SOURCES]
    return " ".join([text, *(describe(each) for each in sources if each is not None)])


def identity(name: str, program: Any = None, **options: Any) -> Identity:
    """Return the identity of a program: a function or a class, and its options."""
    found = {"its program": name}
    for option, given in [("", program), *options.items()]:
        for label, value in parts_of(option, given):
            text = shown(value, 60)
            found[label] = text if type(value) in _TOLD and text == repr(value) else f"{text} ({digest(value)})"
    found.pop("", None)                                 # the program itself, by its parts and its name only
    return found


def difference(before: Identity, now: Identity) -> str:
    """Describe the first difference between two identities; "" if there is none."""
    parts = ((part, before.get(part, "absent"), now.get(part, "absent")) for part in {**now, **before})
    return next((f"{part} was {was}, and is {found}" for part, was, found in parts if was != found), "")


def parts_of(label: str, value: Any, seen: set[Any] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value: the code of the user's functions and classes, and the values that they refer to."""
    seen = set() if seen is None else seen
    value = getattr(value, "__func__", getattr(value, "fget", None) or value)       # of a method, of a property
    if not isinstance(value, types.FunctionType | types.ModuleType | type):
        yield label, value
        value = value.func if isinstance(value, functools.partial | functools.cached_property) else type(value)
    if isinstance(value, types.FunctionType | type) and value not in seen and is_users(value.__module__):
        seen.add(value)
        for name, each in _members(value) if isinstance(value, type) else _function_parts(inspect.unwrap(value)):
            yield from parts_of(name, each, seen)


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    yield from ((f"a base of {cls.__name__}", base) for base in cls.__bases__)
    for name, value in vars(cls).items():
        if not name.startswith("__") or isinstance(value, types.FunctionType):
            yield f"{cls.__name__}.{name}", value


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    name, variables = function.__name__, inspect.getclosurevars(function).nonlocals
    yield f"the code of {function.__qualname__}", _code(function.__code__)
    yield from ((f"the variable {each} of {name}", value) for each, value in variables.items())
    yield from ((f"the global {each}", value) for each, value in used_globals(function).items())
    yield f"the defaults of {name}", (function.__defaults__, function.__kwdefaults__)


def _code(code: types.CodeType) -> str:
    """Return the digest of a code without its place in a file."""
    constants = [_code(each) if isinstance(each, types.CodeType) else each for each in code.co_consts]
    return digest(code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants)


def used_globals(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals that a function uses, also in functions inside of it."""
    names = sorted(_global_names(function.__code__) & function.__globals__.keys())
    return {name: function.__globals__[name] for name in names}


def _global_names(code: types.CodeType) -> set[str]:
    inner = [_global_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return {each.argval for each in dis.get_instructions(code) if each.opname.endswith("_GLOBAL")}.union(*inner)


@functools.cache
def is_users(module: str | None) -> bool:
    """Return True if a module is neither of this library, nor of Python, nor of an installed package."""
    root = str(module).partition(".")[0]
    file: str = getattr(sys.modules.get(str(module)), "__file__", None) or ""
    return root not in (*sys.stdlib_module_names, __name__.partition(".")[0]) and "-packages" not in file
