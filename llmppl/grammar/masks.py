"""Masks of grammars: the reading of a vocabulary's tokens kept apart from the parser.

One idea: what terminals a token's bytes make depends on where the lexer stands, not on the parser's stack, but for the
choice of the lexer that reads on. So the vocabulary is read once for each scan, whatever the stack: a *quotient* holds
its tokens in classes that no stack tells apart, and says which terminals may end within tokens, and where. A mask is
then made of the quotient's classes by giving the parser those terminals, some hundred at most; what has ended within
tokens leads to quotients of the parts of tokens behind. What is found holds for all stacks whose topmost states are
equal down to the lowest that was read, and is kept by these.

Words: an *outcome* is what bytes make of scans: the scans in which the token goes on, and the ways in which it ends.

Source: Willard & Louf (2023), "Efficient Guided Generation for Large Language Models", section 4.2: an index by the
terminals that begin and end in a token, and by the tops of the stacks that admit them.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llmppl.grammar.completion import Judge
from llmppl.grammar.lalr import Stack
from llmppl.grammar.lexing import Ended, Outcome, Scans
from llmppl.masks.constraint import Ints
from llmppl.masks.trie import Trie
from llmppl.masks.walks import FLAG, walk
from llmppl.shared import Shared

WIDE = 32                                           # sets of more than V / WIDE tokens are kept as bits
Bits = npt.NDArray[np.uint8]
NOTHING = np.zeros(0, np.int32)


class Found:
    """Tokens that may follow: some by `ids` (int32), more by their `bits`; all together `packed`, where asked for."""

    __slots__ = ("ids", "bits", "packed")

    def __init__(self, ids: list[npt.NDArray[np.int32]], bits: list[Bits]) -> None:
        self.ids = ids[0] if len(ids) == 1 else np.concatenate(ids) if ids else NOTHING
        self.bits = bits
        self.packed: bytes | None = None


class Tokens(NamedTuple):
    """Tokens of a quotient that end alike: they may follow a stack to which something is admitted that they promise.

    And if they promise nothing that is, they may follow where a text completes what has just ended, or goes on.
    """

    promised: int                                   # bits, as of `Parser.admitted`
    ends: tuple[Ended, ...]
    scans: tuple[int, ...]
    ids: npt.NDArray[Any]                           # int32 ids, or uint8 bits of the vocabulary


class Quotient(NamedTuple):
    """The tokens below some nodes of the trie, read from some scans, in classes that no parser stack tells apart.

    A way is what may end within tokens, the nodes where it does (int32), and by lexer the quotient of what is below.
    """

    bits: int                                       # of all terminals that matter
    tokens: list[Tokens]
    ways: list[tuple[int, Ended, bytes, dict[int, Quotient]]]       # the bit of the symbol first
    tops: dict[int, Any]                            # state of the parser -> the same for those below, in the end Found


class _Outcomes:
    """The outcomes of bytes as a graph (`llmppl.masks.walks`), numbered as they are met.

    0 is where the token cannot go on. An entry has FLAG where its byte may come behind what ends in the outcome.
    """

    def __init__(self, scans: Scans) -> None:
        self.scans = scans
        self.outcomes: list[Outcome] = []
        self.table = np.full((256, 256), -1, np.int32)
        self.ready = np.ones(256, bool)
        self._number: dict[Outcome, int] = {}
        self._flags: dict[tuple[Ended, ...], npt.NDArray[np.int32]] = {}
        self.number((), ())

    def number(self, scans: tuple[int, ...], ends: tuple[Ended, ...]) -> int:
        found = self._number.get((scans, ends))
        if found is None:
            found = len(self._number)
            if found == len(self.table):
                self.ready = np.ones(2 * found, bool)
                self.table = np.concatenate([self.table, np.full_like(self.table, -1)])
            self.table[found] = -1 if scans else self._flags_of(ends)
            self.outcomes[found:] = [(scans, ends)]
            self._number[scans, ends] = found       # last: what an interrupt has left is written over
        return found

    def _flags_of(self, ends: tuple[Ended, ...]) -> npt.NDArray[np.int32]:
        """(256,) FLAG at the bytes that may come behind one of the ends."""
        found = self._flags.get(ends)
        if found is None:
            heads = [self.scans.heads(end.rest) for end in ends]
            found = self._flags[ends] = np.logical_or.reduce([np.zeros(256, bool), *heads]).astype(np.int32) * FLAG
        return found

    def fill(self, number: int, bytes: Ints, /) -> None:
        """Make known where an outcome goes with some bytes, and with those that its scans do not tell from them."""
        scans, ends = self.outcomes[number]
        flags = self._flags_of(ends)
        cuts = self.scans.classes(scans[0]) if len(scans) == 1 else sorted(set().union(*map(self.scans.classes, scans)))
        for i in {bisect_right(cuts, byte) for byte in bytes.tolist()}:
            steps = [self.scans.step(scan, cuts[i - 1]) for scan in scans]
            if len(steps) > 1:
                going_on = tuple(sorted({scan for step in steps for scan in step[0]}))
                steps = [(going_on, tuple(dict.fromkeys(end for step in steps for end in step[1])))]
            after = self.number(*steps[0])          # which may replace the table
            some = slice(cuts[i - 1], cuts[i] if i < len(cuts) else 256)
            self.table[number, some] = flags[some] | after


class Masks(Shared):
    """The masks of a grammar over a vocabulary."""

    def __init__(self, judge: Judge, trie: Trie) -> None:
        self.judge, self.trie = judge, trie
        self.made = 0                               # masks worked out since `forget`
        self._outcomes = _Outcomes(judge.scans)
        self._quotients: dict[tuple[bytes, tuple[int, ...]], Quotient] = {}
        self._joined: dict[frozenset[bytes], bytes] = {}
        self._equal: dict[bytes, bytes] = {}        # equal ones are one object
        self._kinds: dict[int, tuple[int, tuple[Ended, ...], tuple[int, ...]]] = {}

    def forget(self) -> None:
        """Drop all that is kept by stack."""
        self.made = 0
        self._joined.clear()
        self._equal.clear()
        for quotient in self._quotients.values():
            quotient.tops.clear()

    @property
    def nbytes(self) -> int:
        """Of the quotients: their tokens, and the nodes where something ends within tokens."""
        return sum(
            sum(tokens.ids.nbytes for tokens in quotient.tokens) + sum(len(nodes) for *_, nodes, _ in quotient.ways)
            for quotient in self._quotients.values()
        )

    def __repr__(self) -> str:
        return f"<the vocabulary read from {len(self)} places of the lexer, {self.nbytes} bytes>"

    def __len__(self) -> int:
        """The number of quotients read so far."""
        return len(self._quotients)

    def read_all(self, max_quotients: int) -> None:
        """Read the vocabulary from every scan that a text may lead to, and all that quotients lead to.

        Raises
        ------
        ValueError
            If there are more than `max_quotients`.
        """
        judge, scans = self.judge, self.judge.scans
        after = judge.parser.lexers_after(judge.lexer_of)
        every = set(range(len(scans.lexers)))
        begun = {(judge.lexer_of[judge.parser.bottom.state], scans.first)}
        todo = list(begun)
        for lexer, rest in todo:
            for scan in scans.start(lexer, rest):
                for symbol, left in judge.completion.ends(scan):
                    new = {(each, left) for each in ({lexer} if symbol is None else after[str(symbol)])} - begun
                    begun |= new
                    todo += new
            self._refuse_more(max(len(todo), len(scans.scans)), max_quotients)
        quotients = [self._quotient(b"", (scan,)) for scan in range(len(scans.scans))]
        seen = set(map(id, quotients))
        for quotient in quotients:
            for _, (symbol, rest), nodes, children in quotient.ways:
                for lexer in every if symbol is None else after[str(symbol)]:
                    child = children[lexer] = self._quotient(nodes, scans.start(lexer, rest))
                    if id(child) not in seen:
                        seen.add(id(child))
                        quotients.append(child)
            self._refuse_more(len(quotients), max_quotients)

    def _refuse_more(self, number: int, most: int) -> None:
        if number > most:
            raise ValueError(f"more than {most} quotients: terminals leave too much behind them that may still match")

    def bits(self, hypotheses: Iterable[tuple[Stack, int]]) -> bytes:
        """A bit for every token (as by np.packbits): whether it may follow under one of the hypotheses."""
        packed = []
        for stack, scan in hypotheses:
            found = self._tokens(self._quotient(b"", (scan,)), stack)
            packed.append(found.packed or self._pack(found))
        if len(packed) == 1:
            return packed[0]
        key = frozenset(packed)
        joined = self._joined.get(key)
        if joined is None:
            bits = np.zeros((len(self.trie.tokens) + 7) // 8, np.uint8)
            for each in key:
                bits |= np.frombuffer(each, np.uint8)
            joined = self._joined[key] = bits.tobytes()
        return joined

    def _pack(self, found: Found) -> bytes:
        mask = np.zeros(len(self.trie.tokens), bool)
        mask[found.ids] = True
        bits = np.packbits(mask)
        for more in found.bits:
            bits |= more
        packed = bits.tobytes()
        found.packed = self._equal.setdefault(packed, packed)
        return found.packed

    def _tokens(self, quotient: Quotient, stack: Stack) -> Found:
        """The tokens of a quotient that may follow a stack."""
        return self.judge.parser.recall_by_tops(quotient.tops, stack, functools.partial(self._collect, quotient))

    def _collect(self, quotient: Quotient, stack: Stack) -> Found:
        self.made += 1
        judge = self.judge
        feed = judge.parser.feed
        narrow: list[npt.NDArray[np.int32]] = []
        wide: list[Bits] = []
        admitted = judge.parser.admitted(stack, quotient.bits)
        for promised, ends, scans, ids in quotient.tokens:
            if promised & admitted or (scans or ends) and self._may_follow(stack, scans, ends):
                (wide if ids.itemsize == 1 else narrow).append(ids)
        for bit, (symbol, rest), below, children in quotient.ways:
            if not bit & admitted:
                continue
            top = stack if symbol is None else feed(stack, symbol)
            if top is not None:
                lexer = judge.lexer_of[top.state]
                child = children.get(lexer)
                if child is None:
                    child = children[lexer] = self._quotient(below, judge.scans.start(lexer, rest))
                if child.tokens or child.ways:
                    more = self._tokens(child, top)
                    if more.ids.size:
                        narrow.append(more.ids)
                    wide += more.bits
        return Found(narrow, wide)

    def _may_follow(self, stack: Stack, scans: tuple[int, ...], ends: tuple[Ended, ...]) -> bool:
        """Whether some text, or none, completes a stack after a token that goes on in one of `scans`, or ends."""
        if any(self.judge.finishable(stack, scan) for scan in scans):
            return True
        tops = [(stack if symbol is None else self.judge.parser.feed(stack, symbol), rest) for symbol, rest in ends]
        return any(top is not None and self.judge.may_follow(top, rest) for top, rest in tops)

    def _quotient(self, nodes: bytes, scans: tuple[int, ...]) -> Quotient:
        """The quotient of the tokens below some nodes (int32; b"": all tokens), read from some scans."""
        found = self._quotients.get((nodes, scans))
        if found is None:
            found = self._quotients[nodes, scans] = self._read(np.frombuffer(nodes, np.int32), scans)
        return found

    def _read(self, nodes: Ints, scans: tuple[int, ...]) -> Quotient:
        trie, outcomes = self.trie, self._outcomes
        start = outcomes.number(scans, ())
        above = nodes if nodes.size else np.array([-1])
        found = walk(outcomes, trie, np.full(above.size, start), above)
        ids, ends, _ = trie.tokens_at(found.nodes, found.states, found.begin)
        classes: dict[tuple[int, tuple[Ended, ...], tuple[int, ...]], list[npt.NDArray[np.int32]]] = {}
        for outcome, some in _groups(ids, ends):
            classes.setdefault(self._kind(outcome), []).append(some)
        tokens = []
        for kind, parts in classes.items():
            some = np.concatenate(parts)                # a copy: each is a part of a long array
            if some.size * WIDE > len(trie.tokens):
                mask = np.zeros(len(trie.tokens), bool)
                mask[some] = True
                tokens.append(Tokens(*kind, np.packbits(mask)))
            else:
                tokens.append(Tokens(*kind, some))
        where: dict[Ended, list[npt.NDArray[np.int32]]] = {}
        for outcome, some in _groups(found.flagged, found.flagged_states):
            for end in outcomes.outcomes[outcome][1]:
                where.setdefault(end, []).append(some)
        bits = self.judge.parser.bits
        ways: list[tuple[int, Ended, bytes, dict[int, Quotient]]] = [
            (bits[end.symbol and str(end.symbol)], end, np.unique(np.concatenate(each)).tobytes(), {})
            for end, each in where.items()
        ]
        matter = functools.reduce(int.__or__, [each[0] for each in (*tokens, *ways)], 0)
        return Quotient(matter, tokens, ways, {})

    def _kind(self, outcome: int) -> tuple[int, tuple[Ended, ...], tuple[int, ...]]:
        """What tokens of an outcome promise; and the ends and scans to judge singly, unless that says all."""
        found = self._kinds.get(outcome)
        if found is None:
            judge, (scans, ended) = self.judge, self._outcomes.outcomes[outcome]
            later = {judge.outlook(scan): scan for scan in scans}
            promised, plain = judge.promises(frozenset(ended).union(*(ends for ends, _ in later)))
            plain = plain and all(whole for _, whole in later)
            found = self._kinds[outcome] = (promised, (), ()) if plain else (promised, ended, tuple(later.values()))
        return found


def _groups(values: npt.NDArray[np.int32], keys: npt.NDArray[np.int32]) -> list[tuple[int, npt.NDArray[np.int32]]]:
    """The values of each key, in their order."""
    if keys.size < 64:
        found: dict[int, list[int]] = {}
        for key, value in zip(keys.tolist(), values.tolist(), strict=True):
            found.setdefault(key, []).append(value)
        return [(key, np.array(some, np.int32)) for key, some in found.items()]
    order = np.argsort(keys.astype(np.uint16) if keys.max() < 1 << 16 else keys, kind="stable")   # radix sort
    values, keys = values[order], keys[order]
    cuts = (np.flatnonzero(keys[1:] != keys[:-1]) + 1).tolist()
    pairs = zip([0, *cuts], [*cuts, keys.size], strict=True)
    return [(int(keys[a]), values[a:b]) for a, b in pairs]
