"""Graphs and growing tables: searches along edges, dicts that compute missing values, numberings, and unique objects.

An entry is complete before it can be looked up. So other threads and interrupts never leave a partial entry.
"""

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
LEAST_ROOM = 1 << 12  # objects before those that nothing holds are dropped


class Memo(dict[K, V]):
    """A dict that computes a missing value by `find(key)`, and keeps it. It is cleared when it has `most` entries."""

    __slots__ = ("_find", "most")

    def __init__(self, find: Callable[[K], V], most: float = math.inf) -> None:
        super().__init__()
        self._find = find
        self.most = most

    def __missing__(self, key: K) -> V:
        found = self._find(key)
        if len(self) >= self.most:
            self.clear()
        return self.setdefault(key, found)  # two threads get the same value, that of the first


class Interned(dict[tuple[Any, ...], weakref.ref[V]]):
    """Objects by their contents, for as long as something else holds them. Equal ones are one object."""

    __slots__ = ("_make", "_room")

    def __init__(self, make: Callable[..., V]) -> None:
        super().__init__()
        self._make = make
        self._room = LEAST_ROOM

    def of(self, *content: Any) -> V:
        """Return the object that `make(*content)` returns."""
        ref = self.get(content)
        found = None if ref is None else ref()
        if found is None:
            found = self._make(*content)
            if len(self) >= self._room:
                self._drop_dead()
            self[content] = weakref.ref(found)
        return found

    def _drop_dead(self) -> None:
        for content, ref in list(self.items()):
            if ref() is None:
                del self[content]
        self._room = max(LEAST_ROOM, 2 * len(self))


class Numbering(dict[K, int]):
    """A dict that numbers its keys from 0 in the order of their first use; `keys_in_order[number]` is the key.

    `check(key)` may raise an exception to refuse a new key.
    """

    __slots__ = ("check", "keys_in_order")

    def __init__(self, keys: Iterable[K] = (), check: Callable[[K], object] = bool) -> None:
        super().__init__()
        self.keys_in_order: list[K] = []
        self.check = check
        for key in keys:
            self[key]

    def __missing__(self, key: K) -> int:
        self.check(key)
        number = len(self)
        self.keys_in_order[number:] = [key]  # replaces entries that an interrupt left
        self[key] = number
        return number


def reachable(starts: Iterable[K], edges: Callable[[K], Iterable[K]]) -> Iterator[K]:
    """Yield `starts` and all nodes that edges lead to, each once. A node's edges are read after it is yielded."""
    found = list(dict.fromkeys(starts))
    seen = set(found)
    for node in found:  # grows
        yield node
        new = [target for target in dict.fromkeys(edges(node)) if target not in seen]
        seen.update(new)
        found += new


def reversed_edges(edges: Iterable[tuple[V, Iterable[K]]]) -> dict[K, list[V]]:
    """Return, for every target in edges (a node and its targets each), the nodes that lead to it, in order."""
    found = defaultdict(list)
    for node, targets in edges:
        for target in targets:
            found[target].append(node)
    return found


def postorder(
    roots: Iterable[Any], edges: Callable[[Any], Iterable[Any]], key: Callable[[Any], Any] = id
) -> list[Any]:
    """Return the nodes of an acyclic graph, each once (by its `key`) and after the nodes that its edges lead to."""
    order = []
    seen = set()
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
