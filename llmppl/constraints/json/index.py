"""Masks of the texts of a JSON schema, and distances to their end.

A distance is the least number of tokens to the end along *closing* moves: they complete the value that is read and add
what its schema still needs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from llmppl.constraints.constraint import Bools, Ints, State, VocabularyLike
from llmppl.constraints.json.effects import Group, Node, effects_of, read_words
from llmppl.constraints.json.frames import Local
from llmppl.constraints.json.texts import WRITTEN, Config, Texts
from llmppl.constraints.masks.distances import SearchDistances
from llmppl.constraints.masks.index import MOST, TokenIndex
from llmppl.constraints.masks.mask_store import PackedMask
from llmppl.constraints.vocabulary.trie_walk import MemoGraph, walk_state
from llmppl.support.locks import locked

Stack = Any                                         # a Config, or a local state and the stack below it
Reading = tuple[Local, Stack, Node, bool]           # a state at the top of a stack, and the tokens to read


class ClosingGraph(MemoGraph):
    """Graph of configurations along closing moves; a row is computed at once."""

    room = 1 << 15

    def row(self, number: int) -> npt.NDArray[np.int32]:
        """Return the numbers of the next states, (256,) int32."""
        if self.table.item(number, 0) < 0:
            moves = [(lo, hi, self.number(state)) for lo, hi, state in self.recognizer.moves(self.states[number], True)]
            row = np.zeros(256, np.int32)           # after numbering, which may replace the table
            for lo, hi, after in moves:
                row[lo : hi + 1] = after
            self.table[number] = row
        found: npt.NDArray[np.int32] = self.table[number]
        return found

    def fill(self, number: int, bytes: Ints, /) -> None:
        self.row(number)


class ConfigGraph(MemoGraph):
    """Graph of configurations."""

    def checked(self, state: State) -> State:
        if not isinstance(state, Config):
            raise ValueError(f"{state!r} is not a state of this index")
        return state

    def next_bytes(self, state: State) -> bytes:
        return bytes(byte for lo, hi, _ in self.recognizer.moves(state) for byte in range(lo, hi + 1))


class JsonIndex(TokenIndex):
    """Index of a JSON schema over a vocabulary."""

    constraint: Any

    def __init__(self, constraint: Any, texts: Texts, vocab: VocabularyLike) -> None:
        super().__init__(texts, vocab, constraint)

    def __reduce__(self) -> Any:
        return type(self.constraint).index, (self.constraint, self.vocab)

    @property
    def name(self) -> str:
        return repr(self.constraint)

    def _begin(self) -> None:
        self._effects = effects_of(self.trie)
        self._own = self._effects.new_kept()            # effects of the frames of the schema
        self._distances = _Closing(self)
        self.graph = ConfigGraph(self.recognizer)
        # bounds of the tokens to an end; bytes bound them only if each byte is a token
        self._left = self.recognizer.bytes_left
        self._stack_left = self.recognizer.stack_left
        if not {*WRITTEN} <= {*self.trie.alone.tolist()}:
            self._left = self._stack_left = lambda _: math.inf

    def _is_spelled_by_bytes(self) -> bool:
        return self._stack_left(self.start) < math.inf or super()._is_spelled_by_bytes()

    def _work_out(self, state: Config, accepts: bool) -> PackedMask:
        return self.store.of_mask(self._mask_of(state), accepts)

    def _mask_of(self, state: Config, most: float = math.inf) -> Bools:
        mask = self._mask([(*pair, self._effects.root, True) for pair in state.items], most)
        for token in self._effects.with_names:      # their names may be one
            if mask[token]:
                after = self._read_token(state, self.trie.tokens[token])
                mask[token] = after is not None and self._ends_within(after, most)
        return mask

    @locked
    def _find_within(self, key: tuple[State, float]) -> PackedMask:
        state = self.graph.checked(key[0])
        self._distances.work = 0
        return self.store.of_mask(self._mask_of(state, min(key[1] - 1, MOST)), state.accepts)

    def _mask(self, todo: list[Reading], most: float = math.inf) -> Bools:
        """Return the mask of the tokens that may follow, (V,) bool; with `most`, those with an end within so many."""
        mask = np.zeros(len(self.trie.tokens), bool)
        ids = []
        while todo:
            local, below, node, is_closed = todo.pop()
            if node is self._effects.root and local.content.others is not None:
                mask |= self._in_name(local, below, most)
                continue
            effect = self._effects.of(local, node, is_closed, self._own)
            if most == math.inf or effect.most(self._left) + self._stack_left(below) <= most:
                ids += effect.ids
                for group in effect.groups:
                    ids += group.ids
                if effect.mask is not None:
                    mask |= effect.mask
            else:
                for group in self._effects.groups_of(effect):
                    self._add(group, below, most, mask)
            if effect.end is not None and isinstance(below, Config):
                todo += [(*item, effect.end, True) for item in below.items]
            elif effect.end is not None:
                todo.append((*below, effect.end, False))
            for part, after, at in effect.calls:
                if at.kids:
                    todo += [(start, (after, below), at, False) for start in self.recognizer.starts[part]]
        mask[ids] = True
        return mask

    def _ends_within(self, state: Config, most: float) -> bool:
        return self._stack_left(state) <= most or bool(self._distances.also(self, state, most) <= most)

    def _add(self, group: Group, below: Stack, most: float, mask: Bools) -> None:
        """Add the tokens of a group to a mask, if they have an end within `most` tokens."""
        if most == math.inf or group.left(self._left) + self._stack_left(below) <= most or (
            self._ends_within(self.recognizer.config((group.end, below)), most)
        ):  # fmt: skip
            mask[group.ids] = True

    def _in_name(self, local: Local, below: Stack, most: float) -> Bools:
        """Return the mask inside a name that may be listed or not: that of others, but for tokens along listed ones."""
        assert local.content.others is not None
        key = (local.content.others, below)
        known = self._own.others if most == math.inf else {}
        if key not in known:
            known[key] = self._mask([(*key, self._effects.root, False)], most)
        mask: Bools = known[key].copy()
        groups, ends = read_words(local, self._effects.root)
        for _, end in ends:
            mask[end.below()] = False
        for group in groups:
            mask[group.ids] = False
        for group in groups:
            self._add(group, below, most, mask)
        return mask | self._mask([(after, below, end, False) for after, end in ends if after], most)


class _Closing(SearchDistances):
    """Distances along closing moves. It is its own index."""

    def cost(self, state: Config) -> int:
        return 200 + 200 * len(state.items)

    def __init__(self, index: JsonIndex) -> None:
        super().__init__(index._lock)
        self.recognizer = index.recognizer
        self.trie = index.trie
        self.name = index.name
        self.graph: MemoGraph = ClosingGraph(self.recognizer)

    def walk(self, state: Config) -> tuple[Ints, Ints]:
        self.graph = self.graph.renewed(self.graph.room)
        return walk_state(self.graph, self.trie, self.graph.number(state))

    def also(self, index: Any, state: Config, most: float) -> float:
        return super().also(self, state, most)
