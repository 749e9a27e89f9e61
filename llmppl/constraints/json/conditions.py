"""Conditions: the keywords of a JSON schema that masks cannot enforce, checked on the finished text.

A mask tells which tokens may follow. It cannot tell whether two elements of an array will be equal, or how many of two
schemas the whole text will satisfy. `weaker` therefore removes such a keyword from the schema for the masks, which adds
instances and loses none. `Condition` checks the value of a finished text against the whole schema with the package
jsonschema. Keywords inside `not`, `if` and the like are removed with their parent: removed alone, they could lose
instances.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from functools import partial
from typing import Any

from llmppl.constraints.automata.formats import JSON_FORMATS
from llmppl.constraints.json.checks import KEYWORDS, parts, places, target

__all__ = ["Condition", "in_doubles", "known", "looser", "weaker", "with_leap_years"]

UNMASKED = frozenset(                               # by llguidance, at any place
    "not if then else uniqueItems contains minContains maxContains propertyNames unevaluatedItems "
    "unevaluatedProperties dependencies dependentRequired dependentSchemas".split()
)
COUNTS = "minProperties", "maxProperties"           # masked if all named properties are required
BOUNDS = "maxLength", "maxItems"                    # automata have a state for each number up to the bound
LOOSE = math.inf, math.inf, 1000, 100, 10           # largest kept bounds, tried in this order
NAMES = "patternProperties", "additionalProperties"         # without the first, the second would forbid more
LOOK = re.compile(r"\(\?<?[=!]")                    # look-around, in a pattern
MAX_CALLS = 250_000                                 # keywords read for one text, some ten seconds
NUMERIC = frozenset("enum const minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split())
IN_PLACE = frozenset("allOf anyOf oneOf not if then else dependencies dependentSchemas".split())   # of the same value
DATES = {"date", "date-time"}
DYNAMIC = "$dynamicRef", "$recursiveRef"

Found = Mapping[str, Any]                           # pattern -> container of the texts in which it is found


def known(schema: Any, is_format: Callable[[str], bool]) -> tuple[Any, list[str]]:
    """Return the schema without unknown formats and dynamic references, and the places of the removed keywords."""
    return _without(schema, lambda node, key: key in DYNAMIC or (key == "format" and not is_format(str(node[key]))))


def weaker(schema: Any) -> Iterator[tuple[Any, list[str], dict[str, bool]]]:
    """Yield weaker and weaker schemas, each with the removed keywords and the options of llguidance.

    The first lacks the keywords that no mask enforces. The second reads `oneOf` as `anyOf`, and counts it as removed.
    The third also lacks numbers of properties. The fourth also lacks names by patterns, and patterns that look around.
    """
    for level, weak, left_out in _each(schema, [partial(_is_left_out, level) for level in range(4)]):
        yield weak, left_out, {"coerce_one_of": True} if level else {}


def looser(schema: Any) -> Iterator[tuple[Any, list[str]]]:
    """Yield schemas with fewer and fewer bounds and the removed keywords: an automaton has states for each number."""
    tests = [partial(_is_loose, COUNTS if i else (), most) for i, most in enumerate(LOOSE)]
    yield from ((weak, left_out) for _, weak, left_out in _each(schema, tests))


def in_doubles(schema: Any) -> tuple[Any, list[str]]:
    """Return the schema without the numbers beyond 2**53, which llguidance rounds, and the places of their keywords."""
    return _without(schema, lambda node, key: key in NUMERIC and not _is_double(node[key]))


def _is_double(value: Any) -> bool:
    if isinstance(value, list | dict):
        return all(map(_is_double, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int | float) or abs(value) <= 1 << 53


def with_leap_years(schema: Any) -> Any:
    """Return the schema with a pattern added to formats with a date, because llguidance admits 2023-02-29."""
    if not isinstance(schema, dict) or not DATES.intersection(_values(schema, "format")):
        return schema
    copied = copy.deepcopy(schema)
    for node in _nodes(copied):
        if node.get("format") in DATES:
            dates = {"pattern": f"^{JSON_FORMATS[node['format']]}$"}
            node["allOf"] = [*node.get("allOf", ()), dates]
    return copied


def _each(schema: Any, tests: Iterable[Callable[[dict[str, Any], str], bool]]) -> Iterator[tuple[int, Any, list[str]]]:
    """Yield the schema without the keywords that each test selects, and these keywords, if they differ from before."""
    before: list[str] | None = None
    for i, test in enumerate(tests):
        weak, left_out = _without(schema, test)
        if left_out != before:
            yield i, weak, left_out
        before = left_out


def _is_loose(counts: tuple[str, ...], most: float, node: dict[str, Any], key: str) -> bool:
    return key in counts or (key in BOUNDS and node[key] > most)


def _is_left_out(level: int, node: dict[str, Any], key: str) -> bool:
    if key == "pattern":
        return level > 2 and LOOK.search(str(node[key])) is not None
    by_pattern = NAMES if "patternProperties" in node else ()
    return any(key in keys for keys in (UNMASKED, ("oneOf",), COUNTS, by_pattern)[: level + 1])


def _without(schema: Any, leave_out: Callable[[dict[str, Any], str], bool]) -> tuple[Any, list[str]]:
    """Return a copy without the selected keywords, and these with their places. Their contents are not examined."""
    left_out, rest = list[str](), copy.deepcopy(schema)
    todo = [("#", rest)] if isinstance(rest, dict) else []
    for place, node in todo:                        # grows, by the parts that are left
        for key in [key for key in node if leave_out(node, key)]:
            if (key, node[key]) != ("uniqueItems", False):
                left_out.append(f"{place}, {key!r}")
            if key != "oneOf":                      # which stays, to be read as anyOf
                del node[key]
        todo += [(place + way, part) for way, part in parts(node) if way.split("/")[1] in KEYWORDS]
    return rest, left_out


class Condition:
    """Check of a value against a schema, which returns the place and keyword that fails, or "". It pickles.

    Parameters
    ----------
    schema : dict
    meets : callable
        `meets(format, text)` tells whether a text has a format. It raises ValueError for an unknown format.
    find : callable
        `find(patterns)` maps each pattern to the container of texts in which it is found. Unlike `re`, it answers in
        linear time. It raises ValueError for a pattern that it cannot read.

    Raises
    ------
    ImportError
        jsonschema is not installed.
    ValueError
        jsonschema or `find` cannot read the schema; or, in a call, the value takes too many steps.
    """

    def __init__(
        self, schema: Any, meets: Callable[[str, str], bool], find: Callable[[set[str]], Found]
    ) -> None:
        try:
            import jsonschema
            from jsonschema_specifications import REGISTRY
            from referencing.exceptions import Unresolvable
        except ImportError as error:
            raise ImportError(
                "the schema has keywords that jsonschema checks on the finished text: pip install llmppl[json-schema]"
            ) from error
        self._made_from, self._calls = (schema, meets, find), threading.local()
        if (ref := _circle(schema)) is not None:
            raise ValueError(f"JSON schema: the $ref {ref!r} leads nowhere")
        formats = jsonschema.FormatChecker(formats=())
        for name in _values(schema, "format"):
            meets(name, "")
            formats.checks(name)(partial(_has_format, meets, name))
        draft = _reader(schema)
        by_name = [node["patternProperties"] for node in _nodes(schema) if "patternProperties" in node]
        self._found = find({*_values(schema, "pattern"), *itertools.chain(*by_name)})
        own = {"pattern": partial(_pattern, self._found), "uniqueItems": _unique_items, "multipleOf": _multiple_of}
        counted = {key: partial(self._count, read) for key, read in {**draft.VALIDATORS, **own}.items()}
        reader = jsonschema.validators.extend(draft, counted)
        self._reader = partial(reader, registry=REGISTRY, format_checker=formats)
        self._validator = None if by_name else self._reader(schema)
        self._calls.left = MAX_CALLS
        for ref in _values(schema, "$ref"):
            try:
                self._reader(schema).evolve(schema={"$ref": ref}).is_valid(None)
            except Unresolvable:
                raise ValueError(f"JSON schema: the $ref {ref!r} leads nowhere") from None
            except RecursionError:
                raise ValueError(f"JSON schema: the $ref {ref!r} begins a way that is too long") from None

    def __call__(self, value: Any) -> str:
        self._calls.left = MAX_CALLS
        validator = self._validator or self._reader(_named(self._made_from[0], value, self._found))
        error = next(validator.iter_errors(value), None)
        return f"{_place([*error.absolute_schema_path][:-1])}, {error.validator!r}" if error else ""

    def _count(self, read: Callable[..., Any], *given: Any) -> Any:
        """Read a keyword. Raises ValueError if the schema doubles the work with each level, as anyOf of a $ref may."""
        self._calls.left -= 1
        if self._calls.left < 0:
            raise ValueError(f"the schema takes more than {MAX_CALLS:,} keywords to check the text; fewer would work")
        return read(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        return Condition, self._made_from


def _reader(schema: dict[str, Any]) -> Any:
    """Return a class of jsonschema for the draft of a schema, with the keywords of all drafts that masks lack."""
    import jsonschema

    latest, older = jsonschema.Draft202012Validator, jsonschema.Draft7Validator
    draft = jsonschema.validators.validator_for(schema, default=latest)
    try:
        if draft is latest and not draft(draft.META_SCHEMA).is_valid(schema):
            draft = older                           # which allows arrays as `items`, for example
        draft.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"JSON schema at {_place(error.absolute_path)}: {error.message}") from None
    except RecursionError:
        raise ValueError("the schema, or a pattern in it, is nested too deep for the package jsonschema") from None
    readers = {**older.VALIDATORS, **latest.VALIDATORS}
    own = {key: readers[key] for key in UNMASKED & readers.keys() - draft.VALIDATORS.keys()}
    if schema.get("x-guidance", {}).get("coerce_one_of"):
        own["oneOf"] = readers["anyOf"]
    return jsonschema.validators.extend(draft, own)


def _named(schema: Any, value: Any, found: Found) -> Any:
    """Return the schema with `patternProperties` as `properties` of a value's names: jsonschema has `re` for them."""
    values, named = [value], copy.deepcopy(schema)
    for each in values:                             # grows
        values += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
    names = {name for each in values if isinstance(each, dict) for name in each}
    for node in _nodes(named):
        patterns = node.pop("patternProperties", {})
        fit = {name: [part for pattern, part in patterns.items() if name in found[pattern]] for name in names}
        of_name = {name: {"allOf": parts_} for name, parts_ in fit.items() if parts_}
        if of_name:                                 # in an allOf, because a $ref may point to an existing property
            node["properties"] = dict.fromkeys(of_name, True) | node.get("properties", {})
            node["allOf"] = [*node.get("allOf", ()), {"properties": of_name}]
    return named


def _pattern(found: Found, validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if validator.is_type(value, "string") and value not in found[pattern]:
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _unique_items(validator: Any, is_wanted: bool, value: Any, schema: Any) -> Iterator[Any]:
    """Yield an error for equal items, in time linear in the items; jsonschema compares all pairs."""
    from jsonschema import ValidationError

    if is_wanted and validator.is_type(value, "array") and len(set(map(_hashable, value))) < len(value):
        yield ValidationError(f"{value!r} has non-unique elements")


def _hashable(value: Any) -> Any:
    """Return a key that is equal for equal JSON values: 1 is 1.0 and not true, and members have no order."""
    if isinstance(value, dict):
        return "object", frozenset((name, _hashable(each)) for name, each in value.items())
    return ("array", *map(_hashable, value)) if isinstance(value, list) else (isinstance(value, bool), value)


def _has_format(meets: Callable[[str, str], bool], name: str, value: object) -> bool:
    return not isinstance(value, str) or meets(name, value)


def _multiple_of(validator: Any, divisor: float, value: Any, schema: Any) -> Iterator[Any]:
    """Yield an error unless the decimal as written is a multiple; as floats, 0.3 is no multiple of 0.1."""
    from jsonschema import ValidationError

    if validator.is_type(value, "number") and math.isfinite(value) and Fraction(str(value)) % Fraction(str(divisor)):
        yield ValidationError(f"{value} is not a multiple of {divisor}")


def _values(schema: dict[str, Any], keyword: str) -> list[str]:
    """Return the texts that a keyword has anywhere in a schema."""
    return sorted({node[keyword] for node in _nodes(schema) if isinstance(node.get(keyword), str)})


def _nodes(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a schema and all schemas inside it."""
    return [node for _, node in places(schema)]


def _circle(schema: dict[str, Any]) -> str | None:
    """Return a `$ref` that leads back to itself with the same value, or None; reading it would not end."""
    done, open_ = set[int](), dict[int, str]()          # by id; nodes under way, with the last `$ref` before each
    todo: list[tuple[dict[str, Any], str, bool]] = [(node, "", False) for node in _nodes(schema)]
    while todo:
        node, ref, is_left = todo.pop()
        if is_left:
            del open_[id(node)]
            done.add(id(node))
        elif id(node) in open_:
            return ref
        elif id(node) not in done:
            open_[id(node)] = ref
            todo.append((node, ref, True))
            inner = [part for way, part in parts(node) if way.split("/")[1] in IN_PLACE]
            todo += [(part, ref, False) for part in inner]
            aim = target(schema, node.get("$ref"))
            if isinstance(aim, dict):
                todo.append((aim, node["$ref"], False))
    return None


def _place(path: Any) -> str:
    return "#" + "".join(f"/{step}" for step in path)
