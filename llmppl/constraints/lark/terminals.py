"""The terminals of a grammar: in the order in which lark's lexers try them, and their automata side by side.

A terminal is an NFA. Its states may have *guards*: a look-ahead, which is an automaton that must (or must not) match
after a place, or a look-behind, which a *tracker* of the text so far decides. All automata share one numbering
of states. States that read a byte or end are *stops*.

A special token is a terminal that reads one symbol beyond the bytes, from `FIRST_SPECIAL` on.

A *keyword* is a terminal that is one string, which the regular expression of another one matches as a whole.

Source: the lexer of lark 1.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from lark.lexer import PatternStr, TerminalDef

from llmppl.constraints.automata.budget import MAX_PARTS, TooLarge
from llmppl.constraints.automata.determinise import Leftmost
from llmppl.constraints.automata.nfa import ACCEPT, DEAD, NFA, Ahead, Behind
from llmppl.constraints.automata.regex import parse
from llmppl.support.graphs import reachable, reversed_edges

FIRST_SPECIAL = 256  # the symbol of the first special token


@dataclass(frozen=True)
class Terminal:
    """A terminal with its automaton and its keywords."""

    name: str
    pattern: str
    nfa: NFA
    keywords: tuple[str, ...]  # names of the terminals that its text may be instead
    embedded: frozenset[str]  # names of terminals whose alternatives cover this one


class Assumptions(dict[int, bool]):
    """Look-aheads, by entry, with whether they are assumed to hold. The lookup of another one raises Undecided."""

    def __missing__(self, entry: int) -> bool:
        raise Undecided(entry)


class Undecided(Exception):
    """A closure met a look-ahead, with the entry `args[0]`, that is not assumed to hold or not."""


class Automata:
    """The automata of terminals side by side, over bytes and the symbols of special tokens."""

    def __init__(self, terminals: Sequence[Terminal], num_symbols: int) -> None:
        self.num_symbols = num_symbols
        self.epsilon = list[tuple[int, ...]]()
        self.edges = list[tuple[tuple[int, int, int], ...]]()
        self.guards = dict[int, Behind | Ahead]()
        self.names = list[str]()  # of each state's terminal
        self.ends = dict[int, str]()  # accepting states, and ends of look-aheads
        self.starts = dict[str, int]()
        for terminal in terminals:
            self._add(terminal.name, terminal.nfa)
        behinds = [guard.tracker for guard in self.guards.values() if isinstance(guard, Behind)]
        self.trackers: list[Any] = list(dict.fromkeys(behinds))
        self.first_trackers = tuple(int(tracker.start) for tracker in self.trackers)

    def _add(self, name: str, nfa: NFA) -> None:
        base = len(self.epsilon)
        self.starts[name] = DEAD
        if nfa.start != DEAD:
            self.starts[name] = base + nfa.start
        self.names += [name] * len(nfa)
        for q, targets in enumerate(nfa.epsilon):
            self.epsilon.append(tuple([base + target for target in targets]))
            edges = list[tuple[int, int, int]]()
            for lo, hi, target in nfa.edges(q):
                edges.append((lo, hi, base + target))
            self.edges.append(tuple(edges))
        for q, guard in nfa.guards.items():
            if isinstance(guard, Ahead):
                guard = Ahead(base + guard.entry, guard.positive)
            self.guards[base + q] = guard
        self.ends[base] = self.ends[base + 1] = name

    def closure(
        self, states: Iterable[int], trackers: tuple[int, ...], ahead: Assumptions
    ) -> list[int]:
        """Return the stops that `states` reach without reading, most preferred first.

        Raises Undecided at a look-ahead that `ahead` does not decide.
        """
        seen = set()
        order = []
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
            stack += reversed(self.epsilon[q])
        return order

    def _holds(self, guard: Ahead | Behind, trackers: tuple[int, ...], ahead: Assumptions) -> bool:
        if isinstance(guard, Ahead):
            return ahead[guard.entry]
        number = self.trackers.index(guard.tracker)
        return bool(self.trackers[number].accepts(trackers[number]))

    def track(self, states: tuple[int, ...], byte: int) -> tuple[int, ...]:
        """Return the states of the trackers after one more byte; after a special token, those of a text's beginning."""
        if byte >= FIRST_SPECIAL:
            return self.first_trackers
        after = list[int]()
        for tracker, state in zip(self.trackers, states, strict=True):
            after.append(tracker.step(state, byte) or 0)
        return tuple(after)

    def onward(self, state: int) -> Iterator[int]:
        """Yield the states that an edge or an epsilon edge leads to."""
        yield from self.epsilon[state]
        for _, _, target in self.edges[state]:
            yield target

    def firsts(self, states: Iterable[int]) -> npt.NDArray[np.bool_]:
        """Return the symbols that may be read first from some states, without regard to guards.

        The result is (num_symbols,) bool.
        """
        firsts = np.zeros(self.num_symbols, bool)
        alive = set(states) - {DEAD}
        for lo, hi, _ in self.edges_of(reachable(alive, self.epsilon.__getitem__)):
            firsts[lo : hi + 1] = True
        return firsts

    def names_of(self, states: Iterable[int]) -> set[str]:
        """Return the terminals that states belong to."""
        return {self.names[state] for state in states}

    def edges_of(self, states: Iterable[int]) -> Iterator[tuple[int, int, int]]:
        """Yield the edges of states: first and last byte, and target."""
        for state in states:
            yield from self.edges[state]

    def read(self, states: Iterable[int], byte: int) -> list[int]:
        """Return the targets of the edges on `byte`, in order."""
        return [target for lo, hi, target in self.edges_of(states) if lo <= byte <= hi]


def special_terminal(name: str, number: int) -> Terminal:
    """Return the terminal of a special token, by the number of the token among those of a grammar."""
    symbol = FIRST_SPECIAL + number
    nfa = NFA()
    nfa.start = nfa.read((((symbol, symbol, -1),),), ACCEPT)
    return Terminal(name, name, nfa, (), frozenset())


def split_keywords(terminals: Sequence[TerminalDef], flags: int) -> list[Terminal]:
    """Return the terminals in the order in which lark's lexers try them, with their keywords.

    A text that is a keyword of the terminal that matches it is read as the keyword. Where both may stand, the keyword
    is no alternative of its own.
    """
    nfas = {each.name: _nfa(each, flags) for each in terminals}
    sizes = {name: len(nfa) for name, nfa in nfas.items()}
    if sum(sizes.values()) > MAX_PARTS:
        worst = max(sizes, key=sizes.__getitem__)
        raise TooLarge(
            f"terminal {worst}, beside the others,",
            f"{sizes[worst]:,} states, and more than {MAX_PARTS:,} together",
            "fewer or smaller counted repeats would work",
        )
    ranked = sorted(terminals, key=_rank)
    words = [each for each in ranked if isinstance(each.pattern, PatternStr)]
    flags_of = {each.name: set(each.pattern.flags) for each in ranked}
    keywords = {each.name: _keywords(each, nfas[each.name], words) for each in ranked}
    hosts = reversed_edges(keywords.items())
    found = list[Terminal]()
    for each in ranked:
        name = each.name
        embedded = frozenset(host for host in hosts[name] if flags_of[name] <= flags_of[host])
        found.append(Terminal(name, each.pattern.to_regexp(), nfas[name], keywords[name], embedded))
    return found


def _rank(terminal: TerminalDef) -> tuple[int, int, int, str]:
    pattern = terminal.pattern
    return -terminal.priority, -pattern.max_width, -len(pattern.value), terminal.name


def _nfa(terminal: TerminalDef, flags: int) -> NFA:
    pattern = terminal.pattern.to_regexp()
    try:
        nfa = parse(pattern, flags)
    except ValueError as error:
        raise ValueError(f"terminal {terminal.name}: {error}") from error
    if terminal.pattern.min_width == 0:
        raise ValueError(
            f"terminal {terminal.name}: {pattern!r} matches the empty text, which lark's lexers refuse"
        )
    return nfa


def _keywords(terminal: TerminalDef, nfa: NFA, words: Iterable[TerminalDef]) -> tuple[str, ...]:
    """Return the words that a regular expression matches whole at their beginning."""
    candidates = [word for word in words if word.priority == terminal.priority]
    if isinstance(terminal.pattern, PatternStr) or not candidates:
        return ()
    machine = Leftmost(nfa)
    found = list[str]()
    for word in candidates:
        if _matches_whole(machine, word.pattern.value.encode()):
            found.append(word.name)
    return tuple(found)


def _matches_whole(machine: Leftmost, data: bytes) -> bool:
    state = machine.after(machine.start, data)
    since = machine.at_end(state)  # bytes from the match's end to the text's end
    if since is None:
        since = machine.matched(state)
    return since == 0
