"""What a constraint is: something that makes an index of itself, `constraint.index(vocab)`.

Words. A *constraint* says which texts may come out. Its *index* over a vocabulary says in every *state* which tokens
may follow, as a *mask*: a bool for every token. A *recognizer* is a constraint that reads bytes, from state to state;
`llmppl.constraints.TokenIndex(recognizer, vocab)` is the index of any. A recognizer is *tabled* if its states are small
integers and its steps are rows of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from llmppl.support.shared import Shared

__all__ = ["Bools", "Constraint", "Index", "Ints", "Recognizer", "State", "TabledRecognizer", "VocabularyLike"]

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.integer[Any]]
State = Any                                         # hashable, and never changed


class VocabularyLike(Protocol):
    """Token id -> bytes, and the ids that end a text. Tokens without bytes, and `special_ids` if any, never fit."""

    @property
    def tokens(self) -> Sequence[bytes]: ...
    @property
    def eos_ids(self) -> Sequence[int]: ...


def bytes_of(text: str | bytes) -> bytes:
    """Those of a Text are the bytes of its tokens, which need not be characters."""
    return text if isinstance(text, bytes) else getattr(text, "bytes", None) or text.encode()


def without_bytes(vocab: VocabularyLike) -> set[int]:
    """The ids that no text has in it, whatever the vocabulary calls them."""
    return {*vocab.eos_ids, *getattr(vocab, "special_ids", ())}


class Index(Shared):
    """Which tokens of a vocabulary may follow, in every state of a constraint. Copies are the index itself.

    An index of your own is a subclass with `start`, `vocab`, `mask`, `advance` and `accepts`. The rest has defaults:
    how far an end is, is not known.

    Attributes
    ----------
    start : hashable
        The state before the text. States are never changed: what they lead to are others.
    vocab : VocabularyLike
    """

    vocab: VocabularyLike
    start: State

    def mask(self, state: State) -> Bools:
        """Tokens that may follow `state`: (V,) bool ndarray, read-only, True at every eos iff `state` accepts."""
        raise NotImplementedError(f"{type(self).__name__}.mask")

    def advance(self, state: State, token: int) -> State:
        """The state after `token`; a ValueError if it may not follow."""
        raise NotImplementedError(f"{type(self).__name__}.advance")

    def accepts(self, state: State) -> bool:
        """Whether the text may end in `state`."""
        raise NotImplementedError(f"{type(self).__name__}.accepts")

    def allowed(self, state: State) -> npt.NDArray[np.int64]:
        """Tokens that may follow `state`: (n,) int64 ndarray of ids, ascending."""
        return np.flatnonzero(self.mask(state))

    def masks(self, tokens: Sequence[int]) -> Bools:
        """The mask before each token of a text, (T, V) bool ndarray; a ValueError names the place of one that may not
        follow those before it."""
        out, state = np.empty((len(tokens), len(self.vocab.tokens)), bool), self.start
        for t, token in enumerate(tokens):
            out[t] = self.mask(state)
            try:
                state = self.advance(state, token)
            except ValueError as error:
                raise ValueError(f"tokens[{t}]: {error}") from None
        return out

    def parse(self, text: str) -> Any:
        """The object that a finished text stands for, by `parse` of the constraint or recognizer; else the text itself.

        A ValueError, which says why, if the text is not to be taken after all: where a program ends a text so, it dies.
        """
        made_from = getattr(self, "constraint", None) or getattr(self, "recognizer", None)
        read = getattr(made_from, "parse", str)
        return read(text)

    def tokens_to_accept(self, state: State) -> float:
        """A lower bound of the tokens from `state` to one that accepts, an eos not counted; 0 if none is known."""
        return 0

    def mask_within(self, state: State, n: float) -> Bools:
        """The mask, less tokens after which no n - 1 tokens more finish the text, as far as that is known."""
        return self.mask(state)

    def build_all(self, max_states: int = 1_000_000) -> object:
        """What masks need of all states, worked out ahead; None if nothing can be."""
        return None


class Constraint(Protocol):
    """Anything that makes an index of itself: a Regex, a DFA, a Grammar, a JsonSchema, a class of your own.

    It may have `parse(text)`, the object that a finished text stands for. A text of which that raises a ValueError is
    none of the constraint's, whatever the masks have let through.
    """

    def index(self, vocab: VocabularyLike, /) -> Index: ...


class Recognizer(Protocol):
    """A language, read byte by byte. Every state that it gives out leads on to some accepted string."""

    @property
    def start(self) -> State: ...
    def step(self, state: State, byte: int, /) -> State | None: ...
    def accepts(self, state: State, /) -> bool: ...


@runtime_checkable
class TabledRecognizer(Protocol):
    """A recognizer whose states are integers: 0 is dead, `table[state, byte]` the next one where `ready[state]`.

    `row(state)` makes a state ready; `explore()` all that can be reached. The arrays may be replaced by longer ones;
    rows that are not ready hold zeros. Row 0 is ready, and zeros.
    """

    @property
    def start(self) -> int: ...
    @property
    def table(self) -> npt.NDArray[np.int32]: ...  # (S, 256)
    @property
    def ready(self) -> Bools: ...  # (S,)
    @property
    def accepting(self) -> Bools: ...  # (S,)
    def step(self, state: int, byte: int, /) -> int | None: ...
    def accepts(self, state: int, /) -> bool: ...
    def row(self, state: int, /) -> npt.NDArray[np.int32]: ...  # (256,)
    def explore(self) -> object: ...
