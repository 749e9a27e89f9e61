"""Values as data: their JSON form.

`encode` writes plain data as JSON, and `decode` returns exactly the same values. JSON has no tuples, sets, bytes, dates
or arrays. Each of these is an object with one field, whose name begins with "$": {"$tuple": [1, 2]}.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from llmppl.support.arguments import shown


def _array(data: tuple[str, list[int], bytes]) -> np.ndarray[Any, Any]:
    dtype, shape, contents = data
    return np.frombuffer(contents, dtype).reshape(shape).copy()


_FORMS: dict[
    type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]
] = {  # name, to simpler data, and back
    tuple: ("$tuple", list, tuple),
    set: ("$set", list, set),
    frozenset: ("$frozenset", list, frozenset),
    dict: ("$dict", lambda value: [*map(list, value.items())], dict),
    bytes: ("$bytes", lambda value: base64.b64encode(value).decode(), base64.b64decode),
    float: ("$float", repr, float),
    complex: ("$complex", repr, complex),
    decimal.Decimal: ("$decimal", str, decimal.Decimal),
    uuid.UUID: ("$uuid", str, uuid.UUID),
    datetime.date: ("$date", str, datetime.date.fromisoformat),
    datetime.datetime: ("$datetime", datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.time: ("$time", datetime.time.isoformat, datetime.time.fromisoformat),
    datetime.timedelta: (
        "$timedelta",
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
    np.ndarray: (
        "$array",
        lambda value: [value.dtype.str, [*value.shape], value.tobytes()],
        _array,
    ),
    np.generic: ("$scalar", np.asarray, lambda array: array[()]),
}
_READ = {name: back for name, _, back in _FORMS.values()}
_KINDS = "biufcSUmM"  # of numpy dtypes that are written
DATES = (
    datetime.date,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    uuid.UUID,
)


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
    name = next(iter(data), "")
    if name[:1] != "$":
        return {key: decode(each, more) for key, each in data.items()}
    if name in _READ:
        return _READ[name](decode(data[name], more))
    if more is None:
        raise ValueError(f"{name} is no kind of value")
    return more(name, data[name])
