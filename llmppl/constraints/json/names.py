"""Names of the properties that an object does not list: their language, and the shape of each.

Patterns sort names into *classes*: a class is the set of patterns that are found in a name, and has one shape. A name
has one spelling, that of `json.dumps` without ASCII escapes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import reduce
from operator import or_

import numpy as np

from llmppl.constraints.automata.budget import TooLarge
from llmppl.constraints.automata.dfa import DFA, anything
from llmppl.constraints.automata.operations import Edge
from llmppl.constraints.automata.regex import Regex
from llmppl.constraints.constraint import Bools, Ints
from llmppl.constraints.json.ecma import found
from llmppl.constraints.json.shapes import ANY, Choice, Constants, Lazy, Object, Shape, String, both, intersect
from llmppl.constraints.json.strings import SHORT, content

__all__ = ["Names", "spelled"]

MAX_STATES = 5_000                                  # of all patterns of an object together


def spelled(name: str) -> bytes:
    """Return the bytes of a name between its quotes."""
    return json.dumps(name, ensure_ascii=False)[1:-1].encode()


def language_of(shape: Shape) -> DFA:
    """Return the texts of the strings of a shape, with their bounds."""
    match shape:
        case Choice():
            return reduce(or_, map(language_of, shape.options), DFA.from_strings([]))
        case Constants():
            return DFA.from_strings([value for value in shape.values if isinstance(value, str)])
        case String():
            dfa, last = content(shape) or anything(), "" if shape.most == math.inf else int(shape.most)
            is_bounded = shape.least or shape.most < math.inf
            return dfa & Regex(f"(?s:.{{{shape.least},{last}}})") if is_bounded else dfa
    return anything() if shape is ANY else DFA.from_strings([])


class Names:
    """Names that an object does not list, as an automaton; it begins in `start`, which is 0 if there are none."""

    def __init__(self, shape: Object, is_live: Callable[[Lazy], bool]) -> None:
        self._classes: dict[int, Lazy] = {}         # by accepting state
        patterns = list(dict.fromkeys(pattern for others in shape.others for pattern, _ in others.patterns))
        if shape.names == String() and not patterns:
            self._dfa, self.num, part = anything(), math.inf, both(*(others.additional for others in shape.others))
            self.start = self._dfa.start if is_live(part) else 0
            self._classes = dict.fromkeys(np.flatnonzero(self._dfa.accepting).tolist(), part)
            return
        names = language_of(intersect(shape.names, String()))
        table, accepting, sets = _product([names, *map(found, patterns)])
        parts: dict[tuple[bool, ...], Lazy | None] = {}
        for state in np.flatnonzero(accepting).tolist():
            if sets[state] not in parts:
                matched = {pattern for pattern, is_in in zip(patterns, sets[state], strict=True) if is_in}
                of_class = (
                    both(*some) if (some := [each for name, each in others.patterns if name in matched])
                    else others.additional for others in shape.others
                )  # fmt: skip
                part = both(*of_class)
                parts[sets[state]] = part if is_live(part) else None
            accepting[state] = parts[sets[state]] is not None
        live = _live(table, accepting)
        table[~live[table]] = 0
        self._dfa = DFA.__new__(DFA)
        self._dfa._fix(table, accepting, 1 if live[1] else 0)
        self.start = self._dfa.start
        for state in np.flatnonzero(accepting).tolist():
            found_part = parts[sets[state]]
            assert found_part is not None
            self._classes[state] = found_part
        self._counts = _counts(table, accepting)
        self.num = self._counts[self.start] if self.start else 0

    def part(self, state: int) -> Lazy | None:
        """Return the shape of the names that end in a state; None if none does."""
        return self._classes.get(state)

    def parts(self) -> list[Lazy]:
        return list(self._classes.values())

    def moves(self, state: int) -> list[Edge]:
        """Return the edges of a state by the bytes of a name, unescaped."""
        return self._dfa.moves(state) if state else []

    def after(self, state: int, data: bytes) -> int:
        return self._dfa.after(state, data) if state else 0

    def holds(self, name: str) -> bool:
        return self._classes.get(self.after(self.start, name.encode())) is not None

    def num_after(self, state: int) -> float:
        """Return the number of names that continue a state."""
        return math.inf if self.num == math.inf else self._counts[state]


def _product(dfas: list[DFA]) -> tuple[Ints, Bools, list[tuple[bool, ...]]]:
    """Return the table of the first automaton, whether its states accept, and which of the others accept there."""
    start = tuple(dfa.start for dfa in dfas)
    numbers, keys, rows = {start: 1}, [start], [np.zeros(256, np.int32)]
    if not start[0]:
        return np.zeros((2, 256), np.int32), np.zeros(2, bool), [(), ()]
    for key in keys:                                # grows
        table = np.stack([dfa.row(state) for dfa, state in zip(dfas, key, strict=True)])
        found, where = np.unique(table, axis=1, return_inverse=True)
        into = []
        for target in map(tuple, found.T.tolist()):
            if target[0] and target not in numbers:
                keys.append(target)
                numbers[target] = len(keys)
            into.append(numbers[target] if target[0] else 0)
        rows.append(np.array(into, np.int32)[where.ravel()])
        if len(keys) > MAX_STATES:
            raise TooLarge("the patterns of an object's names", f"more than {MAX_STATES:,} states")
    accepting = [False, *(dfas[0].accepts(key[0]) for key in keys)]
    sets = [(), *(tuple(dfa.accepts(at) for dfa, at in zip(dfas[1:], key[1:], strict=True)) for key in keys)]
    return np.stack(rows), np.array(accepting), sets


def _live(table: Ints, accepting: Bools) -> Bools:
    """Return the states from which an accepting one can be reached."""
    live = accepting.copy()
    while (more := live | (live[table] & (table > 0)).any(1)).sum() > live.sum():
        live = more
    return live


def _counts(table: Ints, accepting: Bools) -> list[float]:
    """Return the number of texts from each state to an accepting one; inf if a cycle is on the way."""
    counts = accepting.astype(float)
    for _ in range(len(table) + 1):
        more = accepting + (counts[table] * (table > 0)).sum(1)
        if np.array_equal(more, counts):
            return counts.tolist()
        counts = more
    finite = np.full(len(table), math.inf)          # states that do not reach a cycle have their count already
    finite[counts == accepting + (counts[table] * (table > 0)).sum(1)] = 0
    return np.where(finite == 0, counts, math.inf).tolist()  # type: ignore[no-any-return]


def code_moves(digits: str) -> dict[int, int | None]:
    """Return the digits that may follow in the code of a control character without a short escape.

    They lead to the character after the fourth digit, and to None before.
    """
    codes = {f"{byte:04x}": byte for byte in range(32) if byte not in SHORT}
    return {
        ord(code[len(digits)]): byte if len(digits) == 3 else None
        for code, byte in codes.items() if code.startswith(digits)
    }  # fmt: skip
