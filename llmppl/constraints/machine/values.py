"""Values of texts of compositions, put together from those of their parts.

A text is cut into the pieces of the parts. Of several ways to cut it, the first parts get the longest pieces, as in a
regular expression. A way is valid if each part reads its piece: the piece is in the part, and `parse` does not refuse
it.

A text given as symbols has special tokens among its bytes. A str is read without those of the parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from llmppl.constraints.machine.machine import Machine
from llmppl.constraints.masks.index import expected
from llmppl.constraints.vocabulary.text import bytes_of
from llmppl.support.arguments import shown
from llmppl.support.graphs import Memo


class Part(Protocol):
    """Part as a reader sees it (`llmppl.constraints.machine.parts.Part`)."""

    @property
    def inner_parts(self) -> Sequence[Part]: ...
    @property
    def machine(self) -> Machine: ...
    @property
    def text_machine(self) -> Machine: ...
    def reading(self, reader: Reader, begin: int, end: int, /) -> Reading | None: ...
    def value_of_text(self, text: str, /) -> Any: ...


class Symbol(NamedTuple):
    """Special token in a text, by its text or id, as the part asks for it."""

    token: str | int

    def __repr__(self) -> str:
        return f"Special({self.token!r})"


class Reading(NamedTuple):
    """Value of a piece of text, and the values of the named parts in it."""

    value: Any
    names: dict[str, Any]

    @property
    def result(self) -> Any:
        """The named values if there are any, else the value."""
        return self.names or self.value


class Reader:
    """Text that is cut into pieces. `reason`: why a piece was last refused.

    Parameters
    ----------
    text : str, or list of str and symbols
        A symbol has a `token`, as a `Special` does. It takes the place of one byte in `data`.
    """

    def __init__(self, text: str | Sequence[Any]) -> None:
        self.data = b""
        self.reason = ""
        self._is_text = isinstance(text, str)
        self._specials = dict[int, str | int]()  # by place
        if self._is_text:
            text = [text]
        for piece in text:
            if isinstance(piece, str):
                self.data += bytes_of(piece)
            else:
                self._specials[len(self.data)] = piece.token
                self.data += b"\0"
        self._ends: Memo[tuple[Part, int], list[int]] = Memo(self._find_ends)
        self._readings: Memo[tuple[Part, int, int], Reading | None] = Memo(self._read)

    def read(self, part: Part, begin: int, end: int) -> Reading | None:
        """Return the reading of a piece, None if the part does not read it."""
        return self._readings[part, begin, end]

    def ends(self, part: Part, begin: int) -> list[int]:
        """Return the places where a text of a part that begins at a place may end, the furthest first."""
        return self._ends[part, begin]

    def _read(self, key: tuple[Part, int, int]) -> Reading | None:
        part, begin, end = key
        if not part.inner_parts and end not in self.ends(part, begin):
            return None
        return part.reading(self, begin, end)

    def _find_ends(self, key: tuple[Part, int]) -> list[int]:
        part, begin = key
        machine = part.machine
        if self._is_text:
            machine = part.text_machine
        state = machine.start
        ends = list[int]()
        at = begin
        while state is not None:
            if state.accepts:
                ends.append(at)
            if at == len(self.data):
                break
            if at in self._specials:
                state = machine.steps_by_specials(state).get(self._specials[at])
            else:
                state = machine.step(state, self.data[at])
            at += 1
        ends.reverse()
        return ends

    def text(self, begin: int, end: int) -> str:
        """Return a piece without its special tokens."""
        data = self.data[begin:end]
        if self._specials:
            data = bytes(self.data[at] for at in range(begin, end) if at not in self._specials)
        return data.decode("utf-8", "replace")

    def read_text(self, part: Part, begin: int, end: int) -> Reading | None:
        """Return the reading of a part that is no composition: the value by its `parse`, if that does not refuse it."""
        try:
            return Reading(part.value_of_text(self.text(begin, end)), {})
        except ValueError as error:
            self.reason = str(error)
            return None

    def read_row(self, parts: Sequence[Part], begin: int, end: int) -> list[Reading] | None:
        """Return the readings of pieces that follow each other, one for each part."""
        return self._read_in_a_row(lambda number: parts[number], len(parts), len(parts), begin, end)

    def read_times(
        self, part: Part, least: int, most: float, begin: int, end: int
    ) -> list[Reading] | None:
        """Return the readings of `least` to `most` pieces of one part; empty pieces only if they are needed."""
        return self._read_in_a_row(lambda number: part, least, most, begin, end)

    def _read_in_a_row(
        self, part_at: Callable[[int], Part], least: int, most: float, begin: int, end: int
    ) -> list[Reading] | None:
        """Return the readings of `least` to `most` pieces, the first ones as long as possible."""
        todo = [(begin, self._cuts(part_at, begin, 0, most))]
        seen = set[tuple[int, int]]()
        readings = list[Reading]()
        while todo:
            at, cuts = todo[-1]
            number = len(readings)
            if at == end and number >= least:
                return readings
            if not cuts:
                todo.pop()
                if readings:
                    readings.pop()
                continue
            cut = cuts.pop()
            more = number + 1
            if cut > end or (cut, more) in seen or (cut == at and number >= least):
                continue
            next_cuts = self._cuts(part_at, cut, more, most)
            if not next_cuts and (cut < end or more < least):
                continue
            reading = self.read(part_at(number), at, cut)
            if reading is not None:
                seen.add((cut, more))
                readings.append(reading)
                todo.append((cut, next_cuts))
        return None

    def _cuts(self, part_at: Callable[[int], Part], at: int, number: int, most: float) -> list[int]:
        """Return the places where the next piece may end, the furthest last; none after `most` pieces."""
        if number >= most:
            return []
        return self.ends(part_at(number), at)[::-1]


def value_of(part: Part, text: str | Sequence[Any]) -> Any:
    """Return the value of a text. ValueError if it is not in the part."""
    reader = Reader(text)
    reading = reader.read(part, 0, len(reader.data))
    if reading is None:
        reason = f": {reader.reason}" if reader.reason else ""
        raise ValueError(f"{shown(text)} is not in {shown(part)}{reason}")
    return reading.result


class MatchedPrefix(NamedTuple):
    """Longest prefix of a text that begins a text of a part.

    length : in characters
    complete : True if the prefix is itself a text of the part
    expected : description of the symbols that may follow
    """

    length: int
    complete: bool
    expected: str


def match_prefix(part: Part, pieces: Iterable[str | Symbol]) -> MatchedPrefix:
    """Read the pieces of a text as far as a part allows."""
    machine = part.machine
    state = machine.start
    if state is None:
        raise ValueError(f"{shown(part)} accepts no string at all")
    length = 0
    for piece in pieces:
        if isinstance(piece, Symbol):
            after = machine.steps_by_specials(state).get(piece.token)
            if after is None:
                break
            state = after
            length += len(str(piece.token))
        else:
            data = bytes_of(piece)
            state, at = machine.read(state, data)
            length += len(data[:at].decode(errors="ignore"))
            if at < len(data):
                break
    specials = machine.steps_by_specials(state)
    words = expected(machine.next_bytes(state), state.accepts, specials)
    return MatchedPrefix(length, state.accepts, words)


def with_symbols(text: str, names: Iterable[str | int]) -> list[str | Symbol]:
    """Return the pieces of a text, in which the names of special tokens are symbols."""
    texts = sorted((name for name in names if isinstance(name, str)), key=len, reverse=True)
    if not texts:
        return [text]
    pieces: list[Any] = re.split(f"({'|'.join(map(re.escape, texts))})", text)
    pieces[1::2] = map(Symbol, pieces[1::2])
    return pieces
