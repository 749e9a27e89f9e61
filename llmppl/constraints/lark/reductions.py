"""Reductions that a text may lead to: a table of the parser's runs over (state, symbol, obligation).

The parser is a pushdown automaton over finitely many lookaheads, which are pairs of a terminal and the obligation
after it (`lexer.py`). An *entry* is a state on top of the stack with a lookahead. Its *exits* are the
reductions that remove the state, with the number of states they still pop and the lookahead then. Both are finitely
many. The states below the top are read only when an exit reaches them.

Source: Reps, Horwitz & Sagiv (1995) for the tabulation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from llmppl.constraints.automata.budget import MAX_SCANS, MAX_SEARCHED, TooLarge
from llmppl.constraints.lark.lalr import Parser, Stack
from llmppl.constraints.lark.lalr_tables import END, united
from llmppl.constraints.lark.lexer import Ended, PartialTokens
from llmppl.support.graphs import Memo, Numbering, reachable

Lookahead = tuple[str, int]                         # a terminal, and the obligation after it
Entry = tuple[int, str, int]                        # a parser state on top of a stack, and a Lookahead
Exit = tuple[int, str, str, int]                    # states still to pop, the rule then pushed, and a Lookahead

TEXT_END: Lookahead = (END, -1)


class ReductionTable:
    """Decide whether some text that begins with given lookaheads completes a stack.

    `lookaheads[lexer, obligation]` are those that the parser may meet after an obligation: terminals after any ignored
    text, and the end. Where `completable(lexer, obligation)` is True, all stacks that read on so are completable, and
    are not followed.
    """

    def __init__(
        self,
        parser: Parser,
        partials: PartialTokens,
        lexer_of: dict[int, int],
        completable: Callable[[int, int], bool],
    ) -> None:
        self.parser, self.partials, self.lexer_of, self._completable = parser, partials, lexer_of, completable
        self.lookaheads = Memo(self._find_lookaheads)
        self._ends: dict[int, frozenset[Ended]] = {}
        self._too_many: dict[int, int] = {}             # partial token -> a number of others that does not suffice
        self._left = MAX_SEARCHED                       # runs of the parser that a question may still take
        self._forget()

    def _forget(self) -> None:
        self._exits: dict[Entry, dict[Exit, None]] = {}
        self._users: dict[Entry, dict[Entry, None]] = {}
        self._accepting: set[Entry] = set()
        self._todo: list[tuple[Callable[..., None], Any]] = []
        self._whole = True                              # False while these are incomplete

    def ends(self, token: int) -> frozenset[Ended]:
        """Return all the ways in which a partial token may end, sooner or later."""
        found = self.ends_if_few(token, MAX_SCANS)
        assert found is not None
        return found

    def ends_if_few(self, token: int, most: int) -> frozenset[Ended] | None:
        """Return the same, or None if the token may go through more than `most` others before it ends."""
        if token not in self._ends and self._too_many.get(token, 0) < most:
            self._find_ends(token, most)
        return self._ends.get(token)

    def _find_ends(self, token: int, most: int) -> None:
        tokens = Numbering([token])
        ends, edges = [], []
        for each in tokens.keys_in_order:                         # grows
            if len(tokens) > most:
                self._too_many.update(dict.fromkeys(tokens, most))  # so that none of them is explored as far again
                return
            bytes = () if each in self._ends else self.partials.classes[each]
            going_on, ended = zip(((), ()), *[self.partials.step(each, byte) for byte in bytes], strict=True)
            ends.append(self._ends.get(each, frozenset()).union(*ended))
            edges.append(list(map(tokens.__getitem__, itertools.chain.from_iterable(going_on))))
        self._ends.update(zip(tokens.keys_in_order, united(ends, edges), strict=True))

    def _find_lookaheads(self, key: tuple[int, int]) -> frozenset[Lookahead]:
        lexer, obligation = key
        ends: Memo[int, set[Ended]] = Memo(lambda left: set().union(*map(self.ends, self.partials.starts[lexer, left])))
        left = list(reachable([obligation], lambda left: [end.obligation for end in ends[left] if end.symbol is None]))
        found = {(str(symbol), after) for each in left for symbol, after in ends[each] if symbol is not None}
        over = not all(self.partials.obligations[each].required for each in left)
        return frozenset(found).union([TEXT_END] * over)

    def possible(self, stack: Stack, lookaheads: set[Lookahead]) -> bool:
        """Check whether some text that begins with one of `lookaheads` completes a stack."""
        if lookaheads:
            self.parser.lowest = 0
        self._left = MAX_SEARCHED
        starts = [(stack.below, (stack.state, *lookahead)) for lookahead in lookaheads]
        return any(self._accepts(entry) for _, entry in reachable(starts, self._leading_to))

    def _leading_to(self, item: tuple[Stack | None, Entry]) -> Iterator[tuple[Stack | None, Entry]]:
        below, entry = item
        for size, name, symbol, obligation in self._exits[entry]:
            base = below and below.pop(size)
            assert base is not None
            yield base, (self.parser.shifts[base.state][name], symbol, obligation)

    def _accepts(self, entry: Entry) -> bool:
        """Check whether some text is accepted from an entry on without reading the states below it."""
        if entry[:2] == (self.parser.end_state, END):
            return True
        if not self._whole:                             # after an interrupt
            self._forget()
        self._whole = False
        self._open(entry)
        while self._todo and entry not in self._accepting:  # the rest is left for later questions
            self._left -= 1
            if self._left < 0:
                raise TooLarge("the search for a text that goes on", f"more than {MAX_SEARCHED:,} runs of the parser")
            work, arguments = self._todo.pop()
            work(*arguments)
        self._whole = True
        return entry in self._accepting

    def _open(self, entry: Entry) -> None:
        if entry not in self._exits:
            self._exits[entry], self._users[entry] = {}, {}
            self._todo.append((self._enter, entry))

    def _enter(self, state: int, symbol: str, obligation: int) -> None:
        """Shift the symbol of an entry, or reduce before it."""
        entry = state, symbol, obligation
        target = self.parser.shifts[state].get(symbol)
        if target is not None:
            lexer = self.lexer_of[target]
            if self._completable(lexer, obligation):
                self._accept(entry)
                return
            for lookahead in self.lookaheads[lexer, obligation]:
                self._call(entry, (target, *lookahead))
        elif reduction := self.parser.reduction(state, symbol):
            self._pop(entry, (*reduction, symbol, obligation))

    def _call(self, user: Entry, called: Entry) -> None:
        """Continue with an entry on top of another one, to which its exits return."""
        self._open(called)
        if user not in self._users[called]:
            self._users[called][user] = None
            self._todo += [(self._pop, (user, found)) for found in self._exits[called]]
            if called in self._accepting:
                self._accept(user)

    def _pop(self, entry: Entry, found: Exit) -> None:
        """Pop an entry's state for a reduction, or push the rule if nothing is left to pop."""
        size, name, symbol, obligation = found
        if size:
            self._leave(entry, (size - 1, name, symbol, obligation))
            return
        target = self.parser.shifts[entry[0]][name]
        if target == self.parser.end_state and symbol == END:
            self._accept(entry)
        else:
            self._call(entry, (target, symbol, obligation))

    def _leave(self, entry: Entry, found: Exit) -> None:
        if found not in self._exits[entry]:
            self._exits[entry][found] = None
            self._todo += [(self._pop, (user, found)) for user in self._users[entry]]

    def _accept(self, entry: Entry) -> None:
        users = reachable([entry], lambda each: () if each in self._accepting else self._users[each])
        self._accepting.update(list(users))
