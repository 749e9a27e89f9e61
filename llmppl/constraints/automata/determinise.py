"""What a text leads to in an NFA: sets of its states, or threads that still owe something.

These are the keys of which `llmppl.constraints.automata.lazy_dfa` makes the states of deterministic automata: `Subsets` follows all
states at once where there are no guards, and `Threads` follows them with their obligations, in order or as a set.

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
from llmppl.support.graphs import Memo, reached

__all__ = ["Subsets", "Thread", "Threads", "unguarded"]


class Thread(NamedTuple):
    """An NFA state, the obligations it still owes, and, if it has matched and waits for them, for how many bytes."""

    state: int
    owes: Owes = frozenset()
    since: int = 0


Obligation = tuple[bool, frozenset[Thread]]         # positive: one of the threads must reach FOUND; else none may
Owes = frozenset[Obligation]
Context = tuple[int, ...]                           # the state of every tracker
Facts = tuple[bool, ...]                            # whether each tracker accepts
Key = int | frozenset[int]


class Subsets:
    """Rabin & Scott: the set of NFA states that a text leads to, for an NFA without guards.

    A key is such a set, or the state itself where it is one.
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
        """The moves of states with any edges."""
        events: dict[int, list[tuple[int, int]]] = {}       # byte -> targets that begin (1) or end (-1) there
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
    """Threads with obligations: the same construction for an NFA with guards, in order (leftmost first) or without.

    A key is (threads, context). Every thread reads the same text, so trackers run beside them, once for all. A
    positive obligation is dropped when one of its threads reaches FOUND, and kills its owner when none is left; a
    negative one the other way round. A thread that owes more than another in the same state is not kept.
    """

    def __init__(self, nfa: NFA, ordered: bool = False) -> None:
        nfa.settle()
        self.nfa, self.ordered = nfa, ordered
        self.pending = False                        # whether some match had to wait for the text after it
        behinds = [guard.tracker for guard in nfa.guards.values() if isinstance(guard, Behind)]
        self.trackers = list(dict.fromkeys(behinds))
        context = tuple(tracker.start for tracker in self.trackers)
        self._closures = Memo(self._close)
        self.start = (self._settle(self.closure(nfa.start, context)), context)

    def closure(self, state: int, context: Context) -> tuple[Thread, ...]:
        """What `state` becomes without reading, where `context` is what came before, most preferred first."""
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
            guard, owes = self.nfa.guards.get(thread.state), thread.owes
            if isinstance(guard, Behind):
                if facts[self.trackers.index(guard.tracker)] != guard.positive:
                    continue
            elif guard is not None:
                more = self._owe(guard.positive, self._closures[guard.entry, facts])
                if more is None:
                    continue
                owes |= more
            elif not self.nfa.epsilon[thread.state]:
                order.append(thread)
            stack.extend(Thread(choice, owes) for choice in reversed(self.nfa.epsilon[thread.state]))
        return tuple(order)

    def _owe(self, positive: bool, threads: Iterable[Thread]) -> Owes | None:
        """The obligation that one (no) thread reaches FOUND, as a set: empty if it is met, None if it cannot be."""
        kept = self._prune(threads)
        met = Thread(FOUND) in kept
        if kept and not met:
            return frozenset(((positive, frozenset(kept)),))
        return frozenset() if met == positive else None

    def _prune(self, threads: Iterable[Thread]) -> list[Thread]:
        """The threads that owe least, of those in the same state."""
        kept, least = list[Thread](), dict[int, list[Owes]]()
        for state, owes, _ in sorted(threads, key=lambda thread: len(thread.owes)):
            rest = least.setdefault(state, [])
            if not any(other <= owes for other in rest):
                rest.append(owes)
                kept.append(Thread(state, owes))
        return kept

    def _settle(self, threads: Iterable[Thread]) -> frozenset[Thread] | tuple[Thread, ...]:
        """The threads worth following: in order, and none after a match that is certain; or all, as a set."""
        if not self.ordered:
            return frozenset(self._prune(threads))
        kept = tuple(dict.fromkeys(threads))
        ends = (end for end, thread in enumerate(kept, 1) if thread.state == ACCEPT and not thread.owes)
        return kept[: next(ends, None)]

    def _advance(self, threads: Iterable[Thread], byte: int, context: Context) -> Iterator[Thread]:
        """The threads after one more byte, where `context` holds after it."""
        for state, owes, since in threads:
            self.nfa.budget.spend(steps=20)
            if state == FOUND or (state == ACCEPT and self.ordered):    # it only waits for its obligations
                after = (Thread(state, since=since + (state == ACCEPT)),) * bool(owes)
            else:
                after = ()
                for lo, hi, target in self.nfa.edges(state):
                    if lo <= byte <= hi:
                        after = self.closure(target, context)
                        break
            rest = self._pay(owes, byte, context) if after else None
            if rest is not None:
                yield from (Thread(new.state, new.owes | rest, new.since) for new in after) if rest else after

    def _pay(self, owes: Owes, byte: int, context: Context) -> Owes | None:
        """The obligations after one more byte; None if one of them can no longer be met."""
        left: Owes = frozenset()
        for positive, threads in owes:
            rest = self._owe(positive, self._advance(threads, byte, context))
            if rest is None:
                return None
            left |= rest
        return left

    def holds(self, owes: Owes) -> bool:
        """Whether the obligations are met if the text ends here."""
        return all(
            positive == any(thread.state == FOUND and self.holds(thread.owes) for thread in threads)
            for positive, threads in owes
        )

    def accepts(self, key: Any) -> bool:
        owed = [thread.owes for thread in key[0] if thread.state == ACCEPT]
        self.pending |= any(owed)
        return any(map(self.holds, owed))

    def moves(self, key: Any) -> Iterator[tuple[int, int, Any]]:
        threads, context = key
        cuts = {0, 256}
        for state, _, _ in reached(threads, lambda thread: itertools.chain(*(inner for _, inner in thread.owes))):
            for lo, hi, _ in self.nfa.edges(state):
                cuts |= {lo, hi + 1}
        for tracker, state in zip(self.trackers, context, strict=True):
            cuts.update((np.flatnonzero(np.diff(tracker.row(state))) + 1).tolist())
        for lo, hi in itertools.pairwise(sorted(cuts)):
            after = tuple(tracker.step(state, lo) or 0 for tracker, state in zip(self.trackers, context, strict=True))
            rest = self._settle(self._advance(threads, lo, after))
            if rest:
                yield lo, hi - 1, (rest, after)


def unguarded(nfa: NFA, threads: Collection[Thread]) -> bool:
    """Whether the threads owe nothing and no guard is met from them on."""


    def after(state: int) -> list[int]:
        return [*nfa.epsilon[state], *(target for _, _, target in nfa.edges(state))]

    owes_nothing = not any(thread.owes for thread in threads)
    return owes_nothing and nfa.guards.keys().isdisjoint(reached((thread.state for thread in threads), after))
