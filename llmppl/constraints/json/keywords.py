"""Keywords of JSON Schema, of all drafts: the values that each may have, and names that look like misspelt ones.

A *place* is a JSON pointer into the schema, such as `#/properties/a`. Values of `enum`, `const`, `default`, `examples`
and of unknown names are no schemas, and are not examined.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from typing import Any

from llmppl.support.arguments import shown

__all__ = ["KEYWORDS", "NOTES", "TYPES", "check_keywords", "check_node", "misspelt", "pointer", "subschemas"]

TYPES = "string", "number", "integer", "boolean", "object", "array", "null"
IN_PLACE = "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies", "extends"
DEFINITIONS = "$defs", "definitions"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_schema(value: Any) -> bool:
    return isinstance(value, bool | dict)


def _is_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_type(value: Any) -> bool:
    if isinstance(value, str):
        return value in (*TYPES, "any")
    return isinstance(value, list) and bool(value) and all(
        isinstance(each, dict) or (isinstance(each, str) and _is_type(each)) for each in value
    )


def _members(is_member: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_member, value.values()))


Rule = tuple[Callable[[Any], bool], str]            # test of a value, and the words for what it should be
TEXT: Rule = lambda value: isinstance(value, str), "a string"
NUMBER: Rule = _is_number, "a finite number"
COUNT: Rule = _is_count, "a whole number, 0 or more"
SCHEMA: Rule = _is_schema, "a schema: an object or a boolean"
SCHEMAS: Rule = _is_schemas, "a list of schemas, at least one"
NAMED: Rule = _members(_is_schema), "an object of schemas by name"
LIMIT: Rule = lambda value: isinstance(value, bool) or _is_number(value), "a finite number"


def _is_dependency(value: Any) -> bool:
    return _is_schema(value) or isinstance(value, str) or _is_names(value)


_RULES: dict[Rule, str] = {
    SCHEMA: "not if then else additionalItems unevaluatedItems contains additionalProperties unevaluatedProperties "
            "propertyNames",
    SCHEMAS: "allOf anyOf oneOf",
    (lambda value: value == [] or _is_schemas(value), "a list of schemas"): "prefixItems",
    (lambda value: _is_schema(value) or value == [] or _is_schemas(value), "a schema, or a list of them"):
        "items extends",
    NAMED: "properties patternProperties dependentSchemas",
    (lambda value: isinstance(value, dict), "an object of schemas by name"): "$defs definitions",
    (_members(_is_names), "an object of lists of names"): "dependentRequired",
    (_members(_is_dependency), "an object of schemas, or lists of names"): "dependencies",
    (lambda value: isinstance(value, bool) or _is_names(value), "a list of names"): "required",
    (_is_type, f"one of {', '.join(TYPES)}, or a list of some of them"): "type disallow",
    (lambda value: isinstance(value, list), "a list of values"): "enum",
    (lambda value: True, "any value"): "const",
    TEXT: "$ref $dynamicRef $recursiveRef $schema $id id $anchor $dynamicAnchor format pattern",
    NUMBER: "minimum maximum",
    LIMIT: "exclusiveMinimum exclusiveMaximum",
    (lambda value: _is_number(value) and value > 0, "a number above 0"): "multipleOf divisibleBy",
    COUNT: "minLength maxLength minItems maxItems minProperties maxProperties minContains maxContains",
    (lambda value: isinstance(value, bool), "true or false"): "uniqueItems",
}  # fmt: skip
RULES = {key: rule for rule, keys in _RULES.items() for key in keys.split()}
_OLD = {"extends", "disallow", "divisibleBy"}       # of draft 3
_IDENTIFIERS = {"$schema", "$id", "id", "$anchor", "$dynamicAnchor"}
KEYWORDS = frozenset(RULES.keys() - _IDENTIFIERS)   # that restrict instances, or hold schemas
NOTES = _IDENTIFIERS | frozenset(                   # annotations, including OpenAPI's
    "$comment $vocabulary $recursiveAnchor title description default examples example deprecated readOnly writeOnly "
    "contentEncoding contentMediaType contentSchema nullable discriminator xml externalDocs x-guidance".split()
)


def pointer(step: object) -> str:
    """Return one step of a JSON pointer."""
    return "/" + str(step).replace("~", "~0").replace("/", "~1")


def subschemas(node: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield (keyword, place, schema) of the schemas directly inside a schema; place begins at this schema."""
    for key, value in node.items():
        if key not in KEYWORDS or key in ("enum", "const"):
            continue
        inner: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) and not _is_single(key) else ()
        inner = enumerate(value) if isinstance(value, list) else inner
        if isinstance(value, bool | dict) and _is_single(key):
            yield key, f"/{key}", value
        for step, part in inner:
            if isinstance(part, bool | dict):
                yield key, f"/{key}{pointer(step)}", part


def _is_single(key: str) -> bool:
    return RULES[key] is SCHEMA or key in ("items", "extends", "disallow", "type")


def check_keywords(schema: Any, at: str = "") -> None:
    """Check the value of each keyword, in time linear in the schema. Raises ValueError for the first wrong one."""
    if not _is_schema(schema):
        raise ValueError(f"a JSON schema is an object or a boolean, not {shown(schema)}")
    todo = [(f"{at}#", schema)]
    while todo:
        place, node = todo.pop()
        if isinstance(node, dict):
            check_node(place, node)
            todo += [(place + way, part) for _, way, part in subschemas(node)]


def check_node(place: str, node: dict[str, Any]) -> None:
    """Check the values of one schema's own keywords. Raises ValueError for the first wrong one."""
    for key, value in node.items():
        rule = RULES.get(key)
        if rule and not rule[0](value):
            raise ValueError(
                f"JSON schema at {place}, {key!r}: {_shown(value)} should be {rule[1]}{_type_near(key, value)}"
            )


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        text = repr(type(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _type_near(key: str, value: Any) -> str:
    words = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]
    near = [difflib.get_close_matches(each, TYPES, 1) for each in words if key == "type" and each not in TYPES]
    return f"; did you mean {near[0][0]!r}?" if near and near[0] else ""


def misspelt(schema: Any) -> str | None:
    """Return a message about the first name that is almost surely a misspelt keyword; None if there is none.

    JSON Schema ignores unknown names. This reports a name one edit from a keyword, with a value that the keyword
    could have, and a schema without any keyword.
    """
    if not isinstance(schema, dict):
        return None
    if schema and not any(key in KEYWORDS or key in NOTES or key[:1] in "$" or _meant(key, schema) for key in schema):
        names = ", ".join(map(repr, list(schema)[:3]))
        return f'# has no keyword, so that any JSON would do: are {names} properties? {{"properties": {{...}}}}'
    todo = [("#", schema)]
    for place, node in todo:                        # grows
        for key in node:
            if key not in KEYWORDS and key not in NOTES and (meant := _meant(key, node)):
                return f"{place}: {key!r} is no keyword: did you mean {meant!r}?"
        todo += [(place + way, part) for _, way, part in subschemas(node) if isinstance(part, dict)]
    return None


_PLAIN = {key.lower(): key for key in sorted(KEYWORDS - _OLD) if not key.startswith("$")}
SHORT = 6                                           # letters: shorter keywords are near to many words


def _meant(name: str, node: dict[str, Any]) -> str | None:
    """Return the keyword that another name of a schema probably means; None if none is near."""
    if not name[:1].isalpha() or name.lower().startswith("x-"):         # the marks of extensions
        return None
    plain = name.replace("_", "").replace("-", "").lower()
    near = [word for word in difflib.get_close_matches(plain, _PLAIN, 3, 0.7) if _is_near(plain, word)]
    fits = [_PLAIN[word] for word in near if _PLAIN[word] not in node and RULES[_PLAIN[word]][0](node[name])]
    return fits[0] if fits else None


def _is_near(name: str, word: str) -> bool:
    """Return whether two letters swapped, or one inserted, left out or replaced in a longer word, makes the keyword."""
    if abs(len(name) - len(word)) > 1 or len(name) < 4:
        return name == word
    start = next((i for i, (x, y) in enumerate(zip(name, word, strict=False)) if x != y), min(len(name), len(word)))
    a, b = name[start:], word[start:]
    if a == b or b == a[1:2] + a[:1] + a[2:]:
        return True
    return len(word) >= SHORT and (b == a[1:] or b[1:] == a[1:] or b[1:] == a)
