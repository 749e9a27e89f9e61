"""Schemas with few values, and the places of the fields of a JSON text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

from referencing.exceptions import Unresolvable

from llmppl.constraints.json.references import registry_of, resolver_of
from llmppl.report.probabilities import key_of

MAX_LEVELS = 100  # of a range of integers
_BETWEEN = re.compile(r"[\s,:]*")
_DECODER = json.JSONDecoder()


def parts_of(schema: Any, root: Any) -> list[Any]:
    """Return the alternatives of a schema, without references; the schema itself if it has none."""
    schema = resolved(schema, root)
    given = schema.get("anyOf") or schema.get("oneOf") or [schema]
    return [resolved(part, root) for part in given]


def resolved(schema: Any, root: Any) -> Any:
    """Return a schema, or the definition to which it refers. True, False and a missing definition give an empty one."""
    if isinstance(schema, dict) and "$ref" in schema:
        resolver = resolver_of(root, registry_of(root, None, []))
        try:
            schema = resolver.lookup(schema["$ref"]).contents
        except Unresolvable:
            return {}
    return schema if isinstance(schema, dict) else {}


def closed_values(schema: Any, root: Any) -> list[Any] | None:
    """Return a list that contains all values that a schema admits, None if they are not a few."""
    values = list[Any]()
    for part in parts_of(schema, root):
        found = _values(part)
        if found is None:
            return None
        values += found
    return values


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list({key_of(value): value for value in values}.values())


def _values(schema: Any) -> list[Any] | None:
    if "enum" in schema:
        return _distinct(schema["enum"])
    if "const" in schema:
        return [schema["const"]]
    match schema.get("type"):
        case "boolean":
            return [True, False]
        case "null":
            return [None]
        case "integer":
            return _integers(schema)
    return None


def _integers(schema: Any) -> list[int] | None:
    """Return the integers between two bounds, None if there are not two, or more than `MAX_LEVELS` integers."""
    low = _bound(schema, "minimum", -math.inf)
    above = _bound(schema, "exclusiveMinimum", -math.inf)
    high = _bound(schema, "maximum", math.inf)
    below = _bound(schema, "exclusiveMaximum", math.inf)
    first = max(low, above)
    last = min(high, below)
    if last - first > MAX_LEVELS + 1:
        return None
    step = Fraction(str(schema.get("multipleOf", 1)))
    whole = range(math.ceil(first), math.floor(last) + 1)
    found = [n for n in whole if above < n < below and n % step == 0]
    return found if len(found) <= MAX_LEVELS else None


def _bound(schema: Any, name: str, default: float) -> float:
    """Return a bound; the default where there is none, or a bool, as draft 4 has it."""
    value: float = schema.get(name, default)
    return default if isinstance(value, bool) else value


Path = tuple[str, ...]  # names of fields, from the outermost object to the innermost


def closed_values_at(root: Any, path: Path) -> list[Any]:
    """Return all values that a schema admits in a field of its objects; none if they are not a few."""
    schemas = [root]
    for name in path:
        inner = []
        for schema in schemas:
            for part in parts_of(schema, root):
                properties = part.get("properties") or {}
                if name in properties:
                    inner.append(properties[name])
        schemas = inner
    values = list[Any]()
    for schema in schemas:
        found = closed_values(schema, root)
        if found is None:
            return []
        values += found
    return _distinct(values)


def name_of_path(path: Path) -> str:
    """Return the name of a field of an object: `pet`, `pet.kind`, or `["pet.kind"]` where its own name has a dot."""
    if len(path) == 1 and not set(path[0]) & {".", "["}:
        return path[0]
    parts = [f".{name}" if name.isidentifier() else f"[{json.dumps(name)}]" for name in path]
    return "".join(parts).removeprefix(".")


def places_of(text: str) -> Iterator[tuple[Path, int, int]]:
    """Yield each field of the objects of a text with the range of its value, the inner fields after the outer one.

    Texts of other values, and objects in arrays, have none.
    """
    waiting = [(Path(), _after(text, 0))]
    while waiting:
        path, at = waiting.pop()
        if not text.startswith("{", at):
            continue
        at = _after(text, at + 1)
        while text[at] != "}":
            name, at = _DECODER.raw_decode(text, at)
            start = _after(text, at)
            _, end = _DECODER.raw_decode(text, start)
            yield (*path, name), start, end
            waiting.append(((*path, name), start))
            at = _after(text, end)


def _after(text: str, at: int) -> int:
    """Return the place of the next character that is no blank, comma or colon."""
    found = _BETWEEN.match(text, at)
    assert found is not None  # it matches the empty text, too
    return found.end()
