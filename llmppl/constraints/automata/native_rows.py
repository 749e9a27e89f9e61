"""Subset construction in C: the states of an automaton are sets of NFA states, made where a walk needs them.

Where C lacks room, `NativeRows.longer` returns new structures with longer arrays. The automaton then replaces the old
ones by one assignment, so an interrupt leaves one of the two, whole.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np

from llmppl import native
from llmppl.constraints.automata.nfa import NFA, begins

ROOM = 64  # states at first
MOST = 1 << 18  # states of an NFA: of a larger one, few are used


class NativeRows:
    """States and rows of an automaton.

    Attributes
    ----------
    table, ready, accepting : as those of `llmppl.constraints.automata.determinise.Machine`, with room for more states
    arrays : the same for C
    subsets : the sets of NFA states
    """

    def __init__(self, library: Any, subsets: native.Subsets, room: int) -> None:
        self.library = library
        self.subsets = subsets
        self.table = np.zeros((room, 256), np.int32)
        self.ready = np.zeros(room, bool)
        self.ready[0] = True
        self.accepting = np.zeros(room, bool)
        self.begin = np.zeros(room + 1, np.int64)
        self.arrays = native.Automaton(num_states=1, max_states=room)
        self.arrays.put(table=self.table, ready=self.ready, exits=self.accepting)
        self.arrays.subsets = ctypes.addressof(subsets)
        self.arrays.sets = subsets  # lives as long
        subsets.num_slots = 1 << (2 * room).bit_length()
        subsets.put(begin=self.begin, slots=np.zeros(subsets.num_slots, np.int32))

    def longer(self, status: int) -> NativeRows:
        """Return the same with the room that C has missed."""
        subsets = native.Subsets.from_buffer_copy(self.subsets)
        subsets.__dict__.update(self.subsets.__dict__)
        if status == native.MEMBERS:
            subsets.max_members += subsets.max_members + subsets.num_states
            members = np.zeros(subsets.max_members, np.int32)
            members[: subsets.num_members] = self.members[: subsets.num_members]
            subsets.put(members=members)
        size = self.arrays.num_states
        found = NativeRows(self.library, subsets, max(len(self.ready), 2 * size))
        found.table[:size] = self.table[:size]
        found.ready[:size] = self.ready[:size]
        found.accepting[:size] = self.accepting[:size]
        found.begin[: size + 1] = self.begin[: size + 1]
        found.arrays.num_states = size
        self.library.rehash(ctypes.byref(found.arrays))
        return found

    @property
    def members(self) -> Any:
        """Members of all sets, one after the other."""
        return self.subsets.held("members")

    def set_of(self, state: int) -> tuple[int, ...]:
        """Return the NFA states of a state, ascending."""
        return tuple(self.members[self.begin[state] : self.begin[state + 1]].tolist())


def first_rows(
    library: Any, nfa: NFA, start: Iterable[int], left: tuple[int, int]
) -> NativeRows | None:
    """Return the rows of an NFA without guards whose state 1 is a closed set of NFA states.

    `left` are the states and steps of the budget. None if a part of the NFA is not built yet, or it is too large.
    """
    if nfa.has_deferred or len(nfa) > MOST:
        return None
    size = len(nfa)
    edges = nfa.edge_arrays()
    begun = np.array(sorted(start), np.int32)
    subsets = native.Subsets(num_states=size, num_edges=len(edges.to), max_members=4 * size)
    epsilon = np.fromiter(chain.from_iterable(nfa.epsilon), np.int32)
    targets = np.zeros(len(edges.to) + size, np.int32)
    targets[: begun.size] = begun
    for states in (edges.to, epsilon, begun):
        if states.size and not 0 <= states.min() <= states.max() < size:
            return None
    subsets.put(edge_begin=edges.begin, edge_to=edges.to, edge_low=edges.low, edge_high=edges.high)
    subsets.put(epsilon_begin=begins(nfa.epsilon), epsilon_to=epsilon, targets=targets)
    scratch = np.zeros((8, size), np.int32)
    subsets.put(
        members=scratch[4:].ravel(),
        seen=scratch[0],
        state_of=scratch[1],
        stack=scratch[2],
        found=scratch[3],
    )
    subsets.states_left, subsets.steps_left = left
    rows = NativeRows(library, subsets, ROOM)
    number = ctypes.c_int32()
    status = library.begin(ctypes.byref(rows.arrays), begun.size, ctypes.byref(number))
    return rows if status == native.DONE and number.value == 1 else None
