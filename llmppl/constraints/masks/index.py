"""TokenIndex: the tokens of a vocabulary that may follow each state of a recognizer.

One walk of the vocabulary's trie in parallel with the recognizer (`llmppl.constraints.vocabulary.trie_walk`) finds all
tokens that may follow a state. The walk runs once per state, when its mask is first requested.

Terms: the *end* is the state after an eos token. In a *dead end* the text is not finished and no token fits, although
some bytes would. Dead ends exist only if the vocabulary lacks single bytes.

Source: Willard & Louf (2023), "Efficient Guided Generation for Large Language Models". The walk is Algorithm 3 for all
tokens at once; `TokenIndex.build_all` is Algorithm 4.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from llmppl.constraints.constraint import (
    Bools,
    Index,
    Ints,
    Recognizer,
    State,
    TabledRecognizer,
    VocabularyLike,
)
from llmppl.constraints.masks.distances import (
    PrecomputedIndex,
    SearchDistances,
    TableDistances,
    build,
)
from llmppl.constraints.masks.mask_store import MaskStore, PackedMask
from llmppl.constraints.vocabulary.native_walk import beside_of, native_trie
from llmppl.constraints.vocabulary.text import bytes_of
from llmppl.constraints.vocabulary.trie import trie_of
from llmppl.constraints.vocabulary.trie_walk import MemoGraph, TableGraph, walk_state
from llmppl.support import arguments
from llmppl.support.graphs import Memo
from llmppl.support.locks import Lock, locked

MAX_STEPS = 1 << 16  # steps in the memo
MAX_WITHIN = 4096  # results of `mask_within` in the memo
MOST = sys.float_info.max  # a finite distance at most; a dead end has inf
MAX_GAP_SEARCH = 200  # states that the check of `__init__` visits at most
MAX_RANGES = 8  # runs of bytes that errors show
MAX_BYTES = 24  # bytes of a text that errors show


class _End:
    """State after an eos token: the text is finished, and nothing may follow.

    Examples
    --------
    >>> index = Regex("a").index(lm.vocab)
    >>> index.advance(index.after("a"), lm.vocab.eos_ids[0])
    END
    """

    def __repr__(self) -> str:
        return "END"

    def __reduce__(self) -> str:  # copies and pickles are the same object
        return "END"


END = _End()


class TokenIndex(Index):
    """Index of the tokens of a vocabulary that may follow each state of a recognizer, and of the states they lead to.

    A token may follow if some accepted string continues with its bytes. A mask therefore contains all tokens that fit,
    not only canonical ones. States are those of the recognizer, and END after an eos token. A copy is the index itself.
    Masks are computed on demand, by one thread at a time for all indices of a Regex, DFA or Grammar.

    Parameters
    ----------
    recognizer : Recognizer
        Any object with `start`, `step` and `accepts`. A Regex, DFA or Grammar makes its own index: `.index(vocab)`.
    vocab : VocabularyLike
    constraint : object, optional
        Reads the values of finished texts by its `parse`, and names the index; by default the recognizer.

    Raises
    ------
    TypeError
        If `recognizer` is not a recognizer, such as a str.
    ValueError
        If the recognizer accepts nothing, or no sequence of tokens spells a string that it accepts. (The second check
        visits a few hundred states at most, and runs only if the vocabulary lacks single bytes.)

    Examples
    --------
    >>> vocab = Vocabulary([b"a", b"b", b"ab", b""], eos_ids=[3])
    >>> index = Regex("ab").index(vocab)
    >>> index.mask(index.start)
    array([ True, False,  True, False])
    """

    end: State = END

    def __init__(
        self,
        recognizer: Recognizer | TabledRecognizer,
        vocab: VocabularyLike,
        constraint: Any = None,
    ) -> None:
        if not all(hasattr(recognizer, name) for name in ("start", "step", "accepts")):
            given = f"{arguments.shown(recognizer, 60)} of type {type(recognizer).__name__}"
            raise TypeError(
                f"a TokenIndex takes a recognizer (a Regex, a DFA), not {given}; "
                "Regex(text) makes one of a str, and other constraints make their own index: .index(vocab)"
            )
        self.recognizer: Any = recognizer
        self.constraint = recognizer if constraint is None else constraint
        self.vocab = vocab
        self.trie = trie_of(vocab)
        self.start = recognizer.start
        turn = getattr(recognizer, "_lock", None)
        self._lock = turn if isinstance(turn, Lock) else Lock()
        self._eos = np.array(sorted(vocab.eos_ids), np.int32)
        self.store = MaskStore(len(self.trie.tokens), self._eos, self._lock)
        self._within: Memo[tuple[State, float], PackedMask] = Memo(self._find_within, MAX_WITHIN)
        self._steps: Memo[tuple[State, int], State] = Memo(self._advance, MAX_STEPS)
        self._precomputed: PrecomputedIndex | None = None
        self._begin()
        self._masks: Memo[State, PackedMask] = Memo(self._find, self.graph.room)
        if self.start is None or (self.start == 0 and isinstance(self.graph, TableGraph)):
            raise ValueError(
                f"{self.name} accepts no string at all: widen it, or drop one of its parts"
            )
        _check_spellable(self)

    def _begin(self) -> None:
        """Make the graph of the recognizer, and its distances."""
        self.graph: TableGraph | MemoGraph
        self._distances: Any
        if isinstance(self.recognizer, TabledRecognizer):
            self.graph = TableGraph(self.recognizer)
            beside_of(self.graph)
            self._distances = TableDistances(self._lock)
        else:
            self.graph = MemoGraph(self.recognizer)
            self._distances = SearchDistances(self._lock)

    def _is_spelled_by_bytes(self) -> bool:
        """Return True if tokens of one byte spell an accepted string, or lead to many states."""
        alone = self.trie.alone

        def by_bytes(state: State) -> list[State]:
            number = self.graph.number(state)
            self.graph.fill(number, alone)
            ends = np.unique(self.graph.table[number, alone]).tolist()
            return [self.graph.state(end) for end in ends if end]

        return reaches_end(self, by_bytes)

    @property
    def name(self) -> str:
        """Name of the recognizer in errors."""
        name = repr(self.constraint)
        return type(self.constraint).__name__ if name.startswith("<") else name

    def __repr__(self) -> str:
        return f"TokenIndex({self.name}, {len(self.trie.tokens)} tokens, {len(self._masks)} masks)"

    def mask(self, state: State) -> Bools:
        """Return the tokens that may follow `state`.

        Parameters
        ----------
        state : hashable, from `start`, `advance` or `after`

        Returns
        -------
        (V,) bool ndarray, read-only
            True at v if some accepted string continues `state` with the bytes of token v; at an eos iff `state`
            accepts. False at other tokens without bytes, and everywhere at END and at a dead end. States with equal
            sets share one array, which stays the same object while anyone holds it.

        Raises
        ------
        ValueError
            If `state` is recognised as a state of another index.
        """
        found = self._masks[state]
        mask = found.mask  # read once: another thread may drop it
        if mask is None:
            return self.store.unpack(found)
        found.recent = True
        return mask

    def accepts(self, state: State) -> bool:
        """Return True if the text may end in `state`, or has ended (END)."""
        return state is END or bool(self.recognizer.accepts(self.graph.checked(state)))

    def advance(self, state: State, token: int) -> State:
        """Return the state after `token`, END after an eos; raise a ValueError if `token` may not follow `state`."""
        return self._steps[state, token]

    def after(self, text: str | bytes) -> State:
        """Return the state after a text, whatever its tokens.

        Raise a ValueError that names the place and the byte if no accepted string begins with the text.
        """
        data = bytes_of(text)
        state, at = self.read(self.start, data)
        if at < len(data):
            raise refused_text(self, data, at, state)
        return state

    def next_bytes(self, state: State) -> bytes:
        """Return the bytes that may follow `state`, ascending; b"" if there are none."""
        if state is END:
            return b""
        return self.graph.next_bytes(self.graph.checked(state))

    def tokens_to_accept(self, state: State, most: float = math.inf) -> float:
        """Return the least number of tokens from `state` to one that accepts, eos not counted; inf if there is no path.

        The result may be inf if there is no path of at most `most` tokens. Raise a ValueError if the search passes its
        limit, some seconds.
        """
        if state is END:
            return 0
        found = self._distances.of(self, self.graph.checked(state), most)
        return int(found) if math.isfinite(found) else found

    def mask_within(self, state: State, n: float) -> Bools:
        """Return the tokens after which n - 1 more tokens can finish the text, eos not counted.

        (V,) bool ndarray, read-only. With `n` infinite, only tokens are excluded after which no sequence of tokens
        finishes the text. The values at eos are those of `mask`.
        """
        if state is END:
            return self.mask(END)
        found = self._within[state, n]
        mask = found.mask
        if mask is None:
            return self.store.unpack(found)
        found.recent = True
        return mask

    def build_all(self, max_states: int = 1_000_000) -> Any:
        """Compute the masks and steps of all states that tokens reach from the start (Algorithm 4).

        Return a PrecomputedIndex; raise a ValueError if there are more than `max_states` states.
        """
        return self._build(arguments.count("max_states", max_states))

    # ---- implementation

    @locked
    def _build(self, max_states: int) -> PrecomputedIndex:
        if self._precomputed is None:
            found = build(self, max_states)
            self._masks.update(zip(found.states, found.masks, strict=True))
            self._precomputed = found
        return self._precomputed

    @locked
    def _find(self, state: State) -> PackedMask:
        if state is END:
            return self.store.of_ids(np.zeros(0, np.int32), False)
        state = self.graph.checked(state)
        try:
            return self._work_out(state, bool(self.recognizer.accepts(state)))
        except Exception as error:
            error.add_note(f"in TokenIndex.mask of the state {state!r}; is it one of {self!r}?")
            raise

    def _work_out(self, state: State, accepts: bool) -> PackedMask:
        """Compute the mask of a state."""
        trie = native_trie(self.trie)
        self.graph = self.graph.renewed(self.graph.room)
        number = self.graph.number(state)
        beside = beside_of(self.graph)
        if trie is not None and beside is not None:
            mask, ids, _ = trie.mask(beside, number)
            return self.store.of_walk(mask, ids, accepts)
        return self.store.of_ids(self.walk(state)[0], accepts)

    @locked
    def _find_within(self, key: tuple[State, float]) -> PackedMask:
        state = self.graph.checked(key[0])
        n = key[1]
        ids, ends = self.walk(state)
        fits = self._distances.within(self, state, ends, min(n - 1, MOST))
        return self.store.of_ids(ids[fits], self.accepts(state))

    def walk(self, state: State) -> tuple[npt.NDArray[np.int32], Ints]:
        """Return the tokens that fit a state, and the numbers of the states they lead to."""
        self.graph = self.graph.renewed(self.graph.room)
        return walk_state(self.graph, self.trie, self.graph.number(state))

    def read(self, state: State, data: bytes) -> tuple[State, int]:
        """Return the state after the longest prefix of `data` that fits, and the length of that prefix."""
        step = self.recognizer.step
        has_zero = self.graph.has_zero
        for at, byte in enumerate(data):
            found = step(state, byte)
            if not found and (found is None or not has_zero):
                return state, at
            state = found
        return state, len(data)

    def _read_token(self, state: State, data: bytes) -> State | None:
        """Return the state after the bytes of a token, None if they do not fit."""
        last, at = self.read(state, data)
        return last if at == len(data) else None

    @locked
    def _advance(self, key: tuple[State, int]) -> State:
        state, token = key
        data = (
            self.trie.tokens[token]
            if 0 <= arguments.integer("token", token) < len(self.trie.tokens)
            else b""
        )
        found = None
        if state is not END:
            state = self.graph.checked(state)
            if data:
                found = self._read_token(state, data)
            elif token in self._eos and self.accepts(state):
                found = END
        if found is None:
            raise refusal(self, state, token)
        return found

    def expected(self, state: State) -> str:
        """Describe the possible continuations of a state."""
        return expected(self.next_bytes(state), self.accepts(state))


def _check_spellable(index: TokenIndex) -> None:
    """Raise a ValueError if tokens lead from the start to no state that accepts.

    Tokens of one byte are tried first, because a step by them is cheap.
    """
    if index.trie.complete or index.accepts(index.start) or index._is_spelled_by_bytes():
        return
    stuck = b""

    def by_tokens(state: State) -> list[State]:
        nonlocal stuck
        ends = np.unique(index.walk(state)[1]).tolist()
        if not ends and not stuck:
            stuck = index.next_bytes(state)
        return list(map(index.graph.state, ends))

    if reaches_end(index, by_tokens):
        return
    where = ""
    if stuck:
        where = f": no token fits where {expected(stuck, False)}"
    raise ValueError(
        f"{index.name}: no sequence of tokens of this vocabulary spells a string that it accepts{where}"
    )


def reaches_end(index: TokenIndex, after: Callable[[State], list[State]]) -> bool:
    """Return True if steps lead from the start to a state that accepts, or to more than MAX_GAP_SEARCH states."""
    stack = [index.start]
    seen = {index.start}
    while stack:
        for state in after(stack.pop()):
            if index.recognizer.accepts(state) or len(seen) > MAX_GAP_SEARCH:
                return True
            if state not in seen:
                seen.add(state)
                stack.append(state)
    return False


# ---- words for errors


def refused_text(index: Any, data: bytes, at: int, state: State) -> ValueError:
    """Return the error of a text whose byte `at`, read in `state`, leaves the language."""
    byte = data[at : at + 1]
    where = f"{index.name}: byte {at} of the text, {byte!r} {_after(data[:at])}"
    return ValueError(f"{where}, leaves the language: {index.expected(state)}")


def refusal(index: Any, state: State, token: int) -> ValueError:
    """Return the error of a token that may not follow a state."""
    tokens = index.trie.tokens
    if not 0 <= token < len(tokens):
        return ValueError(
            f"token {token} is not in this vocabulary, whose ids are 0 to {len(tokens) - 1}"
        )
    data = tokens[token]
    name = f"token {int(token)} ({_in_words(index, token)})"
    if state is END:
        return ValueError(f"{name} cannot follow: an eos has ended the text")
    where = index.expected(state)
    if data:
        last, at = index.read(state, data)
        where = f"{index.expected(last)}, not {data[at : at + 1]!r}"
        if at:
            where = f"after {data[:at]!r} {where}"
    some = ", ".join(f"{i} ({_in_words(index, i)})" for i in index.allowed(state)[:4].tolist())
    return ValueError(
        f"{index.name}: {name} cannot follow state {arguments.shown(state, 60)}: {where}. Tokens that can: {some}"
    )


def _in_words(index: Any, token: int) -> str:
    """Return the bytes of a token, or the name of a special one."""
    vocab = index.vocab
    if index.trie.tokens[token]:
        return repr(index.trie.tokens[token])
    kind = "special"
    if token in vocab.eos_ids:
        kind = "eos"
    texts = getattr(vocab, "special_texts", {})
    if token in texts:
        kind += f" {texts[token]!r}"
    return kind


def expected(bytes: bytes, ends: bool, specials: Iterable[str | int] = ()) -> str:
    """Describe the possible continuations: one of the ascending `bytes`, a special token, or the end."""
    ways = list[str]()
    if bytes:
        shown = list[str]()
        for _, run in groupby(enumerate(bytes), lambda pair: pair[1] - pair[0]):
            first, *rest = (b"%c" % byte for _, byte in run)
            shown.append(f"{first!r}..{rest[-1]!r}" if rest else repr(first))
        if len(shown) > MAX_RANGES:
            shown[MAX_RANGES:] = ["..."]
        ways.append(f"the next byte must be one of {', '.join(shown)}")
    ways += [f"the special token {token!r} must follow" for token in specials]
    if ends or not ways:
        ways.append("the text must end")
    return ", or ".join(ways)


def _after(text: bytes) -> str:
    """Return in words the place after `text`; of a long text, its last bytes."""
    if not text:
        return "at the start"
    data = text[-MAX_BYTES:]
    shown: str | bytes = data.decode("utf-8", "replace")
    if chr(0xFFFD) in shown:
        shown = data
    dots = "..." if len(text) > MAX_BYTES else ""
    return f"after {dots}{shown!r}"
