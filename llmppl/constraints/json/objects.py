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
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from llmppl.constraints.automata.budget import TooLarge
from llmppl.constraints.automata.dfa import DFA, anything
from llmppl.constraints.constraint import Bools, Ints
from llmppl.constraints.json.ecma import found
from llmppl.constraints.json.frames import MAX_LOCALS, Container, Expansion, Key, Local, Move, Whitespace
from llmppl.constraints.json.scalars import ESCAPED, cut, escapes, texts_of
from llmppl.constraints.json.shapes import Lazy, Object, Shape, String, both, fits, intersect
from llmppl.constraints.masks.distances import bytes_to_accept
from llmppl.support.graphs import Memo, Numbering
from llmppl.support.locks import cached_property

QUOTE, COLON, BACKSLASH = b'":\\'
MAX_STATES = 5_000                                  # of all patterns of an object together
MAX_RESTS = 64                                      # names that are listed
MAX_ORDERED = 5                                     # missing properties of which all orders are tried to find an end


class Names:
    """Names that an object does not list, as an automaton over their bytes; `start` is 0 if there are none.

    `part(state)` is the shape of the names that end there, None if none does. `rests(state)` lists the rests of the
    names that continue there, and is None if they are many.
    """

    def __init__(self, shape: Object, is_live: Callable[[Lazy], bool]) -> None:
        patterns = list(dict.fromkeys(pattern for others in shape.others for pattern, _ in others.patterns))
        self.dfa = anything()
        self._parts = dict[int, Lazy]()                 # by accepting state
        self._endless = np.ones(len(self.dfa.accepting), bool)
        self.is_endless = True
        self.part, self.rests = self._parts.get, Memo(self._find_rests)
        if shape.names == String() and not patterns:
            part = both(*(others.additional for others in shape.others))
            self.start = self.dfa.start if is_live(part) else 0
            self._parts |= dict.fromkeys(np.flatnonzero(self.dfa.accepting).tolist(), part)
            return
        table, accepting, sets = classes(shape.names, tuple(patterns))
        table = table.copy()
        accepting = accepting.copy()
        parts = {}
        for state in np.flatnonzero(accepting).tolist():
            if sets[state] not in parts:
                matched = {pattern for pattern, is_in in zip(patterns, sets[state], strict=True) if is_in}
                parts[sets[state]] = both(*(others.of_patterns(matched) for others in shape.others))
            accepting[state] = is_live(parts[sets[state]])
        live = np.isfinite(bytes_to_accept(table, accepting))
        table[~live[table]] = 0
        self.dfa = DFA.__new__(DFA)
        self.dfa._fix(table.astype(np.int32), accepting, 1)
        self.start = int(live[1])
        self._parts |= {state: parts[sets[state]] for state in np.flatnonzero(accepting).tolist()}
        self._endless = live
        while (less := self._endless & (self._endless[table] & (table > 0)).any(1)).sum() < self._endless.sum():
            self._endless = less                    # the states that reach a cycle
        self.is_endless = bool((self._endless == live).all())

    def _find_rests(self, state: int) -> frozenset[bytes] | None:
        if self._endless[state]:
            return None
        rests = {b""} if self.dfa.accepts(state) else set()
        for lo, hi, to in self.dfa.moves(state):
            inside = self.rests[to]
            if inside is None or len(rests) + len(inside) * (hi + 1 - lo) > MAX_RESTS:
                return None
            rests |= {bytes([byte]) + rest for byte in range(lo, hi + 1) for rest in inside}
        return frozenset(rests)


@lru_cache(64)
def classes(names: Shape, patterns: tuple[str, ...]) -> tuple[Ints, Bools, list[tuple[bool, ...]]]:
    """Return the table of some names, whether its states accept, and which patterns are found there.

    Raises TooLarge if the table is.
    """
    dfas = [texts_of(intersect(names, String())), *map(found, patterns)]
    start = tuple(dfa.start for dfa in dfas)
    states = Numbering[tuple[int, ...]]([(), start])
    rows = [np.zeros(256, np.int32)]
    for key in itertools.islice(states.keys_in_order, 1, None):         # grows
        table = np.stack([dfa.row(state) for dfa, state in zip(dfas, key, strict=True)])
        columns, where = np.unique(table, axis=1, return_inverse=True)
        into = [states[tuple(column)] if column[0] else 0 for column in columns.T.tolist()]
        rows.append(np.array(into, np.int32)[where.ravel()] if key[0] else rows[0])
        if len(states) > MAX_STATES:
            raise TooLarge("the patterns of an object's names", f"more than {MAX_STATES:,} states")
    keys = states.keys_in_order[1:]
    accepting = [False, *(dfas[0].accepts(key[0]) for key in keys)]
    sets = [(), *(tuple(dfa.accepts(at) for dfa, at in zip(dfas[1:], key[1:], strict=True)) for key in keys)]
    return np.stack(rows), np.array(accepting), sets


class Progress(NamedTuple):
    """Part of an object that is read: the properties so far.

    `left`: bits of the listed names that may still come. `need`, `room`: properties that are still needed, and still
    possible. `used`: other names so far, None if not remembered.
    """

    left: int
    need: int
    room: float
    used: frozenset[bytes] | None


class Name(NamedTuple):
    """Part of a name that is read.

    `text`: the bytes, None if they are not remembered, since no listed or used name begins so. `other`: state of the
    other names. `escape`: a part of an escape, or None.
    """

    text: bytes | None
    other: int
    escape: str | None


class Members(Container):
    """Objects of a shape."""

    brackets = ord("{"), ord("}")

    def __init__(self, shape: Object, blank: Whitespace, is_live: Callable[[Lazy], bool], in_order: bool) -> None:
        super().__init__(blank)
        self._shape = shape
        self._is_live_part = is_live
        self._listed = list(dict.fromkeys([*shape.properties, *shape.required]))
        self._ordered = (1 << len(self._listed)) - 1 if in_order else 0        # bits of the names with an order
        self._parts = Memo(shape.of_name)
        self._choices = Memo(self._find_choices, MAX_LOCALS)

    @property
    def is_possible(self) -> bool:
        """True if the shape has instances. Often the required properties tell, and no other is read."""
        shape = self._shape
        required = len(set(self._shape.required))
        if not all(map(self._allows, shape.required)) or required > shape.most:
            return False
        return shape.least <= required or self._can_end(self._begin)

    def _allows(self, name: str) -> bool:
        return fits(name, self._shape.names) and self._is_live_part(self._parts[name])

    @cached_property
    def _others(self) -> Names | None:
        """Names that are not listed. If they are few, they are listed too, without an order, and this is None."""
        names = Names(self._shape, self._is_live_part)
        few = names.rests[names.start] if names.start else frozenset[bytes]()
        if few is None:
            return names
        self._listed += sorted({name.decode() for name in few} - set(self._listed))
        return None

    @cached_property
    def _number(self) -> dict[str, int]:
        self._others                                # noqa: B018  it may list more names
        return {name: i for i, name in enumerate(self._listed)}

    @cached_property
    def _live(self) -> int:
        """Bits of the listed names that an instance may have."""
        return sum(1 << i for name, i in self._number.items() if self._allows(name))

    @cached_property
    def _required(self) -> int:
        return sum(1 << self._number[name] for name in set(self._shape.required))

    @cached_property
    def _begin(self) -> Progress:
        has_room = self._others is None and self._shape.most >= len(self._number)
        used = None if self._others is None else frozenset[bytes]()
        return Progress(self._live, self._shape.least, math.inf if has_room else self._shape.most, used)

    @cached_property
    def _order(self) -> tuple[list[bytes], list[int]]:
        """Spellings of the listed names, sorted, and their numbers."""
        pairs = sorted((json.dumps(name, ensure_ascii=False)[1:-1].encode(), i) for name, i in self._number.items())
        return [name for name, _ in pairs], [i for _, i in pairs]

    @property
    def remembers(self) -> bool:                    # type: ignore[override]
        return self._others is not None

    def step(self, local: Local, byte: int) -> Local | None:
        """Return the state after a byte. Only here are the names remembered that the object does not list."""
        if local.key[0] != "name":
            return super().step(local, byte)
        _, at, name = local.key
        found = self._read(at, name, byte)
        return None if found is None else self.local(found)

    # ---- progress

    def _after(self, at: Progress, bit: int = 0, name: bytes | None = None) -> Progress:
        """Return the progress after the property of a bit, or after one that is not listed (0)."""
        over = (bit << 1) - 1 if bit & self._ordered else self._ordered | bit
        used = at.used if name is None or at.used is None else at.used | {name}
        return Progress(at.left & ~over, max(0, at.need - 1), at.room - 1, used)

    def _can_end(self, at: Progress) -> bool:
        """Return whether the object can be completed, if no required property was left out."""
        is_enough = self._others is not None or at.need <= at.left.bit_count()
        return is_enough and at.room >= max(at.need, (at.left & self._required).bit_count())

    def _find_choices(self, at: Progress) -> tuple[int, bool, bool]:
        """Return the sorted names that may come next, as bits, and whether others may, and whether it may end."""
        missing = at.left & self._required
        first = missing & self._ordered & -(missing & self._ordered)    # it precedes all that follow it
        named = at.left & ((first << 1) - 1)
        if at.need or at.room < math.inf:
            bits = (1 << i for i in range(named.bit_length()) if named >> i & 1)
            named = sum(bit for bit in bits if self._can_end(self._after(at, bit)))
        others = self._others is not None and not first and self._can_end(self._after(at))
        places = enumerate(self._order[1]) if named else ()
        return sum(1 << i for i, place in places if named >> place & 1), others, not missing and not at.need

    # ---- moves

    def expand(self, key: Key) -> Expansion:
        return Expansion(self._in_name(*key[1:])) if key[0] == "name" else super().expand(key)

    def has_exits(self, key: Key) -> bool:
        return bool(key[0] != "name")

    def parts(self, at: Progress) -> tuple[Expansion, bool]:
        named, others, may_end = self._choices[at]
        begun = "name", at, Name(b"", self._others.start if others and self._others else 0, None)
        return Expansion([(QUOTE, QUOTE, begun)] * bool(named or others)), may_end

    def _after_blank(self, moves: list[Move], kind: str, at: Progress, part: Lazy | None = None) -> Expansion:
        if part is None:
            return super()._after_blank(moves, kind, at)
        if kind == "colon":
            return Expansion([*moves, (COLON, COLON, ("value", 0, at, part))])
        return Expansion(moves, [(part, ("after", 0, at))])

    def _like(self, name: Name) -> tuple[int, int]:
        """Return the range of the sorted listed names that begin so."""
        if name.text is None:
            return 0, 0
        low = bisect_left(self._order[0], name.text)
        return low, bisect_left(self._order[0], name.text + b"\xff", low)

    def _rests(self, at: Progress, name: Name) -> list[tuple[bytes, int]]:
        """Return the rests of the listed and used names that begin so, with the number of the listed ones, or -1."""
        if name.text is None:
            return []
        listed = ((self._order[0][i], i) for i in range(*self._like(name)))
        used = ((each, -1) for each in at.used or () if each.startswith(name.text))
        return [(each[len(name.text) :], i) for each, i in (*listed, *used)]

    def _in_name(self, at: Progress, name: Name) -> list[Move]:
        special = tuple(sorted({QUOTE, *(rest[0] for rest, _ in self._rests(at, name) if rest)}))
        moves = [(byte, byte, key) for byte in special if (key := self._read(at, name, byte))]
        for lo, hi, other, escape in self._other_moves(name):
            after = Name(None, other, escape)
            if self._may_end(at, after):
                moves += [(first, last, ("name", at, after)) for first, last in cut(lo, hi, special)]
        return moves

    def _read(self, at: Progress, name: Name, byte: int) -> Key | None:
        """Return the key after one byte of a name."""
        if byte == QUOTE and name.escape is None and (ended := self._ended(at, name)):
            return ended                            # in a listed name, a quote may follow a backslash
        other = 0
        escape = name.escape
        if escape is not None or byte == BACKSLASH:
            some = ((to, part) for lo, hi, to, part in self._other_moves(name) if lo <= byte <= hi)
            other, escape = next(some, (0, None))
        elif self._others is not None and name.other and byte not in ESCAPED:
            other = self._others.dfa.step(name.other, byte) or 0
        after = Name(None if name.text is None else name.text + bytes([byte]), other, escape)
        return ("name", at, after) if self._may_end(at, after) else None

    def _may_end(self, at: Progress, name: Name) -> bool:
        """Return whether some allowed name begins so."""
        low, high = self._like(name)
        if self._choices[at][0] >> low & ((1 << high - low) - 1):
            return True
        if not name.other or self._others is None:
            return False
        rests = self._others.rests[name.other]
        return rests is None or name.escape is not None or not rests <= {rest for rest, _ in self._rests(at, name)}

    def _ended(self, at: Progress, name: Name) -> Key | None:
        """Return the key after the closing quote; None if the name may not end here."""
        low, high = self._like(name)
        if low < high and self._order[0][low] == name.text:
            return self._after_listed(at, low)
        part = self._others.part(name.other) if self._others and name.other else None
        if part is None or name.text in (at.used or ()):
            return None
        return "colon", 0, self._after(at, 0, name.text), part

    def _after_listed(self, at: Progress, number: int) -> Key | None:
        """Return the key after a listed name; None if it may not stand there."""
        if not self._choices[at][0] >> number & 1:
            return None
        place = self._order[1][number]
        return "colon", 0, self._after(at, 1 << place), self._parts[self._listed[place]]

    def _other_moves(self, name: Name) -> Iterator[tuple[int, int, int, str | None]]:
        """Yield the moves of the other names: first and last byte, state, and the part of an escape."""
        others = self._others
        state = name.other
        if others is None or not state:
            return
        found = escapes(name.escape or "", lambda byte: others.dfa.step(state, byte))
        if name.escape is not None:
            for byte, to in found:
                yield (byte, byte, state, to) if isinstance(to, str) else (byte, byte, to, None)
            return
        yield from ((a, b, to, None) for lo, hi, to in others.dfa.moves(state) for a, b in cut(lo, hi))
        if any(others.dfa.step(state, byte) for byte in ESCAPED):
            yield BACKSLASH, BACKSLASH, state, ""

    def closing(self, key: Key) -> Expansion:
        if key[0] != "name":
            return super().closing(key)
        found = self.expand(key)
        missing = key[1].left & self._required
        for some in (missing & -missing, missing) if missing.bit_count() > MAX_ORDERED else (missing,):
            moves = [move for move in found.moves if move[2][0] == "colon" or self._leads_to(some, move[2][2])]
            if moves:
                return Expansion(moves)
        return found

    def _leads_to(self, missing: int, name: Name) -> bool:
        return any(missing >> self._order[1][i] & 1 for i in range(*self._like(name)))
