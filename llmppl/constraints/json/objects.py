"""Objects of JSON: their properties in an order, counted, each name once.

The names that a shape lists come first, in their order (`order="schema"`), or at any place (`order="any"`). While a
name is read, all listed names that begin like it are a range of the sorted names, and all others a state of `Names`.

Patterns sort the others into *classes*: a class is the set of patterns that are found in a name, and has one shape.
"""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from llmppl.constraints.automata.budget import TooLarge
from llmppl.constraints.automata.dfa import DFA, anything
from llmppl.constraints.constraint import Bools, Ints
from llmppl.constraints.json.ecma import found
from llmppl.constraints.json.frames import (
    MAX_LOCALS,
    Between,
    Container,
    Expansion,
    Key,
    Local,
    Move,
    Whitespace,
)
from llmppl.constraints.json.scalars import ESCAPED, cut, escapes, texts_of
from llmppl.constraints.json.shapes import Lazy, Object, Shape, String, both, fits, intersect
from llmppl.constraints.masks.distances import bytes_to_accept
from llmppl.support.graphs import Memo, Numbering
from llmppl.support.locks import cached_property

QUOTE, COLON, BACKSLASH = b'":\\'
MAX_STATES = 5_000  # of all patterns of an object together
MAX_RESTS = 64  # names that are listed


class NameMove(NamedTuple):
    """Move of names that an object does not list: first and last byte, the state after them, a part of an escape."""

    low: int
    high: int
    state: int
    escape: str | None = None


class Names:
    """Names that an object does not list, as an automaton over their bytes; `start` is 0 if there are none.

    `parts` has the shapes of the names that end in a state. `moves` are those of a state and a part of an escape.
    `rests` lists the rests of the names that continue in a state, and is None if they are many.
    """

    def __init__(self, shape: Object, is_live: Callable[[Lazy], bool]) -> None:
        self.parts = dict[int, Lazy]()
        self.rests = Memo(self._find_rests)
        self.moves = Memo(self._find_moves)
        patterns = dict(itertools.chain(*(others.patterns for others in shape.others)))
        self._are_free = shape.names == String() and not patterns
        if self._are_free:
            part = both(*(others.additional for others in shape.others))
            self.dfa = anything()
            self.parts = dict.fromkeys(np.flatnonzero(self.dfa.accepting).tolist(), part)
            self.start = self.dfa.start if is_live(part) else 0
            self._is_endless = np.ones(len(self.dfa.accepting), bool)
            return
        table, matched = classes(shape.names, tuple(patterns))
        accepting = np.zeros(len(table), bool)
        for state, some in matched.items():
            part = both(*(others.of_patterns(some) for others in shape.others))
            if is_live(part):
                self.parts[state] = part
                accepting[state] = True
        live = np.isfinite(bytes_to_accept(table, accepting))
        self.dfa = DFA.__new__(DFA)
        self.dfa._fix(np.where(live[table], table, 0).astype(np.int32), accepting, 1)
        self.start = int(live[1])
        self._is_endless = _endless(self.dfa.table, live)

    def num_plain(self, state: int, escape: str | None) -> float | None:
        """Return how many plain bytes, whichever, may follow in a name; None if only its moves tell."""
        if not self._are_free:
            return None
        return math.inf if state == self.start and escape is None else 0

    def _find_rests(self, state: int) -> frozenset[bytes] | None:
        if self._is_endless[state]:
            return None
        rests = set[bytes]()
        if self.dfa.accepts(state):
            rests.add(b"")
        for lo, hi, to in self.dfa.moves(state):
            inside = self.rests[to]
            if inside is None or len(rests) + len(inside) * (hi + 1 - lo) > MAX_RESTS:
                return None
            for byte in range(lo, hi + 1):
                rests.update(bytes([byte]) + rest for rest in inside)
        return frozenset(rests)

    def _find_moves(self, key: tuple[int, str | None]) -> list[NameMove]:
        state, escape = key
        if not state:
            return []
        moves = []
        if escape is not None:
            for byte, after in escapes(escape, lambda byte: self.dfa.step(state, byte)):
                if isinstance(after, str):
                    moves.append(NameMove(byte, byte, state, after))
                else:
                    moves.append(NameMove(byte, byte, after))
            return moves
        for lo, hi, to in self.dfa.moves(state):
            moves += [NameMove(first, last, to) for first, last in cut(lo, hi)]
        if any(self.dfa.step(state, byte) for byte in ESCAPED):
            moves.append(NameMove(BACKSLASH, BACKSLASH, state, ""))
        return moves


def _endless(table: Ints, live: Bools) -> Bools:
    """Return the live states that reach a cycle of live states."""
    found = live
    while True:
        less = found & found[table].any(1)
        if less.sum() == found.sum():
            return found
        found = less


@lru_cache(64)
def classes(names: Shape, patterns: tuple[str, ...]) -> tuple[Ints, dict[int, set[str]]]:
    """Return the table of some names, and the patterns that are found in a name, for each state in which one ends.

    Raises TooLarge if the table is.
    """
    dfas = [texts_of(intersect(names, String())), *map(found, patterns)]
    start = tuple(dfa.start for dfa in dfas)
    states = Numbering[tuple[int, ...]]([(), start])
    rows = [np.zeros(256, np.int32)]
    matched = {}
    for key in itertools.islice(states.keys_in_order, 1, None):  # grows
        table = np.stack([dfa.row(state) for dfa, state in zip(dfas, key, strict=True)])
        columns, where = np.unique(table, axis=1, return_inverse=True)
        into = [states[tuple(column)] if column[0] else 0 for column in columns.T.tolist()]
        rows.append(np.array(into, np.int32)[where.ravel()])
        is_in, *others = (dfa.accepts(state) for dfa, state in zip(dfas, key, strict=True))
        if is_in:
            matched[states[key]] = set(itertools.compress(patterns, others))
        if len(states) > MAX_STATES:
            raise TooLarge("the patterns of an object's names", f"more than {MAX_STATES:,} states")
    return np.stack(rows), matched


class Progress(NamedTuple):
    """Part of an object that is read: the properties so far.

    `left`: bits of the listed names that may still come. `need`, `room`: properties that are still needed, and still
    possible. `used`: other names so far.
    """

    left: int
    need: int
    room: float
    used: frozenset[bytes] = frozenset()


class Name(NamedTuple):
    """Key of a name that is read.

    `at`: the progress before it. `text`: the bytes, None if they are not remembered, since no listed or used name
    begins so. `other`: state of the other names. `escape`: a part of an escape, or None.
    """

    at: Progress
    text: bytes | None
    other: int
    escape: str | None = None


class Choices(NamedTuple):
    """Sorted names that may come next, as bits, the first state of other names, and whether the object may end."""

    named: int
    other: int
    may_end: bool


class Members(Container):
    """Objects of a shape."""

    brackets = ord("{"), ord("}")

    def __init__(
        self,
        shape: Object,
        blank: Whitespace,
        is_live: Callable[[Lazy], bool],
        in_order: bool,
    ) -> None:
        super().__init__(blank)
        self._shape = shape
        self._is_live_part = is_live
        self._listed = list(dict.fromkeys([*shape.properties, *shape.required]))
        self._ordered = 0  # bits of the names with an order
        if in_order:
            self._ordered = (1 << len(self._listed)) - 1
        self._parts = Memo(shape.of_name)
        self._choices = Memo(self._find_choices, MAX_LOCALS)
        self._beginning = Memo(self._find_beginning, MAX_LOCALS)
        self._next_listed = Memo(self._find_next_listed, MAX_LOCALS)
        self._moves_of_others = Memo(self._find_moves_of_others, MAX_LOCALS)

    @property
    def is_possible(self) -> bool:
        """True if the shape has instances. Often the required properties tell, and no other is read."""
        shape = self._shape
        required = len(set(shape.required))
        if required > shape.most or not all(map(self._allows, shape.required)):
            return False
        return shape.least <= required or self._can_end(self._begin)

    def _allows(self, name: str) -> bool:
        return fits(name, self._shape.names) and self._is_live_part(self._parts[name])

    @cached_property
    def _others(self) -> Names:
        """Names that are not listed. If they are few, they are listed too, without an order."""
        names = Names(self._shape, self._is_live_part)
        if not names.start:
            return names
        few = names.rests[names.start]
        if few is not None:
            self._listed += sorted({name.decode() for name in few} - set(self._listed))
            names.start = 0
        return names

    @cached_property
    def _bit(self) -> dict[str, int]:
        self._others  # noqa: B018  it may list more names
        return {name: 1 << i for i, name in enumerate(self._listed)}

    @cached_property
    def _required(self) -> int:
        return sum(self._bit[name] for name in set(self._shape.required))

    @cached_property
    def _begin(self) -> Progress:
        most = self._shape.most
        if not self._others.start and most >= len(self._bit):
            most = math.inf
        live = sum(bit for name, bit in self._bit.items() if self._allows(name))
        return Progress(live, self._shape.least, most)

    @cached_property
    def _spelled(self) -> dict[bytes, str]:
        """Listed names by their spellings, in the order of these."""
        names = {json.dumps(name, ensure_ascii=False)[1:-1].encode(): name for name in self._bit}
        return dict(sorted(names.items()))

    @cached_property
    def _spellings(self) -> list[bytes]:
        return list(self._spelled)

    @cached_property
    def _bits(self) -> list[int]:
        """Bits of the names, in the order of their spellings."""
        return [self._bit[name] for name in self._spelled.values()]

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return bool(self._others.start)

    def step(self, local: Local, byte: int) -> Local | None:
        """Return the state after a byte. Only here are the names remembered that the object does not list."""
        if not isinstance(local.key, Name):
            return super().step(local, byte)
        after = self._read(local.key, byte)
        return None if after is None else self.local(after)

    # ---- progress

    def _after(self, at: Progress, bit: int) -> Progress:
        """Return the progress after the property of a bit, or after one that is not listed (0)."""
        over = self._ordered | bit
        if bit & self._ordered:
            over = (bit << 1) - 1  # and the names before it
        return Progress(at.left & ~over, max(0, at.need - 1), at.room - 1, at.used)

    def _can_end(self, at: Progress) -> bool:
        """Return whether the object can be completed, if no required property was left out."""
        if not self._others.start and at.need > at.left.bit_count():
            return False
        return at.room >= max(at.need, (at.left & self._required).bit_count())

    def _find_choices(self, at: Progress) -> Choices:
        missing = at.left & self._required
        first = missing & self._ordered
        first &= -first  # it precedes all that follow it
        named = at.left & ((first << 1) - 1)
        bits = [bit for bit in self._bits if bit & named]
        if at.need or at.room < math.inf:
            bits = [bit for bit in bits if self._can_end(self._after(at, bit))]
        other = 0
        if not first and self._can_end(self._after(at, 0)):
            other = self._others.start
        possible = set(bits)
        named = sum(1 << i for i, bit in enumerate(self._bits) if bit in possible)
        return Choices(named, other, not missing and not at.need)

    # ---- moves

    def expand(self, key: Key) -> Expansion:
        if isinstance(key, Name):
            return Expansion(self._in_name(key))
        return super().expand(key)

    def has_exits(self, key: Key) -> bool:
        return key == "end" or (isinstance(key, Between) and key.kind == "value")

    def parts(self, at: Progress) -> tuple[Expansion, bool]:
        choices = self._choices[at]
        moves = []
        if choices.named or choices.other:
            moves.append((QUOTE, QUOTE, Name(at, b"", choices.other)))
        return Expansion(moves), choices.may_end

    def after_blank(self, moves: list[Move], key: Between) -> Expansion:
        if key.part is None:
            return super().after_blank(moves, key)
        if key.kind == "colon":
            value = Between("value", 0, key.at, key.part)
            return Expansion([*moves, (COLON, COLON, value)])
        return Expansion(moves, [(key.part, Between("after", 0, key.at))])

    def _like(self, name: Name) -> range:
        """Return the range of the sorted listed names that begin so."""
        return self._beginning[name.text]

    def _find_beginning(self, text: bytes | None) -> range:
        if text is None:
            return range(0)
        low = bisect_left(self._spellings, text)
        return range(low, bisect_left(self._spellings, text + b"\xff", low))

    def _rests(self, name: Name) -> set[bytes]:
        """Return the rests of the listed and used names that begin so."""
        if name.text is None:
            return set()
        like = self._like(name)
        names = self._spellings[like.start : like.stop]
        names += [each for each in name.at.used if each.startswith(name.text)]
        return {each[len(name.text) :] for each in names}

    def _in_name(self, name: Name) -> list[Move]:
        moves = []
        ordered = self._ordered_bytes(name)
        for byte in ordered:
            after = self._read(name, byte)
            if after is not None:
                moves.append((byte, byte, after))
        for low, high, state, escape in self._moves_of_others[name.other, name.escape, ordered]:
            moves.append((low, high, Name(name.at, None, state, escape)))
        return moves

    def _ordered_bytes(self, name: Name) -> bytes:
        """Return the bytes, ascending, whose moves depend on the names that are listed or used."""
        if name.at.used:
            return bytes(sorted({QUOTE, *(rest[0] for rest in self._rests(name) if rest)}))
        return self._next_listed[name.text]

    def _find_next_listed(self, text: bytes | None) -> bytes:
        found = {QUOTE}
        like = self._beginning[text]
        for each in self._spellings[like.start : like.stop]:
            if text is not None and len(each) > len(text):
                found.add(each[len(text)])
        return bytes(sorted(found))

    def _find_moves_of_others(self, key: tuple[int, str | None, bytes]) -> list[NameMove]:
        """Return the moves of other names without some bytes; whether a name may end so depends on these alone."""
        other, escape, without = key
        found = []
        for move in self._others.moves[other, escape]:
            if move.escape is not None or self._others.rests[move.state] != frozenset():
                for low, high in cut(move.low, move.high, tuple(without)):
                    found.append(NameMove(low, high, move.state, move.escape))
        return found

    def _read(self, name: Name, byte: int) -> Key | None:
        """Return the key after one byte of a name."""
        if (
            byte == QUOTE and name.escape is None
        ):  # in a listed name, a quote may follow a backslash
            ended = self._ended(name)
            if ended is not None:
                return ended
        other = 0
        escape = None
        for move in self._others.moves[name.other, name.escape]:
            if move.low <= byte <= move.high:
                other, escape = move.state, move.escape
        text = name.text
        if text is not None:
            text += bytes([byte])
        after = Name(name.at, text, other, escape)
        return after if self._may_end(after) else None

    def _may_end(self, name: Name) -> bool:
        """Return whether some allowed name begins so."""
        like = self._like(name)
        if self._choices[name.at].named >> like.start & ((1 << len(like)) - 1):
            return True
        if not name.other:
            return False
        rests = self._others.rests[name.other]
        if rests is None or name.escape is not None:
            return True
        return not rests <= self._rests(name)

    def _ended(self, name: Name) -> Key | None:
        """Return the key after the closing quote; None if the name may not end here."""
        at = name.at
        if name.text in self._spelled:
            listed = self._spelled[name.text]
            may_stand = self._choices[at].named >> self._like(name).start & 1
            after = self._after(at, self._bit[listed])
            return Between("colon", 0, after, self._parts[listed]) if may_stand else None
        part = self._others.parts.get(name.other)
        if part is None or name.text in at.used:
            return None
        after = self._after(at, 0)
        if name.text is not None:
            after = after._replace(used=at.used | {name.text})
        return Between("colon", 0, after, part)

    def num_plain(self, key: Key) -> float | None:
        if not isinstance(key, Name) or not key.other:
            return 0
        return self._others.num_plain(key.other, key.escape)

    def closing(self, key: Key) -> Expansion:
        if not isinstance(key, Name):
            return super().closing(key)
        found = self.expand(key)
        missing = key.at.left & self._required
        for some in (missing & -missing, missing):
            moves = [move for move in found.moves if self._leads_to(some, move[2])]
            if moves:
                return Expansion(moves)
        return found

    def _leads_to(self, bits: int, after: Key) -> bool:
        """Return whether a key is after a name, or in a listed one of some bits."""
        if not isinstance(after, Name):
            return True
        return any(self._bits[i] & bits for i in self._like(after))
