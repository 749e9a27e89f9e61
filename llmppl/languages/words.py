"""The automaton of a list of strings: a trie, with equal subtrees as one where there are many."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from llmppl.languages.limits import MAX_STATES, MAX_TRIE, Budget, TooLarge
from llmppl.languages.operations import Arrays

__all__ = ["automaton_of", "trie_of"]

_THESE, _FEWER = "the language of these strings", "fewer or shorter strings would work"


def automaton_of(words: Iterable[str]) -> Arrays:
    """The table of exactly these strings, in which every state leads to the end."""
    steps: dict[int, int] = {}                      # state * 256 + byte -> state
    final, size = set(), 2
    for word in words:
        state = 1
        for byte in word.encode():
            key = state << 8 | byte
            state = steps.get(key, 0)
            if not state:
                state = steps[key] = size
                size += 1
        final.add(state)
        if size > MAX_TRIE:
            raise TooLarge(_THESE, f"more than {MAX_TRIE:,} prefixes", _FEWER)
    if not final:
        return np.zeros((1, 256), np.int32), np.zeros(1, bool), 0
    if size > MAX_STATES:
        steps, final, size = _folded(steps, final, size)
    table, accepting = np.zeros((size, 256), np.int32), np.zeros(size, bool)
    table.ravel()[list(steps)] = list(steps.values())
    accepting[list(final)] = True
    return table, accepting, 1


def trie_of(words: Iterable[bytes]) -> tuple[list[dict[int, int]], list[int]]:
    """The nodes of a trie, byte -> node, 0 the root; and the node at which each word ends."""
    rows: list[dict[int, int]] = [{}]
    ends = []
    for word in words:
        node = 0
        for byte in word:
            row = rows[node]
            node = row.get(byte, 0)
            if not node:
                node = row[byte] = len(rows)
                rows.append({})
        ends.append(node)
    return rows, ends


def _folded(steps: dict[int, int], final: set[int], size: int) -> tuple[dict[int, int], set[int], int]:
    """A trie with equal subtrees as one; its states have lower numbers than those after them, and 1 is the start."""
    rows: list[list[int]] = [[] for _ in range(size)]
    for key, target in steps.items():
        rows[key >> 8] += key & 0xFF, target
    number, distinct = [0] * size, dict[tuple[Any, ...], int]()
    for state in range(size - 1, 0, -1):
        row = rows[state]
        subtree = (state in final, *row[::2], *(number[target] for target in row[1::2]))
        number[state] = distinct.setdefault(subtree, len(distinct) + 1)
    Budget(_THESE, _FEWER).spend(states=len(distinct))
    number = [len(distinct) + 1 - n if n else 0 for n in number]        # the start is 1 again
    merged = {number[key >> 8] << 8 | key & 0xFF: number[target] for key, target in steps.items()}
    return merged, {number[state] for state in final}, len(distinct) + 1
