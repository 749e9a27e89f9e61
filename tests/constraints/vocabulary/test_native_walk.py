"""Walks in C, compared with tokens read byte by byte: random tables, vocabularies, nodes and exits."""

import numpy as np
import pytest
from helpers.common import repetitions

from llmppl import native
from llmppl.constraints import Regex, TokenIndex, Vocabulary
from llmppl.constraints.vocabulary import native_walk
from llmppl.constraints.vocabulary.native_walk import beside_of, native_trie
from llmppl.constraints.vocabulary.trie import Trie
from llmppl.constraints.vocabulary.trie_walk import MemoGraph

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="no C compiler, or LLMPPL_NATIVE=0"
)

LETTERS = 97, 103


class Rows(MemoGraph):
    """Graph of a random table, which learns entries as they are needed and grows meanwhile."""

    def __init__(self, full, exits):
        super().__init__(None)
        self.full, self.all_exits = full, exits
        self.table, self.ready = np.full((1, 256), 0, np.int32), np.ones(1, bool)
        self.has_exits = np.full(1, 2, np.uint8)
        self.grow(1)

    def grow(self, most):
        while len(self.table) <= most:
            self.table = np.concatenate([self.table, np.full_like(self.table, -1)])
            self.ready = np.ones(len(self.table), bool)
            self.has_exits = np.concatenate([self.has_exits, np.full_like(self.has_exits, 2)])

    def fill(self, number, bytes):
        self.grow(self.full[number, bytes].max())
        self.table[number, bytes] = self.full[number, bytes]

    def find_exits(self, number):
        self.has_exits[number] = self.all_exits[number]


def random_case(rng):
    """Return a trie, a table whose row 0 is dead, and exits of its states."""
    long = rng.integers(1, 12)
    tokens = [
        bytes(rng.integers(*LETTERS, rng.integers(1, long + 1)).tolist())
        for _ in range(rng.integers(1, 60))
    ]
    size = rng.integers(2, 9)
    full = np.zeros((size, 256), np.int32)
    some = rng.integers(0, size, (size, LETTERS[1] - LETTERS[0]))
    if rng.random() < 0.5:  # states where most bytes lead to one
        most = rng.integers(0, size, (size, 1))
        some = np.where(rng.random(some.shape) < 0.9, most, some)
    full[:, slice(*LETTERS)] = some
    full[0] = 0
    return Trie(tokens), full, rng.integers(0, 2, size)


def ends_of(full, state, data):
    for byte in data:
        state = int(full[state, byte])
        if not state:
            break
    return state


def spelled(trie, node):
    """Return the bytes that lead to a node."""
    data = b""
    while node >= 0:
        data = bytes([trie.byte[node]]) + data
        depth = int(trie.depth[node])
        node = -1 if not depth else max(i for i in range(node) if trie.depth[i] == depth - 1)
    return data


@pytest.mark.parametrize("seed", range(repetitions(400, 40)))
def test_tokens_and_exits_equal_those_read_byte_by_byte(monkeypatch, seed):
    monkeypatch.setattr(native_walk, "MAX_EXITS", 1 + seed % 3)
    rng = np.random.default_rng(seed)
    trie, full, exits = random_case(rng)
    graph = Rows(full, exits)
    words = [spelled(trie, node) for node in range(len(trie))]
    for _ in range(4):
        start = int(rng.integers(1, len(full)))
        graph.grow(start)
        roots = rng.permutation(np.arange(-1, len(trie)))[: rng.integers(1, 4)].astype(np.int32)
        found = native_trie(trie).tokens(beside_of(graph), start, roots, with_exits=True)
        expected, places = [], []
        for root in roots.tolist():
            above = words[root] if root >= 0 else b""
            for id, token in enumerate(trie.tokens):
                if token.startswith(above) and len(token) > len(above):
                    end = ends_of(full, start, token[len(above) :])
                    expected += [(id, end)] if end else []
            for node, word in enumerate(words):
                if word.startswith(above) and len(word) > len(above) and trie.skip[node] > node + 1:
                    end = ends_of(full, start, word[len(above) :])
                    places += [(node, end)] if end and exits[end] else []
        assert sorted(zip(found.ids.tolist(), found.ends.tolist(), strict=True)) == sorted(expected)
        assert sorted(zip(found.nodes.tolist(), found.states.tolist(), strict=True)) == sorted(
            places
        )


@pytest.mark.parametrize("seed", range(repetitions(400, 40)))
def test_masks_equal_those_read_byte_by_byte_with_slices(monkeypatch, seed):
    for name, value in [("LEAST", 1), ("LEAST_NODES", 0), ("LONGEST", 1 + seed % 5), ("FEW", 1 + seed % 4),
                        ("MAX_SLICES", 2), ("MAX_EXITS", 1 + seed % 3)]:  # fmt: skip
        monkeypatch.setattr(native_walk, name, value)
    rng = np.random.default_rng(seed)
    trie, full, exits = random_case(rng)
    graph = Rows(full, exits)
    graph.fill(1, np.arange(256))
    for with_exits in (False, True):
        for start in rng.integers(1, len(full), 12).tolist():
            graph.grow(start)
            graph.fill(start, np.arange(256))
            mask, ids, found = native_trie(trie).mask(
                beside_of(graph), start, with_exits=with_exits
            )
            right = [bool(ends_of(full, start, token)) for token in trie.tokens]
            assert mask.tolist() == right
            assert ids is None or sorted(ids.tolist()) == np.flatnonzero(mask).tolist()
            if with_exits:
                listed = native_trie(trie).tokens(beside_of(graph), start, with_exits=True)
                assert found.nodes.tolist() == listed.nodes.tolist()
                assert found.states.tolist() == listed.states.tolist()


def test_slices_are_taken_from_their_second_use_on():
    words = [
        f"{a}{b}{c}" for a in "abcdefghijklmnop" for b in "qrstuvwxyz" for c in "abcdefghijklmnop"
    ]
    vocab = Vocabulary(
        [*(b"%c" % byte for byte in range(32, 127)), *(word.encode() for word in words), b""],
        [2655],
    )
    index = Regex("[a-z]{1,40}").index(vocab)
    slices = native_trie(index.trie)._slices
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
