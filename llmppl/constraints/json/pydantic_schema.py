"""The JSON schema of a pydantic type, as narrow as pydantic reads it: pydantic's own generator, overridden.

Pydantic's core schema says which values a type reads, and its JSON schema leaves parts of that out. `TypeSchema` writes
each constraint of the core schema as keywords that masks read. It lists every other one in `warnings`, with its place.
The schema describes the JSON that pydantic itself writes (`dump_json`, aliases used) and the plain spellings beside it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticOmit, SchemaError, SchemaValidator, ValidationError, core_schema, to_json

from llmppl.constraints.automata.numerals import naturals, signed
from llmppl.constraints.json import type_patterns as patterns

__all__ = ["TypeSchema"]

Node = dict[str, Any]
MAX_NUMBER = 10**15                                 # of a Decimal that is written as a number, which passes a float
LONGEST = 86_399_999_913_600                        # seconds of a timedelta
CLASSES = "model", "dataclass", "typed-dict", "named-tuple"
INNER = (
    "schema", "json_schema", "items_schema", "keys_schema", "values_schema", "choices", "steps", "fields",
    "extras_schema", "arguments_schema", "var_args_schema", "var_kwargs_schema", "definitions",
)  # fmt: skip
HARMLESS = frozenset(                               # pydantic's own functions, whose texts the schema describes exactly
    "wrap_val path_validator sequence_validator defaultdict_validator deque_validator ordered_dict_any_validator "
    "SecretStr SecretBytes ip_v4_address_validator ip_v4_interface_validator ip_v6_address_validator "
    "ByteSize._validate Secret.__get_pydantic_core_schema__.<locals>.<lambda>".split()
)
UPDATES = {"pattern", "ge", "gt", "le", "lt", "multiple_of", "min_length", "max_length"}
NO_CHECK = (                                        # formats that check nothing, or as much as a validator
    "path", "file-path", "directory-path", "password", "binary", "base64", "base64url", "json-string", "regex",
)  # fmt: skip


class TypeSchema(GenerateJsonSchema):
    """Generator of the JSON schema of one type; `warnings` names the constraints that the schema lacks."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default", "skipped-discriminator"}  # noqa: RUF012

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.warnings: list[str] = []
        self._places: dict[int, str] = {}           # of core schemas, by id
        self._meant: dict[str, Any] = {}            # core schemas by their reference
        self._kept: list[Any] = []                  # changed core schemas, whose ids stay taken

    def generate(self, schema: Any, mode: Any = "validation") -> Node:
        for node, place in _nodes(schema, "#"):
            self._places[id(node)] = place
            if "ref" in node:
                self._meant[node["ref"]] = node
            self._check_functions(node)
        return super().generate(schema, mode)

    def generate_inner(self, schema: Any) -> Node:
        node = super().generate_inner(self._without_updates(schema))
        name = str(node.get("format", ""))
        if name in patterns.ADDRESSES:
            node["pattern"] = patterns.ADDRESSES[name]
        elif name == "ipvanyaddress":
            node["anyOf"] = [{"pattern": patterns.ADDRESSES["ipv4"]}, {"format": "ipv6"}]
        elif re.fullmatch("ipv6(network|interface)|ipvany.*|zoneinfo", name):
            self._warn(schema, f"the format {name!r}")
        elif name not in NO_CHECK and not ("pattern" in node and re.fullmatch("uuid[0-9]*", name)):
            return node
        node.pop("format")
        return node

    def _without_updates(self, schema: Any) -> Any:
        """Return a core schema without the keywords that pydantic adds to its JSON schema for a function's check."""
        notes = schema.get("metadata") or {}
        if not (notes.get("pydantic_js_updates") or {}).keys() & UPDATES:
            return schema
        updates = {key: value for key, value in notes["pydantic_js_updates"].items() if key not in UPDATES}
        made = {**schema, "metadata": {**notes, "pydantic_js_updates": updates}}
        self._kept.append(made)
        self._places[id(made)] = self._places.get(id(schema), "#")
        return made

    def _warn(self, schema: Any, what: str, fate: str = "is checked on the finished text") -> None:
        warning = f"{self._places.get(id(schema), '#')}: {what} {fate}"
        if warning not in self.warnings:
            self.warnings.append(warning)

    def _option(self, schema: Any, key: str, name: str, default: Any = None) -> Any:
        """Return a constraint of a core schema, or else the option `name` of the class around it."""
        found = schema.get(key)
        return getattr(self._config, name, default) if found is None else found

    # ---- functions: validators, initialisers, discriminators

    def _check_functions(self, node: Any) -> None:
        """Warn of the functions of a core schema, which may refuse any value."""
        kind = node.get("type", "")
        if kind.startswith("function-"):
            function = node["function"]["function"]
            function = getattr(function, "func", function)
            name = getattr(function, "__qualname__", type(function).__name__)
            module = str(getattr(function, "__module__", ""))
            is_own = {name, name.rpartition(".")[2]} & HARMLESS if _is_own(function) else module == "ipaddress"
            if not is_own:
                self._warn(node, f"the validator {name.rpartition('.<locals>.')[2]!r}")
        if kind == "model" and node.get("custom_init"):
            self._warn(node, "'__init__'")
        if kind in ("model", "dataclass") and node.get("post_init"):
            name = "__post_init__" if kind == "dataclass" else node["post_init"]
            hook = getattr(node["cls"], name, None)
            if not _is_own(hook) or getattr(hook, "__name__", "") == "wrapped_model_post_init":
                self._warn(node, f"{name!r}")
        if kind == "call" and not (isinstance(node["function"], type) and issubclass(node["function"], tuple)):
            self._warn(node, f"the function {getattr(node['function'], '__qualname__', '')!r}")
        if kind == "chain" and len(node["steps"]) > 1:
            self._warn(node, "all but the first step of a chain")

    def function_after_schema(self, schema: Any) -> Node:
        if getattr(schema["function"]["function"], "__qualname__", "") == "ByteSize._validate":
            return {"type": "integer", "minimum": 0}
        return super().function_after_schema(schema)

    def tagged_union_schema(self, schema: Any) -> Node:
        node = super().tagged_union_schema(schema)
        tag, choices = node.pop("discriminator", {}).get("propertyName"), node.pop("oneOf")
        if tag is None:
            self._warn(schema, "the discriminator")
            return {"anyOf": choices}
        return {"anyOf": [{**choice, "required": sorted({*choice.get("required", []), tag})} for choice in choices]}

    # ---- numbers

    def float_schema(self, schema: Any) -> Node:
        node = super().float_schema(schema)
        step = node.get("multipleOf")
        if step is not None and Fraction(step) != Fraction(str(step)):
            self._warn(schema, f"'multipleOf' {step} is that of decimal numbers,", "without the floats near it")
        is_bounded = {"ge", "gt"} & schema.keys() and {"le", "lt"} & schema.keys()
        if self._option(schema, "allow_inf_nan", "allow_inf_nan", True) is False and not is_bounded:
            self._warn(schema, "the bound of finite floats")
        return node

    def decimal_schema(self, schema: Any) -> Node:
        digits, places = schema.get("max_digits"), schema.get("decimal_places")
        infinite = schema.get("allow_inf_nan", self._config.config_dict.get("allow_inf_nan", False))
        bounds = {key: Decimal(str(schema[key])) for key in ("ge", "gt", "le", "lt") if schema.get(key) is not None}
        extra = [patterns.above(bounds[key], key == "ge") for key in ("ge", "gt") if key in bounds]
        extra += [patterns.below(bounds[key], key == "le") for key in ("le", "lt") if key in bounds]
        if schema.get("multiple_of") is not None:
            self._warn(schema, f"'multiple_of' {schema['multiple_of']}")
        text = _text(patterns.decimal(digits, places, infinite and not bounds), *extra)
        if digits is not None and (places is None or places >= digits):
            return text                             # as numbers, such values are written in one way only
        most = MAX_NUMBER if digits is None else min(MAX_NUMBER, 10 ** (digits - places))
        number: Node = {"exclusiveMinimum": -most, "exclusiveMaximum": most}
        for key, bound in bounds.items():
            if Decimal(str(float(bound))) != bound:
                return text
            plain = int(bound) if bound == bound.to_integral_value() else float(bound)
            if key in ("ge", "le"):
                number["minimum" if key == "ge" else "maximum"] = plain
            else:
                name = "exclusiveMinimum" if key == "gt" else "exclusiveMaximum"
                number[name] = (max if key == "gt" else min)(plain, number[name])
        if places:
            number["multipleOf"] = float(Decimal(1).scaleb(-places))
        return {"anyOf": [{"type": "integer" if places == 0 else "number", **number}, text]}

    def fraction_schema(self, schema: Any) -> Node:
        if any(schema.get(key) is not None for key in ("ge", "gt", "le", "lt")):
            self._warn(schema, "the bound of a fraction")
        return _text("^-?(?:0|[1-9][0-9]*)(?:/[1-9][0-9]*)?$")

    def complex_schema(self, schema: Any) -> Node:
        return _text(patterns.COMPLEX)

    # ---- strings

    def str_schema(self, schema: Any) -> Node:
        given = schema.get("pattern")
        bare: Any = {key: value for key, value in schema.items() if key != "pattern"}
        node = super().str_schema(bare)
        strips = self._option(schema, "strip_whitespace", "str_strip_whitespace")
        found = [patterns.TRIMMED] if strips and (given is not None or node.get("minLength")) else []
        if given is not None:
            is_rust = isinstance(given, str) and self._option(schema, "regex_engine", "regex_engine") != "python-re"
            text, flags = (given, 0) if isinstance(given, str) else (given.pattern, given.flags & ~re.UNICODE)
            known = None if flags else patterns.ecma(text, "rust" if is_rust else "python")
            if known is None:
                self._warn(schema, f"the pattern {text!r}")
            else:
                found.insert(0, known)
        if schema.get("ascii_only"):
            found.append("^[\\x00-\\x7f]*$")
        return _text(*found, **node)

    def bytes_schema(self, schema: Any) -> Node:
        way, node = getattr(self._config, "val_json_bytes", "utf8"), super().bytes_schema(schema)
        least, most = node.pop("minLength", 0), node.pop("maxLength", None)
        if way == "hex":
            return _text(f"^(?:[0-9a-fA-F]{{2}}){{{least},{'' if most is None else most}}}$")
        if least or most is not None:
            self._warn(schema, "the number of bytes")
        if way == "base64":
            end = "[A-Za-z0-9_-][AQgw]==|[A-Za-z0-9_-]{2}[AEIMQUYcgkosw048]="
            return _text(f"^(?:[A-Za-z0-9_-]{{4}})*(?:{end})?$")
        sizes = {"minLength": -(-least // 4), "maxLength": most}        # of characters of up to four bytes
        return {"type": "string"} | {key: size for key, size in sizes.items() if size}

    def uuid_schema(self, schema: Any) -> Node:
        return _text(patterns.uuid(schema.get("version")))

    def url_schema(self, schema: Any) -> Node:
        node = super().url_schema(schema)
        sizes = {key: node[key] for key in ("minLength", "maxLength") if node.get(key, 1) != 1}
        return _text(patterns.web(schema.get("allowed_schemes") or ["http", "https", "ftp", "ws", "wss"]), **sizes)

    def multi_host_url_schema(self, schema: Any) -> Node:
        return self.url_schema(schema)

    def json_schema(self, schema: Any) -> Node:
        self._warn(schema, "the JSON in the string")
        return super().json_schema(schema)

    # ---- dates and times

    def date_schema(self, schema: Any) -> Node:
        return self._moment(schema, date)

    def time_schema(self, schema: Any) -> Node:
        return self._moment(schema, time)

    def datetime_schema(self, schema: Any) -> Node:
        return self._moment(schema, datetime)

    def _moment(self, schema: Any, kind: type[date | time]) -> Node:
        zone, extra = schema.get("tz_constraint"), []
        for key in ("ge", "gt", "le", "lt"):
            bound, closed, is_low = schema.get(key), key in ("ge", "le"), key in ("ge", "gt")
            if bound is not None and getattr(bound, "tzinfo", None) is not None and zone != "naive":
                self._warn(schema, f"the offset of the bound {bound}")
                bound, closed = _widened(bound, is_low), True           # a text with an offset may be a day away
            if bound is not None:
                extra.append((patterns.at_least if is_low else patterns.at_most)(bound, closed))
        if schema.get("now_op"):
            self._warn(schema, f"{schema['now_op']!r}")
        if isinstance(zone, int):
            self._warn(schema, f"the offset of {zone} seconds")
        offset = None if zone is None else zone != "naive"
        return self._or_seconds(schema, _text(patterns.moment(kind, offset), *extra))

    def _or_seconds(self, schema: Any, text: Node) -> Node:
        """Return the schema of a text, or also of numbers if the class around it writes numbers."""
        if getattr(self._config, "ser_json_temporal", "iso8601") == "iso8601":
            return text
        self._warn(schema, "a date or time as a number")
        return {"anyOf": [{"type": "number"}, text]}

    def timedelta_schema(self, schema: Any) -> Node:
        least = [schema[key] for key in ("ge", "gt") if schema.get(key) is not None]
        is_positive = bool(least) and max(least) >= timedelta(0)
        for key in ("ge", "gt", "le", "lt"):
            if schema.get(key) is not None and (key != "ge" or schema[key] != timedelta(0)):
                self._warn(schema, f"the bound {schema[key]}")
        text = _text(patterns.duration(not is_positive))
        if getattr(self._config, "ser_json_timedelta", "iso8601") == "iso8601":
            return self._or_seconds(schema, text)
        bounds: Node = {"minimum": 0 if is_positive else -LONGEST, "maximum": LONGEST}
        return {"anyOf": [{"type": "number", **bounds}, text]}

    # ---- choices

    def literal_schema(self, schema: Any) -> Node:
        return self._readable(schema, super().literal_schema(schema))

    def enum_schema(self, schema: Any) -> Node:
        return self._readable(schema, super().enum_schema(schema))

    def _readable(self, schema: Any, node: Node) -> Node:
        """Return the choices of a node that pydantic reads from JSON."""
        given = node["enum"] if "enum" in node else [node["const"]]
        reads = _reader({key: value for key, value in schema.items() if key not in ("ref", "serialization")})
        read = [value for value in given if reads(to_json(value))]
        if not read:
            raise PydanticInvalidForJsonSchema("no value of it can be read from JSON")
        return node if read == given else node | {"enum": read}

    def is_subclass_schema(self, schema: Any) -> Node:
        return self.handle_invalid_for_json_schema(schema, "core_schema.IsSubclassSchema")

    # ---- arrays

    def tuple_schema(self, schema: Any) -> Node:
        node, items, at = super().tuple_schema(schema), schema["items_schema"], schema.get("variadic_item_index")
        if at is not None:
            rest = [self.generate_inner(item) for item in items[at:]]
            node["items"] = rest[0] if len(rest) == 1 else {"anyOf": rest}
            if least := max(len(items) - 1, node.get("minItems", 0)):
                node["minItems"] = least
            if len(rest) > 1:
                self._warn(schema, "the end of a tuple")
        elif "maxItems" in node:
            node["minItems"], node["maxItems"] = max(node["minItems"], len(items)), min(node["maxItems"], len(items))
        return node

    def set_schema(self, schema: Any) -> Node:
        """Return arrays, without equal elements where pydantic, which merges those, would then count too few."""
        node, inner = super().set_schema(schema), schema.get("items_schema", {"type": "any"})
        kind = self._meant.get(inner.get("schema_ref"), inner)["type"]
        if node.get("minItems", 0) < 2 and kind not in ("enum", "literal", "bool"):
            node.pop("uniqueItems")
        elif kind not in ("int", "str", "enum", "literal", "bool"):
            self._warn(schema, "the number of distinct elements")
        if kind in ("any", "list", "dict", "set", "model", "typed-dict", "dataclass"):
            self._warn(schema, "an element that cannot be hashed")
        return node

    frozenset_schema = set_schema

    # ---- objects

    def dict_schema(self, schema: Any) -> Node:
        values = self.generate_inner(schema["values_schema"]) if "values_schema" in schema else {}
        node: Node = {"type": "object", "additionalProperties": values or True}
        keys = schema.get("keys_schema", {"type": "any"})
        keys = self._meant.get(keys.get("schema_ref"), keys)
        names = self._names(keys, self.generate_inner(keys))
        if names is None:
            node["additionalProperties"] = False
        elif names:
            node["propertyNames"] = names
        self.update_with_validations(node, schema, self.ValidationsMapping.object)
        if node.get("minProperties", 0) > 1 and keys["type"] not in ("str", "int", "enum", "literal", "bool", "any"):
            self._warn(schema, "the number of distinct keys")
        return node

    counter_schema = frozendict_schema = ordered_dict_schema = dict_schema

    def _names(self, keys: Any, node: Node) -> Node | None:
        """Return the schema of the names from which pydantic reads the keys of a node; None if there are none."""
        if "$ref" in node:
            node = self.resolve_ref_schema(node)
        if "anyOf" in node and "type" not in node:
            parts = [each for each in node["anyOf"] if each.get("type") != "number"] or node["anyOf"]
            found = [names for names in (self._names(keys, part) for part in parts) if names is not None]
            return {"anyOf": found} if found and all(found) else {} if found else None
        if "enum" in node or node.get("type") == "boolean":
            reads = _reader(core_schema.dict_schema(keys_schema=keys))
            words = [word if isinstance(word, str) else json.dumps(word) for word in node.get("enum", (True, False))]
            known = [word for word in words if reads(to_json({word: 0}))]
            return {"enum": known} if known else None
        kind = node.get("type")
        if kind == "string":
            return {key: value for key, value in node.items() if key not in ("title", "description", "default", "type")}
        if kind == "integer":
            if "multipleOf" in node:
                self._warn(keys, "'multipleOf' of a key")
            low = max(node.get("minimum", -math.inf), node.get("exclusiveMinimum", -math.inf) + 1)
            high = min(node.get("maximum", math.inf), node.get("exclusiveMaximum", math.inf) - 1)
            return {"pattern": f"^(?:{signed(low, high, True, True, _whole)})$"} if low <= high else None
        if kind == "number":
            if node.keys() & {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}:
                self._warn(keys, "the bound of a key")
            return {"pattern": r"^-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:e[+-]?[0-9]{1,2})?$"}
        return None if kind else {}

    def model_schema(self, schema: Any) -> Node:
        return _closed(super().model_schema(schema))

    def dataclass_schema(self, schema: Any) -> Node:
        return _closed(super().dataclass_schema(schema))

    def typed_dict_schema(self, schema: Any) -> Node:
        return _closed(super().typed_dict_schema(schema))

    def model_field_schema(self, schema: Any) -> Node:
        return self._field(schema, super().model_field_schema(schema))

    def dataclass_field_schema(self, schema: Any) -> Node:
        if schema.get("init") is False:
            raise PydanticOmit
        return self._field(schema, super().dataclass_field_schema(schema))

    def typed_dict_field_schema(self, schema: Any) -> Node:
        return self._field(schema, super().typed_dict_field_schema(schema))

    def _field(self, schema: Any, node: Node) -> Node:
        """Return the node of a field; a path as its only alias is no name of a member."""
        alias = schema.get("validation_alias")
        paths = [alias] if isinstance(alias, list) and alias and not isinstance(alias[0], list) else alias
        by_name = any(getattr(self._config, name, None) for name in ("populate_by_name", "validate_by_name"))
        if by_name or not isinstance(paths, list) or any(len(path) == 1 for path in paths):
            return node
        if self.field_is_required(schema, total=True):
            raise PydanticInvalidForJsonSchema(
                f"{self._places.get(id(schema), '#')} has a path as its alias; a name as a second alias would work"
            )
        raise PydanticOmit


def _nodes(node: Any, place: str) -> Iterator[tuple[Any, str]]:
    """Yield a core schema and those inside it that read JSON, with the class and the fields around them."""
    inner = node
    while place == "#" and inner.get("type", "").startswith("function-"):
        inner = inner.get("schema", {})             # the class of a validator of all of it
    if inner.get("type") in CLASSES and "cls" in inner:
        place = inner["cls"].__name__
    yield node, place
    for key in (*INNER, "strict_schema" if node.get("strict") else "lax_schema"):
        found = node.get(key, ())
        if key == "fields" and node.get("type") == "dataclass":         # names alone; its fields are in "schema"
            continue
        if key == "fields":
            named = found.items() if isinstance(found, dict) else ((each["name"], each) for each in found)
            for name, field in named:
                yield from _nodes(field, name if place == "#" else f"{place}.{name}")
            continue
        some = found.values() if key == "choices" and isinstance(found, dict) else found
        for each in [some] if isinstance(some, dict) else some:
            yield from _nodes(each[0] if isinstance(each, tuple) else each, place)


def _is_own(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("pydantic.")


def _reader(schema: Any) -> Any:
    """Return a function that tells whether a core schema reads a JSON text."""
    try:
        validator = SchemaValidator(schema)
    except SchemaError:                             # it refers to definitions elsewhere
        return lambda text: isinstance(json.loads(text), str)

    def reads(text: bytes) -> bool:
        try:
            validator.validate_json(text)
        except ValidationError:
            return False
        return True

    return reads


def _closed(node: Node) -> Node:
    """Forbid the members that an object does not name."""
    if node.get("type") == "object":
        node.setdefault("additionalProperties", False)
    return node


def _text(*found: str, **node: Any) -> Node:
    """Return the schema of the strings in which all patterns are found."""
    made = {"type": "string", **node} | ({"pattern": found[0]} if found else {})
    return made | ({"allOf": [{"pattern": each} for each in found[1:]]} if found[1:] else {})


def _whole(low: float, high: float, low_in: bool, high_in: bool) -> str:
    return naturals(int(low) + (not low_in), high)


def _widened(bound: Any, is_low: bool) -> Any:
    """Return a bound a day further away; of a time of day, all of the day."""
    if isinstance(bound, time):
        return time() if is_low else time.max
    try:
        return bound.replace(tzinfo=None) + timedelta(days=-1 if is_low else 1)
    except OverflowError:
        return datetime.min if is_low else datetime.max
