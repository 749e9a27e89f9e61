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
import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llmppl.constraints.automata.budget import TooLarge
from llmppl.constraints.automata.nfa import DEAD
from llmppl.constraints.lark.terminals import FIRST_SPECIAL, Assumptions, Automata, Terminal, Undecided
from llmppl.support.arguments import shown
from llmppl.support.graphs import Memo, Numbering, reachable

States = frozenset[int]
Bools = npt.NDArray[np.bool_]
Keywords = tuple[tuple[str, tuple[str, ...]], ...]      # terminals with their keywords, in order

MAX_SCANS = 20_000                                      # partial tokens of a grammar
MAX_THREADS = 400_000                                   # in partial tokens and obligations, at some microseconds each
ASSUMED = 50                                            # states that an assumption counts as
LAYOUT_CUTS = 9, 10, 11, 32, 33                         # around tab, line end and space


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

    symbol: str | tuple[str, int] | None
    obligation: int

    @property
    def terminal(self) -> str | None:
        """The symbol, without the column of a line end."""
        return self.symbol[0] if isinstance(self.symbol, tuple) else self.symbol


Outcome = tuple[tuple[int, ...], tuple[Ended, ...]]     # partial tokens with which it goes on; ways in which it ends


class PartialTokens:
    """All partial tokens of a grammar, numbered in order of use, and their outcomes after each byte.

    Attributes
    ----------
    tokens, obligations : lists by number; `token_number` and `obligation_number` number new ones
    specials : symbols of the special tokens
    starts : (lexer, obligation) -> the partial tokens that begin after it
        There are several if look-aheads at their beginning are undecided.
    classes : partial token -> the first byte of each class of bytes that it does not tell apart
    rows : partial token -> its outcome for each class, None if not known yet
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
        self.newline = indenter.NL_type if indenter else None
        self.widths = {32: 1, 9: indenter.tab_len} if indenter else {}
        self.terminals = {terminal.name: terminal for terminal in terminals}
        self._size = 0                                  # of all partial tokens and obligations, in states of terminals
        self.token_number: Numbering[PartialToken] = Numbering(
            check=lambda token: self._keep(len(token.threads) + len(token.keyword_threads), token.threads)
        )
        self.obligation_number: Numbering[Obligation] = Numbering(
            check=lambda each: self._keep(len(each.forbidden) + sum(map(len, each.required)), ())
        )
        self.tokens = self.token_number.keys_in_order
        self.obligations = self.obligation_number.keys_in_order
        self.starts = Memo(self._begin)
        self.classes = Memo(self._find_classes)
        self.heads = Memo(self._find_heads)
        self.firsts: Memo[str, Bools] = Memo(lambda name: automata.firsts([automata.starts[name]]))
        self.reads_line_end = Memo(self._reads_line_end)
        self.rows: Memo[int, list[Outcome | None]] = Memo(lambda number: [None] * len(self.classes[number]))
        self._outcomes: dict[Outcome, Outcome] = {}     # equal ones are one object
        self._alternatives = Memo(self._order)          # by lexer
        self._settled = Memo(self._settle_after_byte)
        self._tracker_cuts = Memo(self._find_tracker_cuts)
        self.first = self.obligation_number[Obligation(frozenset(), frozenset(), automata.first_trackers)]

    def step(self, number: int, byte: int) -> Outcome:
        """Return the outcome of a byte: the partial tokens that continue, and the ways in which the token may end."""
        i = bisect_right(self.classes[number], byte) - 1
        row = self.rows[number]
        outcome = row[i]
        if outcome is None:
            outcome = self._read(self.tokens[number], byte)
            outcome = row[i] = self._outcomes.setdefault(outcome, outcome)
        return outcome

    def step_all(self, numbers: Collection[int], byte: int) -> Outcome:
        """Return the joint outcome of a byte for several partial tokens."""
        if len(numbers) == 1:
            (number,) = numbers
            return self.step(number, byte)
        going_on, ends = zip(((), ()), *[self.step(number, byte) for number in numbers], strict=True)
        return tuple(sorted(set().union(*going_on))), tuple(dict.fromkeys(itertools.chain.from_iterable(ends)))

    def exits(self, numbers: Iterable[int]) -> Iterator[tuple[Ended, ...]]:
        """Yield the ways in which each partial token that some of them lead to may end after a byte."""

        def onward(number: int) -> Iterator[int]:
            return itertools.chain.from_iterable(self.step(number, byte)[0] for byte in self.classes[number])

        for number in reachable(numbers, onward):
            ends = [self.step(number, byte)[1] for byte in self.classes[number]]
            yield tuple(dict.fromkeys(itertools.chain.from_iterable(ends)))

    def _reads_line_end(self, number: int) -> bool:
        states = reachable(self.tokens[number].threads, self.automata.onward)
        return any(lo <= 10 <= hi for lo, hi, _ in self.automata.edges_of(states))

    # ---- limits

    def _keep(self, size: int, threads: Sequence[int]) -> None:
        """Count the kept states; TooLarge, with the terminal that takes most, beyond the limit."""
        self._size += size
        if self._size > MAX_THREADS or len(self.tokens) >= MAX_SCANS:
            some = [q for token in self.tokens[-1000:] for q in token.threads] or threads
            name, _ = Counter(map(self.automata.names.__getitem__, some)).most_common(1)[0]
            raise TooLarge(
                f"terminal {name} {shown(self.terminals[name].pattern)}",
                f"{len(self.tokens):,} states of the lexer so far, with {self._size:,} of its terminals in them",
                "smaller counted repeats, and none after a prefix that matches anywhere, as in (.*a.{20}), would work",
            )

    # ---- beginnings

    def _order(self, lexer: int) -> tuple[list[int], Keywords]:
        """Return the entries of a lexer's alternatives in lark's order, and their keywords."""
        names = set(self.lexers[lexer])
        terminals = [self.terminals[name] for name in self.lexers[lexer]]
        entries = [self.automata.starts[t.name] for t in terminals if names.isdisjoint(t.embedded)]
        keywords = tuple([(t.name, t.keywords) for t in terminals])
        return [q for q in entries if q != DEAD], _restricted(keywords, names, names)

    def _begin(self, key: tuple[int, int]) -> tuple[int, ...]:
        lexer, obligation = key
        entries, keywords = self._alternatives[lexer]
        threads = frozenset(self.automata.starts[name] for _, names in keywords for name in names)
        tokens, ended = self._settle(PartialToken(keywords, tuple(entries), threads, self.obligations[obligation], -1))
        assert not ended, "lark refuses terminals that match the empty text"
        return tokens

    def _find_heads(self, obligation: int) -> Bools:
        cuts = self._cuts_of((), self.obligations[obligation])
        possible = [self._survives(self._after(self.obligations[obligation], byte)) for byte in cuts]
        return np.repeat(possible, np.diff([*cuts, self.specials.stop]))

    def _survives(self, obligation: Obligation) -> bool:
        """Check that nothing forbidden accepts yet, and that nothing required is out of reach. True proves nothing."""
        try:
            states = self.automata.closure(obligation.forbidden, obligation.trackers, Assumptions())
        except Undecided:
            return True
        return self.automata.ends.keys().isdisjoint(states) and frozenset() not in obligation.required

    # ---- bytes

    def _find_classes(self, number: int) -> list[int]:
        token = self.tokens[number]
        return self._cuts_of({*token.threads, *token.keyword_threads}, token.obligation)

    def _cuts_of(self, states: Iterable[int], obligation: Obligation) -> list[int]:
        """Return the first symbol of each class of symbols that NFA states and an obligation do not tell apart."""
        cuts = {0, FIRST_SPECIAL, *(LAYOUT_CUTS if self.newline else ())}
        for lo, hi, _ in self.automata.edges_of(obligation.forbidden.union(states, *obligation.required)):
            cuts.add(lo)
            cuts.add(hi + 1)
        cuts.update(*map(self._tracker_cuts.__getitem__, enumerate(obligation.trackers)))
        cuts.discard(self.specials.stop)
        return sorted(cuts)

    def _find_tracker_cuts(self, key: tuple[int, int]) -> list[int]:
        tracker, state = key
        row = self.automata.trackers[tracker].row(state) if state else np.zeros(256)
        cuts = (np.flatnonzero(np.diff(row)) + 1).tolist()
        return cuts

    def _read(self, token: PartialToken, byte: int) -> Outcome:
        read = self.automata.read
        threads = read(token.threads, byte)
        if not threads:
            return (), ()
        column = token.column
        if column >= 0:
            column += self.widths.get(byte, 0)
        if self.newline and byte == 10:
            column = 0
        keyword_threads = frozenset(read(token.keyword_threads, byte))
        keywords = self._keywords_left(token.keywords, threads, keyword_threads)
        return self._settled[
            PartialToken(keywords, tuple(threads), keyword_threads, self._after(token.obligation, byte), column)
        ]

    def _keywords_left(self, keywords: Keywords, threads: Iterable[int], keyword_threads: Collection[int]) -> Keywords:
        """Return the keywords active in `keyword_threads` of the terminals active in `threads`."""
        if not keyword_threads:
            return ()
        return _restricted(keywords, self.automata.names_of(threads), self.automata.names_of(keyword_threads))

    def _after(self, obligation: Obligation, byte: int) -> Obligation:
        """Return an obligation after one more byte, its epsilon edges not yet followed."""
        read = self.automata.read
        return Obligation(
            frozenset(read(obligation.forbidden, byte)),
            frozenset([frozenset(read(states, byte)) for states in obligation.required]),
            self.automata.track(obligation.trackers, byte),
        )

    def _settle_after_byte(self, token: PartialToken) -> Outcome:
        threads = len(token.threads) + len(token.keyword_threads)
        self._keep(threads + len(token.obligation.forbidden), token.threads)
        return self._settle(token)

    def _settle(self, token: PartialToken) -> Outcome:
        """Follow the epsilon edges of all threads, under every assumption about the look-aheads on the way."""
        going_on: dict[int, None] = {}
        ended: dict[Ended, None] = {}
        todo = [Assumptions()]
        while todo:
            ahead = todo.pop()
            try:
                self._assume(ahead, token, going_on, ended)
            except Undecided as undecided:
                self._keep(ASSUMED, token.threads)
                todo += [Assumptions({**ahead, undecided.args[0]: holds}) for holds in (False, True)]
        return tuple(going_on), tuple(ended)

    def _assume(
        self, ahead: Assumptions, token: PartialToken, going_on: dict[int, None], ended: dict[Ended, None]
    ) -> None:
        obligation = self._assumed(ahead, token.obligation)
        if obligation is None:
            return
        ends = self.automata.ends
        names = self.automata.names
        closure = functools.partial(self.automata.closure, trackers=obligation.trackers, ahead=ahead)
        before = []                                     # threads preferred to the match
        matched = None                                  # terminal
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
            possible = set().union(*[keywords.get(host, ()) for host in hosts])
            left = frozenset([q for q in spelled if q not in ends and names[q] in possible])
            column = token.column if self.newline in hosts else -1
            own = self._keywords_left(token.keywords, before, left)
            going_on[self.token_number[PartialToken(own, tuple(before), left, obligation, column)]] = None
        if matched:
            whole = {ends[q] for q in spelled if q in ends}
            name = next(filter(whole.__contains__, keywords.get(matched, ())), matched)
            symbol = None if matched in self.ignored else (name, token.column) if name == self.newline else name
            after = obligation._replace(forbidden=obligation.forbidden.union(before))
            if symbol not in self.ignored:          # lark does not drop an ignored keyword, and no parser takes it
                ended[Ended(symbol, self.obligation_number[after])] = None

    def _assumed(self, ahead: Assumptions, obligation: Obligation) -> Obligation | None:
        """Return an obligation with its epsilon edges followed, or None if an assumption is already wrong."""
        ends = self.automata.ends
        trackers = obligation.trackers
        denied = [entry for entry, holds in ahead.items() if not holds]
        forbidden = frozenset(self.automata.closure([*obligation.forbidden, *denied], trackers, ahead))
        if not ends.keys().isdisjoint(forbidden):
            return None
        wanted = [*obligation.required, *({entry} for entry, holds in ahead.items() if holds)]
        sets = [self.automata.closure(states, trackers, ahead) for states in wanted]
        required = frozenset([frozenset(states) - forbidden for states in sets if ends.keys().isdisjoint(states)])
        return None if frozenset() in required else Obligation(forbidden, required, trackers)


def _restricted(keywords: Keywords, hosts: set[str], names: set[str]) -> Keywords:
    """Return the keywords of `hosts` that are among `names`."""
    pairs = [(host, tuple(filter(names.__contains__, each))) for host, each in keywords if host in hosts]
    return tuple([pair for pair in pairs if pair[1]])
