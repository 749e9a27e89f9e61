"""Objects of JSON: their properties in an order, counted, each name once.

The names that a shape lists come first, in their order (`order="schema"`), or at any place (`order="any"`). While a
name is read, all listed names that begin like it are a range of the sorted names, and all others a state of `Names`.

Patterns sort the others into *classes*: a class is the set of patterns that are found in a name, and has one shape.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from llmppl.constraints.automata.budget import TooLarge
from llmppl.constraints.automata.dfa import DFA, anything
from llmppl.constraints.automata.operations import Edge
from llmppl.constraints.constraint import Bools, Ints
from llmppl.constraints.json.ecma import found
from llmppl.constraints.json.frames import DONE, Expansion, Frame, Key, Local, Move, Whitespace, branches
from llmppl.constraints.json.scalars import ESCAPED, cut, escapes, free_name, spelled, texts_of
from llmppl.constraints.json.shapes import Lazy, Object, Shape, String, both, fits, intersect
from llmppl.support.graphs import Memo, Numbering
from llmppl.support.locks import cached_property

__all__ = ["Members", "classes"]

QUOTE, COMMA, COLON, CLOSE, BACKSLASH = b'",:}\\'
MAX_STATES = 5_000                                  # of all patterns of an object together
MAX_RESTS = 64                                      # names that are listed


class Names:
    """Names that an object does not list, as an automaton over their bytes; `start` is 0 if there are none.

    `part(state)` is the shape of the names that end there, None if none does. `rests(state)` lists the rests of the
    names that continue there, and is None if they are many.
    """

    def __init__(self, shape: Object, is_live: Callable[[Lazy], bool]) -> None:
        patterns = list(dict.fromkeys(pattern for others in shape.others for pattern, _ in others.patterns))
        self._dfa, self._parts = anything(), dict[int, Lazy]()          # by accepting state
        self._endless, self.is_endless, self.is_free = np.ones(1, bool), True, False
        self.part, self.rests = self._parts.get, Memo(self._find_rests)
        if shape.names == String() and not patterns:
            part = both(*(others.additional for others in shape.others))
            self.start, self.is_free = self._dfa.start if is_live(part) else 0, True
            self._parts |= dict.fromkeys(np.flatnonzero(self._dfa.accepting).tolist(), part)
            return
        table, accepting, sets = classes(shape.names, tuple(patterns))
        table, accepting = table.copy(), accepting.copy()
        parts = dict[tuple[bool, ...], Lazy]()
        for state in np.flatnonzero(accepting).tolist():
            if sets[state] not in parts:
                matched = {pattern for pattern, is_in in zip(patterns, sets[state], strict=True) if is_in}
                parts[sets[state]] = both(*(
                    both(*some) if (some := [each for name, each in others.patterns if name in matched])
                    else others.additional for others in shape.others
                ))  # fmt: skip
            accepting[state] = is_live(parts[sets[state]])
        live = accepting.copy()
        while (more := live | (live[table] & (table > 0)).any(1)).sum() > live.sum():
            live = more
        table[~live[table]] = 0
        self._dfa = DFA.__new__(DFA)
        self._dfa._fix(table.astype(np.int32), accepting, 1)
        self.start = int(live[1])
        self._parts |= {state: parts[sets[state]] for state in np.flatnonzero(accepting).tolist()}
        self._endless = live
        while (less := self._endless & (self._endless[table] & (table > 0)).any(1)).sum() < self._endless.sum():
            self._endless = less                    # the states that reach a cycle
        self.is_endless = bool((self._endless == live).all())

    def moves(self, state: int) -> list[Edge]:
        return self._dfa.moves(state)

    def after(self, state: int, byte: int) -> int | None:
        return self._dfa.step(state, byte)

    def _find_rests(self, state: int) -> frozenset[bytes] | None:
        if len(self._endless) == 1 or self._endless[state]:
            return None
        rests = {b""} if self._dfa.accepts(state) else set[bytes]()
        for lo, hi, to in self._dfa.moves(state):
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
    states, rows = Numbering[tuple[int, ...]]([(), start]), [np.zeros(256, np.int32)]
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

    `after`: ordered names before this number are past. `seen`: bits of the listed names without an order. `need`,
    `room`: properties that are still needed, and still possible. `used`: other names so far, None if not remembered.
    """

    after: int
    seen: int
    need: int
    room: float
    used: frozenset[bytes] | None


class Name(NamedTuple):
    """Part of a name that is read.

    `low` to `high`: sorted listed names that begin so, `depth`: bytes read. `other`: state of the other names.
    `escape`: a part of an escape, or None. `text`: the bytes, None if not remembered. `blocked`: rests of used names.
    """

    low: int
    high: int
    depth: int
    other: int
    escape: str | None
    text: bytes | None
    blocked: frozenset[bytes]


class Members(Frame):
    """Objects of a shape."""

    def __init__(self, shape: Object, blank: Whitespace, is_live: Callable[[Lazy], bool], in_order: bool) -> None:
        super().__init__()
        self._shape, self._blank, self._is_live_part, self._in_order = shape, blank, is_live, in_order
        self._listed = list(dict.fromkeys([*shape.properties, *shape.required]))
        self._num_ordered = len(self._listed) if in_order else 0
        self._parts = Memo(shape.of_name)
        self._choices = Memo(self._find_choices)

    @property
    def is_possible(self) -> bool:
        """True if the shape has instances. Often the required properties tell, and no other is read."""
        shape, required = self._shape, len(set(self._shape.required))
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
        return _bits(i for name, i in self._number.items() if self._allows(name))

    @cached_property
    def _required(self) -> int:
        return _bits(map(self._number.__getitem__, self._shape.required))

    @cached_property
    def _begin(self) -> Progress:
        has_room = self._others is None and self._shape.most >= len(self._number)
        used = None if self._others is None else frozenset[bytes]()
        return Progress(0, 0, self._shape.least, math.inf if has_room else self._shape.most, used)

    @cached_property
    def _order(self) -> tuple[list[bytes], list[int]]:
        """Spellings of the listed names, sorted, and their numbers."""
        pairs = sorted((spelled(name), i) for name, i in self._number.items())
        return [name for name, _ in pairs], [i for _, i in pairs]

    @property
    def remembers(self) -> bool:                    # type: ignore[override]
        return self._others is not None

    def forget(self) -> None:
        super().forget()
        self._choices.clear()

    def step(self, local: Local, byte: int) -> Local | None:
        """Return the state after a byte. Only here are the names remembered that the object does not list."""
        if local.key[0] != "name":
            return super().step(local, byte)
        _, at, name = local.key
        found = self._read(at, name, byte)
        return None if found is None else self.local(found)

    # ---- progress

    def _missing(self, at: Progress) -> int:
        """Return the bits of the properties that must still come."""
        return self._required & ~at.seen & ~((1 << at.after) - 1)

    def _left(self, at: Progress) -> int:
        """Return the bits of the listed names that may still come."""
        return self._live & ~at.seen & ~((1 << at.after) - 1)

    def _can_end(self, at: Progress) -> bool:
        """Return whether the object can be completed."""
        missing, left = self._missing(at), self._left(at)
        if missing & ~left or at.room < max(at.need, missing.bit_count()):
            return False
        return self._others is not None or at.need <= left.bit_count()

    def _keeps_order(self, missing: int, i: int | None = None) -> bool:
        """Return whether no missing property must come before number i, or before all others."""
        first = self._num_ordered if i is None else min(i, self._num_ordered)
        return not missing & ((1 << first) - 1)

    def _with(self, at: Progress, i: int) -> Progress:
        """Return the progress after a listed property."""
        seen = at.seen | (1 << i >> self._num_ordered << self._num_ordered)
        return self._counted(at, after=min(i + 1, self._num_ordered), seen=seen)

    def _with_other(self, at: Progress, name: bytes | None) -> Progress:
        used = at.used if name is None or at.used is None else at.used | {name}
        return self._counted(at, after=self._num_ordered, used=used)

    def _counted(self, at: Progress, **more: Any) -> Progress:
        return at._replace(need=max(0, at.need - 1), room=at.room - 1, **more)

    def _find_choices(self, at: Progress) -> tuple[int, bool, bool]:
        """Return the sorted names that may come next, as bits, and whether others may, and whether it may end."""
        missing, named = self._missing(at), 0
        if not at.need and at.room == math.inf:
            ordered = missing & ((1 << self._num_ordered) - 1)
            named = self._left(at) & (((ordered & -ordered) << 1) - 1 if ordered else -1)
        elif at.room > 0:
            for i in _indices(self._left(at)):
                if not self._keeps_order(missing, i):
                    break
                named |= self._can_end(self._with(at, i)) << i
        others = (
            self._others is not None and at.room > 0 and self._keeps_order(missing)
            and self._can_end(self._with_other(at, None))
        )  # fmt: skip
        places = enumerate(self._order[1]) if named else ()
        return _bits(i for i, place in places if named >> place & 1), others, not missing and not at.need

    # ---- moves

    def only_moves(self, key: Key) -> bool:
        return bool(key[0] == "name")

    def expand(self, key: Key) -> Expansion:
        match key:
            case "open":
                return Expansion([(123, 123, ("first", 0, self._begin))])
            case "end":
                return DONE
            case "name", at, name:
                return Expansion(self._in_name(at, name._replace(text=None)))
        return self._between(*key)

    def _between(self, kind: str, blank: int, at: Progress, part: Lazy | None = None) -> Expansion:
        """Return the moves between two tokens of JSON, where whitespace may stand."""
        rest = (at,) if part is None else (at, part)
        moves: list[Move] = [(lo, hi, (kind, to, *rest)) for lo, hi, to in self._blank.moves[blank]]
        if not self._blank.may_end(blank):
            return Expansion(moves)
        if kind == "colon":
            moves.append((COLON, COLON, ("value", 0, *rest)))
        elif kind == "value":
            assert part is not None
            return Expansion(moves, [(part, ("after", 0, at))])
        else:
            named, others, may_end = self._choices[at]
            if (named or others) and kind == "after":
                moves.append((COMMA, COMMA, ("next", 0, at)))
            elif named or others:
                other, used = (self._others.start, at.used) if others and self._others else (0, None)
                text = None if used is None else b""
                begun = Name(0, len(self._number), 0, other, None, text, used or frozenset())
                moves.append((QUOTE, QUOTE, ("name", at, begun)))
            if may_end and kind != "next":
                moves.append((CLOSE, CLOSE, "end"))
        return Expansion(moves)

    def _is_simple(self, name: Name) -> bool:
        """Return whether listed names and free ones are all that may follow."""
        return name.escape is None and (self._others is None or not name.other or self._others.is_free)

    def words(self, key: Key) -> list[tuple[bytes, int]] | None:
        if key[0] != "name" or not self._is_simple(key[2]):
            return None
        _, at, name = key
        names, named = self._order[0], -1 if name.other else self._choices[at][0]
        listed = [(names[i][name.depth :] + b'"', i) for i in range(name.low, name.high) if named >> i & 1]
        return listed + [(rest + b'"', -1) for rest in name.blocked] * bool(name.other)

    def after_word(self, key: Key, number: int) -> Key | None:
        _, at, name = key
        return None if number < 0 else self._ended(at, name, self._choices[at][0], number)

    def others(self, key: Key) -> tuple[Local, Local] | None:
        if key[0] != "name" or self._others is None or not key[2].other or not self._is_simple(key[2]):
            return None
        _, at, name = key
        part = self._others.part(self._others.start)
        assert part is not None
        return free_name().local((name.other, 0, math.inf)), self.local(("colon", 0, self._with_other(at, None), part))

    def _in_name(self, at: Progress, name: Name) -> list[Move]:
        ranges, _ = branches(self._order[0], name.low, name.high, name.depth)
        special = tuple(sorted({QUOTE, *ranges, *(rest[0] for rest in name.blocked if rest)}))
        moves = [(byte, byte, key) for byte in special if (key := self._read(at, name, byte))]
        for lo, hi, other, escape in self._other_moves(name):
            after = Name(0, 0, 0, other, escape, None, frozenset())
            if self._may_end(self._choices[at][0], after):
                moves += [(first, last, ("name", at, after)) for first, last in cut(lo, hi, special)]
        return moves

    def _read(self, at: Progress, name: Name, byte: int) -> Key | None:
        """Return the key after one byte of a name."""
        names, named, low, high = self._order[0], self._choices[at][0], name.low, name.high
        if byte == QUOTE and name.escape is None:   # in a listed name, it may follow a backslash
            end = low if low < high and len(names[low]) == name.depth else None
            if ended := self._ended(at, name, named, end):
                return ended
        if low < high:
            begin = names[high - 1][: name.depth]
            low = bisect_left(names, begin + bytes([byte]), low, high)
            high = bisect_left(names, begin + bytes([byte + 1]), low, high) if byte < 255 else high
        other, escape = 0, name.escape
        if escape is not None or byte == BACKSLASH:
            some = ((to, part) for lo, hi, to, part in self._other_moves(name) if lo <= byte <= hi)
            other, escape = next(some, (0, None))
        elif self._others is not None and name.other and byte not in ESCAPED:
            other = self._others.after(name.other, byte) or 0
        blocked = frozenset(rest[1:] for rest in name.blocked if rest[:1] == bytes([byte])) if other else frozenset()
        text = None if name.text is None else name.text + bytes([byte])
        after = Name(low, high, (name.depth + 1) * (high > low), other, escape, text, blocked)
        return ("name", at, after) if self._may_end(named, after) else None

    def _may_end(self, named: int, name: Name) -> bool:
        """Return whether some allowed name begins so."""
        if named >> name.low & ((1 << name.high - name.low) - 1):
            return True
        if not name.other or self._others is None:
            return False
        rests = self._others.rests[name.other]
        if rests is None or name.escape is not None:
            return True
        return bool(rests - name.blocked - {each[name.depth :] for each in self._order[0][name.low : name.high]})

    def _ended(self, at: Progress, name: Name, named: int, end: int | None) -> Key | None:
        """Return the key after the closing quote; None if the name may not end here."""
        if end is not None:
            number = self._order[1][end]
            return ("colon", 0, self._with(at, number), self._parts[self._listed[number]]) if named >> end & 1 else None
        part = self._others.part(name.other) if self._others and name.other else None
        return None if part is None or b"" in name.blocked else ("colon", 0, self._with_other(at, name.text), part)

    def _other_moves(self, name: Name) -> Iterator[tuple[int, int, int, str | None]]:
        """Yield the moves of the other names: first and last byte, state, and the part of an escape."""
        others, state = self._others, name.other
        if others is None or not state:
            return
        found = escapes(name.escape or "", lambda byte: others.after(state, byte))
        if name.escape is not None:
            for byte, to in found:
                yield (byte, byte, state, to) if isinstance(to, str) else (byte, byte, to, None)
            return
        yield from ((a, b, to, None) for lo, hi, to in others.moves(state) for a, b in cut(lo, hi))
        if any(others.after(state, byte) for byte in ESCAPED):
            yield BACKSLASH, BACKSLASH, state, ""

    def closing(self, key: Key) -> Expansion:
        found = self.expand(key)
        kind = key[0]
        if kind in ("first", "after") and self._choices[key[2]][2]:
            return Expansion([move for move in found.moves if move[2][0] not in ("name", "next")])
        if kind == "name":
            missing = self._missing(key[1])
            ends = [move for move in found.moves if move[2][0] == "colon"]
            wanted = [move for move in found.moves if move[2][0] == "colon" or self._leads_to(missing, move[2][2])]
            moves = wanted if missing else ends
            return Expansion(moves) if moves else found
        return found

    def _leads_to(self, missing: int, name: Name) -> bool:
        return any(missing >> self._order[1][i] & 1 for i in range(name.low, name.high))


def _bits(numbers: Iterable[int]) -> int:
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits


def _indices(bits: int) -> list[int]:
    """Return the numbers of the bits that are set, ascending."""
    return [i for i, bit in enumerate(bin(bits)[:1:-1]) if bit == "1"]
