"""Identities of saved runs and tasks: a file continues only with the run and the tasks that it was made with.

The *identity* of a run is the name and the source text of its class or function, its options that are plain data or
contexts, and `version`, a text of the user's. Objects that the source refers to are no part of it. A task is known by
the *digest* of its pickle, or by a key.
"""

import ast
import dataclasses
import functools
import hashlib
import importlib
import inspect
import io
import linecache
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import numpy as np

from llmppl.support.arguments import name_of, shown, text
from llmppl.support.values import DATES

Identity = dict[str, str]  # {part: its value as text, or a digest}

VERSION: str = importlib.import_module(__name__.partition(".")[0]).__version__
MAX_SHOWN = 60  # characters of a value in an identity
_ATOMS = bool, int, float, str, bytes, types.NoneType, *DATES  # whose repr says all
_UNORDERED = set, frozenset, dict
_CONTAINERS = list, tuple, *_UNORDERED
_OTHERS = {
    *sys.stdlib_module_names,
    __name__.partition(".")[0],
}  # modules of which `VERSION` and Python tell


# ---- runs


def identity(program: Any, version: str = "", **options: Any) -> Identity:
    """Return the identity of a function, a partial, a method, or an object whose class is the program."""
    while isinstance(program, functools.partial):
        arguments = {f"argument {i}": value for i, value in enumerate(program.args)}
        options = {**arguments, **program.keywords, **options}
        program = program.func
    function = inspect.unwrap(getattr(program, "__func__", program))
    codes = [function]
    if not inspect.isfunction(function):
        codes = [
            cls for cls in type(program).__mro__ if cls.__module__.partition(".")[0] not in _OTHERS
        ]
    owner = getattr(program, "__self__", program)
    for name, value in getattr(owner, "__dict__", {}).items():
        if not (name[:1] == name[-1:] == "_"):  # those are inference's
            options[f"the attribute {name}"] = value
    found = {"its program": name_of(codes[0] if codes else type(program))}
    found |= {"its version": repr(text("version", version)), "the version of llmppl": VERSION}
    for code in codes:
        found[f"the source of {name_of(code)}"] = digest(_source(code))
    for name, value in options.items():
        found |= _plain(name, value)
    return found


def difference(before: Identity, now: Identity) -> str:
    """Describe the first difference between two identities; "" if there is none."""
    for part in {**now, **before}:
        was = before.get(part, "absent")
        found = now.get(part, "absent")
        if was != found:
            is_source = part.startswith("the source of")
            return f"{part} has changed" if is_source else f"{part} was {was}, and is {found}"
    return ""


def _plain(name: str, value: Any) -> Identity:
    """Return the part of an identity with this name; nothing if the value is no plain data."""
    if not _is_plain(value, set()):
        return {}
    told = repr(value) if type(value) in _ATOMS else ""
    if not 0 < len(told) <= MAX_SHOWN:
        try:
            told = f"a {type(value).__name__} ({digest(value)})"
        except Exception:  # its class is local to a function
            return {}
    return {name: told}


def _is_plain(value: Any, seen: set[int]) -> bool:
    kind = type(value)
    if kind in _ATOMS or id(value) in seen:
        return True
    if isinstance(value, np.ndarray | np.generic):
        return not value.dtype.hasobject
    if isinstance(value, Enum) or hasattr(kind, "next_token"):  # a context
        return True
    parts = value
    if kind is dict:
        parts = *value, *value.values()
    elif dataclasses.is_dataclass(kind):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif kind not in _CONTAINERS:
        return False
    seen.add(id(value))
    return all(_is_plain(each, seen) for each in parts)


def _source(code: Any) -> str:
    """Return the source text of a function or a class, or else what its code says."""
    if code.__name__ != "<lambda>":  # whose lines have the statement around it
        try:
            return inspect.getsource(code)
        except Exception:  # none is known, as in a shell
            pass
    if isinstance(code, type):
        return _cell(code) or "\n".join(_members(code))
    defaults = [*(code.__defaults__ or ())]
    defaults += (code.__kwdefaults__ or {}).values()
    plain = [_plain("", value) for value in defaults]
    return digest([_code(code.__code__), plain])


def _cell(cls: type) -> str:
    """Return the source text of a class of a notebook, from the cell of its functions; "" if there is none."""
    for value in vars(cls).values():
        function = inspect.unwrap(value)
        if not inspect.isfunction(function):
            continue
        lines = linecache.getlines(function.__code__.co_filename)
        cell = ast.parse("".join(lines))
        for node in ast.walk(cell):
            if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
                own = lines[node.lineno - 1 : node.end_lineno]
                return "".join(own)
    return ""


def _members(cls: type) -> Iterator[str]:
    for name, value in vars(cls).items():
        inner = getattr(value, "func", value)  # of a cached property
        function = inspect.unwrap(getattr(inner, "fget", inner))
        if inspect.isfunction(function):
            yield _source(function)
        elif name[:2] != "__":
            yield str(_plain(name, value))


def _code(code: types.CodeType) -> tuple[Any, ...]:
    """Return a code as data, without its place in a file."""
    constants = []
    for each in code.co_consts:
        constants.append(_code(each) if isinstance(each, types.CodeType) else each)
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


# ---- tasks


def task_digest(index: int, task: Any, key: Callable[[Any], str] | None) -> str:
    """Return the text by which a task is known.

    Raises
    ------
    TypeError
        If `key` returns no text, or without a key, if the task has no pickle that is the same in every process.
    """
    if key is not None:
        found = key(task)
        if not isinstance(found, str):
            raise TypeError(f"key must return a text; for task {index} it returned {shown(found)}")
        return found
    try:
        found = digest(task)
        copy = pickle.loads(pickle.dumps(task))
        if found == digest(task, -1) == digest(copy):
            return found
        why = "has another pickle each time"
    except Exception as error:  # of the task's own methods, too
        why = f"cannot be pickled ({error})"
    remedy = "give key=, a function that returns a text for a task, as key=lambda task: task.name"
    raise TypeError(f"task {index}, {shown(task, MAX_SHOWN)}, {why}: {remedy}")


def digest(value: Any, step: int = 1) -> str:
    """Return the digest of the pickle of a value: equal for equal values, in every process.

    Each part has a pickle of its own, so that neither hashes of texts nor parts that are one object change it. Members
    of a set that lead to each other can change it: compare with the order `step` = -1.
    """
    return _hash(_told(value, {}, step).encode("utf-8", "surrogatepass"))


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _told(value: Any, known: dict[int, tuple[Any, str]], step: int) -> str:
    """Return the repr of an atom, or the digest of another value. `known` has the digests of objects by id."""
    kind = type(value)
    if kind in _ATOMS:
        return repr(value)
    if id(value) not in known:
        known[id(value)] = value, f"object {len(known)}"  # for a part that leads back to it
        if kind in _UNORDERED:
            parts = value.items() if kind is dict else [*value][::step]
            told = sorted(_told(each, known, step) for each in parts)
            value_told = f"{kind} {told}".encode("utf-8", "surrogatepass")
        else:
            pickler = _Pickler(value, known, step)
            pickler.dump(value)
            value_told = pickler.file.getvalue()
        known[id(value)] = value, _hash(value_told)
    return known[id(value)][1]


class _Pickler(pickle.Pickler):
    """Pickler of one object, in which each part stands by its digest."""

    def __init__(self, root: Any, known: dict[int, tuple[Any, str]], step: int) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, protocol=5)
        self.root = root
        self.known = known
        self.step = step

    def persistent_id(self, value: Any) -> bytes | None:
        return (
            None
            if value is self.root
            else _told(value, self.known, self.step).encode("utf-8", "surrogatepass")
        )

    def reducer_override(self, value: Any) -> Any:
        if hasattr(type(value), "next_token"):  # a context, by its tokens
            return tuple, (list(map(int, value.tokens)),)
        if isinstance(
            value, set | frozenset
        ):  # of a subclass, whose own pickle has a list in any order
            return type(value), (frozenset(value), vars(value))
        if hasattr(type(value), "untyped_storage"):  # a tensor, whose own pickle contains addresses
            data = value.detach().cpu()
            data = data if data.dtype.itemsize > 2 else data.float()
            return np.asarray, (data.numpy(), str(value.dtype), type(value))
        if type(value) is np.ndarray and not value.dtype.hasobject:
            return np.asarray, (
                value.tobytes(),
                np.lib.format.dtype_to_descr(value.dtype),
                value.shape,
            )
        return NotImplemented
