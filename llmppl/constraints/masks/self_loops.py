"""Loops: the tokens that lead from a state back to it, found once for a vocabulary and not in every state.

The one idea: inside a string most tokens lead from a state to itself, and which they are depends on nothing but the
bytes that do. What is left of other tokens, from the byte that leaves the loop, is a small trie, which is read from
that state. A state that differs little from one with a loop, as where a name is spelled that a schema knows, is read
beside it, along the bytes by which they differ.

Sources: llguidance, whose slices of a vocabulary are the tokens of loops that it is told of.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from llmppl.constraints.constraint import Bools
from llmppl.constraints.vocabulary.trie import Trie
from llmppl.constraints.vocabulary.trie_walk import FEW, TableGraph, walk_from, walk_state
from llmppl.support.graphs import Memo

__all__ = ["Key", "Loop", "Loops", "key_of"]

LEAST = 8                                           # bytes below 128 that a loop has
MOST = 16                                           # loops that a vocabulary keeps
USUAL = slice(33, 127), slice(48, 58)               # bytes of which most may lead to a loop: signs, digits

Rows = Callable[[int], npt.NDArray[np.int32]]
Key = tuple[bytes, bool]                            # of bytes below 128: 1 for each in it; whether others are
Rest = tuple[tuple[int, int], ...]                  # the first and last of bytes, one after another

UTF8: tuple[tuple[tuple[int, int], Rest], ...] = (  # bytes that begin characters, and what follows (RFC 3629)
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
    """What leads from a state back to it: bytes below 128, and all other characters if any fits; None if it is less."""
    looping = rows(state)[:128] == state
    if np.count_nonzero(looping) < LEAST:
        return None
    known: dict[tuple[Rest, int], bool] = {}

    def returns(rest: Rest, at: int) -> bool:
        """Whether some bytes lead from what is inside of a character back to the state, and no others anywhere."""
        if not rest:
            return at == state
        found = known.get((rest, at))
        if found is None:
            row, (lo, hi) = rows(at), rest[0]
            found = np.count_nonzero(row) == hi + 1 - lo and returns(rest[1:], _target(row, lo, hi))
            known[rest, at] = found
        return found

    first = rows(state)
    if not first[128:].any():
        return looping.tobytes(), False
    is_all = all(returns(rest, _target(first, *lead)) for lead, rest in UTF8)
    return (looping.tobytes(), True) if is_all else None


def _target(row: npt.NDArray[np.int32], lo: int, hi: int) -> int:
    """The state that all bytes from `lo` to `hi` lead to, 0 if they do not agree."""
    targets = row[lo : hi + 1]
    return targets.item(0) if (targets == targets[0]).all() else 0


class Loop:
    """The tokens of a trie that stay in a loop, and what is left of others behind a byte of it, where they leave it."""

    def __init__(self, trie: Trie, key: Key) -> None:
        rows = _table(key)
        self.leave = rows[1] == 0                   # (256,) bool: the bytes that do not lead back
        table = rows.ravel()
        inside, left = np.zeros(len(trie) + 1, np.int64), np.full(len(trie) + 1, -1)    # by place: state, or where left
        inside[-1] = 1
        for a, b in trie.levels:
            parent = trie.parent[a:b]
            above = inside[parent]
            inside[a:b] = table[(above << 8) + trie.bytes[a:b]]
            leaves = (above == 1) & (inside[a:b] == 0)
            left[a:b] = np.where(leaves, np.arange(a, b), left[parent])
        stay, gone = inside[:-1].nonzero()[0], (left[:-1] >= trie.levels[0][1]).nonzero()[0]
        self.mask = np.zeros(len(trie.tokens), bool)            # of the tokens that stay
        self.mask[trie.tokens_ending(stay, stay)[0]] = True
        self.ids, depth = trie.tokens_ending(gone, trie.depth[trie.nodes[left[gone]]])
        pairs = zip(self.ids.tolist(), depth.tolist(), strict=True)
        self.rest = Trie([trie.tokens[id][at:] for id, at in pairs])


@lru_cache(64)
def _table(key: Key) -> npt.NDArray[np.int32]:
    """(S, 256) the automaton of a loop: 1 is its state, 0 the dead one, the others are inside of a character."""
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
    """The masks of those states of a table that have a loop, or differ little from one that has.

    A recognizer may know the `loop` of a state itself, as `key_of` finds it.
    """

    def __init__(self, graph: TableGraph, trie: Trie) -> None:
        self._graph, self._trie, self._rows = graph, trie, graph.recognizer.row
        self._keys: Memo[int, Key | None] = Memo(getattr(graph.recognizer, "loop", partial(key_of, self._rows)))

    def mask(self, state: int, mask_of: Callable[[int], Bools]) -> Bools | None:
        """(V,) bool ndarray: the tokens that fit a state, if a loop tells; `mask_of` may be asked for another's."""
        key = self._keys[state]
        if key is not None:
            loop = self._loop(key)
            return None if loop is None else self._inside(state, loop)
        row = self._rows(state)
        for some in USUAL:
            other = np.sort(row[some]).item((some.stop - some.start) // 2)
            if other and self._keys[other] is not None:
                return self._beside(state, other, mask_of)
        return None

    def _loop(self, key: Key) -> Loop | None:
        """The loop, if it is met for the second time: one is sooner walked through."""
        known = self._trie.loops
        found: Loop | None = known.get(key)
        if found is None:
            is_new = key not in known
            if is_new and len(known) >= MOST:
                known.clear()
            found = known[key] = None if is_new else Loop(self._trie, key)
        return found

    def _inside(self, state: int, loop: Loop) -> Bools | None:
        """The mask of a state with a loop; None if much leaves it by the first byte."""
        trie, row = self._trie, self._rows(state)
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

    def _beside(self, state: int, other: int, mask_of: Callable[[int], Bools]) -> Bools | None:
        """The mask of a state by that of another; None if they differ much."""
        trie, rows = self._trie, self._rows
        bytes, first, sizes, _ = trie.views
        both, more, less = [(len(trie), state, other)], list[tuple[int, int]](), list[tuple[int, int]]()
        for place, one, two in both:                # which grows meanwhile
            if not (size := sizes[place]):
                continue
            begin, row, like = first[place], rows(one), rows(two)
            for byte in (row != like).nonzero()[0].tolist():
                at = bytes.find(byte, begin, begin + size)
                if at >= 0:
                    here, there = row.item(byte), like.item(byte)
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
