"""Effects: the tokens of a vocabulary that end inside a unit, and the places in the trie where its exits are met.

The trie is walked once for each state of a unit, whatever follows the unit. A token that crosses an exit goes on below
the node where it crossed, in the unit that follows. So the same effects serve all continuations, and all machines.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from llmppl.constraints.machine.machine import LOCK, Exit, Unit
from llmppl.constraints.masks.mask_store import MaskStore, PackedMask
from llmppl.constraints.vocabulary.native_walk import ROOT, Found
from llmppl.constraints.vocabulary.trie import Ids, Trie
from llmppl.constraints.vocabulary.trie_walk import read_mask, read_tokens
from llmppl.support.graphs import Memo

MAX_EFFECTS = 1 << 14  # that are kept for a vocabulary
MAX_GROUPED = 1 << 24  # tokens that are kept by their last states


class Effect(NamedTuple):
    """Effect of a state on the tokens below some nodes.

    tokens : those that end in the unit; None if that depends on their last states
    exits : labels, each with the nodes where it is met, as the bytes of an int32 ndarray
    """

    tokens: PackedMask | None
    exits: list[tuple[Exit, bytes]]


class Group(NamedTuple):
    """Tokens that lead to the same state of a unit."""

    number: int
    ids: Ids


class Effects:
    """Effects over one vocabulary. `matching[pattern]` are the tokens in which a pattern is found."""

    def __init__(self, trie: Trie) -> None:
        self.trie = trie
        self.root = ROOT.tobytes()
        self.store = MaskStore(len(trie.tokens), np.zeros(0, np.int32), LOCK)
        self._effects: Memo[tuple[Unit, int, bytes], Effect] = Memo(self._find)
        self._groups: Memo[tuple[Unit, int, bytes], list[Group]] = Memo(self._find_groups)
        self._num_grouped = 0
        self._ends: Memo[tuple[Unit, int, bytes], tuple[int, ...]] = Memo(
            self._find_ends, MAX_EFFECTS
        )

        self.matching: Memo[re.Pattern[bytes], Ids] = Memo(self._find_matching)

    def _find_matching(self, pattern: re.Pattern[bytes]) -> Ids:
        found = [token for token, data in enumerate(self.trie.tokens) if pattern.search(data)]
        return np.array(found, np.int32)

    def of(self, unit: Unit, number: int, nodes: bytes) -> Effect:
        """Return the effect of a state of a unit on the tokens below some nodes."""
        return self._effects[unit, number, nodes]

    def groups(self, unit: Unit, number: int, nodes: bytes) -> list[Group]:
        """Return the tokens that end in the unit, by their last states."""
        return self._groups[unit, number, nodes]

    def ends(self, unit: Unit, number: int, nodes: bytes) -> tuple[int, ...]:
        """Return the last states of the tokens that end in the unit."""
        return self._ends[unit, number, nodes]

    def _find(self, key: tuple[Unit, int, bytes]) -> Effect:
        if len(self._effects) > MAX_EFFECTS:
            self._effects.clear()
            self.store = MaskStore(len(self.trie.tokens), np.zeros(0, np.int32), LOCK)
        unit, number, nodes = key
        if unit.is_always_viable and nodes == self.root:
            plain = unit.num_plain(number)
            mask, ids, found = read_mask(unit, self.trie, number, plain, with_exits=True)
            return Effect(self.store.of_walk(mask, ids, False), exits_of(unit, found))
        found = read_tokens(
            unit, self.trie, number, np.frombuffer(nodes, np.int32), with_exits=True
        )
        tokens = None
        if unit.is_always_viable:
            tokens = self.store.of_ids(found.ids, False)
        else:
            self._groups[key] = self._grouped(found)  # which are wanted next
        return Effect(tokens, exits_of(unit, found))

    def _find_groups(self, key: tuple[Unit, int, bytes]) -> list[Group]:
        unit, number, nodes = key
        return self._grouped(read_tokens(unit, self.trie, number, np.frombuffer(nodes, np.int32)))

    def _find_ends(self, key: tuple[Unit, int, bytes]) -> tuple[int, ...]:
        return tuple([group.number for group in self._groups[key]])

    def _grouped(self, found: Found) -> list[Group]:
        """Return tokens by their last states."""
        self._num_grouped += found.ids.size
        if self._num_grouped > MAX_GROUPED:
            self._groups.clear()
            self._num_grouped = found.ids.size
        order = found.ends.argsort(kind="stable")
        ends, begin = np.unique(found.ends[order], return_index=True)
        return list(map(Group, ends.tolist(), np.split(found.ids[order], begin[1:])))


def exits_of(unit: Unit, found: Found) -> list[tuple[Exit, bytes]]:
    """Return the exits that tokens cross, each with its nodes."""
    if not found.states.size:
        return []
    places: dict[Exit, list[Ids]] = defaultdict(list)
    for state in set(found.states.tolist()):
        nodes = found.nodes[found.states == state]
        for label in unit.exits[state]:
            places[label].append(nodes)
    return [(label, np.unique(np.concatenate(each)).tobytes()) for label, each in places.items()]


def effects_of(trie: Trie) -> Effects:
    """Return the effects of a vocabulary."""
    found: Effects = trie.loops.get("machine") or trie.loops.setdefault("machine", Effects(trie))
    return found
