"""Checks of arguments: counts, numbers, texts, functions and random streams.

A check takes the argument's name, with which its error begins, and returns the value in its plain Python type. A value
of another type is a TypeError, a value out of range a ValueError. A bool is no number, and a class is no function.
"""

from __future__ import annotations

import inspect
import math
import numbers
import os
import re
import sys
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

S = TypeVar("S", bound=str)
T = TypeVar("T")


def _of_type(name: str, value: T, types: type | tuple[type, ...], expected: str) -> T:
    if type(value) is bool or not isinstance(value, types):
        raise TypeError(f"{name} must be {expected}, not {shown(value)}")
    return value


def _in_range(name: str, value: Any, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {expected}, not {shown(value)}")


def integer(name: str, value: float) -> int:
    """Return `value`, an integer of any size and sign."""
    return int(_of_type(name, value, (int, np.integer), "an integer"))


def count(name: str, value: float, least: int = 1) -> int:
    """Return `value`, an integer from `least` to sys.maxsize, the largest length of a list."""
    value = integer(name, value)
    _in_range(name, value, value >= least, f"at least {least}")
    _in_range(name, value, value <= sys.maxsize, f"at most {sys.maxsize}")
    return value


def optional_count(name: str, value: int | None, least: int = 1) -> int | None:
    """Return `value`, a count or None."""
    return None if value is None else count(name, value, least)


def number(name: str, value: float) -> float:
    """Return `value`, a real number, infinite ones included; not NaN."""
    real = float(_of_type(name, value, numbers.Real, "a number"))
    _in_range(name, real, not math.isnan(real), "a number")
    return real


def positive(name: str, value: float, hint: str = "") -> float:
    """Return `value`, a number above 0 and below infinity."""
    real = number(name, value)
    _in_range(name, value, 0.0 < real < math.inf, f"positive and finite{hint}")
    return real


def probability(name: str, value: float, *, above_0: bool = False) -> float:
    """Return `value`, a number in [0, 1], or in (0, 1]."""
    real = number(name, value)
    holds = 0.0 < real <= 1.0 or (real == 0 and not above_0)
    _in_range(name, value, holds, "in (0, 1]" if above_0 else "in [0, 1]")
    return real


def one_of(name: str, value: S, choices: Iterable[str]) -> S:
    """Return `value`, one of some names."""
    choices = tuple(choices)
    expected = f"one of {', '.join(map(repr, choices))}"
    _in_range(name, _of_type(name, value, str, expected), value in choices, expected)
    return value


def text(name: str, value: str) -> str:
    """Return `value`, a str that can be written in UTF-8, without lone surrogates."""
    _of_type(name, value, str, "a str").encode()
    return value


def is_file_name(value: str) -> bool:
    """Check whether a text looks like the name of a file, such as "sql.lark": one line that ends with a suffix."""
    return re.fullmatch(r"[^\n\"{}:]*[\w/\\]\.\w{1,10}", value) is not None


def is_type(value: object) -> bool:
    """Check whether `value` is a class or another type: int, list[int], Literal["a"], int | None, an alias."""
    return (
        isinstance(value, type)
        or typing.get_origin(value) is not None
        or type(value).__module__[:6] == "typing"
    )


def is_hashable(value: object) -> bool:
    """Check whether `value` can be a key, including its contents, as in Annotated[int, []]."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def function(
    name: str, value: Callable[..., Any], example: str, *, takes: int | None = None
) -> Callable[..., Any]:
    """Return `value`, a function that can take `takes` arguments, and is no type. Errors show an `example`."""
    if is_type(value) or not callable(value):
        raise TypeError(f"{name} must be a function, as {example} is, not {shown(value)}")
    if takes is not None:
        try:
            inspect.signature(value).bind(*range(takes))
        except ValueError:  # it has no signature
            return value
        except TypeError as error:
            said = f"{name} must take {plural(takes, 'argument')}, as {example} does"
            raise TypeError(f"{said}; {name_of(value)} is wrong: {error}") from None
    return value


def truth(name: str, asked: Callable[[Any], bool | np.bool_], of: object) -> bool:
    """Return `asked(of)`. Raise a TypeError unless it is True or False."""
    answer = asked(of)
    if not isinstance(answer, (bool, np.bool_)):
        said = f"{name} {name_of(asked)} returned {shown(answer)} for {shown(of)}"
        raise TypeError(f"{said}; it must return True or False")
    return bool(answer)


def generator(seed: int | None, rng: np.random.Generator | None = None) -> np.random.Generator:
    """Return `rng`, or a new generator from `seed` or from the system's entropy. ValueError if both are given."""
    if rng is None:
        _in_range("seed", seed, seed is None or integer("seed", seed) >= 0, "at least 0")
        return np.random.default_rng(seed)
    if seed is not None:
        raise ValueError("give seed= or rng=, not both")
    return _of_type(
        "rng", rng, np.random.Generator, "a np.random.Generator (np.random.default_rng(seed))"
    )


def name_of(asked: Callable[..., Any]) -> str:
    """Return the name of a function for errors."""
    return getattr(asked, "__qualname__", re.sub(r" at 0x[0-9a-f]+", "", repr(asked))).rpartition(
        "<locals>."
    )[2]


def shown(value: object, most: int = 100) -> str:
    """Return the repr of `value` on one line, cut in the middle if it has more than `most` characters."""
    try:
        whole = repr(value)
    except Exception:  # nested too deep, or a repr that fails
        whole = "\n"
    if "\n" in whole:
        return f"a {type(value).__name__}"
    return whole if len(whole) <= most else f"{whole[: most // 2]}...{whole[-most // 4 :]}"


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def path(name: str, value: str | os.PathLike[str]) -> Path:
    """Return `value`, the path of a file."""
    return Path(_of_type(name, value, (str, os.PathLike), "a path, a str or a pathlib.Path"))
