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

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llmppl.constraints.constraint import Ints
from llmppl.constraints.lark.completion import Completion
from llmppl.constraints.lark.lexer import Ended, Outcome, PartialTokens
from llmppl.constraints.lark.parser import Stack, union
from llmppl.constraints.vocabulary.trie import Trie, ranges
from llmppl.constraints.vocabulary.trie_walk import Loop, MemoGraph, steps
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


FLAG = 1 << 30                                      # bit in an entry of a table, added to the next outcome
LEAST = 8                                           # bytes that a loop has at least
MOST = 16                                           # loops that are kept per vocabulary
LARGE = 500                                         # nodes below the places of an outcome that may have a loop


class _Outcomes(MemoGraph):
    """The outcomes of bytes as a graph: 0 is the outcome without continuation.

    An entry has FLAG if its byte may follow a token that ends in the outcome.
    """

    def __init__(self, partials: PartialTokens, trie: Trie) -> None:
        super().__init__(partials)
        self._kept: Memo[bytes, Loop] = trie.loops.setdefault("bytes", Memo(partial(Loop, trie), MOST))
        self.states = [((), ())]
        self.ids = {((), ()): 0}
        self._flags = Memo(self._find_flags)
        self.loops: Memo[int, Loop | None] = Memo(self._find_loop)

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

    def _find_loop(self, number: int) -> Loop | None:
        """Return the loop of an outcome; None if it has few bytes."""
        if self.states[number][0]:
            self.fill(number, np.arange(256))
        looping = self.table[number] == number
        return self._kept[looping.tobytes()] if np.count_nonzero(looping) >= LEAST else None


class Masks(Shared):
    """The masks of a grammar over a vocabulary."""

    def __init__(self, completion: Completion, trie: Trie) -> None:
        self.completion = completion
        self.parser = completion.parser
        self.trie = trie
        self.made = 0                               # masks made since `forget`
        self._outcomes = _Outcomes(completion.partials, trie)
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
        return self.parser.recall_by_tops(quotient.memo, stack, partial(self._collect, quotient))

    def _collect(self, quotient: Quotient, stack: Stack) -> bytes:
        self.made += 1
        completion = self.completion
        parser = self.parser
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
        outcomes = self._outcomes
        nodes = np.frombuffer(key[0], np.int32)
        start = outcomes.number((key[1], ()))
        found, flagged = self._walk(nodes if nodes.size else np.array([-1]), start)
        kinds = defaultdict(list)
        for outcome, some in found:
            kinds[self._kinds[outcome]].append(some)
        classes = [TokenClass(*kind, self._bits_of(parts)) for kind, parts in kinds.items()]
        where = defaultdict(list)
        for outcome, some in flagged:
            for end in outcomes.states[outcome][1]:
                where[end].append(some)
        bits = self.parser.bits
        crossings = [
            Crossing(bits[end.terminal], end, np.unique(np.concatenate(each)).astype(np.int32).tobytes(), {})
            for end, each in where.items()
        ]
        return Quotient(union([each[0] for each in (*classes, *crossings)]), classes, crossings, {})

    def _walk(self, nodes: Ints, start: int) -> tuple[list[tuple[int, Ints]], list[tuple[int, Ints]]]:
        """Return the tokens below some nodes by their outcomes, and the nodes before an entry with FLAG by theirs."""
        trie = self.trie
        outcomes = self._outcomes
        above = trie.place[nodes]
        size = trie.num_children[above]
        place = ranges(trie.first_child[above], size)
        states = np.full(place.size, start)
        found = []
        ended = list[tuple[Ints, Ints]]()
        flagged = list[tuple[Ints, Ints]]()
        while place.size:
            after = steps(outcomes, states, trie.bytes[place])
            if ended:                                   # no token ends at the first nodes
                marked = np.flatnonzero(after >= FLAG)
                if marked.size:
                    flagged.append((trie.nodes[trie.parent[place[marked]]], states[marked]))
            after &= FLAG - 1
            alive = after.nonzero()[0]
            place = place[alive]
            states = after[alive]
            exits = []
            below = trie.below[place]
            for state in np.flatnonzero(np.bincount(states, below) > LARGE).tolist() if below.sum() > LARGE else ():
                if (loop := outcomes.loops[state]) is not None:
                    ids, out = loop.below(place[states == state])
                    found.append((state, ids))
                    exits.append((out, np.full(out.size, state)))
                    others = states != state
                    place = place[others]
                    states = states[others]
            ended.append(trie.tokens_ending(place, states))
            size = trie.num_children[place]
            place = ranges(trie.first_child[place], size)
            states = states.repeat(size)
            if exits:
                place, states = map(np.concatenate, zip((place, states), *exits, strict=True))
        return found + _groups(ended), _groups(flagged)

    def _bits_of(self, parts: list[Ints]) -> bytes:
        mask = np.zeros(len(self.trie.tokens), bool)
        for ids in parts:
            mask[ids] = True
        return np.packbits(mask).tobytes()

    def _find_kind(self, outcome: int) -> Kind:
        """Return the proofs of an outcome's tokens, and the ends and partial tokens that may follow without one."""
        completion = self.completion
        tokens, ended = self._outcomes.states[outcome]
        proofs = union(completion.ends[token] for token in tokens) & ~completion.newline
        proofs |= union(self.parser.bits[end.terminal] for end in ended if completion.sure[end])
        lines = tuple([token for token in tokens if completion.ends[token] & completion.newline])
        return proofs, tuple([end for end in ended if not completion.sure[end]]), lines


def _groups(parts: list[tuple[Ints, Ints]]) -> list[tuple[int, Ints]]:
    """Return the values of each key, of parts that are values and their keys."""
    if not any(values.size for values, _ in parts):
        return []
    values, keys = map(np.concatenate, zip(*parts, strict=True))
    return [(key, values[keys == key]) for key in np.flatnonzero(np.bincount(keys)).tolist()]
