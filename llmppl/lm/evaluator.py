"""CachedEvaluator: answers questions about contexts. It runs each token of each distinct context once.

One *round* answers the questions of many particles together. The missing tokens of the contexts form *chains*: each
chain continues a context with kept keys and values, and is one row of a forward pass. A chain that continues another
chain waits for the next pass; equal prefixes are one row. An engine without slots gets all whole contexts in one call.

Several threads may ask, and one lock lets in one call at a time. After a call that did not end, the next one clears the
cache. Contexts stay, since the trie is always valid.
"""

import itertools
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from threading import get_ident
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from llmppl.constraints.vocabulary import Vocabulary
from llmppl.distributions import Table
from llmppl.lm.cache import Node, Store, Trie
from llmppl.lm.engine import Batch, Engine, SlotEngine, tables_of_logits
from llmppl.support.arguments import shown
from llmppl.support.locks import Lock, locked
from llmppl.support.runtime import Stats

_MAX_PATHS = 1 << 20  # slots of remembered paths
_MAX_ANSWER = 1 << 28  # bytes of the rows that an engine answers in one call
_Prefetch = tuple[weakref.ref[Any], weakref.ref[Any]]  # (asker, context)
Question = tuple[
    Node, ...
]  # (n,): the row of n; (n_0, ..., n_k): log p(n_i | n_{i-1}) for i = 1 .. k
Chain = list[Node]  # nodes, each the parent of the next


class PendingRound:
    """Rows and log-probabilities that a round has still to compute.

    rows : by node, each row asked for; None until it is resolved
    children : by node whose row is needed, the children whose log-probability it gives
    """

    def __init__(self, questions: Iterable[Question]) -> None:
        self.rows: dict[Node, Table | None] = {}
        self.children: dict[Node, list[Node]] = {}
        for question in questions:
            if len(question) == 1:
                self.rows[question[0]] = None
                self.children.setdefault(question[0], [])
            for parent, child in itertools.pairwise(question):
                if child.log_prob is None:
                    self.children.setdefault(parent, []).append(child)
        for node, row in [(node, node.row) for node in self.children if node.row is not None]:
            self.resolve(node, row)

    def keeps(self, node: Node) -> bool:
        """Return whether the row of `node` may be needed again. Then the store keeps it."""
        return node in self.rows or any(child.slot < 0 for child in self.children[node])

    def resolve(self, node: Node, row: Table) -> None:
        """Set all that is pending on the row of `node`."""
        for child in self.children.pop(node):
            child.log_prob = row.at(child.token) - row.log_total
        if node in self.rows:
            self.rows[node] = row


class CachedEvaluator:
    """Evaluator (`llmppl.support.runtime`) of questions about the nodes of its trie. Limits: see CachedTransformer."""

    patient = False

    def __init__(
        self, engine: Engine, vocab: Vocabulary, cache_bytes: int, max_batch_tokens: int
    ) -> None:
        self.engine = engine
        self.vocab = vocab
        self.max_batch_tokens = max_batch_tokens
        self.slots = engine if isinstance(engine, SlotEngine) else None
        self.store = Store(cache_bytes, self.slots)
        self.trie = Trie(self.store)
        self._lock = Lock()
        self._valid = True  # False in a call, and after one that did not end
        self._stats = defaultdict[int, Stats](
            Stats
        )  # by thread identifier, which Python uses again
        self._prefetches = defaultdict[int, list[_Prefetch]](
            list
        )  # of the next round of each thread
        self._ids = WeakKeyDictionary[
            Node, list[int]
        ]()  # tokens of the whole contexts of the last round
        self._round = 0
        self._unknown = np.flatnonzero(~vocab.known)
        self._cache_bytes = cache_bytes
        self._device: Any = None
        self._releases = type(engine).release is not Engine.release
        self._contexts: list[tuple[weakref.ref[Any], Node]] = []  # if the engine wants to know
        engine.clear()  # another language model, now gone, may have used it
        engine.owner = weakref.ref(self)

    @property
    def stats(self) -> Stats:
        """Stats of everything ever run, in all threads; a copy."""
        return sum(list(self._stats.values()), Stats())

    def done(self) -> Stats:
        """Return the stats of the calling thread; a copy."""
        return replace(self._stats[get_ident()])

    @locked
    def place(self, context: Any, node: Node, ids: Iterable[int]) -> Node:
        """Return the node of a new `context`, which continues `node` by `ids`."""
        for i in ids:
            node = node.child(int(i))
        if self._releases:
            self._contexts.append((weakref.ref(context), node))
        return node

    @locked
    def place_all(self, contexts: Sequence[Any], tokens: Iterable[int]) -> None:
        """Move the nodes of new contexts on by one token each."""
        for context, token in zip(contexts, tokens, strict=True):
            context.node = context.node.child(token)
        if self._releases:
            self._contexts += [(weakref.ref(context), context.node) for context in contexts]

    def clear(self) -> None:
        """Empty the cache. Living contexts stay."""
        self._exclusive(self._clear)

    def _exclusive(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that changes the cache, in one thread at a time."""
        if self._lock.lock._is_owned():
            raise RuntimeError(
                f"a language model was used from inside a call of its own, by {function.__qualname__}"
            )
        return self._to_its_end(function, *arguments)

    @locked
    def _to_its_end(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if not self._valid:
            self._clear()
        self._valid = False
        result = function(*arguments)
        self._valid = True
        return result

    def _clear(self) -> None:
        self.engine.clear()
        self.store.clear()
        for node in self.trie.root.subtree():
            node.forget()

    def cached(self, question: Question) -> Any | None:
        """Return the cached answer, or None. A cached answer is always right, so this takes no lock."""
        node, *children = question
        answer: Any = [child.log_prob for child in children] if children else node.row
        if answer is None or (children and None in answer):
            return None
        if not children:
            self.store.touch_row(node)
        self._stats[get_ident()].hits += 1
        return answer

    def prefetch(self, asker: object, context: Any) -> None:
        """Schedule the row of `context` for this thread's next round, if `context` and `asker` live until then."""
        self._prefetches[get_ident()].append((weakref.ref(asker), weakref.ref(context)))

    def evaluate(self, questions: list[Question]) -> list[Any]:
        """Return rows and log-probabilities. The round also computes what this thread has prefetched."""
        answers: list[Any] = self._exclusive(
            self._evaluate, questions, self._prefetches.pop(get_ident(), [])
        )
        return answers

    def _evaluate(self, questions: list[Question], prefetches: list[_Prefetch]) -> list[Any]:
        if self.engine.owner() is not self:
            raise RuntimeError(
                f"{self.engine.name or type(self.engine).__name__} was given to another CachedTransformer, which owns "
                "its cache: share the CachedTransformer, which any number of programs and threads may use"
            )
        start = perf_counter()
        tokens = self.engine.tokens
        self._round += 1
        self._release()
        alive = [context() for asker, context in prefetches if asker() is not None]
        pending = PendingRound([*((each.node,) for each in alive if each is not None), *questions])
        computed = len(pending.children)
        while pending.children:
            self._forward(pending)
        stats = self._stats[get_ident()]
        stats.rounds += 1
        stats.rows += computed
        stats.hits += max(0, len(questions) - computed)
        stats.tokens += self.engine.tokens - tokens
        stats.seconds_lm += perf_counter() - start
        return [
            [child.log_prob for child in rest] if rest else pending.rows[node]
            for node, *rest in questions
        ]

    def _release(self) -> None:
        """Tell the engine about the contexts that nobody holds any more."""
        states = [(ref() is None, ref, node) for ref, node in self._contexts]
        self._contexts = [(ref, node) for gone, ref, node in states if not gone]
        if dead := [node for gone, _, node in states if gone]:
            held = {
                self.trie.root,
                *itertools.chain.from_iterable(node.path() for _, node in self._contexts),
            }
            topmost = {
                each
                for node in dead
                for each in node.path()
                if each not in held and each.parent in held
            }
            self.engine.release([node.tokens() for node in topmost])

    def _forward(self, pending: PendingRound) -> None:
        """Run one forward pass and resolve its rows."""
        if self.slots is None:
            self._run_whole(self.engine, pending)
            return
        chains = self._fitting(self._chains(pending.children))
        if chains:
            self._run(self.slots, chains, pending)
            return
        warnings.warn(
            f"cache_bytes={self._cache_bytes} does not hold the contexts, at {self.slots.slot_bytes} bytes a token. "
            "They are recomputed from their start",
            stacklevel=2,
        )
        self._run_whole(self.slots, pending)

    def _chains(self, needs: Iterable[Node]) -> list[Chain]:
        """Return the chains that can run now: each continues a node with a slot, or the root."""
        claimed = set()
        chains = []
        for end in sorted(needs, key=lambda node: -node.depth):
            chain = []
            node = end
            while (
                node not in claimed and node.parent is not None and (node.slot < 0 or node is end)
            ):
                chain.append(node)  # `end` runs again if it has a slot but no row any more
                node = node.parent
            if chain and node not in claimed:
                chain = chain[::-1][: self.max_batch_tokens]
                claimed.update(chain)
                chains.append(chain)
        return chains

    def _fitting(self, chains: list[Chain]) -> list[Chain]:
        """Return chains that fit together into one pass and the store; none if the first alone does not fit."""
        first, *rest = chains  # the first always runs, so that every question is answered
        group = [first]
        longest = first[-1].depth
        for chain in sorted(rest, key=len, reverse=True):
            deepest = max(longest, chain[-1].depth)
            similar = max(len(first), len(chain)) <= 2 * min(len(first), len(chain))
            if similar and (len(group) + 1) * deepest <= self.max_batch_tokens:
                group.append(chain)
                longest = deepest
        while group:
            new_slots = sum(node.slot < 0 for node in itertools.chain(*group))
            if self.store.make_room(new_slots, keep=[chain[-1] for chain in group]) >= new_slots:
                return group
            group = group[: len(group) // 2]
        return []

    def _run(self, engine: SlotEngine, chains: list[Chain], pending: PendingRound) -> None:
        """Run one forward pass over `chains`. Each continues the parent of its first node."""
        lengths = np.array([len(chain) for chain in chains])
        starts = np.array([chain[0].depth - 1 for chain in chains])
        tokens = np.zeros((len(chains), int(lengths.max())), dtype=np.int64)
        asked: dict[Node, tuple[int, int]] = {}
        for i, chain in enumerate(chains):
            tokens[i, : len(chain)] = [node.token for node in chain]
            asked |= {node: (i, j) for j, node in enumerate(chain) if node in pending.children}
        slots = self._allocate_slots(chains)
        self._resolve(
            engine.run(Batch(tokens, starts, lengths, slots, [*asked.values()])), asked, pending
        )
        for chain in chains:
            chain[-1].used = self._round

    def _run_whole(self, engine: Engine, pending: PendingRound) -> None:
        """Call the engine once with whole contexts, the shortest ones first. The engine may cache them."""
        most = max(1, _MAX_ANSWER // (4 * len(self.vocab)))
        needs = sorted(pending.children, key=lambda node: node.depth)[:most]
        min_depth = needs[0].depth
        needed = set(needs)
        new = WeakKeyDictionary[Node, list[int]]()
        asked = {}
        for end in sorted(needs, key=lambda node: -node.depth):
            if end in asked:  # a prefix of a longer context
                continue
            before = None if end.parent is None else self._ids.get(end.parent)
            asked[end] = (len(new), end.depth)
            node = end
            new[end] = end.tokens() if before is None else [*before, end.token]
            while node.depth > min_depth:  # prefixes that are needed, too
                node = node.parent  # type: ignore[assignment]   # only the root has none
                if node in needed:
                    asked.setdefault(node, (asked[end][0], node.depth))
        self._ids = new
        contexts = list(new.values())
        self._resolve(engine.forward(contexts, [*asked.values()]), asked, pending)

    def _allocate_slots(self, chains: list[Chain]) -> NDArray[np.int64]:
        """Give slots to new nodes. Return the (B, T) slots of each chain's whole context, padded as in `Batch`."""
        for node in itertools.chain(*chains):
            if node.slot < 0:
                self.store.allocate(node)
        new = [[node.slot for node in chain] for chain in chains]
        paths = {
            c[-1]: np.append(self.store.path_before(c[0]), slots)
            for c, slots in zip(chains, new, strict=True)
        }
        longest = max(map(len, paths.values()))
        slots = np.empty((len(chains), longest), dtype=np.int64)
        for row, path in zip(slots, paths.values(), strict=True):
            row[: len(path)] = path
            row[len(path) :] = path[0]
        if len(self.store.paths) * longest > _MAX_PATHS:
            self.store.paths.clear()
        self.store.paths |= paths
        return slots

    def _resolve(self, logits: Any, asked: Iterable[Node], pending: PendingRound) -> None:
        """Resolve the rows of the nodes that a pass was asked for, by its logits."""
        nodes = list(asked)

        def describe(i: int) -> str:
            tokens = b"".join(self.vocab.tokens[token] for token in nodes[i].tokens())
            return f"Context({shown(tokens.decode('utf-8', 'replace'))})"

        keeps = [pending.keeps(node) for node in nodes]
        if isinstance(logits, np.ndarray):
            rows = tables_of_logits(logits, len(self.vocab), self._unknown, describe)
        else:
            if self._device is None:
                from llmppl.lm.device import Device

                self._device = Device(
                    lambda: self._stats[get_ident()], len(self.vocab), self._unknown
                )
            rows = self._device.tables_of_logits(logits, describe, keeps)
            answers = zip(nodes, rows, strict=True)
            self._device.look_up(
                [(row, child.token) for node, row in answers for child in pending.children[node]]
            )
        for node, row, keep in zip(nodes, rows, keeps, strict=True):
            pending.resolve(node, row)
            if keep:
                self.store.put_row(node, row)
