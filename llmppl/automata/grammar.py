"""Context-free grammars in Lark's syntax, read byte by byte.

Acceptance is Lark's own: a text is in the language iff `lark.Lark(grammar, parser="lalr", lexer="contextual")` parses
it. The LALR(1) tables and the terminals of each parser state are taken from lark; only the loop is ours, turned so
that it takes one byte at a time and never goes back.

Lark's lexer, exactly. In a parser state q it matches one regular expression, the alternation of the terminals that q
has an action for and of the ignored ones, ordered by (priority, greatest width, length of pattern, name), with
`re.match`: the first alternative that matches at all wins, and inside it the match that `re` prefers, not the
longest. If the text matched is that of a string terminal which the regular expression of the winner covers, the token
is that string (keywords against names). It goes to the parser, and the lexer goes on behind it in the new state.

The one idea: do not wait to see where a match ends; assume it. A *hypothesis* says where every token so far ended. It
is a parser stack and a *scan*: the threads of the current token in order of preference, what is *forbidden* (NFA
states of earlier tokens that are preferred to the match assumed: if ever one of them accepts, `re` would have matched
there, and the hypothesis is wrong) and what is *required* (look-aheads that were assumed to hold). Where a thread
accepts, the hypothesis splits: either one of the threads before it accepts later on, and the token goes on with
those; or none does, the token ends here, and they are forbidden. Exactly one hypothesis survives the whole text, so no
byte is ever read twice: `1e+x` is `1 e + x` because `1` was assumed to end where it does, with the exponent forbidden.

`step` returns None iff no continuation of the text is accepted. A hypothesis is dropped unless some text completes it.
That is decided exactly (`_Completion`): the stack, read from its top, is a pushdown automaton over the finitely many
pairs (terminal, what is forbidden and required after it), and its reachable reductions are tabulated. Most
questions never get there: where the grammar is LALR without a conflict resolved, every rule can be finished, and every
terminal has a spelling that an ignored text separates from whatever comes next (`_Spellings`, checked when
first needed), a shift alone shows that the text can be completed.

Words: a *symbol* is a terminal as the parser reads it; a *rest* is what an ended token leaves behind it: (forbidden,
required, states of the look-behind trackers).

Sources: the lexer and parser of lark 1.3; Willard & Louf (2023), section 4, for parsers as recognizers; DeRemer &
Pennello (1982) for LALR(1); Reps, Horwitz & Sagiv (1995) for the tabulation.
"""

from __future__ import annotations

import heapq
import itertools
import os
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from lark import Lark
from lark.exceptions import LarkError, UnexpectedInput
from lark.indenter import Indenter
from lark.lexer import BasicLexer, ContextualLexer, TerminalDef, _create_unless
from lark.parsers.lalr_analysis import LALR_Analyzer, Shift
from lark.parsers.lalr_parser import LALR_Parser
from lark.parsers.lalr_parser import _Parser as _Loop

from llmppl.automata.dfa import DEAD, NFA, Ahead, Behind
from llmppl.automata.regex import parse
from llmppl.automata.trie import Numbered, Trie, walk_state

__all__ = ["Grammar", "json_grammar"]

END = "$END"
WHOLE = 1 << 30
HEIGHTS = (4, WHOLE)                                # to which stacks are cut for masks, the next if FEW do not suffice
FEW = 200                                           # tokens that are read one by one
MAX_STATES = 1 << 16                                # that are remembered
MAX_CUTS = 1 << 14                                  # states with cut stacks that are kept
States = frozenset[int]
Bytes = npt.NDArray[np.uint8]


class Rest(NamedTuple):
    """What an ended token leaves: NFA states that must never accept, sets of which one must, trackers' states."""

    forbidden: States
    required: frozenset[States]
    trackers: tuple[int, ...]


class Scan(NamedTuple):
    """The current token under one hypothesis: `threads` in order, `keywords` that its text may still be."""

    lexer: int
    threads: tuple[int, ...]
    keywords: States
    rest: Rest
    column: int


class Ended(NamedTuple):
    """A token that may end here: the symbol for the parser (None if ignored), and the rest (a number)."""

    symbol: str | tuple[str, int] | None
    rest: int


Outcome = tuple[tuple[int, ...], tuple[Ended, ...]]     # scans in which the token goes on; ways in which it ends


class _Automata:
    """The terminals' NFAs side by side, with one numbering of states; states that read a byte or end are *stops*."""

    def __init__(self, terminals: Iterable[TerminalDef], flags: int):
        self.epsilon: list[tuple[int, ...]] = []
        self.edges: list[tuple[tuple[int, int, int], ...]] = []
        self.guards: dict[int, Behind | Ahead] = {}
        self.names: list[str] = []                      # of the terminal a state belongs to
        self.ends: dict[int, str] = {}                  # accepting states, and those that satisfy a look-ahead
        self.found = set[int]()                         # those of `ends` that satisfy a look-ahead
        self.starts: dict[str, int] = {}
        self.trackers: list[Any] = []
        for terminal in terminals:
            base, nfa = len(self.epsilon), _nfa(terminal, flags)
            self.starts[terminal.name] = base + nfa.start if nfa.start != DEAD else DEAD
            self.names += [terminal.name] * len(nfa)
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
            self.ends[base] = self.ends[base + 1] = terminal.name
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


class _Scans:
    """All scans of a grammar, numbered as they are met, and what a byte makes of each."""

    def __init__(self, automata: _Automata, lexers: Sequence[BasicLexer], flags: int, indenter: Any):
        self.automata, self.lexers, self.flags = automata, lexers, flags
        self.newline = indenter.NL_type if indenter else None
        self.tab = indenter.tab_len if indenter else 0
        self.scans: list[Scan] = []
        self.rests: list[Rest] = []
        self._scan_number: dict[Scan, int] = {}
        self._rest_number: dict[Rest, int] = {}
        self._starts: dict[tuple[int, int], tuple[int, ...]] = {}
        self._rows: list[list[Outcome | None]] = []
        self._tracker_cuts: dict[tuple[int, int], list[int]] = {}
        self._outcomes: dict[Outcome, Outcome] = {}     # equal ones are one object
        self._cuts: list[list[int]] = []
        self._order: dict[int, tuple[list[str], dict[str, list[str]]]] = {}
        self.first = self.rest_number(
            Rest(frozenset(), frozenset(), tuple(int(tracker.start) for tracker in automata.trackers))
        )

    def order(self, lexer: int) -> tuple[list[str], dict[str, list[str]]]:
        """The alternatives of a lexer in lark's order, and the strings carved out of each, in order."""
        if lexer not in self._order:
            terminals, carved = _carve(self.lexers[lexer].terminals, self.flags)
            names = {name: [terminal.name for terminal in strings] for name, strings in carved.items()}
            self._order[lexer] = [terminal.name for terminal in terminals], names
        return self._order[lexer]

    def rest_number(self, rest: Rest) -> int:
        number = self._rest_number.setdefault(rest, len(self.rests))
        if number == len(self.rests):
            self.rests.append(rest)
        return number

    def scan_number(self, scan: Scan) -> int:
        number = self._scan_number.setdefault(scan, len(self.scans))
        if number == len(self.scans):
            self.scans.append(scan)
            self._rows.append([])
            self._cuts.append([])
        return number

    def start(self, lexer: int, rest: int) -> tuple[int, ...]:
        """The scans that begin a token after `rest`: several if look-aheads at its beginning are yet to be decided."""
        key = lexer, rest
        found = self._starts.get(key)
        if found is None:
            alternatives, carved = self.order(lexer)
            threads = [self.automata.starts[name] for name in alternatives]
            keywords = {self.automata.starts[name] for names in carved.values() for name in names}
            alive = [q for q in threads if q != DEAD]
            scans, ended = self._settle(lexer, alive, keywords, self.rests[rest], -1)
            assert not ended, "lark refuses terminals that match the empty text"
            found = self._starts[key] = scans
        return found

    def step(self, number: int, byte: int) -> Outcome:
        """What `byte` makes of a scan: the scans in which the token goes on, and how it may end behind the byte."""
        row = self._rows[number]
        if not row:
            self._cuts[number] = self._find_cuts(number)
            row = self._rows[number] = [None] * len(self._cuts[number])
        index = bisect_right(self._cuts[number], byte) - 1
        outcome = row[index]
        if outcome is None:
            outcome = self._read(number, byte)
            outcome = row[index] = self._outcomes.setdefault(outcome, outcome)
        return outcome

    def classes(self, number: int) -> list[int]:
        """One byte of each class of bytes that a scan does not tell apart."""
        if not self._cuts[number]:
            self._cuts[number] = self._find_cuts(number)
            self._rows[number] = [None] * len(self._cuts[number])
        return self._cuts[number]

    def joint_classes(self, numbers: Sequence[int]) -> tuple[Bytes, list[tuple[Outcome, ...]]]:
        """(256,) uint8 classes of bytes that none of the scans tells apart, and the outcomes of each class."""
        cuts = sorted({0}.union(*map(self.classes, numbers)))
        found: dict[tuple[Outcome, ...], int] = {}
        classes = []
        for cut in cuts:
            outcomes = tuple([self.step(number, cut) for number in numbers])
            classes.append(found.setdefault(outcomes, len(found)))
        return np.repeat(np.array(classes, np.uint8), np.diff([*cuts, 256])), list(found)

    def _find_cuts(self, number: int) -> list[int]:
        scan = self.scans[number]
        cuts = {0}
        states = set(scan.threads) | scan.keywords | scan.rest.forbidden | frozenset().union(*scan.rest.required)
        for q in states:
            for lo, hi, _ in self.automata.edges[q]:
                cuts.add(lo)
                cuts.add(hi + 1)
        for which, state in enumerate(scan.rest.trackers):
            if (which, state) not in self._tracker_cuts:
                row = self.automata.trackers[which].row(state) if state else np.zeros(256)
                self._tracker_cuts[which, state] = (np.flatnonzero(np.diff(row)) + 1).tolist()
            cuts.update(self._tracker_cuts[which, state])
        if self.newline:
            cuts.update((9, 10, 11, 32, 33))
        return sorted(cut for cut in cuts if cut < 256)

    def _read(self, number: int, byte: int) -> Outcome:
        scan, read = self.scans[number], self.automata.read
        forbidden, required, trackers = scan.rest
        rest = Rest(
            frozenset(read(forbidden, byte)),
            frozenset(frozenset(read(states, byte)) for states in required),
            tuple(
                int(tracker.step(state, byte) or 0) if state else 0
                for tracker, state in zip(self.automata.trackers, trackers, strict=True)
            ),
        )
        threads = read(scan.threads, byte)
        if not threads:
            return (), ()
        column = scan.column
        if self.newline:
            column = 0 if byte == 10 else column if column < 0 else column + {32: 1, 9: self.tab}.get(byte, 0)
        return self._settle(scan.lexer, threads, read(scan.keywords, byte), rest, column)

    def _settle(
        self, lexer: int, threads: list[int], keywords: Iterable[int], rest: Rest, column: int
    ) -> Outcome:
        """Follow the epsilon edges, under every assumption about the look-aheads that are met."""
        scans: dict[int, None] = {}
        ended: dict[Ended, None] = {}
        assumptions: list[dict[int, bool]] = [{}]
        while assumptions:
            ahead = assumptions.pop()
            try:
                self._assume(ahead, lexer, threads, keywords, rest, column, scans, ended)
            except _Undecided as undecided:
                assumptions += [{**ahead, undecided.args[0]: holds} for holds in (False, True)]
        return tuple(scans), tuple(ended)

    def _assume(
        self,
        ahead: dict[int, bool],
        lexer: int,
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
        carved = self.order(lexer)[1]
        names = {automata.names[q] for q in before}
        if before:
            possible = {keyword for name in names for keyword in carved.get(name, ())}
            going_on = frozenset(q for q in spelled if q not in ends and automata.names[q] in possible)
            after = Rest(forbidden, frozenset(required), trackers)
            scan = Scan(lexer, tuple(before), going_on, after, column if self.newline in names else -1)
            scans[self.scan_number(scan)] = None
        if matched:
            whole = {ends[q] for q in spelled if q in ends}
            name = next((keyword for keyword in carved.get(matched, ()) if keyword in whole), matched)
            number = self.rest_number(Rest(forbidden.union(before), frozenset(required), trackers))
            if matched in self.lexers[lexer].ignore_types:
                ended[Ended(None, number)] = None
            else:
                ended[Ended((name, column) if name == self.newline else name, number)] = None


CUT = -1                                            # the state of a stack's bottom that is not known


class _Cut(Exception):
    """The part of a stack that is known does not suffice for an answer."""


class _Stack:
    """A parser stack, shared by all texts that lead to it: a state, what lies below, and the layout (if indented)."""

    __slots__ = ("state", "below", "layout", "cut", "pushed", "fed", "complete", "completable", "finishable")

    def __init__(self, state: int, below: _Stack | None, layout: Layout | None):
        self.state, self.below, self.layout = state, below, layout
        self.cut: bool = below.cut if below else state == CUT   # whether only the top of the stack is known
        self.pushed: dict[tuple[int, Layout | None], _Stack] = {}
        self.fed: dict[str | tuple[str, int], _Stack | None] = {}
        self.complete: bool | None = None               # whether the text may end here
        self.completable: bool | None = None            # whether tokens are known that complete it
        self.finishable: dict[int, bool] = {}           # scan -> whether some text completes the hypothesis

    def push(self, state: int, layout: Layout | None) -> _Stack:
        stack = self.pushed.get((state, layout))
        if stack is None:
            stack = self.pushed[state, layout] = _Stack(state, self, layout)
        return stack

    def pop(self, size: int) -> _Stack | None:
        stack: _Stack | None = self
        while size and stack is not None:
            stack, size = stack.below, size - 1
        if self.cut and (stack is None or stack.state == CUT):
            raise _Cut
        return stack


class Layout(NamedTuple):
    """Of indented text: how many brackets are open, and the columns of the blocks that are."""

    brackets: int
    columns: tuple[int, ...]


class _Parser:
    """Lark's LALR(1) automaton on shared stacks; with an indenter, what lark's `Indenter` makes of the tokens."""

    def __init__(self, lalr: _KeepAnalysis, start: str, indenter: Any):
        table: Any = lalr._parse_table
        self.shifts: dict[int, dict[str, int]] = {}
        self.reductions: dict[int, dict[str, tuple[int, str]]] = {}     # state -> terminal -> (length, rule's name)
        for state, actions in table.states.items():
            self.shifts[state] = {str(name): arg for name, (action, arg) in actions.items() if action is Shift}
            self.reductions[state] = {
                str(name): (len(arg.expansion), str(arg.origin.name))
                for name, (action, arg) in actions.items()
                if action is not Shift
            }
        self.end_state: int = table.end_states[start]
        self.indenter = indenter
        self.bottom = _Stack(table.start_states[start], None, Layout(0, (0,)) if indenter else None)

        self._lalr = lalr
        self.avoid(set())

    def avoid(self, terminals: set[str]) -> None:
        """Count on no completion with these terminals."""
        self._avoided, rules = terminals, self._lalr.parser_conf.rules
        self._items_of: dict[int, list[tuple[int, tuple[str, ...], str | None]]] = {}
        self._shortest = _shortest_yields(rules, terminals)
        finished = all(str(rule.origin.name) in self._shortest for rule in rules)
        self.sure = finished and not (terminals or self._lalr.conflicts or self.indenter)

    def feed(self, stack: _Stack, symbol: str | tuple[str, int]) -> _Stack | None:
        """The stack after a token, or None if the parser refuses it."""
        if symbol not in stack.fed:
            stack.fed[symbol] = self._indented(stack, symbol) if self.indenter else self._shift(stack, symbol)
        return stack.fed[symbol]

    def complete(self, stack: _Stack) -> bool:
        """Whether the text may end after the tokens that led to `stack`."""
        if stack.complete is None:
            top: _Stack | None = stack
            for _ in range(len(stack.layout.columns) - 1 if stack.layout else 0):
                top = top and self._shift(top, self.indenter.DEDENT_type)
            stack.complete = top is not None and self._reduce(top, END) is None
        return stack.complete

    def lexers_after(self, lexer_of: dict[int, int]) -> dict[str, set[int]]:
        """Which lexers may be asked after a terminal: those of all states that it leads to."""
        found: dict[str, set[int]] = {}
        for shifts in self.shifts.values():
            for name, state in shifts.items():
                found.setdefault(name, set()).add(lexer_of[state])
        return found

    def completable(self, stack: _Stack) -> bool:
        """Whether some tokens complete what led to `stack`, if that is easily seen: False says nothing.

        It is so after every shift where no conflict was resolved and every rule can be finished. Else the few shortest
        completions that the items on the stack promise are tried.
        """
        if self.sure:
            return True
        if stack.completable is None:
            stack.completable = any(
                self._completes(stack, tokens) for tokens in itertools.islice(self._promised(stack), 8)
            )
        return stack.completable

    def _promised(self, stack: _Stack) -> Iterator[tuple[str, ...]]:
        """Terminals that finish the rules on the stack, shortest first, if no conflict was resolved against them."""
        order = itertools.count()
        todo: list[tuple[int, int, _Stack, tuple[str, ...]]] = [(0, next(order), stack, ())]
        seen: set[_Stack] = set()
        while todo:
            _, _, top, tokens = heapq.heappop(todo)
            if top.state == self.end_state:
                yield tokens
                continue
            if top in seen:
                continue
            seen.add(top)
            for index, rest, origin in self._items(top.state):
                base = top.pop(index)
                if base is not None and (base.below is None or origin is not None):
                    target = self.end_state if origin is None else self.shifts[base.state][origin]
                    after = *tokens, *rest
                    heapq.heappush(todo, (len(after), next(order), base.push(target, top.layout), after))

    def _items(self, state: int) -> list[tuple[int, tuple[str, ...], str | None]]:
        """Of a state's items: symbols on the stack, the fewest terminals that finish it, its rule (None: the text)."""
        if state in self._items_of:
            return self._items_of[state]
        items = self._items_of[state] = []
        for pointer in self._lalr.kernels[state]:
            rest = [self._yield(symbol) for symbol in pointer.rule.expansion[pointer.index :]]
            origin = str(pointer.rule.origin.name)
            if None not in rest:
                tokens = tuple(token for part in rest if part for token in part)
                items.append((pointer.index, tokens, None if origin.startswith("$root_") else origin))
        return items

    def _yield(self, symbol: Any) -> tuple[str, ...] | None:
        name = str(symbol.name)
        return self._shortest.get(name) if not symbol.is_term else None if name in self._avoided else (name,)

    def _completes(self, stack: _Stack, tokens: tuple[str, ...]) -> bool:
        top: _Stack | None = stack
        indenter = self.indenter
        for i, token in enumerate(tokens):
            if top is None:
                return False
            symbol: str | tuple[str, int] = token
            if indenter and token == indenter.NL_type:
                assert top.layout is not None
                columns = top.layout.columns
                if tokens[i + 1 : i + 2] == (indenter.INDENT_type,):
                    symbol = token, columns[-1] + 1
                else:
                    closed = next((n for n, t in enumerate(tokens[i + 1 :]) if t != indenter.DEDENT_type), 0)
                    if closed >= len(columns):
                        return False
                    symbol = token, columns[len(columns) - 1 - closed]
            elif indenter and token in (indenter.INDENT_type, indenter.DEDENT_type):
                continue
            top = self.feed(top, symbol)
        return top is not None and self.complete(top)

    def _reduce(self, stack: _Stack, symbol: Any) -> _Stack | None:
        """The stack after all reductions before `symbol`; None if that completes the text ($END)."""
        while (reduction := self.reductions[stack.state].get(symbol)) is not None:
            size, name = reduction
            below = stack.pop(size)
            assert below is not None
            layout, stack = stack.layout, below
            stack = stack.push(self.shifts[stack.state][name], layout)
            if symbol == END and stack.state == self.end_state:
                return None
        return stack

    def _shift(self, stack: _Stack, symbol: Any) -> _Stack | None:
        top = self._reduce(stack, symbol)
        assert top is not None
        state = self.shifts[top.state].get(symbol)
        return None if state is None else top.push(state, top.layout)

    def _indented(self, stack: _Stack, symbol: str | tuple[str, int]) -> _Stack | None:
        assert stack.layout is not None
        (brackets, columns), indenter = stack.layout, self.indenter
        if not isinstance(symbol, tuple):
            top = self._shift(stack, symbol)
            if top is None or symbol not in (*indenter.OPEN_PAREN_types, *indenter.CLOSE_PAREN_types):
                return top
            brackets += (symbol in indenter.OPEN_PAREN_types) or -1
            return top.below and top.below.push(top.state, Layout(brackets, columns)) if brackets >= 0 else None
        name, column = symbol
        if brackets:
            return stack
        if column < 0:                                  # a line end without '\n', on which lark fails
            return None
        top = self._shift(stack, name)
        if column > columns[-1]:
            top = top and self._shift(top, indenter.INDENT_type)
            columns += (column,)
        else:
            while column < columns[-1]:
                top = top and self._shift(top, indenter.DEDENT_type)
                columns = columns[:-1]
            if column != columns[-1]:
                return None
        return top and top.below and top.below.push(top.state, Layout(0, columns))


Look = tuple[str, int]                              # a symbol that the parser looks at, and the rest; $END has -1
Entry = tuple[int, str, int]                        # a parser state on top of a stack, and a Look
Exit = tuple[int, str, str, int]                    # states still to pop, the rule then pushed, and a Look


class _Completion:
    """Which hypotheses some text completes: a tabulation of the parser's runs over (state, symbol, rest).

    An *entry* is a state on top of the stack and what the parser looks at. Its *exits* are the reductions that remove
    it, with how many more states they pop and what is looked at then. Both are finitely many. What is below the
    stack's top is read only when an exit gets there.
    """

    def __init__(self, parser: _Parser, scans: _Scans, lexer_of: dict[int, int]):
        self.parser, self.scans, self.lexer_of = parser, scans, lexer_of
        self.exits: dict[Entry, dict[Exit, None]] = {}
        self.accepting: set[Entry] = set()
        self._users: dict[Entry, dict[Entry, None]] = {}
        self._looks: dict[tuple[int, int], frozenset[Look]] = {}
        self._outs: dict[int, frozenset[Ended]] = {}

    def ends(self, scan: int) -> frozenset[Ended]:
        """All the ways in which the token of a scan may end, sooner or later."""
        if scan not in self._outs:
            seen, todo = {scan: frozenset[Ended]()}, [scan]
            sources: dict[int, list[int]] = {scan: []}
            while todo:
                number = todo.pop()
                for byte in self.scans.classes(number):
                    going_on, ended = self.scans.step(number, byte)
                    seen[number] = seen[number].union(ended)
                    for target in going_on:
                        if target not in seen:
                            seen[target] = frozenset()
                            sources[target] = []
                            todo.append(target)
                        sources[target].append(number)
            todo = list(seen)
            while todo:
                number = todo.pop()
                for source in sources[number]:
                    if not seen[number] <= seen[source]:
                        seen[source] |= seen[number]
                        todo.append(source)
            self._outs.update(seen)
        return self._outs[scan]

    def looks(self, lexer: int, rest: int) -> frozenset[Look]:
        """What the parser may be given after `rest`: symbols behind any ignored text, and the end."""
        key = lexer, rest
        if key not in self._looks:
            seen, todo, looks = {rest}, [rest], set[Look]()
            while todo:
                number = todo.pop()
                if not self.scans.rests[number].required:
                    looks.add((END, -1))
                for scan in self.scans.start(lexer, number):
                    for symbol, behind in self.ends(scan):
                        if symbol is None:
                            if behind not in seen:
                                seen.add(behind)
                                todo.append(behind)
                        else:
                            looks.add((str(symbol), behind))
            self._looks[key] = frozenset(looks)
        return self._looks[key]

    def _tabulate(self, entry: Entry) -> None:
        """Find the exits of an entry and of all that it leads to."""
        if entry in self.exits:
            return
        self.exits[entry] = {}
        self._users[entry] = {}
        todo: list[tuple[Entry, Exit | None]] = [(entry, None)]

        def call(user: Entry, called: Entry) -> None:
            if called not in self.exits:
                self.exits[called] = {}
                self._users[called] = {}
                todo.append((called, None))
            if user not in self._users[called]:
                self._users[called][user] = None
                todo.extend((user, found) for found in self.exits[called])
                if called in self.accepting:
                    accept(user)

        def leave(entry: Entry, found: Exit) -> None:
            if found not in self.exits[entry]:
                self.exits[entry][found] = None
                todo.extend((user, found) for user in self._users[entry])

        def accept(entry: Entry) -> None:
            marked = [entry]
            while marked:
                entry = marked.pop()
                if entry not in self.accepting:
                    self.accepting.add(entry)
                    marked.extend(self._users[entry])

        while todo:
            (state, symbol, rest), arrived = entry, found = todo.pop()
            if found is None:
                target = self.parser.shifts[state].get(symbol)
                reduction = self.parser.reductions[state].get(symbol)
                if target is not None:
                    for look in self.looks(self.lexer_of[target], rest):
                        call(entry, (target, *look))
                    continue
                if reduction is None:
                    continue
                size, name = reduction
                found = (size - 1, name, symbol, rest)
                if size:
                    leave(entry, found)
                    continue
            elif found[0]:
                leave(entry, (found[0] - 1, *found[1:]))
                continue
            _, name, symbol, rest = found               # pops nothing more: the rule is pushed on this entry's state
            target = self.parser.shifts[state][name]
            if target == self.parser.end_state and symbol == END:
                accept(entry)
            else:
                call(entry, (target, symbol, rest))

    def possible(self, stack: _Stack, looks: Iterable[Look]) -> bool:
        """Whether some text is accepted that goes on with one of `looks`."""
        todo: list[tuple[_Stack | None, Entry]] = [(stack.below, (stack.state, *look)) for look in looks]
        seen = set(todo)
        while todo:
            below, entry = todo.pop()
            self._tabulate(entry)
            if entry in self.accepting:
                return True
            for size, name, symbol, rest in self.exits[entry]:
                base = below and below.pop(size)
                assert base is not None
                target = self.parser.shifts[base.state][name]
                if target == self.parser.end_state and symbol == END:
                    return True
                item = base, (target, symbol, rest)
                if item not in seen:
                    seen.add(item)
                    todo.append(item)
        return False


TASTE = b"ax_z019 \t\n\"'"                           # bytes that spellings are made of where a class leaves the choice


class _Spellings:
    """A short way to see that a text can be completed, for grammars with ignored text between their tokens.

    A terminal T is given a spelling w and a separator s such that w s is read as T and ignored text in *every* lexer
    that has T, whatever follows, and leaves nothing forbidden that a spelling begins with (the rest is *clean*). Then
    a text whose parser stack is completed by tokens that have spellings is completed by those. Another terminal is
    harmless if it does not match within w s and is not under way at its end; if it comes after T, and after all
    terminals that T is carved from, in lark's order; or if T is carved from it. This is decided without regard to
    guards, which only forbid; where that or guards of T leave a doubt, w s is read in every lexer instead.
    """

    def __init__(
        self, scans: _Scans, terminals: Sequence[TerminalDef], lexers_after: dict[str, set[int]], flags: int
    ):
        self.scans, self.automata = scans, scans.automata
        self._settled: dict[tuple[int, int], bool] = {}
        self._soon: dict[tuple[int, bool], tuple[Ended, ...]] = {}
        self._firsts: dict[int, set[int]] = {}
        self.tails = self._find_tails()
        self._guarded = {self.automata.names[q] for q in self.automata.guards}
        self._lexers_after = lexers_after
        self._to_be_clean: list[tuple[int, int]] = []   # (lexer, rest)
        self.separators: list[bytes] = []
        self.words: dict[str, bytes] = {}
        self.missing: set[str] = set()                  # terminals without a spelling
        lexed = {terminal.name for lexer in scans.lexers for terminal in lexer.terminals}
        ignored = self.ignored = frozenset[str]().union(*(lexer.ignore_types for lexer in scans.lexers))
        ranked = sorted(terminals, key=lambda t: (-t.priority, -t.pattern.max_width, -len(t.pattern.value), t.name))
        self._ranked = [terminal for terminal in ranked if terminal.name in lexed]
        self._carved = _carve(self._ranked, flags)[1]
        candidates = {s: t for t in self._ranked if t.name in ignored for s in self._texts(t) if self._separates(s, t)}
        unseparated = []
        for terminal in self._ranked:
            if terminal.name not in ignored:
                pairs = [(w, s) for s in [*sorted(candidates, key=len), b""] for w in self._texts(terminal)]
                found = next((pair for pair in pairs if self._spells(terminal, *pair)), None)
                found = found or next((pair for pair in pairs[:24] if self._really_spells(terminal.name, *pair)), None)
                if found is None:
                    self.missing.add(terminal.name)
                    continue
                self.words[terminal.name], separator = found
                if not separator:
                    unseparated.append(terminal.name)
                elif separator not in self.separators:
                    self.separators.append(separator)
        every = set(range(len(scans.lexers)))
        left = [(self._matches(candidates[s].name, s)[1], every) for s in self.separators]
        left += [(self._left(name), lexers_after[name]) for name in unseparated]
        self.usable = not any(self._reads(states, lexer) for states, lexers in left for lexer in lexers) and all(
            self._clean(lexer, rest) for lexer, rest in self._to_be_clean
        )

    def settled(self, lexer: int, rest: int) -> bool:
        """Whether any tokens that the parser takes next, but those missing, can be spelled after `rest`."""
        if not self.usable:
            return False
        key = lexer, rest
        if key not in self._settled:
            self._settled[key] = self._clean(lexer, rest) or any(
                self._clean(lexer, after) for s in self.separators for after in self._ignored(lexer, rest, s)
            )
        return self._settled[key]

    def soon(self, scan: int, keywords: bool = False) -> tuple[Ended, ...]:
        """Some ways in which the token of a scan may end: along the shortest text of all terminals (keywords)."""
        if (scan, keywords) not in self._soon:
            first: dict[str, int] = {}
            current = self.scans.scans[scan]
            for q in current.keywords if keywords else current.threads:
                first.setdefault(self.automata.names[q], q)
            found: dict[Ended, None] = {}
            for q in first.values():
                for ended in self.read((scan,), self.tails.get(q, b"")):
                    found.update(dict.fromkeys(ended))
            self._soon[scan, keywords] = tuple(found)
        return self._soon[scan, keywords]

    def read(self, scans: Iterable[int], text: bytes) -> list[tuple[Ended, ...]]:
        """The ways in which a token that is under way may end after each byte of a text."""
        ends: list[tuple[Ended, ...]] = [()]
        for byte in text:
            outcomes = [self.scans.step(scan, byte) for scan in scans]
            scans = dict.fromkeys(scan for going_on, _ in outcomes for scan in going_on)
            ends.append(tuple(end for _, ended in outcomes for end in ended))
        return ends

    def _clean(self, lexer: int, rest: int) -> bool:
        forbidden, required, _ = self.scans.rests[rest]
        return not required and not self._reads(forbidden, lexer)

    def _reads(self, states: Iterable[int], lexer: int) -> bool:
        """Whether one of `states` goes on with the first byte of some spelling that a lexer may meet."""
        if lexer not in self._firsts:
            names = [terminal.name for terminal in self.scans.lexers[lexer].terminals]
            self._firsts[lexer] = {self.words[name][0] for name in names if name in self.words}
        return any(self.automata.read(states, byte) for byte in self._firsts[lexer])

    def _left(self, name: str) -> set[int]:
        """All that may be under way after the spelling of a terminal."""
        return set[int]().union(*(self._matches(other.name, self.words[name])[1] for other in self._ranked))

    def _find_tails(self) -> dict[int, bytes]:
        """The shortest text from every state to the end of its terminal; guards are not looked at."""
        sources: dict[int, list[tuple[int, bytes]]] = {}
        for q, edges in enumerate(self.automata.edges):
            for lo, hi, target in edges:
                byte = next((byte for byte in TASTE if lo <= byte <= hi), lo)
                sources.setdefault(target, []).append((q, bytes([byte])))
            for target in self.automata.epsilon[q]:
                sources.setdefault(target, []).append((q, b""))
        tails: dict[int, bytes] = {}
        todo = deque((q, b"") for q in self.automata.ends)
        while todo:
            q, text = todo.popleft()
            if q not in tails:
                tails[q] = text
                for source, head in sources.get(q, ()):
                    if head:
                        todo.append((source, head + text))
                    else:
                        todo.appendleft((source, text))
        return tails

    def _texts(self, terminal: TerminalDef) -> list[bytes]:
        """A few short spellings of a terminal, shortest first; guards are not looked at."""
        if terminal.pattern.type == "str":
            return [terminal.pattern.value.encode()]
        found: set[bytes] = set()
        for q in self._under_way([self.automata.starts[terminal.name]]):
            for lo, hi, target in self.automata.edges[q]:
                heads = [byte for byte in {*TASTE, lo} if lo <= byte <= hi]
                found.update(bytes([byte]) + self.tails[target] for byte in heads if target in self.tails)
        return sorted(found, key=lambda text: (len(text), TASTE.find(text[:1]) % 256, text))[:12]

    def _under_way(self, states: Iterable[int]) -> set[int]:
        """What states become without reading, whatever their guards say, with the look-aheads that are met."""
        automata, seen, todo = self.automata, set[int](), [q for q in states if q != DEAD]
        while todo:
            q = todo.pop()
            if q not in seen:
                seen.add(q)
                todo += automata.epsilon[q]
                if isinstance(guard := automata.guards.get(q), Ahead):
                    todo.append(guard.entry)
        return seen

    def _matches(self, name: str, text: bytes) -> tuple[list[int], set[int]]:
        """Where a terminal may match within a text, and the reading states under way at its end; more than truly so."""
        states, found = self._under_way([self.automata.starts[name]]), []
        for i, byte in enumerate(text, 1):
            states = self._under_way(self.automata.read(states, byte))
            if any(self.automata.ends.get(q) == name and q not in self.automata.found for q in states):
                found.append(i)
        return found, {q for q in states if self.automata.edges[q]}

    def _hosts(self, terminal: TerminalDef) -> list[TerminalDef]:
        """The terminals that `terminal` is carved from, in lexers that have both."""
        return [t for t in self._ranked if any(terminal is carved for carved in self._carved.get(t.name, ()))]

    def _separates(self, text: bytes, terminal: TerminalDef) -> bool:
        """Whether an ignored text is read as that in every lexer, and as a whole; it may leave itself under way."""
        guarded = terminal.name in self._guarded
        if guarded or self._hosts(terminal) or self._matches(terminal.name, text)[0] != [len(text)]:
            return False
        earlier = self._ranked[: self._ranked.index(terminal)]
        return not any(any(self._matches(other.name, text)) for other in earlier)

    def _spells(self, terminal: TerminalDef, w: bytes, s: bytes) -> bool:
        """Whether w s is read as `terminal` and ignored text in every lexer that has it."""
        hosts = self._hosts(terminal)
        if any(host.name in self.ignored for host in hosts):
            return False
        if self._guarded.intersection(t.name for t in [terminal, *hosts]):
            return False
        last = max(self._ranked.index(t) for t in [terminal, *hosts])
        for other in self._ranked[: last + 1]:
            matches, under_way = self._matches(other.name, w + s)
            if under_way and s or (matches and other not in (terminal, *hosts)):
                return False
        rivals = [t for host in hosts for t in self._carved[host.name] if t is not terminal]
        if any(self._matches(rival.name, w)[0][-1:] == [len(w)] for rival in rivals):
            return False
        text = (w + s).decode()
        found = [re.match(t.pattern.to_regexp(), text, self.scans.flags) for t in [terminal, *hosts]]
        return all(match is not None and match[0].encode() == w for match in found)

    def _really_spells(self, name: str, w: bytes, s: bytes) -> bool:
        """The same by reading w s in every lexer that has the terminal, whatever came before."""
        if not s:
            return False
        found = []
        for lexer, conf in enumerate(self.scans.lexers):
            if all(terminal.name != name for terminal in conf.terminals):
                continue
            for trackers in self._contexts:
                begin = self.scans.start(lexer, self.scans.rest_number(Rest(frozenset(), frozenset(), trackers)))
                ends = [end for end in self.read(begin, w)[-1] if name in (end.symbol, end.symbol and end.symbol[0])]
                for after in self._lexers_after[name] if ends else ():
                    rests = [rest for end in ends for rest in self._ignored(after, end.rest, s)]
                    if len(rests) != 1:
                        return False
                    found.append((after, rests[0]))
                if not ends:
                    return False
        self._to_be_clean += found
        return True

    def _ignored(self, lexer: int, rest: int, text: bytes) -> list[int]:
        """What is left after an ignored token, if `text` may be one after `rest`."""
        return [end.rest for end in self.read(self.scans.start(lexer, rest), text)[-1] if end.symbol is None]

    @cached_property
    def _contexts(self) -> list[tuple[int, ...]]:
        """All states that the look-behind trackers can be in together, behind whole characters."""
        trackers = self.automata.trackers
        seen = {tuple(int(tracker.start) for tracker in trackers): b""}
        todo = list(seen)
        for states in todo:
            for byte in range(256):
                after = tuple(int(t.step(q, byte) or 0) if q else 0 for t, q in zip(trackers, states, strict=True))
                if after not in seen:
                    seen[after] = seen[states] + bytes([byte])
                    todo.append(after)
        return list(seen)


class _State:
    """A state of the recognizer: its hypotheses, and whether the text may end. Equal states are one object."""

    __slots__ = ("hypotheses", "accepting", "next", "alike")

    def __init__(self, hypotheses: tuple[tuple[_Stack, int], ...], accepting: bool):
        self.hypotheses, self.accepting = hypotheses, accepting
        self.next: dict[int, _State | None] = {}        # by byte
        self.alike: dict[tuple[int, ...], _State | None] = {}   # by the outcomes of the scans

    def __repr__(self) -> str:
        return f"<grammar state: {len(self.hypotheses)} hypotheses{', accepting' if self.accepting else ''}>"

    def __copy__(self) -> _State:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _State:
        return self


UNKNOWN = _State((), False)                         # where a stack that is cut tells too little
UNKNOWN.next.update(dict.fromkeys(range(256), UNKNOWN))


class _Cutter(Numbered):
    """The graph of states that keep no more than `height` states of every stack: they are few, and soon all known."""

    def __init__(self, grammar: Grammar, bottom: _Stack, height: int):
        super().__init__(grammar)
        self.grammar, self.bottom, self.height = grammar, bottom, height

    def settle(self, numbers: Any, bytes: Any) -> None:
        for number in set(numbers.tolist()):
            self.settle_below(number)

    def settle_below(self, number: int, trie: Any = None, node: int = 0) -> None:
        state = self.states[number]
        if state is UNKNOWN:
            self.table[number] = number
            return
        classes, after = self.grammar.row(state)
        targets = [0 if each is None else self.number(self.cut(each)) for each in after]
        self.table[number] = np.array(targets, np.int32)[classes]

    def cut(self, state: _State) -> _State:
        if self.height == WHOLE:
            return state
        hypotheses = [(self._top(stack), scan) for stack, scan in state.hypotheses]
        if all(stack is top for (stack, _), (top, _) in zip(state.hypotheses, hypotheses, strict=True)):
            return state
        return self.grammar.intern(frozenset(hypotheses), False)

    def _top(self, stack: _Stack) -> _Stack:
        states: list[int] = []
        top: _Stack | None = stack
        while top is not None and top.state != CUT and len(states) < self.height:
            states.append(top.state)
            top = top.below
        if top is None or top.state == CUT:
            return stack
        top = self.bottom
        for state in reversed(states):
            top = top.push(state, None)
        return top


class _Masks:
    """Masks by states with their stacks cut: those below look alike, so the walk of one is the walk of many.

    What follows a state hardly ever depends on all of its stack. The stacks are cut to their topmost states, the
    vocabulary is walked from there, and only the tokens that ask for more are read from the state itself; where those
    are many, more of the stack is kept.
    """

    def __init__(self, grammar: Grammar, trie: Trie):
        self.grammar, self.trie = grammar, trie
        bottom = _Stack(CUT, None, None)
        self.graphs = [_Cutter(grammar, bottom, height) for height in HEIGHTS]
        self.known: dict[tuple[int, _State], tuple[Bytes, list[int]]] = {}

    def mask(self, state: _State) -> npt.NDArray[np.bool_]:
        """(V,) bool: the tokens that may follow."""
        for graph in self.graphs:
            cut = graph.cut(state)
            bits, unknown = self.known.get((graph.height, cut)) or self._walk(graph, cut)
            if len(unknown) <= FEW:
                break
        mask = np.unpackbits(bits, count=len(self.trie.tokens)).view(bool)
        for token in unknown:
            mask[token] = self._fits(state, self.trie.tokens[token])
        return mask

    def _fits(self, state: _State | None, token: bytes) -> bool:
        for byte in token:
            if state is None:
                return False
            state = self.grammar.step(state, byte)
        return state is not None

    def _walk(self, graph: _Cutter, cut: _State) -> tuple[Bytes, list[int]]:
        if len(graph.states) > MAX_CUTS:
            graph.clear()
            self.known.clear()
        ids, ends = walk_state(graph, self.trie, graph.number(cut))
        unknown = ids[ends == graph.number(UNKNOWN)]
        mask = np.zeros(len(self.trie.tokens), bool)
        mask[ids] = True
        self.known[graph.height, cut] = np.packbits(mask), unknown.tolist()
        return self.known[graph.height, cut]


class Grammar:
    """The texts that `lark.Lark(grammar, parser="lalr", lexer="contextual", start=start)` parses, as a recognizer.

    `step(state, byte)` is None iff no text that goes on so is accepted. States are immutable, hashable and shared:
    equal ones are one object (until MAX_STATES are kept; then old ones are only equal to themselves).

    Parameters
    ----------
    grammar : str, in Lark's syntax
    start : name of the rule that a text is
    import_paths : where lark looks for what is imported, before its own grammars
    g_regex_flags : flags of `re`, for all terminals
    postlex : a lark.indenter.Indenter, for indented text
        A text that may end is told exactly. What can follow one that may not is decided by completions made of the
        shortest tokens that finish the open rules: exact where some such completion exists, as with lark's python.lark.
    source_path : file that the grammar is from, for relative imports

    Raises
    ------
    ValueError
        A syntax error (with a caret), a conflict (lark's report), an unknown start, a terminal that is not regular or
        matches the empty text (named), a grammar with which no text parses, a postlex that is no plain Indenter.
    """

    def __init__(
        self,
        grammar: str,
        start: str = "start",
        *,
        import_paths: Sequence[Any] = (),
        g_regex_flags: int = 0,
        postlex: Any = None,
        source_path: str | None = None,
    ):
        self.text = grammar
        self.lark = _load(grammar, start, import_paths, g_regex_flags, postlex, source_path)
        frontend = self.lark.parser
        contextual = frontend.lexer.lexer if postlex is not None else frontend.lexer
        numbers: dict[int, int] = {}
        lexers: list[BasicLexer] = []
        self._lexer_of: dict[int, int] = {}             # parser state -> lexer
        for state, lexer in contextual.lexers.items():
            if id(lexer) not in numbers:
                numbers[id(lexer)] = len(lexers)
                lexers.append(lexer)
            self._lexer_of[state] = numbers[id(lexer)]
        automata = _Automata(self.lark.lexer_conf.terminals, g_regex_flags)
        self._scans = _Scans(automata, lexers, g_regex_flags, postlex)
        self._parser = _Parser(frontend.parser, start, postlex)
        self._completion = _Completion(self._parser, self._scans, self._lexer_of)
        self._spellings = _Spellings(
            self._scans, list(self.lark.lexer_conf.terminals), self._parser.lexers_after(self._lexer_of), g_regex_flags
        )
        self._parser.avoid(self._spellings.missing)
        self._states: dict[Any, _State] = {}
        self._masks: _Masks | None = None
        if self._parser.sure and self._spellings.usable:
            self.token_mask = self._token_mask
        self._classes: dict[tuple[int, ...], tuple[Bytes, list[tuple[Outcome, ...]]]] = {}
        begun = self._state([(self._parser.bottom, self._scans.first)], [])
        if begun is None:
            raise ValueError(f"lark parses no text at all with this grammar (start rule {start!r})")
        self.start = begun

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], start: str = "start", **options: Any) -> Grammar:
        """The grammar in a file; relative imports are found beside it."""
        with open(path, encoding="utf-8") as file:
            return cls(file.read(), start, source_path=os.fspath(path), **options)

    def step(self, state: _State, byte: int) -> _State | None:
        """The state after one more byte, or None if no text that goes on so is accepted."""
        try:
            return state.next[byte]
        except KeyError:
            pass
        found = state.next[byte] = self._follow(state, tuple([self._scans.step(q, byte) for _, q in state.hypotheses]))
        return found

    def _follow(self, state: _State, outcomes: tuple[Outcome, ...]) -> _State | None:
        """The state after a byte of which the scans of `state` make `outcomes`."""
        key = tuple(map(id, outcomes))
        if key in state.alike:                          # another byte of the same class
            return state.alike[key]
        ended: list[tuple[_Stack, int]] = []
        going_on: list[tuple[_Stack, int]] = []
        try:
            for (stack, _), (scans, ends) in zip(state.hypotheses, outcomes, strict=True):
                going_on += [(stack, number) for number in scans]
                for symbol, rest in ends:
                    top = stack if symbol is None else self._parser.feed(stack, symbol)
                    if top is not None:
                        ended.append((top, rest))
            found = self._state(ended, going_on)
        except _Cut:
            found = UNKNOWN
        state.alike[key] = found
        return found

    def row(self, state: _State) -> tuple[Bytes, list[_State | None]]:
        """(256,) uint8 classes of bytes, and the state after a byte of each class."""
        scans = tuple([scan for _, scan in state.hypotheses])
        known = self._classes.get(scans)
        if known is None:
            known = self._classes[scans] = self._scans.joint_classes(scans)
        return known[0], [self._follow(state, outcomes) for outcomes in known[1]]

    def _token_mask(self, state: _State, trie: Trie) -> npt.NDArray[np.bool_]:
        """(V,) bool: the tokens that may follow a state, where no question needs all of a stack."""
        if self._masks is None or self._masks.trie is not trie:
            self._masks = _Masks(self, trie)
        return self._masks.mask(state)

    def accepts(self, state: _State) -> bool:
        """Whether lark parses the text that led to `state`."""
        return state.accepting

    def _state(self, ended: list[tuple[_Stack, int]], going_on: list[tuple[_Stack, int]]) -> _State | None:
        """The state of what is left of the hypotheses: tokens that have just `ended`, tokens still `going_on`."""
        accepting = False
        alive = [hypothesis for hypothesis in going_on if self._finishable(*hypothesis)]
        for stack, rest in ended:
            if not accepting and not stack.cut and not self._scans.rests[rest].required:
                accepting = self._parser.complete(stack)
            lexer = self._lexer_of[stack.state]
            sure = self._spellings.settled(lexer, rest) and self._parser.completable(stack)
            starts = self._scans.start(lexer, rest)
            alive += [(stack, scan) for scan in starts if sure or self._finishable(stack, scan)]
        if not alive and not accepting:
            return UNKNOWN if any(stack.cut for stack, _ in ended) else None
        return self.intern(frozenset(alive), accepting)

    def intern(self, hypotheses: frozenset[tuple[_Stack, int]], accepting: bool) -> _State:
        """The one state with these hypotheses."""
        if len(self._states) > MAX_STATES:              # whoever holds old ones keeps them
            self._states.clear()
            for memo in (self.start.next, self.start.alike, self._parser.bottom.pushed, self._parser.bottom.fed):
                memo.clear()
            self._masks = None
        state = self._states.get((hypotheses, accepting))
        if state is None:
            state = self._states[hypotheses, accepting] = _State(tuple(hypotheses), accepting)
        return state

    def _finishable(self, stack: _Stack, scan: int) -> bool:
        """Whether some text completes a hypothesis."""
        found = stack.finishable.get(scan)
        if found is None:
            found = any(self._sure(stack, end) for end in self._spellings.soon(scan)) or self._search(stack, scan)
            stack.finishable[scan] = found
        return found

    def _search(self, stack: _Stack, scan: int) -> bool:
        """The same, if it is not easily seen: one more token may make it so; in the end the parser's runs decide."""
        if stack.cut:
            raise _Cut
        if stack.layout is not None:
            return self._search_indented(stack, scan, stack.layout)
        looks: set[Look] = set()
        for end in self._completion.ends(scan):
            top = stack if end.symbol is None else self._parser.feed(stack, end.symbol)
            if top is None:
                continue
            if self._sure(stack, end):
                return True
            after = self._completion.looks(self._lexer_of[top.state], end.rest)
            if any(symbol != END and self._sure(top, Ended(symbol, rest)) for symbol, rest in after):
                return True
            if (END, -1) in after and self._parser.complete(top):
                return True
            looks |= after if end.symbol is None else {(str(end.symbol), end.rest)}
        return self._completion.possible(stack, looks)

    def _search_indented(self, stack: _Stack, scan: int, layout: Layout) -> bool:
        """The same for indented text, whose blocks are without number: a line end and any column that fits is tried."""
        if any(self._sure(stack, end) for end in self._spellings.soon(scan, keywords=True)):
            return True
        current, spellings = self._scans.scans[scan], self._spellings
        names = {self._scans.automata.names[q] for q in current.threads}
        if names.isdisjoint({self._scans.newline, *spellings.ignored}):
            return False
        columns = [*layout.columns, layout.columns[-1] + 1]
        lines = [b"\n" + b" " * column for column in columns]
        lines += [b" " * max(column - max(current.column, 0), 0) for column in columns]
        tails = {spellings.tails.get(q, b"") for q in current.threads}
        texts = [*lines, *(tail + line for tail in sorted(tails) for line in lines)]
        return any(self._sure(stack, end) for text in texts for end in spellings.read((scan,), text)[-1])

    def _sure(self, stack: _Stack, end: Ended) -> bool:
        """Whether it is easily seen that a text can be completed if a token ends so."""
        top = stack if end.symbol is None else self._parser.feed(stack, end.symbol)
        return (
            top is not None
            and self._spellings.settled(self._lexer_of[top.state], end.rest)
            and self._parser.completable(top)
        )


class _KeepAnalysis(LALR_Parser):
    """Lark's parser that remembers whether a conflict was resolved, by shifting or by priority."""

    def __init__(self, parser_conf: Any, debug: bool = False, strict: bool = False):
        analysis = LALR_Analyzer(parser_conf, debug=debug, strict=strict)
        analysis.compute_lalr()  # type: ignore[no-untyped-call]
        self._parse_table = analysis.parse_table
        self.parser_conf = parser_conf
        self.parser = _Loop(analysis.parse_table, parser_conf.callbacks, debug)
        closures = dict.fromkeys(itemset.closure for itemset in analysis.lr0_itemsets)
        kernels = {itemset.closure: itemset.kernel for itemset in analysis.lr0_itemsets}
        self.kernels = [kernels[closure] for closure in closures]       # by number of the state
        self.conflicts = any(
            len(rules) > 1 or lookahead in itemset.transitions
            for itemset in analysis.lr0_itemsets
            for lookahead, rules in itemset.lookaheads.items()
        )


class _Unchecked(ContextualLexer):
    """Lark's contextual lexer, built without its (slow) search for terminals that overlap: order decides those."""

    def __init__(self, conf: Any, states: Any, always_accept: Any = ()):
        for terminal in conf.terminals:
            _check(terminal, conf.g_regex_flags)
        conf = copy(conf)
        conf.skip_validation = True
        super().__init__(conf, states, always_accept)


def _load(grammar: str, start: str, import_paths: Any, flags: int, postlex: Any, source_path: str | None) -> Lark:
    methods = "process", "_process", "handle_NL"
    plain = all(getattr(type(postlex), name, None) is getattr(Indenter, name) for name in methods)
    if postlex is not None and not plain:
        raise ValueError(f"postlex: a lark.indenter.Indenter that only names its terminals, not {postlex!r}")
    try:
        lark = Lark(
            grammar,
            parser="lalr",
            lexer="contextual",
            start=start,
            import_paths=list(import_paths),
            g_regex_flags=flags,
            postlex=postlex,
            source_path=source_path,
            maybe_placeholders=False,
            _plugins={"LALR_Parser": _KeepAnalysis, "ContextualLexer": _Unchecked},
        )
    except UnexpectedInput as error:
        raise ValueError(f"grammar: {error}".rstrip() + f"\n\n{error.get_context(grammar)}") from error
    except FileNotFoundError as error:
        raise ValueError(f"grammar: nothing to import from {error.filename!r}") from error
    except LarkError as error:
        if str(error) == f"Using an undefined rule: NonTerminal({start!r})":
            raise ValueError(f"grammar: no rule is named {start!r}, from which a text is to start") from error
        raise ValueError(f"grammar: {error}") from error
    named = [t for t in lark.terminals if re.search(r"\(\?(P<|[aiLmsux]+\))", t.pattern.to_regexp())]
    try:                                            # as the alternatives of one regular expression, as lark has them
        re.compile("|".join(f"(?P<{t.name}>{t.pattern.to_regexp()})" for t in named), flags)
    except re.error as error:
        names = ", ".join(terminal.name for terminal in named)
        raise ValueError(f"lark cannot put terminals into one regular expression ({names}): {error}") from error
    return lark


def _check(terminal: TerminalDef, flags: int) -> None:
    pattern = terminal.pattern.to_regexp()
    try:
        re.compile(pattern, flags)
    except re.error as error:
        where = "" if error.pos is None else f"\n    {pattern}\n    {' ' * error.pos}^"
        raise ValueError(f"terminal {terminal.name}: {error}{where}") from error
    if terminal.pattern.min_width == 0:
        raise ValueError(f"terminal {terminal.name}: {pattern!r} matches the empty text, which lark's lexers refuse")


def _carve(
    terminals: Iterable[TerminalDef], flags: int
) -> tuple[list[TerminalDef], dict[str, list[TerminalDef]]]:
    """Lark's rule of keywords: the alternatives that are left, and the strings that are carved out of each."""
    left, callbacks = _create_unless(terminals, flags, re, False)  # type: ignore[no-untyped-call]
    return left, {name: list(callback.scanner.terminals) for name, callback in callbacks.items()}


def _nfa(terminal: TerminalDef, flags: int) -> NFA:
    try:
        return parse(terminal.pattern.to_regexp(), flags)
    except ValueError as error:
        raise ValueError(f"terminal {terminal.name}: {error}") from error


def _shortest_yields(rules: Iterable[Any], avoided: set[str]) -> dict[str, tuple[str, ...]]:
    """The fewest terminals that every rule may consist of; rules that nothing finishes are left out."""
    shortest: dict[str, tuple[str, ...]] = {}
    changed = True
    while changed:
        changed = False
        for rule in rules:
            tokens: tuple[str, ...] = ()
            for symbol in rule.expansion:
                name = str(symbol.name)
                if name in avoided or not symbol.is_term and name not in shortest:
                    break
                tokens += (name,) if symbol.is_term else shortest[name]
            else:
                name = str(rule.origin.name)
                if name not in shortest or len(tokens) < len(shortest[name]):
                    shortest[name], changed = tokens, True
    return shortest


def json_grammar() -> Grammar:
    """JSON as RFC 8259 has it: any value, with whitespace around tokens."""
    return Grammar(_JSON)


_JSON = r"""
start: value
value: object | array | STRING | NUMBER | "true" | "false" | "null"
object: "{" [member ("," member)*] "}"
member: STRING ":" value
array: "[" [value ("," value)*] "]"

STRING: /"([^"\\\x00-\x1F]|\\(["\\\/bfnrt]|u[0-9A-Fa-f]{4}))*"/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/
%ignore /[ \t\n\r]+/
"""
