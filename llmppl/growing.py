"""What grows while it is used: nodes reached along edges, answers that are kept, numbers that are given out.

An entry is made whole before it can be looked up, so that other threads and an interrupt leave nothing half-made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

__all__ = ["Memo", "Numbering", "postorder", "reached"]

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


class Numbering(dict[K, int], Generic[K]):
    """A dict that numbers its keys from 0 on as they are met; `keys_met[number]` is the key."""

    __slots__ = ("keys_met",)

    def __init__(self, keys: Iterable[K] = ()) -> None:
        super().__init__()
        self.keys_met: list[K] = []
        for key in keys:
            self[key]

    def __missing__(self, key: K) -> int:
        number = len(self)
        self.keys_met[number:] = [key]              # in place of what an interrupt has left
        self[key] = number
        return number


def reached(starts: Iterable[K], edges: Callable[[K], Iterable[K]]) -> list[K]:
    """The nodes that edges lead to from `starts`, these first, each once and in the order in which they are met."""
    found = list(dict.fromkeys(starts))
    seen = set(found)
    for node in found:                              # grows
        new = [target for target in dict.fromkeys(edges(node)) if target not in seen]
        seen.update(new)
        found += new
    return found


def postorder(roots: Iterable[Any], edges: Callable[[Any], Iterable[Any]], key: Callable[[Any], Any] = id) -> list[Any]:
    """The nodes of a graph without circles, each once (by its `key`) and after those that its edges lead to."""
    order, seen = [], set()
    todo = [(root, False) for root in roots]
    while todo:
        node, done = todo.pop()
        if done:
            order.append(node)
        elif key(node) not in seen:
            seen.add(key(node))
            todo += [(node, True), *[(target, False) for target in edges(node)]]
    return order
