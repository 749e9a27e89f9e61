"""Exact bytes of a tokenizer's tokens, derived from its own decoder.

A *piece* is the string by which a tokenizer names a token ("Ġthe", "▁the", "##ing", "<0x0A>"). Pieces such as "<0x0A>"
state their byte. Every other token is decoded between two guard tokens, whose text is cut off. If the result contains
an incomplete character, the piece itself is read, one byte per letter.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

Decode = Callable[[Sequence[int]], str]
BYTE_PIECES = frozenset(map("<0x{:02X}>".format, range(256)))
HEX_BYTES = {f"<0x{a}{b}>": bytes.fromhex(a + b) for a, b in itertools.product(string.hexdigits, repeat=2)}
SAMPLES = "Hello, world! It's a test.\n\tx = 12", "naïve é 日本語 🙂"
OPTIONS = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
NUM_SAMPLES = 64                                    # random samples of three tokens each


def token_bytes(tokenizer: Any, pieces: dict[int, Any], added: dict[int, Any]) -> dict[int, bytes]:
    """Return the bytes of every token of `pieces` (id -> piece, special tokens left out); some of them were `added`.

    Raise a ValueError if the decoder does not work token by token, so that tokens have no exact bytes.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    between = _between(tokenizer, backend, pieces)
    stated = _stated_bytes(backend, pieces, added)
    decoded = {}
    for i in sorted(pieces.keys() - stated.keys()):
        text = between([i])
        incomplete = "\ufffd" in text or backend is None and not text
        decoded[i] = _spelled_bytes(pieces[i], text) if incomplete else text.encode()
    _check(tokenizer, between, decoded)
    return stated | decoded


def _stated_bytes(backend: Any, pieces: dict[int, Any], added: dict[int, Any]) -> dict[int, bytes]:
    """Return the bytes of the tokens whose pieces state them; the decoder is not consulted."""
    stated = {i: piece for i, piece in pieces.items() if isinstance(piece, bytes)}
    fallback = getattr(getattr(backend, "model", None), "byte_fallback", False)
    if fallback or BYTE_PIECES.issubset(pieces.values()):
        stated |= {i: HEX_BYTES[piece] for i, piece in pieces.items() if piece in HEX_BYTES}
    # A token that was added to a byte-level model is matched as plain text, though the decoder may read it as bytes.
    if getattr(backend, "decoder", None) is not None and b'"ByteLevel"' in backend.decoder.__getstate__():
        texts = {i: pieces[i] for i in pieces.keys() & added.keys()}
        stated |= {i: text.encode() for i, text in texts.items() if backend.model.token_to_id(text) != i}
    return stated


def _between(tokenizer: Any, backend: Any, pieces: dict[int, Any]) -> Decode:
    """Return a function that decodes ids between two guard tokens and cuts off the text of the guards."""
    name: Callable[[int], Any]
    join: Callable[[list[Any]], str]
    if backend is None:
        name, join = int, functools.partial(tokenizer.decode, **OPTIONS)
        guard = next(filter(pieces.__contains__, [*tokenizer.encode("a", add_special_tokens=False), *pieces]))
    else:
        name, join = pieces.__getitem__, " ".join if backend.decoder is None else backend.decoder.decode
        guard = "a"
    head = str(join([guard]))
    tail = str(join([guard, guard])).removeprefix(head)
    around = re.compile(f"{re.escape(head)}(.*){re.escape(tail)}", re.DOTALL)

    def between(ids: Sequence[int]) -> str:
        text = str(join([guard, *map(name, ids), guard]))
        match = around.fullmatch(text)
        if match is None:
            raise _inexact(tokenizer, list(map(pieces.__getitem__, ids)), text, f"{head}...{tail}")
        return match[1]

    return between


def _check(tokenizer: Any, between: Decode, exact: dict[int, bytes]) -> None:
    """Raise a ValueError if the tokenizer decodes some sample of tokens to other bytes than theirs joined."""
    ordinary = sorted(filter(exact.__getitem__, exact))
    if not ordinary:
        return
    rng = random.Random(0)
    samples = [rng.choices(ordinary, k=3) for _ in range(NUM_SAMPLES)]
    samples += [list(filter(exact.__contains__, tokenizer.encode(text, add_special_tokens=False))) for text in SAMPLES]
    for ids in samples:
        data = b"".join(map(exact.__getitem__, ids))
        expected = data.decode("utf-8", "replace")
        whole = expected.encode() == data           # decoders differ in how they show an incomplete character
        if whole and (text := between(ids)) != expected:
            raise _inexact(tokenizer, list(map(exact.__getitem__, ids)), text, expected)


def _inexact(tokenizer: Any, tokens: Sequence[object], text: str, expected: str) -> ValueError:
    return ValueError(
        f"the tokenizer {type(tokenizer).__name__} does not decode token by token, so its tokens have no exact bytes: "
        f"the tokens {tokens} in the middle of a text give {text!r}, not {expected!r}. "
        "Build the Vocabulary from a list of bytes instead."
    )


def _spelled_bytes(piece: str, text: str) -> bytes:
    """Return the bytes of a piece of an incomplete character.

    The piece is "<0xC3>" or has one letter for each byte; otherwise the bytes are those of `text`.
    """
    in_bytes = bytes(map(_BYTE_OF.__getitem__, piece)) if _BYTE_OF.keys() >= set(piece) else text.encode()
    return HEX_BYTES.get(piece, in_bytes)


def _byte_alphabet() -> dict[str, int]:
    """Return the bytes of GPT-2's letters and of all Latin-1 characters.

    GPT-2 writes printable Latin-1 as itself and the other bytes as U+0100 and up.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = sorted(set(range(256)) - printable)
    return {chr(byte): byte for byte in range(256)} | {chr(256 + n): byte for n, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()
