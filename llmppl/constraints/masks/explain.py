"""Explanations for users: where a text leaves a language, and which bytes or characters may follow there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from llmppl.constraints.constraint import Constraint, State

__all__ = ["MatchedPrefix", "after", "byte_ranges", "expected", "match_prefix", "token_name"]

MAX_RANGES = 8
MAX_BYTES = 24
MAX_OTHERS = 12                                     # characters beyond ASCII that are listed


def _runs(bytes: bytes) -> list[tuple[int, int]]:
    """Return the first and the last byte of each run of consecutive bytes."""
    some = set(bytes)
    first = [byte for byte in bytes if byte - 1 not in some]
    last = [byte for byte in bytes if byte + 1 not in some]
    return list(zip(first, last, strict=True))


def byte_ranges(bytes: bytes) -> str:
    """Return a text such as "b'0'..b'9', b'a'"."""
    runs = _runs(bytes)
    shown = [repr(b"%c" % a) + f"..{b'%c' % b!r}" * (b > a) for a, b in runs[:MAX_RANGES]]
    return ", ".join(shown) + (", ..." if len(runs) > MAX_RANGES else "")


def expected(bytes: bytes, ends: bool) -> str:
    """Describe the possible continuations: one of `bytes`, or the end of the text if `ends`."""
    if not bytes:
        return "the text must end"
    return f"the next byte must be one of {byte_ranges(bytes)}{', or the text must end' if ends else ''}"


def after(text: bytes) -> str:
    """Return in words the place after `text`; of a long text, its last bytes."""
    if not text:
        return "at the start"
    shown, dots = text[-MAX_BYTES:], "..." * (len(text) > MAX_BYTES)
    try:
        return f"after {dots}{shown.decode()!r}"
    except UnicodeDecodeError:
        return f"after {dots}{shown!r}"


def token_name(token: int, data: bytes, is_eos: bool) -> str:
    """Return in words a token and its text."""
    return f"token {int(token)} ({'eos' if is_eos else repr(data) if data else 'special'})"


class MatchedPrefix(NamedTuple):
    """Longest prefix of a text that begins a match."""

    length: int                                         # in characters
    complete: bool                                      # True if the prefix is itself a match
    expected: str                                       # description of the characters that may follow


@dataclass(frozen=True, eq=False)
class Bytes:
    """Vocabulary whose tokens are the 256 bytes, in their order, and an eos."""

    tokens: Sequence[bytes]
    eos_ids: Sequence[int]


BYTES = Bytes([*(bytes([byte]) for byte in range(256)), b""], [256])


def match_prefix(constraint: Constraint, text: str) -> MatchedPrefix:
    """Read `text` byte by byte as far as the constraint allows."""
    index: Any = constraint.index(BYTES)
    state = index.start
    for length, character in enumerate(text):
        before = state
        for byte in character.encode():
            if not index.mask(state)[byte]:
                return MatchedPrefix(length, index.accepts(before), _expected(index, before))
            state = index.advance(state, byte)
    return MatchedPrefix(len(text), index.accepts(state), _expected(index, state))


def _expected(index: Any, state: State) -> str:
    """Return in words the characters that may follow: runs of ASCII, and the first few others."""
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
    """Return a text such as "'a', 'b'" or "'a' to 'z'"."""
    run = list(map(chr, range(first, last + 1)))
    return f"{run[0]!r} to {run[-1]!r}" if len(run) > 3 else ", ".join(map(repr, run))


def _characters(index: Any, state: State, coming: bytes, begun: bytes = b"") -> Iterator[str]:
    """Yield the characters that begin with the bytes `begun` and continue with a byte of `coming`, in their order."""
    for byte in coming:
        data, after = begun + bytes([byte]), index.advance(state, byte)
        if len(data) == 1 + sum(data[0] >= least for least in (0xC0, 0xE0, 0xF0)):
            yield data.decode()
        else:
            yield from _characters(index, after, index.next_bytes(after), data)
