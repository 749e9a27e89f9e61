"""What grows while it is used: nodes reached along edges, answers that are kept, numbers that are given out.

An entry is made whole before it can be looked up, so that other threads and an interrupt leave nothing half-made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Memo(dict[K, V]):
    """A dict that asks `find(key)` for what it lacks, and keeps the answer."""

    __slots__ = ("_find",)

    def __init__(self, find: Callable[[K], V]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, key: K) -> V:
        return self.setdefault(key, self._find(key))    # of two threads that find it, both get the first one's


class Numbering(dict[K, int]):
    """A dict that numbers its keys from 0 on as they are met; `met[number]` is the key.

    `check(key)` may refuse a new key by an exception.
    """

    __slots__ = ("check", "met")

    def __init__(self, keys: Iterable[K] = (), check: Callable[[K], object] = bool) -> None:
        super().__init__()
        self.met: list[K] = []
        self.check = check
        for key in keys:
            self[key]

    def __missing__(self, key: K) -> int:
        self.check(key)
        number = len(self)
        self.met[number:] = [key]                   # in place of what an interrupt has left
        self[key] = number
        return number


def reached(starts: Iterable[K], edges: Callable[[K], Iterable[K]]) -> Iterator[K]:
    """The nodes that edges lead to from `starts`, these first, each once; a node's edges are asked for after it."""
    found = list(dict.fromkeys(starts))
    seen = set(found)
    for node in found:                              # grows
        yield node
        new = [target for target in dict.fromkeys(edges(node)) if target not in seen]
        seen.update(new)
        found += new


def turned(edges: Iterable[tuple[V, Iterable[K]]]) -> dict[K, list[V]]:
    """For every target of some edges (a node and its targets each), the nodes that it is a target of, in order."""
    found: dict[K, list[V]] = defaultdict(list)
    for node, targets in edges:
        for target in targets:
            found[target].append(node)
    return found


def postorder(roots: Iterable[Any], edges: Callable[[Any], Iterable[Any]], key: Callable[[Any], Any] = id) -> list[Any]:
    """The nodes of a graph without circles, each once (by its `key`) and after those that its edges lead to."""
    order, seen = [], set()
    todo = [(root, False) for root in roots]
    while todo:
        node, done = todo.pop()
        if done:
            order.append(node)
        elif (name := key(node)) not in seen:
            seen.add(name)
            todo.append((node, True))
            todo += [(target, False) for target in edges(node)]
    return order
