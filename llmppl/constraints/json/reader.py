"""Reader: from JSON schemas, drafts 3 to 2020-12, to shapes.

A keyword that no shape holds is *left out*: the shape then has more values than the schema, and the keyword is checked
on the finished text. Places are JSON pointers, after the URI of the document if it is not the root.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

from llmppl.constraints.automata.json_formats import format_language
from llmppl.constraints.json.ecma import found
from llmppl.constraints.json.numbers import numbers
from llmppl.constraints.json.references import DRAFTS, draft_of, lookup, registry_of, resolver_of, specification_of
from llmppl.constraints.json.shapes import (
    ANY,
    EVERY,
    NEVER,
    NONE,
    TYPES,
    Array,
    Busy,
    Choice,
    Constants,
    Contains,
    Inexact,
    Language,
    Lazy,
    Number,
    Object,
    Others,
    Shape,
    String,
    both,
    choice,
    exact,
    intersect,
    negate,
    negate_part,
    of_type,
    values_of,
)

__all__ = ["Place", "Reader", "in_order"]

MAX_VALUES = 64                                     # that an array without repetition remembers
MAX_PAIRS = 2_000                                   # of options of a oneOf that are compared
MAX_OVERLAPS = 6                                    # options of a oneOf that overlap
MAX_COUNTED = 16                                    # of minContains
MAX_SCHEMAS = 6                                     # of dependentSchemas
STRINGS = "minLength", "maxLength", "pattern", "format"
NUMBERS = "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "divisibleBy"
ARRAYS = (
    "items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems", "contains",
)  # fmt: skip
OBJECTS = (
    "properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "required", "propertyNames",
    "minProperties", "maxProperties", "dependentRequired", "dependencies",
)  # fmt: skip
OWN = {"type", *STRINGS, *NUMBERS, *ARRAYS, *OBJECTS}
CONDITIONAL = "anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"


class Place(NamedTuple):
    """Place of a schema: its JSON pointer, the resolver of its references, and the year of its draft (3 to 7: number)."""

    pointer: str
    resolver: Any
    draft: int

    def at(self, *steps: object) -> Place:
        way = "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)
        return self._replace(pointer=self.pointer + way)


class Reader:
    """Reader of one schema and of those that it refers to.

    `left_out` and `notes` grow while shapes are read: keywords that are checked on the finished text, and remarks.
    """

    def __init__(self, is_live: Callable[[Lazy], bool]) -> None:
        self.left_out: dict[str, None] = {}
        self.notes: dict[str, None] = {}
        self._is_live = is_live
        self._lazies: dict[Any, tuple[Any, Lazy]] = {}
        self._inexact = 0                           # times that a shape was read as more than its schema

    def lazy(self, schema: Any, place: Place) -> Lazy:
        """Return the shape of a schema, which is read on first use."""
        if isinstance(schema, bool):
            return EVERY if schema else NONE
        key = id(schema), _scope(place)
        known = self._lazies.get(key)
        if known is None:
            known = self._lazies[key] = schema, Lazy(lambda: self._read_apart(schema, place), self._weakened)
        return known[1]

    def part(self, schema: Any, place: Place, *steps: object) -> Lazy:
        """Return the shape of a schema inside the schema at a place."""
        return self.lazy(schema, _inside(schema, place.at(*steps)))

    def read_all(self) -> None:
        """Read every schema that the ones read so far refer to."""
        done = 0
        while done < len(self._lazies):
            for _, lazy in itertools.islice([*self._lazies.values()], done, None):
                done += 1
                _parts_of(lazy.shape)

    def _read_apart(self, schema: Any, place: Place) -> tuple[Shape, bool]:
        before = self._inexact
        shape = self.read(schema, place)
        is_exact, self._inexact = self._inexact == before, before
        return shape, is_exact

    def _leave_out(self, place: Place, keyword: str) -> None:
        self._inexact += 1
        self.left_out[f"{place.pointer}, {keyword!r}"] = None

    def _weakened(self) -> None:
        self.left_out["#, 'allOf' (an intersection of too many alternatives)"] = None

    def _part(self, lazy: Lazy) -> Shape:
        """Return the shape of a part, and note if it is inexact."""
        shape = lazy.shape
        self._inexact += not lazy.exact
        return shape

    # ---- in place

    def read(self, schema: Any, place: Place) -> Shape:
        """Return the shape of a schema."""
        if isinstance(schema, bool):
            return ANY if schema else NEVER
        if "$ref" in schema and place.draft <= 7:
            return self._reference(schema["$ref"], "$ref", place)
        shape: Shape = ANY
        own_at = next((key for key in ("properties", "items", "prefixItems") if key in schema), None)
        own_at = own_at or next((key for key in schema if key in OWN), None)
        for key, value in schema.items():
            try:
                if key == own_at:
                    shape = intersect(shape, self._own(schema, place))
                shape = intersect(shape, self._applied(key, value, schema, place))
            except Inexact:
                self._leave_out(place, key)
        return shape

    def _applied(self, key: str, value: Any, schema: Any, place: Place) -> Shape:
        """Return the shape of one keyword that applies schemas in place, or lists values."""
        whole: Shape = ANY
        match key:
            case "const" if place.draft >= 6:
                return Constants((value,))
            case "enum":
                return Constants(tuple(value)) if value else NEVER
            case "$ref" | "$dynamicRef" | "$recursiveRef":
                return self._reference(value, key, place)
            case "allOf":
                return reduce(intersect, (self._in_place(part, place, key, i) for i, part in enumerate(value)), whole)
            case "anyOf":
                return choice(self._in_place(part, place, key, i) for i, part in enumerate(value))
            case "oneOf":
                return self._one_of(value, place)
            case "not":
                return self._unless(value, place, "not")
            case "if" if place.draft >= 7 and schema.keys() & {"then", "else"}:
                return self._conditional(schema, place)
            case "dependentSchemas" | "dependencies":
                return self._dependent_schemas(key, value, place)
        return ANY

    def _in_place(self, part: Any, place: Place, *steps: object) -> Shape:
        return self._part(self.part(part, place, *steps))

    def _reference(self, name: str, keyword: str, place: Place) -> Shape:
        schema, inside = _target(name, keyword, place)
        hops = 0
        while isinstance(schema, dict) and len(schema) == 1 and "$ref" in schema:
            schema, inside = _target(schema["$ref"], "$ref", inside)
            hops += 1
            if hops > 10_000:
                raise ValueError(f"JSON schema at {place.pointer}, {keyword!r}: {name!r} leads back to itself")
        try:
            return self._part(self.lazy(schema, inside))
        except Busy:
            raise ValueError(
                f"JSON schema at {place.pointer}, {keyword!r}: {name!r} leads back to itself without an object or array "
                f"between; a reference inside properties or items would work"
            ) from None

    def _unless(self, schema: Any, place: Place, keyword: str) -> Shape:
        """Return the values that are no instances of a schema, or any if no shape holds these."""
        before = self._inexact
        try:
            shape = self._in_place(schema, place, keyword)
            if self._inexact > before:
                raise Inexact
            return negate(shape)
        except Inexact:
            self._leave_out(place, keyword)
            return ANY

    def _conditional(self, schema: Any, place: Place) -> Shape:
        then, other = (schema.get(key, True) for key in ("then", "else"))
        condition, unless = self._in_place(schema["if"], place, "if"), self._unless(schema["if"], place, "if")
        return choice([
            intersect(condition, self._in_place(then, place, "then")),
            intersect(unless, self._in_place(other, place, "else")),
        ])  # fmt: skip

    def _one_of(self, options: list[Any], place: Place) -> Shape:
        """Return the values of exactly one of the options: of any, if no two have a common value."""
        lazies = [self.part(option, place, "oneOf", i) for i, option in enumerate(options)]
        shapes = list(map(self._part, lazies))
        pairs = list(itertools.combinations(range(len(shapes)), 2))
        overlaps = set(pairs)
        if len(pairs) <= MAX_PAIRS:
            overlaps = {(i, j) for i, j in pairs if self._may_meet(lazies[i], lazies[j])}
        if not overlaps:
            return choice(shapes)
        met = {i for pair in overlaps for i in pair}
        try:
            if len(met) > MAX_OVERLAPS or not all(lazies[i].exact for i in met):
                raise Inexact
            without = {i: negate(shapes[i]) for i in met}
            return choice(
                reduce(intersect, (without[j] for j in met if {(i, j), (j, i)} & overlaps), shape)
                for i, shape in enumerate(shapes)
            )
        except Inexact:
            self._leave_out(place, "oneOf")
            return choice(shapes)

    def _may_meet(self, a: Lazy, b: Lazy) -> bool:
        try:
            return self._is_live(both(a, b))
        except ValueError:                          # too large to tell
            return True

    def _dependent_schemas(self, key: str, dependents: dict[str, Any], place: Place) -> Shape:
        some = {name: part for name, part in dependents.items() if isinstance(part, dict | bool)}
        if len(some) > MAX_SCHEMAS:
            self._leave_out(place, key)
            return ANY
        whole: Shape = ANY
        for name, part in some.items():
            present = intersect(Object({}, required=(name,)), self._in_place(part, place, key, name))
            whole = intersect(whole, choice([*of_type(Object), Object({name: NONE}), present]))
        return whole

    # ---- keywords of a type

    def _own(self, schema: Any, place: Place) -> Shape:
        """Return the shape of the type and of the keywords for values of one type."""
        kinds = schema.get("type", list(TYPES))
        kinds = [kinds] if isinstance(kinds, str | dict) else kinds
        if "number" in kinds:
            kinds = [kind for kind in kinds if kind != "integer"]
        return choice(self._of_type(kind, schema, place) for kind in kinds)

    def _of_type(self, kind: Any, schema: Any, place: Place) -> Shape:
        if isinstance(kind, dict):                  # draft 3
            return self.read(kind, place)
        match kind:
            case "number" | "integer":
                return self._number(schema, kind == "integer", place)
            case "string":
                return self._string(schema, place)
            case "array":
                return self._array(schema, place)
            case "object":
                return self._object(schema, place)
        return TYPES.get(kind, ANY)

    def _number(self, schema: Any, is_integer: bool, place: Place) -> Shape:
        shape = _number(schema, is_integer)
        if isinstance(shape, Number) and shape.steps:
            try:
                numbers(shape.low, shape.low_in, shape.high, shape.high_in, is_integer, shape.steps)
            except ValueError:                      # too many remainders
                self._leave_out(place, "multipleOf")
                return replace(shape, steps=())
        return shape

    def _string(self, schema: Any, place: Place) -> Shape:
        languages: list[Language] = []
        if "pattern" in schema:
            self._checked(schema["pattern"], place)
            languages.append(("pattern", schema["pattern"], True))
        if "format" in schema:
            if format_language(schema["format"]) is None:
                self.notes[f"{place.pointer}, 'format': {schema['format']!r} is no known format, and is ignored"] = None
            else:
                languages.append(("format", schema["format"], True))
        return String(int(schema.get("minLength", 0)), schema.get("maxLength", math.inf), tuple(languages))

    def _checked(self, pattern: str, place: Place) -> None:
        try:
            found(pattern)
        except ValueError as error:
            raise ValueError(f"JSON schema at {place.pointer}, 'pattern': {error}") from None

    def _array(self, schema: Any, place: Place) -> Shape:
        first, rest, names = schema.get("prefixItems", []), schema.get("items", True), ("prefixItems", "items")
        if place.draft < 2020 or isinstance(rest, list):
            is_list = isinstance(rest, list)
            names = ("items", "additionalItems")
            first, rest = (rest, schema.get("additionalItems", True)) if is_list else ([], rest)
            names = names if is_list else ("", "items")
        items = tuple(self.part(part, place, names[0], i) for i, part in enumerate(first))
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems", math.inf)
        contains = self._contains(schema, place) if "contains" in schema and place.draft >= 6 else ()
        shape = Array(least, most, items, self.part(rest, place, names[1]), bool(schema.get("uniqueItems")), contains)
        if shape.unique and not _is_listed(shape):
            self._leave_out(place, "uniqueItems")
            shape = replace(shape, unique=False)
        if schema.get("unevaluatedItems", True) is not True:
            return self._unevaluated(schema, "unevaluatedItems", shape, place)
        return shape

    def _contains(self, schema: Any, place: Place) -> tuple[Contains, ...]:
        least, most = 1, math.inf
        if place.draft > 7:
            least, most = int(schema.get("minContains", 1)), schema.get("maxContains", math.inf)
        item = self.part(schema["contains"], place, "contains")
        try:
            if most < math.inf:
                negate_part(item)
        except (Inexact, Busy):
            most = math.inf
            self._leave_out(place, "maxContains")
        if least > MAX_COUNTED:
            self._leave_out(place, "minContains")
            least = MAX_COUNTED
        return (Contains(item, least, most),)

    def _object(self, schema: Any, place: Place) -> Shape:
        patterns = tuple(
            (pattern, self.part(part, place, "patternProperties", pattern))
            for pattern, part in schema.get("patternProperties", {}).items()
        )
        for pattern, _ in patterns:
            self._checked(pattern, place.at("patternProperties"))
        named = {}
        for name, part in schema.get("properties", {}).items():
            some = [each for pattern, each in patterns if name in found(pattern)]
            named[name] = both(self.part(part, place, "properties", name), *some)
        required = schema.get("required", ())
        if not isinstance(required, list | tuple):  # draft 3
            required = [name for name, part in schema.get("properties", {}).items() if part.get("required") is True]
        names: Shape = String()
        if "propertyNames" in schema and place.draft >= 6:
            names = intersect(String(), self._in_place(schema["propertyNames"], place, "propertyNames"))
        additional = self.part(schema.get("additionalProperties", True), place, "additionalProperties")
        others = (Others(patterns, additional),) if patterns or additional is not EVERY else ()
        dependents = {
            name: (needed,) if isinstance(needed, str) else tuple(needed)
            for key in ("dependentRequired", "dependencies") for name, needed in schema.get(key, {}).items()
            if isinstance(needed, list | str)
        }  # fmt: skip
        least, most = int(schema.get("minProperties", 0)), schema.get("maxProperties", math.inf)
        shape = Object(named, others, tuple(dict.fromkeys(required)), least, most, names, dependents)
        if schema.get("unevaluatedProperties", True) is not True:
            return self._unevaluated(schema, "unevaluatedProperties", shape, place)
        return shape

    # ---- unevaluated

    def _unevaluated(self, schema: Any, key: str, shape: Array | Object, place: Place) -> Shape:
        """Return a shape with a schema for the parts that no other keyword reads, if these are known without the value."""
        parts = _evaluating(schema, place, set())
        if parts is None:
            self._leave_out(place, key)
            return shape
        rest = self.part(schema[key], place, key)
        if isinstance(shape, Array):
            known = [_evaluated_items(part, schema) for part, _ in parts]
            if math.inf in known:
                return shape
            return intersect(shape, Array(first=(EVERY,) * int(max(known)), rest=rest))
        if any({"additionalProperties", *([key] if part is not schema else [])} & part.keys() for part, _ in parts):
            return shape
        names = {name: EVERY for part, _ in parts for name in part.get("properties", {})}
        patterns = tuple((pattern, EVERY) for part, _ in parts for pattern in part.get("patternProperties", {}))
        return intersect(shape, Object(names, (Others(patterns, rest),)))


def _is_listed(shape: Array) -> bool:
    """Return whether the items of an array are a few listed values."""
    try:
        values = values_of(shape)
    except Busy:
        return False
    return values is not None and len(values) <= MAX_VALUES


def _number(schema: Any, is_integer: bool) -> Shape:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if isinstance(above, bool):                     # draft 4
        above = low if above else None
    if isinstance(below, bool):
        below = high if below else None
    shape: Shape = Number(integer=is_integer)
    for bound in (
        low is not None and Number(low=exact(low)), high is not None and Number(high=exact(high)),
        above is not None and Number(low=exact(above), low_in=False),
        below is not None and Number(high=exact(below), high_in=False),
        *(Number(steps=(abs(exact(schema[key])),)) for key in ("multipleOf", "divisibleBy") if key in schema),
    ):  # fmt: skip
        shape = intersect(shape, bound) if bound else shape
    return shape


def _scope(place: Place) -> Any:
    """Return the part of a place that changes the meaning of a schema in it."""
    if place.draft <= 7:
        return place.draft
    scope = [uri for uri, _ in place.resolver.dynamic_scope()]
    return place.draft, tuple(dict.fromkeys(scope)), tuple(dict.fromkeys(reversed(scope)))


def _inside(schema: Any, place: Place) -> Place:
    """Return the place of a schema inside another one, with the resolver and the draft that it sets itself."""
    if not isinstance(schema, dict):
        return place
    draft, resolver = place.draft, place.resolver
    if "$schema" in schema:
        draft = draft_of(specification_of(schema, DRAFTS[draft]))
    if "$id" in schema or "id" in schema:
        resolver = resolver.in_subresource(DRAFTS[draft].create_resource(schema))
    return Place(place.pointer, resolver, draft)


def _target(name: str, keyword: str, place: Place) -> tuple[Any, Place]:
    """Return the schema that a reference points to, and its place."""
    resolved = lookup(place.resolver, name, place.pointer, keyword)
    schema, pointer = resolved.contents, name if "#" in name else name + "#"
    draft = draft_of(specification_of(schema, DRAFTS[place.draft]))
    return schema, Place(pointer, resolved.resolver, draft)


def _parts_of(shape: Shape) -> None:
    """Read the parts of a shape."""
    todo: list[Shape] = [shape]
    while todo:
        each = todo.pop()
        match each:
            case Choice():
                todo += each.options
            case Array():
                for part in (*each.first, each.rest, *(some.item for some in each.contains)):
                    part.shape  # noqa: B018
            case Object():
                layers = [part for others in each.others for part in (*(p for _, p in others.patterns), others.additional)]
                for part in (*each.properties.values(), *layers):
                    part.shape  # noqa: B018


def _evaluating(schema: Any, place: Place, seen: set[int]) -> list[tuple[Any, Place]] | None:
    """Return the schemas that apply to the same value whatever it is; None if others may apply as well."""
    if isinstance(schema, bool) or id(schema) in seen:
        return []
    seen.add(id(schema))
    if any(key in schema for key in CONDITIONAL) or (place.draft >= 2020 and "contains" in schema):
        return None
    found = [(schema, place)]
    inner: list[tuple[Any, Place]] = [(part, _inside(part, place)) for part in schema.get("allOf", ())]
    if "$ref" in schema:
        inner.append(_target(schema["$ref"], "$ref", place))
    for part, where in inner:
        more = _evaluating(part, where, seen)
        if more is None:
            return None
        found += more
    return found


def _evaluated_items(schema: Any, outer: Any) -> float:
    """Return how many items of an array a schema inside an outer one reads."""
    items = schema.get("items")
    if schema is not outer and "unevaluatedItems" in schema:
        return math.inf
    if isinstance(items, list):
        return math.inf if "additionalItems" in schema else len(items)
    return math.inf if items is not None else len(schema.get("prefixItems", ()))


def in_order(value: Any, schema: Any, root: Any) -> Any:
    """Return a JSON value with the properties of its objects in the order of a schema of `root`."""
    if not isinstance(schema, dict):
        return value
    if isinstance(ref := schema.get("$ref"), str):
        try:
            target = lookup(resolver_of(root, registry_of(root)), ref, "#").contents
        except ValueError:
            target = True
        value = value if target is schema else in_order(value, target, root)
    if isinstance(value, dict):
        named = schema.get("properties", {})
        keys = [key for key in named if key in value] + [key for key in value if key not in named]
        return {key: in_order(value[key], named.get(key), root) for key in keys}
    if isinstance(value, list):
        schemas = itertools.chain(schema.get("prefixItems", ()), itertools.repeat(schema.get("items")))
        return [in_order(each, part, root) for each, part in zip(value, schemas, strict=False)]
    return value
