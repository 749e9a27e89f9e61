"""Shapes: sets of JSON values, as a schema describes them without references and combinators.

`intersect` and `negate` compute with shapes, and `fits` tests a value. The parts of arrays and objects are `Lazy`: they
are read on first use, so shapes may refer to themselves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache, reduce
from typing import Any, Literal, NamedTuple, TypeAlias

from llmppl.constraints.automata.budget import Budget
from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.formats import format_language
from llmppl.constraints.json.ecma import found

MAX_OPTIONS = 2_000  # of one choice
INTERSECTION_STEPS = 40  # that an intersection costs
WORK: ContextVar[Budget | None] = ContextVar("WORK", default=None)  # of the schema that is read
MAX_VALUES = 64  # of the items of an array without repetition


class Inexact(Exception):
    """No shape holds exactly the values that are meant."""


class Loop(ValueError):
    """A shape is asked for while it is read."""


class Lazy:
    """Shape that is read when it is first needed. `exact` is False if it holds more values than its schema.

    `find()` returns the shape and `exact`. `note()` is called if an intersection had to be weakened.
    """

    def __init__(
        self, find: Callable[[], tuple[Shape, bool]], note: Callable[[], None] | None = None
    ) -> None:
        self._find = find
        self._is_busy = False
        self.exact = True
        self.note = note
        self.intersections = dict[Lazy, Lazy]()  # with others, which live as long
        self._shape: Shape | None = None

    @classmethod
    def of(cls, shape: Shape) -> Lazy:
        return cls(lambda: (shape, True))

    @property
    def shape(self) -> Shape:
        if self._shape is None:
            if self._is_busy:
                raise Loop
            self._is_busy = True
            try:
                self._shape, self.exact = self._find()
            finally:
                self._is_busy = False
        return self._shape


EVERY = Lazy(lambda: (ANY, True))
NONE = Lazy(lambda: (NEVER, True))


@dataclass(frozen=True, eq=False)
class Constants:
    """Listed values."""

    values: tuple[Any, ...]


Bound: TypeAlias = tuple[Fraction | float, bool]


@dataclass(frozen=True)
class Number:
    """Numbers between two bounds that are multiples of all `steps`, or not of those with False.

    `low` is a value and True if it is excluded, `high` is one and True if it is included. So the tighter of two bounds
    is the greater `low`, or the lesser `high`.
    """

    low: Bound = (-math.inf, False)
    high: Bound = (math.inf, True)
    integer: bool = False
    steps: tuple[tuple[Fraction, bool], ...] = ()


Language: TypeAlias = tuple[Literal["pattern", "format", "const"], str, bool]


@dataclass(frozen=True)
class String:
    """Texts of `least` to `most` characters in all languages: a kind, its value, and False for the complement."""

    least: int = 0
    most: float = math.inf
    languages: tuple[Language, ...] = ()


@dataclass(frozen=True, eq=False)
class Array:
    """Arrays of `least` to `most` items, `wanted` of them at least of the shape `some`.

    The first few have shapes of their own, the others that of `rest`.
    """

    least: int = 0
    most: float = math.inf
    first: tuple[Lazy, ...] = ()
    rest: Lazy = EVERY
    unique: bool = False
    some: Lazy = NONE
    wanted: int = 0

    def item(self, i: int) -> Lazy:
        return self.first[i] if i < len(self.first) else self.rest


class Others(NamedTuple):
    """Shapes of names that are not listed: those of all patterns found in a name, or `additional` if none is."""

    patterns: tuple[tuple[str, Lazy], ...]
    additional: Lazy

    def of_name(self, name: str) -> Lazy:
        return self.of_patterns({pattern for pattern, _ in self.patterns if name in found(pattern)})

    def of_patterns(self, some: Collection[str]) -> Lazy:
        parts = [part for pattern, part in self.patterns if pattern in some]
        return both(*parts) if parts else self.additional


@dataclass(frozen=True, eq=False)
class Object:
    """Objects of `least` to `most` properties.

    `properties` are listed names. Other names have the shapes of all `others`. All names have the shape `names`.
    """

    properties: Mapping[str, Lazy] = field(default_factory=dict)
    others: tuple[Others, ...] = ()
    required: tuple[str, ...] = ()
    least: int = 0
    most: float = math.inf
    names: Shape = String()

    def of_name(self, name: str) -> Lazy:
        """Return the shape of a property."""
        if name in self.properties:
            return self.properties[name]
        return both(*(others.of_name(name) for others in self.others))


@dataclass(frozen=True, eq=False)
class Choice:
    options: tuple[Shape, ...]


Sized: TypeAlias = String | Array | Object
Shape: TypeAlias = Constants | Number | String | Array | Object | Choice
TYPES: dict[str, Shape] = {
    "null": Constants((None,)),
    "boolean": Constants((False, True)),
    "number": Number(),
    "string": String(),
    "array": Array(),
    "object": Object(),
}
ANY: Shape = Choice(tuple(TYPES.values()))
NEVER: Shape = Choice(())
_JSON = {String: str, Array: list, Object: dict}


def choice(options: Iterable[Shape]) -> Shape:
    """Return the union of the options, without nested choices and with one list of constants."""
    some: list[Shape] = []
    values: dict[Any, Any] = {}
    for option in options:
        if option is ANY:
            return ANY
        for each in option.options if isinstance(option, Choice) else [option]:
            if isinstance(each, Constants):
                values |= {key_of(value): value for value in each.values}
            else:
                some.append(each)
    if values:
        some.append(Constants(tuple(values.values())))
    if len(some) > MAX_OPTIONS:
        raise Inexact
    return some[0] if len(some) == 1 else Choice(tuple(some))


def unfolded(shape: Shape) -> list[Shape]:
    """Return shapes of one type each, or of listed plain values, that have the values of a shape together."""
    found = list[Shape]()
    if isinstance(shape, Choice):
        for option in shape.options:
            found += unfolded(option)
        return found
    if not isinstance(shape, Constants):
        return [shape]
    plain = list[Any]()
    for value in shape.values:
        if isinstance(value, list):
            items = tuple(map(only, value))
            found.append(Array(len(value), len(value), items, NONE))
        elif isinstance(value, dict):
            parts = {name: only(each) for name, each in value.items()}
            found.append(Object(parts, (Others((), NONE),), tuple(parts)))
        else:
            plain.append(value)
    return [*found, Constants(tuple(plain))] if found else [shape]


def only(value: Any) -> Lazy:
    """Return the shape of one value."""
    return Lazy.of(Constants((value,)))


# ---- intersection


def both(*parts: Lazy) -> Lazy:
    """Return the values of all parts."""
    some = [part for part in parts if part is not EVERY]
    return reduce(_both, some) if some else EVERY


def _both(a: Lazy, b: Lazy) -> Lazy:
    if a is b:
        return a
    if NONE in (a, b):
        return NONE

    note = a.note or b.note

    def find() -> tuple[Shape, bool]:
        try:
            return intersect(a.shape, b.shape), a.exact and b.exact
        except Inexact:
            if note:
                note()
            return a.shape, False

    if b not in a.intersections:
        a.intersections[b] = Lazy(find, note)
    return a.intersections[b]


def intersect(a: Shape, b: Shape) -> Shape:
    """Return the values of both shapes; in an object, the properties of `a` come first."""
    if a is ANY or b is ANY or a is b:
        return b if a is ANY else a
    budget = WORK.get()
    if budget is not None:
        budget.spend(steps=INTERSECTION_STEPS)
    match a, b:
        case Choice(), _:
            return choice(intersect(option, b) for option in a.options)
        case _, Choice():
            return choice(intersect(a, option) for option in b.options)
        case Constants(), _:
            values = tuple(value for value in a.values if fits(value, b))
            return Constants(values) if values else NEVER
        case _, Constants():
            return intersect(b, a)
        case Number(), Number():
            steps = _union(a.steps, b.steps)
            return Number(max(a.low, b.low), min(a.high, b.high), a.integer or b.integer, steps)
        case String(), String():
            return String(*_sizes(a, b), _union(a.languages, b.languages))
        case Array(), Array():
            return _intersect_arrays(a, b)
        case Object(), Object():
            properties = _union(a.properties, b.properties)
            named = {name: both(a.of_name(name), b.of_name(name)) for name in properties}
            others = _union(a.others, b.others)
            required = _union(a.required, b.required)
            return Object(named, others, required, *_sizes(a, b), intersect(a.names, b.names))
    return NEVER


def _intersect_arrays(a: Array, b: Array) -> Array:
    num_first = max(len(a.first), len(b.first))
    items = tuple(both(a.item(i), b.item(i)) for i in range(num_first))
    unique = a.unique or b.unique
    counts = {(a.some, a.wanted), (b.some, b.wanted)} - {(NONE, 0)}
    if bool(items) + unique + len(counts) > 1:  # an array has one of these
        raise Inexact
    some, wanted = next(iter(counts), (NONE, 0))
    return Array(*_sizes(a, b), items, both(a.rest, b.rest), unique, some, wanted)


def _union(a: Iterable[Any], b: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys((*a, *b)))


def _sizes(a: Sized, b: Sized) -> tuple[int, float]:
    return max(a.least, b.least), min(a.most, b.most)


# ---- complement


def negate(shape: Shape) -> Shape:
    """Return the values that do not have a shape. Raises Inexact if no shape holds exactly these."""
    match shape:
        case Choice():
            return reduce(intersect, map(negate, shape.options), ANY)
        case Constants():
            return choice(_other_values(shape.values))
        case Number():
            inside = _other_numbers(shape)
        case String():
            inside = _other_strings(shape)
        case Array(first=(), unique=False) if shape.rest is EVERY and not shape.wanted:
            inside = _other_sizes(shape)
        case Object(others=()) if shape.names == String():
            inside = _other_objects(shape)
        case _:
            raise Inexact
    others = [each for each in TYPES.values() if not isinstance(each, type(shape))]
    return choice([*others, *inside])


def _other_values(values: tuple[Any, ...]) -> Iterator[Shape]:
    """Yield the shapes of the values that are not listed."""
    if any(isinstance(value, list | dict) for value in values):
        raise Inexact
    keys = set(map(key_of, values))
    for word in (None, False, True):
        if key_of(word) not in keys:
            yield Constants((word,))
    numbers: list[Fraction | float] = sorted(
        {Fraction(value) for value in values if is_number(value)}
    )
    for low, high in itertools.pairwise([-math.inf, *numbers, math.inf]):
        yield Number((low, True), (high, False))
    yield String(
        languages=tuple(("const", value, False) for value in values if isinstance(value, str))
    )
    yield TYPES["array"]
    yield TYPES["object"]


def _other_numbers(shape: Number) -> Iterator[Shape]:
    if shape.low[0] > -math.inf:
        yield Number(high=shape.low)
    if shape.high[0] < math.inf:
        yield Number(low=shape.high)
    steps = shape.steps
    if shape.integer:
        steps += ((Fraction(1), True),)
    for step, is_in in steps:
        yield Number(steps=((step, not is_in),))


def _other_strings(shape: String) -> Iterator[Shape]:
    yield from _other_sizes(shape)
    for kind, value, is_in in shape.languages:
        yield String(languages=((kind, value, not is_in),))


def _other_sizes(shape: Sized) -> Iterator[Shape]:
    kind = type(shape)
    if shape.least:
        yield kind(most=shape.least - 1)
    if shape.most < math.inf:
        yield kind(least=int(shape.most) + 1)


def _other_objects(shape: Object) -> Iterator[Shape]:
    """Yield the shapes of objects of other sizes, and of those without a required property or with another value."""
    yield from _other_sizes(shape)
    for name in shape.required:
        yield Object({name: NONE})
    for name, part in shape.properties.items():
        inside = part.shape
        if not part.exact:
            raise Inexact
        yield Object({name: Lazy.of(negate(inside))}, required=(name,))


# ---- values


def is_number(value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def key_of(value: Any) -> Any:
    """Return a key that is equal for equal JSON values: 1 is 1.0 and not true, and members have no order."""
    if isinstance(value, dict):
        return "object", frozenset((name, key_of(each)) for name, each in value.items())
    if isinstance(value, list):
        return "array", *map(key_of, value)
    return isinstance(value, bool), value


@lru_cache(1_000)
def language(kind: str, value: str) -> DFA:
    """Return the texts of a language of a String."""
    if kind == "const":
        return DFA.from_strings([value])
    dfa = found(value) if kind == "pattern" else format_language(value)
    assert dfa is not None
    return dfa


def fits(value: Any, shape: Shape) -> bool:
    """Return whether a JSON value, whose numbers are int or Decimal, has a shape."""
    match shape:
        case Choice():
            return shape is ANY or any(fits(value, option) for option in shape.options)
        case Constants():
            return key_of(value) in map(key_of, shape.values)
        case Number():
            return is_number(value) and _number_fits(Fraction(value), shape)
    if not isinstance(value, _JSON[type(shape)]) or not shape.least <= len(value) <= shape.most:
        return False
    match shape:
        case String():
            return all(
                (value in language(kind, name)) == is_in for kind, name, is_in in shape.languages
            )
        case Array():
            return _items_fit(value, shape)
        case Object():
            return _members_fit(value, shape)


def _number_fits(value: Fraction, shape: Number) -> bool:
    if (value, False) < shape.low or (value, True) > shape.high:
        return False
    if shape.integer and value.denominator > 1:
        return False
    return all(((value / step).denominator == 1) == is_in for step, is_in in shape.steps)


def _items_fit(value: list[Any], shape: Array) -> bool:
    if shape.unique and len(set(map(key_of, value))) < len(value):
        return False
    if sum(fits(each, shape.some.shape) for each in value) < shape.wanted:
        return False
    return all(fits(each, shape.item(i).shape) for i, each in enumerate(value))


def _members_fit(value: dict[str, Any], shape: Object) -> bool:
    if not value.keys() >= set(shape.required):
        return False
    return all(
        fits(name, shape.names) and fits(each, shape.of_name(name).shape)
        for name, each in value.items()
    )


def values_of(item: Lazy) -> list[Any] | None:
    """Return the different values of an item; None if they are not listed, or are many."""
    try:
        shape = item.shape
    except Loop:  # it refers to a schema that is read
        return None
    if not isinstance(shape, Constants):
        return None
    values = {key_of(value): value for value in shape.values}
    return list(values.values()) if len(values) <= MAX_VALUES else None
