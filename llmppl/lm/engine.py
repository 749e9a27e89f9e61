"""Engine: interface of a program that computes logits from tokens. FunctionEngine: the simplest one.

An engine of another library, with a cache of its own or none, is a subclass of `Engine` with one method:

    class Mine(Engine):
        def forward(self, contexts, asked):
            self.tokens += ...                          # number of tokens that were run
            return np.stack([logits after contexts[i][:n] for i, n in asked])

    lm = CachedTransformer(Mine(), tokenizer)

`llmppl.testing.check_engine` tests an engine. A `SlotEngine` keeps keys and values in numbered *slots*, one for each
token of each context, which the cache (`llmppl.lm.cache`) assigns.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmppl.distributions import ArrayTable, Table

LARGE = 1e6  # above it, the sum of a logit and a log-probability is too inexact


class Engine(ABC):
    """Language model as the cache sees it. One CachedTransformer uses it, one thread at a time.

    The caller caches answers, so an engine is rarely asked twice. The engine may keep more, such as keys and values.
    It has its own limits, and splits a call that is too large for one pass.

    Attributes
    ----------
    name : str
        Model, file and number format: different for engines with different answers. Checkpoints compare it.
    max_length : int or None
        Longest context it can read. llmppl refuses longer ones before it calls the engine.
    eos_ids : sequence of int
        Tokens that end a text, besides those that the tokenizer names.
    reads_empty : bool
        True if `forward` answers an empty context, asked (i, 0). A prompt may then be empty without a BOS token.
    tokens : int
        Number of tokens run since it was made. Tokens whose keys and values it had kept do not count.

    Examples
    --------
    >>> class Repeater(Engine):                             # the last token has weight 3, another one 1
    ...     def forward(self, contexts, asked):
    ...         self.tokens += sum(n for _, n in asked)
    ...         return math.log(3) * np.eye(2)[[contexts[i][n - 1] for i, n in asked]]
    >>> repeater = CachedTransformer(Repeater(), Vocabulary([b"a", b"b"]))
    >>> np.exp(repeater.context("ab").log_probs()).round(4)
    array([0.25, 0.75])
    """

    name: str = ""
    max_length: int | None = None
    eos_ids: Sequence[int] = ()
    reads_empty: bool = False
    tokens: int = 0
    owner: weakref.ref[Any]  # evaluator of the CachedTransformer, which sets it

    @abstractmethod
    def forward(self, contexts: list[list[int]], asked: list[tuple[int, int]]) -> Any:
        """Return the logits of next tokens, for all questions of one round.

        Parameters
        ----------
        contexts : list of list of int
            Token ids from the start of the text, of unequal lengths. No context is a prefix of another. The engine
            does not change them.
        asked : list of (int, int)
            (i, n) asks for the token after the first n tokens of `contexts[i]`. Each whole context is asked for;
            prefixes of it may be.

        Returns
        -------
        (len(asked), >= V) float32 or float64, an ndarray or a torch tensor on any device
            Logits, not normalised; -inf for a token that cannot follow.
        """

    def release(self, contexts: list[list[int]]) -> None:  # noqa: B027
        """Note that nobody holds these contexts, or continuations of them, any more. They may still be asked for.

        Each context without its last token is held, or empty.
        """

    def clear(self) -> None:  # noqa: B027
        """Drop all kept keys and values: a call failed or was interrupted, or the weights have changed."""


@dataclass
class Batch:
    """Tokens of one forward pass. Each row continues one context.

    tokens : (B, Q) int64, right-padded with 0
    starts : (B,) int64, number of tokens of the row's context before its new tokens
    lengths : (B,) int64, number of new tokens of the row
    slots : (B, T) int64, slots of the row's whole context, new tokens included; T is the longest context.
        Right-padded with the row's first slot. A slot of another context may hold NaN, which spreads through masks.
    asked : list of (row, column) of the tokens after which logits are needed

    Examples
    --------
    >>> engine, ids = lm.engine.renewed(), [int(token) for token in lm.context("Once upon a").tokens]
    >>> engine.reserve(3)
    >>> one = {"starts": np.array([0]), "lengths": np.array([3]), "slots": np.array([[0, 1, 2]])}
    >>> logits = engine.run(Batch(np.array([ids]), **one, asked=[(0, 2)]))
    >>> str(lm.vocab[logits[0].argmax()])
    ' time'
    """

    tokens: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    slots: NDArray[np.int64]
    asked: list[tuple[int, int]]


class SlotEngine(Engine):
    """Engine whose keys and values are in slots. `forward` is for contexts that the slots cannot hold.

    slot_bytes : bytes of keys and values per token

    Examples
    --------
    >>> isinstance(lm.engine, SlotEngine), lm.engine.slot_bytes
    (True, 4608)
    """

    slot_bytes: int

    def renewed(self) -> SlotEngine:
        """Return the engine for a new cache. One that several caches may have returns itself with empty slots."""
        return self

    @abstractmethod
    def reserve(self, slots: int) -> None:
        """Enlarge the memory to slots 0 .. slots - 1; the contents of present slots stay."""

    @abstractmethod
    def run(self, batch: Batch) -> Any:
        """Return (len(batch.asked), >= V) logits, as `forward` does, of the token after each asked one."""


class FunctionEngine(Engine):
    """Engine that calls `function(ids)` for the (size,) logits after `ids`, which may be empty. It keeps nothing."""

    reads_empty = True

    def __init__(self, function: Callable[[list[int]], Any], size: int) -> None:
        self.function = function
        self.size = size

    def forward(self, contexts: list[list[int]], asked: list[tuple[int, int]]) -> NDArray[Any]:
        self.tokens += sum(n for _, n in asked)
        return np.stack([self._logits(contexts[i][:n]) for i, n in asked])

    def _logits(self, ids: list[int]) -> NDArray[np.float64]:
        logits = np.asarray(self.function(ids), dtype=np.float64)
        if logits.shape != (self.size,):
            raise ValueError(
                f"the model's function returned an array of shape {logits.shape} after the tokens {ids}; it must "
                f"return one logit for each of the {self.size} tokens of the vocabulary, shape ({self.size},)"
            )
        return logits


def tables_of_logits(
    logits: NDArray[Any], size: int, unknown: NDArray[np.int64], describe: Callable[[int], str]
) -> list[Table]:
    """Return A tables of `size` log-weights from (A, n) logits. Ids in `unknown`, or from n on, are impossible.

    Raises a FloatingPointError if a row of logits gives no distribution; `describe(row)` names its context.
    """
    tables = list[Table]()
    for i, given in enumerate(logits[:, :size]):
        row = np.empty(size, given.dtype)  # a copy: a view would keep all rows alive
        row[: len(given)] = given
        row[len(given) :] = -np.inf
        row[unknown] = -np.inf
        top = float(row.max())
        if not abs(top) <= LARGE:
            row -= np.asarray(check_top(top, describe(i)), row.dtype)
            top = 0.0
        row.setflags(write=False)
        tables.append(ArrayTable(row, top=top))
    return tables


def check_top(top: float, context: str) -> float:
    """Return `top`, the largest logit after `context`; FloatingPointError if it is not finite."""
    if math.isfinite(top):
        return top
    kind = {math.inf: "+inf", -math.inf: "-inf alone"}.get(top, "NaN")
    raise FloatingPointError(
        f"the model's logits after {context} hold {kind}: they give no distribution"
    )
