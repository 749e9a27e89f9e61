"""The terminals of a grammar, and their automata side by side.

A terminal is an NFA, whose states may have *guards*: a look-ahead, an automaton of its own that must (not) match behind
a place, or a look-behind, decided by a *tracker* that reads along. The automata have one numbering of states; states
that read a byte or end are *stops*.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llmppl.languages.nfa import DEAD, NFA, Ahead, Behind


@dataclass(frozen=True)
class Terminal:
    """A terminal: a regular expression, or some words; its automaton; and the keywords that lark splits off it."""

    name: str
    pattern: str
    nfa: NFA
    words: tuple[str, ...] = ()                     # longest first; empty for a regular expression
    keywords: tuple[str, ...] = ()                  # names of the terminals that its text may be instead
    embedded: frozenset[str] = frozenset()          # names of those whose alternatives lark leaves this one to


class Assumptions(dict[int, bool]):
    """Which look-aheads (by entry) are assumed to hold; to ask for another one raises Undecided."""

    def __missing__(self, entry: int) -> bool:
        raise Undecided(entry)


class Undecided(Exception):
    """A closure met a look-ahead (its entry is `args[0]`) of which it is not known whether it holds."""


class Automata:
    """The automata of terminals side by side."""

    def __init__(self, terminals: Sequence[Terminal]) -> None:
        self.epsilon: list[tuple[int, ...]] = []
        self.edges: list[tuple[tuple[int, int, int], ...]] = []
        self.guards: dict[int, Behind | Ahead] = {}
        self.names: list[str] = []                      # of the terminal a state belongs to
        self.ends: dict[int, str] = {}                  # accepting states, and those that satisfy a look-ahead
        self.found = set[int]()                         # those of `ends` that satisfy a look-ahead
        self.starts: dict[str, int] = {}
        for terminal in terminals:
            self._add(terminal.name, terminal.nfa)
        trackers = {id(guard.tracker): guard.tracker for guard in self.guards.values() if isinstance(guard, Behind)}
        self.trackers: list[Any] = list(trackers.values())
        self._tracker_number = {key: number for number, key in enumerate(trackers)}

    def _add(self, name: str, nfa: NFA) -> None:
        base = len(self.epsilon)
        self.starts[name] = base + nfa.start if nfa.start != DEAD else DEAD
        self.names += [name] * len(nfa)
        for q in range(len(nfa)):
            self.epsilon.append(tuple([base + target for target in nfa.epsilon[q]]))
            self.edges.append(tuple([(lo, hi, base + target) for lo, hi, target in nfa.edges(q)]))
        for q, guard in nfa.guards.items():
            self.guards[base + q] = Ahead(base + guard.entry, guard.positive) if isinstance(guard, Ahead) else guard
        self.ends[base] = self.ends[base + 1] = name
        self.found.add(base + 1)

    def closure(self, states: Iterable[int], trackers: tuple[int, ...], ahead: Assumptions) -> list[int]:
        """The stops that `states` become without reading, most preferred first.

        Raises Undecided at a look-ahead that `ahead` does not decide.
        """
        seen: set[int] = set()
        order: list[int] = []
        stack = list(states)[::-1]
        while stack:
            q = stack.pop()
            if q in seen:
                continue
            seen.add(q)
            guard = self.guards.get(q)
            if guard is not None and self._holds(guard, trackers, ahead) != guard.positive:
                continue
            if self.edges[q] or q in self.ends:
                order.append(q)
            stack.extend(reversed(self.epsilon[q]))
        return order

    def _holds(self, guard: Ahead | Behind, trackers: tuple[int, ...], ahead: Assumptions) -> bool:
        if isinstance(guard, Ahead):
            return ahead[guard.entry]
        number = self._tracker_number[id(guard.tracker)]
        return bool(self.trackers[number].accepts(trackers[number]))

    def track(self, states: tuple[int, ...], byte: int) -> tuple[int, ...]:
        """The states of the trackers after one more byte."""
        pairs = zip(self.trackers, states, strict=True)
        return tuple([int(tracker.step(state, byte) or 0) if state else 0 for tracker, state in pairs])

    def unguarded(self, state: int) -> Iterable[int]:
        """What a state becomes without reading, whatever its guard says, with the look-ahead if it is one."""
        guard = self.guards.get(state)
        return (*self.epsilon[state], guard.entry) if isinstance(guard, Ahead) else self.epsilon[state]

    def names_of(self, states: Iterable[int]) -> set[str]:
        """The terminals that states belong to."""
        return set(map(self.names.__getitem__, states))

    def edges_of(self, states: Iterable[int]) -> Iterator[tuple[int, int, int]]:
        """The edges of states: first and last byte, and target."""
        return itertools.chain.from_iterable(map(self.edges.__getitem__, states))

    def read(self, states: Iterable[int], byte: int) -> list[int]:
        """Targets of the edges on `byte`, in order."""
        return [target for lo, hi, target in self.edges_of(states) if lo <= byte <= hi]
