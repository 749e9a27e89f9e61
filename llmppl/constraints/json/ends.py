"""Lower bounds, in tokens, on the distance to an end of nested JSON.

The distance inside an unconstrained value is computed separately. A token that enters such a value leads to a *gate*,
the state after the value. A token that leaves the value may continue from the gate with any bytes that some token has
after a closing bracket. Leaving a value takes tokens too; the last may be any token with the right bracket, and may
close as many values as any token closes. So no end is nearer than the bound, and the bound is exact for an end that
needs no such value.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llmppl.constraints.constraint import Bools, Ints, State
from llmppl.constraints.vocabulary.trie import Trie
from llmppl.constraints.vocabulary.trie_walk import TableGraph, walk
from llmppl.support.locks import Lock, cached_property, locked

__all__ = ["MARKS", "NestedDistances"]

MARKS = 0xFE, 0xFF                                  # no text has these bytes: the inside of an object, of an array
OPENING, CLOSING = b"{[", b"}]"
BATCH = 32                                          # states that are walked at once

Floats = npt.NDArray[np.float64]


class NestedDistances:
    """Distances of the states of `texts.OpenTexts`, from its `control`, its `inside` and its `stacks`."""

    def __init__(self, turn: Lock) -> None:
        self._lock = turn
        self._found: tuple[list[Floats], _Inside] | None = None

    def of(self, index: Any, state: State) -> float:
        return float(self.after(index, state, np.array([state]))[0])

    def within(self, index: Any, state: State, ends: Ints, n: float) -> Bools:
        fits: Bools = self.after(index, state, ends) <= n
        return fits

    @locked
    def after(self, index: Any, state: State, ends: Ints) -> Floats:
        texts, trie = index.recognizer, index.trie
        if self._found is None:
            found = _distances(texts.control, [texts.control.start], _pieces(trie), 0)
            self._found = found, _inside(texts.inside, trie)
        targets, where = np.unique(ends, return_inverse=True)
        least = [min(map(self._of, texts.stacks(target))) for target in targets.tolist()]
        return np.array(least, float)[where]

    def _of(self, stack: tuple[int, ...]) -> float:
        assert self._found is not None
        found, inside = self._found
        if len(stack) == 1:
            return float(found[0][stack[0]])
        others = max(0, -((inside.most + 1 - len(stack)) // inside.most))
        return float(inside.out[stack[0]] + others + found[1 + inside.in_array[stack[-2]]][stack[-1]])


class _Inside(NamedTuple):
    """For each state inside of any JSON: the tokens needed to leave it, and whether it is in an array."""

    out: Floats
    in_array: npt.NDArray[np.int64]                 # 0 or 1
    most: int                                       # values that one token may close


@lru_cache(8)
def _inside(inside: Any, trie: Trie) -> _Inside:
    pieces, table = _pieces(trie), inside.explore().table
    out, in_array = np.full(len(table), np.inf), np.zeros(len(table), np.int64)
    for kind in (1, 2):
        start = int(table[inside.start, MARKS[kind - 1]])
        found = _distances(inside, [start], pieces, kind)[0]
        known = found < np.inf
        out[known], in_array[known] = found[known], kind - 1
    most = max(sum(map(token.count, (b"}", b"]"))) for token in (*trie.tokens, b"}"))
    return _Inside(out, in_array, most)


class _Pieces:
    """Parts of tokens before, between and after brackets, as tries that are built on demand."""

    def __init__(self, trie: Trie) -> None:
        self.whole, self._tokens = trie, {token for token in trie.tokens if token}
        self._after_closing = [
            {t[i + 1 :] for t in self._tokens for i, byte in enumerate(t) if byte == close} for close in CLOSING
        ]

    @cached_property
    def closing(self) -> list[Trie]:
        """Prefixes of tokens that end with the bracket that closes an object, and an array."""
        return [_trie(_up_to(self._tokens, close)) for close in CLOSING]

    @cached_property
    def entering(self) -> list[list[Trie]]:
        """By kind, and by whether leaving needs another token: token prefixes that enter the kind, with its mark."""
        return [[_trie(_marked(self._tokens, kind, more)) for more in (0, 1)] for kind in (1, 2)]

    @cached_property
    def leaving(self) -> list[list[Trie]]:
        """By kind: token parts after its closing bracket, and the same up to the next such bracket."""
        return [[_trie(each), *(_trie(_up_to(each, close)) for close in CLOSING)] for each in self._after_closing]

    @cached_property
    def between_parts(self) -> list[list[list[Trie]]]:
        """Token parts that close one value and enter the next, by both kinds and by the need of another token."""
        return [[[_trie(_marked(each, to, more)) for more in (0, 1)] for to in (1, 2)] for each in self._after_closing]


@lru_cache(8)
def _pieces(trie: Trie) -> _Pieces:
    return _Pieces(trie)


def _trie(tokens: set[bytes]) -> Trie:
    return Trie(sorted(tokens - {b""}))


def _up_to(tokens: set[bytes], bracket: int) -> set[bytes]:
    return {token[: i + 1] for token in tokens for i, byte in enumerate(token) if byte == bracket}


def _marked(tokens: set[bytes], kind: int, more: int) -> set[bytes]:
    """Return the token prefixes that enter an object (1) or array (2), with its mark; `more`: of tokens that stay."""
    opening, closing, mark = OPENING[kind - 1], CLOSING[kind - 1 : kind], bytes([MARKS[kind - 1]])
    return {
        token[: i + 1] + mark
        for token in tokens
        for i, byte in enumerate(token)
        if byte == opening and (closing not in token[i + 1 :]) == more
    }


def _distances(machine: Any, starts: list[int], pieces: _Pieces, kind: int) -> list[Floats]:
    """Return the least tokens to an accepting state: from each state, and from each state as a gate of either kind.

    Inside of a `kind` (not 0), the last token may continue after the closing bracket.
    """
    table = machine.explore().table.copy()
    table[machine.start, MARKS[0] :] = 0            # the insides have distances of their own
    seen, level = np.zeros(len(table), bool), np.array(starts, np.int64)
    while level.size:
        seen[level] = True
        level = np.unique(table[level])
        level = level[(level > 0) & ~seen[level]]
    states, S, graph = np.flatnonzero(seen), len(table), TableGraph(machine)
    wholes = [pieces.whole, pieces.closing[kind - 1]] if kind else [pieces.whole]
    steps = [(1, *_edges(graph, trie, states, 0, 0)) for trie in wholes]
    for i, mark in enumerate(MARKS):                # gates are numbered after the states
        gates, first = np.setdiff1d(table[seen, mark], [0]), (i + 1) * S
        steps.append((0, gates + first, gates))
        steps += [(1 + more, *_edges(graph, pieces.entering[i][more], states, 0, first)) for more in (0, 1)]
        some = pieces.leaving[i][: 3 if kind else 1]
        steps += [(0, *_edges(graph, trie, gates, first, 0)) for trie in some]
        for j, more in itertools.product((0, 1), (0, 1)):
            steps.append((more, *_edges(graph, pieces.between_parts[i][j][more], gates, first, (j + 1) * S)))
    length = np.concatenate([np.full(source.size, each) for each, source, _ in steps])
    source, target = (np.concatenate([step[i] for step in steps]) for i in (1, 2))
    order = np.argsort(source, kind="stable")
    source, target, length = source[order], target[order], length[order]
    begin = np.flatnonzero(np.diff(source, prepend=-1))
    distance = np.full(3 * S, np.inf)
    distance[:S][machine.accepting] = 0
    while begin.size:
        nearer = np.minimum(distance[source[begin]], np.minimum.reduceat(length + distance[target], begin))
        if np.array_equal(nearer, distance[source[begin]]):
            break
        distance[source[begin]] = nearer
    return np.split(distance, 3)


def _edges(graph: TableGraph, trie: Trie, starts: Ints, before: int, after: int) -> tuple[Ints, Ints]:
    """Return the (source, target) pairs of tokens from some states, numbered from `before` and `after` on."""
    S, pairs = len(graph.table), [np.zeros(0, np.int64)]
    for begin in range(0, starts.size if len(trie) else 0, BATCH):
        some = starts[begin : begin + BATCH]
        found = walk(graph, trie, some)
        pairs.append(np.unique(some.repeat(np.diff(found.begin)).astype(np.int64) * S + found.states))
    joined = np.concatenate(pairs)
    return joined // S + before, joined % S + after
