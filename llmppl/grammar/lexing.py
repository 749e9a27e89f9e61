"""Lark's lexer, byte by byte: every way in which a text may be cut into tokens is followed at once.

Lark's lexer, exactly. In a parser state q it matches one regular expression, the alternation of the terminals that q
has an action for and of the ignored ones, ordered by (priority, greatest width, length of pattern, name), with
`re.match`: the first alternative that matches at all wins, and inside it the match that `re` prefers, not the
longest. If the text matched is that of a string terminal which the regular expression of the winner covers, the token
is that string (keywords against names). It goes to the parser, and the lexer goes on behind it in the new state.

The one idea: do not wait to see where a match ends; assume it. A *scan* is the current token under such an assumption:
the threads of its match in order of preference, what is *forbidden* (NFA states of earlier tokens that are preferred to
the match assumed: if ever one of them accepts, `re` would have matched there, and the assumption is wrong) and what is
*required* (look-aheads that were assumed to hold). Where a thread accepts, the scan splits: either one of the threads
before it accepts later on, and the token goes on with those; or none does, the token ends here, and they are forbidden.

Words: a *symbol* is a terminal as the parser reads it; a *rest* is what an ended token leaves behind it: (forbidden,
required, states of the look-behind trackers).

Source: the lexer of lark 1.3.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llmppl.languages.limits import MAX_KEPT, MAX_SCANS, TooLarge, shown
from llmppl.languages.nfa import DEAD, NFA, Ahead, Behind

States = frozenset[int]
Bools = npt.NDArray[np.bool_]


Carved = tuple[tuple[str, tuple[str, ...]], ...]        # terminals, and the strings carved out of each, in order


@dataclass(frozen=True)
class Terminal:
    """A terminal: a regular expression, or some words; its automaton; and the words that lark carves out of it."""

    name: str
    pattern: str
    nfa: NFA
    words: tuple[str, ...] = ()                     # longest first; empty for a regular expression
    carved: tuple[str, ...] = ()                    # names of the terminals that its text may be instead
    embedded: frozenset[str] = frozenset()          # names of those whose alternatives lark leaves this one to


class Rest(NamedTuple):
    """What an ended token leaves: NFA states that must never accept, sets of which one must, trackers' states."""

    forbidden: States
    required: frozenset[States]
    trackers: tuple[int, ...]


class Scan(NamedTuple):
    """The current token under one hypothesis: `threads` in order, `keywords` that its text may still be.

    `carved` says which keywords are carved out of which threads' terminals; of the lexer nothing else matters by then.
    """

    carved: Carved
    threads: tuple[int, ...]
    keywords: States
    rest: Rest
    column: int


class Ended(NamedTuple):
    """A token that may end here: the symbol for the parser (None if ignored), and the rest (a number)."""

    symbol: str | tuple[str, int] | None
    rest: int


Outcome = tuple[tuple[int, ...], tuple[Ended, ...]]     # scans in which the token goes on; ways in which it ends


class Automata:
    """The terminals' NFAs side by side, with one numbering of states; states that read a byte or end are *stops*."""

    def __init__(self, terminals: Iterable[tuple[str, NFA]]):
        self.epsilon: list[tuple[int, ...]] = []
        self.edges: list[tuple[tuple[int, int, int], ...]] = []
        self.guards: dict[int, Behind | Ahead] = {}
        self.names: list[str] = []                      # of the terminal a state belongs to
        self.ends: dict[int, str] = {}                  # accepting states, and those that satisfy a look-ahead
        self.found = set[int]()                         # those of `ends` that satisfy a look-ahead
        self.starts: dict[str, int] = {}
        self.trackers: list[Any] = []
        for name, nfa in terminals:
            base = len(self.epsilon)
            self.starts[name] = base + nfa.start if nfa.start != DEAD else DEAD
            self.names += [name] * len(nfa)
            for q in range(len(nfa)):
                self.epsilon.append(tuple(base + target for target in nfa.epsilon[q]))
                self.edges.append(tuple((lo, hi, base + target) for lo, hi, target in nfa.edges(q)))
            for q, guard in nfa.guards.items():
                if isinstance(guard, Ahead):
                    self.guards[base + q] = Ahead(base + guard.entry, guard.positive)
                else:
                    self.guards[base + q] = guard
                    if not any(guard.tracker is tracker for tracker in self.trackers):
                        self.trackers.append(guard.tracker)
            self.ends[base] = self.ends[base + 1] = name
            self.found.add(base + 1)

    def closure(self, states: Iterable[int], trackers: tuple[int, ...], ahead: dict[int, bool]) -> list[int]:
        """The stops that `states` become without reading, most preferred first; `ahead` says which look-aheads hold.

        Raises _Undecided at a look-ahead that `ahead` does not decide.
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
            if isinstance(guard, Ahead):
                if guard.entry not in ahead:
                    raise _Undecided(guard.entry)
                if ahead[guard.entry] != guard.positive:
                    continue
            elif guard is not None:
                tracker = next(i for i, tracker in enumerate(self.trackers) if tracker is guard.tracker)
                if self.trackers[tracker].accepts(trackers[tracker]) != guard.positive:
                    continue
            if self.edges[q] or q in self.ends:
                order.append(q)
            stack.extend(reversed(self.epsilon[q]))
        return order

    def read(self, states: Iterable[int], byte: int) -> list[int]:
        """Targets of the edges on `byte`, in order."""
        return [target for q in states for lo, hi, target in self.edges[q] if lo <= byte <= hi]


class _Undecided(Exception):
    """A closure met a look-ahead (its entry is `args[0]`) of which it is not known whether it holds."""


class Scans:
    """All scans of a grammar, numbered as they are met, and what a byte makes of each."""

    def __init__(
        self, terminals: Sequence[Terminal], ignored: frozenset[str], lexers: Sequence[Sequence[str]], indenter: Any
    ):
        automata = self.automata = Automata((terminal.name, terminal.nfa) for terminal in terminals)
        self.lexers, self.ignored = lexers, ignored
        self.newline = indenter.NL_type if indenter else None
        self.tab = indenter.tab_len if indenter else 0
        self.scans: list[Scan] = []
        self.rests: list[Rest] = []
        self._scan_number: dict[Scan, int] = {}
        self._rest_number: dict[Rest, int] = {}
        self._starts: dict[tuple[int, int], tuple[int, ...]] = {}
        self._heads: dict[int, Bools] = {}
        self._rows: list[list[Outcome | None]] = []     # by class of bytes
        self._tracker_cuts: dict[tuple[int, int], list[int]] = {}
        self._outcomes: dict[Outcome, Outcome] = {}     # equal ones are one object
        self._cuts: list[list[int]] = []
        self._order: dict[int, tuple[list[str], Carved]] = {}
        self._settled: dict[Any, Outcome] = {}
        self._size = 0                                  # of all that is kept, in states of terminals
        self._terminals = {terminal.name: terminal for terminal in terminals}
        self.first = self.rest_number(
            Rest(frozenset(), frozenset(), tuple(int(tracker.start) for tracker in automata.trackers))
        )

    def order(self, lexer: int) -> tuple[list[str], Carved]:
        """The alternatives of a lexer in lark's order, and what is carved out of them."""
        if lexer not in self._order:
            here = set(self.lexers[lexer])
            terminals = [self._terminals[name] for name in self.lexers[lexer]]
            pairs = [(t.name, tuple([name for name in t.carved if name in here])) for t in terminals]
            left = [terminal.name for terminal in terminals if here.isdisjoint(terminal.embedded)]
            self._order[lexer] = left, tuple([pair for pair in pairs if pair[1]])
        return self._order[lexer]

    def rest_number(self, rest: Rest) -> int:
        number = self._rest_number.get(rest)
        if number is None:
            self._keep(len(rest.forbidden) + sum(map(len, rest.required)), ())
            number = len(self._rest_number)
            self.rests[number:] = [rest]            # in place of what an interrupt has left
            self._rest_number[rest] = number
        return number

    def scan_number(self, scan: Scan) -> int:
        number = self._scan_number.get(scan)
        if number is None:
            self._keep(len(scan.threads) + len(scan.keywords), scan.threads)
            number = len(self._scan_number)
            self.scans[number:], self._rows[number:], self._cuts[number:] = [scan], [[]], [[]]
            self._scan_number[scan] = number
        return number

    def _keep(self, size: int, threads: Sequence[int]) -> None:
        """Count what is kept; ValueError, with the terminal that asks for most, if it is too much."""
        self._size += size
        if self._size > MAX_KEPT or len(self.scans) >= MAX_SCANS:
            some = [q for scan in self.scans[-1000:] for q in scan.threads] or threads
            name, _ = Counter(self.automata.names[q] for q in some).most_common(1)[0]
            raise TooLarge(
                f"terminal {name} {shown(self._terminals[name].pattern)!r}",
                f"{len(self.scans):,} states of the lexer so far, with {self._size:,} of its terminals in them",
                "smaller counted repeats, none of them behind what may begin anywhere, as in (.*a.{20}), would work",
            )

    def start(self, lexer: int, rest: int) -> tuple[int, ...]:
        """The scans that begin a token after `rest`: several if look-aheads at its beginning are yet to be decided."""
        key = lexer, rest
        found = self._starts.get(key)
        if found is None:
            alternatives, carved = self.order(lexer)
            threads = [self.automata.starts[name] for name in alternatives]
            keywords = [self.automata.starts[name] for _, names in carved for name in names]
            alive = [q for q in threads if q != DEAD]
            scans, ended = self._settle(carved, alive, keywords, self.rests[rest], -1)
            assert not ended, "lark refuses terminals that match the empty text"
            found = self._starts[key] = scans
        return found

    def step(self, number: int, byte: int) -> Outcome:
        """What `byte` makes of a scan: the scans in which the token goes on, and how it may end behind the byte."""
        cuts = self._cuts[number] or self.classes(number)
        i = bisect_right(cuts, byte) - 1
        outcome = self._rows[number][i]
        if outcome is None:
            outcome = self._read(number, byte)
            outcome = self._rows[number][i] = self._outcomes.setdefault(outcome, outcome)
        return outcome

    def classes(self, number: int) -> list[int]:
        """One byte of each class of bytes that a scan does not tell apart."""
        if not self._cuts[number]:
            scan = self.scans[number]
            cuts = self._cuts_of({*scan.threads, *scan.keywords}, scan.rest)
            self._rows[number] = [None] * len(cuts)
            self._cuts[number] = cuts               # last: they say that the row is there
        return self._cuts[number]

    def heads(self, rest: int) -> Bools:
        """(256,) bool: False at bytes with which no token can begin after a rest, whatever the lexer."""
        heads = self._heads.get(rest)
        if heads is None:
            cuts = self._cuts_of((), self.rests[rest])
            possible = [self._survives(self._after(self.rests[rest], byte)) for byte in cuts]
            heads = self._heads[rest] = self._firsts & np.repeat(possible, np.diff([*cuts, 256]))
        return heads

    @cached_property
    def _firsts(self) -> Bools:
        """(256,) bool: the bytes with which terminals begin; guards are not looked at."""
        firsts, automata = np.zeros(256, bool), self.automata
        seen, todo = {DEAD}, list(automata.starts.values())
        while todo:
            q = todo.pop()
            if q not in seen:
                seen.add(q)
                todo += automata.epsilon[q]
                for lo, hi, _ in automata.edges[q]:
                    firsts[lo : hi + 1] = True
        return firsts

    def _survives(self, rest: Rest) -> bool:
        """Whether nothing forbidden accepts yet, and nothing required is out of reach, as far as is easily seen."""
        try:
            reached = self.automata.closure(rest.forbidden, rest.trackers, {})
        except _Undecided:
            return True
        return self.automata.ends.keys().isdisjoint(reached) and frozenset() not in rest.required

    def _cuts_of(self, states: Iterable[int], rest: Rest) -> list[int]:
        """The first byte of each class of bytes that NFA states and a rest do not tell apart."""
        cuts = {0}
        for q in rest.forbidden.union(states, *rest.required):
            for lo, hi, _ in self.automata.edges[q]:
                cuts.add(lo)
                cuts.add(hi + 1)
        for which, state in enumerate(rest.trackers):
            if (which, state) not in self._tracker_cuts:
                row = self.automata.trackers[which].row(state) if state else np.zeros(256)
                self._tracker_cuts[which, state] = (np.flatnonzero(np.diff(row)) + 1).tolist()
            cuts.update(self._tracker_cuts[which, state])
        if self.newline:
            cuts.update((9, 10, 11, 32, 33))
        return sorted(cut for cut in cuts if cut < 256)

    def _read(self, number: int, byte: int) -> Outcome:
        scan, read = self.scans[number], self.automata.read
        threads = read(scan.threads, byte)
        if not threads:
            return (), ()
        column = scan.column
        if self.newline:
            column = 0 if byte == 10 else column if column < 0 else column + {32: 1, 9: self.tab}.get(byte, 0)
        keywords, rest = read(scan.keywords, byte), self._after(scan.rest, byte)
        carved = self._restricted(scan.carved, threads, keywords)
        key = carved, tuple(threads), frozenset(keywords), rest, column
        found = self._settled.get(key)
        if found is None:
            self._keep(len(threads) + len(keywords) + len(rest.forbidden), threads)
            found = self._settled[key] = self._settle(carved, threads, keywords, rest, column)
        return found

    def _restricted(self, carved: Carved, threads: Iterable[int], keywords: Iterable[int]) -> Carved:
        """What is left of it with these threads and keywords."""
        names = self.automata.names
        spelled = {names[q] for q in keywords}
        if not spelled:
            return ()
        hosts = {names[q] for q in threads}
        pairs = [(host, tuple([name for name in each if name in spelled])) for host, each in carved if host in hosts]
        return tuple([pair for pair in pairs if pair[1]])

    def _after(self, rest: Rest, byte: int) -> Rest:
        """What a rest becomes by one more byte, its epsilon edges not yet followed."""
        read = self.automata.read
        return Rest(
            frozenset(read(rest.forbidden, byte)),
            frozenset(frozenset(read(states, byte)) for states in rest.required),
            tuple(
                int(tracker.step(state, byte) or 0) if state else 0
                for tracker, state in zip(self.automata.trackers, rest.trackers, strict=True)
            ),
        )

    def _settle(
        self, carved: Carved, threads: list[int], keywords: Iterable[int], rest: Rest, column: int
    ) -> Outcome:
        """Follow the epsilon edges, under every assumption about the look-aheads that are met."""
        scans: dict[int, None] = {}
        ended: dict[Ended, None] = {}
        assumptions: list[dict[int, bool]] = [{}]
        while assumptions:
            ahead = assumptions.pop()
            try:
                self._assume(ahead, carved, threads, keywords, rest, column, scans, ended)
            except _Undecided as undecided:
                assumptions += [{**ahead, undecided.args[0]: holds} for holds in (False, True)]
        return tuple(scans), tuple(ended)

    def _assume(
        self,
        ahead: dict[int, bool],
        carved: Carved,
        threads: list[int],
        keywords: Iterable[int],
        rest: Rest,
        column: int,
        scans: dict[int, None],
        ended: dict[Ended, None],
    ) -> None:
        automata, trackers = self.automata, rest.trackers
        ends = automata.ends
        denied = [entry for entry, holds in ahead.items() if not holds]
        forbidden = frozenset(automata.closure([*rest.forbidden, *denied], trackers, ahead))
        if not ends.keys().isdisjoint(forbidden):
            return
        required = set()
        for states in [*rest.required, *({entry} for entry, holds in ahead.items() if holds)]:
            reached = automata.closure(states, trackers, ahead)
            if ends.keys().isdisjoint(reached):
                required.add(frozenset(reached) - forbidden)
        if frozenset() in required:
            return
        before, matched = [], None                      # threads preferred to the match; the terminal matched
        for q in automata.closure(threads, trackers, ahead):
            if q in ends:
                matched = ends[q]
                break
            if q not in forbidden:
                before.append(q)
        spelled = automata.closure(keywords, trackers, ahead)
        strings = dict(carved)
        names = {automata.names[q] for q in before}
        if before:
            possible = {keyword for name in names for keyword in strings.get(name, ())}
            going_on = frozenset(q for q in spelled if q not in ends and automata.names[q] in possible)
            after = Rest(forbidden, frozenset(required), trackers)
            left = self._restricted(carved, before, going_on)
            scan = Scan(left, tuple(before), going_on, after, column if self.newline in names else -1)
            scans[self.scan_number(scan)] = None
        if matched:
            whole = {ends[q] for q in spelled if q in ends}
            name = next((keyword for keyword in strings.get(matched, ()) if keyword in whole), matched)
            number = self.rest_number(Rest(forbidden.union(before), frozenset(required), trackers))
            if matched in self.ignored:
                ended[Ended(None, number)] = None
            else:
                ended[Ended((name, column) if name == self.newline else name, number)] = None
