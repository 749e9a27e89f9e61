"""Token masks of JSON schemas, compared with byte-by-byte search, and distances to an end, with search over tokens."""

import sys
from functools import cache

import numpy as np
import pytest
from helpers.common import FULL, ROOT, repetitions, slow
from helpers.json_texts import Reader, walk

from llmppl import Vocabulary

VOCABULARIES = ROOT.parent / "shared" / "vocab"
STATES = repetitions(40, 10)                            # per schema
FEW = repetitions(3, 2)                                 # with a vocabulary of a real tokenizer
DETOURS = {"open", "lengths"}                           # a property or escape that is not needed may save a token


def record(**properties):
    return {"type": "object", "properties": properties}


LETTER, INTEGER = {"enum": ["a", "b"]}, {"type": "integer", "minimum": 0, "maximum": 99}
TREE = {
    "$defs": {"tree": {**record(a={"$ref": "#/$defs/tree"}, b={"type": "boolean"}), "additionalProperties": False}},
    "$ref": "#/$defs/tree",
}
CLOSED = {**record(a=INTEGER, b=LETTER), "required": ["a", "b"], "additionalProperties": False}
NESTED = {"type": "array", "items": {"$ref": "#"}, "maxItems": 3}
SCHEMAS = {
    "any": True, "closed": CLOSED, "recursive": TREE, "nested arrays": NESTED,
    "open": {**record(a=INTEGER, b=LETTER), "required": ["b"]},
    "values": {"type": "object", "additionalProperties": INTEGER},
    "recursive choice": {"anyOf": [{"type": "null"}, {**record(a={"$ref": "#"}), "required": ["a"]}]},
    "pattern": {"type": "string", "pattern": "^[ab]{2,5}$"}, "pattern inside": {"type": "string", "pattern": "a1"},
    "lengths": {"type": "array", "items": {"type": "string", "minLength": 2, "maxLength": 4}, "minItems": 1},
    "format": record(a={"type": "string", "format": "date-time"}, b={"type": "string", "format": "uuid"}),
    "bounds": {"type": "number", "minimum": -1.25, "exclusiveMaximum": 20.5},
    "multiples": {"type": "array", "items": {"type": "integer", "multipleOf": 7}, "maxItems": 2},
    "many items": {"type": "array", "items": {"const": 1}, "minItems": 12},
    "counts": {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 2},
    "names": {"type": "object", "patternProperties": {"^a": INTEGER, "b$": {"maximum": 50}}},
    "property names": {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "minProperties": 1},
    "unique": {"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True},
    "contains": {"type": "array", "items": {"enum": ["a", 1]}, "contains": {"const": 1}, "maxContains": 1},
    "choice": {"oneOf": [CLOSED, {"type": "array", "prefixItems": [LETTER], "items": False}, {"const": None}]},
    "condition": {
        **record(a=LETTER, b={}), "required": ["a"], "if": record(a={"const": "a"}), "then": record(b=INTEGER),
    },
    "alike": record(a={"enum": [1, 10, 1.5, "a", "ab", 'b"']}, ab={"enum": ["b"]}, aab=True),
    "dependent": {**CLOSED, "required": [], "dependentRequired": {"a": ["b"]}},
}  # fmt: skip
CASES = [(name, {}) for name in SCHEMAS] + [(name, {"order": "any"}) for name in ("closed", "open", "recursive")]
per_schema = pytest.mark.parametrize(("name", "order"), CASES, ids=[name + " any order" * bool(o) for name, o in CASES])
PIECES = [
    "{", "}", "[", "]", ",", ":", '"', " ", "a", "b", "1", "0", "7", "true", "null", "{}", "[]", "]}", "}}", '",', '":',
    '"a":', ',"b":', '":1,"a":', '{"a":', '"a"', "[[", "1]", "], [", '"}', "ab", "11",
]  # fmt: skip
SMALL = Vocabulary([*(piece.encode() for piece in PIECES), b""], eos_ids=[len(PIECES)])
BYTES_TOO = [*(b"%c" % byte for byte in range(256)), *(piece.encode() for piece in PIECES), "é€".encode()[1:3]]
COMPLETE = Vocabulary([*BYTES_TOO, b""], eos_ids=[len(BYTES_TOO)])


@cache
def vocabulary(name):
    if name in ("small", "complete"):
        return SMALL if name == "small" else COMPLETE
    if not (VOCABULARIES / name).is_dir():
        pytest.skip(f"{VOCABULARIES / name} is absent")
    from transformers import AutoTokenizer

    return Vocabulary.from_tokenizer(AutoTokenizer.from_pretrained(VOCABULARIES / name))


@cache
def trie(name):
    """Return the tokens of a vocabulary as a tree of dicts; the ids of a node's tokens are at None."""
    vocab, root = vocabulary(name), {}
    for token, data in enumerate(vocab.tokens):
        if data and token not in vocab.special_ids:
            node = root
            for byte in data:
                node = node.setdefault(byte, {})
            node.setdefault(None, []).append(token)
    return root


def fitting(reader, state, tree):
    """Return each token that may follow a state of the bytes, with the state after it."""
    found, stack = {}, [(state, tree)]
    while stack:
        state, node = stack.pop()
        found.update(dict.fromkeys(node.get(None, []), state))
        stack += [(reader.index.advance(state, byte), node[byte]) for byte in reader.index.next_bytes(state)
                  if byte in node]  # fmt: skip
    return found


def places(reader, rng, number):
    """Yield random beginnings of texts."""
    yield b""
    for _ in range(number - 1):
        text = (walk(reader, rng, 40) or "").encode()
        yield text[: int(rng.integers(len(text) + 1))]


def check_mask(reader, index, vocab, text, tree):
    """Compare the mask after `text`, and some of the states after its tokens, with the bytes."""
    state, place = index.after(text), reader.index.after(text)
    found = fitting(reader, place, tree)
    expected = np.zeros(len(vocab.tokens), bool)
    expected[list(found)] = True
    expected[list(vocab.eos_ids)] = reader.index.accepts(place)
    wrong = np.flatnonzero(index.mask(state) != expected)
    assert not wrong.size, (text, [vocab.tokens[token] for token in wrong[:5]], expected[wrong[:5]])
    assert np.array_equal(index.allowed(state), np.flatnonzero(expected))
    assert index.next_bytes(state) == reader.index.next_bytes(place)
    for token in list(found)[:: max(1, len(found) // 5)]:
        after = index.advance(state, token)
        assert index.next_bytes(after) == reader.index.next_bytes(found[token])
        assert index.accepts(after) == reader.index.accepts(found[token])


@per_schema
@pytest.mark.parametrize("tokens", ["complete", *slow("gpt2"), *["cl100k_base"] * FULL])
def test_masks_equal_search_byte_by_byte(name, order, tokens):
    vocab, rng, reader = vocabulary(tokens), np.random.default_rng(len(name)), Reader(SCHEMAS[name], **order)
    index = reader.constraint.index(vocab)
    for text in places(reader, rng, STATES if tokens == "complete" else FEW):
        check_mask(reader, index, vocab, text, trie(tokens))


def test_a_token_with_two_names_repeats_none():
    index = Reader({"type": "object", "additionalProperties": INTEGER}).constraint.index(COMPLETE)
    states, token = map(index.after, ('{"a', '{"b', '{"a":1,"b')), COMPLETE.tokens.index(b'":1,"a":')
    assert [(index.mask(each)[token], index.mask_within(each, 9)[token]) for each in states] == [(0, 0), (1, 1), (0, 0)]


def least(reader, state, tree):
    """Return the fewest tokens to an end by breadth-first search over states of the bytes; None if it is too long."""
    level, seen, count = [state], {state}, 0
    while level:
        if any(map(reader.index.accepts, level)):
            return count
        level = [after for each in level for after in fitting(reader, each, tree).values()]
        level = [each for each in dict.fromkeys(level) if each not in seen]
        seen.update(level)
        if len(seen) > 60:
            return None
        count += 1
    return float("inf")


def distances(name, order, tokens):
    """Return pairs of an index's distance or mask and that of search over tokens, each with its place."""
    vocab, rng, tree = vocabulary(tokens), np.random.default_rng(len(name)), trie(tokens)
    reader = Reader(SCHEMAS[name], **dict(order))
    try:
        index = reader.constraint.index(vocab)
    except ValueError:                                  # no tokens spell an instance
        start = least(reader, reader.index.start, tree)
        return [], [(set(), set() if start in (float("inf"), None) else {start}, name)]
    found, masks, known = [], [], {}
    for text in places(reader, rng, repetitions(9, 3)):
        state, after = index.after(text), fitting(reader, reader.index.after(text), tree)
        found.append((index.tokens_to_accept(state), least(reader, reader.index.after(text), tree), text))
        for end in after.values():
            known[end] = known[end] if end in known else least(reader, end, tree)
        if None not in map(known.get, after.values()):
            for n in (1, 2, 3, 5, float("inf")):
                most = min(n - 1, sys.float_info.max)
                within = set(np.flatnonzero(index.mask_within(state, n)).tolist()) - {*vocab.eos_ids}
                masks.append((within, {token for token, end in after.items() if known[end] <= most}, (text, n)))
    return [each for each in found if each[1] is not None], masks


@per_schema
@pytest.mark.parametrize("tokens", slow("small", "complete"))
def test_distances_equal_search_over_tokens(name, order, tokens):
    found, masks = distances(name, tuple(order.items()), tokens)
    assert [each for each in found if each[0] < each[1]] == []
    assert [(place, within - needed) for within, needed, place in masks if not within <= needed] == []
    if name not in DETOURS:
        assert [each for each in found if each[0] > each[1]] == []
        assert (name, tokens) == ("any", "complete") or all(needed <= within for within, needed, _ in masks)
