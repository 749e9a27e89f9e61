"""Lark's lexer, byte by byte: every way in which a text may be cut into tokens is followed at once.

Lark's lexer, exactly. In a parser state q it matches one regular expression, the alternation of the terminals that q
has an action for and of the ignored ones, ordered by (priority, greatest width, length of pattern, name), with
`re.match`: the first alternative that matches at all wins, and inside it the match that `re` prefers, not the
longest. If the text matched is that of a string terminal which the regular expression of the winner covers, the token
is that string: a *keyword* is split off a name. It goes to the parser, and the lexer goes on behind it in the new
state.

The one idea: do not wait to see where a match ends; assume it. A *partial token* is the current token under such an
assumption: the threads of its match in order of preference, what is *forbidden* (NFA states of earlier tokens that are
preferred to the match assumed: if ever one of them accepts, `re` would have matched there, and the assumption is wrong)
and what is *required* (look-aheads that were assumed to hold). Where a thread accepts, the token splits: either one of
the threads before it accepts later on, and the token goes on with those; or none does, the token ends here, and they
are forbidden. What an ended token leaves behind it is its *residue*.

Source: the lexer of lark 1.3.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llmppl.constraints.automata.budget import MAX_KEPT, MAX_SCANS, TooLarge
from llmppl.constraints.automata.nfa import DEAD
from llmppl.constraints.lark.terminals import Assumptions, Automata, Terminal, Undecided
from llmppl.support.arguments import shown
from llmppl.support.graphs import Memo, Numbering, reached
from llmppl.support.locks import cached_property

States = frozenset[int]
Bools = npt.NDArray[np.bool_]
Keywords = tuple[tuple[str, tuple[str, ...]], ...]      # terminals, and the keywords split off each, in order

LAYOUT_CUTS = 9, 10, 11, 32, 33                         # around tab, line end and blank


class Residue(NamedTuple):
    """What an ended token leaves: NFA states that must never accept, sets of which one must, trackers' states."""

    forbidden: States
    required: frozenset[States]
    trackers: tuple[int, ...]


class PartialToken(NamedTuple):
    """The current token under one hypothesis: `threads` in order, and those of keywords that its text may still be.

    `keywords` says which are split off which threads' terminals; of the lexer nothing else matters by then.
    """

    keywords: Keywords
    threads: tuple[int, ...]
    keyword_threads: States
    residue: Residue
    column: int


class Ended(NamedTuple):
    """A token that may end here: the symbol for the parser (None if ignored), and the residue (a number)."""

    symbol: str | tuple[str, int] | None
    residue: int

    @property
    def terminal(self) -> str | None:
        """The symbol without the column that a line end has."""
        return self.symbol[0] if isinstance(self.symbol, tuple) else self.symbol


Outcome = tuple[tuple[int, ...], tuple[Ended, ...]]     # partial tokens with which it goes on; ways in which it ends


class PartialTokens:
    """All partial tokens of a grammar, numbered as they are met, and what a byte makes of each.

    Attributes
    ----------
    tokens, residues : lists by number; `token_number` and `residue_number` number new ones
    starts : (lexer, residue) -> the partial tokens that begin after it
        They are several if look-aheads at their beginning are yet to be decided.
    classes : partial token -> one byte of each class of bytes that it does not tell apart
    rows : partial token -> what these bytes make of it, None where that is not known yet
    heads : residue -> (256,) bool, False at bytes with which no token can begin after it, whatever the lexer
    """

    def __init__(
        self, terminals: Sequence[Terminal], ignored: frozenset[str], lexers: Sequence[Sequence[str]], indenter: Any
    ) -> None:
        automata = self.automata = Automata(terminals)
        self.lexers, self.ignored = lexers, ignored
        self.newline = indenter.NL_type if indenter else None
        self.widths = {32: 1, 9: indenter.tab_len} if indenter else {}
        self.terminals = {terminal.name: terminal for terminal in terminals}
        self._size = 0                                  # of all that is kept, in states of terminals
        self.token_number: Numbering[PartialToken] = Numbering(check=self._keep_token)
        self.residue_number: Numbering[Residue] = Numbering(check=self._keep_residue)
        self.tokens, self.residues = self.token_number.met, self.residue_number.met
        self.starts = Memo(self._begin)
        self.classes = Memo(self._find_classes)
        self.heads = Memo(self._find_heads)
        self.rows: Memo[int, list[Outcome | None]] = Memo(lambda number: [None] * len(self.classes[number]))
        self._outcomes: dict[Outcome, Outcome] = {}     # equal ones are one object
        self._alternatives = Memo(self._order)          # by lexer
        self._settled = Memo(self._settle_after_byte)
        self._tracker_cuts = Memo(self._find_tracker_cuts)
        trackers = tuple([int(tracker.start) for tracker in automata.trackers])
        self.first = self.residue_number[Residue(frozenset(), frozenset(), trackers)]

    def begin_behind(self, lexer: int, trackers: tuple[int, ...]) -> tuple[int, ...]:
        """The partial tokens that begin behind a text of which only its trackers' states matter."""
        return self.starts[lexer, self.residue_number[Residue(frozenset(), frozenset(), trackers)]]

    def step(self, number: int, byte: int) -> Outcome:
        """What `byte` makes of a partial token: those with which it goes on, and how it may end behind the byte."""
        i = bisect_right(self.classes[number], byte) - 1
        row = self.rows[number]
        outcome = row[i]
        if outcome is None:
            outcome = row[i] = self.one(self._read(self.tokens[number], byte))
        return outcome

    def one(self, outcome: Outcome) -> Outcome:
        """The one object of all equal outcomes."""
        return self._outcomes.setdefault(outcome, outcome)

    def step_all(self, numbers: Collection[int], byte: int) -> Outcome:
        """The same for several that may be under way."""
        if len(numbers) == 1:
            (number,) = numbers
            return self.step(number, byte)
        going_on, ends = zip(((), ()), *[self.step(number, byte) for number in numbers], strict=True)
        return tuple(sorted(set().union(*going_on))), tuple(dict.fromkeys(itertools.chain.from_iterable(ends)))

    # ---- limits

    def _keep_residue(self, residue: Residue) -> None:
        self._keep(len(residue.forbidden) + sum(map(len, residue.required)), ())

    def _keep_token(self, token: PartialToken) -> None:
        self._keep(len(token.threads) + len(token.keyword_threads), token.threads)

    def _keep(self, size: int, threads: Sequence[int]) -> None:
        """Count what is kept; ValueError, with the terminal that asks for most, if it is too much."""
        self._size += size
        if self._size > MAX_KEPT or len(self.tokens) >= MAX_SCANS:
            some = [q for token in self.tokens[-1000:] for q in token.threads] or threads
            name, _ = Counter(map(self.automata.names.__getitem__, some)).most_common(1)[0]
            raise TooLarge(
                f"terminal {name} {shown(self.terminals[name].pattern)}",
                f"{len(self.tokens):,} states of the lexer so far, with {self._size:,} of its terminals in them",
                "smaller counted repeats, none of them behind what may begin anywhere, as in (.*a.{20}), would work",
            )

    # ---- beginnings

    def _order(self, lexer: int) -> tuple[list[int], Keywords]:
        """The entries of a lexer's alternatives in lark's order, and the keywords split off them."""
        names = set(self.lexers[lexer])
        terminals = [self.terminals[name] for name in self.lexers[lexer]]
        entries = [self.automata.starts[t.name] for t in terminals if names.isdisjoint(t.embedded)]
        keywords = tuple([(t.name, t.keywords) for t in terminals])
        return [q for q in entries if q != DEAD], _restricted(keywords, names, names)

    def _begin(self, key: tuple[int, int]) -> tuple[int, ...]:
        lexer, residue = key
        entries, keywords = self._alternatives[lexer]
        threads = frozenset(self.automata.starts[name] for _, names in keywords for name in names)
        tokens, ended = self._settle(PartialToken(keywords, tuple(entries), threads, self.residues[residue], -1))
        assert not ended, "lark refuses terminals that match the empty text"
        return tokens

    def _find_heads(self, residue: int) -> Bools:
        cuts = self._cuts_of((), self.residues[residue])
        possible = [self._survives(self._after(self.residues[residue], byte)) for byte in cuts]
        heads: Bools = self._firsts & np.repeat(possible, np.diff([*cuts, 256]))
        return heads

    @cached_property
    def _firsts(self) -> Bools:
        """(256,) bool: the bytes with which terminals begin; guards are not looked at."""
        firsts, automata = np.zeros(256, bool), self.automata
        entries = set(automata.starts.values()) - {DEAD}
        for lo, hi, _ in automata.edges_of(reached(entries, automata.epsilon.__getitem__)):
            firsts[lo : hi + 1] = True
        return firsts

    def _survives(self, residue: Residue) -> bool:
        """Whether nothing forbidden accepts yet, and nothing required is out of reach, as far as is easily seen."""
        try:
            states = self.automata.closure(residue.forbidden, residue.trackers, Assumptions())
        except Undecided:
            return True
        return self.automata.ends.keys().isdisjoint(states) and frozenset() not in residue.required

    # ---- bytes

    def _find_classes(self, number: int) -> list[int]:
        token = self.tokens[number]
        return self._cuts_of({*token.threads, *token.keyword_threads}, token.residue)

    def _cuts_of(self, states: Iterable[int], residue: Residue) -> list[int]:
        """The first byte of each class of bytes that NFA states and a residue do not tell apart."""
        cuts = {0, *(LAYOUT_CUTS if self.newline else ())}
        for lo, hi, _ in self.automata.edges_of(residue.forbidden.union(states, *residue.required)):
            cuts.add(lo)
            cuts.add(hi + 1)
        cuts.update(*map(self._tracker_cuts.__getitem__, enumerate(residue.trackers)))
        cuts.discard(256)
        return sorted(cuts)

    def _find_tracker_cuts(self, key: tuple[int, int]) -> list[int]:
        tracker, state = key
        row = self.automata.trackers[tracker].row(state) if state else np.zeros(256)
        cuts: list[int] = (np.flatnonzero(np.diff(row)) + 1).tolist()
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
            PartialToken(keywords, tuple(threads), keyword_threads, self._after(token.residue, byte), column)
        ]

    def _keywords_left(self, keywords: Keywords, threads: Iterable[int], keyword_threads: Collection[int]) -> Keywords:
        """Of keywords, those under way in `keyword_threads` that are split off terminals under way in `threads`."""
        if not keyword_threads:
            return ()
        return _restricted(keywords, self.automata.names_of(threads), self.automata.names_of(keyword_threads))

    def _after(self, residue: Residue, byte: int) -> Residue:
        """What a residue becomes by one more byte, its epsilon edges not yet followed."""
        read = self.automata.read
        return Residue(
            frozenset(read(residue.forbidden, byte)),
            frozenset([frozenset(read(states, byte)) for states in residue.required]),
            self.automata.track(residue.trackers, byte),
        )

    def _settle_after_byte(self, token: PartialToken) -> Outcome:
        threads = len(token.threads) + len(token.keyword_threads)
        self._keep(threads + len(token.residue.forbidden), token.threads)
        return self._settle(token)

    def _settle(self, token: PartialToken) -> Outcome:
        """Follow the epsilon edges of all threads, under every assumption about the look-aheads that are met."""
        going_on: dict[int, None] = {}
        ended: dict[Ended, None] = {}
        todo = [Assumptions()]
        while todo:
            ahead = todo.pop()
            try:
                self._assume(ahead, token, going_on, ended)
            except Undecided as undecided:
                todo += [Assumptions({**ahead, undecided.args[0]: holds}) for holds in (False, True)]
        return tuple(going_on), tuple(ended)

    def _assume(
        self, ahead: Assumptions, token: PartialToken, going_on: dict[int, None], ended: dict[Ended, None]
    ) -> None:
        residue = self._assumed(ahead, token.residue)
        if residue is None:
            return
        ends, names = self.automata.ends, self.automata.names
        closure = functools.partial(self.automata.closure, trackers=residue.trackers, ahead=ahead)
        before, matched = [], None                      # threads preferred to the match; the terminal matched
        for q in closure(token.threads):
            if q in ends:
                matched = ends[q]
                break
            if q not in residue.forbidden:
                before.append(q)
        spelled, keywords = closure(token.keyword_threads), dict(token.keywords)
        if before:
            hosts = self.automata.names_of(before)
            possible = set[str]().union(*[keywords.get(host, ()) for host in hosts])
            left = frozenset([q for q in spelled if q not in ends and names[q] in possible])
            column = token.column if self.newline in hosts else -1
            new = PartialToken(self._keywords_left(token.keywords, before, left), tuple(before), left, residue, column)
            going_on[self.token_number[new]] = None
        if matched:
            whole = {ends[q] for q in spelled if q in ends}
            name = next(filter(whole.__contains__, keywords.get(matched, ())), matched)
            symbol = None if matched in self.ignored else (name, token.column) if name == self.newline else name
            behind = residue._replace(forbidden=residue.forbidden.union(before))
            ended[Ended(symbol, self.residue_number[behind])] = None

    def _assumed(self, ahead: Assumptions, residue: Residue) -> Residue | None:
        """A residue with its epsilon edges followed, or None if an assumption is already wrong."""
        ends, trackers = self.automata.ends, residue.trackers
        denied = [entry for entry, holds in ahead.items() if not holds]
        forbidden = frozenset(self.automata.closure([*residue.forbidden, *denied], trackers, ahead))
        if not ends.keys().isdisjoint(forbidden):
            return None
        wanted = [*residue.required, *({entry} for entry, holds in ahead.items() if holds)]
        sets = [self.automata.closure(states, trackers, ahead) for states in wanted]
        required = frozenset([frozenset(states) - forbidden for states in sets if ends.keys().isdisjoint(states)])
        return None if frozenset() in required else Residue(forbidden, required, trackers)


def _restricted(keywords: Keywords, hosts: set[str], names: set[str]) -> Keywords:
    """Of keywords, those that are among `names` and split off `hosts`."""
    pairs = [(host, tuple(filter(names.__contains__, each))) for host, each in keywords if host in hosts]
    return tuple([pair for pair in pairs if pair[1]])
