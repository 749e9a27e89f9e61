"""Plain: the values that programs choose, written as JSON, and read again as exactly what they were.

None, bools, numbers and texts stand for themselves; anything else is a dict of one entry, its kind: {"token": 17},
{"tuple": [1, 2]}. A log-weight of -inf is null.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llmppl.constraints.vocabulary import EOS, Text, Token, Vocabulary
from llmppl.models.choices import Choice, StreamState
from llmppl.support.arguments import shown

Json = Any

_NUMBERS = "biufSU"                                     # the kinds of numpy that are written


class Plain:
    """Writes and reads values; tokens by their ids, of these vocabularies."""

    def __init__(self, vocabularies: Sequence[Vocabulary] = ()) -> None:
        self._vocabularies = vocabularies

    def write(self, value: Any) -> Json:
        """TypeError if it cannot be."""
        kind = type(value)
        if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
            return value
        if isinstance(value, (np.generic, np.ndarray)) and value.dtype.kind in _NUMBERS:
            array = np.asarray(value)
            data = [base64.b64encode(array.tobytes()).decode(), array.dtype.str, *array.shape]
            return {"array" if isinstance(value, np.ndarray) else "scalar": data}
        for name, (of, write, _) in _KINDS.items():
            if kind is of:
                return {name: write(self, value)}
        raise TypeError(f"{shown(value)}, a {kind.__qualname__}")

    def read(self, data: Json) -> Any:
        if not isinstance(data, dict):
            return data
        ((name, inside),) = data.items()
        return _KINDS[name][2](self, inside)

    def write_all(self, values: Any) -> Json:
        return [self.write(value) for value in values]

    def read_all(self, data: Json) -> list[Any]:
        return [self.read(each) for each in data]

    def write_dict(self, table: dict[Any, Any]) -> Json:
        """An object, or a list of pairs where keys are not texts."""
        if all(type(key) is str for key in table):
            return {key: self.write(value) for key, value in table.items()}
        return [self.write_all(pair) for pair in table.items()]

    def read_dict(self, data: Json) -> dict[Any, Any]:
        if isinstance(data, dict):
            return {key: self.read(value) for key, value in data.items()}
        return dict(self.read_all(pair) for pair in data)

    def write_token(self, token: Token) -> Json:
        if token.vocab not in self._vocabularies:
            raise TypeError(f"{token!r} of a vocabulary that the program does not hold when it begins")
        place = self._vocabularies.index(token.vocab)
        return [int(token), place] if place else int(token)

    def read_token(self, data: Json) -> Token:
        id, place = data if isinstance(data, list) else (data, 0)
        return self._vocabularies[place][id]

    def write_item(self, item: Choice | StreamState) -> Json:
        """A choice as [value], or [value, log weight] where that is not 0; else the state of a stream."""
        if isinstance(item, StreamState):
            return {"state": self.write(item.state)}
        return [self.write(item.value), *([float(item.log_w)] if item.log_w else [])]

    def read_item(self, data: Json) -> Choice | StreamState:
        if isinstance(data, dict):
            return StreamState(self.read(data["state"]))
        value, log_w = (*data, 0.0)[:2]
        return Choice(self.read(value), log_w)


def _array(_: Plain, data: Json) -> np.ndarray:
    encoded, dtype, *shape = data
    return np.frombuffer(base64.b64decode(encoded), dtype).reshape(shape).copy()


_KINDS: dict[str, tuple[Any, Callable[[Plain, Any], Json], Callable[[Plain, Json], Any]]] = {
    "token": (Token, Plain.write_token, Plain.read_token),
    "eos": (type(EOS), lambda _, value: True, lambda _, data: EOS),
    "text": (Text, lambda _, text: text.bytes.hex(), lambda _, data: Text(bytes.fromhex(data))),
    "bytes": (bytes, lambda _, value: value.hex(), lambda _, data: bytes.fromhex(data)),
    "float": (float, lambda _, value: repr(value), lambda _, data: float(data)),
    "array": (None, lambda _, value: None, _array),
    "scalar": (None, lambda _, value: None, lambda self, data: _array(self, data)[()]),
    "tuple": (tuple, Plain.write_all, lambda self, data: tuple(self.read_all(data))),
    "list": (list, Plain.write_all, Plain.read_all),
    "set": (set, Plain.write_all, lambda self, data: set(self.read_all(data))),
    "frozenset": (frozenset, Plain.write_all, lambda self, data: frozenset(self.read_all(data))),
    "dict": (dict, Plain.write_dict, Plain.read_dict),
}

