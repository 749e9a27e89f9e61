"""Vocabulary: what each token id of a language model adds to a text, in bytes.

One idea: the bytes of a token are what it adds in the *middle* of a decoded text, so that the bytes of a text are its
tokens' bytes joined. A token is *special* if it adds nothing to a text: control tokens, the ends of text (*eos*), and
*unknown* ids, behind which the tokenizer has no entry.
"""

from __future__ import annotations

import hashlib
import math
import operator
from builtins import bytes as Bytes  # Token has an attribute of that name
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from llmppl.constraints.vocabulary.decoding import token_bytes
from llmppl.constraints.vocabulary.text import EOS, EndOfText, Spelled, Text, bytes_of
from llmppl.support.arguments import shown
from llmppl.support.graphs import Memo, reached
from llmppl.support.locks import cached_property
from llmppl.support.shared import Fixed


class Token(Spelled, int):
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
        if other is EOS:
            return self.is_eos
        if isinstance(other, (str, bytes)):
            told = f"str(token) == {str(other)!r}" if isinstance(other, str) else f"token.bytes == {other!r}"
            end = ", or token == EOS for the end of the text" if int(self) in self.vocab.special_ids else ""
            raise TypeError(f"{self!r} is an id, which no {type(other).__name__} equals: compare {told}{end}")
        return int.__eq__(self, other)

    __ne__ = object.__ne__                          # the opposite

    def __str__(self) -> str:
        return self.bytes.decode("utf-8", "replace")

    def __repr__(self) -> str:
        known = "special" if self.vocab.known[self] else "unknown"
        text = repr(self.bytes if "\ufffd" in str(self) else str(self))
        what = "EOS" if self.is_eos else known if int(self) in self.vocab.special_ids else text
        return f"Token({int(self)}, {what})"

    @overload
    def __radd__(self, other: str) -> Text: ...
    @overload
    def __radd__(self, other: int) -> int: ...
    def __radd__(self, other: str | int) -> Text | int:
        return Text(bytes_of(other) + self.bytes) if isinstance(other, str) else int.__radd__(self, other)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Vocabulary, int]]:
        return operator.getitem, (self.vocab, int(self))


class Vocabulary(Fixed, Sequence[Token]):
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

    _names = "tokens", "eos_ids", "special_ids", "known"

    def __init__(
        self, tokens: Sequence[bytes], eos_ids: Iterable[int] = (), special_ids: Iterable[int] = (),
        unknown_ids: Iterable[int] = (),
    ) -> None:  # fmt: skip
        self.tokens = list(tokens)
        if not self.tokens:
            raise ValueError("a vocabulary needs at least one token, and was given none")
        for i, data in enumerate(self.tokens):
            if not isinstance(data, bytes):
                raise TypeError(f"a token is bytes, but tokens[{i}] is the {type(data).__name__} {data!r}")
        eos, special = self._ids(eos_ids, "eos_ids"), self._ids(special_ids, "special_ids")
        unknown = self._ids(unknown_ids, "unknown_ids")
        if eos & unknown:
            raise ValueError(f"ids {sorted(eos & unknown)} are given both as eos_ids and as unknown_ids")
        self.eos_ids = tuple(sorted(eos))
        self.special_ids = eos | special | unknown
        for i in self.special_ids:
            self.tokens[i] = b""
        self.known = self._all_but(unknown)
        self._tokens: Memo[int, Token] = Memo(lambda id: Token(id, self))

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, eos_ids: Iterable[int] | None = None) -> Vocabulary:
        """The vocabulary of a transformers tokenizer, with exact bytes; V is its highest id + 1.

        A token is special if its AddedToken says so or it is among `all_special_ids`; other added tokens are text.
        `eos_ids` are ends of text besides the tokenizer's own, such as those of a generation config.

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
        data = token_bytes(tokenizer, {i: piece for i, piece in pieces.items() if i not in special}, added)
        return cls([data.get(i, b"") for i in range(V)], eos, special, set(range(V)) - pieces.keys() - eos)

    def token(self, value: int) -> Token:
        """This vocabulary's Token for a token or id: an int (numpy's included), no str, float, bool or EOS.

        Raises
        ------
        TypeError, ValueError
            If `value` is no int; if it is not in 0..V-1, or is a Token of a vocabulary that is not equal to this one.
        """
        if isinstance(value, Token) and value.vocab is not self and value.vocab != self:
            sizes = f"({len(value.vocab)} tokens), not to this one ({len(self)} tokens)"
            raise ValueError(f"token {value!r} belongs to another vocabulary {sizes}")
        return self._tokens[self._id(value, "token")]

    def spell(self, data: bytes) -> list[int]:
        """The fewest tokens, special ones aside, whose bytes joined are `data`; of several, the lowest ids first.

        Raises
        ------
        ValueError
            If no tokens spell `data`; names the first byte that none of them reaches.
        """
        ids, lengths = self._spelling
        fewest: list[tuple[float, int]] = [(math.inf, -1)] * len(data) + [(0, -1)]  # tokens from a byte on, the first
        for at in reversed(range(len(data))):
            parts = [data[at : at + n] for n in lengths]
            ways = [(fewest[at + len(part)][0] + 1, ids[part]) for part in parts if part in ids]
            fewest[at] = min(ways, default=fewest[at])
        if fewest[0][0] == math.inf:
            at = max(reached([0], lambda at: [at + n for n in lengths if data[at : at + n] in ids]))
            raise ValueError(
                f"no tokens of this vocabulary spell {shown(data)}: its first {at} bytes can be spelled, "
                f"but no token continues at byte {at}, {shown(data[at:])}"
            )
        out: list[int] = []
        at = 0
        while at < len(data):
            out.append(fewest[at][1])
            at += len(self.tokens[out[-1]])
        return out

    @cached_property
    def not_eos(self) -> npt.NDArray[np.bool_]:
        """(V,) bool, read-only: every token but those that end a text."""
        return self._all_but(self.eos_ids)

    @cached_property
    def only_eos(self) -> npt.NDArray[np.bool_]:
        """(V,) bool, read-only: the tokens that end a text, and no other."""
        return self._all_but(np.flatnonzero(self.not_eos))

    def _all_but(self, ids: Iterable[int]) -> npt.NDArray[np.bool_]:
        mask = np.ones(len(self), dtype=np.bool_)
        mask[list(ids)] = False
        mask.flags.writeable = False
        return mask

    @cached_property
    def ids_by_bytes(self) -> dict[bytes, list[int]]:
        """The ids of the tokens that add given bytes to a text, ascending; special tokens are not among them."""
        found: dict[bytes, list[int]] = {}
        for id, data in enumerate(self.tokens):
            found.setdefault(data, []).append(id)
        found.pop(b"", None)
        return found

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """(V,) int64: how many bytes each token adds to a text."""
        return np.fromiter(map(len, self.tokens), np.int64, len(self.tokens))

    @cached_property
    def _spelling(self) -> tuple[dict[bytes, int], list[int]]:
        """Bytes -> lowest id, and the lengths that occur, ascending."""
        ids = {data: same[0] for data, same in self.ids_by_bytes.items()}
        return ids, sorted(set(map(len, ids)))

    @cached_property
    def digest(self) -> bytes:
        """Of what is in it."""
        facts = repr((self.eos_ids, sorted(self.special_ids), np.flatnonzero(~self.known).tolist()))
        return hashlib.blake2b(b"".join([self.lengths.tobytes(), *self.tokens, facts.encode()])).digest()

    def _ids(self, values: Iterable[int], name: str) -> frozenset[int]:
        return frozenset(self._id(value, name) for value in values)

    def _id(self, value: object, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name}: {self._no_id(value)}")
        if not 0 <= value < len(self.tokens):
            raise ValueError(f"{name}: id {int(value)} is not in this vocabulary, whose ids are 0 to {len(self) - 1}")
        return int(value)

    def _no_id(self, value: object) -> str:
        kind = type(value).__name__
        match value:
            case str() | bytes():
                return f"a {kind} is not a token; {value!r} was given where an id belongs"
            case EndOfText():
                return f"EOS stands for every eos of the vocabulary, {self.eos_ids}; name one by its id"
        return f"a token id is an int, not the {kind} {value!r}"

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Token: ...
    @overload
    def __getitem__(self, index: slice) -> list[Token]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Token | list[Token]:
        if isinstance(index, slice):
            return [self._tokens[i] for i in range(*index.indices(len(self)))]
        try:
            return self._tokens[self._id(index, "vocab[id]")]
        except ValueError as error:
            raise IndexError(*error.args) from None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Vocabulary):
            return NotImplemented
        return self is other or (len(self) == len(other) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Vocabulary({len(self)} tokens, eos={', '.join(map(str, self.eos_ids)) or None})"

    def __reduce__(self) -> tuple[type[Vocabulary], tuple[list[bytes], tuple[int, ...], list[int], list[int]]]:
        return Vocabulary, (self.tokens, self.eos_ids, sorted(self.special_ids), np.flatnonzero(~self.known).tolist())


def encode_fragment(tokenizer: Any, vocab: Vocabulary, text: str) -> list[int]:
    """Token ids whose bytes joined are exactly `text`, as the tokenizer writes it in the middle of a text.

    No special token comes of it: what looks like one in `text` is spelled as text. Where the tokenizer itself cannot
    write `text` exactly (it normalises it, say), or is None, the fewest tokens that spell it are taken; a ValueError
    says if there are none.
    """
    data = bytes_of(text)
    if not data:
        return []
    if tokenizer is None:
        return vocab.spell(data)
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    # After a guard there is no space that a tokenizer puts before a text; several, as the text may merge with one.
    for guard in ("", "\n", "a", "."):
        ids = tokenizer.encode(guard + str(text), **options)
        num = int(np.searchsorted(np.cumsum(vocab.lengths[ids[::-1]]), len(data))) + 1
        tail = list(ids[-num:])                     # the fewest that have as many bytes
        spells = vocab.lengths[tail].all() and b"".join(map(vocab.tokens.__getitem__, tail)) == data
        if spells and (guard or num == len(ids)):
            return tail
    return vocab.spell(data)


def _as_ids(ids: int | Iterable[int] | None) -> list[int]:
    """Tokenizers and generation configs give one id, several, or None."""
    given = ids if isinstance(ids, Iterable) else [ids]
    return [i for i in given if i is not None]
