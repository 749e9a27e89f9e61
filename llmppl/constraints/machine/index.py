"""MachineIndex: the tokens of a vocabulary that may follow each state of a machine.

A mask is the union of the effects of the hypotheses of a state. Where an exit is met inside a token, the walk goes on
in the unit that follows it. A token ends within n tokens if one of its hypotheses does: by the bound of the bytes to
an end, or else by a search.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from llmppl.constraints.constraint import Bools, Index, VocabularyLike, without_bytes
from llmppl.constraints.machine.distances import Distances
from llmppl.constraints.machine.effects import effects_of
from llmppl.constraints.machine.machine import LOCK, Continuation, Hypothesis, Item, Machine, State
from llmppl.constraints.machine.values import Symbol, value_of
from llmppl.constraints.masks.index import END, expected, refusal, refused_text
from llmppl.constraints.masks.mask_store import MaskStore, PackedMask
from llmppl.constraints.vocabulary.text import Text, bytes_of
from llmppl.constraints.vocabulary.trie import trie_of
from llmppl.support import arguments
from llmppl.support.graphs import Memo
from llmppl.support.locks import locked

MAX_MASKS = 1 << 14  # that are kept
MAX_STEPS = 1 << 16
MAX_SHOWN = 4  # special tokens that an error lists


class MachineIndex(Index):
    """Index of a composition of constraints. States are those of its machine, and END after an eos token.

    The text ends at an eos token where it may end. Elsewhere an eos token is a symbol, if the composition asks for it
    (`Special`).
    """

    end = END

    def __init__(self, part: Any, vocab: VocabularyLike) -> None:
        self.constraint = part
        self.recognizer: Machine = part.machine
        self.vocab = vocab
        self.trie = trie_of(vocab)
        self._lock = LOCK
        self._eos = np.array(sorted(vocab.eos_ids), np.int32)
        self._effects = effects_of(self.trie)
        self._specials = dict[str | int, int]()
        self._asked = dict[int, str | int]()  # the special tokens as the part names them
        for token in part.special_tokens:
            id = self._specials[token] = special_id(token, vocab)
            other = self._asked.setdefault(id, token)
            if other != token:
                both = f"Special({other!r}) and Special({token!r})"
                raise ValueError(f"{both} are one token: write both alike")
        self.store = MaskStore(len(self.trie.tokens), np.zeros(0, np.int32), self._lock)
        self._masks: Memo[Any, PackedMask] = Memo(self._find, MAX_MASKS)
        self._within: Memo[tuple[Any, float], PackedMask] = Memo(self._find_within, MAX_MASKS)
        self._steps: Memo[tuple[Any, int], Any] = Memo(self._advance, MAX_STEPS)
        self._closed: Memo[Hypothesis, State | None] = Memo(
            lambda each: self.recognizer.closed([each]), MAX_STEPS
        )
        alone = np.zeros(256, bool)
        alone[self.trie.alone] = True
        self._distances = Distances(self._reached, alone)
        self.start: Any = self.recognizer.start
        if self.start is None:
            raise ValueError(
                f"{self.name} accepts no string at all: widen it, or drop one of its parts"
            )
        if not part.is_opaque and not self.trie.complete and not self._has_end():
            where = ""
            if not self.mask(self.start).any():
                where = f": no token fits where {self.expected(self.start)}"
            raise ValueError(
                f"{self.name}: no sequence of tokens of this vocabulary spells a string that it accepts{where}"
            )

    @locked
    def _has_end(self) -> bool:
        return bool(self._distances.near({self.start}, math.inf))

    @property
    def name(self) -> str:
        """Name of the constraint in errors."""
        name = repr(self.constraint)
        return type(self.constraint).__name__ if name.startswith("<") else name

    def __repr__(self) -> str:
        return (
            f"MachineIndex({self.name}, {len(self.trie.tokens)} tokens, {len(self._masks)} masks)"
        )

    def __reduce__(self) -> Any:
        return MachineIndex, (self.constraint, self.vocab)

    def mask(self, state: Any) -> Bools:
        """Return the tokens that may follow: (V,) bool ndarray, read-only; True at every eos if `state` accepts."""
        return self._unpacked(self._masks[state])

    def mask_within(self, state: Any, n: float) -> Bools:
        """Return the tokens after which n - 1 more tokens can finish the text, eos not counted.

        (V,) bool ndarray, read-only. A token counts as too far if a search finds no end. With `n` infinite, only
        tokens are excluded after which no sequence of tokens finishes the text.
        """
        if state is END:
            return self.mask(state)
        return self._unpacked(self._within[state, n])

    def accepts(self, state: Any) -> bool:
        """Return True if the text may end in `state`, or has ended (END)."""
        return state is END or checked(state).accepts

    def advance(self, state: Any, token: int) -> Any:
        """Return the state after `token`, END after an eos; raise a ValueError if `token` may not follow `state`."""
        return self._steps[state, token]

    def after(self, text: str | bytes) -> Any:
        """Return the state after a text, whatever its tokens.

        Raise a ValueError that names the place and the byte if no accepted string begins with the text.
        """
        data = bytes_of(text)
        state, at = self.read(self.start, data)
        if at < len(data):
            raise refused_text(self, data, at, state)
        return state

    @locked
    def read(self, state: Any, data: bytes) -> tuple[Any, int]:
        """Return the state after the longest prefix of `data` that fits, and the length of that prefix."""
        return self.recognizer.read(state, data)

    def next_bytes(self, state: Any) -> bytes:
        """Return the bytes that may follow `state`, ascending; b"" if there are none."""
        return b"" if state is END else self.recognizer.next_bytes(state)

    def expected(self, state: Any) -> str:
        """Describe the possible continuations of a state."""
        specials = {} if state is END else self.recognizer.steps_by_specials(state)
        return expected(self.next_bytes(state), self.accepts(state), specials)

    def tokens_to_accept(self, state: Any, most: float = math.inf) -> float:
        """Return the least number of tokens from `state` to one that accepts, eos not counted; inf if there is no path.

        The result may be inf if there is no path of at most `most` tokens. If a search gives up, it is a bound: the
        bytes of one way to an end.
        """
        return 0 if state is END else self._distance(state, most)

    @locked
    def _distance(self, state: State, most: float) -> float:
        return self._distances.of(checked(state), most)

    def build_all(self, max_states: int = 1_000_000) -> Any:
        raise TypeError(
            f"build_all wants finitely many states, those of a Regex or a DFA, not {self.name}"
        )

    def parse(self, text: str | Sequence[int]) -> Any:
        """Return the value of a text, or of token ids. ValueError if it is not in the set."""
        if isinstance(text, str):
            return self.constraint.parse(text)
        pieces: list[Any] = [Text()]
        for token in text:
            data = self.trie.tokens[token]
            if data:
                pieces[-1] += Text(data)
            else:
                pieces += [Symbol(self._asked.get(token, token)), Text()]
        return value_of(self.constraint, list(filter(len, pieces)))

    # ---- masks

    def _unpacked(self, found: PackedMask) -> Bools:
        mask = found.mask  # read once: another thread may drop it
        if mask is None:
            return self.store.unpack(found)
        found.recent = True
        return mask

    @locked
    def _find(self, state: Any) -> PackedMask:
        mask = np.zeros(len(self.trie.tokens), bool)
        if state is END:
            return self.store.of_mask(mask, False)
        patterns = set[re.Pattern[bytes]]()
        masks = set[PackedMask]()
        for (unit, number, after), nodes, tokens in self._crossed(checked(state).hypotheses):
            if unit.doubtful is not None:
                patterns.add(unit.doubtful)
            if tokens is not None:
                masks.add(tokens)
                continue
            for group in self._effects.groups(unit, number, nodes):
                if unit.is_viable(group.number, after):
                    mask[group.ids] = True
        self._effects.store.add(masks, mask)
        for token in self._doubtful(patterns, mask):
            mask[token] = self._after_token(state, token) is not None
        mask[self._eos] = state.accepts
        for token in self._specials_after(state):
            mask[token] = True
        return self.store.of_mask(mask, False)

    @locked
    def _find_within(self, key: tuple[Any, float]) -> PackedMask:
        state, n = key
        mask = np.zeros(len(self.trie.tokens), bool)
        groups = defaultdict[State | None, list[Any]](list)
        patterns = set[re.Pattern[bytes]]()
        for (unit, number, after), nodes, _ in self._crossed(checked(state).hypotheses):
            if unit.doubtful is not None:
                patterns.add(unit.doubtful)
            for group in self._effects.groups(unit, number, nodes):
                groups[self._closed[Hypothesis(unit, group.number, after)]].append(group.ids)
                mask[group.ids] = True
        doubtful = {
            token: self._after_token(state, token) for token in self._doubtful(patterns, mask)
        }
        specials = self._specials_after(state)
        reached = {*groups, *doubtful.values(), *specials.values()}
        near = self._distances.near({each for each in reached if each is not None}, n - 1)
        mask[:] = False
        for each in near:
            for ids in groups.get(each, ()):
                mask[ids] = True
        for token, after_it in doubtful.items():
            mask[token] = after_it in near
        mask[self._eos] = state.accepts
        for token, after_it in specials.items():
            mask[token] |= after_it in near
        return self.store.of_mask(mask, False)

    def _crossed(
        self, hypotheses: Iterable[Hypothesis]
    ) -> Iterator[tuple[Hypothesis, bytes, PackedMask | None]]:
        """Yield the hypotheses that tokens reach, the nodes of the trie below which they are read, and the effects."""
        effects = self._effects
        todo: list[tuple[Item, bytes]] = [(each, effects.root) for each in hypotheses]
        seen = set[tuple[Item, bytes]]()
        while todo:
            item, nodes = todo.pop()
            if (item, nodes) in seen:
                continue
            seen.add((item, nodes))
            if isinstance(item, Continuation):
                todo += [(each, nodes) for each in item.begin()]
                continue
            unit, number, after = item
            if unit.special is not None:
                continue
            tokens, exits = effects.of(unit, number, nodes)
            yield item, nodes, tokens
            if nodes is not effects.root:
                for label in unit.exits[number]:
                    todo += [(each, nodes) for each in unit.follow(label, after)]
            for label, below in exits:
                todo += [(each, below) for each in unit.follow(label, after)]

    def _specials_after(self, state: State) -> dict[int, State]:
        """Return the special tokens that may follow a state, with the states after them."""
        found = self.recognizer.steps_by_specials(state)
        return {self._specials[special]: after for special, after in found.items()}

    def _reached(self, state: State, is_over: bool) -> Iterator[State]:
        """Yield states after one token on the way to every end; with `is_over`, only those that may be ends."""
        for (unit, number, after), nodes, _ in self._crossed(state.hypotheses):
            for end in self._effects.ends(unit, number, nodes):
                if unit.exits[end] or not is_over:
                    reached = self._closed[Hypothesis(unit, end, after)]
                    if reached is not None:
                        yield reached
        yield from self._specials_after(state).values()

    def _doubtful(self, patterns: Iterable[re.Pattern[bytes]], mask: Bools) -> list[int]:
        """Return the tokens of a mask that must be read byte by byte, since a unit remembers more than its table."""
        found = list[int]()
        for pattern in patterns:
            tokens = self._effects.matching[pattern]
            found += tokens[mask[tokens]].tolist()
        return found

    def _after_token(self, state: State, token: int) -> State | None:
        """Return the state after the bytes of a token, None if they do not fit."""
        data = self.trie.tokens[token]
        last, at = self.recognizer.read(state, data)
        return last if at == len(data) else None

    @locked
    def _advance(self, key: tuple[Any, int]) -> Any:
        found = self._next(*key)
        if found is None:
            raise refusal(self, *key)
        return found

    def _next(self, state: Any, token: int) -> Any:
        """Return the state after a token, None if it may not follow."""
        is_known = 0 <= arguments.integer("token", token) < len(self.trie.tokens)
        if state is END or not is_known:
            return None
        if self.trie.tokens[token]:
            return self._after_token(state, token)
        if token in self._eos and state.accepts:
            return END
        return self._specials_after(state).get(token)


class TestedIndex(MachineIndex):
    """Index of a composition with a part that reads slowly: programs test the tokens that they draw by `fits`.

    It plans no end, because a search would read the whole vocabulary again and again.
    """

    def mask_within(self, state: Any, n: float) -> Bools:
        return self.mask(state)

    def tokens_to_accept(self, state: Any, most: float = math.inf) -> float:
        return 0

    @locked
    def fits(self, state: Any, token: int) -> bool:
        """Return True if a token may follow."""
        return self._next(state, token) is not None


def checked(state: Any) -> State:
    """Return a state; raise a ValueError if it cannot be one of a machine."""
    if not isinstance(state, State):
        raise ValueError(
            f"{state!r} is not a state of this index, whose states come from start and advance"
        )
    return state


def special_id(token: str | int, vocab: VocabularyLike) -> int:
    """Return the id of a special token, given by its text or id. ValueError if the vocabulary has no such token."""
    texts = getattr(vocab, "special_texts", {})
    if isinstance(token, int) and token in without_bytes(vocab):
        return token
    for id, text in texts.items():
        if text == token:
            return int(id)
    unknown = f"Special({token!r}) is no special token of {vocab!r}"
    close = difflib.get_close_matches(str(token), texts.values(), 1)
    if close:
        raise ValueError(f"{unknown}: did you mean {close[0]!r}?")
    some = [f"{id} ({text!r})" for id, text in sorted(texts.items())[:MAX_SHOWN]]
    if not some:
        some = [str(id) for id in sorted(without_bytes(vocab))[:MAX_SHOWN]]
    raise ValueError(f"{unknown}; its first ones are {', '.join(some)}")
