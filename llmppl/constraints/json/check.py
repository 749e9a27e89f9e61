"""Check of a finished JSON text: jsonschema, with exact numbers, our patterns and our formats.

Numbers are compared as written (99.99 is 99.99, 1.0 is 1). Patterns are those of ECMA-262, as in masks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterator
from decimal import Decimal, localcontext
from functools import lru_cache, partial
from typing import Any

from jsonschema import ValidationError, validators
from jsonschema.exceptions import best_match

from llmppl.constraints.automata.formats import format_language
from llmppl.constraints.json.ecma import found, matcher
from llmppl.constraints.json.keywords import KEYWORDS, pointer
from llmppl.constraints.json.references import draft_of, lookup
from llmppl.constraints.json.shapes import is_number
from llmppl.support.arguments import shown

DRAFTS = {4: "Draft4", 6: "Draft6", 7: "Draft7", 2019: "Draft201909", 2020: "Draft202012"}
DIGITS = 10_000  # of the quotient of two numbers


def read_json(text: str, *, exact: bool = False) -> Any:
    """Return the value of a JSON text; with `exact`, numbers with a fraction or exponent are Decimal.

    Raises ValueError if the text is not JSON, repeats a name in an object, has a number that no double is near, or is
    nested too deep.
    """
    number = Decimal if exact else _float
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_float, parse_float=number
        )
    except RecursionError:
        raise ValueError("the text is nested too deep to be read") from None


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict[str, Any]()
    for name, each in members:
        if name in value:
            raise ValueError(f"the text has the name {shown(name)} twice in one object")
        value[name] = each
    return value


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(
            f"the text has {shown(text, 40)}, which is no number in the range of doubles"
        )
    return number


def failure(schema: Any, registry: Any, text: str) -> str:
    """Return the place and keyword of a schema (with exact numbers) that a text does not satisfy; "" if there is none.

    Raises ValueError if the text is not JSON, or too deep.
    """
    value = read_json(text, exact=True)
    validator = _validator(draft_of(schema))(schema, registry=registry)
    try:
        with localcontext(prec=DIGITS):
            error = best_match(validator.iter_errors(value))
    except RecursionError:
        raise ValueError("the text is nested too deep for the check against its schema") from None
    if error is None:
        return ""
    *steps, _ = error.absolute_schema_path
    return f"#{''.join(map(pointer, steps))}, {error.validator!r}"


@lru_cache(8)
def _validator(draft: int) -> Any:
    """Return jsonschema's validator of a draft with our numbers, patterns and formats."""
    official = getattr(validators, f"{DRAFTS[draft]}Validator")

    def is_whole(checker: Any, value: Any) -> bool:
        return is_number(value) and (draft > 4 or isinstance(value, int)) and value == int(value)

    known = {
        "pattern": _pattern,
        "format": _format,
        "patternProperties": _pattern_properties,
        "additionalProperties": partial(_rest, {"properties", "patternProperties"}),
        "unevaluatedProperties": partial(_rest, KEYWORDS - {"unevaluatedProperties"}),
    }
    types = official.TYPE_CHECKER.redefine("integer", is_whole)
    return validators.extend(official, known, type_checker=types)


def _format(validator: Any, name: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(value, str) and not _has_format(value, name):
        yield ValidationError("")


def _has_format(text: str, name: str) -> bool:
    if name != "regex":
        language = format_language(name)
        return language is None or text in language
    try:
        found(text)
    except ValueError:
        return False
    return not text.startswith("(?i)")  # our extension


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(value, str) and value not in matcher(pattern):
        yield ValidationError("")


def _pattern_properties(
    validator: Any, given: Any, value: Any, schema: Any
) -> Iterator[ValidationError]:
    if not isinstance(value, dict):
        return
    for pattern, part in given.items():
        for name in value:
            if name in found(pattern):
                yield from validator.descend(value[name], part, path=name, schema_path=pattern)


def _rest(
    keys: Container[str], validator: Any, given: Any, value: Any, schema: Any
) -> Iterator[ValidationError]:
    """Check the members that some other keywords do not evaluate."""
    if isinstance(value, dict):
        others = {key: schema[key] for key in schema if key in keys}
        evaluated = _evaluated(validator, value, others)
        for name in sorted(value.keys() - evaluated):
            yield from validator.descend(value[name], given, path=name)


def _evaluated(validator: Any, value: dict[str, Any], schema: Any) -> set[str]:
    """Return the names of the members that a schema evaluates in an object that is an instance of it."""
    if isinstance(schema, bool):
        return set()
    if schema.keys() & {"additionalProperties", "unevaluatedProperties"}:
        return set(value)
    names = {name for name in value if _is_named(name, schema)}
    for key in (
        schema.keys() & {"$ref", "$dynamicRef", "$recursiveRef"} & validator.VALIDATORS.keys()
    ):
        target = lookup(validator._resolver, schema[key], "#", key)
        inside = validator.evolve(schema=target.contents, _resolver=target.resolver)
        names |= _evaluated(inside, value, target.contents)
    for part in _applied(validator, value, schema):
        if _is_valid(validator, value, part):
            names |= _evaluated(validator, value, part)
    return names


def _is_named(name: str, schema: Any) -> bool:
    patterns = schema.get("patternProperties", {})
    return name in schema.get("properties", {}) or any(
        name in found(pattern) for pattern in patterns
    )


def _is_valid(validator: Any, value: Any, schema: Any) -> bool:
    return not any(True for _ in validator.descend(value, schema))


def _applied(validator: Any, value: dict[str, Any], schema: Any) -> Iterator[Any]:
    """Yield the schemas inside a schema that apply to the same object."""
    for key in ("allOf", "anyOf", "oneOf"):
        yield from schema.get(key, ())
    for name, part in schema.get("dependentSchemas", {}).items():
        if name in value:
            yield part
    if "if" in schema:
        yield schema["if"]
        way = "then" if _is_valid(validator, value, schema["if"]) else "else"
        yield schema.get(way, True)
