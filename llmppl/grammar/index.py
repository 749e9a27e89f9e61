"""The index of a grammar: masks made by reading the vocabulary apart from the parser."""

from __future__ import annotations

from typing import Any

from llmppl.arguments import count
from llmppl.masks.constraint import State
from llmppl.masks.index import TokenIndex
from llmppl.masks.packed import PackedMask

__all__ = ["GrammarIndex", "IndentedIndex"]


class IndentedIndex(TokenIndex):
    """The index of a grammar with a postlex: every mask is a walk."""

    def build_all(self, max_states: int = 1_000_000) -> Any:
        """The vocabulary read from every place where the lexer may stand (Sec. 4.2), with `len` and `nbytes`.

        Masks then only take runs of the parser, whose results are kept by the states on top of its stack.

        Raises
        ------
        ValueError
            If there are more than `max_states` places; if the grammar has a postlex.
        """
        return self.recognizer.read_all(self.trie, count("max_states", max_states))


class GrammarIndex(IndentedIndex):
    """The index of any other grammar: the parser is asked once for all tokens that a mask cannot tell apart."""

    def _work_out(self, state: State, accepts: bool) -> PackedMask:
        return self.store.of_bits(self.recognizer.token_mask(state, self.trie), accepts)

    def _read_token(self, state: State, data: bytes) -> State | None:
        return self.recognizer.token_step(state, data)
