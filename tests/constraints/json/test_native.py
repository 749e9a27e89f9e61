"""Native code after checks: hostile schemas, texts and files end in a result or a ValueError, never with the process.

Each case runs in a process of its own with 4 GB of memory and a time limit. Schemas are read in a thread with 512 KiB
of stack, as in a server.
"""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers.common import HANG, ROOT, repetitions
from helpers.tiny import table_lm

from llmppl import CachedTransformer, ConstrainedText, JsonSchema, enumerate_exact, smc_steer
from llmppl.constraints.json import texts as json_texts
from llmppl.constraints.json.conditions import _hashable
from llmppl.constraints.masks import explain as wording

pytest.importorskip("llguidance", reason="pip install 'llmppl[json-schema]'")
SECONDS = 60                                            # of CPU, for one case


# ---- schemas


def chained(n, form):
    """Return n definitions, each of which refers to the next in the given form."""
    parts = {f"a{i}": json.loads(form.replace("NEXT", f"#/$defs/a{i + 1}")) for i in range(n)}
    return {"$ref": "#/$defs/a0", "$defs": {**parts, f"a{n}": {"type": "integer"}}}


def nested(n, key):
    schema = {"type": "integer"}
    for _ in range(n):
        many = key in ("allOf", "anyOf", "oneOf", "prefixItems")
        named = key in ("properties", "patternProperties", "dependentSchemas", "$defs")
        schema = {key: [schema, {"minimum": 1}] if many else {"a": schema} if named else schema}
    return schema


FORMS = [
    '{"$ref": "NEXT"}', '{"type": "object", "properties": {"x": {"$ref": "NEXT"}}, "required": ["x"]}',
    '{"allOf": [{"$ref": "NEXT"}, {"minimum": 1}]}', '{"anyOf": [{"$ref": "NEXT"}, {"type": "null"}]}',
    '{"oneOf": [{"$ref": "NEXT"}, {"type": "null"}]}', '{"type": "array", "items": {"$ref": "NEXT"}}',
    '{"type": "object", "additionalProperties": {"$ref": "NEXT"}}', '{"not": {"$ref": "NEXT"}}',
    '{"if": {"$ref": "NEXT"}, "then": {"$ref": "NEXT"}}', '{"anyOf": [{"$ref": "NEXT"}, {"$ref": "NEXT"}]}',
    '{"not": {"anyOf": [{"$ref": "NEXT"}, {"$ref": "NEXT"}]}}', '{"type": "array", "prefixItems": [{"$ref": "NEXT"}]}',
]  # fmt: skip
KEYS = ["allOf", "anyOf", "oneOf", "not", "if", "items", "properties", "prefixItems", "patternProperties", "contains",
        "propertyNames", "dependentSchemas", "additionalProperties", "unevaluatedProperties", "$defs"]  # fmt: skip


def corpus():
    """Return (name, schema) of hostile schemas."""
    for form in FORMS:
        for n in repetitions([3, 40, 300, 1000, 5000, 30_000], [300, 5000]):
            yield f"{n} of {form}", chained(n, form)
    for key in KEYS:
        for n in repetitions([20, 59, 61, 300], [59, 61]):
            yield f"{n} deep in {key}", nested(n, key)
    for n in repetitions([100, 1000, 2000, 2001, 4000], [2000, 4000]):
        yield f"enum of {n} objects", {"enum": [{f"p{j}": i * j for j in range(21)} for i in range(n)]}
        yield f"anyOf of {n} objects", {"anyOf": [{"properties": {"a": {"const": i}}} for i in range(n)]}
        yield f"{n} optional", {"type": "object", "properties": {f"p{i}": {} for i in range(n)}}
        yield f"{n} required", {"type": "object", "required": [f"p{i}" for i in range(n)]}
        yield f"allOf of {n}", {"allOf": [{"type": "integer", "minimum": i} for i in range(n)]}
        yield f"const of {n}", {"const": list(range(10 * n))}
        yield f"string of {n}", {"const": "a" * n * 100}
        yield f"enum of {n}", {"enum": list(range(n * 10))}
        yield f"a pattern of {n}", {"pattern": "a" * n * 10}
        yield f"a pattern of {n} asked", {"not": {"pattern": "a" * n * 10}}
        yield f"brackets of {n}", {"not": {"pattern": "(" * n + "a" + ")" * n}}
        yield f"counts to {n}", {"not": {"pattern": f"^(.{{0,{n}}}x){{0,{n}}}$"}}
        yield f"subsets of {n}", {"not": {"pattern": f"a.{{{n}}}b"}}
        yield f"a number of {n}", json.loads(f'{{"maximum": 1{"0" * n}}}')
        yield f"{n} patterns of names", {"patternProperties": {f"a{i}": {"type": "integer"} for i in range(n)}}
        yield f"{n} patterns at once", {"allOf": [{"type": "string", "pattern": f"a{{{i}}}"} for i in range(n)]}
    for keyword in ("maxLength", "minLength", "maxItems", "minItems", "maxProperties", "minProperties"):
        for n in (10_000, 1_000_000_000, 10**18, 1e9):
            yield f"{keyword} {n}", {keyword: n}
    for pattern in ("(" * 30 + "a{0,9}" + "){0,9}" * 30, "(a+)+$", "((a*)*)*b", "(?=(a+)+$)a", "^(a|aa)+$", r"(a)\1"):
        yield f"the pattern {pattern}", {"pattern": pattern}
        yield f"not the pattern {pattern}", {"not": {"pattern": pattern}}
    either = [{"anyOf": [{"properties": {f"a{j}": {"const": i}}} for i in (0, 1)]} for j in range(20)]
    yield "a product", {"allOf": either}
    yield "itself, twice", {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}
    yield "itself, twice asked", {"not": {"anyOf": [{"$ref": "#/$defs/a"}] * 2}, "$defs": {"a": {"not": {"$ref": "#"}}}}


HOSTILE = """
import json, resource, sys, threading, time
import numpy as np
from llmppl import JsonSchema
from llmppl.constraints.masks import explain as wording

def read(schema):
    constraint = JsonSchema(schema)
    index = constraint.index(wording.BYTES)
    index.mask_within(index.start, 60)
    for text in ("1", '"' + "a" * 40 + '!"', '{"a": 1, "aa": {"a": "aaa"}}', "[" * 400 + "]" * 400):
        try:
            constraint.parse(text)
        except ValueError:
            pass

def go():
    for line in sys.stdin:
        name, schema = json.loads(line)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + SECONDS, -1))
        print(name, end=": ", flush=True)
        try:
            read(schema)
            print("read", flush=True)
        except (ValueError, TypeError) as error:
            assert "backtrace" not in str(error) and len(str(error)) < 2000
            print(type(error).__name__, str(error)[:60].replace(chr(10), " "), flush=True)

resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
threading.stack_size(512 << 10)
thread = threading.Thread(target=go)
thread.start()
thread.join()
""".replace("SECONDS", str(SECONDS))


def run(code, given="", *arguments):
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    env |= {"RUST_BACKTRACE": "1", "GGML_NO_BACKTRACE": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=HANG, env=env, cwd=ROOT)


@pytest.mark.slow
def test_hostile_schemas_are_read_or_refused_without_printing():
    cases = list(corpus())[:: repetitions(full=1, quick=25)]
    result = run(HOSTILE, "".join(json.dumps(case) + "\n" for case in cases))
    said = result.stdout.split("\n")
    assert result.returncode == 0 and len(said) == len(cases) + 1, (said[-1], result.stderr[-500:])
    assert result.stderr == ""


def test_a_path_along_references_is_bounded_by_its_levels():
    with pytest.raises(ValueError, match=r"30,001 parts that a \$ref points to, .* at most 20,000 levels would work"):
        JsonSchema(chained(30_000, FORMS[0]))
    with pytest.raises(ValueError, match="JSON schema at #: more than 12 patterns of allOf or .* in one string"):
        JsonSchema({"allOf": [{"type": "string", "pattern": f"a{{{i}}}"} for i in range(13)]})


# ---- what is asked of the finished text

SLOW = "a" * 36 + "!"
BAD = "^(a+)+$"


@pytest.mark.parametrize(
    "schema, takes",
    [
        ({"not": {"properties": {"x": {"pattern": BAD}}}}, True),
        ({"if": {"properties": {"x": {"pattern": BAD}}}, "then": False}, True),
        ({"properties": {"x": {"pattern": "^(?=(a+)+$)"}}}, False),
        ({"propertyNames": {"pattern": BAD}}, False),
        ({"patternProperties": {BAD: False}, "unevaluatedProperties": {"const": SLOW}}, True),
        ({"patternProperties": {BAD: {}}, "additionalProperties": {"const": SLOW}, "not": {"required": ["y"]}}, True),
        ({"dependentSchemas": {SLOW: {"patternProperties": {BAD: False}}}}, True),
    ],
)  # fmt: skip
def test_no_pattern_takes_more_than_linear_time_at_the_end(schema, takes):
    constraint, start = JsonSchema({"type": "object", **schema}), time.process_time()
    value = {"x": SLOW} if "x" in json.dumps(schema) else {SLOW: SLOW}
    if takes:
        assert constraint.parse(json.dumps(value)) == value
    else:
        with pytest.raises(ValueError, match="does not hold"):
            constraint.parse(json.dumps(value))
    assert time.process_time() - start < 5


PATTERNS = ["^a", "b$", "(?i)AB", "(?x) a b # c", "a|b$", "^(?!c)", "(?<=a)b", "[^a]", r"\bb", "^$"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_at_the_end_agree_with_re_search(pattern):
    import re

    constraint = JsonSchema({"not": {"pattern": pattern}})
    names = JsonSchema({"patternProperties": {pattern: {"type": "integer"}}, "additionalProperties": {"type": "null"},
                        "not": {"required": ["none"]}})  # fmt: skip
    for text in ["", "a", "b", "ab", "ba", "AB", "cb", "c", "ab\n", "a b", "\u00e4b", "\U0001f600"]:
        found = re.search(pattern, text) is not None
        for each, value in (constraint, text), (names, {text: None}):
            try:
                each.parse(json.dumps(value))
                assert not found, (pattern, text)
            except ValueError:
                assert found, (pattern, text)
        assert names.parse(json.dumps({text: 1 if found else None}))


@pytest.mark.parametrize("pattern, said", [(r"(a)\1", "backreference"), ("a.{40}b", "too large")])
def test_a_pattern_that_no_automaton_reads_is_refused_with_the_schema(pattern, said):
    with pytest.raises(ValueError, match=f"JSON schema: the pattern .*{said}"):
        JsonSchema({"not": {"pattern": pattern}})


def test_a_reference_to_a_property_is_not_narrowed_by_patterns_of_names():
    schema = {"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}},
              "patternProperties": {"a": {"minimum": 5}}, "not": {"required": ["c"]}}  # fmt: skip
    assert JsonSchema(schema).parse('{"a": 6, "b": 1}') == {"a": 6, "b": 1}
    with pytest.raises(ValueError, match="'minimum' does not hold"):
        JsonSchema(schema).parse('{"a": 1, "b": 1}')


def test_equal_items_are_found_by_the_rules_of_JSON_in_linear_time():
    objects = [{"a": 1, "b": 2}, {"b": 2.0, "a": 1}, {"a": 1}, {}]
    values = [1, 1.0, True, 0, False, 0.0, "1", None, [1], [1.0], [True], [], *objects]

    def equal(a, b):
        if type(a) is not type(b) and bool in (type(a), type(b)):
            return False
        if isinstance(a, list) and isinstance(b, list):
            return len(a) == len(b) and all(map(equal, a, b))
        if isinstance(a, dict) and isinstance(b, dict):
            return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
        return a == b

    for a in values:
        for b in values:
            assert (_hashable(a) == _hashable(b)) == equal(a, b), (a, b)
    constraint, start = JsonSchema({"type": "array", "uniqueItems": True}), time.process_time()
    items = [{"a": i, "b": [i]} for i in range(20_000)]
    assert len(constraint.parse(json.dumps(items))) == 20_000
    with pytest.raises(ValueError, match="'uniqueItems' does not hold"):
        constraint.parse(json.dumps([*items, items[0]]))
    assert time.process_time() - start < 20


def test_a_schema_with_exponential_work_is_refused():
    twice = chained(40, '{"anyOf": [{"$ref": "NEXT"}, {"$ref": "NEXT"}]}')
    with pytest.raises(ValueError, match="takes more than 250,000 keywords"):
        JsonSchema({"not": {"$ref": "#/$defs/a0"}, "$defs": twice["$defs"]}).parse('"a"')


def test_a_text_too_deep_for_the_schema_is_a_ValueError():
    deep = {"type": "array", "items": {"$ref": "#"}, "uniqueItems": True}
    for n in (90, 400, 900, 100_000):
        try:
            assert JsonSchema(deep).parse("[" * n + "]" * n) is not None
        except ValueError as error:
            assert "nested too deep" in str(error) and n > 90


# ---- bounds that an automaton leaves to the end

TOKENS = [b'"', b"a", b"aa", b"[", b"]", b"1", b",", b"1,"]


def logits(ids):
    a, b = [7, 7, *ids][-2:]
    return [((3 * a + 5 * b + 7 * i + a * b * i) % 11) / 4 for i in range(len(TOKENS) + 1)]


def law(schema):
    constraint = JsonSchema(schema, whitespace=False)
    posterior = enumerate_exact(ConstrainedText(table_lm(logits, TOKENS), "1", constraint, max_tokens=5, end="eos"))
    return posterior.log_ml, posterior.by_text(), constraint


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 4},
        {"type": "string", "minLength": 2, "maxLength": 4, "pattern": "^a*$"},
        {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 11}, "maxItems": 2},
        {"type": "array", "items": {"type": "array", "items": {"const": 1}, "maxItems": 2}, "maxItems": 2},
        {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "array", "items": {"const": 1}, "maxItems": 2}]},
    ],
)
def test_a_bound_checked_at_the_end_gives_the_exact_posterior(schema, monkeypatch):
    exact, by_text, constraint = law(schema)
    assert not constraint.warnings and len(by_text) > 1
    build = json_texts.texts_of
    monkeypatch.setattr("llmppl.constraints.json.conditions.LOOSE", (np.inf, np.inf, 1))

    def too_large(schema, constraint):
        if any(bound in json.dumps(schema) for bound in ("maxLength", "maxItems")):
            raise json_texts.NotCompilable("more than 100,000 states")
        return build(schema, constraint)

    monkeypatch.setattr("llmppl.constraints.json.schema.texts_of", too_large)
    loose, by_text_loose, constraint = law(schema)
    assert any("is checked on the finished text" in each for each in constraint.warnings)
    assert loose == pytest.approx(exact) and by_text_loose == pytest.approx(by_text)


@pytest.fixture(scope="module")
def lm():
    return CachedTransformer.from_pretrained()


LOOSE = {
    **{f"maxLength {n}": {"type": "string", "maxLength": n} for n in (10_000, 32_767, 65_535)},
    "maxItems": {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9},
    "minProperties": {"type": "object", "minProperties": 1, "additionalProperties": {"type": "integer"}},
    "thirty strings": {"type": "object", "additionalProperties": False, "properties": {
        f"p{i}": {"type": "string", "maxLength": 255} for i in range(30)}},
}  # fmt: skip


@pytest.mark.parametrize("name", LOOSE)
def test_a_loose_bound_leaves_particles(name, lm):
    constraint = JsonSchema(LOOSE[name])
    posterior = smc_steer(ConstrainedText(lm, "Once: ", constraint, max_tokens=60), N=4, K=2, seed=1)
    assert len(posterior) == 4 and posterior.log_ml > -np.inf
    assert all(constraint.parse(particle.s) == particle.parsed for particle in posterior)
    if name.startswith("maxLength"):
        small = JsonSchema({"type": "string", "maxLength": 500})        # no text of 60 tokens is near to either bound
        same = smc_steer(ConstrainedText(lm, "Once: ", small, max_tokens=60), N=4, K=2, seed=1)
        assert posterior.log_ml == pytest.approx(same.log_ml) and posterior.texts == same.texts
        with pytest.raises(ValueError, match="#, 'maxLength' does not hold"):
            constraint.parse(json.dumps("a" * 70_000))


def test_a_late_end_is_a_death_that_names_the_limit(lm):
    enum = JsonSchema({"enum": [{f"p{j}": i * j for j in range(9)} for i in range(1000)]})
    posterior = smc_steer(ConstrainedText(lm, "Once: ", enum, max_tokens=20), N=2, K=2, seed=1)
    assert posterior.deaths[0].reason == "JsonSchema cannot end within max_tokens=20: give room"


@pytest.mark.parametrize("n", [500, 2000])
def test_the_promised_number_of_optional_properties_works(n):
    names = {f"p{i}": {"type": "integer"} for i in range(n)}
    schema = {"type": "object", "properties": names, "additionalProperties": False}
    index = JsonSchema(schema).index(wording.BYTES)
    state = index.after(f'{{"p1": 5, "p{n // 2}": -1')
    assert index.mask_within(state, 60).any() and not index.accepts(state)
    assert index.accepts(index.after(f'{{"p1": 5, "p{n - 1}": 12}}'))
