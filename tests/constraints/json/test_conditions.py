"""Keywords of JSON Schema that no mask enforces: checks of the finished text, by hand and by enumeration."""

import itertools
import json
import pickle
import sys

import numpy as np
import pytest
from helpers.commands import particles, run
from helpers.common import ROOT, repetitions
from helpers.tiny import add_up, table_lm
from pydantic import BaseModel, field_validator

from llmppl import ConstrainedText, JsonSchema, Model, Regex, enumerate_exact, run_many, smc_steer
from llmppl.constraints import DFA
from llmppl.constraints.json.checks import target
from llmppl.constraints.masks.explain import match_prefix

SHARED = ROOT.parent / "shared"

LEAVES = [None, True, 0, 1, 2, 1.5, "", "a", "ab", "2024-02-29"]
OBJECTS = [
    {name: value for name, value in zip("abc", values, strict=True) if value is not None}
    for values in itertools.product([None, 1, 2, "a"], repeat=3)
]
ARRAYS = [list(values) for n in range(4) for values in itertools.product([1, 2, "a"], repeat=n)]
VALUES = [*LEAVES, *OBJECTS, *ARRAYS, [1, True], [1, 1.5], [[1], [1]], [{"a": 1}, {"a": 1}], [0, False]]
ABC = {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False}


def in_order(value, schema, root):
    """Return a JSON value with the properties of its objects in the order of a schema of `root`, as masks want them."""
    if not isinstance(schema, dict):
        return value
    schema = {**schema, **(target(root, schema.get("$ref")) or {})}
    if isinstance(value, dict):
        named = schema.get("properties", {})
        return {key: in_order(value[key], named.get(key), root) for key in sorted(value, key=[*named, *value].index)}
    if isinstance(value, list):
        schemas = itertools.chain(schema.get("prefixItems", []), itertools.repeat(schema.get("items")))
        return [in_order(each, part, root) for each, part in zip(value, schemas, strict=False)]
    return value


def is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


def distinct(values):
    """Return whether no two values are equal as JSON, in which true is not 1."""
    return len({json.dumps(value) for value in values}) == len(values)


CASES = {                                           # a schema, and its instances by hand
    "uniqueItems": ({"type": "array", "uniqueItems": True}, lambda v: isinstance(v, list) and distinct(v)),
    "uniqueItems false": ({"type": "array", "uniqueItems": False}, lambda v: isinstance(v, list)),
    "unique inside": (
        {"type": "array", "items": {"type": "array", "uniqueItems": True}},
        lambda v: isinstance(v, list) and all(isinstance(each, list) and distinct(each) for each in v),
    ),
    "not": ({"not": {"type": ["object", "array"]}}, lambda v: not isinstance(v, dict | list)),
    "not inside not": (
        {"not": {"not": {"type": "array", "uniqueItems": True}}},
        lambda v: isinstance(v, list) and distinct(v),
    ),
    "oneOf": (
        {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 1}]},
        lambda v: is_number(v) and (isinstance(v, int) != (v >= 1)),
    ),
    "anyOf of oneOf": (
        {"anyOf": [{"oneOf": [{"type": "string"}, {"enum": ["a", 1]}]}, {"const": "a"}]},
        lambda v: isinstance(v, str) or (v == 1 and v is not True),
    ),
    "oneOf of formats": (
        {"oneOf": [{"type": "string", "format": "date"}, {"type": "string", "format": "date-time"}]},
        lambda v: v == "2024-02-29",
    ),
    "not a format": ({"type": "string", "not": {"format": "date"}}, lambda v: isinstance(v, str) and v != "2024-02-29"),
    "dependencies": (
        {**ABC, "dependencies": {"a": ["b"], "c": {"required": ["a"]}}},
        lambda v: isinstance(v, dict) and ("a" not in v or "b" in v) and ("c" not in v or "a" in v),
    ),
    "dependentRequired": (
        {**ABC, "dependentRequired": {"a": ["b"]}},
        lambda v: isinstance(v, dict) and ("a" not in v or "b" in v),
    ),
    "dependentSchemas": (
        {**ABC, "dependentSchemas": {"a": {"properties": {"b": {"const": 1}}}}},
        lambda v: isinstance(v, dict) and ("a" not in v or v.get("b", 1) == 1),
    ),
    "an older draft knows what is newer": (
        {**ABC, "$schema": "http://json-schema.org/draft-04/schema#", "dependentRequired": {"a": ["b"]}},
        lambda v: isinstance(v, dict) and ("a" not in v or "b" in v),
    ),
    "arrays as items, as in older drafts": (
        {"type": "array", "items": [{"type": "integer"}], "uniqueItems": True},
        lambda v: isinstance(v, list) and distinct(v) and (not v or type(v[0]) is int),
    ),
    "if": (
        {**ABC, "if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"required": ["c"]}},
        lambda v: isinstance(v, dict) and ("b" if "a" in v else "c") in v,
    ),
    "contains": (
        {"type": "array", "contains": {"const": 1}, "maxContains": 1},
        lambda v: isinstance(v, list) and sum(each == 1 and each is not True for each in v) == 1,
    ),
    "propertyNames": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
        lambda v: isinstance(v, dict) and "c" not in v,
    ),
    "minProperties": (
        {**ABC, "minProperties": 2, "maxProperties": 2},
        lambda v: isinstance(v, dict) and len(v) == 2,
    ),
    "unevaluatedProperties": (
        {"type": "object", "allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
        lambda v: isinstance(v, dict) and not v.keys() - {"a"},
    ),
    "then makes known what else would be too much": (
        {
            "type": "object",
            "properties": {"a": {}},
            "if": {"required": ["a"]},
            "then": {"properties": {"b": {}}},
            "unevaluatedProperties": False,
        },
        lambda v: isinstance(v, dict) and not v.keys() - ({"a", "b"} if "a" in v else {"a"}),
    ),
    "patternProperties that look around": (
        {"type": "object", "patternProperties": {"^(?!c)": {"const": 1}}, "additionalProperties": False},
        lambda v: isinstance(v, dict) and "c" not in v and {*v.values()} <= {1},
    ),
    "patternProperties that overlap": (
        {"type": "object", "patternProperties": {"^[ab]$": {"type": "integer"}, "^[bc]$": {"maximum": 1}}},
        lambda v: isinstance(v, dict) and all(type(v.get(name, 1)) is int for name in "ab")
        and all(not is_number(v.get(name)) or v[name] <= 1 for name in "bc"),
    ),
    "a pattern that looks around": (
        {"type": "string", "pattern": "^(?!a$)"},
        lambda v: isinstance(v, str) and v != "a",
    ),
    "a reference": (
        {"$ref": "#/$defs/set", "$defs": {"set": {"type": "array", "uniqueItems": True}}},
        lambda v: isinstance(v, list) and distinct(v),
    ),
    "multipleOf of decimals": (
        {"type": "number", "multipleOf": 0.1, "not": {"multipleOf": 1}},
        lambda v: v == 1.5,
    ),
    "coerce_one_of": (
        {"oneOf": [{"type": "number"}, {"enum": [2]}], "not": {"const": 1}, "x-guidance": {"coerce_one_of": True}},
        lambda v: is_number(v) and v != 1,
    ),
    "properties named as keywords": (
        {"type": "object", "properties": {"not": {"type": "integer"}, "a": {"not": {"const": 1}}}},
        lambda v: isinstance(v, dict) and v.get("a") != 1,
    ),
}  # fmt: skip


def is_taken(constraint: JsonSchema, value) -> bool:
    """Return whether masks allow the text of a value, and `parse` returns the value."""
    text = json.dumps(value)
    reading = match_prefix(constraint, text)
    if reading.length < len(text) or not reading.complete:
        return False
    try:
        assert constraint.parse(text) == value
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", CASES)
def test_masks_and_parse_together_accept_exactly_the_instances(name):
    schema, is_instance = CASES[name]
    constraint = JsonSchema(schema)
    for value in VALUES:
        assert is_taken(constraint, value) == is_instance(value), value


def test_a_constraint_with_a_condition_pickles():
    constraint = pickle.loads(pickle.dumps(JsonSchema(CASES["oneOf of formats"][0])))
    assert is_taken(constraint, "2024-02-29") and not is_taken(constraint, "a")


def test_the_command_line_checks_the_finished_text(tmp_path):
    schema = tmp_path / "unique.json"
    schema.write_text('{"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2, "uniqueItems": true}')
    assert run("check", '["a", "b"]', "--grammar", str(schema)).exit_code == 0
    refused = run("check", '["a", "a"]', "--grammar", str(schema))
    assert refused.exit_code == 1
    assert "no match: its form is right, but #, 'uniqueItems' does not hold" in refused.stdout
    for row in particles("generate", "Say: ", "--grammar", str(schema), "--max-tokens", "20", "--seed", "1"):
        assert distinct(json.loads(row["text"]))


def test_warnings_name_the_keywords_that_are_checked_at_the_end():
    schema = {"properties": {"tags": {"type": "array", "uniqueItems": True}}, "not": {"required": ["a"]}}
    assert JsonSchema(schema).warnings == [
        "#, 'not' is checked on the finished text",
        "#/properties/tags, 'uniqueItems' is checked on the finished text",
    ]
    with pytest.raises(ValueError, match=r"^#/properties/tags, 'uniqueItems' does not hold$"):
        JsonSchema(schema).parse('{"tags": ["x", "x"]}')


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"type": "string", "not": {"format": "iri"}}, "JSON schema .*iri"),
        ({"not": {"type": 3}}, "JSON schema at #/not/type: 3 is not valid"),
        ({"not": {"$ref": "#/$defs/a"}}, r"the \$ref '#/\$defs/a' leads nowhere"),
        ({"not": {"$ref": "https://example.org/a"}}, "leads nowhere"),
        ({"not": {"$ref": "#"}}, r"the \$ref '#' leads nowhere"),
        ({"properties": {"a": {"not": {"anyOf": [{"type": "null"}, {"$ref": "#/properties/a"}]}}}}, "leads nowhere"),
        ({"not": {"pattern": "("}}, "JSON schema at #/not/pattern: '\\('"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}], "format": "iri"}, "'format': Unknown format: iri"),
        ({"type": "object", "patternProperties": {"a": {}}, "additionalProperties": False, "properties": {"b": False},
          "required": ["b"]}, "nsatisfiable"),
    ],
)  # fmt: skip
def test_a_condition_that_cannot_be_read_is_refused(schema, message):
    with pytest.raises(ValueError, match=message):
        JsonSchema(schema)


def test_lenient_passes_over_formats_in_conditions_too():
    constraint = JsonSchema({"type": "string", "not": {"format": "iri", "maxLength": 1}}, lenient=True)
    assert is_taken(constraint, "ab") and not is_taken(constraint, "a")


def test_a_number_of_levels_that_python_cannot_read_is_a_value_error():
    with pytest.raises(ValueError, match="nested too deep"):
        JsonSchema({"type": "array", "uniqueItems": True}).parse("[" * 100_000 + "]" * 100_000)


def test_without_jsonschema_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    JsonSchema({"type": "array"})
    with pytest.raises(ImportError, match=r"pip install llmppl\[json-schema\]"):
        JsonSchema({"type": "array", "uniqueItems": True})


# ---- programs

TOKENS = [b"[", b"]", b"1", b"2", b",", b"1,"]
PAIRS = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 1, "maxItems": 2}


def logits(ids):
    """Return logits of TOKENS and EOS, which depend on the two tokens before. Prompts are "1", which is token 2."""
    a, b = ([7, 7, *ids][-2:])
    return [((3 * a + 5 * b + 7 * i + a * b * i) % 11) / 4 for i in range(len(TOKENS) + 1)]


def log_prob(ids):
    row = np.array([logits([2, *ids[:t]]) for t in range(len(ids))])
    return float(np.sum(row[np.arange(len(ids)), ids] - np.logaddexp.reduce(row, axis=1)))


def texts_by_hand(is_taken, most=5):
    """Return each accepted text of tokens, with the probability of all its spellings and an EOS."""
    pairs = []
    for n in range(1, most + 1):
        for ids in itertools.product(range(len(TOKENS)), repeat=n):
            text = b"".join(TOKENS[i] for i in ids).decode()
            if is_taken(text):
                pairs.append((text, log_prob([*ids, len(TOKENS)])))
    return add_up(pairs)


UNIQUE = {"[1]", "[2]", "[1,2]", "[2,1]"}


def pairs_program():
    pair = JsonSchema(PAIRS, whitespace=False)
    return ConstrainedText(table_lm(logits, TOKENS), "1", pair, max_tokens=5, end="eos")


def test_the_posterior_is_that_of_the_whole_schema():
    truth = texts_by_hand(UNIQUE.__contains__)
    posterior = enumerate_exact(pairs_program())
    assert posterior.by_text() == pytest.approx({text: p / sum(truth.values()) for text, p in truth.items()})
    assert np.exp(posterior.log_ml) == pytest.approx(sum(truth.values()))
    assert all(particle.parsed == json.loads(particle.s) for particle in posterior)


def test_steering_estimates_the_probability_of_an_instance_without_bias():
    Z, n = sum(texts_by_hand(UNIQUE.__contains__).values()), repetitions(2000, 300)
    Zs = np.exp([smc_steer(pairs_program(), N=3, K=2, seed=seed).log_ml for seed in range(n)])
    assert np.mean(Zs) == pytest.approx(Z, abs=4 * np.std(Zs) / np.sqrt(n))
    assert np.std(Zs) > 0


class Spans(Model):
    """A pair as a span of a step."""

    shared = ("lm", "pair")

    def __init__(self, lm, constraint):
        super().__init__()
        self.lm, self.pair = lm, constraint

    def step(self):
        span = self.extend(self.lm.context("1"), constraint=self.pair, max_tokens=5, complete=True)
        self.s += span.text
        self.finish()


def test_a_span_obeys_the_whole_schema_and_ends_with_it():
    truth = {}
    for n in range(1, 6):
        for ids in itertools.product(range(len(TOKENS)), repeat=n):
            text = b"".join(TOKENS[i] for i in ids).decode()
            if text in UNIQUE:
                truth[text] = truth.get(text, 0.0) + np.exp(log_prob(ids))
    posterior = enumerate_exact(Spans(table_lm(logits, TOKENS), JsonSchema(PAIRS, whitespace=False)))
    assert np.exp(posterior.log_ml) == pytest.approx(sum(truth.values()))
    assert posterior.by_text() == pytest.approx({text: p / sum(truth.values()) for text, p in truth.items()})


class EvenNumber(DFA):
    """A language with a `parse` of its own."""

    def __init__(self):
        digits = Regex("[12]{1,3}").explore()
        self._fix(digits.table, digits.accepting, digits.start)

    def parse(self, text):
        if int(text) % 2:
            raise ValueError("it is odd")
        return int(text)


def test_a_custom_constraint_selects_its_texts_by_parse():
    truth = texts_by_hand(lambda text: set(text) <= {"1", "2"} and int(text) % 2 == 0, most=3)
    program = ConstrainedText(table_lm(logits, TOKENS), "1", EvenNumber(), max_tokens=3, end="eos")
    posterior = enumerate_exact(program)
    assert np.exp(posterior.log_ml) == pytest.approx(sum(truth.values()))
    assert {particle.parsed for particle in posterior} == {int(text) for text in truth}


def test_a_span_continues_if_parse_rejects_a_possible_prefix():
    posterior = enumerate_exact(Spans(table_lm(logits, TOKENS), EvenNumber()))
    assert set(posterior.texts) == {"2", "12", "112"}


class Even(BaseModel):
    n: int

    @field_validator("n")
    @classmethod
    def is_even(cls, n):
        if n % 2:
            raise ValueError(f"{n} is odd")
        return n


EVEN = [b'{"n":', b"1", b"2", b"3", b"}"]


def even_program(**options):
    lm = table_lm(lambda ids: [1.0, 0.5, 0.2, 0.8, 1.5, 0.3], EVEN)
    return ConstrainedText(lm, "1", JsonSchema(Even, whitespace=False), **{"max_tokens": 5, **options})


def test_a_particle_that_a_validator_rejects_is_removed():
    posterior = enumerate_exact(even_program())
    assert {particle.s for particle in posterior} == {
        f'{{"n":{a}{b}2}}' for a in ["", "1", "2", "3"] for b in ["", "1", "2", "3"]
    }
    assert all(particle.parsed == Even.model_validate_json(particle.s) for particle in posterior)
    for result in run_many(lambda task, rng: smc_steer(even_program(), N=8, K=3, rng=rng), [0, 1], seed=0):
        assert len(result.particles) and all(particle.parsed.n % 2 == 0 for particle in result.particles)


def test_a_death_at_the_end_names_the_validator_and_the_text():
    lm = table_lm(lambda ids: [1.0, 0.5, -np.inf, 0.8, 1.5, 0.3], EVEN)
    posterior = smc_steer(
        ConstrainedText(lm, "1", JsonSchema(Even, whitespace=False), max_tokens=4), N=4, K=2, seed=0
    )
    with pytest.raises(ValueError, match=r"JsonSchema refuses the finished text, .*: n: Value error, \d+ is odd"):
        _ = posterior.best
    assert '"n":' in posterior.deaths[-1].text


def test_an_unfinished_text_is_not_parsed():
    with pytest.raises(ValueError, match="'' is not parsed: the text has not ended"):
        _ = even_program().parsed
    posterior = smc_steer(even_program(max_tokens=2, complete=False), N=4, K=2, seed=0)
    with pytest.raises(ValueError, match="is not parsed: the text has not ended; complete=True wants an end"):
        _ = posterior.best.parsed


def test_a_text_without_a_constraint_or_of_a_regex_parses_as_itself():
    lm = table_lm(lambda ids: [0.0, 0.0, 0.0])
    for constraint in (None, Regex("a+"), ["a", "ab"], lambda text: True):
        particle = smc_steer(ConstrainedText(lm, "a", constraint), N=3, K=2, seed=0, max_steps=50)[0]
        assert type(particle.parsed) is str and particle.parsed == particle.s


def test_an_index_of_a_schema_accepts_the_same_texts_as_the_schema():
    lm = table_lm(logits, TOKENS)
    index = JsonSchema(PAIRS, whitespace=False).index(lm.vocab)
    assert set(enumerate_exact(ConstrainedText(lm, "1", index, max_tokens=5)).texts) == UNIQUE


def test_real_schemas_with_conditions_accept_exactly_the_valid_instances():
    file = SHARED / "evaldata" / "jsonschemabench" / "maskbench_tests.jsonl"
    if not file.exists():
        pytest.skip("jsonschemabench is not at hand")
    taken, valid = [], []
    for case in map(json.loads, file.read_text().splitlines()):
        try:
            constraint = JsonSchema(case["schema"])
        except ValueError:
            continue
        if any("is checked on the finished text" in warning for warning in constraint.warnings):
            values = [in_order(test["data"], constraint.schema, constraint.schema) for test in case["tests"]]
            taken += [is_taken(constraint, value) for value in values]
            valid += [test["valid"] for test in case["tests"]]
    assert taken == valid and valid.count(True) >= 20 and valid.count(False) >= 30
