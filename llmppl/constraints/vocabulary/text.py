"""Text: a str that keeps its bytes, and the end of a text.

A character may be split over several tokens. A `Text` holds the bytes, so that the character comes out whole when the
rest of it is added.
"""

from __future__ import annotations

from builtins import bytes as Bytes  # Text has an attribute of that name

from llmppl.support.shared import Shared


class Spelled(Shared):
    """Something that adds `bytes` to a text: a Text, a Token, or EOS."""

    __slots__ = ()

    @property
    def bytes(self) -> Bytes:
        """What it adds in the middle of a text."""
        raise NotImplementedError

    def __radd__(self, other: str) -> Text:
        return Text(bytes_of(other) + self.bytes) if isinstance(other, str) else NotImplemented


class EndOfText(Spelled):
    """The end of a text: equal to every token that is an eos of its vocabulary, and empty as a text."""

    __slots__ = ()
    bytes = b""
    _one: EndOfText | None = None

    def __new__(cls) -> EndOfText:
        cls._one = cls._one or super().__new__(cls)
        return cls._one

    def __repr__(self) -> str:
        return "EOS"

    def __str__(self) -> str:
        return ""

    def __hash__(self) -> int:                      # `==` is Token's: it is asked also where EOS stands first
        raise TypeError("EOS has no hash: it equals every eos token of a vocabulary, and their hashes differ")

    def __reduce__(self) -> str:                    # for pickle: the name of the one object
        return "EOS"


EOS = EndOfText()


class Text(Spelled, str):
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

    def __new__(cls, value: str | Bytes | Spelled = "") -> Text:
        data = bytes_of(value)
        text = super().__new__(cls, data.decode("utf-8", "replace"))
        text.bytes = data
        return text

    def __add__(self, other: str | Spelled) -> Text:
        return Text(self.bytes + bytes_of(other)) if isinstance(other, (str, Spelled)) else NotImplemented

    def __reduce__(self) -> tuple[type[Text], tuple[Bytes]]:
        return Text, (self.bytes,)


def bytes_of(value: str | bytes | Spelled) -> bytes:
    """The bytes of a text: a str's are UTF-8."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, Spelled):
        return value.bytes
    if isinstance(value, str):
        return value.encode()
    raise TypeError(f"a Text is made of str or bytes, not of the {type(value).__name__} {value!r}")
