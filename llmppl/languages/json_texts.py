"""JSON texts as automata: a schema within reach becomes a DFA over bytes, with the texts that llguidance accepts.

The one idea: an `NFA` is built from its end, and so every part of a schema is a function from the state that follows
it to the state that begins it. What cannot be met leads nowhere (DEAD), and takes what needs it along.

Words. A *gap* is where whitespace may stand: between any two tokens of JSON, and neither before nor after all of them.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from llmppl.languages import json_scalars as scalars
from llmppl.languages.dfa import DFA
from llmppl.languages.json_shapes import Array, Beyond, Choice, Number, Object, Reader, Shape, String, Words
from llmppl.languages.limits import Budget, TooLarge
from llmppl.languages.nfa import ACCEPT, DEAD, NFA, Fragment
from llmppl.languages.regex import Regex

__all__ = ["JsonTexts"]

MAX_PARTS = 100_000                                 # states of the NFA
MAX_STATES = 20_000                                 # of the DFA, where alternatives begin alike
ESCAPES = "json_allow_general_unicode_escapes"
OPTIONS = {"whitespace_flexible", "whitespace_pattern", "coerce_one_of", "lenient", ESCAPES}
ANY_BLANKS = r"[ \n\r\t]+"


class JsonTexts(DFA):
    """The texts of a schema within reach; Beyond if it is not.

    Parameters
    ----------
    schema : dict or bool, with all options in its "x-guidance"
    constraint : JsonSchema
        Whose texts they are: what errors call it, and what reads them.
    """

    def __init__(self, schema: Any, constraint: Any) -> None:
        options = schema.get("x-guidance", {}) if isinstance(schema, dict) else {}
        if options.keys() - OPTIONS or not options.get(ESCAPES):
            raise Beyond("options of llguidance")
        blank = options.get("whitespace_pattern")
        if blank is None and options.get("whitespace_flexible", True):
            blank = ANY_BLANKS
        self.constraint = constraint
        try:
            shape = Reader(schema).shape(schema)
            builder = _Builder(repr(constraint), blank)
            builder.nfa.start = builder.value(shape, ACCEPT)
            super().__init__(builder.nfa)
            if builder.branches:
                self.explore(MAX_STATES)
        except (TooLarge, RecursionError) as error:
            raise Beyond(str(error)) from None

    def __repr__(self) -> str:
        return repr(self.constraint)

    def parse(self, text: str) -> Any:
        """The value that a text writes, as the constraint reads it."""
        return self.constraint.parse(text)


class _Builder:
    """Builds the NFA; `branches` says whether some alternatives begin alike."""

    def __init__(self, name: str, blank: str | None) -> None:
        self.nfa, self.branches = NFA(Budget(name)), False
        self._blank = None if blank is None else _blanks(blank)
        self._gaps: dict[int, int] = {}

    def gap(self, follow: int) -> int:
        """Whitespace or nothing, then `follow`."""
        if self._blank is None or follow == DEAD:
            return follow
        if follow not in self._gaps:
            self._gaps[follow] = self.nfa.optional(self.nfa.include(self._blank, follow), follow)
        return self._gaps[follow]

    def text(self, data: bytes, follow: int) -> int:
        return self.nfa.read(_chain(data), follow)

    def value(self, shape: Shape, follow: int) -> int:
        """A state that reads a value and becomes `follow`."""
        if len(self.nfa) > MAX_PARTS:
            raise Beyond(f"more than {MAX_PARTS:,} states")
        if follow == DEAD:
            return DEAD
        match shape:
            case Words():
                return self.nfa.split(self.text(word.encode(), follow) for word in sorted(shape.words))
            case Number():
                return self.number(shape, follow)
            case String():
                return self.string(shape, follow)
            case Choice():
                self.branches |= sum(isinstance(option, Array | Object) for option in shape.options) > 1
                return self.nfa.split([self.value(option, follow) for option in shape.options])
            case Array():
                return self.array(shape, follow)
            case Object():
                return self.object(shape, follow)
        raise Beyond("any JSON")

    def number(self, shape: Number, follow: int) -> int:
        if shape.low is None or shape.low != shape.high or not shape.above is shape.below is shape.step is None:
            return self.nfa.include(scalars.number(shape), follow)
        is_meant = not shape.integer or shape.low == int(shape.low)
        return self.text(scalars.plain(shape.low).encode(), follow) if is_meant else DEAD

    def string(self, shape: String, follow: int) -> int:
        if len(shape.languages) == 1 and shape.languages[0][0] == "const":
            constant = shape.languages[0][1]
            if constant.isprintable() and not {'"', "\\"} & set(constant):
                fits = shape.least <= len(constant) <= (len(constant) if shape.most is None else shape.most)
                return self.text(f'"{constant}"'.encode(), follow) if fits else DEAD
        if shape.languages:
            return self.nfa.read(scalars.quoted(shape), follow)
        if not shape.least and shape.most is None:
            return self.nfa.read(scalars.string(), follow)
        if shape.most is not None and shape.least > shape.most:
            return DEAD
        if max(shape.least, shape.most or 0) * len(scalars.character()) > MAX_PARTS:
            raise Beyond("a long string")
        end = self.text(b'"', follow)
        if shape.most is None:
            state = self.nfa.star(lambda again: self.nfa.read(scalars.character(), again), end)
        else:
            state = end
            for _ in range(shape.most - shape.least):
                state = self.nfa.split([self.nfa.read(scalars.character(), state), end])
        for _ in range(shape.least):
            state = self.nfa.read(scalars.character(), state)
        return self.text(b'"', state)

    def array(self, shape: Array, follow: int) -> int:
        close, least = self.text(b"]", follow), shape.least
        last = max(len(shape.first), least) if shape.most is None else shape.most
        if last < least:
            return DEAD
        after = self.gap(close)                     # behind the last item
        if shape.most is None:                      # which may be followed by more of its kind
            after = self.nfa.add(())
            more = self.text(b",", self.gap(self.value(shape.rest, after)))
            self.nfa.epsilon[after] = (self.gap(self.nfa.split([more, close])),)
        for i in range(last - 1, -1, -1):
            item = self.value(shape.item(i), after)
            ends = [close] if least <= i else []
            after = self.gap(self.nfa.split([self.text(b",", self.gap(item)) if i else item, *ends]))
        if not last:
            item = self.value(shape.rest, after) if shape.most is None else DEAD
            after = self.gap(self.nfa.split([item, close]))
        return self.text(b"[", after)

    def object(self, shape: Object, follow: int) -> int:
        close = self.text(b"}", follow)
        first, later = self.others(shape, close)    # what may stand before anything, and behind a property
        for name, value, required in reversed(list(shape.named())):
            item = self.item(_chain(json.dumps(name, ensure_ascii=False).encode()), value, self.gap(later))
            more = self.text(b",", self.gap(item))
            first = self.nfa.split([item] if required else [item, first])
            later = self.nfa.split([more] if required else [more, later])
        return self.text(b"{", self.gap(first))

    def others(self, shape: Object, close: int) -> tuple[int, int]:
        """Properties that are not named, or the end: the first of all, and behind others."""
        if shape.others == Choice(()):
            return close, close
        again = self.nfa.add(())
        item = self.item(scalars.other_names(name for name, _, _ in shape.named()), shape.others, again)
        later = self.nfa.split([self.text(b",", self.gap(item)), close])
        self.nfa.epsilon[again] = (self.gap(later),)
        return self.nfa.split([item, close]), later

    def item(self, name: Fragment, value: Shape, follow: int) -> int:
        return self.nfa.read(name, self.gap(self.text(b":", self.gap(self.value(value, follow)))))


def _chain(data: bytes) -> Fragment:
    """A fragment of one string."""
    return tuple(((byte, byte, i if i < len(data) else -1),) for i, byte in enumerate(data, 1))


@lru_cache(16)
def _blanks(pattern: str) -> DFA:
    return Regex(pattern).explore(MAX_STATES)
