"""Effects: the tokens of a vocabulary that end inside a unit, and the places in the trie where its exits are met.

The trie is walked once for each state of a unit, whatever follows the unit. A token that crosses an exit goes on below
the node where it crossed, in the unit that follows. So the same effects serve all continuations, and all machines.

Some bytes lead from many states back to themselves, as inside a string. The tokens that consist of such bytes are kept
for the vocabulary (`llmppl.constraints.vocabulary.trie_walk.Loop`), and are not walked again.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from llmppl.constraints.constraint import Bools, Ints
from llmppl.constraints.machine.machine import LOCK, Exit, Unit
from llmppl.constraints.masks.mask_store import MaskStore, PackedMask
from llmppl.constraints.vocabulary.trie import Ids, Trie, ranges
from llmppl.constraints.vocabulary.trie_walk import Loop, steps
from llmppl.support.graphs import Memo

MAX_EFFECTS = 1 << 14  # that are kept for a vocabulary
MAX_GROUPED = 256  # effects whose tokens are kept by their last states
MAX_LOOPS = 16  # sets of bytes whose tokens are kept
LEAST_LOOP = 8  # bytes of a loop
LARGE = 500  # nodes below which a walk pays for itself


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
    """Effects over one vocabulary."""

    def __init__(self, trie: Trie) -> None:
        self.trie = trie
        self.root = np.array([-1], np.int32).tobytes()
        self.store = MaskStore(len(trie.tokens), np.zeros(0, np.int32), LOCK)
        self._effects: Memo[tuple[Unit, int, bytes], Effect] = Memo(self._find)
        self._groups: Memo[tuple[Unit, int, bytes], list[Group]] = Memo(self._find_groups, MAX_GROUPED)
        self._loops: Memo[bytes, Loop] = Memo(lambda loop: Loop(trie, loop), MAX_LOOPS)

    def of(self, unit: Unit, number: int, nodes: bytes) -> Effect:
        """Return the effect of a state of a unit on the tokens below some nodes."""
        if len(self._effects) > MAX_EFFECTS:
            self._effects.clear()
            self.store = MaskStore(len(self.trie.tokens), np.zeros(0, np.int32), LOCK)
        return self._effects[unit, number, nodes]

    def groups(self, unit: Unit, number: int, nodes: bytes) -> list[Group]:
        """Return the tokens that end in the unit, by their last states."""
        return self._groups[unit, number, nodes]

    def _find(self, key: tuple[Unit, int, bytes]) -> Effect:
        unit = key[0]
        walk = _Walk(self, unit)
        walk.run(key[1], np.frombuffer(key[2], np.int32))
        exits = []
        for label, places in walk.exits.items():
            nodes = np.unique(np.concatenate(places))
            exits.append((label, nodes.astype(np.int32).tobytes()))
        if not unit.is_always_viable:
            return Effect(None, exits)
        ids = [some for of_state in walk.inside.values() for some in of_state]
        if not ids:
            return Effect(self.store.of_ids(np.zeros(0, np.int32), False), exits)
        return Effect(self.store.of_ids(np.concatenate(ids), False), exits)

    def _find_groups(self, key: tuple[Unit, int, bytes]) -> list[Group]:
        walk = _Walk(self, key[0])
        walk.run(key[1], np.frombuffer(key[2], np.int32))
        return [Group(number, np.concatenate(ids)) for number, ids in walk.inside.items()]

    def loop(self, bytes: Bools) -> Loop:
        return self._loops[bytes.tobytes()]


class _Walk:
    """Walk of the trie from a state, level by level.

    inside : state -> arrays of the tokens that end there
    exits : label -> arrays of the nodes where a state with this exit is met
    """

    def __init__(self, effects: Effects, unit: Unit) -> None:
        self._effects = effects
        self._trie = effects.trie
        self._unit = unit
        self.inside: dict[int, list[Any]] = defaultdict(list)
        self.exits: dict[Exit, list[Any]] = defaultdict(list)

    def run(self, start: int, nodes: Ids) -> None:
        trie = self._trie
        above = trie.place[nodes]
        size = trie.num_children[above]
        places = ranges(trie.first_child[above], size)
        states: Any = np.full(places.size, start)
        while places.size:
            after = steps(self._unit, states, trie.bytes[places])
            is_live = after > 0
            places = places[is_live]
            states = after[is_live]
            places, states, left = self._through_loops(places, states)
            self._note(places, states)
            size = trie.num_children[places]
            places = ranges(trie.first_child[places], size)
            states = states.repeat(size)
            if left:
                places = np.concatenate([places, *[each for each, _ in left]])
                states = np.concatenate([states, *[np.full(each.size, state) for each, state in left]])

    def _note(self, places: Ints, states: Ints) -> None:
        """Note the tokens that end at some places, and the exits of the states there."""
        ids, ends = self._trie.tokens_ending(places, states)
        for state in np.unique(ends).tolist():
            self.inside[state].append(ids[ends == state])
        for state in np.unique(states).tolist():
            labels = self._unit.exits[state]
            if labels:
                here = places[states == state]
                here = here[self._trie.num_children[here] > 0]
                if here.size:
                    for label in labels:
                        self.exits[label].append(self._trie.nodes[here])

    def _through_loops(self, places: Ints, states: Ints) -> tuple[Ints, Ints, list[tuple[Ints, int]]]:
        """Return the places without those in large loops, and of each loop the places where tokens leave it."""
        left = list[tuple[Ints, int]]()
        size = self._trie.below[places]
        if size.sum() <= LARGE:
            return places, states, left
        for state in np.flatnonzero(np.bincount(states, size) > LARGE).tolist():
            loop = self._unit.loops[state]
            if loop is None or np.count_nonzero(loop) < LEAST_LOOP:
                continue
            is_here = states == state
            ids, exits = self._effects.loop(loop).below(places[is_here])
            self.inside[state].append(ids)
            left.append((exits, state))
            places = places[~is_here]
            states = states[~is_here]
        return places, states, left


def effects_of(trie: Trie) -> Effects:
    """Return the effects of a vocabulary."""
    found: Effects = trie.loops.get("machine") or trie.loops.setdefault("machine", Effects(trie))
    return found
