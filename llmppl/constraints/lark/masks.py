"""Masks of grammars: the vocabulary is read by the lexer alone, and the parser then selects classes of tokens.

The terminals in a token's bytes depend on the partial token before it, and hardly on the parser's stack, which only
chooses the next lexer. So the vocabulary is read once for each partial token. The result, a *quotient*, holds the
tokens in classes that no stack tells apart. Its *crossings* name the terminals that may end within tokens, and where.
For a mask, the parser is fed the terminals of the quotient, a hundred or so. After a crossing, the rests of the tokens
have a quotient of their own. An answer is kept for all stacks with equal states down to the lowest that was read.

An *outcome* of bytes is the partial tokens that continue, and the ways in which a token ends.

Source: Willard & Louf (2023), "Efficient Guided Generation for Large Language Models", section 4.2. It indexes tokens
by the terminals that begin and end in them, and by the tops of the stacks that admit these.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llmppl.constraints.constraint import Ints
from llmppl.constraints.lark.completion import Completion
from llmppl.constraints.lark.lexer import Ended, Outcome, PartialTokens
from llmppl.constraints.lark.parser import Stack, union
from llmppl.constraints.vocabulary.trie import Trie
from llmppl.constraints.vocabulary.trie_walk import FLAG, MemoGraph, walk
from llmppl.support.graphs import Memo
from llmppl.support.shared import Shared

Key = tuple[bytes, tuple[int, ...]]                 # nodes (int32; b"": all tokens), and partial tokens
Kind = tuple[int, tuple[Ended, ...], tuple[int, ...]]   # the first three of a TokenClass


class TokenClass(NamedTuple):
    """Tokens of a quotient that no stack tells apart.

    They may follow a stack that admits one of their proofs, and where one of the ends or of `going_on` may.
    """

    proofs: int                                     # bits, as of `Parser.admitted`
    ends: tuple[Ended, ...]
    going_on: tuple[int, ...]                       # partial tokens
    tokens: bytes                                   # bits of the vocabulary (np.packbits)


class Crossing(NamedTuple):
    """A terminal that may end within tokens, the nodes where it does (int32), and by lexer the quotient below these."""

    bit: int                                        # of the symbol
    end: Ended
    nodes: bytes
    below: dict[int, Quotient]


class Quotient(NamedTuple):
    """The tokens below some nodes of the trie, read from some partial tokens."""

    bits: int                                       # of all terminals that matter
    classes: list[TokenClass]
    crossings: list[Crossing]
    memo: dict[Any, Any]                            # state of the parser -> the same for those below, or tokens


class _Outcomes(MemoGraph):
    """The outcomes of bytes as a graph: 0 is the outcome without continuation.

    An entry has FLAG if its byte may follow a token that ends in the outcome.
    """

    def __init__(self, partials: PartialTokens) -> None:
        super().__init__(partials)
        self.states, self.ids = [((), ())], {((), ()): 0}
        self._flags = Memo(self._find_flags)

    def new_row(self, state: Outcome) -> Ints | int:
        return -1 if state[0] else self._flags[state[1]]

    def _find_flags(self, ends: tuple[Ended, ...]) -> npt.NDArray[np.int32]:
        """Return FLAG at the bytes that may follow one of the ends, (256,)."""
        heads = [self.recognizer.heads[end.obligation] for end in ends]
        flags: npt.NDArray[np.int32] = np.logical_or.reduce([np.zeros(256, bool), *heads]).astype(np.int32) * FLAG
        return flags

    def fill(self, number: int, bytes: Ints, /) -> None:
        """Fill in the outcomes after some bytes, and after the bytes of their classes."""
        tokens, ends = self.states[number]
        flags = self._flags[ends]
        cuts = sorted(set().union(*map(self.recognizer.classes.__getitem__, tokens)))
        for i in {bisect_right(cuts, byte) for byte in bytes.tolist()}:
            after = self.number(self.recognizer.step_all(tokens, cuts[i - 1]))   # which may replace the table
            some = slice(cuts[i - 1], [*cuts, 256][i])
            self.table[number, some] = flags[some] | after


class Masks(Shared):
    """The masks of a grammar over a vocabulary."""

    def __init__(self, completion: Completion, trie: Trie) -> None:
        self.completion, self.parser, self.trie = completion, completion.parser, trie
        self.made = 0                               # masks made since `forget`
        self._outcomes = _Outcomes(completion.partials)
        self.quotients = Memo(self._read)
        self._kinds = Memo(self._find_kind)         # by outcome

    def forget(self) -> None:
        """Drop all answers that are kept by stack."""
        self.made = 0
        for quotient in self.quotients.values():
            quotient.memo.clear()

    def bits(self, hypotheses: Iterable[tuple[Stack, int]]) -> bytes:
        """Return the tokens that may follow under one of the hypotheses, as bits (np.packbits)."""
        return self._union([self._tokens(self.quotients[b"", (token,)], stack) for stack, token in hypotheses])

    def _union(self, sets: list[bytes]) -> bytes:
        if len(sets) == 1:
            return sets[0]
        bits = np.zeros((len(self.trie.tokens) + 7) // 8, np.uint8)
        for each in sets:
            bits |= np.frombuffer(each, np.uint8)
        return bits.tobytes()

    def _tokens(self, quotient: Quotient, stack: Stack) -> bytes:
        """Return the tokens of a quotient that may follow a stack."""
        return self.parser.recall_by_tops(quotient.memo, stack, functools.partial(self._collect, quotient))

    def _collect(self, quotient: Quotient, stack: Stack) -> bytes:
        self.made += 1
        completion, parser = self.completion, self.parser
        admitted = parser.admitted(stack, quotient.bits)
        sets = [
            tokens
            for proofs, ends, going_on, tokens in quotient.classes
            if proofs & admitted or self._may_follow(stack, going_on, ends)
        ]
        for bit, (symbol, obligation), nodes, below in quotient.crossings:
            top = parser.feed(stack, symbol) if bit & admitted else None
            if top is None:
                continue
            lexer = completion.lexer_of[top.state]
            child = below.get(lexer)
            if child is None:
                child = below[lexer] = self.quotients[nodes, completion.partials.starts[lexer, obligation]]
            if child.classes or child.crossings:
                sets.append(self._tokens(child, top))
        return self._union(sets)

    def _may_follow(self, stack: Stack, going_on: tuple[int, ...], ends: tuple[Ended, ...]) -> bool:
        """Check whether some text, perhaps empty, completes a stack after a token that goes on, or ends."""
        if any(self.completion.completable(stack, token) for token in going_on):
            return True
        return any(self.completion.may_follow(*place) for place in self.parser.after(stack, ends))

    def _read(self, key: Key) -> Quotient:
        """Return the quotient of the tokens below some nodes, read from some partial tokens."""
        trie, outcomes = self.trie, self._outcomes
        nodes, start = np.frombuffer(key[0], np.int32), outcomes.number((key[1], ()))
        above = nodes if nodes.size else np.array([-1])
        found = walk(outcomes, trie, np.full(above.size, start), above)
        ids, ends, _ = trie.tokens_at(found.nodes, found.states, found.begin)
        kinds: dict[Kind, list[npt.NDArray[np.int32]]] = defaultdict(list)
        for outcome, some in _groups(ids, ends):
            kinds[self._kinds[outcome]].append(some)
        classes = [TokenClass(*kind, self._bits_of(parts)) for kind, parts in kinds.items()]
        where: dict[Ended, list[npt.NDArray[np.int32]]] = defaultdict(list)
        for outcome, some in _groups(found.flagged, found.flagged_states):
            for end in outcomes.states[outcome][1]:
                where[end].append(some)
        bits = self.parser.bits
        crossings = [
            Crossing(bits[end.terminal], end, np.unique(np.concatenate(each)).tobytes(), {})
            for end, each in where.items()
        ]
        return Quotient(union([each[0] for each in (*classes, *crossings)]), classes, crossings, {})

    def _bits_of(self, parts: list[npt.NDArray[np.int32]]) -> bytes:
        mask = np.zeros(len(self.trie.tokens), bool)
        for ids in parts:
            mask[ids] = True
        return np.packbits(mask).tobytes()

    def _find_kind(self, outcome: int) -> Kind:
        """Return the proofs of an outcome's tokens, and the ends and partial tokens that may follow without one."""
        completion, (tokens, ended) = self.completion, self._outcomes.states[outcome]
        proofs = union(completion.ends[token] for token in tokens) & ~completion.newline
        proofs |= union(self.parser.bits[end.terminal] for end in ended if completion.sure[end])
        lines = tuple([token for token in tokens if completion.ends[token] & completion.newline])
        return proofs, tuple([end for end in ended if not completion.sure[end]]), lines


def _groups(values: npt.NDArray[np.int32], keys: npt.NDArray[np.int32]) -> list[tuple[int, npt.NDArray[np.int32]]]:
    """Return the values of each key, in their order."""
    if not keys.size:
        return []
    order = np.argsort(keys.astype(np.min_scalar_type(keys.max())), kind="stable")      # radix sort, if short
    values, keys = values[order], keys[order]
    cuts = (keys[1:] != keys[:-1]).nonzero()[0] + 1
    return [(int(keys[a]), values[a:b]) for a, b in itertools.pairwise([0, *cuts.tolist(), keys.size])]
