"""Values: Python types as languages of plain text, and the conversion of anything to a constraint or an index.

A *scalar* is a value that `str` writes in one line: a number, a bool, a name, a date. A type of scalars becomes the
language of these texts, `Values(type)`. Any other type becomes JSON, `JsonSchema(type)`. Their method `parse` converts
a text back to a value.
"""

from __future__ import annotations

import datetime
import enum
import inspect
import types
import typing
import uuid
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import partial, reduce
from operator import or_
from typing import Any, NamedTuple

from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.formats import DATE, DATETIME, TIME, UUID, number_range
from llmppl.constraints.automata.regex import Regex
from llmppl.constraints.constraint import Index, Recognizer, VocabularyLike
from llmppl.constraints.json import types as json_types
from llmppl.constraints.json.schema import JsonSchema
from llmppl.constraints.machine.parts import Custom, Part, part_of
from llmppl.constraints.masks import TokenIndex
from llmppl.support.arguments import is_type, name_of, shown, truth

DECIMALS = 6  # decimals of a float with bounds, at most
_FLOAT = r"-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,21})?(?:e[+-]?[0-9]{1,2})?"
_SCALARS: dict[type, tuple[str, Callable[[str], Any]]] = {
    bool: ("True|False", {"True": True, "False": False}.__getitem__),
    int: ("0|-?[1-9][0-9]{0,17}", int),
    float: (_FLOAT, float),
    str: ("(?s:.*)", str),
    type(None): ("None", {"None": None}.__getitem__),
    datetime.date: (DATE, datetime.date.fromisoformat),
    datetime.time: (TIME, datetime.time.fromisoformat),
    datetime.datetime: (DATETIME, datetime.datetime.fromisoformat),
    uuid.UUID: (UUID, uuid.UUID),
}
_NOTES = (
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
)  # keywords of a schema that restrict nothing


class Values(DFA):
    """Language of the values of a type as `str` writes them; `Values(int).parse("12")` is 12.

    Parameters
    ----------
    type_ : type
        bool (True, False), int (at most 18 digits), float (no inf or nan, exponents of at most two digits), str, None,
        date, time, datetime (in the format of `isoformat`), UUID. Literal and Enum, the texts of their values.
        Annotated with bounds of numbers, lengths and patterns (by pydantic). Optional and Union of these.

    Raises
    ------
    TypeError, ValueError
        No type of scalars; two values of a Literal or an Enum with the same text, or no value within the bounds.

    Examples
    --------
    >>> Values(int | None).parse("12")
    12
    """

    def __init__(self, type_: Any) -> None:
        found = _parts(type_)
        if found is None:
            raise TypeError(
                f"Values takes a type of scalars, such as int, date, Literal[...] or an Enum, not {shown(type_)}: "
                "use JsonSchema, which writes JSON"
            )
        self.type = type_
        self._parts = sorted(found, key=lambda part: part.is_last)
        union = reduce(DFA.united_with, (part.language for part in self._parts)).explore()
        self._fix(union.table, union.accepting, union.start)

    def __repr__(self) -> str:
        return f"Values({inspect.formatannotation(self.type)})"

    @property
    def has_checks(self) -> bool:
        return any(getattr(part.convert, "func", None) is _checked for part in self._parts)

    def parse(self, text: str) -> Any:
        """Return the value that a text represents; for a Union, by the first type that has the text, a str last.

        Raise a ValueError if the text is not in the language.
        """
        for language, convert, _ in self._parts:
            if text in language:
                return convert(str(text))
        raise ValueError(f"{shown(text)} is not in {self!r}, where {shown(self.shortest())} is")


def constraint_of(type_: Any) -> Any:
    """Return the constraint of a type: plain text if its values are scalars, else JSON. Errors as of these classes.

    `Literal["a"] | Regex("b")` is a Union, in which parts stand for themselves.

    Examples
    --------
    >>> constraint_of(int | None), constraint_of(list[int])
    (Values(int | None), JsonSchema({"items": {"type": "integer"}, "type": "array"}))
    """
    inner = typing.get_args(type_)
    if typing.get_origin(type_) is typing.Union and any(isinstance(each, Part) for each in inner):
        return reduce(or_, map(part_of, inner))
    return JsonSchema(type_) if _parts(type_) is None else Values(type_)


class _Part(NamedTuple):
    """Language of one type, and the function that converts its texts to values. The part of str is tried last."""

    language: DFA
    convert: Callable[[str], Any]
    is_last: bool = False


def _parts(type_: Any) -> list[_Part] | None:
    """Return the parts whose union is the language of a type of scalars; None for any other type."""
    if type(type_).__name__ in ("NewType", "TypeAliasType"):  # type X = ..., from Python 3.12 on
        return _parts(getattr(type_, "__supertype__", None) or type_.__value__)
    origin, inner = typing.get_origin(type_), typing.get_args(type_)
    if origin is typing.Literal or isinstance(type_, enum.EnumMeta):
        return [_listed(type_, inner or type_)]
    if origin in (typing.Union, types.UnionType):
        found = list[_Part]()
        for each in inner:
            parts = _parts(each)
            if parts is None:
                return None
            found += parts
        return found
    if origin is typing.Annotated:
        return _annotated(type_, inner[0])
    if not isinstance(type_, type) or type_ not in _SCALARS:
        return None
    pattern, convert = _SCALARS[type_]
    return [_Part(Regex(pattern), convert, is_last=type_ is str)]


def _listed(type_: Any, values: Iterable[Any]) -> _Part:
    """Return the part for the values of a Literal or an Enum."""
    words: dict[str, Any] = {}
    for value in values:
        scalar = value.value if isinstance(value, enum.Enum) else value
        if not isinstance(scalar, str | int | float | None):
            raise TypeError(
                f"{shown(type_)}: {shown(scalar)} is not written in one way; a str or a number would work"
            )
        if str(scalar) in words:
            raise ValueError(
                f"{shown(type_)}: {words[str(scalar)]!r} and {value!r} are both written {str(scalar)!r}"
            )
        words[str(scalar)] = value
    return _Part(DFA.from_strings(words), words.__getitem__)


def _annotated(type_: Any, base: Any) -> list[_Part] | None:
    """Return the parts of `base` within pydantic's bounds; their `convert` runs pydantic's other checks."""
    found = _parts(base)
    if found is None:
        return None
    schema = _restrictions(type_)
    if schema != _restrictions(base):
        if len(found) > 1:
            raise TypeError(
                f"{shown(type_)}: give bounds to each type of a Union, not to all of them"
            )
        found = [found[0]._replace(language=_bounded(type_, schema))]
    return [part._replace(convert=partial(_checked, type_, part.convert)) for part in found]


def _restrictions(type_: Any) -> dict[str, Any]:
    """Return the JSON schema of a type without notes."""
    schema, _ = json_types.schema_of(type_)
    found = {key: value for key, value in schema.items() if key not in _NOTES}
    if "enum" in found:
        # Literals of another order are equal, and share a schema.
        found["enum"] = sorted(found["enum"], key=repr)
    return found


def _checked(type_: Any, convert: Callable[[str], Any], text: str) -> Any:
    return json_types.read(type_, convert(text), json=False)


def _bounded(type_: Any, schema: dict[str, Any]) -> DFA:
    """Return the numbers or texts of a schema with bounds, lengths or a pattern; a TypeError for other keywords."""
    kind = schema.pop("type", None)
    if kind in ("integer", "number"):
        decimals = DECIMALS if kind == "number" else 0
        step = Fraction(1, 10**decimals)
        low = schema.pop("minimum", None)
        high = schema.pop("maximum", None)
        above = schema.pop("exclusiveMinimum", None)
        below = schema.pop("exclusiveMaximum", None)
        if above is not None:
            low = Fraction(str(above)) // step * step + step
        if below is not None:
            high = -(Fraction(str(-below)) // step * step + step)
        found: DFA = number_range(low, high, decimals)
    elif kind == "string":
        least = schema.pop("minLength", 0)
        most = schema.pop("maxLength", "")
        pattern = schema.pop("pattern", "")
        if pattern.endswith("$") and not pattern.endswith("\\$"):
            pattern = pattern[:-1] + r"\Z"  # pydantic's $ does not match before a newline
        matches = Regex(f"(?s:.*)(?:{pattern})(?s:.*)")
        found = Regex(f"(?s:.{{{least},{most}}})").intersected_with(matches)
    if kind not in ("integer", "number", "string") or schema:
        raise TypeError(
            f"{shown(type_)} requires {', '.join(schema) or kind}, which plain text cannot express; bounds of numbers, "
            f"lengths and patterns would work, or JsonSchema of the type"
        )
    return found


def index_of(constraint: Any, vocab: VocabularyLike) -> Index | None:
    """Return the index of a constraint over `vocab`; None for a function of the text.

    A constraint is a Constraint, Recognizer, Index, type, list of str, function or None; any other object or type is a
    TypeError. Raise a ValueError for an index over another vocabulary, and if no token of `vocab` begins a string.

    Examples
    --------
    >>> index = index_of(["yes", "no"], lm.vocab)
    >>> [str(lm.vocab[token]) for token in index.allowed(index.start)]
    ['n', 'y']
    """
    if is_type(constraint):
        constraint = constraint_of(constraint)
    elif isinstance(constraint, list | tuple):
        constraint = DFA.from_strings(constraint)
    if hasattr(constraint, "index") and not isinstance(constraint, str):
        made, constraint = constraint, constraint.index(vocab)
        if not isinstance(constraint, Index):
            raise TypeError(
                f"{made!r}.index(vocab) must give an llmppl.constraints.Index, not {constraint!r}"
            )
    elif isinstance(constraint, Recognizer):
        constraint = TokenIndex(constraint, vocab)
    if isinstance(constraint, Index):
        if constraint.vocab != vocab:
            raise ValueError(
                f"{constraint!r} is an index over another vocabulary than the model's, {vocab!r}"
            )
        return constraint
    if constraint is None or callable(constraint):
        return None
    raise TypeError(
        "a constraint is a Regex, a Grammar, a JsonSchema, a type, a list of strings, an index of one of them, or a "
        f"function of the text, not {shown(constraint)}: give Regex('...') for a pattern, JsonSchema(...) for a schema"
    )


# ---- parts of compositions


class Holds:
    """Recognizer of the texts of which a function holds, and holds of all their beginnings. A state is the bytes."""

    start = b""

    def __init__(self, function: Callable[[str], Any]) -> None:
        self._function = function

    def __repr__(self) -> str:
        return name_of(self._function)

    def step(self, state: bytes, byte: int) -> bytes | None:
        after = state + bytes((byte,))
        return after if self._holds(after, of_unfinished=True) else None

    def accepts(self, state: bytes) -> bool:
        return self._holds(state, of_unfinished=False)

    def _holds(self, data: bytes, of_unfinished: bool) -> bool:
        """Return True if the function holds of a text; of one that ends inside a character, `of_unfinished`."""
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            is_unfinished = error.reason == "unexpected end of data" and error.end == len(data)
            return is_unfinished and of_unfinished
        return truth("constraint", self._function, text)


@part_of.register(object)
def _(given: Any) -> Part:
    if isinstance(given, Part):
        return given
    if is_type(given):
        found: Part = constraint_of(given)
        return found
    if isinstance(given, Recognizer):
        return Custom(given)
    if callable(given) and not isinstance(given, Index):
        return Custom(Holds(given), is_opaque=True)
    hint = ""
    if given is None:
        hint = (
            "; this may be the .automaton of a JsonSchema: if it is None, .fallback_reason says why"
        )
    raise TypeError(
        "a part of a constraint is a str, a Regex, a Grammar, a JsonSchema, a type, a list of strings, a recognizer or "
        f"a function of the text, not {shown(given)}{hint}"
    )
