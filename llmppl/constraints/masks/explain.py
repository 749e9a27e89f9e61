"""Explanations for users: where a text leaves a language, and which bytes may follow there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from llmppl.constraints.constraint import Constraint

__all__ = ["MatchedPrefix", "after", "byte_ranges", "expected", "match_prefix", "token_name"]

MAX_RANGES = 8
MAX_BYTES = 24


def byte_ranges(bytes: bytes) -> str:
    """Return a text such as "b'0'..b'9', b'a'", of ascending bytes."""
    runs = [[byte for _, byte in run] for _, run in groupby(enumerate(bytes), lambda pair: pair[1] - pair[0])]
    shown = [repr(b"%c" % run[0]) + f"..{b'%c' % run[-1]!r}" * (len(run) > 1) for run in runs[:MAX_RANGES]]
    return ", ".join(shown) + ", ..." * (len(runs) > MAX_RANGES)


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
    expected: str                                       # description of the bytes that may follow


@dataclass(frozen=True, eq=False)
class Bytes:
    """Vocabulary whose tokens are the 256 bytes, in their order, and an eos."""

    tokens: Sequence[bytes]
    eos_ids: Sequence[int]


BYTES = Bytes([*(bytes([byte]) for byte in range(256)), b""], [256])


def match_prefix(constraint: Constraint, text: str) -> MatchedPrefix:
    """Read `text` byte by byte as far as the constraint allows."""
    index: Any = constraint.index(BYTES)
    state, length = index.start, len(text)
    for at, character in enumerate(text):
        after = state
        for byte in character.encode():
            if not index.mask(after)[byte]:
                return MatchedPrefix(at, index.accepts(state), expected(index.next_bytes(after), index.accepts(after)))
            after = index.advance(after, byte)
        state = after
    return MatchedPrefix(length, index.accepts(state), expected(index.next_bytes(state), index.accepts(state)))
