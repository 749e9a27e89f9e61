"""JsonSchema: its texts, options and errors; indexes over tokens; and llguidance on the schemas of JSONSchemaBench."""

import copy
import gc
import itertools
import json
import math
import pickle
import re
import time
import types
import weakref
from decimal import Decimal

import numpy as np
import pydantic
import pytest
from helpers.common import BYTES, repetitions
from helpers.json_suite import wants
from helpers.json_texts import Reader
from helpers.tiny import table_lm

from llmppl import ConstrainedText, JsonSchema, Vocabulary, enumerate_exact, importance_sampling
from llmppl.constraints import END
from llmppl.constraints.automata import budget
from llmppl.constraints.json.keywords import edits

PIECES = [b'{"', b'":', b'": ', b'"}', b"12", b'"a"', b'","', b"true", b'{"a":', b"]]", b"], [", b"a", b"\xc3\xa9"]
EOS, SPECIAL = len(PIECES) + 256, len(PIECES) + 257
SMALL = Vocabulary([*PIECES, *(b"%c" % byte for byte in range(256)), b"", b"[INST]"], [EOS], [SPECIAL])
POINT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 3}},
    "required": ["a"],
    "additionalProperties": False,
}
RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}, "kind": {"enum": ["a", "b"]}},
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
CLOSED = {"type": "object", "additionalProperties": False}


def refusals(schema, texts, **options):
    reader = Reader(schema, **options)
    return [reader.refusal(text) for text in texts]


# ---- texts


@pytest.mark.parametrize(
    "text, inside",
    [
        ('{"a":1}', True),
        ('{ "a" : -20 , "b":"\u00e9\u00e9\u00e9" }', True),
        ('{\n"a":1}', False),
        ('{"a":1,"b":"\\u001f\\n"}', True),
        ('{"a":1,"b":"\\u00e9\\n"}', True),
        ('{"a":1,"b":"four"}', False),
        ('{"b":"x","a":1}', False),                 # properties come in the order of the schema
        ('{"a":1.0}', False),
        ('{"a":1,"c":1}', False),
        ('{"b":"x"}', False),
        ('{"a":1,"a":1}', False),
        (' {"a":1}', False),
    ],
)  # fmt: skip
def test_a_schema_accepts_exactly_its_instances(text, inside):
    assert Reader(POINT).admits(text) is inside
    index = JsonSchema(POINT).index(SMALL)
    state = index.start
    for token in SMALL.spell(text.encode()):
        if not index.mask(state)[token]:
            state = None
            break
        state = index.advance(state, token)
    assert (state is not None and index.accepts(state)) is inside


@pytest.mark.parametrize(
    "schema, inside, outside",
    [
        ({"enum": [9007199254740993]}, ["9007199254740993"], ["9007199254740992", "9007199254740994"]),
        ({"const": 1e-7}, ["1e-07", "1e-7", "0.0000001"], ["1e-8", "0"]),
        ({"const": -(2**63)}, ["-9223372036854775808"], ["-9223372036854775807"]),
        ({"const": 1e22}, ["1e+22", "1e22", "10000000000000000000000"], ["1e21"]),
        ({"const": 5.0}, ["5.0", "5"], ["5.5"]),
        ({"prefixItems": [True], "contains": {"type": "integer"}}, ["[null,2.4e+126]"], ["[null,2.4e-7]"]),
        ({"multipleOf": 12345}, ["24690", "1.2345e+300"], ["24691", "1e+300"]),
        ({"const": 123456789012345678}, ["123456789012345678"], ["123456789012345680"]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
         ["-9223372036854775808", "0", "9223372036854775807"], ["-9223372036854775809", "9223372036854775808"]),
        ({"type": "object", "patternProperties": {"^a": {"enum": [9007199254740993]}}},
         ['{"a":9007199254740993}'], ['{"a":9007199254740992}']),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.25"], ["0", "0.0", "-0", "0.51"]),
        ({"minimum": 0, "maximum": 99.99}, ["99.9", "99.90", "99.99"], ["100", "99.991"]),
        ({"type": "integer", "minimum": 10**399}, ["1" + "0" * 399], ["9" * 399]),
        ({"type": "array", "items": {"type": "number"}}, ["[1e300]"], ["[1e999]"]),
        ({"type": "string", "pattern": "^(?!a$)[a-z]+$"}, ['"ab"'], ['"a"', '"b\\n"']),
        ({"type": "string", "pattern": r"^\d$"}, ['"3"'], ['"\u0663"']),
        ({"not": {"pattern": r"^\d$"}}, ['"\u0663"'], ['"3"']),
        ({"patternProperties": {r"^\d$": True}, "anyOf": [{"properties": {"a": True}, "required": ["a"]}, True],
          "unevaluatedProperties": False}, ['{"a":1,"3":1}'], ['{"\u0663":1}', '{"3\\n":1}', '{"b":1}']),
        ({"$ref": "#/$defs/o", "$defs": {"o": {"patternProperties": {r"^\p{L}$": True}}},
          "if": {"required": ["\u00e9"]}, "then": {"properties": {"yy": True}}, "else": {"properties": {"nn": True}},
          "unevaluatedProperties": False},
         ['{"yy":1,"\u00e9":1}', '{"nn":1,"a":1}'], ['{"nn":1,"\u00e9":1}', '{"yy":1,"a":1}', '{"1":1}']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"1900-02-29"']),
        ({"type": "string", "format": "ipv6"}, ['"::1"', '"::ffff:1.2.3.4"'], ['"1::2::3"', '":1"']),
        ({"type": "array", "uniqueItems": True}, ["[1,2]", "[1,true]"], ["[1,1]", "[1,1.0]", '["a","\\u0061"]']),
        ({"type": "object", "minProperties": 2},
         ['{"b":1,"c":2}'], ['{"b":1}', '{"b":1,"b":2}', '{"b":1,"\\u0062":2}']),
        (CLOSED | {"properties": {'q"': {}, "b\\": {}}}, ['{"q\\"":1,"b\\\\":2}'], ['{"q":1}']),
        ({"properties": {"a": {"type": "integer"}}}, ['{"a":1}'], ['{"\\u0061":"x"}', '{"\\u0061":1}']),
        ({"patternProperties": {"^x-": {"type": "string"}}}, ['{"x-a":"s"}'], ['{"\\u0078-a":1}', '{"x-a":1}']),
        ({"properties": {"R[int]": {"$ref": "#/$defs/R[int]"}}, "$defs": {"R[int]": {"type": "integer"}}},
         ['{"R[int]":1}'], ['{"R[int]":"x"}']),
        ({"$ref": "#/$defs/g/P\u00abU\u00bb", "$defs": {"g": {"P\u00abU\u00bb": {"type": "null"}}}}, ["null"], ["1"]),
        ({"propertyNames": False}, ["{}", "1"], ['{"a":1}']),
        ({"patternProperties": {"^a": False}, "additionalProperties": False}, ["{}"], ['{"a":1}', '{"b":1}']),
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}, ["1", "2.5"], ["3", "1.5"]),
        ({"if": {"required": ["k"]}, "then": {"properties": {"k": {"pattern": "^[0-9]+$"}}}},
         ['{"k":"1"}', "[]"], ['{"k":"a"}']),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "type": "array", "additionalItems": False,
          "items": [True, {"$ref": "odd"}], "definitions": {"o": {"id": "odd", "not": {"multipleOf": 2}}}},
         ["[]", "[1]", "[{},1]"], ["[1,2]", "[1,1,1]"]),
    ],
)  # fmt: skip
def test_texts_that_other_readers_have_got_wrong(schema, inside, outside):
    assert refusals(schema, inside) == [""] * len(inside)
    assert all(refusals(schema, outside))


@pytest.mark.parametrize("counts", [{}, {"minContains": 2}, {"minContains": 0}, {"minItems": 2}])
def test_masks_count_the_items_that_contains_means(counts):
    schema = {"type": "array", "items": {"enum": [0, 1, "a", []]}, "maxItems": 3, "contains": {"const": "a"}, **counts}
    assert not (reader := Reader(schema)).constraint.unmasked
    for value in itertools.chain(*(itertools.product([0, 1, "a", []], repeat=n) for n in range(4))):
        is_inside = counts.get("minContains", 1) <= value.count("a") and counts.get("minItems", 0) <= len(value)
        assert reader.admits(json.dumps(value)) == is_inside


def test_the_whitespace_option():
    schema, texts = {"type": "array", "items": {"type": "integer"}}, ["[1,2]", "[1, 2]", "[ 1,\n\n2]"]
    found = {option: refusals(schema, texts, whitespace=option) for option in (" ?", True, False, " ", "[ \n]*")}
    assert {option: each.count("") for option, each in found.items()} == {
        " ?": 2, True: 3, False: 1, " ": 2, "[ \n]*": 3,
    }  # fmt: skip
    with pytest.raises(ValueError, match="matches other characters than JSON's"):
        JsonSchema(schema, whitespace="x?")


def test_any_order_of_properties_on_demand():
    texts = ['{"name":"","age":1,"kind":"a"}', '{"kind":"a","name":"","age":1}', '{"age":1,"kind":"a"}']
    assert refusals(RECORD, texts) == ["", "masks", "masks"]
    assert refusals(RECORD, texts, order="any") == ["", "", "masks"]
    twelve = CLOSED | {"properties": {f"p{i}": {"type": "null"} for i in range(12)}}
    names = [f'"p{i}":null' for i in np.random.default_rng(0).permutation(12)]
    texts = ["{" + ",".join(some) + "}" for some in (names, names[:5], [names[3], names[3]])]
    assert refusals(twelve, texts, order="any") == ["", "", "masks"]


def test_the_distance_of_many_required_properties_in_any_order_is_known():
    names = [f"p{i}" * (1 + i % 3) for i in range(20)]
    schema = CLOSED | {"properties": dict.fromkeys(names, {"type": "null"}), "required": names}
    index, shortest = JsonSchema(schema, order="any").index(BYTES), "{" + ",".join(f'"{n}":null' for n in names) + "}"
    assert index.tokens_to_accept(index.start) == len(shortest)
    begun = index.after('{"' + names[7])                # a name that is not the first that is missing
    assert index.tokens_to_accept(begun) == len(shortest) - len(names[7]) - 2
    assert index.mask_within(begun, len(shortest) - len(names[7]) - 2).any()


@pytest.mark.parametrize("is_folder", [False, True])
def test_references_to_other_documents(is_folder, tmp_path):
    schema = {"type": "array", "items": {"$ref": "https://example.org/kinds/size.json#/$defs/size"}}
    size, unit = {"$defs": {"size": {"$ref": "unit.json"}}}, {"enum": ["kg"], "a": 1}
    resources = {"https://example.org/kinds/size.json": size, "https://example.org/kinds/unit.json": unit}
    if is_folder:
        for uri, each in resources.items():
            (tmp_path / uri.rpartition("/")[2]).write_text(json.dumps(each))
    with pytest.raises(ValueError, match=r"#/items, '\$ref': .* leads nowhere; resources="):
        JsonSchema(schema).index(BYTES)
    assert refusals(schema, ['["kg"]', '["m"]'], resources=tmp_path if is_folder else resources) == ["", "masks"]
    warnings = JsonSchema(schema, resources=tmp_path if is_folder else resources).warnings
    assert warnings == ["https://example.org/kinds/unit.json#: 'a' is no keyword, and is ignored"]


# ---- objects


def test_a_schema_may_be_a_str_and_is_copied():
    schema = {"type": "integer"}
    constraint = JsonSchema(schema)
    assert JsonSchema(json.dumps(schema)).schema == constraint.schema == schema
    schema["type"] = "string"
    assert constraint.schema == {"type": "integer"}
    assert constraint.index(BYTES).after("12")


def test_every_eos_is_allowed_exactly_where_the_text_may_end():
    index = JsonSchema({"type": "integer"}).index(SMALL)
    for text, ends in [("", False), ("-", False), ("1", True), ("12", True)]:
        state = index.after(text)
        assert index.accepts(state) is ends
        assert index.mask(state)[[EOS, SPECIAL]].tolist() == [ends, False]
    assert index.advance(state, EOS) is END is index.end
    assert not index.mask(END).any() and index.accepts(END) and index.next_bytes(END) == b""


def test_errors_of_an_index_name_the_next_bytes():
    index = JsonSchema({"const": "ab"}).index(SMALL)
    with pytest.raises(ValueError, match=r"token \d+ \(b'a'\) cannot follow .*: the next byte must be one of b'b'"):
        index.advance(index.after('"a'), SMALL.spell(b"a")[0])
    with pytest.raises(ValueError, match="byte 5 of the text, b'x' after .*leaves the language: the next byte must be"):
        JsonSchema(POINT).index(SMALL).after('{"a":x')
    with pytest.raises(ValueError, match="is not a state of this index"):
        index.mask(10**6)
    with pytest.raises(ValueError, match=r"spells a string .*: no token fits where the next byte must be one of b'\{'"):
        JsonSchema(POINT).index(Vocabulary([b"a", b"}", b""], [2]))


def test_constraints_and_indexes_are_shared_by_copies_and_pickled():
    constraint = JsonSchema(POINT, order="any", whitespace=False)
    index = constraint.index(SMALL)
    particle = {"index": index, "state": index.after('{"a"'), "constraint": constraint}
    other = copy.deepcopy(particle)
    assert other["index"] is index and other["constraint"] is constraint and other["state"] is particle["state"]
    index.mask(particle["state"])
    again = pickle.loads(pickle.dumps({"constraint": constraint, "index": index}))
    assert repr(again["constraint"]) == repr(constraint)
    for text in ("", '{"a"', '{"b":"x'):
        assert np.array_equal(again["index"].mask(again["index"].after(text)), index.mask(index.after(text)))
    exact = pickle.loads(pickle.dumps(JsonSchema('{"const": 9007199254740993.0}'))).index(BYTES)
    assert exact.accepts(exact.after("9007199254740993"))


def test_reprs_are_worth_reading():
    constraint = JsonSchema({"type": "integer"}, whitespace=False, lenient=True)
    assert repr(constraint) == "JsonSchema({\"type\": \"integer\"}, whitespace=False, lenient=True)"
    assert repr(constraint.index(SMALL)).startswith(f"MachineIndex({constraint!r}, {len(SMALL)} tokens")
    assert len(repr(JsonSchema({"enum": list(range(1000))}))) < 100


def test_a_closed_schema_is_an_automaton_with_the_same_masks():
    constraint = JsonSchema(RECORD)
    table, own = constraint.automaton.index(SMALL), constraint.index(SMALL)
    state, same = table.start, own.start
    for token in SMALL.spell('{"name": "a\u00e9", "age": 12, "kind": "b"}'.encode()):
        assert np.array_equal(table.mask(state), own.mask(same))
        state, same = table.advance(state, token), own.advance(same, token)
    assert table.accepts(state) and own.accepts(same)


@pytest.mark.parametrize(
    "schema, reason",
    [
        (True, "names that it does not list"),
        ({"type": "array", "items": {"$ref": "#"}}, "nests without end"),
        ({"type": "object", "additionalProperties": {"type": "null"}}, "names that it does not list"),
        ({"type": "string", "minLength": 100_000}, "more than"),
    ],
)
def test_a_schema_without_an_automaton_says_why(schema, reason):
    constraint = JsonSchema(schema)
    assert constraint.automaton is None and reason in constraint.fallback_reason
    assert constraint.index(SMALL).allowed(constraint.index(SMALL).start).size


# ---- errors


def nested(n, schema):
    for _ in range(n):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize(
    "schema, message",
    [
        ("{'a': 1}", "the schema is not JSON: Expecting property name .* line 1 column 2"),
        ({"const": {1, 2}}, "the schema is not JSON: Object of type set"),
        ("3", "a JSON schema is an object, true or false, not 3"),
        ("schemas/point.json", r"for a file, pass its content: JsonSchema\(Path"),
        (print, "for the arguments of a function, a pydantic model or TypedDict"),
        (Decimal(1), "a dict, the JSON of one, or a type would work"),
        (False, "JSON schema at #: it has no instances"),
        ({"properties": {"a": {"type": "integer", "minimum": 3, "maximum": 1}}, "required": ["a"], "type": "object"},
         "JSON schema at #/properties/a: it has no instances"),
        ({"items": {"patternProperties": {"^(a|b)*a(a|b){12}$": True}}}, "#/items, 'patternProperties': the patterns"),
        ({"title": "x"}, "JSON schema at # has no keyword, so that any JSON would do"),
        ({"$ref": "#/$defs/g", "$defs": {"g": {"a": {"type": "null"}}}}, "/g has no keyword.* are 'a' properties"),
        ({"$defs": {"A": {"type": "object"}}}, "# has no keyword"),
        ({"type": "object", "properties": {"p": {"name": {"type": "string"}}}}, "#/properties/p has no keyword"),
        ({"$dynamicRef": "#a"}, r"JSON schema at #, '\$dynamicRef': '#a' leads nowhere"),
        ({"properties": {"b": {"items": {"$dynamicRef": "#a"}}}}, r"at #/properties/b/items, '\$dynamicRef'"),
        ({"items": {"type": "strin"}}, """at #/items, 'type': "strin" should be one of .*; did you mean 'string'"""),
        ({"type": "float"}, "did you mean 'number'"),
        ({"pattern": "(?P>a)b"}, "JSON schema at #, 'pattern': the pattern"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "at #/properties/a, '.ref': '#/.defs/b' leads nowhere"),
        ({"$ref": "https://example.org/x"}, r"at #, '\$ref': 'https://example.org/x' leads nowhere; resources="),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "it has no instances"),
        ('{"minimum": 1e-99999999}', "'minimum': 1E-99999999 should be a finite number, with powers of ten from -400"),
        ('{"not": {"const": 1e99999999}}', "#/not, 'const': 1E[+]99999999 should be a value, its numbers with powers"),
        ('{"type": "integer", "enum": [{"a": 1e99999999}]}', "'enum': .* a list of values, their numbers with powers"),
        ({"type": "function", "function": {"parameters": {}}}, "'type': \"function\".*of a tool is its 'parameters'"),
        ({"pattern": "^\\a$"}, r"ECMA-262 has no \\a, or no automaton has it; letters and digits need no backslash"),
        ({"type": "integer", "min": 3}, "'min' is no keyword: did you mean 'minimum'"),
        ({"type": "object", "proprties": {"a": True}}, "'proprties' is no keyword: did you mean 'properties'"),
        ({"properties": {"a": {"type": "integer", "required": True}}}, "'required': true should be a list of names"),
        ({"properties": {f"p{i}": {"type": "string"} for i in range(1000)} | {"last": {"maximum": "3"}}},
         "at #/properties/last, 'maximum'"),
    ],
)  # fmt: skip
def test_an_invalid_schema_is_refused_with_place_and_keyword(schema, message):
    with pytest.raises(ValueError, match=message):
        JsonSchema(schema).index(BYTES)


def test_unknown_formats_names_on_demand_and_keywords_of_later_drafts_are_remarks():
    old = {"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [False]}
    constraint = JsonSchema({**old, "items": {"maximum": 1, "minimum": 0, "format": "int33"}, "min": 3}, lenient=True)
    assert [warning.partition(" ")[0] for warning in constraint.warnings] == ["#:", "#,", "#/items,"]
    closed = {"items": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "string", "maxLength": 3}], **old}
    assert len(JsonSchema(closed).warnings) == 1
    assert "is no known draft: read as 2020" in JsonSchema({"$schema": "x:3", "enum": ["a"]}).warnings[0]


@pytest.mark.parametrize("name", ["minLen", "fields", "nullable", "max_length", "extends", "$foo"])
def test_each_unknown_name_leaves_one_remark(name):
    parts = {each: {"enum": ["a"], "maxLength": 3, name: {}, "x-a": 1} for each in "ab"}
    assert JsonSchema({"properties": parts}).warnings == [f"#/properties/a: {name!r} is no keyword, and is ignored"]


MISSPELT = {
    "propertys": ({"a": {"type": "string"}}, "properties"), "itmes": ({"type": "string"}, "items"),
    "typ": ("string", "type"), "cosnt": (3, "const"), "requried": (["a"], "required"),
    "additionalproperties": (False, "additionalProperties"), "patern": ("a", "pattern"), "min_lenght": (3, "minLength"),
    "anyof": ([{"minLength": 1}], "anyOf"), "frmat": ("date", "format"), "uniqueitem": (True, "uniqueItems"),
    "property": ({"a": {"type": "string"}}, "properties"), "unique": (True, "uniqueItems"), "ref": ("#", "$ref"),
    "defs": ({"a": {"type": "string"}}, "$defs"), "exclusiveMin": (3, "exclusiveMinimum"),
    "$reff": ("#", "$ref"), "$def": ({"a": {"type": "string"}}, "$defs"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_keyword_is_refused_with_the_likely_one(name):
    value, meant = MISSPELT[name]
    with pytest.raises(ValueError, match=re.escape(f"at #/items: {name!r} is no keyword: did you mean {meant!r}")):
        JsonSchema({"type": "array", "items": {"maxLength": 9, name: value}})


@pytest.mark.parametrize("name", ["label", "note", "form", "_format", "unit", "tags", "titel", "x-type", "enumNames"])
def test_other_names_are_ignored_with_a_remark(name):
    remarks = JsonSchema({"const": 1, name: "text"}).warnings
    assert remarks == [f"#: {name!r} is no keyword, and is ignored"] * (name != "x-type")


def test_edits_count_swapped_neighbours_once():
    words = ["", "ab", "ba", "abc", "acb", "bca"]
    found = {(a, b): edits(a, b) for a in words for b in words}
    moves = {
        (a, b) for a in words for b in words if a != b and (
            b in {a[:i] + a[i + 1 :] for i in range(len(a))} or a in {b[:i] + b[i + 1 :] for i in range(len(b))}
            or b in {a[:i] + a[i + 1] + a[i] + a[i + 2 :] for i in range(len(a) - 1)}
        )
    }  # fmt: skip
    assert {pair for pair, number in found.items() if number == 1} == moves
    assert found["abc", "bca"] == 2 and found["", "abc"] == 3


URL = r"https?:\/\/(www\.)?[-a-zA-Z0-9@:%._\+~#=]{1,256}\.[a-zA-Z0-9()]{1,6}\b([-a-zA-Z0-9()@:%_\+.~#?&//=]*)"
LARGE = {                                           # patterns, a text, and another one; their automata are too large
    f"see {URL}$": ("see http://www.example.org/a?b=1", "see http://example"),
    "x.{25}y": ("ax" + "b" * 25 + "y", "ax" + "b" * 24 + "y"),
    r"^(\p{L}{1,90}\d?){1,100}$": ("aé1b", "a11"), r"^([\p{L}\d_]{1,90},?){1,100}$": ("aé1,_", "aé1.b"),
}  # fmt: skip


@pytest.mark.parametrize("pattern", LARGE)
def test_a_pattern_that_is_too_large_is_checked_on_the_finished_text(pattern):
    inside, outside = LARGE[pattern]
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    constraint = JsonSchema(schema)
    assert constraint.unmasked == ["#/properties/a, 'pattern' is checked on the finished text"]
    assert constraint.index(BYTES).after(json.dumps({"a": outside}, ensure_ascii=False))
    assert constraint.parse(json.dumps({"a": inside})) == {"a": inside}
    with pytest.raises(ValueError, match="'pattern' does not hold"):
        constraint.parse(json.dumps({"a": outside}))


def test_a_pattern_with_word_boundaries_is_in_the_mask():
    constraint = JsonSchema({"type": "object", "properties": {"a": {"type": "string", "pattern": f"^{URL}$"}}})
    assert constraint.unmasked == []
    assert constraint.index(BYTES).after('{"a": "http://b.cd/e"')
    with pytest.raises(ValueError, match="leaves the language"):
        constraint.index(BYTES).after('{"a": "http://b.()"')


def test_a_string_without_room_in_a_mask_can_be_completed_in_time():
    pattern = r"^[^\\.\s]{1,32}(\\.[^\\.\s]{1,32}){1,3}$"
    schema = {"type": "string", "pattern": pattern.replace("\\\\", "\\"), "maxLength": 128}
    constraint = JsonSchema(schema)
    assert constraint.unmasked == ["#, 'maxLength' is checked on the finished text"]
    assert constraint.index(BYTES).tokens_to_accept(constraint.index(BYTES).after('"a')) == 3


def alternatives(depth, path=None):
    """Return objects with one of two names, inside each other; with a path, every name is another one."""
    if not depth:
        return {"type": "integer"}
    options = []
    for i in "01":
        name = f"p{path or ''}{i}"
        inside = alternatives(depth - 1, path if path is None else path + i)
        options.append({"type": "object", "properties": {name: inside}, "required": [name]})
    return {"oneOf": options}


def test_nested_alternatives_of_open_objects_are_compared_once():
    begun = time.process_time()
    schema = JsonSchema(alternatives(9))
    assert time.process_time() - begun < 4              # 0.3; before 14 to 22
    assert schema.parse('{"p0":' * 9 + "3" + "}" * 9)
    with pytest.raises(ValueError, match="'oneOf' does not hold"):
        schema.parse('{"p0":' * 8 + '{"p0":3,"p1":3}' + "}" * 8)


def test_alternatives_that_multiply_are_refused(monkeypatch):
    schema = alternatives(4, "a")
    JsonSchema(schema)
    monkeypatch.setattr(budget, "MAX_STEPS", 40_000)
    with pytest.raises(ValueError, match="the schema is too large: .*; fewer alternatives, above all in oneOf, would"):
        JsonSchema(schema)



def test_the_longest_numbers_and_strings_without_bounds_are_remarks():
    schema = {"properties": {"a": {"type": "integer", "minimum": 0}, "b": {"type": "string"}}}
    numbers, strings = JsonSchema(schema).warnings
    assert "at most 21 digits before the point, 42 as integers, and 22 after it" in numbers
    assert "strings without maxLength are as long as max_tokens allows" in strings
    assert JsonSchema({"type": ["integer", "string"], "enum": [1, "a"]}).warnings == []
    assert refusals({"type": "integer"}, ["9" * 42, "9" * 43]) == ["", "masks"]
    assert refusals({"type": "number"}, ["9" * 21 + "." + "9" * 22, "9" * 22 + ".9"]) == ["", "masks"]


def test_a_schema_that_is_too_deep_is_refused():
    text, itself = '{"properties":{"a":' * 5000 + "{}" + "}}" * 5000, {"type": "array"}
    itself["items"] = itself
    for deep in (nested(900, {"type": "string"}), text, itself, nested(300, {"type": "null"})):
        with pytest.raises(ValueError, match=r"nested|not JSON: Circular"):
            JsonSchema(deep)
    index = JsonSchema(nested(59, {"type": "null"})).index(SMALL)
    assert index.accepts(index.after('{"a":' * 59 + "null" + "}" * 59))


@pytest.mark.parametrize("n", [500, repetitions(2000, 1000)])
def test_hundreds_of_optional_properties_are_allowed_and_read(n):
    schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(n)}}
    index = JsonSchema(schema).index(SMALL)
    text = json.dumps({"p1": 5, f"p{n // 2}": -1, f"p{n - 1}": 12})
    assert index.accepts(index.after(text)) and index.next_bytes(index.after(text[:-1])) != b""
    with pytest.raises(ValueError, match="leaves the language"):
        index.after(b'{"p2":x')


def loop(*needs):
    return {"$defs": {"x": {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "required": [*needs]}}}


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"$ref": "#"}, "leads back to itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "leads back"),
        (nested(1, {"$ref": "#"}), "infinite"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "infinite"),
        ({"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 2}, "infinite"),
        ({"anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 1}, nested(1, {"$ref": "#"})]}, "infinite"),
        ({"$ref": "#/$defs/x"} | loop("x"), "infinite"),
    ],
)
def test_a_schema_whose_instances_would_be_infinite_is_refused(schema, message):
    with pytest.raises(ValueError, match=message):
        JsonSchema(schema)


@pytest.mark.parametrize(
    "schema, text",
    [
        ({"anyOf": [{"type": "null"}, nested(1, {"$ref": "#"})]}, '{"a":{"a":null}}'),
        ({"type": "array", "items": {"$ref": "#"}, "uniqueItems": True}, "[[],[[]]]"),
        ({"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 1}, "[null,[null]]"),
        ({"$ref": "#/$defs/x"} | loop(), '{"x":{"x":{}}}'),
        ({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "null"}}}, "null"),
        ({"$ref": "#/$defs/c0", "$defs": {f"c{i}": {"$ref": f"#/$defs/c{i + 1}"} for i in range(300)} | {"c300": True}},
         "[1]"),
    ],
)  # fmt: skip
def test_a_recursion_that_can_end_is_read(schema, text):
    assert refusals(schema, [text, text + "]"]) == ["", "masks"]


def test_a_dict_with_many_places_is_written_out_to_some_size():
    part = {"type": "integer"}
    for _ in range(12):
        part = {"allOf": [part, part]}
    JsonSchema({"$defs": {"a": part}, "type": "null"})
    for _ in range(100):
        part = {"allOf": [part, part]}
    with pytest.raises(ValueError, match="more than 1,000,000 values when it is written out"):
        JsonSchema(part)


# ---- values


class Kind(pydantic.BaseModel):
    price: Decimal
    tags: set[str] = set()


def test_parse_returns_values_and_objects_of_a_type():
    assert JsonSchema(True).parse('{"a":[1,2.5,null]}') == {"a": [1, 2.5, None]}
    assert JsonSchema(Kind).parse('{"price":"1.50","tags":["x"]}') == Kind(price=Decimal("1.50"), tags={"x"})
    for text, message in [
        ('{"a":1,"a":2}', "has the name 'a' twice"),
        ("[NaN]", "NaN', which is no number in the range of doubles"),
        ("[1e999]", "1e999', which is no number in the range of doubles"),
        ("[" * 100_000, "nested too deep"),
        ("[1", "delimiter"),
    ]:
        with pytest.raises(ValueError, match=message):
            JsonSchema(True).parse(text)
    hundredths = JsonSchema({"type": "number", "not": {"const": 3}, "multipleOf": 0.01})
    assert [hundredths.parse(text) for text in ("1e-99999999", "1.23e300")] == [0, 1.23e300]     # at once
    with pytest.raises(ValueError, match="#, 'not' does not hold"):
        JsonSchema({"type": "array", "not": {"maxItems": 2, "items": {"type": "null"}}}).parse("[null]")


FEW = [b'{"a":', b"1", b"2", b'"x', b'"', b"}", b" ", b"x"]
SHORT = {"anyOf": [{"type": "integer", "maximum": 12, "minimum": 0}, {"type": "string", "maxLength": 2}]}
PAIR = CLOSED | {"properties": {"a": SHORT}, "required": ["a"]}


def test_a_complete_record_has_its_weight_by_enumeration():
    scores = np.random.default_rng(0).normal(size=(3, len(FEW) + 1))
    lm = table_lm(lambda ids: scores[len(ids) % 3].tolist(), FEW)
    program = ConstrainedText(lm, "x", JsonSchema(PAIR), max_tokens=5, complete=True)
    exact = enumerate_exact(program)
    assert {str(each) for each in exact} >= {'{"a":1}', '{"a":12}', '{"a":"xx"}', '{"a":2 }'}
    assert all(JsonSchema(PAIR).parse(str(each)) for each in exact)
    Z = np.exp(exact.log_ml)
    seeds = range(repetitions(2000, 100))
    Zs = [np.exp(importance_sampling(program, 4, seed=seed, progress=False).log_ml) for seed in seeds]
    assert abs(np.mean(Zs) - Z) < 4 * np.std(Zs) / np.sqrt(len(Zs))


def test_free_json_may_nest_deeply():
    constraint = JsonSchema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    index = constraint.index(SMALL)
    deep = b'{"n": 1, "x": ' + b"[" * 200 + b'{"a": null}' + b"]" * 200 + b"}"
    assert index.accepts(index.after(deep)) and not index.accepts(index.after(deep[:-1]))
    with pytest.raises(ValueError, match="leaves the language"):
        index.after(deep.replace(b"null}]", b"null]"))


PLAIN = [bytes([byte]) for byte in b'{}[]":,01-.truefalsnbcz']
JOINED = [b'"}', b"}}", b"[]}", b"{}", b"]]", b'":', b'{"', b"[[", b"},", b'","', b"]},{", b'[{"a":']


def test_all_records_with_additional_members_end_in_time():
    scores = np.random.default_rng(1).normal(size=(5, len(PLAIN) + len(JOINED) + 1))
    lm = table_lm(lambda ids: scores[len(ids) % 5].tolist(), [*PLAIN, *JOINED])
    schema = JsonSchema({"properties": {"a": {"type": "integer"}, "b": {}}, "type": "object", "required": ["a", "b"]},
                        lenient=True)  # fmt: skip
    program = ConstrainedText(lm, "z", schema, max_tokens=14, complete=True)
    particles = importance_sampling(program, 100, seed=0, progress=False)
    values = [schema.parse(str(each)) for each in particles if each.log_weight > -np.inf]
    assert len(values) == 100 and all(value.keys() >= {"a", "b"} for value in values)


def test_a_search_among_many_different_items_gives_up():
    items = {"enum": list(range(40))}
    index = JsonSchema({"type": "array", "items": items, "uniqueItems": True, "minItems": 20}).index(BYTES)
    shortest = len("[" + ",".join(map(str, [*range(10), *range(10, 20)])) + "]")
    bound = index.tokens_to_accept(index.start)
    assert shortest <= bound < math.inf and not index.mask_within(index.start, shortest - 1).any()
    assert index.mask_within(index.start, bound).any()


# ---- llguidance


def test_jsonschemabench_is_solved_as_by_llguidance_but_for_the_order():
    llguidance = pytest.importorskip("llguidance")
    lines = (wants("jsonschemabench") / "maskbench_tests.jsonl").read_text().splitlines()
    tokens = [*(b"%c" % byte for byte in range(255)), b"", b""]
    facts = types.SimpleNamespace(eos_token_id=256, bos_token_id=None, tokens=tokens, special_token_ids=[])
    tokenizer, theirs, only_theirs = llguidance.LLTokenizer(llguidance.TokenizerWrapper(facts)), 0, []
    for case in map(json.loads, lines[:: repetitions(1, 25)]):
        grammar = llguidance.LLMatcher.grammar_from_json_schema(case["schema"])
        if llguidance.LLMatcher.validate_grammar(grammar):
            continue
        reader = Reader(case["schema"], lenient=True)
        for test in case["tests"]:
            data = json.dumps(test["data"], ensure_ascii=False)
            matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
            read = matcher.try_consume_tokens(list(data.encode())) == len(data.encode())
            right, is_theirs = reader.admits(data) == test["valid"], (read and matcher.is_accepting()) == test["valid"]
            theirs += is_theirs
            if is_theirs and not right:
                in_any_order = Reader(case["schema"], lenient=True, order="any").admits(data)
                only_theirs += [(case["id"], data)] * (in_any_order != test["valid"])
    assert theirs > 0 and not only_theirs


LINKED = {"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}, "value": {"type": "integer"}}}}}


@pytest.mark.parametrize("schema", [
    {"type": "array", "items": {"type": "integer"}},
    {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True},
    {"allOf": [POINT, {"required": ["b"]}]},
    {**LINKED, "$ref": "#/$defs/n"},
], ids=["array", "unique", "both", "linked"])  # fmt: skip
def test_a_schema_that_nobody_holds_is_freed(schema):
    def walk():
        index = JsonSchema(schema).index(SMALL)
        state = index.start
        for byte in b'{"next": {"va' if "$ref" in schema else b"[1" if "items" in schema else b'{"a":1':
            assert index.mask(state).any()
            state = index.advance(state, len(PIECES) + byte)
        return weakref.ref(index.recognizer)

    kept = walk()
    gc.collect()
    assert kept() is None
