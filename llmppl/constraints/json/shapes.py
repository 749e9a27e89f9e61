"""Shapes: sets of JSON values, as a schema describes them without references and combinators.

`intersect` and `negate` compute with shapes, and `fits` tests a value. The parts of arrays and objects are `Lazy`: they
are read on first use, so shapes may refer to themselves and a large schema is read only as far as texts need it.

A shape may hold more values than its schema (`Reader` notes the keywords that it leaves to the finished text).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache, reduce
from typing import Any, Literal, NamedTuple, TypeAlias

from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.json_formats import format_language
from llmppl.constraints.json.ecma import found

__all__ = [
    "ANY", "EVERY", "NEVER", "NONE", "TYPES", "Array", "Busy", "Choice", "Constants", "Contains", "Inexact", "Lazy", "Number", "Object", "Others", "Shape", "String",
    "Words", "both", "choice", "exact", "fits", "intersect", "key_of", "language", "negate", "negate_part", "of_type", "values_of",
]  # fmt: skip

MAX_OPTIONS = 2_000                                 # of one choice


class Inexact(Exception):
    """No shape holds exactly the values that are meant."""


class Busy(Exception):
    """A shape is asked for while it is read."""


class Lazy:
    """Shape that is read when it is first needed.

    `exact` is False if it holds more values than its schema. `note()` is called if an intersection had to be weakened.
    """

    __slots__ = ("_find", "_is_busy", "_shape", "exact", "note")

    def __init__(self, find: Callable[[], tuple[Shape, bool]], note: Callable[[], None] | None = None) -> None:
        self._find, self._is_busy, self.exact, self.note = find, False, True, note
        self._shape: Shape | None = None

    @classmethod
    def of(cls, shape: Shape) -> Lazy:
        return cls(lambda: (shape, True))

    @property
    def shape(self) -> Shape:
        if self._shape is None:
            if self._is_busy:
                raise Busy
            self._is_busy = True
            try:
                self._shape, self.exact = self._find()
            finally:
                self._is_busy = False
        return self._shape


@dataclass(frozen=True)
class Words:
    """Some of null, true and false."""

    words: frozenset[str]


@dataclass(frozen=True, eq=False)
class Constants:
    """Listed values."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Number:
    """Numbers between two bounds that are multiples of all `steps`, without those in `but_not`."""

    low: Fraction | None = None
    high: Fraction | None = None
    low_in: bool = True
    high_in: bool = True
    integer: bool = False
    steps: tuple[Fraction, ...] = ()
    but_not: tuple[Fraction, ...] = ()


Language: TypeAlias = tuple[Literal["pattern", "format", "const"], str, bool]


@dataclass(frozen=True)
class String:
    """Texts of `least` to `most` characters in all languages: a kind, its value, and False for the complement."""

    least: int = 0
    most: float = math.inf
    languages: tuple[Language, ...] = ()


@dataclass(frozen=True)
class Contains:
    """Condition of an array: `least` to `most` of its items have a shape."""

    item: Lazy
    least: int
    most: float


@dataclass(frozen=True, eq=False)
class Array:
    """Arrays of `least` to `most` items. The first few have shapes of their own, the others that of `rest`."""

    least: int = 0
    most: float = math.inf
    first: tuple[Lazy, ...] = ()
    rest: Lazy = field(default_factory=lambda: _every())
    unique: bool = False
    contains: tuple[Contains, ...] = ()

    def item(self, i: int) -> Lazy:
        return self.first[i] if i < len(self.first) else self.rest


class Others(NamedTuple):
    """Shapes of names that are not listed: those of all patterns found in a name, or `additional` if none is."""

    patterns: tuple[tuple[str, Lazy], ...]
    additional: Lazy

    def of_name(self, name: str) -> Lazy:
        parts = [part for pattern, part in self.patterns if name in found(pattern)]
        return both(*parts) if parts else self.additional


@dataclass(frozen=True, eq=False)
class Object:
    """Objects of `least` to `most` properties.

    `properties` are listed names. Other names have the shapes of all `others`. All names have the shape `names`.
    `dependents` maps a name to the names that an object with the first must have, too.
    """

    properties: Mapping[str, Lazy]
    others: tuple[Others, ...] = ()
    required: tuple[str, ...] = ()
    least: int = 0
    most: float = math.inf
    names: Shape = String()
    dependents: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def of_name(self, name: str) -> Lazy:
        """Return the shape of a property."""
        known = self.properties.get(name)
        return both(*(others.of_name(name) for others in self.others)) if known is None else known


@dataclass(frozen=True, eq=False)
class Choice:
    options: tuple[Shape, ...]


@dataclass(frozen=True)
class _Any:
    """Any JSON."""


Shape: TypeAlias = Words | Constants | Number | String | Array | Object | Choice | _Any
ANY, NEVER = _Any(), Choice(())
EVERY, NONE = Lazy.of(ANY), Lazy.of(NEVER)


def _every() -> Lazy:
    return EVERY


TYPES: dict[str, Shape] = {
    "null": Words(frozenset({"null"})), "boolean": Words(frozenset({"true", "false"})), "number": Number(),
    "string": String(), "array": Array(), "object": Object({}),
}  # fmt: skip


def choice(options: Iterable[Shape]) -> Shape:
    """Return the union of the options, with nested choices flattened."""
    some: list[Shape] = []
    for option in options:
        if option is ANY:
            return ANY
        some += option.options if isinstance(option, Choice) else [option]
    if len(some) > MAX_OPTIONS:
        raise Inexact
    lists = [option for option in some if isinstance(option, Constants)]
    if len(lists) > 1:                              # one list of values is one trie
        values = {key_of(value): value for each in lists for value in each.values}
        some = [option for option in some if not isinstance(option, Constants)] + [Constants(tuple(values.values()))]
    return some[0] if len(some) == 1 else Choice(tuple(some))


def of_type(kind: type[Any]) -> Iterator[Shape]:
    """Yield the shapes of the types that have another class of shapes."""
    yield from (shape for shape in TYPES.values() if not isinstance(shape, kind))


# ---- intersection


def both(*parts: Lazy) -> Lazy:
    """Return the values of all parts."""
    some = [part for part in parts if part is not EVERY]
    return reduce(_both, some) if some else EVERY


@lru_cache(10_000)
def _both(a: Lazy, b: Lazy) -> Lazy:
    def find() -> tuple[Shape, bool]:
        try:
            return intersect(a.shape, b.shape), a.exact and b.exact
        except Inexact:
            for each in (a, b):
                if each.note:
                    each.note()
            return a.shape, False

    return a if a is b else Lazy(find, a.note or b.note)


def intersect(a: Shape, b: Shape) -> Shape:
    """Return the values of both shapes; in an object, the properties of `a` come first."""
    if a is ANY or a is b:
        return b
    if b is ANY:
        return a
    if isinstance(a, Choice):
        return choice(intersect(option, b) for option in a.options)
    if isinstance(b, Choice):
        return choice(intersect(a, option) for option in b.options)
    if isinstance(a, Constants) or isinstance(b, Constants):
        some, other = (a, b) if isinstance(a, Constants) else (b, a)
        assert isinstance(some, Constants)
        values = tuple(value for value in some.values if fits(value, other))
        return Constants(values) if values else NEVER
    if isinstance(a, Words) and isinstance(b, Words):
        return Words(a.words & b.words) if a.words & b.words else NEVER
    if isinstance(a, Number) and isinstance(b, Number):
        return _intersect_numbers(a, b)
    if isinstance(a, String) and isinstance(b, String):
        languages = tuple(dict.fromkeys(a.languages + b.languages))
        return String(max(a.least, b.least), min(a.most, b.most), languages)
    if isinstance(a, Array) and isinstance(b, Array):
        items = tuple(both(a.item(i), b.item(i)) for i in range(max(len(a.first), len(b.first))))
        least, most, rest = max(a.least, b.least), min(a.most, b.most), both(a.rest, b.rest)
        return Array(least, most, items, rest, a.unique or b.unique, a.contains + b.contains)
    if isinstance(a, Object) and isinstance(b, Object):
        return _intersect_objects(a, b)
    return NEVER


def _intersect_numbers(a: Number, b: Number) -> Number:
    low, low_in = _tighter(max, (a.low, a.low_in), (b.low, b.low_in))
    high, high_in = _tighter(min, (a.high, a.high_in), (b.high, b.high_in))
    steps, but_not = tuple(dict.fromkeys(a.steps + b.steps)), tuple(dict.fromkeys(a.but_not + b.but_not))
    return Number(low, high, low_in, high_in, a.integer or b.integer, steps, but_not)


def _tighter(choose: Any, *bounds: tuple[Fraction | None, bool]) -> tuple[Fraction | None, bool]:
    values = [bound for bound, _ in bounds if bound is not None]
    if not values:
        return None, True
    value = choose(values)
    return value, all(is_in for bound, is_in in bounds if bound == value)


def _intersect_objects(a: Object, b: Object) -> Object:
    names = [*a.properties, *(name for name in b.properties if name not in a.properties)]
    named = {name: both(a.of_name(name), b.of_name(name)) for name in names}
    dependents = {
        name: (*a.dependents.get(name, ()), *b.dependents.get(name, ())) for name in [*a.dependents, *b.dependents]
    }
    return Object(
        named, tuple(dict.fromkeys(a.others + b.others)), tuple(dict.fromkeys(a.required + b.required)),
        max(a.least, b.least), min(a.most, b.most), intersect(a.names, b.names), dependents,
    )  # fmt: skip


# ---- complement


def negate(shape: Shape) -> Shape:
    """Return the values that do not have a shape. Raises Inexact if no shape holds exactly these."""
    if isinstance(shape, Choice):
        whole: Shape = ANY
        return reduce(intersect, map(negate, shape.options), whole)
    if shape is ANY:
        return NEVER
    if isinstance(shape, Constants):
        return _other_values(shape)
    others = of_type(type(shape))
    match shape:
        case Words():
            words = frozenset({"null", "true", "false"}) - shape.words
            rest: list[Shape] = [Words(words)] if words else []
            return choice([*(each for each in others if not isinstance(each, Words)), *rest])
        case Number():
            return choice([*others, *_other_numbers(shape)])
        case String():
            return choice([*others, *_other_strings(shape)])
        case Array():
            return choice([*others, *_other_arrays(shape)])
        case Object():
            return choice([*others, *_other_objects(shape)])
    raise Inexact


def negate_part(part: Lazy) -> Shape:
    """Return the values that do not have the shape of a part. Raises Inexact."""
    shape = part.shape
    if not part.exact:
        raise Inexact
    return negate(shape)


def _other_values(shape: Constants) -> Shape:
    words, numbers, strings = set[str](), list[Fraction](), list[Language]()
    for value in shape.values:
        if value is None or isinstance(value, bool):
            words.add(json.dumps(value))
        elif isinstance(value, str):
            strings.append(("const", value, False))
        elif isinstance(value, list | dict):
            raise Inexact
        else:
            numbers.append(exact(value))
    left = frozenset({"null", "true", "false"}) - words
    return choice([
        *([Words(left)] if left else []), Number(but_not=tuple(numbers)), String(languages=tuple(strings)),
        TYPES["array"], TYPES["object"],
    ])  # fmt: skip


def _other_numbers(shape: Number) -> Iterator[Shape]:
    if shape.integer or shape.steps:
        raise Inexact
    if shape.low is not None:
        yield Number(high=shape.low, high_in=not shape.low_in)
    if shape.high is not None:
        yield Number(low=shape.high, low_in=not shape.high_in)
    if shape.but_not:
        raise Inexact


def _other_strings(shape: String) -> Iterator[Shape]:
    if shape.least:
        yield String(most=shape.least - 1)
    if shape.most < math.inf:
        yield String(least=int(shape.most) + 1)
    for kind, value, positive in shape.languages:
        yield String(languages=((kind, value, not positive),))


def _other_arrays(shape: Array) -> Iterator[Shape]:
    if shape.unique or shape.contains or shape.first:
        raise Inexact
    if shape.least:
        yield Array(most=shape.least - 1)
    if shape.most < math.inf:
        yield Array(least=int(shape.most) + 1)
    other = negate_part(shape.rest)
    if other is not NEVER:
        yield Array(contains=(Contains(Lazy.of(other), 1, math.inf),))


def _other_objects(shape: Object) -> Iterator[Shape]:
    if shape.others or shape.names != String() or shape.dependents:
        raise Inexact
    if shape.least:
        yield Object({}, most=shape.least - 1)
    if shape.most < math.inf:
        yield Object({}, least=int(shape.most) + 1)
    for name in shape.required:
        yield Object({name: NONE})
    for name, part in shape.properties.items():
        other = negate_part(part)
        if other is not NEVER:
            yield Object({name: Lazy.of(other)}, required=(name,))


# ---- values


def exact(value: Any) -> Fraction:
    """Return a JSON number as it is written: 0.1 is a tenth."""
    return Fraction(value) if isinstance(value, int | Decimal) else Fraction(Decimal(repr(value)))


def key_of(value: Any) -> Any:
    """Return a key that is equal for equal JSON values: 1 is 1.0 and not true, and members have no order."""
    if isinstance(value, dict):
        return "object", frozenset((name, key_of(each)) for name, each in value.items())
    return ("array", *map(key_of, value)) if isinstance(value, list) else (isinstance(value, bool), value)


@lru_cache(1_000)
def language(kind: str, value: str) -> DFA:
    """Return the texts of a language of a String."""
    if kind == "const":
        return DFA.from_strings([value])
    dfa = found(value) if kind == "pattern" else format_language(value)
    assert dfa is not None
    return dfa


def fits(value: Any, shape: Shape) -> bool:
    """Return whether a JSON value has a shape."""
    match shape:
        case Choice():
            return any(fits(value, option) for option in shape.options)
        case Constants():
            return any(key_of(value) == key_of(each) for each in shape.values)
        case Words():
            return (value is None or isinstance(value, bool)) and json.dumps(value) in shape.words
        case Number():
            is_number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
            return is_number and _fits_number(exact(value), shape)
        case String():
            return isinstance(value, str) and shape.least <= len(value) <= shape.most and all(
                (value in language(kind, name)) == positive for kind, name, positive in shape.languages
            )
        case Array():
            return isinstance(value, list) and _fits_array(value, shape)
        case Object():
            return isinstance(value, dict) and _fits_object(value, shape)
    return True


def _fits_number(value: Fraction, shape: Number) -> bool:
    return (
        (shape.low is None or value > shape.low or (shape.low_in and value == shape.low))
        and (shape.high is None or value < shape.high or (shape.high_in and value == shape.high))
        and not (shape.integer and value.denominator > 1)
        and not any((value / step).denominator > 1 for step in shape.steps)
        and value not in shape.but_not
    )


def _fits_array(value: list[Any], shape: Array) -> bool:
    counts = ((sum(fits(each, some.item.shape) for each in value), some) for some in shape.contains)
    return (
        shape.least <= len(value) <= shape.most
        and all(fits(each, shape.item(i).shape) for i, each in enumerate(value))
        and not (shape.unique and len(set(map(key_of, value))) < len(value))
        and all(some.least <= count <= some.most for count, some in counts)
    )


def _fits_object(value: dict[str, Any], shape: Object) -> bool:
    needed = itertools.chain(shape.required, *(shape.dependents.get(name, ()) for name in value))
    return (
        shape.least <= len(value) <= shape.most
        and all(name in value for name in needed)
        and all(fits(name, shape.names) and fits(each, shape.of_name(name).shape) for name, each in value.items())
    )


def values_of(shape: Array) -> dict[Any, Any] | None:
    """Return the values that items of an array may have, by their keys; None if they are not listed."""
    found: dict[Any, Any] = {}
    for item in (*shape.first, shape.rest):
        values = _listed(item.shape)
        if values is None:
            return None
        found |= {key_of(value): value for value in values}
    return found


def _listed(shape: Shape) -> list[Any] | None:
    match shape:
        case Constants():
            return list(shape.values)
        case Words():
            return [json.loads(word) for word in sorted(shape.words)]
        case Choice():
            parts = [_listed(option) for option in shape.options]
            return None if None in parts else [value for part in parts for value in part or ()]
    return None
