"""How large automata may get: one limit on states and on the work of making them, and one error.

A `Budget` is spent while something is made, before the memory is taken, and raises `TooLarge` when it is spent. A state
is one of a deterministic automaton, which takes a row of 1 KiB; a step is one transition looked at, or one member of a
set of states that is kept. What has used up its budget ends within seconds and below 2 GiB.
"""

from __future__ import annotations

__all__ = [
    "MAX_EDGES", "MAX_ITEMS", "MAX_KEPT", "MAX_LEXED", "MAX_NFA_STATES", "MAX_SCANS", "MAX_SEARCHED", "MAX_STATES",
    "MAX_STEPS", "MAX_TRIE", "Budget", "TooLarge",
]  # fmt: skip

MAX_STATES = 250_000                                # of a deterministic automaton
MAX_STEPS = 20_000_000
MAX_EDGES = 3_000_000                               # of a deterministic automaton that is taken apart
MAX_NFA_STATES = 1_000_000                           # of an NFA, whose states are small
MAX_SCANS = 50_000                                  # states of a grammar's lexer, each some sets of states of terminals
MAX_KEPT = 5_000_000                                # states of terminals in those sets
MAX_LEXED = 5_000_000                               # terminals of all selections that the parser makes
MAX_SEARCHED = 5_000_000                            # runs of a grammar's parser, to see whether a text goes on
MAX_ITEMS = 2_000_000                               # places in rules of all states of a parser
MAX_TRIE = 2_000_000                                # prefixes of a list of strings, before equal ends are merged

REMEDY = "shorter counted repeats, fewer of them, or a smaller language would work"


class TooLarge(ValueError):
    """An automaton would pass its limit: `what` it is, the `count` that it passes, and what would work."""

    def __init__(self, what: str, count: str, remedy: str = REMEDY) -> None:
        super().__init__(f"{what} is too large: {count}; {remedy}")
        self.what, self.count, self.remedy = what, count, remedy

    def __reduce__(self) -> tuple[object, ...]:
        return TooLarge, (self.what, self.count, self.remedy)


class Budget:
    """The states and steps that one automaton may take.

    Parameters
    ----------
    what : str
        What is made, for the error.
    remedy : str
        What would work instead.
    """

    __slots__ = ("remedy", "states", "steps", "what")

    def __init__(self, what: str, remedy: str = REMEDY) -> None:
        self.what, self.remedy, self.states, self.steps = what, remedy, 0, 0

    def spend(self, states: int = 0, steps: int = 0) -> None:
        """Count what is about to be made. TooLarge if that is more than there may be."""
        self.states += states
        self.steps += steps
        if self.states > MAX_STATES:
            raise self.refusal(f"more than {MAX_STATES:,} states")
        if self.steps > MAX_STEPS:
            raise self.refusal(f"more than {MAX_STEPS:,} steps to make its states")

    def refusal(self, count: str) -> TooLarge:
        """The error for a limit that is passed: `count` says which."""
        return TooLarge(self.what, count, self.remedy)
