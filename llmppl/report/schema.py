"""Schema of a recording: the fields of its lines, and a check for each.

A recording may come from somebody else, so every value is checked here before it is used. A *check* takes the name of a
field and its value. It returns the value in its plain type, or raises a TypeError or ValueError that begins with the
name, as `llmppl.support.arguments` does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from llmppl.support.arguments import count, flag, number, shown

__all__ = ["FIELDS", "check", "check_references"]

LARGEST = 1e300                                         # sums and differences of such numbers are still finite

Check = Callable[[str, Any], Any]


class Field(NamedTuple):
    """Field of an object: its check, and the default of a field that is not required."""

    check: Check
    default: Any = None
    required: bool = True


def optional(check: Check, default: Any) -> Field:
    """Return a field that may be missing."""
    return Field(check, default, required=False)


def check(fields: dict[str, Field], record: Any, name: str = "") -> dict[str, Any]:
    """Return the fields of a JSON object, checked. Unknown fields are dropped."""
    found, record = {}, _instance(dict, "an object", name, record)
    for key, field in fields.items():
        place = f"{name}.{key}" if name else key
        if key in record:
            found[key] = field.check(place, record[key])
        elif field.required:
            raise ValueError(f"{place} is missing")
        else:
            found[key] = field.default
    return found


def check_references(step: dict[str, Any], index: int, lengths: list[int]) -> None:
    """Raise a ValueError unless a checked step has number `index` and refers only to existing particles.

    lengths : the length of the text of each particle of the previous step
    """
    if step["step"] != index:
        raise ValueError(f"step must be {index}, not {step['step']}")
    for i, candidate in enumerate(step["candidates"]):
        length = 0
        if index > 1:
            _below(f"candidates[{i}].parent", candidate["parent"], len(lengths), "particles in the step before")
            length = lengths[candidate["parent"]]
        if candidate["keep"] is None:
            candidate["keep"] = length
        _below(f"candidates[{i}].keep", candidate["keep"], length + 1, "ways to cut its parent's text")
    for i, ancestor in enumerate(step["ancestors"]):
        _below(f"ancestors[{i}]", ancestor, len(step["candidates"]), "candidates")
    if len(step["log_weights"]) != len(step["ancestors"]):
        raise ValueError(f"log_weights has {len(step['log_weights'])} numbers for {len(step['ancestors'])} ancestors")


def _below(name: str, value: int, size: int, of: str) -> None:
    if value >= size:
        raise ValueError(f"{name} must be below {size}, the number of {of}, not {value}")


def _instance(kind: type, called: str, name: str, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {called}, not {shown(value, 60)}")
    return value


def _count(name: str, value: Any) -> int:
    return count(name, value, least=0)


def _finite(name: str, value: Any) -> float:
    if not abs(real := number(name, value)) <= LARGEST:
        raise ValueError(f"{name} must be from -{LARGEST:g} to {LARGEST:g}, not {real}")
    return real


def _text(name: str, value: Any) -> str:
    """Return a str. A lone surrogate, which no file can contain, becomes the replacement character."""
    return re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", _instance(str, "a text", name, value))


def _list(check: Check) -> Check:
    return lambda name, value: [
        check(f"{name}[{i}]", each) for i, each in enumerate(_instance(list, "a list", name, value))
    ]


def _attribution(name: str, value: Any) -> dict[str, float]:
    items = _instance(dict, "an object", name, value).items()
    return {_text(name, key): _finite(f"{name}[{shown(key, 60)}]", each) for key, each in items}


def _or_null(check: Check, null: Any) -> Check:
    """Return a check that reads null as `null`."""
    return lambda name, value: null if value is None else check(name, value)


_log_weight = _or_null(_finite, -math.inf)
_optional_text = _or_null(_text, None)

HEADER = {"program": optional(_text, ""), "title": optional(_text, ""), "prompts": optional(_list(_text), [])}
CANDIDATE = {
    "parent": Field(_count),
    "text": Field(_text),
    "keep": optional(_count, None),                     # all
    "log_weight": Field(_log_weight),
    "twist": optional(_finite, 0.0),
    "finished": optional(flag, False),
    "death": optional(_optional_text, None),
    "attribution": optional(_attribution, {}),
}
STEP = {
    "step": Field(_count),
    "candidates": Field(_list(lambda name, value: check(CANDIDATE, value, name))),
    "ancestors": Field(_list(_count)),
    "log_weights": Field(_list(_finite)),
    "log_ml": Field(_log_weight),
    "ess": Field(_finite),
    "num_unique_ancestors": Field(_count),
    "num_finished": Field(_count),
    "num_dead": Field(_count),
}
FIELDS = {"header": HEADER, "step": STEP, "end": {"end": Field(_optional_text)}}     # by the kind of line
