"""Slices of random vocabularies, compared with the bytes of each token."""

import numpy as np
import pytest
from helpers.common import repetitions

from llmppl.constraints.vocabulary.slices import PLAIN, slice_by_levels, slice_of, slices_of
from llmppl.constraints.vocabulary.trie import Trie


@pytest.mark.parametrize("make", [slice_of, slice_by_levels])
@pytest.mark.parametrize("seed", range(repetitions(200, 20)))
def test_slices_and_jumps_equal_those_by_the_bytes_of_tokens(make, seed):
    rng = np.random.default_rng(seed)
    tokens = [bytes(rng.integers(97, 101, rng.integers(0, 6)).tolist()) for _ in range(40)]
    inside = np.zeros(256, bool)
    inside[97 : 97 + rng.integers(0, 5)] = True
    longest = int(rng.integers(1, 7))
    trie = Trie(tokens)
    found = make(trie, inside, longest)
    fits = [0 < len(each) <= longest and inside[[*each]].all() for each in tokens]
    assert found.mask.tolist() == fits
    assert found.size == sum(fits)
    assert found.longest == max(map(len, np.array(tokens, object)[fits]), default=0)
    is_other = found.is_other[trie.place[:-1]]
    others = [i for i, fit in zip(trie.order, found.mask[trie.order], strict=True) if not fit]
    for node in range(len(trie)):
        below = trie.order[trie.first[node] : trie.first[trie.skip[node]]]
        assert is_other[node] == bool(set(below.tolist()) & {int(each) for each in others})
        later = [at for at in range(node, len(trie)) if is_other[at]]
        assert found.jump[node] == min(later, default=len(trie))


def test_plain_slices_have_tokens_that_json_strings_contain_as_they_are():
    tokens = [b"a", b"ab c~", b'"', b"a\\", b"\n", b"\x7f", "é".encode(), b"abcdefghijkl", b""]
    slices = slices_of(Trie(tokens))
    assert [tokens[i] for i in np.flatnonzero(slices.plain(5).mask)] == [b"a", b"\x7f"]
    assert slices.plain(1) is None
    assert slices.plain(100).mask.sum() == 4
    assert not PLAIN[[*b'"\\\n']].any()
