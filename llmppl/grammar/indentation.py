"""Indented text: what lark's `Indenter` makes of the tokens that the parser gets.

The lexer gives the token that ends a line with the column at which the next line begins, (name, column). The parser
gets it followed by an INDENT, or by a DEDENT for each block that the column closes; within brackets it gets nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmppl.grammar.lalr import Layout, Parser, Stack, Symbol
from llmppl.grammar.lalr_tables import Tables


class IndentedParser(Parser):
    """A parser behind an indenter, whose stacks have a layout."""

    layout = Layout(0, (0,))

    def __init__(self, tables: Tables, indenter: Any) -> None:
        super().__init__(tables)
        self.indenter = indenter
        self._opened = dict.fromkeys(indenter.CLOSE_PAREN_types, -1) | dict.fromkeys(indenter.OPEN_PAREN_types, 1)

    def feed(self, stack: Stack, symbol: Symbol | None) -> Stack | None:
        return stack if symbol is None else self.recall(stack.fed, symbol, stack, self._feed)

    def feed_one(self, stack: Stack, tokens: Sequence[str], at: int) -> Stack | None:
        token, after = tokens[at], tokens[at + 1 :]
        if token in (self.indenter.INDENT_type, self.indenter.DEDENT_type):
            return stack                                # the end of the line before has made it
        if token != self.indenter.NL_type:
            return self.feed(stack, token)
        columns = _layout(stack).columns
        if after[:1] == (self.indenter.INDENT_type,):
            return self.feed(stack, (token, columns[-1] + 1))
        closed = next((n for n, other in enumerate(after) if other != self.indenter.DEDENT_type), 0)
        return self.feed(stack, (token, columns[-1 - closed])) if closed < len(columns) else None

    def _feed(self, stack: Stack, symbol: Symbol) -> Stack | None:
        layout = _layout(stack)
        if isinstance(symbol, tuple):
            return stack if layout.brackets else self._feed_line_end(stack, layout.columns, *symbol)
        brackets = layout.brackets + self._opened.get(symbol, 0)
        top = self._shift(stack, symbol)
        return _on_top(top, Layout(brackets, layout.columns)) if brackets >= 0 else None

    def _feed_line_end(self, stack: Stack, columns: tuple[int, ...], name: str, column: int) -> Stack | None:
        if column > columns[-1]:
            return _on_top(self._shift(stack, name, self.indenter.INDENT_type), Layout(0, (*columns, column)))
        if column not in columns:                       # -1, too: a line end without '\n', on which lark fails
            return None
        left = columns[: columns.index(column) + 1]
        closed = [self.indenter.DEDENT_type] * (len(columns) - len(left))
        return _on_top(self._shift(stack, name, *closed), Layout(0, left))

    def _outdented(self, stack: Stack) -> Stack | None:
        return self._shift(stack, *[self.indenter.DEDENT_type] * (len(_layout(stack).columns) - 1))

    def _shift(self, stack: Stack, *symbols: str) -> Stack | None:
        """The stack after some tokens, its layout as it was."""
        for symbol in symbols:
            top = self._reduce(stack, symbol)
            assert top is not None
            state = self.shifts[top.state].get(symbol)
            if state is None:
                return None
            stack = top.push(state, top.layout)
        return stack


def _layout(stack: Stack) -> Layout:
    assert stack.layout is not None
    return stack.layout


def _on_top(stack: Stack | None, layout: Layout) -> Stack | None:
    """The stack with another layout on top."""
    return stack and stack.below and stack.below.push(stack.state, layout)
