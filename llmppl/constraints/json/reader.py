"""Reader: from JSON schemas, drafts 4 to 2020-12, to shapes.

A keyword that no shape holds is *left out*: the shape then has more values than the schema, and the keyword is checked
on the finished text. Places are JSON pointers, after the URI of the document if it is not the root.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from functools import reduce
from typing import Any, NamedTuple

from llmppl.constraints.automata.formats import format_language
from llmppl.constraints.json import shapes
from llmppl.constraints.json.ecma import Backtracking, matcher
from llmppl.constraints.json.keywords import check_keywords, pointer
from llmppl.constraints.json.objects import classes
from llmppl.constraints.json.references import DRAFTS, draft_of, lookup
from llmppl.constraints.json.scalars import MAX_DIGITS, MAX_FRACTION, numbers, quoted
from llmppl.constraints.json.shapes import (
    ANY,
    TYPES,
    Array,
    Constants,
    Inexact,
    Lazy,
    Number,
    Object,
    Shape,
    String,
    choice,
    intersect,
)

MAX_PAIRS = 4_000  # of options of a oneOf that are compared, in both orders
MAX_OVERLAPS = 6  # options of a oneOf that overlap
MAX_DEPENDENT = 6  # names that others depend on
MAX_HOPS = 1_000  # of a $ref to a $ref

# The shapes of keywords that hold no schemas, by the type of the instances that they restrict.
PLAIN: dict[str, dict[str, Callable[[Any], Shape]]] = {
    "number": {
        "minimum": lambda bound: Number(low=(Fraction(bound), False)),
        "maximum": lambda bound: Number(high=(Fraction(bound), True)),
        "exclusiveMinimum": lambda bound: Number(low=(Fraction(bound), True)),
        "exclusiveMaximum": lambda bound: Number(high=(Fraction(bound), False)),
        "multipleOf": lambda step: Number(steps=((Fraction(step), True),)),
    },
    "string": {
        "minLength": lambda least: String(least=int(least)),
        "maxLength": lambda most: String(most=most),
        "pattern": lambda pattern: String(languages=(("pattern", pattern, True),)),
        "format": lambda name: String(languages=(("format", name, True),)),
    },
    "array": {
        "minItems": lambda least: Array(least=int(least)),
        "maxItems": lambda most: Array(most=most),
    },
    "object": {
        "minProperties": lambda least: Object(least=int(least)),
        "maxProperties": lambda most: Object(most=most),
        "required": lambda names: Object(required=tuple(dict.fromkeys(names))),
    },
}
OWN = set().union(*PLAIN.values()) | set(  # keywords for values of one type
    "type items prefixItems additionalItems unevaluatedItems contains uniqueItems properties patternProperties "
    "additionalProperties unevaluatedProperties propertyNames".split()
)
# Keywords that are left out, in this order, if the automaton is too large.
LARGE = (
    "multipleOf",
    "minimum maximum exclusiveMinimum exclusiveMaximum minLength maxLength",
    "pattern format",
    "",
)
LIMITS = {  # remarks
    "number": f"numbers without bounds have at most {MAX_DIGITS} digits before the point, {2 * MAX_DIGITS} as integers,"
    f" and {MAX_FRACTION} after it; minimum and maximum would bound them",
    "string": "strings without maxLength are as long as max_tokens allows; maxLength would bound them",
}
SINCE = {  # the first drafts of keywords that draft 4 lacks
    "const": 6,
    "contains": 6,
    "propertyNames": 6,
    "if": 7,
    "dependentRequired": 2019,
    "dependentSchemas": 2019,
    "minContains": 2019,
    "maxContains": 2019,
    "unevaluatedItems": 2019,
    "unevaluatedProperties": 2019,
    "$recursiveRef": 2019,
    "prefixItems": 2020,
    "$dynamicRef": 2020,
}
EXCLUDED = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
IN_PLACE = frozenset(  # keywords that may evaluate members
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
        self._numbers: dict[int, int] = {}  # of parts, by their ids
        self._contents: dict[Any, int] = {}
        self._targets = set[
            int
        ]()  # ids of schemas that a reference leads to, whose values are checked

    def lazy(self, schema: Any, place: Place) -> Lazy:
        """Return the shape of a schema, which is read on first use."""
        if isinstance(schema, bool):
            return shapes.EVERY if schema else shapes.NONE
        key: Any = id(schema), _scope(place)
        if "oneOf" in schema:  # options of options are compared once
            key = "oneOf", self._number(schema), _scope(place)
        if key not in self._lazies:
            lazy = Lazy(lambda: Reading(self, schema, place).read(), self._note_intersection)
            self._lazies[key] = lazy
            self.places.append((lazy, place.pointer))
        return self._lazies[key]

    def _note_intersection(self) -> None:
        self.left_out["#, 'allOf' (an intersection of too many alternatives)"] = None

    def _number(self, part: Any) -> int:
        """Return the number of a part of a schema. Equal parts have one number, if their place has no meaning."""
        if id(part) in self._numbers:
            return self._numbers[id(part)]
        content: Any = repr(part)
        if isinstance(part, list):
            content = tuple(map(self._number, part))
        elif isinstance(part, dict):
            content = tuple((key, self._number(each)) for key, each in part.items())
            if any(key == "id" or key.startswith("$") for key in part):
                content = id(part)
        number = self._contents.setdefault((type(part), content), len(self._contents))
        self._numbers[id(part)] = number
        return number

    def target(self, name: str, keyword: str, place: Place) -> Lazy:
        """Return the shape of the schema that a reference leads to."""
        ref = name
        key = keyword
        inside = place
        for _ in range(MAX_HOPS):
            found = lookup(inside.resolver, ref, inside.pointer, key)
            at = ref if "#" in ref else ref + "#"
            schema = found.contents
            inside = Place(at, found.resolver, draft_of(schema, place.draft))
            if isinstance(schema, bool) or schema.keys() != {"$ref"}:
                break
            ref = schema["$ref"]
            key = "$ref"
        else:
            raise ValueError(
                f"JSON schema at {place.pointer}, {keyword!r}: {name!r} leads back to itself"
            )
        if id(schema) not in self._targets:  # it may be in a place that held no schema
            check_keywords(schema, inside.pointer.removesuffix("#"))
            self._targets.add(id(schema))
        return self.lazy(schema, inside)

    def may_meet(self, a: Lazy, b: Lazy) -> bool:
        """Return whether two shapes may have a common value."""
        try:
            return self._is_live(shapes.both(a, b))
        except ValueError:  # too large to tell
            return True

    def read_all(self) -> None:
        """Read every schema that the ones read so far refer to."""
        for lazy, _ in self.places:  # grows
            lazy.shape  # noqa: B018


class Reading:
    """Reading of one schema at a place. It is exact until it leaves out a keyword or reads a part that is not."""

    def __init__(self, reader: Reader, schema: dict[str, Any], place: Place) -> None:
        self._reader = reader
        self._place = place
        self._given = self._known(schema)
        self._is_exact = True

    def read(self) -> tuple[Shape, bool]:
        """Return the shape of the schema, and whether it has no other values."""
        given = self._given
        order = "properties", "items", "prefixItems", *given
        own_at = next((key for key in order if key in given and key in OWN), None)
        shape: Shape = ANY
        for key, value in given.items():
            try:
                if key == own_at:
                    shape = intersect(shape, self._own())
                shape = intersect(shape, self._applied(key, value))
            except Inexact:
                self._leave_out(key)
        return shape, self._is_exact

    def _known(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the keywords that the draft knows, with the bounds of later drafts."""
        draft = self._place.draft
        given = dict(schema)
        if "$ref" in schema and draft <= 7:
            given = {"$ref": schema["$ref"]}
        for key in list(given):
            since = SINCE.get(key, 4)
            if since > draft:
                self._note(f"{key!r} is a keyword since draft {since}, and ignored in {draft}")
                del given[key]
        if "$schema" in schema and not draft_of(schema, 0):
            self._note(f"'$schema': {schema['$schema']!r} is no known draft: read as {draft}")
        for key, bound in EXCLUDED.items():
            if isinstance(given.get(key), bool):  # as draft 4 has it
                is_excluded = given.pop(key)
                if is_excluded and bound in given:
                    given[key] = given[bound]
        return given

    def _note(self, text: str) -> None:
        self._reader.notes[f"{self._place.pointer}, {text}"] = None

    def _leave_out(self, keyword: str) -> None:
        self._is_exact = False
        self._reader.left_out[f"{self._place.pointer}, {keyword!r}"] = None

    def _part(self, schema: Any, *steps: object) -> Lazy:
        """Return the shape of a schema inside this one."""
        draft = draft_of(schema, self._place.draft)
        resolver = self._place.resolver
        if isinstance(schema, dict) and ("$id" in schema or "id" in schema):
            resolver = resolver.in_subresource(DRAFTS[draft].create_resource(schema))
        at = self._place.pointer + "".join(map(pointer, steps))
        return self._reader.lazy(schema, Place(at, resolver, draft))

    def _shape_of(self, lazy: Lazy) -> Shape:
        shape = lazy.shape
        self._is_exact &= lazy.exact
        return shape

    def _inside(self, schema: Any, *steps: object) -> Shape:
        return self._shape_of(self._part(schema, *steps))

    # ---- keywords that apply schemas in place, or list values

    def _applied(self, key: str, value: Any) -> Shape:
        """Return the shape of a keyword that applies schemas in place, or lists values; ANY for others."""
        match key:
            case "const":
                return Constants((value,))
            case "enum":
                return Constants(tuple(value)) if value else shapes.NEVER
            case "$ref" | "$dynamicRef" | "$recursiveRef":
                return self._reference(value, key)
            case "allOf":
                parts = (self._inside(part, key, i) for i, part in enumerate(value))
                return reduce(intersect, parts, ANY)
            case "anyOf":
                return choice(self._inside(part, key, i) for i, part in enumerate(value))
            case "oneOf":
                return self._one_of(value)
            case "not":
                return _unless(self._part(value, key))
            case "if":
                return self._conditional(value)
            case "dependentSchemas" | "dependentRequired" | "dependencies":
                return self._dependent(key, value)
        return ANY

    def _reference(self, name: str, keyword: str) -> Shape:
        target = self._reader.target(name, keyword, self._place)
        try:
            return self._shape_of(target)
        except shapes.Loop:
            raise shapes.Loop(
                f"JSON schema at {self._place.pointer}, {keyword!r}: {name!r} leads back to itself without an object "
                f"or array between; a reference inside properties or items would work"
            ) from None

    def _conditional(self, condition: Any) -> Shape:
        if not self._given.keys() & {"then", "else"}:
            return ANY
        then = self._inside(self._given.get("then", True), "then")
        other = self._inside(self._given.get("else", True), "else")
        unless = _unless(self._part(condition, "if"))
        return choice([intersect(self._inside(condition, "if"), then), intersect(unless, other)])

    def _dependent(self, key: str, given: dict[str, Any]) -> Shape:
        if len(given) > MAX_DEPENDENT:
            raise Inexact
        without = [each for each in TYPES.values() if not isinstance(each, Object)]
        shape: Shape = ANY
        for name, part in given.items():
            if isinstance(part, list):
                present: Shape = Object(required=(name, *part))
            else:
                present = intersect(Object(required=(name,)), self._inside(part, key, name))
            shape = intersect(shape, choice([*without, Object({name: shapes.NONE}), present]))
        return shape

    def _one_of(self, options: list[Any]) -> Shape:
        """Return the values of exactly one of the options: of any, if no two have a common value."""
        lazies = [self._part(option, "oneOf", i) for i, option in enumerate(options)]
        found = list(map(self._shape_of, lazies))
        try:
            return self._exactly_one(lazies)
        except Inexact:
            self._leave_out("oneOf")
            return choice(found)

    def _exactly_one(self, lazies: list[Lazy]) -> Shape:
        if len(lazies) ** 2 > MAX_PAIRS:
            raise Inexact
        pairs = [pair for pair in itertools.permutations(lazies, 2) if self._reader.may_meet(*pair)]
        without = {other: _unless(other) for _, other in pairs}
        if len(without) > MAX_OVERLAPS:
            raise Inexact
        alone = list[Shape]()
        for lazy in lazies:
            others = (without[other] for each, other in pairs if each is lazy)
            alone.append(reduce(intersect, others, lazy.shape))
        return choice(alone)

    # ---- keywords of a type

    def _own(self) -> Shape:
        """Return the shape of the type and of the keywords for values of one type."""
        kinds = self._given.get("type", list(TYPES))
        if isinstance(kinds, str):
            kinds = [kinds]
        if "number" in kinds:
            kinds = [kind for kind in kinds if kind != "integer"]
        name = self._given.get("format", "regex")
        if name != "regex" and format_language(name) is None:
            self._note(f"'format': {name!r} is no known format, and is ignored")
        return choice(map(self._of_kind, kinds))

    def _of_kind(self, kind: str) -> Shape:
        match kind:
            case "integer" | "number":
                return self._scalar(
                    "number", Number(integer=kind == "integer"), numbers, dict(self._given)
                )
            case "string":
                return self._scalar("string", String(), quoted, self._checked())
            case "array":
                return _restricted(self._array(), "array", self._given)
            case "object":
                return _restricted(self._object(), "object", self._given)
        return TYPES[kind]

    def _scalar(
        self, kind: str, whole: Shape, automaton: Callable[[Any], object], given: dict[str, Any]
    ) -> Shape:
        """Return the shape of numbers or strings, without the keywords that make the automaton too large."""
        for keys in LARGE:
            shape = _restricted(whole, kind, given)
            try:
                if shape != whole:
                    automaton(shape)
                break
            except ValueError:  # too large
                for key in keys.split():
                    if key in given and key in PLAIN[kind]:
                        self._leave_out(key)
                        del given[key]
        if "type" in given and not given.keys() & {"const", "enum"} and _is_unbounded(shape):
            self._reader.notes[LIMITS[kind]] = None
        return shape

    def _checked(self) -> dict[str, Any]:
        """Return the keywords of a string, without a pattern or format that no shape holds."""
        given = dict(self._given)
        try:
            if "pattern" in given and isinstance(matcher(given["pattern"]), Backtracking):
                self._leave_out("pattern")
                del given["pattern"]
        except ValueError as error:
            raise ValueError(f"JSON schema at {self._place.pointer}, 'pattern': {error}") from None
        if given.get("format") == "regex":
            self._leave_out("format")
        if "format" in given and format_language(given["format"]) is None:
            del given["format"]
        return given

    def _array(self) -> Shape:
        given = self._given
        first = "prefixItems"
        rest = "items"
        if isinstance(given.get("items"), list):
            first = "items"
            rest = "additionalItems"
        items = tuple(self._part(part, first, i) for i, part in enumerate(given.get(first, ())))
        others = self._others(rest, "unevaluatedItems")
        unique = given.get("uniqueItems", False)
        if unique and (items or shapes.values_of(others) is None):
            self._leave_out("uniqueItems")
            unique = False
        some = shapes.NONE
        wanted = 0
        if "contains" in given:
            is_counted = not items and not unique
            if is_counted:
                some = self._part(given["contains"], "contains")
                wanted = int(given.get("minContains", 1))
            if not is_counted or "maxContains" in given:
                self._leave_out("contains")
        return Array(first=items, rest=others, unique=unique, some=some, wanted=wanted)

    def _object(self) -> Shape:
        named = self._parts_by_name("properties")
        patterns = self._parts_by_name("patternProperties")
        names: Shape = String()
        if "propertyNames" in self._given:
            names = intersect(names, self._inside(self._given["propertyNames"], "propertyNames"))
            try:
                classes(names, ())
            except ValueError:  # too large
                self._leave_out("propertyNames")
                names = String()
        additional = self._others("additionalProperties", "unevaluatedProperties")
        by_pattern = tuple(patterns.items())
        others = shapes.Others(by_pattern, additional)
        free = shapes.Others(by_pattern, shapes.EVERY)
        try:
            if patterns:
                classes(names, tuple(patterns))
            listed = {name: shapes.both(part, free.of_name(name)) for name, part in named.items()}
        except ValueError as error:  # wrong or too large
            keyword = "patternProperties" if patterns else "propertyNames"
            raise ValueError(
                f"JSON schema at {self._place.pointer}, {keyword!r}: {error}"
            ) from None
        if not patterns and additional is shapes.EVERY:
            return Object(listed, names=names)
        return Object(listed, (others,), names=names)

    def _parts_by_name(self, key: str) -> dict[str, Lazy]:
        given = self._given.get(key, {})
        return {name: self._part(part, key, name) for name, part in given.items()}

    def _others(self, key: str, unevaluated: str) -> Lazy:
        """Return the shape of the members that no keyword names: that of `key` or `unevaluated`."""
        given = self._given
        if key not in given and given.get(unevaluated, True) is not True:
            if not IN_PLACE & given.keys():  # else, it depends on the value which schemas apply
                return self._part(given[unevaluated], unevaluated)
            self._leave_out(unevaluated)
        return self._part(given.get(key, True), key)


def _unless(lazy: Lazy) -> Shape:
    """Return the values that do not have a shape. Raises Inexact if no shape holds these."""
    shape = lazy.shape
    if not lazy.exact:
        raise Inexact
    return shapes.negate(shape)


def _restricted(shape: Shape, kind: str, given: dict[str, Any]) -> Shape:
    """Return a shape of values of a type with its plain keywords."""
    for key, shape_of in PLAIN[kind].items():
        if key in given:
            shape = intersect(shape, shape_of(given[key]))
    return shape


def _is_unbounded(shape: Shape) -> bool:
    if isinstance(shape, Number):
        return math.inf in (-shape.low[0], shape.high[0])
    return isinstance(shape, String) and shape.most == math.inf and not shape.languages


def _scope(place: Place) -> Any:
    """Return the part of a place that changes the meaning of a schema in it."""
    if place.draft <= 7:
        return place.draft
    scope = [uri for uri, _ in place.resolver.dynamic_scope()]
    return place.draft, tuple(dict.fromkeys(scope)), tuple(dict.fromkeys(reversed(scope)))
