"""Which contexts an engine holds: a tree of runs of tokens, each leaf of which is one of its numbered sequences.

For engines whose cache is made of *sequences* that share what they have in common. A context is a string of bytes here,
four to a token, so that prefixes are compared and hashed at the speed of C: to find a context in the tree costs its
length in bytes and the branches on its way. An inner run has two children or more; the first `done` tokens of a path
are in the engine's cache, and those after are to be run.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

WIDTH = 4                                               # bytes of a token


def key(ids: Sequence[int]) -> bytes:
    """A context as the tree knows it."""
    return array("i", ids).tobytes()


class Run:
    """Tokens that follow one another without a branch: places `start` .. `end - 1` of all contexts below."""

    __slots__ = ("parent", "ids", "start", "end", "done", "children", "sequence", "used", "group", "wanted")

    def __init__(self, parent: Run | None, ids: bytes, done: int, sequence: int = -1) -> None:
        self.parent, self.ids, self.done, self.sequence = parent, ids, done, sequence
        self.start: int = 0 if parent is None else parent.end
        self.end: int = self.start + len(ids) // WIDTH
        self.children: dict[bytes, Run] = {}            # by the first token
        self.used = self.group = 0                      # of a leaf: its last round, and its group there
        self.wanted: list[int] = []                     # where contexts end that were asked for

    @property
    def keep(self) -> int:
        """How many of the first tokens of the path to here somebody may still want."""
        return self.wanted[-1] if self.wanted else self.start

    def want(self, n: int) -> None:
        """The context of the first n tokens of the path, which ends in this run, was asked for."""
        i = bisect_left(self.wanted, n)
        if self.wanted[i : i + 1] != [n]:
            self.wanted.insert(i, n)

    def release(self, n: int) -> None:
        """Nobody wants what the path to here has after n - 1 tokens, nor what goes on from here."""
        stack = [self]
        while stack:
            run = stack.pop()
            del run.wanted[bisect_left(run.wanted, n) :]
            stack.extend(run.children.values())

    def leaves(self) -> Iterator[Run]:
        stack = [self]
        while stack:
            run = stack.pop()
            if run.children:
                stack.extend(run.children.values())
            else:
                yield run

    def leaf(self) -> Run:
        """One of the leaves below."""
        run = self
        while run.children:
            run = next(iter(run.children.values()))
        return run

    def held(self) -> int:
        """How many of the first tokens of the path to here are in the cache."""
        run = self
        while run.parent is not None and run.done == run.start:
            run = run.parent
        return run.done

    def path(self) -> Iterator[Run]:
        """The runs from here up to the root, which is left out."""
        run = self
        while run.parent is not None:
            yield run
            run = run.parent


class Sequences:
    """The tree. `tokens` counts what it holds, `leaves` are its leaves by sequence."""

    def __init__(self) -> None:
        self.root = Run(None, b"", 0)
        self.leaves: dict[int, Run] = {}
        self.tokens = 0

    def find(self, context: bytes) -> tuple[Run, int]:
        """The last run that shares tokens with `context`, and how many tokens the path to there shares in all."""
        run, at = self.root, 0
        while True:
            child = run.children.get(context[at : at + WIDTH])
            if child is None:
                return run, at // WIDTH
            if not context.startswith(child.ids, at):
                return child, at // WIDTH + common(child.ids, context[at:])
            run, at = child, at + len(child.ids)

    def extend(self, leaf: Run, context: bytes) -> None:
        """`leaf` goes on to the end of `context`, which it is a prefix of."""
        more = context[leaf.end * WIDTH :]
        leaf.ids += more
        leaf.end += len(more) // WIDTH
        self.tokens += len(more) // WIDTH

    def branch(self, run: Run, n: int, context: bytes, sequence: int) -> Run:
        """A new leaf for `context`, which shares its first n tokens with the path to `run`, and no more with any."""
        if n < run.end:
            run = self._split(run, n)
        leaf = Run(run, context[n * WIDTH :], n, sequence)
        run.children[leaf.ids[:WIDTH]] = leaf
        self.leaves[sequence] = leaf
        self.tokens += leaf.end - leaf.start
        return leaf

    def cut(self, leaf: Run, n: int) -> None:
        """Forget what `leaf` has after the first n tokens of its path; all of it that is its own if n is less."""
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
            (other,) = parent.children.values()         # an only child is one run with its parent
            other.ids, other.wanted = parent.ids + other.ids, parent.wanted + other.wanted
            other.start, other.parent = parent.start, parent.parent
            other.parent.children[other.ids[:WIDTH]] = other

    def _split(self, run: Run, n: int) -> Run:
        """Cut a run in two after the first n tokens of its path, and give the upper part, which is new."""
        assert run.parent is not None
        size = (n - run.start) * WIDTH
        upper = Run(run.parent, run.ids[:size], min(run.done, n))
        run.parent.children[run.ids[:WIDTH]] = upper
        run.ids, run.start, run.parent = run.ids[size:], n, upper
        run.done = max(run.done, n)
        i = bisect_left(run.wanted, n + 1)
        upper.wanted, run.wanted = run.wanted[:i], run.wanted[i:]
        upper.children[run.ids[:WIDTH]] = run
        return upper


def common(one: bytes, other: bytes) -> int:
    """How many tokens two strings of tokens begin with in common."""
    size = min(len(one), len(other)) // WIDTH
    differ = np.frombuffer(one, np.int32, size) != np.frombuffer(other, np.int32, size)
    return int(differ.argmax()) if differ.any() else size


def pending(leaves: Iterable[Run]) -> list[Run]:
    """The runs on the paths of `leaves` that have tokens to be run, each after those above it."""
    found: dict[int, Run] = {}
    for leaf in leaves:
        for run in leaf.path():
            if run.done == run.end or id(run) in found:
                break
            found[id(run)] = run
    return sorted(found.values(), key=lambda run: run.start)
