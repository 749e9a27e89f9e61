"""Check of a finished JSON text against a schema of any draft: exact, in linear time for each keyword.

`Check` reads the keywords itself. Numbers are compared as written (99.99 is 99.99, 1.0 is 1), patterns are automata,
and a budget of keywords bounds the work. A keyword *evaluates* the members of a value that it applies a schema to. A
subschema that holds passes its evaluated members to the schema around it, whose `unevaluated*` applies to the others.

Source: JSON Schema drafts 3 to 2020-12.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.json.ecma import found
from llmppl.constraints.json.keywords import DEFINITIONS, IN_PLACE, check_keywords, check_node, pointer, subschemas
from llmppl.constraints.json.references import (
    DRAFTS,
    Resolver,
    Resources,
    draft_of,
    lookup,
    registry_of,
    resolver_of,
    specification_of,
)
from llmppl.support.arguments import shown

if TYPE_CHECKING:
    from referencing import Registry

__all__ = ["Check", "read_json"]

MAX_CALLS = 250_000                                 # keywords read for one text, a few seconds
MAX_WAY = 150                                       # schemas of one value inside each other, by $ref or allOf
MAX_DIGITS = 4_300                                  # of an integer
MAX_STATES = 20_000                                 # of a pattern, after which it begins anew
REFERENCES = "$ref", "$dynamicRef", "$recursiveRef"

Formats = Callable[[str, str], bool | None]
Failure = tuple[str, str] | None                    # place, relative to the schema, and keyword
Seen = set[Any] | None                              # evaluated names or places; None if no schema needs them


# ---- the text


def read_json(text: str, *, exact: bool = False) -> Any:
    """Return the value of a JSON text; with `exact`, numbers with a fraction or exponent are Decimal.

    Raises ValueError if the text is not JSON, repeats a name in an object, has a number that no double is near, or an
    integer of more than 4,300 digits, or is nested too deep.
    """
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_int=_integer,
            parse_float=_decimal if exact else lambda number: float(_decimal(number)),
        )  # fmt: skip
    except RecursionError:
        raise ValueError("the text is nested too deep to be read") from None


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(members)
    if len(value) < len(members):
        seen = set[str]()
        name = next(name for name, _ in members if name in seen or seen.add(name))      # type: ignore[func-returns-value]
        raise ValueError(f"the text has the name {shown(name)} twice in one object")
    return value


def _constant(name: str) -> Any:
    raise ValueError(f"the text has {name}, which is not JSON")


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"the text has an integer of {len(digits):,} digits; at most {MAX_DIGITS:,} would work")
    return int(digits)


def _decimal(number: str) -> Decimal:
    near = float(number)
    if near == 0 and not set("123456789").intersection(number.lower().partition("e")[0]):
        return Decimal(0)
    if near == 0 or math.isinf(near):
        raise ValueError(f"the text has the number {shown(number, 40)}, which is beyond the range of doubles")
    return Decimal(number)


# ---- the check


@dataclass(frozen=True, slots=True)
class _At:
    """A schema, a value, and the scope of the schema."""

    node: dict[str, Any]
    value: Any
    resolver: Resolver
    draft: int
    seen: Seen


class Check:
    """Check of texts against a schema, which returns the place and keyword that fails first, or "". It pickles.

    `check(text)` reads a JSON text; any other value is checked as `json.dumps` writes it. `x-guidance` in the schema
    may hold {"coerce_one_of": true}, which reads `oneOf` as `anyOf`.

    Parameters
    ----------
    schema : dict or bool
    resources : mapping or folder, optional
        Other documents that a `$ref` points to, as in `registry_of`.
    formats : callable, optional
        `formats(name, text)` returns whether a text has a format, None for an unknown one, which is ignored.
    registry : referencing.Registry, optional
        That of `registry_of(schema, resources)`, if it is there already.

    Raises
    ------
    ValueError
        A keyword has a wrong value, a pattern no automaton expresses, or a `$ref` that leads nowhere, back to the same
        value, or over too many others. In a call: the text is not JSON, or takes too many steps.
    """

    def __init__(
        self, schema: Any, resources: Resources = None, formats: Formats | None = None,
        registry: Registry[Any] | None = None,
    ) -> None:  # fmt: skip
        check_keywords(schema)
        self.schema, self.resources, self.formats = schema, resources, formats or _no_format
        self.registry = registry_of(schema, resources) if registry is None else registry
        self.resolver, self.draft = resolver_of(schema, self.registry), draft_of(specification_of(schema))
        given = schema.get("x-guidance") if isinstance(schema, dict) else None
        self.coerces = isinstance(given, dict) and bool(given.get("coerce_one_of"))
        self.patterns: dict[str, DFA] = {}
        self.enums: dict[int, tuple[Any, frozenset[Any]]] = {}        # by id of the list
        self.tracks = self._survey()

    def __call__(self, text: Any) -> str:
        value = read_json(text if isinstance(text, str) else json.dumps(text), exact=True)
        try:
            failed = _Run(self).apply(self.schema, value, self.resolver, self.draft, set() if self.tracks else None)
        except RecursionError:
            raise ValueError("the text is nested too deep for the check against its schema") from None
        return f"#{failed[0]}, {failed[1]!r}" if failed else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return Check, (self.schema, self.resources, self.formats)

    def finds(self, pattern: str, text: str) -> bool:
        """Return whether a pattern is found in a text."""
        dfa = self.patterns.get(pattern)
        if dfa is None or dfa.num_states > MAX_STATES:
            dfa = self.patterns[pattern] = found(pattern) if dfa is None else found.__wrapped__(pattern)
        return dfa.accepts_text(text)

    def _survey(self) -> bool:
        """Look up each `$ref` and pattern that the schema reaches; return whether it has `unevaluated` keywords."""
        tracks = False
        nexts: dict[int, list[tuple[int, str]]] = {}        # schemas of the same value, by id, with their places
        todo = [("#", self.schema, self.resolver, self.draft)]
        while todo:
            place, node, resolver, draft = todo.pop()
            if isinstance(node, bool) or id(node) in nexts:
                continue
            check_node(place, node)                 # a $ref may lead to a place that holds no schema otherwise
            draft, inner = _draft(node, draft), list[tuple[str, str, Any, Resolver]]()
            only_ref = draft <= 7 and "$ref" in node
            for keyword in () if only_ref else ("pattern", "patternProperties"):
                given = node.get(keyword, {})
                for pattern in [given] if isinstance(given, str) else given:
                    try:
                        self.patterns[pattern] = found(pattern)
                    except ValueError as error:
                        raise ValueError(f"JSON schema at {place}, {keyword!r}: {error}") from None
            tracks |= "unevaluatedItems" in node or "unevaluatedProperties" in node
            for keyword in REFERENCES[: 1 if only_ref else 3]:
                if keyword in node and (keyword == "$ref" or draft >= 2019):
                    target = lookup(resolver, node[keyword], place, keyword)
                    inner.append((keyword, f"{place}/{keyword}", target.contents, target.resolver))
            for keyword, way, part in () if only_ref else subschemas(node):
                if keyword not in DEFINITIONS:
                    inner.append((keyword, place + way, part, _inside(part, resolver, _draft(part, draft))))
            nexts[id(node)] = [
                (id(part), way) for key, way, part, _ in inner if key in IN_PLACE or key in REFERENCES
            ]
            todo += [(way, part, scope, draft) for _, way, part, scope in reversed(inner)]
        _check_ways(nexts, id(self.schema))
        return tracks


def _no_format(name: str, text: str) -> None:
    return None


def _check_ways(nexts: dict[int, list[tuple[int, str]]], first: int) -> None:
    """Check that schemas of one value are in no circle, and not too many inside each other. Raises ValueError."""
    heights: dict[int, int] = {}
    open_ = set[int]()
    todo = [(node, False) for node in reversed(nexts)]
    while todo:
        node, is_left = todo.pop()
        if is_left:
            heights[node] = 1 + max((heights.get(each, 0) for each, _ in nexts[node]), default=0)
            open_.remove(node)
        elif node not in heights and node not in open_:
            open_.add(node)
            todo.append((node, True))
            for each, way in nexts[node]:
                if each in open_:
                    raise ValueError(f"JSON schema at {way}: this leads back to itself with the same value, for ever")
                if each in nexts and each not in heights:
                    todo.append((each, False))
    most = max(heights.values(), default=0)
    if most > MAX_WAY:
        raise ValueError(
            f"JSON schema: a way of {most:,} schemas along $ref, allOf and the like is too long; at most {MAX_WAY} "
            f"would work"
        )


def _draft(node: Any, draft: int) -> int:
    return draft_of(specification_of(node, DRAFTS[draft])) if isinstance(node, dict) and "$schema" in node else draft


def _inside(part: Any, resolver: Resolver, draft: int) -> Resolver:
    """Return the resolver of a schema inside another one."""
    if isinstance(part, dict) and ("$id" in part or "id" in part):
        return resolver.in_subresource(DRAFTS[draft].create_resource(part))
    return resolver


class _Run:
    """Check of one value. The keyword methods return the first failure, and add to `at.seen`."""

    def __init__(self, check: Check) -> None:
        self.check, self.left = check, MAX_CALLS

    def apply(self, node: Any, value: Any, resolver: Resolver, draft: int, seen: Seen) -> Failure:
        """Check a value against a schema; add to `seen` if it holds."""
        if isinstance(node, bool):
            return None if node else ("", "false")
        draft = _draft(node, draft)
        at = _At(node, value, resolver, draft, None if seen is None else set())
        keys: Iterable[str] = node
        if draft <= 7 and "$ref" in node:
            keys = ("$ref",)
        elif seen is not None:
            keys = sorted(node, key=lambda key: key.startswith("unevaluated"))
        for key in keys:
            if key in _READERS and (failed := self.read(key, at)):
                return failed
        if seen is not None and at.seen:
            seen |= at.seen
        return None

    def read(self, key: str, at: _At) -> Failure:
        self.left -= 1
        if self.left < 0:
            raise ValueError(f"the schema takes more than {MAX_CALLS:,} keywords to check the text; fewer would work")
        kind, reader = _READERS[key]
        if kind is not None and (not isinstance(at.value, kind) or isinstance(at.value, bool)):
            return None
        failed = reader(self, key, at.node[key], at)
        return (None if failed else ("", key)) if isinstance(failed, bool) else failed

    def within(self, at: _At, way: str, node: Any, *value: Any) -> Failure:
        """Check the value `at`, or a value inside it, against a schema at `way`."""
        new: Seen = None if at.seen is None else set()
        inside, seen = (value[0], new) if value else (at.value, at.seen)
        failed = self.apply(node, inside, _inside(node, at.resolver, _draft(node, at.draft)), at.draft, seen)
        if failed == ("", "false") and way.count("/") == 1:
            return "", way[1:]
        return failed and (way + failed[0], failed[1])

    def holds(self, at: _At, node: Any, *value: Any) -> bool:
        return self.within(at, "", node, *value) is None

    # -- schemas of the same value

    def reference(self, key: str, ref: Any, at: _At) -> Failure:
        if key != "$ref" and at.draft < 2019:
            return None
        target = lookup(at.resolver, ref, "#", key)
        failed = self.apply(target.contents, at.value, target.resolver, at.draft, at.seen)
        return failed and (f"/{key}{failed[0]}", failed[1])

    def all_of(self, key: str, given: Any, at: _At) -> Failure:
        parts = enumerate(given) if isinstance(given, list) else [("", given)]
        fails = (self.within(at, f"/{key}/{i}".rstrip("/"), part) for i, part in parts)
        return next(filter(None, fails), None)

    def any_of(self, key: str, given: Any, at: _At) -> bool:
        held = (self.holds(at, part) for part in given)
        return any(held) if at.seen is None else any(list(held))

    def one_of(self, key: str, given: Any, at: _At) -> bool:
        if self.check.coerces:
            return self.any_of(key, given, at)
        return sum(itertools.islice(filter(None, (self.holds(at, part) for part in given)), 2)) == 1

    def not_(self, key: str, given: Any, at: _At) -> bool:
        return not self.holds(at, given, at.value)

    def if_(self, key: str, given: Any, at: _At) -> Failure:
        branch = "then" if self.holds(at, given) else "else"
        return self.within(at, f"/{branch}", at.node[branch]) if branch in at.node else None

    def type_(self, key: str, given: Any, at: _At) -> bool:
        return any(
            self.holds(at, each) if isinstance(each, dict) else _is_type(each, at.value, at.draft)
            for each in (given if isinstance(given, list) else [given])
        )

    def disallow(self, key: str, given: Any, at: _At) -> bool:
        return not self.type_(key, given, replace(at, seen=None if at.seen is None else set()))

    def dependencies(self, key: str, given: Any, at: _At) -> Failure:
        for name, need in given.items():
            if name not in at.value:
                continue
            if isinstance(need, bool | dict):
                if failed := self.within(at, f"/{key}{pointer(name)}", need):
                    return failed
            elif not at.value.keys() >= set([need] if isinstance(need, str) else need):
                return "", key
        return None

    # -- objects

    def properties(self, key: str, given: Any, at: _At) -> Failure:
        for name, value in at.value.items():
            if name in given:
                self.mark(at, [name])
                if failed := self.within(at, f"/{key}{pointer(name)}", given[name], value):
                    return failed
        if at.draft == 3:
            for name, part in given.items():
                if name not in at.value and isinstance(part, dict) and part.get("required") is True:
                    return f"/{key}{pointer(name)}", "required"
        return None

    def by_pattern(self, key: str, given: Any, at: _At) -> Failure:
        for pattern, part in given.items():
            names = [name for name in at.value if self.check.finds(pattern, name)]
            if failed := self.members(f"/{key}{pointer(pattern)}", part, names, at):
                return failed
        return None

    def additional(self, key: str, given: Any, at: _At) -> Failure:
        named, patterns = at.node.get("properties", {}), at.node.get("patternProperties", {})
        rest = [
            name for name in at.value
            if name not in named and not any(self.check.finds(pattern, name) for pattern in patterns)
        ]  # fmt: skip
        return self.members(f"/{key}", given, rest, at)

    def unevaluated(self, key: str, given: Any, at: _At) -> Failure:
        names = at.value if isinstance(at.value, dict) else range(len(at.value))
        return self.members(f"/{key}", given, [name for name in names if name not in (at.seen or ())], at)

    def names(self, key: str, given: Any, at: _At) -> Failure:
        fails = (self.within(at, f"/{key}", given, name) for name in at.value)
        return next(filter(None, fails), None)

    def members(self, way: str, node: Any, steps: Iterable[Any], at: _At) -> Failure:
        """Check the members of an object or array at some names or places."""
        for step in steps:
            self.mark(at, [step])
            if failed := self.within(at, way, node, at.value[step]):
                return failed
        return None

    def mark(self, at: _At, steps: Iterable[Any]) -> None:
        if at.seen is not None:
            at.seen.update(steps)

    # -- arrays

    def items(self, key: str, given: Any, at: _At) -> Failure:
        if key == "prefixItems" and at.draft < 2020:
            return None
        if isinstance(given, list):
            pairs = zip(range(len(at.value)), given, strict=False)
            fails = (self.members(f"/{key}/{i}", part, [i], at) for i, part in pairs)
            return next(filter(None, fails), None)
        first = len(at.node.get("prefixItems", ())) if at.draft >= 2020 else 0
        return self.members(f"/{key}", given, range(first, len(at.value)), at)

    def additional_items(self, key: str, given: Any, at: _At) -> Failure:
        first = at.node.get("items")
        if not isinstance(first, list):
            return None
        return self.members(f"/{key}", given, range(len(first), len(at.value)), at)

    def contains(self, key: str, given: Any, at: _At) -> Failure:
        places = [i for i, value in enumerate(at.value) if self.holds(at, given, value)]
        has_counts = at.draft >= 2019
        least = at.node.get("minContains", 1) if has_counts else 1
        most = at.node.get("maxContains", math.inf) if has_counts else math.inf
        if at.draft >= 2020:
            self.mark(at, places)
        if len(places) < least:
            return "", "minContains" if least != 1 else key
        return ("", "maxContains") if len(places) > most else None

    def unique(self, key: str, wanted: bool, at: _At) -> bool:
        return not wanted or len(set(map(_hashable, at.value))) == len(at.value)

    # -- values

    def enum(self, key: str, given: Any, at: _At) -> bool:
        if id(given) not in self.check.enums:
            self.check.enums[id(given)] = given, frozenset(map(_hashable, given))
        return _hashable(at.value) in self.check.enums[id(given)][1]

    def pattern(self, key: str, given: Any, at: _At) -> bool:
        return self.check.finds(given, at.value)

    def format_(self, key: str, given: Any, at: _At) -> bool:
        return self.check.formats(given, at.value) is not False


def _hashable(value: Any) -> Any:
    """Return a key that is equal for equal JSON values: 1 is 1.0 and not true, and members have no order."""
    if isinstance(value, dict):
        return "object", frozenset((name, _hashable(each)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return "array", tuple(map(_hashable, value))
    return ("boolean", value) if isinstance(value, bool) else _exact(value)


def _exact(value: Any) -> Any:
    """Return a number as it is written; a float as its shortest decimal."""
    return Decimal(repr(value)) if isinstance(value, float) else value


_TYPES = {"string": str, "boolean": bool, "null": type(None), "array": list, "object": dict, "any": object}


def _is_type(name: str, value: Any, draft: int) -> bool:
    if name in _TYPES:
        return isinstance(value, _TYPES[name])
    if not isinstance(value, int | Decimal) or isinstance(value, bool):
        return False
    return name == "number" or isinstance(value, int) or (draft > 4 and value == value.to_integral_value())


def _compared(holds: Callable[[Any, Any], bool]) -> Callable[..., bool]:
    return lambda run, key, limit, at: isinstance(limit, bool) or holds(at.value, _exact(limit))


def _sized(holds: Callable[[int, Any], bool]) -> Callable[..., bool]:
    return lambda run, key, limit, at: holds(len(at.value), limit)


def _strict(key: str, holds: Callable[[Any, Any], bool]) -> Callable[..., bool]:
    """Return a bound that draft 4's boolean `key` makes exclusive."""
    return lambda run, _, limit, at: holds(at.value, _exact(limit)) and not (
        at.node.get(key) is True and at.value == _exact(limit)
    )


def _is_multiple(run: _Run, key: str, divisor: Any, at: _At) -> bool:
    return Fraction(at.value) % Fraction(_exact(divisor)) == 0


_NUMBER = int | Decimal
_READERS: dict[str, tuple[Any, Callable[..., Failure | bool]]] = {       # type of value that a keyword applies to
    **dict.fromkeys(REFERENCES, (None, _Run.reference)),
    **dict.fromkeys(("allOf", "extends"), (None, _Run.all_of)),
    "anyOf": (None, _Run.any_of), "oneOf": (None, _Run.one_of), "not": (None, _Run.not_), "if": (None, _Run.if_),
    "type": (None, _Run.type_), "disallow": (None, _Run.disallow), "enum": (None, _Run.enum),
    "const": (None, lambda run, key, const, at: _hashable(at.value) == _hashable(const)),
    "minimum": (_NUMBER, _strict("exclusiveMinimum", lambda value, limit: value >= limit)),
    "maximum": (_NUMBER, _strict("exclusiveMaximum", lambda value, limit: value <= limit)),
    "exclusiveMinimum": (_NUMBER, _compared(lambda value, limit: value > limit)),
    "exclusiveMaximum": (_NUMBER, _compared(lambda value, limit: value < limit)),
    **dict.fromkeys(("multipleOf", "divisibleBy"), (_NUMBER, _is_multiple)),
    **{f"min{kind}": (of, _sized(lambda size, limit: size >= limit))
       for kind, of in (("Length", str), ("Items", list), ("Properties", dict))},
    **{f"max{kind}": (of, _sized(lambda size, limit: size <= limit))
       for kind, of in (("Length", str), ("Items", list), ("Properties", dict))},
    "pattern": (str, _Run.pattern), "format": (str, _Run.format_),
    "uniqueItems": (list, _Run.unique),
    "items": (list, _Run.items), "prefixItems": (list, _Run.items), "additionalItems": (list, _Run.additional_items),
    "contains": (list, _Run.contains), "unevaluatedItems": (list, _Run.unevaluated),
    "properties": (dict, _Run.properties), "patternProperties": (dict, _Run.by_pattern),
    "additionalProperties": (dict, _Run.additional), "unevaluatedProperties": (dict, _Run.unevaluated),
    "propertyNames": (dict, _Run.names),
    "required": (dict, lambda run, key, names, at: isinstance(names, bool) or at.value.keys() >= set(names)),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), (dict, _Run.dependencies)),
}  # fmt: skip
