"""Arguments that many functions take, checked in one place: counts, numbers, texts, functions, random streams.

Each check is given the argument's name, with which its error begins, and returns the value in its plain Python type.
What is of another type is a TypeError, what is out of range a ValueError. A bool is no number, a class no function.
"""

from __future__ import annotations

import difflib
import math
import numbers
import os
import sys
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "count", "flag", "function", "generator", "integer", "is_type", "name_of", "number", "one_of", "optional_count",
    "path", "positive", "probability", "share", "shown", "temperature", "text", "truth", "unknown_option",
]  # fmt: skip


def integer(name: str, value: int) -> int:
    """`value`, an integer of any size and sign."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, not {shown(value)}")
    return int(value)


def count(name: str, value: int, least: int = 1) -> int:
    """`value`, an integer of at least `least` and at most sys.maxsize, the length of the longest list."""
    value = integer(name, value)
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {shown(value)}")
    if value > sys.maxsize:
        raise ValueError(f"{name} must be at most {sys.maxsize}, not {shown(value)}")
    return value


def optional_count(name: str, value: int | None, least: int = 1) -> int | None:
    """`value`, a count or None."""
    return None if value is None else count(name, value, least)


def number(name: str, value: float) -> float:
    """`value`, a real number, infinite ones included; not NaN."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {shown(value)}")
    try:
        real = float(value)
    except OverflowError:                               # 10**400
        raise ValueError(f"{name} must be at most {sys.float_info.max:.2g}, not {shown(value)}") from None
    if math.isnan(real):
        raise ValueError(f"{name} must be a number, not nan")
    return real


def positive(name: str, value: float) -> float:
    """`value`, a number above 0 and below infinity."""
    if not 0.0 < (real := number(name, value)) < math.inf:
        raise ValueError(f"{name} must be positive and finite, not {shown(value)}")
    return real


def temperature(value: float) -> float:
    """`value`, a temperature: a number above 0 and below infinity."""
    try:
        return positive("temperature", value)
    except ValueError as error:
        raise ValueError(f"{error} (greedy is top_k=1)") from None


def probability(name: str, value: float, *, above_0: bool = False) -> float:
    """`value`, a number in [0, 1], or in (0, 1]."""
    real = number(name, value)
    if not 0.0 <= real <= 1.0 or (above_0 and real == 0.0):
        raise ValueError(f"{name} must be in {'(' if above_0 else '['}0, 1], not {shown(value)}")
    return real


def share(name: str, value: float) -> float:
    """`value`, a number in [0, 1)."""
    if not 0.0 <= (real := number(name, value)) < 1.0:
        raise ValueError(f"{name} is a share in [0, 1), not {shown(value)}")
    return real


def flag(name: str, value: bool) -> bool:
    """`value`, True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, not {shown(value)}")
    return bool(value)


def one_of(name: str, value: str, choices: Iterable[str]) -> str:
    """`value`, one of some names."""
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        error = ValueError if isinstance(value, str) else TypeError
        raise error(f"{name} must be one of {', '.join(map(repr, choices))}, not {shown(value)}")
    return value


def text(name: str, value: str) -> str:
    """`value`, a str that can be written in UTF-8."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise ValueError(
            f"{name} has a lone surrogate, {value[at]!r}, at character {at}: it is half of a UTF-16 pair and has no "
            "bytes in UTF-8; text.encode('utf-16', 'surrogatepass').decode('utf-16') joins pairs"
        ) from None
    return value


def path(name: str, value: str | os.PathLike[str]) -> Path:
    """`value`, the path of a file."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path, a str or a pathlib.Path, not {shown(value)}")
    return Path(value)


def is_type(value: object) -> bool:
    """Whether `value` is a class or another type: int, list[int], Literal["a"], int | None."""
    return isinstance(value, type) or typing.get_origin(value) is not None or type(value).__module__ == "typing"


def function(name: str, value: Callable[..., Any], example: str) -> Callable[..., Any]:
    """`value`, something that can be called and is no type; `example` is one that would do."""
    if is_type(value) or not callable(value):
        raise TypeError(f"{name} must be a function, as {example} is, not {shown(value)}")
    return value


def truth(name: str, asked: Callable[[Any], bool], of: object) -> bool:
    """What the function `asked` says of `of`, True or False."""
    answer = asked(of)
    if not isinstance(answer, (bool, np.bool_)):
        said = f"{name} {name_of(asked)} returned {shown(answer)} for {shown(of)}"
        raise TypeError(f"{said}; it must return True or False")
    return bool(answer)


def unknown_option(owner: str, given: Iterable[str], known: Iterable[str]) -> TypeError:
    """The error for keywords that a function does not take, with the name that was probably meant."""
    unknown, known = next(iter(given)), sorted(known)
    near = difflib.get_close_matches(unknown, known, 1)
    meant = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"
    return TypeError(f"{owner} takes no {unknown}: {meant}")


def generator(seed: int | None, rng: np.random.Generator | None = None) -> np.random.Generator:
    """`rng`, or a new one from `seed`, or from the system's entropy; an error for both, and for what is neither.

    A seed is an integer of any size, at least 0.
    """
    if rng is None:
        if seed is not None and integer("seed", seed) < 0:
            raise ValueError(f"seed must be at least 0, not {seed}")
        return np.random.default_rng(seed)
    if seed is not None:
        raise ValueError("give seed= or rng=, not both")
    if not isinstance(rng, np.random.Generator):
        raise TypeError(f"rng must be a np.random.Generator (np.random.default_rng(seed)), not {rng!r}")
    return rng


def name_of(asked: Callable[..., Any]) -> str:
    """How a function is called in an error."""
    return (getattr(asked, "__qualname__", None) or repr(asked)).rpartition("<locals>.")[2]


def shown(value: object, most: int = 200) -> str:
    """The repr of `value`, cut where it is long."""
    try:
        whole = repr(value)
    except ValueError:                                  # an int of more digits than Python writes
        whole = f"an {type(value).__name__} too long to be written"
    return whole if len(whole) <= most else f"{whole[:most]}..."
