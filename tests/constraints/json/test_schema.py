"""JSON Schema: masks against trying every token on a fresh matcher, walks against `json` and the jsonschema package."""

import copy
import functools
import json
import pickle
import sys
import types
from importlib.metadata import version

import jsonschema
import numpy as np
import pytest
from helpers.common import FULL, ROOT, repetitions
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from packaging.version import Version

from llmppl.constraints import Vocabulary
from llmppl.constraints.json import native
from llmppl.constraints.json import schema as json_schema
from llmppl.constraints.json.conditions import with_leap_years
from llmppl.constraints.json.schema import JsonSchema, JsonSchemaIndex
from llmppl.constraints.masks import explain
from llmppl.constraints.masks.index import END

SHARED = ROOT.parent / "shared"
BYTES = [b"%c" % byte for byte in range(256)]
PIECES = [b'{"', b'":', b'": "', b'"}', b"{}", b"12", b"true", b"tr", b"null", b'"a"', b'"a"', b"a", b"b", b"\xc3\xa9",
          b"\\u00", b"\\u", b'","', b", ", b"  ", b"-1", b"0.5", b"e", b'{"a":', b"]]", b"],", b"\xff", b"\xff[0]", b"",
          b'{"name":"', b'name"', b"2024-", b"-01-0"]  # fmt: skip
EOS, OTHER_EOS, SPECIAL, UNKNOWN = range(4)
SMALL = Vocabulary([b"", b"", b"[INST]", b"", *PIECES, *BYTES], (EOS, OTHER_EOS), [SPECIAL], [UNKNOWN])

ANY_ESCAPE = Version(version("llguidance")) >= Version("1.8")           # \\u of what is no control character

POINT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 3}},
    "required": ["a"],
    "additionalProperties": False,
}
SCHEMAS = {
    "anything": True,
    "point": POINT,
    "constant": {"const": {"a": [True, None]}},
    "choice": {"enum": ["ab", "a", "é", 1, None]},
    "numbers": {"type": "array", "items": {"type": "number", "minimum": -2, "maximum": 12.5}, "minItems": 1},
    "pattern": {"type": "string", "pattern": "^[ab]{2,4}$"},
    "date": {"type": "object", "properties": {"name": {"type": "string", "format": "date"}}, "required": ["name"]},
    "either": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}, {"type": "array", "maxItems": 0}]},
    "tree": {
        "$ref": "#/$defs/tree",
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
    },
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
}


def spelled(index: JsonSchemaIndex, data: bytes):
    """Return the state after the fewest tokens that spell `data`."""
    state = index.start
    for token in index.vocab.spell(data):
        state = index.advance(state, token)
    return state


def text_of(index: JsonSchemaIndex, state) -> bytes:
    return b"".join(part if isinstance(part, bytes) else index.vocab.tokens[part] for part in state)


def oracle(constraint: JsonSchema):
    """Return a test by a matcher over bytes, without forced tokens, of whether a text is read and may end."""
    tokens = [*BYTES[:255], b"", b""]
    facts = types.SimpleNamespace(eos_token_id=256, bos_token_id=None, tokens=tokens, special_token_ids=[])
    schema = with_leap_years(constraint._with_options(constraint.schema))
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    unread = LLMatcher(LLTokenizer(TokenizerWrapper(facts)), grammar, log_level=0)

    @functools.lru_cache(1)
    def after(text: bytes) -> LLMatcher:
        matcher = unread.deep_copy()
        assert matcher.try_consume_tokens(list(text)) == len(text)
        return matcher

    def fits(text: bytes, more: bytes = b"") -> tuple[bool, bool]:
        matcher = after(text).deep_copy()
        reads = b"\xff" not in more and matcher.try_consume_tokens(list(more)) == len(more)
        return reads, reads and matcher.is_accepting()

    return fits


def differences(index: JsonSchemaIndex, state, fits, ids=None) -> list[int]:
    """Return the ids at which the mask differs from trying the tokens one by one; a misfit's extensions are misfits."""
    vocab, text, mask, wrong = index.vocab, text_of(index, state), index.mask(state), []
    first = {byte for byte in BYTES if fits(text, byte)[0]}
    for id in range(len(vocab)) if ids is None else ids:
        data = vocab.tokens[id]
        reads = data[:1] in first and (data in first or fits(text, data)[0])
        expected = reads if data else id in vocab.eos_ids and fits(text)[1]
        if mask[id] != expected:
            wrong.append(id)
    return wrong


def walk(index: JsonSchemaIndex, rng, length: int):
    """Return the states of a random walk in which short and closing tokens are likelier."""
    state = index.start
    states = [state]
    for t in range(length + 200):
        allowed = index.allowed(state)
        closing = [id for id in allowed if index.vocab.tokens[id][:1] in (b'"', b"}", b"]", b",")]
        if t >= length and index.accepts(state):
            break
        ids = closing if closing and (t >= length or rng.random() < 0.3) else allowed
        state = index.advance(state, int(rng.choice(ids)))
        if state is END:
            break
        states.append(state)
    return states


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("whitespace", [True, False])
def test_masks_equal_trying_every_token_on_a_fresh_matcher(name, whitespace):
    index = JsonSchemaIndex(JsonSchema(SCHEMAS[name], whitespace=whitespace), SMALL)
    fits = oracle(index.constraint)
    for seed in range(repetitions(20, 2)):
        for state in walk(index, np.random.default_rng(seed), 8)[:20]:
            assert differences(index, state, fits) == [], (state, text_of(index, state))


def test_masks_of_a_finite_language_agree_with_its_strings():
    values = [1, 12, "a", "\u00e9", None]
    lists = [[]] + [[x] for x in values] + [[x, y] for x in values for y in values]
    strings = [json.dumps(x, separators=(",", ":"), ensure_ascii=False).encode() for x in lists]
    schema = {"type": "array", "items": {"enum": values}, "maxItems": 2}
    index = JsonSchemaIndex(JsonSchema(schema, whitespace=False), SMALL)
    todo, met = [index.start], 0
    while todo:
        state = todo.pop()
        text, met = text_of(index, state), met + 1
        going_on = [bool(data) and any(x.startswith(text + data) for x in strings) for data in SMALL.tokens]
        going_on[EOS] = going_on[OTHER_EOS] = text in strings
        assert index.mask(state).tolist() == going_on and index.accepts(state) == (text in strings)
        todo += [index.advance(state, id) for id in index.allowed(state) if SMALL.tokens[id]]
    assert met > 400


def test_a_mask_is_right_by_hand():
    vocab = Vocabulary([b'{"', b"{", b"a", b'"', b'":', b":", b"1", b"12", b"}", b" ", b'{"a":1', b"1}", b""], [12])
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    index = JsonSchemaIndex(JsonSchema(schema, whitespace=False), vocab)

    def after(*tokens):
        state = index.start
        for token in tokens:
            state = index.advance(state, token)
        return [vocab.tokens[id] for id in index.allowed(state)], index.accepts(state)

    assert after() == ([b'{"', b"{", b'{"a":1'], False)
    assert after(1) == ([b'"'], False)
    assert after(0) == ([b"a"], False)
    assert after(0, 2) == ([b'"', b'":'], False)
    assert after(0, 2, 4) == ([b"1", b"1}"], False)
    assert after(10) == ([b"}"], False)
    assert after(10, 8) == ([b""], True)
    spaced = JsonSchemaIndex(JsonSchema(schema), vocab)
    assert spaced.mask(spaced.after('{"a"')).nonzero()[0].tolist() == [5, 9]


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_walks_end_in_instances(name):
    index = JsonSchemaIndex(JsonSchema(SCHEMAS[name]), SMALL)
    validator = jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=jsonschema.FormatChecker())
    ended = 0
    for seed in range(repetitions(200, 15)):
        state = walk(index, np.random.default_rng(seed), 12)[-1]
        if index.accepts(state):
            ended += 1
            validator.validate(json.loads(text_of(index, state)))
    assert ended > 5


@pytest.mark.parametrize(
    "text, inside",
    [
        ('{"a":1}', True),
        ('{ "a" : -20 , "b":"\u00e9\u00e9\u00e9" }', True),
        ('{\n"a":1}', False),
        ('{"a":1,"b":"\\u001f\\n"}', True),
        ('{"a":1,"b":"\\u00e9\\n"}', ANY_ESCAPE),
        ('{"a":1,"b":"four"}', False),
        ('{"b":"x","a":1}', False),                 # properties come in the order of the schema
        ('{"a":1.0}', False),
        ('{"a":1,"c":1}', False),
        ('{"b":"x"}', False),
        (' {"a":1}', False),
    ],
)  # fmt: skip
def test_a_schema_accepts_exactly_its_instances(text, inside):
    index = JsonSchemaIndex(JsonSchema(POINT), SMALL)
    try:
        assert index.accepts(index.after(text)) is inside
        assert index.accepts(spelled(index, text.encode())) is inside
    except ValueError:
        assert not inside


@pytest.mark.parametrize("more", [{}, {"pattern": "2"}, {"minLength": 1}])
@pytest.mark.parametrize("is_native", [False, True])
def test_dates_have_a_leap_day_in_leap_years_only(is_native, more):
    constraint = JsonSchema({"type": "string", "format": "date", **more}, whitespace=False)
    vocab = explain.BYTES
    index = JsonSchemaIndex(constraint, vocab) if is_native else constraint.index(vocab)

    def admits(date):
        try:
            return index.accepts(index.after(f'"{date}"'))
        except ValueError:
            return False

    leap_years = {0, 4, 2000, 2024, 2400}
    for year in leap_years | {1900, 2023, 2100}:
        assert admits(f"{year:04}-02-29") == (year in leap_years)
        assert admits(f"{year:04}-02-28") and not admits(f"{year:04}-02-30")
    checked = JsonSchema({"not": {"format": "date"}})
    assert checked.parse('"2023-02-29"') == "2023-02-29"
    with pytest.raises(ValueError, match="'not' does not hold"):
        checked.parse('"2024-02-29"')


def test_the_whitespace_option():
    def admits(text, **options):
        index = JsonSchemaIndex(JsonSchema({"type": "array", "items": {"type": "integer"}}, **options), SMALL)
        try:
            return index.accepts(index.after(text))
        except ValueError:
            return False

    texts = ["[1,2]", "[1, 2]", "[ 1,\n\n2]"]
    assert [admits(text) for text in texts] == [True, True, False]
    assert [admits(text, whitespace=True) for text in texts] == [True, True, True]
    assert [admits(text, whitespace=False) for text in texts] == [True, False, False]
    assert [admits(text, whitespace=" ") for text in texts] == [True, True, False]
    own = {"type": "array", "x-guidance": {"whitespace_flexible": False}}
    index = JsonSchemaIndex(JsonSchema(own), SMALL)
    with pytest.raises(ValueError, match=r"b' ' after b'\[1,'"):
        index.after("[1, 2]")


def test_a_schema_may_be_a_str_and_is_copied():
    schema = {"type": "integer"}
    constraint = JsonSchema(schema)
    assert JsonSchema(json.dumps(schema)).schema == constraint.schema == schema
    schema["type"] = "string"
    assert constraint.schema == {"type": "integer"}
    assert JsonSchemaIndex(constraint, SMALL).after("12") == (b"12",)


def test_every_eos_is_allowed_exactly_where_the_text_may_end():
    index = JsonSchemaIndex(JsonSchema({"type": "integer"}), SMALL)
    for text, ends in [("", False), ("-", False), ("1", True), ("12", True)]:
        state = index.after(text)
        assert index.accepts(state) is ends
        assert index.mask(state)[[EOS, OTHER_EOS]].tolist() == [ends, ends]
        assert not index.mask(state)[[SPECIAL, UNKNOWN]].any()
    assert index.advance(state, EOS) is index.advance(state, OTHER_EOS) is END is index.end
    assert not index.mask(END).any() and index.accepts(END) and index.next_bytes(END) == b""
    with pytest.raises(ValueError, match="token 0 cannot follow: an eos has ended the text"):
        index.advance(END, EOS)


def test_an_existing_text_need_not_be_spelled_by_tokens():
    vocab = Vocabulary([b"1", b"}", b""], [2])
    index = JsonSchemaIndex(JsonSchema(POINT), Vocabulary([*vocab.tokens[:2], b"{", b""], [3]))
    state = index.after('{"a": ')
    assert state == (b'{"a": ',) and index.after("") == index.start
    assert index.allowed(state).tolist() == [0]
    assert index.accepts(index.advance(index.advance(state, 0), 1))
    assert index.after(b'{"a"') != index.after('{"a')


def test_a_prefix_that_particles_share_is_read_once():
    index = JsonSchemaIndex(JsonSchema(POINT), SMALL)
    tokens = SMALL.spell(b'{"a": 1')
    digits = [id for id, token in enumerate(SMALL.tokens) if token.isdigit() and len(token) == 1]
    for _ in range(20):                             # particles
        state = index.start
        for token in tokens:
            state = index.advance(state, token)
        for digit in digits:
            index.mask(index.advance(state, digit))
    assert index.num_read == len(tokens) + len(digits)


def test_memory_is_bounded_and_dropped_entries_are_computed_again(monkeypatch):
    schema, rng = {"type": "array", "items": {"type": "string", "maxLength": 4}}, np.random.default_rng(0)
    ample = JsonSchemaIndex(JsonSchema(schema), SMALL)
    states = list({state for seed in range(20) for state in walk(ample, np.random.default_rng(seed), 30)})
    assert len(states) > 100
    masks = [ample.mask(state) for state in states]
    monkeypatch.setattr(json_schema, "MATCHERS", 3)
    monkeypatch.setattr(json_schema, "MASK_BYTES", 64 * len(SMALL))
    index = JsonSchemaIndex(JsonSchema(schema), SMALL)
    for i in rng.permutation(len(states)):
        assert (index.mask(states[i]) == masks[i]).all()
        assert len(index._matchers) <= 3 and index._look.cache_info().currsize <= 64


def test_masks_work_after_thousands_of_tokens():
    index = JsonSchemaIndex(JsonSchema({"type": "string"}), SMALL)
    a = SMALL.spell(b"a")[0]
    state = (*SMALL.spell(b'"'), *[a] * 5000)
    assert index.mask(state)[a]
    assert index.mask(index.advance(state, a))[a]


def test_copies_return_the_object_itself():
    constraint = JsonSchema(POINT)
    index = JsonSchemaIndex(constraint, SMALL)
    particle = {"index": index, "state": index.after('{"a"'), "constraint": constraint}
    other = copy.deepcopy(particle)
    assert other["index"] is index and other["constraint"] is constraint and other["state"] == particle["state"]
    assert repr(pickle.loads(pickle.dumps(constraint))) == repr(constraint)


def test_reprs_are_worth_reading():
    constraint = JsonSchema({"type": "integer"}, whitespace=False, lenient=True)
    assert repr(constraint) == "JsonSchema({\"type\": \"integer\"}, whitespace=False, lenient=True)"
    assert repr(JsonSchemaIndex(constraint, SMALL)) == f"JsonSchemaIndex({constraint!r}, {len(SMALL)} tokens, 1 masks)"
    assert len(repr(JsonSchema({"enum": list(range(1000))}))) < 100


@pytest.mark.parametrize(
    "schema, message",
    [
        ("{'a': 1}", "the schema is not JSON: Expecting property name .* line 1 column 2"),
        ({"const": {1, 2}}, "the schema is not JSON: Object of type set"),
        ("3", "a JSON schema is an object, true or false, not 3"),
        ("[]", r"a JSON schema is an object, true or false, not \[\]"),
        (False, "JSON schema at #: Unsatisfiable schema: schema is false"),
        ({"$dynamicRef": "#a"}, r"JSON schema at #, '\$dynamicRef': Unimplemented keys: .*lenient=True ignores it"),
        (
            {"properties": {"not": {}, "b": {"items": {"$dynamicRef": "#a", "type": "array"}}}},
            r"JSON schema at #/properties/b/items, '\$dynamicRef': Unimplemented",
        ),
        (
            {"anyOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"allOf": [True, {"type": "string", "format": "iri"}]}}},
            r"JSON schema at #/\$defs/x/allOf/1, 'format': Unknown format: iri; lenient=True",
        ),
        ({"items": {"type": "strin"}}, "JSON schema at #/items, 'type': 'strin' is no type: did you mean 'string'"),
        ({"pattern": "(?P>a)b"}, "JSON schema at #, 'pattern': regex parse error"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "JSON schema at #/properties/a, '.ref': Pointer '/.defs/b'"),
        ({"$ref": "https://example.org/x"}, r"JSON schema at #, '\$ref': Resource 'https://example.org/x'"),
        ({"x-guidance": {"whitespace": 1}}, "JSON schema at #: unknown field `whitespace`"),
        ({"x-guidance": 1}, "JSON schema at #: invalid type"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, r"'minimum', 'maximum': .*minimum \(3\) is greater"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "Unsatisfiable .* required property 'a'"),
    ],
)
def test_an_invalid_schema_is_refused_with_place_and_keyword(schema, message):
    with pytest.raises(ValueError, match=message):
        JsonSchema(schema)


def test_a_place_is_found_in_a_large_schema_too():
    many = {f"p{i}": {"type": "string"} for i in range(1000)}
    with pytest.raises(ValueError, match="JSON schema at #.*: Unimplemented keys"):
        JsonSchema({"properties": many | {"last": {"$dynamicRef": "#a"}}})


def test_lenient_ignores_unknown_keywords_with_a_warning():
    constraint = JsonSchema({"items": {"enum": [1], "format": "iri"}, "$dynamicRef": "#a"}, lenient=True)
    assert constraint.warnings == ["#, '$dynamicRef' is ignored", "#/items, 'format' is ignored"]
    index = JsonSchemaIndex(constraint, SMALL)
    assert index.accepts(index.after("[1,1]"))
    assert JsonSchema(POINT).warnings == []


def test_a_forbidden_token_is_an_error_that_lists_the_allowed_bytes():
    index = JsonSchemaIndex(JsonSchema({"const": "ab"}), SMALL)
    state = index.after('"a')
    with pytest.raises(ValueError, match=r"token \d+ \(b'a'\) cannot follow b'\"a': the next byte must be one of b'b'"):
        index.advance(state, SMALL.spell(b"a")[0])
    with pytest.raises(ValueError, match=r"token 0 \(eos\) cannot follow"):
        index.advance(state, EOS)
    with pytest.raises(ValueError, match=r"token 2 \(special\) cannot follow"):
        index.advance(state, SPECIAL)
    with pytest.raises(ValueError, match=f"token -1 is not in this vocabulary, whose ids are 0 to {len(SMALL) - 1}"):
        index.advance(state, -1)
    with pytest.raises(ValueError, match=r"cannot follow b'\"ab\"': the text must end$"):
        index.advance(index.after('"ab"'), SMALL.spell(b"a")[0])


def test_an_impossible_text_is_an_error_with_its_place():
    index = JsonSchemaIndex(JsonSchema(POINT), SMALL)
    with pytest.raises(ValueError, match="byte 5 of the text, b'x' after .*leaves the language: the next byte must be"):
        index.after('{"a":x')
    with pytest.raises(ValueError, match="byte 1 of the text"):
        index.after(b"{\xff")


def test_a_state_of_another_index_is_refused():
    index, other = JsonSchemaIndex(JsonSchema({"const": 1}), SMALL), JsonSchemaIndex(JsonSchema({"const": "a"}), SMALL)
    state = other.advance(other.start, SMALL.spell(b'"a"')[0])
    for wrong in (state, (10**6,), (EOS,), (2.5,), 7, None):
        with pytest.raises(ValueError, match="is not a state of this index"):
            index.mask(wrong)


def test_a_vocabulary_that_cannot_begin_an_instance_is_refused():
    with pytest.raises(ValueError, match=r"at the start: the next byte must be one of b'\{', and none of the 2 tokens"):
        JsonSchemaIndex(JsonSchema(POINT), Vocabulary([b"a", b"}", b""], [2]))


def test_a_limit_of_llguidance_is_an_error_instead_of_an_empty_mask(monkeypatch):
    index = JsonSchemaIndex(JsonSchema(POINT), SMALL)
    broken = types.SimpleNamespace(
        compute_bitmask=lambda: bytes(100), is_accepting=lambda: False, is_error=lambda: True,
        get_error=lambda: "too many items\n<state>...",
    )  # fmt: skip
    monkeypatch.setattr(index, "_matcher", lambda state: broken)
    with pytest.raises(ValueError, match="llguidance gave up: too many items; a smaller schema would work$"):
        index.mask(index.after('{"a"'))


def test_a_panic_of_llguidance_is_one_sentence():
    enum = [{f"k{i}": i + 21 * j for i in range(21)} for j in range(2500)]
    with pytest.raises(ValueError, match="^JsonSchema.* gave up: the schema has more symbols .*; a smaller") as caught:
        JsonSchemaIndex(JsonSchema({"enum": enum}), SMALL)
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def test_without_llguidance_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"pip install llmppl\[json-schema\]"):
        JsonSchema({})


# ---- real tokenizers and real schemas


def real_vocabulary(name: str) -> Vocabulary:
    from transformers import AutoTokenizer

    if name == "embedded":
        from llmppl.lm.embedded import PATH

        return Vocabulary.from_tokenizer(AutoTokenizer.from_pretrained(PATH))
    if not (SHARED / "vocab" / name).exists():
        pytest.skip(f"the tokenizer {name} is not at hand")
    return Vocabulary.from_tokenizer(AutoTokenizer.from_pretrained(SHARED / "vocab" / name))


TOKENIZERS = ["embedded", "gpt2", "cl100k_base", "o200k_base", "mistral_v3"] if FULL else ["embedded"]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_masks_of_real_vocabularies_equal_trying_tokens(tokenizer):
    vocab, rng = real_vocabulary(tokenizer), np.random.default_rng(0)
    for name, schema in SCHEMAS.items():
        index = JsonSchemaIndex(JsonSchema(schema), vocab)
        fits, states = oracle(index.constraint), walk(index, rng, 12)
        for state in [states[i] for i in rng.permutation(len(states))[: repetitions(6, 3)]]:
            allowed, others = rng.permutation(index.allowed(state)), np.flatnonzero(~index.mask(state))
            ids = [*allowed[: repetitions(1000, 200)].tolist(), *others.tolist()]
            assert differences(index, state, fits, ids) == [], (name, state)


def bench() -> list[dict]:
    file = SHARED / "evaldata" / "jsonschemabench" / "maskbench_tests.jsonl"
    if not file.exists():
        pytest.skip("jsonschemabench is not at hand")
    cases = [json.loads(line) for line in file.read_text().splitlines()]
    return cases[:: repetitions(1, 25)]


def test_jsonschemabench_is_solved_as_often_as_by_llguidance(capsys):
    cases, vocab = bench(), real_vocabulary("embedded")
    tokenizer, _ = json_schema._tokenizer_of(vocab)
    ours, theirs = np.zeros(3, int), np.zeros(3, int)           # compiled, valid admitted, invalid refused
    total, only_theirs = np.array([len(cases), 0, 0]), []
    for case in cases:
        grammar = LLMatcher.grammar_from_json_schema(case["schema"])
        compiles = not LLMatcher.validate_grammar(grammar)
        theirs[0] += compiles
        try:
            index = JsonSchemaIndex(JsonSchema(case["schema"]), vocab)
            ours[0] += 1
        except ValueError:
            index = None
        for test in case["tests"]:
            kind = 1 if test["valid"] else 2
            total[kind] += 1
            tokens = vocab.spell(json.dumps(test["data"], ensure_ascii=False).encode())
            if compiles:
                matcher = LLMatcher(tokenizer, grammar, log_level=0)
                admitted = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
                theirs[kind] += admitted == test["valid"]
            if index is not None:
                try:
                    index.masks(tokens)
                    admits = index.accepts(tuple(tokens))
                except ValueError:
                    admits = False
                ours[kind] += admits == test["valid"]
                if compiles and admitted == test["valid"] != admits:
                    only_theirs.append((case["id"], test["data"]))
    with capsys.disabled():
        for what, a, b, n in zip(["compiled", "valid admitted", "invalid refused"], ours, theirs, total, strict=True):
            if FULL:
                print(f"\njsonschemabench: {what}: {a} of {n} ({a / n:.1%}), llguidance {b} ({b / n:.1%})", end="")
    assert (ours >= theirs).all() and ours[0] > 0.7 * total[0], (ours, theirs, total, only_theirs[:5])
    assert not only_theirs


@pytest.mark.skipif(not FULL, reason="all schemas are compiled by `make check` only")
def test_schemas_of_jsonschemabench_compile_as_often_as_with_llguidance():
    folder = SHARED / "evaldata" / "jsonschemabench"
    if not folder.exists():
        pytest.skip("jsonschemabench is not at hand")
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            schema = json.loads(line)["schema"]
            compiles = not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
            try:
                JsonSchemaIndex(JsonSchema(schema), SMALL)
                compiled = True
            except ValueError as error:
                compiled = "is no keyword" in str(error)    # llguidance passes over it
                assert "JSON schema at #" in str(error)
            assert compiled >= compiles, line[:200]         # more: what it refuses may be asked of the finished text


# ---- limits


@pytest.mark.parametrize("n", [500, repetitions(2000, 1000)])
def test_hundreds_of_optional_properties_are_allowed_and_read(n):
    schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(n)}}
    index = JsonSchemaIndex(JsonSchema(schema), SMALL)
    text = json.dumps({"p1": 5, f"p{n // 2}": -1, f"p{n - 1}": 12}).encode()
    assert index.accepts(spelled(index, text)) and index.next_bytes(index.after(text[:-1])) != b""
    with pytest.raises(ValueError, match="leaves the language"):
        index.after(b'{"p2":x')


def nested(n, schema):
    for _ in range(n):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def test_a_schema_that_is_too_deep_or_too_large_is_refused():
    text = '{"properties":{"a":' * 5000 + "{}" + "}}" * 5000
    for deep in (nested(900, {"type": "string"}), text, nested(60, {"type": "null"})):
        with pytest.raises(ValueError, match="the schema is nested more than 120 deep"):
            JsonSchema(deep)
    itself = {"type": "array"}
    itself["items"] = itself
    with pytest.raises(ValueError, match="the schema is nested more than 120 deep"):
        JsonSchema(itself)
    JsonSchemaIndex(JsonSchema(nested(59, {"type": "string"})), SMALL)             # the deepest
    with pytest.raises(ValueError, match="an object of 2,001 properties; at most 2,000 would work"):
        JsonSchema({"properties": dict.fromkeys(map(str, range(2001)), True)})
    with pytest.raises(ValueError, match="more than 2,000,000 values"):
        JsonSchema({"enum": [[0] * 1000] * 2000})


def loop(*needs):
    return {"$defs": {"x": {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "required": [*needs]}}}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$ref": "#"}, "#"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "#"),
        (nested(1, {"$ref": "#"}), "#"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#"),
        ({"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 2}, "#"),
        ({"anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 1}, nested(1, {"$ref": "#"})]}, "#"),
        ({"type": "object", "properties": {"y": {"$ref": "#/$defs/x"}}} | loop("x"), r"#/\$defs/x"),
    ],
)
def test_a_schema_whose_instances_would_be_infinite_is_refused(schema, place):
    with pytest.raises(ValueError, match=f"JSON schema at {place}.*: every instance would be infinite"):
        JsonSchema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "null"}, nested(1, {"$ref": "#"})]},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 1},
        {"$ref": "#/$defs/x"} | loop(),
        {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "null"}}},
        {"$ref": "#/$defs/c0", "$defs": {f"c{i}": {"$ref": f"#/$defs/c{i + 1}"} for i in range(300)} | {"c300": {}}},
    ],
)
def test_a_recursion_that_can_end_is_read(schema):
    index = JsonSchemaIndex(JsonSchema(schema), SMALL)
    assert index.mask(index.start).any()


def test_an_error_of_llguidance_names_reason_schema_and_text(monkeypatch):
    monkeypatch.setitem(native.LIMITS, "max_items_in_row", 50)
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(100)}}
    with pytest.raises(ValueError, match=r"JsonSchema.* after .*: llguidance gave up: .*max is 50; .*a smaller schema"):
        JsonSchemaIndex(JsonSchema(wide), SMALL)
    index = JsonSchemaIndex(JsonSchema({"type": "array", "items": wide}), SMALL)
    for read in (lambda: index.after("[{"), lambda: index.mask(index.advance(index.after("["), SMALL.spell(b"{")[0]))):
        with pytest.raises(ValueError, match=r"after b'\[\{': llguidance gave up: .*max is 50"):
            read()


ROLE = {"type": "object", "properties": {"role": {"enum": ["user", "guest"]}}, "required": ["role"]}


@pytest.mark.parametrize(
    "schema, wrong, right",
    [
        (ROLE, '{"role": "guest", "\\u0072ole": "admin"}', '{"role": "guest", "\\u0072": "admin"}'),
        ({"properties": {"a": {"type": "integer"}}}, '{"\\u0061": "x"}', '{"\\u0061": 1}'),
        ({"properties": {"a": False}}, '{"\\u0061": "x"}', '{"b": "\\u0061"}'),
        ({"patternProperties": {"^x-": {"type": "string"}}}, '{"\\u0078-a": 1}', '{"\\u0078-a": "s"}'),
    ],
)
def test_an_escaped_name_is_the_name(schema, wrong, right):
    constraint = JsonSchema(schema)
    assert constraint.parse(right) == json.loads(right)
    with pytest.raises(ValueError, match="does not hold"):
        constraint.parse(wrong)
