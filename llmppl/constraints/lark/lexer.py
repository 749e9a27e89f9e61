"""Lark's lexer, byte by byte: it follows every way to cut a text into tokens at once.

In a parser state, lark's contextual lexer matches one regular expression: the alternation of the terminals with an
action there and of the ignored ones, ordered by (priority, greatest width, length of pattern, name). `re.match` picks
the first alternative that matches, and the match that `re` prefers, which need not be the longest. A string terminal
that the regular expression of another one matches whole is a *keyword* of that one: if the matched text is a keyword,
the token is the keyword. The token goes to the parser, and the lexer continues after it in the new state.

The one idea: assume where a match ends instead of waiting to see it. A *partial token* is the current token under such
an assumption: the threads of its match in order of preference, and an obligation. An *obligation* is a constraint on
the text that follows. *Forbidden* are NFA states of earlier matches that `re` would prefer to the assumed ones: if one
of them ever accepts, the assumption was wrong. *Required* are look-aheads that were assumed to hold. Where a thread
accepts, the token splits. Either a preferred thread accepts later, and the token continues with those before it. Or
none does: the token ends here, and they become forbidden.

A special token is a symbol, too. No other terminal reads it. A look-ahead before it sees the end of a text, and a
look-behind after it sees a beginning.

Source: the lexer of lark 1.3.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llmppl.constraints.automata.budget import TooLarge
from llmppl.constraints.automata.nfa import DEAD
from llmppl.constraints.lark.parser import Symbol
from llmppl.constraints.lark.terminals import (
    FIRST_SPECIAL,
    Assumptions,
    Automata,
    Terminal,
    Undecided,
)
from llmppl.support.arguments import shown
from llmppl.support.graphs import Memo, Numbering, reachable

States = frozenset[int]
Bools = npt.NDArray[np.bool_]
Keywords = tuple[tuple[str, tuple[str, ...]], ...]  # terminals with their keywords, in order

MAX_SCANS = 20_000  # partial tokens of a grammar
MAX_THREADS = 400_000  # in partial tokens and obligations, at some microseconds each
ASSUMED = 50  # states that an assumption counts as
LAYOUT_CUTS = 9, 10, 11, 32, 33  # around tab, line end and space


class Obligation(NamedTuple):
    """NFA states that must never accept, sets of states of which one must, and the states of look-behind trackers."""

    forbidden: States
    required: frozenset[States]
    trackers: tuple[int, ...]


class PartialToken(NamedTuple):
    """The current token under one hypothesis: its `threads` in order, and those of the keywords that it may still be.

    `keywords` are those of the threads' terminals. The column is that of a line end's next line so far, otherwise -1.
    """

    keywords: Keywords
    threads: tuple[int, ...]
    keyword_threads: States
    obligation: Obligation
    column: int


class Ended(NamedTuple):
    """A token that may end here: the symbol for the parser (None if ignored), and the number of its obligation."""

    symbol: Symbol | None
    obligation: int

    @property
    def terminal(self) -> str | None:
        """The symbol, without the column of a line end."""
        if isinstance(self.symbol, tuple):
            return self.symbol[0]
        return self.symbol


Outcome = tuple[
    tuple[int, ...], tuple[Ended, ...]
]  # partial tokens with which it goes on; ways in which it ends


class PartialTokens:
    """All partial tokens of a grammar, numbered in order of use, and their outcomes after each byte.

    Attributes
    ----------
    tokens, obligations : lists by number; `token_number` and `obligation_number` number new ones
    specials : symbols of the special tokens
    starts : (lexer, obligation) -> the partial tokens that begin after it
        There are several if look-aheads at their beginning are undecided.
    classes : partial token -> the first byte of each class of bytes that it does not tell apart
    heads : obligation -> (num_symbols,) bool, False at symbols with which no token of any lexer can begin after it
    firsts : name of a terminal -> (num_symbols,) bool, True at symbols with which it may begin; guards are ignored
    reads_line_end : partial token -> True if it may read another line end
    """

    def __init__(
        self,
        terminals: Sequence[Terminal],
        ignored: frozenset[str],
        lexers: Sequence[Sequence[str]],
        indenter: Any,
        num_specials: int,
    ) -> None:
        self.specials = range(FIRST_SPECIAL, FIRST_SPECIAL + num_specials)
        automata = self.automata = Automata(terminals, self.specials.stop)
        self.lexers = lexers
        self.ignored = ignored
        self.newline: str | None = None
        self.widths = dict[int, int]()  # of the bytes that move a line's column
        if indenter:
            self.newline = indenter.NL_type
            self.widths = {32: 1, 9: indenter.tab_len}
        self.terminals = {terminal.name: terminal for terminal in terminals}
        self._size = 0  # of all partial tokens and obligations, in states of terminals
        self.token_number = Numbering[PartialToken](check=self._keep_token)
        self.obligation_number = Numbering[Obligation](check=self._keep_obligation)
        self.tokens = self.token_number.keys_in_order
        self.obligations = self.obligation_number.keys_in_order
        self.starts = Memo(self._begin)
        self.classes = Memo(self._find_classes)
        self.heads = Memo(self._find_heads)
        self.firsts: Memo[str, Bools] = Memo(lambda name: automata.firsts([automata.starts[name]]))
        self.reads_line_end = Memo(self._reads_line_end)
        self._outcomes = Memo(self._read)
        self._alternatives = Memo(self._order)  # by lexer
        self._settled = Memo(self._settle_after_byte)
        self._tracker_cuts = Memo(self._find_tracker_cuts)
        self.first = self.obligation_number[
            Obligation(frozenset(), frozenset(), automata.first_trackers)
        ]

    def step(self, number: int, byte: int) -> Outcome:
        """Return the outcome of a byte: the partial tokens that continue, and the ways in which the token may end."""
        classes = self.classes[number]
        first = classes[bisect_right(classes, byte) - 1]
        return self._outcomes[number, first]

    def step_all(self, numbers: Collection[int], byte: int) -> Outcome:
        """Return the joint outcome of a byte for several partial tokens."""
        going_on = set[int]()
        ended = dict[Ended, None]()
        for number in numbers:
            more, ends = self.step(number, byte)
            going_on.update(more)
            ended |= dict.fromkeys(ends)
        return tuple(sorted(going_on)), tuple(ended)

    def names_in(self, number: int) -> set[str]:
        """Return the terminals that a partial token may become."""
        token = self.tokens[number]
        return self.automata.names_of((*token.threads, *token.keyword_threads))

    def exits(self, numbers: Iterable[int]) -> Iterator[tuple[Ended, ...]]:
        """Yield the ways in which each partial token that some of them lead to may end after a byte."""

        def onward(number: int) -> Iterator[int]:
            for byte in self.classes[number]:
                yield from self.step(number, byte)[0]

        for number in reachable(numbers, onward):
            found = dict[Ended, None]()
            for byte in self.classes[number]:
                found |= dict.fromkeys(self.step(number, byte)[1])
            yield tuple(found)

    def _reads_line_end(self, number: int) -> bool:
        states = reachable(self.tokens[number].threads, self.automata.onward)
        return bool(self.automata.read(states, 10))

    # ---- limits

    def _keep_token(self, token: PartialToken) -> None:
        self._keep(len(token.threads) + len(token.keyword_threads), token.threads)

    def _keep_obligation(self, obligation: Obligation) -> None:
        size = len(obligation.forbidden)
        for states in obligation.required:
            size += len(states)
        self._keep(size, ())

    def _keep(self, size: int, threads: Sequence[int]) -> None:
        """Count the kept states; TooLarge, with the terminal that takes most, beyond the limit."""
        self._size += size
        if self._size > MAX_THREADS or len(self.tokens) >= MAX_SCANS:
            counts = Counter(self.automata.names[q] for q in threads)
            for token in self.tokens[-1000:]:
                counts.update(self.automata.names[q] for q in token.threads)
            name, _ = counts.most_common(1)[0]
            raise TooLarge(
                f"terminal {name} {shown(self.terminals[name].pattern)}",
                f"{len(self.tokens):,} states of the lexer so far, with {self._size:,} of its terminals in them",
                "smaller counted repeats, and none after a prefix that matches anywhere, as in (.*a.{20}), would work",
            )

    # ---- beginnings

    def _order(self, lexer: int) -> tuple[list[int], Keywords]:
        """Return the entries of a lexer's alternatives in lark's order, and their keywords."""
        names = set(self.lexers[lexer])
        entries = list[int]()
        keywords = list[tuple[str, tuple[str, ...]]]()
        for name in self.lexers[lexer]:
            terminal = self.terminals[name]
            keywords.append((name, terminal.keywords))
            start = self.automata.starts[name]
            if start != DEAD and names.isdisjoint(terminal.embedded):
                entries.append(start)
        return entries, _restricted(keywords, names, names)

    def _begin(self, key: tuple[int, int]) -> tuple[int, ...]:
        lexer, obligation = key
        entries, keywords = self._alternatives[lexer]
        spelled = set[int]()
        for _, names in keywords:
            spelled.update(self.automata.starts[name] for name in names)
        begun = self.obligations[obligation]
        tokens, ended = self._settle(
            PartialToken(keywords, tuple(entries), frozenset(spelled), begun, -1)
        )
        assert not ended, "lark refuses terminals that match the empty text"
        return tokens

    def _find_heads(self, obligation: int) -> Bools:
        found = self.obligations[obligation]
        cuts = self._cuts_of((), found)
        possible = [self._survives(self._after(found, byte)) for byte in cuts]
        return np.repeat(possible, np.diff([*cuts, self.specials.stop]))

    def _survives(self, obligation: Obligation) -> bool:
        """Check that nothing forbidden accepts yet, and that nothing required is out of reach. True proves nothing."""
        try:
            states = self.automata.closure(obligation.forbidden, obligation.trackers, Assumptions())
        except Undecided:
            return True
        return (
            self.automata.ends.keys().isdisjoint(states) and frozenset() not in obligation.required
        )

    # ---- bytes

    def _find_classes(self, number: int) -> list[int]:
        token = self.tokens[number]
        return self._cuts_of({*token.threads, *token.keyword_threads}, token.obligation)

    def _cuts_of(self, states: Iterable[int], obligation: Obligation) -> list[int]:
        """Return the first symbol of each class of symbols that NFA states and an obligation do not tell apart."""
        cuts = {0, FIRST_SPECIAL}
        if self.newline:
            cuts.update(LAYOUT_CUTS)
        for lo, hi, _ in self.automata.edges_of(
            obligation.forbidden.union(states, *obligation.required)
        ):
            cuts.add(lo)
            cuts.add(hi + 1)
        for place in enumerate(obligation.trackers):
            cuts.update(self._tracker_cuts[place])
        cuts.discard(self.specials.stop)
        return sorted(cuts)

    def _find_tracker_cuts(self, key: tuple[int, int]) -> list[int]:
        tracker, state = key
        row = self.automata.trackers[tracker].row(state) if state else np.zeros(256)
        cuts: list[int] = (np.flatnonzero(np.diff(row)) + 1).tolist()
        return cuts

    def _read(self, place: tuple[int, int]) -> Outcome:
        number, byte = place
        token = self.tokens[number]
        read = self.automata.read
        threads = tuple(read(token.threads, byte))
        if not threads:
            return (), ()
        column = token.column
        if column >= 0:
            column += self.widths.get(byte, 0)
        if self.newline and byte == 10:
            column = 0
        spelled = frozenset(read(token.keyword_threads, byte))
        keywords = self._keywords_left(token.keywords, threads, spelled)
        obligation = self._after(token.obligation, byte)
        return self._settled[PartialToken(keywords, threads, spelled, obligation, column)]

    def _keywords_left(
        self, keywords: Keywords, threads: Iterable[int], keyword_threads: Collection[int]
    ) -> Keywords:
        """Return the keywords active in `keyword_threads` of the terminals active in `threads`."""
        if not keyword_threads:
            return ()
        return _restricted(
            keywords, self.automata.names_of(threads), self.automata.names_of(keyword_threads)
        )

    def _after(self, obligation: Obligation, byte: int) -> Obligation:
        """Return an obligation after one more byte, its epsilon edges not yet followed."""
        read = self.automata.read
        return Obligation(
            frozenset(read(obligation.forbidden, byte)),
            frozenset([frozenset(read(states, byte)) for states in obligation.required]),
            self.automata.track(obligation.trackers, byte),
        )

    def _settle_after_byte(self, token: PartialToken) -> Outcome:
        self._keep_token(token)
        self._keep(len(token.obligation.forbidden), token.threads)
        return self._settle(token)

    def _settle(self, token: PartialToken) -> Outcome:
        """Follow the epsilon edges of all threads, under every assumption about the look-aheads on the way."""
        going_on = dict[int, None]()
        ended = dict[Ended, None]()
        todo = [Assumptions()]
        while todo:
            ahead = todo.pop()
            try:
                onward, end = self._assume(ahead, token)
            except Undecided as undecided:
                self._keep(ASSUMED, token.threads)
                for holds in (False, True):
                    todo.append(Assumptions({**ahead, undecided.args[0]: holds}))
                continue
            if onward is not None:
                going_on[onward] = None
            if end is not None:
                ended[end] = None
        return tuple(going_on), tuple(ended)

    def _assume(self, ahead: Assumptions, token: PartialToken) -> tuple[int | None, Ended | None]:
        """Return the partial token that goes on under some assumptions, and the end of the token; None if impossible.

        Raises Undecided at a look-ahead without an assumption.
        """
        obligation = self._assumed(ahead, token.obligation)
        onward = end = None
        if obligation is None:
            return onward, end
        ends = self.automata.ends
        names = self.automata.names
        closure = functools.partial(
            self.automata.closure, trackers=obligation.trackers, ahead=ahead
        )
        before = []  # threads preferred to the match
        matched = None  # terminal
        for q in closure(token.threads):
            if q in ends:
                matched = ends[q]
                break
            if q not in obligation.forbidden:
                before.append(q)
        spelled = closure(token.keyword_threads)
        keywords = dict(token.keywords)
        if before:
            hosts = self.automata.names_of(before)
            possible = set[str]()
            for host in hosts:
                possible.update(keywords.get(host, ()))
            left = frozenset(q for q in spelled if q not in ends and names[q] in possible)
            column = token.column
            if self.newline not in hosts:
                column = -1
            own = self._keywords_left(token.keywords, before, left)
            onward = self.token_number[PartialToken(own, tuple(before), left, obligation, column)]
        if matched:
            whole = {ends[q] for q in spelled if q in ends}
            symbol = self._symbol(matched, keywords.get(matched, ()), whole, token.column)
            after = obligation._replace(forbidden=obligation.forbidden.union(before))
            if (
                symbol not in self.ignored
            ):  # lark does not drop an ignored keyword, and no parser takes it
                end = Ended(symbol, self.obligation_number[after])
        return onward, end

    def _symbol(
        self, matched: str, keywords: Sequence[str], whole: set[str], column: int
    ) -> Symbol | None:
        """Return the symbol of a match for the parser; `whole` are the keywords that the match spells."""
        if matched in self.ignored:
            return None
        for name in keywords:
            if name in whole:
                matched = name
                break
        if matched == self.newline:
            return matched, column
        return matched

    def _assumed(self, ahead: Assumptions, obligation: Obligation) -> Obligation | None:
        """Return an obligation with its epsilon edges followed, or None if an assumption is already wrong."""
        ends = self.automata.ends.keys()
        trackers = obligation.trackers
        denied = list(obligation.forbidden)
        wanted = list(obligation.required)
        for entry, holds in ahead.items():
            if holds:
                wanted.append(frozenset([entry]))
            else:
                denied.append(entry)
        forbidden = frozenset(self.automata.closure(denied, trackers, ahead))
        if not ends.isdisjoint(forbidden):
            return None
        required = set[States]()
        for states in wanted:
            reached = self.automata.closure(states, trackers, ahead)
            if ends.isdisjoint(reached):
                required.add(frozenset(reached) - forbidden)
        if frozenset() in required:
            return None
        return Obligation(forbidden, frozenset(required), trackers)


def _restricted(
    keywords: Iterable[tuple[str, tuple[str, ...]]], hosts: set[str], names: set[str]
) -> Keywords:
    """Return the keywords of `hosts` that are among `names`."""
    found = list[tuple[str, tuple[str, ...]]]()
    for host, each in keywords:
        if host in hosts and not names.isdisjoint(each):
            found.append((host, tuple(name for name in each if name in names)))
    return tuple(found)
