"""Merges of byte-pair encoding (BPE): the tokens and pairs of tokens that they rebuild from their bytes.

A token is *stable* if the merges rebuild it from its bytes. A pair of tokens is *stable* if the merges rebuild both
from their joined bytes. The *left spine* of a token lists the parts at its left edge while it was merged; the *right
spine* those at its right edge. Merges inside two neighbours happen in the same order in every text, so the first merge
across a border also happens to the pair alone. It is therefore enough to check neighbours.

Source: "Language Models over Canonical Byte-Pair Encodings" (ICML 2025).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from llmppl.constraints.constraint import Bools, Ints

NEVER = np.iinfo(np.int64).max                      # later than all merges


class Merges:
    """Merges of a BPE model, with the tokens and pairs that are stable under them.

    Parameters
    ----------
    sizes : V ints, the number of characters of every token
    leaves : ids that merging starts from
    merges : sequence of (left, right, product), highest priority first

    Attributes
    ----------
    stable : (V,) bool ndarray
    ascending : bool
        True if every token is built by merges in the order of `merges`, as in all trained models. If False, the other
        results are invalid.
    """

    def __init__(self, sizes: Sequence[int], leaves: Iterable[int], merges: Sequence[tuple[int, int, int]]) -> None:
        V = len(sizes)
        self._rank = {left * V + right: rank for rank, (left, right, _) in enumerate(merges)}
        self._time, self._left, self._right = [-1] * V, [-1] * V, [-1] * V  # last merge of each token
        self.ascending = True
        stable = [False] * V
        for leaf in leaves:
            stable[leaf] = True
        for rank in sorted(range(len(merges)), key=lambda rank: sizes[merges[rank][2]]):
            left, right, product = merges[rank]
            if stable[left] and stable[right] and [*self._crossings(left, right)][-1:] == [(left, right)]:
                self.ascending &= max(self._time[left], self._time[right]) < rank
                stable[product] = True
                self._time[product], self._left[product], self._right[product] = rank, left, right
        self.stable: Bools = np.array(stable)
        self._arrays: tuple[Ints, ...] | None = None

    def is_stable_pair(self, left: int, right: int) -> bool:
        """Return True if the merges rebuild both tokens from their joined bytes."""
        return bool(self.stable[left] and self.stable[right]) and next(self._crossings(left, right), None) is None

    def stable_after(self, left: int) -> Bools:
        """Return the tokens that form a stable pair with `left` before them: (V,) bool ndarray."""
        if not self.stable[left]:
            return np.zeros_like(self.stable)
        if self._arrays is None:
            self._arrays = self._spine_arrays()
        time, partner, rank, first, owner, end, begin = self._arrays
        out = self.stable.copy()
        part, merged = left, NEVER
        while part >= 0:                            # along the right spine of `left`, the latest part first
            made = self._time[part]
            mine = slice(first[part], first[part + 1])
            sooner = rank[mine] < merged
            parts, ranks = partner[mine][sooner], rank[mine][sooner]
            together = time[parts] < merged
            parts, ranks = parts[together], ranks[together]
            number = begin[parts + 1] - begin[parts]
            total = np.cumsum(number)
            where = np.arange(number.sum()) + np.repeat(begin[parts] - (total - number), number)
            out[owner[where[end[where] >= np.maximum(np.repeat(ranks, number), made)]]] = False
            part, merged = self._right[part], made
        return out

    def _crossings(self, left: int, right: int) -> Iterator[tuple[int, int]]:
        """Yield the merges that would cross the border of two stable tokens before merges inside them, latest first.

        The loop goes back in time: it takes apart the later one of the two parts at the border. Among merges of equal
        priority the leftmost comes first: one inside `left`, then one across the border, then one inside `right`.
        """
        V = len(self._time)
        merged_left = merged_right = NEVER          # the times at which the parts at the border are merged
        while True:
            rank = self._rank.get(left * V + right)
            if rank is not None and rank < merged_left and rank <= merged_right:
                yield left, right
            made_left, made_right = self._time[left], self._time[right]
            if made_left > made_right:
                left, merged_left = self._right[left], made_left
            elif made_right >= 0:
                right, merged_right = self._left[right], made_right
            else:
                return

    def _spine_arrays(self) -> tuple[Ints, ...]:
        """Return the merges sorted by their left part, and the left spines of stable tokens sorted by their parts.

        Returns
        -------
        time : (V,), the rank of the merge that makes each token
        partner, rank : right parts and ranks of the merges with left part p, at first[p] : first[p + 1]
        first : (V + 1,)
        owner, end : tokens with p on their left spine, and the rank at which it is merged, at begin[p] : begin[p + 1]
        begin : (V + 1,)
        """
        V = len(self._time)
        time, left = np.array(self._time), np.array(self._left)
        keys = np.fromiter(self._rank.keys(), np.int64, len(self._rank))
        ranks = np.fromiter(self._rank.values(), np.int64, len(self._rank))
        by_left = np.argsort(keys)
        keys, ranks = keys[by_left], ranks[by_left]
        part = owner = np.flatnonzero(self.stable)
        end = np.full(part.size, NEVER)
        spines = []
        while part.size:
            spines.append((part, owner, end))
            above = left[part] >= 0
            part, owner, end = left[part[above]], owner[above], time[part[above]]
        parts, owners, ends = (np.concatenate(each) for each in zip(*spines, strict=True))
        by_part = np.argsort(parts, kind="stable")
        ids = np.arange(V + 1)
        first, begin = np.searchsorted(keys // V, ids), np.searchsorted(parts[by_part], ids)
        return time, keys % V, ranks, first, owners[by_part].astype(np.int32), ends[by_part], begin
