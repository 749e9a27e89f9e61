"""JSON texts for tests: admission by masks over bytes and `parse`, spellings, walks, mutants, and two validators.

A `Reader` says which part of a constraint refuses a text. `reasons` names the properties of a spelling that explain a
refusal: a text with the same value and another spelling is admitted.
"""

import json
import re
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from math import inf
from typing import Any

import jsonschema
import pytest
from jsonschema_specifications import REGISTRY
from referencing import Resource
from referencing.jsonschema import DRAFT202012

from helpers.common import BYTES
from llmppl import JsonSchema

DEL = "\\u007F"
NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|[a-z]+|[\[\]{}:,]|\s+', re.DOTALL)
KEYWORDS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")


class Reader:
    """A schema over single bytes."""

    def __init__(self, schema: Any, **options: Any) -> None:
        self.schema = schema
        self.constraint = JsonSchema(schema, **options)
        self.index = self.constraint.index(BYTES)

    def refusal(self, text: str) -> str:
        """Return the part that refuses a text: "masks", "parse", or "" if it is admitted."""
        try:
            if not self.index.accepts(self.index.after(text.encode())):
                return "masks"
        except ValueError:
            return "masks"
        try:
            self.constraint.parse(text)
        except ValueError:
            return "parse"
        return ""

    def admits(self, text: str) -> bool:
        return not self.refusal(text)


# ---- spellings


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def with_numbers(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Return a value with each of its numbers converted."""
    if isinstance(value, list):
        return [with_numbers(each, convert) for each in value]
    if isinstance(value, dict):
        return {name: with_numbers(each, convert) for name, each in value.items()}
    return convert(value) if type(value) in (int, float) else value


def as_float(number: Any) -> Any:
    return float(number) if abs(number) < 1e17 else number


def as_integer(number: Any) -> Any:
    return int(number) if isinstance(number, float) and number.is_integer() else number


def without_formats(schema: Any) -> Any:
    """Return a schema without the keyword `format`; properties of that name stay."""
    if isinstance(schema, list):
        return [without_formats(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: part for key, part in schema.items() if not (key == "format" and isinstance(part, str))}
    return {
        key: {name: without_formats(each) for name, each in part.items()}
        if key in KEYWORDS_OF_SCHEMAS and isinstance(part, dict)
        else part
        if key in ("enum", "const")
        else without_formats(part)
        for key, part in kept.items()
    }


def has_repeats(text: str) -> bool:
    """Return True if an object of the text repeats a name."""
    repeats: list[bool] = []
    json.loads(text, object_pairs_hook=lambda pairs: repeats.append(len(dict(pairs)) < len(pairs)) or dict(pairs))
    return any(repeats)


def differences(text: str, usual: str) -> str:
    """Return the kinds of tokens in which a text differs from its usual spelling."""
    if has_repeats(text):
        return "repeated names"
    old, new = ([token for token in TOKENS.findall(each) if token.strip()] for each in (text, usual))
    found = set() if len("".join(old)) == len(text) else {"whitespace"}
    for at, (a, b) in enumerate(zip(old, new, strict=False)):
        if a != b:
            is_name = a[0] == '"' and old[at + 1 : at + 2] == [":"]
            found.add("escaped name" if is_name else "string's escapes" if a[0] == '"' else "number's spelling")
    return " and ".join(sorted(found)) or "none"


def reason(reader: Reader, text: str, **options: Any) -> str:
    """Return the reason for the refusal of a valid text, "unexplained" if another spelling is refused too."""
    value = json.loads(text)
    ways = {"as it is": value, "integers": with_numbers(value, as_integer), "floats": with_numbers(value, as_float)}
    for way, each in ways.items():
        usual = compact(each)
        for spelling in (usual, usual.replace("\x7f", DEL)):
            if reader.admits(spelling):
                return differences(text, spelling)
        if Reader(reader.schema, order="any", **options).admits(usual):
            return "order" if way == "as it is" else "number's spelling"
    if any(len(number) > 17 or "e" in number.lower() for number in map(compact, numbers(value))):
        return "number's spelling"
    bare = without_formats(reader.schema)
    return "format" if bare != reader.schema and Reader(bare, lenient=True, **options).admits(text) else "unexplained"


def numbers(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, dict)):
        for each in value if isinstance(value, list) else value.values():
            yield from numbers(each)
    elif not isinstance(value, (str, bool, type(None))):
        yield value


# ---- walks and mutants

CLOSING = b'"}]'


def walk(reader: Reader, rng: Any, length: int = 80, most: int = 400) -> str | None:
    """Draw a text byte by byte from the masks, with a bias to its end; None if it does not end in `most` bytes."""
    index, state, text = reader.index, reader.index.start, bytearray()
    while len(text) < most:
        coming, late = index.next_bytes(state), len(text) > length
        if index.accepts(state) and (not coming or late or rng.random() < 0.3):
            return text.decode()
        closing = [byte for byte in CLOSING if byte in coming]
        plain = [byte for byte in coming if 32 <= byte < 127]
        if closing and (late or rng.random() < 0.25):
            some = closing
        else:
            some = plain if plain and (late or rng.random() < 0.97) else list(coming)
        byte = some[int(rng.integers(len(some)))]
        text.append(byte)
        state = index.advance(state, byte)
    return None


def mutant(text: str, rng: Any) -> str:
    """Return a text with one change, which may be no JSON any more."""
    kind, at = rng.integers(9), int(rng.integers(len(text)))
    if kind == 0:
        return text[:at] + text[at + 1 :]
    if kind == 1:
        return text[:at] + chr(rng.integers(32, 127)) + text[at:]
    if kind == 2:
        return text[:at] + chr(rng.integers(32, 127)) + text[at + 1 :]
    if kind == 3:
        end = at + int(rng.integers(1, 12))
        return text[:end] + text[at:end] + text[end:]
    if kind == 4:
        return changed_number(text, rng)
    if kind == 5:
        names = list(re.finditer(r'"(\w)(\w*)"(?=\s?:)', text))
        found = names[int(rng.integers(len(names)))] if names else None
        return f'{text[: found.start()]}"\\u{ord(found[1]):04x}{found[2]}"{text[found.end() :]}' if found else text
    if kind == 8:
        return repeated(text, rng)
    value = json.loads(text)
    return json.dumps(changed(value, rng), ensure_ascii=False, separators=(",", ":") if kind == 6 else None)


def repeated(text: str, rng: Any) -> str:
    """Return a text in which the last object, if it has members, repeats a name with another value."""
    names, end = re.findall(r'"(\w)(\w*)"(?=\s?:)', text), text.rfind("}")
    if not names or text[:end].rstrip().endswith("{"):
        return text
    first, rest = names[int(rng.integers(len(names)))]
    name = f"\\u{ord(first):04x}{rest}" if rng.random() < 0.7 else first + rest
    return f'{text[:end]},"{name}":{["null", "1", "[]"][rng.integers(3)]}{text[end:]}'


def changed_number(text: str, rng: Any) -> str:
    found = [each for each in TOKENS.finditer(text) if NUMBER.fullmatch(each[0])]
    if not found:
        return text
    one = found[int(rng.integers(len(found)))]
    number = one[0]
    other = [f"{number}.0", f"{number}e0", f"-{number}", f"{number}0", str(rng.integers(-20, 200)), f"{number}.5"]
    return text[: one.start()] + other[int(rng.integers(len(other)))] + text[one.end() :]


def changed(value: Any, rng: Any) -> Any:
    """Return a value with one change: members swapped, dropped or added, an element repeated, another type."""
    inside = value if isinstance(value, list) else list(value) if isinstance(value, dict) else []
    if inside and rng.random() < 0.5:
        at = int(rng.integers(len(inside)))
        key = at if isinstance(value, list) else inside[at]
        copy = value.copy()
        copy[key] = changed(value[key], rng)
        return copy
    kind = int(rng.integers(4))
    if isinstance(value, dict):
        names = list(value)
        rng.shuffle(names)
        added: dict[str, Any] = {"new": 1} if kind == 2 else {}
        return {name: value[name] for name in names[kind == 1 :]} | added
    if isinstance(value, list):
        return [*value, *value[:1]] if kind == 0 else value[:-1] if kind == 1 else [*value, None] if kind == 2 else None
    others = [None, True, 0, 7, -1.5, "", "a", [], {}]
    return others[int(rng.integers(len(others)))]


# ---- two validators


class Validators:
    """The packages jsonschema, with exact decimals, and jsonschema-rs; without a verdict where they cannot read."""

    def __init__(self, schema: Any, resources: dict[str, Any] | None = None) -> None:
        given, default = resources or {}, jsonschema.Draft202012Validator
        exact = json.loads(json.dumps(schema), parse_float=Decimal)
        plain = jsonschema.validators.validator_for(schema, default)
        plain.check_schema(schema)
        kind = jsonschema.validators.extend(plain, type_checker=plain.TYPE_CHECKER.redefine("integer", is_integer))
        remote = [(uri, Resource.from_contents(each, DRAFT202012)) for uri, each in given.items()]
        self.python = kind(exact, registry=REGISTRY.with_resources(remote))
        jsonschema_rs = pytest.importorskip("jsonschema_rs")
        named = isinstance(schema, dict) and "$schema" in schema
        kind = jsonschema_rs.validator_cls_for(schema) if named else jsonschema_rs.Draft202012Validator
        self.rust = kind(schema, retriever=given.__getitem__, validate_formats=False)

    def verdicts(self, text: str) -> tuple[bool | None, bool | None]:
        """Return whether each finds the text valid: None without a verdict, False for a text that is no JSON."""
        try:
            value = json.loads(text, parse_constant=_refuse)
            exact = json.loads(text, parse_float=_exact)
        except ValueError:
            return False, False
        infinite = any(number in (inf, -inf) for number in numbers(value))        # jsonschema-rs reads doubles
        return _verdict(self.python, exact), None if infinite else _verdict(self.rust, value)


def is_integer(checker: Any, value: Any) -> bool:
    if isinstance(value, (float, Decimal)):
        exact = Decimal(value)
        return exact.is_finite() and exact == exact.to_integral_value()
    return isinstance(value, int) and not isinstance(value, bool)


def _verdict(validator: Any, value: Any) -> bool | None:
    try:
        return bool(validator.is_valid(value))
    except Exception:
        return None


def _exact(number: str) -> Decimal | float:
    try:
        return Decimal(number)
    except InvalidOperation:                            # the exponent is too large
        return float(number)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
