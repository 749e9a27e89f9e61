"""What is told of a text: where it leaves a language, which bytes may follow there, and which characters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from llmppl.constraints.constraint import Constraint, State

__all__ = ["Reading", "after", "byte_ranges", "expected", "read", "token_name"]

MAX_RANGES = 8
MAX_BYTES = 24
MAX_OTHERS = 12                                     # characters beyond ASCII that are named


def _runs(bytes: bytes) -> list[tuple[int, int]]:
    """The first and the last byte of each run of ascending ones."""
    some = set(bytes)
    first = [byte for byte in bytes if byte - 1 not in some]
    last = [byte for byte in bytes if byte + 1 not in some]
    return list(zip(first, last, strict=True))


def byte_ranges(bytes: bytes) -> str:
    """b'0'..b'9', b'a'"""
    runs = _runs(bytes)
    shown = [repr(b"%c" % a) + f"..{b'%c' % b!r}" * (b > a) for a, b in runs[:MAX_RANGES]]
    return ", ".join(shown) + (", ..." if len(runs) > MAX_RANGES else "")


def expected(bytes: bytes, ends: bool) -> str:
    """What may come where these bytes may follow, and the text may end if it `ends`."""
    if not bytes:
        return "the text must end"
    return f"the next byte must be one of {byte_ranges(bytes)}{', or the text must end' if ends else ''}"


def after(text: bytes) -> str:
    """Where in a text an error is; its last bytes if it is long."""
    if not text:
        return "at the start"
    shown, dots = text[-MAX_BYTES:], "..." * (len(text) > MAX_BYTES)
    try:
        return f"after {dots}{shown.decode()!r}"
    except UnicodeDecodeError:
        return f"after {dots}{shown!r}"


def token_name(token: int, data: bytes, is_eos: bool) -> str:
    """A token, and what it spells."""
    return f"token {int(token)} ({'eos' if is_eos else repr(data) if data else 'special'})"


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
    plain = bytes(byte for byte in coming if byte < 128)
    named = [_run(first, last) for first, last in _runs(plain)]
    others = list(islice(_characters(index, state, coming[len(plain) :]), MAX_OTHERS + 1))
    named += map(repr, others) if len(others) <= MAX_OTHERS else ["characters beyond ASCII"]
    ends, goes_on = index.accepts(state), ", ".join(named)
    if ends:
        return "it ends here" + f", or goes on with {goes_on}" * bool(named)
    return f"here may come {goes_on}" if named else "nothing may come here"


def _run(first: int, last: int) -> str:
    """'a', 'b' or 'a' to 'z'"""
    run = list(map(chr, range(first, last + 1)))
    return f"{run[0]!r} to {run[-1]!r}" if len(run) > 3 else ", ".join(map(repr, run))


def _characters(index: Any, state: State, coming: bytes, begun: bytes = b"") -> Iterator[str]:
    """The characters that some bytes begun go on to, in their order."""
    for byte in coming:
        data, after = begun + bytes([byte]), index.advance(state, byte)
        if len(data) == 1 + sum(data[0] >= least for least in (0xC0, 0xE0, 0xF0)):
            yield data.decode()
        else:
            yield from _characters(index, after, index.next_bytes(after), data)
