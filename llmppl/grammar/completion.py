"""Completability: which hypotheses some text completes, the question behind every step of a grammar's recognizer.

A *hypothesis* is a parser stack and a partial token. Most questions are answered by witness spellings
(`llmppl.grammar.spellings`): where every terminal has a spelling that an ignored text separates from whatever comes
next, a stack that tokens complete (`llmppl.grammar.token_completions`) is completed by a text. What is left is decided
by the table of the parser's reductions (`llmppl.grammar.reductions`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from llmppl.grammar.lalr import Layout, Parser, Stack
from llmppl.grammar.lexer import Ended, PartialTokens
from llmppl.grammar.reductions import TEXT_END, Lookahead, ReductionTable
from llmppl.grammar.spellings import WitnessSpellings
from llmppl.grammar.terminals import Terminal
from llmppl.grammar.token_completions import TokenCompletions
from llmppl.growing import Memo, reached

MAX_EXPLORED = 1000                                 # partial tokens that are gone through to see how a token may end
MAX_SHORTEST = 16                                   # hypotheses that the shortest texts lead to, tried before all

Ends = frozenset[Ended]


class Completability:
    """Whether some text completes a hypothesis.

    `certificates[ends]` are the bits of which one, if `Parser.admitted`, proves that a text can be completed where a
    token may end so; and whether nothing else can prove it.
    """

    def __init__(
        self, parser: Parser, partials: PartialTokens, lexer_of: dict[int, int], terminals: Sequence[Terminal]
    ) -> None:
        self.parser, self.partials, self.lexer_of = parser, partials, lexer_of
        self.reductions = ReductionTable(parser, partials, lexer_of)
        after = parser.lexers_after(lexer_of)
        self.spellings = WitnessSpellings(partials, terminals, after)
        self.tokens = TokenCompletions(parser, self.spellings.missing)
        self.certificates = Memo(self._find_certificates)
        self._lexers_after: dict[str | None, set[int]] = {None: set(lexer_of.values())} | after

    def completable(self, stack: Stack, token: int) -> bool:
        """Whether some text completes a hypothesis."""
        if self.tokens.always:
            ends, are_all = self.possible_ends(token)
            certificates, exhaustive = self.certificates[ends]
            if self.parser.admitted(stack, certificates):
                return True
            if exhaustive and are_all:
                return False
        return self.parser.recall(stack.completable, token, stack, self._is_completable)

    def may_follow(self, stack: Stack, residue: int) -> bool:
        """Whether some text, or none, completes what led to a stack after a token that left a residue."""
        starts = self.starts(stack, residue)
        return self._ends_well(stack, residue) or any(self.completable(stack, token) for token in starts)

    def starts(self, stack: Stack, residue: int) -> tuple[int, ...]:
        """The partial tokens that begin after a token that led to a stack and left a residue."""
        return self.partials.starts[self.lexer_of[stack.state], residue]

    def possible_ends(self, token: int) -> tuple[Ends, bool]:
        """Ways in which a token may end, and whether these are all of them: not if it may be long under way."""
        ends = self.reductions.ends_if_few(token, MAX_EXPLORED)
        return (frozenset(self.spellings.shortest_ends[token, False]), False) if ends is None else (ends, True)

    def _find_certificates(self, ends: Ends) -> tuple[int, bool]:
        certain = [end for end in ends if self.tokens.always and self._always_spellable_after(end)]
        return sum({self.parser.bits[end.terminal] for end in certain}), len(certain) == len(ends)

    def _always_spellable_after(self, end: Ended) -> bool:
        return all(self.spellings.spellable_after[lexer, end.residue] for lexer in self._lexers_after[end.terminal])

    def surely_completable(self, stack: Stack, residue: int) -> bool:
        """Whether it is easily seen that a text can be completed after a token that led to a stack."""
        return self.spellings.spellable_after[self.lexer_of[stack.state], residue] and self.tokens.exist(stack)

    def _surely_after(self, stack: Stack, ends: Iterable[Ended]) -> bool:
        """The same after a token that may end so."""
        return any(self.surely_completable(*place) for place in self.parser.after(stack, ends))

    def may_end(self, stack: Stack, residue: int) -> bool:
        """Whether the text may be over after a token that led to a stack and left a residue."""
        return not self.partials.residues[residue].required and self.parser.complete(stack)

    def _ends_well(self, stack: Stack, residue: int) -> bool:
        return self.surely_completable(stack, residue) or self.may_end(stack, residue)

    def _is_completable(self, stack: Stack, token: int) -> bool:
        """Whether some text completes a hypothesis: the shortest texts of the next terminals may show it at once."""

        def ended(hypothesis: tuple[Stack, int]) -> Iterator[tuple[Stack, int]]:
            """Where the token of a hypothesis may have ended: stacks and residues."""
            below, token = hypothesis
            return self.parser.after(below, self.spellings.shortest_ends[token, False])

        def onward(hypothesis: tuple[Stack, int]) -> list[tuple[Stack, int]]:
            return [(top, start) for top, residue in ended(hypothesis) for start in self.starts(top, residue)]

        tried = itertools.islice(reached([(stack, token)], onward), MAX_SHORTEST)
        if any(self._ends_well(*place) for hypothesis in tried for place in ended(hypothesis)):
            return True
        return self._search_indented(stack, token, stack.layout) if stack.layout else self._search(stack, token)

    def _search(self, stack: Stack, token: int) -> bool:
        """The same, if it is not easily seen: one more token may make it so; in the end the parser's runs decide."""
        lookaheads: set[Lookahead] = set()
        for end in self.reductions.ends(token):
            top = self.parser.feed(stack, end.symbol)
            if top is None:
                continue
            after = self.reductions.lookaheads[self.lexer_of[top.state], end.residue]
            then = itertools.starmap(Ended, after - {TEXT_END})
            if self.surely_completable(top, end.residue) or self._surely_after(top, then):
                return True
            if TEXT_END in after and self.parser.complete(top):
                return True
            lookaheads |= after if end.symbol is None else {(str(end.symbol), end.residue)}
        return self.reductions.possible(stack, lookaheads)

    def _search_indented(self, stack: Stack, token: int, layout: Layout) -> bool:
        """The same for indented text, whose blocks are without number: a line end and any column that fits is tried."""
        if self._surely_after(stack, self.spellings.shortest_ends[token, True]):
            return True
        current = self.partials.tokens[token]
        if self.partials.automata.names_of(current.threads).isdisjoint({self.partials.newline, *self.partials.ignored}):
            return False
        columns = [*layout.columns, layout.columns[-1] + 1]
        lines = [b"\n" + b" " * column for column in columns]
        lines += [b" " * (column - max(current.column, 0)) for column in columns]
        tails = sorted(set(map(self.spellings.texts.tail, current.threads)))
        texts = [*lines, *map(b"".join, itertools.product(tails, lines))]
        return any(self._surely_after(stack, self.spellings.read((token,), text)[-1]) for text in texts)
