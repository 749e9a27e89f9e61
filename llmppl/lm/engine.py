"""Engine: the seam to what computes, from tokens to logits. FunctionEngine: the simplest one.

An engine of another library, with a cache of its own or none, is a subclass of `Engine` with one method:

    class Mine(Engine):
        def forward(self, contexts, asked):
            self.tokens += ...                          # what was really run
            return np.stack([logits after contexts[i][:n] for i, n in asked])

    lm = CachedTransformer(Mine(), tokenizer)

`llmppl.testing.check_engine` tells whether it answers as it should. A `SlotEngine` keeps keys and values in numbered
*slots*, one for each token of each context. Which token has which slot is the cache's business (`llmppl.lm.cache`); the
engine writes and reads the slots it is told to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Engine(ABC):
    """A language model as the cache sees it: called from one thread at a time, and by one CachedTransformer alone.

    What was answered is kept by who asks while there is room, so that nothing is asked twice without need. What an
    engine keeps besides, as keys and values, is its own business, and so are its limits: a call that is more than it
    can do at once it cuts into several passes.

    Attributes
    ----------
    name : str
        Model, file, number format: what tells it from one that answers otherwise. A checkpoint is refused by it.
    max_length : int or None
        The longest context it can read; longer ones are refused before they get here.
    eos_ids : sequence of int
        Tokens that end a text, besides those that the tokenizer names.
    size : int or None
        How many ids it gives logits of. Said by one that has `log_probs`.
    reads_empty : bool
        `forward` answers an empty context, asked (i, 0), so that a prompt may be empty without a BOS token.
    tokens : int
        How many it has really run since it was made: what it had kept of a context does not count.
    """

    name: str = ""
    max_length: int | None = None
    eos_ids: Sequence[int] = ()
    size: int | None = None
    reads_empty: bool = False
    tokens: int = 0

    @abstractmethod
    def forward(self, contexts: list[list[int]], asked: list[tuple[int, int]]) -> Any:
        """The logits of next tokens, for all that one round asks.

        Parameters
        ----------
        contexts : list of list of int
            Token ids, from the start of the text, of unequal lengths; none begins with another whole. They are not to
            be changed.
        asked : list of (int, int)
            (i, n): of the token after the first n of `contexts[i]`. The whole of each context is asked for, and there
            may be earlier places.

        Returns
        -------
        (len(asked), >= V) float32 or float64 logits, numpy or a tensor of torch, which stays on its device; not
        normalised. -inf is a token that cannot follow.
        """

    def log_probs(self, contexts: list[list[int]], starts: list[int]) -> list[NDArray[np.float64]] | None:
        """How probable given tokens are: the logs for `contexts[i][j]` after those before it, j = starts[i] >= 1, ...

        None where rows are as cheap, as they are for most. They are normalised over all ids that the engine has, `size`
        of them, so that it is asked where each stands for a token.
        """
        return None

    def release(self, contexts: list[list[int]]) -> None:               # noqa: B027
        """Nobody holds these contexts any more, nor any that continue them; they may still be asked for again."""

    def version(self) -> int:
        """Return another number once the weights have changed: what was answered before is then forgotten."""
        return 0

    def clear(self) -> None:                            # noqa: B027
        """Forget what was kept: a call of `forward` has failed or was interrupted, or the weights have changed."""


@dataclass
class Batch:
    """Tokens to run, as the rows of one forward pass.

    tokens : (B, Q) int64, right-padded with 0
    starts : (B,) int64, how many tokens of the row's context come before
    lengths : (B,) int64, how many of the Q tokens are real
    slots : (B, T) int64, the slots of the row's whole context, its new tokens included; T is the longest context.
        Right-padded with the row's first: another context's may hold NaN, which spreads even where it is masked.
    asked : list of (row, column) whose logits are wanted
    """

    tokens: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    slots: NDArray[np.int64]
    asked: list[tuple[int, int]]


class SlotEngine(Engine):
    """An engine whose keys and values are in slots. `forward` is for contexts that the slots cannot hold.

    slot_bytes : bytes of keys and values per token
    """

    slot_bytes: int

    @abstractmethod
    def reserve(self, slots: int) -> None:
        """Make room for slots 0 .. slots - 1, keeping what is in them."""

    @abstractmethod
    def run(self, batch: Batch) -> Any:
        """(len(batch.asked), >= V) logits, as of `forward`, of the token after each asked place."""


class FunctionEngine(Engine):
    """Calls `function(ids)` for (size,) logits of the token after `ids`, which may be empty, and keeps nothing."""

    reads_empty = True

    def __init__(self, function: Callable[[list[int]], Any], size: int) -> None:
        self.function = function
        self.size: int = size

    def forward(self, contexts: list[list[int]], asked: list[tuple[int, int]]) -> NDArray[Any]:
        self.tokens += sum(n for _, n in asked)
        return np.stack([self._logits(contexts[i][:n]) for i, n in asked])

    def _logits(self, ids: list[int]) -> NDArray[np.float64]:
        try:
            logits = np.asarray(self.function(ids), dtype=np.float64)
        except Exception as error:
            if not ids:
                error.add_note("the prompt is empty, and so are the ids: give some text if the function wants any")
            raise
        if logits.shape != (self.size,):
            raise ValueError(
                f"the model's function gave an array of shape {logits.shape} after the tokens {ids}; it must give one "
                f"logit for each of the {self.size} tokens of the vocabulary, shape ({self.size},)"
            )
        return logits
