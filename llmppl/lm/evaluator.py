"""CachedEvaluator: answers questions about contexts, running each token of each distinct context once.

Questions of many particles are answered together, a *round* at a time. What is missing of the contexts is cut into
*chains* of new tokens; each chain continues a context whose keys and values are kept, and chains are the rows of one
forward pass. A chain that continues another chain waits for the next pass; equal prefixes are one row. An engine that
has no slots of ours gets the whole contexts of a round in one call.

Several threads may ask: there is one round at a time, and every thread's rounds are its own. A round that an interrupt
ends leaves the cache empty, and the contexts as they are.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmppl.constraints.vocabulary import Vocabulary
from llmppl.distributions import Table
from llmppl.lm.cache import Node, Store, Trie
from llmppl.lm.engine import Batch, Engine, SlotEngine
from llmppl.lm.logits import array_rows
from llmppl.support.arguments import shown
from llmppl.support.locks import Exclusive
from llmppl.support.runtime import Stats

_MAX_PATHS = 1 << 20                    # slots of remembered paths
_MAX_ANSWER = 1 << 28                   # bytes of the rows that an engine answers at a time
_Prefetch = tuple[weakref.ref[Any], weakref.ref[Any]]                   # who asks, and for which context
Question = tuple[Node, ...]             # (n,): the row of n; (n_0, ..., n_k): log p(n_i | n_{i-1}) for i = 1 .. k
Chain = list[Node]                      # nodes, each the parent of the next


_EVALUATORS: weakref.WeakValueDictionary[Engine, CachedEvaluator] = weakref.WeakValueDictionary()   # who has which


class _Thread(threading.local):
    """What belongs to one thread: what its next round is to prefetch, and what was done for it."""

    def __init__(self, done: dict[int, Stats]) -> None:         # of all threads by identifier, which Python uses again
        self.prefetches: list[_Prefetch] = []
        self.stats = done.setdefault(threading.get_ident(), Stats())


class _Wanted:
    """What a round has still to find out."""

    def __init__(self, questions: Iterable[Question]) -> None:
        self.rows: dict[Node, Table | None] = {}        # the rows asked for; None until found
        self.children: dict[Node, list[Node]] = {}      # of each node whose row is needed, those that want a log_prob
        for question in questions:
            if len(question) == 1:
                self.rows[question[0]] = None
                self.children.setdefault(question[0], [])
            for parent, child in itertools.pairwise(question):
                if child.log_prob is None:
                    self.children.setdefault(parent, []).append(child)

    def kept(self, node: Node) -> bool:
        """Return whether the row of `node` may be asked for again: nothing else keeps it."""
        return node in self.rows or any(child.slot < 0 for child in self.children[node])

    def found(self, node: Node, row: Table) -> bool:
        """Hand out what is wanted of `row`, and return whether it is `kept`."""
        kept = self.kept(node)
        for child in self.children.pop(node):
            child.log_prob = row.at(child.token) - row.log_total
        if node in self.rows:
            self.rows[node] = row
        return kept


class CachedEvaluator:
    """A `llmppl.support.runtime.Evaluator` of questions about the nodes of its trie; its limits are CachedTransformer's."""

    patient = False

    def __init__(
        self, engine: Engine, vocab: Vocabulary, cache_bytes: int, row_bytes: int | None, max_batch_tokens: int
    ) -> None:
        self.engine, self.vocab, self.max_batch_tokens = engine, vocab, max_batch_tokens
        self.slots = engine if isinstance(engine, SlotEngine) else None
        self.store = Store(cache_bytes, self.slots, row_bytes)
        if type(engine).release is not Engine.release:
            self.store.released = []
        self.exclusive = Exclusive(self._renew, "a language model")
        self.trie = Trie(vocab.tokens, self.store, self.exclusive)
        self._done: dict[int, Stats] = {}
        self._thread = _Thread(self._done)
        self._ran: list[Node] = []                      # whose slots the round under way has written
        self._ids: dict[Node | None, list[int]] = {}    # the tokens of what was run whole, last round
        self._new_ids: dict[Node | None, list[int]] = {}                # and in this one
        self._round = 0
        self._unknown = np.flatnonzero(~vocab.known)
        self._scores = type(engine).log_probs is not Engine.log_probs and engine.size == len(vocab) - len(self._unknown)
        self._warned, self._cache_bytes = False, cache_bytes
        self._keeper: Any = None
        self._replaced = False
        before = _EVALUATORS.get(engine)
        if before is not None:
            before.exclusive(before.replace)
        engine.clear()                                  # of one before that is gone
        self._version = engine.version()
        _EVALUATORS[engine] = self

    def replace(self) -> None:
        """Another evaluator has the engine from now on."""
        self._replaced = True

    @property
    def stats(self) -> Stats:
        """Of all that was ever run, in every thread; a copy."""
        return sum(list(self._done.values()), Stats())

    def done(self) -> Stats:
        """What was run for the calling thread; a copy."""
        return replace(self._thread.stats)

    def begin(self) -> None:
        """Forget all that is cached if the weights have changed."""
        version = self.engine.version()
        if version != self._version:
            self.clear()
            self._version = version                     # not before: an interrupt leaves it to the next run

    def clear(self) -> None:
        """Forget all that is cached; the contexts that live stay."""
        self.exclusive(self._renew)

    def cached(self, question: Question) -> Any | None:
        """The cached answer, or None. It is right whenever it is there, so no thread waits for another."""
        node, *after = question
        if not after:
            row = node.row
            if row is not None:
                self.store.touch_row(node)
                self._thread.stats.hits += 1
            return row
        log_probs = [child.log_prob for child in after]
        if None in log_probs:
            return None
        self._thread.stats.hits += 1
        return log_probs

    def prefetch(self, asker: object, context: Any) -> None:
        """Compute the row of `context` in this thread's next round, if it and `asker` live until then."""
        self._thread.prefetches.append((weakref.ref(asker), weakref.ref(context)))

    def evaluate(self, questions: list[Question]) -> list[Any]:
        """Rows and log-probabilities, with everything that this thread has prefetched since its last round."""
        prefetches, self._thread.prefetches = self._thread.prefetches, []
        answers: list[Any] = self.exclusive(self._evaluate, questions, prefetches)
        return answers

    def _evaluate(self, questions: list[Question], prefetches: list[_Prefetch]) -> list[Any]:
        if self._replaced:
            raise RuntimeError(
                f"{self.engine.name or type(self.engine).__name__} was given to another CachedTransformer, and what it "
                "keeps is that one's: share the CachedTransformer, which any number of programs and threads may use"
            )
        start = perf_counter()
        self._round += 1
        self.trie.settle()                              # and not again before the round ends: its nodes stay
        self._release()
        alive = [context() for asker, context in prefetches if asker() is not None]
        wanted = _Wanted(itertools.chain(questions, [(each.node,) for each in alive if each is not None]))
        for node, row in [(node, node.row) for node in wanted.children if node.row is not None]:
            wanted.found(node, row)
        computed = len(wanted.children)
        if self._scores:
            self._score([question for question in questions if len(question) > 2], wanted)
        while wanted.children:
            self._forward(wanted)
        self._ran.clear()
        self._ids = self._new_ids
        self._new_ids = {}
        stats = self._thread.stats
        stats.rounds += 1
        stats.rows += computed
        stats.hits += max(0, len(questions) - computed)
        stats.seconds_lm += perf_counter() - start
        return [[child.log_prob for child in after] if after else wanted.rows[node] for node, *after in questions]

    def _release(self) -> None:
        """Tell the engine which contexts nobody holds any more."""
        if self.store.released:
            released, self.store.released = self.store.released, []
            self.engine.release([node.tokens() for node in released if not node.live])

    # ---- what an unfinished round leaves

    def _forget(self) -> None:
        """Give up what this round has run, which is not known to be right; all else is."""
        for node in self._ran:
            if node.slot >= 0:
                self.store.forget(node)
        self._ran.clear()
        self.engine.clear()
        self.exclusive.in_order()

    def _renew(self) -> None:
        """Forget all that is cached; the contexts that live stay."""
        self._ran.clear()
        self.engine.clear()
        self.store.clear()
        self.trie.renew()

    # ---- forward passes

    def _forward(self, wanted: _Wanted) -> None:
        """Run one forward pass towards what is wanted, and hand out what it answers."""
        if self.slots is None:
            self._run_whole(self.engine, wanted)
            return
        chains = self._fitting(self._chains(wanted.children))
        if chains:
            self._run(self.slots, chains, wanted)
            return
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"cache_bytes={self._cache_bytes} does not hold a context of "
                f"{max(node.depth for node in wanted.children)} tokens at {self.slots.slot_bytes} bytes each; such "
                "contexts are recomputed from their start",
                stacklevel=2,
            )
        self._run_whole(self.slots, wanted)

    def _chains(self, needs: Iterable[Node]) -> list[Chain]:
        """What has to run now: runs of new nodes that each continue a node with a slot (or the root)."""
        claimed: set[Node] = set()
        chains = []
        for end in sorted(needs, key=lambda node: -node.depth):
            chain, node = [], end
            while node not in claimed and node.parent is not None and (node.slot < 0 or node is end):
                chain.append(node)                      # `end` has a slot if its row was given up: it is run again
                node = node.parent
            if chain and node not in claimed:
                chain = chain[::-1][: self.max_batch_tokens]
                claimed.update(chain)
                chains.append(chain)
        return chains

    def _fitting(self, chains: list[Chain]) -> list[Chain]:
        """The first chains that go together into one pass and into the store; none if not even one does."""
        first, *others = chains                         # the first need always gets on, so that all are answered
        group, longest = [first], first[-1].depth
        for chain in sorted(others, key=len, reverse=True):
            deepest = max(longest, chain[-1].depth)
            alike = max(len(first), len(chain)) <= 2 * min(len(first), len(chain))
            if alike and (len(group) + 1) * deepest <= self.max_batch_tokens:
                group.append(chain)
                longest = deepest
        while group:
            wanted = sum(node.slot < 0 for node in itertools.chain(*group))
            if self.store.make_room(wanted, keep=[chain[-1] for chain in group]) >= wanted:
                return group
            group = group[: len(group) // 2]
        return []

    def _run(self, engine: SlotEngine, chains: list[Chain], wanted: _Wanted) -> None:
        """One forward pass over `chains`, each of which continues the parent of its first node."""
        lengths = np.array([len(chain) for chain in chains])
        starts = np.array([chain[0].depth - 1 for chain in chains])
        tokens = np.zeros((len(chains), int(lengths.max())), dtype=np.int64)
        asked: dict[Node, tuple[int, int]] = {}
        for i, chain in enumerate(chains):
            tokens[i, : len(chain)] = [node.token for node in chain]
            asked |= {node: (i, j) for j, node in enumerate(chain) if node in wanted.children}
        slots = self._take_slots(chains)
        self._answer(lambda: engine.run(Batch(tokens, starts, lengths, slots, list(asked.values()))), asked, wanted)
        for chain in chains:
            chain[-1].used = self._round

    def _run_whole(self, engine: Engine, wanted: _Wanted) -> None:
        """One call over whole contexts, of which the engine may keep what it likes: the shortest first."""
        most = max(1, _MAX_ANSWER // (4 * len(self.vocab)))
        needs = sorted(wanted.children, key=lambda node: node.depth)[:most]
        least, among = needs[0].depth, set(needs)
        contexts: list[list[int]] = []
        asked: dict[Node, tuple[int, int]] = {}
        for end in sorted(needs, key=lambda node: -node.depth):
            if end in asked:                            # on the way to a longer one
                continue
            before = self._ids.get(end.parent)
            ids = self._new_ids[end] = end.tokens() if before is None else [*before, end.token]
            asked[end] = len(contexts), end.depth
            node = end
            while node.depth > least:                   # what is asked on its way, and no longer one has on its own
                node = node.parent                      # type: ignore[assignment]   # only the root has none
                if node in among:
                    asked.setdefault(node, (len(contexts), node.depth))
            contexts.append(ids)
        self._answer(lambda: engine.forward(contexts, list(asked.values())), asked, wanted)

    def _score(self, strings: list[Question], wanted: _Wanted) -> None:
        """Have the engine itself say how probable given tokens are, where no row is wanted and it has a way for it."""
        starts: dict[Node, int] = {}
        for string in strings:
            missing = [child.depth - 1 for child in string[1:] if child.log_prob is None and child.depth > 1]
            if missing:
                starts[string[-1]] = min(missing[0], starts.get(string[-1], missing[0]))
        if not starts:
            return
        found = self._run_engine(lambda: self.engine.log_probs([end.tokens() for end in starts], list(starts.values())))
        for end, log_probs in zip(starts, found or [], strict=found is not None):
            for node, log_prob in zip(end.path(), reversed(log_probs.tolist()), strict=False):
                if node.log_prob is None:
                    node.log_prob = log_prob
        for parent in list(wanted.children):
            wanted.children[parent] = [child for child in wanted.children[parent] if child.log_prob is None]
            if not wanted.children[parent] and parent not in wanted.rows:
                del wanted.children[parent]

    def _run_engine(self, run: Callable[[], Any]) -> Any:
        """What a call of the engine answers; it is counted, and if it fails, what the round has run is given up."""
        before = self.engine.tokens
        try:
            answer = run()
        except Exception:                               # the model's own, or it gave no distribution
            self._forget()
            raise
        self._thread.stats.tokens += self.engine.tokens - before
        return answer

    def _answer(self, run: Callable[[], Any], asked: Iterable[Node], wanted: _Wanted) -> None:
        """Run a pass, and hand out what it tells of the nodes it was asked for."""
        rows: list[Table] = self._run_engine(lambda: self._rows(run(), list(asked), wanted))
        for node, row in zip(asked, rows, strict=True):
            if wanted.found(node, row):
                self.store.put_row(node, row)

    def _take_slots(self, chains: list[Chain]) -> NDArray[np.int64]:
        """(B, T) slots of the whole context of each chain, right-padded with its first; new ones for new nodes."""
        for node in itertools.chain(*chains):
            self._ran.append(node)
            if node.slot < 0:
                self.store.take(node)
        new = [[node.slot for node in chain] for chain in chains]
        paths = {c[-1]: np.append(self.store.path_before(c[0]), slots) for c, slots in zip(chains, new, strict=True)}
        longest = max(map(len, paths.values()))
        slots = np.empty((len(chains), longest), dtype=np.int64)
        for row, path in zip(slots, paths.values(), strict=True):
            row[: len(path)] = path
            row[len(path) :] = path[0]
        if len(self.store.paths) * longest > _MAX_PATHS:
            self.store.paths.clear()
        self.store.paths |= paths
        return slots

    def _rows(self, logits: Any, nodes: list[Node], wanted: _Wanted) -> Any:
        """Return the rows, a list of Table, of `nodes` from the model's output."""

        def told(place: int) -> str:
            tokens = b"".join(self.vocab.tokens[i] for i in nodes[place].tokens())
            return f"Context({shown(tokens.decode('utf-8', 'replace'))})"

        if isinstance(logits, np.ndarray):
            return array_rows(logits, len(self.vocab), self._unknown, told)
        tokens = [[child.token for child in wanted.children[node]] for node in nodes]
        return self._device().rows(logits, told, tokens, [wanted.kept(node) for node in nodes])

    def _device(self) -> Any:
        """Return the evaluator of rows that are tensors."""
        if self._keeper is None:
            from llmppl.lm.device import Device

            masks = max(0, min(self._cache_bytes // 64, self._cache_bytes - self.store.slab_bytes))
            self.store.budget -= masks                  # theirs now
            self._keeper = Device(lambda: self._thread.stats, len(self.vocab), self._unknown, masks)
        return self._keeper
