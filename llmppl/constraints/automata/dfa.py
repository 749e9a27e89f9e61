"""DFA: a language of text, as a deterministic automaton over its UTF-8 bytes.

The universe is all UTF-8 text. A complement holds every string of code points that the language does not hold; lone
surrogates are not text. Lengths are counted in characters. The counts for one length determine the counts for the next,
exactly, however large; enumeration follows from them.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, reduce
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np

from llmppl.constraints.automata.budget import MAX_STATES, Budget
from llmppl.constraints.automata.determinise import Machine, Subsets, Threads, unguarded
from llmppl.constraints.automata.nfa import ACCEPT, DEAD, LEAD_BYTES, NFA
from llmppl.constraints.automata.operations import (
    Arrays,
    Table,
    automaton_of,
    clipped,
    merging,
    product,
    trimmed,
)
from llmppl.constraints.constraint import Bools, VocabularyLike
from llmppl.constraints.machine.machine import Continuation, Hypothesis, Item
from llmppl.constraints.machine.parts import Concatenation, Literal, Part, part_of
from llmppl.constraints.machine.units import TableUnit
from llmppl.constraints.machine.values import Reader, Reading, value_of
from llmppl.constraints.masks import TokenIndex
from llmppl.constraints.vocabulary.text import bytes_of
from llmppl.support import arguments
from llmppl.support.locks import Lock, cached_property, locked

BYTES = (*LEAD_BYTES, (0x80, 0xBF))  # lead bytes with 0..3 bytes after them, and those bytes
REST = 4


class Counts:
    """Number of texts of each length that lead from a state of an automaton to its end."""

    def __init__(self, machine: Machine) -> None:
        rows = machine.edges()
        self._start = machine.start
        self._lock = Lock()
        self._arcs = []
        for low, high in BYTES:
            self._arcs.append([clipped(row, low, high) for row in rows])
        self._counts = [self._inside(machine.accepting.astype(int).tolist())]

    @locked
    def completions(self, length: int) -> list[list[int]]:
        """Return counts[p][state], p = 0..3: the texts that finish a character by p bytes, then have `length` more."""
        while len(self._counts) <= length:
            latest = self._counts[-1]
            by_lead = [self._before(lead, latest[lead]) for lead in range(REST)]
            total = [sum(counts) for counts in zip(*by_lead, strict=True)]
            self._counts.append(self._inside(total))
        return self._counts[length]

    def _inside(self, counts: list[int]) -> list[list[int]]:
        """Return `counts` for states between characters, then those for states 1 to 3 bytes before a character ends."""
        found = [counts]
        for _ in range(3):
            found.append(self._before(REST, found[-1]))
        return found

    def _before(self, kind: int, counts: list[int]) -> list[int]:
        """Return the counts of the states before one byte of a kind."""
        found = []
        for row in self._arcs[kind]:
            number = 0
            for lo, hi, target in row:
                number += (hi - lo + 1) * counts[target]
            found.append(number)
        return found

    def enumerate(self) -> Iterator[str]:
        """Yield the texts, shorter ones first, and those of one length by code points."""
        for length in itertools.count():
            counts = self.completions(length)[0]
            if not any(counts):  # then no greater length has texts either
                return
            if counts[self._start]:
                yield from self._of_length(length)

    def _of_length(self, length: int) -> Iterator[str]:
        stack = [(self._start, length, 0, b"")]
        while stack:
            state, left, pending, text = stack.pop()
            if not left and not pending:
                yield text.decode()
                continue
            steps = [(lead, left - 1, lead) for lead in range(REST)]
            if pending:
                steps = [(REST, left, pending - 1)]
            following = []
            for kind, left_then, pending_then in steps:
                counts = self.completions(left_then)[pending_then]
                for lo, hi, target in self._arcs[kind][state]:
                    if not counts[target]:
                        continue
                    for byte in range(lo, hi + 1):
                        following.append((target, left_then, pending_then, text + bytes((byte,))))
            stack += reversed(following)


class DFA(Machine, Part):
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

    strings: tuple[str, ...] | None = None  # the argument of `from_strings`
    made_by = ""  # the operation, in words
    composition: Part | None = None  # the operation and its parts, if it reads the value of a text

    def __init__(self, source: NFA | Arrays) -> None:
        self.needs_lookahead = False  # True if some match had to wait for the text after it
        if isinstance(source, Arrays):
            self._fix(*source)
            return
        if source.start != DEAD and not source.guards:
            super().__init__(Subsets(source, source.closure(source.start)))
            return
        threads = Threads(source)
        begun = threads.start[0]
        if begun and unguarded(source, begun):
            super().__init__(Subsets(source, [thread.state for thread in begun]))
            return
        machine = Machine(threads).explore()
        self._fix(*trimmed(machine.table, machine.accepting, machine.start))
        self.needs_lookahead = threads.needs_lookahead

    @classmethod
    def from_table(cls, table: Table, accepting: Bools, start: int) -> DFA:
        """Return the automaton with these arrays, without useless states and with new state numbers.

        `table` is an (S, 256) int array of next states, where 0 is the dead one; `accepting` is an (S,) bool array.
        """
        table = np.array(table, np.int32)
        table[0] = 0
        return DFA(trimmed(table, np.asarray(accepting, bool), start))

    @classmethod
    def from_strings(cls, words: Iterable[str]) -> DFA:
        """Return the language of exactly these strings. Raises TypeError if `words` is one string."""
        if isinstance(words, str | bytes):
            raise TypeError(
                f"{arguments.shown(words, 40)} is one string, not a list of them, such as ['a', 'b']"
            )
        strings = tuple([arguments.text("each of the strings", word) for word in words])
        dfa = DFA(automaton_of(strings))
        dfa.strings = strings
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

    def __contains__(self, text: str) -> bool:
        if self.has_checks or not isinstance(text, str):
            return super().__contains__(text)
        return self.accepts_text(text)

    def is_empty(self) -> bool:
        """Return whether the language has no text."""
        return not self.start

    def is_finite(self) -> bool:
        """Return whether the language has finitely many strings, which holds if its states form no cycle."""
        sorter = TopologicalSorter[int]()
        for state, row in enumerate(self.edges()):
            sorter.add(state, *[target for _, _, target in row])
        try:
            sorter.prepare()
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
        length = arguments.count("length", length, least=0)
        return self._counts.completions(length)[0][self.start]

    def enumerate(self) -> Iterator[str]:
        """Yield the strings of the language, shorter ones first, then by code points; this may never end."""
        return self._counts.enumerate()

    def shortest(self) -> str | None:
        """Return the first string of `enumerate`, or None if there is none."""
        return next(self.enumerate(), None)

    # ---- display

    def __repr__(self) -> str:
        if self.composition is not None:
            return repr(self.composition)
        if not self.start:
            return f"DFA({self.made_by})"
        known = "" if self.ready.all() else " so far"
        return f"DFA({self.num_states} states{known})"

    # ---- operations: each returns a new automaton

    def __xor__(self, other: DFA) -> DFA:
        """Return the texts of exactly one of the two languages."""
        if not isinstance(other, DFA):
            raise TypeError(
                f"{self!r} ^ {arguments.shown(other)}: both must be automata, such as a Regex"
            )
        return self._product(other, "^", operator.xor, (True, True))

    def united_with(self, other: DFA) -> DFA:
        """Return the texts of either language; `a | b` of two automata."""
        return self._product(other, "|", operator.or_, (True, True))

    def intersected_with(self, other: DFA) -> DFA:
        """Return the texts of both languages; `a & b` of two automata."""
        return self._product(other, "&", operator.and_, (False, False))

    def without(self, other: DFA) -> DFA:
        """Return the texts of the first language that are not in the second; `a - b` of two automata."""
        return self._product(other, "-", lambda a, b: a & ~b, (True, False))

    def complement(self) -> DFA:
        """Return all texts that are not in the language; `~a` of an automaton."""
        return anything().without(self)

    def followed_by(self, other: DFA) -> DFA:
        """Return the texts of the first language followed by a text of the second; `a + b` of two automata."""
        nfa = NFA(Budget(f"{arguments.shown(self)} + {arguments.shown(other)}"))
        nfa.start = nfa.include(self, nfa.include(other, ACCEPT))
        return DFA(nfa)

    def repeated(self, least: int, most: float) -> DFA:
        """Return the concatenations of `least` to `most` texts; `a.times(least, most)` of an automaton."""
        is_unbounded = most == math.inf
        last = least if is_unbounded else int(most)
        if not any(self.edges()):  # of the empty text alone, more are the same
            last = min(last, 1)
            least = min(least, 1)
        nfa = NFA(Budget(f"{arguments.shown(self)}.times({least}, {most})"))
        if last > MAX_STATES:
            raise nfa.budget.refusal(f"more than {MAX_STATES:,} states")
        nfa.reserve(last * len(self.edges()))
        state = ACCEPT
        if is_unbounded:
            state = nfa.star(lambda again: nfa.include(self, again), ACCEPT)
        for i in range(last):
            state = nfa.include(self, state)
            if i < last - least:
                state = nfa.optional(state, ACCEPT)
        nfa.start = state
        return DFA(nfa)

    def but_not(self, *others: DFA | str) -> Any:
        """Return the texts that are in none of the others; a str stands for that text itself, not for a pattern."""
        return reduce(operator.sub, others, self)

    def _product(
        self, other: DFA, sign: str, accept: Callable[[Any, Any], Any], alone: tuple[bool, bool]
    ) -> DFA:
        """Return the product; `alone[i]`: a text can be in it when only the i-th automaton is not dead."""
        budget = Budget(f"{arguments.shown(self)} {sign} {arguments.shown(other)}")
        arrays = product(self, other, accept, alone, budget)
        found = DFA.from_table(*arrays)
        found.made_by = budget.what
        return found

    # ---- as a part of a composition

    def parse(self, text: str) -> Any:
        """Return the text itself, or the values of its parts. ValueError if it is not in the language."""
        if self.composition is not None:
            return value_of(self, text)
        if not self.accepts(self.after(self.start, bytes_of(text))):
            raise ValueError(f"{arguments.shown(text)} is not in {arguments.shown(self)}")
        return str(text)

    def reading(self, reader: Reader, begin: int, end: int) -> Reading | None:
        if self.composition is None:
            return super().reading(reader, begin, end)
        if end not in reader.ends(self, begin):
            return None
        return reader.read(self.composition, begin, end)

    @cached_property
    def _unit(self) -> TableUnit:
        return TableUnit(self)

    @property
    def is_void(self) -> bool:
        return not self.start

    def begin(self, after: Continuation) -> list[Item]:
        if self.is_void:
            return []
        return [Hypothesis(self._unit, self.start, after)]

    def least_bytes(self, alone: Bools) -> float:
        return self._unit.least_bytes(self.start, alone)

    @property
    def pieces(self) -> Sequence[Part]:
        if isinstance(self.composition, Concatenation):
            return self.composition.pieces
        return (self,)

    @property
    def inner_parts(self) -> Sequence[Part]:
        if self.composition is None:
            return ()
        return (self.composition,)

    @property
    def literals(self) -> list[str]:
        if self.composition is None:
            return []
        return self.composition.literals

    @property
    def as_dfa(self) -> DFA:
        return self

    @property
    def is_text(self) -> bool:
        if self._has_parse:
            return False
        return self.composition is None or self.composition.is_text

    @property
    def has_checks(self) -> bool:
        return self._has_parse or super().has_checks

    @property
    def _has_parse(self) -> bool:
        return type(self).parse is not DFA.parse

    def minimise(self) -> DFA:
        """Return the automaton of this language with the fewest states."""
        rows = self.edges()
        if not self.start:
            return self
        budget = Budget(
            f"{arguments.shown(self)}.minimise()", remedy="a language of fewer states would work"
        )
        number, kept = merging(rows, self.accepting, budget)
        table = number[self.table[kept]]
        return DFA.from_table(table, self.accepting[kept], int(number[self.start]))


@cache
def anything() -> DFA:
    """Return the language of all text."""
    nfa = NFA()
    nfa.start = nfa.anything(ACCEPT)
    return DFA(nfa).explore()


@part_of.register
def _(text: str) -> Literal:
    return Literal(text, DFA.from_strings([text]))


@part_of.register(list)
@part_of.register(tuple)
def _(strings: Sequence[str]) -> DFA:
    return DFA.from_strings(strings)
