"""Python types as JSON: the schema of a type, and the reader of its values. Both are pydantic's.

`TypeSchema` narrows pydantic's schema so that its texts can be read back. Objects have no members that their type does
not name, and formats are patterns of what pydantic reads. `read` checks all else on the finished text.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import math
import re
import sys
import typing
import zoneinfo
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

from llmppl.constraints.automata.formats import (
    FORMATS,
    digits_between,
    either,
    ipv6,
    same_length,
    signed,
)
from llmppl.constraints.json.ecma import matcher
from llmppl.constraints.json.keywords import likely, nodes
from llmppl.constraints.json.scalars import num_decimals
from llmppl.support.arguments import is_hashable, shown

Node = dict[str, Any]
PLACES = 4  # of a Decimal without decimal_places
MAX_PLACES = 18  # of any other
WHOLE = 15  # digits of a Decimal before the point, without max_digits
_ROUNDED: dict[str, Callable[[Any], int]] = {  # the nearest integer within a bound
    "ge": math.ceil,
    "gt": lambda bound: math.floor(bound) + 1,
    "le": math.floor,
    "lt": lambda bound: math.ceil(bound) - 1,
}
BOUNDS = tuple(_ROUNDED)
_NUMBER = r"(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,18})?"
_PLAIN = rf'(?:null|true|false|-?{_NUMBER}|"[^"\\\x00-\x1f]*")'
_OFFSET = "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_MOMENTS = {
    date: FORMATS["date"],
    time: FORMATS["time"],
    datetime: f"{FORMATS['date']}T{FORMATS['time']}",
}
_YEARS = f"{either(digits_between(0, 2739722))}Y(?:[0-9]{{1,3}}D)?|273972[3-6]Y(?:[0-9]D)?"  # of a timedelta
_TIME = r"T(?:[0-9]{1,2}H)?(?:[0-9]{1,2}M)?(?:[0-9]{1,2}(?:\.[0-9]{1,6})?S)?"
_DURATION = f"P(?:{_YEARS}|[0-9]{{1,8}}D)?(?:{_TIME})?"
_OTHER = "(?!(?:https?|wss?|ftp|file):)[a-z][a-z0-9+.-]*"
_LETTERS = "[A-Za-z0-9]*(?:-[A-Za-z0-9]+)*"
_PORT = either(digits_between(1, 65535))
_HOST = rf"(?:(?:(?![-.]){_LETTERS}\.)*[A-Za-z]{_LETTERS}|{FORMATS['ipv4']})(?::{_PORT})?"
_USER = r"(?:[A-Za-z0-9._~!$&()*+;=-]|%[0-9A-Fa-f]{2})*"
_AFTER_HOST = r"(?:[A-Za-z0-9._~!$&()*+;=',:@/|[\]?#-]|%[0-9A-Fa-f]{2})*"
_NETWORK = either(  # n + 1 bits of an address, and zeros
    r"\.".join(
        [either(digits_between(0, 255))] * (n // 8)
        + [either(map(str, range(0, 256, 128 >> n % 8)))]
        + ["0"] * (3 - n // 8)
    )
    + f"/{n + 1}"
    for n in range(32)
)
_NETWORK_6 = either(
    f"{':'.join(['[0-9a-f]{1,4}'] * n)}::/{either(digits_between(16 * n, 128))}" for n in range(8)
)
_INTERFACE = FORMATS["ipv4"] + "(?:/(?:3[0-2]|[12]?[0-9]))?"
_INTERFACE_6 = f"{ipv6()}(?:/{either(digits_between(0, 128))})?"
_HEX = "[0-9A-Fa-f]"
_PART = r"(?:0|[1-9][0-9]{0,20})(?:\.[0-9]{1,18})?(?:e[+-]?[0-9]{1,2})?"
_PATTERNS = {  # by pydantic's formats and kinds
    "ipvanyaddress": f"{FORMATS['ipv4']}|{ipv6()}",
    "ipv4interface": _INTERFACE,
    "ipv6interface": _INTERFACE_6,
    "ipvanyinterface": f"{_INTERFACE}|{_INTERFACE_6}",
    "ipv4network": _NETWORK,
    "ipv6network": _NETWORK_6,
    "ipvanynetwork": f"{_NETWORK}|{_NETWORK_6}",
    "fraction": r"-?[0-9]{1,18}(?:/[1-9][0-9]{0,17})?",
    "complex": f"-?{_PART}(?:[+-]{_PART}j)?|-?{_PART}j",
    **{
        f"uuid{n}": f"{_HEX}{{8}}-{_HEX}{{4}}-{n}{_HEX}{{3}}-[89ABab]{_HEX}{{3}}-{_HEX}{{12}}"
        for n in range(1, 9)
    },
    **{
        name: f"(?:{char}{{4}})*(?:{char}[AQgw]==|{char}{{2}}[AEIMQUYcgkosw048]=)?"
        for name, char in (("base64", "[A-Za-z0-9+/]"), ("base64url", "[A-Za-z0-9_-]"))
    },
}
_BYTES = {
    "hex": {"pattern": f"^(?:{_HEX}{{2}})*$"},
    "base64": {"pattern": f"^{_PATTERNS['base64url']}$"},
}
_SPACES = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_KINDS = {r"\d": r"\p{Nd}", r"\w": r"\p{L}\p{Mn}\p{Mc}\p{Nd}\p{Nl}\p{Pc}", r"\s": _SPACES}
_TRIMMED = rf"^(?:[^{_SPACES}](?:[\s\S]*[^{_SPACES}])?)?$"


def schema_of(kind: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the JSON schema of a type, and the constraints that it lacks, as sentences.

    Raises TypeError if the values of the type have no JSON.
    """
    return _of(kind)[1:]


def read(kind: Any, value: Any, *, json: bool) -> Any:
    """Return `value`, which is JSON text if `json`, as an object of a type. Raises ValueError if it is none."""
    from pydantic import ValidationError

    adapter = _of(kind)[0]
    try:
        return adapter.validate_json(value) if json else adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        message = first["msg"]
        raise ValueError(f"{place}: {message}" if place else message) from error


def _of(kind: Any) -> tuple[Any, dict[str, Any], list[str]]:
    make = _made if is_hashable(kind) else _made.__wrapped__
    return make(kind)


@functools.lru_cache(64)
def _made(kind: Any) -> tuple[Any, dict[str, Any], list[str]]:
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    generator = _type_schema()()
    try:
        adapter = TypeAdapter(readable(kind))
        schema = adapter.json_schema(schema_generator=lambda **options: generator)  # type: ignore[arg-type]
    except (PydanticUserError, NameError, RecursionError) as error:
        why = str(error).partition("\n")[0].rstrip(".")
        raise TypeError(
            f"a constraint cannot be the type {shown(kind)}: {why}. A pydantic model, a dataclass, a TypedDict, "
            "Literal[...], an Enum, int, list[...] and the like would work; for other texts Regex(...) or Grammar(...)"
        ) from None
    for _, node in nodes(schema):  # pydantic closes objects after their fields are read
        if node.get("type") == "object":
            node.setdefault("additionalProperties", False)
        for key in node.keys() & {*BOUNDS, "multiple_of"}:  # of a Union, or after a validator
            keyword = likely(key, node)
            if keyword:
                node[keyword] = node.pop(key)
    return adapter, schema, list(dict.fromkeys(generator.missing))


@functools.lru_cache(1)
def _type_schema() -> Any:
    """Return pydantic's generator of schemas with the changes of this module."""
    from pydantic.errors import PydanticInvalidForJsonSchema
    from pydantic.json_schema import GenerateJsonSchema
    from pydantic_core import PydanticOmit, SchemaValidator, to_json

    class TypeSchema(GenerateJsonSchema):
        """Schema of a type. `missing` lists what it lacks."""

        ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.missing: list[str] = []

        def _warn(self, what: str) -> None:
            self.missing.append(f"{what} is checked on the finished text")

        def generate_inner(self, schema: Any) -> Node:
            node = super().generate_inner(schema)
            kind = schema["type"]
            name = node.get("format", kind)
            if kind.startswith("function-"):
                self._warn_of_validator(schema["function"]["function"])
            if kind in ("model", "dataclass") and (
                schema.get("custom_init") or schema.get("post_init")
            ):
                self._warn(f"'__init__' or '__post_init__' of {schema['cls'].__name__!r}")
            if kind == "chain" or callable(schema.get("discriminator")):
                self._warn(f"pydantic's {kind!r} schema")
            if name in _PATTERNS:
                return _text(_PATTERNS[name])
            if kind == "is-subclass":
                raise PydanticInvalidForJsonSchema("a class has no JSON")
            if name == "zoneinfo":
                return {"enum": sorted(zoneinfo.available_timezones())}
            if name in ("path", "file-path", "directory-path", "password", "binary", "json-string"):
                node.pop("format", None)
            return node

        def _warn_of_validator(self, function: Any) -> None:
            name = getattr(getattr(function, "func", function), "__qualname__", repr(function))
            module = str(getattr(function, "__module__", ""))
            is_masked = module.startswith(("pydantic.", "ipaddress", "typing", "operator"))
            if not is_masked or name.startswith(
                ("ByteSize", "EncodedStr", "PathType", "import", "apply_known")
            ):
                self._warn(f"the validator {name!r}")

        def tagged_union_schema(self, schema: Any) -> Node:
            node = super().tagged_union_schema(schema)
            tag = node.get("discriminator", {}).get("propertyName")
            choices = node["oneOf"]
            if tag:
                choices = [{"allOf": [choice, {"required": [tag]}]} for choice in choices]
            return {"anyOf": choices}

        # ---- numbers and strings

        def decimal_schema(self, schema: Any) -> Node:
            bounds = {key: Decimal(str(bound)) for key, bound in _bounds(schema).items()}
            digits = schema.get("max_digits")
            places = schema.get("decimal_places")
            step = schema.get("multiple_of")
            most = WHOLE
            if digits is not None:
                most = max(digits - (places or 0), 0)
            if not most:  # pydantic refuses 0, too
                self._warn(f"'max_digits' {digits}")
            if step is not None:
                exact = Fraction(str(step))
                decimals = num_decimals(exact)
                places = decimals if places is None else min(places, decimals)
                if exact * 10**decimals != 1:  # not every number of so many places
                    self._warn(f"'multiple_of' {step}")
            if not bounds and digits is None and places is None:
                return _text(rf"-?{_NUMBER}(?:E[+-]?[0-9]{{1,2}})?")
            places = min(PLACES if places is None else places, digits or MAX_PLACES)
            found = []
            for n in range(places + 1):
                limit = 10 ** min(most + n, digits or most + n) - 1
                ends = {key: _ROUNDED[key](bound * 10**n) for key, bound in bounds.items()}
                low = max(-limit, ends.get("ge", -limit), ends.get("gt", -limit))
                high = min(limit, ends.get("le", limit), ends.get("lt", limit))
                found.append(_between(low, high, n))
            return _text(either(found))

        def str_schema(self, schema: Any) -> Node:
            given = schema.get("pattern")
            bare: Any = {key: each for key, each in schema.items() if key != "pattern"}
            node = super().str_schema(bare)
            if schema.get("strip_whitespace") and (given or schema.get("min_length")):
                node["allOf"] = [{"pattern": _TRIMMED}]
            if given is None:
                return node
            text = given
            flags = 0
            if isinstance(given, re.Pattern):
                text = given.pattern
                flags = given.flags & ~re.UNICODE
            try:
                pattern = _in_ecma(text)
                matcher(pattern)
            except ValueError:
                pattern = None
            if flags or pattern is None:
                self._warn(f"the pattern {text!r}")
            else:
                node["pattern"] = pattern
            return node

        def bytes_schema(self, schema: Any) -> Node:
            if schema.get("min_length") or schema.get("max_length") is not None:
                self._warn("the number of bytes")
            return {"type": "string"} | _BYTES.get(self._config.val_json_bytes, {})

        def url_schema(self, schema: Any) -> Node:
            schemes = [*map(re.escape, schema.get("allowed_schemes") or [])]
            if not schemes:
                schemes = ["http", "https", "ftp", _OTHER]
            pattern = f"(?:{'|'.join(schemes)})://"
            if schemes != ["file"]:
                pattern += f"(?:{_USER}(?::{_USER})?@)?{_HOST}"
                if schema["type"] == "multi-host-url":
                    pattern += f"(?:,{_HOST})*"
            pattern += f"(?:[/?#]{_AFTER_HOST})?"
            if _OTHER in schemes:
                pattern += f"|{_OTHER}:(?!/){_AFTER_HOST}"
            node = _text(pattern)
            if schema.get("max_length", math.inf) < 2083:
                node["maxLength"] = schema["max_length"]
            return node

        multi_host_url_schema = url_schema

        # ---- dates and times

        def _moment(self, schema: Any, kind: Any) -> Node:
            """Return dates or times; bounds compare days or minutes, and those of times include the day or minute."""
            zone = schema.get("tz_constraint")
            if kind is date or zone == "naive":
                offset = ""
            elif zone:
                offset = _OFFSET
            else:
                offset = f"{_OFFSET}?"
            node = _text(f"{_MOMENTS[kind]}{offset}")
            bounds = _bounds(schema)
            if bounds and kind is not date:
                self._warn("the bound of a date or time")
            if schema.get("now_op"):  # two days apart, whatever the time zone
                two_days = timedelta(days=2)
                if schema["now_op"] == "past":
                    bounds["le"] = date.today() - two_days
                else:
                    bounds["ge"] = date.today() + two_days
            if not bounds or any(getattr(bound, "tzinfo", None) for bound in bounds.values()):
                return node
            first, last = ("00:00", "23:59") if kind is time else ("0001-01-01", "9999-12-31")
            ends = {key: str(bound)[: len(first)] for key, bound in bounds.items()}
            low = max(ends.get("ge", first), ends.get("gt", first))
            high = min(ends.get("le", last), ends.get("lt", last))
            between = same_length(low, high) if low <= high else "[]"
            node["allOf"] = [{"pattern": f"^{between}"}]
            node["not"] = {"enum": [str(bounds.get(key)) for key in ("gt", "lt")]}
            return node

        date_schema = functools.partialmethod(_moment, kind=date)
        time_schema = functools.partialmethod(_moment, kind=time)
        datetime_schema = functools.partialmethod(_moment, kind=datetime)

        def timedelta_schema(self, schema: Any) -> Node:
            if self._config.ser_json_timedelta == "float":
                return {"type": "number", "minimum": -86399999913600, "maximum": 86399999999999}
            bounds = _bounds(schema)
            if bounds not in ({}, {"ge": timedelta(0)}):
                self._warn("the bound of a timedelta")
            low = max(bounds.get("ge", timedelta.min), bounds.get("gt", timedelta.min))
            sign = "-?" if low < timedelta(0) else ""
            return {**_text(f"{sign}{_DURATION}"), "allOf": [{"pattern": "[0-9][A-Z]$"}]}

        # ---- choices, arrays, objects

        def literal_schema(self, schema: Any) -> Node:
            return self._listed(schema, super().literal_schema(schema))

        def enum_schema(self, schema: Any) -> Node:
            node = super().enum_schema(schema)
            members = schema["members"]
            if issubclass(schema["cls"], enum.Flag) and len(members) <= 10:  # 2**10 combinations
                unions = {0}
                for flag in members:
                    unions |= {each | flag.value for each in unions}
                node = {"type": "integer", "enum": sorted(unions)}
            return self._listed(schema, node)

        def _listed(self, schema: Any, node: Node) -> Node:
            """Return the choices of a node that pydantic reads from JSON."""
            given = node["enum"] if "enum" in node else [node["const"]]
            known = []
            reads = SchemaValidator(
                {key: each for key, each in schema.items() if key not in ("ref", "serialization")}
            )
            for value in given:
                with contextlib.suppress(ValueError):
                    reads.validate_json(to_json(value))
                    known.append(value)
            if not known:
                raise PydanticInvalidForJsonSchema("no value of it can be read from JSON")
            return node if known == given else node | {"enum": known}

        def set_schema(self, schema: Any) -> Node:
            node = super().set_schema(schema)
            if node.get("minItems", 0) < 2:  # pydantic merges equal elements
                node.pop("uniqueItems", None)
            return node

        frozenset_schema = set_schema

        def json_schema(self, schema: Any) -> Node:
            self._warn("the JSON in a string, a plain value or a list of these,")
            return _text(rf"{_PLAIN}|\[(?:{_PLAIN}(?:, ?{_PLAIN})*)?\]")

        def dict_schema(self, schema: Any) -> Node:
            node = super().dict_schema(schema)
            if "keys_schema" not in schema:
                return node
            names: Any = self.generate_inner(schema["keys_schema"])
            if "$ref" in names:
                names = self.resolve_ref_schema(names)
            listed = names.get("enum", [])
            if "const" in names:
                listed = [names["const"]]
            if listed:
                words = [
                    each if isinstance(each, str) else to_json(each).decode() for each in listed
                ]
                node["propertyNames"] = {"enum": words}
            elif names.get("type") == "integer" and "multipleOf" not in names:
                most = 10**18
                low = max(names.get("minimum", -most), names.get("exclusiveMinimum", -most) + 1)
                high = min(names.get("maximum", most), names.get("exclusiveMaximum", most) - 1)
                node["propertyNames"] = _text(_between(low, high))
            elif names and names.get("type") != "string":
                self._warn("the key of a dict")
            return node

        def dataclass_field_schema(self, schema: Any) -> Node:
            if schema.get("init") is False:
                raise PydanticOmit
            return super().dataclass_field_schema(schema)

    return TypeSchema


def _in_ecma(pattern: str) -> str:
    """Return a pattern of pydantic's, whose classes are those of Unicode, as ECMA-262 writes it.

    Raises ValueError for a complement inside of a class.
    """

    def converted(token: re.Match[str]) -> str:
        text = token[0]
        if text[0] == "[":
            if {r"\D", r"\W", r"\S"} & {*re.findall(r"\\.", text)}:
                raise ValueError(f"a complement inside of {text}")
            return re.sub(r"\\.", lambda escape: _KINDS.get(escape[0], escape[0]), text)
        if text in _KINDS:
            return f"[{_KINDS[text]}]"
        if text.lower() in _KINDS:
            return f"[^{_KINDS[text.lower()]}]"
        return {"(?P<": "(?<", r"\A": "^", r"\z": "$", r"\Z": "$"}.get(text, text)

    return re.sub(r"\[\^?(?:\\.|[^\\\]])*\]|\\.|\(\?P<", converted, pattern, flags=re.DOTALL)


def _between(low: int, high: int, places: int = 0) -> str:
    """Return the pattern of the numbers from low / 10**places to high / 10**places."""
    if low > high:
        return "[]"

    def magnitude(low: float, high: float, low_in: bool, high_in: bool) -> str:
        return either(digits_between(int(low) + (not low_in), int(high), places))

    return signed(low, high, True, True, magnitude)


def _bounds(schema: Any) -> dict[str, Any]:
    return {key: schema[key] for key in BOUNDS if schema.get(key) is not None}


def _text(pattern: str) -> Node:
    return {"type": "string", "pattern": f"^(?:{pattern})$"}


def readable(kind: Any) -> Any:
    """Replace every `typing.TypedDict` in a type by that of `typing_extensions`, which pydantic needs before 3.12."""
    if sys.version_info >= (3, 12):
        return kind
    if typing.is_typeddict(kind) and type(kind).__module__ == "typing":
        from typing_extensions import TypedDict

        fields = {}
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            is_marked = typing.get_origin(hint) in (typing.Required, typing.NotRequired)
            bare = readable(typing.get_args(hint)[0] if is_marked else hint)
            fields[name] = bare if name in kind.__required_keys__ else typing.NotRequired[bare]
        return TypedDict(kind.__name__, fields)  # type: ignore[operator]
    origin = typing.get_origin(kind)
    if origin in (None, typing.Literal):
        return kind
    inner = typing.get_args(kind)
    new = tuple(map(readable, inner))
    if new == inner:
        return kind
    return typing.Union[new] if origin.__module__ == "types" else origin[new]  # noqa: UP007
