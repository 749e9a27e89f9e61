"""What errors say of bytes: which may follow, and after which text."""

from __future__ import annotations

__all__ = ["after", "byte_ranges", "expected", "token_name"]

MAX_RANGES = 8
MAX_BYTES = 24


def byte_ranges(bytes: bytes) -> str:
    """b'0'..b'9', b'a'"""
    some = set(bytes)
    first = [byte for byte in bytes if byte - 1 not in some]
    last = [byte for byte in bytes if byte + 1 not in some]
    runs = list(zip(first, last, strict=True))
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
