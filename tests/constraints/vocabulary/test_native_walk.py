"""Walks in C, compared with tokens read byte by byte: random tables, vocabularies, nodes and exits."""

import numpy as np
import pytest
from helpers.common import repetitions
from helpers.in_c import Rows, check_masks, check_tokens, tighten

from llmppl import native
from llmppl.constraints import Regex, TokenIndex, Vocabulary
from llmppl.constraints.vocabulary import native_walk
from llmppl.constraints.vocabulary.native_walk import beside_of, native_trie
from llmppl.constraints.vocabulary.slices import slices_of
from llmppl.constraints.vocabulary.trie import Trie

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="no C compiler, or LLMPPL_NATIVE=0"
)


@pytest.mark.parametrize("seed", range(repetitions(400, 40)))
def test_tokens_and_exits_equal_those_read_byte_by_byte(monkeypatch, seed):
    monkeypatch.setattr(native_walk, "MAX_EXITS", 1 + seed % 3)
    check_tokens(seed)


@pytest.mark.parametrize("seed", range(repetitions(400, 40)))
def test_masks_equal_those_read_byte_by_byte_with_slices(monkeypatch, seed):
    tighten(seed, monkeypatch.setattr)
    check_masks(seed)


def test_slices_are_taken_from_their_second_use_on():
    words = [
        f"{a}{b}{c}" for a in "abcdefghijklmnop" for b in "qrstuvwxyz" for c in "abcdefghijklmnop"
    ]
    vocab = Vocabulary(
        [*(b"%c" % byte for byte in range(32, 127)), *(word.encode() for word in words), b""],
        [2655],
    )
    index = Regex("[a-z]{1,40}").index(vocab)
    slices = slices_of(index.trie)._of_classes
    masks = [index.mask(index.after("a" * n)) for n in range(41)]
    assert [each.longest for each in slices.values()] == [3]
    for n, mask in enumerate(masks):
        fits = [
            token.islower() and token.isalpha() and 0 < len(token) <= 40 - n
            for token in vocab.tokens[:-1]
        ]
        assert mask.tolist() == [*fits, n > 0]


def test_a_row_that_leads_to_no_state_is_refused():
    trie, graph = Trie([b"ab", b"b"]), Rows(np.zeros((2, 256), np.int32), [0, 0])
    graph.table[:] = 7
    with pytest.raises(
        ValueError, match="a row of state 1 leads to a state that the automaton does not have"
    ):
        native_trie(trie).tokens(beside_of(graph), 1)
    with pytest.raises(ValueError, match="5 is not a state"):
        native_trie(trie).tokens(beside_of(graph), 5)


def test_arrays_that_c_cannot_read_are_left_to_numpy():
    class Wide:
        start = 1

        def __init__(self):
            self.table, self.ready = np.zeros((2, 256), np.int64), np.ones(2, bool)
            self.table[1, 97] = 1

        def row(self, state):
            return self.table[state]

        def step(self, state, byte):
            return int(self.table[state, byte]) or None

        def accepts(self, state):
            return True

        explore = accepting = None

    index = TokenIndex(Wide(), Vocabulary([b"a", b"b", b"aa", b""], [3]))
    assert index.mask(1).tolist() == [True, False, True, True]
