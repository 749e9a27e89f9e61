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
DIGITS = 10_000                                     # of the quotient of two numbers


def read_json(text: str, *, exact: bool = False) -> Any:
    """Return the value of a JSON text; with `exact`, numbers with a fraction or exponent are Decimal.

    Raises ValueError if the text is not JSON, repeats a name in an object, has a number that no double is near, or is
    nested too deep.
    """
    try:
        number = Decimal if exact else _float
        return json.loads(text, object_pairs_hook=_object, parse_constant=_float, parse_float=number)
    except RecursionError:
        raise ValueError("the text is nested too deep to be read") from None


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(members)
    if len(value) < len(members):
        name = next(name for i, (name, _) in enumerate(members) if name in dict(members[:i]))
        raise ValueError(f"the text has the name {shown(name)} twice in one object")
    return value


def _float(number: str) -> float:
    if not math.isfinite(float(number)):
        raise ValueError(f"the text has {shown(number, 40)}, which is no number in the range of doubles")
    return float(number)


def failure(schema: Any, registry: Any, text: str) -> str:
    """Return the place and keyword of a schema (with exact numbers) that a text does not satisfy; "" if there is none.

    Raises ValueError if the text is not JSON, or too deep.
    """
    value = read_json(text, exact=True)
    try:
        with localcontext(prec=DIGITS):
            error = best_match(_validator(draft_of(schema))(schema, registry=registry).iter_errors(value))
    except RecursionError:
        raise ValueError("the text is nested too deep for the check against its schema") from None
    return f"#{''.join(map(pointer, list(error.absolute_schema_path)[:-1]))}, {error.validator!r}" if error else ""


@lru_cache(8)
def _validator(draft: int) -> Any:
    """Return jsonschema's validator of a draft with our numbers, patterns and formats."""
    official = getattr(validators, f"{DRAFTS[draft]}Validator")

    def is_whole(checker: Any, value: Any) -> bool:
        return is_number(value) and (draft > 4 or isinstance(value, int)) and value == int(value)

    known = {
        "pattern": _pattern, "format": _format, "patternProperties": _pattern_properties,
        "additionalProperties": partial(_rest, {"properties", "patternProperties"}),
        "unevaluatedProperties": partial(_rest, KEYWORDS - {"unevaluatedProperties"}),
    }  # fmt: skip
    return validators.extend(official, known, type_checker=official.TYPE_CHECKER.redefine("integer", is_whole))


def _format(validator: Any, name: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    language = None if name == "regex" else format_language(name)
    if isinstance(value, str) and not (_is_regex(value) if name == "regex" else language is None or value in language):
        yield ValidationError("")


def _is_regex(text: str) -> bool:
    try:
        found(text)
    except ValueError:
        return False
    return not text.startswith("(?i)")              # our extension


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(value, "string") and value not in matcher(pattern):
        yield ValidationError("")


def _pattern_properties(validator: Any, given: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    for pattern, part in given.items() if validator.is_type(value, "object") else ():
        for name in value:
            if name in found(pattern):
                yield from validator.descend(value[name], part, path=name, schema_path=pattern)


def _rest(keys: Container[str], validator: Any, given: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    """Check the members that some other keywords do not evaluate."""
    if validator.is_type(value, "object"):
        evaluated = _evaluated(validator, value, {key: schema[key] for key in schema if key in keys})
        for name in sorted(value.keys() - evaluated):
            yield from validator.descend(value[name], given, path=name)


def _evaluated(validator: Any, value: dict[str, Any], schema: Any) -> set[str]:
    """Return the names of the members that a schema evaluates in an object that is an instance of it."""
    if isinstance(schema, bool):
        return set()
    if schema.keys() & {"additionalProperties", "unevaluatedProperties"}:
        return set(value)
    named = schema.get("properties", {})
    patterns = schema.get("patternProperties", {})
    names = {name for name in value if name in named or any(name in found(pattern) for pattern in patterns)}
    for key in schema.keys() & {"$ref", "$dynamicRef", "$recursiveRef"} & validator.VALIDATORS.keys():
        target = lookup(validator._resolver, schema[key], "#", key)
        names |= _evaluated(validator.evolve(schema=target.contents, _resolver=target.resolver), value, target.contents)
    parts = [part for key in ("allOf", "anyOf", "oneOf") for part in schema.get(key, ())]
    parts += [part for name, part in schema.get("dependentSchemas", {}).items() if name in value]
    if "if" in schema:
        parts += [schema["if"], schema.get("else" if [*validator.descend(value, schema["if"])] else "then", True)]
    valid = (part for part in parts if not [*validator.descend(value, part)])
    return names.union(*(_evaluated(validator, value, part) for part in valid))
