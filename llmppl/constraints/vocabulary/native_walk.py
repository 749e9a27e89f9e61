"""Walks of a vocabulary's trie in C, beside the table of an automaton (`llmppl/native/walk.c`).

A walk stops where something is missing: the row of a state that Python computes, or room for results. It goes on when
that is provided. Where any bytes of a class may follow, the walk reads only the tokens outside a slice
(`llmppl.constraints.vocabulary.slices`).
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np

from llmppl import native
from llmppl.constraints.constraint import Bools
from llmppl.constraints.vocabulary import slices
from llmppl.constraints.vocabulary.slices import Slice
from llmppl.constraints.vocabulary.trie import Ids, Trie

ROOT = np.array([-1], np.int32)
LEAST = 24  # bytes of a class that has a slice
LEAST_NODES = 2000  # of a trie with slices
MAX_EXITS = 4096  # that one call lists
FEW = 32  # a mask with less than one token in so many is listed, too


class Beside(Protocol):
    """Automaton beside which a trie is read."""

    lock: Any

    @property
    def arrays(self) -> native.Automaton: ...

    def provide(self, status: int, number: int, byte: int, /) -> None:
        """Provide the thing that a function in C has missed: the row of a state, its exits, or room."""


class GraphBeside:
    """Graph whose rows Python computes. Raise a TypeError if C cannot read its arrays."""

    lock = nullcontext()

    def __init__(self, graph: Any) -> None:
        self.arrays = native.Automaton()
        self._graph = graph
        self.refresh()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:  # addresses hold in one process
        return type(None), ()

    def refresh(self) -> None:
        """Read the arrays of the graph, which are replaced when it grows."""
        table = self._graph.table
        ready = self._graph.ready
        if (
            table.dtype != np.int32
            or table.shape[1:] != (256,)
            or ready.dtype != bool
            or len(ready) != len(table)
        ):
            raise TypeError("C reads an int32 table of 256 columns, and a bool for each row")
        exits = self._graph.has_exits
        if exits is not None and (exits.itemsize != 1 or len(exits) != len(table)):
            raise TypeError("C reads a byte for the exits of each row")
        self.arrays.put(table=table, ready=ready, exits=exits)
        self.arrays.num_states = len(table)

    def provide(self, status: int, number: int, byte: int, /) -> None:
        if status == native.EXITS:
            self._graph.find_exits(number)
        else:
            self._graph.fill(number, np.array([byte]))
        if self._graph.table is not self.arrays.held("table"):
            self.refresh()


def beside_of(graph: Any) -> Beside | None:
    """Return a graph as C reads it, None if it cannot be read."""
    found = getattr(graph, "_beside", None)
    if found is None:
        rows = getattr(getattr(graph, "recognizer", None), "native_rows", None)
        found = rows() if rows is not None else None
    try:
        if found is None:
            found = graph._beside = GraphBeside(graph)
        elif isinstance(found, GraphBeside) and len(graph.table) != found.arrays.num_states:
            found.refresh()
    except TypeError:
        return None
    return found


class Found(NamedTuple):
    """Tokens that fit with the states they lead to, and nodes above others with states that have exits."""

    ids: Ids
    ends: Ids
    nodes: Ids
    states: Ids


class NativeTrie:
    """Trie as C reads it."""

    def __init__(self, trie: Trie, library: Any) -> None:
        self._library = library
        self._trie = trie
        self._size = len(trie.tokens)
        self._arrays = slices.arrays_of(trie)
        self._depth = len(trie.levels) + 2
        self._free = list[_Walk]()  # not in use
        self._slices = slices.slices_of(trie)

    def tokens(
        self, beside: Beside, start: int, roots: Ids = ROOT, *, with_exits: bool = False
    ) -> Found:
        """Read the tokens below some nodes, -1 for all, from a state."""
        with beside.lock:
            return self._read(beside, start, roots, None, None, with_exits)  # noqa: E701

    def mask(
        self,
        beside: Beside,
        start: int,
        plain: float | None = None,
        *,
        with_exits: bool = False,
    ) -> tuple[Bools, Ids | None, Found]:
        """Return the mask of the tokens that fit a state, (V,) bool, their ids if they are few, and the exits.

        `plain` is the number of plain bytes, whichever, that may follow. Without it, rows tell which bytes may.
        """
        known = None
        if plain is not None:
            known = self._slices.plain(plain)
        elif len(self._trie) >= LEAST_NODES:
            with beside.lock:
                known = self._slice_at(beside, start, with_exits)  # noqa: E701
        if known is None or known.size <= self._size // FEW:
            known = None
            mask = np.zeros(self._size, bool)
        else:
            mask = known.mask.copy()
        with beside.lock:
            found = self._read(beside, start, ROOT, mask, known, with_exits)  # noqa: E701
        ids = found.ids
        return mask, ids if ids.size or not mask.any() else None, found

    def _read(
        self,
        beside: Beside,
        start: int,
        roots: Ids,
        mask: Bools | None,
        known: Slice | None,
        with_exits: bool,
    ) -> Found:
        if not 0 <= start < beside.arrays.num_states:
            raise ValueError(f"{start} is not a state of the automaton")
        if with_exits and not beside.arrays.exits:
            raise ValueError("the automaton has no exits")
        walk = self._free.pop() if self._free else _Walk(self._size, self._depth)
        walk.put(roots=roots, mask=mask, jump=None if known is None else known.jump)
        walk.put(exit_nodes=walk.nodes if with_exits else None)
        walk.num_roots = len(roots)
        walk.start = start
        walk.max_ids = self._size if mask is None else self._size // FEW
        walk.num_ids = 0 if known is None else known.size
        walk.num_exits = walk.root = 0
        walk.node = -2
        parts = []
        status = None
        while status != native.DONE:
            status = self._library.walk(*map(ctypes.byref, (self._arrays, beside.arrays, walk)))
            if status in (native.DONE, native.FULL):
                parts.append(walk.taken(status, mask is not None))
            elif status == native.BROKEN:
                raise ValueError(
                    f"a row of state {walk.state} leads to a state that the automaton does not have"
                )
            else:
                beside.provide(status, walk.state, int(self._trie.byte[walk.node]))
        self._free.append(walk)
        return (
            parts[0] if len(parts) == 1 else Found(*map(np.concatenate, zip(*parts, strict=True)))
        )

    def _slice_at(self, beside: Beside, start: int, with_exits: bool) -> Slice | None:
        """Return the slice that a state takes whole; None if there is none, or its class is new."""
        inside = np.empty(256, bool)
        at = native.address(inside)
        length = ctypes.c_int32()
        lacking = status = None
        while status != native.DONE:
            arguments = (start, with_exits, LEAST, slices.LONGEST, at, ctypes.byref(length))
            status = self._library.class_of(ctypes.byref(beside.arrays), *arguments)
            if status != native.DONE:
                if (status, length.value) == lacking and status == native.ROW:
                    return None  # the row is not filled as a whole
                lacking = status, length.value
                beside.provide(status, length.value, 0)
        if length.value < 2:
            return None
        return self._slices.of_class(inside, length.value)


class _Walk(native.Walk):
    """Arguments and results of a walk, with room for all tokens and for MAX_EXITS exits."""

    def __init__(self, size: int, depth: int) -> None:
        super().__init__(max_depth=depth, max_exits=MAX_EXITS)
        self.nodes = np.empty(MAX_EXITS, np.int32)
        self._states = np.empty(MAX_EXITS, np.int32)
        self._tokens = np.empty((2, size), np.int32)
        self.put(
            stack=np.empty(depth, np.int32),
            exit_states=self._states,
            ids=self._tokens[0],
            ends=self._tokens[1],
        )

    def taken(self, status: int, has_mask: bool) -> Found:
        """Return the results so far, and make room. With a mask, a few ids are returned once, at the end."""
        size = 0
        if not has_mask or (status == native.DONE and self.num_ids <= self.max_ids):
            size = self.num_ids
            self.num_ids = 0
        exits = slice(self.num_exits)
        self.num_exits = 0
        ids = self._tokens[0, :size].copy()
        ends = self._tokens[1, : 0 if has_mask else size].copy()
        return Found(ids, ends, self.nodes[exits].copy(), self._states[exits].copy())


def native_trie(trie: Trie) -> NativeTrie | None:
    """Return the trie as C reads it; None where numpy is used instead."""
    library = native.library()
    if library is None:
        return None
    found: NativeTrie = trie.loops.get("native") or trie.loops.setdefault(
        "native", NativeTrie(trie, library)
    )
    return found
