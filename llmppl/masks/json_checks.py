"""What is looked at in a JSON schema before llguidance reads it: its size, and whether every part has finite instances.

A schema is *productive* if some finite text is an instance. `{"$ref": "#"}` is not, nor is an object that requires one
like itself: a mask could go on for ever and never end. The productive schemas are the least fixed point of rules that
say of a schema what it needs: its `$ref` and all of its `allOf`, one of its `anyOf`, and of an object or array what it
requires. `false` passes here, as what needs nothing does: it has no instance, but no infinite one either.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

__all__ = ["MAX_DEPTH", "check_size", "parts", "unproductive"]

MAX_DEPTH = 120                                     # of objects and arrays in one another; llguidance reads 127
MAX_PROPERTIES = 5000                               # of one object; llguidance's time grows with their square
MAX_VALUES = 2_000_000                              # of a schema: its keys, numbers, texts, objects and arrays
DEFINITIONS = "$defs", "definitions"
NAMED = *DEFINITIONS, "properties", "patternProperties", "dependentSchemas"     # they hold schemas by name
OPAQUE = "enum", "const", "default", "examples", "x-guidance"                   # what they hold is no schema


def _get(node: dict[str, Any], key: str, kind: type) -> Any:
    """What a schema has there, or an empty one where it has nothing of that kind."""
    found = node.get(key)
    return found if isinstance(found, kind) else kind()


def check_size(schema: object) -> None:
    """A ValueError if a schema is too deep (or holds itself), or too large."""
    level, size = [schema], 0
    for _ in range(MAX_DEPTH + 1):
        size += len(level)
        if size > MAX_VALUES:
            raise ValueError(f"the schema has more than {MAX_VALUES:,} values; fewer would work")
        objects = [value for value in level if isinstance(value, dict)]
        most = max((len(_get(value, "properties", dict)) for value in objects), default=0)
        if most > MAX_PROPERTIES:
            raise ValueError(
                f"the schema has an object of {most:,} properties; at most {MAX_PROPERTIES:,} would work, "
                f"or patternProperties"
            )
        lists = (value for value in level if isinstance(value, (list, tuple)))
        level = list(itertools.chain(*map(dict.values, objects), *lists))
        if not level:
            return
    raise ValueError(f"the schema is nested more than {MAX_DEPTH} deep; a $ref to $defs takes one level")


def parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas right inside a schema, definitions first, with the ways there (JSON pointers)."""
    for key in sorted(schema, key=lambda key: key not in DEFINITIONS):
        value, inner = schema[key], {"": schema[key]}
        if isinstance(value, list):
            inner = {f"/{i}": part for i, part in enumerate(value)}
        elif key in NAMED:
            inner = {f"/{name}": part for name, part in _get(schema, key, dict).items()}
        if key not in OPAQUE:
            yield from ((f"/{key}{way}", part) for way, part in inner.items() if isinstance(part, dict))


def unproductive(schema: dict[str, Any]) -> str | None:
    """The place of a schema of which every instance would be infinite, the outermost; None if there is none."""
    places = [("#", schema)]
    for place, node in places:                      # grows
        places += [(place + way, part) for way, part in parts(node)]
    open_ = {id(node) for _, node in places}        # not known to be productive
    waiting: dict[int, list[dict[str, Any]]] = {}   # by what may make them so
    todo = [node for _, node in places]
    while todo:
        node = todo.pop()                           # the innermost first
        if id(node) in open_:
            missing = _missing(node, schema, open_)
            for part in missing:
                waiting.setdefault(part, []).append(node)
            if not missing:
                open_.remove(id(node))
                todo += waiting.pop(id(node), ())
    found = [place for place, node in places if id(node) in open_]
    return min(found, key=lambda place: place.count("/"), default=None)


def _missing(node: dict[str, Any], root: dict[str, Any], open_: set[int]) -> list[int]:
    """The parts, by id, of which one is needed and none is known to be productive; nothing if the schema is."""
    needs = [[part] for part in (_target(root, node.get("$ref")), *_get(node, "allOf", list), *_required(node))]
    for some in (*needs, _get(node, "anyOf", list), _get(node, "oneOf", list)):
        if some and open_.issuperset(map(id, some)):
            return list(map(id, some))
    return []


def _required(node: dict[str, Any]) -> list[Any]:
    """What every instance of an object or array schema has inside; nothing where it may be something else."""
    if node.keys() & {"enum", "const"}:
        return []
    if node.get("type") in ("object", ["object"]):
        names = _get(node, "properties", dict)
        return [names[name] for name in _get(node, "required", list) if isinstance(name, str) and name in names]
    if node.get("type") in ("array", ["array"]):
        least, first = _get(node, "minItems", int), _get(node, "prefixItems", list)
        return [*first[:least], *[node.get("items")] * (least > len(first))]
    return []


def _target(root: dict[str, Any], ref: Any) -> object:
    """The schema that a `$ref` within this text points to; None for another one, which llguidance knows or refuses."""
    if not f"{ref}/".startswith("#/"):
        return None
    found: Any = root
    for step in ref.split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdigit() and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            return None
    return found
