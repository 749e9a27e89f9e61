"""Reductions that text may lead to: a table of the parser's runs over (state, symbol, residue).

The parser's stack, read from its top, is a pushdown automaton over the finitely many pairs of a terminal and what is
forbidden and required after it (its *residue*). An *entry* is a state on top of the stack and what the parser looks at.
Its *exits* are the reductions that remove it, with how many more states they pop and what is looked at then. Both are
finitely many. What is below the stack's top is read only when an exit gets there.

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
from llmppl.support.graphs import Memo, Numbering, reached

Lookahead = tuple[str, int]                         # a symbol that the parser looks at, and the residue behind it
Entry = tuple[int, str, int]                        # a parser state on top of a stack, and a Lookahead
Exit = tuple[int, str, str, int]                    # states still to pop, the rule then pushed, and a Lookahead

TEXT_END: Lookahead = (END, -1)


class ReductionTable:
    """Which stacks some text completes that goes on with given lookaheads.

    `lookaheads[lexer, residue]` are what the parser may be given after a residue: symbols behind any ignored text, and
    the end. `completable(lexer, residue)` may say that all stacks that read on so are completed: they are not followed.
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
        self._too_many: dict[int, int] = {}             # partial token -> how many are not enough to know its ends
        self._left = MAX_SEARCHED                       # runs of the parser that a question may take yet
        self._forget()

    def _forget(self) -> None:
        self._exits: dict[Entry, dict[Exit, None]] = {}
        self._users: dict[Entry, dict[Entry, None]] = {}
        self._accepting: set[Entry] = set()
        self._todo: list[tuple[Callable[..., None], Any]] = []
        self._whole = True                              # whether nothing of these is missing

    def ends(self, token: int) -> frozenset[Ended]:
        """All the ways in which a partial token may end, sooner or later."""
        found = self.ends_if_few(token, MAX_SCANS)
        assert found is not None
        return found

    def ends_if_few(self, token: int, most: int) -> frozenset[Ended] | None:
        """The same, or None if the token may go through more than `most` others before that."""
        if token not in self._ends and self._too_many.get(token, 0) < most:
            self._find_ends(token, most)
        return self._ends.get(token)

    def _find_ends(self, token: int, most: int) -> None:
        tokens = Numbering([token])
        ends, edges = [], []
        for each in tokens.met:                         # grows
            if len(tokens) > most:
                self._too_many.update(dict.fromkeys(tokens, most))  # or each of them would be gone through as far
                return
            bytes = () if each in self._ends else self.partials.classes[each]
            going_on, ended = zip(((), ()), *[self.partials.step(each, byte) for byte in bytes], strict=True)
            ends.append(self._ends.get(each, frozenset()).union(*ended))
            edges.append(list(map(tokens.__getitem__, itertools.chain.from_iterable(going_on))))
        self._ends.update(zip(tokens.met, united(ends, edges), strict=True))

    def _find_lookaheads(self, key: tuple[int, int]) -> frozenset[Lookahead]:
        lexer, residue = key
        ends: Memo[int, set[Ended]] = Memo(lambda left: set().union(*map(self.ends, self.partials.starts[lexer, left])))
        left = list(reached([residue], lambda left: [end.residue for end in ends[left] if end.symbol is None]))
        found = {(str(symbol), behind) for each in left for symbol, behind in ends[each] if symbol is not None}
        over = not all(self.partials.residues[each].required for each in left)
        return frozenset(found).union([TEXT_END] * over)

    def possible(self, stack: Stack, lookaheads: set[Lookahead]) -> bool:
        """Whether some text is accepted that goes on with one of `lookaheads`."""
        if lookaheads:
            self.parser.lowest = 0
        self._left = MAX_SEARCHED
        starts = [(stack.below, (stack.state, *lookahead)) for lookahead in lookaheads]
        return any(self._accepts(entry) for _, entry in reached(starts, self._leading_to))

    def _leading_to(self, item: tuple[Stack | None, Entry]) -> Iterator[tuple[Stack | None, Entry]]:
        below, entry = item
        for size, name, symbol, residue in self._exits[entry]:
            base = below and below.pop(size)
            assert base is not None
            yield base, (self.parser.shifts[base.state][name], symbol, residue)

    def _accepts(self, entry: Entry) -> bool:
        """Whether some text is accepted from an entry on without reading what is below it."""
        if entry[:2] == (self.parser.end_state, END):
            return True
        if not self._whole:                             # an interrupt has left it so
            self._forget()
        self._whole = False
        self._open(entry)
        while self._todo and entry not in self._accepting:  # what is left is done when it is asked for
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

    def _enter(self, state: int, symbol: str, residue: int) -> None:
        """Shift the symbol, or reduce before it."""
        entry = state, symbol, residue
        target = self.parser.shifts[state].get(symbol)
        if target is not None:
            lexer = self.lexer_of[target]
            if self._completable(lexer, residue):
                self._accept(entry)
                return
            for lookahead in self.lookaheads[lexer, residue]:
                self._call(entry, (target, *lookahead))
        elif reduction := self.parser.reduction(state, symbol):
            self._pop(entry, (*reduction, symbol, residue))

    def _call(self, user: Entry, called: Entry) -> None:
        """Go on in an entry on top of another one, which its exits then come back to."""
        self._open(called)
        if user not in self._users[called]:
            self._users[called][user] = None
            self._todo += [(self._pop, (user, found)) for found in self._exits[called]]
            if called in self._accepting:
                self._accept(user)

    def _pop(self, entry: Entry, found: Exit) -> None:
        """Pop an entry's state for a reduction, or push its rule if nothing is left to pop."""
        size, name, symbol, residue = found
        if size:
            self._leave(entry, (size - 1, name, symbol, residue))
            return
        target = self.parser.shifts[entry[0]][name]
        if target == self.parser.end_state and symbol == END:
            self._accept(entry)
        else:
            self._call(entry, (target, symbol, residue))

    def _leave(self, entry: Entry, found: Exit) -> None:
        if found not in self._exits[entry]:
            self._exits[entry][found] = None
            self._todo += [(self._pop, (user, found)) for user in self._users[entry]]

    def _accept(self, entry: Entry) -> None:
        users = reached([entry], lambda each: () if each in self._accepting else self._users[each])
        self._accepting.update(list(users))
