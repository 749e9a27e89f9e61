"""Merges of byte-pair encoding (BPE): which tokens they leave as they are, alone and side by side.

A token is *stable* if the merges give it back from its bytes; two are *stable* side by side if they give back both. The
*spines* of a token are the parts that stood at its left and at its right edge while it was merged. The merges inside
two neighbours happen in the same order in whatever text they stand, so the first merge of all that crosses a border
would also happen to the two alone.

Source for the rule of neighbours: "Language Models over Canonical Byte-Pair Encodings" (ICML 2025).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from llmppl.constraints.constraint import Bools, Ints

NEVER = np.iinfo(np.int64).max                      # later than all merges


class Merges:
    """The merges of a BPE model: which tokens they leave as they are, alone and side by side.

    Parameters
    ----------
    sizes : V ints, the characters of every token
    leaves : ids that merging starts from
    merges : sequence of (left, right, product), those with priority first

    Attributes
    ----------
    stable : (V,) bool ndarray
    ascending : bool
        Whether each merge on the way to a token comes later in `merges` than those before it, as in all trained models.
        Where this is False, nothing else here holds.
    """

    def __init__(self, sizes: Sequence[int], leaves: Iterable[int], merges: Sequence[tuple[int, int, int]]) -> None:
        V = len(sizes)
        self._rank = {left * V + right: rank for rank, (left, right, _) in enumerate(merges)}
        self._time, self._left, self._right = [-1] * V, [-1] * V, [-1] * V  # of the last merge that makes a token
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

    def beside(self, left: int, right: int) -> bool:
        """Whether two tokens are stable side by side."""
        return bool(self.stable[left] and self.stable[right]) and next(self._crossings(left, right), None) is None

    def row(self, left: int) -> Bools:
        """(V,) bool ndarray: the tokens that are stable after `left`."""
        if not self.stable[left]:
            return np.zeros_like(self.stable)
        if self._arrays is None:
            self._arrays = self._spines()
        time, partner, rank, first, owner, end, begin = self._arrays
        out = self.stable.copy()
        part, gone = left, NEVER
        while part >= 0:                            # up the right spine of `left`, the latest first
            born = self._time[part]
            mine = slice(first[part], first[part + 1])
            sooner = rank[mine] < gone
            parts, ranks = partner[mine][sooner], rank[mine][sooner]
            together = time[parts] < gone
            parts, ranks = parts[together], ranks[together]
            number = begin[parts + 1] - begin[parts]
            total = np.cumsum(number)
            where = np.arange(number.sum()) + np.repeat(begin[parts] - (total - number), number)
            out[owner[where[end[where] >= np.maximum(np.repeat(ranks, number), born)]]] = False
            part, gone = self._right[part], born
        return out

    def _crossings(self, left: int, right: int) -> Iterator[tuple[int, int]]:
        """The merges across the border of two stable tokens that come before those inside them, the latest first.

        Backwards in time, of the two parts at the border the one that was made later is taken apart. Of merges with
        equal priority the leftmost comes first: those in `left`, the one across the border, those in `right`.
        """
        V = len(self._time)
        gone_left = gone_right = NEVER              # when the parts at the border are merged away
        while True:
            rank = self._rank.get(left * V + right)
            if rank is not None and rank < gone_left and rank <= gone_right:
                yield left, right
            made_left, made_right = self._time[left], self._time[right]
            if made_left > made_right:
                left, gone_left = self._right[left], made_left
            elif made_right >= 0:
                right, gone_right = self._left[right], made_right
            else:
                return

    def _spines(self) -> tuple[Ints, ...]:
        """All merges by their left part, and all left spines of stable tokens by their parts.

        Returns
        -------
        time : (V,) when a token is made
        partner, rank : right parts and ranks of the merges whose left part is p, at first[p] : first[p + 1]
        first : (V + 1,)
        owner, end : tokens on whose left spine p is, and until when it is there, at begin[p] : begin[p + 1]
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
