"""Questions with a closed set of answers: predicates, choices and scores, from sentences, lists and types.

A *predicate* asks whether a sentence holds. A *choice* asks for one of some options. A *score* asks for one of some
levels, from the lowest to the highest. A type asks one question for each of its fields.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_type_hints

from pydantic import TypeAdapter

from llmppl.constraints.json.closed import MAX_LEVELS, closed_values, parts_of, resolved
from llmppl.constraints.json.types import readable
from llmppl.report.probabilities import Share, key_of
from llmppl.support.arguments import is_type, shown, text

Kind = Literal["predicate", "choice", "score"]
MAX_OPTIONS = 1000  # of a question
YES_NO = {True: "yes", False: "no"}


@dataclass(frozen=True)
class Question:
    """Question with its answers. `choice` and `score` make one, and a str alone is a predicate.

    text : str
    values : tuple of the answers, the levels of a score from the lowest
    names : tuple of str, the texts of the answers that the model reads and writes
    descriptions : tuple of str, "" without one

    Examples
    --------
    >>> choice("Which?", ["a", "b"])
    Question(kind='choice', text='Which?', values=('a', 'b'), names=('a', 'b'))
    """

    kind: Kind
    text: str
    values: tuple[Any, ...]
    names: tuple[str, ...]
    descriptions: tuple[str, ...] = field(repr=False)

    def index(self, value: Any) -> int:
        """Return the place of an answer among `values`. ValueError if it is none of them."""
        keys = [key_of(each) for each in self.values]
        if key_of(value) in keys:
            return keys.index(key_of(value))
        if isinstance(value, str) and value in self.names and self.kind != "predicate":
            return self.names.index(value)
        raise ValueError(
            f"{shown(value)} is no answer to {self.text!r}, which has {shown([*self.values])}"
        )

    def shares(self, rows: Iterable[Sequence[float]]) -> list[Share]:
        """Return the probabilities of the answers: each row has the fields of a Share after its value."""
        return [Share(value, *row) for value, row in zip(self.values, rows, strict=True)]


def choice(question: str, options: Any) -> Question:
    """Return the question which of some options is right.

    Parameters
    ----------
    question : str
    options : list, dict, Enum or Literal
        Different texts, numbers or bools. A dict maps each option to its description, "" or None without one.

    Examples
    --------
    >>> choice("Which queue should take this?", {"billing": "charges and refunds", "sales": ""}).values
    ('billing', 'sales')
    """
    if is_type(options):
        return _of_type(question, options)
    return _made("choice", question, options, "options")


def score(question: str, levels: Any) -> Question:
    """Return the question which of some levels is right. They are given as options of `choice`, the lowest first.

    Examples
    --------
    >>> score("How cross is the writer?", ["calm", "annoyed", "furious"]).kind
    'score'
    """
    if is_type(levels):
        return replace(_of_type(question, levels), kind="score")
    return _made("score", question, levels, "levels")


def predicate(question: str, yes: str = "", no: str = "") -> Question:
    """Return the question whether a sentence holds, with descriptions of yes and no.

    Examples
    --------
    >>> predicate("Is it urgent?", yes="it must be answered today").values
    (True, False)
    """
    return Question(
        "predicate", text("question", question), (*YES_NO,), (*YES_NO.values(),), (yes, no)
    )


def _made(kind: Kind, question: str, options: Any, name: str) -> Question:
    if isinstance(options, str) or not isinstance(options, Iterable):
        raise TypeError(f"{name} must be a list or a dict of descriptions, not {shown(options)}")
    values = (*options,)
    descriptions = [""] * len(values)
    if isinstance(options, Mapping):
        descriptions = [
            text(f"the description of {shown(each)}", options[each] or "") for each in values
        ]
    if not 1 <= len(values) <= MAX_OPTIONS:
        raise ValueError(f"{name} must be 1 to {MAX_OPTIONS}, not {len(values)}")
    names = [_name(value) for value in values]
    if len(set(values)) < len(values):
        raise ValueError(f"{name} must differ, and True equals 1: {shown(options)}")
    if len(set(names)) < len(names):  # "true" beside True
        names = [json.dumps(value, ensure_ascii=False) for value in values]
    return Question(kind, text("question", question), values, (*names,), (*descriptions,))


def _name(value: Any) -> str:
    """Return the text of an option: JSON of a bool or a number, "none" for None."""
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None:
        return "none"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if not isinstance(value, str) or not value.strip():
        raise TypeError(
            f"an option must be a text with letters, a number or a bool, not {shown(value)}"
        )
    return value


def with_labels(name: str, given: Iterable[Any]) -> list[tuple[Any, Mapping[str, Any]]]:
    """Return a list of (state, {name of the question: right answer}). TypeError if it is another list."""
    pairs = [*given]
    for each in pairs:
        if not isinstance(each, tuple | list) or len(each) != 2 or not isinstance(each[1], Mapping):
            wanted = "must be a list of (state, {question: right answer})"
            raise TypeError(f"{name} {wanted}, with no {shown(each)}")
    return pairs


# ---- types


class Questions(NamedTuple):
    """Questions by name. `record` is the type that asks them, None for a dict of questions; `aliases` of its fields."""

    asked: dict[str, Question]
    record: Any = None
    aliases: Iterable[str] = ()

    def make(self, values: dict[str, Any]) -> Any:
        """Return the object of the type that has these values in its fields; a dict without a type."""
        if self.record is None:
            return values
        given = dict(zip(self.aliases, values.values(), strict=True))
        return TypeAdapter(self.record).validate_python(given)


def questions_of(given: Any) -> Questions:
    """Return the questions of a dict or a type."""
    if is_type(given):
        return _of_record(given)
    if not isinstance(given, Mapping) or not given:
        raise TypeError(
            "questions must be a dict of names to questions, as {'urgent': 'Is it urgent?'}, or a type with fields, "
            f"not {shown(given)}"
        )
    return Questions(
        {
            text("each name of questions", name): _question(name, each)
            for name, each in given.items()
        }
    )


def _question(name: str, given: Any) -> Question:
    if isinstance(given, Question):
        return given
    if isinstance(given, str):
        return predicate(given)
    if is_type(given):
        return _of_type(_words(name), given)
    return choice(_words(name), given)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _of_record(record: Any) -> Questions:
    """Return a question for each field of a pydantic model, a dataclass or a TypedDict."""
    record = readable(record)
    adapter = TypeAdapter(record)
    schema, aliased = adapter.json_schema(by_alias=False), adapter.json_schema()
    schema, aliased = resolved(schema, schema), resolved(aliased, aliased)
    if not schema.get("properties"):
        raise TypeError(
            f"questions must be a type with fields, not {shown(record)}: one question has a name, as "
            "{'queue': " + getattr(record, "__name__", "Literal[...]") + "}"
        )
    types = get_type_hints(record)
    asked = _of_properties(schema, types, f"of {shown(record)}")
    return Questions(asked, record, [*aliased["properties"]])


def questions_of_schema(schema: Any) -> dict[str, Question]:
    """Return a question for each property of a JSON schema, by its description or its name."""
    has_properties = isinstance(schema, dict) and isinstance(schema.get("properties"), dict)
    if not has_properties or not schema["properties"]:
        raise ValueError(
            'a schema must have properties, as {"properties": {"urgent": {"type": "boolean"}}}, '
            f"not {shown(schema)}"
        )
    return _of_properties(schema, {}, "of the schema")


def _of_properties(schema: Any, types: Mapping[str, Any], where: str) -> dict[str, Question]:
    asked = {}
    for name, part in schema["properties"].items():
        place, kind = f"the field {name!r} {where}", types.get(name, Any)
        if not isinstance(part, dict):
            raise ValueError(f"{place} must be an object, as {{'type': 'boolean'}}")
        question = part.get("description") or _words(name)
        asked[name] = _of_type(question, kind, part, schema, place)
    return asked


def _of_type(
    question: str, kind: Any, schema: Any = None, root: Any = None, where: str = "the type"
) -> Question:
    """Return the question of one type: a bool, an Enum, a Literal, a range of integers, or one of these or None."""
    adapter = TypeAdapter(kind)
    if schema is None:
        schema = root = adapter.json_schema()
    parts = parts_of(schema, root)
    names = closed_values(schema, root)
    if names is None:
        raise TypeError(
            f"{where} has no short list of answers: bool, an Enum, a Literal, or an int with ge= and le= "
            f"and at most {MAX_LEVELS} values has one"
        )
    if names == [*YES_NO]:
        return predicate(question)
    made = _made("choice", question, names, "options")
    values = [adapter.validate_python(name) for name in names]
    is_range = len(parts) == 1 and parts[0].get("type") == "integer" and "enum" not in parts[0]
    return Question(
        "score" if is_range else "choice", made.text, (*values,), made.names, made.descriptions
    )
