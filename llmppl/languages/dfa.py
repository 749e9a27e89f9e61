"""Automata over bytes: languages of text as machines that read UTF-8.

The one idea: a language is a deterministic automaton whose states are small integers, 0 the dead one, whose rows
(256 next states) are worked out when they are first asked for. No state is ever given out from which nothing is
accepted, so whoever follows a row without reaching 0 can still finish.

What is made deterministic is an `NFA` (`llmppl.languages.nfa`). `DFA` follows all its threads at once and forgets their
order; `Leftmost` keeps the order and so knows which match `re` reports.

The universe is all UTF-8 text: complements hold every string of code points that the language does not hold (lone
surrogates are not text). Lengths are counted in characters.

Source: Moore (1956), "Gedanken-experiments on sequential machines", for minimisation.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from llmppl import arguments
from llmppl.exclusive import Turn, in_turn
from llmppl.languages.limits import MAX_EDGES, MAX_STATES, MAX_TRIE, Budget, TooLarge, shown
from llmppl.languages.nfa import (
    ACCEPT,
    ANY,
    DEAD,
    MAX_CODE_POINT,
    NFA,
    Edge,
    Subsets,
    Threads,
    merged,
    unguarded,
    utf8,
)
from llmppl.languages.tables import product, runs, trimmed
from llmppl.masks import TokenIndex, VocabularyLike
from llmppl.shared import Shared

__all__ = ["DFA", "Leftmost"]

SHOWN = 50                                          # states in a notebook's table
_SETTLED = ((-1, -1, -1),)                          # the signature of no state
_THESE, _FEWER = "the language of these strings", "fewer or shorter strings would work"
_BYTES = ((0x00, 0x7F), (0xC0, 0xDF), (0xE0, 0xEF), (0xF0, 0xF7), (0x80, 0xBF))     # leads of 0..3, and the rest


class _Machine(Shared):
    """States numbered as they are met, 0 the dead one, and rows of next states worked out when first asked for.

    The budget of the NFA behind it is spent on them as they are met (TooLarge).
    """

    def __init__(self, source: Any) -> None:
        self._source, self._budget, self._turn = source, source.nfa.budget, Turn()
        self._keys: list[Any] = [None]
        self._numbers: dict[Any, int] = {}
        self._table = np.zeros((16, 256), np.int32)
        self._ready = np.zeros(16, bool)
        self._ready[0] = True
        self._accepting = np.zeros(16, bool)
        self.start = self._add(source.start)

    def _add(self, key: Any) -> int:
        """The number of a key that has none yet."""
        self._budget.spend(states=1)
        number = len(self._keys)
        if number == len(self._ready):
            self._accepting, self._table = _doubled(self._accepting), _doubled(self._table)
            self._ready = _doubled(self._ready)
        self._accepting[number] = self._source.accepts(key)
        self._keys.append(key)
        self._numbers[key] = number
        return number

    @property
    def num_states(self) -> int:
        """The number of states met so far, without the dead one; all of them after `explore`."""
        return len(self._keys) - 1

    def explore(self, limit: int | None = None) -> Self:
        """Work out every row, and return itself. TooLarge (a ValueError) if there are more than `limit` states."""
        state = 0
        while state < len(self._keys):
            if not self._ready[state]:
                self.row(state)
            if limit is not None and self.num_states > limit:
                raise TooLarge(shown(self), f"more than {limit:,} states")
            state += 1
        return self

    def edges(self) -> list[list[Edge]]:
        """For every state from 1 on, (lo, hi, target) for the bytes that do not lead to 0, ascending and disjoint."""
        table = self.explore()._table[: len(self._keys)]
        state, lo = runs(table)
        if len(lo) > MAX_EDGES:
            raise TooLarge(shown(self), f"more than {MAX_EDGES:,} edges", "fewer states (minimise()) would work")
        hi = np.append(lo[1:] - 1, 255)
        hi[hi < 0] = 255
        rows: list[list[Edge]] = [[] for _ in table]
        for s, a, b, t in zip(state.tolist(), lo.tolist(), hi.tolist(), table[state, lo].tolist(), strict=True):
            if t:
                rows[s].append((a, b, t))
        return rows[1:]

    def row(self, state: int) -> NDArray[np.int32]:
        """The next state for every byte.

        Returns
        -------
        (256,) int32 ndarray, read-only
            0 where the text can no longer be completed.
        """
        if not self._ready[state]:
            self._work_out(state)
        view: NDArray[np.int32] = self._table[state]
        view.flags.writeable = False
        return view

    @in_turn
    def _work_out(self, state: int) -> None:
        if self._ready[state]:                      # by another thread
            return
        known, moves = self._numbers, self._source.moves(self._keys[state])
        segments = [(lo, hi, known.get(key) or self._add(key)) for lo, hi, key in moves]
        into = self._table[state]                   # after numbering: it may have moved the table
        for lo, hi, number in segments:
            into[lo : hi + 1] = number
        self._ready[state] = True
        self._keys[state] = None                    # not needed again; `_numbers` knows it

    def step(self, state: int, byte: int) -> int | None:
        """The state after one more byte, or None where no accepted string goes on so."""
        if not self._ready[state]:
            self._work_out(state)
        return int(self._table[state, byte]) or None


class Leftmost(_Machine):
    """The match that `re.match(pattern, text)` reports, as a machine over bytes that reads on to the right.

    Follow `start` and `step(state, byte)` until None. After each byte, `matched(state)` says whether a match is now
    known, and it replaces every earlier one; the last one known when the machine is dead, or `at_end(state)` where
    the text ends, is what `re` reports. Look-behind sees the text from where the machine started.
    """

    def __init__(self, nfa: NFA) -> None:
        self._matched: list[int | None] = [None]
        self._at_end: list[int | None] = [None]
        self._threads = Threads(nfa, ordered=True)
        super().__init__(self._threads)
        if nfa.start == DEAD:
            self.start = 0

    def _add(self, key: Any) -> int:
        accepted = [thread for thread in key[0] if thread.state == ACCEPT]
        sure = [thread.since for thread in accepted if not thread.owes]
        held = [thread.since for thread in accepted if self._threads.holds(thread.owes)]
        number = len(self._keys)
        self._matched[number:] = [sure[0] if sure else None]            # in place of what an interrupt has left
        self._at_end[number:] = [held[0] if held else None]
        return super()._add(key)

    def __repr__(self) -> str:
        return f"Leftmost({self.num_states} states)"

    def matched(self, state: int) -> int | None:
        """How many bytes before `state` a match ended that is known to be one now, and was not before; or None."""
        return self._matched[state]

    def at_end(self, state: int) -> int | None:
        """How many bytes before the end the match ends, if the text ends at `state`; None to keep the last known."""
        return self._at_end[state]


class DFA(_Machine):
    """A language of text, as a deterministic automaton over its UTF-8 bytes.

    It is a recognizer: `start` (0 if the language is empty), `step(state, byte)`, `accepts(state)`. States are small
    integers; 0 is dead and never given out by `step`. Rows are worked out when first asked for: `table`, `ready` and
    `accepting` show what is known so far, and are to be fetched again after `row`, `step` or `explore`, which may have
    replaced them. Copies are the automaton itself.

    Parameters
    ----------
    nfa : NFA
        What to determinise. If it has guards that no start of the text decides, all states are worked out at once
        (those from which nothing is accepted are known only then).
    """

    def __init__(self, nfa: NFA) -> None:
        self._pending = False
        self._counts: list[list[list[int]]] = []
        if nfa.start != DEAD and not nfa.guards:
            super().__init__(Subsets(nfa, nfa.closure(nfa.start)))
            return
        threads = Threads(nfa)
        if not threads.start[0]:                    # no start, or a guard that no text meets
            self._set(np.zeros((1, 256), np.int32), np.zeros(1, bool), 0)
            return
        if unguarded(nfa, threads.start[0]):
            super().__init__(Subsets(nfa, (thread.state for thread in threads.start[0])))
        else:
            super().__init__(threads)
            self._set(*trimmed(*self.explore()._arrays(), self.start))
        self._pending = threads.pending

    def _set(self, table: NDArray[np.int32], accepting: NDArray[np.bool_], start: int) -> None:
        self._source, self._keys, self._numbers = None, [None] * len(table), {}
        self._table, self._accepting, self._ready = table, accepting, np.ones(len(table), bool)
        self.start, self._pending, self._counts, self._turn = start, False, [], Turn()

    @classmethod
    def from_table(cls, table: NDArray[np.int32], accepting: NDArray[np.bool_], start: int) -> DFA:
        """The automaton with these arrays, without the states that lead nowhere; states are numbered anew.

        Parameters
        ----------
        table : (S, 256) int array of next states, 0 the dead one
        accepting : (S,) bool array
        start : int
        """
        dfa = DFA.__new__(DFA)
        dfa._set(*trimmed(np.asarray(table, np.int32), np.asarray(accepting, bool), start))
        return dfa

    @classmethod
    def from_strings(cls, words: Iterable[str]) -> DFA:
        """The language of exactly these strings; a TypeError for what is one string itself."""
        if isinstance(words, str | bytes):
            raise TypeError(f"{shown(repr(words), 40)} is one string, not a list of them, such as ['a', 'b']")
        steps: dict[int, int] = {}                  # state * 256 + byte -> state
        final, size = set(), 2
        for word in words:
            state = 1
            for byte in word.encode():
                key = state << 8 | byte
                state = steps.get(key, 0)
                if not state:
                    state = steps[key] = size
                    size += 1
            final.add(state)
            if size > MAX_TRIE:
                raise TooLarge(_THESE, f"more than {MAX_TRIE:,} prefixes", _FEWER)
        if not final:
            return cls.from_table(np.zeros((1, 256), np.int32), np.zeros(1, bool), 0)
        if size > MAX_STATES:
            steps, final, size = _folded(steps, final, size)
        table, accepting = np.zeros((size, 256), np.int32), np.zeros(size, bool)
        table.ravel()[list(steps)] = list(steps.values())
        accepting[list(final)] = True
        dfa = cls.__new__(cls)                      # every state leads to the end: nothing to trim
        dfa._set(table, accepting, 1)
        return dfa

    @classmethod
    def from_interegular(cls, fsm: Any) -> DFA:
        """The language of an `interegular` automaton over characters (`interegular.FSM`)."""
        from interegular.fsm import anything_else

        named = sorted(ord(c) for c in fsm.alphabet if c is not anything_else)
        groups: dict[int, list[tuple[int, int]]] = {}
        for code in named:
            groups.setdefault(fsm.alphabet[chr(code)], []).append((code, code))
        if anything_else in fsm.alphabet:
            others = [(a + 1, b - 1) for a, b in itertools.pairwise([-1, *named, MAX_CODE_POINT + 1]) if b - a > 1]
            groups.setdefault(fsm.alphabet[anything_else], []).extend(others)
        nfa = NFA(Budget(f"the interegular automaton of {len(fsm.states):,} states"))
        entry = {state: nfa.add(()) for state in fsm.states}
        for state, moves in fsm.map.items():
            choices = [ACCEPT] if state in fsm.finals else []
            for symbol, target in moves.items():
                if symbol in groups and target in entry:
                    choices.append(nfa.read(utf8(merged(groups[symbol])), entry[target]))
            nfa.epsilon[entry[state]] = tuple(choices)
        nfa.start = entry[fsm.initial]
        lazy = DFA.__new__(DFA)
        _Machine.__init__(lazy, Subsets(nfa, nfa.closure(nfa.start)))
        return cls.from_table(*lazy.explore()._arrays(), lazy.start)     # dead states of the original go

    def index(self, vocab: VocabularyLike) -> TokenIndex:
        """Which tokens of a vocabulary may follow, in every state."""
        return TokenIndex(self, vocab)

    # ---- what it knows

    @property
    def table(self) -> NDArray[np.int32]:
        """(S, 256) int32 ndarray: `table[state, byte]` is the next state where `ready[state]`; S states so far."""
        return self._table[: len(self._keys)]

    @property
    def ready(self) -> NDArray[np.bool_]:
        """(S,) bool ndarray: which rows of `table` are worked out."""
        return self._ready[: len(self._keys)]

    @property
    def accepting(self) -> NDArray[np.bool_]:
        """(S,) bool ndarray: which states accept."""
        return self._accepting[: len(self._keys)]

    def accepts(self, state: int) -> bool:
        """Whether a text that leads to `state` is in the language."""
        return bool(self._accepting[state])

    def accepts_text(self, text: str) -> bool:
        """Whether `text` is in the language; text with lone surrogates never is."""
        try:
            data = text.encode()
        except UnicodeEncodeError:
            return False
        state: int | None = self.start
        for byte in data:
            if not state:
                return False
            state = self.step(state, byte)
        return bool(state) and self.accepts(state or 0)

    __contains__ = accepts_text

    def is_empty(self) -> bool:
        """Whether no text at all is in the language."""
        return not self.start

    def is_finite(self) -> bool:
        """Whether the language has finitely many strings: no state can be met twice, as each leads to the end."""
        targets = [list({t for _, _, t in row}) for row in self.edges()]
        entering = [0] * (len(targets) + 1)
        for row in targets:
            for t in row:
                entering[t] += 1
        todo = [state for state in range(1, len(entering)) if not entering[state]]
        for state in todo:                          # grows: a state is done when all that lead to it are
            for t in targets[state - 1]:
                entering[t] -= 1
                if not entering[t]:
                    todo.append(t)
        return len(todo) == len(targets)

    def equivalent(self, other: DFA) -> bool:
        """Whether both have the same language."""
        return (self ^ other).is_empty()

    # ---- counting by length: how many texts lead from a state to the end

    def _completions(self, length: int) -> list[list[int]]:
        """For p = 0..3, per state: the texts that finish a character by p bytes and go on for `length` characters."""
        if length >= len(self._counts):
            self._count_to(length)
        return self._counts[length]

    @in_turn
    def _count_to(self, length: int) -> None:
        if not self._counts:
            rows = [[], *self.edges()]
            self._arcs = [[_within(row, a, b) for row in rows] for a, b in _BYTES]
            self._ways = [{state: _ways(row) for state, row in enumerate(arcs) if row} for arcs in self._arcs]
            self._counts.append(self._mid([int(accepts) for accepts in self.accepting]))
        while len(self._counts) <= length:
            counts = [0] * len(self._keys)
            for ways, after in zip(self._ways, self._counts[-1], strict=False):      # a lead byte with p to come
                for state, choices in ways.items():
                    counts[state] += sum([number * after[t] for t, number in choices])
            self._counts.append(self._mid(counts))

    def _mid(self, counts: list[int]) -> list[list[int]]:
        """`counts` of the states between characters, then of those inside one, 1 to 3 bytes before its end."""
        found = [counts]
        for _ in range(3):
            after, counts = counts, [0] * len(counts)
            for state, choices in self._ways[4].items():
                counts[state] = sum([number * after[t] for t, number in choices])
            found.append(counts)
        return found

    def count(self, length: int, unit: str = "characters") -> int:
        """The number of strings of exactly `length` characters (or, with `unit="bytes"`, UTF-8 bytes), exactly."""
        length = arguments.count("length", length, least=0)
        if arguments.one_of("unit", unit, ["characters", "bytes"]) == "characters":
            return self._completions(length)[0][self.start]
        weights = {self.start: 1}
        rows = [[], *self.edges()]
        for _ in range(length):
            after: dict[int, int] = {}
            for state, weight in weights.items():
                for lo, hi, t in rows[state]:
                    after[t] = after.get(t, 0) + weight * (hi - lo + 1)
            weights = after
        return sum(weight for state, weight in weights.items() if self._accepting[state])

    def enumerate(self) -> Iterator[str]:
        """The strings of the language, shorter ones first, those of one length by code points; it may never end."""
        for length in itertools.count():
            counts = self._completions(length)[0]
            if not any(counts):                     # of no state, so of no greater length
                return
            if not counts[self.start]:
                continue
            stack = [(self.start, length, 0, b"")]
            while stack:
                state, left, pending, text = stack.pop()
                if not left and not pending:
                    yield text.decode()
                    continue
                for lo, hi, t, left_then, pending_then in reversed(self._continuations(state, left, pending)):
                    if self._completions(left_then)[pending_then][t]:
                        stack += [(t, left_then, pending_then, text + bytes((byte,))) for byte in range(hi, lo - 1, -1)]

    def _continuations(self, state: int, left: int, pending: int) -> list[tuple[int, int, int, int, int]]:
        """(lo, hi, target, characters left, bytes pending) for the bytes from a state inside or between characters."""
        if pending:
            return [(lo, hi, t, left, pending - 1) for lo, hi, t in self._arcs[4][state]]
        return [(lo, hi, t, left - 1, p) for p in range(4) for lo, hi, t in self._arcs[p][state]]

    def shortest(self) -> str | None:
        """The first string by `enumerate`, or None if there is none."""
        return next(self.enumerate(), None) if self.start else None

    def sample(self, rng: np.random.Generator, max_length: int) -> str:
        """One of the strings of at most `max_length` characters, all equally likely.

        ValueError if there are none.
        """
        max_length = arguments.count("max_length", max_length, least=0)
        self._completions(max_length)
        sizes = [self._counts[length][0][self.start] for length in range(max_length + 1)]
        if not sum(sizes):
            raise ValueError(f"{self!r} has no string of at most {max_length} characters")
        rank = _below(rng, sum(sizes))
        left = 0
        while rank >= sizes[left]:
            rank -= sizes[left]
            left += 1
        state, pending, text = self.start, 0, bytearray()
        while left or pending:
            for lo, hi, t, left_then, pending_then in self._continuations(state, left, pending):
                each = self._counts[left_then][pending_then][t]
                if rank < (hi - lo + 1) * each:
                    break
                rank -= (hi - lo + 1) * each
            text.append(lo + rank // each)
            state, left, pending, rank = t, left_then, pending_then, rank % each
        return text.decode()

    # ---- to look at

    def __repr__(self) -> str:
        known = "" if self.ready.all() else " so far"
        return f"DFA({self.num_states} states{known})"

    def to_dot(self) -> str:
        """The automaton in the language of Graphviz (`dot -Tsvg`)."""
        lines = ["digraph {", "  rankdir=LR; node [shape=circle]; start [shape=point];"]
        lines += [f"  {state} [shape=doublecircle];" for state in np.flatnonzero(self.explore().accepting)]
        lines += [f"  start -> {self.start};"] if self.start else []
        for state, row in enumerate(self.edges(), 1):
            labels: dict[int, list[str]] = {}
            for lo, hi, t in row:
                labels.setdefault(t, []).append(_shown(lo) if lo == hi else f"{_shown(lo)}-{_shown(hi)}")
            lines += [f'  {state} -> {t} [label="{" ".join(names)}"];' for t, names in labels.items()]
        return "\n".join([*lines, "}"])

    def _repr_html_(self) -> str:
        """A table of the first states, for notebooks."""
        body = "".join(
            f"<tr><td>{state}{' (accepts)' if self._accepting[state] else ''}</td><td>"
            + html.escape(", ".join(f"{_shown(a)}{'-' + _shown(b) if b > a else ''} → {t}" for a, b, t in row))
            + "</td></tr>"
            for state, row in enumerate(self.edges()[:SHOWN], 1)
        )
        return f"<p>{html.escape(repr(self))}</p><table><tr><th>state</th><th>byte → state</th></tr>{body}</table>"

    # ---- operations: each gives a new automaton

    def __or__(self, other: DFA) -> DFA:
        """Texts of either."""
        return self._product(other, "|", lambda a, b: a | b, (True, True))

    def __and__(self, other: DFA) -> DFA:
        """Texts of both."""
        return self._product(other, "&", lambda a, b: a & b, (False, False))

    def __sub__(self, other: DFA) -> DFA:
        """Texts of the first that are not of the second."""
        return self._product(other, "-", lambda a, b: a & ~b, (True, False))

    def __xor__(self, other: DFA) -> DFA:
        """Texts of one of the two only."""
        return self._product(other, "^", lambda a, b: a ^ b, (True, True))

    def __invert__(self) -> DFA:
        """All other texts."""
        return anything() - self

    def __add__(self, other: DFA) -> DFA:
        """A text of the first followed by a text of the second."""
        if not isinstance(other, DFA):
            return NotImplemented
        nfa = NFA(Budget(f"{shown(self)} + {shown(other)}"))
        nfa.start = nfa.include(self, nfa.include(other, ACCEPT))
        return DFA(nfa)

    def star(self) -> DFA:
        """Any number of texts, none included, one after the other."""
        nfa = NFA(Budget(f"{shown(self)}.star()"))
        nfa.start = nfa.star(lambda again: nfa.include(self, again), ACCEPT)
        return DFA(nfa)

    def optional(self) -> DFA:
        """The language and the empty text."""
        nfa = NFA(Budget(f"{shown(self)}.optional()"))
        nfa.start = nfa.split([nfa.include(self, ACCEPT), ACCEPT])
        return DFA(nfa)

    def _product(
        self, other: DFA, sign: str, accept: Callable[[Any, Any], Any], alone: tuple[bool, bool]
    ) -> DFA:  # `alone[i]`: whether a text can be in the result when only the i-th automaton is not dead
        if not isinstance(other, DFA):
            return NotImplemented
        if not other.start or not self.start:       # an empty language
            kept = self if self.start and alone[0] else other if other.start and alone[1] else None
            return kept or DFA(NFA())
        budget = Budget(f"{shown(self)} {sign} {shown(other)}")
        return DFA.from_table(*product(self, other, accept, alone, budget))

    def minimise(self) -> DFA:
        """The automaton of this language with the fewest states.

        Moore's refinement: states of one class are split where their rows lead to different classes. Only states
        before those that changed class are looked at again, and the largest part of a class keeps its number.
        """
        rows = [[], *self.edges()]
        if not self.start:
            return self
        budget = Budget(f"{shown(self)}.minimise()", remedy="a language of fewer states would work")
        before: list[set[int]] = [set() for _ in rows]
        for state, row in enumerate(rows):
            for _, _, t in row:
                before[t].add(state)
        classes = [int(accepts) for accepts in self.accepting]
        members = [{s for s in range(1, len(rows)) if classes[s] == c} for c in (0, 1)]
        signatures: list[tuple[Edge, ...]] = [()] * len(rows)
        unsettled = set(range(1, len(rows)))
        while unsettled:
            parts: dict[int, dict[tuple[Edge, ...], set[int]]] = {classes[state]: {} for state in unsettled}
            for state in unsettled:
                signature: list[Edge] = []
                budget.spend(steps=2 * len(rows[state]))
                for lo, hi, t in rows[state]:
                    if signature and signature[-1][1] == lo - 1 and signature[-1][2] == classes[t]:
                        signature[-1] = (signature[-1][0], hi, classes[t])
                    else:
                        signature.append((lo, hi, classes[t]))
                signatures[state] = tuple(signature)
                parts[classes[state]].setdefault(signatures[state], set()).add(state)
            changed: list[int] = []
            for c, split in parts.items():
                size = len(members[c]) - sum(map(len, split.values()))
                if size:                            # settled ones agree with each other: nothing after them has changed
                    same = split.pop(next(signatures[s] for s in members[c] if s not in unsettled), set())
                    largest = max(map(len, split.values()), default=0)
                    if size + len(same) < largest:
                        split[_SETTLED] = members[c].difference(*split.values())
                others = list(split.values())
                if not size or _SETTLED in split:
                    others.remove(max(others, key=len))
                for part in others:
                    members[c] -= part
                    for state in part:
                        classes[state] = len(members)
                    members.append(part)
                    changed += part
            unsettled = set().union(*(before[state] for state in changed))
        live = [part for part in members if part]
        number = np.zeros(len(rows), np.int32)
        for new, part in enumerate(live, 1):
            number[list(part)] = new
        kept = [0, *(min(part) for part in live)]
        return DFA.from_table(number[self.table[kept]], self.accepting[kept], int(number[self.start]))

    def _arrays(self) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        return self.table, self.accepting


def _folded(steps: dict[int, int], final: set[int], size: int) -> tuple[dict[int, int], set[int], int]:
    """A trie with equal subtrees as one; its states have lower numbers than those after them, and 1 is the start."""
    rows: list[list[int]] = [[] for _ in range(size)]
    for key, target in steps.items():
        rows[key >> 8] += key & 0xFF, target
    number, distinct = [0] * size, dict[tuple[Any, ...], int]()
    for state in range(size - 1, 0, -1):
        row = rows[state]
        subtree = (state in final, *row[::2], *(number[target] for target in row[1::2]))
        number[state] = distinct.setdefault(subtree, len(distinct) + 1)
    Budget(_THESE, _FEWER).spend(states=len(distinct))
    number = [len(distinct) + 1 - n if n else 0 for n in number]        # the start is 1 again
    merged = {number[key >> 8] << 8 | key & 0xFF: number[target] for key, target in steps.items()}
    return merged, {number[state] for state in final}, len(distinct) + 1


def _doubled(array: NDArray[Any]) -> NDArray[Any]:
    """The array with as many zeros after it, which take no memory before they are written."""
    longer = np.zeros((2 * len(array), *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer


def _within(row: list[Edge], low: int, high: int) -> list[Edge]:
    """The edges of a row for the bytes low..high."""
    return [(max(lo, low), min(hi, high), t) for lo, hi, t in row if lo <= high and hi >= low]


def _ways(row: list[Edge]) -> list[tuple[int, int]]:
    """(target, number of bytes that lead there)."""
    ways: dict[int, int] = {}
    for lo, hi, t in row:
        ways[t] = ways.get(t, 0) + hi - lo + 1
    return list(ways.items())


def _below(rng: np.random.Generator, bound: int) -> int:
    """A whole number in [0, bound), uniformly, however large."""
    bits = (bound - 1).bit_length()
    while True:
        draw = int.from_bytes(rng.bytes((bits + 7) // 8), "little") & ((1 << bits) - 1)
        if draw < bound:
            return draw


def _shown(byte: int) -> str:
    """A byte as a label: itself where it can be printed and means nothing to Graphviz, else in hexadecimal."""
    return chr(byte) if 0x20 < byte < 0x7F and chr(byte) not in '"\\' else f"x{byte:02x}"


@lru_cache(1)
def anything() -> DFA:
    """All text."""
    nfa = NFA()
    nfa.start = nfa.star(lambda again: nfa.read(ANY, again), ACCEPT)
    return DFA(nfa).explore()
