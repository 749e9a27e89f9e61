"""Masks along random walks, compared with those of the indices before schemas stood on the machine.

The digests are of version 0.3.0, where regexes, schemas and grammars had an index each.
"""

import json
from functools import cache
from pathlib import Path

import pytest
from helpers.common import ROOT
from helpers.json_suite import bench_schemas
from helpers.mask_digests import digest

from llmppl import JsonSchema, Regex, Vocabulary

DIGESTS = json.loads(Path(__file__).with_suffix(".json").read_text())
REGEXES = [
    "[a-z]{1,20}",
    "(cat|dog|catfish)s?",
    r"\d{4}-\d{2}-\d{2}",
    r"-?\d+(\.\d+)?",
    "[^ab]*",
    "(a|b)*abb",
    r"[\w.]+@[\w.]+\.[a-z]{2,4}",
    "(?i)yes|no",
    ".{0,80}",
    r"(\+\d{1,3} )?(\d{3}-){2}\d{4}",
    "[А-я ]{3,12}",
    "(?:[0-9]{1,3}\\.){3}[0-9]{1,3}",
    '"([^"\\\\]|\\\\.)*"',
    "(one|two|three)(, (one|two|three))*",
    "a{3,7}b{2,}",
]
TEXT = {"type": "string"}
COUNT = {"type": "integer"}
SCHEMAS = [
    TEXT,
    COUNT,
    {"type": "number"},
    {"type": "boolean"},
    {"type": "null"},
    True,
    {"enum": ["a", "ab", 1, None, [1, 2]]},
    {"const": {"a": [1, "b"]}},
    {"type": "string", "maxLength": 5},
    {"type": "string", "minLength": 3, "maxLength": 60},
    {"type": "string", "pattern": "^[a-f0-9]{8}$"},
    {"type": "string", "format": "date"},
    {"type": "integer", "minimum": 3, "maximum": 1200},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5},
    {"type": "integer", "multipleOf": 5},
    {"type": "array", "items": COUNT},
    {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [COUNT, TEXT], "items": False},
    {"type": "array", "items": {"enum": ["x", "y", "z"]}, "uniqueItems": True},
    {"type": "array", "items": {"enum": [1, "a"]}, "contains": {"const": 1}},
    {"type": "object", "properties": {"name": TEXT, "age": COUNT}, "required": ["name", "age"]},
    {"type": "object", "properties": {"name": TEXT, "age": COUNT}, "additionalProperties": False},
    {"type": "object", "additionalProperties": COUNT},
    {"type": "object", "minProperties": 1, "maxProperties": 2},
    {
        "type": "object",
        "patternProperties": {"^x_": COUNT, "_y$": TEXT},
        "additionalProperties": False,
    },
    {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z]{1,3}$"},
        "additionalProperties": {"type": "null"},
    },
    {"anyOf": [TEXT, COUNT, {"type": "array", "items": TEXT}]},
    {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "a"}, "n": COUNT},
                "required": ["kind", "n"],
            },
            {
                "type": "object",
                "properties": {"kind": {"const": "b"}, "s": TEXT},
                "required": ["kind", "s"],
            },
        ]
    },
    {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 99}]},
    {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"value": COUNT, "next": {"$ref": "#/$defs/node"}},
                "required": ["value"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    {"type": "object", "properties": {"a": COUNT, "b": COUNT}, "dependentRequired": {"a": ["b"]}},
    {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "if": {"properties": {"a": {"const": 1}}},
        "then": {"required": ["a"]},
    },
    {"type": ["string", "null"]},
    {"type": ["integer", "array"], "items": {"type": "boolean"}},
    {"type": "object", "properties": {'q"uote': TEXT, "tab\t": COUNT, "é": {"type": "null"}}},
    {
        "type": "object",
        "properties": {"id": {"type": "string", "format": "uuid"}},
        "required": ["id"],
    },
    {"type": "string", "format": "date-time"},
    {"type": "string", "pattern": "b.d"},
    {
        "type": "object",
        "properties": {"tags": {"type": "array", "items": {"type": "string", "maxLength": 8}}},
    },
    {"not": {"type": "string"}},
]
PUBLIC = 40  # schemas of JSONSchemaBench, each 25th


def public_schemas():
    return [schema for _, schema, _ in bench_schemas()][::25]


def constraints(kind):
    """Return the constraints of a kind; None if one is refused."""
    if kind == "regexes":
        return [Regex(pattern) for pattern in REGEXES]
    found = []
    for schema in SCHEMAS if kind == "schemas" else public_schemas():
        try:
            found.append(JsonSchema(schema))
        except ValueError:
            found.append(None)
    return found


@cache
def vocabulary(name):
    if name == "embedded":
        from llmppl import CachedTransformer

        return CachedTransformer.from_pretrained(engine="numpy").vocab
    folder = ROOT.parent / "shared" / "vocab" / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent")
    from transformers import AutoTokenizer

    return Vocabulary.from_tokenizer(AutoTokenizer.from_pretrained(folder))


def digests(kind, name):
    vocab = vocabulary(name)
    return [None if each is None else digest(each.index(vocab)) for each in constraints(kind)]


@pytest.mark.parametrize("name", ["embedded", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", ["regexes", "schemas", pytest.param("public", marks=pytest.mark.slow)]
)
def test_masks_are_those_of_an_index_for_each_kind(kind, name):
    assert digests(kind, name) == DIGESTS[f"{kind}, {name}"]
