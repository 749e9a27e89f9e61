"""JSON that ends: automata of schemas against llguidance, byte by byte and mask by mask, and against jsonschema."""

import json
import math
import pickle
import random
import re
import types

import jsonschema
import numpy as np
import pytest
from helpers.common import FULL, ROOT, repetitions
from helpers.tiny import table_lm
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from llmppl import ConstrainedText, JsonSchema, TokenIndex, Vocabulary, enumerate_exact, importance_sampling
from llmppl.constraints import END, JsonSchemaIndex, OpenTexts, TooLarge
from llmppl.constraints.json import texts as json_texts

SHARED = ROOT.parent / "shared"
BYTES = [b"%c" % byte for byte in range(256)]
EDITS = b"{}[]\",: 0123456789aAbetrn.-+\\u/\n\t\x7f\xc3\xa9"
RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}, "kind": {"enum": ["a", "b"]}},
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def number(**bounds):
    return {"type": "number", **bounds}


def text(**bounds):
    return {"type": "string", **bounds}


NUMBERS = [
    number(), {"type": "integer"}, number(minimum=0, maximum=10), number(exclusiveMinimum=0.5), number(maximum=-1.25),
    number(minimum=-2.5, maximum=12.75), number(exclusiveMinimum=-1, exclusiveMaximum=1),
    number(minimum=0.45, maximum=0.5), number(exclusiveMaximum=103.74), number(minimum=-17.23, maximum=-1.33),
    number(maximum=0), number(exclusiveMaximum=0), number(minimum=1.5), number(minimum=-1.5),
    number(minimum=1.33, exclusiveMaximum=10), number(minimum=7, maximum=7),
    {"type": "integer", "minimum": -3}, {"type": "integer", "maximum": 14},
    {"type": "integer", "minimum": -12, "exclusiveMaximum": 130}, {"type": "integer", "minimum": 95, "maximum": 1005},
    {"type": "integer", "maximum": -7}, {"type": "integer", "multipleOf": 7, "minimum": -50},
    {"enum": [1, -2.5, 0]}, {"type": "integer", "minimum": 0.5, "maximum": 3.5},
    {"allOf": [number(minimum=2), {"type": "integer", "maximum": 4}]},
]  # fmt: skip
STRINGS = [
    text(), text(maxLength=3), text(minLength=2), text(minLength=1, maxLength=2), {"const": 'a"\\\n\u00e9\x7f'},
    {"enum": ["a", "ab", "", "\u00e9", 1, None, True]}, text(pattern="^[a-c]{1,3}$"), text(pattern="b"),
    text(pattern="^a|b$"), text(pattern=r"^\d{2}-\w+$"), text(pattern=r"^\s.$"), text(pattern=r"^[^\d\s]*$"),
    text(pattern=r'^["\\\n]{1,2}$'), text(pattern=r"^[\w.-]+@x\.io$", maxLength=9),
    text(pattern="a", minLength=3, maxLength=4), text(format="date"), text(format="time"), text(format="date-time"),
    text(format="uuid"), text(format="ipv4"), text(format="email"), text(format="hostname"),
    {"allOf": [text(pattern="a"), text(pattern="b", maxLength=4)]}, {"type": ["string", "null"]},
]  # fmt: skip
CLOSED = {"type": "object", "additionalProperties": False}
A, B, C = {"const": 1}, {"type": "boolean"}, text(maxLength=2)
SHAPES = [
    RECORD, CLOSED, CLOSED | {"properties": {"a": A, "b": B, "c": C}},
    CLOSED | {"properties": {"a": A, "b": B}, "required": ["b"]}, {"type": "object", "additionalProperties": B},
    {"type": "object", "properties": {"a": A, "\u00e9\n": B}, "additionalProperties": C},
    {"type": "object", "required": ["z"], "additionalProperties": A}, {"type": "array", "items": B},
    {"type": "array", "items": A, "minItems": 1, "maxItems": 3}, {"type": "array", "items": B, "minItems": 2},
    {"type": "array", "items": A, "maxItems": 0}, {"type": "array", "prefixItems": [A, B], "items": False},
    {"type": "array", "prefixItems": [A, B], "items": C, "minItems": 1, "maxItems": 4},
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [A, B], "additionalItems": C},
    {"type": "array", "prefixItems": [A, False, B], "items": C}, CLOSED | {"properties": {"a": False, "b": B}},
    {"anyOf": [CLOSED | {"properties": {"a": A}, "required": ["a"]}, CLOSED | {"properties": {"a": C, "b": B}}]},
    {"anyOf": [A, {"type": "array", "items": A}, {"type": "array", "items": B}, {"type": "null"}]},
    {"const": {"a": [1, {"b": None}], "c": "x"}}, {"enum": [[], [1, 2], {"k": 1}, {}, "s"]},
    {"$ref": "#/$defs/p", "$defs": {"p": CLOSED | {"properties": {"x": {"$ref": "#/$defs/q"}}}, "q": {"enum": [1, 2]}}},
    {"allOf": [{"type": "object", "properties": {"b": B, "a": C}, "required": ["a"]},
               CLOSED | {"properties": {"a": {}, "b": {}}}]},
    {"properties": {"b": B}, "allOf": [CLOSED | {"properties": {"a": A, "b": {}}, "required": ["a"]}],
     "type": "object"},
    {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    {"type": "array", "items": {"type": "array", "items": B, "maxItems": 2}},
    CLOSED | {"properties": {"a": A, "b": B, "c": C}, "minProperties": 1},
    {"type": "object", "additionalProperties": B, "minProperties": 1},
    {"allOf": [CLOSED | {"properties": {"a": A, "b": B}}, {"type": "object", "minProperties": 1}]},
    CLOSED | {"properties": {"a": A, "b": B, "c": C}, "required": ["c", "a"], "minProperties": 2},
]  # fmt: skip
OPEN = [
    True, {}, {"type": "object"}, {"type": "array"},
    {"type": "object", "properties": {"a": A, "b": B}, "required": ["a"]},
    {"properties": {"a": {"type": "array"}}, "type": "object", "additionalProperties": False},
    {"type": "array", "items": {"type": "object", "properties": {"b": B}}, "minItems": 1}, {"minimum": 3},
    {"anyOf": [{"type": "object", "properties": {"a": A}, "required": ["a"]}, {"type": "object", "required": ["b"]}]},
    {"anyOf": [CLOSED | {"properties": {"a": C}}, {"type": "object", "properties": {"a": {}}}, {"type": "array"}]},
    {"properties": {"a": {"type": "object", "properties": {"b": {}, "c": A}}}, "required": ["a", "z"]},
    {"type": "object", "minProperties": 1}, CLOSED | {"properties": {"a": {}, "b": {}}, "minProperties": 1},
]  # fmt: skip
WITHIN = NUMBERS + STRINGS + SHAPES + OPEN
BEYOND = {
    "patternProperties": CLOSED | {"patternProperties": {"^a": {"type": "null"}}},
    "recursion": {"type": "array", "items": {"$ref": "#"}},
    "multiples": number(multipleOf=0.01),
    "the pattern": text(pattern="[[:alpha:]]"),
}


def drawn_schema(rng: random.Random, depth: int = 3):
    """Draw a schema that compiles, with parts of all kinds."""
    kind = rng.choice(["leaf"] * 3 + ["array", "object", "object", "choice", "both"] * (depth > 0))
    if kind == "leaf":
        return rng.choice(NUMBERS + STRINGS + OPEN[:4])
    inner = [drawn_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    if kind == "array":
        least = rng.randrange(3)
        most = {"maxItems": least + rng.randrange(3)} if rng.random() < 0.6 else {}
        return {"type": "array", "items": inner[0], "prefixItems": inner[1:], "minItems": least, **most}
    if kind == "choice":
        return {"anyOf": inner}
    names = rng.sample(["a", "b", 'a"', "\u00e9", "ab", ""], len(inner))
    found = {
        "type": "object",
        "properties": dict(zip(names, inner, strict=True)),
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
        "additionalProperties": rng.choice([False, False, {"type": "boolean"}, True]),
    }
    return {"allOf": [found, {"type": "object", "properties": {names[-1]: {}}}]} if kind == "both" else found


def matcher_of(constraint: JsonSchema):
    """Return an unread matcher of llguidance that knows bytes only."""
    facts = types.SimpleNamespace(
        eos_token_id=256, bos_token_id=None, tokens=[*BYTES[:255], b"", b""], special_token_ids=[]
    )
    return LLMatcher(LLTokenizer(TokenizerWrapper(facts)), constraint._grammar, log_level=0)


def read_by(matcher, data: bytes) -> tuple[int, bool]:
    """Return how many bytes of a text llguidance reads, and whether the text may end there."""
    matcher = matcher.deep_copy()
    read = matcher.try_consume_tokens(list(data))
    return read, read == len(data) and matcher.is_accepting()


def read_by_automaton(automaton, data: bytes) -> tuple[int, bool]:
    state = automaton.start
    for at, byte in enumerate(data):
        after = automaton.step(state, byte)
        if after is None:
            return at, False
        state = after
    return len(data), automaton.accepts(state)


def drawn(automaton, rng: random.Random, length: int = 60) -> bytes:
    """Draw a text that an automaton accepts, byte by byte; closing bytes are likelier, ending ones in long texts."""
    left = list(map(bytes_left, (automaton.control, automaton.inside) if is_open(automaton) else (automaton,)))
    state, data = automaton.start, bytearray()
    while not automaton.accepts(state) or (automaton.row(state).any() and rng.random() < 0.5 and len(data) < length):
        row = automaton.row(state)
        some = np.flatnonzero(row).tolist()
        closing = [byte for byte in some if byte in b'"}],']
        if len(data) >= length:
            some = [min(some, key=lambda byte: bytes_behind(automaton, left, int(row[byte])))]      # noqa: B023
        elif closing and rng.random() < 0.3:
            some = closing
        data.append(rng.choice(some))
        state = automaton.step(state, data[-1])
    return bytes(data)


def is_open(automaton) -> bool:
    return isinstance(automaton, OpenTexts)


def bytes_behind(automaton, left: list[np.ndarray], state: int) -> float:
    if not is_open(automaton):
        return left[0][state]
    return min(sum(left[1][each] for each in stack[:-1]) + left[0][stack[-1]] for stack in automaton.stacks(state))


def bytes_left(automaton) -> np.ndarray:
    """Return for every state the least number of bytes to the end."""
    table = automaton.explore().table
    left = np.where(automaton.accepting, 0.0, np.inf)
    while True:
        left[0] = np.inf
        nearer = np.minimum(left, 1 + left[table].min(1))
        if np.array_equal(nearer, left):
            return left
        left = nearer


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return the text with one byte added, removed or changed, or a prefix of it."""
    at = rng.randrange(len(data) + 1)
    tail = rng.choice([data[at:], data[at + 1 :], data[at + 1 :], b""])
    return data[:at] + bytes([rng.choice(EDITS)]) * (rng.random() < 0.6) + tail


def differences(constraint: JsonSchema, rng: random.Random, num_texts: int, given=()) -> list[bytes]:
    """Return the texts, drawn, mutated or given, on which the automaton and llguidance disagree."""
    matcher, automaton = matcher_of(constraint), constraint.automaton
    texts = [drawn(automaton, rng) for _ in range(num_texts)]
    texts += [mutated(each, rng) for each in texts for _ in range(4)]
    texts = [each for each in [*texts, *given] if b"\xff" not in each]
    return [each for each in texts if read_by(matcher, each) != read_by_automaton(automaton, each)]


@pytest.mark.parametrize("i", range(len(WITHIN)))
@pytest.mark.parametrize("whitespace", [" ?", True, False])
def test_texts_of_a_schema_agree_with_llguidance(i, whitespace):
    constraint = JsonSchema(WITHIN[i], whitespace=whitespace)
    assert constraint.automaton is not None and constraint.fallback_reason == ""
    rng = random.Random(i)
    digits = [f"{rng.choice(['', '-'])}{rng.choice(['0', '1', '3', '10', '12', '17', '102'])}" for _ in range(30)]
    fractions = ["", ".0", ".5", ".50", ".4501", ".33", ".330", ".7500001", "e1"]
    numbers = [each + rng.choice(fractions) for each in digits]
    given = [each.encode() for each in numbers] if i < len(NUMBERS) else []
    assert differences(constraint, rng, repetitions(100, 10), given) == []


@pytest.mark.parametrize("seed", range(repetitions(500, 60)))
def test_texts_of_drawn_schemas_agree_with_llguidance(seed):
    rng = random.Random(seed)
    try:
        constraint = JsonSchema(drawn_schema(rng))
    except ValueError as error:
        assert "nsatisfiable" in str(error)
        return
    if constraint.automaton is None:
        assert "too large" in constraint.fallback_reason
        return
    assert differences(constraint, rng, 10) == []


def real_schemas(count: int) -> list[tuple[dict, list[bytes]]]:
    """Return schemas of jsonschemabench, with texts that belong to some of them."""
    folder = SHARED / "evaldata" / "jsonschemabench"
    if not folder.exists():
        pytest.skip("jsonschemabench is not at hand")
    cases = [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]
    every = max(1, len(cases) // count)
    return [
        (case["schema"], [json.dumps(test["data"], ensure_ascii=False).encode() for test in case.get("tests", ())])
        for case in cases[::every]
    ]


def test_texts_of_real_schemas_agree_with_llguidance(capsys):
    rng, ours, taken = random.Random(0), 0, 0
    for schema, given in real_schemas(repetitions(10_000, 100)):
        try:
            constraint = JsonSchema(schema)
        except ValueError:
            continue
        taken += 1
        if constraint.automaton is not None:
            ours += 1
            assert differences(constraint, rng, 3, given) == [], schema
    if FULL:
        with capsys.disabled():
            print(f"\n{ours} of {taken} schemas that llguidance takes have an automaton", end="")
    assert ours > 0.1 * taken


def either_pattern(validator, pattern, value, schema):
    """Yield an error unless a pattern is found in a value, with digits and blanks as either Unicode's or ECMA-262's."""
    if isinstance(value, str) and not (re.search(pattern, value) or re.search(pattern, value, re.ASCII)):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


@pytest.mark.parametrize("i", range(len(WITHIN)))
def test_texts_of_an_automaton_are_instances(i):
    constraint, rng = JsonSchema(WITHIN[i]), random.Random(i)
    checker = jsonschema.FormatChecker(["ipv4"])
    draft = jsonschema.validators.validator_for(WITHIN[i], jsonschema.Draft202012Validator)
    validator = jsonschema.validators.extend(draft, {"pattern": either_pattern})(WITHIN[i], format_checker=checker)
    for _ in range(repetitions(100, 10)):
        value = constraint.parse(drawn(constraint.automaton, rng).decode())
        validator.validate(value)


def real_vocabulary(name: str) -> Vocabulary:
    from transformers import AutoTokenizer

    if not (SHARED / "vocab" / name).exists():
        pytest.skip(f"the tokenizer {name} is not at hand")
    return Vocabulary.from_tokenizer(AutoTokenizer.from_pretrained(SHARED / "vocab" / name))


@pytest.mark.parametrize("tokenizer", ["gpt2", "cl100k_base", "mistral_v3"])
def test_masks_agree_with_llguidance(tokenizer):
    vocab, rng = real_vocabulary(tokenizer), np.random.default_rng(0)
    for schema in WITHIN if FULL else [RECORD, *WITHIN[3::9]]:
        constraint = JsonSchema(schema)
        index, theirs = constraint.index(vocab), JsonSchemaIndex(constraint, vocab)
        state, other = index.start, theirs.start
        for _ in range(repetitions(30, 12)):
            mask = index.mask(state)
            assert np.array_equal(mask, theirs.mask(other)), (schema, other)
            allowed = [id for id in index.allowed(state).tolist() if vocab.tokens[id]]
            if not allowed:
                break
            token = int(rng.choice(allowed))
            state, other = index.advance(state, token), theirs.advance(other, token)


PIECES = [b'{"', b'":', b'": ', b'"}', b"12", b'"a"', b'","', b"true", b'{"a":', b"]]", b"], ["]
EOS = len(PIECES) + 256
SMALL = Vocabulary([*PIECES, *BYTES, b""], [EOS])


@pytest.mark.parametrize("schema", [RECORD, NUMBERS[2], STRINGS[3], SHAPES[2], SHAPES[9], SHAPES[15]], ids=range(6))
def test_masks_within_a_limit_agree_with_the_enumeration(schema):
    index = JsonSchema(schema).index(SMALL)
    reach = {}                                      # by state: the fewest tokens to the end, by rounds over all states

    def relax(states):
        changed = True
        while changed:
            changed = False
            for state, after in states.items():
                best = min((reach.get(target, np.inf) + 1 for target in after.values()), default=np.inf)
                best = 0 if index.accepts(state) else best
                if best < reach.get(state, np.inf):
                    reach[state], changed = best, True

    states, todo = {}, [index.start]
    while todo:
        state = todo.pop()
        if state not in states:
            ids = [id for id in index.allowed(state).tolist() if SMALL.tokens[id]]
            states[state] = {id: index.advance(state, id) for id in ids}
            todo += states[state].values()
    relax(states)
    for state, after in states.items():
        assert index.tokens_to_accept(state) == reach[state]
        for n in (1, 2, 3, 5, 9):
            within = {id for id, target in after.items() if reach[target] <= n - 1}
            assert set(index.mask_within(state, n).nonzero()[0].tolist()) - {EOS} == within


@pytest.mark.parametrize("why", BEYOND)
def test_a_schema_beyond_automata_uses_llguidance_and_reports_why(why):
    constraint = JsonSchema(BEYOND[why])
    assert constraint.automaton is None and why in constraint.fallback_reason
    index = constraint.index(SMALL)
    assert isinstance(index, JsonSchemaIndex) and repr(index).startswith("JsonSchemaIndex(")
    assert repr(JsonSchema(RECORD).index(SMALL)).startswith("TokenIndex(JsonSchema(")


def test_a_schema_that_grows_too_large_is_left_to_llguidance(monkeypatch):
    assert JsonSchema(text(minLength=100_000)).fallback_reason == "a long string"
    some = CLOSED | {"properties": {"a": text(pattern="^(?:a|b)*a(?:a|b){3}$")}}
    monkeypatch.setattr(json_texts, "MAX_STATES", 10)
    assert "more than 10 states" in JsonSchema({"anyOf": [some, CLOSED]}).fallback_reason
    assert JsonSchema(some).automaton is not None


def test_an_index_of_a_schema_can_be_saved_and_pickled(tmp_path):
    constraint = JsonSchema(RECORD)
    index = constraint.index(SMALL)
    index.save(tmp_path / "record.npz")
    loaded = TokenIndex.load(tmp_path / "record.npz", SMALL)
    again = pickle.loads(pickle.dumps(constraint)).index(SMALL)
    data = b'{"name": "a\xc3\xa9", "age": 12, "kind": "b"}'
    for other in (loaded, again):
        state, same = index.start, other.start
        for token in SMALL.spell(data):
            assert np.array_equal(index.mask(state), other.mask(same))
            state, same = index.advance(state, token), other.advance(same, token)
        assert other.accepts(same) and other.advance(same, EOS) is END
    assert constraint.automaton.count(len(data), unit="bytes") > 0


FEW = [b'{"a":', b"1", b"2", b'"x', b'"', b"}", b" ", b"x"]
SHORT = {"anyOf": [{"type": "integer", "maximum": 12, "minimum": 0}, text(maxLength=2)]}
PAIR = CLOSED | {"properties": {"a": SHORT}, "required": ["a"]}


def test_a_complete_record_has_its_weight_by_enumeration():
    scores = np.random.default_rng(0).normal(size=(3, len(FEW) + 1))
    lm = table_lm(lambda ids: scores[len(ids) % 3].tolist(), FEW)
    program = ConstrainedText(lm, "x", JsonSchema(PAIR), max_tokens=5, complete=True)
    exact = enumerate_exact(program)
    assert {str(each) for each in exact} >= {'{"a":1}', '{"a":12}', '{"a":"xx"}', '{"a":2 }'}
    assert all(JsonSchema(PAIR).parse(str(each)) for each in exact)
    Z = np.exp(exact.log_ml)
    seeds = range(repetitions(2000, 200))
    Zs = [np.exp(importance_sampling(program, 4, seed=seed, progress=False).log_ml) for seed in seeds]
    assert abs(np.mean(Zs) - Z) < 4 * np.std(Zs) / np.sqrt(len(Zs))


# ---- any JSON


PLAIN = [bytes([byte]) for byte in b'{}[]":,01-.truefalsnbcz']
JOINED = [b'"}', b"}}", b"[]}", b"{}", b"]]", b'":', b'{"', b"[[", b"},", b'","', b"]},{", b'[{"a":']
NESTED = Vocabulary([*PLAIN, *JOINED, b""], [len(PLAIN) + len(JOINED)])


def fewest_tokens(index, state, most: int) -> float:
    """Return the least number of tokens that lead to an end, by all paths of at most `most`; inf if there is none."""
    level, seen = {state}, {state}
    for length in range(most + 1):
        if any(map(index.accepts, level)):
            return length
        steps = (index.advance(each, id) for each in level for id in index.allowed(each).tolist() if NESTED.tokens[id])
        level = set(steps) - seen
        seen |= level
    return np.inf


@pytest.mark.parametrize("n", [3, math.inf])
def test_a_nested_text_that_cannot_be_closed_is_never_within_reach(n):
    index = JsonSchema(True, whitespace=False).index(Vocabulary([b'"', b"a", b"[", b"1", b'"}', b""], [5]))
    assert index.allowed(index.start).tolist() == [0, 2, 3, 4]
    assert np.flatnonzero(index.mask_within(index.start, n)).tolist() == [0, 3, 4]


@pytest.mark.parametrize("i", range(len(OPEN)))
def test_the_promised_distance_to_an_end_of_nested_json_is_reachable(i):
    rng, found = random.Random(i), []
    index = JsonSchema(OPEN[i], whitespace=False).index(NESTED)
    for _ in range(repetitions(60, 12)):
        state = index.start
        for _ in range(rng.randrange(12)):
            allowed = [id for id in index.allowed(state).tolist() if NESTED.tokens[id]]
            state = index.advance(state, rng.choice(allowed)) if allowed else state
        nearest = fewest_tokens(index, state, 3)
        assert index.tokens_to_accept(state) <= nearest
        if nearest < np.inf:
            found.append(index.tokens_to_accept(state) == nearest)
    assert np.mean(found) > 0.7


def test_free_json_may_nest_deeply_and_its_index_is_not_saved(tmp_path):
    constraint = JsonSchema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    index = constraint.index(SMALL)
    deep = b'{"n": 1, "x": ' + b"[" * 200 + b'{"a": null}' + b"]" * 200 + b"}"
    assert index.accepts(index.after(deep)) and not index.accepts(index.after(deep[:-1]))
    with pytest.raises(ValueError, match="leaves the language"):
        index.after(deep.replace(b"null}]", b"null]"))
    with pytest.raises(TooLarge, match="infinitely many states; \"additionalProperties\": false"):
        index.save(tmp_path / "open.npz")
    again = pickle.loads(pickle.dumps(constraint)).index(SMALL)
    assert again.accepts(again.after(deep)) and repr(again).startswith("TokenIndex(JsonSchema(")


def test_a_record_with_additional_members_usually_ends_in_time():
    """Nested values at the limit may die; without known distances, nearly all do."""
    scores = np.random.default_rng(1).normal(size=(5, len(NESTED.tokens)))
    lm = table_lm(lambda ids: scores[len(ids) % 5].tolist(), NESTED.tokens[:-1])
    schema = JsonSchema({"properties": {"a": {"type": "integer"}, "b": {}}, "type": "object", "required": ["a", "b"]})

    def alive(constraint):
        program = ConstrainedText(lm, "z", constraint, max_tokens=14, complete=True)
        particles = importance_sampling(program, 100, seed=0, progress=False)
        return [schema.parse(str(each)) for each in particles if each.log_weight > -np.inf]

    ours = alive(schema)
    assert len(ours) > 60 > 3 * len(alive(JsonSchemaIndex(schema, lm.vocab)))
    assert all(value.keys() >= {"a", "b"} for value in ours)
