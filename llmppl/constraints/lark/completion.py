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
from collections.abc import Iterable

from llmppl.constraints.lark.lexer import Ended, PartialTokens
from llmppl.constraints.lark.parser import IGNORED, Parser, Stack, union
from llmppl.support.graphs import Memo

MAX_EXPLORED = 1_000                                # partial tokens read to find an end


class Completion:
    """Decide whether hypotheses may go on.

    Attributes
    ----------
    ends : partial token -> bits of the terminals that it may become
    next : (lexer, obligation) -> bits of the terminals that may begin after the obligation
    sure : Ended -> True if the parser's taking of the terminal proves that the text may go on
    """

    def __init__(self, parser: Parser, partials: PartialTokens, lexer_of: dict[int, int]) -> None:
        self.parser = parser
        self.partials = partials
        self.lexer_of = lexer_of
        self.ends = Memo(self._find_ends)
        self.next = Memo(self._find_next)
        self.sure = Memo(self._is_sure)
        self.newline = parser.bits[partials.newline] if partials.newline else 0
        self._every = [self._bits(lexer) for lexer in partials.lexers]

    def _bits(self, names: Iterable[str]) -> int:
        ignored = self.partials.ignored
        return union(IGNORED if name in ignored else self.parser.bits.get(name, 0) for name in names)

    def _find_ends(self, number: int) -> int:
        token = self.partials.tokens[number]
        names_of = self.partials.automata.names_of
        names = names_of(token.threads) | names_of(token.keyword_threads)
        return self._bits(names)

    def _find_next(self, place: tuple[int, int]) -> int:
        lexer, obligation = place
        partials = self.partials
        heads = partials.heads[obligation]
        names = set(partials.lexers[lexer])
        if partials.automata.guards:                    # which may exclude terminals here
            tokens = map(partials.tokens.__getitem__, partials.starts[place])
            names &= set().union(*(partials.automata.names_of((*t.threads, *t.keyword_threads)) for t in tokens))
        return self._bits(name for name in names if (partials.firsts[name] & heads).any())

    def _is_free(self, lexer: int, obligation: int) -> bool:
        """Check that an obligation excludes no terminal, or no ignored text, after which it is over."""
        found = self.next[lexer, obligation]
        return bool(found & IGNORED) or found == self._every[lexer]

    def _is_sure(self, end: Ended) -> bool:
        is_line_end = isinstance(end.symbol, tuple)
        lexers = range(len(self._every))
        return not is_line_end and all(self._is_free(lexer, end.obligation) for lexer in lexers)

    def completable(self, stack: Stack, token: int) -> bool:
        """Check whether the parser takes a terminal that a partial token may become."""
        found = self.parser.admitted(stack, self.ends[token])
        return bool(found & ~self.newline) or (bool(found) and self._line_fits(stack, token))

    def _line_fits(self, stack: Stack, number: int) -> bool:
        token = self.partials.tokens[number]
        return self.parser.line_fits(stack, 0 if self.partials.reads_line_end[number] else max(token.column, 0))

    def starts(self, stack: Stack, obligation: int) -> tuple[int, ...]:
        """Return the partial tokens that begin after a token that led to a stack and left an obligation."""
        return self.partials.starts[self.lexer_of[stack.state], obligation]

    def may_go_on(self, stack: Stack, obligation: int) -> bool:
        """Check whether a token may follow the one that led to a stack and left an obligation."""
        lexer = self.lexer_of[stack.state]
        if self._is_free(lexer, obligation):
            return True
        found = self.parser.admitted(stack, self.next[lexer, obligation])
        return bool(found & ~self.newline) or (bool(found) and self.parser.line_fits(stack, 0))

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
        found = set()
        begun = self.parser.bottom, self.partials.first
        todo = [(0, 0, *begun)]
        seen = {begun}
        while todo:
            _, _, stack, obligation = heapq.heappop(todo)
            if self.may_end(stack, obligation):
                return None
            for ends in self.partials.exits(self.starts(stack, obligation)):
                left -= 1
                if not left:
                    return None
                for end in ends:
                    for place in self.parser.after(stack, [end]):
                        found |= {end.terminal} if end.terminal and not self.may_follow(*place) else set()
                        if place not in seen:
                            seen.add(place)
                            heapq.heappush(todo, (place[0].height, next(order), *place))
        return found
