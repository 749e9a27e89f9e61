"""index_of: every kind of constraint, with masks that are those of its language."""

import itertools
import re

import numpy as np
import pytest
from helpers.tiny import tiny_lm

from llmppl import ConstrainedText, Grammar, smc_steer
from llmppl.constraints import DFA, Index, Regex, TokenIndex, Vocabulary, index_of

TOKENS = [b"a", b"b", b"ab", b"ba", b"c", "é".encode(), "é".encode()[:1], "é".encode()[1:], b"ca", b""]
VOCAB = Vocabulary(TOKENS, eos_ids=[9])
OTHER = Vocabulary([b"a", b""], eos_ids=[1])


class Even:
    """Recognizer without a vocabulary: texts with an even number of a's."""

    start = "even"

    def step(self, state, byte):
        return {"even": "odd", "odd": "even"}[state] if byte == ord("a") else None

    def accepts(self, state):
        return state == "even"


class EveryOther(Index):
    """Index with only the required methods: a and b alternate."""

    start = 0

    def __init__(self, vocab):
        self.vocab = vocab

    def mask(self, state):
        mask = np.zeros(len(self.vocab.tokens), bool)
        mask[[*([state % 2] if state >= 0 else []), *(self.vocab.eos_ids if state > 2 else [])]] = True
        return mask

    def advance(self, state, token):
        if not self.mask(state)[token]:
            raise ValueError(f"token {token} cannot follow")
        return -1 if token in self.vocab.eos_ids else state + 1

    def accepts(self, state):
        return state > 2 or state < 0


class Turns:
    """Constraint that makes its own index."""

    def index(self, vocab):
        return EveryOther(vocab)


def texts_of(index, length):
    """Return the texts of all sequences of at most `length` tokens that end where the index accepts."""
    found, level = set(), [(index.start, b"")]
    for _ in range(length + 1):
        found.update(data for state, data in level if index.accepts(state))
        level = [
            (index.advance(state, int(token)), data + TOKENS[token])
            for state, data in level
            for token in index.allowed(state)
            if TOKENS[token]
        ]
    return found


def spelled(length):
    """Return all texts that at most `length` tokens spell."""
    for n in range(length + 1):
        for tokens in itertools.product(TOKENS[:-1], repeat=n):
            yield b"".join(tokens)


@pytest.mark.parametrize(
    "make, pattern",
    [
        (lambda: Regex("(ab)*"), "(ab)*"),
        (lambda: DFA.from_strings(["ab", "c"]), "ab|c"),
        (lambda: Grammar('start: "a" "b"*'), "ab*"),
        (Even, "(aa)*"),
        (lambda: TokenIndex(Even(), VOCAB), "(aa)*"),
        (lambda: Regex("c|b").index(VOCAB), "c|b"),
    ],
)
def test_the_index_of_a_constraint_spells_its_texts(make, pattern):
    expected = {data for data in spelled(3) if re.fullmatch(pattern.encode(), data)}
    assert texts_of(index_of(make(), VOCAB), 3) == expected


def test_a_class_of_your_own_needs_only_five_members():
    index = index_of(Turns(), VOCAB)
    assert type(index) is EveryOther and index_of(index, VOCAB) is index
    assert texts_of(index, 4) == {b"aba", b"abab"}
    assert index.masks([0, 1, 0, 9]).argmax(axis=1).tolist() == [0, 1, 0, 1]
    with pytest.raises(ValueError, match=r"tokens\[1\]: token 0 cannot follow"):
        index.masks([0, 0])
    assert index.tokens_to_accept(0) == 0 and index.mask_within(0, 1).tolist() == index.mask(0).tolist()
    posterior = smc_steer(ConstrainedText(tiny_lm(4), "a", Turns(), max_tokens=8), 4, 2, seed=0)
    assert len(posterior) and all(re.fullmatch("(ab)*a?", particle.s) and len(particle.s) > 2 for particle in posterior)


def test_an_index_over_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="is an index over another vocabulary than the model's"):
        index_of(Regex("a").index(OTHER), VOCAB)
    assert index_of(Regex("a").index(Vocabulary(TOKENS, eos_ids=[9])), VOCAB) is not None     # an equal one will do


def test_functions_have_no_index_and_other_objects_are_named():
    class Wrong:
        def index(self, vocab):
            return 5

    assert index_of(None, VOCAB) is None and index_of(lambda text: True, VOCAB) is None
    for wrong, message in [
        ("a+", "a constraint is a Regex, .* not 'a\\+': give Regex"),
        (["a", 5], "each of the strings must be a str, not 5"),
        (5, "a constraint is a Regex, .* not 5"),
        (Regex, "a constraint cannot be the type"),
        (Wrong(), r"index\(vocab\) must give an llmppl.constraints.Index, not 5"),
    ]:
        with pytest.raises(TypeError, match=message):
            index_of(wrong, VOCAB)
