"""DFA: a language of text, as a deterministic automaton over its UTF-8 bytes.

The universe is all UTF-8 text. A complement holds every string of code points that the language does not hold; lone
surrogates are not text. Lengths are counted in characters.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, reduce
from operator import sub
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from llmppl.constraints.automata.budget import Budget
from llmppl.constraints.automata.counting import Counts
from llmppl.constraints.automata.determinise import Subsets, Threads, unguarded
from llmppl.constraints.automata.drawing import to_dot, to_html
from llmppl.constraints.automata.lazy_dfa import Machine
from llmppl.constraints.automata.nfa import ACCEPT, DEAD, NFA, merged, utf8
from llmppl.constraints.automata.operations import automaton_of, classes_of, product, trimmed
from llmppl.constraints.automata.unicode_classes import negated, points
from llmppl.constraints.constraint import VocabularyLike
from llmppl.constraints.masks import TokenIndex
from llmppl.support import arguments
from llmppl.support.graphs import reachable
from llmppl.support.locks import cached_property

__all__ = ["DFA", "anything"]


class DFA(Machine):
    """A language of text, as a deterministic automaton over its UTF-8 bytes.

    It is a recognizer: `start` (0 if the language is empty), `step(state, byte)`, `accepts(state)`. States are small
    integers; 0 is dead, and `step` never returns it. Rows are computed on demand. `table`, `ready` and `accepting` show
    the known rows; fetch them again after `row`, `step` or `explore`, which may replace them. A copy is the automaton
    itself.

    Parameters
    ----------
    nfa : NFA
        If it has guards that depend on more than the start of the text, all states are computed at once, because only
        then it is known from which states nothing is accepted.
    """

    strings: tuple[str, ...] | None = None          # the argument of `from_strings`

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
    def from_table(cls, table: NDArray[np.int32], accepting: NDArray[np.bool_], start: int) -> DFA:
        """Return the automaton with these arrays, without useless states and with new state numbers.

        Parameters
        ----------
        table : (S, 256) int array of next states; 0 is the dead one
        accepting : (S,) bool array
        start : int
        """
        dfa, table = DFA.__new__(DFA), np.array(table, np.int32)
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

    @classmethod
    def from_interegular(cls, fsm: Any) -> DFA:
        """Return the language of an `interegular` automaton over characters (`interegular.FSM`)."""
        nfa = _nfa_of(fsm)
        machine = Machine(Subsets(nfa, nfa.closure(nfa.start))).explore()
        return cls.from_table(machine.table, machine.accepting, machine.start)

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
        targets = [{t for _, _, t in row} for row in self.edges()]
        entering = Counter(itertools.chain(*targets))

        def targets_to_sort(state: int) -> list[int]:       # topological order: a state follows all that lead to it
            entering.subtract(targets[state])
            return [t for t in targets[state] if not entering[t]]

        first = [state for state in range(len(targets)) if not entering[state]]
        return len(list(reachable(first, targets_to_sort))) == len(targets)

    def equivalent(self, other: DFA) -> bool:
        """Return whether both have the same language."""
        return (self ^ other).is_empty()

    @cached_property
    def _counts(self) -> Counts:
        return Counts(self)

    def count(self, length: int, unit: Literal["characters", "bytes"] = "characters") -> int:
        """Return the number of strings of exactly `length` characters (UTF-8 bytes with `unit="bytes"`), exactly."""
        length = arguments.count("length", length, least=0)
        if arguments.one_of("unit", unit, ["characters", "bytes"]) == "characters":
            return self._counts.completions(length)[0][self.start]
        return self._counts.of_bytes(length)

    def enumerate(self) -> Iterator[str]:
        """Yield the strings of the language, shorter ones first, then by code points; this may never end."""
        return self._counts.enumerate()

    def shortest(self) -> str | None:
        """Return the first string of `enumerate`, or None if there is none."""
        return next(self.enumerate(), None) if self.start else None

    def sample(self, rng: np.random.Generator, max_length: int) -> str:
        """Draw one of the strings of at most `max_length` characters, all equally likely.

        Raises ValueError if there are none.
        """
        max_length = arguments.count("max_length", max_length, least=0)
        found = self._counts.sample(rng, max_length)
        if found is None:
            raise ValueError(f"{self!r} has no string of at most {max_length} characters")
        return found

    # ---- display

    def __repr__(self) -> str:
        known = "" if self.ready.all() else " so far"
        return f"DFA({self.num_states} states{known})"

    def to_dot(self) -> str:
        """Return the automaton in the language of Graphviz (`dot -Tsvg`)."""
        return to_dot(self)

    def _repr_html_(self) -> str:
        return to_html(self)

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
            return NotImplemented
        nfa = NFA(Budget(f"{arguments.shown(self)} + {arguments.shown(other)}"))
        nfa.start = nfa.include(self, nfa.include(other, ACCEPT))
        return DFA(nfa)

    def star(self) -> DFA:
        """Return the concatenations of any number of texts, none included."""
        nfa = NFA(Budget(f"{arguments.shown(self)}.star()"))
        nfa.start = nfa.star(lambda again: nfa.include(self, again), ACCEPT)
        return DFA(nfa)

    def optional(self) -> DFA:
        """Return the language with the empty text added."""
        nfa = NFA(Budget(f"{arguments.shown(self)}.optional()"))
        nfa.start = nfa.split([nfa.include(self, ACCEPT), ACCEPT])
        return DFA(nfa)

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

    def _product(
        self, other: DFA, sign: str, accept: Callable[[Any, Any], Any], alone: tuple[bool, bool]
    ) -> DFA:
        """Return the product; `alone[i]`: a text can be in it when only the i-th automaton is not dead."""
        if not isinstance(other, DFA):
            return NotImplemented
        if not other.start or not self.start:       # an empty language
            kept = (dfa for dfa, alive in zip((self, other), alone, strict=True) if dfa.start and alive)
            return next(kept, DFA(NFA()))
        budget = Budget(f"{arguments.shown(self)} {sign} {arguments.shown(other)}")
        return DFA.from_table(*product(self, other, accept, alone, budget))

    def minimise(self) -> DFA:
        """Return the automaton of this language with the fewest states."""
        rows = self.edges()
        if not self.start:
            return self
        budget = Budget(f"{arguments.shown(self)}.minimise()", remedy="a language of fewer states would work")
        classes = classes_of(rows, self.accepting, budget)
        number = np.zeros(len(rows), np.int32)
        for new, part in enumerate(classes, 1):
            number[list(part)] = new
        kept = [0, *(min(part) for part in classes)]
        return DFA.from_table(number[self.table[kept]], self.accepting[kept], int(number[self.start]))


@lru_cache(1)
def anything() -> DFA:
    """Return the language of all text."""
    nfa = NFA()
    nfa.start = nfa.anything(ACCEPT)
    return DFA(nfa).explore()


def _nfa_of(fsm: Any) -> NFA:
    """Return the language of an `interegular.FSM` over characters; some of its states may lead nowhere."""
    from interegular.fsm import anything_else

    named = set(fsm.alphabet) - {anything_else}
    ranges: dict[int, list[tuple[int, int]]] = {}   # by symbol
    for char, symbol in fsm.alphabet.items():
        chars = negated(points(named)) if char is anything_else else points(char)
        ranges.setdefault(symbol, []).extend(chars)
    fragments = {symbol: utf8(merged(pairs)) for symbol, pairs in ranges.items()}
    nfa = NFA(Budget(f"the interegular automaton of {len(fsm.states):,} states"))
    entry = {state: nfa.add(()) for state in fsm.states}
    for state, moves in fsm.map.items():
        known = sorted(moves.keys() & fragments.keys())
        reads = [nfa.read(fragments[symbol], entry[moves[symbol]]) for symbol in known if moves[symbol] in entry]
        nfa.epsilon[entry[state]] = (*[ACCEPT] * (state in fsm.finals), *reads)
    nfa.start = entry[fsm.initial]
    return nfa
