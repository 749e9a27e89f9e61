"""Radix tree of the contexts in an engine's cache, for engines whose cache consists of numbered *sequences*.

A `Segment` is a run of tokens without a branch, and each leaf is one sequence of the engine. An inner segment has two
children or more. A context is a string of bytes here, four for each token, so C code compares and hashes prefixes. To
find a context costs its length in bytes plus the number of branches on its path. The first `done` tokens of a path are
in the engine's cache; the engine has to run the tokens after them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

WIDTH = 4                                               # bytes of a token


def key(ids: Sequence[int]) -> bytes:
    """Return a context as bytes."""
    return array("i", ids).tobytes()


class Segment:
    """Tokens without a branch: positions `start` .. `end - 1` of all contexts that pass here."""

    __slots__ = ("parent", "ids", "start", "end", "done", "children", "sequence", "used", "group", "wanted")

    def __init__(self, parent: Segment | None, ids: bytes, done: int, sequence: int = -1) -> None:
        self.parent, self.ids, self.done, self.sequence = parent, ids, done, sequence
        self.start: int = 0 if parent is None else parent.end
        self.end: int = self.start + len(ids) // WIDTH
        self.children: dict[bytes, Segment] = {}            # by the first token
        self.used = self.group = 0                      # of a leaf: round and group of its last use
        self.wanted: list[int] = []                     # sorted lengths of the contexts asked for that end here

    @property
    def keep(self) -> int:
        """Number of first tokens of the path to here that may still be asked for."""
        return self.wanted[-1] if self.wanted else self.start

    def want(self, n: int) -> None:
        """Note that the context of the first n tokens of the path, which ends in this segment, was asked for."""
        i = bisect_left(self.wanted, n)
        if self.wanted[i : i + 1] != [n]:
            self.wanted.insert(i, n)

    def release(self, n: int) -> None:
        """Note that nobody needs contexts of n or more tokens on the path to here, or below it."""
        stack = [self]
        while stack:
            segment = stack.pop()
            del segment.wanted[bisect_left(segment.wanted, n) :]
            stack.extend(segment.children.values())

    def leaves(self) -> Iterator[Segment]:
        """Yield the leaves below."""
        stack = [self]
        while stack:
            segment = stack.pop()
            if segment.children:
                stack.extend(segment.children.values())
            else:
                yield segment

    def leaf(self) -> Segment:
        """Return one of the leaves below."""
        segment = self
        while segment.children:
            segment = next(iter(segment.children.values()))
        return segment

    def held(self) -> int:
        """Return how many of the first tokens of the path to here are in the cache."""
        segment = self
        while segment.parent is not None and segment.done == segment.start:
            segment = segment.parent
        return segment.done

    def path(self) -> Iterator[Segment]:
        """Yield the segments from this one up to the root, without the root."""
        segment = self
        while segment.parent is not None:
            yield segment
            segment = segment.parent


class Sequences:
    """Tree of segments. `tokens` is the number of its tokens, `leaves` maps sequences to leaves."""

    def __init__(self) -> None:
        self.root = Segment(None, b"", 0)
        self.leaves: dict[int, Segment] = {}
        self.tokens = 0

    def find(self, context: bytes) -> tuple[Segment, int]:
        """Return the last segment that shares tokens with `context`, and the length of the whole shared prefix."""
        segment, at = self.root, 0
        while True:
            child = segment.children.get(context[at : at + WIDTH])
            if child is None:
                return segment, at // WIDTH
            if not context.startswith(child.ids, at):
                return child, at // WIDTH + common(child.ids, context[at:])
            segment, at = child, at + len(child.ids)

    def extend(self, leaf: Segment, context: bytes) -> None:
        """Extend `leaf`, whose path is a prefix of `context`, to the end of `context`."""
        more = context[leaf.end * WIDTH :]
        leaf.ids += more
        leaf.end += len(more) // WIDTH
        self.tokens += len(more) // WIDTH

    def branch(self, segment: Segment, n: int, context: bytes, sequence: int) -> Segment:
        """Add and return a leaf for `context`, whose longest shared prefix is n tokens of the path to `segment`."""
        if n < segment.end:
            segment = self._split(segment, n)
        leaf = Segment(segment, context[n * WIDTH :], n, sequence)
        segment.children[leaf.ids[:WIDTH]] = leaf
        self.leaves[sequence] = leaf
        self.tokens += leaf.end - leaf.start
        return leaf

    def cut(self, leaf: Segment, n: int) -> None:
        """Remove the tokens of `leaf` after the first n of its path; the whole leaf if it has none before."""
        if n > leaf.start:
            self.tokens -= leaf.end - n
            leaf.ids = leaf.ids[: (n - leaf.start) * WIDTH]
            leaf.end, leaf.done = n, min(leaf.done, n)
            del leaf.wanted[bisect_left(leaf.wanted, n + 1) :]
            return
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.ids[:WIDTH]], self.leaves[leaf.sequence]
        self.tokens -= leaf.end - leaf.start
        if len(parent.children) == 1 and parent.parent is not None:
            (only,) = parent.children.values()          # an only child merges with its parent
            only.ids, only.wanted = parent.ids + only.ids, parent.wanted + only.wanted
            only.start, only.parent = parent.start, parent.parent
            only.parent.children[only.ids[:WIDTH]] = only

    def _split(self, segment: Segment, n: int) -> Segment:
        """Split a segment after the first n tokens of its path; return the upper part, which is new."""
        assert segment.parent is not None
        size = (n - segment.start) * WIDTH
        upper = Segment(segment.parent, segment.ids[:size], min(segment.done, n))
        segment.parent.children[segment.ids[:WIDTH]] = upper
        segment.ids, segment.start, segment.parent = segment.ids[size:], n, upper
        segment.done = max(segment.done, n)
        i = bisect_left(segment.wanted, n + 1)
        upper.wanted, segment.wanted = segment.wanted[:i], segment.wanted[i:]
        upper.children[segment.ids[:WIDTH]] = segment
        return upper


def common(one: bytes, other: bytes) -> int:
    """Return the length in tokens of the common prefix of two byte strings."""
    size = min(len(one), len(other)) // WIDTH
    differ = np.frombuffer(one, np.int32, size) != np.frombuffer(other, np.int32, size)
    return int(differ.argmax()) if differ.any() else size


def pending(leaves: Iterable[Segment]) -> list[Segment]:
    """Return the segments above `leaves` that have tokens to run, each after its ancestors."""
    todo: dict[int, Segment] = {}
    for leaf in leaves:
        for segment in leaf.path():
            if segment.done == segment.end or id(segment) in todo:
                break
            todo[id(segment)] = segment
    return sorted(todo.values(), key=lambda segment: segment.start)
