"""Reader: from JSON schemas, drafts 4 to 2020-12, to shapes.

A keyword that no shape holds is *left out*: the shape then has more values than the schema, and the keyword is checked
on the finished text. Places are JSON pointers, after the URI of the document if it is not the root.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import reduce
from typing import Any, NamedTuple

from llmppl.constraints.automata.formats import format_language
from llmppl.constraints.json.ecma import found
from llmppl.constraints.json.keywords import check_keywords, pointer
from llmppl.constraints.json.objects import classes
from llmppl.constraints.json.references import DRAFTS, draft_of, lookup
from llmppl.constraints.json.scalars import numbers, quoted
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
    intersect,
    negate,
    values_of,
)

__all__ = ["Place", "Reader"]

MAX_VALUES = 64                                     # of the items of an array without repetition
MAX_PAIRS = 2_000                                   # of options of a oneOf that are compared
MAX_OVERLAPS = 6                                    # options of a oneOf that overlap
MAX_DEPENDENT = 6                                   # names that others depend on
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
MAX_HOPS = 1_000                                    # of a $ref to a $ref
OWN = frozenset(                                    # keywords for values of one type
    "type minLength maxLength pattern format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf items "
    "prefixItems additionalItems unevaluatedItems minItems maxItems uniqueItems contains properties patternProperties "
    "additionalProperties unevaluatedProperties required propertyNames minProperties maxProperties".split()
)
IN_PLACE = frozenset("$ref $dynamicRef $recursiveRef allOf anyOf oneOf not if dependentSchemas dependencies".split())


class Place(NamedTuple):
    """Place of a schema: its JSON pointer, the resolver of its references, and its draft: 4, 6, 7, 2019 or 2020."""

    pointer: str
    resolver: Any
    draft: int


class Reader:
    """Reader of one schema and of those that it refers to.

    `left_out` and `notes` grow while shapes are read: keywords that are checked on the finished text, and remarks.
    `places` has the pointers of all shapes that were read.
    """

    def __init__(self, is_live: Callable[[Lazy], bool]) -> None:
        self.left_out: dict[str, None] = {}
        self.notes: dict[str, None] = {}
        self.places: dict[Lazy, str] = {}
        self._is_live = is_live
        self._lazies: dict[Any, tuple[Any, Lazy]] = {}
        self._targets = set[int]()                  # ids of schemas that a reference leads to, whose values are checked
        self._inexact = 0                           # times that a shape was read as more than its schema

    def lazy(self, schema: Any, place: Place) -> Lazy:
        """Return the shape of a schema, which is read on first use."""
        if isinstance(schema, bool):
            return EVERY if schema else NONE
        key = id(schema), _scope(place)
        if key not in self._lazies:
            self._lazies[key] = schema, Lazy(lambda: self._read_apart(schema, place), self._weakened)
            self.places[self._lazies[key][1]] = place.pointer
        return self._lazies[key][1]

    def part(self, schema: Any, place: Place, *steps: object) -> Lazy:
        """Return the shape of a schema inside the schema at a place."""
        draft, resolver = draft_of(schema, place.draft), place.resolver
        if isinstance(schema, dict) and ("$id" in schema or "id" in schema):
            resolver = resolver.in_subresource(DRAFTS[draft].create_resource(schema))
        return self.lazy(schema, Place(place.pointer + "".join(map(pointer, steps)), resolver, draft))

    def read_all(self) -> None:
        """Read every schema that the ones read so far refer to."""
        done = 0
        while done < len(self._lazies):
            for _, lazy in [*self._lazies.values()][done:]:
                done += 1
                for part in _parts_of(lazy.shape):
                    part.shape                      # noqa: B018

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

    def _in_place(self, part: Any, place: Place, *steps: object) -> Shape:
        return self._shape_of(self.part(part, place, *steps))

    def _shape_of(self, lazy: Lazy) -> Shape:
        shape = lazy.shape
        self._inexact += not lazy.exact
        return shape

    # ---- in place

    def read(self, schema: Any, place: Place) -> Shape:
        """Return the shape of a schema."""
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
            case "$ref" | "$dynamicRef" | "$recursiveRef" if key == "$ref" or place.draft > 7:
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
                then, other = (self._in_place(schema.get(key, True), place, key) for key in ("then", "else"))
                condition = intersect(self._in_place(value, place, "if"), then)
                return choice([condition, intersect(self._unless(value, place, "if"), other)])
            case "dependentSchemas" | "dependentRequired" | "dependencies":
                return self._dependent(key, value, place)
        return ANY

    def _reference(self, name: str, keyword: str, place: Place) -> Shape:
        schema, inside, hops = {"$ref": name}, place, 0
        while isinstance(schema, dict) and (hops == 0 or (len(schema) == 1 and "$ref" in schema)):
            found = lookup(inside.resolver, schema["$ref"], inside.pointer, "$ref" if hops else keyword)
            at = schema["$ref"] if "#" in schema["$ref"] else schema["$ref"] + "#"
            schema, hops = found.contents, hops + 1
            inside = Place(at, found.resolver, draft_of(schema, place.draft))
            if hops > MAX_HOPS:
                raise ValueError(f"JSON schema at {place.pointer}, {keyword!r}: {name!r} leads back to itself")
        if id(schema) not in self._targets:         # it may be in a place that held no schema
            check_keywords(schema, inside.pointer.removesuffix("#"))
            self._targets.add(id(schema))
        try:
            return self._shape_of(self.lazy(schema, inside))
        except Busy:
            raise ValueError(
                f"JSON schema at {place.pointer}, {keyword!r}: {name!r} leads back to itself without an object or "
                f"array between; a reference inside properties or items would work"
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

    def _one_of(self, options: list[Any], place: Place) -> Shape:
        """Return the values of exactly one of the options: of any, if no two have a common value."""
        lazies = [self.part(option, place, "oneOf", i) for i, option in enumerate(options)]
        shapes = list(map(self._shape_of, lazies))
        overlaps = list(itertools.combinations(range(len(shapes)), 2))
        if len(overlaps) <= MAX_PAIRS:
            overlaps = [(i, j) for i, j in overlaps if self._may_meet(lazies[i], lazies[j])]
        met = {i for pair in overlaps for i in pair}
        try:
            if len(met) > MAX_OVERLAPS or not all(lazies[i].exact for i in met):
                raise Inexact
            without = {i: negate(shapes[i]) for i in met}
            return choice(
                reduce(intersect, (without[j] for pair in overlaps if i in pair for j in pair if j != i), shape)
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

    def _dependent(self, key: str, dependents: dict[str, Any], place: Place) -> Shape:
        """Return the objects that lack a name, or have it and all that depends on it."""
        if len(dependents) > MAX_DEPENDENT:
            raise Inexact
        whole: Shape = ANY
        others = [shape for shape in TYPES.values() if not isinstance(shape, Object)]
        for name, part in dependents.items():
            if isinstance(part, list):
                present: Shape = Object(required=(name, *part))
            else:
                present = intersect(Object(required=(name,)), self._in_place(part, place, key, name))
            whole = intersect(whole, choice([*others, Object({name: NONE}), present]))
        return whole

    # ---- keywords of a type

    def _own(self, schema: Any, place: Place) -> Shape:
        """Return the shape of the type and of the keywords for values of one type."""
        kinds = schema.get("type", list(TYPES))
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if "number" in kinds:
            kinds = [kind for kind in kinds if kind != "integer"]
        read = {"number": self._number, "integer": self._number, "string": self._string, "array": self._array,
                "object": self._object}             # fmt: skip
        return choice(read[kind](schema, place) if kind in read else TYPES[kind] for kind in kinds)

    def _number(self, schema: Any, place: Place) -> Shape:
        low, high, above, below = map(schema.get, ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
        above = (low if above else None) if isinstance(above, bool) else above          # draft 4
        below = (high if below else None) if isinstance(below, bool) else below
        kinds = schema.get("type", "number")
        shape: Shape = Number(integer="integer" in kinds and "number" not in kinds)
        for bound, more in (
            (low, lambda x: {"low": x}), (above, lambda x: {"low": x, "low_in": False}),
            (high, lambda x: {"high": x}), (below, lambda x: {"high": x, "high_in": False}),
            (schema.get("multipleOf"), lambda x: {"steps": (x,)}),
        ):  # fmt: skip
            shape = shape if bound is None else intersect(shape, Number(**more(Fraction(bound))))
        assert isinstance(shape, Number)
        for keys, weaker in ({"multipleOf"}, dict[str, Any]()), (BOUNDS, {"low": None, "high": None}):
            try:
                numbers(shape.low, shape.low_in, shape.high, shape.high_in, shape.integer, shape.steps)
                break
            except ValueError:                      # too large
                for key in sorted(keys & schema.keys()):
                    self._leave_out(place, key)
                shape = replace(shape, steps=(), **weaker)
        return shape

    def _string(self, schema: Any, place: Place) -> Shape:
        languages: list[Language] = []
        if "pattern" in schema:
            self._check(schema["pattern"], place, "pattern")
            languages.append(("pattern", schema["pattern"], True))
        if "format" in schema:
            if schema["format"] == "regex":
                self._leave_out(place, "format")
            elif format_language(schema["format"]) is None:
                self.notes[f"{place.pointer}, 'format': {schema['format']!r} is no known format, and is ignored"] = None
            else:
                languages.append(("format", schema["format"], True))
        shape = String(int(schema.get("minLength", 0)), schema.get("maxLength", math.inf), tuple(languages))
        try:
            quoted(shape)
        except ValueError:                          # too large
            for key in {"minLength", "maxLength"} & schema.keys():
                self._leave_out(place, key)
            return String(languages=shape.languages)
        return shape

    def _check(self, pattern: str, place: Place, keyword: str) -> None:
        try:
            found(pattern)
        except ValueError as error:
            raise ValueError(f"JSON schema at {place.pointer}, {keyword!r}: {error}") from None

    def _array(self, schema: Any, place: Place) -> Shape:
        first, rest, names = schema.get("prefixItems", []), schema.get("items", True), ("prefixItems", "items")
        if place.draft < 2020 or isinstance(rest, list):
            first, rest, names = [], rest, ("", "items")
            if isinstance(schema.get("items"), list):
                first, rest, names = schema["items"], schema.get("additionalItems", True), ("items", "additionalItems")
        items = tuple(self.part(part, place, names[0], i) for i, part in enumerate(first))
        rest = self.part(self._evaluated(schema, "unevaluatedItems", rest, names[1], place), place, names[1])
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems", math.inf)
        if "contains" in schema and place.draft >= 6:
            self._leave_out(place, "contains")
        shape = Array(least, most, items, rest, bool(schema.get("uniqueItems")))
        if shape.unique and (shape.first or not _is_listed(shape)):
            self._leave_out(place, "uniqueItems")
            shape = replace(shape, unique=False)
        return shape

    def _evaluated(self, schema: Any, key: str, rest: Any, name: str, place: Place) -> Any:
        """Return the schema of the members that no keyword names, if only `rest` and an `unevaluated` keyword apply."""
        if schema.get(key, True) is True or place.draft < 2019 or name in schema:
            return rest
        if IN_PLACE & schema.keys() or (key == "unevaluatedItems" and "contains" in schema):
            self._leave_out(place, key)             # it depends on the value which schemas apply
            return rest
        return schema[key]

    def _object(self, schema: Any, place: Place) -> Shape:
        patterns = tuple(
            (pattern, self.part(part, place, "patternProperties", pattern))
            for pattern, part in schema.get("patternProperties", {}).items()
        )
        for pattern, _ in patterns:
            self._check(pattern, place, "patternProperties")
        named = {}
        for name, part in schema.get("properties", {}).items():
            some = [each for pattern, each in patterns if name in found(pattern)]
            named[name] = both(self.part(part, place, "properties", name), *some)
        names: Shape = String()
        if "propertyNames" in schema and place.draft >= 6:
            names = intersect(String(), self._in_place(schema["propertyNames"], place, "propertyNames"))
        try:
            classes(names, tuple(dict.fromkeys(pattern for pattern, _ in patterns)))
        except ValueError as error:                 # too large
            raise ValueError(f"JSON schema at {place.pointer}: {error}") from None
        key = "additionalProperties"
        rest = self._evaluated(schema, "unevaluatedProperties", schema.get(key, True), key, place)
        additional = self.part(rest, place, key)
        others = (Others(patterns, additional),) if patterns or additional is not EVERY else ()
        least, most = int(schema.get("minProperties", 0)), schema.get("maxProperties", math.inf)
        required = tuple(dict.fromkeys(schema.get("required", ())))
        return Object(named, others, required, least, most, names)


def _is_listed(shape: Array) -> bool:
    """Return whether the items of an array are a few listed values."""
    try:
        values = values_of(shape)
    except Busy:
        return False
    return values is not None and len(values) <= MAX_VALUES


def _scope(place: Place) -> Any:
    """Return the part of a place that changes the meaning of a schema in it."""
    if place.draft <= 7:
        return place.draft
    scope = [uri for uri, _ in place.resolver.dynamic_scope()]
    return place.draft, tuple(dict.fromkeys(scope)), tuple(dict.fromkeys(reversed(scope)))


def _parts_of(shape: Shape) -> Iterator[Lazy]:
    """Yield the parts of a shape."""
    match shape:
        case Choice():
            for option in shape.options:
                yield from _parts_of(option)
        case Array():
            yield from (*shape.first, shape.rest)
        case Object():
            yield from shape.properties.values()
            for others in shape.others:
                yield from (*(part for _, part in others.patterns), others.additional)
