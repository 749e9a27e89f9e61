"""Rules as automata: what a rule of many optional parts stands for, without writing its alternatives out.

A rule comes as lark's tree of alternatives and sequences. The automaton is the deterministic one over its symbols, so
that nothing has to be decided before lark's parser would decide it. A *row* says of a node whether a text may end
there, and where its symbols lead.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lark import Tree
from lark.exceptions import GrammarError

from llmppl.constraints.automata.budget import MAX_NFA_STATES
from llmppl.support.graphs import Numbering, postorder, reached

MAX_STATES = 20_000                                 # of the automaton of a rule
MAX_PAIRS = 500_000                                 # of its nodes, compared for alternatives that are equal
COUNTED = 10**12                                    # symbols, where counting stops

Row = tuple[bool, dict[Any, int]]
NFA = list[list[tuple[Any, int]]]                   # edges by node, free ones with the symbol None


def subtrees(tree: Any) -> list[Any]:
    """The parts of a tree, each once, those inside before those around them."""
    return postorder([tree], lambda part: [child for child in part.children if isinstance(child, Tree)])


def num_symbols(tree: Any, unfolded: bool = False) -> int:
    """How many symbols the alternatives of a tree have, written out; or the tree itself, if parts are not shared."""
    known: dict[int, tuple[int, int]] = {}          # part -> its alternatives, and the symbols in all of them
    for part in subtrees(tree):
        inner = [known.get(id(child), (1, 1)) for child in part.children]
        if unfolded or part.data == "expansions":
            known[id(part)] = sum(n for n, _ in inner), 1 + sum(size for _, size in inner)
            continue
        number, size = 1, 0
        for n, s in inner:
            number, size = min(number * n, COUNTED), min(size * n + s * number, COUNTED)
        known[id(part)] = number, size
    return sum(known[id(tree)])


def num_leaves(tree: Any) -> int:
    """How many symbols a tree has as it is written."""
    return sum(len(part.children) for part in subtrees(tree))


def automaton(name: str, tree: Any, empty: Any) -> list[Row]:
    """The smallest deterministic automaton of the symbols that a tree stands for; node 0 is the start.

    Raises GrammarError if one has more than MAX_STATES nodes, and if lark would find an alternative twice, where
    something left out by `[]` (`empty`) makes two of them equal.
    """
    rows, start = _nondeterministic(name, tree)
    graph = _determinised(name, rows, start, frozenset({0}))
    if any(empty in row for _, row in graph):
        _refuse_twice(name, graph, empty)
        rows = [[(None if symbol == empty else symbol, t) for symbol, t in row.items()] for _, row in graph]
        graph = _determinised(name, rows, 0, frozenset(i for i, (ends, _) in enumerate(graph) if ends))
    return _minimal(graph)


def _nondeterministic(name: str, tree: Any) -> tuple[NFA, int]:
    """An automaton with free edges, whose end is node 0, and its start."""
    rows: NFA = [[]]
    known: dict[tuple[int, int], int] = {}

    def new(row: list[tuple[Any, int]]) -> int:
        if len(rows) > MAX_NFA_STATES:
            raise GrammarError(_too_large(name))
        rows.append(row)
        return len(rows) - 1

    def build(part: Any, end: int) -> int:
        if not isinstance(part, Tree):
            return new([(part, end)])
        key = id(part), end
        if key not in known:
            known[key] = kinds[part.data](part.children, end)
        return known[key]

    def in_a_row(parts: list[Any], end: int) -> int:
        return functools.reduce(lambda behind, part: build(part, behind), reversed(parts), end)

    kinds: dict[str, Callable[[list[Any], int], int]] = {
        "expansions": lambda parts, end: new([(None, build(part, end)) for part in parts]),
        "expansion": in_a_row,
        "alias": lambda parts, end: build(parts[0], end),   # what it is called comes second
    }

    return rows, build(tree, 0)


def _determinised(name: str, rows: NFA, start: int, ends: frozenset[int]) -> list[Row]:
    def closed(nodes: Iterable[int]) -> frozenset[int]:
        return frozenset(reached(nodes, lambda node: [t for symbol, t in rows[node] if symbol is None]))

    sets = Numbering([closed([start])])
    graph: list[Row] = []
    for nodes in sets.met:                          # grows
        if len(sets) > MAX_STATES:
            raise GrammarError(_too_large(name))
        targets: dict[Any, list[int]] = defaultdict(list)
        for node in sorted(nodes):
            for symbol, t in rows[node]:
                targets[symbol].append(t)
        targets.pop(None, None)
        graph.append((not ends.isdisjoint(nodes), {symbol: sets[closed(some)] for symbol, some in targets.items()}))
    return graph


def _minimal(graph: list[Row]) -> list[Row]:
    """The same without nodes from which the same goes on; it has no circles."""
    numbers: Numbering[Any] = Numbering()
    made: dict[int, int] = {}
    found: dict[int, Row] = {}
    for node in postorder([0], lambda node: graph[node][1].values(), key=int):
        ends, row = graph[node]
        own = {symbol: made[t] for symbol, t in row.items()}
        made[node] = numbers[ends, frozenset(own.items())]
        found.setdefault(made[node], (ends, own))
    last = made[0]                                  # node 0 is made last: put it first
    return [(ends, {symbol: last - t for symbol, t in row.items()}) for ends, row in reversed(found.values())]


def _refuse_twice(name: str, graph: list[Row], empty: Any) -> None:
    """Raise lark's error where two ways of leaving symbols out leave the same ones, and not none."""
    begun = [t for _, row in graph for symbol, t in row.items() if symbol != empty]
    behind = set(reached(begun, lambda node: graph[node][1].values()))      # nodes before which a symbol may stand

    # Two nodes, whether the second must not leave out here (there the ways part), whether a symbol has been read.
    def moves(pair: tuple[int, int, bool, bool]) -> Iterator[tuple[int, int, bool, bool]]:
        p, q, parting, read = pair
        row, other = graph[p][1], graph[q][1]
        for symbol in (row.keys() & other.keys()) - {empty}:
            yield row[symbol], other[symbol], False, True
        if empty in row:
            yield row[empty], q, parting, read
        if empty in other and not parting:
            yield p, other[empty], False, read

    parted = [(row[empty], node) for node, (_, row) in enumerate(graph) if empty in row]
    pairs = [(p, node, True, read) for p, node in parted for read in {False, node in behind}]
    for number, (p, q, _, read) in enumerate(reached(pairs, moves)):
        if read and graph[p][0] and graph[q][0]:
            raise GrammarError(
                f"Rules defined twice: two of the alternatives of {name} are equal when what its [] leave out is gone; "
                "lark refuses that: use ()? for one of them"
            )
        if number > MAX_PAIRS:
            raise GrammarError(_too_large(name))


def _too_large(name: str) -> str:
    return (
        f"rule {name} has too many alternatives that begin alike, even as an automaton (of more than {MAX_STATES:,} "
        "states); give its repeats and groups names of their own"
    )
