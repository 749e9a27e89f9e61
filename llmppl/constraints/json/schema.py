"""JSON Schema: the tokens that may follow in a text that must be an instance of a schema.

A schema is read once (`reader.Reader`). Its shapes give the masks (`texts.Texts`) and the distances to an end. The
keywords that no shape holds are checked on the finished text (`check.Check`).
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmppl.constraints.automata.budget import TooLarge
from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.json_formats import format_language
from llmppl.constraints.constraint import VocabularyLike
from llmppl.constraints.json import keywords, types
from llmppl.constraints.json.frames import BLANK
from llmppl.constraints.json.frames import whitespace as blanks
from llmppl.constraints.json.index import JsonIndex
from llmppl.constraints.json.texts import Texts
from llmppl.support.arguments import is_file_name, is_type, one_of
from llmppl.support.locks import cached_property
from llmppl.support.shared import Shared

if TYPE_CHECKING:
    from llmppl.constraints.json.check import Check

__all__ = ["JsonSchema"]

MAX_STATES = 20_000                                 # of `automaton`
ANY_BLANKS = r"[ \n\r\t]*"


class JsonSchema(Shared):
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
        Drafts 3 to 2020-12, by `$schema`. Types are a pydantic model, a dataclass, a TypedDict, list[int] and others of
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
    ImportError
        A package of `llmppl[json-schema]` is not installed.
    TypeError
        pydantic has no schema of the type.
    ValueError
        The schema is not JSON or no schema, has a keyword with a wrong value, or has no instances. The error names the
        place and the keyword.
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
        given, self._of_type = (schema, list[str]()) if self.type is None else types.schema_of(schema)
        self.schema: Any = _read(given)
        self.order = one_of("order", order, ["schema", "any"])
        self._options = {"whitespace": whitespace, "order": order, "resources": resources, "lenient": lenient}
        defaults = {"whitespace": BLANK, "order": "schema", "resources": None, "lenient": False}
        self._given = "".join(f", {name}={each!r}" for name, each in self._options.items() if each != defaults[name])
        keywords.check_keywords(self.schema)
        if (misspelt := keywords.misspelt(self.schema)) and not lenient:
            raise ValueError(f"JSON schema at {misspelt} (lenient=True ignores it)")
<<<<<<< HEAD
        self._misspelt = [misspelt] if misspelt else []
        self._registry = registry_of(self.schema, resources)
        specification = specification_of(self.schema)
        place = Place("#", resolver_of(self.schema, self._registry), draft_of(specification))
=======
        self._registry = references.registry_of(self.schema, resources)
        draft = references.draft_of(references.specification_of(self.schema))
        place = reader.Place("#", references.resolver_of(self.schema, self._registry), draft)
>>>>>>> dad6b5f0bf0b9df2617bceb287d67907e863f9ca
        pattern = ANY_BLANKS if whitespace is True else whitespace or None
        self._texts = Texts(blanks(pattern), self.order == "schema")
        self._reader = reader.Reader(self._texts.is_live)
        try:
            self._texts.begin(self._reader.lazy(self.schema, place))
        except RecursionError:
            raise ValueError("JSON schema: a way along $ref, or of parts inside each other, is too long") from None

    def index(self, vocab: VocabularyLike) -> JsonIndex:
        """Return the index of the tokens that may follow."""
        return JsonIndex(self, self._texts, vocab)

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
        reason = self._texts.endless()
        if reason:
            return None, reason
        try:
            return DFA.from_table(*self._texts.table(MAX_STATES)), ""
        except TooLarge as error:
            return None, str(error)

    @cached_property
    def warnings(self) -> list[str]:
        """Keywords that are checked on the finished text, and remarks."""
        self._reader.read_all()
        checked = [f"{each} is checked on the finished text" for each in self._reader.left_out]
        return self._of_type + self._misspelt + checked + list(self._reader.notes)

    @cached_property
    def _check(self) -> Check | None:
        """Check of finished texts, None if masks leave nothing open."""
        from llmppl.constraints.json.check import Check

        self._reader.read_all()
        is_whole = not self._reader.left_out
        return None if is_whole else Check(self.schema, self._options["resources"], _has_format, self._registry)

    def parse(self, text: str) -> Any:
        """Return the value that a text writes, an object of the type if the schema is that of a type.

        Raises ValueError if the text is not JSON, or a keyword that masks do not enforce does not hold.
        """
        from llmppl.constraints.json.check import read_json

        value = read_json(text)
        failed = self._check(text) if self._check else ""
        if failed:
            raise ValueError(f"{failed} does not hold")
        return value if self.type is None else types.read(self.type, str(text), json=True)

    def __repr__(self) -> str:
        text = json.dumps(self.schema)
        return f"JsonSchema({text if len(text) <= 80 else text[:77] + '...'}{self._given})"

    def __reduce__(self) -> Any:
        return functools.partial(JsonSchema, **self._options), (self.type or self.schema,)


def _has_format(name: str, text: str) -> bool | None:
    language = format_language(name)
    return None if language is None else text in language


def _read(schema: Any) -> Any:
    """Return the schema as JSON values of its own. Raises ValueError if it is not JSON, or no schema."""
    is_text = isinstance(schema, str)
    value = _converted(json.loads, schema) if is_text else json.loads(_converted(json.dumps, schema))
    if not isinstance(value, (dict, bool)):
        raise ValueError(f"a JSON schema is an object, true or false, not {json.dumps(value)}")
    return value


def _converted(convert: Callable[[Any], Any], schema: Any) -> Any:
    try:
        return convert(schema)
    except RecursionError:
        raise ValueError("the schema is nested too deep") from None
    except (TypeError, ValueError) as error:
        is_file = isinstance(schema, os.PathLike) or (isinstance(schema, str) and is_file_name(schema))
        hint = f"; for a file, pass its content: JsonSchema(Path({str(schema)!r}).read_text())" if is_file else ""
        raise ValueError(f"the schema is not JSON: {error}{hint}") from None
