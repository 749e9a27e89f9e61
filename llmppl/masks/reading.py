"""Reading a text: how far it stays in the language of a constraint, and what could come where it stops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, NamedTuple

from llmppl.masks.constraint import Constraint, State

MAX_OTHERS = 12                                         # characters beyond ASCII that are named


class Reading(NamedTuple):
    """How far a text stays in a language."""

    length: int                                         # characters that are the beginning of a match
    complete: bool                                      # whether they are one as they stand
    expected: str                                       # what may come after it, in words


@dataclass(frozen=True, eq=False)
class Bytes:
    """A vocabulary whose tokens are the bytes, in their order, and an eos."""

    tokens: Sequence[bytes]
    eos_ids: Sequence[int]


BYTES = Bytes([*(bytes([byte]) for byte in range(256)), b""], [256])


def read(constraint: Constraint, text: str) -> Reading:
    """Read `text` byte by byte, each byte being a token."""
    index: Any = constraint.index(BYTES)
    state = index.start
    for length, character in enumerate(text):
        before = state
        for byte in character.encode():
            if not index.mask(state)[byte]:
                return Reading(length, index.accepts(before), _expected(index, before))
            state = index.advance(state, byte)
    return Reading(len(text), index.accepts(state), _expected(index, state))


def _expected(index: Any, state: State) -> str:
    """What may come in a state between two characters: runs of ASCII, and the first few other characters."""
    coming = index.next_bytes(state)
    plain = enumerate(byte for byte in coming if byte < 128)
    runs = ([byte for _, byte in run] for _, run in groupby(plain, lambda pair: pair[1] - pair[0]))
    named = list(map(_run, runs))
    others = list(islice(_characters(index, state, bytes(byte for byte in coming if byte > 127)), MAX_OTHERS + 1))
    named += map(repr, others) if len(others) <= MAX_OTHERS else ["characters beyond ASCII"]
    ends, goes_on = index.accepts(state), ", ".join(named)
    if ends:
        return "it ends here" + f", or goes on with {goes_on}" * bool(named)
    return f"here may come {goes_on}" if named else "nothing may come here"


def _run(codes: list[int]) -> str:
    """'a', 'b' or 'a' to 'z'"""
    first, *_, last = map(chr, [codes[0], *codes])
    return f"{first!r} to {last!r}" if len(codes) > 3 else ", ".join(repr(chr(code)) for code in codes)


def _characters(index: Any, state: State, coming: bytes, begun: bytes = b"") -> Iterator[str]:
    """The characters that some bytes begun go on to, in their order."""
    for byte in coming:
        data, after = begun + bytes([byte]), index.advance(state, byte)
        if len(data) == 1 + sum(data[0] >= least for least in (0xC0, 0xE0, 0xF0)):
            yield data.decode()
        else:
            yield from _characters(index, after, index.next_bytes(after), data)
