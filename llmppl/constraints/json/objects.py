"""Objects of JSON: their properties in an order, counted, each name once.

The names that a shape lists come first, in their order (`order="schema"`), or at any place (`order="any"`). While a name
is read, all listed names that begin like it are a range of the sorted names, and all other names a state of `Names`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import NamedTuple

from llmppl.constraints.json.frames import Expansion, Frame, Key, Local, Move, Whitespace
from llmppl.constraints.json.names import Names, code_moves, spelled
from llmppl.constraints.json.shapes import Lazy, Object, fits
from llmppl.constraints.json.strings import SHORT, cut
from llmppl.support.graphs import Memo
from llmppl.support.locks import cached_property

__all__ = ["Members"]

QUOTE, COMMA, COLON, CLOSE, BACKSLASH = b'",:}\\'
LETTERS = {ord(letter): byte for byte, letter in SHORT.items()}        # after a backslash


class Progress(NamedTuple):
    """Part of an object that is read: the properties so far.

    `after`: listed names before this number are past. `seen`: bits of the listed names that are remembered. `need`,
    `room`: properties that are still needed, and still possible. `used`: other names so far, None if not remembered.
    """

    after: int
    seen: int
    need: int
    room: float
    used: frozenset[bytes] | None


class Name(NamedTuple):
    """Part of a name that is read.

    `low` to `high`: sorted listed names that begin so, `depth`: bytes read. `other`: state of the other names. `escape`:
    the open escape. `text`: the bytes, None if they need not be remembered. `blocked`: rests of used names.
    """

    low: int
    high: int
    depth: int
    other: int
    escape: str
    text: bytes | None
    blocked: frozenset[bytes]


class Members(Frame):
    """Objects of a shape."""

    first = ("open",)

    def __init__(self, shape: Object, blank: Whitespace, is_live: Callable[[Lazy], bool], in_order: bool) -> None:
        super().__init__()
        self._shape, self._blank, self._is_live_part, self._in_order = shape, blank, is_live, in_order
        targets = [name for names in shape.dependents.values() for name in names]
        listed = dict.fromkeys([*shape.properties, *shape.required, *shape.dependents, *targets])
        number = {name: i for i, name in enumerate(listed)}
        self._listed, self._count = list(listed), len(listed)
        self._required = _bits(number[name] for name in shape.required)
        self._dependents = {number[name]: _bits(map(number.__getitem__, names)) for name, names in shape.dependents.items()}
        self._remembered = _bits(self._dependents)
        for bits in self._dependents.values():
            self._remembered |= bits
        self._choices, self._can_end = Memo(self._find_choices), Memo(self._find_can_end)

    @property
    def is_possible(self) -> bool:
        """True if the shape has instances. Often the required properties tell, and no other is read."""
        shape, required = self._shape, self._required.bit_count()
        if not all(map(self._allows, shape.required)) or required > shape.most:
            return False
        return (shape.least <= required and not shape.dependents) or self._can_end[self._begin]

    def _allows(self, name: str) -> bool:
        return fits(name, self._shape.names) and self._is_live_part(self._parts[name])

    @cached_property
    def _parts(self) -> Memo[str, Lazy]:
        return Memo(self._shape.of_name)

    @cached_property
    def _others(self) -> Names:
        return Names(self._shape, self._is_live_part)

    @cached_property
    def _live(self) -> int:
        """Bits of the listed names that an instance may have."""
        return _bits(i for i, name in enumerate(self._listed) if self._allows(name))

    @cached_property
    def _num_others(self) -> float:
        others = self._others.num if self._others.start else 0
        return others if others == math.inf else others - sum(map(self._others.holds, self._listed))

    @cached_property
    def _begin(self) -> Progress:
        room = self._shape.most if self._shape.most < self._count + self._num_others else math.inf
        return Progress(0, 0, self._shape.least, room, frozenset() if self._num_others else None)

    @cached_property
    def _order(self) -> list[tuple[bytes, int]]:
        return sorted((spelled(name), i) for i, name in enumerate(self._listed))

    @cached_property
    def _names(self) -> list[bytes]:
        """Spellings of the listed names, sorted."""
        return [name for name, _ in self._order]

    @cached_property
    def _places(self) -> list[int]:
        """Numbers of the listed names, in the order of `_names`."""
        return [i for _, i in self._order]

    @property
    def remembers(self) -> bool:
        """True if the states remember names that the shape does not list."""
        return self._num_others == math.inf

    def parts(self) -> list[Lazy]:
        """Return the shapes of the properties that an instance may have."""
        listed = [self._parts[self._listed[i]] for i in _indices(self._live)]
        return listed + (self._others.parts() if self._others.start else [])

    def forget(self) -> None:
        super().forget()
        self._choices.clear()
        self._can_end.clear()

    def step(self, local: Local, byte: int) -> Local | None:
        """Return the state after a byte. Only here are the names remembered that the object does not list."""
        match local.key:
            case ("name", at, name) if at.used is not None:
                found = super().step(local, byte)
                if found is None:
                    return None
                if found.key[0] == "name":
                    text = None if name.text is None else name.text + bytes([byte])
                    return self.local(("name", at, found.key[2]._replace(text=text)))
                named, _, _ = self._choices[at]
                return self.local(self._ended(at, name, named, self._ranges(name)[1]))
        return super().step(local, byte)

    # ---- progress

    def _missing(self, at: Progress) -> int:
        """Return the bits of the properties that must still come."""
        needed = self._required >> at.after << at.after if self._in_order else self._required & ~at.seen
        for name, names in self._dependents.items():
            if at.seen >> name & 1:
                needed |= names & ~at.seen
        return needed

    def _left(self, at: Progress) -> int:
        """Return the bits of the listed names that may still come."""
        return self._live >> at.after << at.after if self._in_order else self._live & ~at.seen

    def _others_left(self, at: Progress) -> float:
        return self._num_others - len(at.used or ())

    def _find_can_end(self, at: Progress) -> bool:
        """Return whether the object can be completed."""
        missing, left = self._missing(at), self._left(at)
        if missing & ~left or at.room < max(at.need, missing.bit_count()):
            return False
        if at.need > left.bit_count() + self._others_left(at):
            return False
        if not self._dependents:
            return True
        if not missing and not at.need:
            return True
        return any(self._can_end[self._with(at, i)] for i in _indices(left) if self._keeps_order(missing, i)) or (
            self._others_left(at) > 0 and self._may_leave(missing) and self._can_end[self._with_other(at, None)]
        )

    def _keeps_order(self, missing: int, i: int) -> bool:
        return not self._in_order or not missing & ((1 << i) - 1)

    def _may_leave(self, missing: int) -> bool:
        return not (self._in_order and missing)

    def _with(self, at: Progress, i: int) -> Progress:
        """Return the progress after a listed property."""
        if self._in_order:
            return self._capped(at._replace(after=i + 1, seen=at.seen | (1 << i & self._remembered)))
        return self._capped(at._replace(seen=at.seen | 1 << i))

    def _with_other(self, at: Progress, name: bytes | None) -> Progress:
        used = at.used if name is None or at.used is None else at.used | {name}
        return self._capped(at._replace(after=self._count if self._in_order else 0, used=used))

    def _capped(self, at: Progress) -> Progress:
        return at._replace(need=max(0, at.need - 1), room=at.room - 1)

    def _find_choices(self, at: Progress) -> tuple[int, bool, bool]:
        """Return the bits of the listed names that may come next, and whether others may, and whether it may end."""
        missing = self._missing(at)
        named = 0
        if not self._dependents and not at.need and at.room == math.inf:
            named = self._left(at) & (((missing & -missing) << 1) - 1 if missing and self._in_order else -1)
        elif at.room > 0:
            for i in _indices(self._left(at)):
                if not self._keeps_order(missing, i):
                    break
                if self._can_end[self._with(at, i)]:
                    named |= 1 << i
        others = (
            at.room > 0 and self._others_left(at) > 0 and self._may_leave(missing)
            and self._can_end[self._with_other(at, b"\xff" if self._num_others < math.inf else None)]
        )  # fmt: skip
        return named, others, not missing and not at.need

    # ---- moves

    def expand(self, key: Key) -> Expansion:
        match key:
            case ("open",):
                return Expansion([(123, 123, ("first", 0, self._begin))])
            case ("end",):
                return Expansion([], [], True)
            case ("name", at, name):
                return Expansion(self._in_name(self._plain(at), name._replace(text=None)))
        return self._between(*key)

    def _between(self, kind: str, blank: int, at: Progress, part: Lazy | None = None) -> Expansion:
        """Return the moves between two tokens of JSON, where whitespace may stand."""
        rest = (at,) if part is None else (at, part)
        moves: list[Move] = [(lo, hi, (kind, to, *rest)) for lo, hi, to in self._blank.moves(blank)]
        if not self._blank.may_end(blank):
            return Expansion(moves)
        if kind == "colon":
            moves.append((COLON, COLON, ("value", 0, *rest)))
        elif kind == "value":
            assert part is not None
            return Expansion(moves, [(part, ("after", 0, at))])
        else:
            named, others, may_end = self._choices[at]
            if named or others:
                more = (QUOTE, ("name", at, self._begun(at, others))) if kind != "after" else (COMMA, ("next", 0, at))
                moves.append((more[0], more[0], more[1]))
            if may_end and kind != "next":
                moves.append((CLOSE, CLOSE, ("end",)))
        return Expansion(sorted(moves, key=lambda move: move[0]))

    def _begun(self, at: Progress, others: bool) -> Name:
        other = self._others.start if others else 0
        text = None if at.used is None or not others else b""
        return Name(0, len(self._names), 0, other, "", text, at.used or frozenset() if others else frozenset())

    def _is_live(self, named: int, name: Name) -> bool:
        """Return whether some allowed name begins so."""
        if name.high > name.low and any(named >> self._places[i] & 1 for i in range(name.low, name.high)):
            return True
        if not name.other:
            return False
        if (num := self._others.num_after(name.other)) == math.inf:
            return True
        listed = (self._names[i][name.depth :] for i in range(name.low, name.high))
        taken = {each for each in (*name.blocked, *listed) if self._ends_in(name, each)}
        return num > len(taken)

    def _ends_in(self, name: Name, rest: bytes) -> bool:
        """Return whether a rest of a name, of which nothing is escaped, completes one of the other names."""
        return self._others.part(self._others.after(name.other, rest)) is not None

    def _ranges(self, name: Name) -> tuple[dict[int, tuple[int, int]], int | None]:
        """Return the ranges of listed names by their next byte, and the number of the name that ends here."""
        low, depth = name.low, name.depth
        end = None
        if low < name.high and len(self._names[low]) == depth:
            end, low = self._places[low], low + 1
        ranges = {}
        while low < name.high:
            word = self._names[low]
            above = bisect_left(self._names, word[:depth] + bytes([word[depth] + 1]), low, name.high) \
                if word[depth] < 255 else name.high
            ranges[word[depth]] = low, above
            low = above
        return ranges, end

    def _in_name(self, at: Progress, name: Name) -> list[Move]:
        named, others, _ = self._choices[at]
        ranges, end = self._ranges(name)
        moves: list[Move] = []

        def add(lo: int, hi: int, other: int, escape: str) -> None:
            low, high = ranges.get(lo, (0, 0)) if lo == hi else (0, 0)
            data = bytes([lo])
            blocked = frozenset(rest[1:] for rest in name.blocked if rest[:1] == data) if other else frozenset()
            after = Name(low, high, name.depth + 1 if high > low else 0, other, escape, None, blocked)
            if self._is_live(named, after):
                moves.append((lo, hi, ("name", at, after)))

        if not name.escape and (part := self._ended(at, name, named, end)):
            moves.append((QUOTE, QUOTE, part))
        special = tuple(sorted({*ranges, *(rest[0] for rest in name.blocked if rest)}))
        for lo, hi, other, escape in self._in_escape(name) if name.escape else self._unescaped(name):
            for a, b in cut(lo, hi, special):
                add(a, b, other, escape)
            for byte in special:
                if lo <= byte <= hi:
                    add(byte, byte, other, escape)
        known = {byte for lo, hi, _ in moves for byte in range(lo, hi + 1)} if ranges else set()
        for byte in ranges:
            if byte not in known:
                add(byte, byte, 0, "")
        return sorted(moves, key=lambda move: move[0])

    def _ended(self, at: Progress, name: Name, named: int, end: int | None) -> Key | None:
        """Return the key after the closing quote; None if the name may not end here."""
        if end is not None:
            return ("colon", 0, self._with(at, end), self._parts[self._listed[end]]) if named >> end & 1 else None
        part = self._others.part(name.other) if name.other else None
        if part is None or b"" in name.blocked:
            return None
        return "colon", 0, self._with_other(at, name.text), part

    def _unescaped(self, name: Name) -> list[tuple[int, int, int, str]]:
        """Return the moves of the other names: first and last byte, state, and open escape."""
        if not name.other:
            return []
        found = [
            (a, b, to, "") for lo, hi, to in self._others.moves(name.other) if hi >= 32
            for a, b in cut(max(lo, 32), hi, (QUOTE, BACKSLASH))
        ]  # fmt: skip
        if any(self._others.after(name.other, bytes([byte])) for byte in (*range(32), QUOTE, BACKSLASH)):
            found.append((BACKSLASH, BACKSLASH, name.other, "\\"))
        return found

    def _in_escape(self, name: Name) -> list[tuple[int, int, int, str]]:
        if not name.other:
            return []
        if name.escape == "\\":
            decoded = dict(LETTERS)
            found = [(at, at, to, "") for at, byte in decoded.items() if (to := self._after(name, byte))]
            codes = [byte for byte in range(32) if byte not in SHORT and self._after(name, byte)]
            return [*found, (117, 117, name.other, "u")] if codes else found
        steps = code_moves(name.escape[1:])
        found = []
        for digit, byte in steps.items():
            to = name.other if byte is None else self._after(name, byte)
            if to:
                found.append((digit, digit, to, "" if byte is not None else name.escape + chr(digit)))
        return found

    def _after(self, name: Name, byte: int) -> int:
        return self._others.after(name.other, bytes([byte]))

    def closing(self, key: Key) -> Expansion:
        found = self.expand(key)
        if len(key) < 3 or key[0] in ("colon", "value"):
            return found
        if key[0] != "name":
            may_end = key[0] != "next" and self._choices[key[2]][2]
            return Expansion([move for move in found.moves if move[2][0] not in ("name", "next")]) if may_end else found
        needed = self._missing(key[1]) or -1
        moves = [move for move in found.moves if self._leads_to(needed, move[2])]
        if needed == -1 and any(move[2][0] == "colon" for move in moves):
            return Expansion([move for move in moves if move[2][0] == "colon"])
        return Expansion(moves) if moves else found

    def _leads_to(self, needed: int, key: Key) -> bool:
        """Return whether a name, or the progress after it, is one of the needed properties."""
        if needed == -1 or key[0] == "colon":
            return True
        name: Name = key[2]
        return any(needed >> self._places[i] & 1 for i in range(name.low, name.high))

    def plain(self, key: Key, reach: int) -> Key:
        if len(key) < 3:
            return key
        kind, first, second, *rest = key
        if kind == "name":
            return kind, self._plain(first, reach), second._replace(text=None)
        return kind, first, self._plain(second, reach), *rest

    def _plain(self, at: Progress, reach: float = math.inf) -> Progress:
        """Return the progress without the names that are used, and with counts up to `reach`."""
        if self._num_others < math.inf:
            return at
        need, room = at.need, at.room
        if not self._dependents:
            least = self._left(at).bit_count() + reach
            need, room = int(min(need, least)), min(room, least) if room < math.inf else room
        return at._replace(need=need, room=room, used=None)


def _bits(numbers: Iterable[int]) -> int:
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits


def _indices(bits: int) -> list[int]:
    """Return the numbers of the bits that are set, ascending."""
    return [i for i, bit in enumerate(bin(bits)[:1:-1]) if bit == "1"]
