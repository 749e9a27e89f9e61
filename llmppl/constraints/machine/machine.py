"""Machine: one recognizer for all constraints and their compositions.

A *unit* is a finite automaton over bytes; its states are numbers, and 0 is dead. A state may have *exits*: labels of
places where something else may follow without a byte. A unit says what follows an exit, given the continuation after
the unit. It is a graph (`llmppl.constraints.vocabulary.trie_walk.Graph`), so one walk of a trie serves all units.

A *continuation* says what follows an exit of a unit: the end of the text, another part, one more repetition, the rest
of a JSON container, the stack of a parser. A *hypothesis* is (unit, state, continuation). A *state* of the machine is
a closed set of hypotheses: it holds everything that exits lead to. It accepts if one of them leads to the end.

Masks, distances and values of parts are derived from these alone, once for all kinds of constraints.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from llmppl.constraints.constraint import Bools, Ints
from llmppl.constraints.vocabulary.trie_walk import Graph
from llmppl.support.graphs import Interned, Memo
from llmppl.support.locks import Lock, locked
from llmppl.support.shared import Shared

MAX_STEPS = 1 << 16  # that are kept
LOCK = Lock()  # one thread at a time uses machines, which share units
MAX_HYPOTHESES = 40_000  # hypotheses and continuations that are closed into one state


Exit = Hashable
DONE: Exit = "done"  # the exit where a text of the unit ends


class Unit(Graph, Protocol):
    """Finite automaton over bytes with exits.

    Attributes
    ----------
    exits : number of a state -> labels of its exits
    is_always_viable : bool
        True if a live state can be completed whatever follows. Otherwise `is_viable` decides.
    doubtful : pattern of bytes, or None
        Tokens that must be read by `step`, because a unit remembers more than its table.
    special : str, int or None
        The special token that leads over the unit, by its text or id; no byte does.
    """

    exits: Memo[int, tuple[Exit, ...]]
    is_always_viable: bool
    doubtful: re.Pattern[bytes] | None
    special: str | int | None

    def step(self, number: int, byte: int) -> int:
        """Return the number of the state after a byte, 0 if there is none."""

    def row(self, number: int) -> Ints:
        """Return the numbers of the states after each byte: (256,)."""

    def num_plain(self, number: int) -> float | None:
        """Return how many plain bytes, whichever, may follow before an exit; None if only rows tell."""

    def follow(self, label: Exit, after: Continuation) -> list[Item]:
        """Return the items that follow an exit."""

    def settled(self, number: int, after: Continuation) -> int:
        """Return the number of a state whose exits were followed, 0 if no byte may follow."""

    def is_viable(self, number: int, after: Continuation) -> bool:
        """Return True if some text continues from a state."""

    def bytes_left(self, number: int, after: Continuation, alone: Bools) -> float:
        """Return a bound of the bytes from a state to the end of the text; inf if none is known.

        `alone` are the bytes that are tokens by themselves, (256,) bool. Only these may be used.
        """

    def is_far(self, number: int, after: Continuation, most: float) -> bool:
        """Return True if the end is known to be more than `most` bytes away."""


class Beginning(Protocol):
    """Part as a machine sees it."""

    def begin(self, after: Continuation, /) -> Iterable[Item]:
        """Return the items with which a text begins, before a continuation."""

    def least_bytes(self, alone: Bools, /) -> float:
        """Return a bound of the bytes of a shortest text; inf if none is known."""


class Hypothesis(NamedTuple):
    """Assumption about a text so far: a unit has read its last bytes and is in a state; `after` follows the unit."""

    unit: Unit
    number: int
    after: Continuation

    def bytes_left(self, alone: Bools) -> float:
        return self.unit.bytes_left(self.number, self.after, alone)


class Continuation:
    """Rest of a text after an exit. Equal ones are one object, since each is made by the one after it."""

    def __init__(self, after: Continuation | None) -> None:
        self.after = after
        self._all: Interned[Continuation]
        if after is None:
            self._all = Interned(lambda kind, *arguments: kind(*arguments))
        else:
            self._all = after._all
        self._left: dict[bytes, float] = {}

    def before(self, kind: type[Continuation], *arguments: Any) -> Any:
        """Return the continuation of a kind that this one follows."""
        return self._all.of(kind, self, *arguments)

    def begin(self) -> Iterable[Item]:
        """Return the items that follow: hypotheses, and continuations that begin at the same place."""
        raise NotImplementedError

    def bytes_left(self, alone: Bools) -> float:
        """Return a bound of the bytes to the end of the text; inf if none is known."""
        key = alone.tobytes()
        unknown = list[Continuation]()
        each: Continuation | None = self
        while each is not None and key not in each._left:
            unknown.append(each)
            each = each.after
        while unknown:
            last = unknown.pop()
            last._left[key] = last.find_left(alone)
        return self._left[key]

    def find_left(self, alone: Bools) -> float:
        raise NotImplementedError


Item = Hypothesis | Continuation


class End(Continuation):
    """End of the text."""

    def __init__(self) -> None:
        super().__init__(None)

    def begin(self) -> Iterable[Item]:
        return ()

    def find_left(self, alone: Bools) -> float:
        return 0.0


class Then(Continuation):
    """A part, and the continuation after it."""

    def __init__(self, after: Continuation, part: Beginning) -> None:
        super().__init__(after)
        self.rest = after
        self.part = part

    def begin(self) -> Iterable[Item]:
        return self.part.begin(self.rest)

    def find_left(self, alone: Bools) -> float:
        return self.part.least_bytes(alone) + self.rest.bytes_left(alone)


class Resume(Continuation):
    """A state of a unit that a text returns to, such as the rest of a JSON container after an inner value."""

    def __init__(self, after: Continuation, unit: Unit, number: int) -> None:
        super().__init__(after)
        self.rest = after
        self.unit = unit
        self.number = number

    def begin(self) -> Iterable[Item]:
        return [Hypothesis(self.unit, self.number, self.rest)]

    def find_left(self, alone: Bools) -> float:
        return self.unit.bytes_left(self.number, self.rest, alone)


class State(Shared):
    """State of a machine. Equal ones are one object, and a copy is the object. `accepts`: the text may end."""

    __slots__ = ("accepts", "hypotheses", "__weakref__")

    def __init__(self, hypotheses: frozenset[Hypothesis], accepts: bool) -> None:
        self.hypotheses = tuple(hypotheses)
        self.accepts = accepts

    def __repr__(self) -> str:
        return f"<state of {len(self.hypotheses)} hypotheses>"

    def bytes_left(self, alone: Bools) -> float:
        """Return a bound of the bytes to the end of the text; inf if none is known."""
        if self.accepts:
            return 0.0
        return min(each.bytes_left(alone) for each in self.hypotheses)

    def ends_within(self, alone: Bools, most: float) -> bool:
        """Return True if the text may end after at most so many bytes, as far as bounds tell."""
        if self.accepts:
            return most >= 0
        near = [
            each for each in self.hypotheses if not each.unit.is_far(each.number, each.after, most)
        ]
        return any(each.bytes_left(alone) <= min(most, sys.float_info.max) for each in near)


class Machine:
    """Recognizer of the texts of a part: `start` (None if there are none), `step` and `accepts`.

    Without `has_specials`, special tokens are passed over: the rest of the text begins at the same place.
    """

    def __init__(self, part: Beginning, *, has_specials: bool = True) -> None:
        self._part = part
        self._has_specials = has_specials
        self._lock = LOCK
        self._end = End()
        self._states = Interned(State)
        self._next: Memo[tuple[State, int], State | None] = Memo(self._step, MAX_STEPS)
        self._next_by_table: Memo[tuple[State, int], State | None] = Memo(
            self._step_by_table, MAX_STEPS
        )
        self.start = self._begin()

    @locked
    def _begin(self) -> State | None:
        return self.closed(self._part.begin(self._end))

    def closed(self, items: Iterable[Item]) -> State | None:
        """Return the state of some items and all that follow them without a byte; None if no text continues."""
        hypotheses, accepts = self._close(items)
        if not hypotheses and not accepts:
            return None
        return self._states.of(frozenset(hypotheses), accepts)

    def _close(self, items: Iterable[Item]) -> tuple[set[Hypothesis], bool]:
        """Return some items and all that follow them without a byte, and whether the text may end."""
        todo = list(items)
        hypotheses = set[Hypothesis]()
        seen = set[Hypothesis]()
        begun = set[Continuation]()
        accepts = False
        while todo:
            if len(seen) + len(begun) > MAX_HYPOTHESES:
                raise ValueError(
                    f"{self._part!r}: a text can be read in more than {MAX_HYPOTHESES:,} ways; "
                    "parts that begin differently, or end with a separator, would work"
                )
            item = todo.pop()
            if isinstance(item, Continuation):
                if item not in begun:
                    begun.add(item)
                    accepts = accepts or isinstance(item, End)
                    todo += item.begin()
            elif item.unit.special is not None and not self._has_specials:
                todo.append(item.after)
            elif item not in seen:
                seen.add(item)
                unit, number, after = item
                for label in unit.exits[number]:
                    todo += unit.follow(label, after)
                settled = unit.settled(number, after)
                if settled:
                    hypotheses.add(Hypothesis(unit, settled, after))
        return hypotheses, accepts

    @locked
    def step(self, state: State, byte: int) -> State | None:
        """Return the state after one more byte, or None if no text continues so."""
        return self._next[state, byte]

    def _step(self, key: tuple[State, int]) -> State | None:
        state, byte = key
        return self.closed(stepped(state.hypotheses, byte))

    def step_by_table(self, state: State, byte: int) -> State | None:
        """Return the state after one more byte by the tables of the units, which may remember less than their steps."""
        return self._next_by_table[state, byte]

    def _step_by_table(self, key: tuple[State, int]) -> State | None:
        state, byte = key
        items = list[Item]()
        for unit, number, after in state.hypotheses:
            target = unit.row(number).item(byte)
            if target:
                items.append(Hypothesis(unit, target, after))
        return self.closed(items)

    @locked
    def moves_by_table(self, state: State) -> list[tuple[Ints, State]]:
        """Return the states after one more byte by the tables of the units, each with its bytes."""
        classes = np.zeros(256, np.int64)
        is_live = np.zeros(256, bool)
        for unit, number, _ in state.hypotheses:
            row = unit.row(number)
            is_live |= row > 0
            classes = np.unique(classes * (int(row.max()) + 1) + row, return_inverse=True)[1]
        found = list[tuple[Ints, State]]()
        for each in np.unique(classes[is_live]).tolist():
            bytes = np.flatnonzero(classes == each)
            after = self.step_by_table(state, int(bytes[0]))
            if after is not None:
                found.append((bytes, after))
        return found

    @locked
    def steps_by_specials(self, state: State) -> dict[str | int, State]:
        """Return the special tokens that may follow, by text or id, with the states after them."""
        items: dict[str | int, list[Item]] = defaultdict(list)
        for unit, _, after in state.hypotheses:
            if unit.special is not None:
                items[unit.special].append(after)
        found = dict[str | int, State]()
        for special, some in items.items():
            state_after = self.closed(some)
            if state_after is not None:
                found[special] = state_after
        return found

    @locked
    def next_bytes(self, state: State) -> bytes:
        """Return the bytes that may follow a state, ascending."""
        found = [bytes for bytes, _ in self.moves_by_table(state)]
        return bytes(np.unique(np.concatenate(found)).tolist()) if found else b""

    def accepts(self, state: State) -> bool:
        return state.accepts

    @locked
    def read(self, state: State, data: bytes) -> tuple[State, int]:
        """Return the state after the longest prefix of `data` that fits, and the length of that prefix."""
        hypotheses: Collection[Hypothesis] = state.hypotheses
        accepts = state.accepts
        size = 0
        for byte in data:
            after, may_end = self._close(stepped(hypotheses, byte))
            if not after and not may_end:
                break
            hypotheses, accepts = after, may_end
            size += 1
        return self._states.of(frozenset(hypotheses), accepts), size


def stepped(hypotheses: Iterable[Hypothesis], byte: int) -> list[Hypothesis]:
    """Return the hypotheses after one more byte, without those that exits lead to."""
    found = []
    for unit, number, after in hypotheses:
        target = unit.step(number, byte)
        if target:
            found.append(Hypothesis(unit, target, after))
    return found
