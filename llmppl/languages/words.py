"""The automaton of a list of strings: a trie, with equal subtrees as one where there are many."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from llmppl.growing import Numbering
from llmppl.languages.limits import MAX_STATES, MAX_TRIE, Budget, TooLarge
from llmppl.languages.operations import Arrays

__all__ = ["automaton_of", "trie_of"]

_THESE, _FEWER = "the language of these strings", "fewer or shorter strings would work"


def automaton_of(words: Iterable[str]) -> Arrays:
    """The table of exactly these strings, in which every state leads to the end."""
    steps, ends = _trie(word.encode() for word in words)
    final, size = set(ends), len(steps) + 2
    if not final:
        return np.zeros((1, 256), np.int32), np.zeros(1, bool), 0
    if size > MAX_STATES:
        steps, final, size = _folded(steps, final, size)
    table, accepting = np.zeros((size, 256), np.int32), np.zeros(size, bool)
    table.ravel()[list(steps)] = list(steps.values())
    accepting[list(final)] = True
    return table, accepting, 1


def trie_of(words: Iterable[bytes]) -> tuple[list[dict[int, int]], list[int]]:
    """The rows of a trie, byte -> state, 0 the dead one and 1 the root; and the state to which each word leads."""
    steps, ends = _trie(words)
    rows: list[dict[int, int]] = [{} for _ in range(len(steps) + 2)]
    for key, state in steps.items():
        rows[key >> 8][key & 0xFF] = state
    return rows, ends


def _trie(words: Iterable[bytes]) -> tuple[dict[int, int], list[int]]:
    """(state << 8 | byte) -> state, 1 the root; and the state to which each word leads."""
    steps: dict[int, int] = {}
    ends = []
    for word in words:
        state = 1
        for byte in word:
            key = state << 8 | byte
            state = steps.get(key, 0)
            if not state:
                state = steps[key] = len(steps) + 2
        ends.append(state)
        if len(steps) + 2 > MAX_TRIE:
            raise TooLarge(_THESE, f"more than {MAX_TRIE:,} prefixes", _FEWER)
    return steps, ends


def _folded(steps: dict[int, int], final: set[int], size: int) -> tuple[dict[int, int], set[int], int]:
    """A trie with equal subtrees as one; its states have lower numbers than those after them, and 1 is the start."""
    rows: list[list[int]] = [[] for _ in range(size)]
    for key, target in steps.items():
        rows[key >> 8] += key & 0xFF, target
    number, distinct = [0] * size, Numbering[tuple[Any, ...]]([()])     # from 1 on
    for state in range(size - 1, 0, -1):
        row = rows[state]
        number[state] = distinct[state in final, *row[::2], *(number[target] for target in row[1::2])]
    count = len(distinct)
    Budget(_THESE, _FEWER).spend(states=count - 1)
    number = [count - n for n in number]            # the start is 1 again
    merged = {number[key >> 8] << 8 | key & 0xFF: number[target] for key, target in steps.items()}
    return merged, {number[state] for state in final}, count
