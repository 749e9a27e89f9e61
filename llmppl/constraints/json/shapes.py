"""Shapes: sets of JSON values, as a schema describes them without references and combinators.

`intersect` and `negate` compute with shapes, and `fits` tests a value. The parts of arrays and objects are `Lazy`: they
are read on first use, so shapes may refer to themselves.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache, reduce
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from llmppl.constraints.automata.budget import Budget
from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.formats import format_language
from llmppl.constraints.json.ecma import found

MAX_OPTIONS = 2_000                                 # of one choice
INTERSECTION_STEPS = 40                             # that an intersection costs
WORK: ContextVar[Budget | None] = ContextVar("WORK", default=None)      # of the schema that is read
MAX_VALUES = 64                                     # of the items of an array without repetition


class Inexact(Exception):
    """No shape holds exactly the values that are meant."""


class Loop(ValueError):
    """A shape is asked for while it is read."""


class Lazy:
    """Shape that is read when it is first needed. `exact` is False if it holds more values than its schema.

    `find()` returns the shape and `exact`. `note()` is called if an intersection had to be weakened.
    """

    __slots__ = ("_find", "_is_busy", "_shape", "exact", "intersections", "note")

    def __init__(self, find: Callable[[], tuple[Shape, bool]], note: Callable[[], None] | None = None) -> None:
        self._find = find
        self._is_busy = False
        self.exact = True
        self.note = note
        self.intersections = dict[Lazy, Lazy]()         # with others, which live as long
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
        known = self.properties.get(name)
        return both(*(others.of_name(name) for others in self.others)) if known is None else known


@dataclass(frozen=True, eq=False)
class Choice:
    options: tuple[Shape, ...]


Shape: TypeAlias = Constants | Number | String | Array | Object | Choice
TYPES: dict[str, Shape] = {
    "null": Constants((None,)), "boolean": Constants((False, True)), "number": Number(), "string": String(),
    "array": Array(), "object": Object(),
}  # fmt: skip
ANY: Choice = Choice(tuple(TYPES.values()))
NEVER: Choice = Choice(())


def choice(options: Iterable[Shape]) -> Shape:
    """Return the union of the options, without nested choices and with one list of constants."""
    some: list[Shape] = []
    for option in options:
        if option is ANY:
            return ANY
        some += option.options if isinstance(option, Choice) else [option]
    if len(some) > MAX_OPTIONS:
        raise Inexact
    values = {key_of(value): value for each in some if isinstance(each, Constants) for value in each.values}
    if values:
        some = [each for each in some if not isinstance(each, Constants)] + [Constants(tuple(values.values()))]
    return some[0] if len(some) == 1 else Choice(tuple(some))


def unfolded(shape: Shape) -> list[Shape]:
    """Return shapes of one type each, or of listed plain values, that have the values of a shape together."""
    match shape:
        case Choice():
            return [each for option in shape.options for each in unfolded(option)]
        case Constants():
            found = list[Shape]()
            plain = []
            for value in shape.values:
                if isinstance(value, list):
                    items = tuple(Lazy.of(Constants((each,))) for each in value)
                    found.append(Array(len(value), len(value), items, NONE))
                elif isinstance(value, dict):
                    parts = {name: Lazy.of(Constants((each,))) for name, each in value.items()}
                    found.append(Object(parts, (Others((), NONE),), tuple(parts)))
                else:
                    plain.append(value)
            return [*found, Constants(tuple(plain))] if found else [shape]
    return [shape]


# ---- intersection


def both(*parts: Lazy) -> Lazy:
    """Return the values of all parts."""
    some = [part for part in parts if part is not EVERY]
    return reduce(_both, some) if some else EVERY


def _both(a: Lazy, b: Lazy) -> Lazy:
    if a is b:
        return a
    if a is NONE or b is NONE:
        return NONE
    if b in a.intersections:
        return a.intersections[b]

    def find() -> tuple[Shape, bool]:
        try:
            return intersect(a.shape, b.shape), a.exact and b.exact
        except Inexact:
            for each in (a, b):
                if each.note:
                    each.note()
            return a.shape, False

    return a.intersections.setdefault(b, Lazy(find, a.note or b.note))


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
            return String(*_counts(a, b), _union(a.languages, b.languages))
        case Array(), Array():
            items = tuple(both(a.item(i), b.item(i)) for i in range(max(len(a.first), len(b.first))))
            unique = a.unique or b.unique
            counts = {(a.some, a.wanted), (b.some, b.wanted)} - {(NONE, 0)}
            if bool(items) + unique + len(counts) > 1:          # an array has one of these
                raise Inexact
            some, wanted = next(iter(counts), (NONE, 0))
            return Array(*_counts(a, b), items, both(a.rest, b.rest), unique, some, wanted)
        case Object(), Object():
            named = {name: both(a.of_name(name), b.of_name(name)) for name in _union(a.properties, b.properties)}
            others = _union(a.others, b.others)
            required = _union(a.required, b.required)
            return Object(named, others, required, *_counts(a, b), intersect(a.names, b.names))
    return NEVER


def _union(a: Iterable[Any], b: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys((*a, *b)))


def _counts(a: Any, b: Any) -> tuple[int, float]:
    return max(a.least, b.least), min(a.most, b.most)


# ---- complement


def negate(shape: Shape) -> Shape:
    """Return the values that do not have a shape. Raises Inexact if no shape holds exactly these."""
    others = [each for each in TYPES.values() if not isinstance(each, type(shape))]
    match shape:
        case Choice():
            return reduce(intersect, map(negate, shape.options), cast(Shape, ANY))
        case Constants():
            return choice(_other_values(shape.values))
        case Number():
            below = [] if shape.low[0] == -math.inf else [Number(high=shape.low)]
            above = [] if shape.high[0] == math.inf else [Number(low=shape.high)]
            steps = [*shape.steps, *[(Fraction(1), True)] * shape.integer]
            return choice([*others, *below, *above, *(Number(steps=((step, not is_in),)) for step, is_in in steps)])
        case String():
            texts = (String(languages=((kind, value, not is_in),)) for kind, value, is_in in shape.languages)
            return choice([*others, *_other_sizes(shape), *texts])
        case Array(first=(), unique=False) if (shape.rest, shape.wanted) == (EVERY, 0):
            return choice([*others, *_other_sizes(shape)])
        case Object(others=()) if shape.names == String():
            return choice([*others, *_other_sizes(shape), *_other_objects(shape)])
    raise Inexact


def _other_values(values: tuple[Any, ...]) -> Iterator[Shape]:
    """Yield the shapes of the values that are not listed."""
    if any(isinstance(value, list | dict) for value in values):
        raise Inexact
    keys = set(map(key_of, values))
    yield from (Constants((word,)) for word in (None, False, True) if key_of(word) not in keys)
    numbers = sorted({Fraction(value) for value in values if is_number(value)})
    lows: list[Bound] = [(-math.inf, False), *((number, True) for number in numbers)]
    highs: list[Bound] = [*((number, False) for number in numbers), (math.inf, True)]
    yield from map(Number, lows, highs)
    yield String(languages=tuple(("const", value, False) for value in values if isinstance(value, str)))
    yield from (TYPES["array"], TYPES["object"])


def _other_sizes(shape: Any) -> Iterator[Shape]:
    if shape.least:
        yield type(shape)(most=shape.least - 1)
    if shape.most < math.inf:
        yield type(shape)(least=int(shape.most) + 1)


def _other_objects(shape: Object) -> Iterator[Shape]:
    """Yield the shapes of objects that lack a required property, or have one of another shape."""
    yield from (Object({name: NONE}) for name in shape.required)
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
    """Return whether a JSON value, whose numbers are int or Decimal, has a shape."""
    match shape:
        case Choice():
            return shape is ANY or any(fits(value, option) for option in shape.options)
        case Constants():
            return any(key_of(value) == key_of(each) for each in shape.values)
        case Number():
            return is_number(value) and (
                shape.low <= (value, False) and (value, True) <= shape.high
                and not (shape.integer and Fraction(value).denominator > 1)
                and all(((Fraction(value) / step).denominator == 1) == is_in for step, is_in in shape.steps)
            )
        case String():
            return isinstance(value, str) and shape.least <= len(value) <= shape.most and all(
                (value in language(kind, name)) == positive for kind, name, positive in shape.languages
            )
        case Array():
            return isinstance(value, list) and (
                shape.least <= len(value) <= shape.most
                and all(fits(each, shape.item(i).shape) for i, each in enumerate(value))
                and not (shape.unique and len(set(map(key_of, value))) < len(value))
                and sum(fits(each, shape.some.shape) for each in value) >= shape.wanted
            )
        case Object():
            return isinstance(value, dict) and (
                shape.least <= len(value) <= shape.most
                and value.keys() >= {*shape.required}
                and all(fits(name, shape.names) for name in value)
                and all(fits(each, shape.of_name(name).shape) for name, each in value.items())
            )


def values_of(item: Lazy) -> list[Any] | None:
    """Return the different values of an item; None if they are not listed, or are many."""
    with contextlib.suppress(Loop):             # it refers to a schema that is read
        if isinstance(item.shape, Constants):
            found = {key_of(value): value for value in item.shape.values}
            return list(found.values()) if len(found) <= MAX_VALUES else None
    return None
