"""Check of finished JSON texts: against the official suite, the package jsonschema, and by hand."""

import itertools
import json
import pickle
import random

import jsonschema
import pytest
from helpers.common import ROOT, repetitions

from llmppl.constraints.json.check import MAX_CALLS, Check, read_json
from llmppl.constraints.json.keywords import check_keywords, misspelt
from llmppl.constraints.json.references import draft_of, lookup, registry_of, resolver_of, specification_of

DATA = ROOT.parent / "shared" / "evaldata"
SUITE, CORPUS = DATA / "json_schema_suite", DATA / "jsonschemabench"
SCHEMAS = {4: "http://json-schema.org/draft-04/schema#", 7: "http://json-schema.org/draft-07/schema#",
           2019: "https://json-schema.org/draft/2019-09/schema"}      # fmt: skip
UNMET = {                                           # by file: what differs, on purpose
    "content.json": "contentEncoding and contentMediaType are annotations",
    "schema that uses custom metaschema with with no validation vocabulary": "vocabularies are not read",
}


def own_format(name, text):
    """Return whether a text has a format, by the package jsonschema, None for a format that it does not know."""
    checker = jsonschema.FormatChecker()
    return checker.conforms(text, name) if name in ("date", "ipv4") else None


# ---- the official suite


@pytest.mark.skipif(not SUITE.exists(), reason="the official suite is not here")
@pytest.mark.parametrize("draft", ["draft7", "draft2020-12"])
def test_the_official_suite_passes(draft):
    wrong, count = [], 0
    for file in sorted((SUITE / "tests" / draft).rglob("*.json")):
        for case in json.loads(file.read_text()) if "format" not in file.parent.name + file.name else ():
            schema = case["schema"]
            if draft == "draft7" and isinstance(schema, dict):
                schema = {"$schema": SCHEMAS[7]} | schema
            check = Check(schema, SUITE / "remotes")
            for test in case["tests"]:
                count += 1
                if (check(json.dumps(test["data"])) == "") != test["valid"]:
                    wrong.append((file.name, case["description"]))
    assert count > 900
    assert [each for each in wrong if not UNMET.keys() & set(each)] == []


@pytest.mark.skipif(not CORPUS.exists(), reason="the corpus of schemas is not here")
def test_texts_of_real_schemas_are_judged_as_by_their_authors():
    judged = 0
    for line in (CORPUS / "maskbench_tests.jsonl").read_text().splitlines():
        case = json.loads(line)
        if '"format"' in line:
            continue
        check = Check(case["schema"])
        for test in case["tests"]:
            judged += 1
            assert (check(json.dumps(test["data"])) == "") == test["valid"], case["id"]
    assert judged > 500


# ---- against the package jsonschema

LEAVES = [None, True, False, 0, 1, 2, 1.5, 3, "", "a", "ab", "b1"]
VALUES = [*LEAVES, *([*each] for n in range(4) for each in itertools.product([1, "a", True], repeat=n)),
          *(dict(zip(names, values, strict=True)) for n in range(3) for names in itertools.combinations("abc", n)
            for values in itertools.product([1, "a", {"a": 1}, [1, 1]], repeat=n))]     # fmt: skip


def random_schema(rng, depth):
    """Return a schema of a few keywords."""
    if not depth or rng.random() < 0.1:
        return rng.choice([True, False, {}, {"type": "string"}, {"type": "integer"}, {"const": 1}, {"enum": ["a", 2]}])

    def inner():
        return random_schema(rng, depth - 1)

    def some():
        return [inner() for _ in range(rng.randint(1, 3))]

    def named():
        return {name: inner() for name in rng.sample("abc", rng.randint(1, 2))}

    makers = {
        "type": lambda: rng.choice(["object", "array", ["string", "integer"], "number", ["object", "null"]]),
        "properties": named, "patternProperties": lambda: {rng.choice(["^a", "b$", "[bc]"]): inner()},
        "additionalProperties": inner, "propertyNames": lambda: {"maxLength": 1}, "required": lambda: ["a"],
        "items": inner, "prefixItems": some, "contains": inner, "minContains": lambda: rng.randint(0, 2),
        "maxContains": lambda: rng.randint(0, 2), "uniqueItems": lambda: True, "minItems": lambda: rng.randint(0, 2),
        "allOf": some, "anyOf": some, "oneOf": some, "not": inner, "if": inner, "then": inner, "else": inner,
        "unevaluatedProperties": inner, "unevaluatedItems": inner, "minimum": lambda: 1, "exclusiveMaximum": lambda: 2,
        "multipleOf": lambda: rng.choice([0.5, 2]), "minLength": lambda: 1, "pattern": lambda: "^a",
        "dependentRequired": lambda: {"a": ["b"]}, "dependentSchemas": named, "maxProperties": lambda: 1,
    }  # fmt: skip
    return {key: makers[key]() for key in rng.sample(sorted(makers), rng.randint(1, 5))}


@pytest.mark.parametrize("seed", range(repetitions(20, 3)))
def test_random_schemas_agree_with_jsonschema(seed):
    rng, answers = random.Random(seed), set()
    for _ in range(150):
        schema = random_schema(rng, 3)
        check, other = Check(schema), jsonschema.Draft202012Validator(schema)
        for value in rng.sample(VALUES, 12):
            held = check(json.dumps(value)) == ""
            answers.add(held)
            assert held == other.is_valid(value), (schema, value)
    assert answers == {True, False}


# ---- values


@pytest.mark.parametrize("schema, text, expected", [
    ({"minimum": 0, "maximum": 99.99}, "99.99", ""),
    ({"maximum": 99.99}, "99.990000000000000001", "#, 'maximum'"),
    ({"maximum": 0.1}, "0.1000000000000000055", "#, 'maximum'"),
    ({"exclusiveMinimum": 10**30}, str(10**30), "#, 'exclusiveMinimum'"),
    ({"minimum": 9007199254740993}, "9007199254740992.5", "#, 'minimum'"),
    ({"multipleOf": 0.1}, "0.3", ""),
    ({"multipleOf": 0.01}, "1.005", "#, 'multipleOf'"),
    ({"const": 1}, "1.0", ""),
    ({"const": 1}, "true", "#, 'const'"),
    ({"enum": [{"a": 1.10}]}, '{"a": 11e-1}', ""),
    ({"type": "integer"}, "1e2", ""),
    ({"type": "integer"}, "1.5", "#, 'type'"),
    ({"$schema": SCHEMAS[4], "type": "integer"}, "1.0", "#, 'type'"),
    ({"uniqueItems": True}, "[1, true, 1.0]", "#, 'uniqueItems'"),
    ({"uniqueItems": True}, '[{"a": 1, "b": 2}, {"b": 2, "a": 1.0}]', "#, 'uniqueItems'"),
    ({"uniqueItems": True}, "[1, true, [1], [true]]", ""),
    ({"minLength": 2}, '"😀"', "#, 'minLength'"),
    ({"maxItems": 2.0}, "[1, 2, 3]", "#, 'maxItems'"),
    ({"pattern": "a$"}, r'"a\n"', "#, 'pattern'"),
    ({"patternProperties": {r"^\d$": False}}, '{"٣": 1}', ""),
    ({"patternProperties": {"^x/": {"type": "null"}}}, '{"x/": 1}', "#/patternProperties/^x~1, 'type'"),
    ({"additionalProperties": False}, '{"a": 1}', "#, 'additionalProperties'"),
    ({"properties": {"a": False}}, '{"a": 1}', "#/properties/a, 'false'"),
    ({"items": {"$ref": "#/$defs/s"}, "$defs": {"s": {"type": "string"}}}, "[1]", "#/items/$ref, 'type'"),
    ({"format": "date"}, '"2023-02-29"', "#, 'format'"),
    ({"format": "name of nobody"}, '"x"', ""),
    ({"contentEncoding": "base64"}, '"%"', ""),
    ({"minimum": 5, "exclusiveMinimum": True}, "5", "#, 'minimum'"),
    ({"items": [{"type": "null"}], "additionalItems": False}, "[null, 1]", "#, 'additionalItems'"),
    ({"$schema": SCHEMAS[7], "$ref": "#/definitions/a", "maxLength": 1, "definitions": {"a": {}}}, '"ab"', ""),
    ({"$ref": "#/$defs/a", "maxLength": 1, "$defs": {"a": {}}}, '"ab"', "#, 'maxLength'"),
    ({"dependencies": {"a": ["b"]}}, '{"a": 1}', "#, 'dependencies'"),
    ({"$schema": "http://json-schema.org/draft-03/schema#", "extends": {"disallow": "null"}}, "null",
     "#/extends, 'disallow'"),
    ({"$schema": "http://json-schema.org/draft-03/schema#", "properties": {"a": {"required": True}}}, "{}",
     "#/properties/a, 'required'"),
    ({"oneOf": [{"type": "number"}, {"const": 1}]}, "1", "#, 'oneOf'"),
    ({"oneOf": [{"type": "number"}, {"const": 1}], "x-guidance": {"coerce_one_of": True}}, "1", ""),
    (False, "1", "#, 'false'"),
    (True, "1", ""),
])  # fmt: skip
def test_the_first_keyword_that_fails_is_named(schema, text, expected):
    check = Check(schema, formats=own_format)
    assert check(text) == expected
    assert pickle.loads(pickle.dumps(check))(text) == expected


@pytest.mark.parametrize("text, reason", [
    (r'{"a": 1, "\u0061": 2}', "'a' twice"), ("NaN", "NaN"), ("[-Infinity]", "Infinity"), ("[1e999]", "1e999"),
    ("[1e-999]", "1e-999"), ("1" * 5000, "5,000 digits"), ("[" * 100_000 + "]" * 100_000, "nested too deep"),
    ("[1", "line 1"), ('{"a": 1} x', "Extra data"),
])  # fmt: skip
def test_texts_that_other_readers_change_are_refused(text, reason):
    with pytest.raises(ValueError, match="(?i)" + reason):
        read_json(text)
    with pytest.raises(ValueError, match="(?i)" + reason):
        Check({})(text)


def test_numbers_are_doubles_or_exact():
    assert read_json("[0.1, 1, 0e999999999, 1E2]") == [0.1, 1, 0.0, 100.0]
    assert [type(each) for each in read_json("[0.1, 1]")] == [float, int]
    assert [str(each) for each in read_json("[0.10, 1]", exact=True)] == ["0.10", "1"]


# ---- references

LONG = {"minLength": 3, "$anchor": "long"}
REMOTE = {"$id": "https://example.com/name.json", "type": "string", "$defs": {"long": LONG}}


@pytest.mark.parametrize(
    "ref", ["name.json", "https://example.com/a/name.json", "name.json#/$defs/long", "name.json#long"]
)
def test_references_are_read_from_a_mapping_or_a_folder(ref, tmp_path):
    (tmp_path / "name.json").write_text(json.dumps(REMOTE))
    for resources in ({"name.json": REMOTE}, {"name.json": json.dumps(REMOTE)}, tmp_path, str(tmp_path)):
        check = Check({"properties": {"a": {"$ref": ref}}}, resources)
        assert check('{"a": "abc"}') == ""
        assert check('{"a": "a"}' if "long" in ref else '{"a": 1}').startswith("#/properties/a/$ref")
        assert pickle.loads(pickle.dumps(check))('{"a": "abc"}') == ""


def test_files_refer_to_others_beside_them(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.json").write_text('{"$ref": "b.json"}')
    (tmp_path / "in" / "b.json").write_text('{"type": "null"}')
    assert Check({"$ref": "in/a.json"}, tmp_path)("1") == "#/$ref/$ref, 'type'"


@pytest.mark.parametrize(
    "ref", ["../secret.json", "in/../../secret.json", "/etc/hostname", "link.json", "%2e%2e/secret.json"]
)
def test_no_file_outside_of_the_folder_is_read(ref, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret.json").write_text("{}")
    (folder / "link.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ValueError, match="leads nowhere"):
        Check({"$ref": ref}, folder)


@pytest.mark.parametrize("schema, reason", [
    ({"$ref": "#/$defs/a"}, "'#/\\$defs/a' leads nowhere"),
    ({"items": {"$ref": "o.json#/a"}}, "#/items, .*resources={'o.json': schema}"),
    ({"$ref": "#a"}, "nowhere"),
    ({"$ref": "#/enum/0", "enum": ["a"]}, "str, which is no schema"),
    ({"$ref": "#"}, "leads back to itself"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}}, "leads back to itself"),
    ({"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(5000)} | {"5000": {}}},
     "5,002 schemas"),
    ({"pattern": "(a)\\1"}, "#, 'pattern': .*backreference"),
    ({"type": "objekt"}, "#, 'type': \"objekt\" .*did you mean 'object'"),
    ({"properties": {"a": {"minimum": "3"}}}, "#/properties/a, 'minimum': \"3\" should be a finite number"),
    ({"minLength": -1}, "-1 should be a whole number, 0 or more"), ({"maximum": float("nan")}, "finite"),
    ({"required": "a"}, "a list of names"), ({"items": 3}, "a schema"), ({"allOf": []}, "a list of schemas"),
    ({"properties": {"a": 1}}, "an object of schemas"), ({"multipleOf": 0}, "above 0"), ({"$ref": 1}, "a string"),
    ({"type": [["string"]]}, "one of string"), ({"$ref": "#/x", "x": {"minimum": "3"}}, "\"3\" should be a finite"),
    ({"$ref": "#/x", "x": {"$ref": {}}}, "a string"), (3, "an object or a boolean"),
])  # fmt: skip
def test_wrong_schemas_are_refused_with_place_and_keyword(schema, reason):
    with pytest.raises(ValueError, match=reason):
        Check(schema)


def test_the_place_of_a_file_that_is_not_json_is_named(tmp_path):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match="'a.json' is not JSON"):
        Check({"$ref": "a.json"}, tmp_path)


@pytest.mark.parametrize("schema, draft", [
    ({}, 2020), ({"items": [{}]}, 7), ({"properties": {"a": {"items": [{}]}}}, 7), ({"enum": [{"items": [1]}]}, 2020),
    ({"$schema": SCHEMAS[4]}, 4), ({"$schema": "https://json-schema.org/draft-07/schema"}, 7),
    ({"$schema": SCHEMAS[2019]}, 2019), ({"$schema": "https://example.com/mine"}, 2020), (True, 2020),
])  # fmt: skip
def test_the_draft_is_that_of_the_schema(schema, draft):
    assert draft_of(specification_of(schema)) == draft


def test_a_resolver_follows_anchors_and_embedded_resources():
    inner = {"$id": "inner", "$anchor": "here", "items": {"$ref": "#here"}}
    schema = {"$id": "https://example.com/root", "$defs": {"a": inner}, "$ref": "inner#here"}
    resolver = resolver_of(schema, registry_of(schema))
    first = lookup(resolver, schema["$ref"], "#")
    assert first.contents is inner
    assert lookup(first.resolver, "#here", "#").contents is inner


# ---- work


@pytest.mark.parametrize("more", [{}, {"unevaluatedProperties": False}, {"unevaluatedItems": False}])
def test_a_schema_that_doubles_the_work_is_stopped(more, monkeypatch):
    monkeypatch.setattr("llmppl.constraints.json.check.MAX_CALLS", MAX_CALLS // 10)
    parts = {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} | more for i in range(30)}
    check = Check({"$ref": "#/$defs/0", "$defs": parts | {"30": {"type": "string"}}})
    with pytest.raises(ValueError, match="keywords to check the text"):
        check("1")


@pytest.mark.parametrize("schema, value", [
    ({"pattern": "^(a+)+$"}, "a" * 5000 + "!"), ({"patternProperties": {"^(a|a)*$": False}}, {"a" * 5000 + "!": 1}),
    ({"uniqueItems": True}, [*range(20_000), 0]), ({"enum": list(range(20_000))}, -1),
])  # fmt: skip
def test_keywords_take_linear_time(schema, value):
    assert (Check(schema)(json.dumps(value)) == "") == ("patternProperties" in schema)


def test_a_pattern_of_many_states_begins_anew(monkeypatch):
    monkeypatch.setattr("llmppl.constraints.json.check.MAX_STATES", 50)
    check = Check({"pattern": "(a|b)*a(a|b){12}$"})
    rng = random.Random(0)
    for _ in range(100):
        text = "".join(rng.choices("ab", k=30))
        assert (check(json.dumps(text)) == "") == (text[-13] == "a")
    assert check.patterns["(a|b)*a(a|b){12}$"].num_states < 500


def test_deep_texts_end_in_an_answer_or_an_error():
    check = Check({"$defs": {"n": {"items": {"$ref": "#/$defs/n"}, "type": "array"}}, "$ref": "#/$defs/n"})
    assert check("[" * 40 + "]" * 40) == ""
    for depth in (900, 5000):
        with pytest.raises(ValueError, match="nested too deep"):
            check("[" * depth + "]" * depth)


# ---- names


@pytest.mark.parametrize("schema, meant", [
    ({"propertes": {"a": {}}}, "properties"), ({"type": "object", "requird": ["a"]}, "required"),
    ({"items": {"minimun": 3}}, "minimum"), ({"additionalproperties": False}, "additionalProperties"),
    ({"min_length": 3}, "minLength"), ({"anyof": [{}]}, "anyOf"), ({"tpye": "string"}, "type"),
    ({"type": "array", "itmes": {}}, "items"), ({"properties": {"a": {"maxLenght": 3}}}, "maxLength"),
])  # fmt: skip
def test_a_name_one_edit_from_a_keyword_is_reported(schema, meant):
    assert f"did you mean {meant!r}?" in misspelt(schema)


def test_names_of_extensions_are_no_misspelt_keywords():
    names = {
        "tsType": "string", "typeof": "function", "form": "a", "devDependencies": {}, "defs": {"a": {}}, "note": "a",
        "formats": ["a"], "patterns": ["a"], "enums": ["a"], "types": ["string"], "item": {}, "constant": 3, "x-of": [],
    }  # fmt: skip
    assert misspelt({"type": "object"} | names) is None
    assert misspelt({"properties": {name: {} for name in ("requird", "propertes")}}) is None
    assert misspelt({}) is None and misspelt(True) is None
    assert "has no keyword" in misspelt({"name": {"type": "string"}})


@pytest.mark.skipif(not DATA.exists(), reason="the corpora of schemas are not here")
def test_real_schemas_have_keywords_of_the_right_kind():
    lines = [line for name in ("JsonSchemaStore", "Github_easy", "Github_trivial", "Glaiveai2K")
             for line in (CORPUS / f"{name}.jsonl").read_text().splitlines()]           # fmt: skip
    schemas = [json.loads(line)["schema"] for line in lines]
    for file in SUITE.rglob("tests/**/*.json"):
        schemas += [case["schema"] for case in json.loads(file.read_text())]
    for schema in schemas:
        check_keywords(schema)
        message = misspelt(schema)
        assert message is None or "has no keyword" in message, schema
    assert len(schemas) > 1000
