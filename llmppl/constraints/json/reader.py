"""Reader: from JSON schemas, drafts 4 to 2020-12, to shapes.

A keyword that no shape holds is *left out*: the shape then has more values than the schema, and the keyword is checked
on the finished text. Places are JSON pointers, after the URI of the document if it is not the root.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import reduce
from typing import Any, NamedTuple, cast

from llmppl.constraints.automata.formats import format_language
from llmppl.constraints.json import shapes
from llmppl.constraints.json.ecma import Backtracking, matcher
from llmppl.constraints.json.keywords import check_keywords, pointer
from llmppl.constraints.json.objects import classes
from llmppl.constraints.json.references import DRAFTS, draft_of, lookup
from llmppl.constraints.json.scalars import MAX_DIGITS, MAX_FRACTION, numbers, quoted
from llmppl.constraints.json.shapes import ANY, TYPES, Array, Inexact, Lazy, Number, Object, Shape, String, intersect

MAX_PAIRS = 4_000                                   # of options of a oneOf that are compared, in shapes.both orders
MAX_OVERLAPS = 6                                    # options of a oneOf that overlap
MAX_DEPENDENT = 6                                   # names that others depend on
MAX_HOPS = 1_000                                    # of a $ref to a $ref

# The shapes of keywords that hold no schemas, and the types of the instances that they restrict.
PLAIN: dict[str, tuple[str, Callable[[Any], Shape]]] = {
    "minimum": ("number", lambda bound: Number(low=(Fraction(bound), False))),
    "maximum": ("number", lambda bound: Number(high=(Fraction(bound), True))),
    "exclusiveMinimum": ("number", lambda bound: Number(low=(Fraction(bound), True))),
    "exclusiveMaximum": ("number", lambda bound: Number(high=(Fraction(bound), False))),
    "multipleOf": ("number", lambda step: Number(steps=((Fraction(step), True),))),
    "minLength": ("string", lambda least: String(least=int(least))),
    "maxLength": ("string", lambda most: String(most=most)),
    "pattern": ("string", lambda pattern: String(languages=(("pattern", pattern, True),))),
    "format": ("string", lambda name: String(languages=(("format", name, True),))),
    "minItems": ("array", lambda least: Array(least=int(least))),
    "maxItems": ("array", lambda most: Array(most=most)),
    "minProperties": ("object", lambda least: Object(least=int(least))),
    "maxProperties": ("object", lambda most: Object(most=most)),
    "required": ("object", lambda names: Object(required=tuple(dict.fromkeys(names)))),
}
OWN = PLAIN.keys() | set(                           # keywords for values of one type
    "type items prefixItems additionalItems unevaluatedItems contains uniqueItems properties patternProperties "
    "additionalProperties unevaluatedProperties propertyNames".split()
)
# Keywords that are left out, in this order, if the automaton is too large.
LARGE = "multipleOf", "minimum maximum exclusiveMinimum exclusiveMaximum minLength maxLength", "pattern format", ""
LIMITS = {                                          # remarks
    "number": f"numbers without bounds have at most {MAX_DIGITS} digits before the point, {2 * MAX_DIGITS} as integers,"
              f" and {MAX_FRACTION} after it; minimum and maximum would bound them",
    "string": "strings without maxLength are as long as max_tokens allows; maxLength would bound them",
}  # fmt: skip
SINCE = {                                           # the first drafts of keywords that draft 4 lacks
    "const": 6, "contains": 6, "propertyNames": 6, "if": 7, "dependentRequired": 2019, "dependentSchemas": 2019,
    "minContains": 2019, "maxContains": 2019, "unevaluatedItems": 2019, "unevaluatedProperties": 2019,
    "$recursiveRef": 2019, "prefixItems": 2020, "$dynamicRef": 2020,
}  # fmt: skip
EXCLUDED = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
IN_PLACE = frozenset(                               # keywords that may evaluate members
    "$ref $dynamicRef $recursiveRef allOf anyOf oneOf not if dependentSchemas dependencies contains".split()
)


class Place(NamedTuple):
    """Place of a schema: its JSON pointer, the resolver of its references, and its draft: 4, 6, 7, 2019 or 2020."""

    pointer: str
    resolver: Any
    draft: int


class Reader:
    """Reader of one schema and of those that it refers to.

    `left_out` and `notes` grow while shapes are read: keywords that are checked on the finished text, and remarks.
    `places` has all shapes that were read, with their pointers.
    """

    def __init__(self, is_live: Callable[[Lazy], bool]) -> None:
        self.left_out: dict[str, None] = {}
        self.notes: dict[str, None] = {}
        self.places: list[tuple[Lazy, str]] = []
        self._is_live = is_live
        self._lazies: dict[Any, Lazy] = {}
        self._numbers: dict[int, int] = {}          # of parts, by their ids
        self._contents: dict[Any, int] = {}
        self._targets = set[int]()                  # ids of schemas that a reference leads to, whose values are checked
        self._inexact = 0                           # times that a shape was read as more than its schema

    def lazy(self, schema: Any, place: Place) -> Lazy:
        """Return the shape of a schema, which is read on first use."""
        if isinstance(schema, bool):
            return shapes.EVERY if schema else shapes.NONE
        key: Any = id(schema), _scope(place)
        if "oneOf" in schema:                       # options of options are compared once
            key = "oneOf", self._number(schema), _scope(place)
        if key not in self._lazies:
            name = "#, 'allOf' (an intersection of too many alternatives)"
            self._lazies[key] = Lazy(lambda: self._read(schema, place), lambda: self.left_out.update({name: None}))
            self.places.append((self._lazies[key], place.pointer))
        return self._lazies[key]

    def _number(self, part: Any) -> int:
        """Return the number of a part of a schema. Equal parts have one number, if their place has no meaning."""
        found = self._numbers.get(id(part))
        if found is None:
            content: Any = repr(part)
            if isinstance(part, list):
                content = tuple(map(self._number, part))
            elif isinstance(part, dict):
                content = tuple((key, self._number(each)) for key, each in part.items())
                if any(key == "id" or key.startswith("$") for key in part):
                    content = id(part)
            found = self._contents.setdefault((type(part), content), len(self._contents))
            self._numbers[id(part)] = found
        return found

    def _part(self, schema: Any, place: Place, *steps: object) -> Lazy:
        """Return the shape of a schema inside the schema at a place."""
        draft = draft_of(schema, place.draft)
        resolver = place.resolver
        if isinstance(schema, dict) and ("$id" in schema or "id" in schema):
            resolver = resolver.in_subresource(DRAFTS[draft].create_resource(schema))
        return self.lazy(schema, Place(place.pointer + "".join(map(pointer, steps)), resolver, draft))

    def read_all(self) -> None:
        """Read every schema that the ones read so far refer to."""
        for lazy, _ in self.places:                 # grows
            lazy.shape                              # noqa: B018

    def _leave_out(self, place: Place, keyword: str) -> None:
        self._inexact += 1
        self.left_out[f"{place.pointer}, {keyword!r}"] = None

    def _shape_of(self, lazy: Lazy) -> Shape:
        shape = lazy.shape
        self._inexact += not lazy.exact
        return shape

    # ---- in place

    def _read(self, schema: Any, place: Place) -> tuple[Shape, bool]:
        """Return the shape of a schema, and whether it has no other values."""
        before = self._inexact
        shape = cast(Shape, ANY)
        given = self._known(schema, place)
        order = "properties", "items", "prefixItems", *given
        own_at = next((key for key in order if key in given and key in OWN), None)
        for key, value in given.items():
            try:
                if key == own_at:
                    shape = intersect(shape, self._own(given, place))
                shape = intersect(shape, self._applied(key, value, given, place))
            except Inexact:
                self._leave_out(place, key)
        is_exact = self._inexact == before
        self._inexact = before
        return shape, is_exact

    def _known(self, schema: Any, place: Place) -> Any:
        """Return the keywords that a draft knows, with the bounds of later drafts."""
        given = {"$ref": schema["$ref"]} if "$ref" in schema and place.draft <= 7 else dict(schema)
        for key in [key for key in given if SINCE.get(key, 4) > place.draft]:
            note = f"{place.pointer}, {key!r} is a keyword since draft {SINCE[key]}, and ignored in {place.draft}"
            self.notes[note] = None
            del given[key]
        if "$schema" in schema and not draft_of(schema, 0):
            note = f"{place.pointer}, '$schema': {schema['$schema']!r} is no known draft: read as {place.draft}"
            self.notes[note] = None
        for key, of in EXCLUDED.items():
            if isinstance(given.get(key), bool) and given.pop(key) and of in given:         # as draft 4 has it
                given[key] = given[of]
        return given

    def _applied(self, key: str, value: Any, schema: Any, place: Place) -> Shape:
        """Return the shape of one keyword that applies schemas in place, or lists values."""
        whole: Shape = ANY

        def inside(part: Any, *steps: object) -> Shape:
            return self._shape_of(self._part(part, place, *steps))

        match key:
            case "const":
                return shapes.Constants((value,))
            case "enum":
                return shapes.Constants(tuple(value)) if value else shapes.NEVER
            case "$ref" | "$dynamicRef" | "$recursiveRef":
                return self._reference(value, key, place)
            case "allOf":
                return reduce(intersect, (inside(part, key, i) for i, part in enumerate(value)), whole)
            case "anyOf":
                return shapes.choice(inside(part, key, i) for i, part in enumerate(value))
            case "oneOf":
                return self._one_of(value, place)
            case "not":
                return self._unless(self._part(value, place, key))
            case "if" if schema.keys() & {"then", "else"}:
                then, other = (inside(schema.get(way, True), way) for way in ("then", "else"))
                unless = self._unless(self._part(value, place, key))
                return shapes.choice([intersect(inside(value, key), then), intersect(unless, other)])
            case "dependentSchemas" | "dependentRequired" | "dependencies":
                if len(value) > MAX_DEPENDENT:
                    raise Inexact
                return reduce(intersect, (
                    _dependent(name, Object(required=(name, *part))) if isinstance(part, list)
                    else _dependent(name, intersect(Object(required=(name,)), inside(part, key, name)))
                    for name, part in value.items()
                ), whole)   # fmt: skip
        return ANY

    def _reference(self, name: str, keyword: str, place: Place) -> Shape:
        schema = {"$ref": name}
        inside = place
        hops = 0
        while isinstance(schema, dict) and (hops == 0 or (len(schema) == 1 and "$ref" in schema)):
            found = lookup(inside.resolver, schema["$ref"], inside.pointer, "$ref" if hops else keyword)
            at = schema["$ref"] if "#" in schema["$ref"] else schema["$ref"] + "#"
            schema = found.contents
            hops = hops + 1
            inside = Place(at, found.resolver, draft_of(schema, place.draft))
            if hops > MAX_HOPS:
                raise ValueError(f"JSON schema at {place.pointer}, {keyword!r}: {name!r} leads back to itself")
        if id(schema) not in self._targets:         # it may be in a place that held no schema
            check_keywords(schema, inside.pointer.removesuffix("#"))
            self._targets.add(id(schema))
        try:
            return self._shape_of(self.lazy(schema, inside))
        except shapes.Loop:
            raise shapes.Loop(
                f"JSON schema at {place.pointer}, {keyword!r}: {name!r} leads back to itself without an object or "
                f"array between; a reference inside properties or items would work"
            ) from None

    def _unless(self, lazy: Lazy) -> Shape:
        """Return the values that do not have a shape. Raises Inexact if no shape holds these."""
        shape = lazy.shape
        if not lazy.exact:
            raise Inexact
        return shapes.negate(shape)

    def _one_of(self, options: list[Any], place: Place) -> Shape:
        """Return the values of exactly one of the options: of any, if no two have a common value."""
        lazies = [self._part(option, place, "oneOf", i) for i, option in enumerate(options)]
        found = list(map(self._shape_of, lazies))
        try:
            if len(lazies) ** 2 > MAX_PAIRS:
                raise Inexact
            pairs = [pair for pair in itertools.permutations(lazies, 2) if self._may_meet(*pair)]
            without = {other: self._unless(other) for _, other in pairs}
            if len(without) > MAX_OVERLAPS:
                raise Inexact
            rest = ([without[other] for each, other in pairs if each is lazy] for lazy in lazies)
            return shapes.choice(reduce(intersect, some, shape) for some, shape in zip(rest, found, strict=True))
        except Inexact:
            self._leave_out(place, "oneOf")
            return shapes.choice(found)

    def _may_meet(self, a: Lazy, b: Lazy) -> bool:
        try:
            return self._is_live(shapes.both(a, b))
        except ValueError:                          # too large to tell
            return True

    # ---- keywords of a type

    def _own(self, schema: Any, place: Place) -> Shape:
        """Return the shape of the type and of the keywords for values of one type."""
        kinds = schema.get("type", list(TYPES))
        kinds = [kinds] if isinstance(kinds, str) else kinds
        kinds = [kind for kind in kinds if kind != "integer" or "number" not in kinds]
        if (name := schema.get("format", "regex")) != "regex" and format_language(name) is None:
            self.notes[f"{place.pointer}, 'format': {name!r} is no known format, and is ignored"] = None
        return shapes.choice(self._of_kind(kind, schema, place) for kind in kinds)

    def _of_kind(self, kind: str, schema: Any, place: Place) -> Shape:
        match kind:
            case "integer" | "number":
                return self._scalar("number", Number(integer=kind == "integer"), numbers, schema, place)
            case "string":
                return self._scalar(kind, String(), quoted, self._checked(schema, place), place)
            case "array" | "object":
                whole = (self._array if kind == "array" else self._object)(schema, place)
                return reduce(intersect, _plain(kind, schema), whole)
        return TYPES[kind]

    def _scalar(self, kind: str, whole: Shape, automaton: Callable[[Any], object], schema: Any, place: Place) -> Shape:
        """Return the shape of numbers or strings, without the keywords that make the automaton too large."""
        for keys in LARGE:
            shape = reduce(intersect, _plain(kind, schema), whole)
            try:
                if shape != whole:
                    automaton(shape)
                break
            except ValueError:                      # too large
                for key in [key for key in keys.split() if key in schema and PLAIN[key][0] == kind]:
                    self._leave_out(place, key)
                schema = {key: value for key, value in schema.items() if key not in keys.split()}
        if "type" in schema and not schema.keys() & {"const", "enum"} and _is_unbounded(shape):
            self.notes[LIMITS[kind]] = None
        return shape

    def _checked(self, schema: Any, place: Place) -> Any:
        """Return the keywords of a string, without a pattern or format that no shape holds."""
        try:
            is_large = "pattern" in schema and isinstance(matcher(schema["pattern"]), Backtracking)
        except ValueError as error:
            raise ValueError(f"JSON schema at {place.pointer}, 'pattern': {error}") from None
        if is_large:
            self._leave_out(place, "pattern")
            schema = {key: value for key, value in schema.items() if key != "pattern"}
        if schema.get("format") == "regex":
            self._leave_out(place, "format")
        if "format" in schema and format_language(schema["format"]) is None:
            schema = {key: value for key, value in schema.items() if key != "format"}
        return schema

    def _array(self, schema: Any, place: Place) -> Shape:
        first = "prefixItems"
        rest = "items"
        if isinstance(schema.get(rest), list):
            first = "items"
            rest = "additionalItems"
        items = tuple(self._part(part, place, first, i) for i, part in enumerate(schema.get(first, ())))
        others = self._others(schema, rest, "unevaluatedItems", place)
        unique = schema.get("uniqueItems", False)
        if unique and (items or shapes.values_of(others) is None):
            self._leave_out(place, "uniqueItems")
            unique = False
        some = shapes.NONE
        wanted = 0
        is_plain = (items, unique) == ((), False)
        if "contains" in schema:
            if not is_plain or "maxContains" in schema:
                self._leave_out(place, "contains")
            if is_plain:
                some = self._part(schema["contains"], place, "contains")
                wanted = int(schema.get("minContains", 1))
        return Array(first=items, rest=others, unique=unique, some=some, wanted=wanted)

    def _object(self, schema: Any, place: Place) -> Shape:
        named, patterns = ([
            (name, self._part(part, place, key, name)) for name, part in schema.get(key, {}).items()
        ] for key in ("properties", "patternProperties"))   # fmt: skip
        names: Shape = String()
        if "propertyNames" in schema:
            names = intersect(names, self._shape_of(self._part(schema["propertyNames"], place, "propertyNames")))
            try:
                classes(names, ())
            except ValueError:                      # too large
                self._leave_out(place, "propertyNames")
                names = String()
        additional = self._others(schema, "additionalProperties", "unevaluatedProperties", place)
        others = shapes.Others(tuple(patterns), additional)
        try:
            if patterns:
                classes(names, tuple(pattern for pattern, _ in patterns))
            free = shapes.Others(tuple(patterns), shapes.EVERY)
            listed = {name: shapes.both(part, free.of_name(name)) for name, part in named}
        except ValueError as error:                 # wrong or too large
            keyword = "patternProperties" if patterns else "propertyNames"
            raise ValueError(f"JSON schema at {place.pointer}, {keyword!r}: {error}") from None
        return Object(listed, (others,) if patterns or additional is not shapes.EVERY else (), names=names)

    def _others(self, schema: Any, key: str, unevaluated: str, place: Place) -> Lazy:
        """Return the shape of the members that no keyword names: that of `key` or `unevaluated`."""
        if key not in schema and schema.get(unevaluated, True) is not True:
            if not IN_PLACE & schema.keys():        # else, it depends on the value which schemas apply
                return self._part(schema[unevaluated], place, unevaluated)
            self._leave_out(place, unevaluated)
        return self._part(schema.get(key, True), place, key)


def _plain(kind: str, schema: dict[str, Any]) -> Iterator[Shape]:
    """Yield the shapes of the plain keywords for values of a type."""
    return (shape(schema[key]) for key, (of, shape) in PLAIN.items() if of == kind and key in schema)


def _is_unbounded(shape: Shape) -> bool:
    if isinstance(shape, Number):
        return math.inf in (-shape.low[0], shape.high[0])
    return isinstance(shape, String) and shape.most == math.inf and not shape.languages


def _dependent(name: str, present: Shape) -> Shape:
    """Return the values that are no objects, the objects that lack a name, and those of a shape."""
    others = [each for each in TYPES.values() if not isinstance(each, Object)]
    return shapes.choice([*others, Object({name: shapes.NONE}), present])


def _scope(place: Place) -> Any:
    """Return the part of a place that changes the meaning of a schema in it."""
    if place.draft <= 7:
        return place.draft
    scope = [uri for uri, _ in place.resolver.dynamic_scope()]
    return place.draft, tuple(dict.fromkeys(scope)), tuple(dict.fromkeys(reversed(scope)))
