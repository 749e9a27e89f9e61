"""Self-loops: the tokens that lead from a state back to it, computed once per vocabulary instead of once per state.

Inside a string, most tokens lead from a state to itself. These tokens depend only on the bytes that lead back, the
*loop*. The other tokens leave the loop at some byte; their rests from that byte on form a small trie, which is read
from the state. A state may differ little from one with a loop, for example after the first character of a word that is
searched. Its mask is computed from the other's, along the bytes at which the two differ.

Source: llguidance, which slices a vocabulary by loops that its caller names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from llmppl.constraints.constraint import Bools
from llmppl.constraints.vocabulary.trie import Trie
from llmppl.constraints.vocabulary.trie_walk import FEW, walk_from, walk_state
from llmppl.support.graphs import Memo

LEAST = 8                                           # bytes below 128 that a loop has at least
MOST = 16                                           # loops that are kept per vocabulary
USUAL = slice(33, 127), slice(48, 58)               # if most of these bytes lead to one state, it may have a loop

Rows = Callable[[int], npt.NDArray[np.int32]]
Key = tuple[bytes, bool]                            # 1 for each byte < 128 in the loop; True if other characters are
Rest = tuple[tuple[int, int], ...]                  # the first and last value of each following byte

UTF8: tuple[tuple[tuple[int, int], Rest], ...] = (  # first bytes of characters, and the bytes after them (RFC 3629)
    ((0xC2, 0xDF), ((0x80, 0xBF),)),
    ((0xE0, 0xE0), ((0xA0, 0xBF), (0x80, 0xBF))),
    ((0xE1, 0xEC), ((0x80, 0xBF), (0x80, 0xBF))),
    ((0xED, 0xED), ((0x80, 0x9F), (0x80, 0xBF))),
    ((0xEE, 0xEF), ((0x80, 0xBF), (0x80, 0xBF))),
    ((0xF0, 0xF0), ((0x90, 0xBF), (0x80, 0xBF), (0x80, 0xBF))),
    ((0xF1, 0xF3), ((0x80, 0xBF), (0x80, 0xBF), (0x80, 0xBF))),
    ((0xF4, 0xF4), ((0x80, 0x8F), (0x80, 0xBF), (0x80, 0xBF))),
)


def key_of(rows: Rows, state: int) -> Key | None:
    """Return the loop of a state: bytes below 128, and all other characters if any fits; None if there is none."""
    looping = rows(state)[:128] == state
    if np.count_nonzero(looping) < LEAST:
        return None
    first = rows(state)
    if not first[128:].any():
        return looping.tobytes(), False

    @cache
    def returns(rest: Rest, at: int) -> bool:
        """Return True if exactly the bytes `rest` lead from a state inside a character back to the state."""
        if not rest:
            return at == state
        row = rows(at)
        lo, hi = rest[0]
        return np.count_nonzero(row) == hi + 1 - lo and returns(rest[1:], _target(row, lo, hi))

    is_all = all(returns(rest, _target(first, *lead)) for lead, rest in UTF8)
    return (looping.tobytes(), True) if is_all else None


def _target(row: npt.NDArray[np.int32], lo: int, hi: int) -> int:
    """Return the state that all bytes from `lo` to `hi` lead to, 0 if they lead to several."""
    targets = row[lo : hi + 1]
    return targets.item(0) if (targets == targets[0]).all() else 0


class Loop:
    """Tokens of a trie that stay in a loop, and the rests of those that leave it after at least one byte."""

    def __init__(self, trie: Trie, key: Key) -> None:
        rows = _table(key)
        self.leave = rows[1] == 0                   # (256,) bool: the bytes that are not in the loop
        table = rows.ravel()
        # by place: state, place of exit
        inside = np.zeros(len(trie) + 1, np.int64)
        left = np.full(len(trie) + 1, -1)
        inside[-1] = 1
        for a, b in trie.levels:
            parent = trie.parent[a:b]
            above = inside[parent]
            inside[a:b] = table[(above << 8) + trie.bytes[a:b]]
            leaves = (above == 1) & (inside[a:b] == 0)
            left[a:b] = np.where(leaves, np.arange(a, b), left[parent])
        stay = inside[:-1].nonzero()[0]
        gone = (left[:-1] >= trie.levels[0][1]).nonzero()[0]
        self.mask = np.zeros(len(trie.tokens), bool)            # the tokens that stay in the loop
        self.mask[trie.tokens_ending(stay, stay)[0]] = True
        self.ids, depth = trie.tokens_ending(gone, trie.depth[trie.nodes[left[gone]]])
        pairs = zip(self.ids.tolist(), depth.tolist(), strict=True)
        self.rest = Trie([trie.tokens[id][at:] for id, at in pairs])


@lru_cache(64)
def _table(key: Key) -> npt.NDArray[np.int32]:
    """Return the automaton of a loop, (S, 256): 1 is its state, 0 the dead one, all others are inside a character."""
    bytes, characters = key
    rows = [np.zeros(256, np.int32) for _ in range(2)]
    rows[1][:128] = np.frombuffer(bytes, bool)
    for (first, last), rest in UTF8 if characters else ():
        rows[1][first : last + 1] = len(rows)
        for i, (lo, hi) in enumerate(rest, 1):
            rows.append(np.zeros(256, np.int32))
            rows[-1][lo : hi + 1] = 1 if i == len(rest) else len(rows)
    return np.array(rows)


class Loops:
    """Masks of the states of a table that have a loop, or differ little from a state that has one."""

    def __init__(self, graph: Any, trie: Trie) -> None:
        self._graph = graph
        self._trie = trie
        self._rows = graph.row
        self._keys: Memo[int, Key | None] = Memo(partial(key_of, self._rows))

    def mask(self, state: int, mask_of: Callable[[int], Bools]) -> Bools | None:
        """Return the mask of a state, (V,) bool, or None if no loop helps; `mask_of` returns that of another state."""
        key = self._keys[state]
        if key is not None:
            loop = self._loop(key)
            return None if loop is None else self._mask_with_loop(state, loop)
        row = self._rows(state)
        for some in USUAL:
            other = np.sort(row[some]).item((some.stop - some.start) // 2)
            if other and self._keys[other] is not None:
                return self._mask_by_difference(state, other, mask_of)
        return None

    def _loop(self, key: Key) -> Loop | None:
        """Return the loop from its second use on; for a single use, a walk is faster."""
        known = self._trie.loops
        found = known.get(key)
        if found is None:
            is_new = key not in known
            if is_new and len(known) >= MOST:
                for other in [each for each in known if isinstance(each, tuple)]:
                    del known[other]
            found = known[key] = None if is_new else Loop(self._trie, key)
        return found

    def _mask_with_loop(self, state: int, loop: Loop) -> Bools | None:
        """Return the mask of a state with a loop; None if many tokens leave it by their first byte."""
        trie = self._trie
        row = self._rows(state)
        bytes, _, sizes, _ = trie.views
        leaving = (bytes.find(byte, 0, sizes[-1]) for byte in (row * loop.leave).nonzero()[0].tolist())
        places = [(at, row.item(bytes[at])) for at in leaving if at >= 0]
        found = walk_from(self._graph, trie, places)
        if found is None:
            return None
        mask = loop.mask.copy()
        mask[found[0]] = True
        mask[loop.ids[walk_state(self._graph, loop.rest, state)[0]]] = True
        return mask

    def _mask_by_difference(self, state: int, other: int, mask_of: Callable[[int], Bools]) -> Bools | None:
        """Return the mask of a state from that of another; None if they differ much."""
        trie = self._trie
        rows = self._rows
        bytes, first, sizes, _ = trie.views
        both = [(len(trie), state, other)]
        more = list[tuple[int, int]]()
        less = list[tuple[int, int]]()
        for place, one, two in both:                # `both` grows in the loop
            if not (size := sizes[place]):
                continue
            begin = first[place]
            row = rows(one)
            like = rows(two)
            for byte in (row != like).nonzero()[0].tolist():
                at = bytes.find(byte, begin, begin + size)
                if at >= 0:
                    here = row.item(byte)
                    there = like.item(byte)
                    if here and there:
                        both.append((at, here, there))
                    else:
                        (more if here else less).append((at, here or there))
            if len(both) > FEW:
                return None
        fit, unfit = (walk_from(self._graph, trie, places) for places in (more, less))
        if fit is None or unfit is None:
            return None
        mask = mask_of(other).copy()
        mask[fit[0]] = True
        mask[unfit[0]] = False
        return mask
