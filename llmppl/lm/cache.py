"""The prefix cache: a trie of contexts (`Trie`), and the slots and rows that its nodes keep (`Store`).

A `Node` of the trie is a context: its tokens are on the path from the root. A node can keep three things: the keys and
values of its last token, in a *slot* of the engine's slab; its *row*, the logits of the next token; and the
log-probability of its token given its parent.

A node knows its parent, and has weak references to its children. So a node lives while a `Context`, a child, a slot or
a row holds it, and Python frees it. The tree is valid after an interrupt at any line.

The parent of a node with a slot has a slot, too, so slots are evicted from the leaves, least recently used first. Rows
are evicted before slots, except for a share reserved for rows. A row counts with the nodes without a slot that it keeps
alive. The store is not safe for two threads or for interrupts: the evaluator sees to both.
"""

from __future__ import annotations

import heapq
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmppl.distributions import Table
from llmppl.lm.engine import SlotEngine

# bytes of Python objects for each, measured
SLOT_OVERHEAD = 768
ROW_OVERHEAD = 640
NODE_OVERHEAD = 400
_ROW_DIVISOR = 8  # 1/8 of the budget is reserved for rows


class Node:
    """Context: the path of tokens from the root to this node."""

    __slots__ = (
        "parent",
        "token",
        "depth",
        "slot",
        "kept",
        "row",
        "links",
        "log_prob",
        "used",
        "next_token",
        "_children",
        "_sweep_at",
        "__weakref__",
    )

    def __init__(self, parent: Node | None, token: int) -> None:
        self.parent = parent
        self.token = token
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.used = 0  # round of the last use
        self._children: dict[int, weakref.ref[Node]] = {}
        self._sweep_at = 64
        self.forget()

    def forget(self) -> None:
        """Forget all that is computed."""
        self.slot = -1
        self.kept = 0  # number of children with a slot
        self.row: Table | None = None
        self.links = 0  # number of children that lead to a node with a row
        self.log_prob: float | None = None  # of `token` given `parent`
        self.next_token: weakref.ref[Any] | None = None  # NextToken of this context, while it lives

    @property
    def held(self) -> bool:
        """True if a row keeps this node alive, its own or that of a descendant."""
        return self.row is not None or self.links > 0

    def path(self) -> Iterator[Node]:
        """Yield the nodes from this one up to the root, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def tokens(self) -> list[int]:
        return [node.token for node in self.path()][::-1]

    @property
    def children(self) -> list[Node]:
        """Children that live."""
        return [child for ref in [*self._children.values()] if (child := ref()) is not None]

    def subtree(self) -> list[Node]:
        """Return this node and all its living descendants."""
        nodes = [self]
        for node in nodes:
            nodes.extend(node.children)
        return nodes

    def child(self, token: int) -> Node:
        """Return the child by `token`; create it if it does not exist. One thread at a time may call this."""
        ref = self._children.get(token)
        node = None if ref is None else ref()
        if node is None:
            if len(self._children) >= self._sweep_at:
                self._children = {
                    key: ref for key, ref in self._children.items() if ref() is not None
                }
                self._sweep_at = 64 + 2 * len(self._children)
            node = Node(self, token)
            self._children[token] = weakref.ref(node)
        return node


class Store:
    """Slots and rows, and the Python objects around them, under one budget.

    budget : most bytes
    engine : engine that has the slots; None if there are none

    Slots leave an eighth of the budget to rows, unless the contexts of one pass need it. Without rows every question
    would be computed twice, first for the prefetch and then for the question.
    """

    def __init__(self, budget: int, engine: SlotEngine | None) -> None:
        self.budget = budget
        self._engine = engine
        self.slot_cost = 0 if engine is None else engine.slot_bytes + SLOT_OVERHEAD
        self.owners: list[Node | None] = []  # by slot
        self.peak_bytes = self.evictions = 0  # evictions: number of slots evicted so far
        self.paths: dict[
            Node, NDArray[np.int64]
        ] = {}  # slots of the last contexts, root first; cleared by evictions
        self.clear()

    def clear(self) -> None:
        """Free all slots and rows, whatever state the store is in. The slab keeps its size."""
        self.owners = [None] * len(self.owners)
        self._free = list(range(len(self.owners) - 1, -1, -1))
        self._rows: OrderedDict[Node, None] = OrderedDict()  # least recently used first
        self.row_bytes = 0  # of the rows, and of the nodes without a slot that they hold
        self.paths.clear()
        self._note_peak()  # the slab may have grown before an interrupt

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    @property
    def slab_bytes(self) -> int:
        """Bytes of the slab, free slots included."""
        return len(self.owners) * self.slot_cost

    @property
    def bytes(self) -> int:
        """Bytes held now."""
        return self.slab_bytes + self.row_bytes

    @property
    def slots_used(self) -> int:
        return len(self.owners) - len(self._free)

    @property
    def rows_used(self) -> int:
        return len(self._rows)

    def put_row(self, node: Node, row: Table) -> None:
        """Keep `row` if it fits the budget; evict the least recently used rows for it."""
        new = []
        above = node
        while above.parent is not None and not above.held:
            new.append(above)
            above = above.parent
        size = row.nbytes + ROW_OVERHEAD + NODE_OVERHEAD * sum(each.slot < 0 for each in new)
        if size > self.budget - self.slab_bytes:
            return
        for each in new:
            each.parent.links += 1  # type: ignore[union-attr]   # only the root has none
        node.row = row
        self._rows[node] = None
        self.row_bytes += size
        self.fit_rows()
        self._note_peak()

    def touch_row(self, node: Node) -> None:
        """Note a use of the row of `node`. Any thread may call this, so the row may be gone by now."""
        with suppress(KeyError):
            self._rows.move_to_end(node)

    def fit_rows(self, more: int = 0) -> None:
        """Evict the least recently used rows until the rest, and `more` bytes, fit."""
        while self._rows and self.bytes + more > self.budget:
            node, _ = self._rows.popitem(last=False)
            assert node.row is not None
            self.row_bytes -= node.row.nbytes + ROW_OVERHEAD
            node.row = None
            while not node.held and node.parent is not None:
                self.row_bytes -= NODE_OVERHEAD * (node.slot < 0)
                node = node.parent
                node.links -= 1

    def make_room(self, wanted: int, keep: Iterable[Node]) -> int:
        """Free up to `wanted` slots, none on the paths of `keep`. Return the number of free ones, at most `wanted`."""
        if len(self._free) < wanted:
            self._grow(wanted - len(self._free), self.budget - self.budget // _ROW_DIVISOR)
        if len(self._free) < wanted:
            self._evict(wanted - len(self._free), keep)
        if len(self._free) < wanted:  # contexts of this pass take the share of the rows
            self._grow(wanted - len(self._free), self.budget)
        return min(wanted, len(self._free))

    def _grow(self, more: int, max_bytes: int) -> None:
        """Enlarge the slab by at least `more` slots, if that fits `max_bytes`.

        Each growth copies the slab, so it grows by half if there is room, by an eighth if rows have to be evicted.
        """
        if self._engine is None:
            return
        most = max_bytes // self.slot_cost
        unused = (self.budget - self.row_bytes) // self.slot_cost
        size = len(self.owners)
        new = min(size + max(more, size // 2, 64), most, unused)
        if new < size + more:  # evict rows
            new = min(size + max(more, size // 8), most)
        if new <= size:
            return
        self.fit_rows((new - size) * self.slot_cost)
        self._engine.reserve(new)
        self.owners.extend([None] * (new - size))
        self._free.extend(range(new - 1, size - 1, -1))
        self._note_peak()

    def _evict(self, wanted: int, keep: Iterable[Node]) -> None:
        """Evict the slots of the least recently used leaves: at least `wanted`, and an eighth of all as a reserve."""
        self.paths.clear()
        safe = set(chain.from_iterable(map(Node.path, keep)))
        wanted = max(wanted, len(self.owners) // 8)

        def may_go(node: Node) -> bool:
            return node.slot >= 0 and not node.kept and node not in safe

        heap = [(node.used, node.slot, node) for node in filter(None, self.owners) if may_go(node)]
        heapq.heapify(heap)
        while heap and wanted > 0:
            used, slot, node = heapq.heappop(heap)
            parent = node.parent
            assert parent is not None
            self.owners[slot] = None
            node.slot = -1
            self.row_bytes += NODE_OVERHEAD * node.held
            self._free.append(slot)
            parent.kept -= 1
            parent.used = max(parent.used, used)
            self.evictions += 1
            wanted -= 1
            if may_go(parent):
                heapq.heappush(heap, (parent.used, parent.slot, parent))
        self.fit_rows()

    def allocate(self, node: Node) -> None:
        """Give `node` a free slot. Its parent must have one, or be the root."""
        node.slot = self._free.pop()
        self.row_bytes -= NODE_OVERHEAD * node.held
        self.owners[node.slot] = node
        assert node.parent is not None
        node.parent.kept += 1

    def path_before(self, node: Node) -> NDArray[np.int64]:
        """Return the (depth - 1,) slots of the context that `node` continues. Each of its tokens must have one."""
        assert node.parent is not None
        slots = self.paths.get(node.parent)
        return (
            np.array([each.slot for each in node.path()][:0:-1], dtype=np.int64)
            if slots is None
            else slots
        )


class Trie:
    """Tree of all contexts of one language model. `print(trie)` shows its size."""

    def __init__(self, store: Store) -> None:
        self.root = Node(None, -1)
        self.store = store

    def __len__(self) -> int:
        """Return the number of nodes without the root."""
        return len(self.root.subtree()) - 1

    def __repr__(self) -> str:
        store = self.store
        return (
            f"<Trie of {len(self)} contexts: keys and values of {store.slots_used} ({store.slab_bytes / 1e6:.1f} MB), "
            f"next-token rows of {store.rows_used} ({store.row_bytes / 1e6:.1f} MB); "
            f"{store.bytes / 1e6:.1f} of {store.budget / 1e6:.1f} MB>"
        )
