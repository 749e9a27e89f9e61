"""Shapes: the content of a JSON schema, without its references and combinators.

`Reader(root).shape(schema)` reads a schema as llguidance does: keyword by keyword, in the order of the schema, and
intersects each with the shape so far (`intersect`). If llguidance might read a schema differently, it raises
`NotCompilable`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeAlias

from llmppl.constraints.json.checks import KEYWORDS, target

__all__ = ["ANY", "NEVER", "Array", "NotCompilable", "Choice", "Number", "Object", "Reader", "Shape", "String", "Words"]

TYPES = "null", "boolean", "number", "string", "array", "object"
APPLIED = "const", "enum", "allOf", "anyOf", "oneOf", "$ref"            # each narrows all keywords before it
READ = frozenset(
    "type minimum maximum exclusiveMinimum exclusiveMaximum multipleOf minLength maxLength pattern format prefixItems "
    "items additionalItems minItems maxItems properties additionalProperties minProperties required $defs "
    "definitions".split()
).union(APPLIED)
OLD = "draft-03", "draft-04", "draft-06", "draft-07", "2019-09"        # `items` may be a list, `prefixItems` is unknown
MAX_OPTIONS = 2_000                                 # of one choice


class NotCompilable(Exception):
    """A schema cannot be compiled here, or might be read differently; the message names the part."""


@dataclass(frozen=True)
class Words:
    """Some of null, true and false."""

    words: frozenset[str]


@dataclass(frozen=True)
class Number:
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    integer: bool = False
    step: float | None = None


@dataclass(frozen=True)
class String:
    """Texts of `least` to `most` characters, in all languages: ("const" | "pattern" | "format", its value)."""

    least: int = 0
    most: int | None = None
    languages: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Array:
    """Arrays of `least` to `most` items: the `first` few have shapes of their own, the others `rest`."""

    least: int
    most: int | None
    first: tuple[Shape, ...]
    rest: Shape

    def item(self, i: int) -> Shape:
        return self.first[i] if i < len(self.first) else self.rest


@dataclass(frozen=True)
class Object:
    """Objects of named properties, in order, then others of the shape `additional`."""

    properties: Mapping[str, Shape]
    additional: Shape
    required: tuple[str, ...] = ()
    least: int = 0                                  # properties; 1, or more if as many are required

    def named(self) -> Iterator[tuple[str, Shape, bool]]:
        """Yield (name, shape, is required); required names without a shape of their own come last."""
        for name, shape in self.properties.items():
            yield name, shape, name in self.required
        yield from ((name, self.additional, True) for name in self.required if name not in self.properties)


@dataclass(frozen=True)
class Choice:
    options: tuple[Shape, ...]


@dataclass(frozen=True)
class _Any:
    """Any JSON."""


Shape: TypeAlias = Words | Number | String | Array | Object | Choice | _Any
ANY, NEVER = _Any(), Choice(())
_NULL, _BOOLEAN = Words(frozenset({"null"})), Words(frozenset({"true", "false"}))


def intersect(a: Shape, b: Shape) -> Shape:
    """Return the values of both shapes; in an object, the properties of `a` come first."""
    if isinstance(a, _Any):
        return b
    if isinstance(b, _Any):
        return a
    if isinstance(a, Choice):
        return _choice(intersect(option, b) for option in a.options)
    if isinstance(b, Choice):
        return _choice(intersect(a, option) for option in b.options)
    if isinstance(a, Words) and isinstance(b, Words):
        words = a.words & b.words
        return Words(words) if words else NEVER
    if isinstance(a, Number) and isinstance(b, Number):
        return _intersect_numbers(a, b)
    if isinstance(a, String) and isinstance(b, String):
        languages = tuple(dict.fromkeys(a.languages + b.languages))
        return String(max(a.least, b.least), _least(a.most, b.most), languages)
    if isinstance(a, Array) and isinstance(b, Array):
        first = range(max(len(a.first), len(b.first)))
        items = tuple(intersect(a.item(i), b.item(i)) for i in first)
        return Array(max(a.least, b.least), _least(a.most, b.most), items, intersect(a.rest, b.rest))
    if isinstance(a, Object) and isinstance(b, Object):
        named = {name: intersect(shape, b.properties.get(name, b.additional)) for name, shape in a.properties.items()}
        named |= {name: intersect(a.additional, shape) for name, shape in b.properties.items() if name not in named}
        required = tuple(dict.fromkeys(a.required + b.required))
        return Object(named, intersect(a.additional, b.additional), required, max(a.least, b.least))
    return NEVER


def _intersect_numbers(a: Number, b: Number) -> Number:
    if a.step is not None and b.step is not None and a.step != b.step:
        raise NotCompilable("multiples of two numbers")
    return Number(
        _most(a.low, b.low), _least(a.high, b.high), _most(a.above, b.above), _least(a.below, b.below),
        a.integer or b.integer, b.step if a.step is None else a.step,
    )  # fmt: skip


def _least(a: Any, b: Any) -> Any:
    return min((each for each in (a, b) if each is not None), default=None)


def _most(a: Any, b: Any) -> Any:
    return max((each for each in (a, b) if each is not None), default=None)


def _choice(options: Iterable[Shape]) -> Shape:
    """Return the union of the options, with nested choices flattened."""
    found: list[Shape] = []
    for option in options:
        if isinstance(option, _Any):
            return ANY
        found += option.options if isinstance(option, Choice) else [option]
        if len(found) > MAX_OPTIONS:
            raise NotCompilable(f"a choice of more than {MAX_OPTIONS:,}")
    return found[0] if len(found) == 1 else Choice(tuple(found))


@dataclass
class Reader:
    """Reader of the schemas in one document, to which references point."""

    root: Any
    _references: dict[str, Shape | None] = field(default_factory=dict)      # None while its schema is read

    def __post_init__(self) -> None:
        named = str(self.root.get("$schema", "")) if isinstance(self.root, dict) else ""
        self.is_old = any(draft in named for draft in OLD)

    def shape(self, schema: Any) -> Shape:
        """Return the shape of a schema. Raises NotCompilable."""
        if isinstance(schema, bool):
            return ANY if schema else NEVER
        if schema is not self.root and isinstance(schema.get("$id", schema.get("id")), str):
            raise NotCompilable("a part with an $id")
        if unread := schema.keys() & KEYWORDS - READ:
            raise NotCompilable(", ".join(sorted(unread)))
        if self.is_old and "const" in schema and "draft-04" in str(self.root.get("$schema")):
            raise NotCompilable("const in draft 4")
        found: Shape = ANY
        some: dict[str, Any] = {}
        for key, value in schema.items():
            if key in APPLIED:
                found = intersect(found, self._simple(some, schema))
                found, some = intersect(found, self._applied(key, value)), {}
            elif key in READ:
                some[key] = value
                if key == "additionalProperties" and "properties" in schema:        # whose names are not additional
                    some.setdefault("properties", dict.fromkeys(schema["properties"], True))
                if key == "items" and "prefixItems" in schema:
                    some.setdefault("prefixItems", [True] * len(schema["prefixItems"]))
        return intersect(found, self._simple(some, schema))

    def _applied(self, key: str, value: Any) -> Shape:
        if key == "const":
            return _constant(value)
        if key == "enum":
            return _choice(map(_constant, value))
        if key == "$ref":
            return self._reference(value)
        shapes = list(map(self.shape, value))
        if key != "allOf":
            return _choice(shapes)
        whole: Shape = ANY
        return reduce(intersect, shapes, whole)

    def _reference(self, name: str) -> Shape:
        if name not in self._references:
            self._references[name] = None
            schema = self.root if name == "#" else target(self.root, name)
            if not isinstance(schema, dict | bool):
                raise NotCompilable(f"the reference {name}")
            self._references[name] = self.shape(schema)
        found = self._references[name]
        if found is None:
            raise NotCompilable("recursion")
        return found

    def _simple(self, some: dict[str, Any], schema: dict[str, Any]) -> Shape:
        """Return the shape of the keywords `some` of a schema, together with its type."""
        if not some.keys() - {"$defs", "definitions"}:
            return ANY
        kinds = schema.get("type", TYPES)
        return _choice(self._of_type(kind, some) for kind in ([kinds] if isinstance(kinds, str) else kinds))

    def _of_type(self, kind: str, some: dict[str, Any]) -> Shape:
        if kind in ("null", "boolean"):
            return _NULL if kind == "null" else _BOOLEAN
        if kind in ("number", "integer"):
            return _number(some, kind == "integer")
        if kind == "string":
            languages = tuple((key, some[key]) for key in ("pattern", "format") if key in some)
            return String(int(some.get("minLength", 0)), some.get("maxLength"), languages)
        if kind == "array":
            return self._array(some)
        named = {name: self.shape(part) for name, part in some.get("properties", {}).items()}
        required = tuple(dict.fromkeys(some.get("required", ())))
        least = some.get("minProperties", 0)
        if least > max(1, len(required)):
            raise NotCompilable("minProperties above 1")
        return Object(named, self.shape(some.get("additionalProperties", True)), required, least)

    def _array(self, some: dict[str, Any]) -> Shape:
        first, rest = some.get("prefixItems", []), some.get("items", True)
        if self.is_old or "additionalItems" in some or isinstance(rest, list):
            first, rest = (rest, some.get("additionalItems", True)) if isinstance(rest, list) else ([], rest)
        return Array(some.get("minItems", 0), some.get("maxItems"), tuple(map(self.shape, first)), self.shape(rest))


def _number(some: dict[str, Any], integer: bool) -> Number:
    low, high = some.get("minimum"), some.get("maximum")
    above, below = some.get("exclusiveMinimum"), some.get("exclusiveMaximum")
    if isinstance(above, bool):                     # draft 4
        above = low if above else None
    if isinstance(below, bool):
        below = high if below else None
    step = some.get("multipleOf")
    return Number(low, high, above, below, integer, None if step is None else abs(float(step)))


def _constant(value: Any) -> Shape:
    if value is None or isinstance(value, bool):
        return Words(frozenset({{None: "null", True: "true", False: "false"}[value]}))
    if isinstance(value, int | float):
        return Number(value, value, integer=isinstance(value, int))
    if isinstance(value, str):
        return String(languages=(("const", value),))
    if isinstance(value, list):
        items = tuple(map(_constant, value))
        return Array(len(items), len(items), items, NEVER)
    return Object({name: _constant(part) for name, part in value.items()}, NEVER, tuple(value))
