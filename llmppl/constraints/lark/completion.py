"""Completion: decide whether a text may go on from a hypothesis, by looking one token ahead.

A *hypothesis* is a parser stack and a partial token. It may go on if the parser takes one of the terminals that the
token may still become. After a token, the text must end there, or the parser must take a terminal that may begin with a
byte that the token's obligation allows.

The check never refuses a text that has a continuation. It may keep one that has none, a *dead end*: where terminals
touch each other, or a conflict of the grammar was resolved, some texts can neither end nor go on. Such a text is
refused some bytes later. Weights stay exact; the particle with this text dies.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator

from llmppl.constraints.lark.lexer import Ended, PartialTokens
from llmppl.constraints.lark.parser import IGNORED, Parser, Stack
from llmppl.support.graphs import Memo

MAX_EXPLORED = 1_000  # partial tokens read to find an end


class Completion:
    """Decide whether hypotheses may go on.

    Attributes
    ----------
    ends : partial token -> bits of the terminals that it may become
    next : (lexer, obligation) -> bits of the terminals that may begin after the obligation
    free : (lexer, obligation) -> True if the obligation excludes no terminal, or no ignored text
    """

    def __init__(self, parser: Parser, partials: PartialTokens, lexer_of: dict[int, int]) -> None:
        self.parser = parser
        self.partials = partials
        self.lexer_of = lexer_of
        self.ends = Memo(self._find_ends)
        self.next = Memo(self._find_next)
        self.free = Memo(self._is_free)
        self.newline = 0
        if partials.newline:
            self.newline = parser.bits[partials.newline]

    def _bits(self, names: Iterable[str]) -> int:
        found = 0
        for name in names:
            if name in self.partials.ignored:
                found |= IGNORED
            else:
                found |= self.parser.bits.get(name, 0)
        return found

    def _find_ends(self, number: int) -> int:
        return self._bits(self.partials.names_in(number))

    def _find_next(self, place: tuple[int, int]) -> int:
        lexer, obligation = place
        partials = self.partials
        heads = partials.heads[obligation]
        names = set(partials.lexers[lexer])
        if partials.automata.guards:  # which may exclude terminals here
            possible = set[str]()
            for token in partials.starts[place]:
                possible |= partials.names_in(token)
            names &= possible
        return self._bits(name for name in names if (partials.firsts[name] & heads).any())

    def _is_free(self, place: tuple[int, int]) -> bool:
        found = self.next[place]
        return bool(found & IGNORED) or found == self._bits(self.partials.lexers[place[0]])

    def completable(self, stack: Stack, token: int) -> bool:
        """Check whether the parser takes a terminal that a partial token may become."""
        found = self.parser.admitted(stack, self.ends[token])
        if found & ~self.newline:
            return True
        if not found:
            return False
        column = 0
        if not self.partials.reads_line_end[token]:
            column = max(self.partials.tokens[token].column, 0)
        return self.parser.line_fits(stack, column)

    def starts(self, stack: Stack, obligation: int) -> tuple[int, ...]:
        """Return the partial tokens that begin after a token that led to a stack and left an obligation."""
        return self.partials.starts[self.lexer_of[stack.state], obligation]

    def may_go_on(self, stack: Stack, obligation: int) -> bool:
        """Check whether a token may follow the one that led to a stack and left an obligation."""
        place = self.lexer_of[stack.state], obligation
        if self.free[place]:
            return True
        found = self.parser.admitted(stack, self.next[place])
        if found & ~self.newline:
            return True
        return bool(found) and self.parser.line_fits(stack, 0)

    def may_end(self, stack: Stack, obligation: int) -> bool:
        """Check whether the text may be over after a token that led to a stack and left an obligation."""
        return not self.partials.obligations[obligation].required and self.parser.complete(stack)

    def may_follow(self, stack: Stack, obligation: int) -> bool:
        """Check whether the text may end or go on after a token."""
        return self.may_go_on(stack, obligation) or self.may_end(stack, obligation)

    # ---- is there any text?

    def taking_all(self) -> set[str] | None:
        """Return None if some text may end, else the terminals after which nothing may follow.

        The search visits low stacks first. It is bounded, and None if it finds no proof.
        """
        order = itertools.count()
        left = MAX_EXPLORED
        found = set[str]()
        begun = self.parser.bottom, self.partials.first
        todo = [(0, 0, begun)]
        seen = {begun}
        while todo:
            _, _, (stack, obligation) = heapq.heappop(todo)
            if self.may_end(stack, obligation):
                return None
            for ends in self.partials.exits(self.starts(stack, obligation)):
                left -= 1
                if not left:
                    return None
                for place, terminal in self._after(stack, ends):
                    if terminal and not self.may_follow(*place):
                        found.add(terminal)
                    if place not in seen:
                        seen.add(place)
                        heapq.heappush(todo, (place[0].height, next(order), place))
        return found

    def _after(
        self, stack: Stack, ends: Iterable[Ended]
    ) -> Iterator[tuple[tuple[Stack, int], str | None]]:
        """Yield the stack and the obligation after each way in which a token may end, with its terminal."""
        for end in ends:
            for place in self.parser.after(stack, [end]):
                yield place, end.terminal
