"""Schemas with few values, and the places of the fields of a JSON text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from llmppl.report.probabilities import key_of

MAX_LEVELS = 100  # of a range of integers
_BETWEEN = re.compile(r"[\s,:]*")
_DECODER = json.JSONDecoder()


def parts_of(schema: Any, root: Any) -> list[Any]:
    """Return the alternatives of a schema, without references; the schema itself if it has none."""
    given = schema.get("anyOf") or schema.get("oneOf") or [schema]
    return [resolved(part, root) for part in given]


def resolved(schema: Any, root: Any) -> Any:
    """Return a schema, or the definition to which it refers."""
    if not isinstance(schema, dict):
        return {}
    if "$ref" not in schema:
        return schema
    found = root
    for name in schema["$ref"].split("/")[1:]:
        found = found.get(name, {})
    return found


def closed_values(schema: Any, root: Any) -> list[Any] | None:
    """Return the values that a schema admits, None if they are not a few."""
    values = list[Any]()
    for part in parts_of(schema, root):
        found = _values(part)
        if found is None:
            return None
        values += found
    return values


def _values(schema: Any) -> list[Any] | None:
    if "enum" in schema:
        return [*{key_of(each): each for each in schema["enum"]}.values()]
    if "const" in schema:
        return [schema["const"]]
    if schema.get("type") == "boolean":
        return [True, False]
    if schema.get("type") == "null":
        return [None]
    if schema.get("type") == "integer":
        first = schema.get("minimum", schema.get("exclusiveMinimum", -MAX_LEVELS) + 1)
        last = schema.get("maximum", schema.get("exclusiveMaximum", MAX_LEVELS + 1) - 1)
        if last - first < MAX_LEVELS:
            step = schema.get("multipleOf", 1)
            return [*range(first + -first % step, last + 1, step)]
    return None


def places_of(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield each field of an object's text with the range of its value. Other texts have none."""
    if not text.lstrip().startswith("{"):
        return
    at = _after(text, text.index("{") + 1)
    while text[at] != "}":
        name, at = _DECODER.raw_decode(text, at)
        start = _after(text, at)
        _, end = _DECODER.raw_decode(text, start)
        yield name, start, end
        at = _after(text, end)


def _after(text: str, at: int) -> int:
    """Return the place of the next character that is no blank, comma or colon."""
    found = _BETWEEN.match(text, at)
    return found.end() if found else at
