"""Random automata and tries for the native part, each compared with plain Python or with numpy.

`python -m helpers.in_c LIBRARY COUNT` checks COUNT of each kind with another library, such as one with sanitizers.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

from llmppl import native
from llmppl.constraints import Regex
from llmppl.constraints.vocabulary import native_walk, slices
from llmppl.constraints.vocabulary.native_walk import beside_of, native_trie
from llmppl.constraints.vocabulary.trie import Trie
from llmppl.constraints.vocabulary.trie_walk import MemoGraph

LETTERS = 97, 103
TIGHT = [
    (native_walk, "LEAST", 1, 1),
    (native_walk, "LEAST_NODES", 0, 0),
    (native_walk, "FEW", 1, 4),
    (native_walk, "MAX_EXITS", 1, 3),
    (slices, "LONGEST", 1, 5),
    (slices, "MAX_SLICES", 2, 2),
]


def tighten(seed, set=setattr):
    """Set the limits of walks to small values."""
    rng = np.random.default_rng(seed)
    for module, name, least, most in TIGHT:
        set(module, name, int(rng.integers(least, most + 1)))


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


def spelled(trie):
    """Return the bytes that lead to each node."""
    words, path = [], b""
    for byte, depth in zip(trie.byte.tolist(), trie.depth.tolist(), strict=True):
        path = path[:depth] + bytes([byte])
        words.append(path)
    return words


def check_tokens(seed):
    """Compare tokens and exits below random nodes with those read byte by byte."""
    rng = np.random.default_rng(seed)
    trie, full, exits = random_case(rng)
    graph = Rows(full, exits)
    words = spelled(trie)
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


def check_masks(seed):
    """Compare masks, with slices, and the exits beside them with those read byte by byte."""
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
            assert mask.tolist() == [bool(ends_of(full, start, token)) for token in trie.tokens]
            assert ids is None or sorted(ids.tolist()) == np.flatnonzero(mask).tolist()
            if with_exits:
                listed = native_trie(trie).tokens(beside_of(graph), start, with_exits=True)
                assert found.nodes.tolist() == listed.nodes.tolist()
                assert found.states.tolist() == listed.states.tolist()


def random_pattern(rng, depth=3):
    """Return a regular expression of letters, classes, choices and repeats."""
    kind = rng.integers(0, 6 if depth else 2)
    if kind == 0:
        return str(rng.choice(["a", "b", "c", "é", "日", ".", "[a-c]", "[^a]", "ab", "[b-dé-ü]"]))
    if kind == 1:
        return "".join(rng.choice(["a", "b", "c", "d"], rng.integers(0, 4)).tolist())
    parts = [random_pattern(rng, depth - 1) for _ in range(rng.integers(1, 4))]
    if kind == 2:
        return f"({'|'.join(parts)})"
    if kind == 3:
        return "".join(parts)
    return f"({parts[0]}){rng.choice(['*', '+', '?', '{0,3}', '{2}', '{1,5}'])}"


def check_rows(seed):
    """Compare the states and rows of a random pattern with those made in Python: the same up to their numbers."""
    rng = np.random.default_rng(seed)
    pattern = random_pattern(rng)
    one, other = Regex(pattern), Regex(pattern)
    assert one.native_rows() is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMPPL_NATIVE", "0")
        other.row(other.start)
        assert other.native_rows() is None
    number = {one.start: other.start}
    todo = [one.start]
    while todo and len(number) < 300:
        state = todo.pop(rng.integers(0, len(todo)))
        assert one.accepts(state) == other.accepts(number[state])
        for target, image in {
            *zip(one.row(state).tolist(), other.row(number[state]).tolist(), strict=True)
        }:
            assert (target == 0) == (image == 0)
            if target and target not in number:
                number[target] = image
                todo.append(target)
            assert not target or number[target] == image
    assert len({*number.values()}) == len(number)
    return one


def main(library, count):
    native.LIBRARY = Path(library)
    assert native.library() is not None
    for seed in range(count):
        check_tokens(seed)
        tighten(seed)
        check_masks(seed)
        check_rows(seed)
    print(f"{count} checked")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
