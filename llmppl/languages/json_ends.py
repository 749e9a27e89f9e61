"""How far an end is where JSON nests: lower bounds, in tokens.

The one idea: what a part of any JSON takes is looked at for itself. A token that enters such a part leads to a *gate*,
the state behind the part; a token that leaves it may have read from there on whatever some token has behind a bracket
that closes. To leave a part takes tokens too, of which the last may be any that has its bracket in it, and may close as
many parts as any token closes. No end is nearer than that; where an end needs no such part, it is just as far.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llmppl.exclusive import Turn, in_turn
from llmppl.masks.constraint import Bools, Ints, State
from llmppl.masks.trie import Trie
from llmppl.masks.walks import TableGraph, walk

__all__ = ["MARKS", "NestedDistances"]

MARKS = 0xFE, 0xFF                                  # bytes of no text: the inside of an object and of an array
OPENING, CLOSING = b"{[", b"}]"
BATCH = 32                                          # states whose tokens are walked at once

Floats = npt.NDArray[np.float64]


class NestedDistances:
    """Of the states of a recognizer with a `control` and `stacks` of its states (`llmppl.languages.json_texts`)."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._found: _Found | None = None

    def of(self, index: Any, state: State) -> float:
        return float(self.after(index, state, np.array([state]))[0])

    @in_turn
    def after(self, index: Any, state: State, ends: Ints) -> Floats:
        if self._found is None:
            self._found = _find(index.recognizer.control, index.trie)
        targets, where = np.unique(ends, return_inverse=True)
        stacks = map(index.recognizer.stacks, targets.tolist())
        return np.array([min(map(self._found.of, some)) for some in stacks], float)[where]


class _Found(NamedTuple):
    """By state of the control: tokens to the end, those from a gate to it, and those that leave a part of any JSON."""

    plain: Floats
    gates: tuple[Floats, Floats]                    # behind an object, and behind an array
    out: Floats
    in_array: Bools                                 # whether it is inside of any array, and not of an object
    most: int                                       # parts that a token closes

    def of(self, stack: tuple[int, ...]) -> float:
        if len(stack) == 1:
            return float(self.plain[stack[0]])
        others = max(0, -((self.most + 1 - len(stack)) // self.most))
        return float(self.out[stack[0]] + others + self.gates[int(self.in_array[stack[-2]])][stack[-1]])


def _find(control: Any, trie: Trie) -> _Found:
    tokens = {token for token in trie.tokens if token}
    leaving = [_behind(tokens, bracket) for bracket in CLOSING]
    plain, *gates = _distances(control, tokens, leaving, _Reached(control, [control.start]))
    inside = [_Reached(control, [to] if (to := int(control.table[control.start, mark])) else []) for mark in MARKS]
    last = [each | _up_to(each, CLOSING[0]) | _up_to(each, CLOSING[1]) for each in leaving]
    closing = [tokens | _up_to(tokens, bracket) for bracket in CLOSING]
    outs = [_distances(control, closing[i], last, inside[i])[0] for i in range(2)]
    in_array = np.zeros(len(control.table), bool)
    in_array[inside[1].states] = True
    most = max(sum(map(token.count, (b"}", b"]"))) for token in (*tokens, b"}"))
    return _Found(plain, (gates[0], gates[1]), np.where(in_array, outs[1], outs[0]), in_array, most)


def _behind(tokens: set[bytes], bracket: int) -> set[bytes]:
    return {token[i + 1 :] for token in tokens for i, byte in enumerate(token) if byte == bracket}


def _up_to(tokens: set[bytes], bracket: int) -> set[bytes]:
    return {token[: i + 1] for token in tokens for i, byte in enumerate(token) if byte == bracket}


class _Reached:
    """States that are reached from some, marks read as bytes, and the gates of objects and of arrays among them."""

    def __init__(self, control: Any, starts: list[int]) -> None:
        table = control.explore().table.copy()
        table[control.start, MARKS[0] :] = 0        # the insides are looked at for themselves
        seen, level = np.zeros(len(table), bool), np.array(starts, np.int64)
        while level.size:
            seen[level] = True
            level = np.unique(table[level])
            level = level[(level > 0) & ~seen[level]]
        self.states = np.flatnonzero(seen)
        self.gates = [np.setdiff1d(table[seen, mark], [0]) for mark in MARKS]


def _distances(control: Any, tokens: set[bytes], leaving: list[set[bytes]], among: _Reached) -> list[Floats]:
    """The least tokens to where the control accepts, from each of some states, and from each if it is a gate."""
    graph, S = TableGraph(control), len(control.table)
    steps = [(1, *_edges(graph, tokens, among.states, (0, 0)))]         # by length, from and to
    for kind, gates in enumerate(among.gates, 1):   # which are numbered behind the states
        for more in (0, 1):                         # tokens, to leave what is entered
            steps.append((1 + more, *_edges(graph, _marked(tokens, kind, more), among.states, (0, kind * S))))
        steps.append((0, gates + kind * S, gates))
        steps.append((0, *_edges(graph, leaving[kind - 1], gates, (kind * S, 0))))
        for other, more in itertools.product((1, 2), (0, 1)):
            again = _marked(leaving[kind - 1], other, more)
            steps.append((more, *_edges(graph, again, gates, (kind * S, other * S))))
    length = np.concatenate([np.full(source.size, each) for each, source, _ in steps])
    source, target = (np.concatenate([step[i] for step in steps]) for i in (1, 2))
    order = np.argsort(source, kind="stable")
    source, target, length = source[order], target[order], length[order]
    begin = np.flatnonzero(np.diff(source, prepend=-1))
    distance = np.full(3 * S, np.inf)
    distance[:S][control.accepting] = 0
    while begin.size:
        nearer = np.minimum(distance[source[begin]], np.minimum.reduceat(length + distance[target], begin))
        if np.array_equal(nearer, distance[source[begin]]):
            break
        distance[source[begin]] = nearer
    return np.split(distance, 3)


def _marked(tokens: set[bytes], kind: int, more: int) -> set[bytes]:
    """What of the tokens leads into an object (1) or an array (2), and its mark; of those that may leave it, or not."""
    opening, closing, mark = OPENING[kind - 1], CLOSING[kind - 1 : kind], bytes([MARKS[kind - 1]])
    return {
        token[: i + 1] + mark
        for token in tokens
        for i, byte in enumerate(token)
        if byte == opening and (closing not in token[i + 1 :]) == more
    }


def _edges(graph: TableGraph, tokens: set[bytes], starts: Ints, first: tuple[int, int]) -> tuple[Ints, Ints]:
    """Where tokens lead from some states: pairs, each once, both numbered from `first` on."""
    S, pairs = len(graph.table), [np.zeros(0, np.int64)]
    trie = Trie(sorted(tokens - {b""}))
    for begin in range(0, starts.size if len(trie) else 0, BATCH):
        some = starts[begin : begin + BATCH]
        found = walk(graph, trie, some)
        pairs.append(np.unique(some.repeat(np.diff(found.begin)).astype(np.int64) * S + found.states))
    joined = np.concatenate(pairs)
    return joined // S + first[0], joined % S + first[1]
