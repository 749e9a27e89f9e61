"""Keywords of JSON Schema, drafts 4 to 2020-12: the values that each may have, and names that are none.

A *place* is a JSON pointer into the schema, such as `#/properties/a`. Values of `enum`, `const`, `default`, `examples`
and of unknown names are no schemas, and are not examined.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple

from llmppl.support.arguments import shown

TYPES = "string", "number", "integer", "boolean", "object", "array", "null"
OTHER_TYPES = {
    "float": "number",
    "double": "number",
    "list": "array",
    "dict": "object",
    "none": "null",
}
MAX_DEPTH = 200  # of schemas inside each other
MAX_POWER = 400  # of ten, in a number
Test = Callable[[Any], bool]


class Rule(NamedTuple):
    """Test of the value of a keyword, and the words for what it should be."""

    holds: Test
    words: str


def _is_number(value: Any) -> bool:
    is_exact = isinstance(value, int | Decimal) and not isinstance(value, bool)
    return is_exact and abs(Decimal(value).adjusted()) <= MAX_POWER


def _is_value(value: Any) -> bool:
    """Return whether exact arithmetic with all numbers of a value is short."""
    if isinstance(value, dict | list):
        return all(map(_is_value, _parts(value)))
    return not isinstance(value, Decimal) or _is_number(value)


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _is_schema(value: Any) -> bool:
    return isinstance(value, bool | dict)


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _all(kind: Any, holds: Test) -> Test:
    """Return the test of a list whose items, or of an object whose values, pass a test."""
    return lambda value: isinstance(value, kind) and all(map(holds, _parts(value)))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


POWERS = f"with powers of ten from -{MAX_POWER} to {MAX_POWER}"
FINITE = f"a finite number, {POWERS}"
_are_names = _all(list, _is_name)
_are_schemas = _all(list, _is_schema)
_RULES: dict[tuple[Test, str], str] = {  # test of a value, and the words for what it should be
    (
        _is_schema,
        "a schema: an object or a boolean",
    ): "not if then else additionalItems unevaluatedItems contains additionalProperties unevaluatedProperties "
    "propertyNames",
    (
        lambda value: bool(value) and _are_schemas(value),
        "a list of schemas, at least one",
    ): "allOf anyOf oneOf",
    (_are_schemas, "a list of schemas"): "prefixItems",
    (
        lambda value: _is_schema(value) or _are_schemas(value),
        "a schema, or a list of them",
    ): "items",
    (
        _all(dict, _is_schema),
        "an object of schemas by name",
    ): "properties patternProperties dependentSchemas",
    (lambda value: isinstance(value, dict), "an object of schemas by name"): "$defs definitions",
    (_all(dict, _are_names), "an object of lists of names"): "dependentRequired",
    (
        _all(dict, lambda value: _is_schema(value) or _are_names(value)),
        "an object of schemas, or lists of names",
    ): "dependencies",
    (
        _are_names,
        'a list of names, in the schema of the object: {"properties": {"a": ...}, "required": ["a"]}',
    ): "required",
    (
        lambda value: value != [] and all(each in TYPES for each in _listed(value)),
        f"one of {', '.join(TYPES)}, or a list of some of them",
    ): "type",
    (_all(list, _is_value), f"a list of values, their numbers {POWERS}"): "enum",
    (_is_value, f"a value, its numbers {POWERS}"): "const",
    (
        _is_name,
        "a string",
    ): "$ref $dynamicRef $recursiveRef $schema $id id $anchor $dynamicAnchor format pattern",
    (_is_number, FINITE): "minimum maximum",
    (
        lambda value: isinstance(value, bool) or _is_number(value),
        FINITE,
    ): "exclusiveMinimum exclusiveMaximum",
    (lambda value: _is_number(value) and value > 0, "a number above 0"): "multipleOf",
    (
        lambda value: _is_number(value) and value >= 0 and value == int(value),
        "a whole number, 0 or more",
    ): "minLength maxLength minItems maxItems minProperties maxProperties minContains maxContains",
    (lambda value: isinstance(value, bool), "true or false"): "uniqueItems",
}
RULES = dict[str, Rule]()
for _rule, _keys in _RULES.items():
    RULES |= dict.fromkeys(_keys.split(), Rule(*_rule))
_IDENTIFIERS = {"$schema", "$id", "id", "$anchor", "$dynamicAnchor"}
KEYWORDS = frozenset(RULES.keys() - _IDENTIFIERS)  # that restrict instances, or hold schemas
NOTES = _IDENTIFIERS | frozenset(  # annotations, including OpenAPI's
    "$comment $vocabulary $recursiveAnchor title description default examples example deprecated readOnly writeOnly "
    "contentEncoding contentMediaType contentSchema discriminator xml externalDocs".split()
)
HOLDERS = frozenset(key for key, rule in RULES.items() if "schema" in rule.words) - {"required"}
NAMES = KEYWORDS | NOTES
FOREIGN = {  # of other libraries and short forms, in plain letters
    "min": "minimum",
    "max": "maximum",
    "gt": "exclusiveMinimum",
    "ge": "minimum",
    "lt": "exclusiveMaximum",
    "le": "maximum",
    "regex": "pattern",
    "choices": "enum",
    "options": "enum",
    "values": "enum",
    "property": "properties",
    "unique": "uniqueItems",
    "ref": "$ref",
    "defs": "$defs",
    "exclusivemin": "exclusiveMinimum",
    "exclusivemax": "exclusiveMaximum",
}
_PLAIN = {key.lower(): key for key in sorted(KEYWORDS) if not key.startswith("$")} | FOREIGN


def pointer(step: object) -> str:
    """Return one step of a JSON pointer."""
    return "/" + str(step).replace("~", "~0").replace("/", "~1")


def nodes(schema: Any, at: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, schema) of a schema and of those inside it that are objects. Raises ValueError beyond a depth."""
    todo = [(at, schema, 0)]
    for place, node, depth in todo:  # grows
        if depth > MAX_DEPTH:
            raise ValueError(
                f"the schema is nested more than {MAX_DEPTH} deep; a $ref to $defs would work"
            )
        if isinstance(node, dict):
            yield place, node
            for key in filter(HOLDERS.__contains__, node):
                for step, part in _inside(key, node[key]):
                    todo.append((f"{place}/{key}{step}", part, depth + 1))


def _inside(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (step, schema) of the schemas that are the value of a keyword, or are in it."""
    if isinstance(value, list):
        for i, part in enumerate(value):
            yield pointer(i), part
    elif isinstance(value, dict) and RULES[key].words.startswith("a schema"):
        yield "", value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield pointer(name), part


def check_keywords(schema: Any, at: str = "") -> None:
    """Check the value of each keyword, in time linear in the schema. Raises ValueError for the first wrong one."""
    if not _is_schema(schema):
        raise ValueError(f"a JSON schema is an object, true or false, not {shown(schema)}")
    for place, node in nodes(schema, f"{at}#"):
        for key, value in node.items():
            rule = RULES.get(key)
            if rule and not rule.holds(value):
                hint = _hint_of_type(value) if key == "type" else ""
                raise ValueError(
                    f"JSON schema at {place}, {key!r}: {_brief(value)} should be {rule.words}{hint}"
                )


def _brief(value: Any) -> str:
    marked = json.dumps(value, ensure_ascii=False, default="\0{}\0".format)  # decimals
    text = marked.replace('"\\u0000', "").replace('\\u0000"', "")
    return text if len(text) <= 60 else text[:57] + "..."


def _hint_of_type(value: Any) -> str:
    words = [each for each in _listed(value) if _is_name(each) and each not in TYPES]
    if not words:
        return ""
    near = difflib.get_close_matches(OTHER_TYPES.get(words[0], words[0]), TYPES, 1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return "; the schema of a tool is its 'parameters'" if words == ["function"] else ""


def foreign(schema: Any, at: str = "#") -> tuple[list[str], list[str]]:
    """Return messages about names that are almost surely wrong keywords, and remarks about others.

    JSON Schema ignores unknown names. A message is about a name of another library, a name few edits from a keyword
    with a value that the keyword could have, or a schema without any keyword. Remarks are about the first place of each
    other name that does not begin with x-, and parts that may be any JSON.
    """
    wrong = []
    notes = dict[str, str]()
    found = [*nodes(schema, at)]
    refs = {node.get("$ref") for _, node in found}
    for place, node in found:
        is_group = place not in refs and place.rpartition("/")[0] in (
            f"{at}/$defs",
            f"{at}/definitions",
        )
        is_bare = not node.keys() & KEYWORDS - {"$defs", "definitions"}
        if is_bare and (
            is_group or not node or place == at != "#"
        ):  # a resource of definitions alone
            continue
        unknown = [key for key in node if key not in NAMES and key[:2].lower() != "x-"]
        for key in unknown:
            meant = likely(key, node)
            if meant:
                wrong.append(f"{place}: {key!r} is no keyword: did you mean {meant!r}?")
            else:
                notes.setdefault(key, f"{place}: {key!r} is no keyword, and is ignored")
        if is_bare and (place == "#" or any(isinstance(node[key], dict) for key in unknown)):
            hint = f"are {', '.join(map(repr, unknown[:3]))} properties? " if unknown else ""
            wrong.append(
                f'{place} has no keyword, so that any JSON would do: {hint}{{"type": "object", "properties": {{...}}}} '
                "or a $ref would work, and true for any JSON"
            )
        if is_bare:
            notes[place] = f"{place} has no keyword, and may be any JSON"
    return wrong, list(notes.values())


def likely(name: str, node: dict[str, Any]) -> str | None:
    """Return the keyword that another name of a schema probably means, and whose value fits; None if none is near."""
    if name.startswith("$"):
        near = difflib.get_close_matches(
            name, [key for key in RULES if key.startswith("$")], 1, 0.8
        )
    elif name[:1].isalpha():
        bare = name.replace("_", "").replace("-", "").lower()
        near = [_PLAIN[word] for word in _near(bare)]
    else:
        near = []
    for key in near:
        if key not in node and RULES[key].holds(node[name]):
            return key
    return None


@lru_cache(1_000)
def _near(name: str) -> list[str]:
    """Return the words that are few edits from a name, the nearest first: 1 of 4 letters or more, 2 of 8 or more."""
    found = {word: edits(name, word) for word in _PLAIN}
    near = [word for word in _PLAIN if found[word] <= min(len(word) // 4, 2)]
    return sorted(near, key=found.__getitem__)


def edits(a: str, b: str) -> int:
    """Return the least number of characters that are inserted, deleted, replaced, or swapped with the next one."""
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            least = min(row[-1] + 1, rows[-1][j] + 1, rows[-1][j - 1] + (x != y))
            if i > 1 and b[j - 2 : j] == x + a[i - 2]:
                least = min(least, rows[-2][j - 2] + 1)
            row.append(least)
        rows.append(row)
    return rows[-1][-1]
