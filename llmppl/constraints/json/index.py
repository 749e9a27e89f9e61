"""Masks of the texts of a JSON schema, and distances to their end.

Configurations that no token can tell apart have one mask: `Texts.plain` maps them to one. It forgets the names that an
object has used, so a token that holds a whole name, at its start or after a comma, is read once more from the
configuration itself.

A distance is the least number of tokens to the end along *closing* moves: they complete the value that is read and add
what its schema still needs.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from llmppl.constraints.constraint import Ints, State, VocabularyLike
from llmppl.constraints.json.effects import effects_of
from llmppl.constraints.json.texts import Config, Texts
from llmppl.constraints.masks.distances import SearchDistances
from llmppl.constraints.masks.index import TokenIndex
from llmppl.constraints.masks.mask_store import PackedMask
from llmppl.constraints.masks.self_loops import Key, Loops, key_of
from llmppl.constraints.vocabulary.trie import Trie
from llmppl.constraints.vocabulary.trie_walk import MemoGraph, walk_state

__all__ = ["JsonIndex"]

NAME = re.compile(rb'(?:^|,)[ \t\n\r]*"(?:[^"\\]|\\.)*"', re.DOTALL)


class ConfigGraph(MemoGraph):
    """Graph of configurations; a row is computed at once."""

    room, has_zero = 1 << 15, True

    def __init__(self, texts: Texts, is_closing: bool = False) -> None:
        super().__init__(texts)
        self.texts = texts
        self._is_closing = is_closing
        self._keys: dict[Any, Key | None] = {}      # loops, by local state

    def row(self, number: int) -> npt.NDArray[np.int32]:
        """Return the numbers of the next states, (256,) int32."""
        if self.table.item(number, 0) < 0:
            found = self.texts.moves(self.states[number], self._is_closing)
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
        return bytes(byte for lo, hi, _ in self.texts.moves(state) for byte in range(lo, hi + 1))

    def loop(self, number: int) -> Key | None:
        """Return the self-loop key (`masks.self_loops.key_of`) of a state with one local state."""
        items = self.states[number].items
        if len(items) != 1:
            return None
        if items[0][0] not in self._keys:
            self._keys[items[0][0]] = key_of(self.row, number)
        return self._keys[items[0][0]]

    def renewed(self, room: float) -> ConfigGraph:
        return self if len(self.states) <= room else ConfigGraph(self.texts, self._is_closing)


class JsonIndex(TokenIndex):
    """Index of a JSON schema over a vocabulary."""

    graph: ConfigGraph
    _loops: Loops

    def __init__(self, constraint: Any, texts: Texts, vocab: VocabularyLike) -> None:
        self.constraint = constraint
        super().__init__(texts, vocab)

    def __reduce__(self) -> Any:
        return _index_of, (self.constraint, self.vocab)

    @property
    def name(self) -> str:
        return repr(self.constraint)

    def _begin(self) -> None:
        self.reach = len(self.trie.levels) + 1          # more than the longest token has bytes
        self._with_names = _with_names(self.trie)
        self._plain: dict[Config, PackedMask] = {}      # masks that may hold tokens with repeated names
        self._distances = _Closing(self)
        self._effects, self._own = effects_of(self.trie), dict[Any, Any]()      # own: those of the frames of the schema
        self.graph = ConfigGraph(self.recognizer)
        self._loops = Loops(self.graph, self.trie)

    def plain(self, state: Config) -> Config:
        """Return a state with the same mask, as far as names do not repeat."""
        plain: Config = self.recognizer.plain(state, self.reach)
        return plain

    def _renew(self) -> None:
        if len(self.graph.states) > self.graph.room:
            self.graph = ConfigGraph(self.recognizer)
            self._loops = Loops(self.graph, self.trie)

    def _work_out(self, state: Config, accepts: bool) -> PackedMask:
        plain = self.plain(state)
        found = self._plain.get(plain)
        if found is None:
            mask = self._effects.mask(plain, self.recognizer.starts, self._own)
            if mask is None:
                self._renew()
                graph, number = self.graph, self.graph.number(plain)
                mask = self._loops.mask(number, lambda other: self.mask(graph.state(other)))
                if mask is None:
                    mask = np.zeros(len(self.trie.tokens), bool)
                    mask[walk_state(graph, self.trie, number)[0]] = True
            found = self.store.of_mask(mask, accepts)
            if len(self._plain) > self.graph.room:
                self._plain.clear()
            self._plain[plain] = found
        return self._without_repeats(state, found) if self._with_names else found

    def _without_repeats(self, state: Config, found: PackedMask) -> PackedMask:
        """Return the mask without tokens that hold a whole name which the object already has."""
        mask = self.store.unpack(found)
        some = [token for token in self._with_names if mask[token]]
        wrong = [token for token in some if self._read_token(state, self.trie.tokens[token]) is None]
        if not wrong:
            return found
        mask = mask.copy()
        mask[wrong] = False
        return self.store.of_mask(mask, bool(mask[self._eos].any()))

    def walk(self, state: Config) -> tuple[npt.NDArray[np.int32], Ints]:
        """Return the tokens that fit a state, and the numbers of the states they lead to, as far as counts matter."""
        self._renew()
        ids, ends = walk_state(self.graph, self.trie, self.graph.number(self.plain(state)))
        if self._with_names:
            mask = self.mask(state)
            ids, ends = ids[mask[ids]], ends[mask[ids]]
        return ids, ends


def _index_of(constraint: Any, vocab: VocabularyLike) -> JsonIndex:
    index: JsonIndex = constraint.index(vocab)
    return index


def _with_names(trie: Trie) -> list[int]:
    """Return the tokens that hold a whole name, at their start or after a comma."""
    found = trie.loops.get("names")
    if found is None:
        found = trie.loops["names"] = [i for i, token in enumerate(trie.tokens) if NAME.search(token)]
    return found


class _Closing(SearchDistances):
    """Distances along closing moves. It is its own index: states are those that no token can tell apart."""

    cost = 30

    def __init__(self, index: JsonIndex) -> None:
        super().__init__(index._lock)
        self.recognizer, self.trie, self.name = index.recognizer, index.trie, index.name
        self.graph = ConfigGraph(self.recognizer, is_closing=True)
        self._plain = index.plain

    def walk(self, state: Config) -> tuple[Ints, Ints]:
        self.graph = self.graph.renewed(self.graph.room)
        return walk_state(self.graph, self.trie, self.graph.number(state))

    def of(self, index: Any, state: Config, most: float = math.inf) -> float:
        closing: Any = self
        return super().of(closing, self._plain(state), most)
