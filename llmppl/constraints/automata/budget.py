"""Limits on the size of automata, and the error that they raise.

A `Budget` counts states and steps while an automaton is built, and raises `TooLarge` before the memory is taken. A
state belongs to a deterministic automaton and takes a row of 1 KiB. A step is one transition that is examined, or one
member of a stored set of states; an expensive one counts several times. A construction that exhausts its budget ends
within seconds.
"""

from __future__ import annotations

MAX_STATES = 130_000  # of a deterministic automaton, at 1 KiB each
MAX_STEPS = 15_000_000  # of a construction, at 100 to 300 ns each
MAX_PARTS = 1_000_000  # other parts of one automaton: states of an NFA, prefixes, edges

REMEDY = "shorter counted repeats, fewer of them, or a smaller language would work"


class TooLarge(ValueError):
    """Error of an automaton that would pass a limit: `what` it is, the `count` that it passes, and a `remedy`.

    Examples
    --------
    >>> try:
    ...     Regex("(?s:.{500}){1000}")
    ... except TooLarge as error:
    ...     print(error.count)
    more than 1,000,000 states
    """

    def __init__(self, what: str, count: str, remedy: str = REMEDY) -> None:
        super().__init__(f"{what} is too large: {count}; {remedy}")
        self.what = what
        self.count = count
        self.remedy = remedy

    def __reduce__(self) -> tuple[object, ...]:
        return TooLarge, (self.what, self.count, self.remedy)


class Budget:
    """Count of the states and steps that an automaton has taken. Errors name it, `what`, and a `remedy`.

    A part of the construction may have a budget of its own: half of the steps, which also count for the `whole`.
    """

    __slots__ = ("remedy", "states", "steps", "what", "whole")

    def __init__(self, what: str, remedy: str = REMEDY, whole: Budget | None = None) -> None:
        self.what = what
        self.remedy = remedy
        self.whole = whole
        self.states = 0
        self.steps = 0

    def spend(self, states: int = 0, steps: int = 0) -> None:
        """Count `states` and `steps` before they are made. Raises TooLarge above MAX_STATES or MAX_STEPS."""
        self.states += states
        self.steps += steps
        if self.states > MAX_STATES:
            raise self.refusal(f"more than {MAX_STATES:,} states")
        if self.steps > MAX_STEPS // (1 + (self.whole is not None)):
            raise self.refusal(f"more than {MAX_STEPS:,} steps to make its states")
        if self.whole:
            self.whole.spend(steps=steps)

    def left(self) -> tuple[int, int]:
        """Return the numbers of states and steps that may still be made."""
        steps = MAX_STEPS // (1 + (self.whole is not None)) - self.steps
        if self.whole:
            steps = min(steps, self.whole.left()[1])
        return MAX_STATES - self.states, steps

    def refusal(self, count: str) -> TooLarge:
        """Return the error for a passed limit; `count` names the limit."""
        return TooLarge(self.what, count, self.remedy)
