"""JSON Schema: the tokens that may follow in a text that must be an instance of a schema.

A schema is read once (`reader.Reader`). Its shapes give the frames (`making.Frames`) of a machine. The
keywords that no shape holds are checked on the finished text (`check.Check`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from llmppl.constraints.automata.budget import Budget
from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.constraint import Bools
from llmppl.constraints.json import keywords, types
from llmppl.constraints.json.frames import BLANK, spaces
from llmppl.constraints.json.making import Frames
from llmppl.constraints.json.shapes import WORK
from llmppl.constraints.json.unit import begin_value, table
from llmppl.constraints.machine.machine import Continuation, Item
from llmppl.constraints.machine.parts import Part
from llmppl.support.arguments import is_file_name, is_type, one_of
from llmppl.support.graphs import postorder
from llmppl.support.locks import cached_property

MAX_STATES = 20_000  # of `automaton`
MAX_WRITTEN = 1_000_000  # values in a schema
ANY_BLANKS = r"[ \n\r\t]*"


class JsonSchema(Part):
    """The JSON texts that are instances of a schema.

    Narrower than the standard: properties come in the order of the schema, then those it does not list
    (`order="any"` admits all orders). A name occurs once in an object, and is spelled without escapes that JSON does
    not require. Integers have no fraction or exponent, and the digits of numbers are limited (`numbers`). A `format`
    must hold. The text has no whitespace around it.

    Masks do not enforce some keywords (such as `not` of most schemas, `oneOf` of schemas that overlap, `uniqueItems` of
    other items than a few listed values). `parse` checks these on the finished text, and a particle with such a text
    dies. `warnings` lists them.

    Parameters
    ----------
    schema : dict, bool, str of JSON, or a type
        Drafts 4 to 2020-12, by `$schema`. Types are a pydantic model, a dataclass, a TypedDict, list[int] and others of
        which pydantic has a schema. Their objects have no members but those of the type, and `parse` returns objects of
        the type.
    whitespace : bool or str
        Whitespace between the tokens of JSON: a regex that matches it. The default allows a blank or nothing, False
        nothing, and True any whitespace of JSON, which a model may write for ever.
    order : {"schema", "any"}
        Order of the properties of an object.
    resources : mapping of URI to schema, or folder, optional
        Other documents, to which a `$ref` may point.
    lenient : bool
        Ignore names that look like misspelt keywords, instead of raising an error.

    Raises
    ------
    TypeError
        pydantic has no schema of the type.
    ValueError
        The schema is not JSON or no schema, has a keyword with a wrong value, or has no instances. The error names the
        place and the keyword.

    Examples
    --------
    >>> schema = JsonSchema({"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]})
    >>> schema.parse('{"age": 34}')
    {'age': 34}
    """

    def __init__(
        self,
        schema: Any,
        *,
        whitespace: bool | str = BLANK,
        order: Literal["schema", "any"] = "schema",
        resources: Mapping[str, Any] | str | Path | None = None,
        lenient: bool = False,
    ) -> None:
        from llmppl.constraints.json import reader, references  # packages of the extra

        self.type = schema if is_type(schema) else None
        given, self._of_type = (schema, []) if self.type is None else types.schema_of(schema)
        self._text, self._exact = _read(given)  # numbers with a point are Decimal
        self.schema: Any = json.loads(json.dumps(self._exact, default=float))
        self.order = one_of("order", order, ["schema", "any"])
        options = {
            "whitespace": (whitespace, BLANK),
            "order": (order, "schema"),
            "resources": (resources, None),
            "lenient": (lenient, False),
        }
        self._options: dict[str, Any] = {
            name: each for name, (each, default) in options.items() if each != default
        }
        keywords.check_keywords(self._exact)
        wrong, notes = keywords.foreign(self._exact)
        if wrong and not lenient:
            raise ValueError(f"JSON schema at {wrong[0]} (lenient=True ignores it)")
        self._notes = wrong + notes
        self._registry = references.registry_of(self._exact, resources, self._notes)
        resolver = references.resolver_of(self._exact, self._registry)
        self._frames = Frames(
            spaces(ANY_BLANKS if whitespace is True else whitespace or ""), self.order == "schema"
        )
        self._reader = reader.Reader(self._frames.is_live)
        work = WORK.set(Budget("the schema", "fewer alternatives, above all in oneOf, would work"))
        try:
            place = reader.Place("#", resolver, references.draft_of(self._exact))
            root = self._reader.lazy(self._exact, place)
            self._reader.read_all()  # so that every error is raised here
            if not self._frames.is_live(root):
                dead = [at for part, at in self._reader.places if not self._frames.is_live(part)]
                raise ValueError(
                    f"JSON schema at {dead[-1] if dead else '#'}: it has no instances; every text breaks "
                    "a keyword, or would be infinite"
                )
            self._root = root
        except RecursionError:
            raise ValueError(
                "JSON schema: a way along $ref, or of parts inside each other, is too long"
            ) from None
        finally:
            WORK.reset(work)

    def begin(self, after: Continuation) -> list[Item]:
        return begin_value(self._frames, self._root, after)

    def least_bytes(self, alone: Bools) -> float:
        starts = self._frames.starts[self._root]
        return min(self._frames.least_bytes(local, alone) for local in starts)

    def forget(self) -> None:
        self._frames.forget()

    @property
    def has_checks(self) -> bool:
        return bool(self.unmasked)

    @property
    def automaton(self) -> DFA | None:
        """The texts as a DFA; None if there is none (`fallback_reason`). It lacks the checks on the finished text."""
        return self._tabled[0]

    @property
    def fallback_reason(self) -> str:
        """Reason why there is no DFA; "" if there is one."""
        return self._tabled[1]

    @cached_property
    def _tabled(self) -> tuple[DFA | None, str]:
        try:
            return DFA.from_table(*table(self.machine, MAX_STATES)), ""
        except ValueError as error:  # endless or too large
            return None, str(error)

    @property
    def unmasked(self) -> list[str]:
        """Restrictions that masks do not enforce, so that they are checked on the finished text."""
        return self._of_type + [
            f"{each} is checked on the finished text" for each in self._reader.left_out
        ]

    @property
    def warnings(self) -> list[str]:
        """Restrictions that are checked on the finished text, and remarks."""
        return self.unmasked + self._notes + list(self._reader.notes)

    def parse(self, text: str) -> Any:
        """Return the value that a text writes, an object of the type if the schema is that of a type.

        Raises ValueError if the text is not JSON, or a keyword that masks do not enforce does not hold.
        """
        from llmppl.constraints.json.check import failure, read_json

        value = read_json(text)
        if self._reader.left_out and (failed := failure(self._exact, self._registry, text)):
            raise ValueError(f"{failed} does not hold")
        return value if self.type is None else types.read(self.type, str(text), json=True)

    def __repr__(self) -> str:
        text = json.dumps(self.schema, ensure_ascii=False)
        options = "".join(f", {name}={each!r}" for name, each in self._options.items())
        return f"JsonSchema({text if len(text) <= 80 else text[:77] + '...'}{options})"

    def __reduce__(self) -> Any:
        return functools.partial(JsonSchema, **self._options), (self.type or self._text,)


def _inside(given: Any) -> Iterable[Any]:
    """Return the values in a dict or list."""
    if isinstance(given, dict):
        return given.values()
    return given if isinstance(given, list | tuple) else ()


def _check_size(schema: Any) -> None:
    """Raise a ValueError if a schema is too large as text, where a dict that has two places is written twice."""
    sizes = dict[int, int]()
    for each in postorder([schema], _inside):
        sizes[id(each)] = 1 + sum(sizes.get(id(inner), 0) for inner in _inside(each))
    if sizes[id(schema)] > MAX_WRITTEN:
        raise ValueError(
            f"the schema has more than {MAX_WRITTEN:,} values when it is written out; "
            "a $ref to a part in $defs that has many places would work"
        )


def _read(schema: Any) -> tuple[str, Any]:
    """Return the text of a schema, and its JSON values. Raises ValueError if it is not JSON, or no schema."""
    _check_size(schema)
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        value = json.loads(text, parse_float=Decimal)
    except RecursionError:
        raise ValueError("the schema is nested too deep") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        name = str(schema)
        hint = "; a dict, the JSON of one, or a type would work"
        if is_file_name(name):
            hint = f"; for a file, pass its content: JsonSchema(Path({name!r}).read_text())"
        if callable(schema):
            hint = "; for the arguments of a function, a pydantic model or TypedDict with the same fields would work"
        raise ValueError(f"the schema is not JSON: {error}{hint}") from None
    return text, value
