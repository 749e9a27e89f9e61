"""ValueCodec: values that programs choose, as JSON, and decoded to exactly the same values.

None, bools, numbers and texts are written as themselves. Any other value is an object with one entry, its kind:
{"token": 17}, {"tuple": [1, 2]}. The module also has the JSON forms of random streams and step records, and `plain`,
which reduces a value to plain data. A log-weight of -inf is null in JSON.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from llmppl.constraints.vocabulary import EOS, Text, Token, Vocabulary
from llmppl.inference.genealogy import StepRecord
from llmppl.inference.resuming.files import null
from llmppl.models.choices import Choice, State, StreamState
from llmppl.support.arguments import shown
from llmppl.support.shared import Shared

Json = Any

_NUMBERS = "biufSU"                                     # kinds of numpy dtypes that are written
_SCALARS: tuple[Callable[[Any], Any], ...] = (bool, int, float, complex, str, bytes)
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "list": list, "set": set, "frozenset": frozenset}
_INDICES = {each.name for each in dataclasses.fields(StepRecord) if each.type == "Indices"}


def plain(value: Any) -> Any:
    """Return `value` as plain data: tokens as ids, contexts as tuples of ids, subclasses as their builtin base.

    Raises
    ------
    TypeError
        If `value` is not plain data.
    """
    if value is None or isinstance(value, np.generic) or (isinstance(value, str) and isinstance(value, Shared)):
        return value                                    # Shared: a Text, which keeps its bytes
    for kind in _SCALARS:
        if isinstance(value, kind):                     # type: ignore[arg-type]
            return kind(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    for kind in _SEQUENCES.values():
        if isinstance(value, kind):                     # type: ignore[arg-type]
            return kind(map(plain, value))
    if hasattr(value, "next_token") and hasattr(value, "tokens"):
        return tuple(map(int, value.tokens))
    raise TypeError(f"{type(value).__name__} is no plain data")


class ValueCodec:
    """Encoder and decoder of values. Tokens are written as ids of `vocabularies`."""

    def __init__(self, vocabularies: Sequence[Vocabulary] = ()) -> None:
        self._vocabularies = vocabularies

    def encode(self, value: Any) -> Json:
        """Return the JSON form of `value`. Raise a TypeError if it has none."""
        kind = type(value)
        if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
            return value
        if isinstance(value, (np.generic, np.ndarray)) and value.dtype.kind in _NUMBERS:
            array = np.asarray(value)
            data = [base64.b64encode(array.tobytes()).decode(), array.dtype.str, *array.shape]
            return {"array" if isinstance(value, np.ndarray) else "scalar": data}
        if kind not in _ENCODERS:
            raise TypeError(f"{shown(value)}, a {kind.__qualname__}")
        name, encode = _ENCODERS[kind]
        return {name: encode(self, value)}

    def decode(self, data: Json) -> Any:
        """Return the value that `encode` has written as `data`."""
        if not isinstance(data, dict):
            return data
        ((name, inside),) = data.items()
        return _DECODERS[name](self, inside)

    def _encode_all(self, values: Any) -> Json:
        return [self.encode(value) for value in values]

    def _encode_dict(self, table: dict[Any, Any]) -> Json:
        """Return an object, or a list of pairs if a key is not a text."""
        if all(type(key) is str for key in table):
            return {key: self.encode(value) for key, value in table.items()}
        return [self._encode_all(pair) for pair in table.items()]

    def _decode_dict(self, data: Json) -> dict[Any, Any]:
        pairs = data.items() if isinstance(data, dict) else data
        return {self.decode(key): self.decode(value) for key, value in pairs}

    def _encode_token(self, token: Token) -> Json:
        if token.vocab not in self._vocabularies:
            raise TypeError(f"{token!r} of a vocabulary that the program does not hold when it begins")
        place = self._vocabularies.index(token.vocab)
        return [int(token), place] if place else int(token)

    def _decode_token(self, data: Json) -> Token:
        id, place = data if isinstance(data, list) else (data, 0)
        return self._vocabularies[place][id]

    def encode_item(self, item: Choice | StreamState) -> Json:
        """Return a choice as [value], or [value, log weight] if that is not 0, and a state of a stream as an object."""
        if isinstance(item, StreamState):
            return {"state": encode_stream(item.state)}
        return [self.encode(item.value), *([float(item.log_w)] if item.log_w else [])]

    def decode_item(self, data: Json) -> Choice | StreamState:
        if isinstance(data, dict):
            return StreamState(decode_stream(data["state"]))
        value, log_w = (*data, 0.0)[:2]
        return Choice(self.decode(value), log_w)


def _decode_array(_: ValueCodec, data: Json) -> np.ndarray:
    encoded, dtype, *shape = data
    return np.frombuffer(base64.b64decode(encoded), dtype).reshape(shape).copy()


def _decode_sequence(make: Callable[[Any], Any]) -> Callable[[ValueCodec, Json], Any]:
    return lambda codec, data: make(map(codec.decode, data))


_ENCODERS: dict[Any, tuple[str, Callable[[ValueCodec, Any], Json]]] = {
    Token: ("token", ValueCodec._encode_token),
    type(EOS): ("eos", lambda _, value: True),
    Text: ("text", lambda _, text: text.bytes.hex()),
    bytes: ("bytes", lambda _, value: value.hex()),
    float: ("float", lambda _, value: repr(value)),
    dict: ("dict", ValueCodec._encode_dict),
    **{make: (name, ValueCodec._encode_all) for name, make in _SEQUENCES.items()},
}
_DECODERS: dict[str, Callable[[ValueCodec, Json], Any]] = {
    "token": ValueCodec._decode_token,
    "eos": lambda _, data: EOS,
    "text": lambda _, data: Text(bytes.fromhex(data)),
    "bytes": lambda _, data: bytes.fromhex(data),
    "float": lambda _, data: float(data),
    "array": _decode_array,
    "scalar": lambda codec, data: _decode_array(codec, data)[()],
    "dict": ValueCodec._decode_dict,
    **{name: _decode_sequence(make) for name, make in _SEQUENCES.items()},
}


def encode_stream(state: State) -> list[Any]:
    """Return the JSON form of the state of a random stream."""
    entropy = state.entropy if isinstance(state.entropy, int) else list(map(int, state.entropy))
    return [*state._replace(entropy=entropy, state=ValueCodec().encode(state.state))]


def decode_stream(data: list[Any]) -> State:
    kind, entropy, key, size, children, state = data
    return State(kind, entropy, tuple(key), size, children, ValueCodec().decode(state))


def encode_record(record: StepRecord) -> dict[str, Any]:
    """Return the JSON form of a step record: lists for arrays."""
    return {
        name: list(map(null, value.tolist())) if isinstance(value, np.ndarray) else null(value)
        for name, value in vars(record).items()
    }


def decode_record(data: dict[str, Any]) -> StepRecord:
    fields: dict[str, Any] = {}
    for name, value in data.items():
        fields[name] = decode_number(value)
        if isinstance(value, list):
            fields[name] = np.array(list(map(decode_number, value)), np.int64 if name in _INDICES else np.float64)
    return StepRecord(**fields)


def decode_number(number: Any) -> Any:
    """Return a number from JSON, where null is -inf."""
    return -math.inf if number is None else number
