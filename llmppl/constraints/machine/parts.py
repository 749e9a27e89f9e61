"""Parts: the algebra of constraints.

A *part* is a set of texts: a Regex, a JsonSchema, a Grammar, or a composition. `a + b` is a text of a followed by one
of b; `a | b` a text of either; `a & b` one of both; `a - b` one of a that is not in b; `a.times(m, n)` m to n texts
of a in a row. A str stands for that text, a list for its strings, a type for its constraint.

A part begins a machine (`llmppl.constraints.machine.machine`): `begin(after)` returns the hypotheses with which one of
its texts begins, before a continuation. The value of a text is put together from the values of its parts
(`llmppl.constraints.machine.values`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import singledispatch
from typing import Any

from llmppl.constraints.constraint import Bools, VocabularyLike
from llmppl.constraints.machine.index import MachineIndex, TestedIndex
from llmppl.constraints.machine.machine import Continuation, Hypothesis, Item, Machine, Then
from llmppl.constraints.machine.pairs import MAX_SEARCHED, Pair, PairUnit
from llmppl.constraints.machine.units import StateUnit, TokenUnit
from llmppl.constraints.machine.values import Reader, Reading, value_of
from llmppl.constraints.masks.index import TokenIndex
from llmppl.support import arguments
from llmppl.support.locks import cached_property
from llmppl.support.shared import Shared

MAX_DEPTH = 60  # of parts inside each other
MAX_SIZE = 10_000  # parts of a composition
FOUND_AGAIN = {"machine", "text_machine", "_unit", "automaton"}  # attributes that pickles leave out


@singledispatch
def part_of(given: Any) -> Part:
    """Return the part that a constraint, a str, a list of str or a type stands for; a TypeError for anything else.

    Examples
    --------
    >>> (part_of(int).named("age") + " years").parse("12 years")
    {'age': 12}
    """
    raise NotImplementedError


class Part(Shared):
    """Set of texts, with the operators of the algebra. A copy is the part itself.

    A text of `a + b` may be cut in several ways; it is in the set if one of them is valid. The checks and the `parse`
    of a part apply to its piece of the text. The value of `a + b` is the tuple of the values of all parts, without
    literal texts and special tokens. If parts have names (`named`), it is the dict of these. If all parts are literal,
    it is the text. A repetition has the list of its values. The results of automata are automata, unless they are
    too large.

    Examples
    --------
    >>> pets = JsonSchema({"type": "array", "items": {"enum": ["cat", "dog"]}})
    >>> record = "Name: " + Regex("[A-Z][a-z]+").named("name") + ", pets: " + pets.named("pets")
    >>> record.parse('Name: Lily, pets: ["cat"]')
    {'name': 'Lily', 'pets': ['cat']}
    """

    # ---- what a subclass defines

    def begin(self, after: Continuation) -> Iterable[Item]:
        """Return the items with which a text begins, before a continuation; none if there are no texts."""
        raise NotImplementedError

    def reading(self, reader: Reader, begin: int, end: int) -> Reading | None:
        """Return the reading of a piece of a text; None if the part does not read it."""
        return reader.read_text(self, begin, end)

    def value_of_text(self, text: str) -> Any:
        """Return the value of a text of a part that is no composition. ValueError if a check refuses it."""
        return text if type(self).parse is Part.parse else self.parse(text)

    def least_bytes(self, alone: Bools) -> float:
        """Return a bound of the bytes of a shortest text; inf if none is known."""
        raise NotImplementedError

    @property
    def inner_parts(self) -> Sequence[Part]:
        """Parts of a composition."""
        return ()

    @cached_property
    def depth(self) -> int:
        """Number of parts inside each other."""
        return 1 + max((part.depth for part in self.inner_parts), default=0)

    @cached_property
    def size(self) -> int:
        """Number of parts, as the composition is written: a part that has two places counts twice."""
        return 1 + sum(part.size for part in self.inner_parts)

    @property
    def names(self) -> frozenset[str]:
        """Names whose values are in the value of a text."""
        return frozenset[str]().union(*(part.names for part in self.inner_parts))

    @property
    def special_tokens(self) -> list[str | int]:
        """Texts or ids of special tokens that the part asks for."""
        return [token for part in self.inner_parts for token in part.special_tokens]

    @property
    def literals(self) -> list[str]:
        """Literal texts in a composition."""
        return [text for part in self.inner_parts for text in part.literals]

    @property
    def is_void(self) -> bool:
        """True if there are no texts, as far as that is known."""
        return any(part.is_void for part in self.inner_parts)

    @cached_property
    def is_opaque(self) -> bool:
        """True if a mask would test each token of the vocabulary by slow code, such as a function of the text."""
        return any(part.is_opaque for part in self.inner_parts)

    @property
    def as_dfa(self) -> Any:
        """The part itself as a DFA, if it is one, or one with a name; else None."""
        return None

    @property
    def automaton(self) -> Any:
        """DFA of the texts that masks allow; None if there is none. It lacks the checks on the finished text."""
        return self.as_dfa

    @property
    def has_checks(self) -> bool:
        """True if `parse` may refuse a text that masks allow."""
        return any(part.has_checks for part in self.inner_parts)

    @property
    def is_text(self) -> bool:
        """True if the value of a text is the text."""
        return False

    @property
    def warnings(self) -> list[str]:
        """Remarks: restrictions that are checked on the finished text, and intersections that may have dead ends."""
        return [line for part in self.inner_parts for line in part.warnings]

    # ---- the algebra: of automata, the results are automata, unless they are too large

    def __add__(self, other: Any) -> Any:
        """Return the texts of this part followed by one of another."""
        other = part_of(other)
        return as_automaton(Concatenation([self, other]), [self.as_dfa, other.as_dfa])

    def __radd__(self, other: Any) -> Any:
        return part_of(other) + self

    def __or__(self, other: Any) -> Any:
        """Return the texts of either part."""
        other = part_of(other)
        return as_automaton(Union([self, other]), [self.as_dfa, other.as_dfa])

    def __ror__(self, other: Any) -> Any:
        return part_of(other) | self

    def __and__(self, other: Any) -> Any:
        """Return the texts of both parts."""
        other = part_of(other)
        return as_automaton(Intersection(self, other), [self.as_dfa, other.as_dfa])

    def __rand__(self, other: Any) -> Any:
        return part_of(other) & self

    def __sub__(self, other: Any) -> Any:
        """Return the texts that are not in another part, which must be regular."""
        other = part_of(other)
        found = None
        if self.as_dfa is not None and other.as_dfa is not None and not other.has_checks:
            found = if_not_too_large(lambda: self.as_dfa.without(other.as_dfa))
        if found is None:
            return self & ~other
        if not self.is_text:
            found.composition = self
        return found

    def __rsub__(self, other: Any) -> Any:
        return part_of(other) - self

    def __invert__(self) -> Any:
        """Return all texts that are not in this part, which must be regular."""
        automaton = None if self.has_checks else self.automaton
        if automaton is None:
            raise TypeError(
                f"the complement of {in_brackets(self)} has no automaton; that of a Regex, a DFA, a list of "
                "strings, or a JsonSchema with an .automaton and without checks on the finished text would work"
            )
        return automaton.complement()

    def times(self, least: int, most: float | None = None) -> Any:
        """Return `least` to `most` texts in a row; `most` is `least` if None, and may be inf."""
        return as_automaton(Repetition(self, *bounds(least, most)), [self.as_dfa])

    def star(self) -> Any:
        """Return any number of texts in a row, none included."""
        return self.times(0, math.inf)

    def optional(self) -> Any:
        """Return the texts, and the empty one. Its value is None, unless the value of each text is the text."""
        if self.is_text:
            return self | ""
        return as_automaton(Union([self, Nothing()]), [self.as_dfa, part_of("").as_dfa])

    def named(self, name: str) -> Named:
        """Return this part with a name, under which the value of its text is in `parsed`."""
        return Named(self, name)

    # ---- use

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in FOUND_AGAIN}

    @property
    def pieces(self) -> Sequence[Part]:
        """Parts that this one adds to a concatenation: those of a concatenation, else itself."""
        return (self,)

    @cached_property
    def machine(self) -> Machine:
        """Recognizer of the part."""
        return Machine(self)

    @cached_property
    def text_machine(self) -> Machine:
        """Recognizer of the part that passes over special tokens, since a text has none."""
        return Machine(self, has_specials=False)

    def index(self, vocab: VocabularyLike) -> Any:
        """Return the index of the tokens of a vocabulary that may follow each state."""
        if self.as_dfa is not None:
            return TokenIndex(self.as_dfa, vocab, self)
        if self.is_opaque:
            return TestedIndex(self, vocab)
        return MachineIndex(self, vocab)

    def parse(self, text: Any) -> Any:
        """Return the value of a str, or of a list of str and `Special`.

        A str is read without special tokens. Of alternatives that differ in these alone, the first
        one reads it. ValueError if the text is not in the set.
        """
        return value_of(self, text)

    def __contains__(self, text: Any) -> bool:
        try:
            value_of(self, text)
        except ValueError:
            return False
        return True


def bounds(least: int, most: float | None) -> tuple[int, float]:
    """Return the checked bounds of a repetition."""
    least = arguments.count("least", least, least=0)
    if most is None:
        return least, least
    if most == math.inf:
        return least, most
    return least, arguments.count("most", most, least=least)


def check_size(part: Part) -> None:
    """Raise a ValueError if a composition has too many parts, or they are nested too deep."""
    reason = ""
    if part.depth > MAX_DEPTH:
        reason = f"nested more than {MAX_DEPTH} deep"
    elif part.size > MAX_SIZE:
        reason = f"made of more than {MAX_SIZE:,} parts"
    if reason:
        raise ValueError(f"a composition is {reason}; a Grammar with recursive rules would work")


class Literal(Part):
    """One given text. It has no place in the value of a composition."""

    def __init__(self, text: str, automaton: Any) -> None:
        self.text = arguments.text("a literal part", text)
        self._automaton = automaton

    def __repr__(self) -> str:
        return repr(self.text)

    def begin(self, after: Continuation) -> Iterable[Item]:
        return self._automaton.begin(after)  # type: ignore[no-any-return]

    def least_bytes(self, alone: Bools) -> float:
        return self._automaton.least_bytes(alone)  # type: ignore[no-any-return]

    @property
    def literals(self) -> list[str]:
        return [self.text]

    @property
    def as_dfa(self) -> Any:
        return self._automaton

    @property
    def is_text(self) -> bool:
        return True

    def parse(self, text: str) -> str:
        if text != self.text:
            raise ValueError(f"{arguments.shown(text)} is not {self!r}")
        return self.text


class Nothing(Part):
    """The empty text, whose value is None."""

    def __repr__(self) -> str:
        return "''"

    def begin(self, after: Continuation) -> Iterable[Item]:
        return [after]

    def least_bytes(self, alone: Bools) -> float:
        return 0.0

    def parse(self, text: str) -> None:
        if text:
            raise ValueError(f"{arguments.shown(text)} is not empty")


class Special(Part):
    """One special token, by its text or id: a symbol beside the bytes, and no text.

    The same characters, spelled with ordinary tokens, are another text. Special tokens add nothing to
    the text of a particle, and `parse` reads a str without them. `parsed` is the value of the tokens.

    Examples
    --------
    >>> vocab = Vocabulary([b"a", b"b", b"", b""], eos_ids=[3], special_texts={2: "<tool>"})
    >>> index = ("a" + Special("<tool>") + "b").index(vocab)
    >>> index.allowed(index.advance(index.start, 0)).tolist()
    [2]
    >>> part = (Special("<tool>") + "b").named("call") | (Special(3) + "b").named("words")
    >>> part.parse([Special(3), "b"])
    {'words': 'b'}
    """

    def __init__(self, token: str | int) -> None:
        is_id = isinstance(token, int) and not isinstance(token, bool) and token >= 0
        if not is_id and not (isinstance(token, str) and token):
            raise TypeError(
                f"Special takes the text of a special token, or its id, not {arguments.shown(token)}"
            )
        if is_id:
            token = int(token)  # a Token has a repr of its own
        self.token = token
        self._unit = TokenUnit(token)

    @property
    def special_tokens(self) -> list[str | int]:
        return [self.token]

    def __repr__(self) -> str:
        return f"Special({self.token!r})"

    def __reduce__(self) -> Any:
        return Special, (self.token,)

    def begin(self, after: Continuation) -> Iterable[Item]:
        return [Hypothesis(self._unit, self._unit.begin, after)]

    def least_bytes(self, alone: Bools) -> float:
        return 1.0

    def value_of_text(self, text: str) -> None:
        return None


class Custom(Part):
    """A recognizer as a part. An opaque one is slow, and only tokens that are drawn are tested by it."""

    def __init__(self, recognizer: Any, is_opaque: bool = False) -> None:
        self.recognizer = recognizer
        self.is_opaque = is_opaque

    def __repr__(self) -> str:
        return repr(self.recognizer)

    def __reduce__(self) -> Any:
        return Custom, (self.recognizer, self.is_opaque)

    @cached_property
    def _unit(self) -> StateUnit:
        return StateUnit(self.recognizer)

    def begin(self, after: Continuation) -> Iterable[Item]:
        return [Hypothesis(self._unit, self._unit.number(self.recognizer.start), after)]

    def least_bytes(self, alone: Bools) -> float:
        return math.inf

    def value_of_text(self, text: str) -> Any:
        return self.recognizer.parse(text) if hasattr(self.recognizer, "parse") else text


class Named(Part):
    """A part with a name for its value."""

    def __init__(self, part: Part, name: str) -> None:
        self.part = part
        self.name = arguments.text("name", name)
        if not name:
            raise ValueError('name must be a text of at least one character, not ""')
        check_size(self)

    def __repr__(self) -> str:
        return f"{in_brackets(self.part)}.named({self.name!r})"

    def begin(self, after: Continuation) -> Iterable[Item]:
        return self.part.begin(after)

    def least_bytes(self, alone: Bools) -> float:
        return self.part.least_bytes(alone)

    @property
    def inner_parts(self) -> Sequence[Part]:
        return (self.part,)

    @property
    def names(self) -> frozenset[str]:
        return frozenset((self.name,))

    def reading(self, reader: Reader, begin: int, end: int) -> Reading | None:
        found = reader.read(self.part, begin, end)
        return None if found is None else Reading(found.result, {self.name: found.result})

    @property
    def as_dfa(self) -> Any:
        return self.part.as_dfa

    @property
    def automaton(self) -> Any:
        return self.part.automaton


class Concatenation(Part):
    """Texts of several parts, one after the other."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = list[Part]()
        for part in parts:
            self.parts += part.pieces
        check_size(self)
        names = [name for part in self.parts for name in part.names]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(
                f"{self!r}: two parts are named {twice[0]!r}; the value of a text has one of each name"
            )

    def __repr__(self) -> str:
        return " + ".join(in_brackets(part) for part in self.parts)

    @property
    def pieces(self) -> Sequence[Part]:
        return self.parts

    @property
    def inner_parts(self) -> Sequence[Part]:
        return self.parts

    def begin(self, after: Continuation) -> Iterable[Item]:
        if self.is_void:
            return []
        for part in reversed(self.parts[1:]):
            after = after.before(Then, part)
        return self.parts[0].begin(after)

    def reading(self, reader: Reader, begin: int, end: int) -> Reading | None:
        found = reader.read_row(self.parts, begin, end)
        if found is None:
            return None
        names = dict[str, Any]()
        values = list[Any]()
        for part, reading in zip(self.parts, found, strict=True):
            names |= reading.names
            if not isinstance(part, Literal | Special):
                values.append(reading.value)
        if not values:
            return Reading(reader.text(begin, end), names)
        return Reading(tuple(values), names)

    @property
    def is_text(self) -> bool:
        return all(isinstance(part, Literal) for part in self.parts)

    def least_bytes(self, alone: Bools) -> float:
        return sum(part.least_bytes(alone) for part in self.parts)

    def combined(self, automata: Sequence[Any]) -> Any:
        """Return the automaton of the automata of the parts, None if one is None. TooLarge if it is."""
        return combined(automata, "followed_by")

    @cached_property
    def automaton(self) -> Any:
        return if_not_too_large(lambda: self.combined([part.automaton for part in self.parts]))


class Union(Part):
    """Texts of one of several parts. A text that several of them have is there once."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = list[Part]()
        for part in parts:
            self.parts += part.parts if isinstance(part, Union) else [part]
        check_size(self)

    def __repr__(self) -> str:
        return " | ".join(in_brackets(part) for part in self.parts)

    @property
    def inner_parts(self) -> Sequence[Part]:
        return self.parts

    @property
    def is_void(self) -> bool:
        return all(part.is_void for part in self.parts)

    @property
    def is_text(self) -> bool:
        return all(part.is_text for part in self.parts)

    def begin(self, after: Continuation) -> Iterable[Item]:
        return [item for part in self.parts for item in part.begin(after)]

    def reading(self, reader: Reader, begin: int, end: int) -> Reading | None:
        for part in self.parts:
            found = reader.read(part, begin, end)
            if found is not None:
                return found
        return None

    def least_bytes(self, alone: Bools) -> float:
        return min(part.least_bytes(alone) for part in self.parts)

    def combined(self, automata: Sequence[Any]) -> Any:
        """Return the automaton of the automata of the parts, None if one is None. TooLarge if it is."""
        return combined(automata, "united_with")

    @cached_property
    def automaton(self) -> Any:
        return if_not_too_large(lambda: self.combined([part.automaton for part in self.parts]))


def combined(automata: Sequence[Any], operation: str) -> Any:
    """Return the automaton of some automata; None if one is None. TooLarge if it has too many states."""
    found = automata[0]
    for automaton in automata[1:]:
        if found is None or automaton is None:
            return None
        found = getattr(found, operation)(automaton)
    return found


def if_not_too_large(find: Callable[[], Any]) -> Any:
    """Return an automaton; None if it is too large."""
    try:
        return find()
    except ValueError:
        return None


def as_automaton(
    part: Concatenation | Union | Intersection | Repetition, automata: Sequence[Any]
) -> Any:
    """Return a composition of automata as one that reads the values of its parts.

    It is the part itself if one of the automata is None, or if the result is too large.
    """
    found = None
    if None not in automata:
        found = if_not_too_large(lambda: part.combined(automata).explore())
    if found is None:
        return part
    if isinstance(part, Concatenation) or not part.is_text:
        found.composition = part
    return found


class Repetition(Part):
    """Texts of a part in a row. The value is the list of theirs."""

    def __init__(self, part: Part, least: int, most: float) -> None:
        self.part = part
        self.least = least
        self.most = most
        check_size(self)

    def __repr__(self) -> str:
        return f"{in_brackets(self.part)}.times({self.least}, {self.most})"

    @property
    def inner_parts(self) -> Sequence[Part]:
        return (self.part,)

    @property
    def names(self) -> frozenset[str]:
        return frozenset()

    @property
    def is_void(self) -> bool:
        return self.least > 0 and self.part.is_void

    def begin(self, after: Continuation) -> Iterable[Item]:
        return self.begin_at(0, after)

    def reading(self, reader: Reader, begin: int, end: int) -> Reading | None:
        found = reader.read_times(self.part, self.least, self.most, begin, end)
        if found is None:
            return None
        return Reading([reading.result for reading in found], {})

    def begin_at(self, number: int, after: Continuation) -> list[Item]:
        """Return the items after `number` texts."""
        items = list[Item]()
        if number >= self.least:
            items.append(after)
        if number < self.most and not self.part.is_void:
            more = number + 1
            if self.most == math.inf:
                more = min(more, self.least)
            items.append(after.before(Again, self, more).before(Then, self.part))
        return items

    def least_bytes(self, alone: Bools) -> float:
        if not self.least:
            return 0.0
        return self.least * self.part.least_bytes(alone)

    def combined(self, automata: Sequence[Any]) -> Any:
        """Return the automaton of the automaton of the part, None if that is None. TooLarge if it is."""
        return None if automata[0] is None else automata[0].repeated(self.least, self.most)

    @cached_property
    def automaton(self) -> Any:
        return if_not_too_large(lambda: self.combined([self.part.automaton]))


class Again(Continuation):
    """More texts of a repetition, after a number of them."""

    def __init__(self, after: Continuation, repeat: Repetition, number: int) -> None:
        super().__init__(after)
        self.rest = after
        self.repeat = repeat
        self.number = number

    def begin(self) -> Iterable[Item]:
        return self.repeat.begin_at(self.number, self.rest)

    def find_left(self, alone: Bools) -> float:
        missing = self.repeat.least - self.number
        left = self.rest.bytes_left(alone)
        if missing > 0:
            left += missing * self.repeat.part.least_bytes(alone)
        return left


class Intersection(Part):
    """Texts of two parts. They are one automaton if both are regular, and are read side by side otherwise."""

    def __init__(self, first: Part, second: Part) -> None:
        self.first = first
        self.second = second
        check_size(self)

    def __repr__(self) -> str:
        return f"{in_brackets(self.first)} & {in_brackets(self.second)}"

    def __reduce__(self) -> Any:
        return Intersection, (self.first, self.second)

    @property
    def is_text(self) -> bool:
        return self.first.is_text and self.second.is_text

    @property
    def inner_parts(self) -> Sequence[Part]:
        return self.first, self.second

    @cached_property
    def _unit(self) -> PairUnit:
        return PairUnit(Pair(self.first.machine, self.second.machine, self.is_opaque))

    @cached_property
    def is_void(self) -> bool:
        if self.automaton is not None:
            return self.automaton.is_void  # type: ignore[no-any-return]
        return self._unit.recognizer.start is None

    def begin(self, after: Continuation) -> Iterable[Item]:
        if self.is_void:
            return []
        if self.automaton is not None:
            return self.automaton.begin(after)  # type: ignore[no-any-return]
        start = self._unit.recognizer.start
        return [Hypothesis(self._unit, self._unit.number(start), after)]

    def reading(self, reader: Reader, begin: int, end: int) -> Reading | None:
        first = reader.read(self.first, begin, end)
        second = reader.read(self.second, begin, end)
        if first is None or second is None:
            return None
        value = first.value
        if self.first.is_text:
            value = second.value
        return Reading(value, first.names | second.names)

    def least_bytes(self, alone: Bools) -> float:
        if self.automaton is not None:
            return self.automaton.least_bytes(alone)  # type: ignore[no-any-return]
        pair = self._unit.recognizer
        return math.inf if pair.start is None else pair.bytes_left(pair.start, alone)

    def combined(self, automata: Sequence[Any]) -> Any:
        """Return the automaton of the automata of the parts, None if one is None. TooLarge if it is."""
        return combined(automata, "intersected_with")

    @cached_property
    def automaton(self) -> Any:
        return if_not_too_large(
            lambda: self.combined([self.first.automaton, self.second.automaton])
        )

    @property
    def warnings(self) -> list[str]:
        lines = super().warnings
        if self.automaton is None:
            how = f"a search of at most {MAX_SEARCHED} states finds an end"
            if self.is_opaque:
                how = "its ends are not planned"
            lines.append(
                f"{self!r} is no automaton: {how}, and a text may turn out to have none, and die"
            )
        return lines


def in_brackets(part: Part) -> str:
    """Return the repr of a part, or the name of its class; a composition with an operator is in brackets."""
    shape = part
    if getattr(part, "composition", None) is not None:
        shape = part.composition  # type: ignore[attr-defined]
    if isinstance(shape, Concatenation | Union | Intersection):
        return f"({part!r})"
    name = repr(part)
    return type(part).__name__ if name.startswith("<") else name
