"""Pattern: regular expressions without an automaton, such as those with backreferences, tested on prefixes.

A token may follow a text if both together may begin a match, by the partial matching of the `regex` package. Where a
prefix ends, `\\b`, `$` and look-behind can fail although they hold in a longer text. A prefix that fails is therefore
tested again by a *looser* pattern, without these conditions and without atomic groups, which may depend on them.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from time import thread_time
from typing import Any

import numpy as np

from llmppl.constraints.constraint import Bools, Index, VocabularyLike, without_bytes
from llmppl.constraints.machine.machine import Continuation, Hypothesis, Item
from llmppl.constraints.machine.parts import Part
from llmppl.constraints.machine.units import StateUnit
from llmppl.support.arguments import shown
from llmppl.support.graphs import Memo
from llmppl.support.locks import cached_property

regex: Any = import_module("regex")  # it has no types
_CLASS = r"\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]"
_PARTS = regex.compile(
    rf"(?s)(?P<look>\(\?(?:<[!=]|!)(?P<in>(?:\\.|{_CLASS}|[^()\\\[]|\((?&in)\))*)\))|(?P<edge>\\[bBmMXG])"
    rf"|(?P<atomic>\(\?>)|\(\?|\\.|{_CLASS}|(?P<quantifier>[*+?]|\{{\d*,?\d*\}})\+"
)
_OTHERS = (
    "é٣\u3000…ſ\u212aıİ\u2028"  # of every class that a pattern has without naming other characters
)
_ITEMS = regex.compile(
    rf"(?s)(\(\?#[^)]*\)|\\.|{_CLASS}|.)(?:(?:\s|\(\?#[^)]*\))*+\{{(?P<least>\d*),?\d*\}})?"
)
MAX_COPIES = 200_000  # of items of a pattern, at 0.7 KB
MAX_SECONDS = 5  # of CPU time for the texts of a mask
_EDGES = regex.compile(r"\\[bBmMzZXG]|\$|\(\?<[!=]")


class Pattern(Part):
    """The texts that `regex.fullmatch(pattern, text, flags)` accepts: `Pattern(r"(\\w+) and \\1")`.

    Programs test only the tokens that they draw (rejection, with exact weights). Use a `Regex` where it takes the
    pattern: it is faster and plans the end within `max_tokens`, where a Pattern lets unfinished texts die.
    Raises ValueError if the pattern has an error, reads from the right or repeats too much, or if reading takes long.

    Examples
    --------
    >>> "bats and bats" in Pattern(r"(\\w+) and \\1"), "cats and bats" in Pattern(r"(\\w+) and \\1")
    (True, False)
    """

    def __init__(self, pattern: str, flags: int = 0) -> None:
        self.pattern, self.flags = pattern, int(flags)
        try:
            _check_copies(str(pattern))
            self._tests = [regex.compile(pattern, flags)]
        except (regex.error, TypeError, ValueError) as error:
            raise ValueError(f"error in pattern {shown(pattern)}: {error}") from None
        if self._tests[0].flags & regex.REVERSE or not isinstance(pattern, str):
            raise ValueError(
                f"pattern {shown(pattern)}: a Pattern is a str and reads text from the left, without (?r)"
            )
        self.names_others = not pattern.isascii() or bool(
            regex.search(r"\\[pPNxuUXL0]|\[:", pattern)
        )
        if _EDGES.search(pattern):
            self._tests.append(_looser(pattern, flags))

    def __repr__(self) -> str:
        return (
            f"Pattern({self.pattern!r}{f', {regex.RegexFlag(self.flags)!r}' if self.flags else ''})"
        )

    def matches(self, text: str, partial: bool = False, end: float = np.inf) -> bool:
        """Return True if `text` is a match; if `partial`, also if it may begin one (or seems to), by CPU time `end`."""
        try:
            seconds = max(min(end - thread_time(), 1), 1e-6)
            return any(
                test.fullmatch(text, partial=partial, timeout=seconds)
                for test in self._tests[: 1 + partial]
            )
        except (TimeoutError, MemoryError):
            limits = f"more than 1 s ({MAX_SECONDS} s for all texts of a mask), or too much memory,"
            raise ValueError(f"{self!r} takes {limits} to read {shown(text)}") from None

    __contains__ = matches

    def index(self, vocab: VocabularyLike) -> Index:
        return _PatternIndex(self, vocab)

    # ---- as a part of a composition

    is_opaque = True

    @cached_property
    def _unit(self) -> StateUnit:
        return StateUnit(_Prefixes(self))

    def begin(self, after: Continuation) -> list[Item]:
        return [Hypothesis(self._unit, self._unit.number(b""), after)]

    def least_bytes(self, alone: Bools) -> float:
        return np.inf


def _check_copies(pattern: str) -> None:
    """Check how often `regex` copies items: it reads `(?:a{3}b){2,5}` as `aaabaaab(?:aaab){0,3}`."""
    copies, around = 0, [1]  # so far; of the items of each open group
    for match in reversed(list(_ITEMS.finditer(pattern))):
        number = around[-1] * max(int(match["least"] or 0), 1)
        copies += number
        if copies > MAX_COPIES:
            copied = f"more than {MAX_COPIES:,} copies of items from position {match.start()} on"
            raise ValueError(
                f"its counts make {copied}; smaller ones or {{0,1000}}, which copies nothing, would work"
            )
        around = {")": [*around, number], "(": around[:-1] or [1]}.get(match[1], around)


def _looser(pattern: str, flags: int) -> Any:
    """Compile a pattern that partially matches every prefix of a match of `pattern`."""

    def swap(match: Any) -> str:
        if match["look"] and _EDGES.search(match[0]):
            return (
                "(" if regex.compile(match["in"]).groups else "(?:)"
            )  # "(" is an error: a group would be lost
        return (
            rf"(?:{match[0]}|\Z)"
            if match["edge"]
            else "(?:"
            if match["atomic"]
            else match["quantifier"] or match[0]
        )

    try:
        return regex.compile(_PARTS.sub(swap, pattern), flags)
    except regex.error:  # a group or a quantifier is missing
        return regex.compile("(?s).*")


class _Prefixes:
    """Recognizer of a Pattern; a state is the bytes of the text."""

    start = b""

    def __init__(self, constraint: Pattern) -> None:
        self.constraint = constraint

    def step(self, state: bytes, byte: int) -> bytes | None:
        after = state + bytes((byte,))
        return after if self.begins(after, np.inf) else None

    def accepts(self, state: bytes) -> bool:
        return state.decode("utf-8", "surrogateescape") in self.constraint

    def begins(self, data: bytes, end: float) -> bool:
        """Return True if a match may begin with the bytes, by CPU time `end`."""
        begins = partial(self.constraint.matches, partial=True, end=min(end, thread_time() + 1))
        try:
            return begins(data.decode())
        except UnicodeDecodeError as error:  # the last character may be incomplete
            text = data[: error.start].decode()
            if error.reason != "unexpected end of data" or not begins(text):
                return False
        chars = _OTHERS + text + text.swapcase()
        return self.constraint.names_others or any(
            begins(text + char) for char in chars if not char.isascii()
        )


class _PatternIndex(Index):
    """Index of a Pattern; a state is the bytes of the text, None after an eos."""

    start = b""

    def __init__(self, constraint: Pattern, vocab: VocabularyLike) -> None:
        self.constraint = constraint
        self.vocab = vocab
        self._never = without_bytes(vocab)
        self._prefixes = _Prefixes(constraint)
        self._masks = Memo(self._find, 256)
        self._firsts: Memo[tuple[bytes, float], bool]  # by the text with the first byte of a token
        self._firsts = Memo(lambda key: self._prefixes.begins(*key), 4096)

    def fits(self, state: bytes | None, token: int, end: float = np.inf) -> bool:
        if state is None or token in self._never:
            return token in self.vocab.eos_ids and self.accepts(state)
        data = self.vocab.tokens[token]
        return (
            bool(data)
            and self._firsts[state + data[:1], end]
            and self._prefixes.begins(state + data, end)
        )

    def accepts(self, state: bytes | None) -> bool:
        return state is not None and self._prefixes.accepts(state)

    def advance(self, state: bytes | None, token: int) -> bytes | None:
        if state is None or not self.fits(state, token):
            raise ValueError(f"token {token} may not follow {shown(state)}")
        return None if token in self._never else state + self.vocab.tokens[token]

    def mask(self, state: bytes | None) -> Bools:
        return self._masks[state]

    def _find(self, state: bytes | None) -> Bools:
        end = thread_time() + MAX_SECONDS
        mask = np.array([self.fits(state, token, end) for token in range(len(self.vocab.tokens))])
        mask.flags.writeable = False
        return mask
