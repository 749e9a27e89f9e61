"""Protocols of constraints. A constraint makes an index of itself: `constraint.index(vocab)`.

Terms: a *constraint* is a set of texts. Its *index* over a vocabulary returns, for each *state*, a *mask*: a bool for
every token that may follow. A *recognizer* reads bytes, from state to state; every recognizer has an index,
`llmppl.constraints.TokenIndex(recognizer, vocab)`. A recognizer is *tabled* if its states are small integers and its
steps are rows of a table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from llmppl.support.shared import Shared

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.integer[Any]]
State = Any


class VocabularyLike(Protocol):
    """Bytes of each token id, and the ids that end a text. Tokens without bytes or in `special_ids` never fit.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> letters = SimpleNamespace(tokens=[b"a", b"b", b""], eos_ids=[2])
    >>> index = Regex("a*").index(letters)
    >>> index.allowed(index.start).tolist()
    [0, 2]
    """

    @property
    def tokens(self) -> Sequence[bytes]: ...
    @property
    def eos_ids(self) -> Sequence[int]: ...


def without_bytes(vocab: VocabularyLike) -> set[int]:
    """Return the eos and special ids, which occur in no text."""
    return {*vocab.eos_ids, *getattr(vocab, "special_ids", ())}


class Index(Shared):
    """Base class of indices: the tokens of a vocabulary that may follow each state. A copy is the index itself.

    A subclass defines `start`, the state before the text, `vocab`, `mask`, `advance` and `accepts`. The other methods
    have defaults, which know no distance to an end. If masks are expensive, it may define `fits(state, token)` as well,
    the mask at one token. Programs then test the tokens that they draw.

    Examples
    --------
    >>> class ThreeTokens(Index):
    ...     start, vocab = 0, lm.vocab
    ...     def mask(self, n): return self.vocab.not_eos if n < 3 else self.vocab.only_eos
    ...     def advance(self, n, token): return n + 1
    ...     def accepts(self, n): return n == 3
    >>> generate(lm, "Tim was", ThreeTokens(), seed=0).text
    ' very happy.'
    """

    vocab: VocabularyLike
    start: State  # hashable and immutable, as all states are

    def mask(self, state: State) -> Bools:
        """Return the tokens that may follow: (V,) bool ndarray, read-only; True at every eos iff `state` accepts."""
        raise NotImplementedError

    def advance(self, state: State, token: int) -> State:
        """Return the state after `token`; raise a ValueError if it may not follow."""
        raise NotImplementedError

    def accepts(self, state: State) -> bool:
        """Return True if the text may end in `state`."""
        raise NotImplementedError

    def allowed(self, state: State) -> npt.NDArray[np.int64]:
        """Return the tokens that may follow `state`: (n,) int64 ndarray of ids, ascending."""
        return np.flatnonzero(self.mask(state))

    def masks(self, tokens: Sequence[int]) -> Bools:
        """Return the mask before each token of a text: (T, V) bool ndarray.

        Raise a ValueError that names the place of the first token that may not follow.
        """
        out = np.empty((len(tokens), len(self.vocab.tokens)), bool)
        state = self.start
        for t, token in enumerate(tokens):
            out[t] = self.mask(state)
            try:
                state = self.advance(state, token)
            except ValueError as error:
                raise ValueError(f"tokens[{t}]: {error}") from None
        return out

    def parse(self, text: str) -> Any:
        """Return the object that a finished text represents: `parse` of the constraint or recognizer, else the text.

        Raise a ValueError with the reason if the text is invalid despite the masks; a particle with this text dies.
        """
        made_from = getattr(self, "constraint", getattr(self, "recognizer", None))
        return getattr(made_from, "parse", str)(text)

    def tokens_to_accept(self, state: State, most: float = math.inf) -> float:
        """Return a lower bound of the tokens from `state` to one that accepts, eos not counted; 0 if none is known.

        The result may be infinity if it is above `most`.
        """
        return 0

    def mask_within(self, state: State, n: float) -> Bools:
        """Return the mask without tokens after which n - 1 more tokens are known not to finish the text."""
        return self.mask(state)

    def build_all(self, max_states: int = 1_000_000) -> object:
        """Compute the masks of all states ahead of time; return None if that is not possible."""
        return None


class Constraint(Protocol):
    """Any object that makes an index of itself: a Regex, a DFA, a Grammar, a JsonSchema, or a class of your own.

    It may have a method `parse(text)`, which returns the object that a finished text represents. A text for which
    `parse` raises a ValueError does not satisfy the constraint.

    Examples
    --------
    >>> class Word(Regex):
    ...     def parse(self, text): return text.strip()
    >>> generate(lm, "He was", Word(" (happy|sad)"), seed=0).value
    'happy'
    """

    def index(self, vocab: VocabularyLike, /) -> Index: ...


@runtime_checkable
class Recognizer(Protocol):
    """Language that is read byte by byte. `step` returns None iff no accepted string begins with the bytes so far.

    Examples
    --------
    >>> class Brackets:
    ...     start = 0
    ...     def step(self, depth, byte): return {"(": depth + 1, ")": depth - 1 if depth else None}.get(chr(byte))
    ...     def accepts(self, depth): return depth == 0
    >>> index = TokenIndex(Brackets(), lm.vocab)
    >>> index.next_bytes(index.after("(()")), index.accepts(index.after("(())"))
    (b'()', True)
    """

    @property
    def start(self) -> State: ...
    def step(self, state: State, byte: int, /) -> State | None: ...
    def accepts(self, state: State, /) -> bool: ...


@runtime_checkable
class TabledRecognizer(Recognizer, Protocol):
    """Recognizer with integer states: 0 is dead, and `table[state, byte]` is the next state where `ready[state]`.

    `row(state)` makes a state ready, `explore()` all reachable ones. Both may replace the arrays by longer ones. Rows
    that are not ready are zeros. Row 0 is ready, and zeros.

    Examples
    --------
    >>> found = Regex("ab").explore()
    >>> isinstance(found, TabledRecognizer), found.table.shape, found.accepting.tolist()
    (True, (4, 256), [False, False, False, True])
    """

    @property
    def table(self) -> npt.NDArray[np.int32]: ...  # (S, 256)
    @property
    def ready(self) -> Bools: ...  # (S,)
    @property
    def accepting(self) -> Bools: ...  # (S,)
    def row(self, state: int, /) -> npt.NDArray[np.int32]: ...  # (256,)
    def explore(self) -> object: ...
