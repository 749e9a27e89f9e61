"""Masks inside of strings, numbers and records, compared with tokens read byte by byte."""

import pickle
import random

import numpy as np
import pytest
from helpers.common import repetitions
from helpers.machines import brute_force, explore
from hypothesis import given
from hypothesis import strategies as st

from llmppl import Grammar, JsonSchema, Regex
from llmppl.constraints import Vocabulary
from llmppl.constraints.vocabulary import native_walk

PIECES = [*'"\\ab10 ,:{}[]é字𐍈\x7f\nunx', "ab", "ba"]
STRINGS = [
    r'"[^"]*"',
    r'"([^"\\]|\\.)*"',
    r'"[^"é]*"[ab]*',
    r"(a|b[ -~]*)\\[0-9]+",
    r"-?[0-9]+(,[0-9]+)*",
    r'("ab[^"]*|[^"\\]*a)"',
]
PROPERTIES = {"a": {"type": "string"}, "ab": {"type": "integer"}, "b": {"enum": ["ab", "ba"]}, "é": {}}
SCHEMAS = [
    {"type": "object", "properties": PROPERTIES},
    {"type": "object", "properties": PROPERTIES, "required": ["ab"], "additionalProperties": {"type": "number"}},
    {"type": "object", "properties": PROPERTIES, "additionalProperties": False},
    {"type": "array", "items": {"type": "string", "maxLength": 3}},
    {"anyOf": [{"type": "string", "pattern": "^a[ab]*$"}, {"additionalProperties": {"type": "string"}}]},
    {"anyOf": [{"properties": {"a": {"enum": ["ab", "b"]}}}, {"additionalProperties": {"type": ["string", "array"]}}]},
    True,
]  # fmt: skip


@st.composite
def texts_as_tokens(draw):
    """Draw a vocabulary of pieces of text, some cut inside a character, and some equal."""
    alone = [bytes([byte]) for byte in sorted(set("".join(PIECES).encode()))]
    texts = draw(st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join), max_size=40))
    tokens = [text.encode() for text in texts]
    cuts = [token[draw(st.integers(0, 2)) : len(token) - draw(st.integers(0, 2))] for token in tokens]
    tokens = [*alone, *tokens, *filter(None, cuts)]
    return Vocabulary([*tokens, b"</s>"], [len(tokens)])


@pytest.mark.parametrize("pattern", STRINGS)
@pytest.mark.parametrize("is_native", ["1", "0"])
def test_masks_inside_of_strings_and_numbers(monkeypatch, is_native, pattern):
    monkeypatch.setenv("LLMPPL_NATIVE", is_native)
    monkeypatch.setattr(native_walk, "LEAST", 2)
    monkeypatch.setattr(native_walk, "LEAST_NODES", 0)

    @given(texts_as_tokens())
    def masks(vocab):
        texts = Regex(pattern)
        index = texts.index(vocab)
        for state in explore(index, 12):
            np.testing.assert_array_equal(index.mask(state), brute_force(texts, vocab, state))

    masks()


@pytest.mark.parametrize("i", range(len(SCHEMAS)))
def test_masks_are_right_for_records_with_fixed_or_free_names(i):
    rng = random.Random(i)

    @given(texts_as_tokens())
    def masks(vocab):
        index = JsonSchema(SCHEMAS[i], lenient=True).index(vocab)
        for _ in range(repetitions(3, 2)):
            state = index.start
            for _ in range(12):
                np.testing.assert_array_equal(index.mask(state), brute_force(index.recognizer, vocab, state))
                allowed = [id for id in index.allowed(state).tolist() if id not in vocab.eos_ids]
                if not allowed:
                    break
                state = index.advance(state, rng.choice(allowed))

    masks()


@pytest.mark.parametrize("texts", [Regex('"[^"]*"'), JsonSchema(SCHEMAS[0]), Grammar("start: /[a-z]+/")])
def test_an_index_in_use_can_be_pickled(texts):
    vocab = Vocabulary([bytes([byte]) for byte in range(32, 127)] + [b'ab"', b"abc", b""], [97])
    index = texts.index(vocab)
    begun = {Regex: '"a', JsonSchema: '{"a": "b', Grammar: "ab"}[type(texts)]
    states = [index.after(begun[:end]) for end in range(len(begun) + 1)]
    masks = [index.mask(state) for state in states]
    copy = pickle.loads(pickle.dumps(index))
    for end, mask in enumerate(masks):
        np.testing.assert_array_equal(copy.mask(copy.after(begun[:end])), mask)
        np.testing.assert_array_equal(copy.allowed(copy.after(begun[:end])), np.flatnonzero(mask))
