"""Vocabulary: what each token id of a language model adds to a text, in bytes.

One idea: the bytes of a token are what it adds in the *middle* of a decoded text, so that the bytes of a text are its
tokens' bytes joined. They are found by asking the tokenizer's own decoder about one token between two others, and,
where a token is only part of a character, by reading its piece.

A *piece* is the string by which a tokenizer names a token ("Ġthe", "▁the", "##ing", "<0x0A>"). A token is *special* if
it adds nothing to a text: control tokens, the ends of text (*eos*), and *unknown* ids, behind which the tokenizer has
no entry. A character may be split over several tokens; a `Text` is a str that keeps its bytes, so that it comes out
whole again.
"""

from __future__ import annotations

import hashlib
import operator
import random
import re
from builtins import bytes as Bytes  # Text and Token have an attribute of that name
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

__all__ = ["EOS", "Text", "Token", "Vocabulary", "encode_fragment"]


class _EOS:
    """The end of the text: equal to every token that is an eos of its vocabulary, and empty as a text."""

    _one: _EOS | None = None

    def __new__(cls) -> _EOS:
        if cls._one is None:
            cls._one = super().__new__(cls)
        return cls._one

    def __repr__(self) -> str:
        return "EOS"

    def __str__(self) -> str:
        return ""

    def __eq__(self, other: object) -> bool:  # also answers `token == EOS`: an int does not know EOS and asks us
        return other is self or (isinstance(other, Token) and other.is_eos)

    def __hash__(self) -> int:
        raise TypeError("EOS has no hash: it equals every eos token of a vocabulary, and their hashes differ")

    def __radd__(self, text: str) -> Text:
        return Text(text) if isinstance(text, str) else NotImplemented

    def __reduce__(self) -> tuple[type[_EOS], tuple[()]]:  # for copy, deepcopy and pickle
        return _EOS, ()


EOS = _EOS()


class Text(str):
    """A str that keeps its bytes: `Text(b"\\xc3") + Text(b"\\xa9")` is "é".

    As a str it is `bytes.decode("utf-8", "replace")`; compare `.bytes` where the text may end inside a character.
    A str, a Token or EOS may be added to it.

    Raises
    ------
    UnicodeEncodeError
        If a str holds a lone surrogate, which has no bytes in UTF-8.
    """

    __slots__ = ("bytes",)
    bytes: Bytes

    def __new__(cls, value: str | Bytes = "") -> Text:
        data = _bytes_of(value)
        text = super().__new__(cls, data.decode("utf-8", "replace"))
        text.bytes = data
        return text

    def __add__(self, other: str | Token | _EOS) -> Text:
        if isinstance(other, _EOS):
            return self
        return Text(self.bytes + _bytes_of(other)) if isinstance(other, (str, Token)) else NotImplemented

    def __radd__(self, other: str) -> Text:
        return Text(_bytes_of(other) + self.bytes) if isinstance(other, str) else NotImplemented

    def __copy__(self) -> Text:
        return self

    def __deepcopy__(self, memo: object) -> Text:
        return self

    def __reduce__(self) -> tuple[type[Text], tuple[Bytes]]:
        return Text, (self.bytes,)


class Token(int):
    """A token id that knows its vocabulary: `vocab[262]`.

    `str(token)` is its text, `token.bytes` its bytes; `text + token` is a Text; `token == EOS` asks whether it ends the
    text. In all else it is an int, also to sets and dicts, which find it by its id: there is no text in them that it
    could equal. Comparing it with a text is therefore a TypeError, which says to compare `str(token)`.
    """

    vocab: Vocabulary
    __hash__ = int.__hash__

    def __new__(cls, id: int, vocab: Vocabulary) -> Token:
        token = super().__new__(cls, id)
        token.vocab = vocab
        return token

    @property
    def bytes(self) -> Bytes:
        """What the token adds in the middle of a text; b"" if it is special."""
        return self.vocab.tokens[self]

    @property
    def is_eos(self) -> bool:
        """Whether the token is an eos of its vocabulary."""
        return int(self) in self.vocab.eos_ids

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (str, bytes)):
            raise self._no_text(other)
        return int.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        if isinstance(other, (str, bytes)):
            raise self._no_text(other)
        return int.__ne__(self, other)

    def _no_text(self, other: str | Bytes) -> TypeError:
        """The error for comparing the token with a text."""
        told = f"str(token) == {str(other)!r}" if isinstance(other, str) else f"token.bytes == {other!r}"
        end = ", or token == EOS for the end of the text" if int(self) in self.vocab.special_ids else ""
        return TypeError(f"{self!r} is an id, which no {type(other).__name__} equals: compare {told}{end}")

    def __str__(self) -> str:
        return self.bytes.decode("utf-8", "replace")

    def __repr__(self) -> str:
        if self.is_eos:
            what = "EOS"
        elif not self.vocab.known[self]:
            what = "unknown"
        elif int(self) in self.vocab.special_ids:
            what = "special"
        else:
            what = repr(self.bytes if "\ufffd" in str(self) else str(self))
        return f"Token({int(self)}, {what})"

    @overload
    def __radd__(self, other: str) -> Text: ...
    @overload
    def __radd__(self, other: int) -> int: ...
    def __radd__(self, other: str | int) -> Text | int:
        return Text(_bytes_of(other) + self.bytes) if isinstance(other, str) else super().__radd__(other)

    def __copy__(self) -> Token:
        return self

    def __deepcopy__(self, memo: object) -> Token:
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Vocabulary, int]]:
        return operator.getitem, (self.vocab, int(self))


class Vocabulary(Sequence[Token]):
    """The tokens of a language model: id <-> bytes, and which ids are eos, special or unknown.

    `vocab[id]` is a Token, always the same one. Vocabularies are equal, and have equal hashes, if their contents are.

    Parameters
    ----------
    tokens : sequence of V bytes
        Index = id; what is given at special, eos and unknown ids is replaced by b"".
    eos_ids, special_ids, unknown_ids : iterables of int

    Attributes
    ----------
    tokens : list of V bytes, not to be changed
    eos_ids : sorted tuple of int
    special_ids : frozenset of int
        The eos and unknown ids are among them.
    known : (V,) bool ndarray, read-only
        False at unknown ids.

    Raises
    ------
    TypeError
        If a token is not bytes, or an id not an int.
    ValueError
        If there are no tokens, an id is not in 0..V-1, or an eos id is also unknown.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        eos_ids: Iterable[int] = (),
        special_ids: Iterable[int] = (),
        unknown_ids: Iterable[int] = (),
    ) -> None:
        self.tokens = list(tokens)
        if not self.tokens:
            raise ValueError("a vocabulary needs at least one token, and was given none")
        for i, data in enumerate(self.tokens):
            if not isinstance(data, bytes):
                raise TypeError(f"a token is bytes, but tokens[{i}] is the {type(data).__name__} {data!r}")
        eos, special, unknown = (
            frozenset(self._id(i, name) for i in ids)
            for name, ids in (("eos_ids", eos_ids), ("special_ids", special_ids), ("unknown_ids", unknown_ids))
        )
        if eos & unknown:
            raise ValueError(f"ids {sorted(eos & unknown)} are given both as eos_ids and as unknown_ids")
        self.eos_ids = tuple(sorted(eos))
        self.special_ids = eos | special | unknown
        for i in self.special_ids:
            self.tokens[i] = b""
        self.known: npt.NDArray[np.bool_] = np.ones(len(self.tokens), dtype=bool)
        self.known[list(unknown)] = False
        self.known.flags.writeable = False
        self._cache: dict[int, Token] = {}

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, eos_ids: Iterable[int] | None = None) -> Vocabulary:
        """The vocabulary of a transformers tokenizer, with exact bytes; V is its highest id + 1.

        A token is special if its AddedToken says so or it is among `all_special_ids`; other added tokens are text.

        Parameters
        ----------
        tokenizer : a transformers tokenizer, fast or slow
        eos_ids : iterable of int, optional
            Ends of text besides the tokenizer's own, such as those of a generation config.

        Raises
        ------
        ValueError
            If the tokenizer's decoder does not work token by token, so that no bytes would be exact; if an eos id is
            above its highest id.
        """
        added = getattr(tokenizer, "added_tokens_decoder", {})
        pieces: dict[int, Any] = {i: piece for piece, i in tokenizer.get_vocab().items()}
        pieces.update({i: token.content for i, token in added.items()})
        if not pieces:
            raise ValueError(f"the tokenizer {type(tokenizer).__name__} has no tokens")
        V = max(pieces) + 1
        eos = {*_as_ids(eos_ids), *_as_ids(tokenizer.eos_token_id)}
        special = {i for i, token in added.items() if token.special} | {*_as_ids(tokenizer.all_special_ids)}
        tokens = [b""] * V
        ordinary = {i: piece for i, piece in pieces.items() if i not in special}
        for i, data in _read_bytes(tokenizer, ordinary, added).items():
            tokens[i] = data
        return cls(tokens, eos, special, set(range(V)) - pieces.keys() - eos)

    def token(self, value: int) -> Token:
        """This vocabulary's Token for a token or id.

        Raises
        ------
        TypeError
            If `value` is not an int (numpy's included): a str, a float, a bool, EOS.
        ValueError
            If it is not in 0..V-1, or is a Token of a vocabulary that is not equal to this one.
        """
        if isinstance(value, Token) and value.vocab is not self and value.vocab != self:
            raise ValueError(
                f"token {value!r} belongs to another vocabulary ({len(value.vocab)} tokens), "
                f"not to this one ({len(self)} tokens)"
            )
        return self._token(self._id(value, "token"))

    def spell(self, data: bytes) -> list[int]:
        """The fewest tokens, special ones aside, whose bytes joined are `data`; of several, the lowest ids first.

        Raises
        ------
        ValueError
            If no tokens spell `data`; names the first byte that none of them reaches.
        """
        ids, lengths = self._spelling
        fewest: list[int | None] = [None] * len(data) + [0]  # tokens needed from each byte on
        choice = [-1] * len(data)
        for at in reversed(range(len(data))):
            best: tuple[int, int] | None = None
            for n in lengths:
                if at + n > len(data):
                    break
                rest = fewest[at + n]
                id = ids.get(data[at : at + n]) if rest is not None else None
                if rest is not None and id is not None and (best is None or (rest + 1, id) < best):
                    best = rest + 1, id
            if best is not None:
                fewest[at], choice[at] = best
        if fewest[0] is None:
            at = self._reach(data)
            raise ValueError(
                f"no tokens of this vocabulary spell {_shorten(data)}: its first {at} bytes can be spelled, "
                f"but no token continues at byte {at}, {_shorten(data[at:])}"
            )
        out: list[int] = []
        at = 0
        while at < len(data):
            out.append(choice[at])
            at += len(self.tokens[choice[at]])
        return out

    def _reach(self, data: bytes) -> int:
        """The length of the longest prefix of `data` that tokens spell."""
        ids, lengths = self._spelling
        reached = {0}
        for at in range(len(data)):
            if at in reached:
                reached.update(at + n for n in lengths if data[at : at + n] in ids and at + n <= len(data))
        return max(reached)

    @cached_property
    def not_eos(self) -> npt.NDArray[np.bool_]:
        """(V,) bool, read-only: every token but those that end a text."""
        mask = np.ones(len(self), dtype=np.bool_)
        mask[list(self.eos_ids)] = False
        mask.flags.writeable = False
        return mask

    @cached_property
    def only_eos(self) -> npt.NDArray[np.bool_]:
        """(V,) bool, read-only: the tokens that end a text, and no other."""
        mask = ~self.not_eos
        mask.flags.writeable = False
        return mask

    @cached_property
    def ids_by_bytes(self) -> dict[bytes, list[int]]:
        """The ids of the tokens that add given bytes to a text, ascending; special tokens are not among them."""
        found: dict[bytes, list[int]] = {}
        for id, data in enumerate(self.tokens):
            if data:
                found.setdefault(data, []).append(id)
        return found

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """(V,) int64: how many bytes each token adds to a text."""
        return np.fromiter(map(len, self.tokens), np.int64, len(self.tokens))

    @cached_property
    def _spelling(self) -> tuple[dict[bytes, int], list[int]]:
        """Bytes -> lowest id, and the lengths that occur, ascending."""
        ids = {data: i for i, data in reversed(list(enumerate(self.tokens))) if data}
        return ids, sorted({len(data) for data in ids})

    @cached_property
    def _digest(self) -> bytes:
        lengths = np.fromiter(map(len, self.tokens), np.int64, len(self.tokens))
        facts = repr((self.eos_ids, sorted(self.special_ids), np.flatnonzero(~self.known).tolist()))
        return hashlib.blake2b(b"".join([lengths.tobytes(), *self.tokens, facts.encode()])).digest()

    def _id(self, value: object, name: str) -> int:
        if isinstance(value, (str, bytes)):
            raise TypeError(f"{name}: a {type(value).__name__} is not a token; {value!r} was given where an id belongs")
        if value is EOS:
            raise TypeError(f"{name}: EOS stands for every eos of the vocabulary, {self.eos_ids}; name one by its id")
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name}: a token id is an int, not the {type(value).__name__} {value!r}")
        if not 0 <= value < len(self.tokens):
            raise ValueError(f"{name}: id {int(value)} is not in this vocabulary, whose ids are 0 to {len(self) - 1}")
        return int(value)

    def _token(self, id: int) -> Token:
        token = self._cache.get(id)
        return token if token is not None else self._cache.setdefault(id, Token(id, self))

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Token: ...
    @overload
    def __getitem__(self, index: slice) -> list[Token]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Token | list[Token]:
        if isinstance(index, slice):
            return [self._token(i) for i in range(*index.indices(len(self)))]
        try:
            return self._token(self._id(index, "vocab[id]"))
        except ValueError as error:
            raise IndexError(*error.args) from None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Vocabulary):
            return NotImplemented
        return self is other or (len(self) == len(other) and self._digest == other._digest)

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        return f"Vocabulary({len(self)} tokens, eos={', '.join(map(str, self.eos_ids)) or None})"

    def __copy__(self) -> Vocabulary:
        return self

    def __deepcopy__(self, memo: object) -> Vocabulary:
        return self

    def __reduce__(self) -> tuple[type[Vocabulary], tuple[list[bytes], tuple[int, ...], list[int], list[int]]]:
        return Vocabulary, (self.tokens, self.eos_ids, sorted(self.special_ids), np.flatnonzero(~self.known).tolist())


def encode_fragment(tokenizer: Any, vocab: Vocabulary, text: str) -> list[int]:
    """Token ids whose bytes joined are exactly `text`, as the tokenizer writes it in the middle of a text.

    No special token comes of it: what looks like one in `text` is spelled as text. Where the tokenizer itself cannot
    write `text` exactly (it normalises it, say), the fewest tokens that spell it are taken, and so they are where
    `tokenizer` is None.

    Raises
    ------
    ValueError
        If no tokens of the vocabulary spell `text`.
    """
    data = _bytes_of(text)
    if not data:
        return []
    if tokenizer is None:
        return vocab.spell(data)
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    # After a guard there is no space that a tokenizer puts before a text; several, as the text may merge with one.
    for guard in ("", "\n", "a", "."):
        ids = tokenizer.encode(guard + str(text), **options)
        tail = _tail(ids, vocab, data)
        if tail is not None and (guard or len(tail) == len(ids)):
            return tail
    return vocab.spell(data)


def _tail(ids: Sequence[int], vocab: Vocabulary, data: bytes) -> list[int] | None:
    """The last of `ids` whose bytes joined are `data`, or None."""
    start, missing = len(ids), len(data)
    while missing > 0 and start > 0:
        start -= 1
        token = vocab.tokens[ids[start]]
        missing -= len(token)
        if not token or missing < 0 or data[missing : missing + len(token)] != token:
            return None
    return list(ids[start:]) if missing == 0 else None


def _read_bytes(tokenizer: Any, pieces: dict[int, Any], added: dict[int, Any]) -> dict[int, bytes]:
    """The bytes of every ordinary token of a tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    between = _between(tokenizer, backend, pieces)
    told: dict[int, bytes] = {}  # by what the piece is, whatever the decoder makes of it
    asked: dict[int, bytes] = {}
    # A token that was added to a byte-level model is matched as plain text, though the decoder may read it as bytes.
    literal: set[int] = set()
    if backend is not None and backend.decoder is not None and b'"ByteLevel"' in backend.decoder.__getstate__():
        literal = {i for i in pieces.keys() & added.keys() if backend.model.token_to_id(pieces[i]) != i}
    names = set(pieces.values())
    byte_fallback = getattr(getattr(backend, "model", None), "byte_fallback", False) or all(
        f"<0x{byte:02X}>" in names for byte in range(256)
    )
    for i, piece in pieces.items():
        if isinstance(piece, bytes):
            told[i] = piece
        elif i in literal:
            told[i] = piece.encode()
        elif byte_fallback and _HEX_BYTE.fullmatch(piece):
            told[i] = bytes([int(piece[3:5], 16)])
        else:
            text = between([i])
            whole = "\ufffd" not in text and (text or backend is not None)
            data = None if whole else _piece_bytes(piece)
            asked[i] = text.encode() if data is None else data
    _check(tokenizer, between, asked)
    return told | asked


def _between(tokenizer: Any, backend: Any, pieces: dict[int, Any]) -> Callable[[Sequence[int]], str]:
    """A function that decodes ids in the middle of a text: between two tokens, whose own text is then cut off."""
    decode: Callable[[Sequence[int]], str]
    if backend is not None:
        join = " ".join if backend.decoder is None else backend.decoder.decode  # without a decoder, as tokenizers does

        def decode(ids: Sequence[int]) -> str:
            return str(join(["a", *[pieces[i] for i in ids], "a"]))

        head = join(["a"])
    else:
        guard = next(i for i in [*tokenizer.encode("a", add_special_tokens=False), *pieces] if i in pieces)
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}

        def decode(ids: Sequence[int]) -> str:
            return str(tokenizer.decode([guard, *ids, guard], **options))

        head = str(tokenizer.decode([guard], **options))
    tail = decode([]).removeprefix(head)

    def between(ids: Sequence[int]) -> str:
        text = decode(ids)
        if len(text) < len(head) + len(tail) or not (text.startswith(head) and text.endswith(tail)):
            raise _inexact(tokenizer, [pieces[i] for i in ids], text, f"{head}...{tail}")
        return text[len(head) : len(text) - len(tail)]

    return between


def _check(tokenizer: Any, between: Callable[[Sequence[int]], str], exact: dict[int, bytes]) -> None:
    """Raise a ValueError unless, on samples, the tokenizer decodes tokens to their bytes joined."""
    ordinary = sorted(i for i, data in exact.items() if data)
    if not ordinary:
        return
    rng = random.Random(0)
    samples = [rng.choices(ordinary, k=3) for _ in range(64)]
    for text in ("Hello, world! It's a test.\n\tx = 12", "naïve é 日本語 🙂"):
        samples.append([i for i in tokenizer.encode(text, add_special_tokens=False) if i in exact])
    for ids in samples:
        try:
            expected = b"".join([exact[i] for i in ids]).decode()
        except UnicodeDecodeError:  # half a character: decoders differ in what they show for it
            continue
        if (text := between(ids)) != expected:
            raise _inexact(tokenizer, [exact[i] for i in ids], text, expected)


def _inexact(tokenizer: Any, tokens: Sequence[object], text: str, expected: str) -> ValueError:
    return ValueError(
        f"the tokenizer {type(tokenizer).__name__} does not decode token by token, so its tokens have no exact bytes: "
        f"the tokens {tokens} in the middle of a text give {text!r}, not {expected!r}. "
        "Build the Vocabulary from a list of bytes instead."
    )


_HEX_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


def _piece_bytes(piece: str) -> bytes | None:
    """The bytes of a piece that is half a character: "<0xC3>", or a character for each byte; None if it is neither."""
    if _HEX_BYTE.fullmatch(piece):
        return bytes([int(piece[3:5], 16)])
    data = [_BYTE_OF.get(char, -1) for char in piece]
    return None if -1 in data else bytes(data)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes (printable Latin-1 is itself, the rest is U+0100 and on), and all of Latin-1."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in range(256)} | {chr(256 + n): byte for n, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()


def _bytes_of(value: str | bytes | Token) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, (Text, Token)):
        return value.bytes
    if isinstance(value, str):
        return value.encode()
    raise TypeError(f"a Text is made of str or bytes, not of the {type(value).__name__} {value!r}")


def _as_ids(ids: int | Iterable[int] | None) -> list[int]:
    """Tokenizers and generation configs give one id, several, or None."""
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else [i for i in ids if i is not None]


def _shorten(data: bytes) -> str:
    return repr(data) if len(data) <= 24 else f"{data[:24]!r}..."
