"""JSON texts as automata: compiles a schema to a recognizer over bytes of the texts that llguidance accepts.

An `NFA` is built from its end, so each part of a schema is a function from the state that follows it to the state that
begins it. An impossible part gives DEAD, and so does every part that needs it.

Where any JSON may stand, brackets nest, and `OpenTexts` uses a stack. Whitespace may stand between any two tokens of
JSON, but neither before the first nor after the last.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, Self

import numpy as np

from llmppl.constraints.automata.budget import Budget, TooLarge
from llmppl.constraints.automata.determinise import Machine
from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.nfa import ACCEPT, DEAD, NFA, Fragment
from llmppl.constraints.automata.operations import Edge
from llmppl.constraints.automata.regex import Regex
from llmppl.constraints.constraint import VocabularyLike
from llmppl.constraints.json import scalars as scalars
from llmppl.constraints.json.ends import MARKS, OPENING, NestedDistances
from llmppl.constraints.json.scalars import fragment
from llmppl.constraints.json.shapes import (
    ANY,
    NEVER,
    Array,
    Choice,
    NotCompilable,
    Number,
    Object,
    Reader,
    Shape,
    String,
    Words,
)
from llmppl.constraints.masks import TokenIndex
from llmppl.constraints.masks.self_loops import Key, key_of
from llmppl.support.graphs import Memo

__all__ = ["JsonTexts", "OpenTexts", "texts_of"]

MAX_PARTS = 100_000                                 # states of the NFA
MAX_PAIRS = 1_000_000                               # of optional properties that may follow one another
MAX_STATES = 20_000                                 # of the DFA, if alternatives begin alike
ESCAPES = "json_allow_general_unicode_escapes"
OPTIONS = {"whitespace_flexible", "whitespace_pattern", "coerce_one_of", "lenient", ESCAPES}
ANY_BLANKS = r"[ \n\r\t]+"
REMEDY = '"additionalProperties": false and "items" would work'

Stacks = tuple[tuple[int, ...], ...]


class JsonTexts(DFA):
    """Texts of a schema that describes the content of all its objects and arrays; made by `texts_of`."""

    def __init__(self, nfa: NFA, constraint: Any) -> None:
        self.constraint = constraint
        super().__init__(nfa)

    def __repr__(self) -> str:
        return repr(self.constraint)

    def parse(self, text: str) -> Any:
        """Return the value that a text writes, as the constraint reads it."""
        return self.constraint.parse(text)


class OpenTexts(Machine):
    """Texts of a schema with parts that may be any JSON, as a pushdown recognizer; made by `texts_of`.

    Its states are numbered in the order of their discovery, and there are infinitely many. `control` reads the schema,
    in which a mark stands for the inside of an object or array of any JSON. `inside` reads such an inside, after its
    mark, again with marks in it. A state is a set of stacks of their states. The first state of a stack is the current
    one; each other one is where reading continues when the state before it ends. The last belongs to `control`, the
    others to `inside`. There are several stacks where a bracket may begin any JSON as well as a part that the schema
    describes.
    """

    distances = NestedDistances

    def __init__(self, control: DFA, inside: DFA, constraint: Any) -> None:
        self.control, self.inside, self.constraint = control, inside, constraint
        self._stacks: list[Stacks] = [()]
        self._loops = Memo(partial(key_of, control.row))
        super().__init__(_Stacked(control, inside, repr(constraint)))

    def _add(self, key: Stacks) -> int:
        """Number a new key, and return its number. Overwrites the leftovers of an interrupt."""
        self._stacks[len(self._keys) :] = [key]
        return super()._add(key)

    def loop(self, state: int) -> Key | None:
        """Return the self-loop key (`masks.self_loops.key_of`) of the current state if there is one stack."""
        stacks = self._stacks[state]
        if len(stacks) > 1:
            return None
        (top, *_), machine = stacks[0], self._source.machine(stacks[0])
        return (self._loops if machine is self.control else _loops(machine))[top]

    def stacks(self, state: int) -> Stacks:
        """Return the stacks of a state."""
        return self._stacks[state]

    def explore(self, limit: int | None = None) -> Self:
        """Raise TooLarge: the number of states is infinite."""
        raise TooLarge(repr(self), "nested JSON has infinitely many states", REMEDY)

    def index(self, vocab: VocabularyLike) -> TokenIndex:
        """Return the index of the tokens of a vocabulary that may follow in each state."""
        return TokenIndex(self, vocab)

    def __repr__(self) -> str:
        return repr(self.constraint)

    def parse(self, text: str) -> Any:
        """Return the value that a text writes, as the constraint reads it."""
        return self.constraint.parse(text)


class _Stacked:
    """Source of the states of OpenTexts; a key is a tuple of stacks."""

    def __init__(self, control: DFA, inside: DFA, name: str) -> None:
        self.nfa = NFA(Budget(name))                # only for its budget
        self._control, self._inside = control, inside
        self._starts = [inside.step(inside.start, mark) or 0 for mark in MARKS]
        self.start: Stacks = ((control.start,),)

    def accepts(self, key: Stacks) -> bool:
        return any(len(stack) == 1 and self._control.accepts(stack[0]) for stack in key)

    def moves(self, key: Stacks) -> list[tuple[int, int, Stacks]]:
        if len(key) == 1:
            ((top, *rest),) = key
            found = self.machine(key[0]).moves(top)
            return [(lo, hi, self._only(lo, target, rest)) for lo, hi, target in found if lo < MARKS[0]]
        table = np.stack([self.machine(stack).row(stack[0]) for stack in key])[:, : MARKS[0]]
        cuts = (np.flatnonzero((table[:, 1:] != table[:, :-1]).any(0)) + 1).tolist()
        moves = []
        for lo, end in itertools.pairwise([0, *cuts, MARKS[0]]):
            targets = table[:, lo].tolist()
            if any(targets):
                pairs = zip(targets, key, strict=True)
                after = {stack for target, (_, *rest) in pairs if target for stack in self._after(lo, target, rest)}
                moves.append((lo, end - 1, tuple(sorted(after))))
        return moves

    def machine(self, stack: tuple[int, ...]) -> DFA:
        """Return the automaton of the first state of a stack."""
        return self._inside if len(stack) > 1 else self._control

    def _only(self, byte: int, target: int, rest: list[int]) -> Stacks:
        """Return the key after a byte that has led the first state of the only stack to `target`."""
        if byte in OPENING or rest:
            return tuple(sorted(self._after(byte, target, rest)))
        return ((target,),)

    def _after(self, byte: int, target: int, rest: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield the stacks after a byte that has led the first state of a stack to `target`."""
        machine = self._inside if rest else self._control
        if rest and machine.accepts(target):
            yield tuple(rest)
            return
        if byte not in OPENING:                     # no mark follows
            yield target, *rest
            return
        row = machine.row(target)
        if machine.accepts(target) or row[: MARKS[0]].any():
            yield target, *rest
        for mark, start in zip(MARKS, self._starts, strict=True):
            if row[mark]:
                yield start, int(row[mark]), *rest


def texts_of(schema: Any, constraint: Any) -> JsonTexts | OpenTexts:
    """Return the texts of a schema.

    Parameters
    ----------
    schema : dict or bool, with all options in its "x-guidance"
    constraint : JsonSchema
        Names the texts in errors, and parses them.

    Raises
    ------
    NotCompilable
        No automaton can be made of the schema.
    """
    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else {}
    if options.keys() - OPTIONS or not options.get(ESCAPES):
        raise NotCompilable("options of llguidance")
    blank = options.get("whitespace_pattern")
    if blank is None and options.get("whitespace_flexible", True):
        blank = ANY_BLANKS
    try:
        shape = Reader(schema).shape(schema)
        builder = _Builder(repr(constraint), blank)
        builder.nfa.start = builder.value(shape, ACCEPT)
        if builder.is_open:
            control = DFA(builder.nfa)
            control = control.explore(MAX_STATES) if builder.branches else control
            return OpenTexts(control, _any_json(blank), constraint)
        texts = JsonTexts(builder.nfa, constraint)
        return texts.explore(MAX_STATES) if builder.branches else texts
    except (TooLarge, RecursionError) as error:
        raise NotCompilable(str(error)) from None


class _Builder:
    """Builder of the NFA. `branches`: some alternatives begin alike. `is_open`: some part may be any JSON.

    Each method takes the state that follows, and returns the state that reads a part and becomes that state.
    """

    def __init__(self, name: str, blank: str | None) -> None:
        self.nfa, self.branches, self.is_open = NFA(Budget(name)), False, False
        self._blank = None if blank is None else _blanks(blank)
        self._whitespace: dict[int, int] = {}
        self._pairs = 0

    def whitespace(self, follow: int) -> int:
        """Read whitespace or nothing."""
        if self._blank is None or follow == DEAD:
            return follow
        if follow not in self._whitespace:
            blank = self._blank
            some = self.embed(blank, follow) if isinstance(blank, DFA) else self.nfa.read(blank, follow)
            self._whitespace[follow] = self.nfa.optional(some, follow)
        return self._whitespace[follow]

    def embed(self, dfa: DFA, follow: int) -> int:
        """Read a text of an automaton."""
        rows, ends = _rows(dfa)
        return self.nfa.graph(rows, dict.fromkeys(ends, follow))[1][dfa.start] if dfa.start else DEAD

    def text(self, data: bytes, follow: int) -> int:
        return self.nfa.read(_chain(data), follow)

    def value(self, shape: Shape, follow: int) -> int:
        """Read a value of a shape."""
        if len(self.nfa) > MAX_PARTS:
            raise NotCompilable(f"more than {MAX_PARTS:,} states")
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
                return self.text(b"[", self.items(shape, follow))
            case Object():
                return self.text(b"{", self.members(shape, follow))
        return self.any_value(follow)

    def any_value(self, follow: int) -> int:
        """Read any JSON; an object or array is its opening bracket and the mark of its inside."""
        self.is_open = True
        scalars_ = (Words(frozenset({"null", "true", "false"})), Number(), String())
        nested = (self.text(bytes(pair), follow) for pair in zip(b"{[", MARKS, strict=True))
        return self.nfa.split([*(self.value(shape, follow) for shape in scalars_), *nested])

    def number(self, shape: Number, follow: int) -> int:
        if shape.low is None or shape.low != shape.high or not shape.above is shape.below is shape.step is None:
            return self.embed(scalars.number(shape), follow)
        if shape.integer and shape.low != int(shape.low):
            return DEAD
        texts = scalars.spellings(shape.low, shape.integer)
        return self.nfa.split([self.text(text.encode(), follow) for text in texts])

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
            raise NotCompilable("a long string")
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

    def items(self, shape: Array, follow: int) -> int:
        """Read an array after its opening bracket."""
        close, least = self.text(b"]", follow), shape.least
        last = max(len(shape.first), least) if shape.most is None else shape.most
        if last < least:
            return DEAD
        after = self.whitespace(close)              # after the last item
        if shape.most is None:                      # more items may follow
            after = self.nfa.add(())
            more = self.text(b",", self.whitespace(self.value(shape.rest, after)))
            self.nfa.epsilon[after] = (self.whitespace(self.nfa.split([more, close])),)
        for i in range(last - 1, -1, -1):
            item = self.value(shape.item(i), after)
            ends = [close] if least <= i else []
            after = self.whitespace(self.nfa.split([self.text(b",", self.whitespace(item)) if i else item, *ends]))
        if not last:
            item = self.value(shape.rest, after) if shape.most is None else DEAD
            after = self.whitespace(self.nfa.split([item, close]))
        return after

    def members(self, shape: Object, follow: int) -> int:
        """Read an object after its opening bracket."""
        close = self.text(b"}", follow)
        self._pairs += sum(not required for _, _, required in shape.named()) ** 2
        if self._pairs > MAX_PAIRS:
            raise NotCompilable(f"more than {math.isqrt(MAX_PAIRS):,} optional properties")
        first, later = self.additional_properties(shape, close)         # at the start, and after a property
        for name, value, required in reversed(list(shape.named())):
            item = self.property(_chain(json.dumps(name, ensure_ascii=False).encode()), value, self.whitespace(later))
            more = self.text(b",", self.whitespace(item))
            first = self.nfa.split([item] if required else [item, first])
            later = self.nfa.split([more] if required else [more, later])
        return self.whitespace(first)

    def additional_properties(self, shape: Object, close: int) -> tuple[int, int]:
        """Read unnamed properties or the end: the states for the start of an object, and for after a property."""
        empty = DEAD if shape.least else close
        if shape.additional == NEVER:
            return empty, close
        again = self.nfa.add(())
        item = self.property(scalars.other_names(name for name, _, _ in shape.named()), shape.additional, again)
        later = self.nfa.split([self.text(b",", self.whitespace(item)), close])
        self.nfa.epsilon[again] = (self.whitespace(later),)
        return self.nfa.split([item, empty]), later

    def property(self, name: Fragment, value: Shape, follow: int) -> int:
        return self.nfa.read(name, self.whitespace(self.text(b":", self.whitespace(self.value(value, follow)))))


def _chain(data: bytes) -> Fragment:
    """Return a fragment that reads one string."""
    return tuple(((byte, byte, i if i < len(data) else -1),) for i, byte in enumerate(data, 1))


@lru_cache(16)
def _any_json(blank: str | None) -> DFA:
    """Return the insides of an object and of an array of any JSON, each after its mark."""
    builder = _Builder("any JSON", blank)
    insides = builder.members(Object({}, ANY), ACCEPT), builder.items(Array(0, None, (), ANY), ACCEPT)
    marked = [builder.text(bytes([mark]), inside) for mark, inside in zip(MARKS, insides, strict=True)]
    builder.nfa.start = builder.nfa.split(marked)
    return DFA(builder.nfa).explore()


@lru_cache(16)
def _loops(dfa: DFA) -> Memo[int, Key | None]:
    """Return the self-loop keys of an automaton that several schemas share."""
    return Memo(partial(key_of, dfa.row))


@lru_cache(16)
def _blanks(pattern: str) -> DFA | Fragment:
    """Return the whitespace that matches a pattern, without the empty text."""
    blanks = Regex(pattern).explore(MAX_STATES).but_not("")
    ends = np.flatnonzero(blanks.accepting)
    return blanks if blanks.explore().table[ends].any() else fragment(blanks)


@lru_cache(256)
def _rows(dfa: DFA) -> tuple[list[list[Edge]], list[int]]:
    return dfa.edges(), np.flatnonzero(dfa.accepting).tolist()
