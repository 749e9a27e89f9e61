"""Names of the properties that an object does not list: their language, and the shape of each.

Patterns sort names into *classes*: a class is the set of patterns that are found in a name, and has one shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from llmppl.constraints.automata.budget import TooLarge
from llmppl.constraints.automata.dfa import DFA, anything
from llmppl.constraints.automata.operations import Edge
from llmppl.constraints.constraint import Bools, Ints
from llmppl.constraints.json.ecma import found
from llmppl.constraints.json.shapes import Lazy, Object, String, both, intersect
from llmppl.constraints.json.strings import texts_of
from llmppl.support.graphs import Memo, Numbering

__all__ = ["Names"]

MAX_STATES = 5_000                                  # of all patterns of an object together
MAX_RESTS = 64                                      # names that are listed


class Names:
    """Names that an object does not list, as an automaton over their bytes; `start` is 0 if there are none.

    `part(state)` is the shape of the names that end there, None if none does. `rests(state)` lists the rests of the
    names that continue there, and is None if they are many.
    """

    def __init__(self, shape: Object, is_live: Callable[[Lazy], bool]) -> None:
        patterns = list(dict.fromkeys(pattern for others in shape.others for pattern, _ in others.patterns))
        self._dfa, self._parts = anything(), dict[int, Lazy]()          # by accepting state
        self._endless, self.is_endless = np.ones(1, bool), True
        self.part, self.rests = self._parts.get, Memo(self._find_rests)
        if shape.names == String() and not patterns:
            part = both(*(others.additional for others in shape.others))
            self.start = self._dfa.start if is_live(part) else 0
            self._parts |= dict.fromkeys(np.flatnonzero(self._dfa.accepting).tolist(), part)
            return
        table, accepting, sets = _product([texts_of(intersect(shape.names, String())), *map(found, patterns)])
        parts = dict[tuple[bool, ...], Lazy]()
        for state in np.flatnonzero(accepting).tolist():
            if sets[state] not in parts:
                matched = {pattern for pattern, is_in in zip(patterns, sets[state], strict=True) if is_in}
                parts[sets[state]] = both(*(
                    both(*some) if (some := [each for name, each in others.patterns if name in matched])
                    else others.additional for others in shape.others
                ))  # fmt: skip
            accepting[state] = is_live(parts[sets[state]])
        live = accepting.copy()
        while (more := live | (live[table] & (table > 0)).any(1)).sum() > live.sum():
            live = more
        table[~live[table]] = 0
        self._dfa = DFA.__new__(DFA)
        self._dfa._fix(table.astype(np.int32), accepting, 1)
        self.start = int(live[1])
        self._parts |= {state: parts[sets[state]] for state in np.flatnonzero(accepting).tolist()}
        self._endless = live
        while (less := self._endless & (self._endless[table] & (table > 0)).any(1)).sum() < self._endless.sum():
            self._endless = less                    # the states that reach a cycle
        self.is_endless = bool((self._endless == live).all())

    def moves(self, state: int) -> list[Edge]:
        return self._dfa.moves(state)

    def after(self, state: int, byte: int) -> int | None:
        return self._dfa.step(state, byte)

    def _find_rests(self, state: int) -> frozenset[bytes] | None:
        if len(self._endless) == 1 or self._endless[state]:
            return None
        rests = {b""} if self._dfa.accepts(state) else set[bytes]()
        for lo, hi, to in self._dfa.moves(state):
            inside = self.rests[to]
            if inside is None or len(rests) + len(inside) * (hi + 1 - lo) > MAX_RESTS:
                return None
            rests |= {bytes([byte]) + rest for byte in range(lo, hi + 1) for rest in inside}
        return frozenset(rests)


def _product(dfas: list[DFA]) -> tuple[Ints, Bools, list[tuple[bool, ...]]]:
    """Return the table of the first automaton, whether its states accept, and which of the others accept there."""
    start = tuple(dfa.start for dfa in dfas)
    states, rows = Numbering[tuple[int, ...]]([(), start]), [np.zeros(256, np.int32)]
    for key in itertools.islice(states.keys_in_order, 1, None):         # grows
        table = np.stack([dfa.row(state) for dfa, state in zip(dfas, key, strict=True)])
        columns, where = np.unique(table, axis=1, return_inverse=True)
        into = [states[tuple(column)] if column[0] else 0 for column in columns.T.tolist()]
        rows.append(np.array(into, np.int32)[where.ravel()] if key[0] else rows[0])
        if len(states) > MAX_STATES:
            raise TooLarge("the patterns of an object's names", f"more than {MAX_STATES:,} states")
    keys = states.keys_in_order[1:]
    accepting = [False, *(dfas[0].accepts(key[0]) for key in keys)]
    sets = [(), *(tuple(dfa.accepts(at) for dfa, at in zip(dfas[1:], key[1:], strict=True)) for key in keys)]
    return np.stack(rows), np.array(accepting), sets
