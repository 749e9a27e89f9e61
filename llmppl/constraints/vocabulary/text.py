"""Text: a str that keeps its bytes; EOS: the end of a text.

Several tokens may share one character. A `Text` keeps the bytes, so the character is complete once the last of these
tokens is added.
"""

from __future__ import annotations

from builtins import bytes as Bytes  # Text has an attribute of that name

from llmppl.support.shared import Shared


class Spelled(Shared):
    """Base class of objects that add `bytes` to a text: Text, Token and EOS."""

    __slots__ = ()

    @property
    def bytes(self) -> Bytes:
        """Bytes that the object adds in the middle of a text."""
        raise NotImplementedError

    def __radd__(self, other: str) -> Text:
        if not isinstance(other, str):
            return NotImplemented
        return Text(bytes_of(other) + self.bytes)


class EndOfText(Spelled):
    """End of a text: equal to every token that is an eos of its vocabulary, and empty as a text.

    Examples
    --------
    >>> lm.vocab[lm.vocab.eos_ids[0]] == EOS, str(EOS)
    (True, '')
    """

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

    def __hash__(self) -> int:  # Token defines `==`, also for EOS on the left
        raise TypeError(
            "EOS has no hash: it equals every eos token of a vocabulary, and their hashes differ"
        )

    def __reduce__(self) -> str:  # pickle stores the name of the one object
        return "EOS"


EOS = EndOfText()


class Text(Spelled, str):
    """String that keeps its bytes: `Text(b"\\xc3") + Text(b"\\xa9")` is "é".

    Its value as a str is `bytes.decode("utf-8", "replace")`. Two Texts are equal if their bytes are. A str, a Token or
    EOS can be added to it.

    Raises
    ------
    UnicodeEncodeError
        If a str contains a lone surrogate, which has no bytes in UTF-8.

    Examples
    --------
    >>> half = Text(b"caf\\xc3")
    >>> half.bytes, half + Text(b"\\xa9")
    (b'caf\\xc3', 'café')
    """

    __slots__ = ("bytes",)
    bytes: Bytes

    def __new__(cls, value: str | Bytes | Spelled = "") -> Text:
        data = bytes_of(value)
        text = super().__new__(cls, data.decode("utf-8", "replace"))
        text.bytes = data
        return text

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Text):
            return self.bytes == other.bytes
        return str.__eq__(self, other)

    __ne__ = object.__ne__  # the opposite of __eq__

    def __add__(self, other: str | Spelled) -> Text:
        if not isinstance(other, (str, Spelled)):
            return NotImplemented
        return Text(self.bytes + bytes_of(other))

    def __reduce__(self) -> tuple[type[Text], tuple[Bytes]]:
        return Text, (self.bytes,)


def bytes_of(value: str | bytes | Spelled) -> bytes:
    """Return the bytes of a text; a str is encoded in UTF-8."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, Spelled):
        return value.bytes
    if isinstance(value, str):
        return value.encode()
    raise TypeError(f"a Text is made of str or bytes, not of the {type(value).__name__} {value!r}")
