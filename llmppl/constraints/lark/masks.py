"""Masks of grammars: the reading of a vocabulary's tokens kept apart from the parser.

One idea: what terminals a token's bytes make depends on where the lexer stands, not on the parser's stack, but for the
choice of the lexer that reads on. So the vocabulary is read once for each partial token of the lexer, whatever the
stack: a *quotient* holds the vocabulary's tokens in classes that no stack tells apart, and says which terminals may end
within tokens, and where (its *crossings*). A mask is then made of the quotient's classes by giving the parser those
terminals, some hundred at most; what has ended within tokens leads to quotients of the parts of tokens behind. What is
found holds for all stacks whose topmost states are equal down to the lowest that was read, and is kept by these.

Words: an *outcome* is what bytes make of partial tokens: those with which it goes on, and the ways in which it ends.

Source: Willard & Louf (2023), "Efficient Guided Generation for Large Language Models", section 4.2: an index by the
terminals that begin and end in a token, and by the tops of the stacks that admit them.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llmppl.constraints.constraint import Ints
from llmppl.constraints.lark.completion import Completability
from llmppl.constraints.lark.lalr import Stack
from llmppl.constraints.lark.lalr_tables import union
from llmppl.constraints.lark.lexer import Ended, Outcome, PartialTokens
from llmppl.constraints.vocabulary.trie import Trie
from llmppl.constraints.vocabulary.trie_walk import FLAG, walk
from llmppl.support.graphs import Memo, reached
from llmppl.support.shared import Shared

MAX_PART_AS_IDS = 1 / 32                            # of the vocabulary: larger sets are kept as bits
Bits = npt.NDArray[np.uint8]
NOTHING = np.zeros(0, np.int32)
Key = tuple[bytes, tuple[int, ...]]                 # nodes (int32; b"": all tokens), and partial tokens
Kind = tuple[int, tuple[Ended, ...], tuple[int, ...]]   # the first three of a TokenClass


class TokenSet:
    """Tokens that may follow: some by `ids` (int32), more by their `bits`; all together `packed`, where asked for."""

    __slots__ = ("ids", "bits", "packed")

    def __init__(self, ids: list[npt.NDArray[np.int32]], bits: list[Bits]) -> None:
        self.ids = ids[0] if len(ids) == 1 else np.concatenate([NOTHING, *ids])
        self.bits = bits
        self.packed: bytes | None = None


class TokenClass(NamedTuple):
    """Tokens of a quotient that end alike: they may follow a stack to which one of their certificates is admitted.

    And otherwise, where a text completes what has just ended, or goes on.
    """

    certificates: int                               # bits, as of `Parser.admitted`
    ends: tuple[Ended, ...]
    going_on: tuple[int, ...]                       # partial tokens
    ids: npt.NDArray[Any]                           # int32 ids, or uint8 bits of the vocabulary


class Crossing(NamedTuple):
    """What may end within tokens, the nodes where it does (int32), and by lexer the quotient of what is below."""

    bit: int                                        # of the symbol
    end: Ended
    nodes: bytes
    below: dict[int, Quotient]


class Quotient(NamedTuple):
    """The tokens below some nodes of the trie, read from some partial tokens, in classes that no stack tells apart."""

    bits: int                                       # of all terminals that matter
    classes: list[TokenClass]
    crossings: list[Crossing]
    memo: dict[Any, Any]                            # state of the parser -> the same for those below, or a TokenSet


class _Outcomes:
    """The outcomes of bytes as a graph (`llmppl.constraints.vocabulary.trie_walk`), numbered as they are met.

    0 is where the token cannot go on. An entry has FLAG where its byte may come behind what ends in the outcome.
    """

    def __init__(self, partials: PartialTokens) -> None:
        self.partials = partials
        self.outcomes: list[Outcome] = []
        self.table = np.full((256, 256), -1, np.int32)
        self.table[0] = 0
        self.ready = np.ones(256, bool)
        self._number: dict[Outcome, int] = {}
        self._flags = Memo(self._find_flags)
        self.number((), ())

    def number(self, going_on: tuple[int, ...], ends: tuple[Ended, ...]) -> int:
        found = self._number.get((going_on, ends))
        if found is None:
            found = len(self._number)
            if found == len(self.table):
                self.ready = np.ones(2 * found, bool)
                self.table = np.concatenate([self.table, np.full_like(self.table, -1)])
            self.table[found] = -1 if going_on else self._flags[ends]
            self.outcomes[found:] = [(going_on, ends)]
            self._number[going_on, ends] = found    # last: what an interrupt has left is written over
        return found

    def _find_flags(self, ends: tuple[Ended, ...]) -> npt.NDArray[np.int32]:
        """(256,) FLAG at the bytes that may come behind one of the ends."""
        heads = [self.partials.heads[end.residue] for end in ends]
        flags: npt.NDArray[np.int32] = np.logical_or.reduce([np.zeros(256, bool), *heads]).astype(np.int32) * FLAG
        return flags

    def fill(self, number: int, bytes: Ints, /) -> None:
        """Make known where an outcome goes with some bytes, and with those that its tokens do not tell from them."""
        tokens, ends = self.outcomes[number]
        flags = self._flags[ends]
        cuts = sorted(set().union(*map(self.partials.classes.__getitem__, tokens)))
        for i in {bisect_right(cuts, byte) for byte in bytes.tolist()}:
            after = self.number(*self.partials.step_all(tokens, cuts[i - 1]))   # which may replace the table
            some = slice(cuts[i - 1], [*cuts, 256][i])
            self.table[number, some] = flags[some] | after


class Masks(Shared):
    """The masks of a grammar over a vocabulary."""

    def __init__(self, completability: Completability, trie: Trie) -> None:
        self.completability, self.parser, self.trie = completability, completability.parser, trie
        self.made = 0                               # masks worked out since `forget`
        self._outcomes = _Outcomes(completability.partials)
        self.quotients = Memo(self._read)
        self._joined = Memo(self._join)
        self._equal: dict[bytes, bytes] = {}        # equal ones are one object
        self._kinds = Memo(self._find_kind)         # by outcome

    def forget(self) -> None:
        """Drop all that is kept by stack."""
        self.made = 0
        self._joined.clear()
        self._equal.clear()
        for quotient in self.quotients.values():
            quotient.memo.clear()

    @property
    def nbytes(self) -> int:
        """Of the quotients: their tokens, and the nodes where something ends within tokens."""
        found = list(self.quotients.values())
        tokens = sum(each.ids.nbytes for quotient in found for each in quotient.classes)
        return tokens + sum(len(crossing.nodes) for quotient in found for crossing in quotient.crossings)

    def __repr__(self) -> str:
        return f"<the vocabulary read from {len(self)} places of the lexer, {self.nbytes} bytes>"

    def __len__(self) -> int:
        """The number of quotients read so far."""
        return len(self.quotients)

    def read_all(self, max_quotients: int) -> None:
        """Read the vocabulary from every partial token that a text may lead to, and all that quotients lead to."""
        completability, partials = self.completability, self.completability.partials
        after = self.parser.lexers_after(completability.lexer_of)
        every = set(range(len(partials.lexers)))

        def places_after(place: tuple[int, int]) -> Iterator[tuple[int, int]]:
            for token in partials.starts[place]:
                for symbol, residue in completability.reductions.ends(token):
                    yield from itertools.product({place[0]} if symbol is None else after[str(symbol)], [residue])

        def quotients_below(key: Key) -> Iterator[Key]:
            for crossing in self.quotients[key].crossings:
                symbol, residue = crossing.end
                for lexer in every if symbol is None else after[str(symbol)]:
                    child = crossing.nodes, partials.starts[lexer, residue]
                    crossing.below[lexer] = self.quotients[child]
                    yield child

        begun = completability.lexer_of[self.parser.bottom.state], partials.first
        for number, _ in enumerate(reached([begun], places_after), 1):
            self._refuse_more(max(number, len(partials.tokens)), max_quotients)
        keys: list[Key] = [(b"", (token,)) for token in range(len(partials.tokens))]
        for number, _ in enumerate(reached(keys, quotients_below), 1):
            self._refuse_more(number, max_quotients)

    def _refuse_more(self, number: int, most: int) -> None:
        if number > most:
            raise ValueError(f"more than {most} quotients: terminals leave too much behind them that may still match")

    def bits(self, hypotheses: Iterable[tuple[Stack, int]]) -> bytes:
        """A bit for every token (as by np.packbits): whether it may follow under one of the hypotheses."""
        packed = []
        for stack, token in hypotheses:
            found = self._tokens(self.quotients[b"", (token,)], stack)
            packed.append(found.packed or self._pack(found))
        return packed[0] if len(packed) == 1 else self._joined[frozenset(packed)]

    def _join(self, packed: frozenset[bytes]) -> bytes:
        none = bytes((len(self.trie.tokens) + 7) // 8)
        return np.bitwise_or.reduce([np.frombuffer(each, np.uint8) for each in (none, *packed)]).tobytes()  # type: ignore[no-any-return]

    def _pack(self, found: TokenSet) -> bytes:
        bits = np.packbits(self._mask(found.ids))
        for more in found.bits:
            bits |= more
        packed = bits.tobytes()
        found.packed = self._equal.setdefault(packed, packed)
        return found.packed

    def _tokens(self, quotient: Quotient, stack: Stack) -> TokenSet:
        """The tokens of a quotient that may follow a stack."""
        return self.parser.recall_by_tops(quotient.memo, stack, functools.partial(self._collect, quotient))

    def _collect(self, quotient: Quotient, stack: Stack) -> TokenSet:
        self.made += 1
        completability = self.completability
        sets: list[npt.NDArray[Any]] = []
        admitted = self.parser.admitted(stack, quotient.bits)
        proofs = completability.proofs(stack, admitted)
        for certificates, ends, going_on, ids in quotient.classes:
            if certificates & proofs or self._may_follow(stack, going_on, ends):
                sets.append(ids)
        for bit, (symbol, residue), nodes, below in quotient.crossings:
            top = self.parser.feed(stack, symbol) if bit & admitted else None
            if top is None:
                continue
            lexer = completability.lexer_of[top.state]
            child = below.get(lexer)
            if child is None:
                child = below[lexer] = self.quotients[nodes, completability.partials.starts[lexer, residue]]
            if child.classes or child.crossings:
                more = self._tokens(child, top)
                sets += [more.ids, *more.bits]
        return TokenSet([ids for ids in sets if ids.itemsize > 1], [ids for ids in sets if ids.itemsize == 1])

    def _may_follow(self, stack: Stack, going_on: tuple[int, ...], ends: tuple[Ended, ...]) -> bool:
        """Whether some text, or none, completes a stack after a token that goes on, or ends."""
        if any(self.completability.completable(stack, token) for token in going_on):
            return True
        return any(self.completability.may_follow(*place) for place in self.parser.after(stack, ends))

    def _read(self, key: Key) -> Quotient:
        """The quotient of the tokens below some nodes, read from some partial tokens."""
        trie, outcomes = self.trie, self._outcomes
        nodes, start = np.frombuffer(key[0], np.int32), outcomes.number(key[1], ())
        above = nodes if nodes.size else np.array([-1])
        found = walk(outcomes, trie, np.full(above.size, start), above)
        ids, ends, _ = trie.tokens_at(found.nodes, found.states, found.begin)
        kinds: dict[Kind, list[npt.NDArray[np.int32]]] = defaultdict(list)
        for outcome, some in _groups(ids, ends):
            kinds[self._kinds[outcome]].append(some)
        classes = [TokenClass(*kind, self._compact(np.concatenate(parts))) for kind, parts in kinds.items()]
        where: dict[Ended, list[npt.NDArray[np.int32]]] = defaultdict(list)
        for outcome, some in _groups(found.flagged, found.flagged_states):
            for end in outcomes.outcomes[outcome][1]:
                where[end].append(some)
        bits = self.parser.bits
        crossings = [
            Crossing(bits[end.terminal], end, np.unique(np.concatenate(each)).tobytes(), {})
            for end, each in where.items()
        ]
        return Quotient(union([each[0] for each in (*classes, *crossings)]), classes, crossings, {})

    def _compact(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
        """Ids, or the bits of the vocabulary where these take less."""
        return ids if ids.size <= len(self.trie.tokens) * MAX_PART_AS_IDS else np.packbits(self._mask(ids))

    def _mask(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        mask = np.zeros(len(self.trie.tokens), bool)
        mask[ids] = True
        return mask

    def _find_kind(self, outcome: int) -> Kind:
        """The certificates of an outcome's tokens; and the ends and tokens to judge singly, unless that says all."""
        completability, (tokens, ended) = self.completability, self._outcomes.outcomes[outcome]
        later = {completability.possible_ends(token): token for token in tokens}
        certificates, exhaustive = completability.certificates[frozenset(ended).union(*(ends for ends, _ in later))]
        says_all = exhaustive and all(are_all for _, are_all in later)
        return (certificates, (), ()) if says_all else (certificates, ended, tuple(later.values()))


def _groups(values: npt.NDArray[np.int32], keys: npt.NDArray[np.int32]) -> list[tuple[int, npt.NDArray[np.int32]]]:
    """The values of each key, in their order."""
    order = np.argsort(keys.astype(np.min_scalar_type(keys.max(initial=0))), kind="stable")     # radix sort, if short
    values, keys = values[order], keys[order]
    cuts = np.flatnonzero(np.diff(keys, prepend=-1)).tolist()
    return [(int(keys[a]), values[a:b]) for a, b in itertools.pairwise([*cuts, keys.size])]
