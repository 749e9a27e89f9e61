"""Vocabulary: the bytes that each token id of a language model adds to a text.

The bytes of a token are those that it adds in the *middle* of a decoded text, so the bytes of a text are its tokens'
bytes joined. A token is *special* if it adds nothing to a text: control tokens, ends of text (*eos*), and *unknown*
ids, for which the tokenizer has no entry.

The bytes come from the tokenizer's own decoder. A *piece* is the string by which a tokenizer names a token ("Ġthe",
"▁the", "##ing", "<0x0A>"). Pieces such as "<0x0A>" state their byte. Every other token is decoded between two guard
tokens, whose text is cut off. If the result contains an incomplete character, the piece itself is read, one byte per
letter.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import operator
import random
import re
import string
import weakref
from builtins import bytes as Bytes  # Token has an attribute of that name
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, SupportsIndex, overload

import numpy as np

from llmppl.constraints.constraint import Bools, Ints
from llmppl.constraints.vocabulary.text import EOS, Spelled, bytes_of
from llmppl.support.arguments import shown
from llmppl.support.graphs import Memo, reachable
from llmppl.support.locks import Lock, cached_property
from llmppl.support.shared import Shared

Decode = Callable[[Sequence[int]], str]
BYTE_PIECES = frozenset(map("<0x{:02X}>".format, range(256)))
HEX_BYTES = {
    f"<0x{a}{b}>": bytes.fromhex(a + b) for a, b in itertools.product(string.hexdigits, repeat=2)
}
SAMPLES = "Hello, world! It's a test.\n\tx = 12", "naïve é 日本語 🙂"
OPTIONS = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
NUM_SAMPLES = 64  # random samples of three tokens each


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
        if "\ufffd" in text or (backend is None and not text):
            decoded[i] = _spelled_bytes(pieces[i], text)
        else:
            decoded[i] = text.encode()
    _check(tokenizer, between, decoded)
    return stated | decoded


def _stated_bytes(backend: Any, pieces: dict[int, Any], added: dict[int, Any]) -> dict[int, bytes]:
    """Return the bytes of the tokens whose pieces state them; the decoder is not consulted."""
    stated = {i: piece for i, piece in pieces.items() if isinstance(piece, bytes)}
    fallback = getattr(getattr(backend, "model", None), "byte_fallback", False)
    if fallback or BYTE_PIECES.issubset(pieces.values()):
        for i, piece in pieces.items():
            if piece in HEX_BYTES:
                stated[i] = HEX_BYTES[piece]
    # A token that was added to a byte-level model is matched as plain text, though the decoder may read it as bytes.
    decoder = getattr(backend, "decoder", None)
    if decoder is not None and b'"ByteLevel"' in decoder.__getstate__():
        for i in pieces.keys() & added.keys():
            if backend.model.token_to_id(pieces[i]) != i:
                stated[i] = pieces[i].encode()
    return stated


def _between(tokenizer: Any, backend: Any, pieces: dict[int, Any]) -> Decode:
    """Return a function that decodes ids between two guard tokens and cuts off the text of the guards."""
    name: Callable[[int], Any]
    join: Callable[[list[Any]], str]
    guard: Any
    if backend is None:
        name = int
        join = functools.partial(tokenizer.decode, **OPTIONS)
        letter = encode(tokenizer, "a", add_special_tokens=False)
        guard = next(filter(pieces.__contains__, [*letter, *pieces]))
    else:
        name = pieces.__getitem__
        join = " ".join if backend.decoder is None else backend.decoder.decode
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
    for text in SAMPLES:
        encoded = encode(tokenizer, text, add_special_tokens=False)
        samples.append(list(filter(exact.__contains__, encoded)))
    for ids in samples:
        tokens = [exact[id] for id in ids]
        data = b"".join(tokens)
        expected = data.decode("utf-8", "replace")
        if expected.encode() != data:  # decoders differ in how they show an incomplete character
            continue
        text = between(ids)
        if text != expected:
            raise _inexact(tokenizer, tokens, text, expected)


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
    if piece in HEX_BYTES:
        return HEX_BYTES[piece]
    if _BYTE_OF.keys() >= set(piece):
        return bytes([_BYTE_OF[letter] for letter in piece])
    return text.encode()


# GPT-2's letters: printable Latin-1 stands for itself, and U+0100 and up for the other bytes
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_BYTE_OF = {chr(byte): byte for byte in range(256)}
for _place, _byte in enumerate(sorted(set(range(256)) - _PRINTABLE)):
    _BYTE_OF[chr(256 + _place)] = _byte


class Token(Spelled, int):  # type: ignore[misc]  # `1 + token` is that of int
    """Token id that knows its vocabulary: `vocab[262]`.

    `str(token)` is its text and `token.bytes` its bytes; `text + token` is a Text. `token == EOS` is True if the token
    ends the text. Otherwise a token is an int, and sets and dicts find it by its id. To compare it with a text is
    therefore a TypeError, which suggests `str(token)`.

    Examples
    --------
    >>> token = lm.vocab[799]
    >>> token, token.bytes, "get" + token, token == EOS
    (Token(799, ' together'), b' together', 'get together', False)
    """

    vocab: Vocabulary
    __hash__ = int.__hash__

    def __new__(cls, id: int, vocab: Vocabulary) -> Token:
        token = super().__new__(cls, id)
        token.vocab = vocab
        return token

    @property
    def bytes(self) -> Bytes:
        """Bytes that the token adds in the middle of a text; b"" if it is special."""
        return self.vocab.tokens[self]

    @property
    def is_eos(self) -> bool:
        """True if the token is an eos of its vocabulary."""
        return int(self) in self.vocab.eos_ids

    def __eq__(self, other: object) -> bool:
        if other is EOS:
            return self.is_eos
        if isinstance(other, (str, bytes)):
            raise TypeError(
                f"{self!r} is an id, which no {type(other).__name__} equals: compare str(token) or token.bytes, or "
                "token == EOS for the end of the text"
            )
        return int.__eq__(self, other)

    __ne__ = object.__ne__  # the opposite of __eq__

    def __str__(self) -> str:
        return self.bytes.decode("utf-8", "replace")

    def __repr__(self) -> str:
        what = repr(self.bytes if "\ufffd" in str(self) else str(self))
        if self.is_eos:
            what = "EOS"
        elif not self.vocab.known[self]:
            what = "unknown"
        elif int(self) in self.vocab.special_ids:
            what = "special"
        return f"Token({int(self)}, {what})"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Vocabulary, int]]:
        return operator.getitem, (self.vocab, int(self))


class Vocabulary(Shared, Sequence[Token]):
    """Tokens of a language model: the bytes of each id, and the sets of eos, special and unknown ids.

    `vocab[id]` is a Token, always the same object. Vocabularies with equal contents are equal and have equal hashes.

    Parameters
    ----------
    tokens : sequence of V bytes
        Indexed by id; the bytes of special, eos and unknown ids are replaced by b"".
    eos_ids, special_ids, unknown_ids : iterables of int
    special_texts : mapping of int to str
        Names of special ids, such as "<|im_end|>"; these ids are special, too.

    Attributes
    ----------
    tokens : list of V bytes; do not change it
    eos_ids : sorted tuple of int
    special_ids : frozenset of int
        Includes the eos and unknown ids.
    known : (V,) bool ndarray, read-only
        False at unknown ids.

    Raises
    ------
    TypeError
        If a token is not bytes, or an id not an int.
    ValueError
        If there are no tokens, or an id is not in 0..V-1.

    Examples
    --------
    >>> vocab = Vocabulary([b"a", b"b", b"ab", b""], eos_ids=[3])
    >>> vocab.spell(b"aab")
    [0, 2]
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        eos_ids: Iterable[int] = (),
        special_ids: Iterable[int] = (),
        unknown_ids: Iterable[int] = (),
        special_texts: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.tokens = list(tokens)
        if not self.tokens:
            raise ValueError("a vocabulary needs at least one token, and was given none")
        for i, data in enumerate(self.tokens):
            if not isinstance(data, bytes):
                raise TypeError(
                    f"a token is bytes, but tokens[{i}] is the {type(data).__name__} {data!r}"
                )
        eos = self._ids(eos_ids, "eos_ids")
        special = self._ids([*special_ids, *special_texts], "special_ids")
        unknown = self._ids(unknown_ids, "unknown_ids")
        self.eos_ids = tuple(sorted(eos))
        self.special_ids = eos | special | unknown
        for i in self.special_ids:
            self.tokens[i] = b""
        self.special_texts = dict(special_texts)
        self.known = self._all_but(unknown)
        self._tokens: Memo[int, Token] = Memo(lambda id: Token(id, self))
        _LOADED[id(self)] = self

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, eos_ids: Iterable[int] | None = None) -> Vocabulary:
        """Build the vocabulary of a transformers tokenizer, with exact bytes; V is its highest id + 1.

        A token is special if its AddedToken is marked so or `all_special_ids` contains it; other added tokens are text.
        `eos_ids` are more ends of text, such as those of a generation config.

        Raises
        ------
        ValueError
            If the tokenizer's decoder does not work token by token, so that no bytes would be exact; if an eos id is
            above its highest id.
        """
        added = getattr(tokenizer, "added_tokens_decoder", {})
        pieces = {i: piece for piece, i in tokenizer.get_vocab().items()}
        pieces.update({i: token.content for i, token in added.items()})
        V = max(pieces) + 1
        eos = {*_as_ids(eos_ids), *_as_ids(tokenizer.eos_token_id)}
        special = set(_as_ids(tokenizer.all_special_ids))
        special |= {i for i, token in added.items() if token.special}
        ordinary = {i: piece for i, piece in pieces.items() if i not in special}
        data = token_bytes(tokenizer, ordinary, added)
        texts = {i: pieces[i] for i in special | eos if i in pieces}
        return cls(
            [data.get(i, b"") for i in range(V)],
            eos,
            special,
            set(range(V)) - pieces.keys() - eos,
            texts,
        )

    def token(self, value: int) -> Token:
        """Return this vocabulary's Token for a token or id: an int (numpy's included), no str, float, bool or EOS.

        Raises
        ------
        TypeError, ValueError
            If `value` is not an int; if it is not in 0..V-1, or is a Token of a vocabulary that differs from this one.
        """
        if isinstance(value, Token) and value.vocab is not self and value.vocab != self:
            sizes = f"({len(value.vocab)} tokens), not to this one ({len(self)} tokens)"
            raise ValueError(f"token {value!r} belongs to another vocabulary {sizes}")
        return self._tokens[self._id(value, "token")]

    def spell(self, data: bytes) -> list[int]:
        """Return the fewest tokens, none special, whose bytes joined are `data`; ties go to the lowest ids first.

        Raises
        ------
        ValueError
            If no tokens spell `data`; the message names the first byte that cannot be reached.
        """
        ids = self.ids_by_bytes
        lengths = set(map(len, ids))

        def ends(at: int) -> list[int]:
            last = len(data) - at
            return [at + n for n in lengths if n <= last and data[at : at + n] in ids]

        fewest: dict[int, tuple[float, int]] = {
            len(data): (0, -1)
        }  # tokens to the end, and the first
        for at in reversed(range(len(data))):
            ways = []
            for end in ends(at):
                num, _ = fewest[end]
                ways.append((num + 1, ids[data[at:end]][0]))
            fewest[at] = min(ways, default=(math.inf, -1))
        if fewest[0][0] == math.inf:
            at = max(reachable([0], ends))
            raise ValueError(
                f"no tokens of this vocabulary spell {shown(data)}: none continues at byte {at}"
            )
        out = []
        at = 0
        while at < len(data):
            out.append(fewest[at][1])
            at += len(self.tokens[out[-1]])
        return out

    @cached_property
    def not_eos(self) -> Bools:
        """Mask of all tokens except eos: (V,) bool, read-only."""
        return self._all_but(self.eos_ids)

    @cached_property
    def only_eos(self) -> Bools:
        """Mask of the eos tokens: (V,) bool, read-only."""
        return self._all_but(np.flatnonzero(self.not_eos))

    def _all_but(self, ids: Iterable[int]) -> Bools:
        mask = np.ones(len(self), dtype=np.bool_)
        mask[list(ids)] = False
        mask.flags.writeable = False
        return mask

    @cached_property
    def ids_by_bytes(self) -> dict[bytes, list[int]]:
        """Ids of the tokens that add given bytes to a text, ascending; special tokens are left out."""
        found: dict[bytes, list[int]] = {}
        for id, data in enumerate(self.tokens):
            found.setdefault(data, []).append(id)
        found.pop(b"", None)
        return found

    @cached_property
    def lengths(self) -> Ints:
        """Number of bytes that each token adds to a text: (V,) int64."""
        return np.fromiter(map(len, self.tokens), np.int64, len(self.tokens))

    @cached_property
    def digest(self) -> bytes:
        """Digest of the contents."""
        unknown = np.flatnonzero(~self.known).tolist()
        facts = repr((self.eos_ids, sorted(self.special_ids), unknown))
        contents = [self.lengths.tobytes(), *self.tokens, facts.encode()]
        return hashlib.blake2b(b"".join(contents)).digest()

    def _ids(self, values: Iterable[int], name: str) -> frozenset[int]:
        return frozenset(self._id(value, name) for value in values)

    def _id(self, value: object, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(
                f"{name}: a token id is an int, not the {type(value).__name__} {value!r}"
            )
        if not 0 <= value < len(self.tokens):
            raise ValueError(
                f"{name}: id {int(value)} is not in this vocabulary, whose ids are 0 to {len(self) - 1}"
            )
        return int(value)

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Token: ...
    @overload
    def __getitem__(self, index: slice) -> list[Token]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Token | list[Token]:
        if isinstance(index, slice):
            ids = range(*index.indices(len(self)))
            return [self._tokens[i] for i in ids]
        try:
            return self._tokens[self._id(index, "vocab[id]")]
        except ValueError as error:
            raise IndexError(*error.args) from None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Vocabulary):
            return NotImplemented
        if self is other:
            return True
        return self.digest == other.digest and self.special_texts == other.special_texts

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Vocabulary({len(self)} tokens, eos={', '.join(map(str, self.eos_ids)) or None})"

    def __reduce__(self) -> tuple[type[Vocabulary], tuple[Any, ...]]:
        unknown = np.flatnonzero(~self.known).tolist()
        return Vocabulary, (
            self.tokens,
            self.eos_ids,
            sorted(self.special_ids),
            unknown,
            self.special_texts,
        )


_LOADED = weakref.WeakValueDictionary[int, Vocabulary]()  # by id


def loaded_vocabulary(digest: str) -> Vocabulary:
    """Return a vocabulary of this process by the hexadecimal digits of its digest. LookupError if there is none."""
    for ref in _LOADED.valuerefs():
        vocab = ref()
        if vocab is not None and vocab.digest.hex() == digest:
            return vocab
    raise LookupError(f"no vocabulary has the digest {digest}")


_encoding = Lock()


def encode(tokenizer: Any, text: str, **options: bool) -> list[Any]:
    """Return the token ids of a text, for one thread at a time.

    A tokenizer of transformers writes `split_special_tokens` into the tokenizer that all threads share.
    """
    with _encoding.lock:
        return [*tokenizer.encode(text, **options)]  # noqa: E701


def encode_fragment(tokenizer: Any, vocab: Vocabulary, text: str) -> list[int]:
    """Return token ids whose bytes joined are exactly `text`, as the tokenizer writes it in the middle of a text.

    The result has no special token: the name of one in `text` is spelled as text. If the tokenizer is None, or cannot
    write `text` exactly (for example because it normalises text), the fewest tokens that spell it are returned. A
    ValueError is raised if there are none.

    Examples
    --------
    >>> ids = encode_fragment(lm.tokenizer, lm.vocab, " happy birthday")
    >>> [str(lm.vocab[id]) for id in ids]
    [' happy', ' birth', 'day']
    """
    data = bytes_of(text)
    if not data:
        return []
    if tokenizer is None:
        return vocab.spell(data)
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    # After a guard, the tokenizer adds no space before the text; the text may merge with one of the guards.
    for guard in ("", "\n", "a", "."):
        ids = encode(tokenizer, guard + str(text), **options)
        if guard:
            num_bytes = np.cumsum(vocab.lengths[ids[::-1]])
            num = int(np.searchsorted(num_bytes, len(data))) + 1
            ids = ids[-num:]  # the fewest with at least as many bytes
        tokens = [vocab.tokens[id] for id in ids]
        if all(tokens) and b"".join(tokens) == data:
            return ids
    return vocab.spell(data)


def _as_ids(ids: int | Iterable[int] | None) -> list[int]:
    """Return a list of ids; tokenizers and generation configs give one id, several, or None."""
    if ids is None:
        return []
    if not isinstance(ids, Iterable):
        return [ids]
    return [i for i in ids if i is not None]
