"""Checks of a JSON schema before llguidance reads it: its size, its keywords, and whether it has instances.

A schema is *productive* if some finite text is an instance. `{"$ref": "#"}` is not, nor is an object that requires a
member like itself: a mask could allow tokens for ever and never end. The productive schemas are the least fixed point
of rules. A schema needs its `$ref` and all of its `allOf`, one of its `anyOf`, and the required parts of an object or
array. `false` passes because it needs nothing: it has no instance, but no infinite one either.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

__all__ = [
    "KEYWORDS", "MAX_DEPTH", "check_references", "check_size", "misspelt", "parts", "places",
    "target", "unproductive",
]  # fmt: skip

MAX_DEPTH = 120                                     # of nested objects and arrays; llguidance reads 127
MAX_PROPERTIES = 2000                               # of one object; llguidance's time grows with their square
MAX_VALUES = 2_000_000                              # of a schema: its keys, numbers, texts, objects and arrays
MAX_LEVELS = 20_000                                 # of all parts that a $ref points to; llguidance recurses
MAX_PATTERNS, MAX_SWEEPS = 12, 100                  # patterns of one string, for which llguidance takes 2^n bytes
DEFINITIONS = "$defs", "definitions"
NAMED = *DEFINITIONS, "properties", "patternProperties", "dependentSchemas", "dependentRequired", "dependencies"
OPAQUE = "enum", "const", "default", "examples", "x-guidance"                   # their values are no schemas
KEYWORDS = frozenset(                               # that restrict instances
    "$ref $defs definitions allOf anyOf oneOf not if then else dependentSchemas dependentRequired dependencies "
    "prefixItems items additionalItems unevaluatedItems contains minContains maxContains minItems maxItems uniqueItems "
    "properties patternProperties additionalProperties unevaluatedProperties propertyNames minProperties maxProperties "
    "required type enum const format pattern minLength maxLength multipleOf minimum maximum exclusiveMinimum "
    "exclusiveMaximum".split()
)
NOTES = frozenset(                                  # annotations, including OpenAPI's
    "$schema $id id $anchor $comment $vocabulary $dynamicRef $dynamicAnchor $recursiveRef $recursiveAnchor title "
    "description default examples example deprecated readOnly writeOnly contentEncoding contentMediaType contentSchema "
    "nullable discriminator xml externalDocs x-guidance".split()
)
OTHERS = frozenset(("$dynamicRef", "$recursiveRef", "x-guidance"))     # names that change the meaning, too
TYPES = "string", "number", "integer", "boolean", "object", "array", "null"
FOREIGN = {                                         # keywords of other libraries, for numbers, lists and patterns
    "min": "minimum", "max": "maximum", "ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum",
    "lt": "exclusiveMaximum", "choices": "enum", "options": "enum", "regex": "pattern",
}  # fmt: skip
NEAR = 0.8                                          # similarity (difflib) of a misspelt name to a keyword


def _get(node: dict[str, Any], key: str, kind: type) -> Any:
    """Return the value of a key, or an empty one if there is none of that kind."""
    found = node.get(key)
    return found if isinstance(found, kind) else kind()


def check_size(schema: object) -> None:
    """Check that a schema is not too deep (or contains itself), nor too large. Raises ValueError."""
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


def check_references(schema: Any) -> None:
    """Check that no path along `$ref` is too long for llguidance, and not too many patterns meet. Raises ValueError."""
    values: list[Any] = [schema]
    for value in values:                            # grows
        values += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    levels: dict[int, int] = {}                     # of objects and arrays, by id
    for value in reversed(values):
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        if inner is not None:
            levels[id(value)] = 1 + max((levels.get(id(each), 0) for each in inner), default=0)
    refs = {value["$ref"] for value in values if isinstance(value, dict) and isinstance(value.get("$ref"), str)}
    longest = sum(levels.get(id(target(schema, ref)), MAX_DEPTH) for ref in refs)      # bound on every path
    if longest > MAX_LEVELS:
        raise ValueError(
            f"the schema has {len(refs):,} parts that a $ref points to, {longest:,} levels deep together, so that a "
            f"path along them may be too long; at most {MAX_LEVELS:,} levels would work"
        )
    nodes = places(schema) if isinstance(schema, dict) else []
    meet, before = dict.fromkeys((id(node) for _, node in nodes), 0), -1
    for _ in range(MAX_SWEEPS):                     # in both directions, since a $ref points either way
        if sum(meet.values()) == before:
            return
        before = sum(meet.values())
        nodes.reverse()
        for place, node in nodes:
            all_of = [target(schema, node.get("$ref")), *_get(node, "allOf", list)]
            others = (meet[id(part)] for way, part in parts(node) if not way.startswith("/allOf"))
            most = ("pattern" in node) + sum(meet.get(id(part), 0) for part in all_of) + max(others, default=0)
            meet[id(node)] = most
            if most > MAX_PATTERNS:
                raise ValueError(f"JSON schema at {place}: more than {MAX_PATTERNS} patterns of allOf or $ref may meet "
                                 "in one string; fewer would work, or one pattern for all")  # fmt: skip
    raise ValueError("the schema has references that are too entangled; fewer would work")


def misspelt(schema: dict[str, Any]) -> str | None:
    """Return a message about the first name that looks misspelt; None if there is none.

    JSON Schema ignores unknown names. This reports a name near a keyword or of another library, `required: true`, and
    a schema whose names are no keywords, so that it would admit any JSON: the whole one, or one with schemas inside.
    """
    for place, node in places(schema, only_keywords=True):
        for key in node.keys() - KEYWORDS - NOTES:
            if meant := _keyword_near(key):
                return f"{place}: {key!r} is no keyword: did you mean {meant!r}?"
        if isinstance(node.get("required"), bool) and len(place) > 1:
            return f"{place}, 'required': it is a list of names in the schema of the object, such as ['a']"
    for place, node in places(schema, only_keywords=True):
        unknown = [key for key in node if key not in KEYWORDS | NOTES]
        has_none = node and not any(key in KEYWORDS | OTHERS and key not in DEFINITIONS for key in node)
        if has_none and (place == "#" or any(isinstance(node[key], dict) for key in unknown)):
            names = ", ".join(map(repr, unknown[:3] or list(node)[:3]))
            return (
                f"{place} has no keyword, so that any JSON would do: are {names} properties? "
                '{"properties": {...}}, or a $ref to a definition; true admits any JSON'
            )
        kinds = node.get("type")
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            near = difflib.get_close_matches(kind, TYPES, 1) if isinstance(kind, str) and kind not in TYPES else []
            if near:
                return f"{place}, 'type': {kind!r} is no type: did you mean {near[0]!r}?"
    return None


def _keyword_near(name: str) -> str | None:
    """Return the keyword that another name probably means; None if none is near, or the name is an annotation."""
    if not name[:1].isalpha() or name.lower().startswith("x-"):         # the marks of extensions
        return None
    plain = {word.lower(): word for word in (*KEYWORDS, *NOTES)}
    if name in FOREIGN:
        return FOREIGN[name]
    near = difflib.get_close_matches(name.replace("_", "").replace("-", "").lower(), sorted(plain), 1, NEAR)
    return plain[near[0]] if near and plain[near[0]] in KEYWORDS else None


def parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas directly inside a schema, definitions first, with the JSON pointers to them."""
    for key in sorted(schema, key=lambda key: key not in DEFINITIONS):
        value, inner = schema[key], {"": schema[key]}
        if isinstance(value, list):
            inner = {f"/{i}": part for i, part in enumerate(value)}
        elif key in NAMED:
            inner = {f"/{name}": part for name, part in _get(schema, key, dict).items()}
        if key not in OPAQUE:
            yield from ((f"/{key}{way}", part) for way, part in inner.items() if isinstance(part, dict))


def places(schema: dict[str, Any], only_keywords: bool = False) -> list[tuple[str, dict[str, Any]]]:
    """Return a schema and all schemas inside it, with their places; with `only_keywords`, not below unknown names."""
    found = [("#", schema)]
    for place, node in found:                       # grows
        inner = ((way, part) for way, part in parts(node) if not only_keywords or way.split("/")[1] in KEYWORDS)
        found += [(place + way, part) for way, part in inner]
    return found


def unproductive(schema: dict[str, Any]) -> str | None:
    """Return the place of the outermost schema that has infinite instances only; None if there is none."""
    nodes = places(schema)
    open_ = {id(node) for _, node in nodes}         # not known to be productive
    waiting: dict[int, list[dict[str, Any]]] = {}   # by the parts that may make them productive
    todo = [node for _, node in nodes]
    while todo:
        node = todo.pop()                           # the innermost first
        if id(node) in open_:
            missing = _missing(node, schema, open_)
            for part in missing:
                waiting.setdefault(part, []).append(node)
            if not missing:
                open_.remove(id(node))
                todo += waiting.pop(id(node), ())
    found = [place for place, node in nodes if id(node) in open_]
    return min(found, key=lambda place: place.count("/"), default=None)


def _missing(node: dict[str, Any], root: dict[str, Any], open_: set[int]) -> list[int]:
    """Return the ids of the parts of which one is needed and none is known to be productive; [] if the schema is."""
    needs = [[part] for part in (target(root, node.get("$ref")), *_get(node, "allOf", list), *_required(node))]
    for some in (*needs, _get(node, "anyOf", list), _get(node, "oneOf", list)):
        if some and open_.issuperset(map(id, some)):
            return list(map(id, some))
    return []


def _required(node: dict[str, Any]) -> list[Any]:
    """Return the schemas inside every instance of an object or array schema; [] if instances may be of another type."""
    if node.keys() & {"enum", "const"}:
        return []
    if node.get("type") in ("object", ["object"]):
        names = _get(node, "properties", dict)
        return [names[name] for name in _get(node, "required", list) if isinstance(name, str) and name in names]
    if node.get("type") in ("array", ["array"]):
        least, first = _get(node, "minItems", int), _get(node, "prefixItems", list)
        return [*first[:least], *[node.get("items")] * (least > len(first))]
    return []


def target(root: dict[str, Any], ref: Any) -> object:
    """Return the schema that a `$ref` points to; None for a `$ref` outside this document."""
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
