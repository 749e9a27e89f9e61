"""Keys of deterministic states: the sets of NFA states, or of threads, that a text leads to.

`lazy_dfa` numbers these keys as states of a deterministic automaton. `Subsets` follows all NFA states at once and
serves NFAs without guards. `Threads` follows *threads*, which are NFA states with pending lookaheads, either in order
of preference or as a set.

Sources: Rabin & Scott (1959), for the subset construction; Cox (2010), "Regular expression matching in the wild", for
leftmost-first automata.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from llmppl.constraints.automata.nfa import ACCEPT, DEAD, FOUND, NFA, Behind
from llmppl.constraints.automata.operations import Edge
from llmppl.support.graphs import Memo, reachable

__all__ = ["Subsets", "Thread", "Threads", "unguarded"]


class Thread(NamedTuple):
    """An NFA state, its pending lookaheads, and for a match that waits for them, the number of bytes since it ended."""

    state: int
    pending_lookaheads: Lookaheads = frozenset()
    since: int = 0


Lookahead = tuple[bool, frozenset[Thread]]          # True: one of the threads must reach FOUND; False: none may
Lookaheads = frozenset[Lookahead]
Context = tuple[int, ...]                           # the state of every tracker
Facts = tuple[bool, ...]                            # for every tracker, whether it accepts
Key = int | frozenset[int]


class Subsets:
    """Subset construction (Rabin & Scott) for an NFA without guards.

    A key is the set of NFA states that a text leads to, or the state itself if the set has one member.
    """

    def __init__(self, nfa: NFA, start: Iterable[int]) -> None:
        self.nfa = nfa
        self.start = _key(start)
        self._singles = Memo(self._single)
        self._unions = Memo(self._union)

    def accepts(self, key: Key) -> bool:
        return ACCEPT in _states(key)

    def moves(self, key: Key) -> list[tuple[int, int, Key]]:
        found = [edges for q in _states(key) if (edges := self.nfa.edges(q))]
        if len(found) == 1:
            epsilon = self.nfa.epsilon
            return [(lo, hi, self._singles[t] if epsilon[t] else t) for lo, hi, t in found[0]]
        if not found:
            return []
        self.nfa.budget.spend(steps=3 * sum(map(len, found)))
        found.sort(key=len)
        single: dict[int, list[int]] = {}           # byte -> targets of all but the longest, if they are of one byte
        for lo, hi, target in itertools.chain(*found[:-1]):
            if lo != hi:
                return self._swept(found)
            single.setdefault(lo, []).append(target)
        moves, bytes, epsilon = [], sorted(single), self.nfa.epsilon
        for lo, hi, target in found[-1]:
            alone = self._singles[target] if epsilon[target] else target
            for byte in bytes[bisect_left(bytes, lo) : bisect_right(bytes, hi)]:
                if lo < byte:
                    moves.append((lo, byte - 1, alone))
                moves.append((byte, byte, self._unions[frozenset((target, *single.pop(byte)))]))
                lo = byte + 1
            if lo <= hi:
                moves.append((lo, hi, alone))
        moves += [(byte, byte, self._unions[frozenset(targets)]) for byte, targets in single.items()]
        return sorted(moves, key=itemgetter(0))

    def _swept(self, found: Sequence[Sequence[Edge]]) -> list[tuple[int, int, Key]]:
        """Return the moves from states whose edges overlap in any way."""
        events: dict[int, list[tuple[int, int]]] = {}       # byte -> targets that start (1) or stop (-1) there
        for lo, hi, target in itertools.chain(*found):
            events.setdefault(lo, []).append((target, 1))
            events.setdefault(hi + 1, []).append((target, -1))
        active: dict[int, int] = {}
        before, moves = 0, list[tuple[int, int, Key]]()
        for byte in sorted(events):
            if active:
                moves.append((before, byte - 1, self._unions[frozenset(active)]))
            for target, sign in events[byte]:
                active[target] = active.get(target, 0) + sign
                if not active[target]:
                    del active[target]
            before = byte
        return moves

    def _single(self, target: int) -> Key:
        return _key(self.nfa.closure(target))

    def _union(self, targets: frozenset[int]) -> Key:
        self.nfa.budget.spend(steps=len(targets))
        return _key(itertools.chain(*map(self.nfa.closure, targets)))


def _key(states: Iterable[int]) -> Key:
    found = frozenset(states)
    return found if len(found) != 1 else next(iter(found))


def _states(key: Key) -> Iterable[int]:
    return (key,) if isinstance(key, int) else key


class Threads:
    """The subset construction for an NFA with guards, in order of preference (leftmost first) or as a set.

    A key is (threads, context). The trackers of `Behind` guards advance once for all threads, since every thread reads
    the same text. A positive lookahead is dropped when one of its threads reaches FOUND, and kills its owner when no
    thread is left. A negative one does the opposite. Of two threads in one state, the one with more lookaheads is
    dropped if it has all lookaheads of the other.
    """

    def __init__(self, nfa: NFA, ordered: bool = False) -> None:
        nfa.settle()
        self.nfa, self.ordered = nfa, ordered
        self.needs_lookahead = False                # True once a match had to wait for the text after it
        behinds = [guard.tracker for guard in nfa.guards.values() if isinstance(guard, Behind)]
        self.trackers = list(dict.fromkeys(behinds))
        context = tuple(tracker.start for tracker in self.trackers)
        self._closures = Memo(self._close)
        self.start = (self._settle(self.closure(nfa.start, context)), context)

    def closure(self, state: int, context: Context) -> tuple[Thread, ...]:
        """Return the threads that `state` becomes without reading, after text that led to `context`, in order."""
        return self._closures[state, tuple(t.accepts(at) for t, at in zip(self.trackers, context, strict=True))]

    def _close(self, key: tuple[int, Facts]) -> tuple[Thread, ...]:
        state, facts = key
        seen, order = set[Thread](), []
        stack = [Thread(state)] * (state != DEAD)
        while stack:
            thread = stack.pop()
            if thread in seen:
                continue
            seen.add(thread)
            guard, pending = self.nfa.guards.get(thread.state), thread.pending_lookaheads
            if isinstance(guard, Behind):
                if facts[self.trackers.index(guard.tracker)] != guard.positive:
                    continue
            elif guard is not None:
                added = self._lookahead(guard.positive, self._closures[guard.entry, facts])
                if added is None:
                    continue
                pending |= added
            elif not self.nfa.epsilon[thread.state]:
                order.append(thread)
            stack.extend(Thread(choice, pending) for choice in reversed(self.nfa.epsilon[thread.state]))
        return tuple(order)

    def _lookahead(self, positive: bool, threads: Iterable[Thread]) -> Lookaheads | None:
        """Return {the lookahead that one thread (none, unless `positive`) reaches FOUND}.

        Returns the empty set if that already holds, and None if it cannot hold any more.
        """
        kept = self._prune(threads)
        found = Thread(FOUND) in kept
        if kept and not found:
            return frozenset(((positive, frozenset(kept)),))
        return frozenset() if found == positive else None

    def _prune(self, threads: Iterable[Thread]) -> list[Thread]:
        """Drop threads whose lookaheads include those of another thread in the same state."""
        kept, least = list[Thread](), dict[int, list[Lookaheads]]()
        for state, pending, _ in sorted(threads, key=lambda thread: len(thread.pending_lookaheads)):
            rest = least.setdefault(state, [])
            if not any(other <= pending for other in rest):
                rest.append(pending)
                kept.append(Thread(state, pending))
        return kept

    def _settle(self, threads: Iterable[Thread]) -> frozenset[Thread] | tuple[Thread, ...]:
        """Return the threads worth following: a pruned set, or in order up to the first match that has no lookahead."""
        if not self.ordered:
            return frozenset(self._prune(threads))
        kept = tuple(dict.fromkeys(threads))
        ends = (end for end, (state, pending, _) in enumerate(kept, 1) if state == ACCEPT and not pending)
        return kept[: next(ends, None)]

    def _advance(self, threads: Iterable[Thread], byte: int, context: Context) -> Iterator[Thread]:
        """Yield the threads after one more byte, where `context` is the trackers' state after that byte."""
        for state, pending, since in threads:
            self.nfa.budget.spend(steps=20)
            if state == FOUND or (state == ACCEPT and self.ordered):    # it only waits for its lookaheads
                after = (Thread(state, since=since + (state == ACCEPT)),) * bool(pending)
            else:
                after = ()
                for lo, hi, target in self.nfa.edges(state):
                    if lo <= byte <= hi:
                        after = self.closure(target, context)
                        break
            rest = self._advance_lookaheads(pending, byte, context) if after else None
            if rest:
                yield from (Thread(target, new | rest, since) for target, new, since in after)
            elif rest is not None:
                yield from after

    def _advance_lookaheads(self, pending: Lookaheads, byte: int, context: Context) -> Lookaheads | None:
        """Return the lookaheads after one more byte, or None if one of them failed."""
        left: Lookaheads = frozenset()
        for positive, threads in pending:
            rest = self._lookahead(positive, self._advance(threads, byte, context))
            if rest is None:
                return None
            left |= rest
        return left

    def holds(self, pending: Lookaheads) -> bool:
        """Return whether the lookaheads are satisfied if the text ends here."""
        return all(
            positive == any(thread.state == FOUND and self.holds(thread.pending_lookaheads) for thread in threads)
            for positive, threads in pending
        )

    def accepts(self, key: Any) -> bool:
        pending = [thread.pending_lookaheads for thread in key[0] if thread.state == ACCEPT]
        self.needs_lookahead |= any(pending)
        return any(map(self.holds, pending))

    def moves(self, key: Any) -> Iterator[tuple[int, int, Any]]:
        threads, context = key
        cuts = {0, 256}
        for state, _, _ in reachable(threads, _threads_ahead):
            for lo, hi, _ in self.nfa.edges(state):
                cuts |= {lo, hi + 1}
        for tracker, state in zip(self.trackers, context, strict=True):
            cuts.update((np.flatnonzero(np.diff(tracker.row(state))) + 1).tolist())
        for lo, hi in itertools.pairwise(sorted(cuts)):
            after = tuple(tracker.step(state, lo) or 0 for tracker, state in zip(self.trackers, context, strict=True))
            rest = self._settle(self._advance(threads, lo, after))
            if rest:
                yield lo, hi - 1, (rest, after)


def _threads_ahead(thread: Thread) -> Iterable[Thread]:
    """Return the threads of the pending lookaheads of a thread."""
    return itertools.chain(*(threads for _, threads in thread.pending_lookaheads))


def unguarded(nfa: NFA, threads: Collection[Thread]) -> bool:
    """Return whether the threads have no pending lookahead and can reach no guard."""

    def after(state: int) -> list[int]:
        return [*nfa.epsilon[state], *(target for _, _, target in nfa.edges(state))]

    nothing_pending = not any(thread.pending_lookaheads for thread in threads)
    return nothing_pending and nfa.guards.keys().isdisjoint(reachable((thread.state for thread in threads), after))
