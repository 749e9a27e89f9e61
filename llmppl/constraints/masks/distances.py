"""States that tokens reach: walked in batches, computed ahead as arrays, and their distances to an end.

A *distance* is the least number of tokens from a state to one that accepts, eos not counted; inf if there is no path.
For a tabled recognizer, the distance in bytes bounds the distance in tokens and is mostly sufficient. Otherwise the
bounds narrow as states are read. States of other recognizers are searched one at a time.

Both classes of distances have two methods. `of` returns the distance of a state. `within` returns which successors of a
state, given by number (`ends`), have a distance of at most a finite number `n`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llmppl.constraints.constraint import Bools, Ints, State
from llmppl.constraints.masks.mask_store import PackedMask
from llmppl.constraints.vocabulary.trie import Trie, ranges
from llmppl.constraints.vocabulary.trie_walk import CHUNK, Graph, TableGraph, Walk, walk
from llmppl.support.locks import Lock, locked
from llmppl.support.shared import Shared


def walks(graph: Graph, trie: Trie, queue: list[int]) -> Iterator[tuple[Ints, Walk, Ints]]:
    """Walk from the states of `queue`, which may grow meanwhile, and yield (states, walk, changes) for each batch.

    `changes` are the indices of entries of the walk whose state or start differs from the entry before: neighbours
    mostly agree.
    """
    done = 0
    batch = 1
    while done < len(queue):
        numbers = np.array(queue[done : done + batch])
        found = walk(graph, trie, numbers)
        size = found.states.size
        starts = np.ones(size + 1, bool)
        np.not_equal(found.states[1:], found.states[:-1], out=starts[1:size])
        starts[found.begin] = True
        yield numbers, found, np.flatnonzero(starts[:size])
        done += numbers.size
        batch = max(1, batch * 2 if size < CHUNK // 8 else batch // 2)


@dataclass(frozen=True, eq=False, repr=False)
class PrecomputedIndex(Shared):
    """Result of `TokenIndex.build_all`: all states that tokens reach from the start, as rows, with masks and steps.

    Attributes
    ----------
    states : list of S states, the start first
    accepting : (S,) bool ndarray
    masks : list of S PackedMask
    begin : (S + 1,) int64 ndarray
    next : (begin[S],) integer ndarray
        The rows that tokens lead to; for row i from begin[i] on, in the order of the bytes of its tokens.

    Examples
    --------
    >>> found = Regex("ab*").index(lm.vocab).build_all()
    >>> found
    PrecomputedIndex(2 states, 3 steps)
    >>> [str(lm.vocab[token]) for token in found.row(0)[0]]
    ['a', 'ab']
    """

    index: Any  # the TokenIndex
    states: list[State]
    accepting: Bools
    masks: list[PackedMask]
    begin: npt.NDArray[np.int64]
    next: Ints

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return f"PrecomputedIndex({len(self)} states, {self.next.size} steps)"

    def row(self, i: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the steps from states[i] without eos: (n,) ascending token ids, and (n,) rows that they lead to."""
        order = self.index.trie.order
        tokens = order[self.index.mask(self.states[i])[order]].astype(np.int64)
        move = np.argsort(tokens)
        return tokens[move], self.next[self.begin[i] : self.begin[i + 1]][move].astype(np.int64)


def build(index: Any, max_states: int) -> PrecomputedIndex:
    """Compute all rows of a TokenIndex (Algorithm 4); raise a ValueError if there are more than `max_states`."""
    graph = index.graph
    recognizer = index.recognizer
    if isinstance(graph, TableGraph):
        recognizer.explore()
    small = np.uint16 if isinstance(graph, TableGraph) and len(graph.table) <= 1 << 16 else np.int32
    states = []
    accepting = []
    masks = []
    nexts = []
    sizes = [np.zeros(1, np.int64)]
    queue = [graph.number(index.start)]
    row_of = np.zeros(0, np.int32)
    for numbers, found, changes in walks(graph, index.trie, queue):
        begin, ids, ends = found
        last: dict[
            tuple[int, bool], tuple[Ints, PackedMask]
        ] = {}  # by size: neighbours are often equal
        for number, a, b in zip(numbers.tolist(), begin.tolist(), begin[1:].tolist(), strict=False):
            states.append(graph.state(number))
            accepting.append(bool(recognizer.accepts(states[-1])))
            key = (b - a, accepting[-1])
            some = ids[a:b]
            seen = last.get(key)
            if seen is None or not np.array_equal(seen[0], some):
                seen = last[key] = some, index.store.of_ids(some, accepting[-1])
            masks.append(seen[1])
        row_of = np.append(row_of, np.full(len(graph.table) - row_of.size, -1, np.int32))
        row_of[queue[0]] = 0
        targets = found.states[changes]
        new, first = np.unique(targets[row_of[targets] < 0], return_index=True)
        new = new[np.argsort(first)]  # in the order in which they are found
        row_of[new] = np.arange(len(queue), len(queue) + new.size)
        queue += new.tolist()
        if len(queue) > max_states:
            raise ValueError(
                f"more than {max_states} states are reached: the language may have infinitely many"
            )
        nexts.append(row_of[ends].astype(small))
        sizes.append(np.diff(begin))
    return PrecomputedIndex(
        index,
        states,
        np.array(accepting),
        masks,
        np.cumsum(np.concatenate(sizes)),
        np.concatenate(nexts),
    )


MAX_MEMO = 1 << 16  # distances that are kept for states without a table
MAX_WORK = 12_000_000  # of the searches of one call, at 100 to 250 ns each
MAX_WALKED = 50_000_000  # tokens that the searches in one table read
FEW = 30  # states that Python treats faster than numpy

Floats = npt.NDArray[np.float64]


class _Bounds(NamedTuple):
    """Bounds of the distances of all states, and the edges of the states that were read."""

    is_read: Bools  # (S,)
    edges: Ints  # (E,): 2^32 source + target, ascending
    low: Floats  # (S,)
    high: Floats  # (S,)


class TableDistances:
    """Distances between bounds, which narrow as states are read: from those in question on, until the bounds decide."""

    def __init__(self, turn: Lock) -> None:
        self._lock = turn
        self._bounds: _Bounds | None = None
        self._num_walked = 0

    def of(self, index: Any, state: State, most: float = math.inf) -> float:
        low, high = self._decided(
            index, np.array([state]), lambda low, high: (low == high) | (low > most)
        )
        return high.item() if low == high else math.inf

    def within(self, index: Any, state: State, ends: Ints, n: float) -> Bools:
        return self._decided(index, ends, lambda low, high: (high <= n) | (low > n))[1] <= n

    @locked
    def _decided(
        self, index: Any, states: Ints, decide: Callable[[Floats, Floats], Bools]
    ) -> tuple[Floats, Floats]:
        """Return the lower and upper bounds of some states, so narrow that `decide` is True for each."""
        bounds = self._bounds = self._bounds or _bounds(index)
        while (undecided := states[~decide(bounds.low[states], bounds.high[states])]).size:
            bounds = self._bounds = self._narrowed(index, bounds, undecided)
        return bounds.low[states], bounds.high[states]

    def _narrowed(self, index: Any, bounds: _Bounds, states: Ints) -> _Bounds:
        """Read the unread states that are the fewest tokens after `states`, and at least half as many as were read."""
        is_read = bounds.is_read.copy()
        seen = np.zeros_like(bounds.is_read)
        level = np.unique(states).astype(np.int64)
        while is_read[level].all():
            seen[level] = True
            begin, end = (np.searchsorted(bounds.edges, each << 32) for each in (level, level + 1))
            after = np.unique(bounds.edges[ranges(begin, end - begin)] & _TARGET)
            level = after[~seen[after]]
        queue = level[~is_read[level]].tolist()
        least = max(len(queue), int(is_read.sum()) // 2)
        edges = [bounds.edges]
        num_read = 0
        is_queued = is_read.copy()
        is_queued[queue] = True
        for numbers, found, changes in walks(index.graph, index.trie, queue):
            self._num_walked += found.states.size
            if self._num_walked > MAX_WALKED:
                raise ValueError(
                    f"{index.name}: no end found in {np.count_nonzero(is_read)} states; shorter counted repeats would "
                    "work, or complete=False, which lets max_tokens cut such a text"
                )
            source = numbers[np.searchsorted(found.begin, changes, "right") - 1].astype(np.int64)
            edges.append(np.unique((source << 32) + found.states[changes]))
            is_read[numbers] = True
            new = np.unique(edges[-1] & _TARGET)
            new = new[~is_queued[new]]
            is_queued[new] = True
            queue += new.tolist()
            num_read += numbers.size
            if num_read >= least:
                break
        joined = np.sort(np.concatenate(edges))
        begins = np.where(is_read & ~index.recognizer.accepting, np.inf, bounds.low)
        return _Bounds(
            is_read, joined, _least_steps(joined, begins), _least_steps(joined, bounds.high)
        )


_TARGET = (1 << 32) - 1


def _bounds(index: Any) -> _Bounds:
    """Return bounds from the bytes to an end, without reading a state.

    If every byte of the language is a token by itself, the number of bytes to an end is an upper bound. Divided by the
    length of the longest token, it is a lower bound. Otherwise the bounds are 0 and inf.
    """
    recognizer = index.recognizer
    tokens = index.trie.tokens
    recognizer.explore()
    table = recognizer.table
    S = len(recognizer.table)
    num_bytes = bytes_to_accept(table, recognizer.accepting)
    low = np.ceil(num_bytes / max(1, max(map(len, tokens))))
    alone = {token[0] for token in tokens if len(token) == 1}
    if not alone.issuperset(np.flatnonzero(table.any(0)).tolist()):
        low = np.zeros(S)
        num_bytes = np.where(recognizer.accepting, 0, np.inf)
    return _Bounds(np.zeros(S, bool), np.zeros(0, np.int64), low, num_bytes)


def bytes_to_accept(table: Ints, accepting: Bools) -> Floats:
    """Return the least number of bytes from each state to one that accepts: (S,), inf if there is no path."""
    runs = np.ones(table.shape, bool)  # neighbouring bytes mostly lead to the same state
    np.not_equal(table[:, 1:], table[:, :-1], out=runs[:, 1:])
    source, byte = np.nonzero(runs & (table > 0))
    return _least_steps(
        (source << 32) + table[source, byte], np.where(accepting[: len(table)], 0, np.inf)
    )


def _least_steps(edges: Ints, distance: Floats) -> Floats:
    """Return the least distance of each state: its own in `distance`, or 1 more than that of a state after it."""
    source = edges >> 32
    target = edges & _TARGET
    source = source[np.argsort(target, kind="stable")]
    degrees = np.bincount(target, minlength=distance.size)
    begin = np.append(0, np.cumsum(degrees))
    order = np.argsort(distance, kind="stable")[: np.count_nonzero(distance < np.inf)]
    given = order.tolist()
    depths = distance[order].tolist()
    num_given = 0
    distance = distance.copy()
    sources: Any = memoryview(source)  # type: ignore[arg-type]
    begins: Any = memoryview(begin)  # type: ignore[arg-type]
    distances: Any = memoryview(distance)  # type: ignore[arg-type]
    near: list[int] = []
    depth = 0.0
    while num_given < len(given) or near:
        if not near:
            depth = depths[num_given]
        level = near
        while num_given < len(given) and depths[num_given] == depth:
            if distances[given[num_given]] == depth:
                level.append(given[num_given])
            num_given += 1
        depth = depth + 1
        if len(level) < FEW:
            near = []
            for state in level:
                for before in sources[begins[state] : begins[state + 1]]:
                    if distances[before] > depth:
                        distances[before] = depth
                        near.append(before)
        else:
            befores = source[ranges(begin[level], degrees[level])]
            nearer = np.unique(befores[distance[befores] > depth])
            distance[nearer] = depth
            near = nearer.tolist()
    return distance


def bounded(memo: dict[Any, Any]) -> dict[Any, Any]:
    """Return the memo, without its entries if they are MAX_MEMO."""
    if len(memo) >= MAX_MEMO:
        memo.clear()
    return memo


class SearchDistances:
    """Distances by breadth-first search from one state; a ValueError after MAX_WORK in one call of `of` or `within`."""

    def cost(self, state: State) -> int:
        """Return the work of a new state on the way to a token; a token takes 1, and their state 1,000."""
        return 1_200

    def __init__(self, turn: Lock) -> None:
        self._lock = turn
        self._memo: dict[
            State, tuple[float, bool]
        ] = {}  # a distance, and whether it is no lower bound only
        self._next: dict[
            State, tuple[State, ...]
        ] = {}  # states after one token, shared by all searches
        self._failed: dict[State, str] = {}  # errors of searches
        self.work = 0  # of this call

    def within(self, index: Any, state: State, ends: Ints, n: float) -> Bools:
        targets, where = np.unique(ends, return_inverse=True)
        states = [
            index.graph.state(target) for target in targets.tolist()
        ]  # before a search renews the graph
        self.work = 0
        return np.array([self.also(index, target, n) <= n for target in states], bool)[where]

    def of(self, index: Any, state: State, most: float = math.inf) -> float:
        """Return the distance of a state; inf if it is more than `most`, as far as a search to there tells."""
        self.work = 0
        return self.also(index, state, most)

    @locked
    def also(self, index: Any, state: State, most: float) -> float:
        """Return `of(index, state, most)` as a part of the same call."""
        found, exact = self._memo.get(state, (0.0, False))
        if not exact and found <= most:
            if state in self._failed:
                raise ValueError(self._failed[state])
            found, exact = self._search(index, state, most)
            bounded(self._failed)
            bounded(self._memo)[state] = found, exact
        return found if exact else math.inf

    def after(self, index: Any, state: State) -> tuple[State, ...]:
        """Return the states after one token."""
        if state not in self._next:
            known = len(index.graph.states)
            ends = index.walk(state)[1]
            bounded(self._next)[state] = tuple(
                index.graph.state(end) for end in np.unique(ends).tolist()
            )
            self.work += ends.size + 1000 + sum(map(self.cost, index.graph.states[known:]))
        return self._next[state]

    def _search(self, index: Any, start: State, most: float) -> tuple[float, bool]:
        level = [start]
        seen = {start}
        depth = 0
        while level and not any(map(index.recognizer.accepts, level)):
            if depth >= most:
                return depth + 1, False
            below = {}
            for each in level:
                below.update(dict.fromkeys(self.after(index, each)))
                if self.work + len(seen) + len(below) > MAX_WORK:
                    self._memo[start] = depth + 1, False
                    self._failed[start] = (
                        f"{index.name}: no end found within {depth} tokens and {len(seen)} states; complete=False lets "
                        "max_tokens cut such a text"
                    )
                    raise ValueError(self._failed[start])
            level = [each for each in below if each not in seen]
            seen.update(level)
            depth += 1
        return (depth, True) if level else (math.inf, True)
