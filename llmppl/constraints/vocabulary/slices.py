"""Slices: the tokens of a vocabulary that consist of bytes of one class, and the nodes to read for the other tokens.

A state that any bytes of the class may follow takes all tokens of the slice at once. So a walk reads the other tokens
alone. *Plain* bytes are those of ASCII that JSON strings contain without an escape.
"""

from __future__ import annotations

import ctypes

import numpy as np

from llmppl import native
from llmppl.constraints.constraint import Bools
from llmppl.constraints.vocabulary.trie import Ids, Trie
from llmppl.support.locks import cached_property

LONGEST = 24  # bytes of a token in a slice
MAX_SLICES = 16  # that are kept
LENGTHS = (1 << 16, LONGEST, 8, 4, 2)  # of slices of plain bytes
PLAIN = np.zeros(256, bool)
PLAIN[32:128] = True
PLAIN[[*b'"\\']] = False


class Slice:
    """Tokens of bytes of one class.

    mask : (V,) the tokens
    jump : (n + 1,) the first node from each node on where another token ends at it or below it, n if there is none
    longest : the most bytes of a token
    size : the number of the tokens
    """

    def __init__(self, trie: Trie, mask: Bools, jump: Ids, longest: int) -> None:
        self._trie = trie
        self.mask = mask
        self.jump = jump
        self.longest = longest
        self.size = int(np.count_nonzero(mask))

    @cached_property
    def is_other(self) -> Bools:
        """True if another token ends at the node or below it, by place: (n,)."""
        nodes = self._trie.nodes
        found: Bools = self.jump[nodes] == nodes
        return found


class Slices:
    """Slices of a vocabulary. For one use, a walk is faster: a class has a slice from its second use on."""

    def __init__(self, trie: Trie) -> None:
        self._trie = trie
        self._of_classes: dict[bytes, Slice | None] = {}
        self._plain: dict[int, Slice] = {}

    def of_class(self, inside: Bools, most: int) -> Slice | None:
        """Return the slice of a class, (256,), for states that at most so many of its bytes follow."""
        key = inside.tobytes()
        if key not in self._of_classes:
            if len(self._of_classes) >= MAX_SLICES:
                self._of_classes.clear()
            self._of_classes[key] = None
            return None
        found = self._of_classes[key]
        if found is None:
            found = self._of_classes[key] = slice_of(self._trie, inside, LONGEST)
        return found if found.longest <= most else None

    def plain(self, most: float) -> Slice | None:
        """Return the slice of plain bytes, for states that at most so many of them follow."""
        longest = next((length for length in LENGTHS if length <= most), 0)
        if not longest:
            return None
        found = self._plain.get(longest)
        if found is None:
            found = self._plain[longest] = slice_of(self._trie, PLAIN, longest)
        return found


def arrays_of(trie: Trie) -> native.Trie:
    """Return a trie as C reads it."""
    found: native.Trie | None = trie.loops.get("arrays")
    if found is None:
        found = native.Trie(len(trie), len(trie.tokens))
        skip = trie.skip[:-1].astype(np.int32)
        found.put(byte=trie.byte, depth=trie.depth, skip=skip, first=trie.first, order=trie.order)
        trie.loops["arrays"] = found
    return found


def slice_of(trie: Trie, inside: Bools, longest: int) -> Slice:
    """Return the tokens of at most `longest` bytes of a class."""
    library = native.library()
    if library is None:
        return slice_by_levels(trie, inside, longest)
    mask = np.zeros(len(trie.tokens), bool)
    jump = np.empty(len(trie) + 1, np.int32)
    stack = np.empty(len(trie.levels) + 1, np.int32)
    at_inside, *places = map(native.address, (inside, mask, jump, stack))
    most = library.slice_of(ctypes.byref(arrays_of(trie)), at_inside, longest, *places)
    return Slice(trie, mask, jump, most)


def slice_by_levels(trie: Trie, inside: Bools, longest: int) -> Slice:
    """Return the same, by numpy."""
    is_inside = inside[trie.bytes]  # by place
    for begin, end in trie.levels[1:longest]:
        is_inside[begin:end] &= is_inside[trie.parent[begin:end]]
    if len(trie.levels) > longest:
        is_inside[trie.levels[longest][0] :] = False
    of_node = np.empty_like(is_inside)
    of_node[trie.nodes] = is_inside
    num_tokens = np.diff(trie.first)
    of_token = of_node.repeat(num_tokens)  # in the order of their bytes
    mask = np.zeros(len(trie.tokens), bool)
    mask[trie.order] = of_token
    num_others = np.append(0, np.cumsum(~of_token))
    is_other = num_others[trie.first[trie.skip[:-1]]] > num_others[trie.first[:-1]]
    others = np.append(np.flatnonzero(is_other), len(trie)).astype(np.int32)
    jump = others[np.append(0, np.cumsum(is_other))]
    depths = trie.depth[of_node & (num_tokens > 0)].astype(int)
    return Slice(trie, mask, jump, (depths + 1).max(initial=0).item())


def slices_of(trie: Trie) -> Slices:
    """Return the slices of a vocabulary."""
    found: Slices = trie.loops.get("slices") or trie.loops.setdefault("slices", Slices(trie))
    return found
