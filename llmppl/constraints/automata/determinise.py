"""Deterministic automata whose states are computed on demand: a growing table of next states.

States are small integers; 0 is the dead state. The row of a state, its 256 next states, is computed when it is first
needed. The automaton never returns a state from which nothing is accepted, so a text that avoids 0 can always be
completed. A state stands for a key: a set of NFA states, or of *threads*, that a text leads to. `Subsets` follows all
NFA states at once and serves NFAs without guards. `Threads` follows NFA states with pending lookaheads, either in order
of preference or as a set.

Sources: Rabin & Scott (1959), for the subset construction; Cox (2010), "Regular expression matching in the wild", for
leftmost-first automata.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from llmppl import native
from llmppl.constraints.automata.budget import MAX_PARTS, MAX_STATES, TooLarge
from llmppl.constraints.automata.native_rows import NativeRows, first_rows
from llmppl.constraints.automata.nfa import ACCEPT, DEAD, FOUND, NFA, Behind
from llmppl.constraints.automata.operations import Edge, Table, first_bytes, runs
from llmppl.constraints.constraint import Bools
from llmppl.support.arguments import shown
from llmppl.support.graphs import Memo, reachable
from llmppl.support.locks import Lock, locked
from llmppl.support.shared import Shared


class Thread(NamedTuple):
    """An NFA state, its pending lookaheads, and for a match that waits for them, the number of bytes since it ended."""

    state: int
    pending_lookaheads: Lookaheads = frozenset()
    since: int = 0


Lookahead = tuple[
    bool, frozenset[Thread]
]  # True: one of the threads must reach FOUND; False: none may
Lookaheads = frozenset[Lookahead]
Context = tuple[int, ...]  # the state of every tracker
Facts = tuple[bool, ...]  # for every tracker, whether it accepts
Key = tuple[int, ...]


class Subsets:
    """Subset construction (Rabin & Scott) for an NFA without guards.

    A key is the sorted set of NFA states that a text leads to. Python's collector of garbage visits members of
    frozensets again and again, and those of tuples of integers once.
    """

    def __init__(self, nfa: NFA, start: Iterable[int]) -> None:
        self.nfa = nfa
        self.start = _key(start)
        self._unions = Memo(self._union)

    def accepts(self, key: Key) -> bool:
        return ACCEPT in key

    def moves(self, key: Key) -> list[tuple[int, int, Key]]:
        found = [edges for edges in map(self.nfa.edges, key) if edges]
        if len(found) == 1:
            return [(lo, hi, self._unions[(target,)]) for lo, hi, target in found[0]]
        num_edges = sum(map(len, found))
        self.nfa.budget.spend(steps=8 * len(found) + 3 * num_edges)
        events: dict[
            int, list[tuple[int, int]]
        ] = {}  # byte -> targets that start (1) or stop (-1) there
        for lo, hi, target in itertools.chain(*found):
            events.setdefault(lo, []).append((target, 1))
            events.setdefault(hi + 1, []).append((target, -1))
        active: dict[int, int] = {}
        before = 0
        moves = []
        for byte in sorted(events):
            if active:
                targets = tuple(sorted(active))
                moves.append((before, byte - 1, self._unions[targets]))
            for target, sign in events[byte]:
                active[target] = active.get(target, 0) + sign
                if not active[target]:
                    del active[target]
            before = byte
        return moves

    def _union(self, targets: tuple[int, ...]) -> Key:
        closures = list(map(self.nfa.closure, targets))
        num_members = sum(map(len, closures))
        self.nfa.budget.spend(steps=len(targets) + num_members)
        return _key(itertools.chain(*closures))


def _key(states: Iterable[int]) -> Key:
    return tuple(sorted(set(states)))


class Threads:
    """The subset construction for an NFA with guards, in order of preference (leftmost first) or as a set.

    A key is (threads, context). The trackers of `Behind` guards advance once for all threads, since every thread reads
    the same text. A positive lookahead is dropped when one of its threads reaches FOUND, and kills its owner when no
    thread is left. A negative one does the opposite. Of two threads in one state, the one with more lookaheads is
    dropped if it has all lookaheads of the other.
    """

    def __init__(self, nfa: NFA, ordered: bool = False) -> None:
        nfa.settle()
        self.nfa = nfa
        self.ordered = ordered
        self.needs_lookahead = False  # True once a match had to wait for the text after it
        trackers = []
        for guard in nfa.guards.values():
            if isinstance(guard, Behind):
                trackers.append(guard.tracker)
        self.trackers = list(dict.fromkeys(trackers))
        context = tuple(tracker.start for tracker in self.trackers)
        self._closures = Memo(self._close)
        self.start = (self._settle(self.closure(nfa.start, context)), context)

    def closure(self, state: int, context: Context) -> tuple[Thread, ...]:
        """Return the threads that `state` becomes without reading, after text that led to `context`, in order."""
        facts = []
        for tracker, at in zip(self.trackers, context, strict=True):
            facts.append(tracker.accepts(at))
        return self._closures[state, tuple(facts)]

    def _close(self, key: tuple[int, Facts]) -> tuple[Thread, ...]:
        state, facts = key
        seen = set()
        order = []
        stack = [] if state == DEAD else [Thread(state)]
        while stack:
            thread = stack.pop()
            self.nfa.budget.spend(steps=50 + 5 * len(thread.pending_lookaheads))
            if thread in seen:
                continue
            seen.add(thread)
            guard = self.nfa.guards.get(thread.state)
            pending = thread.pending_lookaheads
            if isinstance(guard, Behind):
                if facts[self.trackers.index(guard.tracker)] != guard.positive:
                    continue
            elif guard is not None:
                added = self._lookahead(guard.positive, self._closures[guard.entry, facts])
                if added is None:
                    continue
                pending |= added
            choices = self.nfa.epsilon[thread.state]
            if not choices:
                order.append(thread)
            for choice in reversed(choices):
                stack.append(Thread(choice, pending))
        return tuple(order)

    def _lookahead(self, positive: bool, threads: Iterable[Thread]) -> Lookaheads | None:
        """Return {the lookahead that one thread (none, unless `positive`) reaches FOUND}.

        Returns the empty set if that already holds, and None if it cannot hold any more.
        """
        kept = self._prune(threads)
        found = Thread(FOUND) in kept
        if kept and not found:
            return frozenset([(positive, frozenset(kept))])
        if found == positive:
            return frozenset()
        return None

    def _prune(self, threads: Iterable[Thread]) -> list[Thread]:
        """Drop threads whose lookaheads include those of another thread in the same state."""
        kept = []
        least = dict[int, list[Lookaheads]]()
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
        kept = []
        for thread in dict.fromkeys(threads):
            kept.append(thread)
            if thread.state == ACCEPT and not thread.pending_lookaheads:
                break
        return tuple(kept)

    def _advance(self, threads: Iterable[Thread], byte: int, context: Context) -> Iterator[Thread]:
        """Yield the threads after one more byte, where `context` is the trackers' state after that byte."""
        for state, pending, since in threads:
            self.nfa.budget.spend(steps=30)
            after = self._read(state, byte, context)
            if pending and (
                state == FOUND or (state == ACCEPT and self.ordered)
            ):  # it waits for its lookaheads
                after = (Thread(state, since=since + (state == ACCEPT)),)
            if not after:
                continue
            rest = self._advance_lookaheads(pending, byte, context)
            if rest is None:
                continue
            self.nfa.budget.spend(steps=len(after) * (10 + 5 * len(rest)))
            for target, new, count in after:
                yield Thread(target, new | rest, count)

    def _read(self, state: int, byte: int, context: Context) -> tuple[Thread, ...]:
        for lo, hi, target in self.nfa.edges(state):
            if lo <= byte <= hi:
                return self.closure(target, context)
        return ()

    def _advance_lookaheads(
        self, pending: Lookaheads, byte: int, context: Context
    ) -> Lookaheads | None:
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
        for positive, threads in pending:
            found = [thread for thread in threads if thread.state == FOUND]
            if positive != any(self.holds(thread.pending_lookaheads) for thread in found):
                return False
        return True

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
            cuts.update(first_bytes(tracker.row(state)))
        for lo, hi in itertools.pairwise(sorted(cuts)):
            steps = [
                tracker.step(state, lo) or 0
                for tracker, state in zip(self.trackers, context, strict=True)
            ]
            after = tuple(steps)
            rest = self._settle(self._advance(threads, lo, after))
            if rest:
                yield lo, hi - 1, (rest, after)


def _threads_ahead(thread: Thread) -> Iterable[Thread]:
    """Return the threads of the pending lookaheads of a thread."""
    return itertools.chain(*(threads for _, threads in thread.pending_lookaheads))


def unguarded(nfa: NFA, threads: Collection[Thread]) -> bool:
    """Return whether the threads have no pending lookahead and can reach no guard."""

    def after(state: int) -> list[int]:
        return [*nfa.epsilon[state], *[target for _, _, target in nfa.edges(state)]]

    if any(thread.pending_lookaheads for thread in threads):
        return False
    states = reachable([thread.state for thread in threads], after)
    return nfa.guards.keys().isdisjoint(states)


class Machine(Shared):
    """Deterministic automaton that numbers its states in the order of their discovery; 0 is the dead state.

    Each new state spends the budget of the NFA (TooLarge).
    """

    def __init__(self, source: Any) -> None:
        self._fix(np.zeros((16, 256), np.int32), np.zeros(16, bool), 0)
        self._source: Any = source
        self._budget = source.nfa.budget
        self._keys: list[Any] = [None]
        self._ready[1:] = False
        self.start = self._add(source.start)

    def _fix(self, table: Table, accepting: Bools, start: int) -> None:
        """Set the complete arrays of an automaton, so that nothing remains to be computed."""
        self._source = None
        self._keys = [None] * len(table)
        self._numbers: dict[Any, int] = {}
        self._table = table
        self._accepting = accepting
        self._ready = np.ones(len(table), bool)
        self.start = start
        self._lock = Lock()
        self._rows: NativeRows | None = None  # if C makes the rows

    def __getstate__(
        self,
    ) -> dict[str, Any]:  # C begins anew in another process, with the same states
        state: dict[str, Any] = dict(super().__getstate__())  # type: ignore[call-overload]
        rows = self._rows
        if rows is not None:
            size = rows.arrays.num_states
            keys = [rows.set_of(number) for number in range(1, size)]
            state["_rows"] = None
            state["_keys"] = [None, *keys]
            state["_numbers"] = {key: number for number, key in enumerate(keys, 1)}
            for name in ("_table", "_ready", "_accepting"):
                state[name] = state[name][:size].copy()
        return state

    def native_rows(self) -> Beside | None:
        """Return the automaton as C reads it, if C makes its rows."""
        return Beside(self) if self._is_in_c() else None

    @locked
    def _is_in_c(self) -> bool:
        """Return True if C makes the rows; this is decided before the first one."""
        if self._rows is not None:
            return True
        library = native.library()
        is_new = len(self._keys) == 2 and not self._ready[1]
        if library is None or not is_new or not isinstance(self._source, Subsets):
            return False
        rows = first_rows(library, self._source.nfa, self._source.start, self._budget.left())
        if rows is not None:
            self._adopt(rows)
        return rows is not None

    def _adopt(self, rows: NativeRows) -> None:
        """Replace all arrays, by one call that no interrupt divides."""
        self.__dict__.update(
            _rows=rows, _table=rows.table, _ready=rows.ready, _accepting=rows.accepting
        )

    @locked
    def provide(self, status: int) -> None:
        """Provide the room that a function in C has missed; raise TooLarge if the budget is spent."""
        assert self._rows is not None
        self._settle()
        if status in (native.STATES, native.MEMBERS):
            self._adopt(self._rows.longer(status))
        elif status == native.STATES_SPENT:
            self._budget.spend(states=1)
        else:
            self._budget.spend(steps=1)

    def _settle(self) -> None:
        """Spend the budget that C has spent."""
        assert self._rows is not None
        subsets = self._rows.subsets
        left = self._budget.left()
        states = max(0, left[0] - subsets.states_left)
        steps = max(0, left[1] - subsets.steps_left)
        if states or steps:
            self._budget.spend(states, steps)

    def _run(self, name: str, *arguments: Any) -> None:
        """Run a function in C until it is done."""
        status = None
        while status != native.DONE:
            rows = self._rows
            assert rows is not None
            status = getattr(rows.library, name)(ctypes.byref(rows.arrays), *arguments)
            if status != native.DONE:
                self.provide(status)
        self._settle()

    @property
    def _size(self) -> int:
        """Number of known states, with the dead one."""
        if self._rows is None:
            return len(self._keys)
        return int(self._rows.arrays.num_states)

    @property
    def table(self) -> Table:
        """(S, 256) int32 ndarray, for the S known states: `table[state, byte]` is the next state if `ready[state]`."""
        return self._table[: self._size]

    @property
    def ready(self) -> Bools:
        """(S,) bool ndarray: True where the row of `table` is computed."""
        return self._ready[: self._size]

    @property
    def accepting(self) -> Bools:
        """(S,) bool ndarray: True for accepting states."""
        return self._accepting[: self._size]

    def accepts(self, state: int) -> bool:
        """Return whether a text that leads to `state` is in the language."""
        return bool(self._accepting[state])

    def _add(self, key: Any) -> int:
        """Number a new key, and return its number."""
        self._budget.spend(states=1)
        number = len(self._keys)
        if number == len(self._ready):
            self._accepting = _doubled(self._accepting)
            self._table = _doubled(self._table)
            self._ready = _doubled(self._ready)
        self._accepting[number] = self._source.accepts(key)
        self._keys.append(key)
        self._numbers[key] = number
        return number

    @property
    def num_states(self) -> int:
        """Number of known states, without the dead one; after `explore`, of all states."""
        return self._size - 1

    def explore(self, limit: int | None = None) -> Self:
        """Compute every row, and return the automaton. Raises TooLarge (a ValueError) above `limit` states."""
        if self._is_in_c():
            self._explore_in_c(limit)
        state = 0
        while state < self._size:
            if not self._ready[state]:
                self.row(state)
            if limit is not None and self.num_states > limit:
                raise TooLarge(shown(self), f"more than {limit:,} states")
            state += 1
        return self

    @locked
    def _explore_in_c(self, limit: int | None) -> None:
        """Compute rows until there are more states than `limit`."""
        most = MAX_STATES if limit is None else min(limit, MAX_STATES)
        self._run("rows", ctypes.byref(ctypes.c_int32(1)), most)

    def edges(self) -> list[list[Edge]]:
        """Return for every state the edges (lo, hi, target) that do not lead to 0, ascending and disjoint."""
        table = self.explore().table
        state, lo = runs(table)
        if len(lo) > 3 * MAX_PARTS:
            raise TooLarge(
                shown(self),
                f"more than {3 * MAX_PARTS:,} edges",
                "fewer states (minimise()) would work",
            )
        hi = np.append(lo[1:] - 1, 255)
        hi[hi < 0] = 255
        rows: list[list[Edge]] = [[] for _ in table]
        target = table[state, lo]
        edges = np.stack([state, lo, hi, target], axis=1)
        for s, a, b, t in edges[target > 0].tolist():
            rows[s].append((a, b, t))
        return rows

    def row(self, state: int) -> Table:
        """Return the next state for every byte, 0 where the text cannot be completed: (256,) int32 array, read-only."""
        if not self._ready[state]:
            self._work_out(state)
        view: Table = self._table[state]
        view.flags.writeable = False
        return view

    @locked
    def _work_out(self, state: int) -> None:
        if self._ready[state]:  # by another thread
            return
        if self._is_in_c():
            self._run("row", state)
            return
        moves = []
        for lo, hi, key in self._source.moves(self._keys[state]):
            number = self._numbers.get(key) or self._add(key)
            moves.append((lo, hi, number))
        into = self._table[state]  # after numbering, which may replace the table
        for lo, hi, number in moves:
            into[lo : hi + 1] = number
        self._ready[state] = True
        self._keys[state] = None  # not needed again: `_numbers` has it

    def moves(self, state: int) -> list[Edge]:
        """Return the edges (lo, hi, target) that do not lead to 0, ascending and disjoint."""
        row = self.row(state)
        cuts = [*first_bytes(row), 256]
        edges = []
        for lo, end in itertools.pairwise(cuts):
            target = row.item(lo)
            if target:
                edges.append((lo, end - 1, target))
        return edges

    def step(self, state: int, byte: int) -> int | None:
        """Return the state after one more byte, or None if no accepted string continues so."""
        if not self._ready[state]:
            self._work_out(state)
        return self._table.item(state, byte) or None

    def after(self, state: int, data: bytes) -> int:
        """Return the state after more bytes, or 0 if no accepted string continues so."""
        for byte in data:
            state = self.step(state, byte) or 0
            if not state:
                break
        return state


class Leftmost(Machine):
    """Machine over bytes that finds the match of `re.match(pattern, text)` while it reads to the right.

    Follow `start` and `step(state, byte)` until None. After each byte, `matched(state)` tells whether a match is now
    known, which replaces every earlier one. `re` reports the last known match when the machine is dead, or
    `at_end(state)` where the text ends. Look-behind sees the text from where the machine started.
    """

    def __init__(self, nfa: NFA) -> None:
        self._matched: list[int | None] = [None]
        self._at_end: list[int | None] = [None]
        self._threads = Threads(nfa, ordered=True)
        super().__init__(self._threads)
        if nfa.start == DEAD:
            self.start = 0

    def _add(self, key: Any) -> int:
        """Number a new key, and return its number. Stores its answers for `matched` and `at_end`."""
        accepted = [thread for thread in key[0] if thread.state == ACCEPT]
        sure = (thread.since for thread in accepted if not thread.pending_lookaheads)
        held = (
            thread.since for thread in accepted if self._threads.holds(thread.pending_lookaheads)
        )
        number = len(self._keys)
        self._matched[number:] = [next(sure, None)]  # overwrites the leftovers of an interrupt
        self._at_end[number:] = [next(held, None)]
        return super()._add(key)

    def matched(self, state: int) -> int | None:
        """Return how many bytes before `state` a newly known match ended, or None."""
        return self._matched[state]

    def at_end(self, state: int) -> int | None:
        """Return how many bytes before its end a text that ends at `state` has its match; None keeps the last match."""
        return self._at_end[state]


class Beside:
    """Automaton beside which C reads a trie, and whose rows C makes."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.lock = machine._lock.lock

    @property
    def arrays(self) -> native.Automaton:
        assert self._machine._rows is not None
        return self._machine._rows.arrays

    def provide(self, status: int, number: int, byte: int, /) -> None:
        self._machine.provide(status)


def _doubled(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array with as many zeros appended, which take no memory until they are written."""
    longer = np.zeros((2 * len(array), *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
