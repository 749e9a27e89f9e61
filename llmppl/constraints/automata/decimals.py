"""Minimal automata of the decimal numerals between two bounds.

A numeral has an optional sign -, no leading zeros, and perhaps a point with digits that may end with zeros. The number
of digits is bounded, so the automaton has no cycles: it is built from its end, and equal nodes are one state.

A text is *tight* if it begins the numeral of a bound. After all other texts only the number of digits matters.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.operations import Edge, joined
from llmppl.support.graphs import Numbering

__all__ = ["decimals_within", "table_of"]

Node = tuple[tuple[Edge, ...], bool]                # edges, accepting
MINUS, POINT, ZERO, NINE = b"-.09"


def decimals_within(least: int, most: int, digits: int, minus_zero: bool = False) -> DFA:
    """Return the numerals of k / 10**digits for least <= k <= most, with at most `digits` digits after the point.

    `minus_zero` also admits zero with a sign, if it lies between the bounds. The automaton is empty if no number does.
    """
    nodes: Numbering[Node] = Numbering([((), False)])                   # 0 is dead
    free = [nodes[(), True]]                        # free[n]: at most n more digits after the point
    for _ in range(digits):
        free.append(nodes[((ZERO, NINE, free[-1]),), True])
    edges: list[Edge] = []
    if least < 0 or (minus_zero and least == 0):
        negative = _Magnitudes(nodes, free, max(-most, 1 - minus_zero), -least)
        edges += [(MINUS, MINUS, nodes[tuple(negative.first()), False])]
    edges += _Magnitudes(nodes, free, max(least, 0), most).first()
    return table_of(nodes, nodes[tuple(edge for edge in edges if edge[2]), False])


def table_of(nodes: Numbering[Node], start: int) -> DFA:
    """Return the automaton of numbered nodes; node 0 is dead."""
    table = np.zeros((len(nodes), 256), np.int32)
    for state, (edges, _) in enumerate(nodes.keys_in_order):
        for lo, hi, target in edges:
            table[state, lo : hi + 1] = target
    return DFA.from_table(table, np.array([accepting for _, accepting in nodes.keys_in_order]), start)


class _Magnitudes:
    """Nodes of the numerals without a sign from `low` to `high`, which are multiplied by 10**digits."""

    def __init__(self, nodes: Numbering[Node], free: list[int], low: int, high: int) -> None:
        self.nodes, self.free, self.low, self.high = nodes, free, low, high
        self.digits = len(free) - 1
        self.unit = 10**self.digits
        self.point = nodes[((ZERO, NINE, free[-2]),), False] if self.digits else 0
        self.whole_low, self.whole_high = str(low // self.unit), str(max(high, 0) // self.unit)
        self.tight: dict[str, int] = {}             # text -> node
        self.free_wholes: dict[tuple[int, int], int] = {}

    def first(self) -> list[Edge]:
        """Return the edges of the first digit; a target may be 0."""
        if self.low > self.high:
            return []
        texts = {text[:end] for text in self._uneven_bounds() for end in range(1, len(text) + 1)}
        for text in sorted(texts, key=len, reverse=True):
            edges, accepting = self._after_point(text) if "." in text else self._before_point(text)
            self.tight[text] = self.nodes[tuple(edges), accepting]
        return joined(self._digit("", digit) for digit in range(10))

    def _uneven_bounds(self) -> Iterator[str]:
        """Yield the bounds that some texts of their length pass: not 0, 1, 10, ... below or 9, 99, ... above."""
        for whole, bound, even in (
            (self.whole_low, self.low, self.low in (0, 10 ** (len(self.whole_low) - 1) * self.unit)),
            (self.whole_high, self.high, self.high + 1 == 10 ** len(self.whole_high) * self.unit),
        ):
            if not even:
                yield f"{whole}.{bound % self.unit:0{self.digits}}" if self.digits else whole

    def _before_point(self, text: str) -> Node:
        value = int(text) * self.unit
        inside = self.low <= value <= self.high
        edges = []
        if self.digits and (point := self.tight.get(text + ".") or self.point * inside):
            edges.append((POINT, POINT, point))
        if text != "0":
            edges += [edge for edge in joined(self._digit(text, digit) for digit in range(10)) if edge[2]]
        return tuple(edges), inside

    def _after_point(self, text: str) -> Node:
        whole, _, fraction = text.partition(".")
        left = self.digits - len(fraction)
        value, step = int(whole + fraction) * 10**left, 10**left // 10
        edges: list[Edge] = []
        for digit in range(10 * bool(left)):
            inside = self.low <= value + digit * step <= self.high
            target = self.tight.get(f"{text}{digit}") or self.free[left - 1] * inside
            edges.append((ZERO + digit, ZERO + digit, target))
        return tuple(edge for edge in joined(edges) if edge[2]), bool(fraction) and self.low <= value <= self.high

    def _digit(self, before: str, digit: int) -> Edge:
        """Return the edge of one more digit before the point."""
        text = f"{before}{digit}"
        target = self.tight.get(text)
        if target is None and text == "0":
            target = self.nodes[self._before_point(text)]
        elif target is None:
            size = len(text)
            least = len(self.whole_low) - size + (text < self.whole_low[:size])
            target = self._free_whole(max(least, 0), len(self.whole_high) - size - (text > self.whole_high[:size]))
        return ZERO + digit, ZERO + digit, target

    def _free_whole(self, least: int, most: int) -> int:
        """Return the node of `least` to `most` more digits before the point."""
        found = 0
        for left in range(most + 1 if least <= most else 0):
            key = max(least - most + left, 0), left
            if key not in self.free_wholes:
                edges = ((POINT, POINT, self.point),) * bool(self.digits and not key[0])
                self.free_wholes[key] = self.nodes[(*edges, *((ZERO, NINE, found),) * bool(left)), not key[0]]
            found = self.free_wholes[key]
        return found
