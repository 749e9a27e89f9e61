"""Self-loops: masks of states that lead back to themselves, compared with tokens read byte by byte."""

import pickle
import random

import numpy as np
import pytest
from helpers.common import repetitions
from helpers.machines import Machine, brute_force, explore, machines, vocabularies
from hypothesis import given
from hypothesis import strategies as st

from llmppl import Grammar, JsonSchema, Regex
from llmppl.constraints import TokenIndex, Vocabulary
from llmppl.constraints.masks import self_loops
from llmppl.constraints.masks.self_loops import UTF8, Loop, key_of
from llmppl.constraints.vocabulary import trie_walk

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


@pytest.fixture(autouse=True)
def without_c(monkeypatch):
    """Compute masks by numpy: C reads loops in another way (test_native_walk.py)."""
    monkeypatch.setenv("LLMPPL_NATIVE", "0")


@pytest.fixture
def eager(monkeypatch):
    """Accept small loops, and make every walk reach its limits early."""
    monkeypatch.setattr(self_loops, "LEAST", 1)
    monkeypatch.setattr(self_loops, "USUAL", (slice(97, 99), slice(0, 1)))
    monkeypatch.setattr(self_loops, "FEW", 3)
    monkeypatch.setattr(trie_walk, "FEW", 3)
    monkeypatch.setattr(trie_walk, "LARGE", (2, 1))


@st.composite
def texts_as_tokens(draw):
    """Draw a vocabulary of pieces of text, some cut inside a character, and some equal."""
    alone = [bytes([byte]) for byte in sorted(set("".join(PIECES).encode()))]
    texts = draw(st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join), max_size=40))
    tokens = [text.encode() for text in texts]
    cuts = [token[draw(st.integers(0, 2)) : len(token) - draw(st.integers(0, 2))] for token in tokens]
    tokens = [*alone, *tokens, *filter(None, cuts)]
    return Vocabulary([*tokens, b"</s>"], [len(tokens)])


def check(recognizer, vocab, states):
    for state in states:
        mask = brute_force(recognizer, vocab, state)
        np.testing.assert_array_equal(TokenIndex(recognizer, vocab).mask(state), mask)          # walked, or by a loop
        np.testing.assert_array_equal(TokenIndex(recognizer, vocab).mask(state), mask)


def test_masks_of_random_automata_equal_those_read_byte_by_byte(eager, monkeypatch):
    made = []
    monkeypatch.setattr(self_loops, "Loop", lambda *given: made.append(given) or Loop(*given))

    @given(machines(), vocabularies())
    def masks(machine, vocab):
        check(machine, vocab, explore(TokenIndex(machine, vocab)))
        machine = Machine(np.where(np.arange(256) < 128, machine.full, 0), [True] * len(machine.full))
        check(machine, vocab, explore(TokenIndex(machine, vocab)))

    masks()
    assert made


@pytest.mark.parametrize("pattern", STRINGS)
@pytest.mark.parametrize("usual", [True, False])
def test_masks_inside_of_strings_and_numbers(usual, pattern, request):
    if not usual:
        request.getfixturevalue("eager")

    @given(texts_as_tokens())
    def masks(vocab):
        texts = Regex(pattern)
        check(texts, vocab, explore(texts.index(vocab), 12))

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


def utf8_loop(leave=b"", others=()):
    """Return a machine that loops on all text except some bytes, with some steps changed."""
    table = np.zeros((2 + sum(len(rest) for _, rest in UTF8), 256), np.int32)
    table[1, :128] = 1
    table[1, list(leave)] = 0
    state = 2
    for (first, last), rest in UTF8:
        table[1, first : last + 1] = state
        for lo, hi in rest[:-1]:
            table[state, lo : hi + 1] = state + 1
            state += 1
        table[state, rest[-1][0] : rest[-1][1] + 1] = 1
        state += 1
    for at, byte, target in others:
        table[at, byte] = target
    return Machine(table, [True] * len(table))


@pytest.mark.parametrize(
    "machine, characters",
    [
        (utf8_loop(), True),
        (utf8_loop(b'"\\'), True),
        (Machine([[0] * 256, [1] * 128 + [0] * 128, [0] * 256], [True] * 3), False),
        (utf8_loop(others=[(1, 0xC3, 0)]), None),                   # no character of these
        (utf8_loop(others=[(2, 0x41, 1)]), None),                   # more than characters
        (utf8_loop(others=[(2, 0x80, 0)]), None),                   # not all of them
        (utf8_loop(others=[(2, 0x80, 2)]), None),                   # that do not come back
        (utf8_loop(others=[(1, 0xFF, 1)]), True),                   # what is in no text leaves it
        (Machine(np.ones((3, 256), int), [True] * 3), None),        # all bytes
    ],
)  # fmt: skip
def test_a_loop_has_all_characters_or_none(machine, characters):
    key = key_of(machine.row, 1)
    assert (key and key[1]) is characters
    if key:
        assert [byte for byte in range(128) if key[0][byte]] == np.flatnonzero(machine.full[1, :128] == 1).tolist()
    tokens = ["a", "é", "aé", 'é"a', "字x", "x\\𐍈"]
    pieces = [token.encode()[:cut] for token in tokens for cut in range(1, 6)]
    vocab = Vocabulary([*pieces, b"\xc3a", b"\xa9", b"a\x80", b"a\xc2\x80\x80", b"\xff", b"a\xffb"])
    check(machine, vocab, [1, 2])


def test_few_bytes_are_no_loop():
    row = np.zeros(256, np.int32)
    row[48:55] = 1
    assert key_of(lambda _: row, 1) is None
    row[55] = 1
    assert key_of(lambda _: row, 1) == (row[:128].astype(bool).tobytes(), False)


def test_a_vocabulary_walks_the_inside_of_strings_once(monkeypatch):
    letters = [bytes([byte]) for byte in range(256)]
    words = [bytes([a, b, c]) for a in b'abcdefghij"' for b in b"abcdefghij" for c in b'abcdefghij",:}']
    vocab = Vocabulary([*letters, *words])
    schemas = [{"type": "object", "properties": {name: {"type": "string"}}} for name in ("abc", "bad", "each")]

    def masks(schema):
        index, (name,) = JsonSchema(schema).index(vocab), schema["properties"]
        return [index.mask(index.after(f'{{"{name}": "bad'[:end])) for end in range(1, 8 + len(name))]

    masks(schemas[0])
    masks(schemas[1])
    monkeypatch.setattr(trie_walk, "walk", None)        # no level of the trie is looked at
    assert max(mask.sum() for mask in masks(schemas[2])) > 1000


def test_a_vocabulary_keeps_a_bounded_number_of_loops():
    vocab = Vocabulary([bytes([byte]) for byte in range(32, 127)])
    for last in "jklmnopqrstuvwxyz" * 2:
        index = Regex(f"[a-{last}]+").index(vocab)
        index.mask(index.after("a"))
        assert 0 < len(index.trie.loops) <= self_loops.MOST


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
