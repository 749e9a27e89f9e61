"""Masks of the texts of a JSON schema.

Configurations that no token can tell apart have one mask: `Texts.plain` maps them to one. It forgets the names that an
object has used, so a token that holds a whole name, at its start or after a comma, is read once more from the configuration itself.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from llmppl.constraints.constraint import Ints, State, VocabularyLike
from llmppl.constraints.json.ends import ConfigGraph, Distances
from llmppl.constraints.json.texts import Config, Texts
from llmppl.constraints.masks.index import TokenIndex
from llmppl.constraints.masks.mask_store import PackedMask
from llmppl.constraints.masks.self_loops import Loops
from llmppl.constraints.vocabulary.trie import Trie
from llmppl.constraints.vocabulary.trie_walk import walk_state

__all__ = ["JsonIndex"]

NAME = re.compile(rb'(?:^|,)[ \t\n\r]*"(?:[^"\\]|\\.)*"', re.DOTALL)


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
        self.reach = max(map(len, self.trie.tokens), default=1) + 1
        self._with_names = names_of(self.trie)
        self._distances = Distances(self._lock)
        self._renew()

    def _renew(self) -> None:
        self.graph = ConfigGraph(self.recognizer)
        self._loops = Loops(self.graph, self.trie)

    def _work_out(self, state: Config, accepts: bool) -> PackedMask:
        plain = self.recognizer.plain(state, self.reach)
        found = self._masks.get(plain) if plain is not state else None
        if found is None:
            found = self._masks[plain] = self._work_out_plain(plain, accepts)
        return self._without_repeats(state, found) if self._with_names else found

    def _work_out_plain(self, state: Config, accepts: bool) -> PackedMask:
        if len(self.graph.states) > self.graph.room:
            self._renew()
        assert self._loops is not None
        graph, number = self.graph, self.graph.number(state)
        mask = self._loops.mask(number, lambda other: self.mask(graph.state(other)))
        if mask is not None:
            return self.store.of_mask(mask, accepts)
        return self.store.of_ids(walk_state(graph, self.trie, number)[0], accepts)

    def _without_repeats(self, state: Config, found: PackedMask) -> PackedMask:
        """Return the mask without tokens that hold a whole name which the object already has."""
        mask = self.store.unpack(found)
        wrong = [token for token in self._with_names if mask[token] and self._read_token(state, self.trie.tokens[token]) is None]
        if not wrong:
            return found
        mask = mask.copy()
        mask[wrong] = False
        return self.store.of_mask(mask, bool(mask[self._eos].any()))

    def walk(self, state: Config) -> tuple[npt.NDArray[np.int32], Ints]:
        """Return the tokens that fit a state, and the numbers of the states they lead to, as far as counts matter."""
        if len(self.graph.states) > self.graph.room:
            self._renew()
        ids, ends = walk_state(self.graph, self.trie, self.graph.number(self.recognizer.plain(state, self.reach)))
        if self._with_names:
            mask = self.mask(state)
            ids, ends = ids[mask[ids]], ends[mask[ids]]
        return ids, ends


def _index_of(constraint: Any, vocab: VocabularyLike) -> JsonIndex:
    return constraint.index(vocab)  # type: ignore[no-any-return]


def names_of(trie: Trie) -> list[int]:
    """Return the tokens that hold a whole name, at their start or after a comma."""
    found = trie.loops.get("names")
    if found is None:
        found = trie.loops["names"] = [i for i, token in enumerate(trie.tokens) if NAME.search(token)]
    return found  # type: ignore[no-any-return]
