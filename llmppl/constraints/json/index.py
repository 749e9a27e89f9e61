"""Masks of the texts of a JSON schema, and distances to their end.

A distance is the least number of tokens to the end along *closing* moves: they complete the value that is read and add
what its schema still needs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from llmppl.constraints.constraint import Ints, State, VocabularyLike
from llmppl.constraints.json.effects import effects_of
from llmppl.constraints.json.texts import Config, Texts
from llmppl.constraints.masks.distances import SearchDistances
from llmppl.constraints.masks.index import TokenIndex
from llmppl.constraints.masks.mask_store import PackedMask
from llmppl.constraints.vocabulary.trie_walk import MemoGraph, walk_state

__all__ = ["JsonIndex"]


class ConfigGraph(MemoGraph):
    """Graph of configurations; a row is computed at once."""

    room, has_zero, is_closing = 1 << 15, True, False

    def row(self, number: int) -> npt.NDArray[np.int32]:
        """Return the numbers of the next states, (256,) int32."""
        if self.table.item(number, 0) < 0:
            found = self.recognizer.moves(self.states[number], self.is_closing)
            moves = [(lo, hi, self.number(state)) for lo, hi, state in found]
            row = np.zeros(256, np.int32)           # after numbering, which may replace the table
            for lo, hi, after in moves:
                row[lo : hi + 1] = after
            self.table[number] = row
        found_row: npt.NDArray[np.int32] = self.table[number]
        return found_row

    def fill(self, number: int, bytes: Ints, /) -> None:
        self.row(number)

    def checked(self, state: State) -> State:
        if not isinstance(state, Config):
            raise ValueError(f"{state!r} is not a state of this index")
        return state

    def next_bytes(self, state: State) -> bytes:
        return bytes(byte for lo, hi, _ in self.recognizer.moves(state) for byte in range(lo, hi + 1))


class ClosingGraph(ConfigGraph):
    """Graph of closing moves."""

    is_closing = True


class JsonIndex(TokenIndex):
    """Index of a JSON schema over a vocabulary."""

    def __init__(self, constraint: Any, texts: Texts, vocab: VocabularyLike) -> None:
        self.constraint = constraint
        super().__init__(texts, vocab)

    def __reduce__(self) -> Any:
        return _index_of, (self.constraint, self.vocab)

    @property
    def name(self) -> str:
        return repr(self.constraint)

    def _begin(self) -> None:
        self._effects, self._own = effects_of(self.trie), dict[Any, Any]()      # own: those of the frames of the schema
        self._distances = _Closing(self)
        self.graph = ConfigGraph(self.recognizer)

    def _work_out(self, state: Config, accepts: bool) -> PackedMask:
        mask = self._effects.mask(state, self.recognizer.starts, self._own)
        some = [token for token in self._effects.with_names if mask[token]]
        mask[[token for token in some if self._read_token(state, self.trie.tokens[token]) is None]] = False
        return self.store.of_mask(mask, accepts)

    def walk(self, state: Config) -> tuple[npt.NDArray[np.int32], Ints]:
        ids, ends = super().walk(state)
        if self._effects.with_names:                # their names may be one
            fits = self.mask(state)[ids]
            ids, ends = ids[fits], ends[fits]
        return ids, ends


def _index_of(constraint: Any, vocab: VocabularyLike) -> JsonIndex:
    index: JsonIndex = constraint.index(vocab)
    return index


class _Closing(SearchDistances):
    """Distances along closing moves. It is its own index."""

    def cost(self, state: Config) -> int:
        return 40 + 40 * len(state.items)

    def __init__(self, index: JsonIndex) -> None:
        super().__init__(index._lock)
        self.recognizer, self.trie, self.name = index.recognizer, index.trie, index.name
        self.graph: MemoGraph = ClosingGraph(self.recognizer)

    def walk(self, state: Config) -> tuple[Ints, Ints]:
        self.graph = self.graph.renewed(self.graph.room)
        return walk_state(self.graph, self.trie, self.graph.number(state))

    def of(self, index: Any, state: Config, most: float = math.inf) -> float:
        return super().of(self, state, most)
