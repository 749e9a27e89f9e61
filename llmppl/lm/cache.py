"""The only cache: a trie of contexts (the index) and the bytes they keep (the store).

A `Node` of the trie is a context: its tokens are those on the path from the root, so what a node keeps depends on the
full path and never on a suffix. A node can keep the keys and values of its last token (in a *slot* of the engine's
slab), its *row* (the logits of the next token), and the scalar log-probability of its token given its parent.

`Store` holds slots and rows under one budget in bytes, or each under its own. A node with a slot has parents with
slots, so slots are given up from the leaves, least recently used first; where the budget is one, rows are given up
before slots, but for a share that is theirs alone. What was given up is recomputed if asked for again. A node itself
lives while a `Context`, a child, a slot or a row holds it; *lone* nodes, which rows alone hold, count with the rows.

Nothing here is for two threads at once, nor survives an interrupt by itself: the language model lets one call in at a
time, and has everything made anew after one that did not end (`Store.clear`, `Trie.renew`). Contexts alone come to
their end in any thread and at any moment; the trie is told by a queue.
"""

from __future__ import annotations

import heapq
import html
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmppl.distributions import Table
from llmppl.lm.engine import SlotEngine
from llmppl.support.locks import Exclusive

SLOT_OVERHEAD, ROW_OVERHEAD, NODE_OVERHEAD = 768, 640, 400      # bytes of the objects around each, measured
_MAX_UNSETTLED = 1000                                   # contexts that may have died before their nodes go
_ROW_DIVISOR = 8                                        # one part in 8 of the budget is never given to slots


class Node:
    """A context: the path of tokens from the root to here."""

    __slots__ = (
        "parent", "token", "depth", "children", "contexts", "live", "slot", "kept", "row", "log_prob", "used",
        "next_token",
    )  # fmt: skip

    def __init__(self, parent: Node | None, token: int) -> None:
        self.parent = parent
        self.token = token
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[int, Node] = {}
        self.contexts = 0                               # how many Context objects point here, by the trie's books
        self.live = 0                                   # `contexts`, and how many children are live
        self.slot = -1
        self.kept = 0                                   # how many children have a slot
        self.row: Table | None = None
        self.log_prob: float | None = None              # of `token` given `parent`
        self.used = 0                                   # when last asked for
        self.next_token: weakref.ref[Any] | None = None         # the NextToken of this context, while it lives

    def path(self) -> Iterator[Node]:
        """The nodes from here up to the root, which is left out."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def tokens(self) -> list[int]:
        return [node.token for node in self.path()][::-1]

    def child(self, token: int) -> Node:
        """The node one token further, made if it is not there."""
        node = self.children.get(token)
        if node is None:
            node = self.children[token] = Node(self, token)
        return node


class Store:
    """Slots and rows, with what Python needs around them, under one budget or two.

    `budget` is the most bytes that slots and rows may take together, or slots alone if rows have a `row_budget`. Of one
    for both, slots leave an eighth to rows, unless the contexts of one pass need it: without rows every question is
    computed twice, once for whoever prefetches it and once for whoever asks. Without an `engine` there are no slots.

    released : the highest nodes that no context holds any more since it was last emptied; None if nobody wants to know
    """

    def __init__(self, budget: int, engine: SlotEngine | None, row_budget: int | None = None) -> None:
        self.budget, self.row_budget, self._engine = budget, row_budget, engine
        self.slot_cost = 0 if engine is None else engine.slot_bytes + SLOT_OVERHEAD
        self.owners: list[Node | None] = []             # by slot
        self.evictions = 0                              # slots given up so far
        self.paths: dict[Node, NDArray[np.int64]] = {}  # slots of the last contexts, root first; none is given up
        self.peak_bytes = 0
        self.lone = 0                                   # nodes neither live nor with a slot: rows hold them
        self.released: list[Node] | None = None
        self._free: list[int] = []
        self._rows: OrderedDict[Node, int] = OrderedDict()      # node -> bytes, least recently used first
        self._row_bytes = 0

    def clear(self) -> None:
        """Give up every slot and row, whatever the books say. The slab stays as large as it is."""
        self.owners = [None] * len(self.owners)
        self._free = list(range(len(self.owners) - 1, -1, -1))
        self._rows = OrderedDict()
        self._row_bytes = self.lone = 0
        self.paths.clear()
        self.peak_bytes = max(self.peak_bytes, self.bytes)          # it may have grown when it was interrupted

    @property
    def slab_bytes(self) -> int:
        """Bytes of the whole slab, its free slots included."""
        return len(self.owners) * self.slot_cost

    @property
    def row_bytes(self) -> int:
        """Bytes of the rows, and of the nodes that nothing else holds."""
        return self._row_bytes + self.lone * NODE_OVERHEAD

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

    # ---- nodes

    def hold(self, node: Node) -> None:
        """A context came to `node`."""
        node.contexts += 1
        while node.parent is not None:
            node.live += 1
            if node.live > 1:
                return
            self.lone -= node.slot < 0
            node = node.parent

    def let_go(self, node: Node) -> None:
        """A context at `node` has gone."""
        node.contexts -= 1
        last, highest = node, None
        while last.parent is not None:
            last.live -= 1
            if last.live:
                break
            self.lone += last.slot < 0
            last, highest = last.parent, last
        if self.released is not None and highest is not None:
            self.released.append(highest)
        self._prune(node)

    def _prune(self, node: Node) -> None:
        """Let `node` leave the trie, and with it every parent, if nothing holds it."""
        while node.parent is not None:
            if node.live or node.children or node.slot >= 0 or node.row is not None:
                return
            del node.parent.children[node.token]
            self.lone -= 1
            node = node.parent

    # ---- rows

    def put_row(self, node: Node, row: Table) -> None:
        """Keep `row` if it fits, in place of the least recently used rows."""
        size = row.nbytes + ROW_OVERHEAD
        if size > self._row_room:
            return
        self.fit_rows(size)
        node.row = row
        self._rows[node] = size
        self._row_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def touch_row(self, node: Node) -> None:
        """Note that the row of `node` was asked for; from any thread, so that it may be gone by now."""
        try:
            self._rows.move_to_end(node)
        except KeyError:
            pass

    @property
    def _row_room(self) -> int:
        """The most bytes that rows may take beside the slab."""
        return self.budget - self.slab_bytes if self.row_budget is None else self.row_budget

    def fit_rows(self, more: int = 0) -> None:
        """Give up the least recently used rows, until all fit, and `more` bytes with them."""
        most = self._row_room - more
        while self._rows and self.row_bytes > most:
            node, size = self._rows.popitem(last=False)
            self._row_bytes -= size
            node.row = None
            self._prune(node)
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    # ---- slots

    def make_room(self, wanted: int, keep: Iterable[Node]) -> int:
        """Free up to `wanted` slots and return how many there are now; the paths of `keep` stay."""
        if len(self._free) < wanted:
            theirs = self.budget // _ROW_DIVISOR if self.row_budget is None else 0
            self._grow(wanted - len(self._free), self.budget - theirs)
        if len(self._free) < wanted:
            self._evict(wanted - len(self._free), keep)
        if len(self._free) < wanted:                    # what is read now goes before the share of the rows
            self._grow(wanted - len(self._free), self.budget)
        return min(wanted, len(self._free))

    def _grow(self, more: int, max_bytes: int) -> None:
        """Enlarge the slab by at least `more` slots, if `max_bytes` allow; by half of it where there is room, and by
        an eighth where rows have to make way: each growth copies the slab."""
        if self._engine is None:
            return
        most = max_bytes // self.slot_cost
        beside = most if self.row_budget is not None else (self.budget - self.row_bytes) // self.slot_cost
        size = len(self.owners)
        generous = max(more, size // 2, 64)
        new = min(size + generous, most, beside)
        if new < size + more:                           # rows make way
            new = min(size + max(more, size // 8), most)
        if new <= size:
            return
        self.fit_rows((new - size) * self.slot_cost if self.row_budget is None else 0)
        self._engine.reserve(new)
        self.owners.extend([None] * (new - size))
        self._free.extend(range(new - 1, size - 1, -1))
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _evict(self, wanted: int, keep: Iterable[Node]) -> None:
        """Give up the slots of the least recently used leaves: `wanted`, and an eighth of all to have some in hand."""
        self.paths.clear()
        safe = set(chain.from_iterable(map(Node.path, keep)))
        wanted = max(wanted, len(self.owners) // 8)

        def may_go(node: Node) -> bool:
            return node.slot >= 0 and not node.kept and node not in safe

        heap = [(node.used, node.slot, node) for node in filter(None, self.owners) if may_go(node)]
        heapq.heapify(heap)
        while heap and wanted > 0:
            used, _, node = heapq.heappop(heap)
            parent = node.parent
            assert parent is not None
            self.free(node)
            self.evictions += 1
            wanted -= 1
            parent.used = max(parent.used, used)
            if may_go(parent):
                heapq.heappush(heap, (parent.used, parent.slot, parent))
        self.fit_rows()                                 # they hold more nodes alone now

    def take(self, node: Node) -> None:
        """Give `node`, whose parent has a slot or is the root, a free slot."""
        node.slot = self._free.pop()
        self.owners[node.slot] = node
        self.lone -= not node.live
        assert node.parent is not None
        node.parent.kept += 1

    def free(self, node: Node) -> None:
        """Take the slot of a node none of whose children has one."""
        self.owners[node.slot] = None
        self._free.append(node.slot)
        node.slot = -1
        assert node.parent is not None
        node.parent.kept -= 1
        self.lone += not node.live
        self._prune(node)

    def path_before(self, node: Node) -> NDArray[np.int64]:
        """(depth - 1,) slots of the context that `node` continues, each token of which has one."""
        assert node.parent is not None
        slots = self.paths.get(node.parent)
        return np.array([each.slot for each in node.path()][:0:-1], dtype=np.int64) if slots is None else slots

    def forget(self, node: Node) -> None:
        """Give up the slot of `node` and with it those of all nodes below."""
        self.paths.clear()
        nodes = [node]
        for each in nodes:
            nodes.extend(child for child in each.children.values() if child.slot >= 0)
        for each in reversed(nodes):
            self.free(each)
        self.fit_rows()


class _Pin(weakref.ref[Any]):
    """A context seen from its node: it does not hold the context, and knows the node when the context has gone."""

    __slots__ = ("node",)
    node: Node


class Trie:
    """All contexts of one language model. `print(trie)` draws them: what they share, who is there, and what is kept.

    `exclusive` lets one thread at a time look at the trie; the other methods are called by whoever has been let in.
    """

    def __init__(self, tokens: list[bytes], store: Store, exclusive: Exclusive) -> None:
        self.root = Node(None, -1)
        self.store = store
        self._tokens, self._exclusive = tokens, exclusive
        self._pins: dict[int, _Pin] = {}                # of every context that lives
        self._gone: deque[_Pin] = deque()               # contexts that have died since; nothing but C code puts them in

    def place(self, context: Any, ids: Iterable[int]) -> None:
        """Move a new `context` on from its node by `ids`, and keep its node in the trie while it lives."""
        if len(self._gone) >= _MAX_UNSETTLED:
            self.settle()
        node = context.node
        for i in ids:
            self.store.lone += i not in node.children
            node = node.child(int(i))
        context.node = node
        pin = _Pin(context, self._gone.append)
        pin.node = node
        self._pins[id(pin)] = pin
        self.store.hold(node)

    def settle(self) -> None:
        """Let the nodes go whose contexts have died."""
        while self._gone:
            pin = self._gone.popleft()
            if self._pins.pop(id(pin), None) is not None:
                self.store.let_go(pin.node)
        self.store.fit_rows()                           # they hold more nodes alone now

    def renew(self) -> None:
        """Make the trie anew from the contexts that live, with nothing kept."""
        self._pins = {key: pin for key, pin in self._pins.items() if pin() is not None}
        nodes = set(_subtrees(self.root))
        for pin in self._pins.values():
            nodes.update(pin.node.path())
        for node in nodes:
            node.children, node.contexts, node.live, node.slot, node.kept, node.row = {}, 0, 0, -1, 0, None
            node.log_prob = node.next_token = None
        for pin in self._pins.values():
            for node in pin.node.path():
                assert node.parent is not None
                self.store.lone += node.token not in node.parent.children
                node.parent.children[node.token] = node
            self.store.hold(pin.node)

    def __len__(self) -> int:
        """The number of contexts."""
        length: int = self._exclusive(self._size)
        return length

    def _size(self) -> int:
        self.settle()
        return sum(1 for _ in _subtrees(self.root)) - 1

    def __repr__(self) -> str:
        store = self.store
        if store.row_budget is None:
            slots, rows = _megabytes(store.slab_bytes), _megabytes(store.row_bytes)
            total = f"; {_megabytes(store.bytes, store.budget)}"
        else:
            slots, rows = _megabytes(store.slab_bytes, store.budget), _megabytes(store.row_bytes, store.row_budget)
            total = ""
        return (
            f"<Trie of {len(self)} contexts: keys and values of {store.slots_used} ({slots}), "
            f"next-token rows of {store.rows_used} ({rows}){total}>"
        )

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self)[1:-1])}</p><pre>{html.escape(self.draw())}</pre>"

    def draw(self, max_lines: int = 60) -> str:
        """The trie as text, one line for each run of tokens without a branch, at most `max_lines` lines.

        `▪` stands for a token whose keys and values are kept and `▫` for one without; `◆` marks a kept next-token row;
        `(n)` says that n contexts, of particles or of the caller, stand at the end of the line.
        """
        drawing: str = self._exclusive(self._draw, max_lines)
        return drawing

    def _draw(self, max_lines: int) -> str:
        self.settle()
        lines: list[str] = []
        stack: list[tuple[Node, str, str]] = [(node, "", "") for node in reversed(self.root.children.values())]
        while stack and len(lines) < max_lines:
            node, lead, below = stack.pop()
            run = [node]
            while len(node.children) == 1 and not node.contexts:
                (node,) = node.children.values()
                run.append(node)
            row, here = " ◆" if node.row is not None else "", f" ({node.contexts})" if node.contexts else ""
            lines.append(f"{lead}{self._spelled(run)} {_marks(run)}{row}{here}")
            leads = chain([("└─ ", "   ")], repeat(("├─ ", "│  ")))         # from the last child to the first
            children = zip(reversed(node.children.values()), leads, strict=False)
            stack.extend((child, below + first, below + further) for child, (first, further) in children)
        if stack:
            lines.append(f"... and {sum(1 for _ in _subtrees(*[node for node, *_ in stack]))} contexts more")
        return "\n".join(lines)

    def _spelled(self, run: list[Node]) -> str:
        """The bytes of a run of tokens as text, its middle left out where it is long."""
        data = b"".join(self._tokens[node.token] or b"<%d>" % node.token for node in run)
        text = repr(data.decode("utf-8", "replace"))
        return text if len(text) <= 72 else f"{text[:34]} ... {text[-33:]}"

    def __str__(self) -> str:
        return f"{self!r}\n{self.draw()}"


def _megabytes(size: int, most: int | None = None) -> str:
    return f"{size / 1e6:.1f} MB" if most is None else f"{size / 1e6:.1f} of {most / 1e6:.1f} MB"


def _marks(run: list[Node]) -> str:
    """One mark for each token: whether its keys and values are kept."""
    marks = "".join("▫▪"[node.slot >= 0] for node in run)
    if len(marks) <= 12:
        return marks
    return f"{marks[:11]}…" if marks.strip(marks[0]) else f"{marks[0]}x{len(marks)}"


def _subtrees(*roots: Node) -> Iterator[Node]:
    """The nodes of the trees below `roots`, these included."""
    stack = list(roots)
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
