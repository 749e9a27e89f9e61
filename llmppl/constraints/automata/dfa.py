"""DFA: a language of text, as a deterministic automaton over its UTF-8 bytes.

The universe is all UTF-8 text. A complement holds every string of code points that the language does not hold; lone
surrogates are not text. Lengths are counted in characters. The counts for one length determine the counts for the next,
exactly, however large; enumeration follows from them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache, reduce
from graphlib import CycleError, TopologicalSorter
from operator import sub
from typing import Any, NoReturn

import numpy as np

from llmppl.constraints.automata.budget import Budget
from llmppl.constraints.automata.determinise import Machine, Subsets, Threads, unguarded
from llmppl.constraints.automata.nfa import ACCEPT, DEAD, LEAD_BYTES, NFA
from llmppl.constraints.automata.operations import Edge, Table, automaton_of, merging, product, trimmed
from llmppl.constraints.constraint import Bools, VocabularyLike
from llmppl.constraints.masks import TokenIndex
from llmppl.support import arguments
from llmppl.support.locks import Lock, cached_property, locked

BYTES = (*LEAD_BYTES, (0x80, 0xBF))                 # lead bytes with 0..3 bytes after them, and those bytes
REST = 4


class Counts:
    """Number of texts of each length that lead from a state of an automaton to its end."""

    def __init__(self, machine: Machine) -> None:
        self.rows = machine.edges()
        self.start = machine.start
        self.accepting = machine.accepting
        self._lock = Lock()
        self._arcs = [[_within(row, a, b) for row in self.rows] for a, b in BYTES]
        self._counts = [self._inside(self.accepting.astype(int).tolist())]

    @locked
    def completions(self, length: int) -> list[list[int]]:
        """Return counts[p][state], p = 0..3: the texts that finish a character by p bytes, then have `length` more."""
        while len(self._counts) <= length:
            counts = [0] * len(self.rows)
            for lead, after in enumerate(self._counts[-1]):
                self._add(lead, after, counts)
            self._counts.append(self._inside(counts))
        return self._counts[length]

    def _inside(self, counts: list[int]) -> list[list[int]]:
        """Return `counts` for states between characters, then those for states 1 to 3 bytes before a character ends."""
        found = [counts]
        for _ in range(3):
            found.append(self._add(REST, found[-1], [0] * len(counts)))
        return found

    def _add(self, kind: int, after: list[int], counts: list[int]) -> list[int]:
        """Add the counts of the targets of bytes of one kind to `counts`, and return it."""
        for state, row in enumerate(self._arcs[kind]):
            for lo, hi, t in row:
                counts[state] += (hi - lo + 1) * after[t]
        return counts

    def enumerate(self) -> Iterator[str]:
        """Yield the texts, shorter ones first, and those of one length by code points."""
        for length in itertools.count():
            counts = self.completions(length)[0]
            if not any(counts):                     # then no greater length has texts either
                return
            yield from self._of_length(length) if counts[self.start] else ()

    def _of_length(self, length: int) -> Iterator[str]:
        stack = [(self.start, length, 0, b"")]
        while stack:
            state, left, pending, text = stack.pop()
            if not left and not pending:
                yield text.decode()
                continue
            kinds = [(REST, left, pending - 1)] if pending else [(p, left - 1, p) for p in range(REST)]
            arcs = [(arc, left_then, p) for kind, left_then, p in kinds for arc in self._arcs[kind][state]]
            for (lo, hi, t), left_then, pending_then in reversed(arcs):
                if self.completions(left_then)[pending_then][t]:
                    stack += [(t, left_then, pending_then, text + bytes((byte,))) for byte in range(hi, lo - 1, -1)]


def _within(row: list[Edge], low: int, high: int) -> list[Edge]:
    """Return the edges of `row` for the bytes low..high."""
    return [(max(lo, low), min(hi, high), t) for lo, hi, t in row if lo <= high and hi >= low]


class DFA(Machine):
    """Language of text, as a deterministic automaton over UTF-8 bytes: a Regex, `from_strings`, or operations on them.

    It is a recognizer: `start` (0 if the language is empty), `step(state, byte)`, `accepts(state)`. States are small
    integers; 0 is dead, and `step` never returns it. Rows are computed on demand. `table`, `ready` and `accepting` show
    the known rows; fetch them again after `row`, `step` or `explore`, which may replace them. A copy is the automaton
    itself. If the NFA has guards that depend on more than the start of the text, all states are computed at once.

    Examples
    --------
    >>> words = Regex("[a-z]{2}") - DFA.from_strings(["no"])
    >>> "no" in words, words.count(2), words.shortest()
    (False, 675, 'aa')
    """

    strings: tuple[str, ...] | None = None          # the argument of `from_strings`
    made_by = ""                                    # the operation, in words

    def __init__(self, nfa: NFA) -> None:
        self.needs_lookahead = False                # True if some match had to wait for the text after it
        if nfa.start != DEAD and not nfa.guards:
            super().__init__(Subsets(nfa, nfa.closure(nfa.start)))
            return
        threads = Threads(nfa)
        begun = threads.start[0]
        if not begun:                               # no start, or a guard that no text satisfies
            self._fix(np.zeros((1, 256), np.int32), np.zeros(1, bool), 0)
        elif unguarded(nfa, begun):
            super().__init__(Subsets(nfa, (thread.state for thread in begun)))
        else:
            super().__init__(threads)
            self._fix(*trimmed(self.explore().table, self.accepting, self.start))
            self.needs_lookahead = threads.needs_lookahead

    @classmethod
    def from_table(cls, table: Table, accepting: Bools, start: int) -> DFA:
        """Return the automaton with these arrays, without useless states and with new state numbers.

        `table` is an (S, 256) int array of next states, where 0 is the dead one; `accepting` is an (S,) bool array.
        """
        dfa = DFA.__new__(DFA)
        table = np.array(table, np.int32)
        table[0] = 0
        dfa._fix(*trimmed(table, np.asarray(accepting, bool), start))
        return dfa

    @classmethod
    def from_strings(cls, words: Iterable[str]) -> DFA:
        """Return the language of exactly these strings. Raises TypeError if `words` is one string."""
        if isinstance(words, str | bytes):
            raise TypeError(f"{arguments.shown(words, 40)} is one string, not a list of them, such as ['a', 'b']")
        dfa = DFA.__new__(DFA)
        dfa.strings = tuple(arguments.text("each of the strings", word) for word in words)
        dfa._fix(*automaton_of(dfa.strings))
        return dfa

    def index(self, vocab: VocabularyLike) -> TokenIndex:
        """Return the index of the tokens of a vocabulary that may follow in each state."""
        return TokenIndex(self, vocab)

    # ---- queries

    def accepts_text(self, text: str) -> bool:
        """Return whether `text` is in the language; text with lone surrogates never is."""
        try:
            data = text.encode()
        except UnicodeEncodeError:
            return False
        return self.accepts(self.after(self.start, data))

    __contains__ = accepts_text

    def is_empty(self) -> bool:
        """Return whether the language has no text."""
        return not self.start

    def is_finite(self) -> bool:
        """Return whether the language has finitely many strings, which holds if its states form no cycle."""
        targets = {state: {t for _, _, t in row} for state, row in enumerate(self.edges())}
        try:
            TopologicalSorter(targets).prepare()
        except CycleError:
            return False
        return True

    def equivalent(self, other: DFA) -> bool:
        """Return whether both have the same language."""
        return (self ^ other).is_empty()

    @cached_property
    def _counts(self) -> Counts:
        return Counts(self)

    def count(self, length: int) -> int:
        """Return the number of strings of exactly `length` characters."""
        return self._counts.completions(arguments.count("length", length, least=0))[0][self.start]

    def enumerate(self) -> Iterator[str]:
        """Yield the strings of the language, shorter ones first, then by code points; this may never end."""
        return self._counts.enumerate()

    def shortest(self) -> str | None:
        """Return the first string of `enumerate`, or None if there is none."""
        return next(self.enumerate(), None) if self.start else None

    # ---- display

    def __repr__(self) -> str:
        known = "" if self.ready.all() else " so far"
        return f"DFA({self.made_by if not self.start else f'{self.num_states} states{known}'})"

    # ---- operations: each returns a new automaton

    def __or__(self, other: DFA) -> DFA:
        """Return the texts of either language."""
        return self._product(other, "|", lambda a, b: a | b, (True, True))

    def __and__(self, other: DFA) -> DFA:
        """Return the texts of both languages."""
        return self._product(other, "&", lambda a, b: a & b, (False, False))

    def __sub__(self, other: DFA) -> DFA:
        """Return the texts of the first language that are not in the second."""
        return self._product(other, "-", lambda a, b: a & ~b, (True, False))

    def __xor__(self, other: DFA) -> DFA:
        """Return the texts of exactly one of the two languages."""
        return self._product(other, "^", lambda a, b: a ^ b, (True, True))

    def __invert__(self) -> DFA:
        """Return all texts that are not in the language."""
        return anything() - self

    def __add__(self, other: DFA) -> DFA:
        """Return the texts of the first language followed by a text of the second."""
        if not isinstance(other, DFA):
            self._refuse(other)
        nfa = NFA(Budget(f"{arguments.shown(self)} + {arguments.shown(other)}"))
        nfa.start = nfa.include(self, nfa.include(other, ACCEPT))
        return DFA(nfa)

    def star(self) -> DFA:
        """Return the concatenations of any number of texts, none included."""
        return self.times(0, math.inf)

    def times(self, least: int, most: float | None = None) -> DFA:
        """Return the concatenations of `least` to `most` texts; `most` is `least` if None, and may be inf."""
        least = arguments.count("least", least, least=0)
        unbounded = most == math.inf
        last = least if most is None or unbounded else arguments.count("most", most, least=least)
        nfa = NFA(Budget(f"{arguments.shown(self)}.times({least}, {most})"))
        state = nfa.star(lambda again: nfa.include(self, again), ACCEPT) if unbounded else ACCEPT
        for i in range(last):
            state = nfa.include(self, state)
            if i < last - least:
                state = nfa.optional(state, ACCEPT)
        nfa.start = state
        return DFA(nfa)

    def but_not(self, *others: DFA | str) -> DFA:
        """Return the texts that are in none of the others; a str stands for that text itself, not for a pattern."""
        return reduce(sub, [DFA.from_strings([each]) if isinstance(each, str) else each for each in others], self)

    def _product(self, other: DFA, sign: str, accept: Callable[[Any, Any], Any], alone: tuple[bool, bool]) -> DFA:
        """Return the product; `alone[i]`: a text can be in it when only the i-th automaton is not dead."""
        if not isinstance(other, DFA):
            self._refuse(other)
        budget = Budget(f"{arguments.shown(self)} {sign} {arguments.shown(other)}")
        found = DFA.from_table(*product(self, other, accept, alone, budget))
        found.made_by = budget.what
        return found

    def _refuse(self, other: object) -> NoReturn:
        """Raise the TypeError of an operation with something else."""
        raise TypeError(
            f"{type(self).__name__} and {type(other).__name__} do not combine, since both must be automata: "
            "Regex(re.escape(text)) is one, and so is the .automaton of a JsonSchema (if it is None, .fallback_reason "
            "says why). In a program, two calls of `extend` join any constraints"
        )

    __radd__ = __ror__ = __rand__ = __rsub__ = __rxor__ = _refuse

    def minimise(self) -> DFA:
        """Return the automaton of this language with the fewest states."""
        rows = self.edges()
        if not self.start:
            return self
        budget = Budget(f"{arguments.shown(self)}.minimise()", remedy="a language of fewer states would work")
        number, kept = merging(rows, self.accepting, budget)
        return DFA.from_table(number[self.table[kept]], self.accepting[kept], int(number[self.start]))


@cache
def anything() -> DFA:
    """Return the language of all text."""
    nfa = NFA()
    nfa.start = nfa.anything(ACCEPT)
    return DFA(nfa).explore()
