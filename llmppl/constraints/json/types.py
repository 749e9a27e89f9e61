"""Python types as JSON: the schema of a type, and the reader of its values. Both are pydantic's.

`pydantic_schema` narrows pydantic's schema so that every text of it can be read back. Objects have no members that
their type does not name, and formats are patterns, because readers of schemas interpret formats differently.
"""

from __future__ import annotations

import functools
import sys
import typing
from typing import TYPE_CHECKING, Any

from llmppl.support.arguments import is_hashable, shown

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from llmppl.constraints.json.pydantic_schema import TypeSchema

__all__ = ["read", "schema_of"]


def schema_of(kind: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the JSON schema of a type, and the constraints that it lacks, as sentences with their places.

    Every text of the schema can be read as an object of the type unless it breaks a listed constraint. Every text that
    pydantic writes and reads (`dump_json(..., by_alias=True, round_trip=True)`) is in the schema, with two exceptions:
    a `Decimal` with bounds or digits has no exponent, and a web address has no user name.

    Raises
    ------
    TypeError
        The values of the type have no JSON.
    ImportError
        pydantic is not installed.
    """
    _, schema, warnings = _of(kind)
    return schema, list(warnings)


def read(kind: Any, value: Any, *, json: bool) -> Any:
    """Return `value`, which is JSON text if `json`, as an object of a type. Raises ValueError if it is none."""
    from pydantic import ValidationError

    adapter = _of(kind)[0]
    try:
        return adapter.validate_json(value) if json else adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(": ".join((".".join(map(str, first["loc"])), first["msg"])).removeprefix(": ")) from error


def _of(kind: Any) -> tuple[TypeAdapter[Any], dict[str, Any], list[str]]:
    return (_made if is_hashable(kind) else _made.__wrapped__)(kind)


@functools.lru_cache(64)
def _made(kind: Any) -> tuple[TypeAdapter[Any], dict[str, Any], list[str]]:
    try:
        from pydantic import TypeAdapter
        from pydantic.errors import PydanticUserError

        from llmppl.constraints.json.pydantic_schema import TypeSchema
    except ImportError as error:
        raise ImportError("a type as JSON needs pydantic: pip install llmppl[json-schema]") from error
    made: list[TypeSchema] = []

    def generator(**options: Any) -> TypeSchema:
        made.append(TypeSchema(**options))
        return made[0]

    try:
        adapter = TypeAdapter(_readable(kind))
        schema = adapter.json_schema(schema_generator=generator)    # type: ignore[arg-type]
    except (PydanticUserError, NameError, RecursionError) as error:
        why = str(error).partition("\n")[0].rstrip(".")
        raise TypeError(
            f"a constraint cannot be the type {shown(kind)}: {why}. A pydantic model, a dataclass, a TypedDict, "
            "Literal[...], an Enum, int, list[...] and the like would work; for other texts Regex(...) or Grammar(...)"
        ) from None
    return adapter, schema, made[0].warnings


def _readable(kind: Any) -> Any:
    """Replace every `typing.TypedDict` in a type by that of `typing_extensions`, which pydantic needs before 3.12."""
    if sys.version_info >= (3, 12):
        return kind
    if typing.is_typeddict(kind) and type(kind).__module__ == "typing":
        from typing_extensions import TypedDict

        hints = {name: _readable(hint) for name, hint in typing.get_type_hints(kind, include_extras=True).items()}
        bare = {
            name: typing.get_args(hint)[0] if typing.get_origin(hint) in (typing.Required, typing.NotRequired) else hint
            for name, hint in hints.items()
        }
        optional = bare.keys() - kind.__required_keys__
        fields = {name: typing.NotRequired[hint] if name in optional else hint for name, hint in bare.items()}
        return TypedDict(kind.__name__, fields)     # type: ignore[operator]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (None, typing.Literal) or (new := tuple(map(_readable, inner))) == inner:
        return kind
    return typing.Union[new] if origin.__module__ == "types" else origin[new]       # noqa: UP007
